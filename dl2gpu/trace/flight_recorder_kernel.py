"""Compiled mapping of one dump's entries to rows of the event table (FORMATS.md 2.7, 2.12).

Batches and ordinals depend on the order of the records of each communicator, the rest on single
entries: two passes over the columns of :class:`entry_columns.Columns`, written straight into the
columns of the whole corpus. Codes of operations, states and flags come in as tables; nothing here
knows the schema's numbers.
"""

from __future__ import annotations

from typing import Final

from dl2gpu.engine.native import (
    Int32Rows,
    Int32s,
    Int64Rows,
    Int64s,
    UInt8s,
    UInt32s,
    helper,
    kernel,
)

__all__ = ["map_entries"]

NULL: Final = -(1 << 63)
SATURATED: Final = 1 << 62
LATEST_NS: Final = 4_102_444_800 * 10**9
"""1 January 2100: a later time is not believed."""

# bits of an operation
END, SEND_RECV, ON_HOST, UNKNOWN, BARRIER, SCATTER, GATHER, ALL_TO_ALL, DROPPED = (
    1, 2, 4, 8, 16, 32, 64, 128, 256
)  # fmt: skip
# what is known of a file (bits): records lost before the first; completed records left out;
# version 2.4 or older; TorchComms; all_to_all sizes comparable; completion shows in `retired` only
CUT, HOLES, OLD, ONE_COUNTER, SIZES_OK, WEAK_STATES = 1, 2, 4, 8, 16, 32
# places in `consts`: four states, then the flags
F_STATE, F_SIZES, F_PARTIAL, F_SYNTHETIC, F_ROOT, F_BLOCKING, F_STREAM, F_OP = range(4, 12)
# scalars of a file in `facts`, and what comes back
JOB, RANK, BITS, OFFSET, N_PAIRS, N_SPLITS, SECRET = range(7)
FACTS: Final = 7

# rows of Columns.wide and Columns.narrow
_SEQ, _COUNTER, _P2P_COUNTER, _CREATED, _STARTED, _COMPLETED, _IN, _OUT = range(8)
(_GROUP, _LANE, _NAME, _IN_DTYPE, _OUT_DTYPE, _IN_TENSORS, _OUT_TENSORS, _NUMELS,
 _STACK) = range(9)  # fmt: skip
_RETIRED, _P2P_BIT, _MIXED = 4, 8, 16
# rows of the output
(O_JOB, O_RANK, O_LANE, O_OP, O_COMM, O_PEER, O_DTYPE, O_STACK, O_STREAM, O_ROOT) = range(10)
(W_SEQ, W_ORDINAL, W_COUNT, W_COUNT_OUT, W_BYTES, W_GROUP, W_CREATED, W_STARTED,
 W_COMPLETED) = range(9)  # fmt: skip
INTS: Final = 10
LONGS: Final = 9

# columns of the state of a communicator within the file
_LAST, _COUNT, _SENDS, _PREVIOUS, _SHIFT, _SINGLES, _BATCHED, _FRESH = range(8)
# columns of what the first pass finds of each entry
_LINK, _BATCH, _END_ROW, _ORDINAL, _FOLDED, _PARTIAL = range(6)


@helper()
def _close(g, state, found, wide, bits):  # type: ignore[no-untyped-def]
    """End a run that has no end record: one batch if its rows share a number of their own.

    Several sends and receives of one p2p number, or several collectives of one number, were
    launched together; their end record was lost or never written.
    """
    last = state[g, _LAST]
    count = state[g, _COUNT]
    sends = state[g, _SENDS]
    state[g, _COUNT] = 0
    state[g, _SENDS] = 0
    own = wide[_P2P_COUNTER, last] if sends == count else wide[_COUNTER, last]
    if count < 2 or own <= 0 or (sends != 0 and sends != count) or bits & (ONE_COUNTER | ON_HOST):
        state[g, _SINGLES] += sends
        return
    if sends > 0:
        state[g, _BATCHED] += 1
    i = last
    for _ in range(count):
        found[i, _BATCH] = wide[_SEQ, last]
        found[i, _PARTIAL] = 1
        i = found[i, _LINK]


