"""Columns as arrays of few kinds, so that kernels are compiled once.

Numba compiles a kernel for each combination of argument types it meets, some seconds a time. Arrays
over a frame's memory are read-only and columns that are null throughout are best left empty; here
both come out as ordinary arrays of the column's own type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["Array", "codes", "flags", "plain"]

Array = npt.NDArray[Any]


class _Shared:
    """Memory of another array, kept alive."""

    __slots__ = ("__array_interface__", "base")

    def __init__(self, base: Array) -> None:
        interface = base.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
        self.base = base


def plain(values: pl.Series | Array) -> Array:
    """The values without a copy, as an array whose type does not say that it is read-only.

    For kernels that only read it. A Series must be free of nulls.
    """
    array = values.to_numpy() if isinstance(values, pl.Series) else values
    if array.flags.writeable or not len(array):
        return np.ascontiguousarray(array) if len(array) else np.empty(0, array.dtype)
    return np.asarray(_Shared(np.ascontiguousarray(array)))


def codes(series: pl.Series, null: int = -1, *, empty: bool = False) -> Array:
    """An integer column with nulls filled; ``empty``: no elements where all are null."""
    if series.null_count() == len(series):
        dtype = series.head(0).to_numpy().dtype
        return np.empty(0, dtype) if empty else np.full(len(series), null, dtype)
    return plain(series.fill_null(null) if series.null_count() else series)


def flags(series: pl.Series, *, empty: bool = False) -> Array:
    """A Boolean column with nulls false; ``empty``: no elements where all are null."""
    if empty and series.null_count() == len(series):
        return np.empty(0, np.bool_)
    return plain(series.fill_null(False) if series.null_count() else series)
