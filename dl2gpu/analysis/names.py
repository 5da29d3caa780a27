"""Names at the edges: what an event is called in a report.

The analysis works on integers; a finding shows operations, communicators and call sites. Only the
few events that a finding names are looked up.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from dl2gpu.analysis.matching import Matching
from dl2gpu.text import user_frame
from dl2gpu.trace.schema import ANY, STATE, dtype_name, op_name

__all__ = ["Names"]


class Names:
    """Looks up the names of events of one matched trace."""

    def __init__(self, m: Matching) -> None:
        self._m = m
        self.strings: list[str] = m.prepared.trace.strings.sort("code")["text"].to_list()
        self._columns: dict[str, Any] = {}

    def column(self, name: str) -> Any:
        """The values of an event column as a NumPy array; nulls are -1."""
        if name not in self._columns:
            series = self._m.events[name]
            self._columns[name] = (
                series.fill_null(-1).to_numpy() if series.null_count() else series.to_numpy()
            )
        return self._columns[name]

    @cached_property
    def frames(self) -> list[list[str]]:
        return self._m.prepared.trace.stacks.sort("stack")["frames"].to_list()

    @cached_property
    def comm_ids(self) -> list[str]:
        return self._m.prepared.comms.sort("comm")["id"].to_list()

    @cached_property
    def comm_kinds(self) -> Any:
        """int64[comms]: number of what a communicator is for, the same for all of its siblings."""
        said = (pl.col(c).replace(["", "undefined"], None) for c in ("desc", "name", "id"))
        text = pl.coalesce(said).fill_null("")
        nameless = text.str.contains(r"^(?:[0-9a-f]{8,}|\d+)$")
        kind = pl.when(nameless).then(pl.lit("")).otherwise(text.str.replace_all(r"\d+", ""))
        comms = self._m.prepared.comms.sort("comm")
        return comms.select(kind.rank("dense").cast(pl.Int64)).to_series().to_numpy()

    @cached_property
    def sites(self) -> Any:
        """int64[stacks]: number of the call site of each stack, the innermost frame of the user."""
        numbers: dict[str, int] = {}
        return np.array(
            [numbers.setdefault(user_frame(f), len(numbers)) for f in self.frames], dtype=np.int64
        )

    def site(self, event: int) -> str:
        stack = int(self.column("stack")[event])
        return user_frame(self.frames[stack]) if stack >= 0 else ""

    def op(self, event: int) -> str:
        return op_name(int(self.column("op")[event]), self.strings)

    def comm(self, event: int) -> str | None:
        comm = int(self.column("comm")[event])
        return self.comm_ids[comm] if comm >= 0 else None

    def label(self, event: int) -> str | None:
        """The communicator for people: its description beside a mere number or hash."""
        comm = int(self.column("comm")[event])
        if comm < 0:
            return None
        ident, kind = self.comm_ids[comm], self._descriptions[comm]
        return f"{kind} ({ident})" if kind and kind != ident else ident

    @cached_property
    def _descriptions(self) -> list[str]:
        comms = self._m.prepared.comms.sort("comm")
        return [d if d and d != "undefined" else "" for d in comms["desc"].fill_null("")]

    def dtype(self, event: int) -> str | None:
        code = int(self.column("dtype")[event])
        return dtype_name(code, self.strings) if code >= 0 else None

    def text(self, code: int) -> str | None:
        return self.strings[code] if code >= 0 else None

    def operation(self, event: int) -> dict[str, Any]:
        """The event as the report shows an operation."""
        stack = int(self.column("stack")[event])
        ordinal = int(self.column("k")[event])
        return {
            "rank": int(self.column("rank")[event]),
            "seq": int(self.column("seq")[event]),
            "op": self.op(event),
            "comm": self.comm(event),
            "label": self.label(event),
            "ordinal": ordinal if ordinal >= 0 else None,
            "stack": self.frames[stack] if stack >= 0 else [],
        }

    def last_operations(
        self, lo: int, hi: int, ranks: list[int], issued: Any, count: int
    ) -> dict[str, list[dict[str, Any]]]:
        """Rank (as text) to the ``count`` operations it issued last, newest last.

        ``lo``, ``hi``: the rows of the job.
        """
        rank_of = self.column("rank")[lo:hi]
        out: dict[str, list[dict[str, Any]]] = {}
        for rank in ranks:
            a, b = lo + np.searchsorted(rank_of, np.array([rank, rank + 1], dtype=rank_of.dtype))
            events = a + np.flatnonzero(issued[a:b])[-count:]
            out[str(rank)] = [self.operation(int(e)) | self._state(int(e)) for e in events]
        return out

    def _state(self, event: int) -> dict[str, str]:
        """The recorded state, where there is one."""
        code = int(self.column("state")[event])
        names = [name for name, number in STATE.items() if number == code]
        return {"state": names[0]} if code else {}

    def signature(self, event: int) -> dict[str, Any]:
        """Operation, size, type, root, peer: what participants have to agree on, where known."""
        out: dict[str, Any] = {"op": self.op(event)}
        for key in ("count", "bytes", "root"):
            value = int(self.column(key)[event])
            if value >= 0:
                out[key] = value
        if (dtype := self.dtype(event)) is not None:
            out["dtype"] = dtype
        if (reduce_op := self.text(int(self.column("reduce_op")[event]))) is not None:
            out["reduce_op"] = reduce_op
        peer = self._m.events["peer"][event]
        if peer is not None:
            out["peer"] = "any" if peer == ANY else int(peer)
        new = int(self.column("new_comm")[event])
        if new >= 0:
            out["new_comm"] = self.comm_ids[new]
        if site := self.site(event):
            out["site"] = site
        return out
