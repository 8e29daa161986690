"""From a checked image in the engine to public tags and ``release.json``. Refuses parts that no release may have."""

from __future__ import annotations

import argparse
import datetime
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tooling.core import errors, files
from tooling.core.console import Subparsers, command
from tooling.core.files import ROOT
from tooling.image import digests, engine, reference
from tooling.image.build import shorten_names
from tooling.image.buildx import LABEL, OCI
from tooling.image.digests import ImageLock, ImagePin
from tooling.image.registry import Registry, name_candidate
from tooling.image.request import Request
from tooling.image.smoke import Check
from tooling.sources import manifest
from tooling.sources.manifest import Pins

if TYPE_CHECKING:
    from docker.models.images import Image

    from docker import DockerClient

RECORD = Path("build/image/release.json")
SCHEMA = Path(__file__).with_name("release.schema.json")


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    text = "give public tags to an image that was pushed with --no-promote"
    examples = [".venv/bin/python -m tooling promote ghcr.io/OWNER/multimesh-jax@sha256:... --tag main"]
    add = command(subparsers, "promote", run_promote, text, examples).add_argument
    add("image", metavar="REPO@DIGEST", help="as `docker/build.py --no-promote` printed it")
    add("--tag", required=True, help="the tag that it gets")
    add("--latest", action="store_true", help="also latest; with --release")
    add("--release", metavar="VERSION", help="also vX.Y.Z and vX.Y, under the conditions of a release")


def run_promote(args: argparse.Namespace) -> None:
    """Move the tags of an image that passed its check; print their old digests."""
    repository, _, digest = args.image.partition("@")
    name = reference.make(repository, None, args.tag)
    names = reference.list_tags(name, latest=args.latest, version=args.release)
    name.at(digest)  # which raises where it is none
    registry = Registry(name.repository)
    labels = registry.check_pushed_here(digest)
    if args.release:
        check_release(args.release, labels, load_locks(ROOT), tag=name.tag, latest=args.latest)
    for move in registry.promote(digest, names):
        print(f"{move.tag}: {move.digest} (before: {move.before or 'no such tag'})")


def load_locks(root: Path) -> tuple[Pins, ImageLock]:
    """Read and check ``sources.lock`` and ``images.lock``."""
    return manifest.load_lock(root / "sources.lock"), digests.load(root)


def list_null_pins(
    locks: tuple[Pins, ImageLock], unpinned: Sequence[str], *, jaxlib_from_source: bool, platform: str = ""
) -> list[str]:
    """Return a line for each part of an image whose bytes are not pinned. All parts of a release must be.

    Pins that only a jaxlib from source needs (jax, which fixes xla, and Bazel for the ``platform``, by default for all)
    count where the image has one. ``unpinned`` are the images without a digest that it was made from.
    """
    sources, images = locks
    lines = [
        f"{name}: sources.lock has neither commit nor tree; run `.venv/bin/python -m tooling lock {name} {pin.version}`"
        for name, pin in sources.items()
        if not (pin.commit or pin.tree) and (jaxlib_from_source or name != "jax")
    ]
    lines += [f"{name}: has no digest; {ImagePin(name, None).remedy}, or give one by digest" for name in unpinned]
    return lines + [
        f"{name}: images.lock has no sha256; write it there"
        for name, file in images.files.items()
        if jaxlib_from_source and file.sha256 is None and re.fullmatch(f"bazel .*{platform}", name)
    ]


