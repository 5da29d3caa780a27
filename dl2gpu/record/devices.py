"""Accelerators: which queue an operation goes to, and who waits for a queue.

On the host's own libraries (gloo, MPI) an operation has no queue. On an accelerator a process group
has one of its own; the host goes on at once, a wait holds the current stream of the device, and the
host only where it synchronises with a stream, an event, or the device. Those are recorded by the
last wait that was put on the stream in question, since a stream is carried out in order.

Sources: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (getKeyFromDevice, collective, wait);
torch/cuda/streams.py.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Final

from dl2gpu.record.patch import patch
from dl2gpu.record.recorder import Issued, Recorder
from dl2gpu.record.state import active

__all__ = ["current_queue", "install", "put", "queue_of"]

_last: dict[str, Issued] = {}
"""The last wait that was put on a stream."""
_queued: set[str] = set()
"""Streams that were current when something was issued since the device was last synchronised."""
_at_event: weakref.WeakKeyDictionary[Any, Issued] = weakref.WeakKeyDictionary()
"""What the stream of an event had been given when the event was recorded."""


def queue_of(
    tensor: Any, comm: str, peer: Any, rank: int, given: dict[str, Any]
) -> tuple[str | None, str | None]:
    """(queue that an operation goes to, current stream of the device); None on the host.

    A message that is in no batch has a queue for its pair of ranks. What is called synchronously
    runs on the current stream itself in versions that pass ``async_op`` on.
    """
    if tensor is None or tensor.device.type in ("cpu", "meta"):
        return None, None
    current = current_queue(tensor.device)
    _queued.add(current)
    if given.get("async_op") is False:
        return current, current
    if isinstance(peer, int):
        return f"{comm} {min(rank, peer)}-{max(rank, peer)}", current
    return comm, current


def current_queue(device: Any) -> str:
    """Name of a device's current stream."""
    import torch

    current = getattr(getattr(torch, device.type, None), "current_stream", None)
    stream = current(device) if current is not None else None
    return _name(stream) if stream is not None else str(device)


def _name(stream: Any) -> str:
    return f"{stream.device}/{getattr(stream, 'stream_id', 0)}"


BLOCKING_WAIT: Final = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")


def host_waits(issued: list[Issued]) -> bool:
    """Does a wait for these hold the host."""
    return any(i.stream is None or i.host_waits for i in issued) or any(
        os.environ.get(name) == "1" for name in BLOCKING_WAIT
    )


def put(recorder: Recorder, issued: list[Issued], stream: str) -> None:
    """Notes that a stream waits for operations."""
    wait = recorder.wait([i for i in issued if i.stream != stream], stream)
    if wait is not None:
        _last[stream] = wait


def current_of(issued: list[Issued]) -> str | None:
    """The current stream of the accelerator, for a wait that names no tensor."""
    if all(i.stream is None for i in issued):
        return None
    import torch

    accelerator = getattr(torch, "accelerator", None)
    device = accelerator.current_accelerator() if accelerator is not None else torch.device("cuda")
    return None if device is None else current_queue(device)


# --------------------------------------------------------------------------------------------------
# The host waits for a stream


def _host_waits_for(recorder: Recorder, last: Issued | None) -> None:
    if last is not None:
        recorder.wait([last])


def install(torch: Any) -> None:
    """Watches synchronisation with an accelerator, where there is one."""
    if not torch.cuda.is_available():
        return
    streams = torch.cuda.streams

    def event_record(original: Any, event: Any, stream: Any = None) -> Any:
        if active() is not None:
            where = stream if stream is not None else torch.cuda.current_stream()
            last = _last.get(_name(where))
            if last is not None:
                _at_event[event] = last
        return original(event) if stream is None else original(event, stream)

    def event_wait(original: Any, event: Any, stream: Any = None) -> Any:
        recorder = active()
        last = _at_event.get(event)
        if recorder is not None and last is not None:
            where = stream if stream is not None else torch.cuda.current_stream()
            put(recorder, [last], _name(where))
        return original(event) if stream is None else original(event, stream)

    def event_synchronize(original: Any, event: Any) -> Any:
        recorder = active()
        if recorder is not None:
            _host_waits_for(recorder, _at_event.pop(event, None))
        return original(event)

    def stream_synchronize(original: Any, stream: Any) -> Any:
        recorder = active()
        if recorder is not None:
            _host_waits_for(recorder, _last.pop(_name(stream), None))
        return original(stream)

    def synchronize(original: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = active()
        if recorder is not None and _queued:
            _queued.clear()
            _last.clear()
            recorder.wait(None)
        return original(*args, **kwargs)

    patch(streams.Event, "record", event_record)
    patch(streams.Event, "wait", event_wait)
    patch(streams.Event, "synchronize", event_synchronize)
    patch(streams.Stream, "synchronize", stream_synchronize)
    patch(torch.cuda, "synchronize", synchronize)
    _watch_items(torch)


def _watch_items(torch: Any) -> None:
    """``.item()``, ``.tolist()``, ``bool(tensor)`` of an accelerator's tensor hold the host."""
    key = torch._C.DispatchKey.BackendSelect
    below = torch._C._dispatch_keyset_full_after(key)
    operator = torch.ops.aten._local_scalar_dense.default

    def item(keyset: Any, tensor: Any) -> Any:
        recorder = active()
        if recorder is not None and _last and tensor.device.type != "cpu":
            _host_waits_for(recorder, _last.pop(current_queue(tensor.device), None))
        return operator.redispatch(keyset & below, tensor)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_local_scalar_dense", item, "BackendSelect", with_keyset=True)
    _libraries.append(library)


_libraries: list[Any] = []
