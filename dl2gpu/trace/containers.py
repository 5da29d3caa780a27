"""Files in archives: tar and zip, compressed as a whole or not, in one another, local or remote.

The URL of a member is ``member://ARCHIVE/NAME``, where ARCHIVE is the archive's URL, quoted, and
may be a member itself. That, with the archive's stamp, is all that a worker on another machine
needs. An archive that was opened stays open for the members that follow; what had to be inflated
or fetched for it is read through once in a process and spooled (``containers_spool``).
"""

from __future__ import annotations

import os
import re
import struct
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote

from dl2gpu.trace.containers_index import Index, Member, container_kind, index_of
from dl2gpu.trace.containers_spool import (
    FileSource,
    Slice,
    Source,
    Spool,
    spool_inflated,
    spool_object,
)
from dl2gpu.trace.files import (
    DEFAULT,
    MEMBER,
    Limits,
    allowed_bytes,
    bomb,
    check_size,
    compression,
    cut,
    is_member,
    local_path,
)
from dl2gpu.trace.inputs import InputError, Stamp
from dl2gpu.trace.remote_errors import gave_up

__all__ = [
    "CONTAINERS",
    "DEEPEST",
    "Contents",
    "contents",
    "depth",
    "forget",
    "member_url",
    "read_member",
    "read_member_range",
]

CONTAINERS: Final = frozenset({"tar", "zip"})
"""Formats of archives whose members are files of the scan."""
DEEPEST: Final = 3
"""Archives in one another: of one that lies deeper, the members are not looked at."""
_OPEN: Final = 32
"""Archives that are kept open."""
_SPOOLED: Final = 16 << 30
"""Bytes in temporary files of archives that are kept open; ``DL2GPU_SPOOL_BYTES`` changes it."""
_STEP: Final = 1 << 20


def member_url(archive: str, name: str) -> str:
    """The URL of a member."""
    return f"{MEMBER}{quote(archive, safe='')}/{name}"


def _split(url: str) -> tuple[str, str]:
    archive, _, name = url.removeprefix(MEMBER).partition("/")
    return unquote(archive), name


def depth(url: str) -> int:
    """How many archives ``url`` lies in."""
    count = 0
    while is_member(url):
        url, _ = _split(url)
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Contents:
    """What an archive holds."""

    kind: str
    members: list[Member]
    loss: str | None
    """Why there may be more, or why they may be cut."""
    stamp: Stamp
    """Of the archive (the outermost one)."""


def contents(url: str, stamp: Stamp | None, limits: Limits = DEFAULT) -> Contents:
    """What the archive at ``url`` holds.

    Raises:
        InputError: it cannot be read, or passes a limit.
    """
    archive = _open(url, stamp, limits)
    return Contents(archive.index.kind, archive.index.members, archive.index.loss, archive.stamp)


def read_member(url: str, stamp: Stamp | None, limits: Limits = DEFAULT) -> bytes:
    """The content of a member, as it is stored in the archive; CutBytes where its end is missing.

    Raises:
        InputError: the archive cannot be read, is not the one that was listed, or has no such
            member; or the member passes a limit.
    """
    archive_url, name = _split(url)
    return _open(archive_url, stamp, limits).read(name, None, limits)


def read_member_range(
    url: str, start: int, stop: int | None, stamp: Stamp | None, limits: Limits = DEFAULT
) -> bytes:
    """Bytes ``start`` to ``stop`` of a member; a negative ``start``: the last ones."""
    archive_url, name = _split(url)
    archive = _open(archive_url, stamp, limits)
    if start >= 0 and stop is not None:
        return archive.read(name, stop, limits)[start:]
    return archive.tail(name, start, limits) if start < 0 else archive.read(name, None, limits)


