"""The command line: options, streams, exit status, errors, and the demo corpus from end to end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import dl2gpu
from dl2gpu.cli import FAIL_ON, app
from dl2gpu.engine import choose
from dl2gpu.report.model import KINDS, Report
from dl2gpu.report.status import exit_status
from dl2gpu.report.words import DEADLOCKS
from dl2gpu.scan import Step

Call = dict[str, Any]
FIND_SPEC = "dl2gpu.engine.choose.importlib.util.find_spec"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, report: Report) -> Callable[..., list[Call]]:
    """Replace the scan by one that returns a report, or raises; gives the list of its calls."""

    def install(result: Report | BaseException = report) -> list[Call]:
        calls: list[Call] = []

        def scan(paths: list[str], **options: Any) -> Report:
            calls.append({"paths": paths, **options})
            if (show := options["progress"]) is not None:
                for done in range(3):
                    show(Step(done, 2, done, 2))
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setitem(sys.modules, "dl2gpu.scan", types.SimpleNamespace(scan=scan))
        return calls

    return install


def row(kind: str) -> dict[str, Any]:
    return {"id": kind, "job": "j", "attempt": 0, "kind": kind, "details": None}


def source(status: str) -> dict[str, Any]:
    return {"path": f"{status}/x", "status": status}


# --------------------------------------------------------------------------------------------------
# Exit status


@pytest.mark.parametrize(
    ("kinds", "statuses", "fail_on", "expected"),
    [
        ([], ["read"], DEADLOCKS, 0),
        ([], ["partial"], DEADLOCKS, 0),
        ([], ["read", "ignored"], DEADLOCKS, 0),
        *[([kind], ["read"], DEADLOCKS, 1) for kind in DEADLOCKS],
        *[
            ([kind], ["read"], DEADLOCKS, 0)
            for kind in KINDS
            if kind not in DEADLOCKS and kind != "healthy"
        ],
        (["mismatch"], ["read"], ["cycle"], 0),
        (["stalled_rank", "mismatch"], ["read"], ["stalled_rank"], 1),
        (["cycle"], ["read"], [], 0),
        ([], [], DEADLOCKS, 2),
        ([], ["ignored", "ignored"], DEADLOCKS, 2),
        ([], ["read", "quarantined"], DEADLOCKS, 3),
        ([], ["quarantined"], DEADLOCKS, 3),
        (["insufficient_evidence"], ["read", "quarantined"], DEADLOCKS, 3),
        (["insufficient_evidence"], ["quarantined", "read"], ["insufficient_evidence"], 1),
        (["cycle"], ["read", "quarantined"], DEADLOCKS, 1),
        # something else was found, though of a kind that is not asked for
        (["stalled_rank"], ["read", "quarantined"], DEADLOCKS, 0),
    ],
)
def test_exit_status(
    make_report: Callable[..., Report],
    kinds: list[str],
    statuses: list[str],
    fail_on: list[str],
    expected: int,
) -> None:
    made = make_report([row(kind) for kind in kinds], [], [source(s) for s in statuses])
    assert exit_status(made, fail_on) == expected


def test_default_of_fail_on() -> None:
    assert tuple(FAIL_ON.split(",")) == DEADLOCKS


def test_scan_exits_with_it(fake: Callable[..., list[Call]], make_report: Any) -> None:
    fake()
    assert invoke("scan", "x").exit_code == 1
    assert invoke("scan", "x", "--fail-on", "unmatched_p2p, stalled_rank").exit_code == 0
    assert invoke("scan", "x", "--fail-on", "").exit_code == 0
    fake(make_report([], [], [source("read"), source("quarantined")]))
    assert invoke("scan", "x").exit_code == 3
    fake(make_report([], [], [source("ignored")]))
    done = invoke("scan", "x")
    assert done.exit_code == 2
    assert "nothing readable in x: expected traces, found 1 other file" in done.stderr


# --------------------------------------------------------------------------------------------------
# Usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["scan"], "Missing argument"),
        (["scan", "x", "--nonsense"], "No such option"),
        (["scan", "x", "--engine", "tpu"], "auto"),
        (["scan", "x", "--format", "xml"], "json"),
        (["scan", "x", "--workers", "0"], "--workers"),
        (["scan", "x", "--fail-on", "cycle,typo"], "found typo; expected some of cycle"),
        (["scan", "x", "--fail-on", "healthy"], "found healthy"),
        (["scan", "x", "--job-pattern", "("], "expected a regular expression"),
        (["scan", "x", "--job-pattern", "(a)"], "expected a named group"),
        (["rewind", "x"], "No such command"),
        (["explain"], "Missing argument"),
    ],
)
def test_wrong_usage_is_2(
    fake: Callable[..., list[Call]], arguments: list[str], words: str
) -> None:
    calls = fake()
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert words in " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stderr).split())
    assert not done.stdout
    assert not calls


def test_version() -> None:
    done = invoke("--version")
    assert (done.exit_code, done.stdout) == (0, f"dl2gpu {dl2gpu.__version__}\n")


@pytest.mark.parametrize("command", ["scan", "explain", "convert", "doctor"])
def test_help_has_an_example(command: str) -> None:
    done = invoke(command, "--help")
    assert done.exit_code == 0
    assert f"Example:  dl2gpu {command}" in done.stdout


def test_help_imports_nothing_heavy() -> None:
    """So that it answers at once."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "dl2gpu", "--help"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"polars", "numpy", "numba", "llvmlite", "scipy", "dask", "fsspec"}


