"""Shards on other workers, with whatever may happen to them: the same report, or a clear error."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_scan import accounted, bytes_of, fine, stuck

import dl2gpu.analysis
from dl2gpu import __version__, cluster, shard
from dl2gpu.analysis import Analysis
from dl2gpu.cluster import ClusterError
from dl2gpu.engine.choose import DeviceMemoryError, EngineError, missing
from dl2gpu.journal import Journal, parts_of
from dl2gpu.report.model import Report
from dl2gpu.scan import Step, scan
from dl2gpu.shard import Result, Task, halves
from dl2gpu.trace.discover import discover
from dl2gpu.trace.parts import shards
from dl2gpu.trace.schema import Trace

SCAN = importlib.import_module("dl2gpu.scan")

Process = subprocess.Popen[bytes]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Forty jobs, every fourth of them stuck."""
    root = tmp_path / "corpus"
    for n in range(40):
        (stuck if n % 4 == 0 else fine)(root / f"job{n:02}")
    return root


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One job a shard."""
    monkeypatch.setattr(SCAN, "SHARD_BYTES", 1)
    monkeypatch.setattr(cluster, "_LEAST_BYTES", 1)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[str, Process, list[Process]]]:
    """Address and process of a Dask scheduler, and the processes of two workers (their nannies)."""
    from distributed import Client

    file = tmp_path / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(
        [*dask, "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard",
         "--scheduler-file", str(file)], **quiet,
    )  # fmt: skip
    workers = [
        subprocess.Popen(
            [*dask, "worker", "--scheduler-file", str(file), "--nthreads", "1", "--no-dashboard",
             "--local-directory", str(tmp_path)], cwd=tmp_path, **quiet,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        with Client(scheduler_file=str(file), timeout=60, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            address = client.scheduler.address
        yield address, first, workers
    finally:
        for process in (*workers, first):
            for child in _children(process):
                _kill(child.pid)
            process.kill()
            process.wait()


def _children(process: Process) -> list[Any]:
    import psutil

    try:
        return list(psutil.Process(process.pid).children(recursive=True))
    except psutil.Error:
        return []


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGKILL)


def _command(process: Any) -> str:
    import psutil

    try:
        return str(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def content(report: Report) -> bytes:
    """The report, but for time and place."""
    return bytes_of(
        Report(
            report.findings,
            report.jobs,
            report.inputs,
            {k: v for k, v in report.summary.items() if k != "cluster"},
        )
    )


# --------------------------------------------------------------------------------------------------
# Elsewhere


def test_local_processes_give_the_same_report(demo: Path, small: None) -> None:
    there = scan(str(demo), cluster="local", workers=2)
    assert there.summary["cluster"] == "local"
    assert content(there) == content(scan(str(demo)))


def test_behind_an_address(
    corpus: Path, small: None, scheduler: tuple[str, Process, list[Process]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(corpus.parent)  # the workers are elsewhere
    there = scan("corpus", cluster=scheduler[0])
    assert there.summary["jobs"] == 40
    assert content(there) == content(scan("corpus"))


@pytest.mark.parametrize("seed", range(3))
def test_workers_killed_at_random_moments(
    demo: Path, small: None, scheduler: tuple[str, Process, list[Process]], seed: int
) -> None:
    address, _, nannies = scheduler
    rng = random.Random(seed)
    moments = set(rng.sample(range(12), 3))
    killed = 0

    def kill(step: Step) -> None:
        nonlocal killed
        if step.jobs not in moments:
            return
        moments.discard(step.jobs)
        # of a nanny's children one is the worker, the other looks after its semaphores
        children = [child for nanny in nannies for child in _children(nanny)]
        found = [child for child in children if "spawn_main" in _command(child)]
        if found:
            _kill(rng.choice(found).pid)
            killed += 1

    there = scan(str(demo), cluster=address, progress=kill)
    assert killed
    assert content(there) == content(scan(str(demo)))


DEADLY = """
import os
from dl2gpu import shard
real = shard.run

def run(task):
    if any("job04" in file.path for file in task.files):
        os._exit(1)
    return real(task)

def dask_setup(worker):
    shard.run = run
