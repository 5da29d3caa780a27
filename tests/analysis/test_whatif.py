"""Configurations, variants, smallest safe buffers, and witnesses that lead where they say."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import polars as pl
import pytest
from analysis.handmade import findings, made, op, recv, send, wait
from naive import Choices, progress, stuck_places
from programs import from_seed, trace_of

from dl2gpu.analysis.explore import Budget
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import build, run
from dl2gpu.analysis.rewrite import Fusion, copies, free_matches, variant
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.analysis.whatif import Axes, Witness, program_of, safe_sizes, whatif
from dl2gpu.analysis.witness import schedule, standing, steps
from dl2gpu.analysis.witness import trace_of as recorded
from dl2gpu.trace.schema import Trace, concat

INF = Scenario.INFINITE
TWO = {"a": [0, 1], "b": [0, 1]}


def sized(peer: int, n: int, **keys: Any) -> dict[str, Any]:
    return send(peer, count=n, dtype="i8", **keys)


def taken(peer: int | str, n: int) -> dict[str, Any]:
    return recv(peer, count=n, dtype="i8")


def gradient(k: int, count: int, comm: str = "w") -> dict[str, Any]:
    return op("all_reduce", comm, count=count, dtype="f32", stream="g", request=k)


def row(trace: Trace, **wanted: Any) -> dict[str, Any]:
    axes = {k: (v,) for k, v in wanted.items()}
    return whatif(trace, Axes(**axes), sizes=False).rows.row(0, named=True)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# Buffers


def test_a_table_of_buffers() -> None:
    trace = made([sized(1, 300), taken(1, 20)], [sized(0, 20), taken(0, 300)])
    found = whatif(trace, Axes(buffer=(0, 19, 20, INF)))
    assert found.rows["probability"].to_list() == [1.0, 1.0, 0.0, 0.0]
    assert found.rows["exact"].all()
    assert found.rows["witness"].to_list() == [0, 1, None, None]
    assert found.safe.to_dicts() == [
        {
            "job": 0,
            "eager_bytes": 20,
            "channel_bytes": 20,
            "eager_unsafe": [[0, 20]],
            "channel_unsafe": [[0, 20]],
            "channels": [[0, 1], [1, 0]],
        }
    ]


def test_several_messages_of_a_channel() -> None:
    """An eager threshold has to hold each message, a channel all of them together."""
    n = 4
    ranks = [[*(sized(1 - r, 10) for _ in range(n)), *(taken(1 - r, 10) for _ in range(n))]
             for r in range(2)]  # fmt: skip
    trace = made(*ranks)
    safe = whatif(trace, Axes()).safe.to_dicts()[0]
    assert (safe["eager_bytes"], safe["channel_bytes"]) == (10, 40)
    assert row(trace, messages=3)["probability"] == 1.0
    assert row(trace, messages=4)["probability"] == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_the_smallest_safe_buffer_is_that_of_the_reference(seed: int) -> None:
    """Every size up to all bytes of the job, by the slow interpreter."""
    rng = random.Random(seed)
    ranks: list[list[dict[str, Any]]] = [[], [], []]
    for _ in range(3):
        pair = rng.sample(range(3), 2)
        sizes = [rng.randint(1, 6), rng.randint(1, 6)]
        for k in (0, 1):
            ranks[pair[k]].append(sized(pair[1 - k], sizes[k]))
        for k in (0, 1):
            ranks[pair[k]].append(taken(pair[1 - k], sizes[1 - k]))
    trace = made(*ranks)
    p = build(match(trace))

    def runs(**choices: Any) -> bool:
        return not stuck_places(progress(trace, Choices(use_states=False, **choices)))

    found = safe_sizes(p, np.array([0], np.int32))[0]
    assert found["channel_bytes"] == next(b for b in range(1, 40) if runs(buffer_bytes=b))
    assert found["eager_bytes"] == next(b for b in range(1, 40) if runs(eager_bytes=b))


def test_a_shared_pool_is_explored() -> None:
    """Room for one of two messages: it depends on which takes it."""
    trace = made(
        [sized(1, 4, blocking=False, request=1), sized(2, 4), wait(1)],
        [sized(2, 4), taken(0, 4)],
        [taken(0, 4), taken(1, 4)],
    )
    both = row(trace, pool=8, matches="all")
    assert (both["probability"], both["exact"]) == (0.0, True)
    cross = made([sized(1, 4), taken(2, 4)], [sized(2, 4), taken(0, 4)], [sized(0, 4), taken(1, 4)])
    axes = Axes(pool=(0, 4, 8), whose="job", matches=("all",))
    found = whatif(cross, axes).rows
    assert found["probability"].to_list() == [1.0, 0.0, 0.0]
    assert found["schedules"].to_list()[1] > 1


# --------------------------------------------------------------------------------------------------
# Orders and fusion


def test_copies_are_jobs_of_their_own() -> None:
    trace = trace_of(*from_seed(5, 3))
    p = build(match(copies(trace, 3)))
    alone = run(build(match(trace)), Scenario())
    fix = run(p, Scenario())
    assert np.array_equal(fix.completed, np.tile(alone.completed, 3))


def test_fused_operations_hold_what_went_in() -> None:
    trace = made(*([*(gradient(k, 10 * k + 10) for k in range(5)), wait(0), wait(1, 2, 3, 4)]
                   for _ in range(2)))  # fmt: skip
    node = match(trace).events["node"].to_numpy()
    made_ = variant(trace, Fusion(count=2), "recorded", node=node)
    e = made_.trace.events.filter(pl.col("rank") == 0).sort("seq")
    assert e["count"].to_list() == [30, 70, 50, None, None]
    assert e["bytes"].to_list() == [120, 280, 200, None, None]
    assert e["requests"].to_list()[3:] == [[1], [1, 3, 4]]
    assert made_.content.group_by("seq").agg(pl.col("content").n_unique())["content"].max() == 1
    by_bytes = variant(trace, Fusion(bytes=160), "recorded", node=node).trace.events
    assert by_bytes.filter(pl.col("rank") == 1).sort("seq")["bytes"].to_list()[:4] == [
        120, 120, 160, 200,
    ]  # fmt: skip
    by_time = variant(trace, Fusion(cycle_ns=2_000_000), "recorded", node=node).trace.events
    assert 2 <= by_time.filter((pl.col("rank") == 0) & (pl.col("op") != 5)).height <= 4


def test_a_buffer_takes_no_more_than_it_holds() -> None:
    """Of 16, 12, 12, 8 and 36 bytes: what does not fit any more goes into the next one."""
    trace = made(*([*(gradient(k, n) for k, n in enumerate((4, 3, 3, 2, 9)))] for _ in range(2)))
    node = match(trace).events["node"].to_numpy()
    fused = variant(trace, Fusion(bytes=20), "recorded", node=node).trace.events
    assert fused.filter(pl.col("rank") == 1).sort("seq")["bytes"].to_list() == [16, 12, 20, 36]


COORDINATED = Fusion(coordinated=True)


def test_a_coordinator_puts_orders_right() -> None:
    """Other orders on each rank, other sizes: a mismatch where nobody coordinates."""
    trace = made(*([*(gradient(k, 2**k) for k in range(5)), wait()] for _ in range(3)))
    axes = Axes(fusion=(Fusion(), COORDINATED), orders=("random", "swapped"), samples=50)
    rows = whatif(trace, axes, sizes=False).rows
    alone = rows.filter(pl.col("fusion") == "1")
    assert alone["probability"].min() > 0.5  # type: ignore[operator]
    together = rows.filter(pl.col("fusion") == "coordinated")
    assert together["schedules"].to_list() == [50, 50]
    assert together.select("probability", "mismatch").sum().row(0) == (0.0, 0.0)


def test_what_a_rank_never_announces_stalls_who_waits_for_it() -> None:
    ranks = [[*(gradient(k, 4) for k in range(4)), wait(*waited)]
             for waited in ((0, 1, 2), (0, 1, 2))]  # fmt: skip
    del ranks[1][3]
    axes = Axes(fusion=(COORDINATED,), orders=("recorded", "random"), samples=20)
    assert whatif(made(*ranks), axes, sizes=False).rows["probability"][0] == 0.0
    ranks[0][-1] = wait()
    rows = whatif(made(*ranks), axes, sizes=False)
    assert rows.rows["probability"][0] == 1.0
    _, w = rows.witnesses[0]
    p = program_of(made(*ranks), w)
    stuck = p.matching.events.filter(~pl.Series(run(p, w.scenario).completed))
    # the one that rank 1 never announces, and who waits for it
    assert sorted(stuck.select("rank", "seq").rows()) == [(0, 3), (0, 4)]


def coordinated_by_hand(ranks: list[list[tuple[str, int]]]) -> bool:
    """Does everyone get through? ("announce", k) is of the k-th of its rank; ("wait", k)."""
    at = [0] * len(ranks)
    announced: list[set[int]] = [set() for _ in ranks]
    moved = True
    while moved:
        moved = False
        for r, ops in enumerate(ranks):
            while at[r] < len(ops):
                what, k = ops[at[r]]
                if what == "announce":
                    announced[r].add(k)
                elif not all(k in a for a in announced):
                    break
                at[r] += 1
                moved = True
    return all(a == len(ops) for a, ops in zip(at, ranks, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_coordination_is_that_of_a_loop_over_announcements(seed: int) -> None:
    rng = random.Random(seed)
    plain: list[list[tuple[str, int]]] = []
    for _ in range(3):
        ops: list[tuple[str, int]] = []
        for k in range(rng.choice([4, 4, 4, 3])):
            ops.append(("announce", k))
            while rng.random() < 0.4:
                ops.append(("wait", rng.randint(0, k)))
        plain.append(ops)
    ranks = [
        [gradient(k, 4) if what == "announce" else wait(k) for what, k in ops] for ops in plain
    ]
    found = row(made(*ranks), fusion=COORDINATED)
    assert found["probability"] == (0.0 if coordinated_by_hand(plain) else 1.0)


def test_a_sample_is_the_same_whatever_is_beside_it() -> None:
    job = made(*([*(gradient(k, k + 1) for k in range(6)), wait()] for _ in range(2)))
    other = made(*([*(gradient(k, k + 1) for k in range(3)), wait()] for _ in range(2)))
    alone = variant(job, Fusion(2), "random", 1, seed=7, first=2).trace.events
    beside = variant(concat([other, job]), Fusion(2), "random", 4, seed=7).trace.events
    mine = beside.filter(pl.col("job") == 2 * 2 + 1).sort("rank", "seq")
    assert mine["count"].to_list() == alone.sort("rank", "seq")["count"].to_list()
    again = variant(job, Fusion(2), "random", 1, seed=8, first=2).trace.events
    assert again.sort("rank", "seq")["count"].to_list() != mine["count"].to_list()


def test_probability_of_a_mismatch_is_what_can_be_counted() -> None:
    """Three gradients of three sizes on two ranks, each in any order.

    One time in 6 they agree; fused two at a time, when both leave the same one for the last: one
    time in 3; all in one, always.
    """
    trace = made(*([*(gradient(k, 2**k) for k in range(3)), wait()] for _ in range(2)))
    axes = Axes(
        fusion=(Fusion(), Fusion(2), Fusion(3)), orders=("recorded", "random"), samples=200
    )  # fmt: skip
    rows = whatif(trace, axes, sizes=False).rows
    assert rows.filter(pl.col("order") == "recorded")["probability"].to_list() == [0.0, 0.0, 0.0]
    tried = rows.filter(pl.col("order") == "random").sort("fusion")
    for exact, r in zip((5 / 6, 2 / 3, 0.0), tried.to_dicts(), strict=True):
        assert r["low"] <= exact <= r["high"], (exact, r)
        assert r["mismatch"] == r["probability"]
        assert r["schedules"] == 200
        assert not r["exact"]


def test_equal_sizes_hide_a_mismatch() -> None:
    """The operation completes, and the result is wrong: no deadlock, and said."""
    trace = made(*([*(gradient(k, 8) for k in range(4)), wait()] for _ in range(2)))
    r = row(trace, orders="random")
    assert r["probability"] == 0.0
    assert r["mismatch"] > 0.5


def test_threads_in_any_order() -> None:
    """Two threads of each rank fill one stream: half of the orders are crossed."""

    def on(comm: str, lane: int) -> dict[str, Any]:
        return op("all_reduce", comm, count=4, dtype="f32", stream="s", lane=lane)

    trace = made(*([on("a", 1), on("b", 2)] for _ in range(2)), comms=TWO)
    r = whatif(trace, Axes(orders=("threads",), samples=200), sizes=False).rows.row(0, named=True)
    assert r["low"] <= 0.5 <= r["high"]
    assert not r["mismatch"]


def test_an_order_that_cannot_have_been_is_not_counted() -> None:
    """Thread 2 waits for what thread 1 has enqueued: its own operation always comes second."""
    ranks = [
        [
            op("all_reduce", "a", count=4, dtype="f32", stream="s", lane=1, request=1),
            {"op": "wait", "requests": [1], "lane": 2},
            op("all_reduce", "b", count=4, dtype="f32", stream="s", lane=2),
        ]
        for _ in range(2)
    ]
    found = whatif(made(*ranks, comms=TWO), Axes(orders=("threads",)), sizes=False)
    r = found.rows.row(0, named=True)
    assert r["probability"] == 0.0
    assert 0 < r["schedules"] < 32


@pytest.mark.parametrize("queues", [1, 2, 3])
def test_overlap(queues: int) -> None:
    """Three streams in opposite orders: with fewer queues than streams it bites."""
    names = "abc"
    ranks = [[op("all_reduce", c, count=4, dtype="f32", stream=c) for c in order]
             for order in (names, names[::-1])]  # fmt: skip
    trace = made(*ranks, comms={c: [0, 1] for c in names})
    # the first and the third stream of a rank share the first of two queues
    assert row(trace, queues=queues)["probability"] == float(queues < 3)
    f = findings(trace)[0]
    assert (f["kind"], f["details"]["deadlocks_with_device_queues"]) == ("potential", [1, 2])


# --------------------------------------------------------------------------------------------------
# Matches and witnesses


def test_recorded_matches_are_set_free() -> None:
    trace = made(
        [recv("any", matched_peer=1), recv(2)], [send(0)], [send(0)], backend="mpi"
    )  # fmt: skip
    assert row(trace, matches="recorded")["probability"] == 0.0
    r = row(trace, matches="all")
    assert (r["probability"], r["schedules"], r["exact"]) == (0.5, 2, True)
    probed = made(
        [op("probe", peer="any", matched_peer=1), recv(1), recv(2)], [send(0)], [send(0)],
        backend="mpi",
    )  # fmt: skip
    assert free_matches(probed).events["peer"].to_list()[:3] == [-1, -1, 2]
    assert row(probed, matches="all")["probability"] == 0.5


def test_a_witness_leads_where_it_says() -> None:
    """Of every row that deadlocks: read back from JSON, made again from its job alone."""
    traces = [
        made([recv("any"), recv(2)], [send(0)], [send(0)], backend="mpi"),
        made(*([*(gradient(k, k + 1) for k in range(4)), wait()] for _ in range(2))),
        made([sized(1, 4), taken(1, 4)], [sized(0, 4), taken(0, 4)]),
    ]
    axes = Axes(
        buffer=(0, 4), fusion=(Fusion(), Fusion(2)), orders=("recorded", "random"),
        matches=("all",), samples=6,
    )  # fmt: skip
    found = whatif(concat(traces), axes, Budget(64), seed=5)
    assert len(found.witnesses) > 10
    kinds = set()
    for job, w in found.witnesses:
        again = Witness.of(w.plain())
        assert again == w
        s = schedule(program_of(traces[job], again), again.scenario)
        assert s.deadlocked
        kinds.add((job, w.order, bool(w.scenario.given)))
    assert len(kinds) >= 4
    with pytest.raises(ValueError, match="expected what whatif writes"):
        Witness.of({"scenario": {"no_such_field": 1}})


def test_steps_and_where_it_stands() -> None:
    trace = made([send(1), recv(1), recv(1)], [recv(0), send(0)])
    s = schedule(build(match(trace)), Scenario(use_states=False))
    shown = steps(s)
    at = {(step.rank, step.event, step.what): step.row for step in shown}
    assert [step.row for step in shown] == sorted(step.row for step in shown)
    # what rank 0 does second stands below what it does first
    assert at[0, 0, "done"] < at[0, 1, "done"] < at[0, 2, "started"]
    assert [(p.rank, p.place, p.operation["op"], p.waits_for) for p in standing(s)] == [
        (0, "host", "recv", (1,))
    ]
    assert s.deadlocked
    whole = schedule(build(match(made([send(1)], [recv(0)]))), Scenario(use_states=False))
    assert not whole.deadlocked
    assert standing(whole) == []


def test_a_schedule_as_a_recorder_would_have_written_it() -> None:
    trace = made([recv("any"), recv(2)], [send(0)], [send(0)], backend="mpi")
    free = Scenario(use_states=False, chosen=True, given=(1,))
    written = recorded(schedule(build(match(trace)), free))
    e = written.events.sort("rank", "seq")
    assert e["state"].to_list() == [3, 2, 2, 3]
    assert e["matched_peer"].to_list() == [2, None, None, None]
    assert (e["t_created"] < e["t_started"]).all()
    assert {f["evidence"] for f in findings(written)} == {"observed"}
    assert 0 in {r for f in findings(written) for r in (*f["culprits"], *f["victims"])}


def test_time_that_ran_out_is_said() -> None:
    trace = made([sized(1, 4), taken(1, 4)], [sized(0, 4), taken(0, 4)])
    found = whatif(trace, Axes(fusion=(Fusion(), Fusion(2))), Budget(16, 0.0))
    assert "ended before fusion 1" in found.cut
    assert found.rows.is_empty()


def test_a_scan_says_how_probable_it_is() -> None:
    trace = made([recv("any"), recv("any"), recv(3)], *([send(0)] for _ in range(3)), backend="mpi")
    f = findings(trace)[0]
    assert f["kind"] == "potential"
    assert f["probability"] == pytest.approx(2 / 3)
    assert (f["details"]["schedules"], f["details"]["every_schedule"]) == (6, True)
    given = tuple(f["details"]["witness"]["given"])
    w = Witness(matches="all", scenario=Scenario(use_states=False, chosen=True, given=given))
    assert schedule(program_of(trace, w), w.scenario).deadlocked


def test_every_combination_is_a_row() -> None:
    trace = made([sized(1, 4), taken(1, 4)], [sized(0, 4), taken(0, 4)])
    axes = Axes(buffer=(0, 4), eager=(0, 2), queues=(0, 1), messages=(0, 1))
    rows = whatif(trace, axes, sizes=False).rows
    keys = rows.select("buffer", "eager", "queues", "messages").rows()
    assert sorted(keys) == sorted(itertools.product((0, 4), (0, 2), (0, 1), (0, 1)))
