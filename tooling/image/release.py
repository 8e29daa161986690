"""From a checked image in the engine to public tags and ``release.json``. Refuses parts that no release may have."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tooling.core import errors, files
from tooling.core.console import Subparsers, command
from tooling.image import build, buildx, digests, engine, reference, tags
from tooling.image.buildx import LABEL, OCI
from tooling.image.digests import ImageLock
from tooling.image.engine import Engine
from tooling.image.request import Built, Request
from tooling.image.smoke import Check
from tooling.sources import manifest
from tooling.sources.manifest import Pin
from tooling.sources.workspace import ROOT

RECORD = Path("build/image/release.json")
SCHEMA = Path(__file__).with_name("release.schema.json")


Locks = tuple[Mapping[str, Pin], ImageLock]


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    text = "give public tags to an image that was pushed with --no-promote"
    examples = ["python -m tooling promote ghcr.io/OWNER/multimesh-jax@sha256:... --tag main"]
    add = command(subparsers, "promote", run_promote, text, examples).add_argument
    add("image", metavar="REPO@DIGEST", help="as `docker/build.py --no-promote` printed it")
    add("--tag", required=True, help="the tag that it gets")
    add("--latest", action="store_true", help="also latest; with --release")
    add("--release", metavar="VERSION", help="also vX.Y.Z and vX.Y, under the conditions of a release")
    text = "the release.json of its push, to be told of the tags"
    add("--release-file", metavar="FILE", type=Path, help=text)


def run_promote(args: argparse.Namespace) -> None:
    """Move the tags; print their old digests."""
    repository, _, digest = args.image.partition("@")
    wanted = reference.make(repository, None, args.tag)
    wanted.at(digest)
    file = args.release_file
    document = read(file) if file else None
    names = tags.tags(wanted, latest=args.latest, version=args.release)
    if document and (wanted.repository, digest) != (document["image"]["repository"], document["image"]["digest"]):
        held = f"{document['image']['repository']}@{document['image']['digest']}"
        raise errors.UsageError(
            f"--release-file {file}: is about {held}, not about {args.image}; give that of its push"
        )
    where = engine.detect()
    if args.release:
        labels = tags.labels_of(where, wanted.at(digest))
        check_release(args.release, labels, load_locks(ROOT), null_base(labels))
    if document:
        document["version"] = args.release
        moved = tags.promote(where, wanted, digest, names, partial(note_tags, file, document))
    else:
        moved = tags.promote(where, wanted, digest, names)
    print("\n".join(f"{each.tag}: {each.digest} (before: {each.before or 'no such tag'})" for each in moved))


def load_locks(root: Path) -> Locks:
    """Read and check ``sources.lock`` and ``images.lock``."""
    return manifest.load_lock(root / "sources.lock"), digests.load(root)


def null_pins(locks: Locks, unpinned: Sequence[str], *, jaxlib_from_source: bool, platform: str = "") -> list[str]:
    """Return a line for each part of an image whose bytes are not pinned. All parts of a release must be.

    Pins that only a jaxlib from source needs (jax, which fixes xla, and Bazel for the ``platform``, by default for all)
    count where the image has one. ``unpinned`` are the images without a digest that it was made from.
    """
    sources, images = locks
    said = [
        f"{name}: sources.lock has neither commit nor tree; run `python -m tooling bump {name} {pin.version}`"
        for name, pin in sources.items()
        if not pin.fixed and (jaxlib_from_source or name != "jax")
    ]
    remedy = "run `python -m tooling bump images`"
    said += [f"{name}: has no digest; {remedy}, or give one by digest" for name in unpinned]
    files = images.files.items()
    bazels = [name for name, file in files if re.fullmatch(f"bazel .*{platform}", name) and file.sha256 is None]
    return said + [f"{name}: images.lock has no sha256; write it there" for name in bazels if jaxlib_from_source]


def check_release(version: str, labels: Mapping[str, str], locks: Locks, unpinned: Sequence[str]) -> None:
    """Refuse a release whose sources, wheels and bases are not all pinned: ``SeveralErrors``, with all reasons.

    ``labels`` are those that the image has or would get; ``unpinned`` as in ``null_pins``.
    """
    from_source = labels.get(f"{LABEL}.jaxlib", "").startswith("source")
    python = labels.get(f"{LABEL}.python", "unpinned")
    pythons = {file.sha256: name.split()[1] for name, file in locks[1].files.items() if name.startswith("python ")}
    pins = null_pins(locks, unpinned, jaxlib_from_source=from_source, platform=pythons.get(python, ""))
    if python not in pythons:
        pins.append(f"Python: sha256 {python} of the standalone one is not in images.lock; leave out --python-archive")
    faults = [(said, errors.PinError.exit_code) for said in pins]
    faults += [(said, errors.DirtyTreeError.exit_code) for said in _dirty(labels)]
    if (own := labels.get(f"{OCI}.version")) != version.removeprefix("v"):
        faults.append((f"--release {version}: the library says {own}; make them agree", errors.UsageError.exit_code))
    if faults:
        raise errors.SeveralErrors([f"no release: {message}" for message, _ in faults], faults[0][1])


def _dirty(labels: Mapping[str, str]) -> list[str]:
    """Return a line for each tree of an image that no commit holds."""
    said = []
    for name, what in ((f"{OCI}.revision", "this repository"), (f"{LABEL}.maxtext.revision", "MaxText")):
        revision = labels.get(name, "unknown")
        if revision == "unknown" or revision.endswith("-dirty"):
            state = "is at no commit" if revision == "unknown" else "has changes that are not committed"
            said.append(f"{what}: {state}; commit them or take them back")
    return said


def null_base(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the base image of a finished image if its digest was not known."""
    known = labels.get(f"{OCI}.base.digest", "unpinned") != "unpinned"
    return () if known else (labels.get(f"{OCI}.base.name", "base"),)


