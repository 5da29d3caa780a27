"""Ends and hangs: when a rank stops, something has to be left behind that says how.

A thread looks once a second. Where nothing has moved for the time that was set it writes the stack
of each thread and an end mark (``alive``, taken back when the rank goes on), and keeps PyTorch's
Flight Recorder dump. It also looks at the other ranks of this machine: one that is gone without an
end mark is given one, since the dead cannot write. The stacks on a signal are written by
``faulthandler``, in C: that works while every thread hangs in a library.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

from dl2gpu.record.lines import PROVISIONAL
from dl2gpu.record.patch import patch
from dl2gpu.record.recorder import Recorder, host_of_pids, warn_once
from dl2gpu.record.settings import VARIABLE, Settings
from dl2gpu.record.state import process

__all__ = ["watch"]

STACKS: Final = ".stacks.txt"
"""Of a rank that hangs, or was asked."""
TOLD: Final = ".terminated.txt"
"""Of a rank that was told to end."""


def watch(recorder: Recorder, settings: Settings) -> None:
    """Watches over a recorder until the process ends."""
    _Watch(recorder, settings).start()


class _Ending:
    """How this process is about to end."""

    exit = "finished"
    code = 0

    def by(self, error: BaseException) -> None:
        """By an exception; one of its communication has its mark already."""
        if process.recorder is not None and isinstance(error, Exception):
            process.recorder.ends_with(error)
        if isinstance(error, SystemExit):
            self.with_code(error.code)
        elif isinstance(error, KeyboardInterrupt):  # somebody ended what was alive
            self.exit, self.code = "alive", 130
        else:
            self.exit, self.code = "crashed", 1

    def with_code(self, code: object) -> None:
        """By ``sys.exit``."""
        self.code = code if isinstance(code, int) else int(code is not None)
        self.exit = "crashed" if self.code else "finished"


_ending: Final = _Ending()


def _watch_ending() -> None:
    def hook(original: Any, kind: Any, error: Any, *rest: Any) -> None:
        if isinstance(error, BaseException):
            _ending.by(error)
        original(kind, error, *rest)

    def leave(original: Any, *args: Any) -> None:
        _ending.with_code(args[0] if args else None)
        original(*args)

    patch(sys, "excepthook", hook)
    patch(sys, "exit", leave)


class _Watch:
    def __init__(self, recorder: Recorder, settings: Settings) -> None:
        self.recorder = recorder
        self.settings = settings
        self.stacks: TextIO | None = None
        self.stack_bytes = 0
        self.files: list[TextIO] = []
        self.told = False
        self.peers: dict[Path, int] = {}
        self.aftermath = False
        """Had communication broken, here, before this look at the others."""
        self.analysed = False

    def start(self) -> None:
        self._on_exit()
        self._on_signals()
        self.recorder.at_failure = self._look_at_peers
        threading.Thread(target=self._run, name="dl2gpu-record", daemon=True).start()

    # ---- ends

    def _on_exit(self) -> None:
        _watch_ending()
        if multiprocessing.parent_process() is not None:  # ends without the hooks of a program
            multiprocessing.util.Finalize(None, self._ended, exitpriority=-1000)
        atexit.register(self._ended)

    def _ended(self) -> None:
        recorder = self.recorder
        if recorder.pid != os.getpid():
            return
        flying = sys.exc_info()[1]
        if flying is not None:
            _ending.by(flying)
        self._drop_empty_stacks()
        if recorder.recording:
            recorder.end(_ending.exit, _ending.code)

    def _drop_empty_stacks(self) -> None:
        for file in self.files:
            with contextlib.suppress(OSError, ValueError):
                if os.fstat(file.fileno()).st_size == 0:
                    Path(file.name).unlink()

    # ---- signals

    def _stack_file(self) -> TextIO | None:
        if self.stacks is None:
            self.stacks = self._open(STACKS)
        return self.stacks

    def _open(self, suffix: str) -> TextIO | None:
        try:
            file = self.recorder.file.path.with_suffix(suffix).open("w")
        except OSError as error:
            warn_once(f"no stacks will be written: {error}")
            return None
        self.files.append(file)
        return file

    def _on_signals(self) -> None:
        """Asked by a signal, or told to end: the stacks. Another's handler is left in its place."""
        wanted = [(signal.SIGTERM, TOLD)]
        if self.settings.signal:
            number = getattr(signal, self.settings.signal, None)
            if number is None:
                warn_once(f"this system has no signal {self.settings.signal}")
            else:
                wanted.append((number, STACKS))
        for number, suffix in wanted:
            try:
                if signal.getsignal(number) is not signal.SIG_DFL:
                    continue
                file = self._open(TOLD) if suffix == TOLD else self._stack_file()
                if file is not None:
                    chain = suffix == TOLD  # then it ends, as it would have
                    faulthandler.register(number, file, all_threads=True, chain=chain)
                    # a child that is forked, a worker of a data loader, is none of this
                    os.register_at_fork(after_in_child=partial(faulthandler.unregister, number))
            except (OSError, ValueError, RuntimeError, AttributeError) as error:
                warn_once(f"no stacks on a signal: {error}")

    # ---- the thread

    def _run(self) -> None:
        hang = self.settings.hang_s
        pause = min(1.0, hang / 5) if hang else 1.0
        # dl2gpu's own thread is no reason for a process to live on, nor is its failure
        try:
            while self.recorder.recording or self.recorder.frozen:
                time.sleep(pause)
                if process.recorder is not self.recorder:
                    return
                self._look(hang)
        except Exception as error:  # noqa: BLE001 - the program goes on
            warn_once(f"watching stopped: {type(error).__name__}: {error}")

    def _look(self, hang: float) -> None:
        recorder = self.recorder
        still = time.monotonic() - recorder.moved
        if recorder.recording:
            if not hang or still < hang:
                self.told = False
            elif not self.told:
                self.told = True
                self._stands(f"nothing moved for {still:.0f} s")
        size = self._size_of_stacks()
        if size > self.stack_bytes and not self.told:  # a signal came
            self.stack_bytes = size
            self._mark()
        self._look_at_peers()
        if (self.told or recorder.frozen) and self.settings.analyse and not self.analysed:
            self.analysed = self._analyse()

    def _stands(self, why: str) -> None:
        file = self._stack_file()
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                file.write(f"rank {self.recorder.rank}, {time.strftime('%FT%T%z')}: {why}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            self.stack_bytes = self._size_of_stacks()
        self._mark()

    def _mark(self) -> None:
        self.recorder.end("alive", last=False)
        if self.settings.flight_recorder:
            _keep_flight_recorder(self.recorder)

    def _size_of_stacks(self) -> int:
        if self.stacks is None:
            return 0
        try:
            return os.fstat(self.stacks.fileno()).st_size
        except (OSError, ValueError):
            return 0

    # ---- the other ranks of this machine

    def _look_at_peers(self) -> None:
        """Ranks that died without a mark are given one."""
        if len(self.peers) < self.recorder.world_size - 1:
            self._find_peers()
        for path, pid in list(self.peers.items()):
            if not _runs(pid):
                self.peers[path] = 0
                _bury(path, aftermath=self.aftermath)
        self.aftermath = self.aftermath or self.recorder.frozen

    def _find_peers(self) -> None:
        suffix = f".attempt_{self.recorder.attempt}" if self.recorder.attempt else ""
        for path in self.recorder.file.path.parent.glob(f"rank_*{suffix}.jsonl"):
            if path in self.peers or path == self.recorder.file.path:
                continue
            if not suffix and ".attempt_" in path.name:
                continue
            with contextlib.suppress(OSError, ValueError, KeyError), path.open("rb") as file:
                header = json.loads(file.readline())
                if header["host"] == host_of_pids():
                    self.peers[path] = int(header["pid"])

    # ---- the analysis

    def _analyse(self) -> bool:
        """Scans the folder, in one process of those that see all ranks. True: it was begun."""
        recorder = self.recorder
        folder = recorder.file.path.parent
        suffix = f".attempt_{recorder.attempt}" if recorder.attempt else ""
        files = [folder / f"rank_{rank}{suffix}.jsonl" for rank in range(recorder.world_size)]
        if not all(_ends(path) for path in files):
            return False
        try:
            os.close(os.open(folder / "report.lock", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return True
        except OSError:
            return False
        environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
        command = [sys.executable, "-m", "dl2gpu", "scan", *map(str, files)]
        with (folder / "report.txt").open("wb") as out:
            subprocess.Popen(  # noqa: S603 - our own command
                [*command, "--out", str(folder / "report"), "--quiet"],
                stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment,
                start_new_session=True,
            )  # fmt: skip
        warn_once(f"this job hangs; {folder / 'report.txt'} will say why")
        return True


def _runs(pid: int) -> bool:
    """Is there a process of this number that has not ended (0: it was seen to be gone before)."""
    if pid == 0:
        return True
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return not state or state[0] not in "ZX"


def _last_line(path: Path) -> tuple[bytes, int]:
    """(last whole line of a file, where whole lines end)."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - (1 << 16))
        file.seek(start)
        tail = file.read()
    whole = tail[: tail.rfind(b"\n") + 1]
    return whole.rstrip(b"\n").rpartition(b"\n")[2], start + len(whole)


def _ends(path: Path) -> bool:
    try:
        return _last_line(path)[0].startswith(b'{"kind":"end"')
    except OSError:
        return False


def _bury(path: Path, *, aftermath: bool) -> None:
    """Writes the end mark of a rank that is gone, once; in place of one that was provisional.

    One that was told to end (its stacks were written by that signal), or that is gone after
    communication had broken, had been alive until then.
    """
    try:
        line, size = _last_line(path)
        marked = line.startswith(b'{"kind":"end"')
        if marked and (aftermath or f'"{PROVISIONAL}"'.encode() not in line):
            return
        os.close(os.open(path.with_suffix(".dead"), os.O_CREAT | os.O_EXCL))
        words = path.with_suffix(TOLD)
        told = words.exists() and words.stat().st_size > 0
        exit_ = "alive" if told or aftermath else "killed"
        mark = {"kind": "end", "exit": exit_, "t": time.time_ns()}
        with path.open("r+b") as file:
            # what stood there: a line that was cut short, or the mark
            file.truncate(size - len(line) - 1 if marked else size)
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(mark, separators=(",", ":")).encode() + b"\n")
    except OSError:
        return


def _keep_flight_recorder(recorder: Recorder) -> None:
    """PyTorch's own dump, in a folder beside the record: states that a host cannot see.

    Not on the libraries that work on the host: gloo's (2.13) has no messages and leaves all that it
    has ``scheduled``; only ``retired`` and the group's last completed number say what is done.
    """
    if recorder.backend in ("gloo", "mpi", "ucc"):
        return
    import torch

    c10d: Any = torch._C._distributed_c10d
    names = ("_dump_nccl_trace", "_dump_fr_trace")
    dump = next((getattr(c10d, n) for n in names if hasattr(c10d, n)), None)
    if dump is None:
        return
    try:
        data = dump()
        if len(data) < 200:  # an empty one: nothing was kept
            return
        folder = recorder.file.path.parent / "flight_recorder"
        if recorder.attempt:
            folder /= f"attempt_{recorder.attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"nccl_trace_rank_{recorder.rank}").write_bytes(data)
    except Exception as error:  # noqa: BLE001 - a help, not a need
        warn_once(f"no Flight Recorder dump: {error}")
