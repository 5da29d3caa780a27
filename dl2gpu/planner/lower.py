"""Lowering: a plan as the program of each rank, in the event table.

All ranks of a stage issue the same operations on their own groups, so a stage's step is made once,
from blocks (forward and backward of a piece of the model) that the schedule puts in order, and the
table is a gather of the stages' steps over their ranks. No loop here runs over ranks, or over the
operations of a rank.

Collectives of the scheme are queued on one stream, in order; messages on another, which waits for
what they carry, as the first waits for what it takes; gradients on a third, which waits for the
last backward. The host waits at the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.planner.convert import Step, conversions
from dl2gpu.planner.costs import LOSS_WIDTH, shards
from dl2gpu.planner.plan import Plan
from dl2gpu.planner.sbp import State, local_size
from dl2gpu.planner.schedule import Work, order, play
from dl2gpu.trace.schema import (
    DTYPE_BYTES,
    EXIT,
    MODE,
    OP,
    SEND_MODE,
    STACKS,
    StringTable,
    Trace,
    conform,
)

__all__ = ["PHASES", "STREAMS", "Blocks", "Steps", "lower", "row", "steps_of"]

Array = npt.NDArray[Any]

STREAMS: Final = ("scheme", "messages", "gradients")
PHASES: Final = (
    "forward", "backward", "recompute", "gather_parameters", "loss", "reduce_gradients",
    "send_activation", "send_gradient", "wait", "synchronize", "dispatch", "combine",
    "gradient_norm", "mean_loss",
)  # fmt: skip
_PHASE: Final = {name: i for i, name in enumerate(PHASES)}
_DTYPE: Final = {name: i for i, name in enumerate(DTYPE_BYTES)}

_COLUMNS: Final = (
    "op", "dim", "stream", "peer_stage", "batch", "count", "count_out", "dtype", "waits_for",
    "node", "phase", "microbatch",
)  # fmt: skip
"""Of a stage's step: ``dim`` is the dimension of the grid of the group (0: stages, -1: none; one
more than the last: all ranks);
``waits_for`` the place in the step of what a wait is for, -1: all, -2: no wait."""
_ALL, _NO_WAIT = -1, -2


@dataclass(frozen=True, slots=True)
class Steps:
    """One step of each stage: Int64[operations, columns] by the names of ``columns``."""

    columns: tuple[str, ...]
    of_stage: tuple[Array, ...]


def row(
    op: str, phase: str, node: int, *, dim: int = -1, stream: int = 0, peer: int = -1,
    count: int = 0, count_out: int = -1, dtype: int = 0, waits_for: int = _NO_WAIT,
) -> tuple[int, ...]:  # fmt: skip
    """An operation of a step, by ``_COLUMNS``; counts in elements."""
    return (
        OP[op], dim, stream, peer, -1, count, count_out, dtype, waits_for, node, _PHASE[phase], -1,
    )  # fmt: skip


class Blocks:
    """Collectives of forward and backward of each piece, and of the gradients of each stage."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.p = plan, plan.problem
        self.tables = self.p.tables
        self.model = self.tables.model
        self.setting = self.tables.setting
        self.dtype = _DTYPE[self.model.precision.dtype]
        self.into: list[list[int]] = [[] for _ in self.model.nodes]
        for k, e in enumerate(self.model.edges):
            self.into[e.target].append(k)

    def _rows(
        self, steps: list[Step], phase: str, node: int, stream: int = 0
    ) -> list[tuple[int, ...]]:
        return [
            row(
                s.op, phase, node, dim=s.dim + 1, stream=stream, count=s.count_in,
                count_out=s.count_out if s.count_out != s.count_in else -1, dtype=self.dtype,
            )
            for s in steps
            if s.op != "local"
        ]  # fmt: skip

    def _tensor(self, edge: int, *, backward: bool) -> list[Step]:
        e = self.model.edges[edge]
        width = self.model.precision.width
        shape = self.model.nodes[e.source].shape(-1)
        table = conversions(shape, self.setting.grid, self.setting.links, width)
        a, b = self.tables.nodes[e.source], self.tables.nodes[e.target]
        i, j = int(self.plan.chosen[e.source]), int(self.plan.chosen[e.target])
        if backward:
            return table.steps(b.gradient(j, e.operand), a.gradient(i, -1))
        return table.steps(a.state(i, -1), b.state(j, e.operand))

    def gradient(self, node: int, operand: int) -> State:
        """The state of a parameter's gradient, before it is reduced."""
        return self.tables.nodes[node].gradient(int(self.plan.chosen[node]), operand)

    def _parameters(self, node: int) -> list[tuple[list[Step], list[Step], list[Step]]]:
        """Of each parameter: reduce its gradient; gather it after that; gather it before use."""
        n, c = self.model.nodes[node], self.tables.nodes[node]
        choice = int(self.plan.chosen[node])
        out: list[tuple[list[Step], list[Step], list[Step]]] = []
        for i in n.operator.weights:
            table = conversions(
                n.shape(i), self.setting.grid, self.setting.links, self.model.precision.width
            )
            gradient, whole = self.gradient(node, i), c.state(choice, i)
            parts = shards(table, gradient, whole, self.setting.zero)
            if parts is None:
                out.append((table.steps(gradient, whole), [], []))
                continue
            gather = table.steps(parts[0], whole)
            late = self.setting.zero == 3
            reduce = table.steps(gradient, parts[0])
            out.append((reduce, [] if late else gather, gather if late else []))
        return out

    def _loss(self, node: int) -> list[tuple[int, ...]]:
        n, c = self.model.nodes[node], self.tables.nodes[node]
        chosen = c.signatures[int(self.plan.chosen[node])]
        reduces = n.operator.reduces_inside
        state = tuple(s.inputs[0] for s in chosen)
        local = local_size(state, n.shape(0), self.setting.grid)
        out = []
        for dim, s in enumerate(chosen):
            if s.splits and s.name in reduces:
                cut = prod(
                    k for o, k in zip(chosen, self.setting.grid, strict=True)
                    if o.splits and o.name == s.name
                )  # fmt: skip
                count = 2 * local // dict(n.sizes)[s.name] * cut
                out.append(
                    row("all_reduce", "loss", node, dim=dim + 1, count=count, dtype=_DTYPE["f32"])
                )
        assert DTYPE_BYTES["f32"] == LOSS_WIDTH
        return out

    def entering(self, node: int, phase: str) -> list[tuple[int, ...]]:
        """What is issued besides, where the operands of ``node`` are there, or its gradient is."""
        del node, phase
        return []

    def ending(self) -> list[tuple[int, ...]]:
        """What all ranks issue at the end of a step."""
        return []

    def work(self, piece: int, *, backward: bool) -> Array:
        """The collectives of a piece, one microbatch."""
        nodes = [int(i) for i in np.flatnonzero(self.p.piece == piece)]
        rows: list[tuple[int, ...]] = []

        def gather(node: int) -> None:
            for *_, early in self._parameters(node):
                rows.extend(self._rows(early, "gather_parameters", node))

        def enter(node: int, phase: str) -> None:
            for edge in self.into[node]:
                rows.extend(self._rows(self._tensor(edge, backward=False), phase, node))
            rows.extend(self.entering(node, phase))

        if not backward:
            for node in nodes:
                gather(node)
                enter(node, "forward")
                rows.extend(self._loss(node))
        else:
            again = self.setting.recompute
            for node in nodes if again else ():
                gather(node)  # and kept until their derivatives are there
                enter(node, "recompute")
            for node in reversed(nodes):
                if not again:
                    gather(node)
                rows.extend(self.entering(node, "backward"))
                for edge in reversed(self.into[node]):
                    steps = self._tensor(edge, backward=True)
                    rows.extend(self._rows(steps, "backward", node))
        return np.array(rows, np.int64).reshape(-1, len(_COLUMNS))

    def gradients(self, stage: int) -> Array:
        """What a stage does for its parameters once a step, the last layer first."""
        rows: list[tuple[int, ...]] = []
        later: list[tuple[int, ...]] = []
        for node in np.flatnonzero(self.p.stage == stage)[::-1]:
            for reduce, gather, _ in self._parameters(int(node)):
                rows.extend(self._rows(reduce, "reduce_gradients", int(node), 2))
                later.extend(self._rows(gather, "gather_parameters", int(node), 2))
        return np.array([*rows, *later], np.int64).reshape(-1, len(_COLUMNS))

    def messages(self, piece: int) -> tuple[int, int, int]:
        """(node, elements forward, elements backward) of what leaves ``piece``."""
        grid = self.setting.grid
        for node in self.p.message:
            if self.p.piece[node] == piece:
                c, choice = self.tables.nodes[node], int(self.plan.chosen[node])
                shape = self.model.nodes[node].shape(-1)
                return (
                    node, local_size(c.state(choice, -1), shape, grid),
                    local_size(c.gradient(choice, -1), shape, grid),
                )  # fmt: skip
        raise ValueError(f"no tensor leaves piece {piece}")


