"""Changing what is pinned: a patch, a version; and a jax whose wheel says its commit, whose tree names that of xla."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import wheels
from tests.integration.parts import processes
from tests.repositories import commit, git
from tooling.core.files import ROOT

from .conftest import SOURCE, Clone, Upstream, make_clone, new_file, patch_text

FILE = "third_party/xla/revision.bzl"


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
    commit(clone.place("alpha"), {"src/a.txt": "two\n"}, "Make it two\n\nOne was too few.")
    assert clone.state("alpha") == "commits"
    assert "make a patch of it (CONTRIBUTING.md" in clone.refused(SOURCE, "sync")

    processes.write_program(clone.root / ".venv" / "bin" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
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

    assert (clone.pin("alpha")["commit"], clone.pin("alpha")["tree"]) == (alpha.find("HEAD"), alpha.find("HEAD^{tree}"))
    assert clone.state("alpha") == "outdated"
    clone.ok("sync", "--group", "run")
    assert (clone.place("alpha") / "README").read_text() == "later\n"
    assert (clone.place("alpha") / "src" / "a.txt").read_text() == "two\n"


def test_a_version_that_cannot_be_had_changes_nothing(clone: Clone, alpha: Upstream) -> None:
    clone.patch("alpha", only=patch_text("README", "hello", "patched"))
    clone.ok("lock", "alpha")
    before, nowhere = (clone.root / "sources.lock").read_bytes(), {"MULTIMESH_MIRROR": "http://127.0.0.1:9"}
    for version, code, message, env in (
        ("2.0", SOURCE, "only.patch: does not apply", {}),
        ("9.9", SOURCE, "has no tag v9.9", {}),
        ("9.9", SOURCE, "check the network and the url, or set MULTIMESH_MIRROR", nowhere),
        ("../9", 2, "is no version", {}),
    ):
        assert message in clone.refused(code, "lock", "alpha", version, **env)
        assert (clone.root / "sources.lock").read_bytes() == before
        assert clone.leftovers == []


def names(commit: str) -> dict[str, str | None]:
    return {FILE: f'XLA_COMMIT = "{commit}"\nXLA_SHA256 = "{"0" * 64}"\n'}


@pytest.fixture
def xla(make_upstream: Callable[[str], Upstream]) -> Upstream:
    upstream = make_upstream("xla")
    upstream.commit({"BUILD": "one\n"})
    upstream.commit({"BUILD": "two\n"})
    return upstream


@pytest.fixture
def jax(clone: Clone, make_upstream: Callable[[str], Upstream], xla: Upstream) -> Upstream:
    """Jax 1.0 names the first xla, jax 2.0 the second."""
    upstream = make_upstream("jax")
    first = upstream.commit(names(xla.find("HEAD~1")), tag="jax-v1.0")
    upstream.commit(names(xla.find("HEAD")), tag="jax-v2.0")
    clone.add("jax", upstream.url, first, None, groups=["source"])
    clone.components["jax"]["commit"] = {"file": "jax/version.py", "name": "_git_hash"}
    pin = {"component": "jax", "file": FILE, "name": "XLA_COMMIT"}
    clone.components["xla"] = {"url": xla.url, "commit": pin, "groups": ["source"]}
    clone.write()
    return upstream


@pytest.fixture
def locked_wheel(clone: Clone, index: Path) -> Callable[[str, str], None]:
    """Offer a wheel of jax that names a commit, and lock it."""

    def offer(version: str, commit: str) -> None:
        text = f"_version = '{version}'\n_git_hash: str = '{commit}'\n"
        digest = wheels.pack(index / f"jax-{version}-py3-none-any.whl", ("jax/version.py", text, 0o100644))
        (clone.root / "requirements").mkdir(exist_ok=True)
        text = f"jax==0.9 ; python_full_version < '3.12' \\\n    --hash=sha256:{'0' * 64}\n"
        text += f"jax=={version} ; python_full_version >= '3.12' \\\n    --hash=sha256:{digest}\n"
        (clone.root / "requirements" / "run.txt").write_text(text)

    return offer


def test_the_tree_of_jax_brings_its_xla(clone: Clone, jax: Upstream, xla: Upstream) -> None:
    message = clone.refused(SOURCE, "sync", "xla")
    assert f"third_party/jax/{FILE} names its commit, and is not there" in message
    assert "run `.venv/bin/python -m tooling sync jax xla`" in message
    assert "no such component" in clone.refused(2, "sync", "nosuch")
    assert clone.state("xla") == "missing"
    clone.ok("sync", "--group", "source")
    assert clone.head("xla") == xla.find("HEAD~1")
    assert (clone.place("xla") / "BUILD").read_text() == "one\n"
    assert (clone.state("jax"), clone.state("xla")) == ("clean", "clean")
    assert clone.ok("sync", "--group", "source").count(" kept ") == 2

    head = jax.find("HEAD")
    clone.pin("jax", version="2.0", commit=head, patched_commit=head)
    clone.ok("sync", "jax")
    assert clone.state("xla") == "outdated"
    clone.ok("sync", "xla")
    assert clone.head("xla") == xla.find("HEAD")
    assert clone.state("xla") == "clean"


def test_another_jax_brings_another_xla_and_one_that_nobody_has_leaves_jax_in_place(
    clone: Clone, jax: Upstream, xla: Upstream
) -> None:
    clone.ok("sync", "--group", "source", "--override", f"jax={jax.url}@{jax.find('HEAD')}")
    assert clone.head("xla") == xla.find("HEAD")
    for files, message in (
        (names("1" * 40), "does not have " + "1" * 40),
        ({FILE: "nothing here\n"}, f"{FILE} has no line XLA_COMMIT"),
    ):
        head = jax.commit(files)
        clone.pin("jax", commit=head, patched_commit=head)
        assert message in clone.refused(SOURCE, "sync", "--group", "source")
        assert clone.state("jax") == "clean"


def test_patches_of_jax_and_xla_are_applied(clone: Clone, jax: Upstream) -> None:
    """As those of MaxText: jax's are in the lock, xla's stand on the commit that jax names."""
    clone.patch("jax", mine=new_file("added", "line"))
    clone.patch("xla", mine=patch_text("BUILD", "one", "ours"))
    clone.ok("lock", "jax")
    assert clone.pin("jax")["patched_commit"] != clone.pin("jax")["commit"]
    clone.ok("sync", "--group", "source")
    assert (clone.place("jax") / "added").read_text() == "line\n"
    assert (clone.place("xla") / "BUILD").read_text() == "ours\n"
    assert (clone.state("jax"), clone.state("xla")) == ("clean", "clean")

    assert "xla" not in (clone.root / "sources.lock").read_text()

    clone.patch("xla", mine=patch_text("BUILD", "two", "ours"))
    assert clone.state("xla") == "outdated"
    assert "mine.patch: does not apply" in clone.refused(SOURCE, "sync", "--group", "source")


def test_lock_reads_the_commit_in_the_locked_wheel(clone: Clone, jax: Upstream, locked_wheel: Any) -> None:
    """Git is asked where patches must be tried, and only there."""
    head = jax.find("HEAD")
    locked_wheel("2.0", head)
    clone.ok("lock", "jax", "2.0")
    assert (clone.pin("jax")["commit"], clone.pin("jax")["patched_commit"]) == (head, head)
    assert "requirements/run.txt has jax 2.0" in clone.refused(SOURCE, "lock", "jax", "1.0")
    assert "the tree of jax names its commit" in clone.refused(2, "lock", "xla", "1" * 40)
    locked_wheel("2.0", "no commit")
    assert "has no line _git_hash" in clone.refused(SOURCE, "lock", "jax", "2.0")
    clone.patch("jax", mine=new_file("added", "line"))
    locked_wheel("4.0", "4" * 40)
    clone.refused(SOURCE, "lock", "jax", "4.0")
    assert clone.pin("jax")["version"] == "2.0"
