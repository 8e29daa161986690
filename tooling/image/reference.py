"""Names of images: ``registry/owner/name:tag``, checked before any engine or registry sees them."""

from __future__ import annotations

import re
from typing import NamedTuple

from tooling.core import errors

_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?")
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST = 255
_OWNED = ("ghcr.io/", "docker.io/", "quay.io/")  # registries whose images are all OWNER/NAME


class Reference(NamedTuple):
    """An image: its repository as one types it, e.g. ``ghcr.io/owner/multimesh-jax``, in lower case, and its tag."""

    repository: str
    tag: str

    def __str__(self) -> str:
        return f"{self.repository}:{self.tag}"

    def tagged(self, tag: str) -> Reference:
        """Return the same repository with another tag."""
        return Reference(self.repository, check_tag(tag))

    def at(self, digest: str) -> str:
        """Return the name that pulls exactly these bytes."""
        if not _DIGEST.fullmatch(digest):
            raise errors.UsageError(f"{digest!r} is not a digest; expected sha256: and 64 hexadecimal digits")
        return f"{self.repository}@{digest}"


def make(repo: str | None, name: str | None, tag: str) -> Reference:
    """Return ``REPO:TAG``, or ``REPO/NAME:TAG`` where a name is given; without both, an image of this machine.

    ``UsageError`` says which part is malformed, and what it may hold.
    """
    repository = "/".join(part for part in (repo, name) if part is not None) or "multimesh-jax"
    if "" in (repo, name):
        raise errors.UsageError(f"{'--repo' if repo == '' else '--name'} is empty; give a name or leave it out")
    if "/" not in repository and _split(f"{repository}/")[0]:
        raise errors.UsageError(f"--repo {repository}: is a registry alone; name an owner too, e.g. {repository}/OWNER")
    if repository.lower().startswith(_OWNED) and repository.count("/") == 1:
        raise errors.UsageError(
            f"--repo {repository}: has an owner and no name, which this registry refuses; add --name multimesh-jax"
        )
    return Reference(check_repository(repository), check_tag(tag))


def check_repository(text: str) -> str:
    """Return a repository in lower case, or raise an error that says why it is none."""
    if "@" in text:  # it is not shown: a password may be in it
        raise errors.UsageError(
            "a repository has no user, password or digest in it; run `docker login`, and leave out @"
        )
    host, path = _split(text)
    parts = path.lower().split("/")
    if (host and not _HOST.fullmatch(host)) or not all(map(_PART.fullmatch, parts)) or len(text) > _LONGEST:
        raise errors.UsageError(
            f"repository {text[:80]!r}: expected [HOST[:PORT]/]OWNER/NAME, of letters and digits with single . _ or - "
            f"between them, in at most {_LONGEST} characters; no https://, no tag"
        )
    return text.lower()


def check_image(text: str) -> str:
    """Return the name of an image with or without a tag or a digest, or raise an error that says why it is none."""
    name, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise errors.UsageError("an image is REPO:TAG or REPO@sha256:..., without a user or a password")
    head, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        head, tag = name, "latest"
    check_repository(head)
    check_tag(tag)
    return text


def check_tag(text: str) -> str:
    """Return a tag, or raise an error that says why it is none."""
    if not _TAG.fullmatch(text):
        raise errors.UsageError(
            f"tag {text[:140]!r}: 1 to 128 letters, digits, . _ and -, not beginning with . or -; choose another --tag"
        )
    return text


def _split(repository: str) -> tuple[str | None, str]:
    """Tell a host from the path, as every engine does."""
    first, slash, rest = repository.partition("/")
    return (first, rest) if slash and ("." in first or ":" in first or first == "localhost") else (None, repository)
