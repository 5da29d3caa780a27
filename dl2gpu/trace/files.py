"""The one place that opens files: local paths and fsspec URLs, compressed or not, within limits.

What is read is untrusted: only regular files are opened (a FIFO would block for ever, a device has
no end), a link put in the place of a listed file is refused, and decompression stops at a limit
before the memory does. Compression is recognised by content, never by name.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from dl2gpu.trace.inputs import InputError, TraceFile

__all__ = [
    "COMPRESSION",
    "DEFAULT",
    "CutBytes",
    "Limits",
    "compress",
    "compression",
    "cut_reason",
    "filesystem",
    "is_url",
    "load_ahead",
    "local_path",
    "opened",
    "read_bytes",
    "read_head",
    "read_pieces",
    "read_tail",
    "remote_errors",
    "unwrap",
    "whole_file",
]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one file may take.

    Each limit can be raised through the environment variable ``DL2GPU_`` plus its name in
    capitals, or by passing another ``Limits``.
    """

    max_file_bytes: int = 8 << 30
    """Bytes of one file, both as stored and after decompression."""
    max_ratio: int = 1000
    """Bytes after decompression for each stored byte (repetitive traces reach about 200)."""
    free_bytes: int = 64 << 20
    """Up to this size the ratio is not looked at: a small file may hold a very regular trace."""

    @classmethod
    def from_environment(cls) -> Limits:
        """Defaults, with what ``DL2GPU_MAX_FILE_BYTES`` and its like say."""
        found: dict[str, int] = {}
        for name in ("max_file_bytes", "max_ratio", "free_bytes"):
            text = os.environ.get(f"DL2GPU_{name.upper()}")
            if text is None:
                continue
            if not re.fullmatch(r"[1-9][0-9]{0,17}", text):
                raise InputError(
                    f"DL2GPU_{name.upper()}: expected a whole number above 0, found {text!r}"
                )
            found[name] = int(text)
        return cls(**found)


DEFAULT: Final = Limits.from_environment()

COMPRESSION: Final[dict[bytes, str]] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
}
"""First bytes of the compressed streams that are unwrapped."""
_MAGICS: Final = tuple(COMPRESSION)

_PIECE: Final = {"gzip": 1 << 16, "zstd": 1 << 9, "bzip2": 1 << 16, "xz": 1 << 16}
"""Compressed bytes fed at once. A zstd step has no output limit: 512 bytes can give 16 MB."""
_STEP: Final = 4 << 20
"""Decompressed bytes taken at once, where the library can be told."""
_XZ_MEMORY: Final = 256 << 20


class CutBytes(bytes):
    """Content of a compressed file that ended too early or broke: what could be inflated."""

    reason: str


def cut_reason(data: bytes) -> str | None:
    """Why ``data`` (from :func:`read_bytes`) is not the whole content; None where it is."""
    return data.reason if isinstance(data, CutBytes) else None


def compression(head: bytes) -> str | None:
    """Name of the compression that ``head``, the first bytes of a file, starts with."""
    if not head.startswith(_MAGICS):
        return None
    return next(name for magic, name in COMPRESSION.items() if head.startswith(magic))


def is_url(path: str) -> bool:
    """True for ``scheme://...`` and chained fsspec URLs; false for local paths, ``C:\\`` too."""
    return path[:1] != "/" and bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]+(://|::)", path))


def local_path(url: str) -> str | None:
    """The path of a local file, None for what only fsspec can open."""
    if url.startswith("file://"):
        return url[len("file://") :]
    return None if is_url(url) else url


# --------------------------------------------------------------------------------------------------
# Reading


def read_bytes(file: TraceFile, limits: Limits = DEFAULT) -> bytes:
    """Content of ``file``, decompressed.

    A compressed stream that ends too early or is damaged gives what inflates as
    :class:`CutBytes`; ask :func:`cut_reason`.

    Raises:
        InputError: the file is gone, may not be read, is not a regular file, or passes a limit.
    """
    return unwrap(_read_raw(file.url, limits), limits)


def load_ahead(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes], ahead: int = 16
) -> Iterator[bytes | InputError]:
    """What ``load`` gives for each file, or the error that it raises, in the order of ``files``.

    From a store, ``ahead`` files are fetched at the same time: the wait is for answers, not bytes.
    """

    def one(file: TraceFile) -> bytes | InputError:
        try:
            return load(file)
        except InputError as e:
            return e

    if not any(local_path(f.url) is None for f in files):
        yield from map(one, files)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(ahead) as pool:
        waiting = deque(pool.submit(one, f) for f in files[:ahead])
        for file in files[ahead:]:
            yield waiting.popleft().result()
            waiting.append(pool.submit(one, file))
        while waiting:
            yield waiting.popleft().result()


