"""Communication calls in program order, as execution traces record them, to the tables of a trace.

A reader gives one :class:`Record` a file: the calls that one process issued, and the process groups
that they use. Ranks and communicators are resolved as those of Flight Recorder dumps are
(:mod:`flight_recorder_comms`), so that one job reads alike from either. What such a record cannot
tell (where its window begins in the life of the job, what comes after it) is marked, not guessed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import polars as pl

from dl2gpu.trace.files import load_ahead
from dl2gpu.trace.flight_recorder_comms import (
    Comm,
    Dump,
    Job,
    MemberLists,
    comms_table,
    resolve,
    status_of,
)
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.schema import (
    ANY,
    DTYPE_BYTES,
    EVENTS,
    EXIT,
    FLAG,
    JOBS,
    MODE,
    OP,
    RANKS,
    STATE,
    StringTable,
    Trace,
    conform,
    dtype_code,
    empty,
    op_code,
)

__all__ = [
    "LARGEST_GROUP",
    "Call",
    "Group",
    "Record",
    "Wait",
    "assemble",
    "doubt_ranks",
    "natural",
    "records_of",
]

LARGEST_GROUP: Final = 1 << 20
_MOST: Final = 1 << 62
_P2P: Final = frozenset({"send", "recv"})
_SIZED: Final = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"})


def natural(value: Any, most: int = _MOST) -> int | None:
    """``value`` if it is a whole number from 0 to ``most``, else None."""
    return value if type(value) is int and 0 <= value <= most else None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A process group as one process knows it: one object for all its calls."""

    name: str
    desc: str = ""
    ranks: tuple[int, ...] | None = None
    """Members' global ranks in group order; None: unknown."""
    size: int | None = None
    local: bool = False
    """The name is one of this process: others call the group differently."""


@dataclass(slots=True)
class Call:
    """One call. ``peer`` and ``root`` are ranks within the group (a peer may be a global one)."""

    op: str
    """Canonical name, or an unknown operation's own."""
    group: Group
    known: bool = True
    peer: int | None = None
    global_peer: bool = False
    tag: int | None = None
    root: int | None = None
    reduce_op: str | None = None
    count: int | None = None
    count_out: int | None = None
    dtype: str | None = None
    bytes: int | None = None
    splits: list[int] | None = None
    number: int | None = None
    """The source's number of it in its group."""
    batch: int | None = None
    host: bool = False
    """It occupies the host, not a device queue."""
    blocking: bool | None = None
    """Of a host call: does the host wait for it; None: not recorded."""
    stream: str | None = None
    """Device queue, where the source names it."""
    duration_ns: int | None = None
    flags: int = 0


@dataclass(slots=True)
class Wait:
    """A wait for earlier calls, by their position; it orders device queues, the host goes on."""

    before: int
    """Position of the call that follows it."""
    calls: list[int]


@dataclass(slots=True)
class Record:
    """What one file holds."""

    file: TraceFile
    calls: list[Call] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    rank: int | None = None
    """Global rank, where the content tells."""
    backend: str | None = None
    separate: bool = False
    """Point to point has a counter of its own, so that it does not move that of collectives."""
    whole: bool = False
    """The record holds the whole program from its beginning."""
    refused: str | None = None
    lost: list[str] = field(default_factory=list)
    """What could not be read of it."""
    written: int = 0
    """When it was written, in whatever unit its source has: the latest of a rank counts."""
    size: int = 0


def records_of(
    files: Sequence[TraceFile],
    load: Callable[[TraceFile], bytes],
    record: Callable[[TraceFile, bytes], Record],
) -> list[Record]:
    """The record of each file, in order; one that cannot be read says why in ``refused``."""
    records = []
    for file, content in zip(files, load_ahead(files, load), strict=True):
        try:
            if isinstance(content, InputError):
                raise content
            records.append(record(file, content))
        except InputError as error:
            records.append(Record(file, refused=str(error)))
    return records


def doubt_ranks(records: list[Record]) -> None:
    """Ranks that the contents give to several processes of a job are left to the names."""
    seen = Counter((r.file.folder, r.file.job, r.file.attempt, r.rank) for r in records)
    twice = {key[:3] for key, n in seen.items() if key[3] is not None and n > 1}
    for record in records:
        if (record.file.folder, record.file.job, record.file.attempt) in twice:
            record.rank = None


