"""Kernels: from object code and from Numba alike, and never from a file that others could write."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dl2gpu
from dl2gpu.engine import native
from dl2gpu.engine.native import (
    Bools,
    Bytes,
    Int8s,
    Int32Rows,
    Int32s,
    Int64s,
    Kernel,
    UInt32s,
    helper,
    kernel,
)
from dl2gpu.engine.native_bits import lowest, natural, soon

PACKAGE = Path(dl2gpu.__file__).parent


@helper(forceinline=True)
def twice(value):  # type: ignore[no-untyped-def]
    return 2 * value


def mixed(
    raw: Bytes, a: Int32s, upto: int, rows: Int32Rows, small: Int8s, big: UInt32s, on: Bools,
    negative: bool, out: Int64s,
) -> int:  # fmt: skip
    for x in range(upto):
        value = twice(a[x]) + raw[x] + small[x] + big[x] + rows[x, 1]
        if on[x]:
            out[x] = -value if negative else value
    return int(rows.shape[0] * 100 + rows.shape[1])


def positive(values: Int64s) -> bool:
    least = 1
    for x in range(len(values)):
        least = min(least, values[x])
    return bool(least > 0)


def shares(values: Int64s, by: int) -> None:
    for x in range(len(values)):
        values[x] //= by


def places(values: Int64s, out: Int64s) -> None:
    for x in range(len(values)):
        soon(values, x + 8)  # beyond the end, too
        out[natural(x)] = lowest(values[x])


@pytest.fixture(params=["native", "numba"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("DL2GPU_KERNELS", request.param)
    monkeypatch.setattr(native, "kernel_folder", lambda: tmp_path)
    return str(request.param)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder for object code, which must be what kernels run from."""
    monkeypatch.setenv("DL2GPU_KERNELS", "native")
    monkeypatch.setattr(native, "kernel_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were compiled in the course of a test."""
    from dl2gpu.engine import native_build

    names: list[str] = []
    real = native_build.object_code

    def counted(what: Kernel) -> tuple[str, bytes]:
        names.append(what.name)
        return real(what)

    monkeypatch.setattr(native_build, "object_code", counted)
    return names


def uncached(function: Callable[..., Any]) -> Kernel:
    return kernel(function)


def arguments(n: int = 5) -> list[Any]:
    rng = np.random.default_rng(n)
    return [
        np.frombuffer(rng.bytes(n), np.uint8),  # read-only
        rng.integers(-9, 9, n, dtype=np.int32),
        n,
        rng.integers(-9, 9, (n, 3), dtype=np.int32),
        rng.integers(-9, 9, n, dtype=np.int8),
        rng.integers(0, 9, n, dtype=np.uint32),
        rng.integers(0, 2, n).astype(np.bool_),
        True,
        np.zeros(n, np.int64),
    ]


@pytest.mark.parametrize("n", [0, 1, 5])
def test_as_the_plain_function(way: str, n: int) -> None:
    expected, found = arguments(n), arguments(n)
    with np.errstate(all="ignore"):
        result = mixed(*expected)
    assert uncached(mixed)(*found) == result
    np.testing.assert_array_equal(found[-1], expected[-1])


def test_single_instructions(way: str) -> None:
    words = [0, 1, -1, 6, 1 << 40, -(1 << 63), (1 << 63) - 1, -(1 << 62)]
    expected, found = np.zeros(8, np.int64), np.zeros(8, np.int64)
    places(np.array(words), expected)
    assert expected.tolist() == [64, 0, 0, 1, 40, 63, 0, 62]
    uncached(places)(np.array(words), found)
    assert found.tolist() == expected.tolist()


def test_results(way: str) -> None:
    good = uncached(positive)
    assert good(np.arange(1, 4)) is True
    assert good(np.arange(3)) is False
    assert good(np.empty(0, np.int64)) is True
    values = np.array([7, 9])
    assert uncached(shares)(values, 2) is None
    assert values.tolist() == [3, 4]


def test_an_error_within_is_raised(way: str) -> None:
    with pytest.raises(ArithmeticError):
        uncached(shares)(np.array([7, 9]), 0)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(1, 4, dtype=np.int32),
        np.arange(1.0, 4.0),
        np.ones((2, 2), np.int64),
        np.arange(1, 9)[::2],
        np.frombuffer(np.arange(1, 4).tobytes(), np.int64),
        np.arange(1, 4, dtype=">i8"),
        [1, 2, 3],
        None,
        7,
    ],
    ids=["narrow", "float", "2-d", "strided", "read-only", "byte order", "list", "none", "number"],
)
def test_what_is_no_such_array_is_refused(folder: Path, values: Any) -> None:
    with pytest.raises(TypeError, match=r"positive: values: expected writable .* found"):
        uncached(positive)(values)


