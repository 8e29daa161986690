"""Miniature clones of this repository and the real git servers that they fetch from."""

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

from tests.integration.sources.git_server import GitServer

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120
AUTHOR = {
    f"GIT_{role}_{field}": value
    for role in ("AUTHOR", "COMMITTER")
    for field, value in (("NAME", "Upstream"), ("EMAIL", "upstream@example.org"), ("DATE", "@1700000000 +0100"))
}
MAIL = "From: Somebody <somebody@example.org>\nDate: Sat, 1 Jan 2000 00:00:00 +0000\nSubject: {}\n\n---\n"


def git(cwd: Path, *args: str, stdin: bytes | None = None, env: dict[str, str] | None = None) -> str:
    """Run git as a user would, but away from this machine's configuration."""
    isolated = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, **AUTHOR, **(env or {})}
    command = ["git", "-c", "init.defaultBranch=main", "-c", "protocol.file.allow=always", *args]
    done = subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, env=os.environ | isolated)
    assert done.returncode == 0, f"{command}: {done.stderr.decode()}"
    return done.stdout.decode().rstrip("\n")


@dataclass
class Upstream:
    """A real repository that components are fetched from; ``bare`` is what servers serve."""

    name: str
    work: Path
    bare: Path

    def commit(self, files: dict[str, str | None], message: str = "change", tag: str | None = None) -> str:
        """Write (or with None delete) files and commit them."""
        for path, text in files.items():
            target = self.work / path
            if text is None:
                target.unlink()
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text)
        git(self.work, "add", "-A")
        git(self.work, "commit", "-q", "--allow-empty", "-m", message)
        if tag:
            git(self.work, "tag", tag)
        git(self.work, "push", "-q", "--tags", "--force", str(self.bare), "HEAD:main")
        return self.head

    @property
    def head(self) -> str:
        return git(self.work, "rev-parse", "HEAD")

    def tree(self, revision: str = "HEAD", path: str = "") -> str:
        return git(self.work, "rev-parse", f"{revision}:{path}")


def run_tooling(root: Path, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line of the clone at ``root``; whatever happens, no user may see a traceback."""
    full = (
        os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "GIT_CONFIG_NOSYSTEM": "1"} | (env or {})
    )
    command = [sys.executable, "-m", "tooling", *args]
    done = subprocess.run(command, cwd=root, env=full, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done


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

    def write(self) -> None:
        """Write manifest and lock (JSON is YAML)."""
        for file, entries in (("sources.yaml", self.components), ("sources.lock", self.pins)):
            (self.root / file).write_text(json.dumps({"format": 1, "components": entries}, indent=1) + "\n")

    def pin(self, name: str) -> dict[str, Any]:
        """What the lock on disk says of a component."""
        return dict(json.loads((self.root / "sources.lock").read_text())["components"][name])

    def patch(self, name: str, **patches: str) -> None:
        """Replace the patches of a component; keywords are file names without ``.patch``."""
        folder = self.root / "patches" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file, text in patches.items():
            head = MAIL.format(file) if text.startswith("diff ") else ""
            (folder / f"{file}.patch").write_text(head + text)

    def run(self, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return run_tooling(self.root, *args, **options)

    def ok(self, *args: str, **options: Any) -> str:
        """Run a command that must succeed; return what it printed."""
        done = self.run(*args, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, code: int, *args: str, **options: Any) -> str:
        """Run a command that must fail with this exit code and one line on stderr that begins with ``error:``."""
        done = self.run(*args, **options)
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode == code, f"exit {done.returncode}: {done.stderr}"
        assert len(lines) == 1, done.stderr
        assert done.stderr.rstrip().endswith(lines[0]), done.stderr
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
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tooling", root / "tooling", ignore=ignore)
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


@pytest.fixture
def make_upstream(tmp_path: Path) -> Callable[[str], Upstream]:
    """Make named repositories under one served folder."""

    def make(name: str) -> Upstream:
        work, bare = tmp_path / "work" / name, tmp_path / "served" / f"{name}.git"
        work.mkdir(parents=True)
        bare.mkdir(parents=True)
        git(work, "init", "-q")
        git(bare, "init", "-q", "--bare")
        return Upstream(name, work, bare)

    return make


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """A smart-HTTP git server for the repositories of ``make_upstream``."""
    (tmp_path / "served").mkdir(exist_ok=True)
    with GitServer(tmp_path / "served") as running:
        yield running


@pytest.fixture
def alpha(clone: Clone, make_upstream: Callable[[str], Upstream], server: Any) -> Upstream:
    """A component ``alpha`` of the clone: a whole repository of three commits, pinned at the last but one."""
    upstream = make_upstream("alpha")
    upstream.commit({"README": "old\n"}, "first")
    upstream.commit({"README": "hello\n", "src/a.txt": "one\n", "tool.sh": "#!/bin/sh\n"}, "second", tag="v1.0")
    upstream.commit({"README": "later\n"}, "third", tag="v2.0")
    clone.add(
        "alpha",
        f"{server.url}/alpha.git",
        git(upstream.work, "rev-parse", "v1.0"),
        upstream.tree("v1.0"),
        tag="v{version}",
    )
    return upstream
