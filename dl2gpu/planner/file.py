"""Plans as files: ``plan.json`` holds all that is needed to make the plan again.

``schema: "dl2gpu.plan/1"``; ``model``: the description as in its TOML file; ``batch``; ``cluster``
and ``layout``: the fields of the records of those names; ``layers``: for each operator its name,
the axis split on each dimension of the grid (``choice``), states and costs, for reading; and
``baselines``: seconds of a step. Reading takes model, batch, cluster, layout and choices only.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dl2gpu.planner.account import account
from dl2gpu.planner.links import Cluster
from dl2gpu.planner.model import ModelError, parse
from dl2gpu.planner.plan import Layout, Plan, problem_of
from dl2gpu.planner.proof import Proof
from dl2gpu.planner.sbp import label
from dl2gpu.trace.files import whole_file

__all__ = ["plan_of", "read_plan", "read_text", "write_plan"]

SCHEMA = "dl2gpu.plan/1"
_LARGEST = 64 << 20


def write_plan(
    plan: Plan, path: Path, proof: Proof | None = None, others: dict[str, Plan | None] | None = None
) -> None:
    """Writes ``path``, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    p = plan.problem
    model, costs = p.tables.model, account(plan)
    layers = []
    for i, (node, c) in enumerate(zip(model.nodes, p.tables.nodes, strict=True)):
        k = int(plan.chosen[i])
        operands = {
            "weights": [label(c.state(k, w)) for w in node.operator.weights],
            "inputs": [label(c.state(k, o)) for o in node.operands],
        }
        layers.append(
            {
                "name": node.name, "operator": node.operator.name, "stage": int(p.stage[i]),
                "choice": [s.name for s in c.signatures[k]], **operands,
                "output": label(c.state(k, -1)), "bytes": int(costs.bytes[i]),
                "bound_bytes": float(costs.bound[i]), "seconds": float(costs.seconds[i]),
            }
        )  # fmt: skip
    text = {
        "schema": SCHEMA,
        "model": model.description,
        "batch": model.batch * plan.layout.microbatches,
        "cluster": asdict(p.tables.setting.cluster),
        "layout": asdict(plan.layout),
        "seconds": plan.seconds,
        "bound_seconds": plan.bound,
        "memory_bytes": [float(b) for b in plan.memory],
        "verdict": None if proof is None else proof.verdict,
        "baselines": {n: None if b is None else b.seconds for n, b in (others or {}).items()},
        "layers": layers,
    }
    with whole_file(path) as part:
        Path(part).write_bytes(msgspec.json.format(msgspec.json.encode(text), indent=1) + b"\n")


def read_plan(path: Path) -> Plan:
    """The plan of a file.

    Raises:
        ModelError: it is no plan; says what was expected and what was found.
    """
    return plan_of(read_text(path), path)


def read_text(path: Path) -> str:
    """What a file of a plan holds; raises ModelError where it cannot be read."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ModelError(f"{path}: expected a plan of at most {_LARGEST >> 20} MiB")
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ModelError(f"{path}: expected a plan in JSON: {e}") from e


def plan_of(text: str, path: Path = Path("plan")) -> Plan:
    """The plan that a text is; ``path`` is what messages call it. Raises ModelError."""
    try:
        raw: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ModelError(f"{path}: expected a plan in JSON: {e}") from e
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ModelError(f'{path}: expected "schema": "{SCHEMA}"')
    try:
        cluster = msgspec.convert(raw.get("cluster"), Cluster)
        layout = msgspec.convert(raw.get("layout"), Layout)
        batch = msgspec.convert(raw.get("batch"), int)
        choices = [
            tuple(msgspec.convert(row["choice"], list[str])) for row in raw["layers"]
        ]  # fmt: skip
        model = parse(msgspec.convert(raw.get("model"), dict[str, Any]), str(path))
    except (msgspec.ValidationError, KeyError, TypeError) as e:
        raise ModelError(f"{path}: {e}") from e
    _check(cluster, layout, batch, path)
    p = problem_of(model.with_batch(batch), cluster, layout)
    if p is None:
        raise ModelError(f"{path}: the model cannot be laid out as {layout}")
    if len(choices) != len(p.node):
        raise ModelError(f"{path}: layers: expected {len(p.node)}, found {len(choices)}")
    chosen = np.zeros(len(choices), np.int64)
    for i, (c, want) in enumerate(zip(p.tables.nodes, choices, strict=True)):
        names = [tuple(s.name for s in sig) for sig in c.signatures]
        if want not in names:
            name = p.tables.model.nodes[i].name
            raise ModelError(f"{path}: layer {name}: choice: {list(want)} is not legal")
        chosen[i] = names.index(want)
    return Plan(layout, p, chosen, p.seconds(chosen), 0.0)


def _check(cluster: Cluster, layout: Layout, batch: int, path: Path) -> None:
    numbers = [getattr(cluster, f.name) for f in fields(cluster)]
    whole = [layout.stages, layout.microbatches, layout.pieces, batch, *layout.grid]
    if (
        not all(np.isfinite(n) and n >= 0 for n in numbers)
        or min(whole) < 1
        or max(whole) > 1 << 20
        or not 1 <= cluster.devices <= 1 << 20
        or min(layout.grid, default=2) < 2
        or len(layout.grid) > 3
        or layout.zero not in (0, 1, 2, 3)
        or layout.schedule not in ("1f1b", "gpipe")
        or layout.ranks > cluster.devices
        or min(cluster.intra, cluster.inter, cluster.flops, cluster.efficiency, cluster.memory) <= 0
        or cluster.memory_bandwidth <= 0
        or layout.microbatches * layout.stages * layout.pieces > 1 << 20
    ):
        raise ModelError(f"{path}: expected a cluster and a layout on it, found {layout}")
