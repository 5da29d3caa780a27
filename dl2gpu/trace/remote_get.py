"""One request for (a part of) an object, of each kind of store that fsspec knows.

A request names the content that it wants, where the store can be told: S3 by If-Match, Google by
the generation, Azure by its match condition, HTTP servers by If-Match. Of others, what is there
now is compared after the reading. The bytes come as they arrive, so that a body that breaks is
continued where it broke.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from dl2gpu.trace.inputs import Stamp
from dl2gpu.trace.remote_errors import ChangedError, TruncatedError, status_of

__all__ = ["BLOCK", "Reply", "differs", "in_thread", "kind_of", "opener", "stamp_of"]

T = TypeVar("T")

BLOCK: Final = 8 << 20
"""Bytes asked for at once from stores that answer with a whole body only."""
_CHUNK: Final = 1 << 20


@dataclass(slots=True)
class Reply:
    """The beginning of an answer."""

    chunks: AsyncIterator[bytes]
    first: int
    """Where in the object the chunks begin."""
    stamp: Stamp
    """Size of the whole object and its tag, as far as the answer tells."""
    by_block: bool = False
    """May end before what was asked for; the rest needs another request."""


Opener = Callable[..., Any]
"""(file system, name, start, stop or None, Stamp) -> asynchronous context of a Reply."""


# not the loop's own threads: those look names up, for which the calls in these may wait
_threads: Final = ThreadPoolExecutor(32, thread_name_prefix="store")


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """What a synchronous call of a file system gives, while the loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_threads, call, *args)


def kind_of(fs: Any) -> str:
    """``s3``, ``gs``, ``az``, ``http``, or ``other``."""
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    return {
        "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "abfs": "az", "az": "az", "abfss": "az",
        "http": "http", "https": "http",
    }.get(protocol, "other")  # fmt: skip


def opener(fs: Any) -> Opener:
    """How an object of this file system is asked for."""
    return {"s3": _s3, "gs": _gs, "az": _az, "http": _http}.get(kind_of(fs), _other)


# --------------------------------------------------------------------------------------------------
# Stamps

