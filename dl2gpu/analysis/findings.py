"""From a cause to a finding: kind, culprits, victims, first divergence (DESIGN.md section 5).

Never convicts by majority alone, nor a rank merely for being behind: a minority is named where the
others agree with each other and it does not; ranks that are absent are named where their fate is
known or where more ranks wait for them than are absent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.analysis import observed
from dl2gpu.analysis.divergence import (
    Divergence,
    find_departure,
    find_divergence,
    odd_ones,
)
from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.names import Names
from dl2gpu.analysis.replay import Fixpoint, Program
from dl2gpu.analysis.roots import Cause
from dl2gpu.analysis.tables import KIND, ROLE
from dl2gpu.analysis.waitfor import Graph, is_place, stands_at
from dl2gpu.trace.schema import OP

__all__ = ["findings_of", "mismatch_at"]

Array = npt.NDArray[Any]


def findings_of(
    p: Program, names: Names, g: Graph, cause: Cause, evidence: str, stale: dict[int, set[int]]
) -> list[Finding]:
    """The finding of a cause; none where the evidence turns out to say nothing."""
    level = "inferred" if cause.inferred else evidence
    if cause.kind == "cycle":
        found: Finding | None = _cycle(p, names, g, cause, level)
    elif cause.kind == "mismatch":
        found = _mismatch(p, names, g, cause, level)
    else:
        found = _lacking(p, names, g, cause, level, stale)
    return [] if found is None else [replace(found, origin=(g, cause))]


def _parts(p: Program, node: int) -> Array:
    """Events of a node, sorted; probes only where nothing else is there."""
    k = p.kernel
    part = k["node_part"][k["node_start"][node] : k["node_start"][node + 1]]
    events = np.unique(part >> 1)
    real = k["role"][events] != ROLE["probe"]
    return events[real] if real.any() else events


def _here(p: Program, g: Graph, nodes: Array) -> list[int]:
    """Events that have come to the nodes and wait there, sorted by rank and position."""
    fix = g.fix
    out: list[int] = []
    for v in nodes:
        events = _parts(p, int(v))
        out += [int(e) for e in events if fix.started[e] and not fix.completed[e]]
    return sorted(set(out))


def _cycle(p: Program, names: Names, g: Graph, cause: Cause, level: str) -> Finding:
    steps = _cycle_places(p, names, g, cause)
    heads = [stands_at(g, int(v)) for v in cause.vertices[is_place(g, cause.vertices)]]
    op = names.column("op")
    real = [e for e in heads if op[e] != OP["wait"]]
    at = sorted(set(real) | set(_here(p, g, cause.nodes)))
    ops = {int(op[e]) for e in at}
    unpaired = _unpaired(p, g, cause) or _crossed_tags(p, cause)
    victims = tuple(sorted(set(cause.waiting) - set(cause.ranks)))
    base: dict[str, Any] = {
        "job": cause.job,
        "evidence": level,
        "cycle": steps,
        "hangs_at": tuple(names.operation(e) for e in at),
        "deadlocked": True,
    }
    if _aligned_by_guess(p, cause):
        everyone = tuple(sorted(set(cause.waiting) | set(cause.ranks)))
        return Finding(
            kind="insufficient_evidence", reason="lost_window", victims=everyone,
            **base | {"evidence": "inferred", "cycle": (), "deadlocked": None},
        )  # fmt: skip
    if unpaired:
        owners = _owners(p, names, unpaired)
        return Finding(
            kind="unmatched_p2p",
            culprits=owners,
            victims=tuple(sorted((set(cause.waiting) | set(cause.ranks)) - set(owners))),
            first_divergence=names.operation(unpaired[0]),
            reason="no_partner",
            details={"unmatched": [names.operation(e) | names.signature(e) for e in unpaired]},
            **base,
        )
    if OP["comm_create"] in ops:
        kind = "init_cycle"
    elif any(o >= OP["all_reduce"] for o in ops) and (
        len({int(names.column("comm")[e]) for e in at}) > 1 or any(o < OP["wait"] for o in ops)
    ):
        kind = "order_inversion"
    else:
        kind = "cycle"
    first = min(at, key=lambda e: (int(names.column("rank")[e]), e)) if at else None
    everyone = tuple(sorted(set(cause.waiting) | set(cause.ranks)))
    if (left := _left_out(p, names, g, cause)) is not None:
        return _departed(names, Finding(kind="", victims=everyone, **base), left)
    few = _minority(p, g, cause)
    if few and kind == "order_inversion":
        # the others stand where the program led all of them; these went to another group
        return Finding(
            kind="missing_participant",
            culprits=few,
            victims=tuple(sorted((set(cause.waiting) | set(cause.ranks)) - set(few))),
            first_divergence=names.operation(_first_of(names, at)),
            reason="other_group",
            details={"missing_ranks": list(few)},
            **base,
        )
    reason = (
        "host_blocked"
        if cause.inferred or any(s["place"] == "host" for s in steps)
        else "other_group"
    )
    return Finding(
        kind=kind,
        culprits=cause.ranks,
        victims=victims,
        first_divergence=names.operation(first) if first is not None else None,
        reason=reason,
        **base,
    )


def _aligned_by_guess(p: Program, cause: Cause) -> bool:
    """Does a circle rest on which send belongs to which receive, where that cannot be told?

    Of a channel of which a window is lost, open messages are aligned from the first that is there;
    if open ones are lost as well, the others are set against the wrong partners. A message that has
    no partner at all depends on no alignment.
    """
    nodes = p.matching.nodes[cause.nodes]
    both = nodes["present"] >= nodes["need"]
    return bool((nodes["cut"].fill_null(False) & (nodes["kind"] == KIND["message"]) & both).any())


_LOOKED_AT: Final = 256
"""Operations of one cause that are compared with what came before them."""


def _left_out(p: Program, names: Names, g: Graph, cause: Cause) -> Divergence | None:
    """A call that one rank left out long before: found at a node that lacks that rank alone."""
    nodes = p.matching.nodes
    for v in cause.nodes[:_LOOKED_AT]:
        if nodes["kind"][int(v)] == KIND["message"]:
            continue
        members = p.matching.prepared.comms["ranks"][int(nodes["comm"][int(v)])]
        there = {int(p.rank_of[e]) for e in _parts(p, int(v))}
        lacking = [int(r) for r in members if int(r) not in there]
        if len(lacking) != 1:
            continue
        found = find_departure(p, names, int(v), (lacking[0],), g.fix.completed)
        if found is not None and found.skipped:
            return found
    return None


def _departed(names: Names, base: Finding, left: Divergence) -> Finding:
    """The finding of a call left out, in place of what it led to."""
    return replace(
        base,
        kind="missing_participant",
        culprits=left.odd,
        victims=tuple(sorted(set(base.victims) - set(left.odd))),
        first_divergence=names.operation(left.event),
        reason=left.reason,
        details=base.details | {"divergence": left.details, "missing_ranks": list(left.odd)},
        deadlocked=True,
    )


def _owners(p: Program, names: Names, events: list[int]) -> tuple[int, ...]:
    """Who is named for messages without a partner: the ranks of receives that nobody answers.

    A send that nobody takes may be one too many or a receive too few; nobody is named for it.
    """
    op = names.column("op")
    return tuple(sorted({int(p.rank_of[e]) for e in events if op[e] != OP["send"]}))


def _minority(p: Program, g: Graph, cause: Cause) -> tuple[int, ...]:
    """The few in a circle of two collectives that stand against many; empty where there are none.

    Where two collectives stand against each other and one has by far the fewer ranks, those left
    the order that all others keep.
    """
    kinds = p.matching.nodes["kind"].to_numpy()[cause.nodes]
    sides = [
        {int(p.rank_of[e]) for e in _here(p, g, np.array([v]))} & set(cause.ranks)
        for v in cause.nodes
    ]
    sides = [s for s in sides if s]
    if len(sides) == 2 and (kinds != KIND["message"]).all() and not sides[0] & sides[1]:
        few, many = sorted(sides, key=len)
        if 2 * len(few) < len(many):
            return tuple(sorted(few))
    return ()


def _cycle_places(p: Program, names: Names, g: Graph, cause: Cause) -> tuple[dict[str, Any], ...]:
    """The places of a shortest circle through the component's first place, in order."""
    inside = np.zeros(g.size, np.bool_)
    inside[cause.vertices] = True
    keep = inside[g.src] & inside[g.dst]
    order = np.argsort(g.src[keep], kind="stable")
    src, dst = g.src[keep][order], g.dst[keep][order]
    start = int(cause.vertices[is_place(g, cause.vertices)][0])
    parent: dict[int, int] = {}
    front = [start]
    last = -1
    while front and last < 0:
        after: list[int] = []
        for v in front:
            lo, hi = np.searchsorted(src, [v, v + 1])
            for w in dst[lo:hi].tolist():
                if w == start:
                    last = v
                    break
                if w not in parent:
                    parent[w] = v
                    after.append(w)
            if last >= 0:
                break
        front = after
    path = [last] if last >= 0 else []
    while path and path[-1] != start:
        path.append(parent[path[-1]])
    path.reverse()
    on = is_place(g, np.array(path, dtype=np.int64))
    circle = [v for v, yes in zip(path, on, strict=True) if yes]
    lay = g.fix.layout
    ranks = p.matching.prepared.ranks["rank"].to_numpy()

    def rank_of(v: int) -> int:
        if v >= g.rank0:
            return int(ranks[v - g.rank0])
        row = lay.lane_rank[v] if v < g.queue0 else lay.queue_rank[v - g.queue0]
        return int(ranks[row])

    steps = []
    for x, v in enumerate(circle):
        e = stands_at(g, v)
        op = names.operation(e)
        on_stream = g.queue0 <= v < g.node0
        steps.append(
            {
                "rank": op["rank"],
                "place": "stream" if on_stream else "host",
                "stream": names.text(int(names.column("stream")[e])) if on_stream else None,
                "waits_for": [rank_of(circle[(x + 1) % len(circle)])],
                "op": op["op"],
                "comm": op["comm"],
                "label": op["label"],
                "ordinal": op["ordinal"],
                "seq": op["seq"],
                "stack": op["stack"],
            }
        )
    return tuple(steps)


