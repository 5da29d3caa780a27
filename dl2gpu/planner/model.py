"""Models: the operators of a network and the tensors between them, from a small TOML file.

The file names the batch, the numbers' precision and a list of layers, each of which may be
repeated (docs/planner.md). Sizes are of one step over the whole batch; the batch is the axis ``b``
of every operator.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any, Final

from dl2gpu.planner.sbp import OPERATORS, Operator

__all__ = ["Edge", "Model", "ModelError", "Node", "Precision", "load", "packaged", "parse"]

_MOST_NODES: Final = 20_000
_MOST: Final = 1 << 40


class ModelError(ValueError):
    """A description is wrong; says where, what was expected and what was found."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of an element of parameters, gradients and activations; of the optimiser a parameter.

    bf16: Adam keeps two moments and a copy of the parameter in 32 bits (Rajbhandari et al., "ZeRO",
    SC 2020, section 3.1). f32: two moments.
    """

    width: int
    optimiser: int
    dtype: str


PRECISION: Final = {"bf16": Precision(2, 12, "bf16"), "f32": Precision(4, 8, "f32")}


@dataclass(frozen=True, slots=True)
class Node:
    """An operator with the sizes of its axes."""

    name: str
    operator: Operator
    sizes: tuple[tuple[str, int], ...]
    """Of each axis; ``b`` is the batch."""
    units: tuple[tuple[str, int], ...] = ()
    """Axes of which only so many whole units can be dealt out: heads, windows."""
    flops: int = 0
    """Forward, of the whole batch."""
    role: str = ""
    """Of a product in the pattern of Megatron: ``column``, ``row``, or neither."""
    block: int = 0
    """Layers of the description, numbered through; a pipeline is cut between them."""

    def shape(self, operand: int) -> tuple[int, ...]:
        """Of an operand's tensor, or of the result's: -1."""
        sizes = dict(self.sizes)
        axes = self.operator.output if operand < 0 else self.operator.inputs[operand]
        out = {a: sizes[a] for a in axes}
        for which, axis, factor in self.operator.scaled:
            if which == operand:
                out[axis] *= sizes[factor] if isinstance(factor, str) else factor
        return tuple(out.values())

    @property
    def parameters(self) -> int:
        """Elements of the operator's parameters."""
        op = self.operator
        return sum(prod(self.shape(i)) for i in op.weights)

    @property
    def operands(self) -> tuple[int, ...]:
        """The inputs that come from another node, or from the data."""
        return tuple(i for i in range(len(self.operator.inputs)) if i not in self.operator.weights)


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor: the result of ``source`` is operand ``operand`` of ``target``."""

    source: int
    target: int
    operand: int


@dataclass(frozen=True, slots=True)
class Model:
    """Nodes in an order of execution, and the tensors between them."""

    name: str
    batch: int
    precision: Precision
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    description: dict[str, Any] = field(default_factory=dict, compare=False)
    """What it was made of, with its own batch."""

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(n.parameters for n in self.nodes)

    def with_batch(self, batch: int) -> Model:
        """The same network with another batch."""
        if batch == self.batch:
            return self

        def scaled(node: Node) -> Node:
            sizes = tuple((a, batch if a == "b" else n) for a, n in node.sizes)
            return replace(node, sizes=sizes, flops=node.flops * batch // self.batch)

        return replace(self, batch=batch, nodes=tuple(scaled(n) for n in self.nodes))

    def cuts(self) -> list[int]:
        """Where a pipeline may be cut: before these nodes only one tensor passes, and a block ends.

        Node numbers, increasing.
        """
        until: dict[int, int] = {}
        for e in self.edges:
            until[e.source] = max(e.target, until.get(e.source, 0))
        passing = [0] * (len(self.nodes) + 1)
        for source, target in until.items():
            passing[source + 1] += 1
            passing[target + 1] -= 1
        out, open_ = [], 0
        for at in range(1, len(self.nodes)):
            open_ += passing[at]
            same = self.nodes[at].block == self.nodes[at - 1].block
            if not same and open_ == 1:
                out.append(at)
        return out


# --------------------------------------------------------------------------------------------------
# Reading


def packaged() -> dict[str, Path]:
    """Names of the models that come with the package, and their files."""
    folder = resources.files("dl2gpu.planner") / "models"
    return {Path(str(f)).stem: Path(str(f)) for f in folder.iterdir() if f.name.endswith(".toml")}


def load(name: str, batch: int | None = None) -> Model:
    """A model by its packaged name or by the path of its TOML file.

    Raises:
        ModelError: there is no such model, or its description is wrong.
    """
    known = packaged()
    path = known.get(name, Path(name))
    try:
        with path.open("rb") as f:
            text = f.read(1 << 20).decode()
    except (OSError, UnicodeDecodeError) as e:
        raise ModelError(
            f"model {name}: expected one of {', '.join(sorted(known))}, or a TOML file: {e}"
        ) from e
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise ModelError(f"{path}: not TOML: {e}") from e
    model = parse(raw, str(path))
    return model if batch is None else model.with_batch(batch)


@dataclass
class _Builder:
    """Grows a model layer by layer; the current tensor has axes b, t, e or b, c, s."""

    source: str
    batch: int
    tokens: int = 1
    width: int = 0
    side: int = 0
    """Of the picture; 0: the tensor is one of tokens."""
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    last: int = -1
    block: int = 0
    prefix: str = ""

    def add(
        self, name: str, op: str, sizes: dict[str, int], *,
        units: dict[str, int] | None = None, flops: int = 0, role: str = "", also: int = -1,
    ) -> int:  # fmt: skip
        if len(self.nodes) >= _MOST_NODES:
            raise ModelError(f"{self.source}: expected at most {_MOST_NODES} operators, found more")
        operator = OPERATORS[op]
        sizes = {"b": self.batch} | sizes
        axes = sorted(set("".join(operator.inputs) + operator.output))
        at = len(self.nodes)
        node = Node(
            self.prefix + name, operator, tuple((a, sizes[a]) for a in axes),
            tuple((units or {}).items()), flops, role, self.block,
        )  # fmt: skip
        self.nodes.append(node)
        operands = node.operands
        if self.last >= 0:
            self.edges.append(Edge(self.last, at, operands[0]))
        if also >= 0:
            self.edges.append(Edge(also, at, operands[1]))
        self.last = at
        return at

    # -- tokens

    def matmul(self, name: str, out: int, role: str = "") -> int:
        t, i = self.tokens, self.width
        self.width = out
        flops = 2 * self.batch * t * i * out
        return self.add(name, "matmul", {"t": t, "i": i, "o": out}, flops=flops, role=role)

    def each(self, name: str, op: str = "elementwise", also: int = -1) -> int:
        return self.add(name, op, {"t": self.tokens, "e": self.width}, also=also)

    def attend(self, heads: int, window: int, three: int) -> None:
        """``window``: keys that a query sees; ``three``: the width of the packed operand."""
        self.width = three // 3
        flops = 4 * self.batch * self.tokens * window * self.width
        sizes = {"t": self.tokens, "h": self.width}
        self.add("attention", "packed_attention", sizes, units={"h": heads}, flops=flops)

    def transformer(self, heads: int, mlp: int, window: int = 0) -> None:
        width, enters = self.width, self.last
        if heads < 1 or width % heads:
            raise ModelError(
                f"{self.source}: heads: expected a divisor of the width {width}, found {heads}"
            )
        self.each("norm1", "layer_norm")
        if window:
            self.add("partition", "window_partition", {"t": self.tokens, "c": width})
        self.matmul("qkv", 3 * width, "column")
        self.attend(heads, window or self.tokens, 3 * width)
        self.matmul("projection", width, "row")
        if window:
            self.add("merge", "window_partition", {"t": self.tokens, "c": width})
        middle = self.each("add1", "add", also=enters) if enters >= 0 else self.last
        self.each("norm2", "layer_norm")
        self.matmul("up", mlp * width, "column")
        self.each("gelu")
        self.matmul("down", width, "row")
        self.each("add2", "add", also=middle)

    # -- pictures

    def convolution(self, out: int, kernel: int, stride: int) -> None:
        c = self.width
        self.side = self.side // stride
        s = self.side**2
        flops = 2 * self.batch * s * c * out * kernel**2
        # a strided convolution is counted by its result; both have the axis s
        sizes = {"c": c, "k": out, "s": s, "w": kernel**2}
        self.add("convolution", "convolution", sizes, flops=flops)
        self.width = out
        self.add("relu", "elementwise", {"t": out, "e": s})

    def pool(self, by: int) -> None:
        before, self.side = self.side**2, self.side // by
        self.add("pool", "pool", {"c": self.width, "s": before, "r": self.side**2})

    def flatten(self) -> None:
        self.add("flatten", "flatten", {"c": self.width, "s": self.side**2, "t": 1})
        self.width, self.tokens, self.side = self.width * self.side**2, 1, 0


def parse(raw: dict[str, Any], source: str = "model") -> Model:
    """A model of the parsed TOML file.

    Raises:
        ModelError: names ``source``, the layer and the key, what was expected and what was found.
    """
    name = raw.get("name", Path(source).stem)
    if not isinstance(name, str) or not 0 < len(name) <= 100:
        raise ModelError(f"{source}: name: expected a short text, found {name!r}")
    kind = raw.get("precision", "bf16")
    if not isinstance(kind, str) or kind not in PRECISION:
        raise ModelError(f"{source}: precision: expected bf16 or f32, found {kind!r}")
    batch = _whole(raw, "batch", source)
    layers = raw.get("layer")
    if not isinstance(layers, list) or not layers:
        raise ModelError(f"{source}: expected [[layer]] tables, found {type(layers).__name__}")
    build = _Builder(source, batch)
    for number, layer in enumerate(layers):
        where = f"{source}: layer {number + 1}"
        if not isinstance(layer, dict):
            raise ModelError(f"{where}: expected a table, found {type(layer).__name__}")
        repeat = _whole(layer, "repeat", where, 1)
        if repeat * 2 > _MOST_NODES:
            raise ModelError(f"{where}: repeat: expected at most {_MOST_NODES // 2}")
        for k in range(repeat):
            build.block += 1
            kind_ = str(layer.get("op"))[:40]
            title = str(layer.get("name", kind_))[:40]
            build.prefix = f"{title}{f'.{k}' if repeat > 1 else ''}."
            _layer(build, kind_, layer, where)
    if not build.nodes:
        raise ModelError(f"{source}: expected layers with operators, found none")
    return Model(name, batch, PRECISION[kind], tuple(build.nodes), tuple(build.edges), raw)


def _whole(table: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = table.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
        raise ModelError(f"{where}: {key}: expected a whole number of 1 or more, found {value!r}")
    return value


def _layer(build: _Builder, kind: str, layer: dict[str, Any], where: str) -> None:
    def get(key: str, default: int | None = None) -> int:
        return _whole(layer, key, where, default)

    if kind in ("convolution", "pool", "flatten") and not build.side:
        raise ModelError(f"{where}: {kind}: expected a picture layer before it")
    if kind in ("linear", "transformer", "swin", "merge", "head", "norm") and (
        build.side or not build.width
    ):
        raise ModelError(f"{where}: {kind}: expected tokens or flatten before it")
    match kind:
        case "picture":
            build.side, build.width = get("side"), get("channels", 3)
        case "tokens":
            build.tokens, build.width = get("tokens", 1), get("width")
        case "embedding":
            build.tokens, build.width = get("tokens"), get("width")
            sizes = {"t": build.tokens, "v": get("vocabulary"), "e": build.width}
            build.add("lookup", "embedding", sizes)
        case "transformer":
            build.transformer(get("heads"), get("mlp", 4))
        case "swin":
            build.transformer(get("heads"), get("mlp", 4), get("window", 7) ** 2)
        case "linear":
            build.matmul("matmul", get("width"), str(layer.get("role", "")))
            if layer.get("activation", False):
                build.each("relu")
        case "merge":
            sizes = {"t": build.tokens, "c": build.width}
            build.tokens, build.width = max(build.tokens // 4, 1), build.width * 4
            sizes |= {"u": build.tokens, "e": build.width}
            build.add("gather", "patch_merging", sizes)
            build.matmul("matmul", build.width // 2)
        case "norm":
            build.each("norm", "layer_norm")
        case "convolution":
            build.convolution(get("channels"), get("kernel", 3), get("stride", 1))
        case "pool":
            build.pool(get("by", 2))
        case "flatten":
            build.flatten()
        case "head":
            build.matmul("matmul", get("classes"), "column")
            build.add("loss", "cross_entropy", {"t": build.tokens, "v": build.width})
        case _:
            raise ModelError(
                f"{where}: op: expected picture, tokens, embedding, transformer, swin, merge, "
                f"linear, norm, convolution, pool, flatten or head, found {kind!r}"
            )
    if max(build.width, build.tokens, build.side**2) > _MOST:
        raise ModelError(f"{where}: expected axes of at most 2^40 elements")
