"""Long text on a terminal, a screen at a time: with the pager that the user names, or ``less``."""

from __future__ import annotations

import os
import pydoc
import sys

from rich.console import RenderableType

from dl2gpu.report.console import console

__all__ = ["paged"]


def paged(what: RenderableType, wanted: bool | None = None) -> bool:
    """Show ``what`` in a pager; False where it is not shown, for the caller to print.

    Args:
        what: the text.
        wanted: True or False as the user said; None: on a terminal that it does not fit.
    """
    out = console()
    if wanted is False or (wanted is None and not (sys.stdin.isatty() and out.is_terminal)):
        return False
    with out.capture() as captured:
        out.print(what)
    text = captured.get()
    if wanted is None and text.count("\n") < out.height:
        return False
    if os.environ.get("TERM") == "dumb":
        return False
    # colours as they are, and no screen of its own: what was read stays in view
    os.environ.setdefault("LESS", "-RFX")
    pydoc.pager(text)
    return True
