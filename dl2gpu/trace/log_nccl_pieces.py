"""Messages of NCCL's logs: lines cut apart where several run together, halves joined again.

Source: FORMATS.md section 5.1.
"""

from __future__ import annotations

import re
from typing import Final

import polars as pl

__all__ = [
    "BEGUN", "CALL", "COMM", "LONGEST_NUMBER", "ROOM", "WORDS", "mended", "number", "positions",
    "processes", "split_glued", "true_hosts",
]  # fmt: skip

WORDS: Final = (
    r"opCount|[NR]CCL (?:WARN|version)|n[rR]anks[ =]|stream 0x|datatype \d|globalrank| COMPLETE"
    r"|[NR]CCL INFO \w{0,20}:?$"
)
"""A line that holds none of these says nothing here, and is no half of one that does."""

_HOST: Final = r"[A-Za-z0-9][A-Za-z0-9_.\-]*"
_PROCESS: Final = rf"({_HOST}):(\d+):(\d+) (?:\[(-?\d+)\] )?"
_LEVEL: Final = r"(?:[NR]CCL) (INFO|WARN|TRACE|CALL)"
_PREFIX: Final = rf"{_PROCESS}(?:\d+\.\d+ )?(?:[\w./\-]+:\d+ (?:\([^)]*\) )?)?{_LEVEL}"
"""host:pid:tid [device] [file:line] NCCL INFO. A warning names the place in the source."""
_START: Final = rf"{_HOST}:\d+:\d+ (?:\[-?\d+\] )?(?:\d+\.\d+ )?(?:[\w./\-]+:\d+ )?[NR]CCL "
CALL: Final = (
    r"(\w+): opCount (?:0x)?([0-9a-f]+) sendbuff (\(nil\)|0x[0-9a-f]+) "
    r"recvbuff (\(nil\)|0x[0-9a-f]+) (?:acc \S+ )?count (-?\d+) datatype (-?\d+) op (-?\d+) "
    r"(?:root|peer) (-?\d+) comm (0x[0-9a-f]+) \[nranks=(\d+)[^\]]*\] "
    r"stream[ =](\(nil\)|0x[0-9a-f]+)(?: task \d+ globalrank (\d+))?"
)
"""One call. RCCL adds ``acc``, ``task`` and ``globalrank``; a fork writes ``peer`` for ``root``."""
COMM: Final = r"comm 0x[0-9a-f]+ .*n[rR]anks \d+"
ROOM: Final = 1 << 16
"""Positions kept free between two lines, for the messages of a glued one."""
_MOST_HOSTS: Final = 4096
"""Names of hosts by which glued lines are cut apart; a file with more is no log of one job."""
_TEAR: Final = 8
"""Lines between the two halves of a torn line, at most."""
LONGEST_NUMBER: Final = 18
"""Digits of a number that is believed; more would leave 64 bits."""


def positions(lines: pl.DataFrame) -> pl.DataFrame:
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
        at=pl.col("line").clip(0, 1 << 46) * ROOM,
    )


def split_glued(base: pl.DataFrame) -> pl.DataFrame:
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
            .with_columns(at=pl.col("at") + pl.col("piece").clip(0, ROOM - 1))
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


