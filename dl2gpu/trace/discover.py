"""Finds the trace files below paths and buckets, and says which of them belong to one job.

A job is a folder below the scanned path, with three exceptions: a folder in which every rank has a
subfolder of its own is one job; subfolders ``attempt_0``, ``restart_1``, ... are restarts of the
job that their parent is; and ``--job-pattern`` overrides both.

What a file is, is decided by its content (``sniff.py``). Only a few kilobytes a file are read here,
but for archives: a compressed one is read through for the list of its members, which are files
like others, with their path below the archive.
"""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import polars as pl

from dl2gpu.engine.cores import cores
from dl2gpu.trace.containers import CONTAINERS, DEEPEST, contents, depth, member_url
from dl2gpu.trace.files import is_member, local_path
from dl2gpu.trace.inputs import Input, InputError, Stamp, TraceFile
from dl2gpu.trace.sniff import Kind, junk_reason, sniff

__all__ = ["LISTING", "Discovery", "discover", "listing"]


@dataclass(frozen=True, slots=True)
class Discovery:
    """What lies below the scanned paths."""

    files: list[TraceFile]
    """Files for a reader, sorted by path."""
    inputs: list[Input]
    """All other files, and why they are not read; sorted by path."""


def discover(
    paths: Sequence[str], job_pattern: str | None = None, only: Collection[str] | None = None
) -> Discovery:
    """Trace files below ``paths``.

    Args:
        paths: folders, files, or fsspec URLs of them. With several, the ``path`` and ``folder`` of
            each file begin with the name of the scanned path they came from. Files named one by
            one count with the others of their folder as one job.
        job_pattern: regular expression with one or more of the named groups ``job``, ``rank`` and
            ``attempt``, searched in each file's path below the scanned path. Files of one ``job``
            are one job wherever they lie.
        only: paths, as :func:`listing` gives them: the others count as not there.

    Raises:
        InputError: a path does not exist or may not be listed, or the pattern is none.
    """
    pattern = _compile(job_pattern)
    wanted = None if only is None else frozenset(only)
    found: list[tuple[_Found, Kind]] = []
    inputs: list[Input] = []
    listed = [f for f in _unique(_roots(paths)) if wanted is None or f.path in wanted]
    for file, kind in _looked_at(listed):
        if kind.format is not None and kind.status == "read" and kind.format not in CONTAINERS:
            found.append((file, kind))
        else:
            job = None
            if kind.status == "quarantined":
                job = _folder_name(file, file.below.rpartition("/")[0])
            inputs.append(Input(file.path, kind.status, kind.reason, kind.format, job))
    unread = {i.path for i in inputs if i.format == "parquet"}
    found, siblings = _parquet_siblings(found, unread)
    files = _jobs(found)
    if pattern is not None:
        files = _apply(pattern, files, {f.path: f for f, _ in found})
    return Discovery(
        sorted(files, key=lambda f: f.path), sorted(inputs + siblings, key=lambda i: i.path)
    )


LISTING: Final[dict[str, pl.DataType]] = {
    "path": pl.String(),  # as the report names it
    "unit": pl.String(),  # files of one job have one unit; one unit may hold several jobs
    "size": pl.Int64(),
    "modified": pl.Int64(),  # ns since the epoch, of local files
    "etag": pl.String(),  # of objects in a store: which content it is
}
"""Columns of a listing. Null: not known."""


def listing(paths: str | Sequence[str], job_pattern: str | None = None) -> pl.DataFrame:
    """All files below ``paths`` that a scan would look into; none of them is opened.

    For who scans what has changed: all files of the units in which a file is new or differs, as
    ``only`` of :func:`dl2gpu.scan`.

    Args:
        paths: as for a scan.
        job_pattern: as for a scan.

    Returns:
        A frame with the columns of :data:`LISTING`, sorted by path.

    Raises:
        InputError: as for a scan.
    """
    pattern = _compile(job_pattern)
    rows = []
    for file in _unique(_roots([paths] if isinstance(paths, str) else paths)):
        if file.reason or junk_reason(file.name):
            continue
        tag = None if file.stamp is None else file.stamp.tag
        rows.append((file.path, _unit(file, pattern), file.size, file.modified, tag))
    return pl.DataFrame(rows, schema=LISTING, orient="row").sort("path")


