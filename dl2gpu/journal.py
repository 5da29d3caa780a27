"""Finished shards on disk, so that a scan that was killed goes on where it was.

One file a shard, whole or not there, named by a hash of what went into it: the files with their
sizes and times of change, and the version of the program. A file that is damaged, or was made by
another version, counts as not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

import msgspec

from dl2gpu import __version__
from dl2gpu.shard import Result, Task
from dl2gpu.trace.files import filesystem, local_path, whole_file
from dl2gpu.trace.inputs import TraceFile

__all__ = ["Journal", "forget", "parts_of"]


class Journal:
    """Results of shards in a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def get(self, task: Task) -> Result | None:
        """The result of this task from an earlier scan, or None."""
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            return Result.decode(self._path(task).read_bytes())
        return None

    def put(self, task: Task, result: Result) -> None:
        """Keeps a result. A folder that cannot be written to only costs the continuation."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self._path(task)) as part:
                Path(part).write_bytes(result.encode())

    def _path(self, task: Task) -> Path:
        parts = [__version__, *(_identity(file) for file in task.files)]
        return self.folder / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"


def parts_of(out: Path) -> Path:
    """Where the shards of a report are kept until it is complete: a hidden folder beside it."""
    return out.with_name(f".{out.name or 'report'}.parts")


def forget(folder: Path) -> None:
    """Removes what was kept: the report is there."""
    shutil.rmtree(folder, ignore_errors=True)


def _identity(file: TraceFile) -> tuple[object, ...]:
    """What tells that a file is still the same: all that is known of it, and its time of change."""
    path = local_path(file.url)
    changed: object = None
    with contextlib.suppress(Exception):  # of a file that is not there any more nothing is known
        if path is not None:
            status = Path(path).stat()
            changed = (status.st_size, status.st_mtime_ns)
        else:
            fs, name = filesystem(file.url)
            changed = fs.ukey(name)
    return (repr(file), changed)
