"""The labelled jobs beside the checkout, and how a report passes on one of them.

A set is a folder of jobs that is scanned once; a job is a folder below it with an ``expect.json``
(the rules are those of ``cases/README.md``, "How a job passes"). The folder is looked for in
``DL2GPU_SHARED``, then in ``shared`` beside the checkout; without it the tests skip.

As a program it prints what fails, with what was expected and found::

    python tests/corpus.py cases|rendered|live|megatron|logs [--verbose] [NAME...]
"""

# ruff: noqa: T201 - the program below prints, as programs do

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dl2gpu.report.model import Report

RENDERED_FORMS: Final = re.compile(r"__(frj?\d|et\d|chakra|kineto)")
"""Forms of the rendered set that are checked: all of them."""

MEGATRON: Final[dict[str, list[int]]] = {
    "megatron_gpu_error_1st": [12, 14],
    "megatron_lock_gil_2nd": [10, 15],
}
"""Real dumps with an injected fault: the ranks it was injected into."""


def shared_folder() -> Path | None:
    """Folder of the labelled data, or None where this checkout has none."""
    named = os.environ.get("DL2GPU_SHARED")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
    return folder if folder.is_dir() else None


# --------------------------------------------------------------------------------------------------
# The sets


@dataclass(frozen=True)
class Labelled:
    """One labelled job: its folder below the scanned folder, and what is expected of it."""

    name: str
    scanned: Path
    expect: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return self.scanned / self.name


def _labelled(scanned: Path, pattern: str, labels: Path | None = None) -> list[Labelled]:
    """Jobs of ``scanned`` whose folders match ``pattern``; labels may lie in a twin folder."""
    found = []
    for folder in sorted(scanned.glob(pattern)):
        name = folder.relative_to(scanned).as_posix()
        label = (labels or scanned) / name / "expect.json"
        if label.is_file():
            found.append(Labelled(name, scanned, json.loads(label.read_text("utf-8"))))
    return found


def _cases(shared: Path) -> list[Labelled]:
    cases = shared / "cases"
    return _labelled(cases, "*") + _labelled(cases, "mpi/*")


def _rendered(shared: Path) -> list[Labelled]:
    return [j for j in _labelled(shared / "rendered", "*") if RENDERED_FORMS.search(j.name)]


def _live(shared: Path) -> list[Labelled]:
    live = shared / "data" / "live"
    # The JSON form is of the same dumps, and may claim what the pickles may.
    return [
        *_labelled(live / "native", "*"),
        *_labelled(live / "flight_recorder", "*"),
        *_labelled(live / "flight_recorder_json", "*", labels=live / "flight_recorder"),
    ]


def _megatron(shared: Path) -> list[Labelled]:
    folder = shared / "data" / "flight_recorder"
    return [
        Labelled(name, folder, {"culprits": culprits})
        for name, culprits in MEGATRON.items()
        if (folder / name).is_dir()
    ]


def _logs(_: Path) -> list[Labelled]:
    # our own, kept with the tests
    return _labelled(LOGS, "*")


LOGS: Final = Path(__file__).resolve().parent / "data" / "logs"

SETS: Final = {
    "cases": _cases, "rendered": _rendered, "live": _live, "megatron": _megatron, "logs": _logs,
}  # fmt: skip


@functools.cache
def labelled(name: str) -> tuple[Labelled, ...]:
    """The labelled jobs of a set; none where the data are absent."""
    shared = LOGS if name == "logs" else shared_folder()
    return tuple(SETS[name](shared)) if shared else ()


@functools.cache
def scanned(folder: Path) -> Report:
    """The report on a folder; a folder is scanned once however many tests look at it."""
    from dl2gpu.scan import scan

    return scan([str(folder)])


# --------------------------------------------------------------------------------------------------
# How a job passes


@dataclass(frozen=True)
class Found:
    """What a report says of one job (several rows where it has several attempts)."""

    jobs: list[dict[str, Any]]
    findings: list[dict[str, Any]]

    @property
    def kinds(self) -> set[str]:
        return {f["kind"] for f in self.findings} | {j["verdict"] for j in self.jobs}

    @property
    def culprits(self) -> set[int]:
        return {rank for f in self.findings for rank in f["culprits"] or ()}

    @property
    def deadlocked(self) -> bool | None:
        """True if an attempt is; None if the evidence does not say; else False."""
        said = [j["deadlocked"] for j in self.jobs]
        return True if True in said else (None if None in said else False)


def found(report: Report | Mapping[str, Any], job: str | None) -> Found:
    """Rows of ``report`` on ``job``: by folder, else by name; None takes the whole report."""
    if isinstance(report, Report):
        jobs, findings = report.jobs.to_dicts(), report.findings.to_dicts()
    else:
        jobs, findings = list(report["jobs"]), list(report["findings"])
    if job is not None:
        by_folder = [j for j in jobs if j.get("folder") == job]
        jobs = by_folder or [j for j in jobs if j["job"] == job]
    wanted = {i for j in jobs for i in j["findings"] or ()}
    return Found(jobs, [f for f in findings if f["id"] in wanted])


def _ranks(ranks: Iterable[int]) -> str:
    return "[" + ", ".join(map(str, sorted(ranks))) + "]"


