"""Which rank, communicators and ordinals each profile of a job speaks of.

A profile says its rank and its process groups (``distributedInfo``), unless it is old, or of a
backend on the host. This module puts the profiles of a job side by side. What stays open is said,
not guessed: operations of a group that is not known are matched with nothing.

Source: FORMATS.md 3.2, 3.4, 3.6.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from typing import Any, Final

from dl2gpu.trace.flight_recorder_comms import (
    Comm,
    MemberLists,
    Members,
    give_ids,
    in_order,
    status_of,
)
from dl2gpu.trace.inputs import Input, TraceFile
from dl2gpu.trace.kineto_align import align
from dl2gpu.trace.kineto_kernel import NULL
from dl2gpu.trace.kineto_names import members_of
from dl2gpu.trace.kineto_ordinals import number, sequence
from dl2gpu.trace.kineto_profile import Group, Profile

__all__ = ["FORMAT", "Job", "Source", "inputs", "resolve"]

FORMAT: Final = "kineto"
_MOST_RANKS: Final = 1 << 20


@dataclass(slots=True, eq=False)
class Source:
    """One file: what was read of it, and what was made of that."""

    index: int
    file: TraceFile
    job: Job = field(init=False, repr=False)
    refused: str | None = None
    ignored: str | None = None
    damage: list[str] = field(default_factory=list)
    """What of the file is lost."""
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """Its ``distributedInfo``."""
    profile: Profile | None = None
    rank: int | None = None
    config: dict[str, tuple[str, Members, str]] = field(default_factory=dict)
    """Description, members and backends of each group that the process knows, by name."""
    numbers: dict[int, str] = field(default_factory=dict)
    """Name of a group by its ``uid`` (spring 2024)."""
    comm_of: list[Comm] = field(default_factory=list)
    """Communicator of each of the profile's groups."""
    host_comm: Comm | None = None
    """Communicator of operations that name no group."""
    lost_before: int = 0

    @property
    def kept(self) -> bool:
        return self.refused is None and self.ignored is None and self.rank is not None

    @property
    def end(self) -> int:
        window = self.profile.window if self.profile else None
        return window[1] if window else 0


@dataclass(slots=True, eq=False)
class Job:
    """The profiles of one job."""

    index: int
    name: str
    folder: str
    attempt: int
    sources: list[Source] = field(default_factory=list)
    comms: list[Comm] = field(default_factory=list)
    world_size: int | None = None

    @property
    def kept(self) -> list[Source]:
        return sorted((s for s in self.sources if s.kept), key=lambda s: s.rank or 0)


def resolve(jobs: Listed[Job]) -> None:
    """Gives each profile its rank, each group its communicator, each collective its ordinal.

    Sets ``rank``, ``ignored`` or ``refused``, ``comm_of``, ``host_comm`` and ``lost_before`` of the
    sources, ``ordinal`` and ``flags`` in their profiles, and ``comms`` (numbered over all jobs) and
    ``world_size`` of the jobs.
    """
    first = 0
    lists = MemberLists()
    for job in jobs:
        for source in job.sources:
            _read_config(source, lists)
        _ranks(job)
        _duplicates(job)
        _communicators(job, lists)
        for comm in job.comms:
            comm.index = first
            first += 1
        number(job)


def inputs(sources: Listed[Source]) -> list[Input]:
    """What became of each file."""
    out = []
    for s in sources:
        n = s.profile.n if s.profile else 0
        status, reason = status_of(s, s.damage, f"{n} operations were read")
        out.append(
            Input(
                path=s.file.path, status=status, reason=reason, format=FORMAT, job=s.job.name,
                rank=s.rank, events=n if s.kept else 0,
            )
        )  # fmt: skip
    return out


# --------------------------------------------------------------------------------------------------
# Headers and ranks


