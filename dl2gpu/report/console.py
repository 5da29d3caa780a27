"""The summary of a scan on a terminal: jobs by verdict, findings gravest first, inputs not read.

Nothing from a trace is ever parsed as markup: text is built from :class:`rich.text.Text`, and every
name has passed :func:`dl2gpu.report.words.safe`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import polars as pl
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dl2gpu.report.model import KINDS, Report
from dl2gpu.report.save import canonical, gravity
from dl2gpu.report.words import (
    EVIDENCE,
    call_site,
    fold,
    job_label,
    operation,
    place,
    ranks,
    safe,
    utc,
)

__all__ = ["COLOURS", "console", "facts", "grid", "job_labels", "rendered", "summary"]

COLOURS: Final[dict[str, str]] = {
    "cycle": "bold red",
    "order_inversion": "bold red",
    "init_cycle": "bold red",
    "mismatch": "bold red",
    "unmatched_p2p": "bold red",
    "missing_participant": "bold red",
    "crashed_rank": "yellow",
    "stalled_rank": "yellow",
    "in_flight": "yellow",
    "potential": "magenta",
    "insufficient_evidence": "cyan",
    "healthy": "green",
}

_NAMES: Final = 6  # jobs named for each verdict
_PLACES: Final = 8  # places of a cycle that are spelt out
_GROUPS: Final = 4  # groups of ranks that hang in the same operation
_FINDINGS: Final = 40  # findings in full; a fleet's night has more, and they are in the report
_REASONS: Final = 12


def summary(report: Report, saved: str | None = None) -> RenderableType:
    """The whole console summary; ``saved`` is the folder with the report's files, if any."""
    report = canonical(report)
    labels = job_labels(report)
    parts: list[RenderableType] = [_headline(report), Text(), _verdicts(report)]
    findings = report.findings.sort(
        gravity("kind"), "job", "attempt", "id", nulls_last=False
    ).to_dicts()
    groups = _same_bug(findings)
    for number, group in enumerate(groups[:_FINDINGS], 1):
        parts += [Text(), _finding(number, group, labels)]
    if len(groups) > _FINDINGS:
        parts += [Text(), Text(f"... and {len(groups) - _FINDINGS} more findings in the report.")]
    parts += _against_plan(report.summary.get("plans"))
    unread = _inputs(report.inputs)
    if unread is not None:
        parts += [Text(), unread]
    if saved is not None:
        parts += [Text(), Text(f"report: {safe(saved)}")]
        if groups:
            parts.append(Text(f"more:   dl2gpu explain {safe(saved)} {safe(groups[0][0]['id'])}"))
    return Group(*parts)


def _against_plan(plans: Any) -> list[RenderableType]:
    """How the jobs of the plan's size keep to it."""
    if not isinstance(plans, list) or not plans:
        return []
    kept = sum(p.get("follows") is True for p in plans)
    verb = "follows" if len(plans) == 1 else "follow"
    lines = [f"{kept} of {_count(len(plans), 'job')} of the plan's size {verb} it"]
    others = [p for p in plans if p.get("follows") is not True]
    lines += [f"  {p.get('job')}: {p.get('says')}" for p in others[:_REASONS]]
    if len(others) > _REASONS:
        lines.append(f"  ... and {len(others) - _REASONS} more in the report")
    return [Text(), *(Text(safe(line, 400)) for line in lines)]


def job_labels(report: Report) -> dict[str, str]:
    """Finding id to the label of its job; jobs of one name in two folders get their folder."""
    jobs = report.jobs.to_dicts()
    twins = {
        name
        for (name, _), n in Counter((j["job"], j["attempt"]) for j in jobs).items()
        if n > 1 and name is not None
    }
    labels = {f["id"]: job_label(f) for f in report.findings.iter_rows(named=True)}
    for job in jobs:
        label = job_label(job, twins)
        labels.update(dict.fromkeys(job["findings"] or (), label))
    return labels


