"""Writer of the native JSON Lines format: one file a rank, lines put together by columns.

A trace of any source can be written and comes back as the same event table. For what
TRACE_FORMAT.md has no key for, the header says ``"defaults": false`` (an absent key is null, names
are exact) and carries the job's and the rank's own facts; operations may carry ``flags``; lines of
kind ``status`` hold what a rank says of a communicator. Other readers may skip all of these.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from dl2gpu.trace.files import compress, whole_file
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.schema import (
    ANY,
    EXIT,
    FLAG,
    MODE,
    OP_OTHER,
    SEND_MODE,
    STATE,
    Trace,
    dtype_name,
    op_name,
)

__all__ = ["write_jsonl"]

_NAME_OF_EXIT: Final = {code: name for name, code in EXIT.items()}


def write_jsonl(trace: Trace, directory: str | os.PathLike[str], suffix: str = ".jsonl") -> None:
    """Writes each rank of each job into a file of its own below ``directory``.

    Args:
        trace: what to write; ``ranks`` has a row for each rank that has events.
        directory: made where it is missing. A job's files lie in a subfolder of its ``folder``'s
            name; where the trace has one job only, in ``directory`` itself.
        suffix: ".jsonl", ".jsonl.gz" or ".jsonl.zst".

    Raises:
        InputError: a rank has events but no row in ``ranks``, or a file cannot be written.
    """
    if suffix not in (".jsonl", ".jsonl.gz", ".jsonl.zst"):
        raise InputError(f"suffix: expected .jsonl, .jsonl.gz or .jsonl.zst, found {suffix!r}")
    known = trace.ranks.select("job", "rank")
    orphans = trace.events.select("job", "rank").unique().join(known, ["job", "rank"], how="anti")
    if orphans.height:
        job, rank = orphans.row(0)
        raise InputError(f"job {job}, rank {rank} has events, but no row in the table ranks")
    heads = _heads(trace)
    bodies = _bodies(trace)
    names = _file_names(trace)
    try:
        for key, head in heads.items():
            path = Path(directory) / f"{names[key]}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            text = "\n".join([*head[0], *bodies.get(key, ()), *head[1]]) + "\n"
            with whole_file(path) as temporary:
                Path(temporary).write_bytes(compress(text.encode(), suffix))
    except OSError as e:
        raise InputError(f"{e.filename or directory}: cannot be written: {e.strerror}") from e


# --------------------------------------------------------------------------------------------------
# File names


def _file_names(trace: Trace) -> dict[tuple[int, int], str]:
    """Path below the target of each (job, rank), without suffix. Nothing leaves the target."""
    several_jobs = trace.jobs.height > 1
    safe: dict[str, str] = {}
    for folder in trace.jobs.sort("job")["folder"]:
        if folder not in safe:
            path = _safe_path(folder)
            while path in safe.values():  # two folders must not become one
                path += "_"
            safe[folder] = path
    folders = [safe[f] for f in trace.jobs.sort("job")["folder"]]
    per_folder: dict[str, int] = defaultdict(int)
    for folder in folders:
        per_folder[folder] += 1
    number: dict[str, int] = defaultdict(int)
    names: dict[int, str] = {}
    for job, folder in enumerate(folders):
        prefix = ""
        if per_folder[folder] > 1:  # attempts, or jobs of several names in one folder
            prefix = f"{number[folder]}_"
            number[folder] += 1
        names[job] = f"{folder}/{prefix}" if several_jobs else ""
    return {
        (job, rank): f"{names[job]}rank_{rank}"
        for job, rank in trace.ranks.select("job", "rank").iter_rows()
    }


def _safe_path(folder: str) -> str:
    parts = []
    for part in folder.split("/"):
        part = re.sub(r'[\x00-\x1f<>:"|?*\\]', "_", part).strip()
        if part and not re.fullmatch(r"\.*", part):
            parts.append(part[:200])
    return "/".join(parts) or "job"


# --------------------------------------------------------------------------------------------------
# Lines around the operations


def _line(kind: str, fields: dict[str, Any]) -> str:
    """A line without the keys whose value is None."""
    kept = {k: v for k, v in fields.items() if v is not None}
    return msgspec.json.encode({"kind": kind} | kept).decode()


def _heads(trace: Trace) -> dict[tuple[int, int], tuple[list[str], list[str]]]:
    """For each (job, rank) the lines before and after its operations."""
    jobs = {row["job"]: row for row in trace.jobs.iter_rows(named=True)}
    any_alive = set(trace.ranks.filter(pl.col("exit") == EXIT["alive"])["job"])
    started = trace.events.filter(pl.col("t_started").is_not_null()).select("job", "rank").unique()
    timed_rule = set(started.iter_rows())
    out: dict[tuple[int, int], tuple[list[str], list[str]]] = {}
    for row in trace.ranks.sort("job", "rank").iter_rows(named=True):
        key = row["job"], row["rank"]
        job = jobs[row["job"]]
        header: dict[str, Any] = {
            "format": "dl2gpu.trace",
            "version": 1,
            "job": job["name"],
            "rank": row["rank"],
            "world_size": job["world_size"],
            "backend": job["backend"],
            "attempt": job["attempt"],
            "lost_before": row["lost_before"] or None,
            "source": None if job["source"] == "native" else job["source"],
            "waits": None if job["waits"] else False,
            "p2p": None if job["p2p"] else False,
            "only_active": row["only_active"] or None,
            "truncated": row["truncated"] or None,
            "defaults": False,
        }
        line = _line("header", header)
        if row["timed"] != (key in timed_rule or None):
            # null is a value here, unlike everywhere else
            line = f'{line[:-1]},"timed":{msgspec.json.encode(row["timed"]).decode()}}}'
        exit_ = _NAME_OF_EXIT[row["exit"]]
        end = []
        told = row["code"] is not None or row["t_last"] is not None
        if told or exit_ != "unknown" or row["job"] in any_alive:
            end = [_line("end", {"exit": exit_, "code": row["code"], "t": row["t_last"]})]
        out[key] = [line], end
    for key, line in _comm_lines(trace):
        out[key][0].append(line)
    ids = _comm_ids(trace)
    for row in trace.status.iter_rows(named=True):
        key = row.pop("job"), row.pop("rank")
        if key in out:
            out[key][0].append(_line("status", row | {"comm": ids[row["comm"]]}))
    return out


def _comm_ids(trace: Trace) -> dict[int, str]:
    """Id of each communicator, in the order of the table; made unique in its job if it is not."""
    taken: set[tuple[int, str]] = set()
    ids: dict[int, str] = {}
    for comm, job, text in trace.comms.sort("comm").select("comm", "job", "id").iter_rows():
        while (job, text) in taken:
            text += "'"
        taken.add((job, text))
        ids[comm] = text
    return ids


def _comm_lines(trace: Trace) -> Iterator[tuple[tuple[int, int], str]]:
    """Each communicator for its members and for who else uses it; for some rank in any case."""
    ranks: dict[int, set[int]] = defaultdict(set)
    for job, rank in trace.ranks.select("job", "rank").iter_rows():
        ranks[job].add(rank)
    uses: dict[int, set[int]] = defaultdict(set)
    for column in ("comm", "new_comm"):
        pairs = trace.events.select(column, "rank").drop_nulls().unique()
        for comm, rank in pairs.iter_rows():
            uses[comm].add(rank)
    for comm, rank in trace.status.select("comm", "rank").iter_rows():
        uses[comm].add(rank)
    ids = _comm_ids(trace)
    for row in trace.comms.sort("comm").iter_rows(named=True):
        here = ranks[row["job"]]
        who = (uses[row["comm"]] | set(row["ranks"])) & here or set(sorted(here)[:1])
        line = _line(
            "comm", {k: row[k] for k in ("id", "ranks", "name", "desc")} | {"id": ids[row["comm"]]}
        )
        for rank in sorted(who):
            yield (row["job"], rank), line


# --------------------------------------------------------------------------------------------------
# Operations


def _bodies(trace: Trace) -> dict[tuple[int, int], pl.Series]:
    """The operation lines of each (job, rank), in the order of lane and seq."""
    if trace.events.is_empty():
        return {}
    events = trace.events.sort("job", "rank", "lane", "seq")
    lines = events.select("job", "rank", line=_operation(trace))
    return {
        (int(key[0]), int(key[1])): part["line"]
        for key, part in lines.partition_by(["job", "rank"], as_dict=True).items()
    }


def _operation(trace: Trace) -> pl.Expr:
    """The text of an operation's line."""
    texts = trace.strings.sort("code")["text"].to_list()
    ids = list(_comm_ids(trace).values())
    frames = trace.stacks.sort("stack")["frames"].to_list()
    ops = {c: op_name(c, texts) for c in trace.events["op"].unique()}
    dtypes = {c: dtype_name(c, texts) for c in trace.events["dtype"].drop_nulls().unique()}
    parts = [
        _number("seq"),
        _code("op", ops),
        _number("lane", pl.col("lane") != 0),
        _code("comm", dict(enumerate(ids))),
        _code("stream", dict(enumerate(texts))),
        _flag("blocking", pl.col("blocking") != pl.col("stream").is_null()),
        _number("request"),
        _list("requests", pl.lit('"all"')),
        _code("mode", {c: n for n, c in MODE.items()}),
        _wild("peer"), _wild("tag"), _wild("recv_peer"), _wild("recv_tag"),
        _code("send_mode", {c: n for n, c in SEND_MODE.items()}),
        _number("root"),
        _code("reduce_op", dict(enumerate(texts))),
        _number("count"), _number("count_out"),
        _code("dtype", dtypes),
        _number("bytes"),
        _list("splits", pl.lit("[]")),
        _number("group"), _number("ordinal"),
        _code("new_comm", dict(enumerate(ids))),
        _flag("split"),
        _code("state", {c: n for n, c in STATE.items()}, pl.col("state") != 0),
        _number("t_created"), _number("t_started"), _number("t_completed"),
        _number("matched_peer"), _number("matched_tag"),
        _list("returned", pl.lit("[]")),
        _code("stack", dict(enumerate(frames))),
        _number(
            "flags",
            pl.col("flags")
            != pl.when(pl.col("op") >= OP_OTHER).then(FLAG["unknown_op"]).otherwise(0),
        ),
    ]  # fmt: skip
    return pl.concat_str([pl.lit('{"kind":"op"'), *parts, pl.lit("}")])


