"""Listing and reading a bucket: ours beside a plain loop over fsspec, and the floor, in one run.

A server of the S3 protocol (moto's) in a process of its own on the loopback interface, and a proxy
before it that can add the time that an answer of a real store takes::

    python benchmarks/buckets.py --objects 2000 --kilobytes 16 --latency-ms 0 20

The server is a Python program on the same cores: without latency it is what is measured.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from loopback import FaultyProxy, s3_environment, s3_server

from dl2gpu.trace import remote
from dl2gpu.trace.files import load_ahead, read_bytes
from dl2gpu.trace.inputs import TraceFile
from dl2gpu.trace.remote_list import find

BUCKET = "bench"


def ours() -> tuple[int, int]:
    """Objects and bytes, listed and read as a scan does."""
    listed = list(find(f"s3://{BUCKET}"))
    files = [TraceFile(f.below, f.url, "", "", f.stamp.size or 0, stamp=f.stamp) for f in listed]
    sizes = [len(d) for d in load_ahead(files, read_bytes) if isinstance(d, bytes)]
    return len(sizes), sum(sizes)


def loop() -> tuple[int, int]:
    """The same by what a script would do."""
    import s3fs

    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    sizes = [len(fs.cat_file(name)) for name in fs.find(BUCKET)]
    return len(sizes), sum(sizes)


def timed(work: Callable[[], tuple[int, int]]) -> tuple[float, int, int]:
    began = time.perf_counter()
    many, size = work()
    return time.perf_counter() - began, many, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=2000)
    parser.add_argument("--kilobytes", type=int, default=16)
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[0.0, 20.0])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        top = Path(scratch)
        chance = random.Random(0)
        for i in range(asked.objects):
            folder = top / f"job_{i // 8:05}"
            folder.mkdir(exist_ok=True)
            (folder / f"rank_{i % 8}").write_bytes(chance.randbytes(asked.kilobytes << 10))
        print(f"{asked.objects} objects of {asked.kilobytes} KiB, {os.cpu_count()} cores")
        with s3_server(top, BUCKET) as port:
            for latency in asked.latency_ms:
                with FaultyProxy(port, latency_s=latency / 1000).running() as proxy:
                    # without latency, straight from the server
                    os.environ |= s3_environment(proxy.port if latency else port)
                    import s3fs

                    s3fs.S3FileSystem.clear_instance_cache()
                    remote.forget()
                    next(iter(find(f"s3://{BUCKET}/job_00000")))  # imports, and a client
                    s3fs.S3FileSystem(skip_instance_cache=True).ls(f"{BUCKET}/job_00000")
                    for name, work in (("dl2gpu", ours), ("loop of fsspec", loop)):
                        seconds, many, size = timed(work)
                        assert many == asked.objects
                        print(
                            f"{latency:5.0f} ms an answer  {name:15} {seconds:7.2f} s "
                            f"{many / seconds:8.0f} objects/s {size / seconds / 1e6:8.1f} MB/s",
                            flush=True,
                        )
        began = time.perf_counter()
        size = sum(len(p.read_bytes()) for p in top.rglob("rank_*"))
        seconds = time.perf_counter() - began
        print(
            f"    local files           {'(the floor)':8} {seconds:7.2f} s "
            f"{asked.objects / seconds:8.0f} objects/s {size / seconds / 1e6:8.1f} MB/s"
        )


if __name__ == "__main__":
    main()
