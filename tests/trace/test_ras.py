"""Reports of NCCL's RAS, in text and JSON: what they say, and what two of them say together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dl2gpu import scan
from dl2gpu.trace import ras
from dl2gpu.trace.inputs import Input, TraceFile
from dl2gpu.trace.schema import Trace, op_name, validate

KINDS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")


def read(*documents: str) -> tuple[Trace, list[Input]]:
    files = [TraceFile(f"{k}", f"{k}", "ras", "job") for k in range(len(documents))]
    trace, inputs = ras.read(files, load=lambda f: documents[int(f.path)].encode())
    return validate(trace), inputs


def report(
    counts: list[dict[str, int]], at: str = "2025-03-13 22:47:51", missing: tuple[int, ...] = (),
    dead: bool = False, more: list[dict[str, Any]] | None = None, error: int = 0,
) -> str:  # fmt: skip
    """A report in JSON: the calls of each rank of one communicator."""
    ranks = [
        {
            "rank": r, "host": f"10.4.{1 + r // 4}.7", "pid": 1000 + r, "cuda_dev": r % 4,
            "nvml_dev": r % 4,
            "status": {"init_state": 0, "async_error": error, "finalize_called": False,
                       "destroy_flag": False, "abort_flag": False},
            "collective_counts": {k: c.get(k, 0) for k in KINDS},
        }
        for r, c in enumerate(counts)
    ]  # fmt: skip
    gone = [ranks[r] | {"status": {"unresponsive": True, "considered_dead": dead}} for r in missing]
    for rank in gone:
        del rank["collective_counts"]
    there = [r for r in ranks if r["rank"] not in missing]
    comm = {
        "hash": "0x5d00", "secondary_hash": "0x9f21:0x4c7", "size": len(ranks),
        "ranks_count": len(there), "missing_ranks_count": len(gone), "ranks": there,
        "missing_ranks": gone,
    }  # fmt: skip
    return json.dumps(
        {
            "nccl_version": "2.28.7", "timestamp": at, "communicators_count": 1,
            "communicators": [comm, *(more or [])],
            "ras": {"collection_time_sec": 0.004, "timeouts_count": 0},
        }
    )  # fmt: skip


HEAD = """\
NCCL version 2.26.2 compiled with CUDA 12.8
CUDA runtime version 12080, driver version 12080

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4         8        32        32   RUNNING  {errors}
    1         8         4         1         4        32   RUNNING  OK