def _unpaired(p: Program, g: Graph, cause: Cause) -> list[int]:
    """Messages without a partner in the cycle, whose peer took part in the same exchange.

    A rank that answered one operation of a batch (or of a run of point-to-point calls without a
    wait between) and went on, has left the other one out: the batch's members do not pair. Without
    such a trace of having been there, a partner that is missing may still come after the wait.
    """
    m = p.matching
    nodes = m.nodes
    kind, need = nodes["kind"].to_numpy(), nodes["need"].to_numpy()
    cut = nodes["cut"].fill_null(False).to_numpy()
    lone = [
        int(v) for v in cause.nodes if kind[v] == KIND["message"] and need[v] < 0 and not cut[v]
    ]
    out: list[int] = []
    answered: dict[int, dict[int, set[int]]] = {}  # event: its exchange; rank: what it answered
    for v in lone:
        e = int(_parts(p, v)[0])
        peer = int(nodes["dst"][v] if nodes["has_send"][v] else nodes["src"][v])
        if e not in answered:
            together = _exchange(p, g, e)
            met: dict[int, set[int]] = {}
            for x in together:
                for w in (int(p.kernel["node1"][x]), int(p.kernel["node2"][x])):
                    if w >= 0 and kind[w] == KIND["message"] and need[w] >= 0:
                        for y in _parts(p, w):
                            met.setdefault(int(p.rank_of[y]), set()).add(x)
            host = p.kernel["host_blocks"][e] and g.fix.layout.unit_of[e] < 0
            answered |= dict.fromkeys([e] if host else together, met)
        if answered[e].get(peer, set()) - {e}:
            out.append(e)
    return sorted(set(out))


