"""The search against trying everything, its bound, and what it finds on the packaged models."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl2gpu.planner.baselines import baselines
from dl2gpu.planner.links import Cluster
from dl2gpu.planner.model import Model, ModelError, load, packaged, parse
from dl2gpu.planner.plan import Layout, Plan, problem_of, search
from dl2gpu.planner.problem import Problem, stages_of
from dl2gpu.planner.search import descend, dual, exhaustive, lower_bound, optimum


def dense(*widths: int, batch: int = 64, **more: Any) -> Model:
    layers = [{"op": "tokens", "tokens": 4, "width": widths[0]}]
    layers += [{"op": "linear", "width": w} for w in widths[1:]]
    return parse({"name": "dense", "batch": batch, "layer": layers, **more})


def block(batch: int = 16, **more: Any) -> Model:
    layers = [
        {"op": "tokens", "tokens": 16, "width": 64},
        {"op": "linear", "width": 64},
        {"op": "transformer", "heads": 4},
    ]
    return parse({"name": "block", "batch": batch, "layer": layers, **more})


SLOW = Cluster(nodes=4, per_node=2, intra=50e9, inter=2e9, overlap=0.5, flops=50e12)
SMALL = [
    (dense(256, 2048, 256), Layout(1, (4,))),
    (dense(4096, 64, 4096, batch=8), Layout(1, (8,))),
    (dense(512, 4096, 512, 64), Layout(1, (4, 2))),
    (dense(256, 1024, 256, 1024), Layout(2, (4,), 4)),
    (dense(256, 1024, 256, 1024, 256, precision="f32"), Layout(4, (2,), 8)),
    (dense(256, 1024, 256, 1024, 256), Layout(2, (2,), 4, 2)),
    (dense(64, 4096, 64, 4096, batch=1024), Layout(1, (2, 2), zero=1)),
    (dense(64, 4096, 64, batch=1024), Layout(1, (4,), 2, zero=3, recompute=True)),
]


def problem(model: Model, layout: Layout, cluster: Cluster = SLOW) -> Problem:
    p = problem_of(model, cluster, layout)
    assert p is not None
    return p


@pytest.mark.parametrize(("model", "layout"), SMALL, ids=[str(i) for i in range(len(SMALL))])
def test_descent_equals_trying_everything(model: Model, layout: Layout) -> None:
    p = problem(model, layout)
    every = exhaustive(p)
    bound, starts = dual(p)
    found = descend(p, starts)
    assert bound <= every.seconds * (1 + 1e-9)
    assert found.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert p.seconds(found.chosen) == pytest.approx(found.seconds, rel=1e-9)
    for share in (0.0, 0.5, 1.0):
        assert lower_bound(p, share)[0] <= every.seconds * (1 + 1e-9)


def test_a_memory_limit_is_kept_as_by_trying_everything() -> None:
    from dataclasses import replace

    model, layout = dense(512, 4096, 4096, 512, batch=32), Layout(1, (4,))
    free = descend(problem(model, layout))
    p = problem(model, layout)
    plan = Plan(layout, p, free.chosen, free.seconds, 0.0)
    tight = problem(model, layout, replace(SLOW, memory=float(plan.memory.max()) * 0.9))
    every, found = exhaustive(tight), descend(tight, restarts=4)
    assert found.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert Plan(layout, tight, found.chosen, found.seconds, 0.0).fits
    assert found.seconds > free.seconds


def test_elimination_is_the_optimum_of_the_sum() -> None:
    """Chain with a residual connection, against every assignment."""
    rng = np.random.default_rng(5)
    nodes = [rng.integers(0, 50, 3).astype(float) for _ in range(6)]
    pairs = [(0, 1), (1, 2), (2, 3), (0, 3), (3, 4), (4, 5), (3, 5)]
    edges = [(u, v, rng.integers(0, 50, (3, 3)).astype(float)) for u, v in pairs]

    def cost(c: tuple[int, ...]) -> float:
        own = sum(float(n[k]) for n, k in zip(nodes, c, strict=True))
        return own + sum(float(m[c[u], c[v]]) for u, v, m in edges)

    least, chosen = optimum(nodes, edges)
    assert least == min(cost(c) for c in product(range(3), repeat=6))
    assert cost(tuple(chosen)) == least
    with pytest.raises(ValueError, match="residual"):
        optimum(nodes[:4], [(u, v, edges[0][2]) for u in range(4) for v in range(u)])


def test_a_block_with_residuals_equals_the_exact_optimum() -> None:
    from dataclasses import replace

    cluster = replace(SLOW, overlap=0.0)
    p = problem(block(), Layout(1, (2, 4)), cluster)
    # without overlap, memory limit and stages the bound is the optimum
    least, chosen = lower_bound(p, 1.0)
    assert p.seconds(chosen) == pytest.approx(least, rel=1e-9)
    assert descend(p, restarts=6).seconds == pytest.approx(least, rel=1e-9)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_the_running_sums_are_those_of_the_choice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = problem(block(), Layout(1, (2, 2), 2))
    start = np.array([rng.integers(0, n.shape[1]) for n in p.node])
    found = descend(p, [start], restarts=0, sweeps=2)
    assert p.seconds(found.chosen) == pytest.approx(found.seconds, rel=1e-9)


def test_stages_are_cut_evenly_at_the_cuts_only() -> None:
    work = np.array([4.0, 1, 1, 1, 1, 4, 4, 4])
    for pieces in range(1, 5):
        got = stages_of(work, [1, 3, 5, 6], pieces)
        assert got is not None
        ways = [
            [0, *inner, 8]
            for inner in product([1, 3, 5, 6], repeat=pieces - 1)
            if list(inner) == sorted(set(inner))
        ]
        best = min(max(work[a:b].sum() for a, b in pairwise(w)) for w in ways)
        assert max(work[got == k].sum() for k in range(pieces)) == best
        assert list(got) == sorted(got)
    assert stages_of(work, [1], 3) is None


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("vgg13", Cluster(2, 4)), ("vgg16", Cluster(16, 1, inter=10e9)),
        ("transformer", Cluster(4, 4)), ("gpt2", Cluster(4, 8, memory=6 * 2**30)),
        ("swin-t", Cluster(2, 4)),
    ],
)  # fmt: skip
def test_nothing_fixed_is_faster_than_what_is_found(name: str, cluster: Cluster) -> None:
    model = load(name)
    plan = search(model, cluster)
    assert plan.fits
    assert plan.bound <= plan.seconds
    for title, fixed in baselines(model, cluster).items():
        if fixed is not None and fixed.fits:
            assert plan.seconds <= fixed.seconds * (1 + 1e-9), title


def test_a_model_that_fits_nowhere_is_said_to() -> None:
    with pytest.raises(ModelError, match=r"fits 0\.1 GiB.*the least found is"):
        search(dense(4096, 4096, 4096), Cluster(1, 4, memory=0.1 * 2**30))


# --------------------------------------------------------------------------------------------------
# Descriptions


def test_parameters_and_work_of_known_models() -> None:
    """As published: 138 M for VGG-16, 28 M for Swin-T; multiplications and additions are two."""
    assert {"gpt2", "gpt2-xl", "vgg13", "vgg16", "swin-t", "transformer"} <= set(packaged())
    vgg, swin = load("vgg16"), load("swin-t")
    assert vgg.parameters == pytest.approx(138.36e6, rel=1e-3)
    assert sum(n.flops for n in vgg.nodes) / vgg.batch == pytest.approx(2 * 15.5e9, rel=0.01)
    assert swin.parameters == pytest.approx(28.3e6, rel=0.01)
    xl = load("gpt2-xl")
    assert xl.parameters - 50304 * 1600 == pytest.approx(1.5576e9, rel=0.002)
    assert load("gpt2", 64).batch == 64
    assert sum(n.flops for n in load("gpt2", 64).nodes) * 8 == sum(
        n.flops for n in load("gpt2").nodes
    )


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({}, "batch: expected a whole number"),
        ({"batch": 4}, r"expected \[\[layer\]\]"),
        ({"batch": 4, "layer": [{"op": "magic"}]}, "found 'magic'"),
        ({"batch": 4, "layer": [{"op": "linear", "width": 4}]}, "expected tokens or flatten"),
        ({"batch": 4, "layer": [{"op": "pool"}]}, "expected a picture"),
        ({"batch": 4, "layer": [3]}, "expected a table"),
        ({"batch": 4, "precision": "f8", "layer": [{}]}, "bf16 or f32"),
        ({"batch": 4, "precision": [], "layer": [{}]}, "bf16 or f32"),
        (
            {
                "batch": 4,
                "layer": [{"op": "tokens", "width": 6}, {"op": "transformer", "heads": 4}],
            },
            "divisor of the width 6",
        ),
        (
            {"batch": 4, "layer": [{"op": "tokens", "width": 6, "repeat": 1 << 30}]},
            "at most",
        ),
    ],
)  # fmt: skip
def test_wrong_descriptions_are_refused(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse(raw)


def test_a_file_that_is_none(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="expected one of gpt2"):
        load("gpt7")
    path = tmp_path / "x.toml"
    path.write_text("a = [")
    with pytest.raises(ModelError, match="not TOML"):
        load(str(path))
