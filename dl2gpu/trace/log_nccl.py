"""What NCCL and RCCL log of their calls (``NCCL_DEBUG=INFO``, subsystems INIT and COLL) as a trace.

A line means that a host called, never that a GPU finished. So events have no state, but for those
of a communicator that was destroyed in order: a destroy waits for what was called before it. Calls
are numbered by their order, per process and thread: NCCL's own ``opCount`` repeats within groups
and is 0 throughout in some versions.

Source: FORMATS.md section 5, LOG_LINES.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import polars as pl

from dl2gpu.trace.log_nccl_comms import Communicators, resolve
from dl2gpu.trace.log_nccl_lines import Parsed, extract, parsed
from dl2gpu.trace.log_nccl_pieces import ROOM, WORDS
from dl2gpu.trace.schema import (
    DTYPE_BYTES,
    EXIT,
    FLAG,
    JOBS,
    OP,
    OP_OTHER,
    STATE,
    StringTable,
    Trace,
    conform,
    dtype_code,
)

if TYPE_CHECKING:
    from dl2gpu.trace.log import LogJob

__all__ = ["WORDS", "build", "extract"]

_OPS: Final = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast", "Bcast": "broadcast", "Reduce": "reduce", "Send": "send",
    "Recv": "recv", "AlltoAll": "all_to_all", "AllToAll": "all_to_all", "Gather": "gather",
    "Scatter": "scatter", "AllToAllv": "all_to_all_v", "AlltoAllv": "all_to_all_v",
    "AllGatherV": "all_gather_v", "AllReduceWithBias": "all_reduce",
}  # fmt: skip
_ONE_SIDED: Final = ("PutSignal", "Signal", "WaitSignal")
"""Writes into another rank's memory: no partner calls anything. Not part of the trace."""
_ROOTED: Final = ("broadcast", "reduce", "gather", "scatter")
_REDUCES: Final = ("all_reduce", "reduce_scatter", "reduce")
_DTYPES: Final = (
    "i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "fp8e4m3", "fp8e5m2",
)  # fmt: skip
_REDUCTIONS: Final = ("sum", "prod", "max", "min", "avg")
_BIG: Final = 1 << 61
"""Elements and bytes above this are no sizes."""


