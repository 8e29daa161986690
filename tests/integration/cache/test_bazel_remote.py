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
from tests.integration.parts import registry as registries
from tooling.core import errors
from tooling.image import bazel_cache, build, pipeline
from tooling.image.reference import ImagePin

START = '#!/bin/sh\necho "$@" >/data/arguments\nexec /bin/busybox httpd -f -p 8080 -h /www\n'
pytestmark = pytest.mark.stand_in("an image that answers as bazel-remote does")


@pytest.fixture(scope="module")
def push_image(docker_engine: None, registry: str) -> Iterator[Callable[[str, str], ImagePin]]:
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
        return ImagePin(name, registries.push(name, name))

    yield push
    subprocess.run(["docker", "rmi", "--force", *names], capture_output=True)


@pytest.fixture(scope="module")
def pin(push_image: Callable[[str, str], ImagePin]) -> ImagePin:
    """A busybox that serves a status."""
    return push_image("v1", START)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield bazel_cache.default()
    bazel_cache.stop(bazel_cache.default())


def start(folder: Path, pin: ImagePin, port: int) -> bool:
    return bazel_cache.start(folder, port, 5, pin)


def reach(folder: Path) -> list[str]:
    return build.reach_cache(pipeline.parse([]), folder)


def inspect(folder: Path) -> str:
    return subprocess.run(
        ["docker", "inspect", bazel_cache.name_container(folder)], capture_output=True, text=True
    ).stdout


def test_container_starts_once_is_confined_and_stops(pin: ImagePin, folder: Path) -> None:
    port = processes.free_port()
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda _: start(folder, pin, port), range(2))) == [False, True]
    assert bazel_cache.look(folder) == f"127.0.0.1:{port} 5"
    arguments = (folder / "content" / "arguments").read_text().split()
    assert arguments == ["--max_size", "5", "--htpasswd_file", "/htpasswd"]
    secret = (folder / "bazelrc").read_text().partition(f"{bazel_cache.USER}:")[2].partition("@")[0]
    assert len(secret) >= 24
    assert reach(folder) == ["--secret", f'id=bazelrc,"src={folder}/reading.bazelrc"', "--network", "host"]
    description = inspect(folder)
    assert secret not in description, "the password is in no command line"
    host = json.loads(description)[0]["HostConfig"]
    assert (host["RestartPolicy"]["Name"], host["ReadonlyRootfs"]) == ("unless-stopped", True)
    assert host["PortBindings"]["8080/tcp"][0]["HostIp"] == "127.0.0.1"
    holders = {path.name for path in folder.rglob("*") if path.is_file() and secret in path.read_text()}
    assert holders == {"bazelrc", "reading.bazelrc"}
    assert {(folder / name).stat().st_mode & 0o077 for name in holders} == {0}
    assert "--remote_upload_local_results=false" in (folder / "reading.bazelrc").read_text()

    assert bazel_cache.stop(folder)
    assert not bazel_cache.stop(folder)
    assert bazel_cache.look(folder) == ""
    assert {path.name for path in folder.iterdir()} == {"content", "htpasswd", "start.lock"}


def test_killed_container_is_stopped_and_starts_again(pin: ImagePin, folder: Path) -> None:
    port = processes.free_port()
    start(folder, pin, port)
    subprocess.run(["docker", "kill", bazel_cache.name_container(folder)], check=True, capture_output=True)
    assert bazel_cache.look(folder) == ""
    assert reach(folder) == []
    assert start(folder, pin, port)


def test_a_server_that_does_not_start_is_named_and_not_started_for_ever(
    push_image: Callable[[str, str], ImagePin], registry: str, pin: ImagePin, folder: Path
) -> None:
    bad_pin = push_image("broken", "#!/bin/sh\necho no such option >&2\nexit 1\n")
    port = processes.free_port()
    with pytest.raises(errors.EngineError, match=r"does not answer on .*; it said: no such option"):
        start(folder, bad_pin, port)
    with pytest.raises(errors.EngineError, match="the container does not start"):
        start(folder, ImagePin(f"{registry}/no/such", "sha256:" + "ab" * 32), port)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(errors.EngineError, match="does not start"):
        start(folder, pin, port)
    assert inspect(folder) == "[]\n"
    assert start(folder, pin, port)


def test_who_else_listens_on_its_port_gets_no_password(pin: ImagePin, folder: Path) -> None:
    """The container is gone, and a server of somebody else takes its port."""
    port, name = processes.free_port(), bazel_cache.name_container(folder)
    start(folder, pin, port)
    subprocess.run(["docker", "rm", "--force", name], check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", port)):
        assert reach(folder) == []
    # A container of that name that we did not start is not ours either.
    command = ["docker", "run", "--detach", "--name", name, "--entrypoint", "/bin/busybox", pin.exact, "sleep", "600"]
    subprocess.run(command, check=True, capture_output=True)
    assert reach(folder) == []
