"""What a real Bazel gets from a cache, and that it never needs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tooling.image import bazel_cache

from .conftest import ACTIONS, Bazel, Remote


@pytest.mark.stand_in("a server that keeps what is PUT, for bazel-remote")
def test_a_server_serves_every_build_and_its_end_breaks_none(remote: Remote, bazel: Bazel, tmp_path: Path) -> None:
    cache = bazel_cache.Cache(remote.address, None)
    cache.write_rc(rc := tmp_path / "rc", write=True)
    assert rc.stat().st_mode & 0o077 == 0
    first, second = bazel.build(rc), bazel.build(rc)
    assert (first.code, first.ran, first.found) == (0, ACTIONS, 0), first.said
    assert (second.code, second.ran, second.found) == (0, 0, ACTIONS), second.said

    remote.stop()
    alone = bazel.build(rc)
    assert (alone.code, alone.ran, alone.found) == (0, ACTIONS, 0), alone.said


@pytest.mark.stand_in("a server that keeps what is PUT, for bazel-remote")
def test_read_only_build_writes_nothing(remote: Remote, bazel: Bazel, tmp_path: Path) -> None:
    cache = bazel_cache.Cache(remote.address, None)
    cache.write_rc(tmp_path / "readonly", write=False)
    build = bazel.build(tmp_path / "readonly")
    assert (build.code, build.ran) == (0, ACTIONS)
    assert remote.entries == {}
