"""Feeds damaged inputs to a reader, and says where it does what no reader may.

    python tests/fuzz_readers.py READER --runs N --seed S

A reader answers for every file and raises nothing but InputError and SchemaError; what it delivers
is a valid trace, which the analysis takes; it neither hangs nor fills the memory. Inputs come in
batches, made of seeds, of what earlier runs kept (tests/data/fuzz/) and of inputs that were
answered in a way that was new in this run. What is found is written to ``--out``, cut down to the
files that are needed for it. docs/reliability.md says what was run.
"""

# ruff: noqa: T201 - the program below prints, as programs do

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import importlib
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Final

import fr_writer
import polars as pl
from fuzz_mutate import (
    LARGEST,
    any_bytes,
    framed,
    frames,
    in_utf16,
    json_bytes,
    packed,
    value,
    words_of,
)
from fuzz_seeds import (
    PARQUET_FILES,
    SEEDS,
    bundled,
    flight_recorder_documents,
    kept,
    table_odd,
    tokens,
)

from dl2gpu.trace import containers
from dl2gpu.trace.discover import discover
from dl2gpu.trace.files import Limits, unwrap
from dl2gpu.trace.inputs import LONGEST_REASON, Input, InputError, TraceFile
from dl2gpu.trace.readers import READERS, read_files
from dl2gpu.trace.schema import SchemaError, Trace, validate
from dl2gpu.trace.sniff import classify

__all__ = ["LARGEST", "TARGETS", "Fault", "Fuzzer", "check"]

SECONDS = 5.0
"""Processor time that one small input may take."""
MORE_SECONDS = 0.2
"""Processor time for each further one of a batch."""
ANALYSED: Final = 20
"""One batch in so many goes through the analysis, too."""
JUMP: Final = 256 << 20
"""Growth of the largest memory ever used by which a batch stands out."""
LIMITS: Final = Limits(max_file_bytes=64 << 20, free_bytes=8 << 20)

Files = Sequence[bytes]
Outcome = tuple[Trace | None, list[Input]]


class Fault(Exception):
    """A reader did what none may; the message says what."""


class Hang(BaseException):
    """Raised by the watchdog, past every ``except Exception``."""


def _bark(signum: int, frame: FrameType | None) -> None:
    raise Hang


# --------------------------------------------------------------------------------------------------
# How a batch is read


def _files(format_: str, group: int, contents: Files) -> list[TraceFile]:
    """As discovery would hand them over; ``group`` files are one job."""
    jobs = [f"job{k // group}" for k in range(len(contents))]
    return [
        TraceFile(f"{job}/rank_{k % group}.x", f"{k}", format_, job, len(contents[k]))
        for k, job in enumerate(jobs)
    ]


def _in_memory(format_: str, group: int, contents: Files) -> Outcome:
    """Through a reader that takes ``load``; ``group`` files are one job."""
    stored = {f"{k}": data for k, data in enumerate(contents)}
    files = _files(format_, group, contents)
    read = importlib.import_module(READERS[format_]).read
    return read(files, lambda file: unwrap(stored[file.url], LIMITS))  # type: ignore[no-any-return]


def _profiled(group: int, contents: Files) -> Outcome:
    """Through the reader of profiler traces, in small blocks."""
    from dl2gpu.trace import kineto

    files = _files("kineto", group, contents)
    return kineto.read(files, lambda file: unwrap(contents[int(file.url)], LIMITS), 1 << 13)


def _parquet(group: int, contents: Files) -> Outcome:
    stored: dict[str, bytes] = {}
    files = []
    for k, data in enumerate(contents):
        parts = frames(data)
        for name, part in zip(PARQUET_FILES, parts, strict=False):
            if part:
                stored[f"{k}.{name}.parquet" if name else f"{k}.parquet"] = part
        files.append(TraceFile(f"j/{k}.parquet", f"{k}.parquet", "parquet", "j", len(data)))
    read = importlib.import_module(READERS["parquet"]).read

    def load(file: TraceFile) -> bytes:
        if file.url not in stored:
            raise InputError("cannot be opened: no such file")
        return stored[file.url]

    return read(files, load)  # type: ignore[no-any-return]


