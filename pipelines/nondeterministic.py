"""The nondeterministic suite: how probable a deadlock is, by buffer size and fusion count.

Programs whose probabilities are known by counting (``datasets/nondeterministic``) go through
``dl2gpu whatif``; each cell of the table has what was found, its interval, and what it should be.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

__all__ = ["Cell", "explored", "markdown", "picture", "write_csv"]

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "datasets" / "nondeterministic"
SAMPLES: Final = 2000
_INFINITE: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration of one program."""

    program: str
    about: str
    buffer: int
    fusion: int
    probability: float
    low: float
    high: float
    """Interval of 95 % (Wilson); both are the probability where every schedule was explored."""
    every: bool
    exact: Fraction

    @property
    def right(self) -> bool:
        """Does what was found agree with what is known?"""
        exact = float(self.exact)
        return self.low - 1e-12 <= exact <= self.high + 1e-12


def explored(folder: Path = FOLDER, samples: int = SAMPLES, seed: int = 1) -> list[Cell]:
    """All cells of all programs below ``folder``.

    Args:
        folder: a folder for each program: native traces, and ``exact.json``.
        samples: orders and schedules that are tried of each.
        seed: the same one gives the same cells.
    """
    from dl2gpu import whatif
    from dl2gpu.analysis.explore import Budget

    out = []
    for path in sorted(folder.glob("*/exact.json")):
        known = json.loads(path.read_text("utf-8"))
        exact = {(e["buffer"], e["fusion"]): Fraction(e["probability"]) for e in known["exact"]}
        buffers = sorted({b for b, _ in exact})
        axes = whatif.axes_of(
            buffer=",".join("inf" if b >= _INFINITE else str(b) for b in buffers),
            fusion=",".join(str(f) for f in sorted({f for _, f in exact})),
            orders=known["order"], matches=known["matches"], samples=samples,
        )  # fmt: skip
        result = whatif.run([str(path.parent)], axes, Budget(samples), seed)
        for row in result.rows.iter_rows(named=True):
            buffer = min(row["buffer"], _INFINITE)
            out.append(
                Cell(
                    path.parent.name, known["about"], buffer, int(row["fusion"]),
                    row["probability"], row["low"], row["high"], row["exact"],
                    exact[buffer, int(row["fusion"])],
                )
            )  # fmt: skip
    return out


def _size(buffer: int) -> str:
    if buffer >= _INFINITE:
        return "unlimited"
    return "0" if not buffer else f"{buffer / (1 << 20):g} MiB"


def _programs(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    out: dict[str, list[Cell]] = {}
    for cell in cells:
        out.setdefault(cell.program, []).append(cell)
    return out


def markdown(cells: Sequence[Cell]) -> str:
    """A table "buffer size x fusion count" for each program, and every cell that is wrong."""
    lines = []
    for name, mine in _programs(cells).items():
        fusions = sorted({c.fusion for c in mine})
        head = ["a channel buffers", *(f"{f} fused" if f > 1 else "none fused" for f in fusions)]
        lines += [f"**{name}**: {mine[0].about}.", "", "| " + " | ".join(head) + " |"]
        lines.append("|---|" + "---:|" * len(fusions))
        for buffer in sorted({c.buffer for c in mine}):
            row = {c.fusion: c for c in mine if c.buffer == buffer}
            lines.append(
                "| " + " | ".join([_size(buffer), *(_cell(row[f]) for f in fusions)]) + " |"
            )
        lines.append("")
    wrong = [
        f"- {c.program}, {_size(c.buffer)}, {c.fusion}: {_cell(c)}" for c in cells if not c.right
    ]
    lines += ["Cells in which the known probability lies outside the interval:", ""]
    return "\n".join([*lines, *(wrong or ["- none"]), ""])


def _cell(cell: Cell) -> str:
    if cell.every:
        return f"{cell.probability:.3f} (all schedules); known {float(cell.exact):.3f}"
    return (
        f"{cell.probability:.3f} [{cell.low:.3f}, {cell.high:.3f}]; known {float(cell.exact):.3f}"
    )


_COLUMNS: Final = (
    "program", "buffer_bytes", "fused", "probability", "low", "high", "all_schedules", "known",
)  # fmt: skip


def write_csv(cells: Sequence[Cell], path: Path) -> None:
    """One row a cell."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(_COLUMNS)
        for c in cells:
            buffer: Any = "inf" if c.buffer >= _INFINITE else c.buffer
            writer.writerow(
                [c.program, buffer, c.fusion, c.probability, c.low, c.high, c.every, str(c.exact)]
            )


def picture(cells: Sequence[Cell]) -> str:
    """The tables as squares, the darker the more probable (SVG)."""
    parts = []
    y = 10
    for name, mine in _programs(cells).items():
        fusions, buffers = sorted({c.fusion for c in mine}), sorted({c.buffer for c in mine})
        parts.append(f'<text x="10" y="{y + 14}" font-weight="bold">{name}</text>')
        for k, fusion in enumerate(fusions):
            parts.append(f'<text x="{140 + 60 * k}" y="{y + 32}">{fusion} fused</text>')
        for n, buffer in enumerate(buffers):
            top = y + 38 + 26 * n
            parts.append(f'<text x="130" y="{top + 16}" text-anchor="end">{_size(buffer)}</text>')
            for k, fusion in enumerate(fusions):
                (cell,) = (c for c in mine if (c.buffer, c.fusion) == (buffer, fusion))
                shade = round(255 - 150 * cell.probability)
                ink = "white" if cell.probability > 0.7 else "black"
                x, value = 138 + 60 * k, f"{cell.probability:.3f}"
                parts.append(
                    f'<rect x="{x}" y="{top}" width="56" height="22" '
                    f'fill="rgb({shade},{shade},255)" stroke="#889"/>'
                )
                parts.append(
                    f'<text x="{x + 28}" y="{top + 15}" text-anchor="middle" fill="{ink}">'
                    f"{value}</text>"
                )
        y += 50 + 26 * len(buffers)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="440" height="{y}" '
        'font-family="system-ui, sans-serif" font-size="11" role="img">'
        "<title>Probability of a deadlock by buffer size and fusion count</title>"
        '<rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"
