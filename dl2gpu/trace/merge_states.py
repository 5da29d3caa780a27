"""States of Flight Recorder put beside the operations of a record that has none.

A record of the whole program (the recorder's, a native file) knows order, waits and streams; a dump
of the same ranks knows how far the devices came. The k-th collective of a rank on a communicator is
the k-th one of the other record, and so is the k-th message to the same peer. Only facts are taken
over, never an order; and only where every rank has a dump and all that it says fits the record,
operation by operation: a dump of another run must not speak here.

Source: FORMATS.md section 2.7 (counters, states, the ring), DESIGN.md section 4 (rule 7).
"""

from __future__ import annotations

from typing import Final

import polars as pl

from dl2gpu.trace.schema import FLAG, OP, STATE

__all__ = ["same_use", "with_states"]

_BASE: Final = {OP[n]: OP[n.removesuffix("_v")] for n in OP if n.endswith("_v")}
"""Of calls with sizes of their own, the name that dumps have for them."""
_MESSAGES: Final = [OP["send"], OP["recv"]]
_UNLISTED: Final = [OP["comm_create"], OP["finalize"]]
"""Calls of all members that no dump lists."""
_KEY: Final = ["job", "rank", "comm", "what", "other"]
_EARLY_NS: Final = 1_000_000_000
"""A dump's entry is made after the line of the record. By so much clocks may be put back."""
_NEARER: Final = 4
"""Of two communicators used alike, the times of the right one are so many times nearer."""
_LONG_NS: Final = 600_000_000_000
"""So long may the first operation of a communicator take until it is entered."""


