"""The Flight Recorder reader: against the slow mapping, and each rule of FORMATS.md by itself."""

from __future__ import annotations

import json
import pickle
import random
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fr_naive
import fr_writer
import polars as pl
import pytest
from fr_writer import document, dumps, entry, frame, json_form

from dl2gpu.trace.flight_recorder import read
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.schema import FLAG, STATE, Trace, dtype_name, op_name, validate

WORLD = {"0": ("default_pg", [0, 1])}
VERSIONS = [None, (1, 0), (1, 4), (1, 5), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (2, 5), (2, 7),
            (2, 9), (2, 10)]  # fmt: skip


def run(data: Mapping[str, bytes], **facts: Any) -> tuple[Trace, dict[str, Input]]:
    """Read files of one job, {name: content}; ``facts`` are fields of every TraceFile."""
    files = [
        TraceFile(path=f"job/{name}", url=name, format="flight_recorder", folder="job", **facts)
        for name in data
    ]
    trace, inputs = read(files, lambda f: data[f.url])
    validate(trace)
    assert [i.path for i in inputs] == [f.path for f in files]
    return trace, {i.path.removeprefix("job/"): i for i in inputs}


def read_job(data: Mapping[int, bytes]) -> list[dict[str, Any]]:
    """Events of the dumps of one job, {rank: content}, with names instead of codes."""
    trace, inputs = run({f"rank_{rank}": content for rank, content in data.items()})
    assert {i.status for i in inputs.values()} <= {"read"}
    return named(trace)


def named(trace: Trace) -> list[dict[str, Any]]:
    strings = trace.strings.sort("code")["text"].to_list()
    comms = {c["comm"]: c for c in trace.comms.iter_rows(named=True)}
    streams = {c["id"]: (c["name"], c["desc"], tuple(c["ranks"])) for c in comms.values()}
    stacks = trace.stacks.sort("stack")["frames"].to_list()
    states = {v: k for k, v in STATE.items()}
    out = []
    for e in trace.events.sort("job", "rank", "seq").iter_rows(named=True):
        c = comms[e["comm"]]
        stream: Any = None if e["stream"] is None else strings[e["stream"]]
        if stream in streams:
            stream = streams[stream]
        elif stream is not None:
            comm, _, pair = stream.rpartition(":")
            stream = (streams[comm], *map(int, pair.split("-")))
        out.append(
            e
            | {
                "op": op_name(e["op"], strings),
                "comm": (c["name"], c["desc"], tuple(c["ranks"])),
                "dtype": None if e["dtype"] is None else dtype_name(e["dtype"], strings),
                "state": states[e["state"]],
                "stack": None if e["stack"] is None else stacks[e["stack"]],
                "stream": stream,
                "flags": {name for name, bit in FLAG.items() if e["flags"] & bit},
            }
        )
    return out


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]], but: str = "") -> None:
    keys = {
        "rank", "lane", "seq", "op", "comm", "ordinal", "peer", "count", "count_out", "dtype",
        "bytes", "splits", "root", "group", "state", "t_created", "t_started", "t_completed",
        "stack", "stream", "flags",
    } - {but}  # fmt: skip
    assert len(found) == len(expected)
    for f, e in zip(found, sorted(expected, key=lambda e: (e["rank"], e["seq"])), strict=True):
        assert {k: f[k] for k in keys} == {k: e[k] for k in keys}


def one(*entries: dict[str, Any], **facts: Any) -> list[dict[str, Any]]:
    """Events of one dump of rank 0."""
    facts.setdefault("groups", WORLD)
    return read_job({0: dumps(document(entries, **facts))})


# --------------------------------------------------------------------------------------------------
# Real and rendered dumps


def dumps_below(folder: Path, pattern: str = "**/*") -> dict[Path, dict[int, bytes]]:
    """{job folder: {rank: content}} of all dumps."""
    jobs: dict[Path, dict[int, bytes]] = defaultdict(dict)
    for path in sorted(folder.glob(pattern)):
        if path.is_file() and path.name not in {"expect.json", "fault_injection.log"}:
            content = path.read_bytes()
            if content[:1] in {b"\x80", b"{"}:
                digits = path.name.removesuffix(".json").removesuffix(".pkl").split("_")[-1]
                jobs[path.parent][int(digits)] = content
    return jobs


FOLDERS = [
    "data/flight_recorder", "data/live/flight_recorder", "data/live/flight_recorder_after_timeout",
    "data/live/flight_recorder_json",
]  # fmt: skip


