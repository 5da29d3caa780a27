"""Many scenarios of many jobs, beside a plain loop of single replays.

    python benchmarks/whatif.py [--jobs 1000] [--ranks 64] [--operations 2000] [--scenarios 64]

Jobs are replayed in shards of so many events as fit the memory, so that all of them can be counted
without all of them being held. Events a second are events of all jobs times scenarios over the time
that their replay takes; writing the jobs down and matching them is not counted.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace

import numpy as np
import polars as pl

from dl2gpu.analysis.matching import match
from dl2gpu.analysis.outcomes import outcomes
from dl2gpu.analysis.replay import Program, build, run
from dl2gpu.analysis.rewrite import copies
from dl2gpu.analysis.scenario import Scenario
from dl2gpu.engine.cores import cores
from dl2gpu.trace.schema import EVENTS, OP, Trace, conform, empty


def pipeline(ranks: int, operations: int) -> Trace:
    """One job: micro-batches go from rank to rank and back; every eighth step all agree.

    ``operations`` of each rank: sends and receives, the middle ranks four a micro-batch.
    """
    rows: list[dict[str, object]] = []
    for rank in range(ranks):
        seq = 0
        steps = 0
        while seq < operations:
            steps += 1
            ops: list[tuple[int, int | None]] = []
            if rank:
                ops.append((OP["recv"], rank - 1))
            if rank < ranks - 1:
                ops += [(OP["send"], rank + 1), (OP["recv"], rank + 1)]
            if rank:
                ops.append((OP["send"], rank - 1))
            while len(ops) < 4:
                ops.append((OP["all_reduce"], None))  # of this rank alone
            for op, peer in ops[: operations - seq]:
                alone = op == OP["all_reduce"]
                rows.append(
                    {
                        "job": 0, "rank": rank, "lane": 0, "seq": seq, "op": op, "peer": peer,
                        "comm": 1 + rank if alone else 0, "count": 1024, "dtype": 10,
                        "bytes": 4096 * (1 + steps % 3), "blocking": True, "state": 0, "flags": 0,
                    }
                )  # fmt: skip
                seq += 1
    comms = [{"comm": 0, "job": 0, "id": "pipeline", "ranks": list(range(ranks))}]
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


def loop(p: Program, tried: list[Scenario]) -> int:
    """A plain loop: one replay a scenario, of all jobs. Gives how many cells are deadlocked."""
    bad = 0
    job_of_rank = p.matching.prepared.ranks["job"].to_numpy()
    for s in tried:
        fix = run(p, s)
        bad += len(np.unique(job_of_rank[fix.layout.lane_rank[fix.lane_at >= 0]]))
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("jobs", 1000), ("ranks", 64), ("operations", 2000), ("scenarios", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--shard", type=int, default=4_000_000, help="events held at once")
    parser.add_argument("--loop-jobs", type=int, default=8, help="of so many jobs, the plain loop")
    args = parser.parse_args()
    one = pipeline(args.ranks, args.operations)
    size = one.events.height
    tried = scenarios(args.scenarios)
    per_shard = max(1, min(args.jobs, args.shard // size))
    p = build(match(copies(one, per_shard)))
    small = build(match(copies(one, min(args.loop_jobs, per_shard))))
    outcomes(small, tried[:2], np.array([[0, 0], [0, 1]]))  # compiled, or loaded
    print(f"{args.jobs} jobs of {args.ranks} ranks, {size} events each; {len(tried)} scenarios; "
          f"{cores()} cores; shards of {per_shard} jobs")  # fmt: skip

    many = len(small.job_event) - 1
    began, spent = time.perf_counter(), time.process_time()
    bad = loop(small, tried)
    alone, spent = time.perf_counter() - began, time.process_time() - spent
    events = many * size * len(tried)
    print(f"plain loop:  {events / alone / 1e6:8.1f} million events/s, "
          f"{events / spent / 1e6:.1f} a second of a processor  "
          f"({many} jobs, {alone:.2f} s, {bad} cells deadlocked)")  # fmt: skip

    done, took, bad = 0, 0.0, 0
    spent = time.process_time()
    while done < args.jobs:
        now = min(per_shard, args.jobs - done)
        jobs, rows = np.meshgrid(np.arange(now), np.arange(len(tried)), indexing="ij")
        began = time.perf_counter()
        o = outcomes(p, tried, np.stack([jobs.ravel(), rows.ravel()], axis=1))
        took += time.perf_counter() - began
        bad += int((o.standing > 0).sum())
        done += now
    events = args.jobs * size * len(tried)
    spent = time.process_time() - spent
    print(f"one batch:   {events / took / 1e6:8.1f} million events/s, "
          f"{events / spent / 1e6:.1f} a second of a processor  "
          f"({args.jobs} jobs, {took:.2f} s, {bad} cells deadlocked)")  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
