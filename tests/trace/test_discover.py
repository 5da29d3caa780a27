"""Discovery: formats by content, junk with a reason, jobs from folders, links that lead away."""

from __future__ import annotations

import bz2
import gzip
import os
import pickle
import random
import time
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pytest
import zstandard

from dl2gpu.trace.discover import LISTING, Discovery, discover, listing
from dl2gpu.trace.files import read_bytes
from dl2gpu.trace.inputs import Input, InputError, TraceFile
from dl2gpu.trace.readers import READERS
from dl2gpu.trace.sniff import classify

NATIVE = b'{"kind":"header","format":"dl2gpu.trace","version":1,"job":"j","rank":0}\n'
LOG = b"[rank3]: torch.distributed.DistBackendError: NCCL error\n"
DUMP = pickle.dumps({"version": "2.9", "entries": [], "pg_config": {}}, 2)


def put(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def formats(found: Discovery) -> dict[str, str]:
    return {f.path: f.format for f in found.files}


def reasons(found: Discovery) -> dict[str, tuple[str, str | None]]:
    return {i.path: (i.status, i.reason) for i in found.inputs}


def folders(found: Discovery) -> dict[str, tuple[str, int | None]]:
    return {f.path: (f.folder, f.attempt) for f in found.files}


# --------------------------------------------------------------------------------------------------
# Content

CONTENT: dict[str, tuple[bytes, str | None]] = {
    "native": (NATIVE, "native"),
    "native with spaces": (b'\n  {"format" : "dl2gpu.trace", "kind" : "header"}\n', "native"),
    "native without header": (b'{"kind":"op","seq":0}\n', "native"),
    "native, long first line": (b'{"kind":"comm","ranks":[' + b"7," * 9000, "native"),
    "native, BOM": (b"\xef\xbb\xbf" + NATIVE, "native"),
    "native, UTF-16": (NATIVE.decode().encode("utf-16"), "native"),
    "pickle 2": (DUMP, "flight_recorder"),
    "pickle 4": (pickle.dumps({"entries": [], "version": "2.9"}, 4), "flight_recorder"),
    "pickle 5": (pickle.dumps({"pg_status": {}, "version": "2.9"}, 5), "flight_recorder"),
    "pickle, list": (pickle.dumps([{"profiling_name": "nccl:send"}], 2), "flight_recorder"),
    "pickle of something else": (pickle.dumps({"weights": [1, 2]}, 4), None),
    "FR JSON": (b'{"entries":[{"pg_id":0}],"pg_config":{},"version":"2.9"}', "flight_recorder"),
    "FR JSON without entries": (b'{"nccl_version":"2.27","version":"2.9"}', "flight_recorder"),
    "FR JSON, gloo": (b'{"comm_lib_version":"","pg_config":{"":{"desc":""', "flight_recorder"),
    "FR JSON, list": (b'[{"frames":[],"profiling_name":"nccl:all_reduce"}]', "flight_recorder"),
    "FR JSON, pretty": (b'{\n  "version": "2.9",\n  "entries": []\n}', "flight_recorder"),
    "kineto": (b'{"schemaVersion":1,"deviceProperties":[{"id":0}],"traceEvents":[', "kineto"),
    "chrome": (b'[{"ph":"X","name":"a","ts":1}]', "kineto"),
    "execution trace": (b'{"schema":"1.0.4-chakra.0.0.4","pid":3,"nodes":[', "execution_trace"),
    "chakra JSON": (b'{"workload_graph":[{"id":1}]}', "chakra"),
    "chakra protobuf": (b"\x07\n\x050.0.4\x10\x08\x01", "chakra"),
    "NCCL log": (b"host:12:34 [0] NCCL INFO AllReduce: opCount 0 sendbuff\n", "log"),
    "watchdog": (b"[rank3]:[E PG.cpp:552] Watchdog caught collective\n", "log"),
    "RAS JSON": (b'{"nccl_version":"2.24","communicators":[]}', "ras"),
    "RAS text": (b"Job summary\n===========\n", "ras"),
    "inspector": (b'{"header":{"id":"x"},"coll_perf":{}}\n', "nccl_inspector"),
    "clog": (b"V|1|base_timestamp=3\n", "clog"),
    "DUMPI": (b"MPI_Init entering at walltime 3\n", "dumpi"),
    "report": (b'{"schema":"dl2gpu.report/1","summary":{}}', None),
    "other JSON": (b'{"a":1,"entriesx":2}', None),
    "entries deep inside": (b'{"a":{"entries":[],"version":1,"pg_config":2}}', None),
    "text": (b"hello world", None),
    "checkpoint": (b"PK\x03\x04" + b"\0" * 22 + b"\x10\0\0\0archive/data.pkl", None),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTENT)
@pytest.mark.parametrize(
    "pack", [None, gzip.compress, zstandard.ZstdCompressor().compress, bz2.compress]
)
def test_content(case: str, pack: Any, tmp_path: Path) -> None:
    content, format_ = CONTENT[case]
    put(tmp_path, {"job/some.thing": pack(content) if pack else content})
    found = discover([str(tmp_path)])
    if format_ in READERS:
        assert formats(found) == {"job/some.thing": format_}
        assert found.inputs == []
    else:
        assert found.files == []
        (only,) = found.inputs
        assert (only.status, only.format) == ("ignored", format_)
        assert only.reason


def test_logs_lie_where_launchers_put_them(tmp_path: Path) -> None:
    line = b"[rank0]:[E PG.cpp:552] Watchdog caught collective\n"
    put(
        tmp_path,
        {
            "a/logs/node0.log": line,
            "a/logs/node1.log": b"step 1\n",
            "b/torchelastic/none_ab12cd34/attempt_0/3/stderr.log": line,
            "b/torchelastic/none_ab12cd34/attempt_1/3/stderr.log": line,
            "b/agent.log": line,
            "c/rank_0/out.txt": line,
            "c/rank_1/out.txt": b"",
            "d.log": line,
        },
    )
    found = discover([str(tmp_path)])
    assert {f.format for f in found.files} == {"log"}
    where = {f.path: (f.folder, f.attempt) for f in found.files}
    root = where["d.log"][0]
    assert where == {
        "a/logs/node0.log": ("a", None),
        "a/logs/node1.log": ("a", None),
        "b/torchelastic/none_ab12cd34/attempt_0/3/stderr.log": ("b", 0),
        "b/torchelastic/none_ab12cd34/attempt_1/3/stderr.log": ("b", 1),
        "b/agent.log": ("b", None),
        "c/rank_0/out.txt": ("c", None),
        "c/rank_1/out.txt": ("c", None),
        "d.log": (root, None),
    }


def test_other_texts_are_no_logs(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "job/README.md": b"[rank0]:[E PG.cpp:552] Watchdog caught collective\n",
            "job/table.csv": b"rank,step\n0,1\n",
            "job/config.yaml": b"world_size: 8\n",
            "job/data.bin": bytes(range(256)) * 8,
            "job/weights.log": bytes(range(256)) * 8,
            "job/notes": b"see the log of rank 3\n",
        },
    )
    found = discover([str(tmp_path)])
    assert found.files == []
    assert {i.status for i in found.inputs} == {"ignored"}


