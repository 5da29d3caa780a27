"""Jobs of which several formats hold a part: the dumps of some ranks, and a log of the job."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl
import pytest

from dl2gpu.report.model import Report
from dl2gpu.scan import scan
from dl2gpu.trace.readers import read_trace

DEMO = Path(__file__).resolve().parents[1] / "datasets" / "demo"
STUCK = DEMO / "all-present-none-completes"
"""Four dumps: all ranks stand in one all-reduce of the world."""
LAST = read_trace(str(STUCK)).events.filter(pl.col("rank") == 3).sort("seq").row(-1, named=True)

CRASH = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 57, in main
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.
"""


def timeout(
    rank: int, number: int = LAST["ordinal"], op: str = "ALLREDUCE", n: int | None = None
) -> str:
    """What a watchdog prints that gives up."""
    numel = LAST["count"] if n is None else n
    at = f"[rank{rank}]:[E210 21:19:36.828482826 ProcessGroupNCCL.cpp:607]"
    work = f"SeqNum={number}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=1800000"
    return (
        f"{at} [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL({work}) "
        "ran for 1800624 milliseconds before timing out.\n"
        f"{at} [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at work "
        f"sequence id: {number} PG status: last enqueued work: {number}, "
        f"last completed work: {number - 1}\n"
    )


def scanned(folder: Path, log: str, dumps: int = 3) -> Report:
    """The job with the dumps of its first ranks, and a log."""
    for rank in range(dumps):
        shutil.copy(STUCK / f"nccl_trace_rank_{rank}", folder)
    if log:
        (folder / "job.log").write_text(log)
    report = scan(str(folder))
    assert report.jobs.height == 1
    return report


@pytest.mark.parametrize(
    ("log", "verdict", "culprits", "source"),
    [
        ("", "insufficient_evidence", [], "flight_recorder"),
        (timeout(3), "in_flight", [], "flight_recorder+log"),
        (CRASH + timeout(0) + timeout(1), "crashed_rank", [3], "flight_recorder+log"),
        (timeout(3, op="BROADCAST", n=1), "mismatch", [3], "flight_recorder+log"),
        # an older statement than the others' dumps says nothing of where rank 3 is
        (timeout(3, LAST["ordinal"] - 2), "insufficient_evidence", [], "flight_recorder+log"),
    ],
    ids=["no log", "same call", "died", "other call", "older"],
)
def test_a_log_stands_in_for_a_dump(
    tmp_path: Path, log: str, verdict: str, culprits: list[int], source: str
) -> None:
    report = scanned(tmp_path, log)
    job = report.jobs.row(0, named=True)
    assert (job["verdict"], job["source_format"]) == (verdict, source)
    named = {r for ranks in report.findings["culprits"] for r in ranks}
    assert named == set(culprits)
    assert job["ranks_present"] == ([0, 1, 2] if not log else [0, 1, 2, 3])


def test_where_there_are_dumps_the_log_changes_nothing(tmp_path: Path) -> None:
    told = "".join(timeout(rank) for rank in range(4))
    report, alone = scanned(tmp_path, told, dumps=4), scan(str(STUCK))
    assert report.findings["kind"].to_list() == alone.findings["kind"].to_list() == ["in_flight"]
    assert report.findings["fingerprint"].equals(alone.findings["fingerprint"])
    (reason,) = report.inputs.filter(path="job.log")["reason"]
    assert "stronger record" in reason


def test_the_log_alone(tmp_path: Path) -> None:
    told = "".join(timeout(rank) for rank in range(4))
    report = scanned(tmp_path, told, dumps=0)
    assert report.jobs["verdict"].to_list() == ["in_flight"]
    assert report.jobs["source_format"].to_list() == ["log"]
