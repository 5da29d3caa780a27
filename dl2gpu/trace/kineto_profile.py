"""The operations of one profile: which events belong together, in what order they were issued.

A call shows as up to four events: the dispatched operation (``c10d::allreduce_``), the record with
its metadata (``record_param_comms``), the backend's span (``nccl:all_reduce``), and the kernel on
the device. They are joined by thread, time and the ids that the profiler gives. All of it are
passes over whole columns.

Source: FORMATS.md 3.3 to 3.6.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from dl2gpu.trace.kineto_device import device_times
from dl2gpu.trace.kineto_events import Events, by_text
from dl2gpu.trace.kineto_kernel import NULL
from dl2gpu.trace.kineto_names import (
    Kind,
    arguments,
    operation_of,
    sizes_of,
    splits_of,
)
from dl2gpu.trace.kineto_scan import Columns
from dl2gpu.trace.schema import FLAG, OP, STATE, StringTable, dtype_code, op_code

__all__ = ["Group", "Profile", "profile"]

Longs = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]

_DROPPED: Final = -2
_WAIT: Final = OP["wait"]
_UNKNOWN_GROUP: Final = ("", "", "")


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as a call names it."""

    name: str
    desc: str
    ranks: str
    """Its members as text; "" where not told."""
    number: int = NULL
    """``Process Group ID`` of spring 2024, in place of a name."""
    size: int = NULL
    start: int = NULL
    stride: int = NULL
    host: bool = False
    """Of a backend that works on the host, which records no group with its calls."""


