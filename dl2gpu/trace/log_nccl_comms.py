"""Who is who in NCCL's logs: processes, their ranks, and communicators over all of them.

A line names a communicator by a pointer of its own process, which is used again after a destroy.
Its *instances* (process, pointer, generation) are joined over the processes by the id that Init
lines print; a split by its parent's identity, count and color; else by size, member and order,
which may be wrong where several communicators of one size exist, and is then said.

Source: FORMATS.md section 5.3, LOG_LINES.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import polars as pl

from dl2gpu.trace.log_nccl_identity import COUNTED, identify
from dl2gpu.trace.log_nccl_lines import MOST_RANKS, Parsed

__all__ = ["Communicators", "resolve"]


@dataclass(frozen=True)
class Communicators:
    """Instances, agents and communicators of a job.

    Attributes:
        calls: the calls of :class:`Parsed` with ``pos`` Int64 (order over all files), ``agent`` and
            ``inst``; those of an unknown process are left out.
        instances: ``inst``, ``agent``, ``member`` (rank in it, null: unknown), ``nranks``, ``key``
            (row of ``comms``), ``named`` (an Init line was seen), ``made`` (Init COMPLETE seen),
            ``begun`` (Init START seen), ``destroyed``, ``aborted``, ``pos`` of its first line.
        agents: one row a rank of the job: ``agent``, ``host``, ``pid``, ``device``, ``file`` (of
            its first line), ``rank`` (null: unknown).
        comms: ``key``, ``nranks``, ``id`` String, ``ranks`` (global, by member; empty: unknown),
            ``guessed`` (joined without an id, where another reading exists or members are missing).
        lost: calls of which only a part is left or whose process is unknown: ``file``, ``pos``,
            ``agent`` (null: any that writes to the file).
        world: number of ranks of the job; None: not known.
        ranks_from: how ranks were found: "launcher", "communicator", "file" or "order".
    """

    calls: pl.DataFrame
    instances: pl.DataFrame
    agents: pl.DataFrame
    comms: pl.DataFrame
    lost: pl.DataFrame
    world: int | None
    ranks_from: str


_POS: Final = (pl.col("file").cast(pl.Int64) * (1 << 47) + pl.col("at")).alias("pos")


def resolve(
    p: Parsed,
    file_rank: Sequence[int | None] = (),
    world: Mapping[tuple[str, int], int] | None = None,
) -> Communicators:
    """Ranks and communicators of the calls of one job.

    Args:
        p: what its lines say.
        file_rank: for each file the one rank that wrote it, where that is known.
        world: (host, process id) to global rank, where other lines say it.
    """
    calls, comm_lines = p.calls.with_columns(_POS), p.comms.with_columns(_POS)
    calls, ownerless = _owners(calls, comm_lines)
    calls = _without_copies(calls)
    lines = _generations(comm_lines)
    calls, odd = _of_their_size(calls, lines)
    instances, calls = _instances(lines, calls)
    agents, instances = _agents(instances, calls, lines)
    calls = calls.join(instances.select("inst", "agent"), on="inst", maintain_order="left")
    order = agents.sort(
        pl.col("host").str.len_bytes(), "host", "device", "pid", "agent", nulls_last=True
    ).select("agent", place=pl.int_range(pl.len(), dtype=pl.Int64))
    keyed = identify(instances, order)
    ranks, size, how = _ranks(agents, keyed, order, file_rank, world or {})
    agents = agents.join(ranks, on="agent", how="left", maintain_order="left")
    known = agents.filter(pl.col("rank").is_not_null())
    if how != "order" and known.height:
        # now that ranks are known, communicators without an id are told apart by them
        rest = order.join(known.select("agent", "rank"), on="agent", how="left").with_columns(
            place=pl.coalesce("rank", pl.col("place") + (1 << 32))
        )
        keyed = identify(instances, rest.select("agent", "place"))
    keyed = keyed.join(agents.select("agent", "rank"), on="agent", how="left")
    comms, keyed = _communicators(keyed, size)
    return Communicators(
        calls=calls.sort("pos"),
        instances=keyed.sort("inst"),
        agents=agents.sort("agent"),
        comms=comms,
        lost=_lost(p.torn, pl.concat([ownerless.select(odd.columns), odd]), keyed, agents),
        world=size,
        ranks_from=how,
    )


# --------------------------------------------------------------------------------------------------
# Processes and instances

_PROCESS: Final = ["host", "pid"]


def _owners(calls: pl.DataFrame, lines: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Calls with a process; where the line lost its prefix, by the pointer if it is only one's."""
    bare = calls.filter(pl.col("host").is_null())
    if bare.is_empty():
        return calls, bare
    calls = calls.filter(pl.col("host").is_not_null())
    seen = pl.concat([frame.select("file", "comm", *_PROCESS) for frame in (calls, lines)])
    only = (
        seen.unique()
        .filter(pl.len().over("file", "comm") == 1)
        .join(
            calls.group_by(*_PROCESS).agg(pl.col("tid").mode().sort().first()),
            on=_PROCESS, how="left",
        )
    )  # fmt: skip
    found = bare.drop("host", "pid", "tid").join(
        only, on=["file", "comm"], how="left", maintain_order="left"
    )
    owned = found.filter(pl.col("host").is_not_null()).select(calls.columns)
    return pl.concat([calls, owned]).sort("pos"), found.filter(pl.col("host").is_null())


