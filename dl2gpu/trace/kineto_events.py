"""The events of communication of one profile: what kind each is, and which stands inside which.

Source: FORMATS.md 3.3, 3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from dl2gpu.trace.kineto_kernel import NULL
from dl2gpu.trace.kineto_names import Kind, kind_of
from dl2gpu.trace.kineto_scan import Columns
from dl2gpu.trace.schema import StringTable

__all__ = ["Events", "by_text"]

Longs = npt.NDArray[np.int64]

_ROUNDING_NS: Final = 2000
"""A clock of whole microseconds lets an inner event end this much behind the outer one."""


def by_text(ids: npt.NDArray[np.int32], strings: list[str], value: Callable[[str], int]) -> Longs:
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


class Events:
    """The columns of a scan with times in ns and the kind of each event.

    Attributes:
        c: what the scan found; ``strings``: receives unknown operations and data types.
        ts, dur, end: int64[events], ns; NULL where an event has no time.
        kind: int64[events], Kind.
        counted: calls carry the profiler's own counter; ``thread_names``: threads of the host.
    """

    def __init__(self, c: Columns, base: int, strings: StringTable) -> None:
        self.c = c
        self.strings = strings
        n = c.numbers
        self.ts = np.where(n["ts"] == NULL, NULL, np.maximum(n["ts"], -base) + base)
        self.dur = np.maximum(np.where(n["dur"] == NULL, 0, n["dur"]), 0)
        self.end = np.where(self.ts == NULL, NULL, self.ts + self.dur)
        self.kind = self._kinds()
        self.low = 0
        self.counted = False
        self.thread_names = np.zeros(0, np.int64)

    def settle(self, issued: Longs, spans: Longs) -> None:
        """Sets how events of the host are ordered: by counter or time, in which threads."""
        seen = np.concatenate([issued, spans, self.rows(Kind.BATCH)])
        self.low = int(self.ts[seen].min()) if len(seen) else 0
        numbers = self.num("record function id", issued)
        self.counted = bool(len(issued)) and bool((numbers > 0).all())
        self.thread_names = np.unique(self.num("tid", np.concatenate([issued, spans])))

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
        whole = (by_text(c.texts["ph"], texts, lambda t: t == "X") == 1) | (out == Kind.END)
        out[~whole | (self.ts == NULL)] = Kind.NOTHING
        return out

    def rows(self, kind: Kind) -> Longs:
        return np.flatnonzero(self.kind == kind)

    def num(self, name: str, rows: Longs) -> Longs:
        return self.c.numbers[name][rows]

    def text(self, name: str, rows: Longs) -> npt.NDArray[np.int32]:
        return self.c.texts[name][rows]

    def outermost(self, records: Longs) -> tuple[Longs, tuple[Longs, Longs]]:
        """The records that do not stand inside another one, and (id, record) of those that do.

        An operation that is made of others (a barrier of an all_reduce, an all_gather of different
        sizes of broadcasts, a first message of the creation of its communicator) is one operation.
        """
        if not len(records):
            return records, (records, records)
        rows = records[np.argsort(self.key(records), kind="stable")]
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

    def process(self) -> int:
        pids = self.num("pid", np.concatenate([self.rows(Kind.RECORD), self.rows(Kind.CALL)]))
        found, count = np.unique(pids[pids != NULL], return_counts=True)
        return int(found[np.argmax(count)]) if len(found) else NULL

    def in_order(self, rows: Longs) -> Longs:
        return rows[np.lexsort((self.num("external id", rows), self.end[rows], self.ts[rows]))]

    def window(self) -> tuple[int, int] | None:
        marks = np.concatenate([self.rows(Kind.WINDOW), self.rows(Kind.END)])
        seen = marks if len(marks) else np.flatnonzero(self.kind != Kind.NOTHING)
        if not len(seen):
            return None
        return int(self.ts[seen].min()), int(self.end[seen].max())

    def key(self, rows: Longs) -> Longs:
        """(thread, place in it) as one number that sorts: by the profiler's counter, else time."""
        number = self.num("record function id", rows)
        when = number if self.counted else self.ts[rows] - self.low
        thread = np.searchsorted(self.thread_names, self.num("tid", rows))
        return thread.astype(np.int64) * (1 << 48) + np.clip(when, 0, (1 << 48) - 1)

    def inside(self, inner: Longs, outer: Longs) -> tuple[Longs, Longs]:
        """(first of ``inner`` inside each of ``outer``, the outer of each inner); -1: none."""
        first = np.full(len(outer), -1, np.int64)
        owner = np.full(len(inner), -1, np.int64)
        if not len(inner) or not len(outer):
            return first, owner
        key = self.key(outer)
        order = np.argsort(key, kind="stable")
        at = np.searchsorted(key[order], self.key(inner), side="right") - 1
        own = order[np.maximum(at, 0)]
        # a clock of microseconds rounds
        fits = (
            (at >= 0)
            & (self.num("tid", outer[own]) == self.num("tid", inner))
            & (self.ts[inner] <= self.end[outer[own]])
            & (self.end[inner] <= self.end[outer[own]] + _ROUNDING_NS)
        )
        owner[fits] = own[fits]
        rows = np.flatnonzero(fits)[::-1]
        first[owner[rows]] = rows
        return first, owner
