"""Side tables of the native JSON Lines reader: jobs, ranks and communicators of what was read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import polars as pl

from dl2gpu.trace.inputs import TraceFile
from dl2gpu.trace.native_lines import Comm, End, Header, Status
from dl2gpu.trace.schema import COMMS, EXIT, JOBS, RANKS, STATUS, conform

__all__ = ["Communicators", "File", "jobs_table", "ranks_table"]


@dataclass(slots=True)
class File:
    """One file on its way into the tables."""

    source: TraceFile
    index: int = -1  # among the files whose header could be read
    job: int = -1
    job_name: str = ""
    rank: int = -1
    header: Header = field(default_factory=lambda: Header(kind="header"))
    comms: list[Comm] = field(default_factory=list)
    statuses: list[Status] = field(default_factory=list)
    end: End | None = None
    skipped: dict[str, int] = field(default_factory=dict)  # unknown kind -> lines
    lost: list[str] = field(default_factory=list)  # what is missing: the file is partly read
    notes: list[str] = field(default_factory=list)
    truncated: bool = False
    refused: bool = False  # by the columnar parser
    dropped: tuple[str, str] | None = None  # (status, reason): the file is not used

    def quarantine(self, reason: str) -> None:
        self.dropped = ("quarantined", reason)


def jobs_table(kept: list[File], jobs: list[tuple[str, str, int]]) -> pl.DataFrame:
    """The jobs table of the files of each job; ``jobs`` has (folder, name, attempt) by number.

    Notes in a file what another one of its job contradicts.
    """
    members: list[list[File]] = [[] for _ in jobs]
    for file in kept:
        members[file.job].append(file)
    rows = []
    for job, (folder, name, attempt) in enumerate(jobs):
        headers = [f.header for f in members[job]]
        sizes = [h.world_size for h in headers if h.world_size is not None]
        for file in members[job]:
            mine = file.header.world_size
            if mine is not None and mine != max(sizes):
                # The larger one: ranks that may be missing are reported, not assumed away.
                file.lost.append(
                    f"world_size is {mine} here and {max(sizes)} in other files of the job, "
                    "which was taken; two jobs in one folder?"
                )
        rows.append(
            {
                "job": job,
                "name": name,
                "folder": folder,
                "attempt": attempt,
                "world_size": max(sizes, default=None),
                "backend": next((h.backend for h in headers if h.backend is not None), None),
                "source": next((h.source for h in headers if h.source is not None), "native"),
                "waits": all(h.waits is not False for h in headers),
                "p2p": all(h.p2p is not False for h in headers),
            }
        )
    return pl.DataFrame(rows, schema=JOBS)


def ranks_table(kept: list[File], events: pl.DataFrame) -> pl.DataFrame:
    """The ranks table, a row a file; ``events`` has the events of all files, with ``__file``."""
    times = [c for c in ("t_created", "t_started", "t_completed") if c in events.columns]
    started = pl.col("t_started").is_not_null().any() if "t_started" in times else pl.lit(False)
    last = pl.max_horizontal(pl.col(times).max()) if times else pl.lit(None, pl.Int64)
    seen: dict[int, tuple[int | None, bool]] = {
        index: (t, timed)
        for index, t, timed in events.group_by("__file")
        .agg(last.alias("t"), started.alias("timed"))
        .iter_rows()
    }
    alive = {f.job for f in kept if f.end is not None and f.end.exit == "alive"}
    rows: list[dict[str, Any]] = []
    for file in kept:
        header, end = file.header, file.end
        t, timed = seen.get(file.index, (None, False))
        if end is None:
            exit_ = "alive" if file.job in alive else "unknown"
        else:
            exit_ = end.exit or "unknown"
            if exit_ not in EXIT:
                file.notes.append(f"the end line's exit {exit_!r} is not known; taken as unknown")
                exit_ = "unknown"
        if end is not None and end.t is not None:
            t = end.t
        elif header.defaults is False:
            t = None
        rows.append(
            {
                "job": file.job,
                "rank": file.rank,
                "exit": EXIT[exit_],
                "code": end.code if end else None,
                "t_last": t,
                "truncated": file.truncated,
                "lost_before": header.lost_before or 0,
                "only_active": bool(header.only_active),
                "timed": (timed or None) if header.timed is msgspec.UNSET else header.timed,
                "path": file.source.path,
            }
        )
    return pl.DataFrame(rows, schema=RANKS)


class Communicators:
    """The comms table of many jobs, and the row that each use of an id means.

    An id is unique in its job. Where ranks declare it with different members all the same (two
    groups of one name, or ranks that disagree), each declaration is a communicator of its own, and
    an operation means the one that its own rank declared.
    """

    def __init__(self, kept: list[File], codes: dict[tuple[int, str], int]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.by_members: dict[tuple[int, str], dict[tuple[int, ...], int]] = defaultdict(dict)
        self.own: dict[tuple[int, str, int], int] = {}  # (job, id, rank) -> row it declared
        self.codes = codes
        for file in kept:
            for comm in file.comms:
                self._declare(file, comm)
        for key in self.by_members:  # an id declared without members is the one that has them
            variants = self.by_members[key]
            if len(variants) > 1:
                self._number(key, variants)

    def _declare(self, file: File, comm: Comm) -> None:
        key = (file.job, str(comm.id))
        members = tuple(comm.ranks or ())
        variants = self.by_members[key]
        row = variants.get(members)
        if row is None and () in variants:
            row = variants[members] = variants.pop(())
            self.rows[row]["ranks"] = list(members)
        elif row is None and not members and variants:
            row = self._guess(variants, file.rank)
        elif row is None:
            if variants:
                file.notes.append(
                    f"declares communicator {key[1]!r} with other members than other ranks do: "
                    "kept apart"
                )
            row = variants[members] = self._add(key, members)
        mine = self.rows[row]
        for name in ("name", "desc"):
            value = getattr(comm, name)
            if mine[name] is None and value is not None:
                mine[name] = str(value)
        self.own.setdefault((*key, file.rank), row)

    def _add(self, key: tuple[int, str], members: tuple[int, ...]) -> int:
        self.rows.append(
            {"job": key[0], "id": key[1], "name": None, "desc": None, "ranks": list(members)}
        )
        return len(self.rows) - 1

    def _number(self, key: tuple[int, str], variants: dict[tuple[int, ...], int]) -> None:
        for number, row in enumerate(variants.values(), 1):
            name = f"{key[1]} ({number})"
            while (key[0], name) in self.by_members:
                name += "'"
            self.rows[row]["id"] = name

    @staticmethod
    def _guess(variants: dict[tuple[int, ...], int], rank: int) -> int:
        return next(
            (row for ranks, row in variants.items() if rank in ranks), min(variants.values())
        )

    def row(self, job: int, comm: str, rank: int) -> int:
        """Row that ``rank`` means by an id; an id that nobody declared becomes a row."""
        own = self.own.get((job, comm, rank))
        if own is not None:
            return own
        variants = self.by_members[job, comm]
        if not variants:
            variants[()] = self._add((job, comm), ())
        return self._guess(variants, rank)

    def rows_for(self, events: pl.DataFrame) -> pl.DataFrame:
        """``events`` with rows of the comms table in place of codes."""
        here = [c for c in ("comm", "new_comm") if c in events.columns]
        if not here or not self.codes:
            return events
        used = {code for c in here for code in events[c].drop_nulls().unique()}
        size = max(self.codes.values()) + 1
        table = np.full(size, -1, np.int32)
        apart: dict[int, tuple[int, str]] = {}
        for (job, comm), code in sorted(self.codes.items()):
            if code not in used:
                continue
            if len(self.by_members.get((job, comm), ())) > 1:
                apart[code] = (job, comm)
            table[code] = self.row(job, comm, -1)
        rows = pl.Series(table, dtype=pl.Int32)
        out = events.with_columns(
            rows.gather(events[c]).alias(c) if events[c].null_count() < events.height else events[c]
            for c in here
        )
        for c in here if apart else ():
            by_rank = events.select(c, "rank")
            pairs = by_rank.filter(pl.col(c).is_in(list(apart))).unique().sort(c, "rank")
            own = [self.row(*apart[code], rank) for code, rank in pairs.iter_rows()]
            pairs = pairs.with_columns(own=pl.Series(own, dtype=pl.Int32))
            own_row = by_rank.join(pairs, on=[c, "rank"], how="left", maintain_order="left")["own"]
            out = out.with_columns(pl.coalesce(own_row, c).alias(c))
        return out

    def table(self) -> pl.DataFrame:
        frame = pl.DataFrame(self.rows, schema={k: v for k, v in COMMS.items() if k != "comm"})
        return conform(frame.with_columns(comm=pl.int_range(pl.len(), dtype=pl.Int32)), "comms")

    def status_table(self, kept: list[File]) -> pl.DataFrame:
        rows = [
            {
                "job": file.job,
                "rank": file.rank,
                "comm": self.row(file.job, str(s.comm), file.rank),
                "last_enqueued": s.last_enqueued,
                "last_started": s.last_started,
                "last_completed": s.last_completed,
            }
            for file in kept
            for s in file.statuses
        ]
        return pl.DataFrame(rows, schema=STATUS)
