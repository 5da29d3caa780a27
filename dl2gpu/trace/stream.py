"""A file as a run of decompressed pieces, for readers that never hold the whole.

The limits and refusals are those of :mod:`files`, which is for what is read at once. A local file
is read as it goes; an object of a store is spooled first (in memory where it is small); a member of
an archive is held as it is stored, its content is not.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Final

from dl2gpu.trace.files import (
    DEFAULT,
    Limits,
    StreamError,
    allowed_bytes,
    bomb,
    check_size,
    compression,
    cut_reason,
    inflated,
    is_member,
    local_path,
    opened,
    read_stored,
)
from dl2gpu.trace.inputs import InputError, TraceFile

__all__ = ["StreamCutError", "pieces"]

_PIECE: Final = 4 << 20


class StreamCutError(Exception):
    """A file ends too early or is damaged; raised behind its last piece."""


def pieces(file: TraceFile, limits: Limits = DEFAULT, size: int = _PIECE) -> Iterator[bytes]:
    """The content of ``file`` in order, decompressed through one layer where it is compressed.

    Pieces of a compressed file have about ``size`` bytes, those of another one no more.

    Raises:
        InputError: the file is gone, changed, may not be read, is not a regular file, or passes a
            limit.
        StreamCutError: nothing more can be read.
    """
    with _stored(file, limits) as (read, stored, loss):
        head = read(8)
        kind = compression(head)

        def again(n: int) -> bytes:
            nonlocal head
            if not head:
                return read(n)
            first, head = head[:n], head[n:]
            return first if len(first) == n else first + read(n - len(first))

        if kind is None:
            got = 0
            while piece := again(size):
                got += len(piece)  # what grows while it is read is held to the limit as well
                check_size(got, limits)
                yield piece
        else:
            yield from _unwrapped(again, kind, stored, limits, size)
        if loss is not None:
            raise StreamCutError(loss)


_Read = Callable[[int], bytes]
"""Gives so many bytes, and fewer at the end only."""


@contextlib.contextmanager
def _stored(file: TraceFile, limits: Limits) -> Iterator[tuple[_Read, int, str | None]]:
    """How to read the file as it is stored, its size, and why its end is missing."""
    local = local_path(file.url)
    if local is not None:
        with opened(local) as (fd, size):
            check_size(size, limits)
            with open(fd, "rb", buffering=0, closefd=False) as raw:
                yield io.BufferedReader(raw, 1 << 16).read, size, None
        return
    if is_member(file.url):
        data = read_stored(file, limits)
        yield io.BytesIO(data).read, len(data), cut_reason(data)
        return
    from dl2gpu.trace.containers_spool import spool_object

    source = spool_object(file.url, file.stamp, limits)
    at = 0

    def read(n: int) -> bytes:
        nonlocal at
        data = source.read_at(at, n)
        at += len(data)
        return data

    yield read, source.size, None


def _unwrapped(read: _Read, kind: str, stored: int, limits: Limits, size: int) -> Iterator[bytes]:
    allowed = allowed_bytes(stored, limits)
    total = waiting = 0
    held: list[bytes] = []
    reason = None
    try:
        for part in inflated(read, kind):
            total += len(part)
            if total > allowed:
                raise InputError(bomb(stored, kind, limits, allowed))
            held.append(part)
            waiting += len(part)
            if waiting >= size:
                yield b"".join(held)
                held, waiting = [], 0
    except StreamError as e:
        reason = f"the {kind} stream {e}; read what could be decompressed ({total} bytes)"
    if held:
        yield b"".join(held)
    if reason is not None:
        raise StreamCutError(reason)
