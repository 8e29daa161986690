"""Results for later processes: JSON in a folder, each under a key of all that it follows from.

``MULTIMESH_CACHE`` names the folder, by default ``~/.cache/multimesh``; ``off`` switches it off. Nothing depends on
what is kept: whoever reads a value checks it, and computes it anew where it is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import warnings
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

VARIABLE = "MULTIMESH_CACHE"
MOST = 256
"""Files that are kept; the oldest go first."""


def folder() -> Path | None:
    """Return the folder; None if it is switched off, or there is no home."""
    given = os.environ.get(VARIABLE, "")
    if given == "off":
        return None
    with suppress(RuntimeError):
        return Path(given).expanduser() if given else Path("~/.cache/multimesh").expanduser()
    return None


def key(*made_from: Any) -> str:
    """Return a digest of all that a value follows from, and of the versions of MultiMesh and JAX."""
    versions = [_version(name) for name in ("multimesh-jax", "jax")]
    from multimesh.core.stable import text  # only here: it imports JAX, which commands that only plan do without

    return hashlib.sha256(text((versions, *made_from)).encode()).hexdigest()


def get(key: str) -> Any:
    """Return the value under a key; None if there is none. A file that is no JSON is ignored, and a warning says so."""
    place = folder()
    if place is None:
        return None
    file = place / f"{key}.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        os.utime(file)
    except OSError:
        return None
    except ValueError:
        tell_wrong(key)
        return None
    return found


def tell_wrong(key: str) -> None:
    """Warn of a file that does not hold the value that was written. It is written anew."""
    warnings.warn(f"{folder()}/{key}.json is damaged and ignored ({VARIABLE})", stacklevel=3)


def put(key: str, value: Any) -> None:
    """Write a value; all of the file appears at once. Where the folder can't be written to, nothing is kept."""
    place = folder()
    if place is None:
        return
    half = place / f".{key}.{secrets.token_hex(8)}"
    with suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        try:
            half.write_text(json.dumps(value), encoding="utf-8")
            half.replace(place / f"{key}.json")
        finally:
            half.unlink(missing_ok=True)
        files = sorted((path.stat().st_mtime, path) for path in place.glob("*.json"))
        for _, path in files[:-MOST]:
            path.unlink(missing_ok=True)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
