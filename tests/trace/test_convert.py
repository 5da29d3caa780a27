"""Native Parquet, JSON Lines and back: the way round is the identity on the event table."""

from __future__ import annotations

import io
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl2gpu.trace import native_parquet, native_write
from dl2gpu.trace.convert import canonical, convert
from dl2gpu.trace.discover import discover
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.readers import READERS, read_files, read_trace
from dl2gpu.trace.schema import (
    ANY,
    COMMS,
    DTYPE_BYTES,
    DTYPE_OTHER,
    EVENTS,
    EXIT,
    JOBS,
    MODE,
    OP,
    OP_OTHER,
    RANKS,
    SEND_MODE,
    STACKS,
    STATE,
    STATUS,
    StringTable,
    Trace,
    validate,
)


def same(a: Trace, b: Trace) -> None:
    want, got = canonical(a), canonical(b)
    for table, frame in want.items():
        for column in frame.columns:
            assert got[table][column].equals(frame[column]), (
                f"{table}.{column}: {frame[column].to_list()[:20]} "
                f"became {got[table][column].to_list()[:20]}"
            )


# --------------------------------------------------------------------------------------------------
# Traces of any source

_TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\n"), min_size=1, max_size=6
) | st.sampled_from(["a b", 'q"x', "back\\slash", "[0, 1]", "null", "é", "\t", "x:1", " lead"])
_INT = st.integers(-(2**63), 2**63 - 1)
_BIG = st.integers(0, 2**62)
_SMALL = st.integers(0, 2**31 - 1)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    strings = StringTable(draw(st.lists(_TEXT, min_size=1, max_size=4)))
    n_strings = len(strings.texts)
    string = st.integers(0, n_strings - 1)
    stacks = draw(st.lists(st.lists(_TEXT, max_size=3), max_size=3, unique_by=tuple))
    n_jobs = draw(st.integers(1, 3))
    jobs = [
        {
            "job": j, "name": f"{draw(_TEXT)}{j}",
            "folder": draw(st.sampled_from(["a", "b/c", ".."])),
            "attempt": draw(st.integers(0, 3)), "world_size": draw(st.none() | st.integers(9, 99)),
            "backend": draw(st.none() | _TEXT), "source": draw(st.sampled_from(["native", "x"])),
            "waits": draw(st.booleans()), "p2p": draw(st.booleans()),
        }
        for j in range(n_jobs)
    ]  # fmt: skip
    ranks: list[dict[str, Any]] = []
    comms: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    status: list[dict[str, Any]] = []
    for j in range(n_jobs):
        own = draw(st.lists(st.integers(0, 8), min_size=1, max_size=3, unique=True))
        ranks += [
            {
                "job": j, "rank": r, "exit": draw(st.sampled_from(list(EXIT.values()))),
                "code": draw(st.none() | st.integers(-5, 200)), "t_last": draw(st.none() | _INT),
                "truncated": draw(st.booleans()), "lost_before": draw(st.integers(0, 5)),
                "only_active": draw(st.booleans()), "timed": draw(st.none() | st.booleans()),
                "path": "p",
            }
            for r in own
        ]  # fmt: skip
        first = len(comms)
        ids = draw(st.lists(_TEXT, min_size=1, max_size=3, unique=True))
        comms += [
            {
                "comm": first + i, "job": j, "id": id_, "name": draw(st.none() | _TEXT),
                "desc": draw(st.none() | _TEXT),
                "ranks": draw(st.lists(st.integers(0, 8), max_size=3, unique=True)),
            }
            for i, id_ in enumerate(ids)
        ]  # fmt: skip
        comm = st.integers(first, len(comms) - 1)
        for r in own:
            for seq in draw(st.lists(_INT, max_size=4, unique=True)):
                event = draw(_event(string, comm, stacks))
                events.append({"job": j, "rank": r, "seq": seq} | event)
            if draw(st.booleans()):
                status.append({
                    "job": j, "rank": r, "comm": draw(comm), "last_enqueued": draw(_INT),
                    "last_started": draw(st.none() | _INT), "last_completed": None,
                })  # fmt: skip
    random.Random(draw(st.integers(0, 9))).shuffle(events)
    return validate(
        Trace(
            events=pl.DataFrame(events, schema=EVENTS, orient="row"),
            jobs=pl.DataFrame(jobs, schema=JOBS),
            ranks=pl.DataFrame(ranks, schema=RANKS),
            comms=pl.DataFrame(comms, schema=COMMS),
            stacks=pl.DataFrame(
                {"stack": range(len(stacks)), "frames": stacks}, schema=STACKS, strict=False
            ),
            strings=strings.frame(),
            status=pl.DataFrame(status, schema=STATUS),
        )
    )


