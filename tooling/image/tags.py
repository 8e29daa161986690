"""From a checked image in the engine to public tags: pushed, read back, and promoted by digest; all can be repeated."""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tooling.core import console, errors, proc
from tooling.image.buildx import LABEL, OCI
from tooling.image.engine import Engine
from tooling.image.reference import Reference

T = TypeVar("T")
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_RELEASE = re.compile(rf"(.+-)?{_VERSION.pattern}")
_FIXED = re.compile(rf"{_RELEASE.pattern}(-[0-9A-Za-z.-]+)?")
_ATTEMPTS, _LONGEST_WAIT_S = 6, 60.0
_EMPTY_TAR = bytes(1024)


class Transient(Exception):
    """Something that may be gone the next time."""


class Manifest(NamedTuple):
    """A manifest or an index, byte for byte: its digest is the hash of these bytes."""

    content: bytes

    @property
    def digest(self) -> str:
        """``sha256:...`` of the bytes, which pulls exactly these."""
        return "sha256:" + hashlib.sha256(self.content).hexdigest()

    @property
    def document(self) -> dict[str, Any]:
        """Its content."""
        return dict(json.loads(self.content))


class Pushed(NamedTuple):
    """The image in the registry. ``bytes``: of configuration and layers, on the wire."""

    digest: str
    media_type: str
    bytes: int
    seconds: float


class Moved(NamedTuple):
    """A tag that has the digest now; ``before`` is the one that it had, None for a new tag."""

    tag: str
    before: str | None
    digest: str


def candidate(reference: Reference, labels: Mapping[str, str], image_id: str) -> Reference:
    """Return the tag that an image is pushed under: ``sha-COMMIT``, and what differs from the usual image.

    It stays: it says which commit an image was built from.
    """
    revision = labels.get(f"{OCI}.revision", "unknown")
    commit = re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", revision if revision != "unknown" else image_id[7:])
    accelerator, jaxlib = labels.get(f"{LABEL}.accelerator", "cuda12"), labels.get(f"{LABEL}.jaxlib", "wheel")
    parts = (labels.get(f"{LABEL}.target", "runtime"), accelerator.split()[0], jaxlib.split()[0])
    odd = [part for part in parts if part not in ("runtime", "cuda12", "wheel")]
    return reference.tagged("-".join(["sha", commit, *odd]))


def check_push(engine: Engine, reference: Reference) -> None:
    """Raise ``RegistryError`` unless this login may push to a repository: push an empty image there, as ``push-check``.

    Nothing else asks a registry in the words of whoever pushes later.
    """
    name = reference.tagged("push-check")
    proc.run([*engine.cli, "import", "-", str(name)], stdin=_EMPTY_TAR)
    try:
        _send(engine, name, time.sleep)
    finally:
        engine.run("image", "rm", str(name), check=False)


def push(engine: Engine, image_id: str, name: Reference, sleep: Callable[[float], None] = time.sleep) -> Pushed:
    """Push a tag of the engine, again after faults that pass, and read it back.

    ``RegistryError``: the registry refuses (at once), or cannot be reached (after the last attempt).
    ``IntegrityError``: it holds another image than the one that was checked.
    """
    started = time.monotonic()
    _send(engine, name, sleep)
    manifest = get(engine, str(name), sleep)
    entries = manifest.document.get("manifests", [])
    images = [get(engine, name.at(each["digest"]), sleep) for each in entries] or [manifest]
    known = {manifest.digest}.union(*({each.digest, each.document["config"]["digest"]} for each in images))
    if "sha256:" + image_id.removeprefix("sha256:") not in known:
        raise errors.IntegrityError(
            f"{name}: is another image than the one that was checked ({image_id[:19]}); another build of this commit "
            "pushed it: build again"
        )
    size = sum(int(each["size"]) for i in images for each in (i.document["config"], *i.document["layers"]))
    media_type = str(manifest.document.get("mediaType", "application/vnd.oci.image.manifest.v1+json"))
    return Pushed(manifest.digest, media_type, size, time.monotonic() - started)


