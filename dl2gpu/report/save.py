"""The report as files: ``report.json``, three Parquet tables (DESIGN.md section 10), web pages.

The same corpus gives the same bytes, but for ``summary.elapsed_s``: rows and rank lists are sorted
here, whatever the order in which shards were finished.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec
import polars as pl

from dl2gpu.report.model import FINDINGS, JOBS, KINDS, SCHEMA, Report
from dl2gpu.trace.inputs import INPUTS

if TYPE_CHECKING:
    from dl2gpu.report.html_overview import History

__all__ = ["ReportError", "canonical", "check_target", "load", "save", "to_json"]

JSON_NAME: Final = "report.json"
_ASIDE: Final = ".dl2gpu-report-"
_LOCK: Final = "lock"
_WRITERS: Final = 16  # a disk writes many files at once in the time of one
_SUMMARY: Final[tuple[str, ...]] = (
    "jobs",
    "ranks",
    "events",
    "bytes_read",
    "files",
    "by_kind",
    "engine",
    "cluster",
    "elapsed_s",
)
_GRAVITY: Final = {kind: i for i, kind in enumerate(KINDS)}


class ReportError(ValueError):
    """A report cannot be written or read. Says what was expected, what was found, what to do."""


def gravity(column: str) -> pl.Expr:
    """Position of a kind in :data:`KINDS` (0 = gravest); unknown kinds come last."""
    return pl.col(column).replace_strict(_GRAVITY, default=len(KINDS), return_dtype=pl.Int32)


def canonical(report: Report) -> Report:
    """``report`` with its rows and rank lists in the one order that files use.

    Findings by job, attempt, gravity and id; jobs by name, attempt and folder; inputs by path. A
    cycle keeps its own order.
    """
    findings = (
        report.findings.select(*FINDINGS)
        .with_columns(
            _details(report.findings),
            pl.col("culprits", "victims", "hangs_at").list.sort(),  # operations: by rank, seq
        )
        .sort("job", "attempt", gravity("kind"), "id", nulls_last=False)
    )
    jobs = (
        report.jobs.select(*JOBS)
        .with_columns(pl.col("ranks_present", "ranks_missing", "findings").list.sort())
        .sort("job", "attempt", "folder", nulls_last=False)
    )
    inputs = report.inputs.select(*INPUTS).sort("path", "status", "job", "rank", nulls_last=False)
    by_kind = report.summary.get("by_kind") or {}
    summary = {key: report.summary[key] for key in _SUMMARY if key in report.summary}
    summary |= {k: v for k, v in sorted(report.summary.items()) if k not in summary}
    if "by_kind" in summary:
        summary["by_kind"] = dict(
            sorted(by_kind.items(), key=lambda kv: (_GRAVITY.get(kv[0], len(KINDS)), kv[0]))
        )
    return Report(findings=findings, jobs=jobs, inputs=inputs, summary=summary)


def to_json(report: Report) -> bytes:
    """``report.json``: one row a line, so that two nights can be compared with ``diff``."""
    report = canonical(report)
    encode = msgspec.json.Encoder().encode

    def rows(frame: pl.DataFrame) -> bytes:
        if frame.is_empty():
            return b"[]"
        return (
            b"[\n" + b",\n".join(encode(_row(row)) for row in frame.iter_rows(named=True)) + b"\n]"
        )

    return b"".join(
        [
            b'{\n"schema": ' + encode(SCHEMA),
            b',\n"summary": ' + encode(report.summary),
            b',\n"jobs": ' + rows(report.jobs),
            b',\n"findings": ' + rows(report.findings),
            b',\n"inputs": ' + rows(report.inputs),
            b"\n}\n",
        ]
    )


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Details are JSON text in the table and an object in the file."""
    details = row.get("details")
    return row if details is None else row | {"details": msgspec.Raw(details.encode())}


def _details(findings: pl.DataFrame) -> pl.Series:
    """The details with their keys sorted and no spaces, so that equal details are equal text."""
    out: list[str | None] = []
    for id_, text in findings.select("id", "details").iter_rows():
        try:
            value = None if text is None else msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ReportError(
                f"finding {id_}: expected JSON in details, found {text[:60]!r}"
            ) from error
        out.append(None if text is None else _sorted_json(value))
    return pl.Series("details", out, dtype=pl.String)


def _sorted_json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def check_target(directory: str | os.PathLike[str]) -> None:
    """Ask before the long work: raises :class:`ReportError` where :func:`save` cannot write."""
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise ReportError(f"--out {target}: expected a folder, found a file; name another")
    parent = target
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise ReportError(f"--out {target}: {parent} is a file, not a folder; name another")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ReportError(f"--out {target}: {parent} cannot be written to; name another folder")


