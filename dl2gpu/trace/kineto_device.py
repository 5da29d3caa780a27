"""When operations ran on the device: their kernels.

Source: FORMATS.md 3.3, 3.5.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from dl2gpu.trace.kineto_events import Events, by_text
from dl2gpu.trace.kineto_kernel import NULL
from dl2gpu.trace.kineto_names import Kind, kernel_operation
from dl2gpu.trace.schema import FLAG, OP, STATE

__all__ = ["device_times"]

Longs = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]

_WAIT: Final = OP["wait"]


def device_times(
    e: Events, out: dict[str, Longs], rows: Longs, span_of: Longs, spans: Longs,
    parts_of: tuple[Longs, Longs], alone: Bits,
) -> None:  # fmt: skip
    """Start, end, stream and state of the operations ``out`` from the kernels.

    Args:
        e: the events. out: columns of the operations, which are added to.
        rows: the record of each operation. span_of: its span, a place in ``spans``; -1: none.
        parts_of: (id, record) of records that are parts of others.
        alone: operations of a group of one rank.
    """
    n = len(rows)
    out["started"] = np.full(n, NULL, np.int64)
    out["completed"] = np.full(n, NULL, np.int64)
    out["state"] = np.full(n, STATE["unknown"], np.int64)
    if not n:
        return
    kernels = e.in_order(e.rows(Kind.KERNEL))
    if not e.c.device:
        # only what the host did: a profile is written where the job went on to its end
        out["state"][:] = STATE["completed"]
        out["flags"] |= FLAG["state_unreliable"] | FLAG["blocking_inferred"]
        return
    owner = _by_id(e, kernels, rows, span_of, spans, parts_of)
    weak = False
    if not (owner >= 0).any() and len(kernels):
        owner, weak = _by_order(e, kernels, out), True
    has = owner >= 0
    took, of = kernels[has], owner[has]
    for name, values, better in (
        ("started", e.ts[took], np.minimum), ("completed", e.end[took], np.maximum)
    ):  # fmt: skip
        start = np.iinfo(np.int64).max if better is np.minimum else NULL
        column = np.full(n, start, np.int64)
        better.at(column, of, values)
        column[column == start] = NULL
        out[name] = column
    stream = e.num("stream", took)
    out["stream"][of] = np.where(stream == NULL, e.num("tid", took), stream)
    done = out["completed"] != NULL
    if weak:
        out["flags"][done] |= FLAG["state_unreliable"]
    _batch_times(out, done)
    done = out["completed"] != NULL
    out["state"][done] = STATE["completed"]
    _without_kernel(out, done, alone)


def _by_id(
    e: Events, kernels: Longs, rows: Longs, span_of: Longs, spans: Longs,
    parts_of: tuple[Longs, Longs],
) -> Longs:  # fmt: skip
    """The operation of each kernel by ``External id``: the record's, or its span's."""
    owner = np.full(len(kernels), -1, np.int64)
    if not len(kernels):
        return owner
    told = e.text("collective name", kernels) >= 0
    ids = e.num("external id", kernels)
    candidates = [(e.num("external id", rows), np.arange(len(rows)))]
    inside = np.flatnonzero(span_of >= 0)
    candidates.append((e.num("external id", spans[span_of[inside]]), inside))
    ids_of_parts, whole = parts_of
    order = np.argsort(rows, kind="stable")
    at = np.minimum(np.searchsorted(rows[order], whole), max(len(rows) - 1, 0))
    mine = rows[order[at]] == whole
    candidates.append((ids_of_parts[mine], order[at[mine]]))
    for known, place in candidates:
        order = np.argsort(known, kind="stable")
        at = np.searchsorted(known[order], ids)
        at = np.minimum(at, max(len(order) - 1, 0))
        if not len(order):
            continue
        hit = (known[order[at]] == ids) & (ids != NULL) & (owner < 0)
        owner[hit] = place[order[at[hit]]]
    # in old files a kernel's id is that of its launch: equal numbers are chance
    late = (owner >= 0) & (e.ts[kernels] < e.ts[rows[np.maximum(owner, 0)]] - 1_000_000)
    owner[late] = -1
    if not told.any() and (owner >= 0).sum() < len(kernels):
        owner[:] = -1
    return owner


def _by_order(e: Events, kernels: Longs, out: dict[str, Longs]) -> Longs:
    """The k-th kernel of a kind belongs to the k-th operation of it.

    Where there are fewer kernels or more (a window that cuts), each operation takes the next
    kernel that started after it was issued.
    """
    owner = np.full(len(kernels), -1, np.int64)
    kinds = {name: code for code, name in enumerate(("", "send_recv"), 1 << 20)}

    def code(text: str) -> int:
        found = kernel_operation(text) or ""
        return kinds.get(found, OP.get(found, kinds[""]))

    of_kernel = by_text(e.text("name", kernels), e.c.strings, code)
    op = out["op"].copy()
    sends = (op < _WAIT) | np.isin(
        op, [OP["all_to_all"], OP["gather"], OP["scatter"], OP["all_to_all_v"]]
    )
    op[sends] = kinds["send_recv"]
    op[op == OP["barrier"]] = OP["all_reduce"]
    order = np.argsort(out["created"], kind="stable")
    for kind in np.unique(of_kernel).tolist():
        of = np.flatnonzero(of_kernel == kind)
        ops = order[op[order] == kind]
        if len(of) == len(ops):
            owner[of] = ops
            continue
        # each takes the next one that is free: a running maximum
        at = np.searchsorted(e.ts[kernels[of]], out["created"][ops], side="left")
        at = np.maximum.accumulate(at - np.arange(len(at))) + np.arange(len(at))
        fits = at < len(of)
        owner[of[at[fits]]] = ops[fits]
    return owner


def _batch_times(out: dict[str, Longs], done: Bits) -> None:
    """One kernel serves a batch: its members have its times."""
    batch = out["batch"]
    open_ = np.flatnonzero((batch != NULL) & ~done)
    if not len(open_):
        return
    owners = np.flatnonzero((batch != NULL) & done)
    order = owners[np.argsort(batch[owners], kind="stable")]
    if not len(order):
        return
    at = np.minimum(np.searchsorted(batch[order], batch[open_]), len(order) - 1)
    hit = batch[order[at]] == batch[open_]
    for name in ("started", "completed", "stream"):
        out[name][open_[hit]] = out[name][order[at[hit]]]


def _without_kernel(out: dict[str, Longs], done: Bits, alone: Bits) -> None:
    """Operations without a kernel: passed by later ones, or pending where the window ends."""
    group, op = out["group_of"], out["op"]
    p2p = op < _WAIT
    place = np.argsort(out["created"], kind="stable")
    rank = np.empty(len(place), np.int64)
    rank[place] = np.arange(len(place))
    key = group * 2 + p2p
    last = np.full(int(key.max()) + 1, -1, np.int64)
    np.maximum.at(last, key[done], rank[done])
    passed = ~done & (rank < last[key])
    out["state"][passed] = STATE["completed"]
    out["flags"][passed] |= FLAG["state_unreliable"]
    pending = ~done & ~passed
    # a group of which the device never shows anything: copy engines, or one rank
    never = last[key] < 0
    many = np.bincount(key, minlength=len(last))[key] >= 3
    silent = pending & ((never & many) | alone)
    out["state"][silent] = STATE["completed"]
    out["flags"][silent] |= FLAG["state_unreliable"]
    out["state"][pending & ~silent] = STATE["scheduled"]
