"""Public bug reports reduced to their mechanism, and small MPI programs: each job passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from corpus import Labelled, check, divergence_rate, labelled, scanned

JOBS = labelled("cases")
if not JOBS:
    pytest.skip("no labelled data (set DL2GPU_SHARED)", allow_module_level=True)


@pytest.mark.parametrize("job", JOBS, ids=lambda j: j.name)
def test_job(job: Labelled) -> None:
    failures = check(scanned(job.scanned), job.name, job.expect)
    assert not failures, "\n".join([str(job.expect.get("note") or job.expect["title"]), *failures])


@pytest.mark.parametrize("verdict", ["healthy", "cycle", "stalled_rank"])
def test_no_single_verdict_passes(verdict: str) -> None:
    """The check itself: a report that says the same of every job fails on most of them."""
    finding = {"id": "1", "kind": verdict, "culprits": [0], "first_divergence": None}
    row = {"job": "j", "verdict": verdict, "deadlocked": verdict == "cycle", "findings": ["1"]}
    report = {"jobs": [row], "findings": [] if verdict == "healthy" else [finding]}
    passing = [job.name for job in JOBS if not check(report, "j", job.expect)]
    assert len(passing) < 0.45 * len(JOBS)
    assert check(report, "another", JOBS[0].expect) == ["the job is not in the report"]


def test_first_divergence(record_property: Callable[[str, object], None]) -> None:
    """A rate to watch, not a promise: where sequences part is often a matter of judgement."""
    right, of = divergence_rate("cases")
    record_property("first_divergence", f"{right} of {of}")
