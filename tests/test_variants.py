"""The labelled programs once more, as other recorders would have seen them.

Each program runs to where it stops; what it had done by then becomes a record: with states and
waits (our own recorder), with states alone (Flight Recorder, timed and untimed), or the issued
calls alone. What is wrong with the program must come out of each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import corpus
import numpy as np
import polars as pl
import pytest

from dl2gpu.analysis import Analysis, analyse
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import Scenario, build, run
from dl2gpu.trace.readers import read_trace
from dl2gpu.trace.schema import EXIT, OP, STATE, Trace

START: Final = 1_700_000_000_000_000_000
UNRECORDED: Final = [OP["wait"], OP["comm_create"], OP["probe"]]
"""What Flight Recorder does not record."""

FORMS: Final = ("own", "issued", "timed", "untimed")


def programs() -> Iterator[corpus.Labelled]:
    """Labelled programs whose outcome does not depend on a condition."""
    if corpus.shared_folder() is None:
        return
    for job in corpus.labelled("cases"):
        if job.expect.get("evidence") == "program" and job.expect["deadlock"] != "conditional":
            yield job


def recorded(trace: Trace, form: str) -> Trace:
    """What a recorder would have of the program at the time it stopped."""
    m = match(trace)
    p = build(m)
    fix = run(p, Scenario())
    states = np.where(fix.completed, STATE["completed"], STATE["scheduled"])
    if form != "untimed":
        states = np.where(fix.started & ~fix.completed, STATE["started"], states)
    place = np.arange(len(p.r)) - np.searchsorted(p.r, p.r)
    created = START + place * 10_000_000 + p.rank_of.astype(np.int64) * 1000
    with_states = form != "issued"
    events = m.events.with_columns(
        state=pl.Series(states if with_states else np.zeros_like(states), dtype=pl.UInt8),
        ordinal=pl.when(pl.col("op") >= OP["all_reduce"]).then("k"),
        t_created=pl.Series(created),
        t_completed=pl.when(pl.Series(fix.completed & with_states)).then(
            pl.Series(created + 5_000_000)
        ),
    ).filter(pl.Series(fix.issued))
    if form in {"timed", "untimed"}:
        events = events.filter(~pl.col("op").is_in(UNRECORDED)).with_columns(blocking=False)
    standing = np.unique(
        np.concatenate([fix.layout.lane_rank[fix.lane_at >= 0], p.r[fix.issued & ~fix.completed]])
    )
    exits = m.prepared.ranks["exit"].to_numpy().copy()
    exits[standing] = EXIT["alive"]
    ranks = m.prepared.ranks.drop("r").with_columns(
        exit=pl.Series(exits), t_last=pl.lit(int(created.max()) + 600_000_000_000)
    )
    return dataclasses.replace(trace, events=events.select(trace.events.columns), ranks=ranks)


def seen_in(trace: Trace, form: str) -> bool:
    """Can this form hold what the program stops at?"""
    creates = trace.events["op"].is_in([OP["comm_create"]]).any()
    return form in {"own", "issued"} or not creates


def failures(result: Analysis, expect: dict[str, Any]) -> list[str]:
    """The rules of ``corpus.check`` on an analysis."""
    kinds = {f["kind"] for f in result.findings} or {"healthy"}
    culprits = {c for f in result.findings for c in f["culprits"]}
    stuck = result.jobs["deadlocked"].to_list()
    out = []
    if (True in stuck) != expect["deadlock"]:
        out.append(f"deadlocked: expected {expect['deadlock']}, found {stuck}")
    if not kinds & set(expect["kinds"]):
        out.append(f"kinds: expected one of {expect['kinds']}, found {sorted(kinds)}")
    if kinds & set(expect["must_not"]):
        out.append(f"must_not: found {sorted(kinds & set(expect['must_not']))}")
    if expect["culprits"] is not None and sorted(culprits) != sorted(expect["culprits"]):
        out.append(f"culprits: expected {expect['culprits']}, found {sorted(culprits)}")
    if not set(expect["culprits_must_include"]) <= culprits:
        out.append(f"culprits: expected {expect['culprits_must_include']} among {sorted(culprits)}")
    if culprits & {*expect["culprits_must_not_include"], *expect["victims"]}:
        out.append(f"culprits: {sorted(culprits)} holds victims")
    return out


PROGRAMS: Final = list(programs())


@pytest.mark.skipif(not PROGRAMS, reason="no labelled data (../shared) beside the checkout")
@pytest.mark.parametrize("form", FORMS)
def test_programs_as_records(form: str) -> None:
    """All programs in one form; they are analysed one by one, as jobs of their own."""
    told = 0
    wrong: list[str] = []
    for job in PROGRAMS:
        trace = read_trace(str(job.path))
        if not seen_in(trace, form):
            continue
        told += 1
        found = failures(analyse(recorded(trace, form)), dict(job.expect))
        wrong += [f"{job.name}: {text}" for text in found]
    assert told > 50
    assert not wrong, "\n".join(wrong)
