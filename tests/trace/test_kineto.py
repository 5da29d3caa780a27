"""Profiler traces: what is read of them, whatever their version, order, size or damage."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kineto_writer import BASE, Rank, dumped, write_job

import dl2gpu
from dl2gpu.trace import kineto
from dl2gpu.trace.convert import convert
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.kineto_align import Sequence, align
from dl2gpu.trace.kineto_names import Kind, kernel_operation, kind_of, sizes_of, splits_of
from dl2gpu.trace.kineto_scan import Columns, scan
from dl2gpu.trace.schema import FLAG, OP, STATE, Trace, op_name, validate
from dl2gpu.trace.sniff import classify

pytestmark = pytest.mark.filterwarnings("error")


def read(*contents: bytes | Any, block: int = 1 << 20, names: list[str] | None = None) -> Trace:
    trace, inputs = read_all(*contents, block=block, names=names)
    assert all(i.status in {"read", "partial"} for i in inputs), inputs
    return trace


def read_all(
    *contents: bytes | Any, block: int = 1 << 20, names: list[str] | None = None
) -> tuple[Trace, list[Input]]:
    data = {
        f"job/{names[i] if names else f'trace_{i}.json'}": c if isinstance(c, bytes) else dumped(c)
        for i, c in enumerate(contents)
    }
    files = [TraceFile(path=p, url=p, format="kineto", folder="job") for p in data]
    trace, inputs = kineto.read(files, lambda f: data[f.path], block)
    return validate(trace, "kineto"), inputs


def calls(trace: Trace, rank: int = 0) -> pl.DataFrame:
    """The operations of a rank in program order, without the waits."""
    return trace.events.filter(pl.col("rank") == rank, pl.col("op") != OP["wait"]).sort("seq")


def ops(trace: Trace, rank: int = 0) -> list[str]:
    texts = trace.strings.sort("code")["text"].to_list()
    return [op_name(code, texts) for code in calls(trace, rank)["op"]]


def small(rank: int = 0, **how: Any) -> Rank:
    """A step: collectives on two threads, a batch, waits, and everything else in between."""
    r = Rank(rank, 2, {"0": [0, 1], "7": [0, 1]}, **how)
    r.noise()
    r.call("allreduce", count=4096, thread=5)
    r.noise()
    r.call("_allgather_base", "7", 512, out=1024, stream=28)
    r.wait("7")
    r.call("broadcast", "7", 10, args={"Rank": 1}, stream=28)
    r.batch(("send", 1 - rank), ("recv", 1 - rank))
    r.noise()
    r.call("barrier", count=0)
    r.wait()
    return r


# --------------------------------------------------------------------------------------------------
# What a trace says


def test_operations_with_their_metadata() -> None:
    trace = read(small().trace())
    assert ops(trace) == ["all_reduce", "all_gather", "broadcast", "send", "recv", "barrier"]
    rows = calls(trace)
    assert rows["seq"].to_list() == list(range(6))
    assert rows["ordinal"].to_list() == [1, 1, 2, None, None, 2]
    assert rows["count"].to_list() == [4096, 512, 10, 64, 64, None]
    assert rows["count_out"].to_list() == [None, 1024, None, None, None, None]
    assert rows["bytes"].to_list() == [8192, 1024, 20, 128, 128, None]
    assert rows["root"].to_list() == [None, None, 1, None, None, None]
    assert rows["peer"].to_list() == [None, None, None, 1, 1, None]
    assert rows["group"].null_count() == 4
    assert rows["group"][3] == rows["group"][4]
    assert set(rows["state"]) == {STATE["completed"]}
    texts = trace.strings.sort("code")["text"].to_list()
    streams = [texts[s] for s in rows["stream"]]
    assert streams == ["stream 20", "stream 28", "stream 28", "stream 24", "stream 24", "stream 20"]
    by_name = {c["name"]: c for c in trace.comms.to_dicts()}
    assert by_name["7"]["ranks"] == [0, 1]
    assert by_name["7"]["id"] == "7"
    assert by_name["7"]["desc"] == "group 7"


def test_threads_are_lanes_and_the_main_one_is_the_first() -> None:
    rows = calls(read(small().trace()))
    assert rows["lane"].to_list() == [1, 0, 0, 0, 0, 0]


def test_times_are_exact_to_the_nanosecond() -> None:
    r = Rank(0, 1, clock=5_102_900_000_470.899)
    r.call("allreduce")
    row = calls(read(r.trace())).row(0, named=True)
    assert row["t_created"] == BASE + 5_102_900_000_521_899
    # epoch times of 16 digits before the point do not fit a float
    text = json.dumps(r.trace()).replace("5102900000521.899", "1712195495505630.123")
    text = text.replace(f'"baseTimeNanoseconds": {BASE}', '"baseTimeNanoseconds": 0')
    assert calls(read(text.encode()))["t_created"][0] == 1_712_195_495_505_630_123


def test_times_before_the_base_are_clamped() -> None:
    r = Rank(0, 1)
    r.call("allreduce")
    r.events[1]["ts"] = -2 * 10**15
    assert calls(read(r.trace()))["t_created"][0] == 0


def test_kernels_give_start_and_end() -> None:
    r = Rank(0, 2)
    r.call("allreduce", took=77.5)
    kernel = next(e for e in r.events if e["cat"] == "kernel")
    row = calls(read(r.trace())).row(0, named=True)
    assert row["t_started"] == BASE + round(kernel["ts"] * 1000)
    assert row["t_completed"] - row["t_started"] == 77_500


def test_waits_name_what_they_wait_for_and_take_no_number() -> None:
    trace = read(small().trace())
    rows = calls(trace)
    waits = trace.events.filter(pl.col("op") == OP["wait"]).sort("seq")
    assert waits["seq"].to_list() == [1, 5]
    assert waits["requests"].to_list() == [[rows["request"][1]], [rows["request"][5]]]
    assert not waits["blocking"].any()
    assert set(waits["lane"]) & set(rows["lane"]) == set()


def test_what_pends_at_the_end_is_scheduled() -> None:
    r = small()
    r.call("allreduce", kernel=False)
    rows = calls(read(r.trace()))
    assert rows["state"].to_list() == [STATE["completed"]] * 6 + [STATE["scheduled"]]
    assert rows["flags"][6] & FLAG["stream_inferred"]
    assert rows["stream"][6] == rows["stream"][0]


def test_an_operation_that_later_ones_have_passed_is_complete() -> None:
    r = Rank(0, 2)
    r.call("allreduce", kernel=False)
    r.call("allreduce")
    rows = calls(read(r.trace()))
    assert set(rows["state"]) == {STATE["completed"]}
    assert [bool(f & FLAG["state_unreliable"]) for f in rows["flags"]] == [True, False]


def test_a_profile_of_the_host_alone_says_so() -> None:
    trace = read(small(device=False).trace())
    assert set(calls(trace)["state"]) == {STATE["completed"]}
    assert all(f & FLAG["state_unreliable"] for f in calls(trace)["flags"])
    assert trace.ranks["timed"].to_list() == [False]


def test_uneven_all_to_all_keeps_its_splits() -> None:
    r = Rank(0, 2)
    r.call("all_to_allv", count=30, out=50, args={"In split size": "[10, 20]"})
    r.call("all_to_allv", count=30, out=50, args={"In split size": "[1, 2, ...]"})
    rows = calls(read(r.trace()))
    assert ops(read(r.trace())) == ["all_to_all"] * 2
    assert rows["splits"].to_list() == [[10, 20], None]
    assert all(f & FLAG["sizes_incomparable"] for f in rows["flags"])


def test_collectives_of_a_later_window_keep_their_numbers() -> None:
    r = Rank(0, 2)
    r._counts["0", False] = 500
    r.call("allreduce")
    r.call("allreduce")
    trace = read(r.trace())
    assert calls(trace)["ordinal"].to_list() == [501, 502]
    assert trace.ranks["lost_before"].to_list() == [500]


def test_an_operation_made_of_others_is_one() -> None:
    """A barrier that is an all_reduce inside: the kernel is the inner one's."""
    r = Rank(0, 2)
    r.call("barrier", count=0, kernel=False)
    outer = r.events[1]
    r.call("allreduce", count=1)
    inner = r.events[4]
    assert (outer["name"], inner["name"]) == ("record_param_comms",) * 2
    outer["dur"] = 200.0
    r.events[0]["dur"] = 210.0
    r.clock += 200
    r.call("broadcast")
    trace = read(r.trace())
    assert ops(trace) == ["barrier", "broadcast"]
    assert calls(trace)["t_started"].null_count() == 0


