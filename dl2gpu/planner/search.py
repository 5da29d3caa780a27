"""Search on one grid: coordinate descent, and the exact optimum of what is a plain sum.

Descent starts from several choices and changes one operator, two adjacent ones, or all of a kind
together, always to the best; the sums of the stages are kept up to date, so a move is priced for
all choices at once by one look at the tables.

Without memory limit, overlap and stages the time is a sum over operators and tensors, and the exact
optimum comes from eliminating one operator after the other (dynamic programming: on a chain the
Viterbi recursion, and with residual connections still of matrices only, as the graph is
series-parallel). With them the same elimination of a weighted sum is a lower bound (the Lagrangian
dual), which says how far from the optimum a found scheme can be at most.

Source: coordinate descent as in AutoDDL (arXiv 2301.06813v3); variable elimination: Bertele and
Brioschi, "Nonserial Dynamic Programming", 1972.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dl2gpu.planner.problem import BACK, ENTRY, FLOW, KEPT, STATIC, SYNC, Problem, memory, total

__all__ = ["Found", "descend", "dual", "exhaustive", "lower_bound", "optimum"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Found:
    """The best choice of a search, its seconds, and how many choices were priced."""

    chosen: Array
    seconds: float
    priced: int


def optimum(nodes: Sequence[Array], edges: Iterable[tuple[int, int, Array]]) -> tuple[float, Array]:
    """The least sum, and a choice that has it.

    Args:
        nodes: cost of each choice of each node.
        edges: (node, other node, cost[choice, other choice]).

    Raises:
        ValueError: the graph is not series-parallel.
    """
    cost = list(nodes)
    near: list[dict[int, Array]] = [{} for _ in nodes]
    memo: dict[tuple[object, ...], Any] = {}

    def once(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Blocks repeat: what comes of the same arrays is made once."""
        ids = tuple(k if isinstance(k, str) else id(k) for k in key)
        if ids not in memo:
            memo[ids] = key, make()  # the key keeps the arrays, and so their ids
        return memo[ids][1]

    def join(u: int, v: int, m: Array) -> None:
        if v in near[u]:
            old = near[u][v]
            m = once(("sum", old, m), lambda: old + m)
        near[u][v] = m
        near[v][u] = once(("turn", m), lambda: m.T)

    for u, v, m in edges:
        join(u, v, m)
    todo = deque(i for i in range(len(nodes)) if len(near[i]) <= 2)
    order: list[tuple[int, tuple[int, ...], Array]] = []
    gone = np.zeros(len(nodes), np.bool_)
    while todo:
        i = todo.popleft()
        if gone[i] or len(near[i]) > 2:
            continue
        gone[i] = True
        others = tuple(near[i])
        tensors = [near[i][o] for o in others]  # [own, other]
        for o in others:
            del near[o][i]
        least_, best = once(("out", cost[i], *tensors), partial(_out, cost[i], *tensors))
        order.append((i, others, best))
        if len(others) == 2:
            join(others[0], others[1], least_)
        elif others:
            cost[others[0]] = cost[others[0]] + least_
        else:
            cost[i] = least_
        todo.extend(o for o in others if len(near[o]) <= 2)
    if not gone.all():
        raise ValueError("expected a chain with residual connections, found another graph")
    chosen = np.zeros(len(nodes), np.int64)
    least = 0.0
    for i, others, best in reversed(order):
        chosen[i] = best[tuple(chosen[o] for o in others)]
        if not others:
            least += float(cost[i])
    return least, chosen


def _out(own: Array, *tensors: Array) -> tuple[Array, Array]:
    """The least over a node's own choices for each choice of its neighbours, and the choice."""
    if len(tensors) == 2:
        summed = (own[:, None] + tensors[0])[:, :, None] + tensors[1][:, None, :]
    else:
        summed = own[:, None] + tensors[0] if tensors else own
    return np.asarray(summed.min(0)), np.asarray(summed.argmin(0))


