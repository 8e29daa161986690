"""Miniature clones of this repository, and upstreams that a real git server serves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import repositories
from tests.integration.parts import processes, proxy
from tests.repositories import git
from tooling.core.files import ROOT

SOURCE = 3  # the exit code of what is wrong with sources, or not there
MAIL = "From: Somebody <somebody@example.org>\nDate: Sat, 1 Jan 2000 00:00:00 +0000\nSubject: {}\n\n---\n"


@dataclass
class Upstream:
    """A real repository that components are fetched from: a work tree, what the server serves, and where."""

    work: Path
    bare: Path
    url: str

    def commit(self, files: dict[str, str | None], tag: str | None = None) -> str:
        """Write (or with None delete) files, commit and serve them."""
        repositories.commit(self.work, files)
        if tag:
            git(self.work, "tag", tag)
        git(self.work, "push", "-q", "--tags", "--force", str(self.bare), "HEAD:main")
        return self.find("HEAD")

    def find(self, revision: str) -> str:
        return git(self.work, "rev-parse", revision)


@dataclass
class Clone:
    """A clone of this repository with a manifest, a lock and patches of its own."""

    root: Path
    components: dict[str, dict[str, Any]] = field(default_factory=dict)
    pins: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, url: str, commit: str, tree: str | None, **entry: Any) -> None:
        """Add a component that is pinned without patches."""
        patched = None if "path" in entry or "wheel" in entry else commit
        self.pins[name] = {"version": "1.0", "commit": commit, "tree": tree, "patched_commit": patched}
        if "wheel_sha256" in entry:
            self.pins[name]["wheel_sha256"] = entry.pop("wheel_sha256")
        self.components[name] = {"url": url, "groups": ["run"]} | entry
        self.write()

    def add_newest(self, name: str, upstream: Upstream, **entry: Any) -> None:
        """Add a component that is pinned at the last commit of an upstream."""
        self.add(name, upstream.url, upstream.find("HEAD"), upstream.find("HEAD^{tree}"), **entry)

    def pin(self, name: str, **fields: str | None) -> dict[str, Any]:
        """Change what the lock on disk says of a component; return it."""
        if fields:
            self.pins[name] |= fields
            self.write()
        return dict(json.loads((self.root / "sources.lock").read_text())["components"][name])

    def write(self) -> None:
        """Write manifest and lock (JSON is YAML)."""
        for file, entries in (("sources.yaml", self.components), ("sources.lock", self.pins)):
            (self.root / file).write_text(json.dumps({"format": 1, "components": entries}, indent=1) + "\n")

    def patch(self, name: str, **patches: str) -> None:
        """Replace the patches of a component; keywords are file names without ``.patch``."""
        folder = self.root / "patches" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file, text in patches.items():
            head = MAIL.format(file) if text.startswith("diff ") else ""
            (folder / f"{file}.patch").write_text(head + text)

    def start(self, *args: str, **env: str) -> subprocess.Popen[str]:
        """Start the command line."""
        settings = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "GIT_CONFIG_NOSYSTEM": "1"}
        command, pipe = [sys.executable, "-m", "tooling", *args], subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.root, env=os.environ | settings | env, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the command line; whatever happens, no user may see a traceback."""
        with self.start(*args, **env) as process:
            stdout, stderr = process.communicate(timeout=120)
        assert "Traceback" not in stderr + stdout, stderr
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def ok(self, *args: str, **env: str) -> str:
        """Run a command that must succeed; return what it printed."""
        process = self.run(*args, **env)
        assert process.returncode == 0, process.stderr
        return process.stdout

    def refused(self, code: int, *args: str, **env: str) -> str:
        """Run a command that must fail with this exit code and one line on stderr that begins with ``error:``."""
        process = self.run(*args, **env)
        lines = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
        assert process.returncode == code, f"exit {process.returncode}: {process.stderr}"
        assert len(lines) == 1, process.stderr
        assert process.stderr.rstrip().endswith(lines[0]), process.stderr
        return lines[0].removeprefix("error: ")

    def place(self, name: str) -> Path:
        return self.root / "third_party" / name

    def head(self, name: str) -> str:
        return git(self.place(name), "rev-parse", "HEAD")

    def state(self, name: str) -> str:
        """The state of a component in the table of ``status``."""
        rows = [line.split() for line in self.run("status").stdout.splitlines()]
        return next(row[3] for row in rows if row[0] == name)

    @property
    def leftovers(self) -> list[str]:
        """What a run that ended left in its stage."""
        return [path.name for path in (self.root / "third_party").glob(".stage/*")]


def patch_text(path: str, before: str, after: str) -> str:
    """A patch that replaces the only line of a file."""
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{before}\n+{after}\n"


def new_file(path: str, line: str, mode: str = "100644", newline: bool = True) -> str:
    """A patch that adds a file (or, by its mode, a link) of one line."""
    end = "" if newline else "\\ No newline at end of file\n"
    head = f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1 @@\n+{line}\n{end}"


def make_clone(root: Path) -> Clone:
    """Copy what the tooling needs of this repository to ``root``."""
    shutil.copytree(ROOT / "tooling", root / "tooling", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "multimesh").mkdir()
    (root / "third_party").mkdir()
    return Clone(root)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip looks for wheels, and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    """A clone without components, in a folder whose name has spaces."""
    return make_clone(tmp_path / "my clone")


@pytest.fixture(scope="session")
def git_server(parts_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Git's own program for web servers, behind busybox, of all folders of this run; as ``127.0.0.1:PORT``."""
    folder = parts_folder / "git"
    settings = f"GIT_PROJECT_ROOT={tmp_path_factory.getbasetemp()} GIT_PROTOCOL=$HTTP_GIT_PROTOCOL"
    script = f"#!/bin/sh\n{settings} GIT_HTTP_EXPORT_ALL=1 exec git http-backend\n"
    processes.write_program(folder / "cgi-bin/git", script)
    with processes.web_server(folder, env=os.environ | repositories.ALONE) as address:
        yield address


@pytest.fixture
def server(git_server: str) -> Iterator[proxy.FaultyProxy]:
    """The git server behind a proxy that counts, and can be told to fail."""
    with proxy.running(git_server) as running:
        yield running


@pytest.fixture
def make_upstream(tmp_path: Path, server: proxy.FaultyProxy) -> Callable[[str], Upstream]:
    """Make named repositories that the server serves."""

    def make(name: str) -> Upstream:
        work, bare = tmp_path / "work" / name, tmp_path / "served" / f"{name}.git"
        for place, options in ((work, ()), (bare, ("--bare",))):
            place.mkdir(parents=True)
            git(place, "init", "-q", *options)
        return Upstream(work, bare, f"http://{server.address}/cgi-bin/git/{tmp_path.name}/served/{name}.git")

    return make


@pytest.fixture
def alpha(clone: Clone, make_upstream: Callable[[str], Upstream]) -> Upstream:
    """A component ``alpha`` of the clone: a whole repository of three commits, pinned at the last but one."""
    upstream = make_upstream("alpha")
    upstream.commit({"README": "old\n"})
    commit = upstream.commit({"README": "hello\n", "src/a.txt": "one\n", "tool.sh": "#!/bin/sh\n"}, tag="v1.0")
    upstream.commit({"README": "later\n"}, tag="v2.0")
    clone.add("alpha", upstream.url, commit, upstream.find("v1.0^{tree}"), tag="v{version}")
    return upstream
