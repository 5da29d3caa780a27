"""Progress on standard error: a bar on a terminal, few plain lines otherwise, or silence."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from dl2gpu.report.progress import progress


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
            show("read", done, 1000)
        show("analyse", 0, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "dl2gpu: read 0%",
        "dl2gpu: read 100%",
        "dl2gpu: analyse 0%",
    ]


def test_plain_lines_come_again_after_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("dl2gpu.report.progress.time.monotonic", lambda: next(clock))
    with progress() as show:
        assert show is not None
        for done in range(7):
            show("read", done, 100)
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == [
        "0%",
        "3%",
        "6%",
    ]


def test_bar_on_a_terminal_from_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    with progress() as show:
        assert show is not None
        threads = [
            threading.Thread(target=lambda: [show("[red]read", i, 50) for i in range(51)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    text = terminal.getvalue()
    assert "[red]read" in text  # a stage is no markup
    assert "100%" in text


def test_an_error_passes_through() -> None:
    with pytest.raises(ValueError, match="inside"), progress():
        raise ValueError("inside")
