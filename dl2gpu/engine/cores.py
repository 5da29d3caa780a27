"""How many threads are worth having."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["cores", "limited"]

_limit: ContextVar[int | None] = ContextVar("threads", default=None)


def cores() -> int:
    """Threads for a piece of work: what :func:`limited` says, else one for each usable processor.

    Those that this process may use, which may be fewer than the machine has.
    """
    limit = _limit.get()
    if limit is not None:
        return limit
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """Within, :func:`cores` is ``threads`` (None: as before) for whoever runs in this thread."""
    token = _limit.set(threads if threads is not None else _limit.get())
    try:
        yield
    finally:
        _limit.reset(token)
