"""``scan --plan``: jobs of the plan against it, in every form, with what else they do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

import dl2gpu
from dl2gpu.cli import app
from dl2gpu.planner.expect import against
from dl2gpu.planner.file import read_plan, write_plan
from dl2gpu.planner.lower import lower
from dl2gpu.planner.model import parse
from dl2gpu.planner.plan import Plan
from dl2gpu.suites.dumps import write_dumps
from dl2gpu.suites.scheme import Scheme, lowered, plan_of
from dl2gpu.suites.settle import settle
from dl2gpu.trace.native_write import write_jsonl
from dl2gpu.trace.schema import OP, Trace, concat

MODEL = parse({
    "name": "net", "batch": 16,
    "layer": [
        {"op": "tokens", "tokens": 16, "width": 32},
        {"op": "transformer", "name": "block", "heads": 8, "repeat": 4},
        {"op": "head", "classes": 96},
    ],
})  # fmt: skip
SCHEME = Scheme.parse("dp2,tp2,pp2,m4")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(MODEL, SCHEME)


@pytest.fixture(scope="module")
def file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan(plan, path)
    assert read_plan(path).layout == plan.layout
    return path


def cut(trace: Trace, rank: int, op: str, nth: int = 2) -> tuple[Trace, dict[str, Any]]:
    """The trace without one operation of a rank, and that operation."""
    mine = trace.events.filter((pl.col("rank") == rank) & (pl.col("op") == OP[op])).sort("seq")
    gone = mine.row(nth, named=True)
    here = (pl.col("rank") == rank) & (pl.col("seq") == gone["seq"])
    return replace(trace, events=trace.events.filter(~here)), gone


EXTRAS = ((-2, "broadcast", 77), (-1, "broadcast", 78), (1 << 30, "barrier", 1))
"""(place, operation, elements)"""


def with_extras(trace: Trace, ranks: int, missing: int | None = None) -> Trace:
    """Everybody begins with two broadcasts of parameters; all but one end in a barrier."""
    template = trace.events.filter(pl.col("op") == OP["all_reduce"]).head(1)
    rows = [
        template.with_columns(
            rank=pl.lit(r, pl.Int32), seq=pl.lit(seq, pl.Int64), op=pl.lit(OP[op], pl.Int32),
            comm=pl.lit(0, pl.Int32), count=pl.lit(count, pl.Int64),
            bytes=pl.lit(4 * count, pl.Int64), request=pl.lit(None, pl.Int64),
            root=pl.lit(0 if op == "broadcast" else None, pl.Int32),
        )
        for r in range(ranks)
        for seq, op, count in EXTRAS
        if not (op == "barrier" and r == missing)
    ]  # fmt: skip
    events = pl.concat([trace.events, *rows]).sort("rank", "seq")
    return replace(
        trace, events=events.with_columns(seq=pl.int_range(pl.len()).over("rank").cast(pl.Int64))
    )


def test_what_training_does_besides_is_no_difference(plan: Plan) -> None:
    trace = with_extras(lower(plan, 2), plan.layout.ranks)
    assert [p["follows"] for p in against(trace, plan)] == [True]
    # ... nor is a barrier at the end that one rank has not come to
    trace = with_extras(lower(plan, 2), plan.layout.ranks, missing=3)
    assert [p["follows"] for p in against(trace, plan)] == [True]
    less, gone = cut(with_extras(lower(plan, 2), plan.layout.ranks), 3, "all_reduce", 4)
    (said,) = against(less, plan)
    assert said["follows"] is False
    assert said["rank"] == 3
    assert f"all_reduce of {gone['count']} elements" in said["says"]


def test_another_program_does_not_follow(plan: Plan) -> None:
    other = lower(plan_of(MODEL, Scheme.parse("dp4,tp2")), 2)
    (said,) = against(other, plan)
    assert said["follows"] is False
    assert said["step"] == 0


def test_jobs_of_another_size_and_lost_beginnings(plan: Plan) -> None:
    small = lowered(MODEL, Scheme.parse("dp4"), 3)
    own = lower(plan, 2)
    lossy = replace(own, ranks=own.ranks.with_columns(lost_before=pl.lit(5, pl.Int64)))
    trace = concat([small, own, lossy])
    said = against(trace, plan)
    assert [(p["job"], p["follows"]) for p in said] == [(1, True), (2, None)]
    assert "lost their beginning" in said[1]["says"]


@pytest.mark.parametrize("cluster", ["threads", "local"])
def test_scan_names_the_rank_that_the_record_alone_cannot(
    plan: Plan, file: Path, tmp_path: Path, cluster: str
) -> None:
    """Two ranks of a group disagree: which one is wrong, only the plan says."""
    whole = lower(plan, 2)
    less, gone = cut(whole, 3, "all_reduce", 0)
    write_jsonl(whole, tmp_path / "x" / "good")
    write_jsonl(less, tmp_path / "x" / "bad")
    report = dl2gpu.scan([str(tmp_path / "x")], plan=file, cluster=cluster, workers=1)
    told = report.summary["plans"]
    assert [p["follows"] for p in told] == [False, True]
    assert told[0]["rank"] == 3  # of equal operations in a row, the last one is what lacks
    assert told[0]["conversion"]
    assert f"{gone['count']} elements" in told[0]["expected"]
    (finding,) = report.findings.filter(pl.col("kind") != "healthy").to_dicts()
    assert "Against its plan, rank 3 lacks the all_reduce" in finding["summary"]
    assert json.loads(finding["details"])["plan"]
    document = json.loads(report.to_json())
    assert document["summary"]["plans"] == told
    # without a plan nothing is said of one
    assert "plans" not in dl2gpu.scan([str(tmp_path / "x")]).summary


def test_dumps_follow_their_plan(plan: Plan, file: Path, tmp_path: Path) -> None:
    trace = lower(plan, 2)
    write_dumps(trace, settle(trace), tmp_path / "x" / "job")
    (told,) = dl2gpu.scan([str(tmp_path / "x")], plan=file).summary["plans"]
    assert told["follows"] is True
    less, _ = cut(trace, 2, "all_reduce", 5)
    write_dumps(less, settle(less), tmp_path / "y" / "job")
    (told,) = dl2gpu.scan([str(tmp_path / "y")], plan=file).summary["plans"]
    assert (told["follows"], told["rank"]) == (False, 2)


def test_command(plan: Plan, file: Path, tmp_path: Path) -> None:
    write_jsonl(lower(plan, 2), tmp_path / "x" / "job")
    run = CliRunner().invoke
    done = run(app, ["scan", str(tmp_path / "x"), "--plan", str(file), "--quiet"])
    assert done.exit_code == 0
    assert "1 of 1 job of the plan's size follows it" in done.output
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"schema": "other"}')
    for path in (wrong, tmp_path / "none.json"):
        done = run(app, ["scan", str(tmp_path / "x"), "--plan", str(path), "--quiet"])
        assert done.exit_code == 2
    # a scan that was begun without the plan is not continued with its results
    out = ["--out", str(tmp_path / "report"), "--quiet"]
    assert run(app, ["scan", str(tmp_path / "x"), *out]).exit_code == 0
    assert run(app, ["scan", str(tmp_path / "x"), "--plan", str(file), *out]).exit_code == 0
    saved = json.loads((tmp_path / "report" / "report.json").read_text())
    assert saved["summary"]["plans"][0]["follows"] is True
