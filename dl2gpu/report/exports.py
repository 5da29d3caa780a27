"""A report, or one finding of it, in the forms that other tools read."""

from __future__ import annotations

from typing import Any, Final

from dl2gpu.report.console import job_labels
from dl2gpu.report.model import Report
from dl2gpu.report.save import canonical, gravity

__all__ = ["FORMS", "OF_REPORT", "export"]

OF_REPORT: Final = ("sarif", "junit", "markdown")
"""Forms that hold all findings of a report unless one is asked for."""

FORMS: Final = ("markdown", "html", "dot", "graphml", "perfetto", "sarif", "junit")


def export(report: Report, form: str, finding: str | None = None) -> str:
    """Text of the report, or of one of its findings.

    Args:
        report: what was found.
        form: one of :data:`FORMS`. "dot", "graphml", "perfetto" and "html" are of one finding, the
            gravest unless it is named; "sarif", "junit" and "markdown" of all, unless one is named.
        finding: see :func:`dl2gpu.report.explain.choose`.

    Raises:
        ReportError: there is no such finding.
        ValueError: there is no such form.
    """
    from dl2gpu.report.explain import choose

    report = canonical(report)
    labels = job_labels(report)
    if form in OF_REPORT and finding is None:
        rows = report.findings.sort(gravity("kind"), "job", "attempt", "id").to_dicts()
    else:
        rows = [choose(report, finding)]
    if form == "sarif":
        from dl2gpu.report.exports_sarif import sarif

        return sarif(rows, labels)
    if form == "junit":
        from dl2gpu.report.exports_junit import junit

        return junit(report, None if finding is None else {rows[0]["id"]})
    if form == "markdown":
        from dl2gpu.report.exports_markdown import ticket

        return "\n".join(ticket(f, labels.get(f["id"], "")) for f in rows) or "No findings.\n"
    return _one(report, form, rows[0], labels.get(rows[0]["id"], ""))


def _one(report: Report, form: str, finding: dict[str, Any], label: str) -> str:
    if form == "perfetto":
        from dl2gpu.report.exports_trace import perfetto

        return perfetto(finding, label)
    if form in {"dot", "graphml"}:
        from dl2gpu.report import exports_graph

        return (
            exports_graph.dot(finding, label)
            if form == "dot"
            else exports_graph.graphml(finding, label)
        )
    if form == "html":
        from dl2gpu.report.html import finding_html

        return finding_html(report, finding)
    raise ValueError(f"expected one of {', '.join(FORMS)}, found {form!r}")
