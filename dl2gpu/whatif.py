"""What if, over a corpus: jobs in shards, every configuration on each; and one job played again."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import polars as pl

from dl2gpu.analysis.explore import Budget
from dl2gpu.analysis.rewrite import ORDERS, Fusion
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.analysis.whatif import COORDINATED, MATCHES, Axes, Witness, program_of, whatif
from dl2gpu.analysis.witness import Schedule, schedule
from dl2gpu.engine.choose import choose, engine_of
from dl2gpu.report.whatif import Result, rows_schema
from dl2gpu.shard import SHARD_BYTES
from dl2gpu.trace.discover import discover
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.parts import shards
from dl2gpu.trace.readers import read_files
from dl2gpu.trace.schema import Trace, one_job

__all__ = ["axes_of", "numbers_of", "plain_witness", "play", "run", "size_of"]

_UNIT: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 1000,
                "MB": 1000**2, "GB": 1000**3}  # fmt: skip
_TIME: Final = {"us": 1000, "ms": 1_000_000, "s": 1_000_000_000}


def size_of(text: str) -> int:
    """Bytes: ``0``, ``4KiB``, ``1 MiB``, ``inf``.

    Raises:
        ValueError: it is no size.
    """
    text = text.strip()
    if text == "inf":
        return Scenario.INFINITE
    m = re.fullmatch(r"(\d{1,15})\s*([A-Za-z]*)", text)
    if not m or m[2] not in _UNIT:
        raise ValueError(f"size: expected one like 0, 4KiB, 1MiB or inf, found {text!r}")
    return int(m[1]) * _UNIT[m[2]]


def fusion_of(text: str) -> Fusion:
    """``4``: so many at a time; ``64MiB@5ms``: a buffer of so many bytes, sent off each cycle.

    ``coordinated``: those that all ranks have announced, in one order for all.

    Raises:
        ValueError: it is none of them.
    """
    text = text.strip()
    if text == COORDINATED:
        return Fusion(coordinated=True)
    if text.isdigit() and int(text) > 0:
        return Fusion() if int(text) == 1 else Fusion(count=int(text))
    size, _, cycle = text.partition("@")
    m = re.fullmatch(r"(\d{1,9})(us|ms|s)", cycle) if cycle else None
    if size.isdigit() or (cycle and not m):
        raise ValueError(
            f"fusion: expected one like 1, 4, 64MiB, 64MiB@5ms or {COORDINATED}, found {text!r}"
        )
    return Fusion(bytes=size_of(size), cycle_ns=int(m[1]) * _TIME[m[2]] if m else 0)


def axes_of(
    buffer: str = "0", messages: str = "0", eager: str = "0", pool: str = "0",
    whose: str = "sender", queues: str = "0", fusion: str = "1", orders: str = "recorded",
    matches: str = "all", samples: int = 32,
) -> Axes:  # fmt: skip
    """The axes from lists as they stand on the command line.

    Raises:
        ValueError: a value is none that its axis takes.
    """

    def each(text: str) -> list[str]:
        return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))

    def number(text: str) -> int:
        if not text.isdigit() or len(text) > 9:
            raise ValueError(f"expected a number, found {text!r}")
        return int(text)

    for name, given, known in (("orders", orders, ORDERS), ("matches", matches, MATCHES)):
        if wrong := [part for part in each(given) if part not in known]:
            raise ValueError(f"{name}: expected some of {', '.join(known)}, found {wrong[0]!r}")
    if whose not in ("sender", "receiver", "job"):
        raise ValueError(f"pool of: expected sender, receiver or job, found {whose!r}")
    return Axes(
        buffer=tuple(size_of(s) for s in each(buffer)),
        messages=tuple(number(s) for s in each(messages)),
        eager=tuple(size_of(s) for s in each(eager)),
        pool=tuple(size_of(s) for s in each(pool)),
        whose=whose,
        queues=tuple(number(s) for s in each(queues)),
        fusion=tuple(fusion_of(s) for s in each(fusion)),
        orders=tuple(each(orders)),
        matches=tuple(each(matches)),
        samples=samples,
    )


def _traces(paths: Sequence[str], select: str | None) -> Iterator[tuple[Trace, list[str]]]:
    """The shards of a corpus, and the labels of their jobs.

    Raises:
        InputError: nothing could be read.
    """
    files = discover(list(paths)).files
    named = [f for f in files if select is None or select in (f.job, f.folder)]
    read = 0
    for shard in shards(named or files, SHARD_BYTES):
        trace, _ = read_files(list(shard))
        if not trace.jobs.height:
            continue
        jobs = trace.jobs.sort("job")
        keep = [
            j for j, name, folder in jobs.select("job", "name", "folder").iter_rows()
            if select is None or select in (name, folder)
        ]  # fmt: skip
        for k, j in enumerate(keep if select is not None else ()):
            read += 1
            yield one_job(trace, j), [_label(jobs, keep[k])]
        if select is None:
            read += jobs.height
            yield trace, [_label(jobs, j) for j in range(jobs.height)]
    if not read:
        raise InputError(
            f"expected traces{'' if select is None else f' of job {select!r}'} in "
            f"{', '.join(paths)}, found none that could be read"
        )


def _label(jobs: pl.DataFrame, job: int) -> str:
    name, folder, attempt = jobs.select("name", "folder", "attempt").row(job)
    twice = jobs.filter(pl.col("name") == name)["folder"].n_unique() > 1
    return f"{name} ({folder})" if twice else name + (f" (attempt {attempt})" if attempt else "")


def run(
    paths: Sequence[str], axes: Axes, budget: Budget, seed: int = 0, engine: str = "auto",
    select: str | None = None,
) -> Result:  # fmt: skip
    """Tries every configuration on every job of a corpus, a shard after the other.

    Raises:
        InputError: nothing could be read.
        EngineError: the engine asked for cannot be used here.
    """
    where = engine_of(choose(engine))
    until = None if budget.seconds is None else time.monotonic() + budget.seconds
    frames: list[pl.DataFrame] = []
    safe: list[dict[str, Any]] = []
    witnesses: list[dict[str, Any]] = []
    notes: list[str] = []
    for trace, labels in _traces(paths, select):
        left = None if until is None else max(until - time.monotonic(), 0.0)
        found = whatif(trace, axes, replace(budget, seconds=left), seed, where)
        first = len(witnesses)
        names = pl.DataFrame({"job": range(len(labels)), "label": labels}).cast({"job": pl.Int32})
        frames.append(
            found.rows.join(names, on="job", maintain_order="left")
            .with_columns(job="label", witness=(pl.col("witness") + first).cast(pl.Int32))
            .select(rows_schema().keys())
        )
        safe += [s | {"job": labels[s["job"]]} for s in found.safe.to_dicts()]
        witnesses += [
            {"number": first + k, "job": labels[job], **w.plain()}
            for k, (job, w) in enumerate(found.witnesses)
        ]
        if found.cut:
            notes.append(f"{labels[0]} and on: {found.cut}")
    rows = pl.concat(frames) if frames else pl.DataFrame(schema=rows_schema())
    return Result(rows, safe, witnesses, notes)


def numbers_of(text: str) -> list[int]:
    """``1,0,2`` as numbers.

    Raises:
        ValueError: it is no such list.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [part for part in parts if not part.isdigit() or len(part) > 9]:
        raise ValueError(f"expected numbers like 1,0,2, found {wrong[0]!r}")
    return [int(part) for part in parts]