def _crossed_tags(p: Program, cause: Cause) -> list[int]:
    """A send and a receive of one pair that would meet but for their tags, both without partner."""
    nodes = p.matching.nodes
    lone = nodes[cause.nodes].filter((pl.col("kind") == KIND["message"]) & (pl.col("need") < 0))
    pair = ["comm", "src", "dst"]
    sent, taken = lone.filter("has_send"), lone.filter("has_recv")
    at = [
        *sent.join(taken, on=pair, how="semi")["node"],
        *taken.join(sent, on=pair, how="semi")["node"],
    ]
    return sorted({int(e) for v in at for e in _parts(p, v)})


def _exchange(p: Program, g: Graph, e: int) -> list[int]:
    """The batch of an event, else the run of point-to-point operations around it in its lane."""
    lay = g.fix.layout
    lane, unit = lay.lane_of[e], lay.unit_of[e]
    op = p.matching.events["op"].to_numpy()
    blocks = p.kernel["host_blocks"]

    def together(x: int) -> bool:
        if not (0 <= x < len(op)) or lay.lane_of[x] != lane:
            return False
        if unit >= 0:
            return bool(lay.unit_of[x] == unit)
        return bool(op[x] < OP["wait"] and not blocks[x])

    run_ = [e]
    x = e - 1
    while together(x):
        run_.append(x)
        x -= 1
    x = e + 1
    while together(x):
        run_.append(x)
        x += 1
    return sorted(run_)


