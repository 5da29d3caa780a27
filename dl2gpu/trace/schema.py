"""The event table: one row is one operation that one rank issued.

Every reader produces a :class:`Trace`, whatever the bytes looked like; every analysis takes one.
Columns hold integers only: names live in side tables and are looked up at the edges (the hot path
never sees a string, and cuDF takes no categorical column in a translated plan).

Null means *not known* or *does not apply*; a wildcard is the explicit value :data:`ANY`.
Row order carries no meaning: order is ``seq`` within ``(job, rank, lane)``.

Source: DESIGN.md sections 3 and 4, TRACE_FORMAT.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import polars as pl

from dl2gpu.engine.arrays import plain
from dl2gpu.trace.order_kernel import in_order

__all__ = [
    "ANY",
    "COMMS",
    "DTYPE_BYTES",
    "DTYPE_OTHER",
    "EVENTS",
    "EXIT",
    "FLAG",
    "JOBS",
    "MODE",
    "OP",
    "OP_CLASS",
    "OP_OTHER",
    "RANKS",
    "SAID",
    "SEND_MODE",
    "STACKS",
    "STATE",
    "STATUS",
    "STRINGS",
    "SchemaError",
    "StringTable",
    "Trace",
    "concat",
    "dtype_code",
    "dtype_name",
    "empty",
    "one_job",
    "op_code",
    "op_name",
    "some_jobs",
    "split",
    "validate",
]

ANY: Final = -1
"""Wildcard in ``peer``, ``tag``, ``recv_peer`` and ``recv_tag`` (MPI_ANY_SOURCE, MPI_ANY_TAG)."""

# --------------------------------------------------------------------------------------------------
# The op catalogue

OP: Final[dict[str, int]] = {
    # host-side and point-to-point
    "send": 1,
    "recv": 2,
    "sendrecv": 3,
    "probe": 4,
    "wait": 5,
    # synchronising collectives: nobody leaves before all have come (rule 3)
    "all_reduce": 10,
    "all_gather": 11,
    "reduce_scatter": 12,
    "all_to_all": 13,
    "barrier": 14,
    "all_gather_v": 15,
    "reduce_scatter_v": 16,
    "all_to_all_v": 17,
    "comm_create": 18,
    "finalize": 19,
    # prefix collectives: synchronise here; rank i needs only ranks below it under the early reading
    "scan": 20,
    "exscan": 21,
    # a batch's end record, where a source writes one and its members cannot be told
    "coalesced": 22,
    # rooted collectives (rule 4)
    "broadcast": 30,
    "scatter": 31,
    "scatter_v": 32,
    "reduce": 40,
    "gather": 41,
    "gather_v": 42,
}
"""Codes of the known operations. An unknown collective keeps its name: OP_OTHER + string code."""

OP_OTHER: Final = 1000
_OP_NAMES: Final = {code: name for name, code in OP.items()}

OP_CLASS: Final[dict[str, tuple[int, int]]] = {
    "p2p": (1, 4),
    "wait": (5, 5),
    "synchronising": (10, 29),
    "root_sends": (30, 39),
    "root_receives": (40, 49),
}
"""Inclusive ranges of op codes. Codes from ``OP_OTHER`` on are synchronising as well."""


def op_code(name: str, strings: StringTable) -> int:
    """Catalogue code of ``name`` (canonical spelling); an unknown one goes to ``strings``."""
    known = OP.get(name)
    return known if known is not None else OP_OTHER + strings.code(name)


def op_name(code: int, strings: Sequence[str]) -> str:
    """Name of an op code; ``strings`` is the text column of the string table, by code."""
    return strings[code - OP_OTHER] if code >= OP_OTHER else _OP_NAMES[code]


# --------------------------------------------------------------------------------------------------
# Small enumerations, stored as UInt8

STATE: Final = {"unknown": 0, "scheduled": 1, "started": 2, "completed": 3}
MODE: Final = {"all": 0, "any": 1, "some": 2}
SEND_MODE: Final = {"standard": 0, "synchronous": 1, "buffered": 2, "ready": 3}
EXIT: Final = {"unknown": 0, "finished": 1, "crashed": 2, "killed": 3, "alive": 4, "window": 5}
"""How a rank ended. "window": the recorder stopped, or lost its tail, while the rank went on: what
is not in the record may have come later."""

FLAG: Final = {
    # state was derived from a weaker sign (gloo: `retired`), or is known to lie (abort)
    "state_unreliable": 1,
    # sizes are missing or in a form that must not be compared (all_to_all before version 2.4)
    "sizes_incomparable": 2,
    # member of a batch whose end record is missing
    "partial_group": 4,
    # the communicator's members were inferred, not read
    "synthetic_comm": 8,
    # the root was inferred from the shape of the tensors
    "root_inferred": 16,
    # host blocking is a guess: the source does not record whether the call was synchronous
    "blocking_inferred": 32,
    # the stream is a guess from the communicator and the peers (no source field)
    "stream_inferred": 64,
    # an unknown collective, treated as synchronising
    "unknown_op": 128,
    # the ordinal is not the source's: the ranks' sequences were laid over each other
    "ordinal_inferred": 256,
}
"""Bits of the ``flags`` column."""

# --------------------------------------------------------------------------------------------------
# Data types

DTYPE_BYTES: Final[dict[str, int]] = {
    "u8": 1,
    "i8": 1,
    "bool": 1,
    "fp8e4m3": 1,
    "fp8e5m2": 1,
    "fp8e8m0": 1,
    "f16": 2,
    "bf16": 2,
    "i16": 2,
    "u16": 2,
    "f32": 4,
    "i32": 4,
    "u32": 4,
    "c32": 4,
    "f64": 8,
    "i64": 8,
    "u64": 8,
    "c64": 8,
    "c128": 16,
}
"""Canonical data types and their size in bytes. The code of a type is its position here."""

_DTYPE_NAMES: Final = tuple(DTYPE_BYTES)
_DTYPE_CODES: Final = {name: code for code, name in enumerate(_DTYPE_NAMES)}
DTYPE_OTHER: Final = 1000

_DTYPE_SPELLINGS: Final[dict[str, str]] = {
    # PyTorch ScalarType (Flight Recorder from 2.2, Kineto)
    "byte": "u8", "char": "i8", "half": "f16", "bfloat16": "bf16", "short": "i16", "int": "i32",
    "float": "f32", "double": "f64", "long": "i64", "uint16": "u16", "uint32": "u32",
    "uint64": "u64", "complexhalf": "c32", "complexfloat": "c64", "complexdouble": "c128",
    "float8_e4m3fn": "fp8e4m3", "float8_e4m3fnuz": "fp8e4m3", "float8_e5m2": "fp8e5m2",
    "float8_e5m2fnuz": "fp8e5m2", "float8_e8m0fnu": "fp8e8m0", "quint8": "u8", "qint8": "i8",
    "qint32": "i32",
    # C++ type names (Flight Recorder 2.0, execution traces)
    "unsigned char": "u8", "signed char": "i8", "c10::half": "f16", "c10::bfloat16": "bf16",
    "short int": "i16", "long int": "i64", "c10::complex<float>": "c64",
    "c10::complex<double>": "c128", "c10::complex<c10::half>": "c32",
    # Python and NumPy names, torch.dtype, MPI datatypes
    "float16": "f16", "float32": "f32", "float64": "f64", "int8": "i8", "int16": "i16",
    "int32": "i32", "int64": "i64", "uint8": "u8", "complex64": "c64", "complex128": "c128",
    "mpi_int": "i32", "mpi_float": "f32", "mpi_double": "f64", "mpi_char": "i8",
    "mpi_byte": "u8", "mpi_long": "i64", "mpi_long_long": "i64", "mpi_unsigned": "u32",
}  # fmt: skip


def dtype_code(name: str, strings: StringTable) -> int:
    """Code of a data type in any known spelling; an unknown one is interned in ``strings``."""
    text = name.strip()
    low = text.lower().removeprefix("torch.")
    canonical = _DTYPE_SPELLINGS.get(low, low)
    known = _DTYPE_CODES.get(canonical)
    return known if known is not None else DTYPE_OTHER + strings.code(text)


def dtype_name(code: int, strings: Sequence[str]) -> str:
    """Canonical name of a data type code."""
    return strings[code - DTYPE_OTHER] if code >= DTYPE_OTHER else _DTYPE_NAMES[code]


# --------------------------------------------------------------------------------------------------
# The tables

EVENTS: Final[dict[str, pl.DataType]] = {
    "job": pl.Int32(),  # row of the jobs table: one job name and one attempt
    "rank": pl.Int32(),  # global rank that issued the operation
    "lane": pl.Int32(),  # program-order queue of the host (thread), 0 = main
    "seq": pl.Int64(),  # position in the lane, strictly increasing
    "op": pl.Int32(),  # op catalogue
    "stream": pl.Int32(),  # string code of the device queue; null: occupies the host
    "blocking": pl.Boolean(),  # host operations: does the host wait until it completes
    "request": pl.Int64(),  # id of this operation within the rank, for a later wait
    "requests": pl.List(pl.Int64()),  # wait: what it waits for; empty = all issued and unfinished
    "mode": pl.UInt8(),  # wait: MODE
    "comm": pl.Int32(),  # row of the comms table
    "new_comm": pl.Int32(),  # comm_create: the communicator it makes
    "split": pl.Boolean(),  # comm_create: each colour gets its own new_comm
    "ordinal": pl.Int64(),  # k-th collective on the communicator, as the source numbers it
    "peer": pl.Int32(),  # p2p: global rank of the other side, ANY, or null = unknown
    "tag": pl.Int64(),  # p2p: tag, ANY, or null = none recorded
    "recv_peer": pl.Int32(),  # sendrecv: where its receive is from
    "recv_tag": pl.Int64(),
    "send_mode": pl.UInt8(),  # SEND_MODE
    "root": pl.Int32(),  # global rank of the root of a rooted collective
    "reduce_op": pl.Int32(),  # string code
    "count": pl.Int64(),  # elements this rank passes in
    "count_out": pl.Int64(),  # elements it gets, where that differs
    "dtype": pl.Int32(),  # dtype catalogue
    "bytes": pl.Int64(),  # bytes this rank passes in
    "splits": pl.List(pl.Int64()),  # all_to_all: elements to each member, in group order
    "group": pl.Int64(),  # batch id within the rank: issued together, completes as a unit
    "state": pl.UInt8(),  # STATE
    "t_created": pl.Int64(),  # ns since the epoch
    "t_started": pl.Int64(),
    "t_completed": pl.Int64(),
    "matched_peer": pl.Int32(),  # wildcard receive: whom it did match
    "matched_tag": pl.Int64(),
    "returned": pl.List(pl.Int64()),  # wait for any or some: those it was told of
    "stack": pl.Int32(),  # row of the stacks table
    "flags": pl.UInt32(),  # FLAG bits
}

JOBS: Final[dict[str, pl.DataType]] = {
    "job": pl.Int32(),  # 0 .. n-1
    "name": pl.String(),  # name in the trace, else the folder below the scanned path
    "folder": pl.String(),  # jobs of one name in different folders stay apart
    "attempt": pl.Int32(),  # restart counter, 0 where the source has none
    "world_size": pl.Int32(),  # null: unknown
    "backend": pl.String(),  # nccl, gloo, mpi, ... : chooses the default semantics
    "source": pl.String(),  # reader's name: native, flight_recorder, ...
    "waits": pl.Boolean(),  # does the source record waits and blocking (native does, FR does not)
    "p2p": pl.Boolean(),  # does the source record point to point and comm_create (gloo FR: no)
}

RANKS: Final[dict[str, pl.DataType]] = {
    "job": pl.Int32(),
    "rank": pl.Int32(),
    "exit": pl.UInt8(),  # EXIT; unknown where the source has no end mark
    "code": pl.Int32(),  # exit status
    "t_last": pl.Int64(),  # last sign of life, ns
    "truncated": pl.Boolean(),  # the record was cut while being written
    "lost_before": pl.Int64(),  # operations lost before the first recorded one; 0 = none
    "only_active": pl.Boolean(),  # completed operations were left out of the record
    "timed": pl.Boolean(),  # can `started` be observed at all; null = unknown
    "path": pl.String(),  # the input it came from
}

COMMS: Final[dict[str, pl.DataType]] = {
    "comm": pl.Int32(),  # 0 .. n-1, unique over the whole table, not only within a job
    "job": pl.Int32(),
    "id": pl.String(),  # unique in the job, the same on every member
    "name": pl.String(),
    "desc": pl.String(),
    "ranks": pl.List(pl.Int32()),  # members' global ranks in group order; empty = unknown
}

STACKS: Final[dict[str, pl.DataType]] = {
    "stack": pl.Int32(),
    "frames": pl.List(pl.String()),  # "function file:line", innermost first
}

STRINGS: Final[dict[str, pl.DataType]] = {"code": pl.Int32(), "text": pl.String()}

STATUS: Final[dict[str, pl.DataType]] = {
    # what a rank says of a communicator as a whole (pg_status, watchdog lines); -1 = never
    "job": pl.Int32(),
    "rank": pl.Int32(),
    "comm": pl.Int32(),
    "last_enqueued": pl.Int64(),
    "last_started": pl.Int64(),
    "last_completed": pl.Int64(),
}

SAID: Final[dict[str, pl.DataType]] = {
    # what a line of a log states and no event can hold: one row a statement (trace/log_facts.py
    # lists the kinds); few rows, whatever the size of the log
    "job": pl.Int32(),
    "what": pl.String(),  # kind of statement
    "rank": pl.Int32(),  # global rank that states it, or of which a launcher does; null: unknown
    "of": pl.List(pl.Int32()),  # global ranks of whom it is stated
    "comm": pl.Int32(),
    "ordinal": pl.Int64(),
    "op": pl.Int32(),  # op catalogue
    "count": pl.Int64(),
    "count_out": pl.Int64(),
    "enqueued": pl.Int64(),
    "started": pl.Int64(),
    "completed": pl.Int64(),
    "number": pl.Int64(),  # exit code, milliseconds, number of ranks, ... as the kind has it
    "t": pl.Int64(),  # ns since the epoch, of this line or of the last one above it that has a time
    "file": pl.Int32(),  # place in the log: file of the job, line
    "line": pl.Int64(),
    "path": pl.String(),
    "text": pl.String(),  # the message, cut
}

_TABLES: Final[dict[str, dict[str, pl.DataType]]] = {
    "events": EVENTS,
    "jobs": JOBS,
    "ranks": RANKS,
    "comms": COMMS,
    "stacks": STACKS,
    "strings": STRINGS,
    "status": STATUS,
    "said": SAID,
}

_REQUIRED: Final[dict[str, tuple[str, ...]]] = {
    "events": ("job", "rank", "lane", "seq", "op", "blocking", "state", "flags"),
    "jobs": ("job", "name", "folder", "attempt", "source", "waits", "p2p"),
    "ranks": ("job", "rank", "exit", "truncated", "lost_before", "only_active"),
    "comms": ("comm", "job", "id", "ranks"),
    "stacks": ("stack", "frames"),
    "strings": ("code", "text"),
    "status": ("job", "rank", "comm"),
    "said": ("job", "what"),
}


class SchemaError(ValueError):
    """A table breaks the contract. Names the file, row and column, what was expected and found."""


class StringTable:
    """Interns strings: text to dense code, in order of first sight."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._codes: dict[str, int] = {}
        for text in texts:
            self.code(text)

    def code(self, text: str) -> int:
        return self._codes.setdefault(text, len(self._codes))

    @property
    def texts(self) -> list[str]:
        return list(self._codes)

    def frame(self) -> pl.DataFrame:
        """The table as a frame with the columns of :data:`STRINGS`."""
        texts = self.texts
        return pl.DataFrame(
            {"code": range(len(texts)), "text": texts}, schema=STRINGS, strict=False
        )


