"""Is a table sorted? Readers mostly deliver it so, and one look is cheaper than a sort."""

from __future__ import annotations

from dl2gpu.engine.native import Int32s, Int64s, kernel

__all__ = ["in_order"]


@kernel
def in_order(job: Int32s, rank: Int32s, seq: Int64s, lane: Int32s) -> bool:
    """Are the rows strictly increasing by (job, rank, seq, lane)?"""
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
