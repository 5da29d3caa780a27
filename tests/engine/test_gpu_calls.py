"""The GPU engine's own code, run without a GPU.

Its libraries are replaced by stand-ins that check each call against the signature of what is
installed, and then do the same with NumPy, SciPy and the kernel for one thread. So the engine goes
through a whole analysis, and gives the CPU engine's findings.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import types
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import polars as pl
import pytest
from engine.ways import demo, result, wild
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import from_seed, trace_of

from dl2gpu.analysis import analyse
from dl2gpu.engine import choose, gpu
from dl2gpu.engine.choose import DeviceMemoryError
from dl2gpu.engine.cpu import CPU
from dl2gpu.engine.one_thread import compiled

# --------------------------------------------------------------------------------------------------
# Stand-ins


def signature_of(real: Any) -> inspect.Signature | None:
    """What Python, or else the first line of its documentation, says that it takes."""
    try:
        return inspect.signature(real)
    except ValueError:
        text = (real.__doc__ or "").strip().split("\n")[0]
        names: dict[str, Any] = {}
        try:
            exec(f"def {text}: ...", names)
        except SyntaxError:
            return None
        return inspect.signature(names[real.__name__])


class Calls:
    """Makes checked stand-ins, and counts the calls of each."""

    def __init__(self) -> None:
        self.made: dict[str, int] = {}

    def checked(self, name: str, real: Any, instead: Callable[..., Any]) -> Callable[..., Any]:
        signature = signature_of(real)

        @functools.wraps(instead)
        def call(*args: Any, **kwargs: Any) -> Any:
            if signature is None:
                assert callable(real)
            else:
                signature.bind(*args, **kwargs)
            self.made[name] = self.made.get(name, 0) + 1
            return instead(*args, **kwargs)

        return call


class Column:
    def __init__(self, values: Any) -> None:
        self.values = values


class Graph:
    """Of cuGraph, as far as the engine goes; ``calls`` and ``real`` are set by the test."""

    calls: Calls
    real: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        inspect.signature(self.real).bind(*args, **kwargs)
        assert kwargs["directed"]

    def from_cudf_edgelist(self, *args: Any, **kwargs: Any) -> None:
        inspect.signature(self.real.from_cudf_edgelist).bind(self, *args, **kwargs)
        (edges,) = args
        self.edges = edges[kwargs["source"]], edges[kwargs["destination"]]


def components_of(graph: Graph) -> dict[str, Column]:
    """Vertices that have an edge, and labels that are not those of SciPy, in another order."""
    src, dst = graph.edges
    vertices, number = np.unique(np.concatenate([src, dst]), return_inverse=True)
    label = CPU.components(number[: len(src)], number[len(src) :], len(vertices))
    return {"vertex": Column(vertices[::-1]), "labels": Column(1000 - label[::-1])}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    reason = "needs one of the gpu extras"
    cupy, cudf, cugraph, rmm = (
        pytest.importorskip(name, reason=reason, exc_type=ImportError)
        for name in ("cupy", "cudf", "cugraph", "rmm")
    )
    from rmm.allocators.cupy import rmm_cupy_allocator

    calls = Calls()
    checked = calls.checked
    allocators: list[Any] = []
    graph = type("Graph", (Graph,), {"real": cugraph.Graph})
    fakes = {
        "cupy": types.SimpleNamespace(
            full=checked("cupy.full", cupy.full, np.full),
            zeros=checked("cupy.zeros", cupy.zeros, np.zeros),
            asarray=checked("cupy.asarray", cupy.asarray, np.asarray),
            asnumpy=checked("cupy.asnumpy", cupy.asnumpy, np.array),
            bool_=cupy.bool_,
            cuda=types.SimpleNamespace(
                set_allocator=checked(
                    "cupy.cuda.set_allocator", cupy.cuda.set_allocator, allocators.append
                )
            ),
        ),
        "rmm": types.SimpleNamespace(
            mr=types.SimpleNamespace(
                CudaAsyncMemoryResource=checked(
                    "rmm.mr.CudaAsyncMemoryResource", rmm.mr.CudaAsyncMemoryResource, object
                ),
                set_current_device_resource=checked(
                    "rmm.mr.set_current_device_resource",
                    rmm.mr.set_current_device_resource,
                    lambda resource: None,
                ),
            )
        ),
        "rmm.allocators.cupy": types.SimpleNamespace(rmm_cupy_allocator=rmm_cupy_allocator),
        "cudf": types.SimpleNamespace(DataFrame=checked("cudf.DataFrame", cudf.DataFrame, dict)),
        "cugraph": types.SimpleNamespace(
            Graph=graph,
            strongly_connected_components=checked(
                "cugraph.strongly_connected_components",
                cugraph.strongly_connected_components,
                components_of,
            ),
        ),
    }
    assert isinstance(cudf.Series.values, property)
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return calls


class Launch:
    """A kernel of numba-cuda, run by one thread."""

    def __init__(self, kernel: Any, launches: list[tuple[int, int]]) -> None:
        self.function = compiled(kernel)
        self.py_func = self.function.py_func
        self.launches = launches

    def __getitem__(self, shape: tuple[int, int]) -> Any:
        self.launches.append(shape)
        return self.function


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    launches: list[tuple[int, int]] = []
    monkeypatch.setattr(gpu, "_compiled", lambda kernel: Launch(kernel, launches))
    monkeypatch.setattr(gpu, "query_options", lambda memory: "in-memory")
    return launches


def test_a_whole_analysis(calls: Calls, launches: list[tuple[int, int]]) -> None:
    engine = gpu.Gpu()
    for trace in (demo(), trace_of(*from_seed(31, 40)), trace_of(*wild(32, 40))):
        assert result(trace, engine) == result(trace, CPU)
    assert len(launches) > 10
    assert all(blocks >= 1 and threads % 32 == 0 for blocks, threads in launches)
    choose._gpu.cache_clear()
    by_name = analyse(trace_of(*from_seed(33, 20)), engine="gpu")
    assert by_name.findings == analyse(trace_of(*from_seed(33, 20)), engine="cpu").findings
    choose._gpu.cache_clear()
    assert calls.made["rmm.mr.CudaAsyncMemoryResource"] == 2
    assert set(calls.made) == {
        "cupy.full", "cupy.zeros", "cupy.asarray", "cupy.asnumpy", "cupy.cuda.set_allocator",
        "rmm.mr.CudaAsyncMemoryResource", "rmm.mr.set_current_device_resource", "cudf.DataFrame",
        "cugraph.strongly_connected_components",
    }  # fmt: skip


def test_a_call_that_does_not_fit_is_seen(calls: Calls) -> None:
    import cupy

    with pytest.raises(TypeError):
        cupy.full(3)
    with pytest.raises(TypeError):
        cupy.zeros(3, bool, "C", "more")


def test_the_kernel_of_numba_cuda() -> None:
    """What the engine asks of numba-cuda's own kernels."""
    pytest.importorskip("numba_cuda", reason="needs one of the gpu extras", exc_type=ImportError)
    from numba.cuda.core import config

    from dl2gpu.analysis import rounds_kernel

    assert hasattr(config, "CUDA_LOW_OCCUPANCY_WARNINGS")
    function = gpu._compiled(rounds_kernel.bound)
    assert function.py_func.__code__ is rounds_kernel.rounds.__code__
    assert hasattr(type(function), "__getitem__")


