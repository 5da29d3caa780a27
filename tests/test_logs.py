"""Jobs of which there is only text: labelled jobs, stories in every layout, logs of real jobs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from corpus import Labelled, check, labelled, scanned, shared_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from log_stories import STORIES, Expected
from log_writer import LAUNCHERS, NAMES_RANKS, Line, files

from dl2gpu.analysis import Analysis, analyse
from dl2gpu.trace.inputs import TraceFile
from dl2gpu.trace.log import read
from dl2gpu.trace.schema import validate

JOBS = labelled("logs")


@pytest.mark.parametrize("job", JOBS, ids=lambda j: j.name)
def test_labelled_job(job: Labelled) -> None:
    failures = check(scanned(job.scanned), _in_report(job), job.expect)
    assert not failures, "\n".join([str(job.expect.get("note") or job.expect["title"]), *failures])


def _in_report(job: Labelled) -> str:
    report = scanned(job.scanned)
    names = [j for j in report.jobs["job"] if j == job.name or j.startswith(f"{job.name}/")]
    assert len(set(names)) == 1, f"one job for the folder {job.name}, found {sorted(set(names))}"
    return str(names[0])


def test_every_labelled_job_is_there() -> None:
    assert len(JOBS) == 51


def test_every_file_is_accounted_for() -> None:
    job = JOBS[0]
    report = scanned(job.scanned)
    listed = set(report.inputs["path"])
    stored = {p.relative_to(job.scanned).as_posix() for p in job.scanned.rglob("*") if p.is_file()}
    assert listed == stored
    logs = report.inputs.filter(pl.col("format") == "log")
    assert set(logs["status"]) <= {"read", "partial"}  # one has torn lines


# --------------------------------------------------------------------------------------------------
# Stories


def _reports(jobs: dict[str, dict[str, bytes]], folder: Path) -> dict[str, Analysis]:
    """What the analysis says of each of several jobs, given as names and contents of files."""
    found = []
    for job, written in jobs.items():
        (folder / job).mkdir()
        for name, content in written.items():
            path = folder / job / name
            path.write_bytes(content)
            found.append(TraceFile(f"{job}/{name}", str(path), "log", job, len(content)))
    trace, inputs = read(found)
    assert {i.status for i in inputs} <= {"read", "ignored"}
    whole = analyse(validate(trace, "jobs"))
    names = dict(trace.jobs.select("job", "name").iter_rows())
    return {
        job: Analysis(
            [f for f in whole.findings if names[f["job"]] == job],
            whole.jobs.filter(pl.col("job").replace_strict(names, return_dtype=pl.String) == job),
        )
        for job in jobs
    }


def _failures(got: Analysis, expected: Expected) -> list[str]:
    kinds = {f["kind"] for f in got.findings} | set(got.jobs["verdict"])
    said = got.jobs["deadlocked"].to_list()
    deadlocked = True if True in said else (None if None in said else False)
    culprits = {r for f in got.findings for r in f["culprits"]}
    failures = []
    if not kinds & set(expected.kinds):
        failures.append(f"kinds: expected one of {expected.kinds}, found {sorted(kinds)}")
    if deadlocked not in expected.deadlocked:
        failures.append(f"deadlocked: expected {expected.deadlocked}, found {deadlocked}")
    if expected.culprits is not None and culprits != expected.culprits:
        failures.append(f"culprits: expected {set(expected.culprits)}, found {culprits}")
    if culprits & expected.innocent:
        failures.append(f"culprits: {culprits & expected.innocent} are innocent")
    return failures


def _layouts(expected: Expected) -> list[tuple[str, bool]]:
    return [
        (launcher, per_rank)
        for launcher in LAUNCHERS
        for per_rank in (False, True)
        if (expected.per_rank or not per_rank)
        and (not expected.needs_ranks or per_rank or launcher in NAMES_RANKS)
    ]


@pytest.mark.parametrize(
    ("name", "age"), [(name, age) for name, (_, e) in STORIES.items() for age in e.ages]
)
def test_story_in_every_layout(name: str, age: str, tmp_path: Path) -> None:
    tell, expected = STORIES[name]
    story = tell(age)
    got = _reports(
        {
            f"{launcher}, {'a file a rank' if per_rank else 'one file'}": files(
                story, launcher, per_rank=per_rank
            )
            for launcher, per_rank in _layouts(expected)
        },
        tmp_path,
    )
    failures = {job: _failures(found, expected) for job, found in got.items()}
    assert not any(failures.values()), failures


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_verdict_does_not_depend_on_the_layout(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = data.draw(st.sampled_from(sorted(STORIES)))
    tell, expected = STORIES[name]
    age = data.draw(st.sampled_from(expected.ages))
    launcher, per_rank = data.draw(st.sampled_from(_layouts(expected)))
    glue = data.draw(st.sets(st.integers(0, 6), max_size=3))
    seed = data.draw(st.none() | st.integers(0, 1 << 30))
    written = files(
        tell(age),
        launcher,
        per_rank=per_rank,
        glue=glue,
        colour=data.draw(st.booleans()),
        newline=data.draw(st.sampled_from(["\n", "\r\n"])),
        encoding=data.draw(st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "latin-1"])),
        shuffle=None if seed is None else lambda order: _by_rank(order, seed),
    )
    got = _reports({"job": written}, tmp_path_factory.mktemp("story"))
    failures = _failures(got["job"], expected)
    assert not failures, f"{name}, {age}, {launcher}, one file a rank: {per_rank}: {failures}"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_first_line_is_read_whatever_stands_before_it(encoding: str, tmp_path: Path) -> None:
    """The first line says which ranks they are, and here it is the one that counts."""
    name = "library_error_everywhere"
    tell, expected = STORIES[name]
    for age in expected.ages:
        written = files(tell(age), "srun", per_rank=True, encoding=encoding)
        assert not _failures(_reports({age: written}, tmp_path)[age], expected)


def _by_rank(order: list[Line], seed: int) -> list[Line]:
    """Lines of different ranks change places where less than half a second lies between them."""
    rng = random.Random(seed)
    delay = {rank: rng.uniform(0, 0.4) for rank in sorted({line.rank or 0 for line in order})}
    return sorted(order, key=lambda line: line.t + delay[line.rank or 0])


# --------------------------------------------------------------------------------------------------
# Logs of real jobs on gloo: standard error of each rank

_ACCEPTED = {
    "healthy": {"healthy"},
    "mismatch": {"mismatch", "insufficient_evidence"},
    "size_mismatch": {"mismatch", "insufficient_evidence", "healthy"},
    "missing_participant": {"missing_participant", "insufficient_evidence", "crashed_rank"},
    "unmatched_p2p": {"unmatched_p2p", "insufficient_evidence"},
    "crashed_rank": {"crashed_rank", "missing_participant"},
    "stalled_rank_not_deadlock": {"stalled_rank", "insufficient_evidence", "missing_participant"},
}
"""Of a log on standard error alone: it names no operation, so that little can be claimed.

