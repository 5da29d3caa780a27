"""The replay in rounds reaches the fixpoint of the work list, bit for bit, wherever it runs.

Compiled for one thread here; in numba-cuda's simulator with several threads a block; and compiled
to PTX, which shows that its source is one that a GPU takes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.ways import demo, lossy, wild
from hypothesis import HealthCheck, given, settings
from programs import from_seed, seeds, trace_of

from dl2gpu.analysis import rounds_kernel
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import Fixpoint, Program, Scenario, build, run
from dl2gpu.engine.base import Engine
from dl2gpu.engine.cpu import PLANS
from dl2gpu.engine.gpu import thread_count
from dl2gpu.trace.schema import Trace

FREE = Scenario(use_states=False, chosen=True)
SCENARIOS = {
    "rendezvous": Scenario(),
    "eager 16 B": Scenario(eager_bytes=16),
    "all buffered": Scenario(eager_bytes=Scenario.INFINITE),
    "one stream": Scenario(one_stream=True),
    "other lanes": Scenario(flip_lanes=0),
    "atomic batches": Scenario(atomic_batch=True),
    "early release": Scenario(early_release=True),
    "atomic, early": Scenario(atomic_batch=True, early_release=True),
    "what if": Scenario(use_states=False),
    "records": Scenario(use_records=True),
    "highest sender": Scenario(wild_high=True),
    "all generous": Scenario(Scenario.INFINITE, early_release=True, use_states=False),
    "all strict": Scenario(one_stream=True, atomic_batch=True),
    "two queues": Scenario(queues=2),
    "one message a channel": Scenario(buffer_messages=1),
    "48 B a channel": Scenario(buffer_bytes=48, atomic_batch=True),
    "2 messages, 64 B, eager": Scenario(buffer_messages=2, buffer_bytes=64, eager_bytes=16),
    "chosen, first": FREE,
    "chosen, given": replace(FREE, given=(1, 1, 0, 2), policy="last"),
    "chosen, seeded": replace(FREE, policy="seeded", seed=5, buffer_messages=1),
    "pool of the sender": replace(FREE, pool_bytes=48, policy="seeded", seed=1),
    "pool of the receiver": replace(FREE, pool_bytes=4096, pool="receiver", policy="last"),
    "pool of the job": replace(FREE, pool_bytes=64, pool="job", atomic_batch=True),
}
FACTS = ("issued", "started", "completed", "lane_at", "queue_at", "partner")

SETTINGS = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # fmt: skip


def elsewhere(p: Program, engine: Engine) -> Program:
    """The program, to be run on another engine."""
    m = p.matching
    return replace(p, matching=replace(m, prepared=replace(m.prepared, engine=engine)))


def assert_same(
    trace: Trace, scenario: Scenario, engine: Engine = PLANS, jobs: list[int] | None = None
) -> Fixpoint:
    p = build(match(trace))
    chosen = None if jobs is None else np.array(jobs, np.int32)
    expected, found = (run(q, scenario, chosen) for q in (p, elsewhere(p, engine)))
    for fact in FACTS:
        left, right = getattr(expected, fact), getattr(found, fact)
        assert left.dtype == right.dtype
        assert np.array_equal(left, right), (fact, np.flatnonzero(left != right)[:10])
    return found


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
@given(seed=seeds())
@SETTINGS
def test_programs(scenario: Scenario, seed: int) -> None:
    assert_same(trace_of(*from_seed(seed, 40)), scenario)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
@given(seed=seeds())
@SETTINGS
def test_programs_that_take_from_anybody(scenario: Scenario, seed: int) -> None:
    assert_same(trace_of(*wild(seed, 40)), scenario)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_records(scenario: Scenario) -> None:
    assert_same(demo(), scenario)
    assert_same(lossy(11, 60), scenario)


def test_wildcards_are_among_them() -> None:
    taken = assert_same(trace_of(*wild(2, 60)), Scenario()).partner >= 0
    assert taken.sum() > 20


def test_only_the_jobs_that_were_asked_for() -> None:
    trace = trace_of(*from_seed(4, 9))
    fix = assert_same(trace, Scenario(), jobs=[1, 4, 8])
    job = trace.events.sort("job", "rank", "seq", "lane")["job"].to_numpy()
    assert set(job[fix.issued]) == {1, 4, 8}
    assert not assert_same(trace, Scenario(), jobs=[]).issued.any()


def test_threads_of_a_block() -> None:
    assert [thread_count(n) for n in (0, 1, 32, 33, 64, 65, 512, 9999)] == [
        32, 32, 32, 64, 64, 128, 512, 512,
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------
# numba-cuda

HAS_NUMBA_CUDA = importlib.util.find_spec("numba_cuda") is not None
needs_numba_cuda = pytest.mark.skipif(not HAS_NUMBA_CUDA, reason="needs one of the gpu extras")

THREADS = (1, 3, 8)
"""Of a block in the simulator."""


class Simulated:
    """An engine whose kernels run in numba-cuda's simulator."""

    name = "gpu"
    passes = False

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.launched = 0

    def launch(
        self, kernel: Any, arguments: dict[str, Any], blocks: int, threads: int
    ) -> dict[str, Any]:
        from numba import cuda

        from dl2gpu.engine.base import Fresh, arguments_of

        function = kernel(cuda)
        made: list[Any] = []
        kept: dict[str, Any] = {}
        for name, value in arguments_of(function, arguments):
            if isinstance(value, Fresh):
                made.append(np.full(value.size, value.fill, value.dtype))
                if value.keep:
                    kept[name] = made[-1]
            else:
                made.append(value)
        # fewer blocks than jobs: each takes several
        cuda.jit(function)[max(blocks // 2, 1), self._threads](*made)
        self.launched += 1
        return kept


def simulated_traces() -> Iterator[tuple[str, Trace]]:
    yield "programs", trace_of(*from_seed(21, 6))
    yield "wildcards", trace_of(*wild(23, 5))
    yield "lost starts", lossy(24, 4)


def compare_in_simulator() -> int:
    """Compares all scenarios in the simulator; gives how many launches there were."""
    launched = 0
    for k, (scenario, (_, trace)) in enumerate(
        (scenario, named) for scenario in SCENARIOS.values() for named in simulated_traces()
    ):
        engine = Simulated(THREADS[k % len(THREADS)])
        assert_same(trace, scenario, engine)  # type: ignore[arg-type]
        launched += engine.launched
    return launched


@needs_numba_cuda
def test_in_the_simulator() -> None:
    """In a process of its own: the simulator is chosen before Numba is loaded."""
    tests = Path(__file__).parents[1]
    code = (
        "from numba import cuda, config\n"
        "assert config.ENABLE_CUDASIM\n"
        "from engine.test_gpu_kernel import compare_in_simulator\n"
        "print('launched', compare_in_simulator())\n"
    )
    path = os.pathsep.join([str(tests), str(tests.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": path},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    expected = len(SCENARIOS) * len(list(simulated_traces()))
    assert done.stdout.splitlines()[-1] == f"launched {expected}"


PARAMETER_BYTES = 4096
"""What CUDA takes as parameters of a kernel on every GPU."""


@needs_numba_cuda
@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (9, 0), (10, 0)])
def test_compiles_to_ptx(capability: tuple[int, int]) -> None:
    from numba import cuda, types
    from numba.np.numpy_support import from_dtype

    from dl2gpu.engine.native import kernel

    arguments = [
        types.boolean if p.dtype is None else types.Array(from_dtype(p.dtype), p.ndim, "C")
        for p in kernel(rounds_kernel.rounds).parameters
    ]
    ptx, result = cuda.compile_ptx(
        rounds_kernel.bound(cuda), types.void(*arguments), cc=capability
    )  # fmt: skip
    assert result == types.void
    assert f".target sm_{capability[0]}{capability[1]}" in ptx
    assert ptx.count("bar.sync") >= 9
    assert "atom.global.add" in ptx or "atom.add" in ptx
    assert not re.search(r"\bcall\b", ptx), "calls another function"
    size = {"u8": 1, "u32": 4, "u64": 8}
    entry = ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
    given = re.findall(r"\.param \.(u\d+)", entry)
    assert len(given) > len(arguments)
    assert sum(max(size[t], 8) for t in given) <= PARAMETER_BYTES


@needs_numba_cuda
def test_arguments_are_of_the_types_compiled_for() -> None:
    """What the analysis hands to the kernel is what was compiled above."""
    from dl2gpu.engine.base import Fresh, arguments_of
    from dl2gpu.engine.native import kernel

    seen: list[str] = []

    class Looking(Simulated):
        def launch(
            self, kernel_: Any, arguments: dict[str, Any], blocks: int, threads: int
        ) -> dict[str, Any]:
            parameters = kernel(rounds_kernel.rounds).parameters
            given = arguments_of(rounds_kernel.rounds, arguments)
            for (name, value), wanted in zip(given, parameters, strict=True):
                if isinstance(value, (Fresh, np.ndarray)):
                    assert np.dtype(value.dtype) == wanted.dtype, name
                else:
                    assert wanted.dtype is None, name
                seen.append(name)
            return PLANS.launch(kernel_, arguments, blocks, threads)

    for trace in (trace_of(*wild(2, 20)), trace_of(*from_seed(2, 20)), demo()):
        assert_same(trace, Scenario(), Looking(1))  # type: ignore[arg-type]
    assert len(seen) > 150
