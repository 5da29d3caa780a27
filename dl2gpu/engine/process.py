"""A process that analyses: what it tells the libraries it runs on, before they are loaded.

Allocators give memory back that the next shard asks for again, page by page: a third of the time of
a large scan. Here they keep it. What a scan needs at its peak is hardly more for it, with one arena
for large pieces in place of one a thread and one that is given back at once.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Final

from dl2gpu.engine.cores import cores

__all__ = ["environment", "prepare"]

_MAPPED: Final = 32 << 20
"""Bytes from which the C library maps a piece by itself: the most that each version takes."""
_KEPT_MS: Final = 30_000
"""How long Polars' allocator keeps what is given back, in milliseconds."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def environment(threads: int) -> dict[str, str]:
    """Variables of a process that analyses on so many threads.

    NumPy's linear algebra would start threads that wait busily, on cores that the scan can use.
    """
    arenas = max(1, threads // 4)
    return {
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": str(_MAPPED),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 62),
        "_RJEM_MALLOC_CONF": (
            f"narenas:{arenas},oversize_threshold:0,"
            f"dirty_decay_ms:{_KEPT_MS},muzzy_decay_ms:{_KEPT_MS}"
        ),
    }


def prepare() -> None:
    """The same in this process, where Polars and NumPy are not loaded yet; what is set stays."""
    mine = {k for k in os.environ if k.startswith("MALLOC_")}
    for name, value in environment(cores()).items():
        os.environ.setdefault(name, value)
    if not mine:  # the C library has looked at its variables already
        with suppress(AttributeError, OSError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED)
            libc.mallopt(_M_TRIM_THRESHOLD, -1)
