"""Single instructions that kernels ask for by name."""

from __future__ import annotations

from typing import Any

from dl2gpu.engine.native import Helper

__all__ = ["lowest", "natural", "soon"]


def _lowest() -> Any:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def lowest(_typing: Any, _word: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.cttz(args[0], ir.IntType(1)(0))

        return types.int64(types.int64), codegen

    return lowest


def _natural() -> Any:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def natural(_typing: Any, _number: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            assume = builder.module.declare_intrinsic(
                "llvm.assume", (), ir.FunctionType(ir.VoidType(), [ir.IntType(1)])
            )
            builder.call(assume, [builder.icmp_signed(">=", args[0], args[0].type(0))])
            return args[0]

        return types.int64(types.int64), codegen

    return natural


def _soon() -> Any:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic
    def soon(_typing: Any, array: Any, _at: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            memory = context.make_array(signature.args[0])(context, builder, args[0])
            place = builder.bitcast(
                cgutils.gep(builder, memory.data, args[1]), ir.IntType(8).as_pointer()
            )
            number = ir.IntType(32)
            fetch = builder.module.declare_intrinsic(
                "llvm.prefetch",
                (place.type,),
                ir.FunctionType(ir.VoidType(), [place.type, number, number, number]),
            )
            builder.call(fetch, [place, number(0), number(3), number(1)])
            return context.get_dummy_value()

        return types.void(array, types.int64), codegen

    return soon


def _plain_lowest(word: int) -> int:
    """Position of the lowest set bit of a word of 64 bits; 64 where none is set."""
    return (int(word) & -int(word)).bit_length() - 1 if word else 64


def _plain_natural(number: int) -> int:
    """The number, which is not negative. It is no use to look whether an index counts from the end.

    What it says is not checked: where it is not so, anything may happen.
    """
    return number


def _plain_soon(array: Any, at: int) -> None:
    """The element will be asked for soon (it need not exist): memory may fetch it meanwhile."""


lowest = Helper(_lowest, _plain_lowest)
natural = Helper(_natural, _plain_natural)
soon = Helper(_soon, _plain_soon)
