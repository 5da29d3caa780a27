"""Matching as lazy plans: the same nodes as ``matching_kernel``, as joins and group-bys.

Nothing here relies on the order of rows: where an order is needed a plan sorts by the program
position ``i``. Plans run where ``Prepared.engine`` collects them, and hold no operation that cuDF
lacks. On the CPU the passes along the rows are faster; there this form serves wildcards (whose
messages are matched from a mailbox), and as the check of the passes.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from dl2gpu.analysis.signatures import compare_collectives, compare_messages
from dl2gpu.analysis.tables import (
    KIND,
    NCCL_LIKE,
    ROLE,
    Prepared,
    dtype_widths,
    is_collective,
    is_lossy,
    lost_start,
)
from dl2gpu.trace.schema import ANY, FLAG, OP

__all__ = ["attach", "lossy_ranks", "lost_comms", "no_nodes", "plan_collectives", "plan_messages"]


def _count_along(
    frame: pl.LazyFrame, name: str, counted: pl.Expr, group: list[str]
) -> pl.LazyFrame:
    """The rows sorted by group and ``i``, with how many counted ones of the group lie up to each.

    A sum along all rows, less what had been counted before the group began.
    """
    one = counted.cast(pl.Int64)
    return (
        frame.sort(*group, "i")
        .with_columns(so_far=one.cum_sum())
        .with_columns(before=pl.col("so_far") - one)
        .with_columns((pl.col("so_far") - pl.col("before").min().over(group)).alias(name))
        .drop("so_far", "before")
    )


# --------------------------------------------------------------------------------------------------
# Collectives

_NODE: Final = ["comm", "k", "copy"]
"""What names the operation that a collective event is part of."""


def plan_collectives(p: Prepared) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(events: i, node, role, alone, k) and the node table of all collectives.

    ``k`` is the source's ordinal where all events of the communicator carry one, else counted per
    communicator and rank. Where one is counted, an empty collective on NCCL takes no number (the
    library drops the call), and a communicator of which a member lost its start is not counted.
    Members of a batch may bear one number (coalesced collectives): the k-th then meets the k-th.
    """
    counted = ~pl.col("by_source") & ~pl.col("empty") & ~pl.col("lost")
    numbered = (
        p.events.lazy()
        .filter(is_collective(pl.col("op")))
        .select(
            "i", "r", "rank", "comm", "op", "root", "bytes", "count", "count_out", "dtype",
            "reduce_op", "new_comm", "split", "flags", "done", "ordinal",
        )
        .join(_about_comms(p).lazy(), on="comm", how="left")
        .with_columns(
            # an event without a communicator meets nobody
            pl.col("nccl", "any_sizes", "by_source", "lost").fill_null(False),
            pl.col("size").fill_null(1),
        )
        .with_columns(
            empty=pl.col("nccl")
            & ((pl.col("count") == 0) & (pl.col("count_out").fill_null(0) == 0)).fill_null(False),
            flags=pl.when(pl.col("any_sizes") & (pl.col("op") == OP["all_to_all"]))
            .then(pl.col("flags") | FLAG["sizes_incomparable"])
            .otherwise("flags"),
        )
    )  # fmt: skip
    numbered = (
        _count_along(numbered, "nth", counted, ["r", "comm"])
        .with_columns(k=pl.when("by_source").then("ordinal").when(counted).then("nth"))
        .with_columns(
            alone=(pl.col("size") == 1) | pl.col("empty") | (pl.col("k").fill_null(-1) < 0)
        )
    )
    coll = p.engine.collect(numbered)
    new = pl.col("r", "comm", "k")
    real = p.engine.collect(
        coll.lazy()
        .filter(~pl.col("alone"))
        .sort("r", "comm", "i")
        .with_row_index("at")
        .with_columns((new != new.shift(1)).fill_null(True).name.prefix("other_"))
        .with_columns(
            begin=pl.when(pl.col("other_r") | pl.col("other_comm") | pl.col("other_k")).then("at")
        )
        .with_columns(copy=pl.col("at") - pl.col("begin").fill_null(strategy="forward"))
        .drop("at", "begin", "other_r", "other_comm", "other_k")
    )
    nodes = compare_collectives(real, _NODE, p.engine)
    nodes = nodes.sort(_NODE).with_row_index("node").with_columns(pl.col("node").cast(pl.Int32))
    is_root = pl.col("op").is_between(OP["broadcast"], OP["gather_v"]) & (
        pl.coalesce("root", "top") == pl.col("rank")
    )
    member = pl.lit(ROLE["member"], pl.Int8)
    role = pl.when(is_root).then(pl.lit(ROLE["root"], pl.Int8)).otherwise(member)
    met = real.lazy().join(nodes.lazy().select(*_NODE, "node", top="root"), on=_NODE, how="left")
    lone = coll.lazy().filter(pl.col("alone")).with_columns(
        node=pl.lit(None, pl.Int32), top=pl.lit(None, pl.Int32)
    )  # fmt: skip
    wanted = ["i", "node", role.alias("role"), "alone", "k"]
    events = p.engine.collect(pl.concat([met.select(wanted), lone.select(wanted)]))
    return events, nodes.drop("copy", "root")


