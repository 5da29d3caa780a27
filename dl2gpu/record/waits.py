"""Waits: of handles, of futures, of the tensors of functional collectives, and of DDP.

A handle is known by the Python object that carries it, for as long as that lives; a functional
collective by the storage of its result. The reducer of DDP waits in C++ at the end of the backward
pass: a callback of the autograd engine that is queued before the reducer's own notes that wait, if
the reducer is going to wait at all (a gradient that did not come keeps it from it).

Source: torch/csrc/distributed/c10d/Functional.cpp (register_work), reducer.cpp
(mark_variable_ready, finalize_backward), torch/csrc/autograd/engine.cpp (exec_post_processing).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from dl2gpu.record import devices
from dl2gpu.record.patch import patch
from dl2gpu.record.recorder import Issued, Recorder
from dl2gpu.record.state import active, name_of, process, scope, scopes

__all__ = ["after_backward", "carried_by", "carries", "hold_host", "install"]

_issued: weakref.WeakKeyDictionary[Any, list[Issued]] = weakref.WeakKeyDictionary()
"""Of each handle and future that lives: what it stands for."""
_storages: dict[int, list[Issued]] = {}
"""Of each result of a functional collective that was not waited for, by its storage."""


def carries(tensor: Any, issued: list[Issued]) -> None:
    """A result that somebody will wait for."""
    if issued:
        try:
            _storages[tensor.untyped_storage()._cdata] = issued
        except _NO_STORAGE:
            return
        while len(_storages) > _MAX_STORAGES:  # results that nobody waits for
            _storages.pop(next(iter(_storages)))


_MAX_STORAGES: Final = 4096
_NO_STORAGE: Final = (AttributeError, RuntimeError, NotImplementedError)
"""What PyTorch raises of a tensor without one (meta and fake tensors, some subclasses).

There is then nothing by which a later wait could be told to be for it: it is not recorded as one.
"""


def carried_by(tensor: Any) -> list[Issued] | None:
    """What a result stands for, once: a second wait holds nobody."""
    if not _storages:
        return None
    try:
        return _storages.pop(tensor.untyped_storage()._cdata, None)
    except _NO_STORAGE:
        return None


@contextmanager
def hold_host(recorder: Recorder, issued: list[Issued] | None = None) -> Iterator[None]:
    """Around a call that waits: writes the wait before it, and takes a failure for the end."""
    if issued:
        _write_wait(recorder, issued)
    recorder.inside += 1
    try:
        yield
    except Exception as error:
        recorder.failed(error)
        raise
    finally:
        recorder.inside -= 1
        recorder.got_on()


def _write_wait(recorder: Recorder, issued: list[Issued]) -> None:
    try:
        if devices.host_waits(issued):
            recorder.wait(issued)
            return
        stream = devices.current_of(issued)
        if stream is not None:
            devices.put(recorder, issued, stream)
    except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
        recorder.give_up(error)


# --------------------------------------------------------------------------------------------------
# Handles and futures


def install(torch: Any) -> None:
    """Watches the calls that issue and wait, as far as this PyTorch has them."""
    c10d = torch._C._distributed_c10d
    for name in _ISSUE:
        patch(c10d.ProcessGroup, name, _issue)
    patch(c10d.ProcessGroup, "_start_coalescing", _start_batch)
    patch(c10d.ProcessGroup, "_end_coalescing", _end_batch)
    for name in ("wait", "synchronize", "block_current_stream"):
        patch(c10d.Work, name, _wait)
    patch(c10d.Work, "is_completed", _asked)
    for name in ("get_future", "get_future_result"):
        patch(c10d.Work, name, _derive)
    patch(torch._C.Future, "then", _derive)
    patch(torch._C.Future, "wait", _wait)
    patch(torch._C, "_collect_all", _collect)
    for owner, name in (
        (torch.distributed, "_broadcast_coalesced"),
        (torch.distributed, "_verify_params_across_processes"),
        (c10d.Reducer, "_rebuild_buckets"),
    ):
        patch(owner, name, _native)
    patch(c10d.Reducer, "prepare_for_backward", _prepare)
    patch(c10d.Reducer, "prepare_for_forward", _forward)


_ISSUE: Final = (
    "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "barrier", "broadcast",
    "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
    "scatter", "send",
)  # fmt: skip
"""Methods of a process group that give a handle, of all versions."""


def _issue(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if active() is None:
        return original(*args, **kwargs)
    with scope("python", _reduce_op(args, kwargs)) as here:
        work = original(*args, **kwargs)
    _track(work, here.issued)
    return work


def _reduce_op(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Of the options, or of an argument that is one; ``sum`` where nothing is said."""
    for value in (*args[1:], *kwargs.values()):
        given = getattr(value, "reduceOp", value)
        if hasattr(given, "op") or type(given).__name__ == "RedOpType":
            return name_of(given) or str(getattr(given, "name", "")).lower() or None
    return "sum"


def _track(handle: Any, issued: list[Issued]) -> None:
    if handle is not None and issued:
        try:
            _issued[handle] = issued
        except TypeError:  # a handle of another kind that cannot be referred to weakly
            return