def check(
    report: Report | Mapping[str, Any], job: str | None, expect: Mapping[str, Any]
) -> list[str]:
    """What of ``expect`` the report on ``job`` breaks, one line each; nothing if the job passes.

    Culprits are those of all findings of the job together: whoever is named anywhere is accused.
    """
    got = found(report, job)
    if not got.jobs:
        return ["the job is not in the report"]
    failures = []

    deadlock = expect.get("deadlock", "conditional")
    if deadlock is True and got.deadlocked is not True:
        failures.append(f"deadlocked: expected true, found {got.deadlocked}")
    if deadlock is False and got.deadlocked is True:
        failures.append("deadlocked: expected false or unknown, found true")

    kinds = expect.get("kinds")
    if kinds and not got.kinds & set(kinds):
        failures.append(f"kinds: expected one of {kinds}, found {sorted(got.kinds)}")
    if wrong := got.kinds & set(expect.get("must_not", ())):
        failures.append(f"must_not: found {sorted(wrong)}")

    exact = expect.get("culprits")
    if exact is not None and got.culprits != set(exact):
        failures.append(f"culprits: expected {_ranks(exact)}, found {_ranks(got.culprits)}")
    if absent := set(expect.get("culprits_must_include", ())) - got.culprits:
        failures.append(f"culprits: {_ranks(absent)} missing in {_ranks(got.culprits)}")
    if wrongly := got.culprits & set(expect.get("culprits_must_not_include", ())):
        failures.append(f"culprits: {_ranks(wrongly)} must not be named")
    if victims := got.culprits & set(expect.get("victims", ())):
        failures.append(f"culprits: {_ranks(victims)} are victims")
    return failures


def check_divergence(
    report: Report | Mapping[str, Any], job: str | None, expect: Mapping[str, Any]
) -> bool | None:
    """Is the first divergence the expected one, or its other side? None where none is expected.

    Compares rank, seq and op, which name one operation; how a communicator is called depends on
    the source.
    """
    wanted = expect.get("first_divergence")
    if not wanted:
        return None
    accepted = {
        (d["rank"], d["seq"], d["op"]) for d in (wanted, *expect.get("first_divergence_also", ()))
    }
    said = (f["first_divergence"] for f in found(report, job).findings)
    return any(d and (d["rank"], d["seq"], d["op"]) in accepted for d in said)


def divergence_rate(name: str) -> tuple[int, int]:
    """(jobs of the set whose first divergence is right, jobs that are labelled with one)."""
    hits = [
        hit
        for job in labelled(name)
        if (hit := check_divergence(scanned(job.scanned), job.name, job.expect)) is not None
    ]
    return sum(hits), len(hits)


# --------------------------------------------------------------------------------------------------
# The program


def _divergence_text(d: Mapping[str, Any] | None) -> str:
    return f"rank {d['rank']} seq {d['seq']} {d['op']} on {d['comm']}" if d else "none"


def _print_job(job: Labelled, got: Found, failures: list[str], verbose: bool) -> None:
    print(f"{'FAIL' if failures else 'ok  '} {job.name}  [{job.expect.get('evidence', '')}]")
    for line in failures:
        print(f"       {line}")
    verdicts = [(j["verdict"], j["deadlocked"]) for j in got.jobs]
    print(f"       verdict, deadlocked: {verdicts}")
    for f in got.findings:
        print(
            f"       {f['kind']} ({f['evidence']}), culprits {f['culprits']}, "
            f"victims {f['victims']}, reason {f['reason']}"
        )
        if verbose:
            print(f"         diverges at {_divergence_text(f['first_divergence'])}")
            print(f"         {f.get('summary')}  condition: {f['condition']}")
    if verbose:
        print(f"       expected {job.expect.get('title')}: {job.expect.get('kinds')}")
        print(f"       expected divergence {_divergence_text(job.expect.get('first_divergence'))}")
        print(f"       note: {job.expect.get('note')}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Scan a labelled set and print what fails.")
    parser.add_argument("set", choices=SETS)
    parser.add_argument("names", nargs="*", help="only jobs whose folder contains one of these")
    parser.add_argument("--verbose", action="store_true", help="passing jobs and summaries, too")
    args = parser.parse_args(argv)
    jobs = [
        job
        for job in labelled(args.set)
        if not args.names or any(name in job.path.as_posix() for name in args.names)
    ]
    if not jobs:
        print("no such labelled job here (set DL2GPU_SHARED to the folder of the data)")
        return 2
    failed = diverged = divergences = 0
    for job in jobs:
        # A few named jobs are scanned by themselves, to answer quickly.
        alone = bool(args.names)
        report = scanned(job.path) if alone else scanned(job.scanned)
        name = None if alone else job.name
        failures = check(report, name, job.expect)
        hit = check_divergence(report, name, job.expect)
        divergences += hit is not None
        diverged += bool(hit)
        failed += bool(failures)
        if failures or args.verbose or alone:
            _print_job(job, found(report, name), failures, args.verbose)
    print(
        f"{len(jobs) - failed} of {len(jobs)} jobs pass; "
        f"first divergence right in {diverged} of {divergences}"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
