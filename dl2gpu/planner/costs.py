"""Costs of every choice: tables over the signatures of each operator, on one grid.

A choice of an operator is one signature for each dimension of the grid. Times are in seconds, for
one microbatch on one device; bytes sent are of all devices of the grid together.

* computation: max(operations / (peak x efficiency), bytes moved / memory bandwidth), the roofline
  (Williams, Waterman and Patterson, CACM 2009); backward is twice forward, and once more forward
  where activations are computed again;
* gradients: those that are partial sums are reduced once a step. ZeRO (Rajbhandari et al., SC 2020)
  keeps the optimiser (1), the gradients too (2), or the parameters too (3) in parts: reduce_scatter
  and all_gather in place of all_reduce, and for 3 an all_gather before each use;
* memory: parameters, gradients and optimiser state, divided as they are split and by ZeRO; operands
  of each operator are kept for backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dl2gpu.planner.convert import Conversions, conversions
from dl2gpu.planner.links import Cluster, Link, bytes_sent, seconds
from dl2gpu.planner.model import Model, Node, Precision
from dl2gpu.planner.sbp import P, Signature, State, legal, local_size, signatures

__all__ = ["Choices", "Setting", "Tables", "choices_of", "edge_costs", "shards", "tables"]

Array = npt.NDArray[Any]

LOSS_WIDTH = 4
"""Bytes of the numbers that a loss over a split vocabulary reduces."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the tables depend on besides model and batch."""

    cluster: Cluster
    grid: tuple[int, ...]
    """Devices on each dimension of a stage's grid; every one above 1."""
    links: tuple[Link, ...]
    zero: int = 0
    recompute: bool = False
    microbatches: int = 1
    """Of a step: ZeRO 3 gathers for each."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of one kind of operator; arrays have one element for each."""

    signatures: tuple[tuple[Signature, ...], ...]
    flow: Array
    """Seconds a microbatch, forward and backward, with the operator's inner reductions."""
    back: Array
    """Seconds of backward computation a microbatch."""
    sync: Array
    """Seconds of gradient communication a step."""
    static: Array
    """Bytes of parameters, gradients and optimiser."""
    kept: Array
    """Bytes of operands a microbatch."""
    sent: Array
    """Bytes sent a microbatch by inner reductions; Int64."""
    sync_sent: Array
    """Bytes sent a step for gradients and parameters; Int64."""
    forward: Array
    """Seconds of computation forward."""

    def state(self, choice: int, operand: int) -> State:
        """State of an operand, or of the result: -1."""
        return tuple(
            s.output if operand < 0 else s.inputs[operand] for s in self.signatures[choice]
        )

    def gradient(self, choice: int, operand: int) -> State:
        """State of the gradient of an operand, or of the result: -1."""
        return tuple(
            s.grad_output if operand < 0 else s.grad_inputs[operand]
            for s in self.signatures[choice]
        )

    def name(self, choice: int) -> str:
        """The split axes, a letter a dimension."""
        return ",".join(s.name for s in self.signatures[choice])


def _allowed(node: Node, combination: tuple[Signature, ...], grid: tuple[int, ...]) -> bool:
    cuts: dict[str, int] = {}
    for sig, size in zip(combination, grid, strict=True):
        if sig.splits:
            cuts[sig.name] = cuts.get(sig.name, 1) * size
    units = dict(node.sizes) | dict(node.units)
    if any(units[axis] % n for axis, n in cuts.items()):
        return False
    for operand in range(-1, len(node.operator.inputs)):
        state = tuple(s.output if operand < 0 else s.inputs[operand] for s in combination)
        if not legal(state, node.shape(operand), grid):
            return False
    return True


