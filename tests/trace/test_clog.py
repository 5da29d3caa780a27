"""TorchComms logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dl2gpu.scan import scan
from dl2gpu.trace.clog import read
from dl2gpu.trace.inputs import Input, TraceFile
from dl2gpu.trace.schema import STATE, Trace, op_name, validate
from dl2gpu.trace.sniff import classify


def log(rank: int, *lines: str, size: int = 2) -> str:
    head = f"V|1|base_timestamp=1714234567.890\nnew_comm|comm=world|rank={rank}|world_size={size}\n"
    return head + "".join(line + "\n" for line in lines)


def load(contents: dict[str, str | bytes]) -> tuple[Trace, list[Input]]:
    raw = {k: v.encode() if isinstance(v, str) else v for k, v in contents.items()}
    files = [TraceFile(f"job/{name}", name, "clog", "job") for name in raw]
    trace, inputs = read(files, lambda file: raw[file.url])
    return validate(trace), inputs


def rows(trace: Trace, rank: int = 0) -> list[dict[str, Any]]:
    names = trace.strings.sort("code")["text"].to_list()
    comms = dict(trace.comms.select("comm", "id").iter_rows())
    return [
        row | {"op": op_name(row["op"], names), "comm": comms.get(row["comm"]),
               "stream": None if row["stream"] is None else names[row["stream"]]}
        for row in trace.events.filter(pl.col("rank") == rank).sort("lane", "seq").to_dicts()
    ]  # fmt: skip


REDUCE = "C1|sig|all_reduce|in_count=64|out_count=64|dtype=f32|red_op=sum|async_op=f|comm=world"
LIFE = [
    REDUCE, "C1|Q|work_id=1|+0.001", "C1|S|+0.002",
    "C2|sig|broadcast|in_count=8|out_count=8|dtype=bf16|root=1|async_op=t|comm=world",
    "C2|Q|work_id=2|+0.010", "C1|Q|work_id=3|+0.012", "C1|E|+0.013", "C1|S|+0.014",
    "C2|S|+0.020", "C2|E|+0.021", "C2|W|+0.022", "C1|E|+1.5",
]  # fmt: skip


def test_events_go_to_the_calls_in_turn() -> None:
    trace, inputs = load({"a": log(0, *LIFE), "b": log(1, *LIFE)})
    assert [(i.status, i.rank, i.format) for i in inputs] == [
        ("read", rank, "clog") for rank in (0, 1)
    ]
    found = rows(trace, 1)
    assert [r["op"] for r in found] == ["all_reduce", "broadcast", "all_reduce", "wait"]
    assert [r["seq"] for r in found[:3]] == [1, 2, 3]
    base = 1714234567890 * 10**6
    assert [r["t_created"] - base for r in found[:3]] == [10**6, 10**7, 12 * 10**6]
    assert [r["t_started"] - base for r in found[:3]] == [2 * 10**6, 20 * 10**6, 14 * 10**6]
    assert [r["t_completed"] - base for r in found[:3]] == [13 * 10**6, 21 * 10**6, 1500 * 10**6]
    assert {r["state"] for r in found[:3]} == {STATE["completed"]}
    assert [r["count"] for r in found[:3]] == [64, 8, 64]
    assert found[1]["root"] == 1
    assert (found[3]["requests"], found[3]["blocking"]) == ([2], False)
    assert trace.comms["ranks"].to_list() == [[0, 1]]
    assert trace.jobs.row(0, named=True)["source"] == "clog"


def test_splits_messages_and_batches() -> None:
    lines = [
        "split|parent=world|child=row|ranks=3,1", "new_comm|comm=row|rank=1|world_size=2",
        "C1|sig|send|in_count=4|out_count=0|dtype=f32|peer=0|async_op=t|comm=row",
        "C2|sig|recv|in_count=0|out_count=4|dtype=f32|peer=2|async_op=t|comm=world",
        "C3|sig|all_to_all_v_single|in_splits=1,2|out_splits=2,1|dtype=i64|async_op=f|comm=row",
        "C1|Q|work_id=1|+0.1", "C2|Q|work_id=2|+0.2", "G7|C3|Q|work_id=3|+0.3",
    ]  # fmt: skip
    trace, _ = load({"a": log(1, *lines, size=4)})
    send, recv, exchange = rows(trace, 1)
    assert (send["peer"], send["stream"], send["count"]) == (3, "row:1-3", 4)
    assert (recv["peer"], recv["count"]) == (2, 4)
    assert (exchange["op"], exchange["splits"], exchange["count"]) == ("all_to_all_v", [1, 2], 3)
    batch = ["C9|sig|batch_op_issue|num_ops=2|async_op=t|comm=world", "C9|Q|work_id=9|+0.4"]
    trace, inputs = load({"a": log(1, *lines, *batch, size=4), "b": log(0, *lines, size=4)})
    assert [r["peer"] for r in rows(trace, 1)][:2] == [3, None]
    assert rows(trace, 0)[1]["peer"] is None
    assert "1 batches" in (inputs[0].reason or "")


def test_what_is_lost_is_said() -> None:
    lines = [
        *LIFE,
        "G4|R1|C1|S|+2.0",
        "nonsense",
        "C77|Q|work_id=9|+2",
        "C1|E|+2",
        "C1|Q|work_id=3|+3",
    ]
    _, inputs = load({"a": log(0, *lines)})
    assert inputs[0].status == "partial"
    assert "replayed" in (inputs[0].reason or "")
    assert "4 lines are of no known form" in (inputs[0].reason or "")
    _, inputs = load({"a": log(0, *LIFE)[:-5]})
    assert (inputs[0].status, inputs[0].events) == ("partial", 4)


@pytest.mark.parametrize(
    "data",
    ["", "V|2|base_timestamp=1.0\n", "V|1|base_timestamp=1.0\n", "x", log(0, size=10**9),
     "V|1|base_timestamp=1.0\nnew_comm|comm=a|rank=3|world_size=2\n"],
)  # fmt: skip
def test_refused(data: str) -> None:
    trace, inputs = load({"a": data})
    assert inputs[0].status == "quarantined"
    assert inputs[0].reason
    assert trace.events.is_empty()


def verdict(tmp_path: Path, *logs: str) -> dict[str, Any]:
    for rank, text in enumerate(logs):
        (tmp_path / f"clog_{rank}.txt").write_text(text)
    report = scan([str(tmp_path)])
    return report.jobs.row(0, named=True) | {"kinds": set(report.findings["kind"])}


def test_healthy(tmp_path: Path) -> None:
    assert verdict(tmp_path, log(0, *LIFE), log(1, *LIFE))["verdict"] == "healthy"


def test_a_mismatch_that_hangs(tmp_path: Path) -> None:
    gather = "C5|sig|barrier|async_op=f|comm=world"
    one = log(0, *LIFE, "C1|Q|work_id=4|+9.0", "C1|S|+9.1")
    two = log(1, *LIFE, gather, "C5|Q|work_id=4|+9.0", "C5|S|+9.1")
    found = verdict(tmp_path, one, two)
    assert (found["verdict"], found["deadlocked"]) == ("mismatch", True)


def test_without_lifecycle_a_shorter_log_is_not_accused(tmp_path: Path) -> None:
    queued = [line for line in LIFE if "|S|" not in line and "|E|" not in line]
    found = verdict(tmp_path, log(0, *queued), log(1, *queued[:3]))
    assert found["deadlocked"] is not True
    assert found["kinds"] == {"insufficient_evidence"}


def test_sniffed() -> None:
    assert classify(log(0).encode(), "x").format == "clog"


LINE = st.sampled_from([*LIFE, "split|parent=a|child=world|ranks=0,1", "new_comm|comm=|rank=1|x"])
JUNK = st.text(alphabet="CGQSEWRV|=+,.0123456789\n ", max_size=30)


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=150)
@given(st.lists(LINE | JUNK, max_size=20), st.binary(max_size=20))
def test_any_lines(lines: list[str], junk: bytes) -> None:
    load({"a": log(0, *lines), "b": log(1, *LIFE).encode() + junk})
