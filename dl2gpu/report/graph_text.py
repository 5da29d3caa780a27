"""Text that fits: how wide letters are, about, and where to cut.

A page names no font that everybody has, so widths are those of wide fonts: rather a letter too few
than one that sticks out.
"""

from __future__ import annotations

from typing import Final

__all__ = ["fit", "fit_site", "width"]

_DOTS: Final = "\N{HORIZONTAL ELLIPSIS}"
_NARROW: Final = frozenset("iljtfr.,:;'|!()[]{}/ -")
_MONO: Final = 0.61


def width(text: str, size: float, *, mono: bool = False) -> float:
    """Pixels that ``text`` takes at most, about, in letters of ``size``."""
    if mono:
        return size * sum(_MONO if c.isascii() else 1.1 for c in text)
    return size * sum(_em(c) for c in text)


def _em(letter: str) -> float:
    if letter in _NARROW:
        return 0.4
    if not letter.isascii():
        return 1.1
    return 0.78 if letter.isupper() or letter in "mw#@%&" else 0.64


def fit(text: str, room: float, size: float, *, mono: bool = False) -> str:
    """The beginning of ``text`` that fits ``room`` pixels, with dots if something is left out."""
    if width(text, size, mono=mono) <= room:
        return text
    room -= width(_DOTS, size, mono=mono)
    end = 0
    while end < len(text) and (room := room - width(text[end], size, mono=mono)) >= 0:
        end += 1
    return text[:end].rstrip() + _DOTS


def fit_site(site: str, room: float, size: float) -> str:
    """Of a call site the end of the path says most, then the line, then the function."""
    path, _, function = site.partition(" in ")
    name = path.rsplit("/", 1)[-1]
    for shorter in (site, f"{name} in {function}", name):
        if function and width(shorter, size, mono=True) <= room:
            return shorter
    return fit(name if function else site, room, size, mono=True)
