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
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import polars as pl

from dl2gpu.trace.files import DEFAULT, read_bytes, whole_file
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.schema import (
    COMMS,
    EVENTS,
    JOBS,
    MODE,
    RANKS,
    SEND_MODE,
    STACKS,
    STATE,
    STATUS,
    SchemaError,
    StringTable,
    Trace,
    concat,
    conform,
    dtype_code,
    dtype_name,
    op_code,
    op_name,
    validate,
)

__all__ = ["VERSION", "read", "write"]

VERSION: Final = "1"
_VERSION_KEY: Final = "dl2gpu.trace.version"
_DIGEST_KEY: Final = "dl2gpu.trace.siblings"
"""SHA-256 over the side tables' files: a main file and side tables of different writes, as a
killed conversion could leave them, are told from a set that belongs together."""

_SIDES: Final[dict[str, dict[str, pl.DataType]]] = {
    "comms": COMMS,
    "jobs": JOBS,
    "ranks": RANKS,
    "stacks": STACKS,
    "status": STATUS,
}
_OPTIONAL: Final = "status"
_ENUMS: Final[dict[str, Mapping[str, int]]] = {"mode": MODE, "send_mode": SEND_MODE, "state": STATE}
_TEXTS: Final = ("op", "stream", "reduce_op", "dtype", *_ENUMS)
_ROW_BYTES: Final = 250
"""Memory of a row of the event table, about."""


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
            for name in _SIDES:
                frame: pl.DataFrame = getattr(trace, name)
                target = main.with_name(f"{main.stem}.{name}.parquet")
                if name == _OPTIONAL and frame.is_empty():
                    files.callback(target.unlink, missing_ok=True)  # of an earlier trace
                    continue
                part = files.enter_context(whole_file(target))
                _write(frame, part, {_VERSION_KEY: VERSION})
                digest.update(Path(part).read_bytes())
            metadata = {_VERSION_KEY: VERSION, _DIGEST_KEY: digest.hexdigest()}
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
        files: main files.
        load: gives the content of a file; raises InputError where there is none.

    Returns:
        The trace, and one Input a file in the order of ``files``: read or quarantined.
    """
    traces: list[Trace] = []
    inputs: list[Input] = []
    taken: set[tuple[str, str, int]] = set()
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
    jobs: pl.DataFrame, file: TraceFile, taken: set[tuple[str, str, int]]
) -> pl.DataFrame:
    """``jobs``; folders that another file has already used get this file's path in front."""
    keys = set(jobs.select("folder", "name", "attempt").iter_rows())
    if keys & taken:
        jobs = jobs.with_columns(folder=pl.lit(f"{file.path}/") + pl.col("folder"))
        keys = set(jobs.select("folder", "name", "attempt").iter_rows())
    taken |= keys
    return jobs


def _read_one(file: TraceFile, load: Callable[[TraceFile], bytes]) -> Trace:
    data = load(file)
    metadata = _metadata(data, "")
    version = metadata.get(_VERSION_KEY)
    if version is None:
        raise InputError(
            f"expected the file metadata {_VERSION_KEY} = {VERSION}, found none: not a dl2gpu trace"
        )
    if version != VERSION:
        raise InputError(
            f"file metadata {_VERSION_KEY}: expected {VERSION}, found {version}: written by a "
            "newer dl2gpu; read it with that one"
        )
    sides: dict[str, pl.DataFrame] = {}
    digest = hashlib.sha256()
    for name, schema in _SIDES.items():
        side = _sibling(file, name)
        try:
            content = load(side)
        except InputError as e:
            if name == _OPTIONAL:
                continue
            raise InputError(
                f"its side table {_base(side.path)} is missing or unreadable ({e}): keep the files "
                "of one name together"
            ) from e
        digest.update(content)
        sides[name] = _table(content, _base(side.path), schema)
    expected = metadata.get(_DIGEST_KEY)
    if expected is not None and expected != digest.hexdigest():
        raise InputError(
            "the side tables beside it were not written together with it: convert again"
        )
    events, strings = _logical(_frame(data, ""))
    sides["ranks"] = sides["ranks"].with_columns(path=pl.lit(file.path, pl.String))
    return validate(Trace(events=events, strings=strings, **sides), _base(file.path))


def _base(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _sibling(file: TraceFile, name: str) -> TraceFile:
    def renamed(path: str) -> str:
        return f"{path.removesuffix('.parquet')}.{name}.parquet"

    return replace(file, path=renamed(file.path), url=renamed(file.url), size=0)


def _metadata(data: bytes, name: str) -> dict[str, str]:
    try:
        return pl.read_parquet_metadata(io.BytesIO(data))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as e:
        raise InputError(f"{_of(name)}not readable as Parquet: {_first(e)}") from e


def _frame(data: bytes, name: str) -> pl.DataFrame:
    """The table, unless it is so large that only a damaged or hostile file can be."""
    try:
        rows = int(pl.scan_parquet(io.BytesIO(data)).select(pl.len()).collect().item())
        allowed = max(4 * DEFAULT.free_bytes, DEFAULT.max_ratio * len(data))
        if rows * _ROW_BYTES > allowed:
            raise InputError(
                f"{_of(name)}{rows} rows in {len(data)} bytes would take more than {allowed} bytes "
                "of memory, which passes the limit max_ratio; to read it all the same, set "
                f"DL2GPU_MAX_RATIO={2 * rows * _ROW_BYTES // len(data)}"
            )
        return pl.read_parquet(io.BytesIO(data))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as e:
        raise InputError(f"{_of(name)}not readable as Parquet: {_first(e)}") from e


def _of(name: str) -> str:
    return f"{name}: " if name else ""


def _first(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


def _table(data: bytes, name: str, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    return _cast(_frame(data, name), name, schema)


def _cast(frame: pl.DataFrame, name: str, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """The columns of ``schema``, cast; columns that may be null may be missing."""
    columns = []
    for column, dtype in schema.items():
        if column not in frame.columns:
            columns.append(pl.Series(column, [None] * frame.height, dtype))
            continue
        try:
            columns.append(frame[column].cast(dtype))
        except pl.exceptions.PolarsError as e:
            raise InputError(
                f"{_of(name)}column {column}: expected {dtype}, found {frame.schema[column]} "
                f"({_first(e)})"
            ) from e
    return pl.DataFrame(columns)


def _logical(frame: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The event table of the main file's rows, and its strings."""
    physical = {c: pl.String() if c in _TEXTS else t for c, t in EVENTS.items()}
    events = _cast(frame, "", physical)
    if events["op"].null_count():
        raise InputError("column op: expected a value in every row, found null")
    strings = StringTable()
    columns: list[pl.Series] = []
    for name in _TEXTS:
        values = events[name].drop_nulls().unique().sort()
        if name in _ENUMS:
            unknown = sorted(set(values) - set(_ENUMS[name]))
            if unknown:
                raise InputError(
                    f"column {name}: expected {', '.join(_ENUMS[name])}, found {unknown[0]!r}"
                )
            codes = [_ENUMS[name][v] for v in values]
        elif name == "op":
            codes = [op_code(v, strings) for v in values]
        elif name == "dtype":
            codes = [dtype_code(v, strings) for v in values]
        else:
            codes = [strings.code(v) for v in values]
        columns.append(
            events[name].replace_strict(
                values, pl.Series(codes, dtype=EVENTS[name]), default=None,
                return_dtype=EVENTS[name],
            )
            if codes
            else pl.Series(name, [None] * events.height, EVENTS[name])
        )  # fmt: skip
    return conform(events.with_columns(columns), "events"), strings.frame()
