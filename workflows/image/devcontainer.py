"""``.devcontainer``: its base follows ``images.lock``; a published image can replace the build."""

from __future__ import annotations

import json
import re
from pathlib import Path

from workflows import errors, files
from workflows.image import reference
from workflows.image.digests import ImageLock
from workflows.image.registry import Registry

FILE = ".devcontainer/devcontainer.json"
PREBUILT = ".devcontainer/prebuilt/devcontainer.json"
TARGET = "devcontainer"
_HEAD = """\
// Written by `python -m workflows ci devcontainer`: ../devcontainer.json with a published image in place of its build.
"""


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


def published(image: str) -> str:
    """Return ``REPO@DIGEST`` if its registry has it and it is a devcontainer of ours, or raise ``UsageError``."""
    wanted, digest = reference.pulled(image, "latest")
    with Registry(wanted) as registry:
        target = registry.labels(registry.get(digest)).get("io.github.multimesh-jax.target")
    if target != TARGET:
        raise errors.UsageError(
            f"{wanted.at(digest)}: is no devcontainer (target {target}); `docker/build.py --stage {TARGET}`"
        )
    return wanted.at(digest)


def prebuilt(text: str, image: str) -> str:
    """Return the text of ``devcontainer.json`` with an image in place of its build."""
    named, names = re.subn(r'(?m)^  "name": "([^"]*)",$', r'  "name": "\1, prebuilt",', text)
    changed, builds = re.subn(r'(?ms)^  "build": \{\n.*?^  \},$', f'  "image": {json.dumps(image)},', named)
    if (names, builds) != (1, 1):
        raise errors.ManifestError(f'{FILE}: needs a "name" and a "build", each indented by two; restore it with git')
    return _HEAD + changed[changed.index("{") :]


def write_prebuilt(root: Path, image: str) -> Path:
    """Write the devcontainer that is pulled; return where it lies."""
    path = root / PREBUILT
    path.parent.mkdir(exist_ok=True)
    files.write(path, prebuilt((root / FILE).read_text(encoding="utf-8"), image))
    return path