def shards(
    table: Conversions, gradient: State, whole: State, zero: int
) -> tuple[State, float] | None:
    """The cheapest state with parts of a parameter for ZeRO, and the seconds there and back.

    Every dimension on which the gradient is a partial sum is split instead. None: there is none.
    """
    if not zero or P not in gradient:
        return None
    i, k = table.index[gradient], table.index[whole]
    best: tuple[State, float] | None = None
    for state in table.states:
        if any(
            (s < 2) if g == P else (s != w) for s, g, w in zip(state, gradient, whole, strict=True)
        ):
            continue
        j = table.index[state]
        cost = float(table.seconds[i, j] + table.seconds[j, k])
        if best is None or cost < best[1]:
            best = state, cost
    return best


@lru_cache(maxsize=16384)
def _choices(node: Node, setting: Setting, precision: Precision) -> Choices:
    op, grid, cluster = node.operator, setting.grid, setting.cluster
    devices = prod(grid)
    every = [
        c for c in product(signatures(op), repeat=len(grid)) if _allowed(node, c, grid)
    ]  # fmt: skip
    if len(op.output) == 0:  # a loss is the end: it stays a partial sum
        every = [c for c in every if not any(s.name == "partial" for s in c)]
    rows = []
    for c in every:
        divided = prod(n for s, n in zip(c, grid, strict=True) if s.splits)
        states_ = [tuple(s.inputs[i] for s in c) for i in range(len(op.inputs))]
        local = [local_size(s, node.shape(i), grid) for i, s in enumerate(states_)]
        result = local_size(tuple(s.output for s in c), node.shape(-1), grid)
        read = sum(n for i, n in enumerate(local) if not (i in op.weights and not node.flops))
        moved = (read + result) * precision.width
        compute = max(
            node.flops / divided / (cluster.flops * cluster.efficiency),
            moved / cluster.memory_bandwidth,
        )
        flow = compute * (4 if setting.recompute else 3)
        sent = 0
        for dim, (s, size) in enumerate(zip(c, grid, strict=True)):
            if s.splits and s.name in op.reduces_inside:
                inner = 2 * local[0] // dict(node.sizes)[s.name] * LOSS_WIDTH
                inner *= prod(
                    n for o, n in zip(c, grid, strict=True) if o.splits and o.name == s.name
                )
                flow += seconds("all_reduce", size, inner, setting.links[dim])
                sent += bytes_sent("all_reduce", size, inner) * (devices // size)
        sync, sync_sent, static = 0.0, 0, 0.0
        for i in op.weights:
            gradient = tuple(s.grad_inputs[i] for s in c)
            table = conversions(node.shape(i), grid, setting.links, precision.width)
            g, w = table.index[gradient], table.index[states_[i]]
            parts = shards(table, gradient, states_[i], setting.zero)
            owners = 1
            if parts is None:
                sync += float(table.seconds[g, w])
                sync_sent += int(table.bytes[g, w])
            else:
                p = table.index[parts[0]]
                owners = prod(n for d, n in zip(gradient, grid, strict=True) if d == P)
                uses = setting.microbatches * 2 if setting.zero == 3 else 1
                sync += float(table.seconds[g, p] + uses * table.seconds[p, w])
                sync_sent += int(table.bytes[g, p] + uses * table.bytes[p, w])
            z = [owners if setting.zero > k else 1 for k in range(3)]
            static += local[i] * (
                precision.width / z[2] + precision.width / z[1] + precision.optimiser / z[0]
            )
        kept = 0
        if op.name not in ("add", "pool"):  # what backward needs of them is nothing, or small
            kept = sum(n for i, n in enumerate(local) if i not in op.weights) * precision.width
        rows.append((flow, 2 * compute, sync, static, kept, sent, sync_sent, compute))
    columns = [np.array(c, float) for c in zip(*rows, strict=True)]
    columns[5:7] = [np.array([r[k] for r in rows], np.int64) for k in (5, 6)]
    return Choices(tuple(every), *columns)


def choices_of(node: Node, setting: Setting, precision: Precision) -> Choices:
    """The legal choices of an operator. Whole on every device is always one."""
    from dataclasses import replace

    return _choices(replace(node, name="", role="", block=0), setting, precision)


@dataclass(frozen=True, slots=True)
class EdgeCosts:
    """Conversions between the choices of a tensor's source and of its target; [source, target]."""

    flow: Array
    """Seconds a microbatch, both ways."""
    sent: Array
    """Bytes a microbatch, both ways; Int64."""


@lru_cache(maxsize=16384)
def _edge(
    shape: tuple[int, ...], out: tuple[State, ...], grad_out: tuple[State, ...],
    into: tuple[State, ...], grad_in: tuple[State, ...], setting: Setting, width: int,
) -> EdgeCosts:  # fmt: skip
    table = conversions(shape, setting.grid, setting.links, width)

    def at(states_: tuple[State, ...]) -> Array:
        # one more row stands for what this tensor cannot be
        return np.array([table.index.get(s, len(table.states)) for s in states_])

    n = len(table.states)
    time = np.full((n + 1, n + 1), np.inf)
    time[:n, :n] = table.seconds
    sent = np.zeros((n + 1, n + 1), np.int64)
    sent[:n, :n] = table.bytes
    o, i, go, gi = at(out), at(into), at(grad_out), at(grad_in)
    times = 2 if setting.recompute else 1
    flow = times * time[o[:, None], i[None, :]] + time[gi[None, :], go[:, None]]
    count = times * sent[o[:, None], i[None, :]] + sent[gi[None, :], go[:, None]]
    return EdgeCosts(flow, count)


def edge_costs(
    source: tuple[Node, Choices], target: tuple[Node, Choices], operand: int,
    setting: Setting, precision: Precision,
) -> EdgeCosts:  # fmt: skip
    """Costs of a tensor between two operators."""
    (node, a), (_, b) = source, target

    def every(c: Choices, which: int) -> tuple[tuple[State, ...], tuple[State, ...]]:
        many = range(len(c.signatures))
        return (
            tuple(c.state(k, which) for k in many), tuple(c.gradient(k, which) for k in many)
        )  # fmt: skip

    out, grad_out = every(a, -1)
    into, grad_in = every(b, operand)
    return _edge(node.shape(-1), out, grad_out, into, grad_in, setting, precision.width)


@dataclass(frozen=True, slots=True)
class Tables:
    """All choices of a model for one microbatch on one grid."""

    model: Model
    """With the batch of a microbatch."""
    setting: Setting
    nodes: tuple[Choices, ...]
    edges: tuple[EdgeCosts, ...]

    def message(self, node: int) -> Array:
        """Bytes of a device for the result of ``node`` to the next stage and its gradient back."""
        c, shape, grid = self.nodes[node], self.model.nodes[node].shape(-1), self.setting.grid
        width = self.model.precision.width

        def one(k: int) -> int:
            both = c.state(k, -1), c.gradient(k, -1)
            return sum(local_size(s, shape, grid) for s in both) * width

        return np.array([one(k) for k in range(len(c.signatures))], np.int64)


def tables(model: Model, setting: Setting) -> Tables | None:
    """Tables of ``model``, whose batch is that of a microbatch. None: an operator cannot be."""
    # blocks repeat: each kind of operator, and of tensor between two kinds, is looked at once
    kinds: dict[tuple[object, ...], Choices] = {}
    nodes = []
    for n in model.nodes:
        key = n.operator.name, n.sizes, n.units, n.flops
        if key not in kinds:
            kinds[key] = choices_of(n, setting, model.precision)
        nodes.append(kinds[key])
    pairs: dict[tuple[int, int, int], EdgeCosts] = {}
    edges = []
    for e in model.edges:
        pair = id(nodes[e.source]), id(nodes[e.target]), e.operand
        if pair not in pairs:
            source = model.nodes[e.source], nodes[e.source]
            target = model.nodes[e.target], nodes[e.target]
            pairs[pair] = edge_costs(source, target, e.operand, setting, model.precision)
        edges.append(pairs[pair])
    if any(not np.isfinite(e.flow).any() for e in pairs.values()):
        return None
    return Tables(model, setting, tuple(nodes), tuple(edges))
