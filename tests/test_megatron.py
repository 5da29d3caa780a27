"""Two real Flight Recorder sets of a 16-rank Megatron job: the ranks with the injected fault."""

from __future__ import annotations

import pytest
from corpus import Labelled, check, labelled, scanned

JOBS = labelled("megatron")
if not JOBS:
    pytest.skip("no labelled data (set DL2GPU_SHARED)", allow_module_level=True)


@pytest.mark.parametrize("job", JOBS, ids=lambda j: j.name)
def test_names_the_faulty_ranks_and_no_other(job: Labelled) -> None:
    """GPU errors on 12 and 14; the interpreter lock held for ever on 10 and 15."""
    failures = check(scanned(job.scanned), job.name, job.expect)
    assert not failures, "\n".join(failures)
