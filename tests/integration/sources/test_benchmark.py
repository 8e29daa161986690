"""The benchmark at a small scale: what it counts, not how long it takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .conftest import ROOT


@pytest.mark.stand_in("repositories of like shape, made here")
def test_sync_fetches_little_more_than_the_pinned_trees() -> None:
    argv = [sys.executable, ROOT / "tests" / "benchmarks" / "sources.py", "--scale", "0.02", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    results = {each["method"].split()[0]: each for each in figures["fetch"]}
    assert set(results) == {"tooling", "git", "west"}
    assert 1.0 <= results["tooling"]["of_least"] <= 1.05
    assert [each["command"].split()[0] for each in figures["again"]] == ["tooling", "git", "west"]
