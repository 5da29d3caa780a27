"""Up to 64 scenarios of a job replayed in lock step: a bit of a word each.

Scenarios of a job differ in little: most of the time all of them are at the same place. So each
fact of DESIGN.md section 4 (issued, started, completed, ...) is kept as a word with a bit for each
scenario, and what happens to an event happens in all scenarios of a word at once. Where scenarios
part (a send that some buffer), their bits go on separately. The host that has got through the
smallest share of its program goes on first, so that those ahead are caught up with, and what
follows is done once for all again. Where that does not keep them together, all begins anew, in the
order in which rendezvous issues the events, which a replay of its own finds out.

What is counted (arrivals of a collective, requests of a wait) is counted in every scenario at once:
a counter is some words, the k-th holding the k-th binary digit in each scenario; one that begins at
2^k - n overflows where n have come.

The rules and their numbers are those of :mod:`replay_kernel`, and so is the fixpoint, bit for bit:
the rules are monotone, so the order of steps does not matter. What is left to it: wildcards and
shared pools (choices), recorded completions, atomic batches.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dl2gpu.analysis.choice_kernel import (
    ATOMIC,
    BUFFER_BYTES,
    BUFFER_MESSAGES,
    COMPLETED,
    DIGEST,
    EAGER_BYTES,
    EARLY,
    FACTS,
    MASK,
    POOL_BYTES,
    STANDING,
    WILD,
    WILD_CHOSEN,
    mixed,
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
from dl2gpu.engine.arrays import Array
from dl2gpu.engine.native import Bools, Int8s, Int32s, Int64s, UInt8s, helper, kernel
from dl2gpu.engine.native_bits import lowest, natural, soon

__all__ = ["LEFT", "PATIENCE", "SCENARIOS", "run", "scratch"]

SCENARIOS: Final = 64
"""Scenarios that go in lock step: bits of a word."""

LEFT: Final = -1
"""``COMPLETED`` of a cell that is left to :mod:`replay_kernel`."""

# --- an event of a job in its program: words of 32 bits, a cache line. Numbers of events, nodes and
# --- batches count within the job.
PROGRAM: Final = 16
NEXT: Final = 0  # in its lane; behind its last -2 - lane
QUEUE_NEXT: Final = 1  # in its queue; -1: none
NODE: Final = 2  # and the one behind: of the first and the second part; -1: none
ROLE: Final = 4
PARTS: Final = 5
PLACE: Final = 6  # how it holds its host: GOES_ON, HOLDS, or ON_QUEUE
UNIT: Final = 7
COUNTER: Final = 8  # of a wait: its counter, and how many words that has; -1: no wait
DIGITS: Final = 9
GATHERED: Final = 10  # the wait for everything that waits for this event; -1: none
KEY: Final = 11  # its place in the order of steps
LINK: Final = 12  # the next on the list of this place
NAMED: Final = 13  # waits name it
NEEDS: Final = 14  # so many requests of a wait
NUMBER: Final = 15  # in the order in which events are issued

GOES_ON: Final = 0
HOLDS: Final = 1
ON_QUEUE: Final = 2

# --- an event in its scenarios: words of 64 bits, a cache line. What is there to do is the
# --- difference of two words, so that an event is on a list once whatever comes to it meanwhile
STATE: Final = 8
REACHED: Final = 0  # the host has got there
ISSUED: Final = 1
TO_START: Final = 2
STARTED: Final = 3
DONE: Final = 4  # all it needs is there
FINISHED: Final = 5  # and what follows from that was done
MET: Final = 6  # its first part is satisfied; of a wait: enough requests are complete
FRONT: Final = 7  # what is before it in its queue is complete

# --- a node: words of 32 bits. Its words begin at WORDS: where the root or sender has come, where a
# --- receiver has, and its counter
NODES: Final = 8
KIND: Final = 0  # and BLOCKS, and PROBED
COMING: Final = 1  # so many complete it
ENOUGH: Final = 2  # words of its counter; -1: so many do not come, or it blocks
WORDS: Final = 3
PART: Final = 4  # first of its parts, and the end
HEAD: Final = 6  # of a channel's first message: so many messages are gone in all scenarios,
TOP: Final = 7  # and behind so many nothing was sent

KINDS: Final = 7
BLOCKS: Final = 8
PROBED: Final = 16

# --- a batch: words of 32 bits, and of 64
UNITS: Final = 8
FIRST: Final = 0
LAST: Final = 1
HOLDS_HOST: Final = 2
SIZE: Final = 3
TOTAL: Final = 4  # of parts
MEMBERS: Final = 5  # counter of those that are ready, and its words; behind it that of parts
DIGITS_READY: Final = 6
DIGITS_MET: Final = 7
UNIT_WORDS: Final = 3
READY: Final = 0  # all members are
SATISFIED: Final = 1  # all their parts are
PASSED: Final = 2  # it is complete

AHEAD: Final = 6
"""Events of a lane by which memory is asked before they come."""

APART: Final = 6
"""Steps for each event that was reached from which scenarios are too far apart (together: 3)."""

PATIENCE: Final = 4096
"""More steps that may be lost before that is said."""

KEYS: Final = 1 << 18
"""Places in the order of steps: three levels of words."""

# --- what the scenarios differ in: for eager thresholds, messages and bytes of channels a table of
# --- so many values in increasing order, and as many words of those that have as much or more
SIDE: Final = 2 * SCENARIOS + 1
EAGER: Final = 0
MESSAGES: Final = SIDE
BYTES: Final = 2 * SIDE
EARLIER: Final = 3 * SIDE
BOUNDED: Final = EARLIER + 1
ANY_MESSAGES: Final = EARLIER + 2
ANY_BYTES: Final = EARLIER + 3
SETTINGS: Final = EARLIER + 4

_MOST: Final = (1 << 63) - 1


def scratch(jobs: Array, job_event: Array, job_lane: Array, dep_start: Array) -> tuple[Array, ...]:
    """Working arrays of :func:`run`, large enough for any of the jobs.

    Some 170 bytes an event of the largest job are used, and twice as many more reserved.
    """
    begin, end = job_event[jobs], job_event[jobs + 1]
    events = int((end - begin).max(initial=0))
    named = int((dep_start[end] - dep_start[begin]).max(initial=0))
    lanes = int((job_lane[jobs + 1] - job_lane[jobs]).max(initial=0))
    return (
        np.empty(PROGRAM * events, np.int32),  # program
        np.empty(STATE * events, np.int64),  # state
        np.empty(events, np.int64),  # second: the second part is satisfied
        # nodes: two an event, and the first of each channel
        np.empty(4 * NODES * events, np.int32),
        np.empty(UNITS * (events // 2 + 1), np.int32),  # units
        np.empty(UNIT_WORDS * (events // 2 + 1), np.int64),  # unit_words
        # a node has at most two words a part, a wait at most one a request, a batch two a part
        np.empty(10 * events + named, np.int64),  # words
        np.empty(lanes, np.int64),  # ends: the host has got through
        np.empty(lanes, np.int32),  # number: of events, by lane
        np.empty(events, np.int32),  # starts
        np.empty(events, np.int32),  # comps
        np.empty(events, np.int32),  # sent: sends that have started
        np.empty(min(KEYS, events + 1), np.int32),  # first: of the list of each key
        np.zeros((KEYS >> 6) + (KEYS >> 12) + 1, np.int64),  # there: which lists hold something
        np.empty(SETTINGS, np.int64),  # settings
    )


@helper()
def digits_of(many: Any) -> Any:
    """Words of a counter that overflows when so many have come."""
    k = 0
    while (1 << k) < many:
        k += 1
    return k


@helper()
def set_counter(words: Any, at: Any, digits: Any, many: Any) -> None:
    """A counter that so many have to come to, in every scenario."""
    for k in range(digits):
        words[at + k] = -(((1 << digits) - many) >> k & 1)


@helper(forceinline=True)
def count(words: Any, at: Any, digits: Any, come: Any) -> Any:
    """One more has come in some scenarios. Returns those in which they are as many as needed."""
    for k in range(digits):
        before = words[at + k]
        words[at + k] = before ^ come
        come = before & come
        if come == 0:
            break
    return come


@helper()
def put(settings: Any, side: Any, value: Any, bit: Any) -> None:
    """Enters a scenario's value in a table."""
    n = settings[side]
    k = n
    while k > 0 and settings[side + k] >= value:
        k -= 1
    # the first k values are smaller
    if k == n or settings[side + 1 + k] != value:
        for x in range(n, k, -1):
            settings[side + 1 + x] = settings[side + x]
            settings[side + 1 + SCENARIOS + x] = settings[side + SCENARIOS + x]
        settings[side + 1 + k] = value
        settings[side + 1 + SCENARIOS + k] = settings[side + 2 + SCENARIOS + k] if k < n else 0
        settings[side] = n + 1
    for x in range(k + 1):
        settings[side + 1 + SCENARIOS + x] |= bit


