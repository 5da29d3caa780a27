"""Findings by fingerprint, over jobs and nights: new, known, gone, regressed; what they cost."""

from __future__ import annotations

import datetime as dt
from typing import Final

import polars as pl

from pipelines.fleet.config import Config

__all__ = ["GROUPS", "grouped"]

GROUPS: Final = {
    "fingerprint": pl.String(),
    "status": pl.String(),  # new | regressed | known | gone
    "kind": pl.String(),
    "summary": pl.String(),  # of one of its findings in the newest run that saw it
    "advice": pl.String(),
    "finding": pl.String(),  # id of that finding
    "job": pl.String(),  # and its job
    "jobs": pl.Int64(),  # jobs of this run with it
    "all_jobs": pl.Int64(),  # and of all runs
    "teams": pl.List(pl.String()),
    "nights": pl.Int64(),
    "first_seen": pl.String(),
    "last_seen": pl.String(),
    "gpu_hours": pl.Float64(),  # lost in this run
    "all_gpu_hours": pl.Float64(),  # and in all
    "saved": pl.Float64(),  # of those of this run, what an early notice would have saved
    "suppressed": pl.String(),  # why nobody is told, null: they are
}
"""One row a fingerprint that this run saw, or that is gone with this run."""

_ORDER: Final = ("regressed", "new", "known", "gone")


def grouped(run: int, runs: pl.DataFrame, findings: pl.DataFrame, config: Config) -> pl.DataFrame:
    """Groups of a run, the gravest first: regressed, new, known, gone; by what they cost.

    Args:
        run: the run that the groups are of; later ones are not looked at.
        runs: with the columns of ``state.RUNS``.
        findings: of all runs, with the columns of ``state.FINDINGS``.
        config: says after how many runs a fingerprint is gone, and what is suppressed.
    """
    runs = runs.filter(pl.col("run") <= run)
    seen = findings.filter(pl.col("run") <= run).join(
        runs.select("run", "night"), on="run", maintain_order="left"
    )
    if seen.is_empty():
        return pl.DataFrame(schema=GROUPS)
    # runs that saw jobs are counted: a night without new files says nothing of a bug
    counted = runs.filter((pl.col("jobs") > 0) | (pl.col("run") == run)).sort("run")
    place = counted.select("run", place=pl.int_range(pl.len()))
    now = place.filter(pl.col("run") == run)["place"].item()
    limit = config.groups.gone_after
    places = (
        seen.select("fingerprint", "run").unique()
        .join(place, on="run")
        .sort("fingerprint", "place")
        .group_by("fingerprint", maintain_order=True)
        .agg(
            newest=pl.col("place").last(),
            before=pl.col("place").filter(pl.col("place") < now).last(),
        )
    )  # fmt: skip
    status = (
        pl.when((pl.col("newest") == now) & pl.col("before").is_null()).then(pl.lit("new"))
        .when((pl.col("newest") == now) & (now - pl.col("before") > limit))
        .then(pl.lit("regressed"))
        .when(pl.col("newest") == now).then(pl.lit("known"))
        # said once, in the run in which it becomes true
        .when(now - pl.col("newest") == limit).then(pl.lit("gone"))
    )  # fmt: skip
    here = pl.col("run") == run
    last = pl.col("run") == pl.col("run").max()
    rows = (
        seen.group_by("fingerprint")
        .agg(
            pl.col("kind", "summary", "advice", "job").filter(last).first(),
            finding=pl.col("id").filter(last).first(),
            jobs=pl.col("job").filter(here).n_unique(),
            all_jobs=pl.struct("run", "job").n_unique(),
            teams=pl.col("team").filter(last).drop_nulls().unique().sort(),
            nights=pl.col("night").n_unique(),
            first_seen=pl.col("night").min(),
            last_seen=pl.col("night").max(),
            gpu_hours=pl.col("gpu_hours").filter(here).sum(),
            all_gpu_hours=pl.col("gpu_hours").sum(),
            saved=pl.col("saved").filter(here).sum(),
            members=pl.struct("fingerprint", "kind", "job").filter(last),
        )
        .join(places.with_columns(status=status), on="fingerprint")
        .filter(pl.col("status").is_not_null())
    )
    night = runs.filter(here)["night"].item()
    reasons = [_suppressed(members, night, config) for members in rows["members"].to_list()]
    return (
        rows.with_columns(suppressed=pl.Series(reasons, dtype=pl.String))
        .select(pl.col(c).cast(t) for c, t in GROUPS.items())
        .sort(
            pl.col("suppressed").is_not_null(),
            pl.col("status").replace_strict(_ORDER, range(len(_ORDER)), return_dtype=pl.Int8),
            pl.col("gpu_hours").round(3), "jobs", "fingerprint",
            descending=[False, False, True, True, False],
        )
    )  # fmt: skip


def _suppressed(members: list[dict[str, str]], night: str, config: Config) -> str | None:
    """The reason, where every finding of a group is suppressed in this night."""
    valid = [s for s in config.suppressions if s.until >= dt.date.fromisoformat(night)]
    reasons = []
    for m in members:
        found = next((s for s in valid if s.covers(m["fingerprint"], m["kind"], m["job"])), None)
        if found is None:
            return None
        reasons.append(f"{found.reason} (until {found.until})")
    return "; ".join(dict.fromkeys(reasons)) or None
