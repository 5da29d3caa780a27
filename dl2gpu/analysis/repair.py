"""Fixes, checked: candidate repairs of a finding are tried in the replay, and those that work told.

A candidate is the job with a few operations changed. All candidates of a shard are jobs of one
trace, matched once and replayed under all scenarios as one batch. A repair that does not let the
job finish in every scenario that was explored is never told.

Source: DESIGN.md section 6.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import polars as pl

from dl2gpu.analysis.explore import Budget, explore
from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.outcomes import outcomes
from dl2gpu.analysis.replay import Fixpoint, Program, build
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.analysis.scenarios import OTHER_RETURN
from dl2gpu.analysis.settled import beginnings, without_beginning
from dl2gpu.engine.arrays import Array, codes
from dl2gpu.engine.base import Engine
from dl2gpu.engine.cpu import CPU
from dl2gpu.text import ranks
from dl2gpu.trace.schema import EVENTS, OP, Trace, empty, op_name, some_jobs

__all__ = ["SCENARIOS", "Candidate", "candidates", "with_repairs", "working"]

SCENARIOS: Final = {
    "rendezvous": Scenario(use_states=False),
    "unlimited buffers": Scenario(use_states=False, eager_bytes=Scenario.INFINITE),
    "one device queue a rank": Scenario(use_states=False, one_stream=True),
    "incomplete batches hold back their partners": Scenario(use_states=False, atomic_batch=True),
    "rooted collectives let go early": Scenario(use_states=False, early_release=True),
    "other matches of wildcards": Scenario(use_states=False, wild_high=True),
}
"""A repair has to let the job finish under each of these."""

KINDS: Final = (
    "cycle", "order_inversion", "init_cycle", "missing_participant", "unmatched_p2p", "potential",
)  # fmt: skip

_MOST: Final = 24
"""Candidates of a finding."""
_OF_A_JOB: Final = 8
"""Findings of a job that are tried to be repaired."""
_MOST_EVENTS: Final = 500_000
"""Events of all candidates of a finding; in larger jobs fewer are tried."""
_TOGETHER: Final = 100_000
"""Operations of changed jobs that are replayed together, about: what bounds the memory."""
_TOLD: Final = 3
"""Repairs that are told of a finding."""
_MATCHES: Final = 128
"""Runs of a candidate whose wildcards make choices."""
_NEAR: Final = 64
"""Operations behind the one that hangs among which its counterpart is looked for."""

Row = dict[str, Any]
Fresh = tuple[int, int]
"""A request and a batch whose numbers are free in a job."""


@dataclass(frozen=True)
class Candidate:
    """A repair that may work: what it says, how many operations it changes, and what becomes of it.

    ``eager_bytes``: messages of up to so many bytes are buffered in all scenarios.
    """

    words: str
    cost: int
    changed: dict[int, Row | None]
    """By row of the job's events: the operation in its place, or None where it is left out."""
    added: tuple[Row, ...] = ()
    eager_bytes: int = 0


