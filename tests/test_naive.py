"""The reference itself, tested on small programs and on labelled ones.

The outcome of the small ones follows by hand, rule by rule of DESIGN.md
section 4; that of the labelled programs has been stated by others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus import shared_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import INFINITE, Choices, Fact, progress, stuck_places
from programs import Op, Program, from_seed, renamed, seeds, shuffled, trace_of

from dl2gpu.trace.schema import validate

RENDEZVOUS = Choices()
BUFFERED = Choices(eager_bytes=INFINITE)


def op(name: str, **keys: Any) -> Op:
    """An operation on the host that blocks, on the communicator of all, unless told otherwise."""
    return {"op": name} | ({} if name in ("wait", "finalize") else {"comm": "w"}) | keys


def send(peer: int, **keys: Any) -> Op:
    return op("send", peer=peer, count=4, dtype="f32", **keys)


def recv(peer: int, **keys: Any) -> Op:
    return op("recv", peer=peer, count=4, dtype="f32", **keys)


def run(
    *ranks: list[Op],
    choices: Choices = RENDEZVOUS,
    backend: str | None = "mpi",
    comms: dict[str, list[int]] | None = None,
    world_size: int | None = None,
) -> dict[int, list[Fact]]:
    """Facts of each rank's operations, in the order written."""
    world = world_size or len(ranks)
    everyone = {"w": list(range(world))} | (comms or {})
    trace = trace_of(Program(dict(enumerate(ranks)), everyone, backend, world))
    found = progress(trace, choices)
    return {
        rank: [
            found[rank, operation.get("lane", 0), operation.get("seq", position)]
            for position, operation in enumerate(operations)
        ]
        for rank, operations in enumerate(ranks)
    }


def marks(facts: list[Fact]) -> str:
    """One letter an operation: c(ompleted), s(tarted), i(ssued) or - (none of these)."""
    return "".join(
        "c" if f.completed else "s" if f.started else "i" if f.issued else "-" for f in facts
    )


def outcome(*ranks: list[Op], **keys: Any) -> list[str]:
    return [marks(facts) for facts in run(*ranks, **keys).values()]


# --------------------------------------------------------------------------------------------------
# Rule 1: the host


def test_the_host_waits_for_a_blocking_operation() -> None:
    assert outcome([recv(1), op("barrier")], [op("barrier")]) == ["s-", "s"]


def test_the_host_goes_on_behind_a_request_and_behind_a_stream() -> None:
    for where in ({"blocking": False, "request": 1}, {"stream": "s"}):
        assert outcome([recv(1, **where), op("barrier")], [op("barrier")]) == ["sc", "c"]


def test_lanes_go_on_by_themselves() -> None:
    assert outcome([recv(1), op("barrier", lane=1)], [op("barrier")]) == ["sc", "c"]


def test_blocking_on_a_communicator_of_one_rank() -> None:
    alone = {"me": [0]}
    assert outcome([op("all_reduce", comm="me", count=4)], [], comms=alone) == ["c", ""]


# --------------------------------------------------------------------------------------------------
# Rule 2: streams and batches


def test_a_stream_runs_in_order_and_streams_run_side_by_side() -> None:
    first = [op("barrier", stream="s"), op("barrier", comm="v", stream="t")]
    comms = {"v": [0, 1]}
    assert outcome(first, first[::-1], comms=comms, backend="nccl") == ["cc", "cc"]
    shared = [op("barrier", stream="s"), op("barrier", comm="v", stream="s")]
    assert outcome(shared, shared[::-1], comms=comms, backend="nccl") == ["si", "si"]


def test_one_hardware_queue_a_rank() -> None:
    first = [op("barrier", stream="s"), op("barrier", comm="v", stream="t")]
    one = Choices(streams="one")
    assert outcome(first, first[::-1], comms={"v": [0, 1]}, choices=one) == ["si", "si"]


