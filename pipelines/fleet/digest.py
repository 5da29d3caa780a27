"""What a run has to say, as data, Markdown and a page."""

from __future__ import annotations

import html
import re
from typing import Any, Final

import polars as pl

from pipelines.fleet.config import Config

__all__ = ["as_html", "as_markdown", "digest"]

_SHOWN: Final = 50
"""Groups of one status that a digest tells in full; the rest is counted."""


def digest(
    name: str, night: str, groups: pl.DataFrame, jobs: pl.DataFrame, findings: pl.DataFrame,
    files: dict[str, int], config: Config,
) -> dict[str, Any]:  # fmt: skip
    """The digest of a run as plain data: the same run gives the same digest.

    Args:
        name: the run's name.
        night: its night.
        groups: of :func:`groups.grouped`.
        jobs: of this run.
        findings: of this run.
        files: how many files the run read, by what became of them.
        config: prices, and until when suppressions hold.
    """
    verdicts = jobs.group_by("verdict").len().sort("len", "verdict", descending=[True, False])
    lost = float(findings["gpu_hours"].sum())
    saved = float(findings["saved"].sum())
    team = pl.col("team").fill_null("")
    teams = (
        findings.group_by(team=team)
        .agg(jobs=pl.col("job").n_unique(), gpu_hours=pl.col("gpu_hours").sum())
        .sort("gpu_hours", "team", descending=[True, False])
    )
    return {
        "schema": "dl2gpu.digest/1",
        "run": name,
        "night": night,
        "jobs": jobs.height,
        "deadlocked": int((jobs["deadlocked"] == 1).sum()),
        "verdicts": dict(verdicts.iter_rows()),
        "files": dict(sorted(files.items())),
        "cost": {
            "gpu_hours": round(lost, 3),
            "saved_gpu_hours": round(saved, 3),
            "detection_minutes": config.price.detection_minutes,
            "gpu_hour": config.price.gpu_hour,
            "currency": config.price.currency,
            "total": round(lost * config.price.gpu_hour, 2),
            "saved": round(saved * config.price.gpu_hour, 2),
        },
        "teams": teams.to_dicts(),
        "groups": groups.to_dicts(),
        "expired": [
            {"until": str(s.until), "reason": s.reason}
            for s in config.suppressions if str(s.until) < night
        ],
    }  # fmt: skip


_TITLES: Final = (
    ("regressed", "Regressed", "gone for a while, and back"),
    ("new", "New", "never seen before"),
    ("known", "Known", "seen before"),
    ("gone", "Gone", "not seen any more"),
)


