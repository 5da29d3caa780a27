"""Progress on standard error: a bar on a terminal, few plain lines otherwise, or silence."""

from __future__ import annotations

import io
import sys

import pytest

from dl2gpu.report.progress import progress, time_left
from dl2gpu.scan import Step


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_quiet_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(quiet=True) as show:
        assert show is None
    assert capsys.readouterr() == ("", "")


def test_plain_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as show:
        assert show is not None
        for done in range(1001):
            show(Step(done, 1000, done // 10, 100, 1, 5 * done, 2))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "dl2gpu: 0%: 0 of 100 files, 1 job, 0 events, 2 findings",
        "dl2gpu: 100%: 100 of 100 files, 1 job, 5,000 events, 2 findings",
    ]


def test_plain_lines_come_again_after_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("dl2gpu.report.progress.time.monotonic", lambda: next(clock))
    with progress() as show:
        assert show is not None
        for done in range(7):
            show(Step(done, 100))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["0%:", "3%:", "6%:"]
    # 3 of 100 took 8 s
    assert lines[1].endswith("; 4 min 19 s left")


@pytest.mark.parametrize(
    ("done", "elapsed", "words"),
    [
        (0, 5.0, ""),
        (100, 5.0, ""),
        (50, 5.4, "5 s left"),
        (10, 10.0, "1 min 30 s left"),
        (1, 100.0, "2 h 45 min left"),
    ],
)
def test_time_left(done: int, elapsed: float, words: str) -> None:
    assert time_left(Step(done, 100), elapsed) == words


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    with progress() as show:
        assert show is not None
        for done in range(51):
            show(Step(done, 50, done, 50, findings=1))
    text = terminal.getvalue()
    assert "50 of 50 files, 0 jobs, 0 events, 1 finding" in text
    assert "100%" in text


def test_an_error_passes_through() -> None:
    with pytest.raises(ValueError, match="inside"), progress():
        raise ValueError("inside")
