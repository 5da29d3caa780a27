"""The recorder without PyTorch: what is written when, and what happens when it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dl2gpu.record.launch import INJECTED, environment, run
from dl2gpu.record.lines import LineFile
from dl2gpu.record.recorder import Recorder, broke, comm_id
from dl2gpu.record.settings import VARIABLE, Settings
from dl2gpu.record.sites import call_site
from dl2gpu.record.watch import _bury, _ends, _runs


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the file


def test_a_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "a.jsonl")
    file.write({"kind": "op", "seq": 0})
    assert lines(file.path) == [{"kind": "op", "seq": 0}]


def test_an_end_mark_is_taken_back_when_the_rank_goes_on(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "a.jsonl")
    file.write({"seq": 0})
    file.end("alive", 1, last=False)
    assert lines(file.path)[-1] == {"kind": "end", "exit": "alive", "t": 1, "provisional": True}
    file.end("alive", 2, last=False)
    assert [r.get("t") for r in lines(file.path)] == [None, 2]
    file.write({"seq": 1})
    file.end("finished", 3, 0)
    assert lines(file.path) == [
        {"seq": 0}, {"seq": 1}, {"kind": "end", "exit": "finished", "t": 3, "code": 0},
    ]  # fmt: skip


def test_a_hole_is_valid_before_and_after_it_is_filled(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "a.jsonl")
    place = file.write_with_hole({"op": "recv"}, "matched_peer")
    file.write({"op": "wait"})
    assert lines(file.path) == [{"op": "recv", "matched_peer": None}, {"op": "wait"}]
    file.fill(place, 1048575)
    assert lines(file.path) == [{"op": "recv", "matched_peer": 1048575}, {"op": "wait"}]


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    LineFile(tmp_path / "a.jsonl").write({"seq": 0})
    with pytest.raises(FileExistsError):
        LineFile(tmp_path / "a.jsonl")


# ---- the recorder


def recorder(folder: Path, **given: Any) -> tuple[Recorder, str]:
    out = Recorder(folder, 0, 2, "gloo", **given)
    comm = out.declare([0, 1])
    assert comm == "0,1#0"
    return out, comm


def test_operations_and_waits(tmp_path: Path) -> None:
    r, comm = recorder(tmp_path / "job")
    first = r.op("all_reduce", comm, count=4, dtype="float32", bytes=16, root=None)
    second = r.op("barrier", comm)
    assert first is not None
    assert second is not None
    r.wait([second, first, first])
    r.wait([])
    r.wait(None)
    r.end("finished", 0)
    header, comm_line, *ops, end = lines(tmp_path / "job/rank_0.jsonl")
    assert header["format"] == "dl2gpu.trace"
    assert comm_line["ranks"] == [0, 1]
    assert [o["op"] for o in ops] == ["all_reduce", "barrier", "wait", "wait"]
    assert [o["seq"] for o in ops] == [0, 1, 2, 3]
    assert ops[0]["blocking"] is False
    assert "root" not in ops[0]
    assert [o.get("requests") for o in ops] == [None, None, [1, 2], "all"]
    assert ops[0]["stack"][0].startswith("test_operations_and_waits ")
    assert end["exit"] == "finished"


def test_nothing_follows_the_last_mark(tmp_path: Path) -> None:
    r, comm = recorder(tmp_path)
    r.failed()
    r.op("barrier", comm)
    r.end("finished", 0)
    assert [x["kind"] for x in lines(r.file.path)] == ["header", "comm", "end"]
    assert r.frozen


def test_threads_have_lanes(tmp_path: Path) -> None:
    r, comm = recorder(tmp_path)
    other = threading.Thread(target=lambda: r.op("barrier", comm))
    other.start()
    other.join()
    r.op("barrier", comm)
    ops = lines(r.file.path)[2:]
    assert [(o.get("lane", 0), o["seq"]) for o in ops] == [(1, 0), (0, 0)]


def test_what_cannot_be_written_stops_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    r, comm = recorder(tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert r.op("all_reduce", comm) is None
    assert r.op("all_reduce", comm) is None
    assert r.wait(None) is None
    r.end("finished", 0)
    monkeypatch.undo()
    assert not r.recording
    assert capsys.readouterr().err.count("No space left") == 1
    assert [x["kind"] for x in lines(r.file.path)] == ["header", "comm"]


def test_a_second_record_of_a_rank_is_another_attempt(tmp_path: Path) -> None:
    first, _ = recorder(tmp_path)
    second, _ = recorder(tmp_path)
    assert (first.attempt, second.attempt) == (0, 1)
    assert lines(tmp_path / "rank_0.attempt_1.jsonl")[0]["attempt"] == 1


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([3], "3#1"),
        ([0, 1], "0,1#1"),
        (range(8), "0-7#1"),
        ([1, 3, 5, 7], "1-7:2#1"),
        ([2, 1, 0], "2,1,0#1"),
        ([5, 0, 7], "5,0,7#1"),
    ],
)
def test_ids_of_communicators(ranks: list[int], expected: str) -> None:
    assert comm_id(list(ranks), 1) == expected


def test_ids_of_large_communicators_are_short_and_differ() -> None:
    a, b = [*range(4000), 9000], [*range(4000), 9001]
    assert len(comm_id(a, 0)) < 40
    assert comm_id(a, 0) != comm_id(b, 0)


def test_frames_of_the_standard_library_are_left_out() -> None:
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(call_site()))
    thread.start()
    thread.join()
    assert len(found[0]) == 1
    assert found[0][0].startswith("<lambda> ")


def test_what_counts_as_broken_communication() -> None:
    assert broke(RuntimeError("Timed out waiting 6000ms for recv operation to complete"))
    assert broke(RuntimeError("[pair.cc:553] Connection closed by peer"))
    assert not broke(ValueError("Split sizes doesn't match total dim 0 size"))


# ---- ranks that are gone


@pytest.mark.parametrize(
    ("left", "aftermath", "told", "exit_"),
    [
        ("", False, False, "killed"),
        ("", False, True, "alive"),
        ("", True, False, "alive"),
        ('{"kind":"op","se', False, False, "killed"),
        ('{"kind":"end","exit":"alive","t":1,"provisional":true}\n', False, False, "killed"),
        ('{"kind":"end","exit":"alive","t":1,"provisional":true}\n', True, False, "kept"),
        ('{"kind":"end","exit":"finished","t":1}\n', False, False, "kept"),
    ],
)
def test_a_rank_that_is_gone_is_given_its_mark(
    tmp_path: Path, left: str, aftermath: bool, told: bool, exit_: str
) -> None:
    path = tmp_path / "rank_1.jsonl"
    path.write_text('{"kind":"header"}\n' + left)
    if told:
        path.with_suffix(".terminated.txt").write_text("a stack")
    _bury(path, aftermath=aftermath)
    _bury(path, aftermath=aftermath)  # another rank does the same
    if exit_ == "kept":
        assert path.read_text() == '{"kind":"header"}\n' + left
    else:
        assert [x.get("exit") for x in lines(path)] == [None, exit_]
    assert _ends(path)


def test_which_processes_run() -> None:
    assert _runs(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert not _runs(child.pid)


# ---- the command


def test_settings_survive_the_environment() -> None:
    settings = Settings("records", "job", 5.0, None, True, False)
    env = environment(settings)
    assert Settings.of_environment(env) == settings
    assert env["PYTHONPATH"].split(os.pathsep)[0] == str(INJECTED)
    newer = json.loads(env[VARIABLE]) | {"of_another_version": 1}
    assert Settings.decode(json.dumps(newer)) == settings
    for text in ("", "no json", "[]", '{"job": "no folder"}'):
        with pytest.raises(ValueError, match="expected settings"):
            Settings.decode(text)


def test_negative_times_are_refused() -> None:
    with pytest.raises(ValueError, match="expected seconds"):
        Settings("records", hang_s=-1)


def test_the_exit_status_is_the_programs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = Settings(str(tmp_path / "new"))
    assert run([sys.executable, "-c", "raise SystemExit(7)"], settings) == 7
    assert run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], settings) == 137
    assert "nothing was recorded" in capfd.readouterr().err


def test_a_folder_with_another_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank_0.jsonl").touch()
    settings = Settings(str(tmp_path))
    with pytest.raises(ValueError, match="another run"):
        run([sys.executable, "-c", ""], settings)
    assert run([sys.executable, "-c", ""], settings, shared=True) == 0


@pytest.mark.parametrize("command", [[], ["/no/such/program"], ["/"]])
def test_commands_that_are_none(tmp_path: Path, command: list[str]) -> None:
    with pytest.raises(ValueError, match="record: "):
        run(command, Settings(str(tmp_path / "new")))


def test_a_hidden_sitecustomize_is_run_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.hidden = 42")
    env = environment(Settings(str(tmp_path)))
    env["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", "print(hidden)"], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "42"


def test_the_recorder_loads_the_standard_library_only() -> None:
    code = (
        "import sys, dl2gpu.record, dl2gpu.record.watch, dl2gpu.record.dispatch\n"
        "heavy = {'torch', 'numpy', 'polars', 'numba', 'msgspec', 'typer'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