def _folder() -> tempfile.TemporaryDirectory[str]:
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory if memory.is_dir() else None)


def _on_disk(format_: str, group: int, contents: Files) -> Outcome:
    """Through a reader that opens files itself."""
    with _folder() as top:
        files = []
        for k, data in enumerate(contents):
            path = Path(top) / f"{k}.log"
            path.write_bytes(data)
            job = f"job{k // group}"
            files.append(TraceFile(f"{job}/{k}.log", str(path), format_, job, len(data)))
        return importlib.import_module(READERS[format_]).read(files)  # type: ignore[no-any-return]


def _otf2(group: int, contents: Files) -> Outcome:
    with _folder() as top:
        files = []
        for k, data in enumerate(contents):
            folder = Path(top) / f"{k}"
            folder.mkdir()
            with (
                contextlib.suppress(tarfile.TarError),  # the input was cut
                tarfile.open(fileobj=io.BytesIO(data)) as archive,
            ):
                archive.extractall(folder, filter="data")
            url = str(folder / "traces.otf2")
            files.append(TraceFile(f"job{k}/traces.otf2", url, "otf2", f"job{k}", len(data)))
        return importlib.import_module(READERS["otf2"]).read(files)  # type: ignore[no-any-return]


NAMES: Final = (
    "rank_0.jsonl", "trace.json", "nccl_trace_rank_1", "a.log", "a.tar", "a.zip", "a.tgz", "x.et",
    "a.pkl", "slurm-12.out", "x.parquet", "dump_0", "stdout.txt.gz", "a",
)  # fmt: skip


def _sniffed(group: int, contents: Files) -> Outcome:
    """What a file is, by its beginning; both in this process' memory."""
    inputs = []
    for k, data in enumerate(contents):
        kind = classify(data[:4096], NAMES[k % len(NAMES)])
        if kind.format is None and kind.status == "read":
            raise Fault(f"{NAMES[k % len(NAMES)]}: to be read, by nobody")
        inputs.append(Input(f"{k}", kind.status, kind.reason, kind.format))
    return None, inputs


def _discovered(archives: bool, group: int, contents: Files) -> Outcome:
    """Listed, recognised, unpacked and read, as a scan does it."""
    with _folder() as top:
        names = []
        for k, data in enumerate(contents):
            name = f"{k}.tar" if archives else f"job{k // group}/{k}-{NAMES[k % len(NAMES)]}"
            path = Path(top) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            names.append(name)
        try:
            found = discover([top])
            trace, inputs = read_files(found.files)
        finally:
            containers.forget()
    told = [*found.inputs, *inputs]
    first = {
        name: [i for i in told if i.path == name or i.path.startswith(f"{name}/")] for name in names
    }
    silent = [name for name, said in first.items() if not said]
    if silent:
        raise Fault(f"{silent[0]}: not accounted for")
    paths = [i.path for i in told]
    if len(set(paths)) != len(paths):
        raise Fault("a file is accounted for twice")
    return trace, [said[0] for said in first.values()]


# --------------------------------------------------------------------------------------------------
# How an input is changed


@dataclass
class Kit:
    """What changes are made from."""

    words: list[str]
    tokens: list[bytes]


def _json(chance: Random, data: bytes, other: bytes, kit: Kit) -> bytes:
    changed = json_bytes(chance, data, kit.words) if chance.random() < 0.7 else None
    return any_bytes(chance, data, other, kit.tokens) if changed is None else changed


def _text(chance: Random, data: bytes, other: bytes, kit: Kit) -> bytes:
    out = any_bytes(chance, data, other, kit.tokens)
    return in_utf16(out) if chance.random() < 0.02 else out


def _binary(chance: Random, data: bytes, other: bytes, kit: Kit) -> bytes:
    if chance.random() < 0.7:
        return framed(chance, data, other, kit.tokens)
    return any_bytes(chance, data, other, kit.tokens)


_DOCUMENTS: Final = flight_recorder_documents()


