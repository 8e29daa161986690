"""Makes an image of a running devcontainer, without what its user keeps in the environment."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workflows import console, errors, proc
from workflows.image.engine import Engine

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Container:
    """A container as the engine describes it."""

    name: str
    facts: dict[str, Any]


def find(engine: Engine, name: str) -> Container:
    """Return a container, or raise ``EngineError`` if there is none of that name."""
    result = engine.run("container", "inspect", name, check=False)
    if result.returncode:
        raise errors.EngineError(f"{name}: no such container; `docker ps` shows those that run")
    return Container(name, dict(json.loads(result.text)[0]))


def commit(engine: Engine, container: Container, labels: Mapping[str, str]) -> str:
    """Return the id of an image of a container's files.

    Variables that the container was started with are as in its own image, or empty: tokens and passwords arrive so.
    Folders that are mounted into the container stay outside.

    Raises
    ------
    EngineError
        The engine cannot commit it.
    UsageError
        It has a variable whose name cannot be emptied.
    """
    name, found = container.name, container.facts
    image = (engine.inspect(str(found["Image"])) or {}).get("Config") or {}
    own = restored(found["Config"].get("Env") or [], image.get("Env") or [])
    if own:
        console.note(f"{name}: not in the image: the values of {', '.join(sorted(own))}")
    if mounts := sorted(str(each["Destination"]) for each in found.get("Mounts") or []):
        console.note(f"{name}: mounted, so not in the image: {', '.join(mounts)}")
    changes = [word for each in own for word in ("--change", _instruction(each, own[each]))]
    temporary = f"multimesh-commit-{secrets.token_hex(8)}"
    result = engine.run("commit", *changes, str(found["Id"]), temporary, check=False)
    if result.returncode:
        raise errors.EngineError(f"{name}: cannot be committed ({result.complaint})")
    try:
        return _clean(engine, temporary, labels)
    finally:
        engine.run("rmi", "--no-prune", temporary, check=False)


def restored(container: Sequence[str], image: Sequence[str]) -> dict[str, str]:
    """Return what the variables that a container got when it was started must be set to: as in its image, else empty.

    Raises
    ------
    UsageError
        One of them has a name that no ``ENV`` instruction can take.
    """
    known = dict(each.partition("=")[::2] for each in image)
    # Engines give a PATH to every container.
    given = [(name, value) for name, _, value in (each.partition("=") for each in container) if name != "PATH"]
    names = [name for name, value in given if known.get(name) != value]
    for name in names:
        if not _NAME.fullmatch(name):
            raise errors.UsageError(f"--commit: the container's variable {name!r} cannot be left out; start it without")
    return {name: known.get(name, "") for name in names}


def _instruction(name: str, value: str) -> str:
    """Return an ``ENV`` instruction that takes a value as it is; one of several lines has no such form: empty."""
    literal = "" if "\n" in value else re.sub(r'([\\"$])', r"\\\1", value)
    return f'ENV {name}="{literal}"'


def _clean(engine: Engine, image: str, labels: Mapping[str, str]) -> str:
    """Put labels on top of a committed image.

    That is a build, and its result holds only its own configuration; the committed one also holds, for the history, the
    container's as it was started.
    """
    words = [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
    argv = [*engine.cli, "build", "--quiet", *words, "-"]
    # Where an engine would attach where it comes from, that would be this line.
    env = os.environ | {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    result = proc.run(argv, check=False, stdin=f"FROM {image}\n".encode(), env=env)
    if result.returncode:
        raise errors.EngineError(f"{image}: cannot be labelled ({result.complaint})")
    return result.text.strip().splitlines()[-1]
