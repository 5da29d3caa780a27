"""Fingerprints: the same bug, the same fingerprint, whatever the job, the scale and the night.

Made of the kind, the reason and the call sites and operations at which it shows; never of ranks,
sizes, times, communicator ids or how many places it hit.
"""

from __future__ import annotations

import hashlib

from dl2gpu.analysis.finding import Finding
from dl2gpu.text import user_frame

__all__ = ["fingerprint"]


def fingerprint(f: Finding) -> str:
    """16 hexadecimal digits."""
    marks: set[str] = set(f.details.get("sides", ()))
    shown = list(f.hangs_at) if f.hangs_at else list(f.cycle)
    if f.first_divergence is not None and not shown:
        shown.append(f.first_divergence)
    for step in shown:
        if marks and f.kind == "mismatch":
            break
        if step["op"] == "wait":
            continue
        marks.add(f"{step['op']}@{user_frame(step['stack'])}")
    kind = f.details.get("kind", f.kind) if f.kind == "potential" else f.kind
    text = "\n".join([f.kind, str(kind), *sorted(marks)])
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
