"""One finding, as the analysis makes it (DESIGN.md sections 5 and 10)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dl2gpu.analysis.roots import Cause
    from dl2gpu.analysis.waitfor import Graph

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One finding about one job; the fields are those of the report (DESIGN.md section 10).

    ``deadlocked``: does this finding by itself keep the job from finishing (null: it does not say).
    ``origin``: what it was made from, until its picture is drawn.
    """

    job: int
    kind: str
    evidence: str
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    cycle: tuple[dict[str, Any], ...] = ()
    first_divergence: dict[str, Any] | None = None
    hangs_at: tuple[dict[str, Any], ...] = ()
    reason: str | None = None
    condition: str | None = None
    probability: float | None = None
    details: dict[str, Any] = field(default_factory=dict)
    stopped_at_ns: int | None = None
    gpu_hours_lost: float | None = None
    fingerprint: str = ""
    advice: str = ""
    summary: str = ""
    deadlocked: bool | None = None
    origin: tuple[Graph, Cause] | None = field(default=None, repr=False, compare=False)
