"""The container of bazel-remote, with an image that answers as it does: no image can be pulled from outside here."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.parts import engine, packages, processes
from workflows import errors
from workflows.cache import bazel_remote, client, server, usage
from workflows.cache.settings import Place, Settings

from .conftest import holds

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

    assert server.status(place).state == "running"
    assert (place.content / "arguments").read_text().split() == ["--max_size", "5", "--enable_endpoint_metrics"]
    cache = client.find(place=place)
    assert cache is not None
    assert (cache.address, cache.hits()) == (wanted.address, usage.Hits(3, 1))
    told = json.loads(subprocess.run(["docker", "inspect", bazel_remote.name(place)], capture_output=True).stdout)[0]
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
    subprocess.run(["docker", "kill", bazel_remote.name(place)], check=True, capture_output=True)
    assert holds(lambda: server.status(place).state == "stopped")
    assert client.find(place=place) is None
    assert server.start(place, wanted, pin)
    assert server.status(place).state == "running"


def test_image_that_cannot_be_had_is_named(docker_engine: None, registry: str, place: Place) -> None:
    with pytest.raises(errors.CacheError, match="the container does not start"):
        server.start(place, settings(), f"{registry}/no/such@sha256:" + "ab" * 32)
    assert server.status(place).state == "stopped"