def test_lanes_that_share_a_stream_fill_it_as_recorded() -> None:
    """Lane 1 was recorded first, and is ahead of lane 0 on the stream."""
    late = op("barrier", comm="v", stream="s", lane=0, seq=9)
    early = op("barrier", stream="s", lane=1, seq=1)
    both = {"v": [0, 1]}
    assert outcome([early, late], [op("barrier")], comms=both) == ["cs", "c"]
    assert outcome([early, late], [op("barrier", comm="v")], comms=both) == ["si", "s"]


def batch(*members: Op, group: int = 1) -> list[Op]:
    return [member | {"group": group} for member in members]


def test_a_batch_is_issued_as_one_and_waited_for_behind_its_last_member() -> None:
    ring = [batch(send(1), recv(1)), batch(send(0), recv(0))]
    assert outcome(*ring, backend="gloo") == ["cc", "cc"]
    in_turn = [[send(1), recv(1)], [send(0), recv(0)]]
    assert outcome(*in_turn, backend="gloo") == ["s-", "s-"]


def test_a_batch_starts_when_all_its_members_can() -> None:
    """The receive could start, but the send's stream is taken."""
    first = [op("barrier", comm="v", stream="t")]
    both = batch(send(1, stream="t"), recv(1, stream="s"))
    assert outcome([*first, *both], [send(0)], comms={"v": [0, 1]}) == ["sii", "s"]


def test_a_batch_completes_as_a_unit() -> None:
    """The receive's partner is there, the send's is not; the partner is let go all the same."""
    ranks = batch(send(1), recv(1)), [send(0)]
    assert outcome(*ranks, backend="nccl") == ["ss", "c"]


def test_an_atomic_batch_holds_back_the_partners_of_its_members() -> None:
    atomic = Choices(atomic_batch=True)
    ranks = batch(send(1), recv(1)), [send(0)]
    assert outcome(*ranks, backend="nccl", choices=atomic) == ["ss", "s"]
    complete = batch(send(1), recv(1)), batch(send(0), recv(0))
    assert outcome(*complete, backend="nccl", choices=atomic) == ["cc", "cc"]


def test_an_atomic_batch_asks_one_step_far() -> None:
    """Rank 1's batch has both partners started, and shows itself, though 2 holds it back."""
    ranks = [recv(1)], batch(send(0), recv(2)), batch(send(1), recv(0))
    atomic = Choices(atomic_batch=True)
    assert outcome(*ranks, backend="nccl", choices=atomic) == ["c", "ss", "ss"]


def test_what_follows_a_batch_on_its_stream_waits_for_all_of_it() -> None:
    ranks = [*batch(send(1, stream="s"), recv(1, stream="s")), op("barrier", stream="s")]
    assert outcome(ranks, [recv(0), op("barrier")], backend="nccl") == ["ssi", "cs"]


# --------------------------------------------------------------------------------------------------
# Rule 3: synchronising collectives


@pytest.mark.parametrize("name", ["all_reduce", "barrier", "comm_create", "scan", "all_to_nobody"])
def test_nobody_leaves_before_all_have_come(name: str) -> None:
    assert outcome([op(name)], [op(name)], [recv(0), op(name)]) == ["s", "s", "s-"]
    assert outcome([op(name)], [op(name)], [op(name)]) == ["c", "c", "c"]


def test_collectives_are_counted_per_communicator() -> None:
    """The k-th with the k-th, whatever comes in between on others."""
    mine = [op("barrier", stream="s"), op("barrier", comm="v", stream="t")]
    assert outcome([mine[0], *mine], [*mine, mine[0]], comms={"v": [0, 1]}) == ["ccc", "ccc"]


def test_recorded_ordinals_come_first() -> None:
    """The first rank lost number 7."""
    left = [op("barrier", ordinal=8, stream="s")]
    right = [op("barrier", ordinal=7, stream="t"), op("barrier", ordinal=8, stream="s")]
    assert outcome(left, right) == ["c", "sc"]


