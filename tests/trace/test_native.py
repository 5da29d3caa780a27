"""The JSON Lines reader: the format key by key, damaged and hostile files, and the fast way against
the slow one."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dl2gpu.trace import native
from dl2gpu.trace.convert import canonical
from dl2gpu.trace.discover import discover
from dl2gpu.trace.inputs import LONGEST_REASON, Input, InputError, TraceFile
from dl2gpu.trace.native_lines import clean, op_spelling
from dl2gpu.trace.schema import (
    ANY,
    DTYPE_BYTES,
    EVENTS,
    EXIT,
    FLAG,
    MODE,
    OP,
    SEND_MODE,
    STATE,
    StringTable,
    Trace,
    dtype_code,
    dtype_name,
    op_name,
    validate,
)

HEADER = {
    "kind": "header", "format": "dl2gpu.trace", "version": 1, "job": "j", "rank": 0,
    "world_size": 4, "backend": "nccl",
}  # fmt: skip
DP = {"kind": "comm", "id": "dp", "ranks": [0, 1]}


def header(rank: int = 0, **more: Any) -> dict[str, Any]:
    return {**HEADER, "rank": rank, **more}


def op(seq: int, name: str = "all_reduce", **more: Any) -> dict[str, Any]:
    return {"kind": "op", "seq": seq, "op": name, "comm": "dp", **more}


Content = bytes | str | Sequence[dict[str, Any] | str | bytes]


def encoded(content: Content) -> bytes:
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    lines = [
        x if isinstance(x, bytes) else x.encode() if isinstance(x, str) else json.dumps(x).encode()
        for x in content
    ]
    return b"".join(line + b"\n" for line in lines)


def read(files: dict[str, Content] | Content, **fields: Any) -> tuple[Trace, list[Input]]:
    """Reads files from memory; the trace keeps the contract, each file is accounted for."""
    if not isinstance(files, dict):
        files = {"j/r.jsonl": files}
    store = {path: encoded(content) for path, content in files.items()}
    listed = [
        TraceFile(path=p, url=p, format="native", folder=p.rpartition("/")[0], **fields)
        for p in store
    ]
    trace, inputs = native.read(listed, load=lambda f: store[f.url])
    assert [i.path for i in inputs] == list(store)
    assert sum(i.events for i in inputs) == trace.events.height
    return validate(trace), inputs


def row(*lines: dict[str, Any] | str, **head: Any) -> dict[str, Any]:
    """The only event of a file of one operation, names in place of codes."""
    trace, inputs = read([header(**head), DP, *lines])
    assert [i.reason for i in inputs] == [None]
    assert trace.events.height == 1
    found = trace.events.row(0, named=True)
    texts = trace.strings["text"].to_list()
    found["op"] = op_name(found["op"], texts)
    tables: dict[str, list[Any]] = {
        "stream": texts,
        "reduce_op": texts,
        "comm": trace.comms["id"].to_list(),
        "new_comm": trace.comms["id"].to_list(),
        "stack": trace.stacks["frames"].to_list(),
    }
    for key, values in tables.items():
        if found[key] is not None:
            found[key] = values[found[key]]
    if found["dtype"] is not None:
        found["dtype"] = dtype_name(found["dtype"], texts)
    return found


# --------------------------------------------------------------------------------------------------
# Key by key


def test_every_key_of_an_operation() -> None:
    full = op(
        3, "sendrecv", lane=2, stream=None, blocking=False, request=7, peer=1, tag=5,
        recv_peer="any", recv_tag="any", send_mode="synchronous", count=6, count_out=8,
        dtype="bf16", bytes=12, group=4, state="started", t_created=10, t_started=20,
        t_completed=30, matched_peer=3, matched_tag=9, returned=[4, -2],
        stack=["f a.py:1", "g b.py:2"],
    )  # fmt: skip
    assert row(full) == dict.fromkeys(EVENTS) | {
        "job": 0, "rank": 0, "lane": 2, "seq": 3, "op": "sendrecv", "blocking": False,
        "request": 7, "comm": "dp", "peer": 1, "tag": 5, "recv_peer": ANY, "recv_tag": ANY,
        "send_mode": SEND_MODE["synchronous"], "count": 6, "count_out": 8, "dtype": "bf16",
        "bytes": 12, "group": 4, "state": STATE["started"], "t_created": 10, "t_started": 20,
        "t_completed": 30, "matched_peer": 3, "matched_tag": 9, "returned": [4, -2],
        "stack": ["f a.py:1", "g b.py:2"],
        "flags": 0,
    }  # fmt: skip


def test_keys_of_collectives() -> None:
    got = row(op(0, "all_to_all_v", splits=[1, 0, 2], stream="s", ordinal=11, dtype="Float"))
    assert got["splits"] == [1, 0, 2]
    assert got["stream"] == "s"
    assert got["ordinal"] == 11
    assert got["dtype"] == "f32"
    got = row(op(0, "reduce", root=1, reduce_op="max"))
    assert (got["root"], got["reduce_op"]) == (1, "max")
    got = row(op(0, "comm_create", new_comm="sub", split=True))
    assert (got["new_comm"], got["split"]) == ("sub", True)


def test_defaults() -> None:
    got = row(op(0))
    assert got == dict.fromkeys(EVENTS) | {
        "job": 0, "rank": 0, "lane": 0, "seq": 0, "op": "all_reduce", "comm": "dp",
        "blocking": True, "state": 0, "flags": 0,
    }  # fmt: skip


def test_stream_null_and_absent_are_the_same() -> None:
    assert row(op(0, stream=None)) == row(op(0))


def test_an_operation_on_a_stream_does_not_hold_the_host() -> None:
    assert row(op(0, stream="s"))["blocking"] is False
    assert row(op(0, stream="s", blocking=True))["blocking"] is False


def test_wait() -> None:
    got = row({"kind": "op", "seq": 0, "op": "wait", "requests": "all"})
    assert (got["requests"], got["blocking"], got["mode"]) == ([], True, MODE["all"])
    got = row({"kind": "op", "seq": 0, "op": "wait", "requests": [3, -4, 5], "mode": "any"})
    assert (got["requests"], got["mode"]) == ([3, -4, 5], MODE["any"])
    assert row({"kind": "op", "seq": 0, "op": "wait"})["requests"] == []
    assert row({"kind": "op", "seq": 0, "op": "wait", "stream": "s"})["blocking"] is False


def test_wait_for_no_request_at_all_waits_for_nothing() -> None:
    got = row({"kind": "op", "seq": 0, "op": "wait", "requests": []})
    assert (got["requests"], got["blocking"]) == ([], False)


def test_sends_are_standard_unless_they_say_otherwise() -> None:
    assert row(op(0, "send", peer=1))["send_mode"] == SEND_MODE["standard"]
    assert row(op(0, "recv", peer=1))["send_mode"] is None
    assert row(op(0, "send", peer=1))["tag"] is None


def test_bytes_from_count() -> None:
    assert row(op(0, count=10, dtype="bf16"))["bytes"] == 20
    assert row(op(0, count=10, dtype="bf16", bytes=7))["bytes"] == 7
    assert row(op(0, count=10, dtype="mystery"))["bytes"] is None
    assert row(op(0, count=10))["bytes"] is None
    assert row(op(0, count=2**61, dtype="c128"))["bytes"] is None  # would not fit


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("AllReduce", "all_reduce"), ("allgather", "all_gather"), ("bcast", "broadcast"),
     ("alltoallv", "all_to_all_v"), ("reduce-scatter", "reduce_scatter"), ("SEND", "send")],
)  # fmt: skip
def test_spellings(spelling: str, name: str) -> None:
    assert row(op(0, spelling, peer=1)) == row(op(0, name, peer=1))


def test_unknown_collective_keeps_its_name() -> None:
    got = row(op(0, "my_collective"))
    assert got["op"] == "my_collective"
    assert got["flags"] == FLAG["unknown_op"]


def test_names_may_be_numbers() -> None:
    trace, _ = read([header(), {"kind": "comm", "id": 5, "ranks": [0]}, op(0, comm=5, stream=7)])
    assert trace.comms["id"].to_list() == ["5"]
    assert "7" in trace.strings["text"].to_list()


@pytest.mark.parametrize(
    "text",
    ["[0, 1]", '{"a": 1}', "true", "null", "a\"b", "back\\slash", "é😀", "new\nline", "\x01", " x",
     'a":5,"seq', "", "1.5", "any", "x" * 5000],
)  # fmt: skip
def test_names_with_odd_characters(text: str) -> None:
    lines = [header(), {"kind": "comm", "id": text, "ranks": [0]}]
    for ascii_only in (True, False):
        one = json.dumps(op(0, comm=text, stream=text, stack=[text, "g"]), ensure_ascii=ascii_only)
        trace, inputs = read([*lines, one])
        assert inputs[0].status == "read"
        assert trace.comms["id"].to_list() == [text]
        assert trace.strings["text"].to_list() == [text]
        assert trace.stacks["frames"].to_list() == [[text, "g"]]


def test_formatting_does_not_matter() -> None:
    plain = [header(), DP, op(0, count=1, stack=["f"]), op(1, "send", peer=1, tag="any")]
    want = canonical(read(plain)[0])
    texts = [
        encoded(plain).replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + encoded(plain),
        encoded(plain).decode().encode("utf-16"),
        encoded(plain).replace(b"\n", b"\n\n  \n"),
        encoded(plain)[:-1],
        encoded([json.dumps(x, separators=(",", ":")) for x in plain]),
        encoded([json.dumps(x, separators=(" , ", " : ")) for x in plain]),
        encoded([json.dumps(x, sort_keys=True) for x in plain]),
        encoded([json.dumps(dict(reversed(x.items()))) for x in plain]),
        encoded(plain).replace(b'"op": "send"', b'"op": "s\\u0065nd"'),
        encoded(plain).replace(b'"peer"', b'"p\\u0065er"'),
        encoded([{**x, "unknown": {"seq": 5, "deep": [[{}]]}, "other": None} for x in plain]),
    ]
    for text in texts:
        trace, inputs = read(text)
        assert inputs[0].status == "read"
        got = canonical(trace)
        for table, frame in want.items():
            assert got[table].equals(frame), (table, text)


def test_lines_may_come_in_any_order() -> None:
    a, _ = read([header(), DP, op(0), op(1, "barrier"), {"kind": "end", "exit": "finished"}])
    b, _ = read([header(), op(1, "barrier"), {"kind": "end", "exit": "finished"}, op(0), DP])
    assert canonical(a)["events"].equals(canonical(b)["events"])
    assert canonical(a)["ranks"].equals(canonical(b)["ranks"])


# --------------------------------------------------------------------------------------------------
# Side tables


def test_communicators() -> None:
    trace, _ = read(
        {
            "j/0": [header(0), {**DP, "name": "data"}, op(0), op(1, "comm_create", new_comm="n")],
            "j/1": [header(1), {**DP, "desc": "d"}, op(0), op(1, comm="late")],
            "k/0": [header(0, job="k"), {"kind": "comm", "id": "dp", "ranks": [3, 0]}, op(0)],
        }
    )
    rows = trace.comms.sort("comm").select("job", "id", "name", "desc", "ranks").rows()
    assert rows == [
        (0, "dp", "data", "d", [0, 1]),
        (1, "dp", None, None, [3, 0]),
        (0, "late", None, None, []),
        (0, "n", None, None, []),
    ]
    assert trace.events.filter(pl.col("job") == 1)["comm"].to_list() == [1]


def test_a_name_used_for_two_groups_is_two_communicators() -> None:
    files: dict[str, Content] = {
        f"j/{r}": [
            header(r),
            {"kind": "comm", "id": "tp", "ranks": [r // 2 * 2, r // 2 * 2 + 1]},
            op(0, comm="tp"),
        ]
        for r in range(4)
    }
    trace, inputs = read(files)
    assert sorted(trace.comms["ranks"].to_list()) == [[0, 1], [2, 3]]
    assert trace.comms["id"].n_unique() == 2
    members = dict(trace.comms.select("comm", "ranks").iter_rows())
    for comm, rank in trace.events.select("comm", "rank").iter_rows():
        assert rank in members[comm]
    assert any("other members" in str(i.reason) for i in inputs)


def test_ends() -> None:
    def exits(*ends: dict[str, Any] | None) -> list[int]:
        files: dict[str, Content] = {
            f"j/{r}": [header(r), DP, op(0), *([{"kind": "end", **e}] if e is not None else [])]
            for r, e in enumerate(ends)
        }
        return read(files)[0].ranks.sort("rank")["exit"].to_list()

    alive, unknown = EXIT["alive"], EXIT["unknown"]
    assert exits({"exit": "finished"}, {"exit": "crashed"}) == [1, 2]
    assert exits({"exit": "killed"}, None) == [3, unknown]
    assert exits({"exit": "alive"}, None) == [alive, alive]
    assert exits(None, None) == [unknown, unknown]
    trace, inputs = read([header(), {"kind": "end", "exit": "exploded", "code": -9, "t": 5}])
    assert trace.ranks.select("exit", "code", "t_last").row(0) == (unknown, -9, 5)
    assert "exploded" in str(inputs[0].reason)


def test_rank_facts() -> None:
    trace, _ = read([header(lost_before=9), DP, op(0, t_created=5), op(1, t_started=8)])
    facts = trace.ranks.row(0, named=True)
    assert facts == {
        "job": 0, "rank": 0, "exit": 0, "code": None, "t_last": 8, "truncated": False,
        "lost_before": 9, "only_active": False, "timed": True, "path": "j/r.jsonl",
    }  # fmt: skip
    trace, _ = read([header(), DP, op(0, t_created=5)])
    assert trace.ranks["timed"].to_list() == [None]


def test_jobs() -> None:
    trace, inputs = read(
        {
            "a/0": [header(0, job="x", attempt=1), DP, op(0)],
            "a/1": [header(1, job="x"), DP, op(0)],
            "a/2": [header(0, job="y"), DP, op(0)],
            "b/c/0": [{**header(0, backend="mpi"), "job": None}, DP, op(0)],
        }
    )
    assert trace.jobs.rows() == [
        (0, "x", "a", 0, 4, "nccl", "native", True, True),
        (1, "x", "a", 1, 4, "nccl", "native", True, True),
        (2, "y", "a", 0, 4, "nccl", "native", True, True),
        (3, "b/c", "b/c", 0, 4, "mpi", "native", True, True),
    ]
    assert [(i.job, i.rank) for i in inputs] == [("x", 0), ("x", 1), ("y", 0), ("b/c", 0)]


def test_what_the_pattern_says_counts() -> None:
    trace, inputs = read([header(3), DP, op(0)], job="named", attempt=2)
    assert trace.jobs.select("name", "attempt").row(0) == ("named", 2)
    assert inputs[0].job == "named"


def test_world_size_conflict_is_told() -> None:
    trace, inputs = read({"j/0": [header(0), DP, op(0)], "j/1": [header(1, world_size=8), DP]})
    assert trace.jobs["world_size"].to_list() == [8]
    assert [i.status for i in inputs] == ["partial", "read"]
    assert "world_size is 4 here and 8" in str(inputs[0].reason)


def test_unknown_kinds_are_counted() -> None:
    trace, inputs = read([header(), DP, {"kind": "note", "x": 1}, op(0), {"kind": "note"}])
    assert trace.events.height == 1
    assert inputs[0].status == "read"
    assert inputs[0].reason == "skipped 2 line(s) of unknown kind 'note'"


# --------------------------------------------------------------------------------------------------
# Damage


def test_last_line_cut_short_at_every_byte() -> None:
    whole = encoded([header(), DP, op(0), op(1, "barrier", stack=["f", "é"])])
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last + 1, len(whole) - 1):
        trace, inputs = read(whole[:cut])
        assert trace.events["seq"].to_list() == [0]
        assert trace.ranks["truncated"].to_list() == [True]
        assert inputs[0].status == "partial"
    trace, inputs = read(whole[:last])
    assert trace.ranks["truncated"].to_list() == [False]
    assert inputs[0].status == "read"
    trace, inputs = read(whole[:-1])  # only the newline is missing
    assert trace.events.height == 2
    assert inputs[0].status == "read"


@pytest.mark.parametrize(
    "tail", [b"\0" * 100, b"\0" * 100 + b"\n", b"\xff\xfe{{\n\n}}}\n\n", b'{"kind"']
)
def test_damaged_end(tail: bytes) -> None:
    trace, inputs = read(encoded([header(), DP, op(0)]) + tail)
    assert trace.events["seq"].to_list() == [0]
    assert trace.ranks["truncated"].to_list() == [True]
    assert inputs[0].status == "partial"
    assert inputs[0].reason


BARRIER = '{"kind":"op","seq":1,"op":"barrier","comm":"dp"'
SEND = '{"kind":"op","seq":1,"op":"send",'
WAIT = '{"kind":"op","seq":1,"op":"wait",'


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ('{"kind":"op","op":"barrier","comm":"dp"}', "line 4: .*seq"),
        ('{"kind":"op","seq":1,"comm":"dp"}', "line 4: .*op"),
        ('{"kind":"op","seq":1,"op":"","comm":"dp"}', "line 4: key op"),
        ('{"kind":"op","seq":1,"op":"barrier"}', "line 4: key comm"),
        ('{"kind":"op","seq":1,"op":"mystery"}', "line 4: key comm"),
        ('{"kind":"op","seq":0,"op":"barrier","comm":"dp"}', "line 4: key seq.*second time"),
        ('{"kind":"op","seq":"1","op":"barrier","comm":"dp"}', "line 4: key seq: .*found str"),
        ('{"kind":"op","seq":1.5,"op":"barrier","comm":"dp"}', "line 4: key seq: .*found float"),
        ('{"kind":"op","seq":null,"op":"barrier","comm":"dp"}', "line 4: key seq"),
        ('{"kind":"op","seq":9223372036854775808,"op":"barrier","comm":"dp"}', "line 4: key seq"),
        (SEND + '"peer":-1}', "line 4: key peer"),
        (SEND + '"peer":"all"}', "line 4: key peer"),
        (SEND + '"peer":2147483648}', "line 4: key peer"),
        (SEND + '"peer":true}', "line 4: key peer"),
        (SEND + '"peer":1,"tag":-5}', "line 4: key tag"),
        ('{"kind":"op","seq":1,"op":"reduce","comm":"dp","root":-1}', "line 4: key root"),
        (BARRIER + ',"count":-1}', "line 4: key count"),
        (BARRIER + ',"count":5e18}', "line 4: key count"),
        (BARRIER + ',"bytes":9000000000000000000}', "key bytes"),
        (BARRIER + ',"lane":-1}', "line 4: key lane"),
        (BARRIER + ',"state":"done"}', "line 4: key state"),
        (BARRIER + ',"blocking":1}', "line 4: key blocking"),
        ('{"kind":"op","seq":1,"op":"barrier","comm":["dp"]}', "line 4: key comm"),
        ('{"kind":"op","seq":1,"op":"barrier","comm":true}', "line 4: key comm"),
        ('{"kind":"op","seq":1,"op":["barrier"],"comm":"dp"}', "line 4: key op"),
        (WAIT + '"requests":5}', "line 4: key requests"),
        (WAIT + '"requests":"some"}', "line 4: key requests"),
        (WAIT + '"requests":[1,"2"]}', "line 4: key requests"),
        (WAIT + '"requests":[1.5]}', "line 4: key requests"),
        (WAIT + '"mode":"none"}', "line 4: key mode"),
        (BARRIER + ',"splits":[1,-2]}', "line 4: key splits"),
        (BARRIER + ',"splits":[1,null]}', "key splits"),
        (BARRIER + ',"returned":[1,null]}', "key returned"),
        (BARRIER + ',"returned":7}', "key returned"),
        (BARRIER + ',"stack":"f"}', "line 4: key stack"),
        (BARRIER + ',"stack":[1]}', "line 4: key stack"),
        ('{"kind":"op","seq":1,"seq":2,"op":"barrier","comm":"dp"}', "column 22: key 'seq'"),
        (BARRIER + ',"comm":"dp"}', "line 4, column 49: key 'comm'"),
        (BARRIER + ',"count":NaN}', "line 4, column 57: not JSON"),
        (BARRIER, "line 4, column 48: .*cut short"),
        (BARRIER + '}}', "line 4, column 49: not JSON"),
        (BARRIER + ',"x":' + "[" * 99999 + "]" * 99999 + "}", "line 4, column 1: nested too"),
        ('{"kind":"op","seq":1,"op":"barrier","comm":"\\ud800"}', "line 4"),
        ("[1, 2]", "line 4: expected object, found array"),
        ("7", "line 4: expected object, found int"),
        ("hello", "line 4, column 1: not JSON"),
        ('{"seq":1}', "line 4: .*kind"),
        ('{"kind":"comm","ranks":[0]}', "line 4: .*id"),
        ('{"kind":"comm","id":"x","ranks":[-1]}', "line 4: key ranks"),
        ('{"kind":"comm","id":"x","ranks":[0],"id":"y"}', "line 4, column 37: key 'id'"),
        ('{"kind":"end","exit":3}', "line 4: key exit"),
        ('{"kind":"header","rank":0}', "line 4: .*second header"),
    ],
)  # fmt: skip
def test_wrong_line_in_the_middle(line: str, place: str) -> None:
    """The file is quarantined with the place; the other rank of the job is read."""
    good = [header(1), DP, op(0), op(1)]
    trace, inputs = read(
        {"j/0": [header(0), DP, op(0), line, op(2, "broadcast", root=0)], "j/1": good}
    )
    assert [i.status for i in inputs] == ["quarantined", "read"]
    assert inputs[0].events == 0
    assert re.search(place, str(inputs[0].reason)), inputs[0].reason
    alone = read({"j/1": good})[0]
    assert canonical(trace)["events"].equals(canonical(alone)["events"])
    assert canonical(trace)["ranks"].equals(canonical(alone)["ranks"])


@pytest.mark.parametrize(
    ("head", "place"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"\0\0", "line 1: expected a header"),
        (b'{"kind":"op","seq":0,"op":"wait"}\n', "line 1: expected a header line.*'op'"),
        (b'{"kind":"header","rank":0', "line 1: expected a header"),
        (b'\n\n{"kind":"header","format":"x","rank":0}\n', "line 3: key format"),
        (b'{"kind":"header","version":2,"rank":0}\n', "line 1: key version.*another version"),
        (b'{"kind":"header","job":"j"}\n', "line 1: key rank"),
        (b'{"kind":"header","rank":-1}\n', "line 1: key rank"),
        (b'{"kind":"header","rank":4,"world_size":4}\n', "line 1: key rank: expected 0 to 3"),
        (b'{"kind":"header","rank":0,"world_size":0}\n', "line 1: key world_size"),
        (b'{"kind":"header","rank":0,"rank":1}\n', "line 1, column 27: key 'rank'"),
        (b'{"kind":"header","rank":99999999999999999999}\n', "line 1: key rank"),
    ],
)
def test_wrong_header(head: bytes, place: str) -> None:
    trace, inputs = read(head)
    assert trace.jobs.is_empty()
    assert inputs[0].status == "quarantined"
    assert re.search(place, str(inputs[0].reason)), inputs[0].reason


def test_status_of_a_communicator_that_nobody_declares() -> None:
    """It becomes one without members, which the table of communicators holds as well."""
    head = b'{"kind":"header","format":"dl2gpu.trace","version":1,"rank":0,"job":"j"}\n'
    trace, inputs = read(head + b'{"kind":"status","comm":"x","last_enqueued":3}\n')
    assert inputs[0].status == "read"
    assert trace.comms["id"].to_list() == ["x"]
    assert trace.status["comm"].to_list() == [0]
    assert validate(trace) is trace


def test_bytes_that_are_not_utf8() -> None:
    text = encoded([header(), DP, op(0, stream="caf\u00e9")]).replace(b"\\u00e9", b"\xe9")
    trace, inputs = read(text)
    assert trace.strings["text"].to_list() == ["caf\ufffd"]
    assert inputs[0].status == "partial"
    assert "line 3" in str(inputs[0].reason)


def test_one_bad_file_among_many() -> None:
    rng = random.Random(5)
    files: dict[str, Content] = {
        f"j{j}/{r}": [
            header(r, job=f"j{j}"),
            DP,
            *(op(i, count=rng.randrange(9)) for i in (0, 1, 2)),
        ]
        for j in range(10)
        for r in range(4)
    }
    bad = {"j3/2", "j7/0", "j7/3"}
    want = read({k: v for k, v in files.items() if k not in bad})[0]
    for key in bad:
        lines = files[key]
        assert isinstance(lines, list)
        files[key] = [*lines[:4], "{]", *lines[4:]]
    trace, inputs = read(files)
    assert {i.path for i in inputs if i.status == "quarantined"} == bad
    for table, frame in canonical(want).items():
        assert canonical(trace)[table].equals(frame), table


def test_no_memory_for_the_shortest_lines() -> None:
    """A megabyte of operations of 13 bytes is refused line by line, not by columns of nulls."""
    trace, inputs = read(encoded([header()]) + b'{"kind":"op"}\n' * 80_000)
    assert trace.events.is_empty()
    assert inputs[0].status == "quarantined"


# --------------------------------------------------------------------------------------------------
# Several files of one rank


def test_copies_are_ignored() -> None:
    lines = [header(), DP, op(0)]
    trace, inputs = read({"j/a": lines, "j/b": lines})
    assert trace.events.height == 1
    assert [i.status for i in inputs] == ["read", "ignored"]
    assert "j/a" in str(inputs[1].reason)


def test_newest_counts() -> None:
    old = [header(), DP, op(0, t_created=5), op(1, "barrier", t_created=6)]
    new = [header(), DP, op(0, t_created=50)]
    for names in (("j/a", "j/b"), ("j/b", "j/a")):
        trace, inputs = read({names[0]: old, names[1]: new})
        assert trace.events["t_created"].to_list() == [50]
        assert [i.status for i in inputs] == ["quarantined", "read"]
        assert f"older than {names[1]}" in str(inputs[0].reason)


def test_longer_state_of_one_record_counts() -> None:
    lines = [header(), DP, op(0), op(1)]
    trace, inputs = read({"j/a": lines[:3], "j/b": lines})
    assert trace.events.height == 2
    assert [i.status for i in inputs] == ["quarantined", "read"]


def test_no_guess_between_two_records() -> None:
    trace, inputs = read({"j/a": [header(), DP, op(0)], "j/b": [header(), DP, op(5)]})
    assert trace.jobs.is_empty()
    assert [i.status for i in inputs] == ["quarantined", "quarantined"]
    assert "j/a, j/b" in str(inputs[0].reason)


def test_attempts_are_not_copies() -> None:
    trace, _ = read({"j/a": [header(), DP, op(0)], "j/b": [header(attempt=1), DP, op(0)]})
    assert trace.jobs["attempt"].to_list() == [0, 1]


# --------------------------------------------------------------------------------------------------
# The fast way against the slow one

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.text(max_size=4)
    | st.sampled_from([0.5, -2.5]),  # Polars takes 2.0 for a rank, msgspec does not
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["seq", "op", "x"]), x),
    max_leaves=4,
)  # fmt: skip
_GOOD: dict[str, st.SearchStrategy[Any]] = {
    "lane": st.integers(0, 3),
    "comm": st.sampled_from(["dp", "tp", 'a":b', "[0]", "é", 4]),
    "stream": st.none() | st.sampled_from(["s", "t\\u"]),
    "blocking": st.booleans(),
    "request": st.integers(-5, 5),
    "requests": st.just("all") | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    "mode": st.sampled_from(list(MODE)),
    "peer": st.just("any") | st.integers(0, 2**31 - 1),
    "tag": st.just("any") | st.integers(0, 2**63 - 1),
    "recv_peer": st.just("any") | st.integers(0, 7),
    "recv_tag": st.just("any") | st.integers(0, 7),
    "send_mode": st.sampled_from(list(SEND_MODE)),
    "root": st.integers(0, 7),
    "reduce_op": st.sampled_from(["sum", "MAX"]),
    "count": st.integers(0, 2**62),
    "count_out": st.integers(0, 2**62),
    "dtype": st.sampled_from(["f32", "torch.bfloat16", "odd"]),
    "bytes": st.integers(0, 2**62),
    "splits": st.lists(st.integers(0, 2**62), max_size=3),
    "group": st.integers(-5, 5),
    "ordinal": st.integers(0, 9),
    "state": st.sampled_from(list(STATE)),
    "t_created": st.integers(-(2**63), 2**63 - 1),
    "t_started": st.integers(0, 9),
    "t_completed": st.integers(0, 9),
    "matched_peer": st.integers(0, 9),
    "matched_tag": st.integers(-9, 9),
    "returned": st.lists(st.integers(-9, 9), max_size=3),
    "new_comm": st.sampled_from(["n", "dp"]),
    "split": st.booleans(),
    "stack": st.lists(st.sampled_from(["f a:1", 'g "x": 2', "C:\\a", "é", ""]), max_size=3),
    "flags": st.integers(0, 2**32 - 1),
    "unknown": _JSON,
}
_NAMES = st.sampled_from([*OP, "AllReduce", "odd"])


@st.composite
def _operation(draw: st.DrawFn, seq: int) -> dict[str, Any]:
    keys = draw(st.lists(st.sampled_from(list(_GOOD)), max_size=8, unique=True))
    made = {"kind": "op", "seq": seq, "op": draw(_NAMES), "comm": "dp"}
    made |= {k: draw(_GOOD[k]) for k in keys}
    order = draw(st.permutations(list(made)))
    return {k: made[k] for k in order}


@st.composite
def _file(draw: st.DrawFn) -> bytes:
    n = draw(st.integers(0, 5))
    lines: list[dict[str, Any]] = [header(), dict(DP), *(draw(_operation(seq=i)) for i in range(n))]
    for _ in range(draw(st.integers(0, 1)) and draw(st.integers(1, 2))):
        victim = lines[draw(st.integers(0, len(lines) - 1))]
        victim[draw(st.sampled_from([*victim, *_GOOD]))] = draw(_JSON)
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :  ")]))
    ascii_only = draw(st.booleans())
    return b"".join(
        json.dumps(x, separators=separators, ensure_ascii=ascii_only).encode() + b"\n"
        for x in lines
    )


@settings(max_examples=150, deadline=None)
@given(_file())
def test_columns_and_lines_agree(content: bytes) -> None:
    """What the careful reading refuses is quarantined; else both readings give one table."""
    trace, inputs = read(content)
    if str(inputs[0].reason).startswith("line 1:"):  # a header can be wrong in more ways
        assert inputs[0].status == "quarantined"
        return
    refused: str | None = None
    cleaned = content
    try:
        cleaned = clean(content).data
    except InputError as e:
        refused = str(e)
    assert inputs[0].reason == refused or inputs[0].status == "read"
    assert (inputs[0].status == "quarantined") == (refused is not None)
    again, _ = read(cleaned)
    for table, frame in canonical(again).items():
        assert canonical(trace)[table].equals(frame), table


@settings(max_examples=60, deadline=None)
@given(_file(), st.data())
def test_damage_never_raises(content: bytes, data: st.DataObject) -> None:
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged)))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    trace, inputs = read(bytes(damaged))
    assert inputs[0].status in ("read", "partial", "quarantined")
    assert (inputs[0].status == "quarantined") == trace.jobs.is_empty()


# --------------------------------------------------------------------------------------------------
# All labelled data, against a reader that is slow and obvious


def _naive(path: Path, texts: list[str], trace: Trace, job: int) -> list[dict[str, Any]]:
    """Rows of one file, field by field, as TRACE_FORMAT.md says it; names in place of codes."""
    rows: list[dict[str, Any]] = []
    rank = -1
    strings = StringTable(texts)
    for line in path.read_text().splitlines():
        try:
            d = json.loads(line)
        except json.JSONDecodeError:
            break
        if d["kind"] == "header":
            rank = d["rank"]
        if d["kind"] != "op":
            continue
        out: dict[str, Any] = dict.fromkeys(EVENTS) | {"job": job, "rank": rank, "lane": 0}
        for key in EVENTS.keys() & d.keys() - {"dtype", "op"}:
            out[key] = ANY if d[key] == "any" and key != "mode" else d[key]
        out["op"] = op_spelling(d["op"])
        if "dtype" in d:
            out["dtype"] = dtype_name(dtype_code(d["dtype"], strings), strings.texts)
            if "bytes" not in d and "count" in d and out["dtype"] in DTYPE_BYTES:
                out["bytes"] = d["count"] * DTYPE_BYTES[out["dtype"]]
        out["blocking"] = d.get("blocking", True) if d.get("stream") is None else False
        out["state"] = STATE[d.get("state", "unknown")]
        out["flags"] = 0 if out["op"] in OP else FLAG["unknown_op"]
        if out["op"] == "wait":
            out["mode"] = MODE[d.get("mode", "all")]
            out["requests"] = [] if d["requests"] == "all" else d["requests"]
        if out["op"] in ("send", "sendrecv"):
            out["send_mode"] = SEND_MODE[d.get("send_mode", "standard")]
        rows.append(out)
    return rows


def _spelled(trace: Trace) -> pl.DataFrame:
    texts = trace.strings["text"].to_list()
    tables = {
        "op": lambda c: op_name(c, texts),
        "dtype": lambda c: dtype_name(c, texts),
        "stream": texts.__getitem__,
        "reduce_op": texts.__getitem__,
        "comm": trace.comms["id"].to_list().__getitem__,
        "new_comm": trace.comms["id"].to_list().__getitem__,
    }
    frames = trace.stacks["frames"].to_list()
    return trace.events.with_columns(
        *(
            pl.Series(c, [None if v is None else f(v) for v in trace.events[c]], pl.String)
            for c, f in tables.items()
        ),
        pl.Series(
            "stack",
            [None if v is None else frames[v] for v in trace.events["stack"]],
            pl.List(pl.String),
        ),
    )


@pytest.mark.parametrize("part", ["cases", "data/live/native"])
def test_labelled_data(shared: Path, part: str) -> None:
    if not (shared / part).is_dir():
        pytest.skip(f"no {part}")
    found = discover([str(shared / part)])
    trace, inputs = native.read(found.files)
    validate(trace)
    assert {i.status for i in inputs} <= {"read", "partial"}
    assert [i.path for i in inputs if i.status == "partial"] in (
        [],
        ["T08-trunc_killed-peer/rank_3.jsonl"],
    )
    jobs = {folder: job for job, folder in trace.jobs.select("job", "folder").iter_rows()}
    two_attempts = [f for f in jobs if trace.jobs.filter(pl.col("folder") == f).height > 1]
    texts = trace.strings["text"].to_list()
    expected = [
        r
        for f in found.files
        if f.folder not in two_attempts
        for r in _naive(Path(f.url), texts, trace, jobs[f.folder])
    ]
    want = pl.DataFrame(
        expected,
        schema=EVENTS
        | dict.fromkeys(("op", "dtype", "stream", "reduce_op", "comm", "new_comm"), pl.String)
        | {"stack": pl.List(pl.String)},
    )
    apart = [job for folder, job in jobs.items() if folder in two_attempts]
    apart += trace.jobs.filter(pl.col("folder").is_in(two_attempts))["job"].to_list()
    got = _spelled(trace).filter(~pl.col("job").is_in(apart))
    key = ["job", "rank", "lane", "seq"]
    got, want = got.sort(key), want.sort(key)
    for column in EVENTS:
        assert got[column].equals(want[column], check_dtypes=False), column


def test_attempts_of_one_folder(shared: Path) -> None:
    folder = shared / "cases" / "T09_two-attempts"
    if not folder.is_dir():
        pytest.skip("no case T09")
    trace, _ = native.read(discover([str(folder)]).files)
    assert sorted(trace.jobs["attempt"].to_list()) == [0, 1]
    ranks = trace.ranks.join(trace.jobs, on="job")
    assert ranks.filter(pl.col("attempt") == 0)["rank"].to_list() == [3]


@pytest.fixture
def some(shared: Path) -> list[TraceFile]:
    folder = shared / "cases"
    if not folder.is_dir():
        pytest.skip("no labelled cases")
    return [f for f in discover([str(folder)]).files if f.path.startswith(("C0", "X"))]


def test_chunks_do_not_matter(some: list[TraceFile], monkeypatch: pytest.MonkeyPatch) -> None:
    want = canonical(native.read(some)[0])
    monkeypatch.setattr(native, "_CHUNK", 3000)
    got = canonical(native.read(some)[0])
    assert all(got[k].equals(want[k]) for k in want)


def test_order_of_files_does_not_matter(some: list[TraceFile]) -> None:
    want, _ = native.read(some)
    mixed = list(some)
    random.Random(3).shuffle(mixed)
    got, inputs = native.read(mixed)
    assert [i.path for i in inputs] == [f.path for f in mixed]
    for table, frame in want.tables().items():
        assert got.tables()[table].equals(frame), table


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_compressed(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    lines = encoded([header(), DP, *(op(i, count=i * 7919 % 1000) for i in range(9000))])
    plain, packed = tmp_path / "a", tmp_path / "b"
    for folder in (plain, packed):
        folder.mkdir()
    (plain / "r.jsonl").write_bytes(lines)
    (packed / "r.anything").write_bytes(compress(lines))
    a, b = (native.read(discover([str(f)]).files) for f in (plain, packed))
    assert canonical(a[0])["events"].equals(canonical(b[0])["events"])
    cut = compress(lines)
    (packed / "r.anything").write_bytes(cut[: len(cut) * 3 // 4])
    trace, inputs = native.read(discover([str(packed)]).files)
    assert inputs[0].status == "partial"
    assert "ends too early" in str(inputs[0].reason)
    assert trace.ranks["truncated"].to_list() == [True]
    assert trace.events["seq"].to_list() == list(range(trace.events.height))
    assert 2000 < trace.events.height < 9000


@pytest.mark.parametrize("odd", ["\\" * 10_000, "\x1b" * 3000, "x" * (1 << 20)])
def test_a_reason_does_not_repeat_a_name_of_any_length(odd: str) -> None:
    line = json.dumps({"kind": f"header{odd}", "format": "dl2gpu.trace", "version": 1})
    _, inputs = read(f"{line}\n".encode())
    assert inputs[0].status == "quarantined"
    assert inputs[0].reason is not None
    assert len(inputs[0].reason) <= LONGEST_REASON
    assert inputs[0].reason.startswith("line 1: expected a header line")
