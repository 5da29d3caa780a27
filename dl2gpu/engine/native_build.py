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
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from dl2gpu.engine.native import Helper, Kernel, stamp

__all__ = ["dispatcher", "jitted", "object_code"]

_OPTIONS: Final = {"nogil": True, "_nrt": False}
"""No reference counts: each call that passes an array would pay two atomic operations for it."""


def jitted(function: Callable[..., Any], **options: Any) -> Any:
    """A function compiled by Numba when it is called; the helpers it names are, too."""
    return njit(**_OPTIONS, **options)(_with_helpers(function))


def dispatcher(what: Kernel) -> Any:
    """The kernel as an ordinary Numba function, kept in Numba's cache."""
    function = _with_helpers(what.function)
    # the cache looks at the file of the function itself only; the name makes it look at all
    function.__qualname__ += f"_{stamp()}"
    results = {"int": types.int64, "bool": types.boolean, "None": types.void}
    signature = results[what.result](*_types(what))
    return njit(signature, cache=True, **_OPTIONS)(function)


def object_code(what: Kernel) -> tuple[str, bytes]:
    """Object code whose one entry (its symbol is given, too) takes a block of arguments."""
    inner = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(
        _with_helpers(what.function)
    )
    unpacked = _unpacked(_types(what))
    if what.result == "None":

        def entry(block):  # type: ignore[no-untyped-def]
            inner(*unpacked(block))
            return np.int64(0)

    else:

        def entry(block):  # type: ignore[no-untyped-def]
            return np.int64(inner(*unpacked(block)))

    flags = compiler.Flags()
    flags.nrt = False
    flags.error_model = "python"
    flags.enable_pyobject = False
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    context = cpu_target.target_context
    made = compiler.compile_extra(
        cpu_target.typing_context, context, entry, (types.voidptr,), types.int64, flags, {}
    )
    module = made.library._final_module
    outside = [f.name for f in module.functions if f.is_declaration]
    if strange := [name for name in outside if not name.startswith(("llvm.", "mem"))]:
        raise RuntimeError(f"calls into Numba: {', '.join(strange)}")
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


def _unpacked(parameters: tuple[Any, ...]) -> Any:
    """Makes the arguments out of a block: a number is one word, an array its address and shape."""

    @intrinsic
    def unpack(_typing: Any, block: Any) -> Any:
        given = types.Tuple(parameters)

        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            word_type = ir.IntType(64)
            words = builder.bitcast(args[0], word_type.as_pointer())
            used = 0

            def word() -> Any:
                nonlocal used
                place = builder.gep(words, [ir.Constant(ir.IntType(32), used)])
                used += 1
                return builder.load(place)

            values = []
            for p in parameters:
                if p == types.boolean:
                    values.append(builder.icmp_signed("!=", word(), word_type(0)))
                elif p == types.int64:
                    values.append(word())
                else:
                    values.append(_array(context, builder, p, word))
            return context.make_tuple(builder, given, values)

        return given(block), codegen

    return unpack


def _array(context: Any, builder: Any, kind: Any, word: Callable[[], Any]) -> Any:
    """An array over memory of somebody else's, from its address and shape."""
    array = context.make_array(kind)(context, builder)
    data = builder.inttoptr(word(), array.data.type)
    shape = [word() for _ in range(kind.ndim)]
    element = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    size = context.get_constant(types.intp, element)
    strides = [size]
    for extent in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], extent))
    populate_array(array, data=data, shape=shape, strides=strides, itemsize=size, meminfo=None)
    return array._getvalue()


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
