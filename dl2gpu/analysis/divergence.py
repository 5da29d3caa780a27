"""Where the ranks' sequences part, which may lie long before the place of the hang.

A rank that leaves out one collective goes on without any sign as long as its next calls agree with
the others' in operation and size: they pair one position late. What tells is the call site. Two
call sites of one operation are no fault by themselves (``if rank == 0: broadcast(x) else:
broadcast(y)``): a pair of sites counts only if one of the two ranks also uses the other's site, so
that it could have been there and was not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.analysis.names import Names
from dl2gpu.analysis.replay import Program
from dl2gpu.analysis.signatures import SIZED
from dl2gpu.analysis.tables import KIND, is_lossy
from dl2gpu.trace.schema import OP

__all__ = ["Divergence", "Split", "find_departure", "find_divergence", "odd_ones"]

Array = npt.NDArray[Any]

_ASPECTS: Final = ("op", "root", "bytes", "count", "new_comm", "dtype", "reduce_op")
_MESSAGE_ASPECTS: Final = ("bytes", "count", "dtype", "tag")


@dataclass(frozen=True)
class Split:
    """The sides of a disagreement.

    ``odd``: ranks of a strict minority against one side that holds more than half, else empty.
    ``aspects``: what differs. ``classes``: signature and ranks of each side, largest first.
    """

    odd: tuple[int, ...]
    aspects: list[str]
    classes: list[dict[str, Any]]


@dataclass(frozen=True)
class Divergence:
    """The first operation at which sequences part.

    ``event``: of the smaller side where it is clear which that is, else of the lowest rank.
    ``odd``: ranks on the smaller side. ``reason``: why, where it can be told.
    ``skipped``: the odd ranks left a call out (their next call stands here in its place).
    """

    event: int
    odd: tuple[int, ...]
    skipped: bool
    reason: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def odd_ones(p: Program, names: Names, node: int, events: Array) -> Split:
    """Groups the parts of a node by signature."""
    message = p.matching.nodes["kind"][node] == KIND["message"]
    aspects = _MESSAGE_ASPECTS if message else _ASPECTS
    columns = {a: names.column(a)[events] for a in aspects}
    if not message:  # members may pass in different shares of some operations
        for a in ("bytes", "count"):
            columns[a] = np.where(np.isin(columns["op"], SIZED), columns[a], -1)
    differing = [a for a in aspects if len({int(v) for v in columns[a] if v >= 0}) > 1]
    key = list(zip(*(columns[a].tolist() for a in differing), strict=True)) or [()] * len(events)
    sides: dict[tuple[int, ...], list[int]] = {}
    for e, k in zip(events.tolist(), key, strict=True):
        sides.setdefault(tuple(k), []).append(e)
    ordered = sorted(sides.values(), key=lambda s: (-len(s), s))
    odd: tuple[int, ...] = ()
    if len(ordered) > 1 and 2 * len(ordered[0]) > len(events) and len(events) > 2:
        odd = tuple(sorted(int(p.rank_of[e]) for side in ordered[1:] for e in side))
    classes = [
        {"ranks": sorted(int(p.rank_of[e]) for e in side)} | names.signature(side[0])
        for side in ordered
    ]
    if "bytes" in differing and "count" in differing:
        differing.remove("bytes")
    return Split(odd, differing, classes)


def find_divergence(p: Program, names: Names, node: int) -> Divergence | None:
    """The first position on the node's communicator at which call sites part, up to the node.

    None where there are no call sites, or no position before the node where they tell anything.
    """
    m = p.matching
    comm, last = int(m.nodes["comm"][node]), int(m.nodes["k"][node])
    on = (
        p.events_of(int(m.nodes["job"][node]))
        .filter(
            (pl.col("comm") == comm) & (pl.col("op") >= OP["all_reduce"]) & (pl.col("k") <= last)
        )
        .select("i", "rank", "k", "stack", "op", "count")
    )
    if on.is_empty() or on["stack"].null_count() == on.height:
        return None
    sites = names.sites
    stack = on["stack"].fill_null(-1).to_numpy()
    site = np.where(stack >= 0, sites[np.maximum(stack, 0)], -1)
    on = on.with_columns(site=pl.Series(site)).filter(pl.col("site") >= 0)
    # which ranks use which site anywhere on this communicator
    uses = set(zip(on["rank"].to_list(), on["site"].to_list(), strict=True))
    parted = (
        on.group_by("k")
        .agg(low=pl.col("site").min(), high=pl.col("site").max(), n=pl.len())
        .filter((pl.col("low") != pl.col("high")) & (pl.col("n") > 1))
        .sort("k")
    )
    by_k = on.join(parted.select("k"), on="k", how="semi").sort("k", "rank")
    for (k,), rows in by_k.group_by("k", maintain_order=True):
        sides: dict[int, list[tuple[int, int]]] = {}
        for rank, s, i in zip(rows["rank"], rows["site"], rows["i"], strict=True):
            sides.setdefault(s, []).append((rank, i))
        ordered = sorted(sides.items(), key=lambda kv: (-len(kv[1]), kv[1]))
        big_site, big = ordered[0]
        odd: list[int] = []
        telling = False
        for s, members in ordered[1:]:
            crossed = any((rank, big_site) in uses for rank, _ in members) or any(
                (rank, s) in uses for rank, _ in big
            )
            telling |= crossed
            odd += [rank for rank, _ in members]
        if not telling:
            continue
        clear = 2 * len(big) > rows.height and rows.height > 2
        own = min(
            (i for _, members in ordered[1:] for rank, i in members if rank in odd), default=-1
        )
        first_odd = min(i for _, members in ordered[1:] for _, i in members)
        skipped = clear and _skipped(
            on, int(k), big_site, [s for s, _ in ordered[1:]], [r for r, _ in big]
        )
        return Divergence(
            event=own if clear and own >= 0 else min(big)[1],
            odd=tuple(sorted(odd)) if clear else (),
            skipped=skipped,
            details={
                "ordinal": int(k),
                "expected": {"site": names.site(min(big)[1]), "ranks": sorted(r for r, _ in big)},
                "found": {"site": names.site(first_odd), "ranks": sorted(odd)},
                "positions_before_hang": last - int(k),
            },
        )
    return None


_COMPARED: Final = 8
"""So many of the ranks that agree are compared with the one that does not."""


def find_departure(
    p: Program, names: Names, node: int, odd: tuple[int, ...], completed: Array | None = None
) -> Divergence | None:
    """Where a rank left the sequence of operations that all others of the node share.

    A call that is left out on one communicator shows at once in the order across communicators,
    even if its own communicator pairs the next call of the same kind without a sign. Compared are
    whole sequences (operation, purpose of the communicator, call site, size); it tells only where
    the other ranks agree among themselves up to there, and no record has lost its start.

    The odd rank may be absent from the node. None where it departs at the node itself, or where the
    sequences do not go on one position apart from an operation that completed (``completed``
    bool[n], None: all did). That shows a call left out, or one too many, and not another order.
    """
    m = p.matching
    job = int(m.nodes["job"][node])
    events = p.events_of(job)
    present = events.filter(pl.col("node") == node)["rank"]
    good = [r for r in present.sort().to_list() if r not in odd][:_COMPARED]
    if len(odd) != 1 or len(good) < 2:
        return None
    ranks = m.prepared.ranks.filter((pl.col("job") == job) & pl.col("rank").is_in([*good, *odd]))
    if not ranks.filter(is_lossy()).is_empty():
        return None
    rows = (
        events.lazy()
        .filter(
            pl.col("rank").is_in([*good, *odd])
            & (pl.col("op") != OP["wait"])
            & (pl.col("lane") == 0)
        )
        .select("i", "rank", "op", "comm", "stack", "count")
        .collect()
    )
    of_comm = names.comm_kinds
    comm = rows["comm"].fill_null(-1).to_numpy()
    stack = rows["stack"].fill_null(-1).to_numpy()
    site = np.where(stack >= 0, names.sites[np.maximum(stack, 0)] if len(names.sites) else -1, -1)
    token = rows.select(
        pl.struct(
            "op", pl.col("count").fill_null(-1),
            comm=pl.Series(np.where(comm >= 0, of_comm[np.maximum(comm, 0)], -1)),
            site=pl.Series(site),
        ).hash(11)
    ).to_series().to_numpy()  # fmt: skip
    index = rows["i"].to_numpy()
    rank = rows["rank"].to_numpy()
    sequences = {r: (token[rank == r], index[rank == r]) for r in (*good, *odd)}
    length = min(len(t) for t, _ in sequences.values())
    first = sequences[good[0]][0]
    same = np.ones(length, np.bool_)
    for r in good[1:]:
        same &= sequences[r][0][:length] == first[:length]
    mine, at = sequences[odd[0]]
    away = np.flatnonzero(mine[:length] != first[:length])
    if not len(away) or not same[: away[0] + 1].all():
        return None
    x = int(away[0])
    own = events.filter((pl.col("node") == node) & (pl.col("rank") == odd[0]))["i"]
    here = int(own[0]) if len(own) else int(at[-1]) + 1
    if at[x] >= here:
        return None
    others = [sequences[r][0] for r in good]
    left_out = min(_shift(mine[x:], theirs[x + 1 : length]) for theirs in others)
    extra = min(_shift(mine[x + 1 :], theirs[x:length]) for theirs in others)
    if max(left_out, extra) < _SHIFTED or (completed is not None and not completed[at[x]]):
        return None
    # where lines alternate both fit; a rank with fewer operations than the others left one out
    skipped = left_out > extra or (left_out == extra and len(mine) < min(map(len, others)))
    return Divergence(
        event=int(at[x]),
        odd=odd,
        skipped=skipped,
        reason="skipped_call" if skipped else "data_dependent_branch",
        details={
            "expected": names.operation(int(sequences[good[0]][1][x])),
            "found": names.operation(int(at[x])),
            "operations_before_hang": int(np.searchsorted(at, here)) - x,
        },
    )


_SHIFTED: Final = 2
"""So many operations have to agree one position apart before a call counts as left out or extra."""


def _shift(a: Array, b: Array) -> int:
    """How many leading tokens of two sequences agree."""
    n = min(len(a), len(b))
    away = np.flatnonzero(a[:n] != b[:n])
    return int(away[0]) if len(away) else n


def _skipped(
    on: pl.DataFrame, k: int, big_site: int, odd_sites: list[int], ranks: list[int]
) -> bool:
    """Did the odd ranks leave a call out? Then the others reach the odd ranks' site soon after."""
    after = on.filter(pl.col("rank").is_in(ranks) & (pl.col("k") > k)).sort("k")
    soon = after.group_by("rank").head(8)["site"]
    return bool(soon.is_in(odd_sites).any()) and big_site not in odd_sites
