"""The replay engine reaches the same fixpoint as the slow, obvious reference, bit for bit.

Many programs go through the engine as the jobs of one trace, as in a scan. What disagrees is cut
down to a few operations before it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import naive
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from programs import Program, from_seed, programs, seeds, shuffled, smaller, trace_of

from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import Scenario, replay
from dl2gpu.trace.schema import Trace

A_BATCH = 50
"""Programs an example: the engine's cost is a call, not a program."""

SETTINGS = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # A seed cannot shrink; `explained` cuts the program down instead.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    report_multiple_bugs=False,
)


@dataclass(frozen=True)
class Reading:
    """One scenario, as the reference and as the engine call it."""

    choices: naive.Choices
    scenario: dict[str, Any]


READINGS = {
    "rendezvous": Reading(naive.Choices(), {}),
    "eager 16 B": Reading(naive.Choices(eager_bytes=16), {"eager_bytes": 16}),
    "eager 32 B": Reading(naive.Choices(eager_bytes=32), {"eager_bytes": 32}),
    "all buffered": Reading(
        naive.Choices(eager_bytes=naive.INFINITE), {"eager_bytes": Scenario.INFINITE}
    ),
    "one message a channel": Reading(
        naive.Choices(buffer_messages=1, use_states=False),
        {"buffer_messages": 1, "use_states": False},
    ),
    "48 B a channel": Reading(
        naive.Choices(buffer_bytes=48, use_states=False),
        {"buffer_bytes": 48, "use_states": False},
    ),
    "any bytes a channel": Reading(
        naive.Choices(buffer_bytes=naive.INFINITE, use_states=False),
        {"buffer_bytes": Scenario.INFINITE, "use_states": False},
    ),
    "2 messages, 64 B, eager, atomic": Reading(
        naive.Choices(16, 2, 64, atomic_batch=True, use_states=False),
        {
            "buffer_messages": 2,
            "buffer_bytes": 64,
            "eager_bytes": 16,
            "atomic_batch": True,
            "use_states": False,
        },
    ),
    "2 messages, with states": Reading(
        naive.Choices(buffer_messages=2),
        {"buffer_messages": 2},
    ),
    "one stream": Reading(naive.Choices(streams="one"), {"one_stream": True}),
    "atomic batches": Reading(naive.Choices(atomic_batch=True), {"atomic_batch": True}),
    "early release": Reading(naive.Choices(early_release=True), {"early_release": True}),
    "what if": Reading(naive.Choices(use_states=False), {"use_states": False}),
    "all generous": Reading(
        naive.Choices(eager_bytes=naive.INFINITE, early_release=True, use_states=False),
        {"eager_bytes": Scenario.INFINITE, "early_release": True, "use_states": False},
    ),
    "all strict": Reading(
        naive.Choices(streams="one", atomic_batch=True),
        {"one_stream": True, "atomic_batch": True},
    ),
}

Outcome = dict[tuple[int, ...], tuple[bool, bool, bool]]
"""(job, rank, lane, seq) → issued, started, completed."""


def by_engine(trace: Trace, scenario: dict[str, Any]) -> Outcome:
    frame = replay(trace, match(trace), Scenario(**scenario))
    columns = frame.select("job", "rank", "lane", "seq", "issued", "started", "completed")
    return {row[:4]: row[4:] for row in columns.rows()}


def by_naive(program: Program, choices: naive.Choices, job: int = 0) -> Outcome:
    facts = naive.progress(trace_of(program), choices)
    return {(job, *key): (f.issued, f.started, f.completed) for key, f in facts.items()}


def explained(program: Program, reading: Reading) -> str:
    """A small program on which the two disagree, operation by operation."""

    def disagrees(candidate: Program) -> bool:
        if not any(candidate.ops.values()):
            return False
        got = by_engine(trace_of(candidate), reading.scenario)
        return got != by_naive(candidate, reading.choices)

    if not disagrees(program):
        return "they agree where the program is alone: the jobs of a trace disturb each other"
    small = smaller(program, disagrees)
    got = by_engine(trace_of(small), reading.scenario)
    wanted = by_naive(small, reading.choices)
    lines = [f"backend {small.backend}, communicators {small.comms}, mistakes {small.mistakes}"]
    for rank, ops in small.ops.items():
        for position, op in enumerate(ops):
            key = (0, rank, op.get("lane", 0), op.get("seq", position))
            mark = "   " if got.get(key) == wanted[key] else ">>>"
            known = {k: v for k, v in op.items() if v is not None}
            lines.append(f"{mark} {key[1:]} engine {got.get(key)} reference {wanted[key]}  {known}")
    return "\n".join(lines)


