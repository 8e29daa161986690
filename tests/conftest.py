"""What every test of the tooling starts from."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.hooks import pytest_configure  # noqa: F401
from tooling.core.files import ROOT

STAND_IN = "stand_in"
UNIT = Path(__file__).resolve().parent / "unit"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write the stand-ins for the real thing into the report."""
    for item in items:
        for mark in item.iter_markers(STAND_IN):
            item.user_properties.append((STAND_IN, mark.args[0]))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """End with the tests that exercised a stand-in; all others exercised the real thing."""
    rows = sorted(
        (value, report.nodeid, outcome)
        for outcome in ("passed", "failed", "error", "skipped")
        for report in terminalreporter.stats.get(outcome, ())
        for name, value in getattr(report, "user_properties", ())
        if name == STAND_IN
    )
    if not rows:
        return
    cells = [("stand-in", "test", "outcome"), ("---",) * 3]
    cells += [tuple(cell.replace("|", r"\|") for cell in row) for row in rows]
    terminalreporter.section(f"ran on a stand-in ({len(rows)})")
    table = "".join(f"| {' | '.join(row)} |\n" for row in cells)
    terminalreporter.write(table)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(f"## Ran on a stand-in ({len(rows)})\n\n{table}\n")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(autouse=True)
def _unit_tests_stay_on_this_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if UNIT in request.path.parents:
        connect = socket.socket.connect

        def local_only(self: socket.socket, address: Any) -> None:
            if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
                pytest.fail(f"a unit test connects to {address}; tests that need a network belong to tests/integration")
            connect(self, address)

        monkeypatch.setattr(socket.socket, "connect", local_only)
