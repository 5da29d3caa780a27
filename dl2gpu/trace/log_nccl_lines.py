"""Grammar of NCCL's log lines: from lines of text to columns of calls and of communicator lines.

The regular expressions are not anchored: launchers put things before a line, lines of several
processes are glued together, and a line may be torn in two by that of another process. What is torn
is put together again where the two halves make a whole line and no other reading; what remains is
counted, with the process that wrote it, so that a call that cannot be read never looks like a call
that was not made.

Source: FORMATS.md sections 5.1 to 5.3, LOG_LINES.md ("NCCL_DEBUG=INFO, SUBSYS=COLL").
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import polars as pl

__all__ = ["FACTS", "WORDS", "Parsed", "extract", "parsed"]

WORDS: Final = (
    r"opCount|[NR]CCL (?:WARN|version)|n[rR]anks[ =]|stream 0x|datatype \d|globalrank| COMPLETE"
    r"|[NR]CCL INFO \w{0,20}:?$"
)
"""A line that holds none of these says nothing here, and is no half of one that does."""

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

_HOST: Final = r"[A-Za-z0-9][A-Za-z0-9_.\-]*"
_PROCESS: Final = rf"({_HOST}):(\d+):(\d+) (?:\[(-?\d+)\] )?"
_LEVEL: Final = r"(?:[NR]CCL) (INFO|WARN|TRACE|CALL)"
_PREFIX: Final = rf"{_PROCESS}(?:\d+\.\d+ )?(?:[\w./\-]+:\d+ (?:\([^)]*\) )?)?{_LEVEL}"
"""host:pid:tid [device] [file:line] NCCL INFO. A warning names the place in the source."""
_START: Final = rf"{_HOST}:\d+:\d+ (?:\[-?\d+\] )?(?:\d+\.\d+ )?(?:[\w./\-]+:\d+ )?[NR]CCL "
_CALL: Final = (
    r"(\w+): opCount (?:0x)?([0-9a-f]+) sendbuff (\(nil\)|0x[0-9a-f]+) "
    r"recvbuff (\(nil\)|0x[0-9a-f]+) (?:acc \S+ )?count (-?\d+) datatype (-?\d+) op (-?\d+) "
    r"(?:root|peer) (-?\d+) comm (0x[0-9a-f]+) \[nranks=(\d+)[^\]]*\] "
    r"stream[ =](\(nil\)|0x[0-9a-f]+)(?: task \d+ globalrank (\d+))?"
)
"""One call. RCCL adds ``acc``, ``task`` and ``globalrank``; a fork writes ``peer`` for ``root``."""
_COMM: Final = r"comm 0x[0-9a-f]+ .*n[rR]anks \d+"
_ROOM: Final = 1 << 16
"""Positions kept free between two lines, for the messages of a glued one."""
_MOST_HOSTS: Final = 4096
"""Names of hosts by which glued lines are cut apart; a file with more is no log of one job."""
_TEAR: Final = 8
"""Lines between the two halves of a torn line, at most."""
_LONGEST_NUMBER: Final = 18
"""Digits of a number that is believed; more would leave 64 bits."""


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
    base = _positions(lines)
    if base.is_empty():
        return pl.DataFrame(schema=FACTS)
    return _rows(_processes(_split_glued(base)))


def _rows(pieces: pl.DataFrame, last: bool = False) -> pl.DataFrame:
    """Messages, and halves of such, as rows of :data:`FACTS`.

    A call without a process may be a half, the name of its operation cut: it stays one until all
    blocks are known (``last``).
    """
    text = pl.col("text")
    called = pieces["text"].str.contains(_CALL) & pieces["host"].is_not_null()
    rest = _mended(pieces.filter(~called), pieces)
    whole = text.str.contains(_CALL) & pl.col("host").is_not_null()
    if last:
        whole |= text.str.contains(_SURE) & text.str.contains(_CALL)
    rest = rest.with_columns(
        what=pl.when(whole).then(pl.lit("call"))
        .when(pl.col("level") == "WARN").then(pl.lit("warn"))
        .when(pl.col("host").is_not_null() & text.str.contains(_COMM)).then(pl.lit("comm"))
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
        mended = _rows(_as_pieces(halves), last=True)
        halves = mended.filter(pl.col("what").is_in(["head", "tail"]))
        facts = pl.concat([facts, mended.filter(~pl.col("what").is_in(["head", "tail"]))])
    facts = _true_hosts(facts.sort("file", "at"))
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


# --------------------------------------------------------------------------------------------------
# One row a message


def _positions(lines: pl.DataFrame) -> pl.DataFrame:
    """``file``, ``line``, ``at``, ``text``, ``rank``, ``t`` of wanted lines, each whole, in order.

    Where the caller has cut a line in parts they are joined again: without the names of the hosts
    the cut may be in the wrong place.
    """
    frame = lines.lazy()
    for name, dtype in (("part", pl.Int32), ("rank", pl.Int32), ("t", pl.Int64)):
        if name not in lines.columns:
            frame = frame.with_columns(pl.lit(None, dtype).alias(name))
    columns = ["file", "line", "text", "rank", "t"]
    cut = lines["part"].fill_null(0).max() if "part" in lines.columns and lines.height else 0
    if cut:
        frame = (
            frame.sort("file", "line", "part", nulls_last=False)
            .group_by("file", "line", maintain_order=True)
            .agg(pl.col("text").str.join(""), pl.col("rank").first(), pl.col("t").first())
        )
    found = (
        frame.filter(pl.col("text").str.contains(WORDS)).select(columns).sort("file", "line")
    ).collect()
    if found["text"].str.contains("\x1b", literal=True).any():
        found = found.with_columns(pl.col("text").str.replace_all(r"\x1b\[[0-9;?]*[A-Za-z]", ""))
    return found.with_columns(
        pl.col("text").str.strip_chars_end("\r\n"),
        at=pl.col("line").clip(0, 1 << 46) * _ROOM,
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


def _split_glued(base: pl.DataFrame) -> pl.DataFrame:
    """One row a message: lines that hold several are cut before each message's host.

    Where one line runs into the next there is no sign between them, and the end of a pointer reads
    as the beginning of a host's name. A host is known from lines that begin with it.
    """
    text = pl.col("text")
    doubtful = base.select(
        (text.str.count_matches(_LEVEL) > 1)
        | (text.str.count_matches(r":\d+:\d+ \[-?\d+\] ") > 1)
        | text.str.contains(r"0x[0-9a-f]+[\w.\-]*:\d+:\d+ (?:\[-?\d+\] )?[NR]CCL ")
        | text.str.contains(rf"(?:opCount|buff|datatype|nranks|stream).*{_START}")
    ).to_series()
    if not doubtful.any():
        return base.with_columns(more=pl.lit(value=False))
    whole = base.filter(~doubtful).with_columns(more=pl.lit(value=False))
    glued = base.filter(doubtful).with_columns(more=pl.lit(value=False))
    hosts = _hosts(base)
    if hosts:
        names = "|".join(re.escape(h) for h in sorted(hosts, key=lambda h: (-len(h), h)))
        cut = rf"((?:{names}):\d+:\d+ (?:\[-?\d+\] )?)"
        line = ["file", "line", "at"]
        glued = (
            glued.with_columns(text.str.replace_all(cut, "\x1e${1}").str.split("\x1e"))
            .explode("text", empty_as_null=True)
            .filter(text.str.strip_chars() != "")
            .with_columns(piece=pl.int_range(pl.len(), dtype=pl.Int64).over(line))
            .with_columns(
                more=pl.col("piece") < pl.col("piece").max().over(line),
                # the launcher's word is on the first message alone
                rank=pl.when(pl.col("piece") == 0).then("rank"),
            )
            .with_columns(at=pl.col("at") + pl.col("piece").clip(0, _ROOM - 1))
            .drop("piece")
        )
    return pl.concat([whole, glued.select(whole.columns)]).sort("at")


def _hosts(base: pl.DataFrame) -> list[str]:
    """Names of hosts, without those that are a host with the end of another line before it."""
    found = (
        base.lazy()
        .select(pl.col("text").str.extract_groups(rf"({_HOST}):(\d+):\d+ (?:\[-?\d+\] )?[NR]CCL "))
        .unnest("text")
        .select(host="1", pid="2")
        .filter(pl.col("host").is_not_null())
        .group_by("host")
        .agg(seen=pl.len(), pids=pl.col("pid").unique())
        .sort("seen", "host", descending=[True, False])
        .head(_MOST_HOSTS)
        .collect()
    )
    kept: dict[str, set[str]] = {}
    for name, _, pids in found.iter_rows():
        if not any(name.endswith(k) and known.issuperset(pids) for k, known in kept.items()):
            kept[name] = set(pids)
    return list(kept)


def _processes(pieces: pl.DataFrame) -> pl.DataFrame:
    """Adds ``host``, ``pid``, ``tid``, ``level``; ``rank`` and ``t`` where the line says them."""
    text = pl.col("text")
    found = pieces.lazy().with_columns(prefix=text.str.extract_groups(_PREFIX)).unnest("prefix")
    found = found.rename({"1": "host", "5": "level"}).with_columns(
        pid=_number("2"), tid=_number("3")
    ).drop("2", "3", "4")  # fmt: skip
    if pieces["rank"].null_count() == pieces.height:
        launcher = pl.coalesce(text.str.extract(pattern) for pattern in _LAUNCHERS)
        found = found.with_columns(rank=launcher.cast(pl.Int32, strict=False))
    done = found.collect()
    if pieces["t"].null_count() == pieces.height and done["text"].str.contains(_STAMPED).any():
        stamp = text.str.extract(_STAMPED).str.replace("T", " ")
        done = done.with_columns(
            t=stamp.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False)
            .cast(pl.Int64)
        )  # fmt: skip
    return _true_hosts(done)


_LAUNCHERS: Final = (
    r"^\s*\[rank(\d{1,7})\]:?\s",
    r"^\s*(\d{1,7}): ",
    r"^\s*\[\d+,(\d{1,7})\](?:<std(?:out|err)>)?:?",
)
"""The rank before a line: torchrun's log, srun --label, mpirun --tag-output."""
_STAMPED: Final = rf"\[(\d{{4}}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{{1,9}})?)\] ?{_HOST}:\d+:\d+ "


