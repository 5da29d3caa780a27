"""Lines of the native JSON Lines format, one at a time: types, decoding, and what is wrong where.

``native.py`` parses whole chunks by columns. This module has the few lines that are not operations
(header, comm, end), and the careful reading of a file that the columnar parser refused: it finds
the line and the column of the fault, or gives back an equal file that the parser takes.

Source: TRACE_FORMAT.md, section JSON Lines.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.schema import OP

__all__ = [
    "MAX_COMMS",
    "MAX_LINE",
    "Comm",
    "End",
    "Header",
    "Op",
    "Status",
    "clean",
    "decode_comm",
    "decode_end",
    "decode_header",
    "decode_status",
    "kind_of",
    "needs_comm",
    "op_spelling",
    "repeated_key",
]

Int32 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Rank = Annotated[int, Meta(ge=0, le=(1 << 20) - 1)]
"""Of this rank and of a communicator's members: tables as large as the job are made of them."""
Natural = Annotated[int, Meta(ge=0, le=1 << 62)]
Code = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Text = str | Int64 | float
"""Names may be written as numbers (streams and communicators often are)."""
Wild = Int32 | Annotated[str, Meta(pattern=r"^(any|[0-9]{1,9})$")]
WildTag = (
    Annotated[int, Meta(ge=0, le=2**63 - 1)] | Annotated[str, Meta(pattern=r"^(any|[0-9]{1,18})$")]
)


class Header(Struct):
    """First line of a file. The keys after ``t0_ns`` are written by ``dl2gpu convert`` only."""

    kind: str
    format: str = "dl2gpu.trace"
    version: int = 1
    job: Text | None = None
    rank: Rank | None = None
    world_size: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    backend: str | None = None
    attempt: Int32 | None = None
    lost_before: Natural | None = None
    t0_ns: Int64 | None = None
    # what other sources know of a job and a rank, and the native format has no key for
    source: str | None = None
    waits: bool | None = None
    p2p: bool | None = None
    timed: bool | UnsetType | None = UNSET
    only_active: bool | None = None
    truncated: bool | None = None
    defaults: bool | None = None
    """False: an absent key is null, and names are exact (a converted trace)."""


class Comm(Struct):
    """A communicator, as one of its members declares it."""

    id: Text
    ranks: Annotated[list[Rank], Meta(max_length=1 << 20)] | None = None
    name: Text | None = None
    desc: Text | None = None


class End(Struct):
    """Last line of a file."""

    exit: str | None = None
    code: Code | None = None
    t: Int64 | None = None


class Status(Struct):
    """What a rank says of a communicator as a whole (written by ``dl2gpu convert`` only)."""

    comm: Text
    last_enqueued: Int64 | None = None
    last_started: Int64 | None = None
    last_completed: Int64 | None = None


class Op(Struct, omit_defaults=True):
    """One operation."""

    kind: Literal["op"]
    seq: Int64
    op: Text
    lane: Int32 | None = None
    comm: Text | None = None
    stream: Text | None = None
    blocking: bool | None = None
    request: Int64 | None = None
    requests: list[Int64] | Literal["all"] | None = None
    mode: Literal["all", "any", "some"] | None = None
    peer: Wild | None = None
    tag: WildTag | None = None
    recv_peer: Wild | None = None
    recv_tag: WildTag | None = None
    send_mode: Literal["standard", "synchronous", "buffered", "ready"] | None = None
    root: Int32 | None = None
    reduce_op: Text | None = None
    count: Natural | None = None
    count_out: Natural | None = None
    dtype: Text | None = None
    bytes: Natural | None = None
    splits: list[Natural] | None = None
    group: Int64 | None = None
    ordinal: Natural | None = None
    state: Literal["unknown", "scheduled", "started", "completed"] | None = None
    t_created: Int64 | None = None
    t_started: Int64 | None = None
    t_completed: Int64 | None = None
    matched_peer: Int32 | None = None
    matched_tag: Int64 | None = None
    returned: list[Int64] | None = None
    new_comm: Text | None = None
    split: bool | None = None
    stack: list[str] | None = None
    flags: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None


