"""The nightly scan from end to end: only what is new, killed at any moment, two at once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import dl2gpu
from pipelines.fleet.config import Config, Output, Price, Scan, Webhook
from pipelines.fleet.state import BusyError, StateError, opened
from pipelines.nightly import TRIES, nightly

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "datasets" / "demo"
JOBS = sorted(p.name for p in DEMO.iterdir() if p.is_dir())


def bucket(tmp_path: Path, *jobs: str) -> Path:
    target = tmp_path / "bucket"
    target.mkdir(exist_ok=True)
    for job in jobs:
        shutil.copytree(DEMO / job, target / job)
    return target


def configured(tmp_path: Path, **keys: Any) -> Config:
    return Config(
        Scan([str(tmp_path / "bucket")], engine="cpu"),
        Output(str(tmp_path / "out"), metrics=str(tmp_path / "dl2gpu.prom")),
        price=Price(gpu_hour=2.0),
        **keys,
    )


def ran(config: Config, night: str) -> list[str]:
    said: list[str] = []
    nightly(config, night, said.append)
    return said


def told(config: Config, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((config.folder / name / "digest.json").read_text())
    return found


def test_only_what_is_new_is_scanned(tmp_path: Path) -> None:
    bucket(tmp_path, *JOBS[:2])
    config = configured(tmp_path)
    ran(config, "2026-11-28")
    assert told(config, "2026-11-28")["jobs"] == 2
    assert ran(config, "2026-11-28")[-1].endswith("nothing new")
    bucket(tmp_path, JOBS[2])
    ran(config, "2026-11-29")
    report = dl2gpu.Report.load(config.folder / "2026-11-29")
    assert report.jobs["folder"].to_list() == [JOBS[2]]
    assert {p.partition("/")[0] for p in report.inputs["path"]} == {JOBS[2]}
    # a night without new files has its digest; a second run of a night has a folder of its own
    ran(config, "2026-11-30")
    assert told(config, "2026-11-30")["jobs"] == 0
    bucket(tmp_path, JOBS[3])
    ran(config, "2026-11-30")
    assert told(config, "2026-11-30.2")["jobs"] == 1
    assert (config.folder / "latest").readlink() == Path("2026-11-30.2")
    assert not list(config.folder.glob(".*"))


def test_a_job_with_a_changed_file_is_scanned_whole(tmp_path: Path) -> None:
    where = bucket(tmp_path, *JOBS)
    config = configured(tmp_path)
    ran(config, "2026-11-28")
    changed = next(p for p in sorted((where / JOBS[0]).rglob("*")) if p.is_file())
    stamp = changed.stat().st_mtime_ns
    os.utime(changed, ns=(stamp, stamp + 1))
    ran(config, "2026-11-29")
    report = dl2gpu.Report.load(config.folder / "2026-11-29")
    assert report.jobs["folder"].to_list() == [JOBS[0]]
    assert report.jobs.equals(dl2gpu.scan(str(where), select=JOBS[0]).jobs)
    # what was seen in the night before is known, and costs what it costs
    statuses = {g["status"] for g in told(config, "2026-11-29")["groups"]}
    assert statuses <= {"known", "gone"}


def test_a_report_is_that_of_a_scan(tmp_path: Path) -> None:
    where = bucket(tmp_path, *JOBS)
    config = configured(tmp_path)
    ran(config, "2026-11-28")
    report, scanned = dl2gpu.Report.load(config.folder / "2026-11-28"), dl2gpu.scan(str(where))
    assert report.findings.equals(scanned.findings)
    assert report.jobs.equals(scanned.jobs)
    groups = told(config, "2026-11-28")["groups"]
    assert {g["fingerprint"] for g in groups} == set(scanned.findings["fingerprint"])
    assert {g["status"] for g in groups} == {"new"}


def test_a_file_that_cannot_be_read_is_tried_again(tmp_path: Path) -> None:
    where = bucket(tmp_path, JOBS[0])
    (where / "bad").mkdir()
    (where / "bad" / "rank_0.jsonl").write_bytes(b'{"format": "dl2gpu.trace"')
    config = configured(tmp_path)
    nights = [f"2026-11-{day}" for day in range(10, 15)]
    for night in nights:
        ran(config, night)
    seen = [told(config, night)["files"].get("quarantined", 0) for night in nights]
    assert seen == [1] * TRIES + [0] * (5 - TRIES)


def test_old_nights_go(tmp_path: Path) -> None:
    bucket(tmp_path, JOBS[0])
    config = configured(tmp_path)
    ran(config, "2026-10-01")
    (config.folder / "notes").mkdir()
    ran(config, "2026-10-30")
    assert (config.folder / "2026-10-01").is_dir()
    ran(config, "2026-10-31")
    assert not (config.folder / "2026-10-01").exists()
    assert (config.folder / "notes").is_dir()  # not ours
    # the history is still there
    assert "2026-10-01" in (config.folder / "index.html").read_text()


def test_a_state_that_was_lost(tmp_path: Path) -> None:
    bucket(tmp_path, JOBS[0])
    config = configured(tmp_path)
    ran(config, "2026-11-28")
    config.state.unlink()
    ran(config, "2026-11-28")
    assert told(config, "2026-11-28")["jobs"] == 1
    assert len(list(config.folder.glob("2026-11-28.before-*"))) == 1


@pytest.mark.parametrize("content", [b"not a database", b"SQLite format 3\0" + b"\1" * 4096])
def test_a_damaged_state(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.sqlite"
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"state\.sqlite: expected the state"), opened(path):
        pass
    assert path.read_bytes() == content


def test_a_state_of_another_version(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StateError, match="expected a state of version 1, found 99"), opened(path):
        pass


def test_two_at_once(tmp_path: Path) -> None:
    bucket(tmp_path, JOBS[0])
    config = configured(tmp_path)
    with opened(config.state), pytest.raises(BusyError, match=f"process {os.getpid()}"):
        ran(config, "2026-11-28")
    ran(config, "2026-11-28")
    assert told(config, "2026-11-28")["jobs"] == 1


def test_a_webhook_that_fails_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket(tmp_path, *JOBS)
    monkeypatch.delenv("HOOK", raising=False)
    config = configured(tmp_path, webhooks=(Webhook("HOOK"),))
    failures = nightly(config, "2026-11-28", lambda _: None)
    assert len(failures) == 1
    assert "HOOK" in failures[0]
    assert told(config, "2026-11-28")["groups"]
    assert nightly(config, "2026-11-29", lambda _: None) == []


# --------------------------------------------------------------------------------------------------
# The program, killed


def program(folder: Path, *words: str) -> list[str]:
    text = f"""
