"""Files of the native Parquet form: opened, looked at, and read as tables, within limits."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import BinaryIO, Final

import polars as pl

from dl2gpu.trace.files import DEFAULT, local_path, opened, read_bytes
from dl2gpu.trace.inputs import InputError, Part, TraceFile
from dl2gpu.trace.parquet_remote import sparse
from dl2gpu.trace.schema import COMMS, JOBS, RANKS, STACKS, STATUS

VERSION: Final = "1"
VERSION_KEY: Final = "dl2gpu.trace.version"
DIGEST_KEY: Final = "dl2gpu.trace.siblings"
"""SHA-256 over the side tables' files: a main file and side tables of different writes, as a
killed conversion could leave them, are told from a set that belongs together."""

SIDES: Final[dict[str, dict[str, pl.DataType]]] = {
    "comms": COMMS,
    "jobs": JOBS,
    "ranks": RANKS,
    "stacks": STACKS,
    "status": STATUS,
}
OPTIONAL: Final = "status"
ROW_BYTES: Final = 250
"""Memory of a row of the event table, about."""


Source = bytes | BinaryIO
"""What Polars reads: the content, or an open file of which only a part is wanted."""


def source(
    file: TraceFile,
    load: Callable[[TraceFile], bytes],
    stack: contextlib.ExitStack,
    columns: Collection[str] = (),
    rows: tuple[int, int] | None = None,
) -> Source:
    """The content of a file; of a part, the open file, from a store with what is named only."""
    if file.part is None or load is not read_bytes:
        return load(file)
    path = local_path(file.url)
    if path is None:
        some = sparse(file, columns, rows) if columns else None
        return load(file) if some is None else stack.enter_context(some)
    fd, _ = stack.enter_context(opened(path))
    return stack.enter_context(os.fdopen(os.dup(fd), "rb"))


def check_version(data: Source) -> dict[str, str]:
    """The metadata of a main file.

    Raises:
        InputError: it is no trace, or of a version that is not known.
    """
    metadata = metadata_of(data, "")
    version = metadata.get(VERSION_KEY)
    if version is None:
        raise InputError(
            f"expected the file metadata {VERSION_KEY} = {VERSION}, found none: not a dl2gpu trace"
        )
    if version != VERSION:
        raise InputError(
            f"file metadata {VERSION_KEY}: expected {VERSION}, found {version}: written by a "
            "newer dl2gpu; read it with that one"
        )
    return metadata


def check_siblings(
    file: TraceFile, data: Source, load: Callable[[TraceFile], bytes] = read_bytes
) -> dict[str, bytes]:
    """Content of each side table of ``file``, whose content is ``data``.

    Raises:
        InputError: one is missing, or they were not written together with the main file.
    """
    contents: dict[str, bytes] = {}
    digest = hashlib.sha256()
    for name in SIDES:
        side = sibling(file, name)
        try:
            contents[name] = load(side)
        except InputError as e:
            if name == OPTIONAL:
                continue
            raise InputError(
                f"its side table {base_name(side.path)} is missing or unreadable ({e}): keep the "
                "files of one name together"
            ) from e
        digest.update(contents[name])
    expected = metadata_of(data, "").get(DIGEST_KEY)
    if expected is not None and expected != digest.hexdigest():
        raise InputError(
            "the side tables beside it were not written together with it: convert again"
        )
    return contents


def base_name(path: str) -> str:
    """The last part of a path."""
    return path.rsplit("/", 1)[-1]


def sibling(file: TraceFile, name: str) -> TraceFile:
    """The side table ``name`` of a main file."""

    def renamed(path: str) -> str:
        return f"{path.removesuffix('.parquet')}.{name}.parquet"

    return TraceFile(renamed(file.path), renamed(file.url), file.format, file.folder)


def again(data: Source) -> io.BytesIO | BinaryIO:
    """``data`` as a file at its beginning."""
    if isinstance(data, bytes):
        return io.BytesIO(data)
    data.seek(0)
    return data


POLARS_ERRORS: Final = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)


def metadata_of(data: Source, name: str) -> dict[str, str]:
    """The file's own metadata.

    Raises:
        InputError: it is not readable.
    """
    try:
        return pl.read_parquet_metadata(again(data))
    except POLARS_ERRORS as e:
        raise InputError(f"{of_file(name)}not readable as Parquet: {first_line(e)}") from e


def rows_of(data: Source, name: str, size: int | None = None) -> int:
    """Rows of a table, from its footer.

    Args:
        data: the file, or its footer alone with the bytes PAR1 before it.
        name: what a message calls it.
        size: stored bytes of the file, where ``data`` is not all of it.

    Raises:
        InputError: it is not readable, or so large that only a damaged or hostile file can be.
    """
    try:
        rows = int(pl.scan_parquet(again(data)).select(pl.len()).collect().item())
    except POLARS_ERRORS as e:
        raise InputError(f"{of_file(name)}not readable as Parquet: {first_line(e)}") from e
    if size is None:
        size = len(data) if isinstance(data, bytes) else os.fstat(data.fileno()).st_size
    allowed = max(4 * DEFAULT.free_bytes, DEFAULT.max_ratio * size)
    if rows * ROW_BYTES > allowed:
        raise InputError(
            f"{of_file(name)}{rows} rows in {size} bytes would take more than {allowed} bytes "
            "of memory, which passes the limit max_ratio; to read it all the same, set "
            f"DL2GPU_MAX_RATIO={2 * rows * ROW_BYTES // max(1, size)}"
        )
    return rows


def read_table(
    data: Source,
    name: str,
    columns: Sequence[str] | None = None,
    part: Part | None = None,
    jobs: tuple[int, int] | None = None,
) -> pl.DataFrame:
    """The table, or of it: those of ``columns`` that it has, the rows of a part, or of some jobs.

    Raises:
        InputError: as :func:`rows_of`.
    """
    rows_of(data, name)
    try:
        found = pl.scan_parquet(again(data))
        if columns is not None:
            there = found.collect_schema().names()
            found = found.select([c for c in columns if c in there])
        if part is not None:
            found = found.slice(part.rows[0], part.rows[1] - part.rows[0])
        if jobs is not None:
            found = found.filter(pl.col("job").is_between(jobs[0], jobs[1] - 1))
        # one piece a column: every look at it as an array would join the pieces anew
        return _joined(found.collect())
    except POLARS_ERRORS as e:
        raise InputError(f"{of_file(name)}not readable as Parquet: {first_line(e)}") from e


def _joined(frame: pl.DataFrame) -> pl.DataFrame:
    """The rows in one piece, what is null throughout without a copy of it."""
    empty = [c for c in frame.columns if frame[c].null_count() == frame.height]
    blank = [nulls(c, frame.schema[c], frame.height) for c in empty]
    return frame.drop(empty).rechunk().with_columns(blank).select(frame.columns)


def of_file(name: str) -> str:
    """How a message about a side table begins; the main file's has no name."""
    return f"{name}: " if name else ""


def first_line(error: BaseException) -> str:
    """The message without what Polars adds to it."""
    return str(error).split("\n", 1)[0]


def whole_table(data: bytes, name: str, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """A side table with the columns of ``schema``; raises as :func:`cast_table`."""
    return cast_table(read_table(data, name, list(schema)), name, schema)


def cast_table(frame: pl.DataFrame, name: str, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """The columns of ``schema``, cast; columns that may be null may be missing."""
    columns = []
    for column, dtype in schema.items():
        if column not in frame.columns:
            columns.append(nulls(column, dtype, frame.height))
            continue
        try:
            columns.append(frame[column].cast(dtype))
        except pl.exceptions.PolarsError as e:
            raise InputError(
                f"{of_file(name)}column {column}: expected {dtype}, found {frame.schema[column]} "
                f"({first_line(e)})"
            ) from e
    return pl.DataFrame(columns)


def nulls(name: str, dtype: pl.DataType, height: int) -> pl.Series:
    """A column without a value; its memory is never written to."""
    return pl.Series(name, [None], dtype).new_from_index(0, height)
