"""What a real Bazel gets from the cache, and that it never needs it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workflows.cache import client
from workflows.cache.settings import Place

from .conftest import ACTIONS, Bazel, Cache, gone


def test_second_clean_build_finds_everything(cache: Cache, bazel: Bazel) -> None:
    rc = cache.folder / "bazelrc"
    first = bazel.build(rc)
    assert (first.code, first.ran, first.found) == (0, ACTIONS, 0), first.said

    found = client.find(place=Place(cache.folder))
    assert found is not None
    before = found.hits()
    second = bazel.build(rc)
    gained = found.hits() - before

    assert (second.code, second.ran, second.found) == (0, 0, ACTIONS), second.said
    assert (gained.hits, gained.misses) == (ACTIONS, 0)
    assert str(gained) == f"{ACTIONS} of {ACTIONS} actions found (100%)"

    assert cache.run("stop").returncode == 0
    cache.start()
    after_restart = bazel.build(rc)
    assert (after_restart.code, after_restart.ran, after_restart.found) == (0, 0, ACTIONS), after_restart.said


def test_a_cache_that_dies_breaks_no_build(cache: Cache, bazel: Bazel) -> None:
    rc = cache.folder / "bazelrc"
    bazel.build(rc)
    nginx = int((cache.folder / "nginx.pid").read_text())
    os.kill(cache.keeper, signal.SIGKILL)
    assert gone(nginx)

    alone = bazel.build(rc)

    assert (alone.code, alone.ran, alone.found) == (0, ACTIONS, 0), alone.said
    cache.start()
    again = bazel.build(rc)
    assert (again.code, again.ran, again.found) == (0, 0, ACTIONS), again.said


def test_read_only_build_writes_nothing(cache: Cache, bazel: Bazel, tmp_path: Path) -> None:
    found = client.find(f"127.0.0.1:{cache.port}", Place(cache.folder))
    assert found is not None
    found.write_rc(tmp_path / "readonly", write=False)

    build = bazel.build(tmp_path / "readonly")

    assert (build.code, build.ran) == (0, ACTIONS)
    assert cache.status["used_bytes"] == 0


def test_password(make_cache: Callable[..., Cache], bazel: Bazel, tmp_path: Path) -> None:
    secret = "correct-horse-battery"
    file = tmp_path / "password"
    file.write_text(secret + "\n")
    file.chmod(0o600)
    cache = make_cache(None, "--password-file", str(file))
    printed = cache.start()
    rc = cache.folder / "bazelrc"

    bazel.build(rc)
    second = bazel.build(rc)

    assert second.found == ACTIONS, second.said
    key = "/ac/" + "0" * 64
    assert cache.request("PUT", key, b"poison") == 401
    assert cache.request("GET", key) == 401
    assert secret not in printed + cache.run("status").stdout
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert any(b"nginx" in line for line in lines)
    assert not any(secret.encode() in line for line in lines)
    for path in (path for path in cache.folder.rglob("*") if path.is_file()):
        assert secret.encode() not in path.read_bytes() or path == rc, path
    assert rc.stat().st_mode & 0o077 == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    mount = tmp_path / "small disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


def test_full_disk_breaks_no_build(make_cache: Callable[..., Cache], bazel: Bazel, small_disk: Path) -> None:
    cache = make_cache(small_disk / "cache")
    cache.start()

    first = bazel.build(cache.folder / "bazelrc")
    second = bazel.build(cache.folder / "bazelrc")

    assert (first.code, first.ran) == (0, ACTIONS), first.said
    assert second.code == 0, second.said
    assert 0 < second.found < ACTIONS, second.said
    assert second.ran + second.found == ACTIONS
    assert cache.status["state"] == "running"
