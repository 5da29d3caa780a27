"""Lines of text logs: bounded blocks of bytes in, frames of normalised lines out.

A log comes as launchers left it: UTF-8, UTF-16 or Latin-1, CRLF, colours, several ranks in one
file with a prefix each, lines glued together or torn. Here each physical line becomes one or more
rows of :data:`LINES`, with whatever its prefix says of the process that wrote it; what a line
means is the affair of the grammars (``log_c10d.py``, ``log_nccl.py``).

Only lines that hold one of the words a grammar asks for, and the first and last lines of each file,
become rows: the others are looked at once, by a compiled search, and dropped.

Source: FORMATS.md sections 5.1, 6 and 9; LOG_LINES.md.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import polars as pl

from dl2gpu.trace.files import DEFAULT, Limits, read_pieces
from dl2gpu.trace.inputs import InputError, TraceFile

__all__ = ["LINES", "FileLines", "line_blocks", "parse"]

LINES: Final[dict[str, pl.DataType]] = {
    "file": pl.Int32(),  # index into the files of the job
    "line": pl.Int64(),  # number in the file, from 1; glued lines share it
    "part": pl.Int32(),  # place within a physical line that held several
    "text": pl.String(),  # without colours and launcher prefixes
    "rank": pl.Int32(),  # global rank, where the prefix says it
    "local": pl.Int32(),  # local rank, where the prefix says only that
    "host": pl.String(),  # where the prefix says it
    "pid": pl.Int64(),
    "t": pl.Int64(),  # ns since the epoch as the line says; zone and, where absent, year assumed
}
"""Columns of a frame of lines. Null: the line does not say."""

BLOCK: Final = 8 << 20
"""Bytes looked at once."""
LONGEST: Final = 64 << 10
"""Bytes kept of one line. What is longer holds no message of a library."""
HEAD: Final = 300
TAIL: Final = 2000
"""First and last lines of a file that are always kept: they tell how a job began and ended."""


@dataclass
class FileLines:
    """What reading one file showed beside its lines."""

    lines: int = 0
    size: int = 0
    cut_lines: int = 0
    """Lines longer than :data:`LONGEST`, of which only the beginning was kept."""
    torn_end: bool = False
    """The last line has no newline: its writer was stopped in the middle of it, or still writes."""
    year: int | None = None
    """First year that a date in the file names."""
    tasks: bool | None = None
    """Do lines begin with the number of a task, as ``srun --label`` puts it? None: not yet seen."""
    reason: str | None = None
    """Why the file was not read to its end."""


def line_blocks(
    file: TraceFile, number: int, words: str, found: FileLines, limits: Limits = DEFAULT
) -> Iterator[pl.DataFrame]:
    """Frames of :data:`LINES` of the wanted lines of one file, in order.

    Args:
        file: what to read.
        number: its index in the job.
        words: regular expression (Rust) of what makes a line worth a row.
        found: is filled.

    Raises:
        InputError: the file cannot be opened or passes a limit.
    """
    tail: list[pl.DataFrame] = []
    for block, first in _blocks(file, found, limits):
        lines = pl.read_lines(io.BytesIO(block), name="text").with_row_index("line", first)
        if "text" not in lines.columns or lines.is_empty():
            continue
        found.lines = first - 1 + lines.height
        wanted = pl.col("text").str.contains(words)
        if first <= HEAD:
            wanted |= pl.col("line") <= HEAD
        tail = [*tail, lines.tail(TAIL)]
        kept = lines.filter(wanted)
        # lines that turn out to be among the last ones come once more below
        if kept.height:
            yield parse(kept, number, found)
        while len(tail) > 1 and sum(f.height for f in tail[1:]) >= TAIL:
            tail.pop(0)
    if tail:
        last = pl.concat(tail).tail(TAIL)
        last = last.filter((pl.col("line") > HEAD) & ~pl.col("text").str.contains(words))
        if last.height:
            yield parse(last, number, found)


def _blocks(file: TraceFile, found: FileLines, limits: Limits) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines in UTF-8 with "\\n", and the number of the first line of each."""
    rest = b""
    first = 1
    decoder: codecs.IncrementalDecoder | None = None
    fresh = True
    skipping = False  # within a line that is too long
    pieces = read_pieces(file, BLOCK, limits)
    while True:
        try:
            piece = next(pieces, None)
        except InputError as e:
            if fresh:
                raise
            found.reason = str(e)
            piece = None
        if piece is None:
            break
        found.size += len(piece)
        if fresh:
            fresh = False
            decoder = _decoder(piece)
        if decoder is not None:
            piece = decoder.decode(piece).encode("utf-8", "replace")
        if skipping:
            end = piece.find(b"\n")
            if end < 0:
                continue
            piece, skipping = piece[end:], False
        data = rest + piece
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        if len(rest) > BLOCK:
            rest, skipping = rest[:LONGEST], True
            found.cut_lines += 1
        if end:
            block = _text(data[:end])
            yield block, first
            first += block.count(b"\n")
    if rest:
        found.torn_end = True
        yield _text(rest + b"\n"), first