def test_members_of_a_coalesced_group_share_a_number() -> None:
    r = Rank(0, 2)
    for _ in range(2):
        r.call("allreduce")
        r._counts["0", False] -= 1
        r.call("allreduce")
    assert calls(read(r.trace()))["ordinal"].to_list() == [1, 1, 2, 2]


def test_messages_of_a_later_window_have_lost_their_start() -> None:
    r = Rank(0, 2)
    r._counts["0", True] = 7
    r.call("allreduce")
    r.call("send", args={"Dst Rank": 1})
    assert read(r.trace()).ranks["lost_before"].to_list() == [7]


def test_store_traffic_and_unknown_operations() -> None:
    r = Rank(0, 2)
    r.call("broadcastUniqueNCCLID", kernel=False)
    r.call("init", kernel=False)
    r.call("sparse_something", kernel=False)
    trace = read(r.trace())
    assert ops(trace) == ["sparse_something"]
    assert calls(trace)["flags"][0] & FLAG["unknown_op"]


def test_a_peer_outside_the_group_is_unknown() -> None:
    r = Rank(0, 2)
    r.call("send", args={"Dst Rank": 9})
    r.call("send", args={"Dst Rank": 0})
    r.call("send", args={"Dst Rank": 1})
    assert calls(read(r.trace()))["peer"].to_list() == [1, None, 1] or calls(read(r.trace()))[
        "peer"
    ].to_list() == [None, None, 1]


def test_roots_that_are_each_ranks_own_are_none() -> None:
    ranks = [Rank(r, 2) for r in range(2)]
    for r in ranks:
        r.call("broadcast", args={"Rank": r.rank})
    trace = read(*(r.trace() for r in ranks))
    assert trace.events["root"].null_count() == trace.events.height


# --------------------------------------------------------------------------------------------------
# Versions


