"""What a finding needs for its pictures: who waits for whom around it, and what ranks did there.

Both are small whatever the size of the job. Of the wait-for graph, places that stand in the same
operation are one group; of the ranks, a few that stand for the others are shown. Names are written
once, in ``texts``, and everything else is integers.

``graph``::

    texts   [text, ...]
    groups  [{role, ranks, count, place, waits, op, comm, ordinal, seq, site, fate, stream}, ...]
    edges   [[group, group], ...]        the first waits for the second
    inferred, places

``role`` is "cycle" (a place of the circle, in its order), "root" (what is waited for in the end)
or "waits"; ``ranks`` holds spans [first, last], ``count`` how many ranks those and those left out
are; ``op``, ``comm``, ``site`` and ``stream`` are positions in ``texts``; with ``waits`` it stands
in a wait for the operation. ``places`` is how many places were folded into the groups.

``timeline``::

    texts, base_ns
    fields  names of the columns of a row
    events  [[rank, lane, seq, op, comm, ordinal, site, peer, stream, status, node, created, ...]]
    alike   {rank: how many ranks the finding names that are not shown and hang where it does}

Times are nanoseconds after ``base_ns`` by the clock of the rank's own host; ``status`` is a
position in :data:`STATUS`; events of one ``node`` met in one operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.fingerprint import fingerprint
from dl2gpu.analysis.names import Names
from dl2gpu.analysis.replay import Program
from dl2gpu.analysis.roots import Cause
from dl2gpu.analysis.waitfor import Graph, is_place
from dl2gpu.text import user_frame
from dl2gpu.trace.schema import OP

__all__ = ["FIELDS", "STATUS", "pictured", "timeline"]

Array = npt.NDArray[Any]

STATUS: Final = ("done", "stands", "pending", "not_reached")
"""Of an event: complete; where its rank stands; issued and not complete; not issued."""

FIELDS: Final = (
    "rank", "lane", "seq", "op", "comm", "ordinal", "site", "peer", "stream", "status", "node",
    "created", "started", "completed",
)  # fmt: skip

_CYCLE: Final = 16  # places of a circle that are groups of their own
_GROUPS: Final = 24  # groups of places that wait
_SPANS: Final = 8  # runs of ranks listed of a group
_EDGES: Final = 256
_DEPTH: Final = 16  # operations between one place and the next

_RANKS: Final = 8  # ranks of a timeline
_FEW: Final = 4  # at least so many, even if they are alike
_EVENTS: Final = 16  # events of a rank
_BEFORE, _AFTER = 5, 2  # events around where a rank hangs
_AROUND: Final = 2  # events before and after where the sequences part


class _Texts:
    """Each text once; its number in order of first sight."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}

    def __call__(self, text: str | None) -> int | None:
        return self._number.setdefault(text, len(self._number)) if text else None

    @property
    def all(self) -> list[str]:
        return list(self._number)


# --------------------------------------------------------------------------------------------------
# The wait-for graph


def pictured(names: Names, findings: Iterable[Finding]) -> list[Finding]:
    """The findings with ``details["graph"]``, and without the graph that they were made from.

    The same fault in several places of a job has one picture: that of the first.
    """
    index: dict[int, _Edges] = {}
    seen: set[tuple[object, ...]] = set()
    out = []
    for f in findings:
        if f.origin is None:
            out.append(f)
            continue
        g, cause = f.origin
        f = replace(f, origin=None)
        key = (f.job, f.kind, f.evidence, fingerprint(f), f.condition)
        if key not in seen:
            seen.add(key)
            if id(g) not in index:
                index[id(g)] = _Edges.of(names, g)
            f = replace(f, details=f.details | {"graph": _graph(names, index[id(g)], cause, f)})
        out.append(f)
    return out