def _unit(file: _Found, pattern: re.Pattern[str] | None) -> str:
    """A name that all files of a job share, told by their paths alone.

    More than a job may share it: the folders of ranks, hosts, attempts and logs count as their
    parent's.
    """
    match = None if pattern is None else pattern.search(file.below)
    job = match.groupdict().get("job") if match is not None else None
    if job is not None:
        return f"job {job}"
    folder = file.path.rpartition("/")[0]
    while True:
        parent, _, name = folder.rpartition("/")
        task = _TASK_FOLDER.fullmatch(name) and _ATTEMPT_FOLDER.fullmatch(parent.rpartition("/")[2])
        if not (
            task or _RANK_FOLDER.match(name) or _HOST_FOLDER.fullmatch(name)
            or _ATTEMPT_FOLDER.fullmatch(name) or _LOG_FOLDER.fullmatch(name)
            or name == DUMPS_FOLDER
        ):  # fmt: skip
            return f"folder {folder}"
        folder = parent


def _looked_at(files: list[_Found]) -> Iterator[tuple[_Found, Kind]]:
    """What each file is; after an archive, its members."""
    archives: list[_Found] = []
    for file, kind in zip(files, _kinds(files), strict=True):
        if kind.format in CONTAINERS and kind.status == "read":
            archives.append(file)
        else:
            yield file, kind
    if len(archives) < 2:
        found = map(_unpacked, archives)
        yield from (one for members in found for one in members)
        return
    with ThreadPoolExecutor(min(cores(), len(archives), 8)) as pool:
        for members in pool.map(_unpacked, archives):
            yield from members


def _unpacked(file: _Found) -> list[tuple[_Found, Kind]]:
    """An archive and its members, those of archives in it as well."""
    if depth(file.url) >= DEEPEST:
        reason = f"an archive that lies in {DEEPEST} others: its files are not looked at"
        return [(file, Kind(None, "quarantined", reason))]
    try:
        inside = contents(file.url, file.stamp)
    except InputError as e:
        return [(file, Kind(None, "quarantined", str(e)))]
    many = f"an archive of {len(inside.members)} file{'s' * (len(inside.members) != 1)}"
    kind = Kind(inside.kind, "read", many)
    if inside.loss is not None:
        kind = Kind(inside.kind, "partial", f"{many}, perhaps of more: {inside.loss}")
    out = [(file, kind)]
    for one in inside.members:
        below = f"{file.below}/{one.name}"
        member = _Found(
            file.root, file.label, below, member_url(file.url, one.name), one.size,
            _skipped(one.name), inside.stamp,
        )  # fmt: skip
        if one.status != "read":
            out.append((member, Kind(None, one.status, one.reason)))
            continue
        found = _kind(member)
        if found.format in CONTAINERS and found.status == "read":
            out += _unpacked(member)
        else:
            out.append((member, found))
    return out


def _skipped(below: str) -> str | None:
    """Why a file in one of certain folders is not looked into."""
    return next((_SKIP_FOLDERS[p] for p in below.split("/") if p in _SKIP_FOLDERS), None)


def _kinds(files: list[_Found]) -> Iterator[Kind]:
    if all(local_path(f.url) is not None for f in files):
        yield from map(_kind, files)
        return
    from dl2gpu.trace.remote import parallel

    with ThreadPoolExecutor(parallel()) as pool:  # the wait is for a store's answers
        yield from pool.map(_kind, files)


def _kind(file: _Found) -> Kind:
    reason = file.reason or junk_reason(file.name)
    if reason:
        return Kind(None, "ignored", reason)
    if file.lost:
        return Kind(None, "quarantined", file.lost)
    try:
        return sniff(file.url, file.name, file.size, file.stamp)
    except InputError as e:
        return Kind(None, "quarantined", str(e))


# --------------------------------------------------------------------------------------------------
# Listing


@dataclass(frozen=True, slots=True)
class _Found:
    """A file below a scanned path."""

    root: str  # name of the scanned path, "" where it is the only one
    label: str  # the folder name that files directly in the scanned path get
    below: str  # path below the scanned path
    url: str
    size: int | None
    reason: str | None = None  # why it is not looked into
    stamp: Stamp | None = None  # of an object in a store
    lost: str | None = None  # why it cannot be looked into
    modified: int | None = None  # ns, of a local file

    @property
    def path(self) -> str:
        return f"{self.root}/{self.below}" if self.root else self.below

    @property
    def folder(self) -> str:
        return self.below.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.below.rpartition("/")[2]


@dataclass(slots=True)
class _Root:
    """One path to scan: a folder, or some files of one folder."""

    path: str  # as opened: absolute for local folders, a URL else
    only: set[str] | None = None  # base names, where files were named one by one
    label: str = ""


