"""The jobs of a trace divided among threads: jobs share nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np

from dl2gpu.engine.cores import cores, limited
from dl2gpu.trace.schema import Trace, split

__all__ = ["over_shares"]

_LEAST: Final = 100_000
"""Events that make a thread worth its while."""

T = TypeVar("T")


def over_shares(
    trace: Trace, call: Callable[[Trace], T], workers: int | None = None
) -> list[tuple[int, T]]:
    """(first job, ``call`` of the share) for runs of jobs, about one a thread, in order of jobs.

    The attempts of one job stay together. ``workers`` is at most how many; default one a core.
    """
    cuts = _cuts(trace, workers or cores())
    if len(cuts) <= 2:
        return [(0, call(trace))]

    def alone(share: Trace) -> T:
        with limited(1):
            return call(share)

    with ThreadPoolExecutor(len(cuts) - 1, thread_name_prefix="analysis") as pool:
        return list(zip(cuts, pool.map(alone, split(trace, cuts)), strict=False))


def _cuts(trace: Trace, most: int) -> list[int]:
    """Jobs at which shares begin, and how many jobs there are."""
    n_jobs = trace.jobs.height
    many = min(most, n_jobs, trace.events.height // _LEAST)
    if many <= 1:
        return [0, n_jobs]
    jobs = trace.jobs.sort("job")
    last = {key: j for j, key in enumerate(zip(jobs["folder"], jobs["name"], strict=True))}
    together = np.maximum.accumulate(
        [last[key] for key in zip(jobs["folder"], jobs["name"], strict=True)]
    )
    begins = np.flatnonzero(together[:-1] < np.arange(1, n_jobs)) + 1
    if not len(begins):
        return [0, n_jobs]
    before = np.cumsum(np.bincount(trace.events["job"].to_numpy(), minlength=n_jobs))
    wanted = np.linspace(0, before[-1], many + 1)[1:-1]
    # the first possible beginning that has so many events before it
    at = begins[np.minimum(np.searchsorted(before[begins - 1], wanted), len(begins) - 1)]
    return [0, *np.unique(at).tolist(), n_jobs]
