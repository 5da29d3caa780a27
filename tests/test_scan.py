"""The scan as a whole: every file once, every job apart, and the same report in whatever shards."""

from __future__ import annotations

import gzip
import importlib
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import fr_writer
import pytest

from dl2gpu import cluster
from dl2gpu.report.model import Report
from dl2gpu.scan import Step, scan
from dl2gpu.trace.convert import convert
from dl2gpu.trace.inputs import InputError
from dl2gpu.trace.parts import shards

SCAN = importlib.import_module("dl2gpu.scan")  # the module, not the function of the same name


def native(
    folder: Path, rank: int, ops: list[dict[str, Any]], *, job: str | None = None, **header: Any
) -> Path:
    """A file of one rank; the communicator ``w`` is that of ranks 0 and 1."""
    head = {
        "kind": "header", "format": "dl2gpu.trace", "version": 1, "rank": rank, "world_size": 2,
        "backend": "nccl",
    }  # fmt: skip
    if job is not None:
        head["job"] = job
    lines = [
        head | header,
        {"kind": "comm", "id": "w", "ranks": [0, 1]},
        *({"kind": "op", "seq": k, "comm": "w"} | o for k, o in enumerate(ops)),
        {"kind": "end", "exit": "finished"},
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{rank}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


FINE = [{"op": "all_reduce", "count": 4}]
STUCK = [
    [{"op": "recv", "peer": 1 - r}, {"op": "send", "peer": 1 - r}] for r in range(2)
]  # fmt: skip


def fine(folder: Path, **header: Any) -> None:
    for rank in range(2):
        native(folder, rank, FINE, **header)


def stuck(folder: Path, **header: Any) -> None:
    for rank in range(2):
        native(folder, rank, STUCK[rank], **header)


def bytes_of(report: Report) -> bytes:
    """The report as saved, but for the time it took."""
    content = json.loads(report.to_json())
    del content["summary"]["elapsed_s"]
    return json.dumps(content, sort_keys=True).encode()


def verdicts(report: Report) -> dict[str, str]:
    return dict(report.jobs.select("job", "verdict").iter_rows())


def accounted(report: Report, root: Path) -> None:
    """Each file below ``root`` is in the inputs, once."""
    files = sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())
    assert report.inputs["path"].to_list() == files
    assert report.summary["files"] == len(files)
    assert set(report.inputs["status"]) <= {"read", "partial", "quarantined", "ignored"}
    silent = report.inputs.filter(report.inputs["status"] != "read")["reason"]
    assert silent.null_count() == 0


# --------------------------------------------------------------------------------------------------
# Which jobs


def test_jobs_of_one_name_stay_apart(tmp_path: Path) -> None:
    """Each folder has one stuck job of the same name, and its other rank is not the other's."""
    stuck(tmp_path / "monday", job="train")
    fine(tmp_path / "tuesday", job="train")
    fine(tmp_path / "other", job="alone")
    report = scan(str(tmp_path))
    assert verdicts(report) == {
        "train (monday)": "cycle", "train (tuesday)": "healthy", "alone": "healthy",
    }  # fmt: skip
    assert report.findings["job"].to_list() == ["train (monday)"]
    assert report.summary["jobs"] == 3


def test_ranks_of_two_folders_are_not_one_job(tmp_path: Path) -> None:
    native(tmp_path / "a", 0, FINE, job="train")
    native(tmp_path / "b", 1, FINE, job="train")
    report = scan(str(tmp_path))
    assert set(verdicts(report)) == {"train (a)", "train (b)"}
    assert report.jobs["ranks_present"].to_list() == [[0], [1]]
    assert report.jobs["ranks_missing"].to_list() == [[1], [0]]
    assert "healthy" not in verdicts(report).values()


def test_attempts_of_one_job(tmp_path: Path) -> None:
    stuck(tmp_path / "attempt_0", job="train")
    fine(tmp_path / "attempt_1", job="train")
    report = scan(str(tmp_path))
    rows = report.jobs.select("job", "attempt", "verdict").rows()
    assert rows == [("train", 0, "cycle"), ("train", 1, "healthy")]
    assert report.findings.select("job", "attempt").rows() == [("train", 0)]


def test_job_without_a_name_is_its_folder(tmp_path: Path) -> None:
    fine(tmp_path / "runs" / "one")
    fine(tmp_path / "runs" / "two")
    assert verdicts(scan(str(tmp_path))) == {"runs/one": "healthy", "runs/two": "healthy"}