@dataclass(frozen=True)
class _Edges:
    """The edges of a graph by either end: int64[edges] in order, and where each vertex begins."""

    names: Names
    g: Graph
    out_at: Array
    out: Array
    in_at: Array
    into: Array

    @cached_property
    def rank_number(self) -> Array:
        """The global number of each rank row."""
        out: Array = self.g.program.matching.prepared.ranks["rank"].to_numpy()
        return out

    @cached_property
    def kinds(self) -> Array:
        """int64[comms]: what each communicator is for; one element where there is none."""
        kinds: Array = self.names.comm_kinds
        return kinds if len(kinds) else np.zeros(1, np.int64)

    @staticmethod
    def of(names: Names, g: Graph) -> _Edges:
        ends = np.arange(g.size + 1)
        by_src, by_dst = np.argsort(g.src, kind="stable"), np.argsort(g.dst, kind="stable")
        return _Edges(
            names,
            g,
            np.searchsorted(g.src[by_src], ends),
            g.dst[by_src],
            np.searchsorted(g.dst[by_dst], ends),
            g.src[by_dst],
        )


def _next(at: Array, item: Array, vertices: Array) -> tuple[Array, Array]:
    """(position in ``vertices``, neighbour) of all their edges."""
    width = at[vertices + 1] - at[vertices]
    offset = np.arange(int(width.sum())) - np.repeat(np.cumsum(width) - width, width)
    return (
        np.repeat(np.arange(len(vertices)), width),
        item[np.repeat(at[vertices], width) + offset],
    )


def _lead(e: _Edges, seeds: Array) -> Array:
    """All vertices that lead into ``seeds``, those among them, sorted."""
    seen = np.unique(seeds)
    front = seen
    while len(front):
        front = np.setdiff1d(_next(e.in_at, e.into, front)[1], seen)
        seen = np.union1d(seen, front)
    return seen


def _graph(names: Names, e: _Edges, cause: Cause, f: Finding) -> dict[str, Any]:
    lead = _lead(e, cause.vertices)
    places = _places(names, e, lead[is_place(e.g, lead) & e.g.stuck[lead]], f)
    texts = _Texts()
    _number_groups(e, places)
    groups = _grouped(names, places, texts)
    roots = [_root(names, e.g, cause, texts)] if cause.kind != "cycle" else []
    edges = _edges(e, lead, places, cause.vertices if roots else None, len(groups))
    return {
        "texts": texts.all,
        "groups": groups + roots,
        "edges": edges[:_EDGES].tolist(),
        "inferred": cause.inferred,
        "places": len(places["vertex"]),
    }


Places = dict[str, Array]
"""Columns of places, a row a place."""


def _places(names: Names, e: _Edges, vertices: Array, f: Finding) -> Places:
    """One row a place: vertex, rank, where it stands, its step of the circle (-1: none).

    A place that stands in a wait is shown with the operation that it waits for, where that is one
    of its own rank and occupies no stream.

    Of a rank that stands at several places only one is kept beside those on the circle (others are
    ``folded``): where it waits for its own device, what the device stands in. ``lead`` is the row
    of the place that stands for the rank.
    """
    g, lay = e.g, e.g.fix.layout
    row = np.zeros(len(vertices), np.int64)
    heads = np.zeros(len(vertices), np.int64)
    host = vertices < g.queue0
    queue = (vertices >= g.queue0) & (vertices < g.node0)
    silent = vertices >= g.rank0
    row[host], heads[host] = lay.lane_rank[vertices[host]], g.fix.lane_at[vertices[host]]
    at = vertices[queue] - g.queue0
    row[queue], heads[queue] = lay.queue_rank[at], g.fix.queue_at[at]
    at = vertices[silent] - g.rank0
    row[silent], heads[silent] = at, g.silent_at[at]
    event = _needed(names, e, vertices, heads)
    stack = names.column("stack")[event].astype(np.int64)
    sites = names.sites
    p: Places = {
        "vertex": vertices,
        "event": event,
        "rank": e.rank_number[row].astype(np.int64),
        "stream": queue.astype(np.int64),
        "seq": names.column("seq")[heads].astype(np.int64),
        "waits": (event != heads).astype(np.int64),
        "site": np.where(stack >= 0, sites[np.maximum(stack, 0)] if len(sites) else 0, -1),
    }
    p |= {c: names.column(c)[event].astype(np.int64) for c in ("op", "comm", "k")}
    p["step"] = step = _steps(f, p)
    # of a rank, first what is on the circle, then what is no mere wait
    order = np.lexsort((vertices, event, p["op"] == OP["wait"], step < 0))
    _, first, of_rank = np.unique(p["rank"][order], return_index=True, return_inverse=True)
    p["lead"] = np.empty(len(vertices), np.int64)
    p["lead"][order] = order[first][of_rank]
    p["folded"] = (step < 0) & (event != event[p["lead"]])
    return p


