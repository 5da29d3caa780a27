"""Compiles the kernels of :mod:`native`, with Numba. Loaded only where there is no object code."""

from __future__ import annotations

import functools
import types as python
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from dl2gpu.engine.native import (
    CONSTANT,
    DATA,
    DIMENSIONS,
    DTYPE,
    FLAGS,
    HEAD,
    NDIM,
    NOT_MINE,
    WRITABLE,
    Helper,
    Kernel,
    stamp,
)

__all__ = ["dispatcher", "jitted", "object_code"]

_OPTIONS: Final = {"nogil": True, "_nrt": False}
"""No reference counts: each call that passes an array would pay two atomic operations for it."""
_INSIDE: Final = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""For what nobody calls from Python."""


def jitted(function: Callable[..., Any], **options: Any) -> Any:
    """A function for kernels to call; the helpers it names are compiled, too."""
    return njit(**_INSIDE, **options)(_with_helpers(function))


def dispatcher(what: Kernel) -> Any:
    """The kernel as an ordinary Numba function, kept in Numba's cache."""
    function = _with_helpers(what.function)
    # the cache looks at the file of the function itself only; the name makes it look at all
    function.__qualname__ += f"_{stamp()}"
    results = {"int": types.int64, "bool": types.boolean, "None": types.void}
    signature = results[what.result](*_types(what))
    return njit(signature, cache=True, **_OPTIONS)(function)


def object_code(what: Kernel) -> tuple[str, bytes]:
    """Object code whose one entry (its symbol is given, too) takes a block of arguments.

    The entry's arguments are the addresses of two blocks of 64-bit words: the arrays (as objects),
    then the numbers; what the types of arrays and of their elements must be.
    """
    inner = jitted(what.function)
    fits, unpacked = _checked(what), _unpacked(_types(what))
    if what.result == "None":

        def entry(block, known):  # type: ignore[no-untyped-def]
            if not fits(block, known):
                return NOT_MINE
            inner(*unpacked(block))
            return 0

    else:

        def entry(block, known):  # type: ignore[no-untyped-def]
            if not fits(block, known):
                return NOT_MINE
            return np.int64(inner(*unpacked(block)))

    flags = compiler.Flags()
    flags.nrt = False
    flags.error_model = "python"
    flags.enable_pyobject = False
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.no_compile = True  # to memory, that is: the code goes to a file first
    context = cpu_target.target_context
    typing = cpu_target.typing_context
    with global_compiler_lock:
        made = compiler.compile_extra(
            typing, context, entry, (types.voidptr, types.voidptr), types.int64, flags, {}
        )
        made.library.finalize()
        module = made.library._final_module
        outside = [f.name for f in module.functions if f.is_declaration]
        if strange := [name for name in outside if not name.startswith(("llvm.", "mem"))]:
            raise RuntimeError(f"{what.name} calls into Numba: {', '.join(strange)}")
        return made.fndesc.llvm_func_name, context.codegen()._tm.emit_object(module)


def _types(what: Kernel) -> tuple[Any, ...]:
    """Numba's types of the parameters."""
    out = []
    annotations = what.function.__annotations__
    for name, p in zip(what.function.__code__.co_varnames, what.parameters, strict=False):
        if p.dtype is None:
            out.append(types.boolean if annotations[name] == "bool" else types.int64)
        else:
            element = types.boolean if p.dtype == np.bool_ else getattr(types, p.dtype.name)
            out.append(types.Array(element, p.ndim, "C", readonly=p.constant))
    return tuple(out)


def _checked(what: Kernel) -> Any:
    """Are the arrays of a block arrays, of the right type, order and number of dimensions?"""

    @intrinsic
    def fits(_typing: Any, block: Any, known: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            wanted = [_load(builder, args[1], 8 * i, 64) for i in range(len(args_of) + 1)]
            good = ir.IntType(1)(1)
            for i, p in enumerate(args_of):
                array = builder.inttoptr(_load(builder, args[0], 8 * i, 64), _BYTES)
                need = ir.IntType(32)(CONSTANT if p.constant else WRITABLE)
                flags = builder.and_(_load(builder, array, FLAGS, 32), need)
                for found, expected in (
                    (_load(builder, array, HEAD - 8, 64), wanted[0]),
                    (_load(builder, array, DTYPE, 64), wanted[i + 1]),
                    (_load(builder, array, NDIM, 32), ir.IntType(32)(p.ndim)),
                    (flags, need),
                ):
                    good = builder.and_(good, builder.icmp_signed("==", found, expected))
            return good

        return types.boolean(block, known), codegen

    args_of = [p for p in what.parameters if p.dtype is not None]
    return fits


def _unpacked(parameters: tuple[Any, ...]) -> Any:
    """Makes the arguments out of a block."""

    @intrinsic
    def unpack(_typing: Any, block: Any) -> Any:
        given = types.Tuple(parameters)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            arrays = [p for p in parameters if isinstance(p, types.Array)]
            places = iter(range(len(arrays))), iter(range(len(arrays), len(parameters)))
            values = []
            for p in parameters:
                is_array = isinstance(p, types.Array)
                word = _load(builder, args[0], 8 * next(places[0 if is_array else 1]), 64)
                if is_array:
                    values.append(_array(context, builder, p, builder.inttoptr(word, _BYTES)))
                elif p == types.boolean:
                    values.append(builder.icmp_signed("!=", word, word.type(0)))
                else:
                    values.append(word)
            return context.make_tuple(builder, given, values)

        return given(block), codegen

    return unpack


_BYTES: Final = ir.IntType(8).as_pointer()


def _load(builder: Any, base: Any, offset: int, bits: int) -> Any:
    """An integer at so many bytes behind a place in memory."""
    place = builder.gep(base, [ir.IntType(64)(offset)])
    return builder.load(builder.bitcast(place, ir.IntType(bits).as_pointer()))


def _array(context: Any, builder: Any, kind: Any, array: Any) -> Any:
    """Numba's form of a C-contiguous NumPy array. Its memory stays the caller's."""
    made = context.make_array(kind)(context, builder)
    data = builder.inttoptr(_load(builder, array, DATA, 64), made.data.type)
    extents = builder.inttoptr(_load(builder, array, DIMENSIONS, 64), _BYTES)
    shape = [_load(builder, extents, 8 * i, 64) for i in range(kind.ndim)]
    element = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    size = context.get_constant(types.intp, element)
    strides = [size]
    for extent in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], extent))
    populate_array(made, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
    return made._getvalue()


def _with_helpers(function: Callable[..., Any]) -> Any:
    """The function with compiled helpers for the names of :class:`Helper` objects."""
    names = {
        name: value.built if isinstance(value, Helper) else value
        for name, value in function.__globals__.items()
        if name in function.__code__.co_names or not isinstance(value, Helper)
    }
    made = python.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    functools.update_wrapper(made, function)
    del made.__wrapped__  # type: ignore[attr-defined]
    return made
