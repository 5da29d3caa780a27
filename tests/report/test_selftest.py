"""The self-test of ``doctor``: it passes here, and says so when an engine does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import dl2gpu.analysis
from dl2gpu.report import doctor, selftest
from dl2gpu.report.console import rendered


def test_it_passes_on_the_cpu() -> None:
    result = selftest.self_test(20, 20_000)
    assert result.passed
    cpu = result.runs[0]
    assert (cpu.engine, cpu.as_labelled, cpu.same, cpu.error) == ("cpu", 20, True, None)
    assert cpu.seconds > 0
    assert cpu.first > 0
    assert result.events > 10_000
    assert 20 * result.events < result.bytes < 300 * result.events
    assert result.floor == result.bytes / result.bandwidth


def test_an_engine_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dl2gpu.analysis.analyse

    def analyse(trace: Any, **options: Any) -> Any:
        if options.get("engine") == "gpu":
            raise RuntimeError("out of\nmemory")
        return right(trace)

    monkeypatch.setattr(dl2gpu.analysis, "analyse", analyse)
    monkeypatch.setattr(selftest, "missing", list)
    result = selftest.self_test(5, 3000)
    assert not result.passed
    assert [(r.engine, r.error) for r in result.runs] == [
        ("cpu", None), ("gpu", "RuntimeError: out of memory"),
    ]  # fmt: skip
    monkeypatch.setattr(selftest, "self_test", lambda: result)
    text = rendered(doctor.doctor())
    assert "Self-test: FAILED" in text
    assert "failed: RuntimeError: out of memory" in text


def test_findings_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dl2gpu.analysis.analyse

    def analyse(trace: Any, **options: Any) -> Any:
        result = right(trace)
        if options.get("engine") == "gpu":
            return replace(result, findings=result.findings[:-1])
        return result

    monkeypatch.setattr(dl2gpu.analysis, "analyse", analyse)
    monkeypatch.setattr(selftest, "missing", list)
    result = selftest.self_test(20, 20_000)
    assert [r.same for r in result.runs] == [True, False]
    assert not result.passed


def test_wrong_verdicts_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dl2gpu.analysis.analyse

    def analyse(trace: Any, **_: Any) -> Any:
        result = right(trace)
        return replace(result, jobs=result.jobs.reverse())

    monkeypatch.setattr(dl2gpu.analysis, "analyse", analyse)
    result = selftest.self_test(20, 20_000)
    assert result.runs[0].as_labelled < 20
    assert not result.passed


def test_it_can_be_left_out() -> None:
    assert "Self-test" not in rendered(doctor.doctor(test=False))
