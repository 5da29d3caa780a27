"""Opening files: compression by content, limits, and what must not be opened."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dl2gpu.trace.files import (
    CutBytes,
    Limits,
    compress,
    cut_reason,
    read_bytes,
    read_head,
    unwrap,
    whole_file,
)
from dl2gpu.trace.inputs import InputError, TraceFile

Pack = Callable[[bytes], bytes]
PACKERS: dict[str, Pack] = {
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}
packers = pytest.mark.parametrize("pack", PACKERS.values(), ids=list(PACKERS))
NOISE = random.Random(0).randbytes(300_000)


def at(path: Path | str) -> TraceFile:
    return TraceFile(path="p", url=str(path), format="native", folder="")


@packers
def test_compression_is_seen_by_content(pack: Pack, tmp_path: Path) -> None:
    file = tmp_path / "named.json"
    file.write_bytes(pack(NOISE))
    assert read_bytes(at(file)) == NOISE
    head, name = read_head(str(file), 4096)
    assert head == NOISE[:4096]
    assert PACKERS[str(name)] is pack


@packers
def test_several_streams_in_a_row(pack: Pack) -> None:
    assert unwrap(pack(b"first ") + pack(b"second") + b"\0" * 10) == b"first second"


@packers
def test_one_layer_only(pack: Pack) -> None:
    inner = gzip.compress(b"x")
    assert unwrap(pack(inner)) == inner


def test_plain_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "x.gz"
    file.write_bytes(b"plain")
    assert read_bytes(at(file)) == b"plain"
    assert cut_reason(read_bytes(at(file))) is None
    assert read_head(str(file), 3) == (b"pla", None)
    file.write_bytes(b"")
    assert read_bytes(at(file)) == b""


@packers
def test_cut_stream_gives_what_inflates(pack: Pack) -> None:
    content = random.Random(1).randbytes(2_500_000)
    data = unwrap(pack(content)[:1_500_000])
    assert isinstance(data, CutBytes)
    assert 800_000 < len(data) <= 1_500_000
    assert content.startswith(data)
    assert "ends too early" in str(cut_reason(data))


@packers
def test_damaged_stream(pack: Pack) -> None:
    whole = bytearray(pack(NOISE * 5))
    middle = len(whole) // 2
    whole[middle : middle + 64] = b"\xff" * 64
    data = unwrap(bytes(whole))
    reason = cut_reason(data)
    assert reason is not None
    assert "damaged" in reason or "ends too early" in reason


def test_other_bytes_behind_the_stream() -> None:
    data = unwrap(gzip.compress(b"good") + b"trailing garbage")
    assert data == b"good"
    assert "followed by other bytes" in str(cut_reason(data))


@given(st.sampled_from(sorted(PACKERS)), st.binary(max_size=300), st.data())
def test_any_damage_is_an_answer(name: str, content: bytes, data: st.DataObject) -> None:
    packed = bytearray(PACKERS[name](content))
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, len(packed)))
        packed[i : i + 1] = data.draw(st.binary(max_size=2))
    unwrap(bytes(packed))


@packers
def test_bomb(pack: Pack) -> None:
    packed = pack(b"\0" * (40 << 20))
    assert len(packed) < 70_000
    limits = Limits(free_bytes=1 << 20, max_ratio=10)
    tracemalloc.start()
    with pytest.raises(InputError, match=r"max_ratio = 10.*DL2GPU_MAX_RATIO=100"):
        unwrap(packed, limits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20
    with pytest.raises(InputError, match="max_file_bytes = 5000000"):
        unwrap(packed, Limits(max_file_bytes=5_000_000))
    assert len(unwrap(packed, Limits(max_ratio=10**6))) == 40 << 20


def test_small_file_takes_little_by_default() -> None:
    packed = zstandard.ZstdCompressor().compress(b"\0" * (200 << 20))
    assert len(packed) < 64 << 10
    with pytest.raises(InputError, match="limit"):
        unwrap(packed)


def test_file_above_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"x" * 100)
    with pytest.raises(InputError, match=r"100 bytes; the limit is 99.*DL2GPU_MAX_FILE_BYTES=100"):
        read_bytes(at(file), Limits(max_file_bytes=99))
    assert len(read_bytes(at(file), Limits(max_file_bytes=100))) == 100


def test_limits_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DL2GPU_MAX_RATIO", "7")
    assert Limits.from_environment() == Limits(max_ratio=7)
    monkeypatch.setenv("DL2GPU_MAX_RATIO", "lots")
    with pytest.raises(InputError, match="DL2GPU_MAX_RATIO: expected a whole number"):
        Limits.from_environment()


def test_only_regular_files(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero"), tmp_path):
        with pytest.raises(InputError, match="regular file"):
            read_bytes(at(path))
        with pytest.raises(InputError, match="regular file"):
            read_head(str(path), 10)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="cannot be opened"):
        read_bytes(at(tmp_path / "link"))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_bytes(at(tmp_path / "none"))
    with pytest.raises(InputError, match="cannot be read"):
        read_bytes(at("memory://none/there"))
    with pytest.raises(InputError):
        read_bytes(at("nosuchscheme://x"))


def test_urls(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/t-files/x", gzip.compress(b"remote" * 1000))
    try:
        assert read_bytes(at("memory://t-files/x")) == b"remote" * 1000
        assert read_head("memory://t-files/x", 6) == (b"remote", "gzip")
        with pytest.raises(InputError, match="the limit is 5"):
            read_bytes(at("memory://t-files/x"), Limits(max_file_bytes=5))
    finally:
        fs.rm("/t-files", recursive=True)
    (tmp_path / "y").write_bytes(b"local")
    assert read_bytes(at(f"file://{tmp_path}/y")) == b"local"


@pytest.mark.parametrize("name", ["a", "a.gz", "a.zst"])
def test_compress(name: str) -> None:
    packed = compress(b"x" * 1000, name)
    assert unwrap(packed) == b"x" * 1000
    assert (len(packed) < 100) == (name != "a")
    assert compress(b"x" * 1000, name) == packed


def test_whole_file_or_none(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_text("before")

    def die() -> None:
        with whole_file(target) as temporary:
            Path(temporary).write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        die()
    assert target.read_text() == "before"
    with whole_file(target) as temporary:
        Path(temporary).write_text("after")
        assert target.read_text() == "before"
    assert target.read_text() == "after"
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