def test_cut_anywhere_is_still_recognised() -> None:
    for case in ("native", "pickle 2", "FR JSON", "kineto"):
        content, format_ = CONTENT[case]
        for cut in range(60, len(content)):
            assert classify(content[:cut], "x").format == format_, (case, cut)


def test_git_lfs_pointer(tmp_path: Path) -> None:
    put(tmp_path, {"rank_0.jsonl": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"})
    (only,) = discover([str(tmp_path)]).inputs
    assert only.status == "quarantined"
    assert "git lfs pull" in str(only.reason)


def test_empty_files(tmp_path: Path) -> None:
    put(tmp_path, {"_dump_3": b"", "rank_1.jsonl": b"", "stdout.txt": b"", "rank_0.jsonl.gz": b""})
    found = discover([str(tmp_path)])
    assert formats(found) == {
        "_dump_3": "flight_recorder", "rank_0.jsonl.gz": "native", "rank_1.jsonl": "native",
        "stdout.txt": "log",
    }  # fmt: skip
    assert reasons(found) == {}  # a rank may have been killed before it wrote anything


def test_named_like_a_dump_but_unknown(tmp_path: Path) -> None:
    put(tmp_path, {"nccl_trace_rank_3": b"\x13\x37 what is this", "notes": b"\x13\x37"})
    found = reasons(discover([str(tmp_path)]))
    assert found["nccl_trace_rank_3"][0] == "quarantined"
    assert found["notes"][0] == "ignored"


def test_hostile_pickle_goes_to_its_reader(tmp_path: Path) -> None:
    put(tmp_path, {"nccl_trace_rank_3": b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00idR."})
    assert formats(discover([str(tmp_path)])) == {"nccl_trace_rank_3": "flight_recorder"}


JUNK = [
    "expect.json", "README.md", "README", ".DS_Store", "._rank_0.jsonl", "fault_injection.log",
    "labels.csv", "report.json", "rank_0.jsonl.tmp", "train.py", "__pycache__/x.pyc",
    ".git/objects/ab", "nccl_trace_rank_0.pipe",
]  # fmt: skip


def test_junk_is_told(tmp_path: Path) -> None:
    put(tmp_path, dict.fromkeys(JUNK, NATIVE) | {"rank_0.jsonl": NATIVE})
    found = discover([str(tmp_path)])
    assert list(formats(found)) == ["rank_0.jsonl"]
    told = reasons(found)
    assert {p.split("/")[0] for p in told} == {p.split("/")[0] for p in JUNK}
    assert all(status == "ignored" and reason for status, reason in told.values())


def test_fifo_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "nccl_trace_rank_0")
    (only,) = discover([str(tmp_path)]).inputs
    assert only.status == "ignored"
    assert "pipe" in str(only.reason)


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, {"a/rank_0.jsonl": NATIVE, "a/rank_1.jsonl": NATIVE})

    allowed = os.open

    def refuse(path: str, flags: int) -> int:
        if path.endswith("rank_0.jsonl"):
            raise PermissionError(13, "Permission denied")
        return allowed(path, flags)

    monkeypatch.setattr("dl2gpu.trace.files.os.open", refuse)
    found = discover([str(tmp_path)])
    assert list(formats(found)) == ["a/rank_1.jsonl"]
    assert reasons(found) == {
        "a/rank_0.jsonl": ("quarantined", "cannot be opened: Permission denied")
    }


# --------------------------------------------------------------------------------------------------
# Links


def test_links(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    put(root, {"a/rank_0.jsonl": NATIVE})
    put(outside, {"rank_9.jsonl": NATIVE})
    (root / "a" / "latest").symlink_to(root / "a" / "rank_0.jsonl")
    (root / "a" / "away").symlink_to(outside / "rank_9.jsonl")
    (root / "loop").symlink_to(root)
    (root / "folder").symlink_to(outside)
    (root / "broken").symlink_to(tmp_path / "nothing")
    (root / "self").symlink_to(root / "self")
    found = discover([str(root)])
    assert list(formats(found)) == ["a/rank_0.jsonl"]
    told = reasons(found)
    assert set(told) == {"a/latest", "a/away", "loop", "folder", "broken", "self"}
    assert all(status == "ignored" for status, _ in told.values())
    assert "leaves the scanned path" in str(told["a/away"][1])
    assert "leaves the scanned path" in str(told["folder"][1])
    assert "to nothing" in str(told["broken"][1])


def test_scanned_path_may_itself_be_a_link(tmp_path: Path) -> None:
    put(tmp_path / "real", {"rank_0.jsonl": NATIVE})
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert list(formats(discover([str(tmp_path / "link")]))) == ["rank_0.jsonl"]
    (tmp_path / "one").symlink_to(tmp_path / "real" / "rank_0.jsonl")
    assert len(discover([str(tmp_path / "one")]).files) == 1


# --------------------------------------------------------------------------------------------------
# Jobs


def test_job_is_a_folder(tmp_path: Path) -> None:
    put(tmp_path / "top", {"rank_0.jsonl": NATIVE, "b/rank_0.jsonl": NATIVE, "c/d/r.jsonl": NATIVE})
    assert folders(discover([str(tmp_path / "top")])) == {
        "rank_0.jsonl": ("top", None),
        "b/rank_0.jsonl": ("b", None),
        "c/d/r.jsonl": ("c/d", None),
    }


@pytest.mark.parametrize(
    "names",
    [
        ["rank_0/nccl_trace", "rank_1/nccl_trace"],
        ["node3_rank_12/fr", "node3_rank_13/fr"],
        ["Rank-0/dump_0", "Rank-1/dump_1"],
        ["worker0/nccl_trace", "worker1/nccl_trace", "worker2/nccl_trace"],
        ["node0/_dump_0", "node0/_dump_1", "node1/_dump_2", "node1/_dump_3"],
        ["rank_7/nccl_trace"],
    ],
)
def test_folder_for_each_rank(names: list[str], tmp_path: Path) -> None:
    put(tmp_path, {f"jobs/x/{n}": DUMP for n in names} | {"jobs/y/_dump_0": DUMP})
    found = folders(discover([str(tmp_path)]))
    assert {found[f"jobs/x/{n}"] for n in names} == {("jobs/x", None)}
    assert found["jobs/y/_dump_0"] == ("jobs/y", None)


@pytest.mark.parametrize(
    "names",
    [
        ["job_0/nccl_trace_rank_0", "job_1/nccl_trace_rank_0"],
        ["100/nccl_trace_rank_0", "101/nccl_trace_rank_0"],
        ["node0/nccl_trace_rank_0", "node1/nccl_trace_rank_0"],  # two jobs, or ranks within a node
        ["rank_0/nccl_trace", "nccl_trace_rank_5"],  # the parent has dumps of its own
        ["rank_0/nccl_trace", "other/nccl_trace"],
    ],
)
def test_folders_that_are_jobs(names: list[str], tmp_path: Path) -> None:
    put(tmp_path, {f"x/{n}": DUMP for n in names})
    found = folders(discover([str(tmp_path)]))
    assert {found[f"x/{n}"][0] for n in names} == {f"x/{n}".rpartition("/")[0] for n in names}


def test_attempts(tmp_path: Path) -> None:
    names = [
        "j/attempt_0/_dump_0",
        "j/attempt-1/_dump_0",
        "j/restart_2/rank_0/fr",
        "j/restart_2/rank_1/fr",
    ]
    put(tmp_path, dict.fromkeys(names, DUMP))
    assert folders(discover([str(tmp_path)])) == {
        "j/attempt_0/_dump_0": ("j", 0),
        "j/attempt-1/_dump_0": ("j", 1),
        "j/restart_2/rank_0/fr": ("j", 2),
        "j/restart_2/rank_1/fr": ("j", 2),
    }
    found = discover([str(tmp_path / "j")])
    assert {f.folder for f in found.files} == {"j"}
    assert sorted({f.attempt for f in found.files if f.attempt is not None}) == [0, 1, 2]


def test_job_pattern(tmp_path: Path) -> None:
    put(
        tmp_path,
        {
            "2026/alpha/llama-r3-a1.bin": DUMP,
            "2026/beta/llama-r4-a1.bin": DUMP,
            "2026/beta/gpt-r0-a0.bin": DUMP,
            "2026/beta/_dump_9": DUMP,
        },
    )
    pattern = r"(?P<job>\w+)-r(?P<rank>\d+)-a(?P<attempt>\d+)"
    found = discover([str(tmp_path)], pattern)
    assert {f.path: (f.job, f.rank, f.attempt, f.folder) for f in found.files} == {
        "2026/alpha/llama-r3-a1.bin": ("llama", 3, 1, "2026"),
        "2026/beta/llama-r4-a1.bin": ("llama", 4, 1, "2026"),
        "2026/beta/gpt-r0-a0.bin": ("gpt", 0, 0, "2026/beta"),
        "2026/beta/_dump_9": (None, None, None, "2026/beta"),
    }


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "expected a regular expression"),
        ("(a)", "expected a named group"),
        ("(?P<name>a)", "expected a named group"),
        (r"(?P<rank>\w+)", "group rank matched 'j'.*expected a number"),
    ],
)
def test_wrong_job_pattern(pattern: str, message: str, tmp_path: Path) -> None:
    put(tmp_path, {"j/_dump_0": DUMP})
    with pytest.raises(InputError, match=message):
        discover([str(tmp_path)], pattern)