_SKIP_FOLDERS: Final = {
    "__pycache__": "compiled Python files",
    ".git": "a version control store",
    ".ipynb_checkpoints": "copies made by Jupyter",
}


def _roots(paths: Sequence[str]) -> Iterator[_Found]:
    if isinstance(paths, str):  # a frequent slip, which would scan the letters
        paths = [paths]
    roots: dict[str, _Root] = {}
    for given in paths:
        path, name = _resolve(given)
        root = roots.get(path)
        if root is None:
            roots[path] = _Root(path, None if name is None else {name})
        elif name is None or root.only is None:
            root.only = None
        else:
            root.only.add(name)
    _label(list(roots.values()))
    for root in roots.values():
        prefix = root.label if len(roots) > 1 else ""
        if local_path(root.path) is not None:
            for below, url, size, reason, modified in _list_local(root):
                yield _Found(prefix, root.label, below, url, size, reason, modified=modified)
        else:
            yield from _list_remote(root, prefix)


def _resolve(given: str) -> tuple[str, str | None]:
    """A folder to list, and the one file of it where a file was named."""
    local = local_path(given)
    if is_member(given):
        raise InputError(f"{given}: expected a path or a URL of a store; name the archive to scan")
    if local is None:
        from dl2gpu.trace.remote_list import resolve

        return resolve(given)
    path = Path(local).expanduser().resolve()
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError as e:
        raise InputError(f"{given}: expected a folder or a file, found none ({e.strerror})") from e
    return (str(path), None) if is_folder else (str(path.parent), path.name)


def _label(roots: list[_Root]) -> None:
    """Names the roots by their last parts, as many as it takes to tell them apart."""
    parts = [[p for p in re.split(r"[/\\]+", r.path) if p] or ["root"] for r in roots]
    for last in range(1, max(map(len, parts), default=0) + 1):
        labels = ["/".join(p[-last:]) for p in parts]
        if len(set(labels)) == len(labels):
            break
    for root, label in zip(roots, labels if roots else [], strict=True):
        root.label = label.replace(":", "_")


_Listed = Iterator[tuple[str, str, int | None, str | None, int | None]]


def _list_local(root: _Root) -> _Listed:
    """(path below, path to open, size, reason not to look into it, time of change) of each."""
    top = local_path(root.path) or "/"
    stack = [""]
    while stack:
        folder = stack.pop()
        here = f"{top}/{folder}" if folder else top
        try:
            with os.scandir(here) as entries:
                listed = sorted(entries, key=lambda e: e.name)
        except OSError as e:
            if not folder:
                raise InputError(f"{here}: the folder cannot be listed: {e.strerror}") from e
            yield folder, here, None, f"the folder cannot be listed: {e.strerror}", None
            continue
        for entry in listed:
            if root.only is not None and entry.name not in root.only:
                continue
            below = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_symlink():
                yield below, entry.path, None, _link_reason(entry.path, top), None
            elif entry.is_dir(follow_symlinks=False):
                if root.only is not None:
                    continue
                if entry.name in _SKIP_FOLDERS:
                    yield below, entry.path, None, _SKIP_FOLDERS[entry.name], None
                else:
                    stack.append(below)
            elif entry.is_file(follow_symlinks=False):
                size, modified = _stat(entry)
                yield _printable(below), entry.path, size, None, modified
            else:
                reason = "a pipe, socket or device (reading it could block)"
                yield below, entry.path, None, reason, None


def _stat(entry: os.DirEntry[str]) -> tuple[int | None, int | None]:
    """Size, and time of change in ns."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None, None  # gone since it was listed: opening it will say so
    return status.st_size, status.st_mtime_ns


def _link_reason(path: str, top: str) -> str:
    try:
        target = Path(path).resolve(strict=True)
    except (OSError, RuntimeError):
        return "a symbolic link to nothing"
    if target.is_relative_to(Path(top).resolve()):
        return "a symbolic link; what it points to is read where it is"
    return "a symbolic link that leaves the scanned path (name the target to scan it)"


def _printable(path: str) -> str:
    """``path`` without bytes that are not UTF-8 (surrogates cannot be written to a report)."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _list_remote(root: _Root, prefix: str) -> Iterator[_Found]:
    from dl2gpu.trace.remote import forget
    from dl2gpu.trace.remote_list import find

    forget()
    for one in find(root.path, root.only):
        yield _Found(
            prefix, root.label, one.below, one.url, one.stamp.size, _skipped(one.below),
            one.stamp, one.lost,
        )  # fmt: skip