def _wait(original: Callable[..., Any], handle: Any, *args: Any, **kwargs: Any) -> Any:
    recorder = active()
    issued = None if recorder is None else _issued.pop(handle, None)
    if recorder is None or not issued:
        return original(handle, *args, **kwargs)
    with hold_host(recorder, issued):
        out = original(handle, *args, **kwargs)
    _tell_sender(recorder, handle, issued)
    return out


def _tell_sender(recorder: Recorder, handle: Any, issued: list[Issued]) -> None:
    for one in issued:
        if one.peer_hole is not None:
            try:
                peer = int(handle._source_rank())
            except Exception:  # noqa: BLE001 - not every backend knows it
                return
            ranks = next((r for c, r in process.comms.values() if c == one.comm), ())
            recorder.matched(one, ranks[peer] if 0 <= peer < len(ranks) else peer)


def _asked(original: Callable[..., Any], handle: Any) -> Any:
    """A handle that was found to be complete is one that was waited for."""
    out = original(handle)
    recorder = active()
    if out and recorder is not None:
        issued = _issued.get(handle)
        if issued and all(i.stream is None for i in issued):
            recorder.wait(_issued.pop(handle))
    return out


def _derive(original: Callable[..., Any], handle: Any, *args: Any, **kwargs: Any) -> Any:
    """A future stands for what it was made from. In a backward pass DDP is who waits for it."""
    future = original(handle, *args, **kwargs)
    issued = _issued.get(handle) if active() is not None else None
    if issued:
        _track(future, issued)
        for one in issued:
            after_backward(one)
    return future


def _collect(original: Callable[..., Any], futures: Any, *args: Any, **kwargs: Any) -> Any:
    out = original(futures, *args, **kwargs)
    if active() is not None:
        _track(out, [i for future in futures for i in _issued.get(future, ())])
    return out


def _start_batch(original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
    recorder = active()
    if recorder is not None:
        number = recorder.new_group()
        if number is not None:
            scopes.batch[group.group_name] = number, []
    return original(group, *args, **kwargs)


def _end_batch(original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
    _, issued = scopes.batch.pop(group.group_name, (0, []))
    work = original(group, *args, **kwargs)
    if active() is not None:
        _track(work, issued)
    return work


def _native(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of C++ that waits for each operation that it issues."""
    recorder = active()
    if recorder is None:
        return original(*args, **kwargs)
    recorder.inside += 1
    try:
        with scope("native") as here:
            return original(*args, **kwargs)
    except Exception as error:
        if here.issued:
            recorder.failed(error)
        raise
    finally:
        recorder.inside -= 1
        recorder.got_on()


# --------------------------------------------------------------------------------------------------
# DDP


_pending: dict[int, list[Issued]] = {}
"""What the reducer has issued in a backward pass, by the number that the engine gave it."""
_reducers: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
"""When the gradients of a reducer had last come, before the pass that was prepared."""


def _prepare(original: Callable[..., Any], reducer: Any, *args: Any, **kwargs: Any) -> Any:
    if active() is not None:
        _reducers[reducer] = _times(reducer)
    return original(reducer, *args, **kwargs)


def _times(reducer: Any) -> list[int]:
    try:
        return list(reducer.get_backward_stats())
    except Exception:  # noqa: BLE001 - another version's: then all passes count as complete
        return []


def _forward(original: Callable[..., Any], reducer: Any, *args: Any, **kwargs: Any) -> Any:
    """Passes for which no callback could be queued are over by now."""
    recorder = active()
    if recorder is not None and _pending:
        for task in list(_pending):
            recorder.wait([i for i in _pending.pop(task, ()) if i.stream is None])
    return original(reducer, *args, **kwargs)


def after_backward(issued: Issued) -> None:
    """Issued with nobody in Python to wait for it: in a backward pass that is for a reducer."""
    import torch

    current = getattr(torch._C, "_current_graph_task_id", None)
    task = -1 if current is None else current()
    if task == -1:
        return
    known = _pending.get(task)
    if known is not None:
        if issued not in known:
            known.append(issued)
        return
    _pending[task] = [issued]
    try:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _reduced(task))
    except RuntimeError:  # not within the pass itself: see _forward
        return


def _reduced(task: int) -> None:
    issued = _pending.pop(task, None)
    recorder = active()
    if not issued or recorder is None:
        return
    try:
        waiting = [r for r, before in _reducers.items() if _complete(r, before)]
        for reducer in waiting:
            _reducers[reducer] = _times(reducer)
        if waiting or not _reducers:
            _write_wait(recorder, issued)
            _hold_reducer(recorder)
    except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
        recorder.give_up(error)


def _hold_reducer(recorder: Recorder) -> None:
    """Until the callback that comes after the reducer's own, which an error keeps from running."""
    import torch

    def go_on() -> None:
        recorder.inside -= 1
        recorder.reducing = False
        recorder.got_on()

    recorder.inside += 1
    recorder.reducing = True
    torch.autograd.Variable._execution_engine.queue_callback(go_on)


def _complete(reducer: Any, before: list[int]) -> bool:
    """Have all gradients of the pass come: only then does the reducer wait."""
    now = _times(reducer)
    return len(now) != len(before) or all(a != b for a, b in zip(now, before, strict=True))
