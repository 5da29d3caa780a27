"""The one place that decides the engine: ``auto``, ``cpu`` or ``gpu``.

``auto`` takes the GPU where there is a usable one; ``gpu`` without one is an error that names what
is missing, never a silent fallback (DESIGN.md section 7).
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Final

__all__ = ["ENGINES", "GPU_PACKAGES", "EngineError", "choose", "devices", "driver", "missing"]

ENGINES: Final = ("auto", "cpu", "gpu")

GPU_PACKAGES: Final = ("cudf_polars", "cudf", "cugraph", "cupy", "numba_cuda", "dask_cuda")
"""Modules that the GPU engine needs; all come with the extra gpu-cu12 or gpu-cu13."""

_ENGINE: Final = "dl2gpu.engine.gpu"


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
    lacking = []
    version = driver()
    if version is None:
        lacking.append("no NVIDIA driver (libcuda.so.1)")
    elif devices() == 0:
        lacking.append("an NVIDIA driver but no GPU that this process may use")
    absent = [name for name in GPU_PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        lacking.append(f"no package {', '.join(absent)}")
    if importlib.util.find_spec(_ENGINE) is None:
        lacking.append("no GPU engine in this release of dl2gpu")
    elif absent:
        extra = "gpu-cu13" if version is not None and version >= (13, 0) else "gpu-cu12"
        lacking[-1] += f" (pip install 'dl2gpu[{extra}]' brings them)"
    return lacking


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