def test_old_traces_tell_operations_by_their_spans() -> None:
    old = small(metadata=False, seq=False, numbered=False)
    trace = read(old.trace())
    assert ops(trace) == ["all_reduce", "all_gather", "broadcast", "send", "recv", "barrier"]
    rows = calls(trace)
    assert rows["count"].to_list()[:3] == [4096, 512, 10]
    assert rows["t_started"].null_count() == 0
    assert trace.events.filter(pl.col("op") == OP["wait"]).height == 2


def test_group_numbers_of_spring_2024() -> None:
    r = Rank(0, 2, seq=False)
    r.call("allreduce")
    whole = r.trace()
    args = whole["traceEvents"][3]["args"]
    for key in ("Process Group Name", "Process Group Description", "Process Group Ranks"):
        del args[key]
    args["Process Group ID"] = 17
    group = whole["distributedInfo"]["pg_config"][0]
    del group["pg_desc"]
    group |= {"uid": 17, "pg_name": "0"}
    comms = read(whole).comms
    assert comms.filter(pl.col("name") == "0")["ranks"].to_list() == [[0, 1]]


def test_members_from_start_and_stride() -> None:
    r = Rank(2, 8, {"0": list(range(8)), "4": [0, 2, 4, 6]})
    r.call("allreduce", "4")
    whole = r.trace(info=False)
    for e in whole["traceEvents"]:
        e.get("args", {}).pop("Process Group Ranks", None)
    whole["traceEvents"][3]["args"] |= {"Global rank start": 0, "Global rank stride": 2}
    trace, inputs = read_all(whole, names=["rank2.json"])
    assert inputs[0].rank == 2
    assert trace.comms["ranks"].to_list() == [[0, 2, 4, 6]]


def test_lists_that_were_cut_are_unknown() -> None:
    ranks = list(range(64))
    r = Rank(0, 64, {"9": ranks})
    r.call("allreduce", "9", args={"Process Group Ranks": json.dumps(ranks[:30])[:-1] + ", ...]"})
    assert read(r.trace()).comms["ranks"].to_list() == [ranks]
    whole = r.trace()
    whole["distributedInfo"]["pg_config"][0]["ranks"] = "[0, 1, ...]"
    del whole["distributedInfo"]["world_size"]
    assert read(whole).comms["ranks"].to_list() == [[]]


def test_gloo_operations_come_from_calls_and_spans() -> None:
    r = Rank(0, 2, backend="gloo", device=False)
    r.gloo("allreduce", 100)
    r.gloo("broadcast", 7, args={"Concrete Inputs": ["", "", "1", "", "False"]})
    r.gloo("send", 5, args={"Concrete Inputs": ["", "", "1", "42"]})
    trace = read(r.trace())
    assert ops(trace) == ["all_reduce", "broadcast", "send"]
    rows = calls(trace)
    assert rows["count"].to_list() == [100, 7, 5]
    assert rows["root"].to_list() == [None, 1, None]
    assert rows["peer"].to_list() == [None, None, 1]
    assert rows["tag"].to_list() == [None, None, 42]
    assert rows["stream"].null_count() == 3
    assert trace.jobs["backend"].to_list() == ["gloo"]
    assert trace.comms["name"].to_list() == ["0"]


def test_the_group_of_a_host_operation_is_not_guessed() -> None:
    r = Rank(0, 4, {"0": [0, 1, 2, 3], "1": [0, 1]}, backend="gloo", device=False)
    r.gloo("allreduce")
    trace, inputs = read_all(r.trace())
    assert inputs[0].status == "partial"
    assert "process groups" in str(inputs[0].reason)
    comm = trace.comms.row(calls(trace)["comm"][0], named=True)
    assert comm["ranks"] == []


def test_ranks_from_names_where_the_trace_has_none() -> None:
    traces = []
    for rank in range(2):
        r = Rank(rank, 2)
        r.call("allreduce")
        traces.append(r.trace(info=False))
    _, inputs = read_all(*traces, names=["worker0.1.pt.trace.json", "worker1.1.pt.trace.json"])
    assert [i.rank for i in inputs] == [0, 1]
    _, inputs = read_all(traces[0], names=["trace.json"])
    assert inputs[0].status == "quarantined"
    assert "--job-pattern" in str(inputs[0].reason)


def test_of_two_windows_of_a_rank_the_later_is_read() -> None:
    early, late = Rank(0, 2), Rank(0, 2, clock=5_200_000_000_000.0)
    early.call("allreduce")
    late.call("broadcast")
    trace, inputs = read_all(early.trace(), late.trace())
    assert [i.status for i in inputs] == ["ignored", "read"]
    assert ops(trace) == ["broadcast"]


def test_a_bare_list_of_events() -> None:
    r = small()
    assert ops(read(dumped(r.trace()["traceEvents"]), names=["rank_0.json"])) == ops(
        read(r.trace())
    )


# --------------------------------------------------------------------------------------------------
# Order of events, size of blocks


def same(a: Trace, b: Trace) -> None:
    assert a.events.sort("rank", "seq", "lane").equals(b.events.sort("rank", "seq", "lane"))
    assert a.comms.equals(b.comms)
    assert a.ranks.equals(b.ranks)


