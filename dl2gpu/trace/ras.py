"""Reader of what NCCL's RAS reports: text or JSON, one report or several of one job.

A report is a snapshot: how many calls of each kind every rank of a communicator has made, and who
did not answer. It holds no operations, so the trace has no events; the counts are rows of ``said``.
Reports of one folder are of one job, in the order of their times, else of their names.

Kinds of statement (column ``what`` of ``said``), with the number of the report in ``number``:

* ``ras_report``: a report was taken; ``t``: when.
* ``ras_count``: the ranks ``of`` (global) have made ``count`` calls of ``op`` on ``comm``;
  ``count_out``: how many they are, where the report does not name them all.
* ``ras_missing``, ``ras_dead``: the ranks ``of`` did not answer, or are taken for dead.
* ``ras_error``: ``text`` says what.

Source: FORMATS.md section 5.4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

import polars as pl

from dl2gpu.trace.files import cut_reason, load_ahead, read_bytes
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.ras_text import REPORTS, is_text, parse
from dl2gpu.trace.schema import (
    EXIT,
    JOBS,
    OP_OTHER,
    SAID,
    StringTable,
    Trace,
    concat,
    conform,
    op_code,
)

__all__ = ["read"]

_OPS: Final = {
    "Broadcast": "broadcast", "Reduce": "reduce", "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter", "AllReduce": "all_reduce", "AlltoAll": "all_to_all",
    "Gather": "gather", "Scatter": "scatter", "Send": "send", "Recv": "recv",
}  # fmt: skip
_ANY_OP: Final = "collective"
"""How the calls are called where a report counts all kinds together."""
_MOST_RANKS: Final = 1 << 20


def read(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes] = read_bytes
) -> tuple[Trace, list[Input]]:
    """One trace of the reports of any number of jobs, and what became of each file."""
    jobs: dict[tuple[str, str, int], list[tuple[TraceFile, bytes | InputError]]] = {}
    ordered = sorted(files, key=lambda f: (f.path, f.url))
    for file, data in zip(ordered, load_ahead(ordered, load), strict=True):
        key = (file.folder, file.job or file.folder, file.attempt or 0)
        jobs.setdefault(key, []).append((file, data))
    traces: list[Trace] = []
    inputs: list[Input] = []
    for (folder, name, attempt), members in sorted(jobs.items()):
        frames: list[pl.DataFrame] = []
        for file, data in members:
            try:
                if isinstance(data, InputError):
                    raise data
                rows = _reports(data)
            except InputError as e:
                inputs.append(Input(file.path, "quarantined", str(e), "ras", name))
                continue
            cut = cut_reason(data)
            inputs.append(Input(file.path, "partial" if cut else "read", cut, "ras", name))
            order = [int(n[:18]) for n in re.findall(r"\d+", file.path)]
            frames.append(
                rows.with_columns(
                    file=pl.lit(len(frames), pl.Int32), path=pl.lit(file.path), order=pl.lit(order)
                )
            )
        if frames:
            traces.append(_trace(frames, name, folder, attempt))
    return concat(traces), inputs


def _reports(data: bytes) -> pl.DataFrame:
    text = data.decode("utf-8", "replace").replace("\0", "")
    if is_text(data):
        return parse(text)
    return _json(text)


# --------------------------------------------------------------------------------------------------
# JSON

_COUNTS: Final = pl.Struct({name: pl.Int64() for name in _OPS})
_STATUS: Final = pl.Struct(
    {
        "async_error": pl.Int64(), "init_state": pl.Int64(), "finalize_called": pl.Boolean(),
        "abort_flag": pl.Boolean(), "unresponsive": pl.Boolean(), "considered_dead": pl.Boolean(),
    }
)  # fmt: skip
_RANK: Final = pl.List(
    pl.Struct(
        {
            "rank": pl.Int64(), "host": pl.String(), "pid": pl.Int64(), "cuda_dev": pl.Int64(),
            "status": _STATUS, "collective_counts": _COUNTS,
        }
    )
)  # fmt: skip
_REPORT: Final = pl.Struct(
    {
        "nccl_version": pl.String(), "timestamp": pl.String(),
        "communicators": pl.List(
            pl.Struct(
                {
                    "hash": pl.String(), "secondary_hash": pl.String(), "size": pl.Int64(),
                    "ranks": _RANK, "missing_ranks": _RANK,
                }
            )
        ),
    }
)  # fmt: skip


def _json(text: str) -> pl.DataFrame:
    """Rows of :data:`ras_text.REPORTS` of one or more JSON reports.

    Raises:
        InputError: it is none.
    """
    start = text.find("{")
    documents = _documents(text[start:]) if start >= 0 else []
    try:
        decoded = pl.Series("r", documents, dtype=pl.String).str.json_decode(_REPORT)
    except pl.exceptions.PolarsError as e:
        reason = str(e).split("\n", 1)[0][:200]
        raise InputError(
            f"expected a report of ncclras in JSON (an object with communicators), found: {reason}"
        ) from e
    reports = decoded.to_frame().with_row_index("report").unnest("r")
    if reports.filter(pl.col("communicators").is_not_null()).is_empty():
        raise InputError("expected a report of ncclras in JSON, found an object of another kind")
    stamp = pl.col("timestamp").str.extract(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)").str.replace(
        "T", " "
    )  # fmt: skip
    reports = reports.with_columns(
        t=stamp.str.to_datetime("%Y-%m-%d %H:%M:%S", time_unit="ns", strict=False).cast(pl.Int64)
    )
    comms = (
        reports.select("report", "t", "communicators")
        .explode("communicators", empty_as_null=False)
        .filter(pl.col("communicators").is_not_null())
        .unnest("communicators")
        .with_columns(
            comm=pl.concat_str(
                pl.col("hash").fill_null("?"), pl.col("secondary_hash").fill_null(""), separator=" "
            ).str.strip_chars()
        )
    )
    present, gone = (
        comms.select("report", "t", "comm", "size", rank_=side)
        .explode("rank_", empty_as_null=False)
        .filter(pl.col("rank_").is_not_null())
        .unnest("rank_")
        .unnest("status")
        .unnest("collective_counts")
        .filter(pl.col("rank").is_between(0, _MOST_RANKS))
        .with_columns(device=pl.col("cuda_dev").cast(pl.String), ranks=pl.lit(1))
        for side in ("ranks", "missing_ranks")
    )
    counts = present.unpivot(
        list(_OPS), index=["report", "t", "comm", "size", "rank", "ranks", "host", "pid", "device"],
        variable_name="op", value_name="count",
    ).filter(pl.col("count") >= 0)  # fmt: skip
    wrong = present.filter(
        pl.col("async_error").fill_null(0).ne(0) | pl.col("abort_flag").fill_null(False)
    ).with_columns(
        what=pl.lit("error"),
        text=pl.when(pl.col("abort_flag").fill_null(False))
        .then(pl.lit("aborted"))
        .otherwise(pl.format("asynchronous error {}", "async_error")),
    )
    dead = pl.col("considered_dead").fill_null(False)
    parts = [
        reports.select("report", "t", what=pl.lit("report")),
        counts.with_columns(what=pl.lit("count")),
        # who answered, also with counts of nothing
        present.with_columns(what=pl.lit("place")),
        gone.with_columns(what=pl.when(dead).then(pl.lit("dead")).otherwise(pl.lit("missing"))),
        wrong,
    ]
    return pl.concat(
        part.select(
            (pl.col(c).cast(d) if c in part.columns else pl.lit(None, d).alias(c))
            for c, d in REPORTS.items()
        )
        for part in parts
    )


_BRACE: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}]')


def _documents(text: str) -> list[str]:
    """The objects that stand one after the other in ``text``."""
    found: list[str] = []
    depth = begin = 0
    for token in _BRACE.finditer(text):
        sign = token.group(0)
        if sign == "{":
            begin = token.start() if depth == 0 else begin
            depth += 1
        elif sign == "}":
            depth -= 1
            if depth == 0:
                found.append(text[begin : token.end()])
            depth = max(depth, 0)
    if depth:
        found.append(text[begin:])
    return found


# --------------------------------------------------------------------------------------------------
# The trace


def _trace(frames: list[pl.DataFrame], name: str, folder: str, attempt: int) -> Trace:
    rows = _numbered(pl.concat(frames, how="vertical_relaxed"))
    rows, comms, world = _communicators(rows)
    strings = StringTable()
    return Trace(
        jobs=pl.DataFrame(
            {
                "job": [0], "name": [name], "folder": [folder], "attempt": [attempt],
                "world_size": [world], "backend": ["nccl"], "source": ["ras"], "waits": [False],
                "p2p": [False],
            },
            schema=JOBS,
        ),
        ranks=_rank_rows(rows, world),
        comms=conform(comms.with_columns(job=pl.lit(0)), "comms"),
        said=_said(rows, strings),
        strings=strings.frame(),
    )  # fmt: skip


def _numbered(rows: pl.DataFrame) -> pl.DataFrame:
    """Reports of all files in one order: by time where all have one, else by name."""
    reports = rows.filter(pl.col("what") == "report").select("file", "report", "t", "order", "path")
    timed = reports["t"].null_count() == 0
    keys = ["t", "file", "report"] if timed else ["order", "path", "report"]
    reports = reports.sort(keys).with_columns(number=pl.int_range(pl.len(), dtype=pl.Int64))
    times = reports.select("file", "report", "number", when="t")
    return rows.join(times, on=["file", "report"], how="inner").with_columns(t="when")


def _communicators(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, int | None]:
    """The rows with ``key`` and ``global`` rank; communicators; the number of ranks of the job."""
    comms = (
        rows.filter(pl.col("comm").is_not_null())
        .group_by("comm")
        .agg(pl.col("size").max(), top=pl.col("rank").max(), first=pl.col("number").min())
        .with_columns(size=pl.coalesce("size", pl.col("top") + 1))
        .with_columns(size=pl.when(pl.col("size").is_between(1, _MOST_RANKS)).then("size"))
        .sort("size", "first", "comm", descending=[True, False, False], nulls_last=True)
        .with_row_index("key")
        .cast({"key": pl.Int32})
    )
    largest = comms["size"].max()
    gpus = rows["gpus"].max()
    known = [int(n) for n in (largest, gpus) if isinstance(n, int)]
    world = max(known) if known and max(known) <= _MOST_RANKS else None
    all_of_it = pl.lit(world, pl.Int64)
    whole = comms.filter(pl.col("size") == all_of_it).head(1)
    place = ["host", "pid", "device"]
    ranks = (
        rows.join(whole.select("comm"), on="comm", how="semi")
        .filter(pl.col("rank").is_not_null() & pl.col("pid").is_not_null())
        .select(*place, at="rank")
        .unique()
        .unique(place, keep="none")
    )
    rows = (
        rows.join(comms.select("comm", "key", full="size"), on="comm", how="left")
        .join(ranks, on=place, how="left", nulls_equal=True)
        .with_columns(
            world_rank=pl.when((pl.col("full") == all_of_it) & (pl.col("key") == 0))
            .then("rank").otherwise("at")
        )
    )  # fmt: skip
    members = (
        rows.filter(pl.col("rank").is_not_null() & pl.col("key").is_not_null())
        .select("key", "rank", "world_rank")
        .unique()
        .sort("key", "rank")
        .group_by("key", maintain_order=True)
        .agg(
            ranks=pl.col("world_rank"),
            clean=pl.col("world_rank").is_not_null().all() & pl.col("rank").is_unique().all(),
        )
    )
    empty = pl.lit([], pl.List(pl.Int32))
    comms = comms.join(members, on="key", how="left").select(
        comm="key",
        id="comm",
        ranks=pl.when((pl.col("size") == all_of_it) & (pl.col("key") == 0))
        .then(pl.int_ranges(0, pl.col("size").clip(0, _MOST_RANKS)).cast(pl.List(pl.Int32)))
        .when(pl.col("clean") & (pl.col("ranks").list.len() == pl.col("size")))
        .then(pl.col("ranks").cast(pl.List(pl.Int32)))
        .otherwise(empty),
    )
    return _complements(rows, world), comms.sort("comm"), world


def _complements(rows: pl.DataFrame, world: int | None) -> pl.DataFrame:
    """Rows of unnamed ranks of the whole job, named where all others of the communicator are."""
    of = ["number", "key", "op"]
    blank = rows.filter((pl.col("what") == "count") & pl.col("rank").is_null())
    if blank.is_empty() or world is None:
        return rows
    alone = blank.filter(pl.len().over(of) == 1).filter(
        (pl.col("full") == world) & (pl.col("key") == 0)
    )
    named = rows.filter((pl.col("what") == "count") & pl.col("rank").is_not_null()).select(
        *of, "rank"
    )
    every = (
        alone.drop("rank")
        .with_columns(rank=pl.int_ranges(0, pl.col("full")))
        .explode("rank", empty_as_null=False)
    )
    every = every.join(named, on=[*of, "rank"], how="anti", nulls_equal=True)
    gone = rows.filter(pl.col("what").is_in(["missing", "dead"])).select("number", "key", "rank")
    every = every.join(gone, on=["number", "key", "rank"], how="anti")
    every = every.filter(pl.len().over(of) == pl.col("ranks"))
    done = every.select(of).unique()
    blank_done = alone.join(done, on=of, how="semi", nulls_equal=True).select(of)
    rest = rows.filter(~((pl.col("what") == "count") & pl.col("rank").is_null()))
    left = blank.join(blank_done, on=of, how="anti", nulls_equal=True)
    filled = every.with_columns(world_rank="rank", ranks=pl.lit(1, pl.Int64)).select(rows.columns)
    return pl.concat([rest, left.select(rows.columns), filled], how="vertical_relaxed")


def _said(rows: pl.DataFrame, strings: StringTable) -> pl.DataFrame:
    """See the module's head."""
    names = rows["op"].drop_nulls().unique().sort()
    codes = {n: op_code(_OPS.get(n, n), strings) for n in names}
    any_op = OP_OTHER + strings.code(_ANY_OP)
    rows = rows.with_columns(
        code=pl.col("op").replace_strict(codes, default=any_op, return_dtype=pl.Int32)
    )
    heads = rows.filter(pl.col("what") == "report").select(
        "number", "t", "path", what=pl.lit("ras_report")
    )
    counts = (
        rows.filter(pl.col("what") == "count")
        .group_by("number", "key", "code", "count")
        .agg(
            pl.col("t", "path").first(),
            of=pl.col("world_rank").drop_nulls().unique().sort(),
            count_out=pl.col("ranks").sum(),
            text=_place().filter(pl.col("rank").is_not_null()).unique().sort().head(64)
            .str.join("; "),
        )
        .with_columns(what=pl.lit("ras_count"), comm="key", op="code")
        .drop("key", "code")
    )  # fmt: skip
    others = (
        rows.filter(pl.col("what").is_in(["missing", "dead", "error"]))
        .group_by("number", "what", "key", said=pl.when(pl.col("what") == "error").then("text"))
        .agg(
            pl.col("t", "path").first(),
            of=pl.col("world_rank").drop_nulls().unique().sort(),
            count_out=pl.col("ranks").sum(),
            places=_place().unique().sort().head(64).str.join("; "),
        )
        .with_columns(
            what=pl.lit("ras_") + pl.col("what"), comm="key", text=pl.coalesce("said", "places")
        )
        .drop("key", "said", "places")
    )
    frames = [
        frame.select(
            (pl.col(c).cast(d, strict=False) if c in frame.columns else pl.lit(None, d).alias(c))
            for c, d in SAID.items()
            if c != "job"
        )
        for frame in (heads, counts, others)
    ]
    said = pl.concat(frames).sort("number", "what", "comm", "op", "count", nulls_last=False)
    return conform(said.with_columns(job=pl.lit(0)), "said")


