"""Progress of long work on standard error: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dl2gpu.scan import Step

__all__ = ["progress"]

_EVERY_S: Final = 5.0  # at most so often a plain line
_COMPILING: Final = "dl2gpu: compiling, for this and all later runs: about 20 s"


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[Step], None] | None]:
    """A callback for the steps of a scan, or None where nothing is to be shown."""
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


def told(step: Step) -> str:
    """What was found so far, in words."""
    said = [f"{step.files:,} of {step.all_files:,} files"]
    for number, one, many in (
        (step.jobs, "job", "jobs"),
        (step.events, "event", "events"),
        (step.findings, "finding", "findings"),
    ):
        said.append(f"{number:,} {one if number == 1 else many}")
    return ", ".join(said)


def time_left(step: Step, elapsed_s: float) -> str:
    """As if the rest went as fast as what is done; empty where that cannot be said yet."""
    if not 0 < step.done < step.total:
        return ""
    seconds = round(elapsed_s * (step.total - step.done) / step.done)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min left"
    return f"{minutes} min {seconds:02} s left" if minutes else f"{seconds} s left"


def _percent(step: Step) -> int:
    return 100 if step.total == 0 else 100 * step.done // step.total


def _bar() -> Iterator[Callable[[Step], None]]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from dl2gpu.report.console import console

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    began = time.monotonic()
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(step: Step) -> None:
            left = time_left(step, time.monotonic() - began)
            text = ", ".join(filter(None, (told(step), left)))
            bar.update(task, completed=step.done, total=step.total, description=text)

        yield show


def _lines() -> Callable[[Step], None]:
    began = time.monotonic()
    last: float | None = None

    def show(step: Step) -> None:
        nonlocal last
        now = time.monotonic()
        if last is not None and step.done < step.total and now - last < _EVERY_S:
            return
        last = now
        text = "; ".join(filter(None, (told(step), time_left(step, now - began))))
        print(f"dl2gpu: {_percent(step)}%: {text}", file=sys.stderr, flush=True)  # noqa: T201

    return show