def save(
    report: Report,
    directory: str | os.PathLike[str],
    *,
    pages: bool = True,
    history: History | None = None,
    owners: Mapping[str, str] | None = None,
    price: float | None = None,
) -> Path:
    """Write ``report.json``, three Parquet tables and, with ``pages``, ``index.html`` and others.

    All are written aside first. A new ``directory`` then appears with one rename, complete; in one
    that exists each file is replaced with one rename, ``report.json`` last, so that a report that
    is there is whole. The pages of findings lie in a folder named by their content, which is there
    before ``index.html`` leads to it; that of an older report goes last.

    Args:
        report: what to write.
        directory: where to.
        pages: web pages as well.
        history, owners, price: see :func:`dl2gpu.report.html.write_pages`.

    Returns:
        Path of ``report.json``.
    """
    check_target(directory)
    target = Path(directory)
    report = canonical(report)
    tables = {"findings": report.findings, "jobs": report.jobs, "inputs": report.inputs}
    exists = target.exists()
    if not exists:
        target.parent.mkdir(parents=True, exist_ok=True)
    # aside, but on the same file system: a rename across two would be a copy
    with _aside(target, target if exists else target.parent) as aside:
        new = aside / "report"
        new.mkdir()  # not the temporary folder itself: that one is private to the user
        for name, frame in tables.items():
            frame.write_parquet(new / f"{name}.parquet", compression="zstd")
        (new / JSON_NAME).write_bytes(to_json(report))
        names = [f"{name}.parquet" for name in tables]
        if pages:
            from dl2gpu.report.html import write_pages

            written = write_pages(report, new, history=history, owners=owners, price=price)
            names = [*reversed(written), *names]
        files = [path for path in new.rglob("*") if path.is_file()]
        with ThreadPoolExecutor(min(_WRITERS, len(files))) as pool:
            list(pool.map(_to_disk, files))
        if not exists:
            try:
                new.rename(target)
            except OSError:
                target.mkdir(exist_ok=True)  # somebody made it meanwhile
            else:
                return target / JSON_NAME
        for name in (*names, JSON_NAME):
            _replace(new / name, target / name)
    _forget_pages(target, {*names} if pages else set())
    return target / JSON_NAME


@contextmanager
def _aside(target: Path, within: Path) -> Iterator[Path]:
    """A folder for what is not complete yet; those of processes that were killed are taken away.

    Its owner holds a lock in it, which ends with the process.
    """
    prefix = f"{_ASIDE}{target.name}-"
    for place in {target, target.parent}:
        with suppress(OSError):
            for left in place.glob(f"{glob.escape(prefix)}*/{_LOCK}"):
                _forget_if_left(left)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=within) as name:
        aside = Path(name)
        with (aside / _LOCK).open("wb") as lock:
            _locked(lock)
            yield aside


def _locked(file: BinaryIO) -> bool:
    """Whether the lock of the file is ours now; False as well where there are no such locks."""
    try:
        import fcntl
    except ImportError:  # Windows: what is left stays
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _forget_if_left(path: Path) -> None:
    with path.open("rb") as lock:
        if _locked(lock):
            shutil.rmtree(path.parent, ignore_errors=True)


def _replace(new: Path, old: Path) -> None:
    """``new`` in place of ``old``; a folder that is there already has the same files."""
    if new.is_dir() and old.is_dir():
        for path in new.iterdir():
            path.replace(old / path.name)
    else:
        new.replace(old)


def _forget_pages(target: Path, kept: set[str]) -> None:
    """Take away the pages of the report that was here before, and nothing else."""
    from dl2gpu.report.html import INDEX, PAGES_FOLDER

    if INDEX not in kept:
        (target / INDEX).unlink(missing_ok=True)
    for folder in target.iterdir():
        if folder.name in kept or not PAGES_FOLDER.fullmatch(folder.name) or folder.is_symlink():
            continue
        with suppress(OSError):  # somebody reads it, or put a file there: it stays
            for page in folder.glob("*.html"):
                page.unlink()
            folder.rmdir()


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def load(path: str | os.PathLike[str]) -> Report:
    """The report saved in a folder, or in one ``report.json``.

    Raises:
        ReportError: there is no report, or it is of another schema.
    """
    file = Path(path)
    if file.is_dir():
        file /= JSON_NAME
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise ReportError(
            f"{file}: no report here; write one with: dl2gpu scan PATH --out {file.parent}"
        ) from None
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"{file}: expected JSON ({SCHEMA}), found other bytes: {error}") from None
    found = document.get("schema") if isinstance(document, dict) else None
    if found != SCHEMA:
        raise ReportError(
            f"{file}: expected schema {SCHEMA!r}, found {found!r}; scan again with this version"
        )
    return Report(
        findings=_frame(document, "findings", FINDINGS, file),
        jobs=_frame(document, "jobs", JOBS, file),
        inputs=_frame(document, "inputs", INPUTS, file),
        summary=dict(document.get("summary") or {}),
    )


def _frame(
    document: dict[str, Any], name: str, schema: dict[str, pl.DataType], file: Path
) -> pl.DataFrame:
    rows = document.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ReportError(f"{file}: {name}: expected a list of objects; the file was changed")
    if name == "findings":
        rows = [
            row | {"details": _sorted_json(row["details"])}
            if row.get("details") is not None
            else row
            for row in rows
        ]
    try:
        return pl.DataFrame(
            {column: [row.get(column) for row in rows] for column in schema}, schema=schema
        )
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        reason = str(error).splitlines()[0]
        raise ReportError(
            f"{file}: {name}: a value has another type than expected: {reason}"
        ) from None
