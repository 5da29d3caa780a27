"""Files cut into runs of whole jobs, and shards of them: what bounds the memory of a scan.

A Parquet file may hold thousands of jobs and take a hundred times its size in memory. It is cut
where one job ends and the next begins; its events are weighed by rows, not by bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import polars as pl

from dl2gpu.trace.files import read_bytes
from dl2gpu.trace.inputs import InputError, Part, TraceFile
from dl2gpu.trace.parquet_file import (
    POLARS_ERRORS,
    Source,
    again,
    cast_table,
    check_siblings,
    check_version,
    read_table,
    rows_of,
    sibling,
    source,
)
from dl2gpu.trace.parquet_remote import footer
from dl2gpu.trace.schema import JOBS

__all__ = ["parts", "shards"]

EVENT_BYTES: Final = 600
"""Memory that reading and analysing a row of the event table takes at its peak, about."""
_LOOKED_AT: Final = 1 << 24
"""Rows of the column job that are looked at together."""


def shards(files: Sequence[TraceFile], shard_bytes: int) -> Iterator[list[TraceFile]]:
    """Runs of whole jobs that take about ``shard_bytes``; the largest job sets the largest shard.

    Files of one folder and job stay together, but for Parquet files, which hold whole jobs each.
    """
    units: dict[tuple[str, ...], list[TraceFile]] = {}
    for file in parts(files, shard_bytes):
        key: tuple[str, ...] = (file.folder, file.job or "", "")
        if file.format == "parquet":
            first = file.part.jobs[0] if file.part is not None else 0
            key = (file.folder, file.job or "", file.path, f"{first:012}")
        units.setdefault(key, []).append(file)
    shard: list[TraceFile] = []
    size = 0
    for key in sorted(units):
        weight = sum(f.size if f.weight is None else f.weight for f in units[key])
        if shard and size + weight > shard_bytes:
            yield shard
            shard, size = [], 0
        shard += units[key]
        size += weight
    if shard:
        yield shard


def parts(files: Sequence[TraceFile], shard_bytes: int) -> list[TraceFile]:
    """``files``, with Parquet files weighed, and cut where they take more than ``shard_bytes``.

    The parts of a file have a ``part`` each, in order; their sizes add up to the file's. A part
    that takes more is cut again. What is wrong with a file does not raise here: it stays whole,
    and the reader says what it is.
    """
    apart = _apart([f for f in files if f.format == "parquet" and f.apart is None])
    out: list[TraceFile] = []
    for file in files:
        if file.format != "parquet":
            out.append(file)
            continue
        told = file if file.apart is not None else replace(file, apart=file.path in apart)
        try:
            out += _cut(told, shard_bytes)
        except InputError:
            out.append(told)
    return out


def _cut(file: TraceFile, shard_bytes: int) -> list[TraceFile]:
    if file.part is None:
        total = rows_of(footer(file), "", file.size)
        file = replace(file, weight=max(file.size, total * EVENT_BYTES))
        rows, jobs = (0, total), (0, 1 << 31)
    else:
        rows, jobs = file.part.rows, file.part.jobs
    if (rows[1] - rows[0]) * EVENT_BYTES <= shard_bytes:
        return [file]
    with contextlib.ExitStack() as stack:
        data = source(replace(file, part=_ALL), read_bytes, stack, ["job"], rows)
        check_version(data)
        if file.part is None:
            check_siblings(file, data)
        counts = _job_rows(data, *rows)
    if not counts or counts[0][0] < 0:
        return [file]
    begins = [(jobs[0], rows[0])]  # of each part: first job, first row
    row = rows[0]
    for job, n in counts:
        if row > begins[-1][1] and (row + n - begins[-1][1]) * EVENT_BYTES > shard_bytes:
            begins.append((job, row))
        row += n
    # the last jobs of a file may have no events
    end = jobs[1] if file.part is not None else max(counts[-1][0] + 1, _names(file).height)
    return [
        _part(file, Part((first[0], last[0]), (first[1], last[1])), rows)
        for first, last in pairwise([*begins, (end, rows[1])])
    ]


def _part(file: TraceFile, part: Part, rows: tuple[int, int]) -> TraceFile:
    """A part of ``file``, of which ``rows`` are looked at."""
    total = rows[1] - rows[0]
    first, end = (file.size * (row - rows[0]) // total for row in part.rows)
    weight = (part.rows[1] - part.rows[0]) * EVENT_BYTES
    return replace(file, part=part, size=end - first, weight=weight)


_ALL: Final = Part((0, 0), (0, 0))
"""Marks a file of which little will be read."""


def _job_rows(data: Source, begin: int, end: int) -> list[tuple[int, int]] | None:
    """(job, rows) in the order of a main file's rows; None where they are not sorted by job.

    Looks at the column ``job`` only, some rows at a time.
    """
    counts: list[tuple[int, int]] = []
    for first in range(begin, end, _LOOKED_AT):
        try:
            column = (
                pl.scan_parquet(again(data))
                .select(pl.col("job").cast(pl.Int32))
                .slice(first, min(_LOOKED_AT, end - first))
                .collect()
                .to_series()
            )
        except POLARS_ERRORS:
            return None
        if column.null_count() or not column.is_sorted():
            return None
        runs = column.rle().struct.unnest()
        found = list(runs.select("value", pl.col("len").cast(pl.Int64)).iter_rows())
        if counts and found and found[0][0] < counts[-1][0]:
            return None
        if counts and found and found[0][0] == counts[-1][0]:
            counts[-1] = (counts[-1][0], counts[-1][1] + found.pop(0)[1])
        counts += found
    return counts


def _names(file: TraceFile) -> pl.DataFrame:
    """``job``, ``folder``, ``name`` and ``attempt`` of the jobs of a file."""
    keys = ("job", "folder", "name", "attempt")
    side = sibling(file, "jobs")
    content = read_bytes(side)
    table = read_table(content, side.path, keys)
    return cast_table(table, side.path, {k: JOBS[k] for k in keys})


def _apart(files: list[TraceFile]) -> set[str]:
    """Paths of the files with a job that another one before them has as well."""
    if len(files) <= 1:
        return set()
    tables: list[pl.DataFrame] = []
    for number, file in enumerate(sorted(files, key=lambda f: f.path)):
        with contextlib.suppress(InputError):
            tables.append(_names(file).with_columns(path=pl.lit(file.path), file=pl.lit(number)))
    if not tables:
        return set()
    keys = ["folder", "name", "attempt"]
    later = pl.concat(tables).filter(pl.col("file") > pl.col("file").min().over(keys))
    return set(later["path"])
