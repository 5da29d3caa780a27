"""Matching: the passes along the rows place everything as the lazy plans do.

Both give the same parts to each node, whatever the nodes are called; the rest of this file says by
hand where the parts belong.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from dataclasses import replace

import polars as pl
import pytest
from analysis.handmade import NS, START, made, op, recv, send
from corpus import Labelled, labelled
from programs import from_seed, renamed, shuffled, trace_of

from dl2gpu.analysis.matching import Matching, match, match_prepared
from dl2gpu.analysis.tables import prepare
from dl2gpu.engine.cpu import CPU, PLANS
from dl2gpu.trace.discover import discover
from dl2gpu.trace.readers import read_files
from dl2gpu.trace.schema import OP, STATE, STATUS, Trace, concat

OF_NODES = [
    "job", "comm", "k", "kind", "members", "present", "passed", "finished", "need", "differs",
    "blocks",
]  # fmt: skip
OF_MESSAGES = ["src", "dst", "has_send", "has_recv"]


# --------------------------------------------------------------------------------------------------
# Passes and plans


def parts(m: Matching) -> pl.DataFrame:
    """(node, part): twice the row of the event, and one more for the receive of a sendrecv."""
    row = pl.col("i").cast(pl.Int64)
    first = m.events.filter(pl.col("node") >= 0).select("node", part=2 * row)
    second = m.events.filter(pl.col("node2") >= 0).select(node="node2", part=2 * row + 1)
    return pl.concat([first, second])


def canonical(m: Matching) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Nodes by their parts, events without the numbers of their nodes, and late members."""
    assert m.events["i"].to_list() == list(range(m.prepared.events.height))
    assert m.nodes["node"].to_list() == list(range(m.nodes.height))
    nodes = m.nodes
    for column in OF_MESSAGES:
        if column not in nodes.columns:
            nodes = nodes.with_columns(pl.lit(None).alias(column))
    # a place in the numbering that nobody took has no part
    nodes = nodes.join(parts(m).group_by("node").agg(pl.col("part").sort()), on="node")
    nodes = nodes.select("part", *OF_NODES, *OF_MESSAGES).sort(pl.col("part").list.first(), "kind")
    events = m.events.select(
        "i", "role", "alone", "box", pl.col("k").fill_null(-1),
        has=pl.col("node") >= 0, has2=pl.col("node2") >= 0,
    )  # fmt: skip
    first = parts(m).group_by("node").agg(pl.col("part").min())
    late = m.late.join(first, on="node").select("part", "rank").sort("part", "rank")
    return nodes, events, late


def assert_same(trace: Trace, hint: object = "") -> None:
    p = prepare(trace)
    for passed, planned in zip(
        canonical(match_prepared(p)),
        canonical(match_prepared(replace(p, engine=PLANS))),
        strict=True,
    ):
        for column in passed.columns:
            left, right = passed[column].to_list(), planned[column].to_list()
            if left == right:
                continue
            if len(left) != len(right):
                pytest.fail(f"{hint}: {len(left)} rows against {len(right)}", pytrace=False)
            at = next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
            pytest.fail(
                f"{hint}: {column}\n passes {passed.row(at, named=True)}\n plans  "
                f"{planned.row(at, named=True)}",
                pytrace=False,
            )


@pytest.mark.parametrize("of", ["cases", "rendered", "live", "megatron"])
def test_passes_and_plans_on_labelled_jobs(of: str) -> None:
    jobs: tuple[Labelled, ...] = labelled(of)
    if not jobs:
        pytest.skip("no labelled data (set DL2GPU_SHARED)")
    for folder in sorted({job.scanned for job in jobs}):
        trace, _ = read_files(discover([str(folder)]).files)
        assert trace.events.height
        assert_same(trace, folder.name)


