"""Findings from records that cover a window of the run, such as a profile.

Such a record ends because the profiler was switched off, not because the rank stopped. What pends
at its end may have completed a moment later, and a call that is absent there may have come. So of
what was found, this stays: operations that met and disagree, a circle of recorded operations, and
a rank that issued nothing while others stood waiting for long inside everybody's window. All else
is said to be insufficient evidence, or possible, and names nobody.

Source: FORMATS.md 3.6 ("not recoverable"), DESIGN.md section 5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import polars as pl

from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.replay import Program
from dl2gpu.trace.schema import EXIT

__all__ = ["timed_window", "within_windows"]

_CIRCLES: Final = ("cycle", "order_inversion", "init_cycle")
_ABSENT: Final = (
    "stalled_rank",
    "missing_participant",
    "crashed_rank",
    "unmatched_p2p",
    "in_flight",
)
_LONG_NS: Final = 1_000_000_000
"""Waiting for less than this, by clocks that may differ, is not waiting."""
_SILENT: Final = "only if the ranks issued nothing more after the end of the profile"
_BUFFERED: Final = "only if the sends that pend at the end of the profile are not buffered"


def timed_window() -> pl.Expr:
    """Of the ranks table: is the record a window that says when it ended?

    Where it does not say (an execution trace), what pends in it is set against nothing, and
    :mod:`observed` and :mod:`waitfor` claim less from the start.
    """
    return (pl.col("exit") == EXIT["window"]).fill_null(False) & pl.col("t_last").is_not_null()


def within_windows(p: Program, findings: list[Finding]) -> list[Finding]:
    """``findings`` as far as the windows bear them out, and jobs of which ranks are missing."""
    ranks = p.matching.prepared.ranks
    timed = ranks.filter(timed_window()).select("job").unique()
    if timed.is_empty():
        return findings
    jobs = p.matching.prepared.jobs.join(timed, on="job", how="semi")
    windowed = dict(jobs.select("job", "world").sort("job").rows())
    out = [_weighed(p, f) if f.job in windowed else f for f in findings]
    found = {f.job for f in out}
    for job, world in windowed.items():
        present = ranks.filter(pl.col("job") == job)["rank"].to_list()
        if job not in found and 0 < len(present) < world:
            out.append(_few_ranks(job, world, present))
    return out


def _weighed(p: Program, f: Finding) -> Finding:
    if "signatures" in f.details:
        return f  # operations that met, and disagree
    if f.kind in _CIRCLES and not _certain(p, f):
        condition = _SILENT if f.evidence == "inferred" else _BUFFERED
        return replace(
            f, kind="potential", condition=condition, deadlocked=None, culprits=(),
            victims=tuple(sorted({*f.culprits, *f.victims})), details=f.details | {"kind": f.kind},
        )  # fmt: skip
    late = f.kind == "stalled_rank" and f.reason != "device"  # a kernel may have gone unrecorded
    if f.kind not in _ABSENT or (late and _waited_long(p, f)):
        return f
    return replace(
        f, kind="insufficient_evidence", evidence="inferred", reason="window", condition=None,
        culprits=(), victims=tuple(sorted({*f.culprits, *f.victims})), deadlocked=None,
        details=f.details | {"kind": f.kind},
    )  # fmt: skip


def _certain(p: Program, f: Finding) -> bool:
    """Is a circle one of the record, and not of where the record ends?

    That the hosts stand in what pends is assumed where it explains their silence; and a send that
    pends may complete before its receive, unless it has pended for long.
    """
    if f.evidence == "inferred":
        return False
    messages = {"send", "recv", "sendrecv"}
    return not any(h["op"] in messages for h in f.hangs_at) or _waited_long(p, f)


def _waited_long(p: Program, f: Finding) -> bool:
    """Did the windows of those that wait and of those that they wait for go on long after?"""
    absent: Any = f.details.get("missing_ranks", f.culprits)
    waiting = {(h["rank"], h["seq"]) for h in f.hangs_at}
    if not absent or not waiting:
        return False
    begun = p.events_of(f.job).filter(
        pl.struct("rank", "seq").is_in(
            pl.Series([{"rank": r, "seq": s} for r, s in sorted(waiting)],
                      dtype=pl.Struct({"rank": pl.Int32, "seq": pl.Int64})).implode()
        )
    )["t_created"]  # fmt: skip
    ends = p.matching.prepared.ranks.filter(
        (pl.col("job") == f.job) & pl.col("rank").is_in([*absent, *(r for r, _ in waiting)])
    )["t_last"]
    if begun.null_count() or ends.null_count() or begun.is_empty() or ends.is_empty():
        return False
    return bool(ends.min() > begun.max() + _LONG_NS)  # type: ignore[operator]


_LISTED: Final = 4096


def _few_ranks(job: int, world: int, present: list[int]) -> Finding:
    """Nothing is wrong with the ranks that have a record; of the others nothing is known."""
    missing = sorted(set(range(min(world, _LISTED + len(present)))) - set(present))
    return Finding(
        job=job, kind="insufficient_evidence", evidence="inferred", reason="few_ranks",
        details={"missing_ranks": missing, "present": len(present), "world": world},
    )  # fmt: skip
