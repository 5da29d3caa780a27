"""Verdicts: for every kind of DESIGN.md section 5 a job by hand, and near misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from analysis.handmade import (
    NS,
    START,
    deadlocked,
    findings,
    healthy,
    made,
    only,
    op,
    recorded,
    recv,
    send,
    wait,
)

from dl2gpu.analysis import analyse
from dl2gpu.report.model import KINDS
from dl2gpu.trace.schema import Trace, concat

Op = dict[str, Any]

RECORDER = {"source": "flight_recorder", "waits": False}


def place(step: Any) -> tuple[int, int, str]:
    return step["rank"], step["seq"], step["op"]


def places(steps: Sequence[Any]) -> list[tuple[int, int, str]]:
    return [place(s) for s in steps]


def check(f: dict[str, Any], kind: str, **facts: Any) -> None:
    """The finding is of this kind, has these facts, and tells a person what to do."""
    assert f["kind"] == kind
    assert {k: f[k] for k in facts} == facts
    assert f["kind"] in KINDS
    assert f["advice"].endswith(".")
    assert f["summary"].endswith(".")
    assert len(f["fingerprint"]) == 16
    assert not set(f["culprits"]) & set(f["victims"])


# --------------------------------------------------------------------------------------------------
# cycle, order_inversion, init_cycle


def test_cycle() -> None:
    trace = made([recv(1), send(1), send(2)], [recv(0), send(0)], [recv(0)])
    f = only(trace)
    check(f, "cycle", evidence="proven", culprits=(0, 1), victims=(2,), deadlocked=True)
    assert places(f["cycle"]) == [(0, 0, "recv"), (1, 0, "recv")]
    assert [s["waits_for"] for s in f["cycle"]] == [[1], [0]]
    assert {s["place"] for s in f["cycle"]} == {"host"}
    assert {(0, 0, "recv"), (1, 0, "recv")} <= set(places(f["hangs_at"]))
    assert deadlocked(trace) is True


def test_cycle_of_three_in_order() -> None:
    f = only(made(*([recv((r + 1) % 3), send((r - 1) % 3)] for r in range(3))))
    check(f, "cycle", culprits=(0, 1, 2), victims=())
    assert [(s["rank"], s["waits_for"]) for s in f["cycle"]] == [(0, [1]), (1, [2]), (2, [0])]


A = op("all_to_all", "shard", stream="s", request=1, site="shard a.py:1")
B = op("all_reduce", "repl", stream="r", request=2, site="repl b.py:2")
TWO = {"shard": [0, 1], "repl": [0, 1]}


def test_order_inversion_proven() -> None:
    f = only(made([A, wait(), B], [B, wait(), A], comms=TWO))
    check(
        f, "order_inversion", evidence="proven", culprits=(0, 1), deadlocked=True,
        reason="host_blocked",
    )  # fmt: skip
    assert {s["stack"][0] for s in f["hangs_at"]} == {"shard a.py:1", "repl b.py:2"}
    assert [(s["rank"], s["place"], s["stream"]) for s in f["cycle"]] == [
        (0, "host", None), (0, "stream", "s"), (1, "host", None), (1, "stream", "r"),
    ]  # fmt: skip


def test_order_inversion_inferred() -> None:
    """A recorder without host waits: only the two pending operations are seen."""
    trace = made(recorded([A], 0), recorded([B], 0), comms=TWO, exits="alive", job_facts=RECORDER)
    check(only(trace), "order_inversion", evidence="inferred", culprits=(0, 1), deadlocked=True)


def test_order_inversion_on_one_stream_is_observed() -> None:
    """Each rank has both, one behind the other: nothing needs to be inferred."""
    a, b = (o | {"stream": "s"} for o in (A, B))
    trace = made(
        recorded([a, b], 0), recorded([b, a], 0), comms=TWO, exits="alive", job_facts=RECORDER
    )
    check(only(trace), "order_inversion", evidence="observed", culprits=(0, 1), deadlocked=True)


def test_inverted_order_without_the_wait_is_potential() -> None:
    trace = made([A, B], [B, A], comms=TWO)
    f = only(trace)
    check(f, "potential", deadlocked=None)
    assert "one hardware queue" in f["condition"]
    assert f["details"]["kind"] == "order_inversion"
    assert deadlocked(trace) is None


def create(new: str, comm: str) -> Op:
    return op("comm_create", comm, new_comm=new, blocking=True)


def test_init_cycle() -> None:
    """Two pairs overlap in a ring; each rank creates its communicators in its own order."""
    comms = {"p": [0, 1], "q": [1, 2], "r": [2, 0], **{n: [0] for n in "xyz"}}
    p, q, r = create("x", "p"), create("y", "q"), create("z", "r")
    trace = made([p, r], [q, p], [r, q], comms=comms)
    f = only(trace)
    check(f, "init_cycle", evidence="proven", culprits=(0, 1, 2), deadlocked=True)
    assert healthy(made([p, r], [p, q], [q, r], comms=comms))


# --------------------------------------------------------------------------------------------------
# mismatch


def step(k: int, **keys: Any) -> Op:
    return op("all_reduce") | {"count": 8, "dtype": "f32", "site": f"step{k} m.py:{k}"} | keys


MISMATCHES: dict[str, Op] = {
    "op": {"op": "all_gather"},
    "count": {"count": 9},
    "dtype": {"dtype": "bf16"},
    "root": {"root": 3},
}


@pytest.mark.parametrize(("aspect", "other"), MISMATCHES.items(), ids=MISMATCHES)
def test_mismatch(aspect: str, other: Op) -> None:
    base = step(1) | ({"op": "broadcast", "root": 0} if aspect == "root" else {})
    trace = made(*([step(0), base | (other if r == 2 else {}), step(2)] for r in range(4)))
    f = only(trace)
    check(f, "mismatch", evidence="proven", culprits=(2,), victims=(0, 1, 3), deadlocked=True)
    assert aspect in f["details"]["aspects"]
    assert [c["ranks"] for c in f["details"]["signatures"]] == [[0, 1, 3], [2]]
    assert place(f["first_divergence"]) == (2, 1, (base | other)["op"])
    assert places(f["hangs_at"]) == [(r, 1, ((base | other) if r == 2 else base)["op"])
                                     for r in range(4)]  # fmt: skip


def test_two_against_two_convict_nobody() -> None:
    trace = made(*([step(0, count=8 + r % 2)] for r in range(4)))
    check(only(trace), "mismatch", culprits=(), victims=(0, 1, 2, 3), deadlocked=True)
    check(only(made([step(0)], [step(0, count=9)])), "mismatch", culprits=(), victims=(0, 1))


def test_mismatch_under_a_rank_guard() -> None:
    """Rank 0 alone calls something else."""
    ranks = [[step(0), op("barrier", site="log log.py:1") if r == 0 else step(1)] for r in range(4)]
    check(only(made(*ranks)), "mismatch", culprits=(0,), reason="rank_guard", deadlocked=True)


@pytest.mark.parametrize("other", [{"reduce_op": "max"}, {"dtype": "i32"}])
def test_mismatch_that_stops_nobody(other: Op) -> None:
    """Equal bytes: a finding, and no deadlock."""
    base = step(0, reduce_op="sum")
    trace = made(*([base | (other if r == 1 else {}), step(1)] for r in range(3)))
    f = only(trace)
    check(f, "mismatch", culprits=(1,), deadlocked=False)
    assert f["hangs_at"] == ()
    assert deadlocked(trace) is False


def test_mismatch_that_went_through() -> None:
    """Every rank's operation is recorded complete: the result is wrong, the job goes on."""
    ranks = [recorded([step(0), step(1, count=9 if r == 2 else 8), step(2)], 3) for r in range(4)]
    trace = made(*ranks, exits="alive", job_facts=RECORDER)
    f = only(trace)
    check(f, "mismatch", evidence="observed", culprits=(2,), deadlocked=False)
    assert deadlocked(trace) is False


