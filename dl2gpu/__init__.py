"""Finds communication deadlocks in the traces of distributed training jobs, many jobs at once.

    >>> import dl2gpu
    >>> report = dl2gpu.scan("bucket/")  # doctest: +SKIP
    >>> report.jobs.select("job", "verdict", "deadlocked")  # doctest: +SKIP

Importing this package is cheap: Polars and Numba are loaded by the first use of a name below.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any, Final

from dl2gpu.engine.compiled import find_cache

if TYPE_CHECKING:
    from dl2gpu.report.html_overview import History as History
    from dl2gpu.report.model import Report as Report
    from dl2gpu.scan import scan as scan
    from dl2gpu.trace.discover import listing as listing
    from dl2gpu.trace.readers import read_trace as read_trace

__all__ = ["History", "Report", "__version__", "listing", "read_trace", "scan"]

__version__ = "0.1.0"

find_cache()

_HOME: Final = {
    "History": "dl2gpu.report.html_overview",
    "Report": "dl2gpu.report.model",
    "listing": "dl2gpu.trace.discover",
    "read_trace": "dl2gpu.trace.readers",
    "scan": "dl2gpu.scan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dl2gpu' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Face(types.ModuleType):
    """``dl2gpu.scan`` is the function, also after the module of the same name was imported.

    The import system binds a submodule to its package's attribute once it is loaded; for names of
    the public face that binding is left out (the module stays reachable through ``sys.modules``,
    which is all that ``from dl2gpu.scan import scan`` needs).
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOME and isinstance(value, types.ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
