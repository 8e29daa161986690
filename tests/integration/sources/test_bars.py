"""How far work is: bars on a terminal, lines elsewhere, and the measures that git and pip give of it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tooling.core import console
from tooling.environment import packages
from tooling.sources import git

from .conftest import ROOT, TIMEOUT_S, Clone, Upstream, run_tooling

BAR = "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * 10
WORK = """
with Reporter() as reporter:
    reporter.phase("alpha", "fetching [bold]")
    reporter.advance("alpha", 1, 4)
    if reporter._bars:
        reporter._bars.refresh()
    reporter.advance("alpha", 4, 4)
    reporter.phase("alpha", "checking out")
    if reporter._bars:
        reporter._bars.refresh()
    reporter.done("alpha", "created at [/x]")
"""
LINES = ["alpha: fetching [bold]", "alpha: checking out", "alpha: created at [/x] (0.0 s)"]


class Heard(console.Reporter):
    """Keeps what it is told of the present phase."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[float, float | None]] = []

    def advance(self, name: str, done: float, total: float | None) -> None:
        self.told.append((done, total))


def on_terminal(command: list[str], cwd: Path, **env: str) -> str:
    """Run a program whose errors go to a terminal, and return what that got."""
    ours, theirs = pty.openpty()
    full = (
        os.environ | {"PYTHONPATH": str(cwd), "TERM": "xterm", "COLUMNS": "120", "PYTHONDONTWRITEBYTECODE": "1"} | env
    )
    with subprocess.Popen(command, cwd=cwd, env=full, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        got = b""
        with contextlib.suppress(OSError):  # Linux says EIO where the other end closed
            while chunk := os.read(ours, 65536):
                got += chunk
        assert process.wait(TIMEOUT_S) == 0, got
    os.close(ours)
    return got.decode()


def plain(got: str) -> list[str]:
    """Return the lines of a terminal without its control sequences."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", got)) if line.strip()]


def reported(before: str = "", **env: str) -> str:
    code = f"import sys\n{before}\nfrom tooling.core.console import Reporter\n{WORK}"
    return on_terminal([sys.executable, "-c", code], ROOT, **env)


def test_a_terminal_gets_a_bar_for_each_piece_of_work() -> None:
    got = reported()
    shown = plain(got)
    assert BAR in got
    assert any(line.startswith("alpha: fetching [bold]") and " 25%" in line for line in shown), shown
    middle = [line for line in shown if line.startswith("alpha: checking out")]
    assert middle
    assert not any("%" in line for line in middle), "of a new phase nothing is told yet"
    assert re.fullmatch(rf"alpha: created at \[/x\] \(0\.\d s\) {BAR}+ 100% 0:00:00", shown[-1]), shown


@pytest.mark.parametrize(
    ("before", "term"),
    [("sys.modules['rich'] = None", "xterm"), ("", "dumb")],
    ids=["before the first packages are there", "a terminal that draws no line anew"],
)
def test_a_terminal_without_bars_gets_lines(before: str, term: str) -> None:
    assert reported(before, TERM=term).splitlines() == LINES


def test_a_pipe_gets_lines(clone: Clone, alpha: Upstream) -> None:
    assert [line.split(" (")[0] for line in run_tooling(clone.root, "sync").stderr.splitlines()] == [
        f"alpha: fetching {clone.pins['alpha']['commit'][:12]}",
        "alpha: checking out",
        "alpha: created 1.0, 0 patches",
    ]


def test_sync_on_a_terminal_ends_with_full_bars(clone: Clone, alpha: Upstream) -> None:
    shown = plain(on_terminal([sys.executable, "-m", "tooling", "sync"], clone.root))
    assert re.match(rf"alpha: created 1\.0, 0 patches \(\d+\.\d s\) {BAR}+ 100% ", shown[-1]), shown
    assert clone.state("alpha") == "clean"


def test_git_says_how_many_objects_came(alpha: Upstream, server: object, tmp_path: Path) -> None:
    heard = Heard()
    url = f"{server.url}/alpha.git"

    git.fetch(git.init(tmp_path / "r"), url, alpha.head, label="a", on_progress=lambda *told: heard.advance("a", *told))

    totals = {total for _, total in heard.told}
    assert len(totals) == 1
    assert heard.told[-1][0] == totals.pop() > 1
    assert [done for done, _ in heard.told] == sorted(done for done, _ in heard.told)


def test_pip_says_how_many_packages_it_has_looked_at(tmp_path: Path) -> None:
    names = ("packaging", "PyYAML")
    locked = [f"{name}=={metadata.version(name)} \\\n    --hash=sha256:{'0' * 64}\n" for name in names]
    (tmp_path / "run.txt").write_text("".join(locked))
    heard = Heard()

    packages._install_lock(tmp_path, "run.txt", heard, offline=True)

    assert heard.told == [(1, 2), (2, 2)]