def test_mismatch_that_hangs_post_mortem() -> None:
    ranks = [recorded([step(0), step(1, count=9 if r == 2 else 8)], 1) for r in range(4)]
    f = only(made(*ranks, exits="alive", job_facts=RECORDER))
    check(f, "mismatch", evidence="observed", culprits=(2,), victims=(0, 1, 3), deadlocked=True)


def test_message_of_another_size() -> None:
    f = only(made([send(1, count=4)], [recv(0, count=8)]))
    check(f, "mismatch", evidence="proven", culprits=(), deadlocked=True)
    assert f["details"]["aspects"] == ["count"]


# --------------------------------------------------------------------------------------------------
# missing_participant


def test_missing_finished() -> None:
    """Uneven batches: rank 3 has one step less."""
    trace = made(*([step(0)] * (3 if r < 3 else 2) for r in range(4)))
    f = only(trace)
    check(
        f, "missing_participant", evidence="proven", culprits=(3,), victims=(0, 1, 2),
        reason="finished", deadlocked=True,
    )  # fmt: skip
    assert places(f["hangs_at"]) == [(r, 2, "all_reduce") for r in range(3)]
    assert f["details"]["missing_ranks"] == [3]


def test_one_that_goes_on_alone_is_not_the_victim() -> None:
    """Three have ended, one waits for them: the many are not convicted by the one."""
    trace = made(*([step(0)] * (3 if r == 0 else 2) for r in range(4)))
    check(only(trace), "missing_participant", culprits=(), victims=(0,), deadlocked=True)


