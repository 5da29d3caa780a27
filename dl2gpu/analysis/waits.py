"""Which operations each wait waits for (rule 6 of DESIGN.md section 4)."""

from __future__ import annotations

import numpy as np
import polars as pl

from dl2gpu.analysis.matching import Matching
from dl2gpu.analysis.waits_kernel import pairs_of_all
from dl2gpu.engine.arrays import Array, flags, plain

__all__ = ["no_pairs", "wait_pairs"]


def no_pairs() -> pl.DataFrame:
    """No pairs of (wait, target)."""
    return pl.DataFrame(schema={"wait": pl.UInt32, "target": pl.UInt32})


def wait_pairs(m: Matching, rows: Array, everything: Array, stream: Array) -> pl.DataFrame:
    """(wait, target): named requests, and everything before a wait that stands on a stream.

    ``rows`` are those of the waits, ``everything`` says of each whether it names no request.
    """
    e = m.events
    named = rows[~everything]
    pairs = no_pairs()
    if len(named):
        wait = np.zeros(e.height, np.bool_)
        wait[rows] = True
        asked = (
            e.select("i", "r", "lane", request="requests")[named]
            .explode("request", empty_as_null=False)
            .filter(pl.col("request").is_not_null())
        )
        found = _rising_pairs(e, asked, wait)
        if found is None:
            requests = e.filter(pl.col("request").is_not_null() & ~pl.Series(wait))
            found = _named_pairs(requests, asked.unique())
        pairs = found
    on_stream = rows[(stream[rows] >= 0) & everything]
    return pl.concat([pairs, _pairs_of_all(e, on_stream)]) if len(on_stream) else pairs


def _one_lane(e: pl.DataFrame) -> bool:
    """Is all that the ranks issue in one lane?"""
    return bool(e["lane"].min() == e["lane"].max())


def _rising_pairs(e: pl.DataFrame, asked: pl.DataFrame, wait: Array) -> pl.DataFrame | None:
    """What :func:`_named_pairs` gives, by a search, where request numbers only rise in each rank.

    None where a rank has several lanes, or a number does not rise.
    """
    ids = e["request"]
    if not _one_lane(e) or ids.null_count() == e.height:
        return None
    owner = np.flatnonzero(ids.is_not_null().to_numpy() & ~wait)
    own = ids.gather(owner).to_numpy()
    if not len(owner):
        return None
    low, span = int(own.min()), int(own.max()) - int(own.min()) + 1
    r = e["r"].to_numpy()
    if (int(r[-1]) + 1) * span >= 1 << 62:
        return None
    key = r[owner].astype(np.int64) * span + (own - low)
    if not (key[1:] > key[:-1]).all():
        return None
    asked = asked.filter(pl.col("request").is_between(low, low + span - 1))
    by = asked["i"].to_numpy()
    want = r[by].astype(np.int64) * span + (asked["request"].to_numpy() - low)
    at = np.minimum(np.searchsorted(key, want), len(key) - 1)
    here = (key[at] == want) & (owner[at] < by)
    pairs = pl.DataFrame(
        {"wait": by[here], "target": owner[at[here]]},
        schema={"wait": pl.UInt32, "target": pl.UInt32},
    )
    return pairs if e["requests"].list.len().max() == 1 else pairs.unique()


def _pairs_of_all(e: pl.DataFrame, waits: Array) -> pl.DataFrame:
    """(wait, target) of waits on a stream for everything issued before in their lane.

    What an earlier one of them waits for need not be said again: it is itself among the targets.
    But a wait that is recorded as complete says nothing of what it waited for, so a wait that is
    not reaches back to the one before it that is not.
    """
    able = plain((e["stream"].is_not_null() | ~e["blocking"]).fill_null(False))
    known = flags(e["done"]) | flags(e["passed"])
    lanes, at, order = plain(e["r"]), waits.astype(np.int64), None
    if not _one_lane(e):
        lane = pl.struct("r", "lane").rank("dense").cast(pl.UInt32)
        lanes = e.select(lane).to_series().to_numpy()
        order = np.argsort(lanes, kind="stable")
        is_wait = np.zeros(e.height, np.bool_)
        is_wait[waits] = True
        lanes, able, known = lanes[order], able[order], known[order]
        at = np.flatnonzero(is_wait[order])
    none = np.empty(0, np.uint32)
    n = pairs_of_all(lanes, at, known, able, none, none)
    wait, target = np.empty(n, np.uint32), np.empty(n, np.uint32)
    pairs_of_all(lanes, at, known, able, wait, target)
    if order is not None:
        wait, target = order[wait], order[target]
    return pl.DataFrame(
        {"wait": wait, "target": target}, schema={"wait": pl.UInt32, "target": pl.UInt32}
    )


def _named_pairs(requests: pl.DataFrame, named: pl.DataFrame) -> pl.DataFrame:
    """(wait, target) of named requests.

    The target is the nearest earlier event of the lane with the request's id, else the last one of
    another lane of the rank. A request that nobody has is left out.
    """
    # sort, then carry the last request forward to the waits behind it
    key = pl.struct("r", "lane", "request").hash(7)
    carried = (
        pl.concat(
            [
                requests.select("i", "r", "lane", "request", wait=pl.lit(None, pl.UInt32)),
                named.select("i", "r", "lane", "request", wait="i"),
            ]
        )
        .sort("r", "lane", "request", "i")
        .with_columns(
            target=pl.when(pl.col("wait").is_null()).then("i").forward_fill(),
            owner=pl.when(pl.col("wait").is_null()).then(key).forward_fill(),
        )
        .filter(pl.col("wait").is_not_null())
        .with_columns(target=pl.when(pl.col("owner") == key).then("target"))
    )
    here = carried.filter(pl.col("target").is_not_null()).select("wait", "target")
    lost = carried.filter(pl.col("target").is_null())
    if lost.is_empty():
        return here
    # of two lanes, one is another lane
    latest = requests.group_by("r", "request", "lane").agg(target=pl.col("i").max())
    latest = latest.sort("target").group_by("r", "request").tail(2)
    elsewhere = (
        lost.select("wait", "r", "lane", "request")
        .join(latest.rename({"lane": "other"}), on=["r", "request"])
        .filter(pl.col("lane") != pl.col("other"))
        .group_by("wait", "request")
        .agg(pl.col("target").max())
        .select("wait", "target")
    )
    return pl.concat([here, elsewhere])
