"""Writes execution traces and Chakra traces as PyTorch and its converter do, for the tests.

Every schema version from one list of calls, so that the same program reads alike from each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

SCHEMAS: Final = (
    "1.0.1", "1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.1.0-chakra.0.0.4",
    "1.1.1-chakra.0.0.4", "1.1.1-newest",
)  # fmt: skip


@dataclass
class Op:
    """A call of one rank."""

    name: str
    pg: str = "0"
    size: int = 64
    dtype: str = "float"
    place: int | None = None
    """The overloaded rank argument: root, peer, or own rank where None."""
    tag: int = 0
    splits: tuple[list[int], list[int]] | None = None
    seq: int | None = None
    """Number in its group; None: counted."""
    wait: bool = False
    tid: int = 1


@dataclass
class Job:
    """The process groups of a job: members by name."""

    groups: dict[str, list[int]] = field(default_factory=lambda: {"0": [0, 1]})
    first: int = 1
    """Number of the first call of each group."""
    backend: str = "cuda:nccl"


_C10D: Final = {
    "allreduce": "c10d::allreduce_", "broadcast": "c10d::broadcast_", "send": "c10d::send",
    "recv": "c10d::recv_", "all_gather": "c10d::allgather_", "barrier": "c10d::barrier",
    "all_to_allv": "c10d::alltoall_base_", "all_to_all": "c10d::alltoall_base_",
    "reduce": "c10d::reduce_", "_reduce_scatter_base": "c10d::_reduce_scatter_base_",
}  # fmt: skip
_WIDTH: Final = {"float": (4, "Float"), "c10::BFloat16": (2, "BFloat16"), "long int": (8, "Long")}


def _node(schema: str, id_: int, name: str, parent: int, values: list[Any], types: list[str],
          tid: int, attrs: dict[str, Any] | None = None) -> dict[str, Any]:  # fmt: skip
    if schema == "1.0.1":
        return {
            "name": name, "id": id_, "rf_id": id_, "parent": parent, "fw_parent": 0, "seq_id": -1,
            "scope": 0, "tid": tid, "fw_tid": 0, "op_schema": "", "inputs": values,
            "input_shapes": [], "input_types": types, "outputs": [], "output_shapes": [],
            "output_types": [],
        }  # fmt: skip
    told = {"rf_id": id_, "fw_parent": 0, "seq_id": -1, "scope": 0, "tid": tid, "op_schema": ""}
    return {
        "id": id_, "name": name, "ctrl_deps": parent,
        "inputs": {"values": values, "shapes": [[] for _ in values], "types": types},
        "outputs": {"values": [], "shapes": [], "types": []},
        "attrs": [
            {"name": k, "type": "string" if isinstance(v, str) else "uint64", "value": v}
            for k, v in (told | (attrs or {})).items()
        ],
    }  # fmt: skip


def nodes(rank: int, ops: Sequence[Op], job: Job, schema: str) -> list[dict[str, Any]]:
    """The nodes in the order of the file: of completion, children before their parents."""
    newest, named = schema == "1.1.1-newest", schema >= "1.0.3"
    config = json.dumps([
        {"pg_name": name, "pg_desc": "default_pg" if name == "0" else "undefined",
         "backend_id": 1000 + i, "backend_config": job.backend,
         "ranks": [] if name == "0" else ranks, "group_size": len(ranks),
         "group_count": len(job.groups)}
        for i, (name, ranks) in enumerate(job.groups.items())
    ])  # fmt: skip
    out = []
    if schema != "1.0.1":
        out.append(_node(schema, 3, "## process_group:init ##", 2, [config], ["String"], 1))
    counted = dict.fromkeys(job.groups, job.first - 1)
    id_ = 10
    for op in ops:
        members = job.groups[op.pg]
        counted[op.pg] += 1
        number = op.seq if op.seq is not None else counted[op.pg]
        width, scalar = _WIDTH[op.dtype]
        own = members.index(rank)
        place = own if op.place is None else op.place
        p2p = op.name in {"send", "recv"}
        tensor = [id_ + 5, id_ + 6, 0, op.size, width, f"cuda:{rank}"]
        sequence: Any = [number, p2p] if newest else number
        pointer = 1000 + list(job.groups).index(op.pg) + (rank << 20 if schema == "1.0.1" else 0)
        desc = "default_pg" if op.pg == "0" else "undefined"
        told: Any = [op.pg, desc] if named else pointer
        ins, outs = op.splits or ([], [])
        values = [sequence, told, place, op.name, ins, outs]
        if op.name != "barrier":
            values.insert(0, tensor if op.name.startswith("all_to_all") else [tensor])
        step = members[1] - members[0] if len(members) > 1 else 1
        if named:
            values += [members[0], step, len(members)] + ([True] if newest else [])
        elif schema != "1.0.1":
            values.append(len(members))
        types = [f"GenericList[Tensor({op.dtype})]"] * (op.name != "barrier")
        attrs = None
        if schema >= "1.1":
            attrs = {
                "collective_name": op.name, "dtype": scalar, "in_msg_nelems": op.size,
                "out_msg_nelems": op.size, "in_split_size": str(ins), "out_split_size": str(outs),
                "global_rank_start": members[0], "global_rank_stride": step, "pg_name": op.pg,
                "pg_desc": desc, "pg_size": len(members),
            }  # fmt: skip
        arguments: list[Any] = [[tensor], "<Object>"]
        if p2p:
            arguments += [place, op.tag]
        out.append(_node(schema, id_ + 1, "record_param_comms", id_, values, types, op.tid, attrs))
        out.append(_node(schema, id_, _C10D.get(op.name, f"c10d::{op.name}"), 2, arguments,
                         [*types, "Object"], op.tid))  # fmt: skip
        out.append(_node(schema, id_ + 2, "aten::add", 2, [tensor], types, op.tid))
        if op.wait:
            nobody: Any = ["", ""] if named else 0
            values = [sequence, nobody, own, "wait", [], []]
            out.append(_node(schema, id_ + 3, "record_param_comms", 2, values, [], op.tid))
        id_ += 10
    return out


def execution_trace(
    rank: int, ops: Sequence[Op], job: Job, schema: str = SCHEMAS[4], indent: int | None = 1
) -> bytes:
    """A whole file."""
    told = "1.1.1-chakra.1.0.0" if schema == "1.1.1-newest" else schema
    head = {"schema": told, "pid": 4000 + rank, "time": "2025-10-09 11:25:07", "start_ts": 1}
    body = head | {"nodes": nodes(rank, ops, job, schema), "finish_ts": 2}
    return json.dumps(body, indent=indent).encode()


# --------------------------------------------------------------------------------------------------
# Chakra


def varint(n: int) -> bytes:
    n &= (1 << 64) - 1
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def attribute(name: str, value: Any, integer: int = 9) -> bytes:
    """An attribute; ``integer``: field of whole numbers (7 int32, 9 int64, 13 uint64, ...)."""
    if isinstance(value, bool):
        body = _field(27, int(value))
    elif isinstance(value, int):
        body = _field(integer, value)
    elif isinstance(value, list):
        body = _field(28, _field(1, bytes(value)))
    else:
        body = _field(29, str(value).encode())
    return _field(1, name.encode()) + body


def chakra_node(
    id_: int, name: str, kind: int, data_deps: Sequence[int] = (), *, packed: bool = True,
    integer: int = 9, values: str = "", types: str = "", **attrs: Any,
) -> bytes:  # fmt: skip
    """A node's message."""
    out = _field(1, id_) + _field(2, name.encode()) + _field(3, kind)
    if packed and data_deps:
        out += _field(5, b"".join(map(varint, data_deps)))
    elif data_deps:
        out += b"".join(_field(5, d) for d in data_deps)
    if values:
        out += _field(8, _field(1, values.encode()) + _field(3, types.encode()))
    for key, value in attrs.items():
        out += _field(10, attribute(key, value, integer))
    return out


def metadata(version: str = "0.0.4", **about: Any) -> bytes:
    out = _field(1, version.encode()) if version else b""
    return out + b"".join(_field(2, attribute(k, v, 13)) for k, v in about.items())


def chakra(messages: Sequence[bytes], first: bytes | None = None) -> bytes:
    """A file of messages."""
    about = metadata(schema="1.1.1-chakra.0.0.4", pid=4000) if first is None else first
    return b"".join(varint(len(m)) + m for m in (about, *messages))
