"""Archives: their members are files like others, whatever the archive is, and wherever it lies."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import random
import shutil
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dl2gpu.journal import Journal
from dl2gpu.report.model import Report
from dl2gpu.scan import scan
from dl2gpu.shard import Result, Task
from dl2gpu.trace import containers, containers_spool
from dl2gpu.trace.convert import convert
from dl2gpu.trace.discover import Discovery, discover
from dl2gpu.trace.files import Limits, cut_reason, read_bytes, read_head, read_tail
from dl2gpu.trace.inputs import Input, InputError, TraceFile

Pack = Callable[[Path], bytes]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    containers.forget()


def tar(folder: Path, **options: object) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", **options) as archive:  # type: ignore[call-overload]
        archive.add(folder, arcname=".")
    return out.getvalue()


def zipped(folder: Path, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
    return out.getvalue()


PACKS: dict[str, Pack] = {
    "x.tar": tar,
    "x.gnu": lambda f: tar(f, format=tarfile.GNU_FORMAT),
    "x.ustar": lambda f: tar(f, format=tarfile.USTAR_FORMAT),
    "x.tar.gz": lambda f: gzip.compress(tar(f)),
    "streams.tgz": lambda f: b"".join(gzip.compress(p) for p in (tar(f)[:70_000], tar(f)[70_000:])),
    "x.tar.zst": lambda f: zstandard.ZstdCompressor().compress(tar(f)),
    "x.tar.bz2": lambda f: bz2.compress(tar(f)),
    "x.tar.xz": lambda f: lzma.compress(tar(f), preset=0),
    "x.zip": zipped,
    "stored.zip": lambda f: zipped(f, zipfile.ZIP_STORED),
    "lzma.zip": lambda f: zipped(f, zipfile.ZIP_LZMA),
    "without an end": lambda f: gzip.compress(tar(f)),
}


def told(report: Report, archive: str | None = None) -> dict[str, object]:
    """The report but for its time, and for the archive itself."""
    said: dict[str, object] = json.loads(report.to_json())
    summary = said["summary"]
    assert isinstance(summary, dict)
    del summary["elapsed_s"]
    if archive is not None:
        inputs = said["inputs"]
        assert isinstance(inputs, list)
        (own,) = (i for i in inputs if i["path"] == archive)
        assert own["status"] == "read"
        assert own["reason"].startswith("an archive of ")
        inputs.remove(own)
        summary["files"] -= 1
    return said


@pytest.fixture
def jobs(tmp_path: Path, demo: Path) -> Path:
    """A few jobs of several formats, with what lies about in folders."""
    top = tmp_path / "jobs"
    for name in (
        "two-groups-inverted", "uneven-batches", "dump-cut-short", "gpt2-tensor-parallel-healthy",
    ):  # fmt: skip
        shutil.copytree(demo / name, top / name)
    (top / "uneven-batches" / "README.md").write_text("x")
    (top / ".git").mkdir()
    (top / ".git" / "config").write_text("x")
    packed = gzip.compress((top / "uneven-batches" / "rank_0.jsonl").read_bytes())
    (top / "uneven-batches" / "rank_0.jsonl").write_bytes(packed)
    return top


def same_folder(jobs: Path, name: str) -> Report:
    """Of the same files in a folder that is named as the archive."""
    top = jobs.parent / "unpacked"
    shutil.copytree(jobs, top / name, ignore=shutil.ignore_patterns(".git"))
    return scan(str(top))


@pytest.mark.parametrize("name", PACKS)
def test_archive_is_reported_as_the_folder_of_its_files(jobs: Path, name: str) -> None:
    want = told(same_folder(jobs, name))
    top = jobs.parent / "packed"
    top.mkdir()
    (top / name).write_bytes(PACKS[name](jobs))
    got = told(scan(str(top)), name)
    inputs = got["inputs"]
    assert isinstance(inputs, list)
    hidden = [i for i in inputs if ".git" in i["path"]]
    assert [(i["status"], i["reason"]) for i in hidden] == [("ignored", "a version control store")]
    inputs.remove(hidden[0])
    assert isinstance(got["summary"], dict)
    got["summary"]["files"] -= 1
    assert got == want
    assert len(inputs) == sum(p.is_file() for p in jobs.rglob("*")) - 1


@pytest.mark.parametrize("name", ["x.tar.gz", "x.zip"])
def test_archive_named_by_itself(jobs: Path, name: str) -> None:
    (jobs.parent / name).write_bytes(PACKS[name](jobs))
    found = discover([str(jobs.parent / name)])
    assert {f.path.split("/")[0] for f in found.files} == {name}
    assert found.files[0].folder == f"{name}/dump-cut-short"


@pytest.mark.parametrize("scheme", ["memory", "cluster", "parquet"])
def test_archive_elsewhere(
    jobs: Path, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a store; read by the process of a worker; with Parquet files and their side tables."""
    monkeypatch.setattr(containers_spool, "_IN_MEMORY", 1000)
    if scheme == "parquet":
        columns = tmp_path / "columns"
        for job in jobs.iterdir():
            if job.name in {"two-groups-inverted", "gpt2-tensor-parallel-healthy"}:
                (columns / job.name).mkdir(parents=True)
                convert(str(job), str(columns / job.name / "x.parquet"))
        jobs = columns
    want = told(same_folder(jobs, "x.tgz"))
    assert len(want["jobs"]) >= 2  # type: ignore[arg-type]
    top = tmp_path / "packed"
    top.mkdir()
    shutil.rmtree(jobs / ".git", ignore_errors=True)
    (top / "x.tgz").write_bytes(gzip.compress(tar(jobs)))
    if scheme != "memory":
        where = "local" if scheme == "cluster" else "threads"
        got = told(scan(str(top), cluster=where, workers=1), "x.tgz")
        want["summary"]["cluster"] = where  # type: ignore[index]
        assert got == want
        return
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.put(str(top), "/packed", recursive=True)
    try:
        assert told(scan("memory://packed"), "x.tgz") == want
    finally:
        fs.rm("/packed", recursive=True)


