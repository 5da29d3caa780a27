"""Matching: each member with its collective, each send with its receive.

The result is a set of *nodes*. A node is one collective operation of a communicator, or one
message of a channel; its *parts* are the events that meet there. Everything is a columnar join or
group-by over all jobs of the shard at once, in Polars' lazy frames, and no step relies on the order
of rows: where an order is needed it is the program position ``i``.

Source: DESIGN.md sections 3 to 5; the defaults by backend are those of TRACE_FORMAT.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

from dl2gpu.analysis.matching_passes import Columns, Placed, pass_collectives, pass_messages
from dl2gpu.analysis.matching_plan import attach, plan_collectives, plan_messages
from dl2gpu.analysis.tables import Prepared, is_collective, is_lossy, prepare
from dl2gpu.engine.arrays import plain
from dl2gpu.engine.base import Engine
from dl2gpu.engine.cpu import CPU
from dl2gpu.trace.schema import EXIT, FLAG, OP, Trace

__all__ = ["Matching", "match", "match_prepared", "passed_members"]


@dataclass(frozen=True)
class Matching:
    """Nodes, and where each event belongs.

    Attributes:
        prepared: what was matched.
        events: ``prepared.events`` and ``node`` Int32 (-1: none), ``role`` Int8 (ROLE), ``node2``
            Int32 (the receive of a sendrecv, else -1), ``alone`` Boolean (completes by itself:
            one-rank communicator, empty operation on NCCL, or nothing known to match it with),
            ``box`` Int32 (mailbox of wildcard matching, else -1), ``k`` Int64 (collective ordinal,
            or place in the channel).
        nodes: one row a node, sorted: ``node``, ``kind`` Int8, ``job``, ``comm``, ``k``, ``src``
            and ``dst`` (messages), ``present`` (parts there), ``need`` Int32 (arrivals until it is
            ready; -1: never, a part is missing), ``differs`` and ``blocks`` Boolean (signatures
            disagree; and so that it cannot complete), ``finished`` Int32 (parts recorded complete).
        late: (node, rank) of members that came after another member had given up.
    """

    prepared: Prepared
    events: pl.DataFrame
    nodes: pl.DataFrame
    late: pl.DataFrame


def match(trace: Trace, engine: Engine = CPU) -> Matching:
    """Nodes of a trace. See :class:`Matching`. ``engine``: where this and all that follows runs."""
    return match_prepared(prepare(trace, engine))


def match_prepared(p: Prepared) -> Matching:
    """Nodes of a prepared trace. See :class:`Matching`.

    An engine without passes takes the lazy plans of :mod:`matching_plan` for everything; else they
    serve only what the passes of :mod:`matching_kernel` do not do (wildcards).
    """
    if not p.engine.passes:
        collectives, coll_nodes = plan_collectives(p)
        coll_nodes = needs(p, coll_nodes)
        parts, message_nodes, boxes = plan_messages(p, first=coll_nodes.height)
        events = attach(p, collectives, parts, boxes)
    else:
        columns = Columns(p)
        placed = Placed(p.events.height)
        coll_nodes = needs(p, pass_collectives(p, columns, placed))
        passed = pass_messages(p, columns, placed, first=coll_nodes.height)
        if passed is None:
            parts, message_nodes, boxes = plan_messages(p, first=coll_nodes.height)
            events = attach(p, placed.collectives(p.events), parts, boxes)
        else:
            message_nodes = passed
            events = p.events.with_columns(placed.series())
    nodes = pl.concat([coll_nodes, message_nodes], how="diagonal")
    if not nodes["node"].is_sorted():
        nodes = nodes.sort("node")
    nodes = _unfit(_uneven(p, events, nodes), p, events)
    late = _late(p, events)
    if late.height:
        nodes = nodes.with_columns(
            need=pl.when(pl.col("node").is_in(late["node"].unique().to_list()))
            .then(-1)
            .otherwise("need")
            .cast(pl.Int32)
        )
    return Matching(p, events, nodes, late)


def needs(p: Prepared, nodes: pl.DataFrame) -> pl.DataFrame:
    """``need``: how many arrivals make the collective ready; -1 where a member's part is missing.

    A member whose record starts later (ring buffer), or lists active operations only and has gone
    past, counts as come.
    """
    unknown = p.comms.filter(pl.col("size") == 0).select("comm")
    members = plain(p.comms["size"]).copy()
    if unknown.height:
        users = p.engine.collect(
            p.events.lazy()
            .filter(is_collective(pl.col("op")))
            .select("comm", "rank")
            .join(unknown.lazy(), on="comm", how="semi")
            .group_by("comm")
            .agg(users=pl.col("rank").n_unique().cast(pl.Int32))
        )
        members[users["comm"].to_numpy()] = users["users"].to_numpy()
    # communicators are numbered as they lie in their table
    of = nodes["comm"].to_numpy()
    nodes = nodes.with_columns(job=p.comms["job"].gather(of), members=pl.Series(members[of]))
    short = nodes.filter(pl.col("present") < pl.col("members"))
    if short.is_empty():
        return nodes.with_columns(need=pl.col("members"), passed=pl.lit(0, pl.Int32))
    passed = passed_members(p, short).group_by("node").agg(passed=pl.len().cast(pl.Int32))
    if passed.is_empty():
        nodes = nodes.with_columns(passed=pl.lit(0, pl.Int32))
    else:
        nodes = nodes.join(passed, on="node", how="left", maintain_order="left").with_columns(
            pl.col("passed").fill_null(0)
        )
    return nodes.with_columns(
        need=pl.when(pl.col("present") + pl.col("passed") >= pl.col("members"))
        .then("present")
        .otherwise(-1)
        .cast(pl.Int32)
    )


def windows(p: Prepared) -> pl.DataFrame:
    """Where each lossy rank's record of a communicator begins.

    Columns: ``comm``, ``rank``, ``first`` (first ordinal recorded, null: none),
    ``completed`` (last ordinal known completed from the status table, null: unknown).
    Only ranks whose record is known to be incomplete appear (ring buffer, active entries only).
    """
    lossy = p.ranks.filter(is_lossy())
    if lossy.is_empty():
        return pl.DataFrame(
            schema={"comm": pl.Int32, "rank": pl.Int32, "first": pl.Int64, "completed": pl.Int64,
                    "only_active": pl.Boolean}
        )  # fmt: skip
    members = (
        p.comms.lazy()
        .select("comm", "job", rank="ranks")
        .explode("rank", empty_as_null=False)
        .join(lossy.lazy().select("job", "rank", "only_active"), on=["job", "rank"], how="inner")
    )
    first = (
        p.events.lazy()
        .filter(is_collective(pl.col("op")) & pl.col("ordinal").is_not_null())
        .group_by("job", "comm", "rank")
        .agg(first=pl.col("ordinal").min(), last=pl.col("ordinal").max())
    )
    status = p.trace.status.lazy().select("job", "comm", "rank", completed="last_completed")
    return p.engine.collect(
        members.join(first, on=["job", "comm", "rank"], how="left")
        .join(status, on=["job", "comm", "rank"], how="left")
        .select("comm", "rank", "first", "completed", "only_active")
    )


def passed_members(p: Prepared, nodes: pl.DataFrame) -> pl.DataFrame:
    """(node, rank) of members that are not recorded at a node but have gone past it.

    ``nodes`` needs ``node``, ``comm``, ``k``. A rank with a lost start has passed what lies before
    its window; a rank that lists active operations only has passed what lies before its first
    listed one or up to what its status says is complete.
    """
    w = windows(p)
    if w.is_empty() or nodes.is_empty():
        return pl.DataFrame(schema={"node": nodes.schema["node"], "rank": pl.Int32})
    return p.engine.collect(
        nodes.lazy()
        .select("node", "comm", "k")
        .join(w.lazy(), on="comm", how="inner")
        .filter(
            ((pl.col("first") > pl.col("k")) | (pl.col("completed") >= pl.col("k"))).fill_null(
                False
            )
        )
        .select("node", "rank")
    )


def _uneven(p: Prepared, events: pl.DataFrame, nodes: pl.DataFrame) -> pl.DataFrame:
    """Nodes with the all_to_all marked whose members get another sum than they put in.

    Flight Recorder writes all_to_all with uneven splits under the one name and keeps only each
    rank's totals: these may differ between ranks, but not summed over all of them.
    """
    source = p.jobs.filter(pl.col("source") == "flight_recorder").select("job")
    if source.is_empty():
        return nodes
    unfair = pl.col("count").is_null() | ((pl.col("flags") & FLAG["sizes_incomparable"]) != 0)
    sums = p.engine.collect(
        events.lazy()
        .filter((pl.col("op") == OP["all_to_all"]) & (pl.col("node") >= 0))
        .join(source.lazy(), on="job", how="semi")
        .select(
            "node",
            given="count",
            taken=pl.coalesce("count_out", "count"),
            unfair=unfair.cast(pl.Int8),
        )
        .group_by("node")
        .agg(pl.col("given", "taken").sum(), pl.col("unfair").max())
        .filter((pl.col("unfair") == 0) & (pl.col("given") != pl.col("taken")))
        .select("node", uneven=pl.lit(True))
    )
    if sums.is_empty():
        return nodes
    uneven = pl.col("uneven").fill_null(False) & (pl.col("present") == pl.col("members"))
    return (
        nodes.join(sums, on="node", how="left", maintain_order="left")
        .with_columns(blocks=pl.col("blocks") | uneven, differs=pl.col("differs") | uneven)
        .drop("uneven")
    )


_SHARED_OUT: Final = [
    OP[name] for name in ("all_to_all_v", "scatter", "scatter_v", "gather", "gather_v")
]
"""Operations whose members may pass in and get different shares, which have to fit each other."""


def _unfit(nodes: pl.DataFrame, p: Prepared, events: pl.DataFrame) -> pl.DataFrame:
    """Nodes marked whose members expect another share than they are passed.

    Of an all_to_all_v pair by pair where all splits are known (what the members pass to one of
    them is what that one gets), else over all of them; of a scatter what the root passes against
    what all get, of a gather the reverse. Only where every member is there and has said its sizes.
    """
    shared = events.lazy().filter(pl.col("op").is_in(_SHARED_OUT) & (pl.col("node") >= 0))
    source = p.jobs.lazy().filter(pl.col("source") == "native").select("job")
    parts = (
        shared.join(source, on="job", how="semi")
        .select("node", "comm", "rank", "op", "root", "count", "count_out", "splits")
        .join(nodes.lazy().select("node", "present", "members"), on="node")
        .filter(pl.col("present") == pl.col("members"))
        .collect()
    )
    if parts.is_empty():
        return nodes
    op, mine = pl.col("op"), pl.col("rank") == pl.col("root")
    exchange = op == OP["all_to_all_v"]
    scatter = op.is_in([OP["scatter"], OP["scatter_v"]])
    given = pl.when(scatter & ~mine).then(0).otherwise("count")
    taken = (
        pl.when(exchange).then(pl.coalesce("count_out", "count"))
        .when(scatter).then("count_out")
        .when(mine).then("count_out")
        .otherwise(0)
    )  # fmt: skip
    parts = parts.with_columns(given=given, taken=taken)
    sums = parts.group_by("node").agg(
        pl.col("given", "taken").sum(),
        known=(
            pl.col("given").is_not_null()
            & pl.col("taken").is_not_null()
            & (exchange | pl.col("root").is_not_null())
        ).all(),
        alike=pl.col("op").n_unique() == 1,
    )
    wrong = sums.filter("known", "alike", pl.col("given") != pl.col("taken"))["node"]
    pairs = _unfit_pairs(
        p, parts.filter(exchange).join(sums.filter("alike"), on="node", how="semi")
    )
    wrong = pl.concat([wrong, pairs]).unique()
    if wrong.is_empty():
        return nodes
    here = pl.col("node").is_in(wrong.to_list())
    return nodes.with_columns(blocks=pl.col("blocks") | here, differs=pl.col("differs") | here)


def _unfit_pairs(p: Prepared, parts: pl.DataFrame) -> pl.Series:
    """Nodes of all_to_all_v in which what is passed to a member is not what it gets."""
    whole = pl.col("splits").list.len() == pl.col("members")
    parts = parts.filter(whole.fill_null(False).all().over("node"))
    if parts.is_empty():
        return pl.Series("node", [], pl.Int32)
    places = (
        p.comms.select("comm", rank="ranks")
        .join(parts.select("comm").unique(), on="comm", how="semi")
        .with_columns(place=pl.int_ranges(pl.col("rank").list.len()))
        .explode("rank", "place", empty_as_null=False)
    )
    passed = (
        parts.select("node", "splits", place=pl.int_ranges(pl.col("splits").list.len()))
        .explode("splits", "place", empty_as_null=False)
        .group_by("node", "place")
        .agg(passed=pl.col("splits").sum())
    )
    return (
        parts.join(places, on=["comm", "rank"])
        .join(passed, on=["node", "place"])
        .filter(pl.col("passed") != pl.col("taken"))["node"]
        .unique()
    )


_GAVE_UP_NS: Final = 1_000_000_000
"""Clocks of two hosts are trusted to this much when an end is set against another host's call."""


