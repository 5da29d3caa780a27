"""What-if results: per job a table "configuration x probability of deadlock"; JSON, Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dl2gpu.analysis.rewrite import ORDERS
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.analysis.scenarios import bytes_text
from dl2gpu.analysis.whatif import ROWS, Witness
from dl2gpu.report.words import safe
from dl2gpu.text import pairs_text
from dl2gpu.trace.files import whole_file

__all__ = ["SCHEMA", "Result", "load_witness", "saved", "table", "to_json"]

SCHEMA: Final = "dl2gpu.whatif/1"

_KEYS: Final = ("fusion", "order", "matches", "queues", "eager", "messages", "buffer", "pool")


@dataclass(frozen=True)
class Result:
    """What-ifs of a corpus.

    Attributes:
        rows: as :attr:`WhatIf.rows`, with the job's label in place of its number.
        safe: smallest safe buffers, as JSON has them.
        witnesses: {number, job, ...}, as :meth:`Witness.plain` has them.
        notes: what the result leaves out, and why.
    """

    rows: pl.DataFrame
    safe: list[dict[str, Any]]
    witnesses: list[dict[str, Any]]
    notes: list[str]


def size_text(n: int) -> str:
    """0, 4 KiB, inf."""
    if n >= Scenario.INFINITE:
        return "inf"
    return bytes_text(n) if n else "0"


def table(result: Result) -> RenderableType:
    """The tables of all jobs; columns are those in which configurations differ."""
    parts: list[RenderableType] = []
    varied = [k for k in _KEYS if result.rows[k].n_unique() > 1]
    for (job,), rows in result.rows.group_by("job", maintain_order=True):
        parts += [Text(safe(job, 200), style="bold"), _of_job(rows, varied)]
        parts += [Text(line) for line in _safe_lines(str(job), result)]
        parts.append(Text())
    for note in result.notes:
        parts.append(Text(f"note: {safe(note)}", style="yellow"))
    used = [o for o in result.rows["order"].unique().sort() if o != "recorded"]
    parts += [Text(f"order {o}: {ORDERS[o]}", style="dim") for o in used if o in ORDERS]
    return Group(*parts)


def _of_job(rows: pl.DataFrame, varied: list[str]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in varied or ["configuration"]:
        out.add_column(name, justify="right")
    mixed = bool((rows["mismatch"] > 0).any())
    for name in ("deadlock", "of", *(["mismatch"] if mixed else []), "witness"):
        out.add_column(name, justify="right")
    for row in rows.iter_rows(named=True):
        cells = [_value(name, row[name]) for name in varied] or ["as it is"]
        bad = row["probability"] > 0 or row["deadlocks"] > 0
        share = Text(_share(row), style="red" if bad else "green")
        extra = [f"{row['mismatch']:.0%}"] if mixed else []
        number = "" if row["witness"] is None else f"#{row['witness']}"
        out.add_row(*cells, share, _of(row), *extra, number)
    return out


def _value(name: str, value: Any) -> str:
    if name in ("eager", "buffer", "pool"):
        return size_text(value)
    if name == "queues":
        return str(value) if value else "all independent"
    return safe(value, 40)


def _share(row: dict[str, Any]) -> str:
    if row["exact"] or row["low"] == row["high"]:
        return f"{row['probability']:.4g}"
    text = f"{row['probability']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
    if row["deadlocks"] and not row["probability"]:
        text += ", one was found"
    return text


def _of(row: dict[str, Any]) -> str:
    many = row["schedules"]
    if row["exact"]:
        return "1 schedule" if many == 1 else f"all {many} schedules"
    return f"{many} orders tried" if row["order"] != "recorded" else f"{many} schedules sampled"


def _safe_lines(job: str, result: Result) -> Iterator[str]:
    for s in result.safe:
        if s["job"] != job:
            continue
        room, eager = s["channel_unsafe"], s["eager_unsafe"]
        if any(spans is None or len(spans) != 1 or spans[0][0] for spans in (room, eager)):
            yield from _spans_lines(room, eager)
            continue
        if s["channel_bytes"] is None:
            yield "No buffer prevents it."
            continue
        where = f" between {pairs_text(s['channels'])}" if s["channels"] else ""
        yield (
            f"Deadlocks when fewer than {bytes_text(s['channel_bytes'])} are buffered{where}; "
            f"as an eager threshold: {bytes_text(s['eager_bytes'])}."
            if s["eager_bytes"] is not None
            else f"Deadlocks when fewer than {bytes_text(s['channel_bytes'])} are buffered{where}."
        )


def _spans_lines(room: list[list[int]] | None, eager: list[list[int]] | None) -> Iterator[str]:
    """Of a job whose wildcards may take other messages where more is buffered."""
    for what, spans in (("a channel that buffers", room), ("an eager threshold of", eager)):
        if spans is None:
            continue
        if not spans:
            yield f"No deadlock with {what} any size."
            continue
        said = [
            f"fewer than {bytes_text(below)}" if not first and below > 0
            else "any size" if not first
            else f"{bytes_text(first)} or more" if below < 0
            else f"{bytes_text(first)} to below {bytes_text(below)}"
            for first, below in spans
        ]  # fmt: skip
        yield f"Deadlocks with {what} {', or '.join(said)}."


def to_json(result: Result) -> bytes:
    """The result as one JSON document."""
    body = {
        "schema": SCHEMA,
        "rows": result.rows.to_dicts(),
        "safe_buffers": result.safe,
        "witnesses": result.witnesses,
        "notes": result.notes,
    }
    return msgspec.json.encode(body) + b"\n"


def saved(result: Result, folder: Path) -> None:
    """Writes ``whatif.json`` and ``whatif.parquet``, each as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / "whatif.json") as name:
        Path(name).write_bytes(to_json(result))
    with whole_file(folder / "whatif.parquet") as name:
        result.rows.write_parquet(name)


def load_witness(file: Path, number: int | None) -> tuple[str, Witness]:
    """(job, witness) of a saved result; without a number the first one.

    Raises:
        ValueError: the file is no such result, or has no such witness.
    """
    try:
        found = msgspec.json.decode(file.read_bytes())
        known = {w["number"]: w for w in found["witnesses"]}
    except (msgspec.DecodeError, TypeError, KeyError) as e:
        raise ValueError(f"{file}: expected what whatif --out writes, found {e}") from None
    if not known:
        raise ValueError(f"{file}: expected a witness, found none: no configuration deadlocks")
    chosen = min(known) if number is None else number
    if chosen not in known:
        raise ValueError(f"{file}: expected a witness from 0 to {max(known)}, found {chosen}")
    plain = {k: v for k, v in known[chosen].items() if k not in ("number", "job")}
    return str(known[chosen]["job"]), Witness.of(plain)


def rows_schema() -> dict[str, pl.DataType]:
    """Columns of the table."""
    return ROWS | {"job": pl.String()}
