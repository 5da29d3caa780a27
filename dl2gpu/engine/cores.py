"""How many threads are worth having, and how much memory there is."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

__all__ = ["cores", "limited", "memory"]

_limit: ContextVar[int | None] = ContextVar("threads", default=None)


def cores(cgroup: str = "/sys/fs/cgroup/cpu.max") -> int:
    """Threads for a piece of work: what :func:`limited` says, else one for each usable processor.

    Those that this process may use, which may be fewer than the machine has. A container's limit on
    processor time counts as well: more threads than that would only be stopped in turn. ``cgroup``
    is the file that holds it.
    """
    limit = _limit.get()
    if limit is not None:
        return limit
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    try:
        quota, period = Path(cgroup).read_text(encoding="ascii").split()
        return max(1, min(usable, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # there is none, or it says "max"
        return usable


@contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """Within, :func:`cores` is ``threads`` (None: as before) for whoever runs in this thread."""
    token = _limit.set(threads if threads is not None else _limit.get())
    try:
        yield
    finally:
        _limit.reset(token)


def memory(cgroup: str = "/sys/fs/cgroup/memory.max") -> int:
    """Bytes of memory of this machine, or that its container may use (``cgroup`` says)."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(there, int(Path(cgroup).read_text(encoding="ascii")))
    except (OSError, ValueError):  # there is no limit, or it says "max"
        return there
