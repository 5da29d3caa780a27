"""Which operation of one profile is which of another, where the trace does not number them.

A profile is a window. PyTorch numbers collectives (``Seq``) since about 2.8; before, the k-th call
in one window need not be the k-th in another. The sequences of two ranks are laid against each
other at every shift within reach: where most agree, and of several such shifts (training repeats
itself) where the clocks agree best, they belong. Where nothing fits, nothing is claimed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["Sequence", "align"]

Longs = npt.NDArray[np.int64]

_REACH: Final = 64
"""Shifts that are tried, in operations."""
_LOOKED_AT: Final = 2048
"""Operations that are compared."""
_AGREE: Final = 0.5
"""Least share of the operations that must agree."""
_DIFFER: Final = 0.1
"""Most pairs that may differ in size and yet have completed."""
_SAME: Final = 0.85
"""A shift is as likely as the best one where this share as many agree: the ends may part."""
_SKEW_NS: Final = 100_000_000
"""Clocks of two hosts may differ by this much, or by a tenth of the window."""
_LONG_NS: Final = 500_000_000
"""Two operations that both ran this long at the same time are one, whatever their names."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """The collectives of one rank on one communicator, in order."""

    op: Longs
    signature: Longs
    """Equal for operations that could be the same: operation, size and data type."""
    done: npt.NDArray[np.bool_]
    """Known to be complete."""
    created: Longs
    ended: Longs
    """ns; an operation that has no end has that of the window."""


def align(a: Sequence, b: Sequence) -> int | None:
    """The shift s for which b's operation i is a's i + s; None where none can be told."""
    n_a, n_b = min(len(a.signature), _LOOKED_AT), min(len(b.signature), _LOOKED_AT)
    if not n_a or not n_b:
        return None
    window = min(int(x.created[-1] - x.created[0]) for x in (a, b))
    allowed = max(_SKEW_NS, window // 10)
    found: dict[int, tuple[int, int]] = {}  # shift: how many agree, ns between the clocks
    for s in range(-min(_REACH, n_b - 1), min(_REACH, n_a - 1) + 1):
        lo, hi = max(0, s), min(n_a, n_b + s)
        if hi - lo < min(2, n_a, n_b):
            continue
        away = int(np.median(b.created[lo - s : hi - s] - a.created[lo:hi]))
        if abs(away) > allowed:
            continue
        same = int((a.signature[lo:hi] == b.signature[lo - s : hi - s]).sum())
        # few that happen to agree at the edge are no evidence
        if same >= _AGREE * max(hi - lo, min(n_a, n_b) // 2):
            found[s] = (same, abs(away))
    if not found:
        return 0 if _together(a, b) else None
    enough = _SAME * max(same for same, _ in found.values())
    likely = {s: away for s, (same, away) in found.items() if same >= enough}
    closest = min(likely, key=lambda s: (likely[s], abs(s), s))
    # as many in both: most likely the same ones
    best = 0 if n_a == n_b and 0 in likely else closest
    return best if _possible(a, b, best) else None


def _possible(a: Sequence, b: Sequence, s: int) -> bool:
    """Could the pairs have completed together? Other operations not, and sizes seldom differ."""
    lo, hi = max(0, s), min(len(a.op), len(b.op) + s)
    done = a.done[lo:hi] & b.done[lo - s : hi - s]
    other = a.op[lo:hi] != b.op[lo - s : hi - s]
    differ = a.signature[lo:hi] != b.signature[lo - s : hi - s]
    return not (done & other).any() and (done & differ).sum() <= max(1, _DIFFER * done.sum())


def _together(a: Sequence, b: Sequence) -> bool:
    """Do the k-th operations of both run long, and at the same time?"""
    n = min(len(a.created), len(b.created), _LOOKED_AT)
    both = np.minimum(a.ended[:n], b.ended[:n]) - np.maximum(a.created[:n], b.created[:n])
    return bool((both > -_SKEW_NS).all() and (both > _LONG_NS).any())