def _mismatch(p: Program, names: Names, g: Graph, cause: Cause, level: str) -> Finding:
    node = int(cause.nodes[0])
    return mismatch_at(
        p, names, cause.job, node, level, waiting=cause.waiting, fix=g.fix, blocking=True
    )


def mismatch_at(
    p: Program, names: Names, job: int, node: int, level: str, *,
    waiting: tuple[int, ...], fix: Fixpoint | None, blocking: bool,
) -> Finding:  # fmt: skip
    """The finding of a node whose signatures disagree."""
    events = _parts(p, node)
    split = odd_ones(p, names, node, events)
    is_message = p.matching.nodes["kind"][node] == KIND["message"]
    divergence = None
    if not is_message:
        completed = None if fix is None else fix.completed
        divergence = find_departure(p, names, node, split.odd, completed)
        divergence = divergence or find_divergence(p, names, node)
    members = {int(r) for r in p.rank_of[events]}
    culprits = split.odd
    kind = "mismatch"
    reason: str | None = "data_dependent_branch"
    first = int(min((e for e in events if p.rank_of[e] in culprits), default=events[0]))
    details: dict[str, Any] = {
        "signatures": split.classes,
        "aspects": split.aspects,
        "sides": sorted({f"{names.op(int(e))}@{names.site(int(e))}" for e in events}),
    }
    if divergence is not None:
        first = divergence.event
        details["divergence"] = divergence.details
        if divergence.odd:
            culprits = divergence.odd
        reason = divergence.reason or reason
        if divergence.skipped:
            kind, reason = "missing_participant", "skipped_call"
    elif len(culprits) == 1 and culprits[0] == 0 and not is_message:
        reason = "rank_guard"
    if is_message:
        reason = None
    here = events if fix is None else [e for e in events if fix.started[e]]
    return Finding(
        job=job,
        kind=kind if blocking else "mismatch",
        evidence=level,
        culprits=culprits,
        victims=tuple(sorted((set(waiting) | (members if blocking else set())) - set(culprits))),
        first_divergence=names.operation(first),
        hangs_at=tuple(names.operation(int(e)) for e in here) if blocking else (),
        reason=reason,
        details=details,
        deadlocked=blocking,
    )


def _lacking(
    p: Program, names: Names, g: Graph, cause: Cause, level: str, stale: dict[int, set[int]]
) -> Finding | None:
    """The finding of operations that lack ranks: ended, dead, free, or without a record."""
    here = sorted({*_here(p, g, cause.nodes), *cause.events})
    present = {int(p.rank_of[e]) for e in here}
    absent = set(cause.ranks)
    victims = tuple(sorted((set(cause.waiting) | present) - absent))
    kinds = p.matching.nodes["kind"].to_numpy()[cause.nodes]
    only_messages = bool((kinds == KIND["message"]).all())
    base = Finding(
        job=cause.job,
        kind="",
        evidence=level,
        victims=victims,
        hangs_at=tuple(names.operation(e) for e in here),
        first_divergence=names.operation(_first_of(names, here)) if here else None,
        details={"missing_ranks": sorted(absent)},
    )
    if cause.kind == "no_record":
        return replace(base, kind="insufficient_evidence", reason="no_data", evidence="inferred")
    if cause.kind == "dead":
        return replace(
            base,
            kind="crashed_rank",
            culprits=tuple(sorted(absent)),
            reason="crashed",
            deadlocked=False,
        )
    if cause.kind == "late":
        few = len(absent) < len(present - absent)
        return replace(
            base, kind="stalled_rank", culprits=tuple(sorted(absent)) if few else (),
            reason="stalled", evidence="observed", deadlocked=False,
        )  # fmt: skip
    if cause.kind == "ended":
        return _ended(p, names, g, cause, base, here, only_messages)
    if (left := _left_out(p, names, g, cause)) is not None:
        return _departed(names, base, left)
    return _free(p, cause, base, here, only_messages, stale)


