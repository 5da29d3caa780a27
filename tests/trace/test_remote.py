"""Buckets and HTTP servers: the report of a local copy, whatever goes wrong on the way."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import SECRET, FaultyProxy, FileServer, s3_environment, s3_server

from dl2gpu.journal import Journal
from dl2gpu.report.model import Report
from dl2gpu.scan import scan
from dl2gpu.shard import Result, Task
from dl2gpu.trace import remote, remote_list
from dl2gpu.trace.discover import discover
from dl2gpu.trace.files import Limits, read_bytes, read_head, read_tail
from dl2gpu.trace.inputs import Input, InputError, Stamp, TraceFile
from dl2gpu.trace.readers import read_files
from dl2gpu.trace.remote_errors import check_no_secret, gave_up, masked, transient
from dl2gpu.trace.remote_get import in_thread

needs_s3 = pytest.mark.skipif(
    any(importlib.util.find_spec(m) is None for m in ("s3fs", "moto", "flask")),
    reason="needs the extra test: s3fs and moto's server",
)
COPIES = 33
BUCKET = "traces"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of milliseconds between tries."""
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.002)
    remote._health._given_up.clear()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, demo: Path) -> Path:
    """Two thousand files: the demo corpus again and again."""
    top = tmp_path_factory.mktemp("remote") / BUCKET
    for copy in range(COPIES):
        shutil.copytree(demo, top / f"site_{copy:02}")
    assert sum(p.is_file() for p in top.rglob("*")) >= 2000
    return top


@pytest.fixture(scope="module")
def local(corpus: Path) -> str:
    return told(scan(str(corpus)))


@pytest.fixture(scope="module")
def s3_port(corpus: Path) -> Iterator[int]:
    with s3_server(corpus, BUCKET) as port:
        yield port