FOLDERS_AND_RENDERED = [*((f, "*/*") for f in FOLDERS), ("rendered", "*__fr*/*")]


@pytest.mark.parametrize(("folder", "pattern"), FOLDERS_AND_RENDERED)
def test_real_dumps_give_what_the_slow_mapping_gives(
    shared: Path, folder: str, pattern: str
) -> None:
    jobs = dumps_below(shared / folder, pattern)
    assert jobs
    for path, job in jobs.items():
        try:
            same(read_job(job), fr_naive.job_events(job))
        except AssertionError as error:
            raise AssertionError(f"{path}: {error}") from error


def test_json_gives_the_table_of_the_pickle_but_for_stacks(shared: Path) -> None:
    for path, job in dumps_below(shared / "data/live/flight_recorder").items():
        twin = shared / "data/live/flight_recorder_json" / path.name
        as_json = dumps_below(twin).get(twin)
        if as_json is not None:
            same(read_job(as_json), read_job(job), but="stack")


def test_the_writer_writes_what_pytorch_writes(shared: Path) -> None:
    seen = 0
    for folder, pattern in FOLDERS_AND_RENDERED:
        for job in dumps_below(shared / folder, pattern).values():
            for content in job.values():
                if content[:1] == b"\x80":
                    assert dumps(pickle.loads(content)) == content
                    seen += 1
    assert seen > 400


# --------------------------------------------------------------------------------------------------
# Versions and forms


def program(version: Any, rank: int, stacks: bool = True, world: int = 2) -> Any:
    """A small healthy program of two ranks with most of what a dump can hold."""
    frames = [frame(f"f{i}", f"/code/ü {i}.py", 10 * i) for i in range(5)]

    def at(i: int) -> list[dict[str, Any]] | None:
        return frames[i % 3 :] if stacks else None

    peer = 1 - rank
    calls: list[tuple[str, str, int, int, dict[str, Any]]] = [
        ("nccl:all_reduce", "0", 1, 0, {}),
        ("nccl:_all_gather_base", "0", 2, 0, {"sizes": [[8, 2]], "out_sizes": [[16, 2]]}),
        (f"nccl:send {rank}->{peer}", "1", 0, 1, {"dtype": "BFloat16"}),
        (f"nccl:recv {rank}<-{peer}", "1", 0, 2, {"dtype": "BFloat16"}),
        ("nccl:broadcast", "0", 3, 0, {"sizes": [[]], "dtype": "Long"}),
        ("nccl:all_to_all", "0", 4, 0, {"sizes": [[3], [5]], "out_sizes": [[3], [5]]}),
        ("nccl:all_reduce_barrier", "0", 5, 0, {"sizes": [[1]]}),
        ("gloo:something_new", "0", 6, 0, {"sizes": [[70000, 3]], "dtype": "Half"}),
        ("nccl:all_reduce", "0", 7, 0, {"state": "scheduled", "retired": False}),
    ]
    entries = [
        entry(i, name, version=version, group=(g, "default_pg" if g == "0" else "pp"),
              pg_id=int(g), cseq=c, pseq=p, frames=at(i), **more)
        for i, (name, g, c, p, more) in enumerate(calls)
    ]  # fmt: skip
    groups = {name: (desc, list(range(world))) for name, desc in (("0", "default_pg"), ("1", "pp"))}
    return document(entries, version=version, groups=groups, status={0: (7, -1, 6)})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("stacks", [True, False])
def test_every_version(version: Any, stacks: bool) -> None:
    job = {rank: dumps(program(version, rank, stacks)) for rank in (0, 1)}
    found = read_job(job)
    same(found, fr_naive.job_events(job))
    assert len(found) == 18
    assert [e["op"] for e in found[:9]] == [
        "all_reduce", "all_gather", "send", "recv", "broadcast", "all_to_all", "barrier",
        "something_new", "all_reduce",
    ]  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_dumps_saved_again_by_python(protocol: int) -> None:
    job = {rank: dumps(program((2, 9), rank)) for rank in (0, 1)}
    again = {r: pickle.dumps(pickle.loads(d), protocol=protocol) for r, d in job.items()}
    same(read_job(again), read_job(job))


@pytest.mark.parametrize("version", [(2, 3), (2, 9), (2, 10)])
def test_json_form(version: Any) -> None:
    job = {rank: program(version, rank) for rank in (0, 1)}
    found = read_job({r: json_form(d) for r, d in job.items()})
    same(found, read_job({r: dumps(d) for r, d in job.items()}), but="stack")
    assert all(e["stack"] is None for e in found)