@helper(forceinline=True)
def having(settings: Any, side: Any, value: Any) -> Any:
    """The scenarios that have so much or more."""
    low = 0
    high = settings[side]
    while low < high:
        middle = (low + high) >> 1
        if settings[side + 1 + middle] < value:
            low = middle + 1
        else:
            high = middle
    if low == settings[side]:
        return np.int64(0)
    return settings[side + 1 + SCENARIOS + low]


@helper()
def set_up(
    e0: Any, e1: Any, lane0: Any, lane1: Any, facts: Any, lane_of: Any, lane_next: Any,
    queue_of: Any, queue_next: Any, unit_of: Any, unit_first: Any, unit_size: Any,
    host_blocks: Any, wait_kind: Any, wait_needs: Any, dep_start: Any, node1: Any, node2: Any,
    role: Any, alone: Any, known: Any, node_start: Any, node_part: Any, node_kind: Any,
    node_need: Any, node_blocks: Any, channel: Any, local: Any, program: Any, nodes: Any,
    units: Any, number: Any, wait: Any, room: Any,
) -> Any:  # fmt: skip
    """The program of a job, with places for its counters in ``room`` words.

    The host that has got through the smallest share of its lane goes on first. Returns how many
    nodes and batches there are; -1: it is not for lock step.
    """
    n_nodes = 0
    n_units = 0
    n_words = 0
    longest = 0
    for lane in range(lane0, lane1):
        number[lane - lane0] = 0
    for e in range(e0, e1):
        for half in range(2):
            v = node1[e] if half == 0 else node2[e]
            if v >= 0:
                local[v] = -1
                if len(channel) > 0 and channel[v] >= 0:
                    local[channel[v]] = -1
    for e in range(e0, e1):
        at = PROGRAM * (e - e0)
        if known[e] & facts or wait_kind[e] > 2 or (alone[e] and node2[e] >= 0):
            return -1, 0
        lane = lane_of[e] - lane0
        program[at + KEY] = number[lane]
        number[lane] += 1
        longest = max(longest, number[lane])
        program[at + NEXT] = lane_next[e] - e0 if lane_next[e] >= 0 else -2 - lane
        program[at + QUEUE_NEXT] = queue_next[e] - e0 if queue_next[e] >= 0 else -1
        program[at + ROLE] = role[e]
        program[at + COUNTER] = 0 if wait_kind[e] != 0 else -1
        program[at + NEEDS] = wait_needs[e] if wait_kind[e] == 1 else 0
        program[at + GATHERED] = -1
        program[at + NUMBER] = -1
        program[at + NAMED] = 1 if dep_start[e + 1] > dep_start[e] else 0
        place = HOLDS if host_blocks[e] else GOES_ON
        program[at + PLACE] = ON_QUEUE if queue_of[e] >= 0 else place
        parts = 0
        if wait_kind[e] == 0 and not alone[e]:
            if node1[e] >= 0 or role[e] != 0:
                parts = 1
            if node2[e] >= 0:
                parts = 2
        program[at + PARTS] = parts
        for half in range(2):
            v = node1[e] if half == 0 else node2[e]
            program[at + NODE + half] = -1
            while v >= 0:
                if local[v] < 0:
                    local[v] = n_nodes
                    one = NODES * n_nodes
                    n_nodes += 1
                    kind = node_kind[v] + (BLOCKS if node_blocks[v] else 0)
                    coming = 0
                    for x in range(node_start[v], node_start[v + 1]):
                        if role[node_part[x] >> 1] == PROBE:
                            kind |= PROBED
                        else:
                            coming += 1
                    digits = -1
                    if not node_blocks[v] and 0 < node_need[v] <= coming:
                        digits = digits_of(node_need[v])
                    nodes[one + KIND] = kind
                    nodes[one + COMING] = node_need[v]
                    nodes[one + ENOUGH] = digits
                    nodes[one + WORDS] = n_words
                    nodes[one + PART] = node_start[v]
                    nodes[one + PART + 1] = node_start[v + 1]
                    n_words += 2 + max(digits, 0)
                if program[at + NODE + half] < 0:
                    program[at + NODE + half] = local[v]
                # the first message of its channel says how far that is
                first = channel[v] if len(channel) > 0 else -1
                v = first if first >= 0 and local[first] < 0 else -1
        u = unit_of[e]
        program[at + UNIT] = -1
        if u >= 0:
            if wait_kind[e] != 0:
                return -1, 0
            if unit_first[u] == e:
                one = UNITS * n_units
                n_units += 1
                units[one + FIRST] = e - e0
                units[one + SIZE] = unit_size[u]
                units[one + HOLDS_HOST] = 0
                x = e
                while x >= 0 and unit_of[x] == u:
                    units[one + LAST] = x - e0
                    if queue_of[x] < 0 and host_blocks[x]:
                        units[one + HOLDS_HOST] = 1
                    x = lane_next[x]
    keys = min(longest, KEYS)
    # backwards: which wait for everything waits for what
    for lane in range(lane0, lane1):
        wait[lane - lane0] = -1
    for e in range(e1 - 1, e0 - 1, -1):
        at = PROGRAM * (e - e0)
        lane = lane_of[e] - lane0
        if number[lane] != keys:
            program[at + KEY] = program[at + KEY] * keys // number[lane]
        if wait_kind[e] == 2:
            wait[lane] = e - e0
        elif program[at + PLACE] != HOLDS and wait[lane] >= 0:
            program[at + GATHERED] = wait[lane]
            program[PROGRAM * wait[lane] + NEEDS] += 1
    for u in range(n_units):
        one = UNITS * u
        units[one + TOTAL] = 0
        e = units[one + FIRST]
        while True:
            program[PROGRAM * e + UNIT] = u
            units[one + TOTAL] += program[PROGRAM * e + PARTS]
            if e == units[one + LAST]:
                break
            e = program[PROGRAM * e + NEXT]
        units[one + MEMBERS] = n_words
        units[one + DIGITS_READY] = digits_of(units[one + SIZE])
        units[one + DIGITS_MET] = digits_of(units[one + TOTAL])
        n_words += units[one + DIGITS_READY] + units[one + DIGITS_MET]
    for e in range(e1 - e0):
        at = PROGRAM * e
        if program[at + COUNTER] >= 0:
            program[at + COUNTER] = n_words
            program[at + DIGITS] = digits_of(program[at + NEEDS])
            n_words += program[at + DIGITS]
    if n_words > room:
        return -1, 0
    return n_nodes, n_units


