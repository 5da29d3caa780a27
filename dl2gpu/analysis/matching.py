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

from dl2gpu.analysis.replay_kernel import count_along, repeats_along
from dl2gpu.analysis.signatures import compare_collectives, compare_messages
from dl2gpu.analysis.tables import NCCL_LIKE, Prepared, is_collective, prepare
from dl2gpu.trace.schema import ANY, EXIT, FLAG, OP, Trace

__all__ = ["KIND", "ROLE", "Matching", "match", "match_prepared"]

KIND: Final = {"synchronising": 0, "root_sends": 1, "root_receives": 2, "message": 3}
ROLE: Final = {"none": 0, "member": 1, "root": 2, "send": 3, "recv": 4, "probe": 5}


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


def match(trace: Trace) -> Matching:
    """Nodes of a trace. See :class:`Matching`."""
    return match_prepared(prepare(trace))


def match_prepared(p: Prepared) -> Matching:
    """Nodes of a prepared trace. See :class:`Matching`."""
    collectives, coll_nodes = _collectives(p)
    n = coll_nodes.height
    parts, message_nodes, boxes = _messages(p, first=n)
    events = _attach(p.events, collectives, parts, boxes)
    nodes = pl.concat([coll_nodes, message_nodes], how="diagonal").sort("node")
    late = _late(p, events)
    if late.height:
        nodes = nodes.with_columns(
            need=pl.when(pl.col("node").is_in(late["node"].unique().to_list()))
            .then(-1)
            .otherwise("need")
            .cast(pl.Int32)
        )
    return Matching(p, events, nodes, late)


# --------------------------------------------------------------------------------------------------
# Collectives


