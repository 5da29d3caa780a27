"""What a line of a log can state, as a table: one row a statement.

The facts of :mod:`log_c10d` and :mod:`log_life` have the columns of :data:`FACTS`; what a kind of
fact does not have is null. They are few even where the log is large, so texts are kept as texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import polars as pl

__all__ = ["EXCERPT", "FACTS", "facts", "none", "own"]

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


_LEAST_LEAD: Final = 12
_QUOTING: Final = (
    r"(?i)\b(?:sample|prompt|target|question|answer|example|dataset|document|completion|label|"
    r"user|assistant|human|instruction|response|passage|snippet)\b\s?\d*\s?[:=\]]|"
    r"\b(?:quot\w+|old log|previous log|e\.g\.|grep|stackoverflow|says|said|like this|"
    r"for instance|i see|i get|we see)\b|^\s*[>#] "
)
_WORDS: Final = r"\b[a-z]{2,}[,.]? "
_MOST_WORDS: Final = 6
"""So many words of a sentence before a message, and it is part of the sentence."""
_OPEN_QUOTE: Final = r"""["'`“»>]\s?$|(?:^|[\s=:\[({,])["'`“][^"'`]*$"""
_BAR: Final = r"it/s|s/it|%\|"


def own(lines: pl.DataFrame, pattern: str, marks: str = "") -> pl.DataFrame:
    """Lines with ``pattern`` that are messages, not somebody's words about messages.

    What stands before a message comes from launchers and loggers: a time, a level, a name, the
    rest of a progress bar. Quotation marks, or half a sentence, make it a quotation: training data
    and documents hold such lines, too.

    Args:
        lines: with a column ``text``.
        pattern: regular expression of the message.
        marks: more of how messages begin, so that what stands before ends there.
    """
    hits = lines.filter(pl.col("text").str.contains(pattern))
    if hits.is_empty():
        return hits
    begins = f"{marks}|{pattern}" if marks else pattern
    lead = pl.col("text").str.extract(rf"^(.*?)(?:{begins})").fill_null("")
    plain = ~lead.str.contains(_QUOTING) & (
        lead.str.contains(_BAR) | (lead.str.count_matches(_WORDS) <= _MOST_WORDS)
    )
    return hits.filter(
        ((lead.str.len_bytes() < _LEAST_LEAD) | plain) & ~lead.str.contains(_OPEN_QUOTE)
    )
