"""Parts of a Parquet file in a store: of it, only what a part needs is asked for.

A file that is larger than a shard is read part by part, by several workers. Each asks for the
footer, and for the columns of the row groups in which its rows lie, and sets them at their places
in an unnamed temporary file that is empty elsewhere: Polars reads that as it reads a local file.

Source: Apache Parquet's format (a footer that tells where each column of each row group lies),
read by pyarrow, which comes with the extras of the stores.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Collection, Iterable
from typing import BinaryIO, Final

from dl2gpu.trace.containers_spool import temporary_file
from dl2gpu.trace.files import is_member, local_path, read_tail
from dl2gpu.trace.inputs import InputError, TraceFile

__all__ = ["footer", "sparse"]

_MOST_FOOTER: Final = 64 << 20
_FIRST_LOOK: Final = 64 << 10
_NEAR: Final = 1 << 20
"""What lies between two pieces is asked for with them, where it is no more than this."""


def footer(file: TraceFile) -> bytes:
    """The footer of a file, as a file without rows.

    Raises:
        InputError: it is not a Parquet file, or its footer is larger than any that is meant so.
    """
    tail = read_tail(file.url, _FIRST_LOOK, file.stamp)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > _MOST_FOOTER:
        raise InputError(f"a footer of {length} bytes; expected {_MOST_FOOTER} at most")
    if length > len(tail):
        tail = read_tail(file.url, length, file.stamp)
    return b"PAR1" + tail[-length:]


def sparse(
    file: TraceFile, columns: Collection[str], rows: tuple[int, int] | None
) -> BinaryIO | None:
    """An object of a store as a file in which only what is wanted can be read.

    Args:
        file: the whole object or a part of it; its ``part`` is not looked at.
        columns: those that are wanted.
        rows: the first one that is wanted, and the one after the last; None: all.

    Returns:
        The file, open for reading; None where the whole has to be loaded: no object of a store
        whose size is known, or pyarrow is not installed.

    Raises:
        InputError: it cannot be had (as :func:`remote.fetch`), is not Parquet, or there is no
            room for a temporary file.
    """
    size = None if file.stamp is None else file.stamp.size
    if size is None or local_path(file.url) is not None or is_member(file.url):
        return None
    if importlib.util.find_spec("pyarrow") is None:
        return None
    tail = footer(file)
    extents = list(_extents(tail, set(columns), rows, size - len(tail) + len(b"PAR1")))
    from dl2gpu.trace.remote import fetch_ranges

    out = os.fdopen(temporary_file(), "rb")
    try:
        os.ftruncate(out.fileno(), size)
        _write(out, 0, tail[:4])
        _write(out, size - len(tail) + 4, tail[4:])
        fetch_ranges(file.url, extents, file.stamp, lambda at, data: _write(out, at, data))
    except OSError as e:
        out.close()
        raise InputError(
            f"expected room for a part of it in {tempfile.gettempdir()}, found none "
            f"({e.strerror or e}): set TMPDIR to a folder with more"
        ) from e
    except BaseException:
        out.close()
        raise
    return out


def _write(out: BinaryIO, at: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(out.fileno(), view, at)
        view = view[done:]
        at += done


def _extents(
    tail: bytes, columns: set[str], rows: tuple[int, int] | None, end: int
) -> Iterable[tuple[int, int]]:
    """(first byte, the one after the last) of what is wanted, in order, near ones together."""
    import pyarrow as pa  # late: only files in stores need it
    import pyarrow.parquet as pq

    try:
        found = pq.read_metadata(pa.BufferReader(tail))
        pieces: list[tuple[int, int]] = []
        row = 0
        for number in range(found.num_row_groups):
            group = found.row_group(number)
            first, row = row, row + group.num_rows
            if rows is not None and (row <= rows[0] or first >= rows[1]):
                continue
            for place in range(group.num_columns):
                chunk = group.column(place)
                if chunk.path_in_schema not in columns:
                    continue
                begin = chunk.data_page_offset
                if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
                    begin = min(begin, chunk.dictionary_page_offset)
                pieces.append((begin, begin + chunk.total_compressed_size))
    except (pa.ArrowException, ValueError, OSError) as e:
        raise InputError(f"not readable as Parquet: {str(e).splitlines()[0]}") from e
    pieces.sort()
    if pieces and not (pieces[0][0] >= 0 and max(p[1] for p in pieces) <= end):
        raise InputError(f"not readable as Parquet: a column lies outside its first {end} bytes")
    at: tuple[int, int] | None = None
    for begin, stop in pieces:
        if at is not None and begin - at[1] <= _NEAR:
            at = (at[0], max(at[1], stop))
            continue
        if at is not None:
            yield at
        at = (begin, stop)
    if at is not None:
        yield at