def assemble(
    records: Sequence[Record], source: str, load: Callable[[TraceFile], bytes]
) -> tuple[Trace, list[Input]]:
    """The trace of ``records``, and what became of each file, in their order.

    Files of one folder, job name and attempt are one job.
    """
    dumps, jobs = [], _jobs(records)
    for index, (record, job) in enumerate(zip(records, jobs, strict=True)):
        dump = Dump(index=index, file=record.file)
        dump.job = job
        dump.refused, dump.n, dump.size = record.refused, len(record.calls), record.size
        dump.newest = record.written
        job.dumps.append(dump)
        dumps.append(dump)
    distinct = list(dict.fromkeys(jobs))
    by_dump = {dump.index: record for dump, record in zip(dumps, records, strict=True)}
    for job in distinct:
        _name_whole_groups([by_dump[d.index] for d in job.dumps])
        for dump in job.dumps:
            _describe(dump, by_dump[dump.index])
    resolve(distinct, load)
    for dump, record in zip(dumps, records, strict=True):
        if dump.refused is not None and record.refused is None and not record.calls:
            # which rank it was makes no difference where it did not communicate
            dump.refused, dump.ignored = None, "no communication in it, and no rank in its name"
    kept = sorted(
        ((d, by_dump[d.index]) for d in dumps if d.kept),
        key=lambda pair: (pair[0].job.index, pair[0].rank or 0),
    )
    for job in distinct:
        _forget_lone(job)
    strings = StringTable()
    rows = _Rows(strings)
    of_job: dict[int, list[tuple[Dump, Record]]] = defaultdict(list)
    for dump, record in kept:
        of_job[dump.job.index].append((dump, record))
    for job in distinct:
        members = of_job[job.index]
        ordinals = _ordinals(members)
        for dump, record in members:
            rows.add(dump, record, ordinals[dump.index])
    comms = [comm for job in distinct for comm in job.comms]
    trace = Trace(
        events=rows.frame(),
        jobs=_jobs_table(distinct, of_job, source),
        ranks=_ranks_table(kept),
        comms=comms_table(comms),
        strings=strings.frame(),
    )
    return trace, [_input(d, r, source) for d, r in zip(dumps, records, strict=True)]


def _jobs(records: Iterable[Record]) -> list[Job]:
    """The job of each record; jobs are numbered in order of their first file."""
    known: dict[tuple[str, str | None, int], Job] = {}
    out = []
    for record in records:
        file = record.file
        key = (file.folder, file.job, file.attempt or 0)
        if key not in known:
            known[key] = Job(len(known), file.job or file.folder, file.folder, key[2])
        out.append(known[key])
    return out


# --------------------------------------------------------------------------------------------------
# Groups


def _name_whole_groups(records: list[Record]) -> None:
    """The groups without a name that span the whole job are its default group.

    Old traces know a group by its address in one process. Where a process has one such group, and
    it has as many members as the job has processes, there is nothing else it could be.
    """
    number = sum(r.refused is None for r in records)
    for record in records:
        groups = {c.group for c in record.calls}
        nameless = {g for g in groups if g.local and g.ranks is None}
        sizes = {g.size for g in nameless}
        if len(nameless) != 1 or sizes != {number} or number < 2:
            continue
        default = Group("0", "default_pg", tuple(range(number)), number)
        if any(g.name == "0" for g in groups):
            continue
        for call in record.calls:
            if call.group in nameless:
                call.group = default
                call.flags |= FLAG["synthetic_comm"]


def _describe(dump: Dump, record: Record) -> None:
    """Tell ``dump`` of the groups that its record uses: the process is a member of each."""
    groups = list(dict.fromkeys(c.group for c in record.calls))
    config = {g.name: {"desc": g.desc, "ranks": list(g.ranks)} for g in groups if g.ranks}
    dump.header = {"pg_config": config}
    if record.rank is not None:
        dump.header["rank"] = record.rank
    dump.groups = [(g.name, g.desc, None) for g in groups]


def _forget_lone(job: Job) -> None:
    """A job of one record has no size of its own: its default group is of unknown members."""
    if len([d for d in job.dumps if d.kept]) != 1:
        return
    for comm in job.comms:
        if comm.synthetic:
            comm.members, comm.synthetic = MemberLists().of(None), False
    if not any(comm.ranks for comm in job.comms):
        job.world_size = None


# --------------------------------------------------------------------------------------------------
# Numbers of the collectives


