"""Small traces made by hand: what each rank issued, and how its record ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl
from programs import Op, Program, trace_of

from dl2gpu.analysis import Analysis, analyse
from dl2gpu.trace.schema import EXIT, STACKS, STATUS, Trace, conform, empty, validate

NS = 1_000_000_000
START = 1_760_000_000 * NS


def op(name: str, comm: str | None = "w", **keys: Any) -> Op:
    """An operation on the host that blocks; ``site`` is its call site, "function file:line"."""
    return {"op": name, "comm": comm} | keys


def send(peer: int | str, **keys: Any) -> Op:
    return op("send", **({"peer": peer, "count": 4, "dtype": "f32"} | keys))


def recv(peer: int | str, **keys: Any) -> Op:
    return op("recv", **({"peer": peer, "count": 4, "dtype": "f32"} | keys))


def wait(*requests: int, **keys: Any) -> Op:
    """A wait for these requests, or for everything."""
    return {"op": "wait", "requests": list(requests) or "all"} | keys


def made(
    *ranks: Sequence[Op],
    comms: Mapping[str, list[int]] | None = None,
    backend: str = "nccl",
    world: int | None = None,
    exits: str | Mapping[int, str] = "finished",
    name: str = "job",
    **tables: Any,
) -> Trace:
    """One job. ``w`` is the communicator of all unless ``comms`` has one of that name.

    Args:
        ranks: operations of rank 0, 1, ...
        comms: communicators by id. backend: as in the jobs table. world: number of ranks.
        exits: how the records end, of all ranks or by rank (others: finished).
        name: of the job.
        tables: ``rank_facts`` {rank: {column: value}}, ``job_facts`` {column: value}, ``status``
            [(rank, comm, enqueued, started, completed)], ``absent`` ranks that left no record.
    """
    sites: dict[str, int] = {}
    ops = {}
    for rank, given in enumerate(ranks):
        ops[rank] = [dict(o) for o in given]
        for o in ops[rank]:
            if "site" in o:
                o["stack"] = sites.setdefault(o.pop("site"), len(sites))
    size = world or len(ranks)
    everyone = {"w": list(range(size))} | dict(comms or {})
    absent = set(tables.pop("absent", ()))
    program = Program(
        {r: o for r, o in ops.items() if r not in absent}, everyone, backend, size, name
    )
    trace = trace_of(program)
    of = {r: exits if isinstance(exits, str) else exits.get(r, "finished") for r in range(size)}
    facts = tables.pop("rank_facts", {})
    rows = [
        row | {"exit": EXIT[of[row["rank"]]]} | facts.get(row["rank"], {})
        for row in trace.ranks.to_dicts()
        if row["rank"] not in absent
    ]
    job = trace.jobs.row(0, named=True) | tables.pop("job_facts", {})
    codes = dict(zip(everyone, range(len(everyone)), strict=True))
    status = [
        dict(zip(STATUS, (0, rank, codes[comm], *numbers), strict=True))
        for rank, comm, *numbers in tables.pop("status", ())
    ]
    assert not tables, f"unknown: {sorted(tables)}"
    trace = replace(
        trace,
        ranks=conform(pl.DataFrame(rows, infer_schema_length=None), "ranks"),
        jobs=conform(pl.DataFrame([job]), "jobs"),
        status=pl.DataFrame(status, schema=STATUS) if status else empty("status"),
        stacks=pl.DataFrame(
            {"stack": list(sites.values()), "frames": [[s] for s in sites]}, schema=STACKS
        ),
    )
    return validate(trace)


def recorded(ops: Sequence[Op], completed: int, *, start: int = START, step: int = NS) -> list[Op]:
    """The operations as a flight recorder has them: the first ``completed`` are complete.

    One is issued each second, and completes half a second later.
    """
    out = []
    for k, o in enumerate(ops):
        t = start + k * step
        done = k < completed
        out.append(
            o
            | {"state": "completed" if done else "scheduled", "t_created": t}
            | ({"t_completed": t + step // 2} if done else {})
        )
    return out


def findings(trace: Trace) -> list[dict[str, Any]]:
    return analyse(trace).findings


def only(trace: Trace) -> dict[str, Any]:
    """The finding of a trace that has one."""
    result = analyse(trace)
    assert len(result.findings) == 1, [(f["kind"], f["culprits"]) for f in result.findings]
    assert result.jobs["verdict"].to_list() == [result.findings[0]["kind"]]
    return result.findings[0]


def deadlocked(trace: Trace) -> bool | None:
    said: bool | None = analyse(trace).jobs["deadlocked"][0]
    return said


def healthy(trace: Trace) -> bool:
    """Nothing found, and the job is said to be able to finish."""
    result: Analysis = analyse(trace)
    return not result.findings and result.jobs.select("verdict", "deadlocked").rows() == [
        ("healthy", False)
    ]
