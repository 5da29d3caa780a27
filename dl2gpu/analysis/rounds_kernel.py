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

from dl2gpu.analysis.choice_kernel import (
    ATOMIC,
    BUFFER_BYTES,
    BUFFER_MESSAGES,
    CHOICES,
    CHOOSE_LAST,
    CHOOSE_SEEDED,
    COMPLETED,
    DIGEST,
    EAGER_BYTES,
    EARLY,
    FACTS,
    GIVEN,
    IN_POOL,
    MASK,
    OUTCOMES,
    PARAMETERS,
    POLICY,
    POOL_BYTES,
    SEED,
    STANDING,
    STATE,
    WILD,
    WILD_CHOSEN,
    WILD_HIGH,
)
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
    cells: Int32s, table: Int64s, sizes: Int32s,
    job_event: Int32s, job_lane: Int32s, job_queue: Int32s, job_box: Int32s,
    lane_of: Int32s, lane_next: Int32s, lane_first: Int32s,
    queue_of: Int32s, queue_next: Int32s, queue_first: Int32s,
    unit_of: Int32s, unit_first: Int32s, unit_size: Int32s,
    host_blocks: Bools, wait_kind: UInt8s, wait_needs: Int32s, dep_start: Int32s, dep_wait: Int32s,
    node1: Int32s, node2: Int32s, role: Int8s, eager_at: Int64s, alone: Bools, known: UInt8s,
    node_start: Int32s, node_part: Int32s, node_kind: Int8s, node_need: Int32s, node_blocks: Bools,
    channel: Int32s, sender: Int32s, pool_of: Int32s,
    take_start: Int32s, take_event: Int32s, take_one: Bools, send_start: Int32s, send_event: Int32s,
    rank_of: Int32s, peer: Int32s, tag: Int64s, recv_peer: Int32s, recv_tag: Int64s,
    all_issued: Bools, all_started: Bools, all_completed: Bools, all_lane_at: Int32s,
    all_queue_at: Int32s, all_partner: Int32s, outcome: Int64s,
    all_waiting: Int32s, all_ready: Bools, all_claimed: Int32s, all_parts_left: Int32s,
    all_satisfied: Int32s, all_wait_left: Int32s, all_units: Int32s, all_arrived: Int32s,
    all_root_in: Bools, all_outstanding: Int32s, all_forced: Int32s, all_take_at: Int32s,
    all_send_at: Int32s, all_pool_used: Int64s,
    counts: Int32s, all_starts: Int32s, all_sats: Int32s, all_comps: Int32s, all_agents: Int32s,
) -> None:  # fmt: skip
    """Runs the given cells to their least fixpoint, a block a cell; writes ``all_issued`` and on.

    What is read is as in :func:`replay_kernel.run`. The third number of a cell says which copy of
    the state it works on: ``all_x`` holds the copies of ``x`` one behind the other. No two cells of
    one job have the same copy. ``sizes`` int32[10]: cells, words of a scenario, words of an
    outcome, and n, l, q, u, v, mailboxes, pools (an array of no elements may have come with one).
    What is
    written begins as zeros, but ``lane_at``, ``queue_at``, ``partner`` and ``forced`` as -1. With n
    events, l lanes, q queues, u batches, v nodes and c given cells, int32 unless said, a copy of
    each: ``waiting``
    [l+q] (a place is on a list), ``ready`` bool[n], ``claimed`` [n] (put on the list of
    completions), ``parts_left`` [n], ``satisfied`` [n] (a bit for each layer and half),
    ``wait_left`` [n], ``units`` [4u], ``arrived`` [3v] (by node and layer; and messages at the head
    of a channel that are gone) and ``root_in`` bool[2v], ``outstanding`` [l], ``forced`` [l],
    ``take_at`` and ``send_at`` [mailboxes], ``pool_used`` int64[pools]. Lists: ``starts`` [2n],
    ``sats`` [4n], ``comps`` [n], ``agents``
    [l+q], each job at its own offset. ``counts`` [COUNTERS * c] is not copied.
    """
    me = cuda.threadIdx.x
    many = cuda.blockDim.x
    n_cells, width, record = sizes[0], sizes[1], sizes[2]
    n, n_lanes, n_queues = sizes[3], sizes[4], sizes[5]
    n_units, n_nodes, n_boxes = sizes[6], sizes[7], sizes[8]
    places = n_lanes + n_queues
    for block in range(cuda.blockIdx.x, n_cells, cuda.gridDim.x):
        j = cells[3 * block]
        row = cells[3 * block + 1] * width
        copy = cells[3 * block + 2]
        issued = all_issued[copy * n : copy * n + n]
        started = all_started[copy * n : copy * n + n]
        completed = all_completed[copy * n : copy * n + n]
        lane_at = all_lane_at[copy * n_lanes : copy * n_lanes + n_lanes]
        queue_at = all_queue_at[copy * n_queues : copy * n_queues + n_queues]
        partner = all_partner[copy * n : copy * n + n]
        waiting = all_waiting[copy * places : copy * places + places]
        ready = all_ready[copy * n : copy * n + n]
        claimed = all_claimed[copy * n : copy * n + n]
        parts_left = all_parts_left[copy * n : copy * n + n]
        satisfied = all_satisfied[copy * n : copy * n + n]
        wait_left = all_wait_left[copy * n : copy * n + n]
        units = all_units[copy * 4 * n_units : copy * 4 * n_units + 4 * n_units]
        arrived = all_arrived[copy * 3 * n_nodes : copy * 3 * n_nodes + 3 * n_nodes]
        root_in = all_root_in[copy * 2 * n_nodes : copy * 2 * n_nodes + 2 * n_nodes]
        outstanding = all_outstanding[copy * n_lanes : copy * n_lanes + n_lanes]
        forced = all_forced[copy * n_lanes : copy * n_lanes + n_lanes]
        take_at = all_take_at[copy * n_boxes : copy * n_boxes + n_boxes]
        send_at = all_send_at[copy * n_boxes : copy * n_boxes + n_boxes]
        starts = all_starts[copy * 2 * n : copy * 2 * n + 2 * n]
        sats = all_sats[copy * 4 * n : copy * 4 * n + 4 * n]
        comps = all_comps[copy * n : copy * n + n]
        pool_used = all_pool_used[copy * sizes[9] : copy * sizes[9] + sizes[9]]
        agents = all_agents[copy * places : copy * places + places]

        eager_bytes = table[row + EAGER_BYTES]
        early = table[row + EARLY] != 0
        atomic = table[row + ATOMIC] != 0
        wild_high = table[row + WILD] == WILD_HIGH
        pool_bytes = table[row + POOL_BYTES]
        chosen = table[row + WILD] == WILD_CHOSEN or pool_bytes > 0
        buffer_messages, buffer_bytes = table[row + BUFFER_MESSAGES], table[row + BUFFER_BYTES]
        bounded = buffer_messages > 0 or buffer_bytes > 0
        facts = table[row + FACTS]
        decisions = 0
        key1 = 0
        key2 = 0
        ways = 0
        got_e = -1
        got_s = -1
        got_half = 0
        free = False
        w = -1

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
            if not known[e] & facts:
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
                    cuda.atomic.add(arrived, 3 * node1[e] + layer, 1)
                    if role[e] == ROOT or role[e] == SEND:
                        root_in[2 * node1[e] + layer] = True
                if node2[e] >= 0:
                    cuda.atomic.add(arrived, 3 * node2[e] + layer, 1)
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
                        if (
                            kind == SEND
                            and half == 0
                            and eager_bytes >= 0
                            and 0 <= eager_at[e] <= eager_bytes
                        ):
                            free = True  # rule 5, buffered
                        came = -1
                        if v >= 0 and kind != PROBE:
                            came = cuda.atomic.add(arrived, 3 * v + layer, 1) + 1
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
                if bounded:
                    # rule 5: a channel that got a message, or lost one, lets go what fits it now
                    for part in range(2):
                        v = node1[e] if part == 0 else node2[e]
                        if v < 0 or node_kind[v] != MESSAGE:
                            continue
                        first = channel[v]
                        for layer in range(2 if atomic else 1):
                            layer = 1 - layer
                            held = 0
                            load = 0
                            lead = True
                            v = first + arrived[3 * first + 2]
                            while v < n_nodes and channel[v] == first:
                                there = 1 if root_in[2 * v + layer] else 0
                                gone = arrived[3 * v + layer] > there and not node_blocks[v]
                                w = sender[v]
                                if w >= 0 and eager_at[w] > 0:
                                    fits = buffer_messages == 0 or held < buffer_messages
                                    if buffer_bytes > 0 and load > buffer_bytes - eager_at[w]:
                                        fits = False
                                    bit = 1 << (2 * layer)
                                    if (
                                        fits
                                        and there == 1
                                        and cuda.atomic.or_(satisfied, w, bit) & bit == 0
                                    ):
                                        at = cuda.atomic.add(counts, c0 + SATS, 1)
                                        sats[sats0 + at] = 4 * w + 2 * layer
                                    if not gone:
                                        held += 1
                                        load += min(eager_at[w], buffer_bytes)
                                lead = lead and gone
                                if lead and layer == 1:
                                    # others may count the same: what is there is never too much
                                    cuda.atomic.max(arrived, 3 * first + 2, v + 1 - first)
                                if buffer_messages > 0 and held >= buffer_messages:
                                    break
                                if buffer_bytes > 0 and load >= buffer_bytes:
                                    break
                                v += 1
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
                            if not known[x] & facts:
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
            if box0 == box1 and pool_bytes == 0:
                break
            if bounded:
                # --- buffers of the channels that lead to a mailbox
                for b in range(box0 + me, box1, many):
                    for y in range(send_at[b], send_start[b + 1]):
                        s = send_event[y]
                        if not started[s] or partner[s] >= 0 or satisfied[s] & 4 or eager_at[s] < 1:
                            continue
                        held = 0
                        load = 0
                        for z in range(y - 1, send_at[b] - 1, -1):
                            w = send_event[z]
                            if rank_of[w] != rank_of[s]:
                                break
                            if partner[w] < 0 and tag[w] == tag[s] and eager_at[w] > 0:
                                held += 1
                                load += min(eager_at[w], buffer_bytes)
                        if buffer_messages > 0 and held >= buffer_messages:
                            continue
                        if buffer_bytes > 0 and load > buffer_bytes - eager_at[s]:
                            continue
                        cuda.atomic.or_(satisfied, s, 4)
                        sats[sats0 + cuda.atomic.add(counts, c0 + SATS, 1)] = 4 * s + 2
                        cuda.atomic.add(counts, c0 + TAKEN, 1)
                cuda.syncthreads()
                before = taken
                taken = counts[c0 + TAKEN]
                cuda.syncthreads()  # all have seen it before any of them takes more
                if taken != before:
                    continue
            if chosen:
                # --- one of the choices there are (see find_choice), and what follows from it
                turn = 0
                while me == 0 and turn < 2:
                    pick = -1
                    if turn == 1:
                        pick = 0
                        if decisions < table[row + GIVEN]:
                            pick = table[row + PARAMETERS + decisions] % ways
                        elif table[row + POLICY] == CHOOSE_LAST:
                            pick = ways - 1
                        elif table[row + POLICY] == CHOOSE_SEEDED:
                            h = decisions & MASK
                            h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
                            h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
                            h = (table[row + SEED] + 7919 * (h ^ (h >> 15))) & MASK
                            h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
                            h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
                            pick = (h ^ (h >> 15)) % ways
                        if OUTCOMES + 2 * decisions + 1 < record:
                            at = block * record + OUTCOMES + 2 * decisions
                            outcome[at] = ways | (pick << 31)
                            outcome[at + 1] = (key1 << 31) | key2
                        decisions += 1
                    ways = 0
                    got_e = -1
                    got_s = -1
                    got_half = 0
                    free = False
                    found = False  # a receive that is chosen for alone
                    for b in range(box0, box1):
                        while take_at[b] < take_start[b + 1]:
                            e = take_event[take_at[b]]
                            if not satisfied[e] & (8 if role[e] == SEND else 4):
                                break
                            take_at[b] += 1
                        while send_at[b] < send_start[b + 1]:
                            if partner[send_event[send_at[b]]] < 0:
                                break
                            send_at[b] += 1
                        ahead = 0
                        for x in range(take_at[b], take_start[b + 1]):
                            e = take_event[x]
                            if take_one[b] and not issued[e]:
                                break
                            half = 1 if role[e] == SEND else 0
                            if not started[e] or satisfied[e] & (4 + 4 * half):
                                continue
                            src = peer[e] if half == 0 else recv_peer[e]
                            want = tag[e] if half == 0 else recv_tag[e]
                            mine = 0
                            could = 0
                            last = -1
                            last_could = -1
                            begin = ways
                            mine_s = -1
                            picked_s = -1
                            for y in range(send_at[b], send_start[b + 1]):
                                s = send_event[y]
                                if partner[s] >= 0:
                                    continue
                                if src >= 0 and rank_of[s] != src:
                                    continue
                                if want >= 0 and tag[s] != want:
                                    continue
                                if rank_of[s] != last_could:
                                    last_could = rank_of[s]
                                    could += 1
                                if not started[s] or rank_of[s] == last:
                                    continue
                                last = rank_of[s]
                                over = False
                                if ahead > 0:
                                    for z in range(take_at[b], x):
                                        w = take_event[z]
                                        other = 1 if role[w] == SEND else 0
                                        if role[w] == PROBE or not started[w]:
                                            continue
                                        if satisfied[w] & (4 + 4 * other):
                                            continue
                                        from_ = peer[w] if other == 0 else recv_peer[w]
                                        with_ = tag[w] if other == 0 else recv_tag[w]
                                        if from_ >= 0 and from_ != rank_of[s]:
                                            continue
                                        if with_ >= 0 and with_ != tag[s]:
                                            continue
                                        over = True
                                        break
                                if over:
                                    continue
                                if mine == 0:
                                    mine_s = s
                                if mine == pick:
                                    picked_s = s
                                if ways == pick or (pick < 0 and ways == 0):
                                    got_e = e
                                    got_s = s
                                    got_half = half
                                mine += 1
                                ways += 1
                            if role[e] == PROBE:
                                ways = begin
                                if mine > 0:
                                    found = True
                                    ways = 1
                                    got_e = e
                                    got_s = mine_s
                                    got_half = 0
                                    break
                                continue
                            if ahead == 0 and take_one[b] and mine > 0 and mine == could:
                                found = True
                                ways = mine
                                got_e = e
                                got_s = mine_s if pick < 0 else picked_s
                                got_half = half
                                break
                            ahead += 1
                        if found:
                            break
                    if not found and pool_bytes > 0:
                        for e in range(e0, e1):
                            if pool_of[e] >= 0:
                                pool_used[pool_of[e]] = 0
                        for e in range(e0, e1):
                            if pool_of[e] >= 0 and satisfied[e] & IN_POOL:
                                v = node1[e]
                                gone = partner[e] >= 0
                                if v >= 0:
                                    there = 1 if root_in[2 * v + 1] else 0
                                    gone = arrived[3 * v + 1] > there and not node_blocks[v]
                                if not gone:
                                    pool_used[pool_of[e]] += min(eager_at[e], pool_bytes)
                        for e in range(e0, e1):
                            if pool_of[e] < 0 or eager_at[e] <= 0:
                                continue
                            if not started[e] or satisfied[e] & 4:
                                continue
                            if pool_used[pool_of[e]] > pool_bytes - eager_at[e]:
                                continue
                            v = node1[e]
                            if v >= 0 and v > channel[v]:
                                s = sender[v - 1]
                                if s >= 0 and started[s] and not satisfied[s] & 4:
                                    continue
                            if ways == pick or (pick < 0 and ways == 0):
                                got_e = -1
                                got_s = e
                                free = True
                            ways += 1
                    turn += 1
                    if ways <= 1:
                        turn = 2
                if me == 0 and ways > 0:
                    counts[c0 + TAKEN] += 1
                    if got_e >= 0:
                        part = 4 * got_e + 2 + got_half
                        bit = 1 << (part & 3)
                        if satisfied[got_e] & bit == 0:
                            satisfied[got_e] |= bit
                            sats[sats0 + counts[c0 + SATS]] = part
                            counts[c0 + SATS] += 1
                    if free:
                        satisfied[got_s] |= IN_POOL
                    elif role[got_e] != PROBE:
                        if got_half == 0:
                            partner[got_e] = got_s
                        partner[got_s] = got_e
                    if free or role[got_e] != PROBE:
                        if satisfied[got_s] & 4 == 0:
                            satisfied[got_s] |= 4
                            sats[sats0 + counts[c0 + SATS]] = 4 * got_s + 2
                            counts[c0 + SATS] += 1
                        h = int(got_e - e0 + 2) & MASK
                        h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
                        h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
                        mark = h ^ (h >> 15) if got_e >= 0 else 1
                        h = int(got_s - e0 + 77) & MASK
                        h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
                        h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
                        h = (mark ^ (h ^ (h >> 15))) & MASK
                        h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
                        h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
                        key1 = (key1 + (h ^ (h >> 15))) & MASK
                        h = int(got_s - e0 + 13) & MASK
                        h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
                        h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
                        h = (mark + 3 * (h ^ (h >> 15))) & MASK
                        h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
                        h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
                        key2 = (key2 + (h ^ (h >> 15))) & MASK
                cuda.syncthreads()
                if counts[c0 + TAKEN] == taken:
                    break
                taken = counts[c0 + TAKEN]
                continue
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
                    over = early_mail and known[e] & facts and role[e] == RECV
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
        if record > 0:
            cuda.syncthreads()
            mine_completed = 0
            for e in range(e0 + me, e1, many):
                if completed[e]:
                    mine_completed += 1
            cuda.atomic.add(outcome, block * record + COMPLETED, mine_completed)
            if me == 0:
                standing = 0
                digest1 = 0
                digest2 = 0
                for a in range(lane0, lane0 + lane1 - lane0 + queue1 - queue0):
                    on_host = a < lane1
                    e = lane_at[a] if on_host else queue_at[a - lane1 + queue0 - n_lanes]
                    if e < 0:
                        continue
                    standing += 1
                    h = int(e - e0 + 5) if on_host else int(e - e0 + 7)
                    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
                    h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
                    digest1 = (digest1 + (h ^ (h >> 15))) & MASK
                    h = 3 * int(e - e0) + 11 if on_host else 5 * int(e - e0) + 17
                    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
                    h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
                    digest2 = (digest2 + (h ^ (h >> 15))) & MASK
                outcome[block * record + STANDING] = standing
                outcome[block * record + DIGEST] = (digest1 << 31) | digest2
                outcome[block * record + CHOICES] = decisions
                outcome[block * record + STATE] = (key1 << 31) | key2
