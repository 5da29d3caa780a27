"""Fixed schemes in the same model, to compare a found one with.

* data parallel: every operator split along the batch;
* ZeRO: the same, with parameters, gradients and optimiser in parts (stage 3);
* Megatron: within a node the products of a block split by columns, then by rows (Shoeybi et al.,
  arXiv 1909.08053), data parallel across nodes; in a network of convolutions these stay data
  parallel, and the dense layers are split (Krizhevsky, arXiv 1404.5997);
* two-dimensional: activations split along batch and width, parameters along both of theirs, as in
  Optimus (Xu and You, arXiv 2104.05343): both are gathered along one dimension of a square grid, of
  which the bytes are those of SUMMA's broadcasts;
* pipeline: as many stages as the model and the devices allow, 1F1B, data parallel besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Final

import numpy as np

from dl2gpu.planner.links import Cluster
from dl2gpu.planner.model import Model, Node
from dl2gpu.planner.plan import Layout, Plan, problem_of
from dl2gpu.planner.problem import Problem

__all__ = ["NAMES", "baseline", "baselines", "batch_split", "chosen", "megatron_split"]

NAMES: Final = ("data parallel", "ZeRO-3", "Megatron", "two-dimensional", "pipeline")

Wanted = Callable[[Node], tuple[str, ...]]
"""Names of signatures for one dimension of the grid, the most wanted first."""


def batch_split(_: Node) -> tuple[str, ...]:
    """Data parallel."""
    return ("b", "whole")


def megatron_split(node: Node) -> tuple[str, ...]:
    """Tensor parallel: products by columns, then by rows."""
    op = node.operator.name
    if op == "matmul":
        return {"column": ("o", "whole"), "row": ("i", "whole")}.get(node.role, ("whole",))
    if op in ("convolution", "pool", "flatten") or (op == "elementwise" and _picture(node)):
        return ("b", "whole")
    if op == "elementwise":
        return ("e", "whole")
    return {
        "packed_attention": ("h", "whole"), "embedding": ("v", "whole"),
        "cross_entropy": ("v", "whole"),
    }.get(op, ("whole",))  # fmt: skip


def _picture(node: Node) -> bool:
    return node.name.endswith(".relu") and node.name.startswith("convolution")


def _width(node: Node) -> tuple[str, ...]:
    wanted = {
        "matmul": "o", "packed_attention": "h", "elementwise": "e", "add": "e", "embedding": "e",
        "cross_entropy": "v", "convolution": "k", "pool": "c", "flatten": "c",
        "window_partition": "c",
    }  # fmt: skip
    if node.operator.name == "elementwise" and _picture(node):
        return ("t", "whole")
    return (wanted.get(node.operator.name, "whole"), "whole")


def chosen(p: Problem, wanted: tuple[Wanted, ...]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The choice of each node that is wanted most of those there are, for each dimension."""
    out = []
    for node, c in zip(p.tables.model.nodes, p.tables.nodes, strict=True):
        names = {c.name(k): k for k in range(len(c.signatures))}
        ways = [""]
        for i, want in enumerate(wanted):
            ways = [f"{w}{',' if i else ''}{name}" for w in ways for name in want(node)]
        out.append(next(names[w] for w in ways if w in names))
    return np.array(out)


def _square(n: int) -> tuple[int, int]:
    low = max(d for d in range(1, int(n**0.5) + 1) if n % d == 0)
    return n // low, low


def _layouts(name: str, model: Model, cluster: Cluster) -> Iterator[tuple[Layout, list[Wanted]]]:
    n = cluster.devices
    if name in ("data parallel", "ZeRO-3"):
        yield Layout(1, (n,), zero=3 if name == "ZeRO-3" else 0), [batch_split]
    elif name == "Megatron":
        inner = cluster.per_node if cluster.per_node > 1 else _square(n)[1]
        yield Layout(1, (n // inner, inner)), [batch_split, megatron_split]
    elif name == "two-dimensional":
        yield Layout(1, _square(n), zero=3), [batch_split, _width]
    else:
        cuts = len(model.cuts())
        stages = max(s for s in range(1, n + 1) if n % s == 0 and s - 1 <= cuts)
        for times in (1, 2, 4, 8):
            yield Layout(stages, (n // stages,), times * stages), [batch_split]


def baseline(name: str, model: Model, cluster: Cluster) -> Plan | None:
    """A fixed scheme, with the fewest microbatches, and recomputation only where memory needs it.

    Returns:
        The fastest that fits; if none does, the smallest; None where the model cannot be split so.
    """
    best: Plan | None = None
    for layout, wanted in _layouts(name, model, cluster):
        keep = [(d, w) for d, w in zip(layout.grid, wanted, strict=True) if d > 1]
        layout = replace(layout, grid=tuple(d for d, _ in keep))
        times = (1,) if name == "pipeline" else (1, 2, 4, 8, 16)
        for recompute, more in product((False, True), times):
            each = replace(layout, microbatches=layout.microbatches * more, recompute=recompute)
            p = problem_of(model, cluster, each)
            if p is None:
                continue
            choice = chosen(p, tuple(w for _, w in keep))
            plan = Plan(each, p, choice, p.seconds(choice), 0.0)
            if not np.isfinite(plan.seconds):
                continue
            if best is None or plan.seconds < best.seconds:
                best = plan
            if plan.fits:
                break
    return best


def baselines(model: Model, cluster: Cluster) -> dict[str, Plan | None]:
    """All of them, by name."""
    return {name: baseline(name, model, cluster) for name in NAMES}