WHOLE = small().trace()


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("block", [64, 100, 333, 4096])
def test_blocks_of_any_size_give_the_same(block: int, indent: int | None) -> None:
    same(read(dumped(WHOLE, indent), block=block), read(WHOLE))


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(48, 3000), st.booleans(), st.booleans())
def test_any_order_of_events_and_keys(
    chance: random.Random, block: int, numbered: bool, pretty: bool
) -> None:
    whole = small(numbered=numbered).trace()
    expected = read(whole)

    def shuffled(value: dict[str, Any]) -> dict[str, Any]:
        keys = list(value)
        chance.shuffle(keys)
        return {k: shuffled(value[k]) if isinstance(value[k], dict) else value[k] for k in keys}

    chance.shuffle(whole["traceEvents"])
    whole["traceEvents"] = [shuffled(e) for e in whole["traceEvents"]]
    found = read(dumped(shuffled(whole), 1 if pretty else None), block=block)
    same(found, expected)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.integers(48, 400), st.integers(0, 5))
def test_names_of_other_events_do_not_matter(name: str, block: int, at: int) -> None:
    whole = json.loads(json.dumps(WHOLE))
    extra = {
        "ph": "X",
        "cat": "python_function",
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": 1,
        "dur": 1,
        "args": {name: [{"name": "record_param_comms"}], "nested": {"args": {"Seq": 3}}},
    }
    whole["traceEvents"].insert(at, extra)
    ascii_ = json.dumps(whole).encode()
    same(read(ascii_, block=block), read(WHOLE))
    same(
        read(json.dumps(whole, ensure_ascii=False).encode("utf-8", "replace"), block=block),
        read(WHOLE),
    )


def test_pieces_of_any_size_give_the_same() -> None:
    data = dumped(WHOLE)

    def cut(size: int) -> Iterator[bytes]:
        for at in range(0, len(data), size):
            yield data[at : at + size]

    first = scan([data])
    assert isinstance(first, Columns)
    for size in (1, 7, 64, 1000):
        other = scan(cut(size), 64)
        assert isinstance(other, Columns)
        assert other.header == first.header
        for name, values in first.numbers.items():
            assert np.array_equal(values, other.numbers[name]), name
        for name, ids in first.texts.items():
            mine = [first.strings[i] if i >= 0 else None for i in ids]
            assert [other.strings[i] if i >= 0 else None for i in other.texts[name]] == mine


@pytest.mark.parametrize("packed", ["plain", "gz", "zst", "cut gz", "two gz"])
def test_files_are_streamed(tmp_path: Path, packed: str) -> None:
    import zstandard

    data = dumped(WHOLE)
    half = len(data) // 2
    content = {
        "plain": data,
        "gz": gzip.compress(data),
        "zst": zstandard.ZstdCompressor().compress(data),
        "cut gz": gzip.compress(data)[:-20],
        "two gz": gzip.compress(data[:half]) + gzip.compress(data[half:]),
    }[packed]
    path = tmp_path / "rank0.json"
    path.write_bytes(content)
    file = TraceFile(path="job/trace_0.json", url=str(path), format="kineto", folder="job")
    trace, inputs = kineto.read([file])
    if packed == "cut gz":
        assert inputs[0].status == "partial"
        assert "gzip" in str(inputs[0].reason)
    else:
        assert inputs[0].status == "read"
        same(trace, read(WHOLE))


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_files_of_a_store_are_streamed(pack: Callable[[bytes], bytes]) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe_file("/kineto/rank0.json", pack(dumped(WHOLE)))
    url = "memory://kineto/rank0.json"
    file = TraceFile(path="job/trace_0.json", url=url, format="kineto", folder="job")
    same(kineto.read([file])[0], read(WHOLE))
    gone = TraceFile(path="x", url="memory://kineto/none.json", format="kineto", folder="job")
    _, inputs = kineto.read([gone])
    assert inputs[0].status == "quarantined"


def test_utf_16() -> None:
    same(read(json.dumps(WHOLE).encode("utf-16")), read(WHOLE))


def test_a_file_above_the_limit_is_refused(tmp_path: Path) -> None:
    from dl2gpu.trace.files import Limits
    from dl2gpu.trace.stream import pieces

    path = tmp_path / "rank0.json"
    path.write_bytes(dumped(WHOLE))
    file = TraceFile(path="rank0.json", url=str(path), format="kineto", folder="job")
    with pytest.raises(InputError, match="DL2GPU_MAX_FILE_BYTES"):
        list(pieces(file, Limits(max_file_bytes=100)))


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (100 << 20)))
    file = TraceFile(path="rank0.json.gz", url=str(path), format="kineto", folder="job")
    _, inputs = kineto.read([file])
    assert inputs[0].status == "quarantined"
    assert "DL2GPU_MAX_RATIO" in str(inputs[0].reason)


# --------------------------------------------------------------------------------------------------
# Damage


def events_text(whole: dict[str, Any]) -> list[str]:
    return [json.dumps(e) for e in whole["traceEvents"]]


def spoiled(change: Callable[[list[str]], list[str]], head: str = "", tail: str = "]}") -> bytes:
    whole = json.loads(json.dumps(WHOLE))
    rest = {k: v for k, v in whole.items() if k not in {"traceEvents", "traceName"}}
    start = head or json.dumps(rest)[:-1] + ', "traceEvents": ['
    return (start + ",".join(change(events_text(whole))) + tail).encode()


