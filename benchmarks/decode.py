"""Speed of decoding Flight Recorder pickles: ours, ``pickle.loads``, and copying the bytes.

One core, one run, the same dumps in memory. Most of the time of ``pickle.loads`` goes to the
garbage collector, which looks at its many small objects again and again; so it is shown without
it as well::

    python benchmarks/decode.py --ranks 64 --entries 2000 --frames 16
"""

from __future__ import annotations

import argparse
import gc
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import fr_corpus

from dl2gpu.trace.inputs import TraceFile


def best(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def each(run: Callable[[bytes], Any], dumps: list[bytes]) -> None:
    for data in dumps:
        run(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    layout = fr_corpus.Layout.of(args.ranks)
    depth = args.frames or None
    dumps = [fr_corpus.rank_dump(r, layout, args.entries, depth) for r in range(args.ranks)]
    size = sum(map(len, dumps))
    start = time.perf_counter()
    from dl2gpu.trace import flight_recorder, pickle_columns

    pickle_columns.decode(dumps[0])
    loaded = time.perf_counter() - start
    entries = sum(pickle_columns.decode(d).n for d in dumps)
    ours = best(lambda: each(pickle_columns.decode, dumps), args.repeats)
    theirs = best(lambda: each(pickle.loads, dumps), args.repeats)
    kept = best(lambda: [pickle.loads(d) for d in dumps], 1)
    gc.disable()
    no_gc = best(lambda: each(pickle.loads, dumps), args.repeats)
    gc.enable()
    copy = best(lambda: each(bytearray, dumps), args.repeats)
    files = [
        TraceFile(path=f"{i}", url=f"{i}", format="flight_recorder", folder="job", rank=i)
        for i in range(len(dumps))
    ]
    read = best(lambda: flight_recorder.read(files, lambda f: dumps[int(f.path)]), args.repeats)
    print(f"{entries} entries of {args.frames} frames, {size / 1e6:.1f} MB in {len(dumps)} dumps")
    print(f"{'':24}{'s':>9}{'entries/s':>13}{'MB/s':>9}{'ours is':>9}")
    for name, seconds in (
        ("decode (this library)", ours),
        ("pickle.loads", theirs),
        ("  all results kept", kept),
        ("  no garbage collection", no_gc),
        ("floor: copy the bytes", copy),
        ("read to an event table", read),
    ):
        print(
            f"{name:24}{seconds:9.4f}{entries / seconds:13,.0f}{size / 1e6 / seconds:9.0f}"
            f"{seconds / ours:8.1f}x"
        )
    print(f"import and first dump: {loaded:.2f} s (compiled code from the cache, or compiled now)")


if __name__ == "__main__":
    main()
