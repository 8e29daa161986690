"""The documentation site: built as CI builds it, then looked at and searched in a real browser."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pictures import browser

PAGE = Path(__file__).with_name("site.html").read_text(encoding="utf-8")
EXPLORER = Path(__file__).with_name("explorer.html").read_text(encoding="utf-8")
PAGES = {  # page: what it must hold
    "docs/index": "Where to start",
    "docs/ten-minutes": "Look at it",
    "docs/tasks": "Compiler contexts",
    "docs/choosing-a-schedule": "zb-h1",
    "docs/performance": "YNNPACK",
    "docs/troubleshooting": "do not divide into microbatches of",
    "docs/api": "with_sharding_constraint",
    "docs/maxtext-flags": "--partition auto|N,N,...",
    "maxtext/README": "validate-cpu.sh",
}
COLOURS = pytest.mark.parametrize("flags", [(), (browser.DARK,)], ids=["light", "dark"])
WIDTHS = (1280, 390, 1600)  # a laptop, a phone, a screen
SEARCHES = {
    "rows divide microbatches": "docs/troubleshooting.html",
    "schedule": "docs/choosing-a-schedule.html",
    "zero bubble": "docs/choosing-a-schedule.html",
    "wait for others": "docs/troubleshooting.html",
    "wandb": "maxtext/README.html",
    "mixed precision": "docs/migrating.html",
}


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert importlib.util.find_spec("sphinx"), "sphinx is not installed; it is in requirements/docs.txt"
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-d", folder / "trees"]
    process = subprocess.run([*argv, ".", folder / "html"], cwd=root, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    return folder / "html"


def test_pages_hold_what_they_promise(site: Path) -> None:
    for page, text in PAGES.items():
        source = (site / f"{page}.html").read_text(encoding="utf-8")
        assert text in re.sub(r"<[^>]+>", "", source), page
        assert "<!-- made" not in source, page  # what the code fills in is filled in
    for path in site.rglob("*.html"):  # no cell that a bar cut in two, no flag that begins with a dash
        assert not re.findall(r"<p>[^<]*(?:`|–\S)[^<]*", path.read_text(encoding="utf-8")), path
    errors = (site / "docs" / "troubleshooting.html").read_text(encoding="utf-8")
    assert 'id="core-checks"' in errors, "where the note below a message leads"
    schedules = (site / "docs" / "choosing-a-schedule.html").read_text(encoding="utf-8")
    timelines = re.findall(r'href="\.\./(timelines/[^"]+)"', schedules)
    assert len(timelines) >= 7
    assert all((site / timeline).exists() for timeline in timelines)
    assert "url=docs/index.html" in (site / "index.html").read_text(encoding="utf-8")


def look(site: Path, profile: Path, *flags: str, **requests: object) -> dict[str, Any]:
    """What site.html sees of `pages` at `widths`, and where `searches` lead."""
    return dict(browser.report(site, PAGE, profile, *flags, wanted=json.dumps(requests)))


def test_no_table_and_no_code_of_any_page_scrolls_sideways_and_numbers_stay_whole(site: Path, tmp_path: Path) -> None:
    pages = [path for folder in ("docs", "maxtext", "planner", "numerics") for path in (site / folder).rglob("*.html")]
    names = [f"/{path.relative_to(site)}" for path in (site / "CONTRIBUTING.html", *pages)]
    report = look(site, tmp_path / "profile", pages=names, widths=[900, 1300], searches=[])
    assert {(view["page"], view["width"]): view["scrolling"] for view in report["seen"] if view["scrolling"]} == {}
    assert {(view["page"], view["width"]): view["broken"] for view in report["seen"] if view["broken"]} == {}
    assert len(report["seen"]) >= 40


@pytest.mark.telling("light")
@COLOURS
def test_a_browser_shows_every_page_and_finds_words(site: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    pages = [f"/{page}.html" for page in PAGES]
    report = look(site, tmp_path / "profile", *flags, pages=pages, widths=WIDTHS, searches=list(SEARCHES))
    assert len(report["seen"]) == len(PAGES) * len(WIDTHS)
    for view in report["seen"]:
        place = f"{view['page']} at {view['width']} pixels"
        assert view["title"].endswith("MultiMesh for JAX"), place
        assert view["sideways"] <= 0, f"{place} must be scrolled sideways by {view['sideways']}"
        assert view["missing"] == [], place
        assert view["broken"] == [], place
        assert view["menu"] >= 20, place
        assert view["text"] > 500, place
        assert (browser.luminance(view["background"]) < browser.luminance(view["ink"])) == bool(flags), place
    for words, page in SEARCHES.items():
        assert f"/{page}" in report["found"][words][:5], report["found"]


@COLOURS
def test_the_front_page_draws_the_timeline_that_a_reader_chooses(
    site: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    from multimesh.commands import forecast

    report = browser.report(site, EXPLORER, tmp_path / "profile", *flags)
    choices = [("1f1b", 4, 8), ("zb-v", 4, 8), ("zb-v", 8, 8), ("zb-v", 8, 16)]
    assert [view["width"] for view in report] == [400] * len(choices) + [1280] * len(choices)
    for (name, submeshes, microbatches), view in zip(choices * 2, report, strict=True):
        ((_, shape),) = forecast.choose_schedules(name, submeshes, None, microbatches)
        result = forecast.simulate_schedule(name, shape)
        assert (view["spans"], view["rows"]) == (len(result.timeline.spans), submeshes)
        assert view["said"].startswith(f"{name}: submeshes are idle for {round(100 * result.timeline.bubble, 1):g} %")
        assert f"at most {max(result.peaks):g} microbatches" in view["said"]
        assert view["reached"], "a choice can't be reached by the keyboard, or has no label"
        assert (view["outside"], view["elsewhere"]) == (0, 0)
        assert view["sideways"] <= 0
        assert (browser.luminance(view["ground"]) < browser.luminance(view["ink"])) == bool(flags)
