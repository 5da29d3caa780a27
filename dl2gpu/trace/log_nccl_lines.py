"""Grammar of NCCL's log lines: from lines of text to columns of calls and of communicator lines.

The regular expressions are not anchored: launchers put things before a line, lines of several
processes are glued together, and a line may be torn in two by that of another process. What is torn
is put together again where the two halves make a whole line and no other reading; what remains is
counted, with the process that wrote it, so that a call that cannot be read never looks like a call
that was not made.

Source: FORMATS.md sections 5.1 to 5.3, LOG_LINES.md ("NCCL_DEBUG=INFO, SUBSYS=COLL").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import polars as pl

from dl2gpu.trace.log_nccl_pieces import (
    BEGUN,
    CALL,
    COMM,
    LONGEST_NUMBER,
    WORDS,
    mended,
    number,
    positions,
    processes,
    split_glued,
    true_hosts,
)

__all__ = ["FACTS", "WORDS", "Parsed", "extract", "parsed"]

FACTS: Final[dict[str, pl.DataType]] = {
    "file": pl.Int32(),
    "line": pl.Int64(),
    "rank": pl.Int32(),  # as the launcher labels the line
    "at": pl.Int64(),  # position in the file, increasing
    "what": pl.String(),  # "call", "comm", "head", "tail", "warn", "version"
    "host": pl.String(),
    "pid": pl.Int64(),
    "tid": pl.Int64(),
    "t": pl.Int64(),
    "op": pl.String(),
    "op_count": pl.UInt64(),
    "count": pl.Int64(),  # null: no number that can be one; so in all that follow
    "dtype": pl.Int64(),
    "reduce": pl.Int64(),
    "root": pl.Int64(),  # of send and recv: the peer; ranks within the communicator
    "comm": pl.UInt64(),  # pointer, of one process
    "nranks": pl.Int64(),
    "stream": pl.UInt64(),  # 0: the default stream
    "send": pl.UInt64(),
    "global_rank": pl.Int64(),  # RCCL
    "text": pl.String(),  # of all but calls
}
"""Columns of what :func:`extract` gives."""


@dataclass(frozen=True)
class Parsed:
    """What the lines of a job say.

    Attributes:
        calls: one row a call, the columns of :data:`FACTS` without ``what`` and ``text``.
        comms: one row a line on a communicator: ``file``, ``at``, ``rank`` (by the launcher),
            ``host``, ``pid``, ``tid``, ``comm``, ``member`` (rank in it), ``nranks``, ``device``,
            ``comm_id``, ``parent``, ``split``, ``color``, ``event`` ("start", "complete", "info",
            "destroy", "abort").
        torn: one row a call that cannot be read: ``file``, ``at`` and, where known, ``host``,
            ``pid``, ``comm``, ``op``.
        warnings: ``file``, ``at``, ``host``, ``pid``, ``text`` of WARN lines.
        version: "2.18.5+cuda12.1" and its like, null where no line says it; ``library``: "nccl" or
            "rccl".
    """

    calls: pl.DataFrame
    comms: pl.DataFrame
    torn: pl.DataFrame
    warnings: pl.DataFrame
    version: str | None
    library: str


def extract(lines: pl.DataFrame) -> pl.DataFrame:
    """The facts in a frame of lines, one row of :data:`FACTS` each.

    Args:
        lines: ``file``, ``line``, ``text``; ``part`` (place in a glued line), ``rank`` and ``t``
            where the caller has them. In any order; a part of a file or several files.
    """
    base = positions(lines)
    if base.is_empty():
        return pl.DataFrame(schema=FACTS)
    return _rows(processes(split_glued(base)))


def _rows(pieces: pl.DataFrame, last: bool = False) -> pl.DataFrame:
    """Messages, and halves of such, as rows of :data:`FACTS`.

    A call without a process may be a half, the name of its operation cut: it stays one until all
    blocks are known (``last``).
    """
    text = pl.col("text")
    called = pieces["text"].str.contains(CALL) & pieces["host"].is_not_null()
    rest = mended(pieces.filter(~called), pieces)
    whole = text.str.contains(CALL) & pl.col("host").is_not_null()
    if last:
        whole |= text.str.contains(_SURE) & text.str.contains(CALL)
    rest = rest.with_columns(
        what=pl.when(whole).then(pl.lit("call"))
        .when(pl.col("level") == "WARN").then(pl.lit("warn"))
        .when(pl.col("host").is_not_null() & text.str.contains(COMM)).then(pl.lit("comm"))
        .when(text.str.contains(_VERSION)).then(pl.lit("version"))
        .otherwise("half")
    ).filter(pl.col("what").is_not_null())  # fmt: skip
    calls = pl.concat(
        [pieces.filter(called), rest.filter(pl.col("what") == "call").select(pieces.columns)]
    )
    others = rest.filter(pl.col("what") != "call").select(
        (pl.col(c) if c in rest.columns else pl.lit(None, d).alias(c)).cast(d)
        for c, d in FACTS.items()
    )
    return pl.concat([_calls(calls), others]).sort("file", "at")


_SURE: Final = r"\b(?:All\w+|ReduceScatter|Broadcast|Send|Recv): opCount"
"""Names of operations that are not the end of another one's."""


