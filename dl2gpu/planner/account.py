"""Bytes and times of a plan by operator: what the tables say of the choices that were made."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dl2gpu.planner.bounds import matmul_words
from dl2gpu.planner.plan import Plan

__all__ = ["Account", "account"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Account:
    """Of each node; bytes are sent by all devices together in a step, seconds are of a device.

    A conversion counts for the operator that it leads to.
    """

    activations: Array
    """Bytes of conversions and inner reductions, forward and backward; Int64."""
    parameters: Array
    """Bytes of gradients and parameters; Int64."""
    messages: Array
    """Bytes between stages; Int64."""
    seconds: Array
    """Of all microbatches: computation, conversions and messages."""
    sync: Array
    """Seconds of gradient communication, before any of it is hidden."""
    bound: Array
    """Bytes below which the product cannot be done; 0: no bound is known. Float64."""

    @property
    def bytes(self) -> Array:
        """All bytes of each node."""
        return np.asarray(self.activations + self.parameters + self.messages)


def account(plan: Plan) -> Account:
    """What each operator of a plan costs."""
    p, chosen = plan.problem, plan.chosen
    t, model = p.tables, p.tables.model
    m, plane = p.microbatches, prod(plan.layout.grid)
    n = len(model.nodes)
    activations, parameters, messages = (np.zeros(n, np.int64) for _ in range(3))
    seconds, sync, bound = np.zeros(n), np.zeros(n), np.zeros(n)
    for i, (node, c) in enumerate(zip(model.nodes, t.nodes, strict=True)):
        k = int(chosen[i])
        activations[i] += m * c.sent[k]
        parameters[i] += c.sync_sent[k]
        seconds[i] += m * p.node[i][0, k]
        sync[i] += c.sync[k]
        if i in p.message:
            messages[i] += m * plane * p.message[i][k]
        if node.operator.name == "matmul":
            sizes = dict(node.sizes)
            divided = prod(
                size for s, size in zip(c.signatures[k], plan.layout.grid, strict=True) if s.splits
            )
            words = matmul_words(
                m * sizes["b"] * sizes["t"], sizes["i"], sizes["o"], divided,
                plan.problem.capacity / model.precision.width,
            )  # fmt: skip
            # forward and backward have the same three tensors to move
            bound[i] = 2 * words * divided * model.precision.width * (plane // divided)
    for e, cost in zip(model.edges, t.edges, strict=True):
        activations[e.target] += m * cost.sent[chosen[e.source], chosen[e.target]]
        seconds[e.target] += m * cost.flow[chosen[e.source], chosen[e.target]]
    return Account(activations, parameters, messages, seconds, sync, bound)