_NOTES: Final = 3


def _headline(report: Report) -> Text:
    s = report.summary
    stuck = report.jobs.filter(pl.col("deadlocked"))
    unsure = report.jobs.filter(pl.col("deadlocked").is_null()).height
    text = Text()
    text.append(f"{stuck.height} of {_count(report.jobs.height, 'job')} deadlocked", style="bold")
    if unsure:
        text.append(f", {unsure} undecided")
    known = [
        _count(s[key], word)
        for key, word in (("ranks", "rank"), ("events", "event"), ("files", "file"))
        if s.get(key) is not None
    ]
    if s.get("bytes_read") is not None:
        known.append(f"{_size(s['bytes_read'])} read")
    if known:
        text.append("\n" + ", ".join(known))
    if s.get("elapsed_s") is not None:
        text.append(f" in {s['elapsed_s']:.2f} s")
    if s.get("engine"):
        text.append(f" (engine {safe(s['engine'], 40)}, cluster {safe(s.get('cluster'), 80)})")
    notes = s.get("notes") or []
    for note in notes[:_NOTES]:
        text.append(f"\n{safe(note, 300)}")
    if len(notes) > _NOTES:
        text.append(f"\n... and {len(notes) - _NOTES} more notes in the report.")
    return text


def _verdicts(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("verdict", no_wrap=True)
    table.add_column("jobs", justify="right", no_wrap=True)
    table.add_column("which", overflow="fold")
    by_verdict: dict[str, list[str]] = {}
    for job in report.jobs.iter_rows(named=True):
        by_verdict.setdefault(job["verdict"] or "healthy", []).append(job_label(job))
    order = {kind: i for i, kind in enumerate(KINDS)}
    for verdict in sorted(by_verdict, key=lambda v: (order.get(v, len(KINDS)), v)):
        names = by_verdict[verdict]
        which = ", ".join(names[:_NAMES])
        if len(names) > _NAMES:
            which += f", and {len(names) - _NAMES} more"
        table.add_row(
            Text(safe(verdict, 40), style=COLOURS.get(verdict, "")), str(len(names)), Text(which)
        )
    return table


def _same_bug(findings: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Findings of one fingerprint and kind are one entry: the same bug in several jobs."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for f in findings:
        groups.setdefault((f["kind"], f["fingerprint"] or f"id {f['id']}"), []).append(f)
    return list(groups.values())


def _finding(number: int, group: list[dict[str, Any]], labels: Mapping[str, str]) -> RenderableType:
    first = group[0]
    title = Text(f"{number}. ")
    title.append(labels.get(first["id"], job_label(first)), style="bold")
    title.append(": ")
    title.append(safe(first["kind"], 40), style=COLOURS.get(first["kind"], ""))
    title.append(f"  [{safe(first['id'], 40)}]", style="dim")
    rows = list(facts(first))
    if len(group) > 1:
        others = list(dict.fromkeys(labels.get(f["id"], job_label(f)) for f in group[1:]))
        more = f", and {len(others) - _NAMES} more" if len(others) > _NAMES else ""
        rows.append(("same bug", f"also in {', '.join(others[:_NAMES])}{more}"))
    body: list[RenderableType] = [title]
    if first["summary"]:
        body.append(Padding(Text(safe(first["summary"], 600)), (0, 0, 0, 3), expand=False))
    body.append(Padding(grid(rows), (0, 0, 0, 3), expand=False))
    return Group(*body)


def grid(rows: Iterable[tuple[str, str]]) -> Table:
    """Label and text, the text folded at its own left edge."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    return table


def facts(finding: Mapping[str, Any], places: int = _PLACES) -> Iterator[tuple[str, str]]:
    """The facts of one finding as (label, text), in the order in which one asks for them."""
    yield "culprits", ranks(finding["culprits"], "none named")
    if finding["victims"]:
        yield "victims", ranks(finding["victims"])
    cycle = finding["cycle"] or []
    for i, node in enumerate(cycle[:places]):
        site = call_site(node["stack"])
        yield "" if i else "cycle", place(node) + (f"\n  at {site}" if site else "")
    if len(cycle) > places:
        yield "", f"... and {len(cycle) - places} more places"
    if finding["first_divergence"] is not None:
        yield "parted", _where(finding["first_divergence"])
    if not cycle:
        yield from _hangs(finding["hangs_at"] or [])
    if finding["reason"]:
        yield "reason", safe(finding["reason"])
    if finding["condition"]:
        yield "condition", safe(finding["condition"])
    if finding["probability"] is not None:
        yield "probability", f"{finding['probability']:.3g}"
    if finding["stopped_at_ns"] is not None:
        lost = finding["gpu_hours_lost"]
        yield (
            "stopped",
            utc(finding["stopped_at_ns"]) + (f", {lost:.2g} GPU-hours lost since" if lost else ""),
        )
    if finding["evidence"]:
        yield "evidence", EVIDENCE.get(finding["evidence"], safe(finding["evidence"]))
    if finding["advice"]:
        yield "do", safe(finding["advice"], 600)


def _where(op: Mapping[str, Any]) -> str:
    site = call_site(op["stack"])
    number = f", operation {op['seq']}" if op.get("seq") is not None else ""
    return f"rank {op['rank']}{number}: {operation(op)}" + (f" at {site}" if site else "")


def _hangs(operations: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    together: dict[tuple[str, str | None], list[int]] = {}
    for op in operations:
        together.setdefault((operation(op), call_site(op["stack"])), []).append(op["rank"])
    groups = sorted(together.items(), key=lambda kv: (-len(kv[1]), kv[1]))
    for i, ((words, site), members) in enumerate(groups[:_GROUPS]):
        yield "" if i else "hangs", f"{ranks(members)} in {words}" + (f" at {site}" if site else "")
    if len(groups) > _GROUPS:
        rest = [rank for _, members in groups[_GROUPS:] for rank in members]
        yield "", f"... and ranks {fold(rest)} elsewhere"


def _inputs(inputs: pl.DataFrame) -> RenderableType | None:
    """Counts by status and reason of what was not read, or not read whole."""
    unread = inputs.filter(pl.col("status") != "read")
    if unread.is_empty():
        return None
    counts = (
        unread.group_by("status", "reason")
        .agg(pl.len().alias("files"), pl.col("path").min())
        .sort(
            pl.col("status").replace_strict(
                {"quarantined": 0, "partial": 1, "ignored": 2}, default=3, return_dtype=pl.Int32
            ),
            -pl.col("files").cast(pl.Int64),
            "reason",
            "path",
        )
    )
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("inputs not read, or in part", no_wrap=True)
    table.add_column("files", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=2)
    table.add_column("for example", overflow="fold", ratio=1)
    for row in counts.head(_REASONS).iter_rows(named=True):
        table.add_row(
            Text(safe(row["status"], 20)),
            str(row["files"]),
            Text(safe(row["reason"] or "no reason given")),
            Text(safe(row["path"], 200)),
        )
    if counts.height <= _REASONS:
        return table
    rest = counts.slice(_REASONS)["files"].sum()
    return Group(table, Text(f"... and {rest} more files for other reasons; --format json has all"))


def _count(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            break
        n /= 1000
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"


def console(*, stderr: bool = False) -> Console:
    """The one console: no markup, no emoji, no highlighting; NO_COLOR and COLUMNS are respected.

    Where the output is no terminal its width is that of COLUMNS, else 120.
    """
    made = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 120
    return made


def rendered(what: RenderableType) -> str:
    """``what`` as the text for standard output, without the spaces that pad its lines."""
    out = console()
    with out.capture() as captured:
        out.print(what)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