def assert_agree(of: list[Program], reading: Reading, trace: Trace | None = None) -> None:
    got = by_engine(trace_of(*of) if trace is None else trace, reading.scenario)
    wanted: Outcome = {}
    for job, program in enumerate(of):
        wanted |= by_naive(program, reading.choices, job)
    if got != wanted:
        bad = {k[0] for k in got.keys() | wanted.keys() if got.get(k) != wanted.get(k)}
        shown = explained(of[min(bad)], reading)
        pytest.fail(f"{len(bad)} of {len(of)} programs; one of them:\n{shown}", pytrace=False)


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
@given(seed=seeds())
@example(seed=3706230160)  # a sendrecv: only what is sent says how wide what comes is
@example(seed=5983633)  # a batch over host and stream, its streamed member known to be complete
@SETTINGS
def test_batches(reading: Reading, seed: int) -> None:
    of = from_seed(seed, A_BATCH)
    assert_agree(of, reading)


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_fixed_programs(reading: Reading) -> None:
    """The same few hundred programs in every run."""
    assert_agree(from_seed(0, 4 * A_BATCH), reading)


@given(program=programs())
@settings(SETTINGS, max_examples=20, phases=tuple(Phase))
def test_one_program(program: Program) -> None:
    assert_agree([program], READINGS["rendezvous"])


@given(example=seeds(), seed=st.integers(0, 1000))
@settings(SETTINGS, max_examples=6)
def test_row_order_does_not_matter(example: int, seed: int) -> None:
    of = from_seed(example, A_BATCH)
    assert_agree(of, READINGS["rendezvous"], shuffled(trace_of(*of), seed))


@given(example=seeds())
@settings(SETTINGS, max_examples=6)
def test_progress_grows_with_generosity(example: int) -> None:
    """Larger buffers, early release and independent streams only ever help."""
    of = from_seed(example, A_BATCH)
    trace = trace_of(*of)
    steps: list[dict[str, Any]] = [
        {"one_stream": True, "atomic_batch": True},
        {"atomic_batch": True},
        {},
        {"eager_bytes": 16},
        {"eager_bytes": Scenario.INFINITE},
        {"eager_bytes": Scenario.INFINITE, "early_release": True},
    ]
    before: set[tuple[int, ...]] = set()
    for scenario in steps:
        done = {key for key, (_, _, completed) in by_engine(trace, scenario).items() if completed}
        assert before <= done
        before = done


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
@pytest.mark.parametrize("requests", [[1], "all"])
@pytest.mark.parametrize("state", ["completed", "unknown"])
def test_a_wait_that_does_not_block(reading: Reading, requests: object, state: str) -> None:
    """Its host goes on, and what waits for everything behind it does not miss it."""
    ours: list[dict[str, Any]] = [
        {"op": "all_reduce", "comm": "w", "count": 4, "stream": "s", "request": 1},
        {"op": "wait", "requests": requests, "blocking": False},
        {"op": "wait", "requests": "all", "stream": "t"},
        {"op": "all_reduce", "comm": "v", "count": 4, "stream": "u", "state": state},
    ]
    theirs = [{"op": "all_reduce", "comm": "v", "count": 4, "stream": "u", "state": state}]
    numbered = {r: [op | {"lane": 0, "seq": k} for k, op in enumerate(ops)]
                for r, ops in enumerate((ours, theirs))}  # fmt: skip
    program = Program(numbered, {"w": [0, 1], "v": [0, 1]}, world_size=2)
    got = by_engine(trace_of(program), reading.scenario)
    assert got == by_naive(program, reading.choices)
    behind = state == "unknown" and "one_stream" in reading.scenario  # on the one queue
    assert got[0, 0, 0, 3][2] == got[0, 1, 0, 0][2] == (not behind)
    assert not got[0, 0, 0, 2][2]


def test_no_events() -> None:
    nothing = Program({0: [], 1: []}, {"w": [0, 1]}, world_size=2)
    assert by_engine(trace_of(nothing), {}) == {}
    one = from_seed(1)[0]
    assert_agree([nothing, one, replace(nothing)], READINGS["rendezvous"])
