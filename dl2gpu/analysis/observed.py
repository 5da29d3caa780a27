"""What recorded states and times say beyond the order of operations (post-mortem evidence).

Source: DESIGN.md section 4, "two kinds of evidence", and section 5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.matching import Matching
from dl2gpu.analysis.names import Names
from dl2gpu.analysis.replay import Fixpoint, Program
from dl2gpu.analysis.tables import KIND, is_collective
from dl2gpu.analysis.windows import timed_window
from dl2gpu.trace.schema import EXIT, STATE

__all__ = [
    "clock", "snapshot", "stale_ranks", "standstill", "uncompared", "went_on",
    "windows_ended",
]  # fmt: skip

Array = npt.NDArray[Any]


def stale_ranks(p: Program) -> dict[int, set[int]]:
    """Ranks whose record is older than the others': job to global ranks.

    Others have completed a synchronising collective that this rank has not even issued in its
    record; they could not have without it. Its pending work and its silence say nothing.
    """
    m = p.matching
    prepared = m.prepared
    ahead = m.nodes.filter(
        (pl.col("finished") > 0)
        & (pl.col("need") < 0)
        & (pl.col("kind") == KIND["synchronising"])
        & ~pl.col("blocks")
    )
    out: dict[int, set[int]] = {}
    if ahead.height:
        members = (
            prepared.comms.select("job", "comm", rank="ranks")
            .explode("rank", empty_as_null=False)
            .join(prepared.ranks.select("job", "rank", "only_active"), on=["job", "rank"])
            .filter(~pl.col("only_active"))
            .join(ahead.select("node", "comm"), on="comm")
        )
        there = prepared.engine.collect(
            m.events.lazy()
            .select("node", "rank")
            .filter(pl.col("node").is_in(ahead["node"].implode()))
        )
        members = members.join(there, on=["node", "rank"], how="anti")
        from dl2gpu.analysis.matching import passed_members

        gone = passed_members(prepared, ahead).cast({"node": pl.Int32})
        members = members.join(gone, on=["node", "rank"], how="anti")
        for job, rank in members.select("job", "rank").unique().iter_rows():
            out.setdefault(job, set()).add(rank)
    status = prepared.trace.status
    if status.height:
        best = status.group_by("job", "comm").agg(best=pl.col("last_completed").max())
        # only collectives count alike on all members; a communicator with messages does not
        mixed = m.nodes.filter(pl.col("kind") == KIND["message"])["comm"].unique()
        behind = (
            status.join(best, on=["job", "comm"])
            .filter(
                (pl.col("last_enqueued") < pl.col("best")) & ~pl.col("comm").is_in(mixed.to_list())
            )
            .join(
                prepared.ranks.filter(pl.col("only_active")).select("job", "rank"),
                on=["job", "rank"],
                how="semi",
            )
        )
        for job, rank in behind.select("job", "rank").unique().iter_rows():
            out.setdefault(job, set()).add(rank)
    return out


def windows_ended(p: Program, job: int, ranks: set[int]) -> list[int]:
    """Those of ``ranks`` whose record is a window that does not say when it ended.

    What it lacks at its end may have come later. Others are weighed in :mod:`windows`.
    """
    rows = p.matching.prepared.ranks
    found = rows.filter(
        (pl.col("job") == job)
        & pl.col("rank").is_in(sorted(ranks))
        & (pl.col("exit") == EXIT["window"])
        & ~timed_window()
    )
    return sorted(int(r) for r in found["rank"])


def uncompared(m: Matching) -> pl.DataFrame:
    """What of jobs that are recorded as windows could not be set against other ranks.

    Columns ``job``, ``operations`` (collectives of more than one member that met none, since the
    source tells neither their number nor the members), ``ranks`` (who issued them, sorted).
    """
    rows = m.prepared.ranks
    jobs = rows.filter(pl.col("exit") == EXIT["window"]).select("job").unique()
    if jobs.is_empty():
        return pl.DataFrame(
            schema={"job": pl.Int32, "operations": pl.UInt32, "ranks": pl.List(pl.Int32)}
        )
    sizes = m.prepared.comms.select("comm", "size")
    by_rank = m.prepared.engine.collect(
        m.events.lazy()
        .filter(is_collective(pl.col("op")) & pl.col("ordinal").is_null())
        .select("job", "comm", "rank", "k")
        .join(jobs.lazy(), on="job", how="semi")
        .join(sizes.lazy(), on="comm")
        .filter((pl.col("size") != 1) & ((pl.col("k").fill_null(-1) < 0) | (pl.col("size") == 0)))
        .group_by("job", "rank")
        .agg(n=pl.len())
    )
    # cuDF sorts no lists within groups; there is a row a rank left
    return (
        by_rank.group_by("job")
        .agg(operations=pl.col("n").sum(), ranks=pl.col("rank").sort())
        .sort("job")
    )


def went_on(p: Program, job: int, absent: set[int], here: list[int]) -> bool:
    """Did the absent ranks work on after the others had begun to wait for them?

    All of them, by the recorded times: issued after the first of the others had come, and completed
    after the last; and on communicators that none of the waiting ranks shares.
    """
    waiting = p.matching.events[here]
    first, last = waiting["t_created"].min(), waiting["t_created"].max()
    if first is None or not absent:
        return False
    own = p.events_of(job).filter(
        pl.col("rank").is_in(sorted(absent))
        & (pl.col("t_created") > first)
        & (pl.col("t_completed") > last)
    )
    if own["rank"].n_unique() < len(absent):
        return False
    ranks = {int(r) for r in waiting["rank"]}
    comms = p.matching.prepared.comms
    for members in comms.filter(pl.col("comm").is_in(own["comm"].drop_nulls().unique().to_list()))[
        "ranks"
    ]:
        if ranks & set(members):
            return False
    return True


def snapshot(p: Program, job: int) -> bool:
    """Is the record one that is taken on request, and knows neither waits nor all operations?

    Recorders of host backends (gloo) have no watchdog that dumps at a timeout, and keep no point to
    point and no group creation. That a rank is behind when such a record is taken says nothing.
    """
    row = p.matching.prepared.jobs.row(job, named=True)
    return not row["waits"] and not row["p2p"]


def standstill(
    p: Program, names: Names, fix: Fixpoint, findings: list[Finding], stale: dict[int, set[int]]
) -> list[Finding]:
    """Operations that have all they need and are not complete: in flight, or a device that hangs.

    ``findings`` are those made from the wait-for graph: where one explains the job, operations that
    merely were under way when the record was taken are no finding. Where a member has completed an
    operation that another has not, the other's device is stuck (stalled_rank, reason device).
    """
    m = p.matching
    states = m.prepared.jobs["states"].to_numpy().astype(bool)
    done = p.kernel["known"] & 1 > 0
    job_of = m.events["job"].to_numpy()
    # of a whole program whose states are a dump's, what the dump does not list pends nowhere
    joined = m.prepared.jobs["joined"].to_numpy().astype(bool)
    untold = joined[job_of] & (m.events["state"].fill_null(0) == STATE["unknown"]).to_numpy()
    pending = fix.completed & ~done & states[job_of] & ~untold
    if not pending.any():
        return []
    # the first uncompleted operation of each queue is where the device stands
    head = np.zeros(len(done), np.bool_)
    queue = fix.layout.queue_of
    rows = np.flatnonzero(states[job_of] & ~done & (queue >= 0))
    first = np.unique(queue[rows], return_index=True)[1]
    head[rows[first]] = True
    unit = fix.layout.unit_of
    in_unit = unit >= 0
    lead = np.zeros(len(fix.layout.unit_first) + 1, np.bool_)
    lead[unit[head & in_unit]] = True
    head |= in_unit & lead[unit] & ~done
    head |= (queue < 0) & pending
    named = m.events.select("i", "job", "rank", "node").filter(
        pl.Series(head & pending) & (pl.col("node") >= 0)
    )
    per_node = named.group_by("node").agg(standing=pl.len(), ranks=pl.col("rank").unique().sort())
    nodes = (
        m.nodes.join(per_node, on="node")
        .filter(~pl.col("blocks") & (pl.col("need") >= 0))
        .sort("job", "node")
    )
    busy = _busy_units(p, unit, ~done)
    out: list[Finding] = []
    certain = {f.job for f in findings if f.deadlocked}
    explained = {f.job for f in findings if f.kind != "insufficient_evidence"}
    behind = _behind(p, fix, ~done, {f.job for f in findings} - explained)
    for job in nodes["job"].unique().sort():
        old = stale.get(job, set())
        mine = nodes.filter(pl.col("job") == job)
        split = mine.filter((pl.col("finished") > 0) | (pl.col("passed") > 0))
        at = _events_at(p, split["node"].to_list(), head & pending)
        at = [e for e in at if int(p.rank_of[e]) not in old and unit[e] not in busy]
        if at and job not in certain:
            held = {int(p.rank_of[e]) for e in at}
            out.append(_device(p, names, job, held, at))
            continue
        if job in explained:
            continue
        whole = mine.filter(
            (pl.col("finished") == 0)
            & (pl.col("passed") == 0)
            & (pl.col("standing") >= pl.col("present"))
            & ~pl.col("node").is_in(behind)
        )
        at = [
            e
            for e in _events_at(p, whole["node"].to_list(), head & pending)
            if int(p.rank_of[e]) not in old
        ]
        if not at or (old and mine.height):
            continue
        ranks = tuple(sorted({int(p.rank_of[e]) for e in at}))
        out.append(
            Finding(
                job=job,
                kind="in_flight",
                evidence="observed",
                victims=ranks,
                hangs_at=tuple(names.operation(e) for e in at),
                reason="library",
                details={"present": list(ranks)},
                deadlocked=False,
            )
        )
    return out


def _behind(p: Program, fix: Fixpoint, open_: Array, jobs: set[int]) -> list[int]:
    """Nodes with everything they need, of which a member was held up before it came to them.

    Where a source does not record what one stream waits for on another, an operation that was
    issued after one that waits may well wait for it. What was issued before is in flight by itself.

    Args:
        p: the jobs.
        fix: how far they come.
        open_: bool[events], not complete by the states.
        jobs: those with something that waits.
    """
    if not jobs:
        return []
    m = p.matching
    silent = m.prepared.jobs.filter(~pl.col("waits").fill_null(False))["job"]
    rows = (
        m.events.select("job", "rank", "lane", "seq", "node")
        .with_columns(open=pl.Series(open_), waits=pl.Series(open_ & ~fix.completed & fix.issued))
        .filter(pl.col("job").is_in(sorted(jobs)) & pl.col("job").is_in(silent.implode()))
        .sort("job", "rank", "lane", "seq")
        .with_columns(at=pl.int_range(pl.len()).over("job", "rank"))
    )
    parts = rows.filter(pl.col("open") & (pl.col("node") >= 0)).select("job", "rank", "node", "at")
    first = rows.filter("waits").group_by("job", "rank").agg(first=pl.col("at").min())
    held: set[int] = set()
    while True:
        later = parts.join(first, on=["job", "rank"]).filter(pl.col("at") > pl.col("first"))
        found = set(later["node"].to_list())
        if found <= held:
            return sorted(held)
        held |= found
        of_held = parts.filter(pl.col("node").is_in(sorted(held)))
        first = (
            pl.concat([first, of_held.select("job", "rank", first="at")])
            .group_by("job", "rank")
            .agg(pl.col("first").min())
        )


def _busy_units(p: Program, unit: Array, open_: Array) -> set[int]:
    """Batches of which a message is still open on its other side: they end with the last of them.

    That the other side of one message is through does not mean that the device of the batch is
    what holds it back.
    """
    m = p.matching
    rows = m.events.select("node", unit=pl.Series(unit)).filter(
        pl.Series(open_) & (pl.col("unit") >= 0) & (pl.col("node") >= 0)
    )
    others = rows.join(m.nodes.select("node", "finished", "passed"), on="node")
    open_there = (pl.col("finished") == 0) & (pl.col("passed") == 0)
    return set(others.filter(open_there)["unit"].to_list())


def _events_at(p: Program, nodes: list[int], mask: Array) -> list[int]:
    k = p.kernel
    out: set[int] = set()
    for v in nodes:
        part = k["node_part"][k["node_start"][v] : k["node_start"][v + 1]] >> 1
        out.update(int(e) for e in part if mask[e])
    return sorted(out)


def _device(p: Program, names: Names, job: int, held: set[int], at: list[int]) -> Finding:
    present = p.matching.prepared.ranks.filter(pl.col("job") == job)["rank"].to_list()
    return Finding(
        job=job,
        kind="stalled_rank",
        evidence="observed",
        culprits=tuple(sorted(held)),
        victims=tuple(sorted(set(present) - held)),
        hangs_at=tuple(names.operation(e) for e in at),
        first_divergence=names.operation(at[0]) if at else None,
        reason="device",
        details={"completed_elsewhere": [names.operation(e) for e in at]},
        deadlocked=False,
    )


def clock(m: Matching, jobs: list[int]) -> dict[int, tuple[int | None, float | None]]:
    """Per job: when progress stopped (ns), and GPU-hours from then to the last sign of life."""
    if not jobs:
        return {}
    times = m.prepared.engine.collect(
        m.events.lazy()
        .filter(pl.col("job").is_in(jobs))
        .select("job", "t_created", done=pl.when("done").then(pl.col("t_completed")))
        .group_by("job")
        .agg(done=pl.col("done").max(), created=pl.col("t_created").max())
    )
    ends = m.prepared.ranks.group_by("job").agg(last=pl.col("t_last").max(), n=pl.len())
    out: dict[int, tuple[int | None, float | None]] = {}
    joined = (
        m.prepared.jobs.select("job", "world")
        .join(times, on="job")
        .join(ends, on="job", how="left")
    )
    for job, world, done, created, last, n in joined.iter_rows():
        stopped = max((t for t in (done, created) if t is not None), default=None)
        hours = None
        if stopped is not None and last is not None and last >= stopped:
            hours = round((last - stopped) / 3.6e12 * (world or n), 3)
        out[job] = (stopped, hours)
    return out
