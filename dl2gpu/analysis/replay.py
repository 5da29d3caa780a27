"""Replay: how far each rank can get.

``Program`` is a matched trace as flat arrays; ``run`` takes it to the least fixpoint of the rules
of DESIGN.md section 4 under a ``Scenario``; the kernel releases the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
import polars as pl

from dl2gpu.analysis import replay_kernel, rounds_kernel
from dl2gpu.analysis.matching import Matching
from dl2gpu.analysis.tables import NCCL_LIKE, ROLE
from dl2gpu.analysis.waits import no_pairs, wait_pairs
from dl2gpu.engine.arrays import Array, codes, flags, plain
from dl2gpu.engine.base import Argument, Fresh
from dl2gpu.trace.schema import MODE, OP, SEND_MODE, Trace

__all__ = ["Fixpoint", "Program", "Scenario", "build", "replay", "run"]


@dataclass(frozen=True)
class Scenario:
    """One reading of what the trace leaves open (DESIGN.md section 6).

    Attributes:
        eager_bytes: standard sends up to this size complete without a receiver; 0 is rendezvous.
        one_stream: all device queues of a rank are one.
        flip_lanes: ranks with this bit set in their number fill their queues with the host threads
            in reverse order; any two ranks differ in some bit. -1: none.
        atomic_batch: an incomplete batch holds back the partners of its matched members.
        early_release: rooted collectives let go those who need nobody (rule 4).
        use_states: recorded completions are facts (rule 7).
        use_records: so is what a record of issued operations shows to be passed by its host.
        wild_high: wildcards take the highest sender that fits, not the lowest.
    """

    eager_bytes: int = 0
    one_stream: bool = False
    flip_lanes: int = -1
    atomic_batch: bool = False
    early_release: bool = False
    use_states: bool = True
    use_records: bool = False
    wild_high: bool = False

    INFINITE: ClassVar[int] = (1 << 63) - 1


@dataclass(frozen=True)
class Program:
    """A matched trace as flat arrays, n events sorted by (job, rank, position).

    Offsets ``job_*`` have one entry more than there are jobs. See :mod:`replay_kernel` for the
    arrays that only the kernel reads (``kernel``).
    """

    matching: Matching
    job_event: Array
    rank_of: Array
    r: Array
    lane: Array
    stream: Array
    group: Array
    kernel: dict[str, Array]
    waits: pl.DataFrame
    """(wait, target): events that each wait with named requests, or on a stream, waits for."""
    layouts: dict[tuple[bool, int], Layout] = field(default_factory=dict)
    """Those made so far, by ``one_stream`` and ``flip_lanes`` of the scenario."""

    def events_of(self, job: int) -> pl.DataFrame:
        """The events of one job, without a copy."""
        lo, hi = int(self.job_event[job]), int(self.job_event[job + 1])
        return self.matching.events[lo:hi]


@dataclass(frozen=True)
class Fixpoint:
    """Where everything stands when nothing moves any more.

    ``issued``, ``started``, ``completed`` bool[n]; ``lane_at`` int32[lanes] and ``queue_at``
    int32[queues]: the event at which a place stands, -1 at its end; ``partner`` int32[n]: matches
    of wildcards. ``layout`` holds the lanes, queues and batches (``index_program``).
    """

    scenario: Scenario
    issued: Array
    started: Array
    completed: Array
    lane_at: Array
    queue_at: Array
    partner: Array
    layout: Layout


@dataclass(frozen=True)
class Layout:
    """Lanes, queues and batches, numbered in order of first sight."""

    lane_of: Array
    lane_next: Array
    lane_first: Array
    lane_rank: Array
    queue_of: Array
    queue_next: Array
    queue_first: Array
    queue_rank: Array
    queue_name: Array
    unit_of: Array
    unit_first: Array
    unit_size: Array


_NONE: Final = np.zeros(0, np.int64)


def build(m: Matching) -> Program:
    """Arrays of a matched trace."""
    e = m.events
    n = e.height
    n_jobs = m.prepared.jobs.height
    job = plain(e["job"])
    job_event = np.searchsorted(job, np.arange(n_jobs + 1)).astype(np.int32)
    op = plain(e["op"])
    stream = codes(e["stream"])
    is_wait = op == OP["wait"]
    wait_left = np.zeros(n, np.int32)
    wait_kind = np.zeros(n, np.uint8)
    rows = np.flatnonzero(is_wait)
    if len(rows):
        # the length of a null list is null, which is "all" for a wait
        everything = (e["requests"].gather(rows).list.len().fill_null(0) == 0).to_numpy()
        blocking = flags(e["blocking"].gather(rows))
        # a host that goes on behind its wait waits for nothing
        idle = (stream[rows] < 0) & ~blocking
        waits = wait_pairs(m, rows, everything | idle, stream)
        target, wait = waits["target"].to_numpy(), waits["wait"].to_numpy().astype(np.int32)
        dep_start, dep_item = replay_kernel.bucket(target.astype(np.int64), n)
        dep_wait = wait[dep_item]
        wait_left = np.bincount(wait, minlength=n).astype(np.int32)
        any_mode = rows[codes(e["mode"].gather(rows), null=0) != MODE["all"]]
        wait_left[any_mode] = np.minimum(wait_left[any_mode], 1)
        wait_kind[rows] = 1
        wait_kind[rows[(stream[rows] < 0) & everything & blocking]] = 2
    else:
        waits = no_pairs()
        dep_start, dep_wait = np.zeros(n + 1, np.int32), np.zeros(0, np.int32)

    node1, node2, alone = plain(e["node"]), plain(e["node2"]), plain(e["alone"])
    node_start, node_part = replay_kernel.parts_of(node1, node2, alone, m.nodes.height)
    lane = plain(e["lane"])
    kernel: dict[str, Array] = {
        "host_blocks": flags(e["blocking"]) | is_wait,
        "wait_kind": wait_kind,
        "wait_left": wait_left,
        "dep_start": dep_start,
        "dep_wait": dep_wait,
        "node1": np.where(alone, np.int32(-1), node1),
        "node2": node2,
        "alone": alone,
        "done": flags(e["done"]),
        "passed": flags(e["passed"]),
        "node_start": node_start,
        "node_part": node_part,
        "node_kind": codes(m.nodes["kind"]),
        "node_need": codes(m.nodes["need"]),
        "node_blocks": flags(m.nodes["blocks"]),
    } | _mailboxes(m)
    return Program(
        matching=m,
        job_event=job_event,
        rank_of=plain(e["rank"]),
        r=plain(e["r"]),
        lane=_dense(lane),
        stream=stream,
        group=_NONE if e["group"].null_count() == n else codes(e["group"]),
        kernel=kernel,
        waits=waits,
    )


def _mailboxes(m: Matching) -> dict[str, Array]:
    """Mailboxes, one a communicator and receiving rank, what is asked of them, and all roles.

    ``take_*`` and ``send_*``: the events that take from each mailbox and that send to it, in
    program order; ``take_one``: all that take are of one lane; ``job_box`` offsets of the jobs.
    ``peer`` and ``tag`` of a send or receive,
    ``recv_peer`` and ``recv_tag`` of the receive of a sendrecv where that is taken from a mailbox
    (``recv_peer`` is -3 everywhere else).
    """
    e = m.events
    box = plain(e["box"])
    n_jobs = m.prepared.jobs.height
    if box.max(initial=-1) < 0:
        none = np.zeros(0, np.int32)
        start = np.zeros(1, np.int32)
        return {
            "take_start": start, "take_event": none, "take_one": np.zeros(0, np.bool_),
            "send_start": start, "send_event": none,
            "job_box": np.zeros(n_jobs + 1, np.int32), "role": plain(e["role"]), "peer": none,
            "tag": _NONE, "recv_peer": none, "recv_tag": _NONE,
        }  # fmt: skip
    op = plain(e["op"])
    wanted = e.lazy().join(m.prepared.jobs.lazy().select("job", "semantics"), on="job", how="left",
                           maintain_order="left").select(
        peer=pl.coalesce("matched_peer", "peer"),
        tag=pl.when(pl.col("semantics") != NCCL_LIKE).then(pl.coalesce("matched_tag", "tag")),
        recv_peer=pl.coalesce("recv_peer", "peer"),
        recv_tag=pl.when(pl.col("semantics") != NCCL_LIKE).then(pl.coalesce("recv_tag", "tag")),
    ).collect()  # fmt: skip
    peer, recv_peer = (codes(wanted[c], -2) for c in ("peer", "recv_peer"))
    tag, recv_tag = (codes(wanted[c], 0) for c in ("tag", "recv_tag"))
    second = (op == OP["sendrecv"]) & (box >= 0) & (e["node2"].to_numpy() < 0)
    alone = second & (peer == -2)  # it is not known where it sends to: it only receives
    takes = (op == OP["recv"]) | alone
    role = np.where(takes, ROLE["recv"], ROLE["send"])
    role = np.where(op == OP["probe"], ROLE["probe"], role)
    taking = (box >= 0) & ((role != ROLE["send"]) | second)
    sending = (box >= 0) & (role == ROLE["send"]) & (plain(e["node"]) < 0)
    rank = plain(e["rank"]).astype(np.int64)
    span = int(max(rank.max(), peer.max())) + 3
    to = box.astype(np.int64) * span + 2  # a communicator's mailboxes, by receiving rank
    number, inverse = np.unique(
        np.concatenate([(to + rank)[taking], (to + peer)[sending]]), return_inverse=True
    )
    mail = np.full((2, len(op)), -1, np.int64)
    mail[0, taking] = inverse[: taking.sum()]
    mail[1, sending] = inverse[taking.sum() :]
    take_start, take_event = replay_kernel.bucket(mail[0], len(number))
    send_start, send_event = replay_kernel.bucket(mail[1], len(number))
    job_of = np.zeros(len(number), np.int64)
    for which, there in ((0, taking), (1, sending)):
        job_of[mail[which, there]] = plain(e["job"])[there]
    lane = plain(e["lane"])
    lanes = np.zeros((2, len(number)), lane.dtype)
    lanes[0] = np.iinfo(lane.dtype).max
    np.minimum.at(lanes[0], mail[0, taking], lane[taking])
    np.maximum.at(lanes[1], mail[0, taking], lane[taking])
    return {
        "take_start": take_start,
        "take_event": take_event,
        "take_one": lanes[0] == lanes[1],
        "send_start": send_start,
        "send_event": send_event,
        "job_box": np.searchsorted(job_of, np.arange(n_jobs + 1)).astype(np.int32),
        "peer": np.where(alone, recv_peer, peer).astype(np.int32),
        "tag": np.where(alone, recv_tag, tag),
        "recv_peer": np.where(second & ~alone, recv_peer, -3).astype(np.int32),
        "recv_tag": recv_tag,
        "role": np.where(box >= 0, role, e["role"].to_numpy()).astype(np.int8),
    }


def _dense(values: Array) -> Array:
    """Lane numbers as small integers, so that arrays indexed by them stay small."""
    if not len(values) or values.max() <= len(values):
        return values
    dense: Array = np.unique(values, return_inverse=True)[1]
    return dense


def layout(p: Program, scenario: Scenario) -> Layout:
    """Lanes, queues and batches under the scenario's reading of streams."""
    key = (scenario.one_stream, scenario.flip_lanes)
    if key not in p.layouts:
        p.layouts[key] = _layout(p, scenario)
    return p.layouts[key]