NAME = '"name": "aten::mm"'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (NAME, '"name": "say "hi""'),
        (NAME, '"name": "C:\\path\\"'),
        (NAME, '"name": "a"'),
        (NAME, '"name": "odd " quote"'),
        (NAME, '"name": "control \x01\t character"'),
        (NAME, '"name": "line\nbreak"'),
        ('"dur": 2.25', '"dur": NaN'),
        ('"dur": 2.25', '"dur": inf, "x": -Infinity, "y": nan'),
        ('"dur": 2.25', '"dur": 0.-05'),
        (NAME + ",", '"name": "no comma"'),
        ('"ph": "X", "cat": "cpu_op", ' + NAME, '"ph": "X", "cat": "cpu_op", "name": aten::mm'),
    ],
    ids=range(11),
)
def test_damage_in_one_event_costs_no_other(old: str, new: str) -> None:
    def change(texts: list[str]) -> list[str]:
        assert any(old in t for t in texts)
        return [t.replace(old, new) for t in texts]

    for block in (1 << 20, 128):
        trace, inputs = read_all(spoiled(change), block=block)
        assert inputs[0].status in {"read", "partial"}
        same(trace, read(WHOLE))


@pytest.mark.parametrize("block", [128, 1 << 20])
def test_a_lost_brace(block: int) -> None:
    def change(texts: list[str]) -> list[str]:
        at = next(i for i, t in enumerate(texts) if NAME in t)
        return [*texts[:at], texts[at][:-1], *texts[at + 1 :]]

    trace, inputs = read_all(spoiled(change), block=block)
    same(trace, read(WHOLE))
    assert inputs[0].status == "partial"
    assert "1 events are no JSON" in str(inputs[0].reason)


def test_a_damaged_operation_is_put_together_again() -> None:
    def change(texts: list[str]) -> list[str]:
        at = next(i for i, t in enumerate(texts) if '"allreduce"' in t and "record_param" in t)
        broken = texts[at].replace('"dtype": "BFloat16"', '"note": "a "b" c", "dtype": "BFloat16"')
        return [*texts[:at], broken, *texts[at + 1 :]]

    trace, inputs = read_all(spoiled(change))
    same(trace, read(WHOLE))
    assert "could be read all the same" in str(inputs[0].reason)


@pytest.mark.parametrize("tail", ["", "]", ",", ",]}", "\n"])
def test_a_file_without_its_end(tail: str) -> None:
    trace, inputs = read_all(spoiled(lambda t: t, tail=tail))
    same_events = trace.events.equals(read(WHOLE).events)
    assert same_events
    assert inputs[0].status == ("read" if "]" in tail else "partial")
    assert trace.ranks["truncated"].to_list() == ["]" not in tail]


