"""Shared fixtures: the labelled data beside the checkout, the demo corpus, hand-made reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from corpus import shared_folder

from dl2gpu.report.model import FINDINGS, JOBS, Report
from dl2gpu.trace.inputs import INPUTS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of the labelled data (beside the checkout, or ``DL2GPU_SHARED``)."""
    folder = shared_folder()
    if folder is None:
        pytest.skip("no labelled data beside the checkout (set DL2GPU_SHARED)")
    return folder


@pytest.fixture(scope="session")
def demo() -> Path:
    """The corpus of the README."""
    return ROOT / "datasets" / "demo"


def operation(rank: int, **fields: Any) -> dict[str, Any]:
    """One entry of ``hangs_at``."""
    return {
        "rank": rank,
        "seq": 4,
        "op": "all_reduce",
        "comm": "dp",
        "ordinal": 2,
        "stack": [
            "all_reduce /opt/site-packages/torch/distributed/distributed_c10d.py:2810",
            "train_step lab/loop.py:85",
        ],
    } | fields


def place(rank: int, waits_for: list[int], **fields: Any) -> dict[str, Any]:
    """One place of a cycle."""
    return {
        **operation(rank),
        "place": "host",
        "stream": None,
        "waits_for": waits_for,
    } | fields


def finding(id_: str, job: str, kind: str, **fields: Any) -> dict[str, Any]:
    """One row of the findings table."""
    row: dict[str, Any] = dict.fromkeys(FINDINGS)
    row |= {
        "id": id_,
        "job": job,
        "attempt": 0,
        "kind": kind,
        "evidence": "observed",
        "culprits": [],
        "victims": [],
        "cycle": [],
        "hangs_at": [],
        "fingerprint": f"fp-{kind}",
        "advice": "Make every rank call it.",
        "summary": f"{job} does not move.",
    }
    return row | fields


def job(name: str, verdict: str, findings: list[str], **fields: Any) -> dict[str, Any]:
    """One row of the jobs table."""
    return {
        "job": name,
        "attempt": 0,
        "folder": name,
        "world_size": 4,
        "ranks_present": [3, 1, 0, 2],
        "ranks_missing": [],
        "events": 40,
        "source_format": "native",
        "verdict": verdict,
        "deadlocked": verdict in {"cycle", "mismatch"},
        "findings": findings,
    } | fields


def source(path: str, status: str = "read", **fields: Any) -> dict[str, Any]:
    """One row of the inputs table."""
    row: dict[str, Any] = dict.fromkeys(INPUTS)
    return row | {"path": path, "status": status, "events": 10} | fields


def make(
    findings: list[dict[str, Any]], jobs: list[dict[str, Any]], inputs: list[dict[str, Any]]
) -> Report:
    """A report of hand-made rows."""
    by_kind: dict[str, int] = {}
    for row in jobs:
        by_kind[row["verdict"]] = by_kind.get(row["verdict"], 0) + 1
    return Report(
        findings=pl.DataFrame(findings, schema=FINDINGS, orient="row"),
        jobs=pl.DataFrame(jobs, schema=JOBS, orient="row"),
        inputs=pl.DataFrame(inputs, schema=INPUTS, orient="row"),
        summary={
            "elapsed_s": 0.25,
            "jobs": len(jobs),
            "ranks": 4 * len(jobs),
            "events": 40 * len(jobs),
            "bytes_read": 123456,
            "files": len(inputs),
            "by_kind": by_kind,
            "engine": "cpu",
            "cluster": "threads",
        },
    )


@pytest.fixture
def make_report() -> Callable[..., Report]:
    return make


@pytest.fixture
def report() -> Report:
    """Two stuck jobs (one bug in both), an insecure upload, a healthy job; rows out of order."""
    cycle = [
        place(0, [1], op="all_to_all", ordinal=7, comm="shard", seq=9),
        place(1, [0], place="stream", stream="s_repl", comm="repl", ordinal=3, seq=8, stack=None),
    ]
    return make(
        [
            finding(
                "m1",
                "uneven",
                "mismatch",
                culprits=[3],
                victims=[2, 0, 1],
                hangs_at=[operation(2), operation(0), operation(1), operation(3, ordinal=1)],
                first_divergence=operation(3, seq=3, op="barrier", ordinal=None),
                reason="skipped_call",
                details=json.dumps(
                    {
                        "found": {"rank 3": "barrier"},
                        "expected": {"op": "all_reduce", "count": 128},
                        "last_operations": {
                            "10": [{"seq": 3, "op": "barrier", "comm": "dp", "ordinal": 1}],
                            "3": [{"seq": 2, "op": "all_reduce", "comm": "dp", "state": "started"}],
                        },
                    }
                ),
                stopped_at_ns=1_760_004_245_922_995_223,
                gpu_hours_lost=1.5,
            ),
            finding("c2", "inverted-b", "cycle", cycle=cycle, culprits=[0, 1]),
            finding("c1", "inverted-a", "cycle", cycle=cycle, culprits=[0, 1], probability=0.5),
        ],
        [
            job("uneven", "mismatch", ["m1"]),
            job("fine", "healthy", []),
            job("inverted-b", "cycle", ["c2"]),
            job("inverted-a", "cycle", ["c1"]),
        ],
        [
            source("uneven/rank_1.jsonl"),
            source("uneven/rank_0.jsonl"),
            source("up/x", "quarantined", reason="pickle opcode GLOBAL", format="flight_recorder"),
            source("up/y", "partial", reason="cut short: 3 entries lost"),
            source("notes.txt", "ignored", reason="not a trace"),
        ],
    )
