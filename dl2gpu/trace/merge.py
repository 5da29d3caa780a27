"""One job of the records that several formats hold of it: the stronger evidence wins, by rank.

A folder may hold the Flight Recorder dumps of some ranks, the logs of all of them and a profiler's
trace. Each reader gives a job of its own for it; here they become one. Of each rank the strongest
record that has operations is kept. Records whose counters can be told apart only by a guess are
never put side by side: a profiler's window has no numbers, so the third all-reduce of it is not the
third one of a dump. What the weaker records say beside operations (how a rank ended, how many ranks
there are, what a log says of others) is kept from all of them.

Source: DESIGN.md section 4 (the strongest evidence there is), FORMATS.md section 11.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import polars as pl

from dl2gpu.trace.inputs import Input
from dl2gpu.trace.merge_states import same_use, with_states
from dl2gpu.trace.schema import EXIT, Trace

__all__ = ["STRENGTH", "merge"]

STRENGTH: Final = (
    "native", "parquet", "flight_recorder", "log", "kineto", "execution_trace", "ras", "clog",
    "nccl_inspector", "param", "chakra", "otf2", "dumpi",
)  # fmt: skip
"""Sources, the strongest first."""

_NUMBERED: Final = (pl.col("source") == "flight_recorder") | (
    (pl.col("source") == "log") & ~pl.col("p2p")
)
"""Records that number the collectives of a communicator alike: as PyTorch counts them.

