"""The nodes of a Chakra trace in program order, from protobuf or from JSON.

Program order is one that keeps all dependencies; where they leave it open, that of the numbers.
Source: FORMATS.md 4.2 (protobuf), 4.3 (JSON).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dl2gpu.trace import chakra_kernel as kernel
from dl2gpu.trace.chakra_schema import ATTRIBUTES, attribute, metadata_class, node_class
from dl2gpu.trace.execution_trace_nodes import Nodes, read_nodes
from dl2gpu.trace.inputs import InputError

__all__ = ["COMMUNICATION", "Graph", "Node", "from_json", "from_protobuf"]

SEND: Final = 5
RECV: Final = 6
COLLECTIVE: Final = 7
COMMUNICATION: Final = (SEND, RECV, COLLECTIVE)
_LARGEST_NODE: Final = 4 << 20
"""Bytes of a node that is decoded; what it takes in memory is a multiple of them."""
_AT_ONCE: Final = 1 << 16


@dataclass(slots=True)
class Node:
    """A communication node."""

    kind: int
    name: str
    attrs: dict[str, Any]
    values: str = ""
    types: str = ""


@dataclass(slots=True)
class Graph:
    """What a file holds."""

    nodes: list[Node] = field(default_factory=list)
    """The communication nodes, in program order."""
    total: int = 0
    """All nodes."""
    about: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    lost: list[str] = field(default_factory=list)


# --------------------------------------------------------------------------------------------------
# Protobuf


def from_protobuf(data: bytes) -> Graph:
    """The graph of a file of messages.

    Memory: the file, and up to 80 bytes a message and 40 a dependency (which have at least 3 and 1
    in the file).

    Raises:
        InputError: no message of it is one of a Chakra trace.
    """
    from google.protobuf.message import DecodeError

    raw = np.frombuffer(data, dtype=np.uint8)
    state = np.zeros(kernel.SLOTS, dtype=np.int64)
    got = np.zeros(1, dtype=np.int64)
    parts = []
    while True:
        rows = np.empty((_AT_ONCE, kernel.WIDTH), dtype=np.int64)
        filled = kernel.frame(raw, state, got, rows)
        parts.append(rows[:filled].copy())
        if not state[kernel.FULL]:
            break
    rows = np.concatenate(parts)
    graph = Graph()
    if len(rows) and _metadata(data, rows[0], graph):
        rows = rows[1:]
    bad = rows[:, kernel.C_KIND] < 0
    at = int(state[kernel.AT])
    if bad.all() or (len(rows) == 0 and not graph.version and not graph.about):
        raise InputError(
            "expected messages of a Chakra trace (metadata, then nodes), found none: a file of "
            "another schema, or damaged from its beginning"
        )
    if bad.any():
        graph.lost.append(f"{int(bad.sum())} messages that are no nodes were left out")
        rows = rows[~bad]
    if state[kernel.BAD]:
        graph.lost.append(f"the file ends within a message at byte {at}")
    elif state[kernel.BEHIND] and data[at:].strip(b"\0"):
        graph.lost.append(f"{len(data) - at} bytes stand behind the end of the messages")
    graph.total = len(rows)
    number = rows[:, kernel.C_ID]
    count = int(rows[:, kernel.C_DEPS].sum())
    node, on = np.empty(count, np.int32), np.empty(count, np.int64)
    edges = kernel.dependencies(raw, got, np.ascontiguousarray(rows), node, on)
    order = _program_order(number, node[:edges], on[:edges], graph)
    wanted = np.isin(rows[:, kernel.C_KIND], COMMUNICATION)
    damaged = large = 0
    make = node_class()
    for start, end in rows[order[wanted[order]]][:, [kernel.C_START, kernel.C_END]].tolist():
        if end - start > _LARGEST_NODE:
            large += 1
            continue
        try:
            found = make.FromString(data[start:end])
        except DecodeError:
            damaged += 1
            continue
        graph.nodes.append(
            Node(
                kind=found.type,
                name=found.name.decode("utf-8", "replace"),
                attrs=dict(attribute(a) for a in found.attr[:ATTRIBUTES]),
                values=found.inputs.values.decode("utf-8", "replace"),
                types=found.inputs.types.decode("utf-8", "replace"),
            )
        )
    if damaged:
        graph.lost.append(f"{damaged} damaged communication nodes were left out")
    if large:
        graph.lost.append(f"{large} nodes of more than {_LARGEST_NODE >> 20} MiB were left out")
    return graph


def _metadata(data: bytes, row: npt.NDArray[np.int64], graph: Graph) -> bool:
    """Is the first message the metadata? Files without any begin with a node."""
    from google.protobuf.message import DecodeError

    start, end = int(row[kernel.C_START]), int(row[kernel.C_END])
    if int(row[kernel.C_ID]) >= 0 or end - start > _LARGEST_NODE:
        return False
    try:
        found = metadata_class().FromString(data[start:end])
    except DecodeError:
        return False
    graph.version = found.version.decode("utf-8", "replace")
    graph.about = dict(attribute(a) for a in found.attr[:ATTRIBUTES])
    return True


def _program_order(
    number: npt.NDArray[np.int64], node: npt.NDArray[np.int32], on: npt.NDArray[np.int64],
    graph: Graph,
) -> npt.NDArray[np.int64]:  # fmt: skip
    """Rows in program order. ``node`` (a row) depends on the node of number ``on``."""
    by_number = np.argsort(number, kind="stable")
    if not len(node):
        return by_number
    position = np.empty(len(number), np.int32)
    position[by_number] = np.arange(len(number), dtype=np.int32)
    rising = number[by_number]
    found = np.minimum(np.searchsorted(rising, on), len(rising) - 1)
    # real files have dependencies on nodes that are not there, and of nodes on themselves
    known = (rising[found] == on) & (found != position[node])
    before, after = found[known].astype(np.int32), position[node[known]]
    if (before < after).all():
        return by_number
    waiting = np.bincount(after, minlength=len(number)).astype(np.int32)
    by_before = np.argsort(before, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(before, minlength=len(number)))])
    order = np.full(len(number), -1, np.int32)
    done = kernel.in_order(
        waiting, first.astype(np.int64), after[by_before], np.empty(len(number), np.int32), order
    )
    if done < len(number):
        graph.lost.append(
            f"the dependencies of {len(number) - done} nodes form a circle: they are taken in the "
            "order of their numbers"
        )
        rest = np.ones(len(number), np.bool_)
        rest[order[:done]] = False
        order[done:] = np.flatnonzero(rest)
    return by_number[order]


# --------------------------------------------------------------------------------------------------
# JSON

_KEYS: Final = (
    "comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "is_cpu_op", "pg_name",
    "tensor_size", "involved_dim",
)  # fmt: skip


def from_json(data: bytes, found: Nodes) -> Graph:
    """The graph of a ``workload_graph``; ``found`` says what of its nodes was lost.

    Memory: the file, 40 bytes a node and 24 a dependency.
    """
    graph = Graph()
    numbers: list[int] = []
    owner: list[int] = []
    on: list[int] = []
    wanted: dict[int, Node] = {}
    odd = 0
    for one in read_nodes(data, None, found):
        number, kind = one.get("Id", one.get("id")), one.get("NodeType", one.get("type"))
        if type(number) is not int or not 0 <= number < 1 << 62:
            odd += 1
            continue
        at = len(numbers)
        numbers.append(number)
        for key in ("ctrlDeps", "ctrl_deps", "data_deps"):
            deps = one.get(key)
            for d in deps if isinstance(deps, list) else ():
                if type(d) is int and 0 <= d < 1 << 62:
                    owner.append(at)
                    on.append(d)
        name = one.get("Name", one.get("name"))
        if kind in COMMUNICATION and isinstance(name, str):
            wanted[at] = Node(kind, name, {k: one[k] for k in _KEYS if k in one})
    graph.total = len(numbers)
    if odd:
        graph.lost.append(f"{odd} nodes without a number were left out")
    if numbers:
        order = _program_order(
            np.array(numbers, np.int64), np.array(owner, np.int32), np.array(on, np.int64), graph
        )
        graph.nodes = [wanted[at] for at in _of(order, wanted)]
    return graph


def _of(order: npt.NDArray[np.int64], wanted: Iterable[int]) -> list[int]:
    keep = np.zeros(len(order), np.bool_)
    keep[list(wanted)] = True
    out: list[int] = order[keep[order]].tolist()
    return out
