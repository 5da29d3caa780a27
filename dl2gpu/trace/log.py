"""Reader of text logs: the log files of one job become one trace for each attempt.

Two grammars read the same lines: :mod:`log_c10d` what PyTorch, its launchers and the program say of
themselves, :mod:`log_nccl` what ``NCCL_DEBUG`` prints. Either may find nothing. A file may hold all
ranks, one, or some; a job may have both kinds of lines in one file.

A grammar is a module with

* ``WORDS``: regular expression (Rust); a line in which it is not found states nothing to it;
* ``extract(lines)``: the facts in a frame of :data:`log_lines.LINES`, a frame with at least the
  columns ``file``, ``line``, ``what`` and ``rank`` (a block at a time; whole columns, no loop over
  lines);
* ``build(facts, job)``: the trace of one attempt of one job (job row 0), or None where the facts
  do not amount to one.

Source: FORMATS.md sections 5, 6 and 9; LOG_LINES.md.
"""

from __future__ import annotations

import calendar
import datetime as dt
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

import numpy as np
import polars as pl

from dl2gpu.trace import log_c10d, log_facts, log_nccl
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.log_job import LogJob
from dl2gpu.trace.log_lines import FileLines, line_blocks, parse
from dl2gpu.trace.rank_names import ranks_from_names
from dl2gpu.trace.schema import EXIT, Trace, concat, conform

__all__ = ["LogJob", "read"]

_WORDS: Final = f"{log_c10d.WORDS}|{log_nccl.WORDS}"
_TRAINING: Final = 3
"""Lines on steps by which a text is the log of a training job, even if it says nothing else."""
_BATCH: Final = 100_000
"""Lines that are looked at together: a look costs as much for ten lines as for ten thousand."""
_ENOUGH: Final = 200_000
"""Facts that are held before those that later ones replace are dropped."""


def read(
    files: Sequence[TraceFile], beside: AbstractSet[tuple[str, str]] = frozenset()
) -> tuple[Trace, list[Input]]:
    """One trace of the log files of any number of jobs, and what became of each file.

    A file without a single statement about communication is ``ignored``, unless others of its job
    have some: then it may tell how a rank lived. Beside records of another format it counts where
    it ends in an exception and its name, or its lines, say of which rank.

    Args:
        files: log files.
        beside: (folder, job) of the jobs that have records of other formats.
    """
    jobs: dict[tuple[str, str], list[TraceFile]] = {}
    for file in sorted(files, key=lambda f: (f.path, f.url)):
        jobs.setdefault((file.folder, file.job or file.folder), []).append(file)
    whole = _Lines()
    inputs: list[Input] = []
    spans: list[tuple[str, str, int, int]] = []
    for (folder, name), members in sorted(jobs.items()):
        first = len(whole.files)
        for file in members:
            try:
                whole.read(file)
            except InputError as e:
                inputs.append(Input(file.path, "quarantined", str(e), "log", name, file.rank))
        spans.append((folder, name, first, len(whole.files)))
    facts, calls = whole.facts()
    traces: list[Trace] = []
    for folder, name, first, end in spans:
        made, told = _one_job(
            whole.files[first:end], whole.found[first:end], name, folder,
            _slice(facts, first, end), _slice(calls, first, end),
            beside=(folder, name) in beside,
        )  # fmt: skip
        traces += made
        inputs += told
    return concat(traces), sorted(inputs, key=lambda i: i.path)


