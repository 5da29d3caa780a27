"""Numba kernels behind :mod:`dl2gpu.trace.pickle_columns`: a pickle machine over integers.

The machine knows the opcodes that a Flight Recorder dump can hold (FORMATS.md 2.4) and nothing
else: no opcode that imports, calls or builds. A value is a pair (kind, payload): numbers carry
themselves, strings the number of an interned string, lists, tuples and dicts the number of a
container whose children lie in a heap of such pairs. Nothing is allocated here: when a table is
full the machine stops with ``GROW`` and its whole state in ``st``; the caller enlarges the table
and calls again. So memory follows what has really been read, whatever numbers a file contains.

Entry dicts in the layout of PyTorch's own writer take a short cut (:func:`_entry`): they go
straight into a row of ``rec``, with neither stack nor heap. Whatever the short cut does not
expect is left to the machine, which starts again at the same place; :func:`fold` turns the
machine's entry dicts into the same rows afterwards.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["COLUMNS", "KEYWORDS", "NULL", "fold", "walk"]

KEYWORDS: Final = (
    # keys of an entry: the number of the word is the number of its column in `rec`
    "record_id", "pg_id", "process_group", "collective_seq_id", "p2p_seq_id", "op_id", "seq_id",
    "profiling_name", "time_created_ns", "time_created_us", "duration_ms", "input_sizes",
    "input_dtypes", "output_sizes", "output_dtypes", "state", "time_discovered_started_ns",
    "time_discovered_completed_ns", "retired", "timeout_ms", "is_p2p", "frames", "thread_id",
    "thread_name",
    # keys of a frame, and values worth a fixed number
    "name", "filename", "line", "scheduled", "started", "completed", "entries",
)  # fmt: skip
"""Words with fixed string numbers: interned before the file's own strings, in this order."""

COLUMNS: Final[dict[str, int]] = {word: i for i, word in enumerate(KEYWORDS[:24])} | {
    "pg_desc": 24,  # second half of process_group
    "input_tensors": 25,  # how many tensors; their total is in input_sizes
    "output_tensors": 26,
    "input_numels": 27,  # where the elements of each tensor start in the pool; -1: one or none
    "output_numels": 28,
    "input_mixed": 29,  # 1: the tensors differ in dtype
    "output_mixed": 30,
}
"""Columns of ``rec``. Strings are string numbers, booleans 0 or 1, absent values :data:`NULL`."""

WIDTH: Final = 32
NULL: Final = -(1 << 63)
SATURATED: Final = 1 << 62

# kinds of value
UNSET, NONE, BOOL, INT, FLOAT, STR, REF, FRAME, ENTRY = 0, 1, 2, 3, 4, 5, 6, 7, 8
# types of container: columns of the container table are
# type, first chunk, last chunk, children, cut open, summary (0 = none yet), summary values 0..2
LIST, DICT, TUPLE, FRAMEDICT = 1, 2, 3, 4
# what the machine stopped for
STOPPED, TRUNCATED, REFUSED, DAMAGED, GROW = 1, 2, 3, 4, 5
# why it is damaged
UNDERFLOW, NO_MEMO, TOO_DEEP, LONG_INT, BAD_TARGET, ODD_ITEMS, BAD_MEMO, PROTOCOL = range(1, 9)

# slots of `st`
POS, STATUS, REASON, SP, MP, MEMO_NEXT, N_CONT, N_CHUNK, N_HEAP, N_STR, N_FRAME, N_STACK = range(12)
N_POOL, N_NUMEL, N_ROW, SECRET, WANT, N_ORDER, BAD_ENTRIES, CHUNK_AT, CHILD_AT = range(12, 21)
STATE: Final = 21
CONT: Final = 9

MAX_DEPTH: Final = 16
ROOM: Final = 256  # free places in every table that the short cut asks for
LEAST_KEYS: Final = 4  # a dict with fewer known keys, or without profiling_name, is no entry

# what the short cut does with the value of each keyword
_SCALAR, _TEXT, _PAIR, _SIZES, _DTYPES, _FRAMES, _DROP, _OTHER = range(8)
_CLASS: Final = np.array(
    [_SCALAR, _SCALAR, _PAIR, _SCALAR, _SCALAR, _SCALAR, _SCALAR, _TEXT, _SCALAR, _SCALAR, _DROP,
     _SIZES, _DTYPES, _SIZES, _DTYPES, _TEXT, _SCALAR, _SCALAR, _SCALAR, _SCALAR, _SCALAR, _FRAMES,
     _TEXT, _DROP] + [_OTHER] * (len(KEYWORDS) - 24),
    dtype=np.int64,
)  # fmt: skip
_N_WORDS: Final = len(KEYWORDS)
_K = {word: i for i, word in enumerate(KEYWORDS)}
_PG, _ISIZES, _IDTYPES, _OSIZES = (
    _K["process_group"], _K["input_sizes"], _K["input_dtypes"], _K["output_sizes"]
)  # fmt: skip
_ODTYPES, _FRAMES_KEY, _NAME, _FILE, _LINE, _IS_P2P, _ENTRIES_KEY = (
    _K["output_dtypes"], _K["frames"], _K["name"], _K["filename"], _K["line"], _K["is_p2p"],
    _K["entries"],
)  # fmt: skip
_DESC, _ITENSORS, _INUMELS, _IMIXED, _USED = 24, 25, 27, 29, 31
_PROFILING = _K["profiling_name"]

