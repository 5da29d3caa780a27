"""What the strings of a profiler trace mean. Small pure functions over single strings.

The reader calls each once for every distinct string. Source: FORMATS.md 0.1, 3.3, 3.4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import IntEnum
from math import prod
from typing import Any, Final

import msgspec

from dl2gpu.trace.flight_recorder_names import Operation, member_list, operation

__all__ = [
    "Kind",
    "Sizes",
    "arguments",
    "kernel_operation",
    "kind_of",
    "members_of",
    "operation_of",
    "sizes_of",
    "splits_of",
]


class Kind(IntEnum):
    """What an event is to the reader."""

    NOTHING = 0
    RECORD = 1
    """``record_param_comms``: a call, with its metadata."""
    CALL = 2
    """``c10d::<op>``: the dispatched operation around it."""
    SPAN = 3
    """``<backend>:<op>`` on the host: NCCL the issuing, gloo the execution."""
    KERNEL = 4
    """A communication kernel on the device."""
    WINDOW = 5
    """The span of the profile."""
    END = 6
    """Where the window ends."""
    BATCH = 7
    """The span around a batch of operations that are launched together."""


_BACKENDS: Final = frozenset({"nccl", "gloo", "mpi", "ucc", "xccl", "rccl", "hccl", "mccl", "bccl"})
_PYTHON: Final = frozenset({"python_function", "cpu_instant_event"})


def kind_of(name: str, cat: str) -> Kind:
    """What an event of this name and category is."""
    if cat in _PYTHON:
        return Kind.NOTHING
    if name == "record_param_comms":
        return Kind.RECORD
    if name.startswith("c10d::"):
        return Kind.CALL if cat == "cpu_op" and operation_of(name).known else Kind.NOTHING
    if name.startswith("PyTorch Profiler"):
        return Kind.WINDOW if cat in {"Trace", ""} else Kind.NOTHING
    if name == "Record Window End":
        return Kind.END
    if cat in {"kernel", "gpu_op", "concurrent_kernel"}:
        return Kind.KERNEL if kernel_operation(name) is not None else Kind.NOTHING
    backend, colon, _ = name.partition(":")
    if cat not in {"user_annotation", "cpu_op", ""} or not colon or backend not in _BACKENDS:
        return Kind.NOTHING
    meaning = operation_of(name)
    if meaning.end:
        return Kind.BATCH
    return Kind.SPAN if meaning.known else Kind.NOTHING


def operation_of(name: str) -> Operation:
    """The operation that a name speaks of: a collective name, ``c10d::<op>_`` or ``nccl:<op>``."""
    if name.startswith("c10d::"):
        name = name.removeprefix("c10d::").rstrip("_")
        if name == "monitored_barrier":
            name = "barrier"
    found = operation(name)
    # creation of a group is local here, and which group is made is not told
    return replace(found, recorded=False) if found.op == "comm_create" else found


_KERNEL: Final = re.compile(
    r"(?:void )?nccl(?:Dev)?Kernel_([A-Za-z]+)|(?:void )?ncclSym\w*?_([A-Za-z]+)"
)
_KERNEL_OPS: Final = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "broadcast": "broadcast", "reduce": "reduce", "sendrecv": "send_recv", "generic": "",
}  # fmt: skip


def kernel_operation(name: str) -> str | None:
    """The collective that a kernel's name says, "" where it does not say which; None: another one.

    ``send_recv`` serves send, recv, all_to_all, gather and scatter.
    """
    found = _KERNEL.match(name)
    if found is None:
        return "" if name.startswith(("ncclSym", "ncclKernel", "ncclDevKernel")) else None
    return _KERNEL_OPS.get((found[1] or found[2] or "").lower(), "")


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None


def splits_of(text: str) -> list[int] | None:
    """``"[1, 2]"`` as a list; None where there are none, or more than the writer tells (30)."""
    found = _json(text)
    if not isinstance(found, list) or not found:
        return None
    return found if all(type(x) is int and 0 <= x < 1 << 62 for x in found) else None


def members_of(text: str) -> tuple[int, ...]:
    """Global ranks of ``Process Group Ranks``; empty where unknown, or cut after 30."""
    return member_list(text)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements and data type of the tensors of a call; None where not told."""

    count: int | None
    dtype: str | None


def sizes_of(dims: str, types: str) -> Sizes:
    """From ``Input Dims`` and ``Input type``: all tensors, or those of the leading list."""
    shapes, names = _json(dims), _json(types)
    dtype = None
    if isinstance(names, list):
        told = [n for n in names if isinstance(n, str) and n not in {"", "Scalar", "TensorList"}]
        dtype = told[0] if len(set(told)) == 1 else None
        if dtype is not None and dtype.startswith("GenericList"):
            dtype = None
    if not isinstance(shapes, list) or not shapes:
        return Sizes(None, dtype)
    tensors = shapes
    if isinstance(shapes[0], list) and shapes[0] and isinstance(shapes[0][0], list):
        tensors = shapes[0]
    count = 0
    for shape in tensors:
        if not isinstance(shape, list) or not all(type(x) is int and x >= 0 for x in shape):
            return Sizes(None, dtype)
        count += prod(shape)
    return Sizes(count if count < 1 << 62 else None, dtype)


def arguments(text: str) -> dict[int, int]:
    """``Concrete Inputs``: the whole numbers among them, by position."""
    found = _json(text)
    if not isinstance(found, list):
        return {}
    out = {}
    for i, value in enumerate(found):
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value):
            out[i] = int(value)
        elif type(value) is int and abs(value) < 10**9:
            out[i] = value
    return out
