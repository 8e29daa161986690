"""What a build is told about the caller's network: pip's indexes, certificates, proxies; handed over as secrets."""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workflows import errors
from workflows.image.spec import Means

PIP_VARIABLE = "MULTIMESH_PIP_CONF"
# What says where packages are; all else in a pip.conf is about the caller's own machine.
_KEYS = (
    "index-url",
    "extra-index-url",
    "trusted-host",
    "find-links",
    "proxy",
    "timeout",
    "retries",
    "keyring-provider",
)
_PLACES = ("index-url", "extra-index-url", "find-links")
SYSTEM = (Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"))
_CA_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_LONGEST_VARIABLE = 120_000


@dataclass(frozen=True)
class Access:
    """What the build gets.

    Attributes
    ----------
    options
        For the build command; they name files and variables, never what these hold.
    variables
        For the environment of the build command.
    left_out
        Folders of this machine that pip searches here and cannot search in a build.
    """

    options: tuple[str, ...]
    variables: Mapping[str, str]
    left_out: tuple[str, ...]


def access(means: Means, environ: Mapping[str, str]) -> Access:
    """Return how the build gets to its package index."""
    options, variables, left_out = list[str](), dict[str, str](), tuple[str, ...]()
    settings = pip_settings(environ)
    if means.pip_config is not None:
        options += ["--secret", f"id=pip.conf,src={means.pip_config}"]
    else:
        settings, left_out = _reachable(settings)
        text = _render({key: value for key, value in settings.items() if key in _KEYS})
        if len(text) > _LONGEST_VARIABLE:
            raise errors.UsageError(
                "your pip configuration is too long to hand over; give a short one with --pip-config"
            )
        if text:
            options += ["--secret", f"id=pip.conf,env={PIP_VARIABLE}"]
            variables[PIP_VARIABLE] = text
    bundle = means.ca_bundle or _bundle(settings, environ)
    if bundle is not None:
        options += ["--secret", f"id=ca.pem,src={bundle}"]
    for name in proxies(environ):
        options += ["--build-arg", name]  # without a value: the engine's client takes it from the environment
    return Access(tuple(options), variables, left_out)


def proxies(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that name the caller's proxies, perhaps with a password in them."""
    return tuple(name for name in _PROXIES if environ.get(name))


def fits_an_option(path: Path) -> bool:
    """Say whether a path can be part of ``--secret``, whose fields engines read as those of a CSV file."""
    return not {",", '"', "\n"} & set(str(path))


def in_a_file(access: Access, folder: Path) -> Access:
    """Hand pip's settings over in a file of ours: Podman's server does not see its client's environment."""
    variables = dict(access.variables)
    text = variables.pop(PIP_VARIABLE, None)
    if text is None:
        return access
    file = folder / "pip.conf"
    file.write_text(text, encoding="utf-8")
    options = tuple(word.replace(f",env={PIP_VARIABLE}", f",src={file}") for word in access.options)
    return Access(options, variables, access.left_out)


def pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what pip would be told on this machine: its files in its order, then the environment."""
    home = Path(environ.get("HOME", "/nonexistent"))
    shared = environ.get("XDG_CONFIG_DIRS", "").split(":")
    files = [Path(place) / "pip" / "pip.conf" for place in filter(None, shared)]
    files += [*SYSTEM, home / ".pip" / "pip.conf"]
    files += [
        Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf",
        Path(sys.prefix) / "pip.conf",
    ]
    chosen = environ.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        files = []
    elif chosen:
        files.append(Path(chosen))
    parser = configparser.RawConfigParser()
    try:
        parser.read(files, encoding="utf-8")
    except (configparser.Error, UnicodeError) as error:
        raise errors.UsageError(
            f"pip's configuration cannot be read ({error}); correct it or give --pip-config"
        ) from error
    settings = dict[str, str]()
    for section in ("global", "install"):
        if parser.has_section(section):
            settings |= {key.replace("_", "-"): value for key, value in parser.items(section)}
    for name, value in environ.items():
        key = name.removeprefix("PIP_").lower().replace("_", "-")
        if name.startswith("PIP_") and key in (*_KEYS, "cert"):
            settings[key] = value
    return settings


def _reachable(settings: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Leave out places that are folders of this machine."""
    kept, left_out = dict(settings), list[str]()
    for key in _PLACES:
        places = settings.get(key, "").split()
        away = [place for place in places if place.startswith(("file:", "/", ".", "~")) or "://" not in place]
        left_out += away
        remaining = [place for place in places if place not in away]
        kept.pop(key, None)
        if remaining:
            kept[key] = "\n".join(remaining)
    return kept, tuple(left_out)


def _render(settings: Mapping[str, str]) -> str:
    lines = [f"{key} = " + value.strip().replace("\n", "\n  ") + "\n" for key, value in sorted(settings.items())]
    return "".join(["[global]\n", *lines]) if lines else ""


def _bundle(settings: Mapping[str, str], environ: Mapping[str, str]) -> Path | None:
    named = [settings.get("cert", ""), *(environ.get(name, "") for name in _CA_VARIABLES)]
    found = next((Path(name) for name in named if name), None)
    return found if found is not None and found.is_file() and fits_an_option(found) else None