# opcodes (pickle protocol 2 as PyTorch writes it, and what Python's own pickler may use instead)
_PROTO, _FRAME, _STOP, _MARK = 0x80, 0x95, 0x2E, 0x28
_EMPTY_DICT, _EMPTY_LIST, _EMPTY_TUPLE = 0x7D, 0x5D, 0x29
_TUPLE, _TUPLE1, _TUPLE2, _TUPLE3 = 0x74, 0x85, 0x86, 0x87
_BINUNICODE, _SHORT_BINUNICODE, _BINUNICODE8 = 0x58, 0x8C, 0x8D
_BINPUT, _LONG_BINPUT, _MEMOIZE, _BINGET, _LONG_BINGET = 0x71, 0x72, 0x94, 0x68, 0x6A
_BININT, _BININT1, _BININT2, _LONG1, _LONG4, _BINFLOAT = 0x4A, 0x4B, 0x4D, 0x8A, 0x8B, 0x47
_NONE, _NEWTRUE, _NEWFALSE = 0x4E, 0x88, 0x89
_SETITEMS, _SETITEM, _APPENDS, _APPEND = 0x75, 0x73, 0x65, 0x61


def _loader(bits: int, signed: bool = False) -> Any:
    """Unaligned little-endian load of ``bits`` bits from a byte array, without index wraparound."""

    @intrinsic
    def load(_typing: Any, buf: Any, at: Any) -> Any:
        signature = types.int64(buf, at)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            array = context.make_array(sig.args[0])(context, builder, args[0])
            pointer = cgutils.gep(builder, array.data, args[1])
            pointer = builder.bitcast(pointer, ir.IntType(bits).as_pointer())
            value = builder.load(pointer, align=1)
            if bits == 64:
                return value
            extend = builder.sext if signed else builder.zext
            return extend(value, ir.IntType(64))

        return signature, codegen

    return load


_u8, _u16, _u32, _u64 = _loader(8), _loader(16), _loader(32), _loader(64)
_i32 = _loader(32, signed=True)


@njit(nogil=True, _nrt=False)
def _mix(h: int, value: int, secret: int) -> int:
    h = (h ^ value) * secret
    return h ^ ((h >> 32) & 0xFFFFFFFF)


@njit(nogil=True, _nrt=False)
def _intern_text(buf, seed, off, length, strs, table, st):  # type: ignore[no-untyped-def]
    """Number of the string ``buf[off:off+length]``; -1 when the table is full."""
    secret = st[SECRET]
    h = _mix(secret, length, secret)
    p = off
    end = off + length
    while p + 8 <= end:
        h = _mix(h, _u64(buf, p), secret)
        p += 8
    tail = 0
    while p < end:
        tail = (tail << 8) | _u8(buf, p)
        p += 1
    h = _mix(_mix(h, tail, secret), 0, secret)
    mask = table.size - 1
    slot = h & mask
    while True:
        k = table[slot]
        if k < 0:
            break
        if strs[k, 2] == h and strs[k, 1] == length:
            a = strs[k, 0]
            same = True
            if k < _N_WORDS:
                for i in range(length):
                    if _u8(seed, a + i) != _u8(buf, off + i):
                        same = False
                        break
            else:
                for i in range(length):
                    if _u8(buf, a + i) != _u8(buf, off + i):
                        same = False
                        break
            if same:
                return k
        slot = (slot + 1) & mask
    n = st[N_STR]
    if 2 * n + 2 > table.size or n >= strs.shape[0]:
        return -1
    table[slot] = n
    strs[n, 0] = off
    strs[n, 1] = length
    strs[n, 2] = h
    st[N_STR] = n + 1
    return n


@njit(nogil=True, _nrt=False)
def _intern_frame(name, filename, line, strs, frames, table, st):  # type: ignore[no-untyped-def]
    """Number of the frame (string number, string number, line); -1 when the table is full.

    Its hash is one of the content, not of the numbers, and so the same in every file.
    """
    secret = st[SECRET]
    h = _mix(_mix(_mix(secret, strs[name, 2], secret), strs[filename, 2], secret), line, secret)
    h = _mix(h, 0, secret)
    mask = table.size - 1
    slot = h & mask
    while True:
        k = table[slot]
        if k < 0:
            break
        if frames[k, 0] == name and frames[k, 1] == filename and frames[k, 2] == line:
            return k
        slot = (slot + 1) & mask
    n = st[N_FRAME]
    if 2 * n + 2 > table.size or n >= frames.shape[0]:
        return -1
    table[slot] = n
    frames[n, 3] = h
    frames[n, 0] = name
    frames[n, 1] = filename
    frames[n, 2] = line
    st[N_FRAME] = n + 1
    return n


@njit(nogil=True, _nrt=False)
def _intern_stack(count, frames, stacks, table, pool, st):  # type: ignore[no-untyped-def]
    """Number of the stack whose ``count`` frames lie at the end of ``pool``; -1 when full.

    The frames stay in the pool (``N_POOL`` moves on) only where the stack is new.
    """
    secret = st[SECRET]
    start = st[N_POOL]
    h = _mix(secret, count, secret)
    for i in range(count):
        h = _mix(h, frames[pool[start + i], 3], secret)
    h = _mix(h, 0, secret)
    mask = table.size - 1
    slot = h & mask
    while True:
        k = table[slot]
        if k < 0:
            break
        if stacks[k, 2] == h and stacks[k, 1] == count:
            a = stacks[k, 0]
            same = True
            for i in range(count):
                if pool[a + i] != pool[start + i]:
                    same = False
                    break
            if same:
                return k
        slot = (slot + 1) & mask
    n = st[N_STACK]
    if 2 * n + 2 > table.size or n >= stacks.shape[0]:
        return -1
    table[slot] = n
    stacks[n, 0] = start
    stacks[n, 1] = count
    stacks[n, 2] = h
    st[N_STACK] = n + 1
    st[N_POOL] = start + count
    return n


