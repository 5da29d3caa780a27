"""Where shards are worked on: in this process, in local ones, on GPUs, or behind a scheduler.

``results`` gives what :func:`dl2gpu.shard.run` makes of each task, in whatever order it is done,
with a few tasks in flight at a time. A worker that is killed or runs out of memory costs a retry;
a shard that keeps killing its workers is halved, and of a single job that does, the files are
quarantined. Dask does the rest: it notices dead workers and gives their tasks to others.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Future,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias

from dl2gpu import __version__, shard
from dl2gpu.engine.choose import EngineError, choose, devices, missing
from dl2gpu.engine.cores import cores, memory
from dl2gpu.engine.process import environment
from dl2gpu.engine.versions import VersionError, check_versions
from dl2gpu.shard import Task
from dl2gpu.trace.files import local_path
from dl2gpu.trace.inputs import TraceFile
from dl2gpu.trace.parts import parts, shards

__all__ = ["KINDS", "Cluster", "ClusterError", "Done", "Number", "check", "opened"]

KINDS: Final = "threads, local, cuda, or the address of a Dask scheduler (tcp://host:8786)"

_MOST_AT_ONCE: Final = 16
"""Shards that one process works on at a time: Python's lock is held between the columns."""
_LEAST_BYTES: Final = 16 << 20
"""Shards for several workers are not smaller: each costs some milliseconds."""
_OF_MEMORY: Final = 16
"""The shards in flight take this part of the memory of a machine."""
_FOR_EACH: Final = 4
"""So many shards a worker of a cluster even out their sizes."""
_AHEAD: Final = 2
"""Tasks in flight, for each thread of the workers."""
_PATIENCE_S: Final = 30.0
"""How long a scheduler without workers is waited for."""
_CONNECT_S: Final = 10.0
"""How long a scheduler is looked for."""
_COUNT_S: Final = 5.0
"""How often the workers are counted: they come and go."""
_LOOK_S: Final = 1.0
"""How often is asked whether the scheduler is still there."""

Number: TypeAlias = tuple[int, ...]
"""Place of a task: (n,), its halves (n, 0) and (n, 1), and so on."""


class ClusterError(ValueError):
    """A cluster cannot be used, or went away. Says what was expected, found, and what to do."""


@dataclass(frozen=True, slots=True)
class Done:
    """A task that is done."""

    number: Number
    task: Task
    data: bytes
    """A :class:`dl2gpu.shard.Result`, encoded where it was made."""


def check(kind: str) -> None:
    """Raises ClusterError where ``kind`` is none of :data:`KINDS`."""
    if kind not in {"threads", "local", "cuda"} and "://" not in kind:
        raise ClusterError(f"--cluster {kind}: expected {KINDS}")


