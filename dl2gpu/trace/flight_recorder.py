"""Reader of PyTorch Flight Recorder dumps: pickle or JSON, every version, many jobs at once.

A dump is one rank's list of communication calls, with state, times, sizes and call stack, and what
the rank knows of its process groups. Its contents are decoded to columns without running anything
(:mod:`pickle_columns`, :mod:`flight_recorder_json`); this module finds out which rank and which
communicator each file speaks of, and :mod:`flight_recorder_events` maps the entries.
Source: FORMATS.md section 2.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.trace import flight_recorder_json, pickle_columns
from dl2gpu.trace.flight_recorder_batches import CUT, HOLES, OLD, ONE_COUNTER
from dl2gpu.trace.flight_recorder_comms import Comm, Dump, Job, inputs, resolve
from dl2gpu.trace.flight_recorder_events import Files, Groups, Rows, events
from dl2gpu.trace.flight_recorder_names import Operation, operation, version_pair
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.pickle_columns import Columns, Fault
from dl2gpu.trace.pickle_kernel import COLUMNS, NULL
from dl2gpu.trace.schema import (
    COMMS,
    EXIT,
    JOBS,
    RANKS,
    STATE,
    STATUS,
    StringTable,
    Trace,
    conform,
)

__all__ = ["read"]

FORMAT: Final = "flight_recorder"


def read(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes]
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
    for i, found in enumerate(_decoded(files, load)):
        corpus.add(i, files[i], found)
    jobs = corpus.jobs()
    resolve(jobs, load)
    return corpus.trace(jobs), inputs(corpus.dumps)


def _decoded(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes]
) -> Iterator[Columns | str]:
    """Columns of each file in order, or why there are none; a few files ahead at a time."""

    def one(file: TraceFile) -> Columns | str:
        try:
            return _decode(load(file))
        except (InputError, OSError, EOFError) as error:
            return str(error) or type(error).__name__

    workers = max(1, min(8, os.cpu_count() or 1, len(files)))
    with ThreadPoolExecutor(workers, thread_name_prefix="flight-recorder") as pool:
        ahead: list[Future[Columns | str]] = []
        for file in files:
            ahead.append(pool.submit(one, file))
            if len(ahead) > 2 * workers:
                yield ahead.pop(0).result()
        for future in ahead:
            yield future.result()


def _decode(data: bytes) -> Columns | str:
    if data[:1] == b"\x80":
        return pickle_columns.decode(data)
    start = data[:64].lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if start in {b"{", b"["}:
        return flight_recorder_json.decode(data)
    if not data:
        empty = flight_recorder_json.decode(b"[]")
        empty.fault = Fault("truncated", 0, "the file is empty")
        return empty
    return "neither a pickle of protocol 2 to 5 nor JSON: not a Flight Recorder dump"


_STATES: Final = {"scheduled": STATE["scheduled"], "started": STATE["started"],
                  "completed": STATE["completed"]}  # fmt: skip
_INT32: Final = (-(1 << 31), (1 << 31) - 1)


@dataclass(slots=True)
class _Corpus:
    """Entries of all files, with strings, frames and stacks numbered across files."""

    dumps: list[Dump] = field(default_factory=list)
    texts: dict[str, int] = field(default_factory=dict)
    frames: dict[tuple[int, int, int], int] = field(default_factory=dict)
    stacks: dict[bytes, int] = field(default_factory=dict)
    chunks: list[dict[str, npt.NDArray[Any]]] = field(default_factory=list)
    pool: list[npt.NDArray[np.int64]] = field(default_factory=list)
    pooled: int = 0
    n_groups: int = 0

    def add(self, index: int, file: TraceFile, found: Columns | str) -> None:
        dump = Dump(index=index, file=file)
        self.dumps.append(dump)
        if isinstance(found, str):
            dump.refused = found
            return
        if found.fault is not None and found.fault.kind == "refused":
            dump.refused = found.fault.reason
            return
        dump.fault = found.fault
        dump.lost = found.lost
        dump.header = found.header
        dump.version = version_pair(found.header.get("version"))
        if not isinstance(found.header.get("version"), str) and not found.n and not found.header:
            if dump.fault is None:
                dump.refused = "no entries and no header: not a Flight Recorder dump"
                return
        dump.n = found.n
        if found.n:
            self._rows(dump, found)

    def _rows(self, dump: Dump, found: Columns) -> None:
        rec = found.rec
        codes = self.texts
        texts = np.array(
            [codes.setdefault(s, len(codes)) for s in found.strings] + [-1], dtype=np.int32
        )

        def text(name: str) -> npt.NDArray[np.int32]:
            values = rec[:, COLUMNS[name]]
            return texts[np.where(values == NULL, -1, values)]

        def number(name: str) -> npt.NDArray[np.int64]:
            return rec[:, COLUMNS[name]].copy()

        def small(name: str) -> npt.NDArray[np.int32]:
            return np.clip(rec[:, COLUMNS[name]], -1, _INT32[1]).astype(np.int32)

        # communicators: by name, in the older versions by the number of the process group
        name, desc = text("process_group"), text("pg_desc")
        pg_id = rec[:, COLUMNS["pg_id"]]
        key = np.where(name < 0, pg_id % (1 << 30), ((name.astype(np.int64) + 2) << 31) + desc)
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        strings = found.strings
        for i in first.tolist():
            label = rec[i, COLUMNS["process_group"]], rec[i, COLUMNS["pg_desc"]]
            number_of = int(pg_id[i])
            dump.groups.append(
                (
                    str(number_of) if label[0] == NULL else strings[label[0]],
                    "" if label[1] == NULL else strings[label[1]],
                    None if number_of == NULL else number_of,
                )
            )
        dump.first_group = self.n_groups
        self.n_groups += len(first)

        counter, older = number("collective_seq_id"), number("seq_id")
        dump.old_counter = bool((counter == NULL).all())
        counter = np.where(counter == NULL, older, counter)
        created, in_us = number("time_created_ns"), number("time_created_us")
        in_us = np.where((in_us > 0) & (in_us < 1 << 53), in_us * 1000, NULL)
        created = np.where(created == NULL, in_us, created)
        dump.newest = int(created.max())
        record = number("record_id")
        dump.first_record = int(record[0]) if record[0] >= 0 else 0
        if not ((record[1:] > record[:-1]).all() and record[0] >= 0):
            record = np.arange(len(record), dtype=np.int64)
            dump.first_record = 0
        dump.holes = int(record[-1] - record[0]) != len(record) - 1

        state_text = np.full(len(strings) + 1, STATE["unknown"], dtype=np.uint8)
        for i, s in enumerate(strings):
            if s in _STATES:
                state_text[i] = _STATES[s]
        state_code = rec[:, COLUMNS["state"]]
        state = state_text[np.where(state_code == NULL, -1, state_code)]
        started = number("time_discovered_started_ns")
        done, retired = state == STATE["completed"], rec[:, COLUMNS["retired"]] == 1
        dump.completed = int(done.sum())
        dump.finished = int((done | retired).sum())
        dump.started = bool((state == STATE["started"]).any() or (started > 0).any())
        profiling = rec[:, COLUMNS["profiling_name"]]
        counts = np.bincount(profiling, minlength=len(strings))
        dump.names = {int(texts[i]): int(counts[i]) for i in np.flatnonzero(counts)}
        numels = rec[:, COLUMNS["input_numels"]]
        numels = np.where(numels == NULL, -1, numels + self.pooled)
        self.pool.append(found.numels)
        self.pooled += len(found.numels)
        self.chunks.append(
            {
                "file": np.full(found.n, dump.index, dtype=np.int32),
                "group": (inverse + dump.first_group).astype(np.int32),
                "name": text("profiling_name"),
                "thread": text("thread_id"),
                "in_dtype": text("input_dtypes"),
                "out_dtype": text("output_dtypes"),
                "in_tensors": small("input_tensors"),
                "out_tensors": small("output_tensors"),
                "numels": numels,
                "stack": self._stack_codes(found, texts)[
                    np.where(
                        rec[:, COLUMNS["frames"]] == NULL, -1, rec[:, COLUMNS["frames"]]
                    )
                ],
                "state": state,
                "retired": retired,
                "p2p": rec[:, COLUMNS["is_p2p"]] == 1,
                "seq": record,
                "counter": counter,
                "p2p_counter": number("p2p_seq_id"),
                "created": created,
                "started": started,
                "completed": number("time_discovered_completed_ns"),
                "in_count": number("input_sizes"),
                "out_count": number("output_sizes"),
            }
        )

    def _stack_codes(self, found: Columns, texts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Number across files of each of the file's stacks; the last item is -1."""
        names, files, lines = found.frames.T if len(found.frames) else np.zeros((3, 0), np.int64)
        frames = self.frames
        codes = np.array(
            [
                frames.setdefault(frame, len(frames))
                for frame in zip(
                    texts[names].tolist(), texts[files].tolist(), lines.tolist(), strict=True
                )
            ],
            dtype=np.int32,
        )
        flat = codes[found.stack_frames].tobytes()
        ends = (found.stack_ends * 4).tolist()
        stacks = self.stacks
        return np.array(
            [
                stacks.setdefault(flat[a:b], len(stacks))
                for a, b in zip(ends[:-1], ends[1:], strict=True)
            ]
            + [-1],
            dtype=np.int32,
        )

    def jobs(self) -> list[Job]:
        """Jobs in order of their first file."""
        jobs: dict[tuple[str, str | None, int], Job] = {}
        for dump in self.dumps:
            file = dump.file
            key = (file.folder, file.job, file.attempt or 0)
            if key not in jobs:
                jobs[key] = Job(len(jobs), file.job or file.folder, file.folder, key[2])
            jobs[key].dumps.append(dump)
            dump.job = jobs[key]
        return list(jobs.values())

    def trace(self, jobs: list[Job]) -> Trace:
        """The trace of all dumps whose rank is known."""
        strings = StringTable()
        texts = list(self.texts)
        comms = [comm for job in jobs for comm in job.comms]
        frame = self._events(comms, texts, strings) if self.chunks else Trace().events
        return Trace(
            events=frame,
            jobs=_jobs_table(jobs, texts),
            ranks=_ranks_table(jobs),
            comms=_comms_table(comms),
            stacks=self._stacks_table(texts),
            strings=strings.frame(),
            status=_status_table(jobs),
        )

    def _events(self, comms: list[Comm], texts: list[str], strings: StringTable) -> pl.DataFrame:
        kept = np.array([d.kept for d in self.dumps], dtype=bool)
        chunks = [c for c in self.chunks if kept[c["file"][0]]]
        self.chunks = []
        if not chunks:
            return Trace().events
        columns = {}
        for name in list(chunks[0]):
            columns[name] = np.concatenate([c.pop(name) for c in chunks])
        columns["name"], operations = self._numbered(columns["name"], texts)
        (columns["in_dtype"], columns["out_dtype"]), dtypes = self._dtypes(columns, texts)
        group_comm = np.zeros(max(self.n_groups, 1), dtype=np.int32)
        for dump in self.dumps:
            first = dump.first_group
            group_comm[first : first + len(dump.group_comms)] = [c.index for c in dump.group_comms]
        return events(
            Rows(**columns),
            _file_facts(self.dumps),
            Groups(
                comm=group_comm,
                members=[np.array(c.ranks, dtype=np.int32) for c in comms],
                names=[c.id for c in comms],
                synthetic=np.array([c.synthetic for c in comms], dtype=bool),
            ),
            operations,
            dtypes,
            np.concatenate([*self.pool, np.zeros(0, dtype=np.int64)]),
            strings,
        )

    @staticmethod
    def _numbered(
        codes: npt.NDArray[np.int32], texts: list[str]
    ) -> tuple[npt.NDArray[np.int32], list[Operation]]:
        """Dense numbers for the profiling names that occur, and what they mean."""
        used = np.flatnonzero(np.bincount(codes, minlength=len(texts)))
        dense = np.zeros(len(texts), dtype=np.int32)
        dense[used] = np.arange(len(used))
        return dense[codes], [operation(texts[c]) for c in used]

    @staticmethod
    def _dtypes(
        columns: dict[str, npt.NDArray[Any]], texts: list[str]
    ) -> tuple[list[npt.NDArray[np.int32]], list[str]]:
        """Dense numbers for the data types that occur (-1 = none), and their spellings."""
        both = [columns["in_dtype"], columns["out_dtype"]]
        counts = sum(np.bincount(c + 1, minlength=len(texts) + 1) for c in both)
        used = np.flatnonzero(np.asarray(counts)[1:])
        dense = np.full(len(texts) + 1, -1, dtype=np.int32)
        dense[used] = np.arange(len(used))
        return [dense[c] for c in both], [texts[c] for c in used]

    def _stacks_table(self, texts: list[str]) -> pl.DataFrame:
        frames = [
            f"{texts[name]} {texts[file]}:{line if line != NULL else '?'}"
            for name, file, line in self.frames
        ]
        flat = np.frombuffer(b"".join(self.stacks), dtype=np.int32)
        sizes = np.array([len(s) // 4 for s in self.stacks], dtype=np.int64)
        lists = (
            pl.DataFrame(
                {
                    "stack": np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
                    "frames": pl.Series(frames, dtype=pl.String).gather(flat),
                }
            )
            .group_by("stack", maintain_order=True)
            .agg("frames")
        )
        every = pl.DataFrame({"stack": np.arange(len(sizes), dtype=np.int32)})
        table = every.join(lists, on="stack", how="left", maintain_order="left")
        return conform(table.with_columns(pl.col("frames").fill_null([])), "stacks")


# --------------------------------------------------------------------------------------------------
# Side tables


def _file_facts(dumps: list[Dump]) -> Files:
    bits = [
        CUT * (d.lost_before > 0) | HOLES * d.only_active | OLD * d.old | ONE_COUNTER * d.one_counter
        for d in dumps
    ]
    return Files(
        job=np.array([d.job.index for d in dumps], dtype=np.int32),
        rank=np.array([-1 if d.rank is None else d.rank for d in dumps], dtype=np.int32),
        bits=np.array(bits, dtype=np.uint8),
        sizes_ok=np.array([d.version is not None and d.version >= (2, 4) for d in dumps]),
        weak_states=np.array([d.weak_states for d in dumps]),
    )


def _jobs_table(jobs: list[Job], texts: list[str]) -> pl.DataFrame:
    rows = []
    for job in jobs:
        seen: Counter[str] = Counter()
        for dump in job.dumps:
            for code, count in dump.names.items() if dump.kept else ():
                seen[operation(texts[code]).backend or ""] += count
        backend = max(seen, key=lambda b: (seen[b], b)) if seen else ""
        rows.append(
            {
                "job": job.index,
                "name": job.name,
                "folder": job.folder,
                "attempt": job.attempt,
                "world_size": job.world_size,
                "backend": backend or None,
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
    return conform(pl.DataFrame(rows, schema_overrides=RANKS), "ranks")


def _comms_table(comms: list[Comm]) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "comm": [c.index for c in comms],
            "job": [c.job for c in comms],
            "id": [c.id for c in comms],
            "name": [c.name for c in comms],
            "desc": [c.desc for c in comms],
            "ranks": [list(c.ranks) for c in comms],
        },
        schema=COMMS,
    )


def _status_table(jobs: list[Job]) -> pl.DataFrame:
    rows = [
        (job.index, d.rank, comm.index, *values)
        for job in jobs
        for d in job.dumps
        for comm, values in d.status_comms
    ]
    return pl.DataFrame(rows, schema=STATUS, orient="row")
