"""Changing what is pinned: patches, locks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, Clone, Upstream, git, make_clone, patch_text


def commit(clone: Clone, path: str, text: str, message: str) -> None:
    """Commit a file in the tree as a user would."""
    (clone.place("alpha") / path).write_text(text)
    git(clone.place("alpha"), "add", "-A")
    git(clone.place("alpha"), "commit", "-q", "-m", message)


def contributing() -> str:
    """The commands that CONTRIBUTING.md prints for a new patch, for the component alpha."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a patch")[2]
    return text.partition("```sh\n")[2].partition("```")[0].replace("maxtext", "alpha")


def test_a_commit_becomes_a_patch_by_the_commands_of_contributing(
    clone: Clone, alpha: Upstream, tmp_path: Path
) -> None:
    clone.patch("alpha", **{"0001-first": patch_text("README", "hello", "patched")})
    clone.ok("lock", "alpha")
    clone.ok("sync")
    commit(clone, "src/a.txt", "two\n", "Make it two\n\nOne was too few.")
    assert clone.state("alpha") == "commits"
    assert "make a patch of it (CONTRIBUTING.md" in clone.refused(3, "sync")

    python = clone.root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    subprocess.run(["sh", "-ec", contributing()], cwd=clone.root, check=True, capture_output=True)

    assert clone.state("alpha") == "clean"
    assert git(clone.place("alpha"), "log", "-1", "--format=%an|%B|") == "Upstream|Make it two\n\nOne was too few.\n|"
    other = make_clone(tmp_path / "other")
    for path in ("sources.yaml", "sources.lock", "patches"):
        os.symlink(clone.root / path, other.root / path)
    other.ok("sync")
    assert other.head("alpha") == clone.head("alpha")
    assert (other.place("alpha") / "src" / "a.txt").read_text() == "two\n"


def test_another_version_moves_everything(clone: Clone, alpha: Upstream) -> None:
    clone.patch("alpha", only=patch_text("src/a.txt", "one", "two"))
    clone.ok("lock", "alpha")
    clone.ok("sync")

    clone.ok("lock", "alpha", "2.0")

    assert (clone.pin("alpha")["commit"], clone.pin("alpha")["tree"]) == (alpha.head, alpha.tree())
    assert clone.state("alpha") == "outdated"
    clone.ok("sync", "--group", "run")
    assert (clone.place("alpha") / "README").read_text() == "later\n"
    assert (clone.place("alpha") / "src" / "a.txt").read_text() == "two\n"


@pytest.mark.parametrize(
    ("version", "code", "says"),
    [("2.0", 3, "only.patch: does not apply"), ("9.9", 3, "has no tag v9.9"), ("../9", 2, "is no version")],
)
def test_a_version_that_cannot_be_had_changes_nothing(
    clone: Clone, alpha: Upstream, version: str, code: int, says: str
) -> None:
    clone.patch("alpha", only=patch_text("README", "hello", "patched"))
    clone.ok("lock", "alpha")
    before = (clone.root / "sources.lock").read_bytes()
    assert says in clone.refused(code, "lock", "alpha", version)
    assert (clone.root / "sources.lock").read_bytes() == before
    assert clone.leftovers == []


def test_status_is_one_table(clone: Clone, alpha: Upstream) -> None:
    clone.ok("sync")

    lines = clone.ok("status").splitlines()

    assert len(lines) == 2
    assert lines[0].split()[:4] == ["component", "groups", "version", "state"]
    assert lines[1].split()[:6] == ["alpha", "run", "1.0", "clean", "0", clone.head("alpha")[:12]]
    (clone.place("alpha") / "README").write_text("mine\n")
    assert clone.run("status").returncode == 1
