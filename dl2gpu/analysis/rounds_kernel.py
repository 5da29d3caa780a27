"""The replay of DESIGN.md section 4 in rounds: one source for a GPU, its simulator and the host.

A block of threads takes a job. In each round its threads step the host lanes and device queues at
which something may have moved, count arrivals by atomic additions, and hand completions on; between
the phases of a round they wait for each other. The rules are monotone, so the fixpoint is that of
the work list in :mod:`replay_kernel`, bit for bit.

The function names what it needs of the machine as ``numba.cuda`` does. :func:`bound` binds these
names: to ``numba.cuda`` (a GPU, or its simulator) or to a module that plays one thread on the host.
It calls no other function, and writes into no array that it is given to read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

from dl2gpu.analysis.replay_kernel import (
    MESSAGE,
    PROBE,
    RECV,
    ROOT,
    ROOT_RECEIVES,
    ROOT_SENDS,
    SEND,
)
from dl2gpu.engine.native import Bools, Int8s, Int32s, Int64s, UInt8s

__all__ = ["COUNTERS", "bound", "rounds"]

cuda: Any = None
"""What :func:`bound` replaces."""

COUNTERS: Final = 8
"""Counters of a job: the lengths of its five lists, and how many took from a mailbox."""

LANES: Final = 0
QUEUES: Final = 1
STARTS: Final = 2
SATS: Final = 3
COMPS: Final = 4
TAKEN: Final = 5

READY: Final = 0
LEFT: Final = 1
TOTAL: Final = 2
MET: Final = 3


def bound(machine: Any) -> Callable[..., None]:
    """:func:`rounds` with the names of ``machine``, a module with the names of ``numba.cuda``.

    Used of it: ``x`` of ``threadIdx``, ``blockDim``, ``blockIdx`` and ``gridDim``,
    ``syncthreads()``, and ``atomic.add``, ``atomic.or_``, ``atomic.max`` of (array, index, value),
    which give what was there before.
    """
    names = {**rounds.__globals__, "cuda": machine}
    made = FunctionType(rounds.__code__, names, rounds.__name__)
    made.__module__ = rounds.__module__
    return made


def rounds(
    jobs: Int32s, job_event: Int32s, job_lane: Int32s, job_queue: Int32s, job_box: Int32s,
    lane_of: Int32s, lane_next: Int32s, lane_first: Int32s,
    queue_of: Int32s, queue_next: Int32s, queue_first: Int32s,
    unit_of: Int32s, unit_first: Int32s, unit_size: Int32s,
    host_blocks: Bools, wait_kind: UInt8s, wait_needs: Int32s, dep_start: Int32s, dep_wait: Int32s,
    node1: Int32s, node2: Int32s, role: Int8s, eager: Bools, alone: Bools, done: Bools,
    node_start: Int32s, node_part: Int32s, node_kind: Int8s, node_need: Int32s, node_blocks: Bools,
    take_start: Int32s, take_event: Int32s, take_one: Bools, send_start: Int32s, send_event: Int32s,
    rank_of: Int32s, peer: Int32s, tag: Int64s, recv_peer: Int32s, recv_tag: Int64s,
    early: bool, atomic: bool, wild_high: bool,
    issued: Bools, started: Bools, completed: Bools, lane_at: Int32s, queue_at: Int32s,
    partner: Int32s,
    waiting: Int32s, ready: Bools, claimed: Int32s, parts_left: Int32s, satisfied: Int32s,
    wait_left: Int32s, units: Int32s, arrived: Int32s, root_in: Bools, outstanding: Int32s,
    forced: Int32s, take_at: Int32s, send_at: Int32s,
    counts: Int32s, starts: Int32s, sats: Int32s, comps: Int32s, agents: Int32s,
) -> None:  # fmt: skip
    """Runs the given jobs to their least fixpoint, a block a job; writes ``issued`` to ``partner``.

    What is read is as in :func:`replay_kernel.run` (``wait_needs`` is its ``wait_left``). What is
    written begins as zeros, but ``lane_at``, ``queue_at``, ``partner`` and ``forced`` as -1. With n
    events, l lanes, q queues, u batches, v nodes and j given jobs, int32 unless said: ``waiting``
    [l+q] (a place is on a list), ``ready`` bool[n], ``claimed`` [n] (put on the list of
    completions), ``parts_left`` [n], ``satisfied`` [n] (a bit for each layer and half),
    ``wait_left`` [n], ``units`` [4u], ``arrived`` [2v] and ``root_in`` bool[2v] (by node and
    layer), ``outstanding`` [l], ``forced`` [l], ``take_at`` and ``send_at`` [mailboxes],
    ``counts`` [COUNTERS * j]. Lists: ``starts`` [2n], ``sats`` [4n], ``comps`` [n], ``agents``
    [l+q], each job at its own offset.
    """
    me = cuda.threadIdx.x
    many = cuda.blockDim.x
    n_lanes = len(lane_first)
    for block in range(cuda.blockIdx.x, len(jobs), cuda.gridDim.x):
        j = jobs[block]
        c0 = COUNTERS * block
        e0, e1 = job_event[j], job_event[j + 1]
        lane0, lane1 = job_lane[j], job_lane[j + 1]
        queue0, queue1 = n_lanes + job_queue[j], n_lanes + job_queue[j + 1]
        box0, box1 = job_box[j], job_box[j + 1]
        starts0, sats0 = 2 * e0, 4 * e0

        # --- before anything moves
        for e in range(e0 + me, e1, many):
            wait_left[e] = wait_needs[e]
        for b in range(box0 + me, box1, many):
            take_at[b] = take_start[b]
            send_at[b] = send_start[b]
        for a in range(lane0 + me, lane1, many):
            lane_at[a] = lane_first[a]
            agents[a] = a
            waiting[a] = 1
        for a in range(queue0 + me, queue1, many):
            queue_at[a - n_lanes] = queue_first[a - n_lanes]
            agents[a] = a
            waiting[a] = 1
        if me == 0:
            counts[c0 + LANES] = lane1 - lane0
            counts[c0 + QUEUES] = queue1 - queue0
        cuda.syncthreads()
        for e in range(e0 + me, e1, many):
            parts = 0
            if wait_kind[e] == 0 and not alone[e]:
                if node1[e] >= 0 or role[e] != 0:
                    parts = 1
                if node2[e] >= 0 or (box0 < box1 and recv_peer[e] >= -1):
                    parts = 2
            u = unit_of[e]
            if u >= 0:
                cuda.atomic.add(units, 4 * u + TOTAL, parts)
            if not done[e]:
                parts_left[e] = parts
                if u >= 0:
                    cuda.atomic.add(units, 4 * u + LEFT, parts)
                continue
            # rule 7: what the trace says completed, completed; its lane got at least here
            cuda.atomic.max(forced, lane_of[e], e)
            issued[e] = True
            started[e] = True
            completed[e] = True
            ready[e] = True
            claimed[e] = 1
            satisfied[e] = 15
            if u >= 0:
                cuda.atomic.add(units, 4 * u + READY, 1)
                cuda.atomic.add(units, 4 * u + MET, parts)
            for layer in range(2):
                if node1[e] >= 0 and role[e] != PROBE:
                    cuda.atomic.add(arrived, 2 * node1[e] + layer, 1)
                    if role[e] == ROOT or role[e] == SEND:
                        root_in[2 * node1[e] + layer] = True
                if node2[e] >= 0:
                    cuda.atomic.add(arrived, 2 * node2[e] + layer, 1)
            for x in range(dep_start[e], dep_start[e + 1]):
                cuda.atomic.add(wait_left, dep_wait[x], -1)

        start_from = 0
        sat_from = 0
        comp_from = 0
        taken = 0
        early_mail = True
        while True:
            cuda.syncthreads()
            # --- rule 1: a host goes on until it stands at something that blocks it
            for y in range(me, counts[c0 + LANES], many):
                lane = agents[lane0 + y]
                waiting[lane] = 0
                e = lane_at[lane]
                while e >= 0:
                    passed_before = e <= forced[lane]
                    if not issued[e]:
                        issued[e] = True
                        if queue_of[e] >= 0 or not host_blocks[e]:
                            outstanding[lane] += 1
                        if queue_of[e] >= 0:
                            a = n_lanes + queue_of[e]
                            if cuda.atomic.add(waiting, a, 1) == 0:
                                agents[queue0 + cuda.atomic.add(counts, c0 + QUEUES, 1)] = a
                        elif wait_kind[e] != 0:
                            started[e] = True
                        else:
                            # rule 2: a host operation starts when issued, a batch as a unit
                            ready[e] = True
                            u = unit_of[e]
                            if u < 0:
                                starts[starts0 + cuda.atomic.add(counts, c0 + STARTS, 1)] = 2 * e
                            elif cuda.atomic.add(units, 4 * u + READY, 1) + 1 == unit_size[u]:
                                x = unit_first[u]
                                while x >= 0 and unit_of[x] == u:
                                    if not started[x]:
                                        at = cuda.atomic.add(counts, c0 + STARTS, 1)
                                        starts[starts0 + at] = 2 * x
                                    x = lane_next[x]
                    if queue_of[e] < 0 and host_blocks[e] and not completed[e]:
                        if (wait_kind[e] == 1 and wait_left[e] <= 0) or (
                            wait_kind[e] == 2 and outstanding[lane] <= 0
                        ):
                            if cuda.atomic.add(claimed, e, 1) == 0:
                                comps[e0 + cuda.atomic.add(counts, c0 + COMPS, 1)] = e
                            break
                        if passed_before:
                            if wait_kind[e] != 0:
                                # the host is known to have gone past this wait
                                completed[e] = True
                        elif unit_of[e] < 0:
                            break
                    u = unit_of[e]
                    if u >= 0 and not passed_before:
                        # the host issues a batch as a whole, and waits behind its last member
                        x = lane_next[e]
                        if x < 0 or unit_of[x] != u:
                            x = unit_first[u]
                            while x >= 0 and unit_of[x] == u:
                                if queue_of[x] < 0 and host_blocks[x] and not completed[x]:
                                    break
                                x = lane_next[x]
                            if x >= 0 and unit_of[x] == u:
                                break
                    e = lane_next[e]
                lane_at[lane] = e
            cuda.syncthreads()
            # --- rule 2: the head of a queue starts when it has been issued
            for y in range(me, counts[c0 + QUEUES], many):
                a = agents[queue0 + y]
                waiting[a] = 0
                queue = a - n_lanes
                e = queue_at[queue]
                while e >= 0 and completed[e]:
                    e = queue_next[e]
                queue_at[queue] = e
                if e < 0 or not issued[e]:
                    continue
                if wait_kind[e] != 0:
                    started[e] = True
                    if wait_left[e] <= 0 and cuda.atomic.add(claimed, e, 1) == 0:
                        comps[e0 + cuda.atomic.add(counts, c0 + COMPS, 1)] = e
                    continue
                u = unit_of[e]
                if u < 0:
                    if not ready[e]:
                        ready[e] = True
                        starts[starts0 + cuda.atomic.add(counts, c0 + STARTS, 1)] = 2 * e
                    continue
                z = e
                while z >= 0 and unit_of[z] == u and issued[z]:
                    if not ready[z]:
                        ready[z] = True
                        if cuda.atomic.add(units, 4 * u + READY, 1) + 1 == unit_size[u]:
                            x = unit_first[u]
                            while x >= 0 and unit_of[x] == u:
                                if not started[x]:
                                    at = cuda.atomic.add(counts, c0 + STARTS, 1)
                                    starts[starts0 + at] = 2 * x
                                x = lane_next[x]
                    z = queue_next[z]
            cuda.syncthreads()
            if me == 0:
                counts[c0 + LANES] = 0
                counts[c0 + QUEUES] = 0
            # --- what starts arrives at its nodes; who comes last lets all go (rules 3 and 5)
            start_to = counts[c0 + STARTS]
            for y in range(start_from + me, start_to, many):
                e = starts[starts0 + y] >> 1
                u = unit_of[e]
                if parts_left[e] == 0:
                    if not started[e]:
                        started[e] = True
                        if (u < 0 or units[4 * u + LEFT] == 0) and cuda.atomic.add(
                            claimed, e, 1
                        ) == 0:
                            comps[e0 + cuda.atomic.add(counts, c0 + COMPS, 1)] = e
                    continue
                started[e] = True
                shown = not atomic or starts[starts0 + y] & 1 == 1
                for layer in range(1 if shown else 0, 2 if shown or u < 0 else 1):
                    for half in range(2):
                        v = node1[e] if half == 0 else node2[e]
                        kind = role[e] if half == 0 else RECV
                        part = 4 * e + 2 * layer + half
                        bit = 1 << (part & 3)
                        free = False  # it needs nobody
                        if kind == SEND and half == 0 and eager[e]:
                            free = True  # rule 5, buffered
                        came = -1
                        if v >= 0 and kind != PROBE:
                            came = cuda.atomic.add(arrived, 2 * v + layer, 1) + 1
                            if kind == ROOT or kind == SEND:
                                root_in[2 * v + layer] = True
                            if node_blocks[v] or (early and node_kind[v] == ROOT_SENDS):
                                came = -1
                            elif early and node_kind[v] == ROOT_RECEIVES and kind != ROOT:
                                free = True  # rule 4, released early
                        if free and cuda.atomic.or_(satisfied, e, bit) & bit == 0:
                            sats[sats0 + cuda.atomic.add(counts, c0 + SATS, 1)] = part
                        if came < 0 or came != node_need[v]:
                            continue
                        for x in range(node_start[v], node_start[v + 1]):
                            w = node_part[x] >> 1
                            if role[w] == PROBE:
                                continue
                            part = 4 * w + 2 * layer + (node_part[x] & 1)
                            bit = 1 << (part & 3)
                            if cuda.atomic.or_(satisfied, w, bit) & bit == 0:
                                sats[sats0 + cuda.atomic.add(counts, c0 + SATS, 1)] = part
            cuda.syncthreads()
            # --- who needs one other only: probes, and those released early (rule 4)
            for y in range(start_from + me, start_to, many):
                e = starts[starts0 + y] >> 1
                if parts_left[e] == 0 or node1[e] < 0:
                    continue
                v = node1[e]
                kind = role[e]
                shown = not atomic or starts[starts0 + y] & 1 == 1
                for layer in range(1 if shown else 0, 2 if shown or unit_of[e] < 0 else 1):
                    root = root_in[2 * v + layer]
                    for_root = early and node_kind[v] == ROOT_SENDS and not node_blocks[v]
                    if root and (kind == PROBE or (for_root and kind != ROOT)):
                        part = 4 * e + 2 * layer
                        bit = 1 << (part & 3)
                        if cuda.atomic.or_(satisfied, e, bit) & bit == 0:
                            sats[sats0 + cuda.atomic.add(counts, c0 + SATS, 1)] = part
                    is_message = node_kind[v] == MESSAGE
                    if not (kind == SEND and is_message) and not (kind == ROOT and for_root):
                        continue
                    for x in range(node_start[v], node_start[v + 1]):
                        w = node_part[x] >> 1
                        if not started[w] or (is_message and role[w] != PROBE):
                            continue
                        part = 4 * w + 2 * layer
                        bit = 1 << (part & 3)
                        if cuda.atomic.or_(satisfied, w, bit) & bit == 0:
                            sats[sats0 + cuda.atomic.add(counts, c0 + SATS, 1)] = part
            start_from = start_to
            cuda.syncthreads()
            # --- parts that are satisfied; layer 0 shows a batch to its partners where it is atomic
            sat_to = counts[c0 + SATS]
            for y in range(sat_from + me, sat_to, many):
                part = sats[sats0 + y]
                e = part >> 2
                u = unit_of[e]
                if part & 2 == 0:
                    if (
                        u >= 0
                        and cuda.atomic.add(units, 4 * u + MET, 1) + 1 == units[4 * u + TOTAL]
                    ):
                        x = unit_first[u]
                        while x >= 0 and unit_of[x] == u:
                            if not done[x]:
                                at = cuda.atomic.add(counts, c0 + STARTS, 1)
                                starts[starts0 + at] = 2 * x + 1
                            x = lane_next[x]
                    continue
                left = cuda.atomic.add(parts_left, e, -1) - 1
                if u < 0:
                    if left == 0 and cuda.atomic.add(claimed, e, 1) == 0:
                        comps[e0 + cuda.atomic.add(counts, c0 + COMPS, 1)] = e
                elif (
                    cuda.atomic.add(units, 4 * u + LEFT, -1) == 1
                    and units[4 * u + READY] == unit_size[u]
                ):
                    x = unit_first[u]
                    while x >= 0 and unit_of[x] == u:
                        if cuda.atomic.add(claimed, x, 1) == 0:
                            comps[e0 + cuda.atomic.add(counts, c0 + COMPS, 1)] = x
                        x = lane_next[x]
            sat_from = sat_to
            cuda.syncthreads()
            # --- completions move the places that stood there and what waits for them (rule 6)
            comp_to = counts[c0 + COMPS]
            for y in range(comp_from + me, comp_to, many):
                e = comps[e0 + y]
                if completed[e]:
                    continue
                completed[e] = True
                lane = lane_of[e]
                at = lane_at[lane]
                moved = at == e or unit_of[e] >= 0
                if queue_of[e] >= 0 or not host_blocks[e]:
                    left = cuda.atomic.add(outstanding, lane, -1) - 1
                    if at >= 0 and wait_kind[at] == 2 and left <= 0:
                        moved = True
                if at >= 0 and moved and cuda.atomic.add(waiting, lane, 1) == 0:
                    agents[lane0 + cuda.atomic.add(counts, c0 + LANES, 1)] = lane
                if queue_of[e] >= 0:
                    a = n_lanes + queue_of[e]
                    if cuda.atomic.add(waiting, a, 1) == 0:
                        agents[queue0 + cuda.atomic.add(counts, c0 + QUEUES, 1)] = a
                for x in range(dep_start[e], dep_start[e + 1]):
                    w = dep_wait[x]
                    if cuda.atomic.add(wait_left, w, -1) > 1 or not issued[w]:
                        continue
                    if queue_of[w] < 0:
                        a = lane_of[w]
                        if cuda.atomic.add(waiting, a, 1) == 0:
                            agents[lane0 + cuda.atomic.add(counts, c0 + LANES, 1)] = a
                    else:
                        a = n_lanes + queue_of[w]
                        if cuda.atomic.add(waiting, a, 1) == 0:
                            agents[queue0 + cuda.atomic.add(counts, c0 + QUEUES, 1)] = a
            comp_from = comp_to
            cuda.syncthreads()
            if counts[c0 + LANES] + counts[c0 + QUEUES] + counts[c0 + STARTS] - start_from > 0:
                continue
            if box0 == box1:
                break
            # --- nothing else moves: wildcard receives take what is there (rule 5), a thread a
            # mailbox
            for b in range(box0 + me, box1, many):
                while not early_mail and take_at[b] < take_start[b + 1]:
                    e = take_event[take_at[b]]
                    if not satisfied[e] & (8 if role[e] == SEND else 4):
                        break
                    take_at[b] += 1
                while send_at[b] < send_start[b + 1]:
                    if partner[send_event[send_at[b]]] < 0:
                        break
                    send_at[b] += 1
                for x in range(take_at[b], take_start[b + 1]):
                    e = take_event[x]
                    if take_one[b] and not issued[e]:
                        break  # nor are those behind it
                    half = 1 if role[e] == SEND else 0  # 1: the receive of a sendrecv
                    # a receive that is recorded as complete has taken a message before
                    over = early_mail and done[e] and role[e] == RECV
                    if not started[e] or (satisfied[e] & (4 + 4 * half) and not over):
                        continue
                    src = peer[e] if half == 0 else recv_peer[e]
                    want = tag[e] if half == 0 else recv_tag[e]
                    best = -1
                    seen_rank = -1
                    for y in range(send_at[b], send_start[b + 1]):
                        s = send_event[y]
                        if not started[s] or partner[s] >= 0:
                            continue
                        if src >= 0 and rank_of[s] != src:
                            continue
                        if want >= 0 and tag[s] != want:
                            continue
                        if rank_of[s] == seen_rank:
                            continue
                        seen_rank = rank_of[s]
                        best = s
                        if not wild_high:
                            break
                    if best < 0:
                        continue
                    cuda.atomic.add(counts, c0 + TAKEN, 1)
                    part = 4 * e + 2 + half
                    bit = 1 << (part & 3)
                    if cuda.atomic.or_(satisfied, e, bit) & bit == 0:
                        sats[sats0 + cuda.atomic.add(counts, c0 + SATS, 1)] = part
                    if role[e] != PROBE:
                        if half == 0:
                            partner[e] = best
                        partner[best] = e
                        if cuda.atomic.or_(satisfied, best, 4) & 4 == 0:
                            sats[sats0 + cuda.atomic.add(counts, c0 + SATS, 1)] = 4 * best + 2
            early_mail = False
            cuda.syncthreads()
            if counts[c0 + TAKEN] == taken:
                break
            taken = counts[c0 + TAKEN]
