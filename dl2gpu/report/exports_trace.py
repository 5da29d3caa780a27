"""A finding's neighbourhood in the trace event format of Chrome, which Perfetto opens.

A process a rank, a thread a host lane or a stream; an operation is a slice, a matched message is a
flow from the send to the receive, and what a place of the circle waits for is a flow as well.
Source: "Trace Event Format" (the JSON array form with complete, flow, instant and metadata events).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from dl2gpu.report.graph_model import details_of
from dl2gpu.report.graph_timeline import STATUS, Event, events_of
from dl2gpu.report.words import call_site, safe

__all__ = ["perfetto"]

_STEP_US: Final = 1000.0  # of an operation whose times are not known
_LEAST_US: Final = 1.0
_STREAMS: Final = 1000  # numbers of threads that are streams begin here

_COLOURS: Final = {"stands": "terrible", "pending": "bad", "later": "grey", "done": "good"}

Row = dict[str, Any]


def perfetto(f: Mapping[str, Any], label: str) -> str:
    """JSON for https://ui.perfetto.dev or chrome://tracing; without a timeline it has no slices."""
    details = details_of(f)
    events, texts, base = events_of(details)
    slices = _times(events)
    rows = [*_names(events, texts, f), *_slices(events, texts, slices)]
    rows += _messages(events, texts, slices)
    rows += _waits(f, events, texts, slices)
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


def _thread(e: Event) -> int:
    return e.lane if e.stream is None else _STREAMS + e.stream


def _names(events: Sequence[Event], texts: Sequence[str], f: Mapping[str, Any]) -> Iterator[Row]:
    """Names of processes and threads."""
    blamed = set(f["culprits"] or ())
    for rank in sorted({e.rank for e in events}):
        mark = " (named as a cause)" if rank in blamed else ""
        yield _meta("process_name", rank, 0, {"name": f"rank {rank}{mark}"})
        yield _meta("process_sort_index", rank, 0, {"sort_index": rank})
    for rank, thread in sorted({(e.rank, _thread(e)) for e in events}):
        stream = thread >= _STREAMS
        name = f"stream {texts[thread - _STREAMS]}" if stream else f"host {thread}"
        yield _meta("thread_name", rank, thread, {"name": name})


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


def _slices(
    events: Sequence[Event], texts: Sequence[str], slices: Sequence[tuple[float, float]]
) -> Iterator[Row]:
    for e, (start, duration) in zip(events, slices, strict=True):
        status = STATUS[e.status] if 0 <= e.status < len(STATUS) else "done"
        if status == "later":
            continue  # it never began
        op = texts[e.op] if e.op is not None else "operation"
        ordinal = f" #{e.ordinal}" if e.ordinal is not None else ""
        args: Row = {"position": e.seq, "state": status}
        for key in ("comm", "site"):
            value = getattr(e, key)
            if value is not None:
                text = texts[value]
                args[key] = (call_site([text]) or text) if key == "site" else text
        if e.peer is not None:
            args["peer"] = e.peer
        yield {
            "ph": "X", "name": f"{op}{ordinal}{' (stands here)' if status == 'stands' else ''}",
            "cat": status, "pid": e.rank, "tid": _thread(e), "ts": start, "dur": duration,
            "cname": _COLOURS[status], "args": args,
        }  # fmt: skip


def _messages(
    events: Sequence[Event], texts: Sequence[str], slices: Sequence[tuple[float, float]]
) -> Iterator[Row]:
    """Flows of what met: from a send to its receive, along the ranks of a collective."""
    met: dict[int, list[int]] = {}
    for i, e in enumerate(events):
        if e.node is not None and e.status != 3:
            met.setdefault(e.node, []).append(i)
    for node, members in sorted(met.items()):
        if len(members) < 2:
            continue
        names = {texts[events[i].op] if events[i].op is not None else "" for i in members}  # type: ignore[index]
        message = names == {"send", "recv"}
        ordered = sorted(
            members,
            key=lambda i: (message and texts[events[i].op or 0] != "send", events[i].rank),
        )
        kind = "message" if message else "collective"
        yield from _flow(kind, f"m{node}", [(events[i], slices[i]) for i in ordered])


def _waits(
    f: Mapping[str, Any],
    events: Sequence[Event],
    texts: Sequence[str],
    slices: Sequence[tuple[float, float]],
) -> Iterator[Row]:
    """The circle: a flow from each of its places to the next, and a mark where it stands."""
    cycle = f["cycle"] or []
    at = {
        (e.rank, e.seq, texts[e.op] if e.op is not None else ""): (e, s)
        for e, s in zip(events, slices, strict=True)
    }
    stands = [at.get((c["rank"], c["seq"], c["op"])) for c in cycle]
    for i, (step, here) in enumerate(zip(cycle, stands, strict=True)):
        if here is None:
            continue
        e, (start, duration) = here
        needs = ", ".join(map(str, step["waits_for"] or ()))
        yield {
            "ph": "i", "s": "t", "name": f"waits for rank {needs}", "cat": "cycle", "pid": e.rank,
            "tid": _thread(e), "ts": start + duration / 2,
        }  # fmt: skip
        following = stands[(i + 1) % len(stands)]
        if following is not None and following is not here:
            yield from _flow("cycle: waits for", f"c{i}", [here, following])


def _flow(
    kind: str, ident: str, stops: Sequence[tuple[Event, tuple[float, float]]]
) -> Iterator[Row]:
    for i, (e, (start, duration)) in enumerate(stops):
        last = i == len(stops) - 1
        phase = "s" if i == 0 else "f" if last else "t"
        row = {
            "ph": phase, "name": kind, "cat": kind.partition(":")[0], "id": ident, "pid": e.rank,
            "tid": _thread(e), "ts": start + min(duration / 2, _LEAST_US / 2),
        }  # fmt: skip
        yield row | ({"bp": "e"} if last else {})
