"""A finding as Markdown, for a ticket. What comes from a trace stays text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from dl2gpu.report.graph_model import details_of, picture_of
from dl2gpu.report.words import EVIDENCE, call_site, operation, place, ranks, safe, utc

__all__ = ["ticket"]

_STEPS: Final = 12
_GROUPS: Final = 8
_RANKS: Final = 200


def ticket(f: Mapping[str, Any], label: str) -> str:
    """Title, summary, facts, the circle, where it parts and hangs, what to do."""
    return "\n".join(_lines(f, label)) + "\n"


def plain(text: object, limit: int = 600) -> str:
    """Text in which nothing is Markdown or HTML, and nobody is mentioned."""
    out = re.sub(r"([\\`*_{}\[\]<>|~&])", r"\\\1", safe(text, limit))
    out = re.sub(r"^(\s*)([-+#=]|\d+[.)])", r"\1\\\2", out)
    return out.replace("@", "@\N{ZERO WIDTH SPACE}")


def code(text: object, limit: int = 200) -> str:
    """A code span; it may hold backticks."""
    inner = safe(text, limit)
    longest = max((len(run) for run in re.findall("`+", inner)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if inner.startswith("`") or inner.endswith("`") or not inner else ""
    return f"{fence}{pad}{inner}{pad}{fence}"


def _lines(f: Mapping[str, Any], label: str) -> Iterator[str]:
    kind = safe(f["kind"] or "finding", 40).replace("_", " ")
    yield f"## {plain(kind[:1].upper() + kind[1:])} in {code(label)}"
    yield ""
    if f["summary"]:
        yield from (plain(f["summary"], 2000), "")
    yield f"- **Named as a cause:** {_ranks(f['culprits'], 'no rank')}"
    if f["victims"]:
        yield f"- **Victims:** {_ranks(f['victims'])}"
    if f["reason"]:
        yield f"- **Reason:** {plain(safe(f['reason']).replace('_', ' '))}"
    if f["condition"]:
        yield f"- **Condition:** {plain(f['condition'])}"
    if f["stopped_at_ns"] is not None:
        lost = f", {f['gpu_hours_lost']:.3g} GPU-hours lost since" if f["gpu_hours_lost"] else ""
        yield f"- **Progress stopped:** {plain(utc(f['stopped_at_ns']))}{lost}"
    evidence = EVIDENCE.get(f["evidence"] or "", f["evidence"] or "not said")
    yield f"- **Evidence:** {plain(evidence)}"
    if f["fingerprint"]:
        yield f"- **Fingerprint:** {code(f['fingerprint'])} (finding {code(f['id'], 40)})"
    cycle = f["cycle"] or []
    if cycle:
        yield from ("", "### The circle", "")
        for i, step in enumerate(cycle[:_STEPS], 1):
            yield f"{i}. {plain(place(step))}{_at(step)}"
        if len(cycle) > _STEPS:
            yield f"\n... and {len(cycle) - _STEPS} more places"
    if f["first_divergence"] is not None:
        first = f["first_divergence"]
        yield from ("", "### Where the sequences part", "")
        number = f", operation {first['seq']}" if first.get("seq") is not None else ""
        yield f"Rank {first['rank']}{number}: {code(operation(first))}{_at(first)}"
    boxes = [b for b in picture_of(f, details_of(f)).boxes if b.role != "cycle"]
    if boxes:
        yield from ("", "### Who waits", "")
        yield from (f"- {plain(b.title)}: {code(b.text)}" for b in boxes[:_GROUPS])
        if len(boxes) > _GROUPS:
            yield f"- ... and {len(boxes) - _GROUPS} more groups"
    if f["advice"]:
        yield from ("", "### What to do", "", plain(f["advice"], 2000))


def _ranks(numbers: Any, none: str = "none") -> str:
    text = ranks(numbers, none)
    if len(text) > _RANKS:
        text = f"{text[:_RANKS].rsplit(',', 1)[0]}, ... ({len(set(numbers)):,} in all)"
    return text


def _at(op: Mapping[str, Any]) -> str:
    site = call_site(op["stack"])
    return f" at {code(site)}" if site else ""
