"""Text reports of NCCL's RAS (``ncclras``), to the columns of :data:`REPORTS`.

A report lists what is odd: of a communicator whose ranks have made different numbers of calls it
prints how many ranks have made how many, and the places of the smaller set, which may be the ranks
that are ahead. What is not listed agrees with the others.

Source: FORMATS.md section 5.4, LOG_LINES.md.
"""

from __future__ import annotations

import re
from typing import Final

import polars as pl

__all__ = ["REPORTS", "is_text", "parse"]

REPORTS: Final[dict[str, pl.DataType]] = {
    "report": pl.Int32(),  # place in the file, from 0
    "t": pl.Int64(),  # ns since the epoch as the report's local time says; null: not said
    "gpus": pl.Int64(),  # of the whole job
    "comm": pl.String(),  # hash; null: the row is of no communicator
    "size": pl.Int64(),  # its ranks; null: not said
    "what": pl.String(),  # "report", "count", "place", "missing", "dead", "error"
    "op": pl.String(),  # NCCL's name of the collective; null: all together
    "rank": pl.Int64(),  # in the communicator; null: ranks that are not named
    "ranks": pl.Int64(),  # how many ranks
    "count": pl.Int64(),  # calls that they have made
    "host": pl.String(),
    "pid": pl.Int64(),
    "device": pl.String(),
    "text": pl.String(),
}
"""Rows of a report. Each report has one row "report", whatever else it has."""

_N: Final = "[0-9]+"
"""Not ``\\d``, which in Polars is also a digit of other scripts, and no integer."""
_GPU: Final = r"(?:GPUs? (\S+) )?managed by process ([0-9]+) on node ([^\s,]+)"
_MOST_REPORTS: Final = 100_000
_MOST_LISTED: Final = 1 << 16


def is_text(data: bytes) -> bool:
    """Is this the text form, and not JSON?"""
    return _TEXT.search(data) is not None


_TEXT: Final = re.compile(
    rb"Job summary|Communicators\.\.\.|#\d+-\d+ \([0-9a-f]{4,16}\) (?:MISMATCH|INCOMPLETE|ERROR)"
)


def parse(text: str) -> pl.DataFrame:
    """Rows of :data:`REPORTS` of all reports in ``text``."""
    lines = pl.DataFrame({"text": text.splitlines()}, schema={"text": pl.String}).with_row_index(
        "line"
    )
    body = pl.col("text").str.strip_chars_end()
    first = "Job summary" if "Job summary" in text else "Communicators..."
    lines = lines.with_columns(
        text=body,
        # what stands before the first summary (the version) is of the first report
        report=(body.str.contains(first, literal=True).cum_sum().cast(pl.Int32) - 1)
        .clip(0, _MOST_REPORTS),
    )  # fmt: skip
    lines = _sections(lines)
    parts = [_heads(lines), _counts(lines), _missing(lines), _errors(lines)]
    rows = pl.concat([_whole(part) for part in parts])
    size = _sizes(lines)
    return (
        rows.drop("size")
        .join(size, on=["report", "comm"], how="left", maintain_order="left")
        .select(REPORTS.keys())
    )


