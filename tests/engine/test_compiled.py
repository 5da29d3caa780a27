"""Compiled kernels find a place, and never one that somebody else prepared."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dl2gpu.engine import compiled
from dl2gpu.engine.compiled import find_cache


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither the package nor the home can be written to; gives the temporary folder."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    monkeypatch.setattr(compiled, "_writable", lambda folder: False)
    monkeypatch.setattr("dl2gpu.engine.compiled.tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # the rest of the run keeps its own
    monkeypatch.setattr("numba.core.config.CACHE_DIR", "", raising=False)
    return tmp_path


def chosen() -> Path:
    find_cache()
    folder = Path(os.environ["NUMBA_CACHE_DIR"])
    found = folder.lstat()
    assert stat.S_ISDIR(found.st_mode)
    assert found.st_uid == os.geteuid()
    assert stat.S_IMODE(found.st_mode) == 0o700
    return folder


def test_private_folder_is_kept_for_the_next_run(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = chosen()
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    assert chosen() == first
    assert first.parent == nowhere


@pytest.mark.parametrize("trap", ["open", "link", "file"])
def test_prepared_folder_is_not_used(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    folder = chosen()
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    if trap == "open":
        folder.chmod(0o777)
    else:
        folder.rmdir()
        elsewhere = nowhere / "elsewhere"
        elsewhere.mkdir(mode=0o700)
        if trap == "link":
            folder.symlink_to(elsewhere)
        else:
            folder.write_text("")
    assert chosen() != folder


def test_nothing_is_set_where_numba_finds_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")
    monkeypatch.setattr(compiled, "_writable", lambda folder: folder.name == "numba")
    find_cache()
    assert not os.environ["NUMBA_CACHE_DIR"]


def test_the_users_choice_stands(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "mine")
    find_cache()
    assert os.environ["NUMBA_CACHE_DIR"] == "mine"