def _pickled(chance: Random, data: bytes, other: bytes, kit: Kit) -> bytes:
    """A dump of changed values, by PyTorch's writer or Python's, or the bytes of one changed."""
    if chance.random() < 0.5:
        return any_bytes(chance, data, other, kit.tokens)
    document = value(chance, chance.choice(_DOCUMENTS), kit.words)
    try:
        if chance.random() < 0.6 and isinstance(document, dict | list):
            return fr_writer.dumps(document)
    except Exception:  # noqa: BLE001 - the writer knows fewer types
        pass
    return pickle.dumps(document, chance.choice((2, 2, 3, 4, 5)))


def _tables(chance: Random, data: bytes, other: bytes, kit: Kit) -> bytes:
    """Files of a trace in Parquet: bytes of one of them, or the rows or columns of a table."""
    from dl2gpu.trace.parquet_file import DIGEST_KEY, VERSION, VERSION_KEY

    parts = frames(data)
    if len(parts) != len(PARQUET_FILES) or chance.random() < 0.3:
        k = chance.randrange(len(parts)) if parts else 0
        raw = any_bytes(chance, parts[k] if parts else data, other, kit.tokens)
        return bundled([*parts[:k], raw, *parts[k + 1 :]])
    try:
        tables = [pl.read_parquet(p) if p else None for p in parts]
        k = chance.randrange(len(tables))
        table = tables[k] if tables[k] is not None else tables[0]
        assert table is not None
        table = _table(chance, table)
        out = [parts[0], *(p for p in parts[1:])]
        if k and tables[k] is not None:
            out[k] = _written(table, {VERSION_KEY: VERSION})
        main = table if k == 0 else tables[0]
        assert main is not None
        digest = hashlib.sha256()
        for part in out[1:]:
            digest.update(part)
        out[0] = _written(main, {VERSION_KEY: VERSION, DIGEST_KEY: digest.hexdigest()})
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, AssertionError, OSError,
            OverflowError, TypeError, ValueError):  # fmt: skip
        return bundled([any_bytes(chance, parts[0], other, kit.tokens), *parts[1:]])
    return bundled(out)


def _written(table: pl.DataFrame, metadata: dict[str, str]) -> bytes:
    out = io.BytesIO()
    table.write_parquet(out, metadata=metadata)
    return out.getvalue()


def _table(chance: Random, table: pl.DataFrame) -> pl.DataFrame:
    name = chance.choice(table.columns)
    column = table[name]
    how = chance.randrange(7)
    if how == 0:
        return table.drop(name)
    if how == 1:
        types: list[Any] = [
            pl.String, pl.Int8, pl.Int64, pl.UInt64, pl.Float64, pl.Boolean, pl.Binary, pl.Null,
            pl.Datetime, pl.List(pl.Int64), pl.Struct({"a": pl.Int8}),
        ]  # fmt: skip
        return table.with_columns(pl.Series(name, [None] * table.height, chance.choice(types)))
    if how == 2:
        return table.rename({name: chance.choice(["x", "job ", "Job", ""])})
    if how == 3:
        more = table.sample(min(1, table.height), seed=chance.randrange(1000))
        return pl.concat([table, more])
    if how == 4:
        return table.head(chance.randrange(table.height + 1))
    if table.height:
        values = column.to_list()
        values[chance.randrange(len(values))] = chance.choice(table_odd(column.dtype))
        if how == 6:
            values[chance.randrange(len(values))] = values[0]
        return table.with_columns(pl.Series(name, values, column.dtype, strict=False))
    return table


def _archived(chance: Random, data: bytes, other: bytes, kit: Kit) -> bytes:
    """An archive, damaged; the checksum of a changed header of a tar is put right."""
    out = bytearray(data)
    if data[257:262] == b"ustar" and chance.random() < 0.6:
        heads = [k for k in range(0, len(out), 512) if out[k + 257 : k + 262] == b"ustar"]
        at = chance.choice(heads)
        begin, end = chance.choice(((0, 100), (100, 108), (124, 136), (136, 148), (156, 157),
                                    (157, 257), (257, 265), (345, 500)))  # fmt: skip
        token = chance.choice(kit.tokens)[: end - begin]
        if end - begin == 1:
            token = chance.choice(b"0123457LKxgSVDMNXA\0").to_bytes()
        out[at + begin : at + begin + len(token)] = token
        out[at + 148 : at + 156] = b" " * 8
        out[at + 148 : at + 156] = f"{sum(out[at : at + 512]):06o}\0 ".encode()
        return bytes(out)
    if chance.random() < 0.5:  # in the directory of a zip, or at the end
        k = max(0, len(data) - chance.randrange(1, 1200))
        return data[:k] + any_bytes(chance, data[k:], other, kit.tokens)
    return any_bytes(chance, data, other, kit.tokens)