@helper()
def begin_anew(
    events: Any, n_nodes: Any, n_units: Any, program: Any, nodes: Any, units: Any, state: Any,
    second: Any, unit_words: Any, words: Any,
) -> None:  # fmt: skip
    """Before anything has moved, in every scenario."""
    for e in range(events):
        for x in range(STATE * e, STATE * e + STATE):
            state[x] = 0
        second[e] = 0
        at = PROGRAM * e
        if program[at + COUNTER] >= 0:
            if program[at + NEEDS] <= 0:
                state[STATE * e + MET] = -1
            set_counter(words, program[at + COUNTER], program[at + DIGITS], program[at + NEEDS])
    for v in range(n_nodes):
        one = NODES * v
        at = nodes[one + WORDS]
        words[at] = 0
        words[at + 1] = 0
        set_counter(words, at + 2, nodes[one + ENOUGH], nodes[one + COMING])
        nodes[one + HEAD] = 0
        nodes[one + TOP] = 0
    for u in range(n_units):
        one = UNITS * u
        at = units[one + MEMBERS]
        set_counter(words, at, units[one + DIGITS_READY], units[one + SIZE])
        set_counter(
            words, at + units[one + DIGITS_READY], units[one + DIGITS_MET], units[one + TOTAL]
        )
        unit_words[UNIT_WORDS * u + READY] = 0
        unit_words[UNIT_WORDS * u + SATISFIED] = -1 if units[one + TOTAL] == 0 else 0
        unit_words[UNIT_WORDS * u + PASSED] = 0


