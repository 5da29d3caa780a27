"""The CPU engine: Polars, kernels compiled by Numba, SciPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from dl2gpu.engine.arrays import Array
from dl2gpu.engine.base import Argument, Fresh, arguments_of

__all__ = ["CPU", "PLANS", "Cpu"]


@dataclass(frozen=True)
class Cpu:
    """Runs everything on this processor.

    With ``passes`` matching is done by compiled passes along the rows and the replay by a work
    list, which is the fastest here. Without it the plans and the kernel of the GPU engine run, on
    the CPU: that is how they are tested on a machine without a GPU.
    """

    passes: bool = True
    name: str = "cpu"

    def collect(self, plan: pl.LazyFrame) -> pl.DataFrame:
        return plan.collect()

    def launch(
        self,
        kernel: Callable[[Any], Callable[..., None]],
        arguments: Mapping[str, Argument],
        blocks: int,  # noqa: ARG002 - one thread takes them all
        threads: int,  # noqa: ARG002
    ) -> dict[str, Array]:
        """As :meth:`Engine.launch`, on one thread."""
        from dl2gpu.engine.one_thread import compiled

        function = compiled(kernel)
        made: list[Any] = []
        kept: dict[str, Array] = {}
        for name, value in arguments_of(function.py_func, arguments):
            if isinstance(value, Fresh):
                made.append(np.full(value.size, value.fill, value.dtype))
                if value.keep:
                    kept[name] = made[-1]
            else:
                made.append(value)
        function(*made)
        return kept

    def components(self, src: Array, dst: Array, size: int) -> Array:
        """As :meth:`Engine.components`, by SciPy."""
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        matrix = coo_matrix((np.ones(len(src), np.int8), (src, dst)), shape=(size, size)).tocsr()
        _, label = connected_components(matrix, directed=True, connection="strong")
        return label.astype(np.int64)  # type: ignore[no-any-return]


CPU: Final = Cpu()

PLANS: Final = Cpu(passes=False)
"""The GPU engine's way on the CPU."""
