"""The record of one rank: numbers, communicators, operations and waits, in the order of the host.

This module knows the format and nothing of PyTorch; ``dispatch``, ``waits``, ``groups`` and
``devices`` see the calls and tell them to the recorder. Every public method may be called from any
thread, also from a signal handler that interrupted another one, and none of them raises: what goes
wrong stops the recording with one warning and leaves the program alone.

Source of the format: TRACE_FORMAT.md.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from dl2gpu.record.lines import LineFile
from dl2gpu.record.sites import call_site

__all__ = ["Issued", "Recorder", "comm_id", "warn_once"]

P = ParamSpec("P")
T = TypeVar("T")


class Issued:
    """An operation that goes on while the host does: what a wait for it has to name."""

    __slots__ = ("comm", "host_waits", "peer_hole", "request", "stream")

    def __init__(
        self, request: int, comm: str, stream: str | None = None, *, host_waits: bool = False
    ) -> None:
        self.request = request
        self.comm = comm
        self.stream = stream
        """Device queue that it was put into; None = the host's library carries it out."""
        self.host_waits = host_waits
        """Does a wait hold the host though the operation is on a stream (a barrier does)."""
        self.peer_hole: int | None = None
        """Where the sender of a wildcard receive goes, once it is known."""


def warn_once(message: str, _said: set[str] = set()) -> None:  # noqa: B006 - said in this process
    """One line on standard error, and never the same twice."""
    if message not in _said:
        _said.add(message)
        try:
            sys.stderr.write(f"dl2gpu record: {message}\n")
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            pass


