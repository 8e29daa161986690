"""The one rule for tags, and their moves by digest.

==========================================  ====================================================
``[NAME-]vX.Y.Z[-...]``, ``sha-COMMIT-ID``  may be new, and never move
``[NAME-]vX.Y``, ``latest``                 a release alone gives them; they never go back
all others                                  move
==========================================  ====================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tooling.core import console, errors
from tooling.image.buildx import LABEL, OCI
from tooling.image.reference import Reference
from tooling.image.registry import Manifest, Registry

_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_RELEASE = re.compile(rf"(.+-)?{_VERSION.pattern}")
_FIXED = re.compile(rf"{_RELEASE.pattern}(-[0-9A-Za-z.-]+)?|sha-.+")
_LINE = re.compile(r"(.+-)?v?\d+\.\d+|latest")  # of releases: one that moves with each correction


class Move(NamedTuple):
    """A tag that has the digest now; ``before`` is the one that it had, None for a new tag."""

    tag: str
    before: str | None
    digest: str


def public(reference: Reference, *, latest: bool, version: str | None) -> tuple[str, ...]:
    """Return the tags of an image, the one that matters least first and ``latest`` last.

    A version ``v1.2.3`` also gives ``v1.2``, which moves with every correction; where the tag is ``NAME-v1.2.3``, both
    begin with that name. ``OptionError``: a tag of the rule's first two rows that this is not a release for.
    """
    tag, names = reference.tag, [reference.tag]
    if version is not None:
        if _VERSION.fullmatch(version) is None:
            raise errors.OptionError(f"--release '{version}': write a version of three numbers, e.g. v0.3.0")
        name = tag if tag.endswith(f"-{version}") else version
        names += [name, name.rpartition(".")[0]]
    if tag.startswith("sha-"):
        raise errors.OptionError(f"--tag {tag}: names the commit of an image, which a push gives by itself")
    reserved = (_RELEASE.fullmatch(tag) or _LINE.fullmatch(tag)) and tag not in names[1:]
    if reserved or (latest and version is None):
        which = "latest" if latest and version is None else tag
        raise errors.OptionError(f"--tag {which}: is the tag of a release; add --release with its version")
    return tuple(dict.fromkeys([*names, *(["latest"] if latest else [])]))


def candidate(labels: Mapping[str, str], image_id: str, *, checked: bool) -> str:
    """Return the tag that an image is pushed under: its commit, what differs from the usual image, and its id."""
    revision = labels.get(f"{OCI}.revision", "unknown")
    commit = re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", revision)
    accelerator, jaxlib = labels.get(f"{LABEL}.accelerator", "cuda12"), labels.get(f"{LABEL}.jaxlib", "wheel")
    parts = (labels.get(f"{LABEL}.target", "runtime"), accelerator.split()[0], jaxlib.split()[0])
    odd = [part for part in parts if part not in ("runtime", "cuda12", "wheel")]
    return "-".join(["sha", commit, *odd, image_id.removeprefix("sha256:")[:12], *([] if checked else ["unchecked"])])


def ids(registry: Registry, manifest: Manifest) -> list[str]:
    """Return by which ids engines know an image: of its manifest, of its configuration, or of their index."""
    images = registry.images(manifest)
    return [manifest.digest, *(id for image in images for id in (image.document["config"]["digest"], image.digest))]


def check_pushed_here(registry: Registry, digest: str) -> dict[str, str]:
    """Return the labels of an image that ``docker/build.py`` checked and pushed; ``EngineError`` for any other.

    Only a push of an image that passed its check gives this tag, which never moves.
    """
    name, manifest = f"{registry.repository}@{digest}", registry.get(digest)
    labels = registry.labels(manifest)
    if f"{LABEL}.lock" not in labels:
        raise errors.EngineError(f"{name}: has no labels of docker/build.py; push it with that")
    names = [candidate(labels, image_id, checked=True) for image_id in ids(registry, manifest)]
    if digest not in map(registry.digest, dict.fromkeys(names)):
        raise errors.EngineError(
            f"{name}: is not under {names[-1]}, so it passed no check; push it with docker/build.py, without "
            "--validate none"
        )
    return labels


def check_free(registry: Registry, names: Sequence[str], digest: str = "") -> None:
    """Raise ``EngineError`` where a tag that never moves is another image than this, or any image."""
    for tag in filter(_FIXED.fullmatch, names):
        if registry.digest(tag) not in (None, digest):
            raise errors.EngineError(
                f"{registry.repository}:{tag}: is another image already; take the next version, for none ever moves "
                "(on GitHub: run the failed jobs again, not all of them, which build another image)"
            )


def promote(registry: Registry, digest: str, names: Sequence[str]) -> list[Move]:
    """Move tags of a repository to a digest that it holds, in order, read each of them back, and say what it was.

    ``EngineError`` where the digest is not there, or a tag cannot be moved; those before have moved.
    """
    manifest, moved = registry.get(digest), list[Move]()
    check_free(registry, names, digest)
    for tag in _forward(registry, names):
        before = registry.digest(tag)
        check_free(registry, [tag], digest)  # again: somebody may have given it since
        if before != digest:
            registry.put(tag, manifest)
        if (now := registry.digest(tag)) != digest:
            raise errors.EngineError(f"{registry.repository}:{tag}: has {now}, not {digest}: somebody else moves it")
        console.note(f"{registry.repository}:{tag}: {digest} (before: {before or 'no such tag'})")
        moved.append(Move(tag, before, digest))
    return moved


def _forward(registry: Registry, names: Sequence[str]) -> list[str]:
    """Return the tags of a release, without those of a line whose image is of a newer release."""
    release, forward = next(filter(None, map(_RELEASE.fullmatch, names)), None), list(names)
    for tag in filter(_LINE.fullmatch, names):
        if release is None:
            raise errors.OptionError(f"{tag}: a release alone moves it; give its version too")
        manifest = registry.find(tag)
        current = _VERSION.fullmatch(registry.labels(manifest).get(f"{OCI}.version", "")) if manifest else None
        if current and _numbers(current) > _numbers(release):
            console.note(f"{registry.repository}: {tag} stays with a newer release, {current[0]}")
            forward.remove(tag)
    return forward


def _numbers(version: re.Match[str]) -> tuple[int, ...]:
    return tuple(map(int, version.groups()[-3:]))
