"""Fleets from end to end: speed and memory beside their floors, one large job, many small files.

Corpora are generated once into a folder and used again. Everything is measured in a process of its
own, with its start-up, one after the other::

    python benchmarks/fleet.py CORPORA                  # all of it; 100 million events take long
    python benchmarks/fleet.py CORPORA --only 10m large dumps

Floors: reading the bytes of the files once, and Polars reading the same columns of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FLEETS: dict[str, dict[str, Any]] = {
    "10m": {"jobs": 1000, "events": 10_000_000},
    "100m": {"jobs": 10_000, "events": 100_000_000},
    "large": {"jobs": 1, "events": 16_384 * 60, "ranks": (16_384, 16_384)},
    "dumps": {"jobs": 115, "events": 2_300_000, "form": "fr", "ranks": (64, 128)},
}
"""Arguments of ``suites.fleet.write``, all with the same seed."""
SEED = 7


def corpus(name: str, root: Path) -> Path:
    """The folder of a corpus, which is made where it is missing."""
    target = root / name
    if not (target / "labels.parquet").exists():
        code = (
            "import sys, json, dl2gpu.suites.fleet as f\n"
            "f.write(sys.argv[1], seed=int(sys.argv[2]), **json.loads(sys.argv[3]))"
        )
        began = time.perf_counter()
        command = [sys.executable, "-c", code, str(target), str(SEED), json.dumps(FLEETS[name])]
        subprocess.run(command, check=True)
        print(f"{name}: generated in {time.perf_counter() - began:.0f} s", flush=True)
    return target


def measured(what: str, target: Path, options: Sequence[str] = ()) -> dict[str, Any]:
    """What this program prints as JSON for ``--measure``, in a process of its own."""
    command = [sys.executable, __file__, str(target), "--measure", what, *options]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        output = process.stdout.read() if process.stdout is not None else b""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    whole = {
        "wall": time.perf_counter() - began,
        "cpu": usage.ru_utime + usage.ru_stime,
        "mib": usage.ru_maxrss / 1024,
    }
    return json.loads(output) | whole


# --------------------------------------------------------------------------------------------------
# In the measured process


def analysed(target: Path, shard_bytes: int, threads: int) -> dict[str, Any]:
    """Discovers, reads and analyses a corpus; checks verdicts against the labels."""
    import polars as pl

    from dl2gpu.analysis import analyse
    from dl2gpu.trace.discover import discover
    from dl2gpu.trace.parts import shards
    from dl2gpu.trace.readers import read_files

    began = time.perf_counter()
    files = discover([str(target)]).files
    found = time.perf_counter() - began
    cut = list(shards(files, shard_bytes))
    verdicts: dict[str, str] = {}
    events = findings = 0
    spent: Counter[str] = Counter()

    def one(shard: list[Any]) -> tuple[int, int, dict[str, str]]:
        start = time.perf_counter()
        trace, inputs = read_files(shard)
        assert all(i.status == "read" for i in inputs), inputs
        middle = time.perf_counter()
        result = analyse(trace, 1 if threads > 1 else None)
        spent["read"] += middle - start  # type: ignore[assignment]
        spent["analyse"] += time.perf_counter() - middle  # type: ignore[assignment]
        names = trace.jobs.sort("job")["name"]
        return (
            trace.events.height,
            len(result.findings),
            dict(zip(names, result.jobs.sort("job")["verdict"], strict=True)),
        )

    with ThreadPoolExecutor(threads) as pool:
        for n, many, of in pool.map(one, cut) if threads > 1 else map(one, cut):
            events, findings = events + n, findings + many
            verdicts |= of
    seconds = time.perf_counter() - began
    labels = dict(pl.read_parquet(target / "labels.parquet").select("job", "verdict").iter_rows())
    return {
        "events": events, "seconds": seconds, "discover": found, "shards": len(cut),
        "files": len(files), "findings": findings, **spent,
        "wrong": sum(verdicts.get(job) != verdict for job, verdict in labels.items()),
    }  # fmt: skip


def scanned(target: Path) -> dict[str, Any]:
    """The same through ``dl2gpu.scan``."""
    from dl2gpu import scan

    began = time.perf_counter()
    report = scan([str(target)])
    return {
        "events": report.summary["events"],
        "seconds": time.perf_counter() - began,
        "findings": report.findings.height,
    }


def floors(target: Path) -> dict[str, Any]:
    """Seconds to read the bytes of the main files once, and for Polars to read our columns."""
    import polars as pl

    from dl2gpu.trace.schema import EVENTS

    paths = sorted(target.glob("fleet_*[0-9].parquet"))
    for path in paths:
        path.read_bytes()
    began = time.perf_counter()
    size = sum(len(path.read_bytes()) for path in paths)
    middle = time.perf_counter()
    rows = 0
    for path in paths:
        columns = [c for c in pl.read_parquet_schema(path) if c in EVENTS]
        rows += pl.read_parquet(path, columns=columns).height
    return {"bytes": size, "read": middle - began, "polars": time.perf_counter() - middle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where the corpora are kept")
    parser.add_argument("--only", nargs="+", choices=list(FLEETS), default=list(FLEETS))
    parser.add_argument("--shard-mb", type=int, default=768)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--scan", action="store_true", help="through dl2gpu.scan")
    parser.add_argument("--measure", choices=["analysed", "scanned", "floors"])
    args = parser.parse_args()
    if args.measure:
        from dl2gpu.engine.process import prepare

        prepare()  # as the command does
        call = {
            "analysed": lambda: analysed(args.folder, args.shard_mb << 20, args.threads),
            "scanned": lambda: scanned(args.folder),
            "floors": lambda: floors(args.folder),
        }[args.measure]
        json.dump(call() | {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}, sys.stdout)
        return
    what = "scanned" if args.scan else "analysed"
    options = ["--shard-mb", str(args.shard_mb), "--threads", str(args.threads)]
    for name in args.only:
        target = corpus(name, args.folder)
        measured(what, target, options) if name in {"large", "dumps"} else None  # compiled code
        m = measured(what, target, options)
        line = (
            f"{name}: {m['events']:,} events in {m['seconds']:.2f} s "
            f"({m['events'] / m['seconds'] / 1e6:.2f} M/s; process {m['wall']:.2f} s, "
            f"processor {m['cpu']:.2f} s), peak {m['mib']:.0f} MiB, {m['findings']} findings"
        )
        if "shards" in m:
            line += (
                f", {m['wrong']} jobs not as labelled; {m['files']} files, {m['shards']} shards, "
                f"discovery {m['discover']:.2f} s = {100 * m['discover'] / m['seconds']:.1f} %, "
                f"read {m['read']:.2f} s, analyse {m['analyse']:.2f} s (sums over threads)"
            )
        print(line, flush=True)
        if name != "dumps":
            f = measured("floors", target)
            print(
                f"  floors: bytes read once {f['read']:.3f} s ({f['bytes'] / 1e6:.0f} MB), Polars "
                f"reads the same columns in {f['polars']:.2f} s: "
                f"{m['events'] / f['polars'] / 1e6:.1f} M/s; ours takes "
                f"{m['seconds'] / f['polars']:.1f} times that",
                flush=True,
            )


if __name__ == "__main__":
    main()
