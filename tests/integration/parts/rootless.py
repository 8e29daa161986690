"""A real Docker engine that runs as an ordinary user, made for the test run and removed after it."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.parts import engine, packages, processes

USER = "multimesh-rootless"
# In a mount namespace of its own: /dev/net/tun, which anybody may open on most machines, and not on every one.
_AS_USER = """\
set -eu
mknod "$1/tun" c 10 200
chmod 666 "$1/tun"
mount --bind "$1/tun" /dev/net/tun
exec setpriv --reuid "$2" --regid "$2" --init-groups env HOME="$1/home" USER="$2" XDG_RUNTIME_DIR="$1/run" "$3" --host="unix://$1/run/docker.sock"
"""


@dataclass(frozen=True)
class Rootless:
    """Where it answers, and a process in its network."""

    host: str
    pid: int


@contextmanager
def running(log: Path) -> Iterator[Rootless]:
    """Have a rootless engine for the length of a block."""
    packages.need("dockerd", "docker.io")
    packages.need("rootlesskit", "rootlesskit", "slirp4netns", "uidmap", "fuse-overlayfs")
    place = Path(tempfile.mkdtemp(prefix="multimesh-rootless-"))
    place.chmod(0o755)
    start = place / "docker.io/usr/share/docker.io/contrib/dockerd-rootless.sh"  # Ubuntu lacks it
    packages.from_sid(place / "docker.io", "docker.io", suite="trixie")
    subprocess.run(packages.as_root("useradd", "--home-dir", place / "home", "--create-home", USER), check=True)
    try:
        (place / "run").mkdir()
        subprocess.run(packages.as_root("chown", USER, place / "run"), check=True)
        host = f"unix://{place}/run/docker.sock"
        argv = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _AS_USER, "sh"]
        argv += [str(place), USER, str(start)]

        def healthy() -> bool:  # whoever runs the tests may talk to it
            opened = subprocess.run(
                packages.as_root("chmod", "666", place / "run" / "docker.sock"), capture_output=True
            )
            return opened.returncode == 0 and engine.answers(host)

        with processes.server(packages.as_root(*argv), log, healthy=healthy):
            yield Rootless(host, int(subprocess.check_output(packages.as_root("cat", place / "run" / "docker.pid"))))
    finally:
        subprocess.run(packages.as_root("userdel", USER), check=True)
        subprocess.run(packages.as_root("rm", "-r", place), check=True)
