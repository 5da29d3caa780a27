"""Chakra traces: framing, fields, order, and what must not be claimed."""

from __future__ import annotations

import gzip
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from corpus import Labelled, check, labelled, scanned
from et_writer import chakra, chakra_node, metadata, varint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dl2gpu.scan import scan
from dl2gpu.trace.chakra import read
from dl2gpu.trace.chakra_frames import is_framed
from dl2gpu.trace.chakra_nodes import Graph, _program_order, from_protobuf
from dl2gpu.trace.files import unwrap
from dl2gpu.trace.inputs import Input, TraceFile
from dl2gpu.trace.schema import EXIT, FLAG, Trace, dtype_name, op_name, validate
from dl2gpu.trace.sniff import classify


def load(contents: dict[str, bytes]) -> tuple[Trace, list[Input]]:
    files = [
        TraceFile(path=f"job/{name}", url=name, format="chakra", folder="job") for name in contents
    ]
    trace, inputs = read(files, lambda file: contents[file.url])
    return validate(trace), inputs


def rows(trace: Trace, rank: int = 0) -> list[dict[str, Any]]:
    names = trace.strings.sort("code")["text"].to_list()
    comms = dict(trace.comms.select("comm", "id").iter_rows())
    return [
        row | {
            "op": op_name(row["op"], names),
            "comm": comms[row["comm"]],
            "dtype": None if row["dtype"] is None else dtype_name(row["dtype"], names),
        }
        for row in trace.events.filter(pl.col("rank") == rank).sort("seq").to_dicts()
    ]  # fmt: skip


VALUES, TYPES = "[[9, 10, 0, 1024, 2, 'cuda:0']]", "['Tensor(c10::BFloat16)']"


def device(id_: int, kind: int = 7, deps: tuple[int, ...] = (), **options: Any) -> bytes:
    told: dict[str, Any] = {"is_cpu_op": False, "comm_size": 2048, "pg_name": "3", "stream": 20}
    return chakra_node(
        id_, "ncclDevKernel_X", kind, deps, values=VALUES, types=TYPES, **told | options
    )


@pytest.mark.parametrize("integer", [7, 9, 11, 13])
@pytest.mark.parametrize("packed", [True, False])
def test_calls(integer: int, packed: bool) -> None:
    data = chakra([
        chakra_node(1, "c10d::allreduce_", 7, is_cpu_op=True),
        device(2, deps=(1,), packed=packed, integer=integer, comm_type=0),
        device(3, 5, (2,), packed=packed, integer=integer, comm_src=0, comm_dst=2, comm_tag=4),
        device(4, 6, (3,), packed=packed, integer=integer, comm_src=2, comm_dst=0, comm_tag=5),
        device(5, deps=(4,), packed=packed, integer=integer, comm_type=5),
        chakra_node(6, "aten::add", 4, (5,), is_cpu_op=True),
    ])  # fmt: skip
    trace, inputs = load({"chakra.0.et": data})
    assert [(i.status, i.rank, i.events) for i in inputs] == [("read", 0, 4)]
    found = rows(trace)
    assert [r["op"] for r in found] == ["all_reduce", "send", "recv", "broadcast"]
    assert [r["peer"] for r in found] == [None, 2, 2, None]
    assert [r["tag"] for r in found] == [None, 4, 5, None]
    assert {r["bytes"] for r in found} == {2048}
    assert {r["count"] for r in found} == {1024}
    assert {r["dtype"] for r in found} == {"bf16"}
    assert {r["comm"] for r in found} == {"3"}
    assert trace.ranks["exit"].to_list() == [EXIT["window"]]
    assert trace.ranks["lost_before"].to_list() == [1]
    assert [r["ordinal"] for r in found] == [None] * 4


def test_fixed_and_odd_attributes() -> None:
    fixed = varint(21 << 3 | 1) + (2048).to_bytes(8, "little")
    body = varint(1 << 3 | 2) + varint(9) + b"comm_size" + fixed
    node = chakra_node(2, "k\xff", 7, is_cpu_op=False, comm_type=9, odd=[True, False], pg_name=5)
    node += varint(10 << 3 | 2) + varint(len(body)) + body
    node += varint(99 << 3 | 2) + varint(2) + b"zz"  # a field of a later version
    trace, _ = load({"a.0.et": chakra([node])})
    found = rows(trace)
    assert (found[0]["op"], found[0]["comm"], found[0]["bytes"]) == ("barrier", "5", None)


