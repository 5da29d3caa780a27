"""From the facts of the c10d grammars to the tables of one attempt of one job.

A timed-out operation is an event (the watchdog's SeqNum is its ordinal), the watchdog's counters
are rows of ``status``, ends and last signs of life go to ``ranks``; all that a line states beside
that is a row of ``said``. Communicators have the names that Flight Recorder gives them: the process
group's unique name, else its number.

Source: FORMATS.md sections 6 and 11; LOG_LINES.md.
"""

from __future__ import annotations

import re
from typing import Final

import polars as pl

from dl2gpu.trace import log_c10d_lines, log_life
from dl2gpu.trace.flight_recorder_names import operation
from dl2gpu.trace.log_deaths import with_crashes, without_stale
from dl2gpu.trace.log_job import LogJob
from dl2gpu.trace.schema import (
    EXIT,
    FLAG,
    OP,
    SAID,
    STATE,
    StringTable,
    Trace,
    conform,
    empty,
    op_code,
)

__all__ = ["SILENT", "WORDS", "build", "extract", "reduced"]

WORDS: Final = "|".join(map(re.escape, dict.fromkeys(log_c10d_lines.WORDS + log_life.WORDS)))
"""Regular expression; a line that it does not find states nothing here."""

SILENT: Final = frozenset(
    {"life", "step", "end", "part_end", "world", "members", "traceback", "exception", "term"}
)
"""Kinds of facts that any program may print: alone they do not make a text a log of a job."""


def extract(lines: pl.DataFrame) -> pl.DataFrame:
    """Facts in a frame of lines, columns of :data:`log_facts.FACTS`.

    ``t`` of a fact is that of its line, or of the last line above it that has a time.
    """
    lines = lines.with_columns(pl.col("t").forward_fill().over("file"))
    # of NCCL's own lines, which may be most of a log, only those with a word of ours
    text = pl.col("text")
    lines = lines.filter(~text.str.contains("NCCL (?:INFO|TRACE)") | text.str.contains(WORDS))
    return pl.concat([log_c10d_lines.c10d_facts(lines), log_life.life_facts(lines)])


def reduced(facts: pl.DataFrame) -> pl.DataFrame:
    """The facts of several frames of one job without those that later ones replace."""
    if facts.is_empty():
        return facts
    return log_life.last_lives(facts)


def build(facts: pl.DataFrame, job: LogJob) -> Trace | None:
    """The trace of one attempt; None where no line states anything of it."""
    if facts.is_empty():
        return None
    facts = _with_ranks(facts.sort("file", "line", "part"), job)
    facts = with_crashes(without_stale(_with_comms(_sane(facts))))
    strings = StringTable()
    world = _world(facts)
    comms = _comms(facts, world)
    facts = facts.join(comms.select("comm", comm_id="id"), on="comm_id", how="left")
    facts = facts.with_columns(op=_op_codes(facts["op"], strings))
    return Trace(
        events=_events(facts),
        jobs=conform(
            pl.DataFrame(
                {
                    "job": [0],
                    "name": [job.name],
                    "folder": [job.folder],
                    "attempt": [job.attempt],
                    "world_size": [world],
                    "backend": [_backend(facts)],
                    "source": ["log"],
                    "waits": [False],
                    "p2p": [False],
                }
            ),
            "jobs",
        ),
        ranks=_ranks(facts, job),
        comms=comms,
        strings=strings.frame(),
        status=_status(facts),
        said=_said(facts, job),
    )


# --------------------------------------------------------------------------------------------------
# Who, where

_OWN_RANK: Final = ("differs_from",)
_OF_OTHERS: Final = ("exit", "exit_local", "exit_any", "term", "world", "members")


def _with_ranks(facts: pl.DataFrame, job: LogJob) -> pl.DataFrame:
    """``rank`` filled: by the launcher's prefix, the file, or the message itself.

    A rank that a message names is one of its group: it counts as a global one where the group is
    the default one or not named.
    """
    files = pl.DataFrame(
        {"file": range(len(job.files)), "file_rank": list(job.file_rank)},
        schema={"file": pl.Int32(), "file_rank": pl.Int32()},
    )
    whole = pl.col("pg").is_null() | (pl.col("desc") == "default_pg") | (pl.col("guid") == "0")
    store = pl.col("what").str.starts_with("store")
    facts = facts.join(files, on="file", how="left")
    named = pl.when(whole | store).then("said")
    return facts.with_columns(
        rank=pl.when(pl.col("what").is_in(_OWN_RANK))
        .then("said")
        .when(pl.col("what").is_in(_OF_OTHERS))
        .then("rank")
        .otherwise(pl.coalesce("rank", "file_rank", named, "said")),
        t=pl.col("t").forward_fill().over("file"),
    ).drop("file_rank")


