"""Reading a corpus shard by shard, as a scan does, and what it must come to."""

from __future__ import annotations

from dl2gpu.trace import parts
from dl2gpu.trace.convert import canonical
from dl2gpu.trace.inputs import Input, TraceFile, joined
from dl2gpu.trace.readers import read_files
from dl2gpu.trace.schema import Trace, concat


def read_in_parts(files: list[TraceFile], size: int) -> tuple[Trace, list[Input], int]:
    shards = list(parts.shards(files, size))
    read = [read_files(shard) for shard in shards]
    return concat([t for t, _ in read]), joined(i for _, found in read for i in found), len(shards)


def same(a: Trace, b: Trace) -> None:
    want, got = canonical(a), canonical(b)
    for table, frame in want.items():
        assert got[table].equals(frame), table
