"""On a machine with a GPU: the GPU engine gives the CPU engine's findings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
import pytest
from engine.test_gpu_kernel import SCENARIOS, assert_same
from engine.ways import cases, demo, lossy, memberless, result, wild
from programs import from_seed, trace_of

from dl2gpu.analysis.replay import Scenario
from dl2gpu.engine.choose import engine_of, missing
from dl2gpu.engine.cpu import CPU
from dl2gpu.trace.schema import Trace

if missing():
    pytest.skip(f"needs a GPU: {'; '.join(missing())}", allow_module_level=True)

pytestmark = pytest.mark.gpu


TRACES: dict[str, Callable[[], Trace]] = {
    "demo": demo,
    "programs": lambda: trace_of(*from_seed(41, 300)),
    "wildcards": lambda: trace_of(*wild(42, 300)),
    "lost starts": lambda: lossy(43, 300),
    "unknown members": lambda: memberless(44, 300),
}


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_findings(trace: Callable[[], Trace]) -> None:
    assert result(trace(), engine_of("gpu")) == result(trace(), CPU)


def test_labelled_cases() -> None:
    for name, trace in cases():
        assert result(trace, engine_of("gpu")) == result(trace, CPU), name


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_replay(scenario: Scenario) -> None:
    for seed in range(5):
        assert_same(trace_of(*from_seed(seed, 200)), scenario, engine_of("gpu"))
        assert_same(trace_of(*wild(seed, 200)), scenario, engine_of("gpu"))


def test_components() -> None:
    rng = np.random.default_rng(5)
    for size in (1, 2, 50, 5000):
        src, dst = rng.integers(0, size, (2, size + size // 4))
        found, expected = (e.components(src, dst, size) for e in (engine_of("gpu"), CPU))
        pairs = pl.DataFrame({"found": found, "expected": expected}).unique()
        assert pairs["found"].is_unique().all()
        assert pairs["expected"].is_unique().all()