def _steps(f: Finding, p: Places) -> Array:
    """int64: which step of the finding's circle each place is; -1: none."""
    out = np.full(len(p["vertex"]), -1, np.int64)
    if f.cycle:
        number: dict[tuple[int, int, int], int] = {}
        for i, s in enumerate(f.cycle):
            number.setdefault((s["rank"], int(s["place"] == "stream"), s["seq"]), i)
        on = np.flatnonzero(np.isin(p["rank"], [s["rank"] for s in f.cycle]))
        keys = zip(*(p[c][on].tolist() for c in ("rank", "stream", "seq")), strict=True)
        out[on] = [number.get(key, -1) for key in keys]
    return out


def _needed(names: Names, e: _Edges, vertices: Array, heads: Array) -> Array:
    """The event of each head; of a wait, the first event of its rank that it still needs."""
    g, k = e.g, e.g.program.kernel
    waits = np.flatnonzero(names.column("op")[heads] == OP["wait"])
    x, to = _next(e.out_at, e.out, vertices[waits])
    node = (to >= g.node0) & (to < g.rank0)
    x, to = waits[x[node]], to[node] - g.node0
    at, part = _next(k["node_start"], k["node_part"], to)
    x, part = x[at], part >> 1
    rank = names.column("rank")
    own = rank[part] == rank[heads[x]]
    out = heads.copy()
    if own.any():
        order = np.lexsort((part[own], x[own]))
        owner, first = np.unique(x[own][order], return_index=True)
        out[owner] = part[own][order][first]
    return out


def _number_groups(e: _Edges, p: Places) -> None:
    """Adds ``group``, and ``others``: places of the group of what is too rare for one of its own.

    The places of the circle come first, in its order; the middle of a long one is one group. Those
    off the circle are grouped by where they stand, or, if that makes too many, by what kind of
    place that is; the rarest of those are one group.
    """
    own = p["step"].copy()
    last = int(own.max(initial=-1))
    if last >= _CYCLE:
        head, tail = _CYCLE // 2, last - _CYCLE // 2 + 1
        own[(own >= head) & (own <= tail)] = head
    steps = np.unique(own[own >= 0])
    group = np.searchsorted(steps, own)
    free = (own < 0) & ~p["folded"]
    columns = [p[c][free] for c in ("stream", "waits", "op", "site", "comm", "k")]
    of = _alike(columns)
    if of.max(initial=-1) >= _GROUPS:
        comm = columns[4]
        of = _alike([*columns[:4], np.where(comm >= 0, e.kinds[comm], -1)])
    ranks = p["rank"][free]
    many = int(of.max(initial=-1)) + 1
    lowest = np.full(many, np.iinfo(np.int64).max)
    np.minimum.at(lowest, of, ranks)
    # a rank is in one of these groups only: no two have the same lowest rank
    pairs = np.unique(np.stack([of, ranks]), axis=1)
    size = np.bincount(pairs[0], minlength=many)
    number = np.empty(many, np.int64)
    number[np.lexsort((lowest, -size))] = np.arange(many)
    group[free] = len(steps) + np.minimum(number, _GROUPS)[of]
    p["others"] = np.zeros(len(own), np.bool_)
    p["others"][free] = number[of] >= _GROUPS
    # a place that is folded goes with the others of its rank
    p["group"] = np.where(p["folded"], group[p["lead"]], group)


