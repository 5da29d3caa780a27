"""The one place that decides the engine: ``auto``, ``cpu`` or ``gpu``.

``auto`` takes the GPU where there is a usable one; ``gpu`` without one is an error that names what
is missing, never a silent fallback (DESIGN.md section 7).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dl2gpu.engine.base import Engine

__all__ = [
    "ENGINES", "GPU_PACKAGES", "DeviceMemoryError", "EngineError", "choose", "devices", "driver",
    "engine_of", "missing", "properties",
]  # fmt: skip

ENGINES: Final = ("auto", "cpu", "gpu")

GPU_PACKAGES: Final = ("cudf_polars", "cudf", "cugraph", "cupy", "numba_cuda", "dask_cuda")
"""Modules that the GPU engine needs; all come with the extra gpu-cu12 or gpu-cu13."""

_OLDEST: Final = {
    "cudf_polars": (26, 10), "cudf": (26, 10), "cugraph": (26, 10), "cupy": (14, 2),
    "numba_cuda": (0, 30), "dask_cuda": (26, 10),
}  # fmt: skip
"""Oldest versions that the extras take."""

OLDEST_DRIVER: Final = (12, 2)
"""CUDA version that the driver must serve."""

OLDEST_GPU: Final = (7, 0)
"""Compute capability that RAPIDS needs (Volta)."""

LEAST_BYTES: Final = 4 << 30
"""Memory of a GPU on which it is worth trying."""


class DeviceMemoryError(MemoryError):
    """The memory of the GPU does not suffice for the shard. A smaller shard may fit."""


class EngineError(ValueError):
    """The engine asked for cannot run here. Says what is missing and what to do."""


def choose(engine: str) -> str:
    """``cpu`` or ``gpu`` for what the user asked.

    Raises:
        EngineError: ``engine`` is unknown, or ``gpu`` and something is missing.
    """
    if engine not in ENGINES:
        raise EngineError(f"engine: expected {', '.join(ENGINES)}; found {engine!r}")
    if engine == "cpu":
        return "cpu"
    lacking = missing()
    if not lacking:
        return "gpu"
    if engine == "auto":
        return "cpu"
    raise EngineError(
        f"engine gpu: expected a usable NVIDIA GPU, found {'; '.join(lacking)}; "
        "use --engine cpu, or see: dl2gpu doctor"
    )


def missing() -> list[str]:
    """What stands between this machine and the GPU engine, in words; empty where nothing does."""
    version = driver()
    lacking = _lacking_of_device(version)
    absent = [name for name in GPU_PACKAGES if importlib.util.find_spec(name) is None]
    extra = "gpu-cu13" if version is not None and version >= (13, 0) else "gpu-cu12"
    bring = f"(pip install 'dl2gpu[{extra}]' brings them)"
    if absent:
        lacking.append(f"no package {', '.join(absent)} {bring}")
    old = []
    for name, oldest in _OLDEST.items():
        distribution, found = _version(name) if name not in absent else ("", None)
        if found is not None and found < oldest:
            old.append(f"{distribution} {_dotted(found)}, older than {_dotted(oldest)}")
        elif distribution.endswith(("-cu13", "-cuda13x")) and version and version < (13, 0):
            old.append(f"{distribution}, built for CUDA 13, on a driver for {_dotted(version)}")
    if old:
        lacking.append(f"{'; '.join(old)} {bring}")
    return lacking


def _lacking_of_device(version: tuple[int, int] | None) -> list[str]:
    """What driver and GPU lack; ``version`` is the CUDA version that the driver serves."""
    if version is None:
        return ["no NVIDIA driver (libcuda.so.1)"]
    lacking = []
    if version < OLDEST_DRIVER:
        lacking.append(
            f"an NVIDIA driver that serves CUDA {_dotted(version)}, older than "
            f"{_dotted(OLDEST_DRIVER)}"
        )
    if devices() == 0:
        return [*lacking, "an NVIDIA driver but no GPU that this process may use"]
    found = properties()
    if found is not None:
        capability, memory = found
        if capability < OLDEST_GPU:
            lacking.append(
                f"a GPU of compute capability {_dotted(capability)}, below {_dotted(OLDEST_GPU)}"
            )
        if memory < LEAST_BYTES:
            lacking.append(
                f"a GPU with {memory / 2**30:.1f} GiB of memory, less than {LEAST_BYTES >> 30} GiB"
            )
    return lacking


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _version(module: str) -> tuple[str, tuple[int, int] | None]:
    """The distribution that brings a module, and its version; ("", None) where nothing says so.

    A build for a CUDA version has that in its name.
    """
    from importlib import metadata

    name = module.replace("_", "-")
    for build in ("", "-cu12", "-cu13", "-cuda12x", "-cuda13x"):
        distribution = name + build
        try:
            first, second = metadata.version(distribution).split(".")[:2]
            return distribution, (int(first), int(second))
        except (metadata.PackageNotFoundError, ValueError):
            continue
    return "", None


def engine_of(name: str) -> Engine:
    """The engine of a name that :func:`choose` gave.

    Raises:
        EngineError: the name is another.
        DeviceMemoryError: the GPU has no memory left to begin with.
    """
    if name == "cpu":
        from dl2gpu.engine.cpu import CPU

        return CPU
    if name == "gpu":
        return _gpu()
    raise EngineError(f"engine: expected cpu or gpu; found {name!r}")


@functools.cache
def _gpu() -> Engine:
    from dl2gpu.engine.gpu import Gpu

    return Gpu()


def _libcuda() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def driver() -> tuple[int, int] | None:
    """The newest CUDA version that the driver serves, or None without a driver."""
    library = _libcuda()
    number = ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def devices() -> int:
    """How many GPUs the driver lets this process use; 0 where it cannot be initialised."""
    library = _libcuda()
    number = ctypes.c_int()
    if (
        library is None
        or library.cuInit(0) != 0
        or library.cuDeviceGetCount(ctypes.byref(number)) != 0
    ):
        return 0
    return number.value


_CAPABILITY_MAJOR: Final = 75
_CAPABILITY_MINOR: Final = 76
"""Attributes of a device, by their numbers in cuda.h."""


def properties() -> tuple[tuple[int, int], int] | None:
    """Compute capability and bytes of memory of the first GPU; None where it does not say."""
    library = _libcuda()
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    size = ctypes.c_size_t()
    if (
        library is None
        or library.cuInit(0) != 0
        or library.cuDeviceGet(ctypes.byref(device), 0) != 0
        or library.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device) != 0
        or library.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device) != 0
        or library.cuDeviceTotalMem_v2(ctypes.byref(size), device) != 0
    ):
        return None
    return (major.value, minor.value), size.value
