"""What the page of one finding shows, as plain text and numbers for its template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dl2gpu.report.exports_markdown import ticket
from dl2gpu.report.graph_layout import NARROW, WIDE, draw
from dl2gpu.report.graph_model import Picture, details_of, picture_of
from dl2gpu.report.graph_timeline import Timeline, timeline_of
from dl2gpu.report.words import EVIDENCE, MEANING, call_site, operation, place, ranks, safe, utc

__all__ = ["TONES", "Context", "finding_view", "kind_words"]

TONES: Final[dict[str, str]] = {
    "cycle": "bad",
    "order_inversion": "bad",
    "init_cycle": "bad",
    "mismatch": "bad",
    "unmatched_p2p": "bad",
    "missing_participant": "bad",
    "crashed_rank": "warn",
    "stalled_rank": "warn",
    "in_flight": "warn",
    "potential": "maybe",
    "insufficient_evidence": "info",
    "healthy": "ok",
}
"""How grave a verdict is: a class of the style sheet."""

_STEPS: Final = 16
_GROUPS: Final = 6
_FRAMES: Final = 32
_LAST: Final = 16
_SAME: Final = 30
_RAW: Final = 20_000
_ROWS: Final = 24
_TEXT: Final = 240  # characters of a list of ranks
_TITLE: Final = 80  # and of one in a title
_DRAWN: Final = frozenset({"graph", "timeline", "last_operations"})


@dataclass(frozen=True)
class Context:
    """What a page needs to know beside its finding.

    ``job`` is the row of its job, ``unread`` the inputs of the job that were not read whole, as
    (path, status, reason); ``same`` the label and page (or "") of the other findings of one
    fingerprint; ``previous`` and ``next`` are (page, label).
    """

    label: str
    job: Mapping[str, Any] | None = None
    unread: Sequence[tuple[str, str, str]] = ()
    same: Sequence[tuple[str, str]] = ()
    previous: tuple[str, str] | None = None
    next: tuple[str, str] | None = None


def kind_words(kind: str | None) -> str:
    """``order inversion``."""
    return safe(kind or "unknown", 40).replace("_", " ")


def finding_view(f: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Everything that the template names, escaped by nobody yet."""
    details = details_of(f)
    picture = picture_of(f, details)
    line = timeline_of(details, f["first_divergence"])
    cycle = f["cycle"] or []
    last = _last(details.get("last_operations"))
    kind = f["kind"]
    groups = _groups(f)
    return {
        "id": safe(f["id"], 40),
        "alone": False,
        "job": context.label,
        "kind": kind_words(kind),
        "kind_words": kind_words(kind),
        "tone": TONES.get(kind, "info"),
        "frame_tone": {"potential": "may"}.get(kind, "" if TONES.get(kind) == "bad" else "soft"),
        "meaning": MEANING.get(kind, ""),
        "summary": safe(f["summary"] or "", 2000),
        "advice": safe(f["advice"] or "", 2000),
        "facts": list(_facts(f, context.job)),
        "wide": draw(picture, WIDE),
        "narrow": draw(picture, NARROW),
        "picture_words": _picture_words(picture),
        "blamed": any(b.blamed for b in picture.boxes),
        "inferred": picture.inferred,
        "places": picture.places,
        "cycle": [
            {"words": place(s), "site": call_site(s["stack"]) or "", "stack": _frames(s["stack"])}
            for s in cycle[:_STEPS]
        ],
        "cycle_more": max(len(cycle) - _STEPS, 0),
        "timeline": _opened(line),
        "statuses": {c.status for c in line.cells} if line else set(),
        "parted": any(c.parted for c in line.cells) if line else False,
        "tables": list(_tables(details)),
        "places_at": groups[: _GROUPS + 1],
        "places_more": max(len(groups) - _GROUPS - 1, 0),
        "last": last[:_LAST],
        "last_more": max(len(last) - _LAST, 0),
        "evidence": list(_evidence(f, details, context)),
        "fingerprint": safe(f["fingerprint"] or "", 80),
        "same": [(safe(text, 200), href) for text, href in context.same[:_SAME]],
        "same_more": max(len(context.same) - _SAME, 0),
        "previous": context.previous,
        "next": context.next,
        "ticket": ticket(f, context.label),
        "commands": _commands(safe(f["id"], 40)),
        "raw": _raw(details),
    }


def _opened(line: Timeline | None) -> dict[str, Any] | None:
    """The timeline with the place to which it is scrolled: just before where it hangs."""
    if line is None:
        return None
    fields = {name: getattr(line, name) for name in line.__dataclass_fields__}
    stands = min((c.x for c in line.cells if c.status == "stands"), default=line.width)
    return fields | {"hang": max(stands - line.cell[0], 0)}


