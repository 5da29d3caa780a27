"""Where the boxes and arrows of a wait-for graph are drawn.

The circle is a loop in the middle; who merely waits for it stands below in rows, those that wait
for others further down. Long circles and full rows are folded, so that the picture of 4,096 ranks
is no larger than that of a few. Two sizes are made, for a desk and for a phone: text keeps its size
on both. Coordinates are whole pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from dl2gpu.report.graph_model import Box, Picture
from dl2gpu.report.graph_text import fit, fit_site

__all__ = ["NARROW", "WIDE", "Arrow", "Drawing", "Drawn", "draw"]

WIDE: Final = 960
NARROW: Final = 360

_PAD: Final = 18
_GAP: Final = 34
_LINE: Final = 16  # height of a line of a box
_BOLD: Final = 14.5  # bold letters of 13 pixels are as wide as others of this size
_ROW: Final = 44  # between the rows
_LABEL: Final = 30  # height of the circle's label
_LOOP: Final = 8  # boxes of a loop
_LAYERS: Final = 3


@dataclass(frozen=True)
class Drawn:
    """A box at its place; ``lines`` (class, text) are cut to its width, ``full`` is the text."""

    box: Box
    x: int
    y: int
    w: int
    h: int
    lines: tuple[tuple[str, str], ...]
    full: str


@dataclass(frozen=True)
class Arrow:
    """A path (SVG's ``d``) from who waits to what is waited for."""

    d: str
    circle: bool


@dataclass(frozen=True)
class Drawing:
    """All of one picture; ``frame`` is (x, y, w, h) of what is waited for, ``label`` its name."""

    width: int
    height: int
    frame: tuple[int, int, int, int] | None
    label: str
    boxes: tuple[Drawn, ...]
    arrows: tuple[Arrow, ...]


def draw(picture: Picture, width: int = WIDE) -> Drawing:
    """The picture laid out for a page of this width; without boxes it has no height."""
    if not picture.boxes:
        return Drawing(width, 0, None, "", (), ())
    centre = [i for i, b in enumerate(picture.boxes) if b.role != "waits"]
    layers = _layers(picture, centre)
    if not centre:  # all stand, and nobody knows what for: the first row is what there is
        centre, layers = layers[0], layers[1:]
    loop = _folded_loop([picture.boxes[i] for i in centre])
    is_circle = picture.circle > 1
    spots, rows = _loop_spots(len(loop), width)
    w = min(300, (width - 2 * _PAD - 24 - (max(rows) - 1) * _GAP) // max(rows))
    top, h = _PAD + _LABEL, _height(loop)
    boxes: list[Drawn] = []
    for box, (row, column, of) in zip(loop, spots, strict=True):
        total = of * w + (of - 1) * _GAP
        x = (width - total) // 2 + column * (w + _GAP)
        boxes.append(_drawn(box, x, top + row * (h + _ROW), w, h))
    bottom = max(b.y + b.h for b in boxes) + 16
    frame = (_PAD // 2, _PAD // 2, width - _PAD, bottom - _PAD // 2)
    arrows = _loop_arrows(boxes) if is_circle else []
    if is_circle:
        label = f"the circle: {len(centre)} places wait for each other"
    elif any(picture.boxes[i].role != "waits" for i in centre):
        label = "what the others wait for"
    else:
        label = "where they stand"
    at = dict(zip(centre, boxes, strict=False)) if len(loop) == len(centre) else {}
    y = bottom + _ROW
    for depth, layer in enumerate(layers):
        standing = _row(picture, layer, width, y)
        for members, drawn in standing:
            boxes.append(drawn)
            x = drawn.x + drawn.w // 2
            target = next((at[b] for a, b in picture.edges if a in members and b in at), None)
            if depth == 0 or target is None:
                arrows.append(Arrow(f"M{x} {drawn.y}V{y - _ROW + 4}", False))
            else:
                end = target.x + target.w // 2
                low = target.y + target.h
                arrows.append(
                    Arrow(f"M{x} {drawn.y}C{x} {low + 20} {end} {low + 24} {end} {low + 4}", False)
                )
        at = {number: drawn for members, drawn in standing for number in members}
        y += standing[0][1].h + _ROW
    return Drawing(width, y - _ROW + _PAD, frame, label, tuple(boxes), tuple(arrows))


def _layers(picture: Picture, centre: Sequence[int]) -> list[list[int]]:
    """Who waits, by how far from the centre; those further off than drawn are in the last."""
    seen = set(centre)
    rest = [i for i in range(len(picture.boxes)) if i not in seen]
    layers: list[list[int]] = []
    front = seen
    while rest and len(layers) < _LAYERS - 1:
        layer = [i for i in rest if any(a == i and b in front for a, b in picture.edges)]
        if not layer:
            break
        layers.append(layer)
        front = set(layer)
        rest = [i for i in rest if i not in front]
    if rest:
        layers.append(rest)
    return layers


def _folded_loop(boxes: list[Box]) -> list[Box]:
    if len(boxes) <= _LOOP:
        return boxes
    head, tail = _LOOP // 2, _LOOP - _LOOP // 2 - 1
    return [*boxes[:head], _rest(boxes[head:-tail], "cycle"), *boxes[-tail:]]


def _rest(boxes: Sequence[Box], role: str) -> Box:
    """One box for many."""
    ranks = sum(b.count for b in boxes)
    kinds = {b.doing for b in boxes}
    doing = kinds.pop() if len(kinds) == 1 else "in other operations"
    return Box(role, f"{ranks:,} more ranks", f"{len(boxes)} groups of places", doing, count=ranks)


def _loop_spots(n: int, width: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """(row, column, boxes of the row) of each box of a loop, and how many a row has.

    Wide: along the upper row, back along the lower one. Narrow: down on the left, up on the right.
    """
    if width >= WIDE // 2:
        above = n if n <= 2 else (n + 1) // 2
        below = n - above
        spots = [(0, i, above) for i in range(above)]
        spots += [(1, below - 1 - i, below) for i in range(below)]
        return spots, [above, below]
    if n <= 3:
        return [(i, 0, 1) for i in range(n)], [1]
    left = (n + 1) // 2
    right = n - left
    spots = [(i, 0, 2 if i < right else 1) for i in range(left)]
    spots += [(right - 1 - i, 1, 2) for i in range(right)]
    return spots, [2]


def _loop_arrows(boxes: Sequence[Drawn]) -> list[Arrow]:
    n = len(boxes)
    if n == 2:
        return _there_and_back(boxes[0], boxes[1])
    return [Arrow(_between(boxes[i], boxes[(i + 1) % n], boxes), True) for i in range(n)]


def _there_and_back(a: Drawn, b: Drawn) -> list[Arrow]:
    if a.y == b.y:
        left, right = a.x + a.w, b.x
        y = a.y + a.h // 2
        return [
            Arrow(f"M{left} {y - 16}H{right - 4}", True),
            Arrow(f"M{right} {y + 16}H{left + 4}", True),
        ]
    x = a.x + a.w // 2
    return [
        Arrow(f"M{x - 24} {a.y + a.h}V{b.y - 4}", True),
        Arrow(f"M{x + 24} {b.y}V{a.y + a.h + 4}", True),
    ]


def _between(a: Drawn, b: Drawn, boxes: Sequence[Drawn]) -> str:
    """A line from box to box: straight where they are neighbours, else around on the right."""
    if a.y == b.y:
        y = a.y + a.h // 2
        return f"M{a.x + a.w} {y}H{b.x - 4}" if a.x < b.x else f"M{a.x} {y}H{b.x + b.w + 4}"
    ax, bx = a.x + a.w // 2, b.x + b.w // 2
    down = a.y < b.y
    start, end = (a.y + a.h, b.y - 4) if down else (a.y, b.y + b.h + 4)
    if abs(a.y - b.y) > a.h + _ROW + 4 and ax == bx:  # others stand between them
        side = max(x.x + x.w for x in boxes) + 14
        ay, by = a.y + a.h // 2, b.y + b.h // 2
        return f"M{a.x + a.w} {ay}H{side}V{by}H{b.x + b.w + 4}"
    middle = (start + end) // 2
    return f"M{ax} {start}V{end}" if ax == bx else f"M{ax} {start}V{middle}H{bx}V{end}"


def _row(picture: Picture, layer: list[int], width: int, y: int) -> list[tuple[list[int], Drawn]]:
    """(numbers, box) of a row of those that wait; the rest of a full row is one box."""
    columns = 4 if width >= WIDE // 2 else 2
    shown = [([i], _with_targets(picture, i)) for i in layer[:columns]]
    if len(layer) > columns:
        rest = layer[columns - 1 :]
        shown[-1] = (rest, _rest([picture.boxes[i] for i in rest], "waits"))
    n = len(shown)
    w = min(300, (width - 2 * _PAD - (n - 1) * (_GAP // 2)) // n)
    start = (width - n * w - (n - 1) * (_GAP // 2)) // 2
    h = _height([box for _, box in shown])
    return [
        (members, _drawn(box, start + x * (w + _GAP // 2), y, w, h))
        for x, (members, box) in enumerate(shown)
    ]


def _with_targets(picture: Picture, number: int) -> Box:
    """The box with whom it needs, where there is more than one that it could be."""
    box = picture.boxes[number]
    needed = [picture.boxes[b].title for a, b in picture.edges if a == number]
    targets = [title.partition(":")[0] for title in needed]
    if not targets or sum(b.role != "waits" for b in picture.boxes) < 2:
        return box
    more = ", ..." if len(targets) > 2 else ""
    return replace(box, where=f"{box.where}, needs {', '.join(targets[:2])}{more}".lstrip(", "))


def _drawn(box: Box, x: int, y: int, w: int, h: int) -> Drawn:
    room = w - 20
    lines = [
        ("t", fit(box.title, room, _BOLD)), ("m", fit(box.where, room, 12)),
        ("", fit(box.doing, room, 12)),
        ("m", fit(f"of {box.comm}" if box.comm else "", room, 12)),
        ("c", fit_site(box.site, room, 10.5)),
    ]  # fmt: skip
    return Drawn(box, x, y, w, h, tuple((c, t) for c, t in lines if t), box.text)


def _height(boxes: Sequence[Box]) -> int:
    """Of a row of boxes: so that the one with the most to say fits."""
    most = max(sum(map(bool, (b.title, b.where, b.doing, b.comm, b.site))) for b in boxes)
    return 12 + _LINE * max(most, 2)
