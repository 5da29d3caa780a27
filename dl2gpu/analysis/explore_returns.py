"""What waits for any or some may return: every way there is, or a sample of them.

A wait that is left open stands until nothing else moves; then each of those that stand with
complete requests may return any of these. Which of them goes first is a way as well: what it lets
come may be what another returns. A state is what was returned so far, whatever the order, so each
is looked at once. A state is a copy of the job in which the waits have returned that; all that are
to be looked at are matched and replayed together, on any engine.

Of a sample each run takes every way with the same chance, and Wilson's interval is given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Final, TypeAlias

import numpy as np
import polars as pl

from dl2gpu.analysis.explore import Bad, Budget, Explored, wilson
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.outcomes import outcomes
from dl2gpu.analysis.replay import Program, build, run
from dl2gpu.analysis.returns import deciding
from dl2gpu.analysis.rewrite import copies
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.engine.base import Engine
from dl2gpu.engine.cpu import CPU
from dl2gpu.trace.schema import EVENTS, Trace

__all__ = ["Returns", "explore_returns", "with_returns"]

Returns: TypeAlias = tuple[tuple[int, int, int, tuple[int, ...]], ...]
"""(rank, lane, seq, requests) of each wait that has returned some, in order."""

_NEVER: Final = 1 << 30
"""Requests that a wait needs which is not to go on yet."""
_MOST_EVENTS: Final = 4_000_000
"""Events of the copies that are held at once."""
_SUBSETS: Final = 4
"""Complete requests of which a wait for some may return every part; of more one, or all."""

_WAIT: Final = ["rank", "lane", "seq"]


def with_returns(trace: Trace, returns: Sequence[Returns]) -> Trace:
    """The single job of a trace, so many times over; the k-th has returned ``returns[k]``."""
    made = copies(trace, len(returns))
    rows = [(k, *wait) for k, state in enumerate(returns) for wait in state]
    types = {"job": EVENTS["job"]} | {c: EVENTS[c] for c in (*_WAIT, "returned")}
    said = pl.DataFrame(rows, schema=types, orient="row").rename({"returned": "_said"})
    events = made.events.join(
        said, on=["job", *_WAIT], how="left", maintain_order="left"
    ).with_columns(returned=pl.coalesce("_said", "returned"))
    return replace(made, events=events.select(EVENTS.keys()))


def explore_returns(
    trace: Trace, scenario: Scenario, budget: Budget | None = None, seed: int = 0,
    engine: Engine = CPU,
) -> tuple[Explored, Returns]:  # fmt: skip
    """Explores what the waits of a job may return, under a scenario without other choices.

    Args:
        trace: one job. scenario: all but what is returned.
        budget: states that are looked at, and seconds. seed: of a sample.
        engine: where it runs.

    Returns:
        What is known (of job 0), and what the waits had returned at the first deadlock of it.
    """
    budget = budget or Budget()
    search = _Search(trace, replace(scenario, use_states=False, use_records=False), engine)
    until = None if budget.seconds is None else time.monotonic() + budget.seconds
    found = search.found
    todo: list[Returns] = [()]
    seen: set[Returns] = {()}
    while todo and len(seen) <= max(budget.scenarios // 2, 1):
        if until is not None and time.monotonic() > until:
            found.cut = "seconds"
            return search.result()
        search.look(todo)
        after = {s for state in todo for ways in search.ways[state] for s in ways}
        todo = sorted(after - seen)
        seen |= after
    if not todo and not search.partial:
        found.complete = True
        found.schedules = sum(not search.ways[s] for s in seen)
        found.probability = found.low = found.high = search.share()
        return search.result()
    rng = np.random.default_rng(seed)
    hits = 0
    while found.runs + found.sampled < budget.scenarios:
        if until is not None and time.monotonic() > until:
            found.cut = "seconds"
            break
        walks: list[Returns] = [()] * min(64, budget.scenarios - found.runs - found.sampled)
        found.sampled += len(walks)
        open_ = list(range(len(walks)))
        while open_:
            search.look(sorted({walks[k] for k in open_} - search.ways.keys()), count=False)
            open_ = [k for k in open_ if search.ways[walks[k]]]
            for k in open_:
                ways = search.ways[walks[k]]
                one = ways[int(rng.integers(len(ways)))]
                walks[k] = one[int(rng.integers(len(one)))]
        hits += sum(search.stands[w] for w in walks)
    found.runs += found.sampled
    found.probability = hits / found.sampled if found.sampled else 0.0
    found.low, found.high = wilson(hits, found.sampled)
    return search.result()


class _Search:
    """The states of a job: where each leads, and whether it stands where it leads nowhere."""

    def __init__(self, trace: Trace, scenario: Scenario, engine: Engine) -> None:
        self.trace, self.scenario, self.engine = trace, scenario, engine
        self.found = Explored(0)
        self.ways: dict[Returns, list[list[Returns]]] = {}
        """Of each state the waits that can go on, and of each of them where its ways lead."""
        self.stands: dict[Returns, bool] = {}
        self.partial = False
        """Some wait may return more sets than were looked at."""
        self.bad: dict[int, tuple[Bad, Returns]] = {}
        waits = deciding(build(match(trace, engine)))
        self.waits = waits.select(*_WAIT, "some").unique(maintain_order=True)

    def look(self, states: Sequence[Returns], *, count: bool = True) -> None:
        """Where these states lead."""
        most = max(1, _MOST_EVENTS // max(self.trace.events.height, 1))
        for first in range(0, len(states), most):
            self._look(states[first : first + most])
        self.found.runs += len(states) if count else 0

    def _look(self, states: Sequence[Returns]) -> None:
        p = build(match(with_returns(self.trace, states), self.engine))
        held = self._held(p, states)
        p.kernel["wait_needs"][held["wait"].to_numpy()] = _NEVER
        jobs = np.arange(len(states), dtype=np.int32)
        fix = run(p, self.scenario, jobs)
        at = held["wait"].to_numpy()
        held = held.filter(pl.Series(fix.issued[at] & ~fix.completed[at]))
        complete = self._complete(p, held, fix.completed)
        for state in states:
            self.ways[state] = []
        for job, rank, lane, seq, some, requests in complete.iter_rows():
            state = states[job]
            self.partial |= some and len(requests) > _SUBSETS
            self.ways[state].append(
                [
                    tuple(sorted((*state, (rank, lane, seq, way))))
                    for way in _ways(sorted(requests), some)
                ]
            )
        ends = np.array([k for k, s in enumerate(states) if not self.ways[s]], np.int64)
        if len(ends):
            cells = np.stack([ends, np.zeros(len(ends), np.int64)], axis=1)
            o = outcomes(p, [self.scenario], cells)
            for i, k in enumerate(ends.tolist()):
                self._end(states[k], bool(o.standing[i]), int(o.digest[i]), int(o.completed[i]))

    def _held(self, p: Program, states: Sequence[Returns]) -> pl.DataFrame:
        """``job, rank, lane, seq, some, wait`` of the waits that have not returned yet."""
        jobs = pl.DataFrame({"job": range(len(states))}, schema={"job": EVENTS["job"]})
        known = [(k, *wait[:3]) for k, state in enumerate(states) for wait in state]
        types = {c: EVENTS[c] for c in ("job", *_WAIT)}
        gone = pl.DataFrame(known, schema=types, orient="row")
        rows = p.matching.events.select("job", *_WAIT, wait="i")
        return (
            jobs.join(self.waits, how="cross")
            .join(gone, on=["job", *_WAIT], how="anti")
            .join(rows, on=["job", *_WAIT])
        )

    @staticmethod
    def _complete(p: Program, held: pl.DataFrame, completed: Any) -> pl.DataFrame:
        """Waits that can go on: ``job, rank, lane, seq, some, requests``, in order.

        One whose requests were all given back returns none.
        """
        pairs = p.waits.join(held.select("wait"), on="wait")
        done = pairs.filter(pl.Series(completed[pairs["target"].to_numpy()]))
        request = p.matching.events["request"].gather(done["target"])
        lists = done.with_columns(request=request).group_by("wait").agg(requests="request")
        sizes = pairs.group_by("wait").agg(size=pl.len())
        return (
            held.join(lists, on="wait", how="left")
            .join(sizes, on="wait", how="left")
            .filter(pl.col("requests").is_not_null() | pl.col("size").is_null())
            .with_columns(pl.col("requests").fill_null([]))
            .sort("wait")
            .select("job", *_WAIT, "some", "requests")
        )

    def _end(self, state: Returns, stands: bool, digest: int, completed: int) -> None:
        self.stands[state] = stands
        if stands:
            made = Bad(digest, (), completed)
            old = self.bad.get(digest)
            if old is None or (len(state), state) < (len(old[1]), old[1]):
                self.bad[digest] = made, state

    def share(self) -> float:
        """Share of the ways that lead to a deadlock: each wait, and each way of it, alike."""
        known = {s: float(v) for s, v in self.stands.items()}
        for state in sorted(self.ways, key=len, reverse=True):
            if state not in known:
                ways = self.ways[state]
                parts = [sum(known[s] for s in one) / len(one) for one in ways]
                known[state] = sum(parts) / len(parts)
        return known[()]

    def result(self) -> tuple[Explored, Returns]:
        order = sorted(self.bad.values(), key=lambda b: (b[0].completed, b[1], b[0].digest))
        self.found.bad = [b for b, _ in order]
        return self.found, order[0][1] if order else ()


def _ways(requests: list[int], some: bool) -> list[tuple[int, ...]]:
    """What a wait may return of complete requests."""
    if not requests:
        return [()]
    if not some:
        return [(r,) for r in requests]
    if len(requests) <= _SUBSETS:
        sizes = range(1, len(requests) + 1)
        return [part for n in sizes for part in combinations(requests, n)]
    return [*((r,) for r in requests), tuple(requests)]