def steps_of(plan: Plan, blocks: Blocks | None = None) -> Steps:
    """One step of each stage, of the plan's own blocks or of others.

    Raises:
        ScheduleError: the schedule cannot be carried out.
    """
    p = plan.problem
    blocks = blocks or Blocks(plan)
    pieces_in_all = p.stages * p.pieces
    orders = order(p.schedule, p.stages, p.microbatches, p.pieces)
    times, messages = play(orders, pieces_in_all)
    works = {
        (piece, backward): blocks.work(piece, backward=backward)
        for piece in range(pieces_in_all)
        for backward in (False, True)
    }
    carried = [blocks.messages(i) for i in range(pieces_in_all - 1)] if p.stages > 1 else []
    mine: list[list[tuple[int, Work, int, bool]]] = [[] for _ in range(p.stages)]
    for moment, message in messages:
        mine[message.source].append((moment, message.made, message.target, True))
        mine[message.target].append((moment, message.made, message.source, False))
    out = []
    for stage in range(p.stages):
        step = _Step()
        at = 0
        for work, (start, _) in zip(orders[stage], times[stage], strict=True):
            at = step.exchange(mine[stage], at, start, carried, blocks.dtype)
            step.compute(works[work.piece, work.backward], work.microbatch)
        step.exchange(mine[stage], at, None, carried, blocks.dtype)
        step.finish(blocks.gradients(stage), blocks.ending())
        out.append(np.concatenate(step.parts))
    return Steps(_COLUMNS, tuple(out))


