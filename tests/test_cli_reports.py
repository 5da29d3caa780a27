"""What the command line prints of a saved report: forms of other tools, and the pager."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from dl2gpu.report.exports import FORMS
from dl2gpu.scan import scan


@pytest.fixture(scope="module")
def saved(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "out"
    scan([str(demo)]).save(out)
    return out


def run(*args: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "dl2gpu", *args],
        capture_output=True, check=False, env=os.environ | env,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_explain_prints_each_form_and_nothing_else(saved: Path, form: str) -> None:
    from dl2gpu.report.exports import export
    from dl2gpu.report.save import load

    done = run("explain", str(saved), "f3", "--format", form)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == export(load(saved), form, "f3")


def test_scan_prints_forms_for_ci(demo: Path) -> None:
    done = run("scan", str(demo), "--format", "sarif", "--quiet")
    assert (done.returncode, done.stderr) == (1, b"")
    assert len(json.loads(done.stdout)["runs"][0]["results"]) == 11
    done = run("scan", str(demo / "gpt2-ddp-healthy"), "--format", "junit", "--quiet")
    assert done.returncode == 0
    assert ET.fromstring(done.stdout).get("tests") == "1"


def test_out_writes_pages(demo: Path, tmp_path: Path) -> None:
    done = run("scan", str(demo), "--out", str(tmp_path / "out"), "--quiet")
    assert done.returncode == 1
    assert (tmp_path / "out" / "index.html").is_file()
    assert len(list((tmp_path / "out").glob("findings-*/*.html"))) == 11


def test_text_goes_through_the_pager_that_is_asked_for(saved: Path) -> None:
    done = run("explain", str(saved), "f3", "--pager", PAGER="sed s/^/PAGED/", TERM="xterm")
    assert done.returncode == 0
    # where the output is no terminal the pager prints as it is
    assert b"group-creation-cycle" in done.stdout
    plain = run("explain", str(saved), "f3")
    assert b"who waits for whom" in plain.stdout
    assert b"\x1b" not in plain.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
@pytest.mark.parametrize(
    ("args", "lines", "paged"),
    [([], "10", True), ([], "2000", False), (["--no-pager"], "10", False)],
)
def test_long_text_on_a_terminal_is_paged(
    saved: Path, args: list[str], lines: str, paged: bool
) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dl2gpu", "explain", str(saved), "f3", *args],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"PAGER": "sed s/^/PAGED/", "TERM": "xterm", "LINES": lines,
                          "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    out = b""
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        out += part
    os.close(ours)
    assert process.wait() == 0
    assert b"group-creation-cycle" in out
    assert (b"PAGED" in out) == paged
