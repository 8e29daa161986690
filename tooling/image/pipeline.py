"""``docker/build.py``: build, check, name, and hand on an image."""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tooling.core.console import Subparsers, command
from tooling.core.files import ROOT
from tooling.image import build, engine, reference, release, smoke, snapshot
from tooling.image.reference import Reference
from tooling.image.request import Request, add_options, from_options

if TYPE_CHECKING:
    from docker.models.images import Image

    from docker import DockerClient


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    options = ("--accelerator cpu --tag T", "--tag T --upload --repo ghcr.io/OWNER/multimesh-jax", "--tag T --dry-run")
    parser = command(
        subparsers, "image", run, "build an image, check it in a container, and push it",
        [f"docker/build.py {words}" for words in options], prog="docker/build.py",
        usage="%(prog)s --tag T [options]",
        epilog="Without an engine, --dry-run shows the commands. docs/releasing.md lists the exit codes.",
        allow_abbrev=False,
    )  # fmt: skip
    add_options(parser)


def run(args: argparse.Namespace) -> None:
    """Run a command line."""
    request = from_options(args)
    smoke.check_means(request.validate)
    if request.upload and request.promote:  # impossible tags are refused without an engine
        reference.list_tags(request.reference, latest=request.latest, version=request.release)
    if request.dry_run:
        commands = plan_commands(request)
        print(json.dumps({"commands": commands}) if request.json else "\n".join(map(shlex.join, commands)))
    else:
        with engine.name_faults():
            make_image(engine.connect(), request)


def make_image(client: DockerClient, request: Request) -> None:
    """Do all that a command line asks for."""

    def allow(plan: build.Plan, view: snapshot.Snapshot) -> None:
        if request.upload:
            release.check_push(ROOT, request, plan.labels, view.changed, plan.base.unpinned)

    started = time.monotonic()
    if request.build:
        image = build.run(ROOT, client, request, allow)
    else:
        image = engine.find_image(client, str(request.reference))
        if request.upload:
            release.check_push(ROOT, request, image.labels)
    seconds = time.monotonic() - started
    check = smoke.check(ROOT, client, image, request.target, request.validate)
    for name in _names(request):
        image.tag(*name)
    pushed = release.publish(ROOT, client, image, check, request) if request.upload else None
    report(image, seconds, check, request, pushed)


def _names(request: Request) -> list[Reference]:
    """Return the names that a checked image gets in the engine."""
    name = request.reference
    return [name, *([name.tagged("latest")] if request.latest else [])]


def plan_commands(request: Request) -> list[list[str]]:
    """Return the commands that do by hand what a run does; it refuses what a run would refuse, and touches nothing.

    IMAGE and ID stand for the id that the build gives, COMMIT for ours, DIGEST for what the registry answers, and
    RESULT for a file that the builder writes.
    """
    name, commands, image = request.reference, list[list[str]](), str(request.reference)
    if request.build:
        with tempfile.TemporaryDirectory(prefix="multimesh-image-") as folder:
            view = snapshot.take_snapshot(ROOT, Path(folder), build.name_components(request))
            plan = build.make_plan(ROOT, request, view, build.FOLDER / "context", Path(folder))
        if request.upload:
            release.check_push(ROOT, request, plan.labels, view.changed, plan.base.unpinned)
        commands, image = [plan.to_image(request.target, Path("RESULT"), None)], "IMAGE"
    if request.target != "devcontainer" and request.validate != "none":
        means = ["--gpus", "all"] if request.validate == "medium" else ["--network", "none"]
        words = ["--entrypoint", "/opt/entrypoint.sh", image, f"/opt/maxtext/{smoke.JOBS[request.validate]}"]
        commands.append(["docker", "run", "--rm", "--init", *means, *words])
    commands += [["docker", "tag", image, str(each)] for each in _names(request)]
    if request.upload:
        candidate = f"{name.repository}:sha-COMMIT-ID"
        commands += [["docker", "tag", image, candidate], ["docker", "push", candidate]]
    if request.upload and request.promote:
        more = [*["--latest"] * request.latest, *(["--release", request.release] if request.release else [])]
        words = [f"{name.repository}@DIGEST", "--tag", name.tag, *more]
        commands.append([".venv/bin/python", "-m", "tooling", "promote", *words])
    return commands


def report(built: Image, seconds: float, check: smoke.Check, request: Request, pushed: dict[str, Any] | None) -> None:
    """Print the image that was made: for people, or as JSON."""
    names, size = _names(request), built.attrs["Size"]
    if request.json:
        answer = {"image": str(names[0]), "names": list(map(str, names)), "id": built.id, "bytes": size,
                  "seconds": round(seconds, 2), "check": check._asdict(), "labels": built.labels,
                  "pushed": pushed}  # fmt: skip
        print(json.dumps(answer, indent=1))
        return
    print(f"image   {names[0]}\nid      {built.id}\nsize    {size / 1e6:.0f} MB")
    print(f"built   {seconds:.1f} s\ncheck   {check.verdict}")
    if pushed is not None:
        image = pushed["image"]
        states = {None: "new", image["digest"]: "as it was"}
        moved = [f"{move['tag']} ({states.get(move['before'], 'moved')})" for move in image["tags"]]
        print(f"digest  {image['digest']}\npushed  {image['bytes'] / 1e6:.1f} MB to pull")
        print(f"tags    {', '.join([image['candidate'], *moved])}\npull    {image['pull']}")
    if request.target == "runtime":
        print(f"run     docker run --rm {names[0]} /opt/maxtext/validate-cpu.sh")