@helper()
def _batches(wide, narrow, name_op, ops, bits, state, found):  # type: ignore[no-untyped-def]
    """Coalesced groups: neighbours on a communicator with the same numbers, to their end record."""
    for g in range(state.shape[0]):
        for j in range(8):
            state[g, j] = 0
        state[g, _LAST] = -1
    for i in range(wide.shape[1]):
        g = narrow[_GROUP, i]
        what = ops[name_op[narrow[_NAME, i]], 1]
        last = state[g, _LAST]
        found[i, _LINK] = last
        found[i, _BATCH] = NULL
        found[i, _END_ROW] = -1
        found[i, _FOLDED] = 0
        found[i, _PARTIAL] = 0
        same = (
            state[g, _COUNT] > 0
            and wide[_COUNTER, i] == wide[_COUNTER, last]
            and wide[_P2P_COUNTER, i] == wide[_P2P_COUNTER, last]
        )
        if not same and state[g, _COUNT] > 0:
            _close(g, state, found, wide, bits | (what & ON_HOST))
        if what & END:
            j = last
            for _ in range(state[g, _COUNT]):
                found[j, _BATCH] = wide[_SEQ, i]
                found[j, _END_ROW] = i
                j = found[j, _LINK]
            if state[g, _COUNT] > 0:
                found[i, _FOLDED] = 1
                state[g, _BATCHED] += 1 if state[g, _SENDS] > 0 else 0
            state[g, _COUNT] = 0
            state[g, _SENDS] = 0
        else:
            state[g, _COUNT] += 1
            state[g, _SENDS] += 1 if what & SEND_RECV else 0
        state[g, _LAST] = i
    for g in range(state.shape[0]):
        last = state[g, _LAST]
        if last >= 0 and state[g, _COUNT] > 0:
            what = ops[name_op[narrow[_NAME, last]], 1]
            _close(g, state, found, wide, bits | (what & ON_HOST))
        state[g, _PREVIOUS] = NULL


@helper()
def _ordinals(wide, narrow, name_op, ops, bits, state, found):  # type: ignore[no-untyped-def]
    """Numbers of the collectives of a communicator that its members can compare.

    Up to version 2.4 the start of a batch of sends and receives also moved the counter of
    collectives, on the batch's participants only, and before 2.0 one counter served both: such
    steps are taken out. Where the start of the record is lost, they are estimated from the counter
    of p2p launches if every launch in the window was a batch. A TorchComms counter runs over all
    communicators: each is numbered anew, or not at all where the start is lost.
    """
    broken = bits & (CUT | HOLES)
    for i in range(wide.shape[1]):
        g = narrow[_GROUP, i]
        what = ops[name_op[narrow[_NAME, i]], 1]
        c = wide[_COUNTER, i]
        if c < 0 or c > SATURATED:
            c = NULL
        found[i, _ORDINAL] = NULL
        if state[g, _PREVIOUS] == NULL:
            state[g, _PREVIOUS] = c if broken else 0
        moves = c != NULL and c > state[g, _PREVIOUS]
        if c != NULL:
            state[g, _PREVIOUS] = c
        if what & SEND_RECV:
            state[g, _SHIFT] += 1 if moves else 0
            continue
        if found[i, _FOLDED] or c == NULL or what & DROPPED:
            continue
        ordinal = c
        if bits & ONE_COUNTER:
            state[g, _FRESH] += 1
            ordinal = NULL if broken else state[g, _FRESH]
        elif what & END and bits & CUT and found[i, _LINK] < 0:
            ordinal = NULL  # the record before it is lost: it may have ended sends and receives
        elif bits & OLD:
            if not broken:
                ordinal = c - state[g, _SHIFT]
            elif state[g, _BATCHED] > 0 and state[g, _SINGLES] == 0 and wide[_P2P_COUNTER, i] > 0:
                ordinal = c - wide[_P2P_COUNTER, i]
        found[i, _ORDINAL] = ordinal if ordinal >= 0 else NULL