@njit(nogil=True, _nrt=False, forceinline=True)
def _times(a, b):  # type: ignore[no-untyped-def]
    """Product of two sizes, saturated; negative sizes count as unknown (saturated)."""
    if 0 <= a < 1 << 31 and 0 <= b < 1 << 31:
        return a * b
    if a == 0 or b == 0:
        return 0
    if a < 0 or b < 0 or a > SATURATED // b:
        return SATURATED
    return a * b


@njit(nogil=True, _nrt=False, forceinline=True)
def _text(buf, n, p, seed, st, mk, mv, strs, stab):  # type: ignore[no-untyped-def]
    """String at ``p``, fetched or new and memoised: (position after, number); -1 = unexpected."""
    op = _u8(buf, p)
    if op == _BINGET or op == _LONG_BINGET:
        if op == _BINGET:
            k = _u8(buf, p + 1)
            p += 2
        else:
            k = _u32(buf, p + 1)
            p += 5
        if k >= mk.size or mk[k] != STR:
            return -1, 0
        return p, mv[k]
    if op != _BINUNICODE:
        return -1, 0
    length = _u32(buf, p + 1)
    p += 5
    if p + length + 16 > n:
        return -1, 0
    text = _intern_text(buf, seed, p, length, strs, stab, st)
    if text < 0:
        return -1, 0
    p = _put(buf, p + length, st, mk, mv, STR, text)
    return p, text


@njit(nogil=True, _nrt=False, forceinline=True)
def _put(buf, p, st, mk, mv, kind, value):  # type: ignore[no-untyped-def]
    """Position after an optional BINPUT of (kind, value) at ``p``; -1 = beyond the table."""
    op = _u8(buf, p)
    if op == _BINPUT:
        k = _u8(buf, p + 1)
        p += 2
    elif op == _LONG_BINPUT:
        k = _u32(buf, p + 1)
        p += 5
        if k >= mk.size:
            return -1
    else:
        return p
    if mk[k] == UNSET:
        st[MEMO_NEXT] += 1
    mk[k] = kind
    mv[k] = value
    return p


@njit(nogil=True, _nrt=False, forceinline=True)
def _sizes(buf, n, p, st, numels, rec, row, key):  # type: ignore[no-untyped-def]
    """list[list[int]] at ``p`` into ``rec``: total elements, tensors, elements of each tensor."""
    if _u8(buf, p) != _EMPTY_LIST or _u8(buf, p + 1) != _MARK:
        return -1
    p += 2
    total = 0
    count = 0
    first = st[N_NUMEL]
    while p + 32 < n:
        op = _u8(buf, p)
        if op == _EMPTY_LIST and _u8(buf, p + 1) == _MARK:
            p += 2
            numel = 1
            while p + 32 < n:
                op = _u8(buf, p)
                if op == _BININT1:
                    numel = _times(numel, _u8(buf, p + 1))
                    p += 2
                elif op == _BININT2:
                    numel = _times(numel, _u16(buf, p + 1))
                    p += 3
                elif op == _BININT:
                    numel = _times(numel, _i32(buf, p + 1))
                    p += 5
                elif op == _LONG1 and _u8(buf, p + 1) == 8:
                    numel = _times(numel, _u64(buf, p + 2))
                    p += 10
                else:
                    break
            if _u8(buf, p) != _APPENDS:
                return -1
            p += 1
            if first + count >= numels.size:
                return -1
            numels[first + count] = numel
            count += 1
            total = min(total + numel, SATURATED)
        elif op == _APPENDS:
            side = 0 if key == _ISIZES else 1
            rec[row, key] = total
            rec[row, _ITENSORS + side] = count
            if count > 1:
                rec[row, _INUMELS + side] = first
                st[N_NUMEL] = first + count
            return p + 1
        else:
            return -1
    return -1


