"""What every test of the tooling starts from."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from workflows.ci import evidence

ROOT = Path(__file__).resolve().parent.parent
UNIT = Path(__file__).resolve().parent / "unit"


def pytest_configure() -> None:
    """Let the programs that tests start be interrupted also where a shell started pytest in the background."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write what stood in for the real thing into the report: see workflows/ci/evidence.py."""
    for item in items:
        for mark in item.iter_markers(evidence.STAND_IN):
            item.user_properties.append((evidence.STAND_IN, mark.args[0]))


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
