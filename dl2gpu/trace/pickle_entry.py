"""Short cut of the pickle decoder: an entry in PyTorch's own layout, straight into a row.

The writer always emits an entry the same way (FORMATS.md 2.4): MARK, key and value in turn,
SETITEMS, with keys and repeated strings fetched from the memo. Such an entry is read by descent,
with neither stack nor heap. Anything else gives -1, and the machine of :mod:`pickle_kernel` reads
the entry again from its start.
"""

from __future__ import annotations

from dl2gpu.engine.native import helper
from dl2gpu.trace import pickle_opcodes as opcode
from dl2gpu.trace.pickle_tables import (
    C_DESC,
    C_IMIXED,
    C_INUMELS,
    C_ITENSORS,
    DTYPES,
    FRAME,
    FRAMEDICT,
    FRAMES,
    K_FILE,
    K_IDTYPES,
    K_ISIZES,
    K_LINE,
    K_NAME,
    KEY_CLASS,
    MEMO_NEXT,
    N_NUMEL,
    N_POOL,
    N_ROW,
    N_WORDS,
    NULL,
    OTHER,
    PAIR,
    REF,
    SATURATED,
    SCALAR,
    SIZES,
    STR,
    TEXT,
    UNSET,
    WIDTH,
    i32,
    intern_frame,
    intern_stack,
    intern_text,
    times,
    u8,
    u16,
    u32,
    u64,
)


@helper(forceinline=True)
def text_at(buf, n, p, seed, st, mk, mv, strs, stab):  # type: ignore[no-untyped-def]
    """String at ``p``, fetched or new and memoised: (position after, number); -1 = unexpected."""
    op = u8(buf, p)
    if op == opcode.BINGET or op == opcode.LONG_BINGET:
        if op == opcode.BINGET:
            k = u8(buf, p + 1)
            p += 2
        else:
            k = u32(buf, p + 1)
            p += 5
        if k >= mk.size or mk[k] != STR:
            return -1, 0
        return p, mv[k]
    if op != opcode.BINUNICODE:
        return -1, 0
    length = u32(buf, p + 1)
    p += 5
    if p + length + 16 > n:
        return -1, 0
    text = intern_text(buf, seed, p, length, strs, stab, st)
    if text < 0:
        return -1, 0
    p = _put(buf, p + length, st, mk, mv, STR, text)
    return p, text


@helper(forceinline=True)
def _put(buf, p, st, mk, mv, kind, value):  # type: ignore[no-untyped-def]
    """Position after an optional BINPUT of (kind, value) at ``p``; -1 = beyond the table."""
    op = u8(buf, p)
    if op == opcode.BINPUT:
        k = u8(buf, p + 1)
        p += 2
    elif op == opcode.LONG_BINPUT:
        k = u32(buf, p + 1)
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


@helper(forceinline=True)
def _sizes(buf, n, p, st, numels, rec, row, key):  # type: ignore[no-untyped-def]
    """list[list[int]] at ``p`` into ``rec``: total elements, tensors, elements of each tensor."""
    if u8(buf, p) != opcode.EMPTY_LIST or u8(buf, p + 1) != opcode.MARK:
        return -1
    p += 2
    total = 0
    count = 0
    first = st[N_NUMEL]
    while p + 32 < n:
        op = u8(buf, p)
        if op == opcode.EMPTY_LIST and u8(buf, p + 1) == opcode.MARK:
            p += 2
            numel = 1
            while p + 32 < n:
                op = u8(buf, p)
                if op == opcode.BININT1:
                    numel = times(numel, u8(buf, p + 1))
                    p += 2
                elif op == opcode.BININT2:
                    numel = times(numel, u16(buf, p + 1))
                    p += 3
                elif op == opcode.BININT:
                    numel = times(numel, i32(buf, p + 1))
                    p += 5
                elif op == opcode.LONG1 and u8(buf, p + 1) == 8:
                    numel = times(numel, u64(buf, p + 2))
                    p += 10
                else:
                    break
            if u8(buf, p) != opcode.APPENDS:
                return -1
            p += 1
            if first + count >= numels.size:
                return -1
            numels[first + count] = numel
            count += 1
            total = min(total + numel, SATURATED)
        elif op == opcode.APPENDS:
            side = 0 if key == K_ISIZES else 1
            rec[row, key] = total
            rec[row, C_ITENSORS + side] = count
            if count > 1:
                rec[row, C_INUMELS + side] = first
                st[N_NUMEL] = first + count
            return p + 1
        else:
            return -1
    return -1


