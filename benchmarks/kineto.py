"""Speed of reading profiler traces: ours, Holistic Trace Analysis, and the bytes alone.

A synthetic trace of the usual shape (mostly kernels, launches, operators and Python functions, few
communication events) goes through all of them in one run, each in a process of its own, so that the
peak of memory is its own as well::

    python benchmarks/kineto.py --megabytes 300 --hta-python VENV/bin/python

HTA (``pip install HolisticTraceAnalysis``) is measured where ``--hta-python`` names an interpreter
that has it: ``parse_trace_file``, the step in which it reads one file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

OURS = """
import json, resource, sys, time
from dl2gpu.trace import kineto
from dl2gpu.trace.inputs import TraceFile
path = sys.argv[1]
def files(p):
    return [TraceFile(path=p, url=p, format="kineto", folder="job", rank=0)]
kineto.read(files(sys.argv[2]))  # kernels are linked
start = time.perf_counter()
trace, inputs = kineto.read(files(path))
seconds = time.perf_counter() - start
assert inputs[0].status == "read", inputs
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "peak": peak / 1024, "operations": inputs[0].events}))
"""

BASE = """
import json, resource
import dl2gpu.trace.kineto, polars
print(json.dumps({"seconds": 0, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""

HTA = """
import json, resource, sys, time
from hta.common.trace import parse_trace_file
start = time.perf_counter()
found = parse_trace_file(sys.argv[1])
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "peak": peak / 1024}))
"""

JSON = """
import json, resource, sys, time
start = time.perf_counter()
found = json.load(open(sys.argv[1]))
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "peak": peak / 1024}))
"""

FLOOR = """
import json, resource, sys, time
best = {}
for _ in range(3):
    data = open(sys.argv[1], "rb", buffering=0)
    start = time.perf_counter()
    n = 0
    while block := data.read(1 << 20):
        n += block.count(b"@")  # memchr: the byte does not occur
    best["memchr"] = min(best.get("memchr", 9e9), time.perf_counter() - start)
    data.seek(0)
    into = bytearray(1 << 20)
    start = time.perf_counter()
    while data.readinto(into):
        pass
    best["copy"] = min(best.get("copy", 9e9), time.perf_counter() - start)
print(json.dumps({"seconds": best["copy"], "memchr": best["memchr"], "peak": 0}))
"""


MODULE = "torch/nn/modules/module.py(1747): _call_impl"
GEMM = (
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_64x3_tn_align8>"
    "(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_64x3_tn_align8::Params)"
)


def event(**fields: object) -> str:
    """One event as Kineto writes it."""
    args = fields.pop("args", None)
    head = ", ".join(f'"{k}": {json.dumps(v)}' for k, v in fields.items())
    if args is None:
        return "  {\n    " + head + "\n  }"
    body = ", ".join(f'"{k}": {json.dumps(v)}' for k, v in args.items())  # type: ignore[attr-defined]
    return "  {\n    " + head + ',\n    "args": {\n      ' + body + "\n    }\n  }"


def step_template(layers: int, collectives: int) -> list[str]:
    """Events of one training step; ``@T`` stands for microseconds, ``@I`` for numbers."""
    out: list[str] = []
    t, n = 0, 0

    def at(more: int) -> str:
        nonlocal t
        t += more
        return f"@T{t:06d}@"

    def number() -> str:
        nonlocal n
        n += 1
        return f"@I{n:06d}@"

    for layer in range(layers):
        for module in ("attention", "mlp", "norm"):
            out.append(
                event(
                    ph="X",
                    cat="python_function",
                    pid=100,
                    tid=100,
                    ts=at(3),
                    dur=41.25,
                    name=f'nn.Module: Block_{layer}.{module} "nccl" {MODULE}',
                    args={"Python parent id": number(), "Python id": number(), "Ev Idx": number()},
                )
            )
            for op in ("aten::linear", "aten::addmm", "aten::view", "aten::gelu"):
                out.append(  # noqa: PERF401 - the numbers go on from event to event
                    event(
                        ph="X",
                        cat="cpu_op",
                        name=op,
                        pid=100,
                        tid=100,
                        ts=at(2),
                        dur=9.125,
                        args={
                            "External id": number(),
                            "Record function id": 0,
                            "Concrete Inputs": ["", "", "", ""],
                            "Input type": ["c10::BFloat16"] * 3,
                            "Input Strides": [[1024, 1], [1, 1024], [1]],
                            "Input Dims": [[8, 1024, 1024], [1024, 4096], [4096]],
                            "Ev Idx": number(),
                        },
                    )
                )
            launch = number()
            out.append(
                event(
                    ph="X",
                    cat="cuda_runtime",
                    name="cudaLaunchKernel",
                    pid=100,
                    tid=100,
                    ts=at(1),
                    dur=4.5,
                    args={"External id": number(), "cbid": 211, "correlation": launch},
                )
            )
            out.append(
                event(
                    ph="X",
                    cat="kernel",
                    pid=0,
                    tid=7,
                    ts=at(4),
                    dur=88.375,
                    name=GEMM,
                    args={
                        "External id": number(),
                        "queued": 0,
                        "device": 0,
                        "context": 1,
                        "stream": 7,
                        "correlation": launch,
                        "registers per thread": 238,
                        "shared memory": 147456,
                        "blocks per SM": 3.87,
                        "warps per SM": 30.96,
                        "grid": [32, 16, 1],
                        "block": [256, 1, 1],
                        "est. achieved occupancy %": 38,
                    },
                )
            )
            out.append(
                event(ph="s", id=launch, pid=100, tid=100, ts=at(1), cat="ac2g", name="ac2g")
            )
            out.append(
                event(ph="f", id=launch, pid=0, tid=7, ts=at(1), cat="ac2g", name="ac2g", bp="e")
            )
    for k in range(collectives):
        call, record, span, launch = number(), number(), number(), number()
        meta = {
            "Collective name": "allreduce",
            "In msg nelems": 1048576 + k,
            "Out msg nelems": 1048576 + k,
            "Group size": 8,
            "dtype": "BFloat16",
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
        }
        start = at(5)
        out.append(
            event(
                ph="X",
                cat="cpu_op",
                name="c10d::allreduce_",
                pid=100,
                tid=101,
                ts=start,
                dur=60.5,
                args={"External id": call, "Record function id": call, "Ev Idx": number()},
            )
        )
        out.append(
            event(
                ph="X",
                cat="cpu_op",
                name="record_param_comms",
                pid=100,
                tid=101,
                ts=start,
                dur=50.5,
                args={
                    "External id": record,
                    "Record function id": record,
                    **meta,
                    "Seq": f"@S{k:03d}@",
                },
            )
        )
        out.append(
            event(
                ph="X",
                cat="user_annotation",
                name="nccl:all_reduce",
                pid=100,
                tid=101,
                ts=start,
                dur=40.5,
                args={"External id": span, "Record function id": span},
            )
        )
        out.append(
            event(
                ph="X",
                cat="kernel",
                pid=0,
                tid=20,
                ts=at(9),
                dur=190.125,
                name="ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                args={
                    "External id": record,
                    "device": 0,
                    "stream": 20,
                    "correlation": launch,
                    **meta,
                },
            )
        )
    return out


def write(path: Path, megabytes: float, layers: int = 24, collectives: int = 4) -> tuple[int, int]:
    """A trace of about that size; (events, collectives) in it."""
    import re

    template = ",\n".join(step_template(layers, collectives))
    parts = re.split(r'"(@[TIS]\d+@)"', template)
    head = {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": "nccl",
            "rank": 0,
            "world_size": 8,
            "pg_config": [
                {
                    "pg_name": "0",
                    "pg_desc": "default_pg",
                    "backend_config": "cuda:nccl",
                    "pg_size": 8,
                    "ranks": list(range(8)),
                }
            ],
        },
        "baseTimeNanoseconds": 1754900000000000000,
    }
    steps = max(1, int(megabytes * 1e6 / (len(template) * 0.97)))
    per_step = len(step_template(layers, collectives))
    with path.open("w") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        for s in range(steps):
            filled = list(parts)
            for j in range(1, len(parts), 2):
                kind, value = parts[j][1], int(parts[j][2:-1])
                if kind == "T":
                    filled[j] = f"{5100000000000 + s * 40000 + value}.{value % 1000:03d}"
                elif kind == "I":
                    filled[j] = str(1 + s * 100000 + value)
                else:
                    filled[j] = str(1 + s * collectives + value)
            file.write(",\n".join(["".join(filled)]) + (",\n" if s + 1 < steps else "\n"))
        file.write('], "traceName": "rank0.json", "displayTimeUnit": "ms"}\n')
    return steps * per_step, steps * collectives


def measured(python: str, code: str, *paths: Path) -> dict[str, float]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} if python == sys.executable else dict(os.environ)
    done = subprocess.run(
        [python, "-c", code, *map(str, paths)], capture_output=True, text=True, env=env, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=300)
    parser.add_argument("--hta-python", default=None)
    parser.add_argument("--gzip", action="store_true", help="the file compressed, too")
    parser.add_argument("--no-json", action="store_true", help="without json.load")
    parser.add_argument("--folder", default=None, help="where the traces are written")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        small, large = Path(folder) / "small.json", Path(folder) / "large.json"
        write(small, 1)
        events, operations = write(large, args.megabytes)
        size = large.stat().st_size
        rows: list[tuple[str, dict[str, float]]] = []
        ours = measured(sys.executable, OURS, large, small)
        if ours["operations"] != operations:
            raise SystemExit(f"read {ours['operations']} operations, the trace has {operations}")
        rows.append(("this library", ours))
        if args.gzip:
            packed = Path(folder) / "large.json.gz"
            # by pieces: a child's peak of memory begins with what its parent holds
            with large.open("rb") as plain, gzip.open(packed, "wb", 1) as out:
                shutil.copyfileobj(plain, out, 1 << 20)
            rows.append(("this library, .gz", measured(sys.executable, OURS, packed, small)))
        if args.hta_python:
            rows.append(("HTA", measured(args.hta_python, HTA, large)))
        if not args.no_json:
            rows.append(("json.load", measured(sys.executable, JSON, large)))
        floor = measured(sys.executable, FLOOR, large)
        rows.append(("floor: copy the bytes", floor))
        rows.append(("floor: memchr", {"seconds": floor["memchr"], "peak": 0}))
        base = measured(sys.executable, BASE)["peak"]
    print(f"{events} events, {operations} collectives, {size / 1e6:.0f} MB")
    print(f"{'':24}{'s':>9}{'MB/s':>9}{'ours is':>9}{'peak MB':>9}")
    for name, row in rows:
        peak = f"{row['peak']:.0f}" if row["peak"] else "-"
        ratio = row["seconds"] / ours["seconds"]
        speed = size / 1e6 / row["seconds"]
        print(f"{name:24}{row['seconds']:9.3f}{speed:9.0f}{ratio:8.2f}x{peak:>9}")
    print(f"peak of the imports alone: {base:.0f} MB")


if __name__ == "__main__":
    main()