def test_mixed_versions_and_forms_in_one_job() -> None:
    job = {0: dumps(program((2, 0), 0)), 1: json_form(program((2, 10), 1))}
    assert {e["rank"] for e in read_job(job)} == {0, 1}


def test_json_with_a_list_at_the_top_nan_and_stacks() -> None:
    text = json.dumps(program((2, 9), 0)["entries"]).replace(": 600000", ": NaN")
    events = read_job({0: text.encode()})
    assert len(events) == 9
    assert events[0]["stack"][0] == "f0 /code/ü 0.py:0"


def test_the_smallest_valid_dump_has_no_entries() -> None:
    trace, inputs = run({"rank_0": dumps(document([])), "rank_1": json_form(document([]))})
    assert {i.status for i in inputs.values()} == {"read"}
    assert trace.events.is_empty()
    assert trace.ranks["timed"].to_list() == [None, None]
    assert trace.ranks["truncated"].to_list() == [False, False]


# --------------------------------------------------------------------------------------------------
# Names, sizes, types, times


@pytest.mark.parametrize(
    ("name", "op", "backend"),
    [
        ("nccl:_broadcast_oop", "broadcast", "nccl"), ("rccl:all_reduce", "all_reduce", "rccl"),
        ("xccl:_reduce_scatter_base", "reduce_scatter", "xccl"),
        ("hccl:allreduce_coalesced", "all_reduce", "hccl"),
        ("c10d:alltoall", "all_to_all", "c10d"), ("nccl2:all_gather_v", "all_gather_v", "nccl2"),
        ("all_reduce", "all_reduce", None), ("", "unknown", None),
        ("nccl:", "unknown", "nccl"), ("mccl:fancy thing", "fancy", "mccl"),
        ("gloo:all_reduce_sparse", "all_reduce", "gloo"),
        ("nccl:ALLGATHER_coalesced", "all_gather", "nccl"),
    ],
)  # fmt: skip
def test_names_of_operations_and_backends(name: str, op: str, backend: str | None) -> None:
    trace, _ = run({"rank_0": dumps(document([entry(0, name)], groups=WORLD))})
    event = named(trace)[0]
    assert event["op"] == op
    assert trace.jobs["backend"].to_list() == [backend]
    assert ("unknown_op" in event["flags"]) == (op in {"unknown", "fancy"})


def test_store_traffic_is_no_operation() -> None:
    events = one(entry(0, "nccl:broadcastUniqueNCCLID"), entry(1))
    assert [e["op"] for e in events] == ["all_reduce"]


def test_peers_are_ranks_within_the_group() -> None:
    groups = {"43": ("PIPELINE", [0, 4, 8, 12])}
    pp = ("43", "PIPELINE")
    events = one(
        entry(0, "nccl:recv 0<-3", group=pp, pseq=1),
        entry(1, "nccl:send 0->9", group=pp, pseq=2),  # no such member
        entry(2, "nccl:send 2->1", group=pp, pseq=3),  # not our own rank: not to be believed
        entry(3, "nccl:recv 0<--1", group=pp, pseq=4),  # any source
        entry(4, "nccl:send", group=pp, pseq=5),
        groups=groups,
    )
    assert [e["peer"] for e in events] == [12, None, None, None, None]
    assert [e["ordinal"] for e in events] == [None] * 5


def test_counts_bytes_and_types() -> None:
    events = one(
        entry(0, "nccl:_all_gather_base", sizes=[[3, 2]], out_sizes=[[6, 2]], dtype="BFloat16"),
        entry(1, cseq=2, sizes=[[3], [], [2, 2]], dtype=["Float", "Half", "Half"]),
        entry(2, "nccl:send 0->1", pseq=1, sizes=[[5]], dtype="Bool"),
        entry(3, "nccl:all_reduce", cseq=3, sizes=[[1 << 40, 1 << 40]]),
        entry(4, "nccl:all_reduce", cseq=4, sizes=[[0, 5]]),
        entry(5, "nccl:all_reduce", cseq=5, sizes=[[4]], dtype="Mystery"),
        entry(6, "gloo:barrier", cseq=6, sizes=[]),
        entry(7, "nccl:all_reduce", cseq=7, sizes=[[3, -1]]),
    )
    assert [(e["count"], e["count_out"], e["dtype"], e["bytes"]) for e in events] == [
        (6, 12, "bf16", 12), (8, None, "f32", None), (5, None, "bool", 5),
        (None, None, "f32", None), (0, None, "f32", 0), (4, None, "Mystery", None),
        (None, None, None, None), (None, None, "f32", None),
    ]  # fmt: skip


