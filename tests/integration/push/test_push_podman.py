"""The same pushes with a real Podman in place of Docker."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.integration.parts import packages
from tests.integration.parts.proxy import Fault
from workflows import console, errors
from workflows.image import push
from workflows.image.engine import Engine

from .conftest import FAST, digest_of

pytestmark = pytest.mark.full


@dataclass(frozen=True)
class Moved:
    """An image that was made with Docker, in Podman's store."""

    engine: Engine
    id: str


@pytest.fixture
def podman(make_tiny) -> Iterator[Moved]:
    program = packages.need("podman", "podman")
    image = make_tiny()
    saved = subprocess.run(["docker", "save", image.id], check=True, capture_output=True).stdout
    subprocess.run([program, "load", "--quiet"], input=saved, check=True, capture_output=True)
    yield Moved(Engine((program,), "podman", "4", "4", "podman"), image.id)
    subprocess.run([program, "rmi", "--force", image.id.removeprefix("sha256:")], capture_output=True)


@pytest.mark.stand_in("a registry on this machine")
def test_push_with_podman(podman: Moved, target, faulty) -> None:
    faulty.faults = [Fault("PUT .*/manifests/", 2, status=503)]
    podman.engine.run("tag", podman.id.removeprefix("sha256:"), str(target.staging))

    pushed = push.push(podman.engine, podman.id, target.staging, FAST, console.Reporter(quiet=True))

    assert pushed.attempts == 3
    push.promote(target, pushed.digest, ("v1",), FAST)
    assert digest_of(target, "v1") == pushed.digest


def test_refusal_is_final_for_podman_too(podman: Moved, target, faulty) -> None:
    faulty.faults = [Fault("PUT .*/manifests/", 100, status=403)]
    podman.engine.run("tag", podman.id.removeprefix("sha256:"), str(target.staging))
    with pytest.raises(errors.RegistryError, match="refused"):
        push.push(podman.engine, podman.id, target.staging, FAST, console.Reporter(quiet=True))
    assert faulty.count("PUT .*/manifests/") == 1
