"""Kill it at any point, run it again: nothing is stuck, nothing is half."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Clone, Upstream

INTERRUPTED = 130
HANG = """#!{python}
import os, sys
if {step!r} in sys.argv[1:]:
    open({fifo!r}, "w").close()
    os.read(os.open({hold!r}, os.O_RDONLY), 1)
os.execv({git!r}, ["git", *sys.argv[1:]])
"""


class HangingGit:
    """A ``git`` in front of the real one that stops when a given step begins, and says so through a pipe."""

    def __init__(self, folder: Path, step: str) -> None:
        folder.mkdir()
        self.reached, self.hold = folder / "reached", folder / "hold"
        os.mkfifo(self.reached)
        os.mkfifo(self.hold)
        script = folder / "git"
        real = shutil.which("git")
        script.write_text(
            HANG.format(python=sys.executable, step=step, fifo=str(self.reached), hold=str(self.hold), git=real)
        )
        script.chmod(0o755)
        self.env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

    def wait(self) -> None:
        """Return when the step has begun."""
        self.reached.open().close()

    def release(self) -> None:
        """Let the stopped git go on."""
        self.hold.open("w").close()


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


@pytest.mark.telling("am")
@pytest.mark.parametrize("step", ["checkout", "am", "update-ref"])
def test_kill_after_fetching(large: Clone, server: Any, tmp_path: Path, step: str) -> None:
    large.patch("alpha", only="diff --git a/README b/README\n--- a/README\n+++ b/README\n@@ -1 +1 @@\n-later\n+mine\n")
    large.ok("lock", "alpha")
    sent = server.sent
    hanging = HangingGit(tmp_path / "bin", step)
    process = start(large, hanging.env)
    hanging.wait()
    process.kill()
    process.wait()
    assert server.sent > sent
    assert large.state("alpha") == "missing"

    large.ok("sync")

    assert large.state("alpha") == "clean"
    assert large.leftovers == []
    hanging.release()


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
