"""The pipelines lie beside the package and are not installed: they are found in the checkout."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.append(ROOT)  # at the end: the package is the installed one
