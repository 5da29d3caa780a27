"""PARAM communication traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dl2gpu.scan import scan
from dl2gpu.trace.inputs import Input, TraceFile
from dl2gpu.trace.param import read
from dl2gpu.trace.schema import FLAG, Trace, dtype_name, op_name, validate
from dl2gpu.trace.sniff import classify


def load(contents: dict[str, bytes]) -> tuple[Trace, list[Input]]:
    files = [TraceFile(f"job/{name}", name, "param", "job") for name in contents]
    trace, inputs = read(files, lambda file: contents[file.url])
    return validate(trace), inputs


def rows(trace: Trace, rank: int = 0) -> list[dict[str, Any]]:
    names = trace.strings.sort("code")["text"].to_list()
    comms = dict(trace.comms.select("comm", "id").iter_rows())
    return [
        row
        | {
            "op": op_name(row["op"], names),
            "comm": comms.get(row["comm"]),
            "dtype": None if row["dtype"] is None else dtype_name(row["dtype"], names),
        }
        for row in trace.events.filter(pl.col("rank") == rank).sort("lane", "seq").to_dicts()
    ]


def item(comms: str, **fields: Any) -> dict[str, Any]:
    return {"comms": comms, "world_size": 2, "pg_id": 0, "startTime_ns": 1} | fields


PROGRAM: list[dict[str, Any]] = [
    item("init", pg_id=4, global_ranks=[1, 0]),
    {"compute": "gemm", "mm_dim": 4},
    item("all_reduce", req=7, in_msg_size=64, out_msg_size=64, dtype="Float"),
    item("wait", req=7),
    item("broadcast", root=1, in_msg_size=8, dtype="Int"),
    item("all_to_allv", in_msg_size=12, out_msg_size=6, in_split=[1, 2], out_split=[1, 1],
         dtype="Long"),
    item("send", pg_id=4, dst_rank=1, src_rank=0, in_msg_size=3, dtype="Float"),
    item("barrier"),
]  # fmt: skip


def test_calls() -> None:
    data = json.dumps(PROGRAM).encode()
    trace, inputs = load({"0.json": data, "1.json": data})
    assert [(i.status, i.rank) for i in inputs] == [("read", 0), ("read", 1)]
    found = rows(trace)
    assert [r["op"] for r in found] == [
        "all_reduce", "broadcast", "all_to_all", "send", "barrier", "wait",
    ]  # fmt: skip
    assert [r["count"] for r in found[:5]] == [64, 8, 12, 3, None]
    assert [r["bytes"] for r in found[:4]] == [256, 32, 96, 12]
    assert [r["dtype"] for r in found[:4]] == ["f32", "i32", "i64", "f32"]
    assert found[1]["root"] == 1
    assert (found[2]["splits"], found[2]["count_out"]) == ([4, 8], 6)
    assert (found[3]["peer"], found[3]["comm"]) == (1, "4")
    assert (found[5]["requests"], found[5]["blocking"]) == ([0], False)
    assert all(r["flags"] & FLAG["ordinal_inferred"] for r in found if r["ordinal"] is not None)
    assert dict(trace.comms.select("id", "ranks").iter_rows()) == {"0": [0, 1], "4": [1, 0]}


def test_cut_files_give_their_whole_items() -> None:
    data = json.dumps(PROGRAM, indent=1).encode()
    _, inputs = load({"0.json": data[:-40], "1.json": data})
    assert [i.status for i in inputs] == ["partial", "read"]
    assert inputs[0].events == 4


@pytest.mark.parametrize("data", [b"", b"[]", b"[1, 2]", b'[{"a": 1}]', b"{}", b"\0\1"])
def test_what_is_no_trace_is_refused(data: bytes) -> None:
    assert load({"0.json": data})[1][0].status == "quarantined"


def test_verdicts(tmp_path: Path) -> None:
    same = [item("all_reduce", in_msg_size=n, dtype="Float") for n in (1, 2, 3)]
    programs = {
        "same/0": same, "same/1": same, "short/0": same, "short/1": same[:2], "alone/0": same,
        "other/0": same, "other/1": [*same[:2], item("barrier")],
    }  # fmt: skip
    for name, items in programs.items():
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(items))
    report = scan([str(tmp_path)])
    said = dict(report.jobs.select("job", "verdict").iter_rows())
    assert said.pop("same") == "healthy"
    # where the windows begin is not known, so what differs proves nothing
    assert set(said.values()) == {"insufficient_evidence"}
    assert True not in report.jobs["deadlocked"].to_list()


def test_sniffed() -> None:
    assert classify(json.dumps(PROGRAM).encode(), "0.json").format == "param"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
KEYS = st.sampled_from([*PROGRAM[5], "req", "global_ranks", "root", "src_rank", "dst_rank"])


ITEM = st.dictionaries(KEYS, JSON | st.sampled_from(["send", "wait", "init"]))


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=150)
@given(st.lists(ITEM, max_size=6), st.binary(max_size=20))
def test_any_items(items: list[dict[str, Any]], junk: bytes) -> None:
    load({"0.json": json.dumps(PROGRAM[:3] + items).encode(), "1.json": junk})
    load({"0.json": json.dumps(items).encode() + junk})
