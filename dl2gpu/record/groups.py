"""Process groups: when the recording begins, which communicators there are, and how they are made.

Making a group is a collective of its own: ``new_group`` has to be called by every rank, in the same
order, members or not. Only members wait in it, and only where the library connects them at once.

Source: torch/distributed/distributed_c10d.py (init_process_group, _new_group_with_tag,
split_group).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from dl2gpu.record.patch import patch
from dl2gpu.record.recorder import Recorder, warn_once
from dl2gpu.record.state import active, process, scopes
from dl2gpu.record.waits import hold_host

__all__ = ["begin", "communicator", "install", "watch_init"]

Comm = tuple[str, tuple[int, ...], str]
"""Id of a communicator, its members' global ranks, PyTorch's name of the group."""


def communicator(recorder: Recorder, boxed: Any) -> Comm | None:
    """Of the process group of an operator's argument; its line is written at the first sight."""
    import torch

    if boxed is None:
        return None
    kind: Any = torch._C._distributed_c10d.ProcessGroup
    group = boxed if isinstance(boxed, kind) else kind.unbox(boxed)
    name = str(group.group_name)
    known = process.comms.get(name)
    if known is None:
        known = _declare(recorder, group, name)
    return None if known is None else (*known, name)


def _declare(
    recorder: Recorder, group: Any, name: str, kind: str = ""
) -> tuple[str, tuple[int, ...]] | None:
    ranks = _members(group)
    comm = recorder.declare(ranks, kind, name=name, desc=_description(group))
    if comm is None:
        return None
    process.comms[name] = comm, tuple(ranks)
    return process.comms[name]


def _members(group: Any) -> list[int]:
    import torch.distributed as dist

    try:
        return list(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # made behind the back of torch.distributed
        return list(range(group.size()))


def _description(group: Any) -> str | None:
    text = str(getattr(group, "group_desc", "") or "")
    return None if text in ("", "undefined", "default_pg") else text


# --------------------------------------------------------------------------------------------------
# The beginning


def watch_init(c10d: Any, begins: Callable[[], None]) -> None:
    """Calls ``begins`` once the default group stands; all else is set up then.

    ``c10d`` is the module torch.distributed.distributed_c10d, or one that has its names.
    """

    def init(original: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        begins()
        return out

    patch(c10d, "init_process_group", init)


def begin(torch: Any) -> None:
    """Starts the record of this rank, or goes on with it in a new default group."""
    dist = torch.distributed
    settings = process.settings
    if settings is None or not dist.is_initialized():
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.distributed_c10d._get_default_group()
    old = process.recorder
    goes_on = (
        old is not None
        and old.pid == os.getpid()
        and old.recording
        and (old.rank, old.world_size) == (rank, size)
    )
    process.comms.clear()
    if not goes_on:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if old is not None and old.pid == os.getpid():
            attempt = old.attempt + 1
        process.recorder = Recorder(
            settings.folder, rank, size, _backend(torch, world), settings.job, attempt
        )
    assert process.recorder is not None
    _declare(process.recorder, world, str(world.group_name))


def _backend(torch: Any, group: Any) -> str:
    """Library of the accelerator where there is one, else that of the host."""
    config = str(torch.distributed.get_backend_config(group))
    pairs = dict(part.partition(":")[::2] for part in config.split(",") if ":" in part)
    if torch.cuda.is_available() and "cuda" in pairs:
        return str(pairs["cuda"])
    if "cpu" in pairs:
        return str(pairs["cpu"])
    return str(next(iter(pairs.values()), config)) or "gloo"


# --------------------------------------------------------------------------------------------------
# Groups that are made later


def install(torch: Any) -> None:
    """Watches the making of groups."""
    c10d = torch.distributed.distributed_c10d
    patch(c10d, "_new_group_with_tag", _new_group)
    for module in (c10d, torch.distributed):
        patch(module, "split_group", _split_group)


def _new_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    recorder = active()
    if recorder is None or scopes.quiet:
        return original(*args, **kwargs)
    try:
        told = _tell_new_group(recorder, args, kwargs)
    except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
        recorder.give_up(error)
        return original(*args, **kwargs)
    scopes.quiet += 1
    try:
        if told is None:
            return original(*args, **kwargs)
        with hold_host(recorder):
            group = original(*args, **kwargs)
    finally:
        scopes.quiet -= 1
    _remember(recorder, group, *told)
    return group


def _tell_new_group(
    recorder: Recorder, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[str, tuple[int, ...]] | None:
    """Writes the making of a group; gives its id and members. None where this rank has no part."""
    import torch.distributed as dist

    ranks = args[0] if args else kwargs.get("ranks")
    members = list(range(recorder.world_size)) if ranks is None else [int(r) for r in ranks]
    if kwargs.get("sort_ranks", True):
        members = sorted(members)
    local = bool(kwargs.get("use_local_synchronization", args[5] if len(args) > 5 else False))
    member = recorder.rank in members
    if local and not member:
        return None
    # those that call by themselves count by themselves
    kind = "local" if local else ""
    over = recorder.declare(members, "making") if local else _world(dist)
    made = recorder.declare(members, kind, desc=kwargs.get("group_desc"))
    if over is None or made is None:
        return None
    recorder.op("comm_create", over, blocking=member and _connects(dist, kwargs), new_comm=made)
    return made, tuple(members)


def _world(dist: Any) -> str | None:
    known = process.comms.get(str(dist.distributed_c10d._get_default_group().group_name))
    return known[0] if known else None


def _connects(dist: Any, kwargs: dict[str, Any]) -> bool:
    """Do members wait for each other when a group is made: NCCL connects at the first use."""
    if os.environ.get("TORCH_DIST_INIT_BARRIER") == "1":
        return True
    world = dist.distributed_c10d._get_default_group()
    backend = str(kwargs.get("backend") or dist.get_backend(world)).lower()
    bound = kwargs.get("device_id") or getattr(world, "bound_device_id", None)
    return "nccl" not in backend or bound is not None


def _remember(recorder: Recorder, group: Any, comm: str, ranks: tuple[int, ...]) -> None:
    """PyTorch's name of a new group, by which its operations will be known."""
    if hasattr(group, "group_name"):
        process.comms[str(group.group_name)] = comm, ranks
    else:  # not a member
        recorder.got_on()


def _split_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    recorder = active()
    if recorder is None or scopes.quiet:
        return original(*args, **kwargs)
    told = None
    try:
        import torch.distributed as dist

        parent = args[0] if args else kwargs.get("parent_pg")
        parts = args[1] if len(args) > 1 else kwargs.get("split_ranks")
        parent = parent or dist.distributed_c10d._get_default_group()
        found = communicator(recorder, parent)
        if found is not None and parts:
            comm, ranks, _ = found
            mine = ranks.index(recorder.rank)
            part = next(([ranks[i] for i in part] for part in parts if mine in part), None)
            made = recorder.declare(part, "split") if part else None
            recorder.op("comm_create", comm, blocking=True, new_comm=made, split=True)
            told = (made, tuple(part)) if made and part else None
    except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
        recorder.give_up(error)
    scopes.quiet += 1
    try:
        with hold_host(recorder):
            group = original(*args, **kwargs)
    finally:
        scopes.quiet -= 1
    if told is not None:
        _remember(recorder, group, *told)
    return group


def warn_without_group() -> None:
    """Said where recording was asked for and nothing was there to record."""
    warn_once("torch.distributed was not used: nothing was recorded")
