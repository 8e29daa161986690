"""Gives a build pip's indexes, certificates, proxies and a Bazel cache, as secrets."""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tooling.core import console, errors
from tooling.image.request import ImageSpec, Means, fits_an_option

if TYPE_CHECKING:
    from tooling.image.bazel_cache import Server

PIP_VARIABLE = "MULTIMESH_PIP_CONF"
SYSTEM = (Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"))
_PLACES = ("index-url", "extra-index-url", "find-links")
# Options that say where packages are. All else in a pip.conf is about the caller's own machine.
_KEYS = (*_PLACES, "trusted-host", "proxy", "timeout", "retries", "keyring-provider")
_CA_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


class Access(NamedTuple):
    """Options and variables for the build. Options name files and variables, never their content."""

    options: tuple[str, ...]
    variables: Mapping[str, str]
    left_out: tuple[str, ...]  # folders of this machine that pip searches here and cannot search in a build


def access(means: Means, environ: Mapping[str, str]) -> Access:
    """Return the options and variables by which pip in a build reaches the package index of this machine."""
    options, variables, left_out = list[str](), dict[str, str](), list[str]()
    settings = pip_settings(environ)
    if means.pip_config is not None:
        options += ["--secret", f"id=pip.conf,src={means.pip_config}"]
    else:
        for key in _PLACES:
            places = settings.pop(key, "").split()
            here = [place for place in places if place.startswith(("file:", "/", ".", "~")) or "://" not in place]
            left_out += here
            if remaining := [place for place in places if place not in here]:
                settings[key] = "\n".join(remaining)
        kept = [(key, settings[key].strip().replace("\n", "\n  ")) for key in sorted(settings) if key in _KEYS]
        if kept:
            text = "".join(["[global]\n", *(f"{key} = {value}\n" for key, value in kept)])
            options += ["--secret", f"id=pip.conf,env={PIP_VARIABLE}"]
            variables[PIP_VARIABLE] = text
    named = [settings.get("cert", ""), *(environ.get(name, "") for name in _CA_VARIABLES)]
    trusted = next((Path(name) for name in named if name), None)
    bundle = means.ca_bundle or (trusted if trusted and trusted.is_file() and fits_an_option(trusted) else None)
    if bundle is not None:
        options += ["--secret", f"id=ca.pem,src={bundle}"]
    for name in _PROXIES:
        if environ.get(name):
            options += ["--build-arg", name]  # without a value: the engine's client takes it from the environment
    return Access(tuple(options), variables, tuple(left_out))


def pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return pip's settings on this machine: its files in its order, then the environment."""
    home = Path(environ.get("HOME", "/nonexistent"))
    shared = filter(None, environ.get("XDG_CONFIG_DIRS", "").split(":"))
    user = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    files = [*(Path(place) / "pip" / "pip.conf" for place in shared), *SYSTEM, home / ".pip" / "pip.conf", user]
    files.append(Path(sys.prefix) / "pip.conf")
    if chosen := environ.get("PIP_CONFIG_FILE"):
        files = [] if chosen == os.devnull else [*files, Path(chosen)]
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


def find_cache(spec: ImageSpec, means: Means) -> Server | None:
    """Return the remote Bazel cache that a build is to use; None where it needs none or none answers."""
    if spec.jaxlib != "source" or not means.use_bazel_cache:
        return None
    from tooling.image import bazel_cache

    found = bazel_cache.find_server(means.bazel_cache)
    if found is None:
        console.note("no Bazel cache of yours runs here; the build goes on without (docker/start-cache.sh starts one)")
    else:
        console.note(f"Bazel cache {found.address}: {'read and written' if means.bazel_cache_write else 'read only'}")
    return found


def through_cache(cache: Server | None, means: Means, folder: Path | None) -> tuple[Means, tuple[str, ...]]:
    """Return means that reach a cache, and the build option that hands Bazel's settings over.

    A cache on this machine's loopback is seen from the host network only. The settings, perhaps with a password, are
    written where a folder is given.
    """
    if cache is None:
        return means, ()
    path = (folder or Path("FOLDER")) / "bazelrc"
    if folder is not None:
        cache.write_rc(path, write=means.bazel_cache_write)
    on_loopback = cache.address.startswith(("127.", "localhost", "[::1]"))
    return means._replace(network="host") if on_loopback else means, ("--secret", f"id=bazelrc,src={path}")
