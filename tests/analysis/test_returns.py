"""Waits for any or some: what they return nobody waits for again."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from analysis.handmade import made, recv, send, wait
from engine.test_gpu_kernel import elsewhere
from naive import Choices, progress

from dl2gpu.analysis.matching import match
from dl2gpu.analysis.outcomes import outcomes
from dl2gpu.analysis.replay import Scenario, build, run
from dl2gpu.engine.cpu import PLANS
from dl2gpu.trace.schema import OP, Trace

FREE = Scenario(use_states=False)
Op = dict[str, Any]


def any_(*requests: int, **keys: Any) -> Op:
    return wait(*requests, mode="any", **keys)


def started(k: int, peer: int) -> Op:
    return recv(peer, blocking=False, request=k)


def hangs(trace: Trace) -> list[tuple[int, int]]:
    """(rank, seq) of where hosts stand; the reference says the same, and so does each kernel."""
    p = build(match(trace))
    fix = run(p, FREE)
    assert np.array_equal(run(elsewhere(p, PLANS), FREE).completed, fix.completed)
    o = outcomes(p, [FREE, replace(FREE, eager_bytes=1)], np.array([[0, 0], [0, 1]]))
    assert o.completed[0] == fix.completed.sum()  # in lock step
    known = progress(trace, Choices(use_states=False))
    keys = p.matching.events.select("rank", "lane", "seq").rows()
    assert [known[k].completed for k in keys] == fix.completed.tolist()
    out: dict[int, int] = {}
    for row, done in zip(p.matching.events.to_dicts(), fix.completed, strict=True):
        if not done and (row["blocking"] or row["op"] == OP["wait"]):
            out.setdefault(row["rank"], row["seq"])
    return list(out.items())


def loop(times: int, senders: int, backend: str = "mpi") -> Trace:
    """Rank 0 waits for any of three receives, so many times; so many of them are sent."""
    receives = [started(k, k) for k in (1, 2, 3)]
    ranks = [[*receives, *[any_(1, 2, 3)] * times]]
    ranks += [[send(0)] if k <= senders else [] for k in (1, 2, 3)]
    return made(*ranks, backend=backend)


@pytest.mark.parametrize("times", [1, 2, 3, 4])
@pytest.mark.parametrize("senders", [0, 1, 2, 3])
def test_each_call_returns_another(times: int, senders: int) -> None:
    """With three complete there is nothing left to wait for, and a fourth call returns at once."""
    stands = min(times, 3) > senders
    assert hangs(loop(times, senders)) == ([(0, 3 + senders)] if stands else [])


def test_handles_of_pytorch_are_not_given_back() -> None:
    assert hangs(loop(3, 1, backend="gloo")) == []


def test_what_a_wait_for_all_gave_back_is_no_longer_waited_for() -> None:
    ranks = [[started(1, 1), started(2, 2), wait(1), any_(1, 2)], [send(0)], []]
    assert hangs(made(*ranks, backend="mpi")) == [(0, 3)]
    assert hangs(made(*ranks, backend="nccl")) == []
    everything = [[started(1, 1), wait(), started(2, 2), any_(1, 2)], [send(0)], []]
    assert hangs(made(*everything, backend="mpi")) == [(0, 3)]


def test_all_given_back() -> None:
    ranks = [[started(1, 1), wait(1), any_(1)], [send(0)]]
    assert hangs(made(*ranks, backend="mpi")) == []


def test_a_shorter_list_is_part_of_a_longer_one() -> None:
    """The first took 1 or 2, so that the second needs two of three."""
    ranks = [[*(started(k, k) for k in (1, 2, 3)), any_(1, 2), any_(1, 2, 3)], [send(0)], [], []]
    assert hangs(made(*ranks, backend="mpi")) == [(0, 4)]
    ranks[3] = [send(0)]
    assert hangs(made(*ranks, backend="mpi")) == []
    # the first may have taken 3, which leaves both to the second
    ranks[0][-2:] = [any_(1, 2, 3), any_(1, 2)]
    assert hangs(made(*ranks, backend="mpi")) == []


@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_what_was_returned_is_what_was_waited_for(backend: str) -> None:
    ranks = [[started(1, 1), started(2, 2), any_(1, 2, returned=[2])], [send(0)], []]
    assert hangs(made(*ranks, backend=backend)) == [(0, 2)]
    ranks = [[started(1, 1), started(2, 2), any_(1, 2, returned=[])], [], []]
    assert hangs(made(*ranks, backend=backend)) == []
    both = [[started(1, 1), started(2, 2), wait(1, 2, mode="some", returned=[1, 2])], [send(0)], []]
    assert hangs(made(*both, backend=backend)) == [(0, 2)]


def test_what_was_returned_is_given_back() -> None:
    ranks = [[started(1, 1), started(2, 2), any_(1, 2, returned=[1]), any_(1, 2)], [send(0)], []]
    assert hangs(made(*ranks, backend="mpi")) == [(0, 3)]
    assert hangs(made(*ranks, backend="gloo")) == []


def test_a_wait_that_its_host_does_not_stay_for_gives_nothing_back() -> None:
    ask = wait(1, blocking=False)
    ranks = [[started(1, 1), started(2, 2), ask, any_(1, 2)], [send(0)], []]
    assert hangs(made(*ranks, backend="mpi")) == []


@pytest.mark.parametrize("seed", range(150))
def test_random_lists(seed: int) -> None:
    """The reference goes through them one by one; every kernel agrees."""
    rng = random.Random(seed)
    n = 5
    mine: list[Op] = [started(k, k) for k in range(1, n + 1)]
    for _ in range(rng.randint(1, 6)):
        some = rng.sample(range(1, n + 1), rng.randint(1, n))
        keys: dict[str, Any] = {"mode": rng.choice(["any", "any", "some", "all"])}
        if keys["mode"] != "all" and rng.random() < 0.25:
            keys["returned"] = rng.sample(some, rng.randint(0, len(some)))
        if rng.random() < 0.15:
            keys["blocking"] = False
        if rng.random() < 0.15:
            keys["stream"] = "s"
        mine.append(wait(*some, **keys) if rng.random() < 0.9 else wait())
    others = [[send(0)] if rng.random() < 0.6 else [] for _ in range(n)]
    hangs(made(mine, *others, backend=rng.choice(["mpi", "mpi", "gloo"])))