@njit(nogil=True, _nrt=False, forceinline=True)
def _stack(buf, n, p, seed, st, mk, mv, cont, strs, stab,  # type: ignore[no-untyped-def]
           frames, ftab, stacks, ktab, pool):  # fmt: skip
    """List of frames at ``p``: (position after it, stack number); -1 = unexpected."""
    if _u8(buf, p) != _EMPTY_LIST or _u8(buf, p + 1) != _MARK:
        return -1, 0
    p += 2
    start = st[N_POOL]
    count = 0
    while p + 32 < n and start + count < pool.size:
        op = _u8(buf, p)
        if op == _BINGET or op == _LONG_BINGET:
            if op == _BINGET:
                k = _u8(buf, p + 1)
                p += 2
            else:
                k = _u32(buf, p + 1)
                p += 5
                if k >= mk.size:
                    return -1, 0
            frame = mv[k]
            if mk[k] != FRAME:
                if mk[k] != REF or cont[frame, 0] != FRAMEDICT:
                    return -1, 0
                frame = cont[frame, 6]
            pool[start + count] = frame
            count += 1
        elif op == _APPENDS:
            k = _intern_stack(count, frames, stacks, ktab, pool, st)
            return (p + 1, k) if k >= 0 else (-1, 0)
        elif op == _EMPTY_DICT and _u8(buf, p + 1) == _MARK:
            p += 2
            name = NULL
            filename = NULL
            line = NULL
            while p + 32 < n and _u8(buf, p) != _SETITEMS:
                p, key = _text(buf, n, p, seed, st, mk, mv, strs, stab)
                if p < 0 or p + 32 > n:
                    return -1, 0
                if key == _NAME:
                    p, name = _text(buf, n, p, seed, st, mk, mv, strs, stab)
                elif key == _FILE:
                    p, filename = _text(buf, n, p, seed, st, mk, mv, strs, stab)
                elif key == _LINE:
                    op = _u8(buf, p)
                    if op == _BININT2:
                        line = _u16(buf, p + 1)
                        p += 3
                    elif op == _BININT1:
                        line = _u8(buf, p + 1)
                        p += 2
                    elif op == _BININT:
                        line = _i32(buf, p + 1)
                        p += 5
                    else:
                        return -1, 0
                else:
                    return -1, 0
                if p < 0:
                    return -1, 0
            if p + 32 > n or name == NULL or filename == NULL or line == NULL:
                return -1, 0
            frame = _intern_frame(name, filename, line, strs, frames, ftab, st)
            if frame < 0:
                return -1, 0
            p = _put(buf, p + 1, st, mk, mv, FRAME, frame)
            if p < 0:
                return -1, 0
            pool[start + count] = frame
            count += 1
        else:
            return -1, 0
    return -1, 0


@njit(nogil=True, _nrt=False, forceinline=True)
def _entry(buf, n, p, seed, st, mk, mv, cont, strs, stab,  # type: ignore[no-untyped-def]
           frames, ftab, stacks, ktab, pool, numels, rec):  # fmt: skip
    """Short cut: an entry dict in the writer's own layout, after its MARK at ``p``, into ``rec``.

    Returns the position after its SETITEMS, or -1 where anything is unexpected; the tables may
    then hold strings, frames and stacks that the machine will meet again.
    """
    row = st[N_ROW]
    numels_before = st[N_NUMEL]
    for j in range(WIDTH):
        rec[row, j] = NULL
    while p + 32 < n:
        op = _u8(buf, p)
        if op == _BINGET:
            k = _u8(buf, p + 1)
            if mk[k] != STR:
                break
            key = mv[k]
            p += 2
        elif op == _SETITEMS:
            st[N_ROW] = row + 1
            return p + 1
        else:
            p, key = _text(buf, n, p, seed, st, mk, mv, strs, stab)
            if p < 0 or p + 32 > n:
                break
        what = _OTHER
        if key < _N_WORDS:
            what = _CLASS[key]
        op = _u8(buf, p)
        if what == _SCALAR:
            if op == _BININT1:
                rec[row, key] = _u8(buf, p + 1)
                p += 2
            elif op == _BININT2:
                rec[row, key] = _u16(buf, p + 1)
                p += 3
            elif op == _LONG1 and _u8(buf, p + 1) == 8:
                rec[row, key] = _u64(buf, p + 2)
                p += 10
            elif op == _BININT:
                rec[row, key] = _i32(buf, p + 1)
                p += 5
            elif op == _NEWFALSE:
                rec[row, key] = 0
                p += 1
            elif op == _NEWTRUE:
                rec[row, key] = 1
                p += 1
            elif op == _NONE:
                rec[row, key] = NULL
                p += 1
            else:
                break
        elif what == _TEXT:
            p, text = _text(buf, n, p, seed, st, mk, mv, strs, stab)
            rec[row, key] = text
        elif what == _FRAMES:
            p, stack = _stack(
                buf, n, p, seed, st, mk, mv, cont, strs, stab, frames, ftab, stacks, ktab, pool
            )
            rec[row, key] = stack
        elif what == _SIZES:
            p = _sizes(buf, n, p, st, numels, rec, row, key)
        elif what == _DTYPES:
            if op != _EMPTY_LIST or _u8(buf, p + 1) != _MARK:
                break
            p += 2
            mixed = NULL
            rec[row, key] = NULL
            while p > 0 and p + 32 < n and _u8(buf, p) != _APPENDS:
                p, text = _text(buf, n, p, seed, st, mk, mv, strs, stab)
                if rec[row, key] == NULL:
                    rec[row, key] = text
                elif rec[row, key] != text:
                    mixed = 1
            if p < 0 or p + 32 >= n:
                break
            rec[row, _IMIXED + (0 if key == _IDTYPES else 1)] = mixed
            p += 1
        elif what == _PAIR:
            p, text = _text(buf, n, p, seed, st, mk, mv, strs, stab)
            if p < 0 or p + 32 > n:
                break
            rec[row, key] = text
            p, text = _text(buf, n, p, seed, st, mk, mv, strs, stab)
            if p < 0 or _u8(buf, p) != _TUPLE2:
                break
            rec[row, _DESC] = text
            p += 1
        elif op == _BINFLOAT:
            p += 9
        elif op == _BININT1:
            p += 2
        elif op == _NONE or op == _NEWTRUE or op == _NEWFALSE:
            p += 1
        elif op == _BINGET or op == _LONG_BINGET or op == _BINUNICODE:
            p, text = _text(buf, n, p, seed, st, mk, mv, strs, stab)
        else:
            break
        if p < 0:
            break
    st[N_NUMEL] = numels_before
    return -1