def _archive_files(chance: Random, data: bytes, other: bytes, kit: Kit) -> bytes:
    """One file of an OTF2 archive damaged; the tar around it is whole."""
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as old, tarfile.open(fileobj=out, mode="w") as new:
        members = old.getmembers()
        names = [m.name for m in members if m.isfile()]
        hit = chance.choice(names) if names else ""
        for member in members:
            file = old.extractfile(member)
            raw = file.read() if file else b""
            if member.name == hit:
                if chance.random() < 0.05:
                    continue
                raw = any_bytes(chance, raw, other[:4000], [b"\x80", b"\xff" * 4, b"\0" * 4])
            member.size = len(raw)
            new.addfile(member, io.BytesIO(raw))
    return out.getvalue()


def _mixed(chance: Random, data: bytes, other: bytes, kit: Kit) -> bytes:
    how = chance.choice((_json, _text, _text, _archived))
    return how(chance, data, other, kit)


@dataclass(frozen=True)
class Target:
    """How the inputs of a reader are made and read."""

    read: Callable[[int, Files], Outcome]
    """Takes how many files are one job, and the files."""
    change: Callable[[Random, bytes, bytes, Kit], bytes]
    batch: int = 200
    wrapped: float = 0.02
    """Share of inputs with a layer of compression around."""
    groups: tuple[int, ...] = (1, 1, 2, 3)
    """How many files may be one job."""
    apart: bool = False
    """Each input is a job of its own."""


TARGETS: Final[dict[str, Target]] = {
    "native": Target(partial(_in_memory, "native"), _json),
    "parquet": Target(_parquet, _tables, 20, 0, apart=True),
    "flight_recorder": Target(partial(_in_memory, "flight_recorder"), _pickled),
    "flight_recorder_json": Target(partial(_in_memory, "flight_recorder"), _json),
    "kineto": Target(_profiled, _json, 100),
    "execution_trace": Target(partial(_in_memory, "execution_trace"), _json),
    "chakra": Target(partial(_in_memory, "chakra"), _binary),
    "chakra_json": Target(partial(_in_memory, "chakra"), _json),
    "clog": Target(partial(_in_memory, "clog"), _text),
    "param": Target(partial(_in_memory, "param"), _json),
    "log": Target(partial(_on_disk, "log"), _text, 100, groups=(1, 4, 20, 50)),
    "ras": Target(partial(_in_memory, "ras"), _mixed, groups=(1, 5, 20, 50)),
    "otf2": Target(_otf2, _archive_files, 2, 0, apart=True),
    "containers": Target(partial(_discovered, True), _archived, 20, 0.2, apart=True),
    "sniff": Target(_sniffed, _mixed, 200, 0, apart=True),
    "discover": Target(partial(_discovered, False), _mixed, 60, 0.2),
}


# --------------------------------------------------------------------------------------------------
# What may not happen


