"""Decoded Flight Recorder entries of many files to the event table (FORMATS.md 2.12).

Prepares the look-up tables, runs :mod:`flight_recorder_kernel` file after file, and adds what
needs a view across files: roots, splits, the names of streams.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.engine.cores import cores
from dl2gpu.trace import flight_recorder_kernel as kernel
from dl2gpu.trace.entry_columns import SECRET, Columns
from dl2gpu.trace.flight_recorder_comms import MOST_THREADS, Comm, Dump
from dl2gpu.trace.flight_recorder_names import HOST_BACKENDS, Operation
from dl2gpu.trace.pickle_kernel import rehash
from dl2gpu.trace.pickle_tables import NULL
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

__all__ = ["FileEntries", "events"]

_NO_DTYPE: Final = {"", "undefined", "nullptr (uninitialized)"}
_CONSTS: Final = np.array(
    [
        STATE["unknown"], STATE["scheduled"], STATE["started"], STATE["completed"],
        FLAG["state_unreliable"], FLAG["sizes_incomparable"], FLAG["partial_group"],
        FLAG["synthetic_comm"], FLAG["root_inferred"], FLAG["blocking_inferred"],
        FLAG["stream_inferred"], FLAG["unknown_op"],
    ],
    dtype=np.int64,
)  # fmt: skip
_KINDS: Final = {
    "send": kernel.SEND_RECV, "recv": kernel.SEND_RECV, "barrier": kernel.BARRIER,
    "scatter": kernel.SCATTER, "scatter_v": kernel.SCATTER, "gather": kernel.GATHER,
    "gather_v": kernel.GATHER, "all_to_all": kernel.ALL_TO_ALL, "all_to_all_v": kernel.ALL_TO_ALL,
}  # fmt: skip
_ROOTED: Final = [OP["scatter"], OP["scatter_v"], OP["gather"], OP["gather_v"]]
_INTS: Final = ("job", "rank", "lane", "op", "comm", "peer", "dtype", "stack", "stream", "root")
_OWN_STREAM: Final = -2
"""A stream of -2 - k is that of the k-th pair of ranks."""
_ALWAYS: Final = 5  # the first ones of _INTS are never absent
_LONGS: Final = (
    "seq", "ordinal", "count", "count_out", "bytes", "group", "t_created", "t_started",
    "t_completed",
)  # fmt: skip


@dataclass(slots=True)
class FileEntries:
    """Entries of one file, and its numbers in the tables of the whole read."""

    dump: Dump
    columns: Columns
    name_op: npt.NDArray[np.int32]
    """Operation of each string number that is a profiling name."""
    text_dtype: npt.NDArray[np.int32]
    """Data type of each string number that is one."""
    stack_of: npt.NDArray[np.int32]
    """Stack of each of the file's stacks."""


def events(
    files: list[FileEntries],
    comms: list[Comm],
    operations: Iterable[Operation],
    dtypes: Iterable[str],
    strings: StringTable,
) -> pl.DataFrame:
    """The event table of ``files``, which is emptied on the way (each file's columns are freed).

    Threads, one a core, each take a run of files and write rows of their own.

    Args:
        files: entries of each file whose rank is known, in the order of the rows.
        comms: communicators, by their number.
        operations: meaning of the profiling names, by their number.
        dtypes: spellings of data types, by their number.
        strings: receives unknown operations and data types, and the names of streams.

    Returns:
        A frame with the columns of :data:`schema.EVENTS`.
    """
    tables = (
        _operation_table(operations, strings),
        _dtype_table(dtypes, strings),
        _comm_table(comms, strings),
        np.array([r for c in comms for r in c.ranks] + [-1], dtype=np.int32),
    )
    total = sum(f.columns.n for f in files)
    out = (
        np.empty((kernel.INTS, total), dtype=np.int32),
        np.empty((kernel.LONGS, total), dtype=np.int64),
        np.empty(total, dtype=np.uint8),
        np.empty(total, dtype=np.uint32),
    )
    shares = _shares(files)
    with ThreadPoolExecutor(len(shares), thread_name_prefix="flight-recorder") as pool:
        parts = list(pool.map(lambda share: _mapped(share[0], share[1], tables, out), shares))
    ints, longs, states, flags = out
    n = 0
    splits: list[_Splits] = []
    for part in parts:
        if len(part.pairs):
            names = [f"{comms[c].id}:{lo}-{hi}" for c, lo, hi, _ in part.pairs.tolist()]
            codes = np.array([strings.code(name) for name in names], dtype=np.int32)
            stream = ints[kernel.O_STREAM, part.first : part.end]
            own = stream <= _OWN_STREAM
            stream[own] = codes[_OWN_STREAM - stream[own]]
        # entries that are no operations leave a gap behind the rows of a share
        to = n + part.end - part.first
        if part.first > n:
            for column in (*ints, *longs, states, flags):
                column[n:to] = column[part.first : part.end]
        splits += [(rows - (part.first - n), sizes) for rows, sizes in part.splits]
        n = to
    # columns without nulls are copied out, the others are when they get their nulls: no column of
    # the frame keeps the whole block alive
    columns_out: dict[str, Any] = {
        name: ints[i, :n].copy() if i < _ALWAYS else ints[i, :n] for i, name in enumerate(_INTS)
    }
    columns_out |= {name: longs[i, :n] for i, name in enumerate(_LONGS)}
    columns_out |= {"seq": longs[kernel.W_SEQ, :n].copy()}
    columns_out |= {"state": states[:n], "flags": flags[:n]}
    return _frame(columns_out, splits)