def test_all_to_all_splits_and_their_versions() -> None:
    lists: dict[str, Any] = {"sizes": [[3], [5]], "out_sizes": [[4], [4]]}
    for version, comparable in (((2, 2), False), ((2, 4), True), ((2, 10), True)):
        event = one(entry(0, "nccl:all_to_all", version=version, **lists), version=version)[0]
        assert event["splits"] == [3, 5]
        assert ("sizes_incomparable" in event["flags"]) != comparable
    assert one(entry(0, "nccl:all_to_all", sizes=[[8]]))[0]["splits"] is None


def test_root_of_scatter_and_gather() -> None:
    """NCCL's scatter has its lists swapped; a gather's other ranks have one undefined output."""
    root = [
        entry(0, "nccl:scatter", cseq=1, sizes=[[4]], out_sizes=[[4], [4]]),
        entry(1, "nccl:gather", cseq=2, sizes=[[3]], out_sizes=[[3], [3]]),
    ]
    other = [
        entry(0, "nccl:scatter", cseq=1, sizes=[[4]], out_sizes=[]),
        entry(1, "nccl:gather", cseq=2, sizes=[[3]], out_sizes=[[0]]),
    ]
    events = read_job({
        0: dumps(document(other, groups=WORLD)), 1: dumps(document(root, groups=WORLD))
    })  # fmt: skip
    assert [e["root"] for e in events] == [1, 1, 1, 1]
    assert all("root_inferred" in e["flags"] for e in events)
    assert [(e["count"], e["count_out"]) for e in events] == [(None, 4), (3, 0), (8, 4), (3, 6)]
    alone = read_job({0: dumps(document(other, groups=WORLD))})
    assert [e["root"] for e in alone] == [None, None]


def test_times_that_cannot_be_are_null() -> None:
    late = 5_000_000_000 * 10**9
    events = one(
        entry(0, created=0, started=0, completed=None),
        entry(1, cseq=2, created=-5, started=late, completed=-1),
    )
    assert {(e["t_created"], e["t_started"], e["t_completed"]) for e in events} == {
        (None, None, None)
    }


# --------------------------------------------------------------------------------------------------
# States and batches


def test_gloo_completion_shows_in_retired() -> None:
    events = one(
        entry(0, "gloo:all_reduce", state="scheduled", retired=True),
        entry(1, "gloo:all_reduce", cseq=2, state="scheduled", retired=False),
        groups={"": ("", [0, 1])},
        status={0: (2, -1, 1)},
    )
    assert [e["state"] for e in events] == ["completed", "scheduled"]
    assert all(e["stream"] is None and not e["blocking"] for e in events)
    assert all({"state_unreliable", "blocking_inferred"} <= e["flags"] for e in events)


def test_nccl_states_are_what_they_say() -> None:
    states = [("scheduled", True), ("started", False), ("started", True), ("completed", False)]
    events = one(
        *(entry(i, cseq=i + 1, state=s, retired=r) for i, (s, r) in enumerate(states)),
        status={0: (4, 3, 1)},
    )
    assert [e["state"] for e in events] == [s for s, _ in states]
    assert not any("state_unreliable" in e["flags"] for e in events)


def batch(first: int, pseq: int, cseq: int = 0, version: Any = (2, 9), **end: Any) -> Any:
    """A batched send and receive with its end record."""
    members = [
        entry(first + i, name, version=version, group=("1", "pp"), pg_id=1, cseq=cseq, pseq=pseq,
              state="scheduled", retired=True)
        for i, name in enumerate(["nccl:send 0->1", "nccl:recv 0<-1"])
    ]  # fmt: skip
    last = entry(first + 2, "nccl:coalesced", version=version, group=("1", "pp"), pg_id=1,
                 cseq=cseq, pseq=pseq, sizes=[], p2p=end.pop("p2p", False), **end)  # fmt: skip
    return [*members, last]


PAIR = WORLD | {"1": ("pp", [0, 1])}


@pytest.mark.parametrize("p2p", [False, True])
def test_members_of_a_batch_have_the_state_of_its_end_record(p2p: bool) -> None:
    done = fr_writer.CREATED + 99
    events = one(*batch(0, 1, completed=done, p2p=p2p), *batch(3, 2, state="started"), groups=PAIR)
    assert [e["op"] for e in events] == ["send", "recv"] * 2
    assert [e["group"] for e in events] == [2, 2, 5, 5]
    assert [e["state"] for e in events] == ["completed"] * 2 + ["started"] * 2
    assert [e["t_completed"] for e in events] == [done, done, None, None]
    assert {e["stream"] for e in events} == {("1", "pp", (0, 1))}
    assert not any("partial_group" in e["flags"] for e in events)