class _Lines:
    """Facts of the lines of many files: small ones are looked at together."""

    def __init__(self) -> None:
        self.files: list[TraceFile] = []
        self.found: list[FileLines] = []
        self._raw: list[pl.DataFrame] = []
        self._rows = 0
        self._c10d: list[pl.DataFrame] = []
        self._nccl: list[pl.DataFrame] = []

    def read(self, file: TraceFile) -> None:
        """Adds the lines of ``file``; raises InputError where it cannot be opened."""
        found = FileLines()
        number = len(self.files)
        blocks = line_blocks(file, number, _WORDS, found)
        first = next(blocks, None)
        self.files.append(file)
        self.found.append(found)
        if first is None:
            return
        for raw in itertools.chain([first], blocks):
            self._raw.append(raw)
            self._rows += raw.height
            if self._rows >= _BATCH:
                self._extract()

    def _extract(self) -> None:
        if not self._raw:
            return
        lines = parse(pl.concat(self._raw), self.found)
        self._raw, self._rows = [], 0
        self._c10d.append(log_c10d.extract(lines))
        self._nccl.append(log_nccl.extract(lines))
        if sum(f.height for f in self._c10d) > _ENOUGH:
            self._c10d = [log_c10d.reduced(pl.concat(self._c10d))]

    def facts(self) -> tuple[pl.DataFrame | None, pl.DataFrame | None]:
        """All facts of each grammar, sorted by file; None where there was no line."""
        self._extract()
        if not self._c10d:
            return None, None
        facts = log_c10d.reduced(pl.concat(self._c10d)).sort("file", "line", "part")
        return facts, pl.concat(self._nccl).sort("file", maintain_order=True)


def _slice(facts: pl.DataFrame | None, first: int, end: int) -> pl.DataFrame | None:
    """The rows of files ``first`` to ``end - 1``, with files numbered from 0."""
    if facts is None:
        return None
    lo, hi = np.searchsorted(facts["file"].to_numpy(), [first, end])
    return facts[int(lo) : int(hi)].with_columns(pl.col("file") - first)


def _one_job(
    kept: list[TraceFile],
    found: list[FileLines],
    name: str,
    folder: str,
    facts: pl.DataFrame | None,
    calls: pl.DataFrame | None,
    *,
    beside: bool,
) -> tuple[list[Trace], list[Input]]:
    if not kept:
        return [], []
    if not _speaking(facts, calls) and not (beside and _dying(kept, found, facts)):
        reason = "a text without a line about communication"
        return [], [
            Input(f.path, "ignored", reason if found[i].lines else "empty file")
            for i, f in enumerate(kept)
        ]
    torn = [f.torn_end for f in found]
    facts = _with_year(facts, found)
    ranks = _file_ranks(kept, facts)
    traces = []
    unreadable: Counter[int] = Counter()
    for attempt, of_facts, of_calls in _attempts(facts, calls, [f.attempt for f in kept]):
        mine = [f.attempt in (None, attempt) for f in kept]
        job = LogJob(
            name, folder, attempt, kept,
            [r if m else None for r, m in zip(ranks, mine, strict=True)],
            torn=[t and m for t, m in zip(torn, mine, strict=True)],
        )  # fmt: skip
        trace = _build(of_facts, of_calls, job)
        unreadable.update(job.unreadable)
        if trace is not None:
            traces.append(trace)
    return traces, [
        _told(f, found[i], name, ranks[i], traces, unreadable[i]) for i, f in enumerate(kept)
    ]


def _with_year(facts: pl.DataFrame | None, found: Sequence[FileLines]) -> pl.DataFrame | None:
    """Times of files that name no year in that of another file of the job."""
    years = [f.year for f in found if f.year is not None]
    bare = [i for i, f in enumerate(found) if f.year is None]
    if facts is None or not years or not bare:
        return facts
    days = (dt.date(years[0], 1, 1) - dt.date(1970, 1, 1)).days
    leap = calendar.isleap(years[0])
    month = pl.from_epoch("t", time_unit="ns").dt.month()
    shift = (days + pl.when(leap & (month > 2)).then(1).otherwise(0)) * 86_400_000_000_000
    moved = pl.col("file").is_in(bare) & (pl.col("t") < _YEAR)
    return facts.with_columns(t=pl.when(moved).then(pl.col("t") + shift).otherwise("t"))


_YEAR: Final = 366 * 86_400_000_000_000


def _speaking(facts: pl.DataFrame | None, calls: pl.DataFrame | None) -> set[int]:
    """Files in which a line is about communication, the death of a process, or training steps."""
    out: set[int] = set()
    if facts is not None and facts.height:
        steps = facts.filter(pl.col("what") == "step").group_by("file").len()
        loud = facts.filter(~pl.col("what").is_in(list(log_c10d.SILENT)))
        out |= set(loud["file"].unique().to_list())
        out |= set(steps.filter(pl.col("len") >= _TRAINING)["file"].to_list())
    if calls is not None and calls.height:
        out |= set(calls["file"].unique().to_list())
    return out


