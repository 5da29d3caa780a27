"""Every plan of the product translates to cuDF, with no operation left that would run elsewhere.

The plans are those that an analysis hands to its engine. Polars' translator for the GPU needs no
GPU but the size of its memory, which is made up here.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from engine.ways import Recording, cases, demo, late, lossy, memberless, wild, windowed
from programs import from_seed, trace_of

import dl2gpu.analysis
from dl2gpu.analysis import analyse
from dl2gpu.engine.choose import DeviceMemoryError
from dl2gpu.engine.gpu import Gpu, query_options

translate = pytest.importorskip(
    "cudf_polars.dsl.translate", reason="needs one of the gpu extras", exc_type=ImportError
)

MEMORY = types.SimpleNamespace(total=80 << 30, free=80 << 30, used=0)


@pytest.fixture(autouse=True)
def _memory_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    answers: dict[str, Any] = {
        "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0, "nvmlDeviceGetMemoryInfo": MEMORY,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer, **__: answer)


def errors(plan: pl.LazyFrame) -> list[Exception]:
    """What of the plan cuDF does not have, under the engine's own options."""
    translator = translate.Translator(plan._ldf.visit(), query_options(None))
    translator.translate_ir()
    return list(translator.errors)


@pytest.fixture(scope="module")
def recorded() -> Recording:
    """All plans of many analyses."""
    engine = Recording()

    def traces() -> Iterator[Any]:
        yield demo()
        yield trace_of(*from_seed(1, 100))
        yield trace_of(*wild(2, 60))
        yield lossy(3, 60)
        yield memberless(4, 60)
        yield windowed(5, 60)
        yield late()
        for _, trace in cases():
            yield trace

    for trace in traces():
        analyse(trace, engine=engine)
    return engine


def calls_of_collect() -> Iterator[tuple[str, int, int]]:
    """(file, first line, last line) of each call of an engine's ``collect`` in the product."""
    for file in sorted(Path(dl2gpu.analysis.__path__[0]).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or len(node.args) != 1:
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name == "collect":
                yield file.name, node.lineno, node.end_lineno or node.lineno


def test_each_plan_was_seen(recorded: Recording) -> None:
    """No query of the product has escaped the check below."""
    calls = list(calls_of_collect())
    assert len(calls) > 25
    unseen = [
        (file, first)
        for file, first, last in calls
        if not any(f == file and first <= line <= last for f, line in recorded.callers)
    ]
    assert not unseen


def test_all_plans_translate(recorded: Recording) -> None:
    assert len(recorded.plans) > 30
    untranslated = {
        shape: found for shape, plan in recorded.plans.items() if (found := errors(plan))
    }
    assert not untranslated, "\n\n".join(
        f"{found}\n{shape}" for shape, found in list(untranslated.items())[:3]
    )


def test_what_cudf_lacks_is_seen() -> None:
    """The check itself: an operation that does not translate is an error."""
    plan = pl.LazyFrame({"k": [1, 1, 2]}).select(pl.col("k").rle_id())
    assert errors(plan)


def test_memory_that_is_spent_in_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuDF raises while Polars runs the plan comes out as the engine's own error."""
    import cudf_polars.callback

    ran: list[Any] = []

    def spent(*args: Any, **kwargs: Any) -> None:
        ran.append(args)
        raise MemoryError("std::bad_alloc: out_of_memory")

    monkeypatch.setattr(cudf_polars.callback, "_callback", spent)
    engine = Gpu.__new__(Gpu)
    engine._memory = None
    with pytest.raises(DeviceMemoryError, match="out_of_memory"):
        engine.collect(pl.LazyFrame({"k": [1, 1, 2]}).select(pl.col("k").sum()))
    assert len(ran) == 1


def test_no_silent_fallback() -> None:
    """Polars is told to fail where it cannot translate."""
    options = query_options(None)
    assert options.config["raise_on_fail"] is True
    assert options.config["executor"] == "in-memory"
    with pytest.raises(pl.exceptions.PolarsError, match="rle_id"):
        pl.LazyFrame({"k": [1, 1, 2]}).select(pl.col("k").rle_id()).collect(engine=options)
