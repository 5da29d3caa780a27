"""What the overview shows: verdicts, faults, the table of jobs, teams, nights, and what it cost."""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl

from dl2gpu.report.console import job_labels
from dl2gpu.report.html_finding import TONES, kind_words, short
from dl2gpu.report.model import KINDS, Report
from dl2gpu.report.words import MEANING, safe

__all__ = ["History", "gravest_first", "measured", "overview", "team_of"]


@dataclass(frozen=True)
class History:
    """What earlier nights found.

    ``nights``: one row a night and verdict: ``night`` Date, ``verdict`` String, ``jobs`` Int64;
    ``gpu_hours_lost`` Float64 may be there. ``faults``: one row a fingerprint: ``fingerprint``
    String, ``status`` String (new, known, gone, regressed), ``first_seen`` and ``last_seen`` Date,
    ``nights`` and ``jobs`` Int64; ``gpu_hours_lost`` Float64 may be there.
    """

    nights: pl.DataFrame = field(
        default_factory=lambda: pl.DataFrame(
            schema={"night": pl.Date(), "verdict": pl.String(), "jobs": pl.Int64()}
        )
    )
    faults: pl.DataFrame = field(
        default_factory=lambda: pl.DataFrame(
            schema={
                "fingerprint": pl.String(), "status": pl.String(), "first_seen": pl.Date(),
                "last_seen": pl.Date(), "nights": pl.Int64(), "jobs": pl.Int64(),
            }
        )
    )  # fmt: skip


_FAULTS: Final = 100  # faults listed by name
_OPEN: Final = 20  # of them without a click
_REASONS: Final = 50
_TEAMS: Final = 30
_NIGHTS: Final = 60
_PAIRS: Final = 256  # measured stops that the calculator works with
_FIRST_ROWS: Final = 50
_CAUSE: Final = 24  # characters

_ORDER: Final = {kind: i for i, kind in enumerate(KINDS)}


def gravest_first(verdict: str | None) -> tuple[int, str]:
    """A key to sort verdicts by."""
    return _ORDER.get(verdict or "healthy", len(KINDS)), verdict or "healthy"


# --------------------------------------------------------------------------------------------------
# Teams

_NAMED: Final = re.compile(
    r"(?:^|[/,;_\-.])(team|owner|project|model)[=:]([^/,;&\s]{1,60})", re.IGNORECASE
)


def team_of(job: str | None, folder: str | None = None) -> tuple[str, str] | None:
    """("team", "vision") as the name of a job or its folder says; None where it says nothing.

    ``team=vision`` (also owner, project, model) is taken at its word; of a path, ``vision/swin/7``,
    the first part is the group.
    """
    for text in (job, folder):
        if text and (hit := _NAMED.search(text)):
            return hit[1].lower(), hit[2]
    for text in (job, folder):
        if text and "/" in text.strip("/"):
            return "group", text.strip("/").split("/")[0][:60]
    return None


def _teams(report: Report, owners: Mapping[str, str] | None) -> tuple[str, list[str | None]]:
    """What the jobs are grouped by, and the group of each; none where names do not say."""
    jobs, folders = report.jobs["job"].to_list(), report.jobs["folder"].to_list()
    if owners is not None:
        return "team", [owners.get(j or "") for j in jobs]
    said = [team_of(j, f) for j, f in zip(jobs, folders, strict=True)]
    kinds = Counter(s[0] for s in said if s is not None)
    if not kinds:
        return "", [None] * len(jobs)
    by = max(kinds, key=lambda k: (kinds[k], k))
    return by, [s[1] if s is not None and s[0] == by else None for s in said]


# --------------------------------------------------------------------------------------------------
# The page


