"""Sharded training: FSDP2, tensor parallelism by DTensor, and both on one mesh."""

from __future__ import annotations

import torch
import torch.distributed as dist
from case import ABSENT, CRASH, CYCLES, EARLY, STALL, Case, Fault, program
from models import MAKE, blocks, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

EXTRA = Fault("extra_evaluation", (0,), (*ABSENT, *CYCLES), title="one rank alone runs a forward pass")
GATHER = Fault("gather_on_one", (0,), (*ABSENT, *CYCLES), title="a full parameter on one rank only")
UNEVEN = Fault("uneven_batches", (1,), ABSENT, title="one rank has fewer batches")
SKIP = Fault("skipped_module", (1,), (*ABSENT, *CYCLES), title="a layer is dropped on one rank")
FEWER = Fault("uneven_batches", (1,), (*ABSENT, *CYCLES), title="one rank has fewer batches, on two groups")
NORM = Fault("clip_on_others", (1,), ABSENT, title="one rank does not clip its gradients")


def _shard(net: nn.Module, mesh: object) -> nn.Module:
    for block in blocks(net):
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def fsdp(c: Case, kind: str) -> None:
    torch.manual_seed(0)
    net = _shard(MAKE[kind](), init_device_mesh("cpu", (c.world,)))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(3 - (1 if c.sick("uneven_batches") else 0)):
        if step == 1:
            c.usual()
        loss_of(net, kind, 2, step + c.rank).backward()
        if not c.sick("clip_on_others"):
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimiser.step()
        optimiser.zero_grad()
        if step == 1 and c.sick("extra_evaluation"):
            with torch.no_grad():
                loss_of(net, kind, 2, 99)
        if step == 1 and c.sick("gather_on_one"):
            next(iter(net.parameters())).full_tensor()
    for parameter in net.parameters():  # a full state dict, on all ranks
        parameter.full_tensor()
    dist.barrier()


@program("fsdp2", "fsdp2_gpt2", 4, EXTRA, GATHER, UNEVEN, NORM, CRASH, STALL, EARLY, model="gpt2", scheme="fsdp2")
def fsdp2_gpt2(c: Case) -> None:
    fsdp(c, "gpt2")


@program("fsdp2", "fsdp2_transformer", 3, EXTRA, UNEVEN, STALL, model="transformer", scheme="fsdp2")
def fsdp2_transformer(c: Case) -> None:
    fsdp(c, "transformer")


@program("fsdp2", "fsdp2_swin", 2, model="swin", scheme="fsdp2")
def fsdp2_swin(c: Case) -> None:
    fsdp(c, "swin")


def _tensor_parallel(net: nn.Module, kind: str, mesh: object) -> None:
    for block in blocks(net):
        if kind == "gpt2":  # Conv1D has no rule; its two halves are made linear
            inner, width = block.mlp.c_fc.weight.shape[1], block.mlp.c_fc.weight.shape[0]
            block.mlp.c_fc, block.mlp.c_proj = nn.Linear(width, inner), nn.Linear(inner, width)
            plan = {"mlp.c_fc": ColwiseParallel(), "mlp.c_proj": RowwiseParallel()}
        else:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)


def tensor_parallel(c: Case, kind: str) -> None:
    torch.manual_seed(0)
    net = MAKE[kind]()
    _tensor_parallel(net, kind, init_device_mesh("cpu", (c.world,)))
    for step in range(3):
        if step == 1:
            c.usual()
        if c.sick("skipped_module") and step == 1:
            loss = net.head(net.layers[0](net.embedding(torch.zeros(2, 8, dtype=torch.long)))).mean()
        else:
            loss = loss_of(net, kind, 2, step)
        loss.backward()
        if step == 1 and c.sick("gather_on_one"):
            next(p for p in net.parameters() if isinstance(p, DTensor)).full_tensor()
    dist.barrier()


@program("tp", "tp_gpt2", 2, GATHER, CRASH, STALL, model="gpt2", scheme="tp")
def tp_gpt2(c: Case) -> None:
    tensor_parallel(c, "gpt2")


@program("tp", "tp_transformer", 4, GATHER, SKIP, EARLY, STALL, model="transformer", scheme="tp")
def tp_transformer(c: Case) -> None:
    tensor_parallel(c, "transformer")


WRONG = Fault("wrong_group", (1,), (*ABSENT, *CYCLES), blamed=(), title="one rank averages over the other group")
INVERSION = Fault("order_inversion", (1, 2), CYCLES, blamed=(), title="two ranks enter two groups in the other order")
STEP = Fault("skipped_call", (3,), (*ABSENT, *CYCLES), blamed=(), title="one rank leaves an averaging out")


@program("mesh", "mesh_dp_tp", 4, WRONG, INVERSION, STEP, CRASH, STALL, model="transformer", scheme="dp x tp")
def mesh_dp_tp(c: Case) -> None:
    """Tensor parallelism within rows, gradients averaged by hand within columns."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    net = MAKE["transformer"]()
    _tensor_parallel(net, "transformer", mesh["tp"])
    for step in range(3):
        if step == 1:
            c.usual()
        loss_of(net, "transformer", 2, step).backward()
        struck = step == 1
        for i, parameter in enumerate(p for p in net.parameters() if p.grad is not None):
            if struck and c.sick("skipped_call") and i == 2:
                continue
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            group = tp if struck and c.sick("wrong_group") and i == 2 else dp
            dist.all_reduce(grad, group=group)
        order = [dp, tp]
        if struck and c.sick("order_inversion"):
            order.reverse()
        for group in order:  # a metric of each row and of each column
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()


@program("mesh", "mesh_hsdp", 4, FEWER, STALL, model="transformer", scheme="hsdp")
def mesh_hsdp(c: Case) -> None:
    """Shards within rows, replicas across: FSDP2 on a mesh of two dimensions."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = _shard(MAKE["transformer"](), mesh)
    for step in range(3 - (1 if c.sick("uneven_batches") else 0)):
        if step == 1:
            c.usual()
        loss_of(net, "transformer", 2, step + c.rank).backward()
    dist.barrier()
