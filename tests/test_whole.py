"""All labelled data in one scan: every file is accounted for, every job has its verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus import LOGS, Labelled, check, found, labelled, scanned, shared_folder

from dl2gpu.report.model import Report

SHARED = shared_folder()
if SHARED is None:
    pytest.skip("no labelled data (set DL2GPU_SHARED)", allow_module_level=True)
NOT_A_DEADLOCK = ("data/kineto", "data/execution_trace", "data/chakra")


def whole() -> Report:
    assert SHARED is not None
    return scanned(SHARED)


def test_every_file_is_accounted_for() -> None:
    assert SHARED is not None
    said = whole().inputs
    there = {p.relative_to(SHARED).as_posix() for p in SHARED.rglob("*") if p.is_file()}
    paths = said["path"].to_list()
    assert len(paths) == len(set(paths))
    assert there <= set(paths)
    # what is more is in archives
    assert all(any(p.startswith(f"{a}/") for a in there) for p in set(paths) - there)
    unexplained = said.filter((said["status"] != "read") & said["reason"].is_null())
    assert unexplained.is_empty()


@pytest.mark.parametrize("name", ["cases", "rendered", "logs", "live"])
def test_every_labelled_job_has_its_verdict(name: str) -> None:
    assert SHARED is not None
    jobs = labelled(name)
    assert jobs
    report = whole()
    wrong = {}
    for job in jobs:
        folder = _below_shared(job)
        if len(list((SHARED / folder).iterdir())) < 2:
            continue  # its label alone
        label = folder if found(report, folder).jobs else _below(report, folder)
        if failures := check(report, label, job.expect):
            wrong[folder] = failures
    for known in KNOWN:
        wrong.pop(known, None)
    assert not wrong, wrong


KNOWN = ("data/live/native/31_all_to_all_split_mismatch",)
"""The record is that of a healthy run (see test_live)."""


def _below_shared(job: Labelled) -> str:
    """The logs are kept with the tests, and lie there as well."""
    assert SHARED is not None
    if job.scanned == LOGS:
        return f"logs/{job.name}"
    return job.path.relative_to(SHARED).as_posix()


def _below(report: Report, folder: str) -> str:
    """The job of a folder whose files lie below it."""
    names = {j for j in report.jobs["folder"] if j.startswith(f"{folder}/")}
    assert len(names) == 1, f"one job in {folder}, found {sorted(names)}"
    return str(names.pop())


def test_single_profiles_are_no_deadlock() -> None:
    jobs = [j for j in whole().jobs.to_dicts() if j["folder"].startswith(NOT_A_DEADLOCK)]
    assert len(jobs) >= 6
    assert {j["verdict"] for j in jobs} <= {"healthy", "insufficient_evidence"}
    assert not any(j["deadlocked"] for j in jobs)
    dlrm = [j for j in jobs if "dlrm" in j["folder"]]
    assert [j["verdict"] for j in dlrm] == ["healthy"] * 2
    assert all(Path(j["folder"]).parts[0] == "data" for j in dlrm)


def test_labels_of_other_sets_are_of_the_same_jobs() -> None:
    """The sets that other tests scan one by one hold all labelled jobs that there are."""
    assert SHARED is not None
    known: set[Path] = {
        SHARED / _below_shared(j) for name in ("cases", "rendered", "logs") for j in labelled(name)
    }
    there = {p.parent for name in ("cases", "rendered", "logs")
             for p in (SHARED / name).rglob("expect.json")}  # fmt: skip
    assert there == known
