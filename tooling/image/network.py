"""Gives a build pip's configuration, certificates, proxies and a Bazel cache, as secrets or by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tooling.core import console
from tooling.image.request import ImageSpec, Means, fits_an_option

if TYPE_CHECKING:
    from tooling.image.bazel_cache import Server

_CA_VARIABLES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")


def access(means: Means, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the options by which a build reaches its packages; they name files and variables, never their content."""
    options: list[str] = []
    if config := means.pip_config or _find_file(environ, "PIP_CONFIG_FILE"):
        options += ["--secret", f"id=pip.conf,src={config}"]
    if bundle := means.ca_bundle or _find_file(environ, *_CA_VARIABLES):
        options += ["--secret", f"id=ca.pem,src={bundle}"]
    for name in _PROXIES:
        if environ.get(name):
            options += ["--build-arg", name]  # without a value: the engine's client takes it from the environment
    return tuple(options)


def tell_unread(means: Means, environ: Mapping[str, str]) -> None:
    """Say which indexes of this shell's pip a build does not ask: an address may have a password in it."""
    named = [name for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL") if environ.get(name)]
    if named and not (means.pip_config or _find_file(environ, "PIP_CONFIG_FILE")):
        console.note(f"{' and '.join(named)}: not handed to the build; write it into a file, and add --pip-config FILE")


def _find_file(environ: Mapping[str, str], *variables: str) -> Path | None:
    """Return the file that the first of these variables names, if an engine can take it."""
    path = next((Path(environ[name]) for name in variables if environ.get(name)), None)
    return path if path and path.is_file() and fits_an_option(path) else None


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