def long_run(n: int, lines: int, *, skip: int) -> list[list[Op]]:
    """Four ranks, n steps of some equal all_reduces, each at a line; rank 2 leaves one out."""
    ranks = []
    for r in range(4):
        ops = [step(line) for _ in range(n) for line in range(lines)]
        if r == 2:
            del ops[skip]
        ranks.append(ops)
    return ranks


@pytest.mark.parametrize("lines", [2, 3])
def test_skipped_call_long_before_the_hang(lines: int) -> None:
    """Equal type and size: the ranks pair one position late, and hang at the end of the run."""
    f = only(made(*long_run(10, lines, skip=2 * lines)))
    check(
        f, "missing_participant", evidence="proven", culprits=(2,), victims=(0, 1, 3),
        reason="skipped_call", deadlocked=True,
    )  # fmt: skip
    assert place(f["first_divergence"]) == (2, 2 * lines, "all_reduce")
    assert f["first_divergence"]["stack"] == ["step1 m.py:1"]
    assert {s["seq"] for s in f["hangs_at"]} == {10 * lines - 1}


@pytest.mark.parametrize("lines", [2, 3])
def test_skipped_call_post_mortem(lines: int) -> None:
    """The same from a flight recorder: the last one is pending on three ranks."""
    ranks = [recorded(ops, 10 * lines - 1) for ops in long_run(10, lines, skip=2 * lines)]
    f = only(made(*ranks, exits="alive", job_facts=RECORDER))
    check(f, "missing_participant", evidence="observed", culprits=(2,), reason="skipped_call")
    assert place(f["first_divergence"]) == (2, 2 * lines, "all_reduce")
    assert f["details"]["divergence"]["expected"]["stack"] == ["step0 m.py:0"]


