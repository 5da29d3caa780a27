"""The scan: discover, read, analyse, report. The whole way of the data on one screen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dl2gpu.cluster import Cluster, Number, check, opened
from dl2gpu.journal import Journal
from dl2gpu.report.build import build
from dl2gpu.report.model import Report
from dl2gpu.shard import SHARD_BYTES, Summary, Task
from dl2gpu.trace.discover import discover
from dl2gpu.trace.files import local_path
from dl2gpu.trace.inputs import InputError, TraceFile

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
    only: Collection[str] | None = None,
    plan: str | os.PathLike[str] | None = None,
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
        only: only these files, by the paths that :func:`dl2gpu.listing` gives.
        plan: file that ``dl2gpu plan`` wrote: jobs with as many ranks are set against it.
        progress: called as work goes on.
        journal: folder for the results of finished shards. A scan that finds those of one that was
            killed goes on from there. Nobody but the caller removes it.

    Raises:
        InputError: a path does not exist, the pattern is no regular expression, or the plan is
            none.
        EngineError: the engine asked for cannot be used here.
        ClusterError: the cluster cannot be had, or went away.
    """
    began = time.perf_counter()
    roots = [paths] if isinstance(paths, str) else list(paths)
    check(cluster)
    expected = "" if plan is None else _plan(plan)

    found = discover(roots, job_pattern, only)
    files = [f for f in found.files if select is None or select in (f.job, f.folder)]
    # a native trace names its job inside the file: what the path does not tell is sorted out later
    if select is not None and not files:
        files = found.files
    with opened(cluster, workers, roots) as where:
        used = where.engine(engine)
        kept = None if journal is None else Journal(journal)
        results = _results(files, used, where, kept, progress or _silent, expected)
    report = build(
        (results[number] for number in sorted(results)), found.inputs, select,
        {"bytes_read": sum(f.size for f in files), "engine": used, "cluster": cluster},
    )  # fmt: skip
    report.summary["elapsed_s"] = round(time.perf_counter() - began, 3)
    return report


def _results(
    files: Sequence[TraceFile],
    engine: str,
    where: Cluster,
    kept: Journal | None,
    tell: Progress,
    plan: str,
) -> dict[Number, bytes]:
    """The results of all shards, those of an earlier scan that was killed among them.

    As bytes, which take a fraction of the memory: they wait while other shards need it.
    """
    results: dict[Number, bytes] = {}
    step = Step(0, sum(f.size for f in files), 0, len(files))
    paths: set[str] = set()  # of a file that holds many jobs, parts are read one by one

    def note(number: Number, task: Task, data: bytes) -> None:
        nonlocal step
        results[number] = data
        result = Summary.decode(data)
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
        task = Task(tuple(shard), engine, plan=plan)
        earlier = None if kept is None else kept.get(task)
        if earlier is None:
            todo.append(((number,), task))
        else:
            note((number,), task, earlier)
    for done in where.results(todo):
        if kept is not None:
            kept.put(done.task, done.data)
        note(done.number, done.task, done.data)
    return results


def _plan(path: str | os.PathLike[str]) -> str:
    """The text of a plan, which was looked at. Raises InputError where it is none."""
    from dl2gpu.planner.file import plan_of, read_text
    from dl2gpu.planner.model import ModelError

    try:
        text = read_text(Path(path))
        plan_of(text, Path(path))
    except ModelError as e:
        raise InputError(str(e)) from e
    return text


def _absolute(file: TraceFile) -> TraceFile:
    """The file under a name that holds in whatever folder a worker is started."""
    path = local_path(file.url)
    return file if path is None else replace(file, url=str(Path(path).absolute()))


def _silent(step: Step) -> None:
    """Progress that nobody asked for."""
