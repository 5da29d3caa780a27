"""The ways of running an analysis that the tests of the GPU engine compare."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
from corpus import labelled
from programs import Program, from_seed, trace_of

from dl2gpu.analysis import Analysis, analyse
from dl2gpu.engine.base import Engine
from dl2gpu.engine.cpu import Cpu
from dl2gpu.trace.discover import discover
from dl2gpu.trace.readers import read_files, read_trace
from dl2gpu.trace.schema import EXIT, Trace

DEMO = Path(__file__).parents[2] / "datasets" / "demo"


class Recording(Cpu):
    """Runs plans and the kernel of the GPU engine on the CPU, and keeps all plans."""

    def __init__(self) -> None:
        super().__init__(passes=False)
        object.__setattr__(self, "plans", {})
        object.__setattr__(self, "callers", set())

    plans: dict[str, pl.LazyFrame]
    """By what each looks like: the same query over other rows is kept once."""

    callers: set[tuple[str, int]]
    """Name of the file and line of each call."""

    def collect(self, plan: pl.LazyFrame) -> pl.DataFrame:
        caller = sys._getframe(1)
        self.callers.add((Path(caller.f_code.co_filename).name, caller.f_lineno))
        self.plans.setdefault(plan.explain(optimized=False), plan)
        return super().collect(plan)


def demo() -> Trace:
    trace, _ = read_files(discover([str(DEMO)]).files)
    return trace


def cases() -> Iterator[tuple[str, Trace]]:
    """The labelled cases; none where the data are absent."""
    for job in labelled("cases"):
        yield job.name, read_trace(str(job.path))


def wild(seed: int, n: int) -> list[Program]:
    """Programs in which many receives and probes take from anybody."""
    programs = from_seed(seed, n)
    for k, program in enumerate(programs):
        for ops in program.ops.values():
            for at, op in enumerate(ops):
                if (k + at) % 3 == 0:
                    continue
                if op["op"] in ("recv", "probe"):
                    op["peer"] = "any"
                    op.pop("matched_peer", None)
                    if (k + at) % 2:
                        op["tag"] = "any"
                        op.pop("matched_tag", None)
                elif op["op"] == "sendrecv":
                    op["recv_peer"] = "any"
    return programs


def lossy(seed: int, n: int) -> Trace:
    """Programs of which some ranks lost their start, or list active operations only."""
    trace = trace_of(*from_seed(seed, n))
    number = pl.int_range(pl.len())
    ranks = trace.ranks.with_columns(
        lost_before=pl.when(number % 3 == 0).then(pl.lit(5)).otherwise("lost_before"),
        only_active=number % 5 == 0,
    ).cast({"lost_before": pl.Int64})
    jobs = trace.jobs.with_columns(
        source=pl.when(pl.col("job") % 2 == 0)
        .then(pl.lit("flight_recorder"))
        .otherwise("source")
        .cast(trace.jobs.schema["source"])
    )
    return dataclasses.replace(trace, ranks=ranks, jobs=jobs)


def memberless(seed: int, n: int) -> Trace:
    """Programs of which some communicators do not say who belongs to them."""
    trace = trace_of(*from_seed(seed, n))
    none = pl.Series([[]], dtype=trace.comms.schema["ranks"]).first()
    comms = trace.comms.with_columns(
        ranks=pl.when(pl.col("comm") % 3 == 0).then(pl.lit(none)).otherwise("ranks")
    )
    return dataclasses.replace(trace, comms=comms)


def windowed(seed: int, n: int) -> Trace:
    """The same as records of a window: the recorder stopped while the ranks went on."""
    trace = memberless(seed, n)
    window = pl.lit(EXIT["window"], trace.ranks.schema["exit"])
    return dataclasses.replace(
        trace,
        ranks=trace.ranks.with_columns(exit=window),
        events=trace.events.with_columns(ordinal=pl.lit(None, pl.Int64)),
    )


def late() -> Trace:
    """Rank 1 comes a minute after the record of rank 0, which waits there, ended."""
    ops = [{"op": "all_reduce", "comm": "w", "t_created": t} for t in (0, 60_000_000_000)]
    trace = trace_of(Program({r: [op] for r, op in enumerate(ops)}, {"w": [0, 1]}))
    alive = pl.lit(EXIT["alive"], trace.ranks.schema["exit"])
    return dataclasses.replace(
        trace, ranks=trace.ranks.with_columns(exit=alive, t_last=pl.lit(1, pl.Int64))
    )


def result(trace: Trace, engine: Engine) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Findings and jobs."""
    found: Analysis = analyse(trace, engine=engine)
    return found.findings, found.jobs.to_dicts()
