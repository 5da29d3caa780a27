"""A report in the forms of other tools: well formed, complete, and nothing of a trace is syntax."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from report.test_html import HOSTILE, hostile_report

from dl2gpu.report.exports import FORMS, export
from dl2gpu.report.graph_model import picture_of
from dl2gpu.report.model import KINDS, Report
from dl2gpu.report.save import ReportError
from dl2gpu.report.words import DEADLOCKS
from dl2gpu.scan import scan

__all__ = ["hostile_report"]  # a fixture

GRAPHML = {"g": "http://graphml.graphdrawing.org/xmlns"}


@pytest.fixture(scope="module")
def demo_report(demo: Path) -> Report:
    return scan([str(demo)])


def finding(report: Report, kind: str) -> dict[str, Any]:
    return next(f for f in report.findings.to_dicts() if f["kind"] == kind)


def test_every_form_of_every_finding(demo_report: Report, hostile_report: Report) -> None:
    for report in (demo_report, hostile_report):
        for ident in report.findings["id"]:
            for form in FORMS:
                text = export(report, form, ident)
                assert text.endswith("\n")
                assert not re.search("[\x00-\x08\x0b-\x1f\u202e\u2028]", text), form


def test_unknown_finding_and_form(demo_report: Report) -> None:
    with pytest.raises(ReportError, match="found none"):
        export(demo_report, "dot", "f99")
    with pytest.raises(ValueError, match="expected one of markdown"):
        export(demo_report, "pdf")


# --------------------------------------------------------------------------------------------------
# Graphs


def tokens_of_dot(text: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Vertices and edges; raises where a line is no statement of the few that are written."""
    string = r'"(?:[^"\\\n]|\\.)*"'
    attributes = rf"\[(?:\w+=(?:{string}|[\w.]+)(?:, )?)+\]"
    vertices, edges = [], []
    for line in text.splitlines():
        if hit := re.fullmatch(rf"\s*(n\d+) {attributes};", line):
            vertices.append(hit[1])
        elif hit := re.fullmatch(rf"\s*(n\d+) -> (n\d+)(?: {attributes})?;", line):
            edges.append((hit[1], hit[2]))
        else:
            assert re.fullmatch(
                rf"\s*(digraph waits_for {{|subgraph cluster_circle {{|}}"
                rf"|(node|edge) {attributes};?( edge {attributes};)?"
                rf"|(\w+=({string}|\w+); ?)+)",
                line,
            ), line
    return vertices, edges


def test_dot_and_graphml_hold_the_same_graph(demo_report: Report, hostile_report: Report) -> None:
    for report in (demo_report, hostile_report):
        for f in report.findings.to_dicts():
            picture = picture_of(f)
            vertices, edges = tokens_of_dot(export(report, "dot", f["id"]))
            assert sorted(vertices) == sorted(f"n{i}" for i in range(len(picture.boxes)))
            assert edges == [(f"n{a}", f"n{b}") for a, b in picture.edges]
            root = ET.fromstring(export(report, "graphml", f["id"]))
            nodes = root.findall(".//g:node", GRAPHML)
            assert [n.get("id") for n in nodes] == [f"n{i}" for i in range(len(picture.boxes))]
            titles = [n.findtext("g:data[@key='title']", None, GRAPHML) for n in nodes]
            assert titles == [b.title for b in picture.boxes]
            drawn = root.findall(".//g:edge", GRAPHML)
            assert [(e.get("source"), e.get("target")) for e in drawn] == edges
            circle = [e for e in drawn if e.findtext("g:data", None, GRAPHML) == "true"]
            assert len(circle) == (picture.circle if picture.circle > 1 else 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pydot's parser
def test_networkx_and_graphviz_read_them(demo_report: Report, tmp_path: Path) -> None:
    networkx = pytest.importorskip("networkx", reason="NetworkX is not installed")
    pydot = pytest.importorskip("pydot", reason="pydot is not installed")
    f = finding(demo_report, "order_inversion")
    (tmp_path / "g.graphml").write_text(export(demo_report, "graphml", f["id"]))
    graph = networkx.read_graphml(tmp_path / "g.graphml")
    assert len(networkx.find_cycle(graph)) == 4
    (drawn,) = pydot.graph_from_dot_data(export(demo_report, "dot", f["id"]))
    assert len(drawn.get_edges()) == 4


# --------------------------------------------------------------------------------------------------
# Perfetto


@pytest.fixture(scope="module")
def trace(demo_report: Report) -> dict[str, Any]:
    f = finding(demo_report, "order_inversion")
    parsed: dict[str, Any] = json.loads(export(demo_report, "perfetto", f["id"]))
    return parsed


def test_trace_has_a_process_a_rank_and_its_names(trace: dict[str, Any]) -> None:
    rows = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in rows if e["name"] == "process_name"}
    assert names == {r: f"rank {r} (named as a cause)" for r in range(4)}
    threads = {(e["pid"], e["tid"]) for e in rows if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in rows if e["ph"] in "Xstf"} <= threads
    assert trace["otherData"]["clock"] == "each rank's own host"