"""


def test_a_job_that_kills_its_workers(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is quarantined with the reason; the jobs of its shard are not."""
    import dask

    preload = tmp_path / "deadly.py"
    preload.write_text(DEADLY)
    monkeypatch.setattr(cluster, "_LEAST_BYTES", 1)
    with dask.config.set(
        {"distributed.worker.preload": [str(preload)], "distributed.scheduler.allowed-failures": 1}
    ):
        there = scan(str(corpus), cluster="local", workers=2)
    accounted(there, corpus)
    lost = there.inputs.filter(there.inputs["status"] == "quarantined")
    assert lost["path"].to_list() == ["job04/rank_0.jsonl", "job04/rank_1.jsonl"]
    assert lost["reason"].str.contains("too little memory").all()
    whole = scan(str(corpus))
    columns = ["job", "verdict", "deadlocked", "events"]
    kept = whole.jobs.filter(whole.jobs["job"] != "job04").select(columns)
    assert there.jobs.select(columns).equals(kept)


@pytest.mark.parametrize("what", ["read_files", "_analyse"])
def test_a_job_that_does_not_fit_the_memory(
    corpus: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(shard, what)

    def hungry(subject: Any, *rest: Any) -> Any:
        names = [f.path for f in subject] if what == "read_files" else list(subject.ranks["path"])
        if len(names) > 20 or any("job07" in name for name in names):
            raise MemoryError
        return real(subject, *rest)

    monkeypatch.setattr(shard, what, hungry)
    report = scan(str(corpus))
    accounted(report, corpus)
    lost = report.inputs.filter(report.inputs["status"] == "quarantined")
    assert lost["path"].to_list() == ["job07/rank_0.jsonl", "job07/rank_1.jsonl"]
    assert lost["reason"].str.starts_with("out of memory: ").all()
    assert report.summary["jobs"] == 39
    assert report.summary["by_kind"]["cycle"] == 10


def test_a_job_that_does_not_fit_the_gpu(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard is halved until it fits; a job that does not is analysed on the CPU, and noted."""
    real = dl2gpu.analysis.analyse
    tried: list[tuple[str, int]] = []

    def small_gpu(trace: Trace, workers: int | None = None, engine: str = "cpu") -> Analysis:
        folders = trace.jobs["folder"].to_list()
        tried.append((engine, len(folders)))
        if engine == "gpu" and (len(folders) > 5 or "job07" in folders):
            raise DeviceMemoryError
        return real(trace, workers)

    monkeypatch.setattr(dl2gpu.analysis, "analyse", small_gpu)
    monkeypatch.setattr(cluster, "choose", lambda asked: "gpu")
    report = scan(str(corpus))
    assert [n for engine, n in tried if engine == "cpu"] == [1]
    assert max(n for _, n in tried) == 40
    (note,) = report.summary["notes"]
    assert note.startswith("job job07: its ")
    assert "do not fit the GPU" in note
    monkeypatch.undo()
    whole = scan(str(corpus))
    assert report.findings.equals(whole.findings)
    assert report.jobs.equals(whole.jobs)
    assert note in json.loads(report.to_json())["summary"]["notes"]


def test_a_scheduler_that_goes_away(
    corpus: Path, tmp_path: Path, small: None, scheduler: tuple[str, Process, list[Process]]
) -> None:
    """A clear error; what is done is kept, and the next scan goes on from there."""
    address, process, _ = scheduler

    def kill(step: Step) -> None:
        if step.jobs >= 5:
            process.kill()

    journal = tmp_path / "parts"
    with pytest.raises(ClusterError, match=r"the scheduler went away after .* --out"):
        scan(str(corpus), cluster=address, progress=kill, journal=journal)
    assert 5 <= len(list(journal.iterdir())) <= 40
    report = scan(str(corpus), journal=journal)
    assert len(list(journal.iterdir())) == 40
    assert content(report) == content(scan(str(corpus)))


# --------------------------------------------------------------------------------------------------
# Killed, and started again

KILLED = """
import importlib, os, signal, sys
from pathlib import Path
from dl2gpu import cluster
from dl2gpu.journal import parts_of

scan = importlib.import_module("dl2gpu.scan")
scan.SHARD_BYTES = 1
cluster._LEAST_BYTES = 1

def die(step):
    if step.jobs == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

scan.scan(sys.argv[1], progress=die, journal=parts_of(Path(sys.argv[2])))
"""


@pytest.mark.parametrize("moment", [0, 1, 17, 39])
def test_a_killed_scan_goes_on(
    corpus: Path, tmp_path: Path, small: None, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from dl2gpu.cli import app

    whole = scan(str(corpus))
    out = tmp_path / "report"
    arguments = [str(corpus), str(out), str(moment)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    done: list[Task] = []
    real = shard.run

    def run(task: Task) -> Result:
        done.append(task)
        return real(task)

    monkeypatch.setattr(shard, "run", run)
    ended = CliRunner().invoke(app, ["scan", str(corpus), "--out", str(out), "--quiet"])
    assert ended.exit_code == 1
    assert len(done) == 40 - moment
    assert content(Report.load(out)) == content(whole)
    assert not parts_of(out).exists()


def test_results_of_other_files_do_not_count(corpus: Path, tmp_path: Path, small: None) -> None:
    journal = tmp_path / "parts"
    before = scan(str(corpus), journal=journal)
    assert before.summary["by_kind"] == {"cycle": 10, "healthy": 30}
    fine(corpus / "job00")
    again = scan(str(corpus), journal=journal)
    assert again.summary["by_kind"] == {"cycle": 9, "healthy": 31}


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"jobs": 1}', b"\xff\xfe"])
def test_damaged_results_do_not_count(tmp_path: Path, corpus: Path, damage: bytes) -> None:
    journal = Journal(tmp_path / "parts")
    task = Task(tuple(discover([str(corpus)]).files))
    assert journal.get(task) is None
    result = shard.run(task)
    journal.put(task, result.encode())
    assert journal.get(task) == result.encode()
    (file,) = journal.folder.iterdir()
    file.write_bytes(damage)
    assert journal.get(task) is None


def test_a_journal_that_cannot_be_written_costs_nothing_else(corpus: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    report = scan(str(corpus), journal=blocked / "parts")
    assert content(report) == content(scan(str(corpus)))


# --------------------------------------------------------------------------------------------------
# What cannot be


def test_kinds() -> None:
    with pytest.raises(ClusterError, match="--cluster typo: expected threads, local, cuda"):
        scan("nowhere", cluster="typo")


def test_nobody_at_the_address(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_CONNECT_S", 0.2)
    with pytest.raises(ClusterError, match="expected a Dask scheduler there, found none"):
        scan(str(corpus), cluster="tcp://127.0.0.1:9")


def test_workers_must_see_the_files_and_run_the_same_version(corpus: Path) -> None:
    task = Task(tuple(discover([str(corpus)]).files))
    with pytest.raises(ClusterError, match="does not see /nowhere"):
        cluster.work(task, ("/nowhere",), __version__)
    with pytest.raises(ClusterError, match=r"the scan 0\.0\.0: install the same version"):
        cluster.work(task, (), "0.0.0")


def test_the_workers_decide_about_the_engine(
    corpus: Path, scheduler: tuple[str, Process, list[Process]]
) -> None:
    if not missing():
        pytest.skip("this machine has a usable GPU")
    assert scan(str(corpus), cluster=scheduler[0], engine="auto").summary["engine"] == "cpu"
    with pytest.raises(EngineError, match=r"on every worker, found on tcp://.* no NVIDIA driver"):
        scan(str(corpus), cluster=scheduler[0], engine="gpu")


def test_no_gpu_for_a_cuda_cluster(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "devices", lambda: 0)
    with pytest.raises(ClusterError, match="expected NVIDIA GPUs"):
        scan(str(corpus), cluster="cuda")


# --------------------------------------------------------------------------------------------------
# Cutting


def test_whole_jobs_in_a_shard(corpus: Path) -> None:
    files = discover([str(corpus)]).files
    a_job = sum(f.size for f in files if f.folder == "job00")
    for most in (1, a_job, 3 * a_job, 1 << 40):
        found = list(shards(files, most))
        assert sorted(f.path for s in found for f in s) == sorted(f.path for f in files)
        jobs = [{f.folder for f in s} for s in found]
        assert sum(map(len, jobs)) == 40
        assert all(len(s) == 2 * len(j) for s, j in zip(found, jobs, strict=True))
    assert len(list(shards(files, 1))) == 40
    assert len(list(shards(files, 1 << 40))) == 1
    parts = halves(Task(tuple(files)))
    assert parts is not None
    assert [len(p.files) for p in parts] == [40, 40]
    assert halves(Task(tuple(files[:2]))) is None