def with_states(
    record: pl.DataFrame, dumps: pl.DataFrame, ranks: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The events of a record with the states, starts and ends that dumps have of them.

    Args:
        record: events of ranks that stand in a record of whole programs.
        dumps: events of the same jobs from Flight Recorder, with the same numbers of jobs and
            communicators.
        ranks: rows of the ranks table of the dumps.

    Returns:
        ``record``, in its order, and ``job, why`` of the jobs in which nothing was taken over
        (for people).
    """
    lossy = ranks.filter(pl.col("lost_before") > 0).select("job", "rank").unique()
    about = ranks.select("job").unique()
    mine = _keyed(record.with_row_index("row").join(about, on="job", how="semi"))
    theirs = _keyed(dumps.filter((pl.col("flags") & FLAG["state_unreliable"]) == 0))
    pairs = _paired(mine, theirs, lossy)
    refused = _refused(mine, ranks, theirs, pairs)
    good = pairs.filter(pl.col("row").is_not_null()).join(refused, on="job", how="anti")
    lost = (
        _lost(mine, pairs, lossy)
        .join(refused, on="job", how="anti")
        .join(good, on="row", how="anti")
        .select("row", known=pl.lit(STATE["completed"], pl.UInt8))
    )
    facts = pl.concat(
        [
            good.select("row", known="state", begun="t_started", ended="t_completed"),
            lost.with_columns(
                begun=pl.lit(None, pl.Int64), ended=pl.lit(None, pl.Int64)
            ),
        ]
    )  # fmt: skip
    silent = pl.col("state").fill_null(0) == STATE["unknown"]
    told = (
        record.with_row_index("row")
        .join(facts, on="row", how="left", maintain_order="left")
        .with_columns(
            state=pl.when(silent).then(pl.coalesce("known", "state")).otherwise("state"),
            t_started=pl.coalesce("t_started", "begun"),
            t_completed=pl.coalesce("t_completed", "ended"),
        )
    )
    return told.select(record.columns), refused


def same_use(record: pl.DataFrame, dumps: pl.DataFrame, pairs: pl.DataFrame) -> pl.DataFrame:
    """Which of several communicators with the same members is which: that all operations fit.

    Args:
        record, dumps: events, of jobs with numbers of their own.
        pairs: ``comm`` of a dump, ``into`` of the record: those that may be one.

    Returns:
        ``comm, into``: pairs in which all operations of the dump are those of the record, and of
        both communicators in no other pair, or in none that comes near in time.
    """
    keys = ["rank", "what", "other", "n"]
    mine = _keyed(record.join(pairs, left_on="comm", right_on="into", how="semi"))
    theirs = _keyed(dumps.join(pairs, on="comm", how="semi"))
    if mine.is_empty() or theirs.is_empty():
        return pairs.clear()
    there = mine.select(
        *keys, into="comm", my_base="base", my_count="count", my_time="t_created"
    )  # fmt: skip
    fits = (pl.col("base") == pl.col("my_base")) & (
        pl.col("count") == pl.col("my_count")
    ).fill_null(value=True)
    both = ["comm", "into"]
    looked = (
        theirs.join(pairs, on="comm")
        .join(there, on=[*keys, "into"], how="left")
        .group_by(both)
        .agg(
            fits=fits.fill_null(value=False).all(),
            apart=(pl.col("t_created") - pl.col("my_time")).abs().mean().fill_null(0),
        )
        .filter("fits")
    )
    # as near in time as none of the others
    near = [
        pl.col("apart") * _NEARER <= pl.col("apart").sort().get(1, null_on_oob=True).over(c)
        for c in both
    ]
    alone = [pl.len().over(c) == 1 for c in both]
    clear = (alone[0] | near[0]) & (alone[1] | near[1])
    best = pl.col("apart") == pl.col("apart").min().over("comm")
    return looked.filter(clear & best).select(both).unique(maintain_order=True)


def _keyed(events: pl.DataFrame) -> pl.DataFrame:
    """Operations that both kinds of record list, with ``what, other, n``: the n-th of its key."""
    op = pl.col("op")
    collective = op >= OP["all_reduce"]
    listed = (collective & ~op.is_in(_UNLISTED)) | op.is_in(_MESSAGES)
    return (
        events.filter(listed & pl.col("comm").is_not_null())
        .with_columns(
            base=op.replace(_BASE),
            what=pl.when(collective).then(-1).otherwise(op),
            other=pl.when(collective).then(-1).otherwise(pl.col("peer").fill_null(-1)),
        )
        .with_columns(n=pl.int_range(pl.len()).over(_KEY, order_by="seq"))
    )


def _paired(mine: pl.DataFrame, theirs: pl.DataFrame, lossy: pl.DataFrame) -> pl.DataFrame:
    """``theirs`` with ``at``, their place among mine of the key, and what stands there.

    The first one of a whole dump is the first one of the record; where the record has fewer, it
    began later, and the last ones are the same. Of a dump that lost its first entries, the number
    of a collective tells its place, and the time of a message.
    """
    many = mine.group_by(_KEY).agg(many=pl.len().cast(pl.Int64))
    first = theirs.group_by(_KEY).agg(
        size=pl.len().cast(pl.Int64),
        number=pl.col("ordinal").min(),
        when=pl.col("t_created").min(),
    )
    before = (
        mine.join(first.select(*_KEY, "when"), on=_KEY)
        .filter(pl.col("t_created") <= pl.col("when"))
        .group_by(_KEY)
        .agg(before=pl.len().cast(pl.Int64))
    )
    marked = lossy.with_columns(lossy=pl.lit(value=True))
    begin = (
        first.join(marked, on=["job", "rank"], how="left")
        .join(many, on=_KEY, how="left")
        .join(before, on=_KEY, how="left")
        .with_columns(
            begin=pl.when(pl.col("lossy").is_null())
            .then((pl.col("many") - pl.col("size")).clip(upper_bound=0))
            .when(pl.col("what") < 0)
            .then(pl.col("number") - 1)
            .otherwise(pl.col("before") - 1)
        )
    )
    there = mine.select(
        *_KEY, "row", at=pl.col("n"),
        my_base="base", my_count="count", my_flags="flags", my_time="t_created",
    )  # fmt: skip
    return (
        theirs.join(begin.select(*_KEY, "begin"), on=_KEY)
        .with_columns(at=pl.col("n") + pl.col("begin"))
        .join(there, on=[*_KEY, "at"], how="left")
    )


def _refused(
    mine: pl.DataFrame, ranks: pl.DataFrame, theirs: pl.DataFrame, pairs: pl.DataFrame
) -> pl.DataFrame:
    """``job, why``: jobs whose dumps do not say what the record says, or not of every rank."""
    incomparable = FLAG["sizes_incomparable"]
    sized = (
        ((pl.col("flags") & incomparable) == 0)
        & ((pl.col("my_flags").fill_null(0) & incomparable) == 0)
        & (pl.col("base") != OP["barrier"])
    )
    later = pl.col("t_created") - pl.col("my_time")
    found = pl.col("row").is_not_null()
    before = pl.col("at") < 0  # the record began later
    looked = pairs.with_columns(
        strange=(~found & ~before.fill_null(value=False)),
        other_call=found & (pl.col("base") != pl.col("my_base")),
        other_size=(found & sized & (pl.col("count") != pl.col("my_count"))).fill_null(value=False),
        early=(found & (later < -_EARLY_NS)).fill_null(value=False),
    )
    by_job = looked.group_by("job").agg(
        pl.col("strange", "other_call", "other_size", "early").any(),
        late=(later.min() > _LONG_NS).fill_null(value=False),
    )
    key = ["job", "rank"]
    tells = theirs.select(key).unique()
    dumped = ranks.select(*key, "only_active").join(mine.select(key).unique(), on=key, how="semi")
    weak = dumped.join(tells, on=key, how="anti").select("job", weak=pl.lit(value=True))
    holes = dumped.filter("only_active").select("job", holes=pl.lit(value=True))
    without = mine.join(pairs.filter(found), on=key, how="anti")
    without = without.select("job", without=pl.lit(value=True))
    because = (
        pl.when("holes").then(pl.lit("it lists active operations only"))
        .when("weak").then(pl.lit("nothing is ever complete in it, as with gloo"))
        .when("strange").then(pl.lit(
            "it has operations that the record lacks, or groups that cannot be told apart"
        ))
        .when("other_call").then(pl.lit("it has other operations than the record"))
        .when("other_size").then(pl.lit("its operations have other sizes than the record's"))
        .when(pl.col("early") | pl.col("late"))
        .then(pl.lit("it was made at another time than the record"))
        .when("without").then(pl.lit("there is no dump of some ranks of the record"))
    )  # fmt: skip
    return (
        ranks.select("job").unique()
        .join(by_job, on="job", how="left")
        .join(weak.unique(), on="job", how="left")
        .join(holes.unique(), on="job", how="left")
        .join(without.unique(), on="job", how="left")
        .with_columns(pl.selectors.boolean().fill_null(value=False))
        .select("job", why=because)
        .drop_nulls("why")
    )  # fmt: skip


def _lost(mine: pl.DataFrame, pairs: pl.DataFrame, lossy: pl.DataFrame) -> pl.DataFrame:
    """Operations that a ring has given up for later ones: what it drops is the oldest, and done."""
    first = pairs.group_by(_KEY).agg(first=pl.col("at").min())
    began = pairs.group_by("job", "rank").agg(began=pl.col("t_created").min())
    return (
        mine.join(lossy, on=["job", "rank"], how="semi")
        .join(first, on=_KEY, how="left")
        .join(began, on=["job", "rank"], how="left")
        .filter(
            pl.when(pl.col("first").is_not_null())
            .then(pl.col("n") < pl.col("first"))
            .otherwise(pl.col("t_created") < pl.col("began"))
            .fill_null(value=False)
        )
    )
