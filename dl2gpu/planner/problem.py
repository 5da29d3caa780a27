"""The time of a step: what a search minimises, on one grid and one cut into stages.

With S stages, m microbatches, v pieces of the model a stage and a_s the seconds that stage s spends
on one microbatch, forward and backward, a step takes

    T = (m - 1/v) max a_s + (sum a_s) / v + max_s max(0, g_s - overlap b_s)

The first two terms are the pipeline with its bubble, (S - 1) / (v m) of the work for equal stages
(Narayanan et al., SC 2021, sections 2.2.1 and 2.2.2; Huang et al., "GPipe", NeurIPS 2019). g_s is
the gradient communication of a step, which hides behind a share of the backward computation b_s of
the last microbatch, of all microbatches for ZeRO 3, whose all_gathers are spread over the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dl2gpu.planner.costs import Tables
from dl2gpu.planner.links import Link

__all__ = ["Problem", "in_flight", "stages_of", "total"]

Array = npt.NDArray[Any]

FLOW, SYNC, BACK, STATIC, KEPT, ENTRY = range(6)
"""Rows of the sums of a stage."""
TOO_LARGE: Final = 1e4
"""Seconds a step for each time that the memory is exceeded: any fitting scheme is better."""


def in_flight(stages: int, microbatches: int, pieces: int, schedule: str) -> Array:
    """Microbatches whose activations each stage holds at most; Float64, in microbatches.

    GPipe holds all; 1F1B as many as there are stages from here on; interleaved as many pieces as
    its warm-up and one more (Narayanan et al., SC 2021, section 2.2).
    """
    after = np.arange(stages)[::-1]
    if schedule == "gpipe":
        return np.full(stages, float(microbatches))
    if pieces > 1:
        warm = 2 * after + (pieces - 1) * stages + 1
        return np.asarray(np.minimum(warm, microbatches * pieces) / pieces)
    return np.asarray(np.minimum(after + 1.0, microbatches))


def stages_of(work: Array, cuts: list[int], pieces: int) -> Array | None:
    """The piece of each node: contiguous, cut at ``cuts`` only, with the least heaviest piece.

    Args:
        work: seconds of each node.
        cuts: nodes before which a cut may be, increasing.
        pieces: how many.

    Returns:
        Int32, or None where there are too few cuts.
    """
    if pieces - 1 > len(cuts):
        return None
    ends = np.array([0, *cuts, len(work)])
    upto = np.append(0.0, np.cumsum(work))[ends]
    n = len(ends) - 1
    best = upto.copy()  # of the first i segments in one piece
    best[0] = np.inf
    came = []
    for _ in range(pieces - 1):
        heavier = np.maximum(best[:, None], upto[None, :] - upto[:, None])
        heavier[np.arange(n + 1)[:, None] >= np.arange(n + 1)[None, :]] = np.inf
        came.append(heavier.argmin(0))
        best = heavier.min(0)
    out = np.zeros(len(work), np.int32)
    at = n
    for piece in range(pieces - 1, 0, -1):
        start = int(came[piece - 1][at])
        out[ends[start] :] += 1
        at = start
    return out


def total(sums: Array, p: Problem) -> Array:
    """Seconds a step for sums of each stage: array[6, stages, ...] to array[...]."""
    flow = sums[FLOW]
    v, m = p.pieces, p.microbatches
    t = (m - 1 / v) * flow.max(0) + flow.sum(0) / v
    late = sums[SYNC] - p.hides * sums[BACK]
    t = t + np.maximum(late, 0).max(0)
    return np.asarray(t + TOO_LARGE * np.maximum(memory(sums, p) / p.capacity - 1, 0).max(0))


def memory(sums: Array, p: Problem) -> Array:
    """Bytes of a device of each stage: array[6, stages, ...] to array[stages, ...].

    Where activations are computed again, the operand that enters a block is kept, and one block of
    average size is held while its backward runs.
    """
    shape = (-1,) + (1,) * (sums.ndim - 2)
    flight = p.flight.reshape(shape)
    if p.tables.setting.recompute:
        block = sums[KEPT] / p.blocks.reshape(shape)
        return np.asarray(sums[STATIC] + flight * sums[ENTRY] + block)
    return np.asarray(sums[STATIC] + flight * sums[KEPT])


@dataclass(eq=False)
class Problem:
    """Tables, the cut into stages, and what each choice adds to the sums of a stage."""

    tables: Tables
    piece: Array
    """Of each node."""
    stages: int
    microbatches: int
    pieces: int
    schedule: str
    hop: Link
    """Between stages."""
    capacity: float
    """Bytes of a device."""
    stage: Array = field(init=False)
    flight: Array = field(init=False)
    blocks: Array = field(init=False)
    hides: float = field(init=False)
    node: list[Array] = field(init=False)
    """[6, choices] of each node, with the message to the next stage."""
    edge: list[tuple[int, int, Array]] = field(init=False)
    """(source, target, [choices, choices] seconds); several tensors of a pair are summed."""
    touching: list[list[int]] = field(init=False)
    """Rows of ``edge`` for each node."""
    message: dict[int, Array] = field(init=False)
    """Bytes a microbatch and device, of nodes whose result goes to another stage."""

    def __post_init__(self) -> None:
        t, model = self.tables, self.tables.model
        self.stage = self.piece % self.stages
        self.flight = in_flight(self.stages, self.microbatches, self.pieces, self.schedule)
        number = np.array([n.block for n in model.nodes])
        self.blocks = np.array(
            [max(len(np.unique(number[self.stage == s])), 1) for s in range(self.stages)], float
        )
        share = t.setting.cluster.overlap
        self.hides = share * (self.microbatches if t.setting.zero == 3 else 1)
        leaves = {e.source for e in model.edges if self.piece[e.source] != self.piece[e.target]}
        self.message = {n: t.message(n) for n in sorted(leaves)} if self.stages > 1 else {}
        first = np.append(True, number[1:] != number[:-1])
        self.node = []
        same: dict[tuple[int, bool], Array] = {}
        for i, c in enumerate(t.nodes):
            kind = id(c), bool(first[i])
            if i not in self.message and kind in same:
                self.node.append(same[kind])
                continue
            flow = c.flow
            if i in self.message:
                flow = flow + 2 * self.hop.alpha + self.message[i] * self.hop.beta
            entry = c.kept if first[i] else np.zeros(len(flow))
            self.node.append(np.stack([flow, c.sync, c.back, c.static, c.kept, entry]))
            if i not in self.message:
                same[kind] = self.node[-1]
        pairs: dict[tuple[int, int], Array] = {}
        for e, cost in zip(model.edges, t.edges, strict=True):
            key = e.source, e.target
            pairs[key] = pairs[key] + cost.flow if key in pairs else cost.flow
        self.edge = [(u, v, m) for (u, v), m in pairs.items()]
        self.touching = [[] for _ in model.nodes]
        for k, (u, v, _) in enumerate(self.edge):
            self.touching[u].append(k)
            self.touching[v].append(k)

    def sums(self, chosen: Array) -> Array:
        """[6, stages] of a whole choice."""
        out = np.zeros((6, self.stages))
        for i, c in enumerate(chosen):
            out[:, self.stage[i]] += self.node[i][:, c]
        for u, v, m in self.edge:
            out[FLOW, self.stage[v]] += m[chosen[u], chosen[v]]
        return out

    def seconds(self, chosen: Array) -> float:
        """Seconds of a step, and :data:`TOO_LARGE` for memory that is not there."""
        return float(total(self.sums(chosen), self))
