"""Jobs of PyTorch on gloo, recorded: each operation once, ends, hangs, and no other results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import dl2gpu
from dl2gpu.record.launch import environment
from dl2gpu.record.settings import Settings

pytest.importorskip("torch.distributed", reason="needs PyTorch (the extra 'record')")

ROOT = Path(__file__).resolve().parents[2]

BEGIN = """
import datetime, os, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group(
    "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
    timeout=datetime.timedelta(seconds=60),
)
ones = torch.ones
"""


def own(output: str) -> str:
    """What a program printed, without what gloo (of PyTorch 2.8) says of itself."""
    return "".join(line for line in output.splitlines(True) if not line.startswith("[Gloo]"))


class Job:
    """A program run by some processes, one a rank, below the recorder or not."""

    def __init__(self, folder: Path, text: str, ranks: int, *, record: bool = True, **given: Any):
        folder.mkdir(exist_ok=True)
        script = folder / "program.py"
        script.write_text(BEGIN + text)
        self.trace = folder / "trace"
        settings = Settings(str(self.trace), **given)
        env = environment(settings) if record else dict(os.environ)
        env["PYTHONPATH"] = f"{env.get('PYTHONPATH', '')}{os.pathsep}{ROOT}"
        self.children = [
            subprocess.Popen(
                [sys.executable, str(script), str(folder / "store"), str(rank), str(ranks)],
                env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def finish(self) -> list[str]:
        """Standard output of each rank, which all have to end well."""
        outs = [child.communicate(timeout=180) for child in self.children]
        assert [c.returncode for c in self.children] == [0] * len(outs), [
            e[-2000:] for _, e in outs
        ]
        return [own(out) for out, _ in outs]

    def end(self) -> None:
        for child in self.children:
            child.kill()
            child.communicate()

    def lines(self, rank: int) -> list[dict[str, Any]]:
        path = self.trace / f"rank_{rank}.jsonl"
        if not path.exists():
            return []
        text = path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def ops(self, rank: int) -> list[dict[str, Any]]:
        return [line for line in self.lines(rank) if line["kind"] == "op"]

    def wait_for(self, what: Any, seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < until, [self.lines(r)[-2:] for r in range(len(self.children))]
            time.sleep(0.1)


def report(folder: Path) -> Any:
    return dl2gpu.scan([str(folder)])


EVERYTHING = """
import torch.distributed._functional_collectives as functional
work = dist.all_reduce(ones(4), async_op=True)
work.wait()
work.wait()
with torch.inference_mode():
    dist.all_reduce(ones(3), op=dist.ReduceOp.MAX)
print(functional.all_reduce(ones(5), "sum", dist.group.WORLD) + 1)
dist.broadcast(ones(2), 1)
net = torch.nn.Linear(4, 4)
with torch.no_grad():
    net.weight.fill_(0.5)
model = torch.nn.parallel.DistributedDataParallel(net)
for step in range(3):
    model(ones(2, 4) * (rank + 1)).sum().backward()
print(net.weight.grad)
if rank == 0:
    dist.send(ones(4), 1, tag=7)
else:
    dist.recv(torch.empty(4), tag=7)
half = dist.new_group([1])
both = dist.new_group([0, 1], group_desc="both")
dist.barrier(both)
ops = [dist.P2POp(dist.isend, ones(4), 1 - rank), dist.P2POp(dist.irecv, torch.empty(4), 1 - rank)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
dist.all_gather_object([None, None], rank)
out = torch.empty(4)
dist.all_to_all_single(out, ones(4) * rank, [2, 2], [2, 2])
print(out)
works = [dist.all_reduce(ones(2), async_op=True) for _ in range(2)]
while not works[1].is_completed():
    time.sleep(0.01)
torch.futures.collect_all([works[0].get_future()]).wait()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[str], list[str]]:
    folder = tmp_path_factory.mktemp("everything")
    recorded = Job(folder / "a", EVERYTHING, 2)
    plain = Job(folder / "b", EVERYTHING, 2, record=False)
    return recorded, recorded.finish(), plain.finish()


def test_results_are_the_same(everything: tuple[Job, list[str], list[str]]) -> None:
    _, recorded, plain = everything
    assert recorded == plain


def test_each_operation_is_recorded_once(everything: tuple[Job, list[str], list[str]]) -> None:
    job = everything[0]
    found = [o["op"] for o in job.ops(1) if o["op"] != "wait"]
    # DDP: shapes are compared, parameters sent; a bucket a step, and its order after the first
    ddp = ["all_gather", "broadcast", "broadcast", "all_reduce", "broadcast", "broadcast"]
    assert found == [
        "all_reduce", "all_reduce", "all_reduce", "broadcast", *ddp, "all_reduce", "all_reduce",
        "recv", "comm_create", "comm_create", "barrier", "send", "recv", "all_gather", "all_gather",
        "all_to_all_v", "all_reduce", "all_reduce",
    ]  # fmt: skip
    assert [o["op"] for o in job.ops(0) if o["op"] != "wait"] == [
        "send" if i == 12 else op for i, op in enumerate(found)
    ]


