"""Speed of reading text logs: ours, beside ``grep`` and reading the bytes, in one run.

Two logs of one job, each of ``--mib``: one of a training program (steps, and a hang at its end),
one in which NCCL logs every call. ``grep`` looks for one literal text and is the floor of a tool
that looks at lines at all; peak memory is the operating system's figure for the reading process::

    python benchmarks/logs.py --mib 512
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_OURS = """
import sys
sys.path.insert(0, sys.argv[1])
from dl2gpu.trace.inputs import TraceFile
from dl2gpu.trace.log import read
trace, inputs = read([TraceFile("job.log", sys.argv[2], "log", "job")])
assert inputs[0].status == "read" and trace.jobs.height == 1, inputs
"""


def training(size: int) -> Iterator[str]:
    """Lines of steps of eight ranks, and a mismatch at the end."""
    step = written = 0
    while written < size:
        lines = "".join(
            f"[rank{r}]: 2025-03-26 {step // 3600 % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d} "
            f"| INFO | trainer:214 | rank={r} step={step} loss={3 + r / 1000:.4f} tok/s=43993 "
            "mem=61.4GiB\n"
            for r in range(8)
        )
        step += 1
        written += len(lines)
        yield lines
    for r in range(8):
        op = "BROADCAST" if r == 0 else "ALLREDUCE"
        yield (
            f"[rank{r}]:[E326 10:14:29.557924692 ProcessGroupNCCL.cpp:607] [Rank {r}] Watchdog "
            f"caught collective operation timeout: WorkNCCL(SeqNum=7219, OpType={op}, NumelIn=64, "
            "NumelOut=64, Timeout(ms)=600000) ran for 600009 milliseconds before timing out.\n"
        )


def calls(size: int) -> Iterator[str]:
    """NCCL's own lines on every call of eight ranks of one process each."""
    count = written = 0
    for r in range(8):
        yield (
            f"gpu-a11:{3000 + r}:{3100 + r} [{r}] NCCL INFO comm 0x55d2c0a1{r:04x} rank {r} "
            f"nranks 8 cudaDev {r} nvmlDev {r} busId {r + 7}000 "
            "commId 0x7f00deadbeef - Init COMPLETE\n"
        )
    while written < size:
        lines = "".join(
            f"gpu-a11:{3000 + r}:{3000 + r} [{r}] NCCL INFO AllReduce: opCount {count:x} sendbuff "
            f"0x7f10{count % 65536:08x} recvbuff 0x7f10{count % 65536:08x} count 4096 datatype 7 "
            f"op 0 root 0 comm 0x55d2c0a1{r:04x} [nranks=8] stream 0x55d2c0b1{r:04x}\n"
            for r in range(8)
        )
        count += 1
        written += len(lines)
        yield lines


def timed(command: list[str]) -> tuple[float, float]:
    """(seconds, MiB at the peak) of a process."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in {0, 1}:
        raise SystemExit(f"{' '.join(command[:3])}: exit status {process.returncode}")
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def best(command: list[str], repeats: int) -> tuple[float, float]:
    """The fastest of some runs."""
    return min(timed(command) for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of each log")
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the fastest counts")
    args = parser.parse_args()
    print(f"{'log':10} {'MiB':>6} {'reader':24} {'s':>7} {'MB/s':>8} {'peak MiB':>9}")
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "start.log"
        empty.write_text("".join(training(1)))
        start, _ = best([sys.executable, "-c", _OURS, str(ROOT), str(empty)], args.repeats)
        for name, lines in (("training", training), ("calls", calls)):
            path = Path(folder) / f"{name}.log"
            with path.open("w") as out:
                out.writelines(lines(args.mib << 20))
            size = path.stat().st_size
            began = time.perf_counter()
            with path.open("rb") as file:
                while file.read(8 << 20):
                    pass
            rows = [("reading the bytes", time.perf_counter() - began, 0.0)]
            rows.append(("grep -c Watchdog", *timed(["grep", "-c", "Watchdog", str(path)])))
            command = [sys.executable, "-c", _OURS, str(ROOT), str(path)]
            seconds, peak = best(command, args.repeats)
            rows.append(("dl2gpu", seconds, peak))
            rows.append(("dl2gpu, without its start", max(seconds - start, 1e-3), peak))
            for reader, took, memory in rows:
                print(
                    f"{name:10} {size >> 20:6} {reader:24} {took:7.2f} {size / took / 1e6:8.0f} "
                    f"{memory or '':>9.0f}" if memory else
                    f"{name:10} {size >> 20:6} {reader:24} {took:7.2f} {size / took / 1e6:8.0f}"
                )  # fmt: skip


if __name__ == "__main__":
    main()
