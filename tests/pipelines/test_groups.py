"""Findings over nights: new, known, gone, regressed; suppressed; what they cost."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from pipelines.fleet.config import Config, Groups, Output, Owner, Scan, Suppression
from pipelines.fleet.digest import as_html, as_index, as_markdown, digest
from pipelines.fleet.groups import GROUPS, grouped
from pipelines.fleet.metrics import exposition
from pipelines.fleet.state import FINDINGS, JOBS, NIGHTS, RUNS

CONFIG = Config(Scan(["x"]), Output("out"), groups=Groups(gone_after=2))
A, B = "a" * 16, "b" * 16


def history(*runs: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Runs of successive nights; each letter is a finding of its own job; "-": no new jobs."""
    rows: list[dict[str, Any]] = []
    about = []
    for n, letters in enumerate(runs, 1):
        night = str(dt.date(2026, 11, 1) + dt.timedelta(n))
        jobs = 0 if letters == "-" else 5
        about.append((n, night, night, 1, 1, jobs))
        rows += [
            {"run": n, "id": f"f{i}", "job": f"job{n}{i}", "kind": "cycle", "attempt": 0,
             "fingerprint": letter * 16, "gpu_hours": 2.0, "saved": 1.0,
             "summary": f"says {letter}",
             "team": "one" if i else None}
            for i, letter in enumerate(letters.replace("-", "").replace(".", ""))
        ]  # fmt: skip
    findings = pl.DataFrame(rows, schema=FINDINGS) if rows else pl.DataFrame(schema=FINDINGS)
    return pl.DataFrame(about, schema=RUNS, orient="row"), findings


def statuses(*runs: str, config: Config = CONFIG, of: int | None = None) -> dict[str, str]:
    about, findings = history(*runs)
    found = grouped(of or len(runs), about, findings, config)
    assert dict(found.schema) == GROUPS
    return {f[0]: s for f, s in found.select("fingerprint", "status").iter_rows()}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (["a"], {"a": "new"}),
        (["a", "a"], {"a": "known"}),
        (["a", "ab"], {"a": "known", "b": "new"}),
        (["a", "."], {}),  # one run without it says little
        (["a", ".", "."], {"a": "gone"}),
        (["a", ".", ".", "."], {}),  # said once
        (["a", ".", "a"], {"a": "known"}),
        (["a", ".", ".", "a"], {"a": "regressed"}),
        (["a", ".", ".", "a", "a"], {"a": "known"}),
        (["a", "-", "-", "-"], {}),  # nights without new jobs say nothing
        (["a", "-", "-", "-", "a"], {"a": "known"}),
        (["a", "-", ".", "."], {"a": "gone"}),
    ],
)
def test_status(runs: list[str], expected: dict[str, str]) -> None:
    assert statuses(*runs) == expected


def test_later_runs_do_not_count() -> None:
    assert statuses("a", ".", ".", "a", of=2) == {}
    assert statuses("a", "a", of=1) == {"a": "new"}


def test_what_a_group_says() -> None:
    about, findings = history("a", "aab")
    rows = grouped(2, about, findings, CONFIG).to_dicts()
    assert [r["fingerprint"] for r in rows] == [B, A]  # new first
    a = rows[1]
    assert (a["jobs"], a["all_jobs"], a["nights"]) == (2, 3, 2)
    assert (a["first_seen"], a["last_seen"]) == ("2026-11-02", "2026-11-03")
    assert (a["gpu_hours"], a["all_gpu_hours"], a["saved"]) == (4.0, 6.0, 2.0)
    assert (a["job"], a["finding"], a["summary"], a["teams"]) == ("job20", "f0", "says a", ["one"])


def suppressing(**keys: Any) -> Config:
    rule = Suppression(until=dt.date(2026, 11, 2), reason="known to us", **keys)
    return Config(Scan(["x"]), Output("out"), suppressions=(rule,))


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"fingerprint": A}, {"b"}), ({"fingerprint": A[:8]}, {"b"}), ({"kind": "cycle"}, set()),
        ({"kind": "mismatch"}, {"a", "b"}), ({"jobs": "job10"}, {"b"}), ({"jobs": "job1*"}, set()),
    ],
)  # fmt: skip
def test_suppressions(rule: dict[str, Any], told: set[str]) -> None:
    about, findings = history("ab", "ab")
    groups = grouped(1, about, findings, suppressing(**rule))
    assert {f[0] for f in groups.filter(pl.col("suppressed").is_null())["fingerprint"]} == told
    assert groups["suppressed"].drop_nulls().unique().to_list() in (
        [], ["known to us (until 2026-11-02)"],
    )  # fmt: skip
    later = grouped(2, about, findings, suppressing(**rule))
    assert later["suppressed"].null_count() == 2  # it has ended


