"""Labelled suites of real models: every scheme with every fault, in every form.

A suite is a small TOML file (datasets/suites/)::

    name = "gpt2"
    seed = 7
    steps = 3                       # of each job; the fault is made in the last but one

    [[job]]
    model = "gpt2"                  # packaged with the planner, or a TOML file beside this one
    schemes = ["dp8", "dp2,tp4"]
    faults = ["healthy", "skip"]    # default: all of them
    forms = ["parquet", "fr", "kineto"]   # default: parquet
    imperfections = ["none", "ring", "missing", "untimed"]   # default: none; dumps and profiles

The same file and seed give the same bytes. ``labels.parquet`` says of each job what has to be found
in the form in which it was written: a dump does not tell how a process ended, or what a stream
waits for, and a profile ends because it was switched off.
"""

from __future__ import annotations

import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from dl2gpu.planner.model import ModelError, packaged
from dl2gpu.suites.dumps import write_dumps, write_profiles
from dl2gpu.suites.inject import FAULTS, Injected, inject
from dl2gpu.suites.scheme import Scheme, lowered
from dl2gpu.suites.settle import settle
from dl2gpu.trace.files import whole_file
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.schema import Trace, concat

__all__ = ["FORMS", "LABELS", "Entry", "read", "write"]

FORMS: Final = ("parquet", "fr", "kineto")
IMPERFECTIONS: Final = ("none", "ring", "missing", "untimed")
LABELS: Final[dict[str, pl.DataType]] = {
    "job": pl.String(),  # name; of dumps and profiles the folder below that of their form
    "model": pl.String(),
    "scheme": pl.String(),
    "form": pl.String(),
    "imperfection": pl.String(),
    "fault": pl.String(),  # key of inject.FAULTS
    "rank": pl.Int32(),  # at fault; null: none
    "ranks": pl.Int32(),
    "events": pl.Int64(),
    "deadlocked": pl.Boolean(),  # null: the record does not settle it
    "kinds": pl.List(pl.String()),  # one of them is right
    "culprits": pl.List(pl.Int32()),  # exactly these; null: the record cannot tell
    "suspects": pl.List(pl.Int32()),  # nobody else may be named; null: it may be anybody
}
"""Columns of ``labels.parquet``. Of a circle all ranks may be named, the culprits among them."""
_FILE_EVENTS: Final = 4_000_000
_RING: Final = 0.6
"""Share of a step that a ring buffer keeps."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A model with its schemes, faults, forms and imperfections."""

    model: str
    schemes: tuple[Scheme, ...]
    faults: tuple[str, ...] = tuple(FAULTS)
    forms: tuple[str, ...] = ("parquet",)
    imperfections: tuple[str, ...] = ("none",)


@dataclass(frozen=True, slots=True)
class Suite:
    """What a definition says."""

    name: str
    entries: tuple[Entry, ...]
    seed: int = 0
    steps: int = 3


