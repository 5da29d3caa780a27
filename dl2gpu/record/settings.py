"""What a recording is told, and how it reaches the processes that a launcher starts.

The command ``dl2gpu record`` puts one environment variable into the environment of the program;
every Python process below it reads it there (``inject/sitecustomize.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

__all__ = ["VARIABLE", "Settings"]

VARIABLE: Final = "DL2GPU_RECORD"
"""Environment variable that holds the settings as JSON."""


@dataclass(frozen=True)
class Settings:
    """How to record."""

    out: str
    """Folder of this job, an absolute path: one file a rank is written there."""
    job: str | None = None
    """Name of the job; None = the folder's name."""
    hang_s: float = 300.0
    """No operation and no end of a wait for so long is taken for a hang; 0 = never."""
    signal: str | None = "SIGUSR2"
    """On this signal the stack of each thread and an end mark are written; None = on none."""
    analyse: bool = False
    """At a hang, scan the folder: one process of those that see the files of all ranks."""
    flight_recorder: bool = True
    """At a hang, keep PyTorch's own Flight Recorder dump beside the record where there is one."""

    def __post_init__(self) -> None:
        if self.hang_s < 0:
            raise ValueError(f"hang_s: expected seconds, 0 or more, found {self.hang_s}")

    def encode(self) -> str:
        """As the environment variable holds it."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Settings:
        """Of the environment variable's value; keys of another version are left out.

        Raises:
            ValueError: it is not what :meth:`encode` writes.
        """
        try:
            value = json.loads(text)
            known = {f.name for f in fields(cls)}
            return cls(**{k: v for k, v in value.items() if k in known})
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{VARIABLE}: expected settings as 'dl2gpu record' writes them, found {text!r}"
            ) from error

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings | None:
        """Settings that a launcher left, or None. Raises ValueError."""
        text = environment.get(VARIABLE)
        return cls.decode(text) if text else None

    @property
    def folder(self) -> Path:
        return Path(self.out)