class _Step:
    """Collects a stage's step; knows what the streams have to wait for."""

    def __init__(self) -> None:
        self.parts: list[Array] = []
        self.size = 0
        self.batches = 0
        self.last_compute = -1
        self.awaited = -1

    def _add(self, rows: Array) -> None:
        self.parts.append(rows)
        self.size += len(rows)

    def _wait(self, place: int, stream: int, node: int) -> None:
        one = row("wait", "wait", node, stream=stream, waits_for=place)
        self._add(np.array([one], np.int64))

    def compute(self, rows: Array, microbatch: int) -> None:
        if len(rows):
            rows = rows.copy()
            rows[:, _COLUMNS.index("microbatch")] = microbatch
            self._add(rows)
            self.last_compute = self.size - 1

    def exchange(
        self, mine: list[tuple[int, Work, int, bool]], at: int, until: int | None,
        carried: list[tuple[int, int, int]], dtype: int,
    ) -> int:  # fmt: skip
        """The messages from ``at`` with moments up to ``until``; where the rest begins."""
        while at < len(mine) and (until is None or mine[at][0] <= until):
            end = at
            while end < len(mine) and mine[end][0] == mine[at][0]:
                end += 1
            rows = []
            for _, work, other, sends in mine[at:end]:
                node, ahead, back = carried[work.piece - work.backward]
                phase = "send_gradient" if work.backward else "send_activation"
                rows.append(
                    row(
                        "send" if sends else "recv", phase, node, dim=0, stream=1, peer=other,
                        count=back if work.backward else ahead, dtype=dtype,
                    )
                )  # fmt: skip
            sends_any = any(sends for *_, sends in mine[at:end])
            if sends_any and self.last_compute > self.awaited:
                self._wait(self.last_compute, 1, rows[0][_COLUMNS.index("node")])
                self.awaited = self.last_compute
            block = np.array(rows, np.int64)
            block[:, _COLUMNS.index("microbatch")] = [w.microbatch for _, w, *_ in mine[at:end]]
            if len(rows) > 1:
                block[:, _COLUMNS.index("batch")] = self.batches
                self.batches += 1
            first = self.size
            self._add(block)
            for k, (*_, sends) in enumerate(mine[at:end]):
                if not sends:  # what waits for the first stream from here on, waits for this
                    self._wait(first + k, 0, rows[k][_COLUMNS.index("node")])
                    self.last_compute = first + k
            at = end
        return at

    def finish(self, gradients: Array, ending: list[tuple[int, ...]]) -> None:
        late = np.array(ending, np.int64).reshape(-1, len(_COLUMNS))
        gradients = np.concatenate([gradients, late])
        if len(gradients) and self.last_compute >= 0:
            self._wait(self.last_compute, 2, -1)
        self._add(gradients)
        end = row("wait", "synchronize", -1, stream=-1, waits_for=_ALL)
        self._add(np.array([end], np.int64))