@njit(nogil=True, _nrt=False)
def _chunk(target, first, count, st, cont, chunks):  # type: ignore[no-untyped-def]
    """Hang ``heap[first:first+count]`` onto container ``target`` as its next chunk of children."""
    if count == 0:
        return
    c = st[N_CHUNK]
    st[N_CHUNK] = c + 1
    chunks[c, 0] = first
    chunks[c, 1] = count
    chunks[c, 2] = -1
    if cont[target, 1] < 0:
        cont[target, 1] = c
    else:
        chunks[cont[target, 2], 2] = c
    cont[target, 2] = c
    cont[target, 3] += count
    cont[target, 5] = 0


@njit(nogil=True, _nrt=False)
def _collect(base, st, sk, sv, hk, hv):  # type: ignore[no-untyped-def]
    """Move the stack above ``base`` to the heap; returns (first, count)."""
    first = st[N_HEAP]
    count = st[SP] - base
    for i in range(count):
        hk[first + i] = sk[base + i]
        hv[first + i] = sv[base + i]
    st[N_HEAP] = first + count
    st[SP] = base
    return first, count


@njit(nogil=True, _nrt=False)
def _container(kind, st, cont):  # type: ignore[no-untyped-def]
    c = st[N_CONT]
    st[N_CONT] = c + 1
    cont[c, 0] = kind
    cont[c, 1] = -1
    cont[c, 2] = -1
    for j in range(3, CONT):
        cont[c, j] = 0
    return c


@njit(nogil=True, _nrt=False)
def _as_frame(target, st, sk, sv, base, cont, strs, frames, ftab):  # type: ignore[no-untyped-def]
    """Make the empty dict ``target`` a frame if the stack above ``base`` is name, filename, line.

    Returns 1 if so, 0 if it is something else, -1 when the table of frames is full.
    """
    if st[SP] - base != 6 or cont[target, 3] != 0:
        return 0
    name = NULL
    filename = NULL
    line = NULL
    for i in range(3):
        at = base + 2 * i
        if sk[at] != STR:
            return 0
        if sv[at] == _NAME and sk[at + 1] == STR:
            name = sv[at + 1]
        elif sv[at] == _FILE and sk[at + 1] == STR:
            filename = sv[at + 1]
        elif sv[at] == _LINE and sk[at + 1] == INT:
            line = sv[at + 1]
    if name == NULL or filename == NULL or line == NULL:
        return 0
    frame = _intern_frame(name, filename, line, strs, frames, ftab, st)
    if frame < 0:
        return -1
    cont[target, 0] = FRAMEDICT
    cont[target, 6] = frame
    return 1


