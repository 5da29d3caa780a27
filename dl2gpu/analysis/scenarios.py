"""Readings of what a program leaves open, as far as a plain scan decides them.

Rendezvous against unlimited buffers, independent streams against one stream a rank, host threads
that fill a shared stream in another order, batches that hold back their partners. A job that stops
under one reading only is ``potential``; so is one that stops under some matches of its wildcards
(see :mod:`explore`).

Source: DESIGN.md sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.lockstep_kernel import SCENARIOS
from dl2gpu.analysis.outcomes import outcomes
from dl2gpu.analysis.replay import Fixpoint, Program, Scenario
from dl2gpu.analysis.roots import Cause
from dl2gpu.analysis.tables import ROLE
from dl2gpu.analysis.waitfor import Graph, stands_at
from dl2gpu.trace.schema import EXIT

__all__ = [
    "ONE_QUEUE", "OTHER_MATCH", "OTHER_RETURN", "SHARED_QUEUE", "as_potential",
    "only_unbuffered", "plausible", "smallest_safe_buffer", "still_stuck",
]  # fmt: skip

Array = npt.NDArray[Any]


def still_stuck(g: Graph, cause: Cause, lenient: Fixpoint) -> bool:
    """Does the cause hold as well where sends are buffered and rooted collectives release early?

    It does if the operations at its root have come there too and still do not complete: for a
    circle all of them, for another root any of them. A rank whose record ends alive, in an
    operation that blocks its host, was seen standing there: nothing was buffered.
    """
    strict = g.fix
    k = g.program.kernel
    ranks = g.program.matching.prepared.ranks
    alive = (ranks["job"] == cause.job) & (ranks["exit"] == EXIT["alive"])
    if alive.any():
        return True
    any_part = cause.kind != "cycle"
    held = False
    roots = [k["node_part"][k["node_start"][v] : k["node_start"][v + 1]] >> 1 for v in cause.nodes]
    # what is matched from a mailbox belongs to no node
    boxed = g.program.matching.events["box"].to_numpy() >= 0
    places = {stands_at(g, int(v)) for v in cause.vertices if v < g.node0 and not any_part}
    roots.append(np.array([e for e in sorted(places | {*cause.events}) if boxed[e]], np.int64))
    for part in roots:
        standing = part[strict.started[part] & ~strict.completed[part]]
        if not len(standing):
            continue
        stands = lenient.started[standing] & ~lenient.completed[standing]
        if not any_part and not stands.all():
            return False
        held |= bool(stands.any())
    return held or not any_part


_EXPLORED: Final = 64
"""Schedules that are explored for each size of a job with wildcards."""


def smallest_safe_buffer(p: Program, job: int, early_release: bool) -> int | None:
    """Smallest eager threshold in bytes from which on the job runs to its end; None: there is none.

    Only the sizes of its own sends matter. Larger buffers only ever help where no choice could
    change, so the threshold is bracketed closer and closer, by as many sizes at a time as go in
    lock step. Of a job whose wildcards are not decided, each size is explored.
    """
    lo, hi = p.job_event[job], p.job_event[job + 1]
    if (p.matching.events["box"][int(lo) : int(hi)] >= 0).any():
        from dl2gpu.analysis.explore import Budget
        from dl2gpu.analysis.whatif import safe_from, unsafe_spans

        few = Budget(_EXPLORED)
        return (
            safe_from(unsafe_spans(p, job, "eager_bytes", few, early_release=early_release)) or None
        )
    events = p.matching.events[int(lo) : int(hi)]
    sends = events.filter(pl.Series(p.kernel["role"][lo:hi] == ROLE["send"]))["bytes"]
    sizes = sends.filter(sends > 0).unique().sort().to_numpy()
    if not len(sizes) or not runs(p, job, sizes[-1:], early_release)[0]:
        return None
    at_once = 2 if p.kernel["known"][lo:hi].any() else SCENARIOS
    low, high = 0, len(sizes) - 1
    while low < high:
        places = low + (high - low) * np.arange(at_once) // at_once
        places = np.unique(places[1:] if high - low >= at_once else places)
        good = runs(p, job, sizes[places], early_release)
        high = int(places[good].min(initial=high))
        low = int(places[~good].max(initial=low - 1)) + 1
    return int(sizes[low])


def runs(p: Program, job: int, eager_bytes: Array, early_release: bool) -> Array:
    """bool[sizes]: with which eager thresholds does the job run to its end?"""
    tried = [Scenario(eager_bytes=int(size), early_release=early_release) for size in eager_bytes]
    cells = np.stack([np.full(len(tried), job), np.arange(len(tried))], axis=1)
    through: Array = outcomes(p, tried, cells).completed == p.job_event[job + 1] - p.job_event[job]
    return through


def bytes_text(n: int) -> str:
    """A size for people: 16 MiB, 4 KiB, 12 bytes."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            value = n / size
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
    return f"{n} bytes"


