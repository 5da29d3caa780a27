"""The pickle decoder: against ``pickle.loads`` on good files, and against hostile ones."""

from __future__ import annotations

import itertools
import os
import pickle
import pickletools
import resource
import struct
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fr_writer import TorchPickler, document, dumps, entry, frame
from hypothesis import given, settings
from hypothesis import strategies as st

from dl2gpu.trace.entry_columns import MIXED, P2P, RETIRED, STATES, Columns
from dl2gpu.trace.pickle_columns import decode
from dl2gpu.trace.pickle_tables import NULL

WORLD = {"0": ("default_pg", [0, 1])}
ALLOWED = [
    "PROTO", "FRAME", "STOP", "MARK", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1",
    "TUPLE2", "TUPLE3", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINPUT", "LONG_BINPUT",
    "MEMOIZE", "BINGET", "LONG_BINGET", "BININT", "BININT1", "BININT2", "LONG1", "LONG4",
    "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE", "SETITEMS", "SETITEM", "APPENDS", "APPEND",
]  # fmt: skip


def same(found: Columns, content: Any) -> None:
    """``found`` holds what ``pickle.loads`` gave."""
    entries = content["entries"] if isinstance(content, dict) else content
    assert found.n == len(entries)
    assert found.lost == 0
    if isinstance(content, dict):
        assert found.header == {k: v for k, v in content.items() if k != "entries"}
    for i, e in enumerate(entries):

        def number(name: str, i: int = i) -> int | None:
            value = int(found.column(name)[i])
            return None if value == NULL else value

        def text(name: str, i: int = i) -> str | None:
            value = int(found.column(name)[i])
            return None if value < 0 else found.text(value)

        assert number("record_id") == e.get("record_id", i)
        assert number("counter") == e.get("collective_seq_id", e.get("seq_id"))
        assert number("p2p_counter") == e.get("p2p_seq_id")
        created = e["time_created_us"] * 1000 if "time_created_us" in e else e["time_created_ns"]
        assert number("created") == created
        assert number("started") == e.get("time_discovered_started_ns")
        assert number("completed") == e.get("time_discovered_completed_ns")
        bits = int(found.bits[i])
        assert STATES[bits & 3] == e["state"]
        assert bool(bits & RETIRED) == bool(e.get("retired"))
        assert bool(bits & P2P) == bool(e.get("is_p2p"))
        assert bool(bits & MIXED) == (len(set(e.get("input_dtypes", ()))) > 1)
        assert text("name") == e["profiling_name"]
        name, desc, pg_id = found.groups[found.column("group")[i]]
        assert (name, desc) == tuple(e.get("process_group", (str(e["pg_id"]), "")))
        assert pg_id == e["pg_id"]
        for side, key in (("in", "input"), ("out", "output")):
            sizes = [prod(s) for s in e[f"{key}_sizes"]]
            assert number(f"{side}_count") == sum(sizes)
            assert number(f"{side}_tensors") == len(sizes)
            dtypes = e.get(f"{key}_dtypes")
            assert text(f"{side}_dtype") == (dtypes[0] if dtypes else None)
            if side == "in" and len(sizes) > 1:
                at = int(found.column("numels")[i])
                assert found.numels[at : at + len(sizes)].tolist() == sizes
        stack = int(found.column("stack")[i])
        frames = e.get("frames")
        assert (None if stack < 0 else found.stack(stack)) == (
            None if frames is None
            else [f"{f['name']} {f['filename']}:{f['line']}" for f in frames]
        )  # fmt: skip


def varied(version: Any, stacks: bool, n: int = 60) -> Any:
    """A dump with long memos, long lists, big and negative numbers, and new strings all along."""
    shared = [frame(f"f{i}", f"/π/{i}.py", 7 * i) for i in range(300)]
    entries = []
    for i in range(n):
        frames = None
        if stacks:
            own = frame(f"only_{i}", "x y.py", 70000 + i)
            frames = [shared[(3 * i + k) % 300] for k in range(i % 20)] + [own] * (i % 3)
        entries.append(
            entry(
                i, f"nccl:op_{i % 7}", version=version, group=(str(i % 5), f"desc {i % 5}"),
                pg_id=i % 5, cseq=i * 40, pseq=i % 3, op_id=1 << 33,
                sizes=[[i, 3, 70000][: 1 + (i + k) % 3] for k in range(i % 4)],
                dtype=["Float", "Half", "Long", "Float"][: i % 4],
                state=["scheduled", "started", "completed"][i % 3], retired=i % 2 == 0,
                duration=0.25 if i % 2 else None, frames=frames, p2p=i % 5 == 0,
                started=None if i % 2 else 1_760_000_000_000_000_000 + i, completed=-i,
                thread=str(10**14 + i % 2),
            )
        )  # fmt: skip
    groups = {str(i): (f"desc {i}", list(range(50 * i))) for i in range(5)}
    return document(entries, version=version, groups=groups, status={0: (70000, -1, 3)})