def check_sources(root: Path, request: Request, labels: Mapping[str, str], bases: Sequence[str]) -> None:
    """Raise errors that would stop a push after the build: files and changes that no commit holds, pins of a release.

    ``labels`` are those that the image has or would get; ``bases`` its base images without a digest.
    """
    spec, actions = request.spec, request.actions
    if actions.build and not actions.allow_dirty:
        build.check_context(root, jaxlib_from_source=spec.jaxlib == "source")
    if actions.release is not None:
        check_release(actions.release, labels, load_locks(root), bases)
    elif not actions.allow_dirty and (dirty := _dirty(labels)):
        raise errors.DirtyTreeError(f"{dirty[0]}; or push it all the same with --allow-dirty")


def check_before(root: Path, engine: Engine, request: Request) -> None:
    """Raise all errors that would stop a push after the build, those of ``check_sources`` and: no right to push."""
    if request.actions.build:
        plan = build.plan(root, engine, request.spec, request.means, Path("RESULT"))
        check_sources(root, request, plan.labels, plan.base.unpinned)
    else:
        labels = build.describe(engine, request.spec, str(request.spec.reference)).labels
        check_sources(root, request, labels, null_base(labels))
    place = (request.actions.release_file or root / RECORD).parent
    place.mkdir(parents=True, exist_ok=True)
    if not os.access(place, os.W_OK):
        raise errors.DiskError(f"{place}: cannot be written, and release.json belongs there; make it writable")
    tags.check_push(engine, request.spec.reference)


def publish(root: Path, engine: Engine, built: Built, check: Check, request: Request) -> dict[str, Any]:
    """Push under ``sha-COMMIT``, verify, write ``release.json``, move the public tags; return what was written.

    Until the last step every public tag is where it was.
    """
    reference, actions = request.spec.reference, request.actions
    place = actions.release_file or root / RECORD
    name = tags.candidate(reference, built.labels, built.image_id)
    engine.run("tag", built.image_id, str(name))
    pushed = tags.push(engine, built.image_id, name)
    document = record(root, built, check, pushed, name.tag, actions.release)
    write(place, document)
    if actions.promote:
        names = tags.tags(reference, latest=actions.latest, version=actions.release)
        tags.promote(engine, reference, pushed.digest, names, partial(note_tags, place, document))
    return document


def note_tags(place: Path, document: dict[str, Any], moved: Sequence[tags.Moved]) -> None:
    """Write moved tags into a ``release.json``."""
    document["image"]["tags"] = [each._asdict() for each in moved]
    write(place, document)


def record(
    root: Path, built: Built, check: Check, pushed: tags.Pushed, candidate: str, version: str | None
) -> dict[str, Any]:
    """Return the content of ``release.json`` before any tag moves."""
    reference = built.spec.reference
    return {
        "format": 3,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": version,
        "image": {
            "repository": reference.repository,
            "digest": pushed.digest,
            "media_type": pushed.media_type,
            "id": built.image_id,
            "bytes": pushed.bytes,
            "pull": f"docker pull {reference.at(pushed.digest)}",
            "candidate": candidate,
            "tags": [],
        },
        "check": {"job": check.job, "verdict": check.verdict},
        "locks": {name: f"sha256:{files.sha256(root / name)}" for name in buildx.LOCKS if (root / name).is_file()},
        "labels": dict(built.labels),
        "seconds": {"build": round(built.seconds, 1), "check": check.seconds, "push": round(pushed.seconds, 1)},
    }


def read(path: Path) -> dict[str, Any]:
    """Return the content of a ``release.json``."""
    import jsonschema

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
    import jsonschema

    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(document)


def plan_push(engine: Engine, image: str, request: Request, labels: Mapping[str, str]) -> list[list[str]]:
    """Return the commands of a push. DIGEST stands for the registry's answer."""
    reference, actions = request.spec.reference, request.actions
    name = str(tags.candidate(reference, labels, "sha256:IMAGE"))
    commands = [[*engine.cli, "tag", image, name], [*engine.cli, "push", name]]
    if actions.promote:
        options = ["--latest"] * actions.latest + (["--release", actions.release] if actions.release else [])
        image = f"{reference.repository}@DIGEST"
        commands.append(["python", "-m", "tooling", "promote", image, "--tag", reference.tag, *options])
    return commands


def summary(document: dict[str, Any]) -> str:
    """Return the lines on a push that people read."""
    image = document["image"]
    states = {None: "new", image["digest"]: "as it was"}
    tags = [f"{each['tag']} ({states.get(each['before'], 'moved')})" for each in image["tags"]]
    size, took = image["bytes"] / 1e6, document["seconds"]["push"]
    return (
        f"digest  {image['digest']}\npushed  {size:.1f} MB to pull, in {took:.1f} s\n"
        f"tags    {', '.join([image['candidate'], *tags])}\npull    {image['pull']}"
    )
