"""The wait-for graph of one finding as boxes and arrows, whatever is drawn or written from it.

Taken from ``details["graph"]`` (:mod:`dl2gpu.analysis.neighbourhood`). A finding without one, as
of an operation in which all stand, or of an older report, is drawn from its cycle and from where it
hangs. All text has passed :func:`dl2gpu.report.words.safe`; a report is a file that anybody may
have written, and a graph that does not fit its form counts as none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dl2gpu.report.words import call_site, fold, operation, safe

__all__ = ["Box", "Picture", "details_of", "picture_of"]

FATES: Final[dict[str, str]] = {
    "ended": "ended or went on without it",
    "no_record": "no usable record",
    "late": "came too late",
    "dead": "died",
    "free": "alive, with nothing pending",
    "mismatch": "the calls disagree",
    "in_flight": "all came; it does not complete",
    "missing": "did not come",
}
"""What has become of that for which all wait."""

_RANKS: Final = 60  # characters of a list of ranks
_GROUPS: Final = 64


@dataclass(frozen=True)
class Box:
    """Places that stand alike, or what is waited for in the end (``role`` "root").

    ``title`` names the ranks, ``where`` the host or the stream, ``doing`` the operation;
    ``blamed``: all of its ranks are culprits; ``spans`` are the first runs of ranks.
    """

    role: str
    title: str
    where: str = ""
    doing: str = ""
    comm: str = ""
    site: str = ""
    count: int = 0
    blamed: bool = False
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def text(self) -> str:
        """All of it in one line."""
        place = f" ({self.where})" if self.where else ""
        of = f" of {self.comm}" if self.comm else ""
        at = f", at {self.site}" if self.site else ""
        return f"{self.title}{place}: {self.doing}{of}{at}" if self.doing else self.title + place


@dataclass(frozen=True)
class Picture:
    """``edges`` are (waits, for): positions in ``boxes``. The boxes of a circle come first."""

    boxes: tuple[Box, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    inferred: bool = False
    places: int = 0

    @property
    def circle(self) -> int:
        """How many of the first boxes are the circle."""
        return sum(box.role == "cycle" for box in self.boxes)


class _Group(msgspec.Struct):
    role: str
    count: int
    ranks: list[tuple[int, int]] = []
    place: str | None = None
    waits: int = 0
    op: int | None = None
    comm: int | None = None
    ordinal: int | None = None
    seq: int | None = None
    site: int | None = None
    stream: int | None = None
    fate: str | None = None


class _Graph(msgspec.Struct):
    texts: list[str]
    groups: list[_Group]
    edges: list[tuple[int, int]]
    inferred: bool = False
    places: int = 0


def details_of(finding: Mapping[str, Any]) -> dict[str, Any]:
    """The details, which are JSON text in the table; none where they are no object."""
    details = finding.get("details")
    if isinstance(details, str):
        details = msgspec.json.decode(details)
    return details if isinstance(details, dict) else {}


def picture_of(finding: Mapping[str, Any], details: Mapping[str, Any] | None = None) -> Picture:
    """The picture of a finding; empty where nothing stands anywhere."""
    details = details_of(finding) if details is None else details
    try:
        graph = msgspec.convert(details.get("graph"), _Graph)
    except msgspec.ValidationError:
        return _from_rows(finding, details)
    blamed = set(finding.get("culprits") or ())
    groups = graph.groups[:_GROUPS]
    boxes = [_box(g, graph.texts, blamed) for g in groups]
    order = sorted(range(len(boxes)), key=lambda i: boxes[i].role != "cycle")
    number = {old: new for new, old in enumerate(order)}
    edges = sorted({(number[a], number[b]) for a, b in graph.edges if {a, b} <= number.keys()})
    return Picture(tuple(boxes[i] for i in order), tuple(edges), graph.inferred, graph.places)


def _box(g: _Group, texts: list[str], blamed: set[int]) -> Box:
    def text(number: int | None, limit: int = 200) -> str:
        known = number is not None and 0 <= number < len(texts)
        return safe(texts[number], limit) if known else ""  # type: ignore[index]

    spans = tuple((a, b) for a, b in g.ranks)
    doing = text(g.op, 60)
    ordinal = f" #{g.ordinal}" if g.ordinal is not None else ""
    if g.role == "root":
        fate = FATES.get(g.fate or "", safe(g.fate or "", 60))
        of = f"{doing or 'position'}{ordinal}" if ordinal or doing else ""
        title = _ranks(spans, g.count) if g.count else "one operation"
        return Box(
            "root", title, "", fate, text(g.comm), of, g.count, _all_in(spans, g, blamed), spans
        )
    if doing == "wait":
        doing = "waits for its own device" if g.role == "cycle" else "waits for its requests"
    elif doing and g.waits:
        doing = f"waits for {doing}{ordinal}"
    elif doing:
        doing += ordinal
    else:
        doing = "several operations"
    where = g.place or ""
    if where == "stream" and g.stream is not None:
        where = f"stream {text(g.stream, 60)}"
    return Box(
        "cycle" if g.role == "cycle" else "waits", _ranks(spans, g.count), safe(where), doing,
        text(g.comm), call_site([text(g.site)]) or "" if g.site is not None else "", g.count,
        _all_in(spans, g, blamed), spans,
    )  # fmt: skip


def _all_in(spans: tuple[tuple[int, int], ...], g: _Group, blamed: set[int]) -> bool:
    listed = sum(b - a + 1 for a, b in spans)
    if not listed or listed != g.count or listed > len(blamed):
        return False
    return all(r in blamed for a, b in spans for r in range(a, b + 1))


def _ranks(spans: tuple[tuple[int, int], ...], count: int) -> str:
    """``rank 3``, ``ranks 0-11, 13``; of many, ``4,092 ranks: 0-11, 13, ...``."""
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    listed = sum(b - a + 1 for a, b in spans)
    if len(text) > _RANKS or listed < count:
        cut = text[:_RANKS].rsplit(",", 1)[0] if len(text) > _RANKS else text
        return f"{count:,} ranks: {cut}, ..."
    if count > 8:
        return f"{count:,} ranks: {text}"
    return f"rank{'s' if count > 1 else ''} {text}"


# --------------------------------------------------------------------------------------------------
# Findings without a graph


def _from_rows(finding: Mapping[str, Any], details: Mapping[str, Any]) -> Picture:
    """From the cycle, the operations in which it hangs, and who is missing."""
    cycle = (finding.get("cycle") or [])[:_GROUPS]
    blamed = set(finding.get("culprits") or ())
    boxes: list[Box] = []
    edges: list[tuple[int, int]] = []
    for step in cycle:
        where = "host" if step["place"] == "host" else f"stream {safe(step['stream'] or '', 60)}"
        boxes.append(_standing([step["rank"]], step, blamed, "cycle", where.strip()))
    edges += [(i, (i + 1) % len(cycle)) for i in range(len(cycle)) if len(cycle) > 1]
    on_circle = {step["rank"] for step in cycle}
    together: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for h in finding.get("hangs_at") or []:
        if h["rank"] not in on_circle:
            key = (operation(h), call_site(h["stack"]))
            together.setdefault(key, []).append(h)
    groups = sorted(together.values(), key=lambda hs: (-len(hs), hs[0]["rank"]))[:_GROUPS]
    boxes += [_standing([h["rank"] for h in hs], hs[0], blamed, "waits") for hs in groups]
    if not cycle and not groups:
        boxes = _sides(details.get("signatures"), blamed)
    if not cycle and boxes:
        missing = details.get("missing_ranks")
        listed = missing if isinstance(missing, list) else []
        absent = sorted({r for r in listed if type(r) is int})
        fate = {"in_flight": "in_flight", "mismatch": "mismatch"}.get(finding["kind"], "missing")
        if absent or fate != "missing":
            spans = _spans(absent)
            title = _ranks(spans, len(absent)) if absent else "one operation"
            blame = bool(absent) and set(absent) <= blamed
            edges += [(i, len(boxes)) for i in range(len(boxes))]
            boxes.append(Box("root", title, "", FATES[fate], "", "", len(absent), blame, spans))
    return Picture(tuple(boxes), tuple(edges), False, 0)


def _sides(signatures: object, blamed: set[int]) -> list[Box]:
    """What each side of a mismatch called, where nobody stands still."""
    given = signatures if isinstance(signatures, list) else []
    out = []
    for side in given[:_GROUPS]:
        ranks = side.get("ranks") if isinstance(side, dict) else None
        if isinstance(ranks, list) and ranks and all(type(r) is int for r in ranks):
            facts = [f"{k} {safe(side[k], 20)}" for k in ("count", "dtype", "root") if k in side]
            site = side.get("site")
            out.append(
                _standing(
                    ranks,
                    {
                        "op": safe(side.get("op") or "an operation", 60),
                        "comm": None,
                        "stack": [site] if isinstance(site, str) else None,
                    },
                    blamed,
                    "waits",
                    ", ".join(facts),
                )
            )
    return out


def _standing(
    ranks: list[int], op: Mapping[str, Any], blamed: set[int], role: str, where: str = ""
) -> Box:
    spans = _spans(ranks)
    count = len(set(ranks))
    ordinal = f" #{op['ordinal']}" if op.get("ordinal") is not None else ""
    return Box(
        role, _ranks(spans, count), where, safe(op["op"] or "an operation", 60) + ordinal,
        safe(op["comm"], 60) if op["comm"] is not None else "", call_site(op["stack"]) or "", count,
        set(ranks) <= blamed, spans,
    )  # fmt: skip


def _spans(ranks: list[int]) -> tuple[tuple[int, int], ...]:
    text = fold(ranks)
    ends = [part.split("-") for part in text.split(", ")] if text else []
    return tuple((int(e[0]), int(e[-1])) for e in ends)[:8]