def _relaxed(p: Problem, flow: Array, sync: Array, hold: Array) -> tuple[float, Array]:
    """The least weighted sum of each stage's seconds, late gradients and bytes; and its choice."""
    weight = np.zeros((6, p.stages))
    weight[FLOW], weight[SYNC], weight[BACK], weight[STATIC] = flow, sync, -sync * p.hides, hold
    if p.tables.setting.recompute:
        weight[ENTRY], weight[KEPT] = hold * p.flight, hold / p.blocks
    else:
        weight[KEPT] = hold * p.flight
    made: dict[tuple[int, int], Array] = {}
    nodes = []
    for s, n in zip(p.stage, p.node, strict=True):
        key = id(n), int(s)
        if key not in made:
            made[key] = weight[:, s] @ n
        nodes.append(made[key])
    scaled: dict[tuple[int, int], Array] = {}
    edges = []
    for u, v, m in p.edge:
        key = id(m), int(p.stage[v])
        if key not in scaled:
            scaled[key] = flow[p.stage[v]] * m
        edges.append((u, v, scaled[key]))
    return optimum(nodes, edges)


def lower_bound(p: Problem, share: float = 0.0) -> tuple[float, Array]:
    """No choice takes less than this; and the choice that the bound comes from.

    ``share``: weight of exposed gradient communication, 0 to 1; every one gives a bound, as
    max x_s >= (sum x_s) / S and max(0, x) >= share x.
    """
    work = (p.microbatches - 1 / p.pieces) / p.stages + 1 / p.pieces
    even = np.ones(p.stages)
    return _relaxed(p, work * even, share / p.stages * even, 0 * even)


def dual(p: Problem, rounds: int = 8) -> tuple[float, list[Array]]:
    """Weights of stages and of memory that make the bound better, by subgradient steps.

    The time of a step is the largest of many sums, one for each stage that could be the slowest and
    each that could be the latest; a mean of them with any weights is a bound, and so is one that
    pays for memory and is paid back the capacity. The weights move towards what is the largest at
    the choice found.

    Returns:
        The best bound, for choices that fit the memory; and the choices met: where to start.
    """
    m, v = p.microbatches, p.pieces
    slow = np.full(p.stages, 1 / p.stages)
    late, hold = np.zeros(p.stages), np.zeros(p.stages)
    best, met = 0.0, []
    for k in range(rounds):
        cost, chosen = _relaxed(p, (m - 1 / v) * slow + 1 / v, late, hold)
        best = max(best, cost - p.capacity * float(hold.sum()))
        met.append(chosen)
        sums = p.sums(chosen)
        step = 1 / (k + 2)
        slow *= 1 - step
        slow[int(sums[FLOW].argmax())] += step
        exposed = sums[SYNC] - p.hides * sums[BACK]
        late *= 1 - step
        late[int(exposed.argmax())] += step * (exposed.max() > 0)
        over = memory(sums, p) / p.capacity - 1
        hold = np.maximum(hold + step * cost / p.capacity * over, 0)
    return best, met


def exhaustive(p: Problem) -> Found:
    """Every choice, one by one: for small problems, and for tests."""
    ways = [range(n.shape[1]) for n in p.node]
    best, least, priced = None, np.inf, 0
    for chosen in product(*ways):
        priced += 1
        t = p.seconds(np.array(chosen))
        if t < least:
            best, least = np.array(chosen), t
    assert best is not None
    return Found(best, least, priced)


_BETTER: Final = 1 - 1e-9


