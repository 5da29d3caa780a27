"""The nodes of an execution trace in JSON: found one by one, so that damage costs what it touches.

Only nodes that are wanted are decoded; the rest is passed over as bytes. Memory is the content of
the file once, and the wanted nodes. Source: FORMATS.md 4.1, 4.3 and 9 (rows 21, 22, 23, 29).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from dl2gpu.trace import execution_trace_kernel as kernel
from dl2gpu.trace.files import cut_reason
from dl2gpu.trace.json_text import lenient

__all__ = ["Nodes", "lost_nodes", "read_nodes", "utf8"]

_AT_ONCE: Final = 4096
_MOST_DAMAGES: Final = 64
_ANCHOR: Final = re.compile(
    rb'\{\s*"(?:[iI]d"\s*:\s*\d+\s*[,}]|name"\s*:\s*"(?:[^"\\\n]|\\[^\n])*"\s*,\s*"id"\s*:)'
)
"""How a node begins, whichever version wrote it (an attribute's name is followed by its type)."""


@dataclass(slots=True)
class Nodes:
    """What became of the nodes of a file."""

    total: int = 0
    """Whole nodes, wanted or not."""
    lost: int = 0
    """Nodes that are damaged."""
    closed: bool = False
    """The outer object has its end."""
    skipped: int = 0
    """Bytes that were given up at the end, after too many damages."""
    last: int = 0
    """Where the last whole node ended."""
    problems: list[str] = field(default_factory=list)


def utf8(data: bytes) -> bytes:
    """``data`` as UTF-8 without a mark of the byte order."""
    if data[:2] in {b"\xff\xfe", b"\xfe\xff"}:
        return data.decode("utf-16", "replace").encode("utf-8", "replace")
    return data.removeprefix(b"\xef\xbb\xbf")


def read_nodes(
    data: bytes, names: Sequence[str] | None, found: Nodes, bare: bool = False
) -> Iterator[dict[str, Any]]:
    """The decoded nodes of ``data`` whose names begin with one of ``names`` (None: all).

    Nodes are the objects in the lists of the outer object; with ``bare``, those of an outer list.
    Never raises for the content; ``found`` is filled on the way, and whole at the end.
    """
    text = np.frombuffer(data, dtype=np.uint8)
    spelled = [name.encode() for name in names or ()]
    patterns = np.frombuffer(b"".join(spelled) or b"\0", dtype=np.uint8)
    ends = np.cumsum([len(s) for s in spelled], dtype=np.int64)
    state = np.zeros(kernel.SLOTS, dtype=np.int64)
    state[kernel.START], state[kernel.DEPTH] = -1, int(bare)
    out = np.empty((_AT_ONCE, 2), dtype=np.int64)
    damages = 0
    while True:
        rows = kernel.find_nodes(text, state, patterns, ends, int(names is None), out)
        for start, end in out[:rows].tolist():
            node = _decode(data[start:end])
            if node is None:
                found.lost += 1
            else:
                yield node
        found.total = int(state[kernel.NODES])
        if state[kernel.FULL]:
            continue
        start = int(state[kernel.START])
        if not state[kernel.DAMAGED] and start < 0:
            break
        # a node that does not end: the next one that begins behind it is whole, if there is one
        damages += 1
        after = _ANCHOR.search(data, start + 1 if start >= 0 else int(state[kernel.AT]))
        if after is None or damages > _MOST_DAMAGES:
            found.lost += start >= 0
            found.skipped = len(data) - max(start, 0) if after is not None else 0
            return
        found.lost += 1
        state[kernel.AT], state[kernel.DEPTH], state[kernel.START] = after.start(), 2, -1
    found.closed = int(state[kernel.DEPTH]) == int(bare)


def _decode(node: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(node)
    except (msgspec.DecodeError, RecursionError):
        try:
            # also takes NaN, Infinity, control characters, and bytes that are no UTF-8
            value = lenient(node.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def lost_nodes(content: bytes, nodes: Nodes) -> list[str]:
    """What of a file's nodes could not be read, in words; empty where all could."""
    lost = []
    cut = cut_reason(content)
    if cut is not None:
        lost.append(cut)
    elif not nodes.closed:
        lost.append("the file lacks its end: the writer was killed or is still writing")
    if nodes.lost:
        lost.append(f"{nodes.lost} damaged nodes were left out")
    if nodes.skipped:
        lost.append(f"the last {nodes.skipped} bytes were given up after too many damages")
    return lost
