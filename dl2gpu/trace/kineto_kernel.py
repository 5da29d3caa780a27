"""Kernels behind :mod:`dl2gpu.trace.kineto_scan`: a Chrome trace as bytes, event by event.

A profiler trace is one JSON object whose list ``traceEvents`` holds millions of events, of which a
few thousand are communication. ``scan`` walks from event to event, with regard for strings,
escapes and nesting, and looks at one thing: is the event's ``name`` one that communication has?
Of those, and of no other, the places of the wanted values are written down. Everything outside the
list (the *skeleton*) is copied out, wherever in the file it stands.

The walk knows where it is by the grammar alone, so text inside strings cannot mislead it. Where the
grammar is broken (a quote that is not escaped, a lost brace), the event is given up and the walk
goes on at the next place that can only be the start of an event.

Nothing is allocated here, and nothing is copied but the skeleton: the caller keeps the block, and
calls again with more of the file behind what was not used up.
"""

from __future__ import annotations

from typing import Final

from dl2gpu.engine.native import Bytes, Int64Rows, Int64s, UInt8s, helper, kernel

__all__ = [
    "BAD",
    "BYTES",
    "CAP",
    "DAMAGED",
    "DEVICE",
    "EVENTS",
    "FIELDS",
    "FINAL",
    "FULL",
    "GIVE_UP",
    "LENGTH",
    "LISTS",
    "MODE",
    "NULL",
    "POS",
    "SKELETON",
    "STATE",
    "N",
    "hashes",
    "numbers",
    "scan",
]  # fmt: skip

NULL: Final = -(1 << 63)

# state of a scan
(POS, MODE, N, BAD, DAMAGED, EVENTS, SKELETON, DEVICE, FULL, LENGTH, FINAL, GIVE_UP, LISTS, CAP,
 BYTES) = range(15)  # fmt: skip
STATE: Final = 15
TOP: Final = 0
IN_LIST: Final = 1
LOST: Final = 2
"""Modes: outside the list of events, in it, and in it but not at the start of an event."""

FIELDS: Final = (
    # of the event
    "name", "cat", "ph", "ts", "dur", "pid", "tid",
    # of its args
    "external id", "record function id", "correlation", "stream", "collective name",
    "in msg nelems", "out msg nelems", "dtype", "in split size", "out split size", "group size",
    "global rank start", "global rank stride", "process group name", "process group description",
    "process group id", "process group ranks", "rank", "src rank", "dst rank", "seq",
    "is asynchronized op", "input dims", "input type", "concrete inputs",
)  # fmt: skip
"""Wanted values, by their key in small letters; the first seven are the event's own."""
_OWN: Final = 7
_DEEPEST: Final = 60
_ROOM: Final = 900_000_000_000_000_000
"""A number below it has room for one more digit."""
_INCOMPLETE: Final = -1
_FAULT: Final = -2

_QUOTE: Final = 34
_COMMA: Final = 44
_COLON: Final = 58
_OPEN_LIST: Final = 91
_ESCAPE: Final = 92
_CLOSE_LIST: Final = 93
_OPEN: Final = 123
_CLOSE: Final = 125
_BLANK: Final = 32


@helper(forceinline=True)
def _text_end(buf, i, n):  # type: ignore[no-untyped-def]
    """The place of the quote that ends the string whose content begins at ``i``; n: not here."""
    while i < n:
        c = buf[i]
        if c == _QUOTE:
            return i
        if c == _ESCAPE:
            i += 1
        i += 1
    return n


@helper(forceinline=True)
def _solid(buf, i, n):  # type: ignore[no-untyped-def]
    """The first place from ``i`` on that is no blank."""
    while i < n and buf[i] <= _BLANK:
        i += 1
    return i


