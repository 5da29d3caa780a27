"""Bytes that can be read at any place: of a file, of a part of another, or spooled.

What comes as a stream (a compressed archive, or one in a store) is read through once, into memory
where it is small, else into an unnamed temporary file, which is gone with the process.
"""

from __future__ import annotations

import io
import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Final, Protocol

from dl2gpu.trace.files import (
    Limits,
    StreamError,
    allowed_bytes,
    bomb,
    check_size,
    inflated,
    opened,
)
from dl2gpu.trace.inputs import InputError, Stamp

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

__all__ = [
    "FileSource",
    "Reader",
    "Slice",
    "Source",
    "Spool",
    "spool_inflated",
    "spool_object",
    "temporary_file",
]

_IN_MEMORY: Final = 8 << 20


class Source(Protocol):
    """Bytes at any place."""

    @property
    def size(self) -> int: ...

    @property
    def spooled(self) -> int:
        """Bytes on disk that are there for this source alone."""
        ...

    def read_at(self, first: int, size: int) -> bytes:
        """``size`` bytes from ``first`` on, or as many as there are."""
        ...


def _read_all(fd: int, first: int, size: int) -> bytes:
    data = os.pread(fd, max(0, size), first)
    if len(data) >= size or not data:
        return data
    parts = [data]
    got = len(data)
    while got < size and (data := os.pread(fd, size - got, first + got)):
        parts.append(data)
        got += len(data)
    return b"".join(parts)


class FileSource:
    """A local file, which must stay as it is."""

    spooled = 0

    def __init__(self, path: str, stamp: Stamp | None) -> None:
        with opened(path) as (fd, size):
            self._fd = os.dup(fd)
            self.size = size
        weakref.finalize(self, os.close, self._fd)
        self.stamp = self._now()
        if stamp is not None and stamp != self.stamp:
            raise InputError("changed during the scan (another size or time of change): scan again")

    def _now(self) -> Stamp:
        status = os.fstat(self._fd)
        return Stamp(status.st_size, f"mtime={status.st_mtime_ns}")

    def read_at(self, first: int, size: int) -> bytes:
        data = _read_all(self._fd, first, size)
        if self._now() != self.stamp:
            raise InputError("changed during the scan (another size or time of change): scan again")
        return data


class Slice:
    """A part of another source."""

    spooled = 0

    def __init__(self, source: Source, first: int, size: int) -> None:
        self._source = source
        self._first = first
        self.size = max(0, min(size, source.size - first))

    def read_at(self, first: int, size: int) -> bytes:
        return self._source.read_at(self._first + first, max(0, min(size, self.size - first)))


class Spool:
    """What was written to it, in memory or in an unnamed temporary file."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._fd: int | None = None
        self.size = 0
        self._data = b""

    @property
    def spooled(self) -> int:
        return 0 if self._fd is None else self.size

    def write(self, data: bytes) -> None:
        self.size += len(data)
        if self._fd is None:
            self._parts.append(data)
            if self.size <= _IN_MEMORY:
                return
            data = b"".join(self._parts)
            self._parts.clear()
            self._fd = temporary_file()
            weakref.finalize(self, os.close, self._fd)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as e:
            raise InputError(
                f"expected room for its content in {tempfile.gettempdir()}, found none after "
                f"{self.size} bytes ({e.strerror}): set TMPDIR to a folder with more"
            ) from e

    def finish(self) -> Spool:
        """To be called after the last write."""
        if self._fd is None:
            self._data = b"".join(self._parts)
            self._parts.clear()
        return self

    def read_at(self, first: int, size: int) -> bytes:
        if self._fd is None:
            return self._data[first : first + max(0, size)]
        return _read_all(self._fd, first, size)


def temporary_file() -> int:
    """A file without a name: nothing of it is left, however the process ends."""
    try:
        fd, path = tempfile.mkstemp(prefix="dl2gpu-")
    except OSError as e:
        raise InputError(
            f"expected a temporary folder to write to, found none ({e.strerror or e}): set TMPDIR"
        ) from e
    os.unlink(path)  # noqa: PTH108 - a descriptor is all that is kept
    return fd


class Reader(io.RawIOBase):
    """A source as a file, for libraries; refuses to give more than ``most`` bytes at once."""

    def __init__(self, source: Source, most: int | None = None) -> None:
        super().__init__()
        self._source = source
        self._at = 0
        self._most = most

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size}[whence]
        if base + offset < 0:
            raise OSError("a place before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            size = max(0, self._source.size - self._at)
        if self._most is not None and size > self._most:
            raise InputError(f"a header of {size} bytes; expected {self._most} at most")
        data = self._source.read_at(self._at, size)
        self._at += len(data)
        return data


def spool_inflated(source: Source, kind: str, limits: Limits) -> tuple[Spool, str | None]:
    """What the compressed streams in ``source`` inflate to, and what is wrong with them.

    Raises:
        InputError: it is more than the limits allow.
    """
    allowed = allowed_bytes(source.size, limits)
    spool = Spool()
    reason: str | None = None
    try:
        for part in inflated(io.BufferedReader(Reader(source), 1 << 20).read, kind):
            if spool.size + len(part) > allowed:
                raise InputError(bomb(source.size, kind, limits, allowed))
            spool.write(part)
    except StreamError as e:
        reason = f"the {kind} stream {e}; read what could be decompressed ({spool.size} bytes)"
    return spool.finish(), reason


def spool_object(url: str, stamp: Stamp | None, limits: Limits) -> Spool:
    """An object of a store, read through once.

    Raises:
        InputError: as :func:`remote.fetch`.
    """
    from dl2gpu.trace.remote import download

    spool = Spool()
    download(url, stamp, spool.write, lambda size: check_size(size, limits))
    return spool.finish()
