"""Exploration in the simulator of numba-cuda: cells of one job, a copy of its state each."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from analysis.test_explore import FREE, small, star
from engine.test_gpu_kernel import Simulated, elsewhere, needs_numba_cuda

from dl2gpu.analysis.explore import Budget, explore
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import build
from dl2gpu.trace.schema import concat


def compare_in_simulator() -> int:
    """Explores in the simulator as on the CPU; gives how many schedules there were."""
    p = build(match(concat([small(2), small(7), star(3, 1)])))
    schedules = 0
    for scenario in (FREE, replace(FREE, pool_bytes=8), replace(FREE, buffer_messages=1)):
        wanted = explore(p, [0, 1, 2], scenario, Budget(12))
        there = elsewhere(p, Simulated(3))  # type: ignore[arg-type]
        assert explore(there, [0, 1, 2], scenario, Budget(12)) == wanted
        schedules += sum(one.schedules for one in wanted)
    return schedules


@needs_numba_cuda
def test_in_the_simulator() -> None:
    """In a process of its own: the simulator is chosen before Numba is loaded."""
    tests = Path(__file__).parents[1]
    code = (
        "from engine.test_gpu_explore import compare_in_simulator\n"
        "print('schedules', compare_in_simulator())\n"
    )
    path = os.pathsep.join([str(tests), str(tests.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": path},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "schedules 24"
