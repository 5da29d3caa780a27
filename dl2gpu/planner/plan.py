"""Plans: a model's scheme on a cluster, found over grids, stages, microbatches and choices.

Layouts (stages, shape of a stage's grid, microbatches, pieces a stage) are taken in the order of
their lower bounds; the search ends where the next bound is no better than what was found, so what
is found is as good as any layout can be as far as descent within a layout is. The bounds are of
schemes without ZeRO 3: with several microbatches that hides more communication than they allow for.
It is tried only in layouts that the bounds leave, where memory asks for it.
"""

from __future__ import annotations

import heapq
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
from dl2gpu.planner.search import descend, dual, lower_bound

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
    """Seconds below which no choice of any layout can be; with more than one microbatch, without
    ZeRO 3."""
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
        # of one stage: more only where memory asks for it
        many = [1] if stages == 1 else [stages, 2 * stages, 4 * stages, 8 * stages]
        for grid in sorted(set(grids)):
            for m in many:
                if model.batch % m:
                    continue
                for pieces in (1, 2, 4):
                    if stages * pieces - 1 <= cuts and (pieces == 1 or stages > 1):
                        yield Layout(stages, grid, m, pieces)


_VARIANTS: Final = ((0, False), (1, False), (1, True), (3, False), (3, True))
"""(ZeRO, recomputation) about in the order in which they cost more time and less memory."""
_UNCERTAIN: Final = ((3, False),)
"""May be faster than the one before."""
_LARGE: Final = 100
"""Operators of a model for which fewer starts are tried."""
_MOST_PARTS: Final = 64
"""Microbatches of one stage."""


def search(model: Model, cluster: Cluster, *, seed: int = 0, restarts: int = 1) -> Plan:
    """The best plan found.

    Raises:
        ModelError: no layout of the model fits the devices' memory; says what the least is.
    """
    # every layout by a bound that costs nothing; a better one is looked for when its turn comes
    heap: list[tuple[float, int, Layout, list[Array] | None]] = [
        (_at_least(model, cluster, layout), number, layout, None)
        for number, layout in enumerate(layouts(model, cluster))
    ]
    heapq.heapify(heap)
    best: Plan | None = None
    bound, priced, tried, smallest = np.inf, 0, 0, np.inf
    while heap:
        least, number, layout, starts = heapq.heappop(heap)
        if best is not None and least >= best.seconds:
            bound = min(bound, least)
            break
        if starts is None:
            p = problem_of(model, cluster, layout)
            if p is not None:
                shares = (0.0, 1.0) if prod(layout.grid) > 1 else (0.0,)
                found = [lower_bound(p, share) for share in shares]
                least = max(least, *(f[0] for f in found))
                heapq.heappush(heap, (least, number, layout, [f[1] for f in found]))
            continue
        tried += 1
        bound = min(bound, least)
        plans, more = _variants(model, cluster, layout, starts, least, best, seed, restarts)
        priced += more
        for plan in plans:
            smallest = min(smallest, float(plan.memory.max()))
            if plan.fits and (best is None or plan.seconds < best.seconds):
                best = plan
        m = 2 * layout.microbatches
        if layout.stages == 1 and not plans[0].fits and model.batch % m == 0 and m <= _MOST_PARTS:
            smaller = replace(layout, microbatches=m)
            number += len(heap) + 10_000
            heapq.heappush(heap, (_at_least(model, cluster, smaller), number, smaller, None))
    if best is None:
        need = (
            "" if not np.isfinite(smallest) else f"; the least found is {smallest / 2**30:.1f} GiB"
        )
        raise ModelError(
            f"{model.name} on {cluster.devices} devices: expected a scheme that fits "
            f"{cluster.memory / 2**30:.1f} GiB a device, found none{need}"
        )
    return replace(best, bound=min(bound, best.seconds), priced=priced, layouts=tried)


def _at_least(model: Model, cluster: Cluster, layout: Layout) -> float:
    """Seconds that the computation alone takes, evenly dealt out, with the pipeline's bubble."""
    m, v, s = layout.microbatches, layout.pieces, layout.stages
    flops = 3 * sum(n.flops for n in model.nodes) / m / prod(layout.grid)
    return ((m - 1 / v) / s + 1 / v) * flops / (cluster.flops * cluster.efficiency)


def _variants(
    model: Model, cluster: Cluster, layout: Layout, starts: list[Array], least: float,
    best: Plan | None, seed: int, restarts: int,
) -> tuple[list[Plan], int]:  # fmt: skip
    """The layout as it is, and with what saves memory, as far as that may be of use."""
    plans: list[Plan] = []
    priced = 0
    for zero, recompute in _VARIANTS:
        fits = any(plan.fits for plan in plans)
        if fits and (zero, recompute) not in _UNCERTAIN:
            break
        variant = replace(layout, zero=zero, recompute=recompute)
        p = problem_of(model, cluster, variant)
        if p is None:
            break
        # the choices of bounds, and two that split all operators alike: the cheapest, then others
        large = len(model.nodes) > _LARGE
        _, met = dual(p, 2 if large else 8)
        extra = [_uniform(p, axis) for axis in "bo"]
        quick = _different(sorted([*starts, *met, *extra], key=p.seconds))
        got = descend(p, quick[: 1 if large else 3], 0 if large else restarts, seed, enough=least)
        priced += got.priced
        plans.append(Plan(variant, p, got.chosen, got.seconds, least))
        if best is not None and _without_memory(p, got.chosen) >= best.seconds:
            break
    return plans, priced


def _different(choices: list[Array]) -> list[Array]:
    return list({c.tobytes(): c for c in choices}.values())


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