def test_what_stands_lasts_to_the_end_and_the_circle_is_marked(trace: dict[str, Any]) -> None:
    rows = trace["traceEvents"]
    slices = [e for e in rows if e["ph"] == "X"]
    end = max(e["ts"] + e["dur"] for e in slices)
    stands = [e for e in slices if e["cat"] == "stands"]
    assert len(stands) == 4
    assert all(e["ts"] + e["dur"] == pytest.approx(end) for e in stands)
    assert {e["name"] for e in stands} == {
        "all_to_all #15 (stands here)", "all_reduce #8 (stands here)",
    }  # fmt: skip
    marks = [(e["pid"], e["name"]) for e in rows if e["ph"] == "i"]
    assert marks == [(r, f"waits for rank {n}") for r, n in ((0, 1), (1, 3), (3, 2), (2, 0))]
    arrows = [
        (e["id"], e["ph"], e["pid"]) for e in rows if e.get("cat") == "cycle" and e["ph"] in "sf"
    ]
    assert arrows == [
        ("c0", "s", 0), ("c0", "f", 1), ("c1", "s", 1), ("c1", "f", 3),
        ("c2", "s", 3), ("c2", "f", 2), ("c3", "s", 2), ("c3", "f", 0),
    ]  # fmt: skip


def test_traces_of_all_findings_are_whole(demo_report: Report) -> None:
    """Slices of a thread do not overlap; flows begin and end once, inside slices."""
    messages = 0
    for f in demo_report.findings.to_dicts():
        rows = json.loads(export(demo_report, "perfetto", f["id"]))["traceEvents"]
        threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for e in rows:
            if e["ph"] == "X":
                assert e["dur"] > 0
                threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
        assert threads, f["id"]
        for spans in threads.values():
            spans.sort()
            assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))
        flows: dict[str, list[dict[str, Any]]] = {}
        for e in rows:
            if e["ph"] in "stf":
                flows.setdefault(e["id"], []).append(e)
                inside = threads[e["pid"], e["tid"]]
                assert any(a <= e["ts"] <= b for a, b in inside)
        for steps in flows.values():
            assert [s["ph"] for s in steps] == ["s", *["t"] * (len(steps) - 2), "f"]
        messages += sum(steps[0]["name"] == "message" for steps in flows.values())
    assert messages


# --------------------------------------------------------------------------------------------------
# SARIF


