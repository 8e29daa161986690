"""Podman in place of Docker: its program alone, its socket behind docker's client, and under that client's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.engines.conftest import BASE
from tests.integration.image.conftest import Repository
from tests.integration.parts import packages
from tests.integration.parts import podman as podman_parts
from tests.integration.parts.podman import Podman
from workflows import errors
from workflows.image import engine

pytestmark = pytest.mark.full

Upload = Callable[..., list[str]]


@pytest.fixture(scope="session")
def podman(parts_folder: Path, base: bytes) -> Iterator[Podman]:
    with podman_parts.running(parts_folder / "podman") as running:
        running("import", "-", BASE, stdin=base)
        yield running


@pytest.fixture
def environment(podman: Podman, monkeypatch: pytest.MonkeyPatch) -> Podman:
    """Have every program that is started see Podman's store, and no engine of Docker's."""
    for name, value in podman.env.items():
        monkeypatch.setenv(name, value)
    for name in ("DOCKER_HOST", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return podman


@pytest.fixture
def no_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of PATH: the programs of this machine without docker's client."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for place in ("/usr/sbin", "/usr/bin"):
        for program in Path(place).iterdir():
            if program.name != "docker" and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def whole_way(podman: Podman, tiny: Repository, options: list[str], **env: str) -> None:
    """Build, check, push, promote; pull by digest, and run."""
    told = json.loads(tiny.build(*options, **env).stdout)
    assert told["check"]["verdict"] == "ok: ran on x86_64"
    assert told["layers"]
    pull = told["pushed"]["image"]["pull"].split()[-1]
    assert [each["tag"] for each in told["pushed"]["image"]["tags"]] == ["T"]
    podman("rmi", "--force", told["id"])
    podman("pull", "--quiet", "--tls-verify=false", pull)
    run = ["run", "--rm", "--network", "none", "--entrypoint", "/bin/cat", pull]
    wanted = (tiny.path / "requirements" / "run.txt").read_text().strip()
    assert podman(*run, "/from-a-stage.txt") == wanted
    assert podman(*run, "/from-the-sources.txt") == wanted
    held = podman("run", "--rm", "--network", "none", "--entrypoint", "/bin/ls", pull, "-A", "/sources").splitlines()
    assert "LICENSE" in held
    assert ".env" not in held
    assert not [each for each in held if "secret" in each]


@pytest.mark.stand_in("a Dockerfile of the same features, and a registry on this machine")
@pytest.mark.usefixtures("no_docker", "company")
def test_its_program(environment: Podman, tiny: Repository, upload: Upload) -> None:
    assert engine.detect().cli == (shutil.which("podman"),)
    whole_way(environment, tiny, upload())
    (tiny.path / "requirements" / "run.txt").write_text("# changed\n")
    told = json.loads(tiny.build("--accelerator", "cpu", "--base-image", BASE, "--tag", "changed", "--json").stdout)
    for place in ("/from-a-stage.txt", "/from-the-sources.txt"):
        assert environment("run", "--rm", "--entrypoint", "/bin/cat", told["id"], place) == "# changed"


@pytest.mark.stand_in("a Dockerfile of the same features, and a registry on this machine")
@pytest.mark.usefixtures("docker_engine", "company")
def test_its_socket(
    environment: Podman, tiny: Repository, upload: Upload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", environment.host)
    found = engine.detect()
    assert (found.kind, found.cli[1:]) == ("podman", ("--url", environment.host))
    # The client has a store of its own, which must stay empty: it is the service that builds.
    (tmp_path / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/g"\nrunroot = "{tmp_path}/r"\n'
    )
    whole_way(environment, tiny, upload(), CONTAINERS_STORAGE_CONF=str(tmp_path / "storage.conf"))
    assert not list(tmp_path.glob("g/vfs/dir/*"))


@pytest.mark.usefixtures("docker_engine", "environment")
def test_a_docker_client_without_an_engine(
    docker: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    docker("context", "create", "gone", "--docker", "host=unix:///nonexistent/docker.sock")
    docker("context", "use", "gone")
    assert engine.detect().kind == "podman"
    assert "podman is taken" in capsys.readouterr().err


@pytest.mark.full
def test_the_program_under_dockers_name(environment: Podman, no_docker: Path, tmp_path: Path) -> None:
    place = tmp_path / "package"
    place.mkdir()
    packages.from_sid(place, "podman-docker", suite="bookworm")
    (no_docker / "docker").symlink_to(place / "usr/bin/docker")
    assert (engine.detect().kind, engine.detect().cli) == ("podman", (shutil.which("podman"),))


@pytest.mark.usefixtures("docker_engine")
def test_its_socket_without_its_client(environment: Podman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker").symlink_to(str(shutil.which("docker")))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", environment.host)
    with pytest.raises(errors.EngineError, match="install podman here too"):
        engine.detect()


@pytest.mark.usefixtures("no_docker")
def test_a_base_that_nobody_has_is_named(environment: Podman, tiny: Repository) -> None:
    done = tiny.build("--accelerator", "cpu", "--base-image", "127.0.0.1:9/nobody/has:this", check=False)
    assert done.returncode == errors.NetworkError.exit_code, done.stderr
    assert "127.0.0.1:9/nobody/has:this: the base image cannot be fetched" in done.stderr.splitlines()[-1]
