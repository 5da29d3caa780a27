"""What waits for any or some of several requests return, and what is left for later ones.

MPI gives each request back once: a wait for any that is called again and again over the same
requests is through for the k-th time when k of them are complete, and what a wait for all has given
back, nobody waits for any more. Where the record says what a wait returned, it waits for that.
Where it does not, a wait needs one request more than the earlier ones must have taken of its own;
of requests that some of them may have taken, it is left open which (:mod:`explore_returns`).

Source: MPI 4.1, sections 3.7.3 and 3.7.5 (completion of nonblocking operations).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import polars as pl

from dl2gpu.analysis.matching import Matching
from dl2gpu.analysis.tables import MPI
from dl2gpu.engine.arrays import Array, codes
from dl2gpu.trace.schema import MODE, OP

if TYPE_CHECKING:
    from dl2gpu.analysis.replay import Program

__all__ = ["deciding", "returned"]

_MOST_PAIRS: Final = 5_000_000
"""Pairs of lists with a common request that are compared."""

_LANE: Final = ["r", "lane"]


def returned(
    m: Matching, pairs: pl.DataFrame, rows: Array, everything: Array, blocking: Array
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The pairs that count, and how many targets each wait for any or some needs.

    Args:
        m: the matched trace.
        pairs: ``wait, target`` UInt32, of all waits.
        rows: the waits. everything, blocking: of each, whether it names no request, and whether its
            host stays.

    Returns:
        ``wait, target``, and ``wait`` UInt32, ``need`` Int32.
    """
    about = _about(m, rows, everything, blocking)
    choosy = about.filter("choosy")
    if choosy.is_empty():
        return pairs, pl.DataFrame(schema={"wait": pl.UInt32, "need": pl.Int32})
    mine = pairs.join(choosy.select("wait", "told", "gives"), on="wait")
    active = _active(m, mine, pairs, about)
    count = active.group_by("wait").agg(n=pl.len().cast(pl.Int32))
    taken = _taken(active.filter(~pl.col("told") & pl.col("gives")), about)
    needs = (
        choosy.select("wait", "told")
        .join(count, on="wait", how="left")
        .join(taken, on="wait", how="left")
        .with_columns(pl.col("n", "taken").fill_null(0))
        .select(
            "wait",
            need=pl.when("told").then("n").otherwise(
                pl.min_horizontal(pl.col("taken") + 1, pl.col("n"))
            ),
        )
    )  # fmt: skip
    rest = pairs.join(choosy, on="wait", how="anti")
    return pl.concat([rest, active.select("wait", "target")]), needs


def _about(m: Matching, rows: Array, everything: Array, blocking: Array) -> pl.DataFrame:
    """The waits of hosts that stay: ``wait, r, lane``, and what each is.

    ``choosy``: for any or some; ``told``: what it returned is recorded; ``gives``: requests are
    given back once, as with MPI; ``every``: it names no request.
    """
    e = m.events
    semantics = m.prepared.jobs["semantics"].to_numpy()
    at = e.select("r", "lane", "job", "returned", "stream", wait="i")[rows]
    mode = codes(e["mode"].gather(rows), null=0)
    return at.with_columns(
        every=pl.Series(everything),
        choosy=pl.Series((mode != MODE["all"]) & ~everything),
        stays=pl.Series(blocking),
        gives=pl.Series(semantics[at["job"].to_numpy()] == MPI),
    ).filter(pl.col("stays") & pl.col("stream").is_null() | pl.col("choosy")).select(
        "wait", *_LANE, "returned", "every", "choosy",
        told=pl.col("returned").is_not_null() & pl.col("choosy"),
        gives=pl.col("gives") & pl.col("stays") & pl.col("stream").is_null(),
    )  # fmt: skip


def _active(
    m: Matching, mine: pl.DataFrame, pairs: pl.DataFrame, about: pl.DataFrame
) -> pl.DataFrame:
    """Of the pairs of choosy waits those that count: returned, or not given back before."""
    request = m.events["request"]
    told = (
        mine.filter("told")
        .with_columns(request=request.gather(pl.Series(mine.filter("told")["target"])))
        .join(about.select("wait", "returned"), on="wait")
        .filter(pl.col("returned").list.contains(pl.col("request")))
        .select(mine.columns)
    )
    open_ = mine.filter(~pl.col("told")).join(about.select("wait", *_LANE), on="wait")
    # given back by an earlier wait for all of some, or by one that says so
    plain = about.filter(~pl.col("choosy") & ~pl.col("every") & pl.col("gives"))
    givers = pl.concat(
        [
            pairs.join(plain.select("wait"), on="wait", how="semi"),
            told.filter("gives").select("wait", "target"),
        ]
    ).join(about.select("wait", *_LANE), on="wait")
    given = givers.group_by("target", *_LANE).agg(given=pl.col("wait").min())
    # or by one for all that were issued before it in its lane
    every = about.filter("every", "gives").select(*_LANE, every="wait").sort("every")
    open_ = (
        open_.join(given, on=["target", *_LANE], how="left")
        .sort("wait", "target")
        .join_asof(
            every, left_on="wait", right_on="every", by=_LANE, strategy="backward",
            check_sortedness=False,
        )
    )  # fmt: skip
    lane_of = m.events["lane"].gather(open_["target"])
    swept = (pl.col("target") < pl.col("every")) & (lane_of == pl.col("lane"))
    gone = ((pl.col("given") < pl.col("wait")) | swept).fill_null(value=False)
    kept = open_.filter(~(gone & pl.col("gives")))
    return pl.concat([told, kept.select(mine.columns)])


