"""Programs whose deadlock depends on buffers, fusion, order or match, with known probabilities.

Each is a small native trace, and a count by hand of how often it deadlocks in each configuration of
``dl2gpu whatif``. The counts are those of combinatorics, not of a replay:

* *Ready orders.* W ranks fuse G gradients k at a time in the order in which they get ready, each
  order of each rank being as likely as any other. A rank's fused operations are an ordered
  partition of the gradients into G / k sets, of which there are M = G! / (k!)^(G/k), all equally
  likely. All sizes are different powers of two, so that no two sets are of the same size: the ranks
  agree only if their partitions do, and the job deadlocks with 1 - M^(1 - W).
* *Head to head.* Both of two ranks send n messages of m bytes before they receive: a deadlock where
  a channel buffers fewer than n m bytes, and none where it does.
* *Matches.* A collector takes a message from whoever sends, n - 1 times, and then one from the last
  of n workers, who each send one: it waits for ever unless that worker was never taken, which
  happens with 1 / n.
* *Host threads.* Two threads of each of W ranks enter one collective each on a stream that they
  share, either first with one half: a deadlock unless all ranks have the same order, 1 - 2^(1 - W).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import factorial
from pathlib import Path
from typing import Any, Final

from dl2gpu.trace.inputs import InputError

__all__ = ["PROGRAMS", "Program", "write"]

MIB: Final = 1 << 20
INFINITE: Final = 1 << 62

Line = dict[str, Any]
Exact = Callable[[int, int], Fraction]
"""(bytes that a channel buffers, gradients fused at a time) to the probability of a deadlock."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program, what is tried of it, and how often it deadlocks.

    Attributes:
        about: what it stands for.
        ranks: the lines of each rank: communicators and operations.
        exact: the probability of a deadlock, by (buffer, fusion).
        buffers, fusions: the rows and columns of its table.
        order, matches: as ``dl2gpu whatif --orders`` and ``--matches`` take them.
    """

    about: str
    ranks: tuple[tuple[Line, ...], ...]
    exact: Exact
    buffers: tuple[int, ...] = (0,)
    fusions: tuple[int, ...] = (1,)
    order: str = "recorded"
    matches: str = "recorded"
    backend: str = "nccl"


@dataclass(slots=True)
class _Rank:
    """Collects the lines of a rank."""

    lines: list[Line] = field(default_factory=list)
    lanes: dict[int, int] = field(default_factory=dict)
    requests: int = 0

    def comm(self, name: str, ranks: list[int]) -> None:
        self.lines.append({"kind": "comm", "id": name, "ranks": ranks})

    def op(self, op: str, site: str, lane: int = 0, **fields: Any) -> None:
        seq = self.lanes[lane] = self.lanes.get(lane, -1) + 1
        own = {"lane": lane} if lane else {}
        if fields.get("stream") and op != "wait":
            own["request"] = self.requests
            self.requests += 1
        self.lines.append({"kind": "op", "seq": seq, "op": op, **own, **fields, "stack": [site]})

    def gradients(self, sizes: tuple[int, ...], comm: str = "dp") -> None:
        for size in sizes:
            self.op(
                "all_reduce", "bucket train/ddp.py:61", comm=comm, stream="gradients",
                count=size // 4, dtype="f32", bytes=size, reduce_op="sum",
            )  # fmt: skip
        self.op("wait", "step train/loop.py:40", requests="all", stream=None)


def _agree(ranks: int, gradients: int) -> Callable[[int], Fraction]:
    def deadlock(fused: int) -> Fraction:
        buckets, rest = divmod(gradients, fused)
        ways = factorial(gradients) // (factorial(fused) ** buckets * factorial(rest))
        return 1 - Fraction(1, ways ** (ranks - 1))

    return deadlock


def _ready(ranks: int, gradients: int, fusions: tuple[int, ...], about: str) -> Program:
    sizes = tuple(MIB << i for i in range(gradients))
    made = []
    for _ in range(ranks):
        rank = _Rank()
        rank.comm("dp", list(range(ranks)))
        rank.gradients(sizes)
        made.append(tuple(rank.lines))
    count = _agree(ranks, gradients)
    return Program(about, tuple(made), lambda _, fused: count(fused), (0, INFINITE), fusions,
                   order="random")  # fmt: skip


def _exchange(messages: int, size: int, gradients: int, fusions: tuple[int, ...]) -> Program:
    made = []
    for me in range(2):
        rank = _Rank()
        rank.comm("pp", [0, 1])
        rank.comm("dp", [0, 1])
        site = "exchange train/pipeline.py:88"
        for op in ("send", "recv"):
            for _ in range(messages):
                rank.op(op, site, comm="pp", stream=None, blocking=True, peer=1 - me, tag=0,
                        count=size // 2, dtype="bf16", bytes=size)  # fmt: skip
        if gradients:
            rank.gradients(tuple(MIB << i for i in range(gradients)))
        made.append(tuple(rank.lines))
    count = _agree(2, gradients) if gradients else lambda _: Fraction(0)
    need = messages * size
    after = f", then {gradients} gradients in any ready order" if gradients else ""
    return Program(
        f"Two pipeline stages that both send {messages} activations of {size // MIB} MiB before "
        f"they receive{after}",
        tuple(made), lambda buffer, fused: Fraction(1) if buffer < need else count(fused),
        (0, *(k * size for k in range(1, messages + 1)), INFINITE), fusions,
        order="random" if gradients else "recorded",
    )  # fmt: skip


def _collector(workers: int, about: str) -> Program:
    everybody = list(range(workers + 1))
    made = []
    for me in everybody:
        rank = _Rank()
        rank.comm("world", everybody)
        common: Line = {"comm": "world", "stream": None, "blocking": True, "tag": 0, "count": 1024,
                        "dtype": "f32", "bytes": 4096}  # fmt: skip
        if me == 0:
            for _ in range(workers - 1):
                rank.op("recv", "collect moe/gather.py:17", **common | {"peer": "any"})
            rank.op("recv", "last moe/gather.py:21", **common | {"peer": workers})
        else:
            rank.op("send", "answer moe/expert.py:30", **common | {"peer": 0})
        made.append(tuple(rank.lines))
    return Program(
        about, tuple(made), lambda _, __: 1 - Fraction(1, workers), (0, INFINITE), matches="all",
        backend="mpi",
    )  # fmt: skip


def _threads(ranks: int) -> Program:
    made = []
    for _ in range(ranks):
        rank = _Rank()
        for name in ("loss", "norm"):
            rank.comm(name, list(range(ranks)))
        for lane, name in enumerate(("loss", "norm")):
            rank.op("all_reduce", f"{name} train/metrics.py:{30 + lane}", lane=lane, comm=name,
                    stream="shared", count=1, dtype="f32", bytes=4, reduce_op="sum")  # fmt: skip
        made.append(tuple(rank.lines))
    return Program(
        f"Two host threads of each of {ranks} ranks on one stream: which of them comes first",
        tuple(made), lambda _, __: 1 - Fraction(1, 2 ** (ranks - 1)), order="threads",
    )  # fmt: skip


PROGRAMS: Final[Mapping[str, Program]] = {
    "ddp-ready-order": _ready(
        2, 6, (1, 2, 3, 6), "DDP on 2 ranks: 6 gradients in any ready order, so many to a bucket"
    ),
    "ddp-three-ranks": _ready(
        3, 4, (1, 2, 4), "DDP on 3 ranks: 4 gradients in any ready order, so many to a bucket"
    ),
    "pipeline-head-to-head": _exchange(4, 4 * MIB, 0, (1,)),
    "pipeline-and-gradients": _exchange(4, 4 * MIB, 4, (1, 2, 4)),
    "moe-collector": _collector(
        3, "A collector of 3 experts takes two answers from anybody, and then one from the last"
    ),
    "moe-collector-8": _collector(
        8, "The same with 8 experts: too many schedules to explore them all in few runs"
    ),
    "two-host-threads": _threads(2),
    "three-ranks-of-threads": _threads(3),
}


def write(out: str | Path) -> None:
    """Writes each program as a folder of native traces, with what is known of it.

    ``exact.json``: the probability of a deadlock for each buffer (bytes; 2^62: unlimited) and
    fusion count, as fractions.

    Raises:
        InputError: a file cannot be written.
    """
    try:
        for name, program in PROGRAMS.items():
            folder = Path(out) / name
            folder.mkdir(parents=True, exist_ok=True)
            for rank, lines in enumerate(program.ranks):
                header = {
                    "kind": "header", "format": "dl2gpu.trace", "version": 1, "job": name,
                    "rank": rank, "world_size": len(program.ranks), "backend": program.backend,
                }  # fmt: skip
                end = {"kind": "end", "exit": "finished"}
                text = "".join(f"{json.dumps(line)}\n" for line in (header, *lines, end))
                (folder / f"rank_{rank}.jsonl").write_text(text, "utf-8")
            known = {
                "about": program.about, "order": program.order, "matches": program.matches,
                "exact": [
                    {"buffer": b, "fusion": f, "probability": str(program.exact(b, f))}
                    for b in program.buffers for f in program.fusions
                ],
            }  # fmt: skip
            (folder / "exact.json").write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    except OSError as e:
        raise InputError(f"{e.filename or out}: cannot be written: {e.strerror}") from e
