"""Plans become programs: free of deadlock, with the bytes that were predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl2gpu.analysis.verdict import analyse
from dl2gpu.planner.account import account
from dl2gpu.planner.links import Cluster, bytes_sent
from dl2gpu.planner.lower import lower
from dl2gpu.planner.model import Model, load, parse
from dl2gpu.planner.plan import Layout, Plan, problem_of
from dl2gpu.planner.schedule import ScheduleError, Work, order, play
from dl2gpu.planner.search import descend
from dl2gpu.trace.schema import OP, Trace, concat, validate

CLUSTER = Cluster(nodes=16, per_node=2, intra=50e9, inter=2e9)


def network(blocks: int = 4) -> Model:
    layers: list[dict[str, Any]] = [
        {"op": "embedding", "vocabulary": 96, "tokens": 16, "width": 32},
        {"op": "transformer", "heads": 8, "repeat": blocks},
        {"op": "head", "classes": 96},
    ]
    return parse({"name": "network", "batch": 96, "layer": layers})


def random_plan(layout: Layout, seed: int, model: Model | None = None) -> Plan | None:
    """Legal choices at random: conversions between any states."""
    p = problem_of(model or network(), CLUSTER, layout)
    if p is None:
        return None
    rng = np.random.default_rng(seed)
    for _ in range(50):
        chosen = np.array([rng.integers(0, n.shape[1]) for n in p.node])
        if np.isfinite(p.seconds(chosen)):
            return Plan(layout, p, chosen, p.seconds(chosen), 0.0)
    found = descend(p, restarts=0, starts=[np.zeros(len(p.node), int)])
    return Plan(layout, p, found.chosen, found.seconds, 0.0)


LAYOUTS = [
    Layout(1, (8,)),
    Layout(1, (2, 4), 2),
    Layout(1, (4, 2), zero=1),
    Layout(1, (2, 2), 2, zero=3, recompute=True),
    Layout(4, (), 8),
    Layout(4, (2,), 4),
    Layout(2, (2, 2), 6, recompute=True),
    Layout(4, (2,), 8, schedule="gpipe"),
    Layout(3, (2,), 2),
    Layout(2, (2,), 4, 2),
    Layout(3, (2,), 6, 2, zero=1),
    Layout(2, (4,), 4, 3),
]


def rings(trace: Trace) -> tuple[int, int]:
    """Bytes that the ranks send when the program is executed: (collectives, messages).

    The ranks of each group meet at their k-th collective there, and pass pieces around a ring, one
    turn after the other. Shares no formula with the planner.
    """
    members = dict(trace.comms.select("comm", "ranks").iter_rows())
    count: dict[tuple[int, int], int] = {}
    meets: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    name = {code: n for n, code in OP.items()}
    messages = 0
    sent: dict[tuple[int, int], list[int]] = {}
    got: dict[tuple[int, int], list[int]] = {}
    for op, rank, comm, peer, size, out, n in (
        trace.events.sort("rank", "seq")
        .select("op", "rank", "comm", "peer", "bytes", "count_out", "count")
        .iter_rows()
    ):
        if op == OP["wait"]:
            continue
        if op == OP["send"]:
            sent.setdefault((rank, peer), []).append(size)
            messages += size
        elif op == OP["recv"]:
            got.setdefault((peer, rank), []).append(size)
        else:
            k = count[comm, rank] = count.get((comm, rank), -1) + 1
            result = size if out is None else size * out // n
            meets.setdefault((comm, k), []).append((name[op], size, result))
    assert sent == got
    total = 0
    for (comm, _), parts in meets.items():
        ranks = len(members[comm])
        assert len(parts) == ranks
        assert len(set(parts)) == 1
        op, size, result = parts[0]
        whole = max(size, result)
        pieces = [whole // ranks + (i < whole % ranks) for i in range(ranks)]
        turns = range(ranks - 1)
        match op:
            case "all_reduce":
                for _ in turns:
                    total += 2 * sum(pieces)
            case "reduce_scatter" | "all_gather":
                assert whole % ranks == 0
                assert min(size, result) * ranks == whole
                for _ in turns:
                    total += sum(pieces)
            case "all_to_all":
                for device in range(ranks):
                    total += sum(p for i, p in enumerate(pieces) if i != device)
            case _:
                raise AssertionError(op)
    return total, messages


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_programs_are_healthy_and_send_what_was_predicted(layout: Layout, seed: int) -> None:
    plan = random_plan(layout, seed)
    assert plan is not None
    trace = validate(lower(plan))
    result = analyse(trace)
    assert result.jobs["verdict"].to_list() == ["healthy"], result.findings
    assert result.jobs["deadlocked"].to_list() == [False]
    costs = account(plan)
    collectives, messages = rings(trace)
    assert messages == costs.messages.sum()
    assert collectives == costs.activations.sum() + costs.parameters.sum()
    assert (costs.bytes >= 0).all()
    if layout.ranks > layout.stages:
        assert collectives > 0


@given(
    stages=st.integers(1, 5), microbatches=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    pieces=st.integers(1, 3), grid=st.sampled_from([(), (2,), (2, 2)]),
    gpipe=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_any_layout_is_healthy(
    stages: int, microbatches: int, pieces: int, grid: tuple[int, ...], gpipe: bool, seed: int
) -> None:
    schedule = "gpipe" if gpipe and pieces == 1 else "1f1b"
    layout = Layout(stages, grid, microbatches, pieces if stages > 1 else 1, schedule=schedule)
    plan = random_plan(layout, seed, network(5))
    if plan is None:
        return
    result = analyse(lower(plan, steps=2))
    assert result.jobs["verdict"].to_list() == ["healthy"], result.findings


@pytest.mark.parametrize("name", ["vgg13", "swin-t", "gpt2"])
@pytest.mark.parametrize(
    "layout", [Layout(1, (2, 2), zero=1), Layout(2, (2,), 4, recompute=True)], ids=str
)
def test_packaged_models_lower_as_predicted(name: str, layout: Layout) -> None:
    """Convolutions, windows and a vocabulary that is split, with choices at random."""
    plan = random_plan(layout, 11, load(name, 64))
    assert plan is not None
    trace = validate(lower(plan))
    assert analyse(trace).jobs["verdict"].to_list() == ["healthy"]
    costs = account(plan)
    assert rings(trace) == (
        costs.activations.sum() + costs.parameters.sum(), costs.messages.sum()
    )  # fmt: skip


def test_a_program_with_an_error_is_not_healthy() -> None:
    """The proof can fail: two messages of one rank exchanged, or a collective left out."""
    plan = random_plan(Layout(4, (2,), 4), 0)
    assert plan is not None
    trace = lower(plan)
    e = trace.events
    one = e.filter(pl.col("op") == OP["recv"]).row(-1, named=True)
    gone = e.filter((pl.col("rank") != one["rank"]) | (pl.col("seq") != one["seq"]))
    assert analyse(replace(trace, events=gone)).jobs["deadlocked"].to_list() != [False]


def test_every_stream_waits_for_what_it_takes() -> None:
    plan = random_plan(Layout(2, (2,), 2), 3)
    assert plan is not None
    trace = lower(plan, steps=2)
    e = trace.events.filter(pl.col("rank") == 3).sort("seq")
    by_seq = {row["seq"]: row for row in e.iter_rows(named=True)}
    waits = e.filter((pl.col("op") == OP["wait"]) & pl.col("stream").is_not_null())
    received = set(e.filter(pl.col("op") == OP["recv"])["request"])
    awaited = {r for row in waits.iter_rows(named=True) for r in row["requests"]}
    assert received <= awaited
    for row in waits.iter_rows(named=True):
        for request in row["requests"]:
            assert request < row["seq"]
            assert by_seq[request]["stream"] != row["stream"]


def test_plans_join_to_one_corpus() -> None:
    plans = [random_plan(layout, 7) for layout in LAYOUTS[:6]]
    traces = [lower(p, name=f"job{i}") for i, p in enumerate(plans) if p is not None]
    result = analyse(validate(concat(traces)))
    assert set(result.jobs["verdict"]) == {"healthy"}
    assert result.jobs.height == 6


def test_many_ranks() -> None:
    cluster = Cluster(nodes=64, per_node=8)
    layout = Layout(4, (16, 8), 8)
    model = network(4).with_batch(1024)
    p = problem_of(model, cluster, layout)
    assert p is not None
    found = descend(p, restarts=1)
    trace = lower(Plan(layout, p, found.chosen, found.seconds, 0.0))
    assert trace.ranks.height == 512
    assert analyse(trace).jobs["verdict"].to_list() == ["healthy"]


# --------------------------------------------------------------------------------------------------
# Schedules


def test_schedules_take_the_time_that_is_known() -> None:
    """(S - 1) forward and backward of bubble, divided by the pieces of a stage."""
    for stages, many in ((1, 3), (2, 4), (4, 8), (4, 16)):
        for kind in ("gpipe", "1f1b"):
            times, messages = play(order(kind, stages, many, 1), stages)
            assert max(end for of in times for _, end in of) == 3 * (many + stages - 1)
            assert len(messages) == 2 * many * (stages - 1)
        if stages > 1:
            # a piece is half a stage: in its units twice as many, and half the bubble
            times, _ = play(order("1f1b", stages, many, 2), 2 * stages)
            assert max(end for of in times for _, end in of) == 3 * (2 * many + stages - 1)


def test_every_stage_does_everything_once() -> None:
    for stages, many, pieces, kind in ((3, 6, 1, "gpipe"), (3, 5, 1, "1f1b"), (2, 4, 3, "1f1b")):
        for stage, works in enumerate(order(kind, stages, many, pieces)):
            assert len(set(works)) == len(works) == 2 * many * pieces
            assert {w.piece % stages for w in works} == {stage}


def test_what_cannot_be_carried_out_is_said() -> None:
    with pytest.raises(ScheduleError, match="multiple of 4"):
        order("1f1b", 4, 6, 2)
    with pytest.raises(ScheduleError, match="found 'zigzag'"):
        order("zigzag", 4, 6, 2)
    wrong = [[Work(True, 0, 0), Work(False, 0, 0)], [Work(False, 0, 1), Work(True, 0, 1)]]
    with pytest.raises(ScheduleError, match="stage 0 waits for ever"):
        play(wrong, 2)


def test_bytes_of_a_ring() -> None:
    assert bytes_sent("all_reduce", 4, 100) == 600
    assert bytes_sent("all_to_all", 4, 100) == 4 * 75