@dataclass(slots=True)
class Profile:
    """Operations of one file in the order of their issue, int64 columns, ``NULL`` where unknown.

    Columns: ``created``, ``returned`` (host), ``thread``, ``op``, ``group_of`` (place in
    ``groups``), ``ordinal``, ``count``, ``count_out``, ``dtype``, ``root`` and ``peer`` (ranks in
    the group), ``to`` (global rank of the peer), ``tag``, ``batch``, ``state``, ``started``,
    ``completed``, ``message`` (the trace's number of a send or receive), ``stream``, ``flags``,
    ``splits_of`` (place in ``splits``), ``request``.
    Waits: ``wait_at`` (operations issued before), ``wait_thread``, ``wait_from``, ``wait_to``,
    ``wait_for`` (request, or NULL).
    """

    columns: dict[str, Longs]
    waits: dict[str, Longs]
    groups: list[Group]
    splits: list[list[int]]
    window: tuple[int, int] | None
    """First and last moment that the file speaks of, ns."""
    backend: str | None
    host_only: bool
    """No event of the device: a profile of the CPU."""
    main: int = NULL
    """Number of the process, which is that of its main thread."""
    blocked: Bits = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Operations of the host that it stands in for sure."""

    @property
    def n(self) -> int:
        return len(self.columns["op"])


def profile(c: Columns, base: int, strings: StringTable) -> Profile:
    """The operations of the events ``c``.

    Args:
        c: what the scan found.
        base: ns that the file's times are counted from; 0: they are epoch times.
        strings: receives unknown operations and data types.
    """
    return _Builder(c, base, strings).build()


def _numbered(values: Longs) -> Longs:
    """0, 1, 2, ... for the distinct values in the order of their first sight; NULL stays."""
    known = np.flatnonzero(values != NULL)
    distinct, first, back = np.unique(values[known], return_index=True, return_inverse=True)
    place = np.empty(len(distinct), np.int64)
    place[np.argsort(first)] = np.arange(len(distinct))
    out = np.full(len(values), NULL, np.int64)
    out[known] = place[back]
    return out


class _Builder(Events):
    groups: list[Group]
    splits: list[list[int]]
    parts_of: tuple[Longs, Longs]
    """(id, record it stands in) of the records that are parts of others."""

    # ----------------------------------------------------------------------------------------------

    def build(self) -> Profile:
        records = self.in_order(self.rows(Kind.RECORD))
        calls = self.in_order(self.rows(Kind.CALL))
        spans = self.in_order(self.rows(Kind.SPAN))
        of_device = by_text(
            self.text("name", spans), self.c.strings, lambda t: t.startswith("nccl:")
        )
        if not len(records):
            records = spans[of_device == 1]  # a profile that was thinned out
        self.settle(np.concatenate([records, calls]), spans)

        records, parts_of = self.outermost(records)
        span_of, _ = self.inside(spans, records)  # the backend's span of each record
        around = self.inside(records, calls)[1]  # the dispatched call around each record
        op, is_wait = self._operations(records, span_of, around)

        # what has no record: operations of host backends
        used = np.zeros(len(calls), np.bool_)
        used[around[around >= 0]] = True
        apart = of_device == 0
        apart[span_of[span_of >= 0]] = False
        host_spans = spans[apart]
        spare = calls[~used] if len(host_spans) or not len(records) else calls[:0]
        host = self._host_operations(spare, host_spans)

        self.parts_of = parts_of
        device = self._device_operations(records, op, is_wait, span_of, spans, around, calls)
        parts = [p for p in (device, host) if len(p["op"])]
        merged = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]} if parts else device
        order = self._program_order(merged)
        merged = {k: v[order] for k, v in merged.items()}
        merged["batch"] = _numbered(merged["batch"])
        merged["request"] = np.arange(1, len(order) + 1, dtype=np.int64)
        waits = self._waits(records[is_wait], merged)
        host_rows = len(host["op"])
        backend = None
        if len(merged["op"]):
            backend = "gloo" if 2 * host_rows > len(merged["op"]) else "nccl"
        return Profile(
            columns=merged,
            waits=waits,
            groups=self.groups,
            splits=self.splits,
            window=self.window(),
            backend=backend,
            host_only=not self.c.device,
            main=self.process(),
            blocked=np.zeros(len(merged["op"]), np.bool_),
        )

    def _op_codes(self, ids: npt.NDArray[np.int32]) -> Longs:
        def code(text: str) -> int:
            if text.lower() == "wait":
                return _WAIT
            found = operation_of(text)
            return op_code(found.op, self.strings) if found.recorded else _DROPPED

        return by_text(ids, self.c.strings, code)

    def _operations(self, records: Longs, span_of: Longs, around: Longs) -> tuple[Longs, Bits]:
        """Operation of each record: by its metadata, else its span, else the call around it."""
        spans = self.in_order(self.rows(Kind.SPAN))
        calls = self.in_order(self.rows(Kind.CALL))
        op = self._op_codes(self.text("collective name", records))
        # a call makes one operation; what else is recorded inside it waits for that
        again = np.ones(len(records), np.bool_)
        again[np.unique(around, return_index=True)[1]] = False
        around = np.where(again, -1, around)
        for place, events in ((span_of, spans), (around, calls)):
            missing = (op == NULL) & (place >= 0)
            op[missing] = self._op_codes(self.text("name", events[place[missing]]))
        # without metadata, a span or a call around it, a record is a wait
        op[op == NULL] = _WAIT
        return op, op == _WAIT

    # ----------------------------------------------------------------------------------------------

    def _device_operations(
        self, records: Longs, op: Longs, is_wait: Bits, span_of: Longs, spans: Longs,
        around: Longs, calls: Longs,
    ) -> dict[str, Longs]:  # fmt: skip
        """Columns of the recorded operations (NCCL and its kin)."""
        keep = ~is_wait & (op != _DROPPED)
        rows, op, span_of, around = records[keep], op[keep], span_of[keep], around[keep]
        n = len(rows)
        c = self.c
        self.groups, self.splits = [], []
        out = {
            "created": self.ts[rows], "returned": self.end[rows], "thread": self.num("tid", rows),
            "order": self.num("record function id", rows), "op": op,
            "group_of": self._groups_of(rows), "ordinal": self.num("seq", rows),
            "count": self.num("in msg nelems", rows), "count_out": self.num("out msg nelems", rows),
            "dtype": self._dtypes(self.text("dtype", rows)),
        }  # fmt: skip
        for name in ("root", "peer", "to", "tag", "batch", "stream"):
            out[name] = np.full(n, NULL, np.int64)
        out["flags"] = np.zeros(n, np.int64)
        out["splits_of"] = self._splits_of(rows)
        p2p = op < _WAIT
        rooted = (op >= OP["broadcast"]) & (op <= OP["gather_v"])
        out["message"] = np.where(p2p, out["ordinal"], NULL)
        out["ordinal"][p2p] = NULL
        out["root"][rooted] = self.num("rank", rows)[rooted]
        send = op == OP["send"]
        recv = op == OP["recv"]
        out["to"][send] = self.num("dst rank", rows)[send]
        out["to"][recv] = self.num("src rank", rows)[recv]
        out["count"][recv] = np.where(
            out["count_out"][recv] > 0, out["count_out"][recv], out["count"][recv]
        )
        self._old_sizes(out, span_of, spans)
        self._peers(out, around, calls, p2p, span_of, spans)
        uneven = by_text(
            self.text("collective name", rows), c.strings, lambda t: "allv" in t.lower()
        )
        alltoallv = out["op"] == OP["all_to_all_v"]
        out["op"][alltoallv] = OP["all_to_all"]
        loose = alltoallv | (uneven == 1)
        # what a rank that is not the root passes in is not told apart from what it gets
        loose |= (op == OP["scatter"]) | (op == OP["gather"])
        # one that is made of others: sizes that differ between the ranks are why
        loose |= np.isin(rows, self.parts_of[1]) & (op != OP["barrier"])
        out["flags"][loose] |= FLAG["sizes_incomparable"]
        nothing = (op == OP["barrier"]) | (out["count"] < 0) | (out["count"] > 1 << 62)
        out["count"][nothing] = NULL
        out["dtype"][op == OP["barrier"]] = NULL
        same = (out["count_out"] == out["count"]) | nothing | p2p | (out["count_out"] < 0)
        out["count_out"][same | (out["count_out"] > 1 << 62)] = NULL
        self._batches(out, rows)
        alone = np.array([g.size == 1 for g in self.groups], np.bool_)[out["group_of"]]
        device_times(self, out, rows, span_of, spans, self.parts_of, alone)
        return out

    def _groups_of(self, rows: Longs) -> Longs:
        if not len(rows):
            return np.zeros(0, np.int64)
        texts = [
            self.text(name, rows).astype(np.int64)
            for name in (
                "process group name", "process group description", "process group ranks"
            )
        ]  # fmt: skip
        numbers = [
            self.num(name, rows)
            for name in (
                "process group id",
                "group size",
                "global rank start",
                "global rank stride",
            )
        ]
        distinct, back = np.unique(np.stack([*texts, *numbers]), axis=1, return_inverse=True)
        strings = self.c.strings

        def string(i: int) -> str:
            return strings[i] if i >= 0 else ""

        for name, desc, ranks, number, size, start, stride in distinct.T.tolist():
            self.groups.append(
                Group(string(name), string(desc), string(ranks), number, size, start, stride)
            )
        return back.reshape(-1).astype(np.int64)

    def _dtypes(self, ids: npt.NDArray[np.int32]) -> Longs:
        def code(text: str) -> int:
            known = text.strip().lower() not in {"", "undefined", "nullptr (uninitialized)"}
            return dtype_code(text, self.strings) if known else NULL

        return by_text(ids, self.c.strings, code)

    def _splits_of(self, rows: Longs) -> Longs:
        def place(text: str) -> int:
            found = splits_of(text)
            if found is None:
                return NULL
            self.splits.append(found)
            return len(self.splits) - 1

        return by_text(self.text("in split size", rows), self.c.strings, place)

    def _old_sizes(self, out: dict[str, Longs], place: Longs, spans: Longs) -> None:
        """Sizes from the shapes of the backend's span, where there is no metadata."""
        missing = np.flatnonzero((out["count"] == NULL) & (place >= 0))
        if not len(missing):
            return
        count, dtype = self._shapes(spans[place[missing]])
        out["count"][missing] = count
        out["dtype"][missing] = np.where(
            out["dtype"][missing] == NULL, dtype, out["dtype"][missing]
        )
        # of these, only what is passed in is told, and not to whom
        exchange = (out["op"][missing] == OP["all_to_all"]) | (
            out["op"][missing] >= OP["broadcast"]
        )
        out["flags"][missing[exchange]] |= FLAG["sizes_incomparable"]

    def _shapes(self, events: Longs) -> tuple[Longs, Longs]:
        """(elements, data type) by the shapes of events."""
        dims = self.text("input dims", events).astype(np.int64)
        types = self.text("input type", events).astype(np.int64)
        pairs, back = np.unique(np.stack([dims, types]), axis=1, return_inverse=True)
        strings = self.c.strings
        table = []
        for d, t in pairs.T.tolist():
            found = sizes_of(strings[d] if d >= 0 else "", strings[t] if t >= 0 else "")
            table.append(
                (
                    NULL if found.count is None else found.count,
                    NULL if found.dtype is None else dtype_code(found.dtype, self.strings),
                )
            )
        values = np.array(table, np.int64).reshape(-1, 2)[back.reshape(-1)]
        return values[:, 0], values[:, 1]

    def _peers(
        self, out: dict[str, Longs], around: Longs, calls: Longs, p2p: Bits, span_of: Longs,
        spans: Longs,
    ) -> None:  # fmt: skip
        """Peers and tags from the arguments of the call, or ``nccl:send 0->2``, where not told."""
        inside = np.flatnonzero(p2p & (around >= 0))
        if len(inside):
            peer, tag = (
                self._arguments(calls[around[inside]], 2),
                self._arguments(calls[around[inside]], 3),
            )
            out["peer"][inside], out["tag"][inside] = peer, tag
        told = np.flatnonzero(p2p & (span_of >= 0) & (out["peer"] == NULL) & (out["to"] == NULL))
        if len(told):
            names = self.text("name", spans[span_of[told]])

            def peer_of(text: str) -> int:
                found = operation_of(text).peer
                return NULL if found is None else found

            out["peer"][told] = by_text(names, self.c.strings, peer_of)

    def _arguments(self, events: Longs, position: int) -> Longs:
        return by_text(
            self.text("concrete inputs", events),
            self.c.strings,
            lambda t: arguments(t).get(position, NULL),
        )

    def _batches(self, out: dict[str, Longs], rows: Longs) -> None:
        """Operations inside one span ``nccl:coalesced`` are a batch."""
        batches = self.in_order(self.rows(Kind.BATCH))
        if self.counted:
            batches = batches[self.num("record function id", batches) > 0]
        # the device's spans have the stream as their thread, and no operations inside
        batches = batches[np.isin(self.num("tid", batches), self.thread_names)]
        owner = self.inside(rows, batches)[1]
        inside = owner >= 0
        out["batch"][inside] = batches[owner[inside]]

    # ----------------------------------------------------------------------------------------------

    # ----------------------------------------------------------------------------------------------

    def _host_operations(self, calls: Longs, spans: Longs) -> dict[str, Longs]:
        """Columns of what has no record: host backends (gloo), by their calls and spans."""
        if not hasattr(self, "groups"):
            self.groups, self.splits = [], []
        span_ops = self._op_codes(self.text("name", spans))
        by_span = not len(calls)
        events = spans if by_span else calls
        op = span_ops if by_span else self._op_codes(self.text("name", calls))
        keep = op >= 0
        events, op = events[keep], op[keep]
        n = len(events)
        span_at = np.flatnonzero(keep) if by_span else self._spans_of(events, op, spans, span_ops)
        out = {name: np.full(n, NULL, np.int64) for name in _COLUMNS}
        out |= {
            "created": self.ts[events], "returned": self.end[events],
            "thread": self.num("tid", events), "order": self.num("record function id", events),
            "op": op, "group_of": np.full(n, -1, np.int64),
            "flags": np.full(n, FLAG["state_unreliable"] | FLAG["blocking_inferred"], np.int64),
        }  # fmt: skip
        if not n:
            return out
        has = span_at >= 0
        shown = events.copy()
        shown[has] = spans[span_at[has]]
        out["count"], out["dtype"] = self._shapes(shown)
        for name, values in (("started", self.ts), ("completed", self.end)):
            out[name][has] = values[shown[has]]
        out["state"] = np.where(has, STATE["completed"], STATE["scheduled"]).astype(np.int64)
        if not has.any():
            out["state"][:] = STATE["unknown"]
        p2p = op < _WAIT
        for rows, position, column in (
            (p2p, 2, "peer"), (p2p, 3, "tag"), (op == OP["broadcast"], 2, "root"),
            (np.isin(op, [OP["reduce"], OP["gather"], OP["scatter"]]), 3, "root"),
        ):  # fmt: skip
            if rows.any():
                out[column][rows] = self._arguments(events[rows], position)
        loose = np.isin(op, [OP["all_to_all"], OP["gather"], OP["scatter"]])
        out["flags"][loose] |= FLAG["sizes_incomparable"]
        out["count"][op == OP["barrier"]] = NULL
        out["dtype"][op == OP["barrier"]] = NULL
        return out

    def _spans_of(self, calls: Longs, op: Longs, spans: Longs, span_ops: Longs) -> Longs:
        """The span of each call: of the same operation, the next one by the profiler's own number.

        gloo works in threads of its own, so time says little; -1: none.
        """
        out = np.full(len(calls), -1, np.int64)
        number = self.num("record function id", calls)
        span_number = self.num("record function id", spans)
        numbered = (number != NULL).all() and (span_number != NULL).all()
        for one in np.unique(op).tolist():
            mine = np.flatnonzero(op == one)
            theirs = np.flatnonzero(span_ops == one)
            if not len(theirs):
                continue
            a = number[mine] if numbered else self.ts[calls[mine]]
            b = span_number[theirs] if numbered else self.ts[spans[theirs]]
            order, theirs = np.argsort(a, kind="stable"), theirs[np.argsort(b, kind="stable")]
            at = np.searchsorted(a[order], np.sort(b), side="right") - 1
            fits = at >= 0
            # of several behind one call, the first
            out[mine[order[at[fits]]][::-1]] = theirs[fits][::-1]
        return out

    # ----------------------------------------------------------------------------------------------

    def _program_order(self, columns: dict[str, Longs]) -> Longs:
        """Rows in the order of issue: by the profiler's counter of calls, else by time."""
        order = columns["order"]
        if len(order) and (order > 0).all() and len(np.unique(order)) == len(order):
            return np.argsort(order, kind="stable")
        return np.lexsort((order, columns["created"]))

    def _waits(self, rows: Longs, ops: dict[str, Longs]) -> dict[str, Longs]:
        """The recorded waits: what was issued before each, and what it waits for."""
        rows = rows[np.argsort(self.ts[rows], kind="stable")]
        created = np.sort(ops["created"])
        out = {
            "wait_at": np.searchsorted(created, self.ts[rows], side="right") - 1,
            "wait_thread": self.num("tid", rows),
            "wait_from": self.ts[rows],
            "wait_to": self.end[rows],
            "wait_for": np.full(len(rows), NULL, np.int64),
        }
        seq = self.num("seq", rows)
        named = np.flatnonzero(seq != NULL)
        if not len(named) or not len(ops["op"]):
            return out
        # the latest operation of the group with that number (of collectives or of messages)
        names: dict[str, int] = {}
        of_group = np.array([names.setdefault(g.name, len(names)) for g in self.groups], np.int64)
        group = by_text(
            self.text("process group name", rows[named]),
            self.c.strings,
            lambda t: names.get(t, NULL),
        )
        number = np.where(ops["ordinal"] != NULL, ops["ordinal"], ops["message"])
        at = np.flatnonzero((ops["group_of"] >= 0) & (number != NULL))
        if not len(at):
            return out
        issued, asked = ops["created"][at], self.ts[rows[named]]
        pairs = np.concatenate(
            [
                np.stack([of_group[ops["group_of"][at]], number[at]]),
                np.stack([group, seq[named]]),
            ],
            axis=1,
        )
        key = np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
        times, when = np.unique(np.concatenate([issued, asked]), return_inverse=True)
        place = key * len(times) + when
        order = np.argsort(place[: len(at)], kind="stable")
        last = np.searchsorted(place[: len(at)][order], place[len(at) :], side="right") - 1
        found = order[np.maximum(last, 0)]
        fits = (last >= 0) & (key[found] == key[len(at) :])
        out["wait_for"][named[fits]] = ops["request"][at[found[fits]]]
        return out


_COLUMNS: Final[tuple[str, ...]] = (
    "created", "returned", "thread", "order", "op", "group_of", "ordinal", "count", "count_out",
    "dtype", "root", "peer", "to", "message", "tag", "batch", "stream", "flags", "splits_of",
    "started", "completed", "state",
)  # fmt: skip