@helper()
def _is_communication(buf, s, e):  # type: ignore[no-untyped-def]
    """Can an event of this name be communication, or say where the window ends?

    record_param_comms, c10d::..., nccl..., <backend>:..., PyTorch Profiler (0), Record Window End.
    """
    if e - s < 4:
        return False
    a = buf[s]
    b = buf[s + 1]
    c = buf[s + 2]
    if a == 114 and b == 101:  # "record_param_comms"
        return e - s == 18 and c == 99 and buf[s + 6] == 95 and buf[s + 12] == 95
    if a == 99 and b == 49:  # "c10d::"
        return c == 48 and buf[s + 3] == 100
    if a == 110 and b == 99:  # "nccl"
        return c == 99 and buf[s + 3] == 108
    if a == 80 and b == 121:  # "PyTorch Profiler"
        return e - s > 15 and buf[s + 8] == 80
    if a == 82 and b == 101:  # "Record Window End"
        return e - s == 17 and buf[s + 7] == 87
    # a short word and one colon: another backend
    if a < 97 or a > 122:
        return False
    for i in range(s, min(s + 9, e - 1)):
        x = buf[i]
        if x == _COLON:
            return i > s + 1 and buf[i + 1] != _COLON
        if not (97 <= x <= 122 or 48 <= x <= 57):
            return False
    return False


@helper(inline="never")
def _walk(buf, i, n, st):  # type: ignore[no-untyped-def]
    """Goes over the object that begins at ``i``: where it ends, _INCOMPLETE or _FAULT.

    Sets st[FULL] to 1 where it is communication.
    """
    depth = 1
    lists = 0  # bit d: the container at depth d is a list
    key = True  # a key, or the end, must come next
    wanted = 0  # 1: the value is the event's name, 2: its category
    st[FULL] = 0
    i += 1
    while i < n:
        c = buf[i]
        if c == _QUOTE:
            s = i + 1
            e = _text_end(buf, s, n)
            i = e + 1
            # what may stand behind a string tells whether the quote was one
            while i < n and buf[i] <= _BLANK:
                i += 1
            if i >= n:
                return _INCOMPLETE
            c = buf[i]
            if c == _COLON:
                if not key:
                    return _FAULT
                key = False
                wanted = 0
                if depth == 1:
                    if e - s == 4 and buf[s] == 110 and buf[s + 1] == 97 and buf[s + 2] == 109:
                        wanted = 1
                    elif e - s == 3 and buf[s] == 99 and buf[s + 1] == 97 and buf[s + 2] == 116:
                        wanted = 2
                i += 1
                continue
            if key or (c != _COMMA and c != _CLOSE and c != _CLOSE_LIST):
                return _FAULT
            if wanted and depth == 1:
                if wanted == 1:
                    if _is_communication(buf, s, e):
                        st[FULL] = 1
                elif e > s + 3:
                    # "kernel", "gpu_memcpy", ...: the profiler saw the device
                    a = buf[s]
                    if (a == 107 and buf[s + 1] == 101) or (a == 103 and buf[s + 3] == 95):
                        st[DEVICE] += 1
                wanted = 0
        if c == _COMMA:
            key = not (lists >> depth) & 1
            i += 1
        elif c == _CLOSE:
            if (lists >> depth) & 1:
                return _FAULT
            depth -= 1
            i += 1
            if depth == 0:
                return i
            key = False
        elif c == _CLOSE_LIST:
            if not (lists >> depth) & 1:
                return _FAULT
            depth -= 1
            key = False
            i += 1
        elif c == _OPEN or c == _OPEN_LIST:
            if key or depth >= _DEEPEST:
                return _FAULT
            depth += 1
            if c == _OPEN:
                lists &= ~(1 << depth)
                key = True
            else:
                lists |= 1 << depth
                key = False
            i += 1
        elif c <= _BLANK:
            i += 1
        else:
            if key:
                return _FAULT
            # a number, or a bare word
            while i < n:
                c = buf[i]
                if c == _COMMA or c == _CLOSE or c == _CLOSE_LIST:
                    break
                if c == _QUOTE or c == _ESCAPE or c == _OPEN or c == _COLON:
                    return _FAULT
                i += 1
    return _INCOMPLETE


