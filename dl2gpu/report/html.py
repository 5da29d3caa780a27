"""The report as web pages: ``index.html`` and a page a finding.

Each page is one file that loads nothing: style, script and pictures are inside, and a policy in its
head forbids everything else, so it works from a folder, from object storage and from an attachment.
Everything that comes from a trace is escaped by the templates, and the policy allows only the two
scripts and the style sheet that are written here, by their hashes.

A fleet's night may have thousands of findings of a few faults. Each fault has pages for its first
findings, in turns, until there are :data:`MOST_PAGES`; the others lead to the first page of their
fault.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import polars as pl

from dl2gpu import __version__
from dl2gpu.report.console import job_labels
from dl2gpu.report.html_finding import Context, finding_view
from dl2gpu.report.html_overview import History, gravest_first, overview
from dl2gpu.report.model import Report
from dl2gpu.report.words import safe

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = [
    "INDEX",
    "MOST_PAGES",
    "PAGES_FOLDER",
    "History",
    "finding_context",
    "finding_html",
    "fragment",
    "write_pages",
]

MOST_PAGES: Final = 1000
"""Pages of findings; what a folder and a browser's history bear."""

INDEX: Final = "index.html"

PAGES_FOLDER: Final = re.compile(r"findings-[0-9a-f]{12}")
"""Name of the folder of the findings' pages: of its content, so that an overview that is there and
the pages to which it leads are of one report, even while another is written over it."""

_TEMPLATES: Final = Path(__file__).parent / "templates"
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}")


def write_pages(
    report: Report,
    folder: Path,
    *,
    history: History | None = None,
    owners: Mapping[str, str] | None = None,
    price: float | None = None,
) -> list[str]:
    """Write the pages into ``folder``, which exists and is empty of them.

    Args:
        report: with its rows in the order of :func:`dl2gpu.report.save.canonical`.
        folder: where to.
        history: of earlier nights, for the overview.
        owners: job to team; default what the names of jobs and folders say.
        price: of a GPU-hour, where the calculator starts.

    Returns:
        Names in ``folder``: that of the overview first, then that of the folder of the others.
    """
    names = _chosen(report.findings)
    inner = folder / "findings"
    inner.mkdir()
    digest = hashlib.blake2b(digest_size=6)
    for name, text in _finding_pages(report, names):
        data = text.encode()
        digest.update(name.encode() + b"\0" + data)
        (inner / name).write_bytes(data)
    within = f"findings-{digest.hexdigest()}"
    if names:
        inner.rename(folder / within)
    else:
        inner.rmdir()
    first = _first_of_fault(report.findings, names)
    pages = {i: f"{within}/{name}" for i, name in (first | names).items()}
    page = _page("index", "index.html.j2", overview(report, pages, history, owners, price))
    (folder / INDEX).write_text(page, "utf-8")
    return [INDEX, within] if names else [INDEX]


def finding_html(report: Report, finding: Mapping[str, Any]) -> str:
    """The page of one finding by itself; ``report`` is canonical, the finding one of its rows."""
    view = finding_view(finding, finding_context(report, finding))
    return _page("finding", "finding.html.j2", view | {"alone": True})


def finding_context(report: Report, finding: Mapping[str, Any]) -> Context:
    """What the page of one finding by itself says of its job; ``report`` is canonical."""
    return _Site.of(report, {}).context(finding)


def fragment(template: str, view: Mapping[str, Any]) -> str:
    """A part of somebody else's page, as of a notebook: its style concerns nothing around it."""
    from markupsafe import Markup

    css = ".dl2gpu{color-scheme:light;\n" + _file("colours.css") + _file("fragment.css")
    css += _file("pictures.css") + "}"
    return _environment().get_template(template).render(v=view, css=Markup(css))  # noqa: S704


# --------------------------------------------------------------------------------------------------
# Which findings have pages


def _chosen(findings: pl.DataFrame) -> dict[str, str]:
    """Finding id to the name of its page, gravest first; at most :data:`MOST_PAGES`."""
    groups: dict[tuple[str, str], list[str]] = {}
    rows = findings.select("kind", "fingerprint", "id").iter_rows()
    for kind, mark, ident in sorted(rows, key=lambda r: (gravest_first(r[0]), r[1] or "")):
        groups.setdefault((kind, mark or ident), []).append(ident)
    turns = max((len(g) for g in groups.values()), default=0)
    taken = [
        g[turn] for turn in range(min(turns, MOST_PAGES)) for g in groups.values() if turn < len(g)
    ]
    chosen = set(taken[:MOST_PAGES])
    ordered = [i for g in groups.values() for i in g if i in chosen]
    return {
        ident: f"{ident if _PLAIN.fullmatch(ident) else f'finding_{number}'}.html"
        for number, ident in enumerate(ordered, 1)
    }