def overview(
    report: Report,
    pages: Mapping[str, str],
    history: History | None = None,
    owners: Mapping[str, str] | None = None,
    price: float | None = None,
) -> dict[str, Any]:
    """Everything that the template names. ``report`` is canonical.

    Args:
        pages: finding id to the address of its page; those without are left out.
        history: of earlier nights.
        owners: job to team; default what names and folders say.
        price: of a GPU-hour.
    """
    by, team = _teams(report, owners)
    findings = {f["id"]: f for f in report.findings.iter_rows(named=True)}
    jobs = report.jobs.to_dicts()
    table = _table(jobs, team, findings, pages)
    stops = measured(report)
    verdicts = Counter(j["verdict"] or "healthy" for j in jobs)
    lost = sum(hours for _, hours in stops)
    return {
        "summary": _summary(report, lost),
        "read": _read(report),
        "notes": [safe(n, 300) for n in (report.summary.get("notes") or [])[:5]],
        "verdicts": [
            {
                "kind": kind, "words": kind_words(kind), "jobs": n, "tone": TONES.get(kind, "info"),
                "meaning": MEANING.get(kind, ""), "share": _share(n, max(verdicts.values())),
            }
            for kind, n in sorted(verdicts.items(), key=lambda kv: gravest_first(kv[0]))
        ],
        "faults": _faults(report, pages, history),
        "by": by,
        "teams": _by_team(jobs, team),
        "nights": _nights(history),
        "table": table,
        "rows": _first_rows(table),
        "total": len(jobs),
        "unread": _unread(report.inputs),
        "cost": _cost(report, stops, price),
    }  # fmt: skip


def _share(n: float, most: float) -> float:
    return round(1000 * n / most, 1) if most else 0


def _summary(report: Report, lost: float) -> list[dict[str, str]]:
    dead = report.jobs["deadlocked"]
    return [
        {"value": f"{int(dead.sum()):,}", "what": f"of {report.jobs.height:,} jobs deadlocked"},
        {"value": f"{dead.null_count():,}", "what": "undecided"},
        {"value": f"{lost:,.3g}", "what": "GPU-hours lost"},
        {"value": f"{report.findings['fingerprint'].n_unique():,}", "what": "different faults"},
    ]


def _read(report: Report) -> str:
    """How much was read, as "Read: 60 ranks, 1,625 operations, 62 files; engine cpu."."""
    s = report.summary
    known = [
        f"{compact(s[key])} {word}"
        for key, word in (("ranks", "ranks"), ("events", "operations"), ("files", "files"))
        if isinstance(s.get(key), int)
    ]
    engine = f"; engine {safe(s['engine'], 40)}" if s.get("engine") else ""
    return f"Read: {', '.join(known)}{engine}." if known else ""


def compact(n: float) -> str:
    """``8,192``, ``1.2 M``."""
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:,.0f}"


def _table(
    jobs: Sequence[Mapping[str, Any]],
    team: Sequence[str | None],
    findings: Mapping[str, Mapping[str, Any]],
    pages: Mapping[str, str],
) -> dict[str, Any]:
    """The table of jobs as columns; what repeats is a number into a list."""
    teams = sorted({t for t in team if t})
    of_team = {t: i for i, t in enumerate(teams)}
    kinds = sorted({j["verdict"] or "healthy" for j in jobs}, key=gravest_first)
    of_kind = {k: i for i, k in enumerate(kinds)}
    columns: dict[str, list[Any]] = {
        c: []
        for c in (
            "job", "attempt", "verdict", "world", "present", "events", "hours", "stopped", "blamed",
            "team", "page", "id", "more",
        )
    }  # fmt: skip
    for j, t in zip(jobs, team, strict=True):
        mine = [findings[i] for i in j["findings"] or () if i in findings]
        mine.sort(key=lambda f: (gravest_first(f["kind"]), len(f["id"]), f["id"]))
        first = mine[0] if mine else None
        stopped = first["stopped_at_ns"] if first else None
        row = {
            "job": safe(j["job"] or "(no name)", 200),
            "attempt": j["attempt"] or 0,
            "verdict": of_kind[j["verdict"] or "healthy"],
            "world": j["world_size"],
            "present": len(j["ranks_present"] or ()),
            "events": j["events"],
            "hours": max((f["gpu_hours_lost"] or 0 for f in mine), default=0) or None,
            "stopped": stopped // 1_000_000 if stopped is not None else None,
            "blamed": _few(first["culprits"]) if first else "",
            "team": of_team[t] if t else None,
            "page": pages.get(first["id"], "") if first else "",
            "id": safe(first["id"], 40) if first else "",
            "more": max(len(mine) - 1, 0),
        }
        for c, value in row.items():
            columns[c].append(value)
    names = [{"kind": k, "words": kind_words(k), "tone": TONES.get(k, "info")} for k in kinds]
    return {"columns": columns, "verdicts": names, "teams": [safe(t, 60) for t in teams]}


