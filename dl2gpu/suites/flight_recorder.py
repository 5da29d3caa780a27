"""Jobs of a fleet as Flight Recorder pickles, a file a rank, as PyTorch 2.9 writes them (NCCL).

An entry has few variable numbers; the bytes around them are made once for each call site of a
pipeline stage and copied for all its ranks and steps. Numbers have a fixed width, which pickle
allows. Waits are not recorded, and of a batch the end record alone has the state.

Source: FORMATS.md sections 2.1 to 2.4 (keys, their order, and the pickler).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dl2gpu.suites.device import completed
from dl2gpu.suites.mixture import Job
from dl2gpu.suites.program import (
    DATA,
    FRAMES,
    NONE,
    PIPELINE,
    TENSOR,
    WORLD,
    Shape,
    comm_of_rank,
    communicators,
    program,
    template,
)
from dl2gpu.suites.tables import CALL_NS, START_NS, STEP_NS
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.schema import OP

__all__ = ["FAULTS", "write"]

Array = npt.NDArray[Any]

FAULTS: Final = ("size", "stall")
"""Faults of the catalogue that such dumps show with the same verdict. They do not tell a rank that
has left a call out, or died, from one that is busy; they record no wait of one stream for another,
so that what waits for a lost rank's message seems to be in flight; and they know of no queue that
communicators share.
"""

_PG: Final = {WORLD: 0, TENSOR: 1, DATA: 2, PIPELINE: 3}
_DESC: Final = {WORLD: "default_pg", TENSOR: "tensor", DATA: "data", PIPELINE: "pipeline"}
_NAMES: Final = {
    OP["all_reduce"]: "nccl:all_reduce", OP["reduce_scatter"]: "nccl:_reduce_scatter_base",
    OP["all_gather"]: "nccl:_all_gather_base",
}  # fmt: skip
_DTYPES: Final = {10: "Float", 7: "BFloat16"}
_NAME: Final = 5
"""Characters of a group's name."""
_END: Final = -1
"""Operation code of a batch's end record."""

# --------------------------------------------------------------------------------------------------
# Bytes with holes


@dataclass(frozen=True, slots=True)
class _Hole:
    """A value that differs from rank to rank or call to call."""

    name: str
    width: int  # bytes: 4 or 8 for numbers, 5 for a group's name


@dataclass(slots=True)
class _Piece:
    """Bytes, and where their holes are: (name, offset, width)."""

    data: bytearray = field(default_factory=bytearray)
    holes: list[tuple[str, int, int]] = field(default_factory=list)


class _Pickler:
    """The part of PyTorch's pickler that dumps use: protocol 2, strings and frames memoised."""

    def __init__(self) -> None:
        self.out = _Piece()
        self.memo: dict[Any, int] = {}

    def take(self) -> _Piece:
        """What was written since the last call."""
        out, self.out = self.out, _Piece()
        return out

    def _put(self, key: Any) -> None:
        at = self.memo[key] = len(self.memo)
        self.out.data += b"q" + bytes([at]) if at < 256 else b"r" + struct.pack("<I", at)

    def _got(self, key: Any) -> bool:
        at = self.memo.get(key)
        if at is None:
            return False
        self.out.data += b"h" + bytes([at]) if at < 256 else b"j" + struct.pack("<I", at)
        return True

    def text(self, text: str) -> None:
        if not self._got(text):
            raw = text.encode()
            self.out.data += b"X" + struct.pack("<I", len(raw)) + raw
            self._put(text)

    def hole(self, hole: _Hole) -> None:
        data = self.out.data
        if hole.width == _NAME:
            if self._got(hole):
                return
            data += b"X" + struct.pack("<I", _NAME)
        else:
            data += b"J" if hole.width == 4 else b"\x8a\x08"
        self.out.holes.append((hole.name, len(data), hole.width))
        data += bytes(hole.width)
        if hole.width == _NAME:
            self._put(hole)

    def value(self, value: Any) -> None:
        data = self.out.data
        if isinstance(value, _Hole):
            self.hole(value)
        elif isinstance(value, str):
            self.text(value)
        elif isinstance(value, bool):
            data += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            if 0 <= value < 1 << 8:
                data += b"K" + bytes([value])
            elif 0 <= value < 1 << 16:
                data += b"M" + struct.pack("<H", value)
            elif -(1 << 31) <= value < 1 << 31:
                data += b"J" + struct.pack("<i", value)
            else:
                data += b"\x8a\x08" + struct.pack("<q", value)
        elif isinstance(value, float):
            data += b"G" + struct.pack(">d", value)
        elif value is None:
            data += b"N"
        elif isinstance(value, tuple):
            for item in value:
                self.value(item)
            self.out.data += b"\x86"
        elif isinstance(value, list):
            data += b"]("
            for item in value:
                self.value(item)
            self.out.data += b"e"
        else:
            self.record(value)

    def record(self, value: dict[str, Any]) -> None:
        frame = tuple(value.values()) if value.keys() == {"name", "filename", "line"} else None
        if frame is not None and self._got(frame):
            return
        self.out.data += b"}("
        for key, item in value.items():
            self.text(key)
            self.value(item)
        self.out.data += b"u"
        if frame is not None:
            self._put(frame)


