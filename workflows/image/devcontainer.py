"""``.devcontainer``: its base follows ``images.lock``."""

from __future__ import annotations

import json
import re
from pathlib import Path

from workflows import errors, files
from workflows.image.digests import ImageLock

FILE = ".devcontainer/devcontainer.json"


def arguments(lock: ImageLock) -> dict[str, str]:
    """Return the build arguments that the lock gives."""
    base, python = lock.images["cuda-devel"], lock.files["python linux/amd64"]
    return {"BASE_IMAGE": base.exact, "PYTHON_URL": python.url, "PYTHON_SHA256": python.sha256 or ""}


def follow(root: Path, lock: ImageLock) -> None:
    """Write the build arguments of ``devcontainer.json``; all else of it, comments too, stays as it is."""
    text = (root / FILE).read_text(encoding="utf-8")
    for name, value in arguments(lock).items():
        before, *more = re.split(rf'(?m)^(\s*"{name}": )"[^"\n]*"', text)
        if len(more) != 2:
            raise errors.ManifestError(f'{FILE}: has {len(more) // 2} lines "{name}": "..."; write one')
        text = f"{before}{more[0]}{json.dumps(value)}{more[1]}"
    files.write(root / FILE, text)
