"""What a tired person reads: gravest first, ranks folded, no name from a file in charge of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from dl2gpu.report.console import rendered, summary
from dl2gpu.report.explain import explain
from dl2gpu.report.model import KINDS, Report
from dl2gpu.report.save import ReportError
from dl2gpu.report.words import (
    DEADLOCKS,
    MEANING,
    call_site,
    fold,
    operation,
    place,
    ranks,
    safe,
    utc,
)

HOSTILE = (
    "[bold red]x[/] \x1b[2J\x1b]0;title\x07 \r\n2. forged: healthy \u202egnp \u200b [/nonsense]"
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def text_of(report: Report) -> str:
    return rendered(summary(report))


# --------------------------------------------------------------------------------------------------
# Words


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([4], "4"),
        ([4, 5], "4, 5"),
        ([5, 4, 6], "4-6"),
        ([0, 1, 2, 3, 13, 13], "0-3, 13"),
        (range(100_000), "0-99999"),
    ],
)
def test_fold(numbers: list[int], text: str) -> None:
    assert fold(numbers) == text


def test_ranks() -> None:
    assert ranks([]) == ranks(None) == "none"
    assert ranks([3]) == "rank 3"
    assert ranks([0, 1, 2, 9]) == "ranks 0-2, 9"


def test_place_in_words() -> None:
    node = {"rank": 0, "place": "host", "op": "all_to_all", "ordinal": 7, "comm": "shard",
            "waits_for": [1], "seq": 9}  # fmt: skip
    assert place(node) == "rank 0 (host) waits in all_to_all #7 of 'shard' for rank 1"
    assert "(operation 9)" in place(node, numbered=True)
    wait = node | {"op": "wait", "comm": None, "ordinal": None}
    assert place(wait) == "rank 0 (host) waits for its requests, which need rank 1"
    stream = node | {"place": "stream", "stream": "s1", "ordinal": 0, "waits_for": [1, 2, 3]}
    assert place(stream) == "rank 0 (stream s1) waits in all_to_all #0 of 'shard' for ranks 1-3"


def test_operation_without_its_facts() -> None:
    assert operation({"op": None, "comm": None, "ordinal": None}) == "an unknown operation"
    assert operation({"op": "barrier", "comm": None, "ordinal": 0}) == "barrier #0"


@pytest.mark.parametrize(
    ("stack", "site"),
    [
        (None, None),
        ([], None),
        (["step lab/loop.py:85"], "lab/loop.py:85 in step"),
        (
            [
                "all_reduce /x/lib/python3.11/site-packages/torch/distributed/c10d.py:28",
                "redispatch torch/_ops.py:882",
                "<module> /home/a b/train.py:7",
            ],
            "/home/a b/train.py:7 in <module>",
        ),
        # all of it is the framework's: better that than nothing
        (["wrapper /x/site-packages/torch/a.py:1", "g torch/nn/b.py:2"],
         "/x/site-packages/torch/a.py:1 in wrapper"),
        # a name with spaces: the frame is given as it is
        (["at::Tensor f(int) at x.cpp"], "at::Tensor f(int) at x.cpp"),
    ],
)  # fmt: skip
def test_call_site(stack: list[str] | None, site: str | None) -> None:
    assert call_site(stack) == site


def test_safe_is_one_printable_line() -> None:
    out = safe(HOSTILE)
    assert out.isprintable()
    assert "\\x1b[2J" in out
    assert "\\u202e" in out
    assert "[bold red]x[/]" in out  # brackets are plain text
    assert safe("\u00e9 \u6f22 \U0001f600") == "\u00e9 \u6f22 \U0001f600"
    assert len(safe("x" * 10_000_000, 50)) < 100


def test_utc_takes_any_number() -> None:
    assert utc(0) == "1970-01-01 00:00:00 UTC"
    assert utc(2**62).endswith("UTC")
    for odd in (2**63 - 1, -(2**63)):
        assert str(odd) in utc(odd) or utc(odd).endswith("UTC")


def test_every_kind_has_a_meaning() -> None:
    assert set(MEANING) == set(KINDS)
    assert set(DEADLOCKS) < set(KINDS)


# --------------------------------------------------------------------------------------------------
# The summary


def test_summary_gravest_first(report: Report) -> None:
    text = text_of(report)
    lines = text.splitlines()
    assert lines[0] == "3 of 4 jobs deadlocked"
    verdicts = [
        line.split()[0] for line in lines if line.startswith(("cycle ", "mismatch ", "heal"))
    ]
    assert verdicts == ["cycle", "mismatch", "healthy"]
    assert text.index("1. inverted-a: cycle") < text.index("2. uneven: mismatch")
    assert "culprits  rank 3" in text
    assert "ranks 0-2" in text
    assert "rank 0 (host) waits in all_to_all #7 of 'shard' for rank 1" in text
    assert "at lab/loop.py:85 in train_step" in text
    assert "parted" in text
    assert "1.5 GPU-hours lost" in text
    assert "do        Make every rank call it." in text


def test_one_bug_in_two_jobs_is_told_once(report: Report) -> None:
    text = text_of(report)
    assert "also in inverted-b" in text
    assert "inverted-b does not move" not in text


def test_inputs_not_read_are_counted_by_reason(make_report: Callable[..., Report]) -> None:
    inputs = [
        {"path": f"j/rank_{i}", "status": "quarantined", "reason": "opcode GLOBAL"}
        for i in range(7)
    ] + [
        {"path": "n.txt", "status": "ignored", "reason": "not a trace"},
        {"path": "ok", "status": "read"},
    ]
    lines = text_of(make_report([], [], inputs)).splitlines()
    assert ["quarantined", "7", "opcode", "GLOBAL", "j/rank_0"] in [line.split() for line in lines]
    assert ["ignored", "1", "not", "a", "trace", "n.txt"] in [line.split() for line in lines]
    assert not any(" ok" in line for line in lines)


def test_jobs_of_one_name_get_their_folder(
    make_report: Callable[..., Report], report: Report
) -> None:
    jobs = [
        {"job": "gpt", "attempt": 0, "folder": folder, "verdict": "cycle", "deadlocked": True,
         "findings": [id_]}
        for folder, id_ in (("mon/gpt", "a"), ("tue/gpt", "b"))
    ]  # fmt: skip
    rows = [
        row | {"id": id_, "job": "gpt", "fingerprint": None}
        for row, id_ in zip(report.findings.to_dicts()[1:], "ab", strict=True)
    ]
    text = text_of(make_report(rows, jobs, []))
    assert "1. gpt [mon/gpt]: cycle" in text
    assert "2. gpt [tue/gpt]: cycle" in text


def hostile(make_report: Callable[..., Report], report: Report) -> Report:
    def poison(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {k: poison(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [poison(v, key) for v in value]
        # kinds and places are ours; all else may come from a file
        ours = key in {"kind", "evidence", "verdict", "status", "place"}
        return HOSTILE if isinstance(value, str) and not ours else value

    findings = report.findings.to_dicts()
    for i, row in enumerate(findings):
        details = json.dumps(poison(json.loads(row["details"]))) if row["details"] else None
        findings[i] = poison(row) | {"id": f"{i}{HOSTILE}", "details": details}
    return make_report(findings, poison(report.jobs.to_dicts()), poison(report.inputs.to_dicts()))


def test_hostile_names_stay_text(make_report: Callable[..., Report], report: Report) -> None:
    bad = hostile(make_report, report)
    for text in (text_of(bad), rendered(explain(bad)), rendered(explain(bad, "0"))):
        assert not {c for c in text if not c.isprintable()} - {"\n"}
        assert "[bold red]x[/]" in text
        assert not any(line.lstrip().startswith("2. forged") for line in text.splitlines())


def test_hostile_names_with_colour(
    make_report: Callable[..., Report], report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal the only escape sequences are our own colours."""
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    text = text_of(hostile(make_report, report))
    assert "\x1b[1m" in text
    assert "\x1b[2J" not in text
    assert "\x1b]" not in text
    assert "\x07" not in text