@pytest.mark.parametrize(
    ("name", "op"),
    [("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", "all_reduce"),
     ("ncclDevKernel_Broadcast_RING_LL(x)", "broadcast"),
     ("ncclKernel_ReduceScatter_RING_SIMPLE_Sum_bf16(x)", "reduce_scatter"),
     ("strange", "strange")],
)  # fmt: skip
def test_without_a_type_the_name_tells(name: str, op: str) -> None:
    trace, _ = load({"a.0.et": chakra([chakra_node(1, name, 7, is_cpu_op=False)])})
    found = rows(trace)
    assert found[0]["op"] == op
    assert bool(found[0]["flags"] & FLAG["unknown_op"]) == (op == "strange")


def test_host_nodes_count_where_there_are_no_others_and_once() -> None:
    data = chakra([
        chakra_node(1, "c10d::broadcast_(0)", 7, is_cpu_op=True),
        chakra_node(2, "c10d::broadcast_(1)", 7, is_cpu_op=True),
        chakra_node(3, "c10d::allreduce_", 7, is_cpu_op=True),
    ])  # fmt: skip
    trace, _ = load({"a.0.et": data})
    assert [r["op"] for r in rows(trace)] == ["broadcast", "all_reduce"]
    assert trace.jobs["backend"].to_list() == ["gloo"]


def test_order_is_that_of_the_dependencies() -> None:
    data = chakra([
        device(5, comm_type=0, deps=(9,)),
        device(7, comm_type=2, deps=(5,)),
        device(9, comm_type=7),
        device(8, comm_type=5),
    ])  # fmt: skip
    trace, inputs = load({"a.0.et": data})
    assert [r["op"] for r in rows(trace)] == [
        "broadcast", "reduce_scatter", "all_reduce", "all_gather",
    ]  # fmt: skip
    assert inputs[0].status == "read"


def test_a_circle_of_dependencies_is_said() -> None:
    data = chakra([
        device(1, comm_type=0, deps=(2,)), device(2, comm_type=5, deps=(1,)),
        device(3, comm_type=7, deps=(3, 77)),
    ])  # fmt: skip
    trace, inputs = load({"a.0.et": data})
    assert [r["op"] for r in rows(trace)] == ["reduce_scatter", "all_reduce", "broadcast"]
    assert inputs[0].status == "partial"
    assert "circle" in (inputs[0].reason or "")


def naive_order(numbers: list[int], edges: list[tuple[int, int]]) -> list[int]:
    """Rows in order: always the lowest number of those whose dependencies are done."""
    done: set[int] = set()
    out: list[int] = []
    while len(out) < len(numbers):
        able = [
            r
            for r in range(len(numbers))
            if r not in done and all(b in done for a, b in edges if a == r and b != r)
        ]
        able = able or [r for r in range(len(numbers)) if r not in done]
        blocked = not any(all(b in done for a, b in edges if a == r and b != r) for r in able)
        if blocked:
            return out + sorted(able, key=lambda r: numbers[r])
        out.append(min(able, key=lambda r: numbers[r]))
        done.add(out[-1])
    return out


@pytest.mark.parametrize("seed", range(40))
def test_order_against_the_obvious_one(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 30)
    numbers = rng.sample(range(1000), n)
    edges = [(rng.randrange(n), rng.randrange(n)) for _ in range(rng.randint(0, 2 * n))]
    edges = sorted(set(edges))
    got = _program_order(
        np.array(numbers, np.int64), np.array([a for a, _ in edges], np.int32),
        np.array([numbers[b] for _, b in edges], np.int64), Graph(),
    )  # fmt: skip
    assert got.tolist() == naive_order(numbers, edges)


# --------------------------------------------------------------------------------------------------
# Files

NODES = [device(i, comm_type=0, deps=(i - 1,)) for i in range(1, 9)]
WHOLE = chakra(NODES)