def check(target: Target, group: int, contents: Files, deep: bool = False) -> list[Input]:
    """Reads a batch; what became of its files.

    Args:
        target: what reads it.
        group: how many files are one job.
        contents: the files.
        deep: the analysis takes what was read, too.

    Raises:
        Fault: the reader or the analysis did what they may not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace, inputs = target.read(group, contents)
        if len(inputs) != len(contents) or len({i.path for i in inputs}) != len(contents):
            raise Fault(f"{len(inputs)} answers for {len(contents)} files")
        for found in inputs:
            if found.status not in {"read", "partial", "quarantined", "ignored"}:
                raise Fault(f"status {found.status!r}")
            if found.status != "read" and not found.reason:
                raise Fault(f"{found.status} without a reason")
            if len(found.reason or "") > LONGEST_REASON:
                raise Fault(f"a reason of {len(found.reason or '')} characters")
        if trace is not None:
            validate(trace)
            if deep and trace.jobs.height:
                from dl2gpu.analysis import analyse

                analyse(trace, workers=1)
    return inputs


@dataclass
class Fuzzer:
    """Runs of one target: the same seed gives the same inputs."""

    name: str
    seed: int = 0
    pool: list[bytes] = field(default_factory=list)
    seen: set[tuple[Any, ...]] = field(default_factory=set)
    faults: list[tuple[str, int, list[bytes]]] = field(default_factory=list)
    novel: list[bytes] = field(default_factory=list)
    runs: int = 0
    batches: int = 0
    slowest: float = 0.0

    def __post_init__(self) -> None:
        self.target = TARGETS[self.name]
        seeds = SEEDS[self.name]()
        words: set[str] = set()
        for seed in seeds:
            try:
                words |= words_of(json.loads(seed))
            except ValueError:
                for line in seed.split(b"\n"):
                    if line.startswith(b"{"):
                        with_words = line.decode("utf-8", "replace")
                        words |= set(re.findall(r'"([\w:]+)"', with_words))
        if self.name == "flight_recorder":
            words = words_of(flight_recorder_documents())
        self.kit = Kit(sorted(words), tokens(self.name, seeds))
        self.pool = [*seeds, *kept(self.name)]
        self.seeds = len(self.pool)

    def make(self, batch: int = 0) -> tuple[int, list[bytes]]:
        """The next batch: how many files are one job, and the files."""
        chance = Random(f"{self.name}/{self.seed}/{self.batches}")
        group = 1 if self.target.apart else chance.choice(self.target.groups)
        contents = []
        for _ in range(batch or self.target.batch):
            k = chance.randrange(len(self.pool))
            if len(self.pool) > self.seeds and chance.random() < 0.4:
                k = chance.randrange(self.seeds)
            data = self.target.change(chance, self.pool[k], chance.choice(self.pool), self.kit)
            data = data[:LARGEST]
            if chance.random() < self.target.wrapped:
                data = packed(chance, data)
            contents.append(data)
        self.batches += 1
        return group, contents

    def step(self, state: Path | None = None, batch: int = 0) -> None:
        """Reads one batch, keeps what is new and what is wrong."""
        group, contents = self.make(batch)
        if state is not None:
            state.write_bytes(bundled([bytes([group]), *contents]))
        deep = self.batches % ANALYSED == 1
        before = _peak()
        begun = time.process_time()
        wrong, inputs = self.tried(group, contents, deep, SECONDS + MORE_SECONDS * len(contents))
        self.slowest = max(self.slowest, time.process_time() - begun)
        self.runs += len(contents)
        if wrong is None and self.batches > 5 and _peak() - before > JUMP:
            wrong = (
                f"memory: {(_peak() - before) >> 20} MiB more for {sum(map(len, contents))} bytes"
            )
            self.faults.append((wrong, group, contents))
            return
        if wrong is not None:
            self.cut_down(group, contents, wrong, deep)
            return
        for data, found in zip(contents, inputs, strict=True):
            reason = re.sub(r"\d+|b?'[^']*'|\"[^\"]*\"", "#", found.reason or "")[:120]
            key = (found.status, reason, found.format, found.events.bit_length())
            if key not in self.seen:
                self.seen.add(key)
                if len(self.pool) < self.seeds + 2000:
                    self.pool.append(data)
                    self.novel.append(data)

    def tried(
        self, group: int, contents: Files, deep: bool, seconds: float
    ) -> tuple[str | None, list[Input]]:
        """What is wrong with a batch, or None; and the answers."""
        before = signal.signal(signal.SIGPROF, _bark)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return None, check(self.target, group, contents, deep)
        except KeyboardInterrupt:
            raise
        except Hang:
            return f"hang: over {seconds:.0f} s of processor time", []
        except BaseException as e:  # noqa: BLE001 - whatever it is
            at = traceback.extract_tb(e.__traceback__)
            ours = [f for f in at if "/dl2gpu/" in f.filename]
            where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
            return f"{type(e).__name__} at {where}: {str(e)[:200]}", []
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def cut_down(self, group: int, contents: list[bytes], wrong: str, deep: bool) -> None:
        """Keeps the jobs of a batch that go wrong alone; an own error of one alone is no fault."""
        jobs = [contents[k : k + group] for k in range(0, len(contents), group)]
        found = False
        for job in jobs:
            alone, _ = self.tried(group, job, deep, SECONDS)
            if alone is None:
                continue
            one_by_one = [f for f in job if self.tried(1, [f], deep, SECONDS)[0]] or job
            found = True
            self.faults.append((alone, group, one_by_one[:1] if one_by_one is not job else job))
        if not found:
            self.faults.append((f"only together: {wrong}", group, contents))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


# --------------------------------------------------------------------------------------------------
# The program


def fuzz(fuzzer: Fuzzer, runs: int, seconds: float, out: Path, most: int) -> None:
    """Runs until ``runs`` inputs were read, the time is over, or ``most`` faults were found."""
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    state = out / f"{fuzzer.name}.{fuzzer.seed}.now"
    kinds: dict[str, int] = {}
    while fuzzer.runs < runs and time.monotonic() - begun < seconds and len(kinds) < most:
        known = len(fuzzer.faults)
        # what never gets back to Python is found by this one
        faulthandler.dump_traceback_later(900, exit=True, file=sys.__stderr__ or sys.stderr)
        fuzzer.step(state)
        faulthandler.cancel_dump_traceback_later()
        for wrong, group, contents in fuzzer.faults[known:]:
            kind = re.sub(r"\d+", "#", wrong)[:100]
            kinds[kind] = kinds.get(kind, 0) + 1
            if kinds[kind] > 3:
                continue
            name = hashlib.sha256(bundled(contents)).hexdigest()[:10]
            (out / f"{fuzzer.name}-{name}").write_bytes(bundled([bytes([group]), *contents]))
            print(f"{fuzzer.name}-{name}: {wrong}", flush=True)
    state.unlink(missing_ok=True)
    took = time.monotonic() - begun
    print(
        f"{fuzzer.name}: {fuzzer.runs} inputs from {fuzzer.seeds} seeds in {took:.0f} s "
        f"({fuzzer.runs / max(took, 1e-9):.0f}/s), {len(fuzzer.seen)} kinds of answers, "
        f"{len(fuzzer.faults)} faults of {len(kinds)} kinds, slowest batch "
        f"{fuzzer.slowest:.1f} s, peak {_peak() >> 20} MiB",
        flush=True,
    )


def replay(name: str, paths: list[str]) -> int:
    """Reads what a run wrote; how many go wrong."""
    bad = 0
    for path in paths:
        group, *contents = frames(Path(path).read_bytes())
        try:
            check(TARGETS[name], group[0], contents, True)
        except (InputError, SchemaError, Exception) as e:  # noqa: BLE001
            bad += 1
            print(f"{path}:")
            traceback.print_exception(e)
    return bad


def main() -> int:
    """1 where a fault was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", choices=[*TARGETS, "all"])
    parser.add_argument("--runs", type=int, default=10_000, help="inputs")
    parser.add_argument("--seconds", type=float, default=1e9, help="at most so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="fuzz-found", help="folder for what is found")
    parser.add_argument("--most", type=int, default=50, help="kinds of faults to stop at")
    parser.add_argument("--keep", action="store_true", help="write inputs with new answers, too")
    parser.add_argument("--replay", nargs="*", help="files of --out to read again")
    args = parser.parse_args()
    if args.replay:
        return int(replay(args.reader, args.replay) > 0)
    bad = 0
    for name in TARGETS if args.reader == "all" else [args.reader]:
        fuzzer = Fuzzer(name, args.seed)
        fuzz(fuzzer, args.runs, args.seconds, Path(args.out), args.most)
        bad += len(fuzzer.faults)
        if args.keep:
            folder = Path(args.out) / f"{name}.kept"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for data in fuzzer.novel:
                (folder / hashlib.sha256(data).hexdigest()[:10]).write_bytes(data)
    return int(bad > 0)


if __name__ == "__main__":
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    sys.exit(main())
