"""Verdicts: from causes to findings (DESIGN.md section 5).

``analyse`` is the analysis from a trace to its findings: match, replay, wait-for, causes, and then
for each cause one finding with kind, culprits, victims, evidence and advice. Loops in this module
run over causes, not over events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.analysis import host_called, observed, scenarios
from dl2gpu.analysis.explore import Budget, explore
from dl2gpu.analysis.explore_returns import explore_returns, with_returns
from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.findings import findings_of, mismatch_at
from dl2gpu.analysis.fingerprint import fingerprint
from dl2gpu.analysis.logs import from_logs, without_log_events
from dl2gpu.analysis.matching import Matching, match
from dl2gpu.analysis.names import Names
from dl2gpu.analysis.neighbourhood import pictured, timeline
from dl2gpu.analysis.outcomes import outcomes
from dl2gpu.analysis.ras import report_findings
from dl2gpu.analysis.repair import with_repairs
from dl2gpu.analysis.replay import Fixpoint, Program, Scenario, build, run
from dl2gpu.analysis.returns import deciding
from dl2gpu.analysis.roots import find_causes
from dl2gpu.analysis.shares import over_shares
from dl2gpu.analysis.waitfor import build_graph
from dl2gpu.analysis.windows import within_windows
from dl2gpu.analysis.wording import advice_for, summary_of
from dl2gpu.engine.base import Engine
from dl2gpu.engine.choose import engine_of
from dl2gpu.trace.schema import STATE, Trace, one_job

__all__ = ["Analysis", "Finding", "analyse"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Analysis:
    """Findings of a shard, sorted by job and gravity, and each job's verdict.

    ``findings``: :class:`Finding` as dictionaries. ``jobs``: one row a job of the trace with
    ``job``, ``verdict`` and ``deadlocked``.
    """

    findings: list[dict[str, Any]]
    jobs: pl.DataFrame


_GRAVITY: Final = (
    "cycle", "order_inversion", "init_cycle", "mismatch", "unmatched_p2p", "missing_participant",
    "crashed_rank", "stalled_rank", "in_flight", "potential", "insufficient_evidence",
)  # fmt: skip


def analyse(trace: Trace, workers: int | None = None, engine: str | Engine = "cpu") -> Analysis:
    """All findings of a trace.

    Args:
        trace: the event table and its side tables, many jobs at once.
        workers: threads; default one a core. A GPU takes all jobs at once.
        engine: where it runs: "cpu", "gpu" (what :func:`choose` gives), or an engine itself.

    Raises:
        EngineError: the engine is another.
        DeviceMemoryError: the shard does not fit the memory of the GPU; a smaller one may.
    """
    where = engine_of(engine) if isinstance(engine, str) else engine

    def one(share: Trace) -> Analysis:
        rest = without_log_events(share)
        return analyse_matched(match(rest, where), from_logs(share))

    shares = over_shares(trace, one, workers if where.passes else 1)
    return Analysis(
        [f | {"job": f["job"] + first} for first, found in shares for f in found.findings],
        pl.concat([found.jobs.with_columns(pl.col("job") + first) for first, found in shares]),
    )


def analyse_matched(m: Matching, told: Sequence[Finding] = ()) -> Analysis:
    """All findings of a matched trace.

    ``told``: findings on jobs of which there are only logs, whose events are not in ``m``.
    """
    p = build(m)
    names = Names(m)
    by_states = m.prepared.jobs["states"].to_numpy().astype(bool)
    everyone = np.arange(len(by_states), dtype=np.int32)
    findings: list[Finding] = []
    open_jobs: set[int] = set()
    issued = np.zeros(m.events.height, np.bool_)
    completed = issued.copy()

    # post-mortem evidence: completed operations are facts, and states decide about buffering
    seen = everyone[by_states]
    if len(seen):
        fix = run(p, Scenario(atomic_batch=True), seen)
        issued |= fix.issued
        completed |= fix.completed
        graph = build_graph(p, fix)
        causes = find_causes(graph)
        stale = observed.stale_ranks(p)
        for cause in causes:
            made = findings_of(p, names, graph, cause, "observed", stale)
            findings += made
            if not made:
                open_jobs.add(cause.job)
        findings = pictured(names, findings)
        still = observed.standstill(p, names, fix, findings, stale)
        findings += _in_one_queue(p, names, still)
        findings += _unexplained(p, names, fix, findings, open_jobs)

    # program order: the replay decides; then the readings that the order leaves open
    planned = everyone[~by_states]
    strict = None
    if len(planned):
        # who gets through under the strictest reading gets through under the others
        strict = run(p, scenarios.STRICTEST, planned)
        issued |= strict.issued
        completed |= strict.completed
        through = scenarios.passed(p, strict, planned)
        fix = run(p, Scenario(use_records=True), np.setdiff1d(planned, through))
        issued |= fix.issued
        completed |= fix.completed
        graph = build_graph(p, fix)
        causes = find_causes(graph)
        stuck = np.unique([c.job for c in causes]).astype(np.int32)
        # what stops as wildcards are matched here, and not always, has not happened yet
        mixed = _not_always(p, stuck)
        causes = [c for c in causes if c.job not in mixed]
        stuck = np.setdiff1d(stuck, mixed)
        lenient = None
        if len(stuck):
            lenient = run(
                p,
                Scenario(eager_bytes=Scenario.INFINITE, early_release=True, use_records=True),
                stuck,
            )
        drafts: list[Finding] = []
        for cause in causes:
            unconditional = lenient is None or scenarios.still_stuck(graph, cause, lenient)
            made = findings_of(p, names, graph, cause, "proven", {})
            drafts += made if unconditional else [scenarios.only_unbuffered(p, f) for f in made]
        drafts = pictured(names, drafts)
        findings += drafts
        if lenient is not None:
            findings += _hidden(p, names, lenient, drafts, stuck)
        calm = np.setdiff1d(planned, stuck).astype(np.int32)
        findings += _potentials(p, names, calm, through, mixed)
        findings += _unexplained(p, names, fix, findings, open_jobs)

    findings += report_findings(m)
    findings += _passed_mismatches(p, names, findings)
    findings += _uncompared(m, findings)
    findings = within_windows(p, findings)
    findings, unsettled = host_called.sifted(m, findings)
    open_jobs |= unsettled
    findings = host_called.with_statements(m, findings, open_jobs)
    findings = _across_attempts(m, _merge(findings))
    findings = [_with_last(p, names, f, issued, completed) for f in findings]
    findings = with_repairs(p, strict, findings)
    findings += [replace(f, fingerprint=fingerprint(f)) for f in told]
    return _conclude(m, findings, open_jobs)


_MESSAGES: Final = ("send", "recv", "sendrecv", "probe")


def _in_one_queue(p: Program, names: Names, still: list[Finding]) -> list[Finding]:
    """``still``; of jobs in flight, what stops them if the streams of a device are one queue.

    All have come, all agree, and nothing completes: if collectives of several communicators were
    entered in other orders, and none has started that would have to wait in one queue, then that is
    what they wait for. Whether the communicators do share a queue, no dump says.
    """
    flying = {f.job for f in still if f.kind == "in_flight"}
    if not flying:
        return still
    m = p.matching
    started = (m.events["state"] == STATE["started"]).fill_null(False).to_numpy()
    one = run(p, Scenario(atomic_batch=True, one_stream=True), np.array(sorted(flying), np.int32))
    job_of = m.events["job"].to_numpy()
    refuted = set(job_of[started & one.issued & ~one.started].tolist())
    graph = build_graph(p, one)
    found: list[Finding] = []
    for cause in find_causes(graph):
        if cause.job in refuted:
            continue
        for f in findings_of(p, names, graph, cause, "inferred", {}):
            collectives = not any(h["op"] in _MESSAGES for h in f.hangs_at)
            if f.kind == "order_inversion" and collectives:
                found.append(replace(f, condition=scenarios.SHARED_QUEUE, deadlocked=None))
    told = {f.job for f in found}
    return [f for f in still if f.kind != "in_flight" or f.job not in told] + pictured(names, found)


def _unexplained(
    p: Program, names: Names, fix: Fixpoint, findings: list[Finding], open_jobs: set[int]
) -> list[Finding]:
    """Jobs that stand still without a cause that could be named: never called healthy."""
    job_of_rank = p.matching.prepared.ranks["job"].to_numpy()
    stuck = np.unique(job_of_rank[fix.layout.lane_rank[fix.lane_at >= 0]])
    named = {f.job for f in findings} | open_jobs
    out = []
    for job in stuck:
        if int(job) in named:
            continue
        lanes = np.flatnonzero((fix.lane_at >= 0) & (job_of_rank[fix.layout.lane_rank] == job))
        at = [int(e) for e in fix.lane_at[lanes]]
        out.append(
            Finding(
                job=int(job), kind="insufficient_evidence", evidence="inferred", reason="no_data",
                victims=tuple(sorted({int(p.rank_of[e]) for e in at})),
                hangs_at=tuple(names.operation(e) for e in at),
            )
        )  # fmt: skip
    return out


def _hidden(
    p: Program, names: Names, lenient: Fixpoint, drafts: list[Finding], stuck: Array
) -> list[Finding]:
    """What stops a job even with unlimited buffers, where nothing found so far does."""
    certain = {f.job for f in drafts if f.kind != "potential"}
    open_jobs = np.array([j for j in stuck if j not in certain], dtype=np.int32)
    if not len(open_jobs):
        return []
    graph = build_graph(p, lenient)
    out = []
    for cause in find_causes(graph):
        if cause.job not in certain:
            out += findings_of(p, names, graph, cause, "proven", {})
    return pictured(names, out)


def _potentials(
    p: Program, names: Names, calm: Array, through: Array, mixed: Array
) -> list[Finding]:
    """Readings under which a job that runs through would stop.

    ``through``: those of the jobs that do not stop under the strictest reading. ``mixed``: those
    that stop under some matches of their wildcards, and are not run under other readings.
    """
    out: list[Finding] = []
    for scenario, condition, jobs in scenarios.plausible(p, np.setdiff1d(calm, mixed), through):
        done = {f.job for f in out}
        todo = np.array([j for j in jobs if j not in done], dtype=np.int32)
        if not len(todo):
            continue
        fix = run(p, scenario, todo)
        graph = build_graph(p, fix)
        found: list[Finding] = []
        for cause in find_causes(graph):
            made = findings_of(p, names, graph, cause, "proven", {})
            found += [scenarios.as_potential(f, condition) for f in made]
        out += pictured(names, found)
    out = [_with_overlap(p, f) for f in out]
    return _by_returns(p, calm, _by_matches(p, names, calm, out))


_MATCHES: Final = 64
"""Runs of a job in which wildcards take other messages."""


def _not_always(p: Program, stuck: Array) -> Array:
    """Those of the jobs (int32) that come to their end under other matches of their wildcards.

    Jobs of which a record shows how far they got are left alone: they did match.
    """
    e_job = p.matching.events["job"].to_numpy()
    wild = np.intersect1d(stuck, e_job[p.matching.events["box"].to_numpy() >= 0])
    wild = np.setdiff1d(wild, e_job[p.kernel["known"] > 0])
    explored = explore(p, wild.tolist(), Scenario(), Budget(_MATCHES))
    mixed = [one.job for one in explored if one.bad and one.probability < 1]
    return np.array(mixed, np.int32)


def _by_matches(p: Program, names: Names, calm: Array, found: list[Finding]) -> list[Finding]:
    """The findings with those that other matches of wildcards lead to, and how probable they are.

    Jobs that stop under another reading are left alone.
    """
    box = p.matching.events["box"].to_numpy()
    if box.max(initial=-1) < 0:
        return found
    wild = np.intersect1d(calm, p.matching.events["job"].to_numpy()[box >= 0])
    known = {f.job: f for f in found}
    jobs = [
        int(j) for j in wild
        if int(j) not in known or known[int(j)].condition == scenarios.OTHER_MATCH
    ]  # fmt: skip
    out = list(found)
    for one in explore(p, jobs, Scenario(), Budget(_MATCHES)):
        if not one.bad:
            continue
        scenario = Scenario(use_states=False, chosen=True, given=one.bad[0].given)
        about = {
            "witness": {"given": list(one.bad[0].given)},
            "schedules": one.schedules if one.complete else one.sampled,
            "every_schedule": one.complete,
        }
        if one.job not in known:
            graph = build_graph(p, run(p, scenario, np.array([one.job], np.int32)))
            other: list[Finding] = []
            for cause in find_causes(graph):
                made = findings_of(p, names, graph, cause, "proven", {})
                other += [scenarios.as_potential(f, scenarios.OTHER_MATCH) for f in made]
            out += pictured(names, other)
        # of a sample that met none, the one that was found says that it can happen: not how often
        share = one.probability if one.complete or one.probability else None
        out = [
            replace(f, probability=share, details=f.details | about) if f.job == one.job else f
            for f in out
        ]
    return out


def _by_returns(p: Program, calm: Array, found: list[Finding]) -> list[Finding]:
    """The findings with those that other returns of waits for any or some lead to.

    Jobs that stop under another reading, and those with wildcards, are left alone.
    """
    open_ = deciding(p)["job"].unique().sort().to_numpy()
    if not len(open_):
        return found
    e_job = p.matching.events["job"].to_numpy()
    boxed = e_job[p.matching.events["box"].to_numpy() >= 0]
    known = [f.job for f in found]
    jobs = np.setdiff1d(np.intersect1d(open_, calm), np.concatenate([boxed, known]).astype(int))
    prepared = p.matching.prepared
    out = list(found)
    for job in jobs.tolist():
        alone = one_job(prepared.trace, job)
        one, returns = explore_returns(alone, Scenario(), Budget(_MATCHES), engine=prepared.engine)
        if not one.bad:
            continue
        about = {
            "witness": {"returns": [list(wait) for wait in returns]},
            "schedules": one.schedules if one.complete else one.sampled,
            "every_schedule": one.complete,
        }
        there = build(match(with_returns(alone, [returns]), prepared.engine))
        own = Names(there.matching)
        graph = build_graph(there, run(there, Scenario(use_states=False)))
        made = [
            scenarios.as_potential(f, scenarios.OTHER_RETURN)
            for cause in find_causes(graph)
            for f in findings_of(there, own, graph, cause, "proven", {})
        ]
        share = one.probability if one.complete or one.probability else None
        out += [
            replace(f, job=job, probability=share, details=f.details | about)
            for f in pictured(own, made)
        ]
    return out


_QUEUES: Final = 8
"""Hardware queues of a device, up to which it is said with how many an order bites."""


def _with_overlap(p: Program, f: Finding) -> Finding:
    """The finding with the numbers of device queues a rank with which it bites."""
    if f.condition != scenarios.ONE_QUEUE:
        return f
    tried = [Scenario(queues=k) for k in range(1, _QUEUES + 1)]
    o = outcomes(p, tried, np.array([[f.job, k] for k in range(_QUEUES)]))
    bites = [k + 1 for k in range(_QUEUES) if o.standing[k]]
    return replace(f, details=f.details | {"deadlocks_with_device_queues": bites})


# --------------------------------------------------------------------------------------------------
# Mismatches that stopped nobody, merging, conclusion


def _passed_mismatches(p: Program, names: Names, findings: list[Finding]) -> list[Finding]:
    """Signatures that disagree where every part completed, or where the difference stops nobody."""
    m = p.matching
    states = m.prepared.jobs["states"].to_numpy().astype(bool)
    nodes = m.nodes.filter(
        pl.col("differs") & (~pl.col("blocks") | (pl.col("finished") == pl.col("present")))
    )
    if nodes.is_empty():
        return []
    blocked = {f.job for f in findings if f.kind == "mismatch"}
    first = (
        nodes.sort("job", "comm", "k")
        .group_by("job", "comm", maintain_order=True)
        .agg(pl.col("node").first(), count=pl.len())
    )
    out = []
    for job, _, node, count in first.iter_rows():
        if job in blocked:
            continue
        f = mismatch_at(
            p, names, job, node, "observed" if states[job] else "proven",
            waiting=(), fix=None, blocking=False,
        )  # fmt: skip
        out.append(replace(f, details=f.details | {"operations": count}, deadlocked=False))
    return out


def _uncompared(m: Matching, findings: list[Finding]) -> list[Finding]:
    """Jobs whose records cannot be set against each other: they are not known to be healthy."""
    named = {f.job for f in findings}
    return [
        Finding(
            job=job, kind="insufficient_evidence", evidence="inferred", reason="no_data",
            details={"uncompared_operations": operations, "uncompared_ranks": ranks},
        )
        for job, operations, ranks in observed.uncompared(m).iter_rows()
        if job not in named
    ]  # fmt: skip


def _across_attempts(m: Matching, findings: list[Finding]) -> list[Finding]:
    """Ranks without a record that left one in another attempt of the same job: never matched."""
    jobs = m.prepared.jobs.select("job", "name", "folder", "attempt")
    if not any(jobs["attempt"]):
        return findings
    present = jobs.join(m.prepared.ranks.select("job", "rank"), on="job")
    out = []
    for f in findings:
        mine = jobs.row(f.job, named=True)
        elsewhere = present.filter(
            (pl.col("name") == mine["name"])
            & (pl.col("folder") == mine["folder"])
            & (pl.col("attempt") != mine["attempt"])
            & pl.col("rank").is_in(list(f.details.get("missing_ranks", ())))
        ).sort("attempt", "rank")
        if f.reason == "no_data" and elsewhere.height:
            pairs = [
                {"attempt": a, "rank": r} for a, r in elsewhere.select("attempt", "rank").rows()
            ]
            details = f.details | {"in_other_attempts": pairs}
            out.append(replace(f, reason="other_attempt", details=details))
        else:
            out.append(f)
    return out


_PICTURES: Final = ("graph", "timeline")
"""Details that are large, and have no labels."""


_UNTOLD: Final = frozenset({"label", *_PICTURES})


def _pictures(f: Finding) -> dict[str, Any]:
    return {k: f.details[k] for k in _PICTURES if k in f.details}


def _plain(value: Any) -> Any:
    """Details without the labels that only the summary needs."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k not in _UNTOLD}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