def empty(table: str) -> pl.DataFrame:
    """An empty frame with the columns of ``table``."""
    return pl.DataFrame(schema=_TABLES[table])


@dataclass(frozen=True)
class Trace:
    """The event table and its side tables. All frames; nothing here is computed."""

    events: pl.DataFrame = field(default_factory=lambda: empty("events"))
    jobs: pl.DataFrame = field(default_factory=lambda: empty("jobs"))
    ranks: pl.DataFrame = field(default_factory=lambda: empty("ranks"))
    comms: pl.DataFrame = field(default_factory=lambda: empty("comms"))
    stacks: pl.DataFrame = field(default_factory=lambda: empty("stacks"))
    strings: pl.DataFrame = field(default_factory=lambda: empty("strings"))
    status: pl.DataFrame = field(default_factory=lambda: empty("status"))
    said: pl.DataFrame = field(default_factory=lambda: empty("said"))

    def tables(self) -> Mapping[str, pl.DataFrame]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def conform(frame: pl.DataFrame, table: str) -> pl.DataFrame:
    """``frame`` with exactly the columns of ``table``: missing ones null, types cast, no others."""
    schema = _TABLES[table]
    return frame.select(
        (pl.col(name).cast(dtype) if name in frame.columns else pl.lit(None, dtype).alias(name))
        for name, dtype in schema.items()
    )


