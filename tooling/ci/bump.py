"""``bump``: pins another version of a component, or what registries and servers have for ``images.lock`` now."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tooling.core import console, errors, proc
from tooling.core.console import Subparsers, command
from tooling.image import digests, engine, reference, tags
from tooling.sources import pins
from tooling.sources.workspace import Workspace

_SHA256 = re.compile(r"\b[0-9a-f]{64}\b")


class Move(NamedTuple):
    """The old and the new value of one pin; ``fault`` says why it stayed."""

    name: str
    old: str
    new: str
    fault: str = ""


def register(subparsers: Subparsers) -> None:
    """Add ``bump``."""
    text = "move a component to another version, with its patches; or fill images.lock"
    examples = ["python -m tooling bump maxtext 0.2.5", "python -m tooling bump images"]
    parser = command(subparsers, "bump", run, text, examples)
    parser.add_argument("name", metavar="NAME", help="component, or `images` for the base images")
    parser.add_argument("version", metavar="VERSION", nargs="?", help="its new version; a commit where it has no tags")
    parser.add_argument("--mirror", metavar="URL", help="ask URL/ instead of the upstream")


def run(args: argparse.Namespace) -> None:
    """Pin another version, if its patches apply there; or ask for all images, and fail if anything did not answer."""
    here = Workspace()
    if args.name == "images":
        if args.version or args.mirror:
            raise errors.UsageError("bump images: takes no version and no --mirror; it asks where images.lock points")
        moves = images(here.root)
        print(console.table(("pin", "before", "now"), [(each.name, each.old, each.new) for each in moves]))
        if silent := [f"{each.name}: {each.fault}" for each in moves if each.fault]:
            raise errors.SeveralErrors(silent, errors.NetworkError.exit_code)
        return
    if args.version is None:
        raise errors.UsageError(f"bump {args.name}: to which version? Give it after the name")
    with here.exclusive(), console.Reporter() as reporter:
        pin = pins.bump(here, args.name, args.version, args.mirror, reporter)
    said = pin.commit or f"tree {pin.tree}, of a commit that nobody told"
    print(f"{args.name}: {args.version} is {said}; run `python -m tooling sync` to bring it in")


def images(root: Path) -> list[Move]:
    """Ask for every pin of ``images.lock`` that has a source to ask, all at once.

    The devcontainer that is built from it changes together with it.
    A standalone Python's checksum comes from a table that a person reads, so it is not asked for.
    """
    held = digests.load(root)
    downloads = {name: file for name, file in held.files.items() if name.startswith("bazel ")}
    moves: list[Move] = proc.together(
        *(partial(_asked, name, pin.digest, partial(_digest, pin.reference)) for name, pin in held.images.items()),
        *(partial(_asked, k, file.sha256, partial(_published, f"{file.url}.sha256")) for k, file in downloads.items()),
    )
    new = {move.name: move.new for move in moves if not move.fault}
    others = {name: file._replace(sha256=new[name], read_in="") for name, file in downloads.items() if name in new}
    pulled = {name: pin._replace(digest=new[name], read_in="") for name, pin in held.images.items() if name in new}
    moved = digests.ImageLock(held.images | pulled, held.files | others)
    digests.save(root, moved)
    digests.follow(root, moved)
    return moves


def _asked(name: str, old: str | None, find: Callable[[], str]) -> Move:
    try:
        return Move(name, old or "null", find())
    except errors.ToolingError as error:
        return Move(name, old or "null", old or "null", str(error))


def _digest(image: str) -> str:
    """Return the digest that a registry gives for a reference; for all platforms where it has several."""
    repository, _, tag = image.rpartition(":")
    try:
        return tags.get(engine.detect(), str(reference.make(repository, None, tag)), sleep=lambda _: None).digest
    except errors.ToolingError as error:
        raise errors.NetworkError(f"{image}: its registry does not answer ({error})") from error


def _published(url: str) -> str:
    """Return the checksum that a project publishes beside a file."""
    import requests

    try:
        answer = requests.get(url, timeout=60)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise errors.NetworkError(f"{url}: cannot be fetched ({type(error).__name__})") from error
    if found := _SHA256.search(answer.text[:1000]):
        return found.group()
    raise errors.NetworkError(f"{url}: holds no sha256")
