"""The library's pictures, laid out by a real browser: Debian's Chromium without a screen."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parts import packages
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

    def drawn(name: str, *argv: str) -> str:
        path = folder / name
        done = subprocess.run([sys.executable, *argv], env=env, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        picture = re.search(r"<svg.*</svg>", path.read_text(encoding="utf-8"), re.DOTALL)
        assert picture is not None, name
        return picture[0]

    forecast = "-m", "multimesh", "forecast"
    made = [
        drawn("a.svg", *forecast, "--schedule", name, "--stages", str(p), "--microbatches", str(m), "--svg", "a.svg")
        for name, p, m, _ in SHAPES
    ]
    return [*made, drawn("timeline.html", str(root / "examples" / "pipeline.py"))]


def laid_out(pictures: list[str], folder: Path, *flags: str) -> list[dict[str, Any]]:
    """What the page's script finds in a browser; see layout.html."""
    page = folder / "page.html"
    page.write_text(
        PAGE.read_text(encoding="utf-8").replace("<!-- PICTURES -->", "\n".join(pictures)), encoding="utf-8"
    )
    program = packages.need("chromium", "chromium", "fonts-dejavu-core")
    command = [program, *browser.FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.search(r'<pre id="report">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-2000:]
    report: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    return report


@pytest.fixture(scope="module")
def light(pictures: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return laid_out(pictures, tmp_path_factory.mktemp("light"))


def test_rows_from_the_top_and_a_box_for_each_program(light: list[dict[str, Any]]) -> None:
    assert len(light) == len(SHAPES) + 1
    for (name, submeshes, _, programs), found in zip(SHAPES, light, strict=False):
        assert found["title"].startswith(f"{name}: {submeshes} submeshes")
        assert [row["label"] for row in found["rows"]] == [f"submesh {r}" for r in range(submeshes)]
        assert [row["y"] for row in found["rows"]] == sorted(row["y"] for row in found["rows"])
        assert [row["cells"] for row in found["rows"]] == [programs] * submeshes
    measured = light[-1]["rows"]
    # 8 forwards and 8 backwards, 8 programs of both, and what is outside of the loop
    assert measured[0]["cells"] >= 16
    assert 8 <= measured[1]["cells"] < measured[0]["cells"]


def test_no_text_leaves_its_box_or_covers_another(light: list[dict[str, Any]]) -> None:
    for found in light:
        assert found["outside"] == [], found["title"]
        assert found["overlaps"] == [], found["title"]


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_can_be_read_on_light_and_dark_pages(
    light: list[dict[str, Any]], pictures: list[str], tmp_path: Path
) -> None:
    """Contrast of WCAG's highest level, 7 to 1, in both."""
    for found in (*light, *laid_out(pictures, tmp_path, browser.DARK)):
        assert (luminance(found["card"]) + 0.05) / (luminance(found["ink"]) + 0.05) >= 7