@helper()
def put_in_order(events: Any, issued: Any, program: Any) -> None:
    """Makes the order in which events were issued that of the steps; others come behind them."""
    last = 1
    for e in range(events):
        last = max(last, program[PROGRAM * e + KEY] + 1)
    for e in range(events):
        at = PROGRAM * e
        if program[at + NUMBER] < 0:
            program[at + NUMBER] = issued + program[at + KEY] * (events - issued) // last
    for e in range(events):
        program[PROGRAM * e + KEY] = program[PROGRAM * e + NUMBER] * min(events, KEYS) // events


@helper(forceinline=True)
def reach(e: Any, come: Any, program: Any, state: Any, ends: Any, first: Any, there: Any) -> None:
    """The host gets to an event, or to its end, in some scenarios."""
    if e < 0:
        ends[-2 - e] |= come
        return
    at = STATE * e
    if state[at + REACHED] == state[at + ISSUED]:
        key = program[PROGRAM * e + KEY]
        word = key >> 6
        above = (KEYS >> 6) + (key >> 12)
        if there[word] >> (key & 63) & 1:
            program[PROGRAM * e + LINK] = first[key]
        else:
            program[PROGRAM * e + LINK] = -1
            there[word] |= np.int64(1) << (key & 63)
            there[above] |= np.int64(1) << (word & 63)
            there[(KEYS >> 6) + (KEYS >> 12)] |= np.int64(1) << (key >> 12)
        first[key] = e
    state[at + REACHED] |= come


@helper()
def set_off(
    e0: Any, lane0: Any, lane1: Any, queue0: Any, queue1: Any, lane_first: Any, queue_first: Any,
    every: Any, program: Any, state: Any, ends: Any, first: Any, there: Any,
) -> None:  # fmt: skip
    """Each host gets to its first event, and the first event of each queue to its front."""
    for lane in range(lane0, lane1):
        ends[lane - lane0] = 0
        reach(lane_first[lane] - e0, every, program, state, ends, first, there)
    for queue in range(queue0, queue1):
        state[STATE * (queue_first[queue] - e0) + FRONT] = every


@helper(forceinline=True)
def start(e: Any, come: Any, state: Any, starts: Any, n: Any) -> Any:
    """Puts an event on the list of those that start, once. Returns the list's length."""
    at = STATE * natural(e)
    if come & ~state[at + TO_START] == 0:
        return n
    if state[at + TO_START] == state[at + STARTED]:
        starts[n] = e
        n += 1
    state[at + TO_START] |= come
    return n


@helper(forceinline=True)
def finish(e: Any, come: Any, state: Any, comps: Any, n: Any) -> Any:
    """Puts an event on the list of those that complete, once. Returns the list's length."""
    at = STATE * natural(e)
    if come & ~state[at + DONE] == 0:
        return n
    if state[at + DONE] == state[at + FINISHED]:
        comps[n] = e
        n += 1
    state[at + DONE] |= come
    return n


@helper()
def meet_in_batch(
    u: Any, come: Any, program: Any, state: Any, units: Any, unit_words: Any, words: Any,
    comps: Any, n: Any,
) -> Any:  # fmt: skip
    """A part of a batch is satisfied; with its last part all of its members complete."""
    one = UNITS * u
    all_met = count(
        words, units[one + MEMBERS] + units[one + DIGITS_READY], units[one + DIGITS_MET], come
    )
    if all_met == 0:
        return n
    unit_words[UNIT_WORDS * u + SATISFIED] |= all_met
    all_met &= unit_words[UNIT_WORDS * u + READY]
    if all_met != 0:
        e = units[one + FIRST]
        while True:
            n = finish(e, all_met, state, comps, n)
            if e == units[one + LAST]:
                break
            e = program[PROGRAM * e + NEXT]
    return n


@helper(forceinline=True)
def meet(
    e: Any, half: Any, come: Any, program: Any, state: Any, second: Any, units: Any,
    unit_words: Any, words: Any, comps: Any, n: Any,
) -> Any:  # fmt: skip
    """A part of an event is satisfied. Returns the length of the list of those that complete."""
    at = STATE * e
    if half == 0:
        come &= ~state[at + MET]
        state[at + MET] |= come
        whole = come if program[PROGRAM * e + PARTS] < 2 else come & second[e]
    else:
        come &= ~second[e]
        second[e] |= come
        whole = come & state[at + MET]
    if come == 0:
        return n
    u = program[PROGRAM * e + UNIT]
    if u < 0:
        return finish(e, whole, state, comps, n)
    return meet_in_batch(u, come, program, state, units, unit_words, words, comps, n)