[scan]
paths = ["{folder}/bucket"]
engine = "cpu"
[output]
folder = "{folder}/out"
"""
    (folder / "nightly.toml").write_text(text)
    return [sys.executable, "-m", "pipelines.nightly", *words, "-c", str(folder / "nightly.toml")]


def run_program(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = program(folder, *words)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def contents(out: Path) -> dict[str, object]:
    """All that a run leaves, but for how long it took."""
    found: dict[str, object] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.suffix == ".sqlite":
            db = sqlite3.connect(path)
            found[name] = list(db.iterdump())
            db.close()
        elif path.is_file() and path.suffix != ".lock":
            data = path.read_bytes()
            if path.name == "report.json":
                whole = json.loads(data)
                whole["summary"].pop("elapsed_s")
                found[name] = whole
            elif path.suffix != ".html" or "elapsed" not in data.decode():
                found[name] = data
    return found


def kills(tmp_path: Path, times: int, seed: int) -> int:
    """Runs the program, killed at a random moment so many times; how many were killed.

    Each time it is run again to its end, and what it leaves is what an undisturbed run leaves.
    """
    bucket(tmp_path, *JOBS)
    begun = time.perf_counter()
    assert run_program(tmp_path, "run", "--night", "2026-11-28").returncode == 0
    whole = time.perf_counter() - begun
    expected = contents(tmp_path / "out")
    chosen, killed = random.Random(seed), 0
    for _ in range(times):
        shutil.rmtree(tmp_path / "out")
        command = program(tmp_path, "run", "--night", "2026-11-28")
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            try:
                process.wait(chosen.uniform(0.2, 1) * whole)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                killed += 1
        again = run_program(tmp_path, "run", "--night", "2026-11-28")
        assert again.returncode == 0, again.stderr
        found = contents(tmp_path / "out")
        assert {n for n in found | expected if found.get(n) != expected.get(n)} == set()
    return killed


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """A few; ``python tests/pipelines/test_nightly.py 100`` does it a hundred times."""
    assert kills(tmp_path, 5, seed=3) > 0


def test_the_program(tmp_path: Path) -> None:
    bucket(tmp_path, *JOBS)
    done = run_program(tmp_path, "check")
    assert done.returncode == 0, done.stderr
    assert "scans " in done.stdout
    assert not (tmp_path / "out").exists()
    done = run_program(tmp_path, "run", "--night", "2026-11-28")
    assert done.returncode == 0, done.stderr
    done = run_program(tmp_path, "show")
    assert done.stdout.startswith("# Night 2026-11-28\n")
    with opened(tmp_path / "out" / "state.sqlite"):
        busy = run_program(tmp_path, "run", "--night", "2026-11-29")
    assert busy.returncode == 3
    assert "another run holds it" in busy.stderr
    for words, said in (
        (("run", "--night", "yesterday"), "--night: expected a date"),
        (("show", "--night", "2020-01-01"), "expected the digest of a run"),
        (("serve",), "output.metrics: expected"),
    ):
        failed = run_program(tmp_path, *words)
        assert failed.returncode == 2
        assert said in failed.stderr
        assert "Traceback" not in failed.stderr


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        times = int(sys.argv[1])
        print(f"{kills(Path(folder), times, seed=1)} of {times} runs killed; all as expected")  # noqa: T201
