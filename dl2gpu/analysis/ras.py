"""What counts of calls tell (NCCL's RAS): who does not answer, and who stands still.

A report counts how many calls every rank has made. Ranks run ahead of each other, so counts that
differ in one report say nothing; a report read while the job runs may even seem to show calls in
another order. Two reports tell progress from standstill: where nobody of a communicator has made a
call in between, whoever has made fewer calls than the others is what these wait for.

Source: FORMATS.md section 5.4 (reports), DESIGN.md section 5 (kinds of finding).
"""

from __future__ import annotations

from typing import Any, Final

import polars as pl

from dl2gpu.analysis.finding import Finding
from dl2gpu.analysis.matching import Matching
from dl2gpu.trace.schema import op_name

__all__ = ["report_findings"]

_STANDS_NS: Final = 5_000_000_000
"""Time between two reports in which a job that runs would have made a call."""


def report_findings(m: Matching) -> list[Finding]:
    """Findings of all jobs of which reports are known."""
    jobs = m.prepared.jobs.filter(pl.col("source") == "ras")["job"]
    if jobs.is_empty():
        return []
    trace = m.prepared.trace
    said = trace.said.filter(pl.col("job").is_in(jobs.implode()))
    last = said.filter(pl.col("what") == "ras_report").group_by("job").agg(
        pl.col("number").max(), times=pl.col("t").drop_nulls().n_unique()
    )  # fmt: skip
    out: list[Finding] = []
    comm_id = dict(trace.comms.select("comm", "id").iter_rows())
    strings = trace.strings.sort("code")["text"].to_list()
    moved = _moved(said)
    for job, number in last.sort("job").select("job", "number").iter_rows():
        mine = said.filter(pl.col("job") == job)
        now = mine.filter(pl.col("number") == number)
        out += _gone(job, now)
        for stuck in _uneven(now).iter_rows(named=True):
            moves = moved.get((job, stuck["comm"]))
            if not moves:  # of ranks that go on, counts that differ are of the moment
                still = moves is not None
                out.append(_uneven_finding(job, now, stuck, still, comm_id, strings))
        out += _errors(job, now, out)
        out += _quiet(job, now, moved, out)
    return out


def _gone(job: int, now: pl.DataFrame) -> list[Finding]:
    """Ranks that are taken for dead, and ranks that did not answer."""
    found: list[Finding] = []
    there = _ranks(now.filter(pl.col("what") == "ras_count"))
    for what, kind, reason in (
        ("ras_dead", "crashed_rank", "crashed"),
        ("ras_missing", "insufficient_evidence", "no_data"),
    ):
        rows = now.filter(pl.col("what") == what)
        if rows.is_empty():
            continue
        ranks = _ranks(rows)
        dead = what == "ras_dead"
        found.append(
            Finding(
                job=job, kind=kind, evidence="observed" if dead else "inferred", reason=reason,
                culprits=tuple(ranks) if dead else (),
                victims=tuple(sorted(set(there) - set(ranks))),
                details={"missing_ranks": ranks, "places": _texts(rows)},
                deadlocked=False if dead else None,
            )
        )  # fmt: skip
    return found


def _uneven(now: pl.DataFrame) -> pl.DataFrame:
    """(comm, op, low, high): communicators whose ranks have made different numbers of calls."""
    return (
        now.filter(pl.col("what") == "ras_count")
        .group_by("comm", "op")
        .agg(low=pl.col("count").min(), high=pl.col("count").max())
        .filter(pl.col("low") < pl.col("high"))
        .with_columns(gap=pl.col("high") - pl.col("low"))
        .sort("comm", "gap", "op", descending=[False, True, False])
        .unique("comm", keep="first", maintain_order=True)
    )


def _moved(said: pl.DataFrame) -> dict[tuple[int, int], bool]:
    """(job, communicator) with two reports: has any of its ranks made a call in between?

    A rank that has made one on another communicator has moved, too. Only pairs of reports with
    time between them count, if their times are known.
    """
    numbers = said.filter(pl.col("what") == "ras_report").select("job", "number", "t")
    last = numbers.sort("number").group_by("job").last()
    earlier = (
        numbers.join(last, on="job", suffix="_last")
        .filter(
            (pl.col("number") < pl.col("number_last"))
            & ((pl.col("t_last") - pl.col("t") >= _STANDS_NS) | pl.col("t").is_null()
               | pl.col("t_last").is_null())
        )
        .sort("number")
        .group_by("job")
        .agg(first=pl.col("number").last(), last=pl.col("number_last").last())
    )  # fmt: skip
    counts = said.filter(pl.col("what") == "ras_count").select(
        "job", "number", "comm", "op", "count", "of", "count_out"
    )
    both = counts.join(earlier, on="job")
    key = ["job", "comm", "op", "count", "count_out", "ranks"]
    text = pl.col("of").cast(pl.List(pl.String)).list.join(",").alias("ranks")
    now = both.filter(pl.col("number") == pl.col("last")).with_columns(text)
    before = both.filter(pl.col("number") == pl.col("first")).with_columns(text)
    changed = pl.concat(
        [
            now.join(before, on=key, how="anti", nulls_equal=True),
            before.join(now, on=key, how="anti", nulls_equal=True),
        ]
    )
    active = changed.select("job", rank="of").explode("rank", empty_as_null=False).unique()
    nobody = changed.select("job", "comm").unique()
    out: dict[tuple[int, int], bool] = {}
    members = now.select("job", "comm", rank="of").explode("rank", empty_as_null=True)
    busy = members.join(active, on=["job", "rank"], how="semi").select("job", "comm").unique()
    moving = pl.concat([nobody, busy]).unique()
    for job, comm in now.select("job", "comm").unique().iter_rows():
        out[job, comm] = False
    for job, comm in moving.iter_rows():
        out[job, comm] = True
    return out