@helper()
def _field(buf, s, e, first, last, keys, starts):  # type: ignore[no-untyped-def]
    """Number of the field, of first..last, whose key stands at s..e, in any case; -1: none."""
    size = e - s
    for f in range(first, last):
        at = starts[f]
        if starts[f + 1] - at != size:
            continue
        same = True
        for j in range(size):
            c = buf[s + j]
            if 65 <= c <= 90:
                c += 32
            if c != keys[at + j]:
                same = False
                break
        if same:
            return f
    return -1


@helper(inline="never")
def _values(buf, i, n, row, spans, keys, starts):  # type: ignore[no-untyped-def]
    """Writes where the wanted values of the object at ``i`` lie; it is known to be whole.

    Of a key that comes twice, the last counts. Strings without their quotes.
    """
    fields = len(starts) - 1
    for f in range(fields):
        spans[row, 2 * f] = -1
    depth = 0
    inside = False  # in args
    arg = False  # the next container is args
    f = -1
    key = True
    while i < n:
        c = buf[i]
        if c == _QUOTE:
            s = i + 1
            e = _text_end(buf, s, n)
            i = _solid(buf, e + 1, n)
            if key and i < n and buf[i] == _COLON:
                key = False
                i += 1
                f = -1
                if depth == 1:
                    f = _field(buf, s, e, 0, _OWN, keys, starts)
                    arg = e - s == 4 and buf[s] == 97 and buf[s + 1] == 114 and buf[s + 2] == 103
                elif depth == 2 and inside:
                    f = _field(buf, s, e, _OWN, fields, keys, starts)
                continue
            if f >= 0 and depth == 1 + inside:
                spans[row, 2 * f] = s
                spans[row, 2 * f + 1] = e
                f = -1
            continue
        if c == _OPEN or c == _OPEN_LIST:
            depth += 1
            if depth == 2:
                inside = arg and c == _OPEN
                key = inside
                arg = False
                if f >= 0:
                    spans[row, 2 * f] = i  # a list as a value
            elif depth == 3 and inside and f >= 0:
                spans[row, 2 * f] = i
            else:
                key = c == _OPEN
        elif c == _CLOSE or c == _CLOSE_LIST:
            depth -= 1
            if depth == 0:
                return
            if f >= 0 and depth == 1 + inside and spans[row, 2 * f] >= 0:
                spans[row, 2 * f + 1] = i + 1
                f = -1
            if depth == 1:
                inside = False
        elif c == _COMMA:
            if depth == 1 or (depth == 2 and inside):
                key = True
        elif c > _BLANK and c != _COLON:
            s = i
            while i < n:
                c = buf[i]
                if c == _COMMA or c == _CLOSE or c == _CLOSE_LIST or c <= _BLANK:
                    break
                i += 1
            if f >= 0 and depth == 1 + inside:
                spans[row, 2 * f] = s
                spans[row, 2 * f + 1] = i
                f = -1
            continue
        i += 1


@helper()
def _starts_event(buf, i, n):  # type: ignore[no-untyped-def]
    """Is the brace at ``i`` the start of an event? 1 yes, 0 no, -1 too near to the end to tell.

    Events follow a comma, a brace or the bracket of their list; ``args`` follow a colon.
    """
    before = i - 1
    while before >= 0 and buf[before] <= _BLANK:
        before -= 1
    if before >= 0:
        c = buf[before]
        if c != _COMMA and c != _OPEN_LIST and c != _CLOSE:
            return 0
    s = _solid(buf, i + 1, n)
    if s + 16 > n:
        return -1
    if buf[s] != _QUOTE:
        return 0
    e = _text_end(buf, s + 1, s + 8)
    if e >= s + 8 or buf[_solid(buf, e + 1, n - 1)] != _COLON:
        return 0
    a = buf[s + 1]
    size = e - s - 1
    # ph cat name pid tid ts dur id args bp s
    return 1 if size >= 1 and (
        a == 112 or a == 99 or a == 110 or a == 116 or a == 100 or a == 105 or a == 97
        or a == 98 or a == 115
    ) else 0  # fmt: skip