@pytest.mark.parametrize(
    "first",
    [metadata("0.0.4"), metadata("1.0.0"), metadata("", schema="1.0.1", pid=7), b""],
    ids=["version", "generated", "attributes", "empty"],
)
def test_beginnings(first: bytes) -> None:
    data = chakra(NODES, first)
    assert is_framed(data[:64])
    assert classify(data[:4096], "x").format == "chakra"
    trace, _ = load({"a.0.et": data})
    assert len(rows(trace)) == 8


def test_what_follows_no_frame_is_not_taken_for_one() -> None:
    for head in (b"", b"\n\n\n\n", b"\x05\n\x03abc", b"plain text", b"\x00\x00\x00", b"\x80" * 20,
                 b"{\n  \"a\": 1}", b"\x12\x0a\x10pid", b"\x06\n\x041234"):  # fmt: skip
        assert not is_framed(head)


def test_a_file_cut_short_gives_its_whole_messages() -> None:
    for cut in (3, 40, 90):
        trace, inputs = load({"a.0.et": WHOLE[:-cut]})
        assert inputs[0].status == "partial"
        assert "ends within a message" in (inputs[0].reason or "")
        assert 5 <= len(rows(trace)) < 8
    cut_gzip = unwrap(gzip.compress(WHOLE)[:-12])
    trace, inputs = load({"a.0.et": cut_gzip})
    assert inputs[0].status == "partial"


def test_a_length_of_zero_ends_the_messages() -> None:
    assert load({"a.0.et": WHOLE + b"\0\0"})[1][0].status == "read"
    _, inputs = load({"a.0.et": WHOLE + b"\0" + WHOLE})
    assert inputs[0].status == "partial"
    assert inputs[0].events == 8


def test_lengths_are_held_against_the_file() -> None:
    for huge in (varint(1 << 40), varint((1 << 64) - 1), b"\xff" * 12):
        _, inputs = load({"a.0.et": WHOLE + huge})
        assert (inputs[0].status, inputs[0].events) == ("partial", 8)


def test_damaged_nodes_are_left_out() -> None:
    bad = varint(10 << 3 | 2) + varint(200) + b"x"
    odd = device(40, comm_type=0) + varint(10 << 3 | 2) + varint(2) + b"\xff\xff"
    trace, inputs = load({"a.0.et": chakra([NODES[0], bad, odd, NODES[1]])})
    assert len(rows(trace)) == 2
    assert "1 messages that are no nodes" in (inputs[0].reason or "")
    assert "1 damaged communication nodes" in (inputs[0].reason or "")


def test_another_schema_is_refused() -> None:
    _, inputs = load({"a.0.et": varint(3) + b"\xff\xff\xff"})
    assert inputs[0].status == "quarantined"


def workload(nodes: list[dict[str, Any]]) -> bytes:
    return json.dumps({"workload_graph": nodes, "workload_name": "w", "ngpus": 8}).encode()


def test_json() -> None:
    nodes = [
        {"Id": 5, "Name": "c10d::allreduce_(0)", "NodeType": 7, "data_deps": [], "is_cpu_op": True},
        {"Id": 9, "Name": "x", "NodeType": 5, "ctrlDeps": [], "data_deps": [12],
         "is_cpu_op": False, "comm_src": 0, "comm_dst": 3, "comm_tag": 1, "comm_size": 64},
        {"Id": 12, "Name": "ncclKernel_AllReduce_X", "NodeType": 7, "ctrl_deps": [5],
         "is_cpu_op": False, "comm_type": 0, "comm_size": 128},
    ]  # fmt: skip
    assert classify(workload(nodes), "x").format == "chakra"
    trace, inputs = load({"a.0.json": workload(nodes)})
    found = rows(trace)
    assert [r["op"] for r in found] == ["all_reduce", "send"]
    assert [r["bytes"] for r in found] == [128, 64]
    assert found[1]["peer"] == 3
    assert inputs[0].status == "read"
    trace, inputs = load({"a.0.json": workload(nodes)[:-60]})
    assert inputs[0].status == "partial"


# --------------------------------------------------------------------------------------------------
# Verdicts


def verdict(tmp_path: Path, contents: dict[str, bytes]) -> dict[str, Any]:
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    report = scan([str(tmp_path)])
    return report.jobs.row(0, named=True) | {"kinds": set(report.findings["kind"])}


