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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from dl2gpu.trace.files import DEFAULT, Limits
from dl2gpu.trace.inputs import InputError, TraceFile
from dl2gpu.trace.stream import StreamCutError
from dl2gpu.trace.stream import pieces as pieces_of

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
    """The wanted physical lines of one file, in order: ``file``, ``line``, ``text``.

    Args:
        file: what to read.
        number: its index.
        words: regular expression (Rust) of what makes a line worth a row.
        found: is filled.

    Raises:
        InputError: the file cannot be opened or passes a limit.
    """
    tail: list[pl.DataFrame] = []
    for block, first in _blocks(file, found, limits):
        lines = pl.read_lines(io.BytesIO(block), name="text").with_row_index("line", first)
        lines = lines.select(
            pl.lit(number, pl.Int32).alias("file"), pl.col("line").cast(pl.Int64), "text"
        )
        found.lines = first - 1 + lines.height
        wanted = pl.col("text").str.contains(words)
        if first <= HEAD:
            wanted |= pl.col("line") <= HEAD
        tail = [*tail, lines.tail(TAIL)]
        kept = lines.filter(wanted)
        if kept.height:
            yield kept
        while len(tail) > 1 and sum(f.height for f in tail[1:]) >= TAIL:
            tail.pop(0)
    if tail:
        last = pl.concat(tail).tail(TAIL)
        last = last.filter((pl.col("line") > HEAD) & ~pl.col("text").str.contains(words))
        if last.height:
            yield last


def _blocks(file: TraceFile, found: FileLines, limits: Limits) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines in UTF-8 with "\\n", and the number of the first line of each."""
    rest = b""
    first = 1
    decoder: codecs.IncrementalDecoder | None = None
    fresh = True
    skipping = False  # within a line that is too long
    pieces = pieces_of(file, limits, BLOCK)
    while True:
        try:
            piece = next(pieces, None)
        except (InputError, StreamCutError) as e:
            if fresh:
                raise InputError(str(e)) from e
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
    """UTF-8 as Polars takes it: other bytes are replaced; CRLF becomes LF; no zero bytes.

    Marks of byte order go: one stands before the first line of each file that was put in.
    """
    if not data.isascii():
        data = data.decode("utf-8", "replace").replace("\ufeff", "").encode("utf-8")
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
    r"\[[EWIF](?:\d{3,4} [\d:.]+)? (?:ProcessGroup|TCPStore|logger|Utils|socket)\w*\.[ch]pp:\d+\]|"
    r"\[(?:rank|default)\d+\]: |"
    r"\[\d+,\d+\]<std(?:err|out)>:)"
)
_BREAK: Final = "\x02"


def parse(lines: pl.DataFrame, found: Sequence[FileLines]) -> pl.DataFrame:
    """Physical lines (``file``, ``line``, ``text``) of any files as rows of :data:`LINES`.

    ``found``: by number of the file; ``year`` and ``tasks`` are filled from its first lines.
    """
    text = pl.col("text")
    lines = lines.with_columns(text.str.head(LONGEST))
    wrapped = lines.select(text.str.contains(_JSON_LOG)).to_series()
    if wrapped.any():
        lines = pl.concat([lines.filter(~wrapped), _unwrapped(lines.filter(wrapped))]).sort(
            "file", "line"
        )
    # most lines are as they should be, and each look at them costs
    marks = rf"{_COLOUR}|[\r\x02]|[^\s]{_GLUE}"
    marked = lines.select(text.str.contains(marks)).to_series()
    plain = lines.filter(~marked).with_columns(part=pl.lit(0, pl.Int32))
    if not marked.any():
        return _with_origin(plain, found)
    frame = pl.concat([plain, _taken_apart(lines.filter(marked))]).sort("file", "line", "part")
    return _with_origin(frame, found)


_JSON_LOG: Final = r'^\{"log":"'
"""A line as Docker keeps it: one line of output, its stream and time."""


_ESCAPES: Final = {
    r"\n": "", r"\t": "\t", r"\r": "\r", r"\u001b": "\x1b", r"\"": '"', r"\u003c": "<",
    r"\u003e": ">", r"\u0026": "&", r"\\": "\\",
}  # fmt: skip


def _unwrapped(lines: pl.DataFrame) -> pl.DataFrame:
    """The output within the lines of Docker's JSON files, after its time."""
    text = pl.col("text")
    log = text.str.extract(r'^\{"log":"((?:[^"\\]|\\.)*)"').fill_null("")
    for escaped, plain in _ESCAPES.items():
        log = log.str.replace_all(escaped, plain, literal=True)
    time = text.str.extract(r'"time":"([^"]{0,40})"')
    return lines.with_columns(text=pl.concat_str([time, log], separator=" ", ignore_nulls=True))


