"""The pages in a real browser: Chromium without a window, driven by Playwright.

Both are optional: ``pip install dl2gpu[browser]``, and a Chromium of the system, of Playwright, or
named by ``DL2GPU_CHROMIUM``. Without them these tests skip.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from report.test_html import HOSTILE, hostile_report, many

from dl2gpu.report.model import Report
from dl2gpu.scan import scan

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

__all__ = ["hostile_report"]  # a fixture


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, or a skip that says why."""
    named = os.environ.get("DL2GPU_CHROMIUM") or next(
        (path for name in NAMES if (path := shutil.which(name))), None
    )
    with playwright.sync_playwright() as driver:
        try:
            found = driver.chromium.launch(executable_path=named, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium that starts: {str(error).splitlines()[0]}")
        yield found
        found.close()


@dataclass
class Visit:
    """A page that is open, and what it did that it should not."""

    page: Any
    wrong: list[str] = field(default_factory=list)

    def open(self, path: Path) -> Any:
        self.page.goto(path.as_uri())
        return self.page

    def rows(self) -> list[str]:
        return list(self.page.locator("#jobs tbody tr td:first-child").all_inner_texts())


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Opens pages; at the end none has complained, asked for anything, or run what it held."""
    opened: list[tuple[Any, Visit]] = []

    def new(**options: Any) -> Visit:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        context.add_init_script("window.boom = () => console.error('boom ran')")
        visit = Visit(context.new_page())
        page, wrong = visit.page, visit.wrong
        page.on("console", lambda m: wrong.append(f"{m.type}: {m.text}"))
        page.on("pageerror", lambda e: wrong.append(f"error: {e}"))
        page.on("dialog", lambda d: wrong.append(f"dialog: {d.message}"))
        page.on(
            "request",
            lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(r.url),
        )
        page.on("requestfailed", lambda r: wrong.append(f"not found: {r.url}"))
        opened.append((context, visit))
        return visit

    yield new
    for context, visit in opened:
        context.close()
        assert not visit.wrong


@pytest.fixture(scope="module")
def demo_out(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("browser") / "out"
    scan([str(demo)]).save(out)
    return out


@pytest.fixture(scope="module")
def fleet_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10,000 jobs, each with a finding of one of five faults."""
    from conftest import make

    out = tmp_path_factory.mktemp("fleet") / "out"
    report = many(10_000, 5, make)
    jobs = report.jobs.with_columns(
        world_size=pl.int_range(pl.len(), dtype=pl.Int32) % 4096,
        folder=pl.format("team-{}/x", pl.int_range(pl.len()) % 20),
    )
    findings = report.findings.head(400)  # a fleet is mostly healthy
    healthy = jobs.with_columns(
        verdict=pl.when(pl.int_range(pl.len()) < 400).then("verdict").otherwise(pl.lit("healthy")),
        findings=pl.when(pl.int_range(pl.len()) < 400).then("findings").otherwise([]),
    )
    Report(findings, healthy, report.inputs, report.summary).save(out)
    return out


def test_open_sort_filter_follow(visit: Callable[..., Visit], demo_out: Path) -> None:
    v = visit()
    page = v.open(demo_out / "index.html")
    jobs = Report.load(demo_out).jobs
    assert len(v.rows()) == jobs.height
    assert v.rows()[0] == "two-groups-inverted"  # the gravest

    def sort(name: str) -> list[str]:
        page.locator("#jobs thead button", has_text=name).click()
        return v.rows()

    names = sorted(jobs["job"])
    assert sort("job") == names
    assert page.locator("#jobs th[aria-sort=ascending]").inner_text().strip() == "job"
    assert sort("job") == names[::-1]
    lost = sort("GPU-hours lost")
    assert lost[0] == "killed-rank"
    page.fill("#filter", "SWIN")
    assert v.rows() == ["swin-ddp-healthy"]
    assert page.locator("#shown").inner_text() == "1 of 15 jobs"
    page.fill("#filter", "no such job")
    assert v.rows() == []
    page.fill("#filter", "")
    page.get_by_role("button", name="mismatch").click()
    assert sorted(v.rows()) == ["gpt2-fsdp-eval-on-rank-0", "ring-buffer-wrapped"]
    page.get_by_role("button", name="mismatch").click()
    assert len(v.rows()) == jobs.height
    page.locator("#jobs a", has_text="mesh-2d-skipped-all-reduce").click()
    assert page.locator("h1").inner_text() == "mesh-2d-skipped-all-reduce"
    assert page.locator("svg.wide").is_visible()
    assert not page.locator("svg.narrow").is_visible()
    assert "rank 5" in page.locator("svg.wide").text_content()
    page.locator("#next").click()
    assert page.locator("h1").inner_text() != "mesh-2d-skipped-all-reduce"
    page.locator("#up").click()
    assert page.locator("#jobs").is_visible()


def test_every_page_opens(visit: Callable[..., Visit], demo_out: Path) -> None:
    v = visit()
    for path in sorted(demo_out.rglob("*.html")):
        page = v.open(path)
        assert page.locator("h1").is_visible()
        for summary in page.locator("summary").all():
            summary.click()


def test_hostile_names_stay_text(
    visit: Callable[..., Visit], hostile_report: Report, tmp_path: Path
) -> None:
    hostile_report.save(tmp_path / "out")
    v = visit()
    page = v.open(tmp_path / "out" / "index.html")
    assert all("<script>boom()</script><img src=x" in name for name in v.rows())
    assert page.locator("img").count() == 0
    page.fill("#filter", "<img src=x")
    assert len(v.rows()) == hostile_report.jobs.height
    page.locator("#jobs a").first.click()
    assert "<img src=x onerror=boom()>" in page.locator("h1").inner_text()
    for path in sorted((tmp_path / "out").rglob("finding*.html")):
        v.open(path)
        assert page.locator("img, script:not([type]):not(:last-of-type)").count() == 0
        assert HOSTILE[:20] in page.locator("main").inner_text()


def test_ten_thousand_jobs(visit: Callable[..., Visit], fleet_out: Path) -> None:
    v = visit()
    page = v.open(fleet_out / "index.html")
    assert len(v.rows()) == 50
    assert page.locator("#shown").inner_text() == "10,000 jobs"
    page.locator("#jobs thead button", has_text="ranks").click()
    assert v.rows()[0] == "job-4095"
    page.get_by_role("button", name="On", exact=True).click()
    assert page.locator("#at").inner_text() == "51 to 100"
    page.select_option("#size", "1000")
    assert len(v.rows()) == 1000
    page.fill("#filter", "job-99 healthy")
    assert sorted(v.rows()) == sorted(f"job-{i}" for i in [*range(990, 1000), *range(9900, 10_000)])
    page.fill("#filter", "")
    page.select_option("#team", label="team-3")
    assert page.locator("#shown").inner_text() == "500 of 10,000 jobs"
    page.select_option("#size", "25")
    assert page.get_by_role("button", name="Back").is_disabled()


def test_calculator_starts_from_what_was_measured(
    visit: Callable[..., Visit], report: Report, tmp_path: Path
) -> None:
    report.save(tmp_path / "out")
    page = visit().open(tmp_path / "out" / "index.html")
    assert page.locator("#n-fleet").input_value() == "16"
    assert page.locator("#n-minutes").input_value() == "22.5"
    assert page.locator("#n-hangs").input_value() == "1"
    assert page.locator("#o-now").inner_text() == "1.5 GPU-hours"
    assert page.locator("#o-then").inner_text() == "1.5 GPU-hours"  # nobody was told earlier
    page.fill("#n-minutes", "7.5")
    assert page.locator("#o-then").inner_text() == "0.5 GPU-hours"
    assert page.locator("#o-saved").inner_text() == "52 GPU-hours"
    page.fill("#n-price", "2")
    assert page.locator("#o-now").inner_text() == "1.5 GPU-hours, 3 in your currency"
    page.fill("#n-hangs", "2")
    assert page.locator("#o-now").inner_text() == "3 GPU-hours, 6 in your currency"
    page.locator("#r-hangs").focus()
    page.keyboard.press("Home")
    assert page.locator("#o-now").inner_text().startswith("0 GPU-hours")
    assert page.locator("#n-hangs").input_value() == "0"


def test_keyboard(visit: Callable[..., Visit], demo_out: Path) -> None:
    v = visit()
    page = v.open(demo_out / "index.html")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.type("t?")  # text, and no shortcuts
    assert page.locator("#filter").input_value() == "t?"
    page.fill("#filter", "")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/findings-*/*.html")
    first = page.locator("h1").inner_text()
    page.keyboard.press("n")
    page.wait_for_function("name => document.querySelector('h1').innerText !== name", arg=first)
    page.keyboard.press("p")
    page.wait_for_function("name => document.querySelector('h1').innerText === name", arg=first)
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("u")
    page.wait_for_url("**/index.html")


def test_theme_follows_the_system_and_the_toggle(
    visit: Callable[..., Visit], demo_out: Path
) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = (visit(color_scheme=s) for s in ("light", "dark"))
    grounds = [v.open(demo_out / "index.html").evaluate(ground) for v in (light, dark)]
    assert grounds[0] == "rgb(255, 255, 255)"
    assert grounds[1] != grounds[0]
    light.page.keyboard.press("t")
    assert light.page.evaluate(ground) == grounds[1]
    light.page.reload()
    assert light.page.evaluate(ground) == grounds[1]
    assert light.page.locator("#theme").inner_text() == "Light"


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_page_is_wider_than_the_screen(
    visit: Callable[..., Visit], demo_out: Path, fleet_out: Path, width: int
) -> None:
    v = visit(viewport={"width": width, "height": 800})
    for path in [*sorted(demo_out.rglob("*.html")), fleet_out / "index.html"]:
        page = v.open(path)
        wide = page.evaluate("document.scrollingElement.scrollWidth")
        assert wide <= width, path.name
        if width < 640 and page.locator("svg.narrow").count():
            assert page.locator("svg.narrow").is_visible()


def test_print(visit: Callable[..., Visit], demo_out: Path, fleet_out: Path) -> None:
    v = visit(color_scheme="dark")
    page = v.open(demo_out / "index.html")
    page.emulate_media(media="print", color_scheme="light")
    assert not page.locator("#tools").is_visible()
    assert len(page.pdf()) > 10_000
    page = v.open(fleet_out / "index.html")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert len(v.rows()) == 500


def test_without_scripts(visit: Callable[..., Visit], demo_out: Path, fleet_out: Path) -> None:
    v = visit(java_script_enabled=False)
    page = v.open(demo_out / "index.html")
    assert len(v.rows()) == 15
    assert not page.locator("#tools").is_visible()
    page.locator("#jobs a").first.click()
    assert page.locator("svg.wide").is_visible()
    page = v.open(fleet_out / "index.html")
    assert "50 of 10,000" in page.locator("#shown").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_accessible(visit: Callable[..., Visit], demo_out: Path, scheme: str, width: int) -> None:
    """Names, roles, order of headings, contrast: what axe finds."""
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe is not installed")
    rules = Path(axe.__file__).with_name("axe.min.js").read_text("utf-8")
    v = visit(color_scheme=scheme, viewport={"width": width, "height": 800})
    for path in sorted(demo_out.rglob("*.html")):
        page = v.open(path)
        page.evaluate("for (const d of document.querySelectorAll('details')) d.open = true")
        page.evaluate(rules)
        found, checked = page.evaluate("axe.run().then(r => [r.violations, r.passes.length])")
        assert checked > 15
        said = [(x["id"], [(n["html"][:120], n["any"][:1]) for n in x["nodes"][:2]]) for x in found]
        assert not said, path.name
