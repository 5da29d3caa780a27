"""Writes Flight Recorder dumps as PyTorch does, byte for byte, in every version.

Used by the tests and the benchmarks; an independent second description of the format, so it shares
no code with the reader. Source: FORMATS.md 2.4 to 2.8; `tests/trace/test_flight_recorder.py` checks
that real dumps come out of :func:`dumps` as the same bytes.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Version = tuple[int, int] | None
"""(2, 9) for "2.9"; None for the time before dumps had a version (the file is the list)."""

THREAD = "139756190952320"
CREATED = 1_760_000_000_000_000_000


class TorchPickler:
    """PyTorch's own pickler: protocol 2; memoises every string, and frames used more than once."""

    def __init__(self, shared: frozenset[int] = frozenset()) -> None:
        """``shared``: id() of the frames that occur in more than one place."""
        self.shared = shared
        self.out = bytearray(b"\x80\x02")
        self.strings: dict[str, int] = {}
        self.frames: dict[int, int] = {}
        self.memo = 0

    def put(self) -> int:
        at = self.memo
        self.memo += 1
        self.out += b"q" + bytes([at]) if at < 256 else b"r" + struct.pack("<I", at)
        return at

    def get(self, at: int) -> None:
        self.out += b"h" + bytes([at]) if at < 256 else b"j" + struct.pack("<I", at)

    def string(self, text: str) -> None:
        at = self.strings.get(text)
        if at is not None:
            self.get(at)
            return
        raw = text.encode("utf-8", "surrogateescape")
        self.out += b"X" + struct.pack("<I", len(raw)) + raw
        self.strings[text] = self.put()

    def value(self, value: Any) -> None:
        out = self.out
        if isinstance(value, str):
            self.string(value)
        elif isinstance(value, bool):
            out += b"\x88" if value else b"\x89"
        elif isinstance(value, int):
            if 0 <= value < 1 << 8:
                out += b"K" + bytes([value])
            elif 0 <= value < 1 << 16:
                out += b"M" + struct.pack("<H", value)
            elif -(1 << 31) <= value < 1 << 31:
                out += b"J" + struct.pack("<i", value)
            else:
                out += b"\x8a\x08" + struct.pack("<q", value)
        elif isinstance(value, float):
            out += b"G" + struct.pack(">d", value)
        elif value is None:
            out += b"N"
        elif isinstance(value, tuple):
            for item in value:
                self.value(item)
            out += b"\x86"
        elif isinstance(value, list):
            out += b"]("
            for item in value:
                self.value(item)
            out += b"e"
        else:
            self.dict(value)

    def dict(self, value: Mapping[Any, Any]) -> None:
        frame = value.keys() == {"name", "filename", "line"}
        if frame and id(value) in self.frames:
            self.get(self.frames[id(value)])
            return
        self.out += b"}("
        for key, item in value.items():
            self.value(key)
            self.value(item)
        self.out += b"u"
        if id(value) in self.shared:
            self.frames[id(value)] = self.put()


def dumps(content: Mapping[str, Any] | Sequence[Any]) -> bytes:
    """The pickle of a whole dump."""
    entries = content["entries"] if isinstance(content, Mapping) else content
    used = Counter(id(f) for e in entries if isinstance(e, dict) for f in e.get("frames", ()))
    pickler = TorchPickler(frozenset(f for f, n in used.items() if n > 1))
    pickler.value(content)
    if isinstance(content, dict):
        pickler.put()
    return bytes(pickler.out) + b"."


def json_form(content: Mapping[str, Any]) -> bytes:
    """The JSON that PyTorch writes of the same dump (FORMATS.md 2.5)."""
    entries = []
    for entry in content["entries"]:
        entry = {k: v for k, v in entry.items() if k != "frames"}
        for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[key] = entry.get(key) or 0
        entries.append(entry)
    out = dict(content) | {"entries": entries}
    out.setdefault("nccl_comm_state", {})
    if not entries:
        del out["entries"]
    out["pg_status"] = {
        k: {n: str(x) for n, x in v.items()} for k, v in content.get("pg_status", {}).items()
    }
    return json.dumps(out, sort_keys=True, separators=(",", ":")).encode()


_CPP_TYPES = {
    "Float": "float", "Half": "c10::Half", "BFloat16": "c10::BFloat16", "Long": "long int",
    "Int": "int", "Byte": "unsigned char", "Double": "double",
}  # fmt: skip


