"""Reader and writer of the native Parquet form.

``x.parquet`` has a row for each operation, with the columns of the event table sorted by (job,
rank, lane, seq). What the table holds as codes is text here, dictionary-encoded: ``op``,
``stream``, ``reduce_op``, ``dtype``, ``mode``, ``send_mode``, ``state``; ``job_name``, ``attempt``
and ``comm_id`` are added for readers that do not join. ``job``, ``comm``, ``new_comm`` and
``stack`` are rows of the side tables: ``x.jobs.parquet``, ``x.comms.parquet``,
``x.stacks.parquet``, ``x.ranks.parquet``, and, where a source has it, ``x.status.parquet``.

Source: TRACE_FORMAT.md, section Parquet.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from dl2gpu.engine.arrays import plain
from dl2gpu.trace.files import read_bytes, whole_file
from dl2gpu.trace.inputs import Input, InputError, Part, TraceFile
from dl2gpu.trace.order_kernel import first_seen
from dl2gpu.trace.parquet_file import (
    DIGEST_KEY,
    OPTIONAL,
    SIDES,
    VERSION,
    VERSION_KEY,
    Source,
    base_name,
    cast_table,
    check_siblings,
    check_version,
    first_line,
    nulls,
    read_table,
    sibling,
    source,
    whole_table,
)
from dl2gpu.trace.schema import (
    EVENTS,
    MODE,
    SEND_MODE,
    STATE,
    SchemaError,
    StringTable,
    Trace,
    concat,
    dtype_code,
    dtype_name,
    op_code,
    op_name,
    validate,
)

__all__ = ["read", "write"]

_NONE: Final = (1 << 32) - 1
"""In place of a text that is null."""
_ENUMS: Final[dict[str, Mapping[str, int]]] = {"mode": MODE, "send_mode": SEND_MODE, "state": STATE}
_TEXTS: Final = ("op", "stream", "reduce_op", "dtype", *_ENUMS)
# --------------------------------------------------------------------------------------------------
# Writing


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes ``trace`` as ``path`` (which ends in .parquet) and its side tables beside it.

    The files appear whole or not at all, ``path`` last.

    Raises:
        InputError: the name does not end in .parquet, or a file cannot be written.
    """
    main = Path(path)
    if main.suffix != ".parquet":
        raise InputError(f"{path}: expected a name that ends in .parquet")
    try:
        main.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as files:
            digest = hashlib.sha256()
            main_part = files.enter_context(whole_file(main))  # entered first: renamed last
            for name in SIDES:
                frame: pl.DataFrame = getattr(trace, name)
                target = main.with_name(f"{main.stem}.{name}.parquet")
                if name == OPTIONAL and frame.is_empty():
                    files.callback(target.unlink, missing_ok=True)  # of an earlier trace
                    continue
                part = files.enter_context(whole_file(target))
                _write(frame, part, {VERSION_KEY: VERSION})
                digest.update(Path(part).read_bytes())
            metadata = {VERSION_KEY: VERSION, DIGEST_KEY: digest.hexdigest()}
            _write(_physical(trace), main_part, metadata)
    except OSError as e:
        raise InputError(f"{e.filename or path}: cannot be written: {e.strerror}") from e


def _write(frame: pl.DataFrame, path: str, metadata: dict[str, str]) -> None:
    frame.write_parquet(path, compression="zstd", metadata=metadata)


def _physical(trace: Trace) -> pl.DataFrame:
    texts = trace.strings.sort("code")["text"].to_list()
    events = trace.events
    names: dict[str, dict[int, str]] = {
        "op": {c: op_name(c, texts) for c in events["op"].unique()},
        "dtype": {c: dtype_name(c, texts) for c in events["dtype"].drop_nulls().unique()},
        "stream": dict(enumerate(texts)),
        "reduce_op": dict(enumerate(texts)),
    } | {column: {c: n for n, c in values.items()} for column, values in _ENUMS.items()}
    jobs = trace.jobs.select("job", "attempt", job_name="name")
    comms = trace.comms.select("comm", comm_id="id")
    return (
        events.sort("job", "rank", "lane", "seq")
        .with_columns(_named(column, values) for column, values in names.items())
        .join(jobs, on="job", how="left", maintain_order="left")
        .join(comms, on="comm", how="left", maintain_order="left")
        .select(
            "job", "job_name", "attempt",
            *(c for c in EVENTS if c not in ("job", "comm")), "comm", "comm_id",
        )
        .with_columns(pl.col("job_name", "comm_id").cast(pl.Categorical))
    )  # fmt: skip


