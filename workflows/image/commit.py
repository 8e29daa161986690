"""Makes an image of a running devcontainer, without what its user keeps in the environment."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from workflows import console, errors, proc
from workflows.image.engine import Engine

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def commit(engine: Engine, container: str, labels: dict[str, str]) -> str:
    """Return the id of an image of a container's files.

    Variables that the container was started with, and its image does not have, are emptied: tokens and passwords arrive
    so. Folders that are mounted into the container stay outside.

    Raises
    ------
    EngineError
        There is no such container, or the engine cannot commit it.
    UsageError
        It has a variable whose name cannot be emptied.
    """
    found = _inspect(engine, container)
    image = (engine.inspect(str(found["Image"])) or {}).get("Config") or {}
    own = added(found["Config"].get("Env") or [], image.get("Env") or [])
    if own:
        console.note(f"{container}: emptied in the image: {', '.join(own)}")
    if mounts := sorted(str(each["Destination"]) for each in found.get("Mounts") or []):
        console.note(f"{container}: mounted, so not in the image: {', '.join(mounts)}")
    changes = [word for name in own for word in ("--change", f"ENV {name}=")]
    temporary = f"multimesh-commit-{secrets.token_hex(8)}"
    result = engine.run("commit", *changes, str(found["Id"]), temporary, check=False)
    if result.returncode:
        raise errors.EngineError(f"{container}: cannot be committed ({result.complaint})")
    try:
        return _clean(engine, temporary, labels)
    finally:
        engine.run("rmi", "--no-prune", temporary, check=False)


def added(container: list[str], image: list[str]) -> tuple[str, ...]:
    """Return the names of the variables that a container has in addition to, or other than, its image.

    Raises
    ------
    UsageError
        One of them has a name that no ``ENV`` instruction can take.
    """
    known = dict(each.partition("=")[::2] for each in image)
    names = [name for name, _, value in (each.partition("=") for each in container) if known.get(name) != value]
    for name in names:
        if not _NAME.fullmatch(name):
            raise errors.UsageError(f"--commit: the container's variable {name!r} cannot be left out; start it without")
    return tuple(names)


def _inspect(engine: Engine, container: str) -> dict[str, Any]:
    result = engine.run("container", "inspect", container, check=False)
    if result.returncode:
        raise errors.EngineError(f"{container}: no such container; `docker ps` shows those that run")
    return dict(json.loads(result.text)[0])


def _clean(engine: Engine, image: str, labels: dict[str, str]) -> str:
    """Put labels on top of a committed image.

    That is a build, and its result holds only its own configuration; the committed one also holds, for the history, the
    container's as it was started.
    """
    words = [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
    argv = [*engine.cli, "build", "--quiet", *words, "-"]
    result = proc.run(argv, check=False, stdin=f"FROM {image}\n".encode())
    if result.returncode:
        raise errors.EngineError(f"{image}: cannot be labelled ({result.complaint})")
    return result.text.strip().splitlines()[-1]
