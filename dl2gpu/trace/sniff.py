"""What a file is, from its first few kilobytes: by content, never by name.

Names only help where content cannot: an empty dump, and junk that is known by its name.

Source: FORMATS.md sections 1 and 9.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dl2gpu.trace.chakra_frames import is_framed
from dl2gpu.trace.containers_index import container_kind, no_archive_of_traces
from dl2gpu.trace.files import read_head, read_tail
from dl2gpu.trace.inputs import Stamp, Status

__all__ = ["Kind", "classify", "junk_reason", "looks_like_a_dump", "parquet_kind", "sniff"]

_HEAD: Final = 4096
_MORE: Final = 64 << 10
"""Read where the first 4 kB are JSON, but do not say of what."""
_FOOTER: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Kind:
    """What a file was recognised as."""

    format: str | None
    """Name of the format; None: not known."""
    status: Status = "read"
    """"read": a reader takes it, or its members are files of their own (archives); else what
    becomes of it, and why:"""
    reason: str | None = None


NATIVE: Final = Kind("native")
FLIGHT_RECORDER: Final = Kind("flight_recorder")
PARQUET: Final = Kind("parquet")
LOG: Final = Kind("log")


def _not_yet(format_: str, title: str) -> Kind:
    return Kind(format_, "ignored", f"{title}: not supported yet")


KINETO: Final = Kind("kineto")
_EXECUTION_TRACE = Kind("execution_trace")
_CHAKRA = Kind("chakra")
_CLOG = Kind("clog")
_OTF2 = Kind("otf2")
_PARAM = Kind("param")
_RAS = Kind("ras")
_UNKNOWN_JSON = Kind(None, "ignored", "JSON, but not a trace")
_UNKNOWN = Kind(None, "ignored", "not a trace: the content is of no known format")


def sniff(url: str, name: str, size: int | None, stamp: Stamp | None = None) -> Kind:
    """What the file at ``url`` is. Reads a few kilobytes, through one layer of compression.

    Args:
        url: what :mod:`files` opens.
        name: its base name.
        size: stored bytes, None if not known.
        stamp: what the listing said of it, where it lies in a store.

    Raises:
        InputError: it cannot be opened.
    """
    if size == 0:
        return _empty(name)
    head, packed = read_head(url, _HEAD, stamp)
    if not head:
        if packed is None:
            return _empty(name)
        return Kind(None, "quarantined", f"the {packed} stream is damaged from its beginning")
    if head.startswith(b"PAR1"):
        return parquet_kind(url, stamp)
    container = container_kind(head)
    if container is not None:
        other = no_archive_of_traces(head, name)
        return Kind(container) if other is None else Kind(None, "ignored", other)
    kind = classify(head, name)
    if kind.format is not None:
        return kind
    if kind in (_UNKNOWN_JSON, _UNKNOWN) and len(head) >= _HEAD and _json_start(head) in b"{[":
        head, _ = read_head(url, _MORE, stamp)
        kind = classify(head, name)
    if kind in (_UNKNOWN, _UNKNOWN_JSON) and _is_log(url, head, packed, size, name, stamp):
        return LOG
    if kind in (_UNKNOWN, _UNKNOWN_JSON) and looks_like_a_dump(name):
        return Kind(
            None,
            "quarantined",
            f"named like a trace, but the content is of no known format (begins with {head[:8]!r})",
        )
    return kind


def _empty(name: str) -> Kind:
    # The process was killed before it wrote anything: that rank has no record, which is evidence.
    if re.search(r"\.jsonl(\.gz|\.zst)?$", name):
        return NATIVE
    if _LOG_NAME.search(name):
        return LOG
    if looks_like_a_dump(name):
        return FLIGHT_RECORDER
    return Kind(None, "ignored", "empty file")


# --------------------------------------------------------------------------------------------------
# Names

_DUMP_NAME: Final = re.compile(
    r"(nccl|comm_lib|xccl|rccl|hccl|fr|flight_?recorder)_?(trace|dump)"
    r"|(trace|dump)_rank"
    r"|^_?(dump|trace|fr|rank)[-_.]?\d+(\.(jsonl?|pkl|pickle|bin|gz|zst))*$"
    r"|[-_.]rank[-_.]?\d+(\.(jsonl?|pkl|pickle|bin|gz|zst))*$",
    re.IGNORECASE,
)


def looks_like_a_dump(name: str) -> bool:
    """Is ``name`` one that Flight Recorder dumps, or the files of one rank, usually have."""
    return _DUMP_NAME.search(name) is not None


_LOG_NAME: Final = re.compile(
    r"\.(log|out|err|stdout|stderr)(\.\d{1,4})?(\.(gz|zst|bz2|xz))?$"
    r"|(^|[-_.])(stdout|stderr|console|output)([-_.]?\d+)*(\.(txt|gz|zst|bz2|xz))*$"
    r"|^slurm-\d+|\.[oe]\d{3,}$|\.txt(\.(gz|zst|bz2|xz))?$",
    re.IGNORECASE,
)
"""Names that logs of jobs have. A name alone makes no log: the content must be text."""

_JUNK: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern, re.IGNORECASE), reason)
    for pattern, reason in (
        (r"^\._", "macOS attributes of another file"),
        (r"^\.ds_store$|^thumbs\.db$|^desktop\.ini$", "left by a file manager"),
        (r"^\.", "hidden file"),
        (r"\.pipe$", "pipe of the recorder, not a dump"),
        (r"\.(tmp|part|partial|swp|lock|crdownload)$|~$", "unfinished or temporary file"),
        (r"^(readme|license|notice|changelog)(\.|$)", "a text for people"),
        (r"^expect\.json$|^labels\.(csv|json|parquet)$", "labels of a test corpus"),
        (r"^report\.json$|^report\.html?$", "a report of dl2gpu"),
        (r"^fault_injection\.log$", "log of a fault injector"),
        (r"\.(py|pyc|sh|md|rst|html?|css|js|yaml|yml|toml|ini|cfg|conf|csv)$", "not a trace"),
    )
)
"""Files known by name, so that the report can say what they are. First match counts."""
_ANY_JUNK: Final = re.compile("|".join(p.pattern for p, _ in _JUNK), re.IGNORECASE)


def junk_reason(name: str) -> str | None:
    """Why a file of this name is not looked into; None = it is."""
    if _ANY_JUNK.search(name) is None:
        return None
    return next((reason for pattern, reason in _JUNK if pattern.search(name)), None)


# --------------------------------------------------------------------------------------------------
# Content


def parquet_kind(url: str, stamp: Stamp | None = None) -> Kind:
    """Native Parquet, or a Parquet file of something else: the footer says."""
    tail = read_tail(url, 8, stamp)
    if len(tail) < 8 or tail[4:] != b"PAR1":
        return Kind("parquet", "quarantined", "a Parquet file that is cut short: no footer")
    length = int.from_bytes(tail[:4], "little")
    if b"dl2gpu.trace.version" in read_tail(url, min(length + 8, _FOOTER), stamp):
        return PARQUET
    return Kind(None, "ignored", "a Parquet file, but not of dl2gpu.trace")


_PICKLE: Final = re.compile(rb"\x80[\x02-\x05](?:\x95.{8})?(.)", re.DOTALL)
_DUMP_KEYS: Final = re.compile(
    rb"entries|pg_config|pg_status|comm_state|nccl_version|comm_lib_version"
    rb"|profiling_name|record_id|health_check_results"
)


def classify(head: bytes, name: str) -> Kind:
    """What begins with ``head`` (decompressed)."""
    pickle = _PICKLE.match(head)
    if pickle:
        return _pickle(head, pickle.group(1), name)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        head = head.decode("utf-16", "replace").encode("utf-8", "replace")
    if head.startswith(b"\x03") and head[2:6] == b"OTF2":
        return _OTF2
    if head.startswith(b"\x03B\x01\0") and name.endswith((".def", ".evt", ".snap", ".thumb")):
        return Kind(None, "ignored", "part of an OTF2 archive, which is read by its .otf2 file")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in (b"{", b"["):
        kind = _json(text)
        if kind != _UNKNOWN_JSON:
            return kind
        kind = _text(head, text)  # lines of logs often begin with [
        return _UNKNOWN_JSON if kind == _UNKNOWN else kind
    return _text(head, text)


def _pickle(head: bytes, first: bytes, name: str) -> Kind:
    # `}` empty dict, `]` empty list, `(` mark (protocol 3 and up may begin a dict with it)
    if first in b"}](" and (_DUMP_KEYS.search(head) or looks_like_a_dump(name)):
        return FLIGHT_RECORDER
    if looks_like_a_dump(name):
        return FLIGHT_RECORDER  # its reader refuses what is no dump, and says why
    return Kind(None, "ignored", "a Python pickle, but no Flight Recorder dump (not loaded)")


def _json(text: bytes) -> Kind:
    keys = _outer_keys(text)
    names = keys.keys()
    if text.startswith(b"["):
        if "profiling_name" in names or {"record_id", "pg_id"} <= names:
            return FLIGHT_RECORDER
        if "ph" in names:
            return KINETO
        if "comms" in names:
            return _PARAM
        return _UNKNOWN_JSON
    if keys.get("format") == "dl2gpu.trace" or (
        keys.get("kind") in ("header", "comm", "op", "end") and "ph" not in names
    ):
        return NATIVE
    if str(keys.get("schema", "")).startswith("dl2gpu.report"):
        return Kind(None, "ignored", "a report of dl2gpu")
    if "workload_graph" in names:
        return _CHAKRA
    if "schema" in names and ("nodes" in names or "pid" in names):
        return _EXECUTION_TRACE
    if names & {"traceEvents", "deviceProperties", "distributedInfo", "schemaVersion"}:
        return KINETO
    if {"ph", "ts", "pid"} <= names:
        return KINETO  # the bracket before the first event is missing
    if "communicators" in names and (
        "nccl_version" in names or b'"collective_counts"' in text or b'"secondary_hash"' in text
    ):
        return _RAS
    if "header" in names and names & {"coll_perf", "p2p_perf"}:
        return _not_yet("nccl_inspector", "NCCL inspector record")
    if names & {"entries", "pg_config", "pg_status", "nccl_comm_state"} or (
        names & {"comm_lib_version", "nccl_version"} and len(names) <= 3
    ):
        return FLIGHT_RECORDER
    return _UNKNOWN_JSON


def _text(head: bytes, text: bytes) -> Kind:
    if text.startswith(b"version https://git-lfs.github.com/spec/"):
        return Kind(
            None, "quarantined", "a Git LFS pointer instead of the data: run `git lfs pull`"
        )
    if head[257:262] == b"ustar":
        return Kind(None, "quarantined", "a tar archive that is damaged from its beginning")
    if text.startswith(b"V|1|base_timestamp="):
        return _CLOG
    if _is_ras(head):
        return _RAS
    if _LOG_LINE.search(head):
        return LOG
    if b" entering at walltime " in head:
        return _not_yet("dumpi", "DUMPI text trace")
    if is_framed(head):
        return _CHAKRA
    return _UNKNOWN


def _is_ras(head: bytes) -> bool:
    """A report of NCCL's RAS: its text, or JSON behind the lines of the protocol."""
    if b" NCCL INFO " in head:
        return False
    if head.lstrip().startswith((b"SERVER PROTOCOL", b"OK\n")):
        return b'"communicators' in head or _RAS_TEXT.search(head) is not None
    return _RAS_TEXT.search(head) is not None


