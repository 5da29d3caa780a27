"""The file of one rank: whole lines, each with the kernel before the operation it tells of begins.

One ``write`` a line and no buffer of our own: what was written outlives the process, however it
ends. Two things are changed in place afterwards: the end mark, which is taken back where the rank
goes on after all, and values of fixed width whose place was kept free (``hole``).

Source of the format: TRACE_FORMAT.md, section JSON Lines.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

__all__ = ["HOLE", "PROVISIONAL", "LineFile"]

HOLE: Final = 12
"""Width of a value that is filled in later: ``null`` and spaces."""

PROVISIONAL: Final = "provisional"
"""Key of an end mark that was written in case that nothing follows."""

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, check_circular=False).encode


class LineFile:
    """JSON objects, a line each, appended to a new file.

    Raises:
        FileExistsError: there is such a file.
        OSError: of any method; what was written before stands.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self.size = 0
        self._end: int | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Appends a record. An end mark that stands at the end is taken back."""
        if self._end is not None:
            self._take_back()
        self._append(_encode(record))

    def write_with_hole(self, record: dict[str, Any], key: str) -> int:
        """Appends a record whose last key is ``key``, unknown yet. Gives the place for `fill`."""
        if self._end is not None:
            self._take_back()
        head = f'{_encode(record)[:-1]},"{key}":'
        place = self.size + len(head)
        self._append(f"{head}{'null'.ljust(HOLE)}}}")
        return place

    def fill(self, place: int, value: int) -> None:
        """Puts a value into a hole."""
        os.pwrite(self._fd, str(value).ljust(HOLE).encode(), place)

    def end(
        self,
        exit_: str,
        t: int,
        code: int | None = None,
        *,
        last: bool = True,
        error: str | None = None,
    ) -> None:
        """Writes the end mark, in place of an earlier one.

        Args:
            exit_, t, code: as TRACE_FORMAT.md has them.
            last: False = in case that nothing follows, and said so.
            error: what broke the communication, for people.
        """
        if self._end is not None:
            self._take_back()
        self._end = self.size
        mark: dict[str, Any] = {"kind": "end", "exit": exit_, "t": t}
        if code is not None:
            mark["code"] = code
        if error is not None:
            mark["error"] = error
        if not last:
            mark[PROVISIONAL] = True
        self._append(_encode(mark))

    @property
    def ended(self) -> bool:
        """Does the file end in a mark."""
        return self._end is not None

    def close(self) -> None:
        os.close(self._fd)

    def _append(self, text: str) -> None:
        data = memoryview(text.encode() + b"\n")
        while data:
            written = os.write(self._fd, data)
            self.size += written
            data = data[written:]

    def _take_back(self) -> None:
        assert self._end is not None
        os.ftruncate(self._fd, self._end)
        os.lseek(self._fd, self._end, os.SEEK_SET)
        self.size, self._end = self._end, None
