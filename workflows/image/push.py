"""From a checked image in the engine to public tags: pushed, read back, and promoted by digest; all can be repeated."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workflows import complaints, console, errors, proc
from workflows.image.engine import Engine
from workflows.image.reference import Reference
from workflows.image.registry import Manifest, Policy, Registry, Transient, retrying

_LAYER = re.compile(r"([0-9a-f]{12}): (.+)")
_OVER = re.compile(r"Pushed|Layer already exists|Mounted from .*")
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_RELEASE = re.compile(rf"(.+-)?{_VERSION.pattern}")
_FIXED = re.compile(rf"{_RELEASE.pattern}(-[0-9A-Za-z.-]+)?")


@dataclass(frozen=True)
class Pushed:
    """The image in the registry; ``attempts`` says how often the engine had to be started."""

    manifest: Manifest
    attempts: int
    seconds: float

    @property
    def digest(self) -> str:
        """Digest of the manifest, which pulls exactly these bytes."""
        return self.manifest.digest


@dataclass(frozen=True)
class Moved:
    """A tag that has the digest now; ``before`` is the one that it had, None for a new tag."""

    tag: str
    before: str | None
    digest: str


def push(engine: Engine, image_id: str, staging: Reference, policy: Policy, reporter: console.Reporter) -> Pushed:
    """Push a staging tag of the engine and read it back; see ``deliver``."""
    layers: dict[str, bool] = {}

    def line(text: str) -> None:
        if match := _LAYER.match(text):
            layers[match[1]] = bool(_OVER.match(match[2]))
            reporter.advance("push", sum(layers.values()), len(layers))

    def send() -> None:
        reach: list[str] = []
        if engine.kind == "podman":
            # It has to be told that a registry on this machine speaks no TLS; Docker finds out.
            with Registry(staging) as registry:
                reach = ["--tls-verify=false"] if registry.plain_http else []
        result = proc.run([*engine.cli, "push", *reach, str(staging)], check=False, on_line=line)
        if result.returncode:
            raise fault(result.stderr.decode("utf-8", "replace") or result.text, str(staging))

    return deliver(send, image_id, staging, policy, reporter)


def deliver(
    send: Callable[[], None], image_id: str, staging: Reference, policy: Policy, reporter: console.Reporter
) -> Pushed:
    """Have an image sent to a staging tag, again after faults that pass, and read it back.

    ``send`` raises what ``fault`` makes of a complaint. ``RegistryError``: the registry refuses (at once), or cannot be
    reached (after the last attempt). ``IntegrityError``: it holds another image than the one that was checked.
    """
    started, attempts = time.monotonic(), 0

    def attempt() -> None:
        nonlocal attempts
        attempts += 1
        try:
            send()
        except Transient as passing:
            # An engine keeps to itself how long the registry wants to be left alone.
            with Registry(staging) as registry:
                raise Transient(str(passing), registry.quiet_s()) from passing

    reporter.phase("push", str(staging))
    retrying(attempt, policy, str(staging.repository))
    with Registry(staging, policy) as registry:
        manifest = registry.get(staging.tag)
        images = [registry.get(each["digest"]) for each in manifest.listed()] if manifest.is_index else [manifest]
        known = {manifest.digest}.union(*({each.digest, each.document["config"]["digest"]} for each in images))
    if "sha256:" + image_id.removeprefix("sha256:") not in known:
        raise errors.IntegrityError(
            f"{registry.place}: holds another image than the one that was checked ({image_id[:19]}); "
            "another build took its staging tag: build again"
        )
    reporter.done("push", manifest.digest)
    return Pushed(manifest, attempts, time.monotonic() - started)


def fault(said: str, label: str) -> Exception:
    """Return the error for an engine's complaint: try again, or over."""
    line = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "no message")
    if complaints.network_failed(line):
        return Transient(complaints.shortened(line))
    return errors.RegistryError(
        f"{label}: refused ({complaints.shortened(line)}); log in to the registry, and check --repo and --name"
    )


