"""Libraries are told to keep memory and start no threads, unless the user has said otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dl2gpu.engine.cores import cores
from dl2gpu.engine.process import environment, prepare

NAMES = set(environment(1))
TELL = f"import os; print(sorted(set(os.environ) & {NAMES!r}))"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


def test_what_is_not_said_is_set(bare: pytest.MonkeyPatch) -> None:
    prepare()
    assert {k: os.environ[k] for k in NAMES} == environment(cores())


def test_what_the_user_says_stays(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("_RJEM_MALLOC_CONF", "narenas:3")
    bare.setenv("OPENBLAS_NUM_THREADS", "7")
    prepare()
    assert os.environ["_RJEM_MALLOC_CONF"] == "narenas:3"
    assert os.environ["OPENBLAS_NUM_THREADS"] == "7"


def test_arenas_follow_the_threads() -> None:
    assert environment(2)["_RJEM_MALLOC_CONF"].startswith("narenas:1,")
    assert environment(64)["_RJEM_MALLOC_CONF"].startswith("narenas:16,")


def test_a_recorded_program_runs_as_it_would_alone(
    bare: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "dl2gpu", "record", "--out", str(tmp_path), "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", TELL], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_polars_is_loaded_after_it(bare: pytest.MonkeyPatch) -> None:
    """Its allocator reads the variable when it is loaded."""
    code = (
        "import sys; from dl2gpu.engine import process; from dl2gpu import cli;"
        "assert 'polars' not in sys.modules; process.prepare()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