# --------------------------------------------------------------------------------------------------
# Entries of a stage


@dataclass(frozen=True, slots=True)
class _Site:
    """One record of a step: a row of the stage's template, or the end record of a batch."""

    place: int
    op: int
    kind: int
    towards: int
    batched: bool
    count: int
    dtype: int
    stack: int


def _sites(shape: Shape, stage: int) -> list[_Site]:
    """The records of one step of a stage, in order."""
    t = template(replace(shape, steps=0), stage)
    out: list[_Site] = []
    for x in range(len(t.op)):
        if t.kind[x] == NONE:
            continue
        batch = int(t.batch[x])
        out.append(
            _Site(
                x, int(t.op[x]), int(t.kind[x]), int(t.towards[x]), batch >= 0, int(t.count[x]),
                int(t.dtype[x]), int(t.stack[x]),
            )
        )  # fmt: skip
        if batch >= 0 and (x + 1 == len(t.op) or int(t.batch[x + 1]) != batch):
            end = replace(out[-1], op=_END, batched=False, count=0, towards=0)
            out.append(end)
    return out


def _entry(site: _Site, shape: Shape, stage: int, state: str, factor: int) -> dict[str, Any]:
    message = site.kind == PIPELINE
    count = site.count * factor
    ins, outs = count, count
    if site.op == OP["reduce_scatter"]:
        outs = count // shape.data
    elif site.op == OP["all_gather"]:
        outs = count * shape.data
    if site.op == _END:
        name = "nccl:coalesced"
    elif message:
        arrow = "->" if site.op == OP["send"] else "<-"
        name = f"nccl:{'send' if arrow == '->' else 'recv'} {stage}{arrow}{stage + site.towards}"
    else:
        name = _NAMES[site.op]
    sizes = [] if site.op == _END else [[ins]]
    dtypes = [] if site.op == _END else [_DTYPES[site.dtype]]
    frames = []
    for frame in FRAMES[site.stack]:
        function, _, where = frame.partition(" ")
        file, _, line = where.rpartition(":")
        frames.append({"name": function, "filename": file, "line": int(line)})
    done = state == "completed"
    return {
        "frames": frames,
        "record_id": _Hole("record", 4),
        "pg_id": _PG[site.kind],
        "process_group": (_Hole(str(site.kind), _NAME), _DESC[site.kind]),
        "thread_name": "pt_main_thread",
        "thread_id": "139756190952320",
        "collective_seq_id": _Hole("cseq", 4),
        "p2p_seq_id": _Hole("pseq", 4),
        "op_id": _Hole("op", 4),
        "profiling_name": name,
        "time_created_ns": _Hole("created", 8),
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "output_sizes": [] if site.op == _END else [[outs]],
        "output_dtypes": dtypes,
        "state": state,
        "time_discovered_started_ns": _Hole("started", 8) if done else None,
        "time_discovered_completed_ns": _Hole("completed", 8) if done else None,
        "retired": done or (site.batched and state == "scheduled"),
        "timeout_ms": 600000,
        "is_p2p": message and site.op != _END,
    }


