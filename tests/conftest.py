"""What every test of the tooling starts from."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNIT = Path(__file__).resolve().parent / "unit"


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
