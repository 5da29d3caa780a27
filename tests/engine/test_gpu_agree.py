"""The GPU engine's plans and kernel, run on the CPU, give the CPU engine's findings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import pytest
from engine.ways import cases, demo, lossy, memberless, result, wild, windowed
from hypothesis import HealthCheck, example, given, settings
from programs import from_seed, seeds, shuffled, trace_of

from dl2gpu.engine.cpu import CPU, PLANS
from dl2gpu.trace.schema import Trace


def assert_agree(trace: Trace, name: object = "") -> None:
    expected, found = result(trace, CPU), result(trace, PLANS)
    assert found[1] == expected[1], name
    assert found[0] == expected[0], name


def test_demo() -> None:
    trace = demo()
    assert result(trace, CPU)[0]
    assert_agree(trace)


def test_labelled_cases() -> None:
    found = list(cases())
    if not found:
        pytest.skip("no labelled data (../shared) beside the checkout")
    for name, trace in found:
        assert_agree(trace, name)


@given(seed=seeds())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_programs(seed: int) -> None:
    assert_agree(trace_of(*from_seed(seed, 30)), seed)


@given(seed=seeds())
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_programs_that_take_from_anybody(seed: int) -> None:
    assert_agree(trace_of(*wild(seed, 30)), seed)


@given(seed=seeds())
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(seed=1004)  # a probe alone at its message, of a rank that lost its start
def test_programs_of_which_the_start_is_lost(seed: int) -> None:
    assert_agree(lossy(seed, 60), seed)


@given(seed=seeds())
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_programs_of_which_members_are_unknown(seed: int) -> None:
    assert_agree(memberless(seed, 30), seed)


# --------------------------------------------------------------------------------------------------
# Row order


@pytest.fixture
def disorder(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows come in another order out of each join, group-by and unique, as they may on a GPU.

    Only where the call does not ask for an order. Gives a list that grows by the rows shuffled.
    """
    shuffled_rows: list[int] = []
    seed = itertools.count()

    def shuffle(frame: pl.DataFrame) -> pl.DataFrame:
        shuffled_rows.append(frame.height)
        return frame.sample(fraction=1.0, shuffle=True, seed=next(seed))

    def disorderly(call: Callable[..., pl.LazyFrame]) -> Callable[..., pl.LazyFrame]:
        @functools.wraps(call)
        def changed(*args: Any, **kwargs: Any) -> pl.LazyFrame:
            made = call(*args, **kwargs)
            if kwargs.get("maintain_order") not in (None, False, "none"):
                return made
            return made.map_batches(shuffle)

        return changed

    def group_by(self: pl.LazyFrame, *by: Any, **kwargs: Any) -> Any:
        groups = plain_group_by(self, *by, **kwargs)
        if not kwargs.get("maintain_order"):
            monkeypatch.setattr(groups, "agg", disorderly(groups.agg))
        return groups

    plain_group_by = pl.LazyFrame.group_by
    monkeypatch.setattr(pl.LazyFrame, "join", disorderly(pl.LazyFrame.join))
    monkeypatch.setattr(pl.LazyFrame, "unique", disorderly(pl.LazyFrame.unique))
    monkeypatch.setattr(pl.LazyFrame, "group_by", group_by)
    return shuffled_rows


def ordered_traces() -> Iterator[tuple[str, Trace]]:
    yield "demo", demo()
    yield "programs", trace_of(*from_seed(5, 60))
    yield "wildcards", trace_of(*wild(6, 60))
    yield "lost starts", lossy(7, 60)
    yield "unknown members", memberless(8, 60)
    yield "windows", windowed(9, 60)


@pytest.mark.parametrize("name", [name for name, _ in ordered_traces()])
def test_rows_in_any_order(name: str, disorder: list[int]) -> None:
    trace = dict(ordered_traces())[name]
    found = result(trace, PLANS)
    assert sum(disorder) > 1000
    assert found == result(trace, PLANS)
    assert found == result(shuffled(trace, 3), PLANS)


@pytest.mark.parametrize("name", [name for name, _ in ordered_traces()])
def test_disorder_changes_nothing(
    name: str, disorder: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = dict(ordered_traces())[name]
    in_disorder = result(trace, PLANS)
    assert sum(disorder) > 1000
    monkeypatch.undo()
    assert in_disorder == result(trace, CPU)