def _commands(ident: str) -> str:
    forms = ("perfetto", "dot", "graphml", "sarif", "junit")
    return "\n".join(f"dl2gpu explain DIR {ident} --format {form}" for form in forms)


def short(numbers: Sequence[int] | None, none: str = "none", limit: int = _TEXT) -> str:
    """Ranks folded; the beginning only where they are many and scattered."""
    text = ranks(numbers, none)
    if len(text) <= limit:
        return text
    return f"{text[:limit].rsplit(',', 1)[0]}, ... ({len(set(numbers or ())):,} in all)"


def _facts(f: Mapping[str, Any], job: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    culprits, victims = f["culprits"] or [], f["victims"] or []
    yield "Named as a cause", short(culprits, "no rank")
    if victims:
        yield "Victims", short(victims)
    if f["reason"]:
        yield "Reason", safe(f["reason"]).replace("_", " ")
    if f["condition"]:
        yield "Only if", safe(f["condition"], 600).removeprefix("only if ")
    if f["probability"] is not None:
        yield "Probability", f"{f['probability']:.3g}"
    if f["stopped_at_ns"] is not None:
        yield "Progress stopped", utc(f["stopped_at_ns"])
    if f["gpu_hours_lost"]:
        yield "Lost since", f"{f['gpu_hours_lost']:,.3g} GPU-hours"
    if job is not None:
        world = (
            _count(job["world_size"], "rank") if job["world_size"] is not None else "unknown size"
        )
        yield (
            "Job",
            f"{world}, {job['events'] or 0:,} operations read, {safe(job['source_format'])}",
        )
    if f["fingerprint"]:
        yield "Fingerprint", safe(f["fingerprint"], 80)


def _count(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def _picture_words(picture: Picture) -> str:
    """The picture for those who do not see it."""
    boxes = [b.text for b in picture.boxes]
    waits = [
        f"{picture.boxes[a].title} waits for {picture.boxes[b].title}" for a, b in picture.edges
    ]
    return safe(". ".join(["; ".join(boxes[:8]), *waits[:8]]), 1200)


def _frames(stack: Sequence[str] | None) -> list[str]:
    return [safe(frame) for frame in (stack or [])[:_FRAMES]]


def _groups(f: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where the sequences part and where it hangs; ranks that stand alike are one entry."""
    out = []
    first = f["first_divergence"]
    if first is not None:
        number = f", operation {first['seq']}" if first.get("seq") is not None else ""
        title = f"First divergence: rank {first['rank']}{number}"
        out.append({"title": title, "sites": [_site(first)], "more": 0})
    told = {(s["rank"], s["seq"], s["op"]) for s in (f["cycle"] or [])[:_STEPS]}
    together: dict[tuple[str, tuple[str, ...]], list[dict[str, Any]]] = {}
    for h in f["hangs_at"] or []:
        if (h["rank"], h["seq"], h["op"]) not in told:
            together.setdefault((operation(h), tuple(h["stack"] or ())), []).append(h)
    by_ranks: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for hs in together.values():
        by_ranks.setdefault(tuple(sorted(h["rank"] for h in hs)), []).append(hs[0])
    for who, ops in sorted(by_ranks.items(), key=lambda kv: (-len(kv[0]), kv[0])):
        names = short(who, limit=_TITLE)
        verb = "hangs" if len(set(who)) == 1 else "hang"
        title = f"{names[:1].upper()}{names[1:]} {verb} in"
        sites = [_site(op) for op in ops[:_GROUPS]]
        out.append({"title": title, "sites": sites, "more": max(len(ops) - _GROUPS, 0)})
    return out


def _site(op: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "words": operation(op),
        "site": call_site(op["stack"]) or "",
        "stack": _frames(op["stack"]),
    }


# --------------------------------------------------------------------------------------------------
# Signatures, last operations, evidence


def _tables(details: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Signatures side by side: what disagrees, what parted, what has no partner."""
    aspects = details.get("aspects")
    said = [safe(a, 40) for a in aspects] if isinstance(aspects, list) else []
    differ = f"They disagree in: {', '.join(said)}." if said else ""
    yield from _table("Signatures that met", details.get("signatures"), differ, compare=True)
    parted = details.get("divergence")
    if isinstance(parted, dict):
        sides = [
            {"": side, **parted[side]}
            for side in ("expected", "found")
            if isinstance(parted.get(side), dict)
        ]
        note = "; ".join(
            f"{safe(k, 60).replace('_', ' ')}: {safe(v, 60)}"
            for k, v in sorted(parted.items())
            if isinstance(v, int | str)
        )
        yield from _table("Expected and found", sides, note, compare=True)
    pair = [
        {"": side, **value}
        for side in ("expected", "found")
        if isinstance(value := details.get(side), dict)
    ]
    yield from _table("Expected and found", pair, "", compare=True)
    yield from _table("Without a partner", details.get("unmatched"), "")


_ORDER: Final = ("", "rank", "ranks", "op", "count", "dtype", "bytes", "reduce_op", "root", "peer")


def _table(
    title: str, rows: object, note: str, *, compare: bool = False
) -> Iterator[dict[str, Any]]:
    """A table of a list of objects: a column for each of their keys."""
    given = [r for r in rows if isinstance(r, dict)] if isinstance(rows, list) else []
    if not given:
        return
    keys = list(dict.fromkeys(k for row in given for k in row))
    keys.sort(key=lambda k: (_ORDER.index(k) if k in _ORDER else len(_ORDER), k))
    cells = [[_value(row.get(k), k) for k in keys] for row in given[:_ROWS]]
    differs = [
        compare and k not in {"", "rank", "ranks", "seq"} and len({row[x] for row in cells}) > 1
        for x, k in enumerate(keys)
    ]
    more = f" And {len(given) - _ROWS:,} more." if len(given) > _ROWS else ""
    columns = [
        {"": "side", "stack": "call site"}.get(k, safe(k, 40).replace("_", " ")) for k in keys
    ]
    yield {
        "title": title, "columns": columns, "rows": cells, "differs": differs, "note": note + more,
    }  # fmt: skip


def _value(value: object, key: str) -> str:
    if value is None:
        return ""
    if key == "ranks" and isinstance(value, list) and all(type(v) is int for v in value):
        return short(value).removeprefix("ranks ").removeprefix("rank ")
    if key == "stack" and isinstance(value, list):
        return call_site([str(v) for v in value]) or ""
    if key == "site" and isinstance(value, str):
        return call_site([value]) or ""
    if isinstance(value, dict | list):
        return safe(msgspec.json.encode(value).decode(), 300)
    return f"{value:,}" if type(value) is int else safe(value)


def _last(last: object) -> list[tuple[str, list[dict[str, str]]]]:
    if not isinstance(last, dict):
        return []
    out = []
    for rank, given in sorted(last.items(), key=lambda kv: (len(str(kv[0])), str(kv[0]))):
        operations = [op for op in given if isinstance(op, dict)] if isinstance(given, list) else []
        if operations:
            out.append((safe(rank, 20), [_operation(op) for op in operations[:_ROWS]]))
    return out


def _operation(op: Mapping[str, Any]) -> dict[str, str]:
    stack = op.get("stack")
    return {
        "seq": safe(op.get("seq", ""), 20),
        "words": operation(op),
        "state": safe(op.get("state", ""), 20),
        "site": call_site([str(s) for s in stack]) or "" if isinstance(stack, list) else "",
    }


def _evidence(f: Mapping[str, Any], details: Mapping[str, Any], context: Context) -> Iterator[str]:
    level = EVIDENCE.get(f["evidence"] or "", safe(f["evidence"] or "not said"))
    yield level[:1].upper() + level[1:] + "."
    job = context.job
    if job is not None:
        missing = job["ranks_missing"] or []
        if missing:
            yield f"No record of {short(missing)}."
        elif job["ranks_present"]:
            yield f"Records of all {len(job['ranks_present']):,} ranks were read."
    numbers = details.get("older_records")
    if isinstance(numbers, list):
        older = short([n for n in numbers if type(n) is int])
        yield f"Older than the others' are the records of {older}."
    elsewhere = details.get("in_other_attempts")
    if isinstance(elsewhere, list) and elsewhere:
        yield f"{len(elsewhere):,} of them left a record in another attempt of the job."
    places = details.get("places")
    if type(places) is int and places > 1:
        yield f"The same fault shows at {places:,} places of this job; the pictures are of one."
    for path, status, reason in context.unread[:_GROUPS]:
        yield f"{safe(path, 200)}: {safe(status, 20)}: {safe(reason)}"
    if len(context.unread) > _GROUPS:
        yield f"and {len(context.unread) - _GROUPS:,} more files that were not read whole."
    if f["stopped_at_ns"] is None:
        yield "The record has no times: when it stopped and what it cost are not known."


def _raw(details: Mapping[str, Any]) -> str:
    """What has no section of its own, as JSON."""
    rest = {k: v for k, v in details.items() if k not in _DRAWN}
    if not rest:
        return ""
    text = msgspec.json.format(msgspec.json.encode(rest, order="sorted"), indent=2).decode()
    lines = [safe(line, 400) for line in text[:_RAW].split("\n")]
    return "\n".join(lines) + ("\n..." if len(text) > _RAW else "")
