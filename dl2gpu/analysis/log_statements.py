"""Rules on statements beside timed-out operations: fingerprints, barriers, stores, gloo, stalls.

Each takes the :class:`Evidence` on one job and gives findings, or none where it does not apply.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.log_evidence import Evidence, Wait

__all__ = ["WEAKER", "busy", "differing", "went_elsewhere"]

# --------------------------------------------------------------------------------------------------
# Fingerprints of debug level DETAIL, and sizes


def _side(row: dict[str, Any]) -> tuple[str, int | None]:
    return row["op"] or "operation", row["count"]


def differing(e: Evidence) -> list[Finding]:
    """Two ranks compared what they were about to call, and it differs."""
    rows = e.of("differs", "differs_from")
    if e.said.get("differs"):
        sides: dict[tuple[str, int | None], set[int]] = {}
        for row in rows:
            if row["rank"] is not None:
                sides.setdefault(_side(row), set()).add(row["rank"])
        ops = {op for op, _ in sides}
        ordinals = [r["ordinal"] for r in e.of("differs") if r["ordinal"] is not None]
        ranks = {r for side in sides.values() for r in side}
        at: tuple[dict[str, Any], ...] = tuple(
            {
                "rank": r, "seq": 0, "op": op, "comm": None, "label": None,
                "ordinal": _believed(ordinals), "stack": [],
            }
            for (op, _), members in sorted(sides.items(), key=lambda s: sorted(s[1]))
            for r in sorted(members)
        )  # fmt: skip
        signatures = [
            {"op": op, **({} if n is None else {"count": n}), "ranks": sorted(members)}
            for (op, n), members in sorted(sides.items(), key=lambda s: sorted(s[1]))
        ]
        return [
            Finding(
                job=e.job, kind="mismatch", evidence="observed", victims=tuple(sorted(ranks)),
                hangs_at=at,
                details={
                    "aspects": ["op"] if len(ops) > 1 else ["size"] if len(sides) > 1
                    else ["tensor"],
                    "signatures": signatures,
                },
                deadlocked=True,
            )
        ]  # fmt: skip
    sizes = e.of("gloo_size")
    if sizes:
        return [
            Finding(
                job=e.job, kind="mismatch", evidence="observed",
                victims=tuple(sorted(e.who("gloo_size"))),
                details={"aspects": ["size"], "signatures": []}, deadlocked=True,
            )
        ]  # fmt: skip
    return []


_LIKELY: Final = 1 << 28
"""Versions 1.12 and 1.13 print a random number: a true one is far below."""


def _believed(ordinals: list[int]) -> int | None:
    good = [n for n in ordinals if 0 < n < _LIKELY]
    return min(good) if good else None


# --------------------------------------------------------------------------------------------------
# Who of the absent is at work


_BUSY: Final = (
    ("compiling", re.compile(r"(?i)autotune|triton_|\bcompil|inductor|dynamo|\bjit\b|nvcc|ninja")),
    ("loading data", re.compile(r"(?i)download|loading|preprocess|tokeniz|shuffl|index|caching|"
                                r"dataloader|reading shard|unpack|extract")),
    ("writing", re.compile(r"(?i)sav(?:e|ing)|checkpoint|export|upload|writing|serializ|dumping")),
    ("evaluating", re.compile(r"(?i)evaluat|validat|generat|\beval\b")),
)  # fmt: skip


def _activity(text: str) -> str | None:
    return next((name for name, words in _BUSY if words.search(text)), None)


def busy(e: Evidence, absent: set[int], first: dict[int, Wait]) -> tuple[set[int], str] | None:
    """Absent ranks that were still at work when the others gave up, and at what."""
    gave_up = [row for row in e.of("timeout") if row["rank"] in first]
    if not gave_up or not absent:
        return None
    start = min(gave_up, key=lambda row: (row["file"], row["line"]))
    by_time = [w.t for w in first.values() if w.t is not None]
    working: set[int] = set()
    what = None
    for row in e.of("life", "step"):
        activity = _activity(row["text"] or "")
        if activity is None or row["text"].startswith("["):
            continue
        later = (
            row["line"] > start["line"]
            if row["file"] == start["file"]
            else bool(by_time) and row["t"] is not None and row["t"] > min(by_time)
        )
        if not later:
            continue
        if row["rank"] in absent:
            working.add(row["rank"])
            what = what or activity
        elif row["rank"] is None and len(absent) == 1:
            working |= absent
            what = what or activity
    return (working, what or "at work") if working else None


def went_elsewhere(e: Evidence, rank: int) -> bool:
    """Does the rank have a log of its own, whose last line is of other work?

    Ranks that their launcher stopped with the others say nothing by their silence.
    """
    last = [row for row in e.of("life") if row["rank"] == rank]
    if not last or _gave_up(e, rank):
        return False
    text = last[-1]["text"] or ""
    return _activity(text) is not None and not _MESSAGE.search(text)


_MESSAGE: Final = re.compile(r"\[[EWIF]\d* |\[Rank |\[PG |Error|Traceback")


def _gave_up(e: Evidence, rank: int) -> bool:
    return rank in e.who(
        "gloo_timeout", "peer_closed", "remote_error", "barrier_waited", "store_timeout",
        "mesh_failed", "store_key", "unique_id", "observed",
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Barriers, stores, gloo


def _missing(
    e: Evidence, waiting: set[int], absent: set[int], op: str, evidence: str = "inferred"
) -> list[Finding]:
    """Ranks wait in ``op`` for ranks that are known not to have come, or for some unknown ones."""
    at: tuple[dict[str, Any], ...] = tuple(
        {
            "rank": r, "seq": 0, "op": op, "comm": None, "label": None, "ordinal": None,
            "stack": [],
        }
        for r in sorted(waiting)
    )  # fmt: skip
    known = absent & e.ranks
    open_ = Finding(
        job=e.job, kind="insufficient_evidence", evidence="inferred", reason="no_data",
        victims=tuple(sorted(waiting - absent)), hangs_at=at,
        details={"missing_ranks": sorted(absent)}, deadlocked=None,
    )  # fmt: skip
    ended = {r for r in known if r in e.who("end", "part_end")}
    missing = replace(open_, kind="missing_participant", evidence=evidence)
    if ended:
        return [replace(missing, reason="finished", culprits=tuple(sorted(ended)))]
    if evidence == "observed" and absent:
        return [replace(missing, reason="not_called", culprits=tuple(sorted(absent)))]
    if known:
        named = known if len(known) <= len(waiting) else set()
        return [replace(missing, reason="not_called", culprits=tuple(sorted(named)))]
    return [open_]


def _barriers(e: Evidence) -> list[Finding]:
    """monitoredBarrier: rank 0 names who did not come; without rank 0 nobody is named."""
    failed = e.of("barrier_failed")
    waited = e.who("barrier_waited")
    stopped = e.who("print_stopped")
    if failed:
        absent = {r for row in failed for r in row["of"] or ()}
        waiting = (waited | e.who("barrier_failed") | stopped) - absent
        return _missing(e, waiting, absent, "barrier", "observed")
    if waited:
        return _missing(e, waited, {0} - waited, "barrier")
    return []


def _stores(e: Evidence) -> list[Finding]:
    """Creation of a process group: who has not joined the store's barrier, or set no key."""
    timed = e.of("store_timeout")
    done = {row["rank"] for row in e.of("store_done")}
    waits = [r for r in e.of("store_wait") if r["rank"] not in done]
    rows = timed or (waits if not e.of("step", "end") else [])
    if rows:
        waiting = {r["rank"] for r in rows if r["rank"] is not None}
        size = max((r["number"] or 0 for r in rows), default=0)
        joined = max((r["count"] or 0 for r in rows), default=0)
        absent = (set(range(size)) if 0 < size <= 1 << 16 else e.everyone) - waiting
        # as many as the store counts, or their names are not known
        certain = size - joined == len(absent)
        if not certain:
            absent &= e.ranks
        return _missing(
            e, waiting, absent, "comm_create", "observed" if certain and timed else "inferred"
        )
    keys = e.who("store_key", "mesh_failed")
    unique = e.of("unique_id")
    if unique:
        waiting = {r["rank"] for r in unique if r["rank"] is not None}
        of = {x for r in unique for x in r["of"] or ()}
        return _missing(e, waiting, of - waiting, "comm_create")
    if keys or e.of("store_key", "mesh_failed"):
        return _missing(e, keys, e.ranks - keys - e.who("peer_closed"), "comm_create")
    return []


