"""Profiler traces of small programs, as Kineto writes them: the writer's side of the tests.

``Rank`` collects the events of one process. Its calls give an operation with the events that a
version of PyTorch records of it; what other threads, kernels and Python do is filled in between.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASE = 1_754_900_000_000_000_000
"""``baseTimeNanoseconds`` of the traces."""

KERNELS = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "barrier": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
SENDRECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
SPANS = {"allreduce": "all_reduce", "all_to_allv": "all_to_all", "barrier": "all_reduce_barrier"}


@dataclass
class Rank:
    """The trace of one rank.

    ``seq``: collectives are numbered (new PyTorch); ``metadata``: calls carry their arguments
    (since 2024); ``numbered``: ``Record function id`` is there.
    """

    rank: int
    world: int
    groups: dict[str, list[int]] = field(default_factory=dict)
    backend: str = "nccl"
    seq: bool = True
    metadata: bool = True
    numbered: bool = True
    device: bool = True
    clock: float = 5_100_000_000_000.0
    """Microseconds since BASE."""
    events: list[dict[str, Any]] = field(default_factory=list)
    _number: int = 40
    _counts: dict[tuple[str, bool], int] = field(default_factory=dict)
    _device_free: float = 0.0

    def __post_init__(self) -> None:
        self.groups = self.groups or {"0": list(range(self.world))}
        self.start = self.clock

    @property
    def pid(self) -> int:
        return 1000 + self.rank

    def add(self, **fields: Any) -> None:
        self.events.append(fields)

    def number(self) -> int:
        self._number += 1
        return self._number

    def ids(self) -> dict[str, int]:
        number = self.number()
        return {"External id": number} | ({"Record function id": number} if self.numbered else {})

    def noise(self) -> None:
        """What a trace is full of, and that has nothing to do with communication."""
        self.clock += 20
        ts = self.clock
        self.add(
            ph="X",
            cat="python_function",
            name='nccl.py(12): all_reduce "nccl:all_reduce"',
            pid=self.pid,
            tid=self.pid,
            ts=ts,
            dur=4.5,
            args={"Python id": 1, "Ev Idx": 3},
        )
        self.add(
            ph="X",
            cat="cpu_op",
            name="aten::mm",
            pid=self.pid,
            tid=self.pid,
            ts=ts + 1,
            dur=2.25,
            args=self.ids() | {"Input Dims": [[8, 8], []], "note": {"name": "nccl:x"}},
        )
        if self.device:
            self.add(
                ph="X",
                cat="kernel",
                name="void gemm<nccl>(Params)",
                pid=0,
                tid=7,
                ts=ts + 2,
                dur=10.0,
                args={"stream": 7, "correlation": 1},
            )
            self.add(ph="s", id=1, pid=self.pid, tid=self.pid, ts=ts, cat="ac2g", name="ac2g")

    def call(
        self,
        op: str,
        group: str = "0",
        count: int = 1024,
        *,
        thread: int = 0,
        kernel: bool = True,
        out: int | None = None,
        stream: int = 20,
        took: float = 100.0,
        args: Mapping[str, Any] | None = None,
    ) -> int:
        """One operation; its ``External id``."""
        self.clock += 50
        ts, tid = self.clock, self.pid + thread
        members = self.groups[group]
        p2p = op in {"send", "recv"}
        dispatched = {"allreduce": "allreduce_", "send": "send", "recv": "recv_"}.get(op, f"{op}_")
        self.add(
            ph="X",
            cat="cpu_op",
            name=f"c10d::{dispatched.strip('_')}_",
            pid=self.pid,
            tid=tid,
            ts=ts,
            dur=40.0,
            args=self.ids(),
        )
        key = (group, p2p)
        self._counts[key] = self._counts.get(key, 0) + 1
        own: dict[str, Any] = self.ids()
        meta: dict[str, Any] = {}
        if self.metadata:
            meta = {
                "Collective name": op,
                "In msg nelems": count,
                "Out msg nelems": count if out is None else out,
                "Group size": len(members),
                "dtype": "BFloat16",
                "In split size": "[]",
                "Out split size": "[]",
                "Process Group Name": group,
                "Process Group Description": f"group {group}",
                "Process Group Ranks": json.dumps(members),
            }
            if self.seq:
                meta["Seq"] = self._counts[key]
        self.add(
            ph="X",
            cat="cpu_op",
            name="record_param_comms",
            pid=self.pid,
            tid=tid,
            ts=ts + 1,
            dur=30.0,
            args=own
            | meta
            | ({"Rank": members.index(self.rank)} if meta else {})
            | dict(args or {}),
        )
        name = {"send": f"nccl:send {members.index(self.rank)}->1"}.get(
            op, f"nccl:{SPANS.get(op, op)}"
        )
        self.add(
            ph="X",
            cat="user_annotation",
            name=name,
            pid=self.pid,
            tid=tid,
            ts=ts + 2,
            dur=20.0,
            args=self.ids() | {"Input Dims": [[count]], "Input type": ["c10::BFloat16"]},
        )
        if self.device and kernel:
            begin = max(ts + 10, self._device_free)
            self._device_free = begin + took
            launch = self.number() + 9000
            external = own["External id"] if self.metadata else launch
            self.add(
                ph="X",
                cat="kernel",
                name=KERNELS.get(op, SENDRECV),
                pid=0,
                tid=stream,
                ts=begin,
                dur=took,
                args={"External id": external, "stream": stream, "correlation": launch} | meta,
            )
            self.add(
                ph="X",
                cat="gpu_user_annotation",
                name=name,
                pid=0,
                tid=stream,
                ts=begin,
                dur=took,
                args={"External id": external},
            )
        return int(own["External id"])

    def wait(self, group: str = "0", thread: int = 0) -> None:
        """A wait for the latest operation of the group."""
        self.clock += 45
        meta: dict[str, Any] = {}
        if self.metadata:
            meta = {
                "Collective name": "wait",
                "In msg nelems": 0,
                "Out msg nelems": 0,
                "Group size": 1,
                "dtype": "Byte",
                "Process Group Name": group,
            }
            if self.seq:
                meta["Seq"] = self._counts[group, False]
        self.add(
            ph="X",
            cat="cpu_op",
            name="record_param_comms",
            pid=self.pid,
            tid=self.pid + thread,
            ts=self.clock,
            dur=3.0,
            args=self.ids() | meta,
        )

    def batch(self, *calls: tuple[str, int], group: str = "0", count: int = 64) -> None:
        """Sends and receives launched together: (op, global rank of the peer)."""
        begin = self.clock + 45
        first = len(self.events)
        span = self.ids()
        for i, (op, peer) in enumerate(calls):
            side = {"Dst Rank": peer} if op == "send" else {"Src Rank": peer}
            self.call(op, group, count, kernel=i + 1 == len(calls), stream=24, args=side)
        self.events.insert(
            first,
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": "nccl:coalesced",
                "pid": self.pid,
                "tid": self.pid,
                "ts": begin,
                "dur": self.clock + 45 - begin,
                "args": span,
            },
        )

    def gloo(
        self,
        op: str,
        count: int = 64,
        *,
        took: float = 500.0,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """One operation of a host backend."""
        self.clock += 50
        ids = self.ids()
        self.add(
            ph="X",
            cat="cpu_op",
            name=f"c10d::{op}_",
            pid=self.pid,
            tid=self.pid,
            ts=self.clock,
            dur=30.0,
            args=ids | {"Concrete Inputs": ["", "", "", ""]} | dict(args or {}),
        )
        self.add(
            ph="X",
            cat="user_annotation",
            name="gloo:" + SPANS.get(op, op),
            pid=self.pid,
            tid=self.pid + 17,
            ts=self.clock + 5,
            dur=took,
            args=self.ids() | {"Input Dims": [[count]], "Input type": ["float"]},
        )
        self.clock += took

    def trace(self, *, info: bool = True, end: float | None = None) -> dict[str, Any]:
        """The whole trace as an object."""
        last = max([self.clock + 50, self._device_free]) if end is None else end
        marks = [
            {
                "ph": "X",
                "cat": "Trace",
                "ts": self.start,
                "dur": last - self.start,
                "pid": "Spans",
                "tid": "PyTorch Profiler",
                "name": "PyTorch Profiler (0)",
                "args": {"Op count": 0},
            },
            {
                "name": "process_name",
                "ph": "M",
                "ts": self.start,
                "pid": self.pid,
                "tid": 0,
                "args": {"name": "python3"},
            },
        ]
        out: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "H200"}]}
        if info:
            out["distributedInfo"] = {
                "backend": self.backend,
                "rank": self.rank,
                "world_size": self.world,
                "pg_count": len(self.groups),
                "pg_config": [
                    {
                        "pg_name": name,
                        "pg_desc": f"group {name}",
                        "backend_config": f"cuda:{self.backend}",
                        "pg_size": len(ranks),
                        "ranks": ranks,
                    }
                    for name, ranks in self.groups.items()
                    if self.rank in ranks
                ],
            }
        out["baseTimeNanoseconds"] = BASE
        out["traceEvents"] = marks + self.events
        out["traceName"] = f"rank{self.rank}.json"
        return out


def dumped(trace: Any, indent: int | None = None) -> bytes:
    """The bytes of a trace."""
    return json.dumps(trace, indent=indent).encode()


def write_job(folder: Path, ranks: list[Rank], **how: Any) -> Path:
    """A folder with one file a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for r in ranks:
        (folder / f"rank{r.rank}_trace.json").write_bytes(dumped(r.trace(**how)))
    return folder