def _layout(p: Program, scenario: Scenario) -> Layout:
    n = len(p.r)
    order = _NONE
    stream = p.stream
    strings = p.matching.prepared.trace.strings.height + 1
    if scenario.one_stream:
        stream = np.where(stream >= 0, np.int32(0), np.int32(-1))
    if scenario.flip_lanes >= 0:
        lane = p.lane.astype(np.int64)
        flipped = np.where(p.rank_of >> scenario.flip_lanes & 1, -lane, lane)
        order = np.lexsort((np.arange(n), flipped, p.r))
    n_lanes = int(p.lane.max(initial=0)) + 1
    return Layout(
        *replay_kernel.index_program(p.r, p.lane, stream, p.group, order, n_lanes, strings)
    )


def run(p: Program, scenario: Scenario, jobs: Array | None = None) -> Fixpoint:
    """The least fixpoint of the given jobs (default: all), on the engine of the program.

    ``jobs`` int32: their numbers; the others stay untouched (nothing issued).
    """
    lay = layout(p, scenario)
    k = p.kernel
    n_jobs = len(p.job_event) - 1
    job_of_rank = p.matching.prepared.ranks["job"].to_numpy()
    done = k["done"] if scenario.use_states else np.zeros(len(p.r), np.bool_)
    if scenario.use_records:
        done = done | k["passed"]
    chosen = np.arange(n_jobs, dtype=np.int32) if jobs is None else jobs.astype(np.int32)

    def offsets(of_rank: Array) -> Array:
        return np.searchsorted(job_of_rank[of_rank], np.arange(n_jobs + 1)).astype(np.int32)

    where = _Where(chosen, offsets(lay.lane_rank), offsets(lay.queue_rank), done)
    how = _by_work_list if p.matching.prepared.engine.passes else _in_rounds
    return how(p, scenario, lay, where)