def build(facts: pl.DataFrame, job: LogJob) -> Trace | None:
    """The trace of one attempt of a job; None where no line is of NCCL.

    Args:
        facts: what :func:`extract` gave for its files.
        job: what else is known of it; ``world_size`` is filled where it is not known, ``world``
            and ``unreadable`` are.
    """
    p = parsed(facts)
    if p.calls.is_empty() and p.comms.is_empty():
        return None
    who = resolve(p, job.file_rank, job.world)
    if job.world_size is None:
        job.world_size = who.world
    job.world |= {
        (host, pid): rank
        for host, pid, rank in who.agents.filter(pl.len().over("host", "pid") == 1)
        .drop_nulls("rank")
        .select("host", "pid", "rank")
        .iter_rows()
    }
    job.unreadable = dict(who.lost.group_by("file").len().iter_rows())
    strings = StringTable()
    cut = _cut_starts(who)
    return Trace(
        events=_events(who, cut, strings),
        jobs=pl.DataFrame(
            {
                "job": [0], "name": [job.name], "folder": [job.folder], "attempt": [job.attempt],
                "world_size": [job.world_size], "backend": ["nccl"], "source": ["log"],
                "waits": [False], "p2p": [True],
            },
            schema=JOBS,
        ),
        ranks=_rank_rows(who, cut, job),
        comms=_comm_rows(who),
        strings=strings.frame(),
        said=_warnings(p, who, job),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Events


def _cut_starts(who: Communicators) -> pl.DataFrame:
    """(key, counted): communicators whose calls do not begin at one place on all members.

    A log that was cut at its head, on some ranks more than on others. ``counted``: there are only
    collectives and the library's own numbers increase with each, so that they tell the place.
    """
    calls = who.calls.join(who.instances.select("inst", "key", "named"), on="inst")
    each = calls.sort("pos").group_by("key", "agent").agg(
        first=pl.col("op_count").first(),
        increases=(pl.col("op_count").diff().cast(pl.Int64, strict=False) > 0).all()
        & pl.col("op_count").is_not_null().all(),
        still=(pl.len() > 1) & (pl.col("op_count").n_unique() == 1),
        named=pl.col("named").all(),
        messages=pl.col("op").is_in(["Send", "Recv"]).any(),
    )  # fmt: skip
    cut = (pl.col("first").n_unique() > 1) | (~pl.col("named") & pl.col("still")).any()
    return (
        each.group_by("key")
        .agg(
            cut=cut & (pl.len() > 1),
            counted=(pl.col("increases") & ~pl.col("messages")).all(),
        )
        .filter("cut")
        .drop("cut")
    )


def _events(who: Communicators, cut: pl.DataFrame, strings: StringTable) -> pl.DataFrame:
    calls = who.calls.filter(~pl.col("op").is_in(_ONE_SIDED)).drop("rank")
    calls = pl.concat([calls, _creations(who, calls)])
    rows = (
        calls.join(who.agents.select("agent", "rank"), on="agent")
        .filter(pl.col("rank").is_not_null())
        .join(who.instances.select("inst", "key", "member", "destroyed"), on="inst")
        .join(who.comms.select("key", "ranks", "guessed"), on="key")
        .join(cut, on="key", how="left")
    )
    if rows.is_empty():
        return Trace().events
    rows = rows.with_columns(name=_operations(rows)).sort("rank", "pos")
    rows = rows.with_columns(
        op=_codes(rows["name"], OP, OP_OTHER, strings),
        lane=_lanes(rows),
        seq=pl.int_range(pl.len(), dtype=pl.Int64).over("rank"),
        group=_batches(rows),
        other=_member(rows),
    )
    kind = pl.col("name")
    size = pl.col("nranks")
    count = pl.when(pl.col("count").is_between(0, _BIG)).then("count")
    product = pl.when(count <= _BIG // size.clip(1)).then(count * size)
    gathers = kind.is_in(["reduce_scatter", "all_to_all"]) | (
        (kind == "scatter") & (pl.col("other") == pl.col("rank"))
    )
    spreads = kind.is_in(["all_gather", "all_to_all"]) | (
        (kind == "gather") & (pl.col("other") == pl.col("rank"))
    )
    rows = rows.with_columns(
        count=pl.when(gathers).then(product).otherwise(count),
        count_out=pl.when(spreads).then(product).when(kind.is_in(["reduce_scatter", "scatter"]))
        .then(count),
        code=_dtypes(rows["dtype"], strings),
        reduction=_reductions(rows, strings),
        queue=_streams(rows["stream"], strings),
    )  # fmt: skip
    width = pl.Series(list(DTYPE_BYTES.values()), dtype=pl.Int64)
    code = rows["code"]
    known = pl.select(pl.when(code < len(width)).then(code)).to_series()
    p2p = kind.is_in(["send", "recv"])
    rooted = kind.is_in(_ROOTED)
    flags = (
        pl.when(pl.col("guessed")).then(FLAG["synthetic_comm"]).otherwise(0)
        + pl.when(pl.col("op") >= OP_OTHER).then(FLAG["unknown_op"]).otherwise(0)
    )  # fmt: skip
    frame = rows.with_columns(element=width.gather(known).alias("element")).select(
        "rank", "lane", "seq", "op", "group", "count", "count_out",
        job=pl.lit(0),
        stream=pl.when(kind != _CREATE).then("queue"),
        blocking=kind == _CREATE,
        comm="key",
        peer=pl.when(p2p).then("other"),
        root=pl.when(rooted).then("other"),
        reduce_op="reduction",
        dtype="code",
        ordinal=pl.when("counted").then(pl.col("op_count").cast(pl.Int64, strict=False)),
        bytes=pl.when(pl.col("count") <= _BIG // pl.col("element")).then(
            pl.col("count") * pl.col("element")
        ),
        state=pl.when("destroyed").then(STATE["completed"]).otherwise(STATE["unknown"]),
        t_created="t",
        flags=flags,
    )  # fmt: skip
    return conform(frame, "events")


def _creations(who: Communicators, like: pl.DataFrame) -> pl.DataFrame:
    """Creations of communicators that some member has begun and not come to the end of.

    Those that went well say nothing that the calls do not say. A thread that did something
    afterwards has come to the end of it, whatever became of the line.
    """
    thread = ["agent", "tid"]
    doings = [frame.select(*thread, "pos") for frame in (like, who.instances)]
    last = pl.concat(doings).group_by(thread).agg(last=pl.col("pos").max())
    found = who.instances.join(last, on=thread, how="left", nulls_equal=True).with_columns(
        made=pl.col("made") | (pl.col("pos") < pl.col("last"))
    )
    stuck = pl.col("begun") & ~pl.col("made") & ~pl.col("aborted")
    found = found.filter(stuck.any().over("key") & (pl.col("begun") | pl.col("made")))
    return found.select(
        pl.lit(_CREATE).alias("op") if c == "op"
        else pl.col(c).cast(d) if c in _OF_INSTANCE
        else pl.lit(None, d).alias(c)
        for c, d in like.schema.items()
    )  # fmt: skip


_OF_INSTANCE: Final = ("file", "pos", "inst", "agent", "host", "pid", "tid", "nranks")
_CREATE: Final = "comm_create"


def _operations(rows: pl.DataFrame) -> pl.Series:
    """Names of the catalogue; an unknown one keeps its own."""
    return rows["op"].replace_strict(_OPS, default=rows["op"], return_dtype=pl.String)


def _codes(names: pl.Series, known: dict[str, int], other: int, strings: StringTable) -> pl.Series:
    """Codes of texts; what is not known is interned."""
    table = {n: known[n] if n in known else other + strings.code(n) for n in names.unique().sort()}
    return names.replace_strict(table, return_dtype=pl.Int32)


def _lanes(rows: pl.DataFrame) -> pl.Series:
    """Threads of each rank, numbered by their first call."""
    first = rows.group_by("rank", "tid").agg(pl.col("pos").min())
    first = first.with_columns(
        lane=pl.int_range(pl.len(), dtype=pl.Int32).over("rank", order_by="pos")
    )
    return rows.join(first.select("rank", "tid", "lane"), on=["rank", "tid"], how="left",
                     maintain_order="left", nulls_equal=True)["lane"]  # fmt: skip


def _member(rows: pl.DataFrame) -> pl.Series:
    """Global rank of the root or peer; null where the communicator's members are not known."""
    place = pl.col("root")
    found = rows.select(
        pl.when(place.is_between(0, pl.col("ranks").list.len().cast(pl.Int64) - 1)).then(
            pl.col("ranks").list.get(place, null_on_oob=True)
        )
    )
    return found.to_series()


_GROUPED: Final = ["rank", "tid", "inst", "stream"]


def _batches(rows: pl.DataFrame) -> pl.Series:
    """Batches: runs of Send and Recv calls that were issued in one group.

    A group is not printed. Its calls show one ``opCount``, as nothing was launched between them;
    where that number is of no use (always the same, or another for each call of a group that sends
    to itself), a run goes on until a peer comes a second time in the same direction.
    """
    p2p = rows["name"].is_in(["send", "recv"])
    if not p2p.any():
        return pl.Series([None], dtype=pl.Int64).new_from_index(0, rows.height)
    frame = rows.select(*_GROUPED, "op_count", "name", "root", "member").with_columns(p2p=p2p)
    new = pl.any_horizontal(
        *(pl.col(c).ne_missing(pl.col(c).shift(1)) for c in _GROUPED),
        ~pl.col("p2p").shift(1, fill_value=False),
    )
    frame = frame.with_columns(run=new.cast(pl.Int64).cum_sum())
    moves = frame.filter("p2p")["op_count"].n_unique() > 1
    # one that sends to itself by a call of its own would wait for itself
    alone = frame.filter(
        p2p & (pl.col("root") == pl.col("member")) & (pl.len().over("run", "op_count") == 1)
    )
    if moves and alone.is_empty():
        frame = frame.with_columns(
            part=(new | pl.col("op_count").ne_missing(pl.col("op_count").shift(1)))
            .cast(pl.Int64).cum_sum()
        )  # fmt: skip
    else:
        nth = pl.int_range(pl.len(), dtype=pl.Int64).over("run", "name", "root")
        # a peer that comes again begins the next batch for all that follow
        frame = frame.with_columns(nth=pl.when("p2p").then(nth)).with_columns(
            part=pl.col("nth").cum_max().over("run")
        )
    size = pl.len().over("run", "part")
    number = pl.struct("run", "part").rank("dense").cast(pl.Int64)
    return frame.select(pl.when(pl.col("p2p") & (size > 1)).then(number)).to_series()


def _dtypes(numbers: pl.Series, strings: StringTable) -> pl.Series:
    """NCCL's numbers of data types as codes of the catalogue."""
    table: dict[int | None, int | None] = {None: None}
    for n in numbers.unique().drop_nulls().sort()[:_MOST_KINDS]:
        name = _DTYPES[n] if 0 <= n < len(_DTYPES) else f"datatype {n}"
        table[n] = dtype_code(name, strings)
    return numbers.replace_strict(table, default=None, return_dtype=pl.Int32)


_MOST_KINDS: Final = 1 << 10
"""Different numbers of data types that are named; no library has so many."""


def _reductions(rows: pl.DataFrame, strings: StringTable) -> pl.Series:
    """String codes of reduce operations; those made by the program are all called custom."""
    numbers = rows["reduce"]
    table = {n: strings.code(name) for n, name in enumerate(_REDUCTIONS)}
    custom = strings.code("custom")
    code = numbers.replace_strict(table, default=custom, return_dtype=pl.Int32)
    reduces = rows["name"].is_in(_REDUCES) & numbers.is_not_null()
    return pl.select(pl.when(reduces).then(code)).to_series()


def _streams(pointers: pl.Series, strings: StringTable) -> pl.Series:
    """String codes of streams, which are called as the log calls them."""
    known = pointers.unique().sort()
    texts = [
        "stream ?" if p is None else "default stream" if p == 0 else f"stream 0x{p:x}"
        for p in known
    ]
    codes = pl.Series([strings.code(t) for t in texts], dtype=pl.Int32)
    return pointers.replace_strict(known, codes, return_dtype=pl.Int32)


# --------------------------------------------------------------------------------------------------
# Side tables


def _rank_rows(who: Communicators, cut: pl.DataFrame, job: LogJob) -> pl.DataFrame:
    """One row a rank: finished where all that it took part in was destroyed in order."""
    of_agent = who.instances.group_by("agent").agg(
        ended=pl.col("destroyed").all(),
    )
    last = who.calls.group_by("agent").agg(t_last=pl.col("t").max())
    paths = pl.DataFrame(
        {"file": range(len(job.files)), "path": [f.path for f in job.files]},
        schema={"file": pl.Int32, "path": pl.String},
    )
    rows = (
        who.agents.filter(pl.col("rank").is_not_null())
        .join(of_agent, on="agent", how="left")
        .join(last, on="agent", how="left")
        .join(paths, on="file", how="left")
        .unique("rank", keep="first", maintain_order=True)
        .sort("rank")
    )
    holes = who.lost
    broken = rows["agent"].is_in(holes["agent"].drop_nulls().to_list()) | rows["file"].is_in(
        holes.filter(pl.col("agent").is_null())["file"].to_list()
    )
    headless = who.instances.join(cut, on="key", how="semi")["agent"].unique()
    broken |= rows["agent"].is_in(headless.implode())
    frame = rows.with_columns(broken=broken).select(
        "rank", "path", "t_last",
        job=pl.lit(0),
        exit=pl.when("ended").then(EXIT["finished"]).otherwise(EXIT["alive"]),
        truncated=pl.lit(value=False),
        lost_before=pl.col("broken").cast(pl.Int64),
        only_active=pl.lit(value=False),
        timed=pl.lit(value=False),
    )  # fmt: skip
    return conform(frame, "ranks")


def _comm_rows(who: Communicators) -> pl.DataFrame:
    return conform(
        who.comms.sort("key").select(
            "id", "ranks",
            comm="key",
            job=pl.lit(0),
            name=pl.concat_str(pl.col("nranks").cast(pl.String), pl.lit(" ranks")),
        ),
        "comms",
    )  # fmt: skip


_MOST_WARNINGS: Final = 64


def _warnings(p: Parsed, who: Communicators, job: LogJob) -> pl.DataFrame:
    """The library's warnings, each text once a process: hints, and no more than that."""
    of_process = who.agents.group_by("host", "pid").agg(
        rank=pl.when(pl.len() == 1).then(pl.col("rank").first())
    )
    paths = [f.path for f in job.files]
    rows = (
        p.warnings.with_columns(
            text=pl.col("text").str.extract(r"[NR]CCL WARN (.*)$").str.head(_EXCERPT)
        )
        .unique(["host", "pid", "text"], keep="first", maintain_order=True)
        .head(_MOST_WARNINGS)
        .join(of_process, on=["host", "pid"], how="left", maintain_order="left")
        .with_columns(
            job=pl.lit(0),
            what=pl.lit("nccl_warning"),
            line=pl.col("at") // ROOM,
            path=pl.col("file").replace_strict(
                range(len(paths)), paths, default=None, return_dtype=pl.String
            ),
        )
    )
    return conform(rows, "said")


_EXCERPT: Final = 240
"""Characters of a warning that are kept."""


def as_pending(trace: Trace, waits: pl.DataFrame) -> Trace:
    """The trace of a job that is known to stand still: what is not complete is pending.

    Args:
        trace: a job's calls.
        waits: operations that timed out: ``rank``, ``op``, ``ordinal`` (of the process group, from
            1) and ``count``, as PyTorch's watchdog tells them. Where such a number is a position
            on one communicator, with the same operation, what lies before is complete.
    """
    place = ["rank", "comm"]
    events = trace.events.with_row_index("row")
    calls = (
        events.filter(pl.col("op").is_between(OP["all_reduce"], OP["gather_v"]))
        .sort("rank", "seq")
        .with_columns(k=pl.int_range(1, pl.len() + 1, dtype=pl.Int64).over(place))
    )
    stands = (
        calls.join(
            waits.select("rank", "op", k="ordinal", numel="count").drop_nulls(["rank", "op", "k"]),
            on=["rank", "op", "k"],
        )
        .filter((pl.col("numel") == pl.col("count")) | pl.col("numel").is_null())
        .filter(pl.len().over("rank", "k", "op") == 1)
        .group_by("comm")
        .agg(first=pl.col("k").min())
    )
    # a stream takes one after the other: what was called before them on it is complete as well
    done = calls.join(stands, on="comm").filter(pl.col("k") < pl.col("first"))
    until = done.group_by("rank", "stream").agg(until=pl.col("seq").max())
    over = events.join(until, on=["rank", "stream"]).filter(pl.col("seq") <= pl.col("until"))["row"]
    state = pl.col("state")
    return replace(
        trace,
        events=events.with_columns(
            state=pl.when(state != STATE["unknown"])
            .then(state)
            .when(pl.col("row").is_in(over.implode()))
            .then(pl.lit(STATE["completed"], pl.UInt8))
            .otherwise(pl.lit(STATE["scheduled"], pl.UInt8))
        ).drop("row"),
    )