def _ordinals(members: list[tuple[Dump, Record]]) -> dict[int, list[int | None]]:
    """Numbers of the calls of each dump that the members of their communicators can compare.

    They are the source's own where it counts collectives only; else the position, if no start is
    lost, or if the whole records of all members agree anyway. Else there are none.
    """
    out: dict[int, list[int | None]] = {d.index: [None] * len(r.calls) for d, r in members}
    uses: dict[Comm, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    mixed: set[Comm] = set()
    begins: set[tuple[int, Comm]] = set()
    by_index = {d.index: (d, r) for d, r in members}
    for dump, record in members:
        comm_of = _comm_of(dump, record)
        begins |= {(dump.index, comm) for comm in _beginnings(record, comm_of)}
        for at, call in enumerate(record.calls):
            comm = comm_of[call.group]
            if call.op not in _P2P:
                uses[comm][dump.index].append(at)
            elif not record.separate:
                mixed.add(comm)
    for comm, users in uses.items():
        present = {d.rank: d.index for d, _ in members}
        here = [present[r] for r in comm.ranks if r in present] if comm.ranks else list(users)
        used = {i: [by_index[i][1].calls[at] for at in users[i]] for i in here if i in users}
        from_start = all((i, comm) in begins for i in here)
        steady = from_start or all(by_index[i][1].separate for i in used)
        if comm not in mixed and _numbered(list(used.values()), steady):
            for index, ats in users.items():
                for at in ats:
                    out[index][at] = by_index[index][1].calls[at].number
            continue
        if not from_start:
            signs = {tuple(map(_sign, used.get(i, ()))) for i in here}
            if len(signs) != 1 or not comm.ranks:
                continue
        for index, ats in users.items():
            for position, at in enumerate(ats):
                out[index][at] = position
                by_index[index][1].calls[at].flags |= FLAG["ordinal_inferred"]
    return out


def _numbered(members: list[list[Call]], steady: bool) -> bool:
    """Can the source's numbers be compared between the members' calls?

    Where they also count messages (``steady`` is false), and the start of a record is lost, what
    came before may have moved them on some members only. Then the members must agree at the first
    number that all have.
    """
    for calls in members:
        numbers = [c.number for c in calls]
        known = [n for n in numbers if n is not None]
        if len(known) != len(numbers) or known != sorted(known):
            return False
    if steady or len(members) < 2:
        return True
    first = max(c[0].number or 0 for c in members)
    return len({_sign(c) for calls in members for c in calls if c.number == first}) <= 1


def _comm_of(dump: Dump, record: Record) -> dict[Group, Comm]:
    groups = dict.fromkeys(c.group for c in record.calls)
    return dict(zip(groups, dump.group_comms, strict=True))


def _beginnings(record: Record, comm_of: dict[Group, Comm]) -> set[Comm]:
    """Communicators of which the record is known to hold the first call."""
    if record.whole:
        return set(comm_of.values())
    first: dict[Comm, int] = {}
    unnumbered: set[Comm] = set()
    for call in record.calls:
        comm = comm_of[call.group]
        if call.number is None:  # the others then say nothing
            unnumbered.add(comm)
        else:
            first[comm] = min(call.number, first.get(comm, call.number))
    return {comm for comm, number in first.items() if number <= 1} - unnumbered


def _sign(call: Call) -> tuple[Any, ...]:
    count = call.count if call.op in _SIZED else None
    return (call.op, call.root, call.dtype, count)


def _lost_before(record: Record) -> int:
    """0 where the record is known to begin with the first call of each group it uses, else 1."""
    if record.whole:
        return 0
    first: dict[tuple[Group, bool], int] = {}
    for call in record.calls:
        if call.number is None:
            return 1
        key = (call.group, record.separate and call.op in _P2P)
        first[key] = min(call.number, first.get(key, _MOST))
    return int(not first or max(first.values()) > 1)


# --------------------------------------------------------------------------------------------------
# Tables

_LISTS: Final = (
    "job", "rank", "lane", "seq", "op", "stream", "blocking", "request", "requests", "mode", "comm",
    "ordinal", "peer", "tag", "root", "reduce_op", "count", "count_out", "dtype", "bytes", "splits",
    "group", "state", "flags",
)  # fmt: skip
_SIZES: Final = list(DTYPE_BYTES.values())


class _Rows:
    """The event table, column by column."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._columns: dict[str, list[Any]] = {name: [] for name in _LISTS}

    def add(self, dump: Dump, record: Record, ordinals: list[int | None]) -> None:
        """The calls and waits of one file."""
        comm_of = _comm_of(dump, record)
        waits = {w.before: w.calls for w in record.waits if w.calls}
        for at, call in enumerate(record.calls):
            if at in waits:
                self._wait(dump, at, waits[at])
            comm = comm_of[call.group]
            own = dump.rank if dump.rank is not None else -1
            peer = _global(call.peer, comm) if not call.global_peer else call.peer
            if peer is not None and peer != ANY and comm.ranks and peer not in comm.members:
                peer = None
            self._call(dump, at, call, comm, peer, ordinals[at], own)
        if len(record.calls) in waits:
            self._wait(dump, len(record.calls), waits[len(record.calls)])

    def _call(
        self, dump: Dump, at: int, call: Call, comm: Comm, peer: int | None, ordinal: int | None,
        own: int,
    ) -> None:  # fmt: skip
        strings = self._strings
        p2p = call.op in _P2P
        stream = None
        if not call.host:
            stream = call.stream or comm.id
            if p2p and call.batch is None and call.stream is None and peer is not None:
                stream = f"{comm.id}:{min(own, peer)}-{max(own, peer)}"
        dtype = None if call.dtype is None else dtype_code(call.dtype, strings)
        size = call.bytes
        if size is None and call.count is not None and dtype is not None and dtype < len(_SIZES):
            size = natural(call.count * _SIZES[dtype])
        flags = call.flags | FLAG["synthetic_comm"] * comm.synthetic
        flags |= FLAG["unknown_op"] * (not call.known)
        if call.host:
            flags |= FLAG["blocking_inferred"] * (call.blocking is None)
        elif call.stream is None:
            flags |= FLAG["stream_inferred"]
        self._put(
            job=dump.job.index,
            rank=own,
            lane=0,
            seq=at,
            op=op_code(call.op, strings),
            stream=None if stream is None else strings.code(stream),
            blocking=bool(call.host and call.blocking),
            request=at,
            comm=comm.index,
            ordinal=None if p2p else ordinal,
            peer=peer if p2p else None,
            tag=call.tag if p2p else None,
            root=None if call.root is None else _global(call.root, comm),
            reduce_op=None if call.reduce_op is None else strings.code(call.reduce_op),
            count=call.count,
            count_out=call.count_out if call.count_out != call.count else None,
            dtype=dtype,
            bytes=size,
            splits=call.splits,
            group=call.batch,
            state=STATE["unknown"],
            flags=flags,
        )

    def _wait(self, dump: Dump, before: int, calls: list[int]) -> None:
        # in a lane of its own: it holds up nothing of the host
        self._put(
            job=dump.job.index,
            rank=dump.rank,
            lane=1,
            seq=before,
            op=OP["wait"],
            blocking=False,
            requests=calls,
            mode=MODE["all"],
            state=STATE["unknown"],
            flags=0,
        )

    def _put(self, **values: Any) -> None:
        for name, column in self._columns.items():
            column.append(values.get(name))

    def frame(self) -> pl.DataFrame:
        schema = {name: EVENTS[name] for name in _LISTS}
        return conform(pl.DataFrame(self._columns, schema=schema, strict=False), "events").sort(
            "job", "rank", "seq", "lane"
        )


def _global(rank: int | None, comm: Comm) -> int | None:
    return comm.ranks[rank] if rank is not None and 0 <= rank < len(comm.ranks) else None


def _jobs_table(
    jobs: list[Job], of_job: dict[int, list[tuple[Dump, Record]]], source: str
) -> pl.DataFrame:
    rows = []
    for job in jobs:
        seen = Counter(r.backend for _, r in of_job[job.index] if r.backend is not None and r.calls)
        rows.append(
            {
                "job": job.index,
                "name": job.name,
                "folder": job.folder,
                "attempt": job.attempt,
                "world_size": job.world_size,
                "backend": max(seen, key=lambda b: (seen[b], b)) if seen else None,
                "source": source,
                "waits": False,
                "p2p": True,
            }
        )
    return pl.DataFrame(rows, schema=JOBS)


def _ranks_table(kept: list[tuple[Dump, Record]]) -> pl.DataFrame:
    rows = [
        {
            "job": d.job.index,
            "rank": d.rank,
            "exit": EXIT["window"],
            "truncated": False,
            "lost_before": _lost_before(r),
            "only_active": False,
            "timed": False,
            "path": d.file.path,
        }
        for d, r in kept
    ]
    return conform(pl.DataFrame(rows, schema_overrides=RANKS), "ranks") if rows else empty("ranks")


def _input(dump: Dump, record: Record, source: str) -> Input:
    got = f"{len(record.calls)} communication calls were read"
    status, reason = status_of(dump, record.lost, got)
    return Input(
        path=dump.file.path,
        status=status,
        reason=reason,
        format=source,
        job=dump.job.name,
        rank=dump.rank,
        events=len(record.calls) if dump.kept else 0,
    )
