"""Flight Recorder dumps in JSON, to the same columns as the pickles (FORMATS.md 2.5).

The writer's JSON is one line with sorted keys and no stacks. Files that tools have made from a
pickle look a little different (null for 0, a top-level list, stacks, NaN); both are read.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from dl2gpu.trace.entry_columns import Columns, Fault, Stacks, pack
from dl2gpu.trace.json_text import DECODER, lenient, without_halves
from dl2gpu.trace.pickle_tables import COLUMNS, KEYWORDS, LEAST_KEYS, NULL, SATURATED, WIDTH

__all__ = ["decode"]

_Sizes = tuple[tuple[int, ...], ...]


class _Entry(msgspec.Struct):
    """The keys of an entry that are used, with the types that the writer gives them."""

    record_id: int | None = None
    pg_id: int | None = None
    process_group: tuple[str, str] | None = None
    collective_seq_id: int | None = None
    p2p_seq_id: int | None = None
    seq_id: int | None = None
    profiling_name: str | None = None
    time_created_ns: int | None = None
    time_created_us: int | None = None
    input_sizes: _Sizes | None = None
    input_dtypes: tuple[str, ...] | None = None
    output_sizes: _Sizes | None = None
    output_dtypes: tuple[str, ...] | None = None
    state: str | None = None
    time_discovered_started_ns: int | None = None
    time_discovered_completed_ns: int | None = None
    retired: bool | None = None
    is_p2p: bool | None = None
    thread_id: str | None = None
    frames: Any = None


_INTS: Final = (
    "record_id", "pg_id", "collective_seq_id", "p2p_seq_id", "seq_id", "time_created_ns",
    "time_created_us", "time_discovered_started_ns", "time_discovered_completed_ns", "retired",
    "is_p2p",
)  # fmt: skip
_TEXTS: Final = ("profiling_name", "state", "thread_id")
_ENTRIES: Final = msgspec.json.Decoder(list[_Entry])
_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode(data: bytes) -> Columns:
    """Columns of the Flight Recorder JSON ``data``; ``fault`` says why reading ended early.

    Never raises for the content of ``data``. A file cut short gives the entries before the cut;
    what stands behind them in the file (pg_config, pg_status) is then missing.
    """
    typed = _as_written(data)
    if typed is not None:
        entries, header = typed
        lost, fault = 0, None
    else:
        root, fault = _parse(data)
        header = root if isinstance(root, dict) else {}
        found = header.pop("entries", None) if isinstance(root, dict) else root
        if root is not None and not isinstance(root, (dict, list)):
            fault = fault or Fault("damaged", 0, "neither a JSON object nor a list")
        members = found if isinstance(found, list) else []
        entries = [_tolerant(e) for e in members if isinstance(e, dict)]
        lost = len(members) - len(entries)
    good = [e for e in entries if _is_entry(e)]
    columns = _columns(good)
    columns.header, columns.fault, columns.size = header, fault, len(data)
    columns.lost = lost + len(entries) - len(good)
    return columns


def _as_written(data: bytes) -> tuple[list[_Entry], dict[str, Any]] | None:
    """Entries and header of a file that holds just what PyTorch writes; None for any other."""
    try:
        members = _MEMBERS.decode(data)
        entries = members.pop("entries", None)
        header = {key: msgspec.json.decode(value) for key, value in members.items()}
        return [] if entries is None else _ENTRIES.decode(entries), header
    except (msgspec.DecodeError, RecursionError):
        return None


def _is_entry(e: _Entry) -> bool:
    known = (e.record_id, e.pg_id, e.state, e.input_sizes, e.collective_seq_id, e.seq_id)
    return e.profiling_name is not None and len(known) - known.count(None) >= LEAST_KEYS - 1


def _tolerant(found: dict[str, Any]) -> _Entry:
    """An entry of a file that was made by something else: what is not of its type is absent."""
    e = _Entry()
    for name in _INTS:
        setattr(e, name, _int(found.get(name)))
    for name in _TEXTS:
        text = found.get(name)
        setattr(e, name, text if isinstance(text, str) else None)
    group = found.get("process_group")
    if isinstance(group, list) and len(group) == 2 and all(isinstance(g, str) for g in group):
        e.process_group = (group[0], group[1])
    for side in ("input", "output"):
        sizes, dtypes = found.get(f"{side}_sizes"), found.get(f"{side}_dtypes")
        if isinstance(sizes, list):
            setattr(e, f"{side}_sizes", tuple(map(_dims, sizes)))
        if isinstance(dtypes, list):
            setattr(e, f"{side}_dtypes", tuple(d for d in dtypes if isinstance(d, str)))
    e.frames = found.get("frames")
    return e


def _int(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    return int(value) if isinstance(value, int) else None


def _dims(dims: Any) -> tuple[int, ...]:
    known = isinstance(dims, list) and all(type(d) is int for d in dims)
    return tuple(dims) if known else (-1,)


def _parse(data: bytes) -> tuple[Any, Fault | None]:
    try:
        return msgspec.json.decode(data), None
    except (msgspec.DecodeError, RecursionError):
        pass
    text = data.decode("utf-8-sig", "replace")
    try:
        # the standard library also takes NaN, Infinity and control characters
        return lenient(text), None
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
    text = without_halves(text)
    whitespace = re.compile(r"[\s,]*")

    def skip(at: int) -> int:
        found = whitespace.match(text, at)
        return found.end() if found else at

    def items(at: int) -> list[Any]:
        out: list[Any] = []
        try:
            while True:
                at = skip(at)
                value, at = DECODER.raw_decode(text, at)
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
            key, at = DECODER.raw_decode(text, skip(at))
            at = text.index(":", at) + 1
            at = skip(at)
            if key == "entries" and text[at : at + 1] == "[":
                root["entries"] = items(at + 1)
            root[key], at = DECODER.raw_decode(text, at)
    except (ValueError, RecursionError, TypeError):
        return root


def _columns(entries: list[_Entry]) -> Columns:
    numbers = {word: i for i, word in enumerate(KEYWORDS)}
    rec = np.full((len(entries), WIDTH), NULL, dtype=np.int64)

    def texts(name: str, values: list[str | None]) -> None:
        for text in dict.fromkeys(values):
            if text is not None:
                numbers.setdefault(text, len(numbers))
        rec[:, COLUMNS[name]] = [NULL if v is None else numbers[v] for v in values]

    for name in _INTS:
        rec[:, COLUMNS[name]] = _longs([getattr(e, name) for e in entries])
    for name in _TEXTS:
        texts(name, [getattr(e, name) for e in entries])
    groups = [e.process_group for e in entries]
    texts("process_group", [None if g is None else g[0] for g in groups])
    texts("pg_desc", [None if g is None else g[1] for g in groups])
    known: dict[_Sizes, list[int]] = {}
    pool: list[int] = []
    for side in ("input", "output"):
        sizes = [getattr(e, f"{side}_sizes") for e in entries]
        rec[:, COLUMNS[f"{side}_sizes"]] = [
            NULL if s is None else min(sum(_numels(s, known)), SATURATED) for s in sizes
        ]
        rec[:, COLUMNS[f"{side}_tensors"]] = [NULL if s is None else len(s) for s in sizes]
        starts = [NULL] * len(entries)
        for i, s in enumerate(sizes):
            if s is not None and len(s) > 1:
                starts[i] = len(pool)
                pool.extend(_numels(s, known))
        rec[:, COLUMNS[f"{side}_numels"]] = starts
        dtypes = [getattr(e, f"{side}_dtypes") for e in entries]
        texts(f"{side}_dtypes", [d[0] if d else None for d in dtypes])
        rec[:, COLUMNS[f"{side}_mixed"]] = [1 if d and len(set(d)) > 1 else NULL for d in dtypes]

    frames: dict[tuple[int, int, int], int] = {}
    stacks: dict[tuple[int, ...], int] = {}
    for i, e in enumerate(entries):
        if isinstance(e.frames, list):
            stack = tuple(
                frames.setdefault(frame, len(frames))
                for frame in (_frame(f, numbers) for f in e.frames)
                if frame is not None
            )
            rec[i, COLUMNS["frames"]] = stacks.setdefault(stack, len(stacks))
    table = Stacks(
        keys=[],
        ends=np.cumsum([0, *map(len, stacks)], dtype=np.int64),
        flat=np.array([f for stack in stacks for f in stack], dtype=np.int32),
        frames=np.array(list(frames), dtype=np.int64).reshape(-1, 3),
    )
    raw = [s.encode("utf-8", "replace") for s in numbers]
    order = np.arange(len(rec), dtype=np.int64)
    columns = pack(rec, order, raw, table, np.array(pool, dtype=np.int64))
    table.keys = [tuple(columns.stack(k)) for k in range(len(stacks))]
    return columns


def _longs(values: list[int | None]) -> npt.NDArray[np.int64]:
    try:
        return np.array([NULL if v is None else v for v in values], dtype=np.int64)
    except OverflowError:  # NULL itself is the one value of 64 bits that is not read as written
        fits = [v if v is not None and NULL < v < -NULL else NULL for v in values]
        return np.array(fits, dtype=np.int64)


def _numels(sizes: _Sizes, known: dict[_Sizes, list[int]]) -> list[int]:
    """Elements of each tensor, saturated; negative sizes count as unknown (saturated)."""
    found = known.get(sizes)
    if found is None:
        found = known[sizes] = []
        for dims in sizes:
            total = 0 if 0 in dims else 1
            for d in dims:
                total = SATURATED if d < 0 else min(total * d, SATURATED)
                if total == SATURATED:
                    break
            found.append(total)
    return found


def _frame(found: Any, numbers: dict[str, int]) -> tuple[int, int, int] | None:
    """A frame as (string number, string number, line), None if it is none."""
    if not isinstance(found, dict):
        return None
    name, filename, line = found.get("name"), found.get("filename"), _int(found.get("line"))
    if not isinstance(name, str) or not isinstance(filename, str):
        return None
    number = numbers.setdefault(name, len(numbers)), numbers.setdefault(filename, len(numbers))
    return (*number, line if line is not None and 0 <= line < 1 << 62 else NULL)
