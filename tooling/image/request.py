"""The options of ``docker/build.py``, and the request that they make: plain data, checked once."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

from tooling.core import errors
from tooling.image import reference
from tooling.image.reference import Reference

CUDA_VERSION, CACHE_PORT = "12.8.1", 9090
_IMAGES = {"dev": "dev", "opt": "runtime"}
_STAGES = {"devcontainer": "devcontainer", "dev": "dev", "runtime": "runtime", "final_image": "runtime"}
_VERSION = r"\d{1,3}(\.\d{1,3}){1,3}"
_ADDRESS = r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,251}|\[[0-9A-Fa-f:]+\])(:\d{1,5})?"


class Request(NamedTuple):
    """All that one command line asks for. The image gets ``reference``, its public name, when it has passed its check.

    None for ``platform`` is the engine's own; for versions and ``base_image``, what is pinned.
    """

    reference: Reference
    # What decides the bytes of the image.
    target: str = "runtime"
    accelerator: str = "cuda12"
    jaxlib: str = "wheel"
    cuda_version: str = CUDA_VERSION
    cudnn_version: str | None = None
    build_type: str = "Release"
    base_image: str | None = None
    platform: str | None = None
    python_archive: Path | None = None
    # How the build reaches packages and sources. Nothing of this stays in the image.
    pip_config: Path | None = None
    ca_bundle: Path | None = None
    network: str = "default"
    layer_cache: bool = True
    use_bazel_cache: bool = True
    bazel_cache: str | None = None
    bazel_cache_write: bool = False
    # The steps after the build.
    build: bool = True
    validate: str = "small"
    upload: bool = False
    allow_dirty: bool = False
    latest: bool = False
    promote: bool = True
    release: str | None = None
    release_file: Path | None = None
    dry_run: bool = False
    json: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    yes_or_no = argparse.BooleanOptionalAction
    add = parser.add_argument_group("name", "REPO:TAG, or REPO/NAME:TAG with --name").add_argument
    add("--repo", help="registry and owner; without it the image stays here, as multimesh-jax:TAG")
    add("--name", help="name below --repo")
    add("--tag", default="local", help="default: %(default)s")

    add = parser.add_argument_group("what is in it").add_argument
    text = "opt (default; the original's was dev): what runs, no compilers; dev: with sources and tools"
    add("--image", choices=_IMAGES, help=text)
    text = "a stage of the Dockerfile, in place of --image; final_image is the original's name of runtime"
    add("--stage", choices=_STAGES, help=text)
    add("--accelerator", choices=("cuda12", "cpu"), default="cuda12", help="default: %(default)s")
    text = "locked wheels (default), or built from third_party/"
    add("--jaxlib", choices=("wheel", "source"), default="wheel", help=text)
    types = ("Release", "Debug", "RelWithDebInfo")
    add("--build-type", choices=types, default="Release", help="of a jaxlib from source; default: %(default)s")
    text = f"of the base image and of a jaxlib from source; default: {CUDA_VERSION}"
    add("--cuda-version", metavar="X.Y.Z", help=text)
    add("--cudnn-version", metavar="X.Y.Z", help="of a jaxlib from source")
    add("--base-image", metavar="IMAGE", help="in place of the pinned bases; any Debian or Ubuntu")
    add("--platform", choices=("linux/amd64", "linux/arm64"), help="default: the engine's")
    text = "a standalone Python >= 3.12 (.tar.gz) for a base whose own is older; default: fetch the pinned one"
    add("--python-archive", metavar="FILE", type=Path, help=text)

    add = parser.add_argument_group("how the build reaches what it needs; nothing of this stays in it").add_argument
    text = "pip.conf for the build, such as ~/.config/pip/pip.conf; default: $PIP_CONFIG_FILE"
    add("--pip-config", metavar="FILE", type=Path, help=text)
    text = "certificates to trust; default: $PIP_CERT, $REQUESTS_CA_BUNDLE, $SSL_CERT_FILE or $CURL_CA_BUNDLE"
    add("--ca-bundle", metavar="FILE", type=Path, help=text)
    add("--network", choices=["default", "host"], default="default", help="of the build's steps; default: %(default)s")
    add("--no-docker-build-cache", action="store_false", dest="layer_cache", help="build every layer anew")
    text = "use a remote Bazel cache (default); only --jaxlib source builds with Bazel, and a release uses none"
    add("--cache", action=yes_or_no, default=True, dest="use_bazel_cache", help=text)
    text = f"where that is; default: the one of start-cache.sh, if it runs; default of PORT: {CACHE_PORT}"
    add("--bazel-cache", "--cache-addr", metavar="HOST[:PORT]", help=text)
    add("--bazel-cache-write", action="store_true", help="also store results there")

    add = parser.add_argument_group("what is done with it").add_argument
    text = "--no-build takes the image that the engine has under this name"
    add("--build", action=yes_or_no, default=True, help=text)
    text = "small (default): the CPU job in the container; medium: the GPU job; none: look at its content only"
    add("--validate", choices=("none", "small", "medium"), default="small", help=text)
    add("--upload", action=yes_or_no, default=False, help="push it when it passed its check")
    add("--allow-dirty", action="store_true", help="push it although files were changed and not committed")
    add("--latest", action=yes_or_no, default=False, help="also give it the tag latest; in a registry with --release")
    text = "--no-promote pushes under sha-COMMIT-ID only; `.venv/bin/python -m tooling promote` moves the others later"
    add("--promote", action=yes_or_no, default=True, help=text)
    text = "also the tags vX.Y.Z and vX.Y; refuses pins that are null and dirty trees"
    add("--release", metavar="VERSION", help=text)
    add("--release-file", metavar="FILE", type=Path, help="what was pushed; default: build/image/release.json")
    add("--dry-run", action="store_true", help="print the exact commands; touch nothing")
    add("--json", action="store_true", help="print the result as JSON on stdout")


def from_options(args: argparse.Namespace) -> Request:
    """Return the request of parsed options. ``OptionError``: they do not fit together, or may not reach an engine."""
    for broken, reason in _contradictions(args):
        if broken:
            raise errors.OptionError(reason)
    _check_values(args)
    cache = args.bazel_cache and (args.bazel_cache + f":{CACHE_PORT}" * (not re.search(r":\d+$", args.bazel_cache)))
    values = vars(args) | {
        "reference": reference.make(args.repo, args.name, args.tag),
        "target": _STAGES[args.stage] if args.stage else _IMAGES[args.image or "opt"],
        "cuda_version": args.cuda_version or CUDA_VERSION,
        "use_bazel_cache": args.use_bazel_cache and not args.release,
        "bazel_cache": cache,
    }
    return Request(**{name: values[name] for name in Request._fields})


def _contradictions(args: argparse.Namespace) -> tuple[tuple[object, str], ...]:
    """Return whether options are such as nobody can mean, with the reason."""
    wheel, upload, cpu = args.jaxlib == "wheel", args.upload, args.accelerator == "cpu"
    other = args.image and args.stage and _STAGES[args.stage] != _IMAGES[args.image]
    return (
        (other, f"--image {args.image} is the stage {_IMAGES.get(args.image)}, --stage says {args.stage}; give one"),
        (wheel and args.cudnn_version, "--cudnn-version: cuDNN comes with the locked wheels; add --jaxlib source"),
        (wheel and args.build_type != "Release", "--build-type: the locked wheels are Release; add --jaxlib source"),
        (args.bazel_cache and not args.use_bazel_cache, "--no-cache and --bazel-cache contradict each other; give one"),
        (args.bazel_cache_write and args.release, "--bazel-cache-write: a release uses no Bazel cache; leave it out"),
        (cpu and args.cuda_version, "--cuda-version: an image for the CPU has no CUDA; leave it out"),
        (args.base_image and args.cuda_version and wheel, "--cuda-version: --base-image replaces it; give one"),
        (upload and not args.repo, "--upload: where to? Add --repo, e.g. --repo ghcr.io/OWNER/multimesh-jax"),
        (args.latest and not args.repo, "--latest marks an image in a registry; add --repo"),
        (args.release and args.latest and cpu, "--latest: is the image for GPUs; leave it out"),
        (args.release and args.validate == "none", "--validate none: a release was checked by a job; take small"),
        (not upload and (args.release or args.allow_dirty), "--release, --allow-dirty: about a push; add --upload"),
        (not upload and not args.promote, "--no-promote pushes without moving tags; add --upload"),
        (not args.promote and (args.latest or args.release),
         "--no-promote moves no tag; give --latest and --release to `.venv/bin/python -m tooling promote`"),
    )  # fmt: skip


def _check_values(args: argparse.Namespace) -> None:
    for flag, value, pattern, expected in (
        ("--cuda-version", args.cuda_version, _VERSION, "numbers with dots, e.g. 12.8.1"),
        ("--cudnn-version", args.cudnn_version, _VERSION, "numbers with dots, e.g. 9.8.0"),
        ("--bazel-cache", args.bazel_cache, _ADDRESS, "HOST or HOST:PORT, e.g. 127.0.0.1:9090"),
        ("--base-image", args.base_image, reference.IMAGE, "REPO:TAG or REPO@sha256:..., without a user or a password"),
    ):
        if value is not None and not re.fullmatch(pattern, value):
            shown = value.rpartition("@")[2]  # before it, a password may be
            raise errors.OptionError(f"{flag} {shown[:80]!r}: not {expected}")
    for flag in ("pip_config", "ca_bundle", "python_archive"):
        path, flag = getattr(args, flag), f"--{flag.replace('_', '-')}"
        if path is not None and not (path.is_file() and fits_an_option(path)):
            raise errors.OptionError(f"{flag} {path}: there is no such file, or its path has a comma or a quote")


def fits_an_option(path: Path) -> bool:
    """Say whether a path can be part of ``--secret``, whose fields engines read as those of a CSV file."""
    return not {",", '"', "\n"} & set(str(path))