def test_windows_without_members_claim_nothing(tmp_path: Path) -> None:
    one = chakra([device(1, comm_type=0), device(2, comm_type=5)])
    two = chakra([device(1, comm_type=5)])
    found = verdict(tmp_path, {"c.0.et": one, "c.1.et": two})
    assert found["kinds"] == {"insufficient_evidence"}
    assert found["deadlocked"] is None


def generated(*types: int) -> bytes:
    nodes = [
        chakra_node(i, "COMM_COLL", 7, (i - 1,) if i else (), comm_type=t, comm_size=64)
        for i, t in enumerate(types)
    ]
    return chakra(nodes, metadata("1.0.0"))


def test_generated_programs_are_compared_by_position(tmp_path: Path) -> None:
    files = {f"c.{r}.et": generated(0, 0, 5 if r == 2 else 0) for r in range(4)}
    found = verdict(tmp_path, files)
    assert found["kinds"] == {"mismatch"}


def test_generated_programs_that_agree_are_healthy(tmp_path: Path) -> None:
    found = verdict(tmp_path, {f"c.{r}.et": generated(0, 7, 2) for r in range(4)})
    assert found["verdict"] == "healthy"


def test_an_absent_or_shorter_program_is_not_accused(tmp_path: Path) -> None:
    found = verdict(tmp_path, {f"c.{r}.et": generated(*([0] * (3 - (r == 1)))) for r in (0, 1, 3)})
    assert found["deadlocked"] is not True
    assert found["kinds"] == {"insufficient_evidence"}


# --------------------------------------------------------------------------------------------------
# Hostile

QUIET = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=200)


@QUIET
@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    load({"a.0.et": data})
    load({"a.0.et": varint(7) + metadata("0.0.4") + data})


@QUIET
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(max_size=5)), max_size=8))
def test_mutated(changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(WHOLE)
    for at, new in changes:
        data[at : at + len(new)] = new
    load({"a.0.et": bytes(data), "a.1.et": WHOLE})


@QUIET
@given(st.lists(st.binary(max_size=40), max_size=8))
def test_any_messages(messages: list[bytes]) -> None:
    load({"a.0.et": chakra(messages)})


def test_many_small_parts_do_not_fill_the_memory() -> None:
    import tracemalloc

    node = chakra_node(1, "x", 7) + (varint(10 << 3 | 2) + varint(0)) * 200_000
    data = chakra([node] + [varint(1 << 3) + varint(2)] * 100_000)
    tracemalloc.start()
    load({"a.0.et": data})
    assert tracemalloc.get_traced_memory()[1] < 100 * len(data)
    tracemalloc.stop()


# --------------------------------------------------------------------------------------------------
# Real traces, and the labelled jobs in this form

RENDERED = [j for j in labelled("rendered") if j.name.endswith("__chakra")]


@pytest.mark.skipif(not RENDERED, reason="no labelled data (set DL2GPU_SHARED)")
@pytest.mark.parametrize("job", RENDERED, ids=lambda j: j.name)
def test_rendered(job: Labelled) -> None:
    assert not check(scanned(job.scanned), job.name, job.expect)


@pytest.mark.parametrize("name", ["chakra_feeder_tests_trace", "chakra_json_trace"])
def test_real_traces(shared: Path, tmp_path: Path, name: str) -> None:
    source = shared / "data" / "chakra" / f"{name}.tar.gz"
    if not source.is_file():
        pytest.skip(f"{source} is not here")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    for small in tmp_path.rglob("small_*"):
        small.unlink()
    report = scan([str(tmp_path)])
    assert report.jobs["verdict"].to_list() == ["insufficient_evidence"]
    assert report.jobs["deadlocked"].to_list() == [None]
    files = [p for p in tmp_path.rglob("chakra.0.*") if p.is_file()]
    trace, _ = load({p.name: p.read_bytes() for p in files})
    assert [r["op"] for r in rows(trace)] == ["broadcast"] * 2 + ["all_reduce"] * 5
    if name.endswith("feeder_tests_trace"):
        assert from_protobuf(files[0].read_bytes()).total == 3664
