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
def test_the_whole_way(tiny: Repository, upload: Callable[..., list[str]], docker: Callable[..., str]) -> None:
    told = json.loads(tiny.build(*upload()).stdout)
    assert told["check"]["verdict"] == "ok: ran on x86_64"
    again = json.loads(tiny.build(*upload()).stdout)
    assert (again["id"], again["check"]) == (told["id"], told["check"])
    pull = told["pushed"]["image"]["pull"].split()[-1]
    docker("rmi", "--force", told["id"])
    docker("pull", pull)
    assert docker("run", "--rm", "--network", "none", pull, "/bin/id", "-u") == "1000"
