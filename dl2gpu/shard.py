"""One shard of a scan: from the files of some jobs to their rows of the report.

A shard is what one worker does at a time, in this process or another: whole jobs, about
``SHARD_BYTES`` of input, so that memory is bounded by the largest job and not by the corpus. What
comes of it is plain data (:class:`Result`), the same whoever computed it and however the corpus was
cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec
import polars as pl

from dl2gpu.engine.choose import DeviceMemoryError
from dl2gpu.engine.cores import limited
from dl2gpu.report.model import JOBS
from dl2gpu.trace.inputs import Input, TraceFile
from dl2gpu.trace.parts import shards
from dl2gpu.trace.readers import read_files
from dl2gpu.trace.schema import Trace, one_job

if TYPE_CHECKING:
    from dl2gpu.planner.plan import Plan

__all__ = ["JOB_ROW", "SHARD_BYTES", "Result", "Summary", "Task", "halves", "lost", "run"]

SHARD_BYTES: Final = 768 << 20
"""Jobs are analysed in shards of at most about this many bytes; a job is never cut.

Each shard costs some tens of milliseconds, whatever is in it. Bytes of the input, but for Parquet,
which is weighed by the memory that its rows take.
"""

MOST_RANKS: Final = 1 << 12
"""Missing ranks are listed up to this number, and 16 for each rank that is present.

A damaged world size must not fill the memory.
"""

JOB_ROW: Final[dict[str, pl.DataType]] = {
    "number": pl.Int32(),
    "name": pl.String(),
    **{k: t for k, t in JOBS.items() if k not in {"job", "findings"}},
}
"""Columns of a job before it has its name in the report and its findings."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker needs to know."""

    files: tuple[TraceFile, ...]
    engine: str = "cpu"
    threads: int | None = None
    """At most so many; default one for each usable processor."""
    plan: str = ""
    """What ``dl2gpu plan`` wrote, against which jobs of its size are set."""

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(f.size for f in self.files)


class Result(msgspec.Struct, frozen=True):
    """What came of a shard. As JSON it is what is kept on disk and sent between processes.

    Attributes:
        jobs: rows with the columns of :data:`JOB_ROW`; ``number`` counts from 0.
        findings: those of the analysis; ``job`` is the number of a job.
        inputs: what became of each file.
        notes: what else the report has to say, as that a shard did not fit a GPU.
        plans: what jobs are against a plan (:func:`planner.expect.against`), by their numbers.
    """

    jobs: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    inputs: list[Input]
    notes: list[str]
    plans: list[dict[str, Any]] = []

    @property
    def events(self) -> int:
        return sum(int(job["events"]) for job in self.jobs)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def decode(data: bytes) -> Result:
        """Raises msgspec.DecodeError where ``data`` is none."""
        return msgspec.json.decode(data, type=Result)


class _Events(msgspec.Struct):
    events: int


class _Said(msgspec.Struct):
    reason: str | None


class Summary(msgspec.Struct, frozen=True):
    """What the one that scans has to know of an encoded :class:`Result` at once.

    The rest of it waits as bytes until the report is built.
    """

    jobs: list[_Events]
    findings: list[msgspec.Raw]
    inputs: list[_Said]

    @property
    def events(self) -> int:
        return sum(job.events for job in self.jobs)

    @staticmethod
    def decode(data: bytes) -> Summary:
        """Raises msgspec.DecodeError where ``data`` is no result."""
        return msgspec.json.decode(data, type=Summary)


def halves(task: Task) -> tuple[Task, Task] | None:
    """Two tasks of half the jobs each; None where there is but one job."""
    parts = list(shards(task.files, 0))
    if len(parts) < 2:
        return None
    middle = len(parts) // 2
    first = tuple(file for part in parts[:middle] for file in part)
    second = tuple(file for part in parts[middle:] for file in part)
    return replace(task, files=first), replace(task, files=second)


def lost(task: Task, reason: str) -> Result:
    """The result of a shard that nobody could work on: its files, quarantined."""
    return Result(
        [], [],
        [
            Input(f.path, "quarantined", reason, f.format, f.job or f.folder, f.rank)
            for f in task.files
        ],
        [],
    )  # fmt: skip


def run(task: Task) -> Result:
    """Reads and analyses the files of a shard.

    Where memory does not suffice, each half of the jobs is tried by itself. A single job that does
    not fit the GPU is analysed on the CPU, with a note; of one that does not fit at all, the files
    are quarantined.
    """
    on_device = False
    try:
        with limited(task.threads):
            trace, inputs = read_files(task.files)
            if not trace.jobs.height:
                return Result([], [], inputs, [])
            jobs, findings, failed = _analyse(trace, task.engine, 0)
            plans = _against(trace, task.plan, findings) if task.plan else []
    except DeviceMemoryError:
        on_device = True
    except MemoryError:
        pass  # what was read is given back when this block is left
    else:
        return Result(jobs, findings, [_failed(i, failed) for i in inputs], [], plans)
    parts = halves(task)
    if parts is not None:
        return joined([run(part) for part in parts])
    if not on_device:
        return lost(task, f"out of memory: the job's {task.size} bytes of input do not fit")
    folder = task.files[0].job or task.files[0].folder
    note = f"job {folder}: its {task.size} bytes of input do not fit the GPU; analysed on the CPU"
    here = run(replace(task, engine="cpu"))
    return msgspec.structs.replace(here, notes=[*here.notes, note])


