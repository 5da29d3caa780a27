"""The working form of a trace: events in program order, with the facts that every stage needs.

``prepare`` gives one frame, sorted by ``(job, rank, seq, lane)``, whose row index ``i`` is the
program position used wherever an order is needed: within a lane, within a device queue, within a
channel. Everything downstream refers to events by ``i``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from dl2gpu.analysis.replay_kernel import passed_by_host
from dl2gpu.engine.arrays import Array, plain
from dl2gpu.engine.base import Engine
from dl2gpu.engine.cpu import CPU
from dl2gpu.trace.order_kernel import in_order
from dl2gpu.trace.schema import DTYPE_BYTES, EXIT, OP, RANKS, STATE, Trace, conform

__all__ = ["BACKEND_CLASS", "Prepared", "backend_class", "most_ranks", "prepare"]

NCCL_LIKE: Final = 0
GLOO: Final = 1
MPI: Final = 2
BACKEND_CLASS: Final = {"gloo": GLOO, "c10d": GLOO, "mpi": MPI}
"""Default semantics by backend (TRACE_FORMAT.md); every other backend behaves like NCCL."""

KIND: Final = {"synchronising": 0, "root_sends": 1, "root_receives": 2, "message": 3}
"""Kinds of node."""

ROLE: Final = {"none": 0, "member": 1, "root": 2, "send": 3, "recv": 4, "probe": 5}
"""What an event is at its node."""

LATE_NS: Final = 30_000_000_000
"""A completion this long after the job's last sign of issuing anything is an abort, not progress.

A timeout's abort marks the stuck operations completed minutes later, while nobody has enqueued
anything in between (DESIGN.md section 4). The shortest timeouts in use are of minutes.
"""


def backend_class(backend: str | None) -> int:
    """Class of a backend's semantics: 0 NCCL and its kin, 1 gloo, 2 MPI. ``cpu:gloo`` is gloo."""
    name = (backend or "").lower().rsplit(":", 1)[-1]
    return BACKEND_CLASS.get(name, NCCL_LIKE)


@dataclass(frozen=True)
class Prepared:
    """A trace made ready for analysis.

    Attributes:
        trace: the tables as read.
        events: columns of the event table the analysis needs, sorted by (job, rank, seq, lane), and
            ``i`` UInt32 row number; ``r`` UInt32 row of ``ranks``; ``done`` Boolean: a recorded and
            trusted completion (rule 7); ``doubted`` Boolean: a completion taken back (an abort);
            ``passed`` Boolean: complete because the record shows that its host went on.
        jobs: the jobs table and ``semantics`` Int8 (backend class), ``states`` Boolean (completion
            is observed: post-mortem evidence), ``joined`` Boolean (the states of a whole program
            are a dump's), ``world`` Int32 (ranks 0..world-1 are expected).
        ranks: the ranks table, one row for each rank that has a record, and ``r`` its number.
        comms: the comms table and ``size`` Int32 (0 = unknown), with one row more for each job
            that has a ``finalize`` without a communicator.
        engine: where all that follows runs.
    """

    trace: Trace
    events: pl.DataFrame
    jobs: pl.DataFrame
    ranks: pl.DataFrame
    comms: pl.DataFrame
    engine: Engine = CPU


_KEEP: Final = (
    "job", "rank", "lane", "seq", "op", "stream", "blocking", "request", "requests", "mode",
    "comm", "new_comm", "split", "ordinal", "peer", "tag", "recv_peer", "recv_tag", "send_mode",
    "root", "reduce_op", "count", "count_out", "dtype", "bytes", "splits", "group", "state",
    "t_created", "t_started", "t_completed", "matched_peer", "matched_tag",
    "returned", "stack", "flags",
)  # fmt: skip


def _in_order(events: pl.DataFrame) -> bool:
    """Are the rows already sorted by (job, rank, seq, lane)? Readers mostly deliver them so."""
    return bool(in_order(*(plain(events[c]) for c in ("job", "rank", "seq", "lane"))))


