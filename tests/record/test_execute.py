"""Plans carried out on gloo: the results of one process, and the communication of the program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dl2gpu import read_trace
from dl2gpu.planner.baselines import batch_split, megatron_split
from dl2gpu.planner.baselines import chosen as split
from dl2gpu.planner.expect import compare
from dl2gpu.planner.file import write_plan
from dl2gpu.planner.links import Cluster
from dl2gpu.planner.lower import lower
from dl2gpu.planner.model import Model, parse
from dl2gpu.planner.plan import Layout, Plan, problem_of
from dl2gpu.planner.search import descend
from dl2gpu.record.launch import environment
from dl2gpu.record.settings import Settings
from dl2gpu.trace.schema import OP, Trace

pytest.importorskip("torch.distributed", reason="needs PyTorch (the extra 'record')")

from dl2gpu.planner.execute import Device, check, reference

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2

MODELS: dict[str, list[dict[str, Any]]] = {
    "mlp": [
        {"op": "tokens", "width": 16},
        {"op": "linear", "width": 32, "activation": True, "role": "column"},
        {"op": "linear", "width": 16, "role": "row"},
        {"op": "head", "classes": 8},
    ],
    "transformer": [
        {"op": "embedding", "vocabulary": 32, "tokens": 8, "width": 16},
        {"op": "transformer", "heads": 4, "repeat": 2},
        {"op": "head", "classes": 32},
    ],
    "vgg": [
        {"op": "picture", "side": 8, "channels": 4},
        {"op": "convolution", "channels": 8},
        {"op": "pool"},
        {"op": "convolution", "channels": 8},
        {"op": "flatten"},
        {"op": "linear", "width": 32, "activation": True},
        {"op": "head", "classes": 8},
    ],
}


def model_of(name: str) -> Model:
    return parse({"name": name, "batch": 16, "precision": "f32", "layer": MODELS[name]})


def plan_of(name: str, layout: Layout, way: str) -> Plan:
    """``way``: ``data``, ``megatron``, ``found``, or the seed of legal choices at random."""
    cluster = Cluster(2, max(layout.ranks // 2, 1), intra=50e9, inter=2e9, flops=1e8)
    p = problem_of(model_of(name), cluster, layout)
    assert p is not None
    if way == "data":
        names = [[c.name(k) for k in range(len(c.signatures))] for c in p.tables.nodes]
        chosen = np.array([n.index(",".join("b" * len(layout.grid))) for n in names])
    elif way == "megatron":
        ways = (batch_split, megatron_split)[-len(layout.grid) :]
        chosen = split(p, ways)
    elif way == "found":
        chosen = descend(p, restarts=1, seed=1).chosen
    else:
        rng = np.random.default_rng(int(way))
        every = (np.array([rng.integers(0, n.shape[1]) for n in p.node]) for _ in range(2000))
        chosen = next(c for c in every if np.isfinite(p.seconds(c)))
    return Plan(layout, p, chosen, p.seconds(chosen), 0.0)


def carry_out(plan: Plan, folder: Path) -> tuple[Trace, list[Any]]:
    """The record of the job, and what each rank has at the end."""
    write_plan(plan, folder / "plan.json")
    env = environment(Settings(str(folder / "trace")))
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}{os.pathsep}{ROOT}"
    command = [sys.executable, "-m", "dl2gpu.planner.execute", str(folder / "plan.json")]
    children = [
        subprocess.Popen(
            [*command, str(folder / "store"), str(rank), str(folder), str(STEPS)],
            env=env, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(plan.layout.ranks)
    ]  # fmt: skip
    try:
        errors = [child.communicate(timeout=180)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [c.returncode for c in children] == [0] * len(children), [e[-2000:] for e in errors]
    ends = [np.load(folder / f"{rank}.npz") for rank in range(plan.layout.ranks)]
    return read_trace(str(folder / "trace")), ends


def operations(trace: Trace) -> dict[int, list[tuple[Any, ...]]]:
    """Of each rank, in order: operation, members, peer, elements in and out, type, reduction."""
    codes = dict(trace.strings.select("code", "text").iter_rows())
    members = dict(trace.comms.select("comm", "ranks").iter_rows())
    out: dict[int, list[tuple[Any, ...]]] = {}
    left_out = [OP["wait"], OP["comm_create"]]
    events = trace.events.filter(~pl.col("op").is_in(left_out)).sort("rank", "lane", "seq")
    for e in events.iter_rows(named=True):
        size = e["count"] if e["count_out"] is None else e["count_out"]
        reduces = codes.get(e["reduce_op"])
        peer = e["peer"] if e["op"] in (OP["send"], OP["recv"]) else None
        one = (e["op"], tuple(members[e["comm"]]), peer, e["count"], size, e["dtype"], reduces)
        out.setdefault(e["rank"], []).append(one)
    return out


SCHEMES = [
    ("mlp", Layout(1, (2,)), "data"),
    ("mlp", Layout(1, (2, 2), zero=3), "0"),
    ("mlp", Layout(1, (4,), 2, zero=1), "data"),
    ("transformer", Layout(1, (4,), zero=3), "data"),
    ("transformer", Layout(1, (2, 2), 2), "found"),
    ("transformer", Layout(1, (2, 2)), "megatron"),
    ("transformer", Layout(1, (2, 2)), "1"),
    ("transformer", Layout(1, (2, 4), zero=1), "2"),
    ("vgg", Layout(1, (2, 2)), "3"),
    ("transformer", Layout(2, (), 4, schedule="gpipe"), "data"),
    ("transformer", Layout(4, (2,), 4), "data"),
    ("transformer", Layout(2, (2,), 4, 2), "data"),
    ("transformer", Layout(2, (2, 2), 2, zero=1), "4"),
    ("mlp", Layout(2, (2,), 4, zero=3), "data"),
    ("transformer", Layout(1, (2, 2), 2, zero=3, recompute=True), "0"),
    ("transformer", Layout(2, (2,), 4, recompute=True), "megatron"),
]


@pytest.mark.parametrize(("name", "layout", "way"), SCHEMES)
def test_results_and_communication(name: str, layout: Layout, way: str, tmp_path: Path) -> None:
    plan = plan_of(name, layout, way)
    trace, ends = carry_out(plan, tmp_path)

    small = plan.problem.tables.model
    losses, weights = reference(small, layout.microbatches, STEPS)
    np.testing.assert_allclose(sum(e["losses"] for e in ends), losses, rtol=1e-4)
    for rank, end in enumerate(ends):
        device = Device.__new__(Device)
        device.place(plan, rank)
        own = set(device.nodes_of())
        assert {int(name.partition(".")[0]) for name in end if name != "losses"} <= own
        for (k, i), whole in weights.items():
            if k not in own:
                continue
            state = device.kept(k, i)[1 if layout.zero == 3 else 2]
            np.testing.assert_allclose(
                end[f"{k}.{i}"], device.cut(whole, state).numpy(), rtol=1e-3, atol=1e-5
            )

    assert compare(trace, plan) is None
    program = operations(lower(plan, STEPS))
    assert sorted(program) == list(range(layout.ranks))  # every rank communicates
    assert operations(trace) == program


def test_what_is_not_carried_out_is_refused() -> None:
    layers = [
        {"op": "tokens", "tokens": 16, "width": 16},
        {"op": "swin", "heads": 4, "window": 2},
        {"op": "head", "classes": 8},
    ]
    model = parse({"name": "swin", "batch": 16, "precision": "f32", "layer": layers})
    layout = Layout(1, (2,))
    p = problem_of(model, Cluster(1, 2), layout)
    assert p is not None
    with pytest.raises(ValueError, match="window_partition"):
        check(Plan(layout, p, np.zeros(len(p.node), int), 1.0, 0.0))
    half = parse({"name": "half", "batch": 16, "precision": "bf16", "layer": MODELS["mlp"]})
    p = problem_of(half, Cluster(1, 2), layout)
    assert p is not None
    with pytest.raises(ValueError, match="precision f32"):
        check(Plan(layout, p, np.zeros(len(p.node), int), 1.0, 0.0))
