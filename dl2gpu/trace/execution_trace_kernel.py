"""Where the nodes of an execution trace lie in its JSON, without building any of them.

One pass over the bytes that knows strings and brackets, and stops at what cannot be right.
"""

from __future__ import annotations

from typing import Final

from dl2gpu.engine.native import Bytes, Int64Rows, Int64s, kernel

__all__ = [
    "AT",
    "DAMAGED",
    "DEPTH",
    "FULL",
    "LARGEST_NODE",
    "NODES",
    "SLOTS",
    "START",
    "find_nodes",
]

# slots of ``state``
AT: Final = 0
"""Where the scan goes on."""
DEPTH: Final = 1
"""Open brackets there."""
START: Final = 2
"""Where the open node began; -1: none is open."""
NODES: Final = 3
"""Whole nodes seen, wanted or not."""
DAMAGED: Final = 4
"""1: what stands here is no JSON of nodes; the open node is not whole."""
FULL: Final = 5
"""1: ``out`` is full, call again."""
SLOTS: Final = 6

LARGEST_NODE: Final = 16 << 20
_NODE: Final = 3
_DEEPEST: Final = 200
_QUOTE: Final = 34
_BACKSLASH: Final = 92
_NEWLINE: Final = 10
_COLON: Final = 58
_COMMA: Final = 44
_OPEN: Final = 123
_CLOSE: Final = 125
_OPEN_LIST: Final = 91
_CLOSE_LIST: Final = 93


@kernel
def find_nodes(
    text: Bytes, state: Int64s, patterns: Bytes, ends: Int64s, everything: int, out: Int64Rows
) -> int:
    """Rows of ``out`` that were filled: (start, end) of each node whose name is wanted.

    A node is an object in a list in the outer object. Wanted are names that begin with one of
    ``patterns``, which stand one after the other, each up to its place in ``ends``; or, with
    ``everything``, all nodes. ``state`` (SLOTS numbers) carries the scan from call to call.
    """
    n = text.size
    i = state[AT]
    depth = state[DEPTH]
    start = state[START]
    rows = 0
    state[FULL] = 0
    state[DAMAGED] = 0
    key = 0  # 1: the string just read may be the key "name"; 2: its value comes next
    wanted = everything
    while i < n:
        c = text[i]
        if c == _QUOTE:
            first = i + 1
            i = first
            while i < n and text[i] != _QUOTE:
                if text[i] == _BACKSLASH:
                    i += 1
                elif text[i] == _NEWLINE:
                    state[DAMAGED] = 1
                    break
                i += 1
            if state[DAMAGED]:
                break
            if depth == _NODE and start >= 0:
                if key == 2:
                    key = 0
                    low = 0
                    for p in range(ends.size):
                        high = ends[p]
                        same = first + high - low <= i
                        for j in range(low, high):
                            if same and text[first + j - low] != patterns[j]:
                                same = False
                        if same:
                            wanted = 1
                        low = high
                else:
                    key = 0
                    if (
                        i - first == 4
                        and (text[first] | 32) == 110
                        and text[first + 1] == 97
                        and text[first + 2] == 109
                        and text[first + 3] == 101
                    ):
                        key = 1
        elif c == _COLON:
            key = 2 if key == 1 else 0
        elif c == _OPEN or c == _OPEN_LIST:
            depth += 1
            key = 0
            if depth > _DEEPEST:
                state[DAMAGED] = 1
                break
            if depth == _NODE and c == _OPEN:
                start = i
                wanted = everything
        elif c == _CLOSE or c == _CLOSE_LIST:
            if depth == _NODE and c == _CLOSE and start >= 0:
                state[NODES] += 1
                if wanted:
                    out[rows, 0] = start
                    out[rows, 1] = i + 1
                    rows += 1
                start = -1
            depth -= 1
            key = 0
            if depth < 0:
                state[DAMAGED] = 1
                break
            if rows == out.shape[0]:
                i += 1
                state[FULL] = 1
                break
        elif c == _COMMA:
            key = 0
        if start >= 0 and i - start > LARGEST_NODE:
            state[DAMAGED] = 1
            break
        i += 1
    state[AT] = i
    state[DEPTH] = depth
    state[START] = start
    return rows
