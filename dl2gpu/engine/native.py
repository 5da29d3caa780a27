"""Kernels: loops over arrays that run as machine code, without loading Numba where possible.

Numba compiles a kernel once; its object code is kept (:func:`compiled.kernel_folder`) and later
runs hand it to LLVM's linker, which takes a fraction of a millisecond, where importing Numba takes
most of the time of a short scan. Where that does not work out, the kernel is an ordinary Numba
function instead: so it is with ``DL2GPU_KERNELS=numba``, and with Numba's own switches for
debugging (``DL2GPU_KERNELS=native`` makes it an error).

A kernel is a plain function whose annotations are the names below; it allocates nothing, and calls
other functions only if they are marked with :func:`helper`::

    @kernel
    def total(values: Int64s, upto: int) -> int:
        ...

Arguments are checked as strictly as an array's memory deserves: data type, dimensions, order.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import platform
import threading
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from dl2gpu.engine.compiled import kernel_folder, read_private, write_private

__all__ = [
    "BoolRows", "Bools", "Bytes", "Helper", "Int8s", "Int32Rows", "Int32s", "Int64Rows", "Int64s",
    "Kernel", "Parameter", "UInt8s", "UInt32s", "deferred", "helper", "kernel",
]  # fmt: skip

# C-contiguous arrays of one dimension; ...Rows: of two
Bools: TypeAlias = Any
Int8s: TypeAlias = Any
Int32s: TypeAlias = Any
Int64s: TypeAlias = Any
UInt8s: TypeAlias = Any
UInt32s: TypeAlias = Any
BoolRows: TypeAlias = Any
Int32Rows: TypeAlias = Any
Int64Rows: TypeAlias = Any
Bytes: TypeAlias = Any
"""uint8[n] that is only read, and may be read-only."""


class Parameter(NamedTuple):
    """Type of an argument; ``dtype`` is None for numbers (int64) and truth values."""

    dtype: np.dtype[Any] | None
    ndim: int = 0
    constant: bool = False

    def __str__(self) -> str:
        if self.dtype is None:
            return "a number"
        return f"{'' if self.constant else 'writable '}C-contiguous {self.dtype}[{self.ndim}-d]"


_TYPES: Final[dict[str, Parameter]] = {
    "int": Parameter(None),
    "bool": Parameter(None),
    "Bools": Parameter(np.dtype(np.bool_), 1),
    "Int8s": Parameter(np.dtype(np.int8), 1),
    "Int32s": Parameter(np.dtype(np.int32), 1),
    "Int64s": Parameter(np.dtype(np.int64), 1),
    "UInt8s": Parameter(np.dtype(np.uint8), 1),
    "UInt32s": Parameter(np.dtype(np.uint32), 1),
    "BoolRows": Parameter(np.dtype(np.bool_), 2),
    "Int32Rows": Parameter(np.dtype(np.int32), 2),
    "Int64Rows": Parameter(np.dtype(np.int64), 2),
    "Bytes": Parameter(np.dtype(np.uint8), 1, constant=True),
}

SOURCES: Final = (
    "analysis/*_kernel.py", "trace/*_kernel.py", "trace/pickle_*.py", "trace/entry_columns.py",
    "trace/schema.py", "engine/native*.py",
)  # fmt: skip
"""Files that have a say in what the kernels compute. A change in any of them compiles them anew."""

_SWITCHES: Final = (
    "NUMBA_DISABLE_JIT", "NUMBA_BOUNDSCHECK", "NUMBA_OPT", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES",
)  # fmt: skip

on_compile: Callable[[], None] | None = None
"""Called once, before the first kernel is compiled: that of all takes a quarter of a minute."""

_lock = threading.RLock()


class Helper:
    """A function that kernels call. ``build`` makes of it what Numba can compile, when asked."""

    def __init__(
        self, build: Callable[[], Any], function: Callable[..., Any] | None = None
    ) -> None:
        self._build = build
        self._built: Any = None
        self._function = function
        if function is not None:
            functools.update_wrapper(self, function)

    @property
    def built(self) -> Any:
        if self._built is None:
            self._built = self._build()
        return self._built

    def __call__(self, *args: Any) -> Any:
        """The plain function: for kernels run as Python."""
        if self._function is None:
            raise TypeError("expected to be called from a kernel only")
        return self._function(*args)


def helper(**options: Any) -> Callable[[Callable[..., Any]], Helper]:
    """Marks a function that kernels call; ``options`` are those of ``numba.njit``."""

    def mark(function: Callable[..., Any]) -> Helper:
        def build() -> Any:
            from dl2gpu.engine.native_build import jitted

            return jitted(function, **options)

        return Helper(build, function)

    return mark


def deferred(build: Callable[..., Any], *args: Any) -> Helper:
    """Something for kernels to call that ``build(*args)`` makes with Numba's tools."""
    return Helper(functools.partial(build, *args))


