"""From the event table to findings: matching, replay, wait-for graph, causes, verdicts."""

from __future__ import annotations

from dl2gpu.analysis.verdict import Analysis, analyse

__all__ = ["Analysis", "analyse"]
