"""From the results of shards to the report's tables: names and ids in place of numbers.

One shard at a time is decoded, and kept as columns: a fleet's findings as Python objects take
several times the memory that they take as a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import msgspec
import polars as pl

from dl2gpu.report.model import FINDINGS, JOBS, KINDS, Report
from dl2gpu.shard import JOB_ROW, Result
from dl2gpu.trace.inputs import INPUTS, Input
from dl2gpu.trace.inputs import joined as inputs_of_files

__all__ = ["build"]

_NUMBERED = {"number": pl.Int32(), **FINDINGS}
"""Columns of findings before their jobs have names."""


def build(
    results: Iterable[bytes],
    others: list[Input],
    select: str | None,
    summary: dict[str, Any],
) -> Report:
    """The report of all shards.

    Args:
        results: of each shard, encoded, in the order of the shards.
        others: what became of the files that no shard has.
        select: only the job of this name (or folder).
        summary: what else the report's summary has; "notes" are added where a shard has some.
    """
    jobs, findings, inputs, notes, plans = _tables(results)
    if select is not None:
        jobs = jobs.filter((pl.col("name") == select) | (pl.col("folder") == select))
    jobs = _named(jobs)
    labels = jobs.select("number", label="job", at="attempt")
    findings = _ordered(findings.join(labels, on="number", maintain_order="left"))
    of_job = findings.group_by("number").agg(findings=pl.col("id"))
    jobs = jobs.join(of_job, on="number", how="left", maintain_order="left").with_columns(
        pl.col("findings").fill_null([])
    )
    files = inputs_of_files([*others, *inputs])
    return Report(
        findings=findings.select(list(FINDINGS)),
        jobs=jobs.select([pl.col(c).cast(t) for c, t in JOBS.items()]),
        inputs=pl.DataFrame([asdict(i) for i in files], schema=INPUTS).sort("path"),
        summary={
            "jobs": jobs.height,
            "ranks": int(jobs["ranks_present"].list.len().sum()),
            "events": int(jobs["events"].sum()),
            "files": len(files),
            **summary,
            **({"notes": notes} if notes else {}),
            **({"plans": _plans(plans, labels)} if plans else {}),
            "by_kind": dict(sorted(Counter(jobs["verdict"].to_list()).items())),
        },
    )


def _plans(plans: list[dict[str, Any]], labels: pl.DataFrame) -> list[dict[str, Any]]:
    """What jobs are against their plan, by their names."""
    names = {n: (job, attempt) for n, job, attempt in labels.iter_rows()}
    named = [
        {"job": names[p["job"]][0], "attempt": names[p["job"]][1]}
        | {k: v for k, v in p.items() if k != "job"}
        for p in plans
        if p["job"] in names
    ]
    return sorted(named, key=lambda p: (p["job"] or "", p["attempt"] or 0))


def _tables(
    results: Iterable[bytes],
) -> tuple[pl.DataFrame, pl.DataFrame, list[Input], list[str], list[dict[str, Any]]]:
    """Jobs and findings of all shards, with jobs numbered on; inputs, notes and plans."""
    jobs = [pl.DataFrame(schema=JOB_ROW)]
    findings = [pl.DataFrame(schema=_NUMBERED)]
    inputs: list[Input] = []
    notes: list[str] = []
    plans: list[dict[str, Any]] = []
    first = 0
    for encoded in results:
        result = Result.decode(encoded)
        shard = pl.DataFrame(result.jobs, schema=JOB_ROW)
        jobs.append(shard.with_columns(pl.col("number") + first))
        findings.append(pl.DataFrame([_row(f, first) for f in result.findings], schema=_NUMBERED))
        plans += [p | {"job": p["job"] + first} for p in result.plans]
        first += 1 + max((job["number"] for job in result.jobs), default=-1)
        inputs += result.inputs
        notes += result.notes
    return pl.concat(jobs), pl.concat(findings), inputs, notes, plans


def _row(finding: dict[str, Any], first: int) -> dict[str, Any]:
    details = msgspec.json.encode(finding["details"], order="sorted").decode()
    return {k: finding.get(k) for k in FINDINGS} | {
        "number": finding["job"] + first, "job": None, "details": details,
    }  # fmt: skip


def _named(jobs: pl.DataFrame) -> pl.DataFrame:
    """``jobs``, sorted, with a column ``job`` that tells each from all others."""
    # jobs of one name in different folders stay apart
    twice = jobs.group_by("name").agg(n=pl.col("folder").n_unique()).filter(pl.col("n") > 1)["name"]
    jobs = jobs.with_columns(
        job=pl.when(pl.col("name").is_in(twice.to_list()))
        .then(pl.format("{} ({})", "name", "folder"))
        .otherwise("name")
    ).sort("job", "attempt", "folder", "source_format", "events", "number")
    # ... and so do those that a table brings along from a folder that is scanned as well
    same = ["job", "attempt"]
    return jobs.with_columns(
        job=pl.when(pl.len().over(same) > 1)
        .then(pl.format("{} #{}", "job", pl.int_range(1, pl.len() + 1).over(same)))
        .otherwise("job")
    )


def _ordered(findings: pl.DataFrame) -> pl.DataFrame:
    """Findings by job, gravity and culprits, with their ids; ``label``, ``at``: job and attempt."""
    keys = list(
        findings.select(
            "label", "at",
            pl.col("kind").replace_strict(KINDS, range(len(KINDS)), return_dtype=pl.Int32),
            "culprits", "fingerprint",
        ).iter_rows()
    )  # fmt: skip
    order = sorted(range(len(keys)), key=keys.__getitem__)
    return findings[order].with_columns(
        id=pl.format("f{}", pl.int_range(1, pl.len() + 1)),
        job=pl.col("label"),
        attempt=pl.col("at"),
    )
