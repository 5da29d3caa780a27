"""The result of a scan: three tables and a summary (DESIGN.md section 10)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from dl2gpu.trace.inputs import INPUTS

if TYPE_CHECKING:
    from dl2gpu.report.html_notebook import FindingView
    from dl2gpu.report.html_overview import History

__all__ = ["FINDINGS", "JOBS", "KINDS", "SCHEMA", "Report"]

SCHEMA: Final = "dl2gpu.report/1"

KINDS: Final = (
    # gravest first: the order in which a job's verdict is chosen
    "cycle",
    "order_inversion",
    "init_cycle",
    "mismatch",
    "unmatched_p2p",
    "missing_participant",
    "crashed_rank",
    "stalled_rank",
    "in_flight",
    "potential",
    "insufficient_evidence",
    "healthy",
)
"""Kinds of verdict, gravest first. A job without findings is healthy."""

_OPERATION: Final = pl.Struct(
    {
        "rank": pl.Int32(),
        "seq": pl.Int64(),
        "op": pl.String(),
        "comm": pl.String(),
        "ordinal": pl.Int64(),
        "stack": pl.List(pl.String()),
    }
)

_PLACE: Final = pl.Struct(
    {
        "rank": pl.Int32(),
        "place": pl.String(),  # host | stream
        "stream": pl.String(),
        "waits_for": pl.List(pl.Int32()),
        "op": pl.String(),
        "comm": pl.String(),
        "ordinal": pl.Int64(),
        "seq": pl.Int64(),
        "stack": pl.List(pl.String()),
    }
)

FINDINGS: Final[dict[str, pl.DataType]] = {
    "id": pl.String(),
    "job": pl.String(),
    "attempt": pl.Int32(),
    "kind": pl.String(),
    "evidence": pl.String(),  # proven | observed | inferred
    "culprits": pl.List(pl.Int32()),
    "victims": pl.List(pl.Int32()),
    "cycle": pl.List(_PLACE),
    "first_divergence": _OPERATION,
    "hangs_at": pl.List(_OPERATION),
    "reason": pl.String(),
    "condition": pl.String(),
    "probability": pl.Float64(),
    "details": pl.String(),  # JSON text in the table, an object in report.json
    "stopped_at_ns": pl.Int64(),
    "gpu_hours_lost": pl.Float64(),
    "fingerprint": pl.String(),
    "advice": pl.String(),
    "summary": pl.String(),  # the finding in one or two sentences, for people
}

JOBS: Final[dict[str, pl.DataType]] = {
    "job": pl.String(),
    "attempt": pl.Int32(),
    "folder": pl.String(),
    "world_size": pl.Int32(),
    "ranks_present": pl.List(pl.Int32()),
    "ranks_missing": pl.List(pl.Int32()),
    "events": pl.Int64(),
    "source_format": pl.String(),
    "verdict": pl.String(),
    "deadlocked": pl.Boolean(),  # null: the evidence does not say
    "findings": pl.List(pl.String()),
}


@dataclass(frozen=True)
class Report:
    """What a scan found.

    ``findings``, ``jobs`` and ``inputs`` are Polars frames with the columns of :data:`FINDINGS`,
    :data:`JOBS` and :data:`dl2gpu.trace.inputs.INPUTS`; ``summary`` holds jobs, ranks, events,
    bytes_read, files, by_kind ({kind: jobs}), engine, cluster and elapsed_s.
    """

    findings: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=FINDINGS))
    jobs: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=JOBS))
    inputs: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=INPUTS))
    summary: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The report as the bytes of ``report.json``."""
        from dl2gpu.report.save import to_json

        return to_json(self)

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        pages: bool = True,
        history: History | None = None,
        owners: Mapping[str, str] | None = None,
        price: float | None = None,
    ) -> Path:
        """Write ``report.json``, the three tables as Parquet, and web pages: all of it, or nothing.

        Args:
            directory: a folder, which need not exist.
            pages: ``index.html`` and a page a finding as well.
            history: of earlier nights, for the overview.
            owners: job to team; default what the names of jobs and folders say.
            price: of a GPU-hour, where the calculator of the overview starts.

        Raises:
            ReportError: ``directory`` is a file, or cannot be written to.
        """
        from dl2gpu.report.save import save

        return save(self, directory, pages=pages, history=history, owners=owners, price=price)

    def explain(self, finding: str | None = None) -> FindingView:
        """One finding to look at: by its id, or its job's name; without one, the gravest.

        A notebook shows it with its pictures, ``print`` as text.

        Raises:
            ReportError: there is none, or there are several.
        """
        from dl2gpu.report.html_notebook import view_of

        return view_of(self, finding)

    def _repr_html_(self) -> str:
        from dl2gpu.report.html_notebook import report_fragment

        return report_fragment(self)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Report:
        """The report saved in a folder, or in one ``report.json``.

        Raises:
            ReportError: there is no report, or it is of another schema.
        """
        from dl2gpu.report.save import load

        return load(path)