def test_finalize_runs_over_the_whole_job() -> None:
    assert outcome([op("finalize")], [op("finalize")]) == ["c", "c"]
    assert outcome([op("finalize")], [op("finalize")], world_size=3) == ["s", "s"]


@pytest.mark.parametrize(
    ("left", "right", "fits"),
    [
        (op("all_reduce", count=4), op("all_gather", count=4), False),
        (op("all_reduce", count=4), op("all_reduce", count=8), False),
        (op("all_reduce", count=4), op("all_reduce"), True),
        (op("all_gather_v", count=4), op("all_gather_v", count=8), True),
        (op("gather", count=4, root=0), op("gather", count=0, root=0), True),
        (op("gather", count=4, root=0), op("gather", count=8, root=0), False),
        (op("scan", count=4), op("scan", count=8), False),
        (op("all_reduce", count=8, dtype="f32"), op("all_reduce", count=4, dtype="f64"), True),
        (op("broadcast", root=0), op("broadcast", root=1), False),
        (op("broadcast", root=0), op("broadcast", root=None), True),
        (op("all_reduce", reduce_op="sum"), op("all_reduce", reduce_op="max"), True),
        (op("all_reduce", count=4, dtype="f32"), op("all_reduce", count=4, dtype="i32"), True),
        (op("all_reduce", count=4, dtype="f32"), op("all_reduce", count=4, dtype="f64"), False),
        (op("all_reduce", count=4, dtype="f32"), op("all_reduce", count=4, dtype="odd"), True),
        (op("comm_create", new_comm="a"), op("comm_create", new_comm="b"), False),
        (
            op("comm_create", new_comm="a", split=True),
            op("comm_create", new_comm="b", split=True),
            True,
        ),
    ],
)
def test_signatures(left: Op, right: Op, fits: bool) -> None:
    comms = {"a": [0], "b": [1]}
    assert outcome([left], [right], comms=comms) == (["c", "c"] if fits else ["s", "s"])


def test_an_incompatible_collective_completes_for_nobody() -> None:
    """Also not for two of three who agree, nor for a root that leaves early."""
    early = Choices(early_release=True)
    ranks = [op("broadcast", root=0, count=4)], [op("broadcast", root=0, count=4)], [op("reduce")]
    assert outcome(*ranks, choices=early) == ["s", "s", "s"]


def test_zero_counts() -> None:
    """NCCL drops the call; those with elements wait for it in vain. Gloo and MPI wait."""
    nothing, something = op("all_reduce", count=0), op("all_reduce", count=4)
    assert outcome([nothing], [op("barrier")], backend="nccl") == ["c", "s"]
    assert outcome([nothing], [something], backend="nccl") == ["c", "s"]
    assert outcome([nothing], [nothing], backend="gloo") == ["c", "c"]
    assert outcome([nothing], [something], backend="gloo") == ["s", "s"]
    after = [nothing, op("barrier")]
    assert outcome(after, [op("barrier")], backend="nccl") == ["cc", "c"]
    behind = [recv(1, stream="s"), nothing | {"stream": "s"}]
    assert outcome(behind, [], backend="nccl") == ["si", ""]


# --------------------------------------------------------------------------------------------------
# Rule 4: rooted collectives


def rooted(name: str, root: int | None = 0) -> list[list[Op]]:
    """Rank 2 does not come."""
    return [[op(name, root=root)], [op(name, root=root)], []]


def test_rooted_collectives_wait_for_all_by_default() -> None:
    for name in ("broadcast", "scatter", "reduce", "gather"):
        assert outcome(*rooted(name)) == ["s", "s", ""]


def test_rooted_collectives_let_one_side_go_early() -> None:
    early = Choices(early_release=True)
    for name in ("broadcast", "scatter", "scatter_v"):
        assert outcome(*rooted(name), choices=early) == ["c", "c", ""]
        assert outcome(*rooted(name, root=2), choices=early) == ["s", "s", ""]
    for name in ("reduce", "gather", "gather_v"):
        assert outcome(*rooted(name), choices=early) == ["s", "c", ""]
        assert outcome(*rooted(name, root=2), choices=early) == ["c", "c", ""]
    assert outcome(*rooted("broadcast", root=None), choices=early) == ["s", "s", ""]


