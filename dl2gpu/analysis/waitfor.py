"""The wait-for graph at the fixpoint, and its cycles.

Vertices, numbered in four ranges:

* *lanes* (host threads) and *queues* (device streams): the places where a rank can stand;
* *nodes*: operations that are not complete. A place waits for a node, a node for the places of the
  members that have not come; going through the node keeps the graph linear in the number of ranks;
* *ranks*: where a member's operation is not in the record at all.

Edges mean "needs". A vertex needs all of its targets, but a wait for any one of several requests
and a wildcard receive need one of them; for those a cycle must be a knot.

Source: DESIGN.md section 4 (wait-for graph, two kinds of evidence).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.analysis import replay_kernel
from dl2gpu.analysis.matching import passed_members
from dl2gpu.analysis.replay import Fixpoint, Program
from dl2gpu.analysis.tables import KIND, ROLE
from dl2gpu.analysis.windows import timed_window
from dl2gpu.trace.schema import ANY, EXIT, MODE

__all__ = ["FATE", "Graph", "build_graph", "components", "is_place", "stands_at"]

Array = npt.NDArray[Any]

FATE: Final = {
    "present": 0,
    "finished": 1,
    "dead": 2,
    "free": 3,
    "blocked": 4,
    "no_record": 5,
    "late": 6,
}
"""What a rank is doing whose operation a node lacks."""


@dataclass(frozen=True)
class Graph:
    """Wait-for graph of all stuck jobs of a shard.

    Attributes:
        program, fix: what it was built from.
        src, dst: int64 vertices of the edges. inferred: bool, edges from a host to its own device
            work that the record does not show but that would explain its silence.
        lane0, queue0, node0, rank0, size: where the ranges of vertices begin, and their end.
        stuck: bool[size], the vertex stands and cannot move.
        absent: (node, rank, fate) of members whose operation is not in the record.
        fate: int8[ranks], FATE of each rank row.
        either: bool[size], vertices that need one target, not all.
        silent_at: int64[ranks], the first pending host operation of a rank whose host waits are not
            recorded: where its host may stand (inferred); -1: none.
    """

    program: Program
    fix: Fixpoint
    src: Array
    dst: Array
    inferred: Array
    lane0: int
    queue0: int
    node0: int
    rank0: int
    size: int
    stuck: Array
    absent: pl.DataFrame
    fate: Array
    either: Array
    silent_at: Array


def unfinished(fix: Fixpoint) -> Array:
    """Events that were issued and are not complete."""
    return np.flatnonzero(fix.issued & ~fix.completed)


def open_nodes(p: Program, fix: Fixpoint, pending: Array) -> Array:
    """Operations of which some part has started and is not complete, in order."""
    waiting = pending[fix.started[pending]]
    node = np.concatenate([p.kernel[name][waiting] for name in ("node1", "node2")])
    return np.unique(node[node >= 0]).astype(np.int64)


def _expand(start: Array, item: Array, keys: Array, owner: Array) -> tuple[Array, Array]:
    """(owner repeated, item) of the buckets ``keys``, each of which has one owner."""
    width = start[keys + 1] - start[keys]
    offset = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
    return np.repeat(owner, width), item[np.repeat(start[keys], width) + offset]


def build_graph(p: Program, fix: Fixpoint) -> Graph:
    """The wait-for graph at ``fix``."""
    m = p.matching
    lay = fix.layout
    k = p.kernel
    n_lanes, n_queues = len(lay.lane_first), len(lay.queue_first)
    n_nodes, n_ranks = m.nodes.height, m.prepared.ranks.height
    lane0, queue0 = 0, n_lanes
    node0 = queue0 + n_queues
    rank0 = node0 + n_nodes
    size = rank0 + n_ranks
    edges: list[tuple[Array, Array]] = []
    pending = unfinished(fix)

    lane_stuck = fix.lane_at >= 0
    queue_head = fix.queue_at
    queue_stuck = (queue_head >= 0) & fix.issued[np.maximum(queue_head, 0)]
    stands = np.concatenate([fix.lane_at[lane_stuck], queue_head[queue_stuck]]).astype(np.int64)
    place = np.concatenate(
        [np.flatnonzero(lane_stuck), queue0 + np.flatnonzero(queue_stuck)]
    ).astype(np.int64)

    # --- places that stand in a wait: the operations it waits for
    is_wait = k["wait_kind"][stands] > 0
    named = _wait_targets(p, fix, pending, stands[is_wait], place[is_wait])
    # --- places that stand in an operation (or a batch): itself
    heads = (place[~is_wait], stands[~is_wait])
    owner = np.concatenate([named[0], heads[0]])
    event = np.concatenate([named[1], heads[1]])
    in_wait = np.concatenate([np.ones(len(named[0]), bool), np.zeros(len(heads[0]), bool)])
    # an operation on a queue that a *wait* waits for: the queue is the place that has to move
    on_queue = in_wait & (lay.queue_of[event] >= 0)
    edges.append((owner[on_queue], queue0 + lay.queue_of[event[on_queue]]))
    owner, event = owner[~on_queue], event[~on_queue]
    # a batch is waited for as a whole: all its members' nodes
    owner, event, same = _with_batch(fix, owner, event)
    edges.append(same)
    open_event = ~fix.completed[event]
    owner, event = owner[open_event], event[open_event]
    not_started = ~fix.started[event]
    # a member that is not at the head of its queue keeps the batch from starting
    held = not_started & (lay.queue_of[event] >= 0) & ~_at_head(fix, event)
    queue = lay.queue_of[event[held]] + queue0
    away = queue != owner[held]
    edges.append((owner[held][away], queue[away]))
    for name in ("node1", "node2"):
        node = k[name][event]
        has = (node >= 0) & fix.started[event]
        edges.append((owner[has], node0 + node[has].astype(np.int64)))

    # --- nodes: members that are recorded but have not come
    nodes = open_nodes(p, fix, pending)
    v, part = _expand(k["node_start"], k["node_part"], nodes, nodes)
    x = part >> 1
    late = ~fix.started[x] & (k["role"][x] != ROLE["probe"])
    v_late, x_late = v[late], x[late]
    behind = fix.issued[x_late] & (lay.queue_of[x_late] >= 0)
    edges.append((node0 + v_late[behind], queue0 + lay.queue_of[x_late[behind]].astype(np.int64)))
    host = ~fix.issued[x_late]
    edges.append((node0 + v_late[host], lay.lane_of[x_late[host]].astype(np.int64)))
    if fix.scenario.atomic_batch:
        # a node whose parts have all come is held back by what is not there for their batches
        there = fix.started[x] & ~fix.completed[x] & (lay.unit_of[x] >= 0)
        lacking = _lacking(p, fix)
        v_in, other, same = _with_batch(
            fix, v[there], x[there], lacking[k["node1"]] | lacking[k["node2"]]
        )
        edges.append((node0 + same[0], node0 + same[1]))
        for name in ("node1", "node2"):
            node = k[name][other]
            has = lacking[node] & ~fix.completed[other] & (node != v_in)
            edges.append((node0 + v_in[has], node0 + node[has].astype(np.int64)))

    # --- nodes: members whose operation is not in the record
    absent, fate = _absent(p, fix, nodes, lane_stuck, queue_stuck)
    follow = absent.filter(pl.col("fate").is_in([FATE["free"], FATE["blocked"], FATE["dead"]]))
    edges.append(
        (
            node0 + follow["node"].to_numpy().astype(np.int64),
            rank0 + follow["r"].to_numpy().astype(np.int64),
        )
    )
    # a rank that is blocked: its host lanes stand. So do those of a whole program that stops before
    # its end, from which a wildcard could still get a message
    blocked = np.isin(fate[lay.lane_rank[lane_stuck]], (FATE["blocked"], FATE["finished"]))
    lanes = np.flatnonzero(lane_stuck)[blocked]
    edges.append((rank0 + lay.lane_rank[lanes].astype(np.int64), lanes.astype(np.int64)))

    # --- wildcard receives: whoever could still send
    either = np.zeros(size, np.bool_)
    _wildcards(p, fix, edges, either, owner, event, rank0)
    any_wait = k["wait_kind"][stands] > 0
    mode = m.events["mode"].fill_null(0).to_numpy()[stands[any_wait]]
    either[place[any_wait][mode != MODE["all"]]] = True

    src = np.concatenate([a for a, _ in edges]).astype(np.int64)
    dst = np.concatenate([b for _, b in edges]).astype(np.int64)
    # --- a host that is free but has device work pending may be blocked on it: inferred
    silent = _silent_hosts(p, fate)
    queues = np.flatnonzero(queue_stuck & silent[lay.queue_rank])
    more_src, more_dst = rank0 + lay.queue_rank[queues].astype(np.int64), queue0 + queues
    # the same where operations are the host's own, and whether it waits for them is not recorded
    silent_at = np.full(n_ranks, -1, np.int64)
    free = pending[fix.started[pending] & (lay.queue_of[pending] < 0)]
    free = free[~k["host_blocks"][free] & silent[p.r[free]]]
    silent_at[p.r[free[::-1]]] = free[::-1]
    for name in ("node1", "node2"):
        node = k[name][free]
        has = node >= 0
        more_src = np.concatenate([more_src, rank0 + p.r[free[has]].astype(np.int64)])
        more_dst = np.concatenate([more_dst, node0 + node[has].astype(np.int64)])
    inferred = np.concatenate([np.zeros(len(src), bool), np.ones(len(more_src), bool)])
    src, dst = np.concatenate([src, more_src]), np.concatenate([dst, more_dst])
    stuck = np.zeros(size, np.bool_)
    stuck[place] = True
    stuck[node0 + nodes] = True
    stuck[rank0 + np.flatnonzero(silent_at >= 0)] = True
    return Graph(
        p, fix, src, dst, inferred, lane0, queue0, node0, rank0, size, stuck, absent, fate, either,
        silent_at,
    )  # fmt: skip


def stands_at(g: Graph, place: int) -> int:
    """The event at which a place stands: a lane, a queue, or a rank whose host is silent."""
    if place < g.queue0:
        return int(g.fix.lane_at[place])
    if place < g.node0:
        return int(g.fix.queue_at[place - g.queue0])
    return int(g.silent_at[place - g.rank0])


def is_place(g: Graph, vertices: Array) -> Array:
    """bool: which of the vertices are places where a rank stands."""
    out: Array = vertices < g.node0
    ranks = vertices >= g.rank0
    out[ranks] = g.silent_at[vertices[ranks] - g.rank0] >= 0
    return out


def _wait_targets(
    p: Program, fix: Fixpoint, pending: Array, waits: Array, places: Array
) -> tuple[Array, Array]:
    """(place, event) of the unfinished operations that each wait waits for."""
    if not len(waits):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    at = pl.DataFrame({"wait": waits.astype(np.uint32), "place": places})
    named = p.waits.join(at, on="wait")
    target = named["target"].to_numpy().astype(np.int64)
    keep = ~fix.completed[target]
    out_place, out_event = named["place"].to_numpy()[keep], target[keep]
    everything = p.kernel["wait_kind"][waits] == 2
    if everything.any():
        lane_place = np.full(len(fix.layout.lane_first), -1, np.int64)
        lane_place[fix.layout.lane_of[waits[everything]]] = places[everything]
        handed = pending[p.kernel["wait_kind"][pending] == 0]
        of = lane_place[fix.layout.lane_of[handed]]
        out_place = np.concatenate([out_place, of[of >= 0]])
        out_event = np.concatenate([out_event, handed[of >= 0]])
    return out_place.astype(np.int64), out_event.astype(np.int64)


def _lacking(p: Program, fix: Fixpoint) -> Array:
    """bool[nodes + 1]: operations that not all have come to, or whose participants disagree.

    The last one, false, is for -1: no operation.
    """
    k = p.kernel
    n = p.matching.nodes.height
    come = np.zeros(n, np.int64)
    for name in ("node1", "node2"):
        node = k[name][fix.started & (k["role"] != ROLE["probe"])]
        come += np.bincount(node[node >= 0], minlength=n)
    lacking = (k["node_need"] < 0) | (come < k["node_need"]) | k["node_blocks"]
    return np.append(lacking, False)


_PAIRS: Final = 1 << 18
"""Pairs of what waits for a batch and its members that are written out one by one."""


def _with_batch(
    fix: Fixpoint, owner: Array, event: Array, only: Array | None = None
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Each event with all members of its batch, or with those of ``only`` bool[n].

    Also (owner, owner): of thousands that wait for one batch of thousands, each but the first needs
    what the first needs, and only that one is listed with the members.
    """
    unit = fix.layout.unit_of[event]
    in_unit = unit >= 0
    none = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    if not in_unit.any():
        return owner, event, none
    unit_of = fix.layout.unit_of.astype(np.int64)
    if only is not None:
        unit_of[~only] = -1
    start, item = replay_kernel.bucket(unit_of, len(fix.layout.unit_first))
    units, who = np.unique(np.stack([unit[in_unit], owner[in_unit]]), axis=1)
    same = none
    if (start[units + 1] - start[units]).sum() > _PAIRS:
        first = np.concatenate([[True], units[1:] != units[:-1]])
        same = (who[~first], who[first][np.cumsum(first) - 1][~first])
        units, who = units[first], who[first]
    owners, members = _expand(start, item, units, who)
    return (
        np.concatenate([owner[~in_unit], owners]),
        np.concatenate([event[~in_unit], members.astype(np.int64)]),
        same,
    )


