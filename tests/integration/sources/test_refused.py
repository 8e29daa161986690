"""What a sync must not take: patches, trees of somebody's work, other bytes than pinned ones. The old tree stays."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import wheels
from tests.repositories import git

from .conftest import SOURCE, Clone, Upstream, new_file, patch_text


@pytest.fixture
def synced(clone: Clone, alpha: Upstream) -> Clone:
    """A clone whose tree is in place, so that a failure has something to spoil."""
    clone.ok("sync")
    return clone


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_a_bad_patch(synced: Clone, text: str, message: str, tmp_path: Path) -> None:
    before = synced.head("alpha")
    synced.patch("alpha", a_good=new_file("good", "line"), bad=text)

    said_by_lock = synced.refused(SOURCE, "lock", "alpha")
    synced.pin("alpha", patched_commit="1" * 40)  # as a careless hand would lock it
    said_by_sync = synced.refused(SOURCE, "sync")

    assert said_by_lock == said_by_sync
    assert said_by_sync.startswith("patches/alpha/bad.patch: ")
    assert message in said_by_sync
    assert synced.head("alpha") == before
    assert git(synced.place("alpha"), "status", "--porcelain") == ""
    assert not (synced.place("alpha") / "good").exists(), "no patch is kept when another one fails"
    assert not (synced.place("alpha") / ".git" / "rebase-apply").exists()
    assert synced.leftovers == []
    assert not (tmp_path / "escaped").exists()


def test_patches_that_are_other_than_the_locked_ones(synced: Clone) -> None:
    """One was edited, or they stand in another order. A link inside of the tree is nothing bad."""
    remedy = "run `.venv/bin/python -m tooling lock alpha` if you changed the patches"
    synced.patch("alpha", a=new_file("src/readme", "../README", "120000", newline=False), b=new_file("b", "line"))
    synced.ok("lock", "alpha")
    synced.ok("sync")
    assert (synced.place("alpha") / "src" / "readme").read_text() == "hello\n"
    synced.patch("alpha", b=new_file("src/readme", "../README", "120000", newline=False), a=new_file("b", "line"))
    assert remedy in synced.refused(SOURCE, "sync")
    synced.patch("alpha", a=new_file("a", "line"), b=new_file("b", "another line"))
    assert remedy in synced.refused(SOURCE, "sync")
    assert synced.state("alpha") == "outdated"
    assert (synced.place("alpha") / "b").read_text() == "line\n"


SPOILERS = {
    "edit": ("echo mine >README", "dirty"),
    "add a file": ("echo mine >mine.txt", "dirty"),
    "delete a file": ("rm README", "dirty"),
    "commit": ("echo mine >README; git -c user.name=a -c user.email=a@b commit -qam mine", "commits"),
    "a repository of others": ("rm -r .git; git init -q", "unknown"),
    "a link": ("mv ../alpha ../elsewhere; ln -s elsewhere ../alpha", "unknown"),
    "a broken repository": ("echo garbage >.git/HEAD", "unknown"),
    "a file": ("rm -r ../alpha; echo mine >../alpha", "unknown"),
}


def spoil(clone: Clone, how: str) -> None:
    """Run a line of shell in the tree."""
    subprocess.run(["sh", "-ec", how], cwd=clone.place("alpha"), check=True)


def listing(place: Path) -> dict[str, str]:
    """All that a user may have put there."""
    if place.is_file():
        return {"": place.read_text()}
    files = (path for path in place.rglob("*") if path.is_file() and ".git" not in path.relative_to(place).parts)
    return {str(path.relative_to(place)): path.read_text() for path in files}


@pytest.mark.parametrize("case", SPOILERS)
def test_a_tree_of_somebodys_until_forced(synced: Clone, alpha: Upstream, case: str) -> None:
    """Another component comes all the same."""
    how, state = SPOILERS[case]
    spoil(synced, how)
    before = listing(synced.place("alpha"))
    assert synced.state("alpha") == state
    assert synced.run("status").returncode == 1
    synced.add_newest("gamma", alpha)

    message = synced.refused(SOURCE, "sync")
    assert message.startswith("third_party/alpha: ")
    assert "move it away, or drop it with --force" in message
    assert listing(synced.place("alpha")) == before
    assert synced.state("gamma") == "clean"

    synced.ok("sync", "--force")
    assert synced.state("alpha") == "clean"


def test_files_that_running_leaves_are_not_dirt(synced: Clone) -> None:
    spoil(synced, "mkdir src/__pycache__; touch src/__pycache__/a.pyc")
    assert synced.state("alpha") == "clean"
    assert "kept" in synced.ok("sync")


@pytest.mark.parametrize("how", ["git branch mine", "echo mine >README; git -c user.name=a -c user.email=a@b stash -q"])
def test_branches_and_a_stash_are_somebodys_work(synced: Clone, alpha: Upstream, how: str) -> None:
    """They would go with a tree that is replaced; one that needs no other stays."""
    spoil(synced, how)
    assert "kept" in synced.ok("sync")
    synced.add_newest("alpha", alpha)
    assert "has branches or a stash of yours" in synced.refused(SOURCE, "sync")
    synced.ok("sync", "--force")
    assert synced.state("alpha") == "clean"


@pytest.mark.parametrize(
    ("changes", "state", "message"),
    [
        ({"commit": "1" * 40, "tree": None}, "missing", rf"alpha: http://\S+ does not have {'1' * 40}"),
        ({"tree": "2" * 40}, "missing", rf"alpha: tree is \w+, sources.lock pins {'2' * 40}"),
        ({"patched_commit": None}, "unlocked", "run `.venv/bin/python -m tooling lock alpha`"),
    ],
    ids=["no such commit", "another tree", "not locked"],
)
def test_pins_that_nobody_can_follow(
    clone: Clone, alpha: Upstream, changes: dict[str, str | None], state: str, message: str
) -> None:
    clone.pin("alpha", **changes)
    assert re.search(message, clone.refused(SOURCE, "sync"))
    assert clone.state("alpha") == state
    assert clone.leftovers == []


PLAIN = ("pkg/a", "x", 0o100644)


@pytest.fixture
def add_wheel(clone: Clone, index: Path) -> Callable[..., Path]:
    """Pin a component that comes from one wheel: its names, contents and modes are given, and so are other pins."""
    path, url = index / "packed-1.0-py3-none-any.whl", "https://nowhere.invalid/packed.git"

    def add(*entries: tuple[str, str, int], sha256: str = "") -> Path:
        digest = wheels.pack(path, PLAIN, *entries)
        clone.add("packed", url, "1" * 40, "2" * 40, path="src", wheel="pkg", wheel_sha256=sha256 or digest)
        clone.pin("packed", patched_commit="3" * 40)
        return path

    return add


@pytest.mark.parametrize(
    "entry",
    [("../out", "x", 0o100644), ("pkg/../../out", "x", 0o100644), ("pkg/link", "/etc/passwd", 0o120777),
     ("pkg/.GIT/config", "x", 0o100644), ("pkg/git~1/config", "x", 0o100644)],
    ids=lambda entry: entry[0],
)  # fmt: skip
def test_a_crafted_wheel_writes_nothing_elsewhere(
    clone: Clone, add_wheel: Callable[..., Path], tmp_path: Path, entry: tuple[str, str, int]
) -> None:
    """Each has the locked hash: pip refuses a name that leads out of its folder, git one that leads into its own."""
    add_wheel(entry)
    clone.refused(SOURCE, "sync")
    assert clone.leftovers == []
    assert not [path for path in tmp_path.rglob("out*") if path.name == "out"]


def test_a_wheel_of_another_tree_or_hash(clone: Clone, add_wheel: Callable[..., Path]) -> None:
    add_wheel()
    assert "packed: tree of its wheel is" in clone.refused(SOURCE, "sync")
    assert clone.leftovers == []
    path = add_wheel(sha256="4" * 64)
    assert "the package index has other files than the locked ones" in clone.refused(SOURCE, "sync")
    path.unlink()
    message = clone.refused(SOURCE, "sync")
    assert "; and packed: cannot fetch https://nowhere.invalid/packed.git" in message


def test_no_network(synced: Clone, alpha: Upstream) -> None:
    before = synced.head("alpha")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        alpha.url = f"http://127.0.0.1:{closed.getsockname()[1]}/alpha.git"
        synced.add_newest("alpha", alpha)
        assert f"alpha: cannot fetch {alpha.url}" in synced.refused(SOURCE, "sync")
    assert synced.head("alpha") == before


def test_objects_that_git_refuses_and_a_repository_that_is_not_there(clone: Clone, alpha: Upstream) -> None:
    """A commit whose tree holds a folder named ``.git``: git's own check of incoming objects stops it."""
    store = ("hash-object", "-w", "--literally", "--stdin", "-t")
    blob = git(alpha.bare, *store, "blob", stdin=b"evil")
    inner = git(alpha.bare, *store, "tree", stdin=b"100644 config\0" + bytes.fromhex(blob))
    tree = git(alpha.bare, *store, "tree", stdin=b"40000 .git\0" + bytes.fromhex(inner))
    commit = git(alpha.bare, "commit-tree", tree, "-m", "evil")
    git(alpha.bare, "update-ref", "refs/heads/evil", commit)
    clone.add("alpha", alpha.url, commit, tree)

    assert "sent objects that git refuses" in clone.refused(SOURCE, "sync")
    assert not os.path.lexists(clone.place("alpha"))
    clone.add("alpha", alpha.url.replace("alpha.git", "absent.git"), commit, tree)
    assert "absent.git" in clone.refused(SOURCE, "sync", GIT_ASKPASS="/bin/false")
