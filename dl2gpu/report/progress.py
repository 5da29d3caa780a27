"""Progress of long work on standard error: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["Callback", "progress"]

Callback = Callable[[str, int, int], None]
"""``(stage, done, total)`` in whatever unit; may be called from several threads."""

_EVERY_S: Final = 5.0  # at most so often a plain line within one stage
_COMPILING: Final = "dl2gpu: compiling, for this and all later runs: about 20 s"


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callback | None]:
    """A callback for the stages of a scan, or None where nothing is to be shown."""
    from dl2gpu.engine import native

    native.on_compile = None if quiet else _say_compiling
    if quiet:
        yield None
    elif sys.stderr.isatty():
        yield from _bar()
    else:
        yield _lines()


def _say_compiling() -> None:
    print(_COMPILING, file=sys.stderr, flush=True)  # noqa: T201


def _bar() -> Iterator[Callback]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from dl2gpu.report.console import console

    columns = (
        TextColumn("{task.description:<10}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        tasks = {}
        lock = threading.Lock()

        def show(stage: str, done: int, total: int) -> None:
            with lock:
                if stage not in tasks:
                    tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield show


def _lines() -> Callback:
    last: dict[str, float] = {}
    lock = threading.Lock()

    def show(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        with lock:
            if stage in last and done < total and now - last[stage] < _EVERY_S:
                return
            last[stage] = now
            percent = 100 if total == 0 else 100 * done // total
            print(f"dl2gpu: {stage} {percent}%", file=sys.stderr, flush=True)  # noqa: T201

    return show
