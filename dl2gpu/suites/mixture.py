"""Which jobs a fleet has: sizes by a power law, layouts, and faults by their share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import polars as pl

from dl2gpu.suites.program import DATA, TENSOR, WORLD, Fault, Shape, template
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.schema import OP

__all__ = ["FAULTS", "LABELS", "MIXTURE", "Job", "label", "plan"]

FAULTS: Final[Mapping[str, tuple[str, bool | None]]] = {
    "healthy": ("healthy", False),
    "skip": ("missing_participant", True),  # a rank leaves a collective out
    "order": ("order_inversion", True),  # half of a group enters two collectives in another order
    "size": ("mismatch", True),  # a rank passes in another number of elements
    "message": ("unmatched_p2p", True),  # a batch of a pipeline stage lacks a send
    "crash": ("crashed_rank", False),  # a rank dies
    "stall": ("stalled_rank", False),  # a rank is busy outside communication
    "lost": ("insufficient_evidence", None),  # a rank has left no record
}
"""What can be wrong with a job, the verdict it has to get, and whether it is deadlocked."""

MIXTURE: Final[Mapping[str, float]] = {
    "skip": 0.015, "order": 0.01, "size": 0.01, "message": 0.01, "crash": 0.03, "stall": 0.015,
    "lost": 0.01,
}  # fmt: skip
"""Share of the jobs with each fault; the rest is healthy."""

LABELS: Final[dict[str, pl.DataType]] = {
    "job": pl.String(),
    "fault": pl.String(),  # key of FAULTS
    "verdict": pl.String(),
    "deadlocked": pl.Boolean(),
    "culprits": pl.List(pl.Int32()),  # [] where the record convicts nobody
    "ranks": pl.Int32(),
    "tensor": pl.Int32(),
    "data": pl.Int32(),
    "pipeline": pl.Int32(),
    "rank": pl.Int32(),  # the rank at fault, null in a healthy job
    "step": pl.Int32(),
    "events": pl.Int64(),
}
"""Columns of ``labels.parquet``."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of a fleet, before it is made."""

    name: str
    shape: Shape
    fault: Fault


def plan(
    jobs: int,
    events: int,
    seed: int = 0,
    *,
    ranks: tuple[int, int] = (8, 4096),
    mixture: Mapping[str, float] = MIXTURE,
    exponent: float = 1.6,
) -> Iterator[Job]:
    """The jobs of a fleet.

    Args:
        jobs: how many.
        events: operations of all of them, about. Each rank has two steps at least, so that a fleet
            of many large jobs may have more.
        seed: the same one gives the same fleet.
        ranks: least and most ranks of a job, powers of two, 8 or more. Sizes follow a power law.
        mixture: share of the jobs with each fault, of :data:`FAULTS`.
        exponent: of the power law: the density of sizes falls as ``ranks ** -exponent``.

    Raises:
        InputError: a number is out of range, or a fault is not known.
    """
    _check(jobs, events, ranks, mixture)
    rng = np.random.default_rng(seed)
    sizes = 1 << np.arange(ranks[0].bit_length() - 1, ranks[1].bit_length())
    weight = sizes.astype(float) ** (1 - exponent)
    size = rng.choice(sizes, jobs, p=weight / weight.sum())
    names = sorted(mixture)
    shares = np.array([mixture[n] for n in names])
    fault = rng.choice([*names, "healthy"], jobs, p=[*shares, max(0.0, 1 - shares.sum())])
    a_rank = events / max(1, int(size.sum()))
    width = len(str(jobs - 1))
    for number in range(jobs):
        name = str(fault[number])
        shape = _shape(rng, int(size[number]), name, a_rank)
        yield Job(f"job_{number:0{width}}", shape, _fault(rng, shape, name))


def _check(jobs: int, events: int, ranks: tuple[int, int], mixture: Mapping[str, float]) -> None:
    if jobs < 1 or events < 1:
        raise InputError(f"expected one job and one event or more, found {jobs} and {events}")
    low, high = ranks
    if not 8 <= low <= high <= 1 << 20 or low & (low - 1) or high & (high - 1):
        raise InputError(
            f"ranks: expected two powers of two from 8 to {1 << 20}, the lower first; "
            f"found {low} and {high}"
        )
    unknown = sorted(set(mixture) - set(FAULTS))
    if unknown:
        raise InputError(f"fault: expected {', '.join(FAULTS)}; found {unknown[0]!r}")
    if any(share < 0 for share in mixture.values()) or sum(mixture.values()) > 1 + 1e-9:
        raise InputError("mixture: expected shares of 0 or more that add up to 1 at most")