_FORMS: Final = 6
DONE, OPEN, OPEN_FIRST, FIRST, ODD, ODD_FIRST = range(_FORMS)
"""Forms of an entry: complete; not; the first of a dump that is not, which brings the word along;
the entry's first time in a dump; with twice the elements, not complete; and that as the first."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """What the ranks of a pipeline stage record; arrays by site, forms by site and form."""

    site_of: Array  # row of the template to site, -1: a wait
    records: Array  # row of the template to how many records it makes
    kind: Array
    end: Array
    batched: Array
    place: Array
    data: Array  # bytes of all forms
    cuts: Array
    holes: list[list[tuple[str, int, int]]]
    memoised: int  # strings and frames of a dump, with what its first step brings


@lru_cache(maxsize=512)
def _stage(shape: Shape, stage: int, head: tuple[Any, ...]) -> _Stage:
    """The sites of a stage and their forms; ``head``: what the dump's head memoised, in order."""
    sites = _sites(shape, stage)
    pickler = _Pickler()
    pickler.memo = {key: at for at, key in enumerate(head)}

    def made(site: _Site, state: str, factor: int = 1) -> _Piece:
        if site.batched:
            state = "scheduled"
        pickler.record(_entry(site, shape, stage, state, factor))
        return pickler.take()

    pieces: dict[tuple[int, int], _Piece] = {}
    for x, site in enumerate(sites):
        pieces[x, FIRST] = made(site, "completed")
    known = len(pickler.memo)
    for x, site in enumerate(sites):
        pieces[x, DONE] = made(site, "completed")
        for form, factor in ((OPEN_FIRST, 1), (ODD_FIRST, 2)):
            pieces[x, form] = made(site, "scheduled", factor)
            while len(pickler.memo) > known:
                pickler.memo.popitem()
    pickler.text("scheduled")
    pickler.take()
    for x, site in enumerate(sites):
        for form, factor in ((OPEN, 1), (ODD, 2)):
            pieces[x, form] = made(site, "scheduled", factor)
    forms = [pieces[x, form] for x in range(len(sites)) for form in range(_FORMS)]
    data = np.frombuffer(b"".join(bytes(f.data) for f in forms), np.uint8)
    cuts = np.append(0, np.cumsum([len(f.data) for f in forms]))
    place = np.array([site.place for site in sites])
    records = np.bincount(place, minlength=len(template(shape, stage).op))
    return _Stage(
        site_of=np.where(records > 0, np.cumsum(records) - records, -1),
        records=records,
        kind=np.array([site.kind for site in sites]),
        end=np.array([site.op == _END for site in sites]),
        batched=np.array([site.batched for site in sites]),
        place=place, data=data, cuts=cuts, holes=[f.holes for f in forms], memoised=known,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# A rank


def write(job: Job, out: Path) -> int:
    """Writes the dumps of a job into a folder of its name below ``out``; how many entries.

    Raises:
        InputError: the job has a fault that is not among :data:`FAULTS`.
        OSError: a file cannot be written.
    """
    if job.fault.name not in ("healthy", *FAULTS):
        raise InputError(f"fault: expected {', '.join(FAULTS)} in dumps, found {job.fault.name!r}")
    shape = job.shape
    made = program(shape, None if job.fault.name == "healthy" else job.fault)
    done = completed(shape, made)
    _, _, members, cuts = communicators(shape)
    texts = [f"[{', '.join(map(str, members[a:b].tolist()))}]" for a, b in pairwise(cuts)]
    own = comm_of_rank(shape)
    folder = out / job.name
    folder.mkdir()
    begins = np.searchsorted(made.rank, np.arange(shape.ranks + 1))
    total = 0
    for rank in range(shape.ranks):
        rows = slice(int(begins[rank]), int(begins[rank + 1]))
        odd = job.fault.place if job.fault.name == "size" and rank == job.fault.rank else -1
        entries = _Entries(made.place[rows], made.step[rows], done[rows], odd)
        data, n = _dump(shape, entries, rank, own[:, rank], texts)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
        total += n
    return total


@dataclass(frozen=True, slots=True)
class _Entries:
    """What a rank issued, by program order."""

    place: Array
    step: Array
    done: Array
    odd: int  # place of its operation with twice the elements, in the last step; -1: none


def _dump(shape: Shape, e: _Entries, rank: int, own: Array, texts: list[str]) -> tuple[bytes, int]:
    """The dump of one rank, and how many entries it has.

    ``own``: its communicators by kind; ``texts``: the members of all communicators.
    """
    kinds = [kind for kind in _PG if own[kind] >= 0]
    head = _Pickler()
    _write_head(head, kinds, own, texts)
    # what differs from rank to rank stands for itself by its kind
    members = {texts[own[kind]]: kind for kind in reversed(kinds)}
    memo = tuple(members.get(key, key) for key in head.memo)
    stage = _stage(replace(shape, steps=0), rank // shape.plane, memo)
    times = stage.records[e.place]
    at = np.repeat(stage.site_of[e.place], times)
    at += np.arange(len(at)) - np.repeat(np.cumsum(times) - times, times)
    step, place = np.repeat(e.step, times), np.repeat(e.place, times)
    form = np.where(np.repeat(e.done, times), DONE, OPEN)
    form[(place == e.odd) & (step == shape.steps - 1) & (form == OPEN)] = ODD
    form[step == 0] = FIRST
    memoised = stage.memoised
    if not stage.batched.any():  # else the first batch has brought the word along
        fresh = np.flatnonzero((form == OPEN) | (form == ODD))[:1]
        form[fresh] = np.where(form[fresh] == OPEN, OPEN_FIRST, ODD_FIRST)
        memoised += len(fresh)
    which = at * _FORMS + form
    width = np.diff(stage.cuts)[which]
    start = np.append(0, np.cumsum(width))
    body = stage.data[np.repeat(stage.cuts[which] - start[:-1], width) + np.arange(int(start[-1]))]
    numbers = _numbers(stage, at)
    created = START_NS + step.astype(np.int64) * STEP_NS + place * CALL_NS + rank * 7
    numbers |= {
        "record": np.arange(len(at)), "created": created, "started": created + CALL_NS // 4,
        "completed": created + CALL_NS // 2,
    }  # fmt: skip
    for value in np.unique(which):
        here = which == value
        first = start[:-1][here][:, None]
        for name, offset, size in stage.holes[value]:
            if size == _NAME:
                raw = np.frombuffer(_group(own, int(name)).encode(), np.uint8)
            else:
                typed = numbers[name][here].astype("<i4" if size == 4 else "<i8")
                raw = typed.view(np.uint8).reshape(-1, size)
            body[first + offset + np.arange(size)] = raw
    tail = b"eur" + struct.pack("<I", memoised) + b"."
    return bytes(head.out.data) + body.tobytes() + tail, len(at)


def _group(own: Array, kind: int) -> str:
    return f"{own[kind]:0{_NAME}}"


def _write_head(pickler: _Pickler, kinds: list[int], own: Array, texts: list[str]) -> None:
    """The document up to its first entry. Group names are memoised as the holes of the entries."""
    out = pickler.out.data
    out += b"\x80\x02}("
    for text in ("version", "2.9", "pg_config"):
        pickler.text(text)
    out += b"}("
    for kind in kinds:
        name = _Hole(str(kind), _NAME)
        pickler.hole(name)
        for _, offset, size in pickler.out.holes:
            out[offset : offset + size] = _group(own, kind).encode()
        pickler.out.holes.clear()
        pickler.record({"name": name, "desc": _DESC[kind], "ranks": texts[own[kind]]})
    out += b"u"
    for text in ("nccl_version", "2.27.3", "entries"):
        pickler.text(text)
    out += b"]("


def _numbers(stage: _Stage, at: Array) -> dict[str, Array]:
    """The counters of PyTorch at each record: collectives, batches and operations of its group."""
    kind, end, batched = stage.kind[at], stage.end[at], stage.batched[at]
    opens = ~end & ~(batched & np.append(False, batched[:-1]))
    out = {name: np.zeros(len(at), np.int64) for name in ("cseq", "pseq", "op")}
    for k in np.unique(kind):
        mine = kind == k
        counted = "pseq" if k == PIPELINE else "cseq"
        out[counted][mine] = np.cumsum(opens[mine])
        out["op"][mine] = np.cumsum(~end[mine])
    return out
