"""Verdicts from logs alone: what timed out, who was absent, who never gave up waiting.

A log states what each rank waited for when it gave up, not what it did before. So these rules claim
less than the replay does: two ranks in different operations at one number of one group disagree
(observed); all members in one operation that does not complete are in flight (observed); a member
that never gave up waiting is a candidate and no convict (inferred, and ``deadlocked`` stays open).
Loops run over jobs in whose logs a failure is left, and over their statements.

Source: DESIGN.md section 5; LOG_LINES.md.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import polars as pl

from dl2gpu.analysis import log_statements as statements
from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.log_evidence import Evidence, Wait, evidence
from dl2gpu.trace.schema import Trace

__all__ = ["from_logs", "log_jobs", "without_log_events"]


def log_jobs(trace: Trace) -> pl.Series:
    """Jobs of which there are logs and no calls: these rules decide, and not the replay."""
    return trace.jobs.filter((pl.col("source") == "log") & ~pl.col("p2p"))["job"]


def without_log_events(trace: Trace) -> Trace:
    """``trace`` without the events of :func:`log_jobs`, which no replay can place."""
    jobs = log_jobs(trace)
    if jobs.is_empty() or trace.events.is_empty():
        return trace
    return replace(trace, events=trace.events.filter(~pl.col("job").is_in(jobs.implode())))


def from_logs(trace: Trace, jobs: pl.Series | None = None) -> list[Finding]:
    """Findings on ``jobs``, default those of :func:`log_jobs`, at most a few each."""
    jobs = log_jobs(trace) if jobs is None else jobs
    if jobs.is_empty() or trace.said.is_empty():
        return []
    out: list[Finding] = []
    for e in evidence(trace, jobs):
        out += _findings(e)
    return out


def _findings(e: Evidence) -> list[Finding]:
    """The strongest kind of evidence there is; what is weaker adds nothing to it."""
    for rule in (statements.differing, _desync, _crashed, _timeouts, *statements.WEAKER):
        found = rule(e)
        if found:
            return [_with_excerpts(e, f) for f in found]
    return []


# --------------------------------------------------------------------------------------------------
# Operations that timed out

_P2P: Final = frozenset({"send", "recv", "coalesced"})
_SAME_SIZE: Final = frozenset({"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"})
"""Operations whose participants must pass equally many elements."""
_UNEVEN: Final = re.compile(r"OpType=(?:ALLGATHER|REDUCE_SCATTER|REDUCESCATTER),")
"""Forms of them that take lists of tensors, which may differ."""
_ROOT_LEAVES: Final = frozenset({"broadcast", "scatter"})


def _at(e: Evidence, waits: Iterable[Wait]) -> tuple[dict[str, Any], ...]:
    """Operations as a finding shows them, one a rank."""
    out: dict[int, dict[str, Any]] = {}
    for w in waits:
        ident, label = e.group(w.comm)
        out.setdefault(
            w.rank,
            {
                "rank": w.rank, "seq": 0, "op": w.op or "operation", "comm": ident,
                "label": label, "ordinal": w.ordinal, "stack": [],
            },
        )  # fmt: skip
    return tuple(out[r] for r in sorted(out))


def _first(waits: Sequence[Wait]) -> dict[int, Wait]:
    """Of each rank the operation with the lowest number: the others queue behind it."""
    out: dict[int, Wait] = {}
    for w in waits:
        held = out.get(w.rank)
        if held is None or (w.ordinal or 0) < (held.ordinal or 0):
            out[w.rank] = w
    return out


def _members(e: Evidence, comm: int | None, waits: Iterable[Wait]) -> tuple[set[int], int | None]:
    """(members as far as known, how many there are or None)."""
    known = e.members.get(comm) if comm is not None else None
    for w in waits:
        a, b = w.count, w.count_out
        if w.op == "reduce_scatter":
            a, b = b, a
        if w.op in ("all_gather", "reduce_scatter") and a and b and b > a and b % a == 0:
            size = b // a
            if size <= 1 << 20 and (e.world is None or size <= e.world):
                # a group as large as the job is of all its ranks
                return known or (e.everyone if size == len(e.everyone) else set()), size
    if known:
        return known, len(known)
    if len(e.everyone) == 2:
        return e.everyone, 2  # a group of one waits for nobody
    return set(), None


def _timeouts(e: Evidence) -> list[Finding]:
    by_comm: dict[int | None, list[Wait]] = defaultdict(list)
    for w in e.waits:
        by_comm[w.comm].append(w)
    if not by_comm:
        return []
    found: list[Finding] = []
    for comm in sorted(by_comm, key=lambda c: -1 if c is None else c):
        first = _first(by_comm[comm])
        if all(w.op in _P2P for w in first.values()):
            continue
        found += _disagree(e, first)
    if found:
        return found
    everywhere = {w.rank for w in e.waits}
    crossed = _crossed(e, by_comm)
    if crossed:
        return crossed
    # the group with the most waiting ranks is shown; the others wait for the same ranks or for them
    comm = max(by_comm, key=lambda c: (len({w.rank for w in by_comm[c]}), -(c or 0)))
    first = _first(by_comm[comm])
    if any(w.op in _P2P for w in _first(e.waits).values()):
        return _p2p(e, _first(e.waits))
    return _uniform(e, comm, first, everywhere, several=len(by_comm) > 1)


def _disagree(e: Evidence, first: dict[int, Wait]) -> list[Finding]:
    """Different operations or sizes at one number of one group; or different numbers."""
    by_number: dict[int | None, list[Wait]] = defaultdict(list)
    for w in first.values():
        by_number[w.ordinal].append(w)
    for number in sorted(by_number, key=lambda n: -1 if n is None else n):
        waits = by_number[number]
        ops = {w.op for w in waits}
        sizes = {w.count for w in waits if w.count is not None}
        comparable = ops <= _SAME_SIZE and not any(_UNEVEN.search(w.text) for w in waits)
        aspects = []
        if len(ops) > 1 and not ops & _P2P:
            aspects.append("op")
        elif len(ops) == 1 and len(sizes) > 1 and comparable:
            aspects.append("size")
        if aspects:
            certain = number is not None and e.group(waits[0].comm)[0] != "?"
            return [
                Finding(
                    job=e.job, kind="mismatch", evidence="observed" if certain else "inferred",
                    victims=tuple(sorted(first)), hangs_at=_at(e, waits),
                    details={"aspects": aspects, "signatures": _signatures(waits)},
                    deadlocked=True if certain else None,
                )
            ]  # fmt: skip
    numbers = sorted(n for n in by_number if n is not None)
    if len(numbers) < 2:
        return []
    return _shifted(e, first, by_number, numbers)


def _signatures(waits: Iterable[Wait]) -> list[dict[str, Any]]:
    sides: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for w in waits:
        sides[w.op or "operation", w.count].append(w.rank)
    return [
        {"op": op, **({} if count is None else {"count": count}), "ranks": sorted(ranks)}
        for (op, count), ranks in sorted(sides.items(), key=lambda s: sorted(s[1]))
    ]


def _shifted(
    e: Evidence,
    first: dict[int, Wait],
    by_number: dict[int | None, list[Wait]],
    numbers: list[int],
) -> list[Finding]:
    """Ranks wait at different numbers of one group."""
    low = numbers[0]
    behind = by_number[low]
    ahead = [w for n in numbers[1:] for w in by_number[n]]
    ops = {w.op for w in first.values()}
    if ops & _P2P:
        return []
    passed = [w for w in ahead if e.completed.get((w.rank, w.comm), -1) >= low]
    rooted = {w.op for w in behind} <= _ROOT_LEAVES and len(ahead) == 1
    details = {"signatures": _signatures(first.values()), "aspects": ["number"]}
    if passed and len(ops) > 1 and not rooted:
        # a synchronising operation completes for all or for none: the numbers count other calls
        return [
            Finding(
                job=e.job, kind="mismatch", evidence="inferred", victims=tuple(sorted(first)),
                hangs_at=_at(e, first.values()), details=details, deadlocked=None,
            )
        ]  # fmt: skip
    return [
        Finding(
            job=e.job, kind="insufficient_evidence", evidence="inferred", reason="numbers_differ",
            victims=tuple(sorted(first)), hangs_at=_at(e, first.values()), details=details,
        )
    ]  # fmt: skip


def _crossed(e: Evidence, by_comm: dict[int | None, list[Wait]]) -> list[Finding]:
    """Groups in which each waits for a member that waits in the other."""
    waiting = {c: {w.rank for w in ws} for c, ws in by_comm.items()}
    known = {c: _members(e, c, by_comm[c])[0] for c in by_comm if c is not None}
    for a in sorted(known):
        for b in sorted(known):
            if a >= b or not known[a] or not known[b]:
                continue
            lacks_a = (known[a] - waiting[a]) & waiting[b]
            lacks_b = (known[b] - waiting[b]) & waiting[a]
            if lacks_a and lacks_b:
                shown = [w for c in (a, b) for w in by_comm[c]]
                at = _at(e, [w for w in shown if w.rank in lacks_a | lacks_b])
                return [
                    Finding(
                        job=e.job, kind="order_inversion", evidence="inferred",
                        culprits=(), victims=tuple(sorted(waiting[a] | waiting[b])),
                        cycle=at, hangs_at=at, deadlocked=None,
                    )
                ]  # fmt: skip
    return []


def _p2p(e: Evidence, first: dict[int, Wait]) -> list[Finding]:
    """Sends and receives: whom they are for, no line says."""
    others = e.everyone - set(first)
    sends = [w for w in first.values() if w.op == "send"]
    at = _at(e, first.values())
    pair = len(e.everyone) == 2 or (not e.whole and len(e.ranks) == 2)
    if sends and pair and len(first) == 1:
        w, (other,) = sends[0], tuple(others)
        if w.ordinal is not None and _not_called(e, other, w):
            return [
                Finding(
                    job=e.job, kind="unmatched_p2p", evidence="inferred", victims=(w.rank,),
                    hangs_at=at, details={"missing_ranks": [other]}, deadlocked=None,
                )
            ]  # fmt: skip
    if pair and len(first) == 2 and sends and len({w.op in _P2P for w in first.values()}) == 2:
        # of two ranks one sends and the other is in a collective of both
        return [
            Finding(
                job=e.job, kind="unmatched_p2p", evidence="inferred", victims=tuple(sorted(first)),
                hangs_at=at, deadlocked=None,
            )
        ]  # fmt: skip
    return [
        Finding(
            job=e.job, kind="insufficient_evidence", evidence="inferred", reason="peers_unknown",
            victims=tuple(sorted(first)), hangs_at=at, deadlocked=None,
        )
    ]  # fmt: skip


def _not_called(e: Evidence, rank: int, at: Wait) -> bool:
    """Do the rank's own counters say that it had not enqueued the operation?"""
    if at.ordinal is None:
        return False
    last = e.enqueued.get((rank, at.comm), e.enqueued.get((rank, None)))
    return last is not None and last < at.ordinal


