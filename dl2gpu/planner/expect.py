"""A recorded job against its plan: the first operation that should have been there.

Groups are compared by their members, whatever their names, and in each group the k-th operation of
a rank with the k-th of the plan's program, so that streams may interleave as they like. A record
that ends early is no difference by itself: an operation is missing from a rank only where another
member of its group, or the other end of a message, has issued its part, or where the rank itself
went on in the group with something else.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from dl2gpu.planner.lower import lower
from dl2gpu.planner.plan import Plan
from dl2gpu.trace.schema import OP, Trace, op_name

__all__ = ["Difference", "compare"]

_WHAT = ("op", "count", "dtype")


@dataclass(frozen=True, slots=True)
class Difference:
    """The earliest operation of the plan that a rank did not issue as planned."""

    rank: int
    step: int
    expected: str
    """Operation and count."""
    found: str | None
    """What the rank issued in its place; None: nothing."""
    conversion: str
    """Phase and operator of the plan whose conversion it belongs to."""
    members: tuple[int, ...]
    ranks: tuple[int, ...]
    """All ranks that lack an operation, or have another in its place."""


def _channels(trace: Trace, job: int) -> pl.DataFrame:
    """Operations of a job with ``channel`` and ``k``: group (or both ends of a message), place."""
    events = trace.events.filter((pl.col("job") == job) & (pl.col("op") != OP["wait"]))
    groups = trace.comms.select(
        "comm", members="ranks", among=pl.col("ranks").cast(pl.List(pl.String)).list.join(",")
    )
    sends = pl.col("op") == OP["send"]
    receives = pl.col("op") == OP["recv"]
    ends = pl.format(
        "{}>{}",
        pl.when(sends).then("rank").otherwise("peer"),
        pl.when(sends).then("peer").otherwise("rank"),
    )
    return (
        events.join(groups, on="comm", how="left", maintain_order="left")
        .with_columns(channel=pl.when(sends | receives).then(ends).otherwise("among"))
        .sort("rank", "lane", "seq")
        .with_columns(k=pl.int_range(pl.len()).over("rank", "channel"))
    )


def compare(trace: Trace, plan: Plan, job: int = 0) -> Difference | None:
    """The first difference between a recorded job and its plan; None where there is none.

    Args:
        trace: events with communicators whose members are known.
        plan: what the job was to run, any number of times.
        job: row of ``trace.jobs``.
    """
    got = _channels(trace, job)
    one = lower(plan)
    length = one.events.filter(pl.col("op") != OP["wait"]).group_by("rank").len("length")
    many = got.group_by("rank").len("many").join(length, "rank", how="left")
    steps = many.select((pl.col("many") / pl.col("length").fill_null(1)).ceil().max()).item()
    steps = min(max(int(steps or 1), 1), 10_000)
    program = lower(plan, steps)
    want = _channels(program, 0)
    each = want.join(length, "rank").with_columns(
        place=pl.int_range(pl.len()).over("rank", order_by="seq")
    )
    want = each.with_columns(step=pl.col("place") // pl.col("length"))
    key = ["rank", "channel", "k"]
    both = want.select(*key, *_WHAT, "step", "place", "stack", "members").join(
        got.select(*key, *_WHAT, here=pl.lit(value=True)), on=key, how="left", suffix="_got"
    )
    reached = both.filter(pl.col("here")).group_by("channel").agg(upto=pl.col("k").max())
    differs = pl.lit(value=False)
    for name in _WHAT:
        differs |= pl.col(f"{name}_got").is_not_null() & (pl.col(name) != pl.col(f"{name}_got"))
    wrong = (
        both.join(reached, on="channel")
        .filter((pl.col("here").is_null() & (pl.col("k") <= pl.col("upto"))) | differs)
        .sort("place", "rank")
    )
    if wrong.is_empty():
        return None
    first = wrong.row(0, named=True)
    frames = program.stacks.sort("stack")["frames"]
    texts = trace.strings.sort("code")["text"].to_list()
    found = None
    if first["op_got"] is not None:
        found = f"{op_name(first['op_got'], texts)} of {first['count_got']} elements"
    return Difference(
        rank=first["rank"],
        step=first["step"],
        expected=f"{op_name(first['op'], [])} of {first['count']} elements",
        found=found,
        conversion=str(frames[first["stack"]][0]).rsplit(":", 1)[0],
        members=tuple(first["members"]),
        ranks=tuple(sorted(set(wrong["rank"]))),
    )
