"""Replays programs of many seeds and holds each reading against the slow reference.

Scenarios in lock step are held against each of them alone.

    python tests/fuzz.py 0 200

Tests look at the same programs in every run; this looks at others. What disagrees is printed, cut
down to a few operations, with its seed: an ``@example`` in test_against_naive.py keeps it.
"""

# ruff: noqa: T201 - the program below prints, as programs do

from __future__ import annotations

import sys

import pytest
from lockstep import disagreements
from programs import from_seed
from test_against_naive import A_BATCH, READINGS, assert_agree


def main(low: int, high: int) -> int:
    """Number of disagreements among the seeds ``range(low, high)``."""
    bad = 0
    for seed in range(low, high):
        batch = from_seed(seed, A_BATCH)
        for name, reading in READINGS.items():
            try:
                assert_agree(batch, reading)
            except pytest.fail.Exception as difference:
                bad += 1
                print(f"seed {seed}, {name}: {difference}", flush=True)
        for cell in disagreements(seed, A_BATCH):
            bad += 1
            print(cell, flush=True)
    print(f"{bad} disagreements in {(high - low) * A_BATCH} programs of {len(READINGS)} readings")
    return bad


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
