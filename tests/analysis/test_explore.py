"""Exploration finds what a brute-force interpreter of every interleaving finds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from analysis.handmade import made, op, recv, send, wait
from analysis.test_whatif import sized, taken
from engine.test_gpu_kernel import elsewhere
from naive import Choices
from naive_explore import Pool, completed, confirms, ends

from dl2gpu.analysis.explore import Budget, Explored, explore, wilson
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import Program, build, run
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.analysis.scenarios import smallest_safe_buffer
from dl2gpu.analysis.whatif import safe_sizes, unsafe_spans
from dl2gpu.analysis.witness import Schedule, schedule
from dl2gpu.engine.cores import limited
from dl2gpu.engine.cpu import PLANS
from dl2gpu.trace.schema import OP, Trace, concat

FREE = Scenario(use_states=False, chosen=True)


def small(seed: int, wild: bool = True) -> Trace:
    """A few messages among three ranks; receives from anybody, probes, waits, and mistakes."""
    rng = random.Random(seed)
    ranks: list[list[dict[str, Any]]] = [[], [], []]
    request = 0
    for _ in range(rng.randint(2, 4)):
        src, dst = rng.sample(range(3), 2)
        tag, size = rng.choice([0, 0, 1]), rng.choice([1, 2])
        keys: dict[str, Any] = {"tag": tag, "count": size}
        for rank, made_ in (
            (src, send(dst, **keys)),
            (dst, recv("any" if wild and rng.random() < 0.6 else src, **keys)),
        ):
            o = dict(made_)
            if o["op"] == "recv" and wild and rng.random() < 0.3:
                o["tag"] = "any"
            if rng.random() < 0.3:
                request += 1
                o |= {"blocking": False, "request": request}
            if o["op"] == "recv" and wild and rng.random() < 0.2:
                ranks[rank].append(op("probe", peer=o["peer"], tag=o["tag"]))
            ranks[rank].append(o)
    for ops in ranks:
        if any(not o.get("blocking", True) for o in ops):
            ops.append(wait())
        if len(ops) > 1 and rng.random() < 0.4:
            a, b = rng.sample(range(len(ops)), 2)
            ops[a], ops[b] = ops[b], ops[a]
    return made(*ranks, backend="mpi")


def found(
    p: Program, scenario: Scenario, budget: int = 4096
) -> tuple[Explored, set[frozenset[Any]]]:
    """What exploration says of job 0, and the events that complete in each deadlock."""
    one = explore(p, [0], scenario, Budget(budget))[0]
    keys = p.matching.events.select("rank", "lane", "seq").rows()
    bad = set()
    for b in one.bad:
        fix = run(p, replace(scenario, given=b.given, chosen=True, use_states=False))
        bad.add(frozenset(k for k, done in zip(keys, fix.completed, strict=True) if done))
    return one, bad


def by_brute_force(trace: Trace, choices: Choices, pool: Pool | None = None) -> set[frozenset[Any]]:
    """The events that complete in each deadlock; ends at which all hosts came through are none."""
    out = set()
    blocks = {
        (e["rank"], e["lane"], e["seq"]): e["blocking"] or e["op"] == 5
        for e in trace.events.to_dicts()
    }
    for state in ends(trace, choices, pool):
        done = completed(state)
        if any(blocking and key not in done for key, blocking in blocks.items()):
            out.add(done)
    return out


CASES = {
    "rendezvous": (Choices(use_states=False), FREE),
    "eager": (Choices(eager_bytes=4, use_states=False), replace(FREE, eager_bytes=4)),
    "one message": (
        Choices(buffer_messages=1, use_states=False), replace(FREE, buffer_messages=1),
    ),
    "8 bytes": (Choices(buffer_bytes=8, use_states=False), replace(FREE, buffer_bytes=8)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_deadlocks_that_can_be_reached(case: str) -> None:
    choices, scenario = CASES[case]
    several = 0
    for seed in range(12):
        trace = small(seed)
        one, bad = found(build(match(trace)), scenario)
        assert one.complete, seed
        assert bad == by_brute_force(trace, choices), seed
        several += one.schedules > 1
    assert several


@pytest.mark.parametrize("whose", ["sender", "receiver", "job"])
@pytest.mark.parametrize("room", [4, 8])
def test_pools(whose: str, room: int) -> None:
    for seed in range(100, 104):
        trace = small(seed, wild=seed % 2 == 0)
        scenario = replace(FREE, pool_bytes=room, pool=whose)
        one, bad = found(build(match(trace)), scenario)
        assert one.complete
        assert bad == by_brute_force(trace, Choices(use_states=False), Pool(room, whose)), seed


def played(s: Schedule) -> list[tuple[str, Any]]:
    """The steps of a schedule for :func:`confirms`."""
    p = s.program
    keys = p.matching.events.select("rank", "lane", "seq").rows()
    raw: list[tuple[int, str, Any]] = []
    for what, numbers in zip(("issued", "started", "completed", "take"), s.order, strict=True):
        for e in numbers.nonzero()[0].tolist():
            made_: tuple[str, Any] = (what, keys[e])
            if what == "take" and p.kernel["role"][e] == 3:
                made_ = ("room", keys[e])
            elif what == "take":
                made_ = (what, (keys[e], keys[int(s.fix.partner[e])]))
            raw.append((int(numbers[e]), *made_))
    return [
        (what, of) for _, what, of in sorted(raw, key=lambda r: r[0])
        if not (what == "take" and p.matching.events["op"][keys.index(of[0])] == OP["probe"])
    ]  # fmt: skip


def test_each_deadlock_has_a_schedule_that_leads_there() -> None:
    """The slow interpreter plays the steps one by one, and nothing moves at their end."""
    shown = 0
    for seed in range(20):
        trace = small(seed)
        for choices, scenario in CASES.values():
            p = build(match(trace))
            for b in explore(p, [0], scenario, Budget(4096))[0].bad:
                s = schedule(p, replace(scenario, given=b.given))
                assert s.deadlocked
                assert confirms(trace, choices, None, played(s)) is None, seed
                shown += 1
    assert shown > 20
    trace = made([send(1), send(1), recv(1)], [send(0), recv(0), recv(0)], backend="mpi")
    p = build(match(trace))
    scenario = replace(FREE, pool_bytes=16, pool="job")
    bad = explore(p, [0], scenario)[0].bad
    assert bad
    for b in bad:
        s = schedule(p, replace(scenario, given=b.given))
        assert confirms(trace, Choices(use_states=False), Pool(16, "job"), played(s)) is None


def test_a_schedule_that_is_wrong_is_not_confirmed() -> None:
    trace = small(3)
    s = schedule(build(match(trace)), FREE)
    steps = played(s)
    assert confirms(trace, Choices(use_states=False), None, steps) is None
    assert confirms(trace, Choices(use_states=False), None, steps[::-1]) is not None
    assert confirms(trace, Choices(use_states=False), None, steps[:-3]) is not None


# --------------------------------------------------------------------------------------------------
# Probabilities, budgets, determinism


def star(n: int, last: int) -> Trace:
    """A root that takes n - 1 messages from anybody and then one from rank ``last``: each rank
    sends one, so it stops unless that of ``last`` is left."""
    root = [recv("any") for _ in range(n - 1)] + [recv(last)]
    return made(root, *([send(0)] for _ in range(n)), backend="mpi")


def test_exact_probability() -> None:
    one = explore(build(match(star(4, 2))), [0], FREE)[0]
    assert one.complete
    assert one.schedules == 24
    assert one.probability == pytest.approx(3 / 4)


def test_sampled_probability() -> None:
    """Too many schedules for the budget: the interval holds the share that can be counted."""
    p = build(match(star(9, 2)))
    one = explore(p, [0], FREE, Budget(1500))[0]
    assert not one.complete
    assert one.runs == 1500
    assert one.low <= 8 / 9 <= one.high
    assert one.high - one.low < 0.07
    assert one.bad


def test_independent_choices_are_made_in_one_order() -> None:
    """Seven pairs of messages that differ in nothing else: 2^7 outcomes, not 14! orders."""
    n = 7
    root = [recv("any", tag=k // 2) for k in range(2 * n)]
    sends = [[send(0, tag=k, blocking=False) for k in range(n)] for _ in range(2)]
    one = explore(build(match(made(root, *sends, backend="mpi"))), [0], FREE, Budget(1024))[0]
    assert one.complete
    assert one.schedules == one.runs == 2**n
    assert not one.bad


def test_steering_finds_what_luck_does_not() -> None:
    """One schedule in 4^8 deadlocks: rank 4 has sent all it has before it is asked for."""
    n = 8
    root = [*(recv("any") for _ in range(n)), recv(4)]
    senders = [[send(0, blocking=False) for _ in range(n)] for _ in range(4)]
    one = explore(build(match(made(root, *senders, backend="mpi"))), [0], FREE, Budget(100))[0]
    assert not one.complete
    assert one.sampled < 50
    assert one.probability == 0.0
    assert one.bad


def test_wilson() -> None:
    """Against values worked out by hand from Wilson (1927)."""
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_the_same_whatever_the_engine_and_the_threads() -> None:
    trace = concat([*(small(s) for s in range(12)), star(7, 1)])
    p = build(match(trace))
    jobs = list(range(13))
    for scenario in (FREE, replace(FREE, buffer_messages=1), replace(FREE, pool_bytes=8)):
        first = explore(p, jobs, scenario, Budget(96), seed=3)
        with limited(1):
            assert explore(p, jobs, scenario, Budget(96), seed=3) == first
        assert explore(elsewhere(p, PLANS), jobs, scenario, Budget(96), seed=3) == first
        assert explore(p, [12], scenario, Budget(96), seed=3) == first[12:]
    other = explore(p, [12], FREE, Budget(96), seed=4)[0]
    assert other.runs == 96
    assert not other.complete


def test_a_budget_of_seconds_is_said() -> None:
    one = explore(build(match(star(9, 2))), [0], FREE, Budget(10**6, 0.0))[0]
    assert one.cut == "seconds"
    assert not one.complete


def test_facts_are_no_choices() -> None:
    p = build(match(star(3, 1)))
    with pytest.raises(ValueError, match="recorded was chosen already"):
        run(p, Scenario(chosen=True))


def test_many_jobs_at_once() -> None:
    """Each job is explored as if it were alone."""
    traces = [small(s) for s in range(20)]
    together = explore(build(match(concat(traces))), list(range(20)), FREE)
    for k, trace in enumerate(traces):
        alone = explore(build(match(trace)), [0], FREE)[0]
        mine = together[k]
        assert (mine.schedules, mine.probability, mine.complete) == (
            alone.schedules, alone.probability, alone.complete,
        )  # fmt: skip
        assert np.array_equal([b.completed for b in mine.bad], [b.completed for b in alone.bad])


# --------------------------------------------------------------------------------------------------
# Sizes of buffers


def inside(spans: list[list[int]], size: int) -> bool:
    return any(first <= size and (below < 0 or size < below) for first, below in spans)


@pytest.mark.parametrize("seed", range(10))
def test_sizes_that_deadlock_are_those_of_every_interleaving(seed: int) -> None:
    """Also sizes between those that were explored. Messages have 4 or 8 bytes."""
    trace = small(seed)
    p = build(match(trace))
    total = int(trace.events.filter(op=OP["send"])["bytes"].sum())
    for name in ("eager_bytes", "buffer_bytes"):
        spans = unsafe_spans(p, 0, name, Budget(256))
        assert spans is not None
        for size in (s for s in range(total + 6) if s % 4 != 2):
            choices = Choices(use_states=False, **{name: size})  # type: ignore[arg-type]
            assert inside(spans, size) == bool(by_brute_force(trace, choices)), (name, size, spans)


def test_a_larger_buffer_may_be_worse() -> None:
    """What comes sooner is taken by a wildcard that was meant for another."""
    ranks = [
        [sized(3, 2), taken(3, 2), sized(1, 8), sized(2, 4)],
        [sized(2, 4), taken(0, 8)],
        [taken("any", 4), taken(0, 4)],
        [sized(0, 2), taken(0, 2)],
    ]
    (safe,) = safe_sizes(build(match(made(*ranks))), np.array([0], np.int32))
    assert (safe["eager_bytes"], safe["channel_bytes"]) == (None, None)
    assert safe["eager_unsafe"] == safe["channel_unsafe"] == [[0, 2], [4, -1]]
    ranks[2] = [taken("any", 4), taken("any", 4)]
    (safe,) = safe_sizes(build(match(made(*ranks))), np.array([0], np.int32))
    assert safe["eager_unsafe"] == [[0, 2]]
    assert (safe["eager_bytes"], safe["channel_bytes"]) == (2, 2)


def test_no_size_is_claimed_where_the_choices_are_too_many() -> None:
    n = 6
    ranks = [[taken("any", 1) for _ in range(3 * n)]] + [[sized(0, 1)] * n for _ in range(3)]
    p = build(match(made(*ranks)))
    assert unsafe_spans(p, 0, "eager_bytes", Budget(8)) is None
    assert smallest_safe_buffer(p, 0, early_release=False) is None


def test_a_scan_claims_a_size_of_a_job_with_wildcards_that_was_explored() -> None:
    """Both send first; the wildcard decides nothing."""
    trace = made([sized(1, 30), taken("any", 20)], [sized(0, 20), taken("any", 30)])
    p = build(match(trace))
    assert smallest_safe_buffer(p, 0, early_release=False) == 20