def _alike(columns: Sequence[Array]) -> Array:
    """int64: a number for each row; rows that agree in all columns have the same."""
    out = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values = np.unique(column, return_inverse=True)[1]
        out = np.unique(out * (int(values.max(initial=0)) + 1) + values, return_inverse=True)[1]
    return out.astype(np.int64)


def _grouped(names: Names, p: Places, texts: _Texts) -> list[dict[str, Any]]:
    shown = np.flatnonzero(~p["folded"])
    shown = shown[np.lexsort(tuple(p[c][shown] for c in ("vertex", "event", "rank", "group")))]
    cuts = np.flatnonzero(np.diff(p["group"][shown])) + 1
    return [_group(names, p, rows, texts) for rows in np.split(shown, cuts) if len(rows)]


def _group(names: Names, p: Places, rows: Array, texts: _Texts) -> dict[str, Any]:
    """One group of places: what all of them have in common, and the ranks."""
    first = rows[0]
    e = int(p["event"][first])
    others = bool(p["others"][first])
    same = {
        c: bool((p[c][rows] == p[c][first]).all()) for c in ("stream", "op", "comm", "k", "site")
    }
    on_stream = bool(p["stream"][first])
    out: dict[str, Any] = {
        "role": "cycle" if p["step"][first] >= 0 else "waits",
        **_ranks(p["rank"][rows]),
    }
    if not others and same["stream"]:
        out["place"] = "stream" if on_stream else "host"
    if not others and p["waits"][rows].all():
        out["waits"] = 1
    if not others and same["op"]:
        out["op"] = texts(names.op(e))
    if same["comm"]:
        out["comm"] = texts(names.label(e))
    if same["comm"] and same["k"] and p["k"][first] >= 0 and names.comm(e) is not None:
        out["ordinal"] = int(p["k"][first])
    if len(rows) == 1:
        out["seq"] = int(p["seq"][first])
        stream = int(names.column("stream")[e])
        out["stream"] = texts(names.text(stream)) if on_stream else None
    if not others and same["site"]:
        out["site"] = texts(names.site(e))
    return {k: v for k, v in out.items() if v is not None}


def _ranks(ranks: Array | Sequence[int]) -> dict[str, Any]:
    """``ranks`` as the first spans, and how many there are."""
    numbers = np.unique(np.asarray(ranks, dtype=np.int64))
    ends = np.flatnonzero(np.diff(numbers) != 1)
    first = numbers[np.concatenate([[0], ends + 1])] if len(numbers) else numbers
    last = numbers[np.concatenate([ends, [len(numbers) - 1]])] if len(numbers) else numbers
    spans = [[int(a), int(b)] for a, b in zip(first[:_SPANS], last[:_SPANS], strict=True)]
    return {"ranks": spans, "count": len(numbers)}


def _root(names: Names, g: Graph, cause: Cause, texts: _Texts) -> dict[str, Any]:
    """What is waited for in the end: ranks that do not come, or an operation that cannot be."""
    out: dict[str, Any] = {"role": "root", "fate": cause.kind, **_ranks(cause.ranks)}
    if len(cause.nodes) == 1:
        k = g.program.kernel
        node = int(cause.nodes[0])
        parts = k["node_part"][k["node_start"][node] : k["node_start"][node + 1]] >> 1
        if len(parts):
            e = int(parts.min())
            out["op"] = None if cause.kind == "mismatch" else texts(names.op(e))
            out["comm"] = texts(names.label(e))
            out["ordinal"] = int(names.column("k")[e])
    return {k: v for k, v in out.items() if v is not None and v != -1}


