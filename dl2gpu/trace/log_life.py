"""Grammar of how processes live and die.

Steps, good ends, exceptions, signals, exit codes, restarts, and the number of ranks of a job.

These lines come from launchers (torchrun and its elastic agent, Slurm, mpirun, Horovod, Ray), from
Python and from the program itself. They say why a rank is absent, which no message of a
communication library can.

Source: LOG_LINES.md; the wordings of launchers are those of their current releases.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from dl2gpu.trace.log_facts import facts, none, own

__all__ = ["WORDS", "last_lives", "life_facts"]

WORDS: Final = (
    "Traceback (most recent", "Error", "Exception", "Interrupt", "exitcode", "local_rank:",
    "Fatal Python error", "egmentation fault", "Bus error", "Signal", "signal", "SIGKILL",
    "double free", "invalid pointer", "oom_kill", "OOMKilled", "oom-kill", "Out of memory",
    "srun: error", "noticed that process rank", "exit with status code", "return code =",
    "Process name:", "Exit code:", "closing signal", "restart", "Restarting", "attempts left",
    "orld_size", "orld size", "WORLD_SIZE", "global_ranks", "num_processes", "nranks ",
    "successfully finished", "CANCELLED", "raining", "finished", "Finished", "done", "Done",
    "train_runtime", "exit code", "stopped", "wandb: Synced",
    "completed", "Completed", "complete",
)  # fmt: skip
"""Literal text; a line that holds none of these states nothing here."""

_STEP: Final = (
    r"""(?i)(?:^|[\s|,\[({'"/])(?:global[_ ]?)?(?:step|iter|iteration|epoch|batch|update)s?['"]?"""
    r"""\s?[=:#]?\s*\d"""
)
_STEP_NUMBER: Final = (
    r"""(?i)(?:^|[\s|,\[({'"/])(?:global[_ ]?)?(?:step|iter|iteration|update)s?['"]?\s?[=:#]?\s*"""
    r"""(\d{1,12})"""
)
_MEASURE: Final = (
    r"""(?i)loss|it/s|s/it|tok(?:en)?s?/s|\blr\b|learning|samples|elapsed|\bacc|throughput|"""
    r"""\bppl\b|reward|examples/s|\bms\b|grad"""
)
_ALARM: Final = (
    r"(?i)\b(?:errors?|fail(?:ed|ure)?|abort\w*|timed? ?out|timeout|exception|not|killed)\b"
)

_END: Final = (
    r"(?i)\btraining (?:has |is )?(?:complete|completed|finished|done|ended)\b|"
    r"\bfinished:? \d+(?:/\d+)? (?:steps|epochs|iterations|batches)|\bfinished training\b|"
    r"\bcompleted \d+(?:/\d+)? (?:steps|epochs|iterations)|"
    r"'train_runtime'|worker group successfully finished|"
    r"\bexit(?:ed)?(?: with)?(?: code| status)?:? ?0\b|\bdone: \d+(?:/\d+)? steps|"
    r"`Trainer\.fit` stopped|\[after training is done\]|wandb: Synced|"
    r"^\s*\[?rank[ =:]?\s?\d{1,6}\]?:? (?:\w+ )?(?:is )?(?:done|finished)\b[.!]?\s*$|"
    r"^\s*(?:\[?INFO\]? )?(?:all )?(?:done|finished)[.!]?\s*$|"
    r"\brun (?:completed|finished) successfully|\bjob completed\b|"
    r"\ball (?:ranks|workers|processes) (?:finished|exited|done)\b"
)
_PART_END: Final = r"(?i)\bepoch \d+(?:/\d+)? (?:is )?(?:done|finished|complete)"

_EXCEPTION: Final = (
    r"^\s*(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Interrupt|SystemExit))(?::|\s*$)"
)
_FATAL: Final = (
    r"Fatal Python error: |Segmentation fault \(|Segmentation fault$|Bus error \(|Bus error$|"
    r"Signal: (?:Segmentation|Bus|Illegal|Floating)|[Cc]aught signal (?:11|7|4|8)\b|"
    r"double free or corruption|free\(\): invalid|malloc\(\): (?:corrupt|invalid|memory)|"
    r"(?:received|by) (?:signal )?SIG(?:SEGV|BUS|ILL|FPE)"
)
_RANK_WORD: Final = r"(?i)^.{0,60}?(?:^|[\s|\[(,;])(?:global[ _]?)?rank ?[=:#]? ?(\d{1,6})\b"

_LIFE_COLUMNS: Final = ("file", "line", "part", "rank", "host", "t", "text")


def life_facts(lines: pl.DataFrame) -> pl.DataFrame:
    """All facts of this grammar in ``lines`` (columns of ``log_lines.LINES``).

    Steps and signs of life are given once for each (file, rank): the last of a frame; see
    :func:`last_lives`.
    """
    if lines.is_empty():
        return none()
    text = pl.col("text")
    # "[Rank 3]" of a process group is a rank within the group
    word = pl.when(~text.str.contains(r"\[Rank \d+\]|\[PG ")).then(text.str.extract(_RANK_WORD))
    lines = lines.with_columns(rank=pl.coalesce("rank", word.cast(pl.Int32, strict=False)))
    return pl.concat(
        [
            _lives(lines),
            _ends(lines),
            _deaths(lines),
            _exits(lines),
            _launcher(lines),
            _world(lines),
        ]
    )


def _lives(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    alive = lines.filter(text.str.strip_chars().str.len_bytes() > 0)
    steps = own(alive.filter(text.str.contains(_STEP) & text.str.contains(_MEASURE)), _STEP)
    return pl.concat(
        [
            facts(steps, "step", number=text.str.extract(_STEP_NUMBER)),
            facts(alive, "life"),
        ]
    ).pipe(last_lives)  # fmt: skip


_STEPS_KEPT: Final = 8
"""Steps of a (file, rank) that are kept: enough to see that a job went on after a message."""


def last_lives(found: pl.DataFrame) -> pl.DataFrame:
    """The last sign of life and the last steps of each (file, rank); other facts as they are.

    ``t`` of a sign of life is the last time that any line of its (file, rank) has.
    """
    lives = pl.col("what").is_in(["step", "life"])
    alive = found.filter(lives).sort("file", "line", "part")
    key = ["what", "file", "rank"]
    alive = alive.with_columns(t=pl.col("t").forward_fill().over(key))
    back = pl.len().over(key) - pl.int_range(pl.len()).over(key)
    kept = pl.when(pl.col("what") == "life").then(1).otherwise(_STEPS_KEPT)
    return pl.concat([found.filter(~lives), alive.filter(back <= kept)])


def _ends(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    ends = own(lines, _END).filter(~text.str.contains(_ALARM) | text.str.contains("successfully"))
    parts = own(lines, _PART_END).filter(~text.str.contains(_ALARM))
    return pl.concat([facts(ends, "end"), facts(parts, "part_end")])


def _deaths(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    trace = own(lines, r"Traceback \(most recent call last\)")
    raised = lines.filter(text.str.contains(_EXCEPTION))
    fatal = own(lines, _FATAL).filter(~text.str.contains("closing signal|received by PID"))
    memory = own(lines, r"oom_kill event|OOMKilled|oom-kill:|Out of memory: Kill").filter(
        ~text.str.contains(r"(?i)OOMKilled\W{1,4}false")
    )
    return pl.concat(
        [
            facts(trace, "traceback"),
            facts(raised, "exception", op=text.str.extract(_EXCEPTION)),
            facts(fatal, "fatal"),
            facts(memory, "oom_killed"),
        ]
    )


def _exits(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    head = r"^\s*rank\s+: (\d{1,6}) \(local_rank: (\d{1,6})\)"
    code = r"^\s*exitcode\s+: (-?\d{1,5}) \(pid: (\d+)\)"
    # torchrun lists a failure over several lines; its rank holds for the exit code below it
    block = pl.concat(
        [
            facts(lines.filter(text.str.contains(head)), "exit_head", said=text.str.extract(head)),
            facts(lines.filter(text.str.contains(code)), "exit", number=text.str.extract(code)),
        ]
    ).sort("file", "line", "part")
    block = block.with_columns(rank=pl.col("said").forward_fill().over("file")).filter(
        pl.col("what") == "exit"
    )
    short = r"failed \(exitcode: (-?\d{1,5})\) local_rank: (\d{1,6}) \(pid: \d+\)"
    slurm = (
        r"srun: error: \S+: tasks? ([\d,-]+): (?:(Killed|Out Of Memory|Segmentation fault|Aborted|"
        r"Bus error|Terminated)|Exited with exit code (\d{1,3}))"
    )
    signal = (
        pl.when(text.str.contains("Killed|Out Of Memory")).then(-9)
        .when(text.str.contains("Segmentation")).then(-11)
        .when(text.str.contains("Bus error")).then(-7)
        .when(text.str.contains("Aborted")).then(-6)
        .when(text.str.contains("Terminated")).then(-15)
        .otherwise(text.str.extract(slurm, 3).cast(pl.Int64, strict=False))
    )  # fmt: skip
    mpi = r"noticed that process rank (\d{1,6}) with PID \S+ on node \S+ exited on signal (\d{1,3})"
    horovod = r"Process (\d{1,6}) exit with status code (\d{1,3})"
    plain = r"exits with return code = (-?\d{1,5})"
    task = text.str.extract(slurm, 1)
    return pl.concat(
        [
            block,
            facts(
                own(lines, short), "exit_local",
                number=text.str.extract(short, 1), said=text.str.extract(short, 2),
            ),
            facts(
                own(lines, slurm), "exit",
                rank=pl.when(task.str.contains(r"^\d+$")).then(task), number=signal,
            ),
            facts(
                own(lines, mpi), "exit", rank=text.str.extract(mpi, 1),
                number=-text.str.extract(mpi, 2).cast(pl.Int64, strict=False),
            ),
            facts(
                own(lines, horovod), "exit",
                rank=text.str.extract(horovod, 1), number=text.str.extract(horovod, 2),
            ),
            facts(own(lines, plain), "exit_any", number=text.str.extract(plain)),
        ]
    )  # fmt: skip


def _launcher(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    left = r"([0-9]{1,4})/([0-9]{1,4}) attempts left; will restart worker group"
    count = r"^\s*restart_count=(\d{1,4})"
    plain = r"Restarting (?:worker group|workers|training)|will restart worker group"
    numbered = lines.filter(text.str.contains(left))
    used = text.str.extract(left, 2).cast(pl.Int64) - text.str.extract(left, 1).cast(pl.Int64) + 1
    return pl.concat(
        [
            facts(own(lines, r"Sending process \d+ closing signal SIGTERM"), "term"),
            facts(own(lines, r"forcefully exiting via SIGKILL"), "forced"),
            facts(own(lines, r"DUE TO TIME LIMIT|CANCELLED AT|DUE TO PREEMPTION"), "cancelled"),
            facts(numbered, "restart", number=used),
            facts(
                lines.filter(text.str.contains(count)), "restart", number=text.str.extract(count)
            ),
            facts(
                own(lines, plain).filter(~text.str.contains(left)), "restart_plain",
            ),
        ]
    )  # fmt: skip


def _world(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    size = (
        r"""(?i)(?:^|[^\w-])world[_ ]?size['"]?\s?[=:]?\s?(\d{1,7})\b|"""
        r"""\bnranks (\d{1,7})\b|\bnum_processes: (\d{1,7})\b|\bglobal_world_sizes=\[(\d{1,7})"""
    )
    ranks = r"\bglobal_ranks=\[([\d, ]+)\]"
    sizes = own(lines, size)
    listed = own(lines, ranks)
    return pl.concat(
        [
            facts(
                sizes, "world", number=pl.coalesce(text.str.extract(size, i) for i in (1, 2, 3, 4))
            )
            .group_by("file", "number", maintain_order=True)
            .first()
            .select(none().columns),
            facts(
                listed, "members",
                of=text.str.extract(ranks).str.extract_all(r"[0-9]{1,6}").cast(pl.List(pl.Int32)),
            ),
        ]
    )  # fmt: skip
