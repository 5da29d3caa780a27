"""The scan: discover, read, analyse, report. The whole way of the data on one screen."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from dl2gpu.cluster import Cluster, Number, check, opened
from dl2gpu.journal import Journal
from dl2gpu.report.model import FINDINGS, JOBS, KINDS, Report
from dl2gpu.shard import JOB_ROW, SHARD_BYTES, Result, Task, joined
from dl2gpu.trace.discover import discover
from dl2gpu.trace.files import local_path
from dl2gpu.trace.inputs import INPUTS, Input, TraceFile
from dl2gpu.trace.inputs import joined as inputs_of_files

__all__ = ["Progress", "Step", "scan"]


@dataclass(frozen=True, slots=True)
class Step:
    """How far a scan is.

    ``done`` of ``total`` bytes of input, ``files`` of ``all_files``; and what was found in them.
    """

    done: int
    total: int
    files: int = 0
    all_files: int = 0
    jobs: int = 0
    events: int = 0
    findings: int = 0


Progress = Callable[[Step], None]
"""Called as work goes on, from the thread that scans."""


def scan(
    paths: str | Sequence[str],
    *,
    engine: str = "auto",
    cluster: str = "threads",
    workers: int | None = None,
    job_pattern: str | None = None,
    select: str | None = None,
    progress: Progress | None = None,
    journal: str | os.PathLike[str] | None = None,
) -> Report:
    """Reads the traces of many jobs and says for each whether its communication can finish.

    Args:
        paths: folders or files, local or behind fsspec URLs.
        engine: "auto", "cpu" or "gpu".
        cluster: "threads" (of this process), "local" (processes), "cuda" (one a GPU), or the
            address of a Dask scheduler, whose workers must see the same paths.
        workers: threads, or processes of a local cluster; default one a processor.
        job_pattern: regular expression with named groups job, rank, attempt, searched in each path.
        select: only the job of this name (or folder).
        progress: called as work goes on.
        journal: folder for the results of finished shards. A scan that finds those of one that was
            killed goes on from there. Nobody but the caller removes it.

    Raises:
        InputError: a path does not exist, or the pattern is no regular expression.
        EngineError: the engine asked for cannot be used here.
        ClusterError: the cluster cannot be had, or went away.
    """
    began = time.perf_counter()
    roots = [paths] if isinstance(paths, str) else list(paths)
    check(cluster)

    found = discover(roots, job_pattern)
    files = [f for f in found.files if select is None or select in (f.job, f.folder)]
    # a native trace names its job inside the file: what the path does not tell is sorted out later
    if select is not None and not files:
        files = found.files
    with opened(cluster, workers, roots) as where:
        used = where.engine(engine)
        kept = None if journal is None else Journal(journal)
        results = _results(files, used, where, kept, progress or _silent)
    result = joined([Result.decode(results[number]) for number in sorted(results)])
    inputs = inputs_of_files([*found.inputs, *result.inputs])
    return _report(
        result, inputs, select,
        summary={
            "files": len(inputs), "bytes_read": sum(f.size for f in files), "engine": used,
            "cluster": cluster,
        } | ({"notes": result.notes} if result.notes else {}),
        began=began,
    )  # fmt: skip


def _results(
    files: Sequence[TraceFile], engine: str, where: Cluster, kept: Journal | None, tell: Progress
) -> dict[Number, bytes]:
    """The results of all shards, those of an earlier scan that was killed among them.

    As bytes, which take a fraction of the memory: they wait while other shards need it.
    """
    results: dict[Number, bytes] = {}
    step = Step(0, sum(f.size for f in files), 0, len(files))
    paths: set[str] = set()  # of a file that holds many jobs, parts are read one by one

    def note(number: Number, task: Task, result: Result) -> None:
        nonlocal step
        results[number] = result.encode()
        paths.update(f.path for f in task.files)
        step = replace(
            step, done=step.done + task.size, files=len(paths),
            jobs=step.jobs + len(result.jobs), events=step.events + result.events,
            findings=step.findings + len(result.findings),
        )  # fmt: skip
        tell(step)

    tell(step)
    todo: list[tuple[Number, Task]] = []
    for number, shard in enumerate(where.cut([_absolute(f) for f in files], SHARD_BYTES)):
        task = Task(tuple(shard), engine)
        earlier = None if kept is None else kept.get(task)
        if earlier is None:
            todo.append(((number,), task))
        else:
            note((number,), task, earlier)
    for done in where.results(todo):
        if kept is not None:
            kept.put(done.task, done.result)
        note(done.number, done.task, done.result)
    return results


def _absolute(file: TraceFile) -> TraceFile:
    """The file under a name that holds in whatever folder a worker is started."""
    path = local_path(file.url)
    return file if path is None else replace(file, url=str(Path(path).absolute()))


def _silent(step: Step) -> None:
    """Progress that nobody asked for."""


def _report(
    result: Result, inputs: list[Input], select: str | None, *, summary: dict[str, Any],
    began: float,
) -> Report:  # fmt: skip
    """The report's tables, sorted, with names and ids in place of numbers."""
    jobs = pl.DataFrame(result.jobs, schema=JOB_ROW)
    findings = result.findings
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
