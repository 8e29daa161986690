"""What a real Bazel gets from a cache, and that it never needs it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from workflows.cache import server
from workflows.cache.server import Place

from .conftest import ACTIONS, Bazel, Remote

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def door(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run start-cache.sh with a folder of disk cache."""
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("this checkout has no .venv")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        argv = [ROOT / "docker" / "start-cache.sh", *options, "--folder", tmp_path / "my cache"]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd="/")

    return run


def test_a_folder_serves_every_build_until_it_is_stopped(
    door: Callable[..., subprocess.CompletedProcess[str]], bazel: Bazel, tmp_path: Path
) -> None:
    place = Place(tmp_path / "my cache")
    started = door("--backend", "disk", "--max-size", "20G")
    assert (started.returncode, started.stderr) == (0, "")
    assert "started; state running, backend disk" in started.stdout
    assert "runs already" in door("start", "--backend", "disk", "--max-size", "20G").stdout
    other = door("start", "--backend", "disk", "--max-size", "10G")
    assert (other.returncode, other.stderr.count("\n")) == (17, 1)
    assert "run `start-cache.sh stop` first" in other.stderr

    # The Bazel at hand (4.2.3) knows no bound yet.
    written, bound = place.bazelrc.read_text().splitlines()
    assert bound == "build --experimental_disk_cache_gc_max_size=20480M"
    (rc := tmp_path / "rc").write_text(written.replace(str(place.root), f'"{place.root}"') + "\n")
    first, second = bazel.build(rc), bazel.build(rc)
    assert (first.code, first.ran, first.found) == (0, ACTIONS, 0), first.said
    assert (second.code, second.ran, second.found) == (0, 0, ACTIONS), second.said
    assert json.loads(door("status", "--json").stdout)["used_bytes"] > ACTIONS * 200_000

    assert "stopped; " in door("stop").stdout
    assert "was not running" in door("stop").stdout
    assert door("status").returncode == 1
    assert any(place.content.iterdir())


@pytest.mark.stand_in("a server that keeps what is PUT, for bazel-remote")
def test_a_server_serves_every_build_and_its_end_breaks_none(remote: Remote, bazel: Bazel, tmp_path: Path) -> None:
    cache = server.find(remote.address, Place(tmp_path / "none"))
    assert cache is not None
    cache.write_rc(rc := tmp_path / "rc", write=True)
    assert rc.stat().st_mode & 0o077 == 0
    first, second = bazel.build(rc), bazel.build(rc)
    assert (first.code, first.ran, first.found) == (0, ACTIONS, 0), first.said
    assert (second.code, second.ran, second.found) == (0, 0, ACTIONS), second.said

    remote.stop()
    alone = bazel.build(rc)
    assert (alone.code, alone.ran, alone.found) == (0, ACTIONS, 0), alone.said
    assert server.find(remote.address, Place(tmp_path / "none")) is None


@pytest.mark.stand_in("a server that keeps what is PUT, for bazel-remote")
def test_read_only_build_writes_nothing(remote: Remote, bazel: Bazel, tmp_path: Path) -> None:
    cache = server.find(remote.address, Place(tmp_path / "none"))
    assert cache is not None
    cache.write_rc(tmp_path / "readonly", write=False)
    build = bazel.build(tmp_path / "readonly")
    assert (build.code, build.ran) == (0, ACTIONS)
    assert remote.entries == {}
