"""The remote Bazel cache of a build from source: found, handed over as a secret, and its worth reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from workflows import console
from workflows.image.spec import ImageSpec, Means

if TYPE_CHECKING:
    from workflows.cache.server import Cache

RC_SECRET = "bazelrc"  # noqa: S105
_LOOPBACK = ("127.", "localhost", "[::1]")


def find(spec: ImageSpec, means: Means) -> Cache | None:
    """Return the cache that a build is to use; None where it needs none or none answers."""
    if spec.jaxlib != "source" or not means.use_bazel_cache:
        return None
    from workflows.cache import server

    found = server.find(means.bazel_cache)
    if found is None:
        where = (
            f"{means.bazel_cache}: no Bazel cache answers there" if means.bazel_cache else "no Bazel cache runs here"
        )
        console.note(f"{where}; the build goes on without (docker/start-cache.sh starts one)")
    else:
        mode = "read and written" if means.bazel_cache_write else "read only"
        console.note(f"Bazel cache {found.address}: {mode}")
    return found


def reach(means: Means, cache: Cache | None) -> Means:
    """Return means that reach a cache: one on this machine's loopback is seen from the host network only."""
    on_loopback = cache is not None and cache.address.startswith(_LOOPBACK)
    return replace(means, network="host") if on_loopback else means


def secret(cache: Cache | None, folder: Path | None, *, write: bool) -> tuple[str, ...]:
    """Return the build option that hands Bazel's settings over; writes them where a folder is given."""
    if cache is None:
        return ()
    path = (folder or Path("FOLDER")) / RC_SECRET
    if folder is not None:
        cache.write_rc(path, write=write)
    return ("--secret", f"id={RC_SECRET},src={path}")
