"""What the devices of a job had completed: the states that a Flight Recorder dump shows.

A small replay of its own, for the programs of this package only: it shares nothing with the
analysis that the labels are to test. Each round looks at the heads of all queues at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dl2gpu.suites.program import DATA, NONE, PIPELINE, TENSOR, WORLD, Program, Shape
from dl2gpu.trace.schema import OP

__all__ = ["completed"]

Array = npt.NDArray[Any]


def completed(shape: Shape, p: Program) -> Array:
    """bool[n]: which operations of ``p`` are complete when nothing moves any more.

    All steps but the last one are: the host waits at the end of each.
    """
    out = p.step < shape.steps - 1
    now = np.flatnonzero(~out)
    out[now] = _last_step(shape, p, now)
    return out


def _last_step(shape: Shape, p: Program, rows: Array) -> Array:
    stream = p.columns["stream"][rows]
    kind, batch, rank = p.columns["kind"][rows], p.columns["batch"][rows], p.rank[rows]
    waits_for = p.columns["waits_for"][rows]
    n = len(rows)
    node, need = _nodes(shape, p, rows)
    wait = kind == NONE
    begins = np.searchsorted(rank, np.arange(shape.ranks + 1))  # of each rank's operations
    # units: a batch, or one operation, in the order of its queue
    queue = rank.astype(np.int64) * 4 + stream + 1
    order = np.argsort(queue, kind="stable")
    b, q = batch[order], queue[order]
    head = np.ones(n, np.bool_)
    head[1:] = (q[1:] != q[:-1]) | (b[1:] != b[:-1]) | (b[1:] < 0)
    unit = np.empty(n, np.int64)
    unit[order] = np.cumsum(head) - 1
    units = int(head.sum())
    unit_queue = q[head]
    last = np.append(unit_queue[1:] != unit_queue[:-1], True)
    at = np.flatnonzero(np.append(True, unit_queue[1:] != unit_queue[:-1]))  # heads of queues
    size = np.bincount(unit, minlength=units)
    is_head = np.zeros(units, np.bool_)
    is_head[at] = True
    done = np.zeros(n, np.bool_)
    place = np.arange(n)
    while True:
        standing = np.flatnonzero(is_head[unit] & ~done)
        open_before = np.append(0, np.cumsum(~done))
        waiting = standing[wait[standing]]
        named = waits_for[waiting] > 0
        free = np.where(
            named,
            done[place[waiting] - waits_for[waiting]],
            open_before[waiting] == open_before[begins[rank[waiting]]],
        )
        ours = standing[~wait[standing]]
        there = np.bincount(node[ours], minlength=len(need))
        met = ours[there[node[ours]] == need[node[ours]]]
        finished = np.concatenate([waiting[free], met])
        ready = np.bincount(unit[finished], minlength=units) == size
        ready &= is_head
        if not ready.any():
            return done
        done |= ready[unit]
        is_head[ready] = False
        after = np.flatnonzero(ready & ~last) + 1
        is_head[after] = True


def _nodes(shape: Shape, p: Program, rows: Array) -> tuple[Array, Array]:
    """The collective or message that each operation takes part in, and how many parts each needs.

    A collective of which the parts disagree needs more than there are.
    """
    op, comm, rank = p.columns["op"][rows], p.columns["comm"][rows].astype(np.int64), p.rank[rows]
    kind, peer = p.columns["kind"][rows], p.columns["peer"][rows].astype(np.int64)
    message = kind == PIPELINE
    sends = op == OP["send"]
    source, target = np.where(sends, rank, peer), np.where(sends, peer, rank)
    channel = np.where(message, source * shape.ranks + target, -1)
    key = (comm + 1) * (shape.ranks * shape.ranks + 1) + channel + 1
    # the k-th of a rank on its channel, or on its communicator
    own = (key * shape.ranks + rank) * 2 + sends
    order = np.argsort(own, kind="stable")
    fresh = np.append(True, own[order][1:] != own[order][:-1])
    start = np.maximum.accumulate(np.where(fresh, np.arange(len(own)), 0))
    k = np.empty(len(own), np.int64)
    k[order] = np.arange(len(own)) - start
    _, node = np.unique(np.stack([key, k]), axis=1, return_inverse=True)
    node = node.ravel()
    sizes = np.zeros(5, np.int64)
    sizes[[TENSOR, DATA, WORLD, PIPELINE, NONE]] = shape.tensor, shape.data, shape.ranks, 2, 0
    need = np.zeros(int(node.max()) + 1, np.int64)
    need[node] = sizes[kind]
    count = p.columns["count"][rows] * 64 + op
    low, high = np.full(len(need), np.iinfo(np.int64).max), np.zeros(len(need), np.int64)
    np.minimum.at(low, node, np.where(message, 0, count))
    np.maximum.at(high, node, np.where(message, 0, count))
    need[low != high] += 1
    return node, need