def test_other_group() -> None:
    """Rank 3 is not coming: it works on in a group of its own while the others wait."""
    waits = [op("all_reduce", ordinal=1, stream="s")]
    own = [op("all_reduce", "own", ordinal=k, stream="o") for k in range(1, 6)]
    ranks = [recorded(waits, 0) for _ in range(3)]
    ranks.append(recorded(own, 5, start=START + NS))
    trace = made(
        *ranks, recorded(own, 5, start=START + NS),
        comms={"w": [0, 1, 2, 3], "own": [3, 4]}, exits="alive", job_facts=RECORDER,
    )  # fmt: skip
    f = only(trace)
    check(f, "missing_participant", reason="other_group", victims=(0, 1, 2), deadlocked=None)
    assert f["details"]["missing_ranks"] == [3]


# --------------------------------------------------------------------------------------------------
# unmatched_p2p


def test_send_without_receive() -> None:
    trace = made([send(1), send(1)], [recv(0)], exits="finished")
    f = only(trace)
    check(f, "unmatched_p2p", reason="finished", culprits=())
    assert places(f["hangs_at"]) == [(0, 1, "send")]
    # nobody takes it; whether the sender stands there depends on the buffers
    assert f["deadlocked"] is None
    assert "buffered" in f["condition"]


def test_receive_without_send() -> None:
    trace = made([recv(1)], [])
    f = only(trace)
    check(f, "unmatched_p2p", reason="finished", deadlocked=True)
    assert deadlocked(trace) is True


def batch(*ops: Op, **keys: Any) -> list[Op]:
    return [o | {"group": 1, "stream": "s"} | keys for o in ops]


def test_batch_with_a_forgotten_receive() -> None:
    """Both exchanged in both directions, but for one receive."""
    ranks = [batch(send(1), recv(1)), batch(send(0))]
    f = only(made(*([*ops, wait()] for ops in ranks)))
    check(f, "unmatched_p2p")
    assert f["details"]["unmatched"][0]["op"] == "send"
    assert f["details"]["unmatched"][0]["peer"] == 1


def test_no_unmatched_message_where_a_window_is_lost() -> None:
    """Rank 1's ring buffer has turned: whether the receive was there cannot be told."""
    ranks = [recorded([send(1) | {"stream": "s"}], 0), []]
    whole = made(*ranks, exits={0: "alive", 1: "finished"}, job_facts=RECORDER)
    assert {f["kind"] for f in findings(whole)} == {"unmatched_p2p"}
    cut = made(
        *ranks, exits={0: "alive", 1: "finished"}, job_facts=RECORDER,
        rank_facts={1: {"lost_before": 100}},
    )  # fmt: skip
    assert {f["kind"] for f in findings(cut)} == {"insufficient_evidence"}
    assert not [r for f in findings(cut) for r in f["culprits"]]
    assert deadlocked(cut) is not True


# --------------------------------------------------------------------------------------------------
# Not deadlocks of the program


@pytest.mark.parametrize(
    "how",
    [
        {"exits": {2: "crashed"}},
        {"exits": {2: "killed"}},
        {"rank_facts": {2: {"truncated": True}}},
    ],
    ids=["crashed", "killed", "truncated"],
)
def test_crashed_rank(how: dict[str, Any]) -> None:
    exits = {0: "alive", 1: "alive", 2: "alive"} | how.get("exits", {})
    ranks = [recorded([step(0), step(1)][: 1 if r == 2 else 2], 1) for r in range(3)]
    trace = made(*ranks, exits=exits, rank_facts=how.get("rank_facts", {}))
    f = only(trace)
    check(f, "crashed_rank", culprits=(2,), victims=(0, 1), reason="crashed", deadlocked=False)
    assert deadlocked(trace) is False


def test_killed_by_the_launcher_is_no_culprit() -> None:
    """All were killed at the end; two of them stood in an operation that lacks the third."""
    ranks = [recorded([step(0), step(1)][: 1 if r == 2 else 2], 1) for r in range(3)]
    trace = made(*ranks, exits={0: "killed", 1: "killed", 2: "crashed"})
    check(only(trace), "crashed_rank", culprits=(2,), victims=(0, 1))


