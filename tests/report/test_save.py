"""report.json and its tables: the promised shape, the same bytes, whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from dl2gpu.report import save as save_module
from dl2gpu.report.html import PAGES_FOLDER
from dl2gpu.report.model import FINDINGS, JOBS, Report
from dl2gpu.report.save import ReportError, canonical

TABLES = {"report.json", "findings.parquet", "jobs.parquet", "inputs.parquet"}
FILES = TABLES | {"index.html", "findings-*"}


def names(folder: Path) -> set[str]:
    """Names in a folder; that of the pages of findings depends on what they say."""
    return {PAGES_FOLDER.sub("findings-*", p.name) for p in folder.iterdir()}


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_document_has_the_promised_shape(report: Report) -> None:
    document = json.loads(report.to_json())
    assert list(document) == ["schema", "summary", "jobs", "findings", "inputs"]
    assert document["schema"] == "dl2gpu.report/1"
    assert list(document["summary"]) == [
        "jobs", "ranks", "events", "bytes_read", "files", "by_kind", "engine", "cluster",
        "elapsed_s",
    ]  # fmt: skip
    assert document["summary"]["by_kind"] == {"cycle": 2, "mismatch": 1, "healthy": 1}
    assert set(document["jobs"][0]) == set(JOBS)
    assert set(document["findings"][0]) == set(FINDINGS)
    assert set(document["inputs"][0]) == {
        "path", "status", "reason", "format", "job", "rank", "events",
    }  # fmt: skip


def test_rows_and_ranks_are_sorted(report: Report) -> None:
    document = json.loads(report.to_json())
    assert [j["job"] for j in document["jobs"]] == ["fine", "inverted-a", "inverted-b", "uneven"]
    assert [f["id"] for f in document["findings"]] == ["c1", "c2", "m1"]
    assert [i["path"] for i in document["inputs"]][:2] == ["notes.txt", "uneven/rank_0.jsonl"]
    assert document["jobs"][0]["ranks_present"] == [0, 1, 2, 3]
    mismatch = document["findings"][2]
    assert mismatch["victims"] == [0, 1, 2]
    assert [op["rank"] for op in mismatch["hangs_at"]] == [0, 1, 2, 3]
    assert list(mismatch["details"]) == ["expected", "found", "last_operations"]
    assert [p["rank"] for p in document["findings"][0]["cycle"]] == [0, 1]  # its own order


def test_same_bytes_whatever_the_order_of_rows(report: Report) -> None:
    shuffled = Report(
        findings=report.findings.reverse(),
        jobs=report.jobs.sample(fraction=1, shuffle=True, seed=3),
        inputs=report.inputs.reverse(),
        summary=dict(reversed(report.summary.items())),
    )
    assert shuffled.to_json() == report.to_json()


def test_only_elapsed_differs_between_runs(report: Report) -> None:
    later = dataclasses.replace(report, summary=report.summary | {"elapsed_s": 9.0})
    a, b = (r.to_json().decode().splitlines() for r in (report, later))
    differ = [(x, y) for x, y in zip(a, b, strict=True) if x != y]
    assert len(differ) == 1
    assert differ[0][0].replace("0.25", "9.0") == differ[0][1]


def test_round_trip(report: Report, tmp_path: Path) -> None:
    path = report.save(tmp_path / "deep" / "out")
    assert names(path.parent) == FILES
    expected = canonical(report)
    for source in (path, path.parent):
        back = Report.load(source)
        for name in ("findings", "jobs", "inputs"):
            assert_frame_equal(getattr(back, name), getattr(expected, name))
        assert back.summary == expected.summary
        assert back.to_json() == report.to_json()


def test_tables_hold_the_same_rows(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "out")
    expected = canonical(report)
    for name in ("findings", "jobs", "inputs"):
        assert_frame_equal(
            pl.read_parquet(tmp_path / "out" / f"{name}.parquet"), getattr(expected, name)
        )


def test_empty_report_round_trips(tmp_path: Path) -> None:
    Report().save(tmp_path / "out")
    back = Report.load(tmp_path / "out")
    assert back.findings.schema == pl.Schema(FINDINGS)
    assert back.findings.is_empty()
    assert back.jobs.is_empty()


def test_hostile_strings_survive(make_report: Callable[..., Report], tmp_path: Path) -> None:
    name = 'a"b\\c\n\x1b[31m[red]</script>\u202e\U0001f600'
    jobs = [dict.fromkeys(JOBS) | {"job": name, "attempt": 0, "findings": [], "verdict": "healthy"}]
    original = make_report([], jobs, [])
    original.save(tmp_path / "out")
    assert Report.load(tmp_path / "out").jobs["job"].to_list() == [name]


def test_a_folder_keeps_what_else_is_in_it(report: Report, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    (out / "report.json").write_text("old")
    report.save(out)
    assert names(out) == FILES | {"mine.txt"}
    assert (out / "mine.txt").read_text() == "kept"
    assert Report.load(out).jobs.height == 4


@pytest.mark.parametrize("exists", [False, True])
def test_whole_or_not_at_all(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    out = tmp_path / "out"
    if exists:
        Report().save(out)
    before = content(out) if exists else None

    def full_disk(_: Report) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_module, "to_json", full_disk)
    with pytest.raises(OSError, match="No space"):
        report.save(out)
    assert {p.name for p in tmp_path.iterdir()} == ({"out"} if exists else set())
    if exists:
        assert content(out) == before


def test_pages_are_those_of_the_report_that_is_there(
    report: Report, make_report: Callable[..., Report], tmp_path: Path
) -> None:
    """Saved over another report: its pages, and none of the other's; the same again: the same."""
    out = tmp_path / "out"
    report.save(out)
    first = content(out)
    report.save(out)
    assert content(out) == first
    (out / "findings-notours").mkdir()
    Report().save(out)
    assert names(out) == TABLES | {"index.html", "findings-notours"}
    report.save(out)
    assert content(out) == first