_SHOWN_RANKS: Final = 16
_SHOWN_OPERATIONS: Final = 4
"""Of so many ranks a finding shows so many of the operations issued last."""


def _with_last(p: Program, names: Names, f: Finding, issued: Array, completed: Array) -> Finding:
    """The finding with the last operations of the ranks it names, newest last, and a timeline."""
    named = dict.fromkeys([*f.culprits, *(h["rank"] for h in f.hangs_at), *f.victims])
    ranks = sorted(list(named)[:_SHOWN_RANKS])
    lo, hi = int(p.job_event[f.job]), int(p.job_event[f.job + 1])
    last = names.last_operations(lo, hi, ranks, issued, _SHOWN_OPERATIONS)
    details = f.details | {"last_operations": last}
    if (around := timeline(p, names, f, issued, completed)) is not None:
        details["timeline"] = around
    return replace(f, details=details)


_UNHURT: Final = ("potential", "insufficient_evidence")
"""Kinds that name no time lost."""


def _merge(findings: list[Finding]) -> list[Finding]:
    """The same fault in several places of one job (each pipeline, each replica) is one finding."""
    same: dict[tuple[Any, ...], list[Finding]] = {}
    for f in findings:
        f = replace(f, fingerprint=fingerprint(f))
        same.setdefault((f.job, f.kind, f.evidence, f.fingerprint, f.condition), []).append(f)
    return [_joined(places) for places in same.values()]


