"""The page shows what is printed; "python tests/planner/test_page.py" writes it anew."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from dl2gpu.planner.model import packaged, parse

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "planner.md"
BLOCK = re.compile(r"(?<=<!-- plan output -->\n```\n).*?(?=\n```)", re.DOTALL)
OPTIONS = (
    "gpt2",
    "--devices",
    "8x4",
    "--intra",
    "300GBps",
    "--inter",
    "25GBps",
    "--memory",
    "8GiB",
)


def output() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dl2gpu", "plan", *OPTIONS],
        capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "110"},
    )  # fmt: skip
    return f"$ dl2gpu plan {' '.join(OPTIONS)}\n{done.stdout.rstrip()}"


def test_output_on_the_page_is_what_is_printed() -> None:
    def timeless(text: str) -> str:
        return re.sub(r"layouts, [\d.]+ s", "layouts, N s", text)

    block = BLOCK.search(PAGE.read_text())
    assert block is not None
    assert timeless(block[0]) == timeless(output()), f"renew it: python {Path(__file__)}"


def test_the_page_names_every_model_and_its_example_is_one() -> None:
    text = PAGE.read_text()
    for name in packaged():
        assert f"`{name}`" in text
    toml = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert toml is not None
    assert parse(tomllib.loads(toml[1])).parameters > 300e6


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(lambda _: output(), PAGE.read_text()))