"""


def text(
    low: int, high: int, listed: tuple[int, ...], op: str = "AllReduce ", more: str = ""
) -> str:
    """A report in text: 32 ranks, of which the ``listed`` ones stand at ``low``."""
    places = "\n".join(
        f"  Rank {r} -- GPU {r % 8} managed by process {5000 + r} on node 172.16.64.{r // 8}"
        for r in listed
    )
    return HEAD.format(errors="MISMATCH") + (
        f"Warnings\n========\n\n#0-0 (27a079b828ff1a75) MISMATCH\n"
        f"  Communicator ranks have different {op}operation counts\n"
        f"  {32 - len(listed)} ranks have launched up to operation {high}\n"
        f"  {len(listed)} ranks have launched up to operation {low}\n{places}\n{more}\n"
    )


def counts(trace: Trace) -> list[tuple[Any, ...]]:
    """(report, op, count, ranks) of all counts that are not 0."""
    strings = trace.strings.sort("code")["text"].to_list()
    rows = trace.said.filter((pl.col("what") == "ras_count") & (pl.col("count") > 0))
    return [
        (n, op_name(op, strings), count, of)
        for n, op, count, of in rows.select("number", "op", "count", "of").iter_rows()
    ]


# --------------------------------------------------------------------------------------------------
# Reading


def test_counts_of_a_report_in_json() -> None:
    trace, inputs = read(
        report([{"AllReduce": 7, "AllGather": 2}, {"AllReduce": 8, "AllGather": 2}])
    )
    assert [i.status for i in inputs] == ["read"]
    assert counts(trace) == [
        (0, "all_reduce", 7, [0]), (0, "all_reduce", 8, [1]), (0, "all_gather", 2, [0, 1]),
    ]  # fmt: skip
    assert trace.jobs.select("world_size", "source").row(0) == (2, "ras")
    assert trace.ranks["rank"].to_list() == [0, 1]
    assert trace.comms["ranks"].to_list() == [[0, 1]]


def test_counts_of_a_report_in_text() -> None:
    trace, _ = read(text(6649, 6650, (0, 2, 17)))
    others = [r for r in range(32) if r not in (0, 2, 17)]
    assert counts(trace) == [
        (0, "all_reduce", 6649, [0, 2, 17]), (0, "all_reduce", 6650, others),
    ]  # fmt: skip
    assert trace.jobs["world_size"].item() == 32
    places = trace.said.filter(pl.col("count") == 6649)["text"].item()
    assert "rank 17 (GPU 1, process 5017 on 172.16.64.2)" in places


@pytest.mark.parametrize("begin", ["NCCL version", "Communicators...", "#0-0"])
def test_a_report_may_lack_its_beginning(tmp_path: Path, begin: str) -> None:
    whole = text(6649, 6650, (0, 2, 17))
    part = whole[whole.index(begin) :]
    (tmp_path / "ras.txt").write_text(part, encoding="utf-8")
    found = scan([str(tmp_path)])
    assert found.inputs.select("format", "status").row(0) == ("ras", "read")
    assert counts(read(part)[0])[0][:3] == (0, "all_reduce", 6649)


def test_a_report_in_json_is_known_in_any_order_of_its_keys(tmp_path: Path) -> None:
    document = json.loads(report([{"AllReduce": 7}] * 64))
    (tmp_path / "a.json").write_text(json.dumps(document, sort_keys=True), encoding="utf-8")
    assert scan([str(tmp_path)]).inputs["format"].to_list() == ["ras"]


def test_a_report_without_the_name_of_the_operation_counts_all_together() -> None:
    trace, _ = read(text(9, 10, (1,), op=""))
    assert {row[1] for row in counts(trace)} == {"collective"}


def test_each_rank_with_a_count_of_its_own() -> None:
    listed = (
        "  Rank 3 has launched up to operation 5 -- GPU 3 managed by process 5003 on node n0\n"
        "  Rank 4 has not launched any operations -- GPU 4 managed by process 5004 on node n0"
    )
    body = text(9, 10, (), more=listed).replace("  0 ranks have launched up to operation 9\n", "")
    trace, _ = read(body.replace("32 ranks have", "30 ranks have"))
    rows = trace.said.filter(pl.col("what") == "ras_count").select("count", "of").rows()
    assert (5, [3]) in rows
    assert (0, [4]) in rows
    assert (10, [r for r in range(32) if r not in (3, 4)]) in rows


def test_ranks_that_are_missing_in_text() -> None:
    errors = (
        "Errors\n======\n\n#0-0 (27a079b828ff1a75) INCOMPLETE\n"
        "  Missing communicator data from 3 ranks\n  The missing ranks: 21,30-31\n"
    )
    trace, _ = read(HEAD.format(errors="INCOMPLETE") + errors)
    gone = trace.said.filter(pl.col("what") == "ras_missing")
    assert gone["of"].to_list() == [[21, 30, 31]]
    assert trace.ranks.height == 29


@pytest.mark.parametrize("glue", ["", "\n", "\nSERVER PROTOCOL 2\nOK\n"])
def test_several_reports_in_one_file_are_told_apart(glue: str) -> None:
    first, second = (
        report([{"AllReduce": 7}] * 2),
        report([{"AllReduce": 9}] * 2, "2025-03-14 01:00:00"),
    )
    trace, inputs = read("SERVER PROTOCOL 2\nOK\n" + first + glue + second)
    assert inputs[0].status == "read"
    assert [row[:3] for row in counts(trace)] == [(0, "all_reduce", 7), (1, "all_reduce", 9)]
    texts, _ = read(text(5, 6, (1,)) + text(8, 9, (1,)))
    assert texts.said["number"].max() == 1


def test_reports_are_ordered_by_time_and_else_by_name() -> None:
    late, early = report([{"AllReduce": 9}], "2025-03-14 01:00:00"), report([{"AllReduce": 7}])
    assert [row[2] for row in counts(read(late, early)[0])] == [7, 9]
    by_name, _ = read(text(8, 9, (1,)), text(5, 6, (1,)))
    assert [row[2] for row in counts(by_name)] == [8, 9, 5, 6]


@pytest.mark.parametrize(
    "document",
    [
        "",
        "{",
        "[]",
        '{"communicators": 3, "nccl_version": "2.28"}',
        '{"communicators": [{"ranks": [{"rank": "x"}]}], "nccl_version": "2.28"}',
        '{"nccl_version": "2.28"}',
        '{"communicators": [' * 2000,
        '{"a":' * 100_000,
        "not JSON",
    ],
)
def test_what_is_no_report_is_quarantined(document: str) -> None:
    trace, inputs = read(document)
    assert [i.status for i in inputs] == ["quarantined"]
    assert inputs[0].reason
    assert trace.jobs.is_empty()


@pytest.mark.parametrize("number", [-1, 1 << 31, 1 << 62, (1 << 63) - 1])
@pytest.mark.parametrize("key", ["rank", "pid", "size", "AllReduce", "cuda_dev"])
def test_numbers_out_of_range_hurt_nobody(key: str, number: int) -> None:
    def put(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: number if k == key else put(v) for k, v in value.items()}
        return [put(v) for v in value] if isinstance(value, list) else value

    trace, inputs = read(json.dumps(put(json.loads(report([{"AllReduce": 3}] * 3)))))
    assert inputs[0].status in ("read", "quarantined")
    assert trace.ranks.height < 1 << 21


def test_numbers_out_of_range_in_text_hurt_nobody() -> None:
    body = text(6649, 6650, (0, 2))
    for old in ("6649", "6650", "Rank 0", "30 ranks", "5002", " 32  ", "#0-0"):
        trace, _ = read(body.replace(old, old + "9" * 30))
        assert trace.jobs.height == 1


# --------------------------------------------------------------------------------------------------
# Verdicts


def verdict(folder: Path, *documents: str) -> tuple[str, bool | None, list[dict[str, Any]]]:
    job = folder / "job"
    job.mkdir()
    for k, document in enumerate(documents):
        (job / f"ras_{k}.txt").write_text(document, encoding="utf-8")
    found = scan([str(folder)])
    row = found.jobs.row(0, named=True)
    return row["verdict"], row["deadlocked"], found.findings.to_dicts()


def test_one_report_with_counts_that_differ_convicts_nobody(tmp_path: Path) -> None:
    kind, stuck, found = verdict(tmp_path, report([{"AllReduce": 7}, {"AllReduce": 8}]))
    assert (kind, stuck, found[0]["culprits"]) == ("insufficient_evidence", None, [])


def test_one_report_with_equal_counts_says_nothing(tmp_path: Path) -> None:
    assert verdict(tmp_path, report([{"AllReduce": 7}] * 4))[0] == "healthy"


def test_a_job_that_goes_on_is_healthy(tmp_path: Path) -> None:
    first = report([{"AllReduce": 7}, {"AllReduce": 8}])
    second = report([{"AllReduce": 90}, {"AllReduce": 89}], "2025-03-13 22:48:51")
    assert verdict(tmp_path, second, first)[:2] == ("healthy", False)


def test_a_text_report_of_a_job_that_goes_on_is_healthy(tmp_path: Path) -> None:
    assert verdict(tmp_path, text(6, 7, (1, 2)), text(800, 801, (1, 3)))[:2] == ("healthy", False)


def test_ranks_that_stay_behind_are_missed(tmp_path: Path) -> None:
    counts_ = [{"AllReduce": 8 - (r == 2)} for r in range(8)]
    kind, stuck, found = verdict(tmp_path, report(counts_), report(counts_, "2025-03-13 22:57:51"))
    assert (kind, stuck, found[0]["culprits"]) == ("missing_participant", None, [2])
    assert found[0]["evidence"] == "inferred"
    assert found[0]["victims"] == [0, 1, 3, 4, 5, 6, 7]


def test_ranks_that_a_text_report_lists_may_be_those_that_are_ahead(tmp_path: Path) -> None:
    ahead = text(6650, 6649, (4, 5))  # the smaller set is listed, with the larger number
    kind, _, found = verdict(tmp_path, ahead, ahead)
    assert (kind, found[0]["victims"], found[0]["culprits"]) == ("missing_participant", [4, 5], [])


def test_ranks_at_work_in_another_group_are_not_stuck(tmp_path: Path) -> None:
    def pair(n: int) -> dict[str, Any]:
        small: dict[str, Any] = json.loads(report([{"AllGather": n}] * 2))["communicators"][0]
        return small | {"hash": "0x77"}

    world = [{"AllReduce": 8 - (r == 1)} for r in range(4)]
    first = report(world, more=[pair(5)])
    second = report(world, "2025-03-13 22:57:51", more=[pair(50)])
    assert verdict(tmp_path, first, second)[0] == "healthy"


def test_counts_that_cross_in_a_standstill_are_a_mismatch(tmp_path: Path) -> None:
    world = [{"AllReduce": 8, "AllGather": 3}] * 3 + [{"AllReduce": 7, "AllGather": 4}]
    kind, stuck, _ = verdict(tmp_path, report(world), report(world, "2025-03-13 22:57:51"))
    assert (kind, stuck) == ("mismatch", True)


def test_counts_that_cross_in_one_report_are_of_the_moment(tmp_path: Path) -> None:
    world = [{"AllReduce": 8, "AllGather": 3}] * 3 + [{"AllReduce": 7, "AllGather": 4}]
    assert verdict(tmp_path, report(world))[:2] == ("insufficient_evidence", None)


def test_a_standstill_of_ranks_that_agree_is_open(tmp_path: Path) -> None:
    world = [{"AllReduce": 8}] * 4
    kind, stuck, _ = verdict(tmp_path, report(world), report(world, "2025-03-13 22:57:51"))
    assert (kind, stuck) == ("insufficient_evidence", None)


def test_two_reports_of_one_moment_are_no_standstill(tmp_path: Path) -> None:
    counts_ = [{"AllReduce": 8 - (r == 2)} for r in range(8)]
    kind, _, _ = verdict(tmp_path, report(counts_), report(counts_, "2025-03-13 22:47:52"))
    assert kind == "insufficient_evidence"


@pytest.mark.parametrize("dead", [True, False])
def test_ranks_that_do_not_answer(tmp_path: Path, dead: bool) -> None:
    world = [{"AllReduce": 8}] * 4
    kind, stuck, found = verdict(tmp_path, report(world, missing=(3,), dead=dead))
    assert kind == ("crashed_rank" if dead else "insufficient_evidence")
    assert stuck is (False if dead else None)
    assert found[0]["culprits"] == ([3] if dead else [])


def test_errors_of_the_library_are_shown(tmp_path: Path) -> None:
    kind, stuck, _ = verdict(tmp_path, report([{"AllReduce": 8}] * 4, error=6))
    assert (kind, stuck) == ("insufficient_evidence", None)


@pytest.mark.parametrize("digit", ["\u0661", "\u0967", "\uff11"])
def test_digits_of_other_scripts_are_no_numbers(digit: str) -> None:
    whole = text(11, 12, (4, 5))
    for old in ("5004", "Rank 4", "operation 12", "30 ranks", "   32   RUNNING", "GPU 4"):
        assert old in whole
        new = old.translate({ord(c): digit for c in "0123456789"})
        trace, inputs = read(whole.replace(old, new))
        assert inputs[0].status in {"read", "partial"}, old
        assert not trace.said.is_empty()
