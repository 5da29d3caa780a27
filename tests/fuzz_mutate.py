"""Damages inputs: any bytes, and the shapes that formats have (JSON, lines, frames, archives).

Each function takes a source of chance and an input and gives another one, which is often wrong in
one place only: what is wrong everywhere is refused at the door and tests nothing behind it.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import zstandard

LARGEST: Final = 64 << 10
"""Inputs are cut to so many bytes: what grows by each change must not fill the memory."""

NUMBERS: Final = (
    "0", "-1", "1", "2", "7", "-0", "127", "255", "256", "65535", "65536", "1048576", "2147483647",
    "2147483648", "-2147483648", "-2147483649", "4294967295", "4294967296", "9007199254740993",
    "9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809",
    "18446744073709551615", "18446744073709551616", "1" + "0" * 30, "9" * 400, "0.5", "1e5",
    "1e308", "1e400", "-1e400", "NaN", "Infinity", "00", "1_0", "0x10", "\u0661", "\u00b2",
)  # fmt: skip
"""Numbers at the edges of types, and what only looks like one."""

ODD: Final[tuple[Any, ...]] = (
    0, -1, 1, 2, 3, 127, 65536, 1 << 20, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1,
    2**63, -(2**63), 2**64 - 1, 2**64, 10**30, 0.5, -0.0, 1e308, float("inf"), float("-inf"),
    float("nan"), True, False, None, "", "a", "0", "-1", "1", "\0", "\ud800", "\u2028", "\u00b2",
    "\u0661", "\x1b[31m", "<b>", "../../x", "a\nb", "x" * 3000, [], {}, [[]], [None], [0], [-1],
    [2**31], ["a"], {"a": 1}, {"": None}, [[[[[[[[]]]]]]]], [0] * 50, list(range(300)), "[0, 1]",
    "[0, -1, 99999999999]", [[1, 2], 3], [1, "a", None],
)  # fmt: skip
"""Values that stand where another type or range is expected."""

_NUMBER: Final = re.compile(rb"-?\d+(?:\.\d+)?")


def any_bytes(chance: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    """One to six changes of ``data`` that know nothing of its form."""
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 6))):
        data = chance.choice(_BYTES)(chance, data, other, tokens)
    return data


def _span(chance: Random, data: bytes) -> tuple[int, int]:
    begin = chance.randrange(len(data) + 1)
    return begin, min(len(data), begin + chance.choice((1, 1, 2, 4, 8, 30, 200, 2000)))


def _flip(chance: Random, data: bytes, *_: Any) -> bytes:
    if not data:
        return b"\0"
    out = bytearray(data)
    out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    return bytes(out)


def _set(chance: Random, data: bytes, *_: Any) -> bytes:
    out = bytearray(data or b"\0")
    out[chance.randrange(len(out))] = chance.choice(b"\0\x01\x7f\x80\xff\n\r\"'{}[],:|()=- \\")
    return bytes(out)


def _token(chance: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    token = chance.choice(tokens) if tokens else b"0"
    begin = chance.randrange(len(data) + 1)
    end = begin + (len(token) if chance.random() < 0.5 else 0)
    return data[:begin] + token + data[end:]


def _swap_token(chance: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    some = chance.sample(tokens, min(len(tokens), 60))
    there = [t for t in some if t in data]
    if not there:
        return _token(chance, data, other, tokens)
    return data.replace(chance.choice(there), chance.choice(tokens), chance.choice((1, 1, 3, -1)))


def _number(chance: Random, data: bytes, *_: Any) -> bytes:
    begin = chance.randrange(len(data) + 1)
    one = _NUMBER.search(data, begin) or _NUMBER.search(data)
    if one is None:
        return data
    told = chance.choice(NUMBERS).encode()
    if chance.random() < 0.1:
        return data.replace(one[0], told)
    return data[: one.start()] + told + data[one.end() :]


def _cut(chance: Random, data: bytes, *_: Any) -> bytes:
    begin, end = _span(chance, data)
    return data[:begin] + data[end:]


def _end(chance: Random, data: bytes, *_: Any) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _head(chance: Random, data: bytes, *_: Any) -> bytes:
    return data[chance.randrange(len(data) + 1) :]


def _again(chance: Random, data: bytes, *_: Any) -> bytes:
    begin, end = _span(chance, data)
    return data[:end] + data[begin:end] * chance.choice((1, 1, 1, 2, 40)) + data[end:]


def _splice(chance: Random, data: bytes, other: bytes, *_: Any) -> bytes:
    return data[: chance.randrange(len(data) + 1)] + other[chance.randrange(len(other) + 1) :]


def _nest(chance: Random, data: bytes, *_: Any) -> bytes:
    begin = chance.randrange(len(data) + 1)
    deep = chance.choice((b"[", b"{", b'{"a":', b"(", b"]", b"}", b"\x28", b"\x85", b"\\", b'"'))
    return data[:begin] + deep * chance.choice((3, 100, 2000, 12_000)) + data[begin:]


def _lines(chance: Random, data: bytes, other: bytes, *_: Any) -> bytes:
    """Lines removed, repeated, moved, exchanged or taken from elsewhere."""
    lines = data.splitlines(keepends=True)
    if len(lines) < 2:
        return _again(chance, data)
    k, n = chance.randrange(len(lines)), chance.randrange(len(lines))
    how = chance.randrange(7)
    if how == 0:
        del lines[k]
    elif how == 1:
        lines[k] *= chance.choice((2, 3, 50))
    elif how == 2:
        lines[k], lines[n] = lines[n], lines[k]
    elif how == 3:
        lines.insert(k, lines.pop(n))
    elif how == 4:
        chance.shuffle(lines)
    elif how == 5:
        lines.insert(k, chance.choice(other.splitlines(keepends=True) or [b"\n"]))
    else:
        end = chance.choice((b"\r\n", b"\r", b"", b"\0", b"\x0b", b"\xc2\x85", b"\xe2\x80\xa8"))
        lines[k] = lines[k].rstrip(b"\r\n") + end
    return b"".join(lines)


_BYTES: Final[tuple[Callable[..., bytes], ...]] = (
    _flip, _set, _token, _swap_token, _swap_token, _number, _number, _number, _cut, _end, _head,
    _again, _splice, _nest, _lines, _lines, _lines,
)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# JSON, and values in general


def value(chance: Random, root: Any, words: Sequence[str]) -> Any:
    """A copy of ``root``, lists and dicts of plain values, with one to three changes within."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        root = _changed(chance, root, words, 0)
    return root