# --------------------------------------------------------------------------------------------------
# The event table

START_NS: Final = 1_760_000_000_000_000_000


def lower(
    plan: Plan, steps: int = 1, name: str | None = None, blocks: Blocks | None = None
) -> Trace:
    """The whole program of a job that runs the plan, ``steps`` times its step.

    The jobs of other plans are joined by :func:`dl2gpu.trace.schema.concat`.
    """
    made = steps_of(plan, blocks).of_stage
    layout, model = plan.layout, plan.problem.tables.model
    ranks, plane = layout.ranks, prod(layout.grid)
    length = np.array([len(s) for s in made])
    # every rank: its stage's step, so many times
    at = np.concatenate(
        [
            np.tile(np.arange(n) + first, plane * steps)
            for n, first in zip(length, np.append(0, np.cumsum(length)), strict=False)
        ]
    )
    every = dict(zip(_COLUMNS, np.concatenate(made)[at].T, strict=True))
    count = np.repeat(length * steps, plane)
    rank = np.repeat(np.arange(ranks, dtype=np.int32), count)
    seq = np.arange(len(at)) - np.repeat(np.append(0, np.cumsum(count))[:-1], count)
    size = np.repeat(np.repeat(length, plane), count)
    step = seq // size
    members, comm_of, comms = _communicators(layout.shape)
    comm = np.where(every["dim"] >= 0, comm_of[every["dim"], rank], -1)
    peer = every["peer_stage"] * plane + rank % plane
    frames = [
        [f"{phase} {node}:{line}", f"train_step {model.name}:1"]
        for phase in PHASES
        for line, node in enumerate([*(n.name for n in model.nodes), "step"], 1)
    ]
    many = len(model.nodes) + 1
    stack = every["phase"] * many + np.where(every["node"] < 0, many - 1, every["node"])
    width = np.array(list(DTYPE_BYTES.values()))
    batches = int(max(s[:, _COLUMNS.index("batch")].max() for s in made)) + 1
    moment = START_NS + np.int64(plan.seconds * 1e9) * step
    moment += ((seq % size) * (plan.seconds * 1e9) / size).astype(np.int64)
    frame = pl.DataFrame(
        {
            "rank": rank, "seq": seq, "op": every["op"], "stream": every["stream"],
            "comm": comm, "peer": peer, "message": every["peer_stage"] >= 0,
            "count": every["count"], "count_out": every["count_out"], "dtype": every["dtype"],
            "bytes": every["count"] * width[every["dtype"]],
            "waits_for": every["waits_for"], "awaited": step * size + every["waits_for"],
            "batch": every["batch"], "group": step * batches + every["batch"],
            "stack": stack, "t_created": moment,
        }
    )  # fmt: skip
    wait = pl.col("op") == OP["wait"]
    reduces = pl.col("op").is_in([OP["all_reduce"], OP["reduce_scatter"]])
    events = conform(
        frame.select(
            "rank", "seq", "op", "stack", "t_created",
            pl.lit(0, pl.Int32).alias("job"),
            pl.lit(0, pl.Int32).alias("lane"),
            pl.when(pl.col("stream") >= 0).then("stream"),
            (pl.col("stream") < 0).alias("blocking"),
            pl.when(~wait).then("seq").alias("request"),
            pl.when(pl.col("waits_for") >= 0)
            .then(pl.concat_list("awaited"))
            .when(wait)
            .then(pl.lit([], pl.List(pl.Int64)))
            .alias("requests"),
            pl.when(wait).then(pl.lit(MODE["all"], pl.UInt8)).alias("mode"),
            pl.when(pl.col("comm") >= 0).then("comm"),
            pl.when("message").then("peer"),
            pl.when("message").then(pl.lit(0, pl.Int64)).alias("tag"),
            pl.when(pl.col("op") == OP["send"])
            .then(pl.lit(SEND_MODE["standard"], pl.UInt8))
            .alias("send_mode"),
            pl.when(reduces).then(pl.lit(len(STREAMS), pl.Int32)).alias("reduce_op"),
            pl.when(~wait).then("count"),
            pl.when(pl.col("count_out") >= 0).then("count_out"),
            pl.when(~wait).then("dtype"),
            pl.when(~wait).then("bytes"),
            pl.when(pl.col("batch") >= 0).then("group"),
            pl.lit(0, pl.UInt8).alias("state"),
            pl.lit(0, pl.UInt32).alias("flags"),
        ),
        "events",
    )  # fmt: skip
    used = np.unique(stack)
    number = np.zeros(len(frames), np.int32)
    number[used] = np.arange(len(used))
    events = events.with_columns(stack=pl.Series(number[stack], dtype=pl.Int32))
    title = name or model.name
    return Trace(
        events=events,
        jobs=conform(
            pl.DataFrame({"job": [0], "name": [title], "folder": [title], "world_size": [ranks]})
            .with_columns(
                attempt=pl.lit(0), backend=pl.lit("nccl"), source=pl.lit("native"),
                waits=pl.lit(True), p2p=pl.lit(True),
            ),
            "jobs",
        ),
        ranks=conform(
            pl.DataFrame({"rank": np.arange(ranks, dtype=np.int32)}).with_columns(
                job=pl.lit(0), exit=pl.lit(EXIT["finished"]), truncated=pl.lit(False),
                lost_before=pl.lit(0), only_active=pl.lit(False), timed=pl.lit(False),
                t_last=pl.lit(START_NS + int(plan.seconds * 1e9) * steps),
            ),
            "ranks",
        ),
        comms=conform(comms.with_columns(members), "comms"),
        stacks=pl.DataFrame(
            {"stack": range(len(used)), "frames": [frames[i] for i in used]},
            schema=STACKS, strict=False,
        ),
        strings=StringTable([*STREAMS, "sum"]).frame(),
    )  # fmt: skip


