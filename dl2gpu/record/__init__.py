"""Records the communication of a PyTorch program, in the native trace format.

Either start the program with ``dl2gpu record --out DIR -- torchrun ... train.py``, or put two lines
into it before (or after) the default process group is made:

    >>> import dl2gpu.record
    >>> dl2gpu.record.start("traces/job7")  # doctest: +SKIP

Needs PyTorch 2.4 or newer in the program's environment (tested with 2.13); nothing else is loaded.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from dl2gpu.record.settings import Settings

__all__ = ["Settings", "start", "stop"]


def start(
    out: str | Path,
    *,
    job: str | None = None,
    hang_s: float = 300.0,
    signal: str | None = "SIGUSR2",
    analyse: bool = False,
    flight_recorder: bool = True,
) -> None:
    """Records this process from now on, once it has a default process group.

    Args:
        out: folder of the job, the same for all its ranks; each writes one file there.
        job: name of the job; None = the folder's name.
        hang_s: seconds without progress that are taken for a hang; 0 = never.
        signal: name of the signal on which stacks and an end mark are written; None = on none.
        analyse: at a hang, scan the folder (one process of those that see all ranks' files).
        flight_recorder: at a hang, keep PyTorch's Flight Recorder dump beside the record.

    Raises:
        ValueError: ``hang_s`` is negative.
        ImportError: there is no PyTorch, or one without torch.distributed.
    """
    begin(
        Settings(str(Path(out).resolve()), job, hang_s, signal, analyse, flight_recorder),
        importlib.import_module("torch.distributed"),
    )


def begin(settings: Settings, *modules: Any) -> None:
    """Records from when the default group is made in one of ``modules``, or from now on."""
    from dl2gpu.record.groups import watch_init
    from dl2gpu.record.state import process

    process.settings = settings
    dist = sys.modules.get("torch.distributed")
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    for module in {*modules, *(m for m in (dist, c10d) if m is not None)}:
        watch_init(module, _begin)
    if hasattr(dist, "is_initialized") and dist is not None and dist.is_initialized():
        _begin()


def _begin() -> None:
    """The default group stands: sets everything up, and never fails."""
    from dl2gpu.record.recorder import warn_once
    from dl2gpu.record.state import process

    try:
        torch = sys.modules["torch"]
        from dl2gpu.record import devices, dispatch, groups, waits
        from dl2gpu.record.watch import watch

        before = process.recorder
        groups.begin(torch)
        waits.install(torch)
        groups.install(torch)
        devices.install(torch)
        if not dispatch.install(torch):
            process.recorder = None
        recorder = process.recorder
        if recorder is not None and recorder is not before and process.settings is not None:
            watch(recorder, process.settings)
    except Exception as error:  # noqa: BLE001 - the program goes on without a record
        warn_once(f"nothing is recorded: {type(error).__name__}: {error}")


def stop() -> None:
    """Ends the record of this process; the mark says that nothing follows."""
    from dl2gpu.record.state import process

    if process.recorder is not None:
        process.recorder.end("finished", 0)