def _unique(files: Iterator[_Found]) -> Iterator[_Found]:
    """Each file once, also where the scanned paths overlap."""
    seen: set[str] = set()
    for file in files:
        if file.url not in seen:
            seen.add(file.url)
            yield file


# --------------------------------------------------------------------------------------------------
# Parquet

_SIBLINGS: Final = ("comms", "stacks", "jobs", "ranks", "strings", "status")


def _parquet_siblings(
    found: list[tuple[_Found, Kind]], unread: set[str]
) -> tuple[list[tuple[_Found, Kind]], list[Input]]:
    """Takes the side tables ``x.comms.parquet``, ... out: they are read with ``x.parquet``."""
    names = {f.path for f, kind in found if kind.format == "parquet"}
    if not names:
        return found, []
    rest: list[tuple[_Found, Kind]] = []
    inputs: list[Input] = []
    for file, kind in found:
        match = re.fullmatch(rf"(.*)\.({'|'.join(_SIBLINGS)})\.parquet", file.path)
        if kind.format != "parquet" or match is None:
            rest.append((file, kind))
        else:
            main = f"{match.group(1)}.parquet"
            base = main.rsplit("/", 1)[-1]
            if main in names:
                inputs.append(Input(file.path, "read", f"read with {base}", "parquet"))
            elif main in unread:
                reason = f"a side table of {base}, which is not read"
                inputs.append(Input(file.path, "ignored", reason, "parquet"))
            else:
                reason = f"a side table of {base}, which is missing: put it beside this file"
                inputs.append(Input(file.path, "quarantined", reason, "parquet"))
    return rest, inputs


# --------------------------------------------------------------------------------------------------
# Jobs

_RANK_FOLDER: Final = re.compile(
    r"(?:^|.*[^a-z])(?:global|local)?[-_.]?(?:rank|worker|proc|process|trainer)s?[-_.]?\d+$",
    re.IGNORECASE,
)
_HOST_FOLDER: Final = re.compile(r"(?:node|host|machine|pod)[-_.]?\d+$", re.IGNORECASE)
_ARCHIVE_ENDS: Final = re.compile(
    r"(\.(tar|tgz|tbz2?|txz|tzst|zip|gz|bz2|xz|zst))+$", re.IGNORECASE
)
_ATTEMPT_FOLDER: Final = re.compile(
    r"(?:attempt|restart|retry|try|incarnation|generation)[-_.]?(\d{1,9})$", re.IGNORECASE
)


DUMPS_FOLDER: Final = "flight_recorder"
"""Beside the files of the recorder: dumps of the same job, with states that a host cannot see."""


def _jobs(found: list[tuple[_Found, Kind]]) -> list[TraceFile]:
    """Trace files with the folder of their job, and the attempt where a folder's name says it."""
    logs = [(file, kind) for file, kind in found if kind.format == "log"]
    found = [(file, kind) for file, kind in found if kind.format != "log"]
    by_folder: dict[tuple[str, str], list[_Found]] = defaultdict(list)
    kinds: dict[str, Kind] = {}
    for file, kind in found:
        by_folder[file.root, file.folder].append(file)
        kinds[file.url] = kind
    job_folder = _without_rank_folders(by_folder)
    files: list[TraceFile] = []
    for key, members in by_folder.items():
        folder = job_folder[key]
        attempt = None
        match = _ATTEMPT_FOLDER.fullmatch(_ARCHIVE_ENDS.sub("", folder.rpartition("/")[2]))
        if match:
            attempt = int(match.group(1))
            folder = folder.rpartition("/")[0]
        above, _, name = folder.rpartition("/")
        if name == DUMPS_FOLDER and any(
            kinds[f.url].format == "native" for f in by_folder.get((key[0], above), ())
        ):
            folder = above
        files += [_trace_file(f, kinds[f.url].format or "", folder, attempt) for f in members]
    return [*files, *_log_files([file for file, _ in logs])]


_LOG_FOLDER: Final = re.compile(
    r"(?:logs?|torchelastic|torchrun|std(?:err|out)|console|(?:raw|rank|node|worker)?[-_]?logs?"
    r"|none_[a-z0-9_]{8})",
    re.IGNORECASE,
)
"""Folders that hold the logs of the job that their parent is."""
_TASK_FOLDER: Final = re.compile(r"\d{1,6}")


