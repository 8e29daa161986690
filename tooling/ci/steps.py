"""``promote``, and ``ci``: the steps of the GitHub workflows, which run here too; most check a tag beforehand."""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from pathlib import Path

from tooling.core import errors, files
from tooling.core.console import Subparsers, command
from tooling.core.files import ROOT
from tooling.image import build, pipeline, reference, release
from tooling.image.reference import LABEL, OCI
from tooling.image.registry import Registry
from tooling.image.snapshot import Snapshot
from tooling.sources import manifest

PACKAGE = "multimesh/src/multimesh/__init__.py"
PROJECTS = tuple(f"{folder}pyproject.toml" for folder in ("", "multimesh/", "planner/", "numerics/", "maxtext/"))


def register(subparsers: Subparsers) -> None:
    """Add the commands."""
    text = "give public tags to an image that was pushed with --no-promote"
    examples = [".venv/bin/python -m tooling promote ghcr.io/OWNER/multimesh-jax@sha256:... --tag main"]
    part = command(subparsers, "promote", run_promote, text, examples)
    add_tags(part, "REPO@DIGEST", "as `docker/build.py --no-promote` printed it")

    text = "the steps of the GitHub workflows"
    parser = command(subparsers, "ci", run_preflight, text, [".venv/bin/python -m tooling ci versions v0.1.0"])
    parts = parser.add_subparsers(dest="part", metavar="STEP", required=True)
    text = "fail where a push or a promotion would, before anything is built: tag, rights, a version that is taken"
    add_tags(command(parts, "preflight", run_preflight, text), "REPO", "e.g. ghcr.io/OWNER/multimesh-jax")
    text = "fail unless every file names the version of a tag, and its image is pinned"
    part = command(parts, "versions", run_versions, text)
    part.add_argument("tag")
    part.add_argument("options", nargs="*", help="after --: those of docker/build.py that the image gets")
    text = "print how to pull, run and install a release; GitHub adds what changed"
    part = command(parts, "notes", run_notes, text)
    part.add_argument("tag")
    part.add_argument("file", type=Path, help="the release.json of its image")
    part.add_argument("--gpu", action="store_true", help="its image was checked on a GPU")


def add_tags(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """Add an image and the options that give it tags."""
    parser.add_argument("image", metavar=metavar, help=text)
    parser.add_argument("--tag", required=True, help="the tag that it gets")
    parser.add_argument("--latest", action="store_true", help="also latest; with --release")
    parser.add_argument("--release", metavar="VERSION", help="also vX.Y.Z and vX.Y, under the conditions of a release")


def run_promote(args: argparse.Namespace) -> None:
    """Move the tags of an image that passed its check; print their old digests."""
    repository, _, digest = args.image.rpartition("@")  # a password may be before another
    if not re.fullmatch(reference.DIGEST, digest):
        raise errors.OptionError(f"{digest!r} is not a digest; expected sha256: and 64 hexadecimal digits")
    name = reference.make(repository, None, args.tag)
    names, registry = reference.list_tags(name, latest=args.latest, version=args.release), Registry(name.repository)
    labels = registry.check_pushed_here(digest)
    if args.release:
        release.check_release(args.release, labels, release.load_locks(ROOT), tag=name.tag, latest=args.latest)
    for move in registry.promote(digest, names):
        print(f"{move['tag']}: {move['digest']} (before: {move['before'] or 'no such tag'})")


def run_preflight(args: argparse.Namespace) -> None:
    """Print the tags that the image would get."""
    name = reference.make(args.image, None, args.tag)
    names, registry = reference.list_tags(name, latest=args.latest, version=args.release), Registry(name.repository)
    registry.check_push()
    registry.check_free(names)
    print(" ".join(names))


def run_versions(args: argparse.Namespace) -> None:
    """Print the version of the tag, whose files agree and whose image is pinned: by the rule that a release meets."""
    version = args.tag.removeprefix("v")
    if not re.fullmatch(r"v\d+\.\d+\.\d+", args.tag):
        raise errors.OptionError(f"tag '{args.tag}': is not of the form v1.2.3")
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in (*PROJECTS, PACKAGE)}
    match = re.search(r"(?m)^__version__ = \"([^\"]+)\"$", texts.pop(PACKAGE))
    versions = {name: str(tomllib.loads(text)["project"]["version"]) for name, text in texts.items()}
    versions[PACKAGE] = match[1] if match else "none"
    if wrong := [f"{name} says {other}" for name, other in versions.items() if other != version]:
        raise errors.OptionError(f"tag {args.tag}: {', '.join(wrong)}; change them, or tag the version that they name")
    request, locks = pipeline.parse(args.options), release.load_locks(ROOT)
    bases = build.choose_bases(request, locks[1])
    python = build.make_arguments(request, locks[1], bases)["PYTHON_SHA256"]
    labels = build.make_labels(ROOT, request, bases, Snapshot("committed", "pinned"), python)
    release.check_release(version, labels, locks, tag=f"{request.target}-{version}", latest=False)
    print(version)


def run_notes(args: argparse.Namespace) -> None:
    """Print the first part of release notes: how to pull, run and install it, and which commits nobody told."""
    tag, image = args.tag, files.read_document(args.file, release.SCHEMA, "docker/build.py --upload writes it")
    if (version := image["labels"].get(f"{OCI}.version")) != tag[1:]:
        raise errors.OptionError(f"release.json is of version {version}, not of {tag}; take that of its image")
    name, on_gpus = f"{image['image']['repository']}:{tag}", image["labels"][f"{LABEL}.accelerator"] != "cpu"
    how, job = ("--gpus all ", "validate-gpu.sh") if on_gpus else ("", "validate-cpu.sh")
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    wheel = f"{server}/{repository}/releases/download/{tag}/multimesh_jax-{tag[1:]}-py3-none-any.whl"
    install = f"pip install {wheel}\n" if server and repository else ""
    checked = "trained on GPUs" if args.gpu else "trained on the CPU; no GPU checked it"
    unnamed = "".join(
        f"{name} {pin.version} is pinned by its bytes (tree {pin.tree}); the commit of its tag was read nowhere.\n\n"
        for name, pin in manifest.load_lock(ROOT / "sources.lock").items()
        if pin.commit is None
    )
    print(f"```console\n{image['image']['pull']}\ndocker run --rm {how}{name} /opt/maxtext/{job}\n{install}```\n")
    print(f"Before its release the image {checked}.\n\n{unnamed}", end="")
