"""``ci``: the steps of the GitHub workflows, each of which can be run here too."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

from workflows import console, errors, files, helping
from workflows.ci import nightly, released, tag, upgrade
from workflows.ci.github import GitHub, where
from workflows.image import devcontainer, flags, publish, reference
from workflows.image.registry import Registry
from workflows.sources.workspace import workspace

REGISTRY, IMAGE = "ghcr.io", "multimesh-jax"
_OWNER = re.compile(r"[A-Za-z0-9](-?[A-Za-z0-9])*")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its parts."""
    parser = subparsers.add_parser(
        "ci",
        **helping.shown(
            "the steps of the GitHub workflows",
            "python -m workflows ci wheel dist",
        ),
    )
    parts = parser.add_subparsers(dest="part", metavar="STEP", required=True)

    def add(name: str, func: object, help_: str) -> argparse.ArgumentParser:
        part = parts.add_parser(name, help=help_, description=help_)
        part.set_defaults(func=func)
        return part

    part = add("image-name", run_image_name, "print the image of a repository owner, as registries want it")
    part.add_argument(
        "--owner", default=os.environ.get("GITHUB_REPOSITORY_OWNER", ""), help="default: that of this run"
    )
    part.add_argument(
        "--registry", default=os.environ.get("MULTIMESH_REGISTRY") or REGISTRY, help="default: %(default)s"
    )
    part = add("versions", run_versions, "fail unless every file names the version of a tag, and its image is pinned")
    part.add_argument("tag")
    part.add_argument("options", nargs="*", help="after --: those of docker/build.py that the image gets")
    part = add("wheel", run_wheel, "build every wheel twice, check it, print its sha256")
    part.add_argument("folder", type=Path, nargs="?", default=Path("dist"))
    part = add("notes", run_notes, "print release notes from the commits since the tag before")
    part.add_argument("tag")
    part = add("publish", run_publish, "make the GitHub release of a tag, with files; it shows once it is whole")
    part.add_argument("tag")
    part.add_argument("files", type=Path, nargs="+")
    part.add_argument("--gpu", action="store_true", help="its image was checked on a GPU")
    part = add("released", run_released, "write a release down: README then says how to pull, run and install it")
    part.add_argument("tag")
    part.add_argument("file", type=Path, help="the release.json of its image")
    part.add_argument(
        "--devcontainer", metavar="FILE", type=Path, help="the release.json of that, to pull it from now on"
    )
    part.add_argument("--base", metavar="BRANCH", help="also open a pull request against it")
    part = add("digest", run_digest, "print the digest in a release.json as an output of a workflow step")
    part.add_argument("file", type=Path)
    part = add("devcontainer", run_devcontainer, "write .devcontainer/prebuilt, which pulls a published devcontainer")
    part.add_argument("image", metavar="REPO@DIGEST", help="as the image workflow or docker/build.py pushed it")
    part = add("upgrade", run_upgrade, "move every pin to the newest release; nothing of what moved is run")
    part.add_argument("folder", type=Path, help="where the moved pins go, as a patch")
    _mirror_option(part)
    part = add("validate", run_validate, "train on the moved pins, build images on moved bases; write the verdict")
    part.add_argument("folder", type=Path, help="what `upgrade` wrote; the verdict goes there too")
    part.add_argument("--network", choices=("default", "host"), help="of the build of an image on a new base image")
    part = add("propose", run_propose, "push the moved pins to a branch and open or update its pull request")
    part.add_argument("folder", type=Path, help="what `upgrade` and `validate` wrote")
    part.add_argument("--base", default=os.environ.get("GITHUB_REF_NAME", "main"), help="default: %(default)s")
    part = add("nightly", run_nightly, "run our tests against the head of jax or MaxText")
    part.add_argument("component", choices=("jax", "maxtext"))
    part.add_argument("--report", type=Path, required=True, help="where the outcome goes")
    _mirror_option(part)
    part = add("report", run_report, "open or update the one issue about failing heads, or close it")
    part.add_argument("outcomes", type=Path, nargs="+", help="what `nightly` wrote")


def _mirror_option(part: argparse.ArgumentParser) -> None:
    mirror = os.environ.get("MULTIMESH_MIRROR") or None
    part.add_argument("--mirror", metavar="URL", default=mirror, help="ask URL/NAME.git (default: MULTIMESH_MIRROR)")


def run_image_name(args: argparse.Namespace) -> int:
    """Print ``registry/owner/multimesh-jax`` in lower case."""
    if not _OWNER.fullmatch(args.owner):
        raise errors.UsageError(
            f"owner '{args.owner}': is no GitHub account; give --owner or set GITHUB_REPOSITORY_OWNER"
        )
    print(f"{args.registry}/{args.owner}/{IMAGE}".lower())
    return 0


def run_versions(args: argparse.Namespace) -> int:
    """Print the version of the tag."""
    here = workspace()
    version = tag.check_versions(here.root, args.tag)
    parser = argparse.ArgumentParser("docker/build.py", allow_abbrev=False)
    flags.add(parser)
    tag.check_pins(here.root, flags.request(parser.parse_args(args.options)).spec)
    print(version)
    return 0


