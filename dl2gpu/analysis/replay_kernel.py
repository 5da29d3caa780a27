"""The replay of DESIGN.md section 4 as one compiled function over flat arrays.

A work list per job: host lanes and device queues are *agents* that are stepped when something they
stand at may have moved. The rules are monotone, so the order in which agents are stepped does not
matter: the least fixpoint is unique. Rule numbers are those of DESIGN.md section 4.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

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
    fill_channel,
    fill_mailbox,
    find_choice,
    mixed,
    satisfy,
)
from dl2gpu.engine.arrays import Array
from dl2gpu.engine.native import (
    BoolRows,
    Bools,
    Int8s,
    Int32Rows,
    Int32s,
    Int64s,
    UInt8s,
    UInt32s,
    kernel,
)
from dl2gpu.engine.native_bits import natural, soon

SYNCHRONISING: Final = 0
ROOT_SENDS: Final = 1
ROOT_RECEIVES: Final = 2
MESSAGE: Final = 3

MEMBER: Final = 1
ROOT: Final = 2
SEND: Final = 3
RECV: Final = 4
PROBE: Final = 5

# --- what most steps ask of an event, in one byte: what a replay waits for is memory
ON_QUEUE: Final = 1
IN_BATCH: Final = 2
HOLDS: Final = 4
"""It blocks its host."""
NAMED: Final = 8
"""Some wait names it."""
WAITS: Final = 16
"""It is a wait."""

LINE: Final = 16
"""Numbers of 32 bits in a cache line."""
AHEAD: Final = 2 * LINE
"""Events, and nodes, by which memory is asked before they come. A host goes along its events in the
order in which they lie there, but there are too many hosts for a processor to notice."""


def index_program(
    r: Array, lane: Array, stream: Array, group: Array, order: Array, n_lanes: int, n_strings: int
) -> tuple[Array, ...]:
    """Lanes, queues and batches of events sorted by (rank row, position).

    Args:
        r: uint32[n] rank row. lane: int[n] dense lane numbers below n_lanes.
        stream: int32[n] string code, -1 for host operations.
        group: int64[n], -1 for none, or empty.
        order: int64[n] order in which queues are filled (a permutation that keeps ranks together);
            empty: as the rows come.

    Returns:
        lane_of, lane_next, lane_first, lane_rank, queue_of, queue_next, queue_first, queue_rank,
        queue_name, unit_of, unit_first, unit_size. ``unit_of`` is -1 outside batches.
    """
    n = len(r)

    def column(fill: int | None = None) -> Array:
        return np.empty(n, np.int32) if fill is None else np.full(n, fill, np.int32)

    def scratch_for(many: int) -> tuple[Array, Array, Array]:
        return np.full(many, -1, np.int64), np.zeros(many, np.int32), np.zeros(many, np.int32)

    lane_of, lane_next, lane_prev = column(), column(-1), column(-1)
    lane_first, lane_rank = column(), column()
    lanes = _index_lanes(
        r, lane.astype(np.int32, copy=False), *scratch_for(n_lanes),
        lane_of, lane_next, lane_prev, lane_first, lane_rank,
    )  # fmt: skip
    queue_of, queue_next = column(-1), column(-1)
    queue_first, queue_rank, queue_name = column(), column(), column()
    queues = _index_queues(
        r, stream, order, *scratch_for(n_strings),
        queue_of, queue_next, queue_first, queue_rank, queue_name,
    )  # fmt: skip
    unit_of, unit_first, unit_size = column(-1), column(), column(0)
    units = _index_units(group, lane_prev, unit_of, unit_first, unit_size)
    return (
        lane_of, lane_next, lane_first[:lanes].copy(), lane_rank[:lanes].copy(),
        queue_of, queue_next, queue_first[:queues].copy(), queue_rank[:queues].copy(),
        queue_name[:queues].copy(), unit_of, unit_first[:units].copy(), unit_size[:units].copy(),
    )  # fmt: skip


@kernel
def _index_lanes(
    r: UInt32s, lane: Int32s, stamp: Int64s, number: Int32s, last: Int32s,
    lane_of: Int32s, lane_next: Int32s, lane_prev: Int32s, lane_first: Int32s, lane_rank: Int32s,
) -> int:  # fmt: skip
    """Returns the number of lanes. ``stamp``, ``number`` and ``last`` are scratch."""
    lanes = 0
    for e in range(len(r)):
        v = lane[e]
        if stamp[v] != r[e]:
            stamp[v] = r[e]
            number[v] = lanes
            lane_first[lanes] = e
            lane_rank[lanes] = r[e]
            lanes += 1
        else:
            lane_next[last[v]] = e
            lane_prev[e] = last[v]
        last[v] = e
        lane_of[e] = number[v]
    return lanes


@kernel
def _index_queues(
    r: UInt32s, stream: Int32s, order: Int64s, stamp: Int64s, number: Int32s, last: Int32s,
    queue_of: Int32s, queue_next: Int32s, queue_first: Int32s, queue_rank: Int32s,
    queue_name: Int32s,
) -> int:  # fmt: skip
    """Returns the number of queues."""
    queues = 0
    for x in range(len(r)):
        e = order[x] if len(order) else x
        v = stream[e]
        if v < 0:
            continue
        if stamp[v] != r[e]:
            stamp[v] = r[e]
            number[v] = queues
            queue_first[queues] = e
            queue_rank[queues] = r[e]
            queue_name[queues] = v
            queues += 1
        else:
            queue_next[last[v]] = e
        last[v] = e
        queue_of[e] = number[v]
    return queues


@kernel
def _index_units(
    group: Int64s, lane_prev: Int32s, unit_of: Int32s, unit_first: Int32s, unit_size: Int32s
) -> int:
    """Returns the number of batches."""
    units = 0
    for e in range(len(group)):
        before = lane_prev[e]
        if group[e] < 0 or before < 0 or group[before] != group[e]:
            continue
        if unit_of[before] < 0:
            unit_of[before] = units
            unit_first[units] = before
            unit_size[units] = 1
            units += 1
        unit_of[e] = unit_of[before]
        unit_size[unit_of[e]] += 1
    return units


def passed_by_host(r: Array, lane: Array, prefix: Array, blocks: Array, everything: Array) -> Array:
    """bool[n]: events shown complete because their host went on; see ``tables``.

    ``prefix`` bool[ranks], ``blocks`` bool[n] host operations that block (waits too),
    ``everything`` bool[n] host waits for all that was issued. Rows are sorted by rank.
    """
    out = np.zeros(len(r), np.bool_)
    _passed_by_host(r, lane, prefix, blocks, everything, out)
    return out


@kernel
def _passed_by_host(
    r: UInt32s, lane: Int32s, prefix: Bools, blocks: Bools, everything: Bools, out: Bools
) -> None:
    hi = len(r)
    while hi > 0:
        lo = hi - 1
        while lo > 0 and r[lo - 1] == r[hi - 1]:
            lo -= 1
        if prefix[r[lo]]:
            one = True
            for x in range(lo + 1, hi):
                if lane[x] != lane[lo]:
                    one = False
            if one:
                behind = False  # a passed wait for everything lies after this row
                for x in range(hi - 1, lo - 1, -1):
                    last = x == hi - 1
                    if behind or (blocks[x] and not last):
                        out[x] = True
                    if everything[x] and not last:
                        behind = True
        hi = lo


def bucket(key: Array, n_keys: int) -> tuple[Array, Array]:
    """Counting sort: (start int32[n_keys+1], item int32[...]) of the positions with key >= 0."""
    start = np.zeros(n_keys + 1, np.int32)
    _count_keys(key, start)
    item = np.empty(start[-1], np.int32)
    _fill_buckets(key, start[:-1].copy(), item)
    return start, item


@kernel
def _count_keys(key: Int64s, start: Int32s) -> None:
    for x in range(len(key)):
        if key[x] >= 0:
            start[key[x] + 1] += 1
    for k in range(len(start) - 1):
        start[k + 1] += start[k]


@kernel
def _fill_buckets(key: Int64s, fill: Int32s, item: Int32s) -> None:
    for x in range(len(key)):
        if key[x] >= 0:
            item[fill[key[x]]] = x
            fill[key[x]] += 1


def parts_of(node1: Array, node2: Array, alone: Array, n_nodes: int) -> tuple[Array, Array]:
    """(start int32[nodes+1], part int32[...]): parts of each node as 2 * event + half, in order."""
    start = np.zeros(n_nodes + 1, np.int32)
    _count_parts(node1, node2, alone, start)
    part = np.empty(start[-1], np.int32)
    _fill_parts(node1, node2, alone, start[:-1].copy(), part)
    return start, part


@kernel
def _count_parts(node1: Int32s, node2: Int32s, alone: Bools, start: Int32s) -> None:
    for e in range(len(node1)):
        if node1[e] >= 0 and not alone[e]:
            start[node1[e] + 1] += 1
        if node2[e] >= 0:
            start[node2[e] + 1] += 1
    for v in range(len(start) - 1):
        start[v + 1] += start[v]


@kernel
def _fill_parts(node1: Int32s, node2: Int32s, alone: Bools, fill: Int32s, part: Int32s) -> None:
    for e in range(len(node1)):
        if node1[e] >= 0 and not alone[e]:
            part[fill[node1[e]]] = 2 * e
            fill[node1[e]] += 1
        if node2[e] >= 0:
            part[fill[node2[e]]] = 2 * e + 1
            fill[node2[e]] += 1


def scratch(n: int, lanes: int, queues: int, units: int, nodes: int) -> tuple[Any, ...]:
    """Working arrays of :func:`run`, shared by its threads (each touches its own jobs' parts)."""
    return (
        np.zeros(lanes + queues, np.bool_),  # waiting: the agent is on the work list
        np.zeros(n, np.uint8),  # shape: ON_QUEUE and on
        np.zeros(n, np.bool_),  # ready
        np.zeros(n, np.int8),  # parts_left
        np.zeros(n, np.uint8),  # satisfied
        np.zeros((4, units), np.int32),  # unit_ready, unit_left, unit_total, unit_met
        # arrived; of a channel, messages at its head that are gone, and up to the last sent
        np.zeros((4, nodes), np.int32),
        np.zeros((2, nodes), np.bool_),  # root_in
        np.zeros(lanes, np.int32),  # outstanding
        np.full(lanes, -1, np.int32),  # forced: last event of the lane known to be passed
    )


def stacks(
    jobs: Array, job_event: Array, job_lane: Array, job_queue: Array
) -> tuple[Array, Array, Array, Array]:
    """Stacks of :func:`run`, large enough for any of the jobs; each thread has its own."""
    events = int((job_event[jobs + 1] - job_event[jobs]).max(initial=0))
    lanes, queues = (place[jobs + 1] - place[jobs] for place in (job_lane, job_queue))
    agents = int((lanes + queues).max(initial=0))
    return (
        np.empty(3 * events + 3, np.int64),  # starts, as 2 * event + layer: 2 layers, 1 to start
        np.empty(4 * events + 4, np.int64),  # sats: each part is put there once in each layer
        np.empty(events + 1, np.int32),  # comps
        np.empty(agents + 1, np.int32),  # agents
    )


@kernel
def run(
    cells: Int32s, table: Int64s, width: int, record: int,
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
    issued: Bools, started: Bools, completed: Bools, lane_at: Int32s, queue_at: Int32s,
    partner: Int32s, outcome: Int64s, order: Int32s,
    wait_left: Int32s,
    waiting: Bools, shape: UInt8s, ready: Bools, parts_left: Int8s, satisfied: UInt8s,
    units: Int32Rows, arrived: Int32Rows, root_in: BoolRows, outstanding: Int32s, forced: Int32s,
    take_at: Int32s, send_at: Int32s, pool_used: Int64s,
    starts: Int64s, sats: Int64s, comps: Int32s, agents: Int32s,
) -> None:  # fmt: skip
    """Runs each cell, a job under a scenario, to its least fixpoint; writes ``issued`` and on.

    ``cells`` int32[3 * c]: job, row of the scenario, and a number that is of use to
    :mod:`rounds_kernel` only. ``table`` int64[.. * width]: the scenarios, see ``EAGER_BYTES`` to
    ``GIVEN`` above. Cells of one job lie side by side: its arrays ``issued`` to ``partner`` are
    those of the last of them in the end. ``outcome`` int64[c * record] has a row for each cell
    (``COMPLETED`` to ``STATE``, and its trail). ``order`` int32[4 * n], or empty: the steps of the
    last cell numbered from 1, when each event was issued, started and completed, and when a
    receive took its message, or a send took room in a pool.

    ``job_*`` offsets of each job's events, lanes, queues and
    mailboxes. ``wait_kind`` uint8[n]: 0 no wait, 1 named requests, 2 everything before it in the
    lane. ``wait_needs`` int32[n] how many of them. ``node_part`` lists the parts of a node as
    ``2 * event + half``. ``eager_at`` int64[n]: the eager threshold from which a send needs no
    receiver (0: always; -1: never; its bytes otherwise), or empty: all need one. ``known``
    uint8[n]: 1 recorded as complete, 2 shown to be passed by its host. ``channel`` int32[nodes]:
    first message of each message's channel, ``sender`` its send; ``pool_of`` int32[n]: pool of each
    send. These three are empty where no scenario has such buffers. ``lane_at``/``queue_at`` int32:
    where each place stands at the fixpoint,
    -1 at its end. ``partner`` int32[n]: the event that a wildcard receive (or its send) was matched
    with.

    Arrivals are counted in two layers. Layer 1 is what partners see. Where batches are atomic, a
    member of a batch shows itself there only when each part of its batch would be satisfied by
    partners that have started; layer 0 finds that out, and exists for that reading only.
    """
    n_lanes = len(lane_first)
    unit_ready, unit_left, unit_total, unit_met = units[0], units[1], units[2], units[3]
    n_nodes = len(node_kind)
    n_cells = len(cells) // 3
    n = len(rank_of) if len(order) > 0 else 0

    for cell in range(n_cells):
        j = cells[3 * cell]
        row = cells[3 * cell + 1] * width
        eager_bytes = table[row + EAGER_BYTES]
        early = table[row + EARLY] != 0
        atomic = table[row + ATOMIC] != 0
        wild_high = table[row + WILD] == WILD_HIGH
        chosen = table[row + WILD] == WILD_CHOSEN or table[row + POOL_BYTES] > 0
        buffer_messages, buffer_bytes = table[row + BUFFER_MESSAGES], table[row + BUFFER_BYTES]
        bounded = buffer_messages > 0 or buffer_bytes > 0
        pool_bytes = table[row + POOL_BYTES]
        facts = table[row + FACTS]
        decisions = 0
        key1 = 0
        key2 = 0
        n_completed = 0
        step = 0
        n_start = 0
        n_sat = 0
        n_comp = 0
        n_agent = 0
        early_mail = True
        e0, e1 = natural(job_event[j]), job_event[j + 1]
        if cell > 0 and cells[3 * cell - 3] == j:
            # the same job again: as if nothing had moved
            for e in range(e0, e1):
                issued[e] = started[e] = completed[e] = ready[e] = False
                satisfied[e] = 0
                wait_left[e] = wait_needs[e]
                if len(recv_peer) > 0:
                    partner[e] = -1
            for e in range(e0, e1):
                for half in range(2):
                    v = node1[e] if half == 0 else node2[e]
                    if v >= 0:
                        arrived[0, v] = arrived[1, v] = arrived[2, v] = arrived[3, v] = 0
                        root_in[0, v] = root_in[1, v] = False
                u = unit_of[e]
                if u >= 0:
                    unit_ready[u] = unit_left[u] = unit_total[u] = unit_met[u] = 0
            for lane in range(natural(job_lane[j]), job_lane[j + 1]):
                outstanding[lane] = 0
                forced[lane] = -1
            for b in range(job_box[j], job_box[j + 1]):
                take_at[b] = take_start[b]
                send_at[b] = send_start[b]
        probes = False  # are there any in this job?
        gathers = False  # waits for everything
        for e in range(e0, e1):
            what = 0
            if queue_of[e] >= 0:
                what |= ON_QUEUE
            elif host_blocks[e]:
                what |= HOLDS
            if dep_start[e + 1] > dep_start[e]:
                what |= NAMED
            if wait_kind[e] != 0:
                what |= WAITS
                gathers |= wait_kind[e] == 2
            probes |= role[e] == PROBE
            parts = 0
            if wait_kind[e] == 0 and not alone[e]:
                if node1[e] >= 0 or role[e] != 0:
                    parts = 1
                if node2[e] >= 0 or (len(recv_peer) > 0 and recv_peer[e] >= -1):
                    parts = 2
            parts_left[e] = parts
            if unit_of[e] >= 0:
                what |= IN_BATCH
                unit_left[unit_of[e]] += parts
                unit_total[unit_of[e]] += parts
            shape[e] = what
            if known[e] & facts:
                # rule 7: what the trace says completed, completed; its lane got at least here
                forced[lane_of[e]] = e
        for e in range(e0, e1):
            if not known[e] & facts:
                continue
            n_completed += 1
            issued[e] = True
            started[e] = True
            completed[e] = True
            ready[e] = True
            satisfied[e] = 15
            u = unit_of[e]
            if u >= 0:
                unit_ready[u] += 1
                unit_left[u] -= parts_left[e]
                unit_met[u] += parts_left[e]
            parts_left[e] = 0
            for layer in range(2):
                if node1[e] >= 0 and role[e] != PROBE:
                    arrived[layer, node1[e]] += 1
                    if role[e] == ROOT or role[e] == SEND:
                        root_in[layer, node1[e]] = True
                if node2[e] >= 0:
                    arrived[layer, node2[e]] += 1
            for x in range(natural(dep_start[e]), dep_start[e + 1]):
                wait_left[dep_wait[x]] -= 1
        for lane in range(natural(job_lane[j]), job_lane[j + 1]):
            lane_at[lane] = lane_first[lane]
            agents[n_agent] = lane
            waiting[lane] = True
            n_agent += 1
        for queue in range(natural(job_queue[j]), job_queue[j + 1]):
            queue_at[queue] = queue_first[queue]
            agents[n_agent] = n_lanes + queue
            waiting[n_lanes + queue] = True
            n_agent += 1

        while True:
            n_start, n_sat = natural(n_start), natural(n_sat)
            n_comp, n_agent = natural(n_comp), natural(n_agent)
            if n_comp > 0:
                n_comp -= 1
                e = natural(comps[n_comp])
                if completed[e]:
                    continue
                completed[e] = True
                n_completed += 1
                if n > 0:
                    step += 1
                    order[2 * n + e] = step
                what = shape[e]
                if gathers or what & (HOLDS | IN_BATCH):
                    lane = natural(lane_of[e])
                    if gathers and not what & HOLDS:
                        outstanding[lane] -= 1
                    at = lane_at[lane]
                    moved = at == e or what & IN_BATCH != 0
                    if gathers and at >= 0 and wait_kind[at] == 2 and outstanding[lane] <= 0:
                        moved = True
                    if at >= 0 and moved and not waiting[lane]:
                        agents[n_agent] = lane
                        waiting[lane] = True
                        n_agent += 1
                if what & ON_QUEUE:
                    queue = natural(queue_of[e])
                    if not waiting[n_lanes + queue]:
                        agents[n_agent] = n_lanes + queue
                        waiting[n_lanes + queue] = True
                        n_agent += 1
                if not what & NAMED:
                    continue
                for x in range(natural(dep_start[e]), dep_start[e + 1]):
                    w = natural(dep_wait[x])
                    wait_left[w] -= 1
                    if wait_left[w] <= 0 and issued[w]:
                        a = lane_of[w] if queue_of[w] < 0 else n_lanes + queue_of[w]
                        if not waiting[a]:
                            agents[n_agent] = a
                            waiting[a] = True
                            n_agent += 1
            elif n_sat > 0:
                n_sat -= 1
                e = natural(sats[n_sat] >> 2)
                if not sats[n_sat] & 2:
                    u = unit_of[e]
                    if u >= 0:
                        unit_met[u] += 1
                        if unit_met[u] == unit_total[u]:
                            x = unit_first[u]
                            while x >= 0 and unit_of[x] == u:
                                if not known[x] & facts:
                                    starts[n_start] = 2 * x + 1
                                    n_start += 1
                                x = lane_next[x]
                    continue
                parts_left[e] -= 1
                if not shape[e] & IN_BATCH:
                    if parts_left[e] == 0:
                        comps[n_comp] = e
                        n_comp += 1
                else:
                    u = natural(unit_of[e])
                    unit_left[u] -= 1
                    if unit_left[u] == 0 and unit_ready[u] == unit_size[u]:
                        x = unit_first[u]
                        while x >= 0 and unit_of[x] == u:
                            if not completed[x]:
                                comps[n_comp] = x
                                n_comp += 1
                            x = lane_next[x]
            elif n_start > 0:
                n_start -= 1
                e = natural(starts[n_start] >> 1)
                layer = natural(starts[n_start] & 1)
                u = unit_of[e] if shape[e] & IN_BATCH else -1
                if not started[e]:
                    started[e] = True
                    if n > 0:
                        step += 1
                        order[n + e] = step
                    if parts_left[e] == 0:
                        if u < 0 or unit_left[u] == 0:
                            comps[n_comp] = e
                            n_comp += 1
                        continue
                    layer = natural(0 if atomic else 1)
                    if atomic and u < 0:
                        starts[n_start] = 2 * e + 1
                        n_start += 1
                if parts_left[e] == 0:
                    continue
                code = 4 * e + 2 * layer
                for half in range(2):
                    v = node1[e] if half == 0 else node2[e]
                    kind = role[e] if half == 0 else RECV
                    if (
                        kind == SEND
                        and half == 0
                        and eager_bytes >= 0
                        and 0 <= eager_at[e] <= eager_bytes
                    ):
                        # rule 5, buffered: a send needs nobody
                        n_sat = satisfy(sats, n_sat, satisfied, code)
                    if v < 0:
                        continue
                    if kind == PROBE:
                        if root_in[layer, v]:
                            n_sat = satisfy(sats, n_sat, satisfied, code)
                        continue
                    if v % LINE == 0:
                        soon(arrived, layer * n_nodes + v + AHEAD)
                        soon(node_start, v + AHEAD)
                        soon(node_need, v + AHEAD)
                        soon(node_part, node_start[v] + 2 * AHEAD)
                        soon(node_part, node_start[v] + 2 * AHEAD + LINE)
                        if v % (4 * LINE) == 0:
                            soon(root_in, layer * n_nodes + v + 4 * LINE)
                            soon(node_blocks, v + 4 * LINE)
                            soon(node_kind, v + 4 * LINE)
                    arrived[layer, v] += 1
                    if kind == ROOT or kind == SEND:
                        root_in[layer, v] = True
                        if probes and node_kind[v] == MESSAGE:
                            for x in range(natural(node_start[v]), node_start[v + 1]):
                                w = natural(node_part[x] >> 1)
                                if role[w] == PROBE and started[w]:
                                    n_sat = satisfy(sats, n_sat, satisfied, 4 * w + 2 * layer)
                    if bounded and node_kind[v] == MESSAGE:
                        if kind == SEND:
                            sent = v - channel[v] + 1
                            arrived[3, channel[v]] = max(arrived[3, channel[v]], sent)
                        n_sat = fill_channel(
                            channel[v], layer, buffer_messages, buffer_bytes, sender,
                            eager_at, node_blocks, arrived, root_in, sats, n_sat, satisfied,
                        )  # fmt: skip
                    if node_blocks[v]:
                        continue
                    if early and node_kind[v] == ROOT_SENDS:
                        # rule 4, released early: the root needs nobody, the others need the root
                        if kind == ROOT:
                            for x in range(natural(node_start[v]), node_start[v + 1]):
                                w = natural(node_part[x] >> 1)
                                if started[w]:
                                    n_sat = satisfy(sats, n_sat, satisfied, 4 * w + 2 * layer)
                        elif root_in[layer, v]:
                            n_sat = satisfy(sats, n_sat, satisfied, code + half)
                        continue
                    if early and node_kind[v] == ROOT_RECEIVES and kind != ROOT:
                        n_sat = satisfy(sats, n_sat, satisfied, code + half)
                    if arrived[layer, v] != node_need[v]:
                        continue
                    # rules 3 and 5: all have come
                    for x in range(natural(node_start[v]), node_start[v + 1]):
                        w = natural(node_part[x] >> 1)
                        if not probes or role[w] != PROBE:
                            n_sat = satisfy(
                                sats, n_sat, satisfied, 4 * w + 2 * layer + (node_part[x] & 1)
                            )
            elif n_agent > 0:
                n_agent -= 1
                a = natural(agents[n_agent])
                waiting[a] = False
                if a < n_lanes:
                    # rule 1: the host goes on until it stands at something that blocks it
                    lane = a
                    e = lane_at[lane]
                    while e >= 0:
                        passed_before = e <= forced[lane]
                        what = shape[e]
                        if not issued[e]:
                            issued[e] = True
                            if e % LINE == 0:
                                soon(lane_of, e + AHEAD)
                                soon(lane_next, e + AHEAD)
                                soon(node1, e + AHEAD)
                                soon(node2, e + AHEAD)
                                if what & ON_QUEUE:
                                    soon(queue_of, e + AHEAD)
                                    soon(queue_next, e + AHEAD)
                                if what & NAMED:
                                    soon(dep_start, e + AHEAD)
                                    soon(dep_wait, natural(dep_start[e]) + AHEAD)
                                if e % (4 * LINE) == 0:
                                    soon(shape, e + 4 * LINE)
                                    soon(role, e + 4 * LINE)
                                    soon(parts_left, e + 4 * LINE)
                                    soon(satisfied, e + 4 * LINE)
                                    soon(ready, e + 4 * LINE)
                                    soon(issued, e + 4 * LINE)
                                    soon(started, e + 4 * LINE)
                                    soon(completed, e + 4 * LINE)
                            if n > 0:
                                step += 1
                                order[e] = step
                            if gathers and not what & HOLDS:
                                outstanding[lane] += 1
                            if what & ON_QUEUE:
                                b = n_lanes + natural(queue_of[e])
                                if not waiting[b]:
                                    agents[n_agent] = b
                                    waiting[b] = True
                                    n_agent += 1
                            elif what & WAITS:
                                started[e] = True
                                if n > 0:
                                    step += 1
                                    order[n + e] = step
                            else:
                                # rule 2: a host operation starts when issued, a batch as a unit
                                ready[e] = True
                                if not what & IN_BATCH:
                                    starts[n_start] = 2 * e
                                    n_start += 1
                                else:
                                    u = natural(unit_of[e])
                                    unit_ready[u] += 1
                                    if unit_ready[u] == unit_size[u]:
                                        x = unit_first[u]
                                        while x >= 0 and unit_of[x] == u:
                                            if not started[x]:
                                                starts[n_start] = 2 * x
                                                n_start += 1
                                            x = lane_next[x]
                        if what & HOLDS and not completed[e]:
                            if what & WAITS and (
                                (wait_kind[e] == 1 and wait_left[e] <= 0)
                                or (wait_kind[e] == 2 and outstanding[lane] <= 0)
                            ):
                                comps[n_comp] = e
                                n_comp += 1
                                break
                            if passed_before:
                                if what & WAITS:
                                    # the host is known to have gone past this wait
                                    completed[e] = True
                                    n_completed += 1
                            elif not what & IN_BATCH:
                                break
                        if what & IN_BATCH and not passed_before:
                            u = unit_of[e]
                            # the host issues a batch as a whole, and waits behind its last member
                            x = lane_next[e]
                            if x < 0 or unit_of[x] != u:
                                x = unit_first[u]
                                while x >= 0 and unit_of[x] == u:
                                    if shape[x] & HOLDS and not completed[x]:
                                        break
                                    x = lane_next[x]
                                if x >= 0 and unit_of[x] == u:
                                    break
                        e = lane_next[e]
                    lane_at[lane] = e
                else:
                    # rule 2: the head of a queue starts when it has been issued
                    queue = a - n_lanes
                    e = queue_at[queue]
                    while e >= 0 and completed[e]:
                        e = queue_next[e]
                    queue_at[queue] = e
                    if e < 0 or not issued[e]:
                        continue
                    if shape[e] & WAITS:
                        if n > 0 and not started[e]:
                            step += 1
                            order[n + e] = step
                        started[e] = True
                        if wait_left[e] <= 0:
                            comps[n_comp] = e
                            n_comp += 1
                        continue
                    u = unit_of[e] if shape[e] & IN_BATCH else -1
                    if u < 0:
                        if not ready[e]:
                            ready[e] = True
                            starts[n_start] = 2 * e
                            n_start += 1
                        continue
                    x = e
                    while x >= 0 and unit_of[x] == u and issued[x]:
                        if not ready[x]:
                            ready[x] = True
                            unit_ready[u] += 1
                            if unit_ready[u] == unit_size[u]:
                                y = unit_first[u]
                                while y >= 0 and unit_of[y] == u:
                                    if not started[y]:
                                        starts[n_start] = 2 * y
                                        n_start += 1
                                    y = lane_next[y]
                        x = queue_next[x]
            else:
                # nothing else moves: wildcard receives take what is there (rule 5)
                met = False
                if bounded:
                    for b in range(job_box[j], job_box[j + 1]):
                        before = n_sat
                        n_sat = fill_mailbox(
                            send_at[b], send_start[b + 1], buffer_messages, buffer_bytes,
                            send_event, rank_of, tag, eager_at, started, partner,
                            sats, n_sat, satisfied,
                        )  # fmt: skip
                        met |= n_sat > before
                    if met:
                        continue
                if chosen:
                    # one of the choices there are, and then all that follows from it
                    many, e, s, half, free = find_choice(
                        -1, job_box[j], job_box[j + 1], take_at, take_start, take_event, take_one,
                        send_at, send_start, send_event, role, rank_of, peer, tag, recv_peer,
                        recv_tag, issued, started, satisfied, partner,
                        e0, e1, pool_bytes, pool_of, pool_used, eager_at, node1, channel, sender,
                        arrived, root_in, node_blocks,
                    )  # fmt: skip
                    if many == 0:
                        break
                    if many > 1:
                        pick = 0
                        if decisions < table[row + GIVEN]:
                            pick = table[row + PARAMETERS + decisions] % many
                        elif table[row + POLICY] == CHOOSE_LAST:
                            pick = many - 1
                        elif table[row + POLICY] == CHOOSE_SEEDED:
                            pick = mixed(table[row + SEED] + 7919 * mixed(decisions)) % many
                        if OUTCOMES + 2 * decisions + 1 < record:
                            at = cell * record + OUTCOMES + 2 * decisions
                            outcome[at] = many | (pick << 31)
                            outcome[at + 1] = (key1 << 31) | key2
                        decisions += 1
                        many, e, s, half, free = find_choice(
                            pick, job_box[j], job_box[j + 1], take_at, take_start, take_event,
                            take_one, send_at, send_start, send_event, role, rank_of, peer, tag,
                            recv_peer, recv_tag, issued, started, satisfied, partner,
                            e0, e1, pool_bytes, pool_of, pool_used, eager_at, node1, channel,
                            sender, arrived, root_in, node_blocks,
                        )  # fmt: skip
                    if n > 0:
                        step += 1
                        order[3 * n + (s if free else e)] = step
                    if free:
                        satisfied[s] |= IN_POOL
                    else:
                        n_sat = satisfy(sats, n_sat, satisfied, 4 * e + 2 + half)
                        if role[e] == PROBE:
                            continue
                        if half == 0:
                            partner[e] = s
                        partner[s] = e
                    n_sat = satisfy(sats, n_sat, satisfied, 4 * s + 2)
                    mark = mixed(e - e0 + 2) if e >= 0 else 1
                    key1 = (key1 + mixed(mark ^ mixed(s - e0 + 77))) & MASK
                    key2 = (key2 + mixed(mark + 3 * mixed(s - e0 + 13))) & MASK
                    continue
                for b in range(job_box[j], job_box[j + 1]):
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
                        if best >= 0:
                            met = True
                            if n > 0:
                                step += 1
                                order[3 * n + e] = step
                            n_sat = satisfy(sats, n_sat, satisfied, 4 * e + 2 + half)
                            if role[e] != PROBE:
                                if half == 0:
                                    partner[e] = best
                                partner[best] = e
                                n_sat = satisfy(sats, n_sat, satisfied, 4 * best + 2)
                early_mail = False
                if not met:
                    break
        if record > 0:
            at = cell * record
            standing = 0
            digest1 = 0
            digest2 = 0
            for lane in range(natural(job_lane[j]), job_lane[j + 1]):
                e = lane_at[lane]
                if e >= 0:
                    standing += 1
                    digest1 = (digest1 + mixed(e - e0 + 5)) & MASK
                    digest2 = (digest2 + mixed(3 * (e - e0) + 11)) & MASK
            for queue in range(natural(job_queue[j]), job_queue[j + 1]):
                e = queue_at[queue]
                if e >= 0:
                    standing += 1
                    digest1 = (digest1 + mixed(e - e0 + 7)) & MASK
                    digest2 = (digest2 + mixed(5 * (e - e0) + 17)) & MASK
            outcome[at + COMPLETED] = n_completed
            outcome[at + STANDING] = standing
            outcome[at + DIGEST] = (digest1 << 31) | digest2
            outcome[at + CHOICES] = decisions
            outcome[at + STATE] = (key1 << 31) | key2
