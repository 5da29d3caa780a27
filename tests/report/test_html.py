"""The web pages: one file each, nothing from outside, nothing from a trace but text."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import polars as pl
import pytest

from dl2gpu.report import html
from dl2gpu.report.exports import export
from dl2gpu.report.graph_layout import NARROW, WIDE, draw
from dl2gpu.report.graph_model import Box, Picture, picture_of
from dl2gpu.report.graph_text import fit, fit_site, width
from dl2gpu.report.graph_timeline import timeline_of
from dl2gpu.report.html import History
from dl2gpu.report.html_overview import measured, team_of
from dl2gpu.report.model import FINDINGS, JOBS, Report
from dl2gpu.scan import scan

HOSTILE = (
    "</script><script>boom()</script><img src=x onerror=boom()>\"' {{ 7*7 }} {% raw %} "
    "javascript:boom() \u202e\x1b[31m\u2028 &lt;b&gt;"
)


class Page(HTMLParser):
    """What a browser would see: elements, visible text, scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.path = path
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self.text: list[str] = []
        self._in = ""
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        if tag in self.raw:
            self._in = tag
            self.raw[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._in:
            self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in:
            self.raw[self._in][-1] += data
        else:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.elements if name == tag]

    def data(self, ident: str) -> Any:
        """The JSON inside the page of this id."""
        at = [s.get("id") for s in self.all("script")].index(ident)
        return json.loads(self.raw["script"][at])


def pages(folder: Path) -> list[Page]:
    return [Page(p) for p in sorted(folder.rglob("*.html"))]