def _about_comms(p: Prepared) -> pl.DataFrame:
    """One row a communicator: what its collectives need to know about it.

    ``size``, ``nccl`` (drops empty calls), ``any_sizes`` (all_to_all may be uneven under that name:
    Flight Recorder does not tell), ``by_source`` (all its collectives are numbered), ``lost`` (a
    member lost its start).
    """
    used = p.engine.collect(
        p.events.lazy()
        .filter(is_collective(pl.col("op")))
        .group_by("comm")
        .agg(unnumbered=pl.col("ordinal").is_null().cast(pl.Int32).sum())
    )
    cut = lost_comms(p) if (used["unnumbered"] > 0).any() else pl.Series("comm", [], pl.Int32)
    return (
        p.comms.select("comm", "job", "size")
        .join(p.jobs.select("job", "semantics", "source"), on="job", how="left")
        .join(used, on="comm", how="left")
        .select(
            "comm", "size",
            nccl=(pl.col("semantics") == NCCL_LIKE).fill_null(True),
            any_sizes=(pl.col("source") == "flight_recorder").fill_null(False),
            by_source=pl.col("unnumbered").fill_null(0) == 0,
            lost=pl.col("comm").is_in(cut.to_list()),
        )
    )  # fmt: skip


def lossy_ranks(p: Prepared) -> pl.DataFrame:
    """(job, rank) of ranks that lost their start, or list active operations only."""
    return p.ranks.filter(is_lossy()).select("job", "rank")


def lost_comms(p: Prepared) -> pl.Series:
    """Communicators of which a member lost its start: their operations cannot be counted."""
    cut = p.ranks.lazy().filter(lost_start()).select("job", "rank")
    members = (
        p.comms.lazy().select("job", "comm", rank="ranks").explode("rank", empty_as_null=False)
    )
    users = p.events.lazy().filter(pl.col("comm").is_not_null()).select("job", "comm", "rank")
    found = pl.concat([members, users]).join(cut, on=["job", "rank"], how="semi")
    return p.engine.collect(found.select("comm").unique())["comm"]


# --------------------------------------------------------------------------------------------------
# Point to point


