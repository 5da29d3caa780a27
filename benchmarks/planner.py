"""The planner: how long a search takes, choices priced a second, lowering, and the paper's table.

::

    python benchmarks/planner.py                 # all
    python benchmarks/planner.py --only speed    # or: table
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dl2gpu.planner.baselines import baselines
from dl2gpu.planner.links import Cluster
from dl2gpu.planner.model import load
from dl2gpu.planner.plan import search
from dl2gpu.planner.proof import prove

SPEED = [
    ("vgg13", (1, 8)), ("vgg16", (4, 8)), ("transformer", (4, 8)), ("gpt2", (8, 8)),
    ("gpt2-xl", (4, 8)), ("gpt2-xl", (32, 8)),
]  # fmt: skip

# Assumptions of the table, which the paper's machines may not meet: single precision at half of
# 10 TFLOP/s with one device a node and 10 GB/s between nodes; 15 TFLOP/s with 4 devices a node,
# 75 GB/s inside, 12.5 GB/s between; 16 and 32 GiB; 32 devices. The batch, and how much of the
# gradients' communication hides behind backward, decide the result: all combinations are printed.
ONE = {"per_node": 1, "inter": 10e9, "flops": 10e12, "memory": 16 * 2.0**30,
       "memory_bandwidth": 0.7e12}  # fmt: skip
SEVERAL = {"per_node": 4, "intra": 75e9, "inter": 12.5e9, "flops": 15e12,
           "memory": 32 * 2.0**30, "memory_bandwidth": 0.9e12}  # fmt: skip
DEVICES = 32
PAPER = {("vgg", 1): 17.7, ("vgg", 4): 71.5, ("transformer", 1): 31.1, ("transformer", 4): 10.0}
EACH = {"vgg13": (2, 8, 32), "transformer": (1, 4)}
"""Samples of a device."""


def speed() -> None:
    for name, (nodes, per_node) in SPEED:
        model, cluster = load(name), Cluster(nodes, per_node)
        began = time.perf_counter()
        plan = search(model, cluster)
        middle = time.perf_counter()
        proof = prove(plan)
        print(
            f"{name}, {nodes} x {per_node}: {middle - began:.1f} s, {plan.priced} choices priced "
            f"({plan.priced / (middle - began):,.0f}/s), {plan.layouts} layouts; step "
            f"{plan.seconds * 1e3:.2f} ms, bound {plan.bound * 1e3:.2f} ms "
            f"({100 * (plan.seconds / plan.bound - 1):.2f} % above); lowered and analysed "
            f"{proof.operations} operations in {time.perf_counter() - middle:.1f} s: "
            f"{proof.verdict}",
            flush=True,
        )


def table() -> None:
    """Reductions of the step's time against the best fixed scheme, and against each."""
    for name, batches in EACH.items():
        for options in (ONE, SEVERAL):
            per_node = int(options["per_node"])
            paper = PAPER[name.removesuffix("13"), per_node]
            print(f"{name}, {per_node} a node: AutoDDL reports up to {paper} % less", flush=True)
            for each in batches:
                for overlap in (0.0, 0.9):
                    nodes = DEVICES // per_node
                    cluster = Cluster(nodes, overlap=overlap, **options)  # type: ignore[arg-type]
                    model = load(name, each * DEVICES)
                    found = search(model, cluster)
                    less = {
                        n: 100 * (1 - found.seconds / p.seconds)
                        for n, p in baselines(model, cluster).items()
                        if p is not None and p.fits
                    }
                    words = ", ".join(f"{n} {x:.1f} %" for n, x in less.items())
                    print(
                        f"  {each} a device, overlap {overlap}: {found.seconds * 1e3:.1f} ms, "
                        f"{min(less.values()):.1f} % less than the best fixed scheme; than {words}",
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=["speed", "table"])
    args = parser.parse_args()
    if args.only != "table":
        speed()
    if args.only != "speed":
        table()


if __name__ == "__main__":
    main()