def _edges(e: _Edges, lead: Array, p: Places, root: Array | None, number: int) -> Array:
    """int64[n, 2], sorted: groups that wait for groups, through operations and ranks.

    ``root``: vertices of the root, which is the group ``number``.
    """
    # by position in ``lead``, which is sorted and holds all places and the root
    group = np.full(len(lead), -1, np.int64)
    group[np.searchsorted(lead, p["vertex"])] = p["group"]
    final = group.copy()
    if root is not None:
        final[np.searchsorted(lead, root)] = number
    start = np.flatnonzero(group >= 0)
    pairs = np.stack([group[start], start], axis=1)
    seen = pairs[:0]
    found = [pairs[:0]]
    for _ in range(_DEPTH):
        x, vertex = _next(e.out_at, e.out, lead[pairs[:, 1]])
        owner = pairs[x, 0]
        to = np.minimum(np.searchsorted(lead, vertex), len(lead) - 1)
        inside = lead[to] == vertex
        owner, to = owner[inside], to[inside]
        at = final[to]
        ends = at >= 0
        found.append(np.stack([owner[ends], at[ends]], axis=1))
        pairs = np.unique(np.stack([owner[~ends], to[~ends]], axis=1), axis=0)
        pairs = _fresh(pairs, seen)
        if not len(pairs):
            break
        seen = np.concatenate([seen, pairs])
    edges = np.unique(np.concatenate(found), axis=0)
    out: Array = edges[edges[:, 0] != edges[:, 1]]
    return out


def _fresh(pairs: Array, seen: Array) -> Array:
    """The rows of ``pairs`` that are not in ``seen``."""
    key = [p[:, 0] << 40 | p[:, 1] for p in (pairs, seen)]
    out: Array = pairs[~np.isin(key[0], key[1])]
    return out


# --------------------------------------------------------------------------------------------------
# The timeline


def timeline(
    p: Program, names: Names, f: Finding, issued: Array, completed: Array
) -> dict[str, Any] | None:
    """Operations of a few ranks around the first divergence and the hang; None: no operation.

    ``issued``, ``completed`` bool[n]: how far the replay got.
    """
    lo, hi = int(p.job_event[f.job]), int(p.job_event[f.job + 1])
    stands = _by_rank((*f.hangs_at, *f.cycle))
    shown, alike = _shown(f)
    parted = _parted(names, lo, hi, f)
    rank_of = names.column("rank")[lo:hi]
    op, seq, node = (names.column(c) for c in ("op", "seq", "node"))
    events: list[int] = []
    at: set[int] = set()
    for rank in shown:
        a, b = lo + np.searchsorted(rank_of, np.array([rank, rank + 1], dtype=rank_of.dtype))
        rows = a + np.flatnonzero((op[a:b] != OP["wait"]) | ~completed[a:b])
        if not len(rows):
            continue
        here = stands.get(rank, set())
        hangs = [int(e) for e in rows if (int(seq[e]), names.op(int(e))) in here] if here else []
        at.update(hangs)
        if not hangs:  # it came, went on or ended: what it did last
            hangs = rows[issued[rows]][-1:].tolist() or rows[:1].tolist()
        away = [e for e in parted if a <= e < b]
        if not away and parted and node[parted[0]] >= 0:
            away = rows[node[rows] == node[parted[0]]][:1].tolist()
        events += _window(rows, hangs[:4], away)
    if not events:
        return None
    return _rows(names, events, at, issued, completed) | {"alike": alike}


def _window(rows: Array, hangs: list[int], away: list[int]) -> list[int]:
    """Of the rows of a rank those around where it hangs and where it departed, at most so many."""
    wanted: dict[int, None] = {}
    for e, before, after in (
        *((e, 0, 0) for e in (*hangs, *away)),
        *((e, _AROUND, _AROUND) for e in away),
        *((e, _BEFORE, _AFTER) for e in hangs),
    ):
        x = int(np.searchsorted(rows, e))
        near = rows[max(x - before, 0) : x + after + 1].tolist()
        wanted |= dict.fromkeys(sorted(near, key=lambda r: abs(r - e)))
    return sorted(list(wanted)[:_EVENTS])