def _send(engine: Engine, name: Reference, sleep: Callable[[float], None]) -> None:
    def send() -> None:
        result = proc.run([*engine.cli, "push", str(name)], check=False, on_line=console.note)
        if result.returncode:
            raise fault(result.stderr.decode("utf-8", "replace") or result.text, str(name))

    retrying(send, str(name.repository), sleep)


def retrying(action: Callable[[], T], label: str, sleep: Callable[[float], None] = time.sleep) -> T:
    """Return the result of an action; try again after each ``Transient``; ``RegistryError`` after the last."""
    attempt = 0
    while True:
        attempt += 1
        try:
            return action()
        except Transient as passing:
            if attempt == _ATTEMPTS:
                raise errors.RegistryError(f"{label}: {passing}, {_ATTEMPTS} times; try again later") from passing
            # Many clients that failed together do not come back together.
            wait = min(_LONGEST_WAIT_S, 2.0 ** (attempt - 1)) * random.uniform(2 / 3, 1)  # noqa: S311
            console.note(f"{label}: {passing}; attempt {attempt + 1} of {_ATTEMPTS} in {wait:.1f} s")
            sleep(wait)


def fault(said: str, label: str) -> Exception:
    """Return the error for a complaint of the engine or of buildx: try again, or over."""
    line = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no message")
    if re.search(proc.NETWORK_FAILED, line):
        return Transient(proc.shorten(line))
    return errors.RegistryError(
        f"{label}: refused ({proc.shorten(line)}); log in to the registry, and check --repo and --name"
    )


def imagetools(engine: Engine, *args: str, label: str, sleep: Callable[[float], None] = time.sleep) -> bytes | None:
    """Return what ``docker buildx imagetools`` prints, None for what the registry does not have."""

    def ask() -> bytes | None:
        done = proc.run([*engine.buildx, "imagetools", *args], check=False)
        said = done.stderr.decode("utf-8", "replace")
        if done.returncode and re.search(r"\bnot found\b|manifest unknown|name unknown|404 Not Found", said):
            return None
        if done.returncode:
            raise fault(said, label)
        return done.stdout

    return retrying(ask, label, sleep)


def get(engine: Engine, name: str, sleep: Callable[[float], None] = time.sleep) -> Manifest:
    """Return the manifest that a registry has under ``REPO:TAG`` or ``REPO@DIGEST``, or raise where it has none."""
    content = imagetools(engine, "inspect", "--raw", name, label=name, sleep=sleep)
    if content is None:
        raise errors.RegistryError(f"{name}: is not in its registry; push it first")
    manifest = Manifest(content)
    if "@" in name and not name.endswith(manifest.digest):
        raise errors.IntegrityError(f"{name}: its registry sent {manifest.digest}; do not use this registry")
    return manifest


def digest_of(engine: Engine, name: Reference) -> str | None:
    """Return the digest that a tag has now, or None if there is no such tag."""
    content = imagetools(engine, "inspect", "--raw", str(name), label=str(name))
    return None if content is None else Manifest(content).digest


def labels_of(engine: Engine, name: str) -> dict[str, str]:
    """Return the labels of an image in its registry; of the first platform where there are several."""
    told = json.loads(imagetools(engine, "inspect", "--format", "{{json .Image}}", name, label=name) or "{}")
    image = told if "config" in told or not told else next(iter(told.values()))
    return dict((image.get("config") or {}).get("Labels") or {})