def _few(numbers: Sequence[int] | None) -> str:
    """Ranks in a column of a table."""
    text = short(numbers, "")
    return text if len(text) <= _CAUSE else f"{len(set(numbers or ())):,} ranks: {text[6:20]}..."


def _first_rows(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The gravest rows, for a reader without scripts."""
    columns, verdicts = table["columns"], table["verdicts"]
    order = sorted(range(len(columns["job"])), key=lambda i: columns["verdict"][i])[:_FIRST_ROWS]
    return [
        {c: values[i] for c, values in columns.items()} | {"v": verdicts[columns["verdict"][i]]}
        for i in order
    ]


def _faults(report: Report, pages: Mapping[str, str], history: History | None) -> dict[str, Any]:
    """Findings by fingerprint: the faults, the most costly of the gravest kinds first."""
    known = {}
    if history is not None:
        known = {row["fingerprint"]: row for row in history.faults.iter_rows(named=True)}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for f in report.findings.iter_rows(named=True):
        groups.setdefault((f["kind"], f["fingerprint"] or f["id"]), []).append(f)
    ordered = sorted(
        groups.items(),
        key=lambda kv: (gravest_first(kv[0][0])[0], -len(kv[1]), kv[0][1]),
    )
    labels = job_labels(report)
    rows = []
    for (kind, mark), found in ordered[:_FAULTS]:
        first = next((f for f in found if f["id"] in pages), found[0])
        hours = sum(f["gpu_hours_lost"] or 0 for f in found)
        seen = known.get(mark)
        jobs = {(f["job"], f["attempt"]) for f in found}
        rows.append(
            {
                "kind": kind_words(kind), "tone": TONES.get(kind, "info"),
                "summary": safe(first["summary"] or "", 300), "jobs": len(jobs),
                "hours": hours, "page": pages.get(first["id"], ""), "id": safe(first["id"], 40),
                "job": labels.get(first["id"], safe(first["job"], 120)), "mark": safe(mark, 80),
                "status": safe(seen["status"] or "", 20) if seen else "",
                "since": str(seen["first_seen"] or "") if seen else "",
            }
        )  # fmt: skip
    return {
        "rows": rows[:_OPEN], "rest": rows[_OPEN:], "more": max(len(ordered) - _FAULTS, 0),
        "history": history is not None, "hours": any(r["hours"] for r in rows),
    }  # fmt: skip


def _by_team(jobs: Sequence[Mapping[str, Any]], team: Sequence[str | None]) -> list[dict[str, Any]]:
    counts: dict[str, Counter[str]] = {}
    for j, t in zip(jobs, team, strict=True):
        counts.setdefault(t or "(not said)", Counter())[TONES.get(j["verdict"], "info")] += 1
    if set(counts) <= {"(not said)"}:
        return []
    most = max(sum(c.values()) for c in counts.values())
    ordered = sorted(counts.items(), key=lambda kv: (-kv[1]["bad"], -sum(kv[1].values()), kv[0]))
    return [
        {"team": safe(name, 60), "jobs": sum(c.values()), "bad": c["bad"], "parts": _parts(c, most)}
        for name, c in ordered[:_TEAMS]
    ]


_TONES: Final = ("bad", "warn", "maybe", "info", "ok")


def _parts(counts: Mapping[str, int], most: int) -> list[tuple[str, float, float]]:
    """(tone, x, width) of a bar that is 1000 long at ``most``."""
    out = []
    x = 0.0
    for tone in _TONES:
        if counts.get(tone):
            width = _share(counts[tone], most)
            out.append((tone, round(x, 1), width))
            x += width
    return out


def _nights(history: History | None) -> dict[str, Any] | None:
    """A stacked column a night, and the same as numbers."""
    if history is None or history.nights.is_empty():
        return None
    per: dict[dt.date, Counter[str]] = {}
    for night, verdict, jobs in history.nights.select("night", "verdict", "jobs").iter_rows():
        per.setdefault(night, Counter())[TONES.get(verdict, "info")] += jobs
    nights = sorted(per.items())[-_NIGHTS:]
    # healthy jobs would dwarf what one looks for
    most = max(sum(n for tone, n in c.items() if tone != "ok") for _, c in nights) or 1
    step = 900 / len(nights)
    columns, rows = [], []
    for i, (night, c) in enumerate(nights):
        y = 160.0
        for tone in _TONES[:-1]:
            if c[tone]:
                h = round(140 * c[tone] / most, 1)
                y = round(y - h, 1)
                columns.append(
                    (tone, round(50 + i * step + step * 0.12, 1), y, round(step * 0.76, 1), h)
                )
        rows.append((str(night), {tone: c[tone] for tone in _TONES}))
    shown = {0: "start", len(nights) // 2: "middle", len(nights) - 1: "end"}
    ticks = [
        (round(50 + (i + 0.5) * step, 1), str(nights[i][0]), anchor if len(shown) > 1 else "middle")
        for i, anchor in sorted(shown.items())
    ]
    return {"columns": columns, "rows": rows, "ticks": ticks, "most": most}


def _unread(inputs: pl.DataFrame) -> dict[str, Any]:
    counts = (
        inputs.filter(pl.col("status") != "read")
        .group_by("status", "reason")
        .agg(pl.len().alias("files"), pl.col("path").min())
        .sort("status", -pl.col("files").cast(pl.Int64), "reason", "path")
    )
    order = {"quarantined": 0, "partial": 1, "ignored": 2}
    rows = sorted(counts.iter_rows(named=True), key=lambda r: order.get(r["status"], 3))
    return {
        "rows": [
            {
                "status": safe(r["status"], 20), "files": r["files"],
                "reason": safe(r["reason"] or "no reason given"), "path": safe(r["path"], 200),
            }
            for r in rows[:_REASONS]
        ],
        "more": sum(r["files"] for r in rows[_REASONS:]),
        "read": inputs.filter(pl.col("status") == "read").height,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# What it cost


def measured(report: Report) -> list[tuple[int, float]]:
    """(GPUs, GPU-hours lost) of each job that stopped and whose loss is known.

    Several findings of one job tell of the same hours: the longest counts.
    """
    world = {
        (j["job"], j["attempt"]): j["world_size"] or len(j["ranks_present"] or ())
        for j in report.jobs.iter_rows(named=True)
    }
    lost: dict[tuple[str, int], float] = {}
    for job, attempt, hours in report.findings.select(
        "job", "attempt", "gpu_hours_lost"
    ).iter_rows():
        if hours:
            lost[job, attempt] = max(lost.get((job, attempt), 0.0), hours)
    return [(int(world.get(job) or 1), hours) for job, hours in lost.items()]


def _cost(
    report: Report, stops: Sequence[tuple[int, float]], price: float | None
) -> dict[str, Any]:
    """Where the calculator starts: sizes and durations as measured, nothing assumed."""
    pairs = sorted((gpus, round(hours / gpus, 5)) for gpus, hours in stops)
    if len(pairs) > _PAIRS:  # evenly spaced ones stand for all
        pairs = [pairs[(2 * i + 1) * len(pairs) // (2 * _PAIRS)] for i in range(_PAIRS)]
    durations = sorted(d for _, d in pairs)
    at = report.findings["stopped_at_ns"].drop_nulls()
    first, last = at.min(), at.max()
    days = (
        (int(last) - int(first)) / 86_400e9
        if isinstance(first, int) and isinstance(last, int)
        else 0.0
    )
    fleet = int(report.jobs["world_size"].fill_null(0).sum())
    return {
        "stops": len(stops),
        "lost": sum(hours for _, hours in stops),
        "days": round(days, 2),
        "data": {
            "pairs": pairs,
            "fleet": fleet,
            "hangs": round(len(stops) * 7 / days, 1) if days >= 2 else len(stops),
            "minutes": round(60 * durations[len(durations) // 2], 2) if durations else 0,
            "longest": round(60 * durations[-1], 2) if durations else 0,
            "price": price,
        },
    }
