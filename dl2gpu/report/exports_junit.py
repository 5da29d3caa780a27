"""The report as JUnit XML, which CI systems show: a test case a job.

A deadlock is a failure, files that could not be used are an error, too little evidence is skipped,
and everything else passes with its finding as output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from xml.etree import ElementTree as ET

import polars as pl

from dl2gpu.report.console import facts
from dl2gpu.report.model import Report
from dl2gpu.report.words import DEADLOCKS, job_label, safe

__all__ = ["junit"]

_FILES: Final = 1000  # files that are listed one by one


def junit(report: Report, ids: set[str] | None = None) -> str:
    """One suite of all jobs, or of those with findings among ``ids``; ``report`` is canonical."""
    findings = {f["id"]: f for f in report.findings.iter_rows(named=True)}
    suite = ET.Element("testsuite", {"name": "dl2gpu"})
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for job in report.jobs.iter_rows(named=True):
        mine = [findings[i] for i in job["findings"] or () if i in findings]
        if ids is not None and not ids & {f["id"] for f in mine}:
            continue
        counts["tests"] += 1
        _job(suite, job, mine, counts)
    if ids is None:
        broken = report.inputs.filter(pl.col("status") == "quarantined")
        for row in broken.head(_FILES).iter_rows(named=True):
            counts["tests"] += 1
            counts["errors"] += 1
            case = _case(suite, "dl2gpu.files", safe(row["path"], 300))
            ET.SubElement(
                case, "error", {"type": "quarantined", "message": safe(row["reason"] or "")}
            )
    for name, number in counts.items():
        suite.set(name, str(number))
    root = ET.Element("testsuites", {"name": "dl2gpu"} | {k: str(v) for k, v in counts.items()})
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ET.Element, of: str, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", {"classname": of, "name": name, "time": "0"})


def _job(
    suite: ET.Element,
    job: Mapping[str, Any],
    findings: list[dict[str, Any]],
    counts: dict[str, int],
) -> None:
    case = _case(suite, "dl2gpu.jobs", job_label(job))
    grave = [f for f in findings if f["kind"] in DEADLOCKS]
    for f in grave:
        node = ET.SubElement(
            case, "failure", {"type": f["kind"], "message": safe(f["summary"] or "", 500)}
        )
        node.text = _text(f)
    counts["failures"] += bool(grave)
    if grave:
        return
    weak = [f for f in findings if f["kind"] == "insufficient_evidence"]
    if weak:
        counts["skipped"] += 1
        ET.SubElement(case, "skipped", {"message": safe(weak[0]["summary"] or "", 500)})
    elif findings:
        out = ET.SubElement(case, "system-out")
        out.text = "\n\n".join(f"{safe(f['kind'], 60)}\n{_text(f)}" for f in findings)


def _text(f: Mapping[str, Any]) -> str:
    return "\n".join(f"{label or ' ':<12} {text}" for label, text in facts(f))
