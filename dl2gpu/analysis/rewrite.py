"""Variants of programs: the same jobs with other orders, fused operations, or matches set free.

A variant is a trace of its own, made by columns: the jobs of a trace times so many samples, matched
once and replayed with them all at once. Source: DESIGN.md section 6; the fusion of gradient
operations as in the evaluation of dl2 (buckets of so many operations in the order in which they get
ready) and in Horovod (a buffer of so many bytes that is sent off each cycle).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import polars as pl

from dl2gpu.analysis.rewrite_kernel import fill
from dl2gpu.engine.arrays import Array, plain
from dl2gpu.trace.schema import ANY, COMMS, EVENTS, JOBS, OP, RANKS, STATUS, Trace

__all__ = ["ORDERS", "Fusion", "Variant", "copies", "free_matches", "variant"]

ORDERS: Final = {
    "recorded": "as recorded",
    "random": "gradients get ready in any order, on each rank in its own",
    "swapped": "on each rank two neighbouring gradients get ready the other way round",
    "threads": "host threads of a rank take turns in any order",
}
"""Orders that :func:`variant` knows, and what they mean."""

_GRADIENTS: Final = (OP["all_reduce"], OP["reduce_scatter"])


@dataclass(frozen=True)
class Fusion:
    """How gradient operations are fused: ``count`` at a time, or up to ``bytes`` each ``cycle_ns``.

    All 0: none. ``coordinated``: a coordinator lets those begin that all ranks have announced, in
    one order for all of them, as Horovod's does; what goes into one buffer then decides nothing.
    """

    count: int = 0
    bytes: int = 0
    cycle_ns: int = 0
    coordinated: bool = False


@dataclass(frozen=True)
class Variant:
    """A rewritten trace, and what its fused operations hold.

    ``trace``: job j of the original is job ``sample * jobs + j``. ``content``: (job, rank, lane,
    seq, content) of the operations that were fused or reordered: a number for the set of gradients
    in each, the same on two ranks only if these are the same.
    """

    trace: Trace
    content: pl.DataFrame


def copies(trace: Trace, times: int) -> Trace:
    """The jobs so many times over: job j again as job ``k * jobs + j``."""
    if times == 1:
        return trace
    n_jobs = trace.jobs.height
    n_comms = int(trace.comms["comm"].max() or 0) + 1 if trace.comms.height else 0  # type: ignore[arg-type]

    def again(frame: pl.DataFrame, schema: dict[str, pl.DataType]) -> pl.DataFrame:
        moved = []
        for k in range(times):
            shift = {"job": k * n_jobs, "comm": k * n_comms, "new_comm": k * n_comms}
            moved.append(
                frame.with_columns(
                    (pl.col(c) + by).cast(schema[c]) for c, by in shift.items() if c in schema
                )
            )
        return pl.concat(moved)

    return replace(
        trace,
        events=again(trace.events, EVENTS),
        jobs=again(trace.jobs, JOBS),
        ranks=again(trace.ranks, RANKS),
        comms=again(trace.comms, COMMS),
        status=again(trace.status, STATUS),
    )


def free_matches(trace: Trace) -> Trace:
    """The trace as if nobody knew what its wildcards have got, and its waits returned.

    A receive right behind a probe of anybody takes what the probe has seen: it is from anybody too.
    """
    e = trace.events
    wild = (pl.col("peer") == ANY) | (pl.col("tag") == ANY)
    probed = (
        (pl.col("op") == OP["recv"])
        & (pl.col("op").shift(1) == OP["probe"])
        & (pl.col("peer").shift(1) == ANY)
        & (pl.col("comm").shift(1) == pl.col("comm")).fill_null(True)
        & (pl.col("rank").shift(1) == pl.col("rank"))
        & (pl.col("lane").shift(1) == pl.col("lane"))
        & (pl.col("job").shift(1) == pl.col("job"))
    ).fill_null(False)
    e = (
        e.sort("job", "rank", "lane", "seq")
        .with_columns(
            matched_peer=pl.when(~wild.fill_null(False)).then("matched_peer"),
            matched_tag=pl.when(~wild.fill_null(False)).then("matched_tag"),
            peer=pl.when(probed).then(pl.lit(ANY, pl.Int32)).otherwise("peer"),
            returned=pl.lit(None, EVENTS["returned"]),
        )
        .select(EVENTS.keys())
    )
    return replace(trace, events=e)


def variant(
    trace: Trace, fusion: Fusion, order: str, samples: int = 1, seed: int = 0, first: int = 0,
    node: Array | None = None,
) -> Variant:  # fmt: skip
    """The trace with gradient operations in other orders, and fused.

    Args:
        trace: some jobs.
        fusion: how many go into one operation.
        order: one of :data:`ORDERS`; "recorded" needs one sample only.
        samples: so many variants of each job, each with an order of its own.
        seed, first: of the orders, and the number of the first sample. A sample is the same,
            whatever other samples and jobs there are.
        node: int[events] a number for the operation that each event takes part in, the same on all
            its members (rows as in ``trace.events``); it tells what fused operations hold.

    Gradient operations are all_reduce and reduce_scatter that do not hold their host, of one
    communicator, stream and data type, one right behind the other. The last of those fused stands
    for all; waits for any of them wait for it. Where they are coordinated each stays by itself and
    is known by name, that is by the operation that it took part in: it is on no device queue until
    every rank has announced it, and nothing but a wait for it waits.

    Raises:
        ValueError: the order is unknown.
    """
    if order not in ORDERS:
        raise ValueError(f"order: expected one of {', '.join(ORDERS)}, found {order!r}")
    content = np.arange(trace.events.height) if node is None else node
    base = copies(trace, samples)
    number = pl.int_range(pl.len()).over("job")
    e = base.events.with_columns(
        _content=pl.Series(np.tile(content.astype(np.int64), samples)),
        _sample=first + pl.col("job") // max(trace.jobs.height, 1),
    ).sort("job", "rank", "seq", "lane").with_columns(_number=number)  # fmt: skip
    draw = _hash(
        _hash(e["_sample"].to_numpy().astype(np.int64) + 1_000_003 * seed)
        + e["_number"].to_numpy().astype(np.int64)
    )  # fmt: skip
    e = e.with_columns(_draw=pl.Series(draw / (1 << 40))).drop("_sample", "_number")
    held = pl.DataFrame(schema=_HELD)
    if order == "threads":
        e = _interleaved(e)
    if fusion.coordinated:
        e, held = _coordinated(e, order)
    elif order in ("random", "swapped") or fusion != Fusion():
        e, held = _fused(e, fusion, order)
        e = e.with_columns(ordinal=pl.lit(None, EVENTS["ordinal"]))
    return Variant(replace(base, events=e.select(EVENTS.keys())), held)


def _interleaved(e: pl.DataFrame) -> pl.DataFrame:
    """The operations of each rank's lanes merged anew: every merge is as likely as another."""
    lane = ["job", "rank", "lane"]
    # within its lane each operation keeps its place: the k-th gets the k-th of the lane's numbers
    turns = e.sort(*lane, "_draw")["_draw"].alias("_turn")
    e = e.sort(*lane, "seq").with_columns(turns)
    return e.with_columns(
        seq=pl.col("_turn").rank("ordinal").over("job", "rank").cast(pl.Int64) - 1,
        ordinal=pl.lit(None, pl.Int64),
    ).drop("_turn")


