"""``promote``, and ``ci``: the steps of the GitHub workflows, which run here too; most check a tag beforehand."""

from __future__ import annotations

import argparse
import os
import re
import tomllib

from tooling.core import errors, files
from tooling.core.files import ROOT
from tooling.image import build, pipeline, reference, release
from tooling.image.reference import LABEL, OCI
from tooling.image.registry import Registry
from tooling.image.snapshot import Snapshot
from tooling.sources import manifest

PACKAGE = "multimesh/src/multimesh/__init__.py"
PROJECTS = tuple(f"{folder}pyproject.toml" for folder in ("", "multimesh/", "planner/", "numerics/", "maxtext/"))


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