def concat(traces: Sequence[Trace]) -> Trace:
    """One trace of several: jobs, communicators, stacks and strings are renumbered.

    Equal strings and equal stacks become one row. The result depends on the order of ``traces``
    in its numbering only.
    """
    traces = [t for t in traces if t.jobs.height]
    if not traces:
        return Trace()
    if len(traces) == 1:
        return traces[0]
    strings = StringTable()
    stacks: dict[tuple[str, ...], int] = {}
    out: dict[str, list[pl.DataFrame]] = {name: [] for name in _TABLES}
    n_jobs = n_comms = 0
    for t in traces:
        new_string = pl.Series(
            [strings.code(s) for s in t.strings.sort("code")["text"]], dtype=pl.Int32
        )
        new_stack = pl.Series(
            [
                stacks.setdefault(tuple(frames), len(stacks))
                for frames in t.stacks.sort("stack")["frames"]
            ],
            dtype=pl.Int32,
        )
        out["events"].append(
            t.events.with_columns(
                pl.col("job") + n_jobs,
                pl.col("comm") + n_comms,
                pl.col("new_comm") + n_comms,
                stack=_gather(t.events["stack"], new_stack),
                stream=_gather(t.events["stream"], new_string),
                reduce_op=_gather(t.events["reduce_op"], new_string),
                op=_gather_above(t.events["op"], OP_OTHER, new_string),
                dtype=_gather_above(t.events["dtype"], DTYPE_OTHER, new_string),
            )
        )
        out["jobs"].append(t.jobs.with_columns(pl.col("job") + n_jobs))
        out["ranks"].append(t.ranks.with_columns(pl.col("job") + n_jobs))
        out["comms"].append(t.comms.with_columns(pl.col("job") + n_jobs, pl.col("comm") + n_comms))
        out["status"].append(
            t.status.with_columns(pl.col("job") + n_jobs, pl.col("comm") + n_comms)
        )
        out["said"].append(
            t.said.with_columns(
                pl.col("job") + n_jobs,
                pl.col("comm") + n_comms,
                op=_gather_above(t.said["op"], OP_OTHER, new_string),
            )
        )
        n_jobs += t.jobs.height
        n_comms += t.comms.height
    joined = {name: pl.concat(frames) for name, frames in out.items() if frames}
    return Trace(
        **joined,
        strings=strings.frame(),
        stacks=pl.DataFrame(
            {"stack": range(len(stacks)), "frames": [list(s) for s in stacks]},
            schema=STACKS,
            strict=False,
        ),
    )


