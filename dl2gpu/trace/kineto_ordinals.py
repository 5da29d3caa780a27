"""Numbers of the collectives of a job's profiles, and which of the host's did not complete.

Source: FORMATS.md 3.4 (``Seq``), 3.6.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from dl2gpu.trace.kineto_align import Sequence, align
from dl2gpu.trace.kineto_kernel import NULL
from dl2gpu.trace.schema import FLAG, OP, STATE

if TYPE_CHECKING:
    from dl2gpu.trace.kineto_comms import Job, Source
    from dl2gpu.trace.kineto_profile import Profile

__all__ = ["number", "sequence"]

Longs = npt.NDArray[np.int64]


def sequence(s: Source, rows: npt.NDArray[np.bool_]) -> Sequence:
    """The collectives among ``rows`` of a profile."""
    p = s.profile
    assert p is not None
    c = p.columns
    at = np.flatnonzero(rows & (c["op"] >= OP["all_reduce"]))
    loose = (c["flags"][at] & FLAG["sizes_incomparable"]) != 0
    size = np.where(loose | (c["count"][at] == NULL), 0, c["count"][at])
    signature = (c["op"][at] * 1_000_003 + size) * 1_000_003 + np.maximum(c["dtype"][at], -1)
    ended = np.where(c["completed"][at] == NULL, s.end, c["completed"][at])
    done = c["state"][at] == STATE["completed"]
    # a host operation that took long may have failed at its end
    done &= ((c["flags"][at] & FLAG["blocking_inferred"]) == 0) | (
        c["completed"][at] - c["started"][at] < _GAVE_UP_NS
    )
    return Sequence(c["op"][at], signature, done, c["created"][at], ended)


def _comm_rows(s: Source) -> dict[int, npt.NDArray[np.bool_]]:
    """Rows of each communicator (by its index) of a profile."""
    assert s.profile is not None
    group = s.profile.columns["group_of"]
    number = np.array([c.index for c in s.comm_of] + [-1 if s.host_comm is None else
                                                       s.host_comm.index], np.int64)  # fmt: skip
    of = number[group]  # -1 is the last one: operations without a group
    return {int(c): of == c for c in np.unique(of) if c >= 0}


def number(job: Job) -> None:
    """Numbers of the collectives: the trace's own, else by laying the profiles over each other."""
    rows = {id(s): _comm_rows(s) for s in job.kept if s.profile is not None}
    users: dict[int, list[Source]] = defaultdict(list)
    for s in job.kept:
        for c in rows.get(id(s), ()):
            users[c].append(s)
    for c in sorted(users):
        mine = users[c]
        picked = []
        for s in mine:
            p = s.profile
            assert p is not None
            at = np.flatnonzero(rows[id(s)][c] & (p.columns["op"] >= OP["all_reduce"]))
            picked.append((s, p, at))
        picked = [t for t in picked if len(t[2])]
        if not picked:
            continue
        numbered = all((p.columns["ordinal"][at] >= 0).all() for _, p, at in picked)
        numbered = numbered and all(_counts(p.columns["ordinal"][at]) for _, p, at in picked)
        if numbered:
            for s, p, at in picked:
                s.lost_before += max(0, int(p.columns["ordinal"][at].min()) - 1)
            continue
        reference = picked[0][0]
        first = sequence(reference, rows[id(reference)][c])
        shifts = [
            0 if s is reference else align(first, sequence(s, rows[id(s)][c])) for s, _, _ in picked
        ]
        low = min((shift for shift in shifts if shift is not None), default=0)
        for (s, p, at), shift in zip(picked, shifts, strict=True):
            s.lost_before += 1  # a window: what came before it is not counted
            if shift is None:
                p.columns["ordinal"][at] = NULL
                continue
            p.columns["ordinal"][at] = np.arange(len(at)) + shift - low + 1
            p.columns["flags"][at] |= FLAG["ordinal_inferred"]
    for s in job.kept:
        if s.profile is None:
            continue
        columns = s.profile.columns
        messages = columns["op"] < OP["wait"]
        if (columns["message"][messages] == NULL).any():
            s.lost_before = max(1, s.lost_before)
        for part in rows[id(s)].values():
            if (part & messages).any():
                s.lost_before += max(0, int(columns["message"][part & messages].min()) - 1)
    _gave_up(job, rows)


def _counts(ordinals: Longs) -> bool:
    """Could one counter have given these numbers? Members of a batch share one."""
    rising = bool((np.diff(ordinals) >= 0).all())
    return rising or len(np.unique(ordinals)) == len(ordinals)


_GAVE_UP_NS: Final = 1_000_000_000


def _gave_up(job: Job, rows: dict[int, dict[int, npt.NDArray[np.bool_]]]) -> None:
    """Operations of host backends that ended without having completed.

    The span of a host operation ends as well where it fails. It cannot have completed where another
    member issued its part after it (beyond what clocks may differ by), or where the members' last
    operations are different ones, and all of them waited long.
    """
    last: dict[int, dict[int, list[tuple[Profile, int, bool]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for s in job.kept:
        p = s.profile
        if p is None or not (p.columns["group_of"] < 0).any():
            continue
        c = p.columns
        weak = (c["flags"] & FLAG["blocking_inferred"]) != 0
        for comm, mine in rows[id(s)].items():
            at = np.flatnonzero(
                mine & weak & (c["group_of"] < 0) & (c["op"] >= OP["all_reduce"])
                & (c["op"] < OP["broadcast"]) & (c["ordinal"] != NULL) & (c["started"] != NULL)
            )  # fmt: skip
            slow = at[c["completed"][at] - c["started"][at] > _GAVE_UP_NS]
            for row in slow.tolist()[-8:]:
                last[comm][int(c["ordinal"][row])].append((p, row, bool(row == at[-1])))
    for comm, by_ordinal in last.items():
        everyone: dict[int, list[tuple[Profile, int]]] = defaultdict(list)
        for s in job.kept:
            p = s.profile
            if p is None or comm not in rows[id(s)]:
                continue
            at = np.flatnonzero(rows[id(s)][comm] & np.isin(p.columns["ordinal"], list(by_ordinal)))
            for row in at.tolist():
                everyone[int(p.columns["ordinal"][row])].append((p, row))
        for ordinal, slow_ones in by_ordinal.items():
            parts = everyone[ordinal]
            issued = max(int(p.columns["created"][row]) for p, row in parts)
            ops = {int(p.columns["op"][row]) for p, row in parts}
            all_long = len(slow_ones) == len(parts) and all(end for _, _, end in slow_ones)
            early = [
                (p, row) for p, row, _ in slow_ones
                if int(p.columns["completed"][row]) + _GAVE_UP_NS < issued
            ]  # fmt: skip
            if not early and not (len(ops) > 1 and all_long):
                continue
            # nobody has completed it, then; those who waited for it to the end stand in it
            waited = {(id(p), row) for p, row in early} or {(id(p), r) for p, r, _ in slow_ones}
            for p, row in parts:
                p.columns["state"][row] = STATE["started"]
                p.columns["completed"][row] = NULL
                p.blocked[row] = (id(p), row) in waited