def test_options_reach_the_scan(fake: Callable[..., list[Call]]) -> None:
    calls = fake()
    invoke(
        "scan", "a", "s3://b", "--engine", "cpu", "--cluster", "threads", "--workers", "3",
        "--job-pattern", r"(?P<job>\w+)-(?P<rank>\d+)", "--select", "gpt",
        "--plan", "plan.json",
    )  # fmt: skip
    invoke("scan", "a", "--quiet")
    first, second = calls
    assert callable(first.pop("progress"))
    assert first == {
        "paths": ["a", "s3://b"],
        "engine": "cpu",
        "cluster": "threads",
        "workers": 3,
        "job_pattern": r"(?P<job>\w+)-(?P<rank>\d+)",
        "select": "gpt",
        "plan": Path("plan.json"),
        "journal": None,
    }
    assert second["progress"] is None
    assert (second["engine"], second["cluster"], second["workers"]) == ("auto", "threads", None)


# --------------------------------------------------------------------------------------------------
# Streams


def test_json_is_the_report_and_nothing_else(
    fake: Callable[..., list[Call]], report: Report
) -> None:
    fake()
    done = invoke("scan", "x", "--format", "json")
    assert done.stdout_bytes == report.to_json()
    assert json.loads(done.stdout)["schema"] == "dl2gpu.report/1"


def test_progress_is_plain_lines_on_stderr(fake: Callable[..., list[Call]]) -> None:
    fake()
    done = invoke("scan", "x")
    assert [line.split(":")[1] for line in done.stderr.splitlines()] == [" 0%", " 100%"]
    assert "2 of 2 files" in done.stderr
    assert "dl2gpu: " not in done.stdout
    assert invoke("scan", "x", "--quiet").stderr == ""
    assert "1. inverted-a: cycle" in invoke("scan", "x", "--quiet").stdout


def test_verbose_says_why_the_engine(fake: Callable[..., list[Call]]) -> None:
    fake()
    assert invoke("scan", "x", "-v").stderr.startswith("dl2gpu: engine auto: ")
    assert "engine" not in invoke("scan", "x", "-v", "--engine", "cpu").stderr


def test_out_writes_the_files(
    fake: Callable[..., list[Call]], report: Report, tmp_path: Path
) -> None:
    fake()
    out = tmp_path / "out"
    done = invoke("scan", "x", "--out", str(out))
    assert (out / "report.json").read_bytes() == report.to_json()
    assert f"dl2gpu explain {out} c1" in done.stdout
    again = invoke("explain", str(out), "c1")
    assert again.exit_code == 0
    assert "and so back to rank 0" in again.stdout
    assert invoke("explain", str(out / "report.json"), "c1").stdout == again.stdout


def test_out_is_checked_before_the_work(fake: Callable[..., list[Call]], tmp_path: Path) -> None:
    calls = fake()
    (tmp_path / "file").write_text("x")
    done = invoke("scan", "x", "--out", str(tmp_path / "file"))
    assert done.exit_code == 2
    assert "expected a folder, found a file" in done.stderr
    assert not calls


