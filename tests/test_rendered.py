"""The cases as the files PyTorch would have left (Flight Recorder forms): each job passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from corpus import Labelled, check, divergence_rate, labelled, scanned

JOBS = labelled("rendered")
if not JOBS:
    pytest.skip("no labelled data (set DL2GPU_SHARED)", allow_module_level=True)


@pytest.mark.parametrize("job", JOBS, ids=lambda j: j.name)
def test_job(job: Labelled) -> None:
    failures = check(scanned(job.scanned), job.name, job.expect)
    assert not failures, "\n".join([str(job.expect.get("note") or job.expect["title"]), *failures])


def test_first_divergence(record_property: Callable[[str, object], None]) -> None:
    """A rate to watch, not a promise: where sequences part is often a matter of judgement."""
    right, of = divergence_rate("rendered")
    record_property("first_divergence", f"{right} of {of}")
