"""What a fleet adds up: bytes of an entry, stages of the analysis, and work for each file.

One core (the process binds itself to one). Prints a table for docs/benchmarks.md, from which
docs/scaling.py computes::

    python benchmarks/stages.py
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

os.environ["POLARS_MAX_THREADS"] = "1"
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.path.insert(0, str(Path(__file__).resolve().parent))

import analysis
import fr_corpus
import polars as pl

import dl2gpu
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import Scenario, build, run
from dl2gpu.analysis.roots import find_causes
from dl2gpu.analysis.waitfor import build_graph
from dl2gpu.report.model import FINDINGS, JOBS, Report
from dl2gpu.report.save import save
from dl2gpu.trace.discover import discover
from dl2gpu.trace.inputs import INPUTS, Input

RUNS = 4


def best(call: Callable[[], object]) -> float:
    """Processor seconds of the fastest of some runs."""
    out = []
    for _ in range(RUNS):
        began = time.process_time()
        call()
        out.append(time.process_time() - began)
    return min(out)


def sizes(folder: Path) -> list[tuple[str, str]]:
    """64 dumps of 2,000 entries with stacks of 16 frames, as in benchmarks/decode.py."""
    fr_corpus.write(folder, 64, 2000, 16)
    stored = sum(p.stat().st_size for p in folder.iterdir())
    events = dl2gpu.read_trace(str(folder)).events
    return [
        ("bytes of a dump, an entry", f"{stored / events.height:.1f}"),
        ("bytes of the event table, an event", f"{events.estimated_size() / events.height:.1f}"),
    ]


def stages(size: int) -> list[tuple[str, str]]:
    trace = analysis.corpus(size, 100)
    matched = match(trace)
    program = build(matched)
    fixpoint = run(program, Scenario())
    graph = build_graph(program, fixpoint)
    seconds = {
        "matching": best(lambda: match(trace)),
        "building the program": best(lambda: build(matched)),
        "replay": best(lambda: run(program, Scenario())),
        "wait-for graph": best(lambda: build_graph(program, fixpoint)),
        "components and causes": best(lambda: find_causes(graph)),
    }
    n = trace.events.height
    return [(f"{stage}, million events/s", f"{n / s / 1e6:.1f}") for stage, s in seconds.items()]


def files(folder: Path, number: int) -> list[tuple[str, str]]:
    """What the process that scans does for each file before and after it is read."""
    content = b"\x80\x02}q\x00" + bytes(20_000)
    paths = [folder / f"job-{i // 512:05d}" / f"nccl_trace_rank_{i % 512}" for i in range(number)]
    for path in paths:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content)
    inputs = [
        Input(str(p), "read", None, "flight_recorder", p.parent.name, i % 512, 2000)
        for i, p in enumerate(paths)
    ]

    def table() -> pl.DataFrame:
        return pl.DataFrame([asdict(i) for i in inputs], schema=INPUTS).sort("path")

    report = Report(
        pl.DataFrame(schema=FINDINGS), pl.DataFrame(schema=JOBS), table(), {"elapsed_s": 0.0}
    )
    out = folder.parent / "report"
    seconds = {
        "finding it": best(lambda: discover([str(folder)], None)),
        "its row in the table of inputs": best(table),
        "writing the row": best(lambda: save(report, out)),
    }
    rows = [(f"{what}, µs a file", f"{s / number * 1e6:.1f}") for what, s in seconds.items()]
    return [*rows, ("bytes of report.json, a file", f"{_size(out) / number:.0f}")]


def _size(report: Path) -> int:
    return (report / "report.json").stat().st_size


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [*sizes(folder / "dumps"), *stages(3_162_278), *files(folder / "files", 8192)]
    print("| | measured |\n|---|---|")
    for what, value in rows:
        print(f"| {what} | {value} |")


if __name__ == "__main__":
    main()