_FAR: Final = 1 << 20


def _sane(facts: pl.DataFrame) -> pl.DataFrame:
    """Counters without garbage: uninitialised memory, and 2^64-1 for "not known".

    A counter that is true lies near the operation that timed out, or near the other counter.
    """
    near = pl.coalesce(pl.col("ordinal"), pl.col("enqueued"))

    def kept(name: str) -> pl.Expr:
        value = pl.col(name)
        fits = (value >= -1) & (value < 1 << 40) & (near.is_null() | (value <= near + _FAR))
        return pl.when(fits).then(value).alias(name)

    facts = facts.with_columns(
        kept("enqueued"), kept("started"), kept("completed"),
        *(
            pl.when(pl.col(c).is_between(0, 1 << 60)).then(c).alias(c)
            for c in ("count", "count_out")
        ),
    )  # fmt: skip
    past = pl.col("completed") > pl.col("enqueued")
    return facts.with_columns(completed=pl.when(~past.fill_null(False)).then("completed"))


_UNNAMED: Final = "0"
"""Group of a watchdog that does not name any: the default one, where nothing speaks against it."""
_UNKNOWN: Final = "?"
"""Group of which only is known that it is not the default one."""
_GROUPED: Final = ("timeout", "status", "remote_error", "watchdog_error", "signal", "observed",
                   "progress", "stuck", "gil", "options")  # fmt: skip


def _with_comms(facts: pl.DataFrame) -> pl.DataFrame:
    """``comm_id``: the process group of a timeout, from its own line or that of its status."""
    grouped = pl.col("what").is_in(_GROUPED)
    facts = facts.with_columns(comm_id=pl.when(grouped).then(pl.coalesce("guid", "pg")))
    named = (
        facts.filter(
            pl.col("what").is_in(["timeout", "status"])
            & pl.col("comm_id").is_not_null()
            & pl.col("ordinal").is_not_null()
        )
        .group_by("rank", "ordinal")
        .agg(by_number=pl.col("comm_id").first())
    )
    facts = facts.join(named, on=["rank", "ordinal"], how="left", nulls_equal=True)
    timeout = pl.col("what") == "timeout"
    only = facts.filter(pl.col("what").is_in(["timeout", "status"]))["comm_id"]
    only = only.drop_nulls().unique()
    # a rank that calls itself by another number is at work in a group of some ranks
    bare = facts.filter(timeout & pl.col("comm_id").is_null() & pl.col("by_number").is_null())
    small = bool((bare["said"] != bare["rank"]).any())
    other = _UNKNOWN if small or len(only) > 1 else only[0] if len(only) else _UNNAMED
    return facts.with_columns(
        comm_id=pl.when(timeout)
        .then(pl.coalesce("comm_id", "by_number", pl.lit(other)))
        .otherwise("comm_id")
    ).drop("by_number")


def _backend(facts: pl.DataFrame) -> str | None:
    what = set(facts["what"].unique())
    if what & {"timeout", "status", "signal", "observed", "options", "unique_id"}:
        return "nccl"
    if what & {"gloo_timeout", "peer_closed", "mesh_failed", "gloo_size", "barrier_waited"}:
        return "gloo"
    return None


_MOST: Final = 1 << 20


def _world(facts: pl.DataFrame) -> int | None:
    """Number of ranks that lines state, or that launchers count; null where none does."""
    sizes = facts.filter(
        pl.col("what").is_in(["world", "options", "store_wait", "store_timeout", "store_done"])
        & pl.col("number").is_between(1, _MOST)
    )["number"]
    listed = facts.filter(
        pl.col("what").is_in(["members", "desync_joined", "desync_started", "stall_ready"])
    )["of"].list.max()
    # one agent counts the processes that it stops, and those that failed before
    agents = (
        facts.filter(pl.col("what").is_in(["term", "exit_local"]))
        .group_by("file", "t")
        .agg(
            pl.col("line").filter(pl.col("what") == "term").n_unique().alias("stopped"),
            pl.col("said").filter(pl.col("what") == "exit_local").n_unique().alias("failed"),
        )
        .filter((pl.col("stopped") > 0) & (pl.col("failed") > 0))
        .select((pl.col("stopped") + pl.col("failed")).max())
    )
    counted = agents[agents.columns[0]].drop_nulls().to_list()
    found = [*sizes.to_list(), *(n + 1 for n in listed.drop_nulls()), *counted]
    if not found:
        return None
    seen = facts.filter(pl.col("rank").is_between(0, _MOST - 1))["rank"].unique()
    return min(_MOST, int(max(*found, *(n + 1 for n in seen), 0)))