@pytest.mark.parametrize("wanted", ["train", "deep/folder"])
def test_select_by_name_or_folder(tmp_path: Path, wanted: str) -> None:
    stuck(tmp_path / "deep" / "folder", job="train")
    fine(tmp_path / "another", job="other")
    report = scan(str(tmp_path), select=wanted)
    assert verdicts(report) == {"train": "cycle"}
    assert set(report.findings["job"]) == {"train"}
    everything = scan(str(tmp_path))
    assert report.findings.drop("id").equals(everything.findings.drop("id"))


def test_select_what_is_not_there(tmp_path: Path) -> None:
    fine(tmp_path / "a", job="train")
    report = scan(str(tmp_path), select="nothing")
    assert report.jobs.height == report.findings.height == 0
    assert report.summary["by_kind"] == {}


def test_job_pattern_over_folders_and_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pattern makes one job of files in two folders; a shard does not cut it."""
    native(tmp_path / "host0", 0, STUCK[0])
    native(tmp_path / "host1", 1, STUCK[1])
    monkeypatch.setattr(SCAN, "SHARD_BYTES", 1)
    monkeypatch.setattr(cluster, "_LEAST_BYTES", 1)
    report = scan(str(tmp_path), job_pattern=r"(?P<job>host)\d")
    assert verdicts(report) == {"host": "cycle"}
    assert report.jobs["ranks_present"].to_list() == [[0, 1]]


def test_no_trace_at_all(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    report = scan(str(tmp_path))
    assert report.jobs.height == 0
    assert report.inputs["status"].to_list() == ["ignored"]
    assert (report.summary["jobs"], report.summary["events"], report.summary["ranks"]) == (0, 0, 0)
    with pytest.raises(InputError):
        scan(str(tmp_path / "nowhere"))


# --------------------------------------------------------------------------------------------------
# The same report


def test_twice(demo: Path) -> None:
    first, second = scan(str(demo)), scan(str(demo))
    assert bytes_of(first) == bytes_of(second)
    for table in ("findings", "jobs", "inputs"):
        assert getattr(first, table).equals(getattr(second, table))


@pytest.mark.parametrize("size", [1, 20_000, 60_000])
def test_shards(demo: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scan(str(demo))
    monkeypatch.setattr(SCAN, "SHARD_BYTES", size)
    monkeypatch.setattr(cluster, "_LEAST_BYTES", 1)
    assert len(list(shards(SCAN.discover([str(demo)]).files, size))) > 2
    assert bytes_of(scan(str(demo))) == bytes_of(whole)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers(demo: Path, workers: int) -> None:
    assert bytes_of(scan(str(demo), workers=workers)) == bytes_of(scan(str(demo)))


def test_labelled_jobs_in_shards(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(shared / "cases")
    whole = scan(folder)
    monkeypatch.setattr(SCAN, "SHARD_BYTES", 200_000)
    monkeypatch.setattr(cluster, "_LEAST_BYTES", 1)
    assert bytes_of(scan(folder)) == bytes_of(whole)


def test_order_of_paths(demo: Path) -> None:
    paths = [str(demo / name) for name in ("two-groups-inverted", "uneven-batches", "killed-rank")]
    assert bytes_of(scan(paths)) == bytes_of(scan(paths[::-1]))


def test_a_job_alone_is_as_among_others(demo: Path) -> None:
    together = scan(str(demo))
    for name in ("two-groups-inverted", "mesh-2d-skipped-all-reduce", "dump-cut-short"):
        alone = scan(str(demo / name))
        job = together.jobs.filter(together.jobs["folder"] == name).row(0, named=True)
        assert alone.jobs["verdict"].to_list() == [job["verdict"]]
        mine = together.findings.filter(together.findings["job"] == job["job"])
        for column in ("kind", "culprits", "victims", "fingerprint", "hangs_at", "details"):
            assert alone.findings[column].to_list() == mine[column].to_list()


def test_findings_are_numbered_in_order(demo: Path) -> None:
    report = scan(str(demo))
    ids = report.findings["id"].to_list()
    assert ids == [f"f{k}" for k in range(1, len(ids) + 1)]
    named = [i for row in report.jobs["findings"] for i in row]
    assert sorted(named) == sorted(ids)
    assert report.findings["job"].to_list() == sorted(report.findings["job"])
    by_kind = Counter(report.jobs["verdict"])
    assert report.summary["by_kind"] == by_kind
    assert report.summary["ranks"] == report.jobs["ranks_present"].list.len().sum()
    assert report.summary["events"] == report.jobs["events"].sum()


# --------------------------------------------------------------------------------------------------
# What lies in a bucket


def recorder(folder: Path, *, as_json: bool) -> None:
    folder.mkdir(parents=True)
    for rank in range(2):
        entries = [
            fr_writer.entry(k, cseq=k + 1, state="completed" if k < 2 else "scheduled")
            for k in range(3 if rank == 0 else 2)
        ]
        content = fr_writer.document(entries, groups={"0": ("default_pg", [0, 1])})
        data = fr_writer.json_form(content) if as_json else fr_writer.dumps(content)
        (folder / f"nccl_trace_rank_{rank}{'.json' if as_json else ''}").write_bytes(data)


def test_all_formats_and_junk_in_one_bucket(
    tmp_path: Path, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck(tmp_path / "native", job="n")
    fine(tmp_path / "zipped", job="z")
    for path in list((tmp_path / "zipped").iterdir()):
        path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    convert(str(tmp_path / "native"), str(tmp_path / "columns" / "trace.parquet"))
    recorder(tmp_path / "pickles", as_json=False)
    recorder(tmp_path / "json", as_json=True)
    junk = tmp_path / "junk"
    junk.mkdir()
    rng = random.Random(1)
    (junk / "empty").touch()
    (junk / "empty.jsonl").touch()
    (junk / "noise.pkl").write_bytes(rng.randbytes(5000))
    (junk / "noise.parquet").write_bytes(b"PAR1" + rng.randbytes(5000) + b"PAR1")
    (junk / "noise.jsonl").write_text('{"kind":"header"}\n{"kind":"op"}\nnot json\n{"kind":"op"}\n')
    shutil.copy(demo / "uploads" / "nccl_trace_rank_0", junk / "evil")
    (junk / "README.md").write_text("# notes")
    (junk / "list.json").write_text("[1, 2, 3]")
    half = (tmp_path / "pickles" / "nccl_trace_rank_0").read_bytes()
    (junk / "nccl_trace_rank_0").write_bytes(half[: len(half) // 2])

    report = scan(str(tmp_path))
    accounted(report, tmp_path)
    # a table keeps the folder that its jobs came from: that job is here twice
    assert {k: v for k, v in verdicts(report).items() if k[0] == "n"} == {
        "n #1": "cycle", "n #2": "cycle",
    }  # fmt: skip
    assert report.findings.filter(report.findings["kind"] == "cycle")["job"].to_list() == [
        "n #1", "n #2",
    ]  # fmt: skip
    kinds = dict(report.jobs.select("folder", "verdict").iter_rows())
    assert kinds["zipped"] == "healthy"
    assert kinds["pickles"] == kinds["json"]
    status = dict(report.inputs.select("path", "status").iter_rows())
    assert {s for p, s in status.items() if not p.startswith("junk/")} == {"read"}
    assert status["junk/evil"] == "quarantined"
    assert status["junk/README.md"] == "ignored"

    monkeypatch.setattr(SCAN, "SHARD_BYTES", 1)
    monkeypatch.setattr(cluster, "_LEAST_BYTES", 1)
    assert bytes_of(scan(str(tmp_path))) == bytes_of(report)


def test_a_damaged_file_takes_no_other_job_with_it(tmp_path: Path, demo: Path) -> None:
    before = verdicts(scan(str(demo)))
    root = tmp_path / "bucket"
    shutil.copytree(demo, root)
    stuck(root / "damaged", job="damaged")
    path = root / "damaged" / "rank_1.jsonl"
    path.write_text(path.read_text().replace('"seq": 1', '"seq": "one"'))
    report = scan(str(root))
    accounted(report, root)
    after = verdicts(report)
    assert after.pop("damaged") not in ("healthy", "cycle")
    assert after == before


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    """A copy: one of them is used, and the report says which is not."""
    fine(tmp_path / "a")
    shutil.copy(tmp_path / "a" / "rank_0.jsonl", tmp_path / "a" / "copy.jsonl")
    report = scan(str(tmp_path))
    accounted(report, tmp_path)
    assert Counter(report.inputs["status"]) == {"read": 2, "ignored": 1}
    assert verdicts(report) == {"a": "healthy"}


# --------------------------------------------------------------------------------------------------
# Progress


def test_progress(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCAN, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(cluster, "_LEAST_BYTES", 1)
    seen: list[Step] = []
    report = scan(str(demo), progress=seen.append)
    assert len(seen) > 3
    assert seen[0] == Step(0, seen[-1].total, 0, seen[-1].all_files)
    assert [s.done for s in seen] == sorted(s.done for s in seen)
    last = seen[-1]
    assert last.done == last.total == report.summary["bytes_read"]
    assert last.files == last.all_files
    assert (last.jobs, last.events) == (report.summary["jobs"], report.summary["events"])
    assert last.findings == report.findings.height
