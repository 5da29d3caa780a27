"""Call sites: the lines of the user's program that lead to an operation.

Frames of PyTorch, of the standard library and of the recorder say nothing about the program and
are left out; those of other installed packages stay, by their path below ``site-packages``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

__all__ = ["call_site"]

MAX_FRAMES: Final = 16

_OWN: Final = str(Path(__file__).resolve().parent) + os.sep
_STDLIB: Final = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")}
    | {str(Path(os.__file__).resolve().parent) + os.sep}
)
_PACKAGES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_BOTTOM: Final = ""
"""Where the stack of a forked process begins: what lies below is its parent's."""

_names: dict[CodeType, str | None] = {}
"""What a frame of this code begins with, ``function file``; None: it is left out."""


def call_site() -> list[str]:
    """``"function file:line"`` of the calling thread, innermost first.

    A thread without such frames is one of PyTorch's own (the autograd engine on an accelerator);
    then the main thread, which waits for it, is looked at.
    """
    out = _frames(sys._getframe(1))
    if not out and threading.current_thread() is not threading.main_thread():
        main = threading.main_thread().ident
        frame = sys._current_frames().get(main) if main is not None else None
        out = _frames(frame)
    return out


def _frames(frame: FrameType | None) -> list[str]:
    out: list[str] = []
    while frame is not None and len(out) < MAX_FRAMES:
        code = frame.f_code
        try:
            name = _names[code]
        except KeyError:
            name = _names[code] = _name(code)
        if name is _BOTTOM:
            break
        if name is not None:
            out.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return out


def _name(code: CodeType) -> str | None:
    path = code.co_filename
    if path.startswith(("<", _OWN)):
        return None
    for folder in _PACKAGES:
        if folder in path:
            below = path.rpartition(folder)[2]
            return None if below.startswith("torch" + os.sep) else f"{code.co_name} {below}"
    if code.co_name == "_bootstrap" and path.endswith(f"multiprocessing{os.sep}process.py"):
        return _BOTTOM
    if path.startswith(_STDLIB) or f"{os.sep}torch{os.sep}distributed{os.sep}" in path:
        return None
    with contextlib.suppress(ValueError, OSError):
        path = str(Path(path).relative_to(Path.cwd()))
    return f"{code.co_name} {path}"
