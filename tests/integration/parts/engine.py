"""A real Docker engine with buildx: the one that runs, or one that is installed and started for the test run."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path, PurePosixPath

from tests.integration.parts import packages, processes

BASE = "multimesh-test-base"
_USERS = Path(tempfile.gettempdir()) / "multimesh-engine.lock"
_BRIDGE = "mm-test0"
_CONTAINERD_BRIDGE = "mm-test1"


def answers(host: str | None = None) -> bool:
    """Say whether an engine answers, at a socket or where the environment says."""
    env = os.environ | ({"DOCKER_HOST": host} if host else {})
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "version"], env=env, capture_output=True).returncode == 0


@contextmanager
def running(folder: Path) -> Iterator[Callable[[], None]]:
    """Have an engine with buildx for the length of a block; gives what starts it again where it has ended.

    Only one that we started is stopped, when no other test run of this machine uses it any more.
    """
    packages.need("docker", "docker.io")
    with_buildx(folder)
    with _USERS.open("w") as users, ExitStack() as stack:

        def ensure() -> None:
            with _USERS.with_suffix(".starts").open("w") as turn:  # of two runs that begin at once, one starts it
                fcntl.flock(turn, fcntl.LOCK_EX)
                if answers():
                    return
                if log := [*folder.glob("engine/dockerd.log")]:
                    warnings.warn(f"the engine ended, and starts again: {log[0].read_text(errors='replace')[-2000:]}")
                stack.close()
                stack.enter_context(start(folder, root=Path("/var/lib/docker"), socket=Path("/var/run/docker.sock")))

        fcntl.flock(users, fcntl.LOCK_SH)
        ensure()
        yield ensure
        if (folder / "engine").exists():
            fcntl.flock(users, fcntl.LOCK_EX)  # not while another run builds with it


@contextmanager
def with_containerd_store(folder: Path) -> Iterator[str]:
    """Start an engine that keeps its images in containerd: Debian unstable's, with this machine's runc."""
    packages.need("runc", "runc")
    programs = packages.from_sid(folder / "unstable", "docker.io", "containerd")
    path = f"{programs}/usr/bin:{programs}/usr/sbin:{os.environ['PATH']}:/usr/sbin:/sbin"
    # Its runc is made for a newer C library than that of the release before.
    for name in ("usr/bin/runc", "usr/sbin/runc"):
        (programs / name).unlink(missing_ok=True)
    config = folder / "daemon.json"
    config.write_text('{"features": {"containerd-snapshotter": true}, "ip6tables": false}')
    server = start(
        folder,
        root=folder / "images",
        socket=folder / "docker.sock",
        bridge_name=_CONTAINERD_BRIDGE,
        path=path,
        config=config,
    )
    with server as host:
        yield host


@contextmanager
def start(
    folder: Path,
    *,
    root: Path,
    socket: Path,
    bridge_name: str = _BRIDGE,
    path: str | None = None,
    config: Path | None = None,
) -> Iterator[str]:
    """Start an engine with its images under ``root``, the programs of ``path`` and a ``config``; gives its address."""
    dockerd = shutil.which("dockerd", path=path) if path else packages.need("dockerd", "docker.io")
    containerd = shutil.which("containerd", path=path) if path else packages.need("containerd", "containerd")
    assert dockerd is not None
    assert containerd is not None
    env = os.environ | ({"PATH": path} if path else {})
    host = f"unix://{socket}"
    state = folder / "engine"
    state.mkdir(parents=True, exist_ok=True)
    pipe = state / "containerd.sock"
    containerd_argv = [containerd, "--root", f"{root}-containerd", "--state", str(state / "c"), "--address", str(pipe)]
    dockerd_argv = [dockerd, f"--containerd={pipe}", f"--data-root={root}", f"--exec-root={state / 'd'}"]
    dockerd_argv += [f"--host={host}", f"--group={os.getgid()}", f"--pidfile={state / 'dockerd.pid'}"]
    second = root != Path("/var/lib/docker")
    if second:
        # The machine's own engine has the usual ones; --bridge=none would take its bridge away.
        dockerd_argv += [f"--bridge={bridge_name}", "--iptables=false"]
    dockerd_argv += [f"--config-file={config}"] if config else []
    containerd_argv, dockerd_argv = (
        packages.as_root(*argv, env={"PATH": env["PATH"]}) for argv in (containerd_argv, dockerd_argv)
    )
    with (
        unmounted(state),
        bridge(bridge_name) if second else nullcontext(),
        processes.server(containerd_argv, state / "containerd.log", healthy=pipe.exists, env=env),
        processes.server(dockerd_argv, state / "dockerd.log", healthy=lambda: answers(host), env=env),
    ):
        yield host


@contextmanager
def unmounted(folder: Path) -> Iterator[None]:
    """Unmount what an engine leaves below a folder (its network's name), so that pytest can remove the folder."""
    yield
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in mounts:
        if folder in Path(place).parents:
            subprocess.run(packages.as_root("umount", place), check=True)


@contextmanager
def bridge(name: str) -> Iterator[None]:
    """Have a bridge for a second engine; its network follows from its number."""
    ip = packages.need("ip", "iproute2")
    subprocess.run(packages.as_root(ip, "link", "delete", name), capture_output=True)  # a run that was killed left it
    subprocess.run(packages.as_root(ip, "link", "add", name, "type", "bridge"), check=True)
    try:
        network = f"172.31.{255 - int(name[-1])}.1/24"
        subprocess.run(packages.as_root(ip, "addr", "add", network, "dev", name), check=True)
        yield
    finally:
        subprocess.run(packages.as_root(ip, "link", "delete", name), check=True)


def with_buildx(folder: Path) -> None:
    """Put Debian unstable's buildx where docker finds it, unless there is one."""
    if subprocess.run(["docker", "buildx", "version"], capture_output=True).returncode == 0:
        return
    place = folder / "buildx"
    place.mkdir(parents=True)
    packages.from_sid(place, "docker-buildx")
    plugins = Path(os.environ.get("DOCKER_CONFIG", "") or Path.home() / ".docker") / "cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    shutil.copy(place / "usr/libexec/docker/cli-plugins/docker-buildx", plugins)


def base_image(suite: str, folder: Path) -> str:
    """Return a minimal Debian, or Ubuntu (jammy), in the engine, made once; it stands in for the CUDA base."""
    image = f"{BASE}:{suite}"
    if subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode == 0:
        return image
    debootstrap, mirror, trust = packages.need("debootstrap", "debootstrap"), packages.mirror(), packages.KEYRING
    options = [f"--keyring={trust}", suite]
    if suite == "jammy":
        # Debian has no package of Ubuntu's keys; by TLS a minimal system could install nothing.
        mirror, options = packages.UBUNTU, ["--no-check-gpg", "--components=main,universe", suite]
    rootfs = folder / suite
    make = packages.as_root(debootstrap, "--variant=minbase", *options, rootfs, mirror)
    process = subprocess.run(make, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-1000:]
    tar = subprocess.Popen(packages.as_root("tar", "-C", rootfs, "-c", "."), stdout=subprocess.PIPE)
    subprocess.run(["docker", "import", "-", image], stdin=tar.stdout, check=True, capture_output=True)
    assert tar.wait() == 0
    subprocess.run(packages.as_root("rm", "-r", rootfs), check=True)
    return image


def checkable(verdict: str = "echo ok: stub") -> tuple[dict[str, tuple[bytes, int]], dict[str, str]]:
    """Return files and links of a busybox with stubs of what a check looks for; its jobs run ``verdict``."""
    busybox = Path(packages.need("busybox", "busybox-static")).read_bytes()
    files = {
        "bin/busybox": (busybox, 0o755),
        "opt/entrypoint.sh": (b'#!/bin/sh\nexec "$@"\n', 0o755),
        "opt/maxtext/validate-cpu.sh": (f"#!/bin/sh\n{verdict}\n".encode(), 0o755),
        "opt/maxtext/llama3-8b-16gpus/run-dgx-h100.sh": (f"#!/bin/sh\n{verdict}\n".encode(), 0o755),
    }
    stubs = ["opt/hardware.py", "opt/maxtext/run.py", "opt/LICENSE"]
    stubs += [f"opt/inventory/{name}" for name in ("sbom.cdx.json", "licences.txt", "THIRD-PARTY-NOTICES")]
    files |= dict.fromkeys((*stubs, "opt/sources.lock", "opt/images.lock"), (b"stub\n", 0o644))
    return files, {f"bin/{name}": "busybox" for name in ("sh", "cat", "find", "head")}


def archive(files: dict[str, tuple[bytes, int]], links: dict[str, str]) -> bytes:
    """Return a tar for ``docker import``: files with content and mode, symbolic links, and the folders of both."""
    raw = io.BytesIO()
    folders = {str(parent) for name in (*files, *links) for parent in PurePosixPath(name).parents} - {"."}
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name in sorted(folders):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for name, (content, mode) in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), mode
            tar.addfile(info, io.BytesIO(content))
        for name, target in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return raw.getvalue()
