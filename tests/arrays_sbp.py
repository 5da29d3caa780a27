"""Tensors that really lie over a grid of devices: the slow, obvious meaning of SBP."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from dl2gpu.planner.convert import Step
from dl2gpu.planner.sbp import B, P, State

Array = npt.NDArray[Any]
Shards = dict[tuple[int, ...], Array]
"""By coordinates in the grid."""


def scatter(whole: Array, state: State, grid: tuple[int, ...], rng: np.random.Generator) -> Shards:
    """What each device holds; the parts of a partial sum are at random."""
    if not grid:
        return {(): whole}
    parts: list[Array]
    size = grid[0]
    if state[0] == B:
        parts = [whole] * size
    elif state[0] == P:
        parts = [rng.integers(-9, 9, whole.shape) for _ in range(size - 1)]
        parts.append(whole - sum(parts))
    else:
        parts = np.split(whole, size, axis=state[0] - 2)
    return {
        (i, *at): shard
        for i, part in enumerate(parts)
        for at, shard in scatter(part, state[1:], grid[1:], rng).items()
    }


def gather(shards: Shards, state: State, grid: tuple[int, ...]) -> Array:
    """The whole tensor; every copy of it must be the same."""
    if not grid:
        return shards[()]
    inner = [
        gather({at[1:]: s for at, s in shards.items() if at[0] == i}, state[1:], grid[1:])
        for i in range(grid[0])
    ]
    if state[0] == B:
        for other in inner[1:]:
            np.testing.assert_allclose(other, inner[0], atol=1e-6)
        return inner[0]
    if state[0] == P:
        return np.asarray(sum(inner))
    return np.concatenate(inner, axis=state[0] - 2)


def run(shards: Shards, step: Step, grid: tuple[int, ...]) -> Shards:
    """One step of a conversion, with the data of its groups only."""
    d = step.dim
    before, after = step.before[d], step.after[d]
    out: Shards = {}
    for rest in product(*(range(n) for i, n in enumerate(grid) if i != d)):
        at = [(*rest[:d], i, *rest[d:]) for i in range(grid[d])]
        group = [shards[a] for a in at]
        for i, a in enumerate(at):
            match step.op:
                case "all_reduce":
                    out[a] = np.asarray(sum(group))
                case "reduce_scatter":
                    out[a] = np.split(np.asarray(sum(group)), grid[d], after - 2)[i]
                case "all_gather":
                    out[a] = np.concatenate(group, before - 2)
                case "all_to_all":
                    pieces = [np.split(g, grid[d], after - 2)[i] for g in group]
                    out[a] = np.concatenate(pieces, before - 2)
                case _ if before == B and after == P:
                    out[a] = group[i] if i == 0 else np.zeros_like(group[i])
                case _ if after == P:
                    pieces = [g if j == i else np.zeros_like(g) for j, g in enumerate(group)]
                    out[a] = np.concatenate(pieces, before - 2)
                case _:
                    out[a] = np.split(group[i], grid[d], after - 2)[i]
            assert group[i].size == step.count_in
            assert out[a].size == step.count_out
    return out
