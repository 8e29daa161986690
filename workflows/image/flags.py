"""The options of ``docker/build.py``: the original's, and those that it lacks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from workflows import errors
from workflows.image import reference, rules
from workflows.image.spec import (
    ACCELERATORS,
    ATTESTATIONS,
    BUILD_TYPES,
    PLATFORMS,
    TARGETS,
    VALIDATIONS,
    Actions,
    ImageSpec,
    Means,
)

T = TypeVar("T")
CUDA_VERSION = "12.8.1"
_IMAGES = {"dev": "dev", "opt": "runtime"}


@dataclass(frozen=True)
class Request:
    """All that one command line asks for."""

    spec: ImageSpec
    means: Means
    actions: Actions


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    _naming(parser.add_argument_group("name", "REPO:TAG, or REPO/NAME:TAG with --name"))
    _contents(parser.add_argument_group("what is in it"))
    _reach(parser.add_argument_group("how the build reaches what it needs; nothing of this stays in the image"))
    _doing(parser.add_argument_group("what is done with it"))


def request(args: argparse.Namespace) -> Request:
    """Return what parsed options ask for.

    Raises
    ------
    UsageError
        Options that do not fit together, or a value that may not reach an engine.
    """
    rules.check(args)
    return Request(
        _taken(
            ImageSpec,
            args,
            reference=reference.make(args.repo, args.name, args.tag),
            target=_target(args),
            cuda_version=args.cuda_version or CUDA_VERSION,
        ),
        _taken(Means, args, use_bazel_cache=args.cache is not False),
        _taken(Actions, args),
    )


def _taken(kind: type[T], args: argparse.Namespace, **given: object) -> T:
    """Return a dataclass whose fields are options of the same name, or given."""
    return kind(**{each.name: given.get(each.name, getattr(args, each.name, None)) for each in fields(kind)})  # type: ignore[arg-type]


def _naming(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--repo", help="registry and owner; without it the image stays here, as multimesh-jax:TAG")
    group.add_argument("--name", help="name below --repo")
    group.add_argument("--tag", default="local", help="default: %(default)s")


def _contents(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--image", choices=_IMAGES, help="opt (default): what runs, no compilers; dev: with sources and tools"
    )
    group.add_argument("--stage", choices=TARGETS, help="a stage of the Dockerfile, in place of --image")
    group.add_argument("--framework", choices=["maxtext"], default="maxtext", help="MaxText is the only one")
    group.add_argument("--accelerator", choices=ACCELERATORS, default="cuda12", help="default: %(default)s")
    group.add_argument(
        "--jaxlib",
        choices=["wheel", "source"],
        default="wheel",
        help="locked wheels (default), or built from third_party/",
    )
    group.add_argument(
        "--build-type", choices=BUILD_TYPES, default="Release", help="of a jaxlib from source; default: %(default)s"
    )
    group.add_argument(
        "--cuda-version",
        metavar="X.Y.Z",
        help=f"of the base image and of a jaxlib from source; default: {CUDA_VERSION}",
    )
    group.add_argument("--cudnn-version", metavar="X.Y.Z", help="of a jaxlib from source")
    group.add_argument("--base-image", metavar="IMAGE", help="in place of the pinned bases; any Debian or Ubuntu")
    group.add_argument("--platform", choices=PLATFORMS, help="default: the engine's")
    group.add_argument(
        "--python-archive",
        metavar="FILE",
        type=Path,
        help="a standalone Python >= 3.11 (.tar.gz) for a base whose own is older; default: fetch the pinned one",
    )


def _reach(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--pip-config",
        metavar="FILE",
        type=Path,
        help="pip.conf for the build; default: where your own pip looks for packages",
    )
    group.add_argument(
        "--ca-bundle",
        metavar="FILE",
        type=Path,
        help="certificates to trust; default: those that your pip is told to trust",
    )
    group.add_argument(
        "--network", choices=["default", "host"], default="default", help="of the build's steps; default: %(default)s"
    )
    group.add_argument(
        "--no-docker-build-cache", action="store_false", dest="layer_cache", help="build every layer anew"
    )
    group.add_argument(
        "--cache", action=argparse.BooleanOptionalAction, help="use a remote Bazel cache with --jaxlib source"
    )
    group.add_argument(
        "--bazel-cache",
        "--cache-addr",
        metavar="HOST:PORT",
        help="where that is; default: the one of start-cache.sh, if it runs",
    )
    group.add_argument("--bazel-cache-write", action="store_true", help="also store results there")


def _doing(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--build",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="--no-build takes the image that the engine has under this name",
    )
    group.add_argument(
        "--commit", metavar="CONTAINER", help="make the image of a running devcontainer instead of building"
    )
    group.add_argument(
        "--validate",
        choices=VALIDATIONS,
        default="small",
        help="small (default): the CPU job in the container; medium: the GPU job; large: the llama3-8b Slurm job",
    )
    group.add_argument("--upload", action="store_true", help="push it when it passed its check")
    group.add_argument("--latest", action="store_true", help="also give it the tag latest")
    group.add_argument(
        "--promote",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="--no-promote pushes under a staging tag only; `python -m workflows promote` moves the others later",
    )
    group.add_argument(
        "--release", metavar="VERSION", help="also the tags vX.Y.Z and vX.Y; refuses pins that are null and dirty trees"
    )
    group.add_argument(
        "--attest",
        choices=ATTESTATIONS,
        help="attach to what is pushed: provenance; sbom: that and an SBOM; default: sbom where the builder can",
    )
    group.add_argument(
        "--sbom-scanner",
        metavar="IMAGE",
        dest="scanner",
        help="makes the SBOM for BuildKit; default: the one in images.lock",
    )
    group.add_argument("--sign-key", metavar="KEY", help="sign the digest with cosign: a file, or env://NAME")
    group.add_argument(
        "--release-file", metavar="FILE", type=Path, help="what was pushed; default: build/image/release.json"
    )
    group.add_argument(
        "--remote", metavar="NAME", help="build on the engine of this docker context, and bring the image here"
    )
    group.add_argument("--save-remote", action="store_true", help="leave the image on the --remote engine")
    group.add_argument("--skip-save", action="store_true", help="build into the engine's cache only; no image")
    group.add_argument("--dry-run", action="store_true", help="print the exact commands; touch nothing")
    group.add_argument("--json", action="store_true", help="print the result as JSON on stdout")


def _target(args: argparse.Namespace) -> str:
    if args.stage and args.image and args.stage != _IMAGES[args.image]:
        raise errors.UsageError(
            f"--image {args.image} is the stage {_IMAGES[args.image]}, --stage says {args.stage}; give one"
        )
    return str(args.stage or _IMAGES[args.image or "opt"])
