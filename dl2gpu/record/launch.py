"""``dl2gpu record -- CMD``: runs a program with the recorder in all of its Python processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dl2gpu.record.settings import VARIABLE, Settings

__all__ = ["INJECTED", "environment", "run"]

INJECTED = Path(__file__).resolve().parent / "inject"
"""Folder that goes first into PYTHONPATH."""


def environment(settings: Settings) -> dict[str, str]:
    """The environment of a program that is recorded."""
    out = dict(os.environ)
    out[VARIABLE] = settings.encode()
    rest = out.get("PYTHONPATH")
    out["PYTHONPATH"] = f"{INJECTED}{os.pathsep}{rest}" if rest else str(INJECTED)
    return out


def run(command: Sequence[str], settings: Settings, *, shared: bool = False) -> int:
    """Runs a command and gives its exit status (128 + n where signal n ended it).

    Args:
        command: program and arguments; its Python processes are recorded.
        settings: how.
        shared: the folder may hold ranks of this job already (one command on each machine).

    Raises:
        ValueError: there is no command, or no such program; or the folder holds another record.
        OSError: the folder cannot be made.
    """
    if not command:
        raise ValueError("record: expected a command after --, as in: -- torchrun train.py")
    folder = settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not shared and any(folder.glob("rank_*.jsonl")):
        raise ValueError(
            f"record: {folder} holds the record of another run; give an empty folder, or --shared "
            "where several machines record one job"
        )
    try:
        child = subprocess.Popen(list(command), env=environment(settings))  # noqa: S603
    except FileNotFoundError:
        raise ValueError(f"record: there is no program {command[0]!r}") from None
    except PermissionError:
        raise ValueError(f"record: {command[0]!r} is not a program") from None

    def pass_on(number: int, _: object) -> None:
        child.send_signal(number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        while True:
            try:
                status = child.wait()
                break
            except KeyboardInterrupt:  # the terminal has told the child as well
                continue
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not any(folder.glob("rank_*.jsonl")):
        sys.stderr.write(
            "dl2gpu record: no process made a process group of torch.distributed: nothing was "
            "recorded (python -I, -E and -S keep the recorder out; use dl2gpu.record.start there)\n"
        )
    return 128 - status if status < 0 else status
