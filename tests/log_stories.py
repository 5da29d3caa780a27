"""Stories of jobs for :mod:`log_writer`, each with what the report must and must not say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from log_writer import (
    AGES,
    DEFAULT_PG,
    Story,
    at,
    head,
    observed,
    timeout,
    torchrun_failure,
    traceback,
)

T = 700.0


@dataclass(frozen=True)
class Expected:
    kinds: tuple[str, ...]
    """One of these is found."""
    deadlocked: tuple[bool | None, ...]
    culprits: frozenset[int] | None = None
    """Exactly these; None: does not matter."""
    innocent: frozenset[int] = frozenset()
    needs_ranks: bool = False
    """Only where the launcher says which rank printed a line."""
    ages: tuple[str, ...] = AGES[1:]
    per_rank: bool = True
    """May each rank have a file of its own?"""


Tell = Callable[[str], Story]
STORIES: dict[str, tuple[Tell, Expected]] = {}


def story(expected: Expected) -> Callable[[Tell], Tell]:
    def add(tell: Tell) -> Tell:
        STORIES[tell.__name__] = (tell, expected)
        return tell

    return add


def _all(s: Story, age: str, ranks: range | list[int], seq: int, op: str, n: int) -> None:
    for r in ranks:
        timeout(s, age, T + r * 0.1, r, seq, op, n)


@story(Expected(("mismatch",), (True,), frozenset(), ages=AGES))
def two_operations(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    timeout(s, age, T, 0, 55, "BROADCAST", 34112)
    _all(s, age, range(1, 4), 55, "ALLREDUCE", 25)
    return s


@story(Expected(("mismatch",), (True,), frozenset()))
def two_sizes(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    _all(s, age, [0, 1, 3], 900, "ALLREDUCE", 4096)
    timeout(s, age, T, 2, 900, "ALLREDUCE", 8192)
    return s


@story(Expected(("in_flight",), (False,), frozenset(), ages=AGES))
def all_present(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    _all(s, age, range(4), 4096, "ALLREDUCE", 1310720)
    torchrun_failure(s, T + 70, 0, -6, [1, 2, 3])
    return s


@story(Expected(("missing_participant",), (None,), frozenset({2}), ages=AGES[2:]))
def silent_rank(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    _all(s, age, [0, 1, 3], 4410, "ALLREDUCE", 1024)
    observed(s, age, T + 1, 2, 0, 4409)
    return s


@story(
    # without a time on its lines nothing says that they are later than those of other files
    Expected(
        ("stalled_rank", "missing_participant"), (False, None), frozenset({1}), needs_ranks=True,
        ages=AGES[2:],
    )
)  # fmt: skip
def late_rank(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    _all(s, age, [0, 2, 3], 77, "ALLREDUCE", 1024)
    for i in range(30):
        s.say(60 + 30 * i, 1, f"saving checkpoint shard {i} of 30 to /ckpt")
    return s


@story(Expected(("crashed_rank",), (False,), frozenset({2}), needs_ranks=True, ages=AGES))
def exception_first(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    traceback(s, 41.0, 2, "ValueError: Expected input batch_size (8) to match target (4).")
    _all(s, age, [0, 1, 3], 1093, "ALLREDUCE", 16777216)
    torchrun_failure(s, T + 70, 0, -6, [1, 3])
    return s


@story(Expected(("crashed_rank",), (False,), frozenset({1}), ages=AGES))
def killed_by_the_system(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    _all(s, age, [0, 2, 3], 12, "ALLREDUCE", 128)
    torchrun_failure(s, T + 70, 1, -9, [0, 2, 3])
    return s


@story(Expected(("crashed_rank",), (False,), frozenset({3})))
def segmentation_fault(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    torchrun_failure(s, 45.0, 3, -11, [0, 1, 2])
    return s


@story(Expected(("crashed_rank",), (False,), frozenset({1}), ages=AGES[2:]))
def device_error(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    s.say(42, 1, head(age, 42, 1) + (
        "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with "
        "exception: CUDA error: an illegal memory access was encountered"
    ), raw=True)  # fmt: skip
    _all(s, age, [0, 2, 3], 812, "_ALLGATHER_BASE", 2048)
    return s


@story(Expected(("insufficient_evidence", "missing_participant"), (None,), innocent=frozenset({0})))
def stopped_with_the_first(age: str) -> Story:
    # the launcher stops the others a moment after the first gave up: their silence says nothing
    s = Story(4).steps(1, 20, ranks=range(4))
    timeout(s, age, T, 0, 33, "ALLREDUCE", 64)
    torchrun_failure(s, T + 0.5, 0, -6, [1, 2, 3])
    return s


@story(Expected(("healthy",), (False,), frozenset(), ages=("2.6",)))
def loud_exit(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    for r in range(4):
        s.say(50, r, f"rank={r} Training complete")
    for r in range(4):
        s.say(51 + r, r, head(age, 51 + r, r, "W") + (
            "[PG ID 0 PG GUID 0(default_pg) Rank 1] Failed to check the \"should dump\" flag on "
            "TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe"
        ), raw=True)  # fmt: skip
    traceback(s, 60, 2, "ConnectionResetError: [Errno 104] Connection reset by peer")
    return s


@story(Expected(("healthy",), (False,), frozenset(), ages=AGES, per_rank=False))
def old_log_shown(age: str) -> Story:
    # a job that prints the log of an earlier one, and then runs
    s = Story(4)
    old = Story(4)
    timeout(old, age, T, 0, 55, "BROADCAST", 34112)
    timeout(old, age, T, 1, 55, "ALLREDUCE", 25)
    for line in old.lines:
        s.say(1.0, None, line.text, raw=True)
    return s.steps(1, 40, t=10_000.0, ranks=range(4)).say(10_100, 0, "training finished: 40 steps")


@story(Expected(("healthy",), (False,), frozenset(), ages=AGES))
def quoted(age: str) -> Story:
    s = Story(2).steps(1, 20, ranks=range(2))
    other = Story(2)
    timeout(other, age, T, 0, 55, "BROADCAST", 34112)
    timeout(other, age, T, 1, 55, "ALLREDUCE", 25)
    for i, line in enumerate(other.lines):
        s.say(
            20.5 + i * 0.1, 0, f'[sample {i}] prompt: "why does it hang? {line.text}" target: "?"'
        )
        s.say(
            20.5 + i * 0.1, 1, f"sample {i} question: I see this in my log, what now: {line.text}"
        )
    return s.say(60, 0, "training finished: 20 steps")


@story(Expected(("mismatch",), (True,), frozenset(), ages=("2.6",)))
def fingerprints(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    options = (
        "TensorDtypes={}, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, "
        "layout=Strided (default), requires_grad=false (default), pinned_memory=false (default), "
        "memory_format=(nullopt)))"
    )
    traceback(s, 50, 1, (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running "
        "collective: CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[4, 8],"
        f" {options.format('Float')}, but Rank 3 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[4, 9], "
        f"{options.format('Float')}.Collectives differ in the following aspects: \t Tensor Tensor "
        "shapes: 4, 8vs 4, 9"
    ))  # fmt: skip
    return s


@story(Expected(("missing_participant",), (None,), frozenset({3}), ages=("2.6",)))
def barrier_names_the_absent(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    traceback(
        s, T, 0, "RuntimeError: [Rank 0]: Ranks 3 failed to pass monitoredBarrier in 600000 ms"
    )
    for r in (1, 2):
        traceback(s, T + r, r, (
            f"RuntimeError: Rank {r} successfully reached monitoredBarrier, but received errors "
            "while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n "
            "Original exception: \n[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] "
            "Connection closed by peer [127.0.0.1]:5000"
        ))  # fmt: skip
    return s


@story(Expected(("missing_participant",), (None,), frozenset({1}), needs_ranks=True, ages=("2.6",)))
def desync_never_joined(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    for r in (0, 2, 3):
        timeout(s, age, T + r, r, 77, "ALLREDUCE", 1024)
        s.say(T + r, r, (
            f"\n\t - [{r}] Timeout at collective: ALLREDUCE, #78\n\t - To our best knowledge, the "
            "lagging/dead/mismatched ranks that caused the desync are:\n\t   - [1] finished "
            "collective #77, but didn't join collective #78 (count from 1)\n\t - Snapshot of "
            "ranks' latest states:\n\t   #78 started ranks:\n\t     [0, 2, 3] started ALLREDUCE\n"
            "\t   #77 finished ranks:\n\t     [1] finished ALLREDUCE\n"
        ), raw=True)  # fmt: skip
    return s


@story(Expected(("missing_participant",), (None,), frozenset({2}), ages=("2.6",)))
def store_barrier(age: str) -> Story:
    s = Story(4)
    s.say(0, 2, "rank=2 downloading tokenizer from mirror")
    for r in (0, 1, 3):
        s.say(10, r, (
            "INFO:torch.distributed.distributed_c10d:Waiting in store based barrier to initialize "
            f"process group for rank: {r}, key: store_based_barrier_key:1 (world_size=4, "
            "worker_count=3, timeout=0:30:00)"
        ))  # fmt: skip
        traceback(s, 1800 + r, r, (
            "RuntimeError: Timed out initializing process group in store based barrier on rank: "
            f"{r}, for key: store_based_barrier_key:1 (world_size=4, worker_count=3, "
            "timeout=0:30:00)"
        ))  # fmt: skip
    return s


@story(Expected(("missing_participant",), (None,), frozenset({1}), ages=("2.6",)))
def horovod_missing_ranks(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    for i in range(3):
        s.say(100 + 60 * i, 0, (
            f"[{at(100 + 60 * i):%Y-%m-%d %H:%M:%S}.123: W horovod/common/stall_inspector.cc:107] "
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset "
            "of ranks and are waiting for remainder of ranks for more than 60 seconds. This may "
            "indicate that different ranks are trying to submit different tensors or that only "
            "subset of ranks is submitting tensors, which will cause deadlock. \nMissing ranks:\n"
            "1: [allreduce.bn1.bias, allreduce.bn1.weight, allreduce.conv1.weight ...]"
        ))  # fmt: skip
    return s


@story(Expected(("healthy",), (False,), frozenset(), ages=("2.6",)))
def horovod_stall_that_passed(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    s.say(100, 0, (
        "WARNING: One or more tensors were submitted to be reduced, gathered or broadcasted by "
        "subset of ranks and are waiting for remainder of ranks for more than 60 seconds. Stalled "
        "ops:allreduce.bn1.bias [missing ranks: 1]"
    ))  # fmt: skip
    return s.steps(21, 20, t=200, ranks=range(4))


@story(Expected(("order_inversion",), (None,), frozenset(), ages=("2.5", "2.6", "newest")))
def two_groups_crossed(age: str) -> Story:
    s = Story(2).steps(1, 20, ranks=range(2))
    timeout(s, age, T, 0, 10, "_ALLGATHER_BASE", 64, 128, pg=(1, "tp"))
    timeout(s, age, T, 1, 10, "_ALLGATHER_BASE", 32, 64, pg=(2, "dp"))
    return s


@story(Expected(("insufficient_evidence",), (None,), frozenset(), ages=("2.5", "2.6")))
def receive_alone(age: str) -> Story:
    s = Story(2).steps(1, 20, ranks=range(2))
    timeout(s, age, T, 1, 212, "RECV", 4096)
    return s


@story(Expected(("unmatched_p2p",), (None,), frozenset(), ages=("2.5", "2.6", "newest")))
def send_alone(age: str) -> Story:
    s = Story(2).steps(1, 20, ranks=range(2))
    timeout(s, age, T, 0, 88, "SEND", 4096)
    observed(s, age, T + 1, 1, 0, 87)
    return s


@story(Expected(("in_flight",), (False,), frozenset(), ages=("2.3", "2.6")))
def garbage_counters(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    for r in range(4):
        timeout(
            s, age, T + r, r, 500, "ALLREDUCE", 77, completed=(3452013982, 76280750235782912)[r % 2]
        )
    return s


@story(Expected(("missing_participant",), (None,), frozenset({1}), ages=("2.6",), needs_ranks=True))
def gloo_peer_finished(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    s.say(45, 1, "rank=1 epoch 0 done: 20 batches")
    for r in (0, 2, 3):
        traceback(s, 1900 + r, r, (
            "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
            "Timed out waiting 1800000ms for recv operation to complete"
        ))  # fmt: skip
    return s


@story(Expected(("crashed_rank",), (False,), frozenset({2}), ages=("2.6",), needs_ranks=True))
def restarted_and_healthy(age: str) -> Story:
    s = exception_first(age)
    stamp = at(T + 90).strftime("%m%d %H:%M:%S.%f")
    s.say(T + 90, None, (
        f"I{stamp} 2606 torch/distributed/elastic/agent/server/api.py:872] [default] Worker group "
        "FAILED. 3/3 attempts left; will restart worker group"
    ))  # fmt: skip
    return s.steps(1, 20, t=T + 100, ranks=range(4)).say(T + 200, 0, "training finished: 20 steps")


@story(Expected(("crashed_rank",), (False,), frozenset({2}), ages=("2.6",)))
def killed_by_slurm(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    s.say(50, None, "slurmstepd: error: Detected 1 oom_kill event in StepId=123.0. Some of the step"
          " tasks have been OOM Killed.")  # fmt: skip
    s.say(50, None, "srun: error: gpu-a11: task 2: Out Of Memory")
    return s


@story(Expected(("crashed_rank",), (False,), frozenset({1}), ages=("2.6",)))
def killed_under_mpirun(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    s.say(50, None, (
        "-" * 74 + "\nmpirun noticed that process rank 1 with PID 0 on node gpu-a11 exited on "
        "signal 9 (Killed).\n" + "-" * 74
    ))  # fmt: skip
    return s


@story(Expected(("healthy",), (False,), frozenset(), ages=("2.6",)))
def killed_by_the_user(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    torchrun_failure(s, 50, 0, -15, [1, 2, 3])
    return s


@story(Expected(("healthy",), (False,), frozenset(), ages=AGES, per_rank=False))
def appended_after_a_hang(age: str) -> Story:
    # ">>": the log of a run that hung, and of the next one, which ends well
    s = two_operations(age)
    return s.steps(1, 20, t=2000, ranks=range(4)).say(2100, 0, "training finished: 20 steps")


@story(Expected(("mismatch",), (True,), frozenset(), ages=AGES, per_rank=False))
def hang_appended_to_a_good_run(age: str) -> Story:
    s = Story(4).steps(1, 20, t=-2000, ranks=range(4)).say(-1900, 0, "training finished: 20 steps")
    s.lines += two_operations(age).lines
    return s


@story(Expected(("insufficient_evidence",), (None,), frozenset(), ages=("2.6",)))
def library_error_everywhere(age: str) -> Story:
    s = Story(4)
    for r in range(4):
        traceback(s, 10 + r, r, (
            "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
            "NCCLUtils.hpp:275, unhandled system error (run with NCCL_DEBUG=INFO for details), "
            "NCCL version 2.20.5"
        ))  # fmt: skip
    return s


@story(Expected(("healthy",), (False,), frozenset(), ages=("2.6",)))
def network_errors_of_others(age: str) -> Story:
    # a running job: uploads fail and are tried again
    s = Story(4).steps(1, 10, ranks=range(4))
    for i in range(3):
        traceback(s, 20.5 + i, 0, (
            "requests.exceptions.ConnectionError: ('Connection aborted.', "
            "ConnectionResetError(104, 'Connection reset by peer'))"
        ))  # fmt: skip
        s.say(21 + i, 0, "WARNING upload timed out after 30 s, retrying (2 left)")
    return s.steps(11, 10, t=30, ranks=range(4))


@story(
    # the old form names no group, and the ranks call themselves 0 and 1 twice: two groups of two
    Expected(
        ("insufficient_evidence", "in_flight", "mismatch"), (None, False), frozenset(),
        ages=("old",), needs_ranks=True,
    )
)  # fmt: skip
def two_groups_without_names(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    for r in range(4):
        timeout(s, age, T + r, r, 100, "ALLREDUCE", 4096 * (1 + r // 2), group_rank=r % 2)
    return s


@story(Expected(("missing_participant",), (None,), frozenset({0}), ages=("2.6",)))
def unique_id_never_set(age: str) -> Story:
    s = Story(4).steps(1, 2, ranks=range(4))
    s.say(10, 0, "rank=0 loading index /mnt/pool/index.bin")
    for r in (1, 2, 3):
        traceback(s, 700 + r, r, (
            f"torch.distributed.DistBackendError: [{r}] is setting up NCCL communicator and "
            "retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but "
            "store->get('0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0"
        ))  # fmt: skip
    return s


@story(Expected(("mismatch",), (True,), frozenset(), ages=("2.6",)))
def gloo_sizes(age: str) -> Story:
    s = Story(3).steps(1, 20, ranks=range(3))
    s.say(50, 2, (
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce "
        "fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= "
        "op.nbytes. 200 vs 128. Received data size doesn't match expected size. Is there a "
        "distributed collective mismatch in your code?"
    ))  # fmt: skip
    return s


@story(Expected(("insufficient_evidence",), (None,), frozenset(), ages=("2.6",)))
def vllm_waits(age: str) -> Story:
    s = Story(2).steps(1, 5, ranks=range(2))
    for i in range(5):
        s.say(100 + 60 * i, 0, (
            "INFO 03-26 10:05:00 shm_broadcast.py:466] No available shared memory broadcast block "
            "found in 60 seconds. This typically happens when some processes are hanging or doing "
            "some time-consuming work (e.g. compilation)."
        ))  # fmt: skip
    return s


@story(Expected(("potential",), (False,), frozenset({2}), ages=("2.6",)))
def fsdp_order(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    s.say(50, 2, (
        "/opt/venv/lib/python3.11/site-packages/torch/distributed/fsdp/_exec_order_utils.py:240: "
        "UserWarning: Forward order differs from that of the first iteration on rank 2 -- "
        "collectives are unchecked and may give incorrect results or hang"
    ))  # fmt: skip
    return s


@story(Expected(("missing_participant",), (None,), frozenset({2}), ages=("2.6",)))
def desync_lagging(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    for r in (0, 1, 3):
        timeout(s, age, T + r, r, 1, "ALLREDUCE", 1024)
        s.say(T + r, r, (
            f"\n\t - [{r}] Timeout at collective: ALLREDUCE, #1\n\t - To our best knowledge, ranks "
            "[2] are the lagging ranks that caused this timeout. They never joined any collectives"
            "\n\t - Snapshot of ranks' latest states:\n\t   #1 started ranks:\n\t     [0, 1, 3] "
            "started ALLREDUCE\n"
        ), raw=True)  # fmt: skip
    return s


@story(Expected(("in_flight",), (False,), frozenset(), ages=("2.3", "2.6"), needs_ranks=True))
def report_that_failed(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    for r in range(4):
        timeout(s, age, T + r, r, 300, "ALLREDUCE", 1024)
        s.say(T + r, r, head(age, T + r, r) + (
            "Failed to retrieve TORCH_NCCL_DESYNC_DEBUG report. Please file an issue. Error: "
            "thisCol == thatCol INTERNAL ASSERT FAILED at TraceUtils.h:197, please report a bug"
        ), raw=True)  # fmt: skip
    return s


@story(Expected(("missing_participant",), (None,), frozenset({2}), ages=("2.6",)))
def barrier_of_fingerprints(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    traceback(s, T, 0, (
        "RuntimeError: ProcessGroupWrapper: Monitored Barrier encountered error running "
        "collective: CollectiveFingerPrint(SequenceNumber=12, OpType=ALLREDUCE, TensorShape=[4], "
        "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda, "
        "layout=Strided (default), requires_grad=false (default), pinned_memory=false (default), "
        "memory_format=(nullopt))). Error: \n[Rank 0]: Rank 2 failed to pass monitoredBarrier in "
        "600000 ms\n Original exception: \n[/pytorch/gloo/transport/tcp/unbound_buffer.cc:84] "
        "Timed out waiting 600000ms for recv operation to complete"
    ))  # fmt: skip
    for r in (1, 3):
        traceback(s, T + r, r, (
            f"RuntimeError: Rank {r} successfully reached monitoredBarrier, but received errors "
            "while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank."
        ))  # fmt: skip
    return s


@story(Expected(("in_flight",), (False,), frozenset(), ages=("2.5", "2.6")))
def small_group_complete(age: str) -> Story:
    # a group of two of four ranks says its size when it is made
    s = Story(4)
    for r in range(4):
        for pg, size in ((DEFAULT_PG, 4), ((1 + r // 2, "tp"), 2)):
            s.say(0, r, head(age, 0, r, "I") + (
                f"[PG ID {pg[0]} PG GUID {pg[0]}({pg[1]}) Rank {r % size}] ProcessGroupNCCL "
                f"initialization options: size: {size}, global rank: {r}, TIMEOUT(ms): 600000, "
                f"USE_HIGH_PRIORITY_STREAM: 0, SPLIT_FROM: 0, SPLIT_COLOR: 0, PG Name: {pg[0]}"
            ), raw=True)  # fmt: skip
    s.steps(1, 20, ranks=range(4))
    for r in (0, 1):
        timeout(s, age, T + r, r, 42, "ALLREDUCE", 64, pg=(1, "tp"), group_rank=r)
    return s


@story(Expected(("missing_participant",), (None,), frozenset({0}), ages=AGES[2:], needs_ranks=True))
def left_before_the_last_barrier(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4)).say(45, 0, "rank=0 Training complete")
    for r in (1, 2, 3):
        timeout(s, age, T + r, r, 500, "ALLREDUCE", 1)
    return s


@story(Expected(("insufficient_evidence",), (None,), frozenset(), ages=("2.6",)))
def stood_until_it_was_cancelled(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    return s.say(40_000, None, (
        f"slurmstepd: error: *** STEP 123.0 ON gpu-a11 CANCELLED AT {at(40_000):%Y-%m-%dT%H:%M:%S} "
        "DUE TO TIME LIMIT ***"
    ))  # fmt: skip


@story(Expected(("healthy",), (False,), frozenset(), ages=("2.6",)))
def ran_until_it_was_cancelled(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    return s.say(41, None, (
        f"slurmstepd: error: *** STEP 123.0 ON gpu-a11 CANCELLED AT {at(41):%Y-%m-%dT%H:%M:%S} "
        "DUE TO TIME LIMIT ***"
    ))  # fmt: skip


@story(Expected(("healthy",), (False,), frozenset(), ages=("2.6",), needs_ranks=True))
def service_that_answers_errors(age: str) -> Story:
    # no steps; requests fail and are answered
    s = Story(2)
    s.say(0, 0, "world_size=2 serving on port 8000")
    s.say(0, 0, "[W socket.cpp:697] [c10d] The client socket has failed to connect to [localhost]:"
          "29500 (errno: 99 - Cannot assign requested address).")  # fmt: skip
    s.say(0, 1, "faulthandler is enabled for SIGSEGV, SIGBUS and SIGABRT")
    s.say(1, 1, "installed handler: Signal: SIGTERM saves a checkpoint first")
    for i in range(40):
        t = 10.0 + 30 * i
        s.say(t, 1, f"{at(t):%Y-%m-%d %H:%M:%S} worker 1 answered request {i} in 120 ms")
        if i % 10 == 5:
            traceback(s, t + 1, 1, "ValueError: prompt is longer than the model takes")
    return s


@story(Expected(("healthy",), (False,), frozenset(), ages=("2.6",)))
def memory_short_and_handled(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    s.say(20.5, 2, "WARNING: ran out of memory with exception: CUDA out of memory. Tried to "
          "allocate 2.00 GiB. Skipping batch")  # fmt: skip
    return s.say(60, 0, "training finished: 20 steps")


@story(Expected(("mismatch",), (True,), frozenset(), ages=AGES, needs_ranks=True))
def early_traceback_is_not_the_cause(age: str) -> Story:
    s = Story(4)
    traceback(s, -10, 2, "ModuleNotFoundError: No module named 'apex'")
    s.say(-9, 2, "apex is not there: fused kernels are off")
    s.steps(1, 20, ranks=range(4))
    s.lines += [line for line in two_operations(age).lines if line.t > 600]
    return s


@story(Expected(("crashed_rank",), (False,), frozenset({2}), ages=AGES[2:], needs_ranks=True))
def dead_main_thread_and_living_watchdog(age: str) -> Story:
    s = exception_first(age)
    observed(s, age, T + 1, 2, 0, 1092)
    return s


@story(Expected(("crashed_rank",), (False,), frozenset({2}), ages=AGES, needs_ranks=True))
def others_make_two_steps_more(age: str) -> Story:
    s = Story(4).steps(1, 20, ranks=range(4))
    traceback(s, 38.5, 2, "IndexError: list index out of range")
    s.steps(21, 2, t=40, ranks=(0, 1, 3))
    _all(s, age, [0, 1, 3], 1093, "ALLREDUCE", 16777216)
    return s
