"""Any supported source to the native formats, and a trace in a form that can be compared."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from dl2gpu.trace import native_parquet
from dl2gpu.trace.files import is_url
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.native_write import write_jsonl
from dl2gpu.trace.readers import read_trace
from dl2gpu.trace.schema import Trace, dtype_name, op_name

__all__ = ["canonical", "convert"]


def convert(src: str, dst: str) -> None:
    """Writes the trace at ``src`` as native Parquet or JSON Lines.

    Args:
        src: file, folder or fsspec URL that :func:`readers.read_trace` reads.
        dst: a name that ends in ``.parquet`` (side tables are written beside it), else a folder for
            JSON Lines, one file a rank.

    Raises:
        InputError: nothing to read, an unreadable file, or ``dst`` cannot be written or is an
            existing file or a folder with other files.
    """
    if is_url(dst):
        raise InputError(f"{dst}: expected a local path to write to; copy the result to the bucket")
    target = Path(dst)
    if target.suffix != ".parquet":
        if target.suffix in (".jsonl", ".gz", ".zst", ".json"):
            raise InputError(
                f"{dst}: JSON Lines has one file for each rank: expected the name of a folder"
            )
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise InputError(f"{dst}: expected a new or empty folder, found other files")
    trace = read_trace(src)
    if target.suffix == ".parquet":
        native_parquet.write(trace, target)
    else:
        write_jsonl(trace, target)


def canonical(trace: Trace) -> dict[str, pl.DataFrame]:
    """``trace`` in a form in which equal traces are equal frames.

    Codes are replaced by what they stand for, jobs by (name, attempt), communicators by their ids,
    and rows are sorted. Where a trace lay does not count (``folder``, ``path``), nor does what no
    row refers to (strings, stacks).
    """
    texts = trace.strings.sort("code")["text"].to_list()
    jobs = trace.jobs.sort("job")
    job = [f"{n} #{a}" for n, a in jobs.select("name", "attempt").iter_rows()]
    ids = trace.comms.sort("comm")["id"].to_list()
    frames = ["\n".join(f) for f in trace.stacks.sort("stack")["frames"]]
    ops = {c: op_name(c, texts) for c in trace.events["op"].unique()}
    dtypes = {c: dtype_name(c, texts) for c in trace.events["dtype"].drop_nulls().unique()}
    names: dict[str, dict[int, str]] = {
        "job": dict(enumerate(job)),
        "op": ops,
        "dtype": dtypes,
        "stream": dict(enumerate(texts)),
        "reduce_op": dict(enumerate(texts)),
        "comm": dict(enumerate(ids)),
        "new_comm": dict(enumerate(ids)),
        "stack": dict(enumerate(frames)),
    }

    def named(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns(
            pl.col(c).replace_strict(
                list(names[c]), list(names[c].values()), default=None, return_dtype=pl.String
            )
            if names[c]
            else pl.lit(None, pl.String).alias(c)
            for c in names
            if c in frame.columns
        )

    return {
        "events": named(trace.events).sort("job", "rank", "lane", "seq"),
        "jobs": named(jobs.drop("folder")).sort("job"),
        "ranks": named(trace.ranks.drop("path")).sort("job", "rank"),
        "comms": named(trace.comms.drop("comm")).sort("job", "id"),
        "status": named(trace.status).sort("job", "rank", "comm"),
    }
