"""A job on which the analysis itself fails takes no other job with it."""

from __future__ import annotations

from pathlib import Path

import pytest

import dl2gpu.analysis
from dl2gpu.analysis import Analysis, analyse
from dl2gpu.scan import scan
from dl2gpu.trace.readers import read_trace
from dl2gpu.trace.schema import Trace, one_job, validate

DEMO = str(Path(__file__).parents[1] / "datasets" / "demo")


def test_the_other_jobs_keep_their_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scan(DEMO)

    def failing(trace: Trace, workers: int | None = None, engine: str = "cpu") -> Analysis:
        if trace.jobs.height > 1 or "uneven-batches" in trace.jobs["folder"].to_list():
            raise ZeroDivisionError("as a test")
        return analyse(trace, workers, engine)

    monkeypatch.setattr(dl2gpu.analysis, "analyse", failing)
    report = scan(DEMO)
    columns = ["job", "verdict", "deadlocked", "events"]
    kept = whole.jobs.filter(whole.jobs["folder"] != "uneven-batches")
    assert report.jobs.select(columns).equals(kept.select(columns))
    said = report.inputs.filter(report.inputs["path"].str.starts_with("uneven-batches/"))
    assert said["status"].unique().to_list() == ["quarantined"]
    assert "ZeroDivisionError: as a test" in said["reason"][0]
    assert report.findings.height == whole.findings.height - 1


def test_one_job_of_many_is_a_whole_trace() -> None:
    trace = read_trace(f"{DEMO}/two-groups-inverted")
    both = read_trace(f"{DEMO}/slow-data-loader")
    assert trace.jobs.height == both.jobs.height == 1
    alone = one_job(trace, 0)
    assert validate(alone).events.equals(trace.events)
    assert alone.comms.equals(trace.comms)