def _event(
    string: st.SearchStrategy[int], comm: st.SearchStrategy[int], stacks: list[list[str]]
) -> st.SearchStrategy[dict[str, Any]]:
    def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.none() | values

    codes = st.sampled_from(sorted(OP.values())) | string.map(lambda c: OP_OTHER + c)
    types = st.integers(0, len(DTYPE_BYTES) - 1)
    wild = maybe(st.just(ANY) | _SMALL)
    return st.fixed_dictionaries(
        {
            "lane": st.integers(0, 2), "op": codes, "stream": maybe(string),
            "blocking": st.booleans(), "request": maybe(_INT),
            "requests": maybe(st.lists(_INT, max_size=2)),
            "mode": maybe(st.sampled_from(list(MODE.values()))), "comm": comm,
            "new_comm": maybe(comm), "split": maybe(st.booleans()), "ordinal": maybe(_BIG),
            "peer": wild, "tag": wild, "recv_peer": wild, "recv_tag": wild,
            "send_mode": maybe(st.sampled_from(list(SEND_MODE.values()))), "root": maybe(_SMALL),
            "reduce_op": maybe(string), "count": maybe(_BIG), "count_out": maybe(_BIG),
            "dtype": maybe(types), "bytes": maybe(_BIG),
            "splits": maybe(st.lists(_BIG, max_size=2)), "group": maybe(_INT),
            "state": st.sampled_from(list(STATE.values())), "t_created": maybe(_INT),
            "t_started": maybe(_INT), "t_completed": maybe(_INT), "matched_peer": maybe(_SMALL),
            "matched_tag": maybe(_INT),
            "returned": maybe(st.lists(_INT, max_size=2)),
            "stack": maybe(st.integers(0, len(stacks) - 1)) if stacks else st.none(),
            "flags": st.integers(0, 2**32 - 1),
        }
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(traces(), st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zst"]))
def test_way_round_of_any_trace(trace: Trace, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        native_parquet.write(trace, f"{folder}/p/x.parquet")
        from_parquet = read_trace(f"{folder}/p")
        same(trace, from_parquet)
        native_write.write_jsonl(from_parquet, f"{folder}/j", suffix)
        from_lines = read_trace(f"{folder}/j")
        same(trace, from_lines)
        native_parquet.write(from_lines, f"{folder}/q/x.parquet")
        same(trace, read_trace(f"{folder}/q/x.parquet"))
        assert {p.name for p in Path(folder).iterdir()} == {"p", "j", "q"}


def test_unknown_dtype_and_op_keep_their_names(tmp_path: Path) -> None:
    strings = StringTable(["AllReduce", "mystery type"])
    event = dict.fromkeys(EVENTS) | {
        "job": 0, "rank": 0, "lane": 0, "seq": 0, "op": OP_OTHER, "dtype": DTYPE_OTHER + 1,
        "blocking": True, "comm": 0, "state": 0, "flags": 0,
    }  # fmt: skip
    trace = validate(one_rank(pl.DataFrame([event], schema=EVENTS), strings))
    native_parquet.write(trace, tmp_path / "x.parquet")
    same(trace, read_trace(str(tmp_path / "x.parquet")))
    native_write.write_jsonl(trace, tmp_path / "lines")
    same(trace, read_trace(str(tmp_path / "lines")))


def test_many_distinct_texts(tmp_path: Path) -> None:
    strings = StringTable(f"stream {k * 7 % 300}" for k in range(300))
    event = dict.fromkeys(EVENTS) | {
        "job": 0, "rank": 0, "lane": 0, "op": OP["barrier"], "blocking": False, "comm": 0,
        "state": 0, "flags": 0,
    }  # fmt: skip
    events = [event | {"seq": k, "stream": k if k % 3 else None} for k in range(300)]
    trace = validate(one_rank(pl.DataFrame(events, schema=EVENTS), strings))
    native_parquet.write(trace, tmp_path / "x.parquet")
    same(trace, read_trace(str(tmp_path / "x.parquet")))


def one_rank(events: pl.DataFrame, strings: StringTable | None = None) -> Trace:
    jobs = [(0, "j", "j", 0, 2, "nccl", "native", True, True)]
    return Trace(
        events=events,
        jobs=pl.DataFrame(jobs, schema=JOBS, orient="row"),
        ranks=pl.DataFrame(
            [(0, 0, 0, None, None, False, 0, False, None, "p")], schema=RANKS, orient="row"
        ),
        comms=pl.DataFrame([(0, 0, "dp", None, None, [0, 1])], schema=COMMS, orient="row"),
        strings=(strings or StringTable()).frame(),
    )  # fmt: skip


@pytest.mark.parametrize("part", ["cases", "data/live/native"])
def test_way_round_of_labelled_data(shared: Path, part: str, tmp_path: Path) -> None:
    if not (shared / part).is_dir():
        pytest.skip(f"no {part}")
    source = str(shared / part)
    trace = read_trace(source)
    convert(source, str(tmp_path / "p" / "x.parquet"))
    convert(str(tmp_path / "p" / "x.parquet"), str(tmp_path / "j"))
    convert(str(tmp_path / "j"), str(tmp_path / "q" / "x.parquet"))
    same(trace, read_trace(str(tmp_path / "p")))
    same(trace, read_trace(str(tmp_path / "j")))
    same(trace, read_trace(str(tmp_path / "q")))
    folders = read_trace(str(tmp_path / "j")).jobs["folder"]
    assert sorted(folders) == sorted(trace.jobs["folder"])


def test_flight_recorder_survives(shared: Path, tmp_path: Path) -> None:
    """Also what JSON Lines has no key of its own for: flags, states of groups, what is recorded."""
    source = shared / "data" / "flight_recorder"
    if not source.is_dir():
        pytest.skip("no Flight Recorder dumps")
    pytest.importorskip(READERS["flight_recorder"])
    trace = read_trace(str(source))
    assert trace.events["flags"].max()
    assert trace.status.height
    convert(str(source), str(tmp_path / "x.parquet"))
    same(trace, read_trace(str(tmp_path / "x.parquet")))
    convert(str(source), str(tmp_path / "lines"))
    same(trace, read_trace(str(tmp_path / "lines")))


# --------------------------------------------------------------------------------------------------
# The forms


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a job of two ranks."""
    folder = tmp_path / "source"
    folder.mkdir()
    for rank in range(2):
        lines = [
            {"kind": "header", "format": "dl2gpu.trace", "version": 1, "job": "j", "rank": rank,
             "world_size": 2, "backend": "nccl"},
            {"kind": "comm", "id": "dp", "ranks": [0, 1]},
            {"kind": "op", "seq": 1, "op": "wait", "requests": "all"},
            {"kind": "op", "seq": 0, "op": "all_reduce", "comm": "dp", "stream": "s", "count": 4,
             "dtype": "bf16", "reduce_op": "sum", "state": "started", "stack": ["f a.py:1"]},
            {"kind": "op", "seq": 2, "op": "send", "comm": "dp", "peer": 1 - rank},
            {"kind": "end", "exit": "alive", "t": 5},
        ]  # fmt: skip
        text = "".join(json.dumps(x) + "\n" for x in lines)
        (folder / f"rank_{rank}.jsonl").write_text(text)
    return folder


def test_parquet_speaks_for_itself(job: Path, tmp_path: Path) -> None:
    convert(str(job), str(tmp_path / "out" / "x.parquet"))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "x.parquet", "x.comms.parquet", "x.jobs.parquet", "x.ranks.parquet", "x.stacks.parquet",
    }  # fmt: skip
    assert pl.read_parquet_metadata(tmp_path / "out/x.parquet")["dl2gpu.trace.version"] == "1"
    table = pl.read_parquet(tmp_path / "out" / "x.parquet")
    assert set(EVENTS) <= set(table.columns)
    rows = table.select(
        "job_name", "attempt", "rank", "seq", "op", "stream", "comm_id", "dtype", "reduce_op",
        "state", "mode", "send_mode",
    ).rows()  # fmt: skip
    assert rows[:3] == [
        ("j", 0, 0, 0, "all_reduce", "s", "dp", "bf16", "sum", "started", None, None),
        ("j", 0, 0, 1, "wait", None, None, None, None, "unknown", "all", None),
        ("j", 0, 0, 2, "send", None, "dp", None, None, "unknown", None, "standard"),
    ]
    assert table.select("job", "rank", "lane", "seq").rows() == sorted(
        table.select("job", "rank", "lane", "seq").rows()
    )
    comms = pl.read_parquet(tmp_path / "out" / "x.comms.parquet")
    assert comms.select("comm", "id", "ranks").row(0) == (0, "dp", [0, 1])


def test_lines_speak_for_themselves(job: Path, tmp_path: Path) -> None:
    convert(str(job), str(tmp_path / "lines"))
    first = (tmp_path / "lines" / "rank_0.jsonl").read_text().splitlines()
    assert [json.loads(x)["kind"] for x in first] == ["header", "comm", "op", "op", "op", "end"]
    assert json.loads(first[2]) == {
        "kind": "op", "seq": 0, "op": "all_reduce", "comm": "dp", "stream": "s", "count": 4,
        "dtype": "bf16", "bytes": 8, "reduce_op": "sum", "state": "started", "stack": ["f a.py:1"],
    }  # fmt: skip
    assert json.loads(first[3]) == {
        "kind": "op", "seq": 1, "op": "wait", "requests": "all", "mode": "all",
    }  # fmt: skip


def test_the_same_trace_gives_the_same_bytes(job: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        convert(str(job), str(tmp_path / out / "x.parquet"))
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_side_tables_are_inputs(job: Path, tmp_path: Path) -> None:
    convert(str(job), str(tmp_path / "out" / "x.parquet"))
    found = discover([str(tmp_path / "out")])
    assert [(f.path, f.format, f.folder) for f in found.files] == [("x.parquet", "parquet", "out")]
    assert [(i.path, i.status, i.reason) for i in found.inputs] == [
        (f"x.{side}.parquet", "read", "read with x.parquet")
        for side in ("comms", "jobs", "ranks", "stacks")
    ]
    trace, inputs = read_files(found.files)
    assert [(i.path, i.status, i.job, i.events) for i in inputs] == [("x.parquet", "read", "j", 6)]
    assert set(trace.ranks["path"]) == {"x.parquet"}


def test_two_conversions_of_one_job_stay_apart(job: Path, tmp_path: Path) -> None:
    convert(str(job), str(tmp_path / "out" / "a" / "x.parquet"))
    convert(str(job), str(tmp_path / "out" / "b" / "x.parquet"))
    trace = read_trace(str(tmp_path / "out"))
    assert trace.jobs.height == 2
    assert trace.jobs["folder"].n_unique() == 2


def _spoil(folder: Path, how: str) -> None:
    main, comms = folder / "x.parquet", folder / "x.comms.parquet"
    table = pl.read_parquet(main)
    meta = {"dl2gpu.trace.version": "1"}
    match how:
        case "version":
            table.write_parquet(main, metadata={"dl2gpu.trace.version": "2"})
        case "side table missing":
            comms.unlink()
        case "side table of another write":
            shutil.copy(folder / "x.jobs.parquet", comms)
        case "cut":
            main.write_bytes(main.read_bytes()[:-20])
        case "damaged":
            data = bytearray(main.read_bytes())
            data[200:400] = b"\xff" * 200
            main.write_bytes(bytes(data))
        case "unknown state":
            table.with_columns(state=pl.lit("dreaming")).write_parquet(main, metadata=meta)
        case "wrong type":
            table.with_columns(rank=pl.lit("zero")).write_parquet(main, metadata=meta)
        case "no op":
            table.with_columns(op=pl.lit(None, pl.String)).write_parquet(main, metadata=meta)
        case "negative rank":
            table.with_columns(rank=pl.lit(-1)).write_parquet(main, metadata=meta)
        case "unknown communicator":
            table.with_columns(comm=pl.lit(7)).write_parquet(main, metadata=meta)
        case "twice":
            pl.concat([table, table]).write_parquet(main, metadata=meta)
        case "no seq":
            table.drop("seq").write_parquet(main, metadata=meta)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("version", "dl2gpu.trace.version: expected 1, found 2"),
        ("side table missing", r"side table x\.comms\.parquet is missing"),
        ("side table of another write", "not written together"),
        ("cut", "cut short"),
        ("damaged", "Parquet|expected"),
        ("unknown state", "column state: expected unknown, .*found 'dreaming'"),
        ("wrong type", "column rank: expected Int32, found String"),
        ("no op", "column op: expected a value"),
        ("negative rank", "column rank: expected a global rank"),
        ("unknown communicator", "column comm: expected null or 0..0, found 7"),
        ("twice", "column seq: expected increasing"),
        ("no seq", "column seq: expected a value"),
    ],
)
def test_wrong_parquet(how: str, message: str, job: Path, tmp_path: Path) -> None:
    convert(str(job), str(tmp_path / "out" / "x.parquet"))
    _spoil(tmp_path / "out", how)
    with pytest.raises(InputError, match=message):
        read_trace(str(tmp_path / "out"))


def test_parquet_of_another_writer_is_read(job: Path, tmp_path: Path) -> None:
    """Plain strings, no digest, columns that may be null left out."""
    convert(str(job), str(tmp_path / "out" / "x.parquet"))
    want = read_trace(str(tmp_path / "out"))
    main = tmp_path / "out" / "x.parquet"
    table = pl.read_parquet(main).with_columns(pl.col(pl.Categorical).cast(pl.String))
    empty = [c for c in table.columns if table[c].null_count() == table.height]
    table.drop(empty).write_parquet(main, metadata={"dl2gpu.trace.version": "1"})
    same(want, read_trace(str(tmp_path / "out")))


def test_parquet_bomb(job: Path, tmp_path: Path) -> None:
    convert(str(job), str(tmp_path / "out" / "x.parquet"))
    main = tmp_path / "out" / "x.parquet"
    many = pl.DataFrame({"seq": pl.repeat(1, 20_000_000, dtype=pl.Int64, eager=True)})
    many.write_parquet(main, metadata={"dl2gpu.trace.version": "1"})
    assert main.stat().st_size < 500_000
    with pytest.raises(InputError, match=r"20000000 rows .*DL2GPU_MAX_RATIO"):
        read_trace(str(main))


def test_writing_is_whole_or_not_at_all(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(str(job), str(tmp_path / "out" / "x.parquet"))
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    def full(frame: pl.DataFrame, path: io.IOBase, **_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    with pytest.raises(InputError, match="No space left"):
        convert(str(job), str(tmp_path / "out" / "x.parquet"))
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_folder_names_do_not_leave_the_target(tmp_path: Path) -> None:
    trace = one_rank(pl.DataFrame(schema=EVENTS))
    odd = ["../../x", "/etc", "a/../../b", "..", "", "a\\..\\b", "x" * 500, "con:", "a", "a "]
    jobs = pl.concat(
        trace.jobs.with_columns(pl.lit(i, pl.Int32).alias("job"), folder=pl.lit(f))
        for i, f in enumerate(odd)
    )
    ranks = pl.concat(
        trace.ranks.with_columns(pl.lit(i, pl.Int32).alias("job")) for i in range(len(odd))
    )
    many = validate(Trace(events=trace.events, jobs=jobs, ranks=ranks, comms=trace.comms))
    native_write.write_jsonl(many, tmp_path / "a" / "target")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["target"]
    assert read_trace(str(tmp_path / "a" / "target")).jobs.height == len(odd)


def test_convert_refuses(job: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a new or empty folder"):
        convert(str(job), str(job))
    with pytest.raises(InputError, match="expected the name of a folder"):
        convert(str(job), str(tmp_path / "x.jsonl"))
    with pytest.raises(InputError, match="expected a local path"):
        convert(str(job), "memory://x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="expected traces"):
        convert(str(tmp_path / "empty"), str(tmp_path / "x.parquet"))
    assert not (tmp_path / "x.parquet").exists()


def test_convert_does_not_lose_a_file_silently(job: Path, tmp_path: Path) -> None:
    (job / "rank_1.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"rank_1\.jsonl"):
        convert(str(job), str(tmp_path / "x.parquet"))


def test_readers_answer_for_each_file(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that fails as a whole costs the job that made it fail, no other."""
    from dl2gpu.trace import native

    right = native.read

    def fails(files: Any) -> Any:
        if any(f.path.startswith("b/") for f in files):
            raise InputError("no")
        return right(files)

    monkeypatch.setattr(native, "read", fails)
    root = job.parent / "root"
    for name in "abc":
        shutil.copytree(job, root / name)
    trace, inputs = read_files(discover([str(root)]).files)
    assert trace.events.height == 12
    assert {(i.path, i.status) for i in inputs if i.status != "read"} == {
        ("b/rank_0.jsonl", "quarantined"),
        ("b/rank_1.jsonl", "quarantined"),
    }
