"""What discovery hands to a reader, and what a reader says of each file afterwards.

Every input ends in exactly one status (DESIGN.md section 9): ``read``, ``partial`` (with what was
lost), ``quarantined`` (with why) or ``ignored`` (not a trace). The report lists them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import polars as pl

__all__ = ["INPUTS", "Input", "InputError", "Status", "TraceFile"]

Status = Literal["read", "partial", "quarantined", "ignored"]

INPUTS: Final[dict[str, pl.DataType]] = {
    "path": pl.String(),  # below the scanned path, with "/"
    "status": pl.String(),
    "reason": pl.String(),  # null for a file that was read whole
    "format": pl.String(),
    "job": pl.String(),
    "rank": pl.Int32(),
    "events": pl.Int64(),
}
"""Columns of the inputs table of a report."""


class InputError(ValueError):
    """A file cannot be used. The message says what was expected, what was found and what to do."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """One file that holds (part of) a trace, recognised by its content."""

    path: str
    """Name in the report: below the scanned path, "/" between parts."""
    url: str
    """What fsspec opens."""
    format: str
    """Reader's name: "native", "parquet", "flight_recorder", ..."""
    folder: str
    """Folder of the job below the scanned path; files of one folder are one job by default."""
    size: int = 0
    job: str | None = None
    """Job name, where ``--job-pattern`` gave one."""
    rank: int | None = None
    """Rank, where ``--job-pattern`` gave one."""
    attempt: int | None = None
    """Restart counter, where ``--job-pattern`` or the folder's name gave one."""


@dataclass(frozen=True, slots=True)
class Input:
    """What became of one input file."""

    path: str
    status: Status
    reason: str | None = None
    format: str | None = None
    job: str | None = None
    rank: int | None = None
    events: int = 0
