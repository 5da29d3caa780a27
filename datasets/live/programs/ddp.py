"""Data parallel training: DDP with evaluation, checkpoints and gradient accumulation."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from case import ABSENT, CRASH, EARLY, STALL, Case, Fault, program
from models import MAKE, Skipped, blocks, loss_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SKIP = Fault("skipped_module", (1,), (*ABSENT, "crashed_rank"), title="a layer is dropped on one rank")
UNEVEN = Fault("uneven_batches", (1,), ABSENT, title="one rank has fewer batches")
BRANCH = Fault("data_branch", (1,), ABSENT, title="a loss that is not finite is averaged on its rank only")
EVALUATION = Fault("evaluation_on_one", (0,), ABSENT, title="one rank alone averages a metric")
CHECKPOINT = Fault("checkpoint_on_one", (0,), ABSENT, title="a barrier inside 'if rank == 0'")
SYNC = Fault("no_sync_off_by_one", (1,), ABSENT, title="one rank synchronises on other steps")
STEPS = 4


def _skip(model: nn.Module) -> None:
    """Takes the last layer out."""
    last = blocks(model)[-1]
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is last:
                setattr(parent, name, Skipped())
                return


def train(c: Case, kind: str, *, accumulate: int = 1, **options: object) -> None:
    """A training loop as people write it."""
    torch.manual_seed(0)
    net = MAKE[kind]()
    model = DistributedDataParallel(net, bucket_cap_mb=0.005, **options)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = STEPS - (1 if c.sick("uneven_batches") else 0)
    for step in range(steps):
        if step == 2:
            c.usual()
            if c.sick("skipped_module"):
                _skip(net)
        last = step % accumulate == accumulate - 1
        if c.sick("no_sync_off_by_one"):
            last = not last
        with contextlib.nullcontext() if last else model.no_sync():
            loss = loss_of(model, kind, 2, 10 * step + c.rank)
            if c.sick("data_branch") and step == 1:
                dist.all_reduce(loss.detach().clone())
            loss.backward()
        if last:
            optimiser.step()
            optimiser.zero_grad()
    evaluate(c, model, kind)
    save(c, net)


def evaluate(c: Case, model: nn.Module, kind: str) -> None:
    with torch.no_grad():
        metric = loss_of(model.module, kind, 2, 1000 + c.rank)
    if c.fault is None or c.fault.name != "evaluation_on_one" or c.rank in c.fault.ranks:
        dist.all_reduce(metric)


def save(c: Case, net: nn.Module) -> None:
    if c.rank == 0:
        torch.save(net.state_dict(), Path(c.folder) / "checkpoint.pt")
        if c.sick("checkpoint_on_one"):
            dist.barrier()
    dist.barrier()


USUAL = (UNEVEN, BRANCH, EVALUATION, CHECKPOINT, CRASH, STALL, EARLY)


@program("ddp", "ddp_gpt2", 4, SKIP, *USUAL, model="gpt2", scheme="ddp")
def ddp_gpt2(c: Case) -> None:
    train(c, "gpt2")


@program("ddp", "ddp_swin", 3, SKIP, UNEVEN, EVALUATION, CRASH, model="swin", scheme="ddp")
def ddp_swin(c: Case) -> None:
    train(c, "swin")


@program("ddp", "ddp_vgg", 3, UNEVEN, BRANCH, CHECKPOINT, STALL, model="vgg", scheme="ddp")
def ddp_vgg(c: Case) -> None:
    train(c, "vgg")


@program("ddp", "ddp_transformer", 3, SKIP, UNEVEN, BRANCH, EARLY, model="transformer", scheme="ddp")
def ddp_transformer(c: Case) -> None:
    train(c, "transformer")


@program("ddp", "ddp_gpt2_8", 8, Fault("stall", (5,), ("stalled_rank",), outside=True),
         Fault("uneven_batches", (6,), ABSENT), model="gpt2", scheme="ddp")
def ddp_gpt2_8(c: Case) -> None:
    train(c, "gpt2")


@program("ddp", "ddp_layerdrop_unused", 3, model="transformer", scheme="ddp, find_unused_parameters")
def ddp_layerdrop_unused(c: Case) -> None:
    """A layer is dropped on one rank, which DDP was told of: healthy."""
    torch.manual_seed(0)
    net = MAKE["transformer"]()
    model = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.005)
    for step in range(3):
        data = torch.randint(0, 32, (2, 8))
        out = model(data, skip=1 if c.rank == 1 and step else None)
        out.float().mean().backward()
    dist.barrier()


@program("ddp", "ddp_accumulate_gpt2", 3, SYNC, UNEVEN, STALL, model="gpt2", scheme="ddp, no_sync")
def ddp_accumulate_gpt2(c: Case) -> None:
    train(c, "gpt2", accumulate=2)


@program("ddp", "ddp_static_graph", 2, model="transformer", scheme="ddp, static_graph")
def ddp_static_graph(c: Case) -> None:
    train(c, "transformer", static_graph=True)


@program("ddp", "ddp_hook", 2, model="transformer", scheme="ddp, hook in Python")
def ddp_hook(c: Case) -> None:
    """Gradients go through a hook written in Python."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    torch.manual_seed(0)
    model = DistributedDataParallel(MAKE["transformer"](), bucket_cap_mb=0.005)
    model.register_comm_hook(None, fp16_compress_hook)
    for step in range(3):
        loss_of(model, "transformer", 2, step + c.rank).backward()
    dist.barrier()


@program("ddp", "ddp_zero", 2, UNEVEN, model="transformer", scheme="ddp, ZeroRedundancyOptimizer")
def ddp_zero(c: Case) -> None:
    """The states of the optimiser are shared out."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = DistributedDataParallel(MAKE["transformer"](), bucket_cap_mb=0.005)
    optimiser = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    for step in range(3 - (1 if c.sick("uneven_batches") else 0)):
        loss_of(model, "transformer", 2, step + c.rank).backward()
        optimiser.step()
        optimiser.zero_grad()
    dist.barrier()


@program("ddp", "ddp_join", 3, model="transformer", scheme="ddp, join")
def ddp_join(c: Case) -> None:
    """Uneven batches under the context that makes up for them: healthy."""
    torch.manual_seed(0)
    model = DistributedDataParallel(MAKE["transformer"](), bucket_cap_mb=0.005)
    with model.join():
        for step in range(2 + c.rank):
            loss_of(model, "transformer", 2, step).backward()
    dist.barrier()