@dataclass(frozen=True)
class _Where:
    """The jobs of a run, where the places of each job begin, and what is known to be complete."""

    jobs: Array
    job_lane: Array
    job_queue: Array
    done: Array


def _by_work_list(p: Program, scenario: Scenario, lay: Layout, where: _Where) -> Fixpoint:
    """The fixpoint by the compiled work list of :mod:`replay_kernel`."""
    k = p.kernel
    n = len(p.r)
    issued, started, completed = (np.zeros(n, np.bool_) for _ in range(3))
    lane_at = np.full(len(lay.lane_first), -1, np.int32)
    queue_at = np.full(len(lay.queue_first), -1, np.int32)
    partner = np.full(n, -1, np.int32)
    scratch = replay_kernel.scratch(
        n, len(lay.lane_first), len(lay.queue_first), len(lay.unit_first), len(k["node_kind"])
    )
    # how far each mailbox is behind us
    take_at, send_at = k["take_start"][:-1].copy(), k["send_start"][:-1].copy()
    replay_kernel.run(
        where.jobs, p.job_event, where.job_lane, where.job_queue, k["job_box"],
        lay.lane_of, lay.lane_next, lay.lane_first,
        lay.queue_of, lay.queue_next, lay.queue_first,
        lay.unit_of, lay.unit_first, lay.unit_size,
        k["host_blocks"], k["wait_kind"], k["wait_left"].copy(), k["dep_start"], k["dep_wait"],
        k["node1"], k["node2"], k["role"], _eager(p, scenario), k["alone"], where.done,
        k["node_start"], k["node_part"], k["node_kind"], k["node_need"], k["node_blocks"],
        k["take_start"], k["take_event"], k["take_one"], k["send_start"], k["send_event"],
        p.rank_of, k["peer"], k["tag"], k["recv_peer"], k["recv_tag"],
        scenario.early_release, scenario.atomic_batch, scenario.wild_high,
        issued, started, completed, lane_at, queue_at, partner, *scratch, take_at, send_at,
        *replay_kernel.stacks(where.jobs, p.job_event, where.job_lane, where.job_queue),
    )  # fmt: skip
    return Fixpoint(scenario, issued, started, completed, lane_at, queue_at, partner, lay)


