"""Coalesced groups and comparable ordinals of Flight Recorder entries (FORMATS.md 2.7.3, 2.7.4).

Both depend on the order of the records of one communicator in one file, so they are one pass of
compiled code over the rows of all files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

from dl2gpu.trace.pickle_kernel import NULL

__all__ = ["Batches", "batches"]

# what a row is, and what is known of its file (bits)
COLLECTIVE, P2P, END = 0, 1, 2
CUT, OLD, ONE_COUNTER, HOST, HOLES = 1, 2, 4, 8, 16


@dataclass(frozen=True, slots=True)
class Batches:
    """One value for each row that was given to :func:`batches`."""

    group: npt.NDArray[np.int64]
    """Batch: record number of its end record, or of its last member if there is none; NULL."""
    end: npt.NDArray[np.int64]
    """Row of the end record, whose state and times hold for the member; -1."""
    folded: npt.NDArray[np.bool_]
    """End records whose members are known: they are no operation of their own."""
    partial: npt.NDArray[np.bool_]
    """Members of a batch whose end record is missing."""
    ordinal: npt.NDArray[np.int64]
    """Position among the collectives of the communicator, comparable between ranks; NULL."""


def batches(
    group: npt.NDArray[np.int32],
    kind: npt.NDArray[np.uint8],
    file_bits: npt.NDArray[np.uint8],
    seq: npt.NDArray[np.int64],
    counter: npt.NDArray[np.int64],
    p2p_counter: npt.NDArray[np.int64],
) -> Batches:
    """Batches and ordinals of entries.

    Args:
        group: number of the (file, communicator) of each entry; rows of a file in record order.
        kind: COLLECTIVE, P2P or END (the record that ends a batch).
        file_bits: of each entry's file: CUT (records lost before the first), HOLES (completed
            records left out), OLD (version 2.4 or older), ONE_COUNTER (TorchComms), HOST (no
            batches: gloo).
        seq: record number.
        counter: collective_seq_id, or the older seq_id; NULL = absent.
        p2p_counter: p2p_seq_id; NULL = absent.

    The numbering of collectives: up to version 2.4 the start of a batch of sends and receives also
    moved the counter of collectives, on the batch's participants only, and before 2.0 one counter
    served both; such steps are taken out again. Where the start of the record is lost, they are
    estimated from the counter of p2p launches if every launch in the window was a batch. A
    TorchComms counter runs over all communicators: each of them is numbered anew, or not at all
    where the start is lost.
    """
    n = len(group)
    n_groups = int(group.max()) + 1 if n else 0
    out = Batches(
        group=np.full(n, NULL, dtype=np.int64),
        end=np.full(n, -1, dtype=np.int64),
        folded=np.zeros(n, dtype=np.bool_),
        partial=np.zeros(n, dtype=np.bool_),
        ordinal=np.full(n, NULL, dtype=np.int64),
    )
    link = np.full(n, -1, dtype=np.int64)
    state = np.zeros((n_groups, 8), dtype=np.int64)
    _kernel(
        group, kind, file_bits, seq, counter, p2p_counter,
        out.group, out.end, out.folded.view(np.uint8), out.partial.view(np.uint8), out.ordinal,
        link, state,
    )  # fmt: skip
    return out


# columns of the state of a communicator in one file
_LAST, _COUNT, _SENDS, _PREVIOUS, _SHIFT, _SINGLES, _BATCHED, _FRESH = range(8)


@njit(nogil=True)
def _close(g, state, link, seq, counter, p2p_counter, bits, batch, partial):  # type: ignore[no-untyped-def]
    """End a run that has no end record: one batch if its rows share a number of their own."""
    last = state[g, _LAST]
    count = state[g, _COUNT]
    state[g, _COUNT] = 0
    if count < 2:
        state[g, _SINGLES] += state[g, _SENDS]
        return
    sends = state[g, _SENDS]
    own = p2p_counter[last] if sends == count else counter[last]
    if own <= 0 or (sends != 0 and sends != count) or bits & (ONE_COUNTER | HOST):
        state[g, _SINGLES] += sends
        return
    if sends > 0:
        state[g, _BATCHED] += 1
    i = last
    for _ in range(count):
        batch[i] = seq[last]
        partial[i] = 1
        i = link[i]


def _number(group, kind, file_bits, seq, counter, p2p_counter, batch, end, folded, partial,
            ordinal, link, state):  # type: ignore[no-untyped-def]  # fmt: skip
    n = group.size
    for g in range(state.shape[0]):
        state[g, _LAST] = -1
    # runs: neighbours on a communicator with the same two numbers, up to their end record
    for i in range(n):
        g = group[i]
        last = state[g, _LAST]
        link[i] = last
        same = state[g, _COUNT] > 0 and counter[i] == counter[last]
        same = same and p2p_counter[i] == p2p_counter[last]
        if not same and last >= 0:
            _close(g, state, link, seq, counter, p2p_counter, file_bits[i], batch, partial)
        if kind[i] == END:
            count = state[g, _COUNT] if same else 0
            j = last
            for _ in range(count):
                batch[j] = seq[i]
                end[j] = i
                j = link[j]
            if count > 0:
                folded[i] = 1
                if state[g, _SENDS] > 0:
                    state[g, _BATCHED] += 1
            state[g, _COUNT] = 0
            state[g, _SENDS] = 0
        else:
            if not same:
                state[g, _COUNT] = 0
                state[g, _SENDS] = 0
            state[g, _COUNT] += 1
            state[g, _SENDS] += 1 if kind[i] == P2P else 0
        state[g, _LAST] = i
    for g in range(state.shape[0]):
        last = state[g, _LAST]
        if last >= 0 and state[g, _COUNT] > 0:
            _close(g, state, link, seq, counter, p2p_counter, file_bits[last], batch, partial)
        state[g, _PREVIOUS] = NULL

    for i in range(n):
        g = group[i]
        bits = file_bits[i]
        c = counter[i]
        if state[g, _PREVIOUS] == NULL:
            state[g, _PREVIOUS] = c if bits & (CUT | HOLES) else 0
        moves = c != NULL and c > state[g, _PREVIOUS]
        if c != NULL:
            state[g, _PREVIOUS] = c
        # an end record folded into sends and receives repeats their numbers: it moves nothing
        if kind[i] == P2P:
            state[g, _SHIFT] += 1 if moves else 0
            continue
        if folded[i] or c == NULL:
            continue
        if bits & ONE_COUNTER:
            state[g, _FRESH] += 1
            if not bits & (CUT | HOLES):
                ordinal[i] = state[g, _FRESH]
        elif kind[i] == END and link[i] < 0 and bits & CUT:
            continue  # the record before it is lost: it may have ended sends and receives
        elif not bits & OLD:
            ordinal[i] = c
        elif not bits & (CUT | HOLES):
            ordinal[i] = c - state[g, _SHIFT]
        elif state[g, _BATCHED] > 0 and state[g, _SINGLES] == 0 and p2p_counter[i] > 0:
            ordinal[i] = c - p2p_counter[i]
        else:
            ordinal[i] = c


_i8, _i4, _u1 = types.int64[::1], types.int32[::1], types.uint8[::1]
_kernel: Any = njit(
    types.void(_i4, _u1, _u1, _i8, _i8, _i8, _i8, _i8, _u1, _u1, _i8, _i8, types.int64[:, ::1]),
    nogil=True,
    cache=True,
)(_number)