@pytest.mark.parametrize("seed", range(6))
def test_passes_and_plans_on_random_programs(seed: int) -> None:
    trace = trace_of(*from_seed(seed, 50))
    assert_same(trace, seed)
    assert_same(shuffled(trace, seed), seed)
    permutation = random.Random(seed).sample(range(6), 6)
    assert_same(renamed(trace, permutation, seed), seed)


@pytest.mark.parametrize("seed", range(40))
def test_passes_and_plans_on_other_records(seed: int) -> None:
    """The same programs as other recorders would have left them, and damaged."""
    rng = random.Random(seed)
    trace = trace_of(*from_seed(1000 + seed, rng.choice([1, 5, 20])))
    changes = rng.sample(CHANGES, rng.randint(1, 4))
    for change in changes:
        trace = change(trace, rng)
    assert_same(trace, [c.__name__ for c in changes])


COLLECTIVE = pl.col("op") >= OP["all_reduce"]


def some(n: int, rng: random.Random, p: float) -> pl.Series:
    return pl.Series([rng.random() < p for _ in range(n)], dtype=pl.Boolean)


def numbered(t: Trace, rng: random.Random) -> Trace:
    """Ordinals on some communicators, with some base and some step."""
    counted = COLLECTIVE.cast(pl.Int64).cum_sum().over("job", "rank", "comm")
    number = counted * rng.choice([1, 1, 3, 1 << 20, 1 << 50]) + rng.choice([0, 500, 1 << 59])
    which = COLLECTIVE & (pl.col("comm") % rng.choice([1, 2, 3]) == 0)
    events = t.events.sort("job", "rank", "seq", "lane")
    return replace(
        t, events=events.with_columns(ordinal=pl.when(which).then(number).otherwise("ordinal"))
    )


