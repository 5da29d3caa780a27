"""One finding in full: the cycle step by step, call sites, signatures, last operations, advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import polars as pl
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from dl2gpu.report.console import COLOURS, facts, grid, job_labels
from dl2gpu.report.graph_model import Picture, details_of, picture_of
from dl2gpu.report.model import Report
from dl2gpu.report.save import ReportError, canonical, gravity
from dl2gpu.report.words import MEANING, fold, operation, place, ranks, safe

__all__ = ["choose", "explain"]

_LAST: Final = "last_operations"
_DRAWN: Final = ("graph", "timeline")
_RANKS: Final = 64  # ranks whose last operations are listed
_DEPTH: Final = 6
_VALUES: Final = 32  # numbers of one list
_LINES: Final = 400


def choose(report: Report, finding: str | None) -> dict[str, Any]:
    """The finding with this id, or with the only id that begins so; without one, the gravest.

    Raises:
        ReportError: there is none, or there are several.
    """
    findings = report.findings.sort(gravity("kind"), "job", "attempt", "id").to_dicts()
    if not findings:
        raise ReportError("expected a finding, found none: every job in this report is healthy")
    if finding is None:
        return findings[0]
    named = [f for f in findings if f["id"] == finding]
    begun = named or [f for f in findings if f["id"].startswith(finding) or f["job"] == finding]
    if len(begun) == 1:
        return begun[0]
    known = ", ".join(safe(f["id"], 40) for f in (begun or findings)[:8])
    more = ", ..." if len(begun or findings) > 8 else ""
    found = f"found {len(begun)}" if begun else "found none"
    raise ReportError(
        f"expected one finding {safe(finding, 80)!r}, {found}; choose one of: {known}{more}"
    )


def explain(report: Report, finding: str | None = None) -> RenderableType:
    """Everything the report knows of one finding, and the ids of the others."""
    report = canonical(report)
    f = choose(report, finding)
    labels = job_labels(report)
    title = Text(labels.get(f["id"], ""), style="bold")
    title.append(": ")
    title.append(safe(f["kind"], 40), style=COLOURS.get(f["kind"], ""))
    title.append(f"  [{safe(f['id'], 40)}]", style="dim")
    parts: list[RenderableType] = [title]
    if f["kind"] in MEANING:
        parts.append(_indent(Text(MEANING[f["kind"]], style="dim")))
    if f["summary"]:
        parts += [Text(), _indent(Text(safe(f["summary"], 2000)))]
    parts += [Text(), _indent(grid(_facts(f)))]
    details = msgspec.json.decode(f["details"]) if f["details"] else {}
    picture = picture_of(f, details_of(f))
    last = details.pop(_LAST, None) if isinstance(details, dict) else None
    if isinstance(details, dict):
        details = {k: v for k, v in details.items() if k not in _DRAWN}
    for heading, body in (
        ("who waits for whom", _picture(picture)),
        ("cycle, step by step", _cycle(f["cycle"] or [])),
        ("where the sequences part", _stacks([f["first_divergence"]])),
        ("where it hangs", _stacks(f["hangs_at"] or [])),
        ("details", _tree(details)),
        ("last operations of each rank", _last(last)),
    ):
        lines = list(body)
        if len(lines) > _LINES:
            left = len(lines) - _LINES
            lines = [*lines[:_LINES], f"... and {left} more lines in report.json"]
        if lines:
            parts += [Text(), Text(heading, style="bold"), _indent(Text("\n".join(lines)))]
    if f["fingerprint"]:
        same = [
            labels.get(g["id"], "")
            for g in report.findings.to_dicts()
            if g["fingerprint"] == f["fingerprint"] and g["id"] != f["id"]
        ]
        also = f"; also in {', '.join(dict.fromkeys(same))}" if same else ""
        parts += [Text(), Text(f"fingerprint {safe(f['fingerprint'], 80)}{also}")]
    if finding is None and report.findings.height > 1:
        parts += [Text(), Text("other findings", style="bold"), _indent(grid(_others(report, f)))]
    return Group(*parts)


def _indent(body: RenderableType) -> Padding:
    return Padding(body, (0, 0, 0, 2), expand=False)


def _facts(f: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The short facts; what has a section of its own below is left to it."""
    yield from facts({**f, "cycle": [], "hangs_at": [], "first_divergence": None})