def _log_files(found: list[_Found]) -> list[TraceFile]:
    """Logs with the folder of their job: launchers put them some folders deeper.

    ``job/logs/node0.log`` and ``job/torchelastic/attempt_0/3/stderr.log`` are of ``job``.
    """
    files = []
    for file in found:
        parts = file.folder.split("/") if file.folder else []
        attempt = None
        if len(parts) > 1 and _TASK_FOLDER.fullmatch(parts[-1]):
            if _ATTEMPT_FOLDER.fullmatch(parts[-2]):
                parts.pop()
        elif parts and (_RANK_FOLDER.match(parts[-1]) or _HOST_FOLDER.fullmatch(parts[-1])):
            parts.pop()
        if parts and (match := _ATTEMPT_FOLDER.fullmatch(parts[-1])):
            attempt = int(match.group(1))
            parts.pop()
        while parts and _LOG_FOLDER.fullmatch(parts[-1]):
            parts.pop()
        files.append(_trace_file(file, "log", "/".join(parts), attempt))
    return files


def _trace_file(file: _Found, format_: str, folder: str, attempt: int | None) -> TraceFile:
    return TraceFile(
        path=file.path,
        url=file.url,
        format=format_,
        folder=_folder_name(file, folder),
        size=file.size or 0,
        attempt=attempt,
        stamp=file.stamp,
    )


def _folder_name(file: _Found, folder: str) -> str:
    if not file.root:
        return folder or file.label
    return f"{file.root}/{folder}" if folder else file.root


def _without_rank_folders(
    by_folder: dict[tuple[str, str], list[_Found]],
) -> dict[tuple[str, str], str]:
    """The job's folder of each folder with files: the parent, where each rank has its own."""
    children: dict[tuple[str, str], list[str]] = defaultdict(list)
    for root, folder in by_folder:
        if folder:
            children[root, folder.rpartition("/")[0]].append(folder)
    job = {key: key[1] for key in by_folder}
    for (root, parent), folders in children.items():
        if (root, parent) in by_folder:
            continue  # files of its own: the subfolders are something else
        bases = [_ARCHIVE_ENDS.sub("", f.rpartition("/")[2]) for f in folders]
        names = [{f.name for f in by_folder[root, folder]} for folder in folders]
        if all(_RANK_FOLDER.match(b) for b in bases) or (
            # one folder a host is the same, if no name stands in two of them
            len(folders) > 1
            and all(_HOST_FOLDER.fullmatch(b) for b in bases)
            and sum(map(len, names)) == len(set().union(*names))
        ):
            for folder in folders:
                job[root, folder] = parent
    return job


# --------------------------------------------------------------------------------------------------
# --job-pattern


def _compile(pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern)
    except re.error as e:
        raise InputError(
            f"job pattern {pattern!r}: expected a regular expression, found an error: {e}"
        ) from e
    if not {"job", "rank", "attempt"} & set(compiled.groupindex):
        raise InputError(
            f"job pattern {pattern!r}: expected a named group, as in (?P<job>...), (?P<rank>...) "
            f"or (?P<attempt>...); found none"
        )
    return compiled


def _apply(
    pattern: re.Pattern[str], files: list[TraceFile], found: dict[str, _Found]
) -> list[TraceFile]:
    """Fills job, rank and attempt from each file's path; files that do not match stay as found."""
    out: list[TraceFile] = []
    for file in files:
        match = pattern.search(found[file.path].below)
        if match is None:
            out.append(file)
            continue
        groups = match.groupdict()
        numbers: dict[str, int] = {}
        for name in ("rank", "attempt"):
            text = groups.get(name)
            if text is None:
                continue
            if not re.fullmatch(r"[0-9]{1,9}", text):
                raise InputError(
                    f"job pattern {pattern.pattern!r}: the group {name} matched {text!r} in "
                    f"{file.path}; expected a number, as in (?P<{name}>[0-9]+)"
                )
            numbers[name] = int(text)
        job = groups.get("job")
        out.append(
            replace(
                file,
                job=job if job is not None else file.job,
                rank=numbers.get("rank"),
                attempt=numbers.get("attempt", file.attempt),
            )
        )
    return _gather_jobs(out)


def _gather_jobs(files: list[TraceFile]) -> list[TraceFile]:
    """One folder for all files of a job that the pattern named: what their folders share."""
    folders: dict[str, list[list[str]]] = defaultdict(list)
    for file in files:
        if file.job is not None:
            folders[file.job].append(file.folder.split("/"))
    shared = {job: _common(parts) for job, parts in folders.items()}
    return [f if f.job is None else replace(f, folder=shared[f.job] or f.job) for f in files]


def _common(folders: list[list[str]]) -> str:
    """The path that all of ``folders`` (lists of parts) begin with."""
    first, last = min(folders), max(folders)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return "/".join(first[:same])