@helper(inline="never")
def _next_event(buf, i, n, st):  # type: ignore[no-untyped-def]
    """From ``i`` on, the next start of an event or the end of the list; -1: not in this block.

    Sets st[FULL] to 1 where it is the end of the list.
    """
    st[FULL] = 0
    while i < n:
        c = buf[i]
        if c == _OPEN:
            what = _starts_event(buf, i, n)
            if what == 1:
                return i
            if what < 0:
                return -1
        elif c == _CLOSE_LIST:
            before = i - 1
            while before > 0 and buf[before] <= _BLANK:
                before -= 1
            if before >= 0 and buf[before] == _CLOSE:
                after = _solid(buf, i + 1, n)
                if after < n and buf[after] == _COMMA:
                    after = _solid(buf, after + 1, n)
                    if after < n and buf[after] == _QUOTE:
                        st[FULL] = 1
                        return i
                elif after < n and buf[after] == _CLOSE:
                    st[FULL] = 1
                    return i
        i += 1
    return -1


@helper(inline="never")
def _top(buf, i, n, st, skeleton):  # type: ignore[no-untyped-def]
    """Copies what is outside the list of events, from ``i`` on; ends behind the bracket of it.

    A string that is not whole is left for the next block, unless this is the last one.
    """
    out = st[SKELETON]
    room = len(skeleton)
    wait = not st[FINAL] and not st[GIVE_UP]
    while i < n:
        c = buf[i]
        if c != _QUOTE:
            if out < room:
                skeleton[out] = c
                out += 1
            i += 1
            continue
        e = _text_end(buf, i + 1, n)
        if e >= n:
            if wait:
                break
            e = n - 1
        end = e + 1
        # "traceEvents"
        if e - i == 12 and buf[i + 1] == 116 and buf[i + 6] == 69 and buf[i + 11] == 115:
            colon = _solid(buf, e + 1, n)
            bracket = _solid(buf, colon + 1, n)
            if bracket >= n and wait:
                break
            if bracket < n and buf[colon] == _COLON and buf[bracket] == _OPEN_LIST:
                st[MODE] = IN_LIST
                st[LISTS] += 1
                end = bracket + 1
        if out + end - i <= room:
            for j in range(i, end):
                skeleton[out] = buf[j]
                out += 1
        i = end
        if st[MODE] == IN_LIST:
            break
    st[SKELETON] = out
    return i