# --------------------------------------------------------------------------------------------------
# Paths


def test_a_file(tmp_path: Path) -> None:
    put(tmp_path / "job", {"rank_0.jsonl": NATIVE, "rank_1.jsonl": NATIVE, "rank_2.jsonl": NATIVE})
    found = discover([str(tmp_path / "job" / "rank_1.jsonl")])
    assert [(f.path, f.folder) for f in found.files] == [("rank_1.jsonl", "job")]
    found = discover([str(tmp_path / "job" / f"rank_{r}.jsonl") for r in (2, 0)])
    assert [(f.path, f.folder) for f in found.files] == [
        ("rank_0.jsonl", "job"),
        ("rank_2.jsonl", "job"),
    ]


def test_several_paths_stay_apart(tmp_path: Path) -> None:
    put(tmp_path, {"a/run/_dump_0": DUMP, "b/run/_dump_0": DUMP, "b/run/x/_dump_0": DUMP})
    found = discover([str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")])
    assert folders(found) == {
        "a/run/_dump_0": ("a/run", None),
        "b/run/_dump_0": ("b/run", None),
        "b/run/x/_dump_0": ("b/run/x", None),
    }


def test_overlapping_paths_give_each_file_once(tmp_path: Path) -> None:
    put(tmp_path, {"a/b/_dump_0": DUMP})
    for paths in ([tmp_path, tmp_path / "a"], [tmp_path / "a", tmp_path / "a"]):
        assert len(discover([str(p) for p in paths]).files) == 1


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere: expected a folder or a file"):
        discover([str(tmp_path / "nowhere")])
    with pytest.raises(InputError, match="found nothing there"):
        discover(["memory://nowhere-at-all"])
    with pytest.raises(InputError, match="nosuch"):
        discover(["nosuch://bucket"])


def test_bucket(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    try:
        fs.pipe("/t-bucket/j/rank_0/nccl_trace", DUMP)
        fs.pipe("/t-bucket/j/rank_1/nccl_trace", gzip.compress(DUMP))
        fs.pipe("/t-bucket/k/r.jsonl", NATIVE)
        fs.pipe("/t-bucket/k/README.md", b"x")
        found = discover(["memory://t-bucket"])
        assert folders(found) == {
            "j/rank_0/nccl_trace": ("j", None),
            "j/rank_1/nccl_trace": ("j", None),
            "k/r.jsonl": ("k", None),
        }
        assert [i.path for i in found.inputs] == ["k/README.md"]
        assert [read_bytes(f) for f in found.files] == [DUMP, DUMP, NATIVE]
        assert [f.path for f in discover(["memory://t-bucket/k/r.jsonl"]).files] == ["r.jsonl"]
    finally:
        fs.rm("/t-bucket", recursive=True)


def test_archive_through_a_chained_url(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as z:
        z.writestr("j/rank_0.jsonl", NATIVE)
        z.writestr("j/k/_dump_1", DUMP)
    found = discover([f"zip://j::{tmp_path}/x.zip"])
    assert [(f.path, f.format) for f in found.files] == [
        ("k/_dump_1", "flight_recorder"),
        ("rank_0.jsonl", "native"),
    ]
    assert [read_bytes(f) for f in found.files] == [DUMP, NATIVE]


def test_name_that_is_not_utf8(tmp_path: Path) -> None:
    put(tmp_path / "j", {os.fsdecode(b"rank_\xff.jsonl"): NATIVE})
    (only,) = discover([str(tmp_path)]).files
    only.path.encode()  # can be written to a report
    assert read_bytes(only) == NATIVE


def test_parquet_by_footer(tmp_path: Path) -> None:
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "x.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "x.parquet").read_bytes()[:-6])
    told = reasons(discover([str(tmp_path)]))
    assert told["x.parquet"] == ("ignored", "a Parquet file, but not of dl2gpu.trace")
    assert told["cut.parquet"][0] == "quarantined"


def test_the_result_is_sorted_and_repeatable(tmp_path: Path) -> None:
    names = [f"j{i % 7}/rank_{i}.jsonl" for i in range(60)] + ["a.txt", "j1/b.txt"]
    random.Random(0).shuffle(names)
    put(tmp_path, dict.fromkeys(names, NATIVE))
    found = discover([str(tmp_path)])
    assert [f.path for f in found.files] == sorted(f.path for f in found.files)
    assert found == discover([str(tmp_path)])
    assert isinstance(found.files[0], TraceFile)
    assert all(isinstance(i, Input) for i in found.inputs)


def test_ten_thousand_files(tmp_path: Path) -> None:
    for j in range(100):
        (tmp_path / f"j{j}").mkdir()
        for r in range(100):
            (tmp_path / f"j{j}" / f"_dump_{r}").write_bytes(DUMP)
    start = time.process_time()
    found = discover([str(tmp_path)])
    assert len(found.files) == 10_000
    assert time.process_time() - start < 5


def test_labelled_data(shared: Path) -> None:
    for folder, format_ in (
        ("cases", "native"),
        ("data/live/native", "native"),
        ("data/live/flight_recorder", "flight_recorder"),
        ("data/live/flight_recorder_json", "flight_recorder"),
        ("data/flight_recorder", "flight_recorder"),
    ):
        if (shared / folder).is_dir():
            found = discover([str(shared / folder)])
            assert {f.format for f in found.files} == {format_}
            assert {i.status for i in found.inputs} <= {"ignored"}


# --------------------------------------------------------------------------------------------------
# Listing, and scans of a part


def test_listing(tmp_path: Path) -> None:
    put(tmp_path, {
        "a/rank_0/x.jsonl": NATIVE, "a/rank_1/x.jsonl": NATIVE, "a/README.md": b"text",
        "b/attempt_0/rank_0.jsonl": NATIVE, "b/attempt_1/rank_0.jsonl": NATIVE,
        "c/node0/rank0/x.jsonl": NATIVE, "rank_0.jsonl": NATIVE, "empty": b"",
    })  # fmt: skip
    found = listing(str(tmp_path))
    assert dict(found.schema) == LISTING
    assert dict(found.select("path", "unit").iter_rows()) == {
        "a/rank_0/x.jsonl": "folder a", "a/rank_1/x.jsonl": "folder a",
        "b/attempt_0/rank_0.jsonl": "folder b", "b/attempt_1/rank_0.jsonl": "folder b",
        "c/node0/rank0/x.jsonl": "folder c", "rank_0.jsonl": "folder ", "empty": "folder ",
    }  # fmt: skip
    assert found.filter(path="empty")["size"].item() == 0
    assert found["modified"].null_count() == 0
    path = tmp_path / "rank_0.jsonl"
    assert found.filter(path="rank_0.jsonl")["modified"].item() == path.stat().st_mtime_ns
    put(tmp_path, {
        "d/agent.log": LOG, "d/torchelastic/none_ab12cd34/attempt_0/3/stderr.log": LOG,
        "d/logs/node0/out.log": LOG, "d/rank_0.jsonl": NATIVE,
    })  # fmt: skip
    found = listing(str(tmp_path))
    assert set(found.filter(pl.col("path").str.starts_with("d/"))["unit"]) == {"folder d"}
    # whatever a scan reads is listed, and under one unit for a job
    files = discover([str(tmp_path)]).files
    units = dict(found.select("path", "unit").iter_rows())
    by_folder: dict[str, set[str]] = {}
    for f in files:
        by_folder.setdefault(f.folder, set()).add(units[f.path])
    assert {len(u) for u in by_folder.values()} == {1}


def test_listing_by_pattern(tmp_path: Path) -> None:
    put(tmp_path, {"x/j1.r0.jsonl": NATIVE, "y/j1.r1.jsonl": NATIVE, "y/other": NATIVE})
    found = listing([str(tmp_path)], r"(?P<job>j\d)\.r(?P<rank>\d)")
    assert found["unit"].to_list() == ["job j1", "job j1", "folder y"]


def test_listing_of_a_store() -> None:
    fs = fsspec.filesystem("memory")
    fs.pipe("/listed/job/rank_0.jsonl", NATIVE)
    before = listing("memory://listed")
    assert before["path"].to_list() == ["job/rank_0.jsonl"]
    assert before["size"].to_list() == [len(NATIVE)]


def test_only_some_files(tmp_path: Path) -> None:
    put(tmp_path, {"a/rank_0.jsonl": NATIVE, "b/rank_0.jsonl": NATIVE, "b/notes": b"text"})
    found = discover([str(tmp_path)], only={"b/rank_0.jsonl", "gone"})
    assert [f.path for f in found.files] == ["b/rank_0.jsonl"]
    assert found.inputs == []
    assert discover([str(tmp_path)], only=[]).files == []
