"""From a checked image in the engine to public tags and ``release.json``. Refuses parts that no release may have."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonschema

from workflows import console, errors, files
from workflows.image import attest, build, command, digests, push
from workflows.image.attest import Attestation, Attesting
from workflows.image.command import LABEL, OCI
from workflows.image.digests import ImageLock
from workflows.image.engine import Engine
from workflows.image.progress import Steps
from workflows.image.registry import Policy, Registry
from workflows.image.smoke import Check
from workflows.image.spec import Built, Request
from workflows.sources import lock as sources_lock
from workflows.sources.lock import Pin

RECORD = Path("build/image/release.json")
SCHEMA = Path(__file__).with_name("release.schema.json")


Locks = tuple[Mapping[str, Pin], ImageLock]


def load_locks(root: Path) -> Locks:
    """Read and check ``sources.lock`` and ``images.lock``."""
    return sources_lock.load(root / "sources.lock"), digests.load(root)


def null_pins(locks: Locks, unpinned: Sequence[str], *, jaxlib_from_source: bool) -> list[str]:
    """Return a line for each part of an image that is not pinned. All parts of a release must be.

    What only a jaxlib from source needs (jax, xla, Bazel) counts where the image has one. ``unpinned`` are the images
    without a digest that it was made from or scanned by.
    """
    sources, images = locks
    said = [
        f"{name}: sources.lock has no {', '.join(pin.missing)}; `python -m workflows bump` reads it"
        for name, pin in sources.items()
        if pin.missing and (jaxlib_from_source or name not in ("jax", "xla"))
    ]
    remedy = "run `python -m workflows bump images`"
    said += [f"{name}: has no digest; {remedy}, or give one by digest" for name in unpinned]
    bazels = [name for name, file in images.files.items() if name.startswith("bazel ") and file.sha256 is None]
    return said + [f"{name}: images.lock has no sha256; {remedy}" for name in bazels if jaxlib_from_source]


def check_release(version: str, labels: Mapping[str, str], locks: Locks, unpinned: Sequence[str]) -> None:
    """Refuse a release that nobody could build again: ``SeveralErrors``, with all reasons.

    ``labels`` are those that the image has or would get; ``unpinned`` as in ``null_pins``.
    """
    from_source = labels.get(f"{LABEL}.jaxlib", "").startswith("source")
    pins = null_pins(locks, unpinned, jaxlib_from_source=from_source)
    faults = [(said, errors.PinError.exit_code) for said in pins]
    for name, what in ((f"{OCI}.revision", "this repository"), (f"{LABEL}.maxtext.revision", "MaxText")):
        revision = labels.get(name, "unknown")
        if revision == "unknown" or revision.endswith("-dirty"):
            state = "is at no commit" if revision == "unknown" else "has changes that are not committed"
            faults.append((f"{what}: {state}; commit them or take them back", errors.DirtyTreeError.exit_code))
    if (own := labels.get(f"{OCI}.version")) != version.removeprefix("v"):
        faults.append((f"--release {version}: the library says {own}; make them agree", errors.UsageError.exit_code))
    if faults:
        raise errors.SeveralErrors([f"no release: {message}" for message, _ in faults], faults[0][1])


def unpinned(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the base image of a finished image if its digest was not known."""
    known = labels.get(f"{OCI}.base.digest", "unpinned") != "unpinned"
    return () if known else (labels.get(f"{OCI}.base.name", "base"),)


def release_file(root: Path, request: Request) -> Path:
    """Return where ``release.json`` goes."""
    return request.actions.release_file or root / RECORD


def check_options(request: Request) -> None:
    """Raise errors that need no engine: of impossible tags, and of a missing key."""
    actions = request.actions
    if actions.promote:
        push.tags(request.spec.reference, latest=actions.latest, version=actions.release)
    if actions.sign_key is not None:
        attest.check_key(actions.sign_key)


def check_before(root: Path, engine: Engine, request: Request, attesting: Attesting) -> None:
    """Raise errors that would stop a push after the build: pins or trees that no release may have, no right to push."""
    spec, actions = request.spec, request.actions
    if actions.build and not actions.commit:
        build.check_context(root, jaxlib_from_source=spec.jaxlib == "source")
    if actions.release is not None:
        if actions.build:
            plan = build.plan(root, engine, spec, request.means, None)
            labels, bases = plan.labels, plan.base.unpinned
        else:
            labels = build.describe(engine, spec, str(spec.reference)).labels
            bases = unpinned(labels)
        check_release(actions.release, labels, load_locks(root), (*bases, *attesting.unpinned))
    place = release_file(root, request).parent
    place.mkdir(parents=True, exist_ok=True)
    if not os.access(place, os.W_OK):
        raise errors.DiskError(f"{place}: cannot be written, and release.json belongs there; make it writable")
    with Registry(spec.reference) as registry:
        registry.check_push()


