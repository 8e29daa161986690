"""Gives public tags to a digest that passed its check; nothing is built or sent again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from workflows import console, errors
from workflows.image.reference import Reference
from workflows.image.registry import Registry
from workflows.image.retry import Policy

LATEST = "latest"
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_FIXED = re.compile(rf"{_VERSION.pattern}(-[0-9A-Za-z.-]+)?")


@dataclass(frozen=True)
class Moved:
    """A tag that has the digest now; ``before`` is the one that it had, None for a new tag."""

    tag: str
    before: str | None
    digest: str


def tags(reference: Reference, *, latest: bool, version: str | None) -> tuple[str, ...]:
    """Return the tags of an image, the one that matters least first and ``latest`` last.

    A version ``v1.2.3`` also gives ``v1.2``, which moves with every correction.
    """
    wanted = [reference.tag]
    if version is not None:
        if (match := _VERSION.fullmatch(version)) is None:
            raise errors.UsageError(f"--release '{version}': write a version of three numbers, e.g. v0.3.0")
        wanted += [version, f"{version[: -len(match[3]) - 1]}"]
    if latest:
        wanted.append(LATEST)
    return tuple(dict.fromkeys(wanted))


def promote(reference: Reference, digest: str, names: Sequence[str], policy: Policy) -> tuple[Moved, ...]:
    """Move tags of a repository to a digest that it holds, in order, and read each of them back.

    A tag with the shape of a version, as ``v1.2.3`` or ``1.2.3-rc1``, may be new but never moves.

    Raises
    ------
    RegistryError
        The digest is not there, or a tag cannot be moved; says which were.
    """
    moved: list[Moved] = []
    with Registry(reference, policy) as registry:
        manifest = registry.get(digest)
        for fixed in filter(_FIXED.fullmatch, names):
            if registry.digest(fixed) not in (None, digest):
                raise errors.RegistryError(f"{registry.place}: {fixed} is another image already; take the next version")
        for name in names:
            try:
                before = registry.digest(name)
                if before != digest:
                    registry.put(name, manifest)
                now = registry.digest(name)
            except errors.RegistryError as error:
                raise errors.RegistryError(f"{error}. {_told(moved, names[len(moved) :])}") from error
            if now != digest:
                raise errors.RegistryError(
                    f"{registry.place}: tag {name} has {now or 'nothing'}, not {digest}: somebody else moves it. "
                    f"{_told(moved, names[len(moved) :])}"
                )
            moved.append(Moved(name, before, digest))
    return tuple(moved)


def unstage(reference: Reference, digest: str, policy: Policy) -> None:
    """Remove the staging tag of an image that has its public tags; a registry that removes none is no error."""
    staging = reference.staging.tag
    with Registry(reference, policy) as registry:
        if registry.digest(staging) == digest and not registry.remove(staging):
            console.note(f"{registry.place}: removes no tags; {staging} stays, for you to delete")


def _told(moved: Sequence[Moved], left: Sequence[str]) -> str:
    done = ", ".join(each.tag for each in moved) or "none"
    return f"Tags moved: {done}; as they were: {', '.join(left)}"
