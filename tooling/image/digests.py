"""``docker/images.lock``: base images by digest and downloads by checksum. Renovate proposes newer digests."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tooling.core import files

FILE, SCHEMA = "docker/images.lock", Path(__file__).with_name("images.schema.json")


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
    lock = files.read_document(root / FILE, SCHEMA)
    images = {name: ImagePin(entry["reference"], entry["digest"]) for name, entry in lock["images"].items()}
    return ImageLock(images, {name: FilePin(entry["url"], entry["sha256"]) for name, entry in lock["files"].items()})
