"""``ci``: the steps of the GitHub workflows, each of which can be run here too."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

from workflows import console, errors, files
from workflows.ci import nightly, released, relock, tag, upgrade
from workflows.ci.github import GitHub
from workflows.helping import Subparsers, command
from workflows.image import devcontainer, flags, publish, reference
from workflows.image.registry import Registry
from workflows.sources.workspace import ROOT, Workspace

REGISTRY, IMAGE = "ghcr.io", "multimesh-jax"
_OWNER = re.compile(r"[A-Za-z0-9](-?[A-Za-z0-9])*")


def register(subparsers: Subparsers) -> None:
    """Add the command and its parts."""
    text, environ = "the steps of the GitHub workflows", os.environ
    parser = command(subparsers, "ci", run_image_name, text, ["python -m workflows ci wheel dist"])
    parts = parser.add_subparsers(dest="part", metavar="STEP", required=True)

    part = command(parts, "image-name", run_image_name, "print the image of a repository owner, as registries want it")
    part.add_argument("--owner", default=environ.get("GITHUB_REPOSITORY_OWNER", ""), help="default: that of this run")
    registry = environ.get("MULTIMESH_REGISTRY") or REGISTRY
    part.add_argument("--registry", default=registry, help="default: %(default)s")
    text = "fail unless every file names the version of a tag, and its image is pinned"
    part = command(parts, "versions", run_versions, text)
    part.add_argument("tag")
    part.add_argument("options", nargs="*", help="after --: those of docker/build.py that the image gets")
    part = command(parts, "wheel", run_wheel, "build every wheel twice, check it, print its sha256")
    part.add_argument("folder", type=Path, nargs="?", default=Path("dist"))
    part = command(parts, "notes", run_notes, "print release notes from the commits since the tag before")
    part.add_argument("tag")
    text = "make the GitHub release of a tag, with files; it shows once it is whole"
    part = command(parts, "publish", run_publish, text)
    part.add_argument("tag")
    part.add_argument("files", type=Path, nargs="+")
    part.add_argument("--gpu", action="store_true", help="its image was checked on a GPU")
    text = "write a release down: README then says how to pull, run and install it"
    part = command(parts, "released", run_released, text)
    part.add_argument("tag")
    part.add_argument("file", type=Path, help="the release.json of its image")
    text = "the release.json of that, to pull it from now on"
    part.add_argument("--devcontainer", metavar="FILE", type=Path, help=text)
    part.add_argument("--base", metavar="BRANCH", help="also open a pull request against it")
    part = command(parts, "digest", run_digest, "print the digest in a release.json as an output of a workflow step")
    part.add_argument("file", type=Path)
    text = "write .devcontainer/prebuilt, which pulls a published devcontainer"
    part = command(parts, "devcontainer", run_devcontainer, text)
    part.add_argument("image", metavar="REPO@DIGEST", help="as the image workflow or docker/build.py pushed it")
    text = "write requirements/GROUP.txt from GROUP.in, for every Python that we support; what is locked stays"
    part = command(parts, "lock", run_lock, text)
    part.add_argument("group", nargs="*", help=f"default: {' '.join(relock.GROUPS)}")
    part.add_argument("--upgrade", action="store_true", help="take the newest release of each package instead")
    asked, mirror = "ask URL/NAME.git (default: MULTIMESH_MIRROR)", environ.get("MULTIMESH_MIRROR") or None
    text = "move every pin to the newest release; nothing of what moved is run"
    part = command(parts, "upgrade", run_upgrade, text)
    part.add_argument("folder", type=Path, help="where the moved pins go, as a patch")
    part.add_argument("--mirror", metavar="URL", default=mirror, help=asked)
    text = "train on the moved pins, build images on moved bases; write the verdict"
    part = command(parts, "validate", run_validate, text)
    part.add_argument("folder", type=Path, help="what `upgrade` wrote; the verdict goes there too")
    part.add_argument("--network", choices=("default", "host"), help="of the build of an image on a new base image")
    text = "push the moved pins to a branch and open or update its pull request"
    part = command(parts, "propose", run_propose, text)
    part.add_argument("folder", type=Path, help="what `upgrade` and `validate` wrote")
    part.add_argument("--base", default=environ.get("GITHUB_REF_NAME", "main"), help="default: %(default)s")
    part = command(parts, "nightly", run_nightly, "run our tests against a head, or a release of jax")
    part.add_argument("component", choices=nightly.NAMES)
    part.add_argument("--report", type=Path, required=True, help="where the outcome goes")
    part.add_argument("--mirror", metavar="URL", default=mirror, help=asked)
    text = "open or update the one issue about what fails at night, or close it"
    part = command(parts, "report", run_report, text)
    part.add_argument("outcomes", type=Path, nargs="+", help="what `nightly` wrote")


def run_image_name(args: argparse.Namespace) -> None:
    """Print ``registry/owner/multimesh-jax`` in lower case."""
    if not _OWNER.fullmatch(args.owner):
        raise errors.UsageError(
            f"owner '{args.owner}': is no GitHub account; give --owner or set GITHUB_REPOSITORY_OWNER"
        )
    print(f"{args.registry}/{args.owner}/{IMAGE}".lower())


def run_versions(args: argparse.Namespace) -> None:
    """Print the version of the tag."""
    version = tag.check_versions(ROOT, args.tag)
    parser = argparse.ArgumentParser("docker/build.py", allow_abbrev=False)
    flags.add(parser)
    tag.check_pins(ROOT, flags.request(parser.parse_args(args.options)).spec)
    print(version)


def run_wheel(args: argparse.Namespace) -> None:
    """Print sha256 and name of each, as sha256sum does."""
    for path, digest in tag.build_wheels(ROOT, args.folder.resolve()):
        print(f"{digest}  {path.name}")


def run_notes(args: argparse.Namespace) -> None:
    """Print Markdown."""
    print(tag.notes(ROOT, args.tag), end="")


def run_publish(args: argparse.Namespace) -> None:
    """Print the address of the release."""
    if missing := [str(path) for path in args.files if not path.is_file()]:
        raise errors.UsageError(f"{missing[0]}: is no file; nothing was published")
    checked = "trained on GPUs" if args.gpu else "trained on the CPU; no GPU checked it"
    notes = f"{tag.notes(ROOT, args.tag)}\nBefore its release the image {checked}.\n"
    print(GitHub().publish_release(args.tag, notes, args.files))


def run_released(args: argparse.Namespace) -> None:
    """Print README's new text, or the address of the pull request with it."""
    last = released.write(ROOT, args.file, os.environ.get("GITHUB_REPOSITORY") or f"OWNER/{IMAGE}", args.tag)
    if last is None:
        print(f"{args.tag}: did not get the tag latest, so {released.PAGE} stays as it is")
        return
    try:
        with Registry(reference.pulled(f"{last.image}@{last.digest}", last.tag)[0]) as registry:
            registry.get(last.digest)
        if args.devcontainer:
            made = publish.read(args.devcontainer)["image"]
            devcontainer.write_prebuilt(ROOT, devcontainer.published(f"{made['repository']}@{made['digest']}"))
    except errors.RegistryError as error:
        raise errors.RegistryError(
            f"{error}. {released.PAGE} names what everybody can pull: make the package public in its settings on GitHub"
        ) from error
    if args.base is None:
        print(last.lines, end="")
        return
    branch, title = f"released/{last.tag}", f"Say how to pull and install {last.tag}"
    github = GitHub()
    upgrade.push(ROOT, branch, title, (released.FILE, released.PAGE, devcontainer.PREBUILT))
    print(github.upsert_pull(branch, args.base, title, last.lines))