@pytest.mark.parametrize("version", [None, (1, 0), (1, 4), (1, 5), (2, 0), (2, 4), (2, 9), (2, 10)])
@pytest.mark.parametrize("stacks", [False, True])
def test_same_as_unpickling(version: Any, stacks: bool) -> None:
    data = dumps(varied(version, stacks))
    content = pickle.loads(data)
    found = decode(data)
    assert found.fault is None
    same(found, content)
    for protocol in range(2, 6):
        same(decode(pickle.dumps(content, protocol)), content)
        same(decode(pickletools.optimize(pickle.dumps(content, protocol))), content)


def test_same_as_unpickling_for_real_dumps(shared: Path) -> None:
    seen = 0
    for folder in ("data/flight_recorder", "data/live/flight_recorder", "rendered"):
        for path in sorted((shared / folder).glob("*/*")):
            data = path.read_bytes() if path.is_file() else b""
            if data[:1] == b"\x80":
                same(decode(data), pickle.loads(data))
                seen += 1
    assert seen > 400


def test_large_files_take_many_rounds_of_growth() -> None:
    content = varied((2, 9), True, n=3000)
    data = dumps(content)
    same(decode(data), content)
    again = pickle.dumps(content, 4)
    same(decode(again), content)
    assert decode(dumps(document([]))).n == 0  # and nothing of it is left in the tables


def test_entries_of_unknown_keys_and_odd_types() -> None:
    e = entry(0)
    odd = e | {"new_key": "x", "other": 1.5, "third": None, "retired": 1, "state": 7, "pg_id": "a",
               "deep": [{"a": ({},)}], "profiling_name": "nccl:x", "input_sizes": 3,
               "frames": [1, None, {"name": "n"}]}  # fmt: skip
    found = decode(pickle.dumps({"entries": [odd, e]}, 2))
    assert found.n == 2
    assert found.column("in_tensors").tolist() == [-1, 1]
    assert [STATES[b & 3] for b in found.bits] == ["", "completed"]
    assert found.groups[0] == ("0", "default_pg", None)


# --------------------------------------------------------------------------------------------------
# Nothing is executed


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_payload_is_not_run(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "touched"
    content = document([entry(0)], groups=WORLD) | {"extra": Touch(target)}
    data = pickle.dumps(content, protocol)
    found = decode(data)
    assert not target.exists()
    assert found.fault is not None
    assert found.n == 0
    assert found.header == {}
    if protocol >= 2:
        assert found.fault.kind == "refused"
    pickle.loads(data)
    assert target.exists()  # the payload was a real one


OPCODES = {op.name: op for op in pickletools.opcodes}
REFUSED = sorted(OPCODES.keys() - set(ALLOWED))


@pytest.mark.parametrize("name", REFUSED)
def test_every_other_opcode_is_refused_by_name_and_offset(name: str) -> None:
    head = b"\x80\x02}(X\x01\x00\x00\x00a"
    found = decode(head + OPCODES[name].code.encode("latin-1") + b"os\nsystem\n" * 3)
    assert found.fault is not None
    assert (found.fault.kind, found.fault.offset) == ("refused", len(head))
    assert f"pickle opcode {name} at byte {len(head)}" in found.fault.reason
    assert found.n == 0


def test_refused_opcodes_inside_an_entry() -> None:
    data = dumps(document([entry(i) for i in range(5)], groups=WORLD))
    at = data.rindex(b"\x8a\x08")
    found = decode(data[:at] + b"cos\nsystem\n" + data[at:])
    assert found.fault is not None
    assert f"GLOBAL at byte {at}" in found.fault.reason
    assert found.n == 0


# --------------------------------------------------------------------------------------------------
# Damage


def is_prefix(found: Columns, whole: Columns) -> None:
    n = found.n
    assert n <= whole.n
    assert np.array_equal(found.wide, whole.wide[:, :n])
    assert found.bits.tolist() == whole.bits[:n].tolist()


@pytest.mark.parametrize("protocol", [None, 2, 4])
def test_cut_at_every_byte(protocol: int | None) -> None:
    """Each entry that was written whole is there, and none that was not."""
    content = varied((2, 9), True, n=12)
    data = dumps(content) if protocol is None else pickle.dumps(content, protocol)
    whole = decode(data)
    known = 0
    for end in range(len(data)):
        found = decode(data[:end])
        assert found.fault is not None
        assert found.fault.kind == "truncated"
        is_prefix(found, whole)
        assert found.n >= known
        known = found.n
        if known:
            assert found.header == whole.header  # this version writes the header first
    assert known == 12


def test_an_entry_cut_after_its_last_key_is_whole() -> None:
    data = dumps(document([entry(i) for i in range(3)], groups=WORLD))
    assert data.endswith(b"\x89ueuq" + data[-2:])
    assert decode(data[:-6]).n == 3  # is_p2p of the third is there, its end is not
    assert decode(data[:-7]).n == 2


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_random_damage(data: st.DataObject) -> None:
    good = data.draw(st.sampled_from(_GOOD))
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(bad) - 1))
        bad[at] = data.draw(st.integers(0, 255))
    found = decode(bytes(bad))
    assert found.n <= 100
    for k in range(len(found.stacks.keys)):
        found.stack(k)