def processes(pieces: pl.DataFrame) -> pl.DataFrame:
    """Adds ``host``, ``pid``, ``tid``, ``level``; ``rank`` and ``t`` where the line says them."""
    text = pl.col("text")
    found = pieces.lazy().with_columns(prefix=text.str.extract_groups(_PREFIX)).unnest("prefix")
    found = found.rename({"1": "host", "5": "level"}).with_columns(
        pid=number("2"), tid=number("3")
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
    return true_hosts(done)


_LAUNCHERS: Final = (
    r"^\s*\[rank(\d{1,7})\]:?\s",
    r"^\s*(\d{1,7}): ",
    r"^\s*\[\d+,(\d{1,7})\](?:<std(?:out|err)>)?:?",
)
"""The rank before a line: torchrun's log, srun --label, mpirun --tag-output."""
_STAMPED: Final = rf"\[(\d{{4}}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d{{1,9}})?)\] ?{_HOST}:\d+:\d+ "


def true_hosts(pieces: pl.DataFrame) -> pl.DataFrame:
    """Hosts whose name begins with the end of another line, or is cut, get their own name back.

    They are known by the process: the same numbers under a name that is the end of the other.
    """
    process = ["host", "pid", "tid"]
    names = (
        pieces.lazy()
        .filter(pl.col("host").is_not_null())
        .group_by(process)
        .agg(seen=pl.len())
        # of names with one end a few can be one name; in containers all processes have one number
        .with_columns(end=pl.col("host").str.tail(_END))
        .collect()
    )
    if names.height < 2:
        return pieces
    few = names.filter(pl.len().over("end", "pid", "tid") <= _MOST_ALIKE)
    short = names.filter(pl.col("host").str.len_bytes() < _END).sort("seen").head(_MOST_ALIKE)
    host, true = pl.col("host"), pl.col("host_true")
    pairs = (
        pl.concat(
            [
                few.join(few, on=["end", "pid", "tid"], suffix="_true").select(
                    *process, "seen", "host_true", "seen_true"
                ),
                short.join(names, on=["pid", "tid"], suffix="_true").select(
                    *process, "seen", "host_true", "seen_true"
                ),
            ]
        )
        .filter(
            (host != true)
            & (
                (host.str.ends_with(true) & (pl.col("seen") <= pl.col("seen_true")))
                | (true.str.ends_with(host) & (pl.col("seen") < pl.col("seen_true")))
            )
        )
        .group_by(process)
        .agg(true.sort_by("seen_true", "host_true").last())
    )
    if pairs.is_empty():
        return pieces
    return (
        pieces.join(pairs, on=["host", "pid", "tid"], how="left", maintain_order="left")
        .with_columns(host=pl.coalesce("host_true", "host"))
        .drop("host_true")
    )


_END: Final = 3
"""Letters at the end of a name by which names are compared."""
_MOST_ALIKE: Final = 256
"""Names with one end, and processes of one number under them, that are compared."""


def number(column: str, dtype: type[pl.DataType] = pl.Int64) -> pl.Expr:
    """Decimal text as a number; null where it is too long to be one."""
    text = pl.col(column)
    return pl.when(text.str.len_bytes() <= LONGEST_NUMBER).then(text).cast(dtype, strict=False)


# --------------------------------------------------------------------------------------------------
# Torn lines


def mended(pieces: pl.DataFrame, every: pl.DataFrame) -> pl.DataFrame:
    """Pieces that are no calls, with torn lines whole again; ``half`` says of what is left.

    It is "head" where a line has no end, and "tail" where it has no beginning. ``every``: all
    messages, which tell whose a communicator's pointer is.
    """
    text = pl.col("text")
    begun = text.str.contains("opCount", literal=True) | text.str.contains(BEGUN)
    head = (pl.col("more") & ~text.str.contains(_ENDED)) | (pl.col("host").is_not_null() & begun)
    tail = pl.col("host").is_null() & text.str.contains(_TAIL)
    pieces = pieces.with_columns(
        half=pl.when(head).then(pl.lit("head")).when(tail).then(pl.lit("tail"))
    )
    heads, tails = (pieces.filter(pl.col("half") == name) for name in ("head", "tail"))
    if heads.is_empty() or tails.is_empty():
        return pieces
    joined, used = _pairs(heads, tails, _owners(every))
    if joined.is_empty():
        return pieces
    rest = pieces.join(used, on=["file", "at"], how="anti")
    return pl.concat([rest, joined.select(rest.columns)]).sort("file", "at")


BEGUN: Final = r"[NR]CCL INFO (?:\w{0,20}|\w{1,20}:[ opCount]{0,8})$"
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
    return processes(plain.with_columns(more=pl.lit(value=False), half=None)), used


_WHOLE: Final = rf"{_PREFIX} (?:{CALL}|.*{COMM}.*- ?(?:Init|Destroy|Abort) \w+)"


def _nearest(heads: pl.DataFrame, tails: pl.DataFrame, owners: pl.DataFrame) -> pl.DataFrame | None:
    """Tails that make a whole line with a head before them, all with as few heads between.

    Where a line would name a communicator that no whole line knows, the halves may be of two lines:
    they are joined only if no tail makes a line on a communicator of its head's process.
    """
    heads = heads.sort("file", "at").with_row_index("head").cast({"head": pl.Int64})
    before = tails.sort("file", "at").join_asof(
        heads.select("file", "at", "head"), on="at", by="file", check_sortedness=False
    )
    own = owners.select("pointer", host_head="host", pid_head="pid")
    fitting: list[pl.DataFrame] = []
    for known in (True, False):
        for back in range(_TEAR):
            if back == len(fitting):
                fitting.append(_fitting(before, heads, back))
            if known:
                near = fitting[back].join(own, on=own.columns, how="semi")
            else:
                near = fitting[back].join(owners, on="pointer", how="anti")
            if near.height:
                return (
                    near.sort("file", "at")
                    .unique(["file", "at_head"], keep="first", maintain_order=True)
                    .drop("pointer")
                    .with_columns(
                        pl.col(f"{c}_head").alias(c) for c in ("line", "rank", "t", "more")
                    )
                )
    return None


def _fitting(before: pl.DataFrame, heads: pl.DataFrame, back: int) -> pl.DataFrame:
    """Tails that make a whole line with the head that lies ``back`` before the nearest one."""
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
    whole = pl.coalesce(pl.when(j.str.contains(_WHOLE)).then(j) for j in joined)
    return (
        near.with_columns(text=whole)
        .filter(pl.col("text").is_not_null())
        .with_columns(pointer=pl.col("text").str.extract(_POINTER))
    )


_LABELLED: Final = (
    r"^\s*(?:\d{1,7}: |\[\d+,\d+\](?:<std\w+>)?:? ?|\[rank\d+\]:? ?|\(\w+ pid=[^)]*\) )"
)
"""What a launcher puts before the second half of a line as well."""