def run_digest(args: argparse.Namespace) -> None:
    """Print ``digest=sha256:...``."""
    print(f"digest={publish.read(args.file)['image']['digest']}")


def run_devcontainer(args: argparse.Namespace) -> None:
    """Print the name of the file."""
    image = devcontainer.published(args.image)
    print(f"{devcontainer.write_prebuilt(ROOT, image).relative_to(ROOT)}: {image}")


def run_lock(args: argparse.Namespace) -> None:
    """Print nothing: git shows what changed."""
    if strange := sorted(set(args.group) - set(relock.GROUPS)):
        raise errors.UsageError(f"{strange[0]}: is no group; choose from {' '.join(relock.GROUPS)}")
    for group in relock.GROUPS:
        if not args.group or group in args.group:
            relock.lock(ROOT, group, *(["--upgrade"] if args.upgrade else []))


def run_upgrade(args: argparse.Namespace) -> None:
    """Print the table of the moves."""
    here = Workspace()
    with console.Reporter() as reporter, here.exclusive():
        moves = upgrade.upgrade(here, args.mirror, reporter)
    upgrade.save(args.folder, ROOT, moves)
    print("\n".join(move.line for move in moves) or "every pin is the newest release")


def run_validate(args: argparse.Namespace) -> None:
    """Exit 0 also where the validation failed: the pull request says so."""
    verdict = {}
    if upgrade.apply(args.folder, ROOT):
        commands = upgrade.checks(upgrade.load(args.folder), args.network)
        verdict = dict(zip(("passed", "said"), upgrade.validate(ROOT, commands), strict=True))
    files.write_json(args.folder / upgrade.VERDICT, verdict)
    print(verdict.get("said") or "nothing moved")


def run_propose(args: argparse.Namespace) -> None:
    """Print the address of the pull request, or that there is nothing to propose."""
    if not upgrade.apply(args.folder, ROOT):
        print("nothing to propose")
        return
    verdict = json.loads((args.folder / upgrade.VERDICT).read_text(encoding="utf-8"))
    github = GitHub()
    upgrade.push(ROOT, upgrade.BRANCH, upgrade.TITLE, upgrade.PINNED)
    body = upgrade.report(upgrade.load(args.folder), verdict)
    print(github.upsert_pull(upgrade.BRANCH, args.base, upgrade.TITLE, body))


def run_nightly(args: argparse.Namespace) -> int:
    """Exit 1 when our tests fail."""
    outcome = nightly.run(Workspace(), args.component, args.mirror)
    nightly.save(args.report, outcome)
    print(outcome.said)
    print(f"{outcome.component} {outcome.commit}: {'passed' if outcome.passed else 'failed'} ({outcome.seconds:.0f} s)")
    return 0 if outcome.passed else 1


def run_report(args: argparse.Namespace) -> None:
    """Print the address of the issue that was opened, updated or closed."""
    outcomes = nightly.load(args.outcomes)
    github = GitHub()
    if all(each.passed for each in outcomes):
        closed = github.close_issues("All that is tested at night passes again.", nightly.LABEL)
        print("\n".join(closed) or "all pass; no issue is open")
    else:
        print(github.upsert_issue(*nightly.issue(outcomes), nightly.LABEL))