# --------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("x: expected a\nfolder, found nothing"), "x: expected a folder, found nothing"),
        (FileNotFoundError(2, "No such file or directory", "x"), "No such file or directory: 'x'"),
        (KeyError("oops"), "KeyError: 'oops' dl2gpu: this is a fault of dl2gpu"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_errors_are_short_and_2(
    fake: Callable[..., list[Call]], error: Exception, words: str
) -> None:
    fake(error)
    done = invoke("scan", "x", "--quiet")
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
    assert len(done.stderr.splitlines()) <= 2
    assert "Traceback" not in done.stderr
    assert not done.stdout
    assert "Traceback" in invoke("scan", "x", "--verbose").stderr


def test_interrupted_is_not_a_finding(fake: Callable[..., list[Call]]) -> None:
    fake(KeyboardInterrupt())
    done = invoke("scan", "x", "--quiet")
    assert (done.exit_code, done.stderr) == (130, "dl2gpu: interrupted\n")


def test_hostile_error_text(fake: Callable[..., list[Call]]) -> None:
    fake(ValueError("[red]x[/] \x1b[2J\x07 forged"))
    err = invoke("scan", "x", "--quiet").stderr
    assert "[red]x[/]" in err
    assert "\x1b" not in err
    assert "\x07" not in err


def test_explain_without_a_report(tmp_path: Path) -> None:
    done = invoke("explain", str(tmp_path / "none"))
    assert done.exit_code == 2
    assert "no report here; write one with: dl2gpu scan PATH --out" in done.stderr


# --------------------------------------------------------------------------------------------------
# Engine and doctor


def test_engine_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "driver", lambda: None)
    monkeypatch.setattr(choose, "devices", lambda: 0)
    assert choose.choose("cpu") == "cpu"
    assert choose.choose("auto") == "cpu"
    with pytest.raises(choose.EngineError, match=r"no NVIDIA driver.*no package .*cudf_polars"):
        choose.choose("gpu")
    with pytest.raises(choose.EngineError, match="found 'tpu'"):
        choose.choose("tpu")


def test_engine_choice_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "driver", lambda: (13, 0))
    monkeypatch.setattr(choose, "devices", lambda: 1)
    found = types.SimpleNamespace()
    monkeypatch.setattr(FIND_SPEC, lambda name: found)
    assert choose.choose("auto") == choose.choose("gpu") == "gpu"
    monkeypatch.setattr(FIND_SPEC, lambda name: None if name == "cudf" else found)
    assert choose.choose("auto") == "cpu"
    with pytest.raises(
        choose.EngineError, match=r"no package cudf \(pip install 'dl2gpu\[gpu-cu13"
    ):
        choose.choose("gpu")
    monkeypatch.setattr(FIND_SPEC, lambda name: found)
    monkeypatch.setattr(choose, "devices", lambda: 0)
    with pytest.raises(choose.EngineError, match="driver but no GPU"):
        choose.choose("gpu")


def test_doctor() -> None:
    done = invoke("doctor")
    assert done.exit_code == 0
    for words in (dl2gpu.__version__, "processors", "memory", "polars", "NVIDIA driver", "cudf"):
        assert words in done.stdout
    assert "GPU engine: " in done.stdout


# --------------------------------------------------------------------------------------------------
# The whole way, as a user runs it


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dl2gpu", *arguments],
        capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"COLUMNS": "200"}, **options,
    )  # fmt: skip


DEMO = {
    "two-groups-inverted": {"order_inversion"},
    "group-creation-cycle": {"init_cycle"},
    "gpt2-fsdp-eval-on-rank-0": {"mismatch"},
    "ring-buffer-wrapped": {"mismatch"},
    "halo-exchange-missing-recv": {"unmatched_p2p"},
    # one cause, three true names for it
    "mesh-2d-skipped-all-reduce": {"missing_participant", "mismatch", "order_inversion"},
    "uneven-batches": {"missing_participant"},
    "killed-rank": {"crashed_rank"},
    "slow-data-loader": {"stalled_rank"},
    "all-present-none-completes": {"in_flight"},
    "send-before-recv": {"potential"},
    "gpt2-ddp-healthy": {"healthy"},
    "gpt2-tensor-parallel-healthy": {"healthy"},
    "swin-ddp-healthy": {"healthy"},
    "dump-cut-short": {"healthy", "insufficient_evidence"},
}


