"""A file as a run of decompressed pieces, for readers that never hold the whole.

The limits and refusals are those of :mod:`files`, which holds for all that is read at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from dl2gpu.trace import files
from dl2gpu.trace.files import DEFAULT, Limits
from dl2gpu.trace.inputs import InputError, TraceFile

__all__ = ["StreamCutError", "pieces"]

_PIECE: Final = 4 << 20


class StreamCutError(Exception):
    """A compressed stream ended too early or is damaged; raised behind its last piece."""


def pieces(file: TraceFile, limits: Limits = DEFAULT) -> Iterator[bytes]:
    """The content of ``file`` in order, decompressed through one layer where it is compressed.

    Raises:
        InputError: the file is gone, may not be read, is not a regular file, or passes a limit.
        StreamCutError: nothing more can be decompressed.
    """
    local = files.local_path(file.url)
    if local is None:
        with files.remote_errors():
            fs, name = files.filesystem(file.url)
            size = int(fs.info(name).get("size") or 0)
            remote = fs.open(name, "rb", block_size=_PIECE)
        files._check_size(size, limits)
        with remote:
            yield from _content(lambda: _fetched(remote), size, limits)
        return
    if not os.path.lexists(local):
        # a name that only `files` understands
        data = files.read_bytes(file, limits)
        yield data
        if (reason := files.cut_reason(data)) is not None:
            raise StreamCutError(reason)
        return
    with files.opened(local) as (fd, size):
        files._check_size(size, limits)
        yield from _content(lambda: os.read(fd, _PIECE), size, limits)


def _fetched(remote: Any) -> bytes:
    with files.remote_errors():
        data: bytes = remote.read(_PIECE)
        return data


def _content(more: Callable[[], bytes], size: int, limits: Limits) -> Iterator[bytes]:
    first = more()
    raw = _raw(first, more, limits)
    kind = files.compression(first[:8])
    return raw if kind is None else _unwrapped(raw, kind, size, limits)


def _raw(piece: bytes, more: Callable[[], bytes], limits: Limits) -> Iterator[bytes]:
    """All pieces; what grows while it is read is held to the limit as well."""
    size = 0
    while piece:
        size += len(piece)
        if size > limits.max_file_bytes:
            files._check_size(size, limits)
        yield piece
        piece = more()


def _unwrapped(raw: Iterator[bytes], kind: str, stored: int, limits: Limits) -> Iterator[bytes]:
    allowed = min(limits.max_file_bytes, max(limits.free_bytes, limits.max_ratio * stored))
    size = 0
    try:
        for part in _inflate(raw, kind):
            size += len(part)
            if size > allowed:
                raise InputError(files._bomb(b"", kind, limits, allowed, stored))
            yield part
    except files._StreamError as e:
        raise StreamCutError(
            f"the {kind} stream {e}; read what could be decompressed ({size} bytes)"
        ) from e


def _inflate(raw: Iterator[bytes], kind: str) -> Iterator[bytes]:
    """Decompressed parts of the streams in ``raw`` (several may stand one after the other)."""
    one: Any = None
    step = files._PIECE[kind]
    for piece in raw:
        rest = memoryview(piece)
        while rest:
            if one is None:
                # the first bytes of a further stream may be cut between two pieces
                if files.compression(bytes(rest[:8])) != kind and len(rest) >= 8:
                    if not bytes(rest).strip(b"\0"):  # padding of tapes and of some object stores
                        break
                    raise files._StreamError("is followed by other bytes")
                one = files._decompressor(kind)
            part = bytes(rest[:step])
            rest = rest[len(part) :]
            try:
                yield from files._step(one, kind, part)
            except InputError:
                raise
            except Exception as e:  # zlib.error, ZstdError, LZMAError, OSError, ...
                raise files._StreamError(f"is damaged ({e})") from e
            if one.eof:
                left = one.unused_data
                rest = memoryview(left + bytes(rest)) if left else rest
                one = None
    if one is not None:
        raise files._StreamError("ends too early")
