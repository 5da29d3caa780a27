"""The communication events of a profiler trace as columns, in bounded memory.

The file goes through a buffer of a few megabytes. :mod:`kineto_kernel` finds the events of
communication in it; their values become numbers, and numbers of strings, before the buffer is
filled again. What is outside the list of events (the rank, the process groups, the clock's base)
is small, and is read as JSON at the end.

Source: FORMATS.md sections 3 and 9.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from dl2gpu.trace import kineto_kernel as kernel
from dl2gpu.trace.entry_columns import SECRET
from dl2gpu.trace.kineto_kernel import FIELDS
from dl2gpu.trace.kineto_names import Kind, kind_of
from dl2gpu.trace.stream import StreamCutError

__all__ = ["NUMBERS", "TEXTS", "Columns", "scan"]

Longs = npt.NDArray[np.int64]

NUMBERS: Final[dict[str, int]] = {
    # value: digits behind the point that are kept
    "ts": 3, "dur": 3, "pid": 0, "tid": 0, "external id": 0, "record function id": 0,
    "correlation": 0, "stream": 0, "in msg nelems": 0, "out msg nelems": 0, "group size": 0,
    "global rank start": 0, "global rank stride": 0, "process group id": 0, "rank": 0,
    "src rank": 0, "dst rank": 0, "seq": 0, "is asynchronized op": 0,
}  # fmt: skip
"""Fields that are numbers. ``ts`` and ``dur`` are microseconds in the file, and become ns."""
TEXTS: Final = (
    "name", "cat", "ph", "collective name", "dtype", "in split size", "out split size",
    "process group name", "process group description", "process group ranks", "input dims",
    "input type", "concrete inputs",
)  # fmt: skip

_KEYS: Final = np.frombuffer("".join(FIELDS).encode(), np.uint8)
_STARTS: Final = np.cumsum([0, *(len(f) for f in FIELDS)], dtype=np.int64)

BLOCK: Final = 1 << 20
"""Bytes looked at together: they stay in the cache of a core."""
LARGEST_EVENT: Final = 16 << 20
"""A longer event is given up (a name or a list of shapes has a few kilobytes)."""
LARGEST_SKELETON: Final = 32 << 20
_ROWS: Final = 4096
MOST_EVENTS: Final = 1_000_000
"""Events of communication kept of one file: some hundred megabytes while they are joined."""
MOST_TEXT: Final = 64 << 20
"""Bytes of the distinct strings kept of one file."""
_LONGEST_TEXT: Final = 1 << 20


@dataclass(slots=True)
class Columns:
    """What one file holds.

    ``numbers`` int64[events] of each of NUMBERS, ``NULL`` where absent; ``texts`` int32[events] of
    each of TEXTS: places in ``strings``, -1 where absent. ``header``: what is outside the list of
    events. ``events``: how many the file has, of any kind.
    """

    numbers: dict[str, Longs]
    texts: dict[str, npt.NDArray[np.int32]]
    strings: list[str]
    header: dict[str, Any]
    events: int = 0
    device: int = 0
    """Events that the profiler saw on the device."""
    truncated: str | None = None
    """Why the end is missing."""
    damaged: int = 0
    """Events that are no JSON; ``recovered`` of them could be read all the same."""
    recovered: int = 0
    lost: list[str] = field(default_factory=list)
    """What else was not kept, and why."""

    @property
    def n(self) -> int:
        return len(self.numbers["ts"])


def scan(pieces: Iterable[bytes], block: int = BLOCK) -> Columns | str:
    """The columns of a trace, or why it is none.

    Args:
        pieces: the content, in pieces of any size (:func:`stream.pieces`).
        block: bytes looked at together; no result depends on it.
    """
    return _Scan(block).run(_utf8(iter(pieces)))


def _utf8(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The content as UTF-8, where it is UTF-16 (a redirect of PowerShell)."""
    first = next(pieces, b"")
    if not first.startswith((b"\xff\xfe", b"\xfe\xff")):
        yield first
        yield from pieces
        return
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    yield decoder.decode(first).encode("utf-8", "replace")
    for piece in pieces:
        yield decoder.decode(piece).encode("utf-8", "replace")