def _key(name: str, text: pl.Expr, where: pl.Expr) -> pl.Expr:
    return (
        pl.when(where & pl.col(name).is_not_null())
        .then(pl.lit(f',"{name}":') + text)
        .otherwise(pl.lit(""))
    )


_ALWAYS: Final = pl.lit(value=True)


def _number(name: str, where: pl.Expr = _ALWAYS) -> pl.Expr:
    return _key(name, pl.col(name).cast(pl.String), where)


def _flag(name: str, where: pl.Expr = _ALWAYS) -> pl.Expr:
    return _key(name, pl.when(pl.col(name)).then(pl.lit("true")).otherwise(pl.lit("false")), where)


def _wild(name: str) -> pl.Expr:
    text = (
        pl.when(pl.col(name) == ANY).then(pl.lit('"any"')).otherwise(pl.col(name).cast(pl.String))
    )
    return _key(name, text, _ALWAYS)


def _code(name: str, values: dict[int, Any], where: pl.Expr = _ALWAYS) -> pl.Expr:
    """A code by the JSON of its value."""
    if not values:
        return pl.lit("")
    json = [msgspec.json.encode(v).decode() for v in values.values()]
    text = pl.col(name).replace_strict(list(values), json, default=None, return_dtype=pl.String)
    return _key(name, text, where)


def _list(name: str, if_empty: pl.Expr) -> pl.Expr:
    items = pl.lit("[") + pl.col(name).cast(pl.List(pl.String)).list.join(",") + pl.lit("]")
    return _key(
        name, pl.when(pl.col(name).list.len() == 0).then(if_empty).otherwise(items), _ALWAYS
    )
