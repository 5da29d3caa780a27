"""``dl2gpu plan``: what it prints and writes, and that it comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from typer.testing import CliRunner

from dl2gpu.cli import app
from dl2gpu.planner.command import cluster_of
from dl2gpu.planner.file import read_plan
from dl2gpu.planner.links import Cluster, grid_links
from dl2gpu.planner.lower import lower
from dl2gpu.planner.model import ModelError
from dl2gpu.scan import scan

MODEL = """
name = "small <b>"
batch = 64
[[layer]]
op = "tokens"
tokens = 32
width = 64
[[layer]]
op = "transformer"
heads = 8
repeat = 4
[[layer]]
op = "head"
classes = 128
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(MODEL)
    return path


def planned(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *options], env={"COLUMNS": "160"})
    return done.exit_code, done.output


def test_everything_is_written_and_comes_back(model: Path, tmp_path: Path) -> None:
    out, svg, trace = tmp_path / "plan.json", tmp_path / "p.svg", tmp_path / "trace"
    status, text = planned(
        str(model), "--devices", "2x4", "--inter", "1GBps", "--memory", "1MiB",
        "--out", str(out), "--picture", str(svg), "--trace", str(trace),
    )  # fmt: skip
    assert status == 0, text
    assert "healthy in every scenario" in text
    assert "block" not in text
    assert "transformer.*.qkv" in text
    for name in ("data parallel", "Megatron", "two-dimensional", "pipeline", "ZeRO-3"):
        assert name in text
    raw = json.loads(out.read_text())
    assert raw["schema"] == "dl2gpu.plan/1"
    assert raw["verdict"] == "healthy"
    assert max(raw["memory_bytes"]) <= 1 << 20
    plan = read_plan(out)
    assert plan.seconds == pytest.approx(raw["seconds"])
    report = scan(str(trace))
    assert report.jobs["verdict"].to_list() == ["healthy"]
    assert report.summary["ranks"] == 8
    assert report.summary["events"] == lower(plan).events.height
    root = ET.fromstring(svg.read_text())
    assert root.tag.endswith("svg")
    assert any("small <b>" in (e.text or "") for e in root.iter())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "x"}, "schema"),
        ({"layout": {"stages": -1, "grid": [2]}}, "expected a cluster and a layout"),
        ({"layout": {"stages": 1, "grid": [4096]}}, "expected a cluster and a layout"),
        ({"layout": {"stages": "1", "grid": [2]}}, "`int`, got `str`"),
        ({"cluster": {"nodes": 1}}, "per_node"),
        ({"layers": [{"choice": ["b"]}]}, "layers: expected"),
        ({"layers": 3}, "int"),
        ({"batch": 0}, "expected a cluster and a layout"),
        ({"model": {"batch": 4}}, "layer"),
    ],
)
def test_a_plan_that_is_none_is_refused(
    model: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    out = tmp_path / "plan.json"
    status, text = planned(str(model), "--devices", "1x2", "--no-compare", "--out", str(out))
    assert status == 0, text
    out.write_text(json.dumps(json.loads(out.read_text()) | change))
    with pytest.raises(ModelError, match=words):
        read_plan(out)


def test_illegal_choices_and_broken_files_are_refused(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    planned(str(model), "--devices", "1x2", "--no-compare", "--out", str(out))
    raw = json.loads(out.read_text())
    raw["layers"][0]["choice"] = ["e"]
    out.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="not legal"):
        read_plan(out)
    for text in ("", "[" * 100_000, "nul", '{"schema":"dl2gpu.plan/1"}', "\xff"):
        out.write_text(text, encoding="latin-1")
        with pytest.raises(ModelError):
            read_plan(out)
    with pytest.raises(ModelError):
        read_plan(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["gpt9"], "expected one of"),
        (["gpt2", "--devices", "8"], "--devices: expected"),
        (["gpt2", "--devices", "99999x99"], "--devices: expected"),
        (["gpt2", "--intra", "fast"], "--intra: expected"),
        (["gpt2", "--inter", "0GBps"], "--inter: expected"),
        (["gpt2", "--memory", "9 parsecs"], "--memory: expected"),
    ],
)
def test_wrong_usage_is_said_in_one_line(options: list[str], words: str) -> None:
    status, text = planned(*options)
    assert status == 2
    assert words in text


def test_rates_and_sizes() -> None:
    got = cluster_of("8x4", "300GBps", "25 GB/s", "80GiB", "312T", 0.4)
    assert (got.nodes, got.per_node, got.intra, got.inter) == (8, 4, 300e9, 25e9)
    assert (got.memory, got.flops, got.efficiency) == (80 * 2**30, 312e12, 0.4)


def test_rings_that_leave_a_node_share_its_network() -> None:
    cluster = Cluster(nodes=4, per_node=8, intra=300e9, inter=24e9)
    stages, outer, inner = grid_links(cluster, (1, 4, 8))
    assert 1 / inner.beta == pytest.approx(300e9)
    assert 1 / outer.beta == pytest.approx(3e9)  # eight rings at a time
    assert stages.alpha == cluster.intra_latency
    (one,) = grid_links(cluster, (32,))
    assert 1 / one.beta == pytest.approx(24e9)  # one ring through all
    outer, inner = grid_links(cluster, (16, 2))
    assert 1 / outer.beta == pytest.approx(12e9)
    assert np.isclose(1 / inner.beta, 300e9)
