"""Signatures and conversions mean what they say: each is carried out on real shards."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import arrays_sbp as sharded
import numpy as np
import numpy.typing as npt
import pytest

from dl2gpu.planner.convert import conversions
from dl2gpu.planner.links import Cluster, bytes_sent, grid_links, seconds
from dl2gpu.planner.sbp import OPERATORS, B, P, S, State, label, legal, signatures, states

Array = npt.NDArray[Any]
GRIDS = [(2,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]


def links(grid: tuple[int, ...]) -> Any:
    return grid_links(Cluster(nodes=int(np.prod(grid)), per_node=1), grid)


# --------------------------------------------------------------------------------------------------
# Conversions


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_conversion_gives_the_tensor_back(grid: tuple[int, ...]) -> None:
    shape = (24, 12)
    table = conversions(shape, grid, links(grid), 4)
    rng = np.random.default_rng(0)
    whole = rng.integers(-9, 9, shape)
    assert len(table.states) == len(states(shape, grid)) > 3
    for before, after in product(table.states, repeat=2):
        shards = sharded.scatter(whole, before, grid, rng)
        total = 0.0
        sent = 0
        for step in table.steps(before, after):
            shards = sharded.run(shards, step, grid)
            if step.op != "local":
                n = max(step.count_in, step.count_out) * 4
                total += seconds(step.op, grid[step.dim], n, links(grid)[step.dim])
                groups = int(np.prod(grid)) // grid[step.dim]
                sent += bytes_sent(step.op, grid[step.dim], n) * groups
        np.testing.assert_array_equal(sharded.gather(shards, after, grid), whole)
        i, j = table.index[before], table.index[after]
        assert table.seconds[i, j] == pytest.approx(total, abs=1e-9)
        assert table.bytes[i, j] == sent


def test_one_step_conversions_are_the_collectives_of_their_names() -> None:
    table = conversions((8, 8), (4,), links((4,)), 2)

    def ops(before: int, after: int) -> list[str]:
        return [s.op for s in table.steps((before,), (after,))]

    assert ops(P, B) == ["all_reduce"]
    assert ops(P, S(0)) == ["reduce_scatter"]
    assert ops(S(0), B) == ["all_gather"]
    assert ops(S(0), S(1)) == ["all_to_all"]
    assert ops(B, S(1)) == ["local"]
    assert ops(B, B) == []


def test_a_slow_outer_link_is_spared() -> None:
    """All_reduce over nodes and devices: inside first, so that a part only goes between nodes."""
    cluster = Cluster(nodes=4, per_node=8, intra=300e9, inter=25e9)
    grid = (4, 8)
    table = conversions((1 << 14, 1 << 10), grid, grid_links(cluster, grid), 2)
    steps = table.steps((P, P), (B, B))
    assert [(s.op, s.dim) for s in steps] == [
        ("reduce_scatter", 1), ("all_reduce", 0), ("all_gather", 1),
    ]  # fmt: skip


def test_pieces_that_do_not_lie_together_are_not_gathered() -> None:
    table = conversions((8, 2), (2, 2), links((2, 2)), 2)
    steps = table.steps((S(0), S(0)), (B, S(0)))
    assert steps[0].dim == 1


def test_an_axis_that_cannot_be_cut_is_not() -> None:
    assert not legal((S(0), S(0)), (6, 8), (2, 4))
    assert legal((S(0), S(1)), (6, 8), (2, 4))
    assert label((S(0), P, B)) == "(S(0), P, B)"
    with pytest.raises(KeyError):
        conversions((6, 8), (4,), links((4,)), 2).steps((S(0),), (B,))


# --------------------------------------------------------------------------------------------------
# Signatures


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def attention(q: Array, k: Array, v: Array) -> Array:
    return np.asarray(np.einsum("bhqk,bkhd->bqhd", softmax(np.einsum("bqhd,bkhd->bhqk", q, k)), v))


def packed(x: Array) -> Array:
    """Heads first, then queries, keys and values: 4 heads."""
    y = x.reshape(*x.shape[:2], -1, 3, 2)
    o = attention(y[..., 0, :], y[..., 1, :], y[..., 2, :])
    return o.reshape(*x.shape[:2], -1)


def normed(x: Array, g: Array) -> Array:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1) * g)


def convolved(x: Array, w: Array) -> Array:
    """On a line, cyclic."""
    return np.asarray(
        sum(np.einsum("bcs,kc->bks", np.roll(x, -i, 2), w[..., i]) for i in range(w.shape[2]))
    )


def windows(x: Array) -> Array:
    """Positions of a line in windows of two."""
    return x.reshape(x.shape[0] * x.shape[1] // 2, 2, x.shape[2])


FORWARD: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "matmul": (lambda x, w: x @ w, [(4, 2, 8), (8, 4)]),
    "attention": (attention, [(2, 4, 2, 2), (2, 6, 2, 2), (2, 6, 2, 2)]),
    "packed_attention": (packed, [(2, 3, 24)]),
    "layer_norm": (normed, [(2, 4, 6), (6,)]),
    "convolution": (convolved, [(2, 4, 5), (6, 4, 3)]),
    "pool": (lambda x: x.reshape(*x.shape[:2], -1, 2).max(-1), [(2, 4, 6)]),
    "elementwise": (np.tanh, [(2, 4, 6)]),
    "add": (lambda x, y: x + y, [(2, 4, 6), (2, 4, 6)]),
    "transpose": (lambda x: x.transpose(0, 2, 1), [(2, 4, 6)]),
    "flatten": (lambda x: x.reshape(x.shape[0], 1, -1), [(2, 4, 6)]),
    "window_partition": (windows, [(2, 4, 6)]),
}


def slope(f: Callable[..., Any], operands: list[Array], at: int, grad: Array) -> Array:
    """The gradient of one operand, by central differences."""
    out = np.zeros(operands[at].shape)
    for i in np.ndindex(out.shape):
        values = []
        for h in (1e-5, -1e-5):
            moved = [o.astype(float).copy() for o in operands]
            moved[at][i] += h
            values.append((f(*moved) * grad).sum())
        out[i] = (values[0] - values[1]) / 2e-5
    return out


@pytest.mark.parametrize("name", FORWARD)
def test_signatures_forward_and_backward(name: str) -> None:
    """Each device works on what it has; together that is the operator, and its gradients."""
    f, shapes = FORWARD[name]
    op, rng, grid = OPERATORS[name], np.random.default_rng(1), (2,)
    operands = [rng.normal(size=s) for s in shapes]
    result = np.asarray(f(*operands))
    grad = rng.normal(size=result.shape)
    for sig in signatures(op):
        parts = [
            sharded.scatter(o, (s,), grid, rng) for o, s in zip(operands, sig.inputs, strict=True)
        ]
        out: sharded.Shards = {(i,): np.asarray(f(*(p[i,] for p in parts))) for i in range(2)}
        np.testing.assert_allclose(sharded.gather(out, (sig.output,), grid), result, atol=1e-9)
        grads = sharded.scatter(grad, (sig.grad_output,), grid, rng)
        for k in range(len(operands)):
            local: sharded.Shards = {
                (i,): slope(f, [p[i,] for p in parts], k, grads[i,]) for i in range(2)
            }
            whole = sharded.gather(local, (sig.grad_inputs[k],), grid)
            np.testing.assert_allclose(whole, slope(f, operands, k, grad), atol=1e-4)
            assert local[0,].shape == parts[k][0,].shape, sig


def test_an_embedding_is_a_product_with_one_hot_rows() -> None:
    rng = np.random.default_rng(2)
    ids, table = rng.integers(0, 6, (4, 2)), rng.normal(size=(6, 8))
    for sig in signatures(OPERATORS["embedding"]):
        at = sharded.scatter(ids, (sig.inputs[0],), (2,), rng)
        rows = sharded.scatter(table, (sig.inputs[1],), (2,), rng)
        out: sharded.Shards = {}
        for i in range(2):
            first = i * 3 if sig.name == "v" else 0
            here = np.eye(6)[at[i,]][..., first : first + len(rows[i,])]
            out[i,] = here @ rows[i,]
        got: State = (sig.output,)
        np.testing.assert_allclose(
            sharded.gather(out, got, (2,)), np.take(table, ids, 0), atol=1e-9
        )


def test_the_loss_over_a_split_vocabulary_reduces_inside() -> None:
    sigs = {s.name: s for s in signatures(OPERATORS["cross_entropy"])}
    assert sigs["v"].output == B
    assert sigs["v"].grad_inputs[0] == S(2)
    assert sigs["b"].output == P


def test_what_may_not_be_split_is_not() -> None:
    def names(op: str) -> set[str]:
        return {s.name for s in signatures(OPERATORS[op])}

    assert "e" not in names("layer_norm")
    assert not {"k", "d"} & names("attention")
    assert "s" not in names("convolution")
    assert "t" not in names("window_partition")
    assert "partial" not in names("elementwise") | names("attention") | names("layer_norm")
