"""From a checked image in the engine to public tags in a registry; every step can be repeated."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workflows import console, errors
from workflows.image import attest, build, context, promote, push, release, sign
from workflows.image.attest import Attesting
from workflows.image.engine import Engine
from workflows.image.flags import Request
from workflows.image.reference import Reference
from workflows.image.registry import Registry
from workflows.image.release import Published
from workflows.image.retry import Policy
from workflows.image.smoke import Check
from workflows.image.spec import Built

RECORD = Path("build/image/release.json")


def check_options(request: Request) -> None:
    """Raise for what needs no engine to be seen: tags that cannot be, a key that is not there."""
    actions = request.actions
    promote.tags(request.spec.reference, latest=actions.latest, version=actions.release)
    if actions.sign_key is not None:
        sign.check_key(actions.sign_key)


def check_before(root: Path, engine: Engine, request: Request, attesting: Attesting) -> None:
    """Raise what would stop a push after the build: pins or trees that no release may have, or no right to push."""
    if request.actions.build and not request.actions.commit:
        context.check(root, jaxlib_from_source=request.spec.jaxlib == "source")
    if request.actions.release is not None:
        check_release(root, engine, request, attesting)
    place = release_file(root, request).parent
    place.mkdir(parents=True, exist_ok=True)
    if not os.access(place, os.W_OK):
        raise errors.DiskError(f"{place}: cannot be written, and release.json belongs there; make it writable")
    with Registry(request.spec.reference) as registry:
        registry.check_push()


def release_file(root: Path, request: Request) -> Path:
    """Return where ``release.json`` goes."""
    return request.actions.release_file or root / RECORD


def check_release(root: Path, engine: Engine, request: Request, attesting: Attesting) -> None:
    """Raise what stands against a release: of the image that is there, or of the one that would be built."""
    spec = request.spec
    if request.actions.build:
        plan = build.plan(root, engine, spec, request.means, None)
        labels, unpinned = plan.labels, plan.base.unpinned
    else:
        labels = build.describe(engine, spec, str(spec.reference), seconds=0.0, cached=0, steps=0).labels
        unpinned = release.unpinned(labels)
    release.check(str(request.actions.release), labels, release.load_locks(root), (*unpinned, *attesting.unpinned))


def publish(
    root: Path, engine: Engine, built: Built, check: Check, request: Request, attesting: Attesting
) -> dict[str, Any]:
    """Push under a staging tag, verify, sign, move the public tags; return what ``release.json`` is to say.

    Until the last step every public tag is where it was.
    """
    reference, actions, policy = request.spec.reference, request.actions, Policy()
    for name in attesting.unpinned:
        console.note(f"{name}: not pinned by digest; a release refuses that")
    options = attesting.options_for("builder")
    # A builder shows its own steps.
    with console.Reporter(bars=False if options else None, quiet=actions.json) as reporter:
        if options:
            pushed = from_builder(root, engine, built, request, options, reporter)
        else:
            pushed = from_engine(engine, built, reporter)
    with Registry(reference, policy) as registry:
        size, plain_http = registry.bytes_to_pull(pushed.manifest), registry.plain_http
        attested = attest.read(registry, pushed.manifest)
    attest.check(attested, attesting, str(pushed.reference))
    signature = None
    if actions.sign_key is not None:
        signature = sign.sign(reference, pushed.digest, actions.sign_key, plain_http=plain_http)
    started = time.monotonic()
    tags = promote.tags(reference, latest=actions.latest, version=actions.release) if actions.promote else ()
    moved = promote.promote(reference, pushed.digest, tags, policy)
    if moved:
        promote.unstage(reference, pushed.digest, policy)
    published = Published(pushed, size, moved, time.monotonic() - started, signature, attesting.said, attested)
    return release.record(root, published, built, asdict(check), actions.release)


def from_engine(engine: Engine, built: Built, reporter: console.Reporter) -> push.Pushed:
    """Let the engine push what was checked, with the attestations that it has of it."""
    staging = built.spec.reference.staging
    engine.run("tag", built.image_id, str(staging))
    try:
        return push.push(engine, built.image_id, staging, Policy(), reporter)
    finally:
        engine.run("rmi", "--no-prune", str(staging), check=False)


def from_builder(
    root: Path, engine: Engine, built: Built, request: Request, options: tuple[str, ...], reporter: console.Reporter
) -> push.Pushed:
    """Let a builder of its own push the checked image from its cache, with attestations."""
    staging = built.spec.reference.staging

    def send() -> None:
        done = build.execute(root, engine, built.spec, request.means, attest=options, push=str(staging))
        if done.returncode:
            failed = done.steps.failed
            raise push.fault((failed and failed.error) or "\n".join(done.steps.rest), str(staging))

    return push.deliver(send, built.image_id, staging, Policy(), reporter)


def planned_push(engine: Engine, image: str, staging: Reference) -> list[list[str]]:
    """Return the commands of a push by the engine."""
    return [[*engine.cli, "tag", image, str(staging)], [*engine.cli, "push", str(staging)]]


def planned_promotion(request: Request) -> list[list[str]]:
    """Return what moves the public tags, as a command; DIGEST stands for what the registry answers."""
    reference, actions = request.spec.reference, request.actions
    if not actions.promote:
        return []
    options = [
        *(["--latest"] if actions.latest else []),
        *(["--release", actions.release] if actions.release else []),
    ]
    image = f"{reference.repository}@DIGEST"
    return [["python", "-m", "workflows", "promote", image, "--tag", reference.tag, *options]]


def summary(document: dict[str, Any]) -> str:
    """Return what a person wants to know of a push."""
    image = document["image"]
    states = {True: "as it was", False: "moved"}
    tags = [
        f"{each['tag']} ({states[each['before'] == each['digest']] if each['before'] else 'new'})"
        for each in image["tags"]
    ]
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