def test_stalled_rank() -> None:
    """Rank 2 is alive with nothing pending: its data loader, its checkpoint, a compilation."""
    ops = [step(k, stream="s") for k in range(3)]
    ranks = [recorded(ops[: 2 if r == 2 else 3], 2) for r in range(4)]
    trace = made(*ranks, exits="alive", job_facts=RECORDER)
    f = only(trace)
    check(
        f, "stalled_rank", evidence="observed", culprits=(2,), victims=(0, 1, 3),
        reason="stalled", deadlocked=False,
    )  # fmt: skip
    assert deadlocked(trace) is False


def test_stalled_device() -> None:
    """Others have completed what rank 1's device has not."""
    ops = [step(k, stream="s") for k in range(3)]
    ranks = [recorded(ops, 1 if r == 1 else 2) for r in range(4)]
    trace = made(*ranks, exits="alive", job_facts=RECORDER)
    f = only(trace)
    check(f, "stalled_rank", culprits=(1,), reason="device", deadlocked=False)
    assert place(f["first_divergence"]) == (1, 1, "all_reduce")


def test_in_flight() -> None:
    ops = [step(k, stream="s") for k in range(3)]
    trace = made(*(recorded(ops, 2) for _ in range(4)), exits="alive", job_facts=RECORDER)
    f = only(trace)
    check(
        f, "in_flight", evidence="observed", culprits=(), victims=(0, 1, 2, 3), reason="library",
        deadlocked=False,
    )  # fmt: skip
    assert places(f["hangs_at"]) == [(r, 2, "all_reduce") for r in range(4)]


def test_when_it_stopped_and_what_it_cost() -> None:
    """Progress ends with the last completion or call; the records say until when ranks lived."""
    ops = [step(k, stream="s") for k in range(3)]
    last = START + 3600 * NS
    trace = made(
        *(recorded(ops, 2) for _ in range(4)), exits="alive", job_facts=RECORDER,
        rank_facts={r: {"t_last": last} for r in range(4)},
    )  # fmt: skip
    f = only(trace)
    assert f["stopped_at_ns"] == START + 2 * NS
    assert f["gpu_hours_lost"] == pytest.approx(4 * (3600 - 2) / 3600, abs=1e-3)


# --------------------------------------------------------------------------------------------------
# potential


def test_potential_for_want_of_buffers() -> None:
    both_send = [[send(1 - r, count=1000), recv(1 - r, count=1000)] for r in range(2)]
    trace = made(*both_send)
    f = only(trace)
    check(f, "potential", evidence="proven", deadlocked=None)
    assert f["details"]["safe_bytes"] == 4000
    assert f["details"]["kind"] == "cycle"
    assert "3.9 KiB" in f["condition"]
    assert deadlocked(trace) is None


def test_the_same_seen_standing_is_a_cycle() -> None:
    """The records end alive, in the sends: nothing was buffered."""
    trace = made([send(1)], [send(0)], exits="alive")
    f = only(trace)
    assert f["kind"] in ("cycle", "unmatched_p2p", "insufficient_evidence")
    both = made([send(1), recv(1)], [send(0), recv(0)], exits="alive")
    assert {f["kind"] for f in findings(both)} <= {"cycle", "potential"}


def test_synchronous_sends_are_a_cycle() -> None:
    sends = [[send(1 - r, send_mode="synchronous"), recv(1 - r)] for r in range(2)]
    check(only(made(*sends, backend="mpi")), "cycle", deadlocked=True)


# --------------------------------------------------------------------------------------------------
# insufficient_evidence


def test_no_record_of_the_one_that_is_waited_for() -> None:
    trace = made(*([step(0)] for _ in range(3)), exits="alive", absent=[2])
    f = only(trace)
    check(f, "insufficient_evidence", reason="no_data", culprits=(), victims=(0, 1))
    assert f["details"]["missing_ranks"] == [2]
    assert deadlocked(trace) is None