@pytest.fixture(scope="module")
def demo_pages(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pages") / "out"
    scan([str(demo)]).save(out)
    return out


def many(n: int, faults: int, make_report: Callable[..., Report]) -> Report:
    """A report of n jobs, all with a finding, of some faults."""
    finding = dict.fromkeys(FINDINGS) | {
        "attempt": 0, "evidence": "proven", "culprits": [1], "victims": [0], "cycle": [],
        "hangs_at": [], "advice": "Do.", "kind": "mismatch", "gpu_hours_lost": 1.5,
    }  # fmt: skip
    job = dict.fromkeys(JOBS) | {
        "attempt": 0, "world_size": 2, "ranks_present": [0, 1], "ranks_missing": [], "events": 4,
        "source_format": "native", "verdict": "mismatch", "deadlocked": True,
    }  # fmt: skip
    return make_report(
        [
            finding
            | {"id": f"f{i}", "job": f"job-{i}", "fingerprint": f"{i % faults}", "summary": f"S{i}"}
            for i in range(n)
        ],
        [job | {"job": f"job-{i}", "folder": f"job-{i}", "findings": [f"f{i}"]} for i in range(n)],
        [],
    )


# --------------------------------------------------------------------------------------------------
# Every page


def test_a_page_for_each_finding_and_every_link_leads_somewhere(demo_pages: Path) -> None:
    report = Report.load(demo_pages)
    all_pages = pages(demo_pages)
    assert len(all_pages) == 1 + report.findings.height
    for page in all_pages:
        ids = {attrs["id"] for _, attrs in page.elements if "id" in attrs}
        for link in page.all("a"):
            target = urlsplit(link["href"])
            assert not target.scheme
            assert not target.netloc
            if target.path:
                assert (page.path.parent / unquote(target.path)).is_file()
            else:
                assert target.fragment in ids
    table = Page(demo_pages / "index.html").data("d-jobs")["columns"]
    assert all((demo_pages / p).is_file() for p in table["page"] if p)
    with_findings = {j["job"] for j in report.jobs.to_dicts() if j["findings"]}
    assert {j for j, p in zip(table["job"], table["page"], strict=True) if p} == with_findings


def test_pages_load_nothing_and_allow_only_their_own_script(demo_pages: Path) -> None:
    for page in pages(demo_pages):
        (policy,) = (
            m["content"]
            for m in page.all("meta")
            if m.get("http-equiv") == "Content-Security-Policy"
        )
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        for tag, kind in (("script", "script-src"), ("style", "style-src")):
            run = [
                text
                for attrs, text in zip(page.all(tag), page.raw[tag], strict=True)
                if attrs.get("type") != "application/json"
            ]
            hashes = re.search(rf"{kind} ([^;]+);", policy)
            assert hashes is not None
            assert [
                f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'"
                for t in run
            ] == hashes[1].split()
        for _, attrs in page.elements:
            assert not {k for k in attrs if k.startswith("on") or k in {"src", "style", "srcset"}}
        assert all(link["href"] == "data:," for link in page.all("link"))
        assert "url(http" not in page.path.read_text("utf-8")
        assert "http" not in " ".join(page.raw["style"] + page.raw["script"])


def test_pages_have_what_readers_of_all_kinds_need(demo_pages: Path) -> None:
    for page in pages(demo_pages):
        assert page.all("html")[0]["lang"] == "en"
        assert len(page.all("h1")) == 1
        assert len(page.all("main")) == 1
        ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
        assert len(ids) == len(set(ids))
        for picture in page.all("svg"):
            named = picture.get("aria-label") or picture.get("aria-hidden") == "true"
            assert named, picture
        for head in page.all("th"):
            assert head["scope"] in {"col", "row", "rowgroup"}


def test_same_report_same_bytes(demo: Path, demo_pages: Path, tmp_path: Path) -> None:
    again = scan([str(demo)])
    again.save(tmp_path / "again")
    for page in demo_pages.rglob("*.html"):
        name = page.relative_to(demo_pages)
        assert (tmp_path / "again" / name).read_bytes() == page.read_bytes()


# --------------------------------------------------------------------------------------------------
# Hostile input


def hostile(value: Any) -> Any:
    """The value with every text in it hostile, and keys of objects as well."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, list):
        return [hostile(v) for v in value]
    if isinstance(value, dict):
        return {k: hostile(v) for k, v in value.items()} | {HOSTILE: HOSTILE}
    return value


@pytest.fixture(scope="module")
def hostile_report(demo: Path) -> Report:
    """The demo corpus with hostile text wherever a trace could put it."""
    report = scan([str(demo)])
    details = [
        msgspec.json.encode(hostile(msgspec.json.decode(d))).decode()
        for d in report.findings["details"]
    ]
    names = [f"{HOSTILE} {i}" for i in range(report.jobs.height)]
    of = dict(zip(report.jobs["job"], names, strict=True))
    steps = [[s | hostile_op(s) for s in c] for c in report.findings["cycle"].to_list()]
    hangs = [[s | hostile_op(s) for s in c] for c in report.findings["hangs_at"].to_list()]
    first = [None if s is None else s | hostile_op(s) for s in report.findings["first_divergence"]]
    text = pl.lit(HOSTILE)
    findings = report.findings.with_columns(
        pl.Series("details", details),
        pl.col("job").replace_strict(of),
        pl.Series("cycle", steps, dtype=FINDINGS["cycle"]),
        pl.Series("hangs_at", hangs, dtype=FINDINGS["hangs_at"]),
        pl.Series("first_divergence", first, dtype=FINDINGS["first_divergence"]),
        reason=text, condition=text, fingerprint=text, advice=text, summary=text,
        id=pl.col("id") + HOSTILE,
    )  # fmt: skip
    jobs = report.jobs.with_columns(
        pl.Series("job", names),
        folder=text,
        source_format=text,
        findings=pl.col("findings").list.eval(pl.element() + HOSTILE),
    )
    inputs = report.inputs.with_columns(path=text, reason=text, job=text)
    return Report(findings, jobs, inputs, report.summary | {"engine": HOSTILE, "notes": [HOSTILE]})


def hostile_op(s: dict[str, Any]) -> dict[str, Any]:
    return {"op": HOSTILE, "comm": HOSTILE, "stack": [f"{HOSTILE} /x.py:3", HOSTILE]}


def test_hostile_text_stays_text(hostile_report: Report, demo_pages: Path, tmp_path: Path) -> None:
    hostile_report.save(tmp_path / "out")
    plain = Page(demo_pages / "index.html")
    found = pages(tmp_path / "out")
    assert len(found) == 1 + hostile_report.findings.height
    for page in found:
        assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements} | {
            "code", "dd", "details", "figure", "li", "marker", "ol", "pre", "text", "title", "ul",
            "g", "defs", "b", "path", "summary", "br", "svg", "rect", "dl", "dt", "h3", "small",
            "section",
        }  # fmt: skip
        assert "boom()" in "".join(page.text + page.raw["script"])
        for _, attrs in page.elements:
            assert not {k for k in attrs if k.startswith("on")}
            for key in ("href", "src"):
                assert "boom" not in attrs.get(key, "")
        scripts = [s for s in page.all("script") if s.get("type") != "application/json"]
        assert len(scripts) == 1
        assert "49" not in [t.strip() for t in page.text]
        assert not re.search("[\u202e\u2028\x1b]", page.path.read_text("utf-8"))
        assert page.path.name == "index.html" or re.fullmatch(r"finding_\d+\.html", page.path.name)
    names = Page(tmp_path / "out" / "index.html").data("d-jobs")["columns"]["job"]
    assert all("</script><script>boom()" in name for name in names)


@pytest.mark.parametrize(
    "details",
    [
        {"graph": 3, "timeline": [1]},
        {"graph": {"texts": [], "groups": [], "edges": []}},
        {
            "graph": {
                "texts": ["a"],
                "groups": [{"role": "cycle", "count": -4, "op": 99}],
                "edges": [[0, 7], [-1, 0]],
            }
        },
        {
            "graph": {
                "texts": [],
                "groups": [{"role": "x", "count": 10**18, "ranks": [[0, 10**18]]}],
                "edges": [],
            }
        },
        {"timeline": {"texts": ["x"], "events": [[0] * 14]}},
        {
            "timeline": {
                "texts": ["x"],
                "events": [[0, 0, 0, 9, 9, None, -5, 1, 7, 55, 0, 1, 2, -1]],
            }
        },
        {"timeline": {"texts": [], "events": [[0] * 13]}},
        {"last_operations": {"0": [{"stack": 5, "seq": {}}, 7], "1": 3}},
        {"signatures": [1, {"ranks": "all"}, {"stack": [1, 2]}], "aspects": 4, "unmatched": {}},
        {"signatures": [{"ranks": [1, "a"]}, {"ranks": [2], "op": 7, "site": 3, "root": {}}]},
        {"divergence": {"expected": 3, "found": {"rank": []}}, "missing_ranks": ["a", 1]},
        {"older_records": [None], "in_other_attempts": [1], "places": "many"},
        [1, 2],
        "text",
    ],
)
def test_details_of_any_shape(report: Report, tmp_path: Path, details: Any) -> None:
    """A report.json that somebody changed makes a page all the same."""
    text = pl.lit(json.dumps(details))
    changed = Report(
        report.findings.with_columns(details=text), report.jobs, report.inputs, report.summary
    )
    changed.save(tmp_path / "out")
    assert len(pages(tmp_path / "out")) == 4


# --------------------------------------------------------------------------------------------------
# Thousands of findings


def test_of_thousands_of_findings_each_fault_has_pages(
    make_report: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "MOST_PAGES", 20)
    report = many(300, 7, make_report)
    report.save(tmp_path / "out")
    (folder,) = (tmp_path / "out").glob("findings-*/")
    shown = {int(p.stem[1:]) for p in folder.iterdir()}
    assert len(shown) == 20
    assert (
        sorted(i % 7 for i in shown) == sorted([*range(7)] * 3)[:20]
        or len({i % 7 for i in shown}) == 7
    )
    columns = Page(tmp_path / "out" / "index.html").data("d-jobs")["columns"]
    for ident, page in zip(columns["id"], columns["page"], strict=True):
        number = int(re.fullmatch(r"findings-\w+/f(\d+)\.html", page)[1])  # type: ignore[index]
        assert number in shown
        assert number % 7 == int(ident[1:]) % 7  # its own page, or one of the same fault
    assert all(page.endswith(f"/f{i}.html") for i in shown for page in [page_of(columns, i)])


def page_of(columns: dict[str, list[Any]], number: int) -> str:
    return str(columns["page"][columns["id"].index(f"f{number}")])


def test_more_faults_than_pages(
    make_report: Callable[..., Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "MOST_PAGES", 5)
    many(30, 30, make_report).save(tmp_path / "out")
    columns = Page(tmp_path / "out" / "index.html").data("d-jobs")["columns"]
    assert sum(bool(p) for p in columns["page"]) == 5


# --------------------------------------------------------------------------------------------------
# The overview


def test_overview_counts_what_the_report_holds(demo_pages: Path) -> None:
    report = Report.load(demo_pages)
    page = Page(demo_pages / "index.html")
    text = " ".join(" ".join(page.text).split())
    dead = int(report.jobs["deadlocked"].sum())
    assert f"{dead} of {report.jobs.height} jobs deadlocked" in text
    assert "pickle opcode GLOBAL" in text
    assert {b["data-verdict"] for b in page.all("button") if "data-verdict" in b} == {
        str(i) for i in range(report.jobs["verdict"].n_unique())
    }


def test_calculator_starts_from_what_was_measured(report: Report, tmp_path: Path) -> None:
    assert measured(report) == [(4, 1.5)]
    report.save(tmp_path / "out")
    data = Page(tmp_path / "out" / "index.html").data("d-cost")
    assert data == {
        "pairs": [[4, 0.375]], "fleet": 16, "hangs": 1, "minutes": 22.5, "longest": 22.5,
        "price": None,
    }  # fmt: skip
    report.save(tmp_path / "priced", price=2.5)
    assert Page(tmp_path / "priced" / "index.html").data("d-cost")["price"] == 2.5


def test_nothing_measured_nothing_calculated(
    make_report: Callable[..., Report], tmp_path: Path
) -> None:
    make_report([], [], []).save(tmp_path / "out")
    page = Page(tmp_path / "out" / "index.html")
    assert page.data("d-cost")["pairs"] == []
    assert "nothing measured" in " ".join(page.text)
    assert not list((tmp_path / "out").glob("findings-*"))


def test_measured_stops_of_a_fleet_are_few_numbers(
    make_report: Callable[..., Report], tmp_path: Path
) -> None:
    many(2000, 2, make_report).save(tmp_path / "out")
    data = Page(tmp_path / "out" / "index.html").data("d-cost")
    assert len(data["pairs"]) == 256
    assert data["hangs"] == 2000


@pytest.mark.parametrize(
    ("job", "folder", "expected"),
    [
        ("team=vision,swin-7", None, ("team", "vision")),
        ("run-3", "prod/owner=nlp/run-3", ("owner", "nlp")),
        ("vision/swin/7", None, ("group", "vision")),
        ("run", "nlp/gpt/run", ("group", "nlp")),
        ("steam=7", None, None),
        ("gpt2-ddp", "gpt2-ddp", None),
        (None, None, None),
        ("x_model=gpt2", None, ("model", "gpt2")),
    ],
)
def test_team_is_what_the_name_says(
    job: str | None, folder: str | None, expected: tuple[str, str] | None
) -> None:
    assert team_of(job, folder) == expected


def test_teams_of_names_and_of_owners(make_report: Callable[..., Report], tmp_path: Path) -> None:
    report = many(4, 1, make_report)
    named = Report(
        report.findings,
        report.jobs.with_columns(folder=pl.Series(["a/1", "a/2", "b/3", "4"])),
        report.inputs,
        report.summary,
    )
    named.save(tmp_path / "named")
    assert Page(tmp_path / "named" / "index.html").data("d-jobs")["teams"] == ["a", "b"]
    named.save(tmp_path / "owned", owners={"job-1": "ours"})
    data = Page(tmp_path / "owned" / "index.html").data("d-jobs")
    assert data["teams"] == ["ours"]
    assert data["columns"]["team"] == [None, 0, None, None]


def test_history_shows_nights_and_what_is_new(report: Report, tmp_path: Path) -> None:
    nights = [dt.date(2026, 11, day) for day in range(1, 31)]
    history = History(
        pl.DataFrame(
            {
                "night": nights * 2,
                "verdict": ["cycle"] * 30 + ["healthy"] * 30,
                "jobs": [*range(30), *[5000] * 30],
            }
        ),
        pl.DataFrame(
            {
                "fingerprint": ["fp-cycle"], "status": ["regressed"], "first_seen": [nights[3]],
                "last_seen": [nights[-1]], "nights": [7], "jobs": [12],
            }
        ),
    )  # fmt: skip
    report.save(tmp_path / "out", history=history)
    text = " ".join(Page(tmp_path / "out" / "index.html").text)
    assert "2026-11-30" in text
    assert "regressed" in text
    assert "since 2026-11-04" in text
    assert "5,000" in text


# --------------------------------------------------------------------------------------------------
# Pictures


def picture(circle: int, waits: int, root: bool = False) -> Picture:
    boxes = [
        Box("cycle", f"rank {i}", "host", f"send #{i}", "pp", "a.py:1 in f", 1)
        for i in range(circle)
    ]
    boxes += [Box("waits", f"ranks {i}", "host", "recv", "", "", 9) for i in range(waits)]
    edges = [(i, (i + 1) % circle) for i in range(circle)]
    if root:
        boxes.append(Box("root", "rank 9", "", "died", count=1))
        edges += [(i, len(boxes) - 1) for i in range(waits)]
    elif circle:
        edges += [(circle + i, max(circle + i - 1, 0) if i else 0) for i in range(waits)]
    return Picture(tuple(boxes), tuple(edges))


@pytest.mark.parametrize("size", [WIDE, NARROW])
@pytest.mark.parametrize("circle", [0, 1, 2, 3, 4, 5, 7, 8, 9, 40])
@pytest.mark.parametrize("waits", [0, 1, 3, 30])
def test_boxes_lie_inside_and_apart(circle: int, waits: int, size: int) -> None:
    drawing = draw(picture(circle, waits, root=not circle), size)
    assert 0 < drawing.height <= 1100
    for box in drawing.boxes:
        assert box.x >= 0
        assert box.x + box.w <= size
        assert box.y >= 0
        assert box.y + box.h <= drawing.height
        assert all(line for _, line in box.lines)
    for i, a in enumerate(drawing.boxes):
        for b in drawing.boxes[:i]:
            apart = a.x + a.w <= b.x or b.x + b.w <= a.x or a.y + a.h <= b.y or b.y + b.h <= a.y
            assert apart, (a, b)
    assert len(drawing.boxes) <= 8 + 3 * 4
    shown = min(circle, 8)
    assert sum(a.circle for a in drawing.arrows) == (shown if shown > 1 else 0)


def test_frames_say_what_is_in_them() -> None:
    assert draw(picture(3, 1)).label == "the circle: 3 places wait for each other"
    assert draw(picture(0, 2, root=True)).label == "what the others wait for"
    assert draw(picture(0, 2)).label == "where they stand"
    assert not draw(picture(0, 2)).arrows


def test_findings_without_a_graph_have_a_picture(report: Report) -> None:
    for f in report.findings.iter_rows(named=True):
        boxes = picture_of(f).boxes
        assert boxes
        if f["cycle"]:
            assert [b.title for b in boxes if b.role == "cycle"] == ["rank 0", "rank 1"]


def test_every_finding_of_the_cases_has_its_pictures(shared: Path, tmp_path: Path) -> None:
    """Each with a picture; timelines in which what met stands in one column."""
    report = scan([str(shared / "cases")])
    report.save(tmp_path / "out")
    assert len(pages(tmp_path / "out")) == 1 + report.findings.height
    for f in report.findings.iter_rows(named=True):
        details = json.loads(f["details"])
        drawn = picture_of(f, details)
        assert drawn.boxes, f["id"]
        for size in (WIDE, NARROW):
            assert draw(drawn, size).height < 1100
        line = timeline_of(details)
        if line is None:
            continue
        spots = [(c.x, c.y) for c in line.cells]
        assert len(spots) == len(set(spots)), f["id"]
        assert len(line.rows) <= 8


def test_picture_of_4096_ranks_is_as_small_as_that_of_4(
    make_report: Callable[..., Report], report: Report, tmp_path: Path
) -> None:
    f = report.findings.row(by_predicate=pl.col("id") == "m1", named=True)
    hangs = [f["hangs_at"][0] | {"rank": r} for r in range(4096) if r != 3]
    f |= {"victims": [h["rank"] for h in hangs], "hangs_at": hangs, "details": "{}"}
    big = make_report([f], report.jobs.filter(pl.col("job") == "uneven").to_dicts(), [])
    big.save(tmp_path / "out")
    (page,) = (tmp_path / "out").glob("findings-*/*.html")
    assert page.stat().st_size < 60_000
    assert "4,095 ranks: 0-2, 4-4095" in page.read_text()


def test_text_is_cut_to_its_room() -> None:
    wide = "\N{CJK UNIFIED IDEOGRAPH-4E00}" * 40
    for text in ("", "all_reduce #7", "PIPELINE_MODEL_PARALLEL_GROUP (43)", wide):
        for room in (20, 60, 200):
            cut = fit(text, room, 12)
            assert width(cut, 12) <= room
            assert cut == text or cut.endswith("\N{HORIZONTAL ELLIPSIS}")
    site = "/workspace/lab/compile.py:41 in agree_shapes"
    wanted = [site, "compile.py:41 in agree_shapes", "compile.py:41"]
    assert [fit_site(site, r, 10) for r in (400, 200, 100)] == wanted


def test_every_style_sheet_closes_what_it_opens() -> None:
    for path in Path(html.__file__).with_name("templates").glob("*.css"):
        text = path.read_text()
        depth = [text[: i + 1].count("{") - text[: i + 1].count("}") for i in range(len(text))]
        assert min(depth) >= 0
        assert depth[-1] == 0
        assert text.endswith((";\n", "}\n"))


def test_what_ranks_did_last_stands_on_the_right() -> None:
    """Each rank's operations in order; those that met in one column; the last ones at the end."""
    rows = [
        [0, 0, 0, 0, None, None, None, None, None, 0, 0, None, None, None],
        [0, 0, 1, 0, None, None, None, None, None, 1, None, None, None, None],
        [1, 0, 0, 0, None, None, None, None, None, 0, None, None, None, None],
        [1, 0, 1, 0, None, None, None, None, None, 0, 0, None, None, None],
        [2, 0, 7, 0, None, None, None, None, None, 0, None, None, None, None],
    ]
    line = timeline_of({"timeline": {"texts": ["send"], "events": rows}}, {"rank": 0, "seq": 1})
    assert line is not None
    x = {(c.y, c.x) for c in line.cells}
    columns = sorted({c.x for c in line.cells})
    assert [columns.index(c.x) for c in line.cells] == [1, 2, 0, 1, 2]
    assert len(x) == 5
    assert [c.parted for c in line.cells] == [False, True, False, False, False]
    crossed = [r[:] for r in rows[:4]]
    crossed[1][9:11] = [0, 1]
    crossed[2][10] = 1  # rank 0 passed 0 then 1, rank 1 the other way round
    line = timeline_of({"timeline": {"texts": ["send"], "events": crossed}})
    assert line is not None
    assert len({(c.y, c.x) for c in line.cells}) == 4


def test_a_page_by_itself_leads_nowhere(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "one.html"
    path.write_text(export(report, "html", "c1"))
    page = Page(path)
    assert [a["href"] for a in page.all("a")] == ["#main"]
    assert "inverted-a" in page.text
