"""Objects of stores, read whole or in part: in parallel, again where that helps, and checked.

A read goes on where its body broke, with a request for the rest. What does not pass by itself is
not tried again; what does is tried a bounded number of times, at growing, jittered intervals. An
object that is not the one that was listed, or is gone, is an error of that object.

The settings come from the environment, as the credentials do, so that they hold for the workers
of a cluster as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

from dl2gpu.trace.inputs import InputError, Stamp
from dl2gpu.trace.remote_errors import (
    TruncatedError,
    check_no_secret,
    remote_errors,
    transient,
)
from dl2gpu.trace.remote_get import changed, differs, in_thread, kind_of, opener, stamp_of

__all__ = [
    "download",
    "fetch",
    "fetch_head",
    "fetch_range",
    "fetch_ranges",
    "filesystem",
    "parallel",
    "persistent",
]

TRIES: Final = 8
"""Tries of a request, the first one included; ``DL2GPU_REMOTE_TRIES`` changes it."""
PARALLEL: Final = 32
"""Requests in flight; ``DL2GPU_REMOTE_PARALLEL`` changes it."""
FIRST_WAIT_S = 0.2
"""Before the second try; doubled for each further one."""
_MOST_WAIT_S: Final = 10.0
_STALLED_S: Final = 30.0
"""A connection that gives no byte for so long is given up, and another one made."""
_SLOW_AFTER_S: Final = 60.0
_SLOW_BYTES_S: Final = 1 << 10
"""... as is one that has given less than so many bytes a second for a minute."""
_DEAD_AFTER: Final = 16
"""So many objects in a row given up: the store is down, and each further one is tried once."""
_SPLIT: Final = 32 << 20
"""Larger objects are read in pieces of this size, some at a time."""
_PIECES: Final = 4
SMALL: Final = 256 << 10
"""Objects up to this size are read whole at the first look."""
_KEPT: Final = 64 << 20
"""Bytes of small objects that wait for their reader; others are asked for again."""

T = TypeVar("T")


def _setting(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
        raise InputError(f"{name}: expected a whole number from 1 to 9999, found {text!r}")
    return int(text)


def parallel() -> int:
    """How many objects are looked at or read at the same time."""
    return _setting("DL2GPU_REMOTE_PARALLEL", PARALLEL)


def tries() -> int:
    """How often a request is made at most."""
    return _setting("DL2GPU_REMOTE_TRIES", TRIES)


# --------------------------------------------------------------------------------------------------
# File systems


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the name that it has there.

    Raises:
        InputError: the URL carries credentials, or its scheme needs an extra.
    """
    check_no_secret(url)
    with remote_errors(url):
        from fsspec.core import url_to_fs  # late: only buckets need it

        schemes = [bit.partition("://")[0] for bit in url.split("::")]
        fs, name = url_to_fs(url, **{s: o for s in schemes if (o := _options(s))})
    if hasattr(fs, "retries") and kind_of(fs) == "s3":
        fs.retries = 1  # tried again here, with a bound for all kinds of faults together
    return fs, name


def _options(scheme: str) -> dict[str, Any]:
    if scheme in ("s3", "s3a"):
        return {
            "use_listings_cache": False,  # what is looked at again must be looked at
            "config_kwargs": {
                "connect_timeout": 10,
                "read_timeout": _STALLED_S,
                "max_pool_connections": max(10, 2 * parallel()),
                "retries": {"total_max_attempts": 1},
            },
        }
    if scheme in ("http", "https"):
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_STALLED_S)
        options: dict[str, Any] = {"simple_links": False, "client_kwargs": {"timeout": limits}}
        secret = os.environ.get("DL2GPU_HTTP_AUTHORIZATION")
        if secret:
            options["headers"] = {"Authorization": secret}
        return options
    if scheme in ("gs", "gcs", "az", "abfs", "abfss"):
        return {"use_listings_cache": False}
    return {}


