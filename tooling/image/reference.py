"""Names of images: ``registry/owner/name:tag``, checked before an image is built that no engine would name so."""

from __future__ import annotations

import re
from typing import NamedTuple

from tooling.core import errors

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?"
_TAG, _DIGEST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"), re.compile(r"sha256:[0-9a-f]{64}")
_OWNED = ("ghcr.io", "docker.io", "quay.io")  # registries whose images are all OWNER/NAME


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
            raise errors.OptionError(f"{digest!r} is not a digest; expected sha256: and 64 hexadecimal digits")
        return f"{self.repository}@{digest}"


def make(repo: str | None, name: str | None, tag: str) -> Reference:
    """Return ``REPO:TAG``, or ``REPO/NAME:TAG`` where a name is given; without both, an image of this machine."""
    repository = "/".join(part for part in (repo, name) if part is not None) or "multimesh-jax"
    host, path = split(f"{repository}/")
    if "" in (repo, name) or (host and path.count("/") < (2 if host.lower() in _OWNED else 1)):
        raise errors.OptionError(
            f"--repo {repository}: names no image; write its owner and name behind the registry, or add --name, e.g. "
            "ghcr.io/OWNER/multimesh-jax"
        )
    return Reference(check_repository(repository), check_tag(tag))


def check_repository(text: str) -> str:
    """Return a repository in lower case, or raise an error that says why it is none."""
    if "@" in text:  # it is not shown: a password may be in it
        raise errors.OptionError("a repository has no user, password or digest in it; run `docker login`, leave out @")
    host, path = split(text)
    if (host and not re.fullmatch(_HOST, host)) or not re.fullmatch(f"{_PART}(/{_PART})*", path.lower()) or text[255:]:
        raise errors.OptionError(
            f"repository {text[:80]!r}: expected [HOST[:PORT]/]OWNER/NAME, of letters and digits with single . _ or - "
            "between them, in at most 255 characters; no https://, no tag"
        )
    return text.lower()


def check_image(text: str) -> str:
    """Return the name of an image with or without a tag or a digest, or raise an error that says why it is none."""
    name, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise errors.OptionError("an image is REPO:TAG or REPO@sha256:..., without a user or a password")
    head, colon, tag = name.rpartition(":")
    tagged = colon and "/" not in tag
    check_repository(head if tagged else name)
    check_tag(tag if tagged else "latest")
    return text


def check_tag(text: str) -> str:
    """Return a tag, or raise an error that says why it is none."""
    if not _TAG.fullmatch(text):
        raise errors.OptionError(
            f"tag {text[:140]!r}: 1 to 128 letters, digits, . _ and -, not beginning with . or -; choose another --tag"
        )
    return text


def split(repository: str) -> tuple[str | None, str]:
    """Separate a host from the path, as every engine does."""
    first, slash, path = repository.partition("/")
    return (first, path) if slash and ("." in first or ":" in first or first == "localhost") else (None, repository)