def _walk(buf, seed, st, sk, sv, marks, mk, mv, cont, chunks, hk, hv,  # type: ignore[no-untyped-def]
          strs, stab, frames, ftab, stacks, ktab, pool, numels, rec, quota):  # fmt: skip
    """Run at most ``quota`` opcodes from ``st[POS]``; why it stopped is in ``st[STATUS]``.

    The caller keeps ``quota`` free places in the stack, the heap, the containers and the chunks
    (an opcode takes one of each at most). ``st[POS]`` is the opcode that stopped the machine.
    """
    n = buf.size
    p = st[POS]
    status = GROW
    reason = 0
    while quota > 0:
        quota -= 1
        if p >= n:
            status = TRUNCATED
            break
        op = _u8(buf, p)
        sp = st[SP]
        # how many operand bytes follow; strings and long integers check their own length
        need = 0
        if op in (_BINGET, _BINPUT, _BININT1, _PROTO, _SHORT_BINUNICODE, _LONG1):
            need = 1
        elif op == _BININT2:
            need = 2
        elif op in (_LONG_BINGET, _LONG_BINPUT, _BININT, _BINUNICODE, _LONG4):
            need = 4
        elif op in (_BINFLOAT, _FRAME, _BINUNICODE8):
            need = 8
        if p + 1 + need > n:
            status = TRUNCATED
            break
        q = p + 1 + need

        if op == _BINGET or op == _LONG_BINGET:
            k = _u8(buf, p + 1) if op == _BINGET else _u32(buf, p + 1)
            if k >= mk.size or mk[k] == UNSET:
                status, reason = DAMAGED, NO_MEMO
                break
            sk[sp] = mk[k]
            sv[sp] = mv[k]
            st[SP] = sp + 1
        elif op == _BINPUT or op == _LONG_BINPUT or op == _MEMOIZE:
            if op == _BINPUT:
                k = _u8(buf, p + 1)
            elif op == _LONG_BINPUT:
                k = _u32(buf, p + 1)
            else:
                k = st[MEMO_NEXT]
            if k >= n:
                # the writers number what they store: no file of n bytes stores n things
                status, reason = DAMAGED, BAD_MEMO
                break
            if sp == 0 or (st[MP] > 0 and marks[st[MP] - 1] == sp):
                status, reason = DAMAGED, UNDERFLOW
                break
            if k >= mk.size:
                st[WANT] = k + 1
                break
            if mk[k] == UNSET:
                st[MEMO_NEXT] += 1
            mk[k] = sk[sp - 1]
            mv[k] = sv[sp - 1]
        elif op == _BININT1:
            sk[sp] = INT
            sv[sp] = _u8(buf, p + 1)
            st[SP] = sp + 1
        elif op == _BININT2:
            sk[sp] = INT
            sv[sp] = _u16(buf, p + 1)
            st[SP] = sp + 1
        elif op == _BININT:
            sk[sp] = INT
            sv[sp] = _i32(buf, p + 1)
            st[SP] = sp + 1
        elif op == _LONG1 or op == _LONG4:
            length = _u8(buf, p + 1) if op == _LONG1 else _u32(buf, p + 1)
            if length > 8:
                status, reason = DAMAGED, LONG_INT
                break
            if q + length > n:
                status = TRUNCATED
                break
            value = 0
            for i in range(length):
                value |= _u8(buf, q + i) << (8 * i)
            if 0 < length < 8 and _u8(buf, q + length - 1) >= 128:
                value -= 1 << (8 * length)
            q += length
            sk[sp] = INT
            sv[sp] = value
            st[SP] = sp + 1
        elif op == _BINUNICODE or op == _SHORT_BINUNICODE or op == _BINUNICODE8:
            if op == _BINUNICODE:
                length = _u32(buf, p + 1)
            elif op == _SHORT_BINUNICODE:
                length = _u8(buf, p + 1)
            else:
                length = _u64(buf, p + 1)
            if length < 0 or length > n - q:
                status = TRUNCATED
                break
            text = _intern_text(buf, seed, q, length, strs, stab, st)
            if text < 0:
                break
            q += length
            sk[sp] = STR
            sv[sp] = text
            st[SP] = sp + 1
        elif op == _NONE or op == _NEWTRUE or op == _NEWFALSE:
            sk[sp] = NONE if op == _NONE else BOOL
            sv[sp] = 1 if op == _NEWTRUE else 0
            st[SP] = sp + 1
        elif op == _BINFLOAT:
            sk[sp] = FLOAT
            sv[sp] = _u64(buf, p + 1)
            st[SP] = sp + 1
        elif op == _MARK:
            if st[MP] >= marks.size:
                status, reason = DAMAGED, TOO_DEEP
                break
            marks[st[MP]] = sp
            st[MP] += 1
        elif op == _EMPTY_LIST or op == _EMPTY_TUPLE or op == _EMPTY_DICT:
            if op == _EMPTY_DICT and q + 32 < n and _u8(buf, q) == _MARK and st[MP] > 0:
                # entries lie in a list: try the short cut, and come back here where it gives up
                first, key = _text(buf, n, q + 1, seed, st, mk, mv, strs, stab)
                if first > 0 and key < _N_WORDS and _CLASS[key] != _OTHER:
                    if (
                        st[N_ROW] >= rec.shape[0]
                        or st[N_POOL] + ROOM > pool.size
                        or st[N_NUMEL] + ROOM > numels.size
                        or 2 * (st[N_STR] + ROOM) > stab.size
                        or 2 * (st[N_FRAME] + ROOM) > ftab.size
                        or 2 * (st[N_STACK] + ROOM) > ktab.size
                    ):
                        break
                    q = _entry(buf, n, q + 1, seed, st, mk, mv, cont, strs, stab, frames, ftab,
                               stacks, ktab, pool, numels, rec)  # fmt: skip
                    if q > 0:
                        sk[sp] = ENTRY
                        sv[sp] = st[N_ROW] - 1
                        st[SP] = sp + 1
                        p = q
                        continue
                    q = p + 1
            kind = LIST
            if op == _EMPTY_DICT:
                kind = DICT
            elif op == _EMPTY_TUPLE:
                kind = TUPLE
            sk[sp] = REF
            sv[sp] = _container(kind, st, cont)
            st[SP] = sp + 1
        elif op == _APPENDS or op == _SETITEMS or op == _TUPLE:
            if st[MP] == 0:
                status, reason = DAMAGED, UNDERFLOW
                break
            base = marks[st[MP] - 1]
            if op == _TUPLE:
                target = _container(TUPLE, st, cont)
            else:
                kind = LIST if op == _APPENDS else DICT
                if base == 0 or (st[MP] > 1 and marks[st[MP] - 2] == base):
                    status, reason = DAMAGED, UNDERFLOW
                    break
                target = sv[base - 1]
                if sk[base - 1] != REF or cont[target, 0] != kind:
                    status, reason = DAMAGED, BAD_TARGET
                    break
                if op == _SETITEMS:
                    if (sp - base) & 1:
                        status, reason = DAMAGED, ODD_ITEMS
                        break
                    made = _as_frame(target, st, sk, sv, base, cont, strs, frames, ftab)
                    if made < 0:
                        break
                    if made == 1:
                        st[SP] = base
            st[MP] -= 1
            first, count = _collect(base, st, sk, sv, hk, hv)
            _chunk(target, first, count, st, cont, chunks)
            if op == _TUPLE:
                sk[base] = REF
                sv[base] = target
                st[SP] = base + 1
        elif op == _APPEND or op == _SETITEM or op == _TUPLE1 or op == _TUPLE2 or op == _TUPLE3:
            count = 1
            if op == _TUPLE2 or op == _SETITEM:
                count = 2
            elif op == _TUPLE3:
                count = 3
            base = sp - count
            floor = marks[st[MP] - 1] if st[MP] > 0 else 0
            if op == _APPEND or op == _SETITEM:
                if base - 1 < floor:
                    status, reason = DAMAGED, UNDERFLOW
                    break
                target = sv[base - 1]
                if sk[base - 1] != REF or cont[target, 0] != (LIST if op == _APPEND else DICT):
                    status, reason = DAMAGED, BAD_TARGET
                    break
                first, count = _collect(base, st, sk, sv, hk, hv)
                _chunk(target, first, count, st, cont, chunks)
            else:
                if base < floor:
                    status, reason = DAMAGED, UNDERFLOW
                    break
                target = _container(TUPLE, st, cont)
                first, count = _collect(base, st, sk, sv, hk, hv)
                _chunk(target, first, count, st, cont, chunks)
                sk[base] = REF
                sv[base] = target
                st[SP] = base + 1
        elif op == _PROTO:
            if _u8(buf, p + 1) > 5:
                status, reason = DAMAGED, PROTOCOL
                break
        elif op == _STOP:
            if sp == 0 or st[MP] > 0:
                status, reason = DAMAGED, UNDERFLOW
            else:
                status = STOPPED
            break
        elif op != _FRAME:
            status = REFUSED
            break
        p = q
    st[POS] = p
    st[STATUS] = status
    st[REASON] = reason