_MOST_EVENTS: Final = (1 << 29) - 1
"""Parts are numbered in 32 bits, four an event."""


def _in_rounds(p: Program, scenario: Scenario, lay: Layout, where: _Where) -> Fixpoint:
    """The fixpoint by :mod:`rounds_kernel`, a block a job.

    Raises:
        OverflowError: more events than its numbers hold.
    """
    n = len(p.r)
    if n > _MOST_EVENTS:
        raise OverflowError(f"replay: expected at most {_MOST_EVENTS} events a shard, found {n}")
    many = len(where.jobs)
    places = where.job_lane[where.jobs + 1] - where.job_lane[where.jobs]
    places = places + where.job_queue[where.jobs + 1] - where.job_queue[where.jobs]
    got = p.matching.prepared.engine.launch(
        rounds_kernel.bound,
        rounds_arguments(p, scenario, lay, where),
        many,
        int(places.max(initial=0)),
    )
    return Fixpoint(
        scenario, got["issued"], got["started"], got["completed"], got["lane_at"],
        got["queue_at"], got["partner"], lay,
    )  # fmt: skip


def rounds_arguments(
    p: Program, scenario: Scenario, lay: Layout, where: _Where
) -> dict[str, Argument]:
    """What :func:`rounds_kernel.rounds` takes, by name."""
    n = len(p.r)
    lanes, queues = len(lay.lane_first), len(lay.queue_first)
    nodes, boxes = len(p.kernel["node_kind"]), len(p.kernel["take_start"]) - 1
    k = {name: array for name, array in p.kernel.items() if name not in {"passed", "wait_left"}}
    flag, number = np.bool_, np.int32
    return {
        **k,
        "done": where.done,
        "wait_needs": p.kernel["wait_left"],
        "eager": _eager(p, scenario),
        "jobs": where.jobs, "job_event": p.job_event,
        "job_lane": where.job_lane, "job_queue": where.job_queue,
        "lane_of": lay.lane_of, "lane_next": lay.lane_next, "lane_first": lay.lane_first,
        "queue_of": lay.queue_of, "queue_next": lay.queue_next, "queue_first": lay.queue_first,
        "unit_of": lay.unit_of, "unit_first": lay.unit_first, "unit_size": lay.unit_size,
        "rank_of": p.rank_of,
        "early": scenario.early_release,
        "atomic": scenario.atomic_batch,
        "wild_high": scenario.wild_high,
        "issued": Fresh(n, flag, keep=True),
        "started": Fresh(n, flag, keep=True),
        "completed": Fresh(n, flag, keep=True),
        "lane_at": Fresh(lanes, number, -1, keep=True),
        "queue_at": Fresh(queues, number, -1, keep=True),
        "partner": Fresh(n, number, -1, keep=True),
        "waiting": Fresh(lanes + queues, number),
        "ready": Fresh(n, flag),
        "claimed": Fresh(n, number),
        "parts_left": Fresh(n, number),
        "satisfied": Fresh(n, number),
        "wait_left": Fresh(n, number),
        "units": Fresh(4 * len(lay.unit_first), number),
        "arrived": Fresh(2 * nodes, number),
        "root_in": Fresh(2 * nodes, flag),
        "outstanding": Fresh(lanes, number),
        "forced": Fresh(lanes, number, -1),
        "take_at": Fresh(boxes, number),
        "send_at": Fresh(boxes, number),
        "counts": Fresh(rounds_kernel.COUNTERS * len(where.jobs), number),
        "starts": Fresh(2 * n, number),
        "sats": Fresh(4 * n, number),
        "comps": Fresh(n, number),
        "agents": Fresh(lanes + queues, number),
    }  # fmt: skip


