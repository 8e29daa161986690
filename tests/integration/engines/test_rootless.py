"""Docker as an ordinary user: nothing that it does needs root."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.engines.conftest import BASE
from tests.integration.image.conftest import Repository
from tests.integration.parts import registry as registry_parts
from tests.integration.parts import rootless as rootless_parts
from tooling.image import engine

pytestmark = pytest.mark.full

Docker = Callable[..., str]


@pytest.fixture
def rootless(
    docker_engine: None, registry: str, base: bytes, parts_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A rootless engine, which docker's client talks to. Its 127.0.0.1 is not ours, so the registry is there too."""
    with (
        rootless_parts.running(parts_folder / "rootless.log") as found,
        registry_parts.also_inside(parts_folder / "registry", found.pid, parts_folder / "inside.log"),
    ):
        monkeypatch.setenv("DOCKER_HOST", found.host)
        subprocess.run(["docker", "import", "-", BASE], input=base, check=True, capture_output=True)
        yield


@pytest.mark.stand_in("a Dockerfile of the same features, and a registry on this machine")
@pytest.mark.usefixtures("rootless", "company")
def test_the_whole_way(tiny: Repository, upload: Callable[..., list[str]], docker: Docker) -> None:
    assert "rootless" in engine.detect().run("info", "--format", "{{.SecurityOptions}}").text
    told = json.loads(tiny.build(*upload()).stdout)
    assert told["check"]["verdict"] == "ok: ran on x86_64"
    pull = told["pushed"]["image"]["pull"].split()[-1]
    docker("rmi", "--force", told["id"])
    docker("pull", pull)
    assert docker("run", "--rm", "--network", "none", pull, "/bin/id", "-u") == "1000"
    assert ".env" not in docker("run", "--rm", "--network", "none", pull, "/bin/ls", "-A", "/sources").splitlines()