def comm_id(ranks: Sequence[int], count: int, kind: str = "") -> str:
    """Id of the ``count``-th communicator of these members: the same on each of them.

    Members that lie evenly are written as a range; of more than eight others a part and a hash.
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        name = f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    elif len(ranks) <= 8:
        name = ",".join(map(str, ranks))
    else:
        import hashlib

        digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:8]
        name = f"{ranks[0]},{ranks[1]},..({len(ranks)}):{digest}"
    return f"{name}{kind}#{count}"


def _guarded(
    method: Callable[Concatenate[Recorder, P], T],
) -> Callable[Concatenate[Recorder, P], T | None]:
    """Nothing that goes wrong here may reach the program that is recorded."""

    @functools.wraps(method)
    def call(self: Recorder, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if not self.recording:
            return None
        try:
            with self._lock:
                return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
            self.give_up(error)
            return None

    return call


class Recorder:
    """Writes what one rank does.

    Args:
        folder: of the job; made if need be.
        rank, world_size: of this process.
        backend: nccl, gloo, ...: the semantics that the analysis takes where a line says nothing.
        job: name of the job; None = the folder's.
        attempt: restart counter.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        backend: str,
        job: str | None = None,
        attempt: int = 0,
    ) -> None:
        self.rank, self.world_size, self.backend = rank, world_size, backend
        self.recording = True
        self.frozen = False
        self.pid = os.getpid()
        self.moved = time.monotonic()
        """When the rank last issued something or got out of a wait."""
        self.inside = 0
        """Calls that hold a thread of this rank right now."""
        self.reducing = False
        """Does a reducer of C++ wait in this rank."""
        self.at_failure: Callable[[], None] | None = None
        """Called when the communication of this rank has broken."""
        self._lock = threading.RLock()
        self._seqs: dict[int, int] = {}
        self._lanes: dict[int, int] = {}
        self._requests = 0
        self._groups = 0
        self._declared: set[str] = set()
        self._counts: dict[tuple[str, tuple[int, ...]], int] = {}
        self._lane_of_thread(threading.main_thread().ident or 0)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = self._new_file(folder, attempt, job)

    def _new_file(self, folder: Path, attempt: int, job: str | None) -> LineFile:
        """A file of that attempt or, where one lies there, of the next that is free."""
        for number in range(attempt, attempt + 1000):
            name = f"rank_{self.rank}" + (f".attempt_{number}" if number else "") + ".jsonl"
            try:
                file = LineFile(folder / name)
            except FileExistsError:
                continue
            self.attempt = number
            header: dict[str, Any] = {"kind": "header", "format": "dl2gpu.trace", "version": 1}
            if job is not None:
                header["job"] = job
            file.write(
                header
                | {
                    "rank": self.rank,
                    "world_size": self.world_size,
                    "backend": self.backend,
                    "attempt": number,
                    "t0_ns": time.time_ns(),
                    "pid": self.pid,
                    "host": host_of_pids(),
                }
            )
            return file
        raise FileExistsError(f"{folder}: a thousand records of rank {self.rank} lie there already")

    # ---- what is told

    @_guarded
    def declare(self, /, ranks: Sequence[int], kind: str = "", **names: str | None) -> str:
        """Id of the next communicator of these members; writes its line."""
        key = kind, tuple(ranks)
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        return self._declare(comm_id(ranks, count, kind), ranks, names)

    def _declare(self, comm: str, ranks: Sequence[int], names: dict[str, str | None]) -> str:
        if comm not in self._declared:
            self._declared.add(comm)
            given = {k: v for k, v in names.items() if v}
            self._write({"kind": "comm", "id": comm, "ranks": list(ranks), **given})
        return comm

    @_guarded
    def op(
        self,
        /,
        name: str,
        comm: str,
        *,
        stream: str | None = None,
        blocking: bool = False,
        host_waits: bool = False,
        any_source: bool = False,
        **fields: Any,
    ) -> Issued:
        """An operation that the calling thread is about to issue; None values are left out."""
        self._requests += 1
        issued = Issued(self._requests, comm, stream, host_waits=host_waits)
        where: dict[str, Any] = (
            {"stream": stream, "request": issued.request}
            if stream is not None
            else {"blocking": True}
            if blocking
            else {"blocking": False, "request": issued.request}
        )
        line = self._line(name) | {"comm": comm} | where
        line |= {k: v for k, v in fields.items() if v is not None}
        self._site(line)
        if any_source:
            self._moves()
            issued.peer_hole = self.file.write_with_hole(line, "matched_peer")
        else:
            self._write(line)
        return issued

    @_guarded
    def wait(self, issued: Iterable[Issued] | None, stream: str | None = None) -> Issued | None:
        """A wait of the host, or of a device queue; ``issued`` None: for everything before."""
        requests = None if issued is None else sorted({i.request for i in issued})
        if requests is not None and not requests:
            return None
        line = self._line("wait")
        out = None
        if stream is not None:
            self._requests += 1
            out = Issued(self._requests, "", stream)
            line |= {"stream": stream, "request": out.request}
        line["requests"] = "all" if requests is None else requests
        line["mode"] = "all"
        self._site(line)
        self._write(line)
        return out

    @_guarded
    def new_group(self) -> int:
        """Number of a batch of operations that are issued together."""
        self._groups += 1
        return self._groups

    @_guarded
    def matched(self, issued: Issued, peer: int) -> None:
        """Whom a wildcard receive took."""
        if issued.peer_hole is not None:
            self.file.fill(issued.peer_hole, peer)
            issued.peer_hole = None

    @_guarded
    def end(self, exit_: str, code: int | None = None, *, last: bool = True) -> None:
        """The end mark. After the last one nothing follows; else it goes when the rank goes on."""
        self.file.end(exit_, time.time_ns(), code, last=last)
        if last:
            self.recording = False

    @_guarded
    def failed(self, error: BaseException | None = None) -> None:
        """Communication broke: what follows is the aftermath, and no longer recorded."""
        self.file.end("alive", time.time_ns(), error=None if error is None else str(error)[:300])
        self.recording, self.frozen = False, True
        if self.at_failure is not None:
            self.at_failure()

    def ends_with(self, error: BaseException | None) -> None:
        """The program ends by an exception: of its communication, if that is where it stood."""
        if error is not None and self.reducing:
            self.failed(error)

    def got_on(self) -> None:
        """A call that held the host has returned."""
        self.moved = time.monotonic()

    def give_up(self, why: object) -> None:
        """Stops the recording; what was written stays."""
        if self.recording:
            self.recording = False
            warn_once(f"recording of rank {self.rank} stopped: {why or type(why).__name__}")

    # ---- how it is written

    def _line(self, op: str) -> dict[str, Any]:
        lane = self._lane()
        seq = self._seqs.get(lane, 0)
        self._seqs[lane] = seq + 1
        line: dict[str, Any] = {"kind": "op", "seq": seq, "op": op}
        if lane:
            line["lane"] = lane
        return line

    def _site(self, line: dict[str, Any]) -> None:
        line["t_created"] = time.time_ns()
        stack = call_site()
        if stack:
            line["stack"] = stack

    def _write(self, record: dict[str, Any]) -> None:
        self._moves()
        self.file.write(record)

    def _moves(self) -> None:
        self.moved = time.monotonic()

    def _lane(self) -> int:
        """Lane of the calling thread. PyTorch's own threads work for the main one, which waits."""
        thread = threading.current_thread()
        if isinstance(thread, threading._DummyThread):
            return 0
        return self._lane_of_thread(thread.ident or 0)

    def _lane_of_thread(self, ident: int) -> int:
        return self._lanes.setdefault(ident, len(self._lanes))


@functools.cache
def host_of_pids() -> str:
    """Names the machine and the process namespace, within which process ids mean something."""
    try:
        namespace = Path("/proc/self/ns/pid").readlink().name
    except OSError:
        namespace = ""
    return f"{platform.node()} {namespace}".strip()


SIGNS_OF_BREAKAGE: Final = (
    "timed out", "timeout", "connection", "peer", "socket", "broken pipe", "nccl", "abort",
    "remote", "failed to reach", "reset", "rendezvous", "unhandled",
)  # fmt: skip


def broke(error: BaseException) -> bool:
    """Is it the communication that failed, and not the call that was wrong."""
    text = str(error).lower()
    return any(sign in text for sign in SIGNS_OF_BREAKAGE)