def one_job(trace: Trace, job: int) -> Trace:
    """The tables of one job; see :func:`split`."""
    return split(trace, [job, job + 1])[0]


def some_jobs(trace: Trace, jobs: Sequence[int]) -> list[Trace]:
    """The tables of each of the jobs; see :func:`split`."""
    return _between(trace, [(job, job + 1) for job in jobs])


def split(trace: Trace, cuts: Sequence[int]) -> list[Trace]:
    """The tables of the jobs from one cut to the next, for each but the last.

    Jobs and communicators are numbered from 0 in each part, stacks and strings stay. Where the
    rows of a table come job by job they are not copied.
    """
    return _between(trace, list(pairwise(cuts)))


def _between(trace: Trace, runs: Sequence[tuple[int, int]]) -> list[Trace]:
    """The tables of the jobs of each run, from its first to before its end."""
    parts: list[Trace] = []
    sources = {name: f for name, f in trace.tables().items() if "job" in f.columns}
    ordered = {name for name, frame in sources.items() if frame["job"].is_sorted()}
    for first, end in runs:
        tables = {}
        for name, frame in sources.items():
            if name in ordered:
                lo, hi = np.searchsorted(frame["job"].to_numpy(), [first, end])
                part = frame[int(lo) : int(hi)]
            else:
                part = frame.filter(pl.col("job").is_between(first, end - 1))
            tables[name] = part.with_columns(pl.col("job") - first)
        comms = tables["comms"].sort("comm")
        number = np.full(trace.comms.height, -1, dtype=np.int32)
        number[comms["comm"].to_numpy()] = np.arange(comms.height, dtype=np.int32)
        of_comm = pl.Series(number)
        tables["comms"] = comms.with_columns(comm=_gather(comms["comm"], of_comm))
        for name, columns in (
            ("events", ("comm", "new_comm")),
            ("status", ("comm",)),
            ("said", ("comm",)),
        ):
            frame = tables[name]
            tables[name] = frame.with_columns(_gather(frame[c], of_comm) for c in columns)
        parts.append(dataclasses.replace(trace, **tables))
    return parts


