"""Waits for any or some: what they return nobody waits for again."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from analysis.handmade import findings, made, recv, send, wait
from engine.test_gpu_kernel import elsewhere
from naive import Choices, progress
from naive_explore import completed, ends

from dl2gpu.analysis.explore import Budget, Explored
from dl2gpu.analysis.explore_returns import Returns, explore_returns, with_returns
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.outcomes import outcomes
from dl2gpu.analysis.replay import Scenario, build, run
from dl2gpu.analysis.returns import deciding
from dl2gpu.analysis.scenarios import OTHER_RETURN
from dl2gpu.analysis.whatif import Axes, Witness, program_of, whatif
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


# --------------------------------------------------------------------------------------------------
# What is left open


def explored(trace: Trace, budget: int = 2000) -> tuple[Explored, Returns]:
    return explore_returns(trace, FREE, Budget(budget))


def by_brute_force(trace: Trace) -> set[frozenset[Any]]:
    """The events that complete in each deadlock."""
    hosts = {
        (e["rank"], e["lane"], e["seq"])
        for e in trace.events.to_dicts() if e["blocking"] or e["op"] == OP["wait"]
    }  # fmt: skip
    found = {completed(s) for s in ends(trace, Choices(use_states=False))}
    return {done for done in found if hosts - done}


def crossed(third: bool) -> Trace:
    """If the first wait took 1, the second needs 3, which is sent or not."""
    receives = [started(k, k) for k in (1, 2, 3)]
    first = [*receives, any_(1, 2), any_(1, 3)]
    return made(first, [send(0)], [send(0)], [send(0)] if third else [], backend="mpi")


def test_it_depends_on_what_was_returned() -> None:
    one, returns = explored(crossed(third=False))
    assert (one.complete, one.schedules, one.probability) == (True, 2, 0.5)
    assert returns == ((0, 0, 3, (1,)),)
    assert len(by_brute_force(crossed(third=False))) == 1
    one, returns = explored(crossed(third=True))
    assert (one.complete, one.probability, returns) == (True, 0.0, ())


def test_a_wait_for_some_may_take_several() -> None:
    receives = [started(k, k) for k in (1, 2)]
    some = wait(1, 2, mode="some")
    ranks = [[*receives, some, some], [send(0)], [send(0)]]
    one, _ = explored(made(*ranks, backend="mpi"))
    assert (one.complete, one.probability) == (True, 0.0)  # none left: it returns at once
    ranks = [[*receives, started(3, 3), some, wait(1, 2, 3, mode="some")], [send(0)], [send(0)], []]
    one, returns = explored(made(*ranks, backend="mpi"))
    assert (one.complete, one.probability) == (True, 1 / 3)
    assert returns == ((0, 0, 3, (1, 2)),)


def test_jobs_in_which_it_makes_no_difference_are_told_by_their_lists() -> None:
    for trace in (loop(3, 2), loop(3, 3), loop(4, 0)):
        assert deciding(build(match(trace))).is_empty()
    assert deciding(build(match(crossed(third=True))))["seq"].unique().sort().to_list() == [3, 4]
    with_gloo = crossed(third=True).jobs.with_columns(backend=pl.lit("gloo"))
    assert deciding(build(match(replace(crossed(third=True), jobs=with_gloo)))).is_empty()


def lists(seed: int) -> Trace:
    """Receives of one rank, waited for in lists that overlap, some of which are sent late."""
    rng = random.Random(seed)
    n = 3
    mine: list[Op] = [started(k, k) for k in range(1, n + 1)]
    others: list[list[Op]] = [[send(0)] if rng.random() < 0.7 else [] for _ in range(n)]
    for _ in range(rng.randint(2, 3)):
        some = rng.sample(range(1, n + 1), rng.randint(1, n))
        mine.append(wait(*some, mode=rng.choice(["any", "any", "some", "all"])))
    if rng.random() < 0.6:  # one that comes only after a wait
        late = rng.randrange(n)
        mine.insert(rng.randint(n, len(mine)), send(late + 1))
        others[late].insert(0, recv(0))
    return made(mine, *others, backend="mpi")


@pytest.mark.parametrize("seed", range(120))
def test_deadlocks_are_those_of_every_interleaving(seed: int) -> None:
    trace = lists(seed)
    one, returns = explored(trace)
    assert one.complete
    want = by_brute_force(trace)
    assert (one.probability > 0) == bool(want)
    assert (one.probability == 1) == (not came_through(trace))
    if one.bad:
        p = build(match(with_returns(trace, [returns])))
        keys = p.matching.events.select("rank", "lane", "seq").rows()
        done = run(p, FREE).completed
        assert frozenset(k for k, d in zip(keys, done, strict=True) if d) in want


def came_through(trace: Trace) -> bool:
    """Is there an interleaving in which every host comes to its end?"""
    hosts = {
        (e["rank"], e["lane"], e["seq"])
        for e in trace.events.to_dicts() if e["blocking"] or e["op"] == OP["wait"]
    }  # fmt: skip
    return any(not hosts - completed(s) for s in ends(trace, Choices(use_states=False)))


def test_a_sample_is_told_as_such() -> None:
    exact, _ = explored(crossed(third=False))
    one, _ = explored(crossed(third=False), budget=2)
    assert not one.complete
    many = [started(k, k) for k in range(1, 8)]
    waits = [any_(*(r for r in range(1, 8) if r != k)) for k in range(1, 6)]
    trace = made([*many, *waits], *[[send(0)] for _ in range(7)], backend="mpi")
    one, _ = explored(trace, budget=200)
    assert (one.complete, one.probability) == (False, 0.0)
    assert one.sampled > 50
    assert 0 < one.high < 0.1
    assert exact.complete


def test_whatif_and_the_witness(tmp_path: Path) -> None:
    trace = crossed(third=False)
    found = whatif(trace, Axes(matches=("recorded", "all"), buffer=(0, 64)))
    rows = found.rows.select("matches", "buffer", "probability", "exact").rows()
    assert rows == [
        ("all", 0, 0.5, True), ("all", 64, 0.5, True),
        ("recorded", 0, 0.0, True), ("recorded", 64, 0.0, True),
    ]  # fmt: skip
    _, w = found.witnesses[0]
    assert Witness.of(json.loads(json.dumps(w.plain()))) == w
    p = program_of(trace, w)
    assert not run(p, w.scenario).completed.all()


def test_a_scan_tells_what_could_be_returned() -> None:
    (finding,) = findings(crossed(third=False))
    assert (finding["kind"], finding["probability"]) == ("potential", 0.5)
    assert finding["deadlocked"] is None
    assert finding["condition"] == OTHER_RETURN
    assert finding["details"]["witness"] == {"returns": [[0, 0, 3, [1]]]}
    assert finding["details"]["every_schedule"]
    assert "repairs" not in finding["details"]
    assert finding["hangs_at"][0]["rank"] == 0
    assert findings(crossed(third=True)) == []


def test_what_stops_however_it_is_is_certain() -> None:
    (finding,) = findings(loop(3, 2))
    assert finding["kind"] != "potential"
    assert finding["deadlocked"]
