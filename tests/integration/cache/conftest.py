"""A real Bazel."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.parts import packages

TIMEOUT_S = 120
ACTIONS = 6


class Build(NamedTuple):
    """The exit code and the output of a run of Bazel, its actions that ran, and those that a cache had."""

    code: int
    output: str
    ran: int
    hits: int


class Bazel(NamedTuple):
    """A real Bazel and a workspace whose actions need nothing from outside."""

    workspace: Path
    state: Path

    def __call__(self, *args: str, rc: Path | None = None) -> subprocess.CompletedProcess[str]:
        startup = [f"--output_user_root={self.state}", "--nohome_rc", "--host_jvm_args=-Xmx512m"]
        startup += [f"--bazelrc={rc}"] if rc else []
        return subprocess.run(
            ["bazel", *startup, *args], cwd=self.workspace, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    def build(self, rc: Path) -> Build:
        """Build everything, from nothing but the cache."""
        self("clean", rc=rc)
        done = self("build", "//...", "--nosandbox_debug", "--noshow_progress", rc=rc)
        line = next((line for line in done.stderr.splitlines() if " processes:" in line), "")
        ran = sum(map(int, re.findall(r"(\d+) [\w-]*(?:sandbox|local)", line)))
        hits = sum(map(int, re.findall(r"(\d+) \w+ cache hit", line)))
        return Build(done.returncode, done.stderr, ran, hits)


@pytest.fixture(scope="module")
def bazel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bazel]:
    """A workspace of six actions; the last needs the others. Each output is 200 kB or more."""
    packages.need("bazel", "bazel-bootstrap")
    folder = tmp_path_factory.mktemp("bazel")
    workspace = folder / "workspace"
    workspace.mkdir()
    (workspace / "WORKSPACE").touch()
    (workspace / "BUILD").write_text(
        '[genrule(name = "p%d" % n, outs = ["p%d.txt" % n], cmd = "seq %d 40000 > $@" % n)'
        f" for n in range({ACTIONS - 1})]\n"
        f'genrule(name = "all", srcs = [":p%d" % n for n in range({ACTIONS - 1})], outs = ["all.txt"],'
        ' cmd = "cat $(SRCS) > $@")\n'
    )
    real = Bazel(workspace, folder / "state")
    yield real
    real("shutdown")
    subprocess.run(["chmod", "-R", "u+w", folder], check=True)
