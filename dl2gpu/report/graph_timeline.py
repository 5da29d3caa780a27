"""The timeline of a finding: operations of a few ranks around the first divergence and the hang.

Taken from ``details["timeline"]`` (:mod:`dl2gpu.analysis.neighbourhood`). A row a rank; operations
stand in the order of their rank, and those that met in one operation stand in one column: the axis
is order, not time, for a hang lasts a million times as long as what led to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from dl2gpu.report.graph_text import fit, width
from dl2gpu.report.words import call_site, safe, utc

__all__ = ["Cell", "Event", "Timeline", "events_of", "timeline_of"]

STATUS: Final = ("done", "stands", "pending", "later")

_CELL: Final = 104
_SLOT: Final = 116
_TEXT: Final = _CELL - 14
_HEIGHT: Final = 38
_ROW: Final = 54
_TOP: Final = 22
_MOST: Final = 512  # events drawn of one timeline
_APART: Final = 6  # positions of a rank that are no gap: waits are left out
_COLOURS: Final = 6


class Event(msgspec.Struct, array_like=True):
    """One row of the timeline; see :data:`dl2gpu.analysis.neighbourhood.FIELDS`."""

    rank: int
    lane: int
    seq: int
    op: int | None
    comm: int | None
    ordinal: int | None
    site: int | None
    peer: int | None
    stream: int | None
    status: int
    node: int | None
    created: int | None
    started: int | None
    completed: int | None


class _Raw(msgspec.Struct):
    texts: list[str]
    events: list[Event]
    base_ns: int | None = None
    alike: dict[str, int] = {}


@dataclass(frozen=True)
class Cell:
    """One operation where it is drawn.

    ``colour`` numbers the communicator, -1 for none; ``parted``: the first divergence.
    """

    x: int
    y: int
    op: str
    comm: str
    status: str
    colour: int
    full: str
    parted: bool = False


@dataclass(frozen=True)
class Timeline:
    """A drawing: ``rows`` (y, rank, note), ``cells``, ``links`` (path, kind) and ``ticks`` (x, t).

    Links join what met in one operation: "together", or "message" from a send to its receive.
    """

    width: int
    height: int
    base: str
    rows: tuple[tuple[int, str, str], ...]
    cells: tuple[Cell, ...]
    links: tuple[tuple[str, str], ...]
    ticks: tuple[tuple[int, str], ...]
    gaps: tuple[tuple[int, int], ...]
    cell: tuple[int, int] = (_CELL, _HEIGHT)


def events_of(details: Mapping[str, Any]) -> tuple[list[Event], list[str], int | None]:
    """Events, texts and base time of a finding's timeline; none where it does not fit its form."""
    raw = _raw(details)
    return (raw.events, raw.texts, raw.base_ns) if raw else ([], [], None)


def _raw(details: Mapping[str, Any]) -> _Raw | None:
    try:
        raw = msgspec.convert(details.get("timeline"), _Raw)
    except msgspec.ValidationError:
        return None
    raw.events = raw.events[:_MOST]
    raw.texts = [safe(t, 200) for t in raw.texts]
    n = len(raw.texts)
    for e in raw.events:
        for name in ("op", "comm", "site", "stream"):
            value = getattr(e, name)
            if value is not None and not 0 <= value < n:
                setattr(e, name, None)
    return raw if raw.events else None


