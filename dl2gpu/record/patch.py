"""Puts a function around another, at its place in a module or class, once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["patch"]

_patched: set[tuple[int, str]] = set()
_owners: list[Any] = []
"""Kept, so that the number of none is given to another."""


def patch(owner: Any, name: str, around: Callable[..., Any]) -> bool:
    """Replaces ``owner.name`` by one that calls ``around(original, *args, **kwargs)``.

    False where ``owner`` has no such name, or does not let it be replaced: what this version of
    PyTorch does not have is not watched.
    """
    original = getattr(owner, name, None)
    if original is None or (id(owner), name) in _patched:
        return False

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    try:
        setattr(owner, name, call)
    except (AttributeError, TypeError):
        return False
    _patched.add((id(owner), name))
    _owners.append(owner)
    return True
