"""What a program of the suites is, and the faults that are put into one.

A program is one function that every rank runs. It is run as it is (healthy) and once for each of
its faults; where a fault strikes, the program asks ``c.sick(name)`` on the ranks that have it.

A label is made of two things only: what was put in (the kinds that DESIGN.md section 5 calls it,
the ranks it was put into) and what the run did (which ranks came to their end). The analyzer has no
part in it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CYCLES = ("cycle", "order_inversion", "init_cycle")
ABSENT = ("missing_participant", "mismatch")
"""A rank that leaves a call out: when it goes on to another call on the group, the two disagree."""


@dataclass(frozen=True)
class Fault:
    """A fault of a program."""

    name: str
    ranks: tuple[int, ...]
    """Where it is put in."""
    kinds: tuple[str, ...]
    """What the design calls it when the job gets stuck."""
    passes_as: tuple[str, ...] = ("healthy", "potential")
    """What it may be called, beside ``kinds``, when all ranks come to their end in spite of it."""
    outside: bool = False
    """Does the cause lie outside communication: then the job is not deadlocked."""
    blamed: tuple[int, ...] | None = None
    """Ranks that have to be named; None = ``ranks`` where they are the smaller part."""
    title: str = ""


CRASH = Fault("crash", (1,), ("crashed_rank",), outside=True, title="a rank dies")
STALL = Fault(
    "stall", (1,), ("stalled_rank",), outside=True, title="a rank is busy for longer than the others wait"
)
EARLY = Fault("early_exit", (1,), ("missing_participant", "unmatched_p2p"), title="a rank ends before the others")
EARLY_P2P = Fault(
    "early_exit", (1,), EARLY.kinds, blamed=(), title="a rank ends before the others: whether too "
    "much was sent or too little received is not in the record",
)


@dataclass
class Case:
    """One run: what a rank of it sees."""

    rank: int
    world: int
    fault: Fault | None
    folder: str
    """For checkpoints and the like; thrown away."""
    started: float = field(default_factory=time.monotonic)

    def sick(self, name: str) -> bool:
        """Does the fault of this name strike this rank."""
        return self.fault is not None and self.fault.name == name and self.rank in self.fault.ranks

    def usual(self) -> None:
        """The place where a rank may die, stand, or leave, as these faults have it."""
        if self.sick("crash"):
            os._exit(1)
        if self.sick("stall"):
            time.sleep(60)
        if self.sick("early_exit"):
            raise SystemExit(0)


@dataclass(frozen=True)
class Program:
    """A program of a suite."""

    name: str
    suite: str
    ranks: int
    run: Callable[[Case], None]
    faults: tuple[Fault, ...]
    model: str = ""
    scheme: str = ""


PROGRAMS: dict[str, Program] = {}


def program(
    suite: str, name: str, ranks: int, *faults: Fault, model: str = "", scheme: str = ""
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Enters a program into its suite."""

    def enter(run: Callable[[Case], None]) -> Callable[[Case], None]:
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(name, suite, ranks, run, faults, model, scheme)
        return run

    return enter


def expectation(program: Program, fault: Fault | None, ends: list[str]) -> dict[str, Any]:
    """The label of a run, in the form of the other labelled sets (tests/corpus.py).

    Args:
        ends: of each rank: finished, failed (its communication broke), crashed, killed (it was
            still there at the end and did not get on).
    """
    stuck = any(end != "finished" for end in ends)
    out: dict[str, Any] = {
        "id": program.name + (f".{fault.name}" if fault else ""),
        "suite": program.suite,
        "model": program.model,
        "scheme": program.scheme,
        "ranks": program.ranks,
        "fault": fault.name if fault else None,
        "injected": list(fault.ranks) if fault else [],
        "ends": ends,
        "stuck": stuck,
    }
    if fault is None:
        if stuck:
            raise RuntimeError(f"{out['id']}: a healthy program did not come to its end: {ends}")
        return out | {"deadlock": False, "kinds": ["healthy"], "culprits": []}
    if not stuck:
        # a fault that did no harm this time: what may be said is wide, who is accused is not
        return out | {
            "deadlock": "conditional",
            "kinds": sorted({*fault.kinds, *fault.passes_as}),
            "culprits_must_not_include": [],
        }
    died = any(ends[rank] == "crashed" for rank in fault.ranks)
    # of a fault of its communication a rank may die by itself: whether that is a deadlock or a
    # crash is a matter of words
    deadlock = False if fault.outside else "conditional" if died else True
    kinds = set(fault.kinds)
    if fault is STALL and program.ranks == 2:
        kinds.add("insufficient_evidence")  # one waits, one does not: the record says no more
    out |= {"deadlock": deadlock, "kinds": sorted(kinds), "must_not": ["healthy"]}
    blamed = fault.blamed
    if blamed is None:
        blamed = fault.ranks if 2 * len(fault.ranks) < program.ranks else ()
    return out | {"culprits_must_include": sorted(blamed)}
