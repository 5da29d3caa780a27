"""Short ways of the analysis give what the long ways give."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from dl2gpu.analysis import analyse, scenarios, waits
from dl2gpu.analysis.matching import match
from dl2gpu.suites import fleet
from dl2gpu.trace.schema import OP, Trace, one_job

MIXTURE = dict.fromkeys(("skip", "order", "size", "message", "crash", "stall", "lost"), 0.1)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return fleet.trace_of(40, 40_000, 6, ranks=(8, 64), mixture=MIXTURE)[0]


def asked_of(e: pl.DataFrame) -> tuple[pl.DataFrame, Any]:
    wait = (e["op"] == OP["wait"]).to_numpy()
    asked = (
        e.filter(pl.Series(wait))
        .select("i", "r", "lane", request="requests")
        .explode("request", empty_as_null=False)
        .filter(pl.col("request").is_not_null())
    )
    return asked, wait


def test_requests_that_rise_are_found_by_a_search(trace: Trace) -> None:
    e = match(trace).events
    # some numbers are not there, some come after the wait, some waits name several or one twice
    rng = np.random.default_rng(1)
    asked, wait = asked_of(e)
    by = pl.Series(rng.integers(-3, 9, asked.height))
    shifted = asked.with_columns(request=pl.col("request") + by)
    asked = pl.concat([asked, shifted, shifted.head(50)])
    e = e.with_columns(
        requests=pl.when(pl.col("requests").is_not_null()).then(pl.concat_list("seq", "seq"))
    )
    found = waits._rising_pairs(e, asked, wait)
    assert found is not None
    requests = e.filter(pl.col("request").is_not_null() & ~pl.Series(wait))
    want = waits._named_pairs(requests, asked.unique())
    assert found.height > 1000
    assert found.sort("wait", "target").equals(want.sort("wait", "target"))


def test_requests_that_do_not_rise_take_the_long_way(trace: Trace) -> None:
    e = match(one_job(trace, 0)).events
    asked, wait = asked_of(e)
    again = e.with_columns(request=pl.col("request") % 7)
    assert waits._rising_pairs(again, asked, wait) is None
    lanes = e.with_columns(lane=(pl.col("seq") % 2).cast(pl.Int32))
    assert waits._rising_pairs(lanes, asked, wait) is None


def test_one_replay_shows_what_all_readings_would(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no job is taken to get through, the others are replayed one by one: same findings."""
    short = analyse(trace, 1)
    taken: list[int] = []
    right = scenarios.passed

    def nobody(p: Any, fix: Any, jobs: Any) -> Any:
        taken.append(len(right(p, fix, jobs)))
        return jobs[:0]

    monkeypatch.setattr(scenarios, "passed", nobody)
    long = analyse(trace, 1)
    assert sum(taken) > 5
    assert short.jobs.equals(long.jobs)
    assert short.findings == long.findings


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("known", [0.0, 0.5])
def test_waits_for_everything_reach_back_to_the_wait_before(lanes: int, known: float) -> None:
    rng = np.random.default_rng(lanes)
    n = 400
    e = pl.DataFrame(
        {
            "r": np.sort(rng.integers(0, 5, n)), "lane": rng.integers(0, lanes, n),
            "stream": [1 if x < 0.5 else None for x in rng.random(n)],
            "blocking": rng.random(n) < 0.5, "done": rng.random(n) < known,
            "passed": rng.random(n) < known / 2,
        },
        schema={
            "r": pl.UInt32, "lane": pl.Int32, "stream": pl.Int32, "blocking": pl.Boolean,
            "done": pl.Boolean, "passed": pl.Boolean,
        },
    )  # fmt: skip
    at = np.flatnonzero(rng.random(n) < 0.2)
    rows = e.to_dicts()
    waits_now = set(at.tolist())
    want = set()
    for w in waits_now:
        known_now = rows[w]["done"] or rows[w]["passed"]
        for x in range(w - 1, -1, -1):
            if (rows[x]["r"], rows[x]["lane"]) != (rows[w]["r"], rows[w]["lane"]):
                continue
            if rows[x]["stream"] is not None or not rows[x]["blocking"]:
                want.add((w, x))
            open_ = not (rows[x]["done"] or rows[x]["passed"])
            if x in waits_now and (known_now or open_):
                break
    found = list(waits._pairs_of_all(e, at).iter_rows())
    assert len(found) == len(set(found))
    assert set(found) == want