def publish(
    root: Path, engine: Engine, built: Built, check: Check, request: Request, attesting: Attesting
) -> dict[str, Any]:
    """Push under a staging tag, verify, sign, move the public tags; return the content of ``release.json``.

    Until the last step every public tag is where it was.
    """
    reference, actions, policy = request.spec.reference, request.actions, Policy()
    staging = reference.staging
    for name in attesting.unpinned:
        console.note(f"{name}: not pinned by digest; a release refuses that")
    options = attesting.options_for("builder")

    def explain(steps: Steps, *_: object) -> Exception:
        return push.fault((steps.failed and steps.failed.error) or "\n".join(steps.rest), str(staging))

    def from_builder() -> None:
        build.execute(root, engine, built.spec, request.means, attest=options, push=str(staging), explain=explain)

    # A builder of its own pushes from its cache and shows its own steps; the engine has the attestations of its image.
    with console.Reporter(bars=False if options else None, quiet=actions.json) as reporter:
        if options:
            pushed = push.deliver(from_builder, built.image_id, staging, policy, reporter)
        else:
            engine.run("tag", built.image_id, str(staging))
            try:
                pushed = push.push(engine, built.image_id, staging, policy, reporter)
            finally:
                engine.run("rmi", "--no-prune", str(staging), check=False)
    with Registry(reference, policy) as registry:
        size, plain_http = registry.bytes_to_pull(pushed.manifest), registry.plain_http
        attested = attest.read(registry, pushed.manifest)
    attest.check(attested, attesting, str(staging))
    signature = attest.sign(reference, pushed.digest, actions.sign_key, plain_http) if actions.sign_key else None
    started, moved = time.monotonic(), tuple[push.Moved, ...]()
    if actions.promote:
        names = push.tags(reference, latest=actions.latest, version=actions.release)
        moved = push.promote(reference, pushed.digest, names, policy)
        push.unstage(staging, pushed.digest, policy)
    promoted_s = time.monotonic() - started
    return record(
        root, built, check, pushed, size, moved, promoted_s, (attesting.said, attested), signature, actions.release
    )


def record(
    root: Path,
    built: Built,
    check: Check,
    pushed: push.Pushed,
    size: int,
    moved: Sequence[push.Moved],
    promoted_s: float,
    attested: tuple[str, list[Attestation]],
    signature: dict[str, str] | None,
    version: str | None,
) -> dict[str, Any]:
    """Return the content of ``release.json``. ``size``: bytes to pull; ``attested`` begins with a line for people."""
    reference = built.spec.reference
    sums = {name: hashlib.sha256((root / name).read_bytes()) for name in command.LOCKS if (root / name).is_file()}
    return {
        "format": 2,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": version,
        "image": {
            "repository": reference.repository,
            "digest": pushed.digest,
            "media_type": pushed.manifest.media_type,
            "id": built.image_id,
            "bytes": size,
            "pull": f"docker pull {reference.at(pushed.digest)}",
            "staging": reference.staging.tag,
            "tags": [asdict(each) for each in moved],
        },
        "check": {"job": check.job, "verdict": check.verdict},
        "locks": {name: f"sha256:{each.hexdigest()}" for name, each in sums.items()},
        "labels": dict(built.labels),
        "seconds": {
            "build": round(built.seconds, 1),
            "check": check.seconds,
            "push": round(pushed.seconds, 1),
            "promote": round(promoted_s, 1),
        },
        "attestations": {"said": attested[0], "manifests": attested[1]},
        "signature": signature,
    }


def read(path: Path) -> dict[str, Any]:
    """Return the content of a ``release.json``."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _check(document)
    except (OSError, ValueError, jsonschema.ValidationError) as error:
        said = str(error).partition("\n")[0]
        raise errors.UsageError(f"{path}: is no release.json ({said}); docker/build.py --upload writes it") from error
    return document


def write(path: Path, document: dict[str, Any]) -> None:
    """Write ``release.json`` whole or not at all, and only if it follows its schema."""
    _check(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, document)


def _check(document: dict[str, Any]) -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(document)


def planned_push(engine: Engine, image: str, request: Request) -> list[list[str]]:
    """Return the commands of a push by the engine."""
    staging = str(request.spec.reference.staging)
    return [[*engine.cli, "tag", image, staging], [*engine.cli, "push", staging]]


def planned_promotion(request: Request) -> list[list[str]]:
    """Return the command that moves the public tags. DIGEST stands for the registry's answer."""
    reference, actions = request.spec.reference, request.actions
    if not actions.promote:
        return []
    options = ["--latest"] * actions.latest + (["--release", actions.release] if actions.release else [])
    image = f"{reference.repository}@DIGEST"
    return [["python", "-m", "workflows", "promote", image, "--tag", reference.tag, *options]]


def summary(document: dict[str, Any]) -> str:
    """Return the lines on a push that people read."""
    image = document["image"]
    states = {None: "new", image["digest"]: "as it was"}
    tags = [f"{each['tag']} ({states.get(each['before'], 'moved')})" for each in image["tags"]]
    lines = [
        f"digest  {image['digest']}",
        f"pushed  {image['bytes'] / 1e6:.1f} MB to pull, in {document['seconds']['push']:.1f} s",
        f"tags    {', '.join(tags) or 'none moved (--no-promote)'}",
        f"pull    {image['pull']}",
    ]
    for each in document["attestations"]["manifests"]:
        lines.append(f"attests {each['digest']}: {', '.join(each['kinds'])}")
    if document["signature"]:
        lines.append(f"signed  {document['signature']['tool']}")
    return "\n".join(lines)
