"""Plans carried out: a step of the scheme in PyTorch on gloo, with real numbers.

    python -m dl2gpu.planner.execute PLAN STORE RANK OUT [STEPS]

Each rank holds what the plan's states give it, computes each operator on that alone, and converts
between states by the plan's own collectives, in the plan's order (DTensor would choose others).
Backward is the same with the derivative of each operator, and ends with gradient descent. So two
things can be set against the plan: the results, against one process that knows no split, and the
communication, as the recorder sees it, against the lowered program.

Gloo carries out all_reduce, all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single
itself; the axis that is split goes first before a collective, so that pieces lie together. Stages
of a pipeline work in the plan's order (GPipe, 1F1B, interleaved), and exchange activations and
their gradients when the plan says.

Not carried out, and refused: windows, strides, other precisions than f32.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from datetime import timedelta
from math import isqrt, prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from dl2gpu.planner.convert import Step, conversions
from dl2gpu.planner.costs import shards
from dl2gpu.planner.file import read_plan
from dl2gpu.planner.lower import Blocks
from dl2gpu.planner.model import Model, Node
from dl2gpu.planner.plan import Plan
from dl2gpu.planner.sbp import B, P, State
from dl2gpu.planner.schedule import Work, order, play

__all__ = ["RATE", "Device", "check", "data", "reference"]

RATE: Final = 0.1
"""Of gradient descent."""
_KNOWN: Final = (
    "matmul", "layer_norm", "elementwise", "add", "embedding", "packed_attention", "convolution",
    "pool", "flatten", "cross_entropy",
)  # fmt: skip


def check(plan: Plan) -> None:
    """Can the plan be carried out?

    Raises:
        ValueError: says what is not.
    """
    model = plan.problem.tables.model
    other = sorted({n.operator.name for n in model.nodes} - set(_KNOWN))
    strided = [
        model.nodes[e.target].name
        for e in model.edges
        if prod(model.nodes[e.source].shape(-1)) != prod(model.nodes[e.target].shape(e.operand))
    ]
    last = model.nodes[-1].operator.name
    for wrong, expected, found in (
        (model.precision.dtype != "f32", "precision f32", model.precision.dtype),
        (other, f"operators {', '.join(_KNOWN)}", ", ".join(other)),
        (strided, "results as large as the operands they become", ", ".join(strided)),
        (last != "cross_entropy", "a loss at the end", last),
    ):
        if wrong:
            raise ValueError(f"{model.name}: expected {expected}, found {found}")


def data(model: Model, microbatches: int, step: int) -> tuple[Any, Any, Any]:
    """Parameters by (node, operand), inputs and labels by microbatch: whole, anywhere the same."""
    import torch

    start = np.random.default_rng(1)
    weights = {
        (k, i): torch.tensor(start.normal(0, 0.2, n.shape(i)) + (n.operator.name == "layer_norm"))
        for k, n in enumerate(model.nodes)
        for i in n.operator.weights
    }
    rng = np.random.default_rng((2, step))
    first, last = model.nodes[0], model.nodes[-1]
    shape = first.shape(first.operands[0])
    inputs, labels = [], []
    for _ in range(microbatches):
        if first.operator.name == "embedding":
            inputs.append(torch.tensor(rng.integers(0, dict(first.sizes)["v"], shape)))
        else:
            inputs.append(torch.tensor(rng.normal(0, 1, shape), dtype=torch.float32))
        labels.append(torch.tensor(rng.integers(0, dict(last.sizes)["v"], last.shape(1))))
    return {k: w.float() for k, w in weights.items()}, inputs, labels


def _forward(node: Node, given: list[Any], offset: int) -> Any:
    """An operator on what a device has; ``offset``: where its part of the vocabulary begins."""
    from torch.nn import functional as f

    sizes = dict(node.sizes)
    x = given[0]
    match node.operator.name:
        case "matmul":
            return x @ given[1]
        case "layer_norm":
            return f.layer_norm(x, x.shape[-1:]) * given[1]
        case "elementwise":
            return f.gelu(x) if node.name.endswith("gelu") else f.relu(x)
        case "add":
            return x + given[1]
        case "embedding":
            ids = x - offset
            inside = (ids >= 0) & (ids < len(given[1]))
            return given[1][ids.clamp(0, len(given[1]) - 1)] * inside[..., None]
        case "packed_attention":
            wide = sizes["h"] // dict(node.units)["h"]
            q, k, v = x.unflatten(-1, (-1, 3, wide)).transpose(1, 2).unbind(3)
            return f.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        case "convolution":
            side, kernel = isqrt(sizes["s"]), isqrt(sizes["w"])
            picture = x.unflatten(-1, (side, side))
            return f.conv2d(
                picture, given[1].unflatten(-1, (kernel, kernel)), padding=kernel // 2
            ).flatten(2)
        case "pool":
            side = isqrt(sizes["s"])
            by = side // isqrt(sizes["r"])
            return f.max_pool2d(x.unflatten(-1, (side, side)), by).flatten(2)
        case _:  # flatten
            return x.flatten(1)[:, None]


def reference(model: Model, microbatches: int, steps: int) -> tuple[list[float], dict[Any, Any]]:
    """Loss of each step, and the parameters after them, by automatic derivatives of the whole."""
    from torch.nn import functional as f

    weights, _, _ = data(model, microbatches, 0)
    losses = []
    into = {(e.target, e.operand): e.source for e in model.edges}
    for step in range(steps):
        _, inputs, labels = data(model, microbatches, step)
        for w in weights.values():
            w.requires_grad_()
            w.grad = None
        total = 0.0
        for x, label in zip(inputs, labels, strict=True):
            made: list[Any] = []
            for k, node in enumerate(model.nodes[:-1]):
                given = [
                    weights[k, i] if i in node.operator.weights
                    else made[into[k, i]].reshape(node.shape(i)) if (k, i) in into else x
                    for i in range(len(node.operator.inputs))
                ]  # fmt: skip
                made.append(_forward(node, given, 0))
            loss = f.cross_entropy(made[-1].flatten(0, 1), label.flatten()) / microbatches
            loss.backward()
            total += loss.item()
        losses.append(total)
        weights = {k: (w - RATE * w.grad).detach() for k, w in weights.items()}
    return losses, weights


@dataclass
class _Batch:
    """One microbatch on one device: what goes in, and by node what came out of it so far."""

    x: Any
    labels: Any
    made: dict[int, Any] = field(default_factory=dict)
    used: dict[int, list[Any]] = field(default_factory=dict)
    grads: dict[int, Any] = field(default_factory=dict)
    loss: float = 0.0
    back: Any = None


class Device:
    """One rank: its place in the grid, its groups, its part of every tensor."""

    def __init__(self, plan: Plan, rank: int) -> None:
        import torch.distributed as dist

        check(plan)
        self.dist = dist
        self.place(plan, rank)
        self.blocks = Blocks(plan)
        self.groups: list[Any] = []
        self.stages: Any = None
        where = np.arange(plan.layout.ranks).reshape(plan.layout.shape)
        for dim, size in enumerate(plan.layout.shape):
            if size == 1:
                continue
            for members in np.moveaxis(where, dim, -1).reshape(-1, size).tolist():
                group = dist.new_group(members)
                if rank in members and dim == 0:
                    self.stages = group
                elif rank in members:
                    self.groups.append(group)
        self.into: list[list[Any]] = [[e for e in self.model.edges if e.target == k]
                                      for k in range(len(self.model.nodes))]  # fmt: skip
        self.weights: dict[tuple[int, int], Any] = {}

    def place(self, plan: Plan, rank: int) -> None:
        """Which stage and which part of every tensor is the rank's."""
        self.plan, self.tables = plan, plan.problem.tables
        self.model, self.setting = self.tables.model, self.tables.setting
        self.grid = self.setting.grid
        self.plane = prod(self.grid)
        self.stage, part = divmod(rank, self.plane)
        self.part = part
        self.at = tuple(int(i) for i in np.unravel_index(part, self.grid)) if self.grid else ()

    def nodes_of(self, piece: int | None = None) -> list[int]:
        """Nodes of a piece, or of all pieces of this stage."""
        p = self.plan.problem
        mine = p.stage == self.stage if piece is None else p.piece == piece
        return [int(k) for k in np.flatnonzero(mine)]

    def cut(self, whole: Any, state: State) -> Any:
        """This device's part of a tensor; the first device has all of a partial sum."""
        for placed, size, i in zip(state, self.grid, self.at, strict=True):
            if placed >= 2:
                whole = whole.chunk(size, placed - 2)[i]
            elif placed == P and i:
                whole = whole * 0
        return whole.contiguous()

    def _one(self, x: Any, step: Step) -> Any:
        """One step of a conversion."""
        import torch

        dim = step.dim
        size, i = self.grid[dim], self.at[dim]
        before, after = step.before[dim], step.after[dim]
        group = self.groups[dim] if step.op != "local" else None
        match step.op:
            case "all_reduce":
                x = x.clone().contiguous()
                self.dist.all_reduce(x, group=group)
                return x
            case "reduce_scatter":
                x = x.movedim(after - 2, 0).contiguous()
                out = x.new_empty((len(x) // size, *x.shape[1:]))
                self.dist.reduce_scatter_tensor(out, x, group=group)
                return out.movedim(0, after - 2).contiguous()
            case "all_gather":
                x = x.movedim(before - 2, 0).contiguous()
                out = x.new_empty((len(x) * size, *x.shape[1:]))
                self.dist.all_gather_into_tensor(out, x, group=group)
                return out.movedim(0, before - 2).contiguous()
            case "all_to_all":
                x = torch.stack(x.chunk(size, after - 2)).contiguous()
                out = torch.empty_like(x)
                self.dist.all_to_all_single(out, x, group=group)
                return torch.cat(tuple(out), before - 2)
        if before == B and after == P:
            return x if i == 0 else x * 0
        if after == P:
            return torch.cat([x if j == i else x * 0 for j in range(size)], before - 2)
        return x.chunk(size, after - 2)[i].contiguous()

    def convert(self, x: Any, shape: tuple[int, ...], before: State, after: State) -> Any:
        """From one state of a tensor to another, by the plan's steps."""
        width = self.model.precision.width
        table = conversions(shape, self.grid, self.setting.links, width)
        for step in table.steps(before, after):
            x = self._one(x, step)
        return x

    def _states(self, node: int, operand: int) -> tuple[State, State]:
        c, choice = self.tables.nodes[node], int(self.plan.chosen[node])
        return c.state(choice, operand), c.gradient(choice, operand)

    def kept(self, node: int, operand: int) -> tuple[State, State, State]:
        """Of a parameter: the states of its gradient, between steps, and in use."""
        state, gradient = self._states(node, operand)
        table = conversions(
            self.model.nodes[node].shape(operand), self.grid, self.setting.links,
            self.model.precision.width,
        )  # fmt: skip
        parts = shards(table, gradient, state, self.setting.zero)
        return gradient, parts[0] if parts else state, state

    def _parameters(self, node: int) -> dict[int, Any]:
        out = {}
        for i in self.model.nodes[node].operator.weights:
            w = self.weights[node, i]
            if self.setting.zero == 3:
                _, parts, use = self.kept(node, i)
                w = self.convert(w, self.model.nodes[node].shape(i), parts, use)
            out[i] = w
        return out

    def _offset(self, node: int, operand: int, axis: str) -> int:
        n = self.model.nodes[node]
        state, place = self._states(node, operand)[0], n.operator.inputs[operand].index(axis) + 2
        start, length = 0, n.shape(operand)[place - 2]
        for placed, size, i in zip(state, self.grid, self.at, strict=True):
            if placed == place:
                length //= size
                start += i * length
        return start

    def _loss(self, node: int, x: Any, labels: Any) -> tuple[float, Any]:
        """This device's share of the loss, and the gradient of what goes in."""
        import torch

        n = self.model.nodes[node]
        label = self.cut(labels, self._states(node, 1)[0]) - self._offset(node, 0, "v")
        inside = (label >= 0) & (label < x.shape[-1])
        place = label.clamp(0, x.shape[-1] - 1)[..., None]
        sums = torch.stack([x.exp().sum(-1), x.gather(-1, place)[..., 0] * inside])
        chosen = self.tables.nodes[node].signatures[int(self.plan.chosen[node])]
        copies = 1
        for dim, s in enumerate(chosen):
            if s.splits and s.name in n.operator.reduces_inside:
                self.dist.all_reduce(sums, group=self.groups[dim])
            copies *= self.grid[dim] if s.output == B else 1
        many = labels.numel() * self.setting.microbatches
        hit = torch.zeros_like(x).scatter_(-1, place, inside[..., None].float())
        gradient = (x.exp() / sums[0][..., None] - hit) / many
        return float((sums[0].log() - sums[1]).sum()) / many / copies, gradient

    def _forward(self, piece: int, batch: _Batch, *, again: bool = False) -> dict[int, Any]:
        """A piece of the model, of one microbatch; the parameters that it took, by node."""
        nodes, last = self.model.nodes, len(self.model.nodes) - 1
        taken: dict[int, Any] = {}
        for k in self.nodes_of(piece):
            node = nodes[k]
            given: list[Any] = [None] * len(node.operator.inputs)
            weights = taken[k] = self._parameters(k)
            for i, w in weights.items():
                given[i] = w
            for e in self.into[k]:
                source = nodes[e.source].shape(-1)
                state = self._states(e.source, -1)[0]
                given[e.operand] = self.convert(batch.made[e.source], source, state,
                                                self._states(k, e.operand)[0])  # fmt: skip
            if not self.into[k]:
                given[node.operands[0]] = self.cut(batch.x, self._states(k, node.operands[0])[0])
            if k == last:
                if not again:
                    batch.loss, batch.back = self._loss(k, given[0], batch.labels)
            else:
                offset = self._offset(k, 1, "v") if node.operator.name == "embedding" else 0
                batch.made[k] = _forward(node, given, offset)
            batch.used[k] = [None if i in weights else g for i, g in enumerate(given)]
        return taken

    def _backward(self, piece: int, batch: _Batch, gradients: dict[tuple[int, int], Any]) -> None:
        """The derivatives of a piece, of one microbatch, added to those of its parameters."""
        import torch

        nodes, last = self.model.nodes, len(self.model.nodes) - 1
        # what is computed again takes the parameters along
        again = self._forward(piece, batch, again=True) if self.setting.recompute else {}
        for k in reversed(self.nodes_of(piece)):
            node = nodes[k]
            weights = again[k] if k in again else self._parameters(k)
            found: dict[int, Any] = {0: batch.back}
            if k < last:
                given = [weights.get(i, g) for i, g in enumerate(batch.used[k])]
                wanted = [i for i in range(len(given)) if i not in node.operator.no_gradient]
                for i in wanted:
                    given[i] = given[i].detach().requires_grad_()
                offset = self._offset(k, 1, "v") if node.operator.name == "embedding" else 0
                with torch.enable_grad():
                    out = _forward(node, given, offset)
                got = torch.autograd.grad(out, [given[i] for i in wanted], batch.grads.pop(k))
                found = dict(zip(wanted, got, strict=True))
            for i in weights:
                gradients[k, i] = gradients.get((k, i), 0) + found[i]
            for e in reversed(self.into[k]):
                shape = nodes[e.source].shape(-1)
                g = self.convert(found[e.operand], shape, self._states(k, e.operand)[1],
                                 self._states(e.source, -1)[1])  # fmt: skip
                batch.grads[e.source] = batch.grads.get(e.source, 0) + g

    def _exchange(self, some: list[tuple[Work, int, bool]], batches: list[_Batch]) -> list[Any]:
        """Messages of one moment; what was received is there, what was sent may be under way."""
        import torch

        calls, arrived = [], []
        for work, other, sends in some:
            node = self.blocks.messages(work.piece - work.backward)[0]
            batch = batches[work.microbatch]
            kept = batch.grads if work.backward else batch.made
            peer = other * self.plane + self.part
            if sends:
                x = (kept.pop(node) if work.backward else kept[node]).contiguous()
            else:
                state = self._states(node, -1)[1 if work.backward else 0]
                shape = list(self.model.nodes[node].shape(-1))
                for placed, size in zip(state, self.grid, strict=True):
                    if placed >= 2:
                        shape[placed - 2] //= size
                x = torch.empty(shape)
                arrived.append((kept, node, x))
            way = self.dist.isend if sends else self.dist.irecv
            calls.append(self.dist.P2POp(way, x, peer, self.stages))
        started = self.dist.batch_isend_irecv(calls)
        for (_, _, sends), call in zip(some, started, strict=True):
            if not sends:
                call.wait()
        for kept, node, x in arrived:
            kept[node] = x
        return [c for (_, _, sends), c in zip(some, started, strict=True) if sends]

    def _step(self, batches: list[_Batch], gradients: dict[tuple[int, int], Any]) -> float:
        """The stage's work in the plan's order, and its messages between."""
        p = self.plan.problem
        orders = order(p.schedule, p.stages, p.microbatches, p.pieces)
        times, messages = play(orders, p.stages * p.pieces)
        mine = [
            (moment, m.made, m.target if m.source == self.stage else m.source,
             m.source == self.stage)
            for moment, m in messages if self.stage in (m.source, m.target)
        ]  # fmt: skip
        under_way: list[Any] = []

        def exchange(until: int | None) -> None:
            while mine and (until is None or mine[0][0] <= until):
                moment = mine[0][0]
                some = [m[1:] for m in mine if m[0] == moment]
                del mine[: len(some)]
                under_way.extend(self._exchange(some, batches))

        for work, (start, _) in zip(orders[self.stage], times[self.stage], strict=True):
            exchange(start)
            batch = batches[work.microbatch]
            if work.backward:
                self._backward(work.piece, batch, gradients)
            else:
                self._forward(work.piece, batch)
        exchange(None)
        for call in under_way:
            call.wait()
        return sum(b.loss for b in batches)

    def train(self, steps: int) -> list[float]:
        """This device's share of the loss of each step; ``weights`` are then as they are kept."""
        import torch

        whole, _, _ = data(self.model, self.setting.microbatches, 0)
        late = self.setting.zero == 3
        own = set(self.nodes_of())
        self.weights = {
            k: self.cut(w, self.kept(*k)[1 if late else 2]) for k, w in whole.items() if k[0] in own
        }
        losses = []
        with torch.no_grad():
            for step in range(steps):
                _, inputs, labels = data(self.model, self.setting.microbatches, step)
                gradients: dict[tuple[int, int], Any] = {}
                batches = [_Batch(x, y) for x, y in zip(inputs, labels, strict=True)]
                losses.append(self._step(batches, gradients))
                self._descend(gradients)
        return losses

    def _descend(self, gradients: dict[tuple[int, int], Any]) -> None:
        moved = {}
        for k in reversed(self.nodes_of()):
            for i in self.model.nodes[k].operator.weights:
                gradient, parts, use = self.kept(k, i)
                g = self.convert(gradients[k, i], self.model.nodes[k].shape(i), gradient, parts)
                w = self.weights[k, i]
                if self.setting.zero != 3 and parts != use:
                    # dimensions that the parts add are cut, and nothing else
                    for step in self._cuts(use, parts):
                        w = self._one(w, step)
                moved[k, i] = w - RATE * g
        for (k, i), w in moved.items():
            _, parts, use = self.kept(k, i)
            if self.setting.zero != 3:
                w = self.convert(w, self.model.nodes[k].shape(i), parts, use)
            self.weights[k, i] = w

    def _cuts(self, use: State, parts: State) -> list[Step]:
        state, out = list(use), []
        for dim, (a, b) in enumerate(zip(use, parts, strict=True)):
            if a != b:
                before = tuple(state)
                state[dim] = b
                out.append(Step(dim, "local", before, tuple(state), 0, 0))
        return out


def _main(path: str, store: str, rank: str, out: str, steps: str = "1") -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    plan = read_plan(Path(path))
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, plan.layout.ranks), rank=int(rank),
        world_size=plan.layout.ranks, timeout=timedelta(seconds=60),
    )  # fmt: skip
    device = Device(plan, int(rank))
    losses = device.train(int(steps))
    kept = {f"{k}.{i}": w.numpy() for (k, i), w in device.weights.items()}
    np.savez(Path(out) / f"{rank}.npz", losses=np.array(losses), **kept)
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