# --------------------------------------------------------------------------------------------------
# Components


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    size = draw(st.integers(1, 12))
    vertex = st.integers(0, size - 1)
    return size, draw(st.lists(st.tuples(vertex, vertex), max_size=30))


def partition(label: Any) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(label == x).tolist()) for x in np.unique(label)}


@given(graph=graphs())
@settings(max_examples=300, deadline=None)
def test_pruning_keeps_all_cycles(graph: tuple[int, list[tuple[int, int]]]) -> None:
    size, edges = graph
    src, dst = (np.array([e[k] for e in edges], np.int64) for k in (0, 1))
    kept = gpu.on_cycles(np, src, dst, size)
    assert set(zip(*kept, strict=True)) <= set(edges)
    assert partition(CPU.components(*kept, size)) == partition(CPU.components(src, dst, size))


def test_pruning_drops_what_leads_to_a_cycle() -> None:
    src, dst = np.array([0, 1, 2, 1, 5, 6]), np.array([1, 2, 1, 3, 6, 6])
    left = set(zip(*gpu.on_cycles(np, src, dst, 7), strict=True))
    assert left == {(1, 2), (2, 1), (6, 6)}


def test_labels_are_the_first_vertices() -> None:
    vertex, component = np.array([9, 4, 7, 2, 5]), np.array([3, 8, 3, 8, 0])
    assert gpu._by_first(vertex, component).tolist() == [7, 2, 7, 2, 5]


# --------------------------------------------------------------------------------------------------
# Threads, and memory


def test_threads_take_turns() -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with gpu._on_device():
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.002)
            inside.remove(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(12)))
    assert most == [1] * 12


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("std::bad_alloc: out_of_memory: CUDA error at: cuda_async_memory_resource"),
        RuntimeError("CUDA error encountered: cudaErrorMemoryAllocation out of memory"),
        pl.exceptions.ComputeError("'cuda' conversion failed: MemoryError: std::bad_alloc"),
        OSError("Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_memory_that_does_not_suffice(error: Exception) -> None:
    expected = pytest.raises(DeviceMemoryError, match="the GPU's memory does not suffice")
    with expected as caught, gpu._on_device():
        raise error
    assert caught.value.__cause__ is error


def test_other_errors_stay_what_they_are() -> None:
    for error in (ValueError("shape"), pl.exceptions.ComputeError("no such column")):
        with pytest.raises(type(error)) as caught, gpu._on_device():
            raise error
        assert caught.value is error


def test_memory_in_all_calls(
    calls: Calls, launches: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    engine = gpu.Gpu()

    def spent(*_: Any, **__: Any) -> None:
        raise MemoryError("out_of_memory")

    def fails(call: Callable[[], Any]) -> None:
        with pytest.raises(DeviceMemoryError):
            call()

    kernel: Any = lambda machine: one_argument  # noqa: E731
    monkeypatch.setattr(cupy, "asarray", spent)
    fails(lambda: engine.components(np.array([0, 1]), np.array([1, 0]), 2))
    fails(lambda: engine.launch(kernel, {"x": np.zeros(3)}, 1, 32))
    monkeypatch.setattr(pl.LazyFrame, "collect", spent)
    fails(lambda: engine.collect(pl.LazyFrame({"k": [1]})))


def one_argument(x: Any) -> None:
    """A kernel that does nothing."""


def test_arguments_are_those_of_the_kernel() -> None:
    given: Mapping[str, Any] = {"y": np.zeros(3)}
    with pytest.raises(TypeError, match=r"missing or not taken: \['x', 'y'\]"):
        CPU.launch(lambda machine: one_argument, given, 1, 1)