# --------------------------------------------------------------------------------------------------
# Rule 5: point to point


def test_a_rendezvous_send_waits_for_its_receive() -> None:
    assert outcome([send(1), recv(1)], [send(0), recv(0)]) == ["s-", "s-"]
    assert outcome([send(1), recv(1)], [recv(0), send(0)]) == ["cc", "cc"]


def test_a_buffered_send_does_not() -> None:
    for choices in (BUFFERED, Choices(eager_bytes=16)):
        assert outcome([send(1), recv(1)], [send(0), recv(0)], choices=choices) == ["cc", "cc"]
    assert outcome([send(1), recv(1)], [send(0), recv(0)], choices=Choices(eager_bytes=15)) == [
        "s-",
        "s-",
    ]
    assert outcome([send(1)], [], choices=BUFFERED) == ["c", ""]
    unknown = op("send", peer=1)
    assert outcome([unknown], [], choices=Choices(eager_bytes=1 << 40)) == ["s", ""]


def test_send_modes() -> None:
    assert outcome([send(1, send_mode="synchronous")], [], choices=BUFFERED) == ["s", ""]
    assert outcome([send(1, send_mode="buffered")], []) == ["c", ""]
    assert outcome([send(1, send_mode="ready")], [recv(0)]) == ["c", "c"]


@pytest.mark.parametrize(("backend", "tags_matter"), [("nccl", False), (None, False)] + [
    (backend, True) for backend in ("gloo", "mpi")
])  # fmt: skip
def test_what_a_channel_is(backend: str | None, tags_matter: bool) -> None:
    sent = send(1, tag=7, stream="s"), send(1, stream="t")
    ranks = list(sent), [recv(0, tag=0), recv(0, tag=7)]
    assert outcome(*ranks, backend=backend) == ["cc", "cc"]
    wrong = [send(1, tag=7)], [recv(0, tag=8)]
    assert outcome(*wrong, backend=backend) == (["s", "s"] if tags_matter else ["c", "c"])


def test_channels_keep_their_order_and_communicators_apart() -> None:
    """The first send goes with the first receive, whatever starts first."""
    late = [recv(0, stream="s"), recv(0, stream="t")]
    assert outcome([send(1), send(1)], late[1:]) == ["cs", "c"]
    other = send(1, stream="s") | {"comm": "v"}
    assert outcome([other], [recv(0)], comms={"v": [0, 1]}) == ["s", "s"]


@pytest.mark.parametrize(
    ("backend", "sent", "room", "fits"),
    [
        ("nccl", 4, 8, False), ("nccl", 8, 4, False), ("nccl", 4, 4, True),
        ("mpi", 4, 8, True), ("mpi", 8, 4, False), ("gloo", 8, 4, False), ("nccl", None, 4, True),
    ],
)  # fmt: skip
def test_sizes_of_a_pair(backend: str, sent: int | None, room: int, fits: bool) -> None:
    ranks = [send(1) | {"count": sent}], [recv(0) | {"count": room}]
    assert outcome(*ranks, backend=backend) == (["c", "c"] if fits else ["s", "s"])
    if not fits:
        assert outcome(*ranks, backend=backend, choices=BUFFERED) == ["c", "s"]


def test_sendrecv_is_both_at_once() -> None:
    both = [op("sendrecv", peer=1 - r, recv_peer=1 - r, count=4, dtype="f32") for r in (0, 1)]
    assert outcome([both[0]], [both[1]]) == ["c", "c"]
    assert outcome([both[0]], [recv(0), send(0)]) == ["c", "cc"]
    assert outcome([both[0]], [recv(0)]) == ["s", "c"]
    assert outcome([both[0]], [send(0)]) == ["s", "c"]


