"""Kernels behind :mod:`dl2gpu.trace.pickle_columns`: a pickle machine over integers.

The machine knows the opcodes that a Flight Recorder dump can hold (FORMATS.md 2.4) and nothing
else: no opcode that imports, calls or builds. A value is a pair (kind, payload): numbers carry
themselves, strings the number of an interned string, lists, tuples and dicts the number of a
container whose children lie in a heap of such pairs. Nothing is allocated here: when a table is
full the machine stops with ``GROW`` and its whole state in ``st``; the caller enlarges the table
and calls again. So memory follows what has really been read, whatever numbers a file contains.

Entry dicts in the layout of PyTorch's own writer take a short cut (:mod:`pickle_entry`): they go
straight into a row of ``rec``, with neither stack nor heap. Whatever the short cut does not
expect is left to the machine, which starts again at the same place; :func:`fold`
(:mod:`pickle_fold`) turns the machine's entry dicts into the same rows afterwards.
"""

from __future__ import annotations

from dl2gpu.engine.native import Bytes, Int32s, Int64Rows, Int64s, UInt8s, helper, kernel
from dl2gpu.trace import pickle_opcodes as opcode
from dl2gpu.trace.pickle_entry import entry_at, text_at
from dl2gpu.trace.pickle_fold import fold_entries as fold
from dl2gpu.trace.pickle_tables import (
    BAD_MEMO,
    BAD_TARGET,
    BOOL,
    CONT,
    DAMAGED,
    DICT,
    ENTRY,
    FLOAT,
    FRAMEDICT,
    GROW,
    INT,
    K_FILE,
    K_LINE,
    K_NAME,
    KEY_CLASS,
    LIST,
    LONG_INT,
    MEMO_NEXT,
    MP,
    N_CONT,
    N_FRAME,
    N_NUMEL,
    N_POOL,
    N_ROW,
    N_STACK,
    N_STR,
    N_WORDS,
    NO_MEMO,
    NONE,
    NULL,
    ODD_ITEMS,
    OTHER,
    POS,
    PROTOCOL,
    REASON,
    REF,
    REFUSED,
    ROOM,
    SP,
    STATUS,
    STOPPED,
    STR,
    TOO_DEEP,
    TRUNCATED,
    TUPLE,
    UNDERFLOW,
    UNSET,
    WANT,
    add_chunk,
    collect,
    i32,
    intern_frame,
    intern_text,
    u8,
    u16,
    u32,
    u64,
)

__all__ = ["fold", "rehash", "walk"]


@helper()
def _container(kind, st, cont):  # type: ignore[no-untyped-def]
    c = st[N_CONT]
    st[N_CONT] = c + 1
    cont[c, 0] = kind
    cont[c, 1] = -1
    cont[c, 2] = -1
    for j in range(3, CONT):
        cont[c, j] = 0
    return c


@helper()
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
        if sv[at] == K_NAME and sk[at + 1] == STR:
            name = sv[at + 1]
        elif sv[at] == K_FILE and sk[at + 1] == STR:
            filename = sv[at + 1]
        elif sv[at] == K_LINE and sk[at + 1] == INT:
            line = sv[at + 1]
    if name == NULL or filename == NULL or line == NULL:
        return 0
    frame = intern_frame(name, filename, line, strs, frames, ftab, st)
    if frame < 0:
        return -1
    cont[target, 0] = FRAMEDICT
    cont[target, 6] = frame
    return 1


