"""What this machine can do, for ``dl2gpu doctor`` and for bug reports."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.text import Text

from dl2gpu import __version__
from dl2gpu.engine import choose
from dl2gpu.engine.cores import cores
from dl2gpu.report.console import grid

if TYPE_CHECKING:
    from dl2gpu.report.selftest import Run, SelfTest

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


_EXTRAS: Final = {
    "s3:// URLs": "s3fs",
    "gs:// URLs": "gcsfs",
    "https:// URLs": "aiohttp",
    "record": "torch",
}
"""What needs a module that the base install does not bring."""


def doctor(test: bool = True) -> RenderableType:
    """The facts, the verdict on the GPU engine, and what the engines make of a small corpus.

    Args:
        test: analyse the corpus (some seconds; on a machine where nothing is compiled yet, more).
    """
    parts: list[RenderableType] = [grid(facts()), Text()]
    lacking = choose.missing()
    if lacking:
        parts.append(Text("GPU engine: not usable here", style="bold"))
        parts.append(grid(("", f"- {reason}") for reason in lacking))
    else:
        parts.append(Text("GPU engine: usable", style="bold"))
    if test:
        from dl2gpu.report.selftest import self_test

        parts += [Text(), *_tested(self_test())]
    return Group(*parts)


def _tested(result: SelfTest) -> Iterator[RenderableType]:
    yield Text(f"Self-test: {'passed' if result.passed else 'FAILED'}", style="bold")
    yield grid(
        [
            ("corpus", f"{result.jobs} jobs, {result.events:,} events, {_size(result.bytes)}"),
            ("memory", f"copies {result.bandwidth / 1e9:.1f} GB/s (one thread, read and written)"),
            ("floor", f"{result.floor * 1e3:.1f} ms: the events read once at that rate"),
            *((run.engine, _words(run, result)) for run in result.runs),
        ]
    )


def _words(run: Run, result: SelfTest) -> str:
    if run.error is not None:
        return f"failed: {run.error}"
    agree = f"{run.as_labelled} of {result.jobs} jobs as labelled"
    same = "" if run is result.runs[0] else f", findings {'the same' if run.same else 'DIFFER'}"
    return (
        f"{run.seconds * 1e3:.0f} ms ({result.events / run.seconds / 1e6:.1f} M events/s, "
        f"{run.seconds / result.floor:.0f} times the floor; first call {run.first:.2f} s), "
        f"{agree}{same}"
    )


def _size(many: int) -> str:
    return f"{many / 1e6:.0f} MB"


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
    for extra, module in _EXTRAS.items():
        yield extra, _module_version(module) or f"not installed ({module})"
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
    """How many there are, and of each its name, memory and compute capability."""
    many, first = choose.devices(), choose.properties()
    if not many or first is None:
        return str(many)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        (high, low), size = first
        return f"{many}, the first of compute capability {high}.{low} with {size / 1e9:.1f} GB"
    found = []
    for number in range(many):
        device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        major, minor = ctypes.c_int(), ctypes.c_int()
        failed = (
            cuda.cuDeviceGet(ctypes.byref(device), number)
            or cuda.cuDeviceGetName(name, len(name), device)
            or cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
            or cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
            or cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        )
        found.append(
            f"(error {failed})" if failed
            else f"{name.value.decode(errors='replace')}, {memory.value / 1e9:.1f} GB, "
            f"compute capability {major.value}.{minor.value}"
        )  # fmt: skip
    return f"{many}: {'; '.join(found)}"


_MAJOR: Final = 75
_MINOR: Final = 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the CUDA driver API."""


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