def _whole(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(
        (pl.col(c).cast(d, strict=False) if c in frame.columns else pl.lit(None, d).alias(c))
        for c, d in REPORTS.items()
    )


def _sections(lines: pl.DataFrame) -> pl.DataFrame:
    """Adds ``comm``, ``group`` and ``op`` of the section that a line stands in."""
    head = pl.col("text").str.extract_groups(
        r"^\s*#([0-9]{1,9})-([0-9]{1,9}) \((?:0x)?([0-9a-f]{1,16})\)"
    )
    lines = lines.with_columns(head=head).unnest("head")
    begins = pl.col("text").str.contains(r"^(?:={3,}|\S.*:?$)") & pl.col("3").is_null()
    lines = lines.with_columns(
        # a heading ends the section before it
        comm=pl.when(begins).then(pl.lit("")).otherwise("3"),
        group=pl.when(begins).then(pl.lit("")).otherwise("1"),
    ).with_columns(pl.col("comm", "group").forward_fill().over("report"))
    headline = pl.col("text").str.extract(
        r"(?i)ranks have different (?:(\w+) )?operation counts|status", 0
    )
    named = pl.col("text").str.extract(r"different (\w+) operation counts")
    op = pl.when(named != "collective").then(named).otherwise(pl.lit(""))
    lines = lines.with_columns(op=pl.when(headline.is_not_null()).then(op))
    lines = lines.with_columns(
        op=pl.when(pl.col("3").is_not_null()).then(pl.lit("")).otherwise("op")
    )
    return lines.with_columns(
        pl.col("op").forward_fill().over("report"),
        section=pl.col("3").is_not_null().cum_sum(),
    ).with_columns(
        pl.when(pl.col(c) != "").then(pl.col(c)).alias(c) for c in ("comm", "group", "op")
    ).drop("1", "2", "3")  # fmt: skip


def _heads(lines: pl.DataFrame) -> pl.DataFrame:
    """One row a report, with the number of GPUs in the summary's last column."""
    totals = lines.select(
        "report",
        gpus=pl.col("text")
        .str.extract(rf"^\s*{_N}\s+{_N}(?:-{_N})?\s+{_N}(?:-{_N})?\s+{_N}\s+([0-9]{{1,9}})\s*$")
        .cast(pl.Int64, strict=False),
    )
    stamp = pl.col("text").str.extract(
        r"([0-9]{4}-[0-9][0-9]-[0-9][0-9][ T][0-9][0-9]:[0-9][0-9]:[0-9][0-9](?:\.[0-9]{1,9})?)"
    ).str.replace("T", " ")  # fmt: skip
    times = lines.select(
        "report",
        t=stamp.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="ns", strict=False).cast(
            pl.Int64
        ),
    )
    return (
        totals.group_by("report").agg(pl.col("gpus").drop_nulls().first())
        .join(times.group_by("report").agg(pl.col("t").drop_nulls().first()), on="report")
        .with_columns(what=pl.lit("report"))
        .sort("report")
    )  # fmt: skip


def _sizes(lines: pl.DataFrame) -> pl.DataFrame:
    """(report, comm, size): ranks of a communicator, from the table of groups."""
    table = lines.select(
        "report",
        row=pl.col("text").str.extract_groups(
            r"^\s*([0-9]{1,9})\s+[0-9]+\s+[0-9]+\s+[0-9-]+\s+([0-9]{1,9})\s+[0-9]+\s+[A-Z]"
        ),
    ).unnest("row")
    table = (
        table.filter(pl.col("1").is_not_null())
        .unique(["report", "1"], keep="first")
        .select("report", group="1", size=pl.col("2").cast(pl.Int64))
    )
    return (
        lines.filter(pl.col("comm").is_not_null())
        .select("report", "comm", "group")
        .unique(["report", "comm"], keep="first", maintain_order=True)
        .join(table, on=["report", "group"], how="left", maintain_order="left")
        .select("report", "comm", "size")
    )


