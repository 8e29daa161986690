"""Somebody of this machine who may use the engine, with a clone and an empty home in a folder of theirs."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.integration.parts import packages


class Person(NamedTuple):
    """Who they are, their folder, which has ``clone`` and ``home``, and what their shell has."""

    uid: int
    place: Path
    env: dict[str, str]

    def command(self, *argv: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command in the clone."""
        socket = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
        prefix = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", f"--groups={Path(socket).stat().st_gid}"]
        line = packages.as_root(*(prefix if self.uid else ()), *argv, env=self.env)
        return subprocess.run(line, cwd=self.place / "clone", input=stdin, capture_output=True, text=True)


@contextmanager
def somebody(uid: int, furnish: Callable[[Path], None]) -> Iterator[Person]:
    """Have a user of this id, whose folder a function furnishes; their containers and account go at the end."""
    name = f"multimesh-{uid}"  # programs ask for it
    if new := uid not in (user.pw_uid for user in pwd.getpwall()):
        subprocess.run(packages.as_root("useradd", "--uid", str(uid), "--no-create-home", name), check=True)
    with tempfile.TemporaryDirectory(prefix="mm-person-") as folder:
        place = Path(folder)
        place.chmod(0o755)
        ask = ["docker", "info", "--format", "{{json .ClientInfo.Plugins}}"]
        plugins = json.loads(subprocess.run(ask, check=True, capture_output=True).stdout)
        (place / "home/.docker/cli-plugins").mkdir(parents=True)
        [buildx] = [plugin["Path"] for plugin in plugins if plugin["Name"] == "buildx"]
        shutil.copy(buildx, place / "home/.docker/cli-plugins")
        furnish(place)
        subprocess.run(packages.as_root("chown", "-R", f"{uid}:{uid}", place), check=True)
        env = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_", "DOCKER_HOST"))}
        try:
            yield Person(uid, place, env | {"HOME": str(place / "home"), "PATH": os.environ["PATH"]})
        finally:
            command = ["docker", "ps", "-aq", "--filter", f"label=devcontainer.local_folder={place / 'clone'}"]
            for container in subprocess.run(command, capture_output=True, text=True).stdout.split():
                subprocess.run(["docker", "rm", "-f", container], check=False, capture_output=True)
            subprocess.run(packages.as_root("chown", "-R", str(os.geteuid()), place), check=True)
            if new:
                subprocess.run(packages.as_root("userdel", name), check=True)
