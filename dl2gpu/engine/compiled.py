"""Where compiled kernels are kept from one run to the next.

Numba keeps them beside the source or in the user's cache folder, and refuses to compile at all
where it may write in neither: a package installed by root, run by a user without a home (a
container, a service). For these there is a private folder among the temporary ones. Kernels are
loaded by unpickling, so a folder in which somebody else could have put something is never used.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

__all__ = ["find_cache", "load_numba"]


def find_cache() -> None:
    """Name a folder in ``NUMBA_CACHE_DIR`` where Numba would find none. Called before it loads."""
    if os.environ.get("NUMBA_CACHE_DIR") or _writable(Path(__file__).parents[1]):
        return
    if _writable(Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "numba"):
        return
    folder = str(_private_folder())
    os.environ["NUMBA_CACHE_DIR"] = folder
    config = sys.modules.get("numba.core.config")
    if config is not None:  # loaded before us: it has read the environment already
        config.CACHE_DIR = folder  # type: ignore[attr-defined]


def load_numba() -> None:
    """Load Numba without SciPy's linear algebra: a sixth of a short scan. For the command line.

    Numba looks for SciPy's BLAS when it loads, for functions that no kernel of ours uses, and does
    without where there is none. Nothing is hidden afterwards: the components still use SciPy.
    """
    if "numba.np.arraymath" in sys.modules or "scipy" in sys.modules:
        return
    sys.modules["scipy"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("numba.np.arraymath")
    finally:
        del sys.modules["scipy"]


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
