"""Bits of words, for kernels that keep sets in them."""

from __future__ import annotations

from typing import Any

from dl2gpu.engine.native import deferred

__all__ = ["lowest"]


def _lowest() -> Any:
    """Position of the lowest set bit of a word (64 bits); 64 where none is set."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def lowest(_typing: Any, _word: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.cttz(args[0], ir.IntType(1)(0))

        return types.int64(types.int64), codegen

    return lowest


lowest = deferred(_lowest)