_RAS_TEXT: Final = re.compile(
    rb"Job summary\s*\n\s*=====|Communicators\.\.\. .*\n=====|"
    rb"(?m:^\s*#\d+-\d+ \([0-9a-f]{4,16}\) (?:MISMATCH|INCOMPLETE|ERROR))"
)


_LOG_LINE: Final = re.compile(
    rb"[NR]CCL (?:INFO|WARN) |NCCL version |ProcessGroup\w*\.[ch]pp|Watchdog caught|\[c10d\]"
    rb"|torch[./]distributed|CollectiveFingerPrint|monitoredBarrier|store[ -]based barrier"
    rb"|Stalled ops:|\[(?:ready|missing) ranks:|gloo/transport|torchrun|\[(?:rank|default)\d+\]:"
    rb"|<std(?:err|out)>:|(?:INFO|WARN\w*|ERROR)[:|\]].*\brank[ =:]?\d|srun: error|slurmstepd: "
)
"""What logs of distributed jobs hold and hardly any other text does."""
_STEP_LINE: Final = re.compile(
    rb"(?i)\b(?:step|iter(?:ation)?|epoch|batch)s?['\"]?\s?[=:#]?\s*\d.*"
    rb"(?:loss|it/s|tok(?:en)?s?/s|\blr\b|samples|elapsed)"
    rb"|'loss': [\d.]+.*'epoch':"
)
_RANK_LINE: Final = re.compile(rb"(?i)^.{0,60}\brank[ =:#]?\s?\d+\b", re.MULTILINE)
_SMALL_LOG: Final = 1 << 20
"""Text with the name of a log is read up to this size even where its ends say nothing."""


