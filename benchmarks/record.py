"""What the recorder costs: a step of DDP on GPT-2, recorded and plain, side by side.

    python benchmarks/record.py [--ranks 2] [--steps 40] [--rounds 4] [--width 128] [--layers 4]

Twice: in fresh processes (gloo, one thread a rank), rounds of the one and the other in turn; and
within one run, steps of the one and the other in turn, which have the same load from outside. The
second is what to trust on a busy machine. Beside them stand what one recorded operation costs, and
the floor: one write of a line of that length.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM_UP = 5
ROOT = Path(__file__).resolve().parents[1]


def worker(args: argparse.Namespace) -> None:
    """One rank: trains, and prints its steps' seconds as JSON."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    if args.record:
        import dl2gpu.record

        dl2gpu.record.start(args.record)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(args.store, args.ranks),
        rank=args.rank,
        world_size=args.ranks,
    )
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=1000, n_positions=64, n_embd=args.width, n_layer=args.layers, n_head=4,
        use_cache=False,
    )  # fmt: skip
    model = DistributedDataParallel(GPT2LMHeadModel(config), bucket_cap_mb=1)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randint(0, 1000, (4, 64))
    seconds, cpu = [], []
    losses = []
    for step in range(args.steps):
        if args.turns:
            in_turns(step)
        begun, busy = time.perf_counter(), time.process_time()
        loss = model(data, labels=data).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        seconds.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - busy)
        losses.append(float(loss.detach()))
    if args.rank == 0:
        parameters = sum(p.numel() for p in model.parameters())
        out = {"s": seconds[WARM_UP:], "cpu": cpu[WARM_UP:], "losses": losses}
        print(json.dumps(out | {"parameters": parameters}))
    dist.barrier()


def recorded(step: int) -> bool:
    """One step of each pair is recorded, the first or the second by chance."""
    first = random.Random(step // 2).random() < 0.5
    return first == (step % 2 == 0)


def by_turns(seconds: list[float]) -> list[float]:
    """Recorded over plain, of each pair of steps; the list begins after the steps that warm up."""
    ratios = []
    for i in range(1, len(seconds) - 1, 2):
        pair = seconds[i : i + 2] if recorded(WARM_UP + i + 1) else seconds[i + 1 : i - 1 : -1]
        ratios.append(pair[1] / pair[0])
    return ratios


def in_turns(step: int) -> None:
    """Records half of the steps only."""
    from dl2gpu.record.state import process

    assert process.recorder is not None
    process.recorder.recording = recorded(step)


def run(
    args: argparse.Namespace, record: bool, folder: Path, turns: bool = False
) -> dict[str, object]:
    """One round in fresh processes."""
    folder.mkdir()
    command = [sys.executable, __file__, "--store", str(folder / "store")]
    for name in ("ranks", "steps", "width", "layers"):
        command += [f"--{name}", str(getattr(args, name))]
    if record:
        command += ["--record", str(folder / "trace")] + ["--turns"] * turns
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "error"}
    children = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, env=environment)
        for rank in range(args.ranks)
    ]
    outs = [child.communicate()[0] for child in children]
    out: dict[str, object] = json.loads(outs[0])
    if record:
        lines = (folder / "trace" / "rank_0.jsonl").read_bytes().splitlines()
        out["lines"], out["bytes"] = len(lines), sum(map(len, lines)) // len(lines)
    return out


def cost_of_a_line() -> tuple[float, float]:
    """(seconds of one recorded operation, seconds of the bare write of its line)."""
    from dl2gpu.record.recorder import Recorder

    n = 20_000
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), 0, 2, "gloo")
        comm = recorder.declare([0, 1])
        assert comm is not None
        begun = time.perf_counter()
        for _ in range(n):
            recorder.op("all_reduce", comm, count=1000, dtype="float32", bytes=4000)
        ours = (time.perf_counter() - begun) / n
        line = b"x" * (recorder.file.size // n)
        with open(f"{folder}/floor", "wb", buffering=0) as file:  # noqa: PTH123
            begun = time.perf_counter()
            for _ in range(n):
                file.write(line)
            return ours, (time.perf_counter() - begun) / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--record", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        worker(args)
        return
    sys.path.insert(0, str(ROOT))
    steps: dict[bool, list[float]] = {False: [], True: []}
    medians: dict[bool, list[float]] = {False: [], True: []}
    losses = set()
    last: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(2 * args.rounds):
            # plain, recorded, recorded, plain: neither always comes first
            record = number % 4 in (1, 2)
            out = run(args, record, Path(scratch) / str(number))
            steps[record] += out["s"]  # type: ignore[operator]
            medians[record].append(statistics.median(out["s"]))  # type: ignore[type-var, arg-type]
            losses.add(json.dumps(out["losses"]))
            last = out if record else last
        args.steps *= 4
        paired = run(args, True, Path(scratch) / "turns", turns=True)
    ratios, busy = (by_turns(paired[key]) for key in ("s", "cpu"))  # type: ignore[arg-type]
    ratio = statistics.median(ratios)
    plain, with_it = (statistics.median(steps[r]) for r in (False, True))
    ours, floor = cost_of_a_line()
    print(f"GPT-2 with {last['parameters']:,} parameters, DDP on {args.ranks} ranks, gloo")
    for record, name in ((False, "plain"), (True, "recorded")):
        rounds = ", ".join(f"{1e3 * m:.1f}" for m in medians[record])
        print(
            f"{name:9} median step {1e3 * statistics.median(steps[record]):.2f} ms "
            f"(rounds {rounds})"
        )
    print(f"overhead  {100 * (with_it / plain - 1):+.2f} % by rounds")
    print(f"overhead  {100 * (ratio - 1):+.2f} % by turns, median of {len(ratios)} pairs of steps")
    print(f"processor {100 * (statistics.median(busy) - 1):+.2f} % by turns, of rank 0")
    print(f"records   {last['lines']} lines of about {last['bytes']} bytes a rank")
    print(f"one line  {1e6 * ours:.1f} us; the bare write of it {1e6 * floor:.1f} us")
    print(f"losses    {'the same to the last bit' if len(losses) == 1 else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