def _taken_apart(lines: pl.DataFrame) -> pl.DataFrame:
    """Lines without colours, one row for each of the messages that a line holds."""
    text = pl.col("text")
    # a progress bar comes back to the beginning of its line; what is quoted is not cut
    frame = lines.with_columns(
        text=text.str.replace_all(_COLOUR, "").str.replace_all(_BREAK, " ", literal=True)
    ).with_columns(
        text=pl.when(text.str.contains(_QUOTED))
        .then(text.str.replace_all("\r", " ", literal=True))
        .otherwise(
            text.str.replace_all("\r", _BREAK, literal=True)
            .str.replace_all(r"([^\x02\s])" + _GLUE, "${1}" + _BREAK + "${2}")
            .str.replace_all(r"([^\x02\s])" + _GLUE, "${1}" + _BREAK + "${2}")
        )
    )
    return (
        frame.with_columns(_unglued(text).str.split(_BREAK))
        .with_columns(part=pl.int_ranges(0, pl.col("text").list.len(), dtype=pl.Int32))
        .explode("text", "part", empty_as_null=False)
        .filter((text.str.len_bytes() > 0) | (pl.col("part") == 0))
    )


_QUOTED: Final = (
    r"""(?:^|[\s=:\[({,])["'`“][^"'`\s][^"'`]*"""
    r"""(?:\[E ?\d* ?|\[[Rr]ank ?\d+\]|Watchdog caught|Traceback \()"""
)
"""A message inside quotation marks is somebody's data, not a message."""

_RANK_AT: Final = r"\[rank(\d{1,6})\]:"
_MPI: Final = r"^(?:[^\[]{0,80})?\[(?:\d+,)?(\d{1,6})\]<std(?:err|out)>:"
_SRUN: Final = r"^\s?(\d{1,6}): "
_LOCAL: Final = r"^(?:.{0,80}?[\s/])?\[(?:default|trainer|worker|role)_?(\d{1,4})\]:"
_RAY: Final = r"^.{0,60}?\((\w+) pid=(\d+)(?:, ip=([\w.:-]+))?[^)]*\)"
_CLOCK: Final = r"\d{2}:\d{2}:\d{2}(?:[^\d:]|$)"
_NCCL: Final = r"([A-Za-z0-9][\w.-]*):(\d+):\d+ \[\d+\] "
_RANK_WORD: Final = r"(?i)(?:^|[\s|\[(,;])(?:global[ _]?)?rank ?[=:#]? ?(\d{1,6})(?:\b)"

_PREFIX: Final = (
    r"^\s*(?:\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(?:[.,]\d+)?(?:Z|[+-]\d{2}:?\d{2})?\s+"
    r"(?:std(?:err|out) [FP] |(?:\|\s*)?)?)?"
    r"(?:(?:\[(?:\d+,)?\d+\]<std(?:err|out)>:|\[rank\d+\]:|\[[A-Za-z_-]+\d+\]:|"
    r"\(\w+ pid=\d+[^)]*\)|B-\S+ )\s?)*"
)

_DATE: Final = r"(\d{4})[-/](\d{2})[-/](\d{2})[T _](\d{2}):(\d{2}):(\d{2})(?:[.,](\d{1,9}))?"
_GLOG: Final = r"\b[EWIF](\d{1,2})(\d{2}) (\d{2}):(\d{2}):(\d{2})\.(\d{1,9})"


def _unglued(text: pl.Expr) -> pl.Expr:
    """A launcher prefix belongs to the message behind it: no break between the two."""
    again = text
    for prefix in (r"\[(?:rank|default)\d+\]: ?", r"\[(?:\d+,)?\d+\]<std(?:err|out)>: ?"):
        again = again.str.replace_all(rf"({prefix})\x02", "${1}")
    return again.str.replace_all(
        r"^(\S{0,40}(?:\s\S{1,40}){0,4}[\s:])\x02(\[rank\d+\]:)", "${1}${2}"
    )