@njit(nogil=True, _nrt=False)
def _numels(target, st, cont, chunks, hk, hv, numels):  # type: ignore[no-untyped-def]
    """Summary of a list of lists of sizes, kept in its container; False when the pool is full."""
    if cont[target, 5] == 1:
        return True
    first = st[N_NUMEL]
    if first + cont[target, 3] > numels.size:
        st[WANT] = cont[target, 3]
        return False
    count = 0
    total = 0
    c = cont[target, 1]
    while c >= 0:
        for i in range(chunks[c, 0], chunks[c, 0] + chunks[c, 1]):
            numel = SATURATED
            inner = hv[i]
            if hk[i] == REF and (cont[inner, 0] == LIST or cont[inner, 0] == TUPLE):
                if cont[inner, 5] != 2:  # product not known yet
                    numel = 1
                    d = cont[inner, 1]
                    while d >= 0:
                        for j in range(chunks[d, 0], chunks[d, 0] + chunks[d, 1]):
                            numel = _times(numel, hv[j] if hk[j] == INT else -1)
                        d = chunks[d, 2]
                    cont[inner, 5] = 2
                    cont[inner, 6] = numel
                numel = cont[inner, 6]
            numels[first + count] = numel
            count += 1
            total = min(total + numel, SATURATED)
        c = chunks[c, 2]
    cont[target, 5] = 1
    cont[target, 6] = total
    cont[target, 7] = count
    cont[target, 8] = first
    if count > 1:
        st[N_NUMEL] = first + count
    return True


@njit(nogil=True, _nrt=False)
def _frames(target, st, cont, chunks, hk, hv, frames, stacks, ktab, pool):  # type: ignore[no-untyped-def]
    """Stack number of a list of frames, kept in its container; False when a table is full."""
    if cont[target, 5] == 3:
        return True
    start = st[N_POOL]
    if start + cont[target, 3] > pool.size:
        st[WANT] = cont[target, 3]
        return False
    count = 0
    c = cont[target, 1]
    while c >= 0:
        for i in range(chunks[c, 0], chunks[c, 0] + chunks[c, 1]):
            if hk[i] == FRAME:
                pool[start + count] = hv[i]
                count += 1
            elif hk[i] == REF and cont[hv[i], 0] == FRAMEDICT:
                pool[start + count] = cont[hv[i], 6]
                count += 1
        c = chunks[c, 2]
    k = _intern_stack(count, frames, stacks, ktab, pool, st)
    if k < 0:
        return False
    cont[target, 5] = 3
    cont[target, 6] = k
    return True


@njit(nogil=True, _nrt=False)
def _fold_entry(target, st, cont, chunks, hk, hv, frames, stacks, ktab, pool, numels, rec):  # type: ignore[no-untyped-def]
    """An entry dict of the machine into the next row: 1 done, 0 no entry, -1 a table is full."""
    row = st[N_ROW]
    if row >= rec.shape[0]:
        return -1
    for j in range(WIDTH):
        rec[row, j] = NULL
    known = 0
    c = cont[target, 1]
    while c >= 0:
        for i in range(chunks[c, 0], chunks[c, 0] + chunks[c, 1] - 1, 2):
            key = hv[i]
            if hk[i] != STR or key >= _N_WORDS or _CLASS[key] == _OTHER:
                continue
            known += 1
            kind = hk[i + 1]
            value = hv[i + 1]
            what = _CLASS[key]
            rec[row, key] = NULL
            if what == _SCALAR:
                if kind == INT or kind == BOOL:
                    rec[row, key] = value
            elif what == _TEXT:
                if kind == STR:
                    rec[row, key] = value
            elif what == _DROP or kind != REF or cont[value, 0] == DICT:
                continue
            elif what == _PAIR:
                d = cont[value, 1]
                if d >= 0 and chunks[d, 1] >= 1 and hk[chunks[d, 0]] == STR:
                    rec[row, key] = hv[chunks[d, 0]]
                if d >= 0 and chunks[d, 1] >= 2 and hk[chunks[d, 0] + 1] == STR:
                    rec[row, _DESC] = hv[chunks[d, 0] + 1]
            elif what == _SIZES:
                if not _numels(value, st, cont, chunks, hk, hv, numels):
                    return -1
                side = 0 if key == _ISIZES else 1
                rec[row, key] = cont[value, 6]
                rec[row, _ITENSORS + side] = cont[value, 7]
                if cont[value, 7] > 1:
                    rec[row, _INUMELS + side] = cont[value, 8]
            elif what == _DTYPES:
                if cont[value, 5] != 4:
                    first = NULL
                    mixed = NULL
                    d = cont[value, 1]
                    while d >= 0:
                        for j in range(chunks[d, 0], chunks[d, 0] + chunks[d, 1]):
                            text = hv[j] if hk[j] == STR else NULL
                            if first == NULL:
                                first = text
                            elif text != first:
                                mixed = 1
                        d = chunks[d, 2]
                    cont[value, 5] = 4
                    cont[value, 6] = first
                    cont[value, 7] = mixed
                rec[row, key] = cont[value, 6]
                rec[row, _IMIXED + (0 if key == _IDTYPES else 1)] = cont[value, 7]
            elif what == _FRAMES:
                if not _frames(value, st, cont, chunks, hk, hv, frames, stacks, ktab, pool):
                    return -1
                rec[row, key] = cont[value, 6]
        c = chunks[c, 2]
    if known < LEAST_KEYS or rec[row, _PROFILING] == NULL:
        return 0
    if cont[target, 4] == 1 and rec[row, _IS_P2P] == NULL:
        return 0
    st[N_ROW] = row + 1
    return 1


