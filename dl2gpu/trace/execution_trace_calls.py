"""What the nodes of an execution trace say of the communication of one process.

Arguments stand by position and differ between versions; each is recognised by its shape. Source:
FORMATS.md 3.4 (the ``Rank`` argument), 4.1 (positions by schema version).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Final

from dl2gpu.trace.calls import LARGEST_GROUP, Call, Group, Record, Wait, natural
from dl2gpu.trace.flight_recorder_names import member_list, operation
from dl2gpu.trace.inputs import TraceFile
from dl2gpu.trace.json_text import lenient
from dl2gpu.trace.schema import ANY, FLAG

__all__ = ["Process", "tensors_of"]

_SYMMETRIC: Final = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "barrier"}
)
"""Operations whose rank argument is the process's own rank in the group."""
_ROOTED: Final = frozenset({"broadcast", "reduce", "gather", "scatter"})
_IN_AND_OUT: Final = frozenset(
    {"all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "gather", "scatter"}
)
"""c10d operations whose first argument is what they fill, and the second what they take."""
_UNFOLD: Final = 16
_UNFOLD_FREE: Final = 1 << 16
_OBJECT: Final = "<Object>"
_DTYPE: Final = re.compile(r"Tensor\(([^()]*)\)")
_SECRET: Final = frozenset({"", "undefined", "nullptr (uninitialized)"})
_FUNCTIONAL: Final = re.compile(r"_?c10d_functional(?:_autograd)?::")
_WRITTEN: Final = re.compile(rb'"time"\s*:\s*"(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)"')


@dataclass(slots=True)
class _Tensors:
    """What an argument of tensors holds."""

    count: int
    width: int | None
    """Bytes of an element."""
    device: str


def tensors_of(value: Any, depth: int = 0) -> _Tensors | None:
    """The tensors of an argument: one, a list, or a list of lists; None: it is something else."""
    if not isinstance(value, list) or depth > 3:
        return None
    if len(value) >= 6 and isinstance(value[5], str) and all(type(v) is int for v in value[:5]):
        count, width = natural(value[3]), natural(value[4])
        return _Tensors(count, width, value[5]) if count is not None else None
    parts = [tensors_of(v, depth + 1) for v in value]
    known = [p for p in parts if p is not None]
    if not known or len(known) != len(parts):
        return None
    widths = {p.width for p in known}
    return _Tensors(
        sum(p.count for p in known), widths.pop() if len(widths) == 1 else None, known[0].device
    )


def _ints(value: Any) -> list[int] | None:
    """A list of whole numbers from 0 on, also as text; None where it is none or was cut."""
    if isinstance(value, str):
        if not re.fullmatch(r"\[[0-9,\s]*\]", value):
            return None
        value = [int(n) for n in value[1:-1].replace(",", " ").split() if len(n) < 19]
    if isinstance(value, list) and len(value) <= LARGEST_GROUP:
        numbers = [natural(v) for v in value]
        known = [n for n in numbers if n is not None]
        return known if len(known) == len(numbers) else None
    return None


@dataclass(slots=True)
class _Node:
    """A node of interest, reduced to what is needed of it."""

    id: int
    parent: int | None
    thread: int
    call: Call | None = None
    waits_for: int | None = None
    """Number of the call that a wait names."""
    group: Group | None = None
    own_rank: int | None = None
    """The process's rank in the group, where the call tells."""
    outer: bool = False
    """A c10d operation: a record_param_comms within it says more."""
    is_p2p: bool | None = None
    tag: int | None = None
    any_source: bool = False
    group_name: str | None = None
    reduce_op: str | None = None
    blocking: bool | None = None


class Process:
    """Gathers the nodes of one file; :meth:`record` gives the calls in order."""

    WANTED: ClassVar = (
        "record_param_comms", "c10d::", "_c10d_functional", "c10d_functional",
        "## process_group:init ##",
    )  # fmt: skip

    def __init__(self, head: bytes, size: int) -> None:
        self._nodes: list[_Node] = []
        self._config: dict[str, Group] = {}
        self._backend_ids: dict[int, str] = {}
        self._backends: dict[str, str] = {}
        self._groups: dict[Any, Group] = {}
        self._local_sizes: dict[int, int] = {}
        self._head = head
        # a few bytes may stand for a group of a million: what they unfold to is bounded by the file
        self._budget = _UNFOLD * size + _UNFOLD_FREE
        self.odd = 0
        """Nodes of communication whose arguments are not understood."""
        self.cut_config = False
        found = re.search(rb'"pid"\s*:\s*(\d{1,18})', head)
        self._pid = int(found[1]) if found else 0

    def add(self, node: dict[str, Any]) -> None:
        """Takes in a node; what is not understood is counted."""
        name, number = node.get("name"), natural(node.get("id"))
        if not isinstance(name, str) or number is None:
            self.odd += 1
            return
        attrs = _attributes(node)
        values, types = _inputs(node)
        if name.startswith("## process_group:init"):
            self._configure(values)
            return
        parent = node.get("ctrl_deps", node.get("parent"))
        seen = _Node(
            id=number,
            parent=parent if type(parent) is int else None,
            thread=natural(attrs.get("tid", node.get("tid"))) or 0,
        )
        if name == "record_param_comms":
            understood = self._record_param(seen, values, types, attrs)
        elif name.startswith("c10d::"):
            understood = self._c10d(seen, name[6:], values, types)
        elif _FUNCTIONAL.match(name):
            texts = [v for v, t in zip(values, types, strict=False) if t == "String"]
            seen.group_name = texts[-1] if texts and isinstance(texts[-1], str) else None
            seen.reduce_op = texts[0] if len(texts) > 1 and isinstance(texts[0], str) else None
            understood = True
        else:
            return
        if understood:
            self._nodes.append(seen)
        else:
            self.odd += 1

    # --- groups

    def _configure(self, values: list[Any]) -> None:
        """Members of the process groups, from a text of JSON; a cut one says nothing."""
        text = values[0] if values and isinstance(values[0], str) else ""
        try:
            listed = lenient(text)
        except (ValueError, RecursionError):
            self.cut_config = True
            return
        for one in listed if isinstance(listed, list) else ():
            if not isinstance(one, dict) or not isinstance(one.get("pg_name"), str):
                continue
            size = natural(one.get("group_size"), LARGEST_GROUP)
            ranks = member_list(one.get("ranks"))
            if not ranks and one.get("ranks") == []:
                ranks = self._spread(0, 1, size)  # an empty list stands for all
            name, desc = one["pg_name"], one.get("pg_desc")
            self._config[name] = Group(
                name, desc if isinstance(desc, str) else "", ranks or None, size
            )
            if type(one.get("backend_id")) is int:
                self._backend_ids[one["backend_id"]] = name
            if isinstance(one.get("backend_config"), str):
                for part in one["backend_config"].split(","):
                    device, _, backend = part.partition(":")
                    self._backends.setdefault(device.strip(), (backend or device).strip().lower())

    def _group(self, told: Any, spread: list[Any], size: int | None) -> Group:
        """The group that a record names: [name, description], or an address in the process."""
        if type(told) is int and told in self._backend_ids:
            told = [self._backend_ids[told], ""]
        if isinstance(told, list) and told and isinstance(told[0], str) and told[0]:
            name = told[0]
            desc = told[1] if len(told) > 1 and isinstance(told[1], str) else ""
            known = self._config.get(name)
            if known is not None:
                return known
            if (name, desc) not in self._groups:
                start, stride = (natural(s, LARGEST_GROUP) for s in (*spread[:2], None, None)[:2])
                ranks = self._spread(start, stride, size) if start is not None else ()
                self._groups[name, desc] = Group(name, desc, ranks or None, size)
            return self._groups[name, desc]
        address = told if type(told) is int else 0
        if size:
            self._local_sizes[address] = max(size, self._local_sizes.get(address, 0))
        key = ("local", address)
        if key not in self._groups:
            self._groups[key] = Group(f"pid{self._pid}:{address:#x}", local=True)
        return self._groups[key]

    def _spread(self, start: int, step: int | None, size: int | None) -> tuple[int, ...]:
        """Evenly spread ranks; none where that is not told, or more than the file can stand for."""
        if not step or not size or size > self._budget:
            return ()
        self._budget -= size
        return tuple(range(start, start + step * size, step))

    # --- nodes

    def _record_param(
        self, seen: _Node, values: list[Any], types: list[Any], attrs: dict[str, Any]
    ) -> bool:
        at = 0 if values and _sequence(values[0]) is not None else 1
        if len(values) < at + 4 or not isinstance(values[at + 3], str):
            return False
        sequence, told, rank, name = values[at : at + 4]
        number = _sequence(sequence)
        splits = [_ints(v) for v in values[at + 4 : at + 6]]
        rest = values[at + 6 :]
        # a group's address comes with its size alone, a name with the first rank and the step too
        spread, size = ([], rest[0] if rest else None)
        if isinstance(told, list):
            spread, size = rest[:2], rest[2] if len(rest) > 2 else None
        size = natural(size, LARGEST_GROUP) or natural(attrs.get("pg_size"), LARGEST_GROUP)
        if isinstance(sequence, list) and number is not None:
            seen.is_p2p = bool(sequence[1])
        if name == "wait":
            seen.waits_for = number
            if isinstance(told, list) and told and told[0]:
                seen.group = self._group(told, [], None)
            return number is not None
        meaning = operation(name)
        if not meaning.recorded or meaning.op in {"comm_create", "coalesced"}:
            return True  # how the library sets itself up, or the end of a batch
        uneven = [s for s in splits if s]
        if size is None and uneven and meaning.op.startswith("all_to_all"):
            size = len(uneven[0])
        group = self._group(told, spread, size)
        tensors = tensors_of(values[0]) if at else None
        call = _call(meaning.op, meaning.known, group, number)
        dtype = attrs.get("dtype") if tensors is None else None
        call.dtype = dtype if isinstance(dtype, str) else _dtype(types)
        given, got = natural(attrs.get("in_msg_nelems")), natural(attrs.get("out_msg_nelems"))
        call.count = given if given is not None else (tensors.count if tensors else None)
        call.count_out = got
        width = tensors.width if tensors else None
        _sizes(call, splits[0] if splits else None, width)
        place = natural(rank)
        if call.op in {"send", "recv"}:
            call.peer = place
        elif call.op in _ROOTED:
            call.root = place
        elif call.op in _SYMMETRIC:
            seen.own_rank = place
        seen.call, seen.group = call, group
        return True

    def _c10d(self, seen: _Node, name: str, values: list[Any], types: list[Any]) -> bool:
        meaning = operation(name)
        if not meaning.recorded or meaning.op in {"comm_create", "coalesced"}:
            return True
        objects = [i for i, v in enumerate(values) if v == _OBJECT]
        after = values[objects[-1] + 1 :] if objects else []
        numbers = [v for v in after if type(v) is int]
        waits = next((v for v in after if type(v) is bool), None)
        seen.outer = True
        takes = 1 if meaning.op in _IN_AND_OUT else 0
        tensors = [tensors_of(v) for v in values[:2]]
        taken = tensors[takes] if len(tensors) > takes else None
        filled = tensors[0] if takes and tensors else None
        call = _call(meaning.op, meaning.known, self._unnamed(), None)
        call.dtype = _dtype(types)
        call.count = taken.count if taken else None
        call.count_out = filled.count if filled else None
        lists = [s for s in map(_ints, after) if s is not None]
        _sizes(call, lists[1] if len(lists) > 1 else None, taken.width if taken else None)
        if call.op in _ROOTED:
            call.root = natural(numbers[0]) if numbers else None
        elif call.op in {"send", "recv"}:
            seen.any_source = "any_source" in name
            if seen.any_source:
                call.peer, call.global_peer = ANY, True
            else:
                call.peer = natural(numbers[0]) if numbers else None
            seen.tag = call.tag = natural(numbers[-1]) if numbers else None
        if waits is not None and call.op not in {"send", "recv"}:
            seen.blocking = not waits
        device = (taken or filled or _Tensors(0, None, "cpu")).device
        call.host = not device.startswith(("cuda", "xpu", "hpu", "mtia", "npu", "privateuse"))
        if call.host:
            call.blocking = seen.blocking
        seen.call, seen.group = call, call.group
        return True

    def _unnamed(self) -> Group:
        """The group of an operation that does not name it: the only one there is, or unknown."""
        if len(self._config) == 1:
            return next(iter(self._config.values()))
        return self._group(0, [], None)

    # --- result

    def record(self, file: TraceFile) -> Record:
        """The calls in program order."""
        record = Record(file, written=_written(self._head))
        by_id = {node.id: node for node in self._nodes}
        calls: list[_Node] = []
        detailed: set[int] = set()
        ordered = sorted(self._nodes, key=lambda node: node.id)
        for node in ordered:
            parent = by_id.get(node.parent) if node.parent is not None else None
            if parent is not None and node.call is not None and not node.outer and parent.outer:
                detailed.add(parent.id)
        for node in ordered:
            parent = by_id.get(node.parent) if node.parent is not None else None
            if node.call is None and node.waits_for is None:
                continue
            if node.outer and (node.id in detailed or _within_record(node, by_id)):
                continue
            if node.call is not None and not node.outer and _within_record(node, by_id):
                continue  # a call that another one makes on its own account
            if node.call is not None:
                self._complete(node, parent, by_id)
            calls.append(node)
        self._fill(record, calls)
        return record

    def _complete(self, node: _Node, parent: _Node | None, by_id: dict[int, _Node]) -> None:
        """What the operations around a call say of it: tag, group, reduce operation."""
        call = node.call
        assert call is not None
        if parent is not None and parent.outer and not node.outer:
            if call.op in {"send", "recv"}:
                call.tag = parent.tag
                if parent.any_source:
                    call.peer, call.global_peer = ANY, True
            parent = by_id.get(parent.parent) if parent.parent is not None else None
        if parent is None or parent.call is not None or parent.group_name is None:
            return
        call.reduce_op = parent.reduce_op
        if call.group.local and node.outer:
            known = self._config.get(parent.group_name)
            call.group = known or self._group([parent.group_name, ""], [], None)

    def _fill(self, record: Record, nodes: list[_Node]) -> None:
        places: set[int] = set()
        open_calls: dict[tuple[int, bool | None], list[tuple[int, Group]]] = {}
        waits: dict[int, list[int]] = {}
        last: _Node | None = None
        batches = 0
        for node in nodes:
            call = node.call
            if call is None:
                assert node.waits_for is not None
                found = open_calls.get((node.waits_for, node.is_p2p), [])
                fits = [f for f in found if node.group is None or f[1] is node.group]
                if len({id(f[1]) for f in fits}) == 1:  # else: which group's, is not told
                    waits.setdefault(len(record.calls), []).append(fits[-1][0])
                    found.remove(fits[-1])
                continue
            before = last.call if last is not None else None
            if (
                last is not None and before is not None
                and call.number is not None and not call.host
                and (before.group, before.number) == (call.group, call.number)
                and last.is_p2p == node.is_p2p
                and (before.op in {"send", "recv"}) == (call.op in {"send", "recv"})
            ):  # fmt: skip
                # launched together: the end of the batch is not in the record
                if before.batch is None:
                    before.batch = batches
                    before.flags |= FLAG["partial_group"]
                    batches += 1
                call.batch = before.batch
                call.flags |= FLAG["partial_group"]
            if call.number is not None:
                open_calls.setdefault((call.number, node.is_p2p), []).append(
                    (len(record.calls), call.group)
                )
            ranks = call.group.ranks
            if node.own_rank is not None and ranks and node.own_rank < len(ranks):
                places.add(ranks[node.own_rank])
            record.calls.append(call)
            last = node
        record.waits = [Wait(before, calls) for before, calls in waits.items()]
        record.separate = any(n.is_p2p is not None for n in nodes)
        record.rank = places.pop() if len(places) == 1 else None
        self._size_groups(record)
        device = any(not c.host for c in record.calls)
        if record.calls:
            kinds = ("cuda", "xpu", "hpu", "npu") if device else ("cpu",)
            named = [self._backends[k] for k in kinds if k in self._backends]
            record.backend = named[0] if named else ("nccl" if device else "gloo")
        if self.odd:
            record.lost.append(f"{self.odd} communication nodes have arguments of no known form")
        if self.cut_config and any(c.group.ranks is None for c in record.calls):
            record.lost.append(
                "the list of process groups is cut short: members of some are unknown"
            )

    def _size_groups(self, record: Record) -> None:
        """Groups that are known by an address get the size that some of their calls tell."""
        sized: dict[Group, Group] = {}
        for call in record.calls:
            group = call.group
            if not group.local:
                continue
            if group not in sized:
                address = int(group.name.rpartition(":")[2], 16)
                size = self._local_sizes.get(address)
                sized[group] = Group(group.name, size=size, local=True)
            call.group = sized[group]


def _within_record(node: _Node, by_id: dict[int, _Node]) -> bool:
    """Does the node lie in a record_param_comms: is it part of that call?"""
    seen = 0
    at = by_id.get(node.parent) if node.parent is not None else None
    while at is not None and seen < 8:
        if at.call is not None and not at.outer:
            return True
        at = by_id.get(at.parent) if at.parent is not None and at.parent != at.id else None
        seen += 1
    return False


def _call(op: str, known: bool, group: Group, number: int | None) -> Call:
    # one operation with and without splits: a rank may give equal ones and another none
    return Call("all_to_all" if op == "all_to_all_v" else op, group, known=known, number=number)


def _sizes(call: Call, splits: list[int] | None, width: int | None) -> None:
    """Sizes as far as they may be compared."""
    if call.op == "barrier":
        call.count = call.count_out = call.dtype = None
    elif call.op in {"scatter", "gather"}:
        call.flags |= FLAG["sizes_incomparable"]  # which list is whose differs between versions
    elif call.op == "all_to_all" and splits:
        call.flags |= FLAG["sizes_incomparable"]
        rows = sum(splits)
        if rows and call.count is not None and call.count % rows == 0:
            call.splits = [s * (call.count // rows) for s in splits]
    if call.op in {"send", "recv"}:
        call.count_out = None
    if width is not None and call.count is not None:
        call.bytes = natural(call.count * width)


def _sequence(value: Any) -> int | None:
    """The number of a call: a whole number, or one with a mark of point to point."""
    if isinstance(value, list) and len(value) == 2 and type(value[1]) is bool:
        value = value[0]
    return natural(value)


def _dtype(types: list[Any]) -> str | None:
    for text in types[:2]:
        found = _DTYPE.search(text) if isinstance(text, str) else None
        if found is not None and found[1].strip().lower() not in _SECRET:
            return found[1]
    return None


def _attributes(node: dict[str, Any]) -> dict[str, Any]:
    listed = node.get("attrs")
    out = {}
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict) and isinstance(one.get("name"), str):
            out[one["name"]] = one.get("value")
    return out


def _inputs(node: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    inputs = node.get("inputs")
    if isinstance(inputs, dict):
        values, types = inputs.get("values"), inputs.get("types")
    else:
        values, types = inputs, node.get("input_types")
    return (values if isinstance(values, list) else []), (types if isinstance(types, list) else [])


def _written(head: bytes) -> int:
    """Nanoseconds of the text of the start, so that of two traces the later one is known."""
    found = _WRITTEN.search(head)
    if found is None:
        return 0
    try:
        when = datetime(*map(int, found.groups()), tzinfo=UTC)  # type: ignore[misc,arg-type]
    except ValueError:
        return 0
    return int(when.timestamp()) * 10**9
