"""Reports and findings as notebooks show them: HTML that brings its own style and no script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dl2gpu.report.html import finding_context, fragment
from dl2gpu.report.html_finding import finding_view
from dl2gpu.report.html_overview import overview
from dl2gpu.report.model import Report
from dl2gpu.report.save import canonical

__all__ = ["FindingView", "report_fragment", "view_of"]

_FAULTS: Final = 12


@dataclass(frozen=True, repr=False)
class FindingView:
    """One finding, to look at: a notebook shows its pictures, ``print`` its text.

    ``row`` holds the columns of :data:`dl2gpu.report.model.FINDINGS`.
    """

    report: Report
    row: dict[str, Any]

    def to(self, form: str) -> str:
        """The finding in another form: see :data:`dl2gpu.report.exports.FORMS`."""
        from dl2gpu.report.exports import export

        return export(self.report, form, self.row["id"])

    def __str__(self) -> str:
        from dl2gpu.report.console import rendered
        from dl2gpu.report.explain import explain

        return rendered(explain(self.report, self.row["id"]))

    def __repr__(self) -> str:
        return f"<finding {self.row['id']}: {self.row['kind']} in {self.row['job']!r}>"

    def _repr_html_(self) -> str:
        context = finding_context(self.report, self.row)
        return fragment("finding.fragment.j2", finding_view(self.row, context))


def view_of(report: Report, finding: str | None = None) -> FindingView:
    """The finding with this id (or of the job of this name); without one, the gravest.

    Raises:
        ReportError: there is none, or there are several.
    """
    from dl2gpu.report.explain import choose

    report = canonical(report)
    return FindingView(report, choose(report, finding))


def report_fragment(report: Report) -> str:
    """Jobs by verdict and the gravest faults."""
    view = overview(canonical(report), {})
    dead = report.jobs["deadlocked"]
    faults = [*view["faults"]["rows"], *view["faults"]["rest"]]
    more = len(faults) - _FAULTS + view["faults"]["more"]
    return fragment(
        "report.fragment.j2",
        view
        | {
            "dead": int(dead.sum()),
            "unsure": dead.null_count(),
            "faults": view["faults"] | {"rows": faults[:_FAULTS]},
            "more": max(more, 0),
        },
    )
