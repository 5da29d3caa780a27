"""Causes: what a job's ranks wait for in the end, and who merely leads into it."""

from __future__ import annotations

from typing import Any, NamedTuple

from analysis.handmade import NS, START, made, op, recv, send, wait

from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import Scenario, build, run
from dl2gpu.analysis.roots import find_causes
from dl2gpu.analysis.waitfor import build_graph
from dl2gpu.trace.schema import Trace, concat


class Of(NamedTuple):
    """A cause: its kind, the ranks it is about, all that wait for it, and whether it is a guess."""

    kind: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    inferred: bool = False


def causes(trace: Trace, job: int = 0, **scenario: Any) -> list[Of]:
    p = build(match(trace))
    found = find_causes(build_graph(p, run(p, Scenario(**scenario))))
    return [Of(c.kind, c.ranks, c.waiting, c.inferred) for c in found if c.job == job]


def test_none_where_nothing_stands() -> None:
    assert causes(made([send(1)], [recv(0)])) == []


def test_mismatch_and_those_behind_it() -> None:
    """Ranks 0 and 1 disagree; rank 2 waits for rank 1, rank 3 for rank 2."""
    trace = made(
        [op("all_reduce", "a")],
        [op("barrier", "a"), send(2)],
        [recv(1), send(3)],
        [recv(2)],
        comms={"a": [0, 1]},
    )
    assert causes(trace) == [Of("mismatch", (), (0, 1, 2, 3))]


def test_of_operations_that_pile_up_the_first_disagrees() -> None:
    """Three in a row that nobody waits for: one cause, not three."""
    one = [op("all_reduce", blocking=False, count=4) for _ in range(3)]
    other = [op("all_reduce", blocking=False, count=8) for _ in range(3)]
    assert causes(made([*one, wait()], [*other, wait()])) == [Of("mismatch", (), (0, 1))]


def test_ended() -> None:
    assert causes(made([op("all_reduce")], [op("all_reduce")], [])) == [
        Of("ended", (2,), (0, 1))
    ]  # fmt: skip


def test_one_cause_for_each_set_of_absent_ranks() -> None:
    """Rank 3 lacks in two operations, ranks 2 and 3 in a third."""
    rank = [op("all_reduce", c, blocking=False) for c in ("a", "b", "c")]
    comms = {"a": [0, 3], "b": [0, 3], "c": [0, 2, 3]}
    assert causes(made([*rank, wait()], [], [], [], comms=comms)) == [
        Of("ended", (2, 3), (0,)), Of("ended", (3,), (0,)),
    ]  # fmt: skip


def test_a_rank_without_a_record() -> None:
    assert causes(made([op("all_reduce")], [op("all_reduce")], [], absent=[2])) == [
        Of("no_record", (2,), (0, 1))
    ]


def test_dead_and_free() -> None:
    here = [op("all_reduce")]
    trace = made(here, here, [], [], exits={0: "alive", 1: "alive", 2: "crashed", 3: "alive"})
    assert causes(trace) == [Of("dead", (2,), (0, 1)), Of("free", (3,), (0, 1))]


def test_late() -> None:
    """Rank 1 came after rank 0's record had ended."""
    trace = made(
        [op("all_reduce", t_created=START)],
        [op("all_reduce", t_created=START + 60 * NS)],
        exits="alive",
        rank_facts={0: {"t_last": START + 30 * NS}, 1: {"t_last": START + 61 * NS}},
    )
    assert causes(trace) == [Of("late", (1,), (0, 1))]


def test_cycle_and_victims() -> None:
    """The two that wait for each other are the cause; rank 2 is only behind them."""
    trace = made([recv(1), send(1), send(2)], [recv(0), send(0)], [recv(0)])
    assert causes(trace) == [Of("cycle", (0, 1), (0, 1, 2))]


def test_two_cycles_are_two() -> None:
    pair = [[recv(r ^ 1), send(r ^ 1)] for r in range(4)]
    assert causes(made(*pair)) == [Of("cycle", (0, 1), (0, 1)), Of("cycle", (2, 3), (2, 3))]


def test_jobs_of_a_shard_are_apart() -> None:
    cycle = made([recv(1), send(1)], [recv(0), send(0)])
    fine = made([send(1)], [recv(0)])
    ended = made([op("barrier")], [])
    trace = concat([cycle, fine, ended])
    assert causes(trace, 0) == [Of("cycle", (0, 1), (0, 1))]
    assert causes(trace, 1) == []
    assert causes(trace, 2) == [Of("ended", (1,), (0,))]


# --- what is inferred of silent hosts


def recorder(*ranks: list[dict[str, Any]], **keys: Any) -> Trace:
    """A flight recorder's: pending operations on streams, no host waits, nobody's end."""
    pending = ([o | {"state": "scheduled", "stream": o["comm"]} for o in ops] for ops in ranks)
    keys = {"exits": "unknown", "job_facts": {"waits": False}} | keys
    return made(*pending, **keys)


A, B, C = (op("all_reduce", c, ordinal=1) for c in "abc")


def test_a_guess_that_closes_a_circle() -> None:
    trace = recorder([A], [B], comms={"a": [0, 1], "b": [0, 1]})
    assert causes(trace) == [Of("cycle", (0, 1), (0, 1), inferred=True)]


def test_no_guess_where_it_closes_none() -> None:
    """Rank 1 has pending work with rank 2 alone, which has nothing: rank 2 is idle."""
    trace = recorder([A], [B], [], comms={"a": [0, 1], "b": [1, 2]})
    assert [c for c in causes(trace) if c.kind == "cycle"] == []
    assert Of("free", (2,), (0, 1)) in [c._replace(inferred=False) for c in causes(trace)]


def test_no_guess_where_another_cause_explains_the_silence() -> None:
    """Rank 1 has pending work with a rank that died, too: it may well stand there."""
    comms = {"a": [0, 1], "b": [0, 1], "c": [1, 2]}
    exits = {0: "unknown", 1: "unknown", 2: "crashed"}
    trace = recorder([A], [B, C], [], comms=comms, exits=exits)
    assert {c.kind for c in causes(trace)} == {"dead"}
    # without that pending operation the circle is the best there is
    trace = recorder([A], [B], [], comms=comms, exits=exits)
    assert {c.kind for c in causes(trace)} == {"cycle"}


def test_a_circle_that_is_recorded_stays_beside_another_cause() -> None:
    """The same with host waits in the record: rank 1's host stands where it says."""
    a, b, c = (op("all_reduce", n, blocking=False, request=1) for n in "abc")
    trace = made(
        [a, wait(), b], [c, b | {"request": 2}, wait(2), a], [],
        comms={"a": [0, 1], "b": [0, 1], "c": [1, 2]},
        exits={0: "alive", 1: "alive", 2: "crashed"},
    )  # fmt: skip
    assert Of("cycle", (0, 1), (0, 1)) in causes(trace)
