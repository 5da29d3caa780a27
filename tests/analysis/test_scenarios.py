"""Readings of what a program leaves open: buffers, early release, streams, threads, batches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from analysis.handmade import deadlocked, findings, healthy, made, only, op, recv, send, wait

from dl2gpu.analysis import analyse
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import Scenario, build, run
from dl2gpu.analysis.scenarios import smallest_safe_buffer
from dl2gpu.trace.schema import Trace, concat

Op = dict[str, Any]


def safe(trace: Trace, *, early_release: bool = False, job: int = 0) -> int | None:
    return smallest_safe_buffer(build(match(trace)), job, early_release)


def completes(trace: Trace, **scenario: Any) -> bool:
    return bool(run(build(match(trace)), Scenario(**scenario)).completed.all())


def sized(peer: int, n: int, **keys: Any) -> Op:
    return send(peer, count=n, dtype="i8", **keys)


def taken(peer: int, n: int, **keys: Any) -> Op:
    return recv(peer, count=n, dtype="i8", **keys)


# --------------------------------------------------------------------------------------------------
# Buffers


def test_both_send_first() -> None:
    """C45: the larger of the two must fit, or the smaller: one of them is enough."""
    both = made([sized(1, 300), taken(1, 20)], [sized(0, 20), taken(0, 300)])
    assert safe(both) == 20
    f = only(both)
    assert (f["kind"], f["details"]["safe_bytes"]) == ("potential", 20)
    assert "smallest safe buffer 20 bytes" in f["condition"]


def test_ring_of_sends() -> None:
    """One of the ring has to let go: the smallest."""
    sizes = [700, 500, 900, 600]
    ring = [
        [sized((r + 1) % 4, sizes[r]), taken((r - 1) % 4, sizes[(r - 1) % 4])] for r in range(4)
    ]
    assert safe(made(*ring)) == 500


def test_several_exchanges_one_after_another() -> None:
    """Each needs its own: the largest of the smallest."""
    sizes = [(100, 90), (8, 9), (64, 640)]
    ranks = [
        [o for n in sizes for o in (sized(1 - r, n[r]), taken(1 - r, n[1 - r]))] for r in range(2)
    ]
    assert safe(made(*ranks)) == 90


@pytest.mark.parametrize("critical", [1, 2, 63, 64, 65, 128, 129, 4000, 4999, 5000])
@pytest.mark.parametrize("seen", [False, True], ids=["program", "with a recorded completion"])
def test_one_size_of_very_many(critical: int, seen: bool) -> None:
    """More sizes than are tried at once; all but one are those of messages that wait for nobody."""
    sizes = range(1, 5001)
    ranks = [[sized(1, n) for n in sizes], [taken(0, n) for n in sizes]]
    for r in range(2):
        ranks[r] += [sized(1 - r, critical), taken(1 - r, critical)]
        if seen:
            ranks[r][0]["state"] = "completed"
    assert safe(made(*ranks)) == critical


def test_looped_stages() -> None:
    """C49: two stages on two ranks that go round twice; all send their activations first."""
    ranks = [[sized(1 - r, 4096), sized(1 - r, 8192), taken(1 - r, 4096), taken(1 - r, 8192)]
             for r in range(2)]  # fmt: skip
    assert safe(made(*ranks)) == 8192


@pytest.mark.parametrize("seed", range(8))
def test_bisection_finds_what_a_search_finds(seed: int) -> None:
    """Of all sizes that occur the smallest with which the job runs to its end."""
    rng = np.random.default_rng(seed)
    n = 3
    ranks: list[list[Op]] = [[] for _ in range(n)]
    for _ in range(6):
        ring = rng.permutation(n)[: rng.integers(2, n + 1)].tolist()
        sizes = {int(r): int(rng.integers(1, 50)) for r in ring}
        for k, r in enumerate(ring):
            ranks[r] += [sized(ring[(k + 1) % len(ring)], sizes[r])]
        for k, r in enumerate(ring):
            ranks[r] += [taken(ring[k - 1], sizes[ring[k - 1]])]
    trace = made(*ranks)
    all_sizes = sorted({o["count"] for ops in ranks for o in ops})
    by_search = [b for b in all_sizes if completes(trace, eager_bytes=b)]
    found = safe(trace)
    assert found is not None
    assert found == by_search[0]
    assert not completes(trace, eager_bytes=found - 1)
    # larger buffers only ever help
    assert by_search == [b for b in all_sizes if b >= found]


def test_no_buffer_helps() -> None:
    assert safe(made([taken(1, 4), sized(1, 4)], [taken(0, 4), sized(0, 4)])) is None
    unknown = made(*([send(1 - r, count=None, dtype=None), recv(1 - r)] for r in range(2)))
    assert safe(unknown) is None
    synchronous = made(
        *([sized(1 - r, 4, send_mode="synchronous"), taken(1 - r, 4)] for r in range(2))
    )
    assert safe(synchronous) is None
    assert only(synchronous)["kind"] == "cycle"


def test_buffered_sends_need_no_threshold() -> None:
    assert healthy(
        made(
            *([sized(1 - r, 4, send_mode="buffered"), taken(1 - r, 4)] for r in range(2)),
            backend="mpi",
        )
    )


def test_each_job_has_its_own() -> None:
    small, large = (
        made(*([sized(1 - r, n), taken(1 - r, n)] for r in range(2))) for n in (10, 1000)
    )
    trace = concat([large, small])
    assert (safe(trace, job=0), safe(trace, job=1)) == (1000, 10)
    assert [f["details"]["safe_bytes"] for f in findings(trace)] == [1000, 10]


# --------------------------------------------------------------------------------------------------
# Early release


def test_early_release() -> None:
    """A broadcast root that goes on at once runs through; one that waits for all does not."""
    bcast = op("broadcast", root=0, count=1, dtype="i8")
    trace = made([bcast, taken(1, 4)], [sized(0, 4, send_mode="synchronous"), bcast])
    assert not completes(trace)
    assert completes(trace, early_release=True)
    f = only(trace)
    assert f["kind"] == "potential"
    assert "leave a rooted collective early" in f["condition"]
    assert "safe_bytes" not in f["details"]


def test_early_release_and_buffers() -> None:
    """It needs both: neither alone is enough."""
    bcast = op("broadcast", root=0, count=1, dtype="i8")
    reduce = op("reduce", root=0, count=1, dtype="i8")
    first = [[bcast, taken(1, 4)], [sized(0, 4, send_mode="synchronous"), bcast]]
    then = [[sized(1, 64), taken(1, 32)], [sized(0, 32), taken(0, 64)]]
    trace = made(*([*a, *b] for a, b in zip(first, then, strict=True)))
    assert safe(trace) is None
    assert safe(trace, early_release=True) == 32
    # a root that receives needs all of them, however early the others leave
    needs_all = made([reduce, taken(1, 1)], [sized(0, 1, send_mode="synchronous"), reduce])
    assert not completes(needs_all, early_release=True)


def test_a_member_that_only_gives_goes_on() -> None:
    reduce = op("reduce", root=0, count=1, dtype="i8")
    give = sized(0, 1, send_mode="synchronous")
    trace = made([taken(1, 1), reduce], [reduce, give])
    assert not completes(trace)
    assert completes(trace, early_release=True)


# --------------------------------------------------------------------------------------------------
# Streams, threads, batches, wildcards


def on(stream: str, comm: str, **keys: Any) -> Op:
    return op("all_reduce", comm, stream=stream, count=4, dtype="f32", **keys)


TWO = {"a": [0, 1], "b": [0, 1]}


def test_streams_that_are_one() -> None:
    trace = made([on("s", "a"), on("t", "b")], [on("t", "b"), on("s", "a")], comms=TWO)
    assert completes(trace)
    assert not completes(trace, one_stream=True)
    f = only(trace)
    assert f["kind"] == "potential"
    assert "share one hardware queue" in f["condition"]
    assert healthy(made([on("s", "a"), on("t", "b")], [on("s", "a"), on("t", "b")], comms=TWO))


def test_threads_that_share_a_stream() -> None:
    """C05: two host threads enqueue on one stream in any order."""
    ranks = [[on("s", "a", lane=1), on("s", "b", lane=2)] for _ in range(2)]
    trace = made(*ranks, comms=TWO)
    assert completes(trace)
    f = only(trace)
    assert f["kind"] == "potential"
    assert "host threads" in f["condition"]
    apart = [[on("s", "a", lane=1), on("t", "b", lane=2)] for _ in range(2)]
    assert not [f for f in findings(made(*apart, comms=TWO)) if "threads" in (f["condition"] or "")]


@pytest.mark.parametrize("pair", list(itertools.combinations(range(4), 2)))
def test_any_two_ranks_may_flip(pair: tuple[int, int]) -> None:
    """Whichever two share the two groups: their numbers differ in some bit."""
    ranks: list[list[Op]] = [[] for _ in range(4)]
    for r in pair:
        ranks[r] = [on("s", "a", lane=1), on("s", "b", lane=2)]
    f = only(made(*ranks, comms={"a": list(pair), "b": list(pair)}))
    assert f["kind"] == "potential"
    assert set(f["culprits"]) | set(f["victims"]) == set(pair)


def batch(*ops: Op) -> list[Op]:
    return [o | {"group": 1, "stream": "s"} for o in ops]


def test_incomplete_batch() -> None:
    """Rank 1 exchanges with rank 2 and waits for rank 0, which waits for rank 2 first."""
    trace = made(
        [taken(2, 4, stream="h"), wait(), sized(1, 4, stream="h")],
        [*batch(sized(2, 4), taken(0, 4))],
        [*(o | {"stream": "s"} for o in (taken(1, 4),)), wait(), sized(0, 4, stream="s")],
    )
    assert completes(trace)
    assert not completes(trace, atomic_batch=True)
    f = only(trace)
    assert f["kind"] == "potential"
    assert "incomplete batch" in f["condition"]


def test_wildcard_that_takes_the_other_message() -> None:
    """X04: taken first from rank 2, the receive that names rank 2 has none left."""
    trace = made(
        [recv("any"), recv(2)], [send(0)], [send(0)], backend="mpi"
    )  # fmt: skip
    assert completes(trace)
    assert not completes(trace, wild_high=True)
    f = only(trace)
    assert f["kind"] == "potential"
    assert "wildcard" in f["condition"]
    assert healthy(made([recv("any"), recv("any")], [send(0)], [send(0)], backend="mpi"))


def test_wildcards_take_what_fits() -> None:
    """By source, by tag, in order of each sender; a sendrecv gives and takes."""
    tags = made(
        [recv("any", tag=2), recv("any", tag=1)],
        [send(0, tag=1, blocking=False), send(0, tag=2, blocking=False)],
        backend="mpi",
    )
    assert completes(tags)
    wrong = made([recv("any", tag=3)], [send(0, tag=1)], backend="mpi")
    assert not completes(wrong)
    ring = [[op("sendrecv", peer=(r + 1) % 3, recv_peer="any", count=1)] for r in range(3)]
    assert completes(made(*ring, backend="mpi"))
    half = made(
        [op("sendrecv", peer=1, recv_peer="any", count=1)], [recv("any", count=1)], backend="mpi"
    )
    assert not completes(half)  # rank 0 sends, and gets nothing


def test_a_wildcard_that_is_complete_has_taken_its_message() -> None:
    """Two receives, one message: the first is recorded as complete, the second lacks a sender."""
    trace = made(
        [recv("any"), recv("any")], [send(0)], [], backend="mpi",
        exits={0: "alive", 1: "finished", 2: "finished"},
    )  # fmt: skip
    f = only(trace)
    assert f["kind"] == "unmatched_p2p"
    assert [h["seq"] for h in f["hangs_at"]] == [1]


def test_wildcards_in_a_circle() -> None:
    """All receive from anybody before they send: no buffer helps."""
    ring = made(*([recv("any"), send((r + 1) % 3)] for r in range(3)), backend="mpi")
    f = only(ring)
    assert (f["kind"], f["culprits"], f["deadlocked"]) == ("cycle", (0, 1, 2), True)
    # send first, and it depends on the buffers
    f = only(made(*([send((r + 1) % 3), recv("any")] for r in range(3)), backend="mpi"))
    assert (f["kind"], f["details"]["safe_bytes"]) == ("potential", 16)


def test_a_worker_that_may_still_send() -> None:
    """One of two has ended, the other is busy: the master is not accused of anything."""
    trace = made(
        [recv("any"), recv("any")], [send(0)], [], backend="mpi",
        exits={0: "alive", 1: "finished", 2: "alive"},
    )  # fmt: skip
    assert {f["kind"] for f in findings(trace)} <= {"insufficient_evidence", "stalled_rank"}
    assert deadlocked(trace) is not True


def test_probe_sees_what_comes() -> None:
    trace = made(
        [op("probe", peer="any"), recv("any"), recv("any")], [send(0)], [send(0)], backend="mpi"
    )
    assert completes(trace)
    assert not completes(made([op("probe", peer="any")], [], backend="mpi"))


def test_a_stuck_job_is_not_called_potential_as_well() -> None:
    ranks = [
        [taken(1 - r, 4), sized(1 - r, 4), on("s", "a" if r else "b"), on("t", "b" if r else "a")]
        for r in range(2)
    ]
    result = analyse(made(*ranks, comms=TWO))
    assert [f["kind"] for f in result.findings] == ["cycle"]
