"""A recorded job against its plan: the first operation that should have been there.

Groups are compared by their members, whatever their names, and in each group the k-th operation of
a rank with the k-th of the plan's program, so that streams may interleave as they like. A record
that ends early is no difference by itself: an operation is missing from a rank only where another
member of its group, or the other end of a message, has issued its part, or where the rank itself
went on in the group with something else.

Training does more than a plan says: barriers, parameters sent around at the start, metrics. What
the plan does not know in a group, and every recorded member of the group has issued, is left out of
the comparison; so is what the members went on to together, behind all that is planned so far.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import polars as pl

from dl2gpu.planner.lower import lower
from dl2gpu.planner.plan import Plan
from dl2gpu.planner.sbp import label
from dl2gpu.trace.schema import OP, Trace, op_name

__all__ = ["Difference", "against", "compare"]

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
    """Phase and operator of the plan whose conversion it belongs to, and its states."""
    members: tuple[int, ...]
    ranks: tuple[int, ...]
    """All ranks that lack an operation, or have another in its place."""


def _conversion(plan: Plan, site: str) -> str:
    """``site``, a phase and an operator, with the states between which it converts."""
    phase, _, name = site.partition(" ")
    tables = plan.problem.tables
    nodes = {n.name: k for k, n in enumerate(tables.model.nodes)}
    if name not in nodes:
        return site
    k = nodes[name]

    def states(node: int, operand: int) -> tuple[str, str]:
        """Of an operand, or of the result: -1; and of its gradient."""
        c, choice = tables.nodes[node], int(plan.chosen[node])
        return label(c.state(choice, operand)), label(c.gradient(choice, operand))

    pairs: list[tuple[str, str]] = []
    if phase in ("forward", "recompute", "backward"):
        for e in tables.model.edges:
            if e.target == k:
                there, here = states(e.source, -1), states(k, e.operand)
                pairs.append((here[1], there[1]) if phase == "backward" else (there[0], here[0]))
    elif phase == "reduce_gradients":
        pairs = [states(k, i)[::-1] for i in tables.model.nodes[k].operator.weights]
    shown = dict.fromkeys(f"{a} to {b}" for a, b in pairs if a != b)
    return site + (f" ({', '.join(shown)})" if shown else "")


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


@lru_cache(maxsize=4)
def _program(plan: Plan, steps: int) -> tuple[Trace, pl.DataFrame]:
    """The plan's program, and its channels: the same for all jobs of a scan."""
    program = lower(plan, steps)
    return program, _channels(program, 0)


def _planned(got: pl.DataFrame, want: pl.DataFrame) -> pl.DataFrame:
    """``got`` without what the plan does not know and all recorded members have issued."""
    signature = ["channel", *_WHAT]
    there = got.select("channel", "rank").unique().group_by("channel").agg(members=pl.len())
    extra = (
        got.join(want.select(signature).unique(), on=signature, how="anti", nulls_equal=True)
        .group_by(signature)
        .agg(issued_by=pl.col("rank").n_unique())
        .join(there, on="channel")
        .filter(pl.col("issued_by") == pl.col("members"))
    )
    left = got.join(extra, on=signature, how="anti", nulls_equal=True, maintain_order="left")
    return left.sort("rank", "lane", "seq").with_columns(
        k=pl.int_range(pl.len()).over("rank", "channel")
    )


def _nowhere(both: pl.DataFrame, every: pl.DataFrame, want: pl.DataFrame) -> pl.DataFrame:
    """Operations of the first step that no rank has issued, though the job came to its end."""
    ranks = want["rank"].n_unique()
    step = both.filter(pl.col("step") == 0)
    # every rank has done as much as a step has, in whichever groups
    many = every.group_by("rank").len("many")
    need = step.group_by("rank").len("need").join(many, on="rank", how="left")
    if need.height < ranks or (need["many"].fill_null(0) < need["need"]).any():
        seen = step.filter(pl.col("here"))
        last = int(seen["place"].max() or 0) if seen.height else -1  # type: ignore[arg-type]
        if last < int(step["place"].max() or 0):  # type: ignore[arg-type]
            return step.clear()
    lacking = step.filter(pl.col("here").is_null() | pl.col("differs"))
    return lacking.sort("place", "rank")