def _uniform(
    e: Evidence, comm: int | None, first: dict[int, Wait], everywhere: set[int], several: bool
) -> list[Finding]:
    """All that wait in the group wait in the same operation: who of the members does not?"""
    members, size = _members(e, comm, first.values())
    waiting = set(first)
    at = _at(e, first.values())
    joined = {r for row in e.of("desync_joined", "desync_started") for r in row["of"] or ()}
    base = Finding(
        job=e.job, kind="in_flight", evidence="observed", victims=tuple(sorted(waiting)),
        hangs_at=at, deadlocked=False,
    )  # fmt: skip
    if size is not None and len(waiting) >= size:
        return [base]
    if not several and joined and waiting >= joined >= e.everyone:
        return [base]
    absent = (members or e.everyone) - everywhere
    if size is None and not several and not absent and len(waiting) > 1:
        # every rank that the logs know waits here
        certain = e.whole or waiting == set(range(len(waiting)))
        return [replace(base, evidence="observed" if certain else "inferred")]
    return absentees(e, base, absent, first)


def absentees(
    e: Evidence, base: Finding, absent: set[int], first: dict[int, Wait]
) -> list[Finding]:
    """What can be said of ranks that others waited for and that did not give up themselves."""
    some = min(first.values(), key=lambda w: (w.ordinal or 0, w.rank)) if first else None
    details = base.details | {"missing_ranks": sorted(absent)}
    base = replace(base, evidence="inferred", deadlocked=None, details=details)
    known = absent & e.ranks
    late = {r for r in known if some is not None and _not_called(e, r, some)}
    torn = {r for r in known if r in e.torn and _stopped_earlier(e, r, first)}
    if torn and torn == known:
        return [
            replace(base, kind="crashed_rank", culprits=tuple(sorted(torn)), reason="no_data",
                    deadlocked=False)
        ]  # fmt: skip
    busy = statements.busy(e, known, first)
    if busy is not None:
        ranks, activity = busy
        return [
            replace(
                base, kind="stalled_rank", culprits=tuple(sorted(ranks)), reason="busy",
                details=details | {"activity": activity}, deadlocked=False,
            )
        ]  # fmt: skip
    ended = {r for r in known if r in e.who("end", "part_end")}
    if len(known) == 1 and any(row["rank"] is None for row in e.of("end")):
        ended = known
    if ended:
        return [
            replace(base, kind="missing_participant", culprits=tuple(sorted(ended)),
                    reason="finished")
        ]  # fmt: skip
    if late:
        return [
            replace(base, kind="missing_participant", culprits=tuple(sorted(late)),
                    reason="not_called")
        ]  # fmt: skip
    alone = {r for r in known if statements.went_elsewhere(e, r)}
    if alone and len(alone) <= len(first):
        return [
            replace(base, kind="missing_participant", culprits=tuple(sorted(alone)),
                    reason="not_called")
        ]  # fmt: skip
    if known and len(known) < len(first):
        return [replace(base, kind="missing_participant", reason="no_data")]
    return [replace(base, kind="insufficient_evidence", reason="no_data")]


