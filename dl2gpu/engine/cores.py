"""How many threads are worth having."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["cores"]


def cores(cgroup: str = "/sys/fs/cgroup/cpu.max") -> int:
    """Processors that this process may use, which may be fewer than the machine has.

    A container's limit on processor time counts as well: more threads than that would only be
    stopped in turn. ``cgroup`` is the file that holds it.
    """
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count() or 1
    try:
        quota, period = Path(cgroup).read_text(encoding="ascii").split()
        return max(1, min(usable, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # there is none, or it says "max"
        return usable
