"""How many jobs end under many scenarios: cells in batches, on whatever engine, in bounded memory.

A cell is a job under a scenario. On the CPU scenarios of a job are replayed in lock step, 64 at a
time (:mod:`lockstep_kernel`), and what that leaves one by one, each with the state of the one
before it, made new: a thread needs memory for its jobs once, however many scenarios there are. On a
GPU so many copies of the state are made as fit a budget, and a block takes a cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from dl2gpu.analysis import choice_kernel as ck
from dl2gpu.analysis.launch import Batch, batch_of, launch, launch_in_lockstep
from dl2gpu.analysis.lockstep_kernel import LEFT, SCENARIOS
from dl2gpu.analysis.replay import Program, layout
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.engine.arrays import Array
from dl2gpu.engine.cores import cores

__all__ = ["Outcomes", "outcomes"]

STATE_BYTES: Final = 1 << 30
"""Memory of a GPU that copies of the state may take."""

_BYTES_AN_EVENT: Final = 80
_LEAST_EVENTS: Final = 200_000
"""Events of all cells that make a thread worth its while."""

_LEAST_SCENARIOS: Final = 4
"""Cells of a job from which on lock step is faster, however little they have in common."""

_MOST_EVENTS: Final = 1 << 22
"""Events of a job that is replayed in lock step: each takes some 170 bytes."""


@dataclass(frozen=True)
class Outcomes:
    """What came of each cell; int64[cells], and int64[cells, trail] of its first choices.

    Attributes:
        completed: events that completed. standing: places (hosts and device queues) that did not
            come to their end: the job is deadlocked if there are any. digest: a hash of where they
            stand. choices: how often there was more than one way. state: a hash of what was chosen,
            whatever the order.
        ways, taken, before: of each choice how many ways there were (0: no such choice), which was
            taken, and the ``state`` before it.
    """

    completed: Array
    standing: Array
    digest: Array
    choices: Array
    state: Array
    ways: Array
    taken: Array
    before: Array


def outcomes(p: Program, scenarios: Sequence[Scenario], cells: Array, trail: int = 0) -> Outcomes:
    """The outcome of each cell.

    Args:
        p: the program, with the engine it runs on.
        scenarios: rows that the cells name.
        cells: int[c, 2] job and row of each.
        trail: of so many choices of each cell it is said what there was to choose from.

    The same whatever the engine, the number of threads and the order of the cells.
    """
    record = ck.OUTCOMES + 2 * trail
    out = np.zeros((len(cells), record), np.int64)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for row, s in enumerate(scenarios):
        kinds.setdefault((*s.reading, s.pool if s.pool_bytes else ""), []).append(row)
    for rows in kinds.values():
        mine = np.flatnonzero(np.isin(cells[:, 1], rows))
        if not len(mine):
            continue
        number = np.zeros(len(scenarios), np.int32)
        number[rows] = np.arange(len(rows))
        # cells of one job lie side by side
        mine = mine[np.argsort(cells[mine, 0], kind="stable")]
        batch = np.zeros((len(mine), 3), np.int32)
        batch[:, 0], batch[:, 1] = cells[mine, 0], number[cells[mine, 1]]
        some = [scenarios[row] for row in rows]
        made = batch_of(p, layout(p, some[0]), some, batch, record=record, keep=False)
        run = _by_threads if p.matching.prepared.engine.passes else _by_copies
        out[mine] = run(p, made).reshape(len(mine), record)
    pairs = out[:, ck.OUTCOMES :].reshape(len(out), trail, 2)
    return Outcomes(
        out[:, ck.COMPLETED], out[:, ck.STANDING], out[:, ck.DIGEST], out[:, ck.CHOICES],
        out[:, ck.STATE], pairs[:, :, 0] & ck.MASK, pairs[:, :, 0] >> 31, pairs[:, :, 1],
    )  # fmt: skip


def _by_threads(p: Program, batch: Batch) -> Array:
    """The outcomes, by threads with a state each; they share nothing that is written."""
    jobs = batch.cells[:, 0]
    size = (p.job_event[jobs + 1] - p.job_event[jobs]).astype(np.int64)
    new = np.flatnonzero(np.diff(jobs, prepend=-1))  # cells of one job lie side by side
    many = np.diff(new, append=len(jobs))
    nth = np.arange(len(jobs)) - np.repeat(new, many)
    box = p.kernel["job_box"]
    together = (np.repeat(many, many) >= _LEAST_SCENARIOS) & (size <= _MOST_EVENTS)
    together &= box[jobs] == box[jobs + 1]  # wildcards are for one after the other
    out = np.zeros((len(jobs), batch.record), np.int64)
    out[:, ck.COMPLETED] = LEFT
    if together.any():
        some = replace(batch, cells=batch.cells[together])
        groups = np.flatnonzero(nth[together] % SCENARIOS == 0)
        done = _divided(size[together][groups], groups, some, lambda b: launch_in_lockstep(p, b)[0])
        out[together] = done.reshape(-1, batch.record)
    alone = out[:, ck.COMPLETED] == LEFT
    if alone.any():
        some = replace(batch, cells=batch.cells[alone])
        done = _divided(
            size[alone], np.arange(alone.sum()), some, lambda b: launch(p, b)["outcome"]
        )
        out[alone] = done.reshape(-1, batch.record)
    return out.ravel()


def _divided(
    cost: Array, begins: Array, batch: Batch, run: Callable[[Batch], Array]
) -> Array:  # fmt: skip
    """What ``run`` makes of a batch, divided among threads.

    ``cost`` of the parts that stay whole, in events, and ``begins``: the first cell of each.
    """
    threads = int(min(cores(), max(cost.sum() // _LEAST_EVENTS, 1), len(cost)))
    if threads <= 1:
        return run(batch)
    done = np.cumsum(cost)
    cuts = np.searchsorted(done, np.linspace(0, done[-1], threads + 1)[1:-1]) + 1
    at = begins[np.unique(cuts[cuts < len(begins)])]
    parts = [replace(batch, cells=c) for c in np.split(batch.cells, at)]
    with ThreadPoolExecutor(len(parts), thread_name_prefix="replay") as pool:
        return np.concatenate(list(pool.map(run, parts)))


def _by_copies(p: Program, batch: Batch) -> Array:
    """The outcomes, by launches that hold so many copies of the state as the budget allows."""
    jobs = batch.cells[:, 0]
    begin = np.concatenate([[True], jobs[1:] != jobs[:-1]])[: len(jobs)]
    place = np.arange(len(jobs))
    nth = place - np.maximum.accumulate(np.where(begin, place, 0))
    copies = max(1, STATE_BYTES // (_BYTES_AN_EVENT * max(len(p.r), 1)))
    out = np.zeros((len(jobs), batch.record), np.int64)
    for first in range(0, int(nth.max(initial=-1)) + 1, copies):
        mine = np.flatnonzero((nth >= first) & (nth < first + copies))
        cells = batch.cells[mine].copy()
        cells[:, 2] = nth[mine] - first
        part = replace(batch, cells=cells, copies=int(cells[:, 2].max()) + 1)
        out[mine] = launch(p, part)["outcome"].reshape(len(mine), batch.record)
    return out.ravel()
