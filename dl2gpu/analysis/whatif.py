"""What if: configurations of buffers, fusion, orders, overlap and matches, and what each leads to.

For each job a table "configuration x probability of deadlock", in the manner of dl2's evaluation of
buffer sizes and fusion counts; the smallest safe buffer; and for each deadlock a witness, from
which the schedule that leads there can be played again. Configurations that change what ranks do
(fusion, order) are variants of the jobs (:mod:`rewrite`), matched once; all others are rows of
scenarios over the same program, which run as cells of one batch.

Only the order of a program counts here: recorded states are ignored. Source: DESIGN.md section 6.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Final

import numpy as np
import polars as pl

from dl2gpu.analysis.explore import Budget, Explored, explore, wilson
from dl2gpu.analysis.explore_returns import Returns, explore_returns, with_returns
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.outcomes import outcomes
from dl2gpu.analysis.replay import Fixpoint, Program, build, run
from dl2gpu.analysis.returns import deciding
from dl2gpu.analysis.rewrite import Fusion, free_matches, variant
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.analysis.tables import ROLE
from dl2gpu.engine.arrays import Array
from dl2gpu.engine.base import Engine
from dl2gpu.engine.cpu import CPU
from dl2gpu.trace.schema import Trace, one_job

__all__ = ["Axes", "WhatIf", "Witness", "infeasible", "program_of", "safe_sizes", "whatif"]

INFINITE: Final = Scenario.INFINITE

MATCHES: Final = ("recorded", "all")


@dataclass(frozen=True)
class Axes:
    """What is tried: every combination of these.

    Attributes:
        buffer: bytes that each channel buffers; 0: rendezvous; ``Scenario.INFINITE``: any number.
        messages: messages that each channel buffers; 0: as ``buffer`` says.
        eager: bytes up to which a message needs no receiver.
        pool, whose: bytes that the channels of a "sender", a "receiver" or the "job" share.
        queues: device queues of a rank, which its streams share; 0: each stream has its own.
        fusion: how gradient operations are fused. orders: see :data:`rewrite.ORDERS`.
        matches: "recorded" (of a wildcard that is not recorded, the first that fits), or "all".
        samples: orders that are tried of each job, where they are not as recorded.
    """

    buffer: tuple[int, ...] = (0,)
    messages: tuple[int, ...] = (0,)
    eager: tuple[int, ...] = (0,)
    pool: tuple[int, ...] = (0,)
    whose: str = "sender"
    queues: tuple[int, ...] = (0,)
    fusion: tuple[Fusion, ...] = field(default_factory=lambda: (Fusion(),))
    orders: tuple[str, ...] = ("recorded",)
    matches: tuple[str, ...] = ("recorded",)
    samples: int = 32


@dataclass(frozen=True)
class Witness:
    """All that leads to one deadlock: which variant of the job, and which scenario.

    ``sample`` and ``seed`` say which order; ``scenario.given`` which way each choice went;
    ``returns`` what waits for any or some returned.
    """

    fusion: Fusion = field(default_factory=Fusion)
    order: str = "recorded"
    matches: str = "recorded"
    sample: int = 0
    seed: int = 0
    returns: Returns = ()
    scenario: Scenario = field(default_factory=lambda: Scenario(use_states=False))

    def plain(self) -> dict[str, Any]:
        """As JSON has it: without what is as usual."""
        usual = asdict(Witness())
        out = {k: v for k, v in asdict(self).items() if v != usual[k] and k != "scenario"}
        scenario = {k: v for k, v in asdict(self.scenario).items() if v != usual["scenario"][k]}
        return out | ({"scenario": scenario} if scenario else {})

    @staticmethod
    def of(plain: dict[str, Any]) -> Witness:
        """The witness that :meth:`plain` gave.

        Raises:
            ValueError: it is none.
        """
        try:
            known = dict(plain)
            fusion = Fusion(**known.pop("fusion", {}))
            given = dict(known.pop("scenario", {}))
            given["given"] = tuple(int(g) for g in given.get("given", ()))
            returns = tuple(
                (int(rank), int(lane), int(seq), tuple(int(r) for r in some))
                for rank, lane, seq, some in known.pop("returns", ())
            )
            return Witness(
                fusion=fusion,
                returns=returns,
                scenario=replace(Scenario(use_states=False), **given),
                **known,
            )
        except (TypeError, AttributeError, ValueError) as e:
            raise ValueError(
                f"witness: expected what whatif writes, found {plain!r}: {e}"
            ) from None


@dataclass(frozen=True)
class WhatIf:
    """What came of it.

    Attributes:
        rows: one row a job and configuration: ``job``, ``fusion``, ``order``, ``matches``,
            ``queues``, ``eager``, ``buffer``, ``messages``, ``pool``; ``schedules`` (explored, or
            orders tried), ``exact`` (all there are), ``deadlocks`` (places of different deadlocks
            that were found), ``probability`` with ``low`` and ``high``, ``mismatch`` (share of the
            orders in which ranks fuse different gradients into one operation), ``witness`` (its
            number, null: none), ``runs``.
        safe: one row a job that stops with buffers of some size: ``job``; ``eager_bytes`` and
            ``channel_bytes`` (the smallest from which on all are safe, null: there is none);
            ``eager_unsafe`` and ``channel_unsafe`` (spans [from, below) of sizes that are not;
            below -1: all from there on; null: not known); ``channels`` ((src, dst) pairs on the
            circle at the critical size).
        witnesses: (job, witness), by number.
        cut: what was not done for want of time, "" for nothing.
    """

    rows: pl.DataFrame
    safe: pl.DataFrame
    witnesses: list[tuple[int, Witness]]
    cut: str = ""


def program_of(trace: Trace, w: Witness, engine: Engine = CPU) -> Program:
    """The program of the variant that a witness is about; ``trace`` holds its job alone."""
    matches = w.matches
    if w.returns:
        trace = with_returns(free_matches(trace) if matches == "all" else trace, [w.returns])
        matches = "recorded"
    return _program(trace, w.fusion, w.order, matches, 1, w.sample, w.seed, engine)[0]


def _program(
    trace: Trace, fusion: Fusion, order: str, matches: str, samples: int, first: int, seed: int,
    engine: Engine,
) -> tuple[Program, Array, Array]:  # fmt: skip
    """The program of a variant, and two facts about each of its jobs.

    Whether some operation holds different gradients on its ranks, and whether the order makes a
    difference to the job at all.
    """
    if matches == "all":
        trace = free_matches(trace)
    if order == "recorded" and fusion == Fusion():
        p = build(match(trace, engine))
        none = np.zeros(trace.jobs.height, np.bool_)
        return p, none, none
    plain = match(trace, engine)
    node = plain.prepared.trace.events.select("job", "rank", "lane", "seq").join(
        plain.events.select("job", "rank", "lane", "seq", "node"),
        on=["job", "rank", "lane", "seq"], how="left", maintain_order="left",
    )["node"]  # fmt: skip
    made = variant(trace, fusion, order, samples, seed, first, node.to_numpy())
    p = build(match(made.trace, engine))
    mixed = np.zeros(made.trace.jobs.height, np.bool_)
    if made.content.height:
        apart = (
            p.matching.events.lazy()
            .select("job", "rank", "lane", "seq", "node")
            .join(made.content.lazy(), on=["job", "rank", "lane", "seq"], how="inner")
            .filter(pl.col("node") >= 0)
            .group_by("job", "node")
            .agg(differ=pl.col("content").n_unique())
            .filter(pl.col("differ") > 1)
            .select("job")
            .unique()
            .collect()
        )
        mixed[apart["job"].to_numpy()] = True
    touched = np.zeros(made.trace.jobs.height, np.bool_)
    touched[made.content["job"].to_numpy()] = True
    if order == "threads":
        lanes = made.trace.events.group_by("job", "rank").agg(n=pl.col("lane").n_unique())
        touched[lanes.filter(pl.col("n") > 1)["job"].to_numpy()] = True
    return p, mixed, touched


_MOST_EVENTS: Final = 4_000_000
"""Events of the variants that are held at once."""


def whatif(
    trace: Trace, axes: Axes, budget: Budget | None = None, seed: int = 0, engine: Engine = CPU,
    sizes: bool = True,
) -> WhatIf:  # fmt: skip
    """Tries every configuration on every job.

    Args:
        trace: the jobs. axes: what is tried.
        budget: runs a job and configuration where there are choices, and seconds over all. Time is
            looked at between configurations, and the result says where it ended.
        seed: of orders and samples. engine: where it runs.
        sizes: find the smallest safe buffers as well.
    """
    budget = budget or Budget()
    until = None if budget.seconds is None else time.monotonic() + budget.seconds
    rows: list[dict[str, Any]] = []
    witnesses: list[tuple[int, Witness]] = []
    cut = ""
    for fusion, order, matches in product(axes.fusion, axes.orders, axes.matches):
        if until is not None and time.monotonic() > until:
            cut = f"ended before fusion {fusion_text(fusion)}, order {order}, matches {matches}"
            break
        left = None if until is None else max(until - time.monotonic(), 0.0)
        tried = _Tried(trace, fusion, order, matches, axes, replace(budget, seconds=left), seed)
        found, seen, late = tried.rows(engine)
        for row in found:
            number = row.pop("_witness")
            if number is not None:
                witnesses.append(seen[number])
                number = len(witnesses) - 1
            rows.append(row | {"witness": number})
        cut = cut or late
    jobs = np.arange(trace.jobs.height, dtype=np.int32)
    safe: list[dict[str, Any]] = []
    if sizes and not cut:
        left = None if until is None else max(until - time.monotonic(), 0.0)
        safe = safe_sizes(build(match(trace, engine)), jobs, replace(budget, seconds=left), seed)
    frame = pl.DataFrame(rows, schema=ROWS).sort(
        "job", "fusion", "order", "matches", "queues", "eager", "messages", "buffer", "pool",
        maintain_order=True,
    )  # fmt: skip
    return WhatIf(frame, pl.DataFrame(safe, schema=SAFE), witnesses, cut)


ROWS: Final[dict[str, pl.DataType]] = {
    "job": pl.Int32(),
    "fusion": pl.String(),
    "order": pl.String(),
    "matches": pl.String(),
    "queues": pl.Int32(),
    "eager": pl.Int64(),
    "messages": pl.Int64(),
    "buffer": pl.Int64(),
    "pool": pl.Int64(),
    "schedules": pl.Int64(),
    "exact": pl.Boolean(),
    "deadlocks": pl.Int64(),
    "probability": pl.Float64(),
    "low": pl.Float64(),
    "high": pl.Float64(),
    "mismatch": pl.Float64(),
    "runs": pl.Int64(),
    "witness": pl.Int32(),
}
"""Columns of :attr:`WhatIf.rows`; sizes are bytes."""

SAFE: Final[dict[str, pl.DataType]] = {
    "job": pl.Int32(),
    "eager_bytes": pl.Int64(),
    "channel_bytes": pl.Int64(),
    "eager_unsafe": pl.List(pl.List(pl.Int64())),
    "channel_unsafe": pl.List(pl.List(pl.Int64())),
    "channels": pl.List(pl.List(pl.Int32())),
}


COORDINATED: Final = "coordinated"
"""Name of the fusion that a coordinator decides on."""


def fusion_text(f: Fusion) -> str:
    """As the command line takes it: 1, 4, 64MiB@5ms, coordinated."""
    if f.coordinated:
        return COORDINATED
    if f.count or f == Fusion():
        return str(f.count or 1)
    size = f"{f.bytes}" if f.bytes else ""
    return f"{size}B@{f.cycle_ns // 1000}us" if f.cycle_ns else f"{size}B"


class _Tried:
    """One way of fusing, ordering and matching, with all scenarios on it."""

    def __init__(
        self, trace: Trace, fusion: Fusion, order: str, matches: str, axes: Axes, budget: Budget,
        seed: int,
    ) -> None:  # fmt: skip
        self.trace, self.fusion, self.order, self.matches = trace, fusion, order, matches
        self.axes, self.budget, self.seed = axes, budget, seed
        cycled = fusion.cycle_ns > 0
        self.samples = 1 if order == "recorded" and not cycled else max(axes.samples, 1)
        self.scenarios = [
            Scenario(
                use_states=False, queues=0 if q == 0 else q, eager_bytes=e, buffer_messages=m,
                buffer_bytes=b, pool_bytes=pool, pool=axes.whose,
                chosen=matches == "all" or pool > 0,
            )
            for q, e, m, b, pool in product(
                axes.queues, axes.eager, axes.messages, axes.buffer, axes.pool
            )
        ]  # fmt: skip

    def _parts(self) -> Iterator[tuple[int, int]]:
        """(first sample, how many), so that the variants held at once are bounded."""
        most = max(1, _MOST_EVENTS // max(self.trace.events.height, 1))
        for first in range(0, self.samples, most):
            yield first, min(most, self.samples - first)

    def rows(
        self, engine: Engine
    ) -> tuple[list[dict[str, Any]], list[tuple[int, Witness]], str]:  # fmt: skip
        n_jobs = self.trace.jobs.height
        tallies = [[_Tally() for _ in self.scenarios] for _ in range(n_jobs)]
        cut = ""
        for first, many in self._parts():
            p, mixed, touched = _program(
                self.trace, self.fusion, self.order, self.matches, many, first, self.seed, engine
            )
            boxed = _boxed(p)
            # an order that makes no difference is tried once
            everyone = np.arange(n_jobs * many)
            everyone = everyone[touched | (everyone < n_jobs if first == 0 else False)]
            plain = [k for k, s in enumerate(self.scenarios) if not s.pool_bytes]
            calm = everyone[~boxed[everyone]] if self.matches == "all" else everyone
            open_ = self._open(p, boxed)
            self._plain(p, plain, np.setdiff1d(calm, open_), n_jobs, first, mixed, tallies)
            cut = self._returned(open_, plain, engine, tallies) or cut
            for k, s in enumerate(self.scenarios):
                jobs = everyone if s.pool_bytes else everyone[boxed[everyone]]
                if not s.chosen or not len(jobs):
                    continue
                per = max(self.budget.scenarios // self.samples, 2)
                seconds = self.budget.seconds
                found = explore(p, jobs.tolist(), s, Budget(per, seconds), self.seed)
                for one in found:
                    cut = cut or ("ended for want of seconds" if one.cut else "")
                    self._explored(one, k, n_jobs, first, mixed, tallies)
        out: list[dict[str, Any]] = []
        witnesses: list[tuple[int, Witness]] = []
        for job in range(n_jobs):
            for s, tally in zip(self.scenarios, tallies[job], strict=True):
                row = self._row(job, s, tally)
                row["_witness"] = None
                if tally.witness is not None:
                    row["_witness"] = len(witnesses)
                    witnesses.append((job, tally.witness))
                out.append(row)
        return out, witnesses, cut

    def _plain(
        self, p: Program, rows: list[int], jobs: Array, n_jobs: int, first: int, mixed: Array,
        tallies: list[list[_Tally]],
    ) -> None:  # fmt: skip
        """Scenarios without choices: one batch of all jobs and all of them."""
        if not rows or not len(jobs):
            return
        some = [replace(self.scenarios[k], chosen=False) for k in rows]
        cells = np.stack(
            [np.repeat(jobs, len(rows)), np.tile(np.arange(len(rows)), len(jobs))], axis=1
        )
        o = outcomes(p, some, cells)
        false = np.zeros(len(cells), np.bool_)
        if self.order == "threads":
            for k, scenario in enumerate(some):
                mine = np.flatnonzero((cells[:, 1] == k) & (o.standing > 0))
                if len(mine):
                    odd = infeasible(p, run(p, scenario, cells[mine, 0].astype(np.int32)))
                    false[mine] = odd[cells[mine, 0]]
        for i, (job, k) in enumerate(cells.tolist()):
            if false[i]:
                continue
            tally = tallies[job % n_jobs][rows[k]]
            sample = first + job // n_jobs
            tally.add(float(o.standing[i] > 0), bool(mixed[job]), 1)
            if o.standing[i]:
                tally.digests.add(int(o.digest[i]))
                tally.keep(self._witness(sample, some[k]))

    def _open(self, p: Program, boxed: Array) -> Array:
        """Jobs of which it matters what their waits return; as recorded, and without wildcards."""
        if self.matches != "all" or self.order != "recorded" or self.fusion != Fusion():
            return np.zeros(0, np.int64)
        jobs: Array = deciding(p)["job"].unique().sort().to_numpy()
        return jobs[~boxed[jobs]]

    def _returned(
        self, jobs: Array, rows: list[int], engine: Engine, tallies: list[list[_Tally]]
    ) -> str:
        """Explores what waits return, a job and a scenario after the other; what was cut short."""
        cut = ""
        for job, k in product(jobs.tolist(), rows):
            free = free_matches(one_job(self.trace, job))
            scenario = replace(self.scenarios[k], chosen=False)
            one, returns = explore_returns(free, scenario, self.budget, self.seed, engine)
            cut = cut or ("ended for want of seconds" if one.cut else "")
            tally = tallies[job][k]
            tally.add(one.probability, mixed=False, runs=one.runs)
            tally.explored.append(one)
            if one.bad:
                tally.digests |= {b.digest for b in one.bad}
                tally.keep(replace(self._witness(0, scenario), returns=returns))
        return cut

    def _explored(
        self, one: Explored, k: int, n_jobs: int, first: int, mixed: Array,
        tallies: list[list[_Tally]],
    ) -> None:  # fmt: skip
        tally = tallies[one.job % n_jobs][k]
        sample = first + one.job // n_jobs
        tally.add(one.probability, bool(mixed[one.job]), one.runs)
        tally.explored.append(one)
        if one.bad:
            tally.digests |= {b.digest for b in one.bad}
            chosen = replace(self.scenarios[k], chosen=True, given=one.bad[0].given)
            tally.keep(self._witness(sample, chosen))

    def _witness(self, sample: int, scenario: Scenario) -> Witness:
        sample = sample if self.samples > 1 else 0
        seed = self.seed if self.samples > 1 else 0
        return Witness(self.fusion, self.order, self.matches, sample, seed, scenario=scenario)

    def _row(self, job: int, s: Scenario, t: _Tally) -> dict[str, Any]:
        of = len(t.shares)
        share = sum(t.shares) / of if of else 0.0
        low, high = share, share
        exact = of == 1 and all(e.complete for e in t.explored)
        schedules = of
        if of == 1 and t.explored:
            one = t.explored[0]
            low, high = one.low, one.high
            schedules = one.schedules if one.complete else one.sampled
        elif of != 1:
            low, high = wilson(round(sum(t.shares)), of)
        return {
            "job": job, "fusion": fusion_text(self.fusion), "order": self.order,
            "matches": self.matches, "queues": s.queues, "eager": s.eager_bytes,
            "messages": s.buffer_messages, "buffer": s.buffer_bytes, "pool": s.pool_bytes,
            "schedules": schedules, "exact": exact, "deadlocks": len(t.digests),
            "probability": share, "low": low, "high": high,
            "mismatch": sum(t.mixed) / of if of else 0.0, "runs": t.runs,
        }  # fmt: skip


@dataclass
class _Tally:
    """What is known of a job under one scenario."""

    shares: list[float] = field(default_factory=list)
    mixed: list[bool] = field(default_factory=list)
    digests: set[int] = field(default_factory=set)
    explored: list[Explored] = field(default_factory=list)
    witness: Witness | None = None
    runs: int = 0

    def add(self, share: float, mixed: bool, runs: int) -> None:
        self.shares.append(share)
        self.mixed.append(mixed)
        self.runs += runs

    def keep(self, w: Witness) -> None:
        if self.witness is None:
            self.witness = w


def _boxed(p: Program) -> Array:
    """bool[jobs]: which jobs have wildcards that are not decided."""
    out = np.zeros(len(p.job_event) - 1, np.bool_)
    boxed = p.matching.events["box"].to_numpy() >= 0
    out[p.matching.events["job"].to_numpy()[boxed]] = True
    return out


def infeasible(p: Program, fix: Fixpoint) -> Array:
    """bool[jobs]: stopped by an order of a device queue in which its hosts cannot have filled it.

    The head of a queue was not issued, and something behind it was: in that order the queue cannot
    have been filled, and nothing follows from it.
    """
    lay = fix.layout
    head = fix.queue_at
    waits = np.zeros(len(head) + 1, np.bool_)
    there = head >= 0
    waits[:-1][there] = ~fix.issued[head[there]]
    behind = np.flatnonzero(fix.issued & ~fix.completed & (lay.queue_of >= 0))
    out = np.zeros(len(p.job_event) - 1, np.bool_)
    odd = behind[waits[lay.queue_of[behind]]]
    out[p.matching.events["job"].to_numpy()[odd]] = True
    return out


# --------------------------------------------------------------------------------------------------
# Smallest safe buffers


def safe_sizes(
    p: Program, jobs: Array, budget: Budget | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """The smallest safe buffers of the jobs that stop with buffers of some size.

    Larger buffers of a channel only ever help where there is no wildcard, so each job is bisected,
    all of them at once: over the sizes of its messages for an eager threshold, and over bytes for
    the room of a channel. A wildcard may take what a larger buffer lets come sooner: then each size
    that makes a difference is explored (:mod:`explore`, with ``budget`` and ``seed``). Gives rows
    with the columns of :data:`SAFE`.
    """
    none = Scenario(use_states=False)
    boxed = _boxed(p)[jobs]
    calm = jobs[~boxed]
    todo = calm[_stands(p, calm, [none] * len(calm))] if len(calm) else calm
    out = [] if not len(todo) else _bisected(p, todo, none)
    for job in jobs[boxed].tolist():
        eager = unsafe_spans(p, job, "eager_bytes", budget, seed)
        room = unsafe_spans(p, job, "buffer_bytes", budget, seed)
        if not eager and not room:
            continue  # nowhere unsafe, or not known
        out.append(
            {
                "job": job,
                "eager_bytes": safe_from(eager), "channel_bytes": safe_from(room),
                "eager_unsafe": eager, "channel_unsafe": room, "channels": [],
            }
        )  # fmt: skip
    return sorted(out, key=lambda row: row["job"])


def _bisected(p: Program, todo: Array, none: Scenario) -> list[dict[str, Any]]:
    sizes = _sizes(p, todo)
    eager = _bisect(p, todo, [np.unique(s) for s in sizes], "eager_bytes")
    totals = [int(s.sum()) for s in sizes]
    room = _bisect(p, todo, totals, "buffer_bytes")
    out = []
    for job, small, wide in zip(todo.tolist(), eager, room, strict=True):
        critical = max((wide or 0) - 1, 0)
        fix = run(p, replace(none, buffer_bytes=critical), np.array([job], np.int32))
        out.append(
            {
                "job": job, "eager_bytes": small, "channel_bytes": wide,
                "eager_unsafe": [[0, -1 if small is None else small]],
                "channel_unsafe": [[0, -1 if wide is None else wide]],
                "channels": [] if wide is None else full_channels(p, fix, job),
            }
        )  # fmt: skip
    return out


Spans = list[list[int]]
"""[from, below) each, in order; below -1: no end."""

_MOST_SIZES: Final = 256
"""Sizes that are explored for a job whose wildcards make choices."""
_RUNS_A_SIZE: Final = 256
"""Runs for each of them."""


def unsafe_spans(
    p: Program, job: int, name: str, budget: Budget | None = None, seed: int = 0, **given: Any
) -> Spans | None:
    """Sizes of ``eager_bytes`` or ``buffer_bytes`` with which a job of choices can deadlock.

    None: not known. There are too many sizes that make a difference, a message has no size, or the
    choices are too many for the budget to say that there is no deadlock.

    Args:
        p: the program. job: its number.
        name: which field of a scenario. given: others of it.
        budget: runs for each size, and seconds over all. seed: of samples.
    """
    budget = budget or Budget()
    budget = replace(budget, scenarios=min(budget.scenarios, _RUNS_A_SIZE))
    until = None if budget.seconds is None else time.monotonic() + budget.seconds
    values = _turning_points(p, job, single=name == "eager_bytes")
    if values is None or len(values) * p.events_of(job).height > _MOST_EVENTS:
        return None
    spans: Spans = []
    for value, below in zip(values, [*values[1:], -1], strict=True):
        left = None if until is None else max(until - time.monotonic(), 0.0)
        given[name] = value
        scenario = replace(Scenario(use_states=False, chosen=True), **given)
        (one,) = explore(p, [job], scenario, replace(budget, seconds=left), seed)
        if not one.bad and not one.complete:
            return None
        if not one.bad:
            continue
        if spans and spans[-1][1] == value:
            spans[-1][1] = below
        else:
            spans.append([value, below])
    return spans


def safe_from(spans: Spans | None) -> int | None:
    """The smallest size from which on all are safe."""
    if spans is None or (spans and spans[-1][1] < 0):
        return None
    return spans[-1][1] if spans else 0


def _turning_points(p: Program, job: int, *, single: bool) -> list[int] | None:
    """0, and the sizes at which more fits: of one message, or of some in a row on a channel.

    None: there are more than :data:`_MOST_SIZES`, a message is of unknown size, or host threads
    may fill a channel in more than one order.
    """
    if p.events_of(job)["lane"].n_unique() > 1:
        return None
    sends = p.events_of(job).filter(
        pl.Series(p.kernel["role"][p.job_event[job] : p.job_event[job + 1]] == ROLE["send"])
    )
    if sends["bytes"].null_count():
        return None
    if single:
        found = set(sends["bytes"].to_list())
    else:
        found = set()
        channels = sends.sort("seq").group_by("comm", "rank", "peer", "tag", maintain_order=True)
        for row in channels.agg(pl.col("bytes").clip(1))["bytes"].to_list():
            sums = np.cumsum([0, *row])
            for first in range(len(row)):
                found.update((sums[first + 1 :] - sums[first]).tolist())
                if len(found) > _MOST_SIZES:
                    return None
    values = sorted({0, *found})
    return values if len(values) <= _MOST_SIZES else None


def full_channels(p: Program, fix: Fixpoint, job: int) -> list[list[int]]:
    """(src, dst) of the messages that stand at a fixpoint for want of a receive, on its circles."""
    from dl2gpu.analysis.roots import find_causes
    from dl2gpu.analysis.waitfor import build_graph

    nodes = [
        int(v)
        for cause in find_causes(build_graph(p, fix))
        if cause.job == job and cause.kind == "cycle"
        for v in cause.nodes
    ]
    about = p.matching.nodes[sorted(set(nodes))] if nodes else p.matching.nodes.head(0)
    sends = p.kernel["role"] == ROLE["send"]
    waiting = np.unique(p.kernel["node1"][fix.started & ~fix.completed & sends])
    mine = about.filter(pl.col("node").is_in(waiting.tolist()))
    return [list(pair) for pair in mine.select("src", "dst").unique().sort("src", "dst").rows()]


def _stands(p: Program, jobs: Array, scenarios: Sequence[Scenario]) -> Array:
    """bool[jobs]: is each deadlocked under its scenario?"""
    distinct = list(dict.fromkeys(scenarios))
    row = {s: k for k, s in enumerate(distinct)}
    cells = np.array([[job, row[s]] for job, s in zip(jobs.tolist(), scenarios, strict=True)])
    return outcomes(p, distinct, cells.reshape(-1, 2)).standing > 0


def _sizes(p: Program, jobs: Array) -> list[Array]:
    """int64[..] bytes of the standard sends of each job, an empty one taking one byte."""
    e = p.matching.events
    of = (
        e.lazy()
        .select("job", "bytes")
        .filter(pl.Series(p.kernel["role"] == ROLE["send"]))
        .drop_nulls()
        .with_columns(pl.col("bytes").clip(1))
        .group_by("job")
        .agg("bytes")
        .collect()
    )
    known = dict(zip(of["job"], of["bytes"], strict=True))
    empty = pl.Series([], dtype=pl.Int64)
    return [np.sort(known.get(job, empty).to_numpy()) for job in jobs.tolist()]


_AT_ONCE: Final = 16
"""Parts into which a bisection divides: the values between them go in lock step."""


def _bisect(
    p: Program, jobs: Array, among: Sequence[Array | int], name: str
) -> list[int | None]:  # fmt: skip
    """The smallest value of a field with which each job runs through; None: none of them."""
    low = np.zeros(len(jobs), np.int64)
    high = np.array([len(a) if isinstance(a, np.ndarray) else a for a in among], np.int64)
    base = Scenario(use_states=False)

    def value(i: int, place: int) -> int:
        values = among[i]
        return int(values[place - 1]) if isinstance(values, np.ndarray) else place

    def at(which: Array, places: Array) -> list[Scenario]:
        return [
            replace(base, **{name: value(int(i), int(k))})  # type: ignore[arg-type]
            for i, k in zip(which, places, strict=True)
        ]

    some = np.flatnonzero(high > 0)
    fails = np.ones(len(jobs), np.bool_)
    if len(some):
        fails[some] = _stands(p, jobs[some], at(some, high[some]))
    open_ = np.flatnonzero(~fails)
    while len(open_ := open_[high[open_] - low[open_] > 1]):
        step = np.maximum((high[open_] - low[open_]) // _AT_ONCE, 1)
        places = low[open_, None] + step[:, None] * np.arange(1, _AT_ONCE)
        which, nth = np.nonzero(places < high[open_, None])
        which, places = open_[which], places[which, nth]
        stuck = _stands(p, jobs[which], at(which, places))
        np.maximum.at(low, which[stuck], places[stuck])
        np.minimum.at(high, which[~stuck], places[~stuck])
    return [None if fails[i] else value(i, int(high[i])) for i in range(len(jobs))]