class Kernel:
    """A function over arrays that is compiled, or loaded, by its first call. Releases the GIL."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        self.function = function
        self.parameters = [_TYPES[function.__annotations__[name]] for name in names]
        self.result = function.__annotations__["return"]
        self._call: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        return (self._call or self._ready())(*args)

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def _ready(self) -> Callable[..., Any]:
        with _lock:
            if self._call is None:
                self._call = self._native() or self._plain()
            return self._call

    def _plain(self) -> Callable[..., Any]:
        """The kernel as an ordinary Numba function, kept in Numba's own cache."""
        from dl2gpu.engine.native_build import dispatcher

        out: Callable[..., Any] = dispatcher(self)
        return out

    def _native(self) -> Callable[..., Any] | None:
        """The kernel from object code; None where this machine cannot have it so."""
        wish = os.environ.get("DL2GPU_KERNELS")
        if wish == "numba" or any(name in os.environ for name in _SWITCHES) or not _as_expected():
            return None
        try:
            file = f"{self.name}-{_key()}.o"
            data = read_private(kernel_folder() / file)
            if data is None or (address := _linked(data)) is None:
                _tell()
                from dl2gpu.engine.native_build import object_code

                data = _packed(*object_code(self))
                write_private(kernel_folder() / file, data)
                if (address := _linked(data)) is None:
                    raise RuntimeError(f"{self.name}: LLVM cannot link its object code")
        except Exception:  # whatever is amiss here, there is the other way
            if wish == "native":
                raise
            return None
        return _caller(self, address)


def kernel(function: Callable[..., Any]) -> Kernel:
    """Marks a kernel: a function whose arguments are annotated with the names of this module."""
    return Kernel(function)


@functools.cache
def _tell() -> None:
    if on_compile is not None:
        on_compile()


@functools.cache
def stamp() -> str:
    """Checksum of the sources of all kernels."""
    here = Path(__file__).parents[1]
    files = sorted(file for pattern in SOURCES for file in here.glob(pattern))
    if not files:  # not unpacked: nothing says what the kernels are made of
        raise FileNotFoundError("the sources of the kernels")
    check = 0
    for file in files:
        check = zlib.crc32(file.read_bytes(), zlib.crc32(file.name.encode(), check))
    return f"{check:08x}"


@functools.cache
def _key() -> str:
    """Checksum of all that object code depends on."""
    import llvmlite.binding as llvm

    parts = (
        stamp(), _version("numba"), _version("llvmlite"), platform.python_version(),
        platform.machine(), llvm.get_default_triple(), llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
    )  # fmt: skip
    return f"{zlib.crc32(repr(parts).encode()):08x}{stamp()}"


def _version(package: str) -> str:
    """Version of an installed package, by the name of the folder that says so where there is one.

    ``importlib.metadata`` takes longer to load than all kernels.
    """
    found = find_spec(package)
    beside = Path(found.origin).parents[1] if found and found.origin else Path()
    names = [folder.name for folder in beside.glob(f"{package}-*.dist-info")]
    if len(names) == 1:
        return names[0]
    from importlib import metadata

    return metadata.version(package)


def _packed(symbol: str, code: bytes) -> bytes:
    body = symbol.encode() + b"\n" + code
    return zlib.crc32(body).to_bytes(4, "little") + body


@functools.cache
def _linker() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler()


_linked_before = itertools.count()
_linkage: Final[list[Any]] = []
"""What was linked: it is unmapped when nobody holds it any more."""


