"""Trees in ``third_party/`` that hold somebody's work: refused, put aside or dropped, as the user chooses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .conftest import Clone, Upstream

DIRTY = 3


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
    """Sync, and run a line of shell in the tree."""
    clone.ok("sync")
    subprocess.run(["sh", "-ec", how], cwd=clone.place("alpha"), check=True)


def listing(place: Path) -> dict[str, str]:
    """All that a user may have put there."""
    if place.is_file():
        return {"": place.read_text()}
    files = (path for path in place.rglob("*") if path.is_file() and ".git" not in path.relative_to(place).parts)
    return {str(path.relative_to(place)): path.read_text() for path in files}


@pytest.mark.parametrize("case", SPOILERS)
def test_refused_until_forced(clone: Clone, alpha: Upstream, case: str) -> None:
    how, state = SPOILERS[case]
    spoil(clone, how)
    before = listing(clone.place("alpha"))
    assert clone.state("alpha") == state

    said = clone.refused(DIRTY, "sync")
    assert said.startswith("third_party/alpha: ")
    assert "move it away, or drop it with --force" in said
    assert listing(clone.place("alpha")) == before

    clone.ok("sync", "--force")
    assert clone.state("alpha") == "clean"


def test_files_that_running_leaves_are_not_dirt(clone: Clone, alpha: Upstream) -> None:
    spoil(clone, "mkdir src/__pycache__; touch src/__pycache__/a.pyc")
    assert clone.state("alpha") == "clean"
    assert "kept" in clone.ok("sync")


def test_a_dirty_tree_does_not_keep_others_from_coming(clone: Clone, alpha: Upstream) -> None:
    spoil(clone, "echo mine >README")
    clone.add("gamma", clone.components["alpha"]["url"], alpha.head, alpha.tree())

    clone.refused(DIRTY, "sync")

    assert clone.state("gamma") == "clean"
    assert clone.state("alpha") == "dirty"


@pytest.mark.parametrize("how", ["git branch mine", "echo mine >README; git -c user.name=a -c user.email=a@b stash -q"])
def test_branches_and_a_stash_are_somebodys_work(clone: Clone, alpha: Upstream, how: str) -> None:
    """They would go with a tree that is replaced; one that needs no other stays."""
    spoil(clone, how)
    assert "kept" in clone.ok("sync")
    clone.add("alpha", clone.components["alpha"]["url"], alpha.head, alpha.tree())
    assert "has branches or a stash of yours" in clone.refused(DIRTY, "sync")
    clone.ok("sync", "--force")
    assert clone.state("alpha") == "clean"