def plain_witness(buffer: str, eager: str, queues: int, choices: str) -> Witness:
    """The witness of a scenario as it stands on the command line.

    Wildcards take the first message that fits, but where ``choices`` say otherwise.
    """
    given = tuple(numbers_of(choices))
    scenario = Scenario(
        use_states=False, buffer_bytes=size_of(buffer), eager_bytes=size_of(eager), queues=queues,
        chosen=bool(given), given=given,
    )  # fmt: skip
    return Witness(matches="all" if given else "recorded", scenario=scenario)


def play(paths: Sequence[str], job: str | None, witness: Witness) -> tuple[str, Schedule]:
    """The schedule of one job: (its label, the steps). Without a name there must be one job.

    Raises:
        InputError: there is no such job, or there are several.
    """
    found = []
    for trace, labels in _traces(paths, None):
        for number, label in enumerate(labels):
            name, folder = trace.jobs.sort("job").select("name", "folder").row(number)
            if job is None or job in (label, name, folder):
                found.append((label, one_job(trace, number)))
    if len(found) != 1:
        names = ", ".join(label for label, _ in found[:8]) or "none"
        raise InputError(f"expected one job{'' if job is None else f' {job!r}'}, found {names}")
    label, trace = found[0]
    return label, schedule(program_of(trace, witness), witness.scenario)