@helper(forceinline=True)
def _stack(buf, n, p, seed, st, mk, mv, cont, strs, stab,  # type: ignore[no-untyped-def]
           frames, ftab, stacks, ktab, pool):  # fmt: skip
    """List of frames at ``p``: (position after it, stack number); -1 = unexpected."""
    if u8(buf, p) != opcode.EMPTY_LIST or u8(buf, p + 1) != opcode.MARK:
        return -1, 0
    p += 2
    start = st[N_POOL]
    count = 0
    while p + 32 < n and start + count < pool.size:
        op = u8(buf, p)
        if op == opcode.BINGET or op == opcode.LONG_BINGET:
            if op == opcode.BINGET:
                k = u8(buf, p + 1)
                p += 2
            else:
                k = u32(buf, p + 1)
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
        elif op == opcode.APPENDS:
            k = intern_stack(count, frames, stacks, ktab, pool, st)
            return (p + 1, k) if k >= 0 else (-1, 0)
        elif op == opcode.EMPTY_DICT and u8(buf, p + 1) == opcode.MARK:
            p += 2
            name = NULL
            filename = NULL
            line = NULL
            while p + 32 < n and u8(buf, p) != opcode.SETITEMS:
                p, key = text_at(buf, n, p, seed, st, mk, mv, strs, stab)
                if p < 0 or p + 32 > n:
                    return -1, 0
                if key == K_NAME:
                    p, name = text_at(buf, n, p, seed, st, mk, mv, strs, stab)
                elif key == K_FILE:
                    p, filename = text_at(buf, n, p, seed, st, mk, mv, strs, stab)
                elif key == K_LINE:
                    op = u8(buf, p)
                    if op == opcode.BININT2:
                        line = u16(buf, p + 1)
                        p += 3
                    elif op == opcode.BININT1:
                        line = u8(buf, p + 1)
                        p += 2
                    elif op == opcode.BININT:
                        line = i32(buf, p + 1)
                        p += 5
                    else:
                        return -1, 0
                else:
                    return -1, 0
                if p < 0:
                    return -1, 0
            if p + 32 > n or name == NULL or filename == NULL or line == NULL:
                return -1, 0
            frame = intern_frame(name, filename, line, strs, frames, ftab, st)
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


@helper(forceinline=True)
def entry_at(buf, n, p, seed, st, mk, mv, cont, strs, stab,  # type: ignore[no-untyped-def]
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
        op = u8(buf, p)
        if op == opcode.BINGET:
            k = u8(buf, p + 1)
            if mk[k] != STR:
                break
            key = mv[k]
            p += 2
        elif op == opcode.SETITEMS:
            st[N_ROW] = row + 1
            return p + 1
        else:
            p, key = text_at(buf, n, p, seed, st, mk, mv, strs, stab)
            if p < 0 or p + 32 > n:
                break
        what = OTHER
        if key < N_WORDS:
            what = KEY_CLASS[key]
        op = u8(buf, p)
        if what == SCALAR:
            if op == opcode.BININT1:
                rec[row, key] = u8(buf, p + 1)
                p += 2
            elif op == opcode.BININT2:
                rec[row, key] = u16(buf, p + 1)
                p += 3
            elif op == opcode.LONG1 and u8(buf, p + 1) == 8:
                rec[row, key] = u64(buf, p + 2)
                p += 10
            elif op == opcode.BININT:
                rec[row, key] = i32(buf, p + 1)
                p += 5
            elif op == opcode.NEWFALSE:
                rec[row, key] = 0
                p += 1
            elif op == opcode.NEWTRUE:
                rec[row, key] = 1
                p += 1
            elif op == opcode.NONE:
                rec[row, key] = NULL
                p += 1
            else:
                break
        elif what == TEXT:
            p, text = text_at(buf, n, p, seed, st, mk, mv, strs, stab)
            rec[row, key] = text
        elif what == FRAMES:
            p, stack = _stack(
                buf, n, p, seed, st, mk, mv, cont, strs, stab, frames, ftab, stacks, ktab, pool
            )
            rec[row, key] = stack
        elif what == SIZES:
            p = _sizes(buf, n, p, st, numels, rec, row, key)
        elif what == DTYPES:
            if op != opcode.EMPTY_LIST or u8(buf, p + 1) != opcode.MARK:
                break
            p += 2
            mixed = NULL
            rec[row, key] = NULL
            while p > 0 and p + 32 < n and u8(buf, p) != opcode.APPENDS:
                p, text = text_at(buf, n, p, seed, st, mk, mv, strs, stab)
                if rec[row, key] == NULL:
                    rec[row, key] = text
                elif rec[row, key] != text:
                    mixed = 1
            if p < 0 or p + 32 >= n:
                break
            rec[row, C_IMIXED + (0 if key == K_IDTYPES else 1)] = mixed
            p += 1
        elif what == PAIR:
            p, text = text_at(buf, n, p, seed, st, mk, mv, strs, stab)
            if p < 0 or p + 32 > n:
                break
            rec[row, key] = text
            p, text = text_at(buf, n, p, seed, st, mk, mv, strs, stab)
            if p < 0 or u8(buf, p) != opcode.TUPLE2:
                break
            rec[row, C_DESC] = text
            p += 1
        elif op == opcode.BINFLOAT:
            p += 9
        elif op == opcode.BININT1:
            p += 2
        elif op == opcode.NONE or op == opcode.NEWTRUE or op == opcode.NEWFALSE:
            p += 1
        elif op == opcode.BINGET or op == opcode.LONG_BINGET or op == opcode.BINUNICODE:
            p, text = text_at(buf, n, p, seed, st, mk, mv, strs, stab)
        else:
            break
        if p < 0:
            break
    st[N_NUMEL] = numels_before
    return -1
