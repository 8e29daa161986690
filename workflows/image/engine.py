"""Finds the container engine and its abilities, and asks it the questions of every command."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflows import console, errors, proc

_PATIENCE_S = 5.0
_WITHOUT = (
    "without an engine: ./bootstrap.sh --group run && maxtext/validate-cpu.sh runs the same check on this machine, "
    "and --dry-run shows the build"
)


@dataclass(frozen=True)
class Engine:
    """An engine that answered, and the way to build with it.

    ``plugin`` is buildx itself, to be started without docker's client, which first would start it once more to ask what
    it is; None where there is none, or where only the client knows the way (``--context``).
    """

    cli: tuple[str, ...]  # how every call begins, e.g. ("docker", "--context", "big")
    kind: str  # docker or podman
    version: str
    client: str
    builder: str  # buildx; buildkit: the one inside of an older `docker build`; podman
    plugin: str | None = None

    @property
    def build_cli(self) -> tuple[str, ...]:
        """How every build begins."""
        if self.builder == "buildx":
            return (self.plugin, "build") if self.plugin else (*self.cli, "buildx", "build")
        return (*self.cli, "build")

    def attests(self) -> str | None:
        """Ask who can attach an SBOM and provenance to an image.

        ``engine``: it keeps them with the image (the containerd image store); ``builder``: one of its own, beside an
        engine that keeps none, so only when it pushes; None.
        """
        if self.builder != "buildx":
            return None
        info = _ask(self.cli, "info", "--format", "{{json .}}")
        if any("containerd.snapshotter" in str(pair) for pair in info.get("DriverStatus") or []):
            return "engine"
        told = self.run("buildx", "inspect", check=False, timeout_s=_PATIENCE_S)
        driver = re.search(r"^Driver:\s*(\S+)", told.text, re.MULTILINE)
        return "builder" if driver is not None and driver.group(1) != "docker" else None

    def run(self, *args: str, check: bool = True, timeout_s: float | None = None) -> proc.Result:
        """Run a command of the engine."""
        return proc.run([*self.cli, *args], check=check, timeout_s=timeout_s)

    def inspect(self, image: str) -> dict[str, Any] | None:
        """Return the engine's description of an image, or None if it has none of that name."""
        result = self.run("image", "inspect", image, check=False)
        if result.returncode == 0:
            return dict(json.loads(result.text)[0])
        if self.run("version", check=False).returncode:
            raise errors.EngineError(f"{image}: the engine does not answer ({result.complaint})")
        return None


def detect(context: str | None = None) -> Engine:
    """Return the engine of this machine, or of a docker context.

    ``EngineError``: none answers within seconds, or what is there cannot build; says what to install.
    """
    docker, answer = shutil.which("docker"), dict[str, Any]()
    cli = (docker or "docker", *(("--context", context) if context else ()))
    if docker:
        try:
            answer = _ask(cli, "version", "--format", "{{json .}}")
        except errors.EngineError:
            if context or os.environ.get("DOCKER_HOST") or shutil.which("podman") is None:
                raise
            console.note("docker's client finds no engine; podman is taken")
    server = answer.get("Server")
    if not server:  # where docker is Podman under that name (Debian's podman-docker), it answers without one
        if shutil.which("podman") is None:
            raise errors.EngineError(f"no container engine is installed; install docker.io or podman. {_WITHOUT}")
        if context:
            raise errors.EngineError(
                f"--remote {context} names a docker context, and only podman is here; install docker"
            )
        return _podman(())
    if any("podman" in str(part.get("Name", "")).lower() for part in server.get("Components") or []):
        # Its socket speaks Docker's API without BuildKit behind it: only Podman's own client hands over secrets.
        return _podman(("--url", proc.run([*cli, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"]).text))
    version, client = str(server.get("Version", "0")), str(answer.get("Client", {}).get("Version", "0"))
    if _numbers(version) < (20, 10):
        raise errors.EngineError(f"docker engine {version} is too old to build with; install 20.10 or later")
    plugin = next((str(file) for file in _plugins() if os.access(file, os.X_OK)), None)
    if plugin is None and _numbers(client) >= (23, 0):
        raise errors.EngineError(
            f"docker client {client} builds only with its buildx plugin, which is not here; install it "
            "(Debian and Ubuntu: docker-buildx, Docker's own packages: docker-buildx-plugin)"
        )
    return Engine(cli, "docker", version, client, "buildx" if plugin else "buildkit", None if context else plugin)


def _plugins() -> list[Path]:
    """Return where docker looks for buildx. (Asking buildx for its version takes as long as a small build.)"""
    config = Path(os.environ.get("DOCKER_CONFIG", "") or Path.home() / ".docker")
    try:
        extra = json.loads((config / "config.json").read_text(encoding="utf-8")).get("cliPluginsExtraDirs", [])
    except (OSError, ValueError):
        extra = []
    system = [f"/usr/{base}/docker/cli-plugins" for base in ("local/lib", "local/libexec", "lib", "libexec")]
    return [Path(folder) / "docker-buildx" for folder in (config / "cli-plugins", *extra, *system)]


def _podman(options: tuple[str, ...]) -> Engine:
    podman = shutil.which("podman")
    if podman is None:
        raise errors.EngineError(
            f"Podman answers at {options[-1]}, and docker's client cannot build with it; install podman here too"
        )
    told = _ask((podman, *options), "version", "--format", "json")
    client = str(told.get("Client", {}).get("Version", "0"))
    version = str((told.get("Server") or {}).get("Version", client))
    if _numbers(version) < (4, 3):
        raise errors.EngineError(f"podman {version} is too old to build with; install 4.3 or later, or docker 20.10")
    if _numbers(version)[0] != _numbers(client)[0]:
        raise errors.EngineError(
            f"podman {version} answers at {options[-1]}, and podman {client} here does not understand all of it; "
            "install the same here"
        )
    return Engine((podman, *options), "podman", version, client, "podman")


def _ask(cli: tuple[str, ...], *args: str) -> dict[str, Any]:
    """Ask the engine a question that it answers in JSON."""
    where = os.environ.get("DOCKER_HOST", "its socket")
    if cli[1:]:
        where = cli[-1] if cli[1] == "--url" else f"context {cli[-1]}"
    try:
        result = proc.run([*cli, *args], check=False, timeout_s=_PATIENCE_S)
    except TimeoutError:
        raise errors.EngineError(f"no engine answers at {where} within {_PATIENCE_S:.0f} s. {_WITHOUT}") from None
    try:
        answer = dict(json.loads(result.text))
    except ValueError:
        answer = {}
    if result.returncode and not answer.get("Server"):
        socket = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
        if os.path.exists(socket) and not os.access(socket, os.W_OK):
            raise errors.EngineError(
                "this user may not talk to the engine; add it to the group docker, log in again, and run again"
            )
        raise errors.EngineError(f"no engine answers at {where} ({result.complaint}); start one. {_WITHOUT}")
    return answer


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (0, 0)
