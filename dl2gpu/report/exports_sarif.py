"""Findings as SARIF 2.1.0: code hosts show them at the lines where ranks wait.

A rule a kind, a result a finding. The location is where the sequences part, else where the ranks
hang; the circle is a code flow. Findings of one fault have one partial fingerprint, so that the
next upload knows them again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec

from dl2gpu import __version__
from dl2gpu.report.model import KINDS
from dl2gpu.report.words import DEADLOCKS, MEANING, operation, place, ranks, safe
from dl2gpu.text import user_frame

__all__ = ["sarif"]

SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_FRAME: Final = re.compile(r"(?:(\S+) )?(\S.*):(\d{1,9})")
_PLACES: Final = 10
_STEPS: Final = 64
_LEVELS: Final = {"crashed_rank": "warning", "stalled_rank": "warning", "in_flight": "warning",
                  "potential": "warning", "insufficient_evidence": "note"}  # fmt: skip


def sarif(findings: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """One run of all findings; ``labels`` are the names of their jobs by finding id."""
    kinds = [k for k in KINDS if k != "healthy"]
    rules = [
        {
            "id": kind,
            "name": "".join(part.capitalize() for part in kind.split("_")),
            "shortDescription": {"text": MEANING[kind]},
            "defaultConfiguration": {"level": _LEVELS.get(kind, "error")},
        }
        for kind in kinds
    ]
    run = {
        "tool": {"driver": {"name": "dl2gpu", "semanticVersion": __version__, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(f, labels.get(f["id"], ""), kinds) for f in findings],
    }
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return msgspec.json.format(msgspec.json.encode(log), indent=1).decode() + "\n"


def _result(f: Mapping[str, Any], label: str, kinds: Sequence[str]) -> dict[str, Any]:
    kind = f["kind"]
    text = f"{label}: {safe(f['summary'] or MEANING.get(kind, ''), 2000)}"
    advice = f" {safe(f['advice'], 2000)}" if f["advice"] else ""
    out: dict[str, Any] = {
        "ruleId": safe(kind, 60),
        "level": _LEVELS.get(kind, "error" if kind in DEADLOCKS else "note"),
        "message": {"text": text + advice},
        "locations": _locations(f)[:_PLACES],
        "properties": {
            "job": label,
            "finding": safe(f["id"], 40),
            "evidence": f["evidence"],
            "culprits": list(f["culprits"] or ()),
        },
    }
    if kind in kinds:
        out["ruleIndex"] = kinds.index(kind)
    if f["fingerprint"]:
        out["partialFingerprints"] = {"dl2gpu/v1": safe(f["fingerprint"], 80)}
    related = _locations(f)[_PLACES : 2 * _PLACES]
    if related:
        out["relatedLocations"] = related
    flow = list(_flow(f))
    if flow:
        out["codeFlows"] = [{"threadFlows": [{"locations": flow}]}]
    return out


def _locations(f: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Distinct call sites, the first divergence before where it hangs."""
    seen: dict[tuple[str, int], tuple[str, list[int]]] = {}
    first = f["first_divergence"]
    for op in ([first] if first else []) + (f["hangs_at"] or []) + (f["cycle"] or []):
        site = _site(op["stack"])
        if site is not None:
            seen.setdefault(site, (operation(op), []))[1].append(op["rank"])
    return [_location(site, f"{ranks(who)[:200]}: {op}") for site, (op, who) in seen.items()]


def _site(stack: Sequence[str] | None) -> tuple[str, int] | None:
    """(file, line) of the innermost frame of the program; None where it names no line."""
    hit = _FRAME.fullmatch(user_frame(stack))
    if hit is None or not 0 < int(hit[3]) < 1 << 31:
        return None
    return hit[2], int(hit[3])


def _location(site: tuple[str, int], message: str) -> dict[str, Any]:
    path, line = site
    return {
        "physicalLocation": {"artifactLocation": _artifact(path), "region": {"startLine": line}},
        "message": {"text": message},
    }


def _artifact(path: str) -> dict[str, str]:
    """A path as a URI; one that is not absolute is of the sources."""
    uri = quote(path.replace("\\", "/"), safe="/._-~", errors="replace")
    if uri.startswith("/"):
        return {"uri": f"file:///{uri.lstrip('/')}"}
    return {"uri": uri, "uriBaseId": "%SRCROOT%"}


def _flow(f: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for step in (f["cycle"] or [])[:_STEPS]:
        site = _site(step["stack"])
        if site is not None:
            yield {"location": _location(site, place(step))}
