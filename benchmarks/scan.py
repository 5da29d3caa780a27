"""``dl2gpu scan`` as a whole process, beside ``torchfrtrace`` on the same dumps, in one run.

Start-up of both is counted. The commands run in turn, ours and theirs, and each figure is the
median; the floor is reading the bytes once. Peak memory is the operating system's own figure::

    python benchmarks/scan.py --ranks 8 32 128 512 --peer /path/to/torchfrtrace

The peer ships with PyTorch (``pip install torch``), for which a virtual environment of its own is
best. The dumps hold collectives only (tensor and data parallel groups): on pipelines in 1F1B order
the peer gives up a group after a few operations that it cannot match.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fr_corpus


@dataclass(frozen=True)
class Run:
    """Wall seconds, and peak resident memory in MiB, of one process."""

    seconds: float
    mib: float


def timed(command: list[str]) -> Run:
    """Run a command with its output thrown away."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode not in {0, 1, 3}:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    return Run(seconds, usage.ru_maxrss / 1024)


def median(runs: list[Run]) -> Run:
    return Run(statistics.median(r.seconds for r in runs), statistics.median(r.mib for r in runs))


def read_once(folder: Path) -> float:
    """Seconds to read the bytes of all files of a folder."""
    began = time.perf_counter()
    for path in folder.iterdir():
        path.read_bytes()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="dl2gpu scan beside torchfrtrace")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ours", default=str(Path(sys.executable).with_name("dl2gpu")))
    parser.add_argument("--peer", default=shutil.which("torchfrtrace"))
    args = parser.parse_args()
    if args.peer is None:
        print("torchfrtrace: not found, so only our own figures (name it with --peer)")
    print("ranks   entries     ours     peer  ratio    read  ours MiB")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            dumps = Path(folder) / str(ranks)
            fr_corpus.write(dumps, ranks, args.entries, args.frames, pipeline=1)
            ours = [args.ours, "scan", str(dumps), "--quiet"]
            peer = [args.peer, str(dumps), "-p", "nccl_trace_rank_"]
            timed(ours)  # compiles once, and warms the file cache
            mine, theirs = [], []
            for _ in range(args.runs):
                mine.append(timed(ours))
                if args.peer:
                    theirs.append(timed(peer))
            a = median(mine)
            b = median(theirs) if theirs else None
            print(
                f"{ranks:>5} {ranks * args.entries:>9,} {a.seconds:>7.2f}s "
                + (
                    f"{b.seconds:>7.2f}s {b.seconds / a.seconds:>5.1f}x"
                    if b
                    else f"{'-':>8} {'-':>6}"
                )
                + f" {read_once(dumps):>6.2f}s {a.mib:>9.0f}",
                flush=True,
            )
            shutil.rmtree(dumps)


if __name__ == "__main__":
    main()
