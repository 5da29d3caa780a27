"""Engines: where queries, kernels and graph algorithms run. What they compute is the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import polars as pl

from dl2gpu.engine.arrays import Array

__all__ = ["Argument", "Engine", "Fresh", "arguments_of"]


@dataclass(frozen=True)
class Fresh:
    """An array that a kernel writes: made where it runs, and given back if ``keep``."""

    size: int
    dtype: type[np.generic]
    fill: int = 0
    keep: bool = False


Argument: TypeAlias = Array | Fresh | bool


class Engine(Protocol):
    """The calls in which engines differ; see :mod:`cpu` and :mod:`gpu`."""

    @property
    def name(self) -> str:
        """As in the report: cpu or gpu."""

    @property
    def passes(self) -> bool:
        """Take compiled passes along the rows and a work list, in place of plans and rounds."""

    def collect(self, plan: pl.LazyFrame) -> pl.DataFrame:
        """The rows of a plan, in no order but that of a sort at its end."""

    def launch(
        self,
        kernel: Callable[[Any], Callable[..., None]],
        arguments: Mapping[str, Argument],
        blocks: int,
        threads: int,
    ) -> dict[str, Array]:
        """Runs a kernel on so many blocks of so many threads, as far as there are such here.

        ``kernel`` binds its source to a machine with the names of ``numba.cuda``; ``arguments`` are
        by the names of its parameters. Gives the arrays that were to be kept.
        """

    def components(self, src: Array, dst: Array, size: int) -> Array:
        """int64[size]: a label for each vertex, the same within a strongly connected component.

        ``src``, ``dst`` int64[edges] below ``size``. Labels are below ``size``, in no order.
        """


def arguments_of(
    kernel: Callable[..., None], arguments: Mapping[str, Argument]
) -> list[tuple[str, Argument]]:
    """The arguments in the order of the kernel's parameters.

    Raises:
        TypeError: they are not those that the kernel takes.
    """
    code = kernel.__code__
    names = code.co_varnames[: code.co_argcount]
    if set(names) != set(arguments):
        wrong = sorted(set(names) ^ set(arguments))
        raise TypeError(f"{kernel.__name__}: arguments that are missing or not taken: {wrong}")
    return [(name, arguments[name]) for name in names]