def test_number_of_arguments(folder: Path) -> None:
    with pytest.raises(TypeError, match="expected 1 arguments, found 2"):
        uncached(positive)(np.arange(3), 1)


@pytest.mark.parametrize("dtype", [np.dtype("q"), np.dtype("l"), np.dtype("<i8", copy=True)])
def test_data_types_by_another_name(folder: Path, dtype: np.dtype[Any]) -> None:
    values = np.array([4, 6], dtype=np.dtype(dtype, metadata={"a": 1}))
    if values.dtype == np.int64:
        uncached(shares)(values, 2)
        assert values.tolist() == [2, 3]


def test_kept_for_the_next_run(folder: Path, compiled: list[str]) -> None:
    for _ in range(3):
        assert uncached(positive)(np.arange(1, 3))
    assert len(compiled) == 1
    assert [f.stat().st_mode & 0o777 for f in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "open", "link"])
def test_a_file_that_is_not_as_it_was_left(
    folder: Path, compiled: list[str], harm: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    uncached(positive)(np.arange(1, 3))
    (file,) = folder.iterdir()
    data = file.read_bytes()
    if harm == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif harm == "flip":
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif harm == "empty":
        file.write_bytes(b"")
    elif harm == "open":
        file.chmod(0o666)
    else:
        elsewhere = tmp_path_factory.mktemp("elsewhere") / "file"
        file.rename(elsewhere)
        file.symlink_to(elsewhere)
    assert uncached(positive)(np.arange(1, 3))
    assert len(compiled) == 2
    assert uncached(positive)(np.arange(1, 3))
    assert len(compiled) == 2, "it was replaced"


def test_a_folder_where_nothing_can_be_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernel_folder", lambda: folder / "missing")
    assert uncached(positive)(np.arange(1, 3))


@pytest.mark.parametrize("missing", ["_linked", "_key", "_linker"])
def test_what_does_not_work_out_is_done_by_numba(
    folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def fails(*_args: Any) -> Any:
        raise OSError("not on this machine")

    monkeypatch.delenv("DL2GPU_KERNELS")
    monkeypatch.setattr(native, missing, fails)
    values = np.array([7, 9])
    uncached(shares)(values, 2)
    assert values.tolist() == [3, 4]


def test_arrays_of_another_build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native._as_expected()
    monkeypatch.setattr(native, "_as_expected", lambda: False)
    assert uncached(positive)(np.arange(1, 3))
    assert not list(folder.iterdir())


def test_first_calls_from_many_threads(folder: Path, compiled: list[str]) -> None:
    one = uncached(positive)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda n: one(np.arange(1, n + 2)), range(32)))
    assert len(compiled) == 1


def run(code: str, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
    )
    return done.stdout


def test_a_scan_needs_no_numba(demo: Path) -> None:
    code = f"""if True:
        import json, sys, dl2gpu
        report = json.loads(dl2gpu.scan({str(demo)!r}).to_json())
        print(json.dumps([report["jobs"], report["findings"]]), 'numba' in sys.modules)
    """
    run(code, DL2GPU_KERNELS="native")
    native_way, *loaded = run(code, DL2GPU_KERNELS="native").rsplit(maxsplit=1)
    numba_way, *forced = run(code, DL2GPU_KERNELS="numba").rsplit(maxsplit=1)
    assert (loaded, forced) == (["False"], ["True"])
    assert native_way == numba_way


def test_all_that_kernels_are_made_of_is_in_the_key() -> None:
    files = {file for pattern in native.SOURCES for file in PACKAGE.glob(pattern)}
    harmless = {"dl2gpu.engine.native", "dl2gpu.engine.compiled", "dl2gpu.engine.arrays"}
    marked = set()
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        if "\n@kernel\n" in text or "\n@helper(" in text:
            marked.add(file)
    assert marked <= files | {PACKAGE / "engine" / "native.py"}
    for file in marked:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dl2gpu"):
                names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
                for name in names:
                    source = PACKAGE.parent / f"{str(name).replace('.', '/')}.py"
                    assert not source.exists() or source in files or name in harmless, (file, name)
