"""Reader of PyTorch Flight Recorder dumps: pickle or JSON, every version, many jobs at once.

A dump is one rank's list of communication calls, with state, times, sizes and call stack, and what
the rank knows of its process groups. Contents are decoded to columns without running any of it
(:mod:`pickle_columns`, :mod:`flight_recorder_json`); :mod:`flight_recorder_comms` finds out which
rank and which communicators each file speaks of, :mod:`flight_recorder_events` maps the entries.
Source: FORMATS.md section 2.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.engine.cores import cores
from dl2gpu.trace import flight_recorder_json, pickle_columns
from dl2gpu.trace.entry_columns import Columns, Fault
from dl2gpu.trace.files import cut_reason, read_bytes, stored_elsewhere
from dl2gpu.trace.flight_recorder_comms import (
    FORMAT,
    MOST_THREADS,
    Dump,
    Job,
    comms_table,
    inputs,
    resolve,
)
from dl2gpu.trace.flight_recorder_events import FileEntries, events
from dl2gpu.trace.flight_recorder_names import Operation, operation, version_pair
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.schema import (
    EXIT,
    JOBS,
    RANKS,
    STACKS,
    STATUS,
    StringTable,
    Trace,
    conform,
    empty,
)

__all__ = ["read"]


def read(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes] = read_bytes
) -> tuple[Trace, list[Input]]:
    """Read the dumps ``files`` of any number of jobs into one trace.

    Files of one folder, job name and attempt are one job. Contents are loaded, decoded and
    released one after another (on as many threads as there are cores), so memory follows the
    number of entries and not the size of the files.

    Args:
        files: dumps as discovery found them; their order numbers the jobs.
        load: gives the decompressed content of a file; may raise :class:`InputError`.

    Returns:
        The trace, and what became of each file, in the order of ``files``.
    """
    corpus = _Corpus()
    for file, found in zip(files, _decoded(files, load), strict=True):
        corpus.add(file, found)
    jobs = corpus.jobs()
    resolve(jobs, load)
    return corpus.trace(jobs), inputs(corpus.dumps)


def _decoded(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes]
) -> Iterator[Columns | str]:
    """Columns of each file in order, or why there are none; a few files ahead at a time."""

    def one(file: TraceFile) -> Columns | str:
        try:
            data = load(file)
        except (InputError, OSError, EOFError) as error:
            return str(error) or type(error).__name__
        columns = _decode(data)
        cut = cut_reason(data)
        if cut is not None and isinstance(columns, Columns):
            columns.fault = columns.fault or Fault("truncated", len(data), cut)
        return columns

    workers = max(1, min(MOST_THREADS, cores(), len(files)))
    if stored_elsewhere(files):
        from dl2gpu.trace.remote import parallel

        workers = max(workers, min(parallel(), len(files)))
    with ThreadPoolExecutor(workers, thread_name_prefix="flight-recorder") as pool:
        ahead: deque[Future[Columns | str]] = deque()
        for file in files:
            ahead.append(pool.submit(one, file))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _decode(data: bytes) -> Columns | str:
    if data[:1] == b"\x80":
        return pickle_columns.decode(data)
    if data[:64].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in {b"{", b"["}:
        return flight_recorder_json.decode(data)
    if data:
        return "neither a pickle of protocol 2 to 5 nor JSON: not a Flight Recorder dump"
    empty = flight_recorder_json.decode(b"[]")
    empty.fault = Fault("truncated", 0, "the file is empty")
    return empty


@dataclass(slots=True)
class _Corpus:
    """Entries of all files; names, data types and stacks are numbered across files."""

    dumps: list[Dump] = field(default_factory=list)
    entries: list[FileEntries] = field(default_factory=list)
    operations: dict[str, int] = field(default_factory=dict)
    meanings: list[Operation] = field(default_factory=list)
    dtypes: dict[str, int] = field(default_factory=dict)
    stacks: dict[Hashable, int] = field(default_factory=dict)
    frames: list[list[str]] = field(default_factory=list)

    def add(self, file: TraceFile, found: Columns | str) -> None:
        dump = Dump(index=len(self.dumps), file=file)
        self.dumps.append(dump)
        if isinstance(found, str):
            dump.refused = found
            return
        if found.fault is not None and found.fault.kind == "refused":
            dump.refused = found.fault.reason
            return
        header = found.header
        dump.fault, dump.lost, dump.header = found.fault, found.lost, header
        dump.version = version_pair(header.get("version"))
        dump.n, dump.size = found.n, found.size
        dump.groups = found.groups
        if found.n == 0:
            known = header.keys() & {"version", "pg_config", "pg_status"}
            if not known and not isinstance(found.fault, Fault):
                dump.refused = "no entries and no version: not a Flight Recorder dump"
            elif not known and found.fault is not None and found.fault.kind == "damaged":
                dump.refused = found.fault.reason
            return
        record = found.column("record_id")
        dump.first_record = int(record[0])
        dump.holes = int(record[-1] - record[0]) != found.n - 1
        dump.newest, dump.completed, dump.finished = found.newest, found.completed, found.finished
        dump.started, dump.old_counter = found.started, found.old_counter
        self.entries.append(
            FileEntries(
                dump=dump,
                columns=found,
                name_op=self._operations(dump, found),
                text_dtype=self._dtypes(found),
                stack_of=self._stacks(found),
            )
        )

    def _operations(self, dump: Dump, found: Columns) -> npt.NDArray[np.int32]:
        numbers = np.full(len(found.raw), -1, dtype=np.int32)
        for i, count in found.names:
            text = found.text(i)
            number = self.operations.get(text)
            if number is None:
                number = self.operations[text] = len(self.operations)
                self.meanings.append(operation(text))
            numbers[i] = number
            backend = self.meanings[number].backend
            dump.backends[backend] = dump.backends.get(backend, 0) + count
        return numbers

    def _dtypes(self, found: Columns) -> npt.NDArray[np.int32]:
        numbers = np.full(len(found.raw), -1, dtype=np.int32)
        for i in found.dtypes:
            numbers[i] = self.dtypes.setdefault(found.text(i), len(self.dtypes))
        return numbers

    def _stacks(self, found: Columns) -> npt.NDArray[np.int32]:
        numbers = []
        for k, key in enumerate(found.stacks.keys):
            number = self.stacks.get(key)
            if number is None:
                number = self.stacks[key] = len(self.stacks)
                self.frames.append(found.stack(k))
            numbers.append(number)
        return np.array(numbers, dtype=np.int32)

    def jobs(self) -> list[Job]:
        """Jobs in order of their first file."""
        jobs: dict[tuple[str, str | None, int], Job] = {}
        for dump in self.dumps:
            file = dump.file
            key = (file.folder, file.job, file.attempt or 0)
            if key not in jobs:
                jobs[key] = Job(len(jobs), file.job or file.folder, file.folder, key[2])
            dump.job = jobs[key]
            dump.job.dumps.append(dump)
        return list(jobs.values())

    def trace(self, jobs: list[Job]) -> Trace:
        """The trace of all dumps whose rank is known."""
        strings = StringTable()
        comms = [comm for job in jobs for comm in job.comms]
        # in order of ranks, not of file names: the analysis then need not sort
        kept = sorted(
            (f for f in self.entries if f.dump.kept),
            key=lambda f: (f.dump.job.index, f.dump.rank or 0),
        )
        self.entries = []
        frame = events(kept, comms, self.meanings, self.dtypes, strings) if kept else None
        return Trace(
            events=Trace().events if frame is None else frame,
            jobs=_jobs_table(jobs),
            ranks=_ranks_table(jobs),
            comms=comms_table(comms),
            stacks=pl.DataFrame(
                {"stack": range(len(self.frames)), "frames": self.frames},
                schema=STACKS,
                strict=False,
            ),
            strings=strings.frame(),
            status=_status_table(jobs),
        )


# --------------------------------------------------------------------------------------------------
# Side tables


def _jobs_table(jobs: list[Job]) -> pl.DataFrame:
    rows = []
    for job in jobs:
        seen: Counter[str | None] = Counter()
        for dump in job.dumps:
            if dump.kept:
                seen.update(dump.backends)
        backend = max(seen, key=lambda b: (seen[b], b or "")) if seen else None
        rows.append(
            {
                "job": job.index,
                "name": job.name,
                "folder": job.folder,
                "attempt": job.attempt,
                "world_size": job.world_size,
                "backend": backend,
                "source": FORMAT,
                "waits": False,
                "p2p": backend != "gloo",
            }
        )
    return pl.DataFrame(rows, schema=JOBS)


def _ranks_table(jobs: list[Job]) -> pl.DataFrame:
    rows = [
        {
            "job": job.index,
            "rank": d.rank,
            "exit": EXIT["unknown"],
            "truncated": d.fault is not None,
            "lost_before": d.lost_before,
            "only_active": d.only_active,
            "timed": d.timed,
            "path": d.file.path,
        }
        for job in jobs
        for d in sorted((d for d in job.dumps if d.kept), key=lambda d: d.rank or 0)
    ]
    return conform(pl.DataFrame(rows, schema_overrides=RANKS), "ranks") if rows else empty("ranks")


def _status_table(jobs: list[Job]) -> pl.DataFrame:
    rows = [
        (job.index, d.rank, comm.index, *values)
        for job in jobs
        for d in job.dumps
        for comm, values in d.status_comms
    ]
    return pl.DataFrame(rows, schema=STATUS, orient="row")