def _dying(
    files: Sequence[TraceFile], found: Sequence[FileLines], facts: pl.DataFrame | None
) -> bool:
    """Does the file of a rank that is known end in an exception?

    What was raised and caught stands further up, as the program goes on and prints.
    """
    if facts is None or facts.is_empty():
        return False
    last = facts.filter(pl.col("what") == "exception").group_by("file").agg(pl.col("line").max())
    raised = [i for i, line in last.iter_rows() if line >= found[i].lines - _LAST_WORDS]
    ranks = _file_ranks(files, facts) if raised else []
    return any(ranks[i] is not None for i in raised)


_LAST_WORDS: Final = 40
"""Lines that the message of an exception and the interpreter's end may take."""


def _told(
    file: TraceFile, found: FileLines, name: str, rank: int | None, traces: Iterable[Trace],
    unreadable: int,
) -> Input:  # fmt: skip
    reasons = []
    if found.reason:
        reasons.append(found.reason)
    if found.cut_lines:
        reasons.append(f"{found.cut_lines} lines that are too long were cut")
    if unreadable:
        reasons.append(f"lines of {unreadable} calls are torn and cannot be read")
    events = 0
    for trace in traces:
        mine = trace.ranks.filter(pl.col("path") == file.path)["rank"]
        events += trace.events.filter(pl.col("rank").is_in(mine.implode())).height
    return Input(
        file.path, "partial" if reasons else "read", "; ".join(reasons) or None, "log", name,
        rank, events,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Ranks of whole files


def _file_ranks(files: Sequence[TraceFile], facts: pl.DataFrame | None) -> list[int | None]:
    """The rank that wrote each file, by ``--job-pattern`` or its name, unless its lines differ.

    A number in a name is as often that of a node or of the job. Where the lines of one file
    contradict its number, no number of the job's names is believed.
    """
    seen = _ranks_by_file(facts)
    out: list[int | None] = [f.rank for f in files]
    for attempt in sorted({f.attempt for f in files}, key=lambda a: -1 if a is None else a):
        mine = [i for i, f in enumerate(files) if f.attempt == attempt and f.rank is None]
        if mine:
            for i, rank in _named_ranks(files, mine, seen, single=len(files) == 1).items():
                out[i] = rank
    return out


def _named_ranks(
    files: Sequence[TraceFile], open_: Sequence[int], seen: dict[int, set[int]], *, single: bool
) -> dict[int, int | None]:
    """Ranks of the files ``open_`` of one attempt."""
    names = _names(files, open_, single=single)
    several = any(len(seen.get(i, ())) > 1 for i in open_)
    wrong = any(rank is not None and seen.get(i) and seen[i] != {rank} for i, rank in names.items())
    out: dict[int, int | None] = {}
    for i in open_:
        lines = seen.get(i, set())
        if len(lines) == 1 and not several:
            out[i] = next(iter(lines))
        elif not lines and not wrong and not several:
            out[i] = names.get(i)
    taken = [r for r in out.values() if r is not None]
    if len(set(taken)) != len(taken):
        # several files of one rank (stdout and stderr) are fine, if their names say so
        return {i: r for i, r in out.items() if names.get(i) == r}
    return out


def _ranks_by_file(facts: pl.DataFrame | None) -> dict[int, set[int]]:
    if facts is None or facts.is_empty():
        return {}
    own = facts.filter(
        ~pl.col("what").is_in(["exit", "exit_local", "world", "members", "differs_from"])
    )
    by_file = own.group_by("file").agg(
        ranks=pl.col("rank").drop_nulls().unique(),
        said=pl.col("said")
        .filter(pl.col("what").str.starts_with("store") | (pl.col("what") == "barrier_waited"))
        .drop_nulls()
        .unique(),
    )
    return {f: set(r) | set(s) for f, r, s in by_file.iter_rows()}


def _names(files: Sequence[TraceFile], open_: Sequence[int], single: bool) -> dict[int, int | None]:
    paths = [files[i].path for i in open_]
    if single:
        found = re.search(r"(?i)(?<![a-z])rank[-_. =]?(\d{1,6})", paths[0])
        return {open_[0]: int(found[1]) if found else None}
    # files of one kind: names that differ in numbers only
    shapes: dict[str, list[int]] = {}
    for i, path in zip(open_, paths, strict=True):
        shapes.setdefault(re.sub(r"\d+", "#", path), []).append(i)
    out: dict[int, int | None] = {}
    for members in shapes.values():
        if len(members) > 1:
            ranks = ranks_from_names([files[i].path for i in members]).ranks
            out |= dict(zip(members, ranks, strict=True))
    return out


# --------------------------------------------------------------------------------------------------
# Attempts


def _attempts(
    facts: pl.DataFrame | None, calls: pl.DataFrame | None, given: Sequence[int | None]
) -> list[tuple[int, pl.DataFrame | None, pl.DataFrame | None]]:
    """(attempt, facts, calls): what stands below a line on a restart is of the next attempt.

    ``given``: for each file the attempt that its folder or ``--job-pattern`` says; None: neither.
    """
    if facts is None:
        facts = log_facts.none()
    marks = facts.filter(
        (pl.col("what") == "restart") & pl.col("number").is_between(1, 10_000)
        | (pl.col("what") == "restart_plain")
    ).sort("file", "line")
    if marks.is_empty() and not any(given):
        return [(0, facts, calls)]
    of_file = pl.DataFrame(
        {"file": range(len(given)), "given": list(given)},
        schema={"file": pl.Int32(), "given": pl.Int64()},
    )
    numbered = marks.filter(pl.col("what") == "restart")
    marks = numbered if numbered.height else marks.with_columns(
        # launchers of several nodes report one restart at about the same place
        number=(pl.col("line").diff().over("file").fill_null(1 << 30) > _SAME_RESTART)
        .cum_sum().over("file").cast(pl.Int64)
    )  # fmt: skip
    bounds = (
        marks.filter(pl.col("file").is_in([i for i, a in enumerate(given) if a is None]))
        .select("file", "line", attempt=pl.col("number").cum_max().over("file"))
        .unique(["file", "line"], keep="last", maintain_order=True)
        .sort("line")
    )

    # files without such a line (one a rank, beside the launcher's) go by its time
    with_marks = bounds["file"].unique().to_list()
    by_time = (
        marks.filter(pl.col("t").is_not_null())
        .group_by(later="number").agg(begun=pl.col("t").min()).sort("begun")
        .with_columns(pl.col("later").cum_max())
    )  # fmt: skip

    def numbered_rows(frame: pl.DataFrame | None) -> pl.DataFrame | None:
        if frame is None or frame.is_empty():
            return None
        seen = frame.sort("file", "line").with_columns(when=pl.col("t").forward_fill().over("file"))
        seen = seen.sort("line").join_asof(
            bounds, on="line", by="file", strategy="backward", check_sortedness=False
        )
        timed = seen.filter(pl.col("when").is_not_null()).sort("when")
        untimed = seen.filter(pl.col("when").is_null())
        seen = pl.concat(
            [
                timed.join_asof(by_time, left_on="when", right_on="begun", strategy="backward"),
                untimed.with_columns(later=pl.lit(None, pl.Int64)),
            ],
            how="diagonal_relaxed",
        )
        other = ~pl.col("file").is_in(with_marks)
        return (
            seen.join(of_file, on="file", how="left")
            .with_columns(
                attempt=pl.coalesce(
                    "given", "attempt", pl.when(other).then("later"), pl.lit(0, pl.Int64)
                )
            )
            .drop("given", "later", "when", "begun", strict=False)
            .sort("file", "line")
        )

    of_facts, of_calls = numbered_rows(facts), numbered_rows(calls)
    numbers = sorted(
        {
            int(n)
            for frame in (of_facts, of_calls)
            if frame is not None
            for n in frame["attempt"].unique()
        }
    )

    def part(frame: pl.DataFrame | None, number: int) -> pl.DataFrame | None:
        if frame is None:
            return None
        return frame.filter(pl.col("attempt") == number).drop("attempt")

    return [(n, part(of_facts, n), part(of_calls, n)) for n in numbers]


_SAME_RESTART: Final = 60


# --------------------------------------------------------------------------------------------------
# Both grammars


def _build(facts: pl.DataFrame | None, calls: pl.DataFrame | None, job: LogJob) -> Trace | None:
    said = log_c10d.build(facts, job) if facts is not None else None
    if said is not None:
        job.world_size = said.jobs["world_size"][0]
    called = log_nccl.build(calls, job) if calls is not None and calls.height else None
    if called is None or said is None:
        return said if called is None else called
    if called.events.is_empty():
        return _with_ranks_of(said, called)
    if said.events.height:
        # the watchdog found it standing still
        called = log_nccl.as_pending(called, said.events)
    return _joined(called, _with_exits(said, job.world))


def _with_ranks_of(said: Trace, called: Trace) -> Trace:
    """The job by its c10d lines; lines on NCCL's communicators add ranks and their number."""
    more = called.ranks.join(said.ranks, on=["job", "rank"], how="anti")
    known = said.jobs["world_size"][0]
    told = called.jobs["world_size"][0]
    world = known if told is None or (known is not None and known > told) else told
    return replace(
        said,
        jobs=said.jobs.with_columns(world_size=pl.lit(world, pl.Int32)),
        ranks=pl.concat([said.ranks, more]).sort("rank"),
    )


def _with_exits(said: Trace, world: Mapping[tuple[str, int], int]) -> Trace:
    """The ranks of ``said`` with the exits that a launcher told by process ids.

    Not where operations timed out: then processes end because of that.
    """
    by_pid: dict[int, set[int]] = {}
    for (_, pid), rank in world.items():
        by_pid.setdefault(pid, set()).add(rank)
    ranks = {str(pid): found.pop() for pid, found in by_pid.items() if len(found) == 1}
    told = said.said.filter(pl.col("what") == "exit_local")
    if said.events.height or told.is_empty() or not ranks:
        return said
    died = (
        told.with_columns(pid=pl.col("text").str.extract(r"\(pid: (\d+)\)"))
        .filter(pl.col("pid").is_in(list(ranks)) & ~pl.col("number").is_in(_TOLD_TO_END))
        .select(
            "job",
            rank=pl.col("pid").replace_strict(ranks, return_dtype=pl.Int32),
            code=pl.col("number").cast(pl.Int32, strict=False),
            exit=pl.lit(EXIT["crashed"], pl.UInt8),
        )
        .unique("rank", keep="first", maintain_order=True)
    )
    others = said.ranks.join(died, on=["job", "rank"], how="anti")
    mine = conform(
        died.join(said.ranks.drop("exit", "code"), on=["job", "rank"], how="left").with_columns(
            truncated=pl.lit(value=False),
            lost_before=pl.lit(0),
            only_active=pl.lit(value=False),
        ),
        "ranks",
    )
    return replace(said, ranks=pl.concat([others, mine]).sort("rank"))


_TOLD_TO_END: Final = (0, -15, -6)
"""Exit codes of processes that a launcher, or their own watchdog, brought to their end."""


def _joined(called: Trace, said: Trace) -> Trace:
    """NCCL's calls, with what other lines say of how the ranks ended."""
    ends = said.ranks.select(
        "job", "rank", said_exit="exit", said_code="code", said_last="t_last", said_torn="truncated"
    )
    ranks = called.ranks.join(ends, on=["job", "rank"], how="left").with_columns(
        exit=pl.when(pl.col("said_exit") != EXIT["unknown"]).then("said_exit").otherwise("exit"),
        code=pl.coalesce("said_code", "code"),
        t_last=pl.max_horizontal("t_last", "said_last"),
    )
    known = called.jobs["world_size"][0]
    world = known if known is not None else said.jobs["world_size"][0]
    unnamed = said.said.with_columns(comm=pl.lit(None, pl.Int32), op=pl.lit(None, pl.Int32))
    return replace(
        called,
        jobs=called.jobs.with_columns(world_size=pl.lit(world, pl.Int32)),
        ranks=conform(ranks, "ranks"),
        said=pl.concat([unnamed, called.said]),
    )
