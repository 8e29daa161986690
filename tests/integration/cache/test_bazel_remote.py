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
from tooling.image.bazel_cache import Cache, Settings
from tooling.image.digests import ImagePin

START = '#!/bin/sh\necho "$@" >/data/arguments\nexec /bin/busybox httpd -f -p 8080 -h /www\n'


@pytest.fixture(scope="module")
def pushed(docker_engine: None, registry: str) -> Iterator[Callable[[str, str], ImagePin]]:
    """Make a busybox that runs a script, and return its name by digest."""
    names = []

    def push(tag: str, script: str) -> ImagePin:
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
        _, _, digest = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip().partition("@")
        return ImagePin(name, digest)

    yield push
    subprocess.run(["docker", "rmi", "--force", *names], capture_output=True)


@pytest.fixture(scope="module")
def pin(pushed: Callable[[str, str], ImagePin]) -> ImagePin:
    """A busybox that serves a status."""
    return pushed("v1", START)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    made = Cache(tmp_path / "cache")
    yield made
    made.stop()


def settings(**changes: object) -> Settings:
    plain = {"host": "127.0.0.1", "port": processes.free_port(), "max_gib": 5}
    return Settings(**(plain | changes))


@pytest.mark.stand_in("an image that answers as bazel-remote does")
def test_container_starts_once_and_stops(pin: ImagePin, cache: Cache) -> None:
    wanted = settings()

    assert cache.start(wanted, pin)
    assert not cache.start(wanted, pin)
    with pytest.raises(errors.CacheError, match=r"`start-cache\.sh stop` first"):
        cache.start(settings(), pin)

    assert cache.look()[1] == "running"
    assert (cache.folder / "content" / "arguments").read_text().split() == [
        "--max_size",
        "5",
        "--htpasswd_file",
        "/htpasswd",
    ]
    assert bazel_cache.find_server(cache=cache) == bazel_cache.Server(wanted.address, cache.password())
    assert "--remote_upload_local_results=false" in (cache.folder / "reading.bazelrc").read_text()
    told = json.loads(subprocess.run(["docker", "inspect", cache.name], capture_output=True).stdout)[0]
    assert told["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
    assert told["HostConfig"]["ReadonlyRootfs"]
    assert told["HostConfig"]["PortBindings"]["8080/tcp"][0]["HostIp"] == "127.0.0.1"

    assert cache.stop()
    assert not cache.stop()
    assert cache.look()[1] == "stopped"
    assert (cache.folder / "content" / "arguments").exists()


def test_killed_container_is_found_stopped_and_starts_again(pin: ImagePin, cache: Cache) -> None:
    wanted = settings()
    cache.start(wanted, pin)
    subprocess.run(["docker", "kill", cache.name], check=True, capture_output=True)
    assert cache.look()[1] == "stopped"
    assert bazel_cache.find_server(cache=cache) is None
    assert cache.start(wanted, pin)
    assert cache.look()[1] == "running"


def test_a_server_that_ends_at_once_is_told_and_not_started_for_ever(
    pushed: Callable[[str, str], ImagePin], cache: Cache
) -> None:
    broken = pushed("broken", "#!/bin/sh\necho no such option >&2\nexit 1\n")
    with pytest.raises(errors.CacheError, match=r"does not answer on .*; it said: no such option"):
        cache.start(settings(), broken)
    listed = ["docker", "ps", "--all", "--quiet", "--filter", f"name={cache.name}"]
    assert subprocess.run(listed, check=True, capture_output=True, text=True).stdout == ""


def test_image_that_cannot_be_had_is_named(docker_engine: None, registry: str, cache: Cache) -> None:
    with pytest.raises(errors.CacheError, match="the container does not start"):
        cache.start(settings(), ImagePin(f"{registry}/no/such", "sha256:" + "ab" * 32))
    assert cache.look()[1] == "stopped"


def test_port_in_use_is_named(pin: ImagePin, cache: Cache) -> None:
    wanted = settings()
    with socket.create_server(("127.0.0.1", wanted.port)), pytest.raises(errors.CacheError, match="does not start"):
        cache.start(wanted, pin)
    assert cache.look()[1] == "stopped"
    assert cache.start(wanted, pin)


def test_two_starts_at_once_give_one_server(pin: ImagePin, cache: Cache) -> None:
    wanted = settings()
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda _: cache.start(wanted, pin), range(2))) == [False, True]


def test_password_is_in_no_command_line(pin: ImagePin, cache: Cache) -> None:
    cache.start(settings(), pin)
    secret = cache.password()
    told = subprocess.run(["docker", "inspect", cache.name], capture_output=True, check=True, text=True).stdout
    assert "--htpasswd_file" in told
    assert secret not in told
    holding = {path.name for path in cache.folder.rglob("*") if path.is_file() and secret in path.read_text()}
    assert holding == {"bazelrc", "reading.bazelrc", "password"}
    assert {(cache.folder / name).stat().st_mode & 0o077 for name in holding} == {0}


def test_who_else_listens_on_its_port_gets_no_password(pin: ImagePin, cache: Cache) -> None:
    """The container is stopped, and a server of somebody else takes its port."""
    wanted = settings()
    cache.start(wanted, pin)
    subprocess.run(["docker", "rm", "--force", cache.name], check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", wanted.port)):
        assert bazel_cache.find_server(cache=cache) is None
        assert cache.look()[1] == "stopped"
    # A container of that name that we did not start is not ours either.
    strange = ["docker", "run", "--detach", "--name", cache.name, "--entrypoint", "/bin/busybox", pin.exact]
    subprocess.run([*strange, "sleep", "600"], check=True, capture_output=True)
    assert bazel_cache.find_server(cache=cache) is None


def test_a_devcontainer_reads_it_as_long_as_it_runs(pin: ImagePin, cache: Cache) -> None:
    cache.start(settings(), pin)
    assert (cache.folder / "reading.bazelrc").exists()
    cache.stop()
    assert not (cache.folder / "reading.bazelrc").exists()
    assert not (cache.folder / "bazelrc").exists()


def test_no_engine_is_named(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/no-such.sock")
    with pytest.raises(errors.CacheError, match="no Docker engine answers"):
        cache.start(settings(), ImagePin("x", "sha256:" + "ab" * 32))
    monkeypatch.undo()