def check_release(
    version: str,
    labels: Mapping[str, str],
    locks: tuple[Pins, ImageLock],
    *,
    tag: str,
    latest: bool,
    bases: Sequence[str] = (),
) -> None:
    """Refuse a release whose parts are not all pinned, or whose tags promise another image.

    A group, with all reasons. ``labels`` are those that the image has or would get.
    """
    from_source = labels.get(f"{LABEL}.jaxlib", "").startswith("source")
    sha256 = labels.get(f"{LABEL}.python", "").partition("standalone sha256:")[2]
    pythons = {file.sha256: name.split()[1] for name, file in locks[1].files.items() if name.startswith("python ")}
    pinned = labels.get(f"{OCI}.base.digest", "unpinned") != "unpinned"
    unpinned = tuple(bases) or (() if pinned else (labels.get(f"{OCI}.base.name", "base"),))
    lines = list_null_pins(locks, unpinned, jaxlib_from_source=from_source, platform=pythons.get(sha256, ""))
    if sha256 and sha256 not in pythons:
        lines.append(f"Python: sha256 {sha256} of the standalone one is not in images.lock; leave out --python-archive")
    faults: list[errors.ToolingError] = [
        errors.SourceError(f"no release: {line}") for line in (*lines, *_list_dirty(labels))
    ]
    if (library := labels.get(f"{OCI}.version")) != version.removeprefix("v"):
        faults.append(errors.OptionError(f"no release: {version}: the library says {library}; make them agree"))
    target, accelerator = labels.get(f"{LABEL}.target", "runtime"), labels.get(f"{LABEL}.accelerator", "unknown")
    if target != "runtime" and not tag.endswith(f"-{version}"):
        line = f"no release: {version} is of the image that runs, and this is {target}; add --tag {target}-{version}"
        faults.append(errors.OptionError(line))
    if latest and (target != "runtime" or accelerator == "cpu"):
        line = f"no release: --latest is the image for GPUs that runs, and this is {target}, {accelerator}"
        faults.append(errors.OptionError(line))
    if faults:
        raise ExceptionGroup("no release", faults)


def _list_dirty(labels: Mapping[str, str]) -> list[str]:
    """Return a line for each tree of an image that no commit holds."""
    trees = ((f"{OCI}.revision", "this repository"), (f"{LABEL}.maxtext.revision", "MaxText"))
    return [
        f"{tree}: has changes that are not committed; commit them or take them back"
        for name, tree in trees
        if labels.get(name, "-dirty").endswith("-dirty")
    ]


def check_push(
    root: Path, request: Request, labels: Mapping[str, str], changed: Sequence[str] = (), bases: Sequence[str] = ()
) -> None:
    """Raise errors that would stop a push after the build; of a dry run, those that need no registry.

    Changes that no commit holds, pins of a release, ``release.json`` that cannot be written, a login that may not push.
    ``labels`` are those that the image has or would get; ``changed`` the files that no commit holds, ``bases``
    the images without a digest that it is built from.
    """
    if request.release is not None:
        tag, latest = request.reference.tag, request.latest
        check_release(request.release, labels, load_locks(root), tag=tag, latest=latest, bases=bases)
    elif not request.allow_dirty and (lines := _list_dirty(labels)):
        names = f" ({shorten_names(changed)})" if changed else ""
        raise errors.SourceError(f"{lines[0]}{names}; or push it all the same with --allow-dirty")
    if request.dry_run:
        return
    place = (request.release_file or root / RECORD).parent
    place.mkdir(parents=True, exist_ok=True)
    if not os.access(place, os.W_OK):
        raise errors.ToolingError(f"{place}: cannot be written, and release.json belongs there; make it writable")
    Registry(request.reference.repository).check_push()


def publish(root: Path, client: DockerClient, built: Image, check: Check, request: Request) -> dict[str, Any]:
    """Push under ``sha-COMMIT-ID``, verify, write ``release.json``, move the public tags; return the document.

    Until the last step every public tag is where it was.
    """
    name, place = request.reference, request.release_file or root / RECORD
    registry = Registry(name.repository)
    candidate = name.tagged(name_candidate(built.labels, str(built.id), checked=check.job != "none"))
    built.tag(*candidate)
    engine.push(client, candidate)
    pushed = registry.get(candidate.tag)
    if built.id not in registry.ids(pushed):
        raise errors.EngineError(
            f"{candidate}: is another image than the one that was checked ({str(built.id)[:19]}); build again"
        )
    image: dict[str, Any] = {
        "repository": name.repository,
        "digest": pushed.digest,
        "id": built.id,
        "bytes": sum(part.bytes for part in registry.images(pushed)),
        "pull": f"docker pull {name.at(pushed.digest)}",
        "candidate": candidate.tag,
        "tags": [],
    }
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    passed = {"job": check.job, "verdict": check.verdict}
    document = {"format": 4, "created": created, "image": image, "check": passed, "labels": built.labels}
    files.write_json(place, document)
    if request.promote:
        names = reference.list_tags(name, latest=request.latest, version=request.release)
        image["tags"] = [move._asdict() for move in registry.promote(pushed.digest, names)]
        files.write_json(place, document)
    return document
