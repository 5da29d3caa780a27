"""Sees every operation of c10d once, whoever calls it and on whatever device.

Each method of a process group goes through PyTorch's dispatcher as an operator ``c10d::...``: from
Python, from functional collectives, and from C++ (the reducer of DDP). A kernel for the dispatch
key ``BackendSelect``, which is part of every call and has none of its own here, notes the operation
and hands on to the kernel of the device. That takes no library by the name of a backend, and no
version's list of wrappers.

Functional collectives (``_c10d_functional::...``) are seen the same way, only to know which tensor
carries which operation: a wait names the tensor.

Source: torch/csrc/distributed/c10d/Ops.cpp and Functional.cpp (schemas of 2.4 to 2.13).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dl2gpu.record.devices import queue_of
from dl2gpu.record.groups import communicator
from dl2gpu.record.recorder import Issued, Recorder, broke, warn_once
from dl2gpu.record.state import Scope, active, scope, scopes
from dl2gpu.record.waits import after_backward, carried_by, carries, hold_host

__all__ = ["install"]

_libraries: list[Any] = []
"""Kept for as long as the process lives: the kernels go with them."""


def install(torch: Any) -> bool:
    """Registers the kernels, once. False where this PyTorch has not what it takes."""
    if _libraries:
        return True
    key = torch._C.DispatchKey.BackendSelect
    below = torch._C._dispatch_keyset_full_after(key)
    if "with_keyset" not in inspect.signature(torch.library.Library.impl).parameters:
        warn_once("this PyTorch has no kernels that hand on (from 2.4 on): nothing is recorded")
        return False
    for namespace, make in (("c10d", _kernel), ("_c10d_functional", _functional_kernel)):
        library = torch.library.Library(namespace, "IMPL")
        operators = getattr(torch.ops, namespace)
        for full in torch._C._dispatch_get_all_op_names():
            space, _, name = full.partition("::")
            if space != namespace or "." in name or name in _NO_COMMUNICATION:
                continue
            kernel = make(getattr(operators, name).default, name, below)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
        _libraries.append(library)
    return True


_NO_COMMUNICATION: Final = {"check_for_nan"}


def _kernel(operator: Any, name: str, below: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]
    entry = _OPS.get(name) or _Op(name.strip("_"))

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = active()
        if recorder is None or scopes.quiet:
            return operator.redispatch(keyset & below, *args, **kwargs)
        issued = _note(recorder, entry, dict(zip(names, args, strict=False)) | kwargs)
        try:
            if issued is None or not entry.holds_host:
                return operator.redispatch(keyset & below, *args, **kwargs)
            with hold_host(recorder):
                return operator.redispatch(keyset & below, *args, **kwargs)
        except Exception as error:
            if broke(error):
                recorder.failed(error)
            raise

    return kernel


def _functional_kernel(operator: Any, name: str, below: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]

    def wait(keyset: Any, tensor: Any) -> Any:
        recorder = active()
        issued = None if recorder is None else carried_by(tensor)
        if recorder is None or not issued:
            return operator.redispatch(keyset & below, tensor)
        with hold_host(recorder, issued):
            return operator.redispatch(keyset & below, tensor)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if active() is None:
            return operator.redispatch(keyset & below, *args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        with scope("functional", str(given.get("reduce_op") or "") or None) as here:
            out = operator.redispatch(keyset & below, *args, **kwargs)
        for tensor in out if isinstance(out, list | tuple) else (out,):
            carries(tensor, here.issued)
        return out

    return wait if name == "wait_tensor" else kernel


# --------------------------------------------------------------------------------------------------
# What an operator says of itself


def _tensors(value: Any) -> Iterator[Any]:
    """All tensors of an argument, in order, however deep they lie."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif value is not None:
        yield value


