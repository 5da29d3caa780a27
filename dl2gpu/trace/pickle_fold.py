"""Last step of the pickle decoder: the machine's entry dicts to rows, all rows in order.

Source: FORMATS.md 2.4 (salvage of files that were cut short).
"""

from __future__ import annotations

from dl2gpu.engine.native import Int32s, Int64Rows, Int64s, UInt8s, helper, kernel
from dl2gpu.trace.pickle_tables import (
    BAD_ENTRIES,
    BOOL,
    C_DESC,
    C_IMIXED,
    C_INUMELS,
    C_ITENSORS,
    C_USED,
    CHILD_AT,
    CHUNK_AT,
    DICT,
    DROP,
    DTYPES,
    ENTRY,
    FRAME,
    FRAMEDICT,
    FRAMES,
    GROW,
    INT,
    K_ENTRIES,
    K_IDTYPES,
    K_IS_P2P,
    K_ISIZES,
    K_PROFILING,
    KEY_CLASS,
    LEAST_KEYS,
    LIST,
    MP,
    N_NUMEL,
    N_ORDER,
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
    SP,
    STATUS,
    STOPPED,
    STR,
    TEXT,
    TUPLE,
    WANT,
    WIDTH,
    add_chunk,
    collect,
    intern_stack,
    times,
)


@helper()
def _numels(target, st, cont, chunks, hk, hv, numels):  # type: ignore[no-untyped-def]
    """Summary of a list of lists of sizes, kept in its container; False when the pool is full."""
    if cont[target, 5] != 0:
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
                if cont[inner, 5] == 0:  # product not known yet
                    numel = 1
                    d = cont[inner, 1]
                    while d >= 0:
                        for j in range(chunks[d, 0], chunks[d, 0] + chunks[d, 1]):
                            numel = times(numel, hv[j] if hk[j] == INT else -1)
                        d = chunks[d, 2]
                    cont[inner, 5] = 2
                    cont[inner, 6] = numel
                numel = cont[inner, 6] if cont[inner, 5] == 2 else SATURATED
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


@helper()
def _frames(target, st, cont, chunks, hk, hv, frames, stacks, ktab, pool):  # type: ignore[no-untyped-def]
    """Stack number of a list of frames, kept in its container; False when a table is full."""
    if cont[target, 5] != 0:
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
    k = intern_stack(count, frames, stacks, ktab, pool, st)
    if k < 0:
        return False
    cont[target, 5] = 3
    cont[target, 6] = k
    return True


@helper()
def _fold_entry(target, st, cont, chunks, hk, hv,  # type: ignore[no-untyped-def]
                frames, stacks, ktab, pool, numels, rec):  # fmt: skip
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
            if hk[i] != STR or key >= N_WORDS or KEY_CLASS[key] == OTHER:
                continue
            known += 1
            kind = hk[i + 1]
            value = hv[i + 1]
            what = KEY_CLASS[key]
            rec[row, key] = NULL
            if what == SCALAR:
                if kind == INT or kind == BOOL:
                    rec[row, key] = value
            elif what == TEXT:
                if kind == STR:
                    rec[row, key] = value
            elif what == DROP or kind != REF or cont[value, 0] == DICT:
                continue
            elif what != FRAMES and cont[value, 3] == 0:
                # of a list without members there is nothing to sum up, or to remember
                if what == SIZES:
                    rec[row, key] = 0
                    rec[row, C_ITENSORS + (0 if key == K_ISIZES else 1)] = 0
            elif what == PAIR:
                d = cont[value, 1]
                if d >= 0 and chunks[d, 1] >= 1 and hk[chunks[d, 0]] == STR:
                    rec[row, key] = hv[chunks[d, 0]]
                if d >= 0 and chunks[d, 1] >= 2 and hk[chunks[d, 0] + 1] == STR:
                    rec[row, C_DESC] = hv[chunks[d, 0] + 1]
            elif what == SIZES:
                if not _numels(value, st, cont, chunks, hk, hv, numels):
                    return -1
                side = 0 if key == K_ISIZES else 1
                if cont[value, 5] == 1:
                    rec[row, key] = cont[value, 6]
                    rec[row, C_ITENSORS + side] = cont[value, 7]
                    if cont[value, 7] > 1:
                        rec[row, C_INUMELS + side] = cont[value, 8]
            elif what == DTYPES:
                if cont[value, 5] == 0:
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
                if cont[value, 5] == 4:
                    rec[row, key] = cont[value, 6]
                    rec[row, C_IMIXED + (0 if key == K_IDTYPES else 1)] = cont[value, 7]
            elif what == FRAMES:
                if not _frames(value, st, cont, chunks, hk, hv, frames, stacks, ktab, pool):
                    return -1
                if cont[value, 5] == 3:
                    rec[row, key] = cont[value, 6]
        c = chunks[c, 2]
    if known < LEAST_KEYS or rec[row, K_PROFILING] == NULL:
        return 0
    if cont[target, 4] == 1 and rec[row, K_IS_P2P] == NULL:
        return 0
    st[N_ROW] = row + 1
    return 1


@kernel
def fold_entries(
    st: Int64s, sk: UInt8s, sv: Int64s, marks: Int64s, cont: Int64Rows, chunks: Int64Rows,
    hk: UInt8s, hv: Int64s, frames: Int64Rows, stacks: Int64Rows, ktab: Int32s, pool: Int32s,
    numels: Int64s, rec: Int64Rows, order: Int64s,
) -> None:  # fmt: skip
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
        first, count = collect(base, st, sk, sv, hk, hv)
        add_chunk(target, first, count, st, cont, chunks)
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
                    if hk[i] == STR and hv[i] == K_ENTRIES and hk[i + 1] == REF:
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
            if hk[i] == ENTRY and rec[hv[i], C_USED] == NULL and rec[hv[i], K_PROFILING] != NULL:
                rec[hv[i], C_USED] = 1
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
