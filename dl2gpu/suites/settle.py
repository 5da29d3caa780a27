"""How far the programs of a job come: what is issued, and what is complete, when nothing moves.

A small replay of its own, for whole programs of NCCL jobs: it shares nothing with the analysis that
the labels are to test. Each round looks at the heads of all queues at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.trace.schema import OP, Trace

__all__ = ["Settled", "settle"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Settled:
    """bool[n] each, by the rows of the events in the order of ranks and ``seq``."""

    issued: Array
    """The host has come to it."""
    started: Array
    """It stood at the head of its queue."""
    done: Array


def settle(trace: Trace) -> Settled:
    """Replays one job: queues in order, batches as a whole, no buffers.

    Host operations are waits for everything before them; a wait on a stream is for one operation.
    """
    events = trace.events.sort("rank", "seq")
    n = events.height
    rank = events["rank"].to_numpy()
    stream = events["stream"].fill_null(-1).to_numpy().astype(np.int64)
    batch = events["group"].fill_null(-1).to_numpy()
    wait = events["op"].to_numpy() == OP["wait"]
    host = stream < 0
    node, need = _nodes(events, trace)
    awaited = _awaited(events)
    # units, in the order of their queues
    queue = rank.astype(np.int64) * (int(stream.max()) + 2) + stream + 1
    order = np.argsort(queue, kind="stable")
    q, b = queue[order], batch[order]
    fresh = np.append(True, (q[1:] != q[:-1]) | (b[1:] != b[:-1]) | (b[1:] < 0))
    first = np.flatnonzero(fresh)  # of each unit, in ``order``
    ends = np.append(first[1:], n)
    unit_queue = q[first]
    opens = np.flatnonzero(np.append(True, unit_queue[1:] != unit_queue[:-1]))
    last = np.append(opens[1:], len(first))
    head = opens.copy()
    begins = np.searchsorted(rank, np.arange(int(rank[-1]) + 2))
    stops = np.flatnonzero(host)
    limit = _limits(rank, stops, begins)
    issued_to = limit[0].copy()  # of each rank: the row after the last that is issued
    left = np.diff(begins)  # what is not complete
    queue_rank = rank[order[first[opens]]]
    arrived = np.zeros(len(need), np.int64)
    counted = np.zeros(len(first), np.bool_)
    started = np.zeros(n, np.bool_)
    done = np.zeros(n, np.bool_)
    at = np.zeros(len(begins) - 1, np.int64)  # which stop of a rank comes next
    open_queues = np.arange(len(opens))
    while True:
        standing = open_queues[order[first[head[open_queues]]] < issued_to[queue_rank[open_queues]]]
        units = head[standing]
        size = ends[units] - first[units]
        rows = order[np.repeat(first[units], size) + _within(size)]
        new = np.repeat(~counted[units], size)
        np.add.at(arrived, node[rows[new]], 1)
        counted[units] = True
        started[rows] = True
        waits = wait[rows]
        ready = np.where(
            waits,
            np.where(
                host[rows], left[rank[rows]] == _remaining(rows, begins, rank),
                (awaited[rows] < 0) | done[awaited[rows]],
            ),
            arrived[node[rows]] == need[node[rows]],
        )  # fmt: skip
        whole = (
            np.logical_and.reduceat(ready, np.append(0, np.cumsum(size)[:-1]))
            if len(size)
            else np.zeros(0, np.bool_)
        )
        if not whole.any():
            issued = np.arange(n) < issued_to[rank]
            return Settled(issued, started & issued, done)
        finished = rows[np.repeat(whole, size)]
        done[finished] = True
        np.subtract.at(left, rank[finished], 1)
        passed = finished[host[finished]]
        at[rank[passed]] += 1
        issued_to[rank[passed]] = limit[at[rank[passed]], rank[passed]]
        moved = standing[whole]
        head[moved] += 1
        open_queues = np.flatnonzero(head < last)


def _within(size: Array) -> Array:
    """0, 1, ... within each run of so many."""
    total = np.append(0, np.cumsum(size))
    return np.asarray(np.arange(int(total[-1])) - np.repeat(total[:-1], size))


def _remaining(rows: Array, begins: Array, rank: Array) -> Array:
    """Operations of the rank from each row on, it included: what may be left when it is passed."""
    return np.asarray(begins[rank[rows] + 1] - rows)


def _limits(rank: Array, stops: Array, begins: Array) -> Array:
    """Int64[stops + 1, ranks]: after so many stops of a rank, the row up to which it issues."""
    of = rank[stops]
    which = np.arange(len(stops)) - np.searchsorted(of, of)
    many = int(which.max()) + 1 if len(stops) else 0
    out = np.tile(begins[1:], (many + 2, 1)).astype(np.int64)
    out[which, of] = stops + 1
    return out


def _awaited(events: pl.DataFrame) -> Array:
    """Row of the operation that a wait on a stream is for; -1: none."""
    rows = events.select(
        "rank", "request", row=pl.int_range(pl.len()), awaited=pl.col("requests").list.first()
    )
    made = rows.filter(pl.col("request").is_not_null()).select("rank", "request", target="row")
    found = rows.join(
        made, left_on=["rank", "awaited"], right_on=["rank", "request"], how="left",
        maintain_order="left",
    )  # fmt: skip
    return found["target"].fill_null(-1).to_numpy()


def _nodes(events: pl.DataFrame, trace: Trace) -> tuple[Array, Array]:
    """The collective or message that each row takes part in, and how many parts each needs.

    A collective of which the parts disagree needs more than there are.
    """
    send = pl.col("op") == OP["send"]
    message = send | (pl.col("op") == OP["recv"])
    sizes = trace.comms.select("comm", size=pl.col("ranks").list.len().cast(pl.Int64))
    rows = (
        events.select(
            "rank", "op", "comm", "count", row=pl.int_range(pl.len(), dtype=pl.Int64),
            source=pl.when(send).then("rank").when(message).then("peer").otherwise(-1),
            target=pl.when(send).then("peer").when(message).then("rank").otherwise(-1),
            message=message,
        )
        .filter(pl.col("comm").is_not_null())
        .with_columns(k=pl.int_range(pl.len()).over("comm", "source", "target", "rank"))
        .join(sizes, on="comm", how="left", maintain_order="left")
    )  # fmt: skip
    keyed = rows.with_columns(
        node=pl.struct("comm", "source", "target", "k").rank("dense").cast(pl.Int64)
    )
    told = keyed.group_by("node").agg(
        alike=pl.col("message").first()
        | ((pl.col("op").n_unique() == 1) & (pl.col("count").n_unique() == 1)),
        need=pl.when(pl.col("message").first()).then(2).otherwise(pl.col("size").first()),
    )
    need = np.zeros(keyed.height + 1, np.int64)
    need[told["node"].to_numpy()] = (
        told.select(pl.col("need") + (~pl.col("alike")).cast(pl.Int64)).to_series().to_numpy()
    )
    node = np.zeros(events.height, np.int64)
    node[keyed["row"].to_numpy()] = keyed["node"].to_numpy()
    return node, need
