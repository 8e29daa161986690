"""``bump images``: ask for the digests and checksums of ``docker/images.lock``, all at once."""

from __future__ import annotations

import argparse
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tooling.core import console, errors
from tooling.core.console import Subparsers, command
from tooling.image import digests, engine, reference, tags
from tooling.sources import pins
from tooling.sources.lock import Move
from tooling.sources.workspace import Workspace

_SHA256 = re.compile(r"\b[0-9a-f]{64}\b")


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    text = "move a component to another version, with its patches; or fill images.lock"
    examples = ["python -m tooling bump maxtext 0.2.5", "python -m tooling bump images"]
    parser = command(subparsers, "bump", run, text, examples)
    parser.add_argument("name", metavar="NAME", help="component, or `images` for the base images")
    parser.add_argument("version", metavar="VERSION", nargs="?", help="its new version; a commit where it has no tags")
    parser.add_argument("--mirror", metavar="URL", help="ask URL/ instead of the upstream")


def run(args: argparse.Namespace) -> int:
    """Pin another version, if its patches apply there."""
    here = Workspace()
    if args.name == "images":
        if args.version or args.mirror:
            raise errors.UsageError("bump images: takes no version and no --mirror; it asks where images.lock points")
        return run_images(here.root)
    if args.version is None:
        raise errors.UsageError(f"bump {args.name}: to which version? Give it after the name")
    with here.exclusive(), console.Reporter() as reporter:
        pin = pins.bump(here, args.name, args.version, args.mirror, reporter)
    print(f"{args.name}: {args.version} is {pin.commit}; run `python -m tooling sync` to bring it in")
    for missing in pin.missing:
        print(f"{args.name}: sources.lock has no {missing}")
    return 0


def bump(root: Path) -> list[Move]:
    """Ask for every pin that has a source to ask, all at once; a pin nobody answers for stays as it is.

    ``images.lock`` and the devcontainer that is built from it change together.
    A standalone Python's checksum comes from a table that a person reads, so it is not asked for.
    """
    held = digests.load(root)
    downloads = {name: file for name, file in held.files.items() if name.startswith("bazel ")}
    before = {name: pin.digest for name, pin in held.images.items()} | {k: f.sha256 for k, f in downloads.items()}
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda pin: _digest(pin.reference), held.images.values())
        sums = pool.map(lambda file: _published(f"{file.url}.sha256"), downloads.values())
        told = zip(before.items(), [*found, *sums], strict=True)
        answers = [Move(name, old or "null", new or old or "null", fault or "") for (name, old), (new, fault) in told]
    images, others = dict(held.images), dict(held.files)
    for answer in answers:
        if answer.name in images and not answer.fault:
            images[answer.name] = replace(images[answer.name], digest=answer.new, read_in="")
        elif not answer.fault:
            others[answer.name] = replace(others[answer.name], sha256=answer.new, read_in="")
    bumped = digests.ImageLock(images, others)
    digests.save(root, bumped)
    digests.follow(root, bumped)
    return answers


def run_images(root: Path) -> int:
    """Bump, print a table, and fail if anything could not be asked."""
    answers = bump(root)
    rows = [(each.name, each.old, each.new) for each in answers]
    print(console.table(("pin", "before", "now"), rows))
    if silent := [f"{each.name}: {each.fault}" for each in answers if each.fault]:
        raise errors.SeveralErrors(silent, errors.NetworkError.exit_code)
    return 0


def _digest(image: str) -> tuple[str | None, str | None]:
    """Return the digest that a registry gives for a reference, or why not; for all platforms where it has several."""
    repository, _, tag = image.rpartition(":")
    try:
        return tags.get(engine.detect(), str(reference.make(repository, None, tag)), sleep=lambda _: None).digest, None
    except errors.ToolingError as error:
        return None, f"{image}: its registry does not answer ({error})"


def _published(url: str) -> tuple[str | None, str | None]:
    """Return the checksum that a project publishes beside a file, or why not."""
    import requests

    try:
        answer = requests.get(url, timeout=60)
        answer.raise_for_status()
    except requests.RequestException as error:
        return None, f"{url}: cannot be fetched ({type(error).__name__})"
    found = _SHA256.search(answer.text[:1000])
    return (found.group(), None) if found else (None, f"{url}: holds no sha256")