_ORDER: Final = ("job", "rank", "seq", "lane")


def _sorted(events: pl.DataFrame) -> pl.DataFrame:
    """The rows by (job, rank, seq, lane): one sort of the four packed into 64 bits, if they fit.

    Columns that are null throughout are not carried along.
    """
    columns = [events[c].to_numpy() for c in _ORDER]
    lows = [int(c.min()) for c in columns]
    widths = [(int(c.max()) - low).bit_length() for c, low in zip(columns, lows, strict=True)]
    if sum(widths) > 63:
        return events.sort(_ORDER)
    key = np.zeros(events.height, np.int64)
    for column, low, width in zip(columns, lows, widths, strict=True):
        key = (key << width) | (column.astype(np.int64) - low)
    empty = [c for c in events.columns if events[c].null_count() == events.height]
    full = events.drop(empty)[np.argsort(key)]
    nulls = (pl.lit(None, events.schema[c]).alias(c) for c in empty)
    return full.with_columns(nulls).select(events.columns)


def prepare(trace: Trace, engine: Engine = CPU) -> Prepared:
    """Sorts the events and derives what all stages share. See :class:`Prepared`."""
    events = trace.events.select(_KEEP)
    if not _in_order(events):
        events = _sorted(events)
    # said, so that groups by job need no table of keys
    events = events.with_columns(pl.col("job").set_sorted()).with_row_index("i")

    events = _sizes(events)
    ranks, events = _number_ranks(trace, events)
    comms, events = _finalize_comms(trace, events)

    facts = engine.collect(_job_facts(events))
    jobs = conform(trace.jobs, "jobs").join(facts, on="job", how="left").sort("job")
    semantics = pl.Series("semantics", [backend_class(b) for b in jobs["backend"]], dtype=pl.Int8)
    members = comms.group_by("job").agg(
        member_max=pl.col("ranks").list.max().max(),
    )
    seen = ranks.group_by("job").agg(rank_max=pl.col("rank").max())
    jobs = (
        jobs.with_columns(semantics)
        .join(members, on="job", how="left")
        .join(seen, on="job", how="left")
        .with_columns(
            # gloo without a single completion has states that say nothing (they stay scheduled)
            states=pl.when(pl.col("semantics") == GLOO)
            .then(pl.col("any_completed"))
            .otherwise(pl.col("any_completed") | pl.col("any_state"))
            .fill_null(False),
            # of several records (merge.py) the strongest, whose operations these mostly are
            source=pl.col("source").str.split("+").list.first(),
            # a whole program whose states are a dump's (merge_states.py)
            joined=pl.col("waits").fill_null(False)
            & pl.col("source").str.split("+").list.contains("flight_recorder"),
            world=pl.coalesce(
                pl.col("world_size"), pl.max_horizontal("member_max", "rank_max") + 1
            ).fill_null(0),
        )
        .drop("member_max", "rank_max")
        .sort("job")
    )
    events = _facts(events, jobs, ranks, engine)
    return Prepared(trace, events, jobs, ranks, comms, engine)


def most_ranks(present: int) -> int:
    """Missing ranks are listed up to this number, for a job of which so many are present."""
    return 4096 + 16 * present


def dtype_widths() -> pl.DataFrame:
    """Bytes of an element, by data type code: ``dtype`` Int32, ``width`` Int64."""
    return pl.DataFrame(
        {"dtype": range(len(DTYPE_BYTES)), "width": list(DTYPE_BYTES.values())},
        schema={"dtype": pl.Int32, "width": pl.Int64},
    )


def _sizes(events: pl.DataFrame) -> pl.DataFrame:
    """``bytes`` from count and data type where the source does not give them."""
    if not events["bytes"].null_count():
        return events
    width = dtype_widths()["width"]
    codes = events["dtype"]
    known = pl.select(pl.when(codes < len(width)).then(codes)).to_series()
    return events.with_columns(
        bytes=pl.coalesce("bytes", pl.col("count") * width.gather(known).alias("width"))
    )