def _by_rank(steps: Iterable[dict[str, Any]]) -> dict[int, set[tuple[int, str]]]:
    out: dict[int, set[tuple[int, str]]] = {}
    for s in steps:
        out.setdefault(s["rank"], set()).add((s["seq"], s["op"]))
    return out


def _shown(f: Finding) -> tuple[list[int], dict[str, int]]:
    """Ranks that stand for all that the finding names, and how many more each stands for."""
    first: dict[tuple[object, ...], list[int]] = {}
    for h in f.hangs_at:
        key = (h["op"], h["comm"], h["ordinal"], user_frame(h["stack"]))
        first.setdefault(key, []).append(h["rank"])
    departed = f.details.get("divergence", {})
    sides = [departed.get(side, {}).get("rank") for side in ("found", "expected")]
    named = [
        *f.culprits[:3],
        *f.details.get("missing_ranks", ())[:3],
        *(s["rank"] for s in f.cycle[:4]),
        *([f.first_divergence["rank"]] if f.first_divergence else []),
        *(r for r in sides if r is not None),
        *(ranks[0] for ranks in first.values()),
        *(ranks[1] for ranks in first.values() if len(ranks) > 1),
    ]
    everyone = list(dict.fromkeys([*named, *f.culprits, *f.victims]))
    most = _RANKS if len(everyone) <= _RANKS else max(_FEW, len(dict.fromkeys(named)))
    shown = sorted(everyone[: min(most, _RANKS)])
    alike = {}
    for ranks in first.values():
        here = [r for r in ranks if r in shown]
        rest = len(set(ranks) - set(shown))
        if here and rest:
            alike[str(here[-1])] = rest
    return shown, alike


def _parted(names: Names, lo: int, hi: int, f: Finding) -> list[int]:
    """Events at which the sequences part, that of the finding first."""
    departed = f.details.get("divergence", {})
    out: list[int] = []
    rank_of, seq, op = (names.column(c)[lo:hi] for c in ("rank", "seq", "op"))
    for d in (f.first_divergence, departed.get("found"), departed.get("expected")):
        if d and d.get("rank") is not None and d.get("seq") is not None:
            a, b = np.searchsorted(rank_of, np.array([d["rank"], d["rank"] + 1], rank_of.dtype))
            hits = np.flatnonzero((seq[a:b] == d["seq"]) & (op[a:b] != OP["wait"]))
            out += [lo + int(a) + int(x) for x in hits[:1]]
    return list(dict.fromkeys(out))


def _rows(
    names: Names, events: list[int], at: set[int], issued: Array, completed: Array
) -> dict[str, Any]:
    texts = _Texts()
    named = ("rank", "lane", "seq", "k", "peer", "stream", "node")
    columns = {c: names.column(c)[events].tolist() for c in named}
    times = [names.column(c)[events] for c in ("t_created", "t_started", "t_completed")]
    known = np.concatenate([t[t > 0] for t in times])
    base = int(known.min()) if len(known) else None
    number = {n: i for i, n in enumerate(dict.fromkeys(n for n in columns["node"] if n >= 0))}
    rows = []
    for x, e in enumerate(events):
        value = {c: values[x] for c, values in columns.items()}
        comm = names.label(e)
        if e in at:
            status = 1
        elif completed[e]:
            status = 0
        else:
            status = 2 if issued[e] else 3
        rows.append(
            [
                value["rank"], value["lane"], value["seq"], texts(names.op(e)), texts(comm),
                value["k"] if comm is not None and value["k"] >= 0 else None,
                texts(names.site(e)), value["peer"] if value["peer"] >= 0 else None,
                texts(names.text(value["stream"])), status, number.get(value["node"]),
                *(int(t[x]) - base if base is not None and t[x] > 0 else None for t in times),
            ]
        )  # fmt: skip
    return {"texts": texts.all, "base_ns": base, "fields": list(FIELDS), "events": rows}