@helper()
def get_ready_in_batch(
    u: Any, come: Any, program: Any, state: Any, units: Any, unit_words: Any, words: Any,
    starts: Any, n: Any,
) -> Any:  # fmt: skip
    """A member of a batch is ready (rule 2); with the last of them all start."""
    one = UNITS * u
    all_ready = count(words, units[one + MEMBERS], units[one + DIGITS_READY], come)
    if all_ready != 0:
        unit_words[UNIT_WORDS * u + READY] |= all_ready
        e = units[one + FIRST]
        while True:
            n = start(e, all_ready, state, starts, n)
            if e == units[one + LAST]:
                break
            e = program[PROGRAM * e + NEXT]
    return n


@helper(forceinline=True)
def get_ready(
    e: Any, come: Any, program: Any, state: Any, units: Any, unit_words: Any, words: Any,
    starts: Any, n_start: Any, comps: Any, n_comp: Any,
) -> Any:  # fmt: skip
    """An event is issued, and first in its queue if it is on one. Returns the lists' lengths."""
    if program[PROGRAM * e + COUNTER] >= 0:
        n_comp = finish(e, come & state[STATE * e + MET], state, comps, n_comp)
    elif program[PROGRAM * e + UNIT] < 0:
        n_start = start(e, come, state, starts, n_start)
    else:
        n_start = get_ready_in_batch(
            program[PROGRAM * e + UNIT], come, program, state, units, unit_words, words,
            starts, n_start,
        )  # fmt: skip
    return n_start, n_comp


@helper()
def move_up(
    e: Any, come: Any, program: Any, state: Any, units: Any, unit_words: Any, words: Any,
    starts: Any, n_start: Any, comps: Any, n_comp: Any,
) -> Any:  # fmt: skip
    """An event comes to the front of its queue, and those behind it where it is complete already.

    A batch is at the front as a whole. Returns the lengths of the lists.
    """
    while e >= 0:
        at = STATE * e
        come &= ~state[at + FRONT]
        if come == 0:
            break
        state[at + FRONT] |= come
        over = come & state[at + FINISHED]
        now = come & state[at + ISSUED] & ~over
        follows = program[PROGRAM * e + QUEUE_NEXT]
        if now != 0:
            n_start, n_comp = get_ready(
                e, now, program, state, units, unit_words, words, starts, n_start, comps, n_comp
            )
            u = program[PROGRAM * e + UNIT]
            if u >= 0 and follows >= 0 and program[PROGRAM * follows + UNIT] == u:
                over |= now
        come = over
        e = follows
    return n_start, n_comp


@helper()
def fill_channel(
    first: Any, where: Any, e0: Any, sender: Any, eager_at: Any, local: Any,
    program: Any, state: Any, second: Any, nodes: Any, units: Any, unit_words: Any, words: Any,
    settings: Any, comps: Any, n_comp: Any,
) -> Any:  # fmt: skip
    """Lets go the sends of a channel that fit its buffer (rule 5), in some scenarios.

    As :func:`choice_kernel.fill_channel`; scenarios in which the same messages are received are
    gone through together. Returns the length of the list of those that complete.
    """
    one = NODES * local[first]
    while nodes[one + HEAD] < nodes[one + TOP]:
        v = first + nodes[one + HEAD]
        if sender[v] < 0:
            break
        if settings[BOUNDED] & ~words[nodes[NODES * local[v] + WORDS] + 1] != 0:
            break
        nodes[one + HEAD] += 1
    any_messages = settings[ANY_MESSAGES]
    any_bytes = settings[ANY_BYTES]
    while where != 0:
        example = where & -where
        same = where
        held = np.int64(0)
        load = np.int64(0)
        for v in range(first + nodes[one + HEAD], first + nodes[one + TOP]):
            s = sender[v]
            if s < 0 or eager_at[s] <= 0:
                continue
            at = nodes[NODES * local[v] + WORDS]
            size = eager_at[s]
            can = same & words[at] & ~state[STATE * (s - e0) + MET]
            if can != 0:
                if any_messages != 0:
                    can &= having(settings, MESSAGES, held + 1) | ~any_messages
                if any_bytes != 0 and load > _MOST - size:
                    can &= ~any_bytes
                elif any_bytes != 0:
                    can &= having(settings, BYTES, load + size) | ~any_bytes
                n_comp = meet(
                    s - e0, 0, can, program, state, second, units, unit_words, words, comps, n_comp
                )
            gone = words[at + 1]
            if gone & example != 0:
                same &= gone
                continue
            same &= ~gone
            held += 1
            load = load + size if load <= _MOST - size else np.int64(_MOST)
            can = same
            if any_messages != 0:
                can &= having(settings, MESSAGES, held + 1) | ~any_messages
            if any_bytes != 0 and load == _MOST:
                can &= ~any_bytes
            elif any_bytes != 0:
                can &= having(settings, BYTES, load + 1) | ~any_bytes
            if can == 0:
                break
        where &= ~same
    return n_comp