def _number_ranks(trace: Trace, events: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The ranks table numbered by (job, rank), and the events with the number ``r`` of their rank.

    Ranks that have events but no row get one. The rows of the events are sorted by (job, rank), so
    their runs are numbered, and only the heads of the runs are looked up.
    """
    job, rank = events["job"].to_numpy(), events["rank"].to_numpy()
    change = np.empty(len(job), dtype=bool)
    change[:1] = False
    change[1:] = (job[1:] != job[:-1]) | (rank[1:] != rank[:-1])
    first = np.flatnonzero(change) if len(job) else np.zeros(0, np.int64)
    first = np.concatenate([[0], first]) if len(job) else first
    heads = pl.DataFrame({"job": job[first], "rank": rank[first]})
    known = conform(trace.ranks, "ranks").unique(["job", "rank"], keep="first", maintain_order=True)
    extra = heads.join(known.select("job", "rank"), on=["job", "rank"], how="anti")
    if extra.height:
        blank = extra.with_columns(
            exit=pl.lit(EXIT["unknown"], pl.UInt8),
            truncated=pl.lit(False),
            lost_before=pl.lit(0, pl.Int64),
            only_active=pl.lit(False),
        )
        known = pl.concat([known, conform(blank, "ranks")])
    ranks = known.select(RANKS.keys()).sort("job", "rank").with_row_index("r")
    rows = heads.join(
        ranks.select("job", "rank", "r"), on=["job", "rank"], how="left", maintain_order="left"
    )["r"].to_numpy()
    width = np.diff(np.append(first, len(job)))
    return ranks, events.with_columns(pl.Series("r", np.repeat(rows, width), dtype=pl.UInt32))


def _finalize_comms(trace: Trace, events: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Comms with sizes; ``finalize`` gets a communicator of the whole job (TRACE_FORMAT.md)."""
    comms = (
        conform(trace.comms, "comms")
        .sort("comm")
        .with_columns(size=pl.col("ranks").list.n_unique().fill_null(0).cast(pl.Int32))
    )
    ends = events.filter(pl.col("op") == OP["finalize"])["job"].unique().sort()
    if ends.is_empty():
        return comms, events
    world = dict(zip(trace.jobs["job"], trace.jobs["world_size"], strict=True))
    seen = dict(events.group_by("job").agg(pl.col("rank").unique()).iter_rows())
    n = comms.height
    rows = []
    for k, job in enumerate(ends):
        size = world.get(job) or max(seen[job]) + 1
        # a damaged world size must not fill the memory: only so many ranks without record are named
        named = range(min(size, most_ranks(len(seen[job]))))
        rows.append(
            {
                "comm": n + k,
                "job": job,
                "id": "(whole job)",
                "ranks": sorted({*named, *seen[job]}),
                "size": size,
            }
        )
    added = pl.DataFrame(rows, schema_overrides=comms.schema)
    comms = pl.concat([comms, added], how="diagonal")
    whole = pl.DataFrame({"job": ends, "whole": range(n, n + len(ends))}).cast(pl.Int32)
    events = (
        events.join(whole, on="job", how="left", maintain_order="left")
        .with_columns(
            comm=pl.when(pl.col("op") == OP["finalize"])
            .then(pl.col("whole"))
            .otherwise(pl.col("comm"))
        )
        .drop("whole")
    )
    return comms, events


def _job_facts(events: pl.DataFrame) -> pl.LazyFrame:
    completed = pl.col("state") == STATE["completed"]
    return (
        events.lazy()
        .select(
            "job",
            last_created="t_created",
            any_completed=completed.fill_null(False).cast(pl.Int8),
            any_state=(pl.col("state") > 0).fill_null(False).cast(pl.Int8),
        )
        .group_by("job")
        .agg(
            pl.len().alias("events"),
            pl.col("last_created", "any_completed", "any_state").max(),
        )
        .with_columns(pl.col("any_completed", "any_state") > 0)
    )


def _facts(
    events: pl.DataFrame, jobs: pl.DataFrame, ranks: pl.DataFrame, engine: Engine
) -> pl.DataFrame:
    """``done`` and ``doubted``: which recorded completions are believed (rule 7)."""
    completed = pl.col("state") == STATE["completed"]
    passed = _passed(events, jobs, ranks)
    if not jobs["states"].any():
        return events.with_columns(
            done=pl.lit(False), doubted=pl.lit(False), passed=pl.Series(passed)
        )
    # late completions are rare: find them on their own, the rest needs no look at the job's times
    slow = (pl.col("t_completed") - pl.coalesce("t_started", "t_created") > LATE_NS).fill_null(
        False
    )
    late = engine.collect(
        events.lazy()
        .filter(completed & slow)
        .select("i", "job", "t_completed")
        .join(jobs.lazy().select("job", "last_created"), on="job")
        .filter(pl.col("t_completed") - pl.col("last_created") > LATE_NS)
        .select("i")
    )["i"].to_numpy()
    done = (events["state"].to_numpy() == STATE["completed"]) & _per_event(events, jobs["states"])
    doubted = np.zeros(len(done), np.bool_)
    doubted[late] = done[late]
    # of what no dump lists, as the making of communicators, the host's going on is the only sign
    done |= passed & _per_event(events, jobs["joined"])
    return events.with_columns(
        done=pl.Series(done & ~doubted), doubted=pl.Series(doubted), passed=pl.Series(passed)
    )


def _passed(events: pl.DataFrame, jobs: pl.DataFrame, ranks: pl.DataFrame) -> Array:
    """bool[n]: what a record without states shows to be complete, because its host went on.

    The record of a rank that was alive, died or was killed, or that is a window, is the prefix that
    it had issued: all but the last operation of a lane was passed. A host operation that blocks was
    then complete, and what stands before a wait for everything was complete when the host passed
    that wait.
    """
    of_job = jobs.select(
        # of a source that records waits
        told=pl.col("waits").fill_null(False) & (~pl.col("states") | pl.col("joined")),
    )[ranks["job"].to_numpy()]
    prefix = (
        ranks["exit"].is_in([EXIT[e] for e in ("alive", "crashed", "killed", "window")]).to_numpy()
        & of_job["told"].to_numpy()
    )
    if not prefix.any():
        return np.zeros(events.height, np.bool_)
    host = events["stream"].is_null().to_numpy()
    blocking = events["blocking"].fill_null(False).to_numpy()
    wait = events["op"].to_numpy() == OP["wait"]
    everything = np.zeros(events.height, np.bool_)
    if wait.any():
        everything = wait & host & (events["requests"].list.len().fill_null(0) == 0).to_numpy()
    out: Array = passed_by_host(
        plain(events["r"]),
        plain(events["lane"]),
        plain(prefix),
        host & (blocking | wait),
        everything,
    )
    return out


def _per_event(events: pl.DataFrame, of_job: pl.Series) -> Array:
    """A column of the jobs table (sorted by job) for each event."""
    out: Array = of_job.to_numpy().astype(np.bool_)[events["job"].to_numpy()]
    return out


def is_collective(op: pl.Expr) -> pl.Expr:
    """Operations that all members of a communicator take part in."""
    return op >= OP["all_reduce"]


def lost_start() -> pl.Expr:
    """Rows of ranks whose record lacks its start, or may lack it."""
    return pl.col("lost_before").fill_null(1) > 0


def is_lossy() -> pl.Expr:
    """Rows of ranks that lost their start, or list active operations only."""
    return lost_start() | pl.col("only_active").fill_null(False)