def _place() -> pl.Expr:
    return pl.format(
        "rank {} (GPU {}, process {} on {})",
        pl.col("rank").fill_null(-1), pl.col("device").fill_null("?"),
        pl.col("pid").cast(pl.String).fill_null("?"), pl.col("host").fill_null("?"),
    )  # fmt: skip


def _rank_rows(rows: pl.DataFrame, world: int | None) -> pl.DataFrame:
    """Ranks that answered; those that a text report does not name did."""
    last = rows["number"].max()
    gone = rows.filter(
        (pl.col("number") == last) & pl.col("what").is_in(["missing", "dead"])
    )["world_rank"].drop_nulls().unique()  # fmt: skip
    named = rows.filter(pl.col("world_rank").is_not_null())["world_rank"].unique()
    there = pl.Series(range(world), dtype=pl.Int64) if world is not None else named
    ranks = there.filter(~there.is_in(gone.implode())).sort()
    paths = rows.filter(pl.col("number") == last)["path"]
    frame = pl.DataFrame({"rank": ranks}).with_columns(
        job=pl.lit(0),
        exit=pl.lit(EXIT["unknown"]),
        truncated=pl.lit(value=False),
        lost_before=pl.lit(0),
        only_active=pl.lit(value=False),
        timed=pl.lit(value=False),
        t_last=pl.lit(rows["t"].max(), pl.Int64),
        path=pl.lit(paths[0] if len(paths) else None, pl.String),
    )
    return conform(frame, "ranks")
