"""What a grammar of log lines is told of a job beside its facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dl2gpu.trace.inputs import TraceFile

__all__ = ["LogJob"]


@dataclass
class LogJob:
    """One attempt of a job: the files of one folder, or of one ``--job-pattern`` name."""

    name: str
    folder: str
    attempt: int
    files: Sequence[TraceFile]
    file_rank: Sequence[int | None]
    """For each file the rank that wrote all of it; None: several, or unknown."""
    world_size: int | None = None
    """As the lines say; None: they do not."""
    world: dict[tuple[str, int], int] = field(default_factory=dict)
    """(host, process id) to global rank, where lines say it."""
    torn: Sequence[bool] = ()
    """For each file: does it end in the middle of a line?"""
    unreadable: dict[int, int] = field(default_factory=dict)
    """Filled by the grammars: lines of each file that were torn and could not be read."""