def run_wheel(args: argparse.Namespace) -> int:
    """Print sha256 and name of each, as sha256sum does."""
    for path, digest in tag.build_wheels(workspace().root, args.folder.resolve()):
        print(f"{digest}  {path.name}")
    return 0


def run_notes(args: argparse.Namespace) -> int:
    """Print Markdown."""
    print(tag.notes(workspace().root, args.tag), end="")
    return 0


def run_publish(args: argparse.Namespace) -> int:
    """Print the address of the release."""
    if missing := [str(path) for path in args.files if not path.is_file()]:
        raise errors.UsageError(f"{missing[0]}: is no file; nothing was published")
    checked = "trained on GPUs" if args.gpu else "trained on the CPU; no GPU checked it"
    notes = f"{tag.notes(workspace().root, args.tag)}\nBefore its release the image {checked}.\n"
    print(GitHub(where()).publish_release(args.tag, notes, args.files))
    return 0


def run_released(args: argparse.Namespace) -> int:
    """Print what README now says, or the address of the pull request that makes it say so."""
    root = workspace().root
    last = released.write(root, args.file, os.environ.get("GITHUB_REPOSITORY") or f"OWNER/{IMAGE}", args.tag)
    if last is None:
        print(f"{args.tag}: did not get the tag latest, so {released.PAGE} stays as it is")
        return 0
    pull = f"{last.image}@{last.digest}"
    try:
        with Registry(reference.pulled(pull, last.tag)[0]) as registry:
            registry.get(last.digest)
        if args.devcontainer:
            made = publish.read(args.devcontainer)["image"]
            devcontainer.write_prebuilt(root, devcontainer.published(f"{made['repository']}@{made['digest']}"))
    except errors.RegistryError as error:
        raise errors.RegistryError(
            f"{error}. {released.PAGE} names what everybody can pull: make the package public in its settings on GitHub"
        ) from error
    if args.base is None:
        print(last.lines, end="")
        return 0
    branch, title = f"released/{last.tag}", f"Say how to pull and install {last.tag}"
    github = GitHub(where())
    upgrade.push(root, branch, title, (released.FILE, released.PAGE, devcontainer.PREBUILT))
    print(github.upsert_pull(branch, args.base, title, last.lines))
    return 0


def run_digest(args: argparse.Namespace) -> int:
    """Print ``digest=sha256:...``."""
    print(f"digest={publish.read(args.file)['image']['digest']}")
    return 0


def run_devcontainer(args: argparse.Namespace) -> int:
    """Print what was written."""
    root, image = workspace().root, devcontainer.published(args.image)
    print(f"{devcontainer.write_prebuilt(root, image).relative_to(root)}: {image}")
    return 0


def run_upgrade(args: argparse.Namespace) -> int:
    """Print the table of the moves."""
    here = workspace()
    with console.Reporter() as reporter, here.exclusive():
        moves = upgrade.upgrade(here, args.mirror, reporter)
    upgrade.save(args.folder, here.root, moves)
    print("\n".join(move.line for move in moves) or "every pin is the newest release")
    return 0


def run_validate(args: argparse.Namespace) -> int:
    """Exit 0 also where the validation failed: the pull request says so."""
    root, verdict = workspace().root, {}
    if upgrade.apply(args.folder, root):
        commands = upgrade.checks(upgrade.load(args.folder), args.network)
        verdict = dict(zip(("passed", "said"), upgrade.validate(root, commands), strict=True))
    files.write_json(args.folder / upgrade.VERDICT, verdict)
    print(verdict.get("said") or "nothing moved")
    return 0


def run_propose(args: argparse.Namespace) -> int:
    """Print the address of the pull request, or that there is nothing to propose."""
    root = workspace().root
    if not upgrade.apply(args.folder, root):
        print("nothing to propose")
        return 0
    verdict = json.loads((args.folder / upgrade.VERDICT).read_text(encoding="utf-8"))
    github = GitHub(where())
    upgrade.push(root, upgrade.BRANCH, upgrade.TITLE, upgrade.PINNED)
    print(
        github.upsert_pull(upgrade.BRANCH, args.base, upgrade.TITLE, upgrade.report(upgrade.load(args.folder), verdict))
    )
    return 0


def run_nightly(args: argparse.Namespace) -> int:
    """Exit 1 when our tests fail against the head."""
    outcome = nightly.run(workspace(), args.component, args.mirror)
    nightly.save(args.report, outcome)
    print(outcome.said)
    print(f"{outcome.component} {outcome.commit}: {'passed' if outcome.passed else 'failed'} ({outcome.seconds:.0f} s)")
    return 0 if outcome.passed else 1


def run_report(args: argparse.Namespace) -> int:
    """Print the address of the issue that was opened, updated or closed."""
    outcomes = nightly.load(args.outcomes)
    github = GitHub(where())
    if all(each.passed for each in outcomes):
        closed = github.close_issues("The heads pass our tests again.", nightly.LABEL)
        print("\n".join(closed) or "all heads pass; no issue is open")
    else:
        print(github.upsert_issue(*nightly.issue(outcomes), nightly.LABEL))
    return 0
