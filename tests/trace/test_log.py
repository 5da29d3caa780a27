"""The reader of text logs: lines, prefixes, encodings, attempts, hostile input."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_stories import STORIES
from log_writer import Story, files, timeout

from dl2gpu.analysis import analyse
from dl2gpu.trace import log_c10d, log_lines
from dl2gpu.trace.files import Limits
from dl2gpu.trace.inputs import TraceFile
from dl2gpu.trace.log import read
from dl2gpu.trace.log_lines import FileLines, line_blocks, parse
from dl2gpu.trace.schema import EXIT, SAID, STATE, Trace, concat, one_job, validate

WATCHDOG = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, "
    "NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600009 milliseconds before timing out."
)


def lines_of(text: str | bytes, tmp_path: Path, words: str = "Watchdog|step") -> pl.DataFrame:
    path = tmp_path / "job.log"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    found = FileLines()
    raw = list(line_blocks(TraceFile("job.log", str(path), "log", "job"), 0, words, found))
    return parse(pl.concat(raw), [found]) if raw else pl.DataFrame(schema=log_lines.LINES)


def read_text(text: str | bytes, tmp_path: Path, name: str = "job.log") -> Trace:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    trace, _ = read([TraceFile(name, str(path), "log", "job")])
    return validate(trace, name)


# --------------------------------------------------------------------------------------------------
# Lines


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("", None),
        ("[rank3]: ", 3),
        ("[rank12]:", 12),
        ("[1,7]<stderr>:", 7),
        ("[5]<stdout>:", 5),
        ("2024-12-02T19:01:28.707730Z stderr F [rank4]:", 4),
        ("(RayTrainWorker pid=615, ip=10.0.0.1) [rank2]: ", 2),
        ("\x1b[33m[rank6]:\x1b[0m ", 6),
        ("B-job/0 [default1]:[rank9]:", 9),
        ("worker-0 | [rank8]: ", 8),
    ],
)
def test_prefixes_name_the_rank(prefix: str, rank: int | None, tmp_path: Path) -> None:
    lines = lines_of(f"{prefix}[E ProcessGroupNCCL.cpp:737] {WATCHDOG}\n", tmp_path)
    assert lines["rank"].to_list() == [rank]
    facts = log_c10d.extract(lines).filter(pl.col("what") == "timeout")
    assert facts.select("ordinal", "op", "count", "said").rows() == [(7, "ALLREDUCE", 64, 3)]


def test_task_numbers_count_where_every_line_has_one(tmp_path: Path) -> None:
    all_ = lines_of("".join(f"{i % 4}: step {i} loss 1\n" for i in range(20)), tmp_path)
    assert all_["rank"].to_list() == [i % 4 for i in range(20)]
    few = lines_of("1: first\n2: second\n" + "step 1 loss 2\n" * 20, tmp_path)
    assert few["rank"].null_count() == few.height


def test_glued_lines_are_taken_apart(tmp_path: Path) -> None:
    glued = "".join(
        f"[rank{r}]:[E326 10:14:29.5 ProcessGroupNCCL.cpp:607] {WATCHDOG}" for r in range(3)
    )
    lines = lines_of(f"Epoch 2: 19%|x| 179/900 [02:59<12:01, v_num=9]{glued}\n", tmp_path)
    assert lines["rank"].to_list() == [None, 0, 1, 2]
    assert lines["line"].to_list() == [1] * 4
    assert lines["part"].to_list() == [0, 1, 2, 3]


def test_progress_bars_come_back_to_the_start_of_their_line(tmp_path: Path) -> None:
    lines = lines_of("\rstep 1 loss 3\rstep 2 loss 2\rstep 3 loss 1\nstep 4 loss 0\r\n", tmp_path)
    assert [t for t in lines["text"] if t] == [f"step {i} loss {4 - i}" for i in range(1, 5)]
    assert lines.filter(pl.col("text") != "")["line"].to_list() == [1, 1, 1, 2]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    text = f"[rank1]: Grüße vom Rechner\n[rank1]:[E ProcessGroupNCCL.cpp:737] {WATCHDOG}\n"
    trace = read_text(text.encode(encoding), tmp_path)
    assert trace.events.select("rank", "ordinal").rows() == [(1, 7)]


def test_times(tmp_path: Path) -> None:
    lines = lines_of(
        "2025-02-28 23:59:59,250 step 1\n[rank0]:[E301 00:00:01.500000000 x.cpp:1] Watchdog\n"
        "step 2\n",
        tmp_path,
    )
    first, second, third = lines["t"].to_list()
    assert first == 1_740_787_199_250_000_000
    assert second - first == 2_250_000_000
    assert third is None


def test_blocks_are_cut_at_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"step {i} loss 1\n" for i in range(5000))
    whole = lines_of(text, tmp_path)
    monkeypatch.setattr(log_lines, "BLOCK", 1000)
    assert lines_of(text, tmp_path).equals(whole)
    assert whole["line"].to_list() == list(range(1, 5001))


def test_a_line_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "BLOCK", 4096)
    monkeypatch.setattr(log_lines, "LONGEST", 256)
    path = tmp_path / "job.log"
    path.write_bytes(b"x" * 100_000 + f"\n[rank1]:[E P.cpp:1] {WATCHDOG}\n".encode())
    trace, (told,) = read([TraceFile("job.log", str(path), "log", "job")])
    assert trace.events["rank"].to_list() == [1]
    assert told.status == "partial"
    assert "too long" in str(told.reason)


# --------------------------------------------------------------------------------------------------
# Tables


def test_a_timeout_is_an_event(tmp_path: Path) -> None:
    story = Story(2)
    timeout(story, "2.6", 700, 1, 4410, "_ALLGATHER_BASE", 64, 128, pg=(3, "tp"), group_rank=0)
    (content,) = files(story).values()
    trace = read_text(content, tmp_path)
    (event,) = trace.events.rows(named=True)
    assert (event["rank"], event["ordinal"], event["count"], event["count_out"]) == (
        1,
        4410,
        64,
        128,
    )
    assert event["state"] == STATE["scheduled"]
    groups = trace.comms.select("id", "name", "desc").rows()
    assert groups == [("0", "0", "default_pg"), ("3", "3", "tp")]
    assert trace.comms["id"][event["comm"]] == "3"
    assert trace.status.select("last_enqueued", "last_completed").rows() == [(4412, 4409)]
    assert set(trace.said["what"]) >= {"timeout", "status", "signal", "life"}


@pytest.mark.parametrize(
    "number", ["-1", "18446744073709551615", "3452013982", "76280750235782912"]
)
def test_garbage_counters_are_none(number: str, tmp_path: Path) -> None:
    trace = read_text(
        f"[rank3]:[E P.cpp:1] {WATCHDOG}\n[rank3]:[E P.cpp:2] [PG 0 Rank 3] Timeout at NCCL work: "
        f"7, last enqueued NCCL work: 9, last completed NCCL work: {number}.\n",
        tmp_path,
    )
    (row,) = trace.status.rows(named=True)
    assert row["last_enqueued"] == 9
    assert row["last_completed"] == (-1 if number == "-1" else None)


def test_who_dies_of_the_watchdog_did_not_crash(tmp_path: Path) -> None:
    tell, _ = STORIES["exception_first"]
    (content,) = files(tell("2.6")).values()
    trace = read_text(content, tmp_path)
    ends = dict(trace.ranks.select("rank", "exit").iter_rows())
    assert ends == {0: EXIT["unknown"], 1: EXIT["unknown"], 2: EXIT["crashed"], 3: EXIT["unknown"]}
    assert trace.jobs["world_size"].to_list() == [4]


def test_a_number_in_a_name_is_a_rank_only_if_lines_do_not_differ(tmp_path: Path) -> None:
    def ranks(first: str, second: str) -> list[int | None]:
        found = []
        for name, text in (("node_0.log", first), ("node_1.log", second)):
            (tmp_path / name).write_text(text)
            found.append(TraceFile(name, str(tmp_path / name), "log", "job"))
        return [i.rank for i in read(found)[1]]

    steps = "".join(f"step {i} loss 1\n" for i in range(5))
    assert ranks(steps, steps) == [0, 1]
    assert ranks(steps + "[rank0]: a\n[rank1]: b\n", steps + "[rank2]: a\n[rank3]: b\n") == [
        None,
        None,
    ]


def test_said_survives_concat_and_split(tmp_path: Path) -> None:
    tell, _ = STORIES["two_operations"]
    (content,) = files(tell("2.6")).values()
    one = read_text(content, tmp_path)
    two = validate(concat([one, one]))
    assert two.said.height == 2 * one.said.height
    assert set(two.said["comm"].drop_nulls()) == {0, 1}
    for job in (0, 1):
        part = validate(one_job(two, job))
        assert part.said.drop("op").equals(one.said.drop("op"))
        assert analyse(part).findings[0]["kind"] == "mismatch"
    assert list(two.said.schema) == list(SAID)


def test_texts_of_a_job_and_other_texts(tmp_path: Path) -> None:
    for name, text in (("a/rank_0.log", f"[E P.cpp:1] {WATCHDOG}\n"), ("a/rank_1.log", ""),
                       ("b/notes.txt", "a text of two\nlines\n")):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    trace, inputs = read(
        [
            TraceFile(n, str(tmp_path / n), "log", n.split("/")[0])
            for n in ("a/rank_0.log", "a/rank_1.log", "b/notes.txt")
        ]
    )
    assert [(i.path, i.status) for i in inputs] == [
        ("a/rank_0.log", "read"),
        ("a/rank_1.log", "read"),
        ("b/notes.txt", "ignored"),
    ]
    assert trace.jobs["name"].to_list() == ["a"]
    assert trace.ranks["rank"].to_list() == [0, 1]  # of rank 1 there is an empty file


# --------------------------------------------------------------------------------------------------
# Hostile input


def test_cut_and_broken_compression(tmp_path: Path) -> None:
    tell, _ = STORIES["two_operations"]
    (content,) = files(tell("2.6")).values()
    packed = gzip.compress(content + bytes(range(256)) * 400)
    path = tmp_path / "job.log.gz"
    path.write_bytes(packed[: len(packed) - 40])
    trace, (told,) = read([TraceFile("job.log.gz", str(path), "log", "job")])
    assert told.status == "partial"
    assert "ends too early" in str(told.reason)
    assert analyse(validate(trace)).findings[0]["kind"] == "mismatch"


def test_a_file_that_cannot_be_opened_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text(f"[E P.cpp:1] {WATCHDOG}\n")
    trace, inputs = read(
        [
            TraceFile("rank_0.log", str(tmp_path / "rank_0.log"), "log", "job"),
            TraceFile("rank_1.log", str(tmp_path / "gone.log"), "log", "job"),
        ]
    )
    assert [i.status for i in inputs] == ["read", "quarantined"]
    assert trace.events.height == 1


def test_limits_hold(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text("step 1 loss 2\n" * 100)
    found = FileLines()
    file = TraceFile("job.log", str(path), "log", "job")
    with pytest.raises(ValueError, match="DL2GPU_MAX_FILE_BYTES"):
        list(line_blocks(file, 0, "step", found, Limits(max_file_bytes=10)))


_PIECES = st.sampled_from(
    [
        "[rank", "]:", "[E326 10:14:29.5 ProcessGroupNCCL.cpp:607] ", "Watchdog caught collective ",
        "operation timeout: ", "WorkNCCL(SeqNum=", "9" * 30, "-1", ", OpType=", "ALLREDUCE",
        ", NumelIn=",
        "Timeout(ms)=", ")", " ran for ", "[PG ID ", "Rank ", "last enqueued work: ",
        "\n", "\r", "\0",
        "Traceback (most recent call last)", "ValueError: x", " - [0, 1] joined but didn't finish",
        " collective #", "started ranks:", "    [0,1] started ALLREDUCE", "[missing ranks: 1, 2]",
        "CollectiveFingerPrint(SequenceNumber=", "TensorShape=[99999999999, 9]",
        "exitcode  : ", "  rank      : 1 (local_rank: 1)", "restart_count=1", "world_size=99999999",
        "srun: error: n: task 1: Killed", "\x1b[31m", "'", '"', "[1,0]<stderr>:", WATCHDOG,
        "\ufeff", "gloo/transport] Connection closed by peer", "store-based barrier",
        "world_size=4, worker_count=3", "Stalled ops:a [ready ranks: 0, 99999999999]",
    ]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(_PIECES | st.text(max_size=8) | st.integers(0, 1 << 70).map(str), max_size=60),
    cut=st.integers(0, 40),
)
def test_whatever_the_text_a_trace_or_a_reason(
    pieces: list[str], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    raw = "".join(pieces).encode("utf-8", "surrogatepass")
    (folder / "job.log").write_bytes(raw[cut:])
    trace, (told,) = read([TraceFile("job.log", str(folder / "job.log"), "log", "job")])
    analyse(validate(trace, "job.log"))
    assert told.status in {"read", "partial", "ignored"}


def test_markup_and_controls_stay_text(tmp_path: Path) -> None:
    text = f"[rank0]:[E P.cpp:1] {WATCHDOG} <script>alert(1)</script> \x1b[31mred\x1b[0m\n"
    trace = read_text(text, tmp_path)
    said = trace.said.filter(pl.col("what") == "timeout")["text"][0]
    assert re.search(r"[\x00-\x08\x1b]", said) is None


def test_restarts_in_one_file_and_calls_in_another(tmp_path: Path) -> None:
    """The launcher says when workers were started again; a worker's file has NCCL's lines, torn."""
    call = (
        "gpu-a11:10037:10037 [3] NCCL INFO AllReduce: opCount 1 sendbuff 0x7f0e288b4a00 recvbuff "
        "0x7f0e28|b4a00 count 1 datatype 7 op 0 root 0 comm 0x55a979e47a50 [nranks=8] "
        "stream 0x5600355b1bd0\n"
    )
    texts = {
        "launcher.log": "[2025-03-01 10:00:00,000] torchrun: [INFO]\n  restart_count=1\n",
        "rank_3.log": f"[2025-03-01 10:00:01,000] [rank3]: x\n{call}{call.replace('|', '')}",
    }
    files = []
    for name, content in texts.items():
        (tmp_path / name).write_text(content)
        files.append(TraceFile(name, str(tmp_path / name), "log", "job"))
    trace, inputs = read(files)
    validate(trace)
    assert [i.path for i in inputs] == ["launcher.log", "rank_3.log"]
    assert all(i.status in {"read", "partial"} for i in inputs)


@pytest.mark.parametrize("digit", ["\u0661", "\uff11"])
def test_digits_of_other_scripts_are_no_ranks(tmp_path: Path, digit: str) -> None:
    for line in (
        f"[{digit}, 2] joined but didn't finish collective",
        f"[missing ranks: 0, {digit}]",
        f"[0, {digit}] finished collective #{digit}, but didn't join",
        f"{digit}/3 attempts left; will restart worker group",
        f"[rank{digit}]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum={digit})",
    ):
        read_text(line + "\n", tmp_path)  # validates
