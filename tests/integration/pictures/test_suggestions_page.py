"""The page of ``suggest --html``, laid out by a real browser: Debian's Chromium without a screen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pictures import browser

LOOKING = Path(__file__).with_name("suggestions.html")


@pytest.fixture(scope="module")
def folder(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suggestions")
    words = "suggest --model llama3-70b --nodes 8 --batch-size 128 --tokens 15e12 --price 2.5 --device h100,b200 --html"
    command = [sys.executable, "-m", "multimesh", *words.split(), str(folder / "page.html")]
    env = os.environ | {"PYTHONPATH": str(root / "multimesh" / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def look(folder: Path, profile: Path, *flags: str) -> dict[str, Any]:
    own = {"/look.html": ("text/html", LOOKING.read_bytes())}
    found: dict[str, Any] = browser.report(folder, own, "/look.html", profile, *flags)
    return found


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("flags", "dark"), [((), False), ((browser.DARK,), True)], ids=["light", "dark"])
def test_the_page_shows_everything_and_can_be_read(folder: Path, tmp_path: Path, flags: tuple[str, ...], dark: bool):
    found = look(folder, tmp_path / "profile", *flags)
    assert found["sections"][:4] == ["front", "parts", "timeline", "bill"] or found["sections"][:3] == [
        "front",
        "parts",
        "bill",
    ]
    assert found["requests"] == 0  # nothing is loaded from elsewhere
    assert found["wide"] <= 0  # nothing leaves the page sideways
    assert found["points"] >= 5
    assert found["bars"] >= 5
    assert all(part > 0 for part in found["parts"])
    assert found["devices"] == ["h100", "b200"]
    ground, ink = luminance(found["ground"]), luminance(found["ink"])
    assert (ground < 0.5) == dark
    assert (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) >= 7
