"""Many scenarios of random programs, in lock step and one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from programs import Program, from_seed, trace_of

from dl2gpu.analysis import choice_kernel as ck
from dl2gpu.analysis.launch import batch_of, launch, launch_in_lockstep
from dl2gpu.analysis.lockstep_kernel import LEFT, PATIENCE
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import build, layout
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.engine.arrays import Array

READINGS = (
    Scenario(),
    Scenario(one_stream=True),
    Scenario(queues=2),
    Scenario(flip_lanes=0),
    Scenario(flip_lanes=1),
)


def drawn(rnd: random.Random, many: int) -> list[Scenario]:
    """Scenarios of one reading of streams, alike in most and different in all that may differ."""
    reading = rnd.choice(READINGS)
    return [
        replace(
            reading,
            use_states=False,
            early_release=rnd.random() < 0.4,
            eager_bytes=rnd.choice([0, 0, 8, 16, 32, 100, Scenario.INFINITE]),
            buffer_messages=rnd.choice([0, 0, 0, 1, 2, 3, 9]),
            buffer_bytes=rnd.choice([0, 0, 0, 16, 48, 64, 1000, Scenario.INFINITE]),
            wild_high=rnd.random() < 0.5,
        )
        for _ in range(many)
    ]


def some_waits_for_everything(programs: list[Program], rnd: random.Random) -> list[Program]:
    """The programs, with waits that name no request: for all that was issued before them."""
    for program in programs:
        for ops in program.ops.values():
            for op in ops:
                if op["op"] == "wait" and rnd.random() < 0.3:
                    op.pop("requests", None)
                    op.pop("mode", None)
    return programs


def both(
    programs: list[Program], scenarios: list[Scenario], patience: int = PATIENCE
) -> tuple[Array, Array, int]:
    """int64[programs, scenarios, outcome]: in lock step, and one by one; and the steps taken."""
    p = build(match(trace_of(*programs)))
    jobs, rows = np.meshgrid(np.arange(len(programs)), np.arange(len(scenarios)), indexing="ij")
    cells = np.stack([jobs.ravel(), rows.ravel(), np.zeros(jobs.size, np.int64)], axis=1)
    batch = batch_of(p, layout(p, scenarios[0]), scenarios, cells, record=ck.OUTCOMES, keep=False)
    got, steps = launch_in_lockstep(p, batch, patience)
    shape = (len(programs), len(scenarios), ck.OUTCOMES)
    return got.reshape(shape), launch(p, batch)["outcome"].reshape(shape), steps


def disagreements(seed: int, programs: int) -> list[str]:
    """Cells of random programs that end otherwise in lock step than alone."""
    rnd = random.Random(seed)
    many = rnd.choice([1, 2, 3, 17, 63, 64, 65, 130])
    scenarios = drawn(rnd, many)
    # how soon another order of steps is tried
    patience = rnd.choice([PATIENCE, 0, -1_000_000])
    of = some_waits_for_everything(from_seed(seed, programs), rnd)
    got, wanted, _ = both(of, scenarios, patience)
    left = got[:, :, ck.COMPLETED] == LEFT
    bad = np.argwhere((got != wanted).any(axis=2) & ~left)
    return [
        f"program {job} of seed {seed}: {scenarios[row]}: {got[job, row]}, not {wanted[job, row]}"
        for job, row in bad.tolist()
    ]
