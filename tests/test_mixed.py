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


TRACEBACK = """\
Traceback (most recent call last):
  File "/workspace/train.py", line 212, in <module>
    main()
  File "/workspace/train.py", line 100, in main
    labels = batch["labels"]
KeyError: 'labels'
"""
QUIET = "".join(f"batch loaded from shard {n}\n" for n in range(60))


@pytest.mark.parametrize(
    ("name", "text", "died"),
    [
        ("rank_3.log", QUIET + TRACEBACK, True),
        ("rank_3.log", TRACEBACK + QUIET, False),  # caught: the program went on
        ("train.log", QUIET + TRACEBACK, False),  # nobody says whose it is
        ("rank_3.log", QUIET + TRACEBACK.replace("KeyError", "torch.distributed.DistBackendError"),
         False),  # let down by another
    ],
    ids=["ends", "caught", "nobody", "secondary"],
)  # fmt: skip
def test_an_exception_beside_dumps_is_how_a_rank_died(
    tmp_path: Path, name: str, text: str, died: bool
) -> None:
    """A log with no line about communication: of a job with dumps it still tells why one lacks."""
    for rank in range(3):
        shutil.copy(STUCK / f"nccl_trace_rank_{rank}", tmp_path)
    (tmp_path / name).write_text(text)
    report = scan(str(tmp_path))
    (job,) = report.jobs.to_dicts()
    culprits = {r for ranks in report.findings["culprits"] for r in ranks}
    want = ("crashed_rank", {3}) if died else ("insufficient_evidence", set())
    assert (job["verdict"], culprits) == want
    (told,) = report.inputs.filter(pl.col("path") == name).to_dicts()
    ignored = name == "train.log" or text.startswith("Traceback")
    assert told["status"] == ("ignored" if ignored else "read")


def test_an_exception_alone_is_no_job(tmp_path: Path) -> None:
    (tmp_path / "rank_3.log").write_text(QUIET + TRACEBACK)
    shutil.copytree(STUCK, tmp_path / "job")
    report = scan(str(tmp_path))
    assert report.jobs["job"].to_list() == ["job"]
    assert report.inputs.filter(pl.col("path") == "rank_3.log")["status"].to_list() == ["ignored"]


@pytest.mark.parametrize(
    "text",
    [
        "NCCL version 2.20.5+cuda12.4\n",
        "".join(f"step {n} loss 1.0\n" for n in range(10, 14)),
        "NCCL version 2.20.5+cuda12.4\n" + TRACEBACK.replace("KeyError", "NCCL error"),
    ],
    ids=["version", "steps", "secondary"],
)
def test_a_log_that_tells_no_operation_accuses_nobody(tmp_path: Path, text: str) -> None:
    """That rank 3 has no dump, and a log that does not speak of its operations, is no stall."""
    for rank in range(3):
        shutil.copy(STUCK / f"nccl_trace_rank_{rank}", tmp_path)
    (tmp_path / "rank_3.log").write_text(text)
    report = scan(str(tmp_path))
    (job,) = report.jobs.to_dicts()
    (finding,) = report.findings.to_dicts()
    assert (job["verdict"], job["deadlocked"]) == ("insufficient_evidence", None)
    assert (finding["reason"], finding["culprits"]) == ("no_data", [])
    assert "rank 3" in finding["summary"]
