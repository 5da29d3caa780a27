"""The recorded jobs of datasets/live, scanned: what was put in is what is found.

Needs no PyTorch: the records are kept in the repository. Each has a label that says what was put in
and what the run did (``pipelines/live.py``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import corpus
import pytest

TRACES: Final = Path(__file__).resolve().parents[1] / "datasets" / "live" / "traces"

LABELS: Final[dict[str, dict[str, Any]]] = {
    path.parent.name: json.loads(path.read_text()) for path in sorted(TRACES.glob("*/expect.json"))
}


def test_the_suites_are_there() -> None:
    suites = {label["suite"] for label in LABELS.values()}
    assert suites == {
        "primitives", "ddp", "fsdp2", "tp", "mesh", "pipeline", "moe", "groups",
    }  # fmt: skip
    assert {label["model"] for label in LABELS.values()} == {
        "", "gpt2", "swin", "vgg", "transformer",
    }  # fmt: skip
    assert len(LABELS) > 300
    size = sum(path.stat().st_size for path in TRACES.rglob("*") if path.is_file())
    assert size < 20_000_000


def test_every_record_is_read_whole() -> None:
    inputs = corpus.scanned(TRACES).inputs.to_dicts()
    unread = [i for i in inputs if i["status"] != "read" and not i["path"].endswith("expect.json")]
    # a rank that died while it wrote may leave a line cut short
    assert {i["status"] for i in unread} <= {"partial"}
    ranks = sum(label["ranks"] for label in LABELS.values())
    assert sum(i["path"].endswith(".jsonl.gz") for i in inputs) == ranks


@pytest.mark.parametrize("name", LABELS)
def test_job(name: str) -> None:
    failures = corpus.check(corpus.scanned(TRACES), name, LABELS[name])
    assert not failures, (LABELS[name]["ends"], LABELS[name]["log"])


def test_no_healthy_job_is_accused() -> None:
    report = corpus.scanned(TRACES)
    accused = {
        name: corpus.found(report, name).kinds
        for name, label in LABELS.items()
        if label["fault"] is None and corpus.found(report, name).kinds != {"healthy"}
    }
    assert not accused


def test_every_rank_that_was_accused_took_part_in_what_was_put_in() -> None:
    """Where the label names ranks, and one kind of finding is made, nobody else is convicted.

    A circle names all that stand in it; a rank that died of another's fault is named as dead.
    """
    report = corpus.scanned(TRACES)
    circle = {"cycle", "order_inversion", "init_cycle"}
    wrongly = {}
    for name, label in LABELS.items():
        found = corpus.found(report, name)
        if label.get("culprits_must_include") and not found.kinds & circle:
            died = {rank for rank, end in enumerate(label["ends"]) if end == "crashed"}
            others = found.culprits - set(label["injected"]) - died
            if others:
                wrongly[name] = sorted(others)
    assert not wrongly
