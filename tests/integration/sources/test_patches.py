"""Patches that a sync must not apply: each leaves the old tree as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Clone, Upstream, git, new_file, patch_text

PATCH_ERROR = MANIFEST_ERROR = PIN_ERROR = 3


@pytest.fixture
def synced(clone: Clone, alpha: Upstream) -> Clone:
    """A clone whose tree is in place, so that a failure has something to spoil."""
    clone.ok("sync")
    return clone


def lock_by_hand(clone: Clone) -> None:
    """Expect of the patches what they do not give, as a careless hand would."""
    clone.pins["alpha"]["patched_commit"] = "1" * 40
    clone.write()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (patch_text("README", "not there", "x"), "does not apply"),
        (patch_text("absent", "a", "b"), "does not apply"),
        (patch_text("README", "hello", "bye") + patch_text("absent", "a", "b"), "does not apply"),
        (new_file(".git/hooks/post-checkout", "#!/bin/sh", "100755"), "invalid path"),
        (new_file("src/.GIT/config", "x"), "invalid path"),
        (new_file("git~1/config", "x"), "invalid path"),
        (new_file("../escaped", "x"), "invalid path"),
        (new_file("/tmp/escaped", "x"), "invalid path"),
        (new_file("l", "src", "120000", newline=False) + new_file("l/through", "x"), "does not apply"),
        ("diff --git a/README b/.git/hooks/x\nrename from README\nrename to .git/hooks/x\n", "invalid path"),
        ("this is no patch\n", "does not apply"),
        ("", "does not apply"),
    ],
    ids=["conflict", "absent-file", "second-hunk-conflicts", "git-hooks", "git-upper-case", "git-short-name", "escape",
         "absolute", "through-link", "rename-into-git", "garbage", "empty"],
)  # fmt: skip
def test_bad_patch_is_refused_and_the_old_tree_stays(synced: Clone, text: str, says: str, tmp_path: Path) -> None:
    before = synced.head("alpha")
    synced.patch("alpha", a_good=new_file("good", "line"), bad=text)

    said_by_lock = synced.refused(PATCH_ERROR, "lock", "alpha")
    lock_by_hand(synced)
    said_by_sync = synced.refused(PATCH_ERROR, "sync")

    assert said_by_lock == said_by_sync
    assert said_by_sync.startswith("patches/alpha/bad.patch: ")
    assert says in said_by_sync
    assert synced.head("alpha") == before
    assert git(synced.place("alpha"), "status", "--porcelain") == ""
    assert not (synced.place("alpha") / "good").exists(), "no patch is kept when another one fails"
    assert not (synced.place("alpha") / ".git" / "rebase-apply").exists()
    assert synced.leftovers == []
    assert not (tmp_path / "escaped").exists()


def test_patches_that_are_other_than_the_locked_ones_are_refused(synced: Clone) -> None:
    """One was edited, or they stand in another order."""
    remedy = "run `.venv/bin/python -m tooling lock alpha` if you changed the patches"
    synced.patch("alpha", a=new_file("a", "line"), b=new_file("b", "line"))
    synced.ok("lock", "alpha")
    synced.ok("sync")
    synced.patch("alpha", b=new_file("a", "line"), a=new_file("b", "line"))
    assert remedy in synced.refused(PIN_ERROR, "sync")
    synced.patch("alpha", a=new_file("a", "line"), b=new_file("b", "another line"))
    assert remedy in synced.refused(PIN_ERROR, "sync")
    assert synced.state("alpha") == "outdated"
    assert (synced.place("alpha") / "b").read_text() == "line\n"


def test_link_inside_the_tree_is_allowed(synced: Clone) -> None:
    synced.patch("alpha", link=new_file("src/readme", "../README", "120000", newline=False))
    synced.ok("lock", "alpha")

    synced.ok("sync")

    assert (synced.place("alpha") / "src" / "readme").read_text() == "hello\n"
