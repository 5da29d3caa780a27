"""Which operations each wait waits for (rule 6 of DESIGN.md section 4)."""

from __future__ import annotations

import numpy as np
import polars as pl

from dl2gpu.analysis.matching import Matching
from dl2gpu.engine.arrays import Array

__all__ = ["no_pairs", "wait_pairs"]


def no_pairs() -> pl.DataFrame:
    """No pairs of (wait, target)."""
    return pl.DataFrame(schema={"wait": pl.UInt32, "target": pl.UInt32})


def wait_pairs(m: Matching, rows: Array, everything: Array, stream: Array) -> pl.DataFrame:
    """(wait, target): named requests, and everything before a wait that stands on a stream.

    ``rows`` are those of the waits, ``everything`` says of each whether it names no request.
    """
    e = m.events
    pairs = no_pairs()
    named = (
        e.select("i", "r", "lane", request="requests")[rows[~everything]]
        .explode("request", empty_as_null=False)
        .filter(pl.col("request").is_not_null())
        .unique()
    )
    if named.height:
        wait = np.zeros(e.height, np.bool_)
        wait[rows] = True
        pairs = _named_pairs(e.filter(pl.col("request").is_not_null() & ~pl.Series(wait)), named)
    on_stream = rows[(stream[rows] >= 0) & everything]
    return pl.concat([pairs, _pairs_of_all(e, on_stream)]) if len(on_stream) else pairs


def _pairs_of_all(e: pl.DataFrame, waits: Array) -> pl.DataFrame:
    """(wait, target) of waits on a stream for everything issued before in their lane.

    What an earlier one of them waits for need not be said again: it is itself among the targets.
    But a wait that is recorded as complete says nothing of what it waited for, so a wait that is
    not reaches back to the one before it that is not.
    """
    lanes = e.select(lane=pl.struct("r", "lane").rank("dense")).to_series().to_numpy()
    n = e.height
    place = lanes.astype(np.int64) * n + np.arange(n)
    targets = np.flatnonzero((e["stream"].is_not_null() | ~e["blocking"]).fill_null(False))
    targets = targets[np.argsort(place[targets])]
    at = waits[np.argsort(place[waits])]
    known = (e["done"] | e["passed"]).fill_null(False).to_numpy()[at]
    before = (
        pl.DataFrame({"lane": lanes[at], "wait": at, "open": np.where(known, -1, at)})
        .with_columns(open=pl.when(pl.col("open") >= 0).then("open").forward_fill().over("lane"))
        .with_columns(pl.col("wait", "open").shift(1).over("lane").fill_null(-1))
    )
    first = np.where(known, before["wait"].to_numpy(), before["open"].to_numpy())
    first = lanes[at].astype(np.int64) * n + np.maximum(first, 0)
    lo, hi = np.searchsorted(place[targets], [first, place[at]])
    width = hi - lo
    offset = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
    return pl.DataFrame(
        {"wait": np.repeat(at, width), "target": targets[np.repeat(lo, width) + offset]},
        schema={"wait": pl.UInt32, "target": pl.UInt32},
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