def test_compressed_archive_is_read_through_once_and_leaves_nothing(
    jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(containers_spool, "_IN_MEMORY", 1000)
    passes: list[str] = []
    real = containers_spool.spool_inflated

    def counted(source: containers_spool.Source, kind: str, limits: Limits) -> object:
        passes.append(kind)
        return real(source, kind, limits)

    monkeypatch.setattr(containers, "spool_inflated", counted)
    top = tmp_path / "packed"
    top.mkdir()
    (top / "x.tgz").write_bytes(gzip.compress(tar(jobs)))
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    report = scan(str(top))
    assert report.jobs.height == 4
    assert passes == ["gzip"]
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_one_archive_for_each_rank_is_one_job(jobs: Path, tmp_path: Path) -> None:
    top = tmp_path / "ranks"
    for rank in range(4):
        one = tmp_path / f"one_{rank}"
        one.mkdir()
        shutil.copy(jobs / "two-groups-inverted" / f"nccl_trace_rank_node-07_{rank}", one)
        for job, ends in (("a", ".tar.gz"), ("b", ".zip")):
            (top / job).mkdir(parents=True, exist_ok=True)
            packed = zipped(one) if ends == ".zip" else gzip.compress(tar(one))
            (top / job / f"rank_{rank}{ends}").write_bytes(packed)
    files = discover([str(top)]).files
    assert {f.folder for f in files} == {"a", "b"}
    assert scan(str(top)).jobs["ranks_present"].to_list() == [[0, 1, 2, 3]] * 2


# --------------------------------------------------------------------------------------------------
# Damaged


def statuses(found: Discovery) -> dict[str, tuple[str, str | None]]:
    out: dict[str, tuple[str, str | None]] = {f.path: ("file", None) for f in found.files}
    return out | {i.path: (i.status, i.reason) for i in found.inputs}


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, bz2.compress, lambda x: x])
def test_archive_that_is_cut_short(
    jobs: Path, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    noise = tmp_path / "noise"
    noise.mkdir()
    names = [f"rank_{i}.jsonl" for i in range(4)]
    for i, name in enumerate(names):
        header = json.dumps(
            {"kind": "header", "format": "dl2gpu.trace", "version": 1, "rank": i, "world_size": 4}
        )
        letters = random.Random(i).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=1_500_000)
        (noise / name).write_text(f"{header}\n" + "\n".join(["".join(letters)] * 1))
    packed = pack(tar(noise))
    top = tmp_path / "cut"
    top.mkdir()
    (top / "x").write_bytes(packed[: len(packed) * 5 // 8])
    found = discover([str(top)])
    state = statuses(found)
    assert state["x"][0] == "partial"
    assert "ends too early" in str(state["x"][1]) or "cut short" in str(state["x"][1])
    files = sorted(found.files, key=lambda f: f.path)
    assert 2 <= len(files) <= 3
    whole, last = read_bytes(files[0]), read_bytes(files[-1])
    assert cut_reason(whole) is None
    assert len(whole) > 1_500_000
    assert "the archive ends" in str(cut_reason(last))
    assert 0 < len(last) < 1_500_000


def test_tar_that_is_damaged_in_its_middle(jobs: Path) -> None:
    data = bytearray(tar(jobs))
    with tarfile.open(fileobj=io.BytesIO(bytes(data))) as archive:
        infos = [m for m in archive.getmembers() if m.isreg()]
    middle = infos[len(infos) // 2]
    header = middle.offset_data - 512
    data[header : header + 512] = b"\xff" * 512
    (jobs.parent / "x.tar").write_bytes(data)
    found = discover([str(jobs.parent / "x.tar")])
    assert statuses(found)["x.tar"][0] == "partial"
    assert "damaged" in str(statuses(found)["x.tar"][1])
    assert 0 < len(found.files) < len(infos)


@pytest.mark.parametrize("more", [b"not zeros" * 100, tarfile.BLOCKSIZE * b"\0" + b"x" * 512])
def test_what_follows_a_tar_is_told(jobs: Path, more: bytes) -> None:
    (jobs.parent / "x.tar").write_bytes(tar(jobs) + more)
    assert "followed by other bytes" in str(statuses(discover([str(jobs.parent / "x.tar")])))


def test_zip_that_is_cut_short(jobs: Path) -> None:
    data = zipped(jobs)
    (jobs.parent / "x.zip").write_bytes(data[: len(data) // 2])
    found = discover([str(jobs.parent / "x.zip")])
    (only,) = found.inputs
    assert only.status == "quarantined"
    assert "cut short or damaged" in str(only.reason)


def test_zip_with_a_damaged_member(jobs: Path) -> None:
    data = bytearray(zipped(jobs))
    info = zipfile.ZipFile(io.BytesIO(bytes(data))).getinfo(
        "two-groups-inverted/nccl_trace_rank_node-07_1"
    )
    middle = info.header_offset + 30 + len(info.filename) + info.compress_size // 2
    data[middle : middle + 40] = b"\xff" * 40
    top = jobs.parent / "packed"
    top.mkdir()
    (top / "x.zip").write_bytes(data)
    inputs = {r["path"]: r for r in scan(str(top)).inputs.to_dicts()}
    damaged = inputs.pop(f"x.zip/{info.filename}")
    assert damaged["status"] == "partial"
    assert [r["status"] for r in inputs.values()].count("read") >= 10


CONTENT = b'{"kind":"header","format":"dl2gpu.trace","version":1,"rank":0,"world_size":1}\n'


@given(st.sampled_from(["tar", "zip", "tgz"]), st.data())
def test_any_damage_is_an_answer(kind: str, data: st.DataObject) -> None:
    out = io.BytesIO()
    names = ["a/rank_0.jsonl", "n" * 120 + "/rank_1.jsonl", "b/ü.jsonl"]
    if kind == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
            for name in names:
                z.writestr(name, CONTENT * 3)
    else:
        with tarfile.open(fileobj=out, mode="w:gz" if kind == "tgz" else "w") as t:
            for name in names:
                info = tarfile.TarInfo(name)
                info.size = len(CONTENT) * 3
                t.addfile(info, io.BytesIO(CONTENT * 3))
    packed = bytearray(out.getvalue().rstrip(b"\0") if kind == "tar" else out.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        i = data.draw(st.integers(0, len(packed)))
        packed[i : i + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe("/t-damage/x", bytes(packed))
    containers.forget()
    try:
        inside = containers.contents("memory://t-damage/x", None)
        for member in inside.members:
            if member.status == "read":
                url = containers.member_url("memory://t-damage/x", member.name)
                read_bytes(TraceFile("x", url, "native", "", stamp=inside.stamp))
    except InputError:
        pass


# --------------------------------------------------------------------------------------------------
# Hostile


def made(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(name: str, type_: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = type_
    info.linkname = link
    return info


def test_nothing_leads_out_of_a_tar(tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(CONTENT.replace(b"}", b',"job":"secret"}'))
    members = {
        "/etc/rank_0.jsonl": (tarfile.REGTYPE, "", "quarantined", "absolute name"),
        "../rank_0.jsonl": (tarfile.REGTYPE, "", "quarantined", "leads out of the archive"),
        "a/../../rank_1.jsonl": (tarfile.REGTYPE, "", "quarantined", "leads out of the archive"),
        "C:/rank_2.jsonl": (tarfile.REGTYPE, "", "quarantined", "absolute name"),
        "link.jsonl": (tarfile.SYMTYPE, str(secret), "ignored", "symbolic link"),
        "hard.jsonl": (tarfile.LNKTYPE, str(secret), "ignored", "hard link"),
        "device": (tarfile.CHRTYPE, "", "ignored", "pipe or device"),
        "fifo": (tarfile.FIFOTYPE, "", "ignored", "pipe or device"),
        "strange": (b"Z", "", "ignored", "unknown type"),
    }
    data = made(
        (member("job/rank_0.jsonl"), CONTENT),
        *(
            (member(name, type_, link), CONTENT if type_ == tarfile.REGTYPE else b"")
            for name, (type_, link, _, _) in members.items()
        ),
    )
    top = tmp_path / "hostile"
    top.mkdir()
    (top / "x.tar").write_bytes(data)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    report = scan(str(top))
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before
    inputs = {r["path"]: r for r in report.inputs.to_dicts()}
    assert len(inputs) == 2 + len(members)
    assert inputs["x.tar/job/rank_0.jsonl"]["status"] == "read"
    for name, (_, _, status, words) in members.items():
        assert inputs[f"x.tar/{name}"]["status"] == status, name
        assert words in inputs[f"x.tar/{name}"]["reason"]
    assert "secret" not in report.jobs["job"].to_list()


def test_nothing_leads_out_of_a_zip(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("job/rank_0.jsonl", CONTENT)
        archive.writestr("../rank_0.jsonl", CONTENT)
        archive.writestr("/etc/rank_0.jsonl", CONTENT)
        archive.writestr("windows\\rank_0.jsonl", CONTENT)
        archive.writestr("windows\\..\\..\\rank_0.jsonl", CONTENT)
        link = zipfile.ZipInfo("link.jsonl")
        link.external_attr = (0o120777) << 16
        archive.writestr(link, "/etc/passwd")
    (tmp_path / "x.zip").write_bytes(out.getvalue())
    state = statuses(discover([str(tmp_path)]))
    assert state.pop("x.zip/job/rank_0.jsonl")[0] == "file"
    assert state.pop("x.zip/windows/rank_0.jsonl")[0] == "file"
    assert state.pop("x.zip")[0] == "read"
    assert state.pop("x.zip/link.jsonl") == ("ignored", "a symbolic link; not followed")
    assert len(state) == 3
    assert {s for s, _ in state.values()} == {"quarantined"}


def test_zip_members_that_cannot_be_read(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("encrypted/rank_0.jsonl", CONTENT)
        archive.writestr("method/rank_0.jsonl", CONTENT)
    data = bytearray(out.getvalue())
    at = data.index(b"PK\x01\x02")
    data[at + 8] |= 1
    at = data.index(b"PK\x01\x02", at + 4)
    data[at + 10 : at + 12] = struct.pack("<H", 93)
    (tmp_path / "x.zip").write_bytes(data)
    state = statuses(discover([str(tmp_path)]))
    assert "encrypted" in str(state["x.zip/encrypted/rank_0.jsonl"])
    assert "method 93" in str(state["x.zip/method/rank_0.jsonl"])


def test_of_members_of_one_name_the_last_counts(tmp_path: Path) -> None:
    other = CONTENT.replace(b'"rank":0', b'"rank":1')
    data = made(
        (member("rank_0.jsonl"), other), (member("./rank_0.jsonl"), other),
        (member("rank_0.jsonl"), CONTENT),
    )  # fmt: skip
    (tmp_path / "x.tar").write_bytes(data)
    found = discover([str(tmp_path)])
    (only,) = found.files
    assert read_bytes(only) == CONTENT
    assert [i.path for i in found.inputs] == [
        "x.tar", "x.tar/rank_0.jsonl (copy 1)", "x.tar/rank_0.jsonl (copy 2)",
    ]  # fmt: skip


def test_archives_in_archives(tmp_path: Path) -> None:
    data = made((member("rank_0.jsonl"), CONTENT))
    want = "rank_0.jsonl"
    for depth in range(4):
        if depth % 2:
            out = io.BytesIO()
            with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(f"in_{depth}", data)
            data = out.getvalue()
        else:
            data = gzip.compress(made((member(f"in_{depth}"), data)))
        want = f"in_{depth}/{want}"
        top = tmp_path / str(depth)
        top.mkdir()
        (top / "x").write_bytes(data)
        found = discover([str(top)])
        if depth < 2:
            (only,) = found.files
            assert only.path == f"x/{want}"
            assert read_bytes(only) == CONTENT
            assert read_tail(only.url, 5, only.stamp) == CONTENT[-5:]
            assert read_head(only.url, 5, only.stamp) == (CONTENT[:5], None)
        else:
            assert found.files == []
            deep = [i for i in found.inputs if i.status == "quarantined"]
            assert ["lies in 3 others" in str(i.reason) for i in deep] == [True]


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = gzip.compress(made((member("zeros"), b"\0" * (40 << 20))))
    path = tmp_path / "x.tgz"
    path.write_bytes(zeros)
    limits = Limits(free_bytes=1 << 20, max_ratio=10)
    monkeypatch.setattr(containers_spool, "_IN_MEMORY", 1 << 20)
    tracemalloc.start()
    with pytest.raises(InputError, match=r"max_ratio = 10.*DL2GPU_MAX_RATIO=100"):
        containers.contents(str(path), None, limits)
    containers.forget()
    assert len(containers.contents(str(path), None).members) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(8):
            archive.writestr(f"{i}", b"\0" * (8 << 20))
    (tmp_path / "x.zip").write_bytes(out.getvalue())
    with pytest.raises(InputError, match="max_ratio = 10"):
        containers.contents(str(tmp_path / "x.zip"), None, limits)
    containers.forget()
    with pytest.raises(InputError, match=r"more than 3 files.*DL2GPU_MAX_MEMBERS"):
        containers.contents(str(tmp_path / "x.zip"), None, Limits(max_members=3))


def test_zip_whose_members_overlap(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a", b"x" * 1000)
        archive.writestr("b", b"x" * 1000)
    data = bytearray(out.getvalue())
    at = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 4)
    data[at + 42 : at + 46] = struct.pack("<I", 0)  # both begin where the first does
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(InputError, match="overlap"):
        containers.contents(str(tmp_path / "x.zip"), None)


def test_zip_that_lies_about_a_size(tmp_path: Path) -> None:
    """What is read is never more than what the limits were held against."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"\0" * (30 << 20))
    data = bytearray(out.getvalue())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 100)
    (tmp_path / "x.zip").write_bytes(data)
    inside = containers.contents(str(tmp_path / "x.zip"), None)
    url = containers.member_url(str(tmp_path / "x.zip"), "a")
    got = containers.read_member(url, inside.stamp)
    assert got == b"\0" * 100
    assert "checksum" in str(cut_reason(got))
    assert read_head(url, 10, inside.stamp)[0] == b"\0" * 10


def header(name: bytes, size: bytes, type_: bytes = b"0") -> bytes:
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[124 : 124 + len(size)] = size
    block[156:157] = type_
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize("size", [b"\xff" * 12, b"\xff" * 4 + b"\0" * 8, b"\x80" + b"\xff" * 11])
def test_tar_with_an_absurd_size_ends(tmp_path: Path, size: bytes) -> None:
    """Backwards, in a circle, or beyond all that there is."""
    first = header(b"rank_0.jsonl", b"%011o\0" % len(CONTENT)) + CONTENT.ljust(512, b"\0")
    for type_ in (b"0", b"x", b"L", b"g"):
        second = first.replace(b"rank_0", b"rank_1", 1)
        data = first + header(b"b", size, type_) + second + b"\0" * 1024
        (tmp_path / "x.tar").write_bytes(data)
        containers.forget()
        inside = containers.contents(str(tmp_path / "x.tar"), None)
        assert inside.members[0].name == "rank_0.jsonl"
        assert len(inside.members) <= 3
        assert inside.loss is not None


def test_tar_with_a_name_of_megabytes(tmp_path: Path) -> None:
    size = 60 << 20
    first = header(b"rank_0.jsonl", b"%011o\0" % len(CONTENT)) + CONTENT.ljust(512, b"\0")
    data = first + header(b"././@LongLink", b"%011o\0" % size, b"L") + b"a" * size + first
    (tmp_path / "x.tgz").write_bytes(gzip.compress(data, 1))
    tracemalloc.start()
    inside = containers.contents(str(tmp_path / "x.tgz"), None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20
    assert [m.name for m in inside.members] == ["rank_0.jsonl"]
    assert "header of" in str(inside.loss)


def test_sparse_members_are_told(tmp_path: Path) -> None:
    data = header(b"rank_0.jsonl", b"%011o\0" % 512, b"S") + b"\0" * 1536
    (tmp_path / "x.tar").write_bytes(data)
    (own, one) = discover([str(tmp_path)]).inputs
    assert one.status == "quarantined"
    assert "sparse" in str(one.reason)
    assert own.status == "read"


# --------------------------------------------------------------------------------------------------
# Around


@pytest.mark.parametrize("name", ["model.pt", "x.npz", "plain"])
def test_files_of_other_programs_are_no_archives(tmp_path: Path, name: str) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        first = {"plain": "archive/data.pkl", "x.npz": "a.npy", "model.pt": "x/y"}[name]
        archive.writestr(first, b"x")
        archive.writestr("archive/version", b"x")
    (tmp_path / name).write_bytes(out.getvalue())
    (only,) = discover([str(tmp_path)]).inputs
    assert only.status == "ignored"


def test_archive_that_changes_between_listing_and_reading(jobs: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tar(jobs))
    files = discover([str(path)]).files
    kept = Journal(tmp_path / "parts")
    task = Task(tuple(files))
    result = Result([], [], [Input(f.path, "read") for f in files], [])
    kept.put(task, result.encode())
    assert kept.get(Task(tuple(discover([str(path)]).files))) == result.encode()
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert kept.get(Task(tuple(discover([str(path)]).files))) is None
    for forget in (False, True):  # open already, or opened by another process
        if forget:
            containers.forget()
        with pytest.raises(InputError, match="changed during the scan"):
            read_bytes(files[0])
    with pytest.raises(InputError, match="name the archive to scan"):
        discover([files[0].url])


def test_limits_of_the_command_line(jobs: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    path = tmp_path / "x.tgz"
    path.write_bytes(gzip.compress(made((member("zeros"), b"\0" * (70 << 20)))))
    command = [sys.executable, "-m", "dl2gpu", "scan", str(path), "--format", "json", "-q"]

    def reasons(*options: str) -> list[str]:
        done = subprocess.run([*command, *options], capture_output=True, check=False)
        return [i["reason"] or "" for i in json.loads(done.stdout)["inputs"]]

    assert any("max_ratio = 5" in r for r in reasons("--max-ratio", "5"))
    assert any("max_file_bytes = 1048576" in r for r in reasons("--max-file-size", "1MiB"))
    assert any("an archive of 1 file" in r for r in reasons("--max-ratio", "2000"))
    done = subprocess.run(
        [*command, "--max-file-size", "lots"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "expected a size" in done.stderr


REAL = (
    "kineto/param_dlrm_8ranks.tar.gz", "execution_trace/param_dlrm_8ranks_et.tar.gz",
    "execution_trace/chakra_1.0.2.tgz", "chakra/chakra_json_trace.tar.gz",
    "chakra/chakra_feeder_tests_trace.tar.gz",
)  # fmt: skip


def test_real_archives(shared: Path) -> None:
    """Of other people's archives, every member is accounted for."""
    paths = [p for p in (shared / "data" / name for name in REAL) if p.exists()]
    if not paths:
        pytest.skip("no archives in the labelled data")
    for path in paths:
        with tarfile.open(path) as archive:
            want = [m.name.removeprefix("./") for m in archive.getmembers() if not m.isdir()]
        state = statuses(discover([str(path)]))
        assert state.pop(path.name)[0] == "read"
        inner = {n for n in state if n.removeprefix(f"{path.name}/") in want}
        assert len(inner) == len(want)
        assert not [s for s in state.values() if s[0] == "quarantined"]