class _Archive:
    """An open archive."""

    def __init__(
        self, source: Source, index: Index, stamp: Stamp, spooled: int, loss: str | None
    ) -> None:
        self.source = source
        self.index = index
        self.stamp = stamp
        self.spooled = spooled
        self.loss = loss
        self.by_name = {m.name: m for m in index.members if m.status == "read"}

    def _member(self, name: str) -> Member:
        member = self.by_name.get(name)
        if member is None:
            raise InputError(f"expected {name[:200]!r} in the archive, found no such member")
        return member

    def read(self, name: str, most: int | None, limits: Limits) -> bytes:
        """The content of a member, or its first ``most`` bytes."""
        member = self._member(name)
        if most is None:
            check_size(member.size, limits)
        if member.info is None:
            size = member.size if most is None else min(most, member.size)
            data = self.source.read_at(member.first, size)
            if member.lost and len(data) < size:
                return cut(data, f"the archive ends {member.lost} bytes before the file does")
            if len(data) < size:
                raise InputError("changed during the scan: scan again")
            return data
        return self._inflated(member, most, limits)

    def tail(self, name: str, start: int, limits: Limits) -> bytes:
        """The last ``-start`` bytes of a member."""
        member = self._member(name)
        if member.info is None:
            size = member.size - member.lost
            first = max(0, size + start)
            return self.source.read_at(member.first + first, size - first)
        return self.read(name, None, limits)[start:]

    def _inflated(self, member: Member, most: int | None, limits: Limits) -> bytes:
        assert member.info is not None
        assert self.index.zip is not None
        packed = member.info.compress_size
        allowed = allowed_bytes(packed, limits)
        if member.size > allowed:
            raise InputError(bomb(packed, "zip", limits, allowed))
        left = member.size if most is None else min(most, member.size)
        parts: list[bytes] = []
        reason: str | None = None
        try:
            for part in self._unpacked(member.info):
                parts.append(part[:left])
                left -= len(part)
                if left <= 0:
                    break
        except InputError:
            raise
        except Exception as e:  # BadZipFile, zlib.error, EOFError, ...
            words = " ".join(str(e).split())[:200] or type(e).__name__
            reason = f"its part of the zip archive is damaged ({words})"
            if not parts:
                raise InputError(reason) from e
        data = b"".join(parts)
        if reason is None and left > 0:
            reason = f"its part of the zip archive ends {left} bytes too early"
        if reason is None and most is None and zlib.crc32(data) != member.info.CRC:
            reason = "its part of the zip archive is damaged (another checksum than expected)"
        return data if reason is None else cut(data, reason)

    def _unpacked(self, info: zipfile.ZipInfo) -> Iterator[bytes]:
        """Parts of a member's content; of a damaged one, those before the damage."""
        assert self.index.zip is not None
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            with self.index.zip.open(info) as file:
                while part := file.read(_STEP):
                    yield part
            return
        head = self.source.read_at(info.header_offset, 30)
        if head[:4] != b"PK\x03\x04" or len(head) < 30:
            raise InputError("its part of the zip archive is damaged (no header)")
        first = info.header_offset + 30 + sum(struct.unpack_from("<HH", head, 26))
        end = first + info.compress_size
        if info.compress_type == zipfile.ZIP_STORED:
            for at in range(first, end, _STEP):
                yield self.source.read_at(at, min(_STEP, end - at))
            return
        one = zlib.decompressobj(-zlib.MAX_WBITS)
        while first < end and not one.eof:
            piece = self.source.read_at(first, min(1 << 16, end - first))
            if not piece:
                return
            first += len(piece)
            while piece:
                yield one.decompress(piece, _STEP)
                piece = one.unconsumed_tail

    def part(self, name: str, limits: Limits) -> Source:
        """A member as a source, for an archive in this one."""
        member = self._member(name)
        if member.info is None:
            return Slice(self.source, member.first, member.size)
        spool = Spool()
        data = self.read(name, None, limits)
        spool.write(data)
        return spool.finish()


# --------------------------------------------------------------------------------------------------
# Open archives


class _Shelf:
    """Archives that were opened lately."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, Stamp | None], _Archive | InputError] = OrderedDict()
        self._opening: dict[tuple[str, Stamp | None], threading.Lock] = {}

    def get(self, url: str, stamp: Stamp | None, limits: Limits) -> _Archive:
        key = (url, stamp)
        with self._lock:
            archive = self._kept.get(key)
            if archive is not None:
                self._kept.move_to_end(key)
                return _or_raise(archive)
            opening = self._opening.setdefault(key, threading.Lock())
        with opening:  # others wait for the one that reads it through
            with self._lock:
                archive = self._kept.get(key)
            if archive is None:
                try:
                    archive = _opened(url, stamp, limits)
                except InputError as e:
                    if gave_up(str(e)):
                        raise
                    archive = e  # its other members need not find out again
                with self._lock:
                    self._keep(key, archive)
        return _or_raise(archive)

    def _keep(self, key: tuple[str, Stamp | None], archive: _Archive | InputError) -> None:
        self._opening.pop(key, None)
        self._kept[key] = archive
        # discovery knows no stamp of a local file; the workers are told the one that it found
        if key[1] is None and isinstance(archive, _Archive):
            self._kept[key[0], archive.stamp] = archive
        room = _spool_bytes()
        while len(self._kept) > 2 * _OPEN or self._spooled() > room:
            oldest = next(iter(self._kept))
            if self._kept[oldest] is archive:
                break
            del self._kept[oldest]

    def _spooled(self) -> int:
        kept = {id(a): a.spooled for a in self._kept.values() if isinstance(a, _Archive)}
        return sum(kept.values())

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


def _or_raise(archive: _Archive | InputError) -> _Archive:
    if isinstance(archive, InputError):
        raise InputError(str(archive))
    return archive


_shelf: Final = _Shelf()


def forget() -> None:
    """Closes the archives that are open; their temporary files are gone with that."""
    _shelf.clear()


def _spool_bytes() -> int:
    text = os.environ.get("DL2GPU_SPOOL_BYTES", str(_SPOOLED))
    if not re.fullmatch(r"[1-9][0-9]{0,17}", text):
        raise InputError(f"DL2GPU_SPOOL_BYTES: expected a whole number above 0, found {text!r}")
    return int(text)


def _open(url: str, stamp: Stamp | None, limits: Limits) -> _Archive:
    return _shelf.get(url, stamp, limits)


def _opened(url: str, stamp: Stamp | None, limits: Limits) -> _Archive:
    path = local_path(url)
    loss: str | None = None
    source: Source
    spooled = 0
    if is_member(url):
        outer_url, name = _split(url)
        outer = _open(outer_url, stamp, limits)
        source = outer.part(name, limits)
        spooled = source.spooled
        stamp = outer.stamp
    elif path is not None:
        source = local = FileSource(path, stamp)
        check_size(source.size, limits)
        stamp = local.stamp
    else:
        source = spool_object(url, stamp, limits)
        spooled = source.spooled
        stamp = stamp or Stamp(source.size)
    kind = compression(source.read_at(0, 8))
    if kind is not None:
        source, loss = spool_inflated(source, kind, limits)
        spooled = source.spooled
    container = container_kind(source.read_at(0, 512))
    if container is None:
        raise InputError("expected a tar or zip archive, found something else: scan again")
    index = index_of(source, container, limits)
    losses = [text for text in (loss, index.loss) if text is not None]
    index.loss = "; ".join(losses) or None
    return _Archive(source, index, stamp, spooled, loss)