def only_unbuffered(p: Program, f: Finding) -> Finding:
    """The finding where it holds only under rendezvous (or without early release)."""
    if f.kind in ("unmatched_p2p", "mismatch"):
        # wrong under any reading; whether it stops the job depends on the buffers
        return replace(
            f, deadlocked=None, condition="stops the job only where the send is not buffered"
        )
    if f.kind not in ("cycle", "order_inversion", "init_cycle", "missing_participant"):
        return f
    early = "while nobody may leave a rooted collective early"
    safe = smallest_safe_buffer(p, f.job, early_release=False)
    if safe is not None:
        condition = f"only under rendezvous; smallest safe buffer {bytes_text(safe)}"
    elif runs(p, f.job, np.zeros(1, np.int64), early_release=True)[0]:
        condition = f"only {early}"
    else:
        safe = smallest_safe_buffer(p, f.job, early_release=True)
        size = f"; smallest safe buffer {bytes_text(safe)}" if safe is not None else ""
        condition = f"only under rendezvous and {early}{size}"
    return as_potential(f, condition, {"safe_bytes": safe} if safe is not None else {})


def as_potential(f: Finding, condition: str, details: dict[str, Any] | None = None) -> Finding:
    """The finding as one that has not happened."""
    return replace(
        f, kind="potential", condition=condition, deadlocked=None,
        details=f.details | {"kind": f.kind} | (details or {}),
    )  # fmt: skip


ONE_QUEUE: Final = (
    "only if the streams of a rank share one hardware queue, a launch queue fills, or a host "
    "synchronisation comes between"
)


SHARED_QUEUE: Final = (
    "if the communicators share a queue of the device, which no dump tells: all ranks have come, "
    "and nothing completes"
)


OTHER_MATCH: Final = "only if a wildcard receive takes another message that fits"


OTHER_RETURN: Final = "only if a wait for any or some returns other requests that are complete"


STRICTEST: Final = Scenario(one_stream=True, atomic_batch=True)
"""Adds constraints only: what completes under it completes under each of its parts, and without
them. (Where wildcards are, another order may match other messages: see :func:`passed`.)"""


def passed(p: Program, fix: Fixpoint, jobs: Array) -> Array:
    """Those of ``jobs`` (Int32) without wildcards that stand nowhere at the fixpoint ``fix``."""
    n = p.matching.prepared.jobs.height
    job_of_rank = p.matching.prepared.ranks["job"].to_numpy()
    stands = np.zeros(n, np.bool_)
    stands[job_of_rank[fix.layout.lane_rank[fix.lane_at >= 0]]] = True
    stands[job_of_rank[fix.layout.queue_rank[fix.queue_at >= 0]]] = True
    box = p.matching.events["box"].to_numpy()
    if box.max(initial=-1) >= 0:
        stands[p.matching.events["job"].to_numpy()[box >= 0]] = True
    return jobs[~stands[jobs]]


def plausible(p: Program, calm: Array, through: Array) -> Iterator[tuple[Scenario, str, Array]]:
    """(scenario, condition, jobs) of the readings worth running for jobs that run through.

    ``through``: those of ``calm`` that were run under :data:`STRICTEST`, and got through.
    """
    if not len(calm):
        return
    e = p.matching.events
    rows = e.lazy().join(
        pl.LazyFrame({"job": calm}, schema={"job": e.schema["job"]}), on="job", how="semi"
    )

    def jobs(frame: pl.LazyFrame) -> Array:
        found = p.matching.prepared.engine.collect(frame.select("job").unique())["job"].to_numpy()
        return np.sort(found).astype(np.int32)

    doubtful = np.setdiff1d(calm, through)
    several = batches = shared = np.zeros(0, np.int32)
    if len(doubtful):
        unsure = rows.filter(pl.col("job").is_in(doubtful))
        batches = jobs(unsure.filter(pl.col("group").is_not_null()))
        several = jobs(
            unsure.filter(pl.col("stream").is_not_null())
            .group_by("job", "rank")
            .agg(n=pl.col("stream").n_unique())
            .filter(pl.col("n") > 1)
        )
    if len(several):
        yield (
            Scenario(one_stream=True),
            ONE_QUEUE,
            several,
        )
    if e["lane"].min() != e["lane"].max():
        shared = jobs(
            rows.filter(pl.col("stream").is_not_null())
            .group_by("job", "rank", "stream")
            .agg(n=pl.col("lane").n_unique())
            .filter(pl.col("n") > 1)
        )
    top = int(p.rank_of.max(initial=0)) if len(shared) else 0
    for bit in range(top.bit_length()):
        yield (
            Scenario(flip_lanes=bit),
            "only if the host threads that share a stream enqueue in another order on some ranks",
            shared,
        )
    if len(batches):
        yield (
            Scenario(atomic_batch=True),
            "only if an incomplete batch holds back the partners of its matched members",
            batches,
        )