def _true_hosts(pieces: pl.DataFrame) -> pl.DataFrame:
    """Hosts whose name begins with the end of another line, or is cut, get their own name back.

    They are known by the process: the same numbers under a name that is the end of the other.
    """
    names = (
        pieces.lazy()
        .filter(pl.col("host").is_not_null())
        .group_by("host", "pid", "tid")
        .agg(seen=pl.len())
    )
    host, true = pl.col("host"), pl.col("host_true")
    pairs = (
        names.join(names, on=["pid", "tid"], suffix="_true")
        .filter(
            (host != true)
            & (
                (host.str.ends_with(true) & (pl.col("seen") <= pl.col("seen_true")))
                | (true.str.ends_with(host) & (pl.col("seen") < pl.col("seen_true")))
            )
        )
        .group_by("host", "pid", "tid")
        .agg(true.sort_by("seen_true", "host_true").last())
        .collect()
    )
    if pairs.is_empty():
        return pieces
    return (
        pieces.join(pairs, on=["host", "pid", "tid"], how="left", maintain_order="left")
        .with_columns(host=pl.coalesce("host_true", "host"))
        .drop("host_true")
    )


def _number(column: str, dtype: type[pl.DataType] = pl.Int64) -> pl.Expr:
    """Decimal text as a number; null where it is too long to be one."""
    text = pl.col(column)
    return pl.when(text.str.len_bytes() <= _LONGEST_NUMBER).then(text).cast(dtype, strict=False)


