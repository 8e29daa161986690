"""``docker/build.py``: its options, checked once, and its steps: build, check, name, and hand on an image."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tooling.core import errors
from tooling.core.console import Subparsers, command
from tooling.core.files import ROOT
from tooling.image import build, engine, reference, release

if TYPE_CHECKING:
    from docker import DockerClient

CUDA_VERSION, CACHE_PORT = "12.8.1", 9090
_IMAGES = {"dev": "dev", "opt": "runtime"}
_STAGES = {"devcontainer": "devcontainer", "dev": "dev", "runtime": "runtime", "final_image": "runtime"}
_VERSION = r"\d{1,3}(\.\d{1,3}){1,3}"
_ADDRESS = r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,251}|\[[0-9A-Fa-f:]+\])(:\d{1,5})?"


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    options = ("--accelerator cpu --tag T", "--tag T --upload --repo ghcr.io/OWNER/multimesh-jax", "--tag T --dry-run")
    parser = command(
        subparsers, "image", run, "build an image, check it in a container, and push it",
        [f"docker/build.py {words}" for words in options], prog="docker/build.py",
        usage="%(prog)s --tag T [options]", allow_abbrev=False, epilog="docs/releasing.md lists the exit codes.",
    )  # fmt: skip
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    yes_or_no = argparse.BooleanOptionalAction
    add = parser.add_argument_group("name", "REPO:TAG, or REPO/NAME:TAG with --name").add_argument
    add("--repo", help="registry and owner; without it the image stays here, as multimesh-jax:TAG")
    add("--name", help="name below --repo")
    add("--tag", default="local", help="default: %(default)s")

    add = parser.add_argument_group("what is in it").add_argument
    add("--image", choices=_IMAGES, help="opt (default): what runs, no compilers; dev: with sources and tools")
    add("--stage", choices=_STAGES, help="a stage of the Dockerfile, in place of --image; final_image is runtime")
    add("--accelerator", choices=("cuda12", "cpu"), default="cuda12", help="default: %(default)s")
    add("--jaxlib", choices=("wheel", "source"), default="wheel", help="locked wheels, or built from third_party/")
    types = ("Release", "Debug", "RelWithDebInfo")
    add("--build-type", choices=types, default="Release", help="of a jaxlib from source; default: %(default)s")
    add("--cuda-version", metavar="X.Y.Z", help=f"of the base and of a jaxlib from source; default: {CUDA_VERSION}")
    add("--cudnn-version", metavar="X.Y.Z", help="of a jaxlib from source")
    add("--base-image", metavar="IMAGE", help="in place of the pinned bases; any Debian or Ubuntu")
    add("--platform", choices=("linux/amd64", "linux/arm64"), help="default: the engine's")
    text = "a standalone Python (.tar.gz) for a base whose own is older than 3.12; default: fetch the pinned one"
    add("--python-archive", metavar="FILE", type=Path, help=text)

    add = parser.add_argument_group("how the build reaches what it needs; nothing of this stays in it").add_argument
    add("--pip-config", metavar="FILE", type=Path, help="pip.conf for the build; default: $PIP_CONFIG_FILE")
    text = "certificates to trust; default: $PIP_CERT, $REQUESTS_CA_BUNDLE, $SSL_CERT_FILE or $CURL_CA_BUNDLE"
    add("--ca-bundle", metavar="FILE", type=Path, help=text)
    add("--network", choices=["default", "host"], default="default", help="of the build's steps; default: %(default)s")
    add("--no-docker-build-cache", action="store_false", dest="layer_cache", help="build every layer anew")
    text = "use a remote Bazel cache (default) with --jaxlib source; a release uses none"
    add("--cache", action=yes_or_no, default=True, dest="use_bazel_cache", help=text)
    text = f"where that is; default: the one of start-cache.sh, if it runs; default of PORT: {CACHE_PORT}"
    add("--bazel-cache", "--cache-addr", metavar="HOST[:PORT]", help=text)
    add("--bazel-cache-write", action="store_true", help="also store results there")

    add = parser.add_argument_group("what is done with it").add_argument
    add("--build", action=yes_or_no, default=True, help="--no-build takes the engine's image of this name")
    text = "small (default): the CPU job in the container; medium: the GPU job; none: look at its content only"
    add("--validate", choices=("none", "small", "medium"), default="small", help=text)
    add("--upload", action=yes_or_no, default=False, help="push it when it passed its check")
    add("--allow-dirty", action="store_true", help="push it although files were changed and not committed")
    add("--latest", action=yes_or_no, default=False, help="also give it the tag latest; in a registry with --release")
    text = "--no-promote pushes under sha-COMMIT-ID only; `.venv/bin/python -m tooling promote` moves the others later"
    add("--promote", action=yes_or_no, default=True, help=text)
    add("--release", metavar="VERSION", help="also the tags vX.Y.Z and vX.Y; refuses null pins and dirty trees")
    add("--release-file", metavar="FILE", type=Path, help="what was pushed; default: build/image/release.json")
    add("--dry-run", action="store_true", help="print the command of the build and the pushes; touch nothing")
    add("--json", action="store_true", help="print the result as JSON on stdout")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser("docker/build.py", allow_abbrev=False)
    add_options(parser)
    return read_options(parser.parse_args(argv))


def read_options(args: argparse.Namespace) -> argparse.Namespace:
    """Return parsed options with what follows from them: ``reference``, the image's name, and ``target``, its stage.

    ``OptionError``: they do not fit together, or may not reach an engine.
    """
    wheel, upload, cpu = args.jaxlib == "wheel", args.upload, args.accelerator == "cpu"
    other = args.image and args.stage and _STAGES[args.stage] != _IMAGES[args.image]
    contradictions = (
        (other, f"--image {args.image} is the stage {_IMAGES.get(args.image)}, --stage says {args.stage}; give one"),
        (wheel and args.cudnn_version, "--cudnn-version: cuDNN comes with the locked wheels; add --jaxlib source"),
        (wheel and args.build_type != "Release", "--build-type: the locked wheels are Release; add --jaxlib source"),
        (args.bazel_cache and not args.use_bazel_cache, "--no-cache and --bazel-cache contradict each other; give one"),
        (args.bazel_cache_write and args.release, "--bazel-cache-write: a release uses no Bazel cache; leave it out"),
        (cpu and args.cuda_version, "--cuda-version: an image for the CPU has no CUDA; leave it out"),
        (args.base_image and args.cuda_version and wheel, "--cuda-version: --base-image replaces it; give one"),
        (upload and not args.repo, "--upload: where to? Add --repo, e.g. --repo ghcr.io/OWNER/multimesh-jax"),
        (args.latest and not args.repo, "--latest marks an image in a registry; add --repo"),
        (args.release and args.validate == "none", "--validate none: a release was checked by a job; take small"),
        (not upload and (args.release or args.allow_dirty), "--release, --allow-dirty: about a push; add --upload"),
        (not upload and not args.promote, "--no-promote pushes without moving tags; add --upload"),
        (not args.promote and (args.latest or args.release),
         "--no-promote moves no tag; give --latest and --release to `.venv/bin/python -m tooling promote`"),
    )  # fmt: skip
    for broken, reason in contradictions:
        if broken:
            raise errors.OptionError(reason)
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
        if (path := getattr(args, flag)) and not path.is_file():
            raise errors.OptionError(f"--{flag.replace('_', '-')} {path}: there is no such file")
    args.reference = reference.make(args.repo, args.name, args.tag)
    args.target = _STAGES[args.stage] if args.stage else _IMAGES[args.image or "opt"]
    args.cuda_version = args.cuda_version or CUDA_VERSION
    args.use_bazel_cache = args.use_bazel_cache and not args.release
    if args.bazel_cache and not re.search(r":\d+$", args.bazel_cache):
        args.bazel_cache += f":{CACHE_PORT}"
    return args


def run(args: argparse.Namespace) -> None:
    """Run a command line."""
    request = read_options(args)
    engine.check_means(request.validate)
    tags = ["sha-COMMIT-ID"] if request.upload else []
    if request.upload and request.promote:  # impossible tags are refused without an engine
        tags += reference.list_tags(request.reference, latest=request.latest, version=request.release)
    if not request.dry_run:
        with engine.connect() as client:
            make_image(client, request)
        return
    commands = [["docker", "push", str(request.reference.tagged(tag))] for tag in tags]
    if request.build:
        with build.prepare(ROOT, request) as argv:
            commands.insert(0, argv)
    print(json.dumps({"commands": commands}) if request.json else "\n".join(map(shlex.join, commands)))


def make_image(client: DockerClient, request: argparse.Namespace) -> None:
    """Do all that a command line asks for."""
    started = time.monotonic()
    if request.build:
        image = build.run(ROOT, client, request)
    else:
        image = engine.find_image(client, str(request.reference))
        if request.upload:
            release.check_push(ROOT, request, image.labels)
    seconds = time.monotonic() - started
    check = engine.check(ROOT, image, request.target, request.validate)
    names = [request.reference, *([request.reference.tagged("latest")] if request.latest else [])]
    for name in names:
        image.tag(*name)
    pushed = release.publish(ROOT, client, image, check, request) if request.upload else None
    answer = {"image": str(names[0]), "names": list(map(str, names)), "id": image.id, "bytes": image.attrs["Size"],
              "seconds": round(seconds, 2), "check": check, "labels": image.labels, "pushed": pushed}  # fmt: skip
    if request.json:
        print(json.dumps(answer, indent=1))
    else:
        report(answer, request.target)


def report(answer: dict[str, Any], target: str) -> None:
    """Print for people which image was made, and where it was pushed."""
    print(f"image   {answer['image']}\nid      {answer['id']}\nsize    {answer['bytes'] / 1e6:.0f} MB")
    print(f"built   {answer['seconds']:.1f} s\ncheck   {answer['check']['verdict']}")
    if answer["pushed"]:
        pushed = answer["pushed"]["image"]
        states = {None: "new", pushed["digest"]: "as it was"}
        moved = [f"{move['tag']} ({states.get(move['before'], 'moved')})" for move in pushed["tags"]]
        print(f"digest  {pushed['digest']}\npushed  {pushed['bytes'] / 1e6:.1f} MB to pull")
        print(f"tags    {', '.join([pushed['candidate'], *moved])}\npull    {pushed['pull']}")
    if target == "runtime":
        print(f"run     docker run --rm {answer['image']} /opt/maxtext/validate-cpu.sh")
