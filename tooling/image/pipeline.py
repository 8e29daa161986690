"""``docker/build.py``: build, check, name, and hand on an image."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tooling.core import console, errors
from tooling.core.console import Subparsers, command
from tooling.image import build, engine, network, smoke
from tooling.image.engine import Engine
from tooling.image.request import Built, Request, add_options, from_options
from tooling.sources.workspace import ROOT


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    options = ("--accelerator cpu --tag T", "--tag T --upload --repo ghcr.io/OWNER/multimesh-jax", "--tag T --dry-run")
    parser = command(
        subparsers, "image", run, "build an image, check it in a container, and push it",
        [f"docker/build.py {each}" for each in options], prog="docker/build.py", usage="%(prog)s --tag T [options]",
        epilog="Without an engine, --dry-run shows the commands. docs/sources.md lists the exit codes.",
        allow_abbrev=False,
    )  # fmt: skip
    add_options(parser)


def run(args: argparse.Namespace) -> None:
    """Run a command line."""
    request = from_options(args)
    if not request.actions.dry_run and importlib.util.find_spec("jsonschema") is None:
        raise errors.ToolError("there is no .venv with the tools to build and push; run ./bootstrap.sh --group image")
    smoke.check_means(request.actions.validate)
    if request.actions.build:
        network.tell_unread(request.means, os.environ)
    if request.actions.upload:
        from tooling.image import release, tags

        if request.actions.promote:  # impossible tags are refused without an engine
            tags.tags(request.spec.reference, latest=request.actions.latest, version=request.actions.release)
    if request.actions.dry_run:
        dry_run(request)
        return
    where = engine.find_engine()
    if request.actions.upload or not request.actions.build:
        where.check()  # else a build asks it, besides
    if request.actions.upload:
        release.check_before(ROOT, where, request)
    spec = request.spec
    if request.actions.build:
        built = build.run(ROOT, where, spec, request.means)
    else:
        built = build.describe(where, spec, str(spec.reference))
    check = smoke.check(ROOT, where, built, request.actions.validate)
    names = _names(request)
    for each in names:
        if each not in built.names:
            where.run("tag", built.image_id, each)
    pushed = release.publish(ROOT, where, built, check, request) if request.actions.upload else None
    report(where, built, check, names, pushed, as_json=request.actions.json)


def _names(request: Request) -> list[str]:
    """Return the names that a checked image gets in the engine."""
    reference = request.spec.reference
    return [str(reference), *([str(reference.tagged("latest"))] if request.actions.latest else [])]


def dry_run(request: Request) -> None:
    """Print every command that would run, and refuse what a run would refuse; no engine is needed, nothing touched."""
    try:
        where = engine.detect()
    except errors.EngineError as error:
        console.note(f"no engine to ask, so with docker and buildx in mind ({error})")
        where = Engine(("docker",))
    commands = plan_build(where, request)
    if request.actions.json:
        print(json.dumps({"commands": commands}))
    else:
        print("\n".join(shlex.join(command) for command in commands))


def plan_build(where: Engine, request: Request) -> list[list[str]]:
    """Return the commands of a request in their order; IMAGE stands for the id that the build gives."""
    spec, actions = request.spec, request.actions
    # RESULT stands for a file that the builder writes.
    cache = network.find_cache(spec, request.means)
    means, secret = network.through_cache(cache, request.means, None)
    todo = build.plan(ROOT, where, spec, means, Path("RESULT"), more=secret, only_plan=True)
    commands, image = [list(todo.argv)] * actions.build, "IMAGE" if actions.build else str(spec.reference)
    if spec.target != "devcontainer" and actions.validate != "none":
        commands.append(smoke.argv(where, image, actions.validate, "multimesh-check"))
    commands += [[*where.cli, "tag", image, each] for each in _names(request)]
    if actions.upload:
        from tooling.image import release

        if actions.build:
            release.check_sources(ROOT, request, todo.labels, todo.base.unpinned)
        commands += release.plan_push(where, image, request, todo.labels)
    return commands


def report(
    where: Engine,
    built: Built,
    check: smoke.Check,
    names: Sequence[str],
    pushed: dict[str, Any] | None,
    *,
    as_json: bool,
) -> None:
    """Print the image that was made: for people, or as JSON."""
    if as_json:
        verdict = {"job": check.job, "seconds": check.seconds, "verdict": check.verdict}
        answer = {"image": names[0], "names": list(names), "id": built.image_id, "bytes": built.bytes,
                  "seconds": round(built.seconds, 2), "check": verdict, "labels": built.labels,
                  "pushed": pushed}  # fmt: skip
        print(json.dumps(answer, indent=1))
        return
    print(f"image   {names[0]}\nid      {built.image_id}\nsize    {built.bytes / 1e6:.0f} MB")
    print(f"built   {built.seconds:.1f} s")
    print(f"check   {check.verdict}")
    if pushed is not None:
        from tooling.image import release

        print(release.summary(pushed))
    if built.spec.target == "runtime":
        print(f"run     {os.path.basename(where.cli[0])} run --rm {names[0]} /opt/maxtext/validate-cpu.sh")
