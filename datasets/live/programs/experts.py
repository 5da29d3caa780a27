"""Mixtures of experts: tokens go to their expert by all_to_all, and come back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from case import ABSENT, CRASH, CYCLES, STALL, Case, Fault, program
from torch import nn

SPLIT = Fault("split_mismatch", (1,), ("mismatch", "crashed_rank"), ("mismatch",), blamed=(),
              title="one rank expects another number of tokens than it is sent")
IDLE = Fault("no_tokens", (1,), (*ABSENT, *CYCLES), title="a rank without tokens leaves the exchange out")
INVERSION = Fault("order_inversion", (1, 2), CYCLES, blamed=(),
                  title="two ranks average before they exchange, on crossed groups")
HARMLESS = Fault("order_changed", (1,), CYCLES, blamed=(),
                 title="one rank averages before it exchanges: nobody comes to wait for it in a circle")
GROUP = Fault("wrong_group", (1,), (*ABSENT, *CYCLES), title="one rank exchanges over all ranks")


class Exchange(torch.autograd.Function):
    """An all_to_all that sends the gradients back the same way."""

    @staticmethod
    def forward(ctx, x, sent, got, group):  # noqa: ANN001, ANN205
        ctx.sizes = sent, got, group
        out = x.new_empty(sum(got), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        sent, got, group = ctx.sizes
        out = grad.new_empty(sum(sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), sent, got, group=group)
        return out, None, None, None


@program("moe", "moe_all_to_all", 4, SPLIT, IDLE, INVERSION, HARMLESS, GROUP, CRASH, STALL, scheme="ep x dp")
def moe_all_to_all(c: Case) -> None:
    """Experts in two groups of two; gradients of what is shared averaged across the groups."""
    expert_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    experts, data = expert_groups[c.rank // 2], data_groups[c.rank % 2]
    torch.manual_seed(0)
    router, expert = nn.Linear(8, 2), nn.Linear(8, 8)
    for step in range(3):
        if step == 1:
            c.usual()
        struck = step == 1
        torch.manual_seed(100 * step + c.rank)
        x = torch.randn(6, 8)
        choice = router(x).argmax(1)
        order = choice.argsort()
        sent = torch.bincount(choice, minlength=2)
        got = torch.empty_like(sent)
        if struck and c.sick("no_tokens"):
            dist.all_reduce(torch.ones(4), group=data)
            continue
        averaged = struck and (c.sick("order_inversion") or c.sick("order_changed"))
        if averaged:
            dist.all_reduce(torch.ones(4), group=data)
        if struck and c.sick("wrong_group"):
            dist.all_to_all_single(torch.empty(4), torch.ones(4))
        dist.all_to_all_single(got, sent, group=experts)
        outgoing, incoming = sent.tolist(), got.tolist()
        if struck and c.sick("split_mismatch"):
            incoming[0] += 2
        y = expert(Exchange.apply(x[order], outgoing, incoming, experts))
        back = Exchange.apply(y, incoming, outgoing, experts)
        back.mean().backward()
        if not averaged:
            dist.all_reduce(torch.ones(4), group=data)
    dist.barrier()


MEMBER = Fault("member_missing", (2,), ("missing_participant", "mismatch", *CYCLES), title="a member does not make the group")
OUTSIDER = Fault("outsider_skips", (2, 3), ("missing_participant", "mismatch", *CYCLES), blamed=(),
                 title="only members make the group; names disagree from then on")
CREATION = Fault("creation_order", (1,), ("init_cycle", *CYCLES, *ABSENT), blamed=(),
                 title="one rank makes two groups in the other order")


@program("groups", "groups_made", 4, MEMBER, OUTSIDER, CREATION, STALL, CRASH, scheme="new_group")
def groups_made(c: Case) -> None:
    """Three groups, made by all ranks in one order, and used."""
    dist.all_reduce(torch.ones(2))
    c.usual()
    wanted = [[0, 1], [1, 2, 3], [0, 1, 2, 3]]
    if c.sick("creation_order"):
        wanted = [wanted[1], wanted[0], wanted[2]]
    for ranks in wanted:
        if ranks == [1, 2, 3] and c.sick("member_missing"):
            continue
        if ranks == [0, 1] and c.sick("outsider_skips"):
            continue
        group = dist.new_group(ranks)
        if c.rank in ranks:
            dist.all_reduce(torch.ones(2), group=group)
    dist.barrier()


@program("groups", "groups_local", 4, scheme="new_group, local synchronisation")
def groups_local(c: Case) -> None:
    """Groups that only their members make."""
    mine = dist.new_group([0, 1] if c.rank < 2 else [2, 3], use_local_synchronization=True)
    dist.all_reduce(torch.ones(2), group=mine)
    if c.rank in (0, 2):
        both = dist.new_group([0, 2], use_local_synchronization=True)
        dist.broadcast(torch.ones(2), 0, group=both)
    dist.barrier()
