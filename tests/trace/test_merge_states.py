"""States of Flight Recorder beside the record of a program: facts are taken over, or nothing."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from analysis.handmade import START, made, op, wait
from corpus import shared_folder
from suites.test_models import TINY

from dl2gpu.report.model import Report
from dl2gpu.scan import scan
from dl2gpu.suites.dumps import write_dumps
from dl2gpu.suites.inject import FAULTS, inject
from dl2gpu.suites.scheme import Scheme, lowered
from dl2gpu.suites.settle import Settled, settle
from dl2gpu.trace.native_write import write_jsonl
from dl2gpu.trace.readers import read_trace
from dl2gpu.trace.schema import STATE, Trace

TAKEN = "its states are put beside the operations of the stronger record"
DUMPS = "flight_recorder"


def record(folder: Path, trace: Trace) -> Path:
    write_jsonl(trace, folder)
    return folder


def dump(folder: Path, change: Callable[[int, list[dict[str, Any]]], None]) -> None:
    """Changes the entries of each dump."""
    for path in (folder / DUMPS).iterdir():
        document = pickle.loads(path.read_bytes())
        change(int(path.name.rpartition("_")[2]), document["entries"])
        path.write_bytes(pickle.dumps(document, protocol=2))


def reasons(report: Report) -> set[str | None]:
    return set(report.inputs.filter(pl.col("path").str.contains(DUMPS))["reason"])


def told(findings: pl.DataFrame) -> list[tuple[str, tuple[int, ...]]]:
    rows = findings.select("kind", "culprits").iter_rows()
    return sorted((kind, tuple(culprits)) for kind, culprits in rows)


@pytest.mark.parametrize("scheme", ["dp2,tp2,pp2,m2", "dp4,ep2,zero1"])
def test_generated_jobs_are_judged_as_without_dumps(tmp_path: Path, scheme: str) -> None:
    parsed = Scheme.parse(scheme)
    whole = lowered(TINY, parsed, 3)
    jobs = {"healthy": whole}
    for fault in FAULTS:
        one = inject(whole, parsed, 3, fault, np.random.default_rng(1))
        if one is not None:
            jobs[fault] = one.trace
    assert len(jobs) > 12
    for fault, trace in jobs.items():
        record(tmp_path / "alone" / fault, trace)
        job = record(tmp_path / "both" / fault, trace)
        write_dumps(trace, settle(trace), job / DUMPS)
    alone, both = scan(str(tmp_path / "alone")), scan(str(tmp_path / "both"))
    assert reasons(both) == {TAKEN}
    assert set(both.jobs["source_format"]) == {"native+flight_recorder"}
    columns = ["job", "verdict", "deadlocked"]
    assert both.jobs.select(columns).equals(alone.jobs.select(columns))
    for job in both.jobs["job"]:
        mine, theirs = (told(r.findings.filter(job=job)) for r in (both, alone))
        assert mine == theirs, job


AT = {"site": "step t.py:1"}
LAST = op("all_reduce", stream="s", request=9, count=4, dtype="f32", **AT)
REST = [
    op("all_reduce", stream="s", request=1, count=4, dtype="f32", **AT),
    op("all_reduce", stream="s", request=2, count=8, dtype="f32", **AT),
    op("barrier", stream="s", request=3, **AT),
]


def hanging(tmp_path: Path, done: list[int], **how: Any) -> Path:
    """Four ranks that wait for the last of four operations, and how many each device did."""
    trace = made(*[[*REST, LAST, wait(9)]] * 4, exits="alive")
    trace = replace(trace, events=trace.events.with_columns(t_created=START + pl.col("seq") * 1000))
    job = record(tmp_path / "job", trace)
    rows = trace.events.sort("rank", "seq")
    until = np.array(done)[rows["rank"].to_numpy()]
    complete = rows["seq"].to_numpy() < until
    ahead = np.ones(rows.height, np.bool_)
    write_dumps(trace, Settled(ahead, ahead, complete), job / DUMPS, **how)
    return job


def test_a_device_that_hangs_shows_in_the_states_only(tmp_path: Path) -> None:
    job = hanging(tmp_path, [4, 4, 4, 3])
    both = scan(str(job))
    assert told(both.findings) == [("stalled_rank", (3,))]
    assert reasons(both) == {TAKEN}
    shutil.rmtree(job / DUMPS)
    assert "stalled_rank" not in {kind for kind, _ in told(scan(str(job)).findings)}


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(
    ("done", "expected"),
    [
        ([4, 4, 4, 4], []),
        ([3, 3, 3, 3], [("in_flight", ())]),
        ([2, 2, 2, 2], [("in_flight", ())]),
        ([4, 4, 3, 3], [("stalled_rank", (2, 3))]),
    ],
)
def test_how_far_the_devices_came(
    tmp_path: Path, done: list[int], expected: list[Any], timed: bool
) -> None:
    assert told(scan(str(hanging(tmp_path, done, timed=timed))).findings) == expected


def test_dumps_may_lie_among_the_files_of_the_record(tmp_path: Path) -> None:
    job = hanging(tmp_path, [4, 4, 4, 3])
    for path in (job / DUMPS).iterdir():
        path.rename(job / path.name)
    (job / DUMPS).rmdir()
    assert told(scan(str(job)).findings) == [("stalled_rank", (3,))]


def test_what_a_ring_lost_is_complete(tmp_path: Path) -> None:
    job = hanging(tmp_path, [4, 4, 4, 3], ring=2)
    trace = read_trace(str(job))
    states = trace.events.filter(rank=3).sort("seq")["state"].to_list()
    assert states[:3] == [STATE["completed"]] * 3
    assert states[3] in {STATE["scheduled"], STATE["started"]}
    assert told(scan(str(job)).findings) == [("stalled_rank", (3,))]


def test_a_folder_of_that_name_is_a_job_where_no_record_lies_above(tmp_path: Path) -> None:
    job = hanging(tmp_path, [4, 4, 4, 3])
    for path in job.glob("*.jsonl"):
        path.unlink()
    assert scan(str(tmp_path)).jobs["job"].to_list() == [f"job/{DUMPS}"]


def test_dumps_are_of_the_attempt_that_their_folder_names(tmp_path: Path) -> None:
    first = hanging(tmp_path / "a", [4, 4, 4, 4])
    second = hanging(tmp_path / "b", [4, 4, 4, 3])
    job = shutil.copytree(first, tmp_path / "job", ignore=shutil.ignore_patterns(DUMPS))
    for path in second.glob("rank_*.jsonl"):
        lines = path.read_text().splitlines()
        header = json.loads(lines[0]) | {"attempt": 1}
        name = path.name.replace(".jsonl", ".attempt_1.jsonl")
        (job / name).write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    shutil.copytree(second / DUMPS, job / DUMPS / "attempt_1")
    report = scan(str(job))
    assert told(report.findings) == [("stalled_rank", (3,))]
    attempts = report.jobs.sort("attempt").select("attempt", "source_format", "verdict").rows()
    assert attempts == [
        (0, "native", "healthy"), (1, "native+flight_recorder", "stalled_rank"),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Dumps that must not speak


def other_sizes(rank: int, entries: list[dict[str, Any]]) -> None:
    entries[1]["input_sizes"] = entries[1]["output_sizes"] = [[9]]


def other_call(rank: int, entries: list[dict[str, Any]]) -> None:
    entries[1]["profiling_name"] = "nccl:broadcast"


def yesterday(rank: int, entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        entry["time_created_ns"] -= 86_400 * 10**9


def tomorrow(rank: int, entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        entry["time_created_ns"] += 86_400 * 10**9


def other_group(rank: int, entries: list[dict[str, Any]]) -> None:
    entries[-1]["process_group"] = ("77", "undefined")


def active_only(rank: int, entries: list[dict[str, Any]]) -> None:
    del entries[1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_sizes, "other sizes"),
        (other_call, "other operations"),
        (yesterday, "another time"),
        (tomorrow, "another time"),
        (other_group, "that the record lacks"),
        (active_only, "active operations only"),
    ],
)
def test_dumps_of_another_run_say_nothing(
    tmp_path: Path, change: Callable[[int, list[dict[str, Any]]], None], why: str
) -> None:
    job = hanging(tmp_path, [4, 4, 4, 3])
    dump(job, change)
    report = scan(str(job))
    assert report.jobs["verdict"].to_list() == ["healthy"]  # as of the record alone
    (reason,) = reasons(report)
    assert reason is not None
    assert reason.startswith("its states are not used: ")
    assert why in reason


def test_a_rank_without_a_dump_leaves_its_states_unknown(tmp_path: Path) -> None:
    job = hanging(tmp_path, [4, 4, 4, 3], missing=[1])
    report = scan(str(job))
    assert report.jobs["verdict"].to_list() == ["healthy"]
    assert {str(r).rpartition(": ")[2] for r in reasons(report)} == {
        "there is no dump of some ranks of the record"
    }


def test_states_that_the_record_has_are_kept(tmp_path: Path) -> None:
    job = hanging(tmp_path, [2, 2, 2, 2])
    for path in job.glob("*.jsonl"):
        text = path.read_text().replace('"seq":2,', '"seq":2,"state":"completed",')
        assert "completed" in text
        path.write_text(text)
    states = read_trace(str(job)).events.filter(rank=0).sort("seq")["state"].to_list()
    assert states[:3] == [STATE["completed"]] * 3
    assert states[3] < STATE["completed"]


# --------------------------------------------------------------------------------------------------
# Groups with the same members


def two_groups(tmp_path: Path, second: int, apart_ns: int) -> Report:
    """Two ranks with two unnamed groups, which reduce 4 and ``second`` elements each."""
    ops = []
    for k, (comm, count) in enumerate([("a", 4), ("b", second)] * 3):
        ops.append(
            op("all_reduce", comm, stream=f"s:{comm}", request=k, count=count, dtype="f32", **AT)
        )
    trace = made([*ops, wait(5)], [*ops, wait(5)], comms={"a": [0, 1], "b": [0, 1]}, exits="alive")
    trace = replace(
        trace, events=trace.events.with_columns(t_created=START + pl.col("seq") * apart_ns)
    )
    job = record(tmp_path / "job", trace)
    rows = trace.events.sort("rank", "seq")
    ahead = np.ones(rows.height, np.bool_)
    # what the second group does last is not complete
    write_dumps(trace, Settled(ahead, ahead, rows["seq"].to_numpy() < 5), job / DUMPS)

    def later(rank: int, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            entry["time_created_ns"] += 1000

    dump(job, later)
    return scan(str(job))


@pytest.mark.parametrize(
    ("second", "apart_ns", "joined"), [(8, 0, True), (4, 1_000_000, True), (4, 0, False)],
    ids=["by sizes", "by times", "by nothing"],
)  # fmt: skip
def test_groups_of_the_same_members_are_told_apart_by_their_use(
    tmp_path: Path, second: int, apart_ns: int, joined: bool
) -> None:
    report = two_groups(tmp_path, second, apart_ns)
    assert (reasons(report) == {TAKEN}) == joined
    if joined:
        (finding,) = report.findings.to_dicts()
        assert (finding["kind"], finding["hangs_at"][0]["comm"]) == ("in_flight", "b")


# --------------------------------------------------------------------------------------------------
# The labelled cases


def test_cases_with_their_dumps(tmp_path: Path) -> None:
    """Each case as a program and as dumps, together: the verdict of the program alone."""
    shared = shared_folder()
    if shared is None:
        pytest.skip("no labelled data beside the checkout")
    for form in sorted((shared / "rendered").glob("*__fr*")):
        case = shared / "cases" / form.name.split("__")[0]
        no_labels = shutil.ignore_patterns("expect.json")
        for where in ("alone", "both"):
            shutil.copytree(case, tmp_path / where / form.name, ignore=no_labels)
        shutil.copytree(form, tmp_path / "both" / form.name / DUMPS, ignore=no_labels)
    alone, both = scan(str(tmp_path / "alone")), scan(str(tmp_path / "both"))
    columns = ["job", "verdict", "deadlocked"]
    assert both.jobs.select(columns).equals(alone.jobs.select(columns))
    why = both.inputs.filter(pl.col("path").str.contains(DUMPS))
    taken = why.group_by("job").agg((pl.col("reason") == TAKEN).all())["reason"]
    assert len(taken) > 70
    assert taken.mean() > 0.8  # type: ignore[operator]