def _gloo(e: Evidence) -> list[Finding]:
    """Gloo names neither peer nor operation: who has no error is a candidate."""
    timed = e.who("gloo_timeout")
    closed = e.who("peer_closed", "remote_error")
    if not timed and not closed and not e.of("gloo_timeout", "peer_closed", "remote_error"):
        return []
    failed = timed | closed
    absent = e.everyone - failed
    known = absent & e.ranks
    if not timed and not e.of("gloo_timeout"):
        # connections broke: the process at the other end is gone
        torn = {r for r in known if r in e.torn}
        gone = torn or known
        if gone and len(gone) <= max(len(failed), 1):
            ended = {r for r in gone if r in e.who("end", "part_end")}
            if ended:
                return _missing(e, failed, ended, "operation")
            if not torn and not e.of("remote_error"):
                # its log is whole and holds no error: it may have ended, or died without a word
                return [replace(f, reason="exited") for f in _missing(e, failed, gone, "operation")]
            return [
                Finding(
                    job=e.job, kind="crashed_rank", evidence="inferred", reason="no_data",
                    culprits=tuple(sorted(gone)), victims=tuple(sorted(failed)),
                    details={"missing_ranks": sorted(absent)}, deadlocked=False,
                )
            ]  # fmt: skip
        return [
            Finding(
                job=e.job, kind="insufficient_evidence", evidence="inferred", reason="no_data",
                victims=tuple(sorted(failed)), details={"missing_ranks": sorted(absent)},
                deadlocked=None,
            )
        ]  # fmt: skip
    op = "operation"
    if known and len(known) < len(failed):
        return _missing(e, failed, known, op)
    return [
        Finding(
            job=e.job, kind="insufficient_evidence", evidence="inferred", reason="peers_unknown",
            victims=tuple(sorted(failed)), details={"missing_ranks": sorted(absent)},
            deadlocked=None,
        )
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Watchdogs that got stuck, stalls of other stacks, launchers


def _stuck(e: Evidence) -> list[Finding]:
    """The watchdog itself got stuck: in a lock or the driver, not in communication."""
    rows = e.of("stuck")
    if not rows:
        return []
    held = e.who("stuck")
    everyone = len(held) > 1 and held >= e.everyone
    return [
        Finding(
            job=e.job, kind="stalled_rank", evidence="inferred", reason="watchdog",
            culprits=() if everyone else tuple(sorted(held)),
            victims=tuple(sorted(e.everyone - held)) if not everyone else (),
            details={"seconds": max(r["number"] or 0 for r in rows)}, deadlocked=False,
        )
    ]  # fmt: skip


def _stalls(e: Evidence) -> list[Finding]:
    """Horovod's coordinator says who submitted a tensor, or who did not."""
    ready = e.of("stall_ready")
    missing = e.of("stall_missing")
    items = e.of("stall_item") if e.of("stall_head") else []
    if not ready and not missing and not items:
        return []
    absent = {r for row in (*missing, *items) for r in row["of"] or ()}
    here: set[int] = set()
    if ready:
        last = ready[-1]
        here = set(last["of"] or ())
        absent |= e.everyone - here
    here |= e.everyone - absent
    return _missing(e, here - absent, absent, "all_reduce", "observed")


def _shared_memory(e: Evidence) -> list[Finding]:
    if not e.of("block_wait"):
        return []
    return [
        Finding(
            job=e.job, kind="insufficient_evidence", evidence="inferred", reason="no_data",
            victims=tuple(sorted(e.who("block_wait"))), deadlocked=None,
        )
    ]  # fmt: skip


def _orders(e: Evidence) -> list[Finding]:
    """FSDP found that a rank gathers its parameters in another order than before."""
    rows = e.of("fsdp_order")
    if not rows or e.of("end"):
        return []
    return [
        Finding(
            job=e.job, kind="potential", evidence="inferred",
            culprits=tuple(sorted(e.who("fsdp_order"))),
            condition="the order of modules differs from that of the first iteration",
            details={"kind": "mismatch"}, deadlocked=False,
        )
    ]  # fmt: skip


def _exits(e: Evidence) -> list[Finding]:
    """A launcher says that a process failed, and nothing says which or why."""
    rows = [r for r in e.of("exit_local", "exit_any") if r["number"] not in (0, -15, None)]
    if not rows:
        return []
    return [
        Finding(
            job=e.job, kind="insufficient_evidence", evidence="inferred", reason="no_data",
            details={"exit_code": rows[0]["number"]}, deadlocked=None,
        )
    ]  # fmt: skip


_STOOD: Final = 1800 * 1_000_000_000
"""So long without a step, and a job that is cancelled had been standing."""


def _cancelled(e: Evidence) -> list[Finding]:
    """Stopped from outside, long after its last sign of life."""
    rows = [row["t"] for row in e.of("cancelled") if row["t"] is not None]
    steps = [row["t"] for row in e.of("step") if row["t"] is not None]
    if not rows or not steps or e.of("end") or min(rows) - max(steps) < _STOOD:
        return []
    return [
        Finding(
            job=e.job, kind="insufficient_evidence", evidence="inferred", reason="no_data",
            details={"seconds": (min(rows) - max(steps)) // 1_000_000_000}, deadlocked=None,
        )
    ]  # fmt: skip


def _let_down(e: Evidence) -> list[Finding]:
    """Exceptions of the library on some ranks, and not a word on the cause."""
    if not e.of("let_down"):
        return []
    return [
        Finding(
            job=e.job, kind="insufficient_evidence", evidence="inferred", reason="no_data",
            victims=tuple(sorted(e.who("let_down"))),
            details={"error": e.of("let_down")[0]["text"]}, deadlocked=None,
        )
    ]  # fmt: skip


def _signals(e: Evidence) -> list[Finding]:
    """Ranks that were told to dump, without a word on what had timed out."""
    if not e.of("signal", "observed"):
        return []
    return [
        Finding(
            job=e.job, kind="insufficient_evidence", evidence="inferred", reason="no_data",
            victims=tuple(sorted(e.who("signal"))), deadlocked=None,
        )
    ]  # fmt: skip


WEAKER: Final = (
    _barriers, _stores, _gloo, _stalls, _stuck, _shared_memory, _signals, _let_down, _exits,
    _cancelled, _orders,
)  # fmt: skip
"""Rules in the order in which they count, where no operation timed out."""
