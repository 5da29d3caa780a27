"""Fleets: many labelled jobs of many sizes, healthy and faulty, as a team's night of training.

The same arguments give the same bytes. ``labels.parquet`` beside the traces says for each job what
an analysis has to find: its verdict, the culprits, and whether it is deadlocked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import polars as pl

from dl2gpu.suites.mixture import LABELS, MIXTURE, Job, label, plan
from dl2gpu.suites.tables import Batch
from dl2gpu.trace.files import whole_file
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.schema import Trace

__all__ = ["trace_of", "write"]

FILE_EVENTS: Final = 4_000_000
"""Operations of a file, about: the last job of a file may pass it."""


def trace_of(jobs: int, events: int, seed: int = 0, **options: Any) -> tuple[Trace, pl.DataFrame]:
    """A fleet as one trace in memory, and its labels; arguments and errors of :func:`plan`."""
    batch = Batch()
    rows = [label(job, batch.add(job)) for job in plan(jobs, events, seed, **options)]
    return batch.trace(), pl.DataFrame(rows, schema=LABELS)


def write(
    out: str | Path,
    jobs: int,
    events: int,
    seed: int = 0,
    form: str = "parquet",
    *,
    ranks: tuple[int, int] = (8, 4096),
    mixture: Mapping[str, float] | None = None,
    file_events: int = FILE_EVENTS,
) -> pl.DataFrame:
    """Writes a fleet into the folder ``out``; see :func:`plan` for the arguments.

    Args:
        form: "parquet": native Parquet, many jobs a file; "fr": Flight Recorder pickles, a folder
            a job and a file a rank, with the faults that such dumps can show.
        file_events: operations of a Parquet file, about.

    Returns:
        The labels, which are also written as ``labels.parquet``: columns of :data:`LABELS`.

    Raises:
        InputError: an argument is wrong, the folder is not empty, or a file cannot be written.
    """
    if form not in ("parquet", "fr"):
        raise InputError(f"form: expected parquet or fr, found {form!r}")
    target = Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if next(target.iterdir(), None) is not None:
            raise InputError(f"{out}: expected a new or empty folder, found files in it")
        if form == "fr":
            from dl2gpu.suites import flight_recorder

            if mixture is None:
                mixture = {k: MIXTURE[k] for k in flight_recorder.FAULTS if k in MIXTURE}
            fleet = plan(jobs, events, seed, ranks=ranks, mixture=mixture)
            rows = [label(job, flight_recorder.write(job, target)) for job in fleet]
        else:
            fleet = plan(jobs, events, seed, ranks=ranks, mixture=mixture or MIXTURE)
            rows = _write_parquet(fleet, target, file_events)
        labels = pl.DataFrame(rows, schema=LABELS)
        with whole_file(target / "labels.parquet") as part:
            labels.write_parquet(part)
    except OSError as e:
        raise InputError(f"{e.filename or out}: cannot be written: {e.strerror}") from e
    return labels


def _write_parquet(fleet: Iterator[Job], target: Path, file_events: int) -> list[dict[str, Any]]:
    from dl2gpu.trace import native_parquet

    rows: list[dict[str, Any]] = []
    batch, number = Batch(), 0
    for job in fleet:
        rows.append(label(job, batch.add(job)))
        if batch.events >= file_events:
            native_parquet.write(batch.trace(), target / f"fleet_{number:05}.parquet")
            batch, number = Batch(), number + 1
    if batch.jobs:
        native_parquet.write(batch.trace(), target / f"fleet_{number:05}.parquet")
    return rows
