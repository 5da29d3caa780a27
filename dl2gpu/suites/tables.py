"""The event table of some jobs of a fleet."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.suites.mixture import Job
from dl2gpu.suites.program import FRAMES, STREAMS, Program, communicators, program
from dl2gpu.trace.schema import (
    DTYPE_BYTES,
    EXIT,
    MODE,
    OP,
    SEND_MODE,
    STACKS,
    StringTable,
    Trace,
    conform,
)

__all__ = ["Batch"]

Array = npt.NDArray[Any]

START_NS: Final = 1_760_000_000_000_000_000
STEP_NS: Final = 350_000_000
CALL_NS: Final = 1_500_000
"""Time from one operation of a step to the next."""


class Batch:
    """Jobs that become one trace: arrays of each, joined in the end."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.programs: list[Program] = []
        self.events = 0

    def add(self, job: Job) -> int:
        """Makes a job; how many operations it has."""
        made = program(job.shape, None if job.fault.name == "healthy" else job.fault)
        self.jobs.append(job)
        self.programs.append(made)
        self.events += len(made.rank)
        return len(made.rank)

    def trace(self) -> Trace:
        """The tables of all jobs."""
        tables = [communicators(j.shape) for j in self.jobs]
        first = np.append(0, np.cumsum([len(names) for names, *_ in tables]))
        return Trace(
            events=_events(self.programs, first),
            jobs=_jobs(self.jobs),
            ranks=_ranks(self.jobs, self.programs),
            comms=_comms(tables, first),
            stacks=pl.DataFrame(
                {"stack": range(len(FRAMES)), "frames": [list(f) for f in FRAMES]},
                schema=STACKS, strict=False,
            ),
            strings=StringTable([*STREAMS, "sum"]).frame(),
        )  # fmt: skip


_REDUCE: Final = len(STREAMS)
"""String code of the only reduce operation."""


def _events(programs: list[Program], first_comm: Array) -> pl.DataFrame:
    width = [len(p.rank) for p in programs]

    def joined(name: str) -> Array:
        return np.concatenate([p.columns[name] for p in programs])

    job = np.repeat(np.arange(len(programs), dtype=np.int32), width)
    rank = np.concatenate([p.rank for p in programs])
    seq = np.concatenate([p.seq for p in programs])
    step = np.concatenate([p.step for p in programs])
    comm = joined("comm")
    comm = np.where(comm >= 0, comm + first_comm[job].astype(np.int32), -1)
    created = START_NS + step.astype(np.int64) * STEP_NS
    created += np.concatenate([p.place for p in programs]).astype(np.int64) * CALL_NS + rank * 7
    bytes_ = joined("count") * np.array(list(DTYPE_BYTES.values()))[joined("dtype")]
    frame = pl.DataFrame(
        {
            "job": job, "rank": rank, "seq": seq, "comm": comm,
            "op": joined("op"), "stream": joined("stream"), "peer": joined("peer"),
            "batch": joined("batch"), "count": joined("count"), "dtype": joined("dtype"),
            "bytes": bytes_, "waits_for": joined("waits_for"), "stack": joined("stack"),
            "step": step, "t_created": created,
        }
    )  # fmt: skip
    wait = pl.col("op") == OP["wait"]
    message = pl.col("peer") >= 0
    reduces = pl.col("op").is_in([OP["all_reduce"], OP["reduce_scatter"]])
    batches = 64  # more than a step has
    return conform(
        frame.select(
            "job", "rank", "seq", "op", "t_created", "stack",
            pl.lit(0, pl.Int32).alias("lane"),
            pl.when(pl.col("stream") >= 0).then("stream"),
            (pl.col("stream") < 0).alias("blocking"),
            pl.when(message).then("seq").alias("request"),
            pl.when(pl.col("waits_for") > 0)
            .then(pl.concat_list(pl.col("seq") - pl.col("waits_for")))
            .when(wait)
            .then(pl.lit([], pl.List(pl.Int64)))
            .alias("requests"),
            pl.when(wait).then(pl.lit(MODE["all"], pl.UInt8)).alias("mode"),
            pl.when(pl.col("comm") >= 0).then("comm"),
            pl.when(message).then("peer"),
            pl.when(message).then(pl.lit(0, pl.Int64)).alias("tag"),
            pl.when(pl.col("op") == OP["send"])
            .then(pl.lit(SEND_MODE["standard"], pl.UInt8))
            .alias("send_mode"),
            pl.when(reduces).then(pl.lit(_REDUCE, pl.Int32)).alias("reduce_op"),
            pl.when(~wait).then("count"),
            pl.when(~wait).then("dtype"),
            pl.when(~wait).then("bytes"),
            pl.when(pl.col("batch") >= 0)
            .then(pl.col("step").cast(pl.Int64) * batches + pl.col("batch"))
            .alias("group"),
            pl.lit(0, pl.UInt8).alias("state"),
            pl.lit(0, pl.UInt32).alias("flags"),
        ),
        "events",
    )  # fmt: skip


