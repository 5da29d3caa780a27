"""Pipelines: the schedules of torch.distributed.pipelining, and one made by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from case import CRASH, CYCLES, EARLY_P2P, STALL, Case, Fault, program
from models import LENGTH, VOCABULARY, Block
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

P2P = ("unmatched_p2p", "missing_participant", "mismatch", *CYCLES)
FEWER = Fault("fewer_microbatches", (1,), P2P, blamed=(), title="one stage runs fewer micro-batches")
OTHER = Fault("other_schedule", (1,), P2P, blamed=(), title="one stage runs another schedule")
STEPS = 2


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCABULARY, 16), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.embedding(x))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


def _stages(c: Case, chunks: int) -> list[PipelineStage]:
    """Stages of this rank: c.rank, c.rank + world, ..."""
    total = c.world * chunks
    out = []
    for index in range(c.rank, total, c.world):
        module = First() if index == 0 else Last() if index == total - 1 else Block()
        out.append(PipelineStage(module, index, total, torch.device("cpu")))
    return out


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def run(c: Case, kind: type, chunks: int = 1, microbatches: int = 4) -> None:
    torch.manual_seed(c.rank)
    stages = _stages(c, chunks)
    if c.sick("other_schedule"):
        kind = Schedule1F1B if kind is ScheduleGPipe else ScheduleGPipe
    few = microbatches - 1 if c.sick("fewer_microbatches") else microbatches
    schedule = kind(stages if chunks > 1 else stages[0], few, loss_fn=_loss)
    tokens = torch.randint(0, VOCABULARY, (2 * few, LENGTH))
    for step in range(STEPS):
        if step == 1:
            c.usual()
        first, last = c.rank == 0, c.rank == c.world - 1
        given = (tokens,) if first else ()
        wanted = {"target": tokens} if last else {}
        schedule.step(*given, **wanted)
    dist.barrier()


@program("pipeline", "pipeline_gpipe", 3, FEWER, OTHER, CRASH, STALL, EARLY_P2P, model="transformer", scheme="gpipe")
def pipeline_gpipe(c: Case) -> None:
    run(c, ScheduleGPipe)


@program("pipeline", "pipeline_1f1b", 3, FEWER, OTHER, CRASH, STALL, model="transformer", scheme="1f1b")
def pipeline_1f1b(c: Case) -> None:
    run(c, Schedule1F1B)


@program("pipeline", "pipeline_interleaved", 2, STALL, CRASH, model="transformer", scheme="interleaved 1f1b")
def pipeline_interleaved(c: Case) -> None:
    run(c, ScheduleInterleaved1F1B, chunks=2)


@program("pipeline", "pipeline_1f1b_4", 4, STALL, model="transformer", scheme="1f1b")
def pipeline_1f1b_4(c: Case) -> None:
    run(c, Schedule1F1B, microbatches=6)


MISSING = Fault("missing_recv", (2,), P2P, blamed=(), title="the last stage leaves a receive out")
SEND = Fault("missing_send", (1,), P2P, blamed=(), title="a stage leaves a send out")
HEAD = Fault("head_to_head", (0, 1), ("cycle", "unmatched_p2p"), ("potential", "healthy"), blamed=(),
             title="two stages send to each other before either receives")
SIZE = Fault("size", (1,), ("mismatch", "crashed_rank"), ("mismatch", "healthy"), blamed=(),
             title="a stage sends more than is expected")


@program("pipeline", "pipeline_by_hand", 3, MISSING, SEND, HEAD, SIZE, CRASH, STALL, EARLY_P2P,
         model="transformer", scheme="by hand")
def pipeline_by_hand(c: Case) -> None:
    """Activations forwards, gradients backwards, with blocking calls, and a check of all."""
    torch.manual_seed(0)
    module = First() if c.rank == 0 else Last() if c.rank == c.world - 1 else Block()
    shape = (2, LENGTH, 16)
    for step in range(3):
        if step == 1:
            c.usual()
        struck = step == 1
        if struck and c.sick("head_to_head"):
            dist.send(torch.ones(1 << 18), 1 - c.rank)
            dist.recv(torch.ones(1 << 18), 1 - c.rank)
        if c.rank == 0:
            given = torch.randint(0, VOCABULARY, shape[:2])
        else:
            given = torch.empty(shape)
            if not (struck and c.sick("missing_recv")):
                dist.recv(given, c.rank - 1)
            given.requires_grad_()
        out = module(given)
        if c.rank < c.world - 1:
            sent = torch.cat([out, out]) if struck and c.sick("size") else out
            if not (struck and c.sick("missing_send")):
                dist.send(sent.detach().contiguous(), c.rank + 1)
            grad = torch.empty_like(out)
            dist.recv(grad, c.rank + 1)
            out.backward(grad)
        else:
            out.mean().backward()
        if c.rank > 0:
            dist.send(given.grad, c.rank - 1)
    dist.barrier()


HALO = Fault("missing_recv", (2,), P2P, blamed=(), title="one rank of a ring leaves a receive out")


@program("pipeline", "ring_batched", 4, HALO, STALL, CRASH, scheme="halo exchange, batched")
def ring_batched(c: Case) -> None:
    """Each rank swaps a border with both neighbours in one batch."""
    left, right = (c.rank - 1) % c.world, (c.rank + 1) % c.world
    for step in range(3):
        if step == 1:
            c.usual()
        border = torch.full((16,), float(c.rank))
        ops = [dist.P2POp(dist.isend, border, right, tag=1), dist.P2POp(dist.isend, border, left, tag=2)]
        if not (step == 1 and c.sick("missing_recv")):
            ops.append(dist.P2POp(dist.irecv, torch.empty(16), left, tag=1))
        ops.append(dist.P2POp(dist.irecv, torch.empty(16), right, tag=2))
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    dist.barrier()
