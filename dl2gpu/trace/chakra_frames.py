"""Is it a Chakra trace? Looks at the beginning of a file of protobuf messages, and imports nothing.

Source: FORMATS.md 1 and 4.2.
"""

from __future__ import annotations

from typing import Final

__all__ = ["is_framed"]

_METADATA: Final = frozenset({b"schema", b"pid", b"time", b"start_ts", b"finish_ts"})


def _length(head: bytes, at: int) -> tuple[int, int] | None:
    """(value, position behind) of the varint at ``at``."""
    value = shift = 0
    for i in range(at, min(at + 10, len(head))):
        value |= (head[i] & 127) << shift
        shift += 7
        if head[i] < 128:
            return value, i + 1
    return None


def is_framed(head: bytes) -> bool:
    """Does ``head`` begin as a file of messages does: a length and the trace's metadata?

    The metadata is a version such as "0.0.4", attributes, or nothing; then a node must follow.
    """
    found = _length(head, 0)
    if found is None:
        return False
    size, at = found
    end = at + size
    if size == 0:  # empty metadata: a node with number and name must follow
        found = _length(head, at)
        if found is None or head[found[1] : found[1] + 1] != b"\x08":
            return False
        number = _length(head, found[1] + 1)
        return number is not None and head[number[1] : number[1] + 1] == b"\x12"
    if head[at : at + 1] == b"\n":
        found = _length(head, at + 1)
        if found is None or not 3 <= found[0] <= 32:
            return False
        text = head[found[1] : found[1] + found[0]]
        return found[1] + found[0] <= end and _is_version(text)
    if head[at : at + 1] == b"\x12":
        found = _length(head, at + 1)
        if found is None or head[found[1] : found[1] + 1] != b"\n":
            return False
        name = _length(head, found[1] + 1)
        return name is not None and head[name[1] : name[1] + name[0]] in _METADATA
    return False


def _is_version(text: bytes) -> bool:
    parts = text.split(b".")
    return len(parts) >= 2 and parts[0].isdigit() and parts[1][:1].isdigit()
