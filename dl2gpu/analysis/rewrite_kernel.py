"""Fusion buffers that are filled one operation after the other."""

from __future__ import annotations

from dl2gpu.engine.native import Int64s, kernel

__all__ = ["fill"]


@kernel
def fill(run: Int64s, cycle: Int64s, size: Int64s, most: int, bucket: Int64s) -> None:
    """The number of the buffer that each operation goes into, counted over all runs.

    What does not fit any more goes into the next one; so does what gets ready in the next cycle, or
    in another run. A buffer holds one operation, however large.

    Args:
        run: of each operation, those of a run together. cycle: in which it gets ready.
        size: bytes. most: that a buffer holds; 0: any number.
        bucket: out.
    """
    held = 0
    at = -1
    for x in range(len(run)):
        fresh = x == 0 or run[x] != run[x - 1] or cycle[x] != cycle[x - 1]
        if fresh or (most > 0 and held + size[x] > most):
            at += 1
            held = 0
        held += size[x]
        bucket[x] = at
