"""Jobs divided among threads: the same findings, attempts together; the order of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from analysis.handmade import made, op
from polars.testing import assert_frame_equal

from dl2gpu.analysis import analyse, matching_passes, shares, tables
from dl2gpu.trace.discover import discover
from dl2gpu.trace.order_kernel import in_order
from dl2gpu.trace.readers import read_files
from dl2gpu.trace.schema import Trace, concat, one_job, split, validate


@pytest.fixture(scope="module")
def demo() -> Trace:
    folder = Path(__file__).parents[2] / "datasets" / "demo"
    return read_files(discover([str(folder)]).files)[0]  # less what is quarantined


def shuffled(trace: Trace) -> Trace:
    return Trace(
        **{n: f.sample(fraction=1, shuffle=True, seed=3) for n, f in trace.tables().items()}
    )


@pytest.mark.parametrize("rows", ["as read", "shuffled"])
@pytest.mark.parametrize("workers", [2, 3, 100])
def test_findings_do_not_depend_on_threads(
    demo: Trace, rows: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = analyse(demo, 1)
    assert whole.findings
    monkeypatch.setattr(shares, "_LEAST", 1)
    trace = demo if rows == "as read" else shuffled(demo)
    assert 1 < len(shares.over_shares(trace, lambda t: t, workers)) <= workers
    parted = analyse(trace, workers)
    assert parted.findings == whole.findings
    assert_frame_equal(parted.jobs, whole.jobs, check_row_order=False)


@pytest.mark.parametrize("threads", [2, 3, 50])
def test_communicators_divided_among_threads(
    demo: Trace, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = analyse(demo, 1)
    monkeypatch.setattr(matching_passes, "_LEAST", 1)
    monkeypatch.setattr(matching_passes, "cores", lambda: threads)
    parts = matching_passes._partitions(demo.events["comm"].fill_null(-1).to_numpy(), 1000)
    assert 1 < len(parts) <= threads
    assert parts[0][0] == 0
    assert parts[-1][1] == 1000
    assert analyse(demo, 1).findings == whole.findings


def test_attempts_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    one = made([op("barrier")], [op("barrier")])
    six = concat([one] * 6)
    names = pl.Series("name", ["a", "b", "c", "b", "d", "d"])
    attempts = pl.Series("attempt", [0, 0, 0, 1, 0, 1], dtype=pl.Int32)
    trace = replace(six, jobs=six.jobs.with_columns(names, attempts))
    monkeypatch.setattr(shares, "_LEAST", 1)
    parts = shares.over_shares(trace, lambda t: t, 6)
    found = [(first, part.jobs["name"].to_list()) for first, part in parts]
    assert found == [(0, ["a"]), (1, ["b", "c", "b"]), (4, ["d", "d"])]


def test_small_traces_are_not_divided(demo: Trace) -> None:
    (share,) = shares.over_shares(demo, lambda t: t, 8)
    assert share[0] == 0
    assert share[1] is demo


def test_parts_are_whole_traces(demo: Trace) -> None:
    n = demo.jobs.height
    parts = split(demo, [0, 2, n])
    assert [p.jobs.height for p in parts] == [2, n - 2]
    for part in parts:
        validate(part)
    again = concat(parts)
    for name in ("events", "jobs", "ranks", "comms", "status"):
        assert_frame_equal(again.tables()[name], demo.tables()[name], check_row_order=False)
    mixed = split(shuffled(demo), [0, 2, n])[1]
    key = ["job", "rank", "lane", "seq"]
    assert_frame_equal(mixed.events.sort(key), parts[1].events.sort(key))
    assert one_job(demo, n - 1).jobs["name"].to_list() == demo.jobs["name"].to_list()[-1:]


@pytest.mark.parametrize("far", [0, 1 << 40, (1 << 63) - 1])
def test_sorting(demo: Trace, far: int) -> None:
    """In one sort of packed keys, or, where they do not fit, of the four columns."""
    last = pl.int_range(pl.len()) == pl.len() - 1
    events = demo.events.with_columns(seq=pl.when(last & (far > 0)).then(far).otherwise("seq"))
    wanted = events.sort("job", "rank", "seq", "lane")
    mixed = events.sample(fraction=1, shuffle=True, seed=5)
    assert_frame_equal(tables._sorted(mixed), wanted)


def test_sorting_of_negative_numbers() -> None:
    rng = np.random.default_rng(1)
    n = 1000
    events = pl.DataFrame(
        {
            "job": rng.integers(0, 3, n, dtype=np.int32),
            "rank": rng.integers(0, 4, n, dtype=np.int32),
            "seq": rng.permutation(n).astype(np.int64) - n // 2,
            "lane": rng.integers(0, 2, n, dtype=np.int32),
            "none": pl.Series([None] * n, dtype=pl.Int64),
        }
    )
    found = tables._sorted(events)
    assert_frame_equal(found, events.sort("job", "rank", "seq", "lane"))
    assert in_order(*(found[c].to_numpy().copy() for c in ("job", "rank", "seq", "lane")))