def test_a_batch_without_its_end_record() -> None:
    members = batch(0, 1)[:2]
    single = entry(2, "nccl:send 0->1", group=("1", "pp"), pseq=2)
    events = one(*members, single, groups=PAIR)
    assert [e["group"] for e in events] == [1, 1, None]
    assert ["partial_group" in e["flags"] for e in events] == [True, True, False]
    assert events[2]["stream"] == (("1", "pp", (0, 1)), 0, 1)


def test_coalesced_collectives() -> None:
    """From 2.7 members and end record; before, the end record alone stands for the batch."""
    members = [entry(i, "nccl:_broadcast_oop", cseq=4, state="scheduled") for i in range(2)]
    end = entry(2, "nccl:ALLGATHER_coalesced", cseq=4, sizes=[])
    events = one(*members, end, entry(3, cseq=5))
    assert [(e["op"], e["group"], e["ordinal"], e["state"]) for e in events] == [
        ("broadcast", 2, 4, "completed"), ("broadcast", 2, 4, "completed"),
        ("all_reduce", None, 5, "completed"),
    ]  # fmt: skip
    old = one(entry(0, "nccl:ALLGATHER_coalesced", version=(2, 4), sizes=[]), version=(2, 4))
    assert [(e["op"], e["ordinal"], e["count"]) for e in old] == [("all_gather", 1, None)]
    assert "sizes_incomparable" in old[0]["flags"]


def test_a_lone_end_record_that_opens_a_cut_window_has_no_ordinal() -> None:
    end = entry(700, "nccl:coalesced", cseq=4, pseq=9, sizes=[])
    events = one(end, entry(701, cseq=5, pseq=9))
    assert [e["ordinal"] for e in events] == [None, 5]


def test_up_to_2_4_batches_of_p2p_do_not_count_as_collectives() -> None:
    """Rank 0 takes part in two batches, rank 1 in none; the collectives still meet."""
    v = (2, 4)
    pp: dict[str, Any] = {"version": v, "group": ("1", "pp"), "pg_id": 1}
    busy = [
        entry(0, cseq=1, **pp), *batch(1, 1, cseq=2, version=v), entry(4, cseq=3, pseq=1, **pp),
        *batch(5, 2, cseq=4, version=v), entry(8, cseq=5, pseq=2, **pp),
    ]  # fmt: skip
    idle = [entry(i, cseq=i + 1, **pp) for i in range(3)]
    job = {
        0: dumps(document(busy, version=v, groups=PAIR)),
        1: dumps(document(idle, version=v, groups=PAIR)),
    }
    events = [e for e in read_job(job) if e["op"] == "all_reduce"]
    assert [e["ordinal"] for e in events] == [1, 2, 3] * 2
    # the start of the record is lost: every launch left is a batch, so the lost ones were too
    late = [e | {"record_id": e["record_id"] + 50} for e in busy[4:]]
    events = read_job({0: dumps(document(late, version=v, groups=PAIR))})
    assert [e["ordinal"] for e in events if e["op"] == "all_reduce"] == [2, 3]


def test_single_counter_of_the_oldest_versions() -> None:
    v = (1, 4)
    entries = [
        entry(0, cseq=1, version=v), entry(1, "nccl:send 0->1", cseq=2, version=v),
        entry(2, cseq=3, version=v),
    ]  # fmt: skip
    assert [e["ordinal"] for e in one(*entries, version=v)] == [1, None, 2]


def torchcomms(first: int, names: list[tuple[str, str]]) -> Any:
    groups = {"a": ("", "[0,1]"), "b": ("", "[0,1]")}
    entries = [
        entry(first + i, f"ncclx:{name}", version=(2, 10), group=(comm, ""), cseq=first + i)
        for i, (name, comm) in enumerate(names)
    ]
    for e in entries:
        e["is_p2p"] = False
    return document(entries, version=(2, 10), groups=groups, status={})


def test_torchcomms_counts_over_all_communicators() -> None:
    calls = [("all_reduce", "a"), ("send", "b"), ("all_reduce", "b"), ("barrier", "a")]
    events = read_job({0: dumps(torchcomms(0, calls))})
    assert [(e["op"], e["ordinal"], e["peer"]) for e in events] == [
        ("all_reduce", 1, None), ("send", None, None), ("all_reduce", 1, None), ("barrier", 2, None)
    ]  # fmt: skip
    assert [e["ordinal"] for e in read_job({0: dumps(torchcomms(9, calls))})] == [None] * 4