class _Scan:
    """One pass over one file."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.buffer = np.empty(2 * block + 64, np.uint8)
        self.filled = 0
        self.state = np.zeros(kernel.STATE, np.int64)
        self.spans = np.empty((_ROWS, 2 * len(FIELDS)), np.int64)
        self.bad = np.empty((256, 2), np.int64)
        self.skeleton = np.empty(LARGEST_SKELETON if block >= BLOCK else 1 << 20, np.uint8)
        self.parts: list[tuple[dict[str, Longs], dict[str, npt.NDArray[np.int32]]]] = []
        self.known: dict[int, int] = {}
        self.numbers_of: dict[str, int] = {}
        self.strings: list[str] = []
        self.text_bytes = 0
        self.kept = 0
        self.wanted: dict[tuple[int, ...], bool] = {}
        self.recovered = 0
        self.dropped = 0
        self.too_much_text = 0

    def run(self, pieces: Iterator[bytes]) -> Columns | str:
        st = self.state
        cut: str | None = None
        first = True
        rest = memoryview(b"")
        over = False
        while True:
            # fill the buffer
            while self.filled < len(self.buffer) and not over:
                if not rest:
                    try:
                        rest = memoryview(next(pieces))
                    except StopIteration:
                        over = True
                    except StreamCutError as e:
                        over, cut = True, str(e)
                    continue
                take = min(len(rest), len(self.buffer) - self.filled)
                self.buffer[self.filled : self.filled + take] = np.frombuffer(rest[:take], np.uint8)
                self.filled += take
                rest = rest[take:]
            if first:
                why = self._begin()
                if why is not None:
                    return why
                first = False
            st[kernel.FINAL] = over
            st[kernel.GIVE_UP] = len(self.buffer) >= LARGEST_EVENT
            st[kernel.LENGTH] = self.filled
            self._block()
            used = int(st[kernel.POS])
            if over:
                break
            left = self.filled - used
            if left > len(self.buffer) // 2 and len(self.buffer) < LARGEST_EVENT:
                larger = np.empty(2 * len(self.buffer), np.uint8)
                larger[:left] = self.buffer[used : self.filled]
                self.buffer = larger
            else:
                self.buffer[:left] = self.buffer[used : self.filled].copy()
            self.filled = left
            st[kernel.POS] = 0
        return self._columns(cut)

    def _begin(self) -> str | None:
        """Where the list of events begins, by the first bytes; why there is none."""
        head = self.buffer[: min(self.filled, 4096)].tobytes()
        text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        at = len(head) - len(text)
        if text[:1] == b"[":
            at += 1
            self.state[kernel.MODE] = 1
            self.state[kernel.LISTS] = 1
        elif re.match(rb'[,\s]*\{\s*"(ph|cat|name|pid|tid|ts|dur)"\s*:', text):
            self.state[kernel.MODE] = 1  # the bracket before the first event is missing
            self.state[kernel.LISTS] = 1
        elif text[:1] != b"{":
            return "expected a JSON object or list of trace events, found neither"
        self.state[kernel.POS] = at
        return None

    def _block(self) -> None:
        st = self.state
        while True:
            kernel.scan(self.buffer, st, self.spans, self.bad, self.skeleton, _KEYS, _STARTS)
            full = st[kernel.FULL] == 2
            n = int(st[kernel.N])
            if n:
                self._keep(self.buffer, self.spans, n)
            for start, end in self.bad[: int(st[kernel.BAD])].tolist():
                self._repair(self.buffer[start:end].tobytes())
            if not full:
                return

    def _keep(self, buffer: npt.NDArray[np.uint8], spans: npt.NDArray[np.int64], n: int) -> None:
        """The values of ``n`` events, out of the buffer."""
        if self.kept + n > MOST_EVENTS:
            self.dropped += self.kept + n - MOST_EVENTS
            n = MOST_EVENTS - self.kept
            if n <= 0:
                return
        numbers: dict[str, Longs] = {}
        for name, digits in NUMBERS.items():
            out = np.empty(n, np.int64)
            kernel.numbers(buffer, n, spans, FIELDS.index(name), digits, out)
            numbers[name] = out
        texts: dict[str, npt.NDArray[np.int32]] = {}
        for name in TEXTS:
            at = FIELDS.index(name)
            marks = np.empty(n, np.int64)
            kernel.hashes(buffer, n, spans, at, SECRET, marks)
            distinct, where, back = np.unique(marks, return_index=True, return_inverse=True)
            found = [
                self._text(buffer, int(mark), *spans[row, 2 * at : 2 * at + 2].tolist())
                for mark, row in zip(distinct.tolist(), where, strict=True)
            ]
            texts[name] = np.array(found, np.int32)[back]
        mine = self._wanted(texts["name"], texts["cat"])
        if mine is not None:
            numbers = {name: values[mine] for name, values in numbers.items()}
            texts = {name: values[mine] for name, values in texts.items()}
        self.kept += len(numbers["ts"])
        self.parts.append((numbers, texts))

    def _wanted(
        self, names: npt.NDArray[np.int32], cats: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.bool_] | None:
        """bool[n]: the events that are communication by name and category; None: all of them."""
        pairs, back = np.unique(np.stack([names, cats]), axis=1, return_inverse=True)
        wanted = []
        for pair in map(tuple, pairs.T.tolist()):
            known = self.wanted.get(pair)
            if known is None:
                name, cat = (self.strings[i] if i >= 0 else "" for i in pair)
                known = self.wanted[pair] = kind_of(name, cat) != Kind.NOTHING
            wanted.append(known)
        return None if all(wanted) else np.array(wanted)[back.reshape(-1)]

    def _text(self, buffer: npt.NDArray[np.uint8], mark: int, start: int, end: int) -> int:
        """Number of a string; -1 where there is none."""
        if mark == 0:
            return -1
        number = self.known.get(mark)
        if number is not None:
            return number
        size = end - start
        if size > _LONGEST_TEXT or self.text_bytes + size > MOST_TEXT:
            self.too_much_text += 1
            return -1
        self.text_bytes += size + 64
        text = _plain(buffer[start:end].tobytes())
        number = self.numbers_of.setdefault(text, len(self.strings))
        if number == len(self.strings):
            self.strings.append(text)
        self.known[mark] = number
        return number

    def _repair(self, text: bytes) -> None:
        """Keeps a damaged event, if it is one of communication whose values can be told."""
        if not re.search(rb"record_param_comms|nccl|gloo:|c10d::", text) or len(text) > 1 << 16:
            return
        event = _salvaged(text)
        if event is None:
            return
        data = np.frombuffer(event, np.uint8)
        state = np.zeros(kernel.STATE, np.int64)
        state[kernel.MODE] = 1
        state[kernel.FINAL] = 1
        state[kernel.LENGTH] = len(data)
        spans = np.empty((1, 2 * len(FIELDS)), np.int64)
        nothing = np.empty((1, 2), np.int64)
        kernel.scan(data, state, spans, nothing, np.empty(1, np.uint8), _KEYS, _STARTS)
        if state[kernel.N] == 1:
            self.recovered += 1
            self._keep(data, spans, 1)

    def _columns(self, cut: str | None) -> Columns | str:
        st = self.state
        header = _header(self.skeleton[: int(st[kernel.SKELETON])].tobytes(), int(st[kernel.MODE]))
        if not st[kernel.LISTS]:
            return "no list of trace events (`traceEvents`) in it"
        empty = np.zeros(0, np.int64)
        numbers = {
            name: np.concatenate([empty, *(p[0][name] for p in self.parts)]) for name in NUMBERS
        }
        texts = {
            name: np.concatenate([empty.astype(np.int32), *(p[1][name] for p in self.parts)])
            for name in TEXTS
        }
        out = Columns(numbers, texts, self.strings, header)
        out.events, out.device = int(st[kernel.EVENTS]), int(st[kernel.DEVICE])
        out.damaged, out.recovered = int(st[kernel.DAMAGED]), self.recovered
        if cut is not None:
            out.truncated = cut
        elif st[kernel.MODE] != 0:
            out.truncated = "ends within the list of events"
        if self.dropped:
            out.lost.append(
                f"{self.dropped} events of communication beyond the first {MOST_EVENTS}"
            )
        if self.too_much_text:
            out.lost.append(f"{self.too_much_text} strings that are too long")
        if st[kernel.SKELETON] >= len(self.skeleton):
            out.lost.append("the header, which is too long")
        return out


_STRICT: Final = msgspec.json.Decoder()


def _plain(raw: bytes) -> str:
    """A string as it stands in the file, without its escapes."""
    if b"\\" in raw:
        try:
            text = json.loads(b'"' + raw + b'"', strict=False)
            if isinstance(text, str):
                return text.encode("utf-8", "replace").decode()
        except ValueError:
            pass
    return raw.decode("utf-8", "replace")


def _header(skeleton: bytes, mode: int) -> dict[str, Any]:
    """The outer object without its events; what can be told of it where it is damaged."""
    text = skeleton.removeprefix(b"\xef\xbb\xbf").strip()
    if mode != 0:
        text += b"]}"
    for candidate in (text, re.sub(rb",\s*}$", b"}", text)):
        try:
            found = _STRICT.decode(candidate)
        except (msgspec.DecodeError, RecursionError):
            continue
        return found if isinstance(found, dict) else {}
    out: dict[str, Any] = {}
    for key, pattern in _WANTED.items():
        match = pattern.search(text)
        if match is None:
            continue
        value = match[1] if key == "baseTimeNanoseconds" else _balanced(text, match.start(1))
        try:
            out[key] = _STRICT.decode(value)
        except (msgspec.DecodeError, RecursionError):
            continue
    return out


_WANTED: Final = {
    "baseTimeNanoseconds": re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})\b'),
    "distributedInfo": re.compile(rb'"distributedInfo"\s*:\s*(\{)'),
}


def _balanced(text: bytes, at: int) -> bytes:
    """The object that begins at ``at``."""
    depth = 0
    for sign in re.finditer(rb'"(?:[^"\\]|\\.)*"|[{}]', text[at:]):
        depth += {b"{": 1, b"}": -1}.get(sign[0], 0)
        if depth == 0:
            return text[at : at + sign.end()]
    return b""


_PAIR: Final = re.compile(
    rb'"(' + "|".join(sorted(map(re.escape, FIELDS), key=len, reverse=True)).encode() + rb')"'
    rb'\s*:\s*("(?:[^"\\\n]|\\.)*"(?=\s*[,}\]]|\s*$)|\[[^"\n\]]*\]|-?[0-9][0-9.eE+-]*|true|false)',
    re.IGNORECASE,
)


def _salvaged(text: bytes) -> bytes | None:
    """A damaged event put together again from those of its values that stand there unharmed.

    None where its name or its time cannot be told: a guess would make an operation up.
    """
    own: dict[bytes, bytes] = {}
    args: dict[bytes, bytes] = {}
    for match in _PAIR.finditer(text):
        key = match[1].lower()
        (own if key.decode() in FIELDS[:7] else args)[key] = match[2]
    if b"ts" not in own or b"name" not in own:
        return None

    def joined(pairs: dict[bytes, bytes]) -> bytes:
        return b",".join(b'"' + k + b'":' + v for k, v in pairs.items())

    return b"{" + joined(own) + b',"args":{' + joined(args) + b"}}"
