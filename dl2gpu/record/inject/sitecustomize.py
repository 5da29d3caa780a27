"""Runs at the start of every Python process below ``dl2gpu record``.

Its folder stands first in PYTHONPATH. It waits until the process imports torch.distributed (most
never do) and then has the recorder watch it. A ``sitecustomize`` of the environment that this one
hides is run as well.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib costs time here
_MODULE = "torch.distributed.distributed_c10d"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds PyTorch's module as the others do, and adds a step after it is loaded."""

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_watch(module: Any) -> None:
            load(module)
            _watch(module)

        setattr(spec.loader, "exec_module", load_and_watch)  # noqa: B010 - a method of one object
        return spec


def _watch(module: Any) -> None:
    try:
        try:
            import dl2gpu.record
        except ImportError:  # the program runs in another environment than dl2gpu
            sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))  # noqa: PTH120
            import dl2gpu.record
        settings = dl2gpu.record.Settings.of_environment()
        if settings is not None:
            dl2gpu.record.begin(settings, module)
    except Exception as error:  # noqa: BLE001 - the program goes on without a record
        sys.stderr.write(f"dl2gpu record: nothing is recorded: {error}\n")


def _run_the_hidden_one() -> None:
    elsewhere = [p for p in sys.path if os.path.abspath(p or ".") != _HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        hidden = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = hidden
        spec.loader.exec_module(hidden)


if os.environ.get("DL2GPU_RECORD"):
    sys.meta_path.insert(0, _Finder())
_run_the_hidden_one()
