"""Any job as Flight Recorder dumps or profiler traces, with the imperfections of real ones.

Made from the tables of a program that :mod:`inject` has run as far as it comes. Dumps are those of
PyTorch 2.9 on NCCL (FORMATS.md sections 2.1 to 2.4): waits are not recorded, and of a batch the end
record alone has the state. Profiles are Kineto's (FORMATS.md section 3): an operation that did not
complete has no kernel. What a fleet needs at speed, :mod:`flight_recorder` writes.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

from dl2gpu.suites.settle import Settled
from dl2gpu.trace.schema import DTYPE_BYTES, OP, Trace

__all__ = ["write_dumps", "write_profiles"]

CALL_NS: Final = 1_500_000
_NAMES: Final = {
    OP["all_reduce"]: "all_reduce", OP["reduce_scatter"]: "_reduce_scatter_base",
    OP["all_gather"]: "_all_gather_base", OP["all_to_all"]: "all_to_all",
    OP["barrier"]: "all_reduce_barrier",
}  # fmt: skip
_DTYPES: Final = {"f32": "Float", "bf16": "BFloat16", "f16": "Half", "i32": "Int"}
_SEND, _RECV = OP["send"], OP["recv"]


@dataclass(frozen=True, slots=True)
class _Calls:
    """What the ranks issued but for waits, a row a call, by rank and order; and who is in what."""

    rows: pl.DataFrame
    members: dict[int, list[int]]
    about: dict[int, str]
    frames: list[list[str]]

    def of(self, rank: int) -> list[dict[str, Any]]:
        """The calls of a rank."""
        return self.rows.filter(pl.col("rank") == rank).to_dicts()

    def groups(self, rank: int) -> list[int]:
        """Communicators that a rank is in."""
        return [comm for comm, ranks in self.members.items() if rank in ranks]


def _calls(trace: Trace, settled: Settled) -> _Calls:
    names = dict(enumerate(DTYPE_BYTES))
    rows = (
        trace.events.with_columns(done=pl.Series(settled.done), started=pl.Series(settled.started))
        .filter(pl.col("op") != OP["wait"])
        .sort("rank", "seq")
        .with_columns(
            message=pl.col("op").is_in([_SEND, _RECV]),
            dtype=pl.col("dtype").replace_strict(names, return_dtype=pl.String, default=None),
            created=pl.col("t_created") + pl.col("rank") * 7,
            # as batch_isend_irecv issues them: a message alone is a batch as well
            batched=pl.col("op").is_in([_SEND, _RECV]),
        )
        .with_columns(
            opens=pl.col("group").is_null()
            | (pl.col("group") != pl.col("group").shift(1).over("rank")).fill_null(True),
            closes=pl.col("batched")
            & (pl.col("group") != pl.col("group").shift(-1).over("rank")).fill_null(True),
        )
        .with_columns(
            cseq=(pl.col("opens") & ~pl.col("message")).cum_sum().over("rank", "comm"),
            pseq=(pl.col("opens") & pl.col("message")).cum_sum().over("rank", "comm"),
            number=pl.int_range(1, pl.len() + 1).over("rank", "comm"),
            place=pl.int_range(pl.len()).over("rank"),
        )
    )
    comms = trace.comms.sort("comm")
    return _Calls(
        rows,
        dict(enumerate(comms["ranks"].to_list())),
        {
            comm: "default_pg" if comm == 0 else about
            for comm, about in enumerate(comms["desc"].to_list())
        },
        trace.stacks.sort("stack")["frames"].to_list(),
    )  # fmt: skip


def _sizes(call: dict[str, Any], size: int) -> tuple[int, int]:
    """Elements that go in, and that come out."""
    count = call["count"]
    if call["count_out"] is not None:
        return count, call["count_out"]
    if call["op"] == OP["all_gather"]:
        return count, count * size
    if call["op"] == OP["reduce_scatter"]:
        return count, max(1, count // size)
    return count, count


def write_dumps(
    trace: Trace,
    settled: Settled,
    folder: Path,
    *,
    ring: int | None = None,
    missing: Collection[int] = (),
    timed: bool = True,
) -> int:
    """Writes a pickle a rank into ``folder``; how many entries.

    Args:
        trace: one job; its rows in the order of ranks and ``seq``.
        settled: how far each row came.
        folder: made where it is not there.
        ring: entries that a dump keeps, the last ones; None: all.
        missing: ranks whose dump was not written.
        timed: are there times of start and end.

    Raises:
        OSError: a file cannot be written.
    """
    calls = _calls(trace, settled)
    folder.mkdir(parents=True)
    total = 0
    for rank in sorted(set(trace.ranks["rank"].to_list()) - set(missing)):
        entries: list[dict[str, Any]] = []
        for call in calls.of(rank):
            entries.append(_entry(calls, call, timed=timed, end=False))
            if call["closes"]:
                entries.append(_entry(calls, call, timed=timed, end=True))
        for number, entry in enumerate(entries):
            entry["record_id"] = number
        kept = entries if ring is None else entries[-ring:]
        config = {
            str(comm): {
                "name": str(comm), "desc": calls.about[comm],
                "ranks": f"[{', '.join(map(str, calls.members[comm]))}]",
            }
            for comm in calls.groups(rank)
        }  # fmt: skip
        document = {
            "version": "2.9", "pg_config": config, "nccl_version": "2.27.3", "entries": kept,
        }  # fmt: skip
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(document, protocol=2))
        total += len(kept)
    return total


def _entry(calls: _Calls, call: dict[str, Any], *, timed: bool, end: bool) -> dict[str, Any]:
    comm, rank = call["comm"], call["rank"]
    members = calls.members[comm]
    message = call["message"]
    coming, going = _sizes(call, len(members))
    batched = call["batched"] and not end
    state = "completed" if call["done"] else "started" if timed and call["started"] else "scheduled"
    if batched:
        state = "scheduled"
    if end:
        name = "nccl:coalesced"
    elif message:
        me, peer = members.index(rank), members.index(call["peer"])
        sends = call["op"] == _SEND
        name = f"nccl:send {me}->{peer}" if sends else f"nccl:recv {me}<-{peer}"
    else:
        name = f"nccl:{_NAMES[call['op']]}"
    frames = []
    for frame in calls.frames[call["stack"]]:
        function, _, where = frame.partition(" ")
        file, _, line = where.rpartition(":")
        frames.append({"name": function, "filename": file, "line": int(line)})
    dtypes = [] if end else [_DTYPES.get(call["dtype"], "Byte")]
    done, created = state == "completed", call["created"]
    return {
        "frames": frames,
        "record_id": 0,
        "pg_id": comm,
        "process_group": (str(comm), calls.about[comm]),
        "collective_seq_id": call["cseq"],
        "p2p_seq_id": call["pseq"],
        "op_id": call["number"],
        "profiling_name": name,
        "time_created_ns": created + (1 if end else 0),
        "input_sizes": [] if end else [[coming]],
        "input_dtypes": dtypes,
        "output_sizes": [] if end else [[going]],
        "output_dtypes": dtypes,
        "state": state,
        "time_discovered_started_ns": created + CALL_NS // 4
        if timed and state != "scheduled" else None,
        "time_discovered_completed_ns": created + CALL_NS // 2 if timed and done else None,
        "retired": done or batched,
        "timeout_ms": 600_000,
        "is_p2p": message and not end,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Profiles

_KERNELS: Final = {
    OP["all_reduce"]: "AllReduce_Sum_{}_RING_LL", OP["all_gather"]: "AllGather_RING_LL",
    OP["reduce_scatter"]: "ReduceScatter_Sum_{}_RING_LL", OP["all_to_all"]: "SendRecv",
    OP["barrier"]: "AllReduce_Sum_f32_RING_LL", _SEND: "SendRecv", _RECV: "SendRecv",
}  # fmt: skip
_COLLECTIVES: Final = {
    OP["all_reduce"]: "allreduce", OP["reduce_scatter"]: "_reduce_scatter_base",
    OP["all_gather"]: "_allgather_base", OP["all_to_all"]: "all_to_all", OP["barrier"]: "barrier",
    _SEND: "send", _RECV: "recv",
}  # fmt: skip


def write_profiles(
    trace: Trace, settled: Settled, folder: Path, *, missing: Collection[int] = (),
    numbered: bool = True,
) -> int:  # fmt: skip
    """Writes a Kineto trace a rank into ``folder``; how many calls.

    Args:
        trace: as for :func:`write_dumps`; so are ``settled``, ``folder`` and ``missing``.
        settled: see there.
        folder: see there.
        missing: see there.
        numbered: do the calls carry ``Seq``, as those of newer versions do.

    Raises:
        OSError: a file cannot be written.
    """
    calls = _calls(trace, settled)
    folder.mkdir(parents=True)
    world = len(calls.members[0])
    base = int(calls.rows["created"].min() or 0)  # type: ignore[arg-type]
    end = (int(calls.rows["created"].max() or 0) - base) / 1e3 + 5e6  # type: ignore[arg-type]
    total = 0
    for rank in sorted(set(trace.ranks["rank"].to_list()) - set(missing)):
        events: list[dict[str, Any]] = [
            {
                "ph": "X", "cat": "Trace", "ts": 0.0, "dur": end, "pid": "Spans",
                "tid": "PyTorch Profiler", "name": "PyTorch Profiler (0)", "args": {"Op count": 0},
            }
        ]  # fmt: skip
        batch: list[dict[str, Any]] = []
        for call in calls.of(rank):
            batch.append(call)
            if call["batched"] and not call["closes"]:
                continue
            if len(batch) > 1:
                first, last = ((c["created"] - base) / 1e3 for c in (batch[0], batch[-1]))
                events.append(_span("nccl:coalesced", first - 2, last - first + 30, rank))
            for one in batch:
                events += _call(calls, one, base, numbered=numbered)
            batch = []
            total += 1
        mine = [
            {
                "pg_name": str(c), "pg_desc": calls.about[c], "backend_config": "cuda:nccl",
                "pg_size": len(calls.members[c]), "ranks": calls.members[c],
            }
            for c in calls.groups(rank)
        ]  # fmt: skip
        document = {
            "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "H200"}],
            "distributedInfo": {
                "backend": "nccl", "rank": rank, "world_size": world, "pg_count": len(mine),
                "pg_config": mine,
            },
            "baseTimeNanoseconds": base, "traceEvents": events,
            "traceName": f"rank{rank}.json",
        }  # fmt: skip
        (folder / f"rank{rank}_trace.json").write_text(json.dumps(document))
    return total


def _span(name: str, ts: float, dur: float, rank: int) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "user_annotation", "name": name, "pid": 1000 + rank, "tid": 1000 + rank,
        "ts": ts, "dur": dur, "args": {},
    }  # fmt: skip


def _call(
    calls: _Calls, call: dict[str, Any], base: int, *, numbered: bool
) -> list[dict[str, Any]]:
    comm, rank, ts = call["comm"], call["rank"], (call["created"] - base) / 1e3
    members = calls.members[comm]
    coming, going = _sizes(call, len(members))
    message = call["message"]
    width = call["dtype"] if call["dtype"] in _DTYPES else "u8"
    about: dict[str, Any] = {
        "Collective name": _COLLECTIVES[call["op"]], "In msg nelems": coming,
        "Out msg nelems": going, "Group size": len(members),
        "dtype": _DTYPES.get(call["dtype"], "Byte"), "In split size": "[]", "Out split size": "[]",
        "Process Group Name": str(comm), "Process Group Description": calls.about[comm],
        "Process Group Ranks": json.dumps(members),
    }  # fmt: skip
    if numbered:
        about["Seq"] = call["pseq"] if message else call["cseq"]
    if message:
        side = "Dst Rank" if call["op"] == _SEND else "Src Rank"
        about[side] = members.index(call["peer"])
    ids = {"External id": call["place"] + 1, "Record function id": call["place"] + 1}
    name = _NAMES.get(call["op"], "")
    if message:
        me, peer = members.index(rank), members.index(call["peer"])
        name = f"send {me}->{peer}" if call["op"] == _SEND else f"recv {me}<-{peer}"
    out = [
        {
            "ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1000 + rank,
            "tid": 1000 + rank, "ts": ts, "dur": 20.0,
            "args": ids | about | {"Rank": members.index(rank)},
        },
        _span(f"nccl:{name}", ts + 1, 15.0, rank),
    ]  # fmt: skip
    if call["done"] and (not call["batched"] or call["closes"]):
        out.append(
            {
                "ph": "X", "cat": "kernel", "pid": 0, "tid": 20 + call["stream"],
                "name": f"ncclDevKernel_{_KERNELS[call['op']].format(width)}"
                "(ncclDevKernelArgsStorage<4096ul>)",
                "ts": ts + 10, "dur": 100.0,
                "args": {"External id": call["place"] + 1, "stream": 20 + call["stream"],
                         "correlation": 90_000 + call["place"]} | about,
            }
        )  # fmt: skip
    return out
