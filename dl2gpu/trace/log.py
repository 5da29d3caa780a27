"""Reader of text logs: the log files of one job become one trace.

Two grammars read the same lines: :mod:`log_c10d` what PyTorch, its launchers and the program say of
themselves, :mod:`log_nccl` what ``NCCL_DEBUG`` prints. Either may find nothing. A file may hold all
ranks, one, or some; a job may have both kinds of lines in one file.

A grammar is a module with

* ``WORDS``: a regular expression (Rust) that every line holds of which it wants to know;
* ``extract(lines)``: the facts in a frame of :data:`log_lines.LINES`, a frame with at least the
  columns ``file``, ``line`` and ``rank`` (a block at a time; whole columns, no loop over lines);
* ``build(facts, job)``: the trace of one attempt of one job (job row 0), or None where the facts
  do not amount to one.

Source: FORMATS.md sections 5, 6 and 9; LOG_LINES.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from dl2gpu.trace.inputs import TraceFile

__all__ = ["LogJob"]


@dataclass
class LogJob:
    """What a grammar is told of one attempt of a job beside the facts."""

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
