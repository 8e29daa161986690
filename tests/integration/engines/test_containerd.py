"""An engine that keeps its images in containerd: it names them by their manifest, and pushes them as they are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.engines.conftest import BASE
from tests.integration.image.conftest import Repository
from tests.integration.parts import engine as engines

pytestmark = pytest.mark.full


@pytest.fixture
def store(base: bytes, parts_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The DOCKER_HOST of such an engine, which docker's client talks to."""
    folder = parts_folder / "store"
    folder.mkdir()
    with engines.with_containerd_store(folder) as host:
        engines.with_buildx(folder)
        monkeypatch.setenv("DOCKER_HOST", host)
        subprocess.run(["docker", "import", "-", BASE], input=base, check=True, capture_output=True)
        yield host


@pytest.mark.stand_in("a Dockerfile of the same features, and a registry on this machine")
@pytest.mark.usefixtures("store", "company")
def test_two_builds_of_a_commit_have_one_digest(
    tiny: Repository, upload: Callable[..., list[str]], docker: Callable[..., str]
) -> None:
    first, second = (json.loads(tiny.build(*upload("--no-docker-build-cache")).stdout) for _ in range(2))
    assert first["check"]["verdict"] == "ok: ran on x86_64"
    assert first["id"] == second["id"]
    image = second["pushed"]["image"]
    assert image["tags"] == [{"tag": "T", "before": image["digest"], "digest": image["digest"]}]
    pull = image["pull"].split()[-1]
    docker("rmi", "--force", first["id"])
    docker("pull", pull)
    assert docker("run", "--rm", "--network", "none", pull, "/bin/id", "-u") == "1000"
