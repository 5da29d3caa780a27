"""Which instances of communicators, each known to one process by a pointer, are one communicator.

By the id that Init lines print; of a split by its parent's identity, count and color; else by size,
member and order of creation.

Source: FORMATS.md section 5.3.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["COUNTED", "identify"]

_PROCESS: Final = ("host", "pid")
_DEPTH: Final = 8
"""Splits of splits of ... that are followed."""


def identify(instances: pl.DataFrame, order: pl.DataFrame) -> pl.DataFrame:
    """Instances with ``name``: equal where they are of one communicator; ``sure``: by an id."""
    n = pl.col("nranks").cast(pl.String)
    text = instances.with_columns(
        name=pl.when(pl.col("comm_id").is_not_null()).then(
            pl.concat_str(
                pl.lit("id"), pl.col("comm_id").cast(pl.String), n,
                pl.col("color").cast(pl.String).fill_null("-"), separator=":",
            )
        )
    )  # fmt: skip
    text = _by_parent(text)
    text = text.with_columns(sure=pl.col("name").is_not_null())
    # the same id once more in one agent: a restart within the process, or a second log of it
    again = pl.int_range(pl.len()).over("name", "agent", order_by="pos")
    text = text.with_columns(
        name=pl.when("sure").then(pl.concat_str("name", pl.lit("#"), again.cast(pl.String)))
    )
    text = text.join(order, on="agent", how="left", maintain_order="left")
    rest = _by_size(text.filter(~pl.col("sure") & pl.col("member").is_not_null()))
    # nothing but a size: of all agents, if it is as many; else of nobody else
    blank = text.filter(~pl.col("sure") & pl.col("member").is_null()).with_columns(
        k=pl.int_range(pl.len()).over("agent", "nranks", order_by="pos")
    )
    all_of = pl.col("agent").n_unique().over("nranks", "k") == pl.col("nranks")
    whole = all_of & (order.height == pl.col("nranks"))
    blank = blank.with_columns(
        name=pl.when(whole)
        .then(pl.concat_str(pl.lit(COUNTED), n, pl.col("k").cast(pl.String), separator=":"))
        .otherwise(pl.concat_str(pl.lit("own"), pl.col("inst").cast(pl.String), separator=":")),
        # the k-th by first use: ranks may have used them in other orders
        several=~whole | (pl.col("k").max().over("nranks") > 0),
        member=pl.when(whole).then(pl.int_range(pl.len()).over("nranks", "k", order_by="place")),
    )
    keep = [*instances.columns, "name", "sure", "several"]
    sure = text.filter("sure").with_columns(several=pl.lit(value=False))
    return pl.concat([frame.select(keep) for frame in (sure, rest, blank)], how="vertical_relaxed")


COUNTED: Final = "all"
"""Beginning of the names of communicators that are nothing but as large as the job."""


def _by_size(rest: pl.DataFrame) -> pl.DataFrame:
    """Adds ``name`` and ``several`` (another reading exists), by size, member and order.

    Creating a communicator keeps its members together, so each agent's first one that is left is
    of a communicator with others' first ones. Where several agents have the same place in it, the
    agents' own order decides.
    """
    named: list[pl.DataFrame] = []
    budget = _MOST_ROUNDS
    for _, part in sorted(rest.group_by("nranks"), key=lambda g: g[0]):
        part = part.sort("place", "pos")
        agent = part["place"].rle_id().to_numpy().astype(np.int64)
        member = part["member"].to_numpy()
        group, several = _rounds(agent, member, int(part["nranks"][0]), budget)
        budget = max(0, budget - int(group.max(initial=-1)) - 1)
        named.append(
            part.with_columns(
                group=pl.Series(group), several=pl.Series(several)
            )
        )  # fmt: skip
    if not named:
        return rest.with_columns(name=pl.lit(None, pl.String), several=pl.lit(value=False))
    done = pl.concat(named)
    # what is left has members without a line: the k-th of each agent in its place
    k = pl.int_range(pl.len()).over("agent", "nranks", "member", order_by="pos")
    left = pl.col("group") < 0
    done = done.with_columns(k=pl.when(left).then(k)).with_columns(
        j=pl.when(left).then(
            pl.int_range(pl.len()).over("nranks", "member", "k", order_by="place")
        )
    )  # fmt: skip
    size = pl.col("nranks").cast(pl.String)
    return done.with_columns(
        name=pl.when(left)
        .then(pl.format("rest:{}:{}:{}", size, pl.col("k"), pl.col("j")))
        .otherwise(pl.format("size:{}:{}", size, pl.col("group"))),
        several=pl.when(left).then(pl.col("j").max().over("nranks", "k") > 0).otherwise("several"),
    ).drop("group", "k", "j")


_MOST_ROUNDS: Final = 10_000
"""Communicators without an id that are told apart by the order of their creation."""


def _rounds(
    agent: npt.NDArray[np.int64], member: npt.NDArray[np.int64], size: int, budget: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Number of the communicator of each instance (-1: none), and whether another one was open.

    ``agent`` rises from 0; each agent's instances lie in the order of their creation.
    """
    group = np.full(len(agent), -1, np.int64)
    several = np.zeros(len(agent), np.bool_)
    first = np.flatnonzero(np.diff(agent, prepend=-1))
    end = np.append(first[1:], len(agent))
    made = 0
    while made < budget:
        open_ = first < end
        heads = first[open_]
        if len(heads) < size:
            break
        seen = np.bincount(member[heads], minlength=size)
        ready = int(seen.min())
        if not ready:
            break
        order = np.argsort(member[heads], kind="stable")
        nth = np.arange(len(heads)) - np.repeat(np.cumsum(seen) - seen, seen)
        chosen = nth < ready
        rows = heads[order[chosen]]
        group[rows] = made + nth[chosen]
        several[rows] = seen.max() > 1
        first[np.flatnonzero(open_)[order[chosen]]] += 1
        made += ready
    return group, several


def _by_parent(text: pl.DataFrame) -> pl.DataFrame:
    """Names of splits, from the identity of what they were split from, count and color."""
    children = text.filter(pl.col("name").is_null() & pl.col("parent").is_not_null())
    if children.is_empty():
        return text
    parents = (
        children.select("inst", *_PROCESS, "pos", comm="parent").sort("pos")
        .join_asof(
            text.select(*_PROCESS, "comm", "pos", of="inst").sort("pos"),
            on="pos", by=[*_PROCESS, "comm"], allow_exact_matches=False, check_sortedness=False,
        )
        .select("inst", "of")
    )  # fmt: skip
    # without a number: the how manieth of its parent
    nth = pl.int_range(pl.len()).over("agent", "of", order_by="pos")
    children = children.select("inst", "agent", "pos", "split", "color", "nranks").join(
        parents, on="inst"
    )
    children = children.with_columns(split=pl.coalesce("split", -1 - nth))
    for _ in range(_DEPTH):
        named = text.filter(pl.col("name").is_not_null()).select("name", of="inst")
        found = children.join(named, on="of").select(
            "inst",
            child=pl.concat_str(
                pl.col("name").str.tail(200), pl.lit("/"),
                *(
                    pl.col(c).cast(pl.String).fill_null("-") + "."
                    for c in ("split", "color", "nranks")
                ),
            ),
        )  # fmt: skip
        found = found.join(
            text.filter(pl.col("name").is_null()).select("inst"), on="inst", how="semi"
        )
        if found.is_empty():
            break
        text = (
            text.join(found, on="inst", how="left", maintain_order="left")
            .with_columns(name=pl.coalesce("name", "child"))
            .drop("child")
        )
    return text
