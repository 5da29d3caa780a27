"""Many scenarios of many jobs, beside a plain loop of single replays.

    python benchmarks/whatif.py [--jobs 1000] [--ranks 64] [--operations 2000] [--scenarios 64]
                                [--program pipeline]

Jobs are replayed in shards of so many events as fit the memory, so that all of them can be counted
without all of them being held. Events a second are events of all jobs times scenarios over the time
that their replay takes; writing the jobs down and matching them is not counted. Scenarios of a job
go in lock step: "steps" says how often an event was issued, started or completed in however many
scenarios at once (alone: three times in each), so that it can be seen how much they shared. Nothing
is inferred: each scenario has its own fixpoint, that of the plain loop, which is checked.

``--program pipeline``: micro-batches from rank to rank and back. ``--program uneven``: messages in
bursts of up to eight between changing pairs of ranks, which get there after work of different
lengths, so that scenarios with other buffers seldom stand at the same place.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace

import numpy as np
import polars as pl

from dl2gpu.analysis import choice_kernel as ck
from dl2gpu.analysis.launch import batch_of, launch_in_lockstep
from dl2gpu.analysis.matching import match
from dl2gpu.analysis.outcomes import outcomes
from dl2gpu.analysis.replay import Program, build, layout, run
from dl2gpu.analysis.rewrite import copies
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.engine.cores import cores
from dl2gpu.trace.schema import EVENTS, OP, Trace, conform, empty


def pipeline(ranks: int, operations: int) -> Trace:
    """One job: micro-batches go from rank to rank and back.

    ``operations`` of each rank: sends and receives, the middle ranks four a micro-batch.
    """
    of_rank: list[list[tuple[str, int | None, int]]] = []
    for rank in range(ranks):
        mine: list[tuple[str, int | None, int]] = []
        steps = 0
        while len(mine) < operations:
            steps += 1
            ops: list[tuple[str, int | None]] = []
            if rank:
                ops.append(("recv", rank - 1))
            if rank < ranks - 1:
                ops += [("send", rank + 1), ("recv", rank + 1)]
            if rank:
                ops.append(("send", rank - 1))
            while len(ops) < 4:
                ops.append(("all_reduce", None))  # of this rank alone
            mine += [(op, peer, 4096 * (1 + steps % 3)) for op, peer in ops]
        of_rank.append(mine[:operations])
    return _written(of_rank)


def uneven(ranks: int, operations: int) -> Trace:
    """One job: bursts of messages between pairs that change, after work of different lengths.

    Some ``operations`` of each rank: it ends with a whole step.
    """
    rng = np.random.default_rng(0)
    of_rank: list[list[tuple[str, int | None, int]]] = [[] for _ in range(ranks)]
    while max(map(len, of_rank)) < operations:
        order = rng.permutation(ranks).tolist()
        for a, b in zip(order[::2], order[1::2], strict=False):
            of_rank[b] += [("all_reduce", None, 4096)] * int(rng.integers(13))
            for size in rng.choice([1024, 4096, 16384], int(rng.integers(1, 9))).tolist():
                of_rank[a].append(("send", b, size))
                of_rank[b].append(("recv", a, size))
    return _written(of_rank)


PROGRAMS = {"pipeline": pipeline, "uneven": uneven}


def _written(of_rank: list[list[tuple[str, int | None, int]]]) -> Trace:
    """A job as a trace: (operation, peer, bytes) of each rank; collectives are of one rank."""
    ranks = len(of_rank)
    rows = [
        {
            "job": 0, "rank": rank, "lane": 0, "seq": seq, "op": OP[op], "peer": peer,
            "comm": 1 + rank if peer is None else 0, "count": size // 4, "dtype": 10,
            "bytes": size, "blocking": True, "state": 0, "flags": 0,
        }
        for rank, ops in enumerate(of_rank)
        for seq, (op, peer, size) in enumerate(ops)
    ]  # fmt: skip
    comms = [{"comm": 0, "job": 0, "id": "all", "ranks": list(range(ranks))}]
    comms += [{"comm": 1 + r, "job": 0, "id": f"alone {r}", "ranks": [r]} for r in range(ranks)]
    return Trace(
        events=pl.DataFrame(
            {c: [row.get(c) for row in rows] for c in EVENTS}, schema=EVENTS, strict=False
        ),
        jobs=conform(pl.DataFrame([{
            "job": 0, "name": "job", "folder": "job", "attempt": 0, "world_size": ranks,
            "backend": "nccl", "source": "native", "waits": True, "p2p": True,
        }]), "jobs"),
        ranks=conform(pl.DataFrame([
            {"job": 0, "rank": r, "exit": 1, "truncated": False, "lost_before": 0,
             "only_active": False} for r in range(ranks)
        ]), "ranks"),
        comms=conform(pl.DataFrame(comms), "comms"),
        strings=empty("strings"), stacks=empty("stacks"), status=empty("status"),
    )  # fmt: skip


def scenarios(many: int) -> list[Scenario]:
    """Rendezvous, eager thresholds, and channels of so many messages or bytes."""
    base = Scenario(use_states=False)
    out = [base, replace(base, early_release=True)]
    k = 0
    while len(out) < many:
        k += 1
        kind = k % 4
        size = 2048 * (1 + k // 4)
        out.append(
            replace(base, eager_bytes=size) if kind == 0
            else replace(base, buffer_bytes=size) if kind == 1
            else replace(base, buffer_messages=1 + k // 4) if kind == 2
            else replace(base, eager_bytes=size, early_release=True)
        )  # fmt: skip
    return out[:many]


def loop(p: Program, tried: list[Scenario]) -> np.ndarray:
    """A plain loop: one replay a scenario, of all jobs. Gives what completed in each cell."""
    job = p.matching.events["job"].to_numpy()
    many = len(p.job_event) - 1
    done = [np.bincount(job, run(p, s).completed, minlength=many) for s in tried]
    return np.stack(done, axis=1).astype(np.int64)


def shared(p: Program, tried: list[Scenario]) -> tuple[float, int]:
    """How many steps an event of the first job takes in all scenarios, and how many deadlock."""
    cells = np.zeros((len(tried), 3), np.int32)
    cells[:, 1] = np.arange(len(tried))
    batch = batch_of(p, layout(p, tried[0]), tried, cells, record=ck.OUTCOMES, keep=False)
    outcome, steps = launch_in_lockstep(p, batch)
    stuck = outcome.reshape(len(tried), -1)[:, ck.STANDING] > 0
    return steps / int(p.job_event[1]), int(stuck.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("jobs", 1000), ("ranks", 64), ("operations", 2000), ("scenarios", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--shard", type=int, default=4_000_000, help="events held at once")
    parser.add_argument("--loop-jobs", type=int, default=8, help="of so many jobs, the plain loop")
    parser.add_argument("--program", choices=PROGRAMS, default="pipeline")
    args = parser.parse_args()
    one = PROGRAMS[args.program](args.ranks, args.operations)
    size = one.events.height
    tried = scenarios(args.scenarios)
    per_shard = max(1, min(args.jobs, args.shard // size))
    p = build(match(copies(one, per_shard)))
    small = build(match(copies(one, min(args.loop_jobs, per_shard))))
    outcomes(small, tried, np.array([[0, k] for k in range(len(tried))]))  # compiled, or loaded
    run(small, tried[0])
    print(f"{args.jobs} jobs of {args.ranks} ranks, {size} events each ({args.program}); "
          f"{len(tried)} scenarios; {cores()} cores; shards of {per_shard} jobs")  # fmt: skip

    many = len(small.job_event) - 1
    began, spent = time.perf_counter(), time.process_time()
    completed = loop(small, tried)
    alone, spent = time.perf_counter() - began, time.process_time() - spent
    events = many * size * len(tried)
    print(f"plain loop:  {events / alone / 1e6:8.1f} million events/s, "
          f"{events / spent / 1e6:.1f} a second of a processor  "
          f"({many} jobs, {alone:.2f} s)")  # fmt: skip

    done, took, bad, apart = 0, 0.0, 0, 0
    spent = time.process_time()
    while done < args.jobs:
        now = min(per_shard, args.jobs - done)
        jobs, rows = np.meshgrid(np.arange(now), np.arange(len(tried)), indexing="ij")
        began = time.perf_counter()
        o = outcomes(p, tried, np.stack([jobs.ravel(), rows.ravel()], axis=1))
        took += time.perf_counter() - began
        bad += int((o.standing > 0).sum())
        apart += int((o.completed.reshape(now, -1) != completed[0]).sum())
        done += now
    events = args.jobs * size * len(tried)
    spent = time.process_time() - spent
    print(f"one batch:   {events / took / 1e6:8.1f} million events/s, "
          f"{events / spent / 1e6:.1f} a second of a processor  "
          f"({args.jobs} jobs, {took:.2f} s, {bad} cells deadlocked)")  # fmt: skip
    steps, stuck = shared(p, tried)
    print(f"shared:      {steps:8.1f} steps an event for all scenarios of a job "
          f"(alone: {3 * len(tried)}); {stuck} of them deadlock; "
          f"{apart} cells differ from the plain loop")  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