def tags(reference: Reference, *, latest: bool, version: str | None) -> tuple[str, ...]:
    """Return the tags of an image, the one that matters least first and ``latest`` last.

    A version ``v1.2.3`` also gives ``v1.2``, which moves with every correction; where the tag is ``NAME-v1.2.3``, both
    begin with that name. ``latest`` comes with a release alone, and no tag has the shape of a version without one.
    """
    wanted = [reference.tag]
    if version is not None:
        if _VERSION.fullmatch(version) is None:
            raise errors.UsageError(f"--release '{version}': write a version of three numbers, e.g. v0.3.0")
        name = wanted[0] if wanted[0].endswith(f"-{version}") else version
        wanted += [name, name.rpartition(".")[0]]
    elif latest or reference.tag == "latest":
        raise errors.UsageError("latest: comes with a release; add --release with its version, or take another tag")
    if _RELEASE.fullmatch(wanted[0]) and wanted[0] not in wanted[1:]:
        raise errors.UsageError(
            f"--tag {wanted[0]}: is the tag of a release; add --release with its version, or take another tag"
        )
    return tuple(dict.fromkeys([*wanted, *(["latest"] if latest else [])]))


def promote(
    engine: Engine,
    reference: Reference,
    digest: str,
    names: Sequence[str],
    note: Callable[[Sequence[Moved]], None] = lambda moved: None,
) -> tuple[Moved, ...]:
    """Move tags of a repository to a digest that it holds, in order, and read each of them back.

    ``note`` gets those that moved, after each, so that what a tag had before outlives a promotion that is killed.
    A tag with the shape of a version, as ``v1.2.3`` or ``1.2.3-rc1``, may be new but never moves. Where a newer release
    is there, ``latest``, and ``v1.2`` if it is one of those, stay with it. ``RegistryError`` where the digest is not
    there, or a tag cannot be moved; it says which were, and what they had before.
    """
    get(engine, reference.at(digest))
    check_free(engine, reference, names, digest)
    names, moved = _still(engine, names, reference), list[Moved]()
    for name in names:
        tag = reference.tagged(name)
        try:
            before = digest_of(engine, tag)
            check_free(engine, reference, [name], digest)  # again: somebody may have taken it since
            if before != digest:
                create = ("create", "--prefer-index=false", "--tag", str(tag), reference.at(digest))
                imagetools(engine, *create, label=str(tag))
            if (now := digest_of(engine, tag)) != digest:
                raise errors.RegistryError(f"{tag}: has {now or 'nothing'}, not {digest}: somebody else moves it")
        except errors.RegistryError as error:
            done = ", ".join(f"{each.tag} (before: {each.before or 'no such tag'})" for each in moved) or "none"
            left = ", ".join(names[len(moved) :])
            raise errors.RegistryError(f"{error}. Tags moved: {done}; as they were: {left}") from error
        moved.append(Moved(name, before, digest))
        note(moved)
    return tuple(moved)


def check_free(engine: Engine, reference: Reference, names: Sequence[str], digest: str = "") -> None:
    """Raise ``RegistryError`` where a tag with the shape of a version is another image than this, or any image."""
    for tag in map(reference.tagged, filter(_FIXED.fullmatch, names)):
        if digest_of(engine, tag) not in (None, digest):
            raise errors.RegistryError(
                f"{tag}: is another image already; take the next version, for none ever moves (on GitHub: run the "
                "failed jobs again, not all of them, which build another image)"
            )


def _still(engine: Engine, names: Sequence[str], reference: Reference) -> list[str]:
    """Return the tags of a release, without ``latest`` and ``v1.2`` where the image that has them is of a newer one."""
    release, left = next(filter(None, map(_RELEASE.fullmatch, names)), None), list(names)
    for name in names if release else ():
        if release and name in ("latest", release[0].rpartition(".")[0]):
            held = _VERSION.fullmatch(labels_of(engine, str(reference.tagged(name))).get(f"{OCI}.version", ""))
            if held and _numbers(held) > _numbers(release):
                console.note(f"{reference.repository}: {name} stays with a newer release, {held[0]}")
                left.remove(name)
    return left


def _numbers(version: re.Match[str]) -> tuple[int, ...]:
    return tuple(map(int, version.groups()[-3:]))