def against(trace: Trace, plan: Plan) -> list[dict[str, Any]]:
    """What the jobs of a trace that have the plan's ranks are against it.

    Args:
        trace: any number of jobs.
        plan: what they were to run.

    Returns:
        For each such job, by its row in ``trace.jobs``: ``job``; ``follows``: True, False, or None
        where it cannot be told; ``says``: a sentence, None where it follows; and of the first
        difference the fields of :class:`Difference`.
    """
    ranks = plan.layout.ranks
    there = trace.ranks.group_by("job").agg(
        top=pl.col("rank").max() + 1, lost=(pl.col("lost_before").fill_null(1) > 0).any()
    )
    jobs = (
        trace.jobs.select("job", "world_size")
        .join(there, on="job")
        .filter(pl.coalesce("world_size", "top") == ranks)
        .sort("job")
    )
    out: list[dict[str, Any]] = []
    for job, _, _, lost in jobs.iter_rows():
        if lost:
            says = "its records have lost their beginning, and cannot be set against the plan"
            out.append({"job": job, "follows": None, "says": says})
            continue
        found = compare(trace, plan, job)
        if found is None:
            out.append({"job": job, "follows": True, "says": None})
        else:
            out.append({"job": job, "follows": False, "says": _said(found), **asdict(found)})
    return out


def _said(d: Difference) -> str:
    others = f" (and {len(d.ranks) - 1} more)" if len(d.ranks) > 1 else ""
    instead = f", and issued {d.found}" if d.found else ""
    return (
        f"rank {d.rank}{others} lacks the {d.expected} of {d.conversion} in step {d.step}{instead}"
    )


def compare(trace: Trace, plan: Plan, job: int = 0) -> Difference | None:
    """The first difference between a recorded job and its plan; None where there is none.

    Args:
        trace: events with communicators whose members are known.
        plan: what the job was to run, any number of times.
        job: row of ``trace.jobs``.
    """
    every = _channels(trace, job)
    length = _program(plan, 1)[1].group_by("rank").len("length")
    many = every.group_by("rank").len("many").join(length, "rank", how="left")
    steps = many.select((pl.col("many") / pl.col("length").fill_null(1)).ceil().max()).item()
    steps = min(max(int(steps or 1), 1), 10_000)
    program, want = _program(plan, steps)
    got = _planned(every, want)
    each = want.join(length, "rank").with_columns(
        place=pl.int_range(pl.len()).over("rank", order_by="seq")
    )
    want = each.with_columns(step=pl.col("place") // pl.col("length"))
    key = ["rank", "channel", "k"]
    both = want.select(*key, *_WHAT, "step", "place", "stack", "members").join(
        got.select(*key, *_WHAT, here=pl.lit(value=True)), on=key, how="left", suffix="_got"
    )
    differs = pl.lit(value=False)
    for name in _WHAT:
        differs |= pl.col(f"{name}_got").is_not_null() & (pl.col(name) != pl.col(f"{name}_got"))
    both = both.with_columns(differs=differs.fill_null(False))
    # how far the members of a group have followed the plan: beyond that nobody lacks anything
    reached = (
        both.filter(pl.col("here") & ~pl.col("differs"))
        .group_by("channel")
        .agg(upto=pl.col("k").max())
    )
    lacks = pl.col("here").is_null() | pl.col("differs")
    wrong = (
        both.join(reached, on="channel")
        .filter(lacks & (pl.col("k") <= pl.col("upto")))
        .sort("place", "rank")
    )
    if wrong.is_empty():
        wrong = _nowhere(both, every, want)
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
        conversion=_conversion(plan, str(frames[first["stack"]][0]).rsplit(":", 1)[0]),
        members=tuple(first["members"]),
        ranks=tuple(sorted(set(wrong["rank"]))),
    )