def _first_of_fault(findings: pl.DataFrame, names: Mapping[str, str]) -> dict[str, str]:
    """Finding id to the page of the first finding of its fault, where that has one."""
    first: dict[tuple[str, str], str] = {}
    out = {}
    for kind, mark, ident in findings.select("kind", "fingerprint", "id").iter_rows():
        if ident in names:
            first.setdefault((kind, mark or ident), names[ident])
    for kind, mark, ident in findings.select("kind", "fingerprint", "id").iter_rows():
        if name := first.get((kind, mark or ident)):
            out[ident] = name
    return out


@dataclass(frozen=True)
class _Site:
    """What the pages of one report have in common."""

    labels: Mapping[str, str]
    jobs: Mapping[str, dict[str, Any]]
    unread: Mapping[str, list[tuple[str, str, str]]]
    faults: Mapping[tuple[str, str], list[str]]
    names: Mapping[str, str]
    around: Mapping[str, tuple[str | None, str | None]]

    @staticmethod
    def of(report: Report, names: Mapping[str, str]) -> _Site:
        jobs = {i: j for j in report.jobs.iter_rows(named=True) for i in j["findings"] or ()}
        unread: dict[str, list[tuple[str, str, str]]] = {}
        partly = report.inputs.filter(pl.col("status").is_in(["partial", "quarantined"]))
        for job, *facts in partly.select("job", "path", "status", "reason").iter_rows():
            unread.setdefault(job or "", []).append(tuple(x or "" for x in facts))  # type: ignore[arg-type]
        faults: dict[tuple[str, str], list[str]] = {}
        for kind, mark, ident in report.findings.select("kind", "fingerprint", "id").iter_rows():
            faults.setdefault((kind, mark or ident), []).append(ident)
        order = list(names)
        around = {
            ident: (order[i - 1] if i else None, order[i + 1] if i + 1 < len(order) else None)
            for i, ident in enumerate(order)
        }
        return _Site(job_labels(report), jobs, unread, faults, names, around)

    def context(self, f: Mapping[str, Any]) -> Context:
        ident = f["id"]
        job = self.jobs.get(ident)
        same = [
            i for i in self.faults.get((f["kind"], f["fingerprint"] or ident), ()) if i != ident
        ]
        at = {job["job"], job["folder"]} if job else {f["job"]}
        unread = [u for name in sorted(x for x in at if x) for u in self.unread.get(name, ())]
        before, after = self.around.get(ident, (None, None))
        return Context(
            self.labels.get(ident, safe(f["job"], 120)),
            job,
            unread,
            [(self.labels.get(i, i), self.names.get(i, "")) for i in same],
            (self.names[before], self.labels.get(before, before)) if before else None,
            (self.names[after], self.labels.get(after, after)) if after else None,
        )


def _finding_pages(report: Report, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(name, page) of the chosen findings, in the order of the report."""
    site = _Site.of(report, names)
    for f in report.findings.filter(pl.col("id").is_in(list(names))).iter_rows(named=True):
        view = finding_view(f, site.context(f))
        yield names[f["id"]], _page("finding", "finding.html.j2", view)


# --------------------------------------------------------------------------------------------------
# Templates


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    made.filters |= {"number": _number, "hours": _hours, "data": _data}
    return made


@functools.cache
def _fixed(kind: str) -> dict[str, Any]:
    """Style, script and policy, the same on all pages of a kind."""
    from markupsafe import Markup

    css = f":root{{color-scheme:light dark;\n{_file('colours.css')}}}\n"
    css += _file("pictures.css") + _file("page.css")
    script = _file("page.js") + (_file("index.js") if kind == "index" else "")
    policy = (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # our own files, and no text of anybody else
    return {"css": Markup(css), "script": Markup(script), "csp": policy, "version": __version__}  # noqa: S704


def _file(name: str) -> str:
    return (_TEMPLATES / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _page(kind: str, template: str, view: Mapping[str, Any]) -> str:
    return _environment().get_template(template).render(v=view, **_fixed(kind))


def _number(n: float | None) -> str:
    return "" if n is None else f"{n:,}"


def _hours(n: float | None) -> str:
    return "" if n is None else f"{n:,.3g}" if n < 1000 else f"{n:,.0f}"


def _data(value: object) -> Any:
    """JSON for a script element, in which nothing can end that element."""
    from markupsafe import Markup

    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - the only characters that matter there were replaced
