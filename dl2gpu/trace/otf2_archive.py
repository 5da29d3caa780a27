"""Reader of OTF2 archives of MPI programs (Score-P, Vampir), through the package ``otf2``.

An archive is a folder: an anchor (``traces.otf2``), definitions, and a file of events for each
location. The library that reads it is compiled code, so a process of its own does that
(:mod:`otf2_export`) and hands back native JSON Lines; whatever a damaged archive does to it is a
reason to quarantine the archive, no more. Source: FORMATS.md section 7.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import polars as pl

from dl2gpu.trace import native
from dl2gpu.trace.files import DEFAULT, local_path
from dl2gpu.trace.inputs import Input, InputError, Status, TraceFile
from dl2gpu.trace.schema import Trace, concat

__all__ = ["FORMAT", "read"]

FORMAT: Final = "otf2"
_SECONDS: Final = 3600
_MEMORY: Final = 16 << 30


def read(files: Sequence[TraceFile]) -> tuple[Trace, list[Input]]:
    """Read the archives whose anchors are ``files`` into one trace; each is a job.

    Returns:
        The trace, and what became of each archive, in the order of ``files``.
    """
    traces, inputs = [], []
    for file in files:
        try:
            trace, found = _archive(file)
        except InputError as error:
            reason = str(error)
            trace = Trace()
            found = Input(file.path, "quarantined", reason, FORMAT, job=file.job or file.folder)
        traces.append(trace)
        inputs.append(found)
    return concat(traces), inputs


def _archive(file: TraceFile) -> tuple[Trace, Input]:
    if find_spec("otf2") is None:
        raise InputError(
            "an OTF2 archive: to read it, install the package otf2 (pip install 'dl2gpu[otf2]')"
        )
    anchor = local_path(file.url)
    if anchor is None:
        raise InputError("an OTF2 archive in a store: copy its whole folder to this machine first")
    _check(Path(anchor))
    with tempfile.TemporaryDirectory(prefix="dl2gpu-otf2-") as folder:
        _export(anchor, folder)
        parts = [
            replace(file, path=p.name, url=str(p), format="native", size=p.stat().st_size)
            for p in sorted(Path(folder).glob("rank_*.jsonl"))
        ]
        trace, read_parts = native.read(parts)
    lost = [f"{i.path}: {i.reason}" for i in read_parts if i.status != "read"]
    trace = replace(trace, ranks=trace.ranks.with_columns(path=pl.lit(file.path)))
    status: Status = "partial" if lost else "read"
    return trace, Input(
        path=file.path,
        status=status,
        reason="; ".join(lost[:4]) or None,
        format=FORMAT,
        job=next((i.job for i in read_parts), file.folder),
        events=sum(i.events for i in read_parts),
    )


def _check(anchor: Path) -> None:
    """The files of the archive are regular ones, where they should be, and not too large."""
    beside = [p for p in anchor.parent.iterdir() if p.name.startswith(f"{anchor.stem}.")]
    inside = anchor.with_suffix("")
    if inside.is_symlink():
        raise InputError(f"{inside.name} is a link: expected the folder of the archive's events")
    if inside.is_dir():
        beside += inside.iterdir()
    size = 0
    for path in beside:
        if path.is_symlink() or not path.is_file():
            raise InputError(f"{path.name} is no regular file: expected those of an OTF2 archive")
        size += path.stat().st_size
    if size > DEFAULT.max_file_bytes:
        raise InputError(
            f"the archive holds {size} bytes; the limit is {DEFAULT.max_file_bytes}. To read it "
            f"all the same, set DL2GPU_MAX_FILE_BYTES={size}"
        )


def _limits() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _export(anchor: str, folder: str) -> None:
    """Runs :mod:`otf2_export` on the archive. ``-P``: nothing is imported from where it stands."""
    program = Path(__file__).with_name("otf2_export.py")
    options: dict[str, Any] = {"preexec_fn": _limits} if os.name == "posix" else {}
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-P", str(program), str(Path(anchor).absolute()), folder],
            capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS, check=False,
            cwd=folder, **options,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"the OTF2 library could not be run: {error}") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        why = said[-1][:300] if said else f"it ended with status {done.returncode}"
        raise InputError(
            f"the OTF2 library cannot read the archive ({why}): it is cut, damaged, or lacks its "
            "global definitions, as after a crash"
        )