_TAGS: Final = (
    ("generation", ("generation",)),
    ("etag", ("ETag", "etag")),
    ("md5", ("md5Hash", "Content-MD5", "content_md5", "md5")),
    ("mtime", ("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "created")),
)


def stamp_of(info: Mapping[str, Any]) -> Stamp:
    """The stamp of an entry of a listing, or of the head of an answer."""
    size = info.get("size")
    for name, keys in _TAGS:
        for key in keys:
            value = info.get(key)
            if value is None or value == "":
                continue
            if isinstance(value, datetime):  # listings and looks at an object differ in the form
                value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
            if isinstance(value, float):
                value = round(value, 3)
            text = str(value).removeprefix("W/").strip('"')
            return Stamp(size if isinstance(size, int) else None, f"{name}={text}")
    return Stamp(size if isinstance(size, int) else None, None)


def differs(listed: Stamp, found: Stamp) -> str | None:
    """What tells that an object is another one, as "size: 3, listed 2"; None where nothing does."""
    name, _, tag = (listed.tag or "").partition("=")
    found_name, _, found_tag = (found.tag or "").partition("=")
    if name and name == found_name:
        # of the same content, a length that is too small is that of a body that was cut
        return None if tag == found_tag else f"another {name} than when it was listed"
    if listed.size is not None and found.size is not None and listed.size != found.size:
        return f"{found.size} bytes, {listed.size} when it was listed"
    return None


def changed(how: str) -> ChangedError:
    """The error of an object that is not the one that was listed."""
    return ChangedError(f"changed during the scan ({how}): scan again")


def _etag(stamp: Stamp) -> str | None:
    name, _, value = (stamp.tag or "").partition("=")
    return f'"{value}"' if name == "etag" else None


def _range(start: int, stop: int | None) -> dict[str, str]:
    """The header Range for bytes start to stop (not included); of all, none."""
    if start == 0 and stop is None:
        return {}
    if start < 0:
        return {"Range": f"bytes={start}"}
    return {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}


def _extent(header: str | None, length: int | None, start: int) -> tuple[int, int | None]:
    """(first byte, size of the object) by the header Content-Range, or where there is none."""
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", header or "")
    if match is None:
        return max(0, start), length if start == 0 else None
    return int(match[1]), None if match[2] == "*" else int(match[2])


# --------------------------------------------------------------------------------------------------
# Stores


@asynccontextmanager
async def _s3(
    fs: Any, name: str, start: int, stop: int | None, stamp: Stamp
) -> AsyncIterator[Reply]:
    bucket, key, version = fs.split_path(name)
    wanted = _range(start, stop)
    etag = _etag(stamp)
    if etag is not None:
        wanted["IfMatch"] = etag
    if version:
        wanted["VersionId"] = version
    try:
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, **wanted)
    except Exception as e:
        if status_of(e) == 412:
            raise changed("another etag than when it was listed") from e
        if status_of(e) == 416 and start <= 0:  # an empty object has no byte 0
            yield Reply(_one(b""), 0, Stamp(0))
            return
        raise
    first, size = _extent(answer.get("ContentRange"), answer.get("ContentLength"), start)
    body = answer["Body"]

    async def chunks() -> AsyncIterator[bytes]:
        while chunk := await body.read(_CHUNK):
            yield chunk

    try:
        yield Reply(chunks(), first, stamp_of({"size": size, "ETag": answer.get("ETag")}))
    finally:
        body.close()


@asynccontextmanager
async def _http(
    fs: Any, name: str, start: int, stop: int | None, stamp: Stamp
) -> AsyncIterator[Reply]:
    headers = {"Accept-Encoding": "identity", **_range(start, stop)}
    etag = _etag(stamp)
    if etag is not None:
        headers["If-Match"] = etag
    session = await fs.set_session()
    options = {k: v for k, v in fs.kwargs.items() if k != "headers"}
    headers |= fs.kwargs.get("headers", {})
    async with session.get(fs.encode_url(name), headers=headers, **options) as answer:
        if answer.status in {404, 410}:
            raise FileNotFoundError(name)
        if answer.status == 412:
            raise changed("another etag than when it was listed")
        if answer.status == 416:
            if start > 0:
                raise changed("shorter than when it was listed")
            yield Reply(_one(b""), 0, Stamp(0))  # an empty file has no byte 0
            return
        answer.raise_for_status()
        head: dict[str, Any] = dict(answer.headers)
        packed = answer.headers.get("Content-Encoding", "identity") not in ("identity", "")
        length = None if packed else answer.content_length
        if answer.status == 206:
            first, size = _extent(answer.headers.get("Content-Range"), length, start)
        else:  # the server knows no ranges, and sends all of it
            first, size = 0, length
        for key in ("ETag", "Last-Modified", "Content-MD5"):
            head[key] = answer.headers.get(key)
        yield Reply(
            answer.content.iter_any(), first,
            stamp_of({k: head[k] for k in ("ETag", "Last-Modified", "Content-MD5")}
                     | {"size": size}),
        )  # fmt: skip


@asynccontextmanager
async def _gs(
    fs: Any, name: str, start: int, stop: int | None, stamp: Stamp
) -> AsyncIterator[Reply]:
    if start >= 0:
        stop = start + BLOCK if stop is None else min(stop, start + BLOCK)
    name_, _, tag = (stamp.tag or "").partition("=")
    same = {"ifGenerationMatch": tag} if name_ == "generation" else {}
    try:
        headers, body = await fs._call(
            "GET", fs.url(name),
            headers=_range(start, stop) | {"Accept-Encoding": "identity"}, **same,
        )  # fmt: skip
    except Exception as e:
        status = status_of(e)
        if status == 412:
            raise changed("another generation than when it was listed") from e
        if status == 416 and start <= 0:  # an empty object has no byte 0
            yield Reply(_one(b""), 0, Stamp(0))
            return
        raise
    lower = {str(k).lower(): v for k, v in headers.items()}
    first, size = _extent(lower.get("content-range"), len(body), max(0, start))
    found = {"size": size, "generation": lower.get("x-goog-generation"), "ETag": lower.get("etag")}
    if same and not found["generation"]:  # a server that does not say, and may not have looked
        found["generation"] = (await fs._info(name)).get("generation")
    yield Reply(_one(body), first, stamp_of(found), by_block=True)


@asynccontextmanager
async def _az(
    fs: Any, name: str, start: int, stop: int | None, stamp: Stamp
) -> AsyncIterator[Reply]:
    from azure.core import MatchConditions

    container, blob, version = fs.split_path(fs._strip_protocol(name))
    etag = _etag(stamp)
    same = {} if etag is None else {
        "etag": etag, "match_condition": MatchConditions.IfNotModified
    }  # fmt: skip
    async with fs.service_client.get_blob_client(container=container, blob=blob) as client:
        try:
            if start < 0:
                size = (await client.get_blob_properties(version_id=version, **same)).size
                start, stop = max(0, size + start), size
            answer = await client.download_blob(
                offset=start, length=None if stop is None else stop - start, version_id=version,
                **same,
            )  # fmt: skip
        except Exception as e:
            status = status_of(e)
            if status == 404:
                raise FileNotFoundError(name) from e
            if status == 412:
                raise changed("another etag than when it was listed") from e
            if status == 416 and start == 0:  # an empty blob has no byte 0
                yield Reply(_one(b""), 0, Stamp(0))
                return
            raise
        about = answer.properties
        _, size = _extent(about.get("content_range"), about.size, start)
        yield Reply(answer.chunks(), start, stamp_of({"size": size, "etag": about.etag}))


@asynccontextmanager
async def _other(
    fs: Any, name: str, start: int, stop: int | None, stamp: Stamp
) -> AsyncIterator[Reply]:
    def read() -> tuple[bytes, Stamp]:
        size = stamp.size
        if size is None:
            size = stamp_of(fs.info(name)).size
        if size is None:
            data: bytes = fs.cat_file(name)
            return data[start:stop], Stamp(len(data))
        first = max(0, size + start) if start < 0 else start
        end = min(size if stop is None else stop, first + BLOCK)
        data = fs.cat_file(name, start=first, end=end) if end > first else b""
        # where the look at it comes after the bytes, they are of this content or an earlier one
        return data, stamp_of(fs.info(name))

    data, found = await in_thread(read)
    first = start
    if start < 0:
        if found.size is None:
            raise TruncatedError("a store that does not say how long an object is")
        first = max(0, found.size + start)
    yield Reply(_one(data), first, found, by_block=True)


async def _one(data: bytes) -> AsyncIterator[bytes]:
    yield data
