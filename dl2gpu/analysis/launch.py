"""Launches of the replay: cells (a job under a scenario) on the engine of the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from dl2gpu.analysis import choice_kernel as ck
from dl2gpu.analysis import lockstep_kernel, replay_kernel, rounds_kernel
from dl2gpu.analysis.scenario import Scenario, table_of
from dl2gpu.analysis.tables import ROLE
from dl2gpu.engine.arrays import Array, codes, plain
from dl2gpu.engine.base import Argument, Fresh
from dl2gpu.trace.schema import OP, SEND_MODE

if TYPE_CHECKING:
    from dl2gpu.analysis.replay import Layout, Program

__all__ = ["Batch", "batch_of", "launch", "launch_in_lockstep", "rounds_arguments"]

_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Batch:
    """Cells that run in one launch, and what they need.

    Attributes:
        cells: int32[c, 3] job, row of the table, and which copy of the program's state it works on:
            no two cells of one job have the same copy, but on the CPU, where those of a job lie
            side by side.
        table, width: see :func:`table_of`. layout: the one reading of streams of all scenarios.
        job_lane, job_queue: where the places of each job begin.
        extra: arrays that only some scenarios need, empty where none does.
        record: words of an outcome; 0: none is wanted.
        copies: copies of the state. keep: give the state itself as well.
        ordered: number the steps (on the CPU's work list only).
    """

    cells: Array
    table: Array
    width: int
    layout: Layout
    job_lane: Array
    job_queue: Array
    extra: dict[str, Array]
    record: int = 0
    copies: int = 1
    keep: bool = True
    ordered: bool = False


def batch_of(
    p: Program, lay: Layout, scenarios: Sequence[Scenario], cells: Array, *, record: int = 0,
    copies: int = 1, keep: bool = True, ordered: bool = False,
) -> Batch:  # fmt: skip
    """A batch of cells. All scenarios have one ``reading``, and one ``pool`` where there are pools.

    ``lay`` is what the reading makes of the program.

    Raises:
        ValueError: they differ in it.
    """
    if len({s.reading for s in scenarios}) != 1:
        raise ValueError("scenarios of a batch: expected one reading of streams, found several")
    n_jobs = len(p.job_event) - 1
    job_of_rank = p.matching.prepared.ranks["job"].to_numpy()

    def offsets(of_rank: Array) -> Array:
        return np.searchsorted(job_of_rank[of_rank], np.arange(n_jobs + 1)).astype(np.int32)

    table, width = table_of(scenarios)
    extra = _extra(p, scenarios)
    if not len(extra["eager_at"]):
        table[ck.EAGER_BYTES :: width] = -1  # nothing to look up
    return Batch(
        cells.astype(np.int32), table, width, lay, offsets(lay.lane_rank), offsets(lay.queue_rank),
        extra, record, copies, keep, ordered,
    )  # fmt: skip


def launch(p: Program, batch: Batch) -> dict[str, Array]:
    """Runs the cells on the engine of the program; ``issued`` to ``partner``, and ``outcome``."""
    how = _by_work_list if p.matching.prepared.engine.passes else _in_rounds
    return how(p, batch)


def _by_work_list(p: Program, b: Batch) -> dict[str, Array]:
    """The fixpoints by the compiled work list of :mod:`replay_kernel`."""
    k, lay, x = p.kernel, b.layout, b.extra
    n = len(p.r)
    got = {name: np.zeros(n, np.bool_) for name in ("issued", "started", "completed")}
    got["lane_at"] = np.full(len(lay.lane_first), -1, np.int32)
    got["queue_at"] = np.full(len(lay.queue_first), -1, np.int32)
    got["partner"] = np.full(n, -1, np.int32)
    got["outcome"] = np.zeros(b.record * len(b.cells), np.int64)
    got["order"] = np.zeros(4 * n if b.ordered else 0, np.int32)
    scratch = replay_kernel.scratch(
        n, len(lay.lane_first), len(lay.queue_first), len(lay.unit_first), len(k["node_kind"])
    )
    # how far each mailbox is behind us
    take_at, send_at = k["take_start"][:-1].copy(), k["send_start"][:-1].copy()
    replay_kernel.run(
        b.cells.ravel(), b.table, b.width, b.record,
        *_arguments(p, b), x["pool_of"],
        k["take_start"], k["take_event"], k["take_one"], k["send_start"], k["send_event"],
        p.rank_of, k["peer"], k["tag"], k["recv_peer"], k["recv_tag"],
        *got.values(), k["wait_needs"].copy(), *scratch, take_at, send_at,
        np.zeros(int(x["pool_of"].max(initial=-1)) + 1, np.int64),
        *replay_kernel.stacks(np.unique(b.cells[:, 0]), p.job_event, b.job_lane, b.job_queue),
    )  # fmt: skip
    return got


def _arguments(p: Program, b: Batch) -> tuple[Array, ...]:
    """What both kernels that replay on the CPU take of the program, in their order."""
    k, lay, x = p.kernel, b.layout, b.extra
    return (
        p.job_event, b.job_lane, b.job_queue, k["job_box"],
        lay.lane_of, lay.lane_next, lay.lane_first,
        lay.queue_of, lay.queue_next, lay.queue_first,
        lay.unit_of, lay.unit_first, lay.unit_size,
        k["host_blocks"], k["wait_kind"], k["wait_needs"], k["dep_start"], k["dep_wait"],
        k["node1"], k["node2"], k["role"], x["eager_at"], k["alone"], k["known"],
        k["node_start"], k["node_part"], k["node_kind"], k["node_need"], k["node_blocks"],
        x["channel"], x["sender"],
    )  # fmt: skip


def launch_in_lockstep(
    p: Program, b: Batch, patience: int = lockstep_kernel.PATIENCE
) -> tuple[Array, int]:
    """The outcomes by :mod:`lockstep_kernel`, and in how many steps; cells of a job side by side.

    A cell that it leaves has ``COMPLETED`` of ``lockstep_kernel.LEFT``.
    """
    k = p.kernel
    outcome = np.zeros(b.record * len(b.cells), np.int64)
    steps = lockstep_kernel.run(
        b.cells.ravel(), b.table, b.width, b.record, patience,
        *_arguments(p, b), outcome, np.empty(len(k["node_kind"]), np.int32),
        *lockstep_kernel.scratch(
            np.unique(b.cells[:, 0]), p.job_event, b.job_lane, k["dep_start"]
        ),
    )  # fmt: skip
    return outcome, steps


_MOST_EVENTS: Final = (1 << 29) - 1
"""Parts are numbered in 32 bits, four an event."""


def _in_rounds(p: Program, b: Batch) -> dict[str, Array]:
    """The fixpoints by :mod:`rounds_kernel`, a block a cell.

    Raises:
        OverflowError: more events than its numbers hold.
    """
    n = len(p.r)
    if n > _MOST_EVENTS:
        raise OverflowError(f"replay: expected at most {_MOST_EVENTS} events a shard, found {n}")
    jobs = b.cells[:, 0]
    places = b.job_lane[jobs + 1] - b.job_lane[jobs]
    places = places + b.job_queue[jobs + 1] - b.job_queue[jobs]
    got = p.matching.prepared.engine.launch(
        rounds_kernel.bound,
        rounds_arguments(p, b),
        len(jobs),
        int(places.max(initial=0)),
    )
    return {name.removeprefix("all_"): array for name, array in got.items()}


def rounds_arguments(p: Program, b: Batch) -> dict[str, Argument]:
    """What :func:`rounds_kernel.rounds` takes, by name."""
    lay, c = b.layout, b.copies
    n = len(p.r)
    lanes, queues, units = len(lay.lane_first), len(lay.queue_first), len(lay.unit_first)
    nodes, boxes = len(p.kernel["node_kind"]), len(p.kernel["take_start"]) - 1
    pools = int(b.extra["pool_of"].max(initial=-1)) + 1
    flag, number = np.bool_, np.int32
    return {
        **p.kernel,
        **b.extra,
        "cells": b.cells.ravel(), "table": b.table,
        "sizes": np.array(
            [len(b.cells), b.width, b.record, n, lanes, queues, units, nodes, boxes, pools],
            np.int32,
        ),
        "job_event": p.job_event, "job_lane": b.job_lane, "job_queue": b.job_queue,
        "lane_of": lay.lane_of, "lane_next": lay.lane_next, "lane_first": lay.lane_first,
        "queue_of": lay.queue_of, "queue_next": lay.queue_next, "queue_first": lay.queue_first,
        "unit_of": lay.unit_of, "unit_first": lay.unit_first, "unit_size": lay.unit_size,
        "rank_of": p.rank_of,
        "all_issued": Fresh(c * n, flag, keep=b.keep),
        "all_started": Fresh(c * n, flag, keep=b.keep),
        "all_completed": Fresh(c * n, flag, keep=b.keep),
        "all_lane_at": Fresh(c * lanes, number, -1, keep=b.keep),
        "all_queue_at": Fresh(c * queues, number, -1, keep=b.keep),
        "all_partner": Fresh(c * n, number, -1, keep=b.keep),
        "outcome": Fresh(b.record * len(b.cells), np.int64, keep=True),
        "all_waiting": Fresh(c * (lanes + queues), number),
        "all_ready": Fresh(c * n, flag),
        "all_claimed": Fresh(c * n, number),
        "all_parts_left": Fresh(c * n, number),
        "all_satisfied": Fresh(c * n, number),
        "all_wait_left": Fresh(c * n, number),
        "all_units": Fresh(c * 4 * units, number),
        "all_arrived": Fresh(c * 3 * nodes, number),
        "all_root_in": Fresh(c * 2 * nodes, flag),
        "all_outstanding": Fresh(c * lanes, number),
        "all_forced": Fresh(c * lanes, number, -1),
        "all_take_at": Fresh(c * boxes, number),
        "all_send_at": Fresh(c * boxes, number),
        "all_pool_used": Fresh(c * pools, np.int64),
        "counts": Fresh(rounds_kernel.COUNTERS * len(b.cells), number),
        "all_starts": Fresh(c * 2 * n, number),
        "all_sats": Fresh(c * 4 * n, number),
        "all_comps": Fresh(c * n, number),
        "all_agents": Fresh(c * (lanes + queues), number),
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Buffers


def _extra(p: Program, scenarios: Sequence[Scenario]) -> dict[str, Array]:
    """What buffers need to know of each send and each message; empty where there are none."""
    bounded = any(s.buffer_messages or s.buffer_bytes or s.pool_bytes for s in scenarios)
    none = np.zeros(0, np.int32)
    eager_at = _eager_at(p)
    if not bounded and not any(s.eager_bytes for s in scenarios) and not (eager_at == 0).any():
        eager_at = _NONE
    channel, sender = _channels(p) if bounded else (none, none)
    pools = {s.pool for s in scenarios if s.pool_bytes}
    if len(pools) > 1:
        raise ValueError("scenarios of a batch: expected one kind of pool, found several")
    return {
        "eager_at": eager_at, "channel": channel, "sender": sender,
        "pool_of": _pools(p, *pools) if pools else none,
    }  # fmt: skip


def _eager_at(p: Program) -> Array:
    """int64[n]: from which eager threshold on each send needs no receiver (rule 5).

    0: always (a buffered send); -1: never (a synchronous one); empty where there are no sends.
    """
    if "eager_at" not in p.made:
        e = p.matching.events
        if not (e["op"] <= OP["sendrecv"]).any():
            p.made["eager_at"] = _NONE
            return _NONE
        size = codes(e["bytes"])
        mode = codes(e["send_mode"], SEND_MODE["standard"])
        at = np.where(size < 0, Scenario.INFINITE, np.maximum(size, 1))
        at[mode == SEND_MODE["buffered"]] = 0
        at[mode == SEND_MODE["synchronous"]] = -1
        p.made["eager_at"] = at
    return p.made["eager_at"]


def _channels(p: Program) -> tuple[Array, Array]:
    """int32[nodes] each: the first message of each message's channel, and its send (-1: none).

    Messages of a channel are numbered one after the other, in order.
    """
    if "channel" not in p.made:
        nodes = p.matching.nodes
        n = nodes.height
        message = codes(nodes["kind"]) == replay_kernel.MESSAGE
        new = np.ones(n, np.bool_)
        if n:
            new[1:] = np.diff(codes(nodes["k"])) != 1
            for name in ("job", "comm", "src", "dst"):
                new[1:] |= np.diff(codes(nodes[name])) != 0
        first = np.maximum.accumulate(np.where(new, np.arange(n), 0)) if n else np.arange(0)
        p.made["channel"] = np.where(message, first, -1).astype(np.int32)
        sender = np.full(n, -1, np.int32)
        sends = np.flatnonzero((p.kernel["role"] == ROLE["send"]) & (p.kernel["node1"] >= 0))
        sender[p.kernel["node1"][sends]] = sends
        p.made["sender"] = sender
    return p.made["channel"], p.made["sender"]


def _pools(p: Program, whose: str) -> Array:
    """int32[n]: a number for the pool of each send, -1 for other events."""
    name = f"pool of the {whose}"
    if name not in p.made:
        send = (p.kernel["role"] == ROLE["send"]) & ~p.kernel["alone"]
        job = plain(p.matching.events["job"]).astype(np.int64) << 32
        if whose == "sender":
            job = job | p.rank_of
        elif whose == "receiver":
            job = job | codes(p.matching.events["peer"], 0)
        elif whose != "job":
            raise ValueError(f"pool: expected sender, receiver or job, found {whose!r}")
        out = np.full(len(send), -1, np.int32)
        out[send] = np.unique(job[send], return_inverse=True)[1]
        p.made[name] = out
    return p.made[name]