def _is_log(
    url: str, head: bytes, packed: str | None, size: int | None, name: str, stamp: Stamp | None
) -> bool:
    """Is a text with the name of a log one of a job: by its beginning and its end."""
    if _LOG_NAME.search(name) is None or not _is_text(head):
        return False
    if (size or 0) <= _SMALL_LOG and not packed:
        return True  # its reader says if it tells anything
    more, _ = read_head(url, _MORE, stamp)
    if packed is None:
        more += b"\n" + read_tail(url, _MORE, stamp)
    return any(pattern.search(more) is not None for pattern in (_LOG_LINE, _STEP_LINE, _RANK_LINE))


def _is_text(head: bytes) -> bool:
    """Mostly printable; in UTF-16 too, by its mark."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return True
    odd = sum(1 for byte in head if byte < 32 and byte not in b"\t\n\r\x1b\f\b")
    return odd * 50 <= len(head)


def _json_start(head: bytes) -> bytes:
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] or b"-"


_TOKEN: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"|[{}\[\]:,]')


def _outer_keys(text: bytes) -> dict[str, str | None]:
    """Keys of the outer object, or of the objects in the outer list, with values that are text.

    ``text`` may end anywhere.
    """
    level = 2 if text.startswith(b"[") else 1
    depth = 0
    found: dict[str, str | None] = {}
    key: str | None = None  # waits for its value
    last: str | None = None  # a text that may turn out to be a key
    for token in _TOKEN.finditer(text):
        sign = token.group(0)
        if sign in (b"{", b"["):
            depth += 1
            key = None
        elif sign in (b"}", b"]"):
            depth -= 1
            key = None
            if depth <= 0 and level == 1:
                break  # the first object is enough: JSON Lines has more
        elif depth != level:
            continue
        elif sign == b":":
            if last is not None:
                key = last
                found.setdefault(key, None)
        elif sign == b",":
            key = last = None
        else:
            value = token.group(1).decode("utf-8", "replace")
            if key is not None:
                found[key] = value
            last = value
    return found
