"""Where compiled kernels are kept from one run to the next.

Their object code lies in the user's cache folder. Numba keeps what it compiles itself beside the
source or in the user's cache folder, and refuses to compile at all where it may write in neither:
a package installed by root, run by a user without a home (a container, a service). For these there
is a private folder among the temporary ones. What is loaded from there runs, so a folder in which
somebody else could have put something is never used.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

__all__ = ["find_cache", "kernel_folder", "read_private", "write_private"]


def find_cache() -> None:
    """Name a folder in ``NUMBA_CACHE_DIR`` where Numba would find none. Called before it loads."""
    if os.environ.get("NUMBA_CACHE_DIR") or _writable(Path(__file__).parents[1]):
        return
    if _writable(_cache_home() / "numba"):
        return
    folder = str(_private_folder())
    os.environ["NUMBA_CACHE_DIR"] = folder
    config = sys.modules.get("numba.core.config")
    if config is not None:  # loaded before us: it has read the environment already
        config.CACHE_DIR = folder  # type: ignore[attr-defined]


@functools.cache
def kernel_folder() -> Path:
    """A folder for object code, in which nobody else can write."""
    try:
        folder = Path(os.environ.get("NUMBA_CACHE_DIR") or _cache_home() / "dl2gpu")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_ISDIR(folder.lstat().st_mode) and _only_mine(folder.lstat()):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass
    return _private_folder()


def read_private(file: Path) -> bytes | None:
    """What the file holds; None where there is none, or one that somebody else could have written.

    Raises nothing.
    """
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(handle, "rb") as stream:
            found = os.fstat(handle)
            if stat.S_ISREG(found.st_mode) and _only_mine(found):
                return stream.read()
    except OSError:
        pass
    return None


def write_private(file: Path, data: bytes) -> None:
    """Put a file there as a whole, for the next run. Where that fails there will be none."""
    try:
        handle, name = tempfile.mkstemp(prefix=file.name, dir=file.parent)
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        Path(name).replace(file)
    except OSError:
        Path(name).unlink(missing_ok=True)


def _only_mine(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o022


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())


def _writable(folder: Path) -> bool:
    """Can this be written to, or be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


def _private_folder() -> Path:
    me = os.geteuid()
    folder = Path(tempfile.gettempdir()) / f"dl2gpu-kernels-{me}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        pass
    else:
        mine = found.st_uid == me and not stat.S_IMODE(found.st_mode) & 0o077
        if stat.S_ISDIR(found.st_mode) and mine:
            return folder
    once = tempfile.mkdtemp(prefix="dl2gpu-kernels-")
    atexit.register(shutil.rmtree, once, ignore_errors=True)
    return Path(once)