def _counts(lines: pl.DataFrame) -> pl.DataFrame:
    """Ranks by the number of calls that they have made, named where the report names them."""
    of = ["report", "section", "comm", "op"]
    inside = lines.filter(pl.col("comm").is_not_null())
    text = pl.col("text")
    up_to = text.str.extract_groups(
        r"^\s*([0-9]{1,9}) ranks? (?:have|has) "
        r"(?:launched up to operation ([0-9]{1,18})|not launched any)"
    )
    groups = (
        inside.with_columns(up_to=up_to).unnest("up_to").filter(pl.col("1").is_not_null())
        .select(
            "line", *of, ranks=pl.col("1").cast(pl.Int64),
            count=pl.col("2").cast(pl.Int64).fill_null(0),
        )
    )  # fmt: skip
    each = text.str.extract_groups(
        r"^\s*Rank ([0-9]{1,9})"
        r"(?: has (?:launched up to operation ([0-9]{1,18})|(not) launched any))?"
        rf".*?-- {_GPU}"
    )
    listed = (
        inside.with_columns(each=each).unnest("each").filter(pl.col("1").is_not_null())
        .select(
            "line", *of, rank=pl.col("1").cast(pl.Int64),
            count=pl.when(pl.col("3").is_not_null()).then(0).otherwise(pl.col("2").cast(pl.Int64)),
            device="4", pid=pl.col("5").str.head(18).cast(pl.Int64), host="6",
        )
    )  # fmt: skip
    key = pl.struct(*of).hash().alias("key")  # operations may be null, and nulls must meet
    groups, listed = groups.with_columns(key), listed.with_columns(key)
    # ranks without a number of their own are one of the groups: that of their number, else the last
    bare = listed.filter(pl.col("count").is_null())
    told = (
        bare.group_by("key").agg(n=pl.len().cast(pl.Int64))
        .join(groups, on="key")
        .with_columns(fits=pl.col("ranks") == pl.col("n"))
        .sort("fits", "line")
        .unique("key", keep="last", maintain_order=True)
        .select("key", of_group="count", group_line="line")
    )  # fmt: skip
    listed = (
        listed.join(told, on="key", how="left", maintain_order="left")
        .with_columns(count=pl.coalesce("count", "of_group"))
    )  # fmt: skip
    named = listed.group_by("key", "count").agg(n=pl.len().cast(pl.Int64))
    rest = (
        groups.join(named, on=["key", "count"], how="left", maintain_order="left")
        .with_columns(ranks=pl.col("ranks") - pl.col("n").fill_null(0))
        .filter(pl.col("ranks") > 0)
    )
    return pl.concat(
        [
            _whole(rest.with_columns(what=pl.lit("count"))),
            _whole(
                listed.with_columns(what=pl.lit("count"), ranks=pl.lit(1)).filter(
                    pl.col("count").is_not_null()
                )
            ),
        ]
    )


def _missing(lines: pl.DataFrame) -> pl.DataFrame:
    """Ranks and processes that did not answer."""
    text = pl.col("text")
    listed = (
        lines.filter(pl.col("comm").is_not_null())
        .with_columns(
            rank=text.str.extract(r"(?i)missing ranks?:\s*([0-9,\s-]+)").str.extract_all(
                r"[0-9]{1,9}(?:\s*-\s*[0-9]{1,9})?"
            )
        )
        .explode("rank", empty_as_null=False)
        .filter(pl.col("rank").is_not_null())
        .with_columns(
            low=pl.col("rank").str.extract(r"^([0-9]+)").cast(pl.Int64),
            high=pl.col("rank").str.extract(r"([0-9]+)$").cast(pl.Int64),
        )
        .with_columns(high=pl.min_horizontal("high", pl.col("low") + _MOST_LISTED))
        .with_columns(rank=pl.int_ranges("low", pl.col("high") + 1))
        .explode("rank", empty_as_null=False)
    )
    dead = text.str.contains(r"(?i)considered dead|PEER_DEAD|peer dead")
    silent = text.str.contains(r"(?i)process [0-9]+ (?:is|on node \S+ is) unresponsive")
    gone = (
        lines.filter(dead | silent)
        .with_columns(
            what=pl.when(dead).then(pl.lit("dead")).otherwise(pl.lit("missing")),
            rank=text.str.extract(r"(?i)\brank ([0-9]{1,9})\b").cast(pl.Int64, strict=False),
            pid=text.str.extract(r"(?i)process ([0-9]{1,18})").cast(pl.Int64, strict=False),
            host=text.str.extract(r"(?i)node ([^\s,]+)"),
        )
    )  # fmt: skip
    return pl.concat(
        [
            _whole(listed.with_columns(what=pl.lit("missing"), ranks=pl.lit(1))),
            _whole(gone.with_columns(ranks=pl.lit(1))),
        ]
    )


def _errors(lines: pl.DataFrame) -> pl.DataFrame:
    """Sections on errors and on states that differ, as they are."""
    found = pl.col("text").str.contains(
        r"(?i)^\s*#[0-9]+-[0-9]+ \(.*\) .*(?:ERROR|INCOMPLETE)|(?:have|has) status|error"
    )
    inside = lines.filter(pl.col("comm").is_not_null() & found)
    return _whole(
        inside.with_columns(
            what=pl.lit("error"), text=pl.col("text").str.strip_chars().str.head(200)
        )
    )
