"""Matching, replay and components, beside one sort of the same keys.

Prints, for a number of events spread over 100 jobs, the time of our analysis and the time of one
NumPy argsort of the packed keys (communicator, ordinal, rank) of the same events: the floor of any
method that has to bring the members of an operation together. Rows come as the readers give them,
rank by rank, which is easy for NumPy's sort; ``--shuffled`` takes them in any order. With
``--growth``, also the slope of time against events in log-log from 10^5 to 10^7::

    python benchmarks/analysis.py --events 10000000 --growth
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import polars as pl

from dl2gpu.analysis.matching import match
from dl2gpu.analysis.replay import Scenario, build, run
from dl2gpu.analysis.roots import find_causes
from dl2gpu.analysis.shares import over_shares
from dl2gpu.analysis.waitfor import build_graph
from dl2gpu.trace.schema import EXIT, OP, StringTable, Trace, conform

RANKS_A_JOB = 64
TENSOR = 8
SEED = 7


def corpus(events: int, jobs: int, hung: float = 0.1) -> Trace:
    """Jobs of 64 ranks in a healthy routine, and one in ten with a fault.

    Tensor, data and world collectives on three streams, point to point between pipeline neighbours,
    a host wait a step. In one job of ten a rank leaves out one all_reduce.
    """
    rng = np.random.default_rng(SEED)
    strings = StringTable(["s:tp", "s:dp", "s:world", "s:pp"])
    world = RANKS_A_JOB
    # one step of a rank: (op, group kind, stream)
    step = [("all_reduce", 0), ("all_gather", 0), ("reduce_scatter", 0), ("all_reduce", 1),
            ("all_reduce", 0), ("pp", 3), ("all_reduce", 1), ("all_gather", 0), ("all_reduce", 2),
            ("wait", -1)]  # fmt: skip
    steps = max(1, events // (jobs * world * len(step)))
    groups = world // TENSOR
    comms_a_job = groups + TENSOR + 2
    members: list[list[int]] = [list(range(g * TENSOR, (g + 1) * TENSOR)) for g in range(groups)]
    members += [list(range(t, world, TENSOR)) for t in range(TENSOR)]
    members += [list(range(world)), list(range(world))]

    length = steps * len(step)
    n = jobs * world * length
    job = np.repeat(np.arange(jobs, dtype=np.int32), world * length)
    rank = np.tile(np.repeat(np.arange(world, dtype=np.int32), length), jobs)
    place = np.tile(np.arange(length, dtype=np.int64), jobs * world)
    slot = place % len(step)
    kind = np.array([k for _, k in step])[slot]
    op = np.array([0 if o == "pp" else OP[o] for o, _ in step], dtype=np.int32)[slot]
    # pairs of pipeline neighbours: even ranks send, odd ranks receive
    pp = kind == 3
    op[pp] = np.where(rank[pp] % 2 == 0, OP["send"], OP["recv"])
    comm = np.select(
        [kind == 0, kind == 1, kind == 2, kind == 3],
        [
            rank // TENSOR,
            groups + rank % TENSOR,
            np.full(n, groups + TENSOR),
            np.full(n, groups + TENSOR + 1),
        ],
        -1,
    ).astype(np.int32)  # fmt: skip
    comm = np.where(comm >= 0, comm + job * comms_a_job, -1)
    keep = np.ones(n, bool)
    for j in np.flatnonzero(rng.random(jobs) < hung):
        at = (job == j) & (rank == 3) & (place == (steps // 2) * len(step) + 3)
        keep &= ~at
    host = kind < 0
    frame = pl.DataFrame(
        {
            "job": job, "rank": rank, "lane": np.zeros(n, np.int32), "seq": place, "op": op,
            "stream": np.where(host, 0, kind).astype(np.int32),
            "blocking": host,
            "comm": comm,
            "peer": np.where(pp, np.where(rank % 2 == 0, rank + 1, rank - 1), 0).astype(np.int32),
            "count": np.full(n, 4096, np.int64),
            "bytes": np.full(n, 8192, np.int64),
            "dtype": np.full(n, 7, np.int32),
        }
    ).with_columns(
        stream=pl.when(~pl.Series(host)).then("stream"),
        comm=pl.when(pl.col("comm") >= 0).then("comm"),
        peer=pl.when(pl.Series(pp)).then("peer"),
        state=pl.lit(0, pl.UInt8), flags=pl.lit(0, pl.UInt32),
    ).filter(pl.Series(keep))  # fmt: skip
    return Trace(
        events=conform(frame, "events"),
        jobs=conform(
            pl.DataFrame(
                {"job": range(jobs), "name": [f"job{j}" for j in range(jobs)]}
            ).with_columns(
                folder="name",
                attempt=0,
                world_size=world,
                backend=pl.lit("nccl"),
                source=pl.lit("native"),
                waits=True,
                p2p=True,
            ),
            "jobs",
        ),
        ranks=conform(
            pl.DataFrame(
                {"job": np.repeat(np.arange(jobs), world), "rank": np.tile(np.arange(world), jobs)}
            ).with_columns(
                exit=EXIT["finished"], truncated=False, lost_before=0, only_active=False
            ),
            "ranks",
        ),
        comms=conform(
            pl.DataFrame(
                {
                    "comm": range(jobs * comms_a_job),
                    "job": np.repeat(np.arange(jobs), comms_a_job),
                    "id": [f"c{c}" for c in range(comms_a_job)] * jobs,
                    "ranks": members * jobs,
                }
            ),
            "comms",
        ),
        strings=strings.frame(),
    )


def analysis(trace: Trace) -> int:
    """Matching, replay, wait-for graph and components; the number of causes found."""

    def causes(share: Trace) -> int:
        p = build(match(share))
        return len(find_causes(build_graph(p, run(p, Scenario()))))

    return sum(found for _, found in over_shares(trace, causes))


def floor(trace: Trace) -> Callable[[], object]:
    """One argsort of the packed keys of the same events."""
    e = trace.events
    key = e["comm"].fill_null(0).to_numpy().astype(np.int64) << 40
    key |= (e["seq"].to_numpy() & ((1 << 24) - 1)) << 12
    key |= e["rank"].to_numpy()
    return lambda: np.argsort(key)


def best(call: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of some runs."""
    out = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        out.append(time.perf_counter() - began)
    return min(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--shuffled", action="store_true")
    args = parser.parse_args()
    analysis(corpus(64 * 10 * 2, 2))  # compile once
    sizes = [100_000, 316_228, 1_000_000, 3_162_278, 10_000_000] if args.growth else [args.events]
    measured = []
    for size in sizes:
        trace = corpus(size, args.jobs if size >= 640 * args.jobs else 100)
        if args.shuffled:
            rows = trace.events.sample(fraction=1, shuffle=True, seed=SEED)
            trace = replace(trace, events=rows)
        ours = best(lambda trace=trace: analysis(trace), args.runs)  # type: ignore[misc]
        sort = best(floor(trace), args.runs)
        n = trace.events.height
        measured.append((n, ours))
        print(
            f"{n:>11,} events, {args.jobs} jobs: {ours:6.2f} s ({n / ours / 1e6:5.1f} M events/s); "
            f"one argsort {sort:5.2f} s; ratio {ours / sort:4.1f}; {analysis(trace)} causes",
            flush=True,
        )
    if len(measured) > 1:
        x, y = np.log10(np.array(measured)).T
        print(f"growth: slope {np.polyfit(x, y, 1)[0]:.2f} in log-log")


if __name__ == "__main__":
    main()