def _jobs(jobs: list[Job]) -> pl.DataFrame:
    names = [j.name for j in jobs]
    return conform(
        pl.DataFrame(
            {
                "job": range(len(jobs)), "name": names, "folder": names,
                "world_size": [j.shape.ranks for j in jobs],
            }
        ).with_columns(
            attempt=pl.lit(0), backend=pl.lit("nccl"), source=pl.lit("native"),
            waits=pl.lit(True), p2p=pl.lit(True),
        ),
        "jobs",
    )  # fmt: skip


def _ranks(jobs: list[Job], programs: list[Program]) -> pl.DataFrame:
    frames = []
    for number, (job, made) in enumerate(zip(jobs, programs, strict=True)):
        n, fault = job.shape.ranks, job.fault
        rank = np.arange(n, dtype=np.int32)
        exit_ = np.full(n, EXIT["finished" if fault.name == "healthy" else "alive"], np.uint8)
        died = (rank == fault.rank) & (fault.name == "crash")
        exit_[died] = EXIT["crashed"]
        # what a rank did last, and what it was about to do when it died
        last = np.searchsorted(made.rank, rank, "right") - 1
        step = np.where(np.isin(rank, made.rank), made.step[np.maximum(last, 0)], 0)
        t_last = START_NS + (step.astype(np.int64) + 1) * STEP_NS
        keep = (rank != fault.rank) | (fault.name != "lost")
        frames.append(
            pl.DataFrame(
                {
                    "job": np.full(n, number, np.int32), "rank": rank, "exit": exit_,
                    "truncated": died, "t_last": t_last,
                }
            ).filter(pl.Series(keep))
        )  # fmt: skip
    return conform(
        pl.concat(frames).with_columns(
            code=pl.when("truncated").then(pl.lit(137, pl.Int32)),
            lost_before=pl.lit(0, pl.Int64), only_active=pl.lit(False), timed=pl.lit(False),
        ),
        "ranks",
    )  # fmt: skip


def _comms(tables: list[tuple[list[str], list[str], Array, Array]], first: Array) -> pl.DataFrame:
    sizes = np.concatenate([np.diff(cuts) for *_, cuts in tables])
    members = pl.Series(np.concatenate([m for _, _, m, _ in tables]))
    comm = np.repeat(np.arange(int(first[-1]), dtype=np.int32), sizes)
    lists = (
        pl.DataFrame({"comm": comm, "ranks": members})
        .group_by("comm", maintain_order=True)
        .agg("ranks")
    )
    return conform(
        lists.with_columns(
            job=pl.Series(np.repeat(np.arange(len(tables), dtype=np.int32), np.diff(first))),
            id=pl.Series([n for names, *_ in tables for n in names]),
            desc=pl.Series([a for _, about, *_ in tables for a in about]),
        ),
        "comms",
    )