def _at_head(fix: Fixpoint, event: Array) -> Array:
    """bool: does the queue of the event stand at the event's own batch (or at the event)?"""
    lay = fix.layout
    queue = np.maximum(lay.queue_of[event], 0)
    at = fix.queue_at[queue] if len(fix.queue_at) else np.full(len(event), -1)
    own = lay.unit_of[event]
    head = np.where(at >= 0, lay.unit_of[np.maximum(at, 0)], -1)
    out: Array = (at == event) | ((own >= 0) & (own == head))
    return out


_MEMBERS: Final = 1 << 20
"""Members of the pending operations of a communicator that are looked at one by one."""


def _absent(
    p: Program, fix: Fixpoint, nodes: Array, lane_stuck: Array, queue_stuck: Array
) -> tuple[pl.DataFrame, Array]:
    """Members without an operation at the given nodes, and the fate of every rank."""
    prepared = p.matching.prepared
    ranks = prepared.ranks
    fate = rank_fates(p, fix, lane_stuck, queue_stuck)
    lacking = p.matching.nodes.filter(
        pl.col("node").is_in(pl.Series(nodes).implode()) & (pl.col("need") < 0) & ~pl.col("blocks")
    )
    schema = {"node": pl.Int32, "rank": pl.Int32, "r": pl.Int64, "fate": pl.Int8}
    if lacking.is_empty():
        return pl.DataFrame(schema=schema), fate
    collective = lacking.filter(pl.col("kind") != KIND["message"])
    # the first of a communicator lack what the later ones lack; thousands that do not block their
    # hosts, with thousands of members each, are not all written out
    budget = (_MEMBERS // pl.col("members")).clip(8)
    collective = collective.filter(pl.col("k").rank("ordinal").over("comm") <= budget)
    members = (
        collective.select("node", "job", "comm")
        .join(prepared.comms.select("comm", rank="ranks"), on="comm")
        .explode("rank", empty_as_null=False)
        .select("node", "job", "rank")
    )
    present = prepared.engine.collect(
        p.matching.events.lazy()
        .select("node", "rank")
        .join(collective.select("node").lazy(), on="node", how="semi")
    )
    passed = passed_members(prepared, collective).cast({"node": pl.Int32})
    members = members.join(present, on=["node", "rank"], how="anti").join(
        passed, on=["node", "rank"], how="anti"
    )
    message = lacking.filter(pl.col("kind") == KIND["message"]).select(
        "node", "job", rank=pl.when("has_send").then("dst").otherwise("src")
    )
    out = (
        pl.concat([members, message])
        .join(p.matching.late, on="node", how="anti")
        .join(
            ranks.select("job", "rank", pl.col("r").cast(pl.Int64)), on=["job", "rank"], how="left"
        )
        .select("node", "rank", "r")
    )
    known = out["r"].fill_null(0).to_numpy()
    late = p.matching.late.filter(pl.col("node").is_in(pl.Series(nodes).implode())).select(
        "node", "rank", r=pl.lit(None, pl.Int64), fate=pl.lit(FATE["late"], pl.Int8)
    )
    found = out.with_columns(
        fate=pl.when(pl.col("r").is_null())
        .then(FATE["no_record"])
        .otherwise(pl.Series(fate[known] if len(fate) else np.zeros(len(known), np.int8)))
        .cast(pl.Int8)
    )
    return pl.concat([found, late]).sort("node", "rank"), fate


def rank_fates(p: Program, fix: Fixpoint, lane_stuck: Array, queue_stuck: Array) -> Array:
    """int8[ranks] FATE: what each rank's host is doing at the fixpoint.

    A dead rank that stood in an operation when it died is a victim (the launcher killed it): it
    counts as blocked there. A rank that ended issues nothing more, whether it got to its end or not
    (a whole program lists everything that it would do).
    """
    ranks = p.matching.prepared.ranks
    exits = ranks["exit"].to_numpy()
    truncated = ranks["truncated"].fill_null(False).to_numpy()
    lay = fix.layout
    n = len(exits)
    any_stuck = np.zeros(n, np.bool_)
    any_stuck[lay.lane_rank[lane_stuck]] = True
    any_free = np.zeros(n, np.bool_)
    any_free[lay.lane_rank[~lane_stuck]] = True
    blocked = any_stuck & ~any_free
    has_work = np.zeros(n, np.bool_)
    has_work[lay.queue_rank[queue_stuck]] = True
    dead = (exits == EXIT["crashed"]) | (exits == EXIT["killed"])
    # a record that was cut while being written: the process died writing it
    dead |= truncated
    fate = np.full(n, FATE["free"], np.int8)
    fate[blocked] = FATE["blocked"]
    fate[dead & ~blocked & ~(has_work & (exits != EXIT["crashed"]))] = FATE["dead"]
    fate[exits == EXIT["finished"]] = FATE["finished"]
    return fate


def _silent_hosts(p: Program, fate: Array) -> Array:
    """bool[ranks]: free at the end of the record, and the record shows no host waits at all.

    A host that went on after its record (a window) is not assumed to stand anywhere; where the
    window says when it ended, :mod:`windows` weighs what follows from the assumption.
    """
    ranks = p.matching.prepared.ranks
    window = (pl.col("exit") == EXIT["window"]).fill_null(False)
    waits = ranks.select(window & ~timed_window()).to_series().to_numpy().copy()
    host = p.kernel["host_blocks"] & (p.stream < 0)
    waits[p.r[host]] = True
    silent: Array = (fate == FATE["free"]) & ~waits
    return silent


def _wildcards(
    p: Program, fix: Fixpoint, edges: list[tuple[Array, Array]], either: Array,
    place: Array, event: Array, rank0: int,
) -> None:  # fmt: skip
    """Edges of receives matched from a mailbox: to any rank that could still send to them.

    ``place`` stands in ``event``, or in a wait for it. A place that waits for several operations,
    of which one can be had from any rank, counts as waiting for any: that claims less.
    """
    m = p.matching
    box = m.events["box"].to_numpy()
    at_box = (box[event] >= 0) & fix.started[event] & ~fix.completed[event]
    if not at_box.any():
        return
    prepared = m.prepared
    who = pl.DataFrame({"place": place[at_box], "i": event[at_box].astype(np.uint32)}).join(
        m.events.select("i", "job", "rank", "comm", "peer"), on="i"
    )
    peers = (
        who.join(prepared.comms.select("comm", member="ranks"), on="comm", how="left")
        .explode("member", empty_as_null=False)
        .filter(
            (pl.col("member") != pl.col("rank"))
            & ((pl.col("peer") == ANY) | (pl.col("peer") == pl.col("member")))
        )
        .join(
            prepared.ranks.select("job", member="rank", r=pl.col("r").cast(pl.Int64)),
            on=["job", "member"],
        )
        .sort("place", "r")  # which circle is shown depends on the order of edges
    )
    edges.append((peers["place"].to_numpy(), rank0 + peers["r"].to_numpy()))
    either[who.filter(pl.col("peer") == ANY)["place"].to_numpy()] = True


def hopeful(g: Graph, with_inferred: bool) -> Array:
    """bool[size]: vertices that may yet move, because a rank that is free may still come.

    Backwards from the free ranks: a vertex that needs one target is hopeful if one of them is, a
    vertex that needs all if all of them are. Only used where some vertex needs one of several.
    """
    keep = slice(None) if with_inferred else ~g.inferred
    src, dst = g.src[keep], g.dst[keep]
    out = np.bincount(src, minlength=g.size)
    hope = np.zeros(g.size, np.bool_)
    hope[g.rank0 :] = (g.fate == FATE["free"]) & (out[g.rank0 :] == 0)
    rooted = np.zeros(g.size, np.bool_)
    ends = g.absent.filter(
        pl.col("fate").is_in([FATE["finished"], FATE["no_record"], FATE["late"]])
    )
    rooted[g.node0 + ends["node"].to_numpy().astype(np.int64)] = True
    while True:
        good = np.bincount(src[hope[dst]], minlength=g.size)
        new = np.where(g.either, good > 0, (good == out) & (out > 0) & ~rooted) | hope
        if (new == hope).all():
            return hope
        hope = new


def components(g: Graph, with_inferred: bool) -> tuple[Array, Array]:
    """Strong components of the shard's graph, in one call.

    Returns:
        label int32[size], the last one that of all vertices without an edge; and circular
        bool[labels]: components that are deadlock cycles (more than one place, or a place that
        needs itself), knots where a vertex needs only one target.
    """
    keep = np.ones(len(g.src), np.bool_) if with_inferred else ~g.inferred
    if g.either.any():
        hope = hopeful(g, with_inferred)
        keep &= ~hope[g.src] & ~hope[g.dst]
    src, dst = g.src[keep], g.dst[keep]
    # most operations are complete, and no vertex of an edge
    touched = np.zeros(g.size, np.bool_)
    touched[src] = touched[dst] = True
    used = np.flatnonzero(touched)
    number = np.full(g.size, len(used), np.int64)
    number[used] = np.arange(len(used))
    engine = g.program.matching.prepared.engine
    found = engine.components(number[src], number[dst], len(used))
    # numbered by their first vertices, whatever the engine calls them
    _, first, of_label = np.unique(found, return_index=True, return_inverse=True)
    count = len(first)
    of_used = np.argsort(np.argsort(first))[of_label]
    circular = np.bincount(of_used, minlength=count) > 1
    circular[of_used[number[src[src == dst]]]] = True
    # a single node or rank is no place
    places = np.bincount(of_used[is_place(g, used)], minlength=count)
    label = np.append(of_used, count)[number]
    return label, np.append(circular & (places > 0), False)
