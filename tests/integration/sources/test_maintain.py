"""Changing what is pinned: refresh, bump, lock."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .conftest import Clone, Upstream, git, make_clone, new_file, patch_text


def commit(clone: Clone, path: str, text: str, message: str) -> None:
    """Commit a file in the tree as a user would."""
    (clone.place("alpha") / path).write_text(text)
    git(clone.place("alpha"), "add", "-A")
    git(clone.place("alpha"), "commit", "-q", "-m", message)


def series(clone: Clone) -> list[str]:
    return (clone.root / "patches" / "alpha" / "series").read_text().split()


def pin(clone: Clone) -> dict[str, Any]:
    import yaml

    return yaml.safe_load((clone.root / "sources.lock").read_text())["components"]["alpha"]


def test_refresh_turns_commits_into_patches(clone: Clone, alpha: Upstream, tmp_path: Path) -> None:
    clone.patch("alpha", first=patch_text("README", "hello", "patched"))
    clone.ok("lock", "alpha")
    clone.ok("sync")
    commit(clone, "src/a.txt", "two\n", "Make it two\n\nOne was too few.")
    commit(clone, "blob.bin", "\0binary\n", "Add a blob")
    assert clone.state("alpha") == "commits"

    clone.ok("refresh", "alpha")

    assert series(clone) == ["first.patch", "make-it-two.patch", "add-a-blob.patch"]
    assert clone.state("alpha") == "clean"
    assert "kept" in clone.ok("sync")
    assert git(clone.place("alpha"), "log", "-2", "--format=%B|") == "Add a blob\n|\nMake it two\n\nOne was too few.\n|"
    before = [path.read_bytes() for path in sorted((clone.root / "patches" / "alpha").iterdir())]
    clone.ok("refresh", "alpha")
    assert [path.read_bytes() for path in sorted((clone.root / "patches" / "alpha").iterdir())] == before
    other = make_clone(tmp_path / "other")
    for path in ("sources.yaml", "sources.lock", "patches"):
        os.symlink(clone.root / path, other.root / path)
    other.ok("sync")
    assert other.head("alpha") == clone.head("alpha")


def test_refresh_of_an_amended_commit_keeps_the_name_of_its_file(clone: Clone, alpha: Upstream) -> None:
    clone.patch("alpha", odd_name=patch_text("README", "hello", "patched"))
    clone.ok("lock", "alpha")
    clone.ok("sync")
    (clone.place("alpha") / "README").write_text("patched better\n")
    git(clone.place("alpha"), "commit", "-q", "-a", "--amend", "--no-edit")

    clone.ok("refresh", "alpha")

    assert series(clone) == ["odd_name.patch"]
    assert "+patched better" in (clone.root / "patches" / "alpha" / "odd_name.patch").read_text()
    assert clone.state("alpha") == "clean"


def test_refresh_of_a_dropped_commit_removes_its_patch(clone: Clone, alpha: Upstream) -> None:
    clone.patch("alpha", a=new_file("a", "line"), b=new_file("b", "line"))
    clone.ok("lock")
    clone.ok("sync")
    git(clone.place("alpha"), "reset", "-q", "--hard", "HEAD~1")

    clone.ok("refresh", "alpha")

    assert series(clone) == ["a.patch"]
    assert not (clone.root / "patches" / "alpha" / "b.patch").exists()


def test_refresh_refuses_two_commits_of_one_subject(clone: Clone, alpha: Upstream) -> None:
    clone.ok("sync")
    for name in ("one", "two"):
        commit(clone, name, f"{name}\n", "Add a file")

    assert "two commits have one subject" in clone.refused(29, "refresh", "alpha")


def test_refresh_wants_changes_committed(clone: Clone, alpha: Upstream) -> None:
    clone.ok("sync")
    (clone.place("alpha") / "README").write_text("mine\n")

    assert "commit your changes there" in clone.refused(25, "refresh", "alpha")


def test_refresh_refuses_merges(clone: Clone, alpha: Upstream) -> None:
    clone.ok("sync")
    place = clone.place("alpha")
    git(place, "checkout", "-q", "-b", "side")
    commit(clone, "side.txt", "side\n", "side")
    git(place, "checkout", "-q", "patched")
    commit(clone, "main.txt", "main\n", "main")
    git(place, "merge", "-q", "--no-edit", "side")

    assert "merge" in clone.refused(29, "refresh", "alpha")


def test_refresh_of_what_is_not_there(clone: Clone, alpha: Upstream) -> None:
    assert "run `python -m tooling sync` first" in clone.refused(2, "refresh", "alpha")
    assert "no such component" in clone.refused(2, "refresh", "omega")


def test_bump_moves_everything(clone: Clone, alpha: Upstream) -> None:
    clone.patch("alpha", only=patch_text("src/a.txt", "one", "two"))
    clone.ok("lock")
    clone.ok("sync")
    url = clone.components["alpha"]["url"]
    (clone.root / "sources.yaml").write_text(
        "format: 1\ncomponents:\n  # keep this comment\n  alpha:\n    groups: [run]\n"
        f'    url: {url}\n    version: "1.0"  # and this\n    tag: v{{version}}\n'
        f"  omega:\n    groups: [source]\n    url: {url}\n    version: '7'\n"
    )

    before = (clone.root / "sources.yaml").read_text()

    clone.ok("bump", "alpha", "2.0")

    text = (clone.root / "sources.yaml").read_text()
    assert text == before.replace('version: "1.0"', 'version: "2.0"')
    assert (pin(clone)["commit"], pin(clone)["tree"]) == (alpha.head, alpha.tree())
    assert clone.state("alpha") == "outdated"
    clone.ok("sync", "--group", "run")
    assert (clone.place("alpha") / "README").read_text() == "later\n"
    assert (clone.place("alpha") / "src" / "a.txt").read_text() == "two\n"


def test_bump_whose_patches_conflict_changes_nothing(clone: Clone, alpha: Upstream) -> None:
    clone.patch("alpha", only=patch_text("README", "hello", "patched"))
    clone.ok("lock")
    rewrite_as_yaml(clone)
    before = [(clone.root / name).read_bytes() for name in ("sources.yaml", "sources.lock")]

    assert "only.patch: does not apply" in clone.refused(29, "bump", "alpha", "2.0")

    assert [(clone.root / name).read_bytes() for name in ("sources.yaml", "sources.lock")] == before
    assert clone.leftovers == []


def rewrite_as_yaml(clone: Clone) -> None:
    """Write the manifest in block style, as people do."""
    import yaml

    document = {"format": 1, "components": clone.components}
    (clone.root / "sources.yaml").write_text(yaml.safe_dump(document, sort_keys=False))


def test_bump_to_a_version_that_does_not_exist(clone: Clone, alpha: Upstream) -> None:
    rewrite_as_yaml(clone)

    assert "has no tag v9.9" in clone.refused(27, "bump", "alpha", "9.9")
    assert "is no version" in clone.refused(2, "bump", "alpha", "../9")
    assert pin(clone)["version"] == "1.0"


def test_lock_is_stable(clone: Clone, alpha: Upstream) -> None:
    clone.patch("alpha", only=new_file("added", "line"))
    clone.ok("lock", "alpha")
    first = (clone.root / "sources.lock").read_bytes()

    clone.ok("lock", "alpha")

    assert (clone.root / "sources.lock").read_bytes() == first
    assert pin(clone)["patched_commit"] != pin(clone)["commit"]


def test_status_is_one_table_and_json(clone: Clone, alpha: Upstream) -> None:
    clone.ok("sync")

    lines = clone.ok("status").splitlines()
    report = json.loads(clone.ok("status", "--json"))

    assert len(lines) == 2
    assert lines[0].split()[:4] == ["component", "groups", "version", "state"]
    assert lines[1].split()[:4] == ["alpha", "run", "1.0", "clean"]
    assert report["clean"] is True
    assert report["components"][0]["commit"] == clone.head("alpha")


def test_status_exits_with_1_when_something_is_not_as_locked(clone: Clone, alpha: Upstream) -> None:
    clone.ok("sync")
    (clone.place("alpha") / "README").write_text("mine\n")

    assert clone.run("status").returncode == 1