def _joined(places: list[Finding]) -> Finding:
    """One finding of those of one fault: the first, with the ranks and operations of all."""
    if len(places) == 1:
        return places[0]
    first = min(places, key=lambda f: f.reason or "")  # whichever place has the lowest ranks
    culprits = {r for f in places for r in f.culprits}
    # a picture shows the circle of its own place
    drawn = next((f for f in (first, *places) if "graph" in f.details), first)
    pictures = {"graph": drawn.details["graph"]} if drawn is not first else {}
    hangs_at = {
        (h["rank"], h["seq"], h["op"], h["comm"], h["ordinal"], *h["stack"]): h
        for f in reversed(places)
        for h in reversed(f.hangs_at)
    }
    return replace(
        first,
        culprits=tuple(sorted(culprits)),
        victims=tuple(sorted({r for f in places for r in f.victims} - culprits)),
        cycle=drawn.cycle,
        hangs_at=tuple(reversed(hangs_at.values())),
        details=pictures | first.details | {"places": len(places)},
    )


def _conclude(m: Matching, findings: list[Finding], open_jobs: set[int]) -> Analysis:
    """Verdicts; ``open_jobs`` are those in which ranks wait and the record does not say why."""
    jobs = m.prepared.jobs
    rows: list[dict[str, Any]] = []
    verdict = ["healthy"] * jobs.height
    dead: list[bool | None] = [None if j in open_jobs else False for j in range(jobs.height)]
    findings = sorted(
        findings, key=lambda f: (f.job, _GRAVITY.index(f.kind), f.culprits, f.fingerprint)
    )
    by_job: dict[int, list[Finding]] = {}
    for f in findings:
        by_job.setdefault(f.job, []).append(f)
    times = observed.clock(m, sorted(by_job))
    for job, found in by_job.items():
        verdict[job] = found[0].kind
        claims = [f.deadlocked for f in found]
        dead[job] = True if True in claims else (None if None in claims else False)
        stopped, hours = times.get(job, (None, None))
        for f in found:
            done = replace(
                f, stopped_at_ns=stopped,
                gpu_hours_lost=None if f.kind in _UNHURT or f.deadlocked is None else hours,
                advice=advice_for(f),
            )  # fmt: skip
            done = replace(done, summary=summary_of(done))
            row = {k: getattr(done, k) for k in done.__dataclass_fields__ if k != "origin"}
            rows.append(row | {"details": _plain(done.details) | _pictures(done)})
    out = jobs.select("job").with_columns(
        verdict=pl.Series(verdict, dtype=pl.String), deadlocked=pl.Series(dead, dtype=pl.Boolean)
    )
    return Analysis(rows, out)
