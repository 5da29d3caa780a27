"""What lies below a URL: found out with few requests, some at a time.

A bucket of S3 is listed by ranges of its keys, which need no more requests than one long listing,
and run side by side; other stores folder by folder where there are several. A page that does not
come is asked for again.
"""

from __future__ import annotations

import asyncio
import html
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from dl2gpu.trace.inputs import InputError, Stamp
from dl2gpu.trace.remote import filesystem, parallel, patient, persistent, run, tries
from dl2gpu.trace.remote_errors import masked, remote_errors
from dl2gpu.trace.remote_get import kind_of, stamp_of

__all__ = ["Listed", "find", "resolve"]


@dataclass(frozen=True, slots=True)
class Listed:
    """An object below a listed URL."""

    below: str
    """Its path below, as the report names it."""
    url: str
    stamp: Stamp
    lost: str | None = None
    """Why it cannot be looked at: a folder, then."""


def resolve(url: str) -> tuple[str, str | None]:
    """The URL of a folder, and the name of the one file in it that ``url`` means, if it is a file.

    Raises:
        InputError: there is nothing, it may not be looked at, or the URL carries credentials.
    """
    fs, name = filesystem(url)
    with remote_errors(url, tries()):
        try:
            if kind_of(fs) == "http":
                root: tuple[str, str | None] = run(fs, persistent, lambda: _http_root(fs, url))
                return root
            found = patient(fs, fs.info, name)
        except FileNotFoundError:
            raise InputError(
                f"{masked(url)}: expected a folder or a file, found nothing there"
            ) from None
    if found.get("type") == "file" and not url.endswith("/"):
        folder, _, base = url.rpartition("/")
        if "::" not in url:
            return folder, base
        first, chain, rest = url.partition("::")
        folder, _, base = first.rpartition("/")
        return f"{folder}{chain}{rest}", base
    return _stripped(url), None


def _stripped(url: str) -> str:
    """Without slashes at the end, those of ``s3://`` apart."""
    bare = url.rstrip("/")
    return url if bare.endswith(":") else bare


def find(root: str, only: set[str] | None = None) -> Iterator[Listed]:
    """The objects below a folder, sorted by path; ``only``: those of these names, in it.

    Raises:
        InputError: it cannot be listed.
    """
    fs, top = filesystem(root)
    with remote_errors(root, tries()):
        if only is not None:
            found = _named(fs, root, top, sorted(only))
        elif kind_of(fs) == "http":
            found = _http_find(fs, root)
        elif kind_of(fs) == "s3":
            found = _s3_find(fs, root, top)
        else:
            found = _find(fs, root, top)
    yield from sorted(found, key=lambda f: (f.below, f.url))


def _entry(root: str, top: str, name: str, info: Mapping[str, Any]) -> Listed | None:
    below = name[len(top) :].lstrip("/") if name.startswith(top) else name
    if not below or below.endswith("/") or info.get("type") == "directory":
        return None  # a store's way to keep an empty folder
    return Listed(below, below_url(root, below), stamp_of(info))


def below_url(url: str, below: str) -> str:
    """``url`` of a folder, extended; in ``zip://folder::store://x.zip`` the path stands first."""
    first, chain, rest = url.partition("::")
    if chain and "://" in first:
        return f"{first.rstrip('/')}/{below}{chain}{rest}"
    return f"{url.rstrip('/')}/{below}"


def _named(fs: Any, root: str, top: str, names: list[str]) -> list[Listed]:
    """Objects that were named one by one: asked for themselves, so that no listing is needed."""
    http = kind_of(fs) == "http"

    def one(name: str) -> Listed:
        url = below_url(root, name)
        try:
            if http:
                return _http_listed(fs, url, unquote(name.partition("?")[0]))
            info = patient(fs, fs.info, f"{top.rstrip('/')}/{name}")
        except FileNotFoundError:
            return Listed(name, url, Stamp(), "cannot be read: it is not there (any more)")
        return Listed(name, url, stamp_of(info))

    with ThreadPoolExecutor(parallel()) as pool:
        return list(pool.map(one, names))


_FEW: Final = 64
"""Up to so many folders are listed by themselves; more have fewer objects each."""


def _find(fs: Any, root: str, top: str) -> list[Listed]:
    top = top.rstrip("/")
    listed: dict[str, Mapping[str, Any]] = {}
    here = patient(fs, lambda: fs.ls(top, detail=True))
    folders = [e["name"] for e in here if e.get("type") == "directory"]
    if 2 <= len(folders) <= _FEW:
        listed = {e["name"]: e for e in here if e.get("type") != "directory"}
        with ThreadPoolExecutor(min(parallel(), len(folders))) as pool:
            for found in pool.map(
                lambda folder: patient(fs, lambda: fs.find(folder, detail=True)), folders
            ):
                listed |= found
    else:
        listed = patient(fs, lambda: fs.find(top, detail=True))
    entries = (_entry(root, top, name, info) for name, info in listed.items())
    return [e for e in entries if e is not None]


