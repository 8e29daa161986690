"""Tiny images in the real engine, and a real registry behind a proxy that can be told to fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from docker.models.images import Image

from docker import DockerClient
from tests.integration.parts import engine as engine_parts
from tests.integration.parts import proxy
from tooling.core.files import ROOT
from tooling.image import engine as engines
from tooling.image import reference
from tooling.image.reference import LABEL, OCI, Reference, name_candidate
from tooling.image.registry import Manifest, Registry

VERSION = tomllib.loads((ROOT / "multimesh" / "pyproject.toml").read_text())["project"]["version"]
PYTHON = json.loads((ROOT / "docker" / "images.lock").read_text())["files"]["python linux/amd64"]["sha256"]
PINNED = {
    f"{OCI}.revision": "ab" * 20,
    f"{OCI}.version": VERSION,
    f"{OCI}.base.digest": "sha256:" + "cd" * 32,
    f"{LABEL}.maxtext.revision": "ef" * 20,
    f"{LABEL}.python": f"standalone sha256:{PYTHON}",
    f"{LABEL}.lock": "sha256:" + "12" * 32,
    f"{LABEL}.accelerator": "cuda12",
}
TOOLING = [sys.executable, "-m", "tooling"]


@pytest.fixture
def make_tiny(engine: DockerClient) -> Iterator[Callable[..., Image]]:
    """Import busyboxes of three megabytes, no two alike, that pass the check. ``verdict`` is what its job does."""
    images: list[Image] = []

    def make(words: str = "hello", verdict: str = "echo ok: stub", labels: Mapping[str, str] = PINNED) -> Image:
        files, links = engine_parts.checkable(verdict)
        files |= {"words": (words.encode(), 0o644), "noise": (os.urandom(1 << 20), 0o644)}
        files |= {"opt/python/bin/python3": (b"", 0o755)}
        changes = ["CMD cat /words", "USER 1000", *(f'LABEL {name}="{value}"' for name, value in labels.items())]
        argv = ["docker", "import", *(word for change in changes for word in ("--change", change)), "-"]
        content = engine_parts.archive(files, links)
        process = subprocess.run(argv, input=content, capture_output=True, check=True)
        images.append(engine.images.get(process.stdout.decode().strip()))
        return images[-1]

    yield make
    for image in images:
        subprocess.run(["docker", "rmi", "--force", image.id], capture_output=True)


@pytest.fixture
def faulty(registry: str) -> Iterator[proxy.FaultyProxy]:
    """A proxy in front of the registry; does nothing wrong until it is told to."""
    with proxy.running(registry) as running:
        yield running


@pytest.fixture
def target(faulty: proxy.FaultyProxy, request: pytest.FixtureRequest) -> Reference:
    """A repository of this test alone, behind the proxy."""
    name = re.sub("[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    return reference.make(f"{faulty.address}/team", name, "v1")


@pytest.fixture
def remote(target: Reference) -> Registry:
    """That repository."""
    return Registry(target.repository)


@pytest.fixture
def send(engine: DockerClient, remote: Registry, target: Reference) -> Callable[[Image], Manifest]:
    """Push an image under its candidate's tag."""

    def send(image: Image) -> Manifest:
        tag = name_candidate(image.labels, image.id, checked=True)
        image.tag(*target.tagged(tag))
        engines.push(engine, target.tagged(tag))
        return remote.get(tag)

    return send


@pytest.fixture
def uploading(target: Reference, tmp_path: Path) -> Callable[..., list[str]]:
    """Name an image of the engine; return what the command line needs to upload it."""

    def words(image: Image, *options: str) -> list[str]:
        image.tag(*target)
        place = ("--repo", target.repository, "--tag", "v1", "--release-file", str(tmp_path / "release.json"))
        return ["image", "--no-build", "--upload", *place, *options]

    return words


def tooling(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command line, which ends with this code; whatever happens, no user may see a traceback."""
    done = subprocess.run([*TOOLING, *args], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    assert (done.returncode, done.stdout if code else "") == (code, ""), done.stderr
    return done
