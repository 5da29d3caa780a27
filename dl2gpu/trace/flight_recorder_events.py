"""Rows of decoded Flight Recorder entries to rows of the event table, whole columns at a time.

Everything here works on the entries of all files of a read at once. What belongs to a file or to
a file's group comes as small arrays that are looked up. Source: FORMATS.md 2.7, 2.12.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.trace.flight_recorder_batches import COLLECTIVE, END, HOST, P2P, batches
from dl2gpu.trace.flight_recorder_names import HOST_BACKENDS, Operation
from dl2gpu.trace.pickle_kernel import NULL, SATURATED
from dl2gpu.trace.schema import (
    DTYPE_BYTES,
    FLAG,
    OP,
    STATE,
    StringTable,
    conform,
    dtype_code,
    op_code,
)

__all__ = ["Files", "Groups", "Rows", "events"]

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]

_LATEST_NS: Final = 4_102_444_800 * 10**9
"""1 January 2100: a later time is not believed."""
_NO_DTYPE: Final = {"", "undefined", "nullptr (uninitialized)"}
_DTYPE_SIZES: Final = np.array(list(DTYPE_BYTES.values()), dtype=np.int64)


@dataclass(slots=True)
class Rows:
    """Entries of all files, file after file, oldest first. Absent values are :data:`NULL` or -1."""

    file: I32
    """Row of :class:`Files`."""
    group: I32
    """Row of :class:`Groups`."""
    name: I32
    """Profiling name: index into the operations."""
    thread: I32
    in_dtype: I32
    out_dtype: I32
    in_tensors: I32
    out_tensors: I32
    numels: I64
    """Where the sizes of the input tensors start in the pool (several tensors only)."""
    stack: I32
    state: npt.NDArray[np.uint8]
    """:data:`STATE` as written."""
    retired: Bool
    p2p: Bool
    """`is_p2p` as written."""
    seq: I64
    counter: I64
    """collective_seq_id, or the older seq_id."""
    p2p_counter: I64
    created: I64
    started: I64
    completed: I64
    in_count: I64
    out_count: I64


@dataclass(slots=True)
class Files:
    """One row a file, as arrays."""

    job: I32
    rank: I32
    bits: npt.NDArray[np.uint8]
    """CUT, HOLES, OLD and ONE_COUNTER of :mod:`flight_recorder_batches`."""
    sizes_ok: Bool
    """all_to_all sizes can be compared (2.4 and later)."""
    weak_states: Bool
    """Nothing is seen to complete and nothing to start: completion shows in `retired` only."""


@dataclass(slots=True)
class Groups:
    """One row for each communicator that a file uses, as arrays."""

    comm: I32
    """Row of the comms table."""
    members: list[npt.NDArray[np.int32]]
    """Members of each communicator of the comms table, in group order; empty = unknown."""
    names: list[str]
    """Id of each communicator."""
    synthetic: Bool
    """Members of each communicator were inferred."""


def events(
    rows: Rows,
    files: Files,
    groups: Groups,
    operations: list[Operation],
    dtypes: list[str],
    pool: I64,
    strings: StringTable,
) -> pl.DataFrame:
    """The event table of ``rows``.

    Args:
        rows: the entries.
        files: facts of each file.
        groups: communicator of each (file, group).
        operations: meaning of each profiling name.
        dtypes: spelling of each data type number.
        pool: elements of each tensor, where an entry lists several.
        strings: receives unknown operations, data types and the names of streams.

    Returns:
        A frame with the columns of :data:`schema.EVENTS`.
    """
    n = len(rows.file)
    op_codes = np.array(
        [op_code(o.op, strings) if o.recorded else -1 for o in operations], dtype=np.int32
    )
    op = op_codes[rows.name]
    is_end = np.array([o.end for o in operations], dtype=bool)[rows.name]
    known = np.array([o.known for o in operations], dtype=bool)[rows.name]
    host = np.array([o.backend in HOST_BACKENDS for o in operations], dtype=bool)[rows.name]
    p2p = (op == OP["send"]) | (op == OP["recv"])
    comm = groups.comm[rows.group]
    rank = files.rank[rows.file]
    flags = np.zeros(n, dtype=np.uint32)
    flags[~known] |= FLAG["unknown_op"]
    flags[groups.synthetic[comm]] |= FLAG["synthetic_comm"]

    state = _states(rows, files, host, flags)
    started, completed = rows.started, rows.completed
    kind = np.where(is_end, END, np.where(p2p, P2P, COLLECTIVE)).astype(np.uint8)
    bits = files.bits[rows.file] | np.where(host, HOST, 0).astype(np.uint8)
    batch = batches(rows.group, kind, bits, rows.seq, rows.counter, rows.p2p_counter)
    # a member's own state never moves: the end record carries that of the batch
    member = batch.end >= 0
    if member.any():
        last = np.where(member, batch.end, 0)
        state = np.where(member, state[last], state)
        started = np.where(member, started[last], started)
        completed = np.where(member, completed[last], completed)
        flags |= np.where(member, flags[last] & FLAG["state_unreliable"], 0).astype(np.uint32)
        flags[batch.partial] |= FLAG["partial_group"]

    peer = _peers(rows, operations, groups, comm, rank)
    count, count_out = _counts(rows, op, p2p, host)
    dtype, size = _dtypes(rows, op, dtypes, strings)
    all_to_all = (op == OP["all_to_all"]) | (op == OP["all_to_all_v"])
    # an end record alone stands for operations whose sizes were not recorded
    flags[is_end | (all_to_all & ~files.sizes_ok[rows.file])] |= FLAG["sizes_incomparable"]
    known_bytes = (count != NULL) & (size > 0) & (count <= SATURATED // 16)
    n_bytes = np.where(known_bytes, count * np.where(known_bytes, size, 0), NULL)

    ordinal = np.where((batch.ordinal < 0) | (is_end & rows.p2p), NULL, batch.ordinal)
    root = _roots(rows, groups, comm, op, ordinal, rank, flags, host)
    stream = _streams(comm, rank, peer, p2p & (batch.group == NULL), groups, strings)
    stream = np.where(host, -1, stream)
    flags |= np.where(host, FLAG["blocking_inferred"], FLAG["stream_inferred"]).astype(np.uint32)

    def ints(values: Any, dtype: pl.DataType) -> pl.Series:
        series = pl.Series("", values)
        absent = NULL if values.dtype == np.int64 else -1
        return pl.select(pl.when(series != absent).then(series).cast(dtype)).to_series()

    frame = pl.DataFrame(
        {
            "job": files.job[rows.file],
            "rank": rank,
            "lane": _lanes(rows),
            "seq": rows.seq,
            "op": op,
            "stream": ints(stream.astype(np.int32), pl.Int32()),
            "blocking": np.zeros(n, dtype=bool),
            "comm": comm,
            "ordinal": ints(ordinal, pl.Int64()),
            "peer": ints(peer, pl.Int32()),
            "root": ints(root, pl.Int32()),
            "count": ints(count, pl.Int64()),
            "count_out": ints(count_out, pl.Int64()),
            "dtype": ints(dtype, pl.Int32()),
            "bytes": ints(n_bytes, pl.Int64()),
            "group": ints(batch.group, pl.Int64()),
            "state": state,
            "t_created": ints(_times(rows.created), pl.Int64()),
            "t_started": ints(_times(started), pl.Int64()),
            "t_completed": ints(_times(completed), pl.Int64()),
            "stack": ints(rows.stack, pl.Int32()),
            "flags": flags,
        }
    )
    keep = (op >= 0) & ~batch.folded
    splits = _splits(rows, op, groups, comm, pool)
    if splits is not None:
        frame = frame.with_columns(splits=splits)
    frame = conform(frame, "events")
    return frame if keep.all() else frame.filter(pl.Series(keep))


def _times(t: I64) -> I64:
    return np.where((t <= 0) | (t > _LATEST_NS), NULL, t)


def _states(rows: Rows, files: Files, host: Bool, flags: Any) -> npt.NDArray[np.uint8]:
    """State by ``state`` and ``retired`` (FORMATS.md 2.7.2)."""
    weak = host | files.weak_states[rows.file]
    derived = weak & rows.retired & (rows.state < STATE["completed"])
    flags[derived | host] |= FLAG["state_unreliable"]
    return np.where(derived, STATE["completed"], rows.state).astype(np.uint8)


def _lanes(rows: Rows) -> I32:
    """Dense number of the host thread within each file, in order of first record."""
    lanes = np.zeros(len(rows.file), dtype=np.int32)
    if not len(lanes):
        return lanes
    change = np.flatnonzero(np.diff(rows.file)) + 1
    starts = np.concatenate([[0], change])
    several = np.minimum.reduceat(rows.thread, starts) != np.maximum.reduceat(rows.thread, starts)
    ends = np.concatenate([change, [len(lanes)]])
    for start, end in zip(starts[several], ends[several], strict=True):
        _, first, inverse = np.unique(rows.thread[start:end], return_index=True, return_inverse=True)
        lanes[start:end] = np.argsort(np.argsort(first))[inverse]
    return lanes


def _peers(
    rows: Rows, operations: list[Operation], groups: Groups, comm: I32, rank: I32
) -> npt.NDArray[np.int32]:
    """Global rank of the other side; -1 = unknown.

    The name holds ranks within the group. It is believed only if its own side is this rank.
    """
    n = len(comm)
    out = np.full(n, -1, dtype=np.int32)
    named = np.array([o.me is not None for o in operations], dtype=bool)
    at = np.flatnonzero(named[rows.name])
    if not len(at):
        return out
    me = np.array([-1 if o.me is None else o.me for o in operations], dtype=np.int64)
    peer = np.array([-1 if o.peer is None else o.peer for o in operations], dtype=np.int64)
    sizes = np.array([len(m) for m in groups.members], dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    members = np.concatenate([*groups.members, np.zeros(1, dtype=np.int32)])
    c, a, b = comm[at], me[rows.name[at]], peer[rows.name[at]]
    inside = (a >= 0) & (a < sizes[c]) & (b >= 0) & (b < sizes[c])
    last = len(members) - 1
    mine = members[np.where(inside, starts[c] + a, last)]
    other = members[np.where(inside, starts[c] + b, last)]
    out[at] = np.where(inside & (mine == rank[at]), other, -1)
    return out


def _counts(rows: Rows, op: I32, p2p: Bool, host: Bool) -> tuple[I64, I64]:
    """Elements passed in, and got where that differs (FORMATS.md 2.7.1, size peculiarities)."""
    given, got = rows.in_count, rows.out_count
    # NCCL's scatter has its two lists swapped
    swapped = ((op == OP["scatter"]) | (op == OP["scatter_v"])) & ~host
    given, got = np.where(swapped, got, given), np.where(swapped, given, got)
    # no list at all is not the same as no elements
    given = np.where(np.where(swapped, rows.out_tensors, rows.in_tensors) == 0, NULL, given)
    given = np.where((given < 0) | (given >= SATURATED), NULL, given)
    nothing = np.where(swapped, rows.in_tensors, rows.out_tensors) == 0
    got = np.where(nothing | (got < 0) | (got >= SATURATED) | (got == given) | p2p, NULL, got)
    barrier = op == OP["barrier"]
    return np.where(barrier, NULL, given), np.where(barrier, NULL, got)


def _dtypes(
    rows: Rows, op: I32, dtypes: list[str], strings: StringTable
) -> tuple[I32, I64]:
    """Code and size in bytes of the data type; -1 and 0 where unknown."""
    codes = np.array(
        [-1 if d.strip().lower() in _NO_DTYPE else dtype_code(d, strings) for d in dtypes] + [-1],
        dtype=np.int32,
    )
    code = codes[rows.in_dtype]
    code = np.where(code < 0, codes[rows.out_dtype], code)
    code = np.where(op == OP["barrier"], -1, code).astype(np.int32)
    sizes = np.where((code >= 0) & (code < len(_DTYPE_SIZES)), code, len(_DTYPE_SIZES))
    return code, np.append(_DTYPE_SIZES, 0)[sizes]


def _roots(
    rows: Rows, groups: Groups, comm: I32, op: I32, ordinal: I64, rank: I32, flags: Any, host: Bool
) -> I32:
    """Root of scatter and gather: the one member whose list has as many tensors as the group."""
    root = np.full(len(op), -1, dtype=np.int32)
    scatter = (op == OP["scatter"]) | (op == OP["scatter_v"])
    gather = (op == OP["gather"]) | (op == OP["gather_v"])
    at = np.flatnonzero((scatter | gather) & (ordinal != NULL))
    if not len(at):
        return root
    size = np.array([len(m) for m in groups.members], dtype=np.int64)[comm[at]]
    wide_in, wide_out = rows.in_tensors[at], rows.out_tensors[at]
    whole, part = rows.in_count[at], rows.out_count[at]
    # NCCL keeps both lists in the outputs; gloo records one tensor [n, ...] of the root instead
    listed = np.where(scatter[at] & host[at], wide_in, wide_out) == size
    flat_scatter = scatter[at] & (wide_in == 1) & (whole == size * part) & (part > 0)
    flat_gather = gather[at] & (wide_out == 1) & (part == size * whole) & (whole > 0)
    is_root = (size > 1) & (listed | (host[at] & (flat_scatter | flat_gather)))
    calls = pl.DataFrame({"comm": comm[at], "ordinal": ordinal[at], "op": op[at], "row": at})
    found = (
        calls.with_columns(rank=pl.Series(rank[at]))
        .filter(pl.Series(is_root))
        .group_by("comm", "ordinal", "op")
        .agg(pl.col("rank").first(), pl.col("rank").n_unique().alias("n"))
        .filter(pl.col("n") == 1)
    )
    joined = calls.join(found, on=["comm", "ordinal", "op"], how="inner")
    inferred = joined["row"].to_numpy()
    root[inferred] = joined["rank"].to_numpy()
    flags[inferred] |= FLAG["root_inferred"]
    return root


def _streams(
    comm: I32, rank: I32, peer: I32, alone: Bool, groups: Groups, strings: StringTable
) -> I32:
    """Inferred device queue: one a communicator, and one a pair for p2p outside a batch.

    That is how ProcessGroupNCCL launches: collectives and batches on the communicator's stream, a
    single send or receive on the stream of the communicator of its two ranks.
    """
    codes = np.array([strings.code(name) for name in groups.names], dtype=np.int32)
    stream = codes[comm]
    at = np.flatnonzero(alone & (peer >= 0))
    if not len(at):
        return stream
    pairs = pl.DataFrame(
        {
            "comm": comm[at],
            "lo": np.minimum(rank[at], peer[at]),
            "hi": np.maximum(rank[at], peer[at]),
        }
    )
    known = pairs.unique(maintain_order=True)
    texts = [
        strings.code(f"{groups.names[c]}:{lo}-{hi}") for c, lo, hi in known.iter_rows()
    ]
    known = known.with_columns(code=pl.Series(texts, dtype=pl.Int32))
    stream[at] = pairs.join(known, on=["comm", "lo", "hi"], how="left", maintain_order="left")[
        "code"
    ].to_numpy()
    return stream


def _splits(rows: Rows, op: I32, groups: Groups, comm: I32, pool: I64) -> pl.Series | None:
    """Elements to each member, for an all_to_all of one tensor a member."""
    size = np.array([len(m) for m in groups.members], dtype=np.int64)[comm]
    all_to_all = (op == OP["all_to_all"]) | (op == OP["all_to_all_v"])
    has = all_to_all & (rows.numels >= 0) & (rows.in_tensors == size)
    if not has.any():
        return None
    at = np.flatnonzero(has)
    width = size[at]
    # the tensors of distinct entries lie in distinct places; a pool that is read twice is not ours
    if width.sum() > len(pool):
        return None
    starts = np.cumsum(width) - width
    index = np.arange(width.sum()) - np.repeat(starts, width) + np.repeat(rows.numels[at], width)
    lists = pl.DataFrame({"row": np.repeat(at, width), "n": pool[index]})
    lists = lists.group_by("row", maintain_order=True).agg("n")
    out = pl.DataFrame({"row": np.arange(len(op))}).join(
        lists, on="row", how="left", maintain_order="left"
    )
    return out["n"]
