"""``docker/images.lock``: base images by digest and downloads by checksum; ``.devcontainer`` follows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from tooling.core import errors, files

FILE, DEVCONTAINER = "docker/images.lock", ".devcontainer/devcontainer.json"


class ImagePin(NamedTuple):
    """An image that others are built from or that runs as a service; ``digest`` is None where nobody told it.

    ``read_in`` names the public files that told it; empty where its registry did.
    """

    reference: str
    digest: str | None
    read_in: str = ""

    @property
    def exact(self) -> str:
        """The name that pulls these bytes, or the plain reference where they are not known."""
        return f"{self.reference}@{self.digest}" if self.digest else self.reference


class FilePin(NamedTuple):
    """A file that a build downloads; ``sha256`` is None where nobody told it, and ``read_in`` as an image's."""

    url: str
    sha256: str | None
    read_in: str = ""


class ImageLock(NamedTuple):
    """The whole file: pins by name; files are named by kind and platform, e.g. ``python linux/amd64``."""

    images: dict[str, ImagePin]
    files: dict[str, FilePin]


def load(root: Path) -> ImageLock:
    """Read and check ``images.lock``."""
    try:
        raw = json.loads((root / FILE).read_text(encoding="utf-8"))
        images = {k: ImagePin(str(v["reference"]), v["digest"], v.get("read_in", "")) for k, v in raw["images"].items()}
        downloads = {k: FilePin(str(v["url"]), v["sha256"], v.get("read_in", "")) for k, v in raw["files"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise errors.ManifestError(f"{FILE}: is malformed ({error}); restore it with git") from error
    for field, held, pattern in (
        ("digest", {f"images.{k}.digest": pin.digest for k, pin in images.items()}, "sha256:[0-9a-f]{64}"),
        ("sha256", {f"files.{k}.sha256": file.sha256 for k, file in downloads.items()}, "[0-9a-f]{64}"),
        ("address", {f"files.{k}.url": file.url for k, file in downloads.items()}, r"https:/{2}[\w.:/%+~-]+"),
        ("name", {f"images.{k}.reference": pin.reference for k, pin in images.items()}, r"\w[\w.:/-]*:[\w.-]+"),
    ):
        files.check_values(FILE, held, pattern, field)
    return ImageLock(images, downloads)


def save(root: Path, lock: ImageLock) -> None:
    """Write new pins into ``images.lock``, whole or not at all. Its text about itself stays."""
    raw = json.loads((root / FILE).read_text(encoding="utf-8"))
    for kind, pins in lock._asdict().items():
        raw[kind] = {
            name: {key: value for key, value in pin._asdict().items() if value != ""} for name, pin in pins.items()
        }
    files.write_json(root / FILE, raw)


def build_arguments(lock: ImageLock) -> dict[str, str]:
    """Return the build arguments that the lock gives."""
    base, python = lock.images["cuda-devel"], lock.files["python linux/amd64"]
    return {"BASE_IMAGE": base.exact, "PYTHON_URL": python.url, "PYTHON_SHA256": python.sha256 or ""}


def follow(root: Path, lock: ImageLock) -> None:
    """Write the build arguments of ``devcontainer.json``; all else of it, comments too, stays as it is."""
    text = (root / DEVCONTAINER).read_text(encoding="utf-8")
    for name, value in build_arguments(lock).items():
        before, *more = re.split(rf'(?m)^(\s*"{name}": )"[^"\n]*"', text)
        if len(more) != 2:
            raise errors.ManifestError(f'{DEVCONTAINER}: has {len(more) // 2} lines "{name}": "..."; write one')
        text = f"{before}{more[0]}{json.dumps(value)}{more[1]}"
    files.write(root / DEVCONTAINER, text)
