"""Conversions: from any SBP state of a tensor to any other, by the cheapest collectives.

One step changes one dimension of the grid, in all its groups at once:

====  ====  ==============================
from  to    by
====  ====  ==============================
P     B     all_reduce
P     S     reduce_scatter
S     B     all_gather
S(i)  S(j)  all_to_all
B     S, P  local: cut, or zero elsewhere
S     P     local: zeros around
====  ====  ==============================

A split that a later dimension of the grid cuts further cannot be changed before that one: its
pieces do not lie together. Which dimension goes first, and by which states, is the shortest path
on the graph of all states (Floyd and Warshall). So an all_reduce over two dimensions becomes, where
that is faster, reduce_scatter inside, all_reduce across, all_gather inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dl2gpu.planner.links import Link, bytes_sent, seconds
from dl2gpu.planner.sbp import B, P, State, local_size, states

__all__ = ["Conversions", "Step", "conversions"]

Array = npt.NDArray[Any]

_FREE = 1e-12  # seconds of a local step: the fewest of several free ways


@dataclass(frozen=True, slots=True)
class Step:
    """One collective of a conversion, or a local step, whose ``op`` is ``local``."""

    dim: int
    op: str
    before: State
    after: State
    count_in: int
    """Elements that a device passes in."""
    count_out: int


@dataclass(frozen=True, slots=True)
class Conversions:
    """All conversions of one tensor on one grid; matrices are indexed by states, from and to."""

    states: tuple[State, ...]
    index: dict[State, int]
    seconds: Array  # Float64
    bytes: Array  # Int64: sent by all devices of the grid together
    step: tuple[tuple[Step | None, ...], ...]
    towards: Array  # the next state on the way

    def steps(self, before: State, after: State) -> list[Step]:
        """The steps of a conversion, in order."""
        at, end = self.index[before], self.index[after]
        out = []
        while at != end:
            then = int(self.towards[at, end])
            step = self.step[at][then]
            if step is None:
                raise ValueError(f"no conversion from {before} to {after}")
            out.append(step)
            at = then
        return out


def _collective(before: int, after: int) -> str:
    if before == P:
        return "all_reduce" if after == B else "reduce_scatter"
    if before >= 2 and after != P:
        return "all_gather" if after == B else "all_to_all"
    return "local"


def _may(state: State, dim: int, after: int) -> bool:
    """May this dimension change, or does a later one cut the same axis?"""
    later = state[dim + 1 :]
    return not (
        (state[dim] >= 2 and state[dim] in later)
        or (after >= 2 and after in later)
        or (state[dim] == B and after == B)
    )


@lru_cache(maxsize=65536)
def conversions(
    shape: tuple[int, ...], grid: tuple[int, ...], links: tuple[Link, ...], width: int
) -> Conversions:
    """Conversions of a tensor of ``shape``, ``width`` bytes an element, on ``grid``."""
    every = states(shape, grid)
    index = {s: i for i, s in enumerate(every)}
    n = len(every)
    devices = int(np.prod(grid))
    time = np.full((n, n), np.inf)
    sent = np.zeros((n, n), np.int64)
    np.fill_diagonal(time, 0.0)
    direct: list[list[Step | None]] = [[None] * n for _ in range(n)]
    for i, state in enumerate(every):
        here = local_size(state, shape, grid)
        for dim, size in enumerate(grid):
            for after in range(2 + len(shape)):
                then = (*state[:dim], after, *state[dim + 1 :])
                j = index.get(then)
                if j is None or j == i or not _may(state, dim, after):
                    continue
                op = _collective(state[dim], after)
                there = local_size(then, shape, grid)
                direct[i][j] = Step(dim, op, state, then, here, there)
                if op == "local":
                    time[i, j] = _FREE
                else:
                    whole = max(here, there) * width
                    time[i, j] = seconds(op, size, whole, links[dim]) + _FREE
                    sent[i, j] = bytes_sent(op, size, whole) * (devices // size)
    towards = np.broadcast_to(np.arange(n), (n, n)).copy()
    for k in range(n):
        via = time[:, k, None] + time[None, k, :]
        better = via < time - _FREE / 2
        time = np.where(better, via, time)
        sent = np.where(better, sent[:, k, None] + sent[None, k, :], sent)
        towards = np.where(better, towards[:, k, None], towards)
    return Conversions(tuple(every), index, time, sent, tuple(tuple(r) for r in direct), towards)