def test_a_record_that_is_older_than_the_others() -> None:
    """Others have completed what needs rank 2, and its record does not have: it is an old dump."""
    ops = [step(k, stream="s") for k in range(4)]
    ranks = [recorded(ops, 3) for _ in range(3)]
    ranks[2] = recorded(ops[:2], 2)
    trace = made(*ranks, exits="alive", job_facts=RECORDER)
    assert not [r for f in findings(trace) for r in f["culprits"]]
    assert {f["kind"] for f in findings(trace)} <= {"insufficient_evidence"}
    assert deadlocked(trace) is not True


# --------------------------------------------------------------------------------------------------
# Healthy, though it may not look so


def test_healthy_program() -> None:
    assert healthy(made(*([step(k) for k in range(3)] for _ in range(4))))


def test_two_call_sites_of_one_operation() -> None:
    """``if rank == 0: broadcast(x) else: broadcast(y)``, again and again."""
    one = [op("broadcast", root=0, count=4, dtype="f32", site="a a.py:1")] * 3
    other = [op("broadcast", root=0, count=4, dtype="f32", site="b b.py:2")] * 3
    assert healthy(made(one, other, other, other))
    ranks = [recorded(o, 3) for o in (one, other, other, other)]
    assert healthy(made(*ranks, exits="alive", job_facts=RECORDER))


def test_two_call_sites_do_not_explain_a_hang() -> None:
    """Then one rank stalls: the sites at which it never differed say nothing of it."""
    one, other = (
        [op("broadcast", root=0, count=4, dtype="f32", stream="s", site=s)] * 3
        for s in ("a a.py:1", "b b.py:2")
    )
    ranks = [recorded(one, 2), recorded(other, 2), recorded(other[:2], 2), recorded(other, 2)]
    f = only(made(*ranks, exits="alive", job_facts=RECORDER))
    check(f, "stalled_rank", culprits=(2,))


def test_snapshot_while_ranks_run_on() -> None:
    """Dumps are not of one moment: what one has not issued yet, another has completed."""
    ops = [step(k, stream="s") for k in range(6)]
    ranks = [recorded(ops[: 4 + r % 2], 4 + r % 2) for r in range(4)]
    trace = made(*ranks, exits="alive", job_facts=RECORDER)
    assert not [r for f in findings(trace) for r in f["culprits"]]
    assert deadlocked(trace) is not True


def test_one_rank_groups() -> None:
    mine = {f"own{r}": [r] for r in range(3)}
    ranks = [
        [step(0), *([op("all_reduce", f"own{r}", count=4, dtype="f32")] * r)] for r in range(3)
    ]
    assert healthy(made(*ranks, comms=mine))


def test_ring_buffers_that_have_turned() -> None:
    """Each rank has lost another number of operations; what is there is complete."""
    ops = [step(0, ordinal=k) for k in range(100, 120)]
    ranks = [recorded(ops, 20)[5 * r :] for r in range(3)]
    lost = {r: {"lost_before": 100 + 5 * r} for r in range(3)}
    assert healthy(made(*ranks, exits="alive", job_facts=RECORDER, rank_facts=lost))
    # and with the last one pending everywhere it is that one alone
    ranks = [recorded(ops, 19)[5 * r :] for r in range(3)]
    f = only(made(*ranks, exits="alive", job_facts=RECORDER, rank_facts=lost))
    check(f, "in_flight", culprits=())
    assert {s["ordinal"] for s in f["hangs_at"]} == {119}


def test_a_ring_buffer_without_numbers_accuses_nobody() -> None:
    ranks = [recorded([step(0)] * (5 + r), 5 + r) for r in range(3)]
    trace = made(*ranks, exits="alive", job_facts=RECORDER, rank_facts={1: {"lost_before": 7}})
    assert not [r for f in findings(trace) for r in f["culprits"]]
    assert deadlocked(trace) is not True


