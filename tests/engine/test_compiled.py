"""Compiled kernels find a place, and never one that somebody else prepared."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dl2gpu.engine import compiled
from dl2gpu.engine.compiled import find_cache, kernel_folder, read_private, write_private


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


@pytest.fixture
def home(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the user's own, empty."""
    folder = nowhere / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    kernel_folder.cache_clear()
    yield folder
    kernel_folder.cache_clear()


def test_object_code_lies_in_the_users_cache(home: Path) -> None:
    assert kernel_folder() == home / "dl2gpu"
    assert stat.S_IMODE(kernel_folder().stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_object_code_is_not_taken_where_others_write(home: Path, mode: int) -> None:
    (home / "dl2gpu").mkdir(parents=True)
    (home / "dl2gpu").chmod(mode)
    assert home not in kernel_folder().parents
    assert stat.S_IMODE(kernel_folder().stat().st_mode) == 0o700


def test_object_code_goes_where_numba_is_told_to(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(home / "there"))
    assert kernel_folder() == home / "there"


def test_private_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert read_private(file) is None
    write_private(file, b"code")
    assert read_private(file) == b"code"
    assert list(tmp_path.iterdir()) == [file]
    (tmp_path / "link").symlink_to(file)
    assert read_private(tmp_path / "link") is None
    file.chmod(0o620)
    assert read_private(file) is None
    write_private(tmp_path / "missing" / "file", b"code")