class _Kind(Struct):
    kind: Text


_kind = msgspec.json.Decoder(_Kind)
_op = msgspec.json.Decoder(Op)
_encode = msgspec.json.Encoder().encode
decode_header: Final = msgspec.json.Decoder(Header).decode
decode_comm: Final = msgspec.json.Decoder(Comm).decode
decode_end: Final = msgspec.json.Decoder(End).decode
decode_status: Final = msgspec.json.Decoder(Status).decode

_KNOWN: Final = {
    "header": decode_header,
    "comm": decode_comm,
    "end": decode_end,
    "status": decode_status,
    "op": _op.decode,
}


def kind_of(line: bytes | memoryview) -> str:
    """Kind of a line. Raises msgspec.MsgspecError or RecursionError where it has none."""
    return str(_kind.decode(line).kind)


_SPELLINGS: Final = {name.replace("_", ""): name for name in OP} | {
    "bcast": "broadcast",
    "alltoallv": "all_to_all_v",
    "commsplit": "comm_create",
}


def op_spelling(name: str) -> str:
    """Catalogue spelling of an operation's name: ``AllReduce`` is ``all_reduce``."""
    if name in OP:
        return name
    return _SPELLINGS.get(re.sub(r"[-_ ]", "", name.lower()), name)


def needs_comm(op: str) -> bool:
    """Does an operation (catalogue spelling) make no sense without a communicator."""
    code = OP.get(op, 1000)
    return code >= OP["all_reduce"] and code != OP["finalize"]


# --------------------------------------------------------------------------------------------------
# The careful reading


@dataclass(frozen=True, slots=True)
class Clean:
    """A file as the columnar parser takes it."""

    data: bytes
    lost: str | None
    """What was lost at the end of the file, for a person; None = nothing."""


def clean(data: bytes) -> Clean:
    """An equal file without what only the columnar parser minds, cut where its end is damaged.

    Args:
        data: the content of one JSON Lines file, UTF-8.

    Raises:
        InputError: a line is not what the format allows and valid lines follow, or its values are
            wrong. The operations of a rank have an order: with a hole in it, or a guessed value,
            none of what follows could be trusted, so the file is not used. Names line and column.
    """
    out: list[bytes] = []
    lanes: dict[int, _Lane] = {}
    comms: set[str] = set()
    statuses = 0
    lines = _lines(data)
    for number, line in lines:
        if len(line) > MAX_LINE and not line.startswith(b'{"kind":"comm"'):
            raise InputError(
                f"line {number}: expected at most {MAX_LINE} bytes in a line, found {len(line)}"
            )
        try:
            kind = kind_of(line)
            record = _KNOWN[kind](line) if kind in _KNOWN else None
        except msgspec.ValidationError as e:
            raise InputError(f"line {number}: {_place(str(e))}") from e
        except (msgspec.DecodeError, RecursionError) as e:
            fault = f"line {number}, {_column(e, line)}"
            for later, text in lines:
                if _valid(text):
                    raise InputError(
                        f"{fault}, but line {later} is valid again: expected one JSON object a "
                        "line. The order of this rank's operations has a hole; the file is not used"
                    ) from e
            return Clean(b"\n".join(out) + b"\n", f"{fault}: the end of the file was dropped")
        twice = repeated_key(line, kind)
        if twice is not None:
            key, column = twice
            raise InputError(
                f"line {number}, column {column}: key {key!r} stands twice in one object; "
                "expected each key once"
            )
        if isinstance(record, Header) and out:
            raise InputError(
                f"line {number}: a second header: expected one rank and attempt in a file; split "
                "the file there"
            )
        if isinstance(record, Op):
            line = _checked(record, number, lanes)
            comms |= {str(c) for c in (record.comm, record.new_comm) if c is not None}
        elif isinstance(record, Comm):
            comms.add(str(record.id))
        statuses += isinstance(record, Status)
        if max(len(comms), statuses) > MAX_COMMS:
            raise InputError(
                f"line {number}: expected at most {MAX_COMMS} communicators in a file, found more"
            )
        out.append(line)
    return Clean(b"\n".join(out) + b"\n", None)