def _communicators(shape: tuple[int, ...]) -> tuple[pl.Series, Array, pl.DataFrame]:
    """Members of each group; the group of [dimension, rank]; ids and descriptions.

    The world comes first; dimensions of one device have no groups.
    """
    total = prod(shape)
    where = np.arange(total, dtype=np.int32).reshape(shape)
    of = np.full((len(shape) + 1, total), -1, np.int64)
    of[-1] = 0
    ids, about = ["world"], ["default group"]
    members, sizes = [where.ravel()], [np.array([total])]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        groups = np.moveaxis(where, dim, -1).reshape(-1, size)
        of[dim, groups.ravel()] = len(ids) + np.repeat(np.arange(len(groups)), size)
        kind = "stages" if dim == 0 else f"grid{dim - 1}"
        ids += [f"{kind}:{g}" for g in range(len(groups))]
        about += [kind] * len(groups)
        members.append(groups.ravel())
        sizes.append(np.full(len(groups), size))
    size_of = np.concatenate(sizes)
    lists = (
        pl.DataFrame(
            {
                "comm": np.repeat(np.arange(len(ids), dtype=np.int32), size_of),
                "ranks": np.concatenate(members),
            }
        )
        .group_by("comm", maintain_order=True)
        .agg("ranks")["ranks"]
    )
    table = pl.DataFrame({"comm": range(len(ids)), "job": [0] * len(ids), "id": ids, "desc": about})
    return lists, of, table
