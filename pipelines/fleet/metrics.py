"""Prometheus metrics of a run, as the text that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["exposition"]


def exposition(told: dict[str, Any], finished: float, seconds: float) -> str:
    """The text of the metrics.

    Args:
        told: the digest of the run.
        finished: when it was finished, seconds since the epoch.
        seconds: how long it took.
    """
    cost = told["cost"]
    open_groups = [g for g in told["groups"] if g["suppressed"] is None]
    by_status: dict[tuple[str, str], int] = {}
    for g in open_groups:
        by_status[g["status"], g["kind"]] = by_status.get((g["status"], g["kind"]), 0) + 1
    families: list[tuple[str, str, Iterable[tuple[dict[str, str], float]]]] = [
        ("last_success_timestamp_seconds", "When a run was last finished.", [({}, finished)]),
        ("duration_seconds", "How long it took.", [({}, seconds)]),
        (
            "jobs", "Jobs of the run by verdict.",
            [({"verdict": v}, n) for v, n in sorted(told["verdicts"].items())],
        ),
        ("deadlocked_jobs", "Jobs of the run that are deadlocked.", [({}, told["deadlocked"])]),
        (
            "files", "Files of the run by what became of them.",
            [({"status": s}, n) for s, n in sorted(told["files"].items())],
        ),
        (
            "fingerprints", "Fingerprints that are not suppressed, by status and kind.",
            [({"status": s, "kind": k}, n) for (s, k), n in sorted(by_status.items())],
        ),
        ("gpu_hours_lost", "GPU-hours lost by the run's jobs.", [({}, cost["gpu_hours"])]),
        (
            "gpu_hours_lost_by_team", "GPU-hours lost by the run's jobs, by team.",
            [({"team": t["team"]}, t["gpu_hours"]) for t in told["teams"]],
        ),
        (
            "gpu_hours_saved", "Of those, what an early notice would have saved.",
            [({}, cost["saved_gpu_hours"])],
        ),
    ]  # fmt: skip
    lines: list[str] = []
    for name, help_, samples in families:
        full = f"dl2gpu_nightly_{name}"
        lines += [f"# HELP {full} {help_}", f"# TYPE {full} gauge"]
        for labels, value in samples:
            text = ",".join(f'{k}="{_label(v)}"' for k, v in labels.items())
            lines.append(f"{full}{{{text}}} {value}" if text else f"{full} {value}")
    return "\n".join(lines) + "\n"


def _label(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
