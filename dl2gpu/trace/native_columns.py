"""From the bytes of many operation lines to columns of the event table.

Polars parses the lines, but only the keys it is told: each key costs time, whether it stands in the
lines or not. So one vectorised scan over the bytes (:func:`present_keys`) finds the keys that are
there, and on the way sees what the parser would let pass: a key that stands twice in a line, and
a list or an object where a name should be. Everything doubtful raises :class:`RefusedError`; the
careful reading in ``native_lines`` then decides.

Source: TRACE_FORMAT.md, section JSON Lines, for keys and defaults.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.trace.native_lines import MAX_COMMS, op_spelling
from dl2gpu.trace.schema import (
    ANY,
    DTYPE_BYTES,
    FLAG,
    MODE,
    OP,
    OP_OTHER,
    SEND_MODE,
    STATE,
    StringTable,
    dtype_code,
    op_code,
)

__all__ = ["Lines", "RefusedError", "encode", "parse", "present_keys"]


class RefusedError(Exception):
    """The columnar parser does not take these lines. ``native_lines.clean`` says why."""


# --------------------------------------------------------------------------------------------------
# Lines in a buffer


_KIND: Final = np.frombuffer(b'{"kind":', np.uint64)[0]
_OP: Final = np.frombuffer(b'"op"', np.uint32)[0]


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of a buffer: where each starts and stops (its newline), and its file's index."""

    buffer: bytes
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    file: npt.NDArray[np.int32]
    is_op: npt.NDArray[np.bool_]
    """True where the line begins with ``{"kind":"op"``; to be set for the ones that do not."""

    @classmethod
    def of(cls, pieces: list[tuple[int, bytes | memoryview]]) -> Lines:
        """Lines of ``pieces`` (index of the file, bytes that end with a newline), joined."""
        buffer = b"".join(piece for _, piece in pieces)
        sizes = np.array([len(piece) for _, piece in pieces], np.int64)
        files = np.array([index for index, _ in pieces], np.int32)
        text = np.frombuffer(buffer, np.uint8)
        stop = np.flatnonzero(text == 10)
        start = np.empty_like(stop)
        start[:1] = 0
        start[1:] = stop[:-1] + 1
        filled = stop > start
        start, stop = start[filled], stop[filled]
        file = files[np.searchsorted(np.cumsum(sizes), start, side="right")]
        is_op = np.zeros(len(start), bool)
        long = np.flatnonzero(stop - start >= 14)
        if len(long):
            at = start[long]
            eight = np.ndarray((len(buffer) - 7,), "<u8", buffer, strides=(1,))
            four = np.ndarray((len(buffer) - 3,), "<u4", buffer, strides=(1,))
            space = text[at + 8] == 32
            is_op[long] = (eight[at] == _KIND) & (four[at + 8 + space] == _OP)
        return cls(buffer, start, stop, file, is_op)

    def __len__(self) -> int:
        return len(self.start)

    def only(self, mask: npt.NDArray[np.bool_]) -> Lines:
        """The lines where ``mask`` is true; the buffer stays."""
        return Lines(
            self.buffer, self.start[mask], self.stop[mask], self.file[mask], self.is_op[mask]
        )

    def line(self, i: int) -> bytes:
        """Bytes of line ``i``, without the newline."""
        return self.buffer[self.start[i] : self.stop[i]]

    def text(self) -> bytes:
        """The lines as one text: each ends with a newline, none other is in it."""
        breaks = np.flatnonzero(self.start[1:] != self.stop[:-1] + 1) + 1
        first = self.start[np.concatenate(([0], breaks))]
        last = self.stop[np.concatenate((breaks - 1, [len(self.stop) - 1]))] + 1
        view = memoryview(self.buffer)
        return b"".join(view[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True))


# --------------------------------------------------------------------------------------------------
# Keys

_S, _I, _B = pl.String(), pl.Int64(), pl.Boolean()
_INTS = pl.List(pl.Int64())

_KEYS: Final[dict[str, pl.DataType]] = {
    "kind": _S, "seq": _I, "op": _S, "lane": _I, "comm": _S, "stream": _S, "blocking": _B,
    "request": _I, "requests": _S, "mode": _S, "peer": _S, "tag": _S, "recv_peer": _S,
    "recv_tag": _S, "send_mode": _S, "root": _I, "reduce_op": _S, "count": _I, "count_out": _I,
    "dtype": _S, "bytes": _I, "splits": _INTS, "group": _I, "ordinal": _I, "state": _S,
    "t_created": _I, "t_started": _I, "t_completed": _I, "matched_peer": _I, "matched_tag": _I,
    "returned": _INTS,
    "new_comm": _S, "split": _B, "stack": _S, "flags": _I,
}  # fmt: skip
"""Keys of an operation line, and what they are parsed as. Keys of mixed type (``peer`` is a number
or "any") and lists that are interned whole (``stack``) come as text: Polars gives the digits of a
number and, nearly, the JSON of a list."""

