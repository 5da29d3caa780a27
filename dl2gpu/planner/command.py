"""What ``dl2gpu plan`` does, for the command line and for others."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dl2gpu.planner.links import Cluster
from dl2gpu.planner.model import ModelError, load

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["cluster_of", "run"]

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


def _number(text: str, suffix: str, what: str, example: str) -> float:
    """A number with a power of 1000, or of 1024 with an i: 300GBps, 80GiB, 312T."""
    match = re.fullmatch(rf"(\d{{1,12}}(?:\.\d{{1,6}})?) ?([KMGTP]?)(i?){suffix}", text)
    value = 0.0
    if match is not None:
        value = float(match[1]) * (1024 if match[3] else 1000) ** _UNITS[match[2]]
    if not value:
        raise ModelError(f"{what}: expected a number such as {example}, found {text!r}")
    return value


def cluster_of(
    devices: str, intra: str, inter: str, memory: str, flops: str, efficiency: float
) -> Cluster:
    """A cluster of the texts of the command line.

    Raises:
        ModelError: names the option, what was expected and what was found.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,3})", devices)
    if match is None or int(match[1]) * int(match[2]) > 1 << 16:
        raise ModelError(
            f"--devices: expected nodes x devices of a node, such as 8x4, at most 65536 devices in "
            f"all, found {devices!r}"
        )
    return Cluster(
        int(match[1]), int(match[2]),
        intra=_number(intra, "(?:Bps|B/s)", "--intra", "300GBps"),
        inter=_number(inter, "(?:Bps|B/s)", "--inter", "25GBps"),
        memory=_number(memory, "B?", "--memory", "80GiB"),
        flops=_number(flops, "(?:FLOPS|FLOP/s)?", "--flops", "312T"),
        efficiency=efficiency,
    )  # fmt: skip


def run(
    name: str, cluster: Cluster, batch: int | None = None, compare: bool = True,
    out: Path | None = None, picture: Path | None = None, trace: Path | None = None,
) -> tuple[RenderableType, bool]:  # fmt: skip
    """Searches, proves, writes what is asked for; the words, and whether the program is healthy.

    Raises:
        ModelError: the model is wrong, or nothing fits.
        ScheduleError: the schedule cannot be carried out.
        InputError, OSError: a file cannot be written.
    """
    from dl2gpu.planner import show
    from dl2gpu.planner.baselines import baselines
    from dl2gpu.planner.file import write_plan
    from dl2gpu.planner.plan import search
    from dl2gpu.planner.proof import prove

    model = load(name, batch)
    began = time.perf_counter()
    plan = search(model, cluster)
    elapsed = time.perf_counter() - began
    proof = prove(plan)
    others = baselines(model, cluster) if compare else {}
    if out is not None:
        write_plan(plan, out, proof, others)
    if picture is not None:
        from dl2gpu.trace.files import whole_file

        with whole_file(picture) as part:
            Path(part).write_text(show.picture(plan))
    if trace is not None:
        from dl2gpu.trace.native_write import write_jsonl

        write_jsonl(proof.trace, trace)
    return show.summary(plan, proof, others, elapsed), proof.healthy
