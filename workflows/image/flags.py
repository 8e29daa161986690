"""The options of ``docker/build.py``: those that go together, and the values that may reach an engine."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from workflows import errors
from workflows.image import network, reference
from workflows.image.spec import Actions, ImageSpec, Means, Request

T = TypeVar("T")
CUDA_VERSION = "12.8.1"
_IMAGES = {"dev": "dev", "opt": "runtime"}
_VERSION = r"\d{1,3}(\.\d{1,3}){1,3}"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"
_ADDRESS = r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,251}|\[[0-9A-Fa-f:]+\]):\d{1,5}"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    yes_or_no = argparse.BooleanOptionalAction
    add = parser.add_argument_group("name", "REPO:TAG, or REPO/NAME:TAG with --name").add_argument
    add("--repo", help="registry and owner; without it the image stays here, as multimesh-jax:TAG")
    add("--name", help="name below --repo")
    add("--tag", default="local", help="default: %(default)s")

    add = parser.add_argument_group("what is in it").add_argument
    add("--image", choices=_IMAGES, help="opt (default): what runs, no compilers; dev: with sources and tools")
    stages = ("devcontainer", "dev", "runtime")
    add("--stage", choices=stages, help="a stage of the Dockerfile, in place of --image")
    add("--framework", choices=["maxtext"], default="maxtext", help="MaxText is the only one")
    add("--accelerator", choices=("cuda12", "cpu"), default="cuda12", help="default: %(default)s")
    ways = ["wheel", "source"]
    add("--jaxlib", choices=ways, default="wheel", help="locked wheels (default), or built from third_party/")
    types = ("Release", "Debug", "RelWithDebInfo")
    add("--build-type", choices=types, default="Release", help="of a jaxlib from source; default: %(default)s")
    text = f"of the base image and of a jaxlib from source; default: {CUDA_VERSION}"
    add("--cuda-version", metavar="X.Y.Z", help=text)
    add("--cudnn-version", metavar="X.Y.Z", help="of a jaxlib from source")
    add("--base-image", metavar="IMAGE", help="in place of the pinned bases; any Debian or Ubuntu")
    add("--platform", choices=("linux/amd64", "linux/arm64"), help="default: the engine's")
    text = "a standalone Python >= 3.12 (.tar.gz) for a base whose own is older; default: fetch the pinned one"
    add("--python-archive", metavar="FILE", type=Path, help=text)

    add = parser.add_argument_group(
        "how the build reaches what it needs; nothing of this stays in the image"
    ).add_argument
    text = "pip.conf for the build; default: where your own pip looks for packages"
    add("--pip-config", metavar="FILE", type=Path, help=text)
    text = "certificates to trust; default: those that your pip is told to trust"
    add("--ca-bundle", metavar="FILE", type=Path, help=text)
    add("--network", choices=["default", "host"], default="default", help="of the build's steps; default: %(default)s")
    add("--no-docker-build-cache", action="store_false", dest="layer_cache", help="build every layer anew")
    add("--cache", action=yes_or_no, help="use a remote Bazel cache with --jaxlib source")
    text = "where that is; default: the one of start-cache.sh, if it runs"
    add("--bazel-cache", "--cache-addr", metavar="HOST:PORT", help=text)
    add("--bazel-cache-write", action="store_true", help="also store results there")

    add = parser.add_argument_group("what is done with it").add_argument
    text = "--no-build takes the image that the engine has under this name"
    add("--build", action=yes_or_no, default=True, help=text)
    add("--commit", metavar="CONTAINER", help="make the image of a running devcontainer instead of building")
    text = "small (default): the CPU job in the container; medium: the GPU job; large: the llama3-8b Slurm job"
    add("--validate", choices=("small", "medium", "large"), default="small", help=text)
    add("--upload", action="store_true", help="push it when it passed its check")
    add("--latest", action="store_true", help="also give it the tag latest")
    text = "--no-promote pushes under a staging tag only; `python -m workflows promote` moves the others later"
    add("--promote", action=yes_or_no, default=True, help=text)
    text = "also the tags vX.Y.Z and vX.Y; refuses pins that are null and dirty trees"
    add("--release", metavar="VERSION", help=text)
    text = "attach to what is pushed: provenance; sbom: that and an SBOM; default: sbom where the builder can"
    add("--attest", choices=("none", "provenance", "sbom"), help=text)
    text = "makes the SBOM for BuildKit; default: the one in images.lock"
    add("--sbom-scanner", metavar="IMAGE", dest="scanner", help=text)
    add("--sign-key", metavar="KEY", help="sign the digest with cosign: a file, or env://NAME")
    add("--release-file", metavar="FILE", type=Path, help="what was pushed; default: build/image/release.json")
    add("--remote", metavar="NAME", help="build on the engine of this docker context, and bring the image here")
    add("--save-remote", action="store_true", help="leave the image on the --remote engine")
    add("--skip-save", action="store_true", help="build into the engine's cache only; no image")
    add("--dry-run", action="store_true", help="print the exact commands; touch nothing")
    add("--json", action="store_true", help="print the result as JSON on stdout")


def request(args: argparse.Namespace) -> Request:
    """Return the request of parsed options. ``UsageError``: they do not fit together, or may not reach an engine."""
    _check_together(args)
    _check_values(args)
    name = reference.make(args.repo, args.name, args.tag)
    target, version = args.stage or _IMAGES[args.image or "opt"], args.cuda_version or CUDA_VERSION
    return Request(
        _taken(ImageSpec, args, reference=name, target=target, cuda_version=version),
        _taken(Means, args, use_bazel_cache=args.cache is not False),
        _taken(Actions, args),
    )


def _taken(kind: type[T], args: argparse.Namespace, **given: object) -> T:
    """Return a dataclass whose fields are options of the same name, or given."""
    return kind(**{each.name: given.get(each.name, getattr(args, each.name, None)) for each in fields(kind)})  # type: ignore[arg-type]


def _check_together(args: argparse.Namespace) -> None:
    """Refuse options that nobody can mean, before anything happens."""
    wheel, attests = args.jaxlib == "wheel", args.attest in ("provenance", "sbom")

    def refuse(refused: object, reason: str) -> None:
        if refused:
            raise errors.UsageError(reason)

    other = args.image and args.stage and args.stage != _IMAGES[args.image]
    refuse(other, f"--image {args.image} is the stage {_IMAGES.get(args.image)}, --stage says {args.stage}; give one")
    refuse(wheel and args.cudnn_version, "--cudnn-version: cuDNN comes with the locked wheels; add --jaxlib source")
    refuse(
        wheel and args.build_type != "Release",
        f"--build-type {args.build_type}: the locked wheels are Release builds; add --jaxlib source",
    )
    refuse(
        wheel and (args.bazel_cache or args.cache or args.bazel_cache_write),
        "a Bazel cache serves --jaxlib source only; add it, or leave the cache out",
    )
    refuse(args.cache is False and args.bazel_cache, "--no-cache and --bazel-cache contradict each other; give one")
    refuse(
        args.accelerator == "cpu" and args.cuda_version,
        "--cuda-version: an image for the CPU has no CUDA; leave it out, or take --accelerator cuda12",
    )
    refuse(
        args.base_image and args.cuda_version and wheel,
        "--cuda-version chooses the base image, and --base-image replaces it; give one",
    )
    refuse(args.upload and not args.repo, "--upload: where to? Add --repo, e.g. --repo ghcr.io/OWNER/multimesh-jax")
    refuse(args.latest and not args.repo, "--latest marks an image in a registry; add --repo")
    refuse(args.release and args.commit, "--release: a container is not made from pins alone; leave out --commit")
    refuse(
        attests and (args.commit or args.remote or not args.build),
        f"--attest {args.attest}: attestations come with a build that is pushed from its own engine; "
        "leave out --commit, --remote and --no-build",
    )
    refuse(
        args.scanner and args.attest in ("none", "provenance"),
        f"--sbom-scanner makes an SBOM and --attest {args.attest} says not to; give one",
    )
    for given, what in (
        (args.release, "--release releases what is pushed"),
        (args.sign_key, "--sign-key signs what is pushed"),
        (attests, f"--attest {args.attest} attaches to what is pushed"),
        (args.scanner, "--sbom-scanner looks at what is pushed"),
        (not args.promote, "--no-promote pushes without moving tags"),
    ):
        refuse(given and not args.upload, f"{what}; add --upload")
    refuse(
        not args.promote and (args.latest or args.release),
        "--no-promote moves no tag, --latest and --release do; give them to `python -m workflows promote`",
    )
    refuse(args.save_remote and not args.remote, "--save-remote: there is no remote engine; add --remote NAME")
    refuse(
        args.skip_save and (args.upload or args.latest or args.save_remote),
        "--skip-save leaves no image to push, tag or save; give one",
    )
    refuse(args.skip_save and args.commit, "--skip-save builds into the cache, and --commit builds nothing; give one")
    refuse(
        args.save_remote and args.upload,
        "--save-remote and --upload contradict each other: an image is pushed from here; give one",
    )
    refuse(args.commit and not args.build, "--commit makes an image and --no-build says not to; give one")
    refuse(not args.build and args.skip_save, "--no-build and --skip-save leave nothing to do")


def _check_values(args: argparse.Namespace) -> None:
    for flag, value, pattern, wanted in (
        ("--cuda-version", args.cuda_version, _VERSION, "numbers with dots, e.g. 12.8.1"),
        ("--cudnn-version", args.cudnn_version, _VERSION, "numbers with dots, e.g. 9.8.0"),
        ("--commit", args.commit, _NAME, "the name or id of a container"),
        ("--remote", args.remote, _NAME, "the name of a docker context; `docker context ls` shows them"),
        ("--bazel-cache", args.bazel_cache, _ADDRESS, "HOST:PORT, e.g. 127.0.0.1:9090"),
    ):
        if value is not None and not re.fullmatch(pattern, value):
            raise errors.UsageError(f"{flag} {value[:80]!r}: not {wanted}")
    for flag, image in (("--base-image", args.base_image), ("--sbom-scanner", args.scanner)):
        try:
            reference.check_image("x" if image is None else image)
        except errors.UsageError as error:
            shown = image.rpartition("@")[2]
            raise errors.UsageError(f"{flag} {shown[:80]!r}: not the name of an image ({error})") from None
    for flag in ("pip_config", "ca_bundle", "python_archive"):
        path, flag = getattr(args, flag), f"--{flag.replace('_', '-')}"
        if path is not None and not path.is_file():
            raise errors.UsageError(f"{flag} {path}: there is no such file")
        if path is not None and not network.fits_an_option(path):
            raise errors.UsageError(f"{flag} {path}: the engine cannot take a path with a comma or a quote; rename it")
