"""The scan: discover, read, analyse, report. The whole way of the data on one screen."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import msgspec
import polars as pl

from dl2gpu.engine.choose import choose
from dl2gpu.report.model import FINDINGS, JOBS, KINDS, Report
from dl2gpu.trace.discover import discover
from dl2gpu.trace.inputs import INPUTS, Input, InputError, TraceFile
from dl2gpu.trace.readers import read_files
from dl2gpu.trace.schema import Trace, one_job

__all__ = ["SHARD_BYTES", "Progress", "scan"]

Progress = Callable[[str, int, int], None]
"""Called with a stage ("read", "analyse"), how much of it is done, and of how much."""

SHARD_BYTES: Final = 512 << 20
"""Jobs are analysed in shards of about this many bytes of input; a job is never cut."""


MOST_RANKS: Final = 1 << 12
"""Missing ranks are listed up to this number, and 16 for each rank that is present.

A damaged world size must not fill the memory.
"""


def scan(
    paths: str | Sequence[str],
    *,
    engine: str = "auto",
    cluster: str = "threads",
    workers: int | None = None,
    job_pattern: str | None = None,
    select: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Reads the traces of many jobs and says for each whether its communication can finish.

    Args:
        paths: folders or files, local or behind fsspec URLs.
        engine: "auto", "cpu" or "gpu". cluster: "threads".
        workers: threads; default one a processor.
        job_pattern: regular expression with named groups job, rank, attempt, searched in each path.
        select: only the job of this name (or folder).
        progress: called as work goes on.

    Raises:
        InputError: a path does not exist, or the pattern is no regular expression.
        EngineError: the engine asked for cannot be used here.
    """
    began = time.perf_counter()
    roots = [paths] if isinstance(paths, str) else list(paths)
    if cluster != "threads":
        raise InputError(f"cluster {cluster!r}: expected threads, the only one there is so far")
    used = choose(engine)
    report = progress or _silent

    found = discover(roots, job_pattern)
    files = [f for f in found.files if select is None or select in (f.job, f.folder)]
    # a native trace names its job inside the file: what the path does not tell is sorted out later
    if select is not None and not files:
        files = found.files
    inputs: list[Input] = list(found.inputs)
    jobs: list[pl.DataFrame] = []
    findings: list[dict[str, Any]] = []
    total = sum(f.size for f in files)
    done = numbered = 0
    for shard in _shards(files):
        report("read", done, total)
        trace, read = read_files(shard)
        done += sum(f.size for f in shard)
        report("analyse", done, total)
        if trace.jobs.height:
            shard_jobs, shard_findings, failed = _analyse(trace, workers, numbered)
            jobs.append(shard_jobs)
            findings += shard_findings
            read = [_failed(i, failed) for i in read]
            numbered += trace.jobs.height
        inputs += read
        del trace
        if done < total:
            gc.collect()
    report("done", total, total)
    return _report(
        jobs, findings, inputs, select,
        summary={"files": len(inputs), "bytes_read": done, "engine": used, "cluster": cluster},
        began=began,
    )  # fmt: skip


_ROW: Final[dict[str, pl.DataType]] = {
    "number": pl.Int32(),
    "name": pl.String(),
    **{k: t for k, t in JOBS.items() if k not in {"job", "findings"}},
}
"""Columns of a job before it has its name in the report and its findings."""