@pytest.fixture
def s3(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy in front of the S3 server, and the environment that leads to it."""
    with FaultyProxy(s3_port).running() as proxy:
        for name, value in s3_environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield proxy
    forget_clients()


def forget_clients() -> None:
    """The next test has another address in its environment."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    remote.forget()


def told(report: Report) -> str:
    """The report but for the time it took."""
    said = json.loads(report.to_json())
    del said["summary"]["elapsed_s"]
    return json.dumps(said, indent=1)


def number(path: str) -> int:
    return zlib.crc32(path.encode())


# --------------------------------------------------------------------------------------------------
# S3


@needs_s3
def test_bucket_is_reported_as_its_local_copy(s3: FaultyProxy, local: str) -> None:
    assert told(scan(f"s3://{BUCKET}")) == local
    objects = [p for (m, p), _ in s3.seen.items() if m == "GET" and "list-type" not in p]
    assert len(objects) > 1500
    # small objects take one request each
    assert max(n for (m, p), n in s3.seen.items() if p in set(objects)) == 1


FAULTS = ("500", "503", "cut", "reset", "short", "slow", "refuse")


@needs_s3
def test_faults_on_the_way_leave_the_report_as_it_is(s3: FaultyProxy, local: str) -> None:
    def fault(method: str, path: str, before: int) -> str | None:
        if "list-type" in path:
            return ("500", "503", "cut")[number(path) % 3] if before < 2 else None
        spoilt = number(path) % 4 == 0 and before < 1 + number(path) % 3
        return FAULTS[(number(path) // 4 + before) % len(FAULTS)] if spoilt else None

    s3.fault = fault
    s3.slow_s = 0.02
    assert told(scan(f"s3://{BUCKET}")) == local
    assert set(FAULTS) <= set(s3.done)
    assert sum(s3.done.values()) > 400


@needs_s3
def test_body_that_breaks_is_continued_where_it_broke(
    s3: FaultyProxy, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = max((p for p in corpus.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    key = path.relative_to(corpus).as_posix()
    size = path.stat().st_size
    s3.fault = lambda method, path, before: (
        ("cut", "reset", "short")[before] if before < 3 else None
    )
    assert remote.fetch(f"s3://{BUCKET}/{key}", Stamp(size)) == path.read_bytes()
    (asked,) = (r for p, r in s3.ranges.items() if p.endswith(key.rpartition("/")[2]))
    starts = [int(re.findall(r"\d+", r or "0")[0]) for r in asked]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert starts[-1] > size // 2
    assert s3.sent < 2 * size + 1000  # only what was missing came again


@needs_s3
def test_large_object_in_pieces(
    s3: FaultyProxy, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_SPLIT", 1000)
    monkeypatch.setattr(remote, "SMALL", 10)
    s3.fault = lambda method, path, before: "cut" if before in (1, 4) else None
    (one,) = remote_list.find(
        f"s3://{BUCKET}/site_00/two-groups-inverted", {"nccl_trace_rank_node-07_1"}
    )
    data = remote.fetch(one.url, one.stamp)
    assert data == (corpus / "site_00/two-groups-inverted" / one.below).read_bytes()
    assert len(data) > 3000
    with pytest.raises(InputError, match="changed during the scan"):
        remote.fetch(one.url, Stamp(one.stamp.size, "etag=another"))


@needs_s3
@pytest.mark.parametrize("page", [7, 100])
def test_listing_by_ranges_of_keys(
    s3: FaultyProxy, corpus: Path, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_list, "PAGE", page)
    for top in ("", "/site_03", "/site_00/two-groups-inverted"):
        folder = corpus / top.lstrip("/")
        want = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        found = list(remote_list.find(f"s3://{BUCKET}{top}"))
        assert [f.below for f in found] == want
        assert all(f.stamp.tag and f.stamp.tag.startswith("etag=") for f in found)
        assert [f.stamp.size for f in found] == [(folder / f).stat().st_size for f in want]


def site(port: int) -> Any:
    """A client that writes."""
    import s3fs

    return s3fs.S3FileSystem(endpoint_url=f"http://127.0.0.1:{port}", skip_instance_cache=True)


@needs_s3
def test_objects_that_change_or_vanish_hurt_no_other(
    s3: FaultyProxy, s3_port: int, demo: Path, tmp_path: Path
) -> None:
    """Between the listing and the reading."""
    shutil.copytree(demo / "two-groups-inverted", tmp_path / "neighbour")
    shutil.copytree(demo / "uneven-batches", tmp_path / "job")
    client = site(s3_port)
    client.mkdir("changing")
    client.put(str(tmp_path), "changing/", recursive=True)
    (corpus_,) = (str(p) for p in client.ls("changing"))
    expected = scan(f"s3://{corpus_}")
    lines = (demo / "uneven-batches/rank_1.jsonl").read_bytes()
    files = discover([f"s3://{corpus_}"]).files
    remote.forget()
    client.pipe(f"{corpus_}/job/rank_1.jsonl", lines.replace(b"a", b"b", 1))  # same size
    client.pipe(f"{corpus_}/job/rank_2.jsonl", lines + b"\n")
    client.rm(f"{corpus_}/job/rank_3.jsonl")
    inputs = {i.path: i for i in read_files(files)[1]}
    for name, words in (
        ("rank_1", "changed during the scan"), ("rank_2", "changed during the scan"),
        ("rank_3", "not there"),
    ):  # fmt: skip
        found = inputs[f"job/{name}.jsonl"]
        assert found.status == "quarantined"
        assert words in (found.reason or "")
    before = {i["path"]: i["events"] for i in expected.inputs.to_dicts()}
    for path, found in inputs.items():
        if found.status == "read":
            assert found.events == before[path]
    assert sum(i.status == "read" for i in inputs.values()) == len(files) - 3


@needs_s3
def test_store_that_stays_down_costs_its_files_alone(
    s3: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DL2GPU_REMOTE_TRIES", "3")
    s3.fault = lambda method, path, before: "503" if "rank_1" in path else None
    report = scan(f"s3://{BUCKET}/site_00")
    lost = report.inputs.filter(report.inputs["status"] == "quarantined")
    lost = lost.filter(lost["path"].str.contains("rank_1"))
    assert lost.height >= 5
    assert all("gave up after 3 tries" in r for r in lost["reason"])
    assert SECRET not in report.to_json().decode()
    counts = [n for (m, p), n in s3.seen.items() if "rank_1" in p]
    assert max(counts) == 3  # bounded, and the store's own client does not add to it


@needs_s3
def test_what_lasts_is_not_tried_again(s3: FaultyProxy) -> None:
    with pytest.raises(InputError, match="found nothing there"):
        discover([f"s3://{BUCKET}/nowhere"])
    with pytest.raises(InputError, match="found nothing there"):
        discover(["s3://no-such-bucket/x"])
    assert max(n for (m, p), n in s3.seen.items() if "nowhere" in p) <= 3


@needs_s3
def test_workers_of_a_cluster_read_the_bucket(s3: FaultyProxy, demo: Path) -> None:
    want = json.loads(told(scan(str(demo))))
    got = json.loads(told(scan(f"s3://{BUCKET}/site_05", cluster="local", workers=1)))
    want["summary"]["cluster"] = "local"
    text = json.dumps(want, sort_keys=True).replace('"demo"', '"site_05"')
    assert json.loads(text) == json.loads(json.dumps(got, sort_keys=True))


@needs_s3
def test_ends_of_an_object(s3: FaultyProxy, s3_port: int) -> None:
    client = site(s3_port)
    client.mkdir("ends")
    data = bytes(range(256)) * 10
    client.pipe({"ends/x": data, "ends/empty": b""})
    url = "s3://ends/x"
    assert read_tail(url, 8) == data[-8:]
    assert read_tail(url, 10_000) == data
    assert read_head(url, 5) == (data[:5], None)
    assert read_head(url, 10_000)[0] == data
    assert remote.fetch("s3://ends/empty", None) == b""
    assert read_head("s3://ends/empty", 10) == (b"", None)
    with pytest.raises(InputError, match="the limit is 100"):
        read_bytes(TraceFile("x", url, "native", ""), Limits(max_file_bytes=100))


# --------------------------------------------------------------------------------------------------
# HTTP

needs_http = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="needs the extra http"
)


@pytest.fixture
def site_folder(tmp_path: Path, demo: Path) -> Path:
    top = tmp_path / "demo"
    shutil.copytree(demo, top)
    (top / "job with blank & more").mkdir()
    shutil.copy(demo / "uneven-batches/rank_0.jsonl", top / "job with blank & more/rank 0.jsonl")
    (top / "labels.csv").write_text("x")
    return top


@needs_http
@pytest.mark.parametrize("etags", [True, False])
@pytest.mark.parametrize("ranges", [True, False])
def test_http_index(site_folder: Path, *, etags: bool, ranges: bool) -> None:
    with FileServer(site_folder.parent, etags=etags, ranges=ranges).running() as server:
        report = scan(f"{server.url}/demo/")
        again = scan(f"{server.url}/demo")
        url = f"{server.url}/demo/README.md"
        readme = (site_folder / "README.md").read_bytes()
        assert read_tail(url, 9) == readme[-9:]
        assert read_head(url, 9)[0] == readme[:9]
    assert told(report) == told(again) == told(scan(str(site_folder)))


@needs_http
def test_http_files_named_one_by_one_need_no_index(site_folder: Path) -> None:
    job = site_folder / "uneven-batches"
    with FileServer(site_folder.parent, index=False).running() as server:
        urls = [f"{server.url}/demo/{job.name}/{p.name}" for p in job.iterdir()]
        report = scan(urls)
    assert told(report) == told(scan([str(p) for p in job.iterdir()]))


@needs_http
def test_http_faults(site_folder: Path) -> None:
    with FileServer(site_folder.parent).running() as server:

        def fault(method: str, path: str, before: int) -> str | None:
            fault = FAULTS[(number(path) + before) % len(FAULTS)] if before < 2 else None
            # of an index page nothing else tells that it is too short
            return "cut" if fault == "short" and path.endswith("/") else fault

        with FaultyProxy(server.port, fault, slow_s=0.01).running() as proxy:
            report = scan(f"http://127.0.0.1:{proxy.port}/demo/")
            assert set(FAULTS) <= set(proxy.done)
    assert told(report) == told(scan(str(site_folder)))


@needs_http
@pytest.mark.parametrize("etags", [True, False])
def test_http_files_that_change(site_folder: Path, *, etags: bool) -> None:
    job = site_folder / "uneven-batches"
    with FileServer(site_folder.parent, etags=etags).running() as server:
        files = discover([f"{server.url}/demo/uneven-batches/"]).files
        remote.forget()
        text = (job / "rank_1.jsonl").read_bytes()
        (job / "rank_1.jsonl").write_bytes(text + b"\n")
        (job / "rank_2.jsonl").unlink()
        inputs = {i.path: i for i in read_files(files)[1]}
    assert "changed" in (inputs["rank_1.jsonl"].reason or "")
    assert "not there" in (inputs["rank_2.jsonl"].reason or "")
    assert [i.status for i in inputs.values()].count("read") == 2


@needs_http
def test_http_index_leads_nowhere_else(site_folder: Path) -> None:
    with FileServer(site_folder.parent).running() as server:
        server.more = (
            '<a href="../secret.jsonl">x</a><a href="%2e%2e/x/">y</a><a href="..%2fz.jsonl">z</a>'
            '<a href="//other.example/x.jsonl">v</a><a href="javascript:x">w</a>'
        )
        found = list(remote_list.find(f"{server.url}/demo"))
        (job,) = (f for f in found if "blank" in f.below)
    assert job.below == "job with blank & more/rank 0.jsonl"
    on_disk = sorted(p.relative_to(site_folder).as_posix() for p in site_folder.rglob("*.*l"))
    assert sorted(f.below for f in found if f.below.endswith("l")) == on_disk


@needs_http
def test_http_credentials_of_the_environment(
    site_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"Bearer {SECRET}"
    with FileServer(site_folder.parent, authorization=words).running() as server:
        with pytest.raises(InputError, match="cannot be listed") as denied:
            discover([f"{server.url}/demo/"])
        assert SECRET not in str(denied.value)
        monkeypatch.setenv("DL2GPU_HTTP_AUTHORIZATION", words)
        assert told(scan(f"{server.url}/demo/")) == told(scan(str(site_folder)))


# --------------------------------------------------------------------------------------------------
# Other stores


def test_calls_that_wait_for_the_threads_of_the_loop_do_not_block_it() -> None:
    """As one that looks a host's name up does, which the loop gives to threads of its own."""
    from fsspec.asyn import get_loop, sync

    async def look_up() -> int:
        return await asyncio.get_running_loop().run_in_executor(None, int, "7")

    def call() -> int:
        found: int = sync(get_loop(), look_up, timeout=60)
        return found

    async def many() -> list[int]:
        return await asyncio.gather(*(in_thread(call) for _ in range(100)))

    assert sync(get_loop(), many, timeout=100) == [7] * 100


# --------------------------------------------------------------------------------------------------
# Words, secrets, settings


@pytest.mark.parametrize(
    "url",
    [
        f"s3://id:{SECRET}@bucket/x",
        f"https://user:{SECRET}@host/x/",
        f"https://host/x.json?X-Amz-Credential=a&X-Amz-Signature={SECRET}",
        f"https://account.blob.core.windows.net/c/x?sv=2024&sig={SECRET}",
        f"https://host/x?token={SECRET}",
        f"zip://a::https://user:{SECRET}@host/x.zip",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InputError, match="without credentials") as refused:
        scan(url)
    assert SECRET not in str(refused.value)
    assert "environment" in str(refused.value)


def test_names_that_are_no_secrets() -> None:
    for url in (
        "abfs://container@account.dfs.core.windows.net/x", "https://host/x?download=1",
        "s3://bucket/a@b/c", "/local/a@b", "https://host/keys/token.json?version=3",
    ):  # fmt: skip
        check_no_secret(url)


def test_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    text = f"GET https://u:p@h/x?a={SECRET}&b=1 failed, key {SECRET}: at s3://bucket/a@b"
    assert masked(text) == "GET https://***@h/x?a=***&b=*** failed, key ***: at s3://bucket/a@b"


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("s3://bucket/x", "s3fs", "s3"),
        ("gs://bucket/x", "gcsfs", "gs"),
        ("az://container/x", "adlfs", "az"),
        ("https://host/x/", "aiohttp", "http"),
    ],
)
def test_missing_extra_is_named(url: str, package: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"from dl2gpu.cli import app; app(['scan', {url!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 2
    assert f"needs the extra {extra}" in done.stderr
    assert f"pip install 'dl2gpu[{extra}]'" in done.stderr


def test_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DL2GPU_REMOTE_TRIES", "0")
    with pytest.raises(InputError, match="DL2GPU_REMOTE_TRIES: expected a whole number"):
        remote.tries()


class Answer(Exception):
    """As botocore's: the status is in the answer."""

    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(code)
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429, 408])
def test_what_passes(status: int) -> None:
    assert transient(Answer(status))
    wrapped = OSError("translated")
    wrapped.__cause__ = Answer(status)
    assert transient(wrapped)


@pytest.mark.parametrize(
    "error",
    [Answer(403, "AccessDenied"), Answer(404), Answer(301), FileNotFoundError("x"),
     PermissionError("x"), ValueError("x"), InputError("x")],
)  # fmt: skip
def test_what_lasts(error: Exception) -> None:
    assert not transient(error)
    assert transient(ConnectionResetError())
    assert transient(TimeoutError())


def test_journal_takes_no_result_of_a_changed_object(tmp_path: Path) -> None:
    def task(tag: str | None, url: str = "s3://b/x") -> Task:
        return Task((TraceFile("x", url, "native", "", 3, stamp=Stamp(3, tag)),))

    kept = Journal(tmp_path / "parts")
    result = Result([], [], [Input("x", "read")], [])
    kept.put(task("etag=1"), result.encode())
    assert kept.get(task("etag=1")) == result.encode()
    assert kept.get(task("etag=2")) is None
    kept.put(task(None), result.encode())  # nothing tells one content from another
    assert kept.get(task(None)) is None
    lost = Result([], [], [Input("x", "quarantined", "cannot be read: gave up after 8 tries")], [])
    assert gave_up(lost.inputs[0].reason or "")
    kept.put(task("etag=3"), lost.encode())  # the store may be up again
    assert kept.get(task("etag=3")) is None