def _fold(st, sk, sv, marks, cont, chunks, hk, hv, frames, stacks, ktab, pool, numels, rec, order):  # type: ignore[no-untyped-def]
    """Put the rows of the list of entries in order, folding those that took no short cut.

    First closes what was open where the bytes ended: items go to the container below their mark.
    An entry that was open counts only if its last key, ``is_p2p``, is there. ``st[STATUS]`` is
    ``GROW`` where a table is full (call again with a larger one), else ``STOPPED``.
    """
    while st[MP] > 0:
        st[MP] -= 1
        base = marks[st[MP]]
        count = st[SP] - base
        target = sv[base - 1] if base > 0 else 0
        if base == 0 or sk[base - 1] != REF or cont[target, 0] > DICT:
            st[SP] = base
            continue
        if cont[target, 0] == DICT:
            st[SP] -= count & 1
            cont[target, 4] = 1
        first, count = _collect(base, st, sk, sv, hk, hv)
        _chunk(target, first, count, st, cont, chunks)
    st[STATUS] = STOPPED
    entries = -1
    if st[SP] > 0 and sk[0] == REF:
        root = sv[0]
        if cont[root, 0] == LIST:
            entries = root
        elif cont[root, 0] == DICT:
            c = cont[root, 1]
            while c >= 0:
                for i in range(chunks[c, 0], chunks[c, 0] + chunks[c, 1] - 1, 2):
                    if hk[i] == STR and hv[i] == _ENTRIES_KEY and hk[i + 1] == REF:
                        entries = hv[i + 1] if cont[hv[i + 1], 0] == LIST else -1
                c = chunks[c, 2]
    if entries < 0:
        return
    if st[CHUNK_AT] == -1:
        st[CHUNK_AT] = cont[entries, 1]
    while st[CHUNK_AT] >= 0:
        c = st[CHUNK_AT]
        while st[CHILD_AT] < chunks[c, 1]:
            i = chunks[c, 0] + st[CHILD_AT]
            if st[N_ORDER] >= order.size:
                st[STATUS] = GROW
                return
            # the same entry twice is not something a recorder writes: it counts once, or a few
            # fetched bytes could stand for gigabytes of table
            if hk[i] == ENTRY and rec[hv[i], _USED] == NULL and rec[hv[i], _PROFILING] != NULL:
                rec[hv[i], _USED] = 1
                order[st[N_ORDER]] = hv[i]
                st[N_ORDER] += 1
            elif hk[i] == REF and cont[hv[i], 0] == DICT and cont[hv[i], 5] != 5:
                made = _fold_entry(
                    hv[i], st, cont, chunks, hk, hv, frames, stacks, ktab, pool, numels, rec
                )
                if made < 0:
                    st[STATUS] = GROW
                    return
                cont[hv[i], 5] = 5
                if made == 1:
                    order[st[N_ORDER]] = st[N_ROW] - 1
                    st[N_ORDER] += 1
                else:
                    st[BAD_ENTRIES] += 1
            else:
                st[BAD_ENTRIES] += 1
            st[CHILD_AT] += 1
        st[CHILD_AT] = 0
        st[CHUNK_AT] = chunks[c, 2] if chunks[c, 2] >= 0 else -2


def _rehash(rows, count, table):  # type: ignore[no-untyped-def]
    """Fill the hash ``table`` with the first ``count`` rows; their last column is the hash."""
    last = rows.shape[1] - 1
    mask = table.size - 1
    for i in range(table.size):
        table[i] = -1
    for k in range(count):
        slot = rows[k, last] & mask
        while table[slot] >= 0:
            slot = (slot + 1) & mask
        table[slot] = k


_bytes = types.Array(types.uint8, 1, "C", readonly=True)
_b1, _i1, _i4 = types.uint8[::1], types.int64[::1], types.int32[::1]
_i2 = types.int64[:, ::1]

_compile = njit(
    types.void(_bytes, _bytes, _i1, _b1, _i1, _i1, _b1, _i1, _i2, _i2, _b1, _i1, _i2, _i4, _i2, _i4,
               _i2, _i4, _i4, _i1, _i2, types.int64),
    nogil=True, _nrt=False, cache=True,
)  # fmt: skip
walk: Any = _compile(_walk)
_compile_fold = njit(
    types.void(_i1, _b1, _i1, _i1, _i2, _i2, _b1, _i1, _i2, _i2, _i4, _i4, _i1, _i2, _i1),
    nogil=True, _nrt=False, cache=True,
)  # fmt: skip
fold: Any = _compile_fold(_fold)
rehash: Any = njit(types.void(_i2, types.int64, _i4), nogil=True, _nrt=False, cache=True)(_rehash)