def tags(reference: Reference, *, latest: bool, version: str | None) -> tuple[str, ...]:
    """Return the tags of an image, the one that matters least first and ``latest`` last.

    A version ``v1.2.3`` also gives ``v1.2``, which moves with every correction; where the tag is ``NAME-v1.2.3``, both
    begin with that name. No tag has the shape of a version that is not released.
    """
    wanted = [reference.tag]
    if version is not None:
        if _VERSION.fullmatch(version) is None:
            raise errors.UsageError(f"--release '{version}': write a version of three numbers, e.g. v0.3.0")
        name = wanted[0] if wanted[0].endswith(f"-{version}") else version
        wanted += [name, name.rpartition(".")[0]]
    if _RELEASE.fullmatch(wanted[0]) and wanted[0] not in wanted[1:]:
        raise errors.UsageError(
            f"--tag {wanted[0]}: is the tag of a release; add --release with its version, or take another tag"
        )
    return tuple(dict.fromkeys([*wanted, *(["latest"] if latest else [])]))


def promote(reference: Reference, digest: str, names: Sequence[str], policy: Policy) -> tuple[Moved, ...]:
    """Move tags of a repository to a digest that it holds, in order, and read each of them back.

    A tag with the shape of a version, as ``v1.2.3`` or ``1.2.3-rc1``, may be new but never moves. Where a newer release
    is there, ``latest``, and ``v1.2`` if it is one of those, stay with it. ``RegistryError`` where the digest
    is not there, or a tag cannot be moved; it says which were.
    """
    moved: list[Moved] = []
    with Registry(reference, policy) as registry:
        manifest = registry.get(digest)
        for fixed in filter(_FIXED.fullmatch, names):
            if registry.digest(fixed) not in (None, digest):
                raise errors.RegistryError(
                    f"{registry.place}: {fixed} is another image already; take the next version (on GitHub: run the "
                    "failed jobs again, not all of them, which build another image)"
                )
        names = _still(names, registry)
        for name in names:
            try:
                before = registry.digest(name)
                if before != digest:
                    registry.put(name, manifest)
                now = registry.digest(name)
                if now != digest:
                    raise errors.RegistryError(
                        f"{registry.place}: tag {name} has {now or 'nothing'}, not {digest}: somebody else moves it"
                    )
            except errors.RegistryError as error:
                done, left = ", ".join(each.tag for each in moved) or "none", ", ".join(names[len(moved) :])
                raise errors.RegistryError(f"{error}. Tags moved: {done}; as they were: {left}") from error
            moved.append(Moved(name, before, digest))
    return tuple(moved)


def _still(names: Sequence[str], registry: Registry) -> Sequence[str]:
    """Return the tags of a release, without the tags of a newer one."""
    release = next(filter(None, map(_RELEASE.fullmatch, names)), None)
    if release is None:
        return names
    others = [each for each in map(_RELEASE.fullmatch, registry.tags()) if each and each[1] == release[1]]
    newer = [_numbers(each) for each in others if _numbers(each) > _numbers(release)]
    same = any(each[:2] == _numbers(release)[:2] for each in newer)
    taken = {"latest" if newer else "", release[0].rpartition(".")[0] if same else ""}
    for name in taken.intersection(names):
        console.note(f"{registry.place}: {name} stays with a newer release")
    return [name for name in names if name not in taken]


def _numbers(version: re.Match[str]) -> tuple[int, ...]:
    return tuple(map(int, version.groups()[1:]))


def unstage(staging: Reference, digest: str, policy: Policy) -> None:
    """Remove the staging tag of an image that has its public tags; a registry that removes none is no error."""
    with Registry(staging, policy) as registry:
        if registry.digest(staging.tag) == digest and not registry.remove(staging.tag):
            console.note(f"{registry.place}: removes no tags; {staging.tag} stays, for you to delete")
