"""``docker/images.lock``: the base images by digest, and the files that a build downloads by checksum."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workflows import errors, files

FILE = "docker/images.lock"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ImagePin:
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


@dataclass(frozen=True)
class FilePin:
    """A file that a build downloads; ``sha256`` is None where nobody told it, and ``read_in`` as an image's."""

    url: str
    sha256: str | None
    read_in: str = ""


@dataclass(frozen=True)
class ImageLock:
    """The whole file: pins by name; files are named by kind and platform, e.g. ``python linux/amd64``."""

    images: dict[str, ImagePin]
    files: dict[str, FilePin]


def load(root: Path) -> ImageLock:
    """Read and check ``images.lock``."""
    path = root / FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        images = {name: _image(name, entry) for name, entry in raw["images"].items()}
        downloads = {name: _file(name, entry) for name, entry in raw["files"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise errors.ManifestError(f"{FILE}: is malformed ({error}); restore it with git") from error
    return ImageLock(images, downloads)


def save(root: Path, lock: ImageLock) -> None:
    """Write new pins into ``images.lock``, whole or not at all; what it says about itself stays."""
    path = root / FILE
    raw = json.loads(path.read_text(encoding="utf-8"))
    for kind, pins in (("images", lock.images), ("files", lock.files)):
        raw[kind] = {
            name: {key: value for key, value in asdict(pin).items() if value != ""} for name, pin in pins.items()
        }
    files.write(path, _compact(json.dumps(raw, indent=2)) + "\n")


def _compact(text: str) -> str:
    """Put an image of which no more is said on one line."""
    return re.sub(r'\{\s+("reference": "[^"]*"),\s+("digest": [^\s,]+)\s+\}', r"{\1, \2}", text)


def _image(name: str, entry: dict[str, Any]) -> ImagePin:
    pin = ImagePin(str(entry["reference"]), entry["digest"], str(entry.get("read_in", "")))
    if pin.digest is not None and not _DIGEST.fullmatch(pin.digest):
        raise ValueError(f"{name}: {pin.digest!r} is no digest")
    return pin


def _file(name: str, entry: dict[str, Any]) -> FilePin:
    pin = FilePin(str(entry["url"]), entry["sha256"], str(entry.get("read_in", "")))
    if not pin.url.startswith("https://"):
        raise ValueError(f"{name}: {pin.url!r} is not https")
    if pin.sha256 is not None and not _SHA256.fullmatch(pin.sha256):
        raise ValueError(f"{name}: {pin.sha256!r} is no sha256")
    return pin