def coalesced(t: Trace, rng: random.Random) -> Trace:
    """Two operations in a row bear one number."""
    return replace(t, events=t.events.with_columns(pl.col("ordinal") // 2))


def odd_numbers(t: Trace, rng: random.Random) -> Trace:
    odd = [rng.choice([0, 1, 1 << 62]) if rng.random() < 0.1 else None for _ in t.events["op"]]
    number = pl.when(COLLECTIVE).then(pl.coalesce(pl.Series(odd, dtype=pl.Int64), "ordinal"))
    return replace(t, events=t.events.with_columns(ordinal=number))


def lost(t: Trace, rng: random.Random) -> Trace:
    """Some ranks have a ring buffer that has turned."""
    before = pl.Series([rng.choice([0, 0, 1, 2, None]) for _ in t.ranks["rank"]], dtype=pl.Int64)
    ranks = t.ranks.with_columns(lost_before=before)
    place = pl.int_range(pl.len()).over("job", "rank", order_by="seq")
    events = t.events.join(ranks.select("job", "rank", "lost_before"), on=["job", "rank"])
    events = events.filter(place >= pl.col("lost_before").fill_null(0)).select(t.events.columns)
    return replace(t, events=events, ranks=ranks)


def active(t: Trace, rng: random.Random) -> Trace:
    """Some ranks list active operations only, and all say how far they got."""
    ranks = t.ranks.with_columns(only_active=some(t.ranks.height, rng, 0.5))
    events = t.events.join(ranks.select("job", "rank", "only_active"), on=["job", "rank"])
    over = pl.col("only_active") & (pl.col("state") == STATE["completed"])
    members = t.comms.select("job", "comm", rank="ranks").explode("rank", empty_as_null=False)
    last = pl.Series([rng.randint(-1, 5) for _ in members["rank"]], dtype=pl.Int64)
    status = members.with_columns(
        last_enqueued=last + 1, last_started=last, last_completed=last
    ).select(STATUS.keys())
    return replace(
        t, events=events.filter(~over).select(t.events.columns), ranks=ranks, status=status
    )


def unknown_members(t: Trace, rng: random.Random) -> Trace:
    known = some(t.comms.height, rng, 0.7)
    nobody = pl.lit([], dtype=pl.List(pl.Int32))
    ranks = pl.when(known).then("ranks").otherwise(nobody)
    return replace(t, comms=t.comms.with_columns(ranks=ranks))


def wildcards(t: Trace, rng: random.Random) -> Trace:
    message = pl.col("op") <= OP["probe"]
    any_tag = message & ~some(t.events.height, rng, 0.9)
    any_peer = (pl.col("op") == OP["recv"]) & ~some(t.events.height, rng, 0.9)
    return replace(
        t,
        events=t.events.with_columns(
            tag=pl.when(any_tag).then(-1).otherwise("tag"),
            peer=pl.when(any_peer).then(-1).otherwise("peer"),
        ),
    )


def no_peers(t: Trace, rng: random.Random) -> Trace:
    known = some(t.events.height, rng, 0.8)
    return replace(t, events=t.events.with_columns(peer=pl.when(known).then("peer")))


def from_flight_recorder(t: Trace, rng: random.Random) -> Trace:
    return replace(t, jobs=t.jobs.with_columns(source=pl.lit("flight_recorder")))


def out_of_order(t: Trace, rng: random.Random) -> Trace:
    return shuffled(t, rng.randrange(1000))


CHANGES = [
    numbered, numbered, coalesced, odd_numbers, lost, active, unknown_members, wildcards, no_peers,
    from_flight_recorder, out_of_order,
]  # fmt: skip


# --------------------------------------------------------------------------------------------------
# By hand


def together(m: Matching) -> set[frozenset[tuple[int, int]]]:
    """Which events meet: (rank, seq) of the parts of each node."""
    where = m.events.select("rank", "seq").rows()
    groups: dict[int, set[tuple[int, int]]] = {}
    for node, part in parts(m).rows():
        groups.setdefault(node, set()).add(where[part // 2])
    return {frozenset(g) for g in groups.values()}


def met(*groups: set[tuple[int, int]]) -> set[frozenset[tuple[int, int]]]:
    return {frozenset(g) for g in groups}


def alone(m: Matching) -> list[tuple[int, ...]]:
    return m.events.filter("alone").select("rank", "seq").rows()


def taken(m: Matching) -> pl.DataFrame:
    """Nodes that somebody came to."""
    return m.nodes.filter(pl.col("present") > 0).sort("k")


Match = Callable[[Trace], Matching]


@pytest.fixture(params=[CPU, PLANS], ids=["passes", "plans"])
def matched(request: pytest.FixtureRequest) -> Match:
    return lambda trace: match_prepared(prepare(trace, request.param))


def test_counted_where_the_source_gives_no_numbers(matched: Match) -> None:
    two = [op("all_reduce"), op("barrier")]
    m = matched(made(two, two))
    assert together(m) == met({(0, 0), (1, 0)}, {(0, 1), (1, 1)})
    assert taken(m)["need"].to_list() == [2, 2]


def test_numbers_of_the_source_win_over_the_count(matched: Match) -> None:
    """Rank 1's record begins one operation later."""
    seven, eight = op("all_reduce", ordinal=7), op("all_reduce", ordinal=8)
    m = matched(made([seven, eight], [eight]))
    assert together(m) == met({(0, 0)}, {(0, 1), (1, 0)})
    assert taken(m).select("k", "need").rows() == [(7, -1), (8, 2)]


def test_one_event_without_a_number_makes_its_communicator_counted(matched: Match) -> None:
    seven, eight = op("all_reduce", ordinal=7), op("all_reduce", ordinal=8)
    m = matched(made([seven, eight], [op("all_reduce"), eight]))
    assert together(m) == met({(0, 0), (1, 0)}, {(0, 1), (1, 1)})


def test_coalesced_operations_bear_one_number(matched: Match) -> None:
    three = [op("all_reduce", ordinal=5, group=1) for _ in range(3)]
    m = matched(made(three, three))
    assert together(m) == met(*({(0, k), (1, k)} for k in range(3)))


def test_ring_buffer_has_passed_what_lies_before_its_window(matched: Match) -> None:
    m = matched(
        made(
            [op("all_reduce", ordinal=k) for k in (5, 6, 7)],
            [op("all_reduce", ordinal=6)],
            rank_facts={1: {"lost_before": 40}},
        )
    )
    assert taken(m).select("k", "need").rows() == [(5, 1), (6, 2), (7, -1)]


def test_a_lost_start_without_numbers_is_not_counted(matched: Match) -> None:
    """Also where the rank that lost it has nothing on that communicator in its window."""
    m = matched(
        made(
            [op("all_reduce"), op("all_reduce", "other")],
            [op("all_reduce", "other")],
            comms={"other": [0, 1]},
            rank_facts={1: {"lost_before": 3}},
        )
    )
    assert together(m) == set()
    assert alone(m) == [(0, 0), (0, 1), (1, 0)]


def test_a_lost_start_leaves_other_communicators_counted(matched: Match) -> None:
    m = matched(
        made(
            [op("all_reduce", "mine")],
            [op("all_reduce", "mine")],
            [],
            comms={"mine": [0, 1]},
            rank_facts={2: {"lost_before": 3}},
        )
    )
    assert together(m) == met({(0, 0), (1, 0)})


def test_active_entries_only(matched: Match) -> None:
    """A rank that leaves out what is complete has passed what its status says."""
    three = [op("all_reduce", ordinal=k) for k in (1, 2, 3)]
    m = matched(made(three, [], rank_facts={1: {"only_active": True}}, status=[(1, "w", 2, 2, 2)]))
    assert taken(m).select("need", "passed").rows() == [(1, 1), (1, 1), (-1, 0)]


def test_gaps_of_one_job_do_not_renumber_another(matched: Match) -> None:
    """Numbers are compared with windows and are shown: they stay those of the source."""
    ring = made(
        [op("all_reduce", ordinal=k) for k in (105, 106)],
        [op("all_reduce", ordinal=106)],
        [op("all_reduce", ordinal=k) for k in (105, 106, 107)],
        rank_facts={1: {"lost_before": 5}},
    )
    wide = made(*([op("all_reduce", ordinal=k << 40) for k in range(1, 4)] for _ in range(2)))
    nodes = taken(matched(concat([ring, wide])))
    first = nodes.filter(pl.col("job") == 0)
    assert first.select("k", "need").rows() == [(105, 2), (106, 3), (107, -1)]
    assert nodes.filter(pl.col("job") == 1)["k"].to_list() == [k << 40 for k in (1, 2, 3)]


ABSURD = {
    "gaps": [k << 46 for k in range(3000)],
    "one outlier": [0, 1 << 60, *range(1, 2999)],
    "one number": [7] * 3000,
    "both": [1 << 62] * 1500 + list(range(1500)),
}


@pytest.mark.parametrize("numbers", ABSURD.values(), ids=ABSURD)
def test_absurd_numbers_do_not_fill_the_memory(numbers: list[int]) -> None:
    rank = [op("all_reduce", ordinal=k) for k in numbers]
    match(made([op("all_reduce")], [op("all_reduce")]))
    trace = made(rank, rank)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    m = match(trace)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB
    assert m.nodes.height < 50_000
    assert together(m) == met(*({(0, s), (1, s)} for s in range(len(numbers))))
    assert taken(m)["need"].unique().to_list() == [2]


@pytest.mark.parametrize(("backend", "drops"), [("nccl", True), ("gloo", False), ("mpi", False)])
def test_empty_collectives(matched: Match, backend: str, drops: bool) -> None:
    """NCCL makes no call for them: they take no number."""
    empty = op("all_reduce", count=0, dtype="f32")
    full = op("all_reduce", count=8, dtype="f32")
    m = matched(made([empty, full], [full], backend=backend))
    if drops:
        assert alone(m) == [(0, 0)]
        assert together(m) == met({(0, 1), (1, 0)})
    else:
        assert alone(m) == []
        assert together(m) == met({(0, 0), (1, 0)}, {(0, 1)})


def test_empty_collective_with_output_is_a_call(matched: Match) -> None:
    """A member that gives nothing and takes all."""
    part = op("all_gather_v", count=0, count_out=8, dtype="f32")
    m = matched(made([part], [op("all_gather_v", count=8, count_out=8, dtype="f32")]))
    assert together(m) == met({(0, 0), (1, 0)})


def test_one_rank_communicator(matched: Match) -> None:
    m = matched(made([op("all_reduce", "mine")], [], comms={"mine": [0]}))
    assert alone(m) == [(0, 0)]
    assert together(m) == set()


def test_unknown_members_are_those_who_use_it(matched: Match) -> None:
    m = matched(made([op("all_reduce", "u")], [], [op("all_reduce", "u")], comms={"u": []}))
    assert taken(m).select("present", "need").rows() == [(2, 2)]


def test_a_member_listed_twice_is_one(matched: Match) -> None:
    m = matched(made([op("all_reduce", "u")], [op("all_reduce", "u")], comms={"u": [0, 1, 1]}))
    assert taken(m)["need"].to_list() == [2]


def test_finalize_runs_over_the_whole_job(matched: Match) -> None:
    end = op("finalize", None)
    m = matched(made([end], [end], []))
    assert taken(m).select("present", "members", "need").rows() == [(2, 3, -1)]


def test_finalize_of_a_damaged_world_size(matched: Match) -> None:
    """It lacks a billion ranks, and does not list them."""
    m = matched(made([op("finalize", None)], job_facts={"world_size": 1 << 30}))
    assert taken(m).select("members", "need").rows() == [(1 << 30, -1)]
    assert m.prepared.comms["ranks"].list.len().to_list()[-1] < 10_000


# --- point to point


def test_channels_are_in_order(matched: Match) -> None:
    m = matched(made([send(1), send(1)], [recv(0), recv(0)]))
    assert together(m) == met({(0, 0), (1, 0)}, {(0, 1), (1, 1)})


@pytest.mark.parametrize(("backend", "by_tag"), [("nccl", False), ("gloo", True), ("mpi", True)])
def test_tags(matched: Match, backend: str, by_tag: bool) -> None:
    m = matched(
        made([send(1, tag=1), send(1, tag=2)], [recv(0, tag=2), recv(0, tag=1)], backend=backend)
    )
    crossed = met({(0, 0), (1, 1)}, {(0, 1), (1, 0)})
    in_order = met({(0, 0), (1, 0)}, {(0, 1), (1, 1)})
    assert together(m) == (crossed if by_tag else in_order)
    # a tag that differs where tags are ignored: another message was meant, and it stops nobody
    assert m.nodes["differs"].to_list() == [not by_tag] * 2
    assert not m.nodes["blocks"].any()


def test_any_tag_differs_from_none(matched: Match) -> None:
    m = matched(made([send(1, tag=1)], [recv(0, tag="any")]))
    assert together(m) == met({(0, 0), (1, 0)})
    assert not m.nodes["differs"].any()


def test_sendrecv_is_two_parts(matched: Match) -> None:
    ring = ([op("sendrecv", peer=(r + 1) % 3, recv_peer=(r + 2) % 3, count=1)] for r in range(3))
    m = matched(made(*ring, backend="mpi"))
    assert together(m) == met(*({(r, 0), ((r + 1) % 3, 0)} for r in range(3)))
    assert m.nodes["need"].to_list() == [2, 2, 2]


def test_sendrecv_without_recv_peer_takes_from_whom_it_sends_to(matched: Match) -> None:
    m = matched(made(*([op("sendrecv", peer=1 - r, count=1)] for r in range(2)), backend="mpi"))
    assert m.nodes.select("src", "dst", "need").sort("src").rows() == [(0, 1, 2), (1, 0, 2)]


def test_sendrecv_of_which_only_the_receive_is_known(matched: Match) -> None:
    m = matched(made([op("sendrecv", recv_peer=1, count=1)], [send(0, count=1)], backend="mpi"))
    assert together(m) == met({(0, 0), (1, 0)})
    assert alone(m) == []
    assert m.events["node2"].to_list() == [-1, -1]


def test_unknown_peer_matches_nothing_and_stops_nobody(matched: Match) -> None:
    m = matched(made([send(1) | {"peer": None}], [recv(0)]))
    assert alone(m) == [(0, 0)]
    assert together(m) == met({(1, 0)})


def test_probe_looks_at_the_next_message(matched: Match) -> None:
    m = matched(made([send(1), send(1)], [recv(0), op("probe", peer=0), recv(0)], backend="mpi"))
    assert together(m) == met({(0, 0), (1, 0)}, {(0, 1), (1, 1), (1, 2)})
    assert m.nodes["present"].to_list() == [2, 2]  # a probe is nobody's partner


def test_known_match_of_a_wildcard(matched: Match) -> None:
    first, second = recv("any", matched_peer=1), recv("any", matched_peer=0)
    m = matched(made([send(2)], [send(2)], [first, second], backend="mpi"))
    assert together(m) == met({(1, 0), (2, 0)}, {(0, 0), (2, 1)})
    assert m.events["box"].to_list() == [-1] * 4


def test_wildcards_go_to_mailboxes(matched: Match) -> None:
    """With all messages to their rank on that communicator, and no other."""
    m = matched(made([send(1), send(2)], [recv("any")], [recv(0)], backend="mpi"))
    assert m.events.filter(pl.col("box") >= 0).select("rank", "seq").rows() == [(0, 0), (1, 0)]
    assert together(m) == met({(0, 1), (2, 0)})


def test_sendrecv_between_two_mailboxes_stays_one_event(matched: Match) -> None:
    ring = ([op("sendrecv", peer=(r + 1) % 3, recv_peer="any", count=1)] for r in range(3))
    m = matched(made(*ring, backend="mpi"))
    assert m.events.select("rank", "box").rows() == [(0, 0), (1, 0), (2, 0)]


def test_a_lost_start_aligns_what_is_open(matched: Match) -> None:
    """The completed are set aside, and the first open send meets the first open receive."""
    done, waits = {"state": "completed"}, {"state": "scheduled"}
    m = matched(
        made(
            [send(1, **done), send(1, **done), send(1, **waits)],
            [recv(0, **done), recv(0, **waits)],
            rank_facts={1: {"lost_before": 1}},
        )
    )
    assert together(m) == met({(0, 2), (1, 1)})
    assert m.nodes["cut"].to_list() == [True]


def test_jobs_do_not_mix(matched: Match) -> None:
    one = made([op("all_reduce"), send(1)], [op("all_reduce"), recv(0)])
    nodes = taken(matched(concat([one, one, one])))
    assert nodes["need"].to_list() == [2] * 6
    assert nodes["job"].sort().to_list() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("seconds", "late"), [(60, [1]), (29, [])])
def test_members_that_came_after_another_had_given_up(
    matched: Match, seconds: int, late: list[int]
) -> None:
    """No states, and rank 0's record ends alive after 30 s."""
    m = matched(
        made(
            [op("all_reduce", t_created=START)],
            [op("all_reduce", t_created=START + seconds * NS)],
            exits="alive",
            rank_facts={0: {"t_last": START + 30 * NS}, 1: {"t_last": START + 90 * NS}},
        )
    )
    assert m.late["rank"].to_list() == late
    assert taken(m)["need"].to_list() == [-1 if late else 2]
