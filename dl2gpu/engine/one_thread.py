"""The names of ``numba.cuda`` for a machine of one thread: this processor.

Kernels that are written for a GPU run here compiled by Numba, a job after the other.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

__all__ = ["compiled", "machine"]


@functools.cache
def machine() -> ModuleType:
    """A module with the names of ``numba.cuda`` that :func:`rounds_kernel.bound` asks for."""
    from numba import njit

    @njit(inline="always")
    def add(array: Any, index: Any, value: Any) -> Any:
        before = array[index]
        array[index] = before + value
        return before

    @njit(inline="always")
    def or_(array: Any, index: Any, value: Any) -> Any:
        before = array[index]
        array[index] = before | value
        return before

    @njit(inline="always")
    def greatest(array: Any, index: Any, value: Any) -> Any:
        before = array[index]
        array[index] = max(before, value)
        return before

    @njit(inline="always")
    def syncthreads() -> None:
        return None

    def module(name: str, **names: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(names)
        return made

    return module(
        "one_thread",
        threadIdx=module("threadIdx", x=0),
        blockIdx=module("blockIdx", x=0),
        blockDim=module("blockDim", x=1),
        gridDim=module("gridDim", x=1),
        syncthreads=syncthreads,
        atomic=module("atomic", add=add, or_=or_, max=greatest),
    )


@functools.cache
def compiled(kernel: Any) -> Any:
    """The kernel for one thread. It releases the GIL."""
    from numba import njit

    return njit(nogil=True)(kernel(machine()))
