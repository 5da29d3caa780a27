"""Plans: a model's scheme on a cluster, found over grids, stages, microbatches and choices.

Layouts (stages, shape of a stage's grid, microbatches, pieces a stage) are taken in the order of
their lower bounds; the search ends where the next bound is no better than what was found, so what
is found is as good as any layout can be as far as descent within a layout is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dl2gpu.planner.costs import Setting, tables
from dl2gpu.planner.links import Cluster, grid_links
from dl2gpu.planner.model import Model, ModelError
from dl2gpu.planner.problem import FLOW, Problem, memory, stages_of
from dl2gpu.planner.search import descend, lower_bound

__all__ = ["Layout", "Plan", "layouts", "problem_of", "search"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """How the devices are arranged, and how a step is cut into microbatches."""

    stages: int
    grid: tuple[int, ...]
    """Of a stage; each above 1, the last over neighbouring ranks."""
    microbatches: int = 1
    pieces: int = 1
    """Of the model on each stage; above 1: interleaved."""
    zero: int = 0
    recompute: bool = False
    schedule: str = "1f1b"
    """``1f1b`` or ``gpipe``; of several pieces always the interleaved 1F1B."""

    @property
    def ranks(self) -> int:
        """Devices."""
        return self.stages * prod(self.grid)

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole grid, stages first."""
        return (self.stages, *self.grid)


@dataclass(frozen=True, eq=False)
class Plan:
    """A scheme and what it is predicted to take."""

    layout: Layout
    problem: Problem
    chosen: Array
    """Choice of each node."""
    seconds: float
    bound: float
    """Seconds below which no choice of any layout tried can be."""
    priced: int = 0
    layouts: int = 0

    @property
    def memory(self) -> Array:
        """Bytes of a device of each stage."""
        return memory(self.problem.sums(self.chosen), self.problem)

    @property
    def fits(self) -> bool:
        """Does it fit the devices?"""
        return bool(self.memory.max() <= self.problem.capacity)


def problem_of(model: Model, cluster: Cluster, layout: Layout) -> Problem | None:
    """The problem of a layout; None where the model cannot be laid out so.

    Raises:
        ValueError: the layout is not of the cluster's devices.
    """
    if layout.ranks > cluster.devices:
        raise ValueError(
            f"layout: expected at most {cluster.devices} devices, found {layout.ranks}"
        )
    if model.batch % layout.microbatches or (
        layout.pieces > 1 and layout.microbatches % layout.stages
    ):
        return None
    links = grid_links(cluster, layout.shape)
    setting = Setting(
        cluster, layout.grid, links[1:], layout.zero, layout.recompute, layout.microbatches
    )
    small = model.with_batch(model.batch // layout.microbatches)
    made = tables(small, setting)
    if made is None:
        return None
    work = np.array([c.flow.min() for c in made.nodes])
    piece = stages_of(work, small.cuts(), layout.stages * layout.pieces)
    if piece is None:
        return None
    return Problem(
        made, piece, layout.stages, layout.microbatches, layout.pieces, layout.schedule, links[0],
        cluster.memory,
    )  # fmt: skip


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def layouts(model: Model, cluster: Cluster) -> Iterator[Layout]:
    """Every layout that is tried: all divisors for stages, all grids of one or two dimensions."""
    cuts = len(model.cuts())
    for stages in _divisors(cluster.devices):
        if stages - 1 > cuts:
            continue
        plane = cluster.devices // stages
        grids = [tuple(n for n in (plane // d, d) if n > 1) for d in _divisors(plane)]
        many = [1, 4] if stages == 1 else [stages, 2 * stages, 4 * stages, 8 * stages]
        for grid in sorted(set(grids)):
            for m in many:
                if model.batch % m:
                    continue
                for pieces in (1, 2, 4):
                    if stages * pieces - 1 <= cuts and (pieces == 1 or stages > 1):
                        yield Layout(stages, grid, m, pieces)


_VARIANTS: Final = ((0, False), (1, False), (1, True), (3, False), (3, True))
"""(ZeRO, recomputation) in the order in which they cost more time and less memory."""


def search(model: Model, cluster: Cluster, *, seed: int = 0, restarts: int = 1) -> Plan:
    """The best plan found.

    Raises:
        ModelError: no layout of the model fits the devices' memory; says what the least is.
    """
    ranked: list[tuple[float, int, Layout, list[Array]]] = []
    for number, layout in enumerate(layouts(model, cluster)):
        p = problem_of(model, cluster, layout)
        if p is None:
            continue
        found = [
            lower_bound(p, share) for share in ((0.0, 1.0) if prod(layout.grid) > 1 else (0.0,))
        ]
        ranked.append((max(f[0] for f in found), number, layout, [f[1] for f in found]))
    ranked.sort(key=lambda r: r[:2])
    best: Plan | None = None
    priced, tried, smallest = 0, 0, np.inf
    for bound, _, layout, starts in ranked:
        if best is not None and bound >= best.seconds:
            break
        tried += 1
        for zero, recompute in _VARIANTS:
            variant = replace(layout, zero=zero, recompute=recompute)
            p = problem_of(model, cluster, variant)
            if p is None:
                break
            # the cheapest of the starts, all split alike, and at random
            extra = [_uniform(p, axis) for axis in "bo"]
            quick = sorted([*starts, *extra], key=p.seconds)[:2]
            got = descend(p, quick, restarts, seed)
            priced += got.priced
            plan = Plan(variant, p, got.chosen, got.seconds, ranked[0][0])
            smallest = min(smallest, float(plan.memory.max()))
            if plan.fits:
                if best is None or plan.seconds < best.seconds:
                    best = plan
                break
            if best is not None and _without_memory(p, got.chosen) >= best.seconds:
                break
    if best is None:
        need = (
            "" if not np.isfinite(smallest) else f"; the least found is {smallest / 2**30:.1f} GiB"
        )
        raise ModelError(
            f"{model.name} on {cluster.devices} devices: expected a scheme that fits "
            f"{cluster.memory / 2**30:.1f} GiB a device, found none{need}"
        )
    return replace(best, priced=priced, layouts=tried)


def _without_memory(p: Problem, chosen: Array) -> float:
    flow = p.sums(chosen)[FLOW]
    return float((p.microbatches - 1 / p.pieces) * flow.max() + flow.sum() / p.pieces)


def _uniform(p: Problem, axis: str) -> Array:
    """Each operator split along ``axis`` on every dimension, or along its first axis, or whole."""
    out = []
    for c in p.tables.nodes:
        names = [c.name(k) for k in range(len(c.signatures))]
        dims = len(p.tables.setting.grid)
        wanted = [",".join([a] * dims) for a in (axis, "b", "whole")]
        out.append(next((names.index(w) for w in wanted if w in names), 0))
    return np.array(out)