def _stopped_earlier(e: Evidence, rank: int, first: dict[int, Wait]) -> bool:
    """Is the last sign of the rank from before the others gave up?"""
    last = [
        row["t"] for row in e.of("life", "step") if row["rank"] == rank and row["t"] is not None
    ]
    gave_up = [w.t for w in first.values() if w.t is not None]
    return not last or not gave_up or max(last) < max(gave_up)


# --------------------------------------------------------------------------------------------------
# Deaths, desync reports


def _crashed(e: Evidence) -> list[Finding]:
    """A rank that died while the others went on and then waited for it."""
    crashes = e.of("crash")
    if not crashes:
        return []
    waiting = _first(e.waits)
    let_down = e.who(
        "gloo_timeout", "peer_closed", "remote_error", "barrier_waited", "store_timeout",
        "mesh_failed", "store_key", "unique_id",
    )  # fmt: skip
    dead = {c["rank"] for c in crashes if c["rank"] is not None}
    nobody = not dead
    if nobody:
        # whose exception it is, exclusion tells, if it leaves one rank
        left = e.everyone - set(waiting) - let_down
        if (waiting or let_down) and len(left) == 1:
            dead = left
    dead -= set(waiting)
    if not dead and not nobody:
        return []
    victims = (set(waiting) | let_down) - dead
    first = crashes[0]
    return [
        Finding(
            job=e.job, kind="crashed_rank", evidence="observed", culprits=tuple(sorted(dead)),
            victims=tuple(sorted(victims)), hangs_at=_at(e, waiting.values()), reason="crashed",
            details={"death": _death(first), **_code(first)}, deadlocked=False,
        )
    ]  # fmt: skip


