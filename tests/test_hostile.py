"""Damaged and hostile jobs: never an error, never much memory or time, never at a neighbour's cost.

Small jobs of the demo corpus are changed at random, a few hundred of them; and some are written to
be as expensive as possible. Each lies in a corpus beside a sound job, which keeps its verdict.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import fr_writer
import pytest

from dl2gpu.report.model import Report
from dl2gpu.scan import scan

Record = dict[str, Any]

NEIGHBOUR: Final = "two-groups-inverted"
SECONDS: Final = 20.0
"""Of the processors. No measure of speed: a scan of these takes a tenth, what runs away minutes."""
MEGABYTES: Final = 500


def peak_of_memory(*, reset: bool = False) -> float:
    """Largest resident size so far (of Linux; elsewhere nothing is measured), in MB."""
    status = Path("/proc/self/status")
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        text = status.read_text()
    except OSError:
        return 0.0
    return int(text.split("VmHWM:")[1].split()[0]) / 1000


@contextmanager
def bounded() -> Iterator[None]:
    """Within the time and the memory that a small corpus may take."""
    before = peak_of_memory(reset=True)
    began = time.process_time()
    yield
    assert time.process_time() - began < SECONDS
    assert peak_of_memory() - before < MEGABYTES


@pytest.fixture(scope="module")
def expected(demo: Path) -> tuple[str, list[str]]:
    """Verdict and fingerprints of the neighbour when it is alone. Also compiles what is needed."""
    scan(str(demo))
    return of_neighbour(scan(str(demo / NEIGHBOUR)), None)


def of_neighbour(report: Report, folder: str | None) -> tuple[str, list[str]]:
    jobs = report.jobs if folder is None else report.jobs.filter(report.jobs["folder"] == folder)
    (verdict,) = jobs["verdict"]
    mine = report.findings.filter(report.findings["job"].is_in(jobs["job"].to_list()))
    return verdict, mine["fingerprint"].to_list()


def assert_sound(root: Path, expected: tuple[str, list[str]]) -> Report:
    """The corpus is scanned, every file accounted for, and the neighbour judged as ever."""
    files = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    with bounded():
        report = scan(str(root))
        report.to_json()
    assert report.inputs["path"].to_list() == files
    faults = [r for r in report.inputs["reason"].drop_nulls() if "fault of dl2gpu" in r]
    assert not faults
    assert of_neighbour(report, "neighbour") == expected
    return report


# --------------------------------------------------------------------------------------------------
# Changed at random

OPS: Final = (
    "send", "recv", "sendrecv", "probe", "wait", "all_reduce", "all_gather", "reduce_scatter",
    "all_to_all", "barrier", "broadcast", "scatter", "reduce", "gather", "scan", "comm_create",
    "finalize", "all_to_all_v", "gather_v", "scatter_v", "coalesced", "something_else",
)  # fmt: skip
NUMBERS: Final = (0, 1, 2, 3, 5, 8, 100, 2**20 - 1, 2**31 - 1, 2**62)
RANKS: Final = (0, 1, 2, 3, 7, 1000, 2**31 - 1)
VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "op": OPS,
    "lane": (0, 1, 2, 5, 2**31 - 1),
    "seq": tuple(range(60)),
    "stream": (None, "s", "t"),
    "blocking": (True, False),
    "split": (True, False),
    "request": tuple(range(8)),
    "requests": ("all", [], [1], [1, 2, 3], [2**62]),
    "mode": ("all", "any", "some"),
    "peer": (*RANKS, "any"),
    "recv_peer": (*RANKS, "any"),
    "matched_peer": RANKS,
    "root": RANKS,
    "tag": (0, 1, 2, "any", 2**62),
    "recv_tag": (0, 1, "any"),
    "matched_tag": (0, 1, -1),
    "returned": ([], [1], [2**62, -1], [1, 1]),
    "send_mode": ("standard", "synchronous", "buffered", "ready"),
    "reduce_op": ("sum", "max", None),
    "dtype": ("f32", "bf16", "unheard of", None),
    "splits": ([], [1, 2], [0], [2**62]),
    "state": ("scheduled", "started", "completed", None),
    "stack": ([], ["f a.py:1"], ["g b.py:2", "h c.py:3"]),
    "flags": tuple(range(0, 256, 17)),
    "group": (1, 2, None),
    "t_created": (0, 2**62, -(2**63), 1_760_000_000_000_000_000),
    "t_completed": (0, 2**62, -(2**63), 1_760_000_900_000_000_000),
} | dict.fromkeys(("count", "count_out", "bytes", "ordinal"), NUMBERS)
ABSURD: Final[tuple[Any, ...]] = (-1, 2**63 - 1, 2**63, -(2**63), 1.5, True, "", "x", [], {}, None)


def operations(doc: list[Record]) -> list[Record]:
    return [r for r in doc if r.get("kind") == "op"]


def groups(doc: list[Record]) -> list[Record]:
    return [r for r in doc if r.get("kind") == "comm"]


def drop(doc: list[Record], rng: random.Random) -> None:
    del doc[rng.randrange(len(doc))]


def double(doc: list[Record], rng: random.Random) -> None:
    doc.insert(rng.randrange(len(doc) + 1), dict(rng.choice(doc)))


def move(doc: list[Record], rng: random.Random) -> None:
    doc.insert(rng.randrange(len(doc)), doc.pop(rng.randrange(len(doc))))


def shuffle(doc: list[Record], rng: random.Random) -> None:
    rng.shuffle(doc)


def cut(doc: list[Record], rng: random.Random) -> None:
    del doc[rng.randrange(len(doc)) :]


def end(doc: list[Record], rng: random.Random) -> None:
    how = rng.choice(["finished", "alive", "crashed", "killed", "odd"])
    doc.append({"kind": "end", "exit": how, "t": rng.choice([0, 2**62, 1_760_000_900_000_000_000])})


def head(doc: list[Record], rng: random.Random) -> None:
    doc[0] |= rng.choice(
        [
            {"rank": rng.choice([0, 1, 5, 2**20 - 1])},
            {"world_size": rng.choice([1, 2, 8, 2**20, 2**31 - 1])},
            {"backend": rng.choice(["nccl", "gloo", "mpi", "unheard of"])},
            {"attempt": rng.choice([0, 1, 2**31 - 1])},
            {"lost_before": rng.choice([0, 1, 5, 2**62])},
            {"job": rng.choice(["a", "b"])},
            {"only_active": True},
            {"waits": False, "p2p": rng.choice([True, False])},
            {"truncated": True},
            {"source": "flight_recorder"},
        ]
    )


def members(doc: list[Record], rng: random.Random) -> None:
    if not groups(doc):
        return
    group = rng.choice(groups(doc))
    ranks = list(group.get("ranks") or ())
    group["ranks"] = rng.choice(
        [[], [*ranks, 99], [*ranks, 2**20 - 1], ranks + ranks, ranks[1:], ranks[::-1], [7]]
    )


def other_comm(doc: list[Record], rng: random.Random) -> None:
    names = [g["id"] for g in groups(doc)] + ["nobody's"]
    for o in operations(doc):
        if "comm" in o and rng.random() < 0.2:
            o["comm"] = rng.choice(names)
        if rng.random() < 0.05:
            o["new_comm"] = rng.choice(names)


def status(doc: list[Record], rng: random.Random) -> None:
    numbers = {f"last_{k}": rng.choice([-1, 0, 5, 2**62]) for k in ("enqueued", "completed")}
    doc.append({"kind": "status", "comm": "w"} | numbers)


def renumber(doc: list[Record], rng: random.Random) -> None:
    factor = rng.choice([1, 2**40, -1])
    for k, o in enumerate(operations(doc)):
        o["seq"] = k * factor


def column(doc: list[Record], rng: random.Random) -> None:
    """One key of many operations, within what the format allows."""
    key = rng.choice(list(VALUES))
    for o in operations(doc):
        if rng.random() < 0.5:
            o[key] = rng.choice(VALUES[key])


def value(doc: list[Record], rng: random.Random) -> None:
    for o in rng.sample(operations(doc), min(3, len(operations(doc)))):
        key = rng.choice(list(VALUES))
        o[key] = rng.choice(VALUES[key])


def absurd(doc: list[Record], rng: random.Random) -> None:
    if operations(doc):
        rng.choice(operations(doc))[rng.choice(list(VALUES))] = rng.choice(ABSURD)


def circular_waits(doc: list[Record], rng: random.Random) -> None:
    """Waits that bear requests, and wait for each other and for themselves."""
    for k, o in enumerate(operations(doc)):
        if rng.random() < 0.3:
            o |= {"op": "wait", "request": k, "requests": [k, k + 1, k - 1]}


CHANGES: Final[list[Callable[[list[Record], random.Random], None]]] = [
    drop, drop, double, double, move, move, shuffle, cut, end, head, head, members, members,
    other_comm, status, renumber, column, column, value, value, absurd, circular_waits,
]  # fmt: skip


def native_mutant(source: Path, folder: Path, rng: random.Random) -> None:
    files = sorted(source.glob("*.jsonl"))
    docs = [[json.loads(line) for line in f.read_text().splitlines()] for f in files]
    for _ in range(rng.choice([1, 1, 2, 3, 5, 10, 30])):
        doc = rng.choice(docs)
        if doc:
            rng.choice(CHANGES)(doc, rng)
        if rng.random() < 0.05:
            doc[:] = [dict(r) for r in rng.choice(docs)]  # claims to be another rank
    if rng.random() < 0.5:  # else most are refused by the reader
        for doc in docs:
            renumber_lanes(doc)
    folder.mkdir(parents=True)
    for file, doc in zip(files, docs, strict=True):
        (folder / file.name).write_text("".join(json.dumps(r) + "\n" for r in doc))


def renumber_lanes(doc: list[Record]) -> None:
    last: dict[str, int] = {}
    for o in operations(doc):
        lane = str(o.get("lane"))
        o["seq"] = last[lane] = last.get(lane, -1) + 1


FR_NAMES: Final = (
    "nccl:all_reduce", "nccl:all_gather", "nccl:broadcast", "nccl:coalesced", "nccl:send 0->1",
    "nccl:recv 1<-0", "nccl:send 0->2147483647", "nccl:all_to_all", "gloo:all_reduce", "x", "",
    "nccl:recv 99<-1",
)  # fmt: skip
FR_VALUES: Final[tuple[Any, ...]] = (
    0,
    1,
    -1,
    2**31 - 1,
    2**62,
    -(2**63),
    None,
    True,
    1.5,
    "",
    "any",
    [],
)


def recorder_mutant(folder: Path, rng: random.Random) -> None:
    """A small Flight Recorder job in some version, with a few absurd values."""
    version = rng.choice([(2, 0), (2, 4), (2, 7), (2, 9), (2, 10)])
    size = rng.randint(2, 4)
    as_json = rng.random() < 0.4
    folder.mkdir(parents=True)
    for rank in range(size):
        entries = []
        for k in range(rng.randint(0, 12)):
            entry = fr_writer.entry(
                k,
                rng.choice(FR_NAMES[: 3 if rng.random() < 0.8 else None]),
                version=version,
                cseq=k,
                state=rng.choice(["completed", "completed", "scheduled", "started"]),
                sizes=((rng.choice([4, 4, 0, 8, 2**62]),),),
            )
            if rng.random() < 0.1:
                entry[rng.choice(list(entry))] = rng.choice(FR_VALUES)
            entries.append(entry)
        world = list(range(size))
        listed = rng.choice([world, world, world, [], [0, 0, 1], [2**31 - 1, 0], world[1:], "junk"])
        content = fr_writer.document(
            entries,
            version=version,
            groups={"0": ("default_pg", listed)},
            status={0: tuple(rng.randint(-1, 20) for _ in range(3))},  # type: ignore[dict-item]
        )
        data = fr_writer.json_form(content) if as_json else fr_writer.dumps(content)
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data))]
        (folder / f"rank_{rank}.{'json' if as_json else 'pkl'}").write_bytes(data)


def mutant(demo: Path, folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    if rng.random() < 0.25:
        recorder_mutant(folder, rng)
        return
    sources = [p for p in sorted(demo.iterdir()) if p.is_dir() and any(p.glob("*.jsonl"))]
    native_mutant(rng.choice(sources), folder, rng)


A_CORPUS: Final = 10
"""Mutants that are scanned together: a scan costs more than a small job does."""


@pytest.mark.parametrize("batch", range(30))
def test_mutants(batch: int, demo: Path, tmp_path: Path, expected: tuple[str, list[str]]) -> None:
    root = tmp_path / "corpus"
    shutil.copytree(demo / NEIGHBOUR, root / "neighbour")
    for seed in range(batch * A_CORPUS, (batch + 1) * A_CORPUS):
        mutant(demo, root / f"mutant-{seed}", seed)
    assert_sound(root, expected)


# --------------------------------------------------------------------------------------------------
# As expensive as possible


def first(rank: int, world: int, backend: str = "nccl", **keys: Any) -> Record:
    return {
        "kind": "header", "format": "dl2gpu.trace", "version": 1, "rank": rank,
        "world_size": world, "backend": backend,
    } | keys  # fmt: skip


def group(name: str, *ranks: int) -> Record:
    return {"kind": "comm", "id": name, "ranks": list(ranks)}


def do(seq: int, op: str, **keys: Any) -> Record:
    return {"kind": "op", "seq": seq, "op": op, "comm": "w"} | keys


def hold(seq: int, requests: list[int] | str = "all", **keys: Any) -> Record:
    return {"kind": "op", "seq": seq, "op": "wait", "requests": requests} | keys


Files = list[list[Record]]


def pair(ops: Callable[[int], list[Record]], backend: str = "nccl") -> Files:
    """Two ranks that share the communicator w."""
    return [[first(r, 2, backend), group("w", 0, 1), *ops(r)] for r in range(2)]


def one_op_communicators() -> Files:
    ops = (o for k in range(100_000) for o in (group(f"c{k}", 0), do(k, "barrier", comm=f"c{k}")))
    return [[first(0, 1), *ops]]


def communicators_declared_apart() -> Files:
    """Every rank has other members for the same names."""
    return [
        [first(r, 4)]
        + [o for k in range(5000) for o in (group(f"c{k}", r, 9), do(k, "barrier", comm=f"c{k}"))]
        for r in range(4)
    ]


def fifty_thousand_lanes() -> Files:
    return pair(lambda r: [do(0, "all_reduce", lane=40_000 * k, count=r) for k in range(50_000)])


def all_claim_one_rank() -> Files:
    return [[first(0, 300), group("w", *range(300)), do(0, "barrier")] for _ in range(300)]


def vast_worlds() -> Files:
    """A million ranks, of which one left a record."""
    return [[first(0, 1 << 20), group("w", 0, 1), do(0, "barrier"), do(1, "finalize")]]


def vast_group_much_pending() -> Files:
    """50,000 members and a thousand operations that wait for them."""
    ops = [do(k, "all_reduce", blocking=False) for k in range(1000)]
    return [[first(0, 50_000), group("w", *range(50_000)), *ops]]


def numbers_with_gaps() -> Files:
    return pair(lambda r: [do(k, "barrier", ordinal=k << 40) for k in range(20_000)])


def one_number_for_all() -> Files:
    return pair(
        lambda r: (
            [do(k, "barrier", ordinal=7) for k in range(20_000)]
            + [do(20_000 + k, "barrier", comm="v", ordinal=k) for k in range(20_000)]
        )
    )


def waits_on_streams() -> Files:
    """Each waits for everything before it."""
    return pair(
        lambda r: [
            o
            for k in range(20_000)
            for o in (do(2 * k, "barrier", stream="s"), hold(2 * k + 1, stream="t"))
        ]
    )


def one_request_for_all() -> Files:
    """Ten thousand waits for a request that each of ten thousand lanes has."""
    n = 10_000
    return pair(
        lambda r: (
            [do(0, "barrier", lane=k, request=1, blocking=False) for k in range(1, n)]
            + [hold(k, [1]) for k in range(n)]
        )
    )


def waits_that_wait_for_all() -> Files:
    many = list(range(3000))
    return pair(
        lambda r: (
            [do(k, "barrier", blocking=False, request=k) for k in many]
            + [hold(3000 + k, many, mode="any") for k in range(300)]
        )
    )


def wide_batch() -> Files:
    """One batch over a thousand streams, all of it without partners."""
    return pair(
        lambda r: (
            [do(k, "send", peer=1 - r, group=1, stream=f"s{k % 1000}") for k in range(3000)]
            + [hold(3000)]
        )
    )


def many_mismatches() -> Files:
    """Thousands of communicators on which the two ranks disagree."""
    return [
        [first(r, 2)]
        + [group(f"c{k}", 0, 1) for k in range(3000)]
        + [
            do(k, "barrier" if r else "all_reduce", comm=f"c{k}", blocking=False)
            for k in range(3000)
        ]
        + [hold(3000)]
        for r in range(2)
    ]


def many_messages_without_partner() -> Files:
    return pair(
        lambda r: (
            [do(k, "send", peer=1 - r, count=k, blocking=False) for k in range(20_000)]
            + [hold(20_000), {"kind": "end", "exit": "finished"}]
        )
    )


def wildcards() -> Files:
    """Receives from anybody, none of which fits."""
    n = 5000
    receives = [do(k, "recv", peer="any", tag=n + k, blocking=False) for k in range(2 * n)]
    sends = [do(k, "send", peer=0, tag=k, blocking=False) for k in range(n)]
    return [
        [first(0, 3, "mpi"), group("w", 0, 1, 2), *receives, hold(2 * n)],
        *([first(r, 3, "mpi"), group("w", 0, 1, 2), *sends, hold(n)] for r in (1, 2)),
    ]


def wildcards_one_by_one() -> Files:
    n = 5000
    return [
        [first(0, 2, "mpi"), group("w", 0, 1)]
        + [do(k, "recv", peer="any", tag="any") for k in range(n)],
        [first(1, 2, "mpi"), group("w", 0, 1)] + [do(k, "send", peer=0, tag=k) for k in range(n)],
    ]


def many_cycles() -> Files:
    n = 300
    return [
        [first(r, n), group("w", *range(n)), do(0, "recv", peer=r ^ 1), do(1, "send", peer=r ^ 1)]
        for r in range(n)
    ]


def creations_in_other_orders() -> Files:
    n = 5000
    return pair(
        lambda r: [do(k, "comm_create", new_comm=f"n{k if r else n - k}") for k in range(n)]
    )


def messages_to_oneself() -> Files:
    return [[first(0, 1, "mpi"), group("w", 0), *(do(k, "send", peer=0) for k in range(5000))]]


def stacks_of_their_own() -> Files:
    return pair(
        lambda r: (
            [do(k, "barrier", stream="s", stack=[f"f{k} a.py:{k + r}"]) for k in range(20_000)]
            + [do(20_000, "barrier" if r else "scan", stack=["g b.py:1"])]
        )
    )


SHAPES: Final = [
    one_op_communicators, communicators_declared_apart, fifty_thousand_lanes, all_claim_one_rank,
    vast_worlds, vast_group_much_pending, numbers_with_gaps, one_number_for_all, waits_on_streams,
    one_request_for_all, waits_that_wait_for_all, wide_batch, many_mismatches,
    many_messages_without_partner, wildcards, wildcards_one_by_one, many_cycles,
    creations_in_other_orders, messages_to_oneself, stacks_of_their_own,
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.__name__)
def test_expensive(
    shape: Callable[[], Files], demo: Path, tmp_path: Path, expected: tuple[str, list[str]]
) -> None:
    root = tmp_path / "corpus"
    shutil.copytree(demo / NEIGHBOUR, root / "neighbour")
    (root / "shape").mkdir()
    for k, lines in enumerate(shape()):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (root / "shape" / f"{k}.jsonl").write_text(text)
    report = assert_sound(root, expected)
    assert report.jobs["folder"].to_list() == ["neighbour", "shape"]


def test_many_small_jobs_of_vast_worlds(
    demo: Path, tmp_path: Path, expected: tuple[str, list[str]]
) -> None:
    """A hundred files of some hundred bytes: no list of a million ranks for each."""
    root = tmp_path / "corpus"
    shutil.copytree(demo / NEIGHBOUR, root / "neighbour")
    for k in range(100):
        folder = root / f"job-{k}"
        folder.mkdir()
        text = "".join(json.dumps(line) + "\n" for line in vast_worlds()[0])
        (folder / "rank.jsonl").write_text(text)
    report = assert_sound(root, expected)
    assert report.jobs["world_size"].max() == 1 << 20
    assert len(report.to_json()) < 10_000_000


@pytest.mark.parametrize("world", [2**31 - 1, 2**62, -1, "many"])
def test_world_sizes_beyond_all(
    world: Any, demo: Path, tmp_path: Path, expected: tuple[str, list[str]]
) -> None:
    root = tmp_path / "corpus"
    shutil.copytree(demo / NEIGHBOUR, root / "neighbour")
    (root / "vast").mkdir()
    lines = [first(0, world), group("w", 0, 1), do(0, "barrier")]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (root / "vast" / "rank_0.jsonl").write_text(text)
    report = assert_sound(root, expected)
    status = dict(report.inputs.select("path", "status").iter_rows())
    assert status["vast/rank_0.jsonl"] == "quarantined"
