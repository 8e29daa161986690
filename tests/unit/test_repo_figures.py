"""Figures of README and of other pages are those of the newest runs on file, on the JAX that the locks bring."""

from __future__ import annotations

import datetime

import pytest

from tests import figures, locks
from tests.pages import ROOT


def test_the_runs_are_of_the_jax_that_the_locks_bring() -> None:
    run, locked = figures.step_run(), locks.locked_versions(ROOT / "requirements" / "run.txt", "3.14.0")["jax"]
    assert run["jax"] == locked, (
        "run multimesh/benchmarks/step.py --json into runs/step.json, and tests.figures --write"
    )
    assert datetime.date.fromisoformat(run["date"]) >= datetime.date(2026, 11, 26)
    assert locked in figures.peer_ratios()


@pytest.mark.parametrize("name", figures.PAGES)
def test_a_page_has_the_figures_of_the_runs(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert figures.BLOCK.search(page)
    assert figures.renewed(page) == page, "python -m tests.figures --write"