# --------------------------------------------------------------------------------------------------
# S3

PAGE = 1000
"""Keys of a page: the most that S3 gives."""
_RANGES: Final = 16
_LOOKED: Final = 8
"""Pages of folders that are looked at for the limits of the ranges."""


def _s3_find(fs: Any, root: str, top: str) -> list[Listed]:
    bucket, key, _ = fs.split_path(top)
    prefix = f"{key.rstrip('/')}/" if key else ""
    found: list[dict[str, Any]] = run(fs, _s3_all, fs, bucket, prefix)
    top = f"{bucket}/{prefix}".rstrip("/")
    listed = []
    for one in found:
        info = {"size": one["Size"], "ETag": one.get("ETag"), "type": "file"}
        entry = _entry(root, top, f"{bucket}/{one['Key']}", info)
        if entry is not None:
            listed.append(entry)
    return listed


async def _s3_page(fs: Any, **asked: Any) -> dict[str, Any]:
    async def call() -> dict[str, Any]:
        answer: dict[str, Any] = await fs._call_s3("list_objects_v2", MaxKeys=PAGE, **asked)
        return answer

    return await persistent(call)


async def _s3_all(fs: Any, bucket: str, prefix: str) -> list[dict[str, Any]]:
    first = await _s3_page(fs, Bucket=bucket, Prefix=prefix)
    found: list[dict[str, Any]] = list(first.get("Contents", []))
    if not first.get("IsTruncated"):
        return found
    last = found[-1]["Key"]
    limits = await _s3_limits(fs, bucket, prefix, last)
    begins = [last, *limits]
    ends: list[str | None] = [*limits, None]
    rest = await asyncio.gather(
        *(_s3_range(fs, bucket, prefix, a, b) for a, b in zip(begins, ends, strict=True))
    )
    return found + [one for part in rest for one in part]


