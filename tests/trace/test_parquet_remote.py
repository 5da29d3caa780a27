"""Large Parquet files in a store: their parts are the whole, and each asks for its share only."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from in_parts import read_in_parts, same
from loopback import FaultyProxy, s3_environment, s3_server

from dl2gpu.suites import fleet
from dl2gpu.trace import parquet_remote, parts, remote
from dl2gpu.trace.discover import discover
from dl2gpu.trace.inputs import InputError, Stamp, TraceFile
from dl2gpu.trace.readers import read_files

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(m) is None for m in ("s3fs", "moto", "flask", "pyarrow")),
    reason="needs the extra test: s3fs, pyarrow and moto's server",
)
BUCKET = "fleet"
SIZE = 4 << 20
"""Of a shard; some 7,000 events."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of some sixty jobs, in row groups of 5,000 events."""
    out = tmp_path_factory.mktemp("parquet") / BUCKET
    fleet.write(out, 60, 60_000, 3, ranks=(8, 32), file_events=1_000_000)
    (main,) = out.glob("fleet_?????.parquet")
    metadata = {k: v for k, v in pl.read_parquet_metadata(main).items() if k != "ARROW:schema"}
    pl.read_parquet(main).write_parquet(main, metadata=metadata, row_group_size=5000)
    return out


@pytest.fixture(scope="module")
def port(corpus: Path) -> Iterator[int]:
    with s3_server(corpus, BUCKET) as port:
        yield port


@pytest.fixture
def s3(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    import s3fs

    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.002)
    monkeypatch.setattr(parquet_remote, "_NEAR", 1000)  # the file is small
    monkeypatch.setattr(parquet_remote, "_FIRST_LOOK", 1000)
    remote._health._given_up.clear()
    with FaultyProxy(port).running() as proxy:
        for name, value in s3_environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        yield proxy
    s3fs.S3FileSystem.clear_instance_cache()
    remote.forget()


@pytest.mark.parametrize("faulty", [False, True])
def test_parts_are_the_whole_and_take_its_bytes_once(
    corpus: Path, s3: FaultyProxy, faulty: bool
) -> None:
    whole, _ = read_files(discover([str(corpus)]).files)
    files = discover([f"s3://{BUCKET}"]).files
    size = sum(p.stat().st_size for p in corpus.iterdir())
    if faulty:
        # of three requests in a row one goes wrong: several are under way at a time
        s3.fault = lambda _m, _p, before: (
            ("500", "cut", "reset", "short")[before // 3 % 4] if before % 3 == 0 else None
        )
    s3.sent = 0
    trace, inputs, many = read_in_parts(files, SIZE)
    assert many >= 8
    same(whole, trace)
    assert [i.status for i in inputs] == ["read"]
    if not faulty:  # side tables are looked at by each part; the main file is not
        sides = sum(p.stat().st_size for p in corpus.glob("fleet_?????.*.parquet"))
        footer = len(parquet_remote.footer(files[0]))
        # a part of up to 7,000 rows lies in three groups at most
        assert s3.sent < 2.5 * (size - sides) + (many + 3) * (sides + footer)


def test_a_part_has_no_more_than_its_row_groups(corpus: Path, s3: FaultyProxy) -> None:
    del s3
    (file,) = discover([f"s3://{BUCKET}"]).files
    first, *_, last = parts.parts([file], SIZE)
    local = (corpus / file.path).read_bytes()
    assert first.part is not None
    assert last.part is not None
    for part in (first.part, last.part):
        found = parquet_remote.sparse(file, ["rank", "op"], part.rows)
        assert found is not None
        with found:
            content = found.read()
        assert len(content) == len(local)
        assert content.count(0) > len(local) * 0.8
        want = pl.read_parquet(io.BytesIO(local), columns=["rank", "op"])
        got = pl.scan_parquet(io.BytesIO(content)).select("rank", "op")
        length = part.rows[1] - part.rows[0]
        assert got.slice(part.rows[0], length).collect().equals(want.slice(part.rows[0], length))


def test_what_changed_since_it_was_listed_is_no_part_of_it(s3: FaultyProxy) -> None:
    del s3
    (file,) = discover([f"s3://{BUCKET}"]).files
    assert file.stamp is not None
    other = TraceFile(
        file.path, file.url, file.format, file.folder, stamp=Stamp(file.stamp.size, "etag=0")
    )
    with pytest.raises(InputError, match="changed during the scan"):
        parquet_remote.sparse(other, ["rank"], None)


def test_hostile_footers(corpus: Path, s3: FaultyProxy) -> None:
    """A column that would lie behind the end, and a footer of nonsense."""
    del s3, corpus
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.table({"rank": list(range(1000))}), out)
    data = out.getvalue()
    length = int.from_bytes(data[-8:-4], "little")
    tail = b"PAR1" + data[-length - 8 :]
    assert list(parquet_remote._extents(tail, {"rank"}, None, len(data) - length - 8))
    with pytest.raises(InputError, match="lies outside"):
        list(parquet_remote._extents(tail, {"rank"}, None, 100))
    with pytest.raises(InputError, match="not readable as Parquet"):
        list(parquet_remote._extents(b"PAR1" + bytes(50) + data[-8:], {"rank"}, None, 100))


def test_whole_objects_where_pyarrow_is_missing(
    corpus: Path, s3: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name)
    )
    whole, _ = read_files(discover([str(corpus)]).files)
    s3.sent = 0
    trace, _, many = read_in_parts(discover([f"s3://{BUCKET}"]).files, SIZE)
    same(whole, trace)
    assert s3.sent > many * max(p.stat().st_size for p in corpus.iterdir())
