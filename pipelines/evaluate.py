"""The research evaluation: labelled suites, scanned, and how often the verdict is right.

    python -m pipelines.evaluate --out evaluation [--suite live] [--peer /path/to/torchfrtrace]

Prints one table and writes it as Markdown and CSV, with plots and with every miss by name. Suites
lie in the repository (``datasets/live``, the logs of ``tests/data``), in the labelled data beside
the checkout where those are there, and one is generated. Each analyzer runs in a process of its
own, so that time and memory are its own.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer

from pipelines import nondeterministic

__all__ = ["Job", "Outcome", "Row", "Suite", "judged", "main", "rows", "suites"]

ROOT: Final = Path(__file__).resolve().parents[1]


# --------------------------------------------------------------------------------------------------
# Suites


@dataclass(frozen=True)
class Job:
    """A labelled job of a suite.

    ``deadlock``: True, False, or None where the record does not settle it.
    """

    name: str
    model: str
    deadlock: bool | None
    kinds: tuple[str, ...]
    must_not: tuple[str, ...]
    culprits: frozenset[int] | None
    """Exactly these ranks are named; None: not said."""
    including: frozenset[int]
    excluding: frozenset[int]
    circle: bool = False
    """Where it is told as a circle, all of its ranks may be named, those of ``culprits`` among
    them."""


@dataclass(frozen=True)
class Suite:
    """A folder that is scanned once, and the labels of the jobs below it."""

    name: str
    folder: Path
    jobs: tuple[Job, ...]


def suites(
    shared: Path | None,
    fleet: Path | None = None,
    models: Path | None = None,
    wanted: Sequence[str] = (),
) -> list[Suite]:
    """All suites that are there.

    Args:
        shared: folder of the labelled data beside the checkout; None: there is none.
        fleet: folder for a generated fleet; None: none is made.
        models: folder for the generated suites of datasets/suites; None: none is made.
        wanted: names of suites; of others none is generated. Nothing: all are.
    """
    found = [
        ("live", ROOT / "datasets" / "live" / "traces", ""),
        ("logs", ROOT / "tests" / "data" / "logs", ""),
    ]
    if shared is not None:
        found += [
            ("cases", shared / "cases", ""),
            ("Flight Recorder", shared / "rendered", r"__frj?\d"),
            ("Kineto", shared / "rendered", r"__kineto"),
            ("execution traces", shared / "rendered", r"__(et\d|chakra)"),
            ("gloo", shared / "data" / "live" / "native", ""),
        ]
    out = [Suite(name, folder, tuple(_labels(folder, form))) for name, folder, form in found]
    if fleet is not None:
        out.append(_fleet(fleet))
    if models is not None:
        names = {name.partition(",")[0] for name in wanted}
        for path in sorted((ROOT / "datasets" / "suites").glob("*.toml")):
            if not wanted or path.stem in names:
                out += _models(path, models / path.stem)
    return [s for s in out if s.jobs]


def _models(definition: Path, folder: Path) -> list[Suite]:
    """A generated suite, as one for each form of its files."""
    import polars as pl

    command = [sys.executable, "-m", "dl2gpu", "generate", "suite", str(definition), str(folder)]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - of this program
    by_form: dict[str, list[Job]] = {}
    for r in pl.read_parquet(folder / "labels.parquet").to_dicts():
        everybody, suspects = frozenset(range(r["ranks"])), r["suspects"]
        by_form.setdefault(r["form"], []).append(
            Job(
                r["job"], r["model"], r["deadlocked"], tuple(r["kinds"]), (),
                None if r["culprits"] is None else frozenset(r["culprits"]), frozenset(),
                frozenset() if suspects is None else everybody - frozenset(suspects), circle=True,
            )
        )  # fmt: skip
    forms = {"parquet": "", "fr": ", Flight Recorder", "kineto": ", Kineto"}
    return [
        Suite(f"{definition.stem}{forms[form]}", folder / form, tuple(jobs))
        for form, jobs in sorted(by_form.items(), reverse=True)
    ]  # fmt: skip


def _labels(folder: Path, form: str) -> Iterator[Job]:
    for path in sorted(folder.rglob("expect.json")):
        name = path.parent.relative_to(folder).as_posix()
        if not re.search(form, name):
            continue
        label = json.loads(path.read_text("utf-8"))
        deadlock = label.get("deadlock", "conditional")
        exact = label.get("culprits")
        yield Job(
            name, label.get("model") or "", deadlock if isinstance(deadlock, bool) else None,
            tuple(label.get("kinds") or ()), tuple(label.get("must_not") or ()),
            None if exact is None else frozenset(exact),
            frozenset(label.get("culprits_must_include") or ()),
            frozenset(label.get("culprits_must_not_include") or ())
            | frozenset(label.get("victims") or ()),
        )  # fmt: skip


_FLEET_JOBS: Final = 400
_FLEET_EVENTS: Final = 2_000_000


def _fleet(folder: Path) -> Suite:
    import polars as pl

    command = [sys.executable, "-m", "dl2gpu", "generate", "fleet", str(folder), "--seed", "11"]
    # in a process of its own: what this one takes would count as its children's
    size = ["--jobs", str(_FLEET_JOBS), "--events", str(_FLEET_EVENTS)]
    subprocess.run([*command, *size], check=True, capture_output=True)  # noqa: S603 - as above
    rows = pl.read_parquet(folder / "labels.parquet").to_dicts()
    jobs = tuple(
        Job(
            r["job"], "fleet", r["deadlocked"], (r["verdict"],), (), None,
            frozenset(r.get("culprits") or ()), frozenset(),
        )
        for r in rows
    )  # fmt: skip
    return Suite("fleet", folder, jobs)


# --------------------------------------------------------------------------------------------------
# Analyzers


@dataclass(frozen=True)
class Said:
    """What an analyzer says of one job."""

    deadlocked: bool | None
    kinds: frozenset[str] = frozenset()
    culprits: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Ran:
    """An analyzer on a suite."""

    said: dict[str, Said]
    seconds: float
    megabytes: float


def _timed(command: Sequence[str]) -> tuple[str, float, float]:
    """Output, seconds, and peak memory in MB of a command."""
    began = time.perf_counter()
    with subprocess.Popen(  # noqa: S603 - commands of this program
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return text, time.perf_counter() - began, usage.ru_maxrss / 1e3


def ours(suite: Suite) -> Ran:
    """``dl2gpu scan`` on the whole suite."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report"
        command = [sys.executable, "-m", "dl2gpu", "scan", str(suite.folder), "--quiet"]
        text, seconds, megabytes = _timed([*command, "--out", str(out)])
        try:
            report = json.loads((out / "report.json").read_bytes())
        except OSError as e:
            raise RuntimeError(f"{suite.name}: the scan failed: {text[-500:]}") from e
    by_id = {f["id"]: f for f in report["findings"]}
    said: dict[str, Said] = {}
    for job in suite.jobs:
        mine = [
            j for j in report["jobs"]
            if job.name in (j["folder"], j["job"]) or j["folder"].startswith(f"{job.name}/")
        ]  # fmt: skip
        if not mine:
            continue
        findings = [by_id[i] for j in mine for i in j["findings"]]
        verdicts = [j["deadlocked"] for j in mine]
        said[job.name] = Said(
            True if True in verdicts else None if None in verdicts else False,
            frozenset({f["kind"] for f in findings} | {j["verdict"] for j in mine}),
            frozenset(r for f in findings for r in f["culprits"] or ()),
        )
    return Ran(said, seconds, megabytes)


