"""Kill it at any point, run it again: nothing is stuck, nothing is half."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from .conftest import Clone, Upstream

INTERRUPTED = 130


def start(clone: Clone, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    full = os.environ | {"PYTHONPATH": str(clone.root)} | (env or {})
    command = [sys.executable, "-m", "tooling", "sync"]
    return subprocess.Popen(command, cwd=clone.root, env=full, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture
def large(clone: Clone, alpha: Upstream) -> Clone:
    """The clone, its component grown beyond what a socket's buffers hold, so that a fetch can be caught half way."""
    blob = os.urandom(1 << 19).hex()
    alpha.commit({"blob.txt": blob}, "large", tag="v3.0")
    clone.add("alpha", clone.components["alpha"]["url"], alpha.head, alpha.tree())
    return clone


def test_kill_while_fetching(large: Clone, server: Any) -> None:
    server.stall_after = 100_000
    process = start(large)
    assert server.stalled.wait(30)
    process.kill()
    process.wait()
    assert large.state("alpha") == "missing"
    assert large.leftovers != []
    server.stall_after = None

    large.ok("sync")
    server.released.set()

    assert large.state("alpha") == "clean"
    assert large.leftovers == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupt(large: Clone, server: Any, signum: signal.Signals) -> None:
    server.stall_after = 100_000
    process = start(large)
    assert server.stalled.wait(30)

    process.send_signal(signum)

    assert process.wait(30) == INTERRUPTED
    assert large.state("alpha") == "missing"
    assert large.leftovers == []


def test_broken_connection_is_tried_again(large: Clone, server: Any) -> None:
    server.cut_after, server.cuts = 100_000, 2

    large.ok("sync")

    assert large.state("alpha") == "clean"


def test_connection_that_always_breaks_is_a_network_error(large: Clone, server: Any) -> None:
    server.cut_after, server.cuts = 100_000, 1_000

    assert "cannot fetch" in large.refused(3, "sync")
    assert large.leftovers == []
