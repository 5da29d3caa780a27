"""Fuzzes a reader by what of its Python code each input reaches, with the package atheris.

    python tests/fuzz_coverage.py READER -runs=N -seed=S [CORPUS]

The changes are those of fuzz_readers.py; atheris (which is no dependency) keeps what reaches new
code. Kernels are compiled and stay unseen, and so does what Polars does.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any


def main() -> None:
    """Ends the process with a fault, or after so many runs."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    name, *options = sys.argv[1:]
    with atheris.instrument_imports(include=["dl2gpu.trace"], enable_loader_override=False):
        import dl2gpu.trace.calls
        import dl2gpu.trace.chakra
        import dl2gpu.trace.clog
        import dl2gpu.trace.containers_index
        import dl2gpu.trace.discover
        import dl2gpu.trace.execution_trace
        import dl2gpu.trace.flight_recorder_json
        import dl2gpu.trace.native
        import dl2gpu.trace.param
        import dl2gpu.trace.ras
        import dl2gpu.trace.sniff  # noqa: F401
    from fuzz_readers import LARGEST, TARGETS, Fuzzer, check

    fuzzer = Fuzzer(name)
    target = TARGETS[name]

    def change(data: bytes, size: int, seed: int) -> bytes:
        chance = Random(seed)
        return target.change(chance, data, chance.choice(fuzzer.pool), fuzzer.kit)[:size]

    def one(data: bytes) -> None:
        check(target, 1, [data])

    def cross(first: bytes, second: bytes, size: int, seed: int) -> Any:
        return target.change(Random(seed), first, second, fuzzer.kit)[:size]

    with tempfile.TemporaryDirectory() as folder:
        for k, seed in enumerate(fuzzer.pool):
            (Path(folder) / f"{k}").write_bytes(seed)
        arguments = [sys.argv[0], f"-max_len={LARGEST}", "-timeout=60", *options, folder]
        atheris.Setup(arguments, one, custom_mutator=change, custom_crossover=cross)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
