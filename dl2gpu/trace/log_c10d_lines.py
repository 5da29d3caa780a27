"""Grammar of what PyTorch's process groups print, and of stalls of Horovod, vLLM and FSDP.

That is the watchdog, the desync report, barriers, stores, gloo and fingerprints.

Each function takes lines and gives facts; each pattern is one wording. ``.cpp:<line>`` numbers and
glog prefixes differ from version to version and are not looked at.

Source: LOG_LINES.md; FORMATS.md section 6.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from dl2gpu.trace.log_facts import facts, none, own

__all__ = ["WORDS", "c10d_facts"]

WORDS: Final = (
    "Watchdog caught", "timed out in blocking wait", "NCCL work", "work sequence id",
    "dump signal", "watchdog", "acquire GIL", "async exception", "remote error detected",
    "Timeout at collective", "lagging ranks", "joined but didn't finish", "but didn't join",
    "started ranks:", "finished ranks:", "] started ", "] finished ", "monitoredBarrier",
    "to complete", "Connection closed by peer", "Connection reset by peer", "caused pair closure",
    "connectFullMesh", "op.preamble", "store based barrier", "store-based barrier",
    "ncclUniqueId", "wait timeout after", "CollectiveFingerPrint", "tensors were submitted",
    "issing ranks", "ready ranks", "Stalled ops", ": [allreduce", "order differs",
    "broadcast block found", "initialization options", "Process group", "ProcessGroup", "[c10d]",
    "torch.distributed.",
)  # fmt: skip
"""Literal text; a line that holds none of these states nothing here."""

_PG: Final = (
    r"\[PG (?:ID )?(?P<pg>\d+)(?: PG GUID (?P<guid>[^\s(\]]+))?\s?(?:\((?P<desc>[^)]*)\))? "
    r"Rank (?P<said>\d{1,6})\]"
)
_SAID: Final = r"\[Rank (\d{1,6})\]"
_WORK: Final = (
    r"Work\w*\((?:SeqNum=(?P<ordinal>-?\d+), )?OpType=(?P<op>\w+)"
    r"(?:, TensorShape=\[(?P<shape>[^\]]*)\])?(?:, NumelIn=(?P<nin>-?\d+))?"
    r"(?:, NumelOut=(?P<nout>-?\d+))?, Timeout\(ms\)=(?P<limit>\d+)\)"
)
_MARKS: Final = (
    r"\[[EWIF](?: |\d{3,4} )|\[Rank \d|\[PG |Watchdog caught|Work\w*\(|Rank \d+ successfully|"
    r"Detected mismatch|Rank \d+ is running|Ranks? [\d, ]+ failed|Timed out|Waiting in store|"
    r"\[enforce fail|/\S+\.py:\d+: \w+: |Observed |Received a dump|\[\d+\] is setting up|"
    r"\[\S*gloo|One or more tensors|Stalled ops|"
    r"\[\d[\d, ]*\] (?:started|finished|joined)|- To our|- \[\d|#\d"
)


def _own(lines: pl.DataFrame, pattern: str) -> pl.DataFrame:
    return own(lines, pattern, _MARKS)


def _number(text: pl.Expr) -> pl.Expr:
    """Int64; what leaves 64 bits, or is the unknown size 2^64-1, is null."""
    return text.cast(pl.Int64, strict=False)


def _ranks(text: pl.Expr) -> pl.Expr:
    """Ranks of "0, 3" or "0,3" or "0 3"."""
    return text.str.extract_all(r"[0-9]{1,6}").cast(pl.List(pl.Int32))


def _size(text: pl.Expr) -> pl.Expr:
    """Elements of a shape such as "2048, 1024"; of a scalar 1."""
    dims = text.str.extract_all(r"[0-9]{1,12}").cast(pl.List(pl.Int64))
    return dims.list.eval(pl.element().product()).list.first()


def c10d_facts(lines: pl.DataFrame) -> pl.DataFrame:
    """All facts of this grammar in ``lines`` (columns of ``log_lines.LINES``)."""
    if lines.is_empty():
        return none()
    return pl.concat(
        [
            _timeouts(lines), _statuses(lines), _signals(lines), _stuck(lines), _errors(lines),
            _desync(lines), _barriers(lines), _gloo(lines), _stores(lines), _prints(lines),
            _stalls(lines), _options(lines),
        ]
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# The watchdog


def _pg_columns() -> dict[str, pl.Expr]:
    text = pl.col("text")
    return {
        "pg": text.str.extract(_PG, 1),
        "guid": text.str.extract(_PG, 2),
        "desc": text.str.extract(_PG, 3),
        "said": pl.coalesce(text.str.extract(_PG, 4), text.str.extract(_SAID, 1)),
    }


def _work_columns() -> dict[str, pl.Expr]:
    text = pl.col("text")
    shape = text.str.extract(_WORK, 3)
    return {
        "ordinal": _number(text.str.extract(_WORK, 1)),
        "op": text.str.extract(_WORK, 2),
        "shape": shape,
        "count": pl.coalesce(_number(text.str.extract(_WORK, 4)), _size(shape)),
        "count_out": _number(text.str.extract(_WORK, 5)),
    }


def _timeouts(lines: pl.DataFrame) -> pl.DataFrame:
    hits = _own(
        lines, r"Watchdog caught collective operation timeout: Work|timed out in blocking wait"
    )
    ran = pl.col("text").str.extract(r"ran for (\d{1,15}) milliseconds")
    limit = pl.col("text").str.extract(r"Timeout\(ms\)=(\d{1,15})\)")
    return facts(
        hits.filter(pl.col("text").str.contains(_WORK)),
        "timeout",
        number=pl.coalesce(_number(ran), _number(limit)),
        **_pg_columns(),
        **_work_columns(),
    )


_STATUS: Final = (
    r"(?:Timeout at NCCL work: |detected by watchdog at work: |at work sequence id: )(-?\d+)"
)


def _statuses(lines: pl.DataFrame) -> pl.DataFrame:
    hits = _own(lines, _STATUS)
    text = pl.col("text")
    return facts(
        hits,
        "status",
        ordinal=_number(text.str.extract(_STATUS)),
        **_progress(),
        **_pg_columns(),
    )


def _progress() -> dict[str, pl.Expr]:
    text = pl.col("text")
    return {
        "enqueued": _number(text.str.extract(r"(?i)last enqueued (?:NCCL )?work: (-?\d+)")),
        "started": _number(text.str.extract(r"(?i)last started (?:NCCL )?work: (-?\d+)")),
        "completed": _number(text.str.extract(r"(?i)last completed (?:NCCL )?work: (-?\d+)")),
    }


def _signals(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    received = _own(lines, r"Received a dump signal due to a collective timeout from ")
    observed = _own(lines, r"Observed flight recorder dump signal from another rank")
    update = _own(lines, r"NCCL Work update periodically: ")
    here = text.str.contains("from this local rank", literal=True)
    return pl.concat(
        [
            facts(
                received,
                pl.when(here).then(pl.lit("signal")).otherwise(pl.lit("observed")),
                of=_ranks(text.str.extract(r"timeout from  ?rank (\d{1,6})")),
                **_progress(),
                **_pg_columns(),
            ),
            facts(observed, "observed", **_pg_columns()),
            facts(update, "progress", **_progress(), **_pg_columns()),
        ]
    )


def _stuck(lines: pl.DataFrame) -> pl.DataFrame:
    stuck = _own(lines, r"watchdog got stuck for \d+ seconds")
    gil = _own(lines, r"Could not acquire GIL within")
    return pl.concat(
        [
            facts(
                stuck, "stuck",
                number=_number(pl.col("text").str.extract(r"stuck for (\d{1,9}) seconds")),
                **_pg_columns(),
            ),
            facts(gil, "gil", **_pg_columns()),
        ]
    )  # fmt: skip


def _errors(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    async_ = _own(lines, r"raised the following async exception: ")
    dead = _own(lines, r"watchdog thread terminated with exception: ").filter(
        ~text.str.contains("Watchdog caught", literal=True)
    )
    remote = _own(lines, r"remote error detected from rank: \d")
    remote_words = r"(?i)remote (?:process exited|error)|ncclRemoteError|network error"
    return pl.concat(
        [
            facts(async_, "remote_error" , **_pg_columns(), **_work_columns()).filter(
                text.str.contains(remote_words)
            ),
            facts(
                dead,
                pl.when(text.str.contains(remote_words))
                .then(pl.lit("remote_error"))
                .otherwise(pl.lit("watchdog_error")),
                **_pg_columns(),
            ),
            facts(
                remote, "remote_error",
                of=_ranks(text.str.extract(r"from rank: (\d{1,6})")), **_pg_columns(),
            ),
        ]
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Desync report


def _desync(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    list_ = r"\[([\d, ]+)\]"
    # lines of a report hold nothing else; what stands before "- " or "[" is white space
    patterns = {
        "desync_timeout": r"^\s*- \[(\d{1,6})\] Timeout at collective: (\w+), #(\d+)",
        "desync_never": r"^\s*- To our best knowledge, ranks \[([\d, ]+)\] are the lagging ranks",
        "desync_joined": rf"^\s*(?:- )?{list_} joined but didn't finish collective #(\d+)",
        "desync_behind": (
            rf"^\s*(?:- )?{list_} finished collective #\d+, but didn't join collective #(\d+)"
        ),
        "desync_start_head": r"^\s*#(\d+) started ranks:",
        "desync_end_head": r"^\s*#(\d+) finished ranks:",
        "desync_started": rf"^\s*{list_} started (\w+)\s*$",
        "desync_finished": rf"^\s*{list_} finished (\w+)\s*$",
    }
    found = []
    for what, pattern in patterns.items():
        hits = lines.filter(text.str.contains(pattern))
        first, second, third = (text.str.extract(pattern, i) for i in (1, 2, 3))
        if what == "desync_timeout":
            columns = {"of": _ranks(first), "said": first, "op": second, "ordinal": third}
        elif what.endswith("_head"):
            columns = {"ordinal": first}
        elif what in {"desync_started", "desync_finished"}:
            columns = {"of": _ranks(first), "op": second}
        elif what == "desync_never":
            columns = {"of": _ranks(first)}
        else:
            columns = {"of": _ranks(first), "ordinal": second}
        found.append(facts(hits, what, **columns))
    out = pl.concat(found)
    if out.is_empty():
        return out
    # "#39 started ranks:" holds for the lists below it
    head = pl.col("what").str.ends_with("_head")
    listed = pl.col("what").is_in(["desync_started", "desync_finished"])
    return (
        out.sort("file", "line", "part")
        .with_columns(above=pl.when(head).then("ordinal").forward_fill().over("file", "rank"))
        .with_columns(ordinal=pl.when(listed).then("above").otherwise("ordinal"))
        .filter(~head)
        .drop("above")
    )


# --------------------------------------------------------------------------------------------------
# Barriers, gloo, stores


def _barriers(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    failed = r"Ranks? ([\d, ]+?) failed to pass monitoredBarrier in (\d+)"
    waited = r"Rank (\d{1,6}) successfully reached monitoredBarrier, but received errors"
    return pl.concat(
        [
            facts(
                _own(lines, failed), "barrier_failed",
                said=text.str.extract(r"\[Rank (\d{1,6})\]: Ranks? "),
                of=_ranks(text.str.extract(failed)), number=_number(text.str.extract(failed, 2)),
            ),
            facts(_own(lines, waited), "barrier_waited", said=text.str.extract(waited)),
        ]
    )  # fmt: skip


def _gloo(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    timed = r"Timed out waiting (\d{1,12})ms for (recv|send) operation to complete"
    closed = (
        r"gloo\S*\] (?:Connection closed by peer|Read error .*Connection reset|"
        r"Write error .*Broken pipe|.*Connection reset by peer)"
    )
    ours = r"Application timeout caused pair closure"
    mesh = r"Gloo connectFullMesh failed|gloo\S*\] Connect timeout \["
    size = (
        r"op\.(?:nread|nbytes).{0,40}op\.preamble\.(?:nbytes|length)|"
        r"op\.preamble\.length <= op\.nbytes"
    )
    return pl.concat(
        [
            facts(
                _own(lines, timed), "gloo_timeout",
                number=_number(text.str.extract(timed)), op=text.str.extract(timed, 2),
            ),
            facts(_own(lines, ours), "gloo_timeout"),
            facts(_own(lines, closed), "peer_closed"),
            facts(_own(lines, mesh), "mesh_failed"),
            facts(_own(lines, size), "gloo_size"),
        ]
    )  # fmt: skip


def _stores(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    joined = r"world_size=(\d{1,7}), (?:worker_count|num_workers_joined)=(\d{1,7})"
    numbers = {
        "number": _number(text.str.extract(joined, 1)),
        "count": _number(text.str.extract(joined, 2)),
        "pg": text.str.extract(r"key: ?(\S+) "),
        "said": text.str.extract(r"(?:rank:? |Rank )(\d{1,6})"),
    }
    waits = _own(lines, r"Waiting in store based barrier to initialize process group")
    timed = _own(lines, r"Timed out initializing process group in store based barrier")
    done = _own(lines, r"Completed store-based barrier for key")
    unique = (
        r"\[(\d{1,6})\] is setting up NCCL communicator and retr\w+ ncclUniqueId from \[(\d+)\]"
    )
    keys = r"wait timeout after (\d+)ms, keys: (\S+)|Timeout waiting for key: (\S+)"
    return pl.concat(
        [
            facts(waits, "store_wait", **numbers),
            facts(timed, "store_timeout", **numbers),
            facts(
                done, "store_done",
                **numbers | {"number": _number(text.str.extract(r"with (\d{1,7}) nodes"))},
            ),
            facts(
                _own(lines, unique), "unique_id",
                said=text.str.extract(unique, 1), of=_ranks(text.str.extract(unique, 2)),
            ),
            facts(
                _own(lines, keys).filter(
                    ~text.str.contains(unique) & text.str.contains(r"default_pg|Dist\w*Error|c10d")
                ),
                "store_key",
                pg=pl.coalesce(text.str.extract(keys, 2), text.str.extract(keys, 3)),
            ),
        ]
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Fingerprints of debug level DETAIL

_PRINT: Final = (
    r"CollectiveFingerPrint\((?:SequenceNumber=(-?\d+)(?:, ?)?)?OpType=(\w+)"
    r"(?:, TensorShape=\[([^\]]*)\])?(?:, TensorDtypes=([^,)]*))?"
)


def _prints(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    hits = _own(lines, r"CollectiveFingerPrint\(")
    if hits.is_empty():
        return none()
    differs = hits.filter(text.str.contains("Detected mismatch between collectives", literal=True))
    stopped = hits.filter(text.str.contains(r"(?i)monitored ?barrier encountered error"))
    running = hits.filter(text.str.contains("] Running collective:", literal=True))
    mine = r"Rank (\d{1,6}) is running (?:inconsistent )?collective: " + _PRINT
    partner = r"but Rank (\d{1,6}) is running collective: " + _PRINT

    def side(pattern: str) -> dict[str, pl.Expr]:
        shape = text.str.extract(pattern, 4)
        return {
            "said": text.str.extract(pattern, 1),
            "ordinal": _number(text.str.extract(pattern, 2)),
            "op": text.str.extract(pattern, 3),
            "shape": shape,
            "count": _size(shape),
            "desc": text.str.extract(pattern, 5),
        }

    own = {
        "ordinal": _number(text.str.extract(_PRINT, 1)),
        "op": text.str.extract(_PRINT, 2),
        "shape": text.str.extract(_PRINT, 3),
        "count": _size(text.str.extract(_PRINT, 3)),
        "said": text.str.extract(_SAID, 1),
    }
    return pl.concat(
        [
            facts(differs, "differs", **side(mine)),
            facts(differs.filter(text.str.contains(partner)), "differs_from", **side(partner)),
            facts(stopped, "print_stopped", **own),
            # a whole trace, of which the last of each rank suffices
            facts(running, "running", **own)
            .group_by("file", "rank", "said", maintain_order=True)
            .last()
            .select(none().columns),
        ]
    )


# --------------------------------------------------------------------------------------------------
# Other stacks


def _stalls(lines: pl.DataFrame) -> pl.DataFrame:
    text = pl.col("text")
    ready = r"\[ready ranks: ?([\d, ]*)\]"
    missing = r"\[missing ranks: ?([\d, ]*)\]"
    later = r"^\s*(\d{1,6}): \[[\w.]"
    horovod = _own(
        lines, r"tensors were submitted to be|Stalled ops:|\[ready ranks:|\[missing ranks:"
    )
    by_rank = lines.filter(text.str.contains(later))
    names = r"([\w./-]+) \[(?:ready|missing) ranks"
    fsdp = r"(?:Forward|All-gather) order differs"
    return pl.concat(
        [
            facts(
                horovod.filter(text.str.contains(ready)), "stall_ready",
                of=_ranks(text.str.extract(ready)), op=text.str.extract(names),
            ),
            facts(
                horovod.filter(text.str.contains(missing)), "stall_missing",
                of=_ranks(text.str.extract(missing)), op=text.str.extract(names),
            ),
            facts(
                _own(lines, r"(?i)Missing ranks:\s*$"), "stall_head",
            ),
            facts(
                by_rank, "stall_item", of=_ranks(text.str.extract(later)),
                op=text.str.extract(r"\[([\w./-]+)"),
            ),
            facts(
                _own(lines, fsdp), "fsdp_order",
                said=text.str.extract(r"on rank (\d{1,6})"),
            ),
            facts(
                _own(lines, r"No available shared memory broadcast block found in \d+ seconds"),
                "block_wait",
            ),
        ]
    )  # fmt: skip


def _options(lines: pl.DataFrame) -> pl.DataFrame:
    """How large the groups are that a rank makes; and that there are groups at all."""
    text = pl.col("text")
    size = r"initialization options:.{0,40}?size: (\d{1,7}), global rank: (\d{1,6})"
    there = r"\[c10d\]|ProcessGroup\w*\.cpp:\d|torch\.distributed\."
    return pl.concat(
        [
            facts(
                _own(lines, size), "options",
                number=_number(text.str.extract(size)), rank=text.str.extract(size, 2),
                **_pg_columns(),
            ),
            facts(lines.filter(text.str.contains(there)), "present")
            .group_by("file", maintain_order=True)
            .first()
            .select(none().columns),
        ]
    )  # fmt: skip
