"""Reader of TorchComms logs (``clog``): one text file a rank, a line an event.

A signature line says what a call is; the lines of its enqueueing, start, end and wait name the
signature, so the n-th start of a signature is that of its n-th call. The lines become native ones,
and the native reader does the rest. Source: FORMATS.md section 7.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from dl2gpu.trace import native
from dl2gpu.trace.files import cut_reason, load_ahead, read_bytes
from dl2gpu.trace.flight_recorder_names import member_list, operation
from dl2gpu.trace.inputs import Input, InputError, Status, TraceFile
from dl2gpu.trace.schema import Trace

__all__ = ["FORMAT", "read"]

FORMAT: Final = "clog"
_FIRST: Final = re.compile(r"V\|(\d{1,9})\|base_timestamp=(\d{1,12}(?:\.\d{1,9})?)")
_EVENT: Final = re.compile(
    r"(?:G\d{1,20}\|)?C(\d{1,18})\|([QSEW])(?:\|work_id=(\d{1,18}))?\|\+(\d{1,12}(?:\.\d{1,9})?)"
)
_REPLAY: Final = re.compile(r"G\d{1,20}\|R\d{1,20}\|")
_SIGNATURE: Final = re.compile(r"C(\d{1,18})\|sig\|([^|=]{1,64})(\|.*)?")
_LARGEST: Final = 1 << 16
_P2P: Final = frozenset({"send", "recv"})
_UNKNOWN: Final = frozenset({"", "other", "unknown"})


@dataclass(slots=True)
class _Log:
    """What one file holds."""

    file: TraceFile
    refused: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    waits: list[dict[str, Any]] = field(default_factory=list)
    comms: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(own rank, size) of each communicator."""
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lifecycle: bool = False
    """Starts and ends are logged."""
    batches: set[str] = field(default_factory=set)
    """Communicators with batches of messages, whose members are not logged."""
    lost: list[str] = field(default_factory=list)
    rank: int = -1


def read(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes] = read_bytes
) -> tuple[Trace, list[Input]]:
    """Read logs of any number of jobs into one trace.

    Memory is a multiple of the file (about ten times for a log of short lines).

    Args:
        files: logs as discovery found them; their order numbers the jobs.
        load: gives the decompressed content of a file; may raise :class:`InputError`.

    Returns:
        The trace, and what became of each file, in the order of ``files``.
    """
    logs = []
    for file, content in zip(files, load_ahead(files, load), strict=True):
        if isinstance(content, InputError):
            logs.append(_Log(file, refused=str(content)))
            continue
        log = _parse(file, content)
        cut = cut_reason(content)
        log.lost += [] if cut is None else [cut]
        logs.append(log)
    by_job: dict[Any, list[_Log]] = defaultdict(list)
    for log in logs:
        if log.refused is None:
            by_job[log.file.folder, log.file.job, log.file.attempt].append(log)
    content_of: dict[str, bytes] = {}
    for job in by_job.values():
        states = all(log.lifecycle for log in job if log.calls)
        batches = set().union(*(log.batches for log in job))
        for log in job:
            content_of[log.file.path] = _native(log, states, batches)
    kept = [replace(log.file, format="native") for log in logs if log.refused is None]
    trace, read_inputs = native.read(kept, lambda file: content_of[file.path])
    found = {i.path: i for i in read_inputs}
    return trace, [_input(log, found.get(log.file.path)) for log in logs]


def _input(log: _Log, found: Input | None) -> Input:
    if log.refused is not None or found is None:
        job = log.file.job or log.file.folder
        return Input(log.file.path, "quarantined", log.refused, FORMAT, job=job)
    status: Status = found.status
    reasons = [*log.lost, *([found.reason] if found.reason else [])]
    if status == "read" and reasons:
        status = "partial"
    return replace(found, status=status, reason="; ".join(reasons) or None, format=FORMAT)


# --------------------------------------------------------------------------------------------------
# Lines


def _parse(file: TraceFile, content: bytes) -> _Log:
    log = _Log(file)
    text = content.decode("utf-8", "replace").removeprefix("\ufeff")
    lines = text.splitlines()
    first = _FIRST.fullmatch(lines[0].strip()) if lines else None
    if first is None or first[1] != "1":
        log.refused = (
            "expected a TorchComms log of version 1 (V|1|base_timestamp=...), found "
            f"{lines[0][:40]!r}" if lines else "the file is empty"
        )  # fmt: skip
        return log
    base = _milliseconds(first[2])
    signatures: dict[str, dict[str, Any]] = {}
    queued: dict[str, list[dict[str, Any]]] = defaultdict(list)
    passed: dict[tuple[str, str], int] = defaultdict(int)
    works: set[int] = set()
    odd = replays = 0
    if text and not text.endswith("\n"):
        log.lost.append("the last line is cut short; it was dropped")
        lines.pop()
    for number, line in enumerate(lines[1:], 1):
        event = _EVENT.fullmatch(line)
        if event is not None:
            key, what, work, after = event.groups()
            at = (base + _milliseconds(after)) * 1_000_000
            if what == "Q":
                signature = signatures.get(key)
                if signature is None or work is None or int(work) in works:
                    odd += 1
                    continue
                works.add(int(work))
                row = {"seq": int(work), "request": int(work), "t_created": at} | signature
                queued[key].append(row)
                log.calls.append(row)
                continue
            # the n-th start (end, wait) of a signature is that of its n-th call
            nth = passed[key, what]
            passed[key, what] = nth + 1
            if nth >= len(queued[key]):
                odd += 1
                continue
            row = queued[key][nth]
            if what == "W":
                log.waits.append({"seq": number, "requests": [row["seq"]], "t_created": at})
            else:
                log.lifecycle = True
                row["t_started" if what == "S" else "t_completed"] = at
            continue
        signed = _SIGNATURE.fullmatch(line)
        if signed is not None:
            signatures[signed[1]] = _signature(signed[2], _fields(signed[3] or ""))
        elif line.startswith("new_comm|"):
            fields = _fields(line[8:])
            rank, size = _number(fields.get("rank")), _number(fields.get("world_size"))
            if rank is not None and size is not None and rank < size and "comm" in fields:
                log.comms[fields["comm"]] = (rank, size)
            else:
                odd += 1
        elif line.startswith("split|"):
            fields = _fields(line[5:])
            if "child" in fields:
                log.members[fields["child"]] = member_list(f"[{fields.get('ranks', '')}]")
        elif _REPLAY.match(line):
            replays += 1
        elif line and not line.startswith("WARN|"):
            odd += 1
    log.calls.sort(key=lambda call: call["seq"])  # threads may write their lines in another order
    _finish(log, len(content), odd, replays)
    return log