def _late(p: Prepared, events: pl.DataFrame) -> pl.DataFrame:
    """(node, rank) of members that issued their part after another member's record had ended.

    Only where no states are recorded, and for ranks whose record ends alive (it was cut at an
    error, a timeout mostly): an operation that such a rank waited in cannot have completed later.
    """
    empty = pl.DataFrame(schema={"node": pl.Int32, "rank": pl.Int32})
    ends = p.ranks.filter((pl.col("exit") == EXIT["alive"]) & pl.col("t_last").is_not_null())
    jobs = p.jobs.filter(~pl.col("states") & pl.col("last_created").is_not_null())
    # nothing of most jobs was issued so long after the first of their records had ended
    first = ends.group_by("job").agg(first=pl.col("t_last").min())
    jobs = jobs.join(first, on="job").filter(pl.col("last_created") > pl.col("first") + _GAVE_UP_NS)
    ends = ends.join(jobs.select("job"), on="job", how="semi")
    if ends.is_empty():
        return empty
    parts = (
        events.lazy()
        .join(jobs.lazy().select("job"), on="job", how="semi")
        .filter((pl.col("node") >= 0) & is_collective(pl.col("op")))
        .select("node", "rank", "r", "t_created")
        .join(ends.lazy().select("r", "t_last"), on="r", how="left")
    )
    gone = parts.group_by("node").agg(gone=pl.col("t_last").min())
    return p.engine.collect(
        parts.join(gone, on="node")
        .filter((pl.col("t_created") > pl.col("gone") + _GAVE_UP_NS).fill_null(False))
        .select("node", "rank")
        .unique()
        .sort("node", "rank")
    )
