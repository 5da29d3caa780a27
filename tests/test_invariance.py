"""The verdict does not depend on names or on the order of rows.

A job under other ranks, names and communicator numbers has the same findings up to that renaming,
and the same fingerprints: the same bug, whatever the job, the night, or the place in the cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from analysis.handmade import made, recv, send
from analysis.test_explore import small
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from programs import from_seed, renamed, seeds, shuffled, trace_of

from dl2gpu.analysis import analyse
from dl2gpu.trace.schema import Trace, concat

A_BATCH = 30
MOST_RANKS = 6

SETTINGS = settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # a seed cannot shrink
)

Ranks = Callable[[int, int], int]
"""(job, rank) → rank."""


def job_names(trace: Trace) -> dict[int, str]:
    return dict(zip(trace.jobs["job"], trace.jobs["name"], strict=True))


def findings(trace: Trace, rank_of: Ranks | None = None) -> dict[str, Counter[Any]]:
    """What is found in each job, by name, with culprits and victims renamed by ``rank_of``."""
    names = job_names(trace)
    found: dict[str, Counter[Any]] = {name: Counter() for name in names.values()}
    for f in analyse(trace).findings:
        if "host threads" in (f["condition"] or ""):
            continue  # orders of threads are sampled, by rank numbers: another name, another sample
        job = f["job"]
        moved = [
            tuple(sorted(rank_of(job, r) if rank_of else r for r in f[side] or ()))
            for side in ("culprits", "victims")
        ]
        found[names[job]][f["kind"], *moved, f["fingerprint"]] += 1
    return found


def assert_same(left: dict[str, Counter[Any]], right: dict[str, Counter[Any]]) -> None:
    for name in left.keys() | right.keys():
        if left.get(name) != right.get(name):
            pytest.fail(
                f"{name}:\n  {dict(left.get(name) or {})}\n  {dict(right.get(name) or {})}",
                pytrace=False,
            )


@given(example=seeds(), seed=st.integers(0, 1000))
@SETTINGS
def test_row_order(example: int, seed: int) -> None:
    of = from_seed(example, A_BATCH)
    trace = trace_of(*of)
    assert_same(findings(trace), findings(shuffled(trace, seed)))


@given(example=seeds(), permutation=st.permutations(range(MOST_RANKS)), seed=st.integers(0, 99))
@SETTINGS
def test_other_names(example: int, permutation: list[int], seed: int) -> None:
    of = from_seed(example, A_BATCH)
    trace = trace_of(*of)
    other = renamed(trace, permutation, seed)
    worlds = dict(zip(trace.jobs["job"], trace.jobs["world_size"], strict=True))

    def rank_of(job: int, rank: int) -> int:
        first = permutation[: worlds[job]]
        return sorted(first).index(first[rank])

    expected = {f"renamed-{name}": what for name, what in findings(trace, rank_of).items()}
    assert_same(expected, findings(other))


@given(example=seeds())
@SETTINGS
def test_jobs_do_not_disturb_each_other(example: int) -> None:
    """A job's findings are the same alone as among others."""
    of = from_seed(example, A_BATCH)
    together = findings(trace_of(*of))
    for program in of[:5]:
        alone = findings(trace_of(program))
        assert_same(alone, {program.name: together[program.name]})


@pytest.mark.parametrize("permutation", [(0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_wildcards_under_other_names(permutation: tuple[int, ...]) -> None:
    """Which of several matches is taken first follows from rank numbers; what is found does not."""
    jobs = []
    for seed in range(60):
        trace = small(seed)
        name = pl.lit(f"j{seed}")
        jobs.append(replace(trace, jobs=trace.jobs.with_columns(name=name, folder=name)))
    trace = concat(jobs)
    expected = findings(trace, lambda _, rank: permutation[rank])
    assert any(key[0] == "potential" for found in expected.values() for key in found)
    expected = {f"renamed-{name}": what for name, what in expected.items()}
    assert_same(expected, findings(renamed(trace, permutation, 5)))


@pytest.mark.parametrize("rank", [1, 2])
def test_a_match_that_need_not_be_is_no_deadlock(rank: int) -> None:
    """It stops only if the message of ``rank`` is taken first, wherever that stands in the order.

    The other may be the first that is tried or the last: neither is what has happened.
    """
    trace = made([recv("any"), recv(rank)], [send(0)], [send(0)], backend="mpi")
    found = analyse(trace)
    assert found.jobs.row(0, named=True)["deadlocked"] is None
    (one,) = found.findings
    assert (one["kind"], one["probability"]) == ("potential", 0.5)
    certain = made([recv("any"), recv("any"), recv(rank)], [send(0)], [send(0)], backend="mpi")
    assert analyse(certain).jobs.row(0, named=True)["deadlocked"] is True