def _decoder(head: bytes) -> codecs.IncrementalDecoder | None:
    """Decoder of what is not UTF-8 by its first bytes."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return codecs.getincrementaldecoder("utf-16")("replace")
    zeros = head[:512]
    if len(zeros) >= 8 and zeros[1::2].count(0) > 0.8 * len(zeros[1::2]):
        return codecs.getincrementaldecoder("utf-16-le")("replace")
    if len(zeros) >= 8 and zeros[::2].count(0) > 0.8 * len(zeros[::2]):
        return codecs.getincrementaldecoder("utf-16-be")("replace")
    return None


def _text(data: bytes) -> bytes:
    """UTF-8 as Polars takes it: other bytes are replaced; CRLF becomes LF; no zero bytes."""
    if not data.isascii():
        data = data.decode("utf-8", "replace").encode("utf-8")
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    if b"\0" in data:
        data = data.replace(b"\0", b"")
    return data


# --------------------------------------------------------------------------------------------------
# One line

_COLOUR: Final = (
    r"(?:\x1b|\^\[|#033|\\x1b|\\u001b|\\033)\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
)
_GLUE: Final = (
    # a message of a library that does not begin its line: the one before had no newline
    r"(\[rank\d+\]:\s?\[[EWIF]\d*\s|"
    r"\[[EWIF](?:\d{3,4} [\d:.]+)? (?:ProcessGroup|TCPStore|logger|Utils|socket)\w*\.(?:cpp|hpp):\d+\]|"
    r"\[(?:rank|default)\d+\]: |"
    r"\[\d+,\d+\]<std(?:err|out)>:)"
)
_BREAK: Final = "\x02"


def parse(lines: pl.DataFrame, number: int, found: FileLines) -> pl.DataFrame:
    """Physical lines (``line``, ``text``) as rows of :data:`LINES`.

    ``found.year`` is filled from the first date with a year.
    """
    text = pl.col("text").str.head(LONGEST)
    frame = lines.select(
        pl.lit(number, pl.Int32).alias("file"),
        pl.col("line").cast(pl.Int64),
        text=text.str.replace_all(_COLOUR, "").str.replace_all(_BREAK, " ", literal=True),
    )
    # a progress bar comes back to the beginning of its line; what is quoted is not cut
    frame = frame.with_columns(
        text=pl.when(pl.col("text").str.contains(_QUOTED))
        .then(pl.col("text").str.replace_all("\r", " ", literal=True))
        .otherwise(
            pl.col("text")
            .str.replace_all("\r", _BREAK, literal=True)
            .str.replace_all(r"([^\x02\s])" + _GLUE, "${1}" + _BREAK + "${2}")
            .str.replace_all(r"([^\x02\s])" + _GLUE, "${1}" + _BREAK + "${2}")
        )
    )
    frame = frame.with_columns(_unglued(pl.col("text")).str.split(_BREAK))
    frame = (
        frame.with_columns(part=pl.int_ranges(0, pl.col("text").list.len(), dtype=pl.Int32))
        .explode("text", "part")
        .filter((pl.col("text").str.len_bytes() > 0) | (pl.col("part") == 0))
    )
    return _with_origin(frame, found)


_QUOTED: Final = (
    r"""(?:^|[\s=:\[({,])["'`“][^"'`\s][^"'`]*(?:\[E ?\d* ?|\[[Rr]ank ?\d+\]|Watchdog caught|Traceback \()"""
)
"""A message inside quotation marks is somebody's data, not a message."""

_RANK_AT: Final = r"\[rank(\d{1,6})\]:"
_MPI: Final = r"^(?:[^\[]{0,80})?\[(?:\d+,)?(\d{1,6})\]<std(?:err|out)>:"
_SRUN: Final = r"^\s?(\d{1,6}): "
_LOCAL: Final = r"^(?:.{0,80}?[\s/])?\[(?:default|trainer|worker|role)_?(\d{1,4})\]:"
_RAY: Final = r"^.{0,60}?\((\w+) pid=(\d+)(?:, ip=([\w.:-]+))?[^)]*\)"
_NCCL: Final = r"([A-Za-z0-9][\w.-]*):(\d+):\d+ \[\d+\] "
_RANK_WORD: Final = r"(?i)(?:^|[\s|\[(,;])(?:global[ _]?)?rank ?[=:#]? ?(\d{1,6})(?:\b)"

_PREFIX: Final = (
    r"^\s*(?:\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(?:[.,]\d+)?(?:Z|[+-]\d{2}:?\d{2})?\s+"
    r"(?:std(?:err|out) [FP] |(?:\|\s*)?)?)?"
    r"(?:(?:\[(?:\d+,)?\d+\]<std(?:err|out)>:|\[rank\d+\]:|\[[A-Za-z_-]+\d+\]:|\d{1,6}: |"
    r"\(\w+ pid=\d+[^)]*\)|B-\S+ ))*\s?"
)

_DATE: Final = (
    r"(\d{4})[-/](\d{2})[-/](\d{2})[T _](\d{2}):(\d{2}):(\d{2})(?:[.,](\d{1,9}))?"
)
_GLOG: Final = r"(?:^|[\s\[:])[EWIF](\d{1,2})(\d{2}) (\d{2}):(\d{2}):(\d{2})\.(\d{1,9})"


def _unglued(text: pl.Expr) -> pl.Expr:
    """A launcher prefix belongs to the message behind it: no break between the two."""
    again = text
    for prefix in (r"\[(?:rank|default)\d+\]: ?", r"\[(?:\d+,)?\d+\]<std(?:err|out)>: ?"):
        again = again.str.replace_all(rf"({prefix})\x02", "${1}")
    return again.str.replace_all(
        r"^(\S{0,40}(?:\s\S{1,40}){0,4}[\s:])\x02(\[rank\d+\]:)", "${1}${2}"
    )


def _with_origin(frame: pl.DataFrame, found: FileLines) -> pl.DataFrame:
    text = pl.col("text")
    date = text.str.extract_groups(_DATE)
    glog = text.str.extract_groups(_GLOG)
    if found.tasks is None and frame.height:
        # one such line may be a list in somebody's text; a label is on every line
        share = frame.filter(text.str.len_bytes() > 0).select(text.str.contains(_SRUN).mean())
        found.tasks = (share.item() or 0.0) > 0.8
    task = text.str.extract(_SRUN) if found.tasks else pl.lit(None, pl.String)
    frame = frame.with_columns(
        rank=pl.coalesce(text.str.extract(_RANK_AT), text.str.extract(_MPI), task).cast(
            pl.Int32, strict=False
        ),
        local=text.str.extract(_LOCAL).cast(pl.Int32, strict=False),
        host=text.str.extract(_NCCL, 1),
        pid=text.str.extract(_NCCL, 2).cast(pl.Int64, strict=False),
        ray=text.str.extract_groups(_RAY),
        date=date,
        glog=glog,
    )
    frame = frame.with_columns(
        pid=pl.coalesce("pid", pl.col("ray").struct.field("2").cast(pl.Int64, strict=False)),
        host=pl.coalesce("host", pl.col("ray").struct.field("3")),
    )
    if found.year is None:
        years = frame["date"].struct.field("1").drop_nulls()
        if len(years):
            found.year = int(years[0])
    return frame.with_columns(
        t=pl.coalesce(
            _time("glog", str(found.year) if found.year is not None else None), _time("date", "")
        ),
        text=text.str.replace(_PREFIX, ""),
    ).select([pl.col(c).cast(d) for c, d in LINES.items()])


def _time(column: str, year: str | None) -> pl.Expr:
    """ns since the epoch of the groups of a date; ``year`` "" = the first group is it.

    A date without a year, in a file that names none, is of 1970: differences are right.
    """
    f = [pl.col(column).struct.field(str(i)).cast(pl.Int32, strict=False) for i in range(1, 7)]
    if year == "":
        y, parts = f[0], f[1:6]
        fraction = pl.col(column).struct.field("7")
    else:
        y, parts = pl.lit(int(year) if year else 1970, pl.Int32), f[0:5]
        fraction = pl.col(column).struct.field("6")
    month, day, hour, minute, second = parts
    valid = (
        y.is_between(1970, 2200)
        & month.is_between(1, 12)
        & day.is_between(1, 31)
        & hour.is_between(0, 23)
        & minute.is_between(0, 59)
        & second.is_between(0, 59)
    )
    days = _days(y, month, day)
    seconds = ((days * 24 + hour) * 60 + minute) * 60 + second
    ns = fraction.fill_null("0").str.pad_end(9, "0").cast(pl.Int64, strict=False)
    return pl.when(valid.fill_null(False)).then(seconds * 1_000_000_000 + ns)


def _days(y: pl.Expr, m: pl.Expr, d: pl.Expr) -> pl.Expr:
    """Days since 1970-01-01 of a date of the Gregorian calendar."""
    y, m, d = y.cast(pl.Int64), m.cast(pl.Int64), d.cast(pl.Int64)
    y = y - (m <= 2).cast(pl.Int64)
    era = y // 400
    yoe = y - era * 400
    doy = (153 * (m + pl.when(m > 2).then(-3).otherwise(9)) + 2) // 5 + d - 1
    doe = yoe * 365 + yoe // 4 - yoe // 100 + doy
    return era * 146097 + doe - 719468
