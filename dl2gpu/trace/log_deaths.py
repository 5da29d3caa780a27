"""Which facts of a log count, and which sign of a death is a cause.

A failure that the job outlived, or that came after its good end, does not count.

A process that gives up waiting dies, too: by the watchdog's abort, by the launcher's signal, by an
exception that says "connection closed". Only what comes first can be a cause.

Source: DESIGN.md section 5 (crashed_rank); the order of such lines as LOG_LINES.md has it.
"""

from __future__ import annotations

from typing import Final

import polars as pl

__all__ = ["WAITS", "with_crashes", "without_stale"]

WAITS: Final = (
    "timeout", "gloo_timeout", "barrier_waited", "store_timeout", "unique_id", "store_key",
    "mesh_failed", "peer_closed", "remote_error", "signal", "observed",
)  # fmt: skip
"""Kinds of facts by which a rank says that it waited for another."""

_FAILURES: Final = (
    *WAITS, "status", "stuck", "gil", "watchdog_error", "traceback", "exception", "fatal",
    "oom_killed", "exit", "exit_local", "exit_any", "term", "cancelled", "differs",
    "differs_from", "print_stopped", "barrier_failed", "gloo_size", "stall_ready", "stall_missing",
    "stall_item", "stall_head", "block_wait", "fsdp_order", "store_wait", "desync_timeout",
    "desync_never", "desync_joined", "desync_behind", "desync_started", "desync_finished",
)  # fmt: skip
_NOISE: Final = (
    "peer_closed", "remote_error", "traceback", "exception", "fatal", "exit", "exit_local",
    "exit_any", "mesh_failed", "store_key", "watchdog_error", "oom_killed", "term", "block_wait",
    "stuck", "gil", "cancelled",
)  # fmt: skip
"""What the teardown of a healthy job may print."""
_ENOUGH: Final = 5
"""Steps of others, or without a time, after a message, by which a job outlived it."""

_LAST_FEW: Final = 64
"""Signs of life of a file that are held against failures of no stated rank."""

_SECONDARY: Final = (
    r"(?i)DistBackendError|DistStoreError|DistNetworkError|ChildFailedError|SignalException|"
    r"KeyboardInterrupt|NCCL error|nccl\w*Error|unhandled (?:system|cuda) error, NCCL|gloo|"
    r"timed? ?out|connection (?:closed|reset|refused)|broken pipe|monitored ?barrier|"
    r"ProcessGroupWrapper|ncclUniqueId|"
    r"Detected mismatch|pair closure|Watchdog|Socket|wait timeout|store\.get|BrokenProcessPool|"
    r"Communicator was aborted|collective operation|RayTaskError|ActorDied|WorkerCrashed|"
    r"SystemExit: 0|SIGTERM|Connection lost|remote process exited|Aborted"
)
"""Exceptions of a rank that was let down by another."""
_OWN_END: Final = (0, -15, 143, -2, 130, 2)
"""Exit codes of a process that ended well or was told to."""
_ABORTS: Final = (-6, 134)


