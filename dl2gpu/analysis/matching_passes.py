"""Matching by passes along the rows: drives ``matching_kernel``."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import polars as pl

from dl2gpu.analysis import matching_kernel as kernel
from dl2gpu.analysis.matching_plan import lossy_ranks, lost_comms, no_nodes
from dl2gpu.analysis.signatures import SIZED
from dl2gpu.analysis.tables import KIND, NCCL_LIKE, ROLE, Prepared, dtype_widths
from dl2gpu.engine.arrays import Array, codes, flags, plain
from dl2gpu.engine.cores import cores
from dl2gpu.trace.schema import ANY, OP

__all__ = ["Columns", "Placed", "pass_collectives", "pass_messages"]

_SPARSE: Final = 4
"""Ordinals may leave gaps up to this factor; damaged or hostile numbers are made dense."""


class Columns:
    """Event columns as arrays without nulls (-1); a column that is null throughout is empty."""

    def __init__(self, p: Prepared) -> None:
        self._events = p.events
        self._got: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self._got:
            series = self._events[name]
            fill = flags if series.dtype == pl.Boolean else codes
            self._got[name] = fill(series, empty=True)
        return self._got[name]

    def at(self, name: str, rows: Array, null: int = -1) -> Array:
        """The column at some rows, filled where it is null."""
        column = self._events[name]
        if column.null_count() == len(column):
            return np.full(len(rows), null, column.head(0).to_numpy().dtype)
        return codes(column.gather(rows), null)


class Placed:
    """Where each event belongs, filled pass by pass; columns as in :class:`Matching`."""

    def __init__(self, n: int) -> None:
        self.node = np.full(n, -1, np.int32)
        self.node2 = np.full(n, -1, np.int32)
        self.role = np.zeros(n, np.int8)
        self.alone = np.zeros(n, np.bool_)
        self.k = np.full(n, -1, np.int64)

    def series(self) -> list[pl.Series]:
        return [
            pl.Series("node", self.node),
            pl.Series("role", self.role),
            pl.Series("alone", self.alone),
            pl.Series("k", self.k),
            pl.Series("node2", self.node2),
            pl.Series("box", np.full(len(self.node), -1, np.int32)),
        ]

    def collectives(self, events: pl.DataFrame) -> pl.DataFrame:
        """The collectives only, as :func:`matching_plan.plan_collectives` gives them."""
        rows = np.flatnonzero(events["op"].to_numpy() >= OP["all_reduce"])
        node = pl.Series("node", self.node[rows])
        return pl.DataFrame(
            {
                "i": rows.astype(np.uint32),
                "node": pl.select(pl.when(node >= 0).then(node)).to_series(),
                "role": self.role[rows],
                "alone": self.alone[rows],
                "k": self.k[rows],
            }
        )


@cache
def _sized_table() -> Array:
    table = np.zeros(64, np.bool_)
    table[SIZED] = True
    return table


def pass_collectives(p: Prepared, c: Columns, out: Placed) -> pl.DataFrame:
    """Numbers and places all collectives; gives the node table (without ``need``)."""
    n_comms = p.comms.height
    about = p.comms.select("comm", "job", "size").join(
        p.jobs.select("job", "semantics", "source"), on="job", how="left"
    ).sort("comm")  # fmt: skip
    size = plain(about["size"])
    nccl = plain((about["semantics"] == NCCL_LIKE).fill_null(True))
    any_sizes = plain((about["source"] == "flight_recorder").fill_null(False))
    op, comm, r = c["op"], c["comm"], c["r"]
    if not len(comm):
        comm = np.full(len(op), -1, np.int32)
    ordinal, count, count_out = c["ordinal"], c["count"], c["count_out"]

    missing = np.zeros(n_comms, np.bool_)
    kernel.unnumbered(op, comm, ordinal, missing)
    lost = np.zeros(n_comms, np.bool_)
    if missing.any():
        lost[lost_comms(p).to_numpy()] = True
    owner = np.full(n_comms, -1, np.int64)
    seen, last, times = (np.zeros(n_comms, np.int64) for _ in range(3))
    low = np.full(n_comms, np.iinfo(np.int64).max)
    high = np.full(n_comms, -1, np.int64)
    copy = np.zeros(len(op), np.int32)
    parts = _partitions(comm, n_comms)
    most = over_threads(lambda begin, end: kernel.number(
        begin, end, op, comm, r, ordinal, count, count_out, missing, lost, size, nccl,
        owner, seen, last, times, out.k, copy, out.alone, low, high,
    ), parts)  # fmt: skip
    copies = max(most) + 1
    used = high >= 0
    width = np.where(used, high - np.where(used, low, 0) + 1, 0)
    total = sum(width.tolist()) * copies
    k = out.k
    if total > _SPARSE * len(op) + 1024:
        k, low, width = _dense_numbers(op, comm, out, copy, n_comms)
        copy, copies = np.zeros_like(copy), 1
        total = int(width.sum())
    base = (np.cumsum(width) - width) * copies
    low = np.where(width > 0, low, 0)

    present, finished, node_comm = (np.zeros(total, np.int32) for _ in range(3))
    kind, bits = np.zeros(total, np.int8), np.zeros(total, np.uint8)
    node_k = np.zeros(total, np.int64)
    first = [np.full(total, -1, np.int64) for _ in range(7)]
    about_rows = [c[name] for name in ("dtype", "reduce_op", "new_comm", "split", "flags", "done")]
    root, nbytes = c["root"], c["bytes"]
    over_threads(lambda begin, end: kernel.fold(
        begin, end, op, comm, root, nbytes, count, *about_rows, k, copy, out.alone,
        base, low, copies, any_sizes, _sized_table(),
        out.node, present, finished, kind, bits, node_comm, node_k, *first,
    ), parts)  # fmt: skip
    if k is not out.k:
        placed = np.flatnonzero(out.node >= 0)
        node_k[out.node[placed]] = out.k[placed]
    kernel.roles(op, c["rank"], c["root"], out.node, first[1], out.role)
    hard = bits & (kernel.DIFF_OP | kernel.DIFF_ROOT | kernel.DIFF_BYTES | kernel.DIFF_NEW)
    unsized = (bits & kernel.DIFF_COUNT > 0) & (bits & kernel.UNSIZED > 0)
    return pl.DataFrame(
        {
            "node": np.arange(total, dtype=np.int32),
            "comm": node_comm,
            "k": node_k,
            "kind": kind,
            "present": present,
            "finished": finished,
            "blocks": (hard > 0) | unsized,
            "differs": (bits & ~np.uint8(kernel.UNSIZED)) > 0,
        }
    )


_LEAST: Final = 200_000
"""Rows that make a thread worth its while."""


def _partitions(comm: Array, n_comms: int) -> list[tuple[int, int]]:
    """Ranges of communicators with about equally many rows, one for each thread.

    A collective needs its own communicator only, so each thread looks at what is its own; the nodes
    lie side by side in the end. Where the jobs are divided among threads, one thread has them all.
    """
    threads = min(cores(), len(comm) // _LEAST)
    if threads <= 1 or n_comms <= 1:
        return [(0, n_comms)]
    ends = np.cumsum(np.bincount(np.maximum(comm, -1) + 1, minlength=n_comms + 1)[1:])
    cuts = np.unique(np.searchsorted(ends, np.linspace(0, ends[-1], threads + 1)[1:-1]) + 1)
    return list(pairwise([0, *(int(c) for c in cuts if c < n_comms), n_comms]))


def over_threads(call: Callable[[int, int], Any], parts: list[tuple[int, int]]) -> list[Any]:
    """``call(begin, end)`` of each part, in threads."""
    if len(parts) == 1:
        return [call(*parts[0])]
    with ThreadPoolExecutor(len(parts), thread_name_prefix="matching") as pool:
        return list(pool.map(lambda part: call(*part), parts))


def _dense_numbers(
    op: Array, comm: Array, out: Placed, copy: Array, n_comms: int
) -> tuple[Array, Array, Array]:
    """Operations numbered within their communicator, for ordinals with huge gaps or repetitions."""
    rows = np.flatnonzero((op >= OP["all_reduce"]) & ~out.alone)
    c, number, nth = comm[rows].astype(np.int64), out.k[rows], copy[rows]
    order = np.lexsort((nth, number, c))
    rows, c, number, nth = rows[order], c[order], number[order], nth[order]
    other = c[1:] != c[:-1]
    fresh = other | (number[1:] != number[:-1]) | (nth[1:] != nth[:-1])
    slot = np.concatenate([[0], np.cumsum(fresh)])[: len(rows)]
    begin = np.concatenate([[0], slot[1:][other]])[: len(rows)]
    used = c[np.concatenate([[True], other])[: len(rows)]]
    k = np.full(len(op), -1, np.int64)
    low = np.zeros(n_comms, np.int64)
    low[used] = begin
    k[rows] = slot - low[c]
    width = np.bincount(c[np.concatenate([[True], fresh])[: len(rows)]], minlength=n_comms)
    return k, np.zeros(n_comms, np.int64), width


def pass_messages(p: Prepared, c: Columns, out: Placed, first: int) -> pl.DataFrame | None:
    """Places all point-to-point operations; the node table, or None where wildcards need a plan."""
    rows = np.flatnonzero(c["op"] <= OP["probe"])
    if not len(rows):
        return no_nodes()
    if _wildcards(p):
        return None
    op, job = c["op"][rows], c["job"][rows]
    tags_matter = plain(p.jobs["semantics"] != NCCL_LIKE)
    tag = c.at("tag", rows)
    channel, c_comm, c_src, c_dst, _, c_job = kernel.channels(
        op, job, c.at("comm", rows), c["rank"][rows], c.at("peer", rows, -2), tag,
        c.at("recv_peer", rows), c.at("recv_tag", rows), c.at("matched_peer", rows),
        c.at("matched_tag", rows), tags_matter,
    )  # fmt: skip
    cut = _cut(p, c_job, c_src) | _cut(p, c_job, c_dst)
    nbytes, count, dtype = (c.at(name, rows) for name in ("bytes", "count", "dtype"))
    out_bytes, out_count = nbytes, count
    exchange = np.flatnonzero(op == OP["sendrecv"])
    if len(exchange):
        out_bytes, out_count = _receiving(exchange, nbytes, count, c.at("count_out", rows), dtype)
    (place, base, present, finished, has_send, has_recv, sent, taken, n_sent, n_taken, dtypes,
     tags) = kernel.pair(
        channel, op, c["done"][rows], nbytes, count, out_bytes, out_count, dtype, tag, cut
    )  # fmt: skip

    slots = int(base[-1])
    of_channel = np.repeat(np.arange(len(c_comm)), np.diff(base))
    for half, target in ((0, out.node), (1, out.node2)):
        has = place[half] > 0
        target[rows[has]] = first + base[channel[half, has]] + place[half, has] - 1
    out.k[rows] = np.where(place[0] > 0, place[0], -1)
    kinds = np.full(max(OP.values()) + 1, ROLE["send"], np.int8)
    kinds[OP["recv"]], kinds[OP["probe"]] = ROLE["recv"], ROLE["probe"]
    out.role[rows] = kinds[op]
    only = np.flatnonzero((place[0] < 0) & (place[1] > 0))
    if len(only):
        # a sendrecv of which nothing is known but its receive is that receive
        at = rows[only]
        out.node[at], out.node2[at] = out.node2[at], -1
        out.k[at], out.role[at] = place[1, only], ROLE["recv"]
    # nothing is known of the partner, or the message lies before what can be aligned
    out.alone[rows] = (place[0] < 0) & (place[1] < 0)

    known = (sent >= 0) & (taken >= 0)
    left, right = np.where(known, sent, n_sent), np.where(known, taken, n_taken)
    both = (left >= 0) & (right >= 0)
    strict = ~tags_matter[c_job[of_channel]]
    # where a window is lost the two sides may be of different messages: no size is compared
    fair = ~cut[of_channel]
    blocks = both & fair & np.where(strict, left != right, left > right)
    k = np.arange(slots) - base[of_channel] + 1
    return pl.DataFrame(
        {
            "node": np.arange(first, first + slots, dtype=np.int32),
            "job": c_job[of_channel],
            "comm": np.maximum(c_comm[of_channel], -1).astype(np.int32),
            "k": k,
            "src": c_src[of_channel],
            "dst": c_dst[of_channel],
            "present": present,
            "differs": blocks | (fair & (dtypes | (tags & strict))),
            "blocks": blocks,
            "finished": finished,
            "has_send": has_send,
            "has_recv": has_recv,
            "cut": cut[of_channel],
            "kind": np.full(slots, KIND["message"], np.int8),
            "members": np.full(slots, 2, np.int32),
            "passed": np.zeros(slots, np.int32),
            "need": np.where(present >= 2, 2, -1).astype(np.int32),
        }
    )


def _cut(p: Prepared, job: Array, rank: Array) -> Array:
    """bool[n]: these ranks lost their start, or list active operations only."""
    lossy = lossy_ranks(p)
    of = (plain(lossy["job"]).astype(np.int64) << 32) | plain(lossy["rank"])
    found: Array = np.isin((job.astype(np.int64) << 32) | rank, of)
    return found


def _wildcards(p: Prepared) -> bool:
    """Is there a receive or probe that takes from anybody, or any tag where tags matter?"""
    e = p.events
    if e["peer"].min() != ANY and e["tag"].min() != ANY and e["recv_peer"].min() != ANY:
        return False
    matters = p.jobs.filter(pl.col("semantics") != NCCL_LIKE)["job"]
    source = pl.coalesce("matched_peer", "peer") == ANY
    tag = (pl.coalesce("matched_tag", "tag") == ANY) & pl.col("job").is_in(matters.implode())
    other = (pl.col("recv_peer") == ANY) | (
        (pl.col("recv_tag") == ANY) & pl.col("job").is_in(matters.implode())
    )
    wild = (source | tag | other).fill_null(False) & (pl.col("op") <= OP["probe"])
    return bool(e.lazy().select(wild.any()).collect().item())


def _receiving(
    rows: Array, nbytes: Array, count: Array, count_out: Array, dtype: Array
) -> tuple[Array, Array]:
    """Sizes of the receiving halves of sendrecv.

    An element is as wide as its type, or as what is sent says, if that is so many whole elements.
    """
    out_bytes, out_count = nbytes.copy(), count.copy()
    given = rows[count_out[rows] >= 0]
    widths = dtype_widths()["width"].to_numpy()
    typed = (dtype[given] >= 0) & (dtype[given] < len(widths))
    sent, elements = nbytes[given], np.maximum(count[given], 1)
    told = (sent >= 0) & (count[given] > 0) & (sent % elements == 0)
    width = np.where(typed, widths[np.where(typed, dtype[given], 0)], sent // elements)
    out_count[given] = count_out[given]
    out_bytes[given] = np.where(typed | told, count_out[given] * width, -1)
    return out_bytes, out_count