def _message_parts(p: Prepared) -> pl.LazyFrame:
    """One row a part: sends, receives, both halves of a sendrecv, probes."""
    p2p = (
        p.events.lazy()
        .filter(pl.col("op").is_between(OP["send"], OP["probe"]))
        .join(p.jobs.lazy().select("job", "semantics"), on="job", how="left")
        .with_columns(pl.col("comm").fill_null(-1))
    )
    op = pl.col("op")
    common = [
        "i",
        "r",
        "job",
        "comm",
        "done",
        "semantics",
        "bytes",
        "count",
        "dtype",
        "send_mode",
    ]
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
    second = (
        p2p.filter(op == OP["sendrecv"])
        .join(dtype_widths().lazy(), on="dtype", how="left")
        .with_columns(
            told=pl.when((pl.col("count") > 0) & (pl.col("bytes") % pl.col("count") == 0)).then(
                pl.col("bytes") // pl.col("count")
            )
        )
        .with_columns(
            bytes=pl.when(pl.col("count_out").is_null())
            .then("bytes")
            .otherwise(pl.col("count_out") * pl.coalesce("width", "told")),
            count=pl.coalesce("count_out", "count"),
        )
    ).select(
        *common,
        src=pl.coalesce("recv_peer", "peer"),
        dst=here,
        tag=pl.coalesce("recv_tag", "tag"),
        role=pl.lit(ROLE["recv"], pl.Int8),
        half=pl.lit(1, pl.Int8),
    )
    probes = p2p.filter(op == OP["probe"]).select(
        *common, src=matched, dst=here, tag=matched_tag, role=pl.lit(ROLE["probe"], pl.Int8)
    )
    ones = pl.concat([sends, recvs, probes]).with_columns(half=pl.lit(0, pl.Int8))
    return pl.concat([ones, second]).with_columns(
        # NCCL ignores tags: order alone matches (rule 5)
        tag_recorded=pl.when(pl.col("tag") != ANY).then("tag"),
        tag=pl.when(pl.col("semantics") == NCCL_LIKE)
        .then(pl.lit(0, pl.Int64))
        .otherwise(pl.col("tag").fill_null(0)),
    )


_CHANNEL: Final = ["job", "comm", "src", "dst", "tag"]


def plan_messages(p: Prepared, first: int) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """(parts: i, node, role, alone, k), the node table of messages, and mailboxes (i, box)."""
    collect = p.engine.collect
    parts = collect(_message_parts(p))
    no_boxes = pl.DataFrame(schema={"i": pl.UInt32, "box": pl.Int32})
    if parts.is_empty():
        part_schema = {
            "i": pl.UInt32,
            "node": pl.Int32,
            "role": pl.Int8,
            "alone": pl.Boolean,
            "k": pl.Int64,
        }
        return pl.DataFrame(schema=part_schema), no_nodes(), no_boxes
    # a peer that the source does not know: nothing can be claimed about the message
    known = pl.col("src").is_not_null() & pl.col("dst").is_not_null()
    unknown = parts.lazy().filter(~known)
    # channels are numbered in order of first sight, like those of the passes
    open_parts = (
        parts.lazy()
        .filter(known)
        .with_columns(seen=2 * pl.col("i").cast(pl.Int64) + pl.col("half"))
        .with_columns(pl.col("seen").min().over(_CHANNEL))
    )
    wild = collect(
        open_parts.filter((pl.col("src") == ANY) | (pl.col("tag") == ANY))
        .select("job", "comm", "dst")
        .unique()
    )
    boxes = no_boxes
    if wild.height:
        # one mailbox a communicator: a sendrecv may send to one rank's mail and take from another's
        number = wild.select("job", "comm").unique().sort("job", "comm").with_row_index("box")
        wild = wild.join(number, on=["job", "comm"])
        boxed = open_parts.join(wild.lazy(), on=["job", "comm", "dst"], how="inner")
        boxes = collect(boxed.select("i", pl.col("box").cast(pl.Int32)).unique())
        open_parts = open_parts.join(wild.lazy(), on=["job", "comm", "dst"], how="anti")

    # Where either side lost its start, or lists active operations only, the k-th operations do not
    # belong together: what is still open is aligned from the first open one on both sides.
    lossy = lossy_ranks(p).with_columns(cut=pl.lit(value=True)).lazy()
    open_parts = (
        open_parts.join(lossy.rename({"rank": "src"}), on=["job", "src"], how="left")
        .join(lossy.rename({"rank": "dst", "cut": "cut_dst"}), on=["job", "dst"], how="left")
        .with_columns(cut=pl.coalesce("cut", "cut_dst").fill_null(False))
    )
    over = pl.col("cut") & pl.col("done")
    gone = open_parts.filter(over)
    is_probe = pl.col("role") == ROLE["probe"]
    side = [*_CHANNEL, "side"]
    sided = open_parts.filter(~over).with_columns(
        side=(pl.col("role") != ROLE["send"]).cast(pl.Int8)
    )
    placed = collect(
        _count_along(sided, "k", ~is_probe, side)
        # a probe looks at the message that the next receive of its channel would take
        .with_columns(k=pl.col("k") + is_probe.cast(pl.Int64))
    )
    # numbered here: no engine is asked to keep the order of a sort in its middle
    nodes = (
        collect(placed.lazy().select(*_CHANNEL, "k", "seen", "cut").unique())
        .sort("seen", "k")
        .with_row_index("node", offset=first)
        .with_columns(pl.col("node").cast(pl.Int32))
    )
    placed = collect(
        placed.lazy().join(
            nodes.lazy().select(*_CHANNEL, "k", "node"), on=[*_CHANNEL, "k"], how="left"
        )
    )
    facts = compare_messages(placed, p.engine)
    nodes = nodes.join(facts, on="node", how="left").with_columns(
        pl.col("present", "finished").fill_null(0),
        pl.col("has_send", "has_recv", "blocks", "differs").fill_null(False),
    ).select(
        "node", "job", "comm", "k", "src", "dst",
        "present", "differs", "blocks", "finished", "has_send", "has_recv", "cut",
        kind=pl.lit(KIND["message"], pl.Int8),
        members=pl.lit(2, pl.Int32),
        passed=pl.lit(0, pl.Int32),
        need=pl.when(pl.col("present") >= 2).then(2).otherwise(-1).cast(pl.Int32),
    ).sort("node")  # fmt: skip
    keep = ["i", "node", "role", "alone", "k"]
    lone = [
        frame.select(
            "i", "role", node=pl.lit(None, pl.Int32), alone=pl.lit(True), k=pl.lit(None, pl.Int64)
        ).select(keep)
        for frame in (gone, unknown)
    ]
    there = placed.lazy().with_columns(alone=pl.lit(False)).select(keep)
    return collect(pl.concat([there, *lone])), nodes, boxes


