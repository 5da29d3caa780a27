"""The wait-for graph of small jobs, edge by edge, and its cycles and knots."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from analysis.handmade import made, op, recv, send, wait
from programs import from_seed, trace_of

from dl2gpu.analysis import analyse, waitfor
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import Scenario, build, run
from dl2gpu.analysis.tables import KIND
from dl2gpu.analysis.waitfor import FATE, Graph, build_graph, components
from dl2gpu.trace.schema import Trace


def graph(trace: Trace, **scenario: Any) -> Graph:
    p = build(match(trace))
    return build_graph(p, run(p, Scenario(**scenario)))


def name(g: Graph, v: int) -> str:
    """``h0`` the host of rank 0, ``s:0`` its stream s, ``w#1`` an operation, ``0>1#1`` a message,
    ``r0`` rank 0 where its operation is not in the record."""
    lay, m = g.fix.layout, g.program.matching
    rank = m.prepared.ranks["rank"]
    if v < g.queue0:
        return f"h{rank[int(lay.lane_rank[v])]}"
    if v < g.node0:
        strings = m.prepared.trace.strings.sort("code")["text"]
        q = v - g.queue0
        return f"{strings[int(lay.queue_name[q])]}:{rank[int(lay.queue_rank[q])]}"
    if v < g.rank0:
        node = m.nodes.row(v - g.node0, named=True)
        if node["kind"] == KIND["message"]:
            return f"{node['src']}>{node['dst']}#{node['k']}"
        comm = m.prepared.comms.filter(pl.col("comm") == node["comm"])["id"].item()
        return f"{comm}#{node['k']}"
    return f"r{rank[v - g.rank0]}"


def edges(g: Graph) -> set[str]:
    """``a b``; one that is only inferred is ``a (b)``. Without ranks that nobody waits for."""
    asked = set(g.dst.tolist())
    return {
        f"{name(g, a)} ({name(g, b)})" if guess else f"{name(g, a)} {name(g, b)}"
        for a, b, guess in zip(g.src.tolist(), g.dst.tolist(), g.inferred, strict=True)
        if a < g.rank0 or a in asked
    }


def circles(g: Graph, with_inferred: bool = True) -> list[set[str]]:
    label, circular = components(g, with_inferred)
    return [{name(g, int(v)) for v in np.flatnonzero(label == c)} for c in np.flatnonzero(circular)]


def fates(g: Graph) -> dict[int, str]:
    names = {code: text for text, code in FATE.items()}
    ranks = g.program.matching.prepared.ranks["rank"]
    return {r: names[int(f)] for r, f in zip(ranks, g.fate, strict=True)}


def absent(g: Graph) -> list[tuple[str, int, str]]:
    names = {code: text for text, code in FATE.items()}
    return [
        (name(g, g.node0 + node), rank, names[fate])
        for node, rank, fate in g.absent.select("node", "rank", "fate").rows()
    ]


# --------------------------------------------------------------------------------------------------


def test_nothing_stands_where_all_is_complete() -> None:
    g = graph(made([op("all_reduce"), send(1)], [op("all_reduce"), recv(0)]))
    assert not g.stuck.any()
    assert not len(g.src)
    assert circles(g) == []


def test_both_receive_first() -> None:
    g = graph(made([recv(1), send(1)], [recv(0), send(0)]))
    assert edges(g) == {"h0 1>0#1", "1>0#1 h1", "h1 0>1#1", "0>1#1 h0"}
    assert circles(g) == [{"h0", "h1", "1>0#1", "0>1#1"}]


def test_ring_of_three_and_a_rank_that_only_leads_into_it() -> None:
    """Rank 3 waits for the ring, and is not on it."""
    ring = [[recv((r + 1) % 3), send((r - 1) % 3)] for r in range(3)]
    ring[0].append(send(3))
    g = graph(made(*ring, [recv(0)]))
    assert circles(g) == [{"h0", "h1", "h2", "1>0#1", "2>1#1", "0>2#1"}]
    assert {"h3 0>3#1", "0>3#1 h0"} <= edges(g)


def test_two_groups_in_opposite_order() -> None:
    g = graph(
        made(
            [op("all_reduce", "a"), op("all_reduce", "b")],
            [op("all_reduce", "b"), op("all_reduce", "a")],
            comms={"a": [0, 1], "b": [0, 1]},
        )
    )
    assert edges(g) == {"h0 a#1", "a#1 h1", "h1 b#1", "b#1 h0"}
    assert circles(g) == [{"h0", "h1", "a#1", "b#1"}]


def test_the_circle_runs_through_streams_and_hosts() -> None:
    """TRACE_FORMAT.md, the example at the end."""
    a = op("all_to_all", "shard", stream="s", request=1)
    b = op("all_reduce", "repl", stream="r", request=2)
    comms = {"shard": [0, 1], "repl": [0, 1]}
    g = graph(made([a, wait(), b], [b, wait(), a], comms=comms))
    assert edges(g) == {
        "h0 s:0", "s:0 shard#1", "shard#1 h1", "h1 r:1", "r:1 repl#1", "repl#1 h0",
    }  # fmt: skip
    assert circles(g) == [{"h0", "s:0", "shard#1", "h1", "r:1", "repl#1"}]
    # without the waits both run to their end
    assert not graph(made([a, b], [b, a], comms=comms)).stuck.any()


def test_one_stream_is_a_queue() -> None:
    """What is behind on the stream makes the partner wait for the stream, not for the host."""
    a, b = op("all_reduce", "a", stream="s"), op("all_reduce", "b", stream="s")
    g = graph(made([a, b], [b, a], comms={"a": [0, 1], "b": [0, 1]}))
    assert edges(g) == {"s:0 a#1", "a#1 s:1", "s:1 b#1", "b#1 s:0"}
    assert circles(g) == [{"s:0", "s:1", "a#1", "b#1"}]


def test_streams_as_one_queue_is_a_scenario() -> None:
    a, b = op("all_reduce", "a", stream="s"), op("all_reduce", "b", stream="t")
    trace = made([a, b], [b, a], comms={"a": [0, 1], "b": [0, 1]})
    assert not graph(trace).stuck.any()
    assert len(circles(graph(trace, one_stream=True))) == 1


# --- waits


def test_wait_any_needs_one() -> None:
    """A circle through a wait for any of two is none while the other one may still come."""
    hopeful = made(
        [recv(1, request=1, blocking=False), recv(2, request=2, blocking=False),
         wait(1, 2, mode="any"), send(1)],
        [recv(0), send(0)],
        [],
        exits="alive",
    )  # fmt: skip
    g = graph(hopeful)
    assert fates(g) == {0: "blocked", 1: "blocked", 2: "free"}
    assert {"h0 1>0#1", "h0 2>0#1", "1>0#1 h1", "h1 0>1#1", "0>1#1 h0", "2>0#1 r2"} <= edges(g)
    assert circles(g) == []


def test_wait_any_that_nobody_can_fulfil_is_a_knot() -> None:
    first = [recv(1, request=1, blocking=False), recv(2, request=2, blocking=False)]
    rank0 = [*first, wait(1, 2, mode="any"), send(1), send(2)]
    others = [recv(0), send(0)]
    g = graph(made(rank0, others, others))
    assert circles(g) == [{"h0", "h1", "h2", "1>0#1", "2>0#1", "0>1#1", "0>2#1"}]


def test_wait_all_needs_all() -> None:
    """As the hopeful one, but it needs both: the other one cannot help."""
    trace = made(
        [recv(1, request=1, blocking=False), recv(2, request=2, blocking=False), wait(1, 2),
         send(1)],
        [recv(0), send(0)],
        [],
        exits="alive",
    )  # fmt: skip
    assert circles(graph(trace)) == [{"h0", "h1", "1>0#1", "0>1#1"}]


def test_wait_for_everything_waits_for_what_is_pending() -> None:
    g = graph(
        made(
            [op("all_reduce", "a", stream="s"), op("all_reduce", "b", blocking=False), wait()],
            [op("all_reduce", "a", stream="s")],
            comms={"a": [0, 1], "b": [0, 1]},
        )
    )
    assert edges(g) == {"h0 b#1"}  # the one on the stream is complete


# --- who is not there


def test_fates() -> None:
    """What each rank is doing whose operation is missing."""
    here = [op("all_reduce", ordinal=1)]
    stands = [op("barrier", "x", ordinal=1)]
    g = graph(
        made(
            here, [], [], [], stands, [],
            comms={"x": [0, 4]},
            exits={0: "alive", 1: "finished", 2: "crashed", 3: "alive", 4: "alive"},
            absent=[5],
        )
    )  # fmt: skip
    assert fates(g) == {0: "blocked", 1: "finished", 2: "dead", 3: "free", 4: "blocked"}
    assert absent(g) == [
        ("w#1", 1, "finished"), ("w#1", 2, "dead"), ("w#1", 3, "free"), ("w#1", 4, "blocked"),
        ("w#1", 5, "no_record"), ("x#1", 0, "blocked"),
    ]  # fmt: skip
    assert edges(g) == {
        "h0 w#1", "w#1 r2", "w#1 r3", "w#1 r4", "r4 h4", "h4 x#1", "x#1 r0", "r0 h0",
    }  # fmt: skip
    assert circles(g) == [{"h0", "w#1", "r4", "h4", "x#1", "r0"}]


def test_killed_while_it_stood_is_a_victim() -> None:
    """The launcher killed rank 1; it stood in an operation of its own."""
    g = graph(
        made(
            [op("all_reduce", "a"), op("all_reduce", "b")],
            [op("all_reduce", "b")],
            comms={"a": [0, 1], "b": [0, 1]},
            exits={0: "alive", 1: "killed"},
        )
    )
    assert fates(g) == {0: "blocked", 1: "blocked"}


def test_cut_record_is_a_death() -> None:
    g = graph(made([op("all_reduce")], [], exits="alive", rank_facts={1: {"truncated": True}}))
    assert fates(g)[1] == "dead"


def test_members_of_a_huge_group_are_not_all_written_out() -> None:
    """Thousands of pending operations of a group of thousands: the first say it all."""
    ops = [op("all_reduce", "g", blocking=False, count=1) for _ in range(2000)]
    g = graph(made(ops, comms={"g": list(range(60_000))}, exits="alive"))
    assert 60_000 <= g.absent.height < 2_000_000


# --- inferred


def silent_host(*, closes: bool) -> Trace:
    """Flight recorder: no host waits in the record. Rank 0 has its a pending, rank 1 its b.

    With ``closes``, each lacks the other's; else rank 1 has nothing pending.
    """
    a = op("all_reduce", "a", stream="s", state="scheduled", ordinal=1)
    b = op("all_reduce", "b", stream="t", state="scheduled", ordinal=1)
    return made(
        [a], [b] if closes else [],
        comms={"a": [0, 1], "b": [0, 1]}, exits="unknown",
        job_facts={"source": "flight_recorder", "waits": False},
    )  # fmt: skip


def test_a_silent_host_may_be_blocked_on_its_own_device() -> None:
    g = graph(silent_host(closes=True))
    assert edges(g) == {"s:0 a#1", "a#1 r1", "r1 (t:1)", "t:1 b#1", "b#1 r0", "r0 (s:0)"}
    assert circles(g, with_inferred=False) == []
    assert circles(g) == [{"s:0", "a#1", "r1", "t:1", "b#1", "r0"}]


def test_nothing_is_inferred_of_a_host_with_nothing_pending() -> None:
    g = graph(silent_host(closes=False))
    assert edges(g) == {"s:0 a#1", "a#1 r1"}
    assert circles(g) == []


def test_nothing_is_inferred_where_host_waits_are_recorded() -> None:
    """A record that shows a wait that was passed would show the one that is not."""
    a = op("all_reduce", "a", stream="s", ordinal=1)
    b = op("all_reduce", "b", stream="t", ordinal=1)
    trace = made(
        [wait(), a], [wait(), b], comms={"a": [0, 1], "b": [0, 1]}, exits="alive"
    )  # fmt: skip
    assert edges(graph(trace)) == {"s:0 a#1", "a#1 r1", "t:1 b#1", "b#1 r0"}


# --- batches and wildcards


def batch(*ops: dict[str, Any], number: int = 1) -> list[dict[str, Any]]:
    return [o | {"group": number, "stream": "s"} for o in ops]


def test_a_batch_waits_for_what_its_members_lack() -> None:
    g = graph(made(batch(send(1), recv(1)), batch(recv(0))))
    # rank 1 has got its message, rank 0's part of it is not complete before its batch is
    assert edges(g) == {"s:0 0>1#1", "s:0 1>0#1"}
    assert absent(g) == [("1>0#1", 1, "finished")]


def test_an_atomic_batch_holds_back_its_partners() -> None:
    """Rank 0 lacks a message; rank 2, whose own message is there, waits with it."""
    trace = made(batch(recv(1), send(2)), [], batch(recv(0)))
    assert not [e for e in edges(graph(trace)) if e.startswith("s:2")]
    g = graph(trace, atomic_batch=True)
    assert {"s:2 0>2#1", "0>2#1 1>0#1"} <= edges(g)


def test_edges_of_batches_do_not_grow_with_their_square() -> None:
    """An all_to_all as sends and receives over 40 ranks, in which one send was forgotten."""
    n = 40
    ranks = [batch(*(o for q in range(n) if q != r for o in (send(q), recv(q)))) for r in range(n)]
    ranks[3] = [o for o in ranks[3] if (o["op"], o["peer"]) != ("send", 5)]
    g = graph(made(*ranks), atomic_batch=True)
    assert 0 < len(g.src) < 5 * sum(map(len, ranks))
    # the message that is not there, and what rank 5 would exchange with all others
    held = {e.split()[0] for e in edges(g) if e.endswith(" 3>5#1")}
    assert {f"{r}>5#1" for r in range(n) if r not in (3, 5)} <= held


def test_wildcard_waits_for_whoever_could_send() -> None:
    g = graph(
        made([recv("any")], [], [], [], comms={"v": [0, 1, 2]}, backend="mpi", exits="alive"),
    )
    assert edges(g) == {"h0 r1", "h0 r2", "h0 r3"}
    g = graph(
        made(
            [recv("any", comm="v")], [], [], [],
            comms={"v": [0, 1, 2]}, backend="mpi", exits="alive",
        )
    )  # fmt: skip
    assert edges(g) == {"h0 r1", "h0 r2"}


def test_knot_of_wildcards() -> None:
    """Each waits for anybody, and all wait: nobody will send."""
    ring = [[recv("any"), send((r + 1) % 3)] for r in range(3)]
    for exits in ("finished", "unknown"):
        g = graph(made(*ring, backend="mpi", exits=exits))
        assert circles(g) == [{"h0", "h1", "h2", "r0", "r1", "r2"}]
    # one that is at work elsewhere may still send
    assert circles(graph(made(*ring, [], backend="mpi", exits={3: "alive"}))) == []
    # one that has ended will not
    assert len(circles(graph(made(*ring, [], backend="mpi")))) == 1


# --------------------------------------------------------------------------------------------------
# Batches over several streams


def test_streams_of_one_batch_do_not_wait_for_each_other() -> None:
    """What holds it back is the stream that is not at it yet, and what stands there."""
    streams = ("s1", "s3", "s2")
    batch = [send(1, stream=s, group=1, blocking=False) for s in streams]
    other = [recv(0, stream=s, group=1, blocking=False) for s in streams]
    trace = made(
        [recv(1, stream="s2", blocking=False), *batch, wait()],
        [*other, wait()],
        comms={"w": [0, 1]},
    )
    (finding,) = analyse(trace).findings
    assert (finding["kind"], finding["culprits"]) == ("unmatched_p2p", (0,))


@pytest.mark.parametrize("seed", range(4))
def test_who_waits_for_a_batch_together_stands_for_each_other(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for batches of thousands: the same verdicts as when every pair is an edge."""
    trace = trace_of(*from_seed(seed, 100))
    assert (trace.events["group"].is_not_null()).any()
    whole = analyse(trace)
    monkeypatch.setattr(waitfor, "_PAIRS", 0)
    short = analyse(trace)
    assert short.jobs.equals(whole.jobs)
    assert [(f["job"], f["kind"]) for f in short.findings] == [
        (f["job"], f["kind"]) for f in whole.findings
    ]