def _first_of(names: Names, events: list[int]) -> int:
    """The event that was issued first, by the recorded times; else that of the lowest rank."""
    created = names.column("t_created")[events]
    known = created >= 0
    if not known.all():
        return events[0]
    earliest = events[int(np.argmin(created))]
    node = names.column("node")
    return next(e for e in events if node[e] == node[earliest])


def _ended(
    p: Program, names: Names, g: Graph, cause: Cause, base: Finding, here: list[int], messages: bool
) -> Finding:
    absent = set(cause.ranks)
    lay = g.fix.layout
    rows = p.matching.prepared.ranks
    ended_rows = rows.filter((pl.col("job") == cause.job) & pl.col("rank").is_in(sorted(absent)))[
        "r"
    ]
    on_way = np.isin(lay.lane_rank, ended_rows.to_numpy()) & (g.fix.lane_at >= 0)
    reached_end = not on_way.any()
    if messages and p.matching.nodes[cause.nodes]["cut"].fill_null(False).any():
        # a window is lost: whether these messages ever had partners cannot be told
        return replace(base, kind="insufficient_evidence", reason="no_data", evidence="inferred")
    if messages:
        owners = _owners(p, names, here)
        return replace(
            base,
            kind="unmatched_p2p",
            # a peer that went on elsewhere was not asked; one that ended may have left too early
            culprits=() if reached_end else owners,
            victims=base.victims
            if reached_end
            else tuple(sorted(set(base.victims + tuple(absent)) - set(owners))),
            reason="finished" if reached_end else "no_partner",
            details=base.details
            | {"unmatched": [names.operation(e) | names.signature(e) for e in here]},
            deadlocked=True,
        )
    if (left := _left_out(p, names, g, cause)) is not None:
        return _departed(names, base, left)
    present = {int(p.rank_of[e]) for e in here}
    culprits: tuple[int, ...] = tuple(sorted(absent)) if len(absent) < len(present) else ()
    reason = "finished" if reached_end else "skipped_call"
    first = base.first_divergence
    details = dict(base.details)
    divergence = None
    for v in cause.nodes[:_LOOKED_AT]:
        divergence = find_divergence(p, names, int(v))
        if divergence is not None:
            break
    if divergence is not None:
        first, reason = names.operation(divergence.event), "skipped_call"
        details["divergence"] = divergence.details
        if divergence.odd:
            culprits = divergence.odd
    return replace(
        base,
        kind="missing_participant",
        culprits=culprits,
        victims=tuple(sorted(set(base.victims) - set(culprits))),
        reason=reason,
        first_divergence=first,
        details=details,
        deadlocked=True,
    )


def _free(
    p: Program, cause: Cause, base: Finding, here: list[int], messages: bool,
    stale: dict[int, set[int]],
) -> Finding | None:  # fmt: skip
    """Ranks that are alive with nothing pending, while others wait for them."""
    absent = set(cause.ranks)
    if observed.snapshot(p, cause.job):
        return None
    if absent & stale.get(cause.job, set()):
        return replace(
            base, kind="insufficient_evidence", reason="no_data", evidence="inferred", victims=(),
            details=base.details | {"older_records": sorted(absent & stale[cause.job])},
        )  # fmt: skip
    if ended := observed.windows_ended(p, cause.job, absent):
        # the recorder stopped while they went on: their part may have come later
        return replace(
            base, kind="insufficient_evidence", reason="no_data", evidence="inferred", victims=(),
            details=base.details | {"windows_ended": ended},
        )  # fmt: skip
    if observed.went_on(p, cause.job, absent, here):
        # their own traffic goes on: they are neither late nor dead, they are not going to come
        return replace(base, kind="missing_participant", reason="other_group", deadlocked=None)
    if len(base.victims) > len(absent):
        return replace(
            base,
            kind="stalled_rank",
            culprits=tuple(sorted(absent)),
            reason="stalled",
            deadlocked=False,
        )
    return replace(
        base, kind="insufficient_evidence", reason="stalled", evidence="inferred",
        details=base.details | {"idle": messages},
    )  # fmt: skip
