"""What a sync brings in, by which way, that a second one has nothing to do, and what disturbs one: kills and disks."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import wheels
from tests.integration.parts import disks
from tests.integration.parts.proxy import Fault, FaultyProxy
from tests.repositories import git

from .conftest import SOURCE, Clone, Upstream, make_clone, new_file, patch_text

PACK = "POST .*/git-upload-pack "
DISK, INTERRUPTED = 1, 130


def test_pinned_commit_arrives_and_a_second_sync_touches_nothing(
    clone: Clone, alpha: Upstream, server: FaultyProxy
) -> None:
    proc = clone.run("sync")
    assert proc.stderr.splitlines() == [f"alpha: fetching {clone.pins['alpha']['commit'][:12]}"]
    assert "alpha      created  1.0, 0 patches, from git" in proc.stdout
    place = clone.place("alpha")
    assert clone.head("alpha") == clone.pins["alpha"]["commit"]
    assert (place / "README").read_text() == "hello\n"
    assert git(place, "rev-list", "--all", "--count") == "1", "without history"
    assert git(place, "status", "--porcelain") == ""
    assert clone.leftovers == []
    head, row = (line.split() for line in clone.ok("status").splitlines())
    assert head[:4] == ["component", "groups", "version", "state"]
    assert row[:6] == ["alpha", "run", "1.0", "clean", "0", clone.head("alpha")[:12]]

    requests, times = len(server.requests), {path: path.stat().st_mtime_ns for path in place.glob("[!.]*")}
    assert "alpha      kept" in clone.ok("sync")
    assert len(server.requests) == requests
    assert {path: path.stat().st_mtime_ns for path in place.glob("[!.]*")} == times


def test_patched_commit_is_the_same_everywhere_and_needs_no_server(
    clone: Clone, alpha: Upstream, server: FaultyProxy, tmp_path: Path
) -> None:
    clone.ok("sync")
    patches = {"a": patch_text("README", "hello", "patched"), "b": new_file("src/b.txt", "two")}
    clone.patch("alpha", **patches)
    clone.ok("lock", "alpha")
    requests = len(server.requests)
    clone.ok("sync")
    assert len(server.requests) == requests
    other = make_clone(tmp_path / "other")
    for name in ("sources.yaml", "sources.lock"):
        (other.root / name).write_bytes((clone.root / name).read_bytes())
    other.patch("alpha", **patches)

    other.ok("sync", GIT_AUTHOR_NAME="Somebody Else", GIT_COMMITTER_DATE="@1 +0000", TZ="Asia/Tokyo")

    assert clone.head("alpha") == other.head("alpha") != clone.pins["alpha"]["commit"]
    for copy in (clone, other):
        assert git(copy.place("alpha"), "log", "--format=%s", "-2") == "b\na"
        assert (copy.place("alpha") / "README").read_text() == "patched\n"
        assert (copy.place("alpha") / "src" / "b.txt").read_text() == "two\n"


def test_wheel_and_git_give_the_same_commit(
    make_upstream: Callable[[str], Upstream], tmp_path: Path, index: Path
) -> None:
    """A wheel that has the folder ``src`` as publishers pack it: program, line ends and attributes stay."""
    beta = make_upstream("beta")
    tree, heads = beta.work / "src", set()
    tree.mkdir()
    (tree / "tool.sh").write_text("#!/bin/sh\n")
    (tree / "tool.sh").chmod(0o755)
    (tree / "dos.txt").write_bytes(b"line\r\n")
    others = {"src/pkg/a.py": "A = 1\n", "src/.gitattributes": "*.py text\n", "src/ignored.log": "kept\n"}
    commit = beta.commit({"README": "not wanted\n"} | others)
    files = [(path, path.relative_to(tree)) for path in sorted(tree.rglob("*")) if path.is_file()]
    entries = [(f"beta/{name}", path.read_bytes().decode(), path.stat().st_mode) for path, name in files]
    digest = wheels.pack(index / "beta-1.0-py3-none-any.whl", *entries)
    for way, entry in (("git", {}), ("wheel", {"wheel": "beta", "wheel_sha256": digest})):
        one = make_clone(tmp_path / way)
        one.add("beta", beta.url, commit, beta.find("HEAD:src"), path="src", **entry)
        one.patch("beta", only=patch_text("src/pkg/a.py", "A = 1", "A = 2"))
        one.ok("lock", "beta")
        assert f"from {way}" in one.ok("sync")
        assert os.access(one.place("beta") / "src" / "tool.sh", os.X_OK)
        assert (one.place("beta") / "src" / "dos.txt").read_bytes() == b"line\r\n"
        assert [path.name for path in one.place("beta").iterdir() if path.name != ".git"] == ["src"]
        heads.add(one.head("beta"))
    assert len(heads) == 1


def test_only_the_asked_group_is_touched_and_a_mirror_is_asked_instead_of_the_upstream(
    clone: Clone, alpha: Upstream
) -> None:
    url = "https://nowhere.invalid/owner/alpha.git"
    clone.add("gamma", url, alpha.find("HEAD"), alpha.find("HEAD^{tree}"), groups=["source"])
    clone.ok("sync", "--group", "source", MULTIMESH_MIRROR=alpha.url.removesuffix("/alpha.git"))
    assert clone.state("gamma") == "clean"
    assert clone.state("alpha") == "missing"
    rows = [line.split()[:2] for line in clone.ok("sync").splitlines()[1:]]
    assert rows == [["alpha", "created"], ["gamma", "kept"]]


def test_override_takes_a_commit_of_a_fork_and_a_plain_sync_returns_to_the_lock(clone: Clone, alpha: Upstream) -> None:
    clone.patch("alpha", only=new_file("added", "line"))
    clone.ok("lock", "alpha")
    clone.ok("sync")
    locked = clone.head("alpha")

    clone.ok("sync", "--override", f"alpha={alpha.url}@{alpha.find('HEAD')}")

    assert (clone.place("alpha") / "README").read_text() == "later\n"
    assert (clone.place("alpha") / "added").is_file(), "the component's patches apply to its fork, too"
    assert clone.state("alpha") == "overridden"
    clone.ok("sync")
    assert clone.head("alpha") == locked


def test_two_syncs_at_once_both_succeed(clone: Clone, alpha: Upstream, server: FaultyProxy) -> None:
    both = [clone.start("sync") for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert server.count(PACK) <= 3, "the second one had nothing to fetch"
    assert clone.state("alpha") == "clean"


def test_output_that_cannot_be_written_is_an_error_in_one_line(clone: Clone, alpha: Upstream) -> None:
    """Whether there was work to do or not."""
    program = f"exec {shlex.quote(sys.executable)} -m tooling sync"
    env = os.environ | {"PYTHONPATH": str(clone.root)}
    full = "error: a file: No space left on device; free some space and run the same command again"
    for redirection, code, words in ((">/dev/full", 1, [full]), (">/dev/full", 1, [full]), (">&-", 0, [])):
        proc = subprocess.run(
            ["sh", "-c", program + redirection], cwd=clone.root, env=env, stderr=subprocess.PIPE, text=True
        )
        assert (proc.returncode, [line for line in proc.stderr.splitlines() if "alpha: " not in line]) == (code, words)


@pytest.fixture
def large(clone: Clone, alpha: Upstream) -> Clone:
    """The clone, its component grown beyond what a socket's buffers hold, so that a fetch can be caught half way."""
    alpha.commit({"blob.txt": os.urandom(1 << 19).hex()})
    clone.add_newest("alpha", alpha)
    return clone


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_while_it_fetches(large: Clone, server: FaultyProxy, signum: signal.Signals) -> None:
    """The same command goes on from there; only a kill leaves something meanwhile."""
    stall = Fault(PACK, cut_answer=100_000, hold=True)
    server.faults = [stall]
    with large.start("sync") as process:
        assert stall.reached.wait(120)
        process.send_signal(signum)
        process.wait(120)
    killed = signum == signal.SIGKILL
    assert process.returncode == (-signum if killed else INTERRUPTED)
    assert large.state("alpha") == "missing"
    assert bool(large.leftovers) == killed
    server.faults = []
    large.ok("sync")
    stall.released.set()
    assert large.state("alpha") == "clean"
    assert large.leftovers == []


