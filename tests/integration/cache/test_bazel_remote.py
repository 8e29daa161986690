"""The container of bazel-remote, with an image that answers as it does: no image can be pulled from outside here."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.parts import engine, packages, processes
from tooling.core import errors
from tooling.image import bazel_cache
from tooling.image.bazel_cache import Place, Settings

START = '#!/bin/sh\necho "$@" >/data/arguments\nexec /bin/busybox httpd -f -p 8080 -h /www\n'


@pytest.fixture(scope="module")
def pushed(docker_engine: None, registry: str) -> Iterator[Callable[[str, str], str]]:
    """Make a busybox that runs a script, and return its name by digest."""
    names = []

    def push(tag: str, script: str) -> str:
        files = {
            "bin/busybox": (Path(packages.need("busybox", "busybox-static")).read_bytes(), 0o755),
            "start": (script.encode(), 0o755),
            "www/status": (b"{}", 0o644),
            "data/.keep": (b"", 0o644),
        }
        names.append(name := f"{registry}/stand-in/bazel-remote:{tag}")
        argv = ["docker", "import", "--change", 'ENTRYPOINT ["/start"]', "-", name]
        subprocess.run(argv, input=engine.archive(files, {"bin/sh": "busybox"}), check=True, capture_output=True)
        subprocess.run(["docker", "push", name], check=True, capture_output=True)
        argv = ["docker", "image", "inspect", "--format", "{{index .RepoDigests 0}}", name]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    yield push
    subprocess.run(["docker", "rmi", "--force", *names], capture_output=True)


@pytest.fixture(scope="module")
def pin(pushed: Callable[[str, str], str]) -> str:
    """A busybox that serves a status."""
    return pushed("v1", START)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "cache")
    yield made
    bazel_cache.stop(made)


def settings(**changes: object) -> Settings:
    plain = {"host": "127.0.0.1", "port": processes.free_port(), "grpc_port": processes.free_port(), "max_gib": 5}
    return Settings(**(plain | changes))


@pytest.mark.stand_in("an image that answers as bazel-remote does")
def test_container_starts_once_and_stops(pin: str, place: Place) -> None:
    wanted = settings()

    assert bazel_cache.start(place, wanted, pin)
    assert not bazel_cache.start(place, wanted, pin)
    with pytest.raises(errors.CacheError, match=r"`start-cache\.sh stop` first"):
        bazel_cache.start(place, settings(), pin)

    assert bazel_cache.status(place).state == "running"
    assert (place.content / "arguments").read_text().split() == ["--max_size", "5", "--htpasswd_file", "/htpasswd"]
    cache = bazel_cache.find(place=place)
    assert cache is not None
    assert cache == bazel_cache.Cache(wanted.address, place.password())
    assert "--remote_upload_local_results=false" in place.reading.read_text()
    told = json.loads(subprocess.run(["docker", "inspect", bazel_cache.name(place)], capture_output=True).stdout)[0]
    assert told["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
    assert told["HostConfig"]["ReadonlyRootfs"]
    assert told["HostConfig"]["PortBindings"]["8080/tcp"][0]["HostIp"] == "127.0.0.1"

    assert bazel_cache.stop(place)
    assert not bazel_cache.stop(place)
    assert bazel_cache.status(place).state == "stopped"
    assert (place.content / "arguments").exists()


def test_killed_container_is_found_stopped_and_starts_again(pin: str, place: Place) -> None:
    wanted = settings()
    bazel_cache.start(place, wanted, pin)
    subprocess.run(["docker", "kill", bazel_cache.name(place)], check=True, capture_output=True)
    assert bazel_cache.status(place).state == "stopped"
    assert bazel_cache.find(place=place) is None
    assert bazel_cache.start(place, wanted, pin)
    assert bazel_cache.status(place).state == "running"


def test_a_server_that_ends_at_once_is_told_and_not_started_for_ever(
    pushed: Callable[[str, str], str], place: Place
) -> None:
    broken = pushed("broken", "#!/bin/sh\necho no such option >&2\nexit 1\n")
    with pytest.raises(errors.CacheError, match=r"does not answer on .*; it said: no such option"):
        bazel_cache.start(place, settings(), broken)
    listed = ["docker", "ps", "--all", "--quiet", "--filter", f"name={bazel_cache.name(place)}"]
    assert subprocess.run(listed, check=True, capture_output=True, text=True).stdout == ""


def test_image_that_cannot_be_had_is_named(docker_engine: None, registry: str, place: Place) -> None:
    with pytest.raises(errors.CacheError, match="the container does not start"):
        bazel_cache.start(place, settings(), f"{registry}/no/such@sha256:" + "ab" * 32)
    assert bazel_cache.status(place).state == "stopped"


def test_port_in_use_is_named(pin: str, place: Place) -> None:
    wanted = settings()
    with socket.create_server(("127.0.0.1", wanted.port)), pytest.raises(errors.CacheError, match="does not start"):
        bazel_cache.start(place, wanted, pin)
    assert bazel_cache.status(place).state == "stopped"
    assert bazel_cache.start(place, wanted, pin)


def test_two_starts_at_once_give_one_server(pin: str, place: Place) -> None:
    wanted = settings()
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda _: bazel_cache.start(place, wanted, pin), range(2))) == [False, True]


def test_password_is_in_no_command_line(pin: str, place: Place) -> None:
    bazel_cache.start(place, settings(), pin)
    secret = place.password()
    told = subprocess.run(
        ["docker", "inspect", bazel_cache.name(place)], capture_output=True, check=True, text=True
    ).stdout
    assert "--htpasswd_file" in told
    assert secret not in told
    holding = {path.name for path in place.root.rglob("*") if path.is_file() and secret in path.read_text()}
    assert holding == {"bazelrc", "reading.bazelrc", "password"}
    assert {(place.root / name).stat().st_mode & 0o077 for name in holding} == {0}


def test_who_else_listens_on_its_port_gets_no_password(pin: str, place: Place) -> None:
    """The container is stopped, and a server of somebody else takes its port."""
    wanted = settings()
    bazel_cache.start(place, wanted, pin)
    subprocess.run(["docker", "rm", "--force", bazel_cache.name(place)], check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", wanted.port)):
        assert bazel_cache.find(place=place) is None
        assert bazel_cache.status(place).state == "stopped"
    # A container of that name that we did not start is not ours either.
    strange = ["docker", "run", "--detach", "--name", bazel_cache.name(place), "--entrypoint", "/bin/busybox", pin]
    subprocess.run([*strange, "sleep", "600"], check=True, capture_output=True)
    assert bazel_cache.find(place=place) is None


def test_a_devcontainer_reads_it_as_long_as_it_runs(pin: str, place: Place) -> None:
    bazel_cache.start(place, settings(), pin)
    assert place.reading.exists()
    bazel_cache.stop(place)
    assert not place.reading.exists()
    assert not place.bazelrc.exists()


def test_no_engine_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/no-such.sock")
    with pytest.raises(errors.CacheError, match="no Docker engine answers"):
        bazel_cache.start(place, settings(), "x@sha256:" + "ab" * 32)
    monkeypatch.undo()
