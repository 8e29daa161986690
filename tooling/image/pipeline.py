"""``docker/build.py``: its options, checked once, and its steps: build, check, name, and hand on an image."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import time
from collections.abc import Sequence
from typing import Any

from docker import DockerClient
from tooling import cli
from tooling.core import errors
from tooling.core.files import ROOT
from tooling.image import build, engine, reference, release

CUDA_VERSION, CACHE_PORT = "12.8.1", 9090
IMAGES = {"dev": "dev", "opt": "runtime"}
STAGES = {"devcontainer": "devcontainer", "dev": "dev", "runtime": "runtime", "final_image": "runtime"}
_VERSION = r"\d{1,3}(\.\d{1,3}){1,3}"
_ADDRESS = r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,251}|\[[0-9A-Fa-f:]+\])(:\d{1,5})?"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line."""
    return read_options(cli.parse(["image", *argv]))


def read_options(args: argparse.Namespace) -> argparse.Namespace:
    """Return parsed options with what follows from them: ``reference``, the image's name, and ``target``, its stage.

    ``OptionError``: they do not fit together, or may not reach an engine.
    """
    wheel, upload, cpu = args.jaxlib == "wheel", args.upload, args.accelerator == "cpu"
    other = args.image and args.stage and STAGES[args.stage] != IMAGES[args.image]
    contradictions = (
        (other, f"--image {args.image} is the stage {IMAGES.get(args.image)}, --stage says {args.stage}; give one"),
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
    args.target = STAGES[args.stage] if args.stage else IMAGES[args.image or "opt"]
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
