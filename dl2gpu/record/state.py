"""The recorder of this process, and what each of its threads is inside of."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from dl2gpu.record.recorder import Issued, Recorder
from dl2gpu.record.settings import Settings

__all__ = ["Scope", "active", "process", "scope", "scopes"]


class Process:
    """What there is once a process."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.recorder: Recorder | None = None
        self.comms: dict[str, tuple[str, tuple[int, ...]]] = {}
        """By PyTorch's name of a process group: id of the communicator, members."""


process: Final = Process()


def active() -> Recorder | None:
    """The recorder, while it records and this is the process that started it."""
    recorder = process.recorder
    if recorder is None or not recorder.recording or recorder.pid != os.getpid():
        return None
    return recorder


class Scope:
    """A call of PyTorch that operations are issued within."""

    __slots__ = ("issued", "kind", "reduce_op")

    def __init__(self, kind: str, reduce_op: str | None = None) -> None:
        self.kind = kind
        """python: a method of a process group; functional: an operator; native: C++ that waits
        for what it issues before it returns."""
        self.reduce_op = reduce_op
        self.issued: list[Issued] = []


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Scope] = []
        self.batch: dict[str, tuple[int, list[Issued]]] = {}
        """Batches that are open, by the name of the process group."""
        self.quiet = 0
        """Above 0: what is issued belongs to something that was recorded as a whole."""


scopes: Final = _Scopes()


@contextmanager
def scope(kind: str, reduce_op: str | None = None) -> Iterator[Scope]:
    """Within it, what is issued is gathered."""
    here = Scope(kind, reduce_op)
    scopes.stack.append(here)
    try:
        yield here
    finally:
        scopes.stack.pop()


def name_of(reduce_op: Any) -> str | None:
    """``sum``, ``max``, ... of a ReduceOp or its name; None where it is not known."""
    try:
        text = reduce_op if isinstance(reduce_op, str) else reduce_op.op.name
    except Exception:  # noqa: BLE001 - another version's type: the name is left out
        return None
    return str(text).lower()
