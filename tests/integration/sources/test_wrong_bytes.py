"""Servers and wheels that do not give the pinned bytes, and networks that give none."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import wheels

from .conftest import Clone, Upstream, git

PIN_ERROR = NETWORK = MISSING = INTEGRITY = 3


@pytest.mark.parametrize(
    ("wrong", "state", "says"),
    [
        ({"commit": "1" * 40, "tree": None}, "missing", rf"alpha: http://\S+ does not have {'1' * 40}"),
        ({"tree": "2" * 40}, "missing", rf"alpha: tree is \w+, sources.lock pins {'2' * 40}"),
        ({"patched_commit": None}, "unlocked", "run `.venv/bin/python -m tooling lock alpha`"),
    ],
    ids=["no such commit", "another tree", "not locked"],
)
def test_pins_that_nobody_can_follow(
    clone: Clone, alpha: Upstream, wrong: dict[str, str | None], state: str, says: str
) -> None:
    clone.pins["alpha"] |= wrong
    clone.write()
    assert re.search(says, clone.refused(PIN_ERROR, "sync"))
    assert clone.state("alpha") == state
    assert clone.leftovers == []


@pytest.fixture
def add_wheel(clone: Clone, index: Path) -> Callable[..., Path]:
    """Pin a component that comes from one wheel: its names, contents and modes are given, and so are other pins."""
    path, url = index / "packed-1.0-py3-none-any.whl", "https://nowhere.invalid/packed.git"

    def add(*entries: tuple[str, str, int], sha256: str = "") -> Path:
        digest = wheels.pack(path, *entries)
        clone.add("packed", url, "1" * 40, "2" * 40, path="src", wheel="pkg", wheel_sha256=sha256 or digest)
        clone.pins["packed"]["patched_commit"] = "3" * 40
        clone.write()
        return path

    return add


PLAIN = ("pkg/a", "x", 0o100644)


def test_wheel_with_another_tree(clone: Clone, add_wheel: Callable[..., Path]) -> None:
    add_wheel(PLAIN)
    assert "packed: tree of its wheel is" in clone.refused(INTEGRITY, "sync")
    assert clone.leftovers == []


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
    add_wheel(PLAIN, entry)
    clone.refused(INTEGRITY, "sync")
    assert clone.leftovers == []
    assert not [path for path in tmp_path.rglob("out*") if path.name == "out"]


def test_wheel_that_the_index_offers_with_another_hash(clone: Clone, add_wheel: Callable[..., Path]) -> None:
    path = add_wheel(PLAIN, sha256="4" * 64)

    assert "the package index has other files than the locked ones" in clone.refused(INTEGRITY, "sync")
    path.unlink()
    said = clone.refused(NETWORK, "sync")
    assert "; and packed: cannot fetch https://nowhere.invalid/packed.git" in said


def test_no_network(clone: Clone, alpha: Upstream) -> None:
    clone.ok("sync")
    before = clone.head("alpha")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/alpha.git"
        clone.add("alpha", url, alpha.head, alpha.tree())

        assert f"alpha: cannot fetch {url}" in clone.refused(NETWORK, "sync")

    assert clone.head("alpha") == before


def test_server_that_asks_for_a_password_is_not_answered(clone: Clone, alpha: Upstream) -> None:
    clone.add("alpha", clone.components["alpha"]["url"].replace("alpha.git", "absent.git"), alpha.head, alpha.tree())
    assert "absent.git" in clone.refused(NETWORK, "sync", env={"GIT_ASKPASS": "/bin/false"})


def test_objects_that_git_refuses(clone: Clone, alpha: Upstream) -> None:
    """A commit whose tree holds a folder named ``.git``: git's own check of incoming objects stops it."""
    store = ("hash-object", "-w", "--literally", "--stdin", "-t")
    blob = git(alpha.bare, *store, "blob", stdin=b"evil")
    inner = git(alpha.bare, *store, "tree", stdin=b"100644 config\0" + bytes.fromhex(blob))
    tree = git(alpha.bare, *store, "tree", stdin=b"40000 .git\0" + bytes.fromhex(inner))
    commit = git(alpha.bare, "commit-tree", tree, "-m", "evil")
    git(alpha.bare, "update-ref", "refs/heads/evil", commit)
    clone.add("alpha", clone.components["alpha"]["url"], commit, tree)

    assert "sent objects that git refuses" in clone.refused(INTEGRITY, "sync")
    assert not os.path.lexists(clone.place("alpha"))
