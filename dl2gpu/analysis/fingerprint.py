"""Fingerprints: the same bug, the same fingerprint, whatever the job, the scale and the night.

A fingerprint has two halves. The first is made of what every format of a trace can tell: what sort
of fault it is, and the operations at which it shows. The second tells bugs of one sort apart: the
kind of finding and the call sites. Where a record has no call sites (a log, a dump taken without
stacks) the second half is zeros, and :func:`alike` compares the first halves only.

Never part of it: ranks, sizes, times, communicator ids, where the code is installed, how many
places were hit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final

from dl2gpu.analysis.finding import Finding
from dl2gpu.text import user_frame

__all__ = ["alike", "fingerprint"]

_SORT: Final = {
    "cycle": "order",
    "order_inversion": "order",
    "init_cycle": "order",
    "mismatch": "order",
    "unmatched_p2p": "order",
    "missing_participant": "absent",
    "crashed_rank": "absent",
    "stalled_rank": "absent",
    "insufficient_evidence": "absent",
    "in_flight": "library",
    "potential": "potential",
}
"""What sort of fault a kind is. How much of it can be told is a matter of the record: that a rank
is absent shows in a dump; that it had finished shows in the trace of a whole program."""

_HALF: Final = 8
_UNKNOWN: Final = "0" * _HALF


def fingerprint(f: Finding) -> str:
    """16 hexadecimal digits: two halves, the second zeros where no call site is known."""
    steps = _steps(f)
    sort = _hash([_SORT[f.kind], *(_family(op) for op, _ in steps)])
    sites = {f"{op}@{_site(frame)}" for op, frame in steps if frame}
    if not sites:
        return sort + _UNKNOWN
    kind = str(f.details.get("kind", f.kind)) if f.kind == "potential" else f.kind
    return sort + _hash([f.kind, kind, *sites])


def alike(a: str, b: str) -> bool:
    """May two fingerprints be of one bug? Where one has no call sites, the sort decides."""
    if a[:_HALF] != b[:_HALF]:
        return False
    return a[_HALF:] == b[_HALF:] or _UNKNOWN in (a[_HALF:], b[_HALF:])


def _steps(f: Finding) -> set[tuple[str, str]]:
    """(operation, frame of the user) of each place where the finding shows."""
    sides = f.details.get("sides", ())
    if f.kind == "mismatch" and sides:
        return {(op, frame) for op, _, frame in (side.partition("@") for side in sides)}
    shown = list(f.hangs_at) if f.hangs_at else list(f.cycle)
    if _SORT[f.kind] == "absent":  # where the absent one went is known in some records only
        gone = {*f.culprits, *f.details.get("missing_ranks", ())}
        shown = [s for s in shown if s["rank"] not in gone] or shown
    if f.first_divergence is not None and not shown:
        shown.append(f.first_divergence)
    steps = {(str(s["op"]), user_frame(s["stack"])) for s in shown if s["op"] != "wait"}
    return steps | {(op, frame) for op, _, frame in (side.partition("@") for side in sides)}


def _family(op: str) -> str:
    """An operation without its variant: formats do not all tell that sizes were uneven."""
    return op.removesuffix("_v")


def _site(frame: str) -> str:
    """Function, base name and line of "function file:line": a path is where the code is mounted."""
    function, _, place = frame.rpartition(" ")
    base = re.split(r"[/\\]", place)[-1]
    return f"{function} {base}"


def _hash(marks: Iterable[str]) -> str:
    text = "\n".join(sorted(set(marks)))
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=_HALF // 2).hexdigest()