def _comms(facts: pl.DataFrame, world: int | None) -> pl.DataFrame:
    ids = (
        facts.filter(pl.col("comm_id").is_not_null())
        .group_by("comm_id")
        .agg(
            name=pl.col("pg").drop_nulls().first(),
            desc=pl.col("desc").drop_nulls().first(),
        )
        .sort("comm_id")
        .rename({"comm_id": "id"})
    )
    if ids.is_empty():
        return empty("comms")
    everyone = list(range(world)) if world is not None and world <= _FAR else []
    default = (pl.col("desc") == "default_pg") | (pl.col("id") == "0")
    # each member says how large the group is that it makes
    made = (
        facts.filter((pl.col("what") == "options") & pl.col("rank").is_not_null())
        .group_by(id="comm_id")
        .agg(members=pl.col("rank").unique().sort(), size=pl.col("number").max())
        .filter(pl.col("members").list.len() == pl.col("size"))
    )
    ids = (
        ids.with_row_index("comm")
        .join(made, on="id", how="left", maintain_order="left")
        .with_columns(
            job=pl.lit(0),
            ranks=pl.coalesce(
                "members",
                pl.when(default.fill_null(False)).then(pl.lit(everyone, dtype=pl.List(pl.Int32))),
                pl.lit([], dtype=pl.List(pl.Int32)),
            ),
        )
    )
    return conform(ids, "comms")


# --------------------------------------------------------------------------------------------------
# Tables


def _op_codes(ops: pl.Series, strings: StringTable) -> pl.Series:
    """Codes of op names in any spelling; one look at each distinct one."""
    names = ops.drop_nulls().unique().sort().to_list()
    codes = {}
    for name in names:
        known = operation(name)
        codes[name] = op_code(known.op if known.known else name.lower(), strings)
    if not codes:
        return pl.Series("op", [None] * len(ops), dtype=pl.Int32)
    return ops.replace_strict(codes, default=None, return_dtype=pl.Int32)


def _dated(t: pl.Expr) -> pl.Expr:
    """A time of which the year is known; others only tell before from after."""
    return pl.when(t > 2 * 366 * 86_400_000_000_000).then(t)


def _events(facts: pl.DataFrame) -> pl.DataFrame:
    """One event for each operation that timed out on a rank."""
    timeouts = (
        facts.filter(
            (pl.col("what") == "timeout")
            & pl.col("rank").is_not_null()
            & pl.col("op").is_not_null()
            & (pl.col("ordinal").is_null() | (pl.col("ordinal") >= 0))
        )
        .sort("t", "file", "line", nulls_last=True)
        .unique(["rank", "comm", "ordinal", "op"], keep="first", maintain_order=True)
    )
    if timeouts.is_empty():
        return empty("events")
    ended = facts.filter(pl.col("what") == "status").select(
        "rank", "comm", "started", number_="ordinal"
    )
    ended = ended.filter(pl.col("started").is_not_null()).unique(["rank", "comm"], keep="first")
    timeouts = timeouts.join(ended, on=["rank", "comm"], how="left", suffix="_of")
    p2p = pl.col("op").is_in([OP["send"], OP["recv"]])
    return conform(
        timeouts.with_columns(
            job=pl.lit(0),
            lane=pl.lit(0),
            seq=pl.int_range(pl.len()).over("rank", order_by=["t", "file", "line"]),
            blocking=pl.lit(False),
            state=pl.when(pl.col("started_of") >= pl.col("ordinal"))
            .then(STATE["started"])
            .otherwise(STATE["scheduled"]),
            flags=pl.when(p2p).then(0).otherwise(FLAG["sizes_incomparable"])
            | pl.lit(FLAG["state_unreliable"]),
            t_created=_dated(pl.col("t") - pl.col("number").clip(0, 1 << 40) * 1_000_000),
            root=pl.lit(None, pl.Int32),
        ),
        "events",
    )


