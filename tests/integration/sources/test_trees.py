"""Trees in ``third_party/`` that hold somebody's work: refused, put aside or dropped, as the user chooses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .conftest import Clone, Upstream, git

DIRTY = 3


def edit(clone: Clone) -> None:
    (clone.place("alpha") / "README").write_text("mine\n")


def add_file(clone: Clone) -> None:
    (clone.place("alpha") / "mine.txt").write_text("mine\n")


def delete_file(clone: Clone) -> None:
    (clone.place("alpha") / "README").unlink()


def commit(clone: Clone) -> None:
    edit(clone)
    git(clone.place("alpha"), "commit", "-qam", "mine")


def foreign_repository(clone: Clone) -> None:
    shutil.rmtree(clone.place("alpha"))
    clone.place("alpha").mkdir()
    add_file(clone)
    git(clone.place("alpha"), "init", "-q")
    git(clone.place("alpha"), "add", "-A")
    git(clone.place("alpha"), "commit", "-qm", "mine")


def foreign_link(clone: Clone) -> None:
    shutil.rmtree(clone.place("alpha"))
    elsewhere = clone.root.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.txt").write_text("mine\n")
    clone.place("alpha").symlink_to(elsewhere)


def broken_repository(clone: Clone) -> None:
    (clone.place("alpha") / ".git" / "HEAD").write_text("garbage\n")


def plain_file(clone: Clone) -> None:
    shutil.rmtree(clone.place("alpha"))
    clone.place("alpha").write_text("mine\n")


SPOILERS = [
    (edit, "dirty"), (add_file, "dirty"), (delete_file, "dirty"), (commit, "commits"), (foreign_repository, "unknown"),
    (foreign_link, "unknown"), (broken_repository, "unknown"), (plain_file, "unknown"),
]  # fmt: skip


@pytest.fixture(params=SPOILERS, ids=[spoil.__name__ for spoil, _ in SPOILERS])
def spoiled(request: pytest.FixtureRequest, clone: Clone, alpha: Upstream) -> Clone:
    """A clone whose tree is not as the last sync left it."""
    spoil, state = request.param
    clone.ok("sync")
    spoil(clone)
    assert clone.state("alpha") == state
    return clone


def listing(place: Path) -> dict[str, str]:
    """All that a user may have put there."""
    if place.is_file():
        return {"": place.read_text()}
    files = (path for path in place.rglob("*") if path.is_file() and ".git" not in path.relative_to(place).parts)
    return {str(path.relative_to(place)): path.read_text() for path in files}


def test_refused_until_forced(spoiled: Clone) -> None:
    place = spoiled.place("alpha")
    before = listing(place)

    said = spoiled.refused(DIRTY, "sync")
    assert said.startswith("third_party/alpha: ")
    assert "move it away, or drop it with --force" in said
    assert listing(place) == before

    spoiled.ok("sync", "--force")
    assert spoiled.state("alpha") == "clean"


def test_files_that_running_leaves_are_not_dirt(clone: Clone, alpha: Upstream) -> None:
    clone.ok("sync")
    (clone.place("alpha") / "src" / "__pycache__").mkdir()
    (clone.place("alpha") / "src" / "__pycache__" / "a.pyc").write_text("")

    assert clone.state("alpha") == "clean"
    assert "kept" in clone.ok("sync")


def test_a_dirty_tree_does_not_keep_others_from_coming(clone: Clone, alpha: Upstream) -> None:
    clone.ok("sync")
    edit(clone)
    clone.add("gamma", clone.components["alpha"]["url"], alpha.head, alpha.tree())

    clone.refused(DIRTY, "sync")

    assert clone.state("gamma") == "clean"
    assert clone.state("alpha") == "dirty"


@pytest.mark.parametrize("words", [("branch", "mine"), ("stash",)])
def test_branches_and_a_stash_are_somebodys_work(clone: Clone, alpha: Upstream, words: tuple[str, ...]) -> None:
    """They would go with a tree that is replaced; one that needs no other stays."""
    clone.ok("sync")
    edit(clone)
    git(clone.place("alpha"), *words)
    git(clone.place("alpha"), "checkout", "-q", ".")
    assert "kept" in clone.ok("sync")
    clone.add("alpha", clone.components["alpha"]["url"], alpha.head, alpha.tree())
    assert "has branches or a stash of yours" in clone.refused(DIRTY, "sync")
    clone.ok("sync", "--force")
    assert clone.state("alpha") == "clean"
