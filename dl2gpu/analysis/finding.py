"""One finding, as the analysis makes it (DESIGN.md sections 5 and 10)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One finding about one job; the fields are those of the report (DESIGN.md section 10).

    ``deadlocked``: does this finding by itself keep the job from finishing (null: it does not say).
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