def _death(row: dict[str, Any]) -> str:
    """How it died, in the words of the log or the launcher's number."""
    if row["number"] is not None and "exit" in (row["text"] or ""):
        return f"exit code {row['number']}"
    text = re.sub(r"^(?:\[[^\]]*\]\s*)+(?:.*with exception: )?", "", row["text"] or "")
    return (text or row["text"] or "").strip().rstrip(".")


def _code(row: dict[str, Any]) -> dict[str, int]:
    return {} if row["number"] is None else {"exit_code": row["number"]}


def _desync(e: Evidence) -> list[Finding]:
    """The report of a rank on all ranks: who started what, who never came."""
    started = e.of("desync_started")
    by_number: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for row in started:
        if row["ordinal"] is not None and row["op"]:
            by_number[row["ordinal"]][row["op"]] |= set(row["of"] or ())
    for number, ops in sorted(by_number.items()):
        sides = [(op, ranks) for op, ranks in ops.items() if op not in _P2P]
        overlap = set.intersection(*(r for _, r in sides)) if len(sides) > 1 else set()
        if len(sides) > 1 and not overlap:
            waits = [Wait(r, None, number, op, None, None, None, None)
                     for op, ranks in sides for r in ranks]  # fmt: skip
            return [
                Finding(
                    job=e.job, kind="mismatch", evidence="observed",
                    victims=tuple(sorted({w.rank for w in waits})), hangs_at=_at(e, waits),
                    details={"aspects": ["op"], "signatures": _signatures(waits)},
                    deadlocked=True,
                )
            ]  # fmt: skip
    if e.of("crash"):
        return []
    never = {r for row in e.of("desync_never", "desync_behind") for r in row["of"] or ()}
    never -= {w.rank for w in e.waits}
    if never:
        first = _first(e.waits)
        return [
            Finding(
                job=e.job, kind="missing_participant", evidence="observed",
                culprits=tuple(sorted(never)), victims=tuple(sorted(set(first) - never)),
                hangs_at=_at(e, first.values()), reason="not_called",
                details={"missing_ranks": sorted(never)}, deadlocked=None,
            )
        ]  # fmt: skip
    return []


_EXCERPTS: Final = 6


def _with_excerpts(e: Evidence, f: Finding) -> Finding:
    """The finding with the lines of the log that it rests on."""
    wanted = set(f.culprits) | set(list(f.victims)[:4])
    shown = [
        {"path": row["path"], "line": row["line"], "text": row["text"]}
        for kind in ("differs", "crash", "timeout", "observed", "status", "gloo_timeout",
                     "peer_closed", "remote_error", "barrier_failed", "barrier_waited",
                     "store_timeout", "stall_ready", "stall_missing", "stuck", "life")
        for row in e.said.get(kind, ())
        if row["rank"] is None or row["rank"] in wanted
    ]  # fmt: skip
    return replace(f, details=f.details | {"log": shown[:_EXCERPTS]})