def read_pieces(file: TraceFile, size: int, limits: Limits = DEFAULT) -> Iterator[bytes]:
    """Content of ``file``, decompressed, in pieces of about ``size`` bytes: bounded memory.

    Of a compressed file the stored bytes are held whole, its content is not. A compressed stream
    that ends too early or is damaged gives what inflates, and then raises.

    Raises:
        InputError: as :func:`read_bytes`; "read what ..." where only the rest is lost.
    """
    if compression(read_head_raw(file.url)) is None:
        yield from _raw_pieces(file.url, size, limits)
        return
    raw = _read_raw(file.url, limits)
    kind = compression(raw[:8]) or ""
    allowed = min(limits.max_file_bytes, max(limits.free_bytes, limits.max_ratio * len(raw)))
    total = 0
    held: list[bytes] = []
    waiting = 0
    try:
        for part in _inflate(raw, kind):
            total += len(part)
            if total > allowed:
                raise InputError(_bomb(raw, kind, limits, allowed))
            held.append(part)
            waiting += len(part)
            if waiting >= size:
                yield b"".join(held)
                held, waiting = [], 0
    except _StreamError as e:
        if held:
            yield b"".join(held)
        reason = f"the {kind} stream {e}; read what could be decompressed ({total} bytes)"
        raise InputError(reason) from e
    if held:
        yield b"".join(held)


def read_head_raw(url: str) -> bytes:
    """The first bytes as stored: enough to recognise a compression."""
    return _read_range(url, 0, 8)


def _raw_pieces(url: str, size: int, limits: Limits) -> Iterator[bytes]:
    path = local_path(url)
    if path is not None:
        with opened(path) as (fd, total):
            _check_size(total, limits)
            while data := os.read(fd, size):
                yield data
        return
    with remote_errors():
        fs, name = filesystem(url)
        total = int(fs.info(name).get("size") or 0)
        _check_size(total, limits)
        with fs.open(name, "rb") as stream:
            while data := stream.read(size):
                yield data


def read_head(url: str, size: int) -> tuple[bytes, str | None]:
    """The first ``size`` bytes of the content and the compression they were under.

    Raises:
        InputError: as :func:`read_bytes`.
    """
    head = _read_range(url, 0, size)
    kind = compression(head)
    if kind is None:
        return head, None
    # A block gives nothing before it is whole: up to 128 kB in zstd, 900 kB in bzip2.
    for step in _HEAD_STEPS:
        if step > size:
            head = _read_range(url, 0, step)
        out = bytearray()
        with contextlib.suppress(_StreamError):
            for part in _inflate(head, kind):
                out += part
                if len(out) >= size:
                    break
        if len(out) >= size or len(head) < step:
            break
    return bytes(out[:size]), kind


_HEAD_STEPS: Final = (4 << 10, 128 << 10, 1 << 20)


def read_tail(url: str, size: int) -> bytes:
    """The last ``size`` bytes of the stored file (not decompressed)."""
    return _read_range(url, -size, None)


def _read_raw(url: str, limits: Limits) -> bytes:
    path = local_path(url)
    if path is not None:
        with opened(path) as (fd, size):
            _check_size(size, limits)
            return _read_at(fd, 0, size)
    with remote_errors():
        fs, name = filesystem(url)
        size = int(fs.info(name).get("size") or 0)
        _check_size(size, limits)
        data: bytes = fs.cat_file(name)
    _check_size(len(data), limits)
    return data


def _read_range(url: str, start: int, stop: int | None) -> bytes:
    path = local_path(url)
    if path is not None:
        fd, size = _open(path)
        try:
            first = max(0, size + start) if start < 0 else start
            return _read_at(fd, first, (size if stop is None else stop) - first)
        finally:
            os.close(fd)
    with remote_errors():
        fs, name = filesystem(url)
        data: bytes = fs.cat_file(name, start=start, end=stop)
        return data


# NOFOLLOW: discovery resolved every link; one that appeared since then leads elsewhere.
# NONBLOCK: opening a FIFO would wait for a writer.
_FLAGS: Final = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)


def _open(path: str) -> tuple[int, int]:
    """Descriptor and size of a regular file; raises as :func:`opened`."""
    try:
        fd = os.open(path, _FLAGS)
    except OSError as e:
        raise InputError(f"cannot be opened: {e.strerror or e}") from e
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        return fd, status.st_size
    os.close(fd)
    raise InputError("expected a regular file, found a folder, pipe, socket or device")


@contextlib.contextmanager
def opened(path: str) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a regular file.

    Raises:
        InputError: it cannot be opened, or is something else, or a link.
    """
    fd, size = _open(path)
    try:
        yield fd, size
    finally:
        os.close(fd)


def _read_at(fd: int, first: int, size: int) -> bytes:
    """``size`` bytes from ``first`` on, or as many as there are."""
    if first:
        os.lseek(fd, first, os.SEEK_SET)
    data = os.read(fd, max(0, size))
    if len(data) >= size or not data:
        return data
    parts = [data]  # one call gives two gigabytes at most
    size -= len(data)
    while size > 0 and (data := os.read(fd, size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the name that it has there."""
    from fsspec.core import url_to_fs  # late: only buckets need it

    fs, name = url_to_fs(url)
    return fs, name


