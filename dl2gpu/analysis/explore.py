"""Exploration of the choices of a scenario: exhaustive where they are few, else a seeded sample.

Which message a wildcard takes, and which send takes room in a shared pool, are choices. A run takes
the first way at every choice that it is not told; its trail says what else there was, and each of
these ways is a run of its own (stateless search). What was chosen so far decides the state,
whatever the order, so a choice in a state that was seen before is not explored again: of the orders
in which independent choices can be made one is explored (partial-order reduction). All jobs are
explored at once, a batch of cells after the other.

Where the choices are too many, runs that choose by a seed estimate how many schedules deadlock (a
schedule's weight is the product of one in so many ways at each choice), with Wilson's interval;
other runs take all from one sender, or vary the beginnings of the runs that got least far, to find
what luck does not.

The result depends on the budget in scenarios and on the seed alone; a budget of seconds is looked
at between batches, and what it cut short is said.

Source: DESIGN.md section 6; P. Godefroid, Model checking for programming languages using VeriSoft
(POPL 1997); E. B. Wilson, Probable inference (JASA 1927).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Final

import numpy as np

from dl2gpu.analysis.choice_kernel import MASK
from dl2gpu.analysis.outcomes import Outcomes, outcomes
from dl2gpu.analysis.replay import Program
from dl2gpu.analysis.scenario import Scenario

__all__ = ["Bad", "Budget", "Explored", "explore", "wilson"]

TRAIL: Final = 96
"""Choices of a run that can be varied. A run with more is sampled."""

_ALWAYS: Final = 8
"""Steered runs that take the first, the second, ... way at every choice."""

_BATCH: Final = 64
"""Runs of a job in a batch."""


@dataclass(frozen=True)
class Budget:
    """What an exploration may cost: runs a job, and seconds over all (None: any number)."""

    scenarios: int = 1024
    seconds: float | None = None


@dataclass(frozen=True)
class Bad:
    """A deadlock that can be reached: where it stands (a hash), and the choices that lead there."""

    digest: int
    given: tuple[int, ...]
    completed: int


@dataclass
class Explored:
    """What is known of a job under a scenario.

    Attributes:
        job: its number. runs: cells that were run.
        complete: every schedule was explored; then ``schedules`` says how many differ in their
            matches, and ``probability`` is exact.
        probability: share of the schedules that deadlock, by weight; ``low`` and ``high`` bound it
            with 95% confidence.
        sampled: runs that the estimate rests on (0 where it is exact).
        bad: the deadlocks that were found, the one that stops first foremost.
        cut: "" or "seconds": the exploration ended for want of time, and not of choices.
    """

    job: int
    runs: int = 0
    complete: bool = False
    schedules: int = 0
    probability: float = 0.0
    low: float = 0.0
    high: float = 1.0
    sampled: int = 0
    bad: list[Bad] = field(default_factory=list)
    cut: str = ""


def wilson(hits: int, of: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval for a share: ``hits`` of ``of``, with 95% confidence."""
    if not of:
        return 0.0, 1.0
    share = hits / of
    middle = share + z * z / (2 * of)
    spread = z * sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