def _linked(data: bytes) -> int | None:
    """Address of the function in what :func:`_packed` made; None where that is not so."""
    import llvmlite.binding as llvm

    check, body = int.from_bytes(data[:4], "little"), data[4:]
    if zlib.crc32(body) != check:
        return None
    symbol, _, code = body.partition(b"\n")
    name = symbol.decode()
    library = llvm.JITLibraryBuilder().add_object_img(code).add_current_process()
    try:
        linked = library.export_symbol(name).link(_linker(), f"kernel{next(_linked_before)}")
    except RuntimeError:  # no object code, or a symbol that is not there
        return None
    _linkage.append(linked)
    return int(linked[name])


_Entry: Final = ctypes.CFUNCTYPE(ctypes.c_int32)
"""Of pointers to result, exception, arguments, and the types of the arrays: the status.

This is how Numba's own functions call each other.
"""
_OK: Final = 0
NOT_MINE: Final = -(1 << 63)
"""Result where an array is not what the kernel takes."""

# Where the fields of an array lie. NumPy's extension modules have them built in as well.
HEAD: Final = object.__basicsize__
DATA, NDIM, DIMENSIONS, DTYPE, FLAGS = (HEAD + offset for offset in (0, 8, 16, 40, 48))
CONSTANT, WRITABLE = 0x101, 0x501  # C-contiguous and aligned; also writable


@functools.cache
def _as_expected() -> bool:
    """Do the fields of an array lie there?"""
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    at = id(array)
    pointer, number = ctypes.c_size_t.from_address, ctypes.c_int.from_address
    dimensions = pointer(at + DIMENSIONS).value
    return (
        ctypes.sizeof(ctypes.c_void_p) == 8
        and pointer(at + HEAD - ctypes.sizeof(ctypes.c_size_t)).value == id(np.ndarray)
        and pointer(at + DATA).value == array.ctypes.data
        and number(at + NDIM).value == 2
        and dimensions != 0
        and (ctypes.c_ssize_t * 2).from_address(dimensions)[:] == [2, 3]
        and pointer(at + DTYPE).value == id(array.dtype)
        and number(at + FLAGS).value & WRITABLE == WRITABLE
    )


def _caller(what: Kernel, address: int) -> Callable[..., Any]:
    """The function at ``address``. It takes a block of words: arrays by identity, then numbers."""
    entry = _Entry(address)
    parameters = what.parameters
    many = len(parameters)
    arrays = [i for i, p in enumerate(parameters) if p.dtype is not None]
    numbers = [i for i, p in enumerate(parameters) if p.dtype is None]
    block_of = ctypes.c_int64 * (many + 2)  # behind the arguments: the result and the exception
    at_result, at_fault = 8 * many, 8 * many + 8
    pointer = ctypes.byref
    known = (ctypes.c_int64 * (1 + len(arrays)))(
        id(np.ndarray), *(id(parameters[i].dtype) for i in arrays)
    )
    convert: dict[str, Callable[[int], Any]] = {"int": int, "bool": bool, "None": _nothing}
    given = convert[what.result]

    def call(*args: Any) -> Any:
        if len(args) != many:
            raise TypeError(f"{what.name}: expected {many} arguments, found {len(args)}")
        block = block_of(*[id(args[i]) for i in arrays], *[int(args[i]) for i in numbers])
        status = entry(pointer(block, at_result), pointer(block, at_fault), block, known)
        if status != _OK:
            raise ArithmeticError(f"{what.name}: a kernel failed (status {status})")
        result = block[many]
        if result == NOT_MINE:
            return call(*_conformed(what, args))
        return given(result)

    return call


def _nothing(_value: int) -> None:
    return None


def _conformed(what: Kernel, args: tuple[Any, ...]) -> list[Any]:
    """The arguments with NumPy's own data types; TypeError where one is something else."""
    out = []
    for i, (value, (dtype, ndim, constant)) in enumerate(zip(args, what.parameters, strict=True)):
        if dtype is None:
            out.append(value)
            continue
        array = isinstance(value, np.ndarray)
        flags = value.flags.num if array else 0
        if (
            not array
            or value.dtype != dtype
            or value.ndim != ndim
            or flags & (CONSTANT if constant else WRITABLE) != (CONSTANT if constant else WRITABLE)
        ):
            name = what.function.__code__.co_varnames[i]
            found = type(value).__name__
            if array:
                found = f"{value.dtype}[{value.ndim}-d] with flags {flags:#x}"
            raise TypeError(f"{what.name}: {name}: expected {what.parameters[i]}, found {found}")
        out.append(np.ndarray(value.shape, dtype, value))
    return out