def _silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody asked for."""


def _shards(files: Sequence[TraceFile]) -> Iterator[list[TraceFile]]:
    """Runs of whole jobs of about SHARD_BYTES; the largest job sets the largest shard."""
    by_job: dict[tuple[str, str | None], list[TraceFile]] = {}
    for file in files:
        by_job.setdefault((file.folder, file.job), []).append(file)
    shard: list[TraceFile] = []
    size = 0
    for key in sorted(by_job, key=lambda k: (k[0], k[1] or "")):
        weight = sum(f.size for f in by_job[key])
        if shard and size + weight > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard += by_job[key]
        size += weight
    if shard:
        yield shard


def _analyse(
    trace: Trace, workers: int | None, first: int
) -> tuple[pl.DataFrame, list[dict[str, Any]], dict[str, str]]:
    """Jobs of a shard as rows of the report, their findings, and {path: reason} of what failed.

    Jobs count from ``first``. A job on which the analysis fails must not take the others with it:
    then they are analysed one by one, and the files of the one that fails are quarantined.
    """
    try:
        return *_rows(trace, workers, first), {}
    except Exception as e:  # noqa: BLE001 - whatever it is, the other jobs must not suffer
        if trace.jobs.height == 1:
            paths = trace.ranks["path"].drop_nulls()
            reason = f"the analysis failed, which is a fault of dl2gpu: {type(e).__name__}: {e}"
            return _no_jobs(), [], dict.fromkeys(paths, reason)
    parts = [
        _analyse(one_job(trace, job), workers, first + job) for job in range(trace.jobs.height)
    ]
    failed = {path: reason for _, _, f in parts for path, reason in f.items()}
    return pl.concat([j for j, _, _ in parts]), [f for _, fs, _ in parts for f in fs], failed


def _failed(read: Input, failed: dict[str, str]) -> Input:
    reason = failed.get(read.path)
    return read if reason is None else replace(read, status="quarantined", reason=reason, events=0)


def _rows(
    trace: Trace, workers: int | None, first: int
) -> tuple[pl.DataFrame, list[dict[str, Any]]]:
    from dl2gpu.analysis import analyse

    result = analyse(trace, workers)
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
        .filter(pl.col("ranks_present").list.len() > 0)
        .with_columns(source_format="source")
        .select([pl.col(c).cast(t) for c, t in _ROW.items()])
    )  # fmt: skip
    return jobs, [f | {"job": f["job"] + first} for f in result.findings]


def _no_jobs() -> pl.DataFrame:
    """The rows of :func:`_rows`, none of them."""
    return pl.DataFrame(schema=_ROW)


def _report(
    frames: list[pl.DataFrame], findings: list[dict[str, Any]], inputs: list[Input],
    select: str | None, *, summary: dict[str, Any], began: float,
) -> Report:  # fmt: skip
    """The report's tables, sorted, with names and ids in place of numbers."""
    jobs = pl.concat([_no_jobs(), *frames])
    if select is not None:
        jobs = jobs.filter((pl.col("name") == select) | (pl.col("folder") == select))
        kept = set(jobs["number"].to_list())
        findings = [f for f in findings if f["job"] in kept]
    # jobs of one name in different folders stay apart
    twice = jobs.group_by("name").agg(n=pl.col("folder").n_unique()).filter(pl.col("n") > 1)["name"]
    jobs = jobs.with_columns(
        job=pl.when(pl.col("name").is_in(twice.to_list()))
        .then(pl.format("{} ({})", "name", "folder"))
        .otherwise("name")
    ).sort("job", "attempt", "folder", "source_format", "events", "number")
    # ... and so do those that a table brings along from a folder that is scanned as well
    same = ["job", "attempt"]
    jobs = jobs.with_columns(
        job=pl.when(pl.len().over(same) > 1)
        .then(pl.format("{} #{}", "job", pl.int_range(1, pl.len() + 1).over(same)))
        .otherwise("job")
    )
    label = dict(zip(jobs["number"], jobs["job"], strict=True))
    attempt = dict(zip(jobs["number"], jobs["attempt"], strict=True))
    ordered = sorted(
        findings,
        key=lambda f: (
            label[f["job"]],
            attempt[f["job"]],
            KINDS.index(f["kind"]),
            f["culprits"],
            f["fingerprint"],
        ),
    )
    rows = []
    of_job: dict[int, list[str]] = {}
    for number, f in enumerate(ordered, 1):
        ident = f"f{number}"
        of_job.setdefault(f["job"], []).append(ident)
        rows.append(
            {k: f.get(k) for k in FINDINGS}
            | {
                "id": ident,
                "job": label[f["job"]],
                "attempt": attempt[f["job"]],
                "culprits": list(f["culprits"]),
                "victims": list(f["victims"]),
                "cycle": list(f["cycle"]),
                "hangs_at": list(f["hangs_at"]),
                "details": msgspec.json.encode(f["details"], order="sorted").decode(),
            }
        )
    jobs = jobs.with_columns(
        findings=pl.Series([of_job.get(n, []) for n in jobs["number"]], dtype=pl.List(pl.String))
    )
    by_kind = Counter(jobs["verdict"].to_list())
    table = pl.DataFrame([asdict(i) for i in inputs], schema=INPUTS).sort("path")
    return Report(
        findings=pl.DataFrame(rows, schema=FINDINGS),
        jobs=jobs.select([pl.col(c).cast(t) for c, t in JOBS.items()]),
        inputs=table,
        summary={
            "jobs": jobs.height,
            "ranks": int(jobs["ranks_present"].list.len().sum()),
            "events": int(jobs["events"].sum()),
            **summary,
            "by_kind": dict(sorted(by_kind.items())),
            "elapsed_s": round(time.perf_counter() - began, 3),
        },
    )
