"""The entries of one Flight Recorder dump as columns, whatever the dump was written in.

Both decoders (pickle and JSON) fill a matrix of one row an entry; :func:`pack` turns it into the
narrow columns that stay in memory, and collects on the way what the reader asks of each file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dl2gpu.engine.native import Bools, Int32Rows, Int32s, Int64Rows, Int64s, UInt8s, kernel
from dl2gpu.trace.pickle_tables import COLUMNS, KEYWORDS, NULL

__all__ = [
    "MIXED", "NARROW", "P2P", "RETIRED", "SECRET", "STATES", "WIDE", "Columns", "Fault", "Stacks",
    "pack",
]  # fmt: skip

WIDE: Final = (
    "record_id",  # or the position, where record_id is missing or does not increase
    "counter",  # collective_seq_id, in older versions seq_id
    "p2p_counter",
    "created",  # ns
    "started",
    "completed",
    "in_count",  # elements of all input tensors
    "out_count",
)
"""Rows of :attr:`Columns.wide`."""

NARROW: Final = (
    "group",  # row of Columns.groups
    "lane",  # host thread: 0 for that of the first entry, and so on
    "name",  # string number of profiling_name
    "in_dtype",  # string number of the first input's data type
    "out_dtype",
    "in_tensors",  # how many
    "out_tensors",
    "numels",  # where the inputs' sizes start in Columns.numels (several tensors only)
    "stack",
)
"""Rows of :attr:`Columns.narrow`; -1 = absent."""

STATES: Final = ("", "scheduled", "started", "completed")
"""Meaning of the two low bits of :attr:`Columns.bits`."""
RETIRED: Final = 4
P2P: Final = 8
MIXED: Final = 16  # the input tensors differ in data type


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a dump was not read to its end."""

    kind: Literal["truncated", "refused", "damaged"]
    offset: int
    """Byte at which reading ended."""
    reason: str


@dataclass(slots=True)
class Stacks:
    """Distinct call stacks of a dump, innermost frame first."""

    keys: list[Hashable]
    """Equal for equal stacks, also between dumps."""
    ends: npt.NDArray[np.int64]
    """Stack k is ``frames[flat[ends[k]:ends[k + 1]]]``."""
    flat: npt.NDArray[np.int32]
    frames: npt.NDArray[np.int64]
    """(frames, 3): string number of the function and of the file, line."""