def torchfrtrace(suite: Suite, program: str) -> Ran:
    """PyTorch's own analyzer on the jobs of a suite that are Flight Recorder pickles.

    It names no kinds; a job counts as deadlocked where it reports a collective with errors.
    """
    said: dict[str, Said] = {}
    seconds, megabytes = 0.0, 0.0
    for job in suite.jobs:
        folder = suite.folder / job.name
        dumps = sorted(p.name for p in folder.iterdir() if p.name != "expect.json")
        if any(name.endswith((".json", ".gz")) for name in dumps):
            continue
        prefix = re.sub(r"\d+$", "", dumps[0])
        text, took, peak = _timed([program, str(folder), "-p", prefix])
        seconds += took
        megabytes = max(megabytes, peak)
        if "Traceback (most recent call last)" in text:
            said[job.name] = Said(None)
        else:
            culprits = frozenset(int(r) for r in re.findall(r"Culprit rank (\d+)", text))
            said[job.name] = Said("has errors" in text, culprits=culprits)
    return Ran(said, seconds, megabytes)


# --------------------------------------------------------------------------------------------------
# Judgement


@dataclass(frozen=True)
class Outcome:
    """Of one job: what was right. None where the label does not say, or the analyzer cannot."""

    job: Job
    said: Said | None
    deadlock: str | None
    """tp, fp, tn, fn."""
    kind: bool | None
    culprits: bool | None

    @property
    def missed(self) -> str | None:
        """What is wrong, in words."""
        if self.said is None:
            return "not in the report"
        wrong = []
        if self.deadlock in ("fp", "fn"):
            wrong.append(f"deadlocked {self.said.deadlocked}, expected {self.job.deadlock}")
        if self.kind is False:
            found = ", ".join(sorted(self.said.kinds))
            wrong.append(f"kinds {found}, expected one of {', '.join(self.job.kinds)}")
        if self.culprits is False:
            wrong.append(f"culprits {sorted(self.said.culprits)}")
        return "; ".join(wrong) or None