def no_nodes() -> pl.DataFrame:
    """The node table of messages, empty."""
    return pl.DataFrame(
        schema={
            "node": pl.Int32, "kind": pl.Int8, "job": pl.Int32, "comm": pl.Int32, "k": pl.Int64,
            "src": pl.Int32, "dst": pl.Int32, "present": pl.Int32, "differs": pl.Boolean,
            "blocks": pl.Boolean, "finished": pl.Int32, "has_send": pl.Boolean,
            "has_recv": pl.Boolean, "cut": pl.Boolean, "members": pl.Int32, "passed": pl.Int32,
            "need": pl.Int32,
        }
    )  # fmt: skip


def attach(
    p: Prepared, collectives: pl.DataFrame, parts: pl.DataFrame, boxes: pl.DataFrame
) -> pl.DataFrame:
    """The events with their node. Every column is aligned to ``i``."""
    second = pl.DataFrame(schema={"i": pl.UInt32, "node2": pl.Int32}).lazy()
    ones = parts.lazy()
    exchanges = p.events.filter(pl.col("op") == OP["sendrecv"]).select("i").lazy()
    if p.engine.collect(exchanges).height:
        halves = p.engine.collect(ones.join(exchanges, on="i", how="semi")).lazy()
        sent = halves.filter(pl.col("role") == ROLE["send"])
        taken = halves.filter(pl.col("role") == ROLE["recv"])
        # one of which nothing is known but its receive is that receive
        only = taken.filter(pl.col("node").is_not_null()).join(
            sent.filter("alone"), on="i", how="semi"
        )
        others = ones.join(taken, on=["i", "role"], how="anti").join(only, on="i", how="anti")
        ones = pl.concat([others, only])
        second = taken.select("i", node2="node").join(only, on="i", how="anti")
    placed = pl.concat([collectives.lazy().select("i", "node", "role", "alone", "k"), ones])
    columns = p.engine.collect(
        p.events.lazy()
        .select("i")
        .join(placed, on="i", how="left")
        .join(second, on="i", how="left")
        .join(boxes.lazy(), on="i", how="left")
        .select(
            "i",
            pl.col("node").fill_null(-1),
            pl.col("role").fill_null(ROLE["none"]),
            pl.col("alone").fill_null(False),
            "k",
            pl.col("node2").fill_null(-1),
            pl.col("box").fill_null(-1),
        )
        .sort("i")
    )
    return p.events.hstack(columns.drop("i"))