def _collectives(p: Prepared) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(events: i, node, role, alone, k) and the node table of all collectives.

    ``k`` is the source's ordinal where all events of the communicator carry one, else counted per
    communicator and rank. Where one is counted, an empty collective on NCCL takes no number (the
    library drops the call), and a communicator of which a member lost its start is not counted.
    Members of a batch may bear one number (coalesced collectives): the k-th then meets the k-th.
    """
    coll = (
        p.events.lazy()
        .filter(is_collective(pl.col("op")))
        .select(
            "i", "r", "rank", "comm", "op", "root", "bytes", "count", "count_out", "dtype",
            "reduce_op", "new_comm", "split", "flags", "done", "ordinal",
        )
        .collect()
    )  # fmt: skip
    about = _about_comms(p, coll)
    coll = coll.lazy().join(about.lazy(), on="comm", how="left", maintain_order="left").with_columns(
        empty=pl.col("nccl")
        & ((pl.col("count") == 0) & (pl.col("count_out").fill_null(0) == 0)).fill_null(False),
        flags=pl.when(pl.col("any_sizes") & (pl.col("op") == OP["all_to_all"]))
        .then(pl.col("flags") | FLAG["sizes_incomparable"])
        .otherwise("flags"),
    ).collect()  # fmt: skip
    by_source = coll["by_source"].all()
    if by_source:
        coll = coll.with_columns(k=pl.col("ordinal"))
    else:
        counts = ~coll["by_source"] & ~coll["empty"] & ~coll["lost"]
        nth = count_along(
            coll["r"].to_numpy(), coll["comm"].to_numpy(), counts.to_numpy(), p.comms.height
        )
        coll = coll.with_columns(
            k=pl.when("by_source").then("ordinal").when(counts).then(pl.Series(nth))
        )
    coll = coll.with_columns(
        alone=(pl.col("size") == 1) | pl.col("empty") | pl.col("k").is_null()
    )
    repeated = repeats_along(
        coll["r"].to_numpy(), coll["comm"].to_numpy(), coll["k"].fill_null(-1).to_numpy(), p.comms.height
    )
    copies = int(repeated.max(initial=0)) + 1
    width = about["high"].fill_null(0) - about["low"].fill_null(0) + 1
    total = sum(width.to_list()) * copies
    if by_source and total < 1 << 62:
        # a packed key: each communicator has its own range of numbers
        about = about.with_columns(base=width.cum_sum() - width)
        base, low = (about[c].gather(coll["comm"]) for c in ("base", "low"))
        key = [pl.Series("key", (base + coll["k"] - low) * copies + pl.Series(repeated))]
    else:
        key = [coll["comm"], coll["k"], pl.Series("copy", repeated)]
    coll = coll.with_columns(*key)
    names = [c.name for c in key]
    nodes = compare_collectives(coll.filter(~pl.col("alone")), names)
    nodes = _needs(p, nodes.sort("comm", "k", *names).with_row_index("node"))
    events = (
        coll.lazy()
        .join(nodes.lazy().select(*names, "node", top="root"), on=names, how="left", maintain_order="left")
        .select(
            "i",
            node=pl.when(~pl.col("alone")).then("node").cast(pl.Int32),
            role=pl.when(
                (pl.col("op").is_between(OP["broadcast"], OP["gather_v"]))
                & (pl.coalesce("root", "top") == pl.col("rank"))
            )
            .then(ROLE["root"])
            .otherwise(ROLE["member"])
            .cast(pl.Int8),
            alone="alone",
            k="k",
        )
        .collect()
    )
    drop = [n for n in (*names, "root") if n not in ("comm", "k")]
    return events, nodes.drop(drop).with_columns(pl.col("node").cast(pl.Int32))


def _about_comms(p: Prepared, coll: pl.DataFrame) -> pl.DataFrame:
    """One row a communicator, in order: what its collectives need to know about it.

    ``size``, ``nccl`` (drops empty calls), ``any_sizes`` (all_to_all may be uneven under that name:
    Flight Recorder does not tell), ``by_source`` (all its collectives are numbered), ``lost`` (a
    member lost its start), ``low`` and ``high`` ordinal.
    """
    used = coll.lazy().group_by("comm").agg(
        low=pl.col("ordinal").min(),
        high=pl.col("ordinal").max(),
        unnumbered=pl.col("ordinal").null_count(),
    ).collect()  # fmt: skip
    lost = p.ranks.filter(pl.col("lost_before").fill_null(1) > 0).select("r")
    if lost.height and (used["unnumbered"] > 0).any():
        cut = coll.join(lost, on="r", how="semi")["comm"].unique()
    else:
        cut = pl.Series("comm", [], dtype=pl.Int32)
    return (
        p.comms.select("comm", "job", "size")
        .join(p.jobs.select("job", "semantics", "source"), on="job", how="left")
        .join(used, on="comm", how="left")
        .select(
            "comm", "size", "low", "high",
            nccl=pl.col("semantics") == NCCL_LIKE,
            any_sizes=pl.col("source") == "flight_recorder",
            by_source=pl.col("unnumbered").fill_null(0) == 0,
            lost=pl.col("comm").is_in(cut.to_list()),
        )
        .sort("comm")
    )  # fmt: skip


def _needs(p: Prepared, nodes: pl.DataFrame) -> pl.DataFrame:
    """``need``: how many arrivals make the collective ready; -1 where a member's part is missing.

    A member whose record starts later (ring buffer), or lists active operations only and has gone
    past, counts as come.
    """
    unknown = p.comms.filter(pl.col("size") == 0)["comm"]
    seen = (
        p.events.lazy()
        .filter(pl.col("comm").is_in(unknown.implode()) & is_collective(pl.col("op")))
        .group_by("comm")
        .agg(users=pl.col("rank").n_unique())
    )
    nodes = (
        nodes.lazy()
        .join(p.comms.lazy().select("comm", "job", "size"), on="comm", how="left")
        .join(seen, on="comm", how="left")
        .with_columns(
            members=pl.when(pl.col("size") > 0).then("size").otherwise("users").cast(pl.Int32)
        )
        .drop("size", "users")
        .collect()
    )
    short = nodes.filter(pl.col("present") < pl.col("members"))
    if short.is_empty():
        return nodes.with_columns(need=pl.col("members"), passed=pl.lit(0, pl.Int32))
    passed = passed_members(p, short).group_by("node").agg(passed=pl.len().cast(pl.Int32))
    return nodes.join(passed, on="node", how="left").with_columns(
        pl.col("passed").fill_null(0)
    ).with_columns(
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
    lossy = p.ranks.filter((pl.col("lost_before").fill_null(1) > 0) | pl.col("only_active"))
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
    return (
        members.join(first, on=["job", "comm", "rank"], how="left")
        .join(status, on=["job", "comm", "rank"], how="left")
        .select("comm", "rank", "first", "completed", "only_active")
        .collect()
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
    return (
        nodes.lazy()
        .select("node", "comm", "k")
        .join(w.lazy(), on="comm", how="inner")
        .filter(
            ((pl.col("first") > pl.col("k")) | (pl.col("completed") >= pl.col("k"))).fill_null(False)
        )
        .select("node", "rank")
        .collect()
    )


_GAVE_UP_NS: Final = 1_000_000_000
"""Clocks of two hosts are trusted to this much when one member's end is set against another's call."""


def _late(p: Prepared, events: pl.DataFrame) -> pl.DataFrame:
    """(node, rank) of members that issued their part after another member's record had ended.

    Only where no states are recorded, and for ranks whose record ends alive (it was cut at an error,
    a timeout mostly): an operation that such a rank waited in cannot have completed later.
    """
    empty = pl.DataFrame(schema={"node": pl.Int32, "rank": pl.Int32})
    ends = p.ranks.filter((pl.col("exit") == EXIT["alive"]) & pl.col("t_last").is_not_null())
    jobs = p.jobs.filter(~pl.col("states") & pl.col("last_created").is_not_null())
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
    return (
        parts.join(gone, on="node")
        .filter((pl.col("t_created") > pl.col("gone") + _GAVE_UP_NS).fill_null(False))
        .select("node", "rank")
        .unique()
        .sort("node", "rank")
        .collect()
    )


# --------------------------------------------------------------------------------------------------
# Point to point


def _message_parts(p: Prepared) -> pl.LazyFrame:
    """One row a part: sends, receives, both halves of a sendrecv, probes."""
    p2p = (
        p.events.lazy()
        .filter(pl.col("op").is_between(OP["send"], OP["probe"]))
        .join(p.jobs.lazy().select("job", "semantics"), on="job", how="left")
        .join(
            p.ranks.lazy().select(
                "r", lossy=(pl.col("lost_before").fill_null(1) > 0) | pl.col("only_active")
            ),
            on="r",
            how="left",
        )
        .with_columns(pl.col("comm").fill_null(-1))
    )
    op = pl.col("op")
    common = ["i", "r", "job", "comm", "done", "semantics", "lossy", "bytes", "count", "dtype", "send_mode"]
    here = pl.col("rank")
    sends = p2p.filter((op == OP["send"]) | (op == OP["sendrecv"])).select(
        *common, src=here, dst=pl.col("peer"), tag=pl.col("tag"), role=pl.lit(ROLE["send"], pl.Int8)
    )
    matched = pl.coalesce("matched_peer", "peer")
    matched_tag = pl.coalesce("matched_tag", "tag")
    recvs = p2p.filter(op == OP["recv"]).select(
        *common, src=matched, dst=here, tag=matched_tag, role=pl.lit(ROLE["recv"], pl.Int8)
    )
    # its receive may be of another length than its send
    ratio = pl.col("bytes") // pl.col("count")
    second = (
        p2p.filter(op == OP["sendrecv"])
        .with_columns(
            bytes=pl.when(pl.col("count_out").is_null())
            .then("bytes")
            .when(pl.col("count") > 0)
            .then(pl.col("count_out") * ratio)
            .otherwise(None),
            count=pl.coalesce("count_out", "count"),
        )
    ).select(
        *common,
        src=pl.coalesce("recv_peer", "peer"),
        dst=here,
        tag=pl.coalesce("recv_tag", "tag"),
        role=pl.lit(ROLE["recv"], pl.Int8),
    )
    probes = p2p.filter(op == OP["probe"]).select(
        *common, src=matched, dst=here, tag=matched_tag, role=pl.lit(ROLE["probe"], pl.Int8)
    )
    return pl.concat([sends, recvs, second, probes]).with_columns(
        # NCCL ignores tags: order alone matches (rule 5)
        tag_recorded=pl.col("tag"),
        tag=pl.when(pl.col("semantics") == NCCL_LIKE).then(0).otherwise(pl.col("tag").fill_null(0)),
    )


_CHANNEL: Final = ["job", "comm", "src", "dst", "tag"]


def _messages(
    p: Prepared, first: int
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """(parts: i, node, role, alone, k), the node table of messages, and mailboxes (i, box)."""
    parts = _message_parts(p).collect()
    no_boxes = pl.DataFrame(schema={"i": pl.UInt32, "box": pl.Int32})
    if parts.is_empty():
        part_schema = {"i": pl.UInt32, "node": pl.Int32, "role": pl.Int8, "alone": pl.Boolean, "k": pl.Int64}
        return pl.DataFrame(schema=part_schema), _no_nodes(), no_boxes
    # a peer that the source does not know: nothing can be claimed about the message
    unknown = parts.filter(pl.col("src").is_null() | pl.col("dst").is_null())
    parts = parts.filter(pl.col("src").is_not_null() & pl.col("dst").is_not_null())
    wild = (
        parts.filter((pl.col("src") == ANY) | (pl.col("tag") == ANY)).select("job", "comm", "dst").unique()
    )
    if wild.height:
        wild = wild.sort("job", "comm", "dst").with_row_index("box")
        boxed = parts.join(wild, on=["job", "comm", "dst"], how="inner")
        boxes = boxed.select("i", pl.col("box").cast(pl.Int32)).unique()
        parts = parts.join(wild, on=["job", "comm", "dst"], how="anti")
    else:
        boxes = no_boxes

    # Where either side lost its start, or lists active operations only, the k-th operations do not
    # belong together: what is still open is aligned from the first open one on both sides.
    cut = parts.group_by(_CHANNEL).agg(cut=pl.col("lossy").any())
    parts = parts.join(cut, on=_CHANNEL, how="left")
    over = parts.filter(pl.col("cut") & pl.col("done"))
    parts = parts.filter(~(pl.col("cut") & pl.col("done")))
    side = pl.when(pl.col("role") == ROLE["send"]).then(0).otherwise(1)
    counts = pl.when(pl.col("role") == ROLE["probe"]).then(0).otherwise(1).cast(pl.Int64)
    parts = parts.with_columns(side=side.cast(pl.Int8)).with_columns(
        k=counts.cum_sum().over([*_CHANNEL, "side"], order_by="i")
    )
    # a probe looks at the message that the next receive of its channel would take
    parts = parts.with_columns(
        k=pl.when(pl.col("role") == ROLE["probe"]).then(pl.col("k") + 1).otherwise(pl.col("k"))
    )
    nodes = (
        parts.select(*_CHANNEL, "k")
        .unique()
        .sort(*_CHANNEL, "k")
        .with_row_index("node", offset=first)
        .with_columns(pl.col("node").cast(pl.Int32))
    )
    parts = parts.join(nodes, on=[*_CHANNEL, "k"], how="left")
    facts = compare_messages(parts)
    nodes = nodes.join(facts, on="node", how="left").with_columns(
        pl.col("present", "finished").fill_null(0),
        pl.col("has_send", "has_recv", "blocks", "differs", "cut").fill_null(False),
    ).select(
        "node", "job", "comm", "k", "src", "dst",
        "present", "differs", "blocks", "finished", "has_send", "has_recv", "cut",
        kind=pl.lit(KIND["message"], pl.Int8),
        members=pl.lit(2, pl.Int32),
        passed=pl.lit(0, pl.Int32),
        need=pl.when(pl.col("present") >= 2).then(2).otherwise(-1).cast(pl.Int32),
    )  # fmt: skip
    keep = ["i", "node", "role", "alone", "k"]
    all_parts = pl.concat(
        [
            parts.with_columns(alone=pl.lit(False)).select(keep),
            pl.concat([over, unknown], how="diagonal").select(
                "i",
                node=pl.lit(None, pl.Int32),
                role="role",
                alone=pl.lit(True),
                k=pl.lit(None, pl.Int64),
            ),
        ]
    )
    return all_parts, nodes, boxes


def _no_nodes() -> pl.DataFrame:
    return pl.DataFrame(
        schema={
            "node": pl.Int32, "kind": pl.Int8, "job": pl.Int32, "comm": pl.Int32, "k": pl.Int64,
            "src": pl.Int32, "dst": pl.Int32, "present": pl.Int32, "differs": pl.Boolean,
            "blocks": pl.Boolean, "finished": pl.Int32, "has_send": pl.Boolean,
            "has_recv": pl.Boolean, "cut": pl.Boolean, "members": pl.Int32, "passed": pl.Int32,
            "need": pl.Int32,
        }
    )  # fmt: skip


def _attach(
    events: pl.DataFrame, collectives: pl.DataFrame, parts: pl.DataFrame, boxes: pl.DataFrame
) -> pl.DataFrame:
    """The events with their node. Every column is aligned to ``i``."""
    sendrecv = events.filter(pl.col("op") == OP["sendrecv"]).select("i")
    if sendrecv.height:
        halves = parts.join(sendrecv, on="i", how="semi")
        second = halves.filter(pl.col("role") == ROLE["recv"]).select("i", node2="node")
        parts = parts.join(halves.filter(pl.col("role") == ROLE["recv"]), on=["i", "role"], how="anti")
    else:
        second = pl.DataFrame(schema={"i": pl.UInt32, "node2": pl.Int32})
    placed = pl.concat([collectives.select("i", "node", "role", "alone", "k"), parts])
    out = events.lazy()
    if placed.height == events.height:
        # nothing but communication: a sort by i is the join
        placed = placed.sort("i")
        out = pl.concat([events, placed.drop("i")], how="horizontal").lazy()
    else:
        out = out.join(placed.lazy(), on="i", how="left", maintain_order="left")
    if second.height:
        out = out.join(second.lazy(), on="i", how="left", maintain_order="left")
    else:
        out = out.with_columns(node2=pl.lit(-1, pl.Int32))
    if boxes.height:
        out = out.join(boxes.lazy(), on="i", how="left", maintain_order="left")
    else:
        out = out.with_columns(box=pl.lit(-1, pl.Int32))
    return out.with_columns(
        pl.col("node").fill_null(-1),
        pl.col("node2").fill_null(-1),
        pl.col("box").fill_null(-1),
        pl.col("role").fill_null(ROLE["none"]),
        pl.col("alone").fill_null(False),
    ).collect()