def test_no_color_is_respected(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[31m" not in text_of(report)
    assert "\x1b[1;31m" not in text_of(report)


def test_narrow_terminal_loses_nothing(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    squeezed = "".join(text_of(report).split())
    for words in (
        "inverted-a",
        "inverted-b",
        "rank0(host)waitsinall_to_all#7",
        "Makeeveryrankcallit",
    ):
        assert words in squeezed


def test_a_fleet_is_cut_with_a_count(make_report: Callable[..., Report], report: Report) -> None:
    row = report.findings.row(0, named=True)
    rows = [row | {"id": f"f{i:04}", "job": f"j{i:04}", "fingerprint": f"{i}"} for i in range(300)]
    jobs = [
        {"job": f"j{i:04}", "attempt": 0, "verdict": "mismatch", "findings": []} for i in range(300)
    ]
    text = text_of(make_report(rows, jobs, []))
    assert "... and 260 more findings" in text
    assert "and 294 more" in text


def test_long_cycles_are_cut_with_a_count(
    make_report: Callable[..., Report], report: Report
) -> None:
    row = report.findings.row(1, named=True)
    node = row["cycle"][0]
    row["cycle"] = [node | {"rank": i, "waits_for": [(i + 1) % 64]} for i in range(64)]
    made = make_report([row], [], [])
    assert "... and 56 more places" in text_of(made)
    assert "64. rank 63 (host) waits" in rendered(explain(made))


# --------------------------------------------------------------------------------------------------
# One finding in full


def test_explain_shows_all_of_it(report: Report) -> None:
    text = rendered(explain(report, "m1"))
    for words in (
        "uneven: mismatch",
        "expected:",
        "count: 128",
        "all_reduce of 'dp'  state started",
        "ranks 0-2: all_reduce #2 of 'dp'",
        "site-packages/torch/distributed",  # the whole stack here, not only the call site
        "2025-10-09 10:04:05 UTC",
        "Make every rank call it.",
    ):
        assert words in text
    assert text.index("rank 3\n") < text.index("rank 10\n")


def test_explain_steps_through_the_cycle(report: Report) -> None:
    text = rendered(explain(report, "c1"))
    assert "1. rank 0 (host) waits in all_to_all #7 of 'shard' (operation 9) for rank 1" in text
    assert "2. rank 1 (stream s_repl) waits in all_reduce #3 of 'repl'" in text
    assert "and so back to rank 0" in text
    assert "also in inverted-b" in text


def test_explain_takes_the_gravest_and_names_the_others(report: Report) -> None:
    text = rendered(explain(report))
    assert text.startswith("inverted-a: cycle")
    assert "m1  uneven: mismatch" in text


@pytest.mark.parametrize(
    ("finding", "message"),
    [("c", "found 2; choose one of: c1, c2"), ("zz", "found none; choose one of: c1, c2, m1")],
)
def test_explain_asks_back(report: Report, finding: str, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        explain(report, finding)


def test_explain_takes_a_prefix_or_a_job(report: Report) -> None:
    assert rendered(explain(report, "m")) == rendered(explain(report, "m1"))
    assert rendered(explain(report, "uneven")) == rendered(explain(report, "m1"))


def test_explain_healthy_report(report: Report) -> None:
    with pytest.raises(ReportError, match="every job in this report is healthy"):
        explain(Report(jobs=report.jobs, findings=report.findings.head(0)))


@pytest.mark.parametrize("details", ['[1, {"a": [1, 2]}]', '"text"', "3", "null", '{"a": null}'])
def test_explain_takes_any_details(
    report: Report, make_report: Callable[..., Report], details: str
) -> None:
    frame = report.findings.with_columns(pl.lit(details).alias("details"))
    rendered(explain(make_report(frame.to_dicts(), [], []), "m1"))