@kernel
def walk(
    buf: Bytes, seed: Bytes, st: Int64s, sk: UInt8s, sv: Int64s, marks: Int64s, mk: UInt8s,
    mv: Int64s, cont: Int64Rows, chunks: Int64Rows, hk: UInt8s, hv: Int64s, strs: Int64Rows,
    stab: Int32s, frames: Int64Rows, ftab: Int32s, stacks: Int64Rows, ktab: Int32s, pool: Int32s,
    numels: Int64s, rec: Int64Rows, quota: int,
) -> None:  # fmt: skip
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
        op = u8(buf, p)
        sp = st[SP]
        need = opcode.OPERANDS[op]
        if p + 1 + need > n:
            status = TRUNCATED
            break
        q = p + 1 + need

        if op == opcode.BINGET or op == opcode.LONG_BINGET:
            k = u8(buf, p + 1) if op == opcode.BINGET else u32(buf, p + 1)
            if k >= mk.size or mk[k] == UNSET:
                status, reason = DAMAGED, NO_MEMO
                break
            sk[sp] = mk[k]
            sv[sp] = mv[k]
            st[SP] = sp + 1
        elif op == opcode.BINPUT or op == opcode.LONG_BINPUT or op == opcode.MEMOIZE:
            if op == opcode.BINPUT:
                k = u8(buf, p + 1)
            elif op == opcode.LONG_BINPUT:
                k = u32(buf, p + 1)
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
        elif op == opcode.BININT1:
            sk[sp] = INT
            sv[sp] = u8(buf, p + 1)
            st[SP] = sp + 1
        elif op == opcode.BININT2:
            sk[sp] = INT
            sv[sp] = u16(buf, p + 1)
            st[SP] = sp + 1
        elif op == opcode.BININT:
            sk[sp] = INT
            sv[sp] = i32(buf, p + 1)
            st[SP] = sp + 1
        elif op == opcode.LONG1 or op == opcode.LONG4:
            length = u8(buf, p + 1) if op == opcode.LONG1 else u32(buf, p + 1)
            if length > 8:
                status, reason = DAMAGED, LONG_INT
                break
            if q + length > n:
                status = TRUNCATED
                break
            value = 0
            for i in range(length):
                value |= u8(buf, q + i) << (8 * i)
            if 0 < length < 8 and u8(buf, q + length - 1) >= 128:
                value -= 1 << (8 * length)
            q += length
            sk[sp] = INT
            sv[sp] = value
            st[SP] = sp + 1
        elif op == opcode.BINUNICODE or op == opcode.SHORT_BINUNICODE or op == opcode.BINUNICODE8:
            if op == opcode.BINUNICODE:
                length = u32(buf, p + 1)
            elif op == opcode.SHORT_BINUNICODE:
                length = u8(buf, p + 1)
            else:
                length = u64(buf, p + 1)
            if length < 0 or length > n - q:
                status = TRUNCATED
                break
            text = intern_text(buf, seed, q, length, strs, stab, st)
            if text < 0:
                break
            q += length
            sk[sp] = STR
            sv[sp] = text
            st[SP] = sp + 1
        elif op == opcode.NONE or op == opcode.NEWTRUE or op == opcode.NEWFALSE:
            sk[sp] = NONE if op == opcode.NONE else BOOL
            sv[sp] = 1 if op == opcode.NEWTRUE else 0
            st[SP] = sp + 1
        elif op == opcode.BINFLOAT:
            sk[sp] = FLOAT
            sv[sp] = u64(buf, p + 1)
            st[SP] = sp + 1
        elif op == opcode.MARK:
            if st[MP] >= marks.size:
                status, reason = DAMAGED, TOO_DEEP
                break
            marks[st[MP]] = sp
            st[MP] += 1
        elif op == opcode.EMPTY_LIST or op == opcode.EMPTY_TUPLE or op == opcode.EMPTY_DICT:
            if op == opcode.EMPTY_DICT and q + 32 < n and u8(buf, q) == opcode.MARK and st[MP] > 0:
                # entries lie in a list: try the short cut, and come back here where it gives up
                first, key = text_at(buf, n, q + 1, seed, st, mk, mv, strs, stab)
                if first > 0 and key < N_WORDS and KEY_CLASS[key] != OTHER:
                    if (
                        st[N_ROW] >= rec.shape[0]
                        or st[N_POOL] + ROOM > pool.size
                        or st[N_NUMEL] + ROOM > numels.size
                        or 2 * (st[N_STR] + ROOM) > stab.size
                        or 2 * (st[N_FRAME] + ROOM) > ftab.size
                        or 2 * (st[N_STACK] + ROOM) > ktab.size
                    ):
                        break
                    q = entry_at(buf, n, q + 1, seed, st, mk, mv, cont, strs, stab, frames, ftab,
                               stacks, ktab, pool, numels, rec)  # fmt: skip
                    if q > 0:
                        sk[sp] = ENTRY
                        sv[sp] = st[N_ROW] - 1
                        st[SP] = sp + 1
                        p = q
                        continue
                    q = p + 1
            kind = LIST
            if op == opcode.EMPTY_DICT:
                kind = DICT
            elif op == opcode.EMPTY_TUPLE:
                kind = TUPLE
            sk[sp] = REF
            sv[sp] = _container(kind, st, cont)
            st[SP] = sp + 1
        elif op == opcode.APPENDS or op == opcode.SETITEMS or op == opcode.TUPLE:
            if st[MP] == 0:
                status, reason = DAMAGED, UNDERFLOW
                break
            base = marks[st[MP] - 1]
            if op == opcode.TUPLE:
                target = _container(TUPLE, st, cont)
            else:
                kind = LIST if op == opcode.APPENDS else DICT
                if base == 0 or (st[MP] > 1 and marks[st[MP] - 2] == base):
                    status, reason = DAMAGED, UNDERFLOW
                    break
                target = sv[base - 1]
                if sk[base - 1] != REF or cont[target, 0] != kind:
                    status, reason = DAMAGED, BAD_TARGET
                    break
                if op == opcode.SETITEMS:
                    if (sp - base) & 1:
                        status, reason = DAMAGED, ODD_ITEMS
                        break
                    made = _as_frame(target, st, sk, sv, base, cont, strs, frames, ftab)
                    if made < 0:
                        break
                    if made == 1:
                        st[SP] = base
            st[MP] -= 1
            first, count = collect(base, st, sk, sv, hk, hv)
            add_chunk(target, first, count, st, cont, chunks)
            if op == opcode.TUPLE:
                sk[base] = REF
                sv[base] = target
                st[SP] = base + 1
        elif (
            op == opcode.APPEND
            or op == opcode.SETITEM
            or op == opcode.TUPLE1
            or op == opcode.TUPLE2
            or op == opcode.TUPLE3
        ):
            count = 1
            if op == opcode.TUPLE2 or op == opcode.SETITEM:
                count = 2
            elif op == opcode.TUPLE3:
                count = 3
            base = sp - count
            floor = marks[st[MP] - 1] if st[MP] > 0 else 0
            if op == opcode.APPEND or op == opcode.SETITEM:
                if base - 1 < floor:
                    status, reason = DAMAGED, UNDERFLOW
                    break
                target = sv[base - 1]
                kind = LIST if op == opcode.APPEND else DICT
                if sk[base - 1] != REF or cont[target, 0] != kind:
                    status, reason = DAMAGED, BAD_TARGET
                    break
                first, count = collect(base, st, sk, sv, hk, hv)
                add_chunk(target, first, count, st, cont, chunks)
            else:
                if base < floor:
                    status, reason = DAMAGED, UNDERFLOW
                    break
                target = _container(TUPLE, st, cont)
                first, count = collect(base, st, sk, sv, hk, hv)
                add_chunk(target, first, count, st, cont, chunks)
                sk[base] = REF
                sv[base] = target
                st[SP] = base + 1
        elif op == opcode.PROTO:
            if u8(buf, p + 1) > 5:
                status, reason = DAMAGED, PROTOCOL
                break
        elif op == opcode.STOP:
            if sp == 0 or st[MP] > 0:
                status, reason = DAMAGED, UNDERFLOW
            else:
                status = STOPPED
            break
        elif op != opcode.FRAME:
            status = REFUSED
            break
        p = q
    st[POS] = p
    st[STATUS] = status
    st[REASON] = reason


@kernel
def rehash(rows: Int64Rows, count: int, table: Int32s) -> None:
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
