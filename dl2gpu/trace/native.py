"""Reader of the native JSON Lines format: many jobs' files at once, parsed by columns.

The way of the bytes: the files' operation lines are joined into chunks of some megabytes, which
``native_columns`` turns into columns; the few other lines are decoded one by one. A file that the
columnar parser refuses is read again with care (``native_lines.clean``), which says what is wrong
where, or gives a form that the parser takes.

Beside TRACE_FORMAT.md, :func:`read` knows what :func:`write_jsonl` adds, so that a trace of another
source survives the way through JSON Lines: keys of the header (``native_lines.Header``), ``flags``
in operations, and lines of kind ``status``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.trace.files import cut_reason, load_ahead, read_bytes
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.native_columns import Interned, Lines, RefusedError, encode
from dl2gpu.trace.native_lines import (
    MAX_COMMS,
    MAX_LINE,
    Comm,
    Header,
    clean,
    decode_comm,
    decode_end,
    decode_header,
    decode_status,
    kind_of,
    repeated_key,
)
from dl2gpu.trace.native_tables import Communicators, File, jobs_table, ranks_table
from dl2gpu.trace.native_write import write_jsonl
from dl2gpu.trace.schema import (
    STACKS,
    StringTable,
    Trace,
    conform,
)

__all__ = ["read", "write_jsonl"]

_MAX_BRACKETS: Final = 1000
"""Opening brackets of a line for Polars: before 2.0 some 3000 levels overflow its stack."""
_CHUNK: Final = 4 << 20
"""Bytes parsed at once. Bounds the memory of a chunk made of the shortest possible lines."""


def read(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes] = read_bytes
) -> tuple[Trace, list[Input]]:
    """The event table of many files, and what became of each file.

    Files of one folder, job name and attempt are one job; a file is one rank.

    Args:
        files: JSON Lines files, in any order; the result does not depend on it.
        load: gives the content of a file; raises InputError where there is none.

    Returns:
        The trace (tables of ``schema``), and one Input a file in the order of ``files``.
        A file that breaks the format is quarantined with line and column; it does not raise.
    """
    reader = _Reader(load)
    states = [File(f) for f in files]
    states_in_order = sorted(states, key=lambda s: (s.source.path, s.source.url))
    loaded = load_ahead([s.source for s in states_in_order], load)
    for state, data in zip(states_in_order, loaded, strict=True):
        reader.add(state, data)
    trace, counts = reader.finish()
    return trace, [_input(s, counts.get(s.index, 0)) for s in states]


def _input(file: File, events: int) -> Input:
    status, reason = file.dropped or ("partial" if file.lost else "read", None)
    if reason is None:
        skipped = [
            f"skipped {n} line(s) of unknown kind {k!r}" for k, n in sorted(file.skipped.items())
        ]
        reason = "; ".join(file.lost + file.notes + skipped) or None
    return Input(
        path=file.source.path,
        status=status,  # type: ignore[arg-type]
        reason=reason,
        format="native",
        job=file.job_name or file.source.job or file.source.folder,
        rank=file.rank if file.rank >= 0 else None,
        events=0 if file.dropped else events,
    )


class _Reader:
    """Collects files chunk by chunk, then builds the tables."""

    def __init__(self, load: Callable[[TraceFile], bytes]) -> None:
        self.load = load
        self.files: list[File] = []
        self.jobs: list[tuple[str, str, int]] = []  # folder, name, attempt
        self.job_of: dict[tuple[str, str, int], int] = {}
        self.names = Interned(StringTable(), {}, {})
        self.comm_lines: dict[bytes, Comm] = {}  # every member repeats the same line
        self.frames: list[pl.DataFrame] = []
        self.chunk: list[tuple[int, bytes | memoryview]] = []
        self.chunk_bytes = 0
        self.trusted = False  # what is parsed now comes from `clean`

    # ---- files

    def add(self, file: File, data: bytes | InputError) -> None:
        """Takes one file; its lines wait in the chunk."""
        try:
            if isinstance(data, InputError):
                raise data
            cut = cut_reason(data)
            if cut:
                file.truncated = True
                file.lost.append(cut)
            data = _as_utf8(data, file)
            start, stop = _first_line(data)
            file.header = _header(data[start:stop], data.count(b"\n", 0, start) + 1)
            self._identify(file)
        except InputError as e:
            file.quarantine(str(e))
            return
        end = len(data)
        last = data.rfind(b"\n") + 1
        if stop < last < end and _is_cut_short(data[last:]):
            # The process died while it wrote: the usual end of a crashed rank's file.
            file.truncated = True
            file.lost.append("the last line is cut short; it was dropped")
            end = last
        file.truncated |= bool(file.header.truncated)
        file.index = len(self.files)
        self.files.append(file)
        self._queue(file.index, data, stop + 1, end)

    def _identify(self, file: File) -> None:
        """Rank from the header; job and attempt too, unless ``--job-pattern`` or the folder say."""
        header, source = file.header, file.source
        rank = header.rank if header.rank is not None else source.rank
        if rank is None:
            raise InputError("line 1: key rank: expected the global rank, found none")
        if header.world_size is not None and rank >= header.world_size:
            raise InputError(
                f"line 1: key rank: expected 0 to {header.world_size - 1} with world_size "
                f"{header.world_size}, found {rank}"
            )
        file.rank = rank
        name = source.job if source.job is not None else header.job
        if name is None or name == "":
            name = source.folder or "job"
        attempt = source.attempt if source.attempt is not None else (header.attempt or 0)
        file.job_name = str(name)
        key = (source.folder, file.job_name, attempt)
        file.job = self.job_of.setdefault(key, len(self.jobs))
        if file.job == len(self.jobs):
            self.jobs.append(key)

    def _queue(self, index: int, data: bytes, start: int, end: int) -> None:
        view = memoryview(data)
        while start < end:
            stop = end
            if end - start > _CHUNK:
                newline = data.find(b"\n", start + _CHUNK, end)
                stop = end if newline < 0 else newline + 1
            self.chunk.append((index, view[start:stop]))
            if data[stop - 1] != 10:
                self.chunk.append((index, b"\n"))
            self.chunk_bytes += stop - start
            start = stop
            if self.chunk_bytes >= _CHUNK:
                self._flush()

    # ---- chunks

    def _flush(self) -> None:
        if self.chunk:
            lines = Lines.of(self.chunk)
            self.chunk, self.chunk_bytes = [], 0
            self._other_lines(lines)
            refused = np.fromiter((f.refused for f in self.files), bool, len(self.files))
            self._operations(lines.only(lines.is_op & ~refused[lines.file]))

    def _other_lines(self, lines: Lines) -> None:
        """Decodes the lines that are no operations; finds operations that begin unusually."""
        other = np.flatnonzero(~lines.is_op)
        runs = np.split(other, _firsts(lines.file[other])[1:]) if len(other) else []
        for run in runs:
            file = self.files[lines.file[run[0]]]
            for i in run.tolist():
                if file.refused:
                    break
                line = lines.line(i).strip()
                known = self.comm_lines.get(line)
                if known is not None:
                    file.comms.append(known)
                elif line:
                    try:
                        lines.is_op[i] = self._other_line(file, line) == "op"
                    except (msgspec.MsgspecError, RecursionError, RefusedError):
                        file.refused = True
        size = lines.stop - lines.start
        for i in np.flatnonzero(lines.is_op & (size > 4 * _MAX_BRACKETS)).tolist():
            line = lines.line(i)
            if size[i] > MAX_LINE or line.count(b"[") + line.count(b"{") > _MAX_BRACKETS:
                self.files[lines.file[i]].refused = True

    def _other_line(self, file: File, line: bytes) -> str:
        kind = kind_of(line)
        if kind == "op":
            return kind
        if repeated_key(line, kind) or kind == "header":
            raise RefusedError
        if kind == "comm":
            if len(file.comms) >= MAX_COMMS:
                raise RefusedError
            comm = self.comm_lines[line] = decode_comm(line)
            file.comms.append(comm)
        elif kind == "end":
            file.end = decode_end(line)
        elif kind == "status":
            if len(file.statuses) >= MAX_COMMS:
                raise RefusedError
            file.statuses.append(decode_status(line))
        else:
            if len(file.skipped) >= 10:
                kind = "(others)"
            file.skipped[kind[:50]] = file.skipped.get(kind[:50], 0) + 1
        return kind

    def _operations(self, lines: Lines) -> None:
        """Parses operation lines, in halves until the files that the parser refuses are alone."""
        if not len(lines):
            return
        of = [self.files[i] for i in lines.file[_firsts(lines.file)]]
        width = np.diff(np.append(_firsts(lines.file), len(lines)))
        job = np.repeat(np.array([f.job for f in of], np.int32), width)
        exact = np.repeat(np.array([f.header.defaults is False for f in of]), width)
        try:
            frame = encode(lines.text(), lines.file, job, exact, self.names, trusted=self.trusted)
        except RefusedError:
            if len(of) == 1:
                of[0].refused = True
                return
            second = lines.file >= of[len(of) // 2].index
            self._operations(lines.only(~second))
            self._operations(lines.only(second))
        else:
            self.frames.append(frame)

    # ---- the end

    def finish(self) -> tuple[Trace, dict[int, int]]:
        """The trace, and the number of events of each file by its index."""
        self._flush()
        refused = [f for f in self.files if f.refused]
        if refused:
            self._forget(refused)
            self._second_reading(refused)
        self._check_order()
        self._one_file_a_rank()
        dropped = [f for f in self.files if f.dropped]
        if dropped:
            self._forget(dropped)
        return self._tables()

    def _forget(self, files: list[File]) -> None:
        gone = [f.index for f in files]
        self.frames = [t.filter(~pl.col("__file").is_in(gone)) for t in self.frames]

    def _second_reading(self, refused: list[File]) -> None:
        self.trusted = True
        for file in refused:
            file.comms, file.statuses, file.end, file.skipped = [], [], None, {}
            file.refused = False
            try:
                cleaned = clean(_as_utf8(self.load(file.source), None))
            except InputError as e:
                file.quarantine(str(e))
                continue
            if cleaned.lost:
                file.truncated = True
                file.lost = [x for x in file.lost if "last line" not in x] + [cleaned.lost]
            _, stop = _first_line(cleaned.data)
            self._queue(file.index, cleaned.data, stop + 1, len(cleaned.data))
        self._flush()
        for file in refused:
            if file.refused:
                file.quarantine(
                    "every line is valid by itself, but the file as a whole is not understood; "
                    "please report this file"
                )
                self._forget([file])

    def _check_order(self) -> None:
        """Quarantines files with a number twice in a lane."""
        if not self.frames:
            return
        key = pl.concat([t.select("__file", "lane", "seq") for t in self.frames])
        rising = (
            (pl.col("__file") == pl.col("__file").shift())
            & (pl.col("lane") == pl.col("lane").shift())
            & (pl.col("seq") > pl.col("seq").shift())
        ) | (pl.col("__file") != pl.col("__file").shift()).fill_null(value=True)
        doubtful = key.filter(~rising)["__file"].unique()
        if not len(doubtful):
            return
        some = key.filter(pl.col("__file").is_in(doubtful.to_list()))
        for index in some.filter(some.is_duplicated())["__file"].unique().sort():
            file = self.files[index]
            try:
                clean(_as_utf8(self.load(file.source), None))
                file.quarantine("key seq: expected increasing numbers within a lane")
            except InputError as e:
                file.quarantine(str(e))

    def _one_file_a_rank(self) -> None:
        """Of several files of one rank, the newest counts; equal copies are ignored."""
        by_rank: dict[tuple[int, int], list[File]] = defaultdict(list)
        for file in self.files:
            if not file.dropped:
                by_rank[file.job, file.rank].append(file)
        several = {k: v for k, v in by_rank.items() if len(v) > 1}
        if not several:
            return
        newest = _last_times(self.frames)
        for (_, rank), files in several.items():
            _choose(rank, files, newest, self.load)

    # ---- tables

    def _tables(self) -> tuple[Trace, dict[int, int]]:
        kept = sorted((f for f in self.files if not f.dropped), key=lambda f: (f.job, f.rank))
        if not kept:
            return Trace(), {}
        used = sorted({f.job for f in kept}, key=lambda j: self.jobs[j])
        new_job = np.full(len(self.jobs), -1, np.int32)
        new_job[used] = np.arange(len(used))
        for file in kept:
            file.job = int(new_job[file.job])
        kept.sort(key=lambda f: (f.job, f.rank))
        codes = {
            (int(new_job[j]), comm): code
            for (j, comm), code in self.names.comms.items()
            if new_job[j] >= 0
        }
        if self.frames:
            events = pl.concat(self.frames, how="diagonal")
        else:
            events = pl.DataFrame(schema={"__file": pl.Int32, "job": pl.Int32})
        self.frames = []
        ranks = np.array([f.rank for f in self.files], np.int32)
        index = events["__file"].to_numpy()
        events = events.with_columns(
            rank=pl.Series(ranks[index], dtype=pl.Int32),
            job=pl.Series(new_job[events["job"].to_numpy()], dtype=pl.Int32),
        )
        comms = Communicators(kept, codes)
        events = comms.rows_for(events)
        status = comms.status_table(kept)  # before the table: it may name what nobody declared
        per_file = {int(i): int(n) for i, n in events.group_by("__file").len().iter_rows()}
        trace = Trace(
            events=conform(events, "events"),
            jobs=jobs_table(kept, [self.jobs[j] for j in used]),
            ranks=ranks_table(kept, events),
            comms=comms.table(),
            stacks=pl.DataFrame(
                {"stack": range(len(self.names.stacks)), "frames": [*map(list, self.names.stacks)]},
                schema=STACKS,
                strict=False,
            ),
            strings=self.names.strings.frame(),
            status=status,
        )
        return trace, per_file


# --------------------------------------------------------------------------------------------------
# One file


def _as_utf8(data: bytes, file: File | None) -> bytes:
    """``data`` in UTF-8 without a byte order mark. What cannot be decoded is noted in ``file``."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # what PowerShell's redirection writes
        return data.decode("utf-16", "replace").encode("utf-8", "replace")
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data.isascii():
        return data
    try:
        data.decode()
    except UnicodeDecodeError as e:
        if file is not None:
            line = data.count(b"\n", 0, e.start) + 1
            file.lost.append(f"line {line}: bytes that are not UTF-8 were replaced by U+FFFD")
        return data.decode("utf-8", "replace").encode()
    return data


