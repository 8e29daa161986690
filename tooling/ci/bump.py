"""``bump``: pins another version of a component, or what registries have for ``images.lock`` now."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tooling.core import console, errors, proc
from tooling.core.console import Subparsers, command
from tooling.image import digests, engine, reference, tags
from tooling.sources import pins
from tooling.sources.workspace import Workspace


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
    """Ask the registry of every image of ``images.lock`` for its digest, all at once.

    The devcontainer that is built from one changes together with it. Checksums of files come from tables that a person
    reads, so nobody is asked for them.
    """
    held = digests.load(root)
    moves: list[Move] = proc.together(*(partial(_ask, name, pin) for name, pin in held.images.items()))
    new = {move.name: move.new for move in moves if not move.fault}
    pulled = {name: pin._replace(digest=new[name], read_in="") for name, pin in held.images.items() if name in new}
    moved = held._replace(images=held.images | pulled)
    digests.save(root, moved)
    digests.follow(root, moved)
    return moves


def _ask(name: str, pin: digests.ImagePin) -> Move:
    """Ask for the digest that a registry gives for a reference; for all platforms where it has several."""
    repository, _, tag = pin.reference.rpartition(":")
    old = pin.digest or "null"
    try:
        asked = str(reference.make(repository, None, tag))
        return Move(name, old, tags.get(engine.detect(), asked, sleep=lambda _: None).digest)
    except errors.ToolingError as error:
        return Move(name, old, old, f"{pin.reference}: its registry does not answer ({error})")
