"""NCCL's and RCCL's logs: every version, whatever launchers and torn lines do to them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from corpus import LOGS, check, scanned
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_writer import PREFIXES, Comm, Job, frame, interleaved

from dl2gpu import scan
from dl2gpu.trace import log_nccl
from dl2gpu.trace.inputs import TraceFile
from dl2gpu.trace.log_job import LogJob
from dl2gpu.trace.log_nccl_lines import extract, parsed
from dl2gpu.trace.schema import EXIT, FLAG, STATE, Trace, dtype_name, op_name, validate

VERSIONS = ("2.4", "2.10", "2.16", "2.18", "2.21", "2.23", "2.27", "2.30", "rccl")


def read(*files: Sequence[str], blocks: int = 1, file_rank: Sequence[int | None] = ()) -> Trace:
    """The trace of the lines of files, extracted in so many blocks."""
    lines = frame(*files)
    size = max(1, -(-lines.height // blocks))
    facts = pl.concat([extract(part) for part in lines.iter_slices(size)])
    named = [TraceFile(f"{k}.log", f"{k}.log", "log", "j") for k in range(len(files))]
    job = LogJob("j", "j", 0, named, list(file_rank) or [None] * len(files))
    trace = log_nccl.build(facts, job)
    assert trace is not None
    return validate(trace)


def events(trace: Trace) -> dict[int, list[dict[str, Any]]]:
    """Operations of each rank in program order, in words."""
    strings = trace.strings.sort("code")["text"].to_list()
    members = dict(trace.comms.select("comm", "ranks").iter_rows())
    out: dict[int, list[dict[str, Any]]] = {}
    for e in trace.events.sort("rank", "seq").iter_rows(named=True):
        out.setdefault(e["rank"], []).append(
            {
                "op": op_name(e["op"], strings),
                "members": tuple(members[e["comm"]]),
                "count": e["count"],
                "dtype": dtype_name(e["dtype"], strings),
                "partner": e["peer"] if e["peer"] is not None else e["root"],
                "reduction": strings[e["reduce_op"]] if e["reduce_op"] is not None else None,
                "stream": strings[e["stream"]],
                "lane": e["lane"],
            }
        )
    return out


def expected(c: Comm, op: str, count: int, dtype: str, root: int, stream: int, lane: int,
             reduction: str = "sum") -> dict[str, Any]:  # fmt: skip
    rooted = op in ("broadcast", "reduce", "gather", "scatter", "send", "recv")
    whole = op in ("reduce_scatter", "all_to_all")
    return {
        "op": op,
        "members": tuple(c.members),
        "count": count * len(c.members) if whole else count,
        "dtype": dtype,
        "partner": c.members[root] if rooted else None,
        "reduction": reduction if op in ("all_reduce", "reduce_scatter", "reduce") else None,
        "stream": f"stream {stream:#x}",
        "lane": lane,
    }


def whole_run(
    version: str, ranks: int = 4, calls: int = 6, end: bool = True, seed: int = 0
) -> tuple[Job, list[Comm], dict[int, list[str]]]:
    """Lines of each rank of a job with a world and two halves of it, every rank the same calls."""
    job = Job(ranks, version, seed)
    world = job.comm(range(ranks))
    halves = [job.comm(range(k * ranks // 2, (k + 1) * ranks // 2)) for k in range(2)]
    lines: dict[int, list[str]] = {r: [] for r in range(ranks)}
    for c in (world, *halves):
        for r, said in job.init(c).items():
            lines[r] += said
    for k in range(calls):
        for r in range(ranks):
            lines[r].append(job.call(world, r, "all_reduce", 100 + k))
            lines[r].append(job.call(halves[2 * r // ranks], r, "all_gather", 10 + k, "bf16"))
    for r in range(ranks):
        if end:
            lines[r] += [job.end(halves[2 * r // ranks], r), job.end(world, r)]
    return job, [world, *halves], lines


# --------------------------------------------------------------------------------------------------
# The same events, whatever happens to the lines


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    ranks = draw(st.integers(2, 5))
    groups = draw(
        st.lists(st.sets(st.integers(0, ranks - 1), min_size=2), max_size=3).map(
            lambda found: [sorted(g) for g in found]
        )
    )
    ops = st.sampled_from(
        ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "send", "recv"]
    )
    calls = draw(
        st.lists(
            st.tuples(
                st.integers(0, ranks - 1), st.integers(0, 3), ops, st.integers(0, 1 << 40),
                st.sampled_from(["f32", "bf16", "i64", "u8"]), st.integers(0, 4),
                st.sampled_from([0x5600000000A0, 0x5600000000B0]), st.integers(0, 1),
                st.sampled_from(["sum", "max"]),
            ),
            min_size=1, max_size=25,
        )
    )  # fmt: skip
    return {
        "ranks": ranks,
        "groups": groups,
        "calls": calls,
        "version": draw(st.sampled_from(VERSIONS)),
        "prefix": draw(st.sampled_from(PREFIXES)),
        "files": draw(st.sampled_from(["one", "rank"])),
        "blocks": draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 1 << 16)),
        "crlf": draw(st.booleans()),
    }


@settings(max_examples=60, deadline=None)
@given(programs())
def test_any_rendering_of_a_program_gives_its_events(p: dict[str, Any]) -> None:
    job = Job(p["ranks"], p["version"], p["seed"], threads=2)
    chance = random.Random(p["seed"])
    world = job.comm(range(p["ranks"]))
    comms = [world, *(job.comm(g) for g in p["groups"])]
    lines: dict[int, list[str]] = {r: [] for r in range(p["ranks"])}
    wanted: dict[int, list[dict[str, Any]]] = {}
    lanes: dict[int, list[int]] = {}
    for c in comms:
        for r, said in job.init(c).items():
            lines[r] += said
    for r, which, op, count, dtype, root, stream, thread, reduction in p["calls"]:
        mine = [c for c in comms if r in c.members]
        c = mine[which % len(mine)]
        root = root % len(c.members)
        if op not in ("broadcast", "reduce", "send", "recv"):
            root = 0
        lines[r].append(job.call(c, r, op, count, dtype, reduction, root, stream, thread))
        seen = lanes.setdefault(r, [])
        if thread not in seen:
            seen.append(thread)
        wanted.setdefault(r, []).append(
            expected(c, op, count, dtype, root, stream, seen.index(thread), reduction)
        )

    def told(r: int, line: str) -> str:
        text: str = p["prefix"].format(line, label=r, pid=job.processes[r].pid)
        return text + "\r" if p["crlf"] else text

    parts = [[told(r, line) for line in lines[r]] for r in lines]
    parts[0].insert(0, told(0, job.banner()))
    files = parts if p["files"] == "rank" else [interleaved(parts, chance)]
    trace = read(*files, blocks=p["blocks"])
    got = events(trace)
    if p["version"] in ("2.4", "2.10") and len({len(c.members) for c in comms}) < len(comms):
        # without an id, communicators of one size are told apart by order: that may be unknown
        for ops in (*got.values(), *wanted.values()):
            for e in ops:
                del e["partner"], e["members"]
    assert got == wanted
    assert trace.jobs["world_size"].item() == p["ranks"]


@st.composite
def tears(draw: st.DrawFn) -> tuple[int, list[tuple[int, float]]]:
    where = st.tuples(st.integers(0, 60), st.floats(0.02, 0.98))
    return draw(st.integers(0, 1 << 16)), draw(st.lists(where, min_size=1, max_size=12))


def torn(lines: list[str], cuts: list[tuple[int, float]]) -> list[str]:
    """The lines, some broken in the middle by the whole next line of another process."""
    out = list(lines)
    for at, share in sorted(dict(cuts).items(), reverse=True):
        pair = [line.split(" ")[0] for line in out[at : at + 2]]
        if len(set(pair)) == 2 and all(re.fullmatch(r"gpu-a1:\d+:\d+", name) for name in pair):
            place = int(share * len(out[at]))
            head, tail = out[at][:place], out[at][place:]
            out[at : at + 2] = [head + out[at + 1], tail]
    return out


@settings(max_examples=80, deadline=None)
@given(tears(), st.sampled_from(["2.18", "2.23", "rccl"]))
def test_torn_lines_are_whole_again_or_counted(
    cut: tuple[int, list[tuple[int, float]]], version: str
) -> None:
    seed, cuts = cut
    _, _, lines = whole_run(version, seed=seed, end=False)
    whole = interleaved(lines.values(), random.Random(seed))
    first = next(i for i, line in enumerate(whole) if "opCount" in line)
    start = max(i for i, line in enumerate(whole) if "Init COMPLETE" in line) + 1
    begin = max(first, start)
    broken = whole[:begin] + torn(whole[begin:], cuts)
    wanted, got = read(whole), read(broken)
    lost = set(got.ranks.filter(pl.col("lost_before") > 0)["rank"])
    before, after = events(wanted), events(got)
    for rank, ops in before.items():
        found = after.get(rank, [])
        if rank in lost:
            # nothing is concluded from the order of what is left
            assert len(found) <= len(ops)
        else:
            assert [e | {"stream": ""} for e in found] == [o | {"stream": ""} for o in ops]


def test_the_name_of_an_operation_that_is_cut_is_no_other_operation() -> None:
    job = Job(2)
    world = job.comm(range(2))
    line = job.call(world, 1, "all_gather")
    head, tail = line.split("Gather:")
    start = [s for said in job.init(world).values() for s in said]
    # the other half of the name never came
    trace = read([*start, job.call(world, 0, "all_gather"), f"Gather:{tail}"])
    assert [len(ops) for ops in events(trace).values()] == [1]
    assert trace.ranks.sort("rank")["lost_before"].to_list() == [0, 1]
    mended = read([*start, job.call(world, 0, "all_gather"), head + line, f"Gather:{tail}"])
    assert [e["op"] for e in events(mended)[1]] == ["all_gather"] * 2


# --------------------------------------------------------------------------------------------------
# Communicators and ranks


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_joins_communicators_over_ranks(version: str) -> None:
    _, comms, lines = whole_run(version)
    trace = read(interleaved(lines.values(), random.Random(1)))
    assert sorted(trace.comms["ranks"].to_list()) == sorted(c.members for c in comms)
    assert trace.ranks["exit"].unique().to_list() == [EXIT["finished"]]
    assert trace.events["state"].unique().to_list() == [STATE["completed"]]
    told_by_size = version in ("2.4", "2.10")
    flagged = trace.events.filter((pl.col("flags") & FLAG["synthetic_comm"]) != 0)
    assert flagged.height == (24 if told_by_size else 0)


def test_pointers_are_used_again_after_a_destroy() -> None:
    for version in ("2.10", "2.18", "2.23"):
        job = Job(4, version)
        world = job.comm(range(4))
        lines: dict[int, list[str]] = {r: list(said) for r, said in job.init(world).items()}
        wanted = []
        for step, groups in enumerate([[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]]):
            for k, members in enumerate(groups):
                c = job.comm(members, pointer=0x55AA00000000 + 0x10000 * k)
                wanted.append(members)
                for r, said in job.init(c).items():
                    lines[r] += [*said, job.call(c, r, "all_reduce", 10 + step), job.end(c, r)]
        trace = read(interleaved(lines.values(), random.Random(2)))
        found = trace.comms.filter(pl.col("ranks").list.len() == 2)["ranks"].to_list()
        assert sorted(found) == sorted(wanted)
        by_comm = trace.events.group_by("comm").agg(pl.col("count").unique(), n=pl.len())
        assert (by_comm["count"].list.len() == 1).all()
        assert by_comm["n"].unique().to_list() == [2]


@pytest.mark.parametrize("version", ["2.18", "2.21", "2.23", "2.30"])
def test_splits_are_joined_by_their_parent(version: str) -> None:
    job = Job(8, version)
    world = job.comm(range(8))
    rows = [job.comm(range(2 * k, 2 * k + 2), parent=world, color=k, split=1) for k in range(4)]
    columns = [job.comm(range(k, 8, 2), parent=world, color=k, split=2) for k in range(2)]
    nested = [job.comm(c.members[:2], parent=c, color=0, split=1) for c in columns]
    lines: dict[int, list[str]] = {r: [] for r in range(8)}
    comms = [world, *rows, *columns, *nested]
    for c in comms:
        for r, said in job.init(c).items():
            lines[r] += [*said, job.call(c, r, "all_reduce", 5)]
    trace = read(interleaved(lines.values(), random.Random(3)))
    assert sorted(trace.comms["ranks"].to_list()) == sorted(c.members for c in comms)


def test_one_process_may_drive_several_ranks() -> None:
    job = Job(4)
    for p in job.processes:
        p.host, p.pid, p.threads = "box", 99, [99]
    world = job.comm(range(4))
    lines = [line for said in job.init(world).values() for line in said]
    lines += [job.call(world, r, "all_reduce", 7 + k) for k in range(3) for r in range(4)]
    trace = read(lines)
    counts = {r: [e["count"] for e in ops] for r, ops in events(trace).items()}
    assert counts == {r: [7, 8, 9] for r in range(4)}


def test_the_rank_by_the_launcher_counts_before_that_in_a_communicator() -> None:
    job = Job(4)
    turned = job.comm([3, 2, 1, 0])
    lines = {r: [*said, job.call(turned, r, "broadcast", root=1)]
             for r, said in job.init(turned).items()}  # fmt: skip
    labelled = [[f"[rank{r}]: {line}" for line in lines[r]] for r in lines]
    trace = read(interleaved(labelled, random.Random(0)))
    assert trace.comms["ranks"].to_list() == [[3, 2, 1, 0]]
    assert trace.events["root"].unique().to_list() == [2]


def test_ranks_come_from_file_names_where_no_line_says_them() -> None:
    job = Job(2)
    world = job.comm(range(2))
    calls = [[job.call(world, r, "all_reduce", 5 + k) for k in range(3)] for r in range(2)]
    trace = read(*calls, file_rank=[1, 0])
    assert {r: ops[0]["count"] for r, ops in events(trace).items()} == {0: 5, 1: 5}
    assert trace.ranks.sort("rank")["path"].to_list() == ["1.log", "0.log"]
    assert trace.comms["ranks"].to_list() == [[0, 1]]


def test_a_copy_of_a_log_is_not_counted_twice() -> None:
    _, _, lines = whole_run("2.18")
    one = interleaved(lines.values(), random.Random(4))
    assert events(read(one, one, lines[0])) == events(read(one))


def test_calls_are_numbered_by_thread() -> None:
    job = Job(2, threads=3)
    world = job.comm(range(2))
    lines = [s for said in job.init(world).values() for s in said]
    lines += [job.call(world, 0, "all_reduce", 5 + t, thread=t) for t in (1, 0, 2, 1)]
    assert [e["lane"] for e in events(read(lines))[0]] == [0, 1, 2, 0]


@pytest.mark.parametrize("version", ["2.4", "2.18", "2.27"])
def test_an_all_to_all_of_messages_is_one_batch(version: str) -> None:
    job = Job(4, version)
    world = job.comm(range(4))
    chance = random.Random(5)
    lines: dict[int, list[str]] = {r: list(said) for r, said in job.init(world).items()}
    for _ in range(3):
        for r in range(4):
            peers = [(q, op) for q in range(4) for op in ("send", "recv")]
            chance.shuffle(peers)
            lines[r] += [
                job.call(world, r, op, 64 + q + r, root=q, bump=k == len(peers) - 1)
                for k, (q, op) in enumerate(peers)
            ]
            lines[r].append(job.call(world, r, "all_reduce", 3))
    trace = read(interleaved(lines.values(), chance))
    sizes = trace.events.filter(pl.col("group").is_not_null()).group_by("rank", "group").len()
    assert sizes["len"].to_list() == [8] * 12
    assert trace.events.filter(pl.col("group").is_null()).height == 12


# --------------------------------------------------------------------------------------------------
# Numbers that are none


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("count 1024", "count 99999999999999999999999999"),
        ("count 1024", "count 18446744073709551615"),
        ("count 1024", "count -1"),
        ("count 1024", f"count {1 << 61}"),
        ("datatype 7", "datatype 123456789012345678901"),
        ("datatype 7", "datatype 99"),
        ("op 0", "op 999999999999"),
        ("root 0", "root 999999999999999999"),
        ("root 0", "root -5"),
        ("opCount 0", "opCount ffffffffffffffffffffffffff"),
        ("comm 0x", "comm 0xffffffffffffffffff"),
        ("stream 0x", "stream 0xffffffffffffffffff"),
        ("[nranks=2]", "[nranks=99999999999999999999]"),
        ("[nranks=2]", "[nranks=0]"),
        ("rank 1 nranks 2", "rank 7 nranks 2"),
        ("rank 1 nranks 2", "rank 99999999999999999999 nranks 2"),
        ("nranks 2", "nranks 4000000000"),
        ("commId 0x", "commId 0xffffffffffffffffffff"),
        ("7003:7003", "99999999999999999999999:1"),
    ],
)
def test_numbers_out_of_range_hurt_nobody(old: str, new: str) -> None:
    job = Job(2)
    world = job.comm(range(2))
    lines = [s for said in job.init(world).values() for s in said]
    lines += [job.call(world, r, op) for op in ("all_reduce", "reduce_scatter") for r in (0, 1)]
    trace = read([line.replace(old, new) for line in lines])
    assert (trace.events["count"].fill_null(0) >= 0).all()


def test_words_of_nccl_in_other_text_are_no_calls() -> None:
    text = [
        "NCCL version 2.18.5+cuda12.1",
        "the docs say: AllReduce: opCount N sendbuff P recvbuff P count N datatype N",
        "gpu-a1:1:1 [0] NCCL INFO comm is ready",
        "opCount opCount opCount [nranks=8] stream 0xzz",
        "\x1b[31mgpu-a1:1:1 [0] NCCL INFO NET/IB : No device found.\x1b[0m",
        ":::: [0] NCCL INFO AllReduce: opCount",
    ]
    p = parsed(extract(frame(text)))
    assert p.calls.is_empty()
    assert p.version == "2.18.5+cuda12.1"


def test_warnings_are_kept_apart() -> None:
    line = "gpu-a1:1:1 [0] enqueue.cc:123 NCCL WARN Mismatched collective detected, please check"
    assert parsed(extract(frame([line]))).warnings["text"].str.contains("Mismatched").all()


# --------------------------------------------------------------------------------------------------
# Verdicts


def verdict(folder: Path, *files: Sequence[str]) -> tuple[str, bool | None, list[dict[str, Any]]]:
    """Verdict, deadlocked and findings of a job of these log files."""
    job = folder / "job"
    job.mkdir()
    for k, lines in enumerate(files):
        (job / f"node{k}.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    report = scan([str(folder)])
    row = report.jobs.row(0, named=True)
    return row["verdict"], row["deadlocked"], report.findings.to_dicts()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("end", [True, False])
def test_a_run_to_its_end_is_healthy(tmp_path: Path, version: str, end: bool) -> None:
    _, _, lines = whole_run(version, end=end)
    assert verdict(tmp_path, interleaved(lines.values(), random.Random(6)))[:2] == (
        "healthy", False,
    )  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_another_operation_at_one_position_is_a_mismatch(tmp_path: Path, version: str) -> None:
    job, comms, lines = whole_run(version, end=False)
    for r in range(4):
        lines[r].append(job.call(comms[0], r, "all_reduce" if r != 3 else "all_gather", 77))
    kind, stuck, found = verdict(tmp_path, interleaved(lines.values(), random.Random(7)))
    assert (kind, stuck, found[0]["culprits"]) == ("mismatch", True, [3])
    assert found[0]["evidence"] == "observed"


@pytest.mark.parametrize("version", ["2.10", "2.18", "2.27"])
def test_ranks_that_are_behind_in_a_log_that_ends_anywhere_are_no_finding(
    tmp_path: Path, version: str
) -> None:
    _, _, lines = whole_run(version, end=False)
    cut = [lines[r][: len(lines[r]) - k] for r, k in zip(range(4), (0, 3, 1, 5), strict=True)]
    kind, stuck, found = verdict(tmp_path, interleaved(cut, random.Random(8)))
    assert (kind, found) == ("healthy", [])
    assert stuck is not True


@pytest.mark.parametrize("version", ["2.18", "2.27"])
def test_logs_that_begin_in_the_middle_do_not_disagree(tmp_path: Path, version: str) -> None:
    _, _, lines = whole_run(version, calls=30, end=False)
    kind, _, found = verdict(tmp_path, *(lines[r][-(20 + 2 * r) :] for r in range(4)))
    assert (kind, found) == ("healthy", [])


def test_a_disagreement_is_found_where_the_beginning_is_lost(tmp_path: Path) -> None:
    job, comms, lines = whole_run("2.18", calls=30, end=False)
    for r in range(4):
        lines[r].append(job.call(comms[0], r, "all_reduce" if r != 2 else "broadcast", 9))
    files = [[f"{r}: {line}" for line in lines[r][-(20 + 2 * r) :]] for r in range(4)]
    assert verdict(tmp_path, interleaved(files, random.Random(1)))[0] == "mismatch"


def test_a_rank_that_ended_is_missed(tmp_path: Path) -> None:
    job, comms, lines = whole_run("2.18", end=False)
    lines[1] += [job.end(c, 1) for c in comms if 1 in c.members]
    for r in (0, 2, 3):
        lines[r].append(job.call(comms[0], r, "all_reduce", 9))
    kind, stuck, found = verdict(tmp_path, interleaved(lines.values(), random.Random(9)))
    assert (kind, stuck, found[0]["culprits"]) == ("missing_participant", True, [1])
    assert found[0]["reason"] == "finished"


def test_a_job_that_was_cancelled_with_ranks_apart_is_not_healthy(tmp_path: Path) -> None:
    _, _, lines = whole_run("2.18", end=False)
    lines[2] = lines[2][:-1]
    end = (
        "slurmstepd: error: *** JOB 4 ON gpu-a1 CANCELLED AT 2025-07-18T22:37:20 DUE TO TIME LIMIT"
    )
    kind, stuck, _ = verdict(tmp_path, [*interleaved(lines.values(), random.Random(1)), end])
    assert (kind, stuck) == ("insufficient_evidence", None)


def test_a_communicator_told_by_size_that_does_not_agree_is_not_believed(tmp_path: Path) -> None:
    job = Job(4, "2.10")
    world = job.comm(range(4))
    pairs = [job.comm([0, 3]), job.comm([1, 2])]
    lines: dict[int, list[str]] = {r: list(said) for r, said in job.init(world).items()}
    for k, c in enumerate(pairs):
        for r, said in job.init(c).items():
            lines[r] += [*said, *(job.call(c, r, "all_reduce", 50 * k + n + 1) for n in range(4))]
    kind, stuck, found = verdict(tmp_path, interleaved(lines.values(), random.Random(1)))
    assert (kind, found) == ("healthy", [])
    assert stuck is not True


def test_labelled_logs() -> None:
    folders = sorted(LOGS.glob("[NR][0-9]*"))
    report = scanned(LOGS)
    failures = {
        f.name: failed
        for f in folders
        if (failed := check(report, f.name, json.loads((f / "expect.json").read_text("utf-8"))))
    }
    assert not failures
    assert folders


def test_calls_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    _, _, lines = whole_run("2.18")
    broken = interleaved(lines.values(), random.Random(1))
    at = next(k for k, line in enumerate(broken) if "opCount 3" in line)
    broken[at] = broken[at][:120]
    kind, _, found = verdict(tmp_path, broken)
    assert (kind, found) == ("healthy", [])
    inputs = scan([str(tmp_path)]).inputs
    assert inputs["status"].to_list() == ["partial"]
    assert inputs["reason"].item() == "lines of 1 calls are torn and cannot be read"


@pytest.mark.parametrize("version", ["2.18", "2.23", "2.30"])
def test_communicators_that_are_created_in_other_orders_are_a_circle(
    tmp_path: Path, version: str
) -> None:
    job = Job(2, version)
    world, a, b = (job.comm([0, 1]) for _ in range(3))
    lines = {r: [*said, job.call(world, r, "all_reduce")] for r, said in job.init(world).items()}
    lines[0] += job.init(a)[0][:-1]
    lines[1] += job.init(b)[1][:-1]
    kind, stuck, found = verdict(tmp_path, lines[0], lines[1])
    assert (kind, stuck, found[0]["culprits"]) == ("init_cycle", True, [0, 1])


def test_a_creation_whose_end_is_not_in_the_log_is_no_finding_where_the_thread_went_on(
    tmp_path: Path,
) -> None:
    _, _, lines = whole_run("2.18", end=False)
    lines[1] = [line for line in lines[1] if "Init COMPLETE" not in line]
    assert verdict(tmp_path, interleaved(lines.values(), random.Random(1)))[0] == "healthy"


def test_a_rank_without_a_log_is_missed_in_a_creation(tmp_path: Path) -> None:
    job = Job(4, "2.18")
    said = job.init(job.comm(range(4)))
    kind, stuck, _ = verdict(tmp_path, *(said[r][:-1] for r in (0, 1, 3)))
    assert (kind, stuck) == ("insufficient_evidence", None)


def test_warnings_go_with_a_finding(tmp_path: Path) -> None:
    job, comms, lines = whole_run("2.18", end=False)
    warning = "NET/IB : req 1/2 tag 4 peer 10.0.0.2<1> collective mismatch error, local size 4"
    for r in range(4):
        lines[r].append(job.call(comms[0], r, "all_reduce", 7 + (r == 3)))
    lines[1].append(f"gpu-a1:7003:7003 [1] transport/net_ib.cc:1295 NCCL WARN {warning}")
    kind, _, found = verdict(tmp_path, interleaved(lines.values(), random.Random(1)))
    details = found[0]["details"]
    details = json.loads(details) if isinstance(details, str) else details
    assert (kind, details["nccl_warnings"]) == ("mismatch", [warning])


@pytest.mark.parametrize("behind", [0, 1])
def test_a_process_that_its_launcher_saw_die_is_a_rank_by_its_number(
    tmp_path: Path, behind: int
) -> None:
    _, _, lines = whole_run("2.18", end=False)
    lines[2] = lines[2][: len(lines[2]) - behind]
    agent = (
        "E0101 10:00:00.000000 1 torch/distributed/elastic/multiprocessing/api.py:874] failed "
        "(exitcode: -9) local_rank: 2 (pid: 7006) of binary: /usr/bin/python"
    )
    kind, stuck, found = verdict(tmp_path, [*interleaved(lines.values(), random.Random(1)), agent])
    assert stuck is not True
    assert kind in ("crashed_rank", "insufficient_evidence")
    if behind:
        assert (kind, found[0]["culprits"]) == ("crashed_rank", [2])


def watchdog(rank: int, number: int, count: int) -> str:
    return (
        f"[rank{rank}]:[E1015 12:41:19.417478853 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog "
        f"caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, "
        f"NumelIn={count}, NumelOut={count}, Timeout(ms)=600000) ran for 600525 milliseconds "
        "before timing out."
    )


def test_what_lies_before_an_operation_that_timed_out_is_complete(tmp_path: Path) -> None:
    job, comms, lines = whole_run("2.18", end=False)
    for r in range(4):
        lines[r].append(job.call(comms[0], r, "all_reduce", 200))
    said = [watchdog(r, 7, 200) for r in range(4)]
    kind, stuck, found = verdict(tmp_path, [*interleaved(lines.values(), random.Random(1)), *said])
    assert (kind, stuck) == ("in_flight", False)
    at = json.loads(found[0]["hangs_at"]) if isinstance(found[0]["hangs_at"], str) else (
        found[0]["hangs_at"]
    )  # fmt: skip
    assert {h["ordinal"] for h in at if h["op"] == "all_reduce"} <= {7}


def test_a_rank_that_is_behind_is_missed_where_the_watchdog_speaks(tmp_path: Path) -> None:
    _, _, lines = whole_run("2.18", end=False)
    lines[2] = lines[2][:-2]
    said = [watchdog(r, 6, 105) for r in (0, 1, 3)]
    kind, stuck, found = verdict(tmp_path, [*interleaved(lines.values(), random.Random(1)), *said])
    assert (kind, stuck, found[0]["culprits"]) == ("missing_participant", None, [2])
    assert found[0]["evidence"] == "inferred"


def test_communicators_without_init_lines_that_are_used_in_other_orders_do_not_disagree(
    tmp_path: Path,
) -> None:
    job = Job(2, "2.18")
    a, b = job.comm([0, 1]), job.comm([0, 1])
    lines: dict[int, list[str]] = {0: [], 1: []}
    for k in range(5):
        for r in (0, 1):
            calls = [(a, "all_reduce", 10 + k), (b, "all_gather", 90 + k)]
            lines[r] += [
                f"[rank{r}]: {job.call(c, r, op, n, stream=0x100 if c is a else 0x200)}"
                for c, op, n in (calls if r == 0 else reversed(calls))
            ]
    kind, stuck, found = verdict(tmp_path, lines[0], lines[1])
    assert (kind, found) == ("healthy", [])
    assert stuck is not True


def test_restarts_in_one_file_without_a_word_about_them_keep_their_processes_apart() -> None:
    _, _, first = whole_run("2.18", end=False, seed=1)
    _, _, second = whole_run("2.18", seed=2)
    again = [
        re.sub(r"gpu-a1:7(\d+):7(\d+)", r"gpu-a1:8\1:8\2", line)
        for line in interleaved(second.values(), random.Random(2))
    ]
    trace = read([*interleaved(first.values(), random.Random(1)), *again])
    assert trace.events.height == 96
    by_comm = trace.events.group_by("comm").agg(ranks=pl.col("rank").n_unique(), n=pl.len())
    assert sorted(by_comm["n"].to_list()) == [12, 12, 12, 12, 24, 24]