def _first_line(data: bytes) -> tuple[int, int]:
    """Start and stop of the first line that is not blank."""
    start = len(data) - len(data.lstrip())
    stop = data.find(b"\n", start)
    return start, len(data) if stop < 0 else stop


def _header(line: bytes, number: int) -> Header:
    expected = 'expected a header line {"kind": "header", "format": "dl2gpu.trace", ...}'
    if not line.strip():
        raise InputError(f"the file is empty: {expected}")
    try:
        kind = kind_of(line)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise InputError(f"line {number}: {expected}, found {_short(line)}") from e
    if kind != "header":
        raise InputError(f"line {number}: {expected}, found a line of kind {kind!r}")
    try:
        header = decode_header(line)
    except (msgspec.MsgspecError, RecursionError):
        clean(line)  # raises with the place
        raise
    if repeated_key(line, kind):
        clean(line)  # raises with the place
    if header.format != "dl2gpu.trace":
        raise InputError(
            f"line {number}: key format: expected 'dl2gpu.trace', found {header.format!r}"
        )
    if header.version != 1:
        raise InputError(
            f"line {number}: key version: expected 1, found {header.version}: written by another "
            "version of dl2gpu; read it with that one"
        )
    return header


def _short(line: bytes) -> str:
    text = line[:40].decode("utf-8", "replace")
    return repr(text + "..." if len(line) > 40 else text)


