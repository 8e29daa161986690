"""``ci``: the steps of the GitHub workflows, each of which can be run here too."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import asdict
from pathlib import Path

from tooling.ci import relock, tag, upgrade
from tooling.core import console, errors, files
from tooling.core.console import Subparsers, command
from tooling.image import reference, release, tags
from tooling.image.registry import Registry
from tooling.image.request import add_options, from_options
from tooling.sources.lock import Move
from tooling.sources.workspace import ROOT, Workspace

REGISTRY, IMAGE = "ghcr.io", "multimesh-jax"
_OWNER = re.compile(r"[A-Za-z0-9]([-_]*[A-Za-z0-9])*")  # an enterprise gives names with _


def register(subparsers: Subparsers) -> None:
    """Add the command and its parts."""
    text, environ = "the steps of the GitHub workflows", os.environ
    parser = command(subparsers, "ci", run_image_name, text, ["python -m tooling ci wheel dist"])
    parts = parser.add_subparsers(dest="part", metavar="STEP", required=True)

    part = command(parts, "image-name", run_image_name, "print the image of a repository owner, as registries want it")
    part.add_argument("--owner", default=environ.get("GITHUB_REPOSITORY_OWNER", ""), help="default: that of this run")
    registry = environ.get("MULTIMESH_REGISTRY") or REGISTRY
    part.add_argument("--registry", default=registry, help="default: %(default)s")
    text = "fail where a push or a promotion would, before anything is built: tag, rights, a version that is taken"
    part = command(parts, "preflight", run_preflight, text)
    part.add_argument("image", help="as image-name prints it")
    part.add_argument("--tag", required=True)
    part.add_argument("--latest", action="store_true")
    part.add_argument("--release", metavar="VERSION")
    text = "fail unless every file names the version of a tag, and its image is pinned"
    part = command(parts, "versions", run_versions, text)
    part.add_argument("tag")
    part.add_argument("options", nargs="*", help="after --: those of docker/build.py that the image gets")
    part = command(parts, "wheel", run_wheel, "build every wheel twice, check it, print its sha256")
    part.add_argument("folder", type=Path, nargs="?", default=Path("dist"))
    text = "print release notes: how to pull, run and install it, and the commits since the tag before"
    part = command(parts, "notes", run_notes, text)
    part.add_argument("tag")
    part.add_argument("file", type=Path, help="the release.json of its image")
    part.add_argument("--gpu", action="store_true", help="its image was checked on a GPU")
    part = command(parts, "digest", run_digest, "print the digest in a release.json as an output of a workflow step")
    part.add_argument("file", type=Path)
    text = "write requirements/GROUP.txt from GROUP.in, for every Python that we support; what is locked stays"
    part = command(parts, "lock", run_lock, text)
    part.add_argument("group", nargs="*", help=f"default: {' '.join(relock.GROUPS)}")
    part.add_argument("--upgrade", action="store_true", help="take the newest release of each package instead")
    asked, mirror = "ask URL/NAME.git (default: MULTIMESH_MIRROR)", environ.get("MULTIMESH_MIRROR") or None
    text = "move every pin to the newest release, and write down which moved; nothing of what moved is run"
    part = command(parts, "upgrade", run_upgrade, text)
    part.add_argument("folder", type=Path, help="where the list of moves goes")
    part.add_argument("--mirror", metavar="URL", default=mirror, help=asked)
    text = "move the same pins again, train on them, build images on moved bases; write the verdict"
    part = command(parts, "validate", run_validate, text)
    part.add_argument("folder", type=Path, help="what `upgrade` wrote; the verdict goes there too")
    part.add_argument("--network", choices=("default", "host"), help="of the build of an image on a new base image")
    part.add_argument("--mirror", metavar="URL", default=mirror, help=asked)
    text = "move the same pins again, and write the text of their pull request to pull.md"
    part = command(parts, "propose", run_propose, text)
    part.add_argument("folder", type=Path, help="what `upgrade` and `validate` wrote")
    part.add_argument("--mirror", metavar="URL", default=mirror, help=asked)


def run_image_name(args: argparse.Namespace) -> None:
    """Print ``registry/owner/multimesh-jax`` in lower case."""
    if not _OWNER.fullmatch(args.owner):
        raise errors.UsageError(
            f"owner '{args.owner}': is no GitHub account; give --owner or set GITHUB_REPOSITORY_OWNER"
        )
    print(f"{args.registry}/{args.owner}/{IMAGE}".lower())


def run_preflight(args: argparse.Namespace) -> None:
    """Print the tags that the image would get."""
    wanted = reference.make(args.image, None, args.tag)
    names = tags.tags(wanted, latest=args.latest, version=args.release)
    with Registry(wanted) as registry:
        registry.check_push()
        tags.check_taken(names, registry.tags())
    print(" ".join(names))


def run_versions(args: argparse.Namespace) -> None:
    """Print the version of the tag."""
    version = tag.check_versions(ROOT, args.tag)
    parser = argparse.ArgumentParser("docker/build.py", allow_abbrev=False)
    add_options(parser)
    tag.check_pins(ROOT, from_options(parser.parse_args(args.options)).spec)
    print(version)


def run_wheel(args: argparse.Namespace) -> None:
    """Print sha256 and name of each, as sha256sum does."""
    for path, digest in tag.build_wheels(ROOT, args.folder.resolve()):
        print(f"{digest}  {path.name}")


def run_notes(args: argparse.Namespace) -> None:
    """Print Markdown."""
    print(tag.notes(ROOT, args.tag, release.read(args.file), gpu=args.gpu), end="")


def run_digest(args: argparse.Namespace) -> None:
    """Print ``digest=sha256:...``."""
    print(f"digest={release.read(args.file)['image']['digest']}")


def run_lock(args: argparse.Namespace) -> None:
    """Print nothing: git shows what changed."""
    if strange := sorted(set(args.group) - set(relock.GROUPS)):
        raise errors.UsageError(f"{strange[0]}: is no group; choose from {' '.join(relock.GROUPS)}")
    for group in relock.GROUPS:
        if not args.group or group in args.group:
            relock.lock(ROOT, group, *(["--upgrade"] if args.upgrade else []))


def run_upgrade(args: argparse.Namespace) -> None:
    """Print the table of the moves."""
    moves = _upgraded(args.mirror)
    args.folder.mkdir(parents=True, exist_ok=True)
    files.write_json(args.folder / upgrade.MOVES, [asdict(move) for move in moves])
    print("\n".join(move.line for move in moves) or "every pin is the newest release")


def run_validate(args: argparse.Namespace) -> None:
    """Exit 0 also where the validation failed: the pull request says so."""
    moves, verdict = _again(args), {}
    if any(not move.fault for move in moves):
        commands = upgrade.checks(moves, args.network)
        verdict = dict(zip(("passed", "said"), upgrade.validate(ROOT, commands), strict=True))
    files.write_json(args.folder / upgrade.VERDICT, verdict)
    print(verdict.get("said") or "nothing moved")


def run_propose(args: argparse.Namespace) -> None:
    """Print the title of the pull request, or nothing where there is nothing to propose."""
    verdict = files.read_object(args.folder / upgrade.VERDICT)
    moves = _again(args)
    if any(not move.fault for move in moves):
        files.write(args.folder / upgrade.TEXT, upgrade.report(moves, verdict))
        print(upgrade.TITLE)


def _upgraded(mirror: str | None) -> list[Move]:
    here = Workspace()
    with console.Reporter() as reporter, here.exclusive():
        return upgrade.upgrade(here, mirror, reporter)


def _again(args: argparse.Namespace) -> list[Move]:
    """Move the pins that ``upgrade`` moved, from their own sources: nothing but names and versions is taken over."""
    wanted, moves = upgrade.load(args.folder), _upgraded(args.mirror)
    if [(each.name, each.new) for each in moves] != [(each.name, each.new) for each in wanted]:
        raise errors.IntegrityError(f"{args.folder}: other pins move now than when it was written; start over")
    return moves
