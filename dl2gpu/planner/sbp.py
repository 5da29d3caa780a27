"""SBP: how a tensor lies over a grid of devices, and what an operator makes of it.

On each dimension of the grid a tensor is split along one of its axes, S(axis); whole on each
device, B (broadcast); or to be summed over the devices, P (partial sum). A state is a tuple with
one of these for each dimension of the grid. Where two dimensions split the same axis, the earlier
one cuts first, and the later one cuts its pieces.

An operator is a list of named axes, as in Einstein's summation, and which of them may be split. Its
signatures on one dimension of the grid follow:

* splitting an axis splits every tensor that has it, and leaves the others whole; a result without
  the axis is a partial sum;
* everything may be whole (the work is done on each device);
* where the operator is linear, a partial sum may pass through.

Backward is the dual: the gradient of a split tensor is split alike, that of a partial sum is whole,
and that of an operand that was whole while others were split is a partial sum.

Source: Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch",
arXiv 2110.15032, section 3.1; AutoDDL (arXiv 2301.06813v3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Final

__all__ = [
    "OPERATORS",
    "B",
    "Operator",
    "P",
    "S",
    "Signature",
    "State",
    "label",
    "legal",
    "local_size",
    "signatures",
    "states",
]

B: Final = 0
P: Final = 1

State = tuple[int, ...]
"""One placement for each dimension of the grid: B, P or S(axis)."""


def S(axis: int) -> int:  # noqa: N802 - as the field writes it
    """Split along ``axis``."""
    return 2 + axis


def label(state: State) -> str:
    """A state as the field writes it: ``(S(0), B)``."""
    return "(" + ", ".join("BP"[s] if s < 2 else f"S({s - 2})" for s in state) + ")"


def legal(state: State, shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Is every axis cut into equal parts?"""
    cuts = [1] * len(shape)
    for placed, size in zip(state, grid, strict=True):
        if placed >= 2:
            if placed - 2 >= len(shape):
                return False
            cuts[placed - 2] *= size
    return all(n % c == 0 for n, c in zip(shape, cuts, strict=True))


def local_size(state: State, shape: tuple[int, ...], grid: tuple[int, ...]) -> int:
    """Elements of a tensor on each device."""
    cuts = prod(size for placed, size in zip(state, grid, strict=True) if placed >= 2)
    return prod(shape) // cuts


def states(shape: tuple[int, ...], grid: tuple[int, ...]) -> list[State]:
    """All legal states of a tensor on a grid."""
    every = product(range(2 + len(shape)), repeat=len(grid))
    return [s for s in every if legal(s, shape, grid)]


@dataclass(frozen=True, slots=True)
class Operator:
    """Axes of the operands and of the result, by letters, and which of them may be split."""

    name: str
    inputs: tuple[str, ...]
    output: str
    splittable: str
    weights: tuple[int, ...] = ()
    """Operands that are parameters."""
    no_gradient: tuple[int, ...] = ()
    """Operands without a gradient: token ids, labels."""
    linear: tuple[int, ...] = ()
    """Operands that may together be partial sums, and the result with them."""
    reduces_inside: str = ""
    """Axes over which the operator itself reduces across devices: its result is whole. The
    reductions are of two numbers forward for each element without that axis."""
    scaled: tuple[tuple[int, str, int | str], ...] = ()
    """(operand, or -1 for the result; axis; factor, or the axis of which the size is the factor):
    where the tensor is longer along an axis than the operator's own count of it."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Placements on one dimension of the grid, forward and backward."""

    name: str
    """The axis that is split, ``whole`` or ``partial``."""
    inputs: tuple[int, ...]
    output: int
    grad_inputs: tuple[int, ...]
    grad_output: int

    @property
    def splits(self) -> bool:
        """Is the work divided?"""
        return self.name not in ("whole", "partial")


def _split(op: Operator, axis: str) -> Signature:
    def place(axes: str, other: int) -> int:
        return S(axes.index(axis)) if axis in axes else other

    whole = axis in op.reduces_inside
    return Signature(
        axis,
        tuple(place(i, B) for i in op.inputs),
        place(op.output, B if whole else P),
        tuple(place(i, P) for i in op.inputs),
        place(op.output, B),
    )


@lru_cache(maxsize=256)
def signatures(op: Operator) -> tuple[Signature, ...]:
    """The signatures of an operator on one dimension of the grid, more than one device long."""
    every = [_split(op, axis) for axis in op.splittable]
    every.append(
        Signature("whole", (B,) * len(op.inputs), B, (B,) * len(op.inputs), B),
    )
    if op.linear:
        every.append(
            Signature(
                "partial",
                tuple(P if i in op.linear else B for i in range(len(op.inputs))),
                P,
                # the gradient of a parameter is the product with a partial sum: one itself
                tuple(B if i in op.linear else P for i in range(len(op.inputs))),
                B,
            )
        )
    return tuple(every)


def _catalogue(*ops: Operator) -> dict[str, Operator]:
    return {op.name: op for op in ops}


OPERATORS: Final = _catalogue(
    Operator("matmul", ("bti", "io"), "bto", "btio", weights=(1,), linear=(0,)),
    # softmax runs over the keys k, and dot products over d
    Operator("attention", ("bqhd", "bkhd", "bkhd"), "bqhd", "bqh"),
    # the same with queries, keys and values in one tensor, heads first: splits by whole heads
    Operator("packed_attention", ("bth",), "bth", "bh", scaled=((0, "h", 3),)),
    Operator("layer_norm", ("bte", "e"), "bte", "bt", weights=(1,)),
    # a lookup is a product with one-hot rows: each device looks up what it has of the vocabulary
    Operator("embedding", ("bt", "ve"), "bte", "btve", weights=(1,), no_gradient=(0,)),
    # a split of the picture would need its neighbours' edges
    Operator("convolution", ("bcs", "kcw"), "bks", "bck", weights=(1,), linear=(0,)),
    Operator("pool", ("bcs",), "bcr", "bc"),
    Operator("elementwise", ("bte",), "bte", "bte"),
    Operator("add", ("bte", "bte"), "bte", "bte", linear=(0, 1)),
    Operator("cross_entropy", ("btv", "bt"), "", "btv", no_gradient=(1,), reduces_inside="v"),
    Operator("transpose", ("bte",), "bet", "bte", linear=(0,)),
    # c s to f, c leading: a split of c is a split of f; t is one position
    Operator("flatten", ("bcs",), "btc", "bc", linear=(0,), scaled=((-1, "c", "s"),)),
    # b h w c to (b windows) (positions) c: a split of b stays one of the first axis; a cyclic
    # shift moves rows across any split of the picture
    Operator("window_partition", ("btc",), "btc", "bc", linear=(0,)),
    # four neighbours become one position: their channels are no longer contiguous
    Operator("patch_merging", ("btc",), "bue", "b", linear=(0,)),
)  # fmt: skip
"""The operators that the models are made of."""