def whole_number(value: Any) -> int | None:
    """A number that can be a rank or a size; None for anything else."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value.strip()):
        value = int(value)
    return value if type(value) is int and 0 <= value < 10**9 else None


def _read_config(source: Source, lists: MemberLists) -> None:
    groups = source.info.get("pg_config")
    if not isinstance(groups, list):
        return
    world = whole_number(source.info.get("world_size"))
    for entry in groups:
        if not isinstance(entry, dict):
            continue
        name = entry.get("pg_name")
        uid = entry.get("uid")
        if type(name) is int:
            name = str(name)
        if not isinstance(name, str):
            continue
        if type(uid) is int:
            source.numbers.setdefault(uid, name)
        desc = entry.get("pg_desc")
        members = lists.of(entry.get("ranks"))
        size = whole_number(entry.get("pg_size"))
        if not members and size and size == world and world <= _MOST_RANKS:
            members = lists.of(list(range(world)))
        if members and size is not None and size != len(members.ranks):
            members = lists.of(None)  # a list that was cut
        backends = entry.get("backend_config")
        source.config[name] = (
            desc if isinstance(desc, str) else "", members,
            backends if isinstance(backends, str) else "",
        )  # fmt: skip


def _ranks(job: Job) -> None:
    """Rank of each profile: from the content, else the job pattern, else the names of the files."""
    able = [s for s in job.sources if s.refused is None]
    for s in able:
        told = whole_number(s.info.get("rank"))
        s.rank = told if told is not None else s.file.rank
    open_ = [s for s in able if s.rank is None]
    if not open_:
        return
    from dl2gpu.trace.rank_names import ranks_from_names

    worlds = [w for s in able if (w := whole_number(s.info.get("world_size")))]
    named = ranks_from_names([s.file.path for s in able], max(worlds, default=0) or None)
    taken = {s.rank for s in able}
    for s, rank, reason in zip(able, named.ranks, named.reason, strict=True):
        if s.rank is not None:
            continue
        if rank is not None and rank not in taken:
            s.rank = rank
        else:
            s.refused = (
                "which rank wrote it is not known: no rank in `distributedInfo`, and "
                f"{reason or 'the one in its name is taken'}; give one with --job-pattern"
            )


def _duplicates(job: Job) -> None:
    """Of several profiles of one rank (several windows), the latest stays."""
    by_rank: dict[int, list[Source]] = defaultdict(list)
    for s in job.sources:
        if s.rank is not None and s.refused is None:
            by_rank[s.rank].append(s)
    for rank, several in by_rank.items():
        best = max(several, key=lambda s: (s.end, s.profile.n if s.profile else 0, -s.index))
        for s in several:
            if s is best:
                continue
            same = s.end == best.end
            what = "another profile of the same window of" if same else "an earlier window of"
            s.ignored = f"{what} rank {rank} than {best.file.path}, which is read"


# --------------------------------------------------------------------------------------------------
# Communicators


def _members(source: Source, group: Group, lists: MemberLists) -> tuple[str, str, Members]:
    """Name, description and members of a group, as far as the profile tells."""
    name, desc = group.name, group.desc
    if not name and group.number != NULL:
        name = source.numbers.get(group.number, str(group.number))
    told, members, _ = source.config.get(name, ("", lists.of(None), ""))
    if members and told and desc and told != desc:
        members = lists.of(None)  # another group of that name
    desc = desc or told
    if not members and group.ranks:
        members = lists.of(list(members_of(group.ranks)))
    regular = 0 < group.size <= _MOST_RANKS and 0 < group.stride < 10**9 > group.start >= 0
    if not members and regular:
        end = group.start + group.size * group.stride
        members = lists.of(list(range(group.start, end, group.stride)))
    if members and (source.rank not in members or 0 < group.size != len(members.ranks)):
        members = lists.of(None)
    return name, desc, members


def _communicators(job: Job, lists: MemberLists) -> None:
    kept = job.kept
    known: dict[tuple[str, str, Members], Comm] = {}
    same_name: dict[tuple[str, str], list[Comm]] = defaultdict(list)
    nobody = lists.of(None)
    worlds = [w for s in kept if (w := whole_number(s.info.get("world_size")))]
    job.world_size = max(worlds, default=None)

    def comm(name: str, desc: str, members: Members) -> Comm:
        key = (name, desc, members)
        found = known.get(key)
        if found is None:
            found = known[key] = Comm(job.index, name, desc, members)
            same_name[name, desc].append(found)
        return found

    for s in kept:
        for name, (desc, members, _) in s.config.items():
            if members and s.rank in members:
                comm(name, desc, members)
    unknown: list[tuple[Source, int]] = []  # (profile, place of the group or -1)
    for s in kept:
        if s.profile is None:
            continue
        for place, group in enumerate(s.profile.groups):
            name, desc, members = _members(s, group, lists)
            if not members and (name or desc):
                found = [c for c in same_name.get((name, desc), ()) if s.rank in c.members]
                members = found[0].members if len(found) == 1 else nobody
            if not name and not members:
                unknown.append((s, place))
            s.comm_of.append(comm(name, desc, members))
        if (s.profile.columns["group_of"] < 0).any():
            groups = [
                (n, d, m) for n, (d, m, backends) in s.config.items()
                if "gloo" in backends or "cpu" in backends or not backends
            ]  # fmt: skip
            if len(groups) == 1 and s.rank in groups[0][2]:
                s.host_comm = comm(*groups[0])
            else:
                unknown.append((s, -1))
    _unknown_groups(job, unknown, comm, lists)
    used = {id(c) for s in kept for c in (*s.comm_of, s.host_comm)}
    comms = sorted(
        (c for c in known.values() if c.ranks or id(c) in used),
        key=in_order,
    )
    comms += _own_groups(kept, comms)
    if job.world_size is None:
        sizes = [len(c.ranks) for c in comms if c.desc == "default_pg"]
        job.world_size = max(sizes, default=None)
    give_ids(comms)
    job.comms = comms


def _unknown_groups(
    job: Job, unknown: list[tuple[Source, int]], comm: Any, lists: MemberLists
) -> None:
    """Operations of a group that nothing tells.

    If all ranks of the job have them, and in the same sequence, they are taken as those of the
    default group (its members are then inferred); else each rank's are a group of its own.
    """
    for host in (False, True):
        mine = [(s, place) for s, place in unknown if (place < 0) == host]
        if not mine:
            continue
        world = job.world_size
        ranks = [s.rank for s, _ in mine]
        whole = world is not None and 1 < world <= _MOST_RANKS
        whole = whole and sorted(r for r in ranks if r is not None) == list(range(world or 0))
        if whole and _one_sequence(mine):
            default = comm("0", "default_pg", lists.of(list(range(world or 0))))
            default.synthetic = True
            for s, place in mine:
                if host:
                    s.host_comm = default
                else:
                    s.comm_of[place] = default
            continue
        for s, place in mine:
            own = Comm(job.index, "", f"not recorded, rank {s.rank}", lists.of(None))
            if host:
                s.host_comm = own
            else:
                s.comm_of[place] = own
            s.damage.append("the process groups of its operations are not recorded")


def _own_groups(kept: list[Source], comms: list[Comm]) -> list[Comm]:
    """Communicators that were made for one rank's operations of an unknown group."""
    seen = {id(c) for c in comms}
    out = []
    for s in kept:
        for c in (*s.comm_of, s.host_comm):
            if c is not None and id(c) not in seen:
                seen.add(id(c))
                out.append(c)
    return out


def _one_sequence(mine: list[tuple[Source, int]]) -> bool:
    """Do all profiles show one sequence of operations, so that one group explains them?"""
    sequences = [sequence(s, s.profile.columns["group_of"] == place) for s, place in mine
                 if s.profile is not None]  # fmt: skip
    first = sequences[0]
    for other in sequences[1:]:
        shift = align(first, other)
        if shift is None:
            return False
        lo, hi = max(0, shift), min(len(first.signature), len(other.signature) + shift)
        a, b = first.signature[lo:hi], other.signature[lo - shift : hi - shift]
        if hi - lo < 0.8 * min(len(first.signature), len(other.signature)) or (a != b).any():
            return False
    return True
