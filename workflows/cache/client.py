"""The side of a build: finds a cache, and says what it was worth."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from workflows import errors
from workflows.cache import bazel_remote, server, usage
from workflows.cache.settings import Place, bazelrc, default_place, read_password, write_private

_EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # sha256 of nothing: no cache minds it


@dataclass(frozen=True)
class Cache:
    """A cache that answers.

    Attributes
    ----------
    address
        ``HOST:PORT``.
    place
        Its folder if it is one of this machine that ``start-cache.sh`` started; None for another.
    """

    address: str
    place: Place | None

    def hits(self) -> usage.Hits | None:
        """Return its lookups until now, if it says; the difference of two is what a build got."""
        settings = self.place.load() if self.place else None
        if self.place is None or settings is None:
            return None
        if settings.backend == "bazel-remote":
            return bazel_remote.hits(self.place, settings)
        return usage.count(usage.LogReader(self.place.requests).new())

    def write_rc(self, path: Path, *, write: bool) -> None:
        """Write Bazel's options for this cache to a file that only its owner may read."""
        settings = self.place.load() if self.place else None
        file = settings.password_file if settings else None
        write_private(path, bazelrc(self.address, read_password(file) if file else None, write=write))


def find(address: str | None = None, place: Place | None = None) -> Cache | None:
    """Return the cache at ``address`` (``HOST:PORT``), or else the one of this user; None if it does not answer."""
    place = place or default_place()
    settings = place.load()
    if address is None or (settings is not None and settings.address == address):
        if settings is None or server.status(place).state != "running":
            return None
        return Cache(settings.address, place)
    return Cache(address, None) if _answers(address) else None


def _answers(address: str) -> bool:
    """Say whether something there serves blobs over HTTP."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/cas/{_EMPTY}", timeout=2):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 404
    except ValueError as error:
        raise errors.UsageError(f"--cache-addr '{address}': write HOST:PORT") from error
    except OSError:
        return False
