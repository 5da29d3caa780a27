"""The evaluation: how a verdict is held against a label, and the table of a suite."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from pipelines.evaluate import Job, Ran, Row, Said, Suite, judged, markdown, plot, rows, suites

ROOT = Path(__file__).resolve().parents[2]


def labelled(deadlock: bool | None = True, **keys: Any) -> Job:
    plain: dict[str, Any] = {
        "name": "job", "model": "", "kinds": ("cycle",), "must_not": ("healthy",),
        "culprits": None, "including": frozenset(), "excluding": frozenset(),
    }  # fmt: skip
    return Job(deadlock=deadlock, **(plain | keys))


CYCLE = Said(True, frozenset({"cycle"}), frozenset({1}))
HEALTHY = Said(False, frozenset({"healthy"}))


@pytest.mark.parametrize(
    ("deadlock", "said", "expected"),
    [
        (True, CYCLE, "tp"), (True, HEALTHY, "fn"), (True, Said(None), "fn"), (True, None, "fn"),
        (False, CYCLE, "fp"), (False, HEALTHY, "tn"), (False, Said(None), "tn"),
        (False, None, "tn"), (None, CYCLE, None), (None, None, None),
    ],
)  # fmt: skip
def test_deadlocks(deadlock: bool | None, said: Said | None, expected: str | None) -> None:
    assert judged(labelled(deadlock), said).deadlock == expected


@pytest.mark.parametrize(
    ("kinds", "right"),
    [({"cycle"}, True), ({"cycle", "mismatch"}, True), ({"mismatch"}, False),
     ({"cycle", "healthy"}, False)],
)  # fmt: skip
def test_kinds(kinds: set[str], right: bool) -> None:
    assert judged(labelled(), Said(True, frozenset(kinds))).kind is right


@pytest.mark.parametrize(
    ("label", "named", "right"),
    [
        ({"culprits": frozenset({1})}, {1}, True), ({"culprits": frozenset({1})}, {1, 2}, False),
        ({"culprits": frozenset()}, set(), True), ({"including": frozenset({1})}, {1, 2}, True),
        ({"including": frozenset({1})}, {2}, False), ({"excluding": frozenset({1})}, {1}, False),
        ({"excluding": frozenset({1})}, {2}, None), ({}, {1}, None),
    ],
)  # fmt: skip
def test_culprits(label: dict[str, Any], named: set[int], right: bool | None) -> None:
    said = Said(True, frozenset({"cycle"}), frozenset(named))
    assert judged(labelled(**label), said).culprits is right


def test_a_job_that_is_not_in_the_report_is_missed() -> None:
    assert judged(labelled(), None).missed == "not in the report"
    assert judged(labelled(), CYCLE).missed is None
    assert judged(labelled(), HEALTHY).missed == (
        "deadlocked False, expected True; kinds healthy, expected one of cycle"
    )


def table() -> list[Row]:
    jobs = (
        labelled(name="a", model="gpt2"), labelled(name="b", model="swin"),
        labelled(False, name="c", model="swin", kinds=("healthy",), must_not=()),
    )  # fmt: skip
    said = {"a": CYCLE, "b": HEALTHY, "c": CYCLE}
    return rows(Suite("s", Path(), jobs), "dl2gpu", Ran(said, 1.5, 100.0))


def test_the_table() -> None:
    whole, gpt2, swin = table()
    assert (whole.precision, whole.recall, whole.kinds) == (0.5, 0.5, 1 / 3)
    assert (gpt2.model, gpt2.precision, gpt2.recall) == ("gpt2", 1.0, 1.0)
    assert (swin.precision, swin.recall) == (0.0, 0.0)
    text = markdown(table())
    assert "| s |  | dl2gpu | 3 | 2 | 50.0 % | 50.0 % | 33.3 % |  | 1.5 | 100 |" in text
    assert "- s, `b`: deadlocked False" in text
    assert "- s, `c`: deadlocked True" in text
    assert text.count("\n- ") == 2


def test_the_plot_is_an_image() -> None:
    tree = ET.fromstring(plot(table()))
    assert tree.tag.endswith("svg")
    bars = [e for e in tree.iter() if e.tag.endswith("rect") and e.get("height") == "8"]
    assert [float(b.get("width", "0")) for b in bars] == [150.0, 150.0]


def test_suites_of_the_repository() -> None:
    found = {s.name: s for s in suites(None)}
    assert len(found["logs"].jobs) > 50
    assert {j.deadlock for j in found["logs"].jobs} == {True, False, None}


def test_the_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipelines.evaluate", "--suite", "logs"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| logs |  | dl2gpu |" in done.stdout
    assert done.stdout.rstrip().endswith("Misses of dl2gpu:\n\n- none")
    with (tmp_path / "evaluation.csv").open() as stream:
        (row,) = csv.DictReader(stream)
    assert (row["precision"], row["recall"]) == ("100.0 %", "100.0 %")
    assert (tmp_path / "evaluation.svg").read_text().startswith("<svg")
    nothing = subprocess.run(
        [*command[:-1], "no such"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert nothing.returncode == 1
    assert "no labelled suite" in nothing.stderr