class _Walk:
    """A choice and its sums; moves keep both in step."""

    def __init__(self, p: Problem, chosen: Array) -> None:
        self.p, self.chosen = p, chosen.copy()
        self.sums = p.sums(self.chosen)
        self.seconds = float(total(self.sums, p))
        self.priced = 1

    def _without(self, nodes: Sequence[int]) -> Array:
        """The sums without some nodes and their tensors."""
        p, out = self.p, self.sums.copy()
        for i in nodes:
            out[:, p.stage[i]] -= p.node[i][:, self.chosen[i]]
        for k in {k for i in nodes for k in p.touching[i]}:
            u, v, m = p.edge[k]
            out[FLOW, p.stage[v]] -= m[self.chosen[u], self.chosen[v]]
        return out

    def one(self, i: int) -> bool:
        """The best choice of a node, the others as they are."""
        p = self.p
        if not np.isfinite(self.seconds):
            return False
        width = p.node[i].shape[1]
        sums = np.repeat(self._without([i])[:, :, None], width, 2)
        sums[:, p.stage[i]] += p.node[i]
        for k in p.touching[i]:
            u, v, m = p.edge[k]
            sums[FLOW, p.stage[v]] += m[:, self.chosen[v]] if u == i else m[self.chosen[u]]
        return self._take([i], sums)

    def two(self, edge: int) -> bool:
        """The best choices of the two ends of a tensor."""
        p = self.p
        i, j, between = p.edge[edge]
        shape = between.shape
        sums = np.broadcast_to(
            self._without([i, j])[:, :, None, None], (6, p.stages, *shape)
        ).copy()
        sums[:, p.stage[i]] += p.node[i][:, :, None]
        sums[:, p.stage[j]] += p.node[j][:, None, :]
        sums[FLOW, p.stage[j]] += between
        for end, other in ((i, j), (j, i)):
            for k in p.touching[end]:
                if k == edge:
                    continue
                u, v, m = p.edge[k]
                if other in (u, v):
                    continue
                row = m[:, self.chosen[v]] if u == end else m[self.chosen[u]]
                sums[FLOW, p.stage[v]] += row[:, None] if end == i else row[None, :]
        return self._take([i, j], sums)

    def _take(self, nodes: list[int], sums: Array) -> bool:
        t = total(sums, self.p)
        self.priced += t.size
        flat = int(t.argmin())
        at = np.unravel_index(flat, t.shape)
        if not t.flat[flat] < self.seconds * _BETTER:
            return False
        self.chosen[nodes] = at
        self.sums, self.seconds = (
            sums.reshape(6, self.p.stages, -1)[..., flat].copy(),
            float(t.flat[flat]),
        )
        return True

    def together(self, nodes: Array, choice: int) -> bool:
        """All nodes of a kind to one choice, if that is better."""
        tried = self.chosen.copy()
        tried[nodes] = choice
        sums = self.p.sums(tried)
        self.priced += 1
        t = float(total(sums, self.p))
        if not t < self.seconds * _BETTER:
            return False
        self.chosen, self.sums, self.seconds = tried, sums, t
        return True


def descend(
    p: Problem,
    starts: Sequence[Array] = (),
    restarts: int = 2,
    seed: int = 0,
    sweeps: int = 20,
    enough: float = 0.0,
) -> Found:
    """Coordinate descent from each of ``starts`` and from random choices.

    A descent ends where no move of any kind is better, or after so many sweeps; the search where
    ``enough`` seconds, a lower bound, are reached.
    """
    rng = np.random.default_rng(seed)
    widths = np.array([n.shape[1] for n in p.node])
    begins = [*starts, *(rng.integers(0, widths) for _ in range(restarts))]
    kinds: dict[int, list[int]] = {}
    for i, c in enumerate(p.tables.nodes):
        kinds.setdefault(id(c), []).append(i)
    alike = [np.array(k) for k in kinds.values() if len(k) > 1]
    best: Found | None = None
    priced = 0
    for start in begins:
        if best is not None and best.seconds <= enough * (1 + 1e-6):
            break
        walk = _Walk(p, start)
        if not np.isfinite(walk.seconds):
            walk = _Walk(p, lower_bound(p)[1])
        for _ in range(sweeps):
            moved = False
            for i in range(len(p.node)):
                moved |= widths[i] > 1 and walk.one(i)
            if not moved:
                for k in range(len(p.edge)):
                    moved |= walk.two(k)
            if not moved and len(alike) * len(p.node) < 20_000:
                for nodes in alike:
                    for choice in range(int(widths[nodes[0]])):
                        moved |= walk.together(nodes, choice)
            if not moved:
                break
        priced += walk.priced
        if best is None or walk.seconds < best.seconds:
            best = Found(walk.chosen, walk.seconds, 0)
    assert best is not None
    return Found(best.chosen, best.seconds, priced)
