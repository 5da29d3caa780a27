"""Training jobs of real models: a model, a scheme in letters, and the program of each rank.

The schemes are those that people write down: ``dp8,tp4,pp4,m16`` is data parallel over 8, tensor
parallel over 4, 4 pipeline stages, 16 microbatches. They are fixed choices of the planner's, which
lowers them to programs: with message sizes of the model, and every conversion a collective.

* tensor parallel: products by columns, then by rows (Shoeybi et al., arXiv 1909.08053); with ``sp``
  norms and residuals are split along the tokens (Korthikanti et al., arXiv 2205.05198);
* context parallel: everything is split along the tokens, attention along the heads: all_to_all
  before and after it (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509), or all_gather of the
  tokens where the heads do not divide;
* expert parallel: every dense block of two products is a layer of experts, which tokens reach by an
  all_to_all, and leave by another; the experts' gradients are reduced over the other data parallel
  ranks only (Lepikhin et al., "GShard", ICLR 2021, with a capacity factor of 1 and one expert a
  token);
* ZeRO stages 1 to 3 (Rajbhandari et al., SC 2020); GPipe, 1F1B and interleaved 1F1B.

Every step ends in two all_reduces of all ranks, of the gradients' norm and of the loss, and the
host waits for everything. So nobody passes the end of a step in which anybody is missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from dl2gpu.planner.baselines import batch_split, chosen, megatron_split
from dl2gpu.planner.links import Cluster
from dl2gpu.planner.lower import Blocks, lower, row
from dl2gpu.planner.model import Model, Node, load
from dl2gpu.planner.plan import Layout, Plan, problem_of
from dl2gpu.planner.sbp import B, P, State, local_size
from dl2gpu.planner.schedule import ScheduleError
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.schema import DTYPE_BYTES, Trace

__all__ = ["DIMENSIONS", "Scheme", "lowered", "plan_of"]

DIMENSIONS: Final = ("data", "expert", "context", "tensor")
"""Of the grid of a stage, the last over neighbouring ranks."""
_DTYPE: Final = {name: code for code, name in enumerate(DTYPE_BYTES)}
_MOST_RANKS: Final = 1 << 16
_NUMBERS: Final = {
    "dp": "data", "ep": "expert", "cp": "context", "tp": "tensor", "pp": "stages", "v": "pieces",
    "m": "microbatches", "zero": "zero", "b": "samples",
}  # fmt: skip
_WORDS: Final = {"gpipe": "gpipe", "sp": "sequence", "recompute": "recompute"}


@dataclass(frozen=True, slots=True)
class Scheme:
    """A parallel layout. Ranks: data x context x tensor x stages; experts are among the data."""

    data: int = 1
    expert: int = 1
    """Divides ``data``: so many data parallel ranks hold different experts."""
    context: int = 1
    tensor: int = 1
    stages: int = 1
    pieces: int = 1
    """Of the model on each stage; above 1: interleaved."""
    microbatches: int = 1
    zero: int = 0
    samples: int = 1
    """Of a microbatch on a rank."""
    gpipe: bool = False
    sequence: bool = False
    recompute: bool = False

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return self.data * self.context * self.tensor * self.stages

    @property
    def grid(self) -> dict[str, int]:
        """Sizes of the :data:`DIMENSIONS` of a stage that are more than one rank wide."""
        sizes = (self.data // self.expert, self.expert, self.context, self.tensor)
        return {name: n for name, n in zip(DIMENSIONS, sizes, strict=True) if n > 1}

    @staticmethod
    def parse(text: str) -> Scheme:
        """Reads ``dp8,tp4,pp4,cp2,ep4,v2,m16,b1,zero1,sp,gpipe,recompute``, in any order.

        Raises:
            InputError: says which part is wrong, and what was expected.
        """
        found: dict[str, int | bool] = {}
        for part in text.split(","):
            match = re.fullmatch(r"([a-z]+)([0-9]{1,6})?", part.strip())
            key = match and (_WORDS if match[2] is None else _NUMBERS).get(match[1])
            if match is None or key is None:
                raise InputError(
                    f"scheme: expected parts like {', '.join(f'{k}2' for k in _NUMBERS)}, "
                    f"{', '.join(_WORDS)}; found {part.strip()!r}"
                )
            if key in found:
                raise InputError(f"scheme: {match[1]} stands twice in {text!r}")
            found[key] = True if match[2] is None else int(match[2])
        scheme = replace(Scheme(), **found)  # type: ignore[arg-type]
        scheme.check()
        return scheme

    def check(self) -> None:
        """Raises InputError where the numbers do not fit each other."""
        sizes = [self.data, self.expert, self.context, self.tensor, self.stages, self.pieces,
                 self.microbatches, self.samples]  # fmt: skip
        if min(sizes) < 1 or self.zero not in range(4):
            raise InputError("scheme: expected numbers of 1 or more, and zero0 to zero3")
        if self.data % self.expert:
            raise InputError(
                f"scheme: expected ep to divide dp, found ep{self.expert} and dp{self.data}"
            )
        if not 2 <= self.ranks <= _MOST_RANKS:
            raise InputError(f"scheme: expected 2 to {_MOST_RANKS} ranks, found {self.ranks}")
        if self.pieces > 1 and (self.gpipe or self.microbatches % self.stages or self.stages < 2):
            raise InputError(
                "scheme: v (interleaved) needs two stages or more, a multiple of them for m, and "
                "no gpipe"
            )

    def __str__(self) -> str:
        default = Scheme()
        numbers = [
            f"{k}{getattr(self, name)}"
            for k, name in _NUMBERS.items()
            if getattr(self, name) != getattr(default, name)
        ]
        return ",".join([*numbers, *(k for k, name in _WORDS.items() if getattr(self, name))])


def _context_split(node: Node) -> tuple[str, ...]:
    if node.operator.name == "packed_attention":
        return ("h", "whole")
    return ("t", "whole")


def _sequence_split(node: Node) -> tuple[str, ...]:
    if node.operator.name in ("layer_norm", "add"):
        return ("t", "whole")
    return megatron_split(node)


def plan_of(model: str | Model, scheme: Scheme) -> Plan:
    """The scheme as a plan of the planner, whatever the memory of a device.

    Args:
        model: name of a packaged model, path of a TOML file, or a model; its batch does not matter.
        scheme: what :meth:`Scheme.parse` gives.

    Raises:
        InputError: the model cannot be laid out so.
        ModelError: there is no such model.
    """
    found = load(model) if isinstance(model, str) else model
    found = found.with_batch(scheme.data * scheme.microbatches * scheme.samples)
    cluster = Cluster(nodes=-(-scheme.ranks // 8), per_node=8)
    layout = Layout(
        scheme.stages, tuple(scheme.grid.values()), scheme.microbatches, scheme.pieces, scheme.zero,
        scheme.recompute, "gpipe" if scheme.gpipe else "1f1b",
    )  # fmt: skip
    ways = {
        "data": batch_split, "expert": batch_split, "context": _context_split,
        "tensor": _sequence_split if scheme.sequence else megatron_split,
    }  # fmt: skip
    p = problem_of(found, cluster, layout)
    if p is None:
        raise InputError(
            f"{found.name} as {scheme}: expected a layout that the model can be cut into, found "
            f"{scheme.stages * scheme.pieces} pieces for {len(found.cuts()) + 1} that can be told "
            "apart, or sizes that do not divide"
        )
    choice = chosen(p, tuple(ways[name] for name in scheme.grid))
    return Plan(layout, p, choice, p.seconds(choice), 0.0)


class _JobBlocks(Blocks):
    """Blocks with experts, and with the collectives of all ranks at the end of a step."""

    def __init__(self, plan: Plan, scheme: Scheme) -> None:
        super().__init__(plan)
        names = list(scheme.grid)
        self.experts = names.index("expert") + 1 if "expert" in names else None
        self.everybody = len(names) + 1
        nodes = self.model.nodes
        # the first product of a dense block, and the node after its last
        self.products = {i for i, n in enumerate(nodes) if n.name.endswith((".up", ".down"))}
        self.first = {i for i in self.products if nodes[i].name.endswith(".up")}
        self.after = {
            e.target for e in self.model.edges if nodes[e.source].name.endswith(".down")
        }  # fmt: skip

    def entering(self, node: int, phase: str) -> list[tuple[int, ...]]:
        """Tokens go to their experts and come back; their gradients as well."""
        del phase
        if self.experts is None or node not in self.first | self.after:
            return []
        n, c = self.model.nodes[node], self.tables.nodes[node]
        operand = n.operands[0]
        state = c.state(int(self.plan.chosen[node]), operand)
        count = local_size(state, n.shape(operand), self.setting.grid)
        name = "dispatch" if node in self.first else "combine"
        return [row("all_to_all", name, node, dim=self.experts, count=count, dtype=self.dtype)]

    def gradient(self, node: int, operand: int) -> State:
        """Experts differ along their dimension: their gradients are not summed there."""
        state = super().gradient(node, operand)
        if self.experts is None or node not in self.products:
            return state
        at = self.experts - 1
        return (*state[:at], B if state[at] == P else state[at], *state[at + 1 :])

    def ending(self) -> list[tuple[int, ...]]:
        """The norm of the gradients and the mean of the loss, of all ranks."""
        return [
            row("all_reduce", name, -1, dim=self.everybody, stream=2, count=1, dtype=_DTYPE["f32"])
            for name in ("gradient_norm", "mean_loss")
        ]


def lowered(model: str | Model, scheme: Scheme, steps: int = 2, name: str | None = None) -> Trace:
    """The whole program of a training job: a trace of ``steps`` steps in which nothing is wrong.

    Raises:
        InputError: the model cannot be laid out so.
        ModelError: there is no such model.
    """
    plan = plan_of(model, scheme)
    try:
        return lower(plan, steps, name, _JobBlocks(plan, scheme))
    except ScheduleError as e:
        raise InputError(f"{scheme}: {e}") from e