def test_a_file_cut_anywhere_keeps_what_was_whole() -> None:
    data = dumped(WHOLE)
    total = calls(read(WHOLE)).height
    last = 0
    for at in range(len(data) // 3, len(data), 331):
        trace, inputs = read_all(data[:at])
        assert inputs[0].status == "partial"
        assert last - 1 <= calls(trace).height <= total
        last = calls(trace).height


def test_missing_brackets_and_stray_commas() -> None:
    expected = ops(read(WHOLE))
    for head, tail in ((",", "]"), ("[,", ",]"), ("", ""), ("[", ""), ("\ufeff[", "]")):
        content = spoiled(lambda t: t, head=head or " ", tail=tail)
        trace, _ = read_all(content, names=["rank_0.json"])
        assert ops(trace) == expected, head


def test_the_header_may_stand_behind_the_events_or_be_damaged() -> None:
    whole = dict(WHOLE)
    events = whole.pop("traceEvents")
    moved = {"traceEvents": events} | whole
    same(read(moved), read(WHOLE))
    text = json.dumps(WHOLE).replace('"deviceProperties": [', '"deviceProperties": [,')
    same(read(text.encode()), read(WHOLE))


def test_a_second_list_of_events_is_read_as_well() -> None:
    whole = json.loads(json.dumps(WHOLE))
    half = len(whole["traceEvents"]) // 2
    more = whole["traceEvents"][half:]
    whole["traceEvents"] = whole["traceEvents"][:half]
    whole["nested"] = {"traceEvents": more}
    same(read(whole), read(WHOLE))


def test_duplicate_keys_and_other_cases() -> None:
    text = json.dumps(WHOLE).replace('"Seq": ', '"seq": 77, "SEQ": ')
    same(read(text.encode()), read(WHOLE))


def test_numbers_as_text() -> None:
    whole = json.loads(json.dumps(WHOLE))
    for e in whole["traceEvents"]:
        e["ts"] = str(e["ts"])
    same(read(whole), read(WHOLE))


@pytest.mark.parametrize(
    "value",
    [
        "1e400",
        "9" * 400,
        "-9e99",
        "1e-400",
        "18446744073709551616",
        "[]",
        '""',
        "null",
        "{}",
        "true",
    ],
)
def test_numbers_out_of_range(value: str) -> None:
    for key in (
        "Seq",
        "In msg nelems",
        "Dst Rank",
        "Rank",
        "Group size",
        "External id",
        "Process Group ID",
    ):
        text = json.dumps(WHOLE)
        import re

        text = re.sub(rf'"{key}": \d+', f'"{key}": {value}', text)
        read_all(text.encode())
    for key in ("ts", "dur", "tid", "pid"):
        text = re.sub(rf'"{key}": [\d.]+', f'"{key}": {value}', json.dumps(WHOLE))
        read_all(text.encode())


def test_deep_nesting_and_huge_strings() -> None:
    deep = "[" * 5000 + "]" * 5000
    bad = [
        '{"ph": "X", "name": "x", "args": {"a": ' + deep + "}}",
        '{"ph": "X", "name": "' + "x" * 300_000 + '"}',
        '{"ph": "X", "name": "record_param_comms", "args": {"Process Group Name": "'
        + "n" * 2_000_000
        + '"}}',
        '{"ph": "X", "name": "x", "args": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}",
    ]
    for block in (1 << 20, 1024):
        trace, _ = read_all(
            spoiled(lambda t: [bad[0], *t[:3], bad[1], *t[3:9], bad[2], *t[9:], bad[3]]),
            block=block,
        )
        same(trace, read(WHOLE))


def test_an_event_without_end_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from dl2gpu.trace import kineto_scan

    monkeypatch.setattr(kineto_scan, "LARGEST_EVENT", 1 << 16)
    data = spoiled(lambda t: [*t[:4], '{"ph": "X", "name": "' + "y" * 200_000, *t[4:]])
    found = scan([data], 1 << 12)
    assert isinstance(found, Columns)
    assert found.damaged
    assert found.n >= 20


def test_so_many_events_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from dl2gpu.trace import kineto_scan

    monkeypatch.setattr(kineto_scan, "MOST_EVENTS", 10)
    trace, inputs = read_all(WHOLE)
    assert inputs[0].status == "partial"
    assert "beyond the first 10" in str(inputs[0].reason)
    assert 0 < calls(trace).height < 6


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_damage_makes_it_raise(data: st.DataObject) -> None:
    content = bytearray(dumped(WHOLE))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(content) - 1))
        what = data.draw(
            st.sampled_from(
                [b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\x00", b"\xff", b"9", b""]
            )
        )
        content[at : at + data.draw(st.integers(0, 3))] = what
    first = read_all(bytes(content))
    again = read_all(bytes(content), block=200)
    assert first[1] == again[1]


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_make_it_raise(content: bytes) -> None:
    _, inputs = read_all(b'{"traceEvents": [' + content)
    assert inputs[0].status in {"read", "partial", "quarantined"}
    read_all(content)


def test_what_is_no_trace_is_refused() -> None:
    for content in (b"", b"hello", b"{}", b'{"a": 1}', b"\x80\x02}q."):
        _, inputs = read_all(content)
        assert inputs[0].status == "quarantined", content


def test_sniffing() -> None:
    assert classify(dumped(WHOLE)[:4096], "x.json").format == "kineto"
    assert classify(dumped(WHOLE["traceEvents"])[:4096], "x").format == "kineto"
    assert classify(events_text(WHOLE)[0].encode() + b",", "x").format == "kineto"


# --------------------------------------------------------------------------------------------------
# Names


def test_kinds_of_events() -> None:
    assert kind_of("record_param_comms", "cpu_op") == Kind.RECORD
    assert kind_of("record_param_comms", "python_function") == Kind.NOTHING
    assert kind_of("c10d::recv_any_source_", "cpu_op") == Kind.CALL
    assert kind_of("c10d::_free_everything", "cpu_op") == Kind.NOTHING
    assert kind_of("nccl:coalesced", "user_annotation") == Kind.BATCH
    assert kind_of("nccl:all_reduce", "gpu_user_annotation") == Kind.NOTHING
    assert kind_of("nccl.py(3): all_reduce", "python_function") == Kind.NOTHING
    assert kind_of("ncclDevKernel_Generic_4(...)", "kernel") == Kind.KERNEL
    assert kind_of("ncclDevKernel_Generic_4(...)", "user_annotation") == Kind.NOTHING


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", ""),
        ("ncclSymDevKernel_AllGather_LLMC(x)", "all_gather"),
        ("void gemm<nccl>(x)", None),
    ],
)
def test_names_of_kernels(name: str, op: str | None) -> None:
    assert kernel_operation(name) == op


def test_shapes_and_splits() -> None:
    assert sizes_of("[[2, 3], [4]]", '["float", "float"]').count == 10
    assert sizes_of("[[[64]], [], []]", '["TensorList", "", "Scalar"]').count == 64
    assert sizes_of("[[-1]]", "x").count is None
    assert sizes_of("[[4611686018427387904, 4]]", '["float"]').count is None
    assert splits_of("[1, 2]") == [1, 2]
    assert splits_of("[]") is None
    assert splits_of("[1, 2, ...]") is None


# --------------------------------------------------------------------------------------------------
# Windows without numbers


