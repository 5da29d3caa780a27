"""Reader of PyTorch profiler traces (Kineto's Chrome JSON): what communicated, in what order, when.

A trace is one rank's window on the run, of any size; it is streamed, and only the events of
communication become anything (:mod:`kineto_scan`). :mod:`kineto_profile` joins them to operations,
:mod:`kineto_comms` finds out which rank, communicators and ordinals each profile speaks of.
Source: FORMATS.md section 3.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from dl2gpu.engine.cores import cores
from dl2gpu.trace.files import cut_reason
from dl2gpu.trace.flight_recorder_comms import comms_table
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.kineto_comms import FORMAT, Job, Source, inputs, resolve
from dl2gpu.trace.kineto_kernel import NULL
from dl2gpu.trace.kineto_profile import Profile, profile
from dl2gpu.trace.kineto_scan import BLOCK, Columns, scan
from dl2gpu.trace.schema import (
    ANY,
    DTYPE_BYTES,
    EXIT,
    FLAG,
    JOBS,
    OP,
    RANKS,
    STATE,
    StringTable,
    Trace,
    conform,
    empty,
)
from dl2gpu.trace.stream import pieces

__all__ = ["read"]

_MOST_THREADS: Final = 8
Longs = npt.NDArray[np.int64]


def read(
    files: Sequence[TraceFile],
    load: Callable[[TraceFile], bytes] | None = None,
    block: int = BLOCK,
) -> tuple[Trace, list[Input]]:
    """Read the profiles ``files`` of any number of jobs into one trace.

    Files of one folder, job name and attempt are one job. Each file goes through a buffer of a few
    megabytes; memory follows the number of its communication events and not its size.

    Args:
        files: profiles as discovery found them; their order numbers the jobs.
        load: gives the decompressed content of a file at once; None: files are streamed.
        block: bytes of a file that are looked at together; no result depends on it.

    Returns:
        The trace, and what became of each file, in the order of ``files``.
    """
    strings = StringTable()
    sources: list[Source] = []
    jobs: dict[tuple[str, str | None, int], Job] = {}
    for file, found in zip(files, _scanned(files, load, block), strict=True):
        source = Source(len(sources), file)
        sources.append(source)
        key = (file.folder, file.job, file.attempt or 0)
        if key not in jobs:
            jobs[key] = Job(len(jobs), file.job or file.folder, file.folder, key[2])
        source.job = jobs[key]
        source.job.sources.append(source)
        _take(source, found, strings)
    listed = list(jobs.values())
    resolve(listed)
    return _trace(listed, strings), inputs(sources)


def _scanned(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes] | None, block: int
) -> Iterator[Columns | str]:
    """Columns of each file in order, or why there are none; a few files ahead at a time."""

    def one(file: TraceFile) -> Columns | str:
        try:
            if load is None:
                return scan(pieces(file), block)
            data = load(file)
            found = scan(iter([data]), block)
        except (InputError, OSError, EOFError) as error:
            return str(error) or type(error).__name__
        if isinstance(found, Columns):
            found.truncated = cut_reason(data) or found.truncated
        return found

    workers = max(1, min(_MOST_THREADS, cores(), len(files)))
    with ThreadPoolExecutor(workers, thread_name_prefix="kineto") as pool:
        ahead: deque[Future[Columns | str]] = deque()
        for file in files:
            ahead.append(pool.submit(one, file))
            if len(ahead) > workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _take(source: Source, found: Columns | str, strings: StringTable) -> None:
    """Makes the operations of what was found in a file."""
    if isinstance(found, str):
        source.refused = found
        return
    info = found.header.get("distributedInfo")
    source.info = info if isinstance(info, dict) else {}
    source.profile = profile(found, _base(found.header), strings)
    if not found.events and not source.info and not found.header:
        source.refused = "no trace event in it: not a profiler trace"
        return
    if found.truncated is not None:
        source.truncated = True
        source.damage.append(found.truncated)
    if found.damaged:
        left = found.damaged - found.recovered
        source.damage.append(
            f"{found.damaged} events are no JSON"
            + (f", {found.recovered} of them could be read all the same" if found.recovered else "")
            + (f" ({left} of unknown content are lost)" if found.recovered and left else "")
        )
    source.damage += found.lost


def _base(header: dict[str, Any]) -> int:
    value = header.get("baseTimeNanoseconds")
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    return value if type(value) is int and 0 <= value < 1 << 62 else 0


# --------------------------------------------------------------------------------------------------
# Tables


def _trace(jobs: list[Job], strings: StringTable) -> Trace:
    comms = [c for job in jobs for c in job.comms]
    frames = [
        frame
        for job in jobs
        for s in job.kept
        if s.profile is not None
        for frame in (_operations(s, s.profile, strings), _waits(s, s.profile))
        if frame is not None
    ]
    events = pl.concat(frames, how="diagonal") if frames else Trace().events
    return Trace(
        events=_roots(conform(events, "events")),
        jobs=_jobs_table(jobs),
        ranks=_ranks_table(jobs),
        comms=comms_table(comms),
        strings=strings.frame(),
    )  # fmt: skip


def _optional(values: Longs, low: int | None = 0) -> pl.Series:
    """A column in which NULL, and what lies below ``low``, is null."""
    absent = values == NULL if low is None else values < low
    return pl.select(
        pl.when(pl.Series(~absent)).then(pl.Series(values)).otherwise(None)
    ).to_series()


def _lanes(p: Profile) -> tuple[Longs, int]:
    """Threads in the order of their first operation, the main thread first."""
    threads = p.columns["thread"]
    distinct, first = np.unique(threads, return_index=True)
    order = np.lexsort((first, distinct != p.main))
    distinct = distinct[order]
    return distinct, len(distinct)


def _lane_of(threads: Longs, lanes: Longs) -> Longs:
    order = np.argsort(lanes)
    at = np.minimum(np.searchsorted(lanes[order], threads), len(lanes) - 1)
    found = order[at]
    return np.where(lanes[found] == threads, found, len(lanes)).astype(np.int64)


def _operations(s: Source, p: Profile, strings: StringTable) -> pl.DataFrame | None:
    """The rows of one profile: ``seq`` counts the calls of the rank."""
    c = p.columns
    n = p.n
    if not n:
        return None
    comms = [*s.comm_of, s.host_comm]
    group = c["group_of"]
    number = np.array([-1 if m is None else m.index for m in comms], np.int64)[group]
    flags = c["flags"].copy()
    synthetic = np.array([m is not None and m.synthetic for m in comms], np.bool_)[group]
    flags[synthetic] |= FLAG["synthetic_comm"]
    root, peer = _global_ranks(s, p)
    lanes, _ = _lanes(p)
    sizes = np.array([*DTYPE_BYTES.values()], np.int64)
    dtype = c["dtype"]
    known = (dtype >= 0) & (dtype < len(sizes)) & (c["count"] >= 0) & (c["count"] < 1 << 57)
    nbytes = np.where(known, c["count"] * sizes[np.where(known, dtype, 0)], NULL)
    known_op = c["op"] < 1000
    flags[~known_op] |= FLAG["unknown_op"]
    streams = _streams(s, p, strings, flags)
    frame = pl.DataFrame(
        {
            "job": np.full(n, s.job.index, np.int32), "rank": np.full(n, s.rank, np.int32),
            "lane": _lane_of(c["thread"], lanes), "seq": np.arange(n, dtype=np.int64),
            "op": c["op"], "stream": streams, "blocking": p.blocked,
            "request": c["request"], "comm": number, "ordinal": _optional(c["ordinal"]),
            "peer": _optional(peer, ANY), "tag": _optional(c["tag"]), "root": _optional(root),
            "count": _optional(c["count"]), "count_out": _optional(c["count_out"]),
            "dtype": _optional(dtype), "bytes": _optional(nbytes),
            "group": _optional(c["batch"]), "state": c["state"],
            "t_created": _optional(c["created"], None), "t_started": _optional(c["started"], None),
            "t_completed": _optional(c["completed"], None), "flags": flags,
        }
    )  # fmt: skip
    if p.splits:
        table = pl.Series(p.splits, dtype=pl.List(pl.Int64))
        frame = frame.with_columns(splits=table.gather(_optional(c["splits_of"])))
    return conform(frame, "events")


def _global_ranks(s: Source, p: Profile) -> tuple[Longs, Longs]:
    """(root, peer) of each operation as global ranks; what is no member is unknown."""
    c = p.columns
    root = np.full(p.n, NULL, np.int64)
    peer = np.full(p.n, NULL, np.int64)
    comms = [*s.comm_of, s.host_comm]
    for place, comm in enumerate(comms):
        rows = np.flatnonzero(c["group_of"] == (place if place < len(s.comm_of) else -1))
        if not len(rows):
            continue
        members = np.array(comm.ranks if comm is not None else (), np.int64)
        for source, out in (("root", root), ("peer", peer)):
            inside = (c[source][rows] >= 0) & (c[source][rows] < len(members))
            out[rows[inside]] = members[c[source][rows[inside]]]
        told = c["to"][rows]
        fits = (told >= 0) & (told < 10**9)
        if len(members):
            fits &= np.isin(told, members)
        peer[rows[fits]] = told[fits]
    anybody = (c["op"] == OP["recv"]) & (c["peer"] == ANY) & (peer == NULL)
    peer[anybody] = ANY
    peer[peer == (s.rank if s.rank is not None else NULL)] = NULL
    return root, peer


def _streams(s: Source, p: Profile, strings: StringTable, flags: Longs) -> pl.Series:
    """String code of each operation's stream; null for what occupies the host.

    An operation that shows no kernel is on the stream of its group's others, else on one of its
    own, and is marked.
    """
    c = p.columns
    device = c["group_of"] >= 0
    stream = c["stream"].copy()
    key = np.where(device, c["group_of"] * 2 + (c["op"] < OP["wait"]), -1)
    guessed = device & (stream == NULL)
    flags[guessed] |= FLAG["stream_inferred"]
    names = {i: strings.code(f"stream {i}") for i in np.unique(stream[stream != NULL]).tolist()}
    codes = np.full(p.n, -1, np.int64)
    for i, code in names.items():
        codes[stream == i] = code
    for k in np.unique(key[guessed]).tolist():
        seen = codes[(key == k) & (codes >= 0)]
        own = int(np.bincount(seen).argmax()) if len(seen) else strings.code(s.comm_of[k // 2].id)
        codes[guessed & (key == k)] = own
    return _optional(codes)


def _waits(s: Source, p: Profile) -> pl.DataFrame | None:
    """The recorded waits, in lanes of their own behind those of the threads.

    So ``seq`` counts the calls of the rank; a wait has the number of the call before it. Such a
    wait orders device work and does not hold the host.
    """
    w = p.waits
    at = np.flatnonzero(w["wait_at"] >= 0)
    if not len(at) or not p.n:
        return None
    lanes, n_lanes = _lanes(p)
    frame = pl.DataFrame(
        {
            "lane": n_lanes + _lane_of(w["wait_thread"][at], lanes),
            "seq": w["wait_at"][at],
            "requests": _optional(w["wait_for"][at]),
            "t_created": w["wait_from"][at],
            "t_completed": w["wait_to"][at],
        }
    )
    joined = frame.group_by("lane", "seq").agg(
        pl.col("requests").drop_nulls().unique().sort(),
        pl.col("t_created").min(),
        pl.col("t_completed").max(),
    )
    joined = joined.sort("seq", "lane").with_columns(
        job=pl.lit(s.job.index, pl.Int32),
        rank=pl.lit(s.rank, pl.Int32),
        op=pl.lit(OP["wait"], pl.Int32),
        blocking=pl.lit(False),
        mode=pl.lit(0, pl.UInt8),
        state=pl.lit(STATE["completed"], pl.UInt8),
        flags=pl.lit(FLAG["blocking_inferred"], pl.UInt32),
    )
    return conform(joined, "events")


def _roots(events: pl.DataFrame) -> pl.DataFrame:
    """The events without roots that are none.

    ``Rank`` is the root of rooted operations; should a writer put each rank's own there, then all
    name themselves.
    """
    rooted = events.filter(pl.col("root").is_not_null())
    if rooted.is_empty():
        return events
    own = (
        rooted.group_by("job")
        .agg(own=(pl.col("root") == pl.col("rank")).all(), ranks=pl.col("rank").n_unique())
        .filter("own", pl.col("ranks") > 1)["job"]
    )
    if own.is_empty():
        return events
    return events.with_columns(root=pl.when(~pl.col("job").is_in(own.implode())).then("root"))


def _jobs_table(jobs: list[Job]) -> pl.DataFrame:
    rows = []
    for job in jobs:
        seen: Counter[str] = Counter()
        for s in job.kept:
            if s.profile is not None and s.profile.backend is not None:
                seen[s.profile.backend] += s.profile.n
        told = [b for s in job.kept if isinstance(b := s.info.get("backend"), str)]
        backend = max(seen, key=lambda b: (seen[b], b)) if seen else (told[0] if told else None)
        rows.append(
            {
                "job": job.index, "name": job.name, "folder": job.folder, "attempt": job.attempt,
                "world_size": job.world_size, "backend": backend, "source": FORMAT,
                "waits": False, "p2p": True,
            }
        )  # fmt: skip
    return pl.DataFrame(rows, schema=JOBS)


def _ranks_table(jobs: list[Job]) -> pl.DataFrame:
    rows = [
        {
            "job": job.index, "rank": s.rank, "exit": EXIT["window"],
            "t_last": s.end or None, "truncated": s.truncated, "lost_before": s.lost_before,
            "only_active": False, "timed": s.profile is not None and not s.profile.host_only,
            "path": s.file.path,
        }
        for job in jobs
        for s in job.kept
    ]  # fmt: skip
    return conform(pl.DataFrame(rows, schema_overrides=RANKS), "ranks") if rows else empty("ranks")
