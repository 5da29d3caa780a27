"""Signatures: which differences are seen, and which of them keep an operation from completing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from analysis.handmade import made, op, recv, send

from dl2gpu.analysis.matching import match_prepared
from dl2gpu.analysis.tables import prepare
from dl2gpu.engine.cpu import CPU, PLANS
from dl2gpu.trace.schema import FLAG

Op = dict[str, Any]

AGREE, DIFFER, BLOCK = (False, False), (True, False), (True, True)


def judged(*ops: Op, **job: Any) -> tuple[bool, bool]:
    """(differs, blocks) of the one node of these operations, one a rank, whoever comes first."""
    said = set()
    for order in {tuple(range(len(ops))), tuple(reversed(range(len(ops))))}:
        p = prepare(made(*([ops[k]] for k in order), **job))
        for engine in (CPU, PLANS):
            nodes = match_prepared(replace(p, engine=engine)).nodes.filter(pl.col("present") > 0)
            assert nodes.height == 1
            said.add(nodes.select("differs", "blocks").row(0))
    assert len(said) == 1, "the verdict depends on the order or on the way of matching"
    return next(iter(said))


def pair(one: Op, other: Op, name: str = "all_reduce", **job: Any) -> tuple[bool, bool]:
    """As :func:`judged`, of one operation of which two ranks differ in these values."""
    return judged(op(name, **one), op(name, **other), **job)


ASPECTS: dict[str, tuple[str, Op, Op, tuple[bool, bool]]] = {
    "root": ("broadcast", {"root": 0}, {"root": 1}, BLOCK),
    "bytes": ("all_reduce", {"bytes": 16}, {"bytes": 32}, BLOCK),
    "count, no bytes": ("all_reduce", {"count": 4}, {"count": 8}, BLOCK),
    "count and bytes": (
        "all_reduce", {"count": 4, "dtype": "f32"}, {"count": 8, "dtype": "f32"}, BLOCK,
    ),
    "type of another width": (
        "all_reduce", {"count": 4, "dtype": "f32"}, {"count": 4, "dtype": "bf16"}, BLOCK,
    ),
    "type of the same width": (
        "all_reduce", {"count": 4, "dtype": "f32"}, {"count": 4, "dtype": "i32"}, DIFFER,
    ),
    "type and count, same bytes": (
        "all_reduce", {"count": 4, "dtype": "f32"}, {"count": 8, "dtype": "bf16"}, DIFFER,
    ),
    "type alone": ("all_reduce", {"dtype": "f32"}, {"dtype": "i32"}, DIFFER),
    "reduce_op": ("all_reduce", {"reduce_op": "sum"}, {"reduce_op": "max"}, DIFFER),
    "new_comm": ("comm_create", {"new_comm": "a"}, {"new_comm": "b"}, BLOCK),
    "new_comm of a split": (
        "comm_create", {"new_comm": "a", "split": True}, {"new_comm": "b", "split": True}, AGREE,
    ),
}  # fmt: skip

COMMS = {"a": [0], "b": [1]}


@pytest.mark.parametrize(("name", "one", "other", "expected"), ASPECTS.values(), ids=ASPECTS)
def test_aspects(name: str, one: Op, other: Op, expected: tuple[bool, bool]) -> None:
    assert pair(one, other, name, comms=COMMS) == expected
    assert pair(one, one, name, comms=COMMS) == AGREE
    assert pair(other, other, name, comms=COMMS) == AGREE


@pytest.mark.parametrize(("name", "one", "other", "expected"), ASPECTS.values(), ids=ASPECTS)
def test_what_one_side_does_not_know_agrees(
    name: str, one: Op, other: Op, expected: tuple[bool, bool]
) -> None:
    assert pair(one, {}, name, comms=COMMS) == AGREE
    # ... and does not hide that two others disagree
    ops = [op(name, **values) for values in (one, {}, other)]
    if "count" not in one:
        assert judged(*ops, comms=COMMS) == expected


def test_where_one_does_not_know_its_bytes_elements_decide() -> None:
    """A third rank of unknown type: then 4 and 8 elements cannot be the same bytes for all."""
    same_bytes = op("all_reduce", count=4, dtype="f32"), op("all_reduce", count=8, dtype="bf16")
    assert judged(*same_bytes) == DIFFER
    assert judged(*same_bytes, op("all_reduce")) == BLOCK


def test_operations() -> None:
    assert judged(op("all_reduce"), op("all_gather")) == BLOCK
    assert judged(op("all_reduce"), op("barrier"), op("all_reduce")) == BLOCK
    assert judged(op("my_collective"), op("my_collective")) == AGREE
    assert judged(op("my_collective"), op("another")) == BLOCK
    assert judged(op("my_collective", count=4), op("my_collective", count=8)) == AGREE


SIZED = [
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
    "scan", "exscan",
]  # fmt: skip
UNSIZED = [
    "barrier", "all_gather_v", "reduce_scatter_v", "all_to_all_v", "scatter", "scatter_v",
    "gather_v", "comm_create", "coalesced",
]  # fmt: skip


@pytest.mark.parametrize("name", SIZED)
def test_members_pass_in_equally_much(name: str) -> None:
    root = {"root": 0} if name in ("broadcast", "reduce", "gather") else {}
    assert pair({"count": 4} | root, {"count": 8} | root, name) == BLOCK


@pytest.mark.parametrize("name", UNSIZED)
def test_members_may_pass_in_what_they_like(name: str) -> None:
    assert pair({"count": 4, "bytes": 16}, {"count": 8, "bytes": 32}, name) == AGREE


def test_gather_of_nothing_at_the_root() -> None:
    """A root that gives nothing itself is no mismatch; one that gives another count is."""
    root = {"root": 0}
    assert pair({"count": 0} | root, {"count": 8} | root, "gather", backend="gloo") == AGREE
    assert pair({"count": 4} | root, {"count": 8} | root, "gather", backend="gloo") == BLOCK


def test_root_of_what_has_none_is_not_compared() -> None:
    assert pair({"root": 0}, {"root": 1}) == AGREE


def test_sizes_that_must_not_be_compared() -> None:
    odd = {"flags": FLAG["sizes_incomparable"]}
    assert pair({"count": 4} | odd, {"count": 8} | odd) == AGREE
    assert pair({"count": 4} | odd, {"count": 8}) == AGREE
    # everything else is
    assert pair({"count": 4, "reduce_op": "sum"} | odd, {"count": 8, "reduce_op": "max"}) == DIFFER


RECORDER = {"job_facts": {"source": "flight_recorder"}}


def test_all_to_all_of_flight_recorder_may_be_uneven() -> None:
    """It writes uneven splits under the one name: only the totals of all ranks must agree."""
    uneven = {"count": 4, "count_out": 8}, {"count": 8, "count_out": 4}
    assert pair(*uneven, "all_to_all", **RECORDER) == AGREE
    assert pair(*uneven, "all_to_all") == BLOCK
    assert pair({"count": 4, "count_out": 8}, {"count": 8, "count_out": 8}, "all_to_all",
                **RECORDER) == BLOCK  # fmt: skip
    assert pair({"count": 4}, {"count": 8}, "all_reduce", **RECORDER) == BLOCK


def message(sent: Op, taken: Op, backend: str = "nccl") -> tuple[bool, bool]:
    """(differs, blocks) of one message."""
    bare = {"count": None, "dtype": None}
    p = prepare(made([send(1) | bare | sent], [recv(0) | bare | taken], backend=backend))
    said = {
        match_prepared(replace(p, engine=engine)).nodes.select("differs", "blocks").row(0)
        for engine in (CPU, PLANS)
    }
    assert len(said) == 1
    return next(iter(said))


@pytest.mark.parametrize(("backend", "larger"), [("nccl", BLOCK), ("gloo", AGREE), ("mpi", AGREE)])
def test_a_receive_larger_than_what_is_sent(backend: str, larger: tuple[bool, bool]) -> None:
    """NCCL wants equal sizes, MPI and gloo room enough."""
    assert message({"count": 4}, {"count": 4}, backend) == AGREE
    assert message({"count": 4}, {"count": 8}, backend) == larger
    assert message({"count": 8}, {"count": 4}, backend) == BLOCK
    assert message({"bytes": 8}, {"bytes": 4}, backend) == BLOCK


def test_messages() -> None:
    assert message({"count": 4}, {}) == AGREE
    assert message({}, {"count": 4, "dtype": "f32"}) == AGREE
    assert message({"count": 4}, {"count": 5}) == BLOCK
    # bytes decide where both sides know them
    assert message({"count": 4, "dtype": "f32"}, {"count": 8, "dtype": "bf16"}) == DIFFER
    assert message({"count": 4, "dtype": "f32"}, {"count": 4, "dtype": "bf16"}) == BLOCK
    assert message({"count": 4, "dtype": "f32"}, {"count": 4}) == AGREE
    assert message({"dtype": "f32"}, {"dtype": "i32"}) == DIFFER
    assert message({"tag": 1}, {"tag": 2}) == DIFFER
    assert message({"tag": 1}, {}) == AGREE


def test_halves_of_sendrecv_are_of_their_own_length() -> None:
    """Rank 0 sends 4 and takes 8, rank 1 sends 8 and takes 4."""
    rows = []
    for out in ((8, 4), (8, 8), (4, 4)):
        ranks = (
            [op("sendrecv", peer=1 - r, count=n, count_out=m, dtype="f32")]
            for r, n, m in ((0, 4, out[0]), (1, 8, out[1]))
        )
        p = prepare(made(*ranks, backend="mpi"))
        both = [
            match_prepared(replace(p, engine=e)).nodes.sort("src")["blocks"].to_list()
            for e in (CPU, PLANS)
        ]
        assert both[0] == both[1]
        rows.append(both[0])
    # a message from 0 to 1, then from 1 to 0
    assert rows == [[False, False], [False, False], [False, True]]


@pytest.mark.parametrize("members", list(itertools.permutations((4, 4, 8))))
def test_every_member_is_compared(members: tuple[int, ...]) -> None:
    p = prepare(made(*([op("all_reduce", count=n)] for n in members)))
    for engine in (CPU, PLANS):
        nodes = match_prepared(replace(p, engine=engine)).nodes.filter(pl.col("present") > 0)
        assert nodes["blocks"].to_list() == [True]