@kernel
def scan(
    buf: Bytes, st: Int64s, spans: Int64Rows, bad: Int64Rows, skeleton: UInt8s, keys: Bytes,
    starts: Int64s,
) -> None:  # fmt: skip
    """Goes over a block from st[POS] to st[LENGTH]; st[POS] is then what was used up.

    ``spans`` int64[cap, 2 * fields] (begin, end) of the values of each of the st[N] events of
    communication, -1: none; ``bad`` int64[cap, 2] the st[BAD] places that were given up. Stops with
    st[FULL] 2 where a table is full. st[FINAL]: nothing comes after this block; st[GIVE_UP]: an
    event that is not whole will not become so. ``keys``, ``starts``: the texts of FIELDS, joined.
    """
    n = st[LENGTH]
    i = st[POS]
    rows = len(spans)
    st[N] = 0
    st[BAD] = 0
    while i < n:
        if st[N] >= rows or st[BAD] >= len(bad):
            st[FULL] = 2
            st[POS] = i
            return
        mode = st[MODE]
        if mode == TOP:
            at = _top(buf, i, n, st, skeleton)
            if at == i:
                break
            i = at
            if st[MODE] == TOP:
                break
            continue
        if mode == LOST:
            at = _next_event(buf, i, n, st)
            if at < 0:
                # what may be the beginning of an event stays
                keep = n if st[FINAL] else max(i, n - 64)
                st[BYTES] += keep - i
                i = keep
                break
            st[BYTES] += at - i
            i = at
            st[MODE] = IN_LIST
            continue
        c = buf[i]
        if c == _OPEN:
            end = _walk(buf, i, n, st)
            if end > 0:
                st[EVENTS] += 1
                if st[FULL]:
                    _values(buf, i, end, st[N], spans, keys, starts)
                    st[N] += 1
                i = end
                continue
            if end == _INCOMPLETE:
                if st[GIVE_UP] and not st[FINAL]:
                    st[DAMAGED] += 1
                    st[MODE] = LOST
                    i += 1
                    continue
                if not st[FINAL]:
                    break
            # damaged, or cut short at the end of the file
            at = _next_event(buf, i + 1, n, st)
            if at < 0 and not st[FINAL] and not st[GIVE_UP]:
                break
            if at < 0 and end == _INCOMPLETE:
                break
            st[DAMAGED] += 1
            bad[st[BAD], 0] = i
            bad[st[BAD], 1] = at if at > 0 else n
            st[BAD] += 1
            if at < 0:
                st[MODE] = LOST
                i = n
            else:
                i = at
        elif c == _CLOSE_LIST:
            st[MODE] = TOP
        else:
            i += 1
    st[FULL] = 0
    st[POS] = i


@kernel
def numbers(buf: Bytes, n: int, spans: Int64Rows, field: int, shift: int, out: Int64s) -> None:
    """The values of a field as whole numbers of 10^-shift; NULL where there is none that fits.

    true is 1, false 0. ``0.-05``, as a formatter writes a negative number, is -0.05.
    """
    for row in range(n):
        out[row] = NULL
        i = spans[row, 2 * field]
        if i < 0:
            continue
        e = spans[row, 2 * field + 1]
        if e - i >= 4 and buf[i] == 116:
            out[row] = 1
            continue
        if e - i >= 5 and buf[i] == 102:
            out[row] = 0
            continue
        minus = False
        value = 0
        digits = 0
        fraction = 0
        point = False
        fine = e - i <= 40
        power = 0
        while fine and i < e:
            c = buf[i]
            if 48 <= c <= 57:
                if value < _ROOM:
                    value = value * 10 + (c - 48)
                    digits += 1
                    fraction += point
                elif not point:
                    fine = False
            elif c == 45:
                minus = True
            elif c == 46 and not point:
                point = True
            elif c == 101 or c == 69:
                down = False
                i += 1
                while i < e:
                    c = buf[i]
                    if c == 45:
                        down = True
                    elif 48 <= c <= 57:
                        power = min(power * 10 + (c - 48), 99)
                    elif c != 43:
                        fine = False
                    i += 1
                if down:
                    power = -power
                break
            elif c != 43 and c > _BLANK:
                fine = False
            i += 1
        if not fine or digits == 0:
            continue
        power += shift - fraction
        while power > 0 and fine:
            fine = value < _ROOM
            value *= 10
            power -= 1
        while power < 0:
            value //= 10
            power += 1
        if fine:
            out[row] = -value if minus else value


@kernel
def hashes(buf: Bytes, n: int, spans: Int64Rows, field: int, secret: int, out: Int64s) -> None:
    """A hash of each value of a field; 0 where there is none."""
    for row in range(n):
        s = spans[row, 2 * field]
        if s < 0:
            out[row] = 0
            continue
        h = secret
        for i in range(s, spans[row, 2 * field + 1]):
            h = (h ^ buf[i]) * 1099511628211
            h ^= (h >> 29) & 0x7FFFFFFFF
        out[row] = h | 1
