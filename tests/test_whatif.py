"""The commands whatif and replay, and the page that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from analysis.handmade import made, recv, send
from typer.testing import CliRunner, Result

from dl2gpu.analysis.rewrite import Fusion
from dl2gpu.cli import app
from dl2gpu.trace.native_write import write_jsonl
from dl2gpu.trace.readers import read_trace
from dl2gpu.whatif import axes_of, fusion_of, size_of

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "datasets" / "demo" / "send-before-recv"


def invoke(*arguments: object) -> Result:
    # the page is as wide as what is no terminal, whatever other tests leave in the environment
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "120"})


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


@pytest.mark.parametrize(
    "arguments",
    [["whatif", DEMO, "--buffer", "0,4KiB,32MiB,inf"], ["replay", DEMO, "--rows", "3"]],
    ids=["whatif", "replay"],
)
def test_the_page_shows_what_is_printed(arguments: list[object]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert stripped(result.stdout) in (ROOT / "docs" / "whatif.md").read_text()


def test_a_witness_from_the_file_is_played(tmp_path: Path) -> None:
    trace = made([recv("any"), recv(2)], [send(0)], [send(0)], backend="mpi", name="star")
    write_jsonl(trace, tmp_path / "in")
    result = invoke("whatif", tmp_path / "in", "--format", "json", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == json.loads((tmp_path / "out" / "whatif.json").read_text())
    assert found["schema"] == "dl2gpu.whatif/1"
    (row,) = found["rows"]
    assert (row["probability"], row["schedules"], row["exact"]) == (0.5, 2, True)
    assert pl.read_parquet(tmp_path / "out" / "whatif.parquet").to_dicts() == found["rows"]

    file = tmp_path / "out" / "whatif.json"
    result = invoke("replay", tmp_path / "in", "--witness", file, "--out", tmp_path / "played")
    assert result.exit_code == 0, result.output
    assert "recv from any: 2" in result.stdout
    assert "rank 0 (host) in recv of 'w' waits for rank 2" in result.stdout
    assert read_trace(str(tmp_path / "played")).events.height == 4
    result = invoke("replay", tmp_path / "in", "--witness", file, "--number", 7)
    assert result.exit_code == 2
    by_hand = invoke("replay", tmp_path / "in", "--choices", "1")
    assert "It stops here" in by_hand.stdout
    assert "All ranks come to their end" in invoke("replay", tmp_path / "in").stdout


def test_values_of_options() -> None:
    assert [size_of(s) for s in ("0", "4KiB", "1 MiB", "inf")] == [0, 4096, 1 << 20, (1 << 63) - 1]
    assert fusion_of("1") == Fusion()
    assert fusion_of("8") == Fusion(count=8)
    assert fusion_of(" coordinated ") == Fusion(coordinated=True)
    assert fusion_of("64MiB@5ms") == Fusion(bytes=64 << 20, cycle_ns=5_000_000)
    for wrong in ("4 parsecs", "-1", "", "1e9"):
        with pytest.raises(ValueError, match="expected"):
            size_of(wrong)
    for wrong in ("0", "x", "64MiB@soon"):
        with pytest.raises(ValueError, match="expected"):
            fusion_of(wrong)
    with pytest.raises(ValueError, match="orders: expected some of recorded"):
        axes_of(orders="sorted")
    assert axes_of(buffer="0,0,4").buffer == (0, 4)


@pytest.mark.parametrize(
    "arguments",
    [["--buffer", "lots"], ["--matches", "some"], ["--queues", "x"], ["--pool-of", "friends"]],
)
def test_wrong_values_are_2(arguments: list[str]) -> None:
    assert invoke("whatif", DEMO, *arguments).exit_code == 2
