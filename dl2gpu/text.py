"""Words that the analysis and the reports share: folded ranks, call sites."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

__all__ = ["fold", "pairs_text", "ranks", "user_frame"]


def fold(numbers: Iterable[int]) -> str:
    """``0-11, 13`` for 0..11 and 13."""
    spans: list[list[int]] = []
    for n in sorted(set(numbers)):
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ", ".join(
        str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans
    )


def ranks(numbers: Iterable[int] | None, none: str = "none") -> str:
    """``rank 3``, ``ranks 0-11, 13``, or ``none``."""
    given = set(numbers or ())
    if not given:
        return none
    return f"rank{'s' if len(given) > 1 else ''} {fold(given)}"


# Frames of the framework's own code say nothing about where the program went wrong.
_LIBRARY: Final = re.compile(
    r"(?:^|[/ ])(?:site-packages|dist-packages)/"
    r"|(?:^|[/ ])torch/(?:distributed|_ops|_tensor|autograd|nn|utils|_dynamo|optim)\b"
    r"|(?:^|[/ ])lib/python3[^/]*/"
    r"|(?:\b|_)c10d(?:::|\.py:)|\btorch::|<frozen|<string>"
)


@lru_cache(maxsize=4096)
def _of_library(frame: str) -> bool:
    return _LIBRARY.search(frame) is not None


def user_frame(stack: Sequence[str] | None) -> str:
    """The innermost frame outside the framework and Python itself.

    ``stack`` holds "function file:line", innermost first; where all of it belongs to the framework
    the innermost frame is given, and "" where there is none.
    """
    if not stack:
        return ""
    return next((f for f in stack if not _of_library(f)), stack[0])


def pairs_text(pairs: Iterable[Sequence[int]]) -> str:
    """Pairs of ranks: ``ranks 3 and 4``, each pair once whichever way; the first ones of many."""
    known = sorted({(min(p), max(p)) for p in pairs})
    words = [f"ranks {a} and {b}" for a, b in known[:4]]
    more = [f"{len(known) - 4} more pairs"] if len(known) > 4 else []
    return ", ".join([*words, *more])
