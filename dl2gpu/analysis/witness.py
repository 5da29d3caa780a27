"""A schedule for every claim: the steps that lead a job to where it stops.

The replay numbers its steps: each is one operation issued, started or completed, and each follows
from those before it by a rule of DESIGN.md section 4. That order of steps is the witness.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from dl2gpu.analysis.launch import batch_of, launch
from dl2gpu.analysis.names import Names
from dl2gpu.analysis.replay import Fixpoint, Program, layout
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.analysis.waitfor import Graph, build_graph, stands_at
from dl2gpu.engine.arrays import Array
from dl2gpu.engine.cpu import CPU
from dl2gpu.trace.schema import ANY, EXIT, STATE, Trace

__all__ = ["Schedule", "Standing", "Step", "schedule", "standing", "steps", "trace_of"]


class Step(NamedTuple):
    """One step: what becomes of an event (a row of the program). ``row``: when, see ``steps``."""

    number: int
    row: int
    rank: int
    event: int
    what: str
    """issued, started or completed; ``done``: started and completed, with nothing between."""


@dataclass(frozen=True)
class Schedule:
    """The steps of a program of one job, and where it stands in the end.

    ``order`` int32[4, n]: the number of the step in which each event was issued, started and
    completed, and in which it took a message from a mailbox (a receive) or room in a pool (a
    send), from 1; 0: it was not, or did not.
    """

    program: Program
    fix: Fixpoint
    order: Array

    @property
    def deadlocked(self) -> bool:
        """Does some host or device queue not come to its end?"""
        return bool((self.fix.lane_at >= 0).any() or (self.fix.queue_at >= 0).any())


def schedule(p: Program, scenario: Scenario) -> Schedule:
    """The steps of a program of one job under a scenario, on the CPU."""
    if len(p.job_event) != 2:
        raise ValueError(f"schedule: expected a program of one job, found {len(p.job_event) - 1}")
    if not p.matching.prepared.engine.passes:
        m = p.matching
        p = replace(p, matching=replace(m, prepared=replace(m.prepared, engine=CPU)))
    lay = layout(p, scenario)
    batch = batch_of(p, lay, [scenario], np.zeros((1, 3), np.int32), ordered=True)
    got = launch(p, batch)
    fix = Fixpoint(
        scenario, got["issued"], got["started"], got["completed"], got["lane_at"],
        got["queue_at"], got["partner"], lay,
    )  # fmt: skip
    return Schedule(p, fix, got["order"].reshape(4, -1))


def steps(s: Schedule) -> list[Step]:
    """The steps in order, with rows for a picture: columns are ranks, and time runs downwards.

    A step stands below the step of its rank before it, and below what it needed of other ranks.
    """
    p, k = s.program, s.program.kernel
    _, started, completed, _ = s.order
    rank = p.rank_of
    raw = [(int(n), int(e), "started") for e, n in enumerate(started) if n]
    raw += [(int(n), int(e), "completed") for e, n in enumerate(completed) if n]
    raw.sort()
    below: dict[int, int] = {}
    row_of: dict[int, int] = {}
    out: list[Step] = []
    last: dict[int, int] = {}
    for number, e, what in raw:
        r = int(rank[e])
        row = below.get(r, 0)
        if what == "completed":
            others: list[int] = []
            for name in ("node1", "node2"):
                v = int(k[name][e])
                if v >= 0:
                    parts = k["node_part"][k["node_start"][v] : k["node_start"][v + 1]] >> 1
                    others += parts.tolist()
            if s.fix.partner[e] >= 0:
                others.append(int(s.fix.partner[e]))
            row = max([row, *(row_of[o] for o in others if 0 < started[o] < number)])
            at = last.get(r)
            if at is not None and out[at].event == e and out[at].what == "started":
                # nothing in between: one step of the picture
                row = max(out[at].row, row - 1 if row > out[at].row + 1 else out[at].row)
                out[at] = Step(number, row, r, e, "done")
                below[r] = row + 1
                row_of[e] = row
                continue
        out.append(Step(number, row, r, e, what))
        last[r] = len(out) - 1
        below[r] = row + 1
        row_of[e] = row
    return sorted(out, key=lambda step: (step.row, step.rank, step.number))


@dataclass(frozen=True)
class Standing:
    """A place that does not come to its end. ``disagrees``: participants differ in signature."""

    rank: int
    place: str
    operation: dict[str, Any]
    waits_for: tuple[int, ...]
    disagrees: bool = False


def standing(s: Schedule) -> list[Standing]:
    """Where each rank stands in the end, and for which ranks it waits."""
    names = Names(s.program.matching)
    g = build_graph(s.program, s.fix)
    lay = s.fix.layout
    ranks = s.program.matching.prepared.ranks["rank"].to_numpy()
    out = []
    for v in _places(s.fix, g):
        e = stands_at(g, v)
        on_host = v < g.queue0
        row = int((lay.lane_rank if on_host else lay.queue_rank)[v - (0 if on_host else g.queue0)])
        name = "host" if on_host else "stream"
        if not on_host and s.program.stream[e] >= 0:
            name = f"stream {names.text(int(s.program.stream[e]))}"
        out.append(Standing(int(ranks[row]), name, names.operation(e), _waits_for(s, g, v, ranks)))
    return sorted(out, key=lambda p: (p.rank, p.place))


def _places(fix: Fixpoint, g: Graph) -> Iterator[int]:
    yield from np.flatnonzero(fix.lane_at >= 0).tolist()
    head = fix.queue_at
    yield from (g.queue0 + np.flatnonzero((head >= 0) & fix.issued[np.maximum(head, 0)])).tolist()


def _waits_for(s: Schedule, g: Graph, place: int, ranks: Array) -> tuple[int, ...]:
    lay = s.fix.layout
    direct = g.dst[g.src == place]
    nodes = direct[(direct >= g.node0) & (direct < g.rank0)]
    targets = np.concatenate([direct, g.dst[np.isin(g.src, nodes)]])
    rows: set[int] = set()
    for v in targets.tolist():
        if v < g.queue0:
            rows.add(int(lay.lane_rank[v]))
        elif v < g.node0:
            rows.add(int(lay.queue_rank[v - g.queue0]))
        elif v >= g.rank0:
            rows.add(v - g.rank0)
    node = (nodes - g.node0).tolist()
    absent = g.absent.filter(pl.col("node").is_in(node))["rank"].to_list()
    return tuple(sorted({int(ranks[r]) for r in rows} | set(absent)))


def trace_of(s: Schedule) -> Trace:
    """What a recorder would have written of this schedule: what was issued, with states and times.

    Times are the numbers of the steps, in microseconds.
    """
    trace = s.program.matching.prepared.trace
    issued, started, completed, _ = s.order.astype(np.int64) * 1000
    state = np.where(
        completed > 0,
        STATE["completed"],
        np.where(started > 0, STATE["started"], STATE["scheduled"]),
    )
    e = s.program.matching.events
    sender = np.where(s.fix.partner >= 0, s.program.rank_of[s.fix.partner], -1)
    known = pl.DataFrame(
        {
            "job": e["job"], "rank": e["rank"], "lane": e["lane"], "seq": e["seq"],
            "_state": state, "_created": issued, "_started": started, "_completed": completed,
            "_from": sender,
        }
    )  # fmt: skip
    wild = (pl.col("peer") == ANY).fill_null(False) & (pl.col("_from") >= 0)
    columns = trace.events.columns

    def shown(name: str) -> pl.Expr:
        return pl.when(pl.col(name) > 0).then(pl.col(name))

    events = (
        trace.events.join(known, on=["job", "rank", "lane", "seq"], how="left")
        .filter(pl.col("_created") > 0)
        .with_columns(
            state=pl.col("_state").cast(pl.UInt8),
            t_created=shown("_created"),
            t_started=shown("_started"),
            t_completed=shown("_completed"),
            matched_peer=pl.when(wild)
            .then(pl.col("_from").cast(pl.Int32))
            .otherwise("matched_peer"),
        )
        .select(columns)
    )
    stands = s.program.matching.prepared.ranks["rank"].gather(
        np.unique(s.fix.layout.lane_rank[s.fix.lane_at >= 0])
    )
    ranks = trace.ranks.with_columns(
        exit=pl.when(pl.col("rank").is_in(stands.implode()))
        .then(pl.lit(EXIT["alive"], pl.UInt8))
        .otherwise("exit")
    )
    return replace(trace, events=events, ranks=ranks)