_GOOD = [
    dumps(varied((2, 9), True, n=30)),
    dumps(varied((2, 0), False, n=30)),
    pickle.dumps(varied((2, 9), True, n=30), 4),
]


@given(st.binary(max_size=400))
@settings(max_examples=150, deadline=None)
def test_random_bytes(data: bytes) -> None:
    decode(b"\x80\x02" + data)


@given(st.lists(st.sampled_from([OPCODES[n].code.encode("latin-1") for n in ALLOWED] + [b"\0"])))
@settings(max_examples=300, deadline=None)
def test_random_programs_of_allowed_opcodes(codes: list[bytes]) -> None:
    decode(b"\x80\x02" + b"".join(codes))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x80\x02u.", "more values"),
        (b"\x80\x02}(K\x01u.", "key without a value"),
        (b"\x80\x02K\x01(e.", "no list or dict"),
        (b"\x80\x02h\x05.", "never stored"),
        (b"\x80\x02j\xff\xff\xff\xff.", "never stored"),
        (b"\x80\x02]r\xff\xff\xff\xff.", "memo index"),
        (b"\x80\x02q\x00.", "more values"),
        (b"\x80\x02(q\x00.", "more values"),
        (b"\x80\x02" + b"(" * 40 + b".", "nested deeper"),
        (b"\x80\x02\x8a\x09" + b"\x01" * 9 + b".", "more than 8 bytes"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "more than 8 bytes"),
        (b"\x80\x09.", "protocol"),
        (b"\x80\x02\xff.", "no opcode"),
        (b"\x80\x02.", "more values"),
        (b"\x80\x02](.", "more values"),
        (b"\x80\x02\x87.", "more values"),
        (b"\x80\x02]K\x01(a.", "more values"),
    ],
)
def test_damage_is_named(data: bytes, reason: str) -> None:
    found = decode(data)
    assert found.fault is not None
    assert found.fault.kind == "damaged"
    assert reason in found.fault.reason


def test_integers_of_every_width() -> None:
    values = [0, 1, 255, 256, 65535, 65536, -1, -(1 << 31), 1 << 31, -(1 << 40), (1 << 63) - 1]
    for value, protocol in itertools.product(values, (2, 4)):
        assert decode(pickle.dumps({"version": "2.9", "x": value}, protocol)).header["x"] == value
    assert decode(b"\x80\x02}X\x01\x00\x00\x00x\x8a\x00s.").header == {"x": 0}
    assert decode(b"\x80\x02}X\x01\x00\x00\x00xG" + struct.pack(">d", -1.5) + b"s.").header == {
        "x": -1.5
    }


# --------------------------------------------------------------------------------------------------
# Little files, little cost


def costs(data: bytes, seconds: float = 3.0, megabytes: float = 150.0) -> Columns:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    found = decode(data)
    assert time.process_time() - start < seconds
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if sys.platform == "linux":
        assert grown < megabytes
    return found