# --------------------------------------------------------------------------------------------------
# Torn lines


def _mended(pieces: pl.DataFrame, every: pl.DataFrame) -> pl.DataFrame:
    """Pieces that are no calls, with torn lines whole again; ``half`` says of what is left.

    It is "head" where a line has no end, and "tail" where it has no beginning. ``every``: all
    messages, which tell whose a communicator's pointer is.
    """
    text = pl.col("text")
    begun = text.str.contains("opCount", literal=True) | text.str.contains(_BEGUN)
    head = (pl.col("more") & ~text.str.contains(_ENDED)) | (pl.col("host").is_not_null() & begun)
    tail = pl.col("host").is_null() & text.str.contains(_TAIL)
    pieces = pieces.with_columns(
        half=pl.when(head).then(pl.lit("head")).when(tail).then(pl.lit("tail"))
    )
    heads, tails = (pieces.filter(pl.col("half") == name) for name in ("head", "tail"))
    if heads.is_empty() or tails.is_empty():
        return pieces
    mended, used = _pairs(heads, tails, _owners(every))
    if mended.is_empty():
        return pieces
    rest = pieces.join(used, on=["file", "at"], how="anti")
    return pl.concat([rest, mended.select(rest.columns)]).sort("file", "at")


def _as_pieces(halves: pl.DataFrame) -> pl.DataFrame:
    """Halves left over from several blocks, as :func:`_mended` takes them."""
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
    begun = text.str.contains("opCount", literal=True) | text.str.contains(_BEGUN)
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