@dataclass(frozen=True)
class _Op:
    """How an operator of c10d is written down."""

    name: str
    """Of the operation; ``_v`` is added where members have different shares."""
    passes: str | None = None
    """Argument with the tensors that this rank passes in."""
    gets: str | None = None
    """Argument with those that it gets, where they differ."""
    root: str | None = None
    peer: str | None = None
    holds_host: bool = False
    """Does the call itself wait."""

    def fields(self, given: dict[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        passed = list(_tensors(given.get(self.passes or "")))
        got = list(_tensors(given.get(self.gets or "")))
        taken = sum(t.numel() for t in got)
        if passed or got:
            out["dtype"] = str((passed or got)[0].dtype).removeprefix("torch.")
        if passed:
            out["count"] = sum(t.numel() for t in passed)
            out["bytes"] = out["count"] * passed[0].element_size()
        if got and taken != out.get("count"):
            out["count_out"] = taken
        if self.root is not None:
            out["root"] = _global(ranks, given.get(self.root))
        if self.peer is not None:
            out["peer"] = _global(ranks, given.get(self.peer))
        if "tag" in given:
            out["tag"] = given["tag"]
        return out


def _global(ranks: Sequence[int], rank: Any) -> int | None:
    """Global rank of a rank of the group."""
    if not isinstance(rank, int) or rank < 0:
        return None
    return ranks[rank] if rank < len(ranks) else rank


def _uneven(shares: Sequence[int]) -> bool:
    return len(set(shares)) > 1


_OPS: Final[dict[str, _Op]] = {
    "send": _Op("send", "tensors", peer="dst"),
    "recv_": _Op("recv", "tensors", peer="src"),
    "recv_any_source_": _Op("recv", "tensors"),
    "broadcast_": _Op("broadcast", "tensors", root="root_rank"),
    "allreduce_": _Op("all_reduce", "tensors"),
    "allreduce_coalesced_": _Op("all_reduce", "tensors"),
    "reduce_": _Op("reduce", "tensors", root="root_rank"),
    "allgather_": _Op("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": _Op("all_gather", "input_tensor", "output_tensor"),
    "allgather_coalesced_": _Op("all_gather", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": _Op("all_gather", "inputs", "outputs"),
    "reduce_scatter_": _Op("reduce_scatter", "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": _Op("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": _Op("reduce_scatter", "inputs", "outputs"),
    "alltoall_base_": _Op("all_to_all", "input", "output"),
    "alltoall_": _Op("all_to_all", "input_tensors", "output_tensors"),
    "gather_": _Op("gather", "input_tensors", "output_tensors", root="root_rank"),
    "scatter_": _Op("scatter", "input_tensors", "output_tensors", root="root_rank"),
    "barrier": _Op("barrier"),
    "monitored_barrier_": _Op("monitored_barrier", holds_host=True),
}


def _shares(name: str, given: dict[str, Any]) -> tuple[list[int], bool]:
    """(elements passed to each member, may the shares of the members differ) of an operator.

    An exchange of lists, or with sizes given, may be uneven on another rank when it is even here.
    """
    if name == "alltoall_base_":
        rows = list(given.get("input_split_sizes") or ())
        tensor = given["input"]
        width = tensor.numel() // max(tensor.shape[0], 1) if tensor.dim() else 1
        sent = [row * width for row in rows]
        return sent, bool(rows) or bool(given.get("output_split_sizes"))
    if name == "alltoall_":
        return [t.numel() for t in given["input_tensors"]], True
    if name == "allgather_":
        got = [t.numel() for outputs in given["output_tensors"] for t in outputs]
        return [], _uneven(got)
    if name == "reduce_scatter_":
        return [], _uneven([t.numel() for inputs in given["input_tensors"] for t in inputs])
    return [], False


_NAME: Final = {id(entry): name for name, entry in _OPS.items()}


def _note(recorder: Recorder, entry: _Op, given: dict[str, Any]) -> Issued | None:
    """Writes an operator's line, and says to whoever asks that it was issued."""
    try:
        return _noted(recorder, entry, given)
    except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
        recorder.give_up(error)
        return None


def _noted(recorder: Recorder, entry: _Op, given: dict[str, Any]) -> Issued | None:
    found = communicator(recorder, given.get("process_group"))
    if found is None:
        return None
    comm, ranks, group = found
    name = entry.name
    fields = entry.fields(given, ranks)
    operator = _NAME.get(id(entry), "")
    splits, uneven = _shares(operator, given)
    if uneven:
        name += "_v"
        if splits:
            fields["splits"] = splits
    if operator == "recv_any_source_":
        fields["peer"] = "any"
    inner = scopes.stack[-1] if scopes.stack else None
    if "reduce_op" in given:
        # only Python says which; what C++ calls by itself is the reducer of DDP, which sums
        fields["reduce_op"] = "sum" if inner is None else inner.reduce_op
    batch = scopes.batch.get(group)
    tensor = next((t for t in _tensors(list(given.values())) if hasattr(t, "device")), None)
    stream, current = queue_of(
        tensor, comm, entry.peer and fields.get("peer"), recorder.rank, given
    )
    native = inner is not None and inner.kind == "native"
    issued = recorder.op(
        name,
        comm,
        stream=stream,
        blocking=stream is None and (native or entry.holds_host),
        host_waits=entry.name == "barrier",
        any_source=fields.get("peer") == "any",
        group=batch[0] if batch else None,
        **fields,
    )
    if issued is None:
        return None
    if native and stream is not None:
        recorder.wait([issued], current)
    if batch:
        batch[1].append(issued)
    _tell(inner, issued)
    return issued


def _tell(inner: Scope | None, issued: Issued) -> None:
    if inner is None:
        after_backward(issued)
    for outer in scopes.stack:
        outer.issued.append(issued)
