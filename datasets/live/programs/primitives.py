"""Every primitive of torch.distributed that gloo carries out, right and wrong.

A program calls one primitive between two others. The faults are those that the primitive allows:
left out, another one in its place, another root, size, data type or reduction, another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from case import ABSENT, CRASH, CYCLES, EARLY, EARLY_P2P, STALL, Case, Fault, program

RANKS = 3


@dataclass
class Call:
    """How a primitive is called on this rank."""

    n: int = 4
    dtype: torch.dtype = torch.float32
    root: int = 0
    op: Any = dist.ReduceOp.SUM
    wait: bool = True

    def ones(self, times: int = 1) -> torch.Tensor:
        return torch.ones(self.n * times, dtype=self.dtype)

    def many(self) -> list[torch.Tensor]:
        return [self.ones() for _ in range(RANKS)]


def _at(root: int, value: Any) -> Any:
    return value if dist.get_rank() == root else None


def _coalesced(k: Call) -> Any:
    with dist.distributed_c10d._coalescing_manager(async_ops=not k.wait) as manager:
        dist.all_reduce(k.ones(), op=k.op)
        dist.all_reduce(k.ones(2), op=k.op)
    return None if k.wait else manager


def _uneven_all_to_all(k: Call) -> Any:
    me = dist.get_rank()
    sent = [me + 1] * RANKS
    got = [r + 1 for r in range(RANKS)]
    if k.n == 7:
        got[0] += 1  # expects one more than it is sent
    return dist.all_to_all_single(
        torch.empty(sum(got), dtype=k.dtype), torch.ones(sum(sent), dtype=k.dtype), got, sent, async_op=not k.wait
    )


PRIMITIVES: dict[str, tuple[Callable[[Call], Any], str]] = {
    # name: (call, what it takes: r root, o reduction, s size, d data type, a asynchronous)
    "all_reduce": (lambda k: dist.all_reduce(k.ones(), op=k.op, async_op=not k.wait), "osda"),
    "broadcast": (lambda k: dist.broadcast(k.ones(), k.root, async_op=not k.wait), "rsda"),
    "reduce": (lambda k: dist.reduce(k.ones(), k.root, op=k.op, async_op=not k.wait), "rosa"),
    "all_gather": (lambda k: dist.all_gather(k.many(), k.ones(), async_op=not k.wait), "sda"),
    "all_gather_into_tensor": (
        lambda k: dist.all_gather_into_tensor(k.ones(RANKS), k.ones(), async_op=not k.wait), "sa"
    ),
    "gather": (lambda k: dist.gather(k.ones(), _at(k.root, k.many()), k.root, async_op=not k.wait), "rsa"),
    "scatter": (lambda k: dist.scatter(k.ones(), _at(k.root, k.many()), k.root, async_op=not k.wait), "rsa"),
    "reduce_scatter": (lambda k: dist.reduce_scatter(k.ones(), k.many(), op=k.op, async_op=not k.wait), "osa"),
    "reduce_scatter_tensor": (
        lambda k: dist.reduce_scatter_tensor(k.ones(), k.ones(RANKS), op=k.op, async_op=not k.wait), "osa"
    ),
    "all_to_all_single": (lambda k: dist.all_to_all_single(k.ones(RANKS), k.ones(RANKS), async_op=not k.wait), "sa"),
    "all_to_all_uneven": (_uneven_all_to_all, "sa"),
    "barrier": (lambda k: dist.barrier(async_op=not k.wait), "a"),
    "monitored_barrier": (lambda k: dist.monitored_barrier(), ""),
    "all_reduce_coalesced": (_coalesced, "osa"),
    "all_gather_object": (lambda k: dist.all_gather_object([None] * RANKS, "x" * k.n), ""),
    "broadcast_object_list": (lambda k: dist.broadcast_object_list(["x" * k.n], k.root), "r"),
    "gather_object": (lambda k: dist.gather_object("x", _at(k.root, [None] * RANKS), k.root), "r"),
    "scatter_object_list": (lambda k: dist.scatter_object_list([None], ["x"] * RANKS, k.root), "r"),
    "functional_all_reduce": (lambda k: _done(k, functional.all_reduce(k.ones(), "sum", dist.group.WORLD)), "sa"),
    "functional_all_gather": (lambda k: _done(k, functional.all_gather_tensor(k.ones(), 0, dist.group.WORLD)), "sa"),
    "functional_reduce_scatter": (
        lambda k: _done(k, functional.reduce_scatter_tensor(k.ones(RANKS), "sum", 0, dist.group.WORLD)), "s"
    ),
    "functional_all_to_all": (
        lambda k: _done(k, functional.all_to_all_single(k.ones(RANKS), None, None, dist.group.WORLD)), "s"
    ),
    "functional_broadcast": (lambda k: _done(k, functional.broadcast(k.ones(), k.root, dist.group.WORLD)), "rs"),
}


class _Later:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        functional.wait_tensor(self.tensor)


def _done(k: Call, tensor: torch.Tensor) -> Any:
    if k.wait:
        functional.wait_tensor(tensor)
        return None
    return _Later(tensor)


def _changed(c: Case, k: Call) -> Call:
    if c.sick("size"):
        k.n = 7
    if c.sick("dtype"):
        k.dtype = torch.float64
    if c.sick("root"):
        k.root = 1
    if c.sick("reduction"):
        k.op = dist.ReduceOp.MAX
    return k


def _run(call: Callable[[Call], Any], other: Callable[[Call], Any], asynchronous: bool) -> Callable[[Case], None]:
    def run(c: Case) -> None:
        dist.all_reduce(torch.ones(1))
        c.usual()
        if asynchronous:
            sizes = [4, 16]
            if c.sick("order"):
                sizes.reverse()
            works = [call(_changed(c, Call(n=n, wait=False))) for n in sizes if not (c.sick("skipped") and n == 16)]
            if c.sick("never_waited"):
                works.clear()
            for work in reversed(works):
                work.wait()
        elif c.sick("other"):
            other(Call())
        elif not c.sick("skipped"):
            call(_changed(c, Call()))
        dist.barrier()
        dist.all_reduce(torch.ones(3))

    return run


SKIPPED = Fault("skipped", (1,), ABSENT, title="one rank leaves the call out")
ANOTHER = Fault("other", (1,), ABSENT, title="one rank makes another call")
SIZE = Fault("size", (1,), ("mismatch", "crashed_rank"), ("mismatch",), title="one rank passes another size")
SHARES = Fault("size", (1,), SIZE.kinds, SIZE.passes_as, blamed=(),
               title="one rank's shares do not fit the others': which of the two is wrong is not said")
DTYPE = Fault("dtype", (1,), ("mismatch", "crashed_rank"), ("mismatch",), title="one rank passes another data type")
ROOT = Fault("root", (1,), ("mismatch",), ("mismatch",), title="one rank names another root")
REDUCTION = Fault("reduction", (1,), ("mismatch",), ("mismatch",), title="one rank reduces otherwise")
ORDER = Fault("order", (1,), ("mismatch", "crashed_rank"), ("mismatch",), title="one rank issues two calls in the other order")
SHARES_ORDER = Fault("order", (1,), ORDER.kinds, ORDER.passes_as, blamed=(), title=ORDER.title)
FORGOTTEN = Fault("never_waited", (1,), ("healthy",), title="one rank never waits: no harm by itself")

for _name, (_call, _takes) in PRIMITIVES.items():
    _faults = [SKIPPED]
    if _name not in ("all_reduce", "barrier", "monitored_barrier"):
        _faults.append(ANOTHER)
    _size = SHARES if _name in ("all_to_all_uneven", "functional_all_to_all", "scatter") else SIZE
    _faults += [f for sign, f in (("s", _size), ("d", DTYPE), ("r", ROOT), ("o", REDUCTION)) if sign in _takes]
    if _name in ("all_reduce", "broadcast", "all_gather", "all_to_all_single", "barrier"):
        _faults += [CRASH, STALL, EARLY]
    program("primitives", _name, RANKS, *_faults, scheme="blocking")(
        _run(_call, PRIMITIVES["all_reduce"][0], asynchronous=False)
    )
    if "a" in _takes:
        _faults = [SKIPPED, FORGOTTEN]
        if "s" in _takes and "uneven" not in _name:
            _faults.append(SHARES_ORDER if _name == "scatter" else ORDER)
        program("primitives", f"{_name}_async", RANKS, *_faults, scheme="asynchronous")(
            _run(_call, PRIMITIVES["all_reduce"][0], asynchronous=True)
        )


# --------------------------------------------------------------------------------------------------
# Point to point

P2P = ("unmatched_p2p", *ABSENT, *CYCLES)


def _fault(name: str, ranks: tuple[int, ...], title: str, *kinds: str, passes: tuple[str, ...] = (),
           blamed: tuple[int, ...] | None = ()) -> Fault:
    return Fault(name, ranks, kinds or P2P, passes or ("healthy", "potential"), blamed=blamed, title=title)


BIG = 1 << 18
"""Elements of a message that no library puts aside."""


@program("primitives", "send_recv", RANKS,
         _fault("missing_recv", (1,), "the receiver leaves it out"),
         _fault("missing_send", (0,), "the sender leaves it out"),
         _fault("wrong_tag", (1,), "the receiver asks for another tag"),
         _fault("wrong_peer", (1,), "the receiver asks another rank"),
         _fault("size", (0,), "more is sent than fits", "mismatch", "crashed_rank", passes=("mismatch",)),
         CRASH, STALL, EARLY_P2P, scheme="blocking")
def send_recv(c: Case) -> None:
    """Rank 0 sends to 1, 1 to 2."""
    dist.barrier()
    c.usual()
    x = torch.ones(16)
    if c.rank == 0 and not c.sick("missing_send"):
        dist.send(torch.ones(32) if c.sick("size") else x, 1, tag=3)
    if c.rank == 1:
        if not c.sick("missing_recv"):
            dist.recv(x, 2 if c.sick("wrong_peer") else 0, tag=4 if c.sick("wrong_tag") else 3)
        dist.send(x, 2)
    if c.rank == 2:
        dist.recv(x, 1)
    dist.barrier()


@program("primitives", "isend_irecv", RANKS,
         _fault("missing_recv", (1,), "one receive less than is sent"),
         _fault("never_waited", (0,), "the sender never waits", "healthy"),
         _fault("crossed_tags", (1,), "received by tag in another order: fits", "healthy"),
         _fault("crossed", (1,), "one tag: sizes meet in another order", "mismatch", "crashed_rank", "unmatched_p2p",
                passes=("mismatch",)), scheme="asynchronous")
def isend_irecv(c: Case) -> None:
    tags = [0, 0] if c.fault is not None and c.fault.name == "crossed" else [1, 2]
    sizes = [8, 32]
    if c.rank == 0:
        works = [dist.isend(torch.ones(n), 1, tag=t) for n, t in zip(sizes, tags, strict=True)]
        if not c.sick("never_waited"):
            for work in works:
                work.wait()
    if c.rank == 1:
        wanted = list(zip(sizes, tags, strict=True))
        if c.sick("crossed_tags") or c.sick("crossed"):
            wanted.reverse()
        if c.sick("missing_recv"):
            wanted.pop()
        for work in [dist.irecv(torch.empty(n), 0, tag=t) for n, t in wanted]:
            work.wait()
    dist.barrier()


@program("primitives", "swap", 2,
         _fault("head_to_head", (0, 1), "both send before they receive", "cycle", "unmatched_p2p"),
         _fault("tail_to_tail", (0, 1), "both receive before they send", "cycle", "unmatched_p2p"), scheme="blocking")
def swap(c: Case) -> None:
    """Two ranks swap large messages: one sends first, the other receives first."""
    dist.barrier()
    peer, mine, theirs = 1 - c.rank, torch.ones(BIG), torch.empty(BIG)
    sends_first = c.rank == 0
    if c.sick("head_to_head"):
        sends_first = True
    if c.sick("tail_to_tail"):
        sends_first = False
    for sends in (sends_first, not sends_first):
        if sends:
            dist.send(mine, peer)
        else:
            dist.recv(theirs, peer)
    dist.barrier()


@program("primitives", "ring", 4,
         _fault("all_send_first", (0, 1, 2, 3), "a circle of blocking sends", "cycle", "unmatched_p2p"),
         _fault("all_receive_first", (0, 1, 2, 3), "a circle of blocking receives", "cycle", "unmatched_p2p"),
         CRASH, STALL, scheme="blocking")
def ring(c: Case) -> None:
    """Each rank sends to the next: even ones send first."""
    dist.barrier()
    c.usual()
    sends_first = c.rank % 2 == 0
    if c.sick("all_send_first"):
        sends_first = True
    if c.sick("all_receive_first"):
        sends_first = False
    for sends in (sends_first, not sends_first):
        if sends:
            dist.send(torch.ones(BIG), (c.rank + 1) % c.world)
        else:
            dist.recv(torch.empty(BIG), (c.rank - 1) % c.world)
    dist.barrier()


@program("primitives", "batch_isend_irecv", RANKS,
         _fault("missing_recv", (1,), "one rank's batch lacks a receive"),
         _fault("missing_send", (1,), "one rank's batch lacks a send"),
         _fault("wrong_peer", (1,), "one rank's batch receives from the other side twice"), scheme="batched")
def batch_isend_irecv(c: Case) -> None:
    after, before = (c.rank + 1) % c.world, (c.rank - 1) % c.world
    dist.barrier()
    ops = []
    if not c.sick("missing_send"):
        ops.append(dist.P2POp(dist.isend, torch.ones(16), after))
    if not c.sick("missing_recv"):
        source = after if c.sick("wrong_peer") else before
        ops.append(dist.P2POp(dist.irecv, torch.empty(16), source))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.barrier()


@program("primitives", "recv_any_source", RANKS,
         _fault("one_send_less", (1,), "one of the senders does not send"), EARLY_P2P, scheme="wildcard")
def recv_any_source(c: Case) -> None:
    """Rank 0 takes one message of each other rank, in whatever order they come."""
    dist.barrier()
    c.usual()
    if c.rank == 0:
        for _ in range(c.world - 1):
            dist.recv(torch.empty(4))
    elif not c.sick("one_send_less"):
        dist.send(torch.ones(4), 0)
    dist.barrier()


@program("primitives", "objects_p2p", 2,
         _fault("missing_recv", (1,), "the receiver leaves it out"), scheme="objects")
def objects_p2p(c: Case) -> None:
    dist.barrier()
    if c.rank == 0:
        dist.send_object_list([{"a": 1}], 1)
    elif not c.sick("missing_recv"):
        dist.recv_object_list([None], 0)
    dist.barrier()


@program("primitives", "two_groups", 4,
         Fault("order_inversion", (2, 3), CYCLES, blamed=(), title="half of the ranks enter two groups in the other order"),
         Fault("wrong_group", (3,), (*ABSENT, *CYCLES), title="one rank uses the other group"), STALL, scheme="groups")
def two_groups(c: Case) -> None:
    """Two groups of all ranks, used one after the other."""
    groups = [dist.new_group(range(c.world)), dist.new_group(range(c.world))]
    dist.barrier()
    c.usual()
    order = [1, 0] if c.sick("order_inversion") else [1, 1] if c.sick("wrong_group") else [0, 1]
    for i in order:
        dist.all_reduce(torch.ones(8), group=groups[i])
    dist.barrier()


@program("primitives", "two_groups_async", 4,
         Fault("order_changed", (2, 3), CYCLES, title="issued in the other order, waited for afterwards: no harm"),
         scheme="groups, asynchronous")
def two_groups_async(c: Case) -> None:
    groups = [dist.new_group(range(c.world)), dist.new_group(range(c.world))]
    order = [1, 0] if c.sick("order_changed") else [0, 1]
    for work in [dist.all_reduce(torch.ones(8), group=groups[i], async_op=True) for i in order]:
        work.wait()
    dist.barrier()