def frame(name: str, filename: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


def entry(
    record_id: int,
    name: str = "nccl:all_reduce",
    *,
    version: Version = (2, 9),
    group: tuple[str, str] = ("0", "default_pg"),
    pg_id: int = 0,
    cseq: int = 1,
    pseq: int = 0,
    op_id: int | None = None,
    sizes: Sequence[Sequence[int]] = ((4,),),
    out_sizes: Sequence[Sequence[int]] | None = None,
    dtype: str | Sequence[str] = "Float",
    state: str = "completed",
    created: int | None = None,
    started: int | None = None,
    completed: int | None = None,
    retired: bool | None = None,
    p2p: bool | None = None,
    duration: float | None = None,
    frames: list[dict[str, Any]] | None = None,
    thread: str = THREAD,
) -> dict[str, Any]:
    """One entry with the keys of ``version``, in the writer's order."""
    created = CREATED + record_id * 1000 if created is None else created
    ins = [list(s) for s in sizes]
    outs = ins if out_sizes is None else [list(s) for s in out_sizes]
    dtypes = [dtype] * len(ins) if isinstance(dtype, str) else list(dtype)
    out_dtypes = [dtypes[0] if dtypes else "Float"] * len(outs)
    if version == (2, 0):
        dtypes = [_CPP_TYPES.get(d, d) for d in dtypes]
        out_dtypes = [_CPP_TYPES.get(d, d) for d in out_dtypes]
    p2p = ("send" in name or "recv" in name) if p2p is None else p2p
    retired = state == "completed" if retired is None else retired
    out: dict[str, Any] = {}
    if frames is not None:
        out["frames"] = frames
    if version is not None and version >= (1, 3):
        out["record_id"] = record_id
    out["pg_id"] = pg_id
    if version is not None and version >= (1, 5):
        out["process_group"] = group
    if version is not None and version >= (2, 8):
        out["thread_name"] = "pt_main_thread"
        out["thread_id"] = thread
    if version is not None and version >= (2, 0):
        out["collective_seq_id"] = cseq
        out["p2p_seq_id"] = pseq
    else:
        out["seq_id"] = cseq
    if version is not None and version >= (1, 3):
        out["op_id"] = cseq + pseq if op_id is None else op_id
    out["profiling_name"] = name
    if version is None or version < (1, 1):
        out["time_created_us"] = created // 1000
    else:
        out["time_created_ns"] = created
    if duration is not None:
        out["duration_ms"] = duration
    out["input_sizes"] = ins
    if version is not None and version >= (2, 0):
        out["input_dtypes"] = dtypes
    out["output_sizes"] = outs
    if version is not None and version >= (2, 0):
        out["output_dtypes"] = out_dtypes
    out["state"] = state
    if version is not None and version >= (1, 1):
        out["time_discovered_started_ns"] = started
        out["time_discovered_completed_ns"] = completed
        out["retired"] = retired
    if version is not None and version >= (2, 1):
        out["timeout_ms"] = 600000
    if version is not None and version >= (2, 0):
        out["is_p2p"] = p2p
    return out


def document(
    entries: Iterable[dict[str, Any]],
    *,
    version: Version = (2, 9),
    groups: Mapping[str, tuple[str, Any]] | None = None,
    status: Mapping[int, tuple[int, int, int]] | None = None,
) -> Any:
    """A whole dump. ``groups`` is {name: (description, ranks)}, ``status`` {pg_id: (e, s, c)}."""
    entries = list(entries)
    if version is None:
        return entries
    head: dict[str, Any] = {"version": f"{version[0]}.{version[1]}"}
    if version >= (1, 5):
        head["pg_config"] = {
            name: {
                "name": name,
                "desc": desc,
                "ranks": f"[{', '.join(map(str, ranks))}]" if isinstance(ranks, list) else ranks,
            }
            for name, (desc, ranks) in (groups or {}).items()
        }
    elif version >= (1, 4):
        head["pg_config"] = {int(name): ranks for name, (_, ranks) in (groups or {}).items()}
    if version >= (2, 10):
        head["comm_lib_version"] = "2.27.5"
    elif version >= (2, 6):
        head["nccl_version"] = "2.27.3"
    if version >= (2, 3):
        head["pg_status"] = {
            str(pg): {
                "last_enqueued_collective": e,
                "last_started_collective": s,
                "last_completed_collective": c,
            }
            for pg, (e, s, c) in (status or {}).items()
        }
    if version < (2, 2):
        return {"entries": entries} | head
    return head | {"entries": entries}
