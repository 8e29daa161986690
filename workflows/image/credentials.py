"""Who we are to a registry: what `docker login` left, in a file or with a helper. Never shown, never logged."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workflows import errors, proc

_HUB = "https://index.docker.io/v1/"
_HELPER = re.compile(r"[A-Za-z0-9_.-]+")
_IDENTITY = "<token>"


@dataclass(frozen=True)
class Login:
    """A user and a password, or an identity token; neither is part of ``repr``."""

    user: str = field(repr=False)
    secret: str = field(repr=False)
    identity: bool = False

    @property
    def basic(self) -> str:
        """The value of an ``Authorization`` header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


def find(host: str, path: str, environment: Mapping[str, str] = os.environ) -> Login | None:
    """Return the login for a repository, or None where nobody logged in.

    Looks where Docker does (``$DOCKER_CONFIG/config.json``: the host's helper, the file itself, the general helper),
    then where Podman does.

    Raises
    ------
    RegistryError
        A configuration cannot be read, or names a helper that is not here.
    """
    home = Path(environment.get("HOME") or Path.home())
    folders = [Path(environment.get("DOCKER_CONFIG") or home / ".docker") / "config.json"]
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        folders.append(Path(runtime) / "containers" / "auth.json")
    for file in folders:
        if (login := _from_file(file, host, path)) is not None:
            return login
    return None


def keys(host: str, path: str) -> list[str]:
    """Return the names under which a configuration may hold a registry, the most particular first."""
    if host == "docker.io":
        return [_HUB, "docker.io", "index.docker.io"]
    parts = path.split("/")
    repositories = ["/".join((host, *parts[:count])) for count in range(len(parts), 0, -1)]
    return [*repositories, host, f"https://{host}", f"https://{host}/", f"https://{host}/v1/", f"https://{host}/v2/"]


def _from_file(file: Path, host: str, path: str) -> Login | None:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise errors.RegistryError(f"{file}: cannot be read as JSON; correct it or log in again") from error
    helpers = config.get("credHelpers") or {}
    for key in keys(host, path):
        if key in helpers:
            return _ask(helpers[key], key)
    for key in keys(host, path):
        entry = (config.get("auths") or {}).get(key)
        if entry is not None:
            # With a general helper the file holds only that there is a login.
            return _from_entry(entry, file) or (_ask(config["credsStore"], key) if config.get("credsStore") else None)
    return None


def _from_entry(entry: Mapping[str, Any], file: Path) -> Login | None:
    if token := entry.get("identitytoken"):
        return Login(_IDENTITY, token, identity=True)
    if not (encoded := entry.get("auth")):
        return None
    try:
        user, found, secret = base64.b64decode(encoded, validate=True).decode("utf-8").partition(":")
    except ValueError as error:
        raise errors.RegistryError(f"{file}: an 'auth' in it is not base64; log in again") from error
    return Login(user, secret.rstrip("\0")) if found else None


def _ask(helper: object, key: str) -> Login | None:
    """Ask a credential helper, which answers on its standard output."""
    if not isinstance(helper, str) or not _HELPER.fullmatch(helper):
        raise errors.RegistryError(f"the credential helper of {key} has no valid name; correct Docker's config.json")
    program = f"docker-credential-{helper}"
    try:
        answer = proc.run([program, "get"], stdin=key.encode(), check=False)
    except errors.ToolError as error:
        raise errors.RegistryError(
            f"{program}: not found, but Docker's config.json names it for {key}; install it or log in again"
        ) from error
    if answer.returncode:
        if b"not found" in answer.stdout + answer.stderr:
            return None
        # What it printed may hold a secret: only that it failed is said.
        raise errors.RegistryError(f"{program}: failed for {key} (exit status {answer.returncode}); log in again")
    try:
        said = json.loads(answer.stdout)
        user, secret = str(said["Username"]), str(said["Secret"])
    except (ValueError, KeyError, TypeError):
        raise errors.RegistryError(f"{program}: its answer for {key} cannot be read") from None
    return Login(user, secret, identity=user == _IDENTITY)