@dataclass(slots=True)
class Columns:
    """One dump. Entry i is column i of :attr:`wide` and :attr:`narrow`, oldest first."""

    wide: npt.NDArray[np.int64]
    """(len(WIDE), entries); :data:`NULL` = absent."""
    narrow: npt.NDArray[np.int32]
    """(len(NARROW), entries)."""
    bits: npt.NDArray[np.uint8]
    """State (number in STATES), RETIRED, P2P, MIXED of each entry."""
    groups: list[tuple[str, str, int | None]]
    """Name, description and pg_id of each process group that an entry names."""
    raw: list[bytes]
    """Distinct strings, by number, in UTF-8."""
    stacks: Stacks
    numels: npt.NDArray[np.int64]
    names: list[tuple[int, int]] = field(default_factory=list)
    """String numbers of profiling names, and how many entries have each."""
    dtypes: list[int] = field(default_factory=list)
    """String numbers of data types."""
    header: dict[str, Any] = field(default_factory=dict)
    """Everything beside the entries, as Python objects: version, pg_config, pg_status, ..."""
    lost: int = 0
    """Members of the list of entries that are no (whole) entries."""
    fault: Fault | None = None
    size: int = 0
    """Bytes of the dump."""
    newest: int = 0
    """Latest time of creation, ns."""
    completed: int = 0
    finished: int = 0
    """Entries that are completed or retired."""
    started: bool = False
    """Some entry was seen to start."""
    old_counter: bool = False
    """No entry has collective_seq_id."""

    @property
    def n(self) -> int:
        return len(self.bits)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Column by its name in :data:`WIDE` or :data:`NARROW`."""
        if name in WIDE:
            wide: npt.NDArray[np.int64] = self.wide[WIDE.index(name)]
            return wide
        narrow: npt.NDArray[np.int32] = self.narrow[NARROW.index(name)]
        return narrow

    def text(self, number: int) -> str:
        """String by its number; bytes that are no UTF-8 are replaced."""
        return self.raw[number].decode("utf-8", "replace")

    def stack(self, k: int) -> list[str]:
        """Frames of stack ``k`` as "function file:line", innermost first."""
        s = self.stacks
        return [
            f"{self.text(name)} {self.text(file)}:{line if line != NULL else '?'}"
            for name, file, line in s.frames[s.flat[s.ends[k] : s.ends[k + 1]]].tolist()
        ]


class _Room(threading.local):
    """Memory for the columns of many files, in pieces for which the system has its large pages.

    A fresh page costs more than filling it. A piece is freed with the last of its columns.
    """

    def __init__(self) -> None:
        self._left = np.empty(0, dtype=np.uint8)

    def take(self, dtype: type[np.integer[Any]], rows: int, n: int) -> npt.NDArray[Any]:
        size = rows * n * np.dtype(dtype).itemsize
        if size > _PIECE // 4:
            return np.empty((rows, n), dtype=dtype)
        if size > len(self._left):
            self._left = np.empty(_PIECE, dtype=np.uint8)
        taken, self._left = self._left[:size], self._left[-(-size // 64) * 64 :]
        return taken.view(dtype).reshape(rows, n)


_PIECE: Final = 8 << 20
_room: Final = _Room()

_FROM: Final = (
    "record_id", "p2p_seq_id", "time_discovered_started_ns", "time_discovered_completed_ns",
    "input_sizes", "output_sizes", "collective_seq_id", "seq_id", "time_created_ns",
    "time_created_us", "profiling_name", "input_dtypes", "output_dtypes", "input_tensors",
    "output_tensors", "input_numels", "frames", "state", "retired", "is_p2p", "process_group",
    "pg_desc", "pg_id", "thread_id", "input_mixed",
)  # fmt: skip
SECRET: Final = int.from_bytes(os.urandom(8), "little", signed=True) | 1
"""Key of the hash tables, so that no file can be made to collide in them. Shows in no result."""
_AT: Final = np.array([COLUMNS[name] for name in _FROM] + [SECRET], dtype=np.int64)
_STATE_WORDS: Final = np.array([KEYWORDS.index(s) for s in STATES[1:]], dtype=np.int64)


def pack(
    rec: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64],
    raw: list[bytes],
    stacks: Stacks,
    numels: npt.NDArray[np.int64],
) -> Columns:
    """Columns of the entries ``rec[order]``; ``rec`` has the columns of pickle_tables.COLUMNS."""
    n = len(order)
    wide = _room.take(np.int64, len(WIDE), n)
    narrow = _room.take(np.int32, len(NARROW), n)
    bits = np.empty(n, dtype=np.uint8)
    groups = np.empty((n, 3), dtype=np.int64)
    facts = np.zeros(8, dtype=np.int64)
    table = np.full(1 << max(4, (2 * n).bit_length()), -1, dtype=np.int32)
    lanes = np.full(len(raw) + 1, -1, dtype=np.int32)
    names = np.zeros(len(raw) + 1, dtype=np.int32)  # one place more, for what is absent
    dtypes = np.zeros(len(raw) + 1, dtype=np.bool_)
    _pack(
        rec, order, _AT, _STATE_WORDS, wide, narrow, bits, groups, table, lanes, names, dtypes,
        facts,
    )  # fmt: skip
    n_groups, newest, completed, finished, started, with_counter, _, _ = facts.tolist()
    columns = Columns(wide, narrow, bits, [], raw, stacks, numels)
    used = np.flatnonzero(names[:-1])
    columns.names = list(zip(used.tolist(), names[used].tolist(), strict=True))
    columns.dtypes = np.flatnonzero(dtypes[:-1]).tolist()
    for name, desc, number in groups[:n_groups].tolist():
        pg_id = None if number == NULL else number
        columns.groups.append(
            (
                columns.text(name) if name != NULL else "" if pg_id is None else str(pg_id),
                columns.text(desc) if desc != NULL else "",
                pg_id,
            )
        )
    columns.newest, columns.completed, columns.finished = newest, completed, finished
    columns.started, columns.old_counter = bool(started), n > 0 and not with_counter
    return columns


@kernel
def _pack(
    rec: Int64Rows, order: Int64s, at: Int64s, states: Int64s, wide: Int64Rows, narrow: Int32Rows,
    bits: UInt8s, groups: Int64Rows, table: Int32s, lanes: Int32s, names: Int32s, dtypes: Bools,
    facts: Int64s,
) -> None:  # fmt: skip
    n = order.size
    n_groups = 0
    n_lanes = 0
    increasing = True
    mask = table.size - 1
    for i in range(n):
        r = order[i]
        record = rec[r, at[0]]
        if record < 0 or (i > 0 and record <= wide[0, i - 1]):
            increasing = False
        wide[0, i] = record
        counter = rec[r, at[6]]
        if counter == NULL:
            counter = rec[r, at[7]]
        else:
            facts[5] += 1
        wide[1, i] = counter
        wide[2, i] = rec[r, at[1]]
        created = rec[r, at[8]]
        if created == NULL:
            created = rec[r, at[9]]
            if 0 < created < 1 << 53:
                created *= 1000
        wide[3, i] = created
        facts[1] = max(facts[1], created)
        wide[4, i] = rec[r, at[2]]
        wide[5, i] = rec[r, at[3]]
        wide[6, i] = rec[r, at[4]]
        wide[7, i] = rec[r, at[5]]
        for j in range(7):
            value = rec[r, at[10 + j]]
            narrow[2 + j, i] = -1 if value < 0 else min(value, 0x7FFFFFFF)
        absent = names.size - 1
        names[narrow[2, i] if narrow[2, i] >= 0 else absent] += 1
        for j in range(2):
            dtypes[narrow[3 + j, i] if narrow[3 + j, i] >= 0 else absent] = True
        state = 0
        for j in range(3):
            if rec[r, at[17]] == states[j]:
                state = j + 1
        retired = rec[r, at[18]] == 1
        bits[i] = state | (RETIRED if retired else 0) | (P2P if rec[r, at[19]] == 1 else 0)
        bits[i] |= MIXED if rec[r, at[24]] == 1 else 0
        facts[2] += 1 if state == 3 else 0
        facts[3] += 1 if state == 3 or retired else 0
        if state == 2 or rec[r, at[2]] > 0:
            facts[4] = 1

        # the process group: (name, description), in the older versions only its number
        name = rec[r, at[20]]
        desc = rec[r, at[21]]
        number = rec[r, at[22]]
        h = number if name == NULL else (name ^ at[25]) * at[25] + desc
        h = (h ^ at[25]) * at[25]
        slot = (h ^ ((h >> 32) & 0xFFFFFFFF)) & mask
        while True:
            g = table[slot]
            if g < 0:
                g = n_groups
                table[slot] = g
                groups[g, 0] = name
                groups[g, 1] = desc
                groups[g, 2] = number
                n_groups += 1
                break
            if (
                groups[g, 0] == name
                and groups[g, 1] == desc
                and (name != NULL or groups[g, 2] == number)
            ):
                break
            slot = (slot + 1) & mask
        narrow[0, i] = g

        thread = rec[r, at[23]]
        if thread < 0:
            thread = lanes.size - 1
        if lanes[thread] < 0:
            lanes[thread] = n_lanes
            n_lanes += 1
        narrow[1, i] = lanes[thread]
    if not increasing:
        for i in range(n):
            wide[0, i] = i
    facts[0] = n_groups