@contextlib.contextmanager
def remote_errors(url: str | None = None) -> Iterator[None]:
    """What a store raises, as InputError; the message begins with ``url`` where one is given."""
    where = f"{url}: " if url else ""
    try:
        yield
    except InputError:
        raise
    except ImportError as e:
        raise InputError(f"{where}needs a package that is not installed: {e}") from e
    except Exception as e:  # every store has its own exceptions
        raise InputError(f"{where}cannot be read: {type(e).__name__}: {e}") from e


def _check_size(size: int, limits: Limits) -> None:
    if size > limits.max_file_bytes:
        raise InputError(
            f"holds {size} bytes; the limit is {limits.max_file_bytes}. To read it all the same, "
            f"set DL2GPU_MAX_FILE_BYTES={size} or pass Limits(max_file_bytes={size})"
        )


# --------------------------------------------------------------------------------------------------
# Decompression


class _StreamError(Exception):
    """A compressed stream ended too early or is damaged."""


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def unwrap(raw: bytes, limits: Limits = DEFAULT) -> bytes:
    """``raw``, decompressed through one layer where it is compressed.

    Raises:
        InputError: the content is larger than the limits allow.
    """
    kind = compression(raw[:8])
    if kind is None:
        return raw
    allowed = min(limits.max_file_bytes, max(limits.free_bytes, limits.max_ratio * len(raw)))
    parts: list[bytes] = []
    size = 0
    reason: str | None = None
    try:
        for part in _inflate(raw, kind):
            size += len(part)
            if size > allowed:
                raise InputError(_bomb(raw, kind, limits, allowed))
            parts.append(part)
    except _StreamError as e:
        reason = f"the {kind} stream {e}; read what could be decompressed ({size} bytes)"
    if reason is None:
        return b"".join(parts)
    cut = CutBytes(b"".join(parts))
    cut.reason = reason
    return cut


def _bomb(raw: bytes, kind: str, limits: Limits, allowed: int) -> str:
    if allowed == limits.max_file_bytes:
        name, value, more = "max_file_bytes", limits.max_file_bytes, 4 * limits.max_file_bytes
    else:
        name, value, more = "max_ratio", limits.max_ratio, 10 * limits.max_ratio
    return (
        f"{len(raw)} bytes of {kind} decompress to more than {allowed} bytes, which passes the "
        f"limit {name} = {value}: a decompression bomb, or a very regular trace. To read it all "
        f"the same, set DL2GPU_{name.upper()}={more} or pass Limits({name}={more})"
    )


def _inflate(raw: bytes, kind: str) -> Iterator[bytes]:
    """Decompressed parts of the streams in ``raw`` (several may stand one after the other)."""
    rest = memoryview(raw)
    while rest:
        if compression(bytes(rest[:8])) != kind:
            if not bytes(rest).strip(b"\0"):  # padding of tapes and of some object stores
                return
            raise _StreamError("is followed by other bytes")
        one = _decompressor(kind)
        position = 0
        while not one.eof:
            piece = bytes(rest[position : position + _PIECE[kind]])
            if not piece:
                raise _StreamError("ends too early")
            position += len(piece)
            try:
                yield from _step(one, kind, piece)
            except InputError:
                raise
            except Exception as e:  # zlib.error, ZstdError, LZMAError, OSError, ...
                raise _StreamError(f"is damaged ({e})") from e
        rest = rest[position - len(one.unused_data) :]


def _step(one: Any, kind: str, piece: bytes) -> Iterator[bytes]:
    if kind == "zstd":
        yield one.decompress(piece)
        return
    yield one.decompress(piece, _STEP)
    if kind == "gzip":
        while one.unconsumed_tail:
            yield one.decompress(one.unconsumed_tail, _STEP)
        return
    while not one.needs_input and not one.eof:
        yield one.decompress(b"", _STEP)


def _decompressor(kind: str) -> _Decompressor:
    if kind == "gzip":
        import zlib

        return zlib.decompressobj(31)
    if kind == "bzip2":
        import bz2

        return bz2.BZ2Decompressor()
    if kind == "xz":
        import lzma

        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
    try:
        import zstandard
    except ImportError as e:
        raise InputError("is compressed with zstd: install the package zstandard") from e
    one: _Decompressor = zstandard.ZstdDecompressor().decompressobj()
    return one


# --------------------------------------------------------------------------------------------------
# Writing


def compress(data: bytes, name: str) -> bytes:
    """``data`` as the end of ``name`` says: .gz, .zst, or as it is."""
    if name.endswith(".gz"):
        import gzip

        return gzip.compress(data, 6, mtime=0)  # the same data gives the same file
    if name.endswith(".zst"):
        import zstandard

        return zstandard.ZstdCompressor(level=3).compress(data)
    return data


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary name beside ``path``; what was written there takes ``path``'s place at the end.

    Whole or not at all: after an exception or a kill, ``path`` is as it was before.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield str(temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