def _changed(chance: Random, here: Any, words: Sequence[str], depth: int) -> Any:
    inner = isinstance(here, list | tuple | dict) and len(here) > 0
    if inner and depth < 60 and chance.random() < 0.85:
        if isinstance(here, dict):
            key = chance.choice(list(here))
            return here | {key: _changed(chance, here[key], words, depth + 1)}
        k = chance.randrange(len(here))
        there = [*here[:k], _changed(chance, here[k], words, depth + 1), *here[k + 1 :]]
        return tuple(there) if isinstance(here, tuple) else there
    how = chance.randrange(8)
    if inner and isinstance(here, dict) and how < 5:
        items = list(here.items())
        k = chance.randrange(len(items))
        if how == 0:
            del items[k]
        elif how == 1:
            items[k] = (chance.choice(words) if words else "", items[k][1])
        elif how == 2:
            items.append((chance.choice(words) if words else "a", chance.choice(ODD)))
        elif how == 3:
            n = chance.randrange(len(items))
            (a, x), (b, y) = items[k], items[n]
            items[k], items[n] = (a, y), (b, x)
        else:
            chance.shuffle(items)
        return dict(items)
    if inner and not isinstance(here, dict) and how < 5:
        items = list(here)
        k, n = chance.randrange(len(items)), chance.randrange(len(items))
        if how == 0:
            del items[k]
        elif how == 1:
            items[k:k] = [items[k]] * chance.choice((1, 2, 30))
        elif how == 2:
            items[k], items[n] = items[n], items[k]
        elif how == 3:
            items.insert(k, chance.choice(ODD))
        else:
            chance.shuffle(items)
        return tuple(items) if isinstance(here, tuple) else items
    if how == 5:
        return [here]
    if isinstance(here, int) and not isinstance(here, bool) and how < 4:
        return here + chance.choice((-1, 1, 2, 1000, -here * 2, 1 << 31, 1 << 62))
    if isinstance(here, str) and words and how < 4:
        return chance.choice(words)
    return chance.choice(ODD)


def words_of(root: Any) -> set[str]:
    """Keys and short texts of a value: what a change may put elsewhere."""
    if isinstance(root, dict):
        return {str(k) for k in root} | {w for v in root.values() for w in words_of(v)}
    if isinstance(root, list | tuple):
        return {w for v in root for w in words_of(v)}
    return {root} if isinstance(root, str) and len(root) < 80 else set()


