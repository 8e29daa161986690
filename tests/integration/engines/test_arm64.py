"""Images for linux/arm64, whose programs QEMU runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.engines.conftest import BASE, busybox
from tests.integration.image.conftest import Repository
from tests.integration.parts import emulation, packages
from tooling.core import errors
from tooling.image.engine import Engine

pytestmark = pytest.mark.full

Docker = Callable[..., str]
PLATFORM = "linux/arm64"


@pytest.fixture(scope="module")
def arm64(docker_engine: None, parts_folder: Path) -> Iterator[None]:
    """A busybox for arm64 in the engine, and a kernel that runs it."""
    place = parts_folder / "arm64"
    place.mkdir()
    packages.from_sid(place, "busybox-static", suite="bookworm", architecture="arm64")
    content = busybox(next(each for each in (place / "usr/bin/busybox", place / "bin/busybox") if each.exists()))
    (place / "base.tar").write_bytes(content)
    # An old engine takes what is imported for one of its own machine's; a build says which it is for.
    argv = ["docker", "buildx", "build", "--platform", PLATFORM, "--tag", BASE, "--file", "-", str(place)]
    subprocess.run(argv, input=b"FROM scratch\nADD base.tar /\n", check=True, capture_output=True)
    with emulation.arm64():
        yield
    subprocess.run(["docker", "rmi", "--force", BASE], capture_output=True)


@pytest.mark.stand_in("QEMU for an arm64 machine, a Dockerfile of the same features, and a registry on this machine")
@pytest.mark.usefixtures("arm64", "company")
def test_the_whole_way(engine: Engine, tiny: Repository, upload: Callable[..., list[str]], docker: Docker) -> None:
    told = json.loads(tiny.build(*upload("--platform", PLATFORM)).stdout)
    assert told["check"]["verdict"] == "ok: ran on aarch64"
    pull = told["pushed"]["image"]["pull"].split()[-1]
    skopeo = [packages.need("skopeo", "skopeo"), "inspect", "--tls-verify=false", f"docker://{pull}"]
    seen = json.loads(subprocess.run(skopeo, check=True, capture_output=True).stdout)
    assert (seen["Os"], seen["Architecture"]) == ("linux", "arm64")
    docker("rmi", "--force", told["id"])
    docker("pull", pull)
    assert docker("run", "--rm", "--network", "none", pull, "/bin/uname", "-m") == "aarch64"


@pytest.mark.usefixtures("arm64", "company")
def test_without_emulation(tiny: Repository) -> None:
    options = ["--accelerator", "cpu", "--base-image", BASE, "--platform", PLATFORM, "--no-docker-build-cache"]
    with emulation.switched_off():
        done = tiny.build(*options, check=False)
    assert done.returncode == errors.EngineError.exit_code, done.stderr
    assert "register QEMU there (Debian and Ubuntu: qemu-user-static" in done.stderr.splitlines()[-1]