class _Search:
    """The exploration of one job: what is to be run next, and what is known."""

    def __init__(self, job: int, budget: int, seed: int) -> None:
        self.found = Explored(job)
        self.budget = budget
        self.todo: list[tuple[int, ...]] = [()]
        self.expanded: set[int] = set()
        self.children: dict[int, list[int]] = {}
        """By state before a choice: what each way leads to, a state or (negative) an end."""
        self.ends: dict[int, bool] = {}
        self.schedules: set[int] = set()
        self.root: int | None = None
        self.by_digest: dict[int, Bad] = {}
        self.too_long = False
        self.hits = self.sampled = 0
        self.worst: list[tuple[int, tuple[int, ...]]] = []
        self.rng = np.random.default_rng([seed, job])
        self.seed = int(self.rng.integers(1 << 30))

    # -- every schedule

    def enumerate(self, most: int) -> list[Scenario]:
        many = min(most, self.budget - self.found.runs, len(self.todo))
        out, self.todo = self.todo[:many], self.todo[many:]
        return [Scenario(given=given) for given in out]

    def note(self, given: tuple[int, ...], o: Outcomes, i: int) -> None:
        """A run of the enumeration: its end, and the ways it left out."""
        self.found.runs += 1
        stands, end = bool(o.standing[i]), int(o.state[i])
        self._bad(o, i)
        self.schedules.add(end)
        choices = int(o.choices[i])
        if choices > TRAIL:
            self.too_long = True
        taken = tuple(int(t) for t in o.taken[i, : min(choices, TRAIL)])
        before = [int(s) for s in o.before[i, : len(taken)]]
        # an end is told from a state by its sign, also where it is the state of no choice
        chain = [*before, -1 - end]
        self.ends[-1 - end] = stands
        if self.root is None:
            self.root = chain[0]
        for k in range(max(len(given) - 1, 0), len(taken)):
            ways = int(o.ways[i, k])
            slot = self.children.setdefault(before[k], [0] * ways)
            slot[taken[k]] = chain[k + 1]
            if k < len(given):
                continue
            if before[k] in self.expanded:
                break  # what follows was, or will be, looked at from elsewhere
            self.expanded.add(before[k])
            self.todo += [(*taken[:k], way) for way in range(ways) if way != taken[k]]

    def settled(self) -> bool:
        """Is everything explored? Then it is counted."""
        if self.todo or self.too_long:
            return False
        f = self.found
        f.complete, f.schedules, f.sampled = True, len(self.schedules), 0
        f.probability = f.low = f.high = self._share()
        return True

    def _share(self) -> float:
        """Share of the schedules that deadlock, by weight."""
        known: dict[int, float] = {}
        stack = [self.root] if self.root is not None else []
        while stack:
            at = stack[-1]
            assert at is not None
            if at in self.ends and at < 0:
                known[at] = float(self.ends[at])
                stack.pop()
                continue
            ways = self.children[at]
            open_ = [w for w in ways if w not in known]
            if open_:
                stack += open_
                continue
            known[at] = sum(known[w] for w in ways) / len(ways)
            stack.pop()
        return known[self.root] if self.root is not None else 0.0

    # -- a sample, and a search

    def sample(self, most: int) -> list[Scenario]:
        many = min(most, self.budget - self.found.runs)
        out = []
        for k in range(many):
            number = self.sampled + k
            given: tuple[int, ...] = ()
            if number % 4 == 3 and number < 4 * _ALWAYS:
                # steered: always the same way, which takes all from one sender
                given = (number // 4,) * TRAIL
            elif number % 4 == 3 and self.worst:
                # steered: the beginning of a run that got least far, with one choice changed
                _, base = self.worst[int(self.rng.integers(len(self.worst)))]
                at = int(self.rng.integers(len(base))) if base else 0
                given = (*base[:at], int(self.rng.integers(1 << 20)))
            out.append(Scenario(given=given, policy="seeded", seed=(self.seed + number) & MASK))
        self.sampled += many
        return out

    def note_sample(self, s: Scenario, o: Outcomes, i: int) -> None:
        f = self.found
        f.runs += 1
        self._bad(o, i)
        if not s.given:  # steered runs are no sample
            f.sampled += 1
            self.hits += bool(o.standing[i])
        taken = tuple(int(t) for t in o.taken[i, : min(int(o.choices[i]), TRAIL)])
        self.worst = sorted([*self.worst, (int(o.completed[i]), taken)])[:8]
        f.probability = self.hits / f.sampled if f.sampled else 0.0
        f.low, f.high = wilson(self.hits, f.sampled)

    def _bad(self, o: Outcomes, i: int) -> None:
        if not o.standing[i]:
            return
        given = tuple(int(t) for t in o.taken[i, : min(int(o.choices[i]), TRAIL)])
        made = Bad(int(o.digest[i]), given, int(o.completed[i]))
        old = self.by_digest.get(made.digest)
        if old is None or (len(made.given), made.given) < (len(old.given), old.given):
            self.by_digest[made.digest] = made

    def result(self) -> Explored:
        self.found.bad = sorted(
            self.by_digest.values(), key=lambda b: (b.completed, b.given, b.digest)
        )
        return self.found


def explore(
    p: Program, jobs: Sequence[int], scenario: Scenario, budget: Budget | None = None, seed: int = 0
) -> list[Explored]:
    """Explores the choices of the given jobs under a scenario, which says all but the choices.

    Recorded matches and completions are no choices: ``use_states`` and ``use_records`` are ignored.
    """
    budget = budget or Budget()
    until = None if budget.seconds is None else time.monotonic() + budget.seconds
    base = replace(scenario, use_states=False, use_records=False, chosen=True)
    all_ = [_Search(int(job), max(budget.scenarios, 1), seed) for job in jobs]
    enumerating = list(all_)
    sampling: list[_Search] = []
    while enumerating or sampling:
        if until is not None and time.monotonic() > until:
            for search in (*enumerating, *sampling):
                search.found.cut = "seconds"
            break
        plan: list[tuple[_Search, Scenario, bool]] = []
        for search in enumerating:
            # half of the budget is kept for a sample, should the choices be too many
            half = search.budget - search.found.runs - search.budget // 2
            few = search.enumerate(max(min(_BATCH, half), 0) or int(search.found.runs == 0))
            plan += [(search, s, True) for s in few]
        for search in sampling:
            plan += [(search, s, False) for s in search.sample(_BATCH)]
        if plan:
            rows = [replace(base, given=s.given, policy=s.policy, seed=s.seed) for _, s, _ in plan]
            cells = np.array([[search.found.job, k] for k, (search, _, _) in enumerate(plan)])
            o = outcomes(p, rows, cells, TRAIL)
            for k, (search, s, listed) in enumerate(plan):
                if listed:
                    search.note(s.given, o, k)
                else:
                    search.note_sample(s, o, k)
        still = [s for s in enumerating if not s.settled()]
        spent = [
            s for s in still
            if s.too_long or s.found.runs >= s.budget - s.budget // 2
        ]  # fmt: skip
        enumerating = [s for s in still if s not in spent]
        sampling = [s for s in (*sampling, *spent) if s.found.runs < s.budget]
    return [search.result() for search in all_]
