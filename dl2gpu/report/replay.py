"""A schedule on the console: ranks in columns, time downwards, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dl2gpu.analysis.names import Names
from dl2gpu.analysis.witness import Schedule, standing, steps
from dl2gpu.report.words import operation, ranks, safe
from dl2gpu.trace.schema import ANY, OP

__all__ = ["replayed"]

_COLUMNS: Final = 8
_ROWS: Final = 60
_MARK: Final = {"started": "\u25b7 ", "completed": "\u2713 ", "done": "\u2713 "}
_STYLE: Final = {"started": "yellow", "completed": "green", "done": "green"}


def replayed(
    s: Schedule, title: str, only: Sequence[int] | None = None, rows: int = _ROWS
) -> RenderableType:
    """The picture of a schedule.

    ``only``: ranks to show; by default those that stand, as far as there is room. ``rows``: so many
    of the last rows.
    """
    names = Names(s.program.matching)
    all_steps = steps(s)
    places = standing(s)
    present = sorted({int(r) for r in s.program.rank_of})
    if only is None:
        stuck = sorted({p.rank for p in places})
        only = sorted([*stuck, *(r for r in present if r not in set(stuck))][:_COLUMNS])
    shown = [r for r in only if r in set(present)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="dim", justify="right")
    for r in shown:
        table.add_column(f"rank {r}", overflow="fold")
    cells: dict[int, dict[int, Text]] = {}
    for step in all_steps:
        if step.rank in shown:
            words = _MARK[step.what] + _words(s, names, step.event)
            cells.setdefault(step.row, {})[step.rank] = Text(words, style=_STYLE[step.what])
    last = sorted(cells)[-rows:]
    for number in last:
        table.add_row(str(number + 1), *(cells[number].get(r, Text()) for r in shown))
    parts: list[RenderableType] = [Text(safe(title), style="bold")]
    if len(cells) > len(last):
        parts.append(Text(f"the last {len(last)} of {len(cells)} rows", style="dim"))
    if len(shown) < len(present):
        parts.append(Text(f"{len(shown)} of {len(present)} ranks; --ranks shows others", "dim"))
    parts += [
        table,
        Text("\u25b7 started, and not complete yet   \u2713 complete", style="dim"),
        Text(),
    ]
    if not s.deadlocked:
        parts.append(Text("All ranks come to their end.", style="green"))
        return Group(*parts)
    parts.append(Text("It stops here:", style="bold red"))
    for place in places:
        needs = ranks(place.waits_for, "nobody in the record")
        what = operation(place.operation)
        if place.operation["op"] == "wait":
            what = f"a wait (operation {place.operation['seq']})"
        how = "disagrees with its partners" if place.disagrees else f"waits for {needs}"
        parts.append(Text(f"  rank {place.rank} ({safe(place.place)}) in {what} {how}"))
    return Group(*parts)


def _words(s: Schedule, names: Names, e: int) -> str:
    """``send to 1``, ``recv from any: 2``, ``all_reduce #3 of 'w'``."""
    op = int(names.column("op")[e])
    about = names.operation(e)
    if op == OP["wait"]:
        return "wait"
    peer = s.program.matching.events["peer"][e]
    if op in (OP["send"], OP["recv"], OP["probe"], OP["sendrecv"]) and peer is not None:
        way = "from" if op in (OP["recv"], OP["probe"]) else "to"
        if peer == ANY:
            got = int(s.fix.partner[e])
            who = "any" + (f": {int(s.program.rank_of[got])}" if got >= 0 else "")
        else:
            who = str(peer)
        return f"{about['op']} {way} {who}"
    return operation(about)