def _shape(rng: np.random.Generator, ranks: int, fault: str, a_rank: float) -> Shape:
    """A layout for so many ranks in which the fault can be made."""
    tensor = min(int(rng.choice([1, 2, 4, 8])), ranks // 4)
    most = ranks // tensor // 4
    pipeline = min(int(rng.choice([1, 2, 4, 8])), most)
    if fault == "message":
        tensor, pipeline = min(tensor, ranks // 8), max(2, min(4, pipeline))
    pipeline = max(1, pipeline)
    data = ranks // (tensor * pipeline)
    small = a_rank < 80
    layers = 1 if small else int(rng.integers(1, 4))
    buckets = 1 if small else int(rng.integers(1, 5))
    many = 1 if small else pipeline + int(rng.integers(0, 3))
    if fault == "message":
        many = max(many, pipeline + 1)
    shape = Shape(tensor, data, pipeline, layers, many, buckets, 0)
    length = np.mean([len(template(shape, stage).op) for stage in range(pipeline)])
    return replace(shape, steps=max(2, round(a_rank / float(length))))


def _fault(rng: np.random.Generator, shape: Shape, name: str) -> Fault:
    """Where a fault of this name is made; the job's last step stands for the one that hung."""
    if name == "healthy":
        return Fault(name)
    rank = int(rng.integers(shape.ranks))
    if name == "message":  # whoever has a stage after it
        rank = int(rng.integers(shape.ranks - shape.plane))
    steps = template(replace(shape, steps=0), rank // shape.plane)
    norm, loss = np.flatnonzero(steps.kind == WORLD)
    # of two or three members nobody could say which one is wrong
    wide = np.array([shape.tensor >= 4, shape.data >= 4, True, False, False])[steps.kind]
    if name == "order":
        places = np.array([norm - 1])
    elif name == "message":
        batched = (steps.op == OP["send"]) & (steps.towards == 1) & (steps.batch >= 0)
        # ... with a receive from the same stage
        answer = np.append((steps.towards == 1)[1:] & (steps.batch[1:] == steps.batch[:-1]), False)
        places = np.flatnonzero(batched & answer)
    elif name == "size":
        places = np.flatnonzero(wide)
    elif name == "skip":
        # what comes after it on its communicator must be the same, or it would be a mismatch
        for kind in (TENSOR, DATA):
            own = np.flatnonzero(steps.kind == kind)
            if len(own):
                alike = steps.op[own] == steps.op[own[-1]]
                alike &= steps.count[own] == steps.count[own[-1]]
                wide[own] &= np.logical_and.accumulate(alike[::-1])[::-1]
        wide[loss] = False  # whoever leaves out the last collective has passed the step
        places = np.flatnonzero(wide)
    else:
        places = np.arange(len(steps.op) - 1)
    return Fault(name, rank, shape.steps - 1, int(rng.choice(places)))


def label(job: Job, events: int) -> dict[str, Any]:
    """The row of :data:`LABELS` of a job that has so many operations."""
    verdict, deadlocked = FAULTS[job.fault.name]
    healthy = job.fault.name == "healthy"
    culprits: list[int] = []
    if job.fault.name == "order":  # both halves: nobody could say which one is wrong
        shape, rank = job.shape, job.fault.rank
        t, p = rank % shape.tensor, rank // shape.plane
        culprits = list(range(p * shape.plane + t, (p + 1) * shape.plane, shape.tensor))
    elif job.fault.name == "message":  # the receive that nobody answers
        culprits = [job.fault.rank + job.shape.plane]
    elif not healthy and job.fault.name != "lost":
        culprits = [job.fault.rank]
    return {
        "job": job.name, "fault": job.fault.name, "verdict": verdict, "deadlocked": deadlocked,
        "culprits": culprits,
        "ranks": job.shape.ranks, "tensor": job.shape.tensor, "data": job.shape.data,
        "pipeline": job.shape.pipeline, "rank": None if healthy else job.fault.rank,
        "step": None if healthy else job.fault.step, "events": events,
    }  # fmt: skip