_CIRCLES: Final = frozenset({"cycle", "order_inversion", "init_cycle"})


def judged(job: Job, said: Said | None, *, names_kinds: bool = True) -> Outcome:
    """Holds what an analyzer says of a job against its label."""
    if said is None:
        return Outcome(job, None, None if job.deadlock is None else "fn" if job.deadlock else "tn",
                       None, None)  # fmt: skip
    deadlock = None
    if job.deadlock is not None:
        positive = said.deadlocked is True
        deadlock = {(True, True): "tp", (False, True): "fp", (True, False): "fn"}.get(
            (job.deadlock, positive), "tn"
        )
    kind = None
    if names_kinds and job.kinds:
        kind = bool(said.kinds & set(job.kinds)) and not said.kinds & set(job.must_not)
    culprits = None
    if names_kinds or said.culprits:
        wrong = said.culprits & job.excluding
        if job.circle and said.kinds & _CIRCLES:
            culprits = (job.culprits or frozenset()) <= said.culprits
        elif job.culprits is not None:
            culprits = said.culprits == job.culprits
        elif job.including or wrong or job.circle:
            culprits = job.including <= said.culprits and not wrong
    return Outcome(job, said, deadlock, kind, culprits)


@dataclass
class Row:
    """A line of the table: a suite (or a model of it) and an analyzer."""

    suite: str
    model: str
    analyzer: str
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float | None = None
    megabytes: float | None = None

    def count(self, what: str) -> int:
        return sum(o.deadlock == what for o in self.outcomes)

    @staticmethod
    def _share(good: int, of: int) -> float | None:
        return good / of if of else None

    @property
    def precision(self) -> float | None:
        return self._share(self.count("tp"), self.count("tp") + self.count("fp"))

    @property
    def recall(self) -> float | None:
        return self._share(self.count("tp"), self.count("tp") + self.count("fn"))

    @property
    def kinds(self) -> float | None:
        known = [o.kind for o in self.outcomes if o.kind is not None]
        return self._share(sum(known), len(known))

    @property
    def culprits(self) -> float | None:
        known = [o.culprits for o in self.outcomes if o.culprits is not None]
        return self._share(sum(known), len(known))


def rows(suite: Suite, analyzer: str, ran: Ran) -> list[Row]:
    """The row of a suite, and one for each of its models where it has several."""
    names_kinds = analyzer == "dl2gpu"
    jobs = suite.jobs if names_kinds else [j for j in suite.jobs if j.name in ran.said]
    outcomes = [judged(j, ran.said.get(j.name), names_kinds=names_kinds) for j in jobs]
    whole = Row(suite.name, "", analyzer, outcomes, ran.seconds, ran.megabytes)
    models = sorted({o.job.model for o in outcomes})
    if len(models) < 2:
        return [whole]
    return [whole, *(
        Row(suite.name, m or "(no model)", analyzer, [o for o in outcomes if o.job.model == m])
        for m in models
    )]  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Output

_COLUMNS: Final = (
    "suite", "model", "analyzer", "jobs", "deadlocks", "precision", "recall", "kind", "culprits",
    "seconds", "MB",
)  # fmt: skip