def with_repairs(p: Program, strict: Fixpoint | None, findings: Sequence[Finding]) -> list[Finding]:
    """The findings, those whose repair was found with it in their ``details`` ("repairs").

    ``strict``: the fixpoint under the strictest reading of all jobs that have findings to repair;
    None: there are none. What a job has completed under it and has behind it is not tried again.
    """
    trace, engine = p.matching.prepared.trace, p.matching.prepared.engine
    out = list(findings)
    of: list[int] = []
    jobs: list[tuple[Trace, list[Candidate]]] = []
    held = 0

    def settle() -> None:
        for k, good in zip(of, working(jobs, engine), strict=True):
            if good:
                repairs = [{"repair": c.words, "operations": c.cost} for c in good[:_TOLD]]
                evidence = {"repairs": repairs, "repairs_hold_under": sorted(SCENARIOS)}
                out[k] = replace(out[k], details=out[k].details | evidence)
        of.clear()
        jobs.clear()

    seen: Counter[int] = Counter()
    todo: list[int] = []
    for k, f in enumerate(findings):
        # what other returns of waits lead to is not seen in the job as it is replayed here
        decided = f.condition != OTHER_RETURN
        if decided and f.kind in KINDS and f.evidence == "proven" and seen[f.job] < _OF_A_JOB:
            seen[f.job] += 1
            todo.append(k)
    if strict is None or not todo:
        return out
    numbers = sorted(seen)
    begin = beginnings(p, strict, np.array(numbers))
    whole = zip(numbers, some_jobs(trace, numbers), strict=True)
    cut = {number: _shortened(job, begin.get(number)) for number, job in whole}
    for k in todo:
        f = findings[k]
        job, fresh = cut[f.job]
        size = max(job.events.height, 1)
        # whether a repair is tried depends on the job alone, and not on how a corpus is cut
        made = candidates(job, f, fresh)[: _MOST_EVENTS // size] if size <= _MOST_EVENTS else []
        if not made:
            continue
        of.append(k)
        jobs.append((job, made))
        held += len(made) * size
        if held > _TOGETHER:
            settle()
            held = 0
    settle()
    return out


def _shortened(job: Trace, begin: pl.DataFrame | None) -> tuple[Trace, Fresh]:
    """The job without what it has behind it, and numbers that none of its operations has."""
    fresh = _fresh(job.events)
    if begin is None:
        return job, fresh
    return replace(job, events=without_beginning(job.events, begin)), fresh


def _fresh(events: pl.DataFrame) -> Fresh:
    request, group = events["request"].max(), events["group"].max()
    return int(request or 0) + 1, int(group or 0) + 1  # type: ignore[arg-type]


def working(
    jobs: Sequence[tuple[Trace, Sequence[Candidate]]], engine: Engine = CPU
) -> list[list[Candidate]]:
    """Of each job those candidates that let it finish in every scenario, smallest change first.

    The jobs are of one trace: their strings have the same codes.
    """
    tried = [(job, c) for job, of in jobs for c in of]
    if not tried:
        return [[] for _ in jobs]
    p = build(match(_copies(jobs), engine))
    scenarios = list(SCENARIOS.values())
    usual = len(scenarios)
    cells = []
    for number, (_, c) in enumerate(tried):
        first = 0
        if c.eager_bytes:
            first = len(scenarios)
            scenarios += [
                replace(s, eager_bytes=max(c.eager_bytes, s.eager_bytes))
                for s in SCENARIOS.values()
            ]
        cells += [(number, first + k) for k in range(usual)]
    o = outcomes(p, scenarios, np.array(cells))
    good: Array = (o.standing == 0).reshape(len(tried), usual).all(axis=1).astype(np.bool_)
    boxed = np.unique(codes(p.matching.events["job"])[codes(p.matching.events["box"]) >= 0])
    wild = [int(n) for n in boxed if good[n]]
    for one in explore(p, wild, Scenario(), Budget(_MATCHES)):
        # where the matches are a choice, every one of them counts
        good[one.job] = one.complete and not one.bad
    out = []
    first = 0
    for _, of in jobs:
        kept = [c for c, fine in zip(of, good[first : first + len(of)], strict=True) if fine]
        out.append(sorted(kept, key=lambda c: (c.eager_bytes > 0, c.cost)))
        first += len(of)
    return out


def _spaced(events: pl.DataFrame) -> pl.DataFrame:
    """The events by lane, with room between their numbers for others."""
    lane = ["rank", "lane"]
    return events.sort(*lane, "seq").with_columns(seq=pl.col("seq") * 4)


def _copies(jobs: Sequence[tuple[Trace, Sequence[Candidate]]]) -> Trace:
    """Each job once for each of its candidates, changed as that says."""
    tried = [c for _, of in jobs for c in of]
    of_job = np.repeat(np.arange(len(jobs)), [len(of) for _, of in jobs])
    base = pl.concat([_spaced(job.events) for job, _ in jobs])
    begin = _begins([job.events.height for job, _ in jobs])
    kept = [
        np.delete(np.arange(begin[k], begin[k + 1]), list(c.changed))
        for k, c in zip(of_job, tried, strict=True)
    ]
    put = [
        [row for row in (*c.changed.values(), *c.added) if row is not None]
        for c in tried
    ]  # fmt: skip
    events = pl.concat(
        [
            base[np.concatenate(kept)],
            pl.DataFrame([row for rows in put for row in rows], schema=base.schema),
        ]
    )
    numbers = np.arange(len(tried), dtype=np.int32)
    number = np.concatenate([np.repeat(numbers, [len(k) for k in those]) for those in (kept, put)])

    def table(name: str) -> tuple[pl.DataFrame, Array]:
        """The side tables of all copies; and where that of each begins."""
        frames: list[pl.DataFrame] = [getattr(job, name) for job, _ in jobs]
        first = _begins([f.height for f in frames])
        rows = [np.arange(first[k], first[k + 1]) for k in of_job]
        many = [len(r) for r in rows]
        mine = pl.Series("job", np.repeat(numbers, many))
        return pl.concat(frames)[np.concatenate(rows)].with_columns(mine), _begins(many)

    comms, first = table("comms")
    of_comm = first[:-1].astype(np.int32)
    room = pl.Series(of_comm[number])
    return replace(
        jobs[0][0],
        events=events.with_columns(
            pl.col("comm", "new_comm") + room,
            job=pl.Series(number),
            ordinal=pl.lit(None, pl.Int64),
            state=pl.lit(0, pl.UInt8),
        ).select(EVENTS.keys()),
        jobs=table("jobs")[0],
        ranks=table("ranks")[0],
        comms=comms.with_columns(pl.col("comm") + pl.Series(of_comm[comms["job"].to_numpy()])),
        status=empty("status"),
    )  # fmt: skip


def _begins(many: Sequence[int]) -> Array:
    """int64[len + 1]: where each of so many begins."""
    out: Array = np.cumsum([0, *many])
    return out


# --------------------------------------------------------------------------------------------------
# Candidates


@dataclass(frozen=True)
class _Job:
    """The events of a job by lane."""

    base: pl.DataFrame
    strings: list[str]
    ids: dict[int, str]
    request: int
    group: int
    _rows: dict[int, Row] = field(default_factory=dict)

    def at(self, steps: Iterable[Row]) -> list[int]:
        """Rows of the operations that a finding names, in its order, each once."""
        named = pl.DataFrame(
            [(s["rank"], s["seq"]) for s in steps],
            schema={"rank": pl.Int32, "seq": pl.Int64}, orient="row",
        ).unique(maintain_order=True)  # fmt: skip
        rows = self.base.select("rank", seq=pl.col("seq") // 4).with_row_index("k")
        # two lanes may have the number: the first one's
        rows = rows.join(named, on=["rank", "seq"], how="semi").unique(
            ["rank", "seq"], keep="first", maintain_order=True
        )
        found = named.join(rows, on=["rank", "seq"], maintain_order="left")
        return [int(k) for k in found["k"]]

    @cached_property
    def places(self) -> tuple[Array, Array, Array]:
        """Rank, lane and operation of each row."""
        rank, lane, op = (self.base[c].to_numpy() for c in ("rank", "lane", "op"))
        return rank, lane, op

    def row(self, k: int) -> Row:
        """The operation in a row of ``base``; not to be changed."""
        row = self._rows.get(k)
        if row is None:
            row = self._rows[k] = self.base.row(k, named=True)
        return row

    def name(self, k: int) -> str:
        row = self.row(k)
        words = op_name(row["op"], self.strings)
        if row["op"] in (OP["send"], OP["recv"]):
            way = "to" if row["op"] == OP["send"] else "from"
            return f"{words} {way} {row['peer'] if row['peer'] >= 0 else 'any'}"
        return words + (f" of '{self.ids[row['comm']]}'" if row["comm"] is not None else "")

    def behind(self, k: int) -> Iterator[int]:
        """The operations of the same lane behind, waits left out."""
        rank, lane, op = self.places
        end = min(k + 1 + _NEAR, len(op))
        for x in range(k + 1, end):
            if rank[x] != rank[k] or lane[x] != lane[k]:
                return
            if op[x] != OP["wait"]:
                yield x


def candidates(job: Trace, f: Finding, fresh: Fresh | None = None) -> list[Candidate]:
    """Repairs that are worth trying, smallest change first.

    ``fresh``: where ``job`` is not all of the job, numbers that are free in all of it.
    """
    base = _spaced(job.events)
    strings = job.strings.sort("code")["text"].to_list()
    ids = dict(job.comms.select("comm", "id").iter_rows())
    j = _Job(base, strings, ids, *(fresh or _fresh(job.events)))
    named = j.at([*f.hangs_at, *f.details.get("unmatched", ())])
    hangs = [k for k in named if j.row(k)["op"] != OP["wait"]][:16]
    made = [
        *_swapped(j, hangs), *_batched(j, hangs), *_unblocked(j, hangs),
        *_left_out(j, hangs, f), *_added(j, hangs, f),
    ]  # fmt: skip
    safe = f.details.get("safe_bytes")
    if safe:
        made.append(Candidate(f"buffer at least {safe} bytes of each message", 0, {}, (), safe))
    unique = {c.words: c for c in made}
    # raising a buffer changes no operation, but the surroundings: it comes last
    return sorted(unique.values(), key=lambda c: (c.eager_bytes > 0, c.cost))[:_MOST]


_SLOT: Final = ("job", "rank", "lane", "seq", "request", "blocking", "group")
"""Columns that belong to a place in the program, whatever stands there."""


def _swap(j: _Job, pairs: Sequence[tuple[int, int]]) -> dict[int, Row | None]:
    out: dict[int, Row | None] = {}
    for a, b in pairs:
        first, second = j.row(a), j.row(b)
        # what is asked for later by its number stays in its place; what blocks its host, too,
        # but a message and a collective may differ in that
        out[a] = second | {c: first[c] for c in _SLOT}
        out[b] = first | {c: second[c] for c in _SLOT}
    return out


def _swapped(j: _Job, hangs: Sequence[int]) -> Iterator[Candidate]:
    """Two operations of a rank change places: one that hangs, and one that others hang in."""
    pairs: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    waited = {b: (j.row(b)["comm"], _sort(j.row(b)["op"])) for b in hangs}
    for a in hangs:
        first = j.row(a)
        wanted = {key for b, key in waited.items() if b != a}
        found: set[tuple[int, int]] = set()
        for b in j.behind(a):
            second = j.row(b)
            key = (second["comm"], second["op"])
            differs = any(first[c] != second[c] for c in ("op", "comm", "peer"))
            if differs and (second["comm"], _sort(second["op"])) in wanted and key not in found:
                found.add(key)
                pairs.setdefault((first["op"], first["comm"], *reversed(key)), []).append((a, b))
    for same in pairs.values():
        for a, b in same:
            words = f"on rank {j.row(a)['rank']}, call {j.name(b)} before {j.name(a)}"
            yield Candidate(words, 2, _swap(j, [(a, b)]))
        if len(same) > 1:
            who = ranks(j.row(a)["rank"] for a, _ in same)
            a, b = same[0]
            words = f"on {who}, call {_kind(j, b)} before {_kind(j, a)}"
            yield Candidate(words, 2 * len(same), _swap(j, same))


def _sort(op: int) -> int:
    """A collective by itself; sends and receives together."""
    return op if op >= OP["all_reduce"] else OP["send"]


def _kind(j: _Job, k: int) -> str:
    """The operation without its peer, for several ranks together."""
    words = op_name(j.row(k)["op"], j.strings)
    return words if j.row(k)["op"] < OP["wait"] else j.name(k)


def _pairs(j: _Job, hangs: Sequence[int]) -> list[tuple[int, int]]:
    """A send or receive that hangs, and the next message of the other way right behind it."""
    out = []
    for a in hangs:
        if j.row(a)["op"] not in (OP["send"], OP["recv"]) or j.row(a)["group"] is not None:
            continue
        b = next(iter(j.behind(a)), None)
        other = OP["recv"] if j.row(a)["op"] == OP["send"] else OP["send"]
        if b == a + 1 and j.row(b)["op"] == other and j.row(b)["group"] is None:
            out.append((a, b))
    return out


def _batched(j: _Job, hangs: Sequence[int]) -> Iterator[Candidate]:
    """A send and a receive are issued as one batch."""
    pairs = _pairs(j, hangs)

    def change(some: Sequence[tuple[int, int]]) -> dict[int, Row | None]:
        return {
            k: j.row(k) | {"group": j.group + number}
            for number, pair in enumerate(some) for k in pair
        }  # fmt: skip

    for pair in pairs:
        rank = j.row(pair[0])["rank"]
        words = f"on rank {rank}, batch {j.name(pair[0])} with {j.name(pair[1])}"
        yield Candidate(words, 2, change([pair]))
    if len(pairs) > 1:
        who = ranks(j.row(a)["rank"] for a, _ in pairs)
        words = f"on {who}, batch the send with the receive next to it"
        yield Candidate(words, 2 * len(pairs), change(pairs))


def _unblocked(j: _Job, hangs: Sequence[int]) -> Iterator[Candidate]:
    """A message does not hold its host, which waits for it behind the operation that follows."""
    blank = dict.fromkeys(EVENTS)
    for a in hangs:
        if j.row(a)["op"] not in (OP["send"], OP["recv"]) or j.row(a)["stream"] is not None:
            continue
        if not j.row(a)["blocking"] or j.row(a)["group"] is not None:
            continue
        behind = next(iter(j.behind(a)), a)
        row = j.row(a)
        wait = blank | {
            "job": row["job"], "rank": row["rank"], "lane": row["lane"],
            "seq": int(j.row(behind)["seq"]) + 1, "op": OP["wait"], "blocking": True,
            "requests": [j.request], "mode": 0, "state": 0, "flags": 0,
        }  # fmt: skip
        words = f"on rank {row['rank']}, make {j.name(a)} non-blocking and wait for it "
        words += f"behind {j.name(behind)}" if behind != a else "right after"
        yield Candidate(words, 2, {a: row | {"blocking": False, "request": j.request}}, (wait,))


def _left_out(j: _Job, hangs: Sequence[int], f: Finding) -> Iterator[Candidate]:
    """The call that others do not make is not made."""
    if f.kind not in ("missing_participant", "unmatched_p2p"):
        return
    e = j.base
    if f.kind == "unmatched_p2p":
        for a in hangs:
            yield Candidate(f"on rank {e['rank'][a]}, leave out {j.name(a)}", 1, {a: None})
        return
    same: dict[tuple[Any, ...], list[int]] = {}
    for a in hangs:
        same.setdefault((j.row(a)["comm"], j.row(a)["op"]), []).append(a)
    for some in same.values():
        who = ranks(j.row(a)["rank"] for a in some)
        words = f"on {who}, leave out {_kind(j, some[0])}"
        yield Candidate(words, len(some), dict.fromkeys(some))


def _added(j: _Job, hangs: Sequence[int], f: Finding) -> Iterator[Candidate]:
    """The missing call is made: at the end of the rank's program, or where the others make it."""
    e = j.base
    if f.kind == "unmatched_p2p":
        for a in hangs:
            row = j.row(a)
            if row["op"] not in (OP["send"], OP["recv"]) or row["peer"] is None or row["peer"] < 0:
                continue
            if row["group"] is not None:
                continue
            partner = OP["recv"] if row["op"] == OP["send"] else OP["send"]
            last = _last(j, row["peer"])
            if last is None:
                continue
            call = row | {
                "rank": row["peer"], "peer": row["rank"], "op": partner, "lane": last["lane"],
                "seq": last["seq"] + 1, "request": None, "send_mode": None,
            }  # fmt: skip
            way = "from" if partner == OP["recv"] else "to"
            words = f"on rank {row['peer']}, add the {op_name(partner, j.strings)} {way} "
            yield Candidate(words + f"{row['rank']} at its end", 1, {}, (call,))
        return
    missing = f.details.get("missing_ranks") or f.culprits
    if f.kind != "missing_participant" or not missing or not hangs or len(missing) > 16:
        return
    a = hangs[0]
    row = j.row(a)
    if row["op"] < OP["all_reduce"] or row["group"] is not None or row["comm"] is None:
        return
    before = e.filter(
        (pl.col("rank") == row["rank"]) & (pl.col("comm") == row["comm"])
        & (pl.col("op") >= OP["all_reduce"]) & (pl.col("seq") < row["seq"])
    ).height  # fmt: skip
    earlier = False  # than at its end
    for where in ("there", "end"):
        calls = []
        for rank in missing:
            mine = e.filter(
                (pl.col("rank") == rank)
                & (pl.col("comm") == row["comm"])
                & (pl.col("op") >= OP["all_reduce"])
            ).sort("seq")
            last = _last(j, rank)
            if last is None:
                return
            place = {"lane": last["lane"], "seq": last["seq"] + 1}
            if where == "there" and before < mine.height:
                place = {"lane": mine["lane"][before], "seq": mine["seq"][before] - 2}
                earlier = True
            calls.append(row | {"rank": rank, "request": None} | place)
        tail = " where the others make it" if where == "there" else " at its end"
        if where == "end" and not earlier:
            return
        words = f"on {ranks(missing)}, add {_kind(j, a)}{tail}"
        yield Candidate(words, len(calls), {}, tuple(calls))


def _last(j: _Job, rank: int) -> Row | None:
    mine = j.base.filter(pl.col("rank") == rank)
    return (
        mine.sort("lane", "seq", descending=[True, False]).tail(1).to_dicts()[0]
        if mine.height
        else None
    )
