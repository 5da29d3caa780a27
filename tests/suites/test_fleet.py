"""Fleets: what is written, and that a scan finds exactly what the labels say."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from dl2gpu.report.model import Report
from dl2gpu.scan import scan
from dl2gpu.suites import fleet, flight_recorder
from dl2gpu.suites.command import app
from dl2gpu.suites.device import completed
from dl2gpu.suites.mixture import FAULTS, plan
from dl2gpu.suites.program import program
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.readers import read_trace
from dl2gpu.trace.schema import OP, validate

EVEN = {name: 1 / len(FAULTS) for name in FAULTS if name != "healthy"}


def agrees(report: Report, labels: pl.DataFrame) -> None:
    """Verdict, ``deadlocked`` and culprits of each job are those of its label, and no others."""
    found: dict[str, set[int]] = {}
    for job, culprits in report.findings.select("job", "culprits").iter_rows():
        found.setdefault(job, set()).update(culprits)
    got = {
        job: (verdict, deadlocked, sorted(found.get(job, ())))
        for job, verdict, deadlocked in report.jobs.select("job", "verdict", "deadlocked").rows()
    }
    want = {
        job: (verdict, deadlocked, culprits)
        for job, verdict, deadlocked, culprits in labels.select(
            "job", "verdict", "deadlocked", "culprits"
        ).iter_rows()
    }
    assert got == want


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_scan_finds_what_the_labels_say(tmp_path: Path, seed: int) -> None:
    labels = fleet.write(
        tmp_path / "x", 120, 150_000, seed, ranks=(8, 128), mixture=EVEN, file_events=40_000
    )
    assert set(labels["fault"]) == set(FAULTS)
    assert len(list((tmp_path / "x").glob("fleet_*.parquet"))) > 4
    report = scan(str(tmp_path / "x"))
    agrees(report, labels)
    assert report.summary["events"] == labels["events"].sum()
    assert report.inputs.filter(pl.col("status") == "quarantined").is_empty()
    assert (tmp_path / "x" / "labels.parquet").exists()
    assert pl.read_parquet(tmp_path / "x" / "labels.parquet").equals(labels)


def test_dumps_of_a_fleet_say_the_same(tmp_path: Path) -> None:
    mixture = dict.fromkeys(flight_recorder.FAULTS, 0.25)
    labels = fleet.write(tmp_path / "x", 24, 30_000, 4, "fr", ranks=(8, 64), mixture=mixture)
    assert set(labels["fault"]) == {"healthy", *flight_recorder.FAULTS}
    assert labels["pipeline"].max() > 1  # type: ignore[operator]
    report = scan(str(tmp_path / "x"))
    agrees(report, labels)
    statuses = dict(report.inputs["status"].value_counts().iter_rows())
    assert statuses == {"read": labels["ranks"].sum(), "ignored": 1}
    assert report.summary["events"] == labels["events"].sum()


def test_dumps_are_pickles(tmp_path: Path) -> None:
    """The standard library reads them as well; counters go on by one in each group."""
    fleet.write(tmp_path / "x", 4, 20_000, 8, "fr", ranks=(32, 32), mixture={"size": 1.0})
    batches = 0
    for path in sorted((tmp_path / "x").glob("*/*rank_*")):
        dump: dict[str, Any] = pickle.loads(path.read_bytes())
        entries = dump["entries"]
        assert [e["record_id"] for e in entries] == list(range(len(entries)))
        assert {e["process_group"] for e in entries} <= {
            (name, group["desc"]) for name, group in dump["pg_config"].items()
        }
        for name in dump["pg_config"]:
            own = [e for e in entries if e["process_group"][0] == name]
            ends = [e for e in own if e["profiling_name"] == "nccl:coalesced"]
            calls = [e["op_id"] for e in own if e not in ends]
            assert calls == list(range(1, len(calls) + 1))
            collectives = [e["collective_seq_id"] for e in own if not e["p2p_seq_id"]]
            assert collectives == list(range(1, len(collectives) + 1))
            batches += len(ends)
        times = [e["time_created_ns"] for e in entries]
        assert times == sorted(times)
    assert batches


def test_healthy_programs_run_to_their_end() -> None:
    """By the generator's own replay, in any layout; and with a fault they do not."""
    for job in plan(60, 60_000, 5, ranks=(8, 256), mixture={}):
        assert completed(job.shape, program(job.shape)).all()
    for job in plan(60, 60_000, 5, ranks=(8, 64), mixture=EVEN):
        made = program(job.shape, None if job.fault.name == "healthy" else job.fault)
        stops = job.fault.name != "healthy"
        assert completed(job.shape, made).all() != stops


def test_a_fleet_in_memory_is_the_one_on_disk(tmp_path: Path) -> None:
    trace, labels = fleet.trace_of(9, 9000, 3, ranks=(8, 32))
    validate(trace)
    assert fleet.write(tmp_path / "x", 9, 9000, 3, ranks=(8, 32)).equals(labels)
    read = read_trace(str(tmp_path / "x"))
    keys = ["job", "rank", "lane", "seq"]
    for column in ("op", "peer", "count", "requests", "group", "t_created", "blocking", "tag"):
        want, got = (t.events.sort(keys)[column] for t in (trace, read))
        assert want.equals(got), column
    assert trace.events["op"].is_in([OP["send"], OP["recv"]]).any()


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for form in ("parquet", "fr"):
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            fleet.write(tmp_path / form / name, 6, 4000, seed, form, ranks=(8, 16))
        a, b, c = (
            {
                p.relative_to(tmp_path / form / name): p.read_bytes()
                for p in (tmp_path / form / name).rglob("*")
                if p.is_file()
            }
            for name in "abc"
        )
        assert a == b
        assert a != c


def test_the_mixture_is_kept() -> None:
    jobs = list(plan(4000, 4_000_000, 1, ranks=(8, 1024)))
    sizes = np.array([j.shape.ranks for j in jobs])
    assert sizes.min() == 8
    assert sizes.max() == 1024
    assert np.median(sizes) < sizes.mean()
    faulty = np.mean([j.fault.name != "healthy" for j in jobs])
    assert 0.08 < faulty < 0.12
    assert {j.fault.name for j in jobs} == set(FAULTS)
    assert len({j.shape.pipeline for j in jobs}) > 2
    assert len({j.shape.tensor for j in jobs}) > 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"jobs": 0}, "one job"),
        ({"ranks": (8, 100)}, "powers of two"),
        ({"ranks": (4, 8)}, "powers of two"),
        ({"mixture": {"gremlins": 0.1}}, "fault: expected .*found 'gremlins'"),
        ({"mixture": {"skip": 0.9, "size": 0.2}}, "add up to 1"),
        ({"form": "csv"}, "form: expected parquet or fr"),
        ({"form": "fr", "mixture": {"order": 1.0}}, "fault: expected size, stall in dumps"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fleet.write(tmp_path / "x", **({"jobs": 2, "events": 100} | arguments))


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InputError, match="new or empty folder"):
        fleet.write(tmp_path, 2, 100)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    out = str(tmp_path / "x")
    done = run(app, ["fleet", out, "--jobs", "5", "--events", "3000", "--ranks", "8:16"])
    assert done.exit_code == 0, done.output
    assert "5 jobs" in done.output
    assert (tmp_path / "x" / "fleet_00000.parquet").exists()
    again = run(app, ["fleet", out, "--jobs", "5"])
    assert again.exit_code == 2
    assert run(app, ["fleet", str(tmp_path / "y"), "--ranks", "many"]).exit_code == 2
