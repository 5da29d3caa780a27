"""Reader of PARAM communication traces: one JSON list a rank, an object a call.

Such a list says what one rank issued, in order; it is written by older tools of PyTorch and PARAM,
and begins and ends as their observer did. Source: FORMATS.md section 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from dl2gpu.trace.calls import (
    LARGEST_GROUP,
    Call,
    Group,
    Record,
    Wait,
    assemble,
    natural,
    records_of,
)
from dl2gpu.trace.execution_trace_nodes import Nodes, lost_nodes, read_nodes, utf8
from dl2gpu.trace.files import read_bytes
from dl2gpu.trace.flight_recorder_names import member_list, operation
from dl2gpu.trace.inputs import Input, TraceFile
from dl2gpu.trace.schema import FLAG, Trace

__all__ = ["FORMAT", "read"]

FORMAT: Final = "param"
_UNEQUAL: Final = frozenset({"gather", "scatter", "all_gather_v", "reduce_scatter_v"})


def read(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes] = read_bytes
) -> tuple[Trace, list[Input]]:
    """Read PARAM traces of any number of jobs into one trace.

    Args:
        files: traces as discovery found them; their order numbers the jobs.
        load: gives the decompressed content of a file; may raise :class:`InputError`.

    Returns:
        The trace, and what became of each file, in the order of ``files``.
    """
    records = records_of(files, load, _record)
    return assemble(records, FORMAT, load)


def _record(file: TraceFile, content: bytes) -> Record:
    data = utf8(content)
    record = Record(file, size=len(data), backend="nccl")
    rank = _Rank(record)
    nodes = Nodes()
    for item in read_nodes(data, None, nodes, bare=True):
        rank.add(item)
    record.lost += lost_nodes(content, nodes)
    if rank.odd:
        record.lost.append(f"{rank.odd} items are of no known form")
    if not rank.known:
        record.refused = "expected a PARAM trace, a list of items with `comms`: found none"
    return record


class _Rank:
    """Gathers the items of one file."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.groups: dict[str, Group] = {}
        self.requests: dict[Any, int] = {}
        self.odd = 0
        self.known = 0

    def add(self, item: dict[str, Any]) -> None:
        name = item.get("comms")
        if not isinstance(name, str):
            if not ("compute" in item or "marker" in item or "markers" in item):
                self.odd += 1
            return
        self.known += 1
        request = _request(item.get("req"))
        if name.strip().lower() == "wait":
            at = self.requests.pop(request, None)
            if at is not None:
                self.record.waits.append(Wait(len(self.record.calls), [at]))
            return
        meaning = operation(name)
        group = self.group(item)
        if not meaning.recorded or meaning.op in {"comm_create", "coalesced"}:
            return
        op = "all_to_all" if meaning.op == "all_to_all_v" else meaning.op
        call = Call(op, group, known=meaning.known)
        call.count = natural(item.get("in_msg_size"))
        call.count_out = natural(item.get("out_msg_size"))
        dtype = item.get("dtype")
        call.dtype = dtype if isinstance(dtype, str) and dtype else None
        if op in _UNEQUAL or (op == "all_to_all" and (item.get("in_split") or meaning.op != op)):
            call.flags |= FLAG["sizes_incomparable"]
        if op == "all_to_all":
            call.splits = _splits(item.get("in_split"), call.count)
        if op == "barrier":
            call.count = call.count_out = call.dtype = None
        if op in {"send", "recv"}:
            call.count_out = None
            call.peer = natural(item.get("dst_rank" if op == "send" else "src_rank"), 1 << 30)
            call.global_peer = True
        elif group.ranks is not None and group.ranks[0] == 0 and _dense(group.ranks):
            # in another group it is not told whether the root is counted in it, or over all ranks
            call.root = natural(item.get("root"), len(group.ranks) - 1)
        if request is not None:
            self.requests[request] = len(self.record.calls)
        self.record.calls.append(call)

    def group(self, item: dict[str, Any]) -> Group:
        told = item.get("pg_id")
        name = str(told) if natural(told) is not None or isinstance(told, str) else "0"
        ranks = member_list(item.get("global_ranks"))
        known = self.groups.get(name)
        if known is None or (ranks and not known.ranks):
            size = natural(item.get("world_size"), LARGEST_GROUP)
            if not ranks and name == "0" and size and size <= len(item) + self.record.size:
                ranks = tuple(range(size))
            known = Group(name, "default_pg" if name == "0" else "", ranks or None, size)
            self.groups[name] = known
        return known


def _dense(ranks: tuple[int, ...]) -> bool:
    return ranks == tuple(range(len(ranks)))


def _request(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(v for v in value if isinstance(v, (int, str)))
    return value if isinstance(value, (int, str)) else None


def _splits(value: Any, count: int | None) -> list[int] | None:
    if not isinstance(value, list) or not value or len(value) > LARGEST_GROUP:
        return None
    numbers = [natural(v) for v in value]
    known = [n for n in numbers if n is not None]
    rows = sum(known)
    if len(known) != len(numbers) or not rows or count is None or count % rows:
        return None
    return [n * (count // rows) for n in known]
