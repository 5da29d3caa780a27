"""Runs the live suites: real PyTorch jobs on gloo, recorded, with a label each.

    python -m pipelines.live --out traces/                     all of them
    python pipelines/live.py --out traces/ --only ddp_ moe_    those whose names begin so
    python pipelines/live.py --out traces/ --list              what there is

Needs the extra ``record`` and transformers. A job is some forked processes with a process group of
a short timeout; the programs are in ``datasets/live/programs``. For each run, ``OUT/NAME/`` gets
one record a rank and ``expect.json``, the label: from what was put in and what the run did.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gzip
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "datasets" / "live" / "programs"
MODULES = ("primitives", "ddp", "sharded", "pipeline", "experts")
CONTEXT = multiprocessing.get_context("fork")


def load() -> dict[str, Any]:
    """The programs by name. Imports PyTorch, once, for all the processes that are forked."""
    sys.path[:0] = [str(PROGRAMS), str(ROOT)]
    importlib.import_module("torch").set_num_threads(1)
    for module in MODULES:
        importlib.import_module(module)
    for make in importlib.import_module("models").MAKE.values():
        make()  # much is imported only when a model is made: here, and not in each process
    for module in ("torch._dynamo", "dl2gpu.record.dispatch", "dl2gpu.record.watch"):
        importlib.import_module(module)
    return dict(suites().PROGRAMS)


def suites() -> Any:
    """The module that the programs enter themselves in."""
    return importlib.import_module("case")


def one_rank(name: str, fault: Any, rank: int, folder: str, scratch: str, timeout: float) -> None:
    """A process of a job."""
    import dl2gpu.record

    dist = importlib.import_module("torch.distributed")
    program = suites().PROGRAMS[name]
    log = os.open(f"{scratch}/rank_{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    limit = dt.timedelta(seconds=timeout)
    dist.distributed_c10d.default_pg_timeout = limit  # of the groups that a program makes
    dl2gpu.record.start(folder, job=Path(folder).name, hang_s=0.4 * timeout, flight_recorder=False)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{scratch}/store", program.ranks),
        rank=rank,
        world_size=program.ranks,
        timeout=limit,
    )
    try:
        program.run(suites().Case(rank, program.ranks, fault, scratch))
    except Exception as error:
        from dl2gpu.record.state import process

        recorder = process.recorder
        if recorder is not None:
            recorder.ends_with(error)
        if recorder is not None and recorder.frozen:  # its communication broke
            print(f"failed: {error}", flush=True)
            os._exit(FAILED)
        raise


FAILED = 17
"""Exit status of a rank whose communication broke, as a hang or a dead peer does to the others."""


class Job:
    """One run: its processes, from their start to its label.

    Processes are forked by the main thread, which alone watches over them: a fork that is made
    beside other threads may inherit a lock that nobody will open.
    """

    def __init__(self, program: Any, fault: Any, out: Path, timeout: float) -> None:
        self.program, self.fault, self.timeout = program, fault, timeout
        self.name = program.name + (f".{fault.name}" if fault else "")
        self.folder = out / self.name
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.scratch = tempfile.mkdtemp()
        self.begun = time.monotonic()
        self.broken: float | None = None
        self.children = [
            CONTEXT.Process(
                target=one_rank,
                args=(program.name, fault, rank, str(self.folder), self.scratch, timeout),
            )
            for rank in range(program.ranks)
        ]
        for child in self.children:
            child.start()

    def over(self) -> bool:
        """Have all processes ended, or is it time to end those that have not.

        A rank that is still there when the others have failed, and had the timeout to find that
        out, is one that they had been waiting for.
        """
        now = time.monotonic()
        if self.broken is None and any(c.exitcode not in (None, 0) for c in self.children):
            self.broken = now
        return (
            not any(child.is_alive() for child in self.children)
            or now - self.begun > 90
            or (self.broken is not None and now - self.broken > 1.5 * self.timeout)
        )

    def end(self) -> dict[str, Any]:
        """The label; written beside the record. Raises RuntimeError if it is not to be had."""
        words = {0: "finished", FAILED: "failed"}
        ends = [
            "killed" if child.is_alive() else words.get(child.exitcode or 0, "crashed")
            for child in self.children
        ]
        for child in self.children:
            if child.is_alive():
                child.kill()
            child.join()
        logs = [
            Path(f"{self.scratch}/rank_{r}.log").read_text()[-1500:].strip()
            for r in range(self.program.ranks)
        ]
        shutil.rmtree(self.scratch)
        try:
            label: dict[str, Any] = suites().expectation(self.program, self.fault, ends)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n" + "\n".join(logs)) from None
        label["title"] = self.fault.title if self.fault else "healthy"
        label["log"] = [log.splitlines()[-1][:200] if log else "" for log in logs]
        (self.folder / "expect.json").write_text(json.dumps(label, indent=1) + "\n")
        return label


def pack(folder: Path) -> None:
    """Keeps the records, compressed, and the label."""
    for path in list(folder.iterdir()):
        if path.suffix == ".jsonl":
            with gzip.GzipFile(f"{path}.gz", "wb", mtime=0) as file:
                file.write(path.read_bytes())
        if path.name != "expect.json":
            path.unlink()


def relabel(program: Any, fault: Any, out: Path) -> None:
    """Writes a run's label anew, from what it did then."""
    path = out / (program.name + (f".{fault.name}" if fault else "")) / "expect.json"
    if path.exists():
        old = json.loads(path.read_text())
        label = suites().expectation(program, fault, old["ends"])
        label |= {"title": fault.title if fault else "healthy", "log": old["log"]}
        path.write_text(json.dumps(label, indent=1) + "\n")