def _eager(p: Program, scenario: Scenario) -> Array:
    """bool[n]: sends that complete without a receiver (rule 5)."""
    e = p.matching.events
    n = e.height
    mode = e["send_mode"]
    plain = mode.null_count() == n or int(mode.max() or 0) == SEND_MODE["standard"]  # type: ignore[arg-type]
    if plain and not scenario.eager_bytes:
        return np.zeros(n, np.bool_)
    how = codes(mode, SEND_MODE["standard"])
    small = np.zeros(n, np.bool_)
    if scenario.eager_bytes == Scenario.INFINITE:
        small[:] = True
    elif scenario.eager_bytes:
        size = codes(e["bytes"])
        small = (size >= 0) & (size <= scenario.eager_bytes)
    out: Array = (how == SEND_MODE["buffered"]) | (small & (how != SEND_MODE["synchronous"]))
    return out


def replay(trace: Trace, matching: Matching, scenario: Scenario | None = None) -> pl.DataFrame:
    """Facts of every event at the fixpoint: job, rank, lane, seq, issued, started, completed."""
    if matching.prepared.trace is not trace:
        raise ValueError("matching: expected the matching of this trace, found that of another")
    fix = run(build(matching), scenario or Scenario())
    return matching.events.select("job", "rank", "lane", "seq").with_columns(
        issued=pl.Series(fix.issued),
        started=pl.Series(fix.started),
        completed=pl.Series(fix.completed),
    )
