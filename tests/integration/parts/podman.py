"""A real Podman with a store of its own, and its service on a socket that speaks Docker's API."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.parts import packages, processes

# Podman asks for more than a machine without CAP_SYS_RESOURCE may give.
_LIMITS = '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n'
# crun, which it takes by default, refuses a machine that has controllers in both kinds of control groups.
_RUNTIME = '[engine]\nruntime = "runc"\n'
_BOTH_KINDS = Path("/sys/fs/cgroup/unified/cgroup.controllers")
_STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{place}/images"\nrunroot = "{place}/run"\n'


@dataclass(frozen=True)
class Podman:
    """Its program, the environment that leads to its store, and its service."""

    program: str
    env: Mapping[str, str]
    host: str

    def __call__(self, *argv: str, stdin: bytes | None = None) -> str:
        """Run a command that must succeed; returns its output."""
        done = subprocess.run([self.program, *argv], input=stdin, capture_output=True, env=os.environ | self.env)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        return done.stdout.decode().strip()


@contextmanager
def running(folder: Path) -> Iterator[Podman]:
    """Have a Podman for the length of a block."""
    program = packages.need("podman", "podman")
    packages.need("iptables", "iptables")
    folder.mkdir(parents=True, exist_ok=True)
    both = _BOTH_KINDS.exists() and _BOTH_KINDS.read_text().strip()
    if both:
        packages.need("runc", "runc")
    (folder / "containers.conf").write_text(_LIMITS + (_RUNTIME if both else ""))
    (folder / "storage.conf").write_text(_STORAGE.format(place=folder))
    env = {
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }
    socket = folder / "podman.sock"
    # Podman 4 looks for a Dockerfile in its service's own folder before it takes the one that it was sent.
    argv = ["env", "-C", str(folder), program, "system", "service", "--time", "0", f"unix://{socket}"]
    with processes.server(argv, folder / "podman.log", healthy=socket.exists, env=os.environ | env):
        yield Podman(program, env, f"unix://{socket}")
    subprocess.run(["umount", "--lazy", folder / "images" / "overlay"], capture_output=True)
