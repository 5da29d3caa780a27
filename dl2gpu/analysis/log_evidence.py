"""What the logs of a job state, put in order for the rules of :mod:`logs`.

The tables of a trace become one small record a job: who timed out in what, who never did, who died,
who ended well, who was still at work. Only jobs in whose logs a failure is left are looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl

from dl2gpu.trace.schema import Trace, op_name

__all__ = ["Evidence", "Wait", "evidence"]

_FAILURES: Final = (
    "timeout", "gloo_timeout", "barrier_failed", "barrier_waited", "store_timeout", "store_wait",
    "unique_id", "store_key", "mesh_failed", "differs", "gloo_size", "remote_error", "peer_closed",
    "crash", "stuck", "stall_ready", "stall_missing", "stall_item", "block_wait", "fsdp_order",
    "print_stopped", "desync_timeout", "desync_never", "desync_joined", "desync_behind",
    "desync_started", "exit_local", "exit_any", "signal", "observed", "let_down", "cancelled",
)  # fmt: skip
_MOST_RANKS: Final = 1 << 14


@dataclass(frozen=True)
class Wait:
    """One operation in which one rank gave up waiting."""

    rank: int
    comm: int | None
    ordinal: int | None
    op: str | None
    count: int | None
    count_out: int | None
    since: int | None
    """When the wait began, ns; None where the line has no time."""
    t: int | None
    text: str = ""


@dataclass
class Evidence:
    """The statements about one attempt of one job."""

    job: int
    world: int | None
    """Number of ranks, where lines state it."""
    ranks: set[int]
    """Ranks of which there is a line, or a file."""
    waits: list[Wait] = field(default_factory=list)
    said: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Statements by kind, in the order of files and lines."""
    members: dict[int, set[int]] = field(default_factory=dict)
    """Of a communicator, where they are known."""
    labels: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Of a communicator: id, and name for people."""
    enqueued: dict[tuple[int, int | None], int] = field(default_factory=dict)
    """(rank, communicator or None for the last word of the rank) to the last operation enqueued."""
    completed: dict[tuple[int, int | None], int] = field(default_factory=dict)
    torn: set[int] = field(default_factory=set)
    """Ranks whose file ends in the middle of a line."""

    @property
    def everyone(self) -> set[int]:
        """All ranks of the job as far as known."""
        if self.world is None or self.world > _MOST_RANKS:
            return set(self.ranks)
        return self.ranks | set(range(self.world))

    @property
    def whole(self) -> bool:
        """Is the number of ranks known?"""
        return self.world is not None

    def group(self, comm: int | None) -> tuple[str | None, str | None]:
        """Id of a communicator, and its name for people."""
        return self.labels.get(comm, (None, None)) if comm is not None else (None, None)

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [row for kind in kinds for row in self.said.get(kind, ())]

    def who(self, *kinds: str) -> set[int]:
        """Ranks that make such a statement."""
        return {row["rank"] for row in self.of(*kinds) if row["rank"] is not None}


def evidence(trace: Trace, jobs: pl.Series) -> Iterator[Evidence]:
    """The evidence on those of ``jobs`` in whose logs a failure is left."""
    said = trace.said.filter(pl.col("job").is_in(jobs.implode()))
    troubled = said.filter(pl.col("what").is_in(_FAILURES))["job"].unique()
    if troubled.is_empty():
        return
    said = said.filter(pl.col("job").is_in(troubled.implode()))
    strings = trace.strings.sort("code")["text"].to_list()
    comms = trace.comms.filter(pl.col("job").is_in(troubled.implode()))
    ranks = trace.ranks.filter(pl.col("job").is_in(troubled.implode()))
    worlds = dict(trace.jobs.select("job", "world_size").iter_rows())
    by_job = said.sort("job", "file", "line", maintain_order=True).partition_by("job", as_dict=True)
    for (job,), rows in sorted(by_job.items()):
        found = Evidence(
            job=int(job),
            world=worlds[job],
            ranks=set(ranks.filter(pl.col("job") == job)["rank"]),
            torn=set(ranks.filter((pl.col("job") == job) & pl.col("truncated"))["rank"]),
        )
        for comm, ident, name, desc, members in (
            comms.filter(pl.col("job") == job)
            .select("comm", "id", "name", "desc", "ranks")
            .iter_rows()
        ):
            found.labels[comm] = (ident, f"{desc} ({ident})" if desc else name or ident)
            if members:
                found.members[comm] = set(members)
        kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows.iter_rows(named=True):
            row["op"] = None if row["op"] is None else op_name(row["op"], strings)
            kinds[row["what"]].append(row)
        found.said = dict(kinds)
        _waits(found)
        _counters(found)
        yield found


def _waits(found: Evidence) -> None:
    seen: set[tuple[Any, ...]] = set()
    for row in found.of("timeout"):
        key = (row["rank"], row["comm"], row["ordinal"], row["op"])
        if row["rank"] is None or key in seen:
            continue
        seen.add(key)
        t, ran = row["t"], row["number"]
        found.waits.append(
            Wait(
                row["rank"], row["comm"], row["ordinal"], row["op"], row["count"],
                row["count_out"], None if t is None or ran is None else t - ran * 1_000_000, t,
                row["text"],
            )
        )  # fmt: skip


def _counters(found: Evidence) -> None:
    for row in found.of("status", "observed", "signal", "progress"):
        if row["rank"] is None:
            continue
        # the line on a dump signal is always of the default group, whatever it counts
        comm = row["comm"] if row["what"] == "status" else None
        if row["enqueued"] is not None:
            found.enqueued[row["rank"], comm] = row["enqueued"]
        if row["completed"] is not None:
            found.completed[row["rank"], comm] = row["completed"]
