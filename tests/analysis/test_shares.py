"""Shares: what is passed to a member against what it expects."""

from __future__ import annotations

from dataclasses import replace

import polars as pl
import pytest
from analysis.handmade import made, op
from analysis.test_signatures import AGREE, BLOCK, Op

from dl2gpu.analysis.matching import match_prepared
from dl2gpu.analysis.tables import prepare
from dl2gpu.engine.cpu import CPU, PLANS


def judged(*ops: Op) -> tuple[bool, bool]:
    """(differs, blocks) of the one node of these operations, one a rank in this order."""
    p = prepare(made(*([one] for one in ops)))
    said = [
        match_prepared(replace(p, engine=engine))
        .nodes.filter(pl.col("present") > 0)
        .select("differs", "blocks")
        .row(0)
        for engine in (CPU, PLANS)
    ]
    assert said[0] == said[1], "the verdict depends on the way of matching"
    return said[0]


def exchange(*splits: int, gets: int) -> Op:
    return op("all_to_all_v", count=sum(splits), splits=list(splits), count_out=gets)


def test_pairs_of_an_exchange_have_to_fit() -> None:
    assert judged(exchange(2, 4, gets=6), exchange(4, 2, gets=6)) == AGREE
    # in sum they fit: 12 are passed and 12 expected
    assert judged(exchange(3, 3, gets=6), exchange(2, 4, gets=6)) == BLOCK


def test_sums_of_an_exchange_have_to_fit_where_pairs_are_not_known() -> None:
    one = op("all_to_all_v", count=6, count_out=5)
    assert judged(one, op("all_to_all_v", count=4, count_out=5)) == AGREE
    assert judged(one, op("all_to_all_v", count=4, count_out=6)) == BLOCK
    assert judged(one, op("all_to_all_v", count_out=6)) == AGREE


@pytest.mark.parametrize("name", ["scatter", "scatter_v"])
def test_the_root_of_a_scatter_passes_what_all_get(name: str) -> None:
    root = op(name, root=0, count=8, count_out=4)
    assert judged(root, op(name, root=0, count_out=4)) == AGREE
    assert judged(root, op(name, root=0, count_out=5)) == BLOCK
    assert judged(root, op(name, root=0)) == AGREE


@pytest.mark.parametrize("name", ["gather_v"])
def test_the_root_of_a_gather_gets_what_all_pass(name: str) -> None:
    root = op(name, root=0, count=3, count_out=8)
    assert judged(root, op(name, root=0, count=5)) == AGREE
    assert judged(root, op(name, root=0, count=6)) == BLOCK
    assert judged(op(name, count=3, count_out=8), op(name, count=6)) == AGREE
