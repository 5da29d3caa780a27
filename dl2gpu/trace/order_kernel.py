"""Looks at whole columns: is a table sorted, and which values are there?"""

from __future__ import annotations

from dl2gpu.engine.native import Int32s, Int64s, UInt32s, kernel

__all__ = ["first_seen", "in_order"]


@kernel
def in_order(job: Int32s, rank: Int32s, seq: Int64s, lane: Int32s) -> bool:
    """Are the rows strictly increasing by (job, rank, seq, lane)?

    Readers mostly deliver them so, and one look is cheaper than a sort.
    """
    for x in range(1, len(job)):
        if job[x] != job[x - 1]:
            later = job[x] > job[x - 1]
        elif rank[x] != rank[x - 1]:
            later = rank[x] > rank[x - 1]
        elif seq[x] != seq[x - 1]:
            later = seq[x] > seq[x - 1]
        else:
            later = lane[x] > lane[x - 1]
        if not later:
            return False
    return True


@kernel
def first_seen(numbers: UInt32s, first: Int32s) -> None:
    """Where each number is for the first time; ``first`` is -1 before. Others are passed over."""
    for x in range(len(numbers)):
        k = numbers[x]
        if k < len(first) and first[k] < 0:
            first[k] = x
