"""What discovery hands to a reader, and what a reader says of each file afterwards.

Every input ends in exactly one status (DESIGN.md section 9): ``read``, ``partial`` (with what was
lost), ``quarantined`` (with why) or ``ignored`` (not a trace). The report lists them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

import polars as pl

__all__ = [
    "INPUTS",
    "LONGEST_REASON",
    "Input",
    "InputError",
    "Part",
    "Stamp",
    "Status",
    "TraceFile",
    "joined",
]

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


LONGEST_REASON: Final = 2000
"""Characters of a reason; of a longer one the middle is left out."""


class InputError(ValueError):
    """A file cannot be used. The message says what was expected, what was found and what to do."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of whole jobs of a file that holds many, sorted by job."""

    jobs: tuple[int, int]
    """First job, and the one after the last."""
    rows: tuple[int, int]
    """First row of the event table, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the listing said of a stored object: another one in its place differs in something."""

    size: int | None = None
    """Stored bytes."""
    tag: str | None = None
    """Which content it is, as "etag=..." or "mtime=..."; None: the store does not say."""


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
    part: Part | None = None
    """What to read of it; None: all. ``size`` is then the part's share of the file."""
    weight: int | None = None
    """Bytes of memory that its events take, where that is known better than by ``size``."""
    apart: bool | None = None
    """Must its jobs be kept apart from those of another file of the corpus? None: not known."""
    stamp: Stamp | None = None
    """Of the object in a store, or of the archive that the file is in; None: not looked at."""


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

    def __post_init__(self) -> None:
        # messages quote what was found, and a file may hold a name of megabytes
        if self.reason is not None and len(self.reason) > LONGEST_REASON:
            half = LONGEST_REASON // 2 - 3
            short = f"{self.reason[:half]} ... {self.reason[-half:]}"
            object.__setattr__(self, "reason", short)


def joined(inputs: Iterable[Input]) -> list[Input]:
    """One input a path, sorted by path: what became of the parts of a file is put together.

    A file of which some parts are quarantined and others read is ``partial``; its reason names
    each reason of its parts once.
    """
    by_path: dict[str, list[Input]] = {}
    for found in inputs:
        by_path.setdefault(found.path, []).append(found)
    return [_one(by_path[path]) for path in sorted(by_path)]


def _one(parts: list[Input]) -> Input:
    first = parts[0]
    if len(parts) == 1:
        return first
    states = {p.status for p in parts}
    reasons = list(dict.fromkeys(p.reason for p in parts if p.reason is not None))
    jobs = {p.job for p in parts}
    return replace(
        first,
        status=first.status if len(states) == 1 else "partial",
        reason="; ".join(reasons) or None,
        job=first.job if len(jobs) == 1 else None,
        events=sum(p.events for p in parts),
    )
