"""Matching as passes along the rows: the CPU's form of the plans in ``matching_plan``.

Rows are sorted by (job, rank, position), so the members of one communicator's operations lie in a
few streams through memory, and a pass that counts and folds by direct addressing beats a hash
group-by by an order of magnitude. Nulls are -1; a column that is null throughout may be empty.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dl2gpu.engine.arrays import Array
from dl2gpu.engine.native import (
    Bools,
    Int8s,
    Int32Rows,
    Int32s,
    Int64Rows,
    Int64s,
    UInt8s,
    UInt32s,
    helper,
    kernel,
)
from dl2gpu.trace.schema import FLAG, OP

NULL: Final = -1
_FIRST_COLLECTIVE: Final = OP["all_reduce"]
_BROADCAST: Final = OP["broadcast"]
_SCATTER_V: Final = OP["scatter_v"]
_REDUCE: Final = OP["reduce"]
_GATHER: Final = OP["gather"]
_GATHER_V: Final = OP["gather_v"]
_ALL_TO_ALL: Final = OP["all_to_all"]
_SEND: Final = OP["send"]
_RECV: Final = OP["recv"]
_SENDRECV: Final = OP["sendrecv"]
_PROBE: Final = OP["probe"]
_INCOMPARABLE: Final = FLAG["sizes_incomparable"]

# bits of the aspects in which signatures differ
DIFF_OP: Final = 1
DIFF_ROOT: Final = 2
DIFF_BYTES: Final = 4
DIFF_COUNT: Final = 8
DIFF_DTYPE: Final = 16
DIFF_REDUCE: Final = 32
DIFF_NEW: Final = 64
UNSIZED: Final = 128


@kernel
def unnumbered(op: Int32s, comm: Int32s, ordinal: Int64s, missing: Bools) -> None:
    """Marks in ``missing`` bool[comms] the communicators with a collective that has no ordinal."""
    for e in range(len(op)):
        if op[e] >= _FIRST_COLLECTIVE and comm[e] >= 0 and (len(ordinal) == 0 or ordinal[e] < 0):
            missing[comm[e]] = True


@kernel
def number(
    begin: int, end: int, op: Int32s, comm: Int32s, r: UInt32s, ordinal: Int64s, count: Int64s,
    count_out: Int64s, missing: Bools, lost: Bools, size: Int32s, nccl: Bools,
    owner: Int64s, seen: Int64s, last: Int64s, times: Int64s,
    k: Int64s, copy: Int32s, alone: Bools, low: Int64s, high: Int64s,
) -> int:  # fmt: skip
    """Numbers the collectives of the communicators begin..end; returns the largest repetition.

    ``k`` int64[n] ordinal or NULL, ``copy`` int32[n] how often the rank used the number just
    before, ``alone`` bool[n]; ``low``/``high`` int64[comms] range of ordinals.
    ``owner``, ``seen``, ``last``, ``times`` int64[comms] are scratch; owner starts at -1.
    """
    most = 0
    for e in range(len(op)):
        if op[e] < _FIRST_COLLECTIVE:
            continue
        c = comm[e]
        if c < begin or c >= end:
            if c < 0 and begin == 0:
                alone[e] = True
            continue
        empty = (
            nccl[c]
            and len(count) > 0
            and count[e] == 0
            and (len(count_out) == 0 or count_out[e] <= 0)
        )
        number_ = np.int64(-1)
        fresh = owner[c] != r[e]
        if fresh:
            owner[c] = r[e]
            seen[c] = 0
            times[c] = 0
            last[c] = -2
        if not missing[c]:
            number_ = ordinal[e]
        elif not lost[c] and not empty:
            seen[c] += 1
            number_ = seen[c]
        k[e] = number_
        if number_ < 0 or empty or size[c] == 1:
            alone[e] = True
            continue
        if last[c] == number_:
            times[c] += 1
        else:
            last[c] = number_
            times[c] = 0
        copy[e] = times[c]
        most = max(most, times[c])
        low[c] = min(low[c], number_)
        high[c] = max(high[c], number_)
    return most


@helper(forceinline=True)
def _differ(first: Any, v: Any, value: Any, bits: Any, bit: Any) -> Any:
    """Compares a value with the first one known at node v; unknown agrees with everything."""
    if value < 0:
        return bits
    if first[v] < 0:
        first[v] = value
    elif first[v] != value:
        return bits | bit
    return bits


@kernel
def fold(
    begin: int, end: int, op: Int32s, comm: Int32s, root: Int32s, nbytes: Int64s, count: Int64s,
    dtype: Int32s, reduce_op: Int32s, new_comm: Int32s, split: Bools, flags: UInt32s, done: Bools,
    k: Int64s, copy: Int32s, alone: Bools,
    base: Int64s, low: Int64s, copies: int, any_sizes: Bools, sized: Bools,
    node: Int32s, present: Int32s, finished: Int32s, kind: Int8s, bits: UInt8s, node_comm: Int32s,
    node_k: Int64s, f_op: Int64s, f_root: Int64s, f_bytes: Int64s, f_count: Int64s, f_dtype: Int64s,
    f_reduce: Int64s, f_new: Int64s,
) -> None:  # fmt: skip
    """Gives the collectives of the communicators begin..end their node, with their signatures.

    ``f_*`` int64[nodes] hold the first known value of each aspect; ``bits`` uint8[nodes] the
    aspects that differ, and whether some member does not know its bytes.
    """
    for e in range(len(op)):
        o = op[e]
        if o < _FIRST_COLLECTIVE or alone[e]:
            continue
        c = comm[e]
        if c < begin or c >= end:
            continue
        v = base[c] + (k[e] - low[c]) * copies + copy[e]
        node[e] = v
        present[v] += 1
        node_comm[v] = c
        node_k[v] = k[e]
        if done[e]:
            finished[v] += 1
        b = bits[v]
        b = _differ(f_op, v, o, b, DIFF_OP)
        if _BROADCAST <= o <= _GATHER_V and len(root) > 0:
            b = _differ(f_root, v, root[e], b, DIFF_ROOT)
            if root[e] >= 0:
                kind[v] = max(kind[v], 1 if o <= _SCATTER_V else 2)
        fair = o < len(sized) and sized[o] and not flags[e] & _INCOMPARABLE
        if o == _ALL_TO_ALL and any_sizes[c]:
            fair = False
        if o == _GATHER and len(count) > 0 and count[e] == 0:
            fair = False
        if fair:
            if len(nbytes) == 0 or nbytes[e] < 0:
                b |= UNSIZED
            else:
                b = _differ(f_bytes, v, nbytes[e], b, DIFF_BYTES)
            if len(count) > 0:
                b = _differ(f_count, v, count[e], b, DIFF_COUNT)
        if len(dtype) > 0:
            b = _differ(f_dtype, v, dtype[e], b, DIFF_DTYPE)
        if len(reduce_op) > 0:
            b = _differ(f_reduce, v, reduce_op[e], b, DIFF_REDUCE)
        if len(new_comm) > 0 and not (len(split) > 0 and split[e]):
            b = _differ(f_new, v, new_comm[e], b, DIFF_NEW)
        bits[v] = b


@kernel
def roles(
    op: Int32s, rank: Int32s, root: Int32s, node: Int32s, f_root: Int64s,
    role: Int8s,
) -> None:  # fmt: skip
    """``role`` int8[n]: 1 member, 2 root, for the collectives."""
    for e in range(len(op)):
        o = op[e]
        if o < _FIRST_COLLECTIVE:
            continue
        role[e] = 1
        if _BROADCAST <= o <= _GATHER_V:
            own = root[e] if len(root) > 0 else -1
            if own < 0 and node[e] >= 0:
                own = f_root[node[e]]
            if own == rank[e]:
                role[e] = 2


@helper(forceinline=True)
def _mixed(a: Any, b: Any, c: Any, d: Any) -> Any:
    h = np.uint64(a) * np.uint64(0x9E3779B97F4A7C15)
    h ^= np.uint64(b) * np.uint64(0xC2B2AE3D27D4EB4F) + (h >> np.uint64(29))
    h ^= np.uint64(c) * np.uint64(0x165667B19E3779F9) + (h >> np.uint64(31))
    h ^= np.uint64(d) * np.uint64(0x27D4EB2F165667C5) + (h >> np.uint64(27))
    h ^= h >> np.uint64(32)
    return h * np.uint64(0x9E3779B97F4A7C15)


def channels(
    op: Array, job: Array, comm: Array, rank: Array, peer: Array, tag: Array, recv_peer: Array,
    recv_tag: Array, matched_peer: Array, matched_tag: Array, tags_matter: Array,
) -> tuple[Array, ...]:  # fmt: skip
    """Channel of each part of the point-to-point rows: int32[2, n], -1 none, -2 unknown peer.

    All arrays are those of the point-to-point rows only. Also (comm, src, dst, tag, job) of the
    channels in order of first sight. Rows without a communicator use -1 - job, so that jobs stay
    apart.
    """
    n = len(op)
    table = np.full(1 << (4 * n + 15).bit_length(), -1, np.int32)
    out = np.full((2, n), -1, np.int32)
    c_comm, c_tag = np.empty(2 * n, np.int64), np.empty(2 * n, np.int64)
    c_src, c_dst, c_job = (np.empty(2 * n, np.int32) for _ in range(3))
    total = _channels(
        op, job, comm, rank, peer, tag, recv_peer, recv_tag, matched_peer, matched_tag, tags_matter,
        table, out, c_comm, c_src, c_dst, c_tag, c_job,
    )  # fmt: skip
    return out, *(part[:total].copy() for part in (c_comm, c_src, c_dst, c_tag, c_job))


@kernel
def _channels(
    op: Int32s, job: Int32s, comm: Int32s, rank: Int32s, peer: Int32s, tag: Int64s,
    recv_peer: Int32s, recv_tag: Int64s, matched_peer: Int32s, matched_tag: Int64s,
    tags_matter: Bools, table: Int32s, out: Int32Rows,
    c_comm: Int64s, c_src: Int32s, c_dst: Int32s, c_tag: Int64s, c_job: Int32s,
) -> int:  # fmt: skip
    """Fills ``out`` and the columns of the channels; returns how many there are."""
    mask = np.uint64(len(table) - 1)
    total = 0
    for x in range(len(op)):
        o = op[x]
        matters = tags_matter[job[x]]
        for half in range(2):
            if half == 1 and o != _SENDRECV:
                break
            other = peer[x]
            t = tag[x]
            if half == 1:
                if recv_peer[x] >= 0:
                    other = recv_peer[x]
                if recv_tag[x] >= 0:
                    t = recv_tag[x]
            elif o == _RECV or o == _PROBE:
                if matched_peer[x] >= 0:
                    other = matched_peer[x]
                if matched_tag[x] >= 0:
                    t = matched_tag[x]
            if other < 0:
                out[half, x] = -2
                continue
            sends = half == 0 and (o == _SEND or o == _SENDRECV)
            src = rank[x] if sends else other
            dst = other if sends else rank[x]
            t = t if matters and t >= 0 else 0
            c = np.int64(comm[x]) if comm[x] >= 0 else np.int64(-1 - job[x])
            slot = _mixed(c, src, dst, t) & mask
            while True:
                found = table[slot]
                if found < 0:
                    table[slot] = total
                    c_comm[total] = c
                    c_src[total] = src
                    c_dst[total] = dst
                    c_tag[total] = t
                    c_job[total] = job[x]
                    out[half, x] = total
                    total += 1
                    break
                if (
                    c_comm[found] == c
                    and c_src[found] == src
                    and c_dst[found] == dst
                    and c_tag[found] == t
                ):
                    out[half, x] = found
                    break
                slot = (slot + np.uint64(1)) & mask
    return total


def pair(
    channel: Array, op: Array, done: Array, nbytes: Array, count: Array, out_bytes: Array,
    out_count: Array, dtype: Array, tag: Array, cut: Array,
) -> tuple[Array, ...]:  # fmt: skip
    """The k-th send of a channel with its k-th receive; one slot a message, channels in order.

    Where a side lost its start, or lists active operations only (``cut`` bool[channels]), what is
    complete is set aside and the rest aligned from the first open one. ``out_bytes`` and
    ``out_count`` are the receiving halves of sendrecv.

    Returns:
        place int64[2, n] k of each part, -1 set aside; base int64[channels]; then per slot:
        present, finished, has_send, has_recv, sent, taken, n_sent, n_taken, dtypes, tags (differ).
    """
    n_channels = len(cut)
    sends, receives, most = (np.zeros(n_channels, np.int64) for _ in range(3))
    place = np.full((2, len(op)), -1, np.int64)
    _places(channel, op, done, cut, sends, receives, most, place)
    base = np.zeros(n_channels + 1, np.int64)
    np.cumsum(most, out=base[1:])
    slots = int(base[-1])
    present, finished = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
    has_send, has_recv, dtypes, tags = (np.zeros(slots, np.bool_) for _ in range(4))
    sent, taken, n_sent, n_taken, f_dtype, f_tag = (
        np.full(slots, -1, np.int64) for _ in range(6)
    )  # fmt: skip
    _messages(
        channel, op, done, nbytes, count, out_bytes, out_count, dtype, tag, place, base,
        present, finished, has_send, has_recv, sent, taken, n_sent, n_taken, f_dtype, f_tag,
        dtypes, tags,
    )  # fmt: skip
    return (
        place, base, present, finished, has_send, has_recv, sent, taken, n_sent, n_taken,
        dtypes, tags,
    )  # fmt: skip


@kernel
def _places(
    channel: Int32Rows, op: Int32s, done: Bools, cut: Bools, n_send: Int64s, n_recv: Int64s,
    n_most: Int64s, place: Int64Rows,
) -> None:  # fmt: skip
    """Numbers the parts within their channels: ``place``; ``n_most`` is how many slots it takes."""
    for x in range(len(op)):
        o = op[x]
        for half in range(2):
            c = channel[half, x]
            if c < 0 or (cut[c] and done[x]):
                continue
            if half == 0 and (o == _SEND or o == _SENDRECV):
                n_send[c] += 1
                place[half, x] = n_send[c]
            elif o == _PROBE:
                # a probe looks at the message that the next receive of its channel would take
                place[half, x] = n_recv[c] + 1
            else:
                n_recv[c] += 1
                place[half, x] = n_recv[c]
            n_most[c] = max(n_most[c], place[half, x])


@kernel
def _messages(
    channel: Int32Rows, op: Int32s, done: Bools, nbytes: Int64s, count: Int64s, out_bytes: Int64s,
    out_count: Int64s, dtype: Int32s, tag: Int64s, place: Int64Rows, base: Int64s,
    present: Int32s, finished: Int32s, has_send: Bools, has_recv: Bools, sent: Int64s,
    taken: Int64s, n_sent: Int64s, n_taken: Int64s, f_dtype: Int64s, f_tag: Int64s,
    dtypes: Bools, tags: Bools,
) -> None:  # fmt: skip
    """Folds the parts into their slots, ``base`` of the channel plus ``place``."""
    for x in range(len(op)):
        o = op[x]
        if o == _PROBE:
            continue
        for half in range(2):
            if place[half, x] < 0:
                continue
            v = base[channel[half, x]] + place[half, x] - 1
            present[v] += 1
            if done[x]:
                finished[v] += 1
            if half == 0 and o != _RECV:
                has_send[v] = True
                sent[v] = nbytes[x]
                n_sent[v] = count[x]
            else:
                has_recv[v] = True
                taken[v] = out_bytes[x] if half == 1 else nbytes[x]
                n_taken[v] = out_count[x] if half == 1 else count[x]
            if dtype[x] >= 0:
                if f_dtype[v] < 0:
                    f_dtype[v] = dtype[x]
                elif f_dtype[v] != dtype[x]:
                    dtypes[v] = True
            if tag[x] >= 0 and half == 0:
                if f_tag[v] < 0:
                    f_tag[v] = tag[x]
                elif f_tag[v] != tag[x]:
                    tags[v] = True
