"""The operations of one profile: which events belong together, in what order they were issued.

A call shows as up to four events: the dispatched operation (``c10d::allreduce_``), the record with
its metadata (``record_param_comms``), the backend's span (``nccl:all_reduce``), and the kernel on
the device. They are joined by thread, time and the ids that the profiler gives. All of it are
passes over whole columns.

Source: FORMATS.md 3.3 to 3.6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dl2gpu.trace.kineto_kernel import NULL
from dl2gpu.trace.kineto_names import (
    Kind,
    arguments,
    kernel_operation,
    kind_of,
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
    notes: list[str] = field(default_factory=list)
    """What could not be recovered."""

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


def _by_text(ids: npt.NDArray[np.int32], strings: list[str], value: Callable[[str], int]) -> Longs:
    """``value`` of each string, asked once for each distinct one; NULL where there is none."""
    out = np.full(len(ids), NULL, np.int64)
    used = np.unique(ids[ids >= 0])
    if not len(used):
        return out
    table = np.full(int(used[-1]) + 1, NULL, np.int64)
    for i in used.tolist():
        table[i] = value(strings[i])
    known = ids >= 0
    out[known] = table[ids[known]]
    return out


def _numbered(values: Longs) -> Longs:
    """0, 1, 2, ... for the distinct values in the order of their first sight; NULL stays."""
    known = np.flatnonzero(values != NULL)
    distinct, first, back = np.unique(values[known], return_index=True, return_inverse=True)
    place = np.empty(len(distinct), np.int64)
    place[np.argsort(first)] = np.arange(len(distinct))
    out = np.full(len(values), NULL, np.int64)
    out[known] = place[back]
    return out


class _Builder:
    def __init__(self, c: Columns, base: int, strings: StringTable) -> None:
        self.c = c
        self.strings = strings
        self.notes: list[str] = []
        n = c.numbers
        self.ts = np.where(n["ts"] == NULL, NULL, np.maximum(n["ts"], -base) + base)
        self.dur = np.maximum(np.where(n["dur"] == NULL, 0, n["dur"]), 0)
        self.end = np.where(self.ts == NULL, NULL, self.ts + self.dur)
        self.kind = self._kinds()

    def _kinds(self) -> Longs:
        c = self.c
        name, cat = c.texts["name"].astype(np.int64), c.texts["cat"].astype(np.int64)
        pairs, back = np.unique(name * (1 << 32) + (cat + 1), return_inverse=True)
        texts = c.strings
        kinds = np.array(
            [
                kind_of(texts[p >> 32], texts[(p & 0xFFFFFFFF) - 1] if p & 0xFFFFFFFF else "")
                if p >= 0
                else Kind.NOTHING
                for p in pairs.tolist()
            ],
            np.int64,
        )
        out = kinds[back] if len(pairs) else np.zeros(0, np.int64)
        # whole events only; one that a thread has begun and not ended is not written
        whole = (_by_text(c.texts["ph"], texts, lambda t: t == "X") == 1) | (out == Kind.END)
        out[~whole | (self.ts == NULL)] = Kind.NOTHING
        return out

    def rows(self, kind: Kind) -> Longs:
        return np.flatnonzero(self.kind == kind)

    def num(self, name: str, rows: Longs) -> Longs:
        return self.c.numbers[name][rows]

    def text(self, name: str, rows: Longs) -> npt.NDArray[np.int32]:
        return self.c.texts[name][rows]

    # ----------------------------------------------------------------------------------------------

    def build(self) -> Profile:
        records = self._in_order(self.rows(Kind.RECORD))
        calls = self._in_order(self.rows(Kind.CALL))
        spans = self._in_order(self.rows(Kind.SPAN))
        of_device = _by_text(
            self.text("name", spans), self.c.strings, lambda t: t.startswith("nccl:")
        )
        if not len(records):
            records = spans[of_device == 1]  # a profile that was thinned out
        issued = np.concatenate([records, calls])
        seen = np.concatenate([issued, spans, self.rows(Kind.BATCH)])
        self.low = int(self.ts[seen].min()) if len(seen) else 0
        self.counted = bool(len(issued)) and bool(
            (self.num("record function id", issued) > 0).all()
        )
        self.thread_names = np.unique(self.num("tid", np.concatenate([records, calls, spans])))

        records, parts_of = self._outermost(records)
        span_of, _ = self._inside(spans, records)  # the backend's span of each record
        around = self._around(records, calls)  # the dispatched call around each record
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
            window=self._window(),
            backend=backend,
            host_only=not self.c.device,
            main=self._process(),
            blocked=np.zeros(len(merged["op"]), np.bool_),
            notes=self.notes,
        )

    def _outermost(self, records: Longs) -> tuple[Longs, tuple[Longs, Longs]]:
        """The records that do not stand inside another one, and (id, record) of those that do.

        An operation that is made of others (a barrier of an all_reduce, an all_gather of different
        sizes of broadcasts, a first message of the creation of its communicator) is one operation.
        """
        if not len(records):
            return records, (records, records)
        rows = records[np.argsort(self._key(records), kind="stable")]
        start, end = self.ts[rows], self.end[rows]
        thread = np.searchsorted(self.thread_names, self.num("tid", rows)).astype(np.int64)
        fresh = np.concatenate([[True], thread[1:] != thread[:-1]])
        # the record that reaches furthest so far, in each thread
        reach = thread * (1 << 48) + np.clip(end - self.low, 0, (1 << 48) - 1)
        furthest = np.maximum.accumulate(reach)
        holder = np.maximum.accumulate(np.where(reach == furthest, np.arange(len(rows)), 0))
        before = np.concatenate([[0], holder[:-1]])
        nested = ~fresh & (start > start[before]) & (end < end[before])
        kept = np.isin(records, rows[~nested])
        return records[kept], (self.num("external id", rows[nested]), rows[before[nested]])

    def _process(self) -> int:
        pids = self.num("pid", np.concatenate([self.rows(Kind.RECORD), self.rows(Kind.CALL)]))
        found, count = np.unique(pids[pids != NULL], return_counts=True)
        return int(found[np.argmax(count)]) if len(found) else NULL

    def _in_order(self, rows: Longs) -> Longs:
        return rows[np.lexsort((self.num("external id", rows), self.end[rows], self.ts[rows]))]

    def _window(self) -> tuple[int, int] | None:
        marks = np.concatenate([self.rows(Kind.WINDOW), self.rows(Kind.END)])
        seen = marks if len(marks) else np.flatnonzero(self.kind != Kind.NOTHING)
        if not len(seen):
            return None
        return int(self.ts[seen].min()), int(self.end[seen].max())

    def _key(self, rows: Longs) -> Longs:
        """(thread, place in it) as one number that sorts: by the profiler's counter, else time."""
        number = self.num("record function id", rows)
        when = number if self.counted else self.ts[rows] - self.low
        thread = np.searchsorted(self.thread_names, self.num("tid", rows))
        return thread.astype(np.int64) * (1 << 48) + np.clip(when, 0, (1 << 48) - 1)

    def _inside(self, inner: Longs, outer: Longs) -> tuple[Longs, Longs]:
        """(first of ``inner`` inside each of ``outer``, the outer of each inner); -1: none."""
        first = np.full(len(outer), -1, np.int64)
        owner = np.full(len(inner), -1, np.int64)
        if not len(inner) or not len(outer):
            return first, owner
        key = self._key(outer)
        order = np.argsort(key, kind="stable")
        at = np.searchsorted(key[order], self._key(inner), side="right") - 1
        own = order[np.maximum(at, 0)]
        # a clock of microseconds rounds
        fits = (
            (at >= 0)
            & (self.num("tid", outer[own]) == self.num("tid", inner))
            & (self.ts[inner] <= self.end[outer[own]])
            & (self.end[inner] <= self.end[outer[own]] + 2000)
        )
        owner[fits] = own[fits]
        rows = np.flatnonzero(fits)[::-1]
        first[owner[rows]] = rows
        return first, owner

    def _around(self, inner: Longs, outer: Longs) -> Longs:
        """The outer event that each of ``inner`` stands in, -1: none."""
        return self._inside(inner, outer)[1]

    def _op_codes(self, ids: npt.NDArray[np.int32]) -> Longs:
        def code(text: str) -> int:
            if text.lower() == "wait":
                return _WAIT
            found = operation_of(text)
            return op_code(found.op, self.strings) if found.recorded else _DROPPED

        return _by_text(ids, self.c.strings, code)

    def _operations(self, records: Longs, span_of: Longs, around: Longs) -> tuple[Longs, Bits]:
        """Operation of each record: by its metadata, else its span, else the call around it."""
        spans = self._in_order(self.rows(Kind.SPAN))
        calls = self._in_order(self.rows(Kind.CALL))
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

    groups: list[Group]
    splits: list[list[int]]
    parts_of: tuple[Longs, Longs]
    """(id, record it stands in) of the records that are parts of others."""

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
        uneven = _by_text(
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
        self._kernels(out, rows, span_of, spans)
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

        return _by_text(ids, self.c.strings, code)

    def _splits_of(self, rows: Longs) -> Longs:
        def place(text: str) -> int:
            found = splits_of(text)
            if found is None:
                return NULL
            self.splits.append(found)
            return len(self.splits) - 1

        return _by_text(self.text("in split size", rows), self.c.strings, place)

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

            out["peer"][told] = _by_text(names, self.c.strings, peer_of)

    def _arguments(self, events: Longs, position: int) -> Longs:
        return _by_text(
            self.text("concrete inputs", events),
            self.c.strings,
            lambda t: arguments(t).get(position, NULL),
        )

    def _batches(self, out: dict[str, Longs], rows: Longs) -> None:
        """Operations inside one span ``nccl:coalesced`` are a batch."""
        batches = self._in_order(self.rows(Kind.BATCH))
        if self.counted:
            batches = batches[self.num("record function id", batches) > 0]
        # the device's spans have the stream as their thread, and no operations inside
        batches = batches[np.isin(self.num("tid", batches), self.thread_names)]
        owner = self._inside(rows, batches)[1]
        inside = owner >= 0
        out["batch"][inside] = batches[owner[inside]]

    # ----------------------------------------------------------------------------------------------

    def _kernels(self, out: dict[str, Longs], rows: Longs, span_of: Longs, spans: Longs) -> None:
        """Start, end, stream and state from the kernels."""
        n = len(rows)
        out["started"] = np.full(n, NULL, np.int64)
        out["completed"] = np.full(n, NULL, np.int64)
        out["state"] = np.full(n, STATE["unknown"], np.int64)
        if not n:
            return
        kernels = self._in_order(self.rows(Kind.KERNEL))
        if not self.c.device:
            # only what the host did: a profile is written where the job went on to its end
            out["state"][:] = STATE["completed"]
            out["flags"] |= FLAG["state_unreliable"] | FLAG["blocking_inferred"]
            self.notes.append("no device events: when operations ran is not known")
            return
        owner = self._by_id(kernels, rows, span_of, spans)
        weak = False
        if not (owner >= 0).any() and len(kernels):
            owner, weak = self._by_order(kernels, out), True
        has = owner >= 0
        took, of = kernels[has], owner[has]
        for name, values, better in (
            ("started", self.ts[took], np.minimum), ("completed", self.end[took], np.maximum)
        ):  # fmt: skip
            start = np.iinfo(np.int64).max if better is np.minimum else NULL
            column = np.full(n, start, np.int64)
            better.at(column, of, values)
            column[column == start] = NULL
            out[name] = column
        stream = self.num("stream", took)
        out["stream"][of] = np.where(stream == NULL, self.num("tid", took), stream)
        done = out["completed"] != NULL
        if weak:
            out["flags"][done] |= FLAG["state_unreliable"]
        self._batch_times(out, done)
        done = out["completed"] != NULL
        out["state"][done] = STATE["completed"]
        self._without_kernel(out, done)

    def _by_id(self, kernels: Longs, rows: Longs, span_of: Longs, spans: Longs) -> Longs:
        """The operation of each kernel by ``External id``: the record's, or its span's."""
        owner = np.full(len(kernels), -1, np.int64)
        if not len(kernels):
            return owner
        told = self.text("collective name", kernels) >= 0
        ids = self.num("external id", kernels)
        candidates = [(self.num("external id", rows), np.arange(len(rows)))]
        inside = np.flatnonzero(span_of >= 0)
        candidates.append((self.num("external id", spans[span_of[inside]]), inside))
        ids_of_parts, whole = self.parts_of
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
        late = (owner >= 0) & (self.ts[kernels] < self.ts[rows[np.maximum(owner, 0)]] - 1_000_000)
        owner[late] = -1
        if not told.any() and (owner >= 0).sum() < len(kernels):
            owner[:] = -1
        return owner

    def _by_order(self, kernels: Longs, out: dict[str, Longs]) -> Longs:
        """The k-th kernel of a kind belongs to the k-th operation of it.

        Where there are fewer kernels or more (a window that cuts), each operation takes the next
        kernel that started after it was issued.
        """
        owner = np.full(len(kernels), -1, np.int64)
        kinds = {name: code for code, name in enumerate(("", "send_recv"), 1 << 20)}

        def code(text: str) -> int:
            found = kernel_operation(text) or ""
            return kinds.get(found, OP.get(found, kinds[""]))

        of_kernel = _by_text(self.text("name", kernels), self.c.strings, code)
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
            at = np.searchsorted(self.ts[kernels[of]], out["created"][ops], side="left")
            at = np.maximum.accumulate(at - np.arange(len(at))) + np.arange(len(at))
            fits = at < len(of)
            owner[of[at[fits]]] = ops[fits]
        return owner

    def _batch_times(self, out: dict[str, Longs], done: Bits) -> None:
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

    def _without_kernel(self, out: dict[str, Longs], done: Bits) -> None:
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
        alone = np.array([g.size == 1 for g in self.groups], np.bool_)[group]
        silent = pending & ((never & many) | alone)
        out["state"][silent] = STATE["completed"]
        out["flags"][silent] |= FLAG["state_unreliable"]
        out["state"][pending & ~silent] = STATE["scheduled"]
        if silent.any() and not alone.all():
            self.notes.append(f"{int(silent.sum())} operations have no kernel")

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
        # the latest operation of the group with that number, before the wait
        names: dict[str, int] = {}
        of_group = np.array(
            [names.setdefault(g.name, len(names)) for g in self.groups] or [0], np.int64
        )
        strings = self.c.strings
        group = _by_text(
            self.text("process group name", rows[named]), strings, lambda t: names.get(t, NULL)
        )
        mine = ops["group_of"] >= 0
        at = np.flatnonzero(mine & (ops["ordinal"] != NULL))
        key = np.stack([of_group[ops["group_of"][at]], ops["ordinal"][at]])
        order = np.lexsort((ops["created"][at], key[1], key[0]))
        at = at[order]
        distinct = {
            (g, s): int(ops["request"][i])
            for g, s, i in zip(
                of_group[ops["group_of"][at]].tolist(), ops["ordinal"][at].tolist(), at.tolist(),
                strict=True,
            )
        }  # fmt: skip
        out["wait_for"][named] = [
            distinct.get(pair, NULL)
            for pair in zip(group.tolist(), seq[named].tolist(), strict=True)
        ]
        return out


_COLUMNS: Final[tuple[str, ...]] = (
    "created", "returned", "thread", "order", "op", "group_of", "ordinal", "count", "count_out",
    "dtype", "root", "peer", "to", "message", "tag", "batch", "stream", "flags", "splits_of",
    "started", "completed", "state",
)  # fmt: skip


def empty_like(columns: dict[str, Any]) -> dict[str, Longs]:
    """No operations."""
    return {name: np.zeros(0, np.int64) for name in columns}