# --------------------------------------------------------------------------------------------------
# Digest and metrics

HOSTILE = "<script>alert(1)</script> [x](http://evil) `rm` @all & |"


def told(config: Config = CONFIG, summary: str = "ranks wait") -> dict[str, Any]:
    about, findings = history("a", "ab")
    findings = findings.with_columns(
        summary=pl.lit(summary), team=pl.lit(summary), job=pl.lit(summary)
    )
    jobs = pl.DataFrame(
        [
            {"run": 2, "job": summary, "verdict": "cycle", "deadlocked": 1},
            {"run": 2, "job": "fine", "verdict": "healthy", "deadlocked": 0},
        ],
        schema=JOBS,
    )
    mine = findings.filter(pl.col("run") == 2)
    return digest(
        "2026-11-03", "2026-11-03", grouped(2, about, findings, config), jobs, mine,
        {"read": 7, "quarantined": 1}, config,
    )  # fmt: skip


def test_digest() -> None:
    made = told()
    assert made["jobs"] == 2
    assert made["deadlocked"] == 1
    assert made["verdicts"] == {"cycle": 1, "healthy": 1}
    assert made["cost"]["gpu_hours"] == 4.0
    assert made["cost"]["saved_gpu_hours"] == 2.0
    text = as_markdown(made)
    assert "2 jobs: 1 cycle, 1 healthy" in text
    assert "4.0 GPU-hours lost" in text
    assert text.index("New (1)") < text.index("Known (1)")
    assert as_markdown(told()) == text


def test_hostile_names_stay_text() -> None:
    made = told(summary=HOSTILE)
    page = as_html(made)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page
    text = as_markdown(made)
    assert "<script>" not in text.replace("\\<script\\>", "")
    assert "](http" not in text.replace("\\]", "")
    assert "@all" not in text


def test_an_empty_night() -> None:
    none = pl.DataFrame(schema=GROUPS)
    made = digest(
        "n",
        "2026-11-03",
        none,
        pl.DataFrame(schema=JOBS),
        pl.DataFrame(schema=FINDINGS),
        {},
        CONFIG,
    )
    assert "No new jobs." in as_markdown(made)
    assert "No new jobs." in as_html(made)


def test_suppressions_that_ended_are_told() -> None:
    assert told(suppressing(kind="cycle"))["expired"] == [
        {"until": "2026-11-02", "reason": "known to us"}
    ]


def test_nights_are_listed() -> None:
    rows = [("2026-11-03", 1200, 3, 2, 7.25), ("<b>", 0, 0, 0, 0.0)]
    page = as_index(pl.DataFrame(rows, schema=NIGHTS, orient="row"))
    assert page.index('"2026-11-03/digest.html"') < page.index("&lt;b&gt;/digest.html")
    assert "<b>" not in page
    assert "1,200" in page


def test_metrics() -> None:
    lines = exposition(told(summary='a "b"\\\n'), 1e9, 2.5).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values["dl2gpu_nightly_last_success_timestamp_seconds"] == "1000000000.0"
    assert values['dl2gpu_nightly_jobs{verdict="healthy"}'] == "1"
    assert values['dl2gpu_nightly_fingerprints{status="new",kind="cycle"}'] == "1"
    assert values['dl2gpu_nightly_gpu_hours_lost_by_team{team="a \\"b\\"\\\\\\n"}'] == "4.0"
    kinds = [line for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds)) == 9


def test_owner_of_nothing(tmp_path: Path) -> None:
    config = Config(Scan(["x"]), Output(str(tmp_path)), owners=(Owner("a*", "t"),))
    assert [config.team_of(j) for j in ("a1", "b")] == ["t", None]
