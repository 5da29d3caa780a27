"""Threads follow the processors that the process has, not those of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dl2gpu.engine.cores import cores, limited, memory

USABLE = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("150000 100000", min(2, USABLE)),
        ("100000000 100000", USABLE),
        ("max 100000", USABLE),
        ("", USABLE),
        ("100000 0", USABLE),
        ("1 2 3", USABLE),
    ],
)
def test_a_containers_limit_counts(tmp_path: Path, limit: str, expected: int) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(limit + "\n")
    assert cores(str(file)) == expected


def test_without_a_limit(tmp_path: Path) -> None:
    assert cores(str(tmp_path / "none")) == USABLE


def test_limited() -> None:
    free = cores()
    with limited(3):
        assert cores() == 3
        with limited(None):
            assert cores() == 3
        with limited(1):
            assert cores() == 1
        assert cores() == 3
    assert cores() == free


def test_memory_follows_the_limit_of_a_container(tmp_path: Path) -> None:
    all_of_it = memory(str(tmp_path / "none"))
    assert all_of_it > 1 << 28
    limit = tmp_path / "memory.max"
    for text, expected in (("1048576\n", 1 << 20), ("max\n", all_of_it), ("", all_of_it)):
        limit.write_text(text)
        assert memory(str(limit)) == expected
    limit.write_text(str(2 * all_of_it))
    assert memory(str(limit)) == all_of_it
