"""Names of images, checked before one is built that no engine would name so, and the one rule for their tags.

``FIXED`` ones never move, a release alone gives those of its ``LINE``, which never go back, and all others move.
``docker/images.lock`` has the names of those that we build from, by digest, and downloads by checksum.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tooling.core import errors, files

LOCK, SCHEMA = "docker/images.lock", Path(__file__).with_name("images.schema.json")
LABEL, OCI = "io.github.multimesh-jax", "org.opencontainers.image"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?"
_REPOSITORY = f"(?:{_HOST}/)?{_PART}(?:/{_PART})*"
_TAG, DIGEST = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", "sha256:[0-9a-f]{64}"
IMAGE = f"{_REPOSITORY}(:{_TAG})?(@{DIGEST})?"
_OWNED = ("ghcr.io", "docker.io", "quay.io")  # registries whose images are all OWNER/NAME
_VERSION = r"v?(\d+)\.(\d+)\.(\d+)"
FIXED = re.compile(rf"(.+-)?{_VERSION}(-[0-9A-Za-z.-]+)?|sha-.+")
LINE = re.compile(r"(.+-)?v?\d+\.\d+|latest")  # of releases: one that moves with each correction


class Reference(NamedTuple):
    """An image: its repository as one types it, e.g. ``ghcr.io/owner/multimesh-jax``, in lower case, and its tag."""

    repository: str
    tag: str

    def __str__(self) -> str:
        return f"{self.repository}:{self.tag}"

    def tagged(self, tag: str) -> Reference:
        """Return the same repository with another tag."""
        return Reference(self.repository, tag)

    def at(self, digest: str) -> str:
        """Return the name that pulls exactly these bytes."""
        return f"{self.repository}@{digest}"


def make(repo: str | None, name: str | None, tag: str) -> Reference:
    """Return ``REPO:TAG``, or ``REPO/NAME:TAG`` where a name is given; without both, an image of this machine."""
    repository = "/".join(part for part in (repo, name) if part is not None) or "multimesh-jax"
    if not re.fullmatch(_REPOSITORY, repository.lower()) or repository[255:]:
        shown = repository.rpartition("@")[2][:80]  # before it, a password may be
        raise errors.OptionError(
            f"repository {shown!r}: expected [HOST[:PORT]/]OWNER/NAME, of letters and digits with single . _ or - "
            "between them, in at most 255 characters; no https://, no tag, and no password: run `docker login`"
        )
    host, path = split(f"{repository}/")
    if "" in (repo, name) or (host and path.count("/") < (2 if host.lower() in _OWNED else 1)):
        raise errors.OptionError(
            f"--repo {repository}: names no image; write its owner and name behind the registry, or add --name, e.g. "
            "ghcr.io/OWNER/multimesh-jax"
        )
    if not re.fullmatch(_TAG, tag):
        raise errors.OptionError(
            f"tag {tag[:140]!r}: 1 to 128 letters, digits, . _ and -, not beginning with . or -; choose another --tag"
        )
    return Reference(repository.lower(), tag)


def split(repository: str) -> tuple[str | None, str]:
    """Separate a host from the path, as every engine does."""
    first, slash, path = repository.partition("/")
    return (first, path) if slash and ("." in first or ":" in first or first == "localhost") else (None, repository)


def read_version(tag: str) -> tuple[int, ...]:
    """Return the three numbers of a version or of the tag of a release, and nothing for any other."""
    match = re.fullmatch(f"(?:.+-)?{_VERSION}", tag)
    return tuple(map(int, match.groups())) if match else ()


def list_tags(reference: Reference, *, latest: bool, version: str | None) -> tuple[str, ...]:
    """Return the public tags of an image, the one that matters least first and ``latest`` last.

    A version ``v1.2.3`` also gives ``v1.2``, which moves with every correction; where the tag is ``NAME-v1.2.3``, both
    begin with that name. ``OptionError``: the tag of a release that this is not.
    """
    tag, tags = reference.tag, [reference.tag]
    if version is not None:
        if not re.fullmatch(_VERSION, version):
            raise errors.OptionError(f"--release '{version}': write a version of three numbers, e.g. v0.3.0")
        name = tag if tag.endswith(f"-{version}") else version
        tags += [name, name.rpartition(".")[0]]
    if tag.startswith("sha-"):
        raise errors.OptionError(f"--tag {tag}: names the commit of an image, which a push gives by itself")
    unreleased = latest and version is None
    if unreleased or ((read_version(tag) or LINE.fullmatch(tag)) and tag not in tags[1:]):
        raise errors.OptionError(
            f"--tag {'latest' if unreleased else tag}: is the tag of a release; add --release with its version"
        )
    return tuple(dict.fromkeys([*tags, *(["latest"] if latest else [])]))


def name_candidate(labels: Mapping[str, str], image_id: str, *, checked: bool) -> str:
    """Return the tag that an image is pushed under: its commit and its id."""
    commit = re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", labels.get(f"{OCI}.revision", "unknown"))
    return "-".join(["sha", commit, image_id.removeprefix("sha256:")[:12], *([] if checked else ["unchecked"])])


class ImagePin(NamedTuple):
    """An image that others are built from or that runs as a service; ``digest`` is None where nobody told it."""

    reference: str
    digest: str | None = None

    @property
    def remedy(self) -> str:
        """How another digest gets into the lock."""
        return f"write the one that `docker buildx imagetools inspect {self.reference}` prints into {LOCK}"

    @property
    def exact(self) -> str:
        """The name that pulls these bytes, or the plain reference where they are not known."""
        return f"{self.reference}@{self.digest}" if self.digest else self.reference


class ImageLock(NamedTuple):
    """Pins by name; files, with ``url`` and ``sha256`` or None, by kind and platform, e.g. ``python linux/amd64``."""

    images: dict[str, ImagePin]
    files: dict[str, dict[str, Any]]


def load_lock(root: Path) -> ImageLock:
    """Read and check ``images.lock``."""
    lock = files.read_document(root / LOCK, SCHEMA)
    pins = {name: ImagePin(entry["reference"], entry["digest"]) for name, entry in lock["images"].items()}
    return ImageLock(pins, lock["files"])