def test_sarif_names_the_lines(demo_report: Report) -> None:
    log = json.loads(export(demo_report, "sarif"))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = [r["id"] for r in run["tool"]["driver"]["rules"]]
    assert rules == [k for k in KINDS if k != "healthy"]
    assert len(run["results"]) == demo_report.findings.height
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert (result["level"] == "error") == (result["ruleId"] in DEADLOCKS)
        assert result["partialFingerprints"]["dl2gpu/v1"]
        for place in result["locations"]:
            at = place["physicalLocation"]
            assert at["region"]["startLine"] > 0
            assert re.fullmatch(r"[\w/.~%:-]+", at["artifactLocation"]["uri"])
    (result,) = (r for r in run["results"] if r["ruleId"] == "init_cycle")
    at = result["locations"][0]["physicalLocation"]
    assert at["artifactLocation"] == {"uri": "lab/weights.py", "uriBaseId": "%SRCROOT%"}
    assert at["region"]["startLine"] == 122
    assert len(result["codeFlows"][0]["threadFlows"][0]["locations"]) == 2
    (one,) = json.loads(export(demo_report, "sarif", result["properties"]["finding"]))["runs"]
    assert [r["ruleId"] for r in one["results"]] == ["init_cycle"]


def test_sarif_of_hostile_paths(hostile_report: Report) -> None:
    for result in json.loads(export(hostile_report, "sarif"))["runs"][0]["results"]:
        for place in result["locations"]:
            uri = place["physicalLocation"]["artifactLocation"]["uri"]
            assert not set(uri) & set("<>\"'{} ")


# --------------------------------------------------------------------------------------------------
# JUnit


def test_junit_has_a_case_a_job(demo_report: Report) -> None:
    root = ET.fromstring(export(demo_report, "junit"))
    cases = root.findall(".//testcase")
    jobs = [c for c in cases if c.get("classname") == "dl2gpu.jobs"]
    assert [c.get("name") for c in jobs] == demo_report.jobs["job"].to_list()
    failed = {c.get("name") for c in jobs if c.find("failure") is not None}
    wrong = demo_report.jobs.filter(demo_report.jobs["verdict"].is_in(DEADLOCKS))
    assert failed == set(wrong["job"])
    counts = Counter(child.tag for c in cases for child in c)
    assert root.get("tests") == str(len(cases))
    assert root.get("failures") == str(counts["failure"])
    assert root.get("errors") == str(counts["error"]) == "1"  # the upload that was quarantined
    assert "culprits" in (jobs[0].findtext("system-out") or "")
    first = finding(demo_report, "mismatch")
    one = ET.fromstring(export(demo_report, "junit", first["id"]))
    assert [c.get("name") for c in one.findall(".//testcase")] == [first["job"]]


# --------------------------------------------------------------------------------------------------
# Markdown


def test_markdown_says_what_a_ticket_needs(demo_report: Report) -> None:
    f = finding(demo_report, "order_inversion")
    text = export(demo_report, "markdown", f["id"])
    assert text.startswith("## Order inversion in `two-groups-inverted`\n")
    for part in (
        "### The circle",
        "### What to do",
        f["fingerprint"],
        "`/workspace/lab/emb.py:379",
    ):
        assert part in text
    assert export(demo_report, "markdown").count("\n## ") == demo_report.findings.height - 1


def test_markdown_of_hostile_text_is_text(hostile_report: Report) -> None:
    """Outside code spans nothing is markup; nobody is mentioned."""
    text = export(hostile_report, "markdown")
    assert HOSTILE[:9] in text
    for line in text.splitlines():
        bare = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", line)
        assert not re.search(r"(?<!\\)[<>\[\]|]", bare), line
    report = Report(
        hostile_report.findings.with_columns(summary=_literal("@team # [a](b) *x*\n# head")),
        hostile_report.jobs, hostile_report.inputs, hostile_report.summary,
    )  # fmt: skip
    line = export(report, "markdown", report.findings["id"][0]).splitlines()[2]
    assert line == "@\u200bteam # \\[a\\](b) \\*x\\*\\\\n# head"


def _literal(text: str) -> Any:
    import polars as pl

    return pl.lit(text)


def test_empty_report() -> None:
    assert export(Report(), "markdown") == "No findings.\n"
    assert json.loads(export(Report(), "sarif"))["runs"][0]["results"] == []
    assert ET.fromstring(export(Report(), "junit")).get("tests") == "0"
    with pytest.raises(ReportError, match="healthy"):
        export(Report(), "dot")