def test_probe_sees_the_next_message() -> None:
    probe = op("probe", peer=1)
    assert outcome([probe, recv(1)], [send(0)]) == ["cc", "c"]
    assert outcome([recv(1), probe], [send(0)]) == ["cs", "c"]
    assert outcome([probe], [op("barrier"), send(0)]) == ["s", "s-"]


def test_wildcards() -> None:
    known = recv(-1, matched_peer=1, tag=-1, matched_tag=3)
    assert outcome([known], [send(0, tag=3)]) == ["c", "c"]
    with pytest.raises(ValueError, match="wildcard"):
        outcome([recv(-1)], [send(0)])


# --------------------------------------------------------------------------------------------------
# Rule 6: waits


def pending() -> list[Op]:
    """Two receives from rank 1, of which only the first finds a message."""
    return [recv(1, blocking=False, request=r) for r in (1, 2)]


@pytest.mark.parametrize(
    ("wait", "ends"),
    [
        ({"requests": [1]}, True),
        ({"requests": [1, 2]}, False),
        ({"requests": [1, 2], "mode": "any"}, True),
        ({"requests": [2, 1], "mode": "some"}, True),
        ({"requests": [2], "mode": "any"}, False),
        ({"requests": "all"}, False),
        ({"requests": [99]}, True),
        ({"requests": [99], "mode": "any"}, True),
        ({"requests": [2, 99], "mode": "any"}, False),
    ],
)
def test_waits(wait: Op, ends: bool) -> None:
    ranks = [*pending(), op("wait", **wait)], [send(0)]
    assert outcome(*ranks) == ["cs" + ("c" if ends else "s"), "c"]


def test_a_wait_means_the_latest_of_a_reused_request() -> None:
    first = [*pending()[:1], op("wait", requests=[1])]
    assert outcome([*first, *first], [send(0)]) == ["ccss", "c"]


def test_a_wait_may_name_a_request_of_another_lane() -> None:
    ranks = [recv(1, blocking=False, request=1, lane=1), op("wait", requests=[1])], [op("barrier")]
    assert outcome(*ranks) == ["ss", "s"]


def test_wait_for_all_looks_at_its_own_lane_only() -> None:
    ranks: tuple[list[Op], ...] = (
        [recv(1, stream="s", lane=1), op("wait", requests="all")],
        [],
    )
    assert outcome(*ranks) == ["sc", ""]
    assert outcome([recv(1, stream="s"), op("wait", requests="all")], []) == ["ss", ""]


def test_a_stream_may_wait_for_another() -> None:
    """The host goes on; what is behind the wait on its stream does not."""
    work = recv(1, stream="s", request=1)
    wait = op("wait", requests=[1], stream="t")
    ranks = (
        [work, wait, op("barrier", stream="t"), op("barrier", comm="v")],
        [op("barrier", comm="v")],
    )
    assert outcome(*ranks, comms={"v": [0, 1]}) == ["ssic", "c"]


# --------------------------------------------------------------------------------------------------
# Rule 7: what the record says


def test_recorded_completion_is_a_fact_in_a_post_mortem_only() -> None:
    ranks = [recv(1), op("barrier", state="completed"), op("barrier", stream="s")], [op("barrier")]
    assert outcome(*ranks) == ["scs", "c"]
    assert outcome(*ranks, choices=Choices(use_states=False)) == ["s--", "s"]


def test_a_wait_that_was_passed_has_completed() -> None:
    """Not so the operation that it was for: that remains for the rules to say."""
    first = [recv(1, blocking=False, request=1), op("wait", requests=[1])]
    assert outcome([*first, op("barrier", state="completed")], []) == ["scc", ""]