def _runs(e: pl.DataFrame) -> pl.DataFrame:
    """Events by lane, with ``_run``: a number for each run of gradient operations, else null."""
    same = ["job", "rank", "lane", "comm", "op", "stream", "dtype", "reduce_op"]
    gradient = (
        pl.col("op").is_in(_GRADIENTS)
        & (pl.col("stream").is_not_null() | ~pl.col("blocking"))
        & pl.col("group").is_null()
    )
    e = e.sort("job", "rank", "lane", "seq").with_columns(_gradient=gradient)
    follows = pl.all_horizontal(pl.col(c).eq_missing(pl.col(c).shift(1)) for c in same)
    follows = follows & pl.col("_gradient") & pl.col("_gradient").shift(1).fill_null(False)
    return e.with_columns(_run=pl.when("_gradient").then((~follows).cum_sum())).drop("_gradient")


_HELD: Final = {c: EVENTS[c] for c in ("job", "rank", "lane", "seq")} | {"content": pl.Int64()}


def _ordered(e: pl.DataFrame, order: str) -> pl.DataFrame:
    """The gradient operations of :func:`_runs` in the order in which they get ready.

    With ``_slot``, the place in the run, ``_time``, when what was there recorded began, and
    ``_mark``, a number for the gradient.
    """
    slots = e.filter(pl.col("_run").is_not_null()).with_columns(
        _slot=pl.int_range(pl.len()).over("_run"), _length=pl.len().over("_run")
    )
    ready = pl.col("_slot").cast(pl.Float64)
    if order == "random":
        ready = pl.col("_draw")
    elif order == "swapped":
        # one of the run and the next change places
        at = (pl.col("_draw").first().over("_run") * (pl.col("_length") - 1)).cast(pl.Int64)
        ready = pl.when(pl.col("_slot") == at).then(pl.col("_slot") + 1.5).otherwise(ready)
    slots = slots.with_columns(_ready=ready).sort("_run", "_ready", "_slot")
    # the k-th to get ready takes the k-th place
    place = e.filter(pl.col("_run").is_not_null()).sort("_run", "seq")
    return slots.with_columns(
        place["seq"].alias("seq"),
        _slot=pl.int_range(pl.len()).over("_run"),
        _time=place["t_created"],
        _mark=pl.Series(_hash(slots["_content"].to_numpy())),
    )


