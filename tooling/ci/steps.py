"""``ci``: the steps of the GitHub workflows, which run here too; most check a tag before it is published."""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tooling.ci import relock
from tooling.core import errors
from tooling.core.console import Subparsers, command
from tooling.image import buildx, engine, reference, release, tags
from tooling.image.request import ImageSpec, add_options, from_options
from tooling.sources import manifest
from tooling.sources.workspace import ROOT

_TAG = re.compile(r"v\d+\.\d+\.\d+")
_DUNDER = re.compile(r"^__version__ = \"([^\"]+)\"$", re.MULTILINE)
PACKAGE = "multimesh/src/multimesh/__init__.py"


def register(subparsers: Subparsers) -> None:
    """Add the command and its parts."""
    text = "the steps of the GitHub workflows"
    parser = command(subparsers, "ci", run_preflight, text, ["python -m tooling ci versions v0.1.0"])
    parts = parser.add_subparsers(dest="part", metavar="STEP", required=True)

    text = "fail where a push or a promotion would, before anything is built: tag, rights, a version that is taken"
    part = command(parts, "preflight", run_preflight, text)
    part.add_argument("image", help="its repository, e.g. ghcr.io/OWNER/multimesh-jax")
    part.add_argument("--tag", required=True)
    part.add_argument("--latest", action="store_true")
    part.add_argument("--release", metavar="VERSION")
    text = "fail unless every file names the version of a tag, and its image is pinned"
    part = command(parts, "versions", run_versions, text)
    part.add_argument("tag")
    part.add_argument("options", nargs="*", help="after --: those of docker/build.py that the image gets")
    text = "print how to pull, run and install a release; GitHub adds what changed"
    part = command(parts, "notes", run_notes, text)
    part.add_argument("tag")
    part.add_argument("file", type=Path, help="the release.json of its image")
    part.add_argument("--gpu", action="store_true", help="its image was checked on a GPU")
    relock.add_step(parts)


def run_preflight(args: argparse.Namespace) -> None:
    """Print the tags that the image would get."""
    wanted = reference.make(args.image, None, args.tag)
    names = tags.tags(wanted, latest=args.latest, version=args.release)
    where = engine.detect()
    tags.check_push(where, wanted)
    tags.check_free(where, wanted, names)
    print(" ".join(names))


def run_versions(args: argparse.Namespace) -> None:
    """Print the version of the tag."""
    version = check_versions(ROOT, args.tag)
    parser = argparse.ArgumentParser("docker/build.py", allow_abbrev=False)
    add_options(parser)
    check_pins(ROOT, from_options(parser.parse_args(args.options)).spec)
    print(version)


def run_notes(args: argparse.Namespace) -> None:
    """Print Markdown."""
    print(notes(ROOT, args.tag, release.read(args.file), gpu=args.gpu), end="")


def versions(root: Path) -> dict[str, str]:
    """Return the version that each file of a clone names."""
    texts = {name: (root / name).read_text(encoding="utf-8") for name in relock.PROJECTS}
    found = {name: str(tomllib.loads(text)["project"]["version"]) for name, text in texts.items()}
    match = _DUNDER.search((root / PACKAGE).read_text(encoding="utf-8"))
    return found | {PACKAGE: match[1] if match else "none"}


def check_versions(root: Path, tag: str) -> str:
    """Return the version of a tag of ours, when every file of the clone names it; else raise ``UsageError``."""
    if not _TAG.fullmatch(tag):
        raise errors.UsageError(f"tag '{tag}': is not of the form v1.2.3")
    wrong = [f"{name} says {version}" for name, version in versions(root).items() if version != tag[1:]]
    if wrong:
        raise errors.UsageError(f"tag {tag}: {', '.join(wrong)}; change them, or tag the version that they name")
    return tag[1:]


def check_pins(root: Path, spec: ImageSpec) -> None:
    """Refuse a tag early, by the rule that its image would meet once it is built: a line for each pin that is null."""
    locks = release.load_locks(root)
    base = buildx.bases(spec, locks[1])
    platform = spec.platform or "linux/amd64"  # of GitHub's runners
    if said := release.null_pins(locks, base.unpinned, jaxlib_from_source=spec.jaxlib == "source", platform=platform):
        raise errors.SeveralErrors([f"no release: {line}" for line in said], errors.PinError.exit_code)


def notes(root: Path, tag: str, image: Mapping[str, Any], *, gpu: bool) -> str:
    """Return the first part of release notes: how to pull, run and install it, and which commits nobody told.

    ``image`` is the ``release.json`` of the image that runs; ``UsageError`` where that is of another version.
    """
    if image["version"] != tag or f"v{image['labels'].get(f'{buildx.OCI}.version')}" != tag:
        raise errors.UsageError(f"release.json is of version {image['version']}, not of {tag}; take that of its image")
    name, on_gpus = f"{image['image']['repository']}:{tag}", image["labels"][f"{buildx.LABEL}.accelerator"] != "cpu"
    how, job = ("--gpus all ", "validate-gpu.sh") if on_gpus else ("", "validate-cpu.sh")
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    wheel = f"{server}/{repository}/releases/download/{tag}/multimesh_jax-{tag[1:]}-py3-none-any.whl"
    install = f"pip install {wheel}\n" if server and repository else ""
    checked = "trained on GPUs" if gpu else "trained on the CPU; no GPU checked it"
    pins = manifest.load_lock(root / "sources.lock").items()
    unnamed = "".join(
        f"{name} {pin.version} is pinned by its bytes (tree {pin.tree}); the commit of its tag was read nowhere.\n\n"
        for name, pin in pins
        if pin.commit is None
    )
    return (
        f"```console\n{image['image']['pull']}\ndocker run --rm {how}{name} /opt/maxtext/{job}\n{install}```\n\n"
        f"Before its release the image {checked}.\n\n{unnamed}"
    )
