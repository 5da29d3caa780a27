"""Damaged inputs: those that were once answered wrongly, and new ones of fixed seeds.

Longer runs are those of the program: docs/reliability.md.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import fuzz_mutate
import fuzz_readers
import pytest
from fuzz_readers import TARGETS, Fault, Fuzzer, Target, check
from fuzz_seeds import KEPT, SEEDS, kept

from dl2gpu.trace.inputs import Input

BATCH = {"otf2": 1, "containers": 6, "log": 20, "discover": 14, "sniff": 300}
"""Inputs at once; others have 30."""


def needs(target: str) -> None:
    if target == "otf2" and find_spec("otf2") is None:
        pytest.skip("the package otf2 is not installed")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("seed", [1, 2])
def test_new_inputs(target: str, seed: int) -> None:
    needs(target)
    fuzzer = Fuzzer(target, seed)
    for _ in range(2):  # the first goes through the analysis, too
        fuzzer.step(batch=BATCH.get(target, 30))
    assert not [wrong for wrong, _, _ in fuzzer.faults]
    assert fuzzer.runs == 2 * BATCH.get(target, 30)


@pytest.mark.parametrize("target", [t for t in TARGETS if (KEPT / t).is_dir()])
def test_kept_inputs(target: str) -> None:
    needs(target)
    inputs = kept(target)
    assert inputs
    for group in (1,) if TARGETS[target].apart else (1, 3, len(inputs)):
        check(TARGETS[target], group, inputs, deep=True)


def test_kept_inputs_are_small_and_of_a_target() -> None:
    assert {p.name for p in KEPT.iterdir()} <= set(TARGETS)
    assert sum(p.stat().st_size for p in KEPT.rglob("*") if p.is_file()) < 1 << 20


@pytest.mark.parametrize("target", SEEDS)
def test_seeds_are_good_inputs(target: str) -> None:
    """Else the fuzzing would only see what refuses a file."""
    needs(target)
    answers = check(TARGETS[target], 1, SEEDS[target](), deep=True)
    good = [i for i in answers if i.status in {"read", "partial"}]
    assert len(good) * 10 >= len(answers) * 7, [i for i in answers if i not in good]


def test_the_same_seed_gives_the_same_inputs() -> None:
    one, other = Fuzzer("clog", 7), Fuzzer("clog", 7)
    assert one.make(40) == other.make(40)
    assert one.make(40) != Fuzzer("clog", 8).make(40)


# --------------------------------------------------------------------------------------------------
# What the fuzzer finds


def _fake(read: Any) -> Target:
    return replace(TARGETS["clog"], read=read, groups=(1,))


def _answers(contents: Any, **how: Any) -> list[Input]:
    return [Input(f"{k}", **{"status": "read", **how}) for k in range(len(contents))]


def _raises(_: int, contents: Any) -> Any:
    if any(b"work_id=" not in data for data in contents):
        raise KeyError("work_id")
    return None, _answers(contents)


def _hangs(_: int, contents: Any) -> Any:
    while any(b"work_id=" not in data for data in contents):
        pass
    return None, _answers(contents)


def _silent(_: int, contents: Any) -> Any:
    return None, _answers(contents)[:-1]


def _unexplained(_: int, contents: Any) -> Any:
    return None, _answers(contents, status="quarantined")


@pytest.mark.parametrize(
    ("read", "said"),
    [(_raises, "KeyError"), (_hangs, "hang"), (_silent, "answers for"),
     (_unexplained, "without a reason")],
)  # fmt: skip
def test_faults_are_found(read: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_readers, "SECONDS", 0.02)
    monkeypatch.setattr(fuzz_readers, "MORE_SECONDS", 0.01)
    monkeypatch.setitem(TARGETS, "clog", _fake(read))
    fuzzer = Fuzzer("clog", 1)
    for _ in range(3):
        fuzzer.step(batch=20)
    assert any(said in wrong for wrong, _, _ in fuzzer.faults)
    if read in (_raises, _hangs):  # cut down to the file that is at fault
        assert all(len(c) == 1 and b"work_id=" not in c[0] for _, _, c in fuzzer.faults)


def test_an_invalid_trace_is_a_fault() -> None:
    trace, inputs = TARGETS["clog"].read(1, SEEDS["clog"]()[:1])
    assert trace is not None
    events = trace.events.with_columns(seq=0)
    wrong = _fake(lambda group, contents: (replace(trace, events=events), inputs))
    with pytest.raises(ValueError, match="seq"):
        check(wrong, 1, [b"x"])


def test_files_that_discovery_forgets_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from dl2gpu.trace.discover import discover

    def forgetful(paths: Any) -> Any:
        found = discover(paths)
        return replace(found, inputs=[], files=[])

    monkeypatch.setattr(fuzz_readers, "discover", forgetful)
    with pytest.raises(Fault, match="not accounted for"):
        check(TARGETS["discover"], 1, [b"x"])


# --------------------------------------------------------------------------------------------------
# Changes


def test_changes_reach_behind_the_door() -> None:
    """Many changed inputs are still read, or read in part."""
    for target in ("native", "flight_recorder", "chakra", "param", "clog"):
        _, contents = Fuzzer(target, 3).make(60)
        told = check(TARGETS[target], 1, contents)
        assert sum(i.status in {"read", "partial"} for i in told) >= 10, target


def test_messages_stay_whole_in_their_lengths() -> None:
    data = SEEDS["chakra"]()[0]
    chance = Random(1)
    whole = [fuzz_mutate.framed(chance, data, data, [b"x"]) for _ in range(50)]
    sizes = [
        sum(len(fuzz_mutate.varint(len(m))) + len(m) for m in fuzz_mutate.frames(w)) for w in whole
    ]
    assert sizes == [len(w) for w in whole]
    assert len(set(whole)) > 40


def test_programs_say_what_they_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz_readers.fuzz(Fuzzer("sniff", 4), 400, 60, tmp_path, 1)
    assert "sniff: 400 inputs" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
