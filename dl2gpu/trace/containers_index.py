"""What is in a tar or zip archive: a list of its members, and where the bytes of each lie.

Nothing is extracted: a member's name is a key and a word of the report, and is never opened. What
is no regular file, or has a name that would lead elsewhere, is listed with why it is not read.
"""

from __future__ import annotations

import re
import stat
import struct
import tarfile
import zipfile
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from dl2gpu.trace.containers_spool import Reader, Source
from dl2gpu.trace.files import Limits, allowed_bytes, bomb
from dl2gpu.trace.inputs import InputError, Status

__all__ = ["Index", "Member", "container_kind", "index_of", "no_archive_of_traces"]

_MOST_HEADER: Final = 1 << 20
"""Bytes of one header of a tar file (names and attributes): a longer one is no honest file's."""
_MOST_NAME: Final = 4096


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive."""

    name: str
    """Its path in the archive, with "/", without "." and empty parts."""
    size: int = 0
    """Bytes of its content, as the archive says."""
    status: Status = "read"
    reason: str | None = None
    """Why it is not read, where ``status`` says so."""
    first: int = 0
    """Where its content begins (tar)."""
    info: zipfile.ZipInfo | None = None
    lost: int = 0
    """Bytes at its end that are missing."""


@dataclass(slots=True)
class Index:
    """The members of an archive, in order."""

    kind: str
    members: list[Member] = field(default_factory=list)
    loss: str | None = None
    """Why there may be more members than these."""
    zip: zipfile.ZipFile | None = None

    def add(self, member: Member, limits: Limits) -> None:
        self.members.append(member)
        if len(self.members) > limits.max_members:
            raise InputError(
                f"an archive of more than {limits.max_members} files, which passes the limit "
                f"max_members: to read it all the same, set "
                f"DL2GPU_MAX_MEMBERS={10 * limits.max_members}"
            )


def container_kind(head: bytes) -> str | None:
    """``tar`` or ``zip`` where ``head``, the first bytes of a content, begins such an archive."""
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06", b"PK00PK\x03\x04")):
        return "zip"
    if len(head) < 512:
        return None
    block = head[:512]
    field_ = block[148:156].strip(b" \0")
    if not re.fullmatch(rb"[0-7]{1,7}", field_):
        return None
    if sum(block) - sum(block[148:156]) + 8 * 32 == int(field_, 8):
        return "tar"
    return None


_OTHERS: Final = re.compile(
    r"(^|/)(data\.pkl|constants\.pkl|\.format_version|byteorder)$|\.npy$|^META-INF/"
    r"|^\[Content_Types\]\.xml$|^mimetype$|^_rels/|^EGG-INFO/|\.dist-info/|^AndroidManifest\.xml$"
)
_OTHER_NAMES: Final = re.compile(
    r"\.(pt|pth|ckpt|bin|safetensors|npz|jar|whl|egg|apk|docx|xlsx|pptx|odt|ods|epub|keras)$",
    re.IGNORECASE,
)


def no_archive_of_traces(head: bytes, name: str) -> str | None:
    """What a zip file is that another program uses as its own format; None where it is none."""
    if not head.startswith(b"PK\x03\x04"):
        return None
    first = ""
    if len(head) >= 30:
        length = struct.unpack_from("<H", head, 26)[0]
        first = head[30 : 30 + length].decode("utf-8", "replace")
    if re.search(r"(^|/)(data\.pkl|constants\.pkl|\.format_version|byteorder)$", first):
        return "a PyTorch checkpoint or model, not a trace"
    if _OTHERS.search(first) or _OTHER_NAMES.search(name):
        return "a file of another program (a zip inside), not an archive of traces"
    return None


def index_of(source: Source, kind: str, limits: Limits) -> Index:
    """The members of an archive.

    Raises:
        InputError: nothing of it can be read, or it passes a limit.
    """
    index = _tar(source, limits) if kind == "tar" else _zip(source, limits)
    return _once(index)


def _once(index: Index) -> Index:
    """Of several members of a name the last counts, as it would after unpacking."""
    last = {m.name: i for i, m in enumerate(index.members) if m.status == "read"}
    copies: dict[str, int] = {}
    for i, member in enumerate(index.members):
        if member.status == "read" and last[member.name] != i:
            number = copies[member.name] = copies.get(member.name, 0) + 1
            index.members[i] = Member(
                f"{member.name} (copy {number})", member.size, "ignored",
                "another member of this name comes later in the archive, and counts",
            )  # fmt: skip
    return index


def _named(raw: str) -> tuple[str, str | None]:
    """A member's name as the report gives it, and what is wrong with it."""
    name = raw.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if "\\" in name and "/" not in name:  # some programs on Windows write it so
        name = name.replace("\\", "/")
    parts = [p for p in name.split("/") if p not in ("", ".")]
    if len(name) > _MOST_NAME:
        return f"{name[:200]}...", f"a name of {len(name)} characters"
    if name.startswith("/") or re.match(r"[A-Za-z]:/", name):
        return name, "an absolute name; not read: pack it with names relative to a folder"
    if ".." in parts:
        return name, "a name that leads out of the archive (..); not read"
    if not parts or "\0" in name:
        return name or "(no name)", "no usable name"
    return "/".join(parts), None


