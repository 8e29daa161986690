"""How far work is: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys

from .conftest import ROOT, TIMEOUT_S, Clone, Upstream

BAR = "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * 10
WORK = """
import time
from tooling.core import console
with console.work("alpha: fetching [bold]") as advance:
    advance(1, 4)
    time.sleep(0.3)
"""


def test_a_terminal_gets_a_bar_and_a_pipe_a_line() -> None:
    command, env = [sys.executable, "-c", WORK], os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux says EIO where the other end closed
            while chunk := os.read(ours, 65536):
                shown += chunk
        assert process.wait(TIMEOUT_S) == 0, shown
    os.close(ours)
    assert BAR in shown.decode()
    assert re.search(r"alpha: fetching \[bold\].* 25%", shown.decode())
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stderr == "alpha: fetching [bold]\n"


def test_a_sync_says_what_it_does(clone: Clone, alpha: Upstream) -> None:
    done = clone.run("sync")
    assert done.stderr.splitlines() == [f"alpha: fetching {clone.pins['alpha']['commit'][:12]}"]
    assert "alpha      created  1.0, 0 patches, from git" in done.stdout