def test_stuck_places() -> None:
    ranks = {
        0: [recv(1, stream="s"), op("wait", requests="all"), op("barrier")],
        1: [op("barrier")],
    }
    trace = trace_of(Program(ranks, {"w": [0, 1]}, "nccl", 2))
    (stream,) = trace.events["stream"].drop_nulls()
    assert stuck_places(progress(trace)) == {(0, stream), (0, "host"), (1, "host")}


# --------------------------------------------------------------------------------------------------
# Labelled programs


def labelled_programs() -> Iterator[Path]:
    """Whole programs and complete records, where the verdict rests on the order of operations."""
    shared = shared_folder()
    for pattern in ("cases/*", "cases/mpi/*", "data/live/native/*") if shared else ():
        for folder in sorted((shared or Path()).glob(pattern)):
            label = folder / "expect.json"
            # 64 ranks take this reference longer than all others together.
            if label.is_file() and "x64" not in folder.name:
                expect = json.loads(label.read_text("utf-8"))
                whole = expect.get("evidence", "program") == "program"
                if whole and isinstance(expect["deadlock"], bool):
                    yield folder


def read_program(folder: Path) -> Program:
    """A job in JSON Lines (TRACE_FORMAT.md), read without the product's reader."""
    ops: dict[int, list[Op]] = {}
    comms: dict[str, list[int]] = {}
    backend = world = None
    for path in sorted(folder.glob("*.jsonl")):
        rank = -1
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            kind = row.pop("kind")
            row.pop("stack", None)
            if kind == "header":
                rank, world, backend = row["rank"], row["world_size"], row["backend"]
                ops[rank] = []
            elif kind == "comm":
                comms[row["id"]] = row["ranks"]
            elif kind == "op":
                comms.setdefault(row.get("new_comm") or row.get("comm") or "", [])
                ops[rank].append(row)
    return Program(ops, comms, backend, world)


@pytest.mark.parametrize("folder", [*labelled_programs()], ids=lambda folder: folder.name)
def test_labelled_program(folder: Path) -> None:
    expect = json.loads((folder / "expect.json").read_text("utf-8"))
    trace = trace_of(read_program(folder))
    try:
        rendezvous, generous = (
            stuck_places(progress(trace, choices))
            for choices in (
                Choices(use_states=False),
                Choices(eager_bytes=INFINITE, early_release=True, use_states=False),
            )
        )
    except ValueError:
        pytest.skip("a wildcard receive whose match was not recorded")
    if expect["deadlock"]:
        assert rendezvous
        assert generous
    elif "healthy" in expect["kinds"]:
        assert not rendezvous
        assert not generous


# --------------------------------------------------------------------------------------------------
# Random programs


def test_random_programs_are_valid_and_about_half_hang() -> None:
    of = from_seed(0, 300)
    validate(trace_of(*of))
    stuck = sum(bool(stuck_places(progress(trace_of(program)))) for program in of)
    assert 0.35 * len(of) < stuck < 0.65 * len(of)
    spotless = [program for program in of if not program.mistakes]
    generous = Choices(eager_bytes=INFINITE, use_states=False)
    ends = [not stuck_places(progress(trace_of(p), generous)) for p in spotless]
    # With buffers, what was written without a mistake ends; a few streams are shared unluckily.
    assert sum(ends) > 0.9 * len(ends)


@given(example=seeds(), permutation=st.permutations(range(6)), seed=st.integers(0, 99))
@settings(max_examples=5, deadline=None)
def test_other_names_and_row_orders(example: int, permutation: list[int], seed: int) -> None:
    of = from_seed(example, 10)
    trace = trace_of(*of)
    other = shuffled(renamed(trace, permutation, seed), seed)
    validate(other)
    new_job = {name: job for job, name in other.jobs.select("job", "name").rows()}
    for job, program in enumerate(of):
        ranks = permutation[: program.world_size]
        moved = {
            (sorted(ranks).index(ranks[rank]), lane, seq): fact
            for (rank, lane, seq), fact in progress(trace, job=job).items()
        }
        assert progress(other, job=new_job[f"renamed-{program.name}"]) == moved