# --------------------------------------------------------------------------------------------------
# tar


def _tar(source: Source, limits: Limits) -> Index:
    index = Index("tar")
    file = Reader(source, _MOST_HEADER)
    try:
        archive = tarfile.open(  # noqa: SIM115 - holds nothing but the reader
            fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape"
        )
    except Exception as e:
        raise InputError(f"a tar archive that is damaged from its beginning ({e})") from e
    seen: list[tarfile.TarInfo] = vars(archive)["members"]
    before = -1
    end = 0
    while True:
        try:
            info = archive.next()
        except Exception as e:  # noqa: BLE001 - tarfile raises whatever its parsing does
            index.loss = f"the tar archive is cut short or damaged ({_words(e)})"
            break
        seen.clear()  # it would keep them all
        if info is None:
            index.loss = _after(source, archive.offset)
            break
        if info.offset <= before or info.size < 0 or info.offset_data < info.offset:
            index.loss = "the tar archive is damaged (a member that begins before the last one)"
            break
        before = info.offset
        member = _tar_member(info, source.size)
        end = max(end, info.offset_data + info.size)
        if member is not None:
            index.add(member, limits)
    if end > source.size and index.loss is None:
        index.loss = "the tar archive is cut short"
    return index


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _after(source: Source, offset: int) -> str | None:
    """What is wrong behind the last member: where a tar archive ends, there are zeros."""
    found = source.read_at(offset, 512)
    if not found:
        return "the tar archive ends without the mark of its end: it may be cut short"
    if found.strip(b"\0"):
        return f"the tar archive is damaged at byte {offset}: what comes after is not read"
    at = offset + 512
    while chunk := source.read_at(at, 1 << 20):
        if chunk.strip(b"\0"):
            return "the tar archive is followed by other bytes, which are not read"
        at += len(chunk)
    return None


def _tar_member(info: tarfile.TarInfo, size: int) -> Member | None:
    if info.isdir():
        return None
    name, wrong = _named(info.name)
    if wrong is not None:
        return Member(name, 0, "quarantined", wrong)
    target = info.linkname.encode("utf-8", "surrogateescape").decode("utf-8", "replace")[:200]
    if info.issym():
        return Member(name, 0, "ignored", f"a symbolic link (to {target}); not followed")
    if info.islnk():
        return Member(name, 0, "ignored", f"a hard link; what it is one to is {target}")
    if info.isdev():
        return Member(name, 0, "ignored", "a pipe or device")
    if not info.isreg():
        return Member(name, 0, "ignored", f"a member of the unknown type {info.type!r}")
    if info.issparse():
        return Member(name, 0, "quarantined", "a sparse file: pack it without tar's --sparse")
    lost = max(0, info.offset_data + info.size - size)
    return Member(name, info.size, first=info.offset_data, lost=min(lost, info.size))


# --------------------------------------------------------------------------------------------------
# zip

_METHODS: Final = (
    zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA,
)  # fmt: skip


def _zip(source: Source, limits: Limits) -> Index:
    try:
        archive = zipfile.ZipFile(Reader(source))
        infos = archive.infolist()
    except InputError:
        raise
    except Exception as e:
        raise InputError(
            f"a zip archive without its directory, which stands at the end ({_words(e)}): it is "
            "cut short or damaged"
        ) from e
    index = Index("zip", zip=archive)
    total = 0
    for info in infos:
        member = _zip_member(info)
        if member is not None:
            index.add(member, limits)
            total += member.size
    allowed = allowed_bytes(source.size, Limits(1 << 62, limits.max_ratio, limits.free_bytes))
    if total > allowed:
        raise InputError(bomb(source.size, "zip", limits, allowed))
    places = sorted((i.header_offset, i.header_offset + i.compress_size) for i in infos)
    if any(a[1] > b[0] for a, b in pairwise(places)):
        raise InputError("a zip archive whose members overlap: a decompression bomb, or damaged")
    return index


def _zip_member(info: zipfile.ZipInfo) -> Member | None:
    if info.is_dir():
        return None
    name, wrong = _named(info.filename)
    if wrong is not None:
        return Member(name, 0, "quarantined", wrong)
    mode = info.external_attr >> 16
    if stat.S_ISLNK(mode):
        return Member(name, 0, "ignored", "a symbolic link; not followed")
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        return Member(name, 0, "ignored", "a folder, pipe or device")
    if info.flag_bits & 0x1:
        return Member(name, 0, "quarantined", "encrypted: unpack the archive with its password")
    if info.compress_type not in _METHODS:
        return Member(
            name, 0, "quarantined",
            f"compressed by method {info.compress_type} of zip, which is not supported; expected "
            "deflate, bzip2, LZMA or none",
        )  # fmt: skip
    return Member(name, info.file_size, info=info)
