"""Servers and wheels that do not give the pinned bytes, and networks that give none."""

from __future__ import annotations

import hashlib
import os
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Clone, Upstream, git

PIN_ERROR = NETWORK = MISSING = INTEGRITY = 3


def test_commit_that_the_server_lacks(clone: Clone, alpha: Upstream) -> None:
    clone.add("alpha", clone.components["alpha"]["url"], "1" * 40, None)

    said = clone.refused(MISSING, "sync")

    assert said.startswith("alpha: ")
    assert "does not have " + "1" * 40 in said
    assert clone.state("alpha") == "missing"
    assert clone.leftovers == []


def test_tree_that_is_not_the_pinned_one(clone: Clone, alpha: Upstream) -> None:
    clone.add("alpha", clone.components["alpha"]["url"], alpha.head, "2" * 40)

    assert f"alpha: tree is {alpha.tree()}, sources.lock pins {'2' * 40}" in clone.refused(INTEGRITY, "sync")
    assert clone.state("alpha") == "missing"


def test_a_component_that_nobody_has_locked(clone: Clone, alpha: Upstream) -> None:
    del clone.pins["alpha"]
    clone.write()

    assert "run `.venv/bin/python -m tooling lock alpha VERSION`" in clone.refused(PIN_ERROR, "sync")
    assert clone.state("alpha") == "unlocked"


@pytest.fixture
def add_wheel(clone: Clone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Pin a component that comes from one wheel: its names, contents and modes are given, and so are other pins."""
    path = tmp_path / "index" / "packed-1.0-py3-none-any.whl"
    path.parent.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    described = "Metadata-Version: 2.1\nName: packed\nVersion: 1.0\nWheel-Version: 1.0\n"

    def add(*entries: tuple[str, str, int], tree: str = "2" * 40, sha256: str = "") -> Path:
        with zipfile.ZipFile(path, "w") as archive:
            metadata = [
                (f"packed-1.0.dist-info/{name}", described, 0o100644) for name in ("METADATA", "WHEEL", "RECORD")
            ]
            for name, text, mode in (*entries, *metadata):
                info = zipfile.ZipInfo(name)
                info.external_attr = mode << 16
                archive.writestr(info, text)
        digest = sha256 or hashlib.sha256(path.read_bytes()).hexdigest()
        url = "https://nowhere.invalid/packed.git"
        clone.add("packed", url, "1" * 40, tree, path="src", wheel="pkg", wheel_sha256=digest)
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


def test_server_that_asks_for_a_password_is_not_answered(
    clone: Clone, alpha: Upstream, make_upstream: Callable[[str], Upstream]
) -> None:
    clone.add("alpha", clone.components["alpha"]["url"].replace("alpha.git", "absent.git"), alpha.head, alpha.tree())

    said = clone.refused(NETWORK, "sync", env={"GIT_ASKPASS": "/bin/false", "SSH_ASKPASS": "/bin/false"})

    assert "absent.git" in said


def test_objects_that_git_refuses(clone: Clone, alpha: Upstream) -> None:
    """A commit whose tree holds a folder named ``.git``: git's own check of incoming objects stops it."""
    blob = git(alpha.bare, "hash-object", "-w", "--stdin", stdin=b"evil")
    raw = b"100644 config\0" + bytes.fromhex(blob)
    inner = git(alpha.bare, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", stdin=raw)
    tree = git(
        alpha.bare,
        "hash-object",
        "-w",
        "-t",
        "tree",
        "--literally",
        "--stdin",
        stdin=b"40000 .git\0" + bytes.fromhex(inner),
    )
    commit = git(alpha.bare, "commit-tree", tree, "-m", "evil")
    git(alpha.bare, "update-ref", "refs/heads/evil", commit)
    clone.add("alpha", clone.components["alpha"]["url"], commit, tree)

    assert "sent objects that git refuses" in clone.refused(INTEGRITY, "sync")
    assert not os.path.lexists(clone.place("alpha"))
