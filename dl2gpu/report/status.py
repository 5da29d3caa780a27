"""The exit status of a scan (DESIGN.md section 10)."""

from __future__ import annotations

from collections.abc import Collection

import polars as pl

from dl2gpu.report.model import Report

__all__ = ["exit_status", "nothing_readable"]


def nothing_readable(report: Report) -> bool:
    """No input was a trace: neither read, nor read in part, nor quarantined."""
    return not report.inputs["status"].is_in(["read", "partial", "quarantined"]).any()


def exit_status(report: Report, fail_on: Collection[str]) -> int:
    """0, 1, 2 or 3.

    1: a finding of a kind in ``fail_on``. 2: nothing readable. 3: inputs were quarantined and
    nothing else was found; a finding of kind ``insufficient_evidence`` claims nothing, so it does
    not hide the quarantine. 0: otherwise.
    """
    if nothing_readable(report):
        return 2
    kinds = report.findings["kind"]
    if kinds.is_in(list(fail_on)).any():
        return 1
    claimed = report.findings.filter(~pl.col("kind").is_in(["insufficient_evidence", "healthy"]))
    quarantined = (report.inputs["status"] == "quarantined").any()
    return 3 if quarantined and claimed.is_empty() else 0