def _named(column: str, values: Mapping[int, str]) -> pl.Expr:
    if not values:
        return pl.lit(None, pl.Categorical()).alias(column)
    return (
        pl.col(column)
        .replace_strict(list(values), list(values.values()), default=None, return_dtype=pl.String)
        .cast(pl.Categorical)
    )


# --------------------------------------------------------------------------------------------------
# Reading


def read(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes] = read_bytes
) -> tuple[Trace, list[Input]]:
    """The event table of main files (``x.parquet``); side tables are found beside them.

    Args:
        files: main files, or parts of them (see ``parts``).
        load: gives the content of a file; raises InputError where there is none. Of a part of a
            local file only the part is read, without it.

    Returns:
        The trace, which is valid (``schema.validate``), and one Input a file in the order of
        ``files``: read or quarantined.
    """
    traces: list[Trace] = []
    inputs: list[Input] = []
    taken: dict[tuple[str, str, int], str] = {}
    for file in files:
        try:
            trace = _read_one(file, load)
        except (InputError, SchemaError) as e:
            inputs.append(
                Input(file.path, "quarantined", str(e), "parquet", file.job or file.folder)
            )
            continue
        trace = replace(trace, jobs=_kept_apart(trace.jobs, file, taken))
        traces.append(trace)
        name = trace.jobs["name"][0] if trace.jobs.height == 1 else None
        inputs.append(Input(file.path, "read", None, "parquet", name, None, trace.events.height))
    return concat(traces), inputs


def _kept_apart(
    jobs: pl.DataFrame, file: TraceFile, taken: dict[tuple[str, str, int], str]
) -> pl.DataFrame:
    """``jobs``; folders that another file has already used get this file's path in front.

    Where the whole corpus was looked at (``file.apart``), that decides; else ``taken`` does: the
    jobs that were read in this call, with the paths of their files.
    """
    apart = file.apart
    if apart is None:
        keys = list(jobs.select("folder", "name", "attempt").iter_rows())
        apart = any(taken.setdefault(key, file.path) != file.path for key in keys)
    return jobs.with_columns(folder=pl.lit(f"{file.path}/") + pl.col("folder")) if apart else jobs


def _read_one(file: TraceFile, load: Callable[[TraceFile], bytes]) -> Trace:
    with contextlib.ExitStack() as stack:
        rows = None if file.part is None else file.part.rows
        data = source(file, load, stack, EVENTS, rows)
        check_version(data)
        sides = _sides(file, data, load)
        frame = read_table(data, "", list(EVENTS), file.part)
    events, strings = _logical(frame)
    if file.part is not None:
        sides, events = _numbered(file.part, sides, events)
    sides["ranks"] = sides["ranks"].with_columns(path=pl.lit(file.path, pl.String))
    return validate(Trace(events=events, strings=strings, **sides), base_name(file.path))


def _sides(
    file: TraceFile, data: Source, load: Callable[[TraceFile], bytes]
) -> dict[str, pl.DataFrame]:
    """The side tables; of a part, the rows of its jobs.

    That main file and side tables belong together is looked at here for a whole file, and for one
    in parts where it was cut (:func:`check_siblings`).
    """
    if file.part is None:
        contents = check_siblings(file, data, load)
        stem = base_name(file.path).removesuffix(".parquet")
        return {n: whole_table(c, f"{stem}.{n}.parquet", SIDES[n]) for n, c in contents.items()}
    sides: dict[str, pl.DataFrame] = {}
    for name, schema in SIDES.items():
        side = replace(sibling(file, name), part=file.part)
        with contextlib.ExitStack() as stack:
            try:
                content = source(side, load, stack)
            except InputError:
                if name == OPTIONAL:
                    continue
                raise
            base = base_name(side.path)
            jobs = file.part.jobs if "job" in schema else None
            frame = read_table(content, base, list(schema), None, jobs)
            sides[name] = cast_table(frame, base, schema)
    return sides


