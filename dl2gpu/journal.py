"""Finished shards on disk, so that a scan that was killed goes on where it was.

One file a shard, whole or not there, named by a hash of what went into it: the files with their
sizes and times of change (in a store: what the listing said of them), and the version of the
program. A file that is damaged, or was made by another version, counts as not there. What a store
did not answer is not kept: the next scan asks again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from pathlib import Path

import msgspec

from dl2gpu import __version__
from dl2gpu.shard import Result, Summary, Task
from dl2gpu.trace.files import local_path, whole_file
from dl2gpu.trace.inputs import TraceFile
from dl2gpu.trace.remote_errors import gave_up

__all__ = ["Journal", "forget", "parts_of"]


class Journal:
    """Results of shards in a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def get(self, task: Task) -> bytes | None:
        """The result of this task from an earlier scan, encoded, or None."""
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            data = self._path(task).read_bytes()
            Result.decode(data)
            return data
        return None

    def put(self, task: Task, data: bytes) -> None:
        """Keeps a result. A folder that cannot be written to only costs the continuation."""
        said = (i.reason for i in Summary.decode(data).inputs)
        if any(reason is not None and gave_up(reason) for reason in said):
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(self._path(task)) as part:
                Path(part).write_bytes(data)

    def _path(self, task: Task) -> Path:
        parts = [__version__, task.plan, *(_identity(file) for file in task.files)]
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
    if path is not None:
        with contextlib.suppress(OSError):  # of a file that is gone nothing is known
            status = Path(path).stat()
            changed = (status.st_size, status.st_mtime_ns)
    elif file.stamp is None or file.stamp.tag is None:
        changed = secrets.token_hex()  # nothing tells that it is the same: it is not
    return (repr(file), changed)
