"""Replay: how far each rank can get.

``Program`` is a matched trace as flat arrays; ``run`` takes it to the least fixpoint of the rules
of DESIGN.md section 4 under a ``Scenario``; the kernel releases the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import polars as pl

from dl2gpu.analysis import replay_kernel
from dl2gpu.analysis.launch import batch_of, launch
from dl2gpu.analysis.matching import Matching
from dl2gpu.analysis.returns import returned
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.analysis.tables import NCCL_LIKE, ROLE
from dl2gpu.analysis.waits import no_pairs, wait_pairs
from dl2gpu.engine.arrays import Array, codes, flags, plain
from dl2gpu.trace.schema import MODE, OP, Trace

__all__ = ["Fixpoint", "Layout", "Program", "Scenario", "build", "layout", "replay", "run"]


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
    layouts: dict[tuple[bool, int, int], Layout] = field(default_factory=dict)
    """Those made so far, by the scenario's ``reading``."""
    made: dict[str, Array] = field(default_factory=dict)
    """Arrays made so far that only some scenarios need."""

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
        any_mode = (codes(e["mode"].gather(rows), null=0) != MODE["all"]) & ~everything
        needs = None
        if any_mode.any():
            waits, needs = returned(m, waits, rows, everything, blocking)
        target, wait = waits["target"].to_numpy(), waits["wait"].to_numpy().astype(np.int32)
        dep_start, dep_item = replay_kernel.bucket(target.astype(np.int64), n)
        dep_wait = wait[dep_item]
        wait_left = np.bincount(wait, minlength=n).astype(np.int32)
        if needs is not None:
            wait_left[needs["wait"].to_numpy()] = needs["need"].to_numpy()
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
        "wait_needs": wait_left,
        "dep_start": dep_start,
        "dep_wait": dep_wait,
        "node1": np.where(alone, np.int32(-1), node1),
        "node2": node2,
        "alone": alone,
        "known": flags(e["done"]) + 2 * flags(e["passed"]).astype(np.uint8),
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
    key = scenario.reading
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
    elif scenario.queues:
        stream = _shared_queues(p, scenario.queues)
        strings = max(strings, scenario.queues)
    if scenario.flip_lanes >= 0:
        lane = p.lane.astype(np.int64)
        flipped = np.where(p.rank_of >> scenario.flip_lanes & 1, -lane, lane)
        order = np.lexsort((np.arange(n), flipped, p.r))
    n_lanes = int(p.lane.max(initial=0)) + 1
    return Layout(
        *replay_kernel.index_program(p.r, p.lane, stream, p.group, order, n_lanes, strings)
    )


def _shared_queues(p: Program, queues: int) -> Array:
    """int32[n]: the queue of each event where a rank's streams share so many in turn.

    The k-th stream of a rank, in order of first use, is on queue k modulo ``queues``.
    """
    on = np.flatnonzero(p.stream >= 0)
    key = p.r[on].astype(np.int64) << 32 | p.stream[on]
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    seen = np.argsort(np.argsort(first))  # streams of all ranks in order of first use
    rank = p.r[on[first]]
    of_rank = np.lexsort((seen, rank))
    begin = np.concatenate([[True], np.diff(rank[of_rank]) != 0])[: len(of_rank)]
    place = np.arange(len(of_rank))
    turn = np.empty(len(of_rank), np.int32)
    turn[of_rank] = place - np.maximum.accumulate(np.where(begin, place, 0))
    out = np.full(len(p.r), -1, np.int32)
    out[on] = turn[inverse] % queues
    return out


def run(p: Program, scenario: Scenario, jobs: Array | None = None) -> Fixpoint:
    """The least fixpoint of the given jobs (default: all), on the engine of the program.

    ``jobs`` int32: their numbers; the others stay untouched (nothing issued).
    """
    n_jobs = len(p.job_event) - 1
    chosen = np.arange(n_jobs, dtype=np.int32) if jobs is None else jobs.astype(np.int32)
    cells = np.zeros((len(chosen), 3), np.int32)
    cells[:, 0] = chosen
    batch = batch_of(p, layout(p, scenario), [scenario], cells)
    got = launch(p, batch)
    return Fixpoint(
        scenario, got["issued"], got["started"], got["completed"], got["lane_at"],
        got["queue_at"], got["partner"], batch.layout,
    )  # fmt: skip


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