def _finish(log: _Log, size: int, odd: int, replays: int) -> None:
    """Rank, members and remarks, once all lines are read."""
    if odd:
        log.lost.append(f"{odd} lines are of no known form")
    if replays:
        log.lost.append(f"{replays} lines of replayed CUDA graphs are not unfolded into calls")
    roots = {name: told for name, told in log.comms.items() if name not in log.members}
    if not roots:
        log.refused = (
            "which rank wrote it is not known: expected a line new_comm of a communicator that is "
            "no split, found none"
        )
        return
    log.rank, most = max(roots.values(), key=lambda told: told[1])
    if most > _LARGEST + 16 * size:
        log.refused = f"a communicator of {most} ranks in a log of {size} bytes is not believed"
        return
    for name, (rank, members) in roots.items():
        if (rank, members) == (log.rank, most):
            log.members[name] = tuple(range(most))
    dropped = [c for c in log.calls if c["op"] == "coalesced"]
    if dropped:
        log.batches = {c["comm"] for c in dropped}
        log.calls = [c for c in log.calls if c["op"] != "coalesced"]
        log.lost.append(f"{len(dropped)} batches of messages, whose members are not logged")


def _signature(name: str, fields: dict[str, str]) -> dict[str, Any]:
    meaning = operation(name)
    out: dict[str, Any] = {"op": meaning.op, "comm": fields.get("comm", "")}
    given = _numbers(fields.get("in_counts") or fields.get("in_splits") or "")
    count = _number(fields.get("in_count"))
    got = _number(fields.get("out_count"))
    if meaning.op == "recv":
        count, got = got, None
    elif meaning.op == "send":
        got = None
    if count is None and given:
        count = sum(given)
    out["count"], out["count_out"] = count, got if got != count else None
    if meaning.op in {"all_to_all", "all_to_all_v"} and given:
        # lists on one rank and one tensor on another are the same operation
        out["op"], out["splits"] = "all_to_all_v", given
    for key, name_ in (("dtype", "dtype"), ("red_op", "reduce_op")):
        if fields.get(key, "") not in _UNKNOWN:
            out[name_] = fields[key]
    for key in ("root", "peer"):
        out[key] = _number(fields.get(key))
    return out


def _fields(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.split("|") if "=" in part)
    return {key: value for key, _, value in pairs}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None


def _numbers(text: str) -> list[int]:
    known = [_number(part) for part in text.split(",")] if text else []
    numbers = [n for n in known if n is not None]
    return numbers if len(numbers) == len(known) else []


def _milliseconds(seconds: str) -> int:
    whole, _, part = seconds.partition(".")
    return int(whole) * 1000 + int((part + "000")[:3])


# --------------------------------------------------------------------------------------------------
# Native lines


def _native(log: _Log, states: bool, batches: set[str]) -> bytes:
    """The log as native lines. ``states``: all of the job tell starts and ends."""
    size = max((len(m) for m in log.members.values()), default=None)
    head = {
        "kind": "header", "format": "dl2gpu.trace", "version": 1, "rank": log.rank,
        "world_size": size, "backend": "nccl", "source": FORMAT, "waits": False,
    }  # fmt: skip
    used = {call["comm"] for call in log.calls}
    lines: list[dict[str, Any]] = [head]
    lines += [
        {"kind": "comm", "id": name, "name": name, "ranks": log.members.get(name, ())}
        for name in sorted(used)
    ]
    for call in log.calls:
        lines.append({"kind": "op", "stream": call["comm"]} | _row(log, call, states, batches))
    for wait in log.waits:
        lines.append({"kind": "op", "op": "wait", "lane": 1, "blocking": False} | wait)
    if not states:
        lines.append({"kind": "end", "exit": "window"})
    return b"\n".join(map(msgspec.json.encode, lines)) + b"\n"


def _row(
    log: _Log, call: dict[str, Any], states: bool, batches: set[str]
) -> dict[str, Any]:  # fmt: skip
    members = log.members.get(call["comm"], ())
    row = {k: v for k, v in call.items() if v is not None}
    for key in ("root", "peer"):
        place = row.pop(key, None)
        if place is not None and place < len(members):
            row[key] = members[place]
    if call["op"] in _P2P:
        if call["comm"] in batches:
            row.pop("peer", None)  # the partner may be in a batch
        elif "peer" in row:
            low, high = sorted((log.rank, row["peer"]))
            row["stream"] = f"{call['comm']}:{low}-{high}"
    if states:
        done, begun = "t_completed" in row, "t_started" in row
        row["state"] = "completed" if done else ("started" if begun else "scheduled")
    return row
