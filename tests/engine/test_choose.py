"""What stands between a machine and the GPU engine is named, each thing by itself."""

from __future__ import annotations

import types
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest

from dl2gpu.engine import choose
from dl2gpu.engine.choose import DeviceMemoryError, EngineError, missing
from dl2gpu.engine.cpu import CPU
from dl2gpu.report.doctor import facts

GOOD = {
    "cudf-polars-cu12": "26.10.2", "cudf-cu12": "26.10.2", "cugraph-cu12": "26.10.0",
    "cupy-cuda12x": "14.2.0", "numba-cuda": "0.30.4", "dask-cuda": "26.10.0",
}  # fmt: skip

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this a machine with such a driver, GPU and packages; by default all that is needed."""

    def make(
        driver: tuple[int, int] | None = (12, 8), gpus: int = 1,
        properties: Any = ((9, 0), 80 << 30), packages: dict[str, str] = GOOD,
        absent: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        def version(distribution: str) -> str:
            if distribution not in packages:
                raise metadata.PackageNotFoundError(distribution)
            return packages[distribution]

        monkeypatch.setattr(choose, "driver", lambda: driver)
        monkeypatch.setattr(choose, "devices", lambda: gpus)
        monkeypatch.setattr(choose, "properties", lambda: properties)
        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(
            "dl2gpu.engine.choose.importlib.util.find_spec",
            lambda name: None if name in absent else types.SimpleNamespace(),
        )

    return make


def test_nothing_is_missing(machine: Machine) -> None:
    machine()
    assert missing() == []
    assert choose.choose("auto") == choose.choose("gpu") == "gpu"


BRING = "(pip install 'dl2gpu[gpu-cu12]' brings them)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"driver": None}, ["no NVIDIA driver (libcuda.so.1)"]),
        (
            {"driver": (11, 4)},
            ["an NVIDIA driver that serves CUDA 11.4, older than 12.2"],
        ),
        ({"gpus": 0}, ["an NVIDIA driver but no GPU that this process may use"]),
        (
            {"properties": ((6, 1), 80 << 30)},
            ["a GPU of compute capability 6.1, below 7.0"],
        ),
        (
            {"properties": ((7, 5), 2 << 30)},
            ["a GPU with 2.0 GiB of memory, less than 4 GiB"],
        ),
        ({"absent": ("cugraph", "cupy")}, [f"no package cugraph, cupy {BRING}"]),
        (
            {"packages": GOOD | {"cugraph-cu12": "25.10.1", "numba-cuda": "0.19.2"}},
            [f"cugraph-cu12 25.10, older than 26.10; numba-cuda 0.19, older than 0.30 {BRING}"],
        ),
        (
            {"packages": {"cudf-cu13": "26.10.2"}},
            [f"cudf-cu13, built for CUDA 13, on a driver for 12.8 {BRING}"],
        ),
        ({"properties": None}, []),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_what_is_missing(machine: Machine, given: dict[str, Any], expected: list[str]) -> None:
    machine(**given)
    assert missing() == expected
    assert choose.choose("auto") == ("cpu" if expected else "gpu")


def test_all_that_is_missing_at_once(machine: Machine) -> None:
    machine(driver=(11, 0), properties=((5, 2), 1 << 30), absent=("cudf",))
    assert len(missing()) == 4


def test_packages_of_the_driver_are_recommended(machine: Machine) -> None:
    machine(driver=(13, 0), absent=("cudf",), packages={})
    with pytest.raises(EngineError, match=r"no package cudf \(pip install 'dl2gpu\[gpu-cu13\]'"):
        choose.choose("gpu")


def test_properties_of_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_libcuda", lambda: None)
    assert choose.properties() is None
    assert choose.driver() is None
    assert choose.devices() == 0


def test_properties_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libcuda answers: by reference, 0 for success."""

    def tell(values: dict[int, int]) -> Any:
        def attribute(out: Any, which: int, device: Any) -> int:
            out._obj.value = values[which]
            return 0

        return attribute

    def total(out: Any, device: Any) -> int:
        out._obj.value = 24 << 30
        return 0

    library = types.SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGet=lambda out, number: 0,
        cuDeviceGetAttribute=tell({75: 8, 76: 9}),
        cuDeviceTotalMem_v2=total,
    )
    monkeypatch.setattr(choose, "_libcuda", lambda: library)
    assert choose.properties() == ((8, 9), 24 << 30)
    library.cuInit = lambda flags: 100
    assert choose.properties() is None


def test_doctor_names_the_gpu(machine: Machine) -> None:
    machine(gpus=2, properties=((8, 9), 24_000_000_000))
    assert dict(facts())["GPUs"] == "2, the first of compute capability 8.9 with 24.0 GB"
    machine(gpus=0, properties=None)
    assert dict(facts())["GPUs"] == "0"


def test_engines_by_name() -> None:
    assert choose.engine_of("cpu") is CPU
    with pytest.raises(EngineError, match="expected cpu or gpu; found 'auto'"):
        choose.engine_of("auto")


def test_running_out_of_device_memory_is_a_memory_error() -> None:
    assert issubclass(DeviceMemoryError, MemoryError)