def _is_cut_short(line: bytes) -> bool:
    try:
        kind_of(line)
    except msgspec.ValidationError:
        return False
    except (msgspec.DecodeError, RecursionError):
        return bool(line.strip())
    return False


def _firsts(values: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Where each run of equal values begins."""
    change = np.empty(len(values), bool)
    change[:1] = True
    change[1:] = values[1:] != values[:-1]
    return np.flatnonzero(change)


# --------------------------------------------------------------------------------------------------
# Several files of one rank


def _last_times(frames: list[pl.DataFrame]) -> dict[int, int]:
    """Latest time in the events of each file."""
    out: dict[int, int] = {}
    for table in frames:
        times = [c for c in ("t_created", "t_started", "t_completed") if c in table.columns]
        if times:
            last = table.group_by("__file").agg(pl.max_horizontal(pl.col(times).max()).alias("t"))
            for index, t in last.drop_nulls().iter_rows():
                out[index] = max(t, out.get(index, t))
    return out


def _choose(
    rank: int,
    files: list[File],
    newest: dict[int, int],
    load: Callable[[TraceFile], bytes],
) -> None:
    """Drops all but one of several files of one rank, or all where the choice would be a guess."""
    content: dict[bytes, File] = {}
    for file in files:
        try:
            first = content.setdefault(bytes(load(file.source)), file)
        except InputError as e:  # gone since it was read
            file.quarantine(str(e))
            continue
        if first is not file:
            file.dropped = ("ignored", f"a copy of {first.source.path}, byte for byte")
    files = [f for f in files if not f.dropped]
    if len(files) <= 1:
        return
    data = {f.index: d for d, f in content.items()}
    times = {f.index: _last_sign(f, newest) for f in files}
    longest = max(files, key=lambda f: len(data[f.index]))
    best = max(files, key=lambda f: times[f.index] or 0)
    if all(data[longest.index].startswith(data[f.index]) for f in files):
        best, why = longest, "an earlier state of"
    elif None not in times.values() and sum(t == times[best.index] for t in times.values()) == 1:
        why = "older than"
    else:
        paths = ", ".join(f.source.path for f in files)
        for file in files:
            file.quarantine(
                f"several files say they are rank {rank} of this job and nothing tells which is "
                f"the newest ({paths}): keep one of them, or put each attempt into its own folder"
            )
        return
    for file in files:
        if file is not best:
            file.quarantine(f"rank {rank} a second time: {why} {best.source.path}, which was read")


def _last_sign(file: File, newest: dict[int, int]) -> int | None:
    found = [newest.get(file.index), file.end.t if file.end else None, file.header.t0_ns]
    return max((t for t in found if t is not None), default=None)