def test_threads_become_lanes() -> None:
    threads = ["77", "5", "77", "6", "5"]
    events = one(*(entry(i, cseq=i + 1, thread=t) for i, t in enumerate(threads)))
    assert [e["lane"] for e in events] == [0, 1, 0, 2, 1]


# --------------------------------------------------------------------------------------------------
# Communicators and status


def test_same_name_with_other_members_is_another_communicator() -> None:
    def dump(members: list[int]) -> bytes:
        groups = {"0": ("default_pg", [0, 1, 2, 3]), "tp": ("x", members)}
        return dumps(document([entry(0, group=("tp", "x"), pg_id=1)], groups=groups))

    job = {0: dump([0, 1]), 1: dump([0, 1]), 2: dump([2, 3]), 3: dump([2, 3])}
    trace, _ = run({f"rank_{r}": d for r, d in job.items()})
    assert trace.comms.sort("comm")["id"].to_list() == ["0", "tp#0", "tp#1"]
    assert [e["comm"][2] for e in named(trace)] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_members_from_another_rank_that_lists_the_group() -> None:
    groups = {"0": ("default_pg", [0, 1])}
    job = {
        0: dumps(document([entry(0, group=("7", "dp"))], groups=groups)),
        1: dumps(document([entry(0, group=("7", "dp"))], groups=groups | {"7": ("dp", [0, 1])})),
    }
    assert {e["comm"] for e in read_job(job)} == {("7", "dp", (0, 1))}


@pytest.mark.parametrize("ranks", ["[0, 1]", "[0,1]", [0, 1], "[]", "[0, ..., 1]", "no", None])
def test_forms_of_the_member_list(ranks: Any) -> None:
    content = document([entry(0, group=("7", "dp"))], groups={"7": ("dp", "")})
    content["pg_config"]["7"]["ranks"] = ranks
    expected = (0, 1) if ranks in ("[0, 1]", "[0,1]", [0, 1]) else ()
    assert read_job({0: dumps(content)})[0]["comm"] == ("7", "dp", expected)


def test_gloo_default_group_is_inferred_from_the_ranks_seen() -> None:
    def dump(rank: int) -> bytes:
        entries = [
            entry(0, "gloo:all_reduce"),
            entry(1, "gloo:all_reduce", group=("1", "undefined"), pg_id=1),
        ]
        return dumps(document(entries, version=(2, 10), groups={"": ("", "[]")}))

    trace, _ = run({f"rank_{r}": dump(r) for r in range(3)})
    events = named(trace)
    assert [e["comm"][2] for e in events] == [(0, 1, 2), ()] * 3
    assert ["synthetic_comm" in e["flags"] for e in events] == [True, False] * 3
    assert trace.jobs.select("world_size", "p2p").rows() == [(3, False)]


def test_status_finds_its_communicator() -> None:
    """pg_status names groups by number; a rank without entries needs the others' numbers."""
    groups = {"0": ("default_pg", [0, 1]), "9": ("tp", [0, 1])}
    busy = document(
        [entry(0), entry(1, group=("9", "tp"), pg_id=4)], groups=groups,
        status={0: (1, 1, 1), 4: (5, -1, 4), 8: (1, 1, 1)},
    )  # fmt: skip
    empty = document([], groups=groups, status={0: (1, 1, 1), 4: (6, -1, 6)})
    for form in (dumps, json_form):
        trace, _ = run({"rank_0": form(busy), "rank_1": form(empty)})
        ids = dict(trace.comms.select("comm", "id").iter_rows())
        found = {
            (r["rank"], ids[r["comm"]]): (
                r["last_enqueued"], r["last_started"], r["last_completed"]
            )
            for r in trace.status.iter_rows(named=True)
        }  # fmt: skip
        assert found == {
            (0, "0"): (1, 1, 1), (0, "9"): (5, -1, 4), (1, "0"): (1, 1, 1), (1, "9"): (6, -1, 6)
        }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Windows, ranks, duplicates


def facts(content: Any) -> dict[str, Any]:
    trace, _ = run({"rank_0": dumps(content)})
    row = trace.ranks.row(0, named=True)
    return {k: row[k] for k in ("lost_before", "only_active", "timed")}


