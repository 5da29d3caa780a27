"""What the ranks of one training job issue, as columns.

A job is a grid of ranks: tensor parallel fastest, then data parallel, then pipeline. A step of a
rank is a fixed sequence for its pipeline stage, so a job is a gather from the sequences of its
stages; a fault is an edit of some rows. No loop here runs over events or ranks.

The pipeline runs in 1F1B order with the exchanges batched: a steady stage sends forward and
receives backward in one batch, and the other way round with the stage before it (Narayanan et al.,
"Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021,
section 2.2). Collectives are queued on streams, the tensor parallel stream waits for what the
pipeline has received, the gradient stream for all that came before, and the host waits once a step,
at its end, after a collective of all ranks. So nobody passes the end of a step in which anybody is
missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dl2gpu.trace.schema import OP

__all__ = [
    "DATA",
    "FRAMES",
    "NONE",
    "PIPELINE",
    "STREAMS",
    "TENSOR",
    "WORLD",
    "Fault",
    "Program",
    "Shape",
    "Template",
    "comm_of_rank",
    "communicators",
    "program",
    "template",
]

Array = npt.NDArray[Any]

TENSOR, DATA, WORLD, PIPELINE, NONE = range(5)
"""Kinds of communicator of an operation."""

STREAMS: Final = ("tensor", "gradient", "pipeline")
_STREAM: Final = {TENSOR: 0, DATA: 1, WORLD: 1, PIPELINE: 2}
"""The gradient norm (world) follows the gradients (data) on one stream."""

_F32: Final = 10
_BF16: Final = 7

FRAMES: Final = (
    ("forward train/layers.py:88", "train_step train/loop.py:41"),
    ("backward train/layers.py:131", "train_step train/loop.py:41"),
    ("exchange train/pipeline.py:57", "train_step train/loop.py:41"),
    ("reduce_gradients train/optimizer.py:23", "train_step train/loop.py:47"),
    ("gather_parameters train/optimizer.py:35", "train_step train/loop.py:49"),
    ("gradient_norm train/optimizer.py:29", "train_step train/loop.py:48"),
    ("mean_loss train/loop.py:51", "train_step train/loop.py:51"),
    ("synchronize train/loop.py:52", "train_step train/loop.py:52"),
)
"""Call stacks of the operations, innermost frame first."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The parallel layout of a job and the length of its program."""

    tensor: int
    data: int
    pipeline: int
    layers: int
    """Layers of a stage: each has a tensor parallel all_reduce forward and one backward."""
    microbatches: int
    buckets: int
    """Gradient buckets: each has a reduce_scatter and an all_gather over the data group."""
    steps: int

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.tensor * self.data * self.pipeline

    @property
    def plane(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.data


@dataclass(frozen=True, slots=True)
class Template:
    """One step of a rank of some stage; arrays of equal length, one element an operation."""

    op: Array  # Int32, op catalogue
    kind: Array  # Int8, which communicator
    stream: Array  # Int32, row of STREAMS, -1: the host
    towards: Array  # Int32, stages from here to the peer, 0: no message
    batch: Array  # Int32, number of the batch in the step, -1: none
    count: Array  # Int64, elements
    dtype: Array  # Int32, dtype catalogue
    waits_for: Array  # Int32, steps back to the operation waited for; 0: all; -1: no wait
    stack: Array  # Int32, row of FRAMES


_TYPES: Final = (
    np.int32, np.int8, np.int32, np.int32, np.int32, np.int64, np.int32, np.int32, np.int32,
)  # fmt: skip


class _Step:
    """Collects the operations of a step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.batches = 0

    def add(
        self, name: str, kind: int, *, towards: int = 0, batch: int = -1, count: int = 0,
        dtype: int = _BF16, waits_for: int = -1, stack: int = 0, stream: int | None = None,
    ) -> None:  # fmt: skip
        on = _STREAM[kind] if stream is None else stream
        self.rows.append(
            (OP[name], kind, on, towards, batch, count, dtype, waits_for, stack)
        )  # fmt: skip

    def exchange(self, *messages: tuple[str, int]) -> None:
        """Sends and receives as one batch; what is received holds back the tensor stream."""
        if not messages:
            return
        number = self.batches if len(messages) > 1 else -1
        self.batches += len(messages) > 1
        received = 0
        for at, (name, towards) in enumerate(messages):
            self.add(name, PIPELINE, towards=towards, batch=number, count=1 << 21, stack=2)
            if name == "recv":
                received = len(messages) - at
        if received:
            self.add("wait", NONE, waits_for=received, stack=2, stream=_STREAM[TENSOR])

    def compute(self, layers: int, stack: int, *, shared: bool) -> None:
        for _ in range(layers if shared else 0):
            self.add("all_reduce", TENSOR, count=1 << 20, stack=stack)

    def template(self) -> Template:
        columns = np.array(self.rows, np.int64).T
        return Template(*(c.astype(t) for c, t in zip(columns, _TYPES, strict=True)))


@lru_cache(maxsize=4096)
def template(shape: Shape, stage: int) -> Template:
    """One step of the ranks of ``stage``; ``shape.steps`` does not matter."""
    step = _Step()
    stages, many = shape.pipeline, shape.microbatches
    shared = shape.tensor > 1
    first, last = stage == 0, stage == stages - 1
    warm = min(stages - 1 - stage, many)

    def forward() -> None:
        step.compute(shape.layers, 0, shared=shared)

    def backward() -> None:
        step.compute(shape.layers, 1, shared=shared)

    before = [] if first else [("recv", -1)]
    for _ in range(warm):
        step.exchange(*before)
        forward()
        step.exchange(*([] if last else [("send", 1)]))
    if many > warm:
        step.exchange(*before)
    for k in range(many - warm):
        forward()
        step.exchange(*([] if last else [("send", 1), ("recv", 1)]))
        backward()
        back = [] if first else [("send", -1)]
        step.exchange(*back, *(before if k < many - warm - 1 else []))
    for _ in range(warm):
        step.exchange(*([] if last else [("recv", 1)]))
        backward()
        step.exchange(*([] if first else [("send", -1)]))
    # gradients are reduced when they are complete
    step.add("wait", NONE, waits_for=0, stack=3, stream=_STREAM[DATA])
    if shape.data > 1:
        for bucket in range(shape.buckets):
            count = (1 << 22) + 8192 * bucket
            step.add("reduce_scatter", DATA, count=count, dtype=_F32, stack=3)
    step.add("all_reduce", WORLD, count=1, dtype=_F32, stack=5)
    if shape.data > 1:
        for bucket in range(shape.buckets):
            count = (1 << 22) // shape.data + bucket
            step.add("all_gather", DATA, count=count, stack=4)
    step.add("all_reduce", WORLD, count=1, dtype=_F32, stack=6)
    step.add("wait", NONE, waits_for=0, stack=7, stream=-1)
    return step.template()


def communicators(shape: Shape) -> tuple[list[str], list[str], Array, Array]:
    """Names, descriptions, and members of the communicators of a job.

    Returns:
        Names and descriptions by communicator; all members in group order, one group after the
        other (Int32); and where each group begins in them, and the end (Int64). The world comes
        first, then the tensor, data and pipeline groups of more than one rank.
    """
    ranks = np.arange(shape.ranks, dtype=np.int32)
    grid = ranks.reshape(shape.pipeline, shape.data, shape.tensor)
    names, about = ["world"], ["default group"]
    members, sizes = [ranks], [np.array([shape.ranks])]
    for kind, axis in (("tensor", 2), ("data", 1), ("pipeline", 0)):
        size = grid.shape[axis]
        if size == 1:
            continue
        groups = np.moveaxis(grid, axis, -1).reshape(-1, size)
        names += [f"{kind}:{g}" for g in range(len(groups))]
        about += [f"{kind} parallel"] * len(groups)
        members.append(groups.ravel())
        sizes.append(np.full(len(groups), size))
    return names, about, np.concatenate(members), np.append(0, np.cumsum(np.concatenate(sizes)))


def comm_of_rank(shape: Shape) -> Array:
    """Int32[5, ranks]: the communicator of each kind that a rank is in; -1 where it has none."""
    rank = np.arange(shape.ranks)
    t, d = rank % shape.tensor, rank // shape.tensor % shape.data
    p = rank // shape.plane
    out = np.full((5, shape.ranks), -1, np.int32)
    out[WORLD] = 0
    first = 1
    for kind, size, number in (
        (TENSOR, shape.tensor, p * shape.data + d),
        (DATA, shape.data, p * shape.tensor + t),
        (PIPELINE, shape.pipeline, d * shape.tensor + t),
    ):
        if size > 1:
            out[kind] = first + number
            first += shape.ranks // size
    return out


@dataclass(frozen=True, slots=True)
class Fault:
    """What ``rank`` does wrong in ``step`` at ``place``, an index of its template."""

    name: str
    rank: int = -1
    step: int = -1
    place: int = -1


@dataclass(frozen=True, slots=True)
class Program:
    """The operations of a job, by rank and program order; arrays of equal length."""

    rank: Array  # Int32
    seq: Array  # Int64, 0, 1, ... in each rank
    step: Array  # Int32
    place: Array  # Int32, in the step as it should be
    columns: Mapping[str, Array]  # those of Template, and comm: Int32, -1: none; peer: Int32

    def take(self, rows: Array) -> Program:
        """Some of the operations; numbered anew."""
        rank = self.rank[rows]
        begins = np.searchsorted(rank, np.arange(int(self.rank[-1]) + 2 if len(self.rank) else 1))
        seq = np.arange(len(rank)) - begins[rank]
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Program(rank, seq, self.step[rows], self.place[rows], columns)


def program(shape: Shape, fault: Fault | None = None) -> Program:
    """What the ranks issue, ``shape.steps`` times their step, with the fault made in the last one.

    A faulty job stops in the wait at the end of the faulty step, and there the records end.
    """
    steps = [template(replace(shape, steps=0), stage) for stage in range(shape.pipeline)]
    lengths = np.array([len(t.op) for t in steps])
    offset = np.append(0, np.cumsum(lengths))
    place = [np.arange(n, dtype=np.int32) for n in lengths]
    times = shape.plane * shape.steps
    at = np.concatenate([np.tile(p + o, times) for p, o in zip(place, offset[:-1], strict=True)])
    total = np.repeat(lengths * shape.steps, shape.plane)  # operations of each rank
    ranks = np.arange(shape.ranks, dtype=np.int32)
    rank = np.repeat(ranks, total)
    begins = np.append(0, np.cumsum(total))
    seq = np.arange(len(at)) - np.repeat(begins[:-1], total)
    length = np.repeat(lengths, shape.plane)  # of a step of each rank
    step = (seq // np.repeat(length, total)).astype(np.int32)
    columns = {
        name: np.concatenate([getattr(t, name) for t in steps])[at] for name in Template.__slots__
    }
    comm = comm_of_rank(shape)[columns["kind"], rank]
    peer = np.where(columns["towards"] != 0, rank + columns["towards"] * shape.plane, -1)
    columns |= {"comm": comm, "peer": peer.astype(np.int32)}
    made = Program(rank, seq, step, np.concatenate(place)[at], columns)
    return made if fault is None else _broken(made, fault)


def _broken(p: Program, fault: Fault) -> Program:
    """``p`` with the rows of the fault edited."""
    lo, hi = np.searchsorted(p.rank, [fault.rank, fault.rank + 1])
    own = np.arange(lo, hi)
    now = own[p.step[own] == fault.step]
    at = now[p.place[now] == fault.place]
    rows = np.arange(len(p.rank))
    match fault.name:
        case "skip" | "message":
            return p.take(np.delete(rows, at))
        case "size":
            p.columns["count"][at] *= 2
            return p
        case "order":
            # every other rank of the group enters the gradient norm before the last reduction
            group = p.columns["comm"][at]
            last = (p.columns["comm"] == group) & (p.step == fault.step) & (p.place == fault.place)
            swapped = np.flatnonzero(last)[::2]
            rows[swapped], rows[swapped + 1] = swapped + 1, swapped
            return p.take(rows)
        case "crash":
            return p.take(np.delete(rows, now[p.place[now] >= fault.place]))
        case "stall":
            return p.take(np.delete(rows, now))
        case "lost":
            return p.take(np.delete(rows, own))
    raise ValueError(f"fault: expected one of the catalogue, found {fault.name!r}")
