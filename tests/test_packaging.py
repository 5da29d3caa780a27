"""What is installed, and what importing it costs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

import dl2gpu

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = ROOT / "dl2gpu" / "report" / "templates"
CONFIG: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_only_the_package_is_installed() -> None:
    files = [file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()]
    assert {Path(name).parts[0] for name in files} == {"dl2gpu"}
    assert "dl2gpu/py.typed" in files
    assert "dl2gpu/cli.py" in files
    assert {f"dl2gpu/report/templates/{p.name}" for p in TEMPLATES.iterdir()} <= set(files)
    assert TEMPLATES / "base.html.j2" in list(TEMPLATES.iterdir())
    assert not [name for name in files if name.endswith((".pyc", ".nbi", ".nbc"))]


def test_licence_is_in_the_wheel() -> None:
    assert CONFIG["project"]["license"] == "Apache-2.0"
    assert CONFIG["project"]["license-files"] == ["LICENSE"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("folder", ["datasets", "pipelines"])
def test_folders_that_are_not_packages(folder: str) -> None:
    assert not list((ROOT / folder).rglob("__init__.py"))


def test_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", dl2gpu.__version__)
    assert f"## {dl2gpu.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_base_install_needs_no_nvidia_package() -> None:
    base = " ".join(CONFIG["project"]["dependencies"])
    assert not re.search(r"cu1[23]|cuda|cudf|cugraph|rmm|torch", base)
    extras = CONFIG["project"]["optional-dependencies"]
    for version in ("12", "13"):
        names = {re.split(r"[\[>=]", requirement)[0] for requirement in extras[f"gpu-cu{version}"]}
        assert names == {
            f"cudf-polars-cu{version}", f"cudf-cu{version}", f"cugraph-cu{version}",
            f"cupy-cuda{version}x", "dask-cuda", "numba-cuda",
        }  # fmt: skip


def test_importing_is_cheap() -> None:
    heavy = "{'polars', 'numba', 'numpy', 'scipy', 'dask', 'rich', 'typer'}"
    assert python(f"import sys, dl2gpu; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_help_needs_no_heavy_module() -> None:
    heavy = "{'polars', 'numba', 'numpy', 'scipy', 'dask', 'fsspec', 'jinja2'}"
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from dl2gpu.cli import app\n"
        "assert CliRunner().invoke(app, ['scan', '--help']).exit_code == 0\n"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    assert python(code) == "[]"


@pytest.mark.parametrize("first", ["import dl2gpu.scan", "from dl2gpu.scan import scan", ""])
def test_scan_is_the_function_whatever_was_imported_first(first: str) -> None:
    code = f"{first}\nimport dl2gpu\nprint(dl2gpu.scan.__name__, callable(dl2gpu.scan))"
    assert python(code) == "scan True"


def test_public_face() -> None:
    assert set(dl2gpu.__all__) == {
        "History",
        "Report",
        "__version__",
        "listing",
        "read_trace",
        "scan",
    }
    assert set(dl2gpu.__all__) <= set(dir(dl2gpu))
    for name in dl2gpu.__all__:
        assert getattr(dl2gpu, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'scann'"):
        dl2gpu.scann  # noqa: B018