def timeline_of(
    details: Mapping[str, Any], parted: Mapping[str, Any] | None = None
) -> Timeline | None:
    """The drawing; None where there is nothing to draw. ``parted``: the first divergence."""
    raw = _raw(details)
    if raw is None:
        return None
    flagged = (parted.get("rank"), parted.get("seq")) if parted else None
    events, texts = raw.events, raw.texts
    ranks = sorted({e.rank for e in events})
    row = {rank: i for i, rank in enumerate(ranks)}
    column = _columns(events)
    comms = list(dict.fromkeys(e.comm for e in events if e.comm is not None))
    cells = []
    at: dict[int, list[int]] = {}
    gaps = []
    before: dict[int, Event] = {}
    for i, e in enumerate(events):
        x, y = 8 + column[i] * _SLOT, _TOP + row[e.rank] * _ROW + 8
        previous = before.get(e.rank)
        if previous is not None and e.seq - previous.seq > _APART:
            gaps.append((x - (_SLOT - _CELL) // 2, y + _HEIGHT // 2))
        before[e.rank] = e
        cell = _cell(e, texts, x, y, comms)
        cells.append(replace(cell, parted=True) if (e.rank, e.seq) == flagged else cell)
        if e.node is not None:
            at.setdefault(e.node, []).append(i)
    links = [
        link
        for members in at.values()
        if len(members) > 1
        for link in _links([(events[i], cells[i]) for i in members], texts)
    ]
    note = {rank: _alike(raw.alike.get(str(rank))) for rank in ranks}
    return Timeline(
        width=16 + (max(column) + 1) * _SLOT,
        height=_TOP + len(ranks) * _ROW + 8,
        base=utc(raw.base_ns) if raw.base_ns is not None else "",
        rows=tuple((_TOP + i * _ROW + 8, str(rank), note[rank]) for rank, i in row.items()),
        cells=tuple(cells),
        links=tuple(links),
        ticks=_ticks(events, column),
        gaps=tuple(gaps),
    )


def _alike(more: int | None) -> str:
    return f"and {more:,} alike" if more else ""


def _columns(events: Sequence[Event]) -> list[int]:
    """Column of each event: before the one after it, beside those it met, as late as that goes.

    What ranks did last is what one looks for: it stands on the right. Where ranks passed operations
    in different orders nothing can stand beside everything that it met; then each rank is a row by
    itself.
    """
    after: dict[int, int] = {}
    last: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for i, e in enumerate(events):
        if e.rank in last:
            after[last[e.rank]] = i
        last[e.rank] = i
        if e.node is not None and e.status in (0, 1):
            groups.setdefault(e.node, []).append(i)
    beside = [m for m in groups.values() if len(m) > 1]
    for joined in (beside, []):
        back = [0] * len(events)  # columns from the right
        for _ in range(len(events) + 1):
            old = list(back)
            for i in reversed(range(len(events))):
                if i in after:
                    back[i] = max(back[i], back[after[i]] + 1)
            for members in joined:
                most = max(back[i] for i in members)
                for i in members:
                    back[i] = most
            if back == old:
                return [max(back) - b for b in back]
    return list(range(len(events)))


def _cell(e: Event, texts: Sequence[str], x: int, y: int, comms: Sequence[int | None]) -> Cell:
    op = texts[e.op] if e.op is not None else "operation"
    ordinal = f" #{e.ordinal}" if e.ordinal is not None else ""
    comm = texts[e.comm] if e.comm is not None else ""
    peer = f" {'to' if op == 'send' else 'from'} {e.peer}" if e.peer is not None else ""
    status = STATUS[e.status] if 0 <= e.status < len(STATUS) else "done"
    parts = [
        f"rank {e.rank}, operation {e.seq}: {op}{ordinal}{peer}" + (f" of {comm}" if comm else "")
    ]
    if e.site is not None:
        parts.append(f"at {call_site([texts[e.site]]) or texts[e.site]}")
    if e.stream is not None:
        parts.append(f"stream {texts[e.stream]}")
    parts.append({"stands": "stands here", "pending": "issued, not complete",
                  "later": "not reached"}.get(status, "complete"))  # fmt: skip
    for name in ("created", "started", "completed"):
        value = getattr(e, name)
        if value is not None and not (status != "done" and name == "completed"):
            parts.append(f"{name} {duration(value)}")
    return Cell(
        x, y, fit(op + peer, _TEXT, 11), _named(comm, ordinal), status,
        comms.index(e.comm) % _COLOURS if e.comm is not None else -1, "; ".join(parts),
    )  # fmt: skip


def _named(comm: str, ordinal: str) -> str:
    """The communicator, cut so that the number of the operation can be seen."""
    return fit(comm, _TEXT - width(ordinal, 11), 11) + ordinal


def _links(members: Sequence[tuple[Event, Cell]], texts: Sequence[str]) -> list[tuple[str, str]]:
    """A line through those that met; a message goes from the send to the receive."""
    cells = sorted((cell for _, cell in members), key=lambda c: c.y)
    ops = [texts[e.op] if e.op is not None else "" for e, _ in members]
    if len(members) == 2 and set(ops) == {"send", "recv"}:
        by_op = {op: cell for op, (_, cell) in zip(ops, members, strict=True)}
        a, b = by_op["send"], by_op["recv"]
        down = a.y < b.y
        start, end = (a.y + _HEIGHT, b.y - 3) if down else (a.y, b.y + _HEIGHT + 3)
        ax, bx = a.x + _CELL // 2, b.x + _CELL // 2
        return [(f"M{ax} {start}L{bx} {end}", "message")]
    if any(cell.status in {"pending", "later"} for cell in cells):
        return []
    return [
        (f"M{a.x + _CELL // 2} {a.y + _HEIGHT}L{b.x + _CELL // 2} {b.y}", "together")
        for a, b in itertools.pairwise(cells)
        if a.y != b.y
    ]


def _ticks(events: Sequence[Event], column: Sequence[int]) -> tuple[tuple[int, str], ...]:
    """When the first operation of each column was issued."""
    first: dict[int, int] = {}
    for e, c in zip(events, column, strict=True):
        if e.created is not None:
            first[c] = min(first.get(c, e.created), e.created)
    return tuple((8 + c * _SLOT, duration(t)) for c, t in sorted(first.items()))


def duration(ns: int) -> str:
    """``+21.3 ms``: nanoseconds after the first."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("\N{MICRO SIGN}s", 10**3)):
        if abs(ns) >= size:
            return f"{ns / size:+.4g} {unit}"
    return f"{ns:+} ns" if ns else "0"