# How a value may begin, one bit for each way; what begins otherwise is for the careful reading.
_QUOTE, _DIGIT, _BRACKET, _WORD = 1, 2, 4, 8  # _WORD: true, false, null
_FIRST_BYTE: Final = np.zeros(256, np.uint8)
_FIRST_BYTE[ord('"')] = _QUOTE
_FIRST_BYTE[[ord(c) for c in "-0123456789"]] = _DIGIT
_FIRST_BYTE[ord("[")] = _BRACKET
_FIRST_BYTE[[ord(c) for c in "tfn"]] = _WORD

_TRUE_FALSE: Final = np.zeros(256, bool)
_TRUE_FALSE[[ord("t"), ord("f")]] = True


def _allowed(key: str, dtype: pl.DataType) -> int:
    if key in ("requests", "stack"):
        return _QUOTE | _BRACKET | _WORD
    if dtype == _S:
        return _QUOTE | _DIGIT | _WORD
    return _QUOTE | _DIGIT | _BRACKET | _WORD  # Polars is strict on the other types


_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


def _slot(words: Any) -> Any:
    """A 16-bit hash of each 64-bit word."""
    return (words * _MULTIPLIER) >> np.uint64(48)


def _key_words() -> npt.NDArray[np.uint64]:
    # The last 8 characters, big end first, as `_words_before` sees them; they tell the keys apart.
    return np.array([int.from_bytes(k.encode()[-8:], "big") for k in _KEYS], np.uint64)


_ID: Final = np.zeros(1 << 16, np.uint8)
"""Number of a key (from 1) by the hash of its last 8 characters. A foreign key that hashes to the
same slot only costs time: its column comes out empty, or the careful reading has a look."""
_ID[_slot(_key_words())] = np.arange(1, len(_KEYS) + 1)
_BIT: Final = np.concatenate(([0], 1 << np.arange(len(_KEYS), dtype=np.uint64))).astype(np.uint64)
_ALLOWED: Final = np.array([255, *(_allowed(k, d) for k, d in _KEYS.items())], np.uint8)
_IS_NAME: Final = np.array([False, *(d == _S for d in _KEYS.values())], bool)

_ODD_ESCAPE: Final = re.compile(rb"\\u(?:00[4-7]|[dD][89a-fA-F])")
"""Letters written as escapes could hide a key; halves of surrogate pairs are no text."""


def present_keys(text: bytes, *, trusted: bool = False) -> dict[str, pl.DataType]:
    """Known keys that stand in ``text`` (lines of operations), with the types to parse them as.

    Args:
        text: the lines.
        trusted: they come from ``native_lines.clean``: nothing in them is doubtful.

    Raises:
        RefusedError: a key stands twice in a line, a value begins as its key does not allow, or
            the text is written in a way that this scan cannot follow.
    """
    seen = 0
    start = 0
    while start < len(text):
        stop = text.find(b"\n", min(start + _BLOCK, len(text) - 1)) + 1 or len(text)
        seen |= _keys_of_block(text[start:stop], trusted=trusted)
        start = stop
    return {name: dtype for i, (name, dtype) in enumerate(_KEYS.items()) if seen >> i & 1}


_BLOCK: Final = 1 << 20
"""Bytes scanned at once: the arrays of one step stay in the processor's cache for the next."""


def _keys_of_block(text: bytes, *, trusted: bool) -> int:
    """The keys in some lines, one bit for each."""
    if not trusted and b"\\" in text and _ODD_ESCAPE.search(text):
        raise RefusedError
    byte = np.frombuffer(text, np.uint8)
    quote = byte[:-1] == 34
    after = byte[1:]
    if (
        not trusted and (quote & (after <= 32)).any()
    ):  # `"key" :`, or a text that begins with a space
        raise RefusedError
    at = np.flatnonzero(quote & (after == 58))
    at = at[(at > 0) & (byte[at - 1] != 92)]  # not the end of a key, but \": within a text
    key = _ID[_slot(_words_before(text, at))]
    known = key > 0
    at, key = at[known], key[known]
    bits = _BIT[key]
    if trusted:
        return int(np.bitwise_or.reduce(bits))

    first = byte[np.minimum(at + 2, len(byte) - 1)]
    first = np.where(first == 32, byte[np.minimum(at + 3, len(byte) - 1)], first)
    wrong = (_FIRST_BYTE[first] & _ALLOWED[key]) == 0
    if (wrong | (_IS_NAME[key] & _TRUE_FALSE[first])).any():
        raise RefusedError

    ends = np.flatnonzero(byte == 10)
    bounds = np.searchsorted(at, ends)
    starts = np.concatenate(([0], bounds[:-1]))
    if not len(at) or (starts == bounds).any():  # a line without any known key
        raise RefusedError
    once = np.bitwise_or.reduceat(bits, starts)
    if (once != np.add.reduceat(bits, starts)).any():
        raise RefusedError
    return int(np.bitwise_or.reduce(once))


