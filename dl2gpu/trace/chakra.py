"""Reader of Chakra execution traces: files of protobuf messages (``.et``), and JSON.

Chakra holds the graph of what one rank does, for simulators and replay. Converted from PyTorch it
is a window of a run, with host and device nodes of the same call; generated, it is a program. It
knows a process group by its name only: who its members are is not in it, so nothing is claimed of
calls that only position would match. Source: FORMATS.md sections 4.2 to 4.4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from dl2gpu.trace.calls import Call, Group, Record, assemble, doubt_ranks, natural, records_of
from dl2gpu.trace.chakra_frames import is_framed
from dl2gpu.trace.chakra_nodes import RECV, SEND, Graph, Node, from_json, from_protobuf
from dl2gpu.trace.execution_trace_nodes import Nodes, lost_nodes, utf8
from dl2gpu.trace.files import cut_reason, read_bytes
from dl2gpu.trace.flight_recorder_names import operation
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.schema import FLAG, Trace

__all__ = ["FORMAT", "read"]

FORMAT: Final = "chakra"

_COMM_TYPE: Final = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all",
    "reduce_scatter", "reduce_scatter", "barrier",
)  # fmt: skip
_KERNEL: Final = re.compile(r"nccl\w*Kernel_([A-Za-z]+)")
_PIECE: Final = re.compile(r"\((\d+)\)$")
_DTYPE: Final = re.compile(r"Tensor\(([^()]*)\)")
_TENSOR: Final = re.compile(r"\[\d{1,18}, \d{1,18}, \d{1,18}, (\d{1,18}), \d{1,18}, '")
_ON_RANKS: Final = frozenset({"gather", "scatter"})


def read(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes] = read_bytes
) -> tuple[Trace, list[Input]]:
    """Read Chakra traces of any number of jobs into one trace.

    Memory is that of one file (:mod:`chakra_nodes` says how much), and the calls of all.

    Args:
        files: traces as discovery found them; their order numbers the jobs.
        load: gives the decompressed content of a file; may raise :class:`InputError`.

    Returns:
        The trace, and what became of each file, in the order of ``files``.
    """
    records = records_of(files, load, _record)
    doubt_ranks(records)
    return assemble(records, FORMAT, load)


def _record(file: TraceFile, content: bytes) -> Record:
    record = Record(file, size=len(content))
    if is_framed(content[:4096]):
        graph = from_protobuf(content)
        cut = cut_reason(content)
        record.lost += [] if cut is None else [cut]
    else:
        nodes = Nodes()
        graph = from_json(utf8(content), nodes)
        record.lost += lost_nodes(content, nodes)
        if not graph.total:
            raise InputError("expected a Chakra trace with nodes, found no whole node")
    record.lost += graph.lost
    _fill(record, graph)
    return record


def _fill(record: Record, graph: Graph) -> None:
    """The calls of a graph, each once: a call has nodes on the host and on the device."""
    generated = not graph.about and bool(graph.version)
    device = [n for n in graph.nodes if "comm_type" in n.attrs or not _on_host(n)]
    chosen = device or [n for n in graph.nodes if _first_piece(n)]
    groups: dict[str, Group] = {}
    places: set[int] = set()
    for node in chosen:
        call = _call(node, groups, generated)
        call.host = not device and not generated
        src, dst = (natural(node.attrs.get(k), 1 << 30) for k in ("comm_src", "comm_dst"))
        if node.kind == SEND:
            call.peer, call.global_peer = dst, True
            places.update(() if src is None else (src,))
        elif node.kind == RECV:
            call.peer, call.global_peer = src, True
            places.update(() if dst is None else (dst,))
        record.calls.append(call)
    record.whole = generated
    record.rank = places.pop() if len(places) == 1 else None
    record.backend = "gloo" if not device and chosen else "nccl"


def _on_host(node: Node) -> bool:
    told = node.attrs.get("is_cpu_op")
    return bool(told) if told is not None else node.name.startswith(("c10d::", "record_param"))


def _first_piece(node: Node) -> bool:
    # the converter cuts a host operation at the operations within it: "name(0)", "name(1)", ...
    piece = _PIECE.search(node.name)
    return piece is None or int(piece[1][:9]) == 0


def _call(node: Node, groups: dict[str, Group], generated: bool) -> Call:
    attrs = node.attrs
    op, known = _operation(node)
    name = attrs.get("pg_name")
    name = name if isinstance(name, str) else str(name) if natural(name) is not None else ""
    dims = attrs.get("involved_dim")
    some = isinstance(dims, list) and not all(dims)
    if generated and not name:
        # a program for all ranks, unless it spans only some dimensions of their grid
        name = f"dimensions {dims}" if some else "0"
    if name not in groups:
        whole = generated and name == "0"
        groups[name] = Group(name, "default_pg" if whole else "")
    call = Call(op, groups[name], known=known)
    size = natural(attrs.get("comm_size"))
    call.bytes = size if size is not None else natural(attrs.get("tensor_size"))
    call.tag = natural(attrs.get("comm_tag"))
    found = _DTYPE.search(node.types)
    call.dtype = found[1] if found and found[1] else None
    numbers = [int(n) for n in _TENSOR.findall(node.values)]
    call.count = natural(sum(numbers)) if numbers else None
    if op in _ON_RANKS or (op == "all_to_all" and not generated):
        call.flags |= FLAG["sizes_incomparable"]
    if op == "barrier":
        call.bytes = call.count = call.dtype = None
    return call


def _operation(node: Node) -> tuple[str, bool]:
    if node.kind in {SEND, RECV}:
        return ("send" if node.kind == SEND else "recv"), True
    kind: Any = natural(node.attrs.get("comm_type"))
    if kind is not None and kind < len(_COMM_TYPE):
        return _COMM_TYPE[kind], True
    kernel = _KERNEL.search(node.name)
    name = kernel[1] if kernel else _PIECE.sub("", node.name).rpartition("::")[2]
    meaning = operation(name)
    if meaning.op in {"comm_create", "coalesced"}:
        return node.name, False
    return ("all_to_all" if meaning.op == "all_to_all_v" else meaning.op), meaning.known