MAX_COMMS: Final = 100_000
"""Distinct communicators of one rank; a job of thousands of ranks has some dozens."""


MAX_LINE: Final = 4 << 20
"""Bytes of a line; one of an uneven all_to_all over 100,000 ranks has less than one million."""


class _Lane:
    """Numbers seen in a lane: eight bytes each as long as they rise."""

    def __init__(self) -> None:
        self.numbers = array("q")
        self.known: set[int] | None = None

    def add(self, seq: int) -> bool:
        """False where ``seq`` was there before."""
        if self.known is None:
            if not self.numbers or seq > self.numbers[-1]:
                self.numbers.append(seq)
                return True
            self.known = set(self.numbers)
        if seq in self.known:
            return False
        self.known.add(seq)
        return True


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and text of each line that is not blank, one at a time."""
    start, number = 0, 0
    while start < len(data):
        stop = data.find(b"\n", start)
        stop = len(data) if stop < 0 else stop
        number += 1
        line = data[start:stop].strip()
        if line:
            yield number, line
        start = stop + 1


def _checked(op: Op, number: int, lanes: dict[int, _Lane]) -> bytes:
    name = str(op.op)
    if not name:
        raise InputError(f"line {number}: key op: expected the name of an operation, found ''")
    if op.comm is None and needs_comm(op_spelling(name)):
        raise InputError(f"line {number}: key comm: expected a communicator id for {name}")
    lane = op.lane or 0
    if not lanes.setdefault(lane, _Lane()).add(op.seq):
        raise InputError(
            f"line {number}: key seq: expected increasing numbers within lane {lane}, found "
            f"{op.seq} a second time"
        )
    return _encode(op)


def _valid(line: bytes) -> bool:
    try:
        return kind_of(line) in _KNOWN
    except (msgspec.MsgspecError, RecursionError):
        return False


def _place(message: str) -> str:
    """A message of msgspec, ``Expected `int`, got `str` - at `$.seq```, worded as our others."""
    what, _, path = message.partition(" - at `")
    what = what.replace("`", "").replace(", got", ", found")
    what = what[0].lower() + what[1:].replace("int | float | str", "a name")
    if not path:
        return what
    return f"key {path.rstrip('`').removeprefix('$.') or 'of the line'}: {what}"


def _column(error: Exception, line: bytes) -> str:
    if isinstance(error, RecursionError):
        return "column 1: nested too deeply"
    text = str(error)
    at = re.search(r"\(byte (\d+)\)", text)
    if at:
        what = text[: at.start()].strip().lower().replace("json is malformed: ", "")
        column = int(at.group(1)) + ("trailing" not in what)  # there msgspec is one byte further
        return f"column {column}: not JSON ({what})"
    return f"column {len(line) + 1}: the line is cut short"


_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"(\s*:)?|[{}\[\]]')


_FIELDS: Final = {
    kind: frozenset(type_.__struct_fields__) | {"kind"}
    for kind, type_ in (
        ("header", Header), ("comm", Comm), ("end", End), ("status", Status), ("op", Op)
    )
}  # fmt: skip


def repeated_key(line: bytes, kind: str) -> tuple[str, int] | None:
    """A known key that stands twice in the outer object of a line, and its column (from 1)."""
    known = _FIELDS.get(kind, frozenset())
    depth = 0
    keys: set[str] = set()
    for token in _TOKEN.finditer(line):
        first = line[token.start()]
        if first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
        elif depth == 1 and token.group(1):
            text = token.group(0)[: token.start(1) - token.start()]
            key = str(msgspec.json.decode(text))
            if key in keys:
                return key, token.start() + 1
            if key in known:
                keys.add(key)
    return None
