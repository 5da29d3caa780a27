"""The nondeterministic suite: what is known is right, and what is explored meets it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from dl2gpu import whatif
from dl2gpu.analysis.explore import Budget
from dl2gpu.suites import nondeterministic as suite
from pipelines import nondeterministic


def share(outcomes: Iterable[bool]) -> Fraction:
    every = list(outcomes)
    return Fraction(sum(every), len(every))


@pytest.mark.parametrize(("ranks", "gradients", "fused"), [(2, 4, 1), (2, 4, 2), (3, 3, 1),
                                                           (2, 5, 2), (2, 4, 4)])  # fmt: skip
def test_ready_orders_counted_one_by_one(ranks: int, gradients: int, fused: int) -> None:
    def buckets(order: tuple[int, ...]) -> tuple[int, ...]:
        """Sizes, as sums of different powers of two."""
        return tuple(
            sum(1 << g for g in order[at : at + fused]) for at in range(0, gradients, fused)
        )

    every = list(permutations(range(gradients)))
    counted = share(
        len({buckets(order) for order in orders}) > 1 for orders in product(every, repeat=ranks)
    )
    program = suite._ready(ranks, gradients, (fused,), "")
    assert program.exact(0, fused) == program.exact(1 << 62, fused) == counted


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_collectors_counted_one_by_one(workers: int) -> None:
    """Who is taken first, second, ...: the last receive must find its worker's message."""
    counted = share(workers - 1 in taken[: workers - 1] for taken in permutations(range(workers)))
    assert suite._collector(workers, "").exact(0, 1) == counted


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_threads_counted_one_by_one(ranks: int) -> None:
    counted = share(len(set(turns)) > 1 for turns in product((0, 1), repeat=ranks))
    assert suite._threads(ranks).exact(0, 1) == counted


def test_files_are_those_of_the_generator(tmp_path: Path) -> None:
    suite.write(tmp_path)
    made = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    kept = {
        p.relative_to(nondeterministic.FOLDER): p.read_bytes()
        for p in nondeterministic.FOLDER.rglob("*") if p.is_file()
    }  # fmt: skip
    assert made == kept
    assert {p.parts[0] for p in kept} == set(suite.PROGRAMS)


@pytest.fixture(scope="module")
def cells() -> list[nondeterministic.Cell]:
    return nondeterministic.explored(samples=600, seed=3)


def test_what_is_explored_meets_what_is_known(cells: list[nondeterministic.Cell]) -> None:
    assert [c for c in cells if not c.right] == []
    assert {c.program for c in cells} == set(suite.PROGRAMS)
    # sampled ones have an interval that says something, and some are between never and always
    sampled = [c for c in cells if not c.every]
    assert all(0 < c.high - c.low < 0.12 for c in sampled)
    assert sum(0.1 < c.probability < 0.97 for c in sampled) >= 8
    assert sum(c.every for c in cells) >= 8


def test_whoever_disagrees_is_listed(cells: list[nondeterministic.Cell], tmp_path: Path) -> None:
    wrong = [replace(cells[0], exact=Fraction(1, 7)), *cells[1:]]
    assert "- none" in nondeterministic.markdown(cells)
    listed = nondeterministic.markdown(wrong).partition("outside the interval:")[2]
    assert cells[0].program in listed
    assert "known 0.143" in listed
    nondeterministic.write_csv(cells, tmp_path / "x.csv")
    rows = list(csv.DictReader((tmp_path / "x.csv").read_text("utf-8").splitlines()))
    assert len(rows) == len(cells)
    assert {r["buffer_bytes"] for r in rows} >= {"0", "inf", str(16 << 20)}
    shapes = ET.fromstring(nondeterministic.picture(cells)).iter("{http://www.w3.org/2000/svg}rect")
    assert sum(1 for _ in shapes) == len(cells) + 1


def test_smallest_buffer_is_what_both_send() -> None:
    folder = nondeterministic.FOLDER / "pipeline-head-to-head"
    result = whatif.run([str(folder)], whatif.axes_of(), Budget(10))
    assert [s["channel_bytes"] for s in result.safe] == [16 << 20]
    known = json.loads((folder / "exact.json").read_text("utf-8"))["exact"]
    assert {e["buffer"] for e in known if e["probability"] == "1"} == {
        0,
        *(k << 22 for k in (1, 2, 3)),
    }