def json_bytes(chance: Random, data: bytes, words: Sequence[str]) -> bytes | None:
    """One document of JSON, or one line of JSON Lines, changed; None where it is none."""
    try:
        root = json.loads(data)
    except (ValueError, RecursionError):
        lines = data.split(b"\n")
        k = chance.randrange(len(lines))
        try:
            root = json.loads(lines[k])
        except (ValueError, RecursionError):
            return None
        lines[k] = dumped(chance, value(chance, root, words))
        return b"\n".join(lines)
    return dumped(chance, value(chance, root, words))


def dumped(chance: Random, root: Any) -> bytes:
    """``root`` as JSON, now and then with a key twice or in another spelling."""
    text = json.dumps(root, ensure_ascii=chance.random() < 0.7)
    if chance.random() < 0.05:
        key = re.search(r'"(\w+)": ', text)
        if key:
            text = text.replace(key[0], f"{key[0]}{chance.choice(NUMBERS)}, {key[0]}", 1)
    return text.encode("utf-8", "surrogatepass")


# --------------------------------------------------------------------------------------------------
# Messages with their lengths before them (protobuf)


def varint(number: int) -> bytes:
    """``number`` (64 bits) in groups of seven."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _read_varint(data: bytes, at: int) -> tuple[int, int] | None:
    number = shift = 0
    while at < len(data) and shift < 64:
        number |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return number, at
    return None


def frames(data: bytes) -> list[bytes]:
    """The messages of a file of them, as far as they are whole."""
    out, at = [], 0
    while (found := _read_varint(data, at)) and found[1] + found[0] <= len(data):
        out.append(data[found[1] : found[1] + found[0]])
        at = found[1] + found[0]
    return out


def framed(chance: Random, data: bytes, other: bytes, tokens: Sequence[bytes]) -> bytes:
    """A file of messages with some changed, their lengths put right."""
    messages = frames(data)
    if not messages:
        return any_bytes(chance, data, other, tokens)
    for _ in range(chance.choice((1, 1, 2, 4))):
        k = chance.randrange(len(messages))
        how = chance.randrange(6)
        if how == 0:
            messages.insert(k, messages[chance.randrange(len(messages))])
        elif how == 1 and len(messages) > 1:
            del messages[k]
        elif how == 2:
            messages[k] += varint(chance.randrange(1 << 8)) + varint(chance.choice((0, 1, 1 << 63)))
        elif how == 3:
            messages[k] = _field_changed(chance, messages[k])
        else:
            messages[k] = any_bytes(chance, messages[k], other, tokens)
    return b"".join(varint(len(m)) + m for m in messages)


def _field_changed(chance: Random, message: bytes) -> bytes:
    """One field repeated, left out, or with another value; lengths within are put right."""
    fields, at = [], 0
    while (key := _read_varint(message, at)) is not None:
        wire, begin = key[0] & 7, at
        got = _read_varint(message, key[1])
        if wire == 0 and got:
            at = got[1]
        elif wire == 2 and got:
            at = got[1] + got[0]
        else:
            at = key[1] + {1: 8, 5: 4}.get(wire, 1)
        fields.append((key[0], message[begin:at], message[got[1] : at] if got else b""))
        if at >= len(message):
            break
    if not fields:
        return message
    k = chance.randrange(len(fields))
    key_, raw, inner = fields[k]
    if key_ & 7 == 2 and chance.random() < 0.7:
        deeper = chance.random() < 0.6
        inner = _field_changed(chance, inner) if deeper else any_bytes(chance, inner, raw, ())
        raw = varint(key_) + varint(len(inner)) + inner
    elif key_ & 7 == 0:
        raw = varint(key_) + varint(int(chance.choice(NUMBERS[:16])))
    else:
        raw = raw * chance.choice((0, 2, 3))
    return b"".join([*(f[1] for f in fields[:k]), raw, *(f[1] for f in fields[k + 1 :])])


# --------------------------------------------------------------------------------------------------
# Layers around


def packed(chance: Random, data: bytes) -> bytes:
    """``data`` compressed in one of four ways, and then perhaps damaged, cut or lengthened."""
    how = chance.randrange(4)
    if how == 0:
        out = gzip.compress(data, 1, mtime=0)
    elif how == 1:
        out = zstandard.ZstdCompressor(level=1).compress(data)
    elif how == 2:
        out = bz2.compress(data, 1)
    else:
        out = lzma.compress(data, preset=0)
    if chance.random() < 0.15:
        out += packed(chance, data) if chance.random() < 0.5 else b"\0" * 600
    return any_bytes(chance, out, data, ()) if chance.random() < 0.6 else out


def in_utf16(data: bytes) -> bytes:
    """Text as Windows writes it."""
    return data.decode("utf-8", "replace").encode("utf-16")
