"""Words, numbers and tables shared by the compiled parts of the pickle decoder.

Strings, frames and stacks are interned: equal ones get one number, by open-addressing hash tables
whose key is secret, so that no file can be made to collide in them. State lies in the array
``st``; nothing is allocated here (see :mod:`pickle_kernel`).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dl2gpu.engine.native import deferred, helper

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
SCALAR, TEXT, PAIR, SIZES, DTYPES, FRAMES, DROP, OTHER = range(8)
KEY_CLASS: Final = np.array(
    [SCALAR, SCALAR, PAIR, SCALAR, SCALAR, SCALAR, SCALAR, TEXT, SCALAR, SCALAR, DROP,
     SIZES, DTYPES, SIZES, DTYPES, TEXT, SCALAR, SCALAR, SCALAR, SCALAR, SCALAR, FRAMES,
     TEXT, DROP] + [OTHER] * (len(KEYWORDS) - 24),
    dtype=np.int64,
)  # fmt: skip
N_WORDS: Final = len(KEYWORDS)
_K = {word: i for i, word in enumerate(KEYWORDS)}
K_ISIZES, K_IDTYPES, K_PROFILING, K_IS_P2P, K_NAME, K_FILE, K_LINE, K_ENTRIES = (
    _K["input_sizes"], _K["input_dtypes"], _K["profiling_name"], _K["is_p2p"], _K["name"],
    _K["filename"], _K["line"], _K["entries"],
)  # fmt: skip
C_DESC, C_ITENSORS, C_INUMELS, C_IMIXED, C_USED = 24, 25, 27, 29, 31


def _loader(bits: int, signed: bool = False) -> Any:
    """Unaligned little-endian load of ``bits`` bits from a byte array, without index wraparound."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

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


u8, u16, u32, u64 = (deferred(_loader, bits) for bits in (8, 16, 32, 64))
i32 = deferred(_loader, 32, True)


@helper()
def mix(h: int, value: int, secret: int) -> int:
    """One step of the keyed hash."""
    h = (h ^ value) * secret
    return h ^ ((h >> 32) & 0xFFFFFFFF)


@helper()
def intern_text(buf, seed, off, length, strs, table, st):  # type: ignore[no-untyped-def]
    """Number of the string ``buf[off:off+length]``; -1 when the table is full."""
    secret = st[SECRET]
    h = mix(secret, length, secret)
    p = off
    end = off + length
    while p + 8 <= end:
        h = mix(h, u64(buf, p), secret)
        p += 8
    tail = 0
    while p < end:
        tail = (tail << 8) | u8(buf, p)
        p += 1
    h = mix(mix(h, tail, secret), 0, secret)
    mask = table.size - 1
    slot = h & mask
    while True:
        k = table[slot]
        if k < 0:
            break
        if strs[k, 2] == h and strs[k, 1] == length:
            a = strs[k, 0]
            same = True
            if k < N_WORDS:
                for i in range(length):
                    if u8(seed, a + i) != u8(buf, off + i):
                        same = False
                        break
            else:
                for i in range(length):
                    if u8(buf, a + i) != u8(buf, off + i):
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


@helper()
def intern_frame(name, filename, line, strs, frames, table, st):  # type: ignore[no-untyped-def]
    """Number of the frame (string number, string number, line); -1 when the table is full.

    Its hash is one of the content, not of the numbers, and so the same in every file.
    """
    secret = st[SECRET]
    h = mix(mix(mix(secret, strs[name, 2], secret), strs[filename, 2], secret), line, secret)
    h = mix(h, 0, secret)
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


@helper()
def intern_stack(count, frames, stacks, table, pool, st):  # type: ignore[no-untyped-def]
    """Number of the stack whose ``count`` frames lie at the end of ``pool``; -1 when full.

    The frames stay in the pool (``N_POOL`` moves on) only where the stack is new.
    """
    secret = st[SECRET]
    start = st[N_POOL]
    h = mix(secret, count, secret)
    for i in range(count):
        h = mix(h, frames[pool[start + i], 3], secret)
    h = mix(h, 0, secret)
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


@helper(forceinline=True)
def times(a, b):  # type: ignore[no-untyped-def]
    """Product of two sizes, saturated; negative sizes count as unknown (saturated)."""
    if 0 <= a < 1 << 31 and 0 <= b < 1 << 31:
        return a * b
    if a == 0 or b == 0:
        return 0
    if a < 0 or b < 0 or a > SATURATED // b:
        return SATURATED
    return a * b


@helper()
def add_chunk(target, first, count, st, cont, chunks):  # type: ignore[no-untyped-def]
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


@helper()
def collect(base, st, sk, sv, hk, hv):  # type: ignore[no-untyped-def]
    """Move the stack above ``base`` to the heap; returns (first, count)."""
    first = st[N_HEAP]
    count = st[SP] - base
    for i in range(count):
        hk[first + i] = sk[base + i]
        hv[first + i] = sv[base + i]
    st[N_HEAP] = first + count
    st[SP] = base
    return first, count
