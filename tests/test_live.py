"""Real PyTorch jobs on gloo, in native form and as Flight Recorder dumps: each job passes."""

from __future__ import annotations

import pytest
from corpus import Labelled, check, labelled, scanned

JOBS = labelled("live")
if not JOBS:
    pytest.skip("no labelled data (set DL2GPU_SHARED)", allow_module_level=True)


@pytest.mark.parametrize("job", JOBS, ids=lambda j: "/".join(j.path.parts[-2:]))
def test_job(job: Labelled) -> None:
    failures = check(scanned(job.scanned), job.name, job.expect)
    assert not failures, "\n".join([str(job.expect.get("note") or job.expect["title"]), *failures])