def test_pages_of_an_older_report_stay_while_something_else_is_among_them(
    report: Report, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report.save(out)
    (folder,) = out.glob("findings-*/")
    (folder / "notes.txt").write_text("mine")
    Report().save(out)
    assert [p.name for p in folder.iterdir()] == ["notes.txt"]


def test_an_overview_leads_to_its_own_pages_whenever_it_is_killed(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each single step of saving over another report, every link of the overview leads on."""
    other = dataclasses.replace(
        report, findings=report.findings.with_columns(pl.lit("Another.").alias("summary"))
    )
    replace = Path.replace
    left = 0

    def killed(path: Path, target: Path) -> Path:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return replace(path, target)

    for steps in range(7):
        out = tmp_path / str(steps)
        report.save(out)
        left = steps
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", killed)
            # the folder of the pages, the overview, three tables, report.json
            with nullcontext() if steps == 6 else pytest.raises(KeyboardInterrupt):
                other.save(out)
        links = re.findall(r'href="(findings-[^"#]+)"', (out / "index.html").read_text())
        assert len(links) >= 3
        assert all((out / link).is_file() for link in links)
        assert ("Another." in (out / links[0]).read_text()) == (steps >= 2)


def test_tables_alone(report: Report, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report.save(out)
    report.save(out, pages=False)
    assert names(out) == TABLES


def test_new_folder_is_readable_by_others(report: Report, tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        report.save(tmp_path / "out")
    finally:
        os.umask(umask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "out" / "report.json").stat().st_mode & 0o777 == 0o644


def test_out_must_be_a_folder(report: Report, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ReportError, match=r"found a file|is a file"):
            report.save(target)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "dl2gpu scan PATH --out"),
        ("{", "expected JSON"),
        ("[]", "found None"),
        ('{"schema": "dl2gpu.report/9"}', "dl2gpu.report/9"),
        ('{"schema": "dl2gpu.report/1"}', "findings"),
        ('{"schema": "dl2gpu.report/1", "findings": [3]}', "findings"),
        (
            '{"schema": "dl2gpu.report/1", "findings": [{"culprits": "all"}]}',
            "another type",
        ),
    ],
)
def test_load_says_what_it_expected(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(ReportError, match=message):
        Report.load(tmp_path)


def test_details_must_be_json(report: Report) -> None:
    broken = dataclasses.replace(
        report, findings=report.findings.with_columns(pl.lit("{oops").alias("details"))
    )
    with pytest.raises(ReportError, match="finding m1: expected JSON in details"):
        broken.to_json()


KILLED = """
import os, sys
from dl2gpu.report import save
from dl2gpu.report.model import Report

save.to_json = lambda report: os.kill(os.getpid(), 9)
Report().save(sys.argv[1])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals and locks")
@pytest.mark.parametrize("exists", [False, True])
def test_what_a_killed_process_left_is_taken_away(
    report: Report, tmp_path: Path, exists: bool
) -> None:
    """By the next report that is written there, and not while its owner lives."""
    out = tmp_path / "out"
    if exists:
        Report().save(out)
    left = subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    assert left.returncode == -9
    place = out if exists else tmp_path
    assert len(list(place.glob(".dl2gpu-report-*"))) == 1
    with save_module._aside(out, place) as alive:
        assert len(list(place.glob(".dl2gpu-report-*"))) == 1
        report.save(out)
        assert list(alive.iterdir()) == [alive / "lock"]
    assert not list(place.glob(".dl2gpu-report-*"))
    assert names(out) == FILES