def test_ring_loss_and_active_only() -> None:
    ring = document([entry(207 + i, cseq=100 + i) for i in range(3)], groups=WORLD)
    assert facts(ring) == {"lost_before": 207, "only_active": False, "timed": False}
    active = [entry(r, cseq=r, state="scheduled", retired=False) for r in (86, 91, 92)]
    assert facts(document(active, groups=WORLD))["only_active"]
    # one block of open entries, and a status that knows of finished ones
    block = document(active[1:], groups=WORLD, status={0: (92, -1, 90)})
    assert facts(block) == {"lost_before": 0, "only_active": True, "timed": False}
    nothing = document([], groups=WORLD, status={0: (92, -1, 92)})
    assert facts(nothing) == {"lost_before": 0, "only_active": True, "timed": None}
    timed = document([entry(0, started=fr_writer.CREATED)], groups=WORLD)
    assert facts(timed) == {"lost_before": 0, "only_active": False, "timed": True}


def test_rank_from_content_pattern_and_name() -> None:
    content = document([entry(0)], groups=WORLD)
    crossed = {f"rank_{r}": dumps(dict(content) | {"rank": 1 - r}) for r in (0, 1)}
    trace, _ = run(crossed)
    assert trace.ranks.select("rank", "path").rows() == [(0, "job/rank_1"), (1, "job/rank_0")]
    trace, _ = run({"x": dumps(content)}, rank=1)
    assert trace.ranks["rank"].to_list() == [1]


def test_the_groups_may_leave_one_rank() -> None:
    groups = {"tp": ("", [0, 1]), "dp": ("", [1, 3])}
    trace, _ = run({"dump": dumps(document([entry(0, group=("tp", ""))], groups=groups))})
    assert trace.ranks["rank"].to_list() == [1]


def test_an_unknown_rank_is_said_not_guessed() -> None:
    trace, inputs = run({"dump": dumps(document([entry(0)], groups=WORLD)), "note": b"hello"})
    assert trace.events.is_empty()
    assert trace.ranks.is_empty()
    assert inputs["dump"].status == inputs["note"].status == "quarantined"
    assert "which rank wrote it is not known" in str(inputs["dump"].reason)


def test_a_rank_outside_its_groups_is_refused() -> None:
    content = dict(document([entry(0)], groups={"0": ("default_pg", [0, 1])})) | {"rank": 7}
    _, inputs = run({"rank_7": dumps(content)})
    assert inputs["rank_7"].status == "quarantined"
    assert "not a member of group '0' [0, 1]" in str(inputs["rank_7"].reason)


def test_of_two_dumps_of_a_rank_the_newest_is_read() -> None:
    old, new = (dumps(dict(document([entry(i)], groups=WORLD)) | {"rank": 0}) for i in (0, 5))
    trace, inputs = run({"a": old, "b": new, "c": new})
    assert trace.events["seq"].to_list() == [5]
    assert [inputs[n].status for n in "abc"] == ["ignored", "read", "ignored"]
    assert "older dump of rank 0 than job/b" in str(inputs["a"].reason)
    assert "same content as job/b" in str(inputs["c"].reason)


def test_jobs_are_kept_apart_by_folder_name_and_attempt() -> None:
    content = dumps(document([entry(0)], groups=WORLD))
    places: list[dict[str, Any]] = [
        {"folder": "x"}, {"folder": "y"}, {"folder": "y", "job": "z"},
        {"folder": "y", "job": "z", "attempt": 2},
    ]  # fmt: skip
    files = [
        TraceFile(path=f"{i}", url="", format="flight_recorder", rank=0, **p)
        for i, p in enumerate(places)
    ]
    trace, inputs = read(files, lambda _: content)
    validate(trace)
    assert trace.jobs.select("name", "folder", "attempt").rows() == [
        ("x", "x", 0), ("y", "y", 0), ("z", "y", 0), ("z", "y", 2)
    ]  # fmt: skip
    assert [i.job for i in inputs] == ["x", "y", "z", "z"]
    assert trace.events["job"].to_list() == [0, 1, 2, 3]
    assert trace.stacks.is_empty()


def test_equal_stacks_of_different_files_are_one() -> None:
    def dump(rank: int) -> bytes:
        frames = [frame("f", "a.py", 1), frame("g", "b.py", 2)]
        other = [frame("unused", "c.py", rank)] if rank else []
        entries = [entry(0, frames=[*other, *frames]), entry(1, cseq=2, frames=frames)]
        return dumps(document(entries, groups=WORLD))

    trace, _ = run({"rank_0": dump(0), "rank_1": dump(1)})
    assert trace.stacks["frames"].to_list() == [
        ["f a.py:1", "g b.py:2"], ["unused c.py:1", "f a.py:1", "g b.py:2"]
    ]  # fmt: skip
    assert trace.events.sort("rank", "seq")["stack"].to_list() == [0, 0, 1, 0]