def _gather(codes: pl.Series, table: pl.Series) -> pl.Series:
    if codes.null_count() == len(codes):
        return codes
    return table.gather(codes).alias(codes.name)


def _gather_above(codes: pl.Series, base: int, table: pl.Series) -> pl.Series:
    if codes.null_count() == len(codes) or codes.max() < base:  # type: ignore[operator]
        return codes
    other = codes >= base
    moved = table.gather(pl.select(pl.when(other).then(codes - base).otherwise(0)).to_series())
    return (
        pl.select(pl.when(other).then(moved + base).otherwise(codes)).to_series().alias(codes.name)
    )


# --------------------------------------------------------------------------------------------------
# Validation: one place that says what a correct table is

_BIG: Final = 1 << 62
"""Counts and bytes above this are refused: sums over them would leave 64 bits."""


class _Rule(NamedTuple):
    """What a column of the event table must be; ``wrong`` is true in the rows that are not."""

    column: str
    expected: str
    kept: Callable[[], bool]
    """A quick look at the whole column: is the rule kept? May say no where it is."""
    wrong: pl.Expr


def _event_rules(t: Trace) -> list[_Rule]:
    n_strings = t.strings.height

    def within(column: str, low: int, high: int | None, expected: str) -> _Rule:
        values = t.events[column]
        wrong = pl.col(column) < low
        if high is not None:
            wrong |= pl.col(column) > high

        def kept() -> bool:
            if values.null_count() == len(values):
                return True
            return int(values.min()) >= low and (high is None or int(values.max()) <= high)  # type: ignore[arg-type]

        return _Rule(column, expected, kept, wrong)

    def reference(column: str, size: int) -> _Rule:
        return within(column, 0, size - 1, f"null or 0..{size - 1}")

    def natural(column: str) -> _Rule:
        return within(column, 0, _BIG, f"null or 0..2^62 {column}")

    def enum(column: str, values: Mapping[str, int]) -> _Rule:
        return within(column, 0, max(values.values()), " | ".join(values))

    def rank(column: str, low: int, expected: str) -> _Rule:
        return within(column, low, None, expected)

    codes = list(OP.values())
    known = pl.col("op").is_in(codes)
    other = (pl.col("op") >= OP_OTHER) & (pl.col("op") < OP_OTHER + n_strings)
    collective = (pl.col("op") >= OP["all_reduce"]) & (pl.col("op") != OP["finalize"])
    return [
        reference("job", t.jobs.height),
        rank("rank", 0, "a global rank, 0 or more"),
        rank("lane", 0, "0 or more"),
        _Rule(
            "op", "a code of the op catalogue",
            lambda: set(codes).issuperset(t.events["op"].unique().to_list()), ~(known | other),
        ),
        reference("comm", t.comms.height),
        reference("new_comm", t.comms.height),
        reference("stack", t.stacks.height),
        reference("stream", n_strings),
        reference("reduce_op", n_strings),
        _Rule(
            "comm", "a communicator for a collective",
            lambda: not t.events["comm"].null_count(), collective & pl.col("comm").is_null(),
        ),
        rank("peer", ANY, "a global rank, ANY (-1) or null"),
        rank("recv_peer", ANY, "a global rank, ANY (-1) or null"),
        rank("root", 0, "a global rank or null"),
        natural("count"), natural("count_out"), natural("bytes"), natural("ordinal"),
        enum("mode", MODE), enum("send_mode", SEND_MODE), enum("state", STATE),
    ]  # fmt: skip


