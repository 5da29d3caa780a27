"""JSON that the strict decoder refuses, made ready for the one of the standard library."""

from __future__ import annotations

import json
import re
from typing import Any, Final

__all__ = ["DECODER", "lenient", "without_halves"]

_ESCAPE: Final = re.compile(
    r"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
    r"|(\\.)",
    re.DOTALL,
)
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")


def without_halves(text: str) -> str:
    """``text`` of JSON, of the same length, with U+FFFD for escapes of half a surrogate pair.

    The standard library makes a string of them that no table can hold, since it is no text.
    """
    if _HALF.search(text) is None:
        return text
    return _ESCAPE.sub(lambda m: m[0] if m[1] or m[2] else r"\ufffd", text)


DECODER: Final = json.JSONDecoder(strict=False, parse_constant=lambda _: None)
"""Takes control characters, and None for NaN and Infinity."""


def lenient(text: str) -> Any:
    """The value of ``text``.

    Raises:
        ValueError: it is damaged (json.JSONDecodeError says where), or holds a number of thousands
            of digits.
        RecursionError: it is nested too deep.
    """
    return DECODER.decode(without_halves(text))