def read(path: str | Path) -> Suite:
    """The definition in a file.

    Raises:
        InputError: it cannot be read, or says something that is not known; says what.
    """
    file = Path(path)
    try:
        raw = tomllib.loads(file.read_bytes().decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as e:
        raise InputError(f"{path}: expected a suite as TOML: {e}") from e
    _known(raw, ("name", "seed", "steps", "job"), str(path))
    seed, steps = raw.get("seed", 0), raw.get("steps", 3)
    if not (isinstance(seed, int) and isinstance(steps, int) and 3 <= steps <= 1000 and seed >= 0):
        raise InputError(f"{path}: expected a seed of 0 or more and 3 to 1000 steps")
    jobs = raw.get("job")
    if not isinstance(jobs, list) or not jobs:
        raise InputError(f"{path}: expected tables [[job]], found none")
    entries = []
    for number, job in enumerate(jobs, 1):
        where = f"{path}: job {number}"
        _known(job, ("model", "schemes", "faults", "forms", "imperfections"), where)
        model = job.get("model")
        if not isinstance(model, str):
            raise InputError(f"{where}: expected a model, found {model!r}")
        if model not in packaged() and (file.parent / model).is_file():
            model = str(file.parent / model)
        entries.append(
            Entry(
                model, tuple(Scheme.parse(t) for t in _texts(job, "schemes", None, where)),
                _texts(job, "faults", tuple(FAULTS), where),
                _texts(job, "forms", FORMS, where, ("parquet",)),
                _texts(job, "imperfections", IMPERFECTIONS, where, ("none",)),
            )
        )  # fmt: skip
    return Suite(str(raw.get("name", file.stem)), tuple(entries), seed, steps)


def _known(table: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    unknown = sorted(set(table) - set(keys)) if isinstance(table, dict) else ["not a table"]
    if unknown:
        raise InputError(f"{where}: expected {', '.join(keys)}; found {unknown[0]!r}")


def _texts(
    table: Mapping[str, Any], key: str, known: Sequence[str] | None, where: str,
    default: Sequence[str] | None = None,
) -> tuple[str, ...]:  # fmt: skip
    found = table.get(key, default if default is not None else known)
    if (
        not isinstance(found, list | tuple)
        or not found
        or not all(isinstance(v, str) for v in found)
    ):
        raise InputError(f"{where}: {key}: expected a list of texts, found {found!r}")
    wrong = [v for v in found if known is not None and v not in known]
    if wrong:
        raise InputError(f"{where}: {key}: expected {', '.join(known or ())}; found {wrong[0]!r}")
    return tuple(found)


# --------------------------------------------------------------------------------------------------
# Writing


def write(suite: Suite, out: str | Path) -> pl.DataFrame:
    """Writes a suite into the folder ``out``: its forms in folders of their names, and the labels.

    Faults for which a program has no place are left out.

    Raises:
        InputError: a model cannot be laid out as its scheme says, the folder is not empty, or a
            file cannot be written.
    """
    target = Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if next(target.iterdir(), None) is not None:
            raise InputError(f"{out}: expected a new or empty folder, found files in it")
        writer = _Writer(target)
        rows = [row for entry in suite.entries for row in _jobs(suite, entry, writer)]
        writer.flush()
        labels = pl.DataFrame(rows, schema=LABELS)
        with whole_file(target / "labels.parquet") as part:
            labels.write_parquet(part)
    except OSError as e:
        raise InputError(f"{e.filename or out}: cannot be written: {e.strerror}") from e
    except ModelError as e:
        raise InputError(str(e)) from e
    return labels


class _Writer:
    """Gathers jobs for Parquet files, and writes folders of dumps and profiles."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.held: list[Trace] = []
        self.events = self.files = 0

    def parquet(self, trace: Trace) -> int:
        self.held.append(trace)
        self.events += trace.events.height
        if self.events >= _FILE_EVENTS:
            self.flush()
        return trace.events.height

    def flush(self) -> None:
        from dl2gpu.trace import native_parquet

        if self.held:
            path = self.target / "parquet" / f"suite_{self.files:05}.parquet"
            native_parquet.write(concat(self.held), path)
        self.held, self.events = [], 0
        self.files += 1


def _jobs(suite: Suite, entry: Entry, writer: _Writer) -> Iterator[dict[str, Any]]:
    model = Path(entry.model).stem
    for scheme in entry.schemes:
        whole = lowered(entry.model, scheme, suite.steps)
        for fault in entry.faults:
            place = zlib.crc32(f"{suite.seed} {model} {scheme} {fault}".encode())
            made = inject(whole, scheme, suite.steps, fault, np.random.default_rng(place))
            if made is None:
                continue
            for form in entry.forms:
                for flaw in entry.imperfections if form != "parquet" else ("none",):
                    if (form, flaw) == ("kineto", "ring"):
                        continue  # profiles have none
                    name = f"{model}-{str(scheme).replace(',', '-')}-{fault}"
                    name += "" if flaw == "none" else f"-{flaw}"
                    yield _job(writer, made, model, scheme, form, flaw, name, place)


def _job(
    writer: _Writer, made: Injected, model: str, scheme: Scheme, form: str, flaw: str, name: str,
    place: int,
) -> dict[str, Any]:  # fmt: skip
    rng = np.random.default_rng(place + 1)
    others = [r for r in range(scheme.ranks) if r != made.rank]
    missing = [int(rng.choice(others))] if flaw == "missing" else []
    if form == "parquet":
        trace = made.trace
        jobs = trace.jobs.with_columns(name=pl.lit(name), folder=pl.lit(name))
        events = writer.parquet(replace(trace, jobs=jobs))
    else:
        folder = writer.target / form / name
        settled = settle(made.trace)
        if form == "fr":
            longest = int(np.bincount(made.trace.events["rank"].to_numpy()).max())
            ring = int(_RING * longest / 3) if flaw == "ring" else None
            events = write_dumps(
                made.trace, settled, folder, ring=ring, missing=missing, timed=flaw != "untimed"
            )
        else:
            events = write_profiles(
                made.trace, settled, folder, missing=missing, numbered=flaw != "untimed"
            )
    return _label(made, model, scheme, form, flaw, missing) | {"job": name, "events": events}


# --------------------------------------------------------------------------------------------------
# What each form can tell

_UNSEEN: Final = ("stalled_rank", "missing_participant", "insufficient_evidence")
"""Kinds by which a record that does not tell how a process ended may rightly speak of its end."""
_HIDDEN: Final = ("stalled_rank", "insufficient_evidence", "in_flight")
"""... and of an absence, where it does not tell what a stream or a host waits for."""
_NEVER_RIGHT: Final = ("skip", "module", "group", "checkpoint", "recv", "send", "uneven", "exit")


def _label(
    made: Injected, model: str, scheme: Scheme, form: str, flaw: str, missing: Sequence[int]
) -> dict[str, Any]:
    deadlocked, kinds, culprits = made.deadlocked, made.kinds, made.culprits
    suspects = None
    if culprits is not None:
        suspects = sorted(culprits)
    elif made.innocent:
        suspects = sorted(set(range(scheme.ranks)) - set(made.innocent))
    if form != "parquet":
        ended = {"exit", "uneven", "crash", "stall"}
        if made.fault in ended:
            kinds = (*dict.fromkeys((*kinds, *_UNSEEN)),)
        elif made.fault not in ("healthy", "size", "branch", "dtype"):
            kinds = (*dict.fromkeys((*kinds, *_HIDDEN)),)
        if made.fault in _NEVER_RIGHT or made.fault == "order":
            deadlocked = None  # it may be late, or still come
        if made.fault not in ("healthy", "size", "branch", "dtype"):
            culprits = None
        if form == "kineto":
            kinds = (*dict.fromkeys((*kinds, "potential", "insufficient_evidence")),)
            if made.fault not in ("size", "branch", "dtype", "healthy"):
                deadlocked = None
    if flaw in ("ring", "missing") or (form == "kineto" and flaw == "untimed"):
        # what happened may lie in what is lost; that nobody else is named still holds
        kinds = (*dict.fromkeys((*kinds, *_HIDDEN, "healthy")),)
        deadlocked = None if deadlocked else deadlocked
        culprits = None
    if missing and suspects is not None:
        suspects = sorted({*suspects, *missing})
    return {
        "model": model, "scheme": str(scheme), "form": form, "imperfection": flaw,
        "fault": made.fault, "rank": made.rank, "ranks": scheme.ranks, "deadlocked": deadlocked,
        "kinds": list(kinds), "culprits": None if culprits is None else sorted(culprits),
        "suspects": suspects,
    }  # fmt: skip
