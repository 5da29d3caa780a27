"""What a job has behind it may be left out where repairs are tried: the repairs are the same."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from analysis.handmade import findings, made, op, recv, send, wait
from hypothesis import HealthCheck, Phase, given, settings
from programs import Op, from_seed, seeds, trace_of

from dl2gpu.analysis import analyse, repair
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import build, run
from dl2gpu.analysis.scenarios import STRICTEST
from dl2gpu.analysis.settled import beginnings, without_beginning
from dl2gpu.trace.schema import Trace

BEHIND = 6
"""Collectives that generated programs have behind them."""


def all_reduce(comm: str = "w", count: int = 4, **keys: object) -> Op:
    return op("all_reduce", comm, count=count, dtype="f32", **keys)


def begins(trace: Trace) -> dict[int, int]:
    """By rank, the number of the first operation that repairs are tried on; none: the first."""
    p = build(match(trace))
    job = np.zeros(1, np.int32)
    table = beginnings(p, run(p, STRICTEST, job), job).get(0)
    return {} if table is None else dict(table.select("rank", "seq").iter_rows())


def test_it_ends_where_a_rank_hangs() -> None:
    deep = [all_reduce()] * 3
    trace = made([*deep, send(1), recv(1)], [*deep, send(0), recv(0)])
    assert begins(trace) == {0: 3, 1: 3}
    table = pl.DataFrame({"rank": [0, 1], "seq": [3, 3]})
    left = without_beginning(trace.events.sample(fraction=1, shuffle=True, seed=1), table)
    assert sorted(left.select("rank", "seq").iter_rows()) == [(0, 3), (0, 4), (1, 3), (1, 4)]


def test_an_operation_in_flight_keeps_what_came_after() -> None:
    """And that, on the other ranks, all that it takes part in."""
    trace = made(
        [all_reduce(), send(1, stream="s", request=1), all_reduce(), recv(1)],
        [all_reduce(), all_reduce(), recv(0, tag=5)],
        backend="mpi",
    )
    assert begins(trace) == {0: 1, 1: 1}


@pytest.mark.parametrize(
    "ops",
    [
        [recv("any"), all_reduce()],
        [recv(1, stream="s", request=1), wait(1, mode="any"), all_reduce()],
    ],
    ids=["wildcard", "wait for any"],
)
def test_choices_leave_a_job_whole(ops: list[Op]) -> None:
    assert begins(made([*ops, send(1)], [send(0), all_reduce(), send(0)])) == {}


def test_a_call_that_a_member_left_out_stays() -> None:
    """Of no elements and without that member, it completes; the missing call is what matters."""
    trace = made(
        [all_reduce(count=0), all_reduce(), send(1)],
        [all_reduce(count=0), all_reduce(), send(0)],
        [all_reduce(), send(0)],
    )
    assert set(begins(trace).values()) <= {0}


@given(example=seeds())
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a seed cannot shrink
)
def test_the_repairs_are_the_same(example: int) -> None:
    of = from_seed(example, 24)
    for program in of:
        program.comms["behind"] = sorted(program.ops)
        for ops in program.ops.values():
            numbered = any("ordinal" in o for o in ops)
            keys = [{"ordinal": k} if numbered else {} for k in range(BEHIND)]
            for o in ops:
                if "seq" in o:
                    o["seq"] += BEHIND
            ops[:0] = [all_reduce("behind", lane=0, **k) for k in keys]
    trace = trace_of(*of)
    short = analyse(trace).findings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repair, "beginnings", lambda *_: {})
        whole = analyse(trace).findings
    assert short == whole


def test_repairs_are_tried_on_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or all of the above would hold of a function that leaves out nothing."""
    sizes: list[int] = []
    original = repair.working

    def working(jobs: object, engine: object) -> object:
        sizes.extend(job.events.height for job, _ in jobs)  # type: ignore[attr-defined]
        return original(jobs, engine)  # type: ignore[arg-type]

    monkeypatch.setattr(repair, "working", working)
    deep = [all_reduce()] * 100
    told = findings(made([*deep, send(1), recv(1)], [*deep, send(0), recv(0)]))
    assert told[0]["details"]["repairs"]
    assert sizes
    assert max(sizes) == 4