async def _s3_limits(fs: Any, bucket: str, prefix: str, last: str) -> list[str]:
    """Keys that cut what comes after ``last`` into ranges of about as many folders."""
    folders: list[str] = []
    for _ in range(_LOOKED):  # down, while there is one folder only
        more: dict[str, str] = {"StartAfter": last}
        for _ in range(_LOOKED):
            page = await _s3_page(fs, Bucket=bucket, Prefix=prefix, Delimiter="/", **more)
            folders += [p["Prefix"] for p in page.get("CommonPrefixes", [])]
            if not page.get("IsTruncated"):
                break
            more = {"ContinuationToken": page["NextContinuationToken"]}
        if len(folders) != 1 or page.get("Contents"):
            break
        prefix = folders.pop()
    after = sorted(f for f in folders if f > last)
    step = max(1, -(-len(after) // _RANGES))
    return after[step::step] if len(after) > 1 else after


async def _s3_range(
    fs: Any, bucket: str, prefix: str, after: str, end: str | None
) -> list[dict[str, Any]]:
    """Objects with keys above ``after`` and not above ``end``."""
    found: list[dict[str, Any]] = []
    more: dict[str, str] = {"StartAfter": after}
    while True:
        page = await _s3_page(fs, Bucket=bucket, Prefix=prefix, **more)
        found += [one for one in page.get("Contents", []) if end is None or one["Key"] <= end]
        done = not page.get("IsTruncated")
        if done or (end is not None and page["Contents"][-1]["Key"] > end):
            return found
        more = {"ContinuationToken": page["NextContinuationToken"]}


# --------------------------------------------------------------------------------------------------
# HTTP

_LINK: Final = re.compile(
    r"""<a\s[^<>]{0,1000}?href\s*=\s*["']([^"'<>]{1,4000})["']""", re.IGNORECASE
)
_MOST_INDEX: Final = 64 << 20
_DEEPEST: Final = 64


async def _http_root(fs: Any, url: str) -> tuple[str, str | None]:
    """As :func:`resolve`: a folder's URL ends in a slash, or leads to one that does."""
    if url.endswith("/"):
        return url.rstrip("/"), None
    session = await fs.set_session()
    for method in (session.head, session.get):
        async with method(fs.encode_url(url), allow_redirects=True, **fs.kwargs) as answer:
            if answer.status in {404, 410}:
                raise FileNotFoundError(url)
            if answer.status in {405, 501} and method is not session.get:
                continue  # knows no HEAD
            answer.raise_for_status()
            at = urlsplit(str(answer.url))
            if at.path.endswith("/") or not urlsplit(url).path:
                return url, None
            break
    path, mark, query = url.partition("?")
    folder, _, base = path.rpartition("/")
    return folder, f"{base}{mark}{query}"


def _http_listed(fs: Any, url: str, below: str) -> Listed:
    """A file of a server, with what the head of its answer says.

    Raises:
        FileNotFoundError: there is none.
    """

    async def head() -> Stamp:
        session = await fs.set_session()
        options = {k: v for k, v in fs.kwargs.items() if k != "headers"}
        headers = {"Accept-Encoding": "identity", **fs.kwargs.get("headers", {})}
        for method in (session.head, session.get):
            async with method(
                fs.encode_url(url), headers=headers, allow_redirects=True, **options
            ) as answer:
                if answer.status in {404, 410}:
                    raise FileNotFoundError(url)
                if answer.status in {405, 501} and method is not session.get:
                    continue
                answer.raise_for_status()
                known = {k: answer.headers.get(k) for k in ("ETag", "Last-Modified", "Content-MD5")}
                length = answer.headers.get("Content-Length", "")
                packed = answer.headers.get("Content-Encoding", "identity") != "identity"
                if length.isdecimal() and not packed:
                    return stamp_of({**known, "size": int(length)})
                return stamp_of(known)
        raise AssertionError("unreachable")

    return Listed(below, url, run(fs, persistent, head))


async def _http_links(fs: Any, url: str) -> list[str]:
    """What the index page of a folder links to that lies directly in it: ``x``, ``folder/``."""

    async def page() -> str:
        session = await fs.set_session()
        parts: list[bytes] = []
        async with session.get(fs.encode_url(url), **fs.kwargs) as answer:
            if answer.status in {404, 410}:
                raise FileNotFoundError(url)
            answer.raise_for_status()
            if "html" not in answer.headers.get("Content-Type", "html"):
                raise InputError(
                    "expected an index page (HTML) of the folder, found something else"
                )
            size = 0
            async for chunk in answer.content.iter_any():
                size += len(chunk)
                if size > _MOST_INDEX:
                    raise InputError(f"its index page has more than {_MOST_INDEX} bytes")
                parts.append(chunk)
        return b"".join(parts).decode("utf-8", "replace")

    here = urlsplit(url)
    found: dict[str, None] = {}
    for link in _LINK.findall(await persistent(page)):
        target = html.unescape(link).strip()
        for base in (f"{here.scheme}://{here.netloc}", ""):
            if base and target.startswith(base):
                target = target[len(base) :]
        if target.startswith("/"):
            if not target.startswith(here.path):
                continue
            target = target[len(here.path) :]
        target = target.removeprefix("./")
        name = unquote(target.rstrip("/"))
        # one step down: no other server, parent, query (the columns of an index sort by them)
        if re.fullmatch(r"[^/?#:]+/?", target) and name not in ("", ".", "..") and "/" not in name:
            found[target] = None
    return list(found)


def _http_find(fs: Any, root: str) -> list[Listed]:
    """Folder by folder, each with its own index page; those of a depth side by side."""
    files: list[tuple[str, str]] = []
    lost: list[Listed] = []
    folders = [("", f"{root.rstrip('/')}/")]
    with ThreadPoolExecutor(parallel()) as pool:
        for depth in range(_DEEPEST):

            def links(folder: tuple[str, str]) -> list[str] | str:
                try:
                    with remote_errors(tries=tries()):
                        return run(fs, _http_links, fs, folder[1])
                except InputError as e:
                    return str(e)

            below: list[tuple[str, str]] = []
            for (path, url), found in zip(folders, pool.map(links, folders), strict=True):
                if isinstance(found, str):
                    if depth == 0:
                        raise InputError(f"{masked(root)}: the folder cannot be listed: {found}")
                    lost.append(
                        Listed(
                            path.rstrip("/"), url, Stamp(), f"the folder cannot be listed: {found}"
                        )
                    )
                    continue
                for name in found:
                    one = (f"{path}{unquote(name)}", f"{url}{name}")
                    (below if name.endswith("/") else files).append(one)
            folders = below
            if not folders:
                break

        def head(file: tuple[str, str]) -> Listed:
            try:
                with remote_errors(tries=tries()):
                    return _http_listed(fs, file[1], file[0])
            except InputError as e:
                return Listed(file[0], file[1], Stamp(), str(e))

        lost += [Listed(path, url, Stamp(), "lies too deep") for path, url in folders]
        return [*lost, *pool.map(head, files)]
