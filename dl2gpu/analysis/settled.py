"""What a job has behind it where it stops: a beginning that no change further on can touch.

A repair changes operations where a job stops, and what it leads to is seen from there on. The
operations before are completed whatever the reading, and share nothing with what follows: each
collective and message lies in the beginning with all its parts, or not at all. Such a beginning can
be left out of the copies of a job in which repairs are tried. Jobs stop soon after their fault, so
what is left is short.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from dl2gpu.analysis.replay import Fixpoint, Program
from dl2gpu.analysis.tables import is_lossy
from dl2gpu.engine.arrays import Array
from dl2gpu.trace.schema import MODE, OP

__all__ = ["beginnings", "without_beginning"]

_ROUNDS: Final = 64
"""Times that the beginnings are taken back before a job is left whole."""


def beginnings(p: Program, strict: Fixpoint, jobs: Array) -> dict[int, pl.DataFrame]:
    """By job: ``rank`` Int32 and ``seq`` Int64 of each rank's first operation that matters.

    Args:
        p: the program.
        strict: its fixpoint under the strictest reading, of those jobs at least.
        jobs: int[], their numbers.

    Jobs of which nothing can be left out are not there: those with wildcards or waits for some of
    several requests, whose outcome is a choice; with several lanes, records without a beginning,
    operations numbered by their source, or communicators whose members are not known.
    """
    m = p.matching
    e = m.events
    out: dict[int, pl.DataFrame] = {}
    jobs = _of_orders(p, jobs)
    if not len(jobs):
        return out
    lo, hi = p.job_event[jobs].astype(np.int64), p.job_event[jobs + 1].astype(np.int64)
    rows = np.concatenate([np.arange(a, b) for a, b in zip(lo, hi, strict=True)])
    rank = p.r[rows]
    head = np.flatnonzero(np.diff(rank, prepend=-1))
    of = np.repeat(np.arange(len(head)), np.diff(np.append(head, len(rows))))
    place = np.arange(len(rows))
    # nodes, messages and batches that lie in the beginning as a whole, or not at all
    held = [(m.nodes.height, [e[c].to_numpy()[rows] for c in ("node", "node2")])]
    if len(p.group):
        batches, number = _batches(rank, p.group[rows])
        held.append((batches, [number]))
    seq = e["seq"].to_numpy()[rows]
    same = np.flatnonzero((seq[1:] == seq[:-1]) & (of[1:] == of[:-1])) + 1
    last = np.append(head[1:], len(rows)) - 1
    open_ = ~strict.completed[rows] | ~_by_all(p, rows)
    cut = np.minimum(_first(open_, head, len(rows)), last)
    for _ in range(_ROUNDS):
        bad = place >= cut[of]
        bad[same - 1] |= bad[same]
        for many, columns in held:
            hit = np.zeros(many + 1, np.bool_)  # the last is of those without, whose number is -1
            for c in columns:
                hit[c[bad]] = True
            hit[many] = False
            for c in columns:
                bad |= hit[c]
        new = np.minimum(_first(bad, head, len(rows)), cut)
        if (new == cut).all():
            break
        cut = new
    else:
        return out
    job_of = e["job"].to_numpy()[rows[head]]
    table = pl.DataFrame({"rank": e["rank"].to_numpy()[rows[head]], "seq": seq[cut]})
    for job in jobs.tolist():
        mine = np.flatnonzero(job_of == job)
        if (cut[mine] > head[mine]).any():
            out[job] = table[mine]
    return out


def without_beginning(events: pl.DataFrame, begin: pl.DataFrame) -> pl.DataFrame:
    """The events of a job from where each of its ranks begins, in the order they came in."""
    begin = begin.sort("rank")
    at = np.searchsorted(begin["rank"].to_numpy(), events["rank"].to_numpy())
    return events.filter(pl.Series(events["seq"].to_numpy() >= begin["seq"].to_numpy()[at]))


def _of_orders(p: Program, jobs: Array) -> Array:
    """Those of the jobs whose beginnings are a matter of order alone."""
    m = p.matching
    lossy = m.prepared.ranks.filter(is_lossy())["job"].unique().to_numpy()
    unknown = m.prepared.comms.filter(pl.col("size") == 0)["comm"].to_list()
    waits = (pl.col("op") == OP["wait"]) & (pl.col("mode").fill_null(0) != MODE["all"])
    fits = (
        (pl.col("box") < 0)
        & ~waits
        & (pl.col("lane") == pl.col("lane").first())
        & pl.col("ordinal").is_null()
        & ~pl.col("comm").is_in(unknown).fill_null(False)
    ).all()
    left = [j for j in np.setdiff1d(jobs, lossy) if p.events_of(j).select(fits).item()]
    return np.array(left, np.int64)


def _by_all(p: Program, rows: Array) -> Array:
    """bool[rows]: no collective, or one to which each member of its communicator has come.

    What a member leaves out, as an operation on nothing, would count where others are counted.
    """
    m = p.matching
    op, node = (m.events[c].to_numpy()[rows] for c in ("op", "node"))
    if not m.nodes.height:
        return op < OP["all_reduce"]
    whole = (m.nodes["present"] == m.nodes["members"]).fill_null(False).to_numpy()
    out: Array = (op < OP["all_reduce"]) | ((node >= 0) & whole[np.maximum(node, 0)])
    return out


def _first(mask: Array, head: Array, n: int) -> Array:
    """int64[len(head)]: the first place in each run at which ``mask`` holds, else ``n``."""
    at = np.where(mask, np.arange(n), n)
    out: Array = np.minimum.reduceat(at, head)
    return out


def _batches(rank: Array, group: Array) -> tuple[int, Array]:
    """How many batches there are, and the number of each operation's; -1: of none."""
    some = group >= 0
    names, name = np.unique(group[some], return_inverse=True)
    key = rank[some].astype(np.int64) * len(names) + name
    found, number = np.unique(key, return_inverse=True)
    out = np.full(len(rank), -1, np.int64)
    out[some] = number
    return len(found), out