def sequence(ops_: list[int], start: int, step: int = 1_000_000) -> Sequence:
    op = np.array(ops_, np.int64)
    created = start + step * np.arange(len(op), dtype=np.int64)
    return Sequence(op, op * 7, np.ones(len(op), np.bool_), created, created + step // 2)


PATTERN = [10, 11, 11, 12, 10, 14]


def test_equal_windows_lie_over_each_other() -> None:
    assert align(sequence(PATTERN * 5, 0), sequence(PATTERN * 5, 2_000_000)) == 0


def test_a_window_that_began_later_is_shifted() -> None:
    whole = PATTERN * 5
    assert align(sequence(whole, 0), sequence(whole[4:], 4_000_000)) == 4
    assert align(sequence(whole[4:], 4_000_000), sequence(whole, 0)) == -4


def test_of_equal_shifts_the_clocks_decide() -> None:
    a = sequence([10] * 30, 0)
    assert align(a, sequence([10] * 20, 5_000_000)) == 5


def test_windows_of_other_times_are_not_aligned() -> None:
    assert align(sequence(PATTERN * 5, 0), sequence(PATTERN * 5, 10**12)) is None


def test_sequences_that_do_not_agree_are_not_aligned() -> None:
    assert align(sequence([10] * 20, 0), sequence([11] * 20, 0)) is None


# --------------------------------------------------------------------------------------------------
# Verdicts


def verdict(folder: Path) -> tuple[str, bool | None, list[dict[str, Any]]]:
    """Verdict, deadlocked, findings; the native forms of the same profiles must say the same."""
    report = dl2gpu.scan([str(folder)])
    (job,) = report.jobs.to_dicts()
    with tempfile.TemporaryDirectory() as out:
        for form in ("lines", "x.parquet"):
            convert(str(folder), f"{out}/{form}/{form}")
            again = dl2gpu.scan([f"{out}/{form}"])
            assert again.jobs["verdict", "deadlocked"].rows() == [
                (job["verdict"], job["deadlocked"])
            ]
            said = ["kind", "evidence", "reason", "culprits", "victims", "condition"]
            assert again.findings.select(said).equals(report.findings.select(said))
    return job["verdict"], job["deadlocked"], report.findings.to_dicts()


def steps(rank: int, n: int = 6, **how: Any) -> Rank:
    r = Rank(rank, 4, {"0": [0, 1, 2, 3], "1": [0, 1], "2": [2, 3]}, **how)
    for _ in range(n):
        r.noise()
        r.call("allreduce", "1" if rank < 2 else "2", 256, stream=28)
        r.call("_allgather_base", "0", 512, out=2048)
        r.call("allreduce", "0", 1024, thread=3)
        r.wait()
    return r


@pytest.mark.parametrize("seq", [True, False])
def test_a_healthy_job(tmp_path: Path, seq: bool) -> None:
    write_job(tmp_path, [steps(r, seq=seq) for r in range(4)])
    assert verdict(tmp_path) == ("healthy", False, [])


@pytest.mark.parametrize("seq", [True, False])
def test_different_operations_at_one_position(tmp_path: Path, seq: bool) -> None:
    ranks = [steps(r, seq=seq) for r in range(4)]
    for r in ranks:
        r.call("broadcast" if r.rank == 2 else "allreduce", "0", 99, kernel=False)
    write_job(tmp_path, ranks)
    kind, dead, (finding,) = verdict(tmp_path)
    assert (kind, dead, finding["culprits"]) == ("mismatch", True, [2])


@pytest.mark.parametrize("seq", [True, False])
def test_sizes_that_differ_and_went_through(tmp_path: Path, seq: bool) -> None:
    ranks = [steps(r, seq=seq) for r in range(4)]
    for r in ranks:
        r.call("allreduce", "0", 99 + (r.rank == 1))
        r.call("allreduce", "0", 1)
    write_job(tmp_path, ranks)
    kind, dead, _ = verdict(tmp_path)
    assert (kind, dead) == ("mismatch", False)


@pytest.mark.parametrize("seq", [True, False])
@pytest.mark.parametrize("skip", [1, 2, 3])
def test_another_window_is_no_accusation(tmp_path: Path, seq: bool, skip: int) -> None:
    """One rank was profiled a few calls later, and for a shorter time."""
    ranks = [steps(r, seq=seq) for r in range(4)]
    r = ranks[3]
    cut = [e for e in r.events if e["ts"] > r.start + 100 * skip * 2]
    end = r.clock - 500
    r.events = [e for e in cut if e["ts"] < end]
    write_job(tmp_path, ranks)
    kind, dead, findings = verdict(tmp_path)
    assert dead is not True
    assert kind in {"healthy", "insufficient_evidence"}
    assert all(not f["culprits"] for f in findings)


@pytest.mark.parametrize("seq", [True, False])
def test_a_window_that_ends_before_the_work_is_no_hang(tmp_path: Path, seq: bool) -> None:
    ranks = [steps(r, seq=seq) for r in range(4)]
    for r in ranks:
        r.call("allreduce", "0", 5, kernel=False)
        if r.rank < 2:
            r.call("allreduce", "1", 5, kernel=False)
    write_job(tmp_path, ranks)
    kind, dead, (finding,) = verdict(tmp_path)
    assert (kind, dead, finding["culprits"]) == ("insufficient_evidence", None, [])
    assert "profile ends" in finding["summary"]


def test_a_rank_that_others_wait_for_through_everybodys_window(tmp_path: Path) -> None:
    ranks = [steps(r) for r in range(4)]
    for r in ranks:
        if r.rank != 1:
            r.call("allreduce", "0", 5, kernel=False)
    write_job(tmp_path, ranks, end=ranks[0].clock + 60_000_000)
    kind, dead, (finding,) = verdict(tmp_path)
    assert (kind, dead, finding["culprits"]) == ("stalled_rank", False, [1])


def exchange(tmp_path: Path, *, batched: bool, end: float | None = None) -> Any:
    """Two ranks send before they receive; nothing of it has a kernel yet."""
    ranks = [Rank(r, 2) for r in range(2)]
    for r in ranks:
        r.call("allreduce")
        peer = 1 - r.rank
        r.call("send", kernel=False, args={"Dst Rank": peer})
        if batched:
            r.call("recv", kernel=False, args={"Src Rank": peer})
    return verdict(write_job(tmp_path, ranks, end=end))


@pytest.mark.parametrize("both", [True, False])
def test_sends_that_pend_at_the_end_of_a_window_are_no_deadlock(tmp_path: Path, both: bool) -> None:
    kind, dead, (finding,) = exchange(tmp_path, batched=both)
    assert (kind, dead, finding["culprits"]) == ("potential", None, [])
    assert "Ranks 0, 1 could stop" in finding["summary"]


def test_sends_that_pended_for_long_are(tmp_path: Path) -> None:
    kind, dead, _ = exchange(tmp_path, batched=True, end=5_100_100_000_000.0)
    assert (kind, dead) == ("cycle", True)


def test_two_orders_on_one_stream_are_a_deadlock(tmp_path: Path) -> None:
    ranks = [Rank(r, 2, {"0": [0, 1], "1": [0, 1], "2": [0, 1]}) for r in range(2)]
    for r in ranks:
        for group in ("1", "2"):
            r.call("allreduce", group)
        for group in ("1", "2") if r.rank else ("2", "1"):
            r.call("allreduce", group, kernel=False)
    kind, dead, _ = verdict(write_job(tmp_path, ranks))
    assert (kind, dead) == ("order_inversion", True)


def test_few_ranks_of_many(tmp_path: Path) -> None:
    write_job(tmp_path, [steps(0), steps(2)])
    kind, dead, (finding,) = verdict(tmp_path)
    assert (kind, dead) == ("insufficient_evidence", None)
    assert finding["culprits"] == []
    assert "2 of 4" in finding["summary"]


def test_gloo_ranks_in_different_operations(tmp_path: Path) -> None:
    """The span of an operation that failed at the timeout ends like any other."""
    ranks = [Rank(r, 3, backend="gloo", device=False) for r in range(3)]
    for r in ranks:
        for _ in range(4):
            r.gloo("allreduce", 8)
        r.gloo("allgather" if r.rank == 0 else "allreduce", 8, took=7_000_000.0)
    write_job(tmp_path, ranks)
    kind, dead, (finding,) = verdict(tmp_path)
    assert (kind, dead, finding["culprits"]) == ("mismatch", True, [0])


# --------------------------------------------------------------------------------------------------
# Other people's traces


SAMPLES = {
    "hta_df_index_resolver": (1, {"all_reduce": 2020}),
    "hta_nccl_data": (0, {"all_reduce": 15, "broadcast": 6}),
    "hta_ns_resolution_rank-0": (0, {"all_reduce": 25, "broadcast": 10}),
    "hta_rank_non_gpu": (0, {"all_to_all": 6}),
    "hta_trace_diff_control": (3, {"all_to_all": 42, "all_reduce": 18}),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples(shared: Path, tmp_path: Path, name: str) -> None:
    path = shared / "data" / "kineto" / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    (tmp_path / path.name).symlink_to(path)
    file = TraceFile(path=path.name, url=str(path), format="kineto", folder="job")
    trace, inputs = kineto.read([file])
    validate(trace, name)
    rank, expected = SAMPLES[name]
    assert inputs[0].rank == rank
    found: dict[str, int] = {}
    for op in ops(trace, rank):
        found[op] = found.get(op, 0) + 1
    assert found == expected
    analysis = dl2gpu.scan([str(tmp_path)])
    assert analysis.jobs["deadlocked"].to_list() != [True]
    assert set(analysis.jobs["verdict"]) <= {"healthy", "insufficient_evidence"}


def test_a_complete_job_of_eight_ranks(shared: Path, tmp_path: Path) -> None:
    import tarfile

    path = shared / "data" / "kineto" / "param_dlrm_8ranks.tar.gz"
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    report = dl2gpu.scan([str(tmp_path)])
    assert report.jobs["verdict"].to_list() == ["healthy"]
    assert report.jobs["ranks_present"].to_list() == [list(range(8))]
    assert report.jobs["events"][0] == 88


LIVE = {
    "12_rank_stalls": {"insufficient_evidence", "stalled_rank", "missing_participant"},
    "16_async_waits_in_other_order": {"healthy", "potential"},
    "18_gpt2_ddp_healthy": {"healthy"},
    "25_gpt2_tp_healthy": {"healthy"},
    "27_swin_ddp_healthy": {"healthy"},
    "29_checkpoint_gather_rank0_only": {"mismatch", "missing_participant"},
}


@pytest.mark.parametrize("name", LIVE)
def test_recorded_jobs(shared: Path, tmp_path: Path, name: str) -> None:
    folder = shared / "data" / "live" / "profiler" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    for path in folder.glob("kineto_*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    report = dl2gpu.scan([str(tmp_path)])
    assert report.jobs["verdict"].to_list()[0] in LIVE[name]
    if name.startswith("29"):
        assert report.findings["culprits"].to_list() == [[0]]
