"""The pages say what is: kinds, options, links."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import dl2gpu
from dl2gpu.cli import app
from dl2gpu.report.model import FINDINGS, KINDS
from dl2gpu.report.model import JOBS as JOB_COLUMNS
from dl2gpu.suites.command import app as generate
from dl2gpu.trace.inputs import INPUTS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "datasets/demo/README.md",
]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_every_kind_has_its_section_in_order_of_gravity() -> None:
    assert tuple(re.findall(r"^## (\w+)$", page("verdicts.md"), re.MULTILINE)) == KINDS


def test_every_option_is_described() -> None:
    made = get_command(generate).commands  # type: ignore[attr-defined]
    commands = get_command(app).commands["scan"], *made.values()  # type: ignore[attr-defined]
    options = {o for c in commands for p in c.params for o in p.opts if o.startswith("--")}
    described = set(re.findall(r"--[a-z][a-z-]+", page("usage.md")))
    assert options - {"--help"} <= described
    assert described - options <= {"--rm"}  # of docker


def test_every_column_of_the_report_is_described() -> None:
    words = set(re.findall(r"\w+", page("usage.md")))
    assert {*FINDINGS, *JOB_COLUMNS, *INPUTS} <= words


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_pages_name_only_files_that_exist(path: Path) -> None:
    for name in re.findall(r"`((?:dl2gpu|tests|docs|datasets)/[\w./-]+)`", path.read_text()):
        assert (ROOT / name).exists(), name


def test_example_of_the_native_format_is_a_deadlock(tmp_path: Path) -> None:
    """As the page says: a deadlock with the two waits, none for sure without them."""
    block = re.search(r"```json\n(.*?)\n```", page("formats.md"), re.DOTALL)
    assert block is not None
    rank_0 = [json.loads(line) for line in block[1].splitlines()]
    head, (first, wait, second, last_wait), end = rank_0[:3], rank_0[3:7], rank_0[7]
    ranks = [[first, wait, second, last_wait], [second, wait, first, last_wait]]
    for name, waits in (("stuck", True), ("free", False)):
        for rank, order in enumerate(ranks):
            ops = [op for op in order if waits or op["op"] != "wait"]
            lines = [
                head[0] | {"rank": rank, "job": name},
                *head[1:],
                *(op | {"seq": i} for i, op in enumerate(ops)),
                end,
            ]
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"rank_{rank}.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )
    jobs = {j["job"]: j for j in dl2gpu.scan(str(tmp_path)).jobs.to_dicts()}
    assert jobs["stuck"]["verdict"] in {"cycle", "order_inversion"}
    assert jobs["stuck"]["deadlocked"] is True
    assert jobs["free"]["verdict"] in {"potential", "healthy"}
    assert jobs["free"]["deadlocked"] is not True


def test_tables_of_the_scaling_page_are_what_its_script_prints() -> None:
    scaling = runpy.run_path(str(ROOT / "docs/scaling.py"))
    text = page("scaling.md")
    assert scaling["written"](text) == text, "renew it: python docs/scaling.py docs/scaling.md"
    for make in scaling["TABLES"].values():
        assert make() in text


def test_scaling_agrees_with_the_measured_scans() -> None:
    """What was fitted gives back what it was fitted to."""
    scaling = runpy.run_path(str(ROOT / "docs/scaling.py"))
    a_file, an_entry = (s / scaling["CORES_THERE"] for s in scaling["fitted"]())
    wall = scaling["wall"]
    for ranks, entries, seconds in (
        (128, 128 * 2000, wall(128)),
        (4096, 4096 * 200, float(scaling["MANY"])),
    ):
        more = a_file * (ranks - 512) + an_entry * (entries - 512 * 2000)
        assert seconds == pytest.approx(wall(512) + more)


# --------------------------------------------------------------------------------------------------
# The output in the README; "python tests/test_docs.py" writes it anew

README = ROOT / "README.md"
DEMO = "datasets/live/traces"
FINDINGS_SHOWN = (
    "pipeline_by_hand.head_to_head:", "moe_all_to_all.order_inversion:", "all_gather.skipped:",
)  # fmt: skip
BLOCK = re.compile(r"(?<=<!-- demo output -->\n```\n).*?(?=\n```)", re.DOTALL)


def demo_output() -> str:
    """The scan of the recorded jobs: summary, some findings, inputs not read."""
    done = subprocess.run(
        [sys.executable, "-m", "dl2gpu", "scan", str(ROOT / DEMO), "--quiet"],
        capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip
    summary, verdicts, *rest = done.stdout.rstrip().split("\n\n")
    out = [f"$ dl2gpu scan {DEMO}\n{summary}", verdicts]
    for part in rest:
        numbered = re.match(r"\d+\. (\S+)", part)
        if not numbered or numbered[1] in FINDINGS_SHOWN:
            out.append(part)
        elif out[-1] != "...":
            out.append("...")
    return "\n\n".join(out)


def test_output_in_the_readme_is_what_is_printed() -> None:
    def timeless(text: str) -> str:
        return re.sub(r"in [\d.]+ s", "in N s", text)

    block = BLOCK.search(README.read_text())
    assert block is not None
    assert timeless(block[0]) == timeless(demo_output()), "renew it: python tests/test_docs.py"


if __name__ == "__main__":
    README.write_text(BLOCK.sub(lambda _: demo_output(), README.read_text()))