def _picture(picture: Picture) -> Iterator[str]:
    """A line a group of places that stand alike, with whom it needs."""
    for i, box in enumerate(picture.boxes):
        needs = [picture.boxes[b].title for a, b in picture.edges if a == i]
        yield box.text + (f"  -> {', '.join(needs)}" if needs else "")


def _cycle(cycle: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for i, node in enumerate(cycle, 1):
        yield f"{i}. {place(node, numbered=True)}"
        yield from (f"     {safe(frame)}" for frame in node["stack"] or [])
    if cycle:
        yield f"   and so back to rank {cycle[0]['rank']}"


def _stacks(operations: Sequence[Mapping[str, Any] | None]) -> Iterator[str]:
    """Ranks that stand in the same operation with the same stack are one entry."""
    together: dict[tuple[str, tuple[str, ...]], list[tuple[int, int | None]]] = {}
    for op in operations:
        if op is not None:
            key = (operation(op), tuple(op["stack"] or ()))
            together.setdefault(key, []).append((op["rank"], op["seq"]))
    for (words, stack), members in together.items():
        number = members[0][1]
        seq = f", operation {number}" if len(members) == 1 and number is not None else ""
        yield f"{ranks([rank for rank, _ in members])}{seq}: {words}"
        yield from (f"  {safe(frame)}" for frame in stack)


def _last(last: object) -> Iterator[str]:
    """``details["last_operations"]``: {rank: [operation, ...]} with the newest last."""
    if not isinstance(last, dict):
        yield from _tree(last)
        return
    by_rank = sorted(last.items(), key=lambda kv: (len(kv[0]), kv[0]))  # ranks as numbers
    for rank, operations in by_rank[:_RANKS]:
        yield f"rank {safe(rank, 20)}"
        for op in operations if isinstance(operations, list) else [operations]:
            yield f"  {_line(op)}"
    if len(by_rank) > _RANKS:
        yield f"... and {len(by_rank) - _RANKS} more ranks in report.json"


def _line(op: object) -> str:
    if not isinstance(op, dict):
        return safe(op)
    seq = f"{op['seq']:>6}  " if isinstance(op.get("seq"), int) else ""
    rest = {
        k: v
        for k, v in op.items()
        if k not in {"rank", "seq", "op", "comm", "ordinal", "stack"} and v is not None
    }
    extra = "".join(f"  {safe(k, 40)} {_flat(v)}" for k, v in rest.items())
    return f"{seq}{operation(op)}{extra}"


def _flat(value: object, key: str = "") -> str:
    """Plain values on one line; a list of ranks is folded, a flat object is "key value, ..."."""
    if isinstance(value, list) and value and all(type(v) is int for v in value):
        if key.endswith("ranks"):
            return fold(value)
        more = f", ... ({len(value)} in all)" if len(value) > _VALUES else ""
        return f"[{', '.join(map(str, value[:_VALUES]))}{more}]"
    if isinstance(value, dict) and not any(_nested(v) for v in value.values()):
        return ", ".join(f"{safe(k, 80)} {_flat(v, k)}" for k, v in value.items())
    if isinstance(value, dict | list):
        return safe(msgspec.json.encode(value).decode(), 1000)
    return "unknown" if value is None else safe(value)


def _tree(value: object, depth: int = 0) -> Iterator[str]:
    """Nested details, two spaces a level; a level of plain values is one line each."""
    pad = "  " * depth
    if isinstance(value, dict):
        for key, inner in value.items():
            if depth < _DEPTH and inner and (isinstance(inner, dict) or _nested(inner)):
                yield f"{pad}{safe(key, 80)}:"
                yield from _tree(inner, depth + 1)
            else:
                yield f"{pad}{safe(key, 80)}: {_flat(inner, key)}"
    elif isinstance(value, list):
        yield from (f"{pad}- {_flat(inner)}" for inner in value)
    elif value is not None:
        yield f"{pad}{_flat(value)}"


def _nested(value: object) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(v, dict | list) for v in inner)


def _others(report: Report, shown: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    labels = job_labels(report)
    rest = report.findings.filter(pl.col("id") != shown["id"]).sort(gravity("kind"), "job", "id")
    for g in rest.head(40).iter_rows(named=True):
        yield safe(g["id"], 40), f"{labels.get(g['id'], '')}: {safe(g['kind'], 40)}"
    if rest.height > 40:
        yield "", f"... and {rest.height - 40} more"
