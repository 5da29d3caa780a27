"""Repairs that are told work: in the reference as well, and none is told that was not tried."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from analysis.handmade import findings, made, op, recv, send, wait
from naive import Choices, progress, stuck_places

from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.repair import SCENARIOS, Candidate, _copies, candidates, working
from dl2gpu.analysis.wording import advice_for
from dl2gpu.trace.schema import Trace

TWO = {"a": [0, 1], "b": [0, 1]}


def all_reduce(comm: str, **keys: Any) -> dict[str, Any]:
    return op("all_reduce", comm, count=4, dtype="f32", **keys)


PROGRAMS = {
    "both send first": made([send(1), recv(1)], [send(0), recv(0)]),
    "both receive first": made([recv(1), send(1)], [recv(0), send(0)]),
    "a ring": made(*([recv((r - 1) % 4), send((r + 1) % 4)] for r in range(4))),
    "two groups": made(
        [all_reduce("a"), all_reduce("b")], [all_reduce("b"), all_reduce("a")], comms=TWO
    ),
    "a wait between": made(
        [all_reduce("a", stream="s", request=1), wait(1), all_reduce("b", stream="t", request=2)],
        [all_reduce("b", stream="t", request=1), wait(1), all_reduce("a", stream="s", request=2)],
        comms=TWO,
    ),
    "one leaves out a call": made([all_reduce("w")] * 2, [all_reduce("w")], [all_reduce("w")] * 2),
    "a send alone": made([send(1), all_reduce("w")], [all_reduce("w")]),
}


def finding(f: dict[str, Any]) -> Finding:
    return Finding(**{k: f[k] for k in Finding.__dataclass_fields__ if k in f})


def told(trace: Trace) -> list[str]:
    return [r["repair"] for f in findings(trace) for r in f["details"].get("repairs", ())]


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_told_works_in_the_reference(name: str) -> None:
    trace = PROGRAMS[name]
    f = findings(trace)[0]
    repairs = [r["repair"] for r in f["details"]["repairs"]]
    assert repairs
    by_words = {c.words: c for c in candidates(trace, finding(f))}
    for words in repairs:
        c = by_words[words]
        changed = _copies([(trace, [c])])
        choices = [
            Choices(use_states=False), Choices(use_states=False, streams="one"),
            Choices(use_states=False, atomic_batch=True),
        ]  # fmt: skip
        for choice in choices:
            assert not stuck_places(progress(changed, choice)), words
        assert words in f["advice"]
    costs = [r["operations"] for r in f["details"]["repairs"]]
    assert costs == sorted(costs)


def test_the_repairs_one_expects() -> None:
    assert told(PROGRAMS["two groups"]) == [
        "on rank 0, call all_reduce of 'b' before all_reduce of 'a'",
        "on rank 1, call all_reduce of 'a' before all_reduce of 'b'",
    ]
    assert told(PROGRAMS["one leaves out a call"])[0] == (
        "on rank 1, add all_reduce of 'w' where the others make it"
    )
    assert told(PROGRAMS["a send alone"]) == ["on rank 0, leave out send to 1"]


def test_batches_and_buffers_are_tried() -> None:
    trace = PROGRAMS["both send first"]
    made_ = candidates(trace, finding(findings(trace)[0]))
    words = [c.words for c in working([(trace, made_)])[0]]
    assert "on rank 0, batch send to 1 with recv from 1" not in words  # the other still waits first
    assert "on ranks 0, 1, batch the send with the receive next to it" in words
    assert words[-1] == "buffer at least 16 bytes of each message"


def test_what_does_not_work_is_not_told() -> None:
    """A repair that helps under some scenarios only, and one that changes nothing."""
    trace = PROGRAMS["two groups"]
    nothing = Candidate("change nothing", 0, {})
    assert working([(trace, [nothing])]) == [[]]
    only_buffered = made([send(1), recv(1)], [send(0), recv(0)])
    assert working([(only_buffered, [nothing])]) == [[]]
    assert working([(only_buffered, [Candidate("buffer", 0, {}, (), 16)])]) != [[]]
    assert working([]) == []
    # wildcards: every match counts
    wild = made([recv("any"), recv(2)], [send(0)], [send(0)], backend="mpi")
    assert working([(wild, [nothing])]) == [[]]
    calm = made([recv("any"), recv("any")], [send(0)], [send(0)], backend="mpi")
    assert working([(calm, [nothing])]) == [[nothing]]


def test_advice_says_what_it_rests_on() -> None:
    f = finding(findings(PROGRAMS["two groups"])[0])
    assert f"in all {len(SCENARIOS)} scenarios tried" in advice_for(f)
    plain = Finding(job=0, kind="cycle", evidence="proven")
    assert "replay" not in advice_for(plain)


def test_observed_findings_get_none() -> None:
    """Of a record of a hang the rest of the program is not known."""
    trace = made(
        [all_reduce("a", state="completed"), all_reduce("a", state="scheduled")],
        [all_reduce("a", state="completed"), all_reduce("b", state="scheduled")],
        comms=TWO,
    )
    assert findings(trace)
    assert not told(trace)


def test_row_order_does_not_matter() -> None:
    for trace in PROGRAMS.values():
        mixed = Trace(
            **{**trace.tables(), "events": trace.events.sample(fraction=1.0, shuffle=True, seed=1)}
        )
        assert told(mixed) == told(trace)
        assert pl.DataFrame(mixed.events).height == trace.events.height