def run(fs: Any, work: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Runs a coroutine on the loop of the file system, from any other thread."""
    from fsspec.asyn import get_loop, sync

    loop = fs.loop if getattr(fs, "async_impl", False) else get_loop()
    result: T = sync(loop, work, *args)
    return result


# --------------------------------------------------------------------------------------------------
# Trying again


class _Health:
    """How many objects of a store were given up in a row."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_up: dict[str, int] = {}

    def tries(self, store: str) -> int:
        return 1 if self._given_up.get(store, 0) >= _DEAD_AFTER else tries()

    def told(self, store: str, *, answered: bool) -> None:
        with self._lock:
            self._given_up[store] = 0 if answered else self._given_up.get(store, 0) + 1


_health: Final = _Health()


def _store(fs: Any, name: str) -> str:
    """What is up or down as one: a bucket, or a server."""
    kind = kind_of(fs)
    return f"{kind}:{'/'.join(name.split('/')[: 3 if kind == 'http' else 1])[:200]}"


def _wait_s(failures: int) -> float:
    """Seconds before the next try: doubled each time, and of that at least half, by chance."""
    most = min(_MOST_WAIT_S, FIRST_WAIT_S * 2.0 ** (failures - 1))
    return most * random.uniform(0.5, 1.0)  # noqa: S311 - spreads requests, guards nothing


async def persistent(call: Callable[[], Awaitable[T]]) -> T:
    """What ``call`` gives, tried again where its error may pass."""
    most = tries()
    for failures in range(1, most + 1):
        try:
            return await call()
        except Exception as e:
            if failures == most or not transient(e):
                raise
        await asyncio.sleep(_wait_s(failures))
    raise AssertionError("unreachable")


def patient(fs: Any, call: Callable[..., T], *args: Any) -> T:
    """As :func:`persistent`, of a synchronous method of a file system."""

    async def one() -> T:
        return await in_thread(call, *args)

    result: T = run(fs, persistent, one)
    return result


# --------------------------------------------------------------------------------------------------
# Reading


class _Read:
    """A read of a part of an object, over as many requests as it takes."""

    def __init__(
        self, fs: Any, name: str, stamp: Stamp | None, check: Callable[[int], None]
    ) -> None:
        self.fs = fs
        self.name = name
        self.stamp = stamp or Stamp()
        self.check = check
        self.got = 0

    async def to(self, sink: Callable[[bytes], object], start: int, stop: int | None) -> None:
        """Gives the bytes ``start`` to ``stop`` (or to the end) to ``sink``, in order."""
        store = _store(self.fs, self.name)
        failures = 0
        asked = 0
        while True:
            before = self.got
            try:
                whole = await self._some(sink, start, stop)
            except Exception as e:
                failures = 1 if self.got > before else failures + 1
                asked += 1
                passing = transient(e)
                # each request that gives but a little of a large body is no progress for ever
                if not passing or failures >= _health.tries(store) or asked > 1000:
                    _health.told(store, answered=not passing)
                    raise
                await asyncio.sleep(_wait_s(failures))
                continue
            _health.told(store, answered=True)
            if whole:
                return

    async def _some(self, sink: Callable[[bytes], object], start: int, stop: int | None) -> bool:
        """One request for what is missing; is that all?"""
        at = start + self.got
        if start < 0 and self.got and self.stamp.size is not None:
            at = max(0, self.stamp.size + start) + self.got
        began = time.monotonic()
        came = 0
        async with opener(self.fs)(self.fs, self.name, at, stop, self.stamp) as reply:
            how = differs(self.stamp, reply.stamp)
            if how is not None:
                raise changed(how)
            self.stamp = Stamp(
                reply.stamp.size if self.stamp.size is None else self.stamp.size,
                self.stamp.tag or reply.stamp.tag,
            )
            size = self.stamp.size
            if at < 0:  # the server may have sent all of it
                at = reply.first if size is None else max(reply.first, size + at)
            if reply.first > at:
                raise TruncatedError(f"asked for byte {at}, got those from {reply.first} on")
            end = size if stop is None else stop if size is None else min(stop, size)
            if start >= 0 and stop is None and size is not None:
                self.check(size)
            skip = at - reply.first
            async for chunk in reply.chunks:
                if skip:
                    dropped = min(skip, len(chunk))
                    skip -= dropped
                    chunk = chunk[dropped:]
                if end is not None and at + came + len(chunk) > end:
                    if stop is None:
                        raise changed(f"more than the {size} bytes that were listed")
                    chunk = chunk[: end - at - came]
                    if not chunk:
                        break
                if chunk:
                    sink(chunk)
                    came += len(chunk)
                    self.got += len(chunk)
                    if stop is None and size is None:
                        self.check(self.got)
                spent = time.monotonic() - began
                if spent > _SLOW_AFTER_S and came < spent * _SLOW_BYTES_S:
                    raise TruncatedError(f"{came} bytes in {spent:.0f} s")
        if end is None or at + came >= end:
            return True
        if reply.by_block and came:
            return False
        raise TruncatedError(f"the body ended after {at + came} of {end} bytes")


def _unlimited(_: int) -> None:
    """No limit."""


def fetch(url: str, stamp: Stamp | None, check: Callable[[int], None] = _unlimited) -> bytes:
    """The whole content of an object.

    Args:
        url: of the object.
        stamp: what it must be; None: what a look at it says, by which a short body is known.
        check: raises where so many bytes are too many; called before they are read.

    Raises:
        InputError: it is gone, changed, too large, or the store did not answer; says which.
    """
    kept = _small.take(url, stamp)
    if kept is not None:
        check(len(kept))
        return kept
    fs, name = filesystem(url)
    if stamp is None:
        with remote_errors(tries=tries()), contextlib.suppress(FileNotFoundError):
            stamp = stamp_of(patient(fs, fs.info, name))
    if stamp is not None and stamp.size is not None:
        check(stamp.size)
        if stamp.size > _SPLIT and stamp.tag is not None and kind_of(fs) in ("s3", "gs", "az"):
            with remote_errors(tries=tries()):
                return run(fs, _in_pieces, fs, name, stamp)
    parts: list[bytes] = []
    with remote_errors(tries=tries()):
        run(fs, _Read(fs, name, stamp, check).to, parts.append, 0, None)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _in_pieces(fs: Any, name: str, stamp: Stamp) -> bytes:
    assert stamp.size is not None
    got: dict[int, bytes] = {}
    await _ranges(fs, name, stamp, [(0, stamp.size)], got.__setitem__)
    return b"".join(got[start] for start in sorted(got))


async def _ranges(
    fs: Any, name: str, stamp: Stamp | None, ranges: Iterable[tuple[int, int]],
    sink: Callable[[int, bytes], object],
) -> None:  # fmt: skip
    """Gives (first byte, bytes) of the ranges to ``sink``, in pieces, some at a time."""
    at_once = asyncio.Semaphore(_PIECES)

    async def piece(start: int, stop: int) -> None:
        parts: list[bytes] = []
        async with at_once:
            await _Read(fs, name, stamp, _unlimited).to(parts.append, start, stop)
            sink(start, b"".join(parts))

    try:
        async with asyncio.TaskGroup() as group:
            for start, stop in ranges:
                for first in range(start, stop, _SPLIT):
                    group.create_task(piece(first, min(stop, first + _SPLIT)))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def download(
    url: str, stamp: Stamp | None, sink: Callable[[bytes], object],
    check: Callable[[int], None] = _unlimited,
) -> Stamp:  # fmt: skip
    """Gives the content to ``sink``, piece by piece, and what it was; raises as :func:`fetch`."""
    fs, name = filesystem(url)
    if stamp is not None and stamp.size is not None:
        check(stamp.size)
    read = _Read(fs, name, stamp, check)
    with remote_errors(tries=tries()):
        run(fs, read.to, sink, 0, None)
    return read.stamp


def fetch_range(url: str, start: int, stop: int | None, stamp: Stamp | None = None) -> bytes:
    """Bytes ``start`` to ``stop``, or as many as there are; a negative ``start``: the last ones."""
    fs, name = filesystem(url)
    parts: list[bytes] = []
    if stop is not None and stop <= max(0, start):
        return b""
    with remote_errors(tries=tries()):
        run(fs, _Read(fs, name, stamp, _unlimited).to, parts.append, start, stop)
    data = b"".join(parts)
    return data[start:] if start < 0 else data


def fetch_ranges(
    url: str, ranges: Iterable[tuple[int, int]], stamp: Stamp | None,
    sink: Callable[[int, bytes], object],
) -> None:  # fmt: skip
    """Gives (first byte, bytes) of parts of an object to ``sink``, in any order.

    Raises:
        InputError: as :func:`fetch`.
    """
    fs, name = filesystem(url)
    with remote_errors(tries=tries()):
        run(fs, _ranges, fs, name, stamp, ranges, sink)


def fetch_head(url: str, size: int, stamp: Stamp | None) -> bytes:
    """The first ``size`` bytes. A small object is read whole, and kept for :func:`fetch`."""
    if stamp is None or stamp.size is None or stamp.size > SMALL:
        return fetch_range(url, 0, size, stamp)
    data = _small.look(url, stamp)
    if data is None:
        fs, name = filesystem(url)
        parts: list[bytes] = []
        read = _Read(fs, name, stamp, _unlimited)
        with remote_errors(tries=tries()):
            run(fs, read.to, parts.append, 0, None)
        data = b"".join(parts)
        _small.keep(url, stamp, data)
    return data[:size]


class _Small:
    """Small objects that were read when they were looked at, for the one read that follows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, Stamp], bytes] = {}
        self._bytes = 0

    def keep(self, url: str, stamp: Stamp, data: bytes) -> None:
        with self._lock:
            if self._bytes + len(data) <= _KEPT and (url, stamp) not in self._kept:
                self._kept[url, stamp] = data
                self._bytes += len(data)

    def look(self, url: str, stamp: Stamp) -> bytes | None:
        return self._kept.get((url, stamp))

    def take(self, url: str, stamp: Stamp | None) -> bytes | None:
        if stamp is None:
            return None
        with self._lock:
            data = self._kept.pop((url, stamp), None)
            self._bytes -= len(data or b"")
        return data

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._bytes = 0


_small: Final = _Small()


def forget() -> None:
    """Drops what was kept: another scan looks again."""
    _small.clear()