def test_each_request_is_waited_for_once(everything: tuple[Job, list[str], list[str]]) -> None:
    job = everything[0]
    for rank in (0, 1):
        ops = job.ops(rank)
        # who is not in a group does not wait for it to be made
        issued = [o["request"] for o in ops if "request" in o and o["op"] != "comm_create"]
        waited = Counter(r for o in ops if o["op"] == "wait" for r in o["requests"])
        assert set(waited) == set(issued)
        assert set(waited.values()) == {1}
        for position, op in enumerate(ops):
            if op["op"] == "wait":
                before = {o.get("request") for o in ops[:position]}
                assert set(op["requests"]) <= before


def test_what_is_written_of_an_operation(everything: tuple[Job, list[str], list[str]]) -> None:
    job = everything[0]
    ops = job.ops(1)
    assert {o["reduce_op"] for o in ops if o["op"] == "all_reduce"} == {"sum", "max"}
    recv = next(o for o in ops if o["op"] == "recv")
    assert (recv["peer"], recv["tag"], recv["matched_peer"], recv["bytes"]) == ("any", 7, 0, 16)
    uneven = next(o for o in ops if o["op"] == "all_to_all_v")
    assert uneven["splits"] == [2, 2]
    made = [o for o in ops if o["op"] == "comm_create"]
    assert [o["new_comm"] for o in made] == ["1#0", "0,1#1"]
    assert [o["blocking"] for o in made] == [True, True]
    assert [o["blocking"] for o in job.ops(0) if o["op"] == "comm_create"] == [False, True]
    assert {o["comm"] for o in ops if o["op"] == "barrier"} == {"0,1#1"}
    comms = {line["id"]: line for line in job.lines(1) if line["kind"] == "comm"}
    assert comms["0,1#1"]["desc"] == "both"
    backward = [o for o in ops if o["op"] == "all_reduce" and o["count"] == 20]
    line = (job.trace.parent / "program.py").read_text().splitlines()
    assert len(backward) == 3
    for op in backward:
        assert "backward()" in line[int(op["stack"][0].rpartition(":")[2]) - 1]
    assert job.lines(1)[-1]["exit"] == "finished"


def test_the_job_is_healthy(everything: tuple[Job, list[str], list[str]]) -> None:
    jobs = report(everything[0].trace).jobs.to_dicts()
    assert [(j["verdict"], j["deadlocked"], j["ranks_present"]) for j in jobs] == [
        ("healthy", False, [0, 1])
    ]


def test_a_hang_is_marked_and_explained(tmp_path: Path) -> None:
    text = """
dist.barrier()
if rank != 2:
    dist.all_reduce(ones(4))
time.sleep(600)
"""
    job = Job(tmp_path, text, 3, hang_s=2.0, analyse=True)
    try:
        job.wait_for((job.trace / "report/report.json").exists)
        assert [job.lines(r)[-1]["exit"] for r in range(3)] == ["alive"] * 3
        assert [job.ops(r)[-1]["op"] for r in range(3)] == ["wait"] * 3
        assert "in all_reduce" in (job.trace / "rank_0.stacks.txt").read_text()
        assert "in <module>" in (job.trace / "rank_2.stacks.txt").read_text()
        said = json.loads((job.trace / "report/report.json").read_text())
        assert [(f["kind"], f["culprits"]) for f in said["findings"]] == [("stalled_rank", [2])]
    finally:
        job.end()


def test_a_rank_that_goes_on_takes_its_mark_back(tmp_path: Path) -> None:
    text = "dist.barrier()\ntime.sleep(3)\ndist.barrier()\n"
    job = Job(tmp_path, text, 2, hang_s=0.5)
    job.finish()
    assert (job.trace / "rank_0.stacks.txt").stat().st_size
    for rank in range(2):
        kinds = [line["kind"] for line in job.lines(rank)]
        assert kinds == ["header", "comm", "op", "op", "op", "op", "end"]
        assert job.lines(rank)[-1]["exit"] == "finished"


def test_stacks_on_a_signal(tmp_path: Path) -> None:
    job = Job(tmp_path, "if rank == 0:\n    dist.barrier()\ntime.sleep(600)\n", 2, hang_s=0)
    try:
        job.wait_for(lambda: job.ops(0) and job.ops(0)[-1]["op"] == "wait")
        job.children[0].send_signal(signal.SIGUSR2)
        job.wait_for(lambda: job.lines(0)[-1]["kind"] == "end")
        assert "in barrier" in (job.trace / "rank_0.stacks.txt").read_text()
        assert job.children[0].poll() is None
    finally:
        job.end()


def test_a_killed_rank_leaves_its_prefix_and_is_named(tmp_path: Path) -> None:
    text = """
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), 9)
dist.barrier()
"""
    job = Job(tmp_path, text, 3)
    job.children[1].communicate()
    try:
        job.wait_for(lambda: all(job.lines(r)[-1]["kind"] == "end" for r in range(3)))
        assert len(job.ops(1)) == 2
        assert job.lines(1)[-1]["exit"] == "killed"
        findings = report(job.trace).findings.to_dicts()
        assert [(f["kind"], f["culprits"]) for f in findings] == [("crashed_rank", [1])]
    finally:
        job.end()


