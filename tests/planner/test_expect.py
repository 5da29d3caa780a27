"""A record against its plan: nothing where it is the plan's, and the first thing that is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from dl2gpu.planner.expect import compare
from dl2gpu.planner.links import Cluster
from dl2gpu.planner.lower import lower
from dl2gpu.planner.model import parse
from dl2gpu.planner.plan import Layout, Plan, problem_of
from dl2gpu.planner.search import descend
from dl2gpu.trace.schema import OP, Trace


@pytest.fixture(scope="module")
def plan() -> Plan:
    layers = [
        {"op": "tokens", "tokens": 16, "width": 32},
        {"op": "transformer", "heads": 8, "repeat": 4},
        {"op": "head", "classes": 96},
    ]
    model = parse({"name": "network", "batch": 32, "layer": layers})
    layout = Layout(2, (2, 2), 4)
    p = problem_of(model, Cluster(2, 4, inter=1e9), layout)
    assert p is not None
    found = descend(p, restarts=1, seed=3)
    return Plan(layout, p, found.chosen, found.seconds, 0.0)


def without(trace: Trace, rows: pl.Expr) -> Trace:
    return replace(trace, events=trace.events.filter(~rows))


def test_the_program_itself_and_its_prefixes_are_as_planned(plan: Plan) -> None:
    trace = lower(plan, steps=3)
    assert compare(trace, plan) is None
    # all ranks of a plane at the same place
    assert compare(without(trace, pl.col("seq") > 5), plan) is None
    rng = np.random.default_rng(0)
    order = rng.permutation(trace.events.height)
    assert compare(replace(trace, events=trace.events[order]), plan) is None


@pytest.mark.parametrize("op", ["all_reduce", "send", "recv"])
def test_the_first_missing_operation_is_named(plan: Plan, op: str) -> None:
    trace = lower(plan, steps=2)
    rank = 2 if op != "recv" else 6
    mine = trace.events.filter((pl.col("rank") == rank) & (pl.col("op") == OP[op])).sort("seq")
    gone = mine.row(len(mine) // 2, named=True)
    cut = without(trace, (pl.col("rank") == rank) & (pl.col("seq") >= gone["seq"]))
    got = compare(cut, plan)
    assert got is not None
    assert got.found is None
    frames = trace.stacks.sort("stack")["frames"]
    before = trace.events.filter((pl.col("rank") == rank) & (pl.col("seq") == gone["seq"]))
    assert got.rank == rank
    assert got.ranks == (rank,)
    assert got.expected == f"{op} of {gone['count']} elements"
    site = frames[before["stack"][0]][0].rsplit(":", 1)[0]
    assert got.conversion.startswith(site)
    if op == "all_reduce":  # a partial sum becomes whole on some dimension of the grid
        old, _, new = got.conversion.removeprefix(f"{site} (").partition(" to ")
        assert old.count("P") > new.count("P")


def test_another_size_and_another_operation_are_found(plan: Plan) -> None:
    trace = lower(plan)
    one = trace.events.filter((pl.col("rank") == 1) & (pl.col("op") == OP["all_reduce"])).row(
        0, named=True
    )
    here = (pl.col("rank") == 1) & (pl.col("seq") == one["seq"])
    events = trace.events.with_columns(count=pl.when(here).then(7).otherwise("count"))
    got = compare(replace(trace, events=events), plan)
    assert got is not None
    assert (got.rank, got.ranks, got.step) == (1, (1,), 0)
    assert got.found == "all_reduce of 7 elements"
    assert got.members
    barrier = pl.when(here).then(OP["barrier"]).otherwise("op").cast(pl.Int32)
    got = compare(replace(trace, events=trace.events.with_columns(op=barrier)), plan)
    assert got is not None
    assert got.found is not None
    assert got.found.startswith("barrier")