def _status(facts: pl.DataFrame) -> pl.DataFrame:
    """The last counters that each rank gives for a group."""
    kinds = ["status", "progress"]
    last = (
        facts.filter(
            pl.col("what").is_in(kinds)
            & pl.col("rank").is_not_null()
            & pl.col("comm").is_not_null()
        )
        .group_by("rank", "comm")
        .agg(
            last_enqueued=pl.col("enqueued").drop_nulls().last(),
            last_started=pl.col("started").drop_nulls().last(),
            last_completed=pl.col("completed").drop_nulls().last(),
        )
        .sort("rank", "comm")
    )
    return conform(last.with_columns(job=pl.lit(0)), "status")


def _ranks(facts: pl.DataFrame, job: LogJob) -> pl.DataFrame:
    """All ranks that a line is from or about, with their end as far as it is told."""
    paths = pl.DataFrame(
        {"file": range(len(job.files)), "path": [f.path for f in job.files]},
        schema={"file": pl.Int32(), "path": pl.String()},
    )
    seen = facts.filter(pl.col("rank").is_between(0, _MOST))
    own = ~pl.col("what").is_in(_OF_OTHERS)
    ranks = seen.group_by("rank").agg(
        t_last=_dated(pl.col("t").filter(own).max()),
        finished=(pl.col("what") == "end").any(),
        code=pl.col("number").filter(pl.col("what") == "exit").first(),
        crashed=(pl.col("what") == "crash").any(),
        file=pl.coalesce(pl.col("file").filter(own).first(), pl.col("file").first()),
    )
    # a rank of which only a launcher tells, or the name of an otherwise empty file
    known = {int(r) for r in ranks["rank"]}
    more = [
        {"rank": r, "file": i}
        for i, r in enumerate(job.file_rank)
        if r is not None and r not in known
    ]
    if more:
        ranks = pl.concat(
            [
                ranks,
                pl.DataFrame(more, schema={"rank": pl.Int32(), "file": pl.Int32()}),
            ],
            how="diagonal",
        )
    torn = [bool(i < len(job.torn) and job.torn[i]) for i in range(len(job.files))]
    ranks = ranks.join(paths, on="file", how="left").with_columns(
        job=pl.lit(0),
        # a code alone is no crash: who gave up waiting was aborted, too
        exit=pl.when(pl.col("crashed") & (pl.col("code") == -9)).then(EXIT["killed"])
        .when(pl.col("crashed")).then(EXIT["crashed"])
        .when((pl.col("code") == 0) | pl.col("finished")).then(EXIT["finished"])
        .otherwise(EXIT["unknown"]),
        truncated=pl.col("file").replace_strict(
            list(range(len(torn))), torn, default=False, return_dtype=pl.Boolean
        ),
        lost_before=pl.lit(0),
        only_active=pl.lit(True),
    )  # fmt: skip
    return conform(ranks.sort("rank"), "ranks")


_MOST_SAID: Final = 20_000
"""Statements of one job that are kept; a log with more repeats itself."""


def _said(facts: pl.DataFrame, job: LogJob) -> pl.DataFrame:
    """The statements, each once: of those that repeat, the first and the last are kept."""
    same = ["what", "rank", "comm", "ordinal", "op", "count", "number"]
    lives = pl.col("what").is_in(["life", "step"])
    keyed = facts.with_columns(
        key=pl.when(lives).then(pl.col("file")).otherwise(-1),
        who=pl.col("of").cast(pl.List(pl.String)).list.join(","),
    )
    same = [*same, "key", "who"]
    kept = keyed.filter(
        (pl.int_range(pl.len()).over(same) == 0)
        | (pl.int_range(pl.len()).over(same) == pl.len().over(same) - 1)
    )
    paths = [f.path for f in job.files]
    kept = kept.head(_MOST_SAID).with_columns(
        job=pl.lit(0),
        path=pl.col("file").replace_strict(
            list(range(len(paths))), paths, default=None, return_dtype=pl.String
        )
        if paths
        else pl.lit(None, pl.String),
    )
    return conform(kept.select([c for c in kept.columns if c in SAID]), "said")
