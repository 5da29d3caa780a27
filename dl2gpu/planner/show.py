"""Plans for people: tables for a terminal, and a picture."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Final

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dl2gpu.planner.account import account
from dl2gpu.planner.plan import Layout, Plan
from dl2gpu.planner.proof import Proof
from dl2gpu.planner.sbp import label
from dl2gpu.planner.schedule import order, play
from dl2gpu.report.words import safe

__all__ = ["picture", "size", "summary"]


def size(n: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _layout(layout: Layout) -> str:
    grid = " x ".join(str(n) for n in layout.grid) or "1"
    words = [f"{layout.stages} stage{'s' * (layout.stages > 1)}", f"grid {grid}"]
    if layout.microbatches > 1:
        words.append(f"{layout.microbatches} microbatches")
    if layout.stages > 1:
        words.append("interleaved 1F1B" if layout.pieces > 1 else layout.schedule.upper())
        if layout.pieces > 1:
            words.append(f"{layout.pieces} pieces a stage")
    if layout.zero:
        words.append(f"ZeRO-{layout.zero}")
    if layout.recompute:
        words.append("recomputation")
    return ", ".join(words)


@dataclass(frozen=True, slots=True)
class _Row:
    """An operator, or the same one of several blocks."""

    name: str
    stages: str
    choice: str
    weights: str
    output: str
    times: int
    bytes: int
    bound: float
    seconds: float


def _rows(plan: Plan) -> list[_Row]:
    """Operators of repeated blocks that are split alike become one row, in order of first sight."""
    p, costs = plan.problem, account(plan)
    same: dict[tuple[str, ...], list[int]] = {}
    for i, (node, c) in enumerate(zip(p.tables.model.nodes, p.tables.nodes, strict=True)):
        k = int(plan.chosen[i])
        name = re.sub(r"\.\d+\.", ".*.", node.name)
        weights = " ".join(label(c.state(k, w)) for w in node.operator.weights[:1])
        key = (name, c.name(k) or "-", weights, label(c.state(k, -1)))
        same.setdefault(key, []).append(i)
    out = []
    for (name, choice, weights, output), nodes in same.items():
        stages = sorted({int(p.stage[i]) for i in nodes})
        where = str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"
        out.append(
            _Row(
                name, where, choice, weights, output, len(nodes),
                int(costs.bytes[nodes].sum()), float(costs.bound[nodes].sum()),
                float((costs.seconds + costs.sync)[nodes].sum()),
            )
        )  # fmt: skip
    return out


def summary(
    plan: Plan, proof: Proof, others: dict[str, Plan | None], elapsed: float | None = None
) -> RenderableType:
    """Everything about a plan."""
    p, costs = plan.problem, account(plan)
    model, cluster = p.tables.model, p.tables.setting.cluster
    batch = model.batch * plan.layout.microbatches
    head = (
        f"{safe(model.name)}: {model.parameters / 1e6:.1f} M parameters, batch {batch}, on "
        f"{cluster.nodes} x {cluster.per_node} devices\n{_layout(plan.layout)}\n"
        f"step {_time(plan.seconds)}, lower bound of the model {_time(plan.bound)}; "
        f"at most {size(float(plan.memory.max()))} of a device's {size(cluster.memory)}"
    )
    if elapsed is not None:
        head += f"\n{plan.priced} choices priced in {plan.layouts} layouts, {elapsed:.1f} s"
    total, bound = int(costs.bytes.sum()), float(costs.bound.sum())
    near = f"{size(total)} sent a step by all devices"
    if bound:
        near += (
            f"; lower bound of the matrix products {size(bound)}: {total / bound:.2f} times that"
        )
    proved = Text("program: ")
    proved.append(
        f"{proof.operations} operations of {plan.layout.ranks} ranks, "
        + ("healthy in every scenario" if proof.healthy else f"{proof.verdict}"),
        "green" if proof.healthy else "bold red",
    )
    parts: list[RenderableType] = [Text(head), Text(), _layers(plan), Text(near), Text()]
    parts += [_timeline(plan), Text(), proved, *(Text(f"  {safe(w, 500)}") for w in proof.why)]
    if others:
        parts += [Text(), _comparison(plan, others)]
    return Group(*parts)


def _layers(plan: Plan) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("operator", no_wrap=True)
    table.add_column("x", justify="right")
    if plan.layout.stages > 1:
        table.add_column("stage", justify="right")
    for name in ("split", "weights", "result"):
        table.add_column(name, no_wrap=True)
    for name in ("sent", "/ bound", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in _rows(plan):
        ratio = f"{r.bytes / r.bound:.2f}" if r.bound else ""
        table.add_row(
            Text(safe(r.name)), str(r.times), *([r.stages] if plan.layout.stages > 1 else []),
            r.choice, r.weights, r.output, size(r.bytes), ratio, _time(r.seconds),
        )  # fmt: skip
    return table


def _comparison(plan: Plan, others: dict[str, Plan | None]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("scheme", no_wrap=True)
    for name in ("step", "found is faster by", "sent", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout")
    rows: list[tuple[str, Plan | None]] = [("found", plan), *others.items()]
    for name, other in rows:
        if other is None:
            table.add_row(name, "", "", "", "", "cannot be split so")
            continue
        seconds = _real(other)
        less = "" if other is plan else f"{100 * (1 - plan.seconds / seconds):.1f} %"
        table.add_row(
            name, _time(seconds), less, size(int(account(other).bytes.sum())),
            size(float(other.memory.max())) + ("" if other.fits else ": too much"),
            _layout(other.layout),
        )  # fmt: skip
    return table


def _real(plan: Plan) -> float:
    """Seconds without what is added for memory that is not there."""
    from dataclasses import replace

    if plan.fits:
        return plan.seconds
    roomy = replace(plan.problem, capacity=float("inf"))
    return roomy.seconds(plan.chosen)


# --------------------------------------------------------------------------------------------------
# Timeline

_SHOWN: Final = 100  # columns
_STAGES: Final = 32


def _timeline(plan: Plan) -> RenderableType:
    """A step: of a pipeline a line a stage, forward as digits, backward as letters."""
    p = plan.problem
    sums = p.sums(plan.chosen)
    if p.stages == 1:
        busy = p.microbatches * float(sums[0, 0])
        exposed = max(0.0, plan.seconds - busy)
        return Text(
            f"timeline: {_time(busy)} of computation and conversions, gradients "
            f"{_time(float(sums[1, 0]))}, of which {_time(exposed)} are not hidden"
        )
    times, _ = play(order(p.schedule, p.stages, p.microbatches, p.pieces), p.stages * p.pieces)
    works = order(p.schedule, p.stages, p.microbatches, p.pieces)
    out = Text("timeline (a digit: forward of a microbatch; letters: its backward; .: idle)\n")
    for stage in range(min(p.stages, _STAGES)):
        line = np.full(max(e for _, e in times[stage]), ".")
        for work, (start, end) in zip(works[stage], times[stage], strict=True):
            mark = "abcdefghij"[work.microbatch % 10] if work.backward else work.microbatch % 10
            line[start:end] = str(mark)
        text = "".join(line)
        out.append(f"{stage:>3} {text[:_SHOWN]}{'...' * (len(text) > _SHOWN)}\n")
    if p.stages > _STAGES:
        out.append(f"... and {p.stages - _STAGES} more stages\n")
    return out[:-1]


# --------------------------------------------------------------------------------------------------
# Picture

_COLOURS: Final = (
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d",
)  # fmt: skip


def picture(plan: Plan) -> str:
    """The scheme as SVG: a row an operator, a column a dimension of the grid, then the pipeline."""
    rows, dims = _rows(plan), len(plan.layout.grid)
    axes = sorted({a for r in rows for a in r.choice.split(",")} - {"whole", "partial", "-"})
    colour: dict[str, str] = dict(zip(axes, _COLOURS * 4, strict=False))
    colour |= {"whole": "#dddddd", "partial": "#888888", "-": "#ffffff"}
    left, cell, high = 210, 110, 18
    parts: list[str] = []

    def text(x: float, y: float, words: str, more: str = "") -> None:
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}" {more}>{escape(safe(words))}</text>')

    def box(x: float, y: float, w: float, h: float, fill: str) -> None:
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" '
            'stroke="white"/>'
        )

    name = plan.problem.tables.model.name
    text(10, 20, f"{name}: {_layout(plan.layout)}", 'font-weight="bold"')
    for dim in range(dims):
        text(left + dim * cell, 40, f"dimension {dim}: {plan.layout.grid[dim]}")
    text(left + max(dims, 1) * cell + 10, 40, "result; sent")
    y = 50
    for r in rows:
        text(10, y + 13, f"{r.name}{f' x{r.times}' if r.times > 1 else ''}")
        for dim, axis in enumerate(r.choice.split(",")[:dims]):
            box(left + dim * cell, y, cell - 2, high - 2, colour[axis])
            text(left + dim * cell + 6, y + 13, axis)
        text(left + max(dims, 1) * cell + 10, y + 13, f"{r.output}; {size(r.bytes)}")
        y += high
    width = left + max(dims, 1) * cell + 280
    y += 20
    p = plan.problem
    if p.stages > 1:
        works = order(p.schedule, p.stages, p.microbatches, p.pieces)
        times, _ = play(works, p.stages * p.pieces)
        end = max(e for of in times for _, e in of)
        scale = (width - 60) / end
        for stage in range(min(p.stages, _STAGES)):
            text(10, y + 13, str(stage))
            for backward, group in groupby(
                zip(works[stage], times[stage], strict=True), key=lambda w: w[0].backward
            ):
                for _, (start, stop) in group:
                    fill = _COLOURS[1] if backward else _COLOURS[0]
                    box(50 + start * scale, y, (stop - start) * scale, high - 2, fill)
            y += high
        text(50, y + 14, "blue: forward, orange: backward")
        y += high
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y + 20}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" '
        f'fill="white"/>\n{body}\n</svg>\n'
    )
