"""``docker/images.lock``: base images by digest and downloads by checksum. Renovate proposes newer digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tooling.core import errors, files

FILE = "docker/images.lock"


class ImagePin(NamedTuple):
    """An image that others are built from or that runs as a service; ``digest`` is None where nobody told it."""

    reference: str
    digest: str | None

    @property
    def remedy(self) -> str:
        """How another digest gets into the lock."""
        return f"write the one that `docker buildx imagetools inspect {self.reference}` prints into {FILE}"

    @property
    def exact(self) -> str:
        """The name that pulls these bytes, or the plain reference where they are not known."""
        return f"{self.reference}@{self.digest}" if self.digest else self.reference


class FilePin(NamedTuple):
    """A file that a build downloads; ``sha256`` is None where nobody told it."""

    url: str
    sha256: str | None


class ImageLock(NamedTuple):
    """The whole file: pins by name; files are named by kind and platform, e.g. ``python linux/amd64``."""

    images: dict[str, ImagePin]
    files: dict[str, FilePin]


def load(root: Path) -> ImageLock:
    """Read and check ``images.lock``."""
    try:
        raw = json.loads((root / FILE).read_text(encoding="utf-8"))
        images = {name: ImagePin(entry["reference"], entry["digest"]) for name, entry in raw["images"].items()}
        downloads = {name: FilePin(entry["url"], entry["sha256"]) for name, entry in raw["files"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise errors.SourceError(f"{FILE}: is malformed ({error}); restore it with git") from error
    for pins, field, pattern in (
        (images, "digest", "sha256:[0-9a-f]{64}"),
        (images, "reference", r"\w[\w.:/-]*:[\w.-]+"),
        (downloads, "sha256", "[0-9a-f]{64}"),
        (downloads, "url", r"https:/{2}[\w.:/%+~-]+"),
    ):
        values = {f"{name}.{field}": getattr(pin, field) for name, pin in pins.items()}
        files.check_values(FILE, values, pattern, field)
    return ImageLock(images, downloads)