# --------------------------------------------------------------------------------------------------
# Damage


def test_what_becomes_of_bad_files() -> None:
    good = dumps(program((2, 9), 0, world=9))
    files: dict[str, tuple[bytes, str, str]] = {
        "rank_0": (good, "read", ""),
        "rank_1": (good[: len(good) * 2 // 3], "partial", "the pickle ends at byte"),
        "rank_2": (b"", "partial", "the file is empty"),
        "rank_3": (b"\x80\x02cos\nsystem\n(U\x02idtR.", "quarantined", "GLOBAL at byte 2"),
        "rank_4": (b"just text", "quarantined", "neither a pickle"),
        "rank_5": (json_form(program((2, 9), 0, world=9))[:900], "partial", "the JSON ends"),
        "rank_6": (b'{"traceEvents": []}', "quarantined", "not a Flight Recorder dump"),
        "rank_7": (b"\x80\x02}(X\xff\xff\xff\xffabc", "partial", "ends at byte 4"),
        "rank_8": (b"\x80\x02u.", "quarantined", "damaged at byte 2"),
    }
    trace, inputs = run({name: content for name, (content, *_) in files.items()})
    for name, (_, status, reason) in files.items():
        assert (inputs[name].status, reason in (inputs[name].reason or "")) == (status, True), name
    ranks = dict(trace.ranks.select("rank", "truncated").iter_rows())
    assert ranks == {0: False, 1: True, 2: True, 5: True, 7: True}
    assert inputs["rank_1"].events > 0
    assert trace.events.height == sum(i.events for i in inputs.values())


def test_a_file_that_cannot_be_loaded_does_not_stop_the_rest() -> None:
    good = dumps(document([entry(0)], groups=WORLD))

    def load(file: TraceFile) -> bytes:
        if file.rank == 0:
            raise InputError("is gone")
        return good

    files = [
        TraceFile(path=str(r), url="", format="flight_recorder", folder="j", rank=r) for r in (0, 1)
    ]
    trace, inputs = read(files, load)
    assert [(i.status, i.reason) for i in inputs] == [("quarantined", "is gone"), ("read", None)]
    assert trace.ranks["rank"].to_list() == [1]


def test_entries_that_are_none_are_counted() -> None:
    content = document([entry(0)], groups=WORLD)
    content["entries"] += [None, {"a": 1}, 5]
    for form in (dumps, lambda c: json.dumps(c).encode()):
        _, inputs = run({"rank_0": form(content)})
        assert inputs["rank_0"].status == "partial"
        assert "3 members of the list of entries are no whole entries" in str(
            inputs["rank_0"].reason
        )


def test_record_ids_that_do_not_increase_become_positions() -> None:
    events = one(entry(5), entry(5, cseq=2), entry(3, cseq=3))
    assert [e["seq"] for e in events] == [0, 1, 2]


def test_damaged_files_never_raise() -> None:
    """Random damage to a job of two ranks: every result is a valid trace."""
    chance = random.Random(7)
    good = [dumps(program((2, 9), 0)), json_form(program((2, 9), 1))]
    for _ in range(300):
        bad = []
        for content in good:
            data = bytearray(content)
            for _ in range(chance.choice([1, 2, 8])):
                data[chance.randrange(len(data))] = chance.randrange(256)
            if chance.random() < 0.3:
                del data[chance.randrange(len(data)) :]
            bad.append(bytes(data))
        run({"rank_0": bad[0], "rank_1": bad[1]})


def test_no_files() -> None:
    trace, inputs = read([], lambda _: b"")
    validate(trace)
    assert inputs == []
    assert trace.events.is_empty()
    assert isinstance(trace.events, pl.DataFrame)


@pytest.mark.parametrize("write", [dumps, json_form])
@pytest.mark.parametrize("counter", [(1 << 62) + 1, (1 << 63) - 1, -5, -(1 << 63) + 1])
@pytest.mark.parametrize("version", [(1, 5), (2, 4), (2, 9)])
def test_counters_out_of_range_number_nothing(
    write: Any, counter: int, version: tuple[int, int]
) -> None:
    entries = [entry(0, cseq=1, version=version), entry(1, cseq=counter, version=version)]
    trace, inputs = run({"rank_0": write(document(entries, version=version, groups=WORLD))})
    assert inputs["rank_0"].events == 2
    far = trace.events.filter(pl.col("ordinal") > 2)
    assert far.is_empty()
