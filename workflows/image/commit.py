"""Makes an image of a running devcontainer, without the secrets in its environment."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from workflows import console, errors, proc
from workflows.image.engine import Engine


def find(engine: Engine, name: str) -> dict[str, Any]:
    """Return a container as the engine describes it, or raise ``EngineError`` if there is none of that name."""
    result = engine.run("container", "inspect", name, check=False)
    if result.returncode:
        raise errors.EngineError(f"{name}: no such container; `docker ps` shows those that run")
    return dict(json.loads(result.text)[0])


def commit(engine: Engine, container: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Return the id of an image of a container's files.

    Variables that the container was started with are as in its own image, or empty: tokens and passwords arrive so.
    Folders that are mounted into the container stay outside.
    """
    name = str(container["Name"]).removeprefix("/")
    image = (engine.inspect(str(container["Image"])) or {}).get("Config") or {}
    own = restored(container["Config"].get("Env") or [], image.get("Env") or [])
    if own:
        console.note(f"{name}: not in the image: the values of {', '.join(sorted(own))}")
    if mounts := sorted(str(each["Destination"]) for each in container.get("Mounts") or []):
        console.note(f"{name}: mounted, so not in the image: {', '.join(mounts)}")
    changes = [word for each in own for word in ("--change", _instruction(each, own[each]))]
    temporary = f"multimesh-commit-{secrets.token_hex(8)}"
    result = engine.run("commit", *changes, str(container["Id"]), temporary, check=False)
    if result.returncode:
        raise errors.EngineError(f"{name}: cannot be committed ({result.complaint})")
    # The committed image also holds, for the history, the container's configuration as it was started; what a build
    # makes of it holds its own alone. Where an engine would attach where it comes from, that would be this line.
    words = [word for each in labels.items() for word in ("--label", "=".join(each))]
    env = os.environ | {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    try:
        argv = [*engine.cli, "build", "--quiet", *words, "-"]
        built = proc.run(argv, check=False, stdin=f"FROM {temporary}\n".encode(), env=env)
        if built.returncode:
            raise errors.EngineError(f"{temporary}: cannot be labelled ({built.complaint})")
        return built.text.strip().splitlines()[-1]
    finally:
        engine.run("rmi", "--no-prune", temporary, check=False)


def restored(container: Sequence[str], image: Sequence[str]) -> dict[str, str]:
    """Return values for the variables that a container got when it was started: those of its image, else empty.

    ``UsageError`` where one of them has a name that no ``ENV`` instruction can take.
    """
    known = dict(each.partition("=")[::2] for each in image)
    # Engines give a PATH to every container.
    given = [(name, value) for name, _, value in (each.partition("=") for each in container) if name != "PATH"]
    names = [name for name, value in given if known.get(name) != value]
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise errors.UsageError(f"--commit: the container's variable {name!r} cannot be left out; start it without")
    return {name: known.get(name, "") for name in names}


def _instruction(name: str, value: str) -> str:
    """Return an ``ENV`` instruction that takes a value as it is; one of several lines has no such form: empty."""
    literal = "" if "\n" in value else re.sub(r'([\\"$])', r"\\\1", value)
    return f'ENV {name}="{literal}"'
