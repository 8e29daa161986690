"""A real Docker engine with buildx: the one that runs, or one that is installed and started for the test run."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tests.integration.parts import packages, processes

BASE = "multimesh-test-base"
_BRIDGE = "mm-test0"


def answers(host: str | None = None) -> bool:
    """Say whether an engine answers, at a socket or where the environment says."""
    env = os.environ | ({"DOCKER_HOST": host} if host else {})
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "version"], env=env, capture_output=True).returncode == 0


@contextmanager
def running(folder: Path) -> Iterator[None]:
    """Have an engine with buildx for the length of a block; only one that we started is stopped."""
    packages.need("docker", "docker.io")
    with_buildx(folder)
    if answers():
        yield
        return
    with own(folder, root=Path("/var/lib/docker"), socket=Path("/var/run/docker.sock")):
        yield


@contextmanager
def own(folder: Path, *, root: Path, socket: Path) -> Iterator[str]:
    """Start an engine of our own, with its images under ``root``; gives its DOCKER_HOST."""
    dockerd = packages.need("dockerd", "docker.io")
    containerd = packages.need("containerd", "containerd")
    host = f"unix://{socket}"
    state = folder / "engine"
    state.mkdir(parents=True, exist_ok=True)
    pipe = state / "containerd.sock"
    containerd_argv = [containerd, "--root", f"{root}-containerd", "--state", str(state / "c"), "--address", str(pipe)]
    dockerd_argv = [dockerd, f"--containerd={pipe}", f"--data-root={root}", f"--exec-root={state / 'd'}"]
    dockerd_argv += [f"--host={host}", f"--pidfile={state / 'dockerd.pid'}"]
    second = root != Path("/var/lib/docker")
    if second:
        # The machine's own engine has the usual ones; --bridge=none would take its bridge away.
        dockerd_argv += [f"--bridge={_BRIDGE}", "--iptables=false"]
    with (
        bridge() if second else nullcontext(),
        processes.server(containerd_argv, state / "containerd.log", healthy=pipe.exists),
        processes.server(dockerd_argv, state / "dockerd.log", healthy=lambda: answers(host)),
    ):
        yield host


@contextmanager
def bridge() -> Iterator[None]:
    """Have a bridge for a second engine."""
    ip = packages.need("ip", "iproute2")
    subprocess.run([ip, "link", "add", _BRIDGE, "type", "bridge"], check=True)
    try:
        subprocess.run([ip, "addr", "add", "172.31.255.1/24", "dev", _BRIDGE], check=True)
        yield
    finally:
        subprocess.run([ip, "link", "delete", _BRIDGE], check=True)


def with_buildx(folder: Path) -> None:
    """Put Debian unstable's buildx where docker finds it, unless there is one."""
    if subprocess.run(["docker", "buildx", "version"], capture_output=True).returncode == 0:
        return
    place = folder / "buildx"
    place.mkdir(parents=True)
    packages.from_sid("docker-buildx", place)
    plugins = Path(os.environ.get("DOCKER_CONFIG", "") or Path.home() / ".docker") / "cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    shutil.copy(place / "usr/libexec/docker/cli-plugins/docker-buildx", plugins)


def base_image(suite: str, folder: Path) -> str:
    """Return a minimal Debian in the engine, made once; it stands in for the CUDA base."""
    image = f"{BASE}:{suite}"
    if subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode == 0:
        return image
    debootstrap = packages.need("debootstrap", "debootstrap")
    rootfs = folder / suite
    made = subprocess.run(
        [debootstrap, "--variant=minbase", suite, str(rootfs), packages.mirror()], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout[-1000:]
    tar = subprocess.Popen(["tar", "-C", rootfs, "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(["docker", "import", "-", image], stdin=tar.stdout, check=True, capture_output=True)
    assert tar.wait() == 0
    shutil.rmtree(rootfs)
    return image


def archive(files: dict[str, tuple[bytes, int]], links: dict[str, str]) -> bytes:
    """Return a tar for ``docker import``: files with content and mode, and symbolic links."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as made:
        for name, (content, mode) in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), mode
            made.addfile(info, io.BytesIO(content))
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            made.addfile(info)
    return raw.getvalue()
