"""How many threads are worth having."""

from __future__ import annotations

import os

__all__ = ["cores"]


def cores() -> int:
    """Processors that this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