@kernel
def run(
    cells: Int32s, table: Int64s, width: int, record: int, patience: int,
    job_event: Int32s, job_lane: Int32s, job_queue: Int32s, job_box: Int32s,
    lane_of: Int32s, lane_next: Int32s, lane_first: Int32s,
    queue_of: Int32s, queue_next: Int32s, queue_first: Int32s,
    unit_of: Int32s, unit_first: Int32s, unit_size: Int32s,
    host_blocks: Bools, wait_kind: UInt8s, wait_needs: Int32s, dep_start: Int32s, dep_wait: Int32s,
    node1: Int32s, node2: Int32s, role: Int8s, eager_at: Int64s, alone: Bools, known: UInt8s,
    node_start: Int32s, node_part: Int32s, node_kind: Int8s, node_need: Int32s, node_blocks: Bools,
    channel: Int32s, sender: Int32s, outcome: Int64s, local: Int32s,
    program: Int32s, state: Int64s, second: Int64s, nodes: Int32s, units: Int32s,
    unit_words: Int64s, words: Int64s, ends: Int64s, number: Int32s, starts: Int32s, comps: Int32s,
    sent: Int32s, first: Int32s, there: Int64s, settings: Int64s,
) -> int:  # fmt: skip
    """Runs each cell, a job under a scenario, to its least fixpoint; writes ``outcome``.

    Arguments are those of :func:`replay_kernel.run` as far as they have the same names, and what
    :func:`scratch` makes; ``local`` int32[nodes] is scratch, too. Cells of a job lie side by side.
    Cells that are not for lock step have ``COMPLETED`` of ``LEFT``. ``patience``: as ``PATIENCE``;
    it has a say in the order of steps only.

    Returns:
        How many steps were taken: an event is issued, starts or completes, in whichever scenarios.
    """
    steps = 0
    n_cells = len(cells) // 3
    set_for = -1  # the job whose program is set up
    watching = False  # are its scenarios too far apart?
    n_nodes = 0
    n_units = 0
    low = 0
    while low < n_cells:
        j = cells[3 * low]
        e0, e1 = natural(job_event[j]), job_event[j + 1]
        lane0, lane1 = job_lane[j], job_lane[j + 1]
        queue0, queue1 = job_queue[j], job_queue[j + 1]
        events = e1 - e0
        # --- the next scenarios of this job
        fits = job_box[j] == job_box[j + 1]
        facts = np.int64(0)
        for x in range(SETTINGS):
            settings[x] = 0
        high = low
        while high < n_cells and high < low + SCENARIOS and cells[3 * high] == j:
            row = cells[3 * high + 1] * width
            bit = np.int64(1) << (high - low)
            facts |= table[row + FACTS]
            if table[row + ATOMIC] != 0 or table[row + WILD] == WILD_CHOSEN:
                fits = False
            if table[row + POOL_BYTES] > 0:
                fits = False
            if table[row + EAGER_BYTES] >= 0:
                put(settings, EAGER, table[row + EAGER_BYTES], bit)
            if table[row + EARLY] != 0:
                settings[EARLIER] |= bit
            if table[row + BUFFER_MESSAGES] > 0:
                put(settings, MESSAGES, table[row + BUFFER_MESSAGES], bit)
                settings[ANY_MESSAGES] |= bit
            if table[row + BUFFER_BYTES] > 0:
                put(settings, BYTES, table[row + BUFFER_BYTES], bit)
                settings[ANY_BYTES] |= bit
            high += 1
        for x in range(high, n_cells if set_for != j else high):
            if cells[3 * x] != j:
                break
            facts |= table[cells[3 * x + 1] * width + FACTS]
        settings[BOUNDED] = settings[ANY_MESSAGES] | settings[ANY_BYTES]
        if fits and set_for != j:
            watching = True
            n_nodes, n_units = set_up(
                e0, e1, lane0, lane1, facts, lane_of, lane_next, queue_of, queue_next,
                unit_of, unit_first, unit_size, host_blocks, wait_kind, wait_needs, dep_start,
                node1, node2, role, alone, known, node_start, node_part, node_kind, node_need,
                node_blocks, channel, local, program, nodes, units, number, ends, len(words),
            )  # fmt: skip
            set_for = j
        if not fits or n_nodes < 0:
            for cell in range(low, high):
                outcome[cell * record + COMPLETED] = LEFT
            low = high
            continue
        every = np.int64(-1)
        if high - low < SCENARIOS:
            every = (np.int64(1) << (high - low)) - 1
        goal = every
        early = settings[EARLIER]
        bounded = settings[BOUNDED]
        ordering = False
        anew = True
        begun = steps
        reached = 0
        issued = 0
        full = 0  # events that completed in every scenario
        n_start = 0
        n_comp = 0
        n_sent = 0

        while True:
            if anew:
                begin_anew(
                    events, n_nodes, n_units, program, nodes, units, state, second, unit_words,
                    words,
                )  # fmt: skip
                set_off(
                    e0, lane0, lane1, queue0, queue1, lane_first, queue_first, every, program,
                    state, ends, first, there,
                )  # fmt: skip
                anew = False
            n_start, n_comp = natural(n_start), natural(n_comp)
            if n_start > 0:
                # --- an event starts
                n_start -= 1
                e = natural(starts[n_start])
                at = STATE * e
                here = PROGRAM * e
                come = state[at + TO_START] & ~state[at + STARTED]
                state[at + STARTED] = state[at + TO_START]
                steps += 1
                over = come  # where none of its parts is left
                if program[here + PARTS] > 0:
                    over &= state[at + MET]
                if program[here + PARTS] > 1:
                    over &= second[e]
                if over != 0:
                    u = program[here + UNIT]
                    if u >= 0:
                        n_comp = finish(
                            e, over & unit_words[UNIT_WORDS * u + SATISFIED], state, comps, n_comp
                        )
                    else:
                        n_comp = finish(e, over, state, comps, n_comp)
                    come &= ~over
                    if come == 0:
                        continue
                if ordering and program[here + ROLE] == SEND:
                    sent[n_sent] = e
                    n_sent += 1
                for half in range(2):
                    node = program[here + NODE + half]
                    kind = program[here + ROLE] if half == 0 else RECV
                    if half == 0 and kind == SEND and len(eager_at) > 0 and eager_at[e0 + e] >= 0:
                        # rule 5, buffered: a send needs nobody
                        free = come
                        if not ordering:
                            free &= having(settings, EAGER, eager_at[e0 + e])
                        elif eager_at[e0 + e] > 0:
                            free = np.int64(0)
                        if free != 0:
                            n_comp = meet(
                                e, 0, free, program, state, second, units, unit_words, words,
                                comps, n_comp,
                            )  # fmt: skip
                    if node < 0:
                        continue
                    one = NODES * node
                    what = nodes[one + KIND]
                    w = natural(nodes[one + WORDS])
                    if kind == PROBE:
                        n_comp = meet(
                            e, 0, come & words[w], program, state, second, units, unit_words,
                            words, comps, n_comp,
                        )  # fmt: skip
                        continue
                    if kind == ROOT or kind == SEND:
                        words[w] |= come
                        if what & PROBED:
                            for x in range(nodes[one + PART], nodes[one + PART + 1]):
                                other = natural((node_part[x] >> 1) - e0)
                                if program[PROGRAM * other + ROLE] == PROBE:
                                    n_comp = meet(
                                        other, 0, come & state[STATE * other + STARTED], program,
                                        state, second, units, unit_words, words, comps, n_comp,
                                    )  # fmt: skip
                    elif not what & BLOCKS:
                        words[w + 1] |= come
                    if bounded & come != 0 and what & KINDS == MESSAGE:
                        v = node1[e0 + e] if half == 0 else node2[e0 + e]
                        top = NODES * local[channel[v]] + TOP
                        if kind == SEND and nodes[top] <= v - channel[v]:
                            nodes[top] = v - channel[v] + 1
                        n_comp = fill_channel(
                            channel[v], bounded & come, e0, sender, eager_at, local,
                            program, state, second, nodes, units, unit_words, words, settings,
                            comps, n_comp,
                        )  # fmt: skip
                    if what & BLOCKS:
                        continue
                    arrive = come
                    if early & come != 0 and what & KINDS == ROOT_SENDS:
                        # rule 4, released early: the root needs nobody, the others need the root
                        arrive &= ~early
                        if kind == ROOT:
                            for x in range(nodes[one + PART], nodes[one + PART + 1]):
                                other = natural((node_part[x] >> 1) - e0)
                                n_comp = meet(
                                    other, 0, early & come & state[STATE * other + STARTED],
                                    program, state, second, units, unit_words, words, comps,
                                    n_comp,
                                )  # fmt: skip
                        else:
                            n_comp = meet(
                                e, half, early & come & words[w], program, state, second, units,
                                unit_words, words, comps, n_comp,
                            )  # fmt: skip
                    elif early & come != 0 and what & KINDS == ROOT_RECEIVES and kind != ROOT:
                        n_comp = meet(
                            e, half, early & come, program, state, second, units, unit_words,
                            words, comps, n_comp,
                        )  # fmt: skip
                    if arrive == 0 or nodes[one + ENOUGH] < 0:
                        continue
                    arrive = count(words, w + 2, nodes[one + ENOUGH], arrive)
                    if arrive != 0:
                        # rules 3 and 5: all have come
                        for x in range(nodes[one + PART], nodes[one + PART + 1]):
                            other = natural((node_part[x] >> 1) - e0)
                            if program[PROGRAM * other + ROLE] != PROBE:
                                n_comp = meet(
                                    other, node_part[x] & 1, arrive, program, state, second,
                                    units, unit_words, words, comps, n_comp,
                                )  # fmt: skip
            elif n_comp > 0:
                # --- an event completes
                n_comp -= 1
                e = natural(comps[n_comp])
                at = STATE * e
                here = PROGRAM * e
                come = state[at + DONE] & ~state[at + FINISHED]
                state[at + FINISHED] = state[at + DONE]
                steps += 1
                if state[at + FINISHED] == every:
                    full += 1
                u = program[here + UNIT]
                if u >= 0:
                    # the host waits behind the last member of a batch
                    free = come & ~unit_words[UNIT_WORDS * u + PASSED]
                    unit_words[UNIT_WORDS * u + PASSED] |= free
                    last = units[UNITS * u + LAST]
                    free &= state[STATE * last + ISSUED]
                    if units[UNITS * u + HOLDS_HOST] and free != 0:
                        reach(
                            program[PROGRAM * last + NEXT], free, program, state, ends, first, there
                        )
                elif program[here + PLACE] == HOLDS:
                    free = come & state[at + ISSUED]
                    if free != 0:
                        reach(program[here + NEXT], free, program, state, ends, first, there)
                if program[here + PLACE] == ON_QUEUE and program[here + QUEUE_NEXT] >= 0:
                    n_start, n_comp = move_up(
                        program[here + QUEUE_NEXT], come & state[at + FRONT], program, state,
                        units, unit_words, words, starts, n_start, comps, n_comp,
                    )  # fmt: skip
                x = dep_start[e0 + e]
                upto = dep_start[e0 + e + 1] if program[here + NAMED] else x
                gathered = program[here + GATHERED]
                while x < upto or gathered >= 0:
                    if x < upto:
                        wait = natural(dep_wait[x] - e0)
                        x += 1
                    else:
                        wait = gathered
                        gathered = -1
                    if program[PROGRAM * wait + NEEDS] <= 0:
                        continue
                    free = count(
                        words, program[PROGRAM * wait + COUNTER], program[PROGRAM * wait + DIGITS],
                        come,
                    )  # fmt: skip
                    if free == 0:
                        continue
                    state[STATE * wait + MET] |= free
                    free &= state[STATE * wait + ISSUED]
                    if program[PROGRAM * wait + PLACE] == ON_QUEUE:
                        free &= state[STATE * wait + FRONT]
                    n_comp = finish(wait, free, state, comps, n_comp)
            elif there[(KEYS >> 6) + (KEYS >> 12)] != 0:
                # --- rule 1: a host goes on, the hindmost first
                word = natural(lowest(there[(KEYS >> 6) + (KEYS >> 12)]))
                above = (KEYS >> 6) + word
                word = natural(word << 6 | lowest(there[above]))
                key = natural(word << 6 | lowest(there[word]))
                e = natural(first[key])
                soon(program, PROGRAM * (e + AHEAD))
                soon(state, STATE * (e + AHEAD))
                at = STATE * e
                here = PROGRAM * e
                first[key] = program[here + LINK]
                if first[key] < 0:
                    there[word] &= ~(np.int64(1) << (key & 63))
                    if there[word] == 0:
                        there[above] &= ~(np.int64(1) << (word & 63))
                        if there[above] == 0:
                            there[(KEYS >> 6) + (KEYS >> 12)] &= ~(np.int64(1) << (key >> 12))
                come = state[at + REACHED] & ~state[at + ISSUED]
                state[at + ISSUED] = state[at + REACHED]
                steps += 1
                if ordering:
                    program[here + NUMBER] = issued
                    issued += 1
                elif watching:
                    if come == state[at + ISSUED]:
                        reached += 1
                    elif steps - begun > APART * reached + patience:
                        watching = False
                        ordering = True
                        anew = True
                        every, early, bounded = np.int64(1), np.int64(0), np.int64(0)
                        n_start = 0
                        n_comp = 0
                        for x in range(len(there)):
                            there[x] = 0
                        continue
                place = program[here + PLACE]
                u = program[here + UNIT]
                free = come
                if place == ON_QUEUE:
                    now = come & state[at + FRONT] & ~state[at + FINISHED]
                    if now != 0:
                        n_start, n_comp = get_ready(
                            e, now, program, state, units, unit_words, words, starts, n_start,
                            comps, n_comp,
                        )  # fmt: skip
                        follows = program[here + QUEUE_NEXT]
                        if u >= 0 and follows >= 0 and program[PROGRAM * follows + UNIT] == u:
                            n_start, n_comp = move_up(
                                follows, now, program, state, units, unit_words, words, starts,
                                n_start, comps, n_comp,
                            )  # fmt: skip
                else:
                    n_start, n_comp = get_ready(
                        e, come, program, state, units, unit_words, words, starts, n_start,
                        comps, n_comp,
                    )  # fmt: skip
                    if place == HOLDS and u < 0:
                        free &= state[at + FINISHED]
                if u >= 0 and e == units[UNITS * u + LAST] and units[UNITS * u + HOLDS_HOST]:
                    free &= unit_words[UNIT_WORDS * u + PASSED]
                if free != 0:
                    reach(program[here + NEXT], free, program, state, ends, first, there)
            elif ordering:
                # rendezvous stands here: it goes on as if what was sent were buffered
                while n_sent > 0:
                    n_sent -= 1
                    n_comp = meet(
                        natural(sent[n_sent]), 0, every, program, state, second, units, unit_words,
                        words, comps, n_comp,
                    )  # fmt: skip
                if n_comp > 0:
                    continue
                put_in_order(events, issued, program)
                ordering = False
                anew = True
                every, early, bounded = goal, settings[EARLIER], settings[BOUNDED]
                full = 0
            else:
                break

        # --- how it ends
        through = every
        for lane in range(lane1 - lane0):
            through &= ends[lane]
        for cell in range(low, high):
            outcome[cell * record + COMPLETED] = full
        if full == events and through == every:
            low = high
            continue
        for e in range(events):
            some = state[STATE * e + FINISHED]
            if some != every:
                while some != 0:
                    outcome[(low + lowest(some)) * record + COMPLETED] += 1
                    some &= some - 1
        for lane in range(lane0, lane1):
            e = lane_first[lane] - e0
            while e >= 0:
                follows = program[PROGRAM * e + NEXT]
                passed = state[STATE * follows + REACHED] if follows >= 0 else ends[lane - lane0]
                some = state[STATE * e + REACHED] & ~passed
                while some != 0:
                    at = (low + lowest(some)) * record
                    outcome[at + STANDING] += 1
                    h = outcome[at + DIGEST]
                    digest1 = ((h >> 31) + mixed(e + 5)) & MASK
                    digest2 = ((h & MASK) + mixed(3 * e + 11)) & MASK
                    outcome[at + DIGEST] = (digest1 << 31) | digest2
                    some &= some - 1
                if passed == 0:
                    break
                e = follows
        for queue in range(queue0, queue1):
            e = queue_first[queue] - e0
            left = every
            while e >= 0 and left != 0:
                some = left & ~state[STATE * e + FINISHED]
                left &= state[STATE * e + FINISHED]
                while some != 0:
                    at = (low + lowest(some)) * record
                    outcome[at + STANDING] += 1
                    h = outcome[at + DIGEST]
                    digest1 = ((h >> 31) + mixed(e + 7)) & MASK
                    digest2 = ((h & MASK) + mixed(5 * e + 17)) & MASK
                    outcome[at + DIGEST] = (digest1 << 31) | digest2
                    some &= some - 1
                e = program[PROGRAM * e + QUEUE_NEXT]
        low = high
    return steps