def _uneven_finding(
    job: int, now: pl.DataFrame, stuck: dict[str, Any], still: bool,
    comm_id: dict[int, str], strings: list[str],
) -> Finding:  # fmt: skip
    """What a communicator tells whose ranks have made different numbers of calls."""
    comm, op = stuck["comm"], stuck["op"]
    rows = now.filter((pl.col("what") == "ras_count") & (pl.col("comm") == comm))
    of_op = rows.filter(pl.col("op") == op)
    behind, ahead = (
        of_op.filter(pl.col("count") == stuck[side])["count_out"].sum() for side in ("low", "high")
    )
    low = of_op.filter(pl.col("count") < stuck["high"])
    late = _ranks(low)
    waiting = _ranks(of_op.filter(pl.col("count") == stuck["high"]))
    counts = [
        {"count": count, "ranks": of, "number": n}
        for count, of, n in of_op.sort("count").select("count", "of", "count_out").iter_rows()
    ]
    details: dict[str, Any] = {
        "missing_ranks": late,
        "counts": counts,
        "op": op_name(op, strings),
        "comm": comm_id.get(comm),
        "places": _texts(low),
    }
    at = tuple(
        {
            "rank": rank, "seq": stuck["high"], "op": op_name(op, strings),
            "comm": comm_id.get(comm), "label": comm_id.get(comm), "ordinal": stuck["high"],
            "stack": [],
        }
        for rank in waiting[:_SHOWN]
    )  # fmt: skip
    base = Finding(
        job=job, kind="insufficient_evidence", evidence="inferred", victims=tuple(waiting),
        hangs_at=at, reason="stalled", details=details,
    )  # fmt: skip
    if not still:  # one report: counts that differ may be of the moment
        return base
    named = len(late) == low["count_out"].sum()
    if _crossed(rows):
        # with nobody moving the counts are of one moment: no order of calls is behind both
        return Finding(
            job=job, kind="mismatch", evidence="inferred", hangs_at=at,
            culprits=(), victims=tuple(sorted({*late, *waiting})),
            reason="data_dependent_branch", details=details | _sides(rows, strings),
            deadlocked=True,
        )  # fmt: skip
    return Finding(
        job=job, kind="missing_participant", evidence="inferred", hangs_at=at,
        culprits=tuple(late) if named and behind < ahead else (),
        victims=tuple(waiting), reason="stalled", details=details, deadlocked=None,
    )  # fmt: skip


_SHOWN: Final = 256


def _crossed(rows: pl.DataFrame) -> bool:
    """Have some ranks made more calls of one kind than others, and fewer of another kind?"""
    each = (
        rows.explode("of", empty_as_null=False)
        .filter(pl.col("of").is_not_null())
        .pivot("op", index="of", values="count", aggregate_function="max")
        .fill_null(0)
    )
    if each.height < 2 or each.width < 3:
        return False
    kinds = [c for c in each.columns if c != "of"]
    each = each.with_columns(total=pl.sum_horizontal(kinds)).sort("total", *kinds)
    falls = each.select(pl.any_horizontal((pl.col(c).diff() < 0).any() for c in kinds))
    return bool(falls.item())


def _sides(rows: pl.DataFrame, strings: list[str]) -> dict[str, Any]:
    """Details of counts that cross: who has made how many calls of what."""
    uneven = rows.filter(pl.col("count").n_unique().over("op") > 1).sort("op", "count")
    return {
        "aspects": ["op"],
        "signatures": [
            {"op": f"{count} calls of {op_name(op, strings)}", "ranks": of}
            for op, count, of in uneven.select("op", "count", "of").iter_rows()
        ],
    }


def _errors(job: int, now: pl.DataFrame, found: list[Finding]) -> list[Finding]:
    """Errors that ranks report, where nothing else is said of the job."""
    rows = now.filter(pl.col("what") == "ras_error")
    if rows.is_empty() or any(f.job == job for f in found):
        return []
    return [
        Finding(
            job=job, kind="insufficient_evidence", evidence="inferred", reason="no_data",
            victims=tuple(_ranks(rows)), details={"errors": _texts(rows)},
        )
    ]  # fmt: skip


def _quiet(
    job: int, now: pl.DataFrame, moved: dict[tuple[int, int], bool], found: list[Finding]
) -> list[Finding]:
    """All ranks have made the same calls, and nobody a further one: idle, or all in one of them."""
    moves = [moved.get((job, c)) for c in now["comm"].drop_nulls().unique()]
    if not moves or any(m is not False for m in moves) or any(f.job == job for f in found):
        return []
    return [
        Finding(
            job=job, kind="insufficient_evidence", evidence="inferred", reason="no_calls",
            victims=tuple(_ranks(now.filter(pl.col("what") == "ras_count"))), deadlocked=None,
        )
    ]  # fmt: skip


def _ranks(rows: pl.DataFrame) -> list[int]:
    return sorted(set(rows["of"].explode(empty_as_null=False).drop_nulls().to_list()))


def _texts(rows: pl.DataFrame) -> list[str]:
    return sorted({t for t in rows["text"].drop_nulls() if t})