def chosen(programs: dict[str, Any], only: Iterable[str]) -> list[tuple[Any, Any]]:
    """(program, fault) of the runs whose names begin with one of ``only``; None = healthy."""
    begins = tuple(only)
    runs = [(p, fault) for p in programs.values() for fault in (None, *p.faults)]
    return [
        (p, f)
        for p, f in runs
        if not begins or (p.name + (f".{f.name}" if f else "")).startswith(begins)
    ]


def main() -> int:
    """Runs what the arguments say; 1 where a run did not do what it had to."""
    parser = argparse.ArgumentParser(description="Run the live suites and record them.")
    parser.add_argument("--out", type=Path, required=True, help="folder for records and labels")
    parser.add_argument("--only", nargs="*", default=(), help="runs whose names begin so")
    parser.add_argument("--list", action="store_true", help="name the runs, and do nothing")
    parser.add_argument(
        "--relabel", action="store_true", help="labels anew, of runs that are there"
    )
    parser.add_argument("--timeout", type=float, default=8.0, help="of process groups, in seconds")
    parser.add_argument("--jobs", type=int, default=3, help="jobs at once; most of them wait")
    parser.add_argument("--plain", action="store_true", help="do not compress the records")
    args = parser.parse_args()
    runs = chosen(load(), args.only)
    if args.relabel:
        for program, fault in runs:
            relabel(program, fault, args.out)
        return 0
    if args.list:
        print("\n".join(p.name + (f".{f.name}" if f else "") for p, f in runs))
        return 0
    todo = list(reversed(runs))
    running: list[Job] = []
    wrong = 0
    while todo or running:
        while todo and len(running) < args.jobs:
            program, fault = todo.pop()
            running.append(Job(program, fault, args.out, args.timeout))
        time.sleep(0.05)
        for job in [job for job in running if job.over()]:
            running.remove(job)
            try:
                label = job.end()
            except RuntimeError as error:
                wrong += 1
                print(f"WRONG  {error}", flush=True)
                continue
            if not args.plain:
                pack(job.folder)
            word = "stuck" if label["stuck"] else "done"
            print(f"{word:5}  {label['id']}  {label['ends']}", flush=True)
    print(f"{len(runs) - wrong} of {len(runs)} runs recorded in {args.out}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