def _without_copies(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls of a process that stand in two files (a log and a copy of it) are taken once."""
    several = (
        calls.group_by(*_PROCESS).agg(n=pl.col("file").n_unique()).filter(pl.col("n") > 1)
    )  # fmt: skip
    if several.is_empty():
        return calls
    what = [*_PROCESS, "tid", "op", "op_count", "count", "root", "comm", "stream", "send"]
    doubtful = calls.join(several, on=_PROCESS, how="semi").sort("pos")
    doubtful = doubtful.with_columns(copy=pl.int_range(pl.len()).over("file", *what))
    doubtful = doubtful.unique([*what, "copy"], keep="first", maintain_order=True).drop("copy")
    return pl.concat([calls.join(several, on=_PROCESS, how="anti"), doubtful]).sort("pos")


def _generations(lines: pl.DataFrame) -> pl.DataFrame:
    """Communicator lines with ``gen``: how often the pointer was taken into use up to there."""
    lines = lines.filter(pl.col("host").is_not_null()).sort(*_PROCESS, "comm", "pos")
    key = [*_PROCESS, "comm"]
    event, before = pl.col("event"), pl.col("event").shift(1).over(key)
    other = (
        (pl.col("comm_id") != pl.col("comm_id").shift(1).over(key))
        | (pl.col("nranks") != pl.col("nranks").shift(1).over(key))
    ).fill_null(False)
    fresh = (
        before.is_null()
        | ((event == "start") & (before != "info"))
        | (~event.is_in(["destroy", "abort"]) & (before.is_in(["destroy", "abort"]) | other))
        | ((event == "complete") & (before == "complete"))
    )
    return lines.with_columns(gen=fresh.cast(pl.Int64).cum_sum().over(key))


def _of_their_size(calls: pl.DataFrame, lines: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Calls, and those of lines that were mixed up.

    They are those whose number of ranks no line on their pointer names, and those whose pointer
    lines name for other processes only.
    """
    key = [*_PROCESS, "comm"]
    known = lines.select(key).unique()
    sized = lines.select(*key, "nranks").unique()
    fits = calls.join(sized, on=[*key, "nranks"], how="semi")
    free = (
        calls.join(known, on=key, how="anti")
        .join(known.select("comm").unique(), on="comm", how="anti")
        .filter(pl.col("nranks") <= MOST_RANKS)
    )
    good = pl.concat([fits, free]).sort("pos")
    return good, calls.join(good.select("pos"), on="pos", how="anti")


def _instances(lines: pl.DataFrame, calls: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Instances of communicators, and the calls with theirs."""
    key = [*_PROCESS, "comm", "gen"]
    event = pl.col("event")
    made = lines.group_by(key).agg(
        pl.col("member", "nranks", "device", "comm_id", "parent", "split", "color")
        .drop_nulls()
        .first(),
        pl.col("pos").min(),
        pl.col("file", "tid").first(),
        named=~event.is_in(["destroy", "abort"]).all(),
        begun=(event == "start").any(),
        made=(event == "complete").any(),
        destroyed=(event == "destroy").any(),
        aborted=(event == "abort").any(),
    )
    starts = made.select(*key, "pos", size="nranks").sort("pos")
    calls = calls.sort("pos").join_asof(
        starts, on="pos", by=[*_PROCESS, "comm"], check_sortedness=False
    )
    # a pointer of another size is another communicator, of which the first line is lost
    fits = (pl.col("size") == pl.col("nranks")).fill_null(False)
    calls = calls.with_columns(
        gen=pl.when(fits).then("gen").otherwise(-pl.col("nranks").fill_null(0) - 1)
    ).drop("size")
    lost = (
        calls.filter(pl.col("gen") < 0)
        .group_by(key)
        .agg(
            pl.col("global_rank").drop_nulls().first().alias("member"),
            pl.col("nranks", "file").first(),
            pl.col("pos").min(),
        )
        .with_columns(
            pl.lit(value=False).alias(c) for c in ("named", "begun", "made", "destroyed", "aborted")
        )
    )  # fmt: skip
    both = pl.concat([made, lost], how="diagonal_relaxed").filter(pl.col("nranks").is_not_null())
    both = both.sort("pos", *_PROCESS, "comm").with_row_index("inst").cast({"inst": pl.Int64})
    # a destroy line alone, of an instance that calls know by its size, is that instance's
    calls = calls.join(both.select(*key, "inst"), on=key, how="inner", maintain_order="left")
    return both, calls.drop("gen")


def _agents(
    instances: pl.DataFrame, calls: pl.DataFrame, lines: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """One agent a process and device, as one process may drive several ranks."""
    devices = (
        instances.group_by(*_PROCESS)
        .agg(n=pl.col("device").drop_nulls().n_unique(), only=pl.col("device").drop_nulls().first())
        .with_columns(only=pl.when(pl.col("n") == 1).then("only"))
    )
    instances = (
        instances.join(devices, on=_PROCESS, how="left", maintain_order="left")
        .with_columns(device=pl.coalesce("device", "only").fill_null(-1))
        .drop("n", "only")
    )
    labels = (
        pl.concat([frame.select(*_PROCESS, "rank") for frame in (calls, lines)])
        .filter(pl.col("rank").is_not_null())
        .group_by(*_PROCESS, "rank")
        .agg(seen=pl.len())
        .sort("seen", "rank", descending=[True, False])
        .group_by(*_PROCESS)
        .agg(label=pl.col("rank").first())
    )
    agents = (
        instances.group_by(*_PROCESS, "device")
        .agg(pl.col("pos").min(), pl.col("file").sort_by("pos").first(),
             files=pl.col("file").n_unique())
        .sort("pos", *_PROCESS, "device")
        .with_row_index("agent").cast({"agent": pl.Int64})
        .join(labels, on=_PROCESS, how="left", maintain_order="left")
    )  # fmt: skip
    instances = instances.join(
        agents.select(*_PROCESS, "device", "agent"),
        on=[*_PROCESS, "device"], how="left", maintain_order="left",
    )  # fmt: skip
    return agents.drop("pos"), instances


# --------------------------------------------------------------------------------------------------
# Ranks


def _ranks(
    agents: pl.DataFrame, keyed: pl.DataFrame, order: pl.DataFrame,
    file_rank: Sequence[int | None], world: Mapping[tuple[str, int], int],
) -> tuple[pl.DataFrame, int | None, str]:  # fmt: skip
    """(agent, rank), the number of ranks of the job, and where the ranks come from."""
    largest = keyed["nranks"].max()
    size = int(largest) if isinstance(largest, int) else None
    told = agents.select(
        "agent",
        rank=pl.coalesce(_told(agents, world), pl.col("label").cast(pl.Int64)),
    )
    if told.height and told["rank"].null_count() == 0 and told["rank"].is_unique().all():
        top = int(told["rank"].max()) + 1  # type: ignore[arg-type]
        return told, max(top, size or 0), "launcher"
    first = (
        keyed.filter((pl.col("nranks") == pl.lit(size, pl.Int64)) & pl.col("member").is_not_null())
        # where members were counted, the places are of no communicator's making
        .filter(~pl.col("name").str.starts_with(COUNTED))
        .group_by("name")
        .agg(
            pl.col("pos").min(),
            agents=pl.col("agent").n_unique(),
            members=pl.col("member").n_unique(),
        )
        .filter(pl.col("agents") == pl.col("members"))
        .sort("agents", "pos", "name", descending=[True, False, False])
    )  # fmt: skip
    if first.height and size is not None and size >= agents.height:
        members = keyed.filter(pl.col("name") == first["name"][0]).select(
            "agent", rank=pl.col("member")
        )
        # those of which no Init line is there have the rank that other lines say, if it is free
        rest = told.join(members, on="agent", how="anti").filter(
            pl.col("rank").is_not_null() & (pl.col("rank") < size)
        )
        rest = rest.join(members, on="rank", how="anti").unique("rank", keep="none")
        return pl.concat([members, rest.select(members.columns)]), size, "communicator"
    files = pl.DataFrame(
        {"file": range(len(file_rank)), "named": list(file_rank)},
        schema={"file": pl.Int32, "named": pl.Int64},
    )
    named = (
        agents.filter(pl.len().over("file") == 1)
        .join(files, on="file", how="inner")
        .select("agent", rank="named")
    )
    whole = 0 < named.height == agents.height and named["rank"].null_count() == 0
    if whole and named["rank"].is_unique().all():
        top = int(named["rank"].max()) + 1  # type: ignore[arg-type]
        return named, max(top, size or 0), "file"
    counted = order.select("agent", rank="place")
    return counted, max(size or 0, counted.height) or None, "order"


def _told(agents: pl.DataFrame, world: Mapping[tuple[str, int], int]) -> pl.Series:
    known = pl.DataFrame(
        [(host, pid, rank) for (host, pid), rank in world.items()],
        schema={"host": pl.String, "pid": pl.Int64, "rank": pl.Int64}, orient="row",
    )  # fmt: skip
    return agents.join(known, on=_PROCESS, how="left", maintain_order="left")["rank"]


def _communicators(keyed: pl.DataFrame, world: int | None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Communicators with their members, and the instances with theirs."""
    comms = (
        keyed.group_by("name")
        .agg(
            pl.col("nranks").first(),
            pl.col("pos").min(),
            pl.col("rank").sort_by("member"),
            pl.col("member").sort(),
            pl.col("several").any(),
            spread=(pl.col("rank") - pl.col("member")).n_unique(),
        )
        .sort("pos", "name")
        .with_row_index("key")
        .cast({"key": pl.Int64})
    )
    place = pl.col("member")
    clean = (
        (place.list.n_unique() == place.list.len())
        & (pl.col("rank").list.n_unique() == pl.col("rank").list.len())
        & (pl.col("rank").list.drop_nulls().list.len() == pl.col("rank").list.len())
        & (place.list.drop_nulls().list.len() == place.list.len())
    )
    full = clean & (place.list.len() == pl.col("nranks"))
    # some members left no line: of the whole job's communicator they are known all the same
    job = (
        clean & (pl.col("nranks") == pl.lit(world, pl.Int64)) & (pl.col("spread") == 1)
        & (pl.col("rank").list.first() == place.list.first())
    ).fill_null(False)  # fmt: skip
    comms = comms.with_columns(
        ranks=pl.when(full)
        .then(pl.col("rank"))
        .when(job)
        .then(pl.int_ranges(0, "nranks"))
        .otherwise(pl.lit([], pl.List(pl.Int64)))
        .cast(pl.List(pl.Int32)),
        guessed=pl.col("several") | ~clean | ~(full | job),
        id=pl.concat_str(pl.lit("comm "), pl.col("key").cast(pl.String)),
    )
    instances = keyed.join(
        comms.select("name", "key"), on="name", how="left", maintain_order="left"
    )
    return comms.select("key", "nranks", "id", "ranks", "guessed"), instances


def _lost(
    torn: pl.DataFrame, ownerless: pl.DataFrame, keyed: pl.DataFrame, agents: pl.DataFrame
) -> pl.DataFrame:
    """See :class:`Communicators`."""
    gone = pl.concat(
        [
            torn.select("file", "at", *_PROCESS, "comm"),
            ownerless.select("file", "at", *_PROCESS, "comm"),
        ]
    ).with_columns(_POS)
    if gone.is_empty():
        return pl.DataFrame(schema={"file": pl.Int32, "pos": pl.Int64, "agent": pl.Int64})
    of_process = (
        agents.group_by(*_PROCESS)
        .agg(by=pl.col("agent").first(), n=pl.len())
        .filter(pl.col("n") == 1)
    )
    of_pointer = (
        keyed.select("file", "comm", "agent").unique().filter(pl.len().over("file", "comm") == 1)
    )
    return (
        gone.join(of_process, on=_PROCESS, how="left")
        .join(of_pointer, on=["file", "comm"], how="left")
        .select("file", "pos", agent=pl.coalesce("by", "agent"))
        .sort("pos")
    )
