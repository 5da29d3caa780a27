"""Signatures: do the participants agree on what they do (kind ``mismatch``)?

Operation, root, size and the communicator to be made block when they differ; data type and reduce
operation with equal bytes are wrong but stop nobody. A value that one side does not know agrees
with everything.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from dl2gpu.analysis.tables import NCCL_LIKE
from dl2gpu.trace.schema import FLAG, OP

__all__ = ["BLOCKING", "compare_collectives", "compare_messages"]

SIZED: Final = [
    OP[name]
    for name in (
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
        "scan", "exscan",
    )
]  # fmt: skip
"""Operations in which every member passes in the same number of elements."""

BLOCKING: Final = ("op", "root", "bytes", "count", "new_comm")
"""Aspects whose difference keeps the operation from completing."""


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


def compare_collectives(coll: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """One row a node: parts present and complete, and what differs.

    ``coll`` holds the collective events; those of one node agree in the ``key`` columns. First one
    hash a member is compared over the whole node; only nodes whose hashes differ are looked at
    aspect by aspect.
    """
    lazy = comparable(coll.lazy())
    mixed = pl.struct([pl.col(c) for c in _ASPECTS.values()]).hash(seed=1)
    op = pl.col("op")
    kind = (
        pl.when(op.is_between(OP["broadcast"], OP["scatter_v"]) & pl.col("root").is_not_null())
        .then(1)
        .when(op.is_between(OP["reduce"], OP["gather_v"]) & pl.col("root").is_not_null())
        .then(2)
        .otherwise(0)
        .cast(pl.Int8)
    )
    nodes = (
        lazy.with_columns(kind=kind, mixed=mixed)
        .group_by(key)
        .agg(
            *(pl.col(c).min() for c in ("comm", "k") if c not in key),
            kind=pl.col("kind").max(),
            root=pl.col("c_root").max(),
            present=pl.len().cast(pl.Int32),
            finished=pl.col("done").sum().cast(pl.Int32),
            low=pl.col("mixed").min(),
            high=pl.col("mixed").max(),
        )
        .collect()
    )
    suspects = nodes.filter(pl.col("low") != pl.col("high")).select(key)
    if suspects.is_empty():
        return nodes.drop("low", "high").with_columns(blocks=pl.lit(False), differs=pl.lit(False))
    aspects = (
        lazy.join(suspects.lazy(), on=key, how="semi")
        .group_by(key)
        .agg(
            *(
                (pl.col(column).min() != pl.col(column).max()).fill_null(False).alias(name)
                for name, column in _ASPECTS.items()
            ),
            # where all know their bytes, the element count says nothing more about blocking
            unsized=(pl.col("c_bytes").is_null() & pl.col("fair")).any(),
        )
        .collect()
    )
    blocks = (
        pl.col("op") | pl.col("root") | pl.col("bytes") | pl.col("new_comm")
        | (pl.col("count") & pl.col("unsized"))
    )  # fmt: skip
    soft = pl.col("dtype") | pl.col("reduce_op") | pl.col("count")
    judged = aspects.select(*key, blocks=blocks, differs=blocks | soft)
    return (
        nodes.drop("low", "high")
        .join(judged, on=key, how="left")
        .with_columns(pl.col("blocks", "differs").fill_null(False))
    )


def compare_messages(parts: pl.DataFrame) -> pl.DataFrame:
    """One row a message node: the halves present and complete, and whether they fit.

    On NCCL both sides must name the same size. MPI and gloo let a receive be larger than what is
    sent, not smaller. Tags that differ on a backend that ignores them mean that another message was
    meant: a mismatch that stops nobody.
    """
    send = pl.col("role") == 3
    recv = pl.col("role") == 4
    facts = (
        parts.lazy()
        .filter(send | recv)
        .group_by("node")
        .agg(
            present=pl.len().cast(pl.Int32),
            finished=pl.col("done").sum().cast(pl.Int32),
            semantics=pl.col("semantics").max(),
            cut=pl.col("cut").any(),
            has_send=send.any(),
            has_recv=recv.any(),
            sent=pl.when(send).then("bytes").otherwise(None).max(),
            taken=pl.when(recv).then("bytes").otherwise(None).max(),
            n_sent=pl.when(send).then("count").otherwise(None).max(),
            n_taken=pl.when(recv).then("count").otherwise(None).max(),
            dtypes=(pl.col("dtype").min() != pl.col("dtype").max()).fill_null(False),
            tags=(pl.col("tag_recorded").min() != pl.col("tag_recorded").max()).fill_null(False),
        )
    )
    known = pl.col("sent").is_not_null() & pl.col("taken").is_not_null()
    left = pl.when(known).then("sent").otherwise("n_sent")
    right = pl.when(known).then("taken").otherwise("n_taken")
    unequal = (left != right).fill_null(False)
    too_large = (left > right).fill_null(False)
    # where a window is lost the two sides may be of different messages: no size is compared
    fair = ~pl.col("cut")
    blocks = fair & pl.when(pl.col("semantics") == NCCL_LIKE).then(unequal).otherwise(too_large)
    return facts.with_columns(blocks=blocks).select(
        "node", "present", "finished", "has_send", "has_recv", "cut", "blocks",
        differs=pl.col("blocks")
        | (fair & (pl.col("dtypes") | (pl.col("tags") & (pl.col("semantics") == NCCL_LIKE)))),
    ).collect()  # fmt: skip
