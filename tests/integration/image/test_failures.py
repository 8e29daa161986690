"""What goes wrong around a build: it is killed, the disk is full, the network is a company's."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from docker import DockerClient
from tests.integration.image.conftest import CPU, NAME, Repository
from tests.integration.parts import disks, processes, proxy
from tests.integration.parts import engine as engines
from tooling.core import errors
from tooling.image import build, engine

PASSWORD = "hunter2-hunter2"
Docker = Callable[..., str]
Asks = Callable[..., Namespace]


@pytest.mark.stand_in("a debootstrapped Debian 13 in place of the CUDA base")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_killed_build_leaves_nothing_behind(
    repository: Repository, trixie: str, docker: Docker, signum: signal.Signals, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    options = [*CPU, "--base-image", trixie, "--tag", "killed"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [repository.path / "docker" / "build.py", *options, "--no-docker-build-cache"],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    step = "scripts/python.sh && "
    processes.wait_for(lambda: bool(processes.find(step)), "the first step runs", process=process, log=log)
    process.send_signal(signum)
    assert process.wait(120) == 130
    assert "interrupted; run the same command again" in log.read_text()
    processes.wait_for(lambda: not processes.find(step), "the engine stopped the step")
    assert docker("image", "ls", "-q", f"{NAME}:killed") == ""
    assert not list((repository.path / "build/image").glob("**/*.tar*"))


def test_a_full_disk_is_named(
    repository: Repository, docker_engine: None, ask: Asks, parts_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = parts_folder / "small"
    with (
        disks.small(tmp_path / "disk", 24) as disk,
        engines.start(folder, root=disk / "docker", socket=folder / "docker.sock") as host,
    ):
        monkeypatch.setenv("DOCKER_HOST", host)
        # The sources alone: a stage that starts from nothing, so that this engine needs no base image.
        full = pytest.raises(errors.ToolingError, match="the engine's disk is full; free some space")
        with engine.connect() as client, full:
            build.run(repository.path, client, ask("sources", base_image=None))


@pytest.fixture
def index(root: Path, tmp_path: Path) -> Iterator[proxy.FaultyProxy]:
    """A package index with what the installer needs, which wants a password, as a company's does."""
    wheels, config = tmp_path / "wheels", tmp_path / "httpd.conf"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--require-hashes", "--only-binary=:all:", "--dest", wheels]
    subprocess.run([*pip, "-r", str(root / "requirements" / "tooling.txt")], check=True, capture_output=True)
    for wheel in list(wheels.glob("*.whl")):
        folder = wheels / re.sub("[_.]", "-", wheel.name.partition("-")[0]).lower()
        folder.mkdir(exist_ok=True)
        wheel.rename(folder / wheel.name)
        (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>\n')
    config.write_text(f"/:user:{PASSWORD}\n")
    with processes.web_server(wheels, "-c", str(config)) as address, proxy.running(address) as server:
        yield server


def test_a_companys_index_serves_the_build_and_its_password_stays_out(
    copy: Repository, index: proxy.FaultyProxy, engine: DockerClient, docker: Docker, ask: Asks, tmp_path: Path
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = http://" + f"user:{PASSWORD}@{index.address}/\n")
    locked = copy.path / "requirements" / "tooling.txt"
    locked.write_text(locked.read_text(encoding="utf-8") + f"# {tmp_path}\n", encoding="utf-8")  # no layer of before
    built = build.run(copy.path, engine, ask("installer", network="host", pip_config=config))
    assert index.count("GET .*[.]whl ")
    assert PASSWORD not in docker("image", "inspect", built.id)
    assert PASSWORD not in docker("history", "--no-trunc", built.id)
    find = f"! grep -rqsF {PASSWORD} /etc /opt /root /home /tmp /var /run"
    docker("run", "--rm", "--user", "0", "--entrypoint", "/bin/sh", built.id, "-c", find)


def test_evil_names_stay_data(
    copy: Repository, engine: DockerClient, docker: Docker, ask: Asks, tmp_path: Path
) -> None:
    config = tmp_path / "$(touch evil) ; touch evil `touch evil` 'a' --privileged"
    config.write_text("[global]\n")
    evil = copy.path.rename(tmp_path / "$(touch evil) --output=type=local ;")
    (evil / "docs" / "--privileged $(touch evil)").write_text("data\n")
    build.run(evil, engine, ask("sources", pip_config=config))
    assert not [*tmp_path.rglob("evil"), *Path.cwd().glob("evil")]


def test_a_base_that_nobody_has_is_named(repository: Repository, docker_engine: None) -> None:
    options = ["--accelerator", "cpu", "--base-image", "127.0.0.1:9/nobody/has:this", "--tag", "nobase"]
    process = repository.build(*options, code=errors.NotThereError.exit_code)
    words = r"error: step `[^`]* 127\.0\.0\.1:9/nobody/has:this`: the base image cannot be fetched; log in to its reg"
    assert re.match(words, process.stderr.splitlines()[-1])


def test_an_engine_that_takes_the_call_and_never_answers_is_named(
    repository: Repository, docker_engine: None, tmp_path: Path
) -> None:
    place = f"unix://{tmp_path}/silent.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "silent.sock"))
        server.listen()
        process = repository.build("--accelerator", "cpu", code=errors.EngineError.exit_code, DOCKER_HOST=place)
    assert process.stderr.startswith(f"error: no engine answers at {place} within 5 s;")
    assert process.stderr.count("\n") == 1


def test_another_engine_is_that_of_a_docker_context(
    image: dict[str, Any], repository: Repository, trixie: str, docker: Docker, tmp_path: Path, monkeypatch
) -> None:
    config = Path(os.environ.get("DOCKER_CONFIG", "") or Path.home() / ".docker")
    shutil.copytree(config, tmp_path / "config")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "config"))
    docker("context", "create", "big", "--docker", "host=unix:///var/run/docker.sock")
    monkeypatch.setenv("DOCKER_CONTEXT", "big")
    repository.build(*CPU, "--base-image", trixie, "--tag", "far")
    assert docker("--context", "big", "image", "inspect", "--format", "{{.Id}}", f"{NAME}:far") == image["id"]
