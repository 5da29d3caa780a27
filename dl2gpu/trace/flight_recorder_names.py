"""What the names in a Flight Recorder dump mean: operations, group members, versions.

Small pure functions over single strings; the reader calls them once for each distinct string.
Source: FORMATS.md 0.1 (spellings of operations), 2.7.1 (grammar of profiling_name), 2.8 (members).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["HOST_BACKENDS", "Operation", "member_list", "operation", "version_pair"]

HOST_BACKENDS: Final = frozenset({"gloo", "c10d"})
"""Backends whose operations run on the host and whose `state` never moves (FORMATS.md 2.7.2)."""

_OPS: Final[dict[str, str]] = {
    "allreduce": "all_reduce", "allreducecoalesced": "all_reduce", "allreducesparse": "all_reduce",
    "barrier": "barrier", "allreducebarrier": "barrier",
    "broadcast": "broadcast", "broadcastoop": "broadcast",
    "reduce": "reduce", "reduceoop": "reduce",
    "allgather": "all_gather", "allgatherbase": "all_gather", "allgathersingle": "all_gather",
    "allgatherintotensorcoalesced": "all_gather", "allgathercoalesced": "all_gather",
    "allgatherv": "all_gather_v",
    "reducescatter": "reduce_scatter", "reducescatterbase": "reduce_scatter",
    "reducescattersingle": "reduce_scatter", "reducescattercoalesced": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter", "reducescatterv": "reduce_scatter_v",
    "gather": "gather", "gathersingle": "gather", "gatherv": "gather_v",
    "scatter": "scatter", "scatterv": "scatter_v",
    "alltoall": "all_to_all", "alltoallbase": "all_to_all", "alltoallsingle": "all_to_all",
    "alltoallv": "all_to_all_v", "alltoallvsingle": "all_to_all_v",
    "send": "send", "recv": "recv", "recvanysource": "recv",
    "split": "comm_create", "init": "comm_create", "newwindow": "comm_create",
    "coalesced": "coalesced", "batchopissue": "coalesced",
}  # fmt: skip
"""Canonical operation by spelling: lower case, without ``_`` and ``-``."""

_STORE_TRAFFIC: Final = "broadcastuniquencclid"
_PEERS: Final = re.compile(r"\s*(-?[0-9]{1,9})\s*(?:->|<-)\s*(-?[0-9]{1,9})\s*")


@dataclass(frozen=True, slots=True)
class Operation:
    """What a ``profiling_name`` says."""

    backend: str | None
    op: str
    """Name in the op catalogue, or an unknown operation's own name."""
    known: bool = True
    end: bool = False
    """The record that ends a coalesced group, not an operation of its own."""
    recorded: bool = True
    """False: store traffic, not communication of the program."""
    me: int | None = None
    peer: int | None = None
    """Point to point: both sides as ranks within the group."""


def operation(name: str) -> Operation:
    """Read a ``profiling_name``, for example ``nccl:send 0->3`` or ``REDUCE_SCATTER_coalesced``."""
    before, colon, after = name.partition(":")
    backend = before.strip().lower() or None if colon else None
    word, _, rest = (after if colon else before).strip().partition(" ")
    spelled = word.lower().replace("_", "").replace("-", "")
    if spelled == _STORE_TRAFFIC:
        return Operation(backend, word, recorded=False)
    # OPTYPE_coalesced ends a group; allreduce_coalesced is an operation with several tensors
    end = spelled in {"coalesced", "batchopissue"} or bool(
        re.fullmatch(r"[A-Z][A-Z0-9_]*_coalesced", word)
    )
    op = _OPS.get(spelled)
    if op is None and end:
        op = _OPS.get(spelled.removesuffix("coalesced"), "coalesced")
    if op is None:
        return Operation(backend, word or "unknown", known=False)
    peers = _PEERS.fullmatch(rest) if op in {"send", "recv"} else None
    if peers is None:
        return Operation(backend, op, end=end)
    return Operation(backend, op, me=int(peers[1]), peer=int(peers[2]))


def member_list(ranks: Any) -> tuple[int, ...]:
    """Global ranks of a group: from ``"[0, 1]"``, ``"[0,1]"`` or a list.

    Empty where unknown: no list, a list cut short (``"[0, ..., ...]"``), or anything that is not a
    list of different ranks.
    """
    if isinstance(ranks, str):
        inner = ranks.strip()
        if not re.fullmatch(r"\[[0-9,\s]*\]", inner):
            return ()
        parts = [p for p in inner[1:-1].replace(",", " ").split() if p]
        if any(len(p) > 9 for p in parts):
            return ()
        members = tuple(map(int, parts))
    elif isinstance(ranks, (list, tuple)) and all(type(r) is int and 0 <= r < 10**9 for r in ranks):
        members = tuple(ranks)
    else:
        return ()
    return members if len(set(members)) == len(members) else ()


def version_pair(version: Any) -> tuple[int, int] | None:
    """("2.10") -> (2, 10), so that versions compare as numbers; None where there is none."""
    if not isinstance(version, str):
        return None
    found = re.match(r"\s*([0-9]{1,6})\.([0-9]{1,6})", version)
    return (int(found[1]), int(found[2])) if found else None