def _numbered(
    part: Part, sides: dict[str, pl.DataFrame], events: pl.DataFrame
) -> tuple[dict[str, pl.DataFrame], pl.DataFrame]:
    """The tables of a part with its jobs and communicators numbered from 0."""
    first = part.jobs[0]
    sides = {
        n: f.with_columns(pl.col("job") - first) if "job" in f.columns else f
        for n, f in sides.items()
    }
    comms = sides["comms"] = sides["comms"].sort("comm")
    old = comms["comm"]
    new = pl.int_range(len(old), dtype=pl.Int32, eager=True)
    dense = bool(len(old)) and int(old[-1]) - int(old[0]) == len(old) - 1

    def renumbered(column: str) -> pl.Expr:
        if dense:
            return pl.col(column) - int(old[0])
        # one of another job becomes -1, which is refused
        return (
            pl.when(pl.col(column).is_not_null())
            .then(pl.col(column).replace_strict(old, new, default=-1, return_dtype=pl.Int32))
            .alias(column)
        )

    sides["comms"] = comms.with_columns(comm=new)
    if "status" in sides:
        sides["status"] = sides["status"].with_columns(renumbered("comm"))
    return sides, events.with_columns(
        pl.col("job") - first, renumbered("comm"), renumbered("new_comm")
    )


def _logical(frame: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The event table of the main file's rows, and its strings."""
    events = cast_table(frame, "", {c: t for c, t in EVENTS.items() if c not in _TEXTS})
    strings = StringTable()
    coded = {name: _coded(frame, name, strings) for name in _TEXTS}
    if coded["op"].null_count():
        raise InputError("column op: expected a value in every row, found null")
    return pl.DataFrame([coded[c] if c in coded else events[c] for c in EVENTS]), strings.frame()


def _coded(frame: pl.DataFrame, name: str, strings: StringTable) -> pl.Series:
    """The codes of a column of text. Each distinct text is looked up once."""
    dtype = EVENTS[name]
    if name not in frame.columns or frame[name].null_count() == frame.height:
        return nulls(name, dtype, frame.height)
    try:
        texts = frame[name].cast(pl.Categorical())
    except pl.exceptions.PolarsError as e:
        raise InputError(
            f"column {name}: expected String, found {frame.schema[name]} ({first_line(e)})"
        ) from e
    numbers = texts.to_physical()
    first = np.full(int(numbers.max()) + 1, -1, np.int32)  # type: ignore[arg-type]
    first_seen(plain(numbers.fill_null(_NONE) if numbers.null_count() else numbers), first)
    at = np.flatnonzero(first >= 0)
    named = pl.DataFrame({"at": at, "text": texts.gather(first[at]).cast(pl.String)}).sort("text")
    distinct = named["text"].to_list()
    if name in _ENUMS:
        unknown = sorted(set(distinct) - set(_ENUMS[name]))
        if unknown:
            raise InputError(
                f"column {name}: expected {', '.join(_ENUMS[name])}, found {unknown[0]!r}"
            )
        codes = [_ENUMS[name][v] for v in distinct]
    elif name == "op":
        codes = [op_code(v, strings) for v in distinct]
    elif name == "dtype":
        codes = [dtype_code(v, strings) for v in distinct]
    else:
        codes = [strings.code(v) for v in distinct]
    table = np.zeros(int(at[-1]) + 1, np.int32)
    table[named["at"].to_numpy()] = codes
    if not numbers.null_count():
        return pl.Series(name, table[numbers.to_numpy()]).cast(dtype)
    return pl.Series(table).cast(dtype).gather(numbers).alias(name)