A log with point to point is one of NCCL's calls, which have no such numbers.
"""

_WEAKEST: Final = len(STRENGTH)


def merge(trace: Trace, inputs: list[Input]) -> tuple[Trace, list[Input]]:
    """``trace`` with one job for all that was read of it, and ``inputs`` with what came from where.

    Jobs of one folder and attempt are one job where at most one of their sources names it, or all
    name it alike, and where no two of them disagree about the number of ranks. The order of jobs
    is that of their strongest records.
    """
    jobs = trace.jobs.select("job", "name", "folder", "attempt", "world_size", "source", "p2p")
    counts = jobs.group_by("folder", "attempt").agg(pl.col("source").n_unique())
    if counts.filter(pl.col("source") > 1).is_empty():
        return trace, inputs
    target = _targets(jobs)
    moved = target.filter(pl.col("job") != pl.col("target"))
    if moved.is_empty():
        return trace, inputs
    winners = _winners(trace, target)
    comm_of = _communicators(trace, target)
    merged, states = _tables(trace, target, winners, comm_of)
    return merged, _told(target, winners, states, inputs)


def _targets(jobs: pl.DataFrame) -> pl.DataFrame:
    """``job, source, strength, target``: the job that each becomes part of (itself, mostly)."""
    group = ["folder", "attempt"]
    own = pl.col("name") != pl.col("folder")  # the record names its job; else the folder does
    strength = pl.col("source").replace_strict(
        list(STRENGTH), range(_WEAKEST), default=_WEAKEST, return_dtype=pl.Int32
    )
    keyed = jobs.with_columns(strength=strength).with_columns(
        one_each=(pl.len().over([*group, "source"]) == 1).all().over(group)
        & (pl.col("name").filter(own).n_unique().over(group) <= 1)
    )
    keyed = keyed.with_columns(key=pl.when("one_each").then(pl.lit("")).otherwise("name"))
    within = [*group, "key"]
    first = ["strength", "job"]
    keyed = keyed.with_columns(
        world=pl.col("world_size").sort_by(first).drop_nulls().first().over(within),
        # of two jobs of one name and one source, the second is nobody's part
        again=pl.int_range(pl.len()).over([*within, "source"], order_by="job"),
    ).with_columns(
        apart=(pl.col("world_size") != pl.col("world")).fill_null(False) | (pl.col("again") > 0)
    )
    together = (
        pl.col("job")
        .filter(~pl.col("apart"))
        .sort_by(
            pl.col("strength").filter(~pl.col("apart")), pl.col("job").filter(~pl.col("apart"))
        )
    )
    return keyed.with_columns(
        target=pl.when("apart").then("job").otherwise(together.first().over(within))
    ).select("job", "name", "folder", "source", "p2p", "strength", "target")


def _winners(trace: Trace, target: pl.DataFrame) -> pl.DataFrame:
    """Rows of ``ranks`` with ``target, strength, has`` (operations), ``fits`` and ``wins``.

    ``wins``: the record that stands for the rank. ``fits``: its operations can be put beside those
    of the job's strongest record. A rank stays missing of which there is only a record that does
    not fit, unless that says that it died; or a log that tells nothing of its operations beside
    others' records, unless it says how the rank ended: that none is told does not mean that none
    pends.
    """
    has = trace.events.select("job", "rank").unique().with_columns(has=pl.lit(value=True))
    counted = trace.status.select("job", "rank").unique().with_columns(counted=pl.lit(value=True))
    group = pl.when(_NUMBERED).then(pl.lit("numbered")).otherwise("source")
    rows = (
        trace.ranks.with_row_index("row")
        .join(target.select("job", "target", "source", "p2p", "strength"), on="job")
        .join(has, on=["job", "rank"], how="left")
        .join(counted, on=["job", "rank"], how="left")
        .with_columns(pl.col("has", "counted").fill_null(False), group=group)
    )
    # the base of a job is its strongest source that has operations
    base = (
        rows.sort(~pl.col("has"), "strength", "job")
        .group_by("target", maintain_order=True)
        .agg(base=pl.col("group").first(), base_source=pl.col("source").first())
    )
    rows = rows.join(base, on="target").with_columns(fits=pl.col("group") == pl.col("base"))
    dead = pl.col("exit").is_in([EXIT["crashed"], EXIT["killed"]])
    mute = (
        (pl.col("source") == "log")
        & (pl.col("base_source") != "log")
        & ~(pl.col("has") | pl.col("counted"))
        & (pl.col("exit") == EXIT["unknown"]).fill_null(True)
    )
    best = (
        # that a rank died is known without its operations
        rows.filter((pl.col("fits") & ~mute) | dead)
        .sort(~pl.col("fits"), ~pl.col("has"), "strength", "job")
        .unique(["target", "rank"], keep="first", maintain_order=True)
        .select("row", wins=pl.lit(value=True))
    )
    return rows.join(best, on="row", how="left").with_columns(pl.col("wins").fill_null(False))


def _communicators(trace: Trace, target: pl.DataFrame) -> pl.DataFrame:
    """``comm, into``: each communicator, and the one of the strongest record that it is.

    By its id, else by its name, else by its members and what it is for, else by its members, where
    just one of the other record fits.
    """
    comms = trace.comms.join(target.select("job", "target", "strength"), on="job")
    left = comms.filter(pl.col("job") != pl.col("target"))
    home = comms.filter(pl.col("job") == pl.col("target"))
    found = pl.DataFrame(schema={"comm": pl.Int32, "into": pl.Int32})
    for keys in (["id"], ["name", "desc"], ["name"], ["ranks", "desc"], ["ranks"]):
        rest = left.join(found, on="comm", how="anti")
        mine, theirs = rest, home.join(found, left_on="comm", right_on="into", how="anti")
        for key in keys:
            said = pl.col(key).list.len() > 0 if key == "ranks" else pl.col(key) != ""
            mine, theirs = mine.filter(said), theirs.filter(said)
        single = theirs.filter(pl.len().over(["target", *keys]) == 1)
        pairs = (
            mine.filter(pl.len().over(["job", *keys]) == 1)
            .join(single.select("target", *keys, into="comm"), on=["target", *keys])
            .select("comm", "into")
        )
        found = pl.concat([found, pairs])
    found = pl.concat([found, _by_use(trace, left, home, found)])
    everything = comms.select("comm").join(found, on="comm", how="left")
    # of two weaker records that name a communicator which the strongest lacks
    lone = comms.join(found, on="comm", how="anti").filter(pl.col("job") != pl.col("target"))
    lone = lone.sort("strength", "comm").select(
        "comm", first=pl.col("comm").first().over(["target", "id"])
    )
    return (
        everything.join(lone, on="comm", how="left")
        .select("comm", into=pl.coalesce("into", "first", "comm"))
        .sort("comm")
    )


def _by_use(
    trace: Trace, left: pl.DataFrame, home: pl.DataFrame, found: pl.DataFrame
) -> pl.DataFrame:
    """``comm, into`` of dumps beside a record of the program: by what is done on them."""
    of = trace.jobs.select("job", "source")
    dumps = of.filter(pl.col("source") == "flight_recorder").select("job")
    records = of.filter(pl.col("source").is_in(_RECORDS)).select("job")
    mine = left.join(dumps, on="job", how="semi").join(found, on="comm", how="anti")
    theirs = home.join(records, on="job", how="semi").join(
        found, left_on="comm", right_on="into", how="anti"
    )
    pairs = mine.join(theirs.select("target", "ranks", into="comm"), on=["target", "ranks"])
    pairs = pairs.filter(pl.col("ranks").list.len() > 0).select("comm", "into")
    return same_use(trace.events, trace.events, pairs) if pairs.height else pairs


@dataclass(frozen=True, slots=True)
class _Numbers:
    """New numbers of jobs and communicators: without gaps, in the old order."""

    job: pl.DataFrame
    """``job, new``"""
    comm: pl.DataFrame
    """``comm, new``"""

    @staticmethod
    def of(target: pl.DataFrame, comm_of: pl.DataFrame) -> _Numbers:
        jobs = target.select(old="job", into="target")
        comms = comm_of.select(old="comm", into="into")
        return _Numbers(_dense(jobs, "job"), _dense(comms, "comm"))

    def applied(self, frame: pl.DataFrame) -> pl.DataFrame:
        """``frame`` with the new numbers in ``job``, ``comm`` and ``new_comm``."""
        tables = {"job": (self.job, "job"), "comm": (self.comm, "comm"),
                  "new_comm": (self.comm, "comm")}  # fmt: skip
        return frame.with_columns(
            pl.col(c).replace_strict(table[key], table["new"], default=None, return_dtype=pl.Int32)
            for c, (table, key) in tables.items()
            if c in frame.columns
        )


def _dense(pairs: pl.DataFrame, name: str) -> pl.DataFrame:
    kept = pairs.filter(pl.col("old") == pl.col("into")).sort("old")
    numbered = kept.select("into", new=pl.int_range(pl.len(), dtype=pl.Int32))
    return pairs.join(numbered, on="into").select(pl.col("old").alias(name), "new")


def _tables(
    trace: Trace, target: pl.DataFrame, winners: pl.DataFrame, comm_of: pl.DataFrame
) -> tuple[Trace, pl.DataFrame]:
    """All tables with jobs and communicators put together, and ``path, states`` of dumps.

    ``states``: what became of them, for people.
    """
    numbers = _Numbers.of(target, comm_of)
    strength = target.select("job", "strength")
    kept = winners.filter(pl.col("wins") & pl.col("fits")).select("job", "rank")
    fitting = winners.filter("fits").select("job", "rank").unique()
    status = (
        numbers.applied(
            trace.status.join(fitting, on=["job", "rank"], how="semi").join(strength, on="job")
        )
        .sort("strength")
        .group_by("job", "rank", "comm", maintain_order=True)
        .agg(pl.exclude("strength").drop_nulls().first())
        .select(trace.status.columns)
    )
    out = {
        "events": trace.events.join(kept, on=["job", "rank"], how="semi"),
        "jobs": _jobs(trace, target),
        "ranks": _ranks(trace, winners),
        "comms": _comms(trace, strength, comm_of),
    }
    for name, frame in trace.tables().items():
        if name not in out and name != "status" and "job" in frame.columns:
            out[name] = frame  # what records say beside operations, from all of them
    merged = replace(trace, **{n: numbers.applied(f) for n, f in out.items()}, status=status)
    dumps = _beside(trace, winners)
    if dumps.is_empty():
        return merged, dumps.select("path", states=pl.lit(None, pl.String))
    mine = trace.events.join(dumps, on=["job", "rank"], how="semi")
    dumps = numbers.applied(dumps)
    events, refused = with_states(merged.events, numbers.applied(mine), dumps)
    states = dumps.join(refused, on="job", how="left").select(
        "path",
        states=pl.concat_str(pl.lit("its states are not used: "), "why").fill_null(
            "its states are put beside the operations of the stronger record"
        ),
    )
    return replace(merged, events=events), states


_RECORDS: Final = ("native", "parquet")
"""Records of whole programs: order, waits and streams, and mostly no states."""


def _beside(trace: Trace, winners: pl.DataFrame) -> pl.DataFrame:
    """Rows of ``ranks``: dumps of Flight Recorder of ranks that stand in a record of programs."""
    key = ["target", "rank"]
    stand = winners.filter("wins", "fits", pl.col("source").is_in(_RECORDS)).select(key)
    return (
        winners.filter((pl.col("source") == "flight_recorder") & ~pl.col("wins"))
        .join(stand, on=key, how="semi")
        .select(trace.ranks.columns)
    )


def _jobs(trace: Trace, target: pl.DataFrame) -> pl.DataFrame:
    rows = trace.jobs.join(target.select("job", "target", "strength"), on="job")
    parts = (
        rows.sort("strength", "job")
        .group_by("target", maintain_order=True)
        .agg(
            own=pl.col("name").filter(pl.col("name") != pl.col("folder")).first(),
            world=pl.col("world_size").drop_nulls().first(),
            sources=pl.col("source").unique(maintain_order=True).str.join("+"),
            said=pl.col("backend").drop_nulls().first(),
        )
    )
    return (
        trace.jobs.join(parts, left_on="job", right_on="target")
        .with_columns(
            name=pl.coalesce("own", "name"),
            world_size=pl.coalesce("world", "world_size"),
            backend=pl.coalesce("backend", "said"),
            source=pl.col("sources"),
        )
        .select(trace.jobs.columns)
        .sort("job")
    )


def _ranks(trace: Trace, winners: pl.DataFrame) -> pl.DataFrame:
    """One row a rank: of the record that wins, with how it ended from whichever record knows."""
    unknown = EXIT["unknown"]
    ends = (
        winners.sort("strength", "row")
        .group_by("target", "rank", maintain_order=True)
        .agg(
            ended=pl.col("exit").filter(pl.col("exit") != unknown).first(),
            with_code=pl.col("code").drop_nulls().first(),
            last=pl.col("t_last").max(),
        )
    )
    return (
        winners.filter("wins")
        .join(ends, on=["target", "rank"])
        .with_columns(
            job=pl.col("target"),
            exit=pl.when(pl.col("exit") != unknown).then("exit").otherwise(
                pl.col("ended").fill_null(unknown)
            ),
            code=pl.coalesce("code", "with_code"),
            only_active=pl.col("only_active") | ~pl.col("fits"),  # none of it is here
            t_last=pl.col("last"),
        )
        .sort("row")
        .select(trace.ranks.columns)
    )  # fmt: skip


def _comms(trace: Trace, strength: pl.DataFrame, comm_of: pl.DataFrame) -> pl.DataFrame:
    """The communicators that are left, with the members that the strongest record knows."""
    rows = trace.comms.join(comm_of, on="comm").join(strength, on="job")
    members = (
        rows.filter(pl.col("ranks").list.len() > 0)
        .sort("strength", "comm")
        .group_by("into", maintain_order=True)
        .agg(known=pl.col("ranks").first())
    )
    return (
        rows.filter(pl.col("comm") == pl.col("into"))
        .join(members, on="into", how="left")
        .with_columns(ranks=pl.coalesce("known", "ranks"))
        .select(trace.comms.columns)
        .sort("comm")
    )


def _told(
    target: pl.DataFrame, winners: pl.DataFrame, states: pl.DataFrame, inputs: list[Input]
) -> list[Input]:
    """Inputs of jobs that were put together, with what of each is not used."""
    several = target.group_by("target").agg(n=pl.len()).filter(pl.col("n") > 1)
    by_path = (
        winners.join(several, on="target")
        .filter(pl.col("path").is_not_null())
        .group_by("path")
        .agg(
            used=(pl.col("wins") & pl.col("fits") & pl.col("has")).any(),
            unfit=(~pl.col("fits") & pl.col("has")).any(),
            weaker=(pl.col("fits") & ~pl.col("wins") & pl.col("has")).any(),
        )
    )
    notes = {path: _note(*said) for path, *said in by_path.iter_rows()}
    notes |= dict(states.unique("path", keep="first").iter_rows())
    return [
        i if notes.get(i.path) is None
        else replace(i, reason="; ".join(filter(None, (i.reason, notes[i.path]))))
        for i in inputs
    ]  # fmt: skip


def _note(used: bool, unfit: bool, weaker: bool) -> str | None:
    if unfit:
        return (
            "read for what it says of ranks; its operations have no numbers to put beside those "
            "of the stronger records of the job"
        )
    if weaker:
        part = "some of " if used else ""
        return f"{part}its operations are not used: there is a stronger record of the same ranks"
    return None
