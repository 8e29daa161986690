"""What a sync brings in, by which way, and that a second one has nothing to do."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import wheels

from .conftest import Clone, Upstream, git, make_clone, new_file, patch_text


def test_pinned_commit_arrives_and_a_second_sync_touches_nothing(clone: Clone, alpha: Upstream, server: Any) -> None:
    clone.ok("sync")
    place = clone.place("alpha")
    assert clone.head("alpha") == clone.pins["alpha"]["commit"]
    assert (place / "README").read_text() == "hello\n"
    assert git(place, "rev-list", "--all", "--count") == "1", "without history"
    assert git(place, "status", "--porcelain") == ""
    assert clone.state("alpha") == "clean"
    assert clone.leftovers == []

    requests, times = len(server.requests), {path: path.stat().st_mtime_ns for path in place.glob("[!.]*")}
    assert "alpha      kept" in clone.ok("sync")
    assert len(server.requests) == requests
    assert {path: path.stat().st_mtime_ns for path in place.glob("[!.]*")} == times


def test_patched_commit_is_the_same_everywhere(clone: Clone, alpha: Upstream, tmp_path: Path) -> None:
    clone.patch("alpha", a=patch_text("README", "hello", "patched"), b=new_file("src/b.txt", "two"))
    clone.ok("lock", "alpha")
    clone.ok("sync")
    other = make_clone(tmp_path / "other")
    for name in ("sources.yaml", "sources.lock"):
        (other.root / name).write_bytes((clone.root / name).read_bytes())
    other.patch("alpha", a=patch_text("README", "hello", "patched"), b=new_file("src/b.txt", "two"))

    other.ok("sync", env={"GIT_AUTHOR_NAME": "Somebody Else", "GIT_COMMITTER_DATE": "@1 +0000", "TZ": "Asia/Tokyo"})

    assert clone.head("alpha") == other.head("alpha") != clone.pins["alpha"]["commit"]
    assert git(clone.place("alpha"), "log", "--format=%s", "-2") == "b\na"
    assert (other.place("alpha") / "README").read_text() == "patched\n"
    assert (other.place("alpha") / "src" / "b.txt").read_text() == "two\n"


def test_changed_patch_is_applied_from_what_is_on_disk(clone: Clone, alpha: Upstream, server: Any) -> None:
    clone.ok("sync")
    clone.patch("alpha", only=patch_text("README", "hello", "patched"))
    clone.ok("lock", "alpha")
    requests = len(server.requests)

    clone.ok("sync")

    assert len(server.requests) == requests
    assert (clone.place("alpha") / "README").read_text() == "patched\n"


@pytest.fixture
def beta(make_upstream: Callable[[str], Upstream]) -> Upstream:
    """An upstream of which the component is only ``src``; it has a program, a link, line ends and an attribute."""
    upstream = make_upstream("beta")
    (upstream.work / "src").mkdir()
    (upstream.work / "src" / "tool.sh").write_text("#!/bin/sh\n")
    (upstream.work / "src" / "tool.sh").chmod(0o755)
    (upstream.work / "src" / "dos.txt").write_bytes(b"line\r\n")
    more = {"src/pkg/a.py": "A = 1\n", "src/.gitattributes": "*.py text\n", "src/ignored.log": "kept\n"}
    upstream.commit({"README": "not wanted\n"} | more)
    return upstream


def test_wheel_and_git_give_the_same_commit(beta: Upstream, server: Any, tmp_path: Path, index: Path) -> None:
    """A wheel that has the folder ``src`` as publishers pack it: the file modes stay."""
    tree, heads = beta.work / "src", set()
    files = [(path, path.relative_to(tree)) for path in sorted(tree.rglob("*")) if path.is_file()]
    entries = [(f"beta/{name}", path.read_bytes().decode(), path.stat().st_mode) for path, name in files]
    digest = wheels.pack(index / "beta-1.0-py3-none-any.whl", *entries)
    for way, more in (("git", {}), ("wheel", {"wheel": "beta", "wheel_sha256": digest})):
        one = make_clone(tmp_path / way)
        one.add("beta", f"{server.url}/beta.git", beta.head, beta.tree("HEAD", "src"), path="src", **more)
        one.patch("beta", only=patch_text("src/pkg/a.py", "A = 1", "A = 2"))
        one.ok("lock", "beta")
        assert f"from {way}" in one.ok("sync")
        assert os.access(one.place("beta") / "src" / "tool.sh", os.X_OK)
        assert (one.place("beta") / "src" / "dos.txt").read_bytes() == b"line\r\n"
        assert [path.name for path in one.place("beta").iterdir() if path.name != ".git"] == ["src"]
        heads.add(one.head("beta"))
    assert len(heads) == 1


def test_mirror_is_asked_instead_of_the_upstream(clone: Clone, alpha: Upstream, server: Any) -> None:
    clone.components["alpha"]["url"] = "https://nowhere.invalid/owner/alpha.git"
    clone.write()

    clone.ok("sync", env={"MULTIMESH_MIRROR": server.url})

    assert clone.state("alpha") == "clean"


def test_only_the_asked_group_is_touched(clone: Clone, alpha: Upstream) -> None:
    clone.add("gamma", clone.components["alpha"]["url"], alpha.head, alpha.tree(), groups=["source"])

    clone.ok("sync", "--group", "source")

    assert clone.state("gamma") == "clean"
    assert clone.state("alpha") == "missing"
    rows = [line.split()[:2] for line in clone.ok("sync").splitlines()[1:]]
    assert rows == [["alpha", "created"], ["gamma", "kept"]]


def test_override_takes_a_commit_of_a_fork_and_a_plain_sync_returns_to_the_lock(clone: Clone, alpha: Upstream) -> None:
    clone.patch("alpha", only=new_file("added", "line"))
    clone.ok("lock", "alpha")
    clone.ok("sync")
    locked = clone.head("alpha")

    clone.ok("sync", "--override", f"alpha={clone.components['alpha']['url']}@{alpha.head}")

    assert (clone.place("alpha") / "README").read_text() == "later\n"
    assert (clone.place("alpha") / "added").is_file(), "the component's patches apply to its fork, too"
    assert clone.state("alpha") == "overridden"
    clone.ok("sync")
    assert clone.head("alpha") == locked


def test_two_syncs_at_once_both_succeed(clone: Clone, alpha: Upstream, server: Any) -> None:
    env = os.environ | {"PYTHONPATH": str(clone.root)}
    command = [sys.executable, "-m", "tooling", "sync"]
    both = [
        subprocess.Popen(command, cwd=clone.root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in both]

    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum(path.endswith("/git-upload-pack") for path in server.requests) <= 3, (
        "the second one had nothing to fetch"
    )
    assert clone.state("alpha") == "clean"


@pytest.mark.parametrize("first", [True, False], ids=["with work to do", "with nothing to do"])
def test_output_that_cannot_be_written_is_an_error_in_one_line(clone: Clone, alpha: Upstream, first: bool) -> None:
    if not first:
        clone.ok("sync")
    program = f"exec {shlex.quote(sys.executable)} -m tooling sync"
    env = os.environ | {"PYTHONPATH": str(clone.root)}
    ends = []
    for redirection in (">/dev/full", ">&-"):
        done = subprocess.run(
            ["sh", "-c", program + redirection], cwd=clone.root, env=env, stderr=subprocess.PIPE, text=True
        )
        ends.append((done.returncode, [line for line in done.stderr.splitlines() if "alpha: " not in line]))

    assert ends == [
        (1, ["error: a file: No space left on device; free some space and run the same command again"]),
        (0, []),
    ]
