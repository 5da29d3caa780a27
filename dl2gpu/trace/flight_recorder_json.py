"""Flight Recorder dumps in JSON, to the same columns as the pickles (FORMATS.md 2.5).

The writer's JSON is one line with sorted keys and no stacks. Files that tools have made from a
pickle look a little different (null for 0, a top-level list, stacks, NaN); both are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np

from dl2gpu.trace.entry_columns import Columns, Fault, Stacks, pack
from dl2gpu.trace.pickle_kernel import COLUMNS, KEYWORDS, LEAST_KEYS, NULL, SATURATED, WIDTH

__all__ = ["decode"]

_INTS: Final = (
    "record_id", "pg_id", "collective_seq_id", "p2p_seq_id", "op_id", "seq_id", "time_created_ns",
    "time_created_us", "time_discovered_started_ns", "time_discovered_completed_ns", "retired",
    "timeout_ms", "is_p2p",
)  # fmt: skip
_TEXTS: Final = ("profiling_name", "state", "thread_id")
_KEYS: Final = frozenset(KEYWORDS[:24])


def decode(data: bytes) -> Columns:
    """Columns of the Flight Recorder JSON ``data``; ``fault`` says why reading ended early.

    Never raises for the content of ``data``. A file cut short gives the entries before the cut;
    what stands behind them in the file (pg_config, pg_status) is then missing.
    """
    root, fault = _parse(data)
    entries: list[Any] = []
    header: dict[str, Any] = {}
    if isinstance(root, list):
        entries = root
    elif isinstance(root, dict):
        found = root.pop("entries", None)
        entries = found if isinstance(found, list) else []
        header = root
    else:
        fault = fault or Fault("damaged", 0, "neither a JSON object nor a list")
    columns = _columns(entries, header)
    columns.fault, columns.size = fault, len(data)
    return columns


def _parse(data: bytes) -> tuple[Any, Fault | None]:
    try:
        return msgspec.json.decode(data), None
    except (msgspec.DecodeError, RecursionError):
        pass
    text = data.decode("utf-8-sig", "replace")
    try:
        # the standard library also takes NaN, Infinity and control characters
        return json.loads(text, strict=False, parse_constant=lambda _: None), None
    except RecursionError:
        return None, Fault("damaged", 0, "JSON nested too deep")
    except ValueError as error:
        at = getattr(error, "pos", len(text))
        if at >= len(text.rstrip()) - 1 or "Unterminated" in str(error):
            fault = Fault("truncated", at, f"the JSON ends at byte {at} without its end")
        else:
            fault = Fault("damaged", at, f"damaged at byte {at}: {error}")
        return _salvage(text), fault


def _salvage(text: str) -> Any:
    """What can be had of broken JSON: the entries before the break, and the members around them."""
    decoder = json.JSONDecoder(strict=False, parse_constant=lambda _: None)
    whitespace = re.compile(r"[\s,]*")

    def skip(at: int) -> int:
        found = whitespace.match(text, at)
        return found.end() if found else at

    def items(at: int) -> list[Any]:
        out: list[Any] = []
        try:
            while True:
                at = skip(at)
                value, at = decoder.raw_decode(text, at)
                out.append(value)
        except (ValueError, RecursionError):
            return out

    at = skip(0)
    if text[at : at + 1] == "[":
        return items(at + 1)
    root: dict[str, Any] = {}
    at += 1
    try:
        while True:
            key, at = decoder.raw_decode(text, skip(at))
            at = text.index(":", at) + 1
            at = skip(at)
            if key == "entries" and text[at : at + 1] == "[":
                root["entries"] = items(at + 1)
            root[key], at = decoder.raw_decode(text, at)
    except (ValueError, RecursionError, TypeError):
        return root


def _columns(entries: list[Any], header: dict[str, Any]) -> Columns:
    # the same rule as for pickles: an entry is a dict with a name and a few known keys
    good = [
        e
        for e in entries
        if isinstance(e, dict)
        and isinstance(e.get("profiling_name"), str)
        and len(_KEYS & e.keys()) >= LEAST_KEYS
    ]
    numbers = {word: i for i, word in enumerate(KEYWORDS)}
    rec = np.full((len(good), WIDTH), NULL, dtype=np.int64)

    def text(value: Any) -> int:
        return numbers.setdefault(value, len(numbers)) if isinstance(value, str) else NULL

    def fill(name: str, values: Iterable[int]) -> None:
        rec[:, COLUMNS[name]] = list(values)

    for name in _INTS:
        fill(name, (_int(e.get(name)) for e in good))
    for name in _TEXTS:
        fill(name, (text(e.get(name)) for e in good))
    groups = [g if isinstance(g := e.get("process_group"), list) else [] for e in good]
    fill("process_group", (text(g[0]) if g else NULL for g in groups))
    fill("pg_desc", (text(g[1]) if len(g) > 1 else NULL for g in groups))
    pool: list[int] = []
    for side in ("input", "output"):
        lists = [[_numel(t) for t in _list(e.get(f"{side}_sizes"))] for e in good]
        known = [isinstance(e.get(f"{side}_sizes"), list) for e in good]
        fill(
            f"{side}_sizes",
            (min(sum(x), SATURATED) if k else NULL for x, k in zip(lists, known, strict=True)),
        )
        fill(f"{side}_tensors", (len(x) if k else NULL for x, k in zip(lists, known, strict=True)))
        starts = []
        for x in lists:
            starts.append(len(pool) if len(x) > 1 else NULL)
            if len(x) > 1:
                pool.extend(x)
        fill(f"{side}_numels", starts)
        dtypes = [_list(e.get(f"{side}_dtypes")) for e in good]
        fill(f"{side}_dtypes", (text(d[0]) if d else NULL for d in dtypes))
        fill(f"{side}_mixed", (1 if any(a != b for a, b in pairwise(d)) else NULL for d in dtypes))
    frames: dict[tuple[int, int, int], int] = {}
    stacks: dict[tuple[int, ...], int] = {}
    numbers_of_stacks = []
    for e in good:
        if not isinstance(e.get("frames"), list):
            numbers_of_stacks.append(NULL)
            continue
        stack = tuple(
            frames.setdefault((text(f["name"]), text(f["filename"]), _int(f["line"])), len(frames))
            for f in e["frames"]
            if isinstance(f, dict) and {"name", "filename", "line"} <= f.keys()
        )
        numbers_of_stacks.append(stacks.setdefault(stack, len(stacks)))
    fill("frames", numbers_of_stacks)
    table = Stacks(
        keys=[],
        ends=np.cumsum([0, *map(len, stacks)], dtype=np.int64),
        flat=np.array([f for stack in stacks for f in stack], dtype=np.int32),
        frames=np.array(list(frames), dtype=np.int64).reshape(-1, 3),
    )
    raw = [s.encode("utf-8", "replace") for s in numbers]
    columns = pack(
        rec, np.arange(len(rec), dtype=np.int64), raw, table, np.array(pool, dtype=np.int64)
    )
    table.keys = [tuple(columns.stack(k)) for k in range(len(stacks))]
    columns.header = header
    columns.lost = len(entries) - len(good)
    return columns


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _int(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    # NULL itself is the one value of 64 bits that cannot be told from an absent one
    return int(value) if isinstance(value, int) and NULL < value < -NULL else NULL


def _numel(dims: Any) -> int:
    if not isinstance(dims, list) or any(type(d) is not int or d < 0 for d in dims):
        return SATURATED
    total = 0 if 0 in dims else 1
    for d in dims:
        total *= d
        if total >= SATURATED:
            return SATURATED
    return total
