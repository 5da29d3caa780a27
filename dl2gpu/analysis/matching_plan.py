"""Matching as lazy plans: the same nodes as ``matching_kernel``, as joins and group-bys.

Nothing here relies on the order of rows: where an order is needed it is the program position ``i``.
On the CPU the passes along the rows are faster, and this form serves wildcards (whose messages are
matched from a mailbox) and as their check; it is the form that an engine for another device runs.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from dl2gpu.analysis.replay_kernel import count_along, repeats_along
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

# --------------------------------------------------------------------------------------------------
# Collectives


def plan_collectives(p: Prepared) -> tuple[pl.DataFrame, pl.DataFrame]:
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
    known = coll.lazy().join(about.lazy(), on="comm", how="left", maintain_order="left")
    coll = known.with_columns(
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
    coll = coll.with_columns(alone=(pl.col("size") == 1) | pl.col("empty") | pl.col("k").is_null())
    real = np.flatnonzero(~coll["alone"].to_numpy())
    repeated = np.zeros(coll.height, np.int64)
    rank, comm, k = (coll[c].gather(real).to_numpy() for c in ("r", "comm", "k"))
    repeated[real] = repeats_along(rank, comm, k, p.comms.height)
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
    nodes = nodes.sort("comm", "k", *names).with_row_index("node")
    events = (
        coll.lazy()
        .join(
            nodes.lazy().select(*names, "node", top="root"),
            on=names,
            how="left",
            maintain_order="left",
        )
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
    cut = lost_comms(p) if (used["unnumbered"] > 0).any() else pl.Series("comm", [], pl.Int32)
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
    return found.select(pl.col("comm").unique()).collect()["comm"]


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
    )
    probes = p2p.filter(op == OP["probe"]).select(
        *common, src=matched, dst=here, tag=matched_tag, role=pl.lit(ROLE["probe"], pl.Int8)
    )
    return pl.concat([sends, recvs, second, probes]).with_columns(
        # NCCL ignores tags: order alone matches (rule 5)
        tag_recorded=pl.when(pl.col("tag") != ANY).then("tag"),
        tag=pl.when(pl.col("semantics") == NCCL_LIKE).then(0).otherwise(pl.col("tag").fill_null(0)),
    )


_CHANNEL: Final = ["job", "comm", "src", "dst", "tag"]


def plan_messages(p: Prepared, first: int) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """(parts: i, node, role, alone, k), the node table of messages, and mailboxes (i, box)."""
    parts = _message_parts(p).collect()
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
    unknown = parts.filter(pl.col("src").is_null() | pl.col("dst").is_null())
    parts = parts.filter(pl.col("src").is_not_null() & pl.col("dst").is_not_null())
    wild = (
        parts.filter((pl.col("src") == ANY) | (pl.col("tag") == ANY))
        .select("job", "comm", "dst")
        .unique()
    )
    if wild.height:
        # one mailbox a communicator: a sendrecv may send to one rank's mail and take from another's
        wild = wild.with_columns(box=pl.struct("job", "comm").rank("dense") - 1)
        boxed = parts.join(wild, on=["job", "comm", "dst"], how="inner")
        boxes = boxed.select("i", pl.col("box").cast(pl.Int32)).unique()
        parts = parts.join(wild, on=["job", "comm", "dst"], how="anti")
    else:
        boxes = no_boxes

    # Where either side lost its start, or lists active operations only, the k-th operations do not
    # belong together: what is still open is aligned from the first open one on both sides.
    lossy = lossy_ranks(p).with_columns(cut=pl.lit(value=True))
    parts = (
        parts.join(lossy.rename({"rank": "src"}), on=["job", "src"], how="left")
        .join(lossy.rename({"rank": "dst"}), on=["job", "dst"], how="left")
        .with_columns(cut=pl.coalesce("cut", "cut_right").fill_null(False))
    )
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
    events: pl.DataFrame, collectives: pl.DataFrame, parts: pl.DataFrame, boxes: pl.DataFrame
) -> pl.DataFrame:
    """The events with their node. Every column is aligned to ``i``."""
    sendrecv = events.filter(pl.col("op") == OP["sendrecv"]).select("i")
    if sendrecv.height:
        halves = parts.join(sendrecv, on="i", how="semi")
        sent = halves.filter(pl.col("role") == ROLE["send"])
        taken = halves.filter(pl.col("role") == ROLE["recv"])
        second = taken.select("i", node2="node")
        # one of which nothing is known but its receive is that receive
        only = taken.filter(pl.col("node").is_not_null()).join(
            sent.filter("alone"), on="i", how="semi"
        )
        parts = parts.join(taken, on=["i", "role"], how="anti").join(only, on="i", how="anti")
        parts = pl.concat([parts, only])
        second = second.join(only, on="i", how="anti")
    else:
        second = pl.DataFrame(schema={"i": pl.UInt32, "node2": pl.Int32})
    placed = pl.concat([collectives.select("i", "node", "role", "alone", "k"), parts])
    out = events.lazy()
    if placed.height == events.height:
        # nothing but communication: a sort by i is the join
        placed = placed.sort("i")
        out = events.hstack(placed.drop("i")).lazy()
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
