"""Writes big corpora of Flight Recorder dumps: N ranks x M entries with stacks of F frames.

The dumps are those of a 3D-parallel training job (tensor, pipeline and data parallel groups), byte
for byte as PyTorch's pickler writes them. About half a million entries a second a core::

    python benchmarks/fr_corpus.py OUT --ranks 512 --entries 2000 --frames 16
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import fr_writer

VARIABLE = (
    "record_id", "collective_seq_id", "p2p_seq_id", "op_id", "time_created_ns",
    "time_discovered_started_ns", "time_discovered_completed_ns",
)  # fmt: skip
"""Keys whose values differ from call to call of one site."""

STEP_NS = 350_000_000


@dataclass(frozen=True)
class Site:
    """One call site of the training program: what it issues, and from where."""

    name: str
    group: str
    sizes: tuple[tuple[int, ...], ...]
    out_sizes: tuple[tuple[int, ...], ...]
    dtype: str
    stack: int
    batch: bool = False


@dataclass(frozen=True)
class Layout:
    """Ranks as a grid: tensor fastest, then data, then pipeline."""

    ranks: int
    tensor: int
    pipeline: int

    @property
    def data(self) -> int:
        return self.ranks // (self.tensor * self.pipeline)

    @classmethod
    def of(cls, ranks: int, pipeline: int | None = None) -> Layout:
        tensor = next(t for t in (8, 4, 2, 1) if ranks % t == 0)
        if pipeline is not None:
            return cls(ranks, tensor, pipeline)
        pipeline = next(p for p in (4, 2, 1) if (ranks // tensor) % p == 0)
        return cls(ranks, tensor, pipeline)

    def groups(self, rank: int) -> dict[str, tuple[str, list[int]]]:
        """{kind: (name, members)} of the groups of ``rank``."""
        t, d = rank % self.tensor, rank // self.tensor % self.data
        p = rank // (self.tensor * self.data)
        plane = self.tensor * self.data
        first = 1 + self.pipeline * self.data  # after the tensor groups
        return {
            "default": ("0", list(range(self.ranks))),
            "tensor": (
                str(1 + p * self.data + d),
                [p * plane + d * self.tensor + i for i in range(self.tensor)],
            ),
            "pipeline": (
                str(first + d * self.tensor + t),
                [i * plane + d * self.tensor + t for i in range(self.pipeline)],
            ),
            "data": (
                str(first + plane + p * self.tensor + t),
                [p * plane + i * self.tensor + t for i in range(self.data)],
            ),
        }


DESCRIPTIONS = {
    "default": "default_pg", "tensor": "TENSOR_MODEL_PARALLEL_GROUP",
    "pipeline": "PIPELINE_MODEL_PARALLEL_GROUP", "data": "DATA_PARALLEL_GROUP",
}  # fmt: skip
PG_IDS = {"default": 0, "tensor": 1, "pipeline": 2, "data": 3}


def program(layout: Layout, rank: int, layers: int = 6) -> list[list[Site]]:
    """One training step of ``rank``: batches (usually of one) of calls."""
    p, stages = rank // (layout.tensor * layout.data), layout.pipeline
    hidden = ((2048, 1, 4096),)

    def send(to: int, stack: int) -> Site:
        return Site(f"nccl:send {p}->{to}", "pipeline", hidden, hidden, "BFloat16", stack, True)

    def recv(source: int, stack: int) -> Site:
        return Site(f"nccl:recv {p}<-{source}", "pipeline", hidden, hidden, "BFloat16", stack, True)

    step: list[list[Site]] = []
    for micro in range(4):
        if p > 0:
            step.append([recv(p - 1, 0)])
        for layer in range(layers):
            stack = 2 + 2 * layer
            step.append([Site("nccl:all_reduce", "tensor", hidden, hidden, "BFloat16", stack)])
            step.append([Site("nccl:all_reduce", "tensor", hidden, hidden, "BFloat16", stack + 1)])
        if p < stages - 1:
            step.append([send(p + 1, 1)])
        if p < stages - 1 and micro:
            step.append([recv(p + 1, 40)])
        for layer in range(layers):
            size = ((1024 * (layer + 1), 4096),)
            step.append([Site("nccl:all_reduce", "tensor", size, size, "BFloat16", 50 + layer)])
        if p > 0 and micro:
            step.append([send(p - 1, 41)])
    if 0 < p < stages - 1:  # the last exchange as one batch
        step.append([recv(p + 1, 42), send(p - 1, 42)])
    elif p == 0 and stages > 1:
        step.append([recv(p + 1, 42)])
    elif stages > 1:
        step.append([send(p - 1, 42)])
    for bucket in range(4):
        whole, part = 1 << 22, (1 << 22) // layout.data
        step.append([
            Site("nccl:_reduce_scatter_base", "data", ((whole,),), ((part,),), "Float", 60 + bucket)
        ])  # fmt: skip
    for bucket in range(4):
        whole, part = 1 << 22, (1 << 22) // layout.data
        step.append([
            Site("nccl:_all_gather_base", "data", ((part,),), ((whole,),), "BFloat16", 70 + bucket)
        ])  # fmt: skip
    step.append([Site("nccl:all_reduce", "default", ((1,),), ((1,),), "Float", 80)])
    return step


def stacks(count: int, depth: int) -> list[list[dict[str, Any]]]:
    """``count`` stacks of ``depth`` frames that share their outer half."""
    outer = [
        fr_writer.frame(f"run_{i}", f"/workspace/train/loop_{i % 5}.py", 40 + 7 * i)
        for i in range(depth // 2)
    ]
    out = []
    for site in range(count):
        inner = [
            fr_writer.frame(
                f"layer_{site % 9}_call_{i}",
                f"/opt/conda/lib/python3.11/site-packages/torch/nn/modules/m{(site + i) % 13}.py",
                100 + 31 * (site % 17) + i,
            )
            for i in range(depth - len(outer) - 1)
        ]
        api = fr_writer.frame(
            f"api_{site % 6}",
            "/opt/conda/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
            2000 + site % 6,
        )
        out.append([api, *inner, *outer][:depth])
    return out


def entry_dict(site: Site, groups: Any, version: Any, frames: Any) -> Any:
    """A whole entry of ``site``; the values under :data:`VARIABLE` do not matter."""
    return fr_writer.entry(
        0, site.name, version=version, group=(groups[site.group][0], DESCRIPTIONS[site.group]),
        pg_id=PG_IDS[site.group], cseq=0, sizes=site.sizes, out_sizes=site.out_sizes,
        dtype=site.dtype, state="scheduled" if site.batch else "completed",
        retired=True, duration=None if site.batch else 0.15, frames=frames,
    )  # fmt: skip


class _Template:
    """The bytes of an entry around its variable numbers."""

    def __init__(self, pickler: fr_writer.TorchPickler, entry: dict[str, Any]) -> None:
        pieces = []
        pickler.out = bytearray(b"}(")
        for key, value in entry.items():
            pickler.string(key)
            if key in VARIABLE:
                pieces.append(bytes(pickler.out))
                pickler.out = bytearray()
            else:
                pickler.value(value)
        self.pieces = pieces
        self.end = bytes(pickler.out) + b"u"


def _number(value: int | None) -> bytes:
    if value is None:
        return b"N"
    if value < 1 << 8:
        return b"K" + bytes([value])
    if value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def rank_dump(
    rank: int, layout: Layout, entries: int, depth: int | None = 16, version: Any = (2, 9)
) -> bytes:
    """Dump of one rank after ``entries`` records, in a version from 2.0 on."""
    groups = layout.groups(rank)
    pickler = fr_writer.TorchPickler()
    step = program(layout, rank)
    trees = None if depth is None else stacks(90, depth)
    if trees is not None:
        pickler.shared = frozenset(id(f) for tree in trees for f in tree)
    document = fr_writer.document(
        [], version=version,
        groups={groups[k][0]: (DESCRIPTIONS[k], groups[k][1]) for k in groups},
        status=dict.fromkeys(PG_IDS.values(), (1, 1, 1)),
    )  # fmt: skip
    pickler.out += b"}("
    for key, value in document.items():
        if key != "entries":
            pickler.string(key)
            pickler.value(value)
    pickler.string("entries")
    pickler.out += b"]("
    out = [bytes(pickler.out)]
    templates: dict[Any, _Template] = {}
    counters: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    record = 0
    for now, batch in _calls(step, entries):
        calls: list[Site] = list(batch)
        if len(batch) > 1:
            calls.append(Site("nccl:coalesced", batch[0].group, (), (), "Float", batch[0].stack))
        count = counters[batch[0].group]
        count[1 if batch[0].batch else 0] += 1
        for site in calls:
            count[2] += 0 if site.name.endswith("coalesced") else 1
            member = len(batch) > 1 and site.batch
            key = (site, member)
            made = templates.get(key)
            frames = None if trees is None else trees[site.stack]
            if made is None or made.end == b"":
                entry = entry_dict(site, groups, version, frames)
                if site.batch and not member:
                    entry |= {"state": "completed"}
                first = made is None
                made = templates[key] = _Template(pickler, entry)
                if first:
                    # the first time strings and frames are written out: encode again next time
                    templates[key] = _Template.__new__(_Template)
                    templates[key].pieces, templates[key].end = [], b""
            done = None if member else now + 90_000_000
            numbers = (record, count[0], count[1], count[2], now + record, done, done)
            for piece, number in zip(made.pieces, numbers, strict=True):
                out.append(piece)
                out.append(_number(number))
            out.append(made.end)
            record += 1
        if record >= entries:
            break
    pickler.out = bytearray(b"eu")
    pickler.put()
    out.append(bytes(pickler.out) + b".")
    return b"".join(out)


def _calls(step: list[list[Site]], entries: int) -> Iterator[tuple[int, list[Site]]]:
    for number in range(entries):
        for batch in step:
            yield fr_writer.CREATED + number * STEP_NS, batch


def write(
    folder: Path, ranks: int, entries: int, depth: int | None = 16, version: Any = (2, 9),
    pipeline: int | None = None,
) -> int:  # fmt: skip
    """Write one job of ``ranks`` dumps into ``folder``; returns the bytes written.

    ``pipeline`` stages: 1 leaves collectives only, None takes what divides the ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layout = Layout.of(ranks, pipeline)
    total = 0
    for rank in range(ranks):
        data = rank_dump(rank, layout, entries, depth, version)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
        total += len(data)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--pipeline", type=int, help="stages; 1: collectives only")
    args = parser.parse_args()
    for job in range(args.jobs):
        name = args.out / f"job_{job}" if args.jobs > 1 else args.out
        size = write(name, args.ranks, args.entries, args.frames or None, pipeline=args.pipeline)
        print(f"{name}: {args.ranks} ranks x {args.entries} entries, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
