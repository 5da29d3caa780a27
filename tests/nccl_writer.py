"""Writes logs as NCCL and RCCL of several versions write them: lines of FORMATS.md section 5.

A :class:`Job` has processes and communicators with pointers of their own, as a real job does; its
methods give lines, and the tests put them in files with whatever a launcher does to them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import polars as pl

DTYPES = {"i8": 0, "u8": 1, "i32": 2, "i64": 4, "f16": 6, "f32": 7, "f64": 8, "bf16": 9}
REDUCTIONS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
NAMES = {
    "all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast", "reduce": "Reduce", "send": "Send", "recv": "Recv",
    "all_to_all": "AlltoAll", "gather": "Gather", "scatter": "Scatter",
}  # fmt: skip

PREFIXES = (
    "{}",
    "{label}: {}",
    "[rank{label}]: {}",
    "[1,{label}]<stdout>:{}",
    "(RayTrainWorker pid={pid}, ip=10.0.0.1) {}",
    "2025-03-04T10:11:12.123456Z stdout F {}",
    "\x1b[36m(worker)\x1b[0m {}",
    "[2025-03-04 10:11:12] {}",
    "B-job17/0 [default{label}]:{}",
)
"""What launchers put before a line."""


@dataclass
class Process:
    """A process that drives one device, and what NCCL calls of its own it has."""

    rank: int
    host: str
    pid: int
    device: int
    threads: list[int]
    calls: dict[int, int] = field(default_factory=dict)

    def says(self, text: str, thread: int = 0) -> str:
        return f"{self.host}:{self.pid}:{self.threads[thread]} [{self.device}] NCCL INFO {text}"


@dataclass
class Comm:
    """A communicator: its members' global ranks, and the pointer that each of them has for it."""

    members: list[int]
    pointers: dict[int, int]
    comm_id: int
    parent: Comm | None = None
    color: int = 0
    split: int = 0


class Job:
    """Processes and communicators of a job under one version of the library."""

    def __init__(self, ranks: int, version: str = "2.18", seed: int = 0, threads: int = 1) -> None:
        self.version = version
        self.random = random.Random(seed)
        self.processes = [
            Process(r, f"gpu-a{1 + r // 4}", 7000 + 3 * r, r % 4,
                    [7000 + 3 * r + t for t in range(threads)])
            for r in range(ranks)
        ]  # fmt: skip
        self.counts: dict[tuple[int, int], int] = {}

    @property
    def minor(self) -> int:
        return 18 if self.version == "rccl" else int(self.version.split(".")[1])

    def comm(
        self, members: Sequence[int], pointer: int | None = None, parent: Comm | None = None,
        color: int = 0, split: int = 0,
    ) -> Comm:  # fmt: skip
        base = pointer or self.random.randrange(0x550000000000, 0x55FFFFFFFFFF)
        pointers = {r: base + 0x1000 * k for k, r in enumerate(members)}
        return Comm(list(members), pointers, self.random.getrandbits(63) | 1, parent, color, split)

    def banner(self) -> str:
        if self.version == "rccl":
            return "RCCL version 2.18.3+hip6.0"
        return f"NCCL version {self.version}.3+cuda12.4"

    def _line(self, c: Comm, rank: int, event: str) -> str:
        p = self.processes[rank]
        text = f"comm {c.pointers[rank]:#x} rank {c.members.index(rank)} nranks {len(c.members)}"
        text += f" cudaDev {p.device}"
        if (self.minor >= 18 and "Init" in event) or self.minor < 8:
            text += f" nvmlDev {p.device}"
        if self.minor >= 8:
            text += f" busId {p.device + 1}000"
        if "Init" in event:
            if c.parent is not None and self.minor >= 21:
                text += f" parent {c.parent.pointers[rank]:#x}"
                if self.minor >= 23:
                    text += f" {'childCount' if self.minor >= 29 else 'splitCount'} {c.split}"
                text += f" color {c.color} key {c.members.index(rank)}"
            if self.minor >= 16 and not (c.parent is not None and self.minor >= 23):
                text += f" commId {c.comm_id:#x}"
            if self.minor >= 21:
                text = ("ncclCommSplit " if c.parent else "ncclCommInitRankConfig ") + text
            if self.minor >= 29 and c.parent is None and event == "Init START":
                text = f"[Rank {rank}] {text}"
        dash = (
            "- " if c.parent is not None and event == "Init START" and self.minor >= 23 else " - "
        )
        return p.says(f"{text}{dash}{event}")

    def init(self, c: Comm) -> dict[int, list[str]]:
        """Lines of the creation, of each member."""
        events = ["Init START", "Init COMPLETE"] if self.minor >= 18 else ["Init COMPLETE"]
        out = {r: [self._line(c, r, e) for e in events] for r in c.members}
        if self.minor >= 20:
            for r, lines in out.items():
                p = self.processes[r]
                lines.insert(1, p.says(
                    f"comm {c.pointers[r]:#x} rank {c.members.index(r)} nRanks {len(c.members)} "
                    f"nNodes 1 localRanks {len(c.members)} localRank 0 MNNVL 0"
                ))  # fmt: skip
        for r, lines in out.items():
            lines.insert(-1, self.processes[r].says("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"))
        return out

    def end(self, c: Comm, rank: int, event: str = "Destroy COMPLETE") -> str:
        return self._line(c, rank, event)

    def call(
        self, c: Comm, rank: int, op: str, count: int = 1024, dtype: str = "f32",
        reduction: str = "sum", root: int = 0, stream: int = 0x5601CF83EB00, thread: int = 0,
        bump: bool = True,
    ) -> str:  # fmt: skip
        """One call; ``root`` is a rank within the communicator, of the peer for send and recv."""
        key = (c.pointers[rank], rank)
        at = self.counts.get(key, 0)
        if bump:
            self.counts[key] = at + 1
        shown = 0 if self.minor >= 27 else at
        a, b = (f"{self.random.randrange(0x7F0000000000, 0x7FFFFFFFFFFF):#x}" for _ in range(2))
        text = (
            f"{NAMES[op]}: opCount {shown:x} sendbuff {'(nil)' if op == 'recv' else a} "
            f"recvbuff {'(nil)' if op == 'send' else b} "
            f"{'acc (nil) ' if self.version == 'rccl' else ''}"
            f"count {count} datatype {DTYPES[dtype]} op {REDUCTIONS[reduction]} root {root} "
            f"comm {c.pointers[rank]:#x} [nranks={len(c.members)}] stream {stream:#x}"
        )
        if self.version == "rccl":
            text += f" task 0 globalrank {c.members.index(rank)}"
        return self.processes[rank].says(text, thread)


def interleaved(parts: Iterable[Sequence[str]], chance: random.Random) -> list[str]:
    """The lines of all parts in one order, each part's own order kept."""
    queues = [list(p) for p in parts if p]
    out = []
    while queues:
        k = chance.randrange(len(queues))
        out.append(queues[k].pop(0))
        if not queues[k]:
            queues.pop(k)
    return out


def frame(*files: Sequence[str]) -> pl.DataFrame:
    """Lines of files as the grammar takes them."""
    rows = [
        (number, line, text)
        for number, lines in enumerate(files)
        for line, text in enumerate(lines, 1)
    ]
    schema = {"file": pl.Int32, "line": pl.Int64, "text": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row")