@helper(forceinline=True)
def _pair(comm, lo, hi, pairs, table, facts):  # type: ignore[no-untyped-def]
    """Number of the pair of ranks on a communicator."""
    secret = facts[SECRET]
    h = (((secret ^ comm) * secret ^ lo) * secret ^ hi) * secret
    h ^= (h >> 32) & 0xFFFFFFFF
    mask = table.size - 1
    slot = h & mask
    while table[slot] >= 0:
        k = table[slot]
        if pairs[k, 0] == comm and pairs[k, 1] == lo and pairs[k, 2] == hi:
            return k
        slot = (slot + 1) & mask
    k = facts[N_PAIRS]
    table[slot] = k
    pairs[k, 0] = comm
    pairs[k, 1] = lo
    pairs[k, 2] = hi
    pairs[k, 3] = h
    facts[N_PAIRS] = k + 1
    return k


@helper(forceinline=True)
def _time(t):  # type: ignore[no-untyped-def]
    return t if 0 < t <= LATEST_NS else NULL


@kernel
def map_entries(
    wide: Int64Rows, narrow: Int32Rows, bits_of: UInt8s, facts: Int64s, name_op: Int32s,
    text_dtype: Int32s, group_comm: Int32s, stack_of: Int32s, ops: Int64Rows, dtypes: Int64Rows,
    comms: Int64Rows, members: Int32s, consts: Int64s, state: Int64Rows, found: Int64Rows,
    pairs: Int64Rows, pair_table: Int32s, splits: Int64Rows, ints: Int32Rows, longs: Int64Rows,
    states: UInt8s, flags: UInt32s,
) -> None:  # fmt: skip
    """Entries of one file to rows ``facts[OFFSET]`` and following of the output.

    Per file: ``wide``, ``narrow``, ``bits_of`` (Columns), ``facts`` (scalars in and out),
    ``name_op`` and ``text_dtype`` (string number to row of ``ops`` and ``dtypes``), ``group_comm``,
    ``stack_of``. For all: ``ops`` (code, bits, own rank and peer within the group), ``dtypes``
    (code, bytes), ``comms`` (first member, size, synthetic, stream code), ``members``, ``consts``.
    Scratch: ``state``, ``found``. Out: ``pairs`` (those with a stream of their own: stream is
    -2 - pair), ``splits`` (row, first size, count), ``ints``, ``longs``, ``states``, ``flags``.
    """
    bits = facts[BITS]
    rank = facts[RANK]
    _batches(wide, narrow, name_op, ops, bits, state, found)
    _ordinals(wide, narrow, name_op, ops, bits, state, found)
    out = facts[OFFSET]
    n_splits = 0
    for i in range(wide.shape[1]):
        o = name_op[narrow[_NAME, i]]
        what = ops[o, 1]
        if found[i, _FOLDED] or what & DROPPED:
            continue
        host = what & ON_HOST
        comm = group_comm[narrow[_GROUP, i]]
        size = comms[comm, 1]
        first = comms[comm, 0]
        flag = consts[F_BLOCKING] if host else consts[F_STREAM]
        if what & UNKNOWN:
            flag |= consts[F_OP]
        if comms[comm, 2]:
            flag |= consts[F_SYNTHETIC]
        if found[i, _PARTIAL]:
            flag |= consts[F_PARTIAL]
        if what & END or (what & ALL_TO_ALL and not bits & SIZES_OK):
            flag |= consts[F_SIZES]

        # a member's own state never moves: the end record carries that of the batch
        k = found[i, _END_ROW]
        k = i if k < 0 else k
        s = bits_of[k] & 3
        if (host or bits & WEAK_STATES) and s < 3 and bits_of[k] & _RETIRED:
            s = 3
            flag |= consts[F_STATE]
        elif host:
            flag |= consts[F_STATE]

        peer = -1
        a = ops[o, 2]
        b = ops[o, 3]
        # the name's own side must be this rank, or its numbers are not what they seem
        if 0 <= a < size and 0 <= b < size and members[first + a] == rank:
            peer = members[first + b]

        given = wide[_IN, i]
        got = wide[_OUT, i]
        n_given = narrow[_IN_TENSORS, i]
        n_got = narrow[_OUT_TENSORS, i]
        if what & SCATTER and not host:  # NCCL's scatter has its two lists swapped
            given, got = got, given
            n_given, n_got = n_got, n_given
        root = -1
        if size > 1 and what & (SCATTER | GATHER):
            # the root's list has a tensor for each member; gloo records it as one tensor [n, ...]
            many, whole, part = (n_given, given, got) if what & SCATTER else (n_got, got, given)
            if many == size or (host and many == 1 and part > 0 and whole == size * part):
                root = rank
        if n_given <= 0 or given < 0 or given >= SATURATED or what & BARRIER:
            given = NULL  # no list at all is not the same as no elements
        if n_got <= 0 or got < 0 or got >= SATURATED or got == given:
            got = NULL
        if what & (BARRIER | SEND_RECV):
            got = NULL
        d = text_dtype[narrow[_IN_DTYPE, i]] if narrow[_IN_DTYPE, i] >= 0 else -1
        if (d < 0 or dtypes[d, 0] < 0) and narrow[_OUT_DTYPE, i] >= 0:
            d = text_dtype[narrow[_OUT_DTYPE, i]]
        width = 0
        code = -1
        if d >= 0 and not what & BARRIER:
            code = dtypes[d, 0]
            width = dtypes[d, 1]
        if what & ALL_TO_ALL and narrow[_NUMELS, i] >= 0 and narrow[_IN_TENSORS, i] == size:
            splits[n_splits, 0] = out
            splits[n_splits, 1] = narrow[_NUMELS, i]
            splits[n_splits, 2] = size
            n_splits += 1

        # ProcessGroupNCCL launches collectives and batches on the communicator's stream, a single
        # send or receive on that of the communicator of its two ranks
        stream = comms[comm, 3]
        if host:
            stream = -1
        elif what & SEND_RECV and found[i, _BATCH] == NULL and peer >= 0:
            stream = -2 - _pair(comm, min(rank, peer), max(rank, peer), pairs, pair_table, facts)

        ints[O_JOB, out] = facts[JOB]
        ints[O_RANK, out] = rank
        ints[O_LANE, out] = narrow[_LANE, i]
        ints[O_OP, out] = ops[o, 0]
        ints[O_COMM, out] = comm
        ints[O_PEER, out] = peer
        ints[O_DTYPE, out] = code
        ints[O_STACK, out] = stack_of[narrow[_STACK, i]] if narrow[_STACK, i] >= 0 else -1
        ints[O_STREAM, out] = stream
        ints[O_ROOT, out] = root
        longs[W_SEQ, out] = wide[_SEQ, i]
        lone_p2p = what & END and bits_of[i] & _P2P_BIT
        longs[W_ORDINAL, out] = NULL if lone_p2p else found[i, _ORDINAL]
        longs[W_COUNT, out] = given
        longs[W_COUNT_OUT, out] = got
        known = width > 0 and 0 <= given <= SATURATED // 16 and not bits_of[i] & _MIXED
        longs[W_BYTES, out] = given * width if known else NULL
        longs[W_GROUP, out] = found[i, _BATCH]
        longs[W_CREATED, out] = _time(wide[_CREATED, i])
        longs[W_STARTED, out] = _time(wide[_STARTED, k])
        longs[W_COMPLETED, out] = _time(wide[_COMPLETED, k])
        states[out] = consts[s]
        flags[out] = flag
        out += 1
    facts[OFFSET] = out
    facts[N_SPLITS] = n_splits
