"""From a checked image in the engine to public tags in a registry; every step can be repeated."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workflows import console
from workflows.image import build, promote, push, release, sign
from workflows.image.engine import Engine
from workflows.image.flags import Request
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


def check_before(root: Path, engine: Engine, request: Request) -> None:
    """Raise what would stop a push after the build: pins or trees that no release may have, or no right to push."""
    if request.actions.release is not None:
        check_release(root, engine, request)
    with Registry(request.spec.reference) as registry:
        registry.check_push()


def check_release(root: Path, engine: Engine, request: Request) -> None:
    """Raise what stands against a release: of the image that is there, or of the one that would be built."""
    spec = request.spec
    if request.actions.build:
        plan = build.plan(root, engine, spec, request.means, None)
        labels, unpinned = plan.labels, plan.base.unpinned
    else:
        labels = build.describe(engine, spec, str(spec.reference), seconds=0.0, cached=0, steps=0).labels
        unpinned = release.unpinned(labels)
    release.check(str(request.actions.release), labels, release.load_locks(root), unpinned)


def publish(root: Path, engine: Engine, built: Built, check: Check, request: Request) -> dict[str, Any]:
    """Push under a staging tag, verify, sign, move the public tags; return what ``release.json`` says.

    Until the last step every public tag is where it was.
    """
    reference, actions, policy = request.spec.reference, request.actions, Policy()
    attestations = explain_attestations(engine)
    console.note(f"attestations: {attestations}")
    engine.run("tag", built.image_id, str(reference.staging))
    try:
        with console.Reporter(quiet=actions.json) as reporter:
            pushed = push.push(engine, built.image_id, reference.staging, policy, reporter)
    finally:
        engine.run("rmi", "--no-prune", str(reference.staging), check=False)
    with Registry(reference, policy) as registry:
        size, plain_http = registry.bytes_to_pull(pushed.manifest), registry.plain_http
    signature = None
    if actions.sign_key is not None:
        signature = sign.sign(reference, pushed.digest, actions.sign_key, plain_http=plain_http)
    started = time.monotonic()
    tags = promote.tags(reference, latest=actions.latest, version=actions.release) if actions.promote else ()
    moved = promote.promote(reference, pushed.digest, tags, policy, fixed=actions.release)
    published = Published(pushed, size, moved, time.monotonic() - started, signature, attestations)
    document = release.record(root, published, built, asdict(check), actions.release)
    release.write(actions.release_file or root / RECORD, document)
    return document


def planned(engine: Engine, image: str, request: Request) -> list[list[str]]:
    """Return the commands of a push; DIGEST stands for what the registry answers."""
    reference, actions = request.spec.reference, request.actions
    commands = [
        [*engine.cli, "tag", image, str(reference.staging)],
        [*engine.cli, "push", str(reference.staging)],
    ]
    if actions.promote:
        options = [
            *(["--latest"] if actions.latest else []),
            *(["--release", actions.release] if actions.release else []),
        ]
        image = f"{reference.repository}@DIGEST"
        commands.append(["python", "-m", "workflows", "promote", image, "--tag", reference.tag, *options])
    return commands


def explain_attestations(engine: Engine) -> str:
    """Say whether the builder attaches an SBOM and provenance to what is pushed, and if not, why."""
    inside = "the SBOM inside the image (/opt/inventory) is all there is"
    if engine.kind == "podman":
        return f"none: podman makes none; {inside}"
    if engine.facts().attestations:
        return f"none: the image was loaded into the engine to be checked, which drops them; {inside}"
    return f"none: this engine keeps no image index ({engine.kind} {engine.version}, {engine.builder}); {inside}"


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
    if document["signature"]:
        lines.append(f"signed  {document['signature']['tool']}")
    return "\n".join(lines)