def _coordinated(e: pl.DataFrame, order: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Gradient operations in their order, each known by name; and what each of them holds.

    A name is the operation that they took part in, which the collectives of their communicators are
    numbered by.
    """
    e = _runs(e)
    slots = _ordered(e, order).with_columns(
        stream=pl.lit(None, EVENTS["stream"]), blocking=pl.lit(value=False)
    )
    columns = [*EVENTS, "_content"]
    rest = e.filter(pl.col("_run").is_null())
    both = pl.concat([rest.select(columns), slots.select(columns)])
    named = both.join(slots.select("comm").unique(), on="comm", how="semi").filter(
        pl.col("op") >= OP["all_reduce"]
    )
    number = pl.col("_content").rank("dense").over("comm").cast(pl.Int64)
    at = ["job", "rank", "lane", "seq"]
    numbers = named.select(*at, _name=number)
    both = both.join(numbers, on=at, how="left").with_columns(ordinal="_name").drop("_name")
    return both, slots.select("job", "rank", "lane", "seq", content="_mark")


def _fused(e: pl.DataFrame, fusion: Fusion, order: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Gradient operations in their order, fused; and what each of them holds."""
    e = _runs(e)
    slots = _ordered(e, order)
    if slots.is_empty():
        return e, pl.DataFrame(schema=_HELD)
    if fusion.count:
        bucket = (slots["_slot"] // fusion.count).to_numpy()
    elif fusion.bytes or fusion.cycle_ns:
        cycle = np.zeros(slots.height, np.int64)
        if fusion.cycle_ns:
            # without recorded times one gets ready each millisecond, as far as luck has it
            time = pl.coalesce("_time", pl.col("_slot").cast(pl.Int64) * 1_000_000)
            late = (1 - pl.col("_draw")) * fusion.cycle_ns
            offset = late.first().over("_run").cast(pl.Int64)
            began = time - time.min().over("_run") + offset
            cycle = slots.select(began // fusion.cycle_ns).to_series().to_numpy()
        bucket = np.empty(slots.height, np.int64)
        size = slots["bytes"].fill_null(0).to_numpy()
        run = slots["_run"].to_numpy().astype(np.int64)
        fill(run, plain(cycle), plain(size), fusion.bytes, bucket)
    else:
        bucket = slots["_slot"].to_numpy()
    slots = slots.with_columns(_bucket=pl.Series(bucket))
    key = ["_run", "_bucket"]
    totals = slots.group_by(key).agg(
        pl.col("seq").max(),
        _count=pl.when(pl.col("count").null_count() == 0).then(pl.col("count").sum()),
        _bytes=pl.when(pl.col("bytes").null_count() == 0).then(pl.col("bytes").sum()),
        _out=pl.when(pl.col("count_out").null_count() == 0).then(pl.col("count_out").sum()),
        content=pl.col("_mark").sum(),
    )
    last = slots.join(totals, on=[*key, "seq"], how="inner").with_columns(
        pl.col("_count").alias("count"),
        pl.col("_bytes").alias("bytes"),
        pl.col("_out").alias("count_out"),
    )
    held = last.select("job", "rank", "lane", "seq", "content")
    # waits for a member wait for what it went into
    moved = (
        slots.filter(pl.col("request").is_not_null())
        .join(last.select(*key, _by="request"), on=key)
        .select("job", "rank", request="request", _by="_by")
        .unique(["job", "rank", "request"])
    )
    rest = e.filter(pl.col("_run").is_null())
    waits = rest.filter(pl.col("requests").list.len() > 0)
    if waits.height and moved.height:
        named = (
            waits.with_row_index("_w")
            .select("_w", "job", "rank", request="requests")
            .explode("request", empty_as_null=False)
            .join(moved, on=["job", "rank", "request"], how="left")
            .with_columns(pl.coalesce("_by", "request").alias("request"))
            .group_by("_w")
            .agg(requests=pl.col("request").unique().sort())
            .sort("_w")
        )
        others = rest.filter((pl.col("requests").list.len() > 0).fill_null(False).not_())
        rest = pl.concat([others, waits.with_columns(named["requests"])])
    columns = [*EVENTS, "_content"]
    return pl.concat([rest.select(columns), last.select(columns)]), held


def _hash(values: Array) -> Array:
    """int64: well mixed, so that the sum over a set stands for the set."""
    h = values.astype(np.uint64)
    with np.errstate(over="ignore"):
        h = (h + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(29)
    return (h >> np.uint64(24)).astype(np.int64)  # sums of millions fit