def _parts(told: dict[str, Any]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(title, explanation, groups) of each part of a digest that has groups."""
    open_groups = [g for g in told["groups"] if g["suppressed"] is None]
    parts = [
        (title, meaning, [g for g in open_groups if g["status"] == status])
        for status, title, meaning in _TITLES
    ]
    hidden = [g for g in told["groups"] if g["suppressed"] is not None]
    return [p for p in [*parts, ("Suppressed", "nobody is told of these", hidden)] if p[2]]


def _cost_line(cost: dict[str, Any]) -> str:
    line = f"{cost['gpu_hours']:,.1f} GPU-hours lost"
    if cost["gpu_hour"]:
        line += f" ({cost['total']:,.2f} {cost['currency']})"
    line += (
        f"; noticed within {cost['detection_minutes']:g} minutes it would have been "
        f"{cost['gpu_hours'] - cost['saved_gpu_hours']:,.1f}"
    )
    return line


def _head(told: dict[str, Any]) -> list[str]:
    verdicts = ", ".join(f"{n:,} {kind}" for kind, n in told["verdicts"].items())
    files = ", ".join(f"{n:,} {status}" for status, n in told["files"].items())
    return [
        f"{told['jobs']:,} jobs: {verdicts}" if told["jobs"] else "No new jobs.",
        _cost_line(told["cost"]),
        f"Files: {files}" if files else "No new files.",
    ]


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _facts(group: dict[str, Any]) -> str:
    here = f"{_count(group['jobs'], 'job')} of this run" if group["jobs"] else "no job of this run"
    facts = [
        f"{here} ({group['all_jobs']:,} in all, in {_count(group['nights'], 'night')})",
        f"first seen {group['first_seen']}, last {group['last_seen']}",
        f"{group['gpu_hours']:,.1f} GPU-hours ({group['all_gpu_hours']:,.1f} in all)",
    ]
    if group["teams"]:
        facts.append("teams " + ", ".join(group["teams"]))
    if group["suppressed"]:
        facts.append(f"suppressed: {group['suppressed']}")
    return "; ".join(facts)


# --------------------------------------------------------------------------------------------------
# Markdown


def _text(value: object) -> str:
    """``value`` on one line, with nothing in it that Markdown or HTML would act upon."""
    line = " ".join(str(value).split())
    return re.sub(r"([\\`*_\[\]<>|~&])", r"\\\1", line).replace("@", "@\N{ZERO WIDTH SPACE}")


def as_markdown(told: dict[str, Any]) -> str:
    """The digest for a ticket or a message."""
    lines = [f"# Night {_text(told['run'])}", "", *(f"- {_text(x)}" for x in _head(told)), ""]
    for title, meaning, groups in _parts(told):
        lines += [f"## {title} ({len(groups)}): {meaning}", ""]
        for g in groups[:_SHOWN]:
            lines += [
                (
                    f"- **{_text(g['kind'])}** `{g['fingerprint']}` in {_text(g['job'])} "
                    f"({_text(g['finding'])})"
                ),
                f"  {_text(g['summary'] or '')}",
                f"  {_text(_facts(g))}",
            ]
        if len(groups) > _SHOWN:
            lines.append(f"- and {len(groups) - _SHOWN} more")
        lines.append("")
    if told["teams"]:
        lines += ["| team | jobs with findings | GPU-hours |", "|---|---|---|"]
        lines += [
            f"| {_text(t['team'] or 'nobody')} | {t['jobs']} | {t['gpu_hours']:,.1f} |"
            for t in told["teams"]
        ]
        lines.append("")
    for s in told["expired"]:
        lines.append(f"A suppression ended on {s['until']}: {_text(s['reason'])}")
    return "\n".join(lines).rstrip() + "\n"


# --------------------------------------------------------------------------------------------------
# HTML

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --weak: #777; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 small { font-weight: normal; color: var(--weak); }
article { border: 1px solid var(--line); border-radius: 6px; padding: .6rem 1rem; margin: .6rem 0; }
article p { margin: .2rem 0; overflow-wrap: anywhere; } .facts { color: var(--weak); }
table { border-collapse: collapse; } td, th { border: 1px solid var(--line); padding: .2rem .6rem; }
td.n { text-align: right; } code { font-family: ui-monospace, monospace; }
@media print { article { break-inside: avoid; } }
"""


def as_html(told: dict[str, Any]) -> str:
    """The digest as a page without scripts or anything from elsewhere."""
    e = html.escape
    out = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        (
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        ),
        f"<title>Night {e(told['run'])}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Night {e(told['run'])}</h1><ul>",
        *(f"<li>{e(line)}</li>" for line in _head(told)),
        '</ul><p><a href="index.html">The report of this run</a></p>',
    ]
    for title, meaning, groups in _parts(told):
        out.append(f"<h2>{e(title)} ({len(groups)}) <small>{e(meaning)}</small></h2>")
        for g in groups[:_SHOWN]:
            out += [
                (
                    f"<article><p><b>{e(g['kind'])}</b> <code>{e(g['fingerprint'])}</code> "
                    f"in {e(g['job'])} ({e(g['finding'])})</p>"
                ),
                f"<p>{e(g['summary'] or '')}</p>",
                f"<p>{e(g['advice'] or '')}</p>" if g["advice"] else "",
                f'<p class="facts">{e(_facts(g))}</p></article>',
            ]
        if len(groups) > _SHOWN:
            out.append(f"<p>and {len(groups) - _SHOWN} more</p>")
    if told["teams"]:
        out.append("<table><tr><th>team</th><th>jobs with findings</th><th>GPU-hours</th></tr>")
        out += [
            f"<tr><td>{e(t['team'] or 'nobody')}</td><td class=n>{t['jobs']}</td>"
            f"<td class=n>{t['gpu_hours']:,.1f}</td></tr>"
            for t in told["teams"]
        ]
        out.append("</table>")
    out += [
        f"<p>A suppression ended on {e(s['until'])}: {e(s['reason'])}</p>" for s in told["expired"]
    ]
    return "\n".join([*filter(None, out), "</body></html>"]) + "\n"


def as_index(nights: pl.DataFrame) -> str:
    """A page of all nights, with the columns of ``state.NIGHTS``, with links to their digests."""
    rows = "\n".join(
        f'<tr><td><a href="{html.escape(r["name"])}/digest.html">{html.escape(r["name"])}</a></td>'
        f"<td class=n>{r['jobs']:,}</td><td class=n>{r['deadlocked']:,}</td>"
        f"<td class=n>{r['fingerprints']:,}</td><td class=n>{r['gpu_hours']:,.1f}</td></tr>"
        for r in nights.iter_rows(named=True)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Nights</title><style>{_STYLE}</style></head><body><h1>Nights</h1>\n"
        "<table><tr><th>night</th><th>jobs</th><th>deadlocked</th><th>fingerprints</th>"
        f"<th>GPU-hours lost</th></tr>\n{rows}\n</table></body></html>\n"
    )
