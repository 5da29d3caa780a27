"""Signatures: do the participants agree on what they do (kind ``mismatch``)?

Operation, root, size and the communicator to be made block when they differ; data type and reduce
operation with equal bytes are wrong but stop nobody. A value that one side does not know agrees
with everything.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from dl2gpu.analysis.tables import NCCL_LIKE, ROLE
from dl2gpu.engine.base import Engine
from dl2gpu.trace.schema import FLAG, OP

__all__ = ["compare_collectives", "compare_messages"]

SIZED: Final = [
    OP[name]
    for name in (
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
        "scan", "exscan",
    )
]  # fmt: skip
"""Operations in which every member passes in the same number of elements."""


def sized(op: pl.Expr) -> pl.Expr:
    return op.is_in(SIZED)


def comparable(frame: pl.LazyFrame) -> pl.LazyFrame:
    """The signature columns of collective events, null where a value must not be compared."""
    op = pl.col("op")
    fair = (
        sized(op)
        & ((pl.col("flags") & FLAG["sizes_incomparable"]) == 0)
        & ~((op == OP["gather"]) & (pl.col("count") == 0)).fill_null(False)
    )
    return frame.with_columns(
        c_op=op,
        c_root=pl.when(op.is_between(OP["broadcast"], OP["gather_v"])).then("root"),
        c_bytes=pl.when(fair).then("bytes"),
        c_count=pl.when(fair).then("count"),
        c_dtype="dtype",
        c_reduce="reduce_op",
        fair=fair,
        c_new=pl.when(~pl.col("split").fill_null(False)).then("new_comm"),
    )


_ASPECTS: Final = {
    "op": "c_op", "root": "c_root", "bytes": "c_bytes", "count": "c_count", "dtype": "c_dtype",
    "reduce_op": "c_reduce", "new_comm": "c_new",
}  # fmt: skip


def compare_collectives(coll: pl.DataFrame, key: list[str], engine: Engine) -> pl.DataFrame:
    """One row a node: parts present and complete, and what differs.

    ``coll`` holds the collective events; those of one node agree in the ``key`` columns.
    """
    op = pl.col("op")
    kind = (
        pl.when(op.is_between(OP["broadcast"], OP["scatter_v"]) & pl.col("root").is_not_null())
        .then(pl.lit(1, pl.Int8))
        .when(op.is_between(OP["reduce"], OP["gather_v"]) & pl.col("root").is_not_null())
        .then(pl.lit(2, pl.Int8))
        .otherwise(pl.lit(0, pl.Int8))
    )
    nodes = (
        comparable(coll.lazy())
        .with_columns(
            kind=kind,
            done=pl.col("done").cast(pl.Int32),
            # where all know their bytes, the element count says nothing more about blocking
            unsized=(pl.col("c_bytes").is_null() & pl.col("fair")).cast(pl.Int8),
        )
        .group_by(key)
        .agg(
            pl.len().cast(pl.Int32).alias("present"),
            pl.col("done").sum().alias("finished"),
            pl.col("kind").max(),
            pl.col("c_root").max().alias("root"),
            pl.col("unsized").max(),
            *(pl.col(column).min().alias(f"low_{name}") for name, column in _ASPECTS.items()),
            *(pl.col(column).max().alias(f"high_{name}") for name, column in _ASPECTS.items()),
        )
    )
    differs = {
        name: (pl.col(f"low_{name}") != pl.col(f"high_{name}")).fill_null(False)
        for name in _ASPECTS
    }
    count = differs["count"]
    blocks = (
        differs["op"] | differs["root"] | differs["bytes"] | differs["new_comm"]
        | (count & (pl.col("unsized") > 0))
    )  # fmt: skip
    soft = differs["dtype"] | differs["reduce_op"] | count
    return engine.collect(
        nodes.select(
            *key, "present", "finished", "kind", "root", blocks=blocks, differs=blocks | soft
        )
    )


def compare_messages(parts: pl.DataFrame, engine: Engine) -> pl.DataFrame:
    """One row a message node: the halves present and complete, and whether they fit.

    On NCCL both sides must name the same size. MPI and gloo let a receive be larger than what is
    sent, not smaller. Tags that differ on a backend that ignores them mean that another message was
    meant: a mismatch that stops nobody.
    """
    send = pl.col("role") == ROLE["send"]
    recv = pl.col("role") == ROLE["recv"]
    facts = (
        parts.lazy()
        .filter(send | recv)
        .select(
            "node", "semantics", "dtype", "tag_recorded",
            done=pl.col("done").cast(pl.Int32),
            cut=pl.col("cut").cast(pl.Int8),
            send=send.cast(pl.Int8),
            recv=recv.cast(pl.Int8),
            sent=pl.when(send).then("bytes"),
            taken=pl.when(recv).then("bytes"),
            n_sent=pl.when(send).then("count"),
            n_taken=pl.when(recv).then("count"),
        )
        .group_by("node")
        .agg(
            pl.len().cast(pl.Int32).alias("present"),
            pl.col("done").sum().alias("finished"),
            pl.col("semantics", "cut", "send", "recv", "sent", "taken", "n_sent", "n_taken").max(),
            pl.col("dtype", "tag_recorded").min().name.prefix("low_"),
            pl.col("dtype", "tag_recorded").max().name.prefix("high_"),
        )
    )  # fmt: skip
    dtypes, tags = (
        (pl.col(f"low_{name}") != pl.col(f"high_{name}")).fill_null(False)
        for name in ("dtype", "tag_recorded")
    )
    known = pl.col("sent").is_not_null() & pl.col("taken").is_not_null()
    left = pl.when(known).then("sent").otherwise("n_sent")
    right = pl.when(known).then("taken").otherwise("n_taken")
    # where a window is lost the two sides may be of different messages: no size is compared
    fair = pl.col("cut") == 0
    strict = pl.col("semantics") == NCCL_LIKE
    unfit = (strict & (left != right)) | (~strict & (left > right))
    blocks = fair & unfit.fill_null(False)
    return engine.collect(
        facts.select(
            "node",
            "present",
            "finished",
            has_send=pl.col("send") > 0,
            has_recv=pl.col("recv") > 0,
            blocks=blocks,
            differs=blocks | (fair & (dtypes | (tags & strict))),
        )
    )
