"""Framing and order of a Chakra trace: the messages of its file, and its nodes in program order.

A file is a run of messages, each behind its length (a varint). A node's number, kind and
dependencies are read here, from the wire format; nothing else of it is decoded.
"""

from __future__ import annotations

from typing import Final

from dl2gpu.engine.native import Bytes, Int32s, Int64Rows, Int64s, helper, kernel

__all__ = [
    "AT", "BAD", "BEHIND", "C_DEPS", "C_END", "C_ID", "C_KIND", "C_START", "FULL", "SLOTS", "WIDTH",
    "dependencies", "frame", "in_order",
]  # fmt: skip

# columns of ``rows``
C_START: Final = 0
C_END: Final = 1
C_ID: Final = 2
C_KIND: Final = 3
"""Kind of the node; -1: the message is none of the schema's."""
C_DEPS: Final = 4
"""How many nodes it depends on."""
WIDTH: Final = 5

# slots of ``state``
AT: Final = 0
FULL: Final = 1
BAD: Final = 2
"""1: the length at ``AT`` reaches past the end, or is no number."""
BEHIND: Final = 3
"""1: a length of 0 ends the messages at ``AT``."""
SLOTS: Final = 4

_MESSAGE: Final = 2
_VARINT: Final = 0
_EIGHT: Final = 1
_FOUR: Final = 5


@helper()
def _varint(data, i, end, got):  # type: ignore[no-untyped-def]
    """Position behind the varint at ``i``, its value in ``got[0]``; -1 if it does not end."""
    value = 0
    shift = 0
    while i < end and shift < 64:
        c = data[i]
        i += 1
        if shift < 63:
            value |= (c & 127) << shift
        shift += 7
        if c < 128:
            got[0] = value
            return i
    return -1


@helper()
def _skip(data, i, end, wire, got):  # type: ignore[no-untyped-def]
    """Position behind the field at ``i``; -1 if it is no field."""
    if wire == _VARINT:
        return _varint(data, i, end, got)
    if wire == _EIGHT:
        i += 8
    elif wire == _FOUR:
        i += 4
    elif wire == _MESSAGE:
        i = _varint(data, i, end, got)
        if i < 0 or got[0] < 0 or got[0] > end - i:
            return -1
        i += got[0]
    else:
        return -1
    return i if i <= end else -1


@kernel
def frame(data: Bytes, state: Int64s, got: Int64s, rows: Int64Rows) -> int:
    """Rows that were filled: one for each message from ``state[AT]`` on.

    ``got`` is scratch of one number.
    """
    n = data.size
    at = state[AT]
    out = 0
    state[FULL] = 0
    while at < n:
        if out == rows.shape[0]:
            state[FULL] = 1
            break
        i = _varint(data, at, n, got)
        size = got[0]
        if i < 0 or size < 0 or size > n - i:
            state[BAD] = 1
            break
        if size == 0 and at > 0:
            state[BEHIND] = 1
            break
        end = i + size
        rows[out, C_START] = i
        rows[out, C_END] = end
        rows[out, C_ID] = -1
        rows[out, C_KIND] = 0
        rows[out, C_DEPS] = 0
        while i < end:
            i = _varint(data, i, end, got)
            if i < 0:
                break
            number = got[0] >> 3
            wire = got[0] & 7
            first = i
            i = _skip(data, i, end, wire, got)
            if i < 0:
                break
            if wire == _VARINT:
                if number == 1:
                    rows[out, C_ID] = got[0]
                elif number == 3:
                    rows[out, C_KIND] = got[0]
                elif number == 4 or number == 5:
                    rows[out, C_DEPS] += 1
            elif wire == _MESSAGE and (number == 4 or number == 5):
                for j in range(first, i):
                    rows[out, C_DEPS] += 1 if data[j] < 128 else 0
                # the length itself ended with such a byte
                rows[out, C_DEPS] -= 1
        if i < 0:
            rows[out, C_KIND] = -1
            rows[out, C_DEPS] = 0
        out += 1
        at = end
    state[AT] = at
    return out


@kernel
def dependencies(data: Bytes, got: Int64s, rows: Int64Rows, node: Int32s, on: Int64s) -> int:
    """Edges that were filled: row ``node`` depends on the node of number ``on``."""
    out = 0
    for r in range(rows.shape[0]):
        if rows[r, C_DEPS] == 0:
            continue
        i = rows[r, C_START]
        end = rows[r, C_END]
        last = out + rows[r, C_DEPS]
        while i < end and out < last:
            i = _varint(data, i, end, got)
            number = got[0] >> 3
            wire = got[0] & 7
            first = i
            i = _skip(data, i, end, wire, got)
            if number != 4 and number != 5:
                continue
            if wire == _VARINT:
                node[out] = r
                on[out] = got[0]
                out += 1
            elif wire == _MESSAGE:
                j = _varint(data, first, i, got)
                while 0 <= j < i and out < last:
                    j = _varint(data, j, i, got)
                    if j >= 0:
                        node[out] = r
                        on[out] = got[0]
                        out += 1
    return out


@kernel
def in_order(waiting: Int32s, first: Int64s, after: Int32s, heap: Int32s, order: Int32s) -> int:
    """How many nodes were ordered: those that no circle of dependencies holds up.

    Of the nodes whose dependencies are done, the one of the lowest position comes next.

    Args:
        waiting: for each node, on how many it depends; is used up.
        first: where in ``after`` the nodes that depend on each begin; one more than nodes.
        after: positions of the nodes that depend on a node.
        heap: scratch, one a node.
        order: positions in order.
    """
    n = waiting.size
    size = 0
    for p in range(n):
        if waiting[p] == 0:  # positions rise, so this is a heap as it is
            heap[size] = p
            size += 1
    out = 0
    while size > 0:
        top = heap[0]
        order[out] = top
        out += 1
        size -= 1
        moved = heap[size]
        at = 0
        while 2 * at + 1 < size:
            child = 2 * at + 1
            if child + 1 < size and heap[child + 1] < heap[child]:
                child += 1
            if heap[child] >= moved:
                break
            heap[at] = heap[child]
            at = child
        heap[at] = moved
        for e in range(first[top], first[top + 1]):
            p = after[e]
            waiting[p] -= 1
            if waiting[p] == 0:
                at = size
                size += 1
                while at > 0 and heap[(at - 1) // 2] > p:
                    heap[at] = heap[(at - 1) // 2]
                    at = (at - 1) // 2
                heap[at] = p
    return out