def _with_origin(frame: pl.DataFrame, found: Sequence[FileLines]) -> pl.DataFrame:
    text = pl.col("text")
    timed = text.str.contains(_CLOCK)
    frame = frame.with_columns(
        host=text.str.extract(_NCCL, 1),
        pid=text.str.extract(_NCCL, 2).cast(pl.Int64, strict=False),
        task=text.str.extract(_SRUN),
    ).with_row_index("row")
    # dates and workers stand in few lines, or in few kinds of logs
    times = frame.filter(timed).select(
        "row", date=text.str.extract_groups(_DATE), glog=text.str.extract_groups(_GLOG)
    )
    ray = frame.filter(text.str.contains(" pid=", literal=True)).select(
        "row", ray=text.str.extract_groups(_RAY)
    )
    for found_in_some in (times, ray):
        frame = frame.join(found_in_some, on="row", how="left", maintain_order="left")
    _learn(frame, found)
    labelled = [i for i, f in enumerate(found) if f.tasks]
    years = pl.DataFrame(
        {"file": range(len(found)), "year": [f.year for f in found]},
        schema={"file": pl.Int32(), "year": pl.Int32()},
    )
    frame = frame.join(years, on="file", how="left", maintain_order="left").with_columns(
        rank=pl.coalesce(
            text.str.extract(_RANK_AT),
            text.str.extract(_MPI),
            pl.when(pl.col("file").is_in(labelled)).then("task"),
        ).cast(pl.Int32, strict=False),
        local=text.str.extract(_LOCAL).cast(pl.Int32, strict=False),
        pid=pl.coalesce("pid", pl.col("ray").struct.field("2").cast(pl.Int64, strict=False)),
        host=pl.coalesce("host", pl.col("ray").struct.field("3")),
    )
    return frame.with_columns(
        t=pl.coalesce(_time("glog", pl.col("year").fill_null(1970), 1), _time("date", None, 2)),
        text=pl.when(pl.col("file").is_in(labelled))
        .then(text.str.replace(_SRUN, ""))
        .otherwise(text)
        .str.replace(_PREFIX, ""),
    ).select([pl.col(c).cast(d) for c, d in LINES.items()])


def _learn(frame: pl.DataFrame, found: Sequence[FileLines]) -> None:
    """Fills ``year`` and ``tasks`` of files from their first lines."""
    seen = frame.group_by("file").agg(
        year=pl.col("date").struct.field("1").drop_nulls().first().cast(pl.Int32, strict=False),
        # one such line may be a list in somebody's text; a label is on every line
        tasks=pl.col("task").is_not_null().filter(pl.col("text").str.len_bytes() > 0).mean(),
    )
    for number, year, tasks in seen.iter_rows():
        file = found[number]
        file.year = year if file.year is None else file.year
        file.tasks = (tasks or 0.0) > _LABELLED if file.tasks is None else file.tasks


_LABELLED: Final = 0.8


def _time(column: str, year: pl.Expr | None, first: int) -> pl.Expr:
    """Nanoseconds since the epoch of the groups of a date.

    A date without a year, in a file that names none, is of 1970: differences are right.

    Args:
        column: struct of the groups.
        year: None: it is the first group.
        first: the group with the month.
    """

    def group(number: int) -> pl.Expr:
        return pl.col(column).struct.field(str(number))

    y = year if year is not None else group(1).cast(pl.Int32, strict=False)
    month, day, hour, minute, second = (
        group(first + i).cast(pl.Int32, strict=False) for i in range(5)
    )
    valid = (
        y.is_between(1970, 2200)
        & month.is_between(1, 12)
        & day.is_between(1, 31)
        & hour.is_between(0, 23)
        & minute.is_between(0, 59)
        & second.is_between(0, 59)
    )
    seconds = ((_days(y, month, day) * 24 + hour) * 60 + minute) * 60 + second
    fraction = group(first + 5).fill_null("0").str.pad_end(9, "0")
    ns = fraction.cast(pl.Int64, strict=False)
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