def _increasing(events: pl.DataFrame) -> bool:
    """Are the rows strictly increasing by (job, rank, seq, lane)?

    Readers mostly deliver them so: then no two are equal, and no dearer look is needed.
    """
    return bool(in_order(*(plain(events[name]) for name in ("job", "rank", "seq", "lane"))))


def validate(trace: Trace, source: str = "trace") -> Trace:
    """``trace``, if it keeps the contract of this module.

    Raises:
        SchemaError: names ``source`` (usually the file), table, row, column, what was expected and
            what was found. Checks columns and types, required values, references, ranges, and that
            ``(job, rank, lane, seq)`` is unique.
    """
    for name, frame in trace.tables().items():
        schema = _TABLES[name]
        for column, dtype in schema.items():
            if column not in frame.columns:
                raise SchemaError(f"{source}: table {name}: column {column} ({dtype}) is missing")
            if frame.schema[column] != dtype:
                raise SchemaError(
                    f"{source}: table {name}, column {column}: expected {dtype}, "
                    f"found {frame.schema[column]}"
                )
        for column in _REQUIRED[name]:
            if frame[column].null_count():
                row = frame[column].is_null().arg_true()[0]
                raise SchemaError(
                    f"{source}: table {name}, row {row}, column {column}: expected a value, "
                    "found null"
                )
        index = {"jobs": "job", "comms": "comm", "stacks": "stack", "strings": "code"}.get(name)
        if (
            index
            and frame.height
            and not (
                frame[index].n_unique() == frame.height
                and frame[index].min() == 0
                and frame[index].max() == frame.height - 1
            )
        ):
            raise SchemaError(
                f"{source}: table {name}, column {index}: expected every number from 0 to "
                f"{frame.height - 1} once"
            )
    for name in ("ranks", "comms", "status", "said"):
        frame = trace.tables()[name]
        for column, size in (("job", trace.jobs.height), ("comm", trace.comms.height)):
            if column not in frame.columns or frame.is_empty():
                continue
            outside = frame.filter(~pl.col(column).is_between(0, size - 1))
            if outside.height:
                raise SchemaError(
                    f"{source}: table {name}, column {column}: expected 0..{size - 1}, "
                    f"found {outside[column][0]}"
                )
    events = trace.events
    if events.is_empty():
        return trace
    for column, expected, kept, wrong in _event_rules(trace):
        if kept():
            continue
        rows = events.with_row_index("__row").filter(wrong.fill_null(False))
        if rows.height:
            row = rows.row(0, named=True)
            raise SchemaError(
                f"{source}: row {row['__row']} (rank {row['rank']}, lane {row['lane']}, "
                f"seq {row['seq']}), column {column}: expected {expected}, found {row[column]}"
            )
    key = ["job", "rank", "lane", "seq"]
    if not _increasing(events) and (
        events.select(pl.struct(key).n_unique()).item() != events.height
    ):
        twice = events.group_by(key).len().filter(pl.col("len") > 1).sort(key).row(0, named=True)
        raise SchemaError(
            f"{source}: rank {twice['rank']}, lane {twice['lane']}, column seq: expected "
            f"increasing numbers, found {twice['seq']} {twice['len']} times"
        )
    return trace