An all-to-all with wrong splits that fit by chance leaves no line at all.
"""


def _live() -> list[tuple[str, dict[str, Any]]]:
    shared = shared_folder()
    if shared is None or not (shared / "data/live/labels.csv").is_file():
        return []
    labels = pl.read_csv(shared / "data/live/labels.csv", infer_schema=False)
    rows = {row["scenario"]: row for row in labels.iter_rows(named=True)}
    folders = sorted((shared / "data/live/logs").iterdir())
    return [(f.name, rows[f.name]) for f in folders if f.name in rows]


LIVE = _live()


@pytest.mark.skipif(not LIVE, reason="no labelled data (set DL2GPU_SHARED)")
@pytest.mark.parametrize(("name", "label"), LIVE, ids=[name for name, _ in LIVE])
def test_live_log(name: str, label: dict[str, Any]) -> None:
    shared = shared_folder()
    assert shared is not None
    folder = shared / "data" / "live" / "logs" / name
    found = [
        TraceFile(f.name, str(f), "log", name, f.stat().st_size) for f in sorted(folder.iterdir())
    ]
    trace, _ = read(found)
    got = analyse(validate(trace, name))
    kinds = set(got.jobs["verdict"]) | {f["kind"] for f in got.findings} or {"healthy"}
    assert kinds <= _ACCEPTED[label["verdict"]], f"{label['cause']}: {kinds}"
    if label["verdict"] == "healthy":
        assert not got.findings
    guilty = {int(r) for r in (label["guilty_ranks"] or "").split()}
    accused = {r for f in got.findings for r in f["culprits"]}
    assert accused <= guilty, f"guilty is {guilty}, accused {accused}"