def test_a_connection_that_breaks_is_tried_again_and_not_for_ever(large: Clone, server: FaultyProxy) -> None:
    server.faults = [Fault(PACK, 1_000, cut_answer=100_000)]
    assert "cannot fetch" in large.refused(SOURCE, "sync")
    assert large.leftovers == []
    server.faults = [fault := Fault(PACK, 2, cut_answer=100_000)]
    large.ok("sync")
    assert fault.times == 0
    assert large.state("alpha") == "clean"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    with disks.small(tmp_path / "small disk", 6) as disk:
        yield disk


def test_disks_that_are_full_or_cannot_be_written(small_disk: Path, clone: Clone, alpha: Upstream) -> None:
    other = make_clone(small_disk / "clone")
    other.components, other.pins = clone.components, clone.pins
    other.write()
    other.ok("sync")
    before = other.head("alpha")
    disks.remount(small_disk, "ro")
    assert "kept" in other.ok("sync"), "nothing to do"
    disks.remount(small_disk, "rw")
    alpha.commit({"blob.bin": os.urandom(4 << 20).hex()})
    other.add_newest("alpha", alpha)

    assert "free some" in other.refused(DISK, "sync")
    assert other.head("alpha") == before
    assert other.leftovers == []

    disks.remount(small_disk, "ro")
    assert "Read-only file system; make it writable" in other.refused(DISK, "sync")
    assert other.state("alpha") == "outdated", "looking needs no writing"
