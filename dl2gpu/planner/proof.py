"""Is the program of a plan free of deadlock? The analysis of a scan says."""

from __future__ import annotations

from dataclasses import dataclass

from dl2gpu.planner.lower import lower
from dl2gpu.planner.plan import Plan
from dl2gpu.trace.schema import Trace

__all__ = ["Proof", "prove"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What the analysis found in all scenarios: no buffers, one queue a device, whole batches."""

    verdict: str
    """``healthy``, or the kind of the gravest finding."""
    why: tuple[str, ...]
    """A line for each finding."""
    operations: int
    trace: Trace

    @property
    def healthy(self) -> bool:
        """Does it run to its end in every scenario?"""
        return self.verdict == "healthy"


def prove(plan: Plan) -> Proof:
    """Lowers a plan and analyses its program.

    Raises:
        ScheduleError: the schedule cannot be carried out; says which stage waits for what.
    """
    from dl2gpu.analysis.verdict import analyse

    trace = lower(plan)
    result = analyse(trace)
    why = tuple(str(f.get("summary") or f["kind"]) for f in result.findings)
    return Proof(str(result.jobs["verdict"][0]), why, trace.events.height, trace)
