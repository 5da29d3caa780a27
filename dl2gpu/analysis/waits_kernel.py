"""Waits for everything that came before them, as pairs."""

from __future__ import annotations

from dl2gpu.engine.native import Bools, Int64s, UInt32s, kernel

__all__ = ["pairs_of_all"]


@kernel
def pairs_of_all(
    lane: UInt32s, at: Int64s, known: Bools, able: Bools, wait: UInt32s, target: UInt32s
) -> int:
    """How many pairs there are; they are written as far as there is room for them.

    Args:
        lane: of each event, rising. at: rows of the waits, rising.
        known: of each event, whether it is recorded as complete.
        able: of each event, whether it can be waited for.
        wait, target: the pairs.
    """
    n = 0
    before = -1  # the wait before it in its lane, and the one that is not known to be complete
    unknown = -1
    for k in range(len(at)):
        w = at[k]
        if k and lane[at[k - 1]] != lane[w]:
            before = -1
            unknown = -1
        first = before if known[w] else unknown
        if first < 0:
            first = w
            while first > 0 and lane[first - 1] == lane[w]:
                first -= 1
        for x in range(first, w):
            if able[x]:
                if n < len(wait):
                    wait[n] = w
                    target[n] = x
                n += 1
        before = w
        if not known[w]:
            unknown = w
    return n
