"""The GPU engine: plans on cuDF through Polars, kernels by numba-cuda, components by cuGraph.

Needs one of the extras gpu-cu12 and gpu-cu13; :func:`choose.missing` says what is not there. One
process drives one GPU, the one that is current, and its threads take turns. All libraries take
their memory from one resource of RMM, so that none hoards what another needs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import polars as pl

from dl2gpu.engine.arrays import Array
from dl2gpu.engine.base import Argument, Fresh, arguments_of
from dl2gpu.engine.choose import DeviceMemoryError

__all__ = ["Gpu", "on_cycles", "query_options", "thread_count"]

_MOST_BLOCKS: Final = 1 << 16
"""Blocks of a launch; each takes one job after another."""

_ROUNDS_OF_PRUNING: Final = 32
"""cuGraph peels as well; what is dropped here need not get there, above all chains of victims."""


def query_options(memory: Any) -> Any:
    """How Polars runs a plan: whole on cuDF, or an error; in one piece, as a shard fits the memory.

    ``memory`` is the resource of RMM that it takes its memory from.
    """
    return pl.GPUEngine(memory_resource=memory, raise_on_fail=True, executor="in-memory")


class Gpu:
    """Runs everything that is large on the current GPU. Results come back to the host's memory.

    Raises:
        DeviceMemoryError: (from all its calls) the memory of the GPU did not suffice.
    """

    name: Final = "gpu"
    passes: Final = False

    def __init__(self) -> None:
        import cupy
        import rmm
        from rmm.allocators.cupy import rmm_cupy_allocator

        with _on_device():
            self._memory = rmm.mr.CudaAsyncMemoryResource()
        rmm.mr.set_current_device_resource(self._memory)
        cupy.cuda.set_allocator(rmm_cupy_allocator)

    def collect(self, plan: pl.LazyFrame) -> pl.DataFrame:
        """As :meth:`Engine.collect`. A plan that cuDF cannot run is an error, never run elsewhere.

        Raises:
            polars.exceptions.PolarsError: an operation of the plan does not exist in cuDF.
        """
        with _on_device():
            return plan.collect(engine=query_options(self._memory))

    def launch(
        self,
        kernel: Callable[[Any], Callable[..., None]],
        arguments: Mapping[str, Argument],
        blocks: int,
        threads: int,
    ) -> dict[str, Array]:
        """As :meth:`Engine.launch`, by numba-cuda on CuPy arrays."""
        import cupy

        function = _compiled(kernel)
        made: list[Any] = []
        kept: dict[str, tuple[Any, int]] = {}
        with _on_device():
            for name, value in arguments_of(function.py_func, arguments):
                if isinstance(value, Fresh):
                    # an array without elements has no address
                    made.append(cupy.full(max(value.size, 1), value.fill, value.dtype))
                    if value.keep:
                        kept[name] = made[-1], value.size
                elif isinstance(value, np.ndarray):
                    made.append(cupy.asarray(value if len(value) else np.zeros(1, value.dtype)))
                else:
                    made.append(value)
            if blocks:
                function[min(blocks, _MOST_BLOCKS), thread_count(threads)](*made)
            return {name: cupy.asnumpy(array)[:size] for name, (array, size) in kept.items()}

    def components(self, src: Array, dst: Array, size: int) -> Array:
        """As :meth:`Engine.components`, by cuGraph over all jobs of the shard in one call."""
        import cudf
        import cugraph
        import cupy

        label = np.arange(size, dtype=np.int64)
        with _on_device():
            on_src, on_dst = on_cycles(cupy, cupy.asarray(src), cupy.asarray(dst), size)
            if not len(on_src):
                return label
            edges = cudf.DataFrame({"src": on_src, "dst": on_dst})
            graph = cugraph.Graph(directed=True)
            graph.from_cudf_edgelist(edges, source="src", destination="dst")
            found = cugraph.strongly_connected_components(graph)
            vertex = cupy.asnumpy(found["vertex"].values)
            component = cupy.asnumpy(found["labels"].values)
        label[vertex] = _by_first(vertex, component)
        return label


def _by_first(vertex: Array, component: Array) -> Array:
    """int64[n]: for each vertex the smallest one of its component."""
    order = np.lexsort((vertex, component))
    first = np.ones(len(order), np.bool_)
    first[1:] = component[order][1:] != component[order][:-1]
    out = np.empty(len(order), np.int64)
    out[order] = vertex[order][first][np.cumsum(first) - 1]
    return out


def on_cycles(xp: Any, src: Any, dst: Any, size: int) -> tuple[Any, Any]:
    """The edges without those that plainly lie on no cycle.

    Drops edges from vertices that none leads to and to vertices that lead nowhere, again and again.
    ``xp`` is the module of the arrays: NumPy or CuPy.
    """
    for _ in range(_ROUNDS_OF_PRUNING):
        has_in, has_out = xp.zeros(size, xp.bool_), xp.zeros(size, xp.bool_)
        has_out[src] = True
        has_in[dst] = True
        keep = has_in[src] & has_out[dst]
        if bool(keep.all()):
            break
        src, dst = src[keep], dst[keep]
    return src, dst


def thread_count(places: int) -> int:
    """Threads of a block for a job with so many lanes and queues: a power of two, 32 to 512."""
    return min(512, max(32, 1 << max(places - 1, 0).bit_length()))


@functools.cache
def _compiled(kernel: Callable[[Any], Callable[..., None]]) -> Any:
    from numba import cuda
    from numba.cuda.core import config

    # a shard of few jobs has few blocks: that is no mistake to warn of
    config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
    return cuda.jit(kernel(cuda))


_SHORT_OF_MEMORY: Final = (
    "out_of_memory", "out of memory", "bad_alloc", "MemoryError", "cudaErrorMemoryAllocation",
    "CUDA_ERROR_OUT_OF_MEMORY",
)  # fmt: skip
"""Marks in the errors of libraries that do not say it by the error's type."""

_turn = threading.RLock()
"""Threads take turns: all libraries work on the GPU's default stream, and share its memory."""


@contextmanager
def _on_device() -> Iterator[None]:
    """One thread at a time. What a library raises for want of memory becomes DeviceMemoryError."""
    try:
        with _turn:
            yield
    except DeviceMemoryError:
        raise
    except Exception as e:
        text = f"{type(e).__name__}: {e}"
        if isinstance(e, MemoryError) or any(mark in text for mark in _SHORT_OF_MEMORY):
            raise DeviceMemoryError(f"the GPU's memory does not suffice: {text}") from e
        raise