def parsed(facts: pl.DataFrame) -> Parsed:
    """Columns of all calls and communicator lines of a job, from its facts."""
    halves = facts.filter(pl.col("what").is_in(["head", "tail"]))
    facts = facts.filter(~pl.col("what").is_in(["head", "tail"]))
    if halves.height:
        # the halves of a line may lie in two blocks
        whole = _rows(_as_pieces(halves), last=True)
        halves = whole.filter(pl.col("what").is_in(["head", "tail"]))
        facts = pl.concat([facts, whole.filter(~pl.col("what").is_in(["head", "tail"]))])
    facts = true_hosts(facts.sort("file", "at"))
    of = {name: facts.filter(pl.col("what") == name) for name in ("call", "comm", "warn")}
    version, library = _version(facts.filter(pl.col("what") == "version"))
    return Parsed(
        calls=of["call"].drop("what", "text"),
        comms=_comms(of["comm"]),
        torn=_torn(halves),
        warnings=of["warn"].select("file", "at", "host", "pid", "text"),
        version=version,
        library=library,
    )


_VERSION: Final = r"([NR])CCL version :?\s*(\d[\w.+\-]{0,40})"


def _version(rows: pl.DataFrame) -> tuple[str | None, str]:
    """Version and library of the first line that names them."""
    found = (
        rows.head(1).select(pl.col("text").str.extract_groups(_VERSION)).unnest("text")
        .filter(pl.col("2").is_not_null())
    )  # fmt: skip
    if found.is_empty():
        return None, "nccl"
    letter, version = found.row(0)
    return version, "rccl" if letter == "R" else "nccl"


def _as_pieces(halves: pl.DataFrame) -> pl.DataFrame:
    """Halves left over from several blocks, as :func:`mended` takes them."""
    return halves.select(
        "file", "line", "text", "rank", "t", "at",
        "host", "pid", "tid",
        more=pl.col("what") == "head",
        level=pl.lit(None, pl.String),
    ).sort("file", "at")  # fmt: skip


_NO_LOSS: Final = r" COMPLETE|^(?:0x)?[0-9a-f]*(?: task \d+ globalrank \d+)?$"
"""Tails of lines on communicators, and of calls of which nothing else was missing."""