def without_stale(facts: pl.DataFrame) -> pl.DataFrame:
    """``facts`` (one attempt, sorted by file and line) without failures that are none of this run.

    * A job that goes on after a message was not stopped by it: later steps of the same rank, or of
      no stated rank, in the same file, by their time or in number; or a later good end.
    * After a good end of the rank (or of the job) connections break and processes are killed.
    """
    failure = pl.col("what").is_in(_FAILURES)
    if facts.filter(failure).is_empty():
        return facts
    facts = facts.with_row_index("row")
    failed = facts.filter(failure).select("row", "file", "line", "rank", "t", "what")
    # a launcher's line is of no rank, or of a rank that did not write it
    failed = failed.with_columns(
        writer=pl.when(pl.col("what").is_in(["exit", "exit_local", "exit_any", "term"]))
        .then(None)
        .otherwise("rank")
    )
    steps = facts.filter(pl.col("what") == "step").select(
        "file", at="line", by="rank", when="t", kind="what"
    )
    ends = facts.filter(pl.col("what") == "end").select(
        "file", at="line", by="rank", when="t", kind="what"
    )
    # never every failure with every step: jobs have thousands of ranks
    signs = pl.concat([steps, ends]).sort("file", "at")
    unsigned = signs.filter(pl.col("by").is_null())
    last_few = signs.group_by("file", maintain_order=True).tail(_LAST_FEW)
    last_unsigned = unsigned.group_by("file", maintain_order=True).tail(_LAST_FEW)
    later = pl.concat(
        [
            failed.join(signs, left_on=["file", "writer"], right_on=["file", "by"]).with_columns(
                own=pl.lit(value=True)
            ),
            failed.join(last_unsigned.drop("by"), on="file").filter(pl.col("writer").is_not_null()),
            failed.filter(pl.col("writer").is_null()).join(last_few.drop("by"), on="file"),
        ],
        how="diagonal",
    ).filter(pl.col("at") > pl.col("line"))
    own = pl.col("own").fill_null(value=False)
    step = pl.col("kind") == "step"
    timed = pl.col("t").is_not_null() & pl.col("when").is_not_null()
    outlived = (
        later.group_by("row")
        .agg(
            after=(own & step & timed & (pl.col("when") > pl.col("t"))).any(),
            # others may make a step or two before they notice
            many=(step & ~(timed & (pl.col("when") < pl.col("t")))).sum() >= _ENOUGH,
            ended=((pl.col("kind") == "end") & ~(timed & (pl.col("when") < pl.col("t")))).any(),
        )
        .filter(pl.col("after") | pl.col("many") | pl.col("ended"))
    )
    # after the end: of the same rank anywhere, or of the job in the same file
    noise = failed.filter(pl.col("what").is_in(_NOISE))
    first_end = ends.filter(pl.col("by").is_null()).group_by("file").agg(pl.col("at").min())
    by_job = noise.join(first_end, on="file").filter(pl.col("at") < pl.col("line"))
    by_rank = noise.join(ends.select("by").drop_nulls().unique(), left_on="rank", right_on="by")
    # a file in which all ranks that spoke have ended ends, too
    spoke = facts.filter(pl.col("what") == "life")["rank"].drop_nulls().unique()
    done = ends["by"].drop_nulls().unique()
    all_done = len(spoke) > 0 and spoke.is_in(done.implode()).all()
    unsaid = noise.filter(pl.col("rank").is_null() & pl.lit(bool(all_done)))
    gone = pl.concat([f.select("row") for f in (outlived, by_job, by_rank, unsaid)])["row"]
    return facts.filter(~pl.col("row").is_in(gone.unique().implode())).drop("row")


_NEAR: Final = 600
"""Lines between a traceback's first line and its exception."""


