"""The Docker engine, by the docker SDK: a client, its images, and a push."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tooling.core import console, errors, proc
from tooling.image.reference import Reference, split

if TYPE_CHECKING:
    from docker.models.images import Image

    from docker import DockerClient

_PATIENCE_S = 5
_WAITS_S = (1, 4, 16)


@contextmanager
def connect() -> Iterator[DockerClient]:
    """Have a client of the engine. ``EngineError``: none answers within seconds, or what the SDK raises meanwhile."""
    try:
        import docker.errors
        import requests.exceptions
    except ImportError:  # the folder docker/ of a clone is a package of this name too, and an empty one
        raise errors.ToolingError("there is no .venv with docker's library; run ./bootstrap.sh --group image") from None
    place = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    faults = (docker.errors.DockerException, requests.exceptions.RequestException)
    try:
        client = docker.from_env(timeout=_PATIENCE_S)
        client.ping()
    except (*faults, ValueError) as error:
        said = f"within {_PATIENCE_S} s" if "timed out" in str(error) else f"({error})"
        raise errors.EngineError(
            f"no engine answers at {place} {said}; start one, or install docker.io and docker-buildx, and be in its "
            "group docker. Without an engine maxtext/validate-cpu.sh runs the same check on this machine"
        ) from None
    client.api.timeout = None  # type: ignore[assignment]  # a push or a job is silent for minutes
    try:
        yield client
    except faults as error:
        raise errors.EngineError(f"the engine: {getattr(error, 'explanation', None) or error}") from error


def find_image(client: DockerClient, *names: str) -> Image:
    """Return the image that the engine has under one of these names."""
    from docker.errors import ImageNotFound

    for name in names:
        with suppress(ImageNotFound):
            return client.images.get(name)
    raise errors.EngineError(f"{' or '.join(names)}: the engine has no such image; build it first")


def push(client: DockerClient, name: Reference) -> None:
    """Push a tag, again after a fault: the right to push was asked before. ``EngineError``: not at the last attempt."""
    for wait in (*_WAITS_S, None):
        events = client.api.push(name.repository, name.tag, stream=True, decode=True)
        fault = next((str(event["error"]) for event in events if "error" in event), "")
        if not fault:
            return
        if wait is None:
            host = split(name.repository)[0] or "docker.io"
            raise errors.EngineError(
                f"{name}: not pushed ({proc.shorten(fault)}); log in with `docker login {host}`, and check --repo"
            )
        console.note(f"{name}: {fault}; pushing it again in {wait} s")
        time.sleep(wait)
