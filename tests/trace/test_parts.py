"""Parquet files in parts: the same events as of the whole, whatever the size of a part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from in_parts import read_in_parts, same

from dl2gpu.suites import fleet
from dl2gpu.trace import native_parquet, parts
from dl2gpu.trace.discover import discover
from dl2gpu.trace.inputs import Input, TraceFile, joined
from dl2gpu.trace.readers import read_files


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of some twenty jobs each."""
    out = tmp_path_factory.mktemp("corpus") / "x"
    fleet.write(out, 60, 40_000, 3, ranks=(8, 32), file_events=15_000)
    return out


def files_of(root: Path) -> list[TraceFile]:
    return discover([str(root)]).files


@pytest.mark.parametrize("size", [1, 1 << 20, 6 << 20, 1 << 30])
def test_parts_are_the_whole(corpus: Path, size: int) -> None:
    files = files_of(corpus)
    trace, inputs = read_files(files)
    cut, cut_inputs, many = read_in_parts(files, size)
    assert trace.jobs.height == 60
    assert many == {1: 60, 1 << 30: 1}.get(size, many)
    same(trace, cut)
    assert [(i.path, i.status, i.events) for i in cut_inputs] == [
        (i.path, i.status, i.events) for i in inputs
    ]


def test_weights_and_sizes(corpus: Path) -> None:
    files = files_of(corpus)
    found = parts.parts(files, 2 << 20)
    assert sum(f.size for f in found) == sum(f.size for f in files)
    rows = pl.scan_parquet(corpus / "fleet_*[0-9].parquet").select(pl.len()).collect().item()
    assert sum(f.weight or 0 for f in found) == rows * parts.EVENT_BYTES
    assert all(f.part is not None for f in found)
    assert all((f.weight or 0) <= 2 << 20 or f.part.jobs[1] - f.part.jobs[0] == 1 for f in found)  # type: ignore[union-attr]
    for shard in parts.shards(files, 2 << 20):
        assert len(shard) == 1 or sum(f.weight or 0 for f in shard) <= 2 << 20


def test_parts_are_cut_again(corpus: Path) -> None:
    files = files_of(corpus)
    once = parts.parts(files, 3 << 20)
    assert len(files) < len(once) < 60
    assert parts.parts(once, 3 << 20) == once
    twice, direct = parts.parts(once, 0), parts.parts(files, 0)
    assert [(f.path, f.part, f.weight) for f in twice] == [
        (f.path, f.part, f.weight) for f in direct
    ]
    assert len(twice) == 60
    assert sum(f.size for f in twice) == sum(f.size for f in files)


def test_what_is_wrong_stays_whole_and_is_told(corpus: Path, tmp_path: Path) -> None:
    for file in corpus.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "fleet_00001.comms.parquet").unlink()
    table = pl.read_parquet(tmp_path / "fleet_00002.parquet")
    table.reverse().write_parquet(
        tmp_path / "fleet_00002.parquet", metadata={"dl2gpu.trace.version": "1"}
    )
    trace, inputs, _ = read_in_parts(files_of(tmp_path), 1 << 20)
    want = read_files(files_of(tmp_path))
    same(want[0], trace)
    assert [(i.path, i.status, i.reason) for i in inputs] == [
        (i.path, i.status, i.reason) for i in want[1]
    ]
    assert [i.status for i in inputs] == ["read", "quarantined", "read"]


def test_a_wrong_part_costs_no_other(corpus: Path, tmp_path: Path) -> None:
    for file in corpus.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    main = tmp_path / "fleet_00000.parquet"
    table = pl.read_parquet(main)
    foreign = table["comm"].max()
    table.with_columns(
        comm=pl.when((pl.col("job") == 0) & pl.col("comm").is_not_null())
        .then(foreign)
        .otherwise("comm")
    ).write_parquet(main, metadata={"dl2gpu.trace.version": "1"})
    files = [f for f in files_of(tmp_path) if f.path == main.name]
    trace, inputs, many = read_in_parts(files, 1)
    assert many == table["job"].n_unique()
    assert [(i.status, i.path) for i in inputs] == [("partial", main.name)]
    assert "column comm: expected" in (inputs[0].reason or "")
    assert trace.jobs.height == many - 1
    assert inputs[0].events == trace.events.height


def test_communicators_in_any_order(corpus: Path, tmp_path: Path) -> None:
    """Numbers of communicators that do not follow the jobs."""
    trace, _ = read_files(files_of(corpus)[:1])
    n = trace.comms.height
    turned = {
        name: frame.with_columns((n - 1 - pl.col(c)).alias(c) for c in columns)
        for name, frame, columns in (
            ("events", trace.events, ("comm",)), ("comms", trace.comms, ("comm",))
        )
    }  # fmt: skip
    other = replace(trace, **turned)
    native_parquet.write(other, tmp_path / "x.parquet")
    cut, _, many = read_in_parts(files_of(tmp_path), 1)
    assert many > 10
    same(read_files(files_of(tmp_path))[0], cut)


def test_jobs_without_events_are_kept(corpus: Path, tmp_path: Path) -> None:
    trace, _ = read_files(files_of(corpus)[:1])
    last = trace.jobs.height - 1
    native_parquet.write(
        replace(trace, events=trace.events.filter(~pl.col("job").is_in([0, 5, last]))),
        tmp_path / "x.parquet",
    )
    cut, _, many = read_in_parts(files_of(tmp_path), 1)
    assert many == last - 2
    same(read_files(files_of(tmp_path))[0], cut)


def test_folders_do_not_depend_on_shards(tmp_path: Path) -> None:
    """The same jobs in two files stay apart, also when no shard holds both."""
    for name in ("a", "b"):
        fleet.write(tmp_path / name, 4, 1000, 1, ranks=(8, 8))
    want, _ = read_files(files_of(tmp_path))
    for size in (1, 1 << 30):
        cut, _, _ = read_in_parts(files_of(tmp_path), size)
        assert sorted(cut.jobs["folder"]) == sorted(want.jobs["folder"])
        assert cut.jobs["folder"].n_unique() == 8


def test_other_formats_keep_their_jobs_together(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}.jsonl").write_text(
            json.dumps({"kind": "header", "format": "dl2gpu.trace", "version": 1, "rank": rank})
        )
    assert [len(s) for s in parts.shards(files_of(tmp_path), 1)] == [3]


def test_files_of_a_store(corpus: Path) -> None:
    """What fits is weighed by its footer alone; what does not is cut as a local file is."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.put(str(corpus), "/parts", recursive=True)
    try:
        files = discover(["memory://parts"]).files
        local = files_of(corpus)
        for size in (1 << 30, 2 << 20):
            got, want = parts.parts(files, size), parts.parts(local, size)
            assert [(f.path, f.part, f.weight) for f in got] == [
                (f.path, f.part, f.weight) for f in want
            ]
        same(read_files(local)[0], read_in_parts(files, 2 << 20)[0])
    finally:
        store.rm("/parts", recursive=True)


def test_joined_inputs() -> None:
    made = [
        Input("x", "read", None, "parquet", "a", None, 3),
        Input("y", "read", None, "parquet", "c", None, 1),
        Input("x", "quarantined", "no", "parquet", "x", None, 0),
        Input("x", "quarantined", "no", "parquet", "x", None, 0),
    ]
    assert joined(made) == [
        Input("x", "partial", "no", "parquet", None, None, 3),
        Input("y", "read", None, "parquet", "c", None, 1),
    ]
