"""NCCL's and RCCL's logs: every version, whatever launchers and torn lines do to them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_writer import NAMES, PREFIXES, Comm, Job, frame, interleaved

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
        text = p["prefix"].format(line, label=r, pid=job.processes[r].pid)
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
            rest = iter(ops)
            assert all(any(e == o for o in rest) for e in found)
        else:
            assert [e | {"stream": ""} for e in found] == [o | {"stream": ""} for o in ops]