def test_claimed_sizes_take_no_memory() -> None:
    for data in (
        b"\x80\x02X\xff\xff\xff\xff", b"\x80\x02\x8d" + b"\xff" * 7 + b"\x7f",
        b"\x80\x02]r\x00\x00\x00\x7f.", b"\x80\x04\x95" + b"\xff" * 8 + b".",
    ):  # fmt: skip
        costs(data, 0.5, 20)


def test_a_header_that_unfolds_without_end_is_left_out() -> None:
    """Ten lists of ten times the next one: ten billion nodes in a few hundred bytes."""
    body = b"](" + b"K\x01" * 10 + b"eq\x00"
    for i in range(1, 10):
        body += b"](" + (b"h" + bytes([i - 1])) * 10 + b"eq" + bytes([i])
    data = b"\x80\x02}(X\x07\x00\x00\x00versionX\x03\x00\x00\x002.9X\x01\x00\x00\x00x(" + body
    found = costs(data + b"tu.")
    assert found.header == {"version": "2.9"}


def test_a_list_that_holds_itself() -> None:
    found = costs(b"\x80\x02}(X\x01\x00\x00\x00x]q\x00h\x00aX\x01\x00\x00\x00yK\x05u.")
    assert found.header == {"y": 5}


def test_deeply_nested_lists() -> None:
    depth = 100_000
    found = costs(b"\x80\x02}X\x01\x00\x00\x00x" + b"]" * depth + b"a" * (depth - 1) + b"s.")
    assert found.fault is None
    assert found.header == {}


def test_a_fetched_entry_counts_once() -> None:
    pickler = TorchPickler()
    pickler.out += b"}("
    pickler.string("entries")
    pickler.out += b"]("
    pickler.value(entry(0))
    at = pickler.put()
    one = b"h" + bytes([at])
    found = costs(bytes(pickler.out) + one * 100_000 + b"eu.")
    assert (found.n, found.lost) == (1, 100_000)


def test_a_fetched_list_is_summed_up_once() -> None:
    """100,000 entries that share one list of 100,000 sizes: linear work."""
    n = 100_000
    sizes = b"]q\x00(" + b"](K\x02e" * n + b"e"
    keys = b"".join(
        b"X" + struct.pack("<I", len(k)) + k + b"q" + bytes([i + 1])
        for i, k in enumerate([b"input_sizes", b"profiling_name", b"state", b"pg_id"])
    )
    first = b"}(X\x07\x00\x00\x00entries](" + b"(" + sizes + keys + b"t"
    entries = b"}(h\x01h\x00h\x02h\x02h\x03h\x03h\x04K\x01u" * n
    found = costs(b"\x80\x02" + first + entries + b"eu.", 10, 400)
    assert found.n == n
    assert found.column("in_count").tolist() == [2 * n] * n
    assert len(found.numels) < 2 * n + 10


def test_a_list_in_several_roles_is_summed_up_once() -> None:
    n = 50_000
    shared = b"]q\x00(" + b"](K\x02e" * n + b"e"
    words = [b"input_sizes", b"input_dtypes", b"frames", b"profiling_name", b"state"]
    keys = b"".join(
        b"X" + struct.pack("<I", len(k)) + k + b"q" + bytes([i + 1]) for i, k in enumerate(words)
    )
    first = b"}(X\x07\x00\x00\x00entries](" + b"(" + shared + keys + b"t"
    entries = b"}(h\x04h\x04h\x05h\x05h\x01h\x00h\x02h\x00h\x03h\x00u" * n
    found = costs(b"\x80\x02" + first + entries + b"eu.", 10, 400)
    assert found.n == n
    assert found.column("in_count").tolist() == [2 * n] * n
    assert set(found.column("stack").tolist()) == {-1}


def test_interleaved_appends_do_not_copy() -> None:
    """Two lists that grow in turns: linear work."""
    data = b"\x80\x02](]q\x00]q\x01" + b"h\x00K\x01ah\x01K\x01a" * 100_000 + b"e."
    assert costs(data).fault is None


def test_the_gil_is_released_and_threads_do_not_share_tables() -> None:
    from concurrent.futures import ThreadPoolExecutor

    contents = [varied((2, 9), True, n=40 + i) for i in range(16)]
    data = [dumps(c) for c in contents]
    with ThreadPoolExecutor(4) as pool:
        for content, found in zip(contents, pool.map(decode, data), strict=True):
            same(found, content)
