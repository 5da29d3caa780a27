"""Writer of the native JSON Lines format."""

from __future__ import annotations

from dl2gpu.trace.schema import Trace


def write_jsonl(trace: Trace, directory: str) -> None:
    raise NotImplementedError