@pytest.fixture(scope="module")
def scanned(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    out = tmp_path_factory.mktemp("demo") / "report"
    return run("scan", str(demo), "--out", str(out)), out


def test_demo_verdicts(scanned: Any, demo: Path) -> None:
    done, out = scanned
    assert done.returncode == 1, done.stderr
    document = json.loads((out / "report.json").read_text())
    verdicts = {j["job"]: j["verdict"] for j in document["jobs"]}
    # nothing of it was used: not a job, or one of which nothing is claimed
    assert verdicts.pop("uploads", "insufficient_evidence") == "insufficient_evidence"
    assert verdicts.keys() == DEMO.keys()
    wrong = {job: verdict for job, verdict in verdicts.items() if verdict not in DEMO[job]}
    assert not wrong
    table = (demo / "README.md").read_text()
    assert all(f"| {job} |" in table for job in DEMO)


def test_demo_accounts_for_every_file(scanned: Any, demo: Path) -> None:
    inputs = {i["path"]: i for i in json.loads((scanned[1] / "report.json").read_text())["inputs"]}
    files = {str(p.relative_to(demo)) for p in demo.rglob("*") if p.is_file()}
    assert inputs.keys() == files
    assert inputs["uploads/nccl_trace_rank_0"]["status"] == "quarantined"
    assert inputs["dump-cut-short/rank_2.pkl"]["status"] == "partial"
    assert inputs["README.md"]["status"] == "ignored"
    others = {i["status"] for path, i in inputs.items() if path.count("/") and "uploads" not in path
              and path != "dump-cut-short/rank_2.pkl"}  # fmt: skip
    assert others == {"read"}
    assert all(i["reason"] for i in inputs.values() if i["status"] != "read")


def test_demo_runs_nothing(scanned: Any) -> None:
    done, _ = scanned
    assert "this dump ran a command" not in done.stdout + done.stderr


def test_demo_findings_can_all_be_explained(scanned: Any) -> None:
    report = Report.load(scanned[1])
    for finding in report.findings["id"]:
        done = invoke("explain", str(scanned[1]), finding)
        assert done.exit_code == 0, finding
        assert f"[{finding}]" in done.stdout


def test_demo_json_is_the_same_every_time(scanned: Any, demo: Path) -> None:
    def lines(data: bytes) -> list[str]:
        return re.sub(r'"elapsed_s":[\d.e-]+', "", data.decode()).splitlines()

    done = run("scan", str(demo), "--format", "json", "--workers", "1")
    assert done.returncode == 1
    assert lines(done.stdout.encode()) == lines((scanned[1] / "report.json").read_bytes())


def test_reader_that_leaves_is_no_error(demo: Path) -> None:
    command = f"{sys.executable} -m dl2gpu scan {demo} --quiet | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1"
    assert done.stderr == ""


def test_encoding_that_cannot_show_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "j"
    folder.mkdir()
    header = {"kind": "header", "format": "dl2gpu.trace", "version": 1, "job": "caf\u00e9\u6f22",
              "rank": 0, "world_size": 1, "backend": "nccl"}  # fmt: skip
    (folder / "rank_0.jsonl").write_text(
        json.dumps(header) + '\n{"kind":"end","exit":"finished"}\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "dl2gpu", "scan", str(tmp_path), "-q"],
        capture_output=True, check=False, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"caf\\xe9\\u6f22" in done.stdout


@pytest.mark.parametrize("content", [None, b"", b"hello\n"])
def test_nothing_to_read_is_2(tmp_path: Path, content: bytes | None) -> None:
    where = tmp_path / "x"
    if content is not None:
        where.mkdir()
        if content:
            (where / "notes.txt").write_bytes(content)
    done = run("scan", str(where), "-q")
    assert done.returncode == 2
    assert 1 <= len(done.stderr.splitlines()) <= 2
    assert str(where) in done.stderr


def test_quarantine_alone_is_3(tmp_path: Path, demo: Path) -> None:
    for job in ("uploads", "gpt2-ddp-healthy"):
        (tmp_path / job).mkdir()
        for file in (demo / job).iterdir():
            (tmp_path / job / file.name).write_bytes(file.read_bytes())
    done = run("scan", str(tmp_path), "-q")
    assert done.returncode == 3, done.stdout


def test_converted_demo_job_reads_the_same(demo: Path, tmp_path: Path) -> None:
    done = run("convert", str(demo / "two-groups-inverted"), str(tmp_path / "job" / "t.parquet"))
    assert done.returncode == 0, done.stderr
    done = run("scan", str(tmp_path / "job"), "-q", "--format", "json")
    kinds = [f["kind"] for f in json.loads(done.stdout)["findings"]]
    assert kinds == ["order_inversion"]
