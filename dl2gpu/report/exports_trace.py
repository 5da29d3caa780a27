"""A finding's neighbourhood in the trace event format of Chrome, which Perfetto opens.

A process a rank, a thread a host lane or a stream (several where operations overlap); an operation
is a slice, a matched message is a flow from the send to the receive, and what a place of the circle
waits for is a flow as well.
Source: "Trace Event Format" (the JSON array form with complete, flow, instant and metadata events).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dl2gpu.report.graph_model import details_of
from dl2gpu.report.graph_timeline import STATUS, Event, events_of
from dl2gpu.report.words import call_site, safe

__all__ = ["perfetto"]

_STEP_US: Final = 1000.0  # of an operation whose times are not known
_LEAST_US: Final = 1.0

_COLOURS: Final = {"stands": "terrible", "pending": "bad", "later": "grey", "done": "good"}

Row = dict[str, Any]


def perfetto(f: Mapping[str, Any], label: str) -> str:
    """JSON for https://ui.perfetto.dev or chrome://tracing; without a timeline it has no slices."""
    details = details_of(f)
    events, texts, base = events_of(details)
    slices, names = _placed(events, texts, _times(events))
    rows = [*_names(names, f), *_slices(slices, texts)]
    rows += _messages(slices, texts)
    rows += _waits(f, slices, texts)
    said = {
        "tool": "dl2gpu",
        "finding": safe(f["id"], 40),
        "job": label,
        "kind": f["kind"],
        "clock": "each rank's own host" if base is not None else "order only: no times recorded",
        "base_ns": base,
    }
    trace = {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": said}
    return msgspec.json.encode(trace).decode() + "\n"


@dataclass(frozen=True)
class _Slice:
    """An event on the thread ``tid`` of its rank, in microseconds."""

    event: Event
    tid: int
    start: float
    duration: float


def _placed(
    events: Sequence[Event], texts: Sequence[str], times: Sequence[tuple[float, float]]
) -> tuple[list[_Slice], dict[tuple[int, int], str]]:
    """The slices, and the names of their threads: one that overlaps goes to a thread of its own.

    Slices of one thread that overlap without one holding the other would be cut.
    """
    ends: dict[tuple[int, str], list[tuple[int, float]]] = {}
    names: dict[tuple[int, int], str] = {}
    out: list[_Slice | None] = [None] * len(events)
    for i in sorted(range(len(events)), key=lambda i: (events[i].rank, times[i][0], i)):
        e, (start, duration) = events[i], times[i]
        name = f"host {e.lane}" if e.stream is None else f"stream {texts[e.stream]}"
        tracks = ends.setdefault((e.rank, name), [])
        at = next((x for x, (_, end) in enumerate(tracks) if end <= start), len(tracks))
        if at == len(tracks):
            tid = sum(rank == e.rank for rank, _ in names)
            names[e.rank, tid] = name if not at else f"{name} ({at + 1})"
            tracks.append((tid, 0.0))
        tracks[at] = (tracks[at][0], start + duration)
        out[i] = _Slice(e, tracks[at][0], start, duration)
    return [s for s in out if s is not None], names


def _names(names: Mapping[tuple[int, int], str], f: Mapping[str, Any]) -> Iterator[Row]:
    """Names of processes and threads."""
    blamed = set(f["culprits"] or ())
    for rank in sorted({rank for rank, _ in names}):
        mark = " (named as a cause)" if rank in blamed else ""
        yield _meta("process_name", rank, 0, {"name": f"rank {rank}{mark}"})
        yield _meta("process_sort_index", rank, 0, {"sort_index": rank})
    for (rank, tid), name in sorted(names.items()):
        yield _meta("thread_name", rank, tid, {"name": name})


def _meta(name: str, pid: int, tid: int, args: Row) -> Row:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _times(events: Sequence[Event]) -> list[tuple[float, float]]:
    """(start, duration) of each event, in microseconds, in the order of its rank.

    What is not complete lasts to the end. Where times are not known each operation takes one step.
    """
    known = [t for e in events for t in (e.created, e.started, e.completed) if t is not None]
    if not known:
        step: dict[int, int] = {}
        starts = []
        for e in events:
            starts.append(step.get(e.rank, 0))
            step[e.rank] = starts[-1] + 1
        end = (max(starts, default=0) + 2) * _STEP_US
        return [
            (s * _STEP_US, _STEP_US * 0.9 if e.status == 0 else end - s * _STEP_US)
            for s, e in zip(starts, events, strict=True)
        ]
    end = max(known) / 1000 * 1.05 + _STEP_US
    out = []
    before: dict[int, float] = {}
    for e in events:
        first = next((t for t in (e.started, e.created) if t is not None), None)
        start = first / 1000 if first is not None else before.get(e.rank, 0.0) + _LEAST_US
        stop = e.completed / 1000 if e.completed is not None and e.status == 0 else None
        if stop is None:
            stop = start + _LEAST_US if e.status == 0 else end
        before[e.rank] = start
        out.append((start, max(stop - start, _LEAST_US)))
    return out


def _slices(slices: Sequence[_Slice], texts: Sequence[str]) -> Iterator[Row]:
    for s in slices:
        e = s.event
        status = STATUS[e.status] if 0 <= e.status < len(STATUS) else "done"
        if status == "later":
            continue  # it never began
        op = texts[e.op] if e.op is not None else "operation"
        ordinal = f" #{e.ordinal}" if e.ordinal is not None else ""
        args: Row = {"position": e.seq, "state": status}
        if e.comm is not None:
            args["comm"] = texts[e.comm]
        if e.site is not None:
            args["site"] = call_site([texts[e.site]]) or texts[e.site]
        if e.peer is not None:
            args["peer"] = e.peer
        yield {
            "ph": "X", "name": f"{op}{ordinal}{' (stands here)' if status == 'stands' else ''}",
            "cat": status, "pid": e.rank, "tid": s.tid, "ts": s.start, "dur": s.duration,
            "cname": _COLOURS[status], "args": args,
        }  # fmt: skip


def _messages(slices: Sequence[_Slice], texts: Sequence[str]) -> Iterator[Row]:
    """Flows of what met: from a send to its receive, along the ranks of a collective."""
    met: dict[int, list[_Slice]] = {}
    for s in slices:
        if s.event.node is not None and s.event.status != 3:
            met.setdefault(s.event.node, []).append(s)
    for node, members in sorted(met.items()):
        if len(members) < 2:
            continue
        ops = {_op(s, texts) for s in members}
        message = ops == {"send", "recv"}
        ordered = sorted(members, key=lambda s: (message and _op(s, texts) != "send", s.event.rank))
        yield from _flow("message" if message else "collective", f"m{node}", ordered)


def _op(s: _Slice, texts: Sequence[str]) -> str:
    return texts[s.event.op] if s.event.op is not None else ""


def _waits(f: Mapping[str, Any], slices: Sequence[_Slice], texts: Sequence[str]) -> Iterator[Row]:
    """The circle: a flow from each of its places to the next, and a mark where it stands."""
    cycle = f["cycle"] or []
    at = {(s.event.rank, s.event.seq, _op(s, texts)): s for s in slices if s.event.status != 3}
    stands = [at.get((c["rank"], c["seq"], c["op"])) for c in cycle]
    for i, (step, here) in enumerate(zip(cycle, stands, strict=True)):
        if here is None:
            continue
        needs = ", ".join(map(str, step["waits_for"] or ()))
        yield {
            "ph": "i", "s": "t", "name": f"waits for rank {needs}", "cat": "cycle",
            "pid": here.event.rank, "tid": here.tid, "ts": here.start + here.duration / 2,
        }  # fmt: skip
        following = stands[(i + 1) % len(stands)]
        if following is not None and following is not here:
            yield from _flow("cycle: waits for", f"c{i}", [here, following])


def _flow(kind: str, ident: str, stops: Sequence[_Slice]) -> Iterator[Row]:
    """Arrows from slice to slice: each stop lies within its slice."""
    for i, s in enumerate(stops):
        last = i == len(stops) - 1
        row = {
            "ph": "s" if i == 0 else "f" if last else "t", "name": kind,
            "cat": kind.partition(":")[0], "id": ident, "pid": s.event.rank, "tid": s.tid,
            "ts": s.start + min(s.duration / 2, _LEAST_US / 2),
        }  # fmt: skip
        yield row | ({"bp": "e"} if last else {})
