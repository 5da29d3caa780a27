"""Which reader takes which format, and reading of files of several formats at once."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from dl2gpu.trace.discover import discover
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.merge import merge
from dl2gpu.trace.schema import SchemaError, Trace, concat, validate

__all__ = ["READERS", "read_files", "read_trace"]

READERS: Final[dict[str, str]] = {
    "native": "dl2gpu.trace.native",
    "parquet": "dl2gpu.trace.native_parquet",
    "flight_recorder": "dl2gpu.trace.flight_recorder",
    "execution_trace": "dl2gpu.trace.execution_trace",
    "chakra": "dl2gpu.trace.chakra",
    "clog": "dl2gpu.trace.clog",
    "otf2": "dl2gpu.trace.otf2_archive",
    "param": "dl2gpu.trace.param",
    "kineto": "dl2gpu.trace.kineto",
    "log": "dl2gpu.trace.log",
    "ras": "dl2gpu.trace.ras",
}
"""Module of each format; its ``read(files)`` gives the trace and an Input for each file."""

_VALIDATED: Final = frozenset({"parquet"})
"""Formats whose readers validate each file, so that one that is wrong costs no other."""

Read = Callable[..., tuple[Trace, list[Input]]]


def read_files(files: Sequence[TraceFile]) -> tuple[Trace, list[Input]]:
    """One trace of files of any format, and what became of each file.

    Records that files of several formats hold of one job are put together (:mod:`merge`).

    A file that cannot be read does not raise: it comes back as a quarantined Input.
    """
    by_format: dict[str, list[TraceFile]] = {}
    for file in sorted(files, key=lambda f: (f.path, f.url)):
        by_format.setdefault(file.format, []).append(file)
    traces: list[Trace] = []
    inputs: list[Input] = []
    beside = {
        (f.folder, f.job or f.folder) for f in files if f.format != "log" and "log" in by_format
    }
    for format_ in sorted(by_format):
        trace, read = _read(format_, by_format[format_], beside)
        traces.append(trace)
        inputs += read
    trace, inputs = merge(concat(traces), inputs)
    return trace, sorted(inputs, key=lambda i: i.path)


def read_trace(path: str) -> Trace:
    """The event table of one file, or of all trace files of a folder or bucket.

    Raises:
        InputError: there is no trace, or a file of it cannot be used.
    """
    found = discover([path])
    trace, inputs = read_files(found.files)
    bad = [i for i in [*found.inputs, *inputs] if i.status == "quarantined"]
    if bad:
        raise InputError(f"{bad[0].path}: {bad[0].reason}")
    if not found.files:
        raise InputError(
            f"{path}: expected traces, dumps or logs of a format that is read (docs/formats.md), "
            "found none"
        )
    return trace


def _read(
    format_: str, files: list[TraceFile], beside: AbstractSet[tuple[str, str]]
) -> tuple[Trace, list[Input]]:
    read: Read = importlib.import_module(READERS[format_]).read
    if format_ == "log":
        read = functools.partial(read, beside=beside)
    try:
        trace, inputs = read(files)
        return trace if format_ in _VALIDATED else validate(trace, format_), inputs
    except (InputError, SchemaError) as e:
        if len(files) == 1:
            file = files[0]
            return Trace(), [
                Input(
                    path=file.path,
                    status="quarantined",
                    reason=str(e),
                    format=format_,
                    job=file.job or file.folder,
                    rank=file.rank,
                )
            ]
    # A reader should answer for each file. This one failed as a whole: find the file by halves
    # (jobs stay whole: a job of which only a part is read would be judged on that part).
    folders = sorted({f.folder for f in files})
    if len(folders) == 1:
        parts = [[f] for f in files]
    else:
        left = set(folders[: len(folders) // 2])
        parts = [[f for f in files if f.folder in left], [f for f in files if f.folder not in left]]
    read_parts = [_read(format_, part, beside) for part in parts]
    return concat([t for t, _ in read_parts]), [i for _, inputs in read_parts for i in inputs]
