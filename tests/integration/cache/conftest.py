"""Real cache servers (nginx) in folders of their own, each on a port of its own, all stopped afterwards."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parts import packages, processes

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120


def gone(pid: int, within_s: float = 20) -> bool:
    """Wait for the end of a process that is not our child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle) as file:
        return bool(select.select([file], [], [], within_s)[0])


def holds(condition: Callable[[], bool], within_s: float = 20) -> bool:
    """Wait for something that the server does by itself."""
    end = time.monotonic() + within_s
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return met


@dataclass
class Cache:
    """One cache, driven by the command that users type."""

    folder: Path
    port: int = field(default_factory=processes.free_port)
    options: tuple[str, ...] = ()

    def run(self, action: str, *options: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "workflows", "cache", action, "--folder", str(self.folder)]
        if action == "start":
            argv += ["--backend", "nginx", "--port", str(self.port), "--max-size", "16M", *self.options]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([*argv, *options], env=env, capture_output=True, text=True, timeout=TIMEOUT_S, cwd="/")
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        return done

    def start(self, *options: str) -> str:
        done = self.run("start", *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, code: int, *options: str) -> str:
        """Start with options that must be refused, in one line."""
        done = self.run("start", *options)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        return done.stderr

    @property
    def status(self) -> dict[str, Any]:
        return json.loads(self.run("status", "--json").stdout)

    @property
    def keeper(self) -> int:
        """The process that holds the server."""
        return int((self.folder / "lock").read_text())

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> int:
        """Send a request past all proxies; return the status."""
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data=body, method=method, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=30) as answer:
                answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


@pytest.fixture
def make_cache(tmp_path: Path) -> Iterator[Callable[..., Cache]]:
    """Make caches that are not started yet."""
    packages.need("nginx", "nginx-light")
    made: list[Cache] = []

    def make(folder: Path | None = None, *options: str) -> Cache:
        made.append(Cache(folder or tmp_path / "my cache", options=options))
        return made[-1]

    yield make
    for cache in made:
        cache.run("stop")


@pytest.fixture
def cache(make_cache: Callable[..., Cache]) -> Cache:
    """A running cache in a folder whose name has spaces."""
    made = make_cache()
    made.start()
    return made


@dataclass(frozen=True)
class Build:
    """What a run of Bazel did."""

    code: int
    said: str
    ran: int
    found: int


@dataclass
class Bazel:
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
        words = next((line for line in done.stderr.splitlines() if " processes:" in line), "").rstrip(".").split(", ")
        counts = {word.split(" ", 1)[1]: int(word.split(" ", 1)[0]) for word in words if word[:1].isdigit()}
        head = words[0].rpartition(": ")[2].split(" ", 1)
        if len(head) == 2:
            counts[head[1]] = int(head[0])
        found = counts.pop("remote cache hit", 0)
        ran = sum(count for kind, count in counts.items() if "sandbox" in kind or "local" in kind)
        return Build(done.returncode, done.stderr, ran, found)


ACTIONS = 6


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
    made = Bazel(workspace, folder / "state")
    yield made
    made("shutdown")
    subprocess.run(["chmod", "-R", "u+w", folder], check=True)