def test_an_exception_is_a_crash_with_its_code(tmp_path: Path) -> None:
    job = Job(tmp_path, "dist.barrier()\nassert rank == 0\n", 2)
    for child in job.children:
        child.communicate()
    assert [c.returncode for c in job.children] == [0, 1]
    assert [(job.lines(r)[-1]["exit"], job.lines(r)[-1]["code"]) for r in (0, 1)] == [
        ("finished", 0), ("crashed", 1),
    ]  # fmt: skip


def test_an_interrupted_rank_was_alive(tmp_path: Path) -> None:
    text = "print('here', flush=True)\nif rank == 0:\n    dist.barrier()\ntime.sleep(600)\n"
    job = Job(tmp_path, text, 2)
    try:
        assert job.children[1].stdout is not None
        assert "here\n" in iter(job.children[1].stdout.readline, "")
        job.children[1].send_signal(signal.SIGINT)
        job.children[1].wait()
        assert job.lines(1)[-1]["exit"] == "alive"
    finally:
        job.end()


def test_a_worker_that_is_ended_is_not_the_rank(tmp_path: Path) -> None:
    text = """
import multiprocessing, signal
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
worker.start()
time.sleep(0.5)
worker.terminate()
worker.join()
assert worker.exitcode == -signal.SIGTERM
dist.barrier()
"""
    job = Job(tmp_path, text, 2)
    job.finish()
    assert {p.name for p in job.trace.iterdir()} == {"rank_0.jsonl", "rank_1.jsonl"}
    assert [o["op"] for o in job.ops(0)] == ["barrier", "wait"]


def test_a_job_that_is_told_to_end_was_alive(tmp_path: Path) -> None:
    job = Job(tmp_path, "if rank == 0:\n    dist.barrier()\ntime.sleep(600)\n", 2, hang_s=0)
    try:
        job.wait_for(lambda: job.ops(0) and job.ops(0)[-1]["op"] == "wait" and job.lines(1))
        job.children[0].terminate()
        job.children[0].communicate()
        assert "in barrier" in (job.trace / "rank_0.terminated.txt").read_text()
        assert job.children[0].returncode == -signal.SIGTERM
        job.wait_for(lambda: job.lines(0)[-1]["kind"] == "end")
        assert job.lines(0)[-1]["exit"] == "alive"
    finally:
        job.end()


def test_the_dump_of_flight_recorder_is_kept_where_it_has_more_to_say(tmp_path: Path) -> None:
    text = """
dist.barrier()
from dl2gpu.record import watch
from dl2gpu.record.state import process
for backend in ("gloo", "nccl"):
    process.recorder.backend = backend
    watch._keep_flight_recorder(process.recorder)
    print((process.settings.folder / "flight_recorder").exists())
c10d = torch._C._distributed_c10d
print(hasattr(c10d, "_dump_fr_trace") and not hasattr(c10d, "_dump_nccl_trace"))
"""
    job = Job(tmp_path, text, 2)
    *_, kept, of_gloo = job.finish()[1].split()
    if of_gloo == "False":
        pytest.skip("the dump of this PyTorch is NCCL's, or it keeps none of gloo")
    assert kept == "True"
    assert job.ops(0)[0]["op"] == "barrier"
    # one job, of which the record stands; that gloo's states say nothing is noticed
    found = report(job.trace)
    assert {j["job"]: j["events"] for j in found.jobs.to_dicts()} == {"trace": 4}
    of_dumps = [i for i in found.inputs.to_dicts() if "flight_recorder" in i["path"]]
    assert len(of_dumps) == 2
    assert {i["reason"] for i in of_dumps} == {
        "its states are not used: nothing is ever complete in it, as with gloo"
    }


def test_two_lines_in_a_script(tmp_path: Path) -> None:
    text = f"""
dist.barrier()
import dl2gpu.record
dl2gpu.record.start({str(tmp_path / "late")!r}, job="late")
dist.barrier()
dl2gpu.record.stop()
dist.barrier()
"""
    job = Job(tmp_path, text, 2, record=False)
    job.trace = tmp_path / "late"
    job.finish()
    for rank in range(2):
        assert job.lines(rank)[0]["job"] == "late"
        assert [o["op"] for o in job.ops(rank)] == ["barrier", "wait"]


def test_a_folder_that_cannot_be_made_harms_nobody(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file")
    job = Job(tmp_path, "dist.barrier()\nprint('well')\n", 2)
    outs = [child.communicate(timeout=180) for child in job.children]
    assert [own(out) for out, _ in outs] == ["well\n"] * 2
    assert all(err.count("nothing is recorded") == 1 for _, err in outs)


def test_below_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [
            sys.executable, "-m", "dl2gpu", "record", "--out", str(tmp_path / "job"), "--analyse",
            "--", *command, str(script),
        ],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert {p.name for p in (tmp_path / "job").iterdir()} == {"rank_0.jsonl", "rank_1.jsonl"}
    assert "healthy" in done.stdout
