"""What a scenario leaves open while a replay runs: bounded buffers, and choices one by one.

Helpers of :mod:`replay_kernel`, and the columns of the rows of integers that a scenario and its
outcome are. Buffers of a channel are monotone: they fill and drain as messages come. Which message
a wildcard takes, and which send takes room in a shared pool, are choices. A choice is made only
when nothing else moves, one at a time: the state before it is then a function of the choices made
so far, in whatever order they were made, and every order of events is reached by some sequence of
choices (a choice that could have been made earlier can still be made).

Source: DESIGN.md sections 4 (rule 5) and 6.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dl2gpu.engine.native import helper
from dl2gpu.engine.native_bits import natural

# --- columns of a scenario (a row of integers); behind the last come the choices that are given
EAGER_BYTES: Final = 0
EARLY: Final = 1
ATOMIC: Final = 2
WILD: Final = 3
BUFFER_MESSAGES: Final = 4
BUFFER_BYTES: Final = 5
POOL_BYTES: Final = 6
POLICY: Final = 7
SEED: Final = 8
FACTS: Final = 9
GIVEN: Final = 10
PARAMETERS: Final = 11

WILD_LOW: Final = 0
WILD_HIGH: Final = 1
WILD_CHOSEN: Final = 2

CHOOSE_FIRST: Final = 0
CHOOSE_LAST: Final = 1
CHOOSE_SEEDED: Final = 2

# --- columns of an outcome: events that completed, places that stand, a hash of where they stand,
# --- how many choices there were, a hash of what was chosen; behind them for each choice how many
# --- ways there were with the one taken (31 bits higher), and the state before it
COMPLETED: Final = 0
STANDING: Final = 1
DIGEST: Final = 2
CHOICES: Final = 3
STATE: Final = 4
OUTCOMES: Final = 5

MASK: Final = (1 << 31) - 1
"""Hashes have 31 bits, so that their products fit 64 on every engine."""

IN_POOL: Final = 16
"""Bit of ``satisfied`` beside those of layers and halves: the message took room in a pool."""

SENDS: Final = 3
PROBES: Final = 5


@helper(forceinline=True)
def satisfy(sats: Any, n: Any, satisfied: Any, part: Any) -> Any:
    """Puts a part on the stack of satisfied parts, once. ``part``: 4 event + 2 layer + half."""
    e = natural(part >> 2)
    bit = np.uint8(1 << (part & 3))
    if satisfied[e] & bit:
        return n
    satisfied[e] |= bit
    sats[n] = part
    return n + 1


@helper(forceinline=True)
def mixed(value: Any) -> Any:
    """A hash of 31 bits."""
    h = value & MASK
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & MASK
    h = ((h ^ (h >> 12)) * 0x297A2D39) & MASK
    return h ^ (h >> 15)


@helper()
def fill_channel(
    first: Any, layer: Any, most: Any, room: Any, sender: Any, eager_at: Any, node_blocks: Any,
    arrived: Any, root_in: Any, sats: Any, n_sat: Any, satisfied: Any,
) -> Any:  # fmt: skip
    """Lets go the sends of a channel that fit its buffer (rule 5). Returns the stack's height.

    A standard send fits when fewer than ``most`` earlier ones (0: any number) are unreceived, and
    their bytes and its own are at most ``room`` (0: any number). Messages at the head of the
    channel that are received are passed over for good, and behind the last that was sent
    (``arrived[3]`` of the first says how many that are) there is nothing to look at.
    """
    held = 0
    load = 0
    lead = True
    v = first + arrived[2, first]
    while v < first + arrived[3, first]:
        gone = arrived[layer, v] - np.int64(root_in[layer, v]) >= 1 and not node_blocks[v]
        s = sender[v]
        if s >= 0 and eager_at[s] > 0:
            fits = (most == 0 or held < most) and (room == 0 or load <= room - eager_at[s])
            if fits and root_in[layer, v]:
                n_sat = satisfy(sats, n_sat, satisfied, 4 * s + 2 * layer)
            if not gone:
                held += 1
                load += min(eager_at[s], room)
        lead = lead and gone
        if lead and layer == 1:
            arrived[2, first] += 1
        if (most > 0 and held >= most) or (room > 0 and load >= room):
            break
        v += 1
    return n_sat


@helper()
def fill_mailbox(
    low: Any, high: Any, most: Any, room: Any, send_event: Any, rank_of: Any, tag: Any,
    eager_at: Any, started: Any, partner: Any, sats: Any, n_sat: Any, satisfied: Any,
) -> Any:  # fmt: skip
    """As :func:`fill_channel`, of the sends ``low`` to ``high`` to a mailbox of wildcards."""
    for y in range(low, high):
        s = send_event[y]
        if not started[s] or partner[s] >= 0 or satisfied[s] & 4 or eager_at[s] <= 0:
            continue
        held = 0
        load = 0
        for z in range(y - 1, low - 1, -1):
            other = send_event[z]
            if rank_of[other] != rank_of[s]:
                break
            if partner[other] < 0 and tag[other] == tag[s] and eager_at[other] > 0:
                held += 1
                load += min(eager_at[other], room)
                if (most > 0 and held >= most) or (room > 0 and load >= room):
                    break
        if (most == 0 or held < most) and (room == 0 or load <= room - eager_at[s]):
            n_sat = satisfy(sats, n_sat, satisfied, 4 * s + 2)
    return n_sat


@helper()
def find_choice(
    pick: Any, box0: Any, box1: Any, take_at: Any, take_start: Any, take_event: Any, take_one: Any,
    send_at: Any, send_start: Any, send_event: Any, role: Any, rank_of: Any, peer: Any, tag: Any,
    recv_peer: Any, recv_tag: Any, issued: Any, started: Any, satisfied: Any, partner: Any,
    e0: Any, e1: Any, room: Any, pool_of: Any, pool_used: Any, eager_at: Any, node1: Any,
    channel: Any, sender: Any, arrived: Any, root_in: Any, node_blocks: Any,
) -> Any:  # fmt: skip
    """The choices there are when nothing else moves, in a fixed order.

    Returns (how many, receive, send, half of the receive, whether the send takes room in a pool in
    place of a receive) of number ``pick``, or with a ``pick`` of -1 of the first one.

    A receive that is the first of its mailbox, and to which everybody has sent who ever will, is
    chosen for alone: what others do changes neither its choices nor what they lead to. So the
    orders in which independent receives take are not told apart. A probe takes nothing away: where
    there is a message for it (that no earlier receive could take), that is the one choice.
    """
    many = 0
    got_e, got_s, got_half = -1, -1, 0
    for b in range(box0, box1):
        while take_at[b] < take_start[b + 1]:
            e = take_event[take_at[b]]
            if not satisfied[e] & (8 if role[e] == SENDS else 4):
                break
            take_at[b] += 1
        while send_at[b] < send_start[b + 1]:
            if partner[send_event[send_at[b]]] < 0:
                break
            send_at[b] += 1
        ahead = 0  # receives that wait before this one
        for x in range(take_at[b], take_start[b + 1]):
            e = take_event[x]
            if take_one[b] and not issued[e]:
                break  # nor are those behind it
            half = 1 if role[e] == SENDS else 0
            if not started[e] or satisfied[e] & (4 + 4 * half):
                continue
            src = peer[e] if half == 0 else recv_peer[e]
            want = tag[e] if half == 0 else recv_tag[e]
            mine = 0
            could = 0
            last, last_could = -1, -1
            begin = many
            first_s = -1
            for y in range(send_at[b], send_start[b + 1]):
                s = send_event[y]
                if partner[s] >= 0:
                    continue
                if (src >= 0 and rank_of[s] != src) or (want >= 0 and tag[s] != want):
                    continue
                if rank_of[s] != last_could:
                    last_could = rank_of[s]
                    could += 1
                if not started[s] or rank_of[s] == last:
                    continue
                last = rank_of[s]
                taken = False
                if ahead > 0:
                    # what an earlier receive could take is not for this one
                    for z in range(take_at[b], x):
                        w = take_event[z]
                        other = 1 if role[w] == SENDS else 0
                        if role[w] == PROBES or not started[w] or satisfied[w] & (4 + 4 * other):
                            continue
                        from_ = peer[w] if other == 0 else recv_peer[w]
                        with_ = tag[w] if other == 0 else recv_tag[w]
                        if (from_ < 0 or from_ == rank_of[s]) and (with_ < 0 or with_ == tag[s]):
                            taken = True
                            break
                if taken:
                    continue
                if mine == 0:
                    first_s = s
                if many == pick or (pick < 0 and many == 0):
                    got_e, got_s, got_half = e, s, half
                mine += 1
                many += 1
            if role[e] == PROBES:
                many = begin
                if mine > 0:
                    return 1, e, first_s, 0, False
                continue
            if ahead == 0 and take_one[b] and mine > 0 and mine == could:
                # closed: choose for this receive alone
                if pick < 0:
                    return mine, e, first_s, half, False
                seen = 0
                last = -1
                for y in range(send_at[b], send_start[b + 1]):
                    s = send_event[y]
                    if partner[s] >= 0 or not started[s] or rank_of[s] == last:
                        continue
                    if (src >= 0 and rank_of[s] != src) or (want >= 0 and tag[s] != want):
                        continue
                    last = rank_of[s]
                    if seen == pick:
                        return mine, e, s, half, False
                    seen += 1
            ahead += 1
    if room <= 0:
        return many, got_e, got_s, got_half, False
    free = False
    for e in range(e0, e1):
        if pool_of[e] >= 0:
            pool_used[pool_of[e]] = 0
    for e in range(e0, e1):
        if pool_of[e] >= 0 and satisfied[e] & IN_POOL:
            v = node1[e]
            if v >= 0:
                gone = arrived[1, v] - np.int64(root_in[1, v]) >= 1 and not node_blocks[v]
            else:
                gone = partner[e] >= 0
            if not gone:
                pool_used[pool_of[e]] += min(eager_at[e], room)
    for e in range(e0, e1):
        if pool_of[e] < 0 or eager_at[e] <= 0 or not started[e] or satisfied[e] & 4:
            continue
        if pool_used[pool_of[e]] > room - eager_at[e]:
            continue
        v = node1[e]
        if v > channel[max(v, 0)] and v >= 0:
            s = sender[v - 1]  # messages of a channel do not overtake
            if s >= 0 and started[s] and not satisfied[s] & 4:
                continue
        if many == pick or (pick < 0 and many == 0):
            got_e, got_s, got_half = -1, e, 0
            free = True
        many += 1
    return many, got_e, got_s, got_half, free
