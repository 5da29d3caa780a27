"""Flight Recorder pickles to columns, without unpickling: nothing is imported, called or built.

:func:`decode` reads the bytes of one dump once, in compiled code (:mod:`pickle_kernel`), and gives
the entries as columns of integers, with the distinct strings and stacks beside them. Any opcode
that a dump cannot hold (GLOBAL, REDUCE, BUILD, ...) ends the reading with its name and offset.
A dump cut short gives every entry that was written whole (FORMATS.md 2.4).
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dl2gpu.trace import pickle_kernel as kernel
from dl2gpu.trace import pickle_tables as tables
from dl2gpu.trace.entry_columns import SECRET, Columns, Fault, Stacks, pack
from dl2gpu.trace.pickle_tables import KEYWORDS

__all__ = ["MAX_BYTES", "decode"]

MAX_BYTES: Final = (1 << 31) - 1
"""Larger files are refused: a ring of a million entries with stacks is below 1 GiB."""

_QUOTA: Final = 8192
_KEEP_BYTES: Final = 64 << 20

_REASONS: Final = {
    tables.UNDERFLOW: "an opcode needs more values than there are",
    tables.NO_MEMO: "a value is fetched that was never stored",
    tables.TOO_DEEP: f"nested deeper than {tables.MAX_DEPTH}",
    tables.LONG_INT: "an integer of more than 8 bytes",
    tables.BAD_TARGET: "items are added to something that is no list or dict",
    tables.ODD_ITEMS: "a key without a value",
    tables.BAD_MEMO: "a memo index beyond the size of the file",
    tables.PROTOCOL: "an unknown pickle protocol",
}


def decode(data: bytes) -> Columns:
    """Columns of the Flight Recorder pickle ``data``; ``fault`` says why reading ended early.

    Never raises for the content of ``data`` and never runs any of it. Memory is a small multiple
    of what was read, whatever sizes the bytes claim. The GIL is released while decoding.
    """
    machine: _Machine | None = getattr(_local, "machine", None)
    if machine is None:
        machine = _local.machine = _Machine()
    columns = machine.run(data)
    if machine.nbytes > _KEEP_BYTES:
        _local.machine = None
    return columns


_local = threading.local()
_SEED: Final = np.frombuffer(
    b"".join(b"X" + len(w).to_bytes(4, "little") + w.encode() for w in KEYWORDS), dtype=np.uint8
)
_RAW_WORDS: Final = tuple(word.encode() for word in KEYWORDS)


class _Machine:
    """The kernel's tables, kept from file to file by each thread."""

    def __init__(self) -> None:
        def rows(count: int, width: int) -> npt.NDArray[np.int64]:
            return np.empty((count, width), dtype=np.int64)

        room = 2 * _QUOTA
        self.st = np.zeros(tables.STATE, dtype=np.int64)
        self.sk = np.empty(room, dtype=np.uint8)
        self.sv = np.empty(room, dtype=np.int64)
        self.marks = np.empty(tables.MAX_DEPTH, dtype=np.int64)
        self.mk = np.zeros(4096, dtype=np.uint8)
        self.mv = np.zeros(4096, dtype=np.int64)
        self.cont = rows(room, tables.CONT)
        self.chunks = rows(room, 3)
        self.hk = np.empty(room, dtype=np.uint8)
        self.hv = np.empty(room, dtype=np.int64)
        self.strs, self.stab = rows(512, 3), np.full(1024, -1, dtype=np.int32)
        self.frames, self.ftab = rows(512, 4), np.full(1024, -1, dtype=np.int32)
        self.stacks, self.ktab = rows(512, 3), np.full(1024, -1, dtype=np.int32)
        self.pool = np.empty(room, dtype=np.int32)
        self.numels = np.empty(room, dtype=np.int64)
        self.rec = rows(2048, tables.WIDTH)
        self.order = np.empty(2048, dtype=np.int64)
        # intern the keywords by running a pickle that holds nothing else
        self._reset(0)
        self._walk(_SEED)
        self._words = self.strs[: len(KEYWORDS)].copy()

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))

    def _reset(self, strings: int) -> None:
        self.st[:] = 0
        self.st[tables.SECRET] = SECRET
        self.st[tables.CHUNK_AT] = -1
        self.st[tables.N_STR] = strings
        self.mk[:] = tables.UNSET
        if strings:
            self.strs[:strings] = self._words
        kernel.rehash(self.strs, strings, self.stab)
        self.ftab[:] = -1
        self.ktab[:] = -1

    def _walk(self, buf: npt.NDArray[np.uint8]) -> None:
        while True:
            kernel.walk(
                buf, _SEED, self.st, self.sk, self.sv, self.marks, self.mk, self.mv, self.cont,
                self.chunks, self.hk, self.hv, self.strs, self.stab, self.frames, self.ftab,
                self.stacks, self.ktab, self.pool, self.numels, self.rec, _QUOTA,
            )  # fmt: skip
            if self.st[tables.STATUS] != tables.GROW:
                return
            self._grow()

    def _fold(self) -> None:
        while True:
            kernel.fold(
                self.st, self.sk, self.sv, self.marks, self.cont, self.chunks, self.hk, self.hv,
                self.frames, self.stacks, self.ktab, self.pool, self.numels, self.rec, self.order,
            )  # fmt: skip
            if self.st[tables.STATUS] != tables.GROW:
                return
            self._grow()

    def _grow(self) -> None:
        """Room for another ``_QUOTA`` opcodes in every table, and for closing what is open then."""
        used = self.st.tolist()
        want = used[tables.WANT]
        self.st[tables.WANT] = 0
        for names, count, spare in (
            (("sk", "sv"), used[tables.SP], _QUOTA),
            (("cont",), used[tables.N_CONT], _QUOTA),
            (("chunks",), used[tables.N_CHUNK], _QUOTA),
            # all that is on the stack may move to the heap at once
            (("hk", "hv"), used[tables.N_HEAP] + used[tables.SP], _QUOTA),
            (("pool",), used[tables.N_POOL], max(want, _QUOTA)),
            (("numels",), used[tables.N_NUMEL], max(want, _QUOTA)),
            (("rec",), used[tables.N_ROW], 1),
            (("order",), used[tables.N_ORDER], 1),
            (("mk", "mv"), 0, want),
        ):
            for name in names:
                self._enlarge(name, count + spare + tables.MAX_DEPTH)
        for rows, table, count in (
            ("strs", "stab", used[tables.N_STR]),
            ("frames", "ftab", used[tables.N_FRAME]),
            ("stacks", "ktab", used[tables.N_STACK]),
        ):
            if 2 * (count + tables.ROOM) > getattr(self, table).size:
                setattr(self, table, np.empty(4 * getattr(self, table).size, dtype=np.int32))
                self._enlarge(rows, getattr(self, table).size // 2)
                kernel.rehash(getattr(self, rows), count, getattr(self, table))

    def _enlarge(self, name: str, needed: int) -> None:
        old = getattr(self, name)
        if needed <= len(old):
            return
        new = np.zeros((max(needed, 2 * len(old)), *old.shape[1:]), dtype=old.dtype)
        new[: len(old)] = old
        setattr(self, name, new)

    def run(self, data: bytes) -> Columns:
        buf = np.frombuffer(data, dtype=np.uint8)
        self._reset(len(KEYWORDS))
        if len(data) > MAX_BYTES:
            fault: Fault | None = Fault("refused", 0, f"larger than {MAX_BYTES} bytes")
        else:
            self._walk(buf)
            fault = self._fault(buf)
        if fault is None or fault.kind != "refused":
            self._fold()
        else:
            self._reset(len(KEYWORDS))
        st = self.st.tolist()
        raw = [*_RAW_WORDS]
        for off, length, _ in self.strs[len(KEYWORDS) : st[tables.N_STR]].tolist():
            raw.append(data[off : off + length])
        found = self.stacks[: st[tables.N_STACK]]
        ends = np.zeros(len(found) + 1, dtype=np.int64)
        np.cumsum(found[:, 1], out=ends[1:])
        stacks = Stacks(
            keys=found[:, 2].tolist(),
            ends=ends,
            flat=self.pool[: st[tables.N_POOL]].copy(),
            frames=self.frames[: st[tables.N_FRAME], :3].copy(),
        )
        columns = pack(
            self.rec, self.order[: st[tables.N_ORDER]], raw, stacks,
            self.numels[: st[tables.N_NUMEL]].copy(),
        )  # fmt: skip
        columns.header = self._header(raw, len(data))
        columns.lost = st[tables.BAD_ENTRIES]
        columns.fault, columns.size = fault, len(data)
        return columns

    def _fault(self, buf: npt.NDArray[np.uint8]) -> Fault | None:
        status, offset = int(self.st[tables.STATUS]), int(self.st[tables.POS])
        if status == tables.STOPPED:
            return None
        if status == tables.TRUNCATED:
            return Fault(
                "truncated", offset, f"the pickle ends at byte {offset} without its end mark"
            )
        if status == tables.DAMAGED:
            reason = _REASONS[int(self.st[tables.REASON])]
            return Fault("damaged", offset, f"damaged at byte {offset}: {reason}")
        name = _opcode_name(int(buf[offset]))
        if name is None:
            what = f"0x{int(buf[offset]):02x} is no opcode"
            return Fault("damaged", offset, f"damaged at byte {offset}: {what}")
        return Fault(
            "refused",
            offset,
            f"pickle opcode {name} at byte {offset}: a Flight Recorder dump holds no such thing; "
            "nothing of the file was used",
        )

    def _header(self, raw: list[bytes], budget: int) -> dict[str, Any]:
        """The root dict but for its entries, as Python objects.

        A value that is nested too deep is left out, and one that is shared so often that it would
        unfold to more than ``budget`` nodes, the bytes of the file.
        """
        st = self.st
        if not st[tables.SP] or self.sk[0] != tables.REF:
            return {}
        root = int(self.sv[0])
        if self.cont[root, 0] != tables.DICT:
            return {}
        hk, hv = self.hk, self.hv

        def children(c: int) -> list[tuple[int, int]]:
            out: list[tuple[int, int]] = []
            chunk = int(self.cont[c, 1])
            while chunk >= 0:
                first, count, chunk = self.chunks[chunk].tolist()
                part = slice(first, first + count)
                out.extend(zip(hk[part].tolist(), hv[part].tolist(), strict=True))
            return out

        def value(kind: int, payload: int, depth: int) -> Any:
            nonlocal budget
            if kind == tables.STR:
                return raw[payload].decode("utf-8", "replace")
            if kind == tables.INT:
                return payload
            if kind == tables.BOOL:
                return bool(payload)
            if kind == tables.FLOAT:
                return float(np.array(payload, dtype=np.int64).byteswap().view(np.float64))
            if kind != tables.REF:
                return None
            budget -= int(self.cont[payload, 3])
            if depth <= 0 or budget < 0:
                raise _TooLargeError
            items = [value(k, v, depth - 1) for k, v in children(payload)]
            if self.cont[payload, 0] == tables.DICT:
                return {
                    k: v
                    for k, v in zip(items[::2], items[1::2], strict=True)
                    if isinstance(k, (str, int))
                }
            return tuple(items) if self.cont[payload, 0] == tables.TUPLE else items

        header: dict[str, Any] = {}
        items = children(root)
        for (kind, payload), (vkind, vpayload) in zip(items[::2], items[1::2], strict=True):
            if kind == tables.STR and raw[payload] != b"entries":
                try:
                    header[value(kind, payload, 0)] = value(vkind, vpayload, 6)
                except _TooLargeError:
                    continue
        return header


class _TooLargeError(Exception):
    """A header value that would unfold to more than it is worth."""


def _opcode_name(byte: int) -> str | None:
    import pickletools  # only ever needed for the message

    return next((op.name for op in pickletools.opcodes if ord(op.code) == byte), None)
