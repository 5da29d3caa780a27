"""What this machine can do, for ``dl2gpu doctor`` and for bug reports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from dl2gpu import __version__
from dl2gpu.engine import choose
from dl2gpu.engine.cores import cores
from dl2gpu.report.console import grid

__all__ = ["doctor", "facts"]

_PACKAGES: Final = (
    "polars",
    "numpy",
    "numba",
    "scipy",
    "dask",
    "distributed",
    "fsspec",
    "msgspec",
    "zstandard",
    "typer",
    "rich",
)


def doctor() -> RenderableType:
    """The facts, and the verdict on the GPU engine."""
    lacking = choose.missing()
    if lacking:
        verdict = Text("GPU engine: not usable here", style="bold")
        reasons = grid(("", f"- {reason}") for reason in lacking)
        return Group(grid(facts()), Text(), verdict, reasons)
    return Group(grid(facts()), Text(), Text("GPU engine: usable", style="bold"))


def facts() -> Iterator[tuple[str, str]]:
    """(name, value) of all that a bug report should say."""
    yield "dl2gpu", __version__
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "processors", _processors()
    yield "memory", _memory()
    for name in _PACKAGES:
        yield name, _version(name) or "missing: reinstall dl2gpu"
    version = choose.driver()
    yield "NVIDIA driver", "none" if version is None else f"serves CUDA {version[0]}.{version[1]}"
    yield "GPUs", _gpus()
    for name in choose.GPU_PACKAGES:
        yield name, _module_version(name) or "none"
    yield "engine auto", choose.choose("auto")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _module_version(module: str) -> str | None:
    """Version of the distribution that brings a module (cudf comes from cudf-cu12 or cudf-cu13)."""
    for name in importlib.metadata.packages_distributions().get(module, ()):
        return f"{_version(name)} ({name})"
    return None


def _gpus() -> str:
    found = choose.properties()
    if found is None:
        return str(choose.devices())
    (major, minor), size = found
    first = f"the first of compute capability {major}.{minor} with {size / 1e9:.1f} GB"
    return f"{choose.devices()}, {first}"


def _processors() -> str:
    usable = cores()
    quota = _cgroup("cpu.max")
    if quota is not None and quota[0] != "max":
        return f"{usable} usable, of them {int(quota[0]) / int(quota[1]):g} by quota"
    return f"{usable} usable"


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup("memory.max")
    if limit is not None and limit[0] != "max" and int(limit[0]) < total:
        return f"{int(limit[0]) / 1e9:.1f} GB by limit, of {total / 1e9:.1f} GB"
    return f"{total / 1e9:.1f} GB"


def _cgroup(name: str) -> list[str] | None:
    """A limit that a container set, which the counts of the machine do not show."""
    try:
        words = Path(f"/sys/fs/cgroup/{name}").read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return None
    return words if words and all(w == "max" or w.isdigit() for w in words) else None
