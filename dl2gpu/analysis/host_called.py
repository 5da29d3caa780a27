"""Records of calls alone: what may be claimed of a job of which only the host's calls are known.

A library's log says that a host called, never that a device finished, and mostly ends in the middle
of a run: of a job that is alive the ranks stand where they happened to be. Unless something else
says that the job stands still, nothing follows from a rank that is behind. What does follow, of any
such log: calls that disagree at one position, circles of the devices' own queues, and ranks that
ended.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import polars as pl

from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.logs import from_logs
from dl2gpu.analysis.matching import Matching
from dl2gpu.trace.schema import FLAG, STATE

__all__ = ["at_any_time", "sifted", "with_statements"]

_AGREE: Final = 0.75
"""Share of a communicator's operations that agree, where its members were told by size alone."""
_OF_CALLS: Final = ("mismatch", "cycle", "order_inversion", "init_cycle", "unmatched_p2p")
_OF_ENDS: Final = ("missing_participant", "unmatched_p2p")
_ELSE: Final = ("crashed_rank", "insufficient_evidence", "potential")


def _jobs(m: Matching) -> pl.Series:
    """Jobs whose events are calls of a library: other logs have no point to point."""
    return m.prepared.jobs.filter((pl.col("source") == "log") & pl.col("p2p"))["job"]


def at_any_time(m: Matching) -> set[int]:
    """Jobs whose record is one of calls that may end anywhere: nothing says that they stand still.

    A reader that knows it marks the operations that are pending as scheduled.
    """
    of_calls = _jobs(m)
    if of_calls.is_empty() or m.events.is_empty():
        return set()
    still = (
        m.events.lazy()
        .filter(
            pl.col("state").is_in([STATE["scheduled"], STATE["started"]])
            & pl.col("job").is_in(of_calls.implode())
        )
        .select(pl.col("job").unique())
        .collect()
    )
    return set(of_calls) - set(still["job"])


def sifted(m: Matching, findings: list[Finding]) -> tuple[list[Finding], set[int]]:
    """Findings that hold on calls alone, and the jobs of those that do not."""
    jobs = _jobs(m)
    if jobs.is_empty() or not findings:
        return findings, set()
    of_calls, alive = set(jobs), at_any_time(m)
    doubted, warnings = _doubted(m), _warnings(m)
    kept: list[Finding] = []
    dropped: set[int] = set()
    for f in findings:
        if f.job not in of_calls:
            kept.append(f)
            continue
        at = [*f.hangs_at, *([f.first_divergence] if f.first_divergence else [])]
        unsure = any((f.job, h["comm"]) in doubted for h in at)
        if unsure or (f.job in alive and not _holds(f)):
            dropped |= {f.job} if f.deadlocked is not False or f.kind != "mismatch" else set()
        else:
            kept.append(_with_warnings(_as_seen(f), warnings))
    return kept, dropped


def _with_warnings(f: Finding, warnings: dict[int, list[str]]) -> Finding:
    """The finding with what the library warned of: a hint, whose cause may be another."""
    if f.job not in warnings:
        return f
    return replace(f, details=f.details | {"nccl_warnings": warnings[f.job]})


def _warnings(m: Matching) -> dict[int, list[str]]:
    """Job to the first few of the library's warnings."""
    said = m.prepared.trace.said.filter(pl.col("what") == "nccl_warning")
    told = said.group_by("job").agg(pl.col("text").drop_nulls().unique(maintain_order=True).head(4))
    return dict(told.iter_rows())


def with_statements(m: Matching, findings: list[Finding], open_jobs: set[int]) -> list[Finding]:
    """``findings``, and what other lines of the logs say of jobs that the calls leave open.

    ``open_jobs``: jobs in which ranks wait, and the calls do not say why.
    """
    trace = m.prepared.trace
    told = {f.job for f in findings}
    left = sorted(at_any_time(m) - told)
    if not left or trace.said.is_empty():
        return findings
    found = from_logs(trace, pl.Series(left, dtype=pl.Int32))
    silent = (open_jobs & set(left)) - {f.job for f in found}
    stopped = trace.said.filter(pl.col("what").is_in(_STOPPED) & pl.col("job").is_in(list(silent)))
    for job in stopped["job"].unique().sort():
        rows = stopped.filter(pl.col("job") == job)
        found.append(
            Finding(
                job=job, kind="insufficient_evidence", evidence="inferred", reason="cut_off",
                details={"excerpts": rows["text"].drop_nulls().unique().sort().head(4).to_list()},
            )
        )  # fmt: skip
    return findings + found


_STOPPED: Final = ("cancelled", "oom_killed", "exit_local", "exit_any", "signal", "crash", "term")
"""Statements on a job that did not come to its end by itself."""


def _as_seen(f: Finding) -> Finding:
    """The finding at the level of a record; a program would prove it."""
    if f.evidence == "proven":
        f = replace(f, evidence="observed")
    if f.kind == "stalled_rank" and f.reason == "stalled":
        # calls do not show whether such a rank is alive
        f = replace(f, kind="missing_participant", evidence="inferred", deadlocked=None)
    if f.kind == "order_inversion" and any(h["op"] in ("send", "recv") for h in f.hangs_at):
        # the other half of the message is not in the record: it may have been left out altogether
        f = replace(f, kind="cycle")
    return f


def _holds(f: Finding) -> bool:
    """Does the finding hold whatever the ranks did after their last recorded call?"""
    if f.kind in _ELSE:
        return True
    if f.evidence == "inferred":
        return False
    if f.kind in _OF_ENDS and f.reason in ("finished", "no_partner", "skipped_call"):
        return True
    return f.kind in _OF_CALLS and f.kind != "unmatched_p2p"


def _doubted(m: Matching) -> set[tuple[int, str]]:
    """(job, communicator) whose members were told by size and order, and do not agree much."""
    guessed = (
        m.events.filter((pl.col("flags") & FLAG["synthetic_comm"]) != 0)["comm"]
        .drop_nulls()
        .unique()
    )
    if guessed.is_empty():
        return set()
    share = (
        m.nodes.filter(pl.col("comm").is_in(guessed.implode()) & (pl.col("present") > 1))
        .group_by("comm")
        .agg(agree=1 - pl.col("differs").mean(), first=pl.col("differs").sort_by("k").first())
    )
    good = share.filter((pl.col("agree") >= _AGREE) & ~pl.col("first"))["comm"]
    bad = m.prepared.comms.filter(
        pl.col("comm").is_in(np.setdiff1d(guessed.to_numpy(), good.to_numpy()))
    )
    return set(bad.select("job", "id").iter_rows())
