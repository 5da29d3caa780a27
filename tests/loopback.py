"""Stores on the loopback interface: moto's S3 server, an HTTP server, and a proxy with faults.

``python tests/loopback.py FOLDER BUCKET`` serves the files of a folder as the objects of a bucket,
and prints its port. The server runs in a process of its own: it must not share the lock of the
one that is tested or measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import html
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote, urlsplit

SECRET = "never-to-be-printed-0123456789"


# --------------------------------------------------------------------------------------------------
# S3


def serve_bucket(folder: Path, bucket: str) -> None:
    """Until standard input is closed."""
    from moto.s3.models import s3_backends
    from moto.server import ThreadedMotoServer

    backend = s3_backends["123456789012"]["aws"]
    backend.create_bucket(bucket, "us-east-1")
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        backend.put_object(bucket, path.relative_to(folder).as_posix(), path.read_bytes())
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)  # noqa: T201 - what the caller waits for
    sys.stdin.read()
    os._exit(0)


@contextlib.contextmanager
def s3_server(folder: Path, bucket: str) -> Iterator[int]:
    """Its port; the bucket holds the files below ``folder``."""
    command = [sys.executable, __file__, str(folder), bucket]
    environment = os.environ | {"MOTO_ACCOUNT_ID": "123456789012"}
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment,
        ) as process
    ):  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(20)


def s3_environment(port: int) -> dict[str, str]:
    """What a client of it needs in its environment."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing-key-id",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


# --------------------------------------------------------------------------------------------------
# Faults

Fault = Callable[[str, str, int], str | None]
"""(method, path with query, how many such requests came before) -> what goes wrong, if anything."""

ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?>\n'
    "<Error><Code>{code}</Code><Message>{code}</Message><RequestId>1</RequestId></Error>"
)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""

    def do_GET(self) -> None:
        self._forward()

    def do_HEAD(self) -> None:
        self._forward()

    def _forward(self) -> None:
        proxy = self.server
        fault = proxy.note(self.command, self.path, self.headers.get("Range"))
        if proxy.latency_s:
            time.sleep(proxy.latency_s)
        if fault in {"500", "503"}:
            code = "InternalError" if fault == "500" else "SlowDown"
            body = ERROR.format(code=code).encode()
            self._answer(int(fault), {"Content-Type": "application/xml"}, body, len(body))
            return
        if fault == "refuse":
            self._reset()
            return
        upstream = HTTPConnection("127.0.0.1", proxy.upstream, timeout=30)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
            upstream.request(self.command, self.path, headers=headers)
            answer = upstream.getresponse()
            body = answer.read()
            headers = dict(answer.headers.items())
            length = int(answer.headers.get("Content-Length") or len(body))
        finally:
            upstream.close()
        half = len(body) // 2
        if self.command == "GET" and answer.status in {200, 206}:
            proxy.sent += len(body)
            if fault == "short":  # nothing but its length tells
                body, length = body[:half], half
            if fault in {"cut", "reset"}:
                self._answer(answer.status, headers, body[:half], length)
                if fault == "reset":
                    self._reset()
                self.close_connection = True
                return
            if fault == "slow":
                self._answer(answer.status, headers, body[:half], length)
                time.sleep(proxy.slow_s)
                self.wfile.write(body[half:])
                return
        self._answer(answer.status, headers, body, length)

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes, length: int) -> None:
        self.send_response(status)
        for key, value in headers.items():
            if key.lower() not in {
                "content-length", "connection", "transfer-encoding", "server", "date",
            }:  # fmt: skip
                self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


class FaultyProxy(ThreadingHTTPServer):
    """Stands before a server and spoils what ``fault`` names."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self, upstream: int, fault: Fault = lambda *_: None, latency_s: float = 0.0,
        slow_s: float = 0.3,
    ) -> None:  # fmt: skip
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.fault = fault
        self.latency_s = latency_s
        self.slow_s = slow_s
        self.seen: Counter[tuple[str, str]] = Counter()
        self.ranges: dict[str, list[str | None]] = {}
        self.done: Counter[str] = Counter()
        self.sent = 0
        self._lock = threading.Lock()

    def note(self, method: str, path: str, range_: str | None) -> str | None:
        with self._lock:
            before = self.seen[method, path]
            self.seen[method, path] += 1
            self.ranges.setdefault(path, []).append(range_)
            fault = self.fault(method, path, before)
            if fault is not None:
                self.done[fault] += 1
            return fault

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no fault."""

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


# --------------------------------------------------------------------------------------------------
# HTTP


class _Files(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        shop = self.server
        if shop.authorization and self.headers.get("Authorization") != shop.authorization:
            self._send(401, b"", {})
            return
        path = shop.root / unquote(urlsplit(self.path).path).lstrip("/")
        if path.is_dir() and not self.path.endswith("/"):
            self._send(301, b"", {"Location": f"{self.path}/"})
        elif path.is_dir() and shop.index:
            self._send(200, shop.page(path), {"Content-Type": "text/html"})
        elif path.is_file():
            self._file(path)
        else:
            self._send(404, b"", {})

    def _file(self, path: Path) -> None:
        data = path.read_bytes()
        headers = {"Content-Type": "application/octet-stream"}
        if self.server.etags:
            headers["ETag"] = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        wanted = self.headers.get("If-Match")
        if wanted and wanted != headers.get("ETag"):
            self._send(412, b"", {})
            return
        range_ = self.headers.get("Range", "")
        if self.server.knows_ranges and range_.startswith("bytes="):
            first, _, last = range_[6:].partition("-")
            begin = int(first) if first else max(0, len(data) - int(last))
            end = min(len(data), int(last) + 1) if first and last else len(data)
            if begin >= len(data):
                self._send(416, b"", {})
                return
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            self._send(206, data[begin:end], headers)
            return
        self._send(200, data, headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class FileServer(FaultyProxy):
    """Files of a folder, with an index of each folder where ``index`` says so."""

    def __init__(
        self, root: Path, *, index: bool = True, etags: bool = True, ranges: bool = True,
        authorization: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(0)
        self.RequestHandlerClass = _Files
        self.root = root
        self.index = index
        self.etags = etags
        self.knows_ranges = ranges
        self.authorization = authorization
        self.more = ""

    def page(self, folder: Path) -> bytes:
        """As servers write it: a way up, columns to sort by, names that are quoted."""
        links = ["../", "?C=M;O=A", "https://elsewhere.example/x.jsonl", "/etc/passwd"]
        links += [f"{quote(p.name)}{'/' * p.is_dir()}" for p in sorted(folder.iterdir())]
        rows = "".join(f'<li><a href="{html.escape(x)}">{html.escape(x)}</a></li>' for x in links)
        return f"<!DOCTYPE html><title>Index</title><ul>{rows}{self.more}</ul>".encode()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


if __name__ == "__main__":
    serve_bucket(Path(sys.argv[1]), sys.argv[2])
