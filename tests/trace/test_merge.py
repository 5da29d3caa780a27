"""One job of several formats' records: which operations are kept, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import polars as pl
import pytest

from dl2gpu.trace.convert import canonical
from dl2gpu.trace.inputs import Input
from dl2gpu.trace.merge import merge
from dl2gpu.trace.schema import EXIT, OP, STATE, Trace, concat, conform, validate

WORLD = [0, 1, 2, 3]


def record(
    source: str,
    ranks: Sequence[int],
    *,
    name: str = "night/job",
    folder: str = "night/job",
    attempt: int = 0,
    world: int | None = 4,
    comms: Sequence[tuple[str, str, Sequence[int]]] = (("0", "default_pg", WORLD),),
    silent: Sequence[int] = (),
    p2p: bool = False,
    exits: dict[int, str] | None = None,
    **event: Any,
) -> Trace:
    """What one format holds: an operation on each communicator for each rank but the silent."""
    rows = [
        {"job": 0, "rank": rank, "lane": 0, "seq": seq, "op": OP["all_reduce"], "comm": seq,
         "blocking": False, "state": STATE["scheduled"], "flags": 0, "ordinal": 7, **event}
        for rank in ranks if rank not in silent
        for seq in range(len(comms))
    ]  # fmt: skip
    job = {"job": 0, "name": name, "folder": folder, "attempt": attempt, "world_size": world,
           "source": source, "waits": False, "p2p": p2p}  # fmt: skip
    ends = [
        {"job": 0, "rank": rank, "exit": EXIT[(exits or {}).get(rank, "unknown")],
         "truncated": False, "lost_before": 0, "only_active": False,
         "path": f"{folder}/{source}_{rank}"}
        for rank in ranks
    ]  # fmt: skip
    groups = [
        {"comm": i, "job": 0, "id": id_, "name": id_, "desc": desc, "ranks": list(members)}
        for i, (id_, desc, members) in enumerate(comms)
    ]
    frames = {"events": rows, "jobs": [job], "ranks": ends, "comms": groups}
    return validate(
        Trace(**{
            table: conform(pl.DataFrame(made, infer_schema_length=None), table)
            for table, made in frames.items() if made
        })
    )  # fmt: skip


def merged(*records: Trace) -> tuple[Trace, dict[str, str | None]]:
    both = concat(records)
    inputs = [Input(path, "read") for path in both.ranks["path"]]
    trace, told = merge(both, inputs)
    return validate(trace), {i.path: i.reason for i in told}


def used(trace: Trace, column: str = "count") -> dict[int, list[Any]]:
    """Of each rank, ``column`` of its operations."""
    rows = trace.events.sort("rank", "seq").group_by("rank", maintain_order=True).agg(column)
    return dict(rows.iter_rows())


def test_the_stronger_record_of_each_rank_is_used() -> None:
    dumps = record("flight_recorder", [0, 1, 2], count=1)
    logs = record("log", WORLD, count=2)
    trace, told = merged(logs, dumps)
    assert trace.jobs.select("name", "source", "world_size").rows() == [
        ("night/job", "flight_recorder+log", 4)
    ]
    assert used(trace) == {0: [1], 1: [1], 2: [1], 3: [2]}
    assert trace.comms["id"].to_list() == ["0"]
    assert trace.events["comm"].unique().to_list() == [0]
    assert told["night/job/log_3"] is None
    assert "stronger record" in (told["night/job/log_0"] or "")
    assert told["night/job/flight_recorder_0"] is None


def test_a_record_without_operations_gives_way() -> None:
    dumps = record("flight_recorder", WORLD, silent=[2], count=1)
    logs = record("log", WORLD, count=2)
    assert used(merged(dumps, logs)[0]) == {0: [1], 1: [1], 2: [2], 3: [1]}


def test_operations_without_numbers_are_not_put_beside_others() -> None:
    dumps = record("flight_recorder", [0, 1], count=1)
    profile = record("kineto", WORLD, count=2, exits={0: "finished", 3: "finished"})
    trace, told = merged(profile, dumps)
    assert used(trace) == {0: [1], 1: [1]}
    assert trace.ranks["rank"].to_list() == [0, 1]  # of the others there is no record: missing
    assert trace.ranks["exit"].to_list() == [EXIT["finished"], EXIT["unknown"]]
    assert "no numbers" in (told["night/job/kineto_3"] or "")


def test_calls_of_nccl_have_no_numbers_either() -> None:
    """They are counted from the first line of the log, wherever in the run that is."""
    dumps = record("flight_recorder", [0, 1], count=1, p2p=True)
    calls = record("log", WORLD, count=2, p2p=True, exits={2: "crashed"})
    trace, told = merged(dumps, calls)
    assert used(trace) == {0: [1], 1: [1]}
    assert "no numbers" in (told["night/job/log_3"] or "")
    # that rank 2 died is known all the same; of rank 3 nothing
    assert dict(trace.ranks.select("rank", "exit").iter_rows()) == {
        0: EXIT["unknown"], 1: EXIT["unknown"], 2: EXIT["crashed"],
    }  # fmt: skip
    assert trace.ranks.filter(rank=2)["only_active"].item()


def test_a_log_tells_how_a_rank_ended() -> None:
    dumps = record("flight_recorder", [0, 1], count=1)
    logs = record("log", [0, 1], silent=[0, 1], exits={1: "crashed"})
    trace, _ = merged(dumps, logs)
    assert dict(trace.ranks.select("rank", "exit").iter_rows()) == {
        0: EXIT["unknown"], 1: EXIT["crashed"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "same"),
    [
        (("0", "default_pg", WORLD), True),
        (("default_pg", "default_pg", WORLD), True),  # by its members
        (("7", "tp", [0, 1]), False),
        (("7", "", []), False),  # nothing says that it is the same
    ],
)
def test_communicators_are_matched(theirs: tuple[str, str, list[int]], same: bool) -> None:
    trace, _ = merged(record("flight_recorder", [0]), record("log", [3], comms=[theirs]))
    assert trace.comms.height == (1 if same else 2)


def test_members_that_only_the_weaker_record_knows() -> None:
    trace, _ = merged(
        record("flight_recorder", [0], comms=[("0", "", [])]), record("log", [3]),
    )  # fmt: skip
    assert trace.comms["ranks"].to_list() == [WORLD]


@pytest.mark.parametrize("other", [{"world": 8}, {"attempt": 1}, {"folder": "night/other"}])
def test_what_is_not_the_same_job_stays_apart(other: dict[str, Any]) -> None:
    dumps, logs = record("flight_recorder", [0, 1]), record("log", WORLD, **other)
    trace, told = merged(dumps, logs)
    assert trace.jobs.height == 2
    assert trace.events.height == 6
    assert set(told.values()) == {None}


def test_jobs_that_their_records_name() -> None:
    a, b = record("native", [0], name="a"), record("native", [1], name="b")
    trace, _ = merged(a, b, record("log", WORLD), record("kineto", [0], name="a"))
    assert sorted(trace.jobs.select("name", "source").rows()) == [
        ("a", "native+kineto"), ("b", "native"), ("night/job", "log"),
    ]  # fmt: skip
    trace, _ = merged(a, record("log", WORLD))
    assert trace.jobs.select("name", "source").rows() == [("a", "native+log")]


def test_one_format_is_left_alone() -> None:
    both = concat([record("log", [0]), record("log", [1], folder="night/other")])
    inputs = [Input("x", "read")]
    assert merge(both, inputs) == (both, inputs)


def test_the_order_of_records_does_not_count() -> None:
    records = [
        record("flight_recorder", [0, 1], count=1),
        record("log", WORLD, count=2, exits={2: "killed"}),
        record("kineto", [0, 3], count=3),
        record("log", [0], name="night/other", folder="night/other", world=2, count=4),
    ]
    first: dict[str, pl.DataFrame] = {}
    for ordered in permutations(records):
        found = canonical(merged(*ordered)[0])
        for table, frame in found.items():
            assert frame.equals(first.setdefault(table, frame)), table