def _words_before(text: bytes, at: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The (up to) 8 bytes before each position, back to the opening quote, as big-endian words."""
    padded = b"\0" * 8 + text
    eight = np.ndarray((len(text) + 1,), ">u8", padded, strides=(1,))
    word = eight[at].astype(np.uint64)
    # The classic search for a zero byte, here for a quote; the lowest hit is always right.
    x = word ^ np.uint64(0x2222222222222222)
    hit = (x - np.uint64(0x0101010101010101)) & ~x & np.uint64(0x8080808080808080)
    lowest = hit & (~hit + np.uint64(1))
    return word & ((lowest >> np.uint64(7)) - np.uint64(1))


def parse(text: bytes, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """One row a line, one column a key of ``schema``; null where a line has no such key.

    Raises:
        RefusedError: a line is not JSON, or a value does not fit its type.
    """
    try:
        frame = pl.read_ndjson(io.BytesIO(text), schema=dict(schema))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as e:
        raise RefusedError from e
    if frame.height != text.count(b"\n"):
        raise RefusedError
    return frame


# --------------------------------------------------------------------------------------------------
# Columns

_INT32: Final = 2**31 - 1
_BIG: Final = 1 << 62
_RANGES: Final[dict[str, tuple[int, int]]] = {
    "lane": (0, _INT32), "root": (0, _INT32), "matched_peer": (0, _INT32), "count": (0, _BIG),
    "count_out": (0, _BIG), "bytes": (0, _BIG), "ordinal": (0, _BIG), "flags": (0, 2**32 - 1),
}  # fmt: skip


@dataclass(slots=True)
class Interned:
    """What names became; shared by all chunks of one reading."""

    strings: StringTable
    stacks: dict[tuple[str, ...], int]
    comms: dict[tuple[int, str], int]
    """(job, communicator id) to a code that is not yet the row of the comms table."""


def encode(
    text: bytes,
    file: npt.NDArray[np.int32],
    job: npt.NDArray[np.int32],
    exact: npt.NDArray[np.bool_],
    names: Interned,
    *,
    trusted: bool = False,
) -> pl.DataFrame:
    """The event columns of operation lines, and ``__file``.

    Args:
        text: the lines.
        file: (lines,) index of the file of each line.
        job: (lines,) its job.
        exact: (lines,) true: an absent key is null and names are catalogue spellings already;
            false: the defaults of the format apply.
        names: extended with what is new.
        trusted: as for :func:`present_keys`.

    Returns:
        Frame with the columns of EVENTS but without ranks; ``comm`` and ``new_comm`` hold codes of
        ``names.comms``.

    Raises:
        RefusedError: some line is not what the format allows.
    """
    schema = present_keys(text, trusted=trusted)
    if "seq" not in schema or "op" not in schema:
        raise RefusedError
    schema.pop("kind", None)
    frame = parse(text, schema)
    _check_ranges(frame)
    columns: dict[str, pl.Series] = {
        "__file": pl.Series(file, dtype=pl.Int32),
        "job": pl.Series(job, dtype=pl.Int32),
        "__exact": pl.Series(exact, dtype=pl.Boolean),
    }
    for key in schema:
        series = frame[key]
        if key == "op":
            series = _op_codes(frame["op"], columns["__exact"], names.strings)
        elif key in ("stream", "reduce_op"):
            series = _codes(series, names.strings.code)
        elif key == "dtype":
            series = _codes(series, lambda t: dtype_code(t, names.strings))
        elif key in ("comm", "new_comm"):
            series = _comm_codes(columns["job"], series, names.comms)
        elif key in _ENUMS:
            series = _enum(series, _ENUMS[key])
        elif key in ("peer", "recv_peer"):
            series = _wild(series, _INT32).cast(pl.Int32)
        elif key in ("tag", "recv_tag"):
            series = _wild(series, 2**63 - 1)
        elif key == "requests":
            series = _requests(series)
        elif key == "splits":
            series = _splits(series)
        elif key == "returned":
            series = _numbers(series)
        elif key == "stack":
            series = _stacks(series, text, names.stacks)
        elif key in ("lane", "root", "matched_peer"):
            series = series.cast(pl.Int32)
        elif key == "flags":
            series = series.cast(pl.UInt32)
        columns[key] = series
    table = _with_defaults(pl.DataFrame(columns))
    if "requests" in schema:
        # A wait for no request at all is over at once; in the table, no request means all.
        nothing = frame["requests"].eq_missing("[]") & ~columns["__exact"]
        table = table.with_columns(blocking=pl.col("blocking") & ~nothing)
    return table.drop("__exact")


_ENUMS: Final = {"state": STATE, "mode": MODE, "send_mode": SEND_MODE}


def _check_ranges(frame: pl.DataFrame) -> None:
    if frame["seq"].null_count() or frame["op"].null_count():
        raise RefusedError
    here = [k for k in _RANGES if k in frame.columns]
    if not here:
        return
    ends = frame.select(
        *(pl.col(k).min().alias(f"{k}.min") for k in here),
        *(pl.col(k).max().alias(f"{k}.max") for k in here),
    ).row(0, named=True)
    for k in here:
        low, high = _RANGES[k]
        if ends[f"{k}.min"] is not None and (ends[f"{k}.min"] < low or ends[f"{k}.max"] > high):
            raise RefusedError


def _codes(texts: pl.Series, code: Callable[[str], int]) -> pl.Series:
    """Each text by its code; ``code`` is called once a distinct text, in order of first sight."""
    distinct = texts.drop_nulls().unique(maintain_order=True)
    codes = pl.Series([code(t) for t in distinct], dtype=pl.Int32)
    return _mapped(texts, distinct, codes)


def _mapped(texts: pl.Series, old: pl.Series, new: pl.Series) -> pl.Series:
    if not len(old):
        return pl.Series(texts.name, [None], new.dtype).new_from_index(0, len(texts))
    return texts.replace_strict(old, new, default=None, return_dtype=new.dtype)


def _enum(texts: pl.Series, values: Mapping[str, int]) -> pl.Series:
    distinct = texts.drop_nulls().unique(maintain_order=True)
    if not set(distinct) <= set(values):
        raise RefusedError
    return _mapped(texts, distinct, pl.Series([values[t] for t in distinct], dtype=pl.UInt8))


def _op_codes(texts: pl.Series, exact: pl.Series, strings: StringTable) -> pl.Series:
    if (texts == "").any():
        raise RefusedError
    if not exact.any():
        return _codes(texts, lambda t: op_code(op_spelling(t), strings))
    as_is = _codes(texts, lambda t: op_code(t, strings))
    if exact.all():
        return as_is
    spelled = _codes(texts, lambda t: op_code(op_spelling(t), strings))
    return as_is.zip_with(exact, spelled)


def _comm_codes(job: pl.Series, ids: pl.Series, known: dict[tuple[int, str], int]) -> pl.Series:
    frame = pl.DataFrame([job.alias("job"), ids.alias("id")])
    pairs = frame.filter(pl.col("id").is_not_null()).unique(maintain_order=True)
    if pairs.height > MAX_COMMS // 2:
        raise RefusedError
    codes = [known.setdefault(pair, len(known)) for pair in pairs.iter_rows()]
    pairs = pairs.with_columns(pl.Series("code", codes, pl.Int32))
    joined = frame.join(pairs, on=["job", "id"], how="left", maintain_order="left")
    return joined["code"].alias(ids.name)


def _wild(texts: pl.Series, high: int) -> pl.Series:
    """Numbers 0..high, "any" as ANY."""
    any_ = texts == "any"
    numbers = _to_int(texts.set(any_, None) if any_.any() else texts)
    if numbers.null_count() < len(numbers) and not (
        numbers.min() >= 0 and numbers.max() <= high  # type: ignore[operator]
    ):
        raise RefusedError
    return numbers.set(any_, ANY) if any_.any() else numbers


def _to_int(texts: pl.Series) -> pl.Series:
    try:
        return texts.cast(pl.Int64)
    except pl.exceptions.PolarsError as e:
        raise RefusedError from e


def _requests(texts: pl.Series) -> pl.Series:
    """The empty list for "all" and "[]", the list of its numbers for "[1, 2]"."""
    frame = pl.DataFrame({"text": texts}).with_row_index("row")
    every = frame.filter(pl.col("text").is_in(["all", "[]"])).select(
        "row", list=pl.lit([], pl.List(pl.Int64))
    )
    listed = frame.filter(~pl.col("text").is_in(["all", "[]"]))
    if not listed["text"].str.contains(r"^\[[-0-9, ]+\]$").all():
        raise RefusedError
    try:
        numbers = listed.select(
            "row", list=pl.col("text").str.slice(1).str.head(-1).str.split(", ").cast(_INTS)
        )
    except pl.exceptions.PolarsError as e:
        raise RefusedError from e
    both = pl.concat([every, numbers])
    return frame.join(both, on="row", how="left", maintain_order="left")["list"].alias(texts.name)


def _flat(lists: pl.Series) -> pl.Series:
    some = lists.drop_nulls()
    return some.filter(some.list.len() > 0).explode(empty_as_null=False)


def _splits(lists: pl.Series) -> pl.Series:
    flat = _flat(lists)
    if flat.null_count() or (
        len(flat) and not (flat.min() >= 0 and flat.max() <= _BIG)  # type: ignore[operator]
    ):
        raise RefusedError
    return lists


def _numbers(lists: pl.Series) -> pl.Series:
    if _flat(lists).null_count():
        raise RefusedError
    return lists


_RAW: Final = re.compile(r"[\\\x00-\x1f]")


class _Stack(msgspec.Struct):
    stack: list[str] | None = None


def _stacks(texts: pl.Series, text: bytes, known: dict[tuple[str, ...], int]) -> pl.Series:
    def code(frames: Iterable[str]) -> int:
        return known.setdefault(tuple(frames), len(known))

    distinct = texts.drop_nulls().unique(maintain_order=True)
    try:
        if any(_RAW.search(t) for t in distinct):
            # Polars does not escape what it must when it gives a list as text.
            found = msgspec.json.Decoder(_Stack).decode_lines(text)
            codes = [None if x.stack is None else code(x.stack) for x in found]
            return pl.Series(texts.name, codes, pl.Int32)
        new = [code(msgspec.json.decode(t, type=list[str])) for t in distinct]
    except msgspec.MsgspecError as e:
        raise RefusedError from e
    return _mapped(texts, distinct, pl.Series(new, dtype=pl.Int32))


def _with_defaults(table: pl.DataFrame) -> pl.DataFrame:
    """What an absent key means (TRACE_FORMAT.md), and the checks that need several keys."""
    missing = {
        "lane": pl.Int32, "state": pl.UInt8, "blocking": pl.Boolean, "stream": pl.Int32,
        "comm": pl.Int32, "flags": pl.UInt32,
    }  # fmt: skip
    table = table.with_columns(
        pl.lit(None, dtype).alias(k) for k, dtype in missing.items() if k not in table.columns
    )
    op = pl.col("op")
    needs_comm = (op >= OP["all_reduce"]) & (op != OP["finalize"])
    if table.select((needs_comm & pl.col("comm").is_null()).any()).item():
        raise RefusedError
    on_host = pl.col("stream").is_null()
    unless_exact = ~pl.col("__exact")
    out = [
        pl.col("lane").fill_null(0),
        pl.col("state").fill_null(STATE["unknown"]),
        # `blocking` is about the host; an operation on a stream never holds it
        pl.when(unless_exact & ~on_host)
        .then(statement=False)
        .otherwise(pl.col("blocking").fill_null(on_host))
        .alias("blocking"),
        pl.col("flags").fill_null(
            pl.when(op >= OP_OTHER).then(pl.lit(FLAG["unknown_op"], pl.UInt32)).otherwise(0)
        ),
    ]

    def default(name: str, dtype: pl.DataType, where: pl.Expr, value: pl.Expr) -> None:
        fill = pl.when(where & unless_exact).then(value)
        out.append(
            (pl.col(name).fill_null(fill) if name in table.columns else fill)
            .cast(dtype)
            .alias(name)
        )

    is_wait, is_send = op == OP["wait"], op.is_in([OP["send"], OP["sendrecv"]])
    default("mode", pl.UInt8(), is_wait, pl.lit(MODE["all"]))
    default("send_mode", pl.UInt8(), is_send, pl.lit(SEND_MODE["standard"]))
    default("requests", _INTS, is_wait, pl.lit([], _INTS))
    if {"count", "dtype"} <= set(table.columns):
        size = pl.col("dtype").replace_strict(
            list(range(len(DTYPE_BYTES))),
            list(DTYPE_BYTES.values()),
            default=None,
            return_dtype=pl.Int64,
        )
        fits = pl.col("count") <= _BIG // 16
        default("bytes", _I, fits, pl.col("count") * size)
    return table.with_columns(out)
