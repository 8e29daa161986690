"""Tiny images in the real engine, and a real registry behind a proxy that can be told to fail."""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.parts import engine as engine_parts
from tests.integration.parts import proxy
from tooling.image import engine, reference, tags
from tooling.image.reference import Reference

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Tiny:
    """A busybox with a file of its own, and stubs of what the check of a runtime image looks for."""

    id: str
    words: str


@pytest.fixture
def make_tiny(docker_engine: None) -> Iterator[Callable[..., Tiny]]:
    """Import tiny images: one layer of three megabytes, no two alike. ``verdict`` is what their check job does."""
    made: list[str] = []

    def make(
        words: str = "hello",
        verdict: str = "echo ok: stub",
        user: str = "1000",
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Tiny:
        files, links = engine_parts.checkable(verdict)
        files |= {"words": (words.encode(), 0o644), "noise": (os.urandom(1 << 20), 0o644)}
        changes = ["CMD cat /words", f"USER {user}"]
        changes += [f"ENV {name}='{value}'" for name, value in (env or {}).items()]
        changes += [f"LABEL {name}={value}" for name, value in (labels or {}).items()]
        argv = ["docker", "import", *(word for each in changes for word in ("--change", each)), "-"]
        content = engine_parts.archive(files, links)
        done = subprocess.run(argv, input=content, capture_output=True, check=True)
        made.append(done.stdout.decode().strip())
        return Tiny(made[-1], words)

    yield make
    for each in made:
        subprocess.run(["docker", "rmi", "--force", each], capture_output=True)


@pytest.fixture
def faulty(registry: str) -> Iterator[proxy.FaultyProxy]:
    """A proxy in front of the registry; does nothing wrong until it is told to."""
    with proxy.running(registry) as running:
        yield running


@pytest.fixture
def target(faulty: proxy.FaultyProxy, request: pytest.FixtureRequest) -> Reference:
    """A repository of this test alone, behind the proxy."""
    name = "".join(each if each.isalnum() else "-" for each in request.node.name.lower()).strip("-")
    while "--" in name:
        name = name.replace("--", "-")
    return reference.make(f"{faulty.address}/team", name, "v1")


@pytest.fixture
def upload(target: Reference, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Upload an image of the engine with build.py's options; returns the process."""

    def run(image: Tiny, *options: str) -> subprocess.CompletedProcess[str]:
        subprocess.run(["docker", "tag", image.id, str(target)], check=True)
        name = ("--repo", target.repository.rpartition("/")[0], "--name", target.repository.rpartition("/")[2])
        more = ("--tag", "v1", "--allow-dirty", "--release-file", str(tmp_path / "release.json"))
        return tooling("image", "--no-build", "--upload", *name, *more, *options)

    return run


def digest_of(target: Reference, tag: str) -> str | None:
    """What a tag has in the registry now."""
    return tags.digest_of(engine.detect(), target.tagged(tag))


@functools.cache
def pinned() -> Path:
    """A copy of this repository in which no pin is null: a release is refused as long as one is."""
    place = Path(tempfile.mkdtemp(prefix="pinned-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and os.path.lexists(ROOT / name):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name, follow_symlinks=False)
    lock = place / "sources.lock"
    lock.write_text(re.sub(r'("(?:root_)?(?:commit|tree)"): null', rf'\1: "{"ab" * 20}"', lock.read_text()))
    for argv in (["init", "-q"], ["add", "-A"], ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "all"]):
        subprocess.run(["git", *argv], cwd=place, check=True)
    return place


def tooling(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line; whatever happens, no user may see a traceback."""
    argv = [sys.executable, "-m", "tooling", *args]
    full = os.environ | {"PYTHONPATH": str(pinned())} | (env or {})
    done = subprocess.run(argv, env=full, cwd=pinned(), capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done
