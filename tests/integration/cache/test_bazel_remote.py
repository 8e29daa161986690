"""The container of bazel-remote, with an image that answers as it does: no image can be pulled from outside here."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.parts import engine, packages, processes
from workflows import errors
from workflows.cache import server
from workflows.cache.server import Place, Settings

METRICS = """\
bazel_remote_incoming_requests_total{kind="ac",method="get",status="hit"} 3
bazel_remote_incoming_requests_total{kind="ac",method="get",status="miss"} 1
"""
START = '#!/bin/sh\necho "$@" >/data/arguments\nexec /bin/busybox httpd -f -p 8080 -h /www\n'


@pytest.fixture(scope="module")
def pin(docker_engine: None, registry: str) -> Iterator[str]:
    """A busybox that serves a status and metrics, by digest."""
    files = {
        "bin/busybox": (Path(packages.need("busybox", "busybox-static")).read_bytes(), 0o755),
        "start": (START.encode(), 0o755),
        "www/status": (b"{}", 0o644),
        "www/metrics": (METRICS.encode(), 0o644),
        "data/.keep": (b"", 0o644),
    }
    name = f"{registry}/stand-in/bazel-remote:v1"
    argv = ["docker", "import", "--change", 'ENTRYPOINT ["/start"]', "-", name]
    subprocess.run(argv, input=engine.archive(files, {"bin/sh": "busybox"}), check=True, capture_output=True)
    subprocess.run(["docker", "push", name], check=True, capture_output=True)
    argv = ["docker", "image", "inspect", "--format", "{{index .RepoDigests 0}}", name]
    yield subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run(["docker", "rmi", "--force", name], capture_output=True)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "cache")
    yield made
    server.stop(made)


def settings(**changes: object) -> Settings:
    plain = {"backend": "bazel-remote", "host": "127.0.0.1", "port": processes.free_port(), "max_bytes": 5 << 30}
    return Settings(**(plain | changes))


@pytest.mark.stand_in("an image that answers as bazel-remote does")
def test_container_starts_once_and_stops(pin: str, place: Place) -> None:
    wanted = settings()

    assert server.start(place, wanted, pin)
    assert not server.start(place, wanted, pin)
    with pytest.raises(errors.CacheError, match=r"`start-cache\.sh stop` first"):
        server.start(place, settings(), pin)

    assert server.status(place).state == "running"
    assert (place.content / "arguments").read_text().split() == ["--max_size", "5", "--enable_endpoint_metrics"]
    cache = server.find(place=place)
    assert cache is not None
    assert (cache.address, cache.hits()) == (wanted.address, server.Hits(3, 1))
    told = json.loads(subprocess.run(["docker", "inspect", server.name(place)], capture_output=True).stdout)[0]
    assert told["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
    assert told["HostConfig"]["ReadonlyRootfs"]
    assert told["HostConfig"]["PortBindings"]["8080/tcp"][0]["HostIp"] == "127.0.0.1"

    assert server.stop(place)
    assert not server.stop(place)
    assert server.status(place).state == "stopped"
    assert (place.content / "arguments").exists()


def test_killed_container_is_found_stopped_and_starts_again(pin: str, place: Place) -> None:
    wanted = settings()
    server.start(place, wanted, pin)
    subprocess.run(["docker", "kill", server.name(place)], check=True, capture_output=True)
    assert server.status(place).state == "stopped"
    assert server.find(place=place) is None
    assert server.start(place, wanted, pin)
    assert server.status(place).state == "running"


def test_image_that_cannot_be_had_is_named(docker_engine: None, registry: str, place: Place) -> None:
    with pytest.raises(errors.CacheError, match="the container does not start"):
        server.start(place, settings(), f"{registry}/no/such@sha256:" + "ab" * 32)
    assert server.status(place).state == "stopped"


def test_port_in_use_is_named(pin: str, place: Place) -> None:
    wanted = settings()
    with socket.create_server(("127.0.0.1", wanted.port)), pytest.raises(errors.CacheError, match="in use"):
        server.start(place, wanted, pin)
    assert server.status(place).state == "stopped"
    assert server.start(place, wanted, pin)


def test_two_starts_at_once_give_one_server(pin: str, place: Place) -> None:
    wanted = settings()
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda _: server.start(place, wanted, pin), range(2))) == [False, True]


def test_password_is_in_no_command_line(pin: str, place: Place, tmp_path: Path) -> None:
    secret = "correct-horse-battery"
    (file := tmp_path / "password").write_text(secret + "\n")
    file.chmod(0o600)
    server.start(place, settings(password_file=str(file)), pin)
    told = subprocess.run(["docker", "inspect", server.name(place)], capture_output=True, check=True, text=True).stdout
    assert "--htpasswd_file" in told
    assert secret not in told
    holding = {path.name for path in place.root.rglob("*") if path.is_file() and secret in path.read_text()}
    assert holding == {"bazelrc"}
    assert place.bazelrc.stat().st_mode & 0o077 == 0


def test_no_engine_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/no-such.sock")
    with pytest.raises(errors.CacheError, match=r"no Docker engine answers.*--backend disk"):
        server.start(place, settings(), "x@sha256:" + "ab" * 32)
    monkeypatch.undo()
