"""Finds the Docker engine and its buildx, and asks it the questions of every command."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from tooling.core import errors, files, proc

_PATIENCE_S = 5.0
_WITHOUT = (
    "without an engine: ./bootstrap.sh --group run && maxtext/validate-cpu.sh runs the same check on this machine, "
    "and --dry-run shows the build"
)


class Engine(NamedTuple):
    """An engine that answered.

    ``plugin`` is buildx itself, to be started without docker's client, which first would start it once more to ask what
    it is; None where nobody looked for it.
    """

    cli: tuple[str, ...]  # how every call begins
    plugin: str | None = None

    @property
    def buildx(self) -> tuple[str, ...]:
        """How every call of buildx begins."""
        return (self.plugin,) if self.plugin else (*self.cli, "buildx")

    def run(self, *args: str, check: bool = True, timeout_s: float | None = None) -> proc.Result:
        """Run a command of the engine."""
        return proc.run([*self.cli, *args], check=check, timeout_s=timeout_s)

    def inspect(self, image: str) -> dict[str, Any] | None:
        """Return the engine's description of an image, None if it has none of that name, or raise as ``check`` does."""
        asked = ("image", "inspect", image)
        try:
            result = self.run(*asked, check=False, timeout_s=_PATIENCE_S)
        except TimeoutError:
            result = self.check().run(*asked, check=False)  # it has much to do
        if result.returncode == 0:
            return dict(json.loads(result.text)[0])
        self.check()
        return None

    def check(self) -> Engine:
        """Return this engine. ``EngineError``: it does not answer within seconds, or cannot build; says what to do."""
        where = os.environ.get("DOCKER_HOST", "its socket")
        try:
            result = self.run("version", "--format", "{{json .Server}}", check=False, timeout_s=_PATIENCE_S)
        except TimeoutError:
            raise errors.EngineError(f"no engine answers at {where} within {_PATIENCE_S:.0f} s. {_WITHOUT}") from None
        if result.returncode:
            socket = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
            if os.path.exists(socket) and not os.access(socket, os.W_OK):
                raise errors.EngineError(
                    "this user may not talk to the engine; add it to the group docker, log in again, and run again"
                )
            raise errors.EngineError(f"no engine answers at {where} ({result.complaint}); start one. {_WITHOUT}")
        if result.text == "null" or "podman" in result.text.lower():
            raise errors.EngineError("Podman answers in place of Docker, and it has no buildx; install docker.io")
        if find_buildx() is None:
            raise errors.EngineError(
                "docker has no buildx plugin; install it (Debian and Ubuntu: docker-buildx, Docker's own packages: "
                "docker-buildx-plugin)"
            )
        return self


def find_engine() -> Engine:
    """Return the engine that docker's client would take; nobody asked yet whether it is there."""
    docker = shutil.which("docker")
    if docker is None:
        raise errors.EngineError(f"docker is not installed; install docker.io and docker-buildx. {_WITHOUT}")
    plugin = find_buildx()
    found = Engine((docker,), plugin)
    return found if plugin else found.check()


def detect() -> Engine:
    """Return such an engine that answered, or raise as ``check`` does."""
    return find_engine().check()


def find_buildx() -> str | None:
    """Return buildx, where docker looks for it. (Asking it for its version takes as long as a small build.)"""
    config = Path(os.environ.get("DOCKER_CONFIG", "") or Path.home() / ".docker")
    extra = files.read_object(config / "config.json").get("cliPluginsExtraDirs", [])
    system = [f"/usr/{base}/docker/cli-plugins" for base in ("local/lib", "local/libexec", "lib", "libexec")]
    places = [Path(folder) / "docker-buildx" for folder in (config / "cli-plugins", *extra, *system)]
    return next((str(file) for file in places if os.access(file, os.X_OK)), None)