def _torn(halves: pl.DataFrame) -> pl.DataFrame:
    """Calls of which only a part is left."""
    text = pl.col("text")
    begun = text.str.contains("opCount", literal=True) | text.str.contains(BEGUN)
    return halves.filter(
        ((pl.col("what") == "head") & pl.col("host").is_not_null() & begun)
        | ((pl.col("what") == "tail") & ~text.str.contains(_NO_LOSS))
    ).select(
        "file", "at", "host", "pid",
        comm=text.str.extract(r"comm 0x([0-9a-f]{1,16}) ").str.to_integer(
            base=16, dtype=pl.UInt64, strict=False
        ),
        op=text.str.extract(r"(\w+): opCount"),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Columns


def _pointer(column: str) -> pl.Expr:
    """A pointer as a number, 0 for "(nil)"; null where it has more than 64 bits."""
    text = pl.col(column)
    digits = pl.when(text == "(nil)").then(pl.lit("0")).otherwise(text.str.strip_prefix("0x"))
    return digits.str.to_integer(base=16, dtype=pl.UInt64, strict=False)


_FIELDS: Final = ("op", "c", "s", "recv", "n", "d", "r", "peer", "pointer", "size", "q", "g")
_KEPT: Final = ("file", "line", "rank", "at", "host", "pid", "tid", "t", "more")


def _calls(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of :data:`FACTS` of messages that are calls."""
    plain, odd = _by_words(rows)
    found = (
        odd.lazy()
        .select(*_KEPT, call=pl.col("text").str.extract_groups(CALL))
        .unnest("call")
        .collect()
    )
    found = found.rename(dict(zip(found.columns[len(_KEPT) :], _FIELDS, strict=True)))
    found = pl.concat([plain, found])
    found = found.with_columns(q=_whole_stream(found))
    return found.select(
        "file", "line", "rank", "at", pl.lit("call").alias("what"), "host", "pid", "tid", "t", "op",
        op_count=pl.col("c").str.to_integer(base=16, dtype=pl.UInt64, strict=False),
        count=number("n"),
        dtype=number("d"),
        reduce=number("r"),
        root=number("peer"),
        comm=_pointer("pointer"),
        nranks=number("size"),
        stream=_pointer("q"),
        send=_pointer("s"),
        global_rank=number("g"),
        text=pl.lit(None, pl.String),
    )  # fmt: skip


_WORDS: Final = {
    "sendbuff": 1, "recvbuff": 3, "count": 5, "datatype": 7, "op": 9, "root": 11, "comm": 13,
    "stream": 16,
}  # fmt: skip
"""Where words stand behind "opCount" in a call as most versions print it."""
_PLAIN: Final = {
    "c": 0, "s": 2, "recv": 4, "n": 6, "d": 8, "r": 10, "peer": 12, "pointer": 14, "size": 15,
    "q": 17,
}  # fmt: skip


def _by_words(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Fields of calls of the plain form, and the rows of all others.

    Cutting at blanks takes a third of the time of an expression with twelve groups.
    """
    halves = rows.select(*_KEPT, "text", pl.col("text").str.splitn(" opCount ", 2).alias("half"))
    words = pl.col("field_1").str.split_exact(" ", 17)
    halves = halves.unnest("half").with_columns(
        words.struct.rename_fields([f"w{i}" for i in range(18)])
    ).unnest("field_1")  # fmt: skip
    plain = halves.select(
        pl.all_horizontal(
            *(pl.col(f"w{at}") == word for word, at in _WORDS.items()),
            pl.col("w0").str.contains(r"^[0-9a-f]+$"),
            pl.col("w17").str.contains(r"^(?:0x[0-9a-f]+|\(nil\))$"),
            pl.col("w15").str.contains(r"^\[nranks=\d+\]$"),
            ~pl.col("text").str.contains("globalrank", literal=True),
            pl.col("field_0").str.contains(r"\w:$"),
        ).fill_null(False)
    ).to_series()
    found = halves.filter(plain).select(
        *_KEPT,
        op=pl.col("field_0").str.extract(r"(\w+):$"),
        **{name: pl.col(f"w{at}") for name, at in _PLAIN.items() if name != "size"},
        size=pl.col("w15").str.slice(8).str.strip_suffix("]"),
        g=pl.lit(None, pl.String),
    )
    return found.select(*_KEPT, *_FIELDS), rows.filter(~plain)


def _whole_stream(found: pl.DataFrame) -> pl.Series:
    """Streams of calls whose line was cut in its last word, completed where one stream fits."""
    stream = found["q"]
    cut = found["more"] & stream.str.starts_with("0x")
    if not cut.any():
        return stream
    process = ["host", "pid"]
    numbered = found.select(*process, "q", "more").with_row_index("row")
    known = numbered.filter(~pl.col("more")).select(*process, "q").unique()
    fits = (
        numbered.filter(pl.col("more"))
        .join(known, on=process, suffix="_known")
        .filter(pl.col("q_known").str.starts_with(pl.col("q")))
        .group_by("row")
        .agg(pl.col("q_known").first(), fit=pl.len())
        .filter(pl.col("fit") == 1)
    )
    return (
        numbered.join(fits, on="row", how="left", maintain_order="left")
        .select(q=pl.coalesce("q_known", "q"))
        .to_series()
    )


_EVENTS: Final = {
    "Init START": "start",
    "Init COMPLETE": "complete",
    "Destroy COMPLETE": "destroy",
    "Abort COMPLETE": "abort",
}


def _comms(rows: pl.DataFrame) -> pl.DataFrame:
    """See :class:`Parsed`."""
    text = pl.col("text")
    body = text.str.extract(r"(comm 0x[0-9a-f]+ .*)$")
    done = text.str.extract(r"- ?(Init START|Init COMPLETE|Destroy COMPLETE|Abort COMPLETE)")
    return (
        rows.lazy()
        .with_columns(body=body)
        .select(
            "file", "at", "rank", "host", "pid", "tid",
            comm=_hex(r"^comm 0x([0-9a-f]+)"),
            member=_digits(r" rank (\d+)"),
            nranks=_digits(r" n[rR]anks (\d+)"),
            device=_digits(r" cudaDev (\d+)"),
            comm_id=_hex(r" commId 0x([0-9a-f]+)"),
            parent=_hex(r" parent 0x([0-9a-f]+)"),
            split=_digits(r" (?:split|child)Count (\d+)"),
            color=pl.col("body").str.extract(r" color (-?\d{1,18})").cast(pl.Int64, strict=False),
            event=done.replace_strict(_EVENTS, default=None),
            # the line on nodes and local ranks names a rank as well
            info=text.str.contains(" nRanks ", literal=True),
        )
        .filter(pl.col("comm").is_not_null() & (pl.col("member") < pl.col("nranks")))
        .filter(pl.col("nranks") <= MOST_RANKS)
        .with_columns(event=pl.coalesce("event", pl.when("info").then(pl.lit("info"))))
        .filter(pl.col("event").is_not_null())
        .drop("info")
        .collect()
    )  # fmt: skip


MOST_RANKS: Final = 1 << 20
"""Ranks of a communicator that is believed."""


def _digits(pattern: str) -> pl.Expr:
    found = pl.col("body").str.extract(pattern)
    short = pl.when(found.str.len_bytes() <= LONGEST_NUMBER).then(found)
    return short.cast(pl.Int64, strict=False)


def _hex(pattern: str) -> pl.Expr:
    found = pl.col("body").str.extract(pattern)
    return found.str.to_integer(base=16, dtype=pl.UInt64, strict=False)
