"""Commits that files name: a jax whose wheel says its commit, and an xla that this commit's tree names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import wheels

from .conftest import Clone, Upstream, git, new_file, patch_text

PIN_ERROR = NETWORK = MISSING = INTEGRITY = 3
FILE = "third_party/xla/revision.bzl"


def names(commit: str) -> dict[str, str]:
    return {FILE: f'XLA_COMMIT = "{commit}"\nXLA_SHA256 = "{"0" * 64}"\n'}


@pytest.fixture
def xla(make_upstream: Callable[[str], Upstream], server: Any) -> Upstream:
    upstream = make_upstream("xla")
    upstream.commit({"BUILD": "one\n"}, "first")
    upstream.commit({"BUILD": "two\n"}, "second")
    return upstream


@pytest.fixture
def jax(clone: Clone, make_upstream: Callable[[str], Upstream], xla: Upstream, server: Any) -> Upstream:
    """Jax 1.0 names the first xla, jax 2.0 the second."""
    upstream = make_upstream("jax")
    upstream.commit(names(git(xla.work, "rev-parse", "HEAD~1")), "first", tag="jax-v1.0")
    commit = upstream.head
    upstream.commit(names(xla.head), "second", tag="jax-v2.0")
    clone.add("jax", f"{server.url}/jax.git", commit, None, groups=["source"])
    clone.components["jax"]["commit"] = {"file": "jax/version.py", "name": "_git_hash"}
    clone.components["xla"] = {
        "url": f"{server.url}/xla.git",
        "commit": {"component": "jax", "file": FILE, "name": "XLA_COMMIT"},
        "groups": ["source"],
    }
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
    assert clone.state("xla") == "missing"
    clone.ok("sync", "--group", "source")
    assert clone.head("xla") == git(xla.work, "rev-parse", "HEAD~1")
    assert (clone.place("xla") / "BUILD").read_text() == "one\n"
    assert (clone.state("jax"), clone.state("xla")) == ("clean", "clean")
    assert clone.ok("sync", "--group", "source").count(" kept ") == 2

    clone.pins["jax"] |= {"version": "2.0", "commit": jax.head, "patched_commit": jax.head}
    clone.write()
    clone.ok("sync", "jax")
    assert clone.state("xla") == "outdated"
    clone.ok("sync", "xla")
    assert clone.head("xla") == xla.head
    assert clone.state("xla") == "clean"


def test_xla_alone_says_where_its_commit_is_named(clone: Clone, jax: Upstream) -> None:
    said = clone.refused(PIN_ERROR, "sync", "xla")
    assert f"third_party/jax/{FILE} names its commit, and is not there" in said
    assert "run `.venv/bin/python -m tooling sync jax xla`" in said
    assert "no such component" in clone.refused(2, "sync", "nosuch")


def test_an_xla_that_nobody_has_leaves_jax_in_place(clone: Clone, jax: Upstream) -> None:
    commit = jax.commit(names("1" * 40), "names nobody's")
    clone.pins["jax"] |= {"commit": commit, "patched_commit": commit}
    clone.write()
    assert "does not have " + "1" * 40 in clone.refused(MISSING, "sync", "--group", "source")
    assert clone.state("jax") == "clean"
    jax.commit({FILE: "nothing here\n"}, "names none")
    clone.pins["jax"] |= {"commit": jax.head, "patched_commit": jax.head}
    clone.write()
    assert f"{FILE} has no line XLA_COMMIT" in clone.refused(MISSING, "sync", "--group", "source")


def test_patches_of_jax_and_xla_are_applied(clone: Clone, jax: Upstream, xla: Upstream) -> None:
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
    assert "mine.patch: does not apply" in clone.refused(3, "sync", "--group", "source")


def test_another_jax_brings_another_xla(clone: Clone, jax: Upstream, xla: Upstream, server: Any) -> None:
    clone.ok("sync", "--group", "source", "--override", f"jax={server.url}/jax.git@{jax.head}")
    assert clone.head("xla") == xla.head


def test_lock_reads_the_commit_in_the_locked_wheel(clone: Clone, jax: Upstream, locked_wheel: Any) -> None:
    """Git is asked where patches must be tried, and only there."""
    locked_wheel("2.0", jax.head)
    clone.ok("lock", "jax", "2.0")
    assert (clone.pin("jax")["commit"], clone.pin("jax")["patched_commit"]) == (jax.head, jax.head)
    assert "requirements/run.txt has jax 2.0" in clone.refused(PIN_ERROR, "lock", "jax", "1.0")
    assert "the tree of jax names its commit" in clone.refused(2, "lock", "xla", "1" * 40)
    locked_wheel("2.0", "no commit")
    assert "has no line _git_hash" in clone.refused(MISSING, "lock", "jax", "2.0")
    clone.patch("jax", mine=new_file("added", "line"))
    locked_wheel("4.0", "4" * 40)
    clone.refused(NETWORK, "lock", "jax", "4.0")
    assert clone.pin("jax")["version"] == "2.0"