_BEGUN: Final = r"[NR]CCL INFO (?:\w{0,20}|\w{1,20}:[ opCount]{0,8})$"
"""A line cut before the words "opCount" are out."""
_ENDED: Final = r"(?:COMPLETE|START)$"
_TAIL: Final = (
    r"(?:recvbuff|count \d+|datatype \d+|root -?\d+|comm 0x[0-9a-f]+|nranks[ =]\d+\]?|"
    r"stream 0x[0-9a-f]+|globalrank \d+|- (?:Init|Destroy|Abort) COMPLETE)"
)


def _owners(pieces: pl.DataFrame) -> pl.DataFrame:
    """(pointer, host, pid, several): whose pointers of communicators are, from whole messages."""
    return (
        pieces.lazy()
        .filter(pl.col("host").is_not_null() & ~pl.col("more"))
        .select("host", "pid", pointer=pl.col("text").str.extract(_POINTER))
        .filter(pl.col("pointer").is_not_null())
        .unique()
        .collect()
    )


_POINTER: Final = r" comm (0x[0-9a-f]+) "


def _pairs(
    heads: pl.DataFrame, tails: pl.DataFrame, owners: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Heads joined with their tails, and (``file``, ``at``) of both.

    A tail belongs to the nearest open head before it with which it makes a whole line that names
    a communicator of the head's process.
    """
    columns = heads.columns
    place = ["file", "at"]
    done: list[pl.DataFrame] = []
    used = heads.select(place).clear()
    for _ in range(_TEAR):
        near = _nearest(heads, tails, owners)
        if near is None:
            break
        done.append(near.with_columns(at="at_head").select(columns))
        gone = pl.concat([near.select("file", at="at_head"), near.select(place)])
        used = pl.concat([used, gone])
        heads, tails = (frame.join(gone, on=place, how="anti") for frame in (heads, tails))
        if heads.is_empty() or tails.is_empty():
            break
    if not done:
        return heads.clear(), used
    plain = pl.concat(done).drop("host", "pid", "tid", "level", "half")
    return _processes(plain.with_columns(more=pl.lit(value=False), half=None)), used


_WHOLE: Final = rf"{_PREFIX} (?:{_CALL}|.*{_COMM}.*- ?(?:Init|Destroy|Abort) \w+)"


def _nearest(heads: pl.DataFrame, tails: pl.DataFrame, owners: pl.DataFrame) -> pl.DataFrame | None:
    """Tails that make a whole line with a head before them, all with as few heads between."""
    heads = heads.sort("file", "at").with_row_index("head").cast({"head": pl.Int64})
    before = tails.sort("file", "at").join_asof(
        heads.select("file", "at", "head"), on="at", by="file", check_sortedness=False
    )
    for back in range(_TEAR):
        near = (
            before.with_columns(pl.col("head") - back)
            .join(heads, on=["file", "head"], suffix="_head")
            .filter(pl.col("line") - pl.col("line_head") <= _TEAR)
        )
        bare = pl.col("text").str.replace(_LABELLED, "")
        joined = [
            pl.concat_str("text_head", pl.lit(between), rest)
            for rest in (pl.col("text"), bare)
            for between in ("", " ")
        ]
        near = (
            near.with_columns(
                text=pl.coalesce(pl.when(j.str.contains(_WHOLE)).then(j) for j in joined)
            )
            .filter(pl.col("text").is_not_null())
            .with_columns(pointer=pl.col("text").str.extract(_POINTER))
        )
        own = near.join(
            owners.select("pointer", host_head="host", pid_head="pid"),
            on=["pointer", "host_head", "pid_head"], how="semi",
        )  # fmt: skip
        unknown = near.join(owners, on="pointer", how="anti")
        near = (
            pl.concat([own, unknown])
            .sort("file", "at")
            .unique(["file", "at_head"], keep="first", maintain_order=True)
            .drop("pointer")
        )
        if near.height:
            return near.with_columns(
                pl.col(f"{c}_head").alias(c) for c in ("line", "rank", "t", "more")
            )
    return None


_LABELLED: Final = (
    r"^\s*(?:\d{1,7}: |\[\d+,\d+\](?:<std\w+>)?:? ?|\[rank\d+\]:? ?|\(\w+ pid=[^)]*\) )"
)
"""What a launcher puts before the second half of a line as well."""


# --------------------------------------------------------------------------------------------------
# Columns


def _pointer(column: str) -> pl.Expr:
    """A pointer as a number, 0 for "(nil)"; null where it has more than 64 bits."""
    text = pl.col(column)
    digits = pl.when(text == "(nil)").then(pl.lit("0")).otherwise(text.str.strip_prefix("0x"))
    return digits.str.to_integer(base=16, dtype=pl.UInt64, strict=False)


def _calls(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows of :data:`FACTS` of messages that are calls."""
    found = (
        rows.lazy()
        .select(
            "file", "line", "rank", "at", "host", "pid", "tid", "t", "more",
            call=pl.col("text").str.extract_groups(_CALL),
        )
        .unnest("call")
        .collect()
    )  # fmt: skip
    names = ["op", "c", "s", "recv", "n", "d", "r", "peer", "pointer", "size", "q", "g"]
    found = found.rename(dict(zip(found.columns[9:], names, strict=True)))
    found = found.with_columns(q=_whole_stream(found))
    return found.select(
        "file", "line", "rank", "at", pl.lit("call").alias("what"), "host", "pid", "tid", "t", "op",
        op_count=pl.col("c").str.to_integer(base=16, dtype=pl.UInt64, strict=False),
        count=_number("n"),
        dtype=_number("d"),
        reduce=_number("r"),
        root=_number("peer"),
        comm=_pointer("pointer"),
        nranks=_number("size"),
        stream=_pointer("q"),
        send=_pointer("s"),
        global_rank=_number("g"),
        text=pl.lit(None, pl.String),
    )  # fmt: skip


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
    short = pl.when(found.str.len_bytes() <= _LONGEST_NUMBER).then(found)
    return short.cast(pl.Int64, strict=False)


def _hex(pattern: str) -> pl.Expr:
    found = pl.col("body").str.extract(pattern)
    return found.str.to_integer(base=16, dtype=pl.UInt64, strict=False)
