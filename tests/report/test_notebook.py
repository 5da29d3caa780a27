"""Reports and findings in notebooks: HTML that disturbs nothing, and the example that runs."""

from __future__ import annotations

import ast
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report.test_html import hostile_report

import dl2gpu
from dl2gpu.report.model import Report
from dl2gpu.report.save import ReportError

__all__ = ["hostile_report"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "report.ipynb"


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass


def test_fragments_are_one_element_without_script(report: Report, hostile_report: Report) -> None:
    for given in (report, hostile_report, Report()):
        texts = [given._repr_html_()]
        texts += [given.explain(i)._repr_html_() for i in given.findings["id"]]
        for text in texts:
            parsed = Elements(text)
            assert parsed.names[0] == ("div", {"class": "dl2gpu"})
            assert not parsed.open
            assert not {tag for tag, _ in parsed.names} & {"script", "iframe", "img", "link", "a"}
            assert not {k for _, attrs in parsed.names for k in attrs if k.startswith("on")}
            style = text[text.index("<style>") + 7 : text.index("</style>")]
            assert style.startswith(".dl2gpu{")  # and concerns nothing around it
            assert style.endswith("}")
            depth = [
                style[: i + 1].count("{") - style[: i + 1].count("}") for i in range(len(style))
            ]
            assert min(depth[8:-1]) == 1


def test_a_finding_prints_as_text_and_names_itself(report: Report) -> None:
    finding = report.explain("m1")
    assert repr(finding) == "<finding m1: mismatch in 'uneven'>"
    assert "last operations of each rank" in str(finding)
    assert finding.to("markdown").startswith("## Mismatch in `uneven`")
    assert report.explain().row["kind"] == "cycle"  # the gravest
    with pytest.raises(ReportError, match="found none"):
        report.explain("nothing")


def cells() -> list[str]:
    notebook = json.loads(EXAMPLE.read_text())
    assert not any(c.get("outputs") for c in notebook["cells"])  # renewed by whoever runs it
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def test_cells_of_the_example_run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """In this process; every value that a cell shows has a form to show."""
    monkeypatch.chdir(EXAMPLE.parent)
    names: dict[str, Any] = {}
    shown = []
    for source in cells():
        *body, last = ast.parse(source).body
        exec(compile(ast.Module(body, []), EXAMPLE.name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), EXAMPLE.name, "eval"), names)
            shown.append(value)
        else:
            exec(compile(ast.Module([last], []), EXAMPLE.name, "exec"), names)
    assert isinstance(shown[0], dl2gpu.Report)
    assert all(hasattr(v, "_repr_html_") for v in shown if v is not None and type(v) is not int)
    assert "Rank 5 left out" in capsys.readouterr().out


def test_example_runs_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    notebook = nbformat.read(EXAMPLE, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        startup_timeout=300,  # a busy machine
        resources={"metadata": {"path": str(EXAMPLE.parent)}},
    )
    client.execute()
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    html = [o.data["text/html"] for o in outputs if "text/html" in o.get("data", {})]
    assert sum('<div class="dl2gpu">' in h for h in html) == 2