def with_crashes(facts: pl.DataFrame) -> pl.DataFrame:
    """``facts`` and a fact ``crash`` for each death that is a cause.

    ``rank`` is the rank that died, null where no line says it; ``number`` its exit code, where the
    launcher's word is all there is.
    """
    waits = facts.filter(pl.col("what").is_in(WAITS) & pl.col("rank").is_not_null())
    raised = facts.filter(pl.col("what") == "exception")
    starts = facts.filter(pl.col("what") == "traceback").select("file", start="line")
    if raised.height and starts.height:
        raised = (
            raised.sort("line")
            .join_asof(
                starts.sort("start"), left_on="line", right_on="start", by="file",
                strategy="backward", check_sortedness=False,
            )
            .filter(pl.col("line") - pl.col("start") <= _NEAR)
            .drop("start")
        )  # fmt: skip
    else:
        raised = raised.clear()
    own = _fatal_to_it(raised.filter(~pl.col("text").str.contains(_SECONDARY)), facts)
    let_down = raised.filter(pl.col("text").str.contains(_SECONDARY))
    fatal = facts.filter(
        pl.col("what").is_in(["fatal", "watchdog_error", "oom_killed"])
        & ~pl.col("text").str.contains(r"Signal: Abort|Aborted$|Fatal Python error: Aborted")
        & ~(
            (pl.col("what") == "watchdog_error")
            & pl.col("text").str.replace("^.*with exception: ", "").str.contains(_SECONDARY)
        )
    )
    died = pl.concat([own, fatal])
    # a rank that had already given up waiting fell with the others
    first_wait = waits.group_by("rank", "file").agg(
        waited=pl.col("line").min(), waited_t=pl.col("t").min()
    )
    earlier = died.with_row_index("n").join(first_wait, on="rank", suffix="_of")
    fell = earlier.filter(
        pl.when(pl.col("file") == pl.col("file_of"))
        .then(pl.col("waited") < pl.col("line"))
        .otherwise((pl.col("waited_t") < pl.col("t")).fill_null(True))
    )["n"]
    died = died.with_row_index("n").filter(~pl.col("n").is_in(fell.unique().implode())).drop("n")

    exits = facts.filter(
        (pl.col("what") == "exit")
        & pl.col("rank").is_not_null()
        & ~pl.col("number").is_in(_OWN_END)
    )
    excused = set(waits["rank"]) | set(let_down["rank"].drop_nulls())
    held = set(facts.filter(pl.col("what").is_in(["stuck", "gil"]))["rank"].drop_nulls())
    exits = exits.filter(
        ~pl.col("rank").is_in(sorted(excused))
        & ~(pl.col("number").is_in(_ABORTS) & pl.col("rank").is_in(sorted(held)))
    )
    crash = died.with_columns(number=pl.lit(None, pl.Int64))
    if died.is_empty():
        crash = pl.concat([crash, _first_exits(exits)])
    else:
        # what a launcher counts besides is the fall of the others, or the same death
        of_them = exits.join(died.select("rank").unique(), on="rank").group_by("rank").first()
        crash = crash.join(
            of_them.select("rank", code="number"), on="rank", how="left"
        ).with_columns(number="code").drop("code")  # fmt: skip
        killed = exits.filter(pl.col("number").is_in(_SIGNALS))
        crash = pl.concat(
            [crash.select(facts.columns), killed.join(died.select("rank"), on="rank", how="anti")]
        )
    crash = (
        crash.sort("file", "line", "part")
        .unique("rank", keep="first", maintain_order=True)
        .with_columns(what=pl.lit("crash"))
    )
    # "NCCL error" and the like: a rank that was let down, and perhaps nothing says by whom
    fell_too = let_down.filter(pl.col("text").str.contains(_LIBRARY)).with_columns(
        what=pl.lit("let_down")
    )
    return pl.concat([facts, crash, fell_too])


_ALIVE: Final = 60 * 1_000_000_000
_ALIVE_LINES: Final = 200


def _fatal_to_it(raised: pl.DataFrame, facts: pl.DataFrame) -> pl.DataFrame:
    """Exceptions that their rank did not outlive: a program may print one and go on."""
    if raised.is_empty():
        return raised
    # a dead main thread does not silence the threads of the library
    last = facts.filter(
        (pl.col("what") == "life")
        & pl.col("rank").is_not_null()
        & ~pl.col("text").str.contains(r"^\s*\[[EWIF][ \d]|ProcessGroup|terminate called")
    )
    last = last.group_by("rank", "file").agg(
        alive=pl.col("line").max(), alive_t=pl.col("t").max()
    )  # fmt: skip
    return (
        raised.join(last, on=["rank", "file"], how="left")
        .filter(
            ~(
                ((pl.col("alive_t") - pl.col("t")) > _ALIVE)
                | ((pl.col("alive") - pl.col("line")) > _ALIVE_LINES)
            ).fill_null(False)
        )
        .select(raised.columns)
    )


_SIGNALS: Final = (-9, -11, -7, -4, -8, 137, 139, 135, 132, 136)


def _first_exits(exits: pl.DataFrame) -> pl.DataFrame:
    """Exit codes that are a cause where nothing else is: signals, else the first one reported."""
    signals = exits.filter(pl.col("number").is_in(_SIGNALS))
    return signals if signals.height else exits.sort("file", "line").head(1)


_LIBRARY: Final = r"Dist\w+Error|NCCL|nccl|c10d|[Gg]loo|ProcessGroup|Rendezvous"