def joined(results: Sequence[Result]) -> Result:
    """One result of several, in order; jobs are numbered on."""
    first = 0
    jobs: list[dict[str, Any]] = []
    findings: list[dict[str, Any]] = []
    plans: list[dict[str, Any]] = []
    for result in results:
        jobs += [job | {"number": job["number"] + first} for job in result.jobs]
        findings += [finding | {"job": finding["job"] + first} for finding in result.findings]
        plans += [plan | {"job": plan["job"] + first} for plan in result.plans]
        first += 1 + max((job["number"] for job in result.jobs), default=-1)
    return Result(
        jobs,
        findings,
        [i for result in results for i in result.inputs],
        [n for result in results for n in result.notes],
        plans,
    )


Rows = list[dict[str, Any]]


def _analyse(trace: Trace, engine: str, first: int) -> tuple[Rows, Rows, dict[str, str]]:
    """Jobs of a shard as rows, findings, and {path: reason} of what failed.

    Jobs count from ``first``. A job on which the analysis fails must not take the others with it:
    then they are analysed one by one, and the files of the one that fails are quarantined.
    """
    try:
        return *_rows(trace, engine, first), {}
    except MemoryError:
        raise
    except Exception as e:  # noqa: BLE001 - whatever it is, the other jobs must not suffer
        if trace.jobs.height == 1:
            paths = trace.ranks["path"].drop_nulls()
            reason = f"the analysis failed, which is a fault of dl2gpu: {type(e).__name__}: {e}"
            return [], [], dict.fromkeys(paths, reason)
    parts = [_analyse(one_job(trace, job), engine, first + job) for job in range(trace.jobs.height)]
    failed = {path: reason for _, _, f in parts for path, reason in f.items()}
    return [j for js, _, _ in parts for j in js], [f for _, fs, _ in parts for f in fs], failed


@lru_cache(maxsize=1)
def _read(plan: str) -> Plan:
    """The plan of a scan, once for all shards of a process."""
    from dl2gpu.planner.file import plan_of

    return plan_of(plan)


def _against(trace: Trace, plan: str, findings: Rows) -> Rows:
    """What the jobs of the plan's size are against it; their findings say where they left it."""
    from dl2gpu.planner.expect import against

    plans = against(trace, _read(plan))
    left = {p["job"]: p["says"] for p in plans if p["follows"] is False}
    for f in findings:
        if f["job"] in left:
            f["summary"] = f"{f['summary']} Against its plan, {left[f['job']]}."
            f["details"] = f["details"] | {"plan": left[f["job"]]}
    return plans


def _failed(read: Input, failed: dict[str, str]) -> Input:
    reason = failed.get(read.path)
    if reason is None:
        return read
    return replace(read, status="quarantined", reason=reason, events=0)


def _rows(trace: Trace, engine: str, first: int) -> tuple[Rows, Rows]:
    from dl2gpu.analysis import analyse

    result = analyse(trace, engine=engine)
    ranks = trace.ranks.group_by("job").agg(ranks_present=pl.col("rank").unique().sort())
    members = (
        trace.comms.select("job", rank="ranks")
        .explode("rank", empty_as_null=False)
        .group_by("job")
        .agg(top=pl.col("rank").max())
    )
    events = trace.events.group_by("job").agg(events=pl.len().cast(pl.Int64))
    jobs = (
        trace.jobs.join(ranks, on="job", how="left")
        .join(members, on="job", how="left")
        .join(events, on="job", how="left")
        .join(result.jobs, on="job", how="left")
        .with_columns(
            pl.col("events").fill_null(0),
            pl.col("ranks_present").fill_null([]),
            world_size=pl.coalesce(
                "world_size", pl.max_horizontal("top", pl.col("ranks_present").list.max()) + 1
            ),
        )
        .with_columns(
            listed=pl.min_horizontal(
                pl.col("world_size").fill_null(0).clip(0),
                MOST_RANKS + 16 * pl.col("ranks_present").list.len().cast(pl.Int32),
            )
        )
        .with_columns(
            ranks_missing=pl.int_ranges(0, "listed", dtype=pl.Int32)
            .list.set_difference("ranks_present")
            .list.sort(),
            number=pl.col("job") + first,
        )
        # a job of which no file could be used is no job: its inputs say what became of them
        # (a log may tell of a job and name no rank)
        .filter((pl.col("ranks_present").list.len() > 0) | (pl.col("source") == "log"))
        .with_columns(source_format="source")
        .select([pl.col(c).cast(t) for c, t in JOB_ROW.items()])
        .sort("number")
    )  # fmt: skip
    return jobs.to_dicts(), [f | {"job": f["job"] + first} for f in result.findings]
