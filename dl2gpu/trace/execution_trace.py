"""Reader of PyTorch execution traces (ExecutionTraceObserver), every schema from 1.0.1 on.

Such a trace holds what one process issued between the start and the stop of its observer: names,
arguments and parents of its operations, no times and no states. A communication call shows as a
``c10d::`` operation and, on a device backend, as a ``record_param_comms`` within it; the order of
the node numbers is that of the calls. What comes before and after is unknown, so each rank ends as
a window (:data:`schema.EXIT`). Source: FORMATS.md section 4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dl2gpu.trace.calls import Record, assemble, doubt_ranks, records_of
from dl2gpu.trace.execution_trace_calls import Process
from dl2gpu.trace.execution_trace_nodes import Nodes, lost_nodes, read_nodes, utf8
from dl2gpu.trace.files import read_bytes
from dl2gpu.trace.inputs import Input, TraceFile
from dl2gpu.trace.schema import Trace

__all__ = ["FORMAT", "read"]

FORMAT = "execution_trace"


def read(
    files: Sequence[TraceFile], load: Callable[[TraceFile], bytes] = read_bytes
) -> tuple[Trace, list[Input]]:
    """Read execution traces of any number of jobs into one trace.

    Memory is the content of one file, and the calls of all.

    Args:
        files: traces as discovery found them; their order numbers the jobs.
        load: gives the decompressed content of a file; may raise :class:`InputError`.

    Returns:
        The trace, and what became of each file, in the order of ``files``.
    """
    records = records_of(files, load, _record)
    doubt_ranks(records)
    return assemble(records, FORMAT, load)


def _record(file: TraceFile, content: bytes) -> Record:
    data = utf8(content)
    process = Process(data[: 64 << 10], len(data))
    nodes = Nodes()
    for node in read_nodes(data, Process.WANTED, nodes):
        process.add(node)
    record = process.record(file)
    record.size = len(data)
    record.lost += lost_nodes(content, nodes)
    if not nodes.total:
        what = "the file is empty" if not data.strip() else "it holds no whole node"
        record.refused = f"expected an execution trace with nodes: {what}"
    return record
