"""What a line of a log can state, as a table: one row a statement.

The facts of :mod:`log_c10d` and :mod:`log_life` have the columns of :data:`FACTS`; what a kind of
fact does not have is null. They are few even where the log is large, so texts are kept as texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import polars as pl

__all__ = ["EXCERPT", "FACTS", "facts", "none"]

FACTS: Final[dict[str, pl.DataType]] = {
    "file": pl.Int32(),
    "line": pl.Int64(),
    "part": pl.Int32(),
    "what": pl.String(),  # kind of statement
    "rank": pl.Int32(),  # global rank that states it, by its launcher
    "said": pl.Int32(),  # rank that the message itself names as its writer (of the group)
    "host": pl.String(),
    "t": pl.Int64(),
    "pg": pl.String(),  # process group: id, unique name, description
    "guid": pl.String(),
    "desc": pl.String(),
    "ordinal": pl.Int64(),
    "op": pl.String(),
    "count": pl.Int64(),
    "count_out": pl.Int64(),
    "shape": pl.String(),
    "enqueued": pl.Int64(),
    "started": pl.Int64(),
    "completed": pl.Int64(),
    "number": pl.Int64(),  # milliseconds, exit code, world size, ... as the kind has it
    "of": pl.List(pl.Int32()),  # ranks of whom it is stated
    "text": pl.String(),  # the message, cut
}

EXCERPT: Final = 240
"""Characters of a message that are kept."""


def none() -> pl.DataFrame:
    """No facts."""
    return pl.DataFrame(schema=FACTS)


def facts(lines: pl.DataFrame, what: str | pl.Expr, **columns: pl.Expr) -> pl.DataFrame:
    """Facts of the kind ``what``, one for each of ``lines``; ``columns`` are computed of them."""
    given: Mapping[str, pl.Expr] = {
        "what": pl.lit(what) if isinstance(what, str) else what,
        "text": pl.col("text").str.head(EXCERPT),
        **columns,
    }
    present = set(lines.columns)
    return lines.select(
        given[name].cast(dtype, strict=False).alias(name)
        if name in given
        else pl.col(name).cast(dtype)
        if name in present
        else pl.lit(None, dtype).alias(name)
        for name, dtype in FACTS.items()
    )
