"""Measures how much memory a reader takes for each byte of good and of worthless large files.

    python tests/fuzz_memory.py READER [MEBIBYTES]

Each shape is read alone; what is printed is the growth of the resident memory at its peak, over the
size of the content (decompressed). Linux only. docs/reliability.md has the figures.
"""

# ruff: noqa: T201 - the program below prints, as programs do

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import fr_writer
from fuzz_mutate import frames, varint
from fuzz_readers import TARGETS, check
from fuzz_seeds import SEEDS, flight_recorder_documents

FILLERS: Final = {
    "brackets": b"[", "braces": b'{"a":', "empty objects": b"{},", "numbers": b"0,", "quotes": b'"',
    "backslashes": b"\\", "empty lines": b"\n", "short lines": b"a\n", "one long line": b"x ",
    "zeros": b"\0", "high bytes": b"\xff",
}  # fmt: skip


def _longest(root: Any) -> list[Any]:
    """The list with the most elements in a value of JSON."""
    best: list[Any] = root if isinstance(root, list) else []
    for inner in root.values() if isinstance(root, dict) else root if best else ():
        if isinstance(inner, dict | list):
            found = _longest(inner)
            best = found if len(found) > len(best) else best
    return best


def repeated(target: str, seed: bytes, size: int) -> bytes | None:
    """A good file made large: its records, many times."""
    if target == "flight_recorder":
        document = flight_recorder_documents()[-2]
        times = size // len(fr_writer.dumps(document)) + 1
        return fr_writer.dumps(document | {"entries": document["entries"] * times})
    if target == "chakra":
        first, *messages = frames(seed)
        whole = b"".join(varint(len(m)) + m for m in messages)
        return varint(len(first)) + first + whole * (size // len(whole))
    try:
        root = json.loads(seed)
    except ValueError:
        lines = seed.splitlines(keepends=True)
        body = b"".join(lines[3:]) or seed
        if target == "native":
            ops = [json.loads(line) for line in lines if b'"op"' in line]
            return b"".join(lines[:2]) + b"".join(
                json.dumps(ops[k % len(ops)] | {"seq": k}).encode() + b"\n"
                for k in range(size * len(ops) // sum(map(len, lines)) + 1)
            )
        return b"".join(lines[:3]) + body * (size // len(body))
    records = _longest(root)
    records *= size // len(seed) + 1
    return json.dumps(root).encode()


def shapes(target: str, size: int) -> Iterator[tuple[str, bytes]]:
    """(name, content) of large files."""
    seeds = SEEDS[target]()
    good = repeated(target, max(seeds, key=len), size)
    if good is not None:
        yield "records", good
    head = seeds[0][: max(200, len(seeds[0]) // 2)]
    for name, filler in FILLERS.items():
        yield name, head + filler * (size // len(filler))
        if name in {"empty objects", "numbers", "brackets"} and seeds[0][:1] in b"{[":
            whole = json.loads(seeds[0]) if b"\n{" not in seeds[0] else None
            if isinstance(whole, list):
                yield f"{name} in the list", b"[" + filler * (size // len(filler)) + seeds[0][1:]
            if isinstance(whole, dict):
                key = max(whole, key=lambda k: len(str(whole[k])))
                text = json.dumps(whole | {key: []})
                begin = text.index(f'"{key}": [') + len(key) + 5
                inner = filler * (size // len(filler))
                yield f"{name} in {key}", text[:begin].encode() + inner + text[begin:].encode()


def _resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))
    assert found is not None
    return int(found[1]) << 10


def peak(target: str, content: bytes) -> int:
    """Bytes by which the resident memory grew while a file was read."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", "ascii")
    before = _resident("VmRSS")
    check(TARGETS[target], 1, [content])
    return _resident("VmHWM") - before


def main() -> None:
    """Prints the multiples, largest last."""
    target = sys.argv[1]
    size = int(sys.argv[2] if len(sys.argv) > 2 else 8) << 20
    check(TARGETS[target], 1, SEEDS[target]())  # loads what the reader needs
    found = [(peak(target, c) / len(c), n, len(c)) for n, c in shapes(target, size)]
    for multiple, name, length in sorted(found):
        print(f"{target}: {multiple:6.1f} times {length >> 20} MiB of {name}", flush=True)


if __name__ == "__main__":
    main()
