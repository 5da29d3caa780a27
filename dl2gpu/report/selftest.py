"""The same small corpus on every engine that this machine has, compared bit for bit.

The corpus is a labelled fleet (``suites.fleet``) in memory, so that the answers are known as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from dl2gpu.engine.choose import missing
from dl2gpu.trace.schema import Trace

__all__ = ["Run", "SelfTest", "copy_bandwidth", "self_test"]

JOBS: Final = 60
EVENTS: Final = 600_000
SEED: Final = 1
_COPIED: Final = 128 << 20
_TIMES: Final = 3


@dataclass(frozen=True, slots=True)
class Run:
    """The corpus on one engine."""

    engine: str
    first: float
    """Seconds of the first call: kernels are linked or compiled, libraries are loaded."""
    seconds: float
    """Seconds of the fastest of some more."""
    as_labelled: int
    """Jobs with the verdict that the corpus has for them."""
    same: bool
    """Are findings and verdicts those of the first engine, bit for bit?"""
    error: str | None = None
    """Why there is no result."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the engines did, and what the memory could do."""

    jobs: int
    events: int
    bytes: int
    """Memory of the columns of the event table that hold anything."""
    bandwidth: float
    """Bytes a second of copying memory: read and written."""
    runs: tuple[Run, ...]

    @property
    def floor(self) -> float:
        """Seconds to read the event table once."""
        return self.bytes / self.bandwidth

    @property
    def passed(self) -> bool:
        """Did every engine give the labelled verdicts, and all the same findings?"""
        return all(r.error is None and r.same and r.as_labelled == self.jobs for r in self.runs)


def self_test(jobs: int = JOBS, events: int = EVENTS) -> SelfTest:
    """Analyses a fleet of ``jobs`` jobs on the CPU, and on the GPU where it is usable.

    An engine that fails does not raise: its run has the error.
    """
    from dl2gpu.suites.fleet import trace_of

    trace, labels = trace_of(jobs, events, SEED, ranks=(8, 256), mixture=_MIXTURE)
    engines = ["cpu"] if missing() else ["cpu", "gpu"]
    runs: list[Run] = []
    reference: tuple[Any, pl.DataFrame] | None = None
    for engine in engines:
        run, result = _run(engine, trace, labels, reference)
        runs.append(run)
        reference = reference or result
    held = [s for s in trace.events.get_columns() if s.null_count() < len(s)]
    return SelfTest(
        jobs=labels.height,
        events=trace.events.height,
        bytes=sum(int(s.estimated_size()) for s in held),
        bandwidth=copy_bandwidth(),
        runs=tuple(runs),
    )


_MIXTURE: Final = {
    "skip": 0.05, "order": 0.05, "size": 0.05, "message": 0.05, "crash": 0.05, "stall": 0.05,
    "lost": 0.05,
}  # fmt: skip


def _run(
    engine: str, trace: Trace, labels: pl.DataFrame, reference: tuple[Any, pl.DataFrame] | None
) -> tuple[Run, tuple[Any, pl.DataFrame] | None]:
    from dl2gpu.analysis import analyse

    options: dict[str, Any] = {} if engine == "cpu" else {"engine": engine}
    try:
        first, result = _timed(lambda: analyse(trace, **options))
        seconds = min(_timed(lambda: analyse(trace, **options))[0] for _ in range(_TIMES))
    except Exception as e:  # noqa: BLE001 - whatever it is, it is the finding of this test
        words = " ".join(f"{type(e).__name__}: {e}".split())
        return Run(engine, 0.0, 0.0, 0, same=False, error=words), None
    found = (result.findings, result.jobs)
    same = reference is None or (found[0] == reference[0] and found[1].equals(reference[1]))
    agree = (result.jobs["verdict"] == labels["verdict"]) & (
        result.jobs["deadlocked"].eq_missing(labels["deadlocked"])
    )
    return Run(engine, first, seconds, int(agree.sum()), same), found


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def copy_bandwidth(size: int = _COPIED) -> float:
    """Bytes a second of one thread copying ``size`` bytes, those read and those written."""
    source = np.ones(size, np.uint8)
    target = np.empty_like(source)
    best = min(_timed(lambda: np.copyto(target, source))[0] for _ in range(_TIMES + 1))
    return 2 * size / best