def test_active_entries_only() -> None:
    """Records of what is pending, with the numbers that were completed before."""
    ranks = [recorded([step(0, ordinal=41, stream="s")], 0) for _ in range(3)]
    status = [(r, "w", 41, 40, 40) for r in range(3)]
    facts = {r: {"only_active": True} for r in range(3)}
    trace = made(*ranks, exits="alive", job_facts=RECORDER, rank_facts=facts, status=status)
    check(only(trace), "in_flight", culprits=(), deadlocked=False)


def test_empty_collective_on_nccl() -> None:
    """A rank with no tokens: NCCL drops the call, gloo waits in it."""
    ops = [op("all_reduce", count=n, dtype="f32") for n in (8, 0)]
    assert healthy(made([ops[1]], [ops[1]]))
    assert {f["kind"] for f in findings(made([ops[0]], [ops[1]], backend="nccl"))} == {
        "missing_participant"
    }
    assert {f["kind"] for f in findings(made([ops[0]], [ops[1]], backend="gloo"))} == {"mismatch"}


def test_gloo_whose_states_say_nothing() -> None:
    """gloo leaves everything scheduled: a record without a single completion has no states."""
    ranks = [recorded([step(k) for k in range(3)], 0) for _ in range(3)]
    trace = made(*ranks, backend="gloo", exits="alive",
                 job_facts=RECORDER | {"p2p": False})  # fmt: skip
    assert not [f for f in findings(trace) if f["kind"] != "insufficient_evidence"]
    assert deadlocked(trace) is not True


# --------------------------------------------------------------------------------------------------
# Of several jobs, several findings


def test_jobs_are_judged_apart() -> None:
    stuck = made([recv(1), send(1)], [recv(0), send(0)], name="stuck")
    fine = made([send(1)], [recv(0)], name="fine")
    result = analyse(concat([fine, stuck, fine]))
    assert result.jobs["verdict"].to_list() == ["healthy", "cycle", "healthy"]
    assert result.jobs["deadlocked"].to_list() == [False, True, False]
    assert [f["job"] for f in result.findings] == [1]


def test_attempts_are_not_matched_with_each_other() -> None:
    """The first attempt lacks rank 1, the second has it: each is judged by itself."""
    first = made([step(0)], [], exits={0: "alive", 1: "crashed"})
    second = made([step(0)], [step(0)])
    second = replace(second, jobs=second.jobs.with_columns(attempt=pl.lit(1, pl.Int32)))
    result = analyse(concat([first, second]))
    assert result.jobs["verdict"].to_list() == ["crashed_rank", "healthy"]


def test_one_fault_in_many_places_is_one_finding() -> None:
    """Each of three pairs sits in the same circle at the same lines."""
    ranks = [
        [recv(r ^ 1, site="x x.py:1"), send(r ^ 1, site="y y.py:2")] for r in range(6)
    ]  # fmt: skip
    f = only(made(*ranks))
    check(f, "cycle", culprits=(0, 1, 2, 3, 4, 5))
    assert f["details"]["places"] == 3
    assert len(f["hangs_at"]) == len({(h["rank"], h["seq"]) for h in f["hangs_at"]})


def test_two_faults_are_two_findings() -> None:
    """A circle of ranks 0 and 1, and a rank that ended without ranks 2 and 3."""
    trace = made(
        [recv(1), send(1)], [recv(0), send(0)], [op("barrier", "g")], [op("barrier", "g")], [],
        comms={"g": [2, 3, 4]},
    )  # fmt: skip
    found = findings(trace)
    assert [(f["kind"], f["culprits"]) for f in found] == [
        ("cycle", (0, 1)), ("missing_participant", (4,)),
    ]  # fmt: skip
    assert [f["victims"] for f in found] == [(), (2, 3)]
    assert analyse(trace).jobs["verdict"].to_list() == ["cycle"]


def test_nothing_at_all() -> None:
    assert healthy(made([], []))
    result = analyse(Trace())
    assert result.findings == []
    assert result.jobs.height == 0
