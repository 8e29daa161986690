"""``docker/images.lock``: base images by digest and downloads by checksum. Renovate proposes newer digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tooling.core import files

FILE, SCHEMA = "docker/images.lock", Path(__file__).with_name("images.schema.json")


class ImagePin(NamedTuple):
    """An image that others are built from or that runs as a service; ``digest`` is None where nobody told it."""

    reference: str
    digest: str | None = None

    @property
    def remedy(self) -> str:
        """How another digest gets into the lock."""
        return f"write the one that `docker buildx imagetools inspect {self.reference}` prints into {FILE}"

    @property
    def exact(self) -> str:
        """The name that pulls these bytes, or the plain reference where they are not known."""
        return f"{self.reference}@{self.digest}" if self.digest else self.reference


class ImageLock(NamedTuple):
    """Pins by name; files, with ``url`` and ``sha256`` or None, by kind and platform, e.g. ``python linux/amd64``."""

    images: dict[str, ImagePin]
    files: dict[str, dict[str, Any]]


def load(root: Path) -> ImageLock:
    """Read and check ``images.lock``."""
    lock = files.read_document(root / FILE, SCHEMA)
    pins = {name: ImagePin(entry["reference"], entry["digest"]) for name, entry in lock["images"].items()}
    return ImageLock(pins, lock["files"])
