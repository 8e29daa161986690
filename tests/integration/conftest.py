"""The real parts that integration tests share; each starts once, when the first test asks for it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from docker import DockerClient
from tests.hooks import pytest_collection_modifyitems  # noqa: F401
from tests.integration.parts import engine as engines
from tests.integration.parts import registry as registries
from tests.integration.parts import slurm
from tooling.image import engine as docker_engines


def pytest_configure(config: pytest.Config) -> None:
    """Refuse several processes: the tests share an engine, ports and a package manager."""
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("tests/integration: the tests share what they start; add -n 0")


@pytest.fixture(scope="session")
def parts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the parts keep what they need; short, because sockets lie in it."""
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="session")
def docker_engine(parts_folder: Path) -> Iterator[Callable[[], None]]:
    """A Docker engine with buildx; starts it again where it has ended."""
    with engines.running(parts_folder) as ensure:
        yield ensure


@pytest.fixture(autouse=True)
def _engine_that_answers(request: pytest.FixtureRequest) -> None:
    """One that ended fails the test in whose middle it did, and not those after it."""
    if "docker_engine" in request.fixturenames:
        request.getfixturevalue("docker_engine")()


@pytest.fixture(scope="session")
def engine(docker_engine: None) -> Iterator[DockerClient]:
    """The engine that runs, as build.py sees it."""
    with docker_engines.connect() as client:
        yield client


@pytest.fixture(scope="session")
def docker() -> Callable[..., str]:
    """Run a docker command that must succeed; returns its output."""

    def run(*argv: str, stdin: str | None = None) -> str:
        process = subprocess.run(["docker", *argv], input=stdin, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr[-2000:]
        return process.stdout.strip()

    return run


@pytest.fixture(scope="session")
def trixie(docker_engine: None, parts_folder: Path) -> str:
    """A minimal Debian 13 in the engine, in place of the CUDA base."""
    return engines.base_image("trixie", parts_folder)


@pytest.fixture(scope="session")
def registry(parts_folder: Path) -> Iterator[str]:
    """An empty registry, as ``127.0.0.1:PORT``."""
    with registries.running(parts_folder / "registry") as address:
        yield address


@pytest.fixture(scope="session")
def cluster(parts_folder: Path) -> Iterator[dict[str, str]]:
    """A Slurm of two nodes, with nothing to run; the variables that its clients need."""
    with slurm.running(parts_folder / "slurm") as environment:
        yield environment


@pytest.fixture(scope="module")
def gpu_cluster(parts_folder: Path) -> Iterator[dict[str, str]]:
    """A Slurm of two nodes that claim to have GPUs."""
    with slurm.running(parts_folder / "slurm-gpus", slurm.CLAIMS_GPUS) as environment:
        yield environment