def _cells(row: Row) -> list[str]:
    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f} %"

    return [
        row.suite, row.model, row.analyzer, str(len(row.outcomes)),
        str(row.count("tp") + row.count("fn")), share(row.precision), share(row.recall),
        share(row.kinds), share(row.culprits),
        "" if row.seconds is None else f"{row.seconds:.1f}",
        "" if row.megabytes is None else f"{row.megabytes:.0f}",
    ]  # fmt: skip


def markdown(table: Sequence[Row]) -> str:
    """The table and every miss of ours."""
    lines = [
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "|".join("---" if c in _COLUMNS[:3] else "---:" for c in _COLUMNS) + "|",
        *("| " + " | ".join(_cells(row)) + " |" for row in table),
        "",
    ]
    misses = [
        f"- {row.suite}, `{o.job.name}`: {o.missed}"
        for row in table if row.analyzer == "dl2gpu" and not row.model
        for o in row.outcomes if o.missed
    ]  # fmt: skip
    lines += ["Misses of dl2gpu:", "", *(misses or ["- none"]), ""]
    return "\n".join(lines)


def plot(table: Sequence[Row]) -> str:
    """Precision and recall of each suite and analyzer as bars (SVG)."""
    shown = [r for r in table if not r.model]
    height, left, width = 26 * len(shown) + 40, 260, 300
    colours = {"precision": "#4477aa", "recall": "#ee6677"}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{height}"',
        'font-family="system-ui, sans-serif" font-size="12" role="img">',
        "<title>Precision and recall by suite and analyzer</title>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, (name, colour) in enumerate(colours.items()):
        x = left + 100 * i
        parts.append(f'<rect x="{x}" y="8" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="17">{name}</text>')
    for n, row in enumerate(shown):
        y = 30 + 26 * n
        label = f"{row.suite}: {row.analyzer}".replace("&", "&amp;").replace("<", "&lt;")
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{label}</text>')
        for k, name in enumerate(colours):
            value = getattr(row, name)
            if value is None:
                continue
            top, long = y + 9 * k, f"{width * value:.1f}"
            parts += [
                f'<rect x="{left}" y="{top}" width="{long}" height="8" fill="{colours[name]}"/>',
                f'<text x="{left + width + 6}" y="{top + 8}" font-size="9">',
                f"{100 * value:.1f} %</text>",
            ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(
    out: Annotated[Path | None, typer.Option(help="Folder for the table, plots, misses.")] = None,
    suite: Annotated[list[str] | None, typer.Option(help="Only these suites.")] = None,
    peer: Annotated[str | None, typer.Option(help="torchfrtrace, to run on the dumps.")] = None,
    shared: Annotated[
        Path, typer.Option(envvar="DL2GPU_SHARED", help="Labelled data beside the checkout.")
    ] = ROOT.parent / "shared",
    fleet: Annotated[bool, typer.Option(help="Generate and scan a fleet, too.")] = True,
    models: Annotated[
        bool, typer.Option(help="Generate and scan the suites of datasets/suites, too.")
    ] = True,
) -> None:
    """Scan labelled suites and say how often the verdict is right."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "fleet" if fleet and (not suite or "fleet" in suite) else None
        table: list[Row] = []
        real = Path(folder) / "models" if models else None
        for one in suites(shared if shared.is_dir() else None, made, real, suite or ()):
            if suite and one.name not in suite:
                continue
            table += rows(one, "dl2gpu", ours(one))
            if peer and one.name == "Flight Recorder":
                table += rows(one, "torchfrtrace", torchfrtrace(one, peer))
    cells = nondeterministic.explored() if not suite or "nondeterministic" in suite else []
    if not table and not cells:
        raise SystemExit("no labelled suite of this name here")
    text = (markdown(table) if table else "") + (
        f"\n## Nondeterministic programs\n\n{nondeterministic.markdown(cells)}" if cells else ""
    )
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        if cells:
            nondeterministic.write_csv(cells, out / "nondeterministic.csv")
            (out / "nondeterministic.svg").write_text(nondeterministic.picture(cells), "utf-8")
        (out / "evaluation.md").write_text(text, "utf-8")
        (out / "evaluation.svg").write_text(plot(table), "utf-8")
        with (out / "evaluation.csv").open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow(_COLUMNS)
            writer.writerows(_cells(row) for row in table)


if __name__ == "__main__":
    typer.run(main)