def _taken(active: pl.DataFrame, about: pl.DataFrame) -> pl.DataFrame:
    """``wait, taken``: how many earlier waits of the lane took one of its requests for sure.

    Those whose requests are all among its own.
    """
    waits, within = _lists(active, about)
    before = pl.concat(
        [
            # of the same list, those before it
            waits.select("wait", taken=pl.int_range(pl.len()).over("list", order_by="wait")),
            # of each list that is a part of its own, all that came before it
            waits.join(within, on="list")
            .sort("wait")
            .join_asof(
                waits.select(
                    "wait", part="list",
                    so_far=1 + pl.int_range(pl.len()).over("list", order_by="wait"),
                ).sort("wait"),
                on="wait", by="part", strategy="backward", check_sortedness=False,
            )
            .select("wait", taken=pl.col("so_far").fill_null(0)),
        ]
    )  # fmt: skip
    return before.group_by("wait").agg(pl.col("taken").sum().cast(pl.Int32))


def _lists(active: pl.DataFrame, about: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """``wait, list``: a number for each set of requests of a lane; ``list, part``: parts of it."""
    sets = (
        active.sort("wait", "target")
        .group_by("wait", maintain_order=True)
        .agg("target")
        .join(about.select("wait", *_LANE), on="wait")
        .with_columns(key=pl.col("target").hash(3), n=pl.col("target").list.len().cast(pl.Int64))
        .with_columns(list=pl.struct(*_LANE, "key", "n").rank("dense").cast(pl.Int64))
    )
    distinct = sets.unique("list", keep="first").select("list", "n", *_LANE, "target")
    members = distinct.explode("target", empty_as_null=False).select("list", "n", *_LANE, "target")
    shared = members.group_by(*_LANE, "target").agg(n=pl.len().cast(pl.Int64))
    within = pl.DataFrame(schema={"list": pl.Int64, "part": pl.Int64})
    if (shared["n"] ** 2).sum() <= _MOST_PAIRS:
        within = (
            members.join(members, on=[*_LANE, "target"], suffix="_part")
            .filter(pl.col("list") != pl.col("list_part"))
            .group_by("list", "list_part")
            .agg(common=pl.len().cast(pl.Int64), n=pl.col("n_part").first())
            .filter(pl.col("common") == pl.col("n"))
            .select("list", part="list_part")
        )
    return sets.select("wait", "list"), within


def deciding(p: Program) -> pl.DataFrame:
    """Waits for any or some, with their requests, of jobs in which it matters what they return.

    That is where one shares a request with a later one of its lane, and may take one of others as
    well; or, of several that are complete, more than one. Columns ``job, wait, target, r, lane,
    rank, seq, some`` (mode "some").
    """
    e = p.matching.events
    semantics = pl.Series(p.matching.prepared.jobs["semantics"])
    schema = {c: e.schema[c] for c in ("job", "r", "lane", "rank", "seq")}
    none = pl.DataFrame(
        schema={"wait": pl.UInt32, "target": pl.UInt32, **schema, "some": pl.Boolean}
    )
    if not (codes(e["mode"], null=0, empty=True) > 0).any():
        return none
    open_ = e.filter(
        (pl.col("op") == OP["wait"]) & (pl.col("mode").fill_null(0) != MODE["all"])
        & (pl.col("requests").list.len() > 0) & pl.col("returned").is_null()
        & pl.col("stream").is_null() & pl.col("blocking").fill_null(value=False)
        & (semantics.gather(e["job"]) == MPI)
    ).select(*schema, wait="i", some=pl.col("mode") == MODE["some"])  # fmt: skip
    active = p.waits.join(open_, on="wait")
    shared = active.group_by(*_LANE, "target").agg(n=pl.len().cast(pl.Int64))
    if active.is_empty() or (shared["n"] ** 2).sum() > _MOST_PAIRS:
        return none
    size = active.group_by("wait").agg(size=pl.len())
    free = (
        active.join(
            active.select(*_LANE, "target", later="wait"), on=[*_LANE, "target"]
        )
        .filter(pl.col("wait") < pl.col("later"))
        .group_by("wait", "later")
        .agg(common=pl.len(), some=pl.col("some").first())
        .join(size, on="wait")
        .filter((pl.col("common") < pl.col("size")) | (pl.col("some") & (pl.col("size") > 1)))
        .select("later")
    )  # fmt: skip
    matters = active.join(free, left_on="wait", right_on="later", how="semi").select("job")
    return active.join(matters, on="job", how="semi").select(none.columns)
