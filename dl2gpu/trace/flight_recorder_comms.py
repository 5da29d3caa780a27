"""Which rank, communicators and status each Flight Recorder dump speaks of.

The rank is not in a dump, a group's members are known to its users only, and a group's number is
local to the process (FORMATS.md 2.2, 2.8). This module puts the dumps of a job side by side. What
stays open is said, not guessed.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import polars as pl

from dl2gpu.trace.entry_columns import Fault
from dl2gpu.trace.flight_recorder_names import member_list
from dl2gpu.trace.inputs import Input, InputError, Status, TraceFile
from dl2gpu.trace.schema import COMMS

__all__ = [
    "FORMAT", "Comm", "Dump", "Job", "MemberLists", "Members", "comms_table", "give_ids",
    "in_order", "inputs", "resolve", "status_of",
]  # fmt: skip

FORMAT: Final = "flight_recorder"
MOST_THREADS: Final = 8
"""More do not decode faster: Python's lock is held between the files."""
_LATEST: Final = 1 << 62
_UNFOLD: Final = 16
_UNFOLD_FREE: Final = 1 << 16
_MOST_INFERRED: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Global ranks of a group, in group order; empty = unknown. One object for equal lists."""

    ranks: tuple[int, ...]
    as_set: frozenset[int]

    def __bool__(self) -> bool:
        return bool(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.as_set


class MemberLists:
    """The member lists of all dumps: each distinct one is parsed, kept and compared once."""

    def __init__(self) -> None:
        self._by_text: dict[str, Members] = {}
        self._by_ranks: dict[tuple[int, ...], Members] = {}

    def of(self, value: Any) -> Members:
        if not isinstance(value, str):
            return self._intern(member_list(value))
        found = self._by_text.get(value)
        if found is None:
            found = self._by_text[value] = self._intern(member_list(value))
        return found

    def _intern(self, ranks: tuple[int, ...]) -> Members:
        found = self._by_ranks.get(ranks)
        if found is None:
            found = self._by_ranks[ranks] = Members(ranks, frozenset(ranks))
        return found


@dataclass(slots=True, eq=False)
class Comm:
    """A communicator of a job: one name, description and list of members."""

    job: int
    name: str
    desc: str
    members: Members
    synthetic: bool = False
    """The members were inferred."""
    id: str = ""
    index: int = -1

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.members.ranks


@dataclass(slots=True, eq=False)
class Dump:
    """One file: what was read of it, and what was made of that."""

    index: int
    file: TraceFile
    job: Job = field(init=False, repr=False)
    refused: str | None = None
    """Why nothing of it is used."""
    fault: Fault | None = None
    lost: int = 0
    header: dict[str, Any] = field(default_factory=dict)
    version: tuple[int, int] | None = None
    n: int = 0
    size: int = 0
    """Bytes of the content."""
    groups: list[tuple[str, str, int | None]] = field(default_factory=list)
    """(name, description, pg_id) of each group that its entries use."""
    backends: dict[str | None, int] = field(default_factory=dict)
    """How many entries have each backend prefix."""
    newest: int = 0
    """Latest time_created_ns."""
    first_record: int = 0
    holes: bool = False
    finished: int = 0
    """Entries that are completed or retired."""
    completed: int = 0
    started: bool = False
    """An entry was seen to start."""
    old_counter: bool = False
    """No collective_seq_id: one counter for everything."""

    rank: int | None = None
    ignored: str | None = None
    """Why it was set aside although it could be read."""
    group_comms: list[Comm] = field(default_factory=list)
    config: dict[str, tuple[str, Members]] = field(default_factory=dict)
    """Description and members of each group that the rank knows."""
    compact_lists: bool = False
    """The member lists are written as TorchComms does, without blanks."""
    status: dict[int, tuple[int | None, ...]] = field(default_factory=dict)
    """(last enqueued, started, completed) by pg_id."""
    status_comms: list[tuple[Comm, tuple[int | None, ...]]] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        return self.refused is None and self.ignored is None and self.rank is not None

    @property
    def only_active(self) -> bool:
        """Completed operations were left out: holes, or nothing finished against the status."""
        if self.holes:
            return True
        if self.n:
            return not self.finished and any((s[2] or 0) > 0 for s in self.status.values())
        return any((s[0] or 0) > 0 for s in self.status.values())

    @property
    def lost_before(self) -> int:
        return 0 if self.only_active else self.first_record

    @property
    def timed(self) -> bool | None:
        """Can `started` be observed; None where nothing tells."""
        if self.started or any((s[1] or 0) > 0 for s in self.status.values()):
            return True
        return False if self.n else None

    @property
    def weak_states(self) -> bool:
        """Nothing completed and no start ever seen: completion shows in `retired` at most."""
        unseen = all(s[1] == -1 for s in self.status.values())
        return not self.completed and bool(self.status) and unseen

    @property
    def one_counter(self) -> bool:
        """TorchComms: one counter for all communicators of the process."""
        return self.compact_lists and not self.status

    @property
    def old(self) -> bool:
        return self.old_counter or self.version is None or self.version <= (2, 4)


@dataclass(slots=True, eq=False)
class Job:
    """The dumps of one job."""

    index: int
    name: str
    folder: str
    attempt: int
    dumps: list[Dump] = field(default_factory=list)
    comms: list[Comm] = field(default_factory=list)
    world_size: int | None = None


def resolve(jobs: Sequence[Job], load: Callable[[TraceFile], bytes]) -> None:
    """Give each dump its rank and each group its communicator, or say why not.

    Sets ``rank``, ``ignored`` or ``refused``, ``group_comms`` and ``status_comms`` of the dumps,
    and ``comms`` (numbered over all jobs) and ``world_size`` of the jobs. ``load`` is only called
    where two dumps of one rank may be the same file twice.
    """
    first = 0
    lists = MemberLists()
    for job in jobs:
        for dump in job.dumps:
            _read_config(dump, lists)
            _read_status(dump)
        _ranks(job)
        _duplicates(job, load)
        _communicators(job, lists)
        for comm in job.comms:
            comm.index = first
            first += 1
        _statuses(job)


def inputs(dumps: Sequence[Dump]) -> list[Input]:
    """What became of each file."""
    out = []
    for dump in dumps:
        lost = [] if dump.fault is None else [dump.fault.reason]
        if dump.lost:
            lost.append(f"{dump.lost} members of the list of entries are no whole entries")
        status, reason = status_of(dump, lost, f"{dump.n} entries were read")
        out.append(
            Input(
                path=dump.file.path,
                status=status,
                reason=reason,
                format=FORMAT,
                job=dump.job.name,
                rank=dump.rank,
                events=dump.n if dump.kept else 0,
            )
        )
    return out


class Judged(Protocol):
    """A file of which it is known whether it is used."""

    refused: str | None
    ignored: str | None


def status_of(file: Judged, lost: Sequence[str], got: str) -> tuple[Status, str | None]:
    """Status and reason of a file: why it is not used, or what of it is lost and what was got."""
    if file.refused is not None:
        return "quarantined", file.refused
    if file.ignored is not None:
        return "ignored", file.ignored
    return ("partial", f"{'; '.join(lost)}; {got}") if lost else ("read", None)


# --------------------------------------------------------------------------------------------------
# Headers


def _read_config(dump: Dump, lists: MemberLists) -> None:
    config = dump.header.get("pg_config")
    if not isinstance(config, dict):
        return
    # a file may name one long list in many places by a few bytes each: what it unfolds to is
    # bounded by its size, and the members of further groups count as unknown
    budget = _UNFOLD * dump.size + _UNFOLD_FREE
    for key, value in config.items():
        desc, ranks = "", value
        if isinstance(value, dict):
            ranks, told = value.get("ranks"), value.get("desc")
            desc = told if isinstance(told, str) else ""
        if isinstance(ranks, str) and "," in ranks:
            dump.compact_lists = ", " not in ranks
        known = lists.of(ranks)
        budget -= len(known.ranks)
        dump.config[str(key)] = (desc, known if budget >= 0 else lists.of(None))


def _number(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value.strip()):
        value = int(value)
    return value if type(value) is int and -1 <= value < _LATEST else None


def _read_status(dump: Dump) -> None:
    status = dump.header.get("pg_status")
    if not isinstance(status, dict):
        return
    for key, value in status.items():
        number = _number(key)
        if number is not None and isinstance(value, dict):
            dump.status[number] = tuple(
                _number(value.get(f"last_{what}_collective"))
                for what in ("enqueued", "started", "completed")
            )


# --------------------------------------------------------------------------------------------------
# Ranks


def _ranks(job: Job) -> None:
    """Rank of each dump: from the content, else from the job pattern, else from the names.

    A process is a member of every group that it lists, so the names must agree with that, and
    where they say nothing, the groups may leave one rank only.
    """
    possible = [_common(dump) for dump in job.dumps]
    inside = [_number(dump.header.get("rank")) for dump in job.dumps]
    sources = ["in the file"] * len(inside)
    reasons: list[str | None] = [None] * len(inside)
    for i, dump in enumerate(job.dumps):
        if inside[i] is None and dump.file.rank is not None:
            inside[i], sources[i] = dump.file.rank, "from the job pattern"
    if any(r is None and d.refused is None for r, d in zip(inside, job.dumps, strict=True)):
        from dl2gpu.trace.rank_names import ranks_from_names

        world = max(map(_default_size, job.dumps))
        named = ranks_from_names([d.file.path for d in job.dumps], world or None, possible)
        for i, rank in enumerate(inside):
            if rank is None:
                inside[i], reasons[i] = named.ranks[i], named.reason[i]
                sources[i] = "from the file's name"
    for i, dump in enumerate(job.dumps):
        if dump.refused is not None:
            continue
        rank, able = inside[i], possible[i]
        if rank is None and able is not None and len(able) == 1:
            rank = next(iter(able))
        if rank is None:
            dump.refused = (
                f"which rank wrote it is not known: {reasons[i] or 'no number in its name'}; "
                "give one with --job-pattern"
            )
        elif able is not None and rank not in able:
            name, other = next((n, m) for n, (_, m) in dump.config.items() if m and rank not in m)
            shown = ", ".join(map(str, other.ranks[:8])) + (", ..." if len(other.ranks) > 8 else "")
            dump.refused = (
                f"rank {rank} ({sources[i]}) is not a member of group {name!r} [{shown}] that the "
                "dump lists as its own: which rank wrote it is not known"
            )
        else:
            dump.rank = rank


def _common(dump: Dump) -> frozenset[int] | None:
    """Ranks that are members of every group which the dump lists; None = any."""
    groups = {m for _, m in dump.config.values() if m}
    if not groups:
        return None
    smallest = min(groups, key=lambda m: len(m.ranks))
    return frozenset(r for r in smallest.ranks if all(r in m for m in groups))


def _default_size(dump: Dump) -> int:
    sizes = (len(m.ranks) for n, (desc, m) in dump.config.items() if _is_default(n, desc))
    return max(sizes, default=0)


def _duplicates(job: Job, load: Callable[[TraceFile], bytes]) -> None:
    """Of several dumps of one rank the one with the newest entry stays."""
    by_rank: dict[int, list[Dump]] = defaultdict(list)
    for dump in job.dumps:
        if dump.rank is not None and dump.refused is None:
            by_rank[dump.rank].append(dump)
    for rank, dumps in by_rank.items():
        if len(dumps) == 1:
            continue
        best = max(dumps, key=lambda d: (d.newest, d.n, d.fault is None, -d.index))
        for dump in dumps:
            if dump is not best:
                same = (dump.n, dump.newest) == (best.n, best.newest) and _same(dump, best, load)
                what = "the same content as" if same else f"an older dump of rank {rank} than"
                dump.ignored = f"{what} {best.file.path}, which is read"


def _same(a: Dump, b: Dump, load: Callable[[TraceFile], bytes]) -> bool:
    try:
        return load(a.file) == load(b.file)
    except (InputError, OSError, EOFError):
        return False


# --------------------------------------------------------------------------------------------------
# Communicators


def _communicators(job: Job, lists: MemberLists) -> None:
    kept = [d for d in job.dumps if d.kept]
    known: dict[tuple[str, str, Members], Comm] = {}
    same_name: dict[tuple[str, str], list[Comm]] = defaultdict(list)
    unknown = lists.of(None)

    def comm(name: str, desc: str, members: Members) -> Comm:
        key = (name, desc, members)
        found = known.get(key)
        if found is None:
            found = known[key] = Comm(job.index, name, desc, members)
            same_name[name, desc].append(found)
        return found

    listed: set[Members] = set()
    for dump in kept:
        for name, (desc, members) in dump.config.items():
            if members:
                listed.add(members)
                if name:  # under the empty name gloo lists its latest group: which, is unknown
                    comm(name, desc, members)
    for dump in kept:
        for name, desc, _ in dump.groups:
            own_desc, members = dump.config.get(name, ("", unknown))
            if members and (own_desc == desc or not desc or not own_desc):
                dump.group_comms.append(comm(name, own_desc or desc, members))
                continue
            # other ranks may list the group: it is theirs and ours if only one has us as a member
            found = [c for c in same_name.get((name, desc), ()) if dump.rank in c.members]
            dump.group_comms.append(found[0] if len(found) == 1 else comm(name, desc, unknown))

    comms = sorted(known.values(), key=in_order)
    whole = [c for c in comms if _is_default(c.name, c.desc)]
    sizes = [len(c.ranks) for c in whole if c.ranks]
    largest = max([d.rank or 0 for d in kept] + [max(m.ranks) for m in listed], default=-1)
    job.world_size = max(sizes) if sizes else (largest + 1 if largest >= 0 else None)
    for c in whole:
        # a rank far above the number of files is no reason to invent a long list
        if not c.ranks and not sizes and job.world_size and job.world_size <= _MOST_INFERRED:
            c.members, c.synthetic = lists.of(list(range(job.world_size))), True
    give_ids(comms)
    job.comms = comms


def _is_default(name: str, desc: str) -> bool:
    return desc == "default_pg" or (name == "0" and desc in {"", "undefined"})


def in_order(comm: Comm) -> tuple[object, ...]:
    """A key that sorts communicators by name, numbers among the names by value."""
    number = re.fullmatch(r"[0-9]{1,18}", comm.name)
    name = (0, int(comm.name), comm.name) if number else (1, 0, comm.name)
    return (name, comm.desc, comm.ranks)


def give_ids(comms: Sequence[Comm]) -> None:
    """Gives each communicator of a job an ``id`` that no other has: its name, if that will do."""
    taken = {c.name for c in comms}
    used = Counter(c.name for c in comms)
    number: Counter[str] = Counter()
    for c in comms:
        c.id = c.name or "unnamed"
        if used[c.name] > 1 or not c.name:
            while (c.id in taken) or c.id == c.name:
                c.id = f"{c.name or 'unnamed'}#{number[c.name]}"
                number[c.name] += 1
            taken.add(c.id)


def comms_table(comms: Sequence[Comm]) -> pl.DataFrame:
    """The communicators of all jobs, with the columns of :data:`schema.COMMS`."""
    return pl.DataFrame(
        {
            "comm": [c.index for c in comms],
            "job": [c.job for c in comms],
            "id": [c.id for c in comms],
            "name": [c.name for c in comms],
            "desc": [c.desc for c in comms],
            "ranks": [c.ranks for c in comms],
        },
        schema=COMMS,
    )


def _statuses(job: Job) -> None:
    """Communicator of each line of ``pg_status``: it names the group by a number of the process.

    Where no entry of the dump tells which group has the number, it is the one that other dumps give
    it and that this dump lists as its own, if there is but one.
    """
    kept = [d for d in job.dumps if d.kept]
    elsewhere: dict[int, set[Comm]] = defaultdict(set)
    for dump in kept:
        for (_, _, number), used in zip(dump.groups, dump.group_comms, strict=True):
            if number is not None:
                elsewhere[number].add(used)
    known = {(c.name, c.desc, c.members): c for c in job.comms}
    for dump in kept:
        pairs = zip(dump.groups, dump.group_comms, strict=True)
        own = {number: used for (_, _, number), used in pairs if number is not None}
        listed: set[Comm] | None = None
        done = set()
        for number, values in dump.status.items():
            comm = own.get(number)
            if comm is None:
                if listed is None:
                    listed = _listed(dump, known) - set(own.values())
                found = listed & elsewhere.get(number, set())
                comm = found.pop() if len(found) == 1 else None
            if comm is not None and comm not in done:
                done.add(comm)
                dump.status_comms.append((comm, values))


def _listed(dump: Dump, known: dict[tuple[str, str, Members], Comm]) -> set[Comm]:
    """Communicators that the dump lists as its own."""
    keys = ((name, desc, members) for name, (desc, members) in dump.config.items())
    comms = (known[key] for key in keys if key in known)
    return {comm for comm in comms if dump.rank in comm.members}