def _shares(files: list[FileEntries]) -> list[tuple[int, list[FileEntries]]]:
    """(first row, files): runs of about equally many entries, one a core; ``files`` is emptied."""
    ends = np.cumsum([f.columns.n for f in files])
    workers = max(1, min(MOST_THREADS, cores(), len(files)))
    wanted = np.linspace(0, ends[-1], workers + 1)[1:-1]
    cuts = [0, *np.unique(np.searchsorted(ends, wanted, side="right")).tolist(), len(files)]
    shares = [
        (int(ends[lo - 1]) if lo else 0, files[lo:hi]) for lo, hi in pairwise(cuts) if hi > lo
    ]
    files.clear()
    return shares


_Splits: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""(row, size) of the tensors of all_to_all calls."""


class _Part(NamedTuple):
    """What a share of the files came to: its rows, and what is still to be put into them."""

    first: int
    end: int
    pairs: npt.NDArray[np.int64]
    """(communicator, rank, rank, hash) of the streams that two ranks have of their own."""
    splits: list[_Splits]


def _mapped(
    first: int, files: list[FileEntries], tables: tuple[Any, ...], out: tuple[Any, ...]
) -> _Part:
    """Maps the entries of ``files``, which is emptied, to the rows from ``first`` on."""
    facts = np.zeros(kernel.FACTS, dtype=np.int64)
    facts[kernel.SECRET], facts[kernel.OFFSET] = SECRET, first
    pairs = np.empty((64, 4), dtype=np.int64)
    table = np.full(256, -1, dtype=np.int32)
    splits: list[_Splits] = []
    files.reverse()
    while files:
        file = files.pop()
        columns, dump = file.columns, file.dump
        n, n_pairs = columns.n, int(facts[kernel.N_PAIRS])
        if n_pairs + n > len(pairs):
            grown = np.empty((2 * (n_pairs + n), 4), dtype=np.int64)
            grown[:n_pairs] = pairs[:n_pairs]
            pairs = grown
            table = np.empty(1 << (4 * (n_pairs + n)).bit_length(), dtype=np.int32)
            rehash(pairs, n_pairs, table)
        facts[kernel.JOB], facts[kernel.RANK] = (
            dump.job.index,
            -1 if dump.rank is None else dump.rank,
        )
        facts[kernel.BITS] = _bits(dump)
        found = np.empty((n, 6), dtype=np.int64)
        split = np.empty((n, 3), dtype=np.int64)
        kernel.map_entries(
            columns.wide, columns.narrow, columns.bits, facts, file.name_op, file.text_dtype,
            np.array([c.index for c in dump.group_comms], dtype=np.int32), file.stack_of,
            *tables, _CONSTS, np.empty((len(dump.group_comms), 8), dtype=np.int64), found, pairs,
            table, split, *out,
        )  # fmt: skip
        if facts[kernel.N_SPLITS]:
            splits.extend(_split_sizes(split[: facts[kernel.N_SPLITS]], columns.numels))
    return _Part(first, int(facts[kernel.OFFSET]), pairs[: facts[kernel.N_PAIRS]], splits)


def _frame(columns: dict[str, Any], splits: list[_Splits]) -> pl.DataFrame:
    """The frame: absent values become null, roots and splits are filled in."""
    _roots(columns)
    frame = pl.DataFrame(columns)
    optional = [*_INTS[_ALWAYS:], *_LONGS[1:]]
    frame = frame.with_columns(
        *(
            pl.when(pl.col(name) != (-1 if name in _INTS else NULL)).then(pl.col(name)).alias(name)
            for name in optional
        ),
        blocking=pl.lit(False),
    )
    if splits:
        rows = np.concatenate([r for r, _ in splits])
        lists = (
            pl.DataFrame({"row": rows, "splits": np.concatenate([s for _, s in splits])})
            .group_by("row", maintain_order=True)
            .agg("splits")
        )
        frame = (
            frame.with_row_index("row")
            .with_columns(pl.col("row").cast(pl.Int64))
            .join(lists, on="row", how="left", maintain_order="left")
        )
    return conform(frame, "events")


def _split_sizes(split: npt.NDArray[np.int64], numels: npt.NDArray[np.int64]) -> list[_Splits]:
    """(row, size) of every tensor of the all_to_all calls of one file."""
    rows, starts, counts = split.T
    # lists that a file shares between entries are counted once: a few bytes that fetch one long
    # list again and again must not unfold to gigabytes
    if counts.sum() > len(numels):
        return []
    before = np.cumsum(counts) - counts
    at = np.arange(counts.sum()) - np.repeat(before - starts, counts)
    return [(np.repeat(rows, counts), numels[at])]


def _roots(columns: dict[str, Any]) -> None:
    """Root of scatter and gather: the one rank whose list has a tensor for each member.

    Sets it, and the flag, on all members of the call.
    """
    op = columns["op"]
    at = np.flatnonzero(np.isin(op, _ROOTED) & (columns["ordinal"] != NULL))
    if not len(at):
        return
    calls = pl.DataFrame(
        {
            "row": at,
            "comm": columns["comm"][at],
            "ordinal": columns["ordinal"][at],
            "op": op[at],
            "root": columns["root"][at],
        }
    )
    key = ["comm", "ordinal", "op"]
    found = (
        calls.filter(pl.col("root") >= 0)
        .group_by(key)
        .agg(pl.col("root").min(), pl.col("root").n_unique().alias("n"))
        .filter(pl.col("n") == 1)
    )
    told = calls.select("row", *key).join(found, on=key, how="left", maintain_order="left")
    root = told["root"].fill_null(-1).to_numpy()
    columns["root"][at] = root
    columns["flags"][at[root >= 0]] |= np.uint32(FLAG["root_inferred"])


def _bits(dump: Dump) -> int:
    return (
        kernel.CUT * (dump.lost_before > 0)
        | kernel.HOLES * dump.only_active
        | kernel.OLD * dump.old
        | kernel.ONE_COUNTER * dump.one_counter
        | kernel.SIZES_OK * (dump.version is not None and dump.version >= (2, 4))
        | kernel.WEAK_STATES * dump.weak_states
    )


def _operation_table(operations: Iterable[Operation], strings: StringTable) -> Any:
    rows = []
    for o in operations:
        bits = _KINDS.get(o.op, 0)
        bits |= kernel.END * o.end | kernel.UNKNOWN * (not o.known)
        bits |= kernel.DROPPED * (not o.recorded)
        bits |= kernel.ON_HOST * (o.backend in HOST_BACKENDS)
        code = op_code(o.op, strings) if o.recorded else 0
        rows.append((code, bits, -1 if o.me is None else o.me, -1 if o.peer is None else o.peer))
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def _dtype_table(dtypes: Iterable[str], strings: StringTable) -> Any:
    sizes = list(DTYPE_BYTES.values())
    rows = []
    for name in dtypes:
        code = -1 if name.strip().lower() in _NO_DTYPE else dtype_code(name, strings)
        rows.append((code, sizes[code] if 0 <= code < len(sizes) else 0))
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _comm_table(comms: list[Comm], strings: StringTable) -> Any:
    rows = []
    first = 0
    for c in comms:
        rows.append((first, len(c.ranks), int(c.synthetic), strings.code(c.id)))
        first += len(c.ranks)
    return np.array(rows, dtype=np.int64).reshape(-1, 4)
