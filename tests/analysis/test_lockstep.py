"""Scenarios of a job in lock step end as each of them does alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from lockstep import both, disagreements
from programs import Program, seeds, trace_of

from dl2gpu.analysis import choice_kernel as ck
from dl2gpu.analysis import outcomes as module
from dl2gpu.analysis.lockstep_kernel import LEFT, PATIENCE
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.outcomes import outcomes
from dl2gpu.analysis.replay import build, run
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.engine.base import Engine
from dl2gpu.engine.cpu import CPU, PLANS

WHAT_IF = Scenario(use_states=False)


@given(seed=seeds())
@hypothesis_settings(max_examples=25, deadline=None)
def test_in_lock_step_as_alone(seed: int) -> None:
    assert disagreements(seed, 40) == []


def op(name: str, **fields: Any) -> dict[str, Any]:
    return {"op": name, "comm": "w", "count": 1, "dtype": "int32", "bytes": 4} | fields


def bursts(ranks: int, steps: int, burst: int) -> Program:
    """Even ranks send some messages to the next rank, which answers; at times all meet."""
    ops: dict[int, list[dict[str, Any]]] = {r: [] for r in range(ranks)}
    for step in range(steps):
        for r in range(0, ranks, 2):
            for k in range(burst):
                size = 4 * (1 + (step + k) % 3)
                ops[r].append(op("send", peer=r + 1, count=size // 4, bytes=size))
                ops[r + 1].append(op("recv", peer=r, count=size // 4, bytes=size))
            ops[r].append(op("recv", peer=r + 1))
            ops[r + 1].append(op("send", peer=r))
        if step % 4 == 3:
            for r in range(ranks):
                ops[r].append(op("all_reduce"))
    return Program(ops, {"w": list(range(ranks))})


def crossed(messages: int) -> Program:
    """Two ranks send so many messages of four bytes to each other before they receive."""
    return Program(
        {
            r: [op("send", peer=1 - r) for _ in range(messages)]
            + [op("recv", peer=1 - r) for _ in range(messages)]
            for r in range(2)
        },
        {"w": [0, 1]},
    )


def test_what_is_the_same_is_done_once() -> None:
    program = bursts(8, 20, 3)
    events = sum(map(len, program.ops.values()))
    _, _, alone = both([program], [WHAT_IF])
    got, wanted, steps = both([program], [WHAT_IF] * 64)
    assert (got == wanted).all()
    assert steps == alone == 3 * events  # issued, started, completed


def test_scenarios_that_part_meet_again() -> None:
    program = bursts(8, 20, 6)
    tried = [replace(WHAT_IF, buffer_messages=k) for k in range(8)]
    tried += [replace(WHAT_IF, eager_bytes=4 * k) for k in range(8)]
    apart = sum(both([program], [s])[2] for s in tried)
    got, wanted, steps = both([program], tried)
    assert (got == wanted).all()
    assert steps < apart / 3


def apart(steps: int) -> Program:
    """One of two ranks sends many messages, and the other works before it receives them."""
    rng = np.random.default_rng(steps)
    ops: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for _ in range(steps):
        sender = int(rng.integers(2))
        ops[1 - sender] += [op("all_reduce", comm=f"{1 - sender}")] * int(rng.integers(20))
        for _ in range(int(rng.integers(1, 40))):
            ops[sender].append(op("send", peer=1 - sender))
            ops[1 - sender].append(op("recv", peer=sender))
    return Program(ops, {"w": [0, 1], "0": [0], "1": [1]})


def test_scenarios_that_stay_apart_are_put_in_order() -> None:
    program = apart(200)
    events = sum(map(len, program.ops.values()))
    tried = [replace(WHAT_IF, buffer_messages=k) for k in range(1, 64)]
    wanted, _, as_before = both([program], tried, patience=1 << 40)
    at_once, alone, _ = both([program], tried, patience=-(1 << 40))
    got, _, steps = both([program], tried)
    assert got.tolist() == at_once.tolist() == wanted.tolist() == alone.tolist()
    # three of rendezvous, three of all, and what was lost until then
    assert steps < 7 * events + PATIENCE < as_before / 1.5


def test_each_ends_where_its_buffer_ends() -> None:
    """Of 100 messages, with 0 to 119 buffered: a word of scenarios, and a part of the next."""
    tried = [replace(WHAT_IF, buffer_messages=k) for k in range(1, 120)]
    tried.append(WHAT_IF)
    got, wanted, _ = both([crossed(100)], tried)
    assert (got == wanted).all()
    room = np.array([s.buffer_messages for s in tried])
    # the host stands at the first send that does not fit
    assert (got[0, :, ck.COMPLETED] == np.where(room >= 100, 400, 2 * room)).all()
    assert (got[0, :, ck.STANDING] == np.where(room >= 100, 0, 2)).all()
    by_bytes = [replace(WHAT_IF, buffer_bytes=4 * s.buffer_messages) for s in tried]
    assert (both([crossed(100)], by_bytes)[0] == got).all()


@pytest.mark.parametrize("engine", [CPU, PLANS], ids=["work list, lock step", "rounds"])
@pytest.mark.parametrize("cells", [1, 8])
@pytest.mark.parametrize(
    ("scenario", "stands"),
    [
        (replace(WHAT_IF, buffer_bytes=1 << 40), True),
        (replace(WHAT_IF, buffer_bytes=Scenario.INFINITE), False),
        (replace(WHAT_IF, buffer_bytes=Scenario.INFINITE, buffer_messages=2), True),
        (replace(WHAT_IF, pool_bytes=1 << 40), True),
        (replace(WHAT_IF, pool_bytes=Scenario.INFINITE, buffer_messages=1), False),
    ],
)
def test_messages_of_unknown_size(
    engine: Engine, cells: int, scenario: Scenario, stands: bool
) -> None:
    """They fit a buffer that holds anything, and no other."""
    program = crossed(3)
    for ops in program.ops.values():
        for one in ops:
            one["bytes"] = one["count"] = None
    p = build(match(trace_of(program), engine))
    o = outcomes(p, [scenario], np.zeros((cells, 2), np.int32))
    assert (o.standing > 0).tolist() == [stands] * cells


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(),
        replace(WHAT_IF, atomic_batch=True),
        replace(WHAT_IF, pool_bytes=8, chosen=True),
    ],
    ids=["recorded completions", "atomic batches", "a pool"],
)
def test_what_is_not_for_lock_step_is_replayed_alone(scenario: Scenario) -> None:
    program = bursts(4, 4, 2)
    for ops in program.ops.values():
        ops[0]["state"] = "completed"
    got, wanted, steps = both([program], [scenario] * 5)
    assert (got[:, :, ck.COMPLETED] == LEFT).all()
    assert steps == 0
    p = build(match(trace_of(program)))
    o = outcomes(p, [scenario], np.zeros((5, 2), np.int32))
    assert o.completed.tolist() == wanted[0, :, ck.COMPLETED].tolist()
    assert o.digest.tolist() == wanted[0, :, ck.DIGEST].tolist()


def test_a_wildcard_is_left_and_its_neighbour_is_not() -> None:
    wild = crossed(2)
    wild.ops[0][-1]["peer"] = "any"
    got, wanted, _ = both([bursts(2, 2, 2), wild, crossed(1)], [WHAT_IF] * 4)
    left = got[:, :, ck.COMPLETED] == LEFT
    assert left.all(axis=1).tolist() == [False, True, False]
    assert (got[~left] == wanted[~left]).all()


def test_cells_in_any_order_and_of_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some jobs with a few cells (alone), some with many; shuffled, and by several threads."""
    monkeypatch.setattr(module, "_LEAST_EVENTS", 1)
    monkeypatch.setattr(module, "cores", lambda: 3)
    programs = [crossed(1 + k % 5) for k in range(9)]
    p = build(match(trace_of(*programs)))
    tried = [replace(WHAT_IF, buffer_messages=k) for k in range(70)]
    cells = [(job, row) for job in range(9) for row in range([2, 70, 5][job % 3])]
    rng = np.random.default_rng(1)
    rng.shuffle(cells)
    o = outcomes(p, tried, np.array(cells))
    for (job, row), completed, standing in zip(cells, o.completed, o.standing, strict=True):
        fix = run(p, tried[row], np.array([job], np.int32))
        assert completed == fix.completed.sum()
        assert standing == (fix.lane_at >= 0).sum()
