"""The facts of a report in words: shared by everything that people read.

Job names, communicator names, reasons and call sites come from files that anybody may have written.
All of it goes through :func:`safe` before it reaches a terminal.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from dl2gpu.text import fold, ranks, user_frame

__all__ = [
    "DEADLOCKS",
    "EVIDENCE",
    "MEANING",
    "call_site",
    "fold",
    "job_label",
    "operation",
    "place",
    "ranks",
    "safe",
    "utc",
]

DEADLOCKS: Final = (
    "cycle",
    "order_inversion",
    "init_cycle",
    "mismatch",
    "missing_participant",
    "unmatched_p2p",
)
"""Kinds that fail a scan unless ``--fail-on`` says otherwise (DESIGN.md section 10)."""

MEANING: Final[dict[str, str]] = {
    "cycle": "Places wait for each other in a circle; none can move.",
    "order_inversion": "Ranks entered the same collectives in different orders: a circle.",
    "init_cycle": "Ranks create communicators in different orders: a circle.",
    "mismatch": "Ranks met in one collective with different operations, roots, types or sizes.",
    "missing_participant": "Members of a communicator wait for a rank that will not come.",
    "unmatched_p2p": "A send has no receive, or a receive no send.",
    "crashed_rank": "All wait for a rank that died. Not a deadlock of the program.",
    "stalled_rank": "All wait for a rank that is busy outside communication. Not a deadlock.",
    "in_flight": "All came and agree, and the operation does not complete: transport, driver or "
    "library. No rank is guilty.",
    "potential": "It ran, but another allowed buffering, order or match would deadlock.",
    "insufficient_evidence": "The record is not enough to claim anything.",
    "healthy": "Progress to the end.",
}

EVIDENCE: Final[dict[str, str]] = {
    "proven": "proven: follows from the recorded program order alone",
    "observed": "observed: the recorded states show it",
    "inferred": "inferred: the record does not hold all of it",
}

_VISIBLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def safe(text: object, limit: int = 300) -> str:
    """``text`` as one printable line of at most ``limit`` characters.

    Control and format characters (escape sequences, newlines, bidirectional overrides) become
    visible escapes, so that a job's name cannot move the cursor, colour or forge lines.
    """
    raw = str(text)
    cut = raw[:limit]
    out = (
        cut
        if cut.isprintable()
        else "".join(
            c
            if unicodedata.category(c) not in _VISIBLE
            else c.encode("unicode_escape").decode("ascii")
            for c in cut
        )
    )
    return out + (f"... ({len(raw) - limit} more characters)" if len(raw) > limit else "")


_FRAME: Final = re.compile(r"(\S+) (\S.*:\d+)")


def call_site(stack: Sequence[str] | None) -> str | None:
    """The innermost frame outside the framework: ``lab/emb.py:379 in dist_input``.

    ``stack`` holds "function file:line", innermost first; where all of it belongs to the framework
    the innermost frame is given.
    """
    return _call_site(tuple(stack or ()))


@functools.lru_cache(maxsize=4096)
def _call_site(stack: tuple[str, ...]) -> str | None:
    frame = user_frame(stack)
    if not frame:
        return None
    parts = _FRAME.fullmatch(frame)
    return safe(f"{parts[2]} in {parts[1]}" if parts else frame)


def operation(op: Mapping[str, Any]) -> str:
    """``all_to_all #7 of 'shard'``."""
    words = safe(op.get("op") or "an unknown operation", 60)
    if op.get("ordinal") is not None:
        words += f" #{op['ordinal']}"
    if op.get("comm") is not None:
        words += f" of '{safe(op['comm'], 60)}'"
    return words


def place(node: Mapping[str, Any], *, numbered: bool = False) -> str:
    """``rank 0 (host) waits in all_to_all #7 of 'shard' for rank 1``.

    ``numbered`` adds the operation's position in the record of its rank.
    """
    where = "host"
    if node.get("place") != "host":
        where = "stream" if node.get("stream") is None else f"stream {safe(node['stream'], 60)}"
    number = f" (operation {node['seq']})" if numbered and node.get("seq") is not None else ""
    them = ranks(node.get("waits_for"), "nobody in the record")
    if node.get("op") == "wait" and node.get("waits_for") == [node.get("rank")]:
        return f"rank {node.get('rank')} ({where}) waits{number} for its own device"
    if node.get("op") == "wait":  # what it waits in is not one operation but its requests
        return (
            f"rank {node.get('rank')} ({where}) waits for its requests{number}, which need {them}"
        )
    return f"rank {node.get('rank')} ({where}) waits in {operation(node)}{number} for {them}"


def job_label(job: Mapping[str, Any], twins: Collection[str] = ()) -> str:
    """Name of a job; with its folder where another has the same name, with its attempt if any.

    ``job`` needs ``job``, ``attempt`` and ``folder``; ``twins`` are the names that occur twice.
    """
    name = safe(job.get("job") or "(no name)", 120)
    if str(job.get("job")) in twins and job.get("folder"):
        name += f" [{safe(job['folder'], 120)}]"
    if job.get("attempt"):
        name += f" (attempt {job['attempt']})"
    return name


def utc(ns: int) -> str:
    """Nanoseconds since the epoch as ``2026-10-04 11:50:43 UTC``; far-off numbers stay numbers."""
    try:
        moment = dt.datetime.fromtimestamp(ns / 1e9, dt.UTC)
    except (OverflowError, OSError, ValueError):
        return f"{ns} ns"
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")