@contextmanager
def opened(kind: str, workers: int | None, roots: Sequence[str]) -> Iterator[Cluster]:
    """The cluster of this kind, closed at the end.

    Args:
        kind: one of :data:`KINDS`.
        workers: threads, or processes of a local cluster; default one for each processor.
        roots: the scanned paths, which the workers must see as well.

    Raises:
        ClusterError: it cannot be had.
    """
    if kind == "threads":
        yield Cluster(kind, workers)
        return
    paths = tuple(str(Path(p).absolute()) for p in map(local_path, roots) if p is not None)
    # local workers share this machine; another's has its own to divide
    threads = max(1, cores() // (workers or cores())) if kind == "local" else None
    with _quiet(), _client(kind, workers) as client:
        yield DaskCluster(kind, threads, client, paths)


class Cluster:
    """This process: as many shards at a time as there are threads, or one on all of them."""

    def __init__(self, kind: str, workers: int | None) -> None:
        self.kind = kind
        self._threads = workers

    @property
    def parallel(self) -> int:
        """How many tasks can be worked on at once."""
        return min(self._threads or cores(), _MOST_AT_ONCE)

    def cut(self, files: Sequence[TraceFile], most: int) -> list[list[TraceFile]]:
        """Shards of ``most`` bytes at most, but for a large job.

        Those in flight together take a sixteenth of the memory.
        """
        return list(shards(files, max(_LEAST_BYTES, min(most, self._share()))))

    def _share(self) -> int:
        return memory() // _OF_MEMORY // self.parallel

    def engine(self, asked: str) -> str:
        """``cpu`` or ``gpu`` for what the user asked.

        Raises:
            EngineError: the GPU was asked for, and something is missing.
        """
        return choose(asked)

    def results(self, tasks: Sequence[tuple[Number, Task]]) -> Iterator[Done]:
        """What comes of each task."""
        many = min(self.parallel, len(tasks))
        if many <= 1:
            for number, task in tasks:
                yield Done(number, task, _encoded(_with_threads(task, self._threads)))
            return
        threads = max(1, (self._threads or cores()) // many)
        pool = ThreadPoolExecutor(many, thread_name_prefix="shard")
        try:
            yield from self._results(pool, threads, iter(tasks), many)
        finally:
            pool.shutdown(cancel_futures=True)

    def _results(
        self, pool: ThreadPoolExecutor, threads: int, todo: Iterator[tuple[Number, Task]], many: int
    ) -> Iterator[Done]:
        flying: dict[Future[bytes], tuple[Number, Task]] = {}
        while True:
            for number, task in islice(todo, many - len(flying)):
                flying[pool.submit(_encoded, _with_threads(task, threads))] = number, task
            if not flying:
                return
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                number, task = flying.pop(future)
                yield Done(number, task, future.result())


class DaskCluster(Cluster):
    """The workers of a Dask scheduler."""

    def __init__(self, kind: str, threads: int | None, client: Any, roots: tuple[str, ...]) -> None:
        super().__init__(kind, threads)
        self._client = client
        self._roots = roots
        self._threads_now = sum(self._threads_of_workers().values())
        self._counted = time.monotonic()
        try:
            check_versions(client)
        except VersionError as error:
            raise ClusterError(f"--cluster {kind}: {error}") from None

    @property
    def parallel(self) -> int:
        return max(1, self._threads_now)

    def cut(self, files: Sequence[TraceFile], most: int) -> list[list[TraceFile]]:
        """Several shards for each of the workers, of ``most`` bytes each at most."""
        weight = sum(f.size if f.weight is None else f.weight for f in parts(files, most))
        if self.kind == "local":
            most = min(most, self._share())
        size = min(most, max(_LEAST_BYTES, weight // (_FOR_EACH * self.parallel)))
        return list(shards(files, size))

    def _threads_of_workers(self) -> dict[str, int]:
        """Threads by worker.

        Raises:
            ClusterError: there is no worker, and none came while we waited.
        """
        from distributed import TimeoutError as TooLate

        try:
            self._client.wait_for_workers(1, timeout=_PATIENCE_S)
        except TooLate:
            raise ClusterError(
                f"--cluster {self.kind}: expected at least one worker, found none in "
                f"{_PATIENCE_S:.0f} s; start one with: dask worker ADDRESS"
            ) from None
        return dict(self._client.nthreads())

    def engine(self, asked: str) -> str:
        """As the workers can: ``auto`` is ``gpu`` where all of them have one."""
        if asked not in {"auto", "gpu"}:
            return choose(asked)
        lacking = self._client.run(missing)
        poor = sorted(worker for worker, words in lacking.items() if words)
        if asked == "gpu" and poor:
            raise EngineError(
                f"engine gpu: expected a usable NVIDIA GPU on every worker, found on {poor[0]} "
                f"{'; '.join(lacking[poor[0]])}; use --engine cpu, or see: dl2gpu doctor"
            )
        return "cpu" if poor else "gpu"

    def results(self, tasks: Sequence[tuple[Number, Task]]) -> Iterator[Done]:
        from distributed import wait as wait_for

        todo = iter(tasks)
        again: deque[tuple[Number, Task]] = deque()
        # Dask blames all that a worker had when it died: a single job is tried once more by itself
        suspects: deque[tuple[Number, Task]] = deque()
        alone: Number | None = None
        flying: dict[Any, tuple[Number, Task]] = {}
        finished = 0
        while True:
            room = self._room(finished) - len(flying)
            for _ in range(room):
                item = again.popleft() if again else next(todo, None)
                if item is None:
                    break
                number, task = item
                own = _with_threads(task, self._threads)
                future = self._client.submit(work, own, self._roots, __version__, pure=False)
                flying[future] = number, task
            if not flying:
                if not suspects:
                    return
                again.append(suspects.popleft())
                alone = again[0][0]
                continue
            try:
                with self._client.as_current():
                    done = wait_for(
                        list(flying), timeout=_LOOK_S, return_when="FIRST_COMPLETED"
                    ).done
            except TimeoutError:
                done = set()
            except (CancelledError, OSError) as error:
                raise self._gone(finished) from error
            if not done and self._client.status != "running":
                raise self._gone(finished)
            for future in done:
                if future.status in {"pending", "lost"}:
                    continue  # its worker died with the result: somebody else has the task now
                number, task = flying.pop(future)
                result = self._result(future, finished)
                if result is None:
                    pair = shard.halves(task)
                    if pair is not None:
                        again += [((*number, k), half) for k, half in enumerate(pair)]
                        continue
                    if number != alone:
                        suspects.append((number, task))
                        continue
                    result = shard.lost(
                        task,
                        "the worker was killed each time it worked on this job; the usual cause is "
                        f"too little memory for its {task.size} bytes of input",
                    ).encode()
                finished += 1
                yield Done(number, task, result)

    def _room(self, finished: int) -> int:
        """How many tasks to have in flight: some for each thread that there is now."""
        if self._client.status != "running":
            raise self._gone(finished)
        if time.monotonic() > self._counted + _COUNT_S:
            try:
                self._threads_now = sum(self._client.nthreads().values())
            except (CancelledError, OSError, TimeoutError) as error:
                raise self._gone(finished) from error
            self._counted = time.monotonic()
        return _AHEAD * max(1, self._threads_now)

    def _result(self, future: Any, finished: int) -> bytes | None:
        """Of a task that is done; None where it killed its workers.

        Raises:
            ClusterError: the scheduler is gone, or a worker cannot do its work.
        """
        from distributed import KilledWorker

        try:
            if future.status == "finished":
                return bytes(future.result())
            error = future.exception()
        except KilledWorker:  # the result went with its worker, and so did who made it again
            return None
        except (CancelledError, OSError) as gone:
            raise self._gone(finished) from gone
        if isinstance(error, KilledWorker):
            return None
        if isinstance(error, ClusterError):
            raise error
        raise ClusterError(
            f"--cluster {self.kind}: a worker failed: {type(error).__name__}: {error}; "
            "see its log, or scan with --cluster threads"
        ) from error

    def _gone(self, finished: int) -> ClusterError:
        return ClusterError(
            f"--cluster {self.kind}: the scheduler went away after {finished} shards; with --out "
            "they are kept, and the same command again goes on with the rest"
        )


def work(task: Task, roots: tuple[str, ...], version: str) -> bytes:
    """What a worker does: :func:`dl2gpu.shard.run`.

    Raises:
        ClusterError: this worker runs another version of dl2gpu, or does not see the files.
    """
    if version != __version__:
        raise ClusterError(
            f"a worker on {os.uname().nodename} has dl2gpu {__version__}, the scan {version}: "
            "install the same version on both"
        )
    hidden = [root for root in roots if not Path(root).exists()]
    if hidden:
        raise ClusterError(
            f"a worker on {os.uname().nodename} does not see {hidden[0]}: mount the traces at the "
            "same place on every worker, or scan them behind a URL (s3://...)"
        )
    from distributed import get_worker

    threads = max(1, cores() // get_worker().state.nthreads)
    return _encoded(task if task.threads else _with_threads(task, threads))


def _encoded(task: Task) -> bytes:
    return shard.run(task).encode()


def _with_threads(task: Task, threads: int | None) -> Task:
    return task if threads is None else replace(task, threads=threads)


# --------------------------------------------------------------------------------------------------
# Dask


@contextmanager
def _quiet() -> Iterator[None]:
    """Dask logs each lost worker as an error with its traceback; here that is expected."""
    log = logging.getLogger("distributed")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _client(kind: str, workers: int | None) -> Iterator[Any]:
    import dask
    from distributed import Client

    if kind == "local":
        from distributed import LocalCluster

        many = workers or cores()
        # in place of Dask's own, which has memory given back at once
        share = max(1, cores() // many)
        variables = environment(share) | {"POLARS_MAX_THREADS": str(share)}
        with (
            dask.config.set({"distributed.nanny.pre-spawn-environ": variables}),
            LocalCluster(
                n_workers=many, threads_per_worker=1, processes=True,
                dashboard_address="127.0.0.1:0", silence_logs=logging.CRITICAL + 1,
            ) as local,
            Client(local) as client,
        ):  # fmt: skip
            yield client
        return
    if kind == "cuda":
        with _cuda_cluster(workers) as local, Client(local) as client:
            yield client
        return
    try:
        client = Client(kind, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(
            f"--cluster {kind}: expected a Dask scheduler there, found none: {error}"
        ) from error
    with client:
        yield client


def _cuda_cluster(workers: int | None) -> Any:
    """One worker a GPU, with a pool of its memory, and UCX where it is there."""
    found = devices()
    if find_spec("dask_cuda") is None or not found:
        lacking = "no usable NVIDIA GPU" if not found else "no package dask-cuda"
        raise ClusterError(
            f"--cluster cuda: expected NVIDIA GPUs and the extra gpu-cu12 or gpu-cu13, found "
            f"{lacking}; see: dl2gpu doctor"
        )
    from dask_cuda import LocalCUDACluster

    return LocalCUDACluster(**cuda_options(workers))


def cuda_options(workers: int | None) -> dict[str, Any]:
    """Arguments of ``dask_cuda.LocalCUDACluster``."""
    ucx = find_spec("distributed_ucxx") is not None
    return {
        "n_workers": workers,
        "threads_per_worker": 1,
        "rmm_pool_size": 0.8,
        "protocol": "ucxx" if ucx else "tcp",
        "dashboard_address": "127.0.0.1:0",
        "silence_logs": logging.CRITICAL + 1,
    }
