"""``docker/build.py``: build, check, name, and hand on an image."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workflows import console, errors, helping
from workflows.image import attest, build, commit, digests, engine, flags, network, slurm, smoke
from workflows.image.attest import NOTHING, Attesting
from workflows.image.engine import Engine
from workflows.image.spec import Built, Request

ROOT = Path(__file__).resolve().parent.parent.parent
_UNKNOWN = Engine(("docker",), "docker", "unknown", "unknown", "buildx")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "image",
        prog="docker/build.py",
        usage="%(prog)s --tag T [options]",
        **helping.shown(
            "build an image, check it in a container, and push it",
            "docker/build.py --accelerator cpu --tag T",
            "docker/build.py --tag T --upload --repo ghcr.io/OWNER/multimesh-jax",
            "docker/build.py --tag T --dry-run",
        ),
        epilog="Without an engine, --dry-run shows the commands. docs/sources.md lists the exit codes.",
        allow_abbrev=False,
    )
    flags.add(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Do what a command line asks for and return the exit code."""
    request = flags.request(args)
    if request.actions.dry_run:
        return dry_run(request)
    smoke.check_means(request.actions.validate)
    if request.actions.upload:
        from workflows.image import publish  # an HTTP client and more: a rebuild of nothing takes less time

        publish.check_options(request)
    where = engine.detect(request.actions.remote)
    if request.actions.validate == "large":
        slurm.check_engine(where)
    attesting = decide(where, request)
    if request.actions.upload:
        publish.check_before(ROOT, where, request, attesting)
    built = make(where, request, attesting)
    if built is None:
        return 0
    check = smoke.check(ROOT, where, built, request.actions.validate)
    names = name(where, built, request)
    if request.actions.remote and not request.actions.save_remote:
        where, built = bring(where, built, names)
    pushed = publish.publish(ROOT, where, built, check, request, attesting) if request.actions.upload else None
    report(where, built, check, names, pushed, as_json=request.actions.json)
    if pushed is not None:
        # Last: whatever becomes of the file, the digest was said.
        publish.write(publish.release_file(ROOT, request), pushed)
    return 0


def decide(where: Engine, request: Request) -> Attesting:
    """Return what is done about attestations, and say so; an image that stays here has none."""
    if not request.actions.upload:
        return NOTHING
    attesting = attest.decide(where, request, digests.load(ROOT))
    console.note(f"attestations: {attesting.said}")
    return attesting


def make(where: Engine, request: Request, attesting: Attesting) -> Built | None:
    """Return the image that is asked for: built now, or the one that the engine has."""
    if request.actions.commit is not None:
        started, container = time.monotonic(), commit.find(where, request.actions.commit)
        labels = build.plan(ROOT, where, request.spec, request.means, None).labels
        image = commit.commit(where, container, labels)
        return replace(build.describe(where, request.spec, image), seconds=time.monotonic() - started)
    if request.actions.build:
        save, options = not request.actions.skip_save, attesting.options_for("engine")
        return build.run(ROOT, where, request.spec, request.means, save=save, attest=options)
    return build.describe(where, request.spec, str(request.spec.reference))


def name(where: Engine, built: Built, request: Request) -> list[str]:
    """Give a checked image its public names in the engine."""
    reference = request.spec.reference
    names = [str(reference), *([str(reference.tagged("latest"))] if request.actions.latest else [])]
    for each in names:
        if each not in built.names:
            where.run("tag", built.image_id, each)
    return names


def bring(where: Engine, built: Built, names: Sequence[str]) -> tuple[Engine, Built]:
    """Bring an image from a remote engine to the local one; return that, and the image as it knows it.

    Engines that keep their images in different ways give the same image different ids.
    """
    local = engine.detect()
    with tempfile.TemporaryDirectory(prefix="multimesh-image-") as folder:
        archive = str(Path(folder) / "image.tar")
        console.note(f"bringing {names[0]} here")
        where.run("save", "--output", archive, *names)
        local.run("load", "--input", archive)
    found = local.inspect(names[0])
    if found is None:
        raise errors.EngineError(f"{names[0]}: cannot be brought here; run it where it is with --save-remote")
    return local, replace(built, image_id=str(found["Id"]))


def dry_run(request: Request) -> int:
    """Print every command that would run; no engine is needed and nothing is touched."""
    try:
        where = engine.detect(request.actions.remote)
    except errors.EngineError as error:
        console.note(f"no engine to ask, so with docker and buildx in mind ({error})")
        where = _UNKNOWN
    commands = planned(where, request, decide(where, request) if where is not _UNKNOWN else NOTHING)
    if request.actions.json:
        print(json.dumps({"commands": commands}))
    else:
        print("\n".join(shlex.join(command) for command in commands))
    return 0


def planned(where: Engine, request: Request, attesting: Attesting) -> list[list[str]]:
    """Return the commands of a request in their order; IMAGE stands for the id that the build gives."""
    spec, actions = request.spec, request.actions
    commands = list[list[str]]()
    image = "IMAGE"
    if actions.commit is not None:
        commands.append([*where.cli, "commit", actions.commit])
    elif actions.build:
        todo = planned_build(where, request, attesting.options_for("engine"))
        if network.PIP_VARIABLE in todo.access.variables:
            console.note(f"{network.PIP_VARIABLE} in the environment holds your pip's package indexes")
        commands.append(list(todo.argv))
    else:
        image = str(spec.reference)
    if not actions.skip_save:
        if spec.target != "devcontainer":
            commands += smoke.planned(where, image, actions.validate)
        names = [str(spec.reference), *([str(spec.reference.tagged("latest"))] if actions.latest else [])]
        commands += [[*where.cli, "tag", image, each] for each in names]
    if actions.upload:
        from workflows.image import publish

        if options := attesting.options_for("builder"):
            commands.append(list(planned_build(where, request, options, push=str(spec.reference.staging)).argv))
        else:
            commands += publish.planned_push(where, image, request)
        commands += publish.planned_promotion(request)
    return commands


def planned_build(where: Engine, request: Request, options: tuple[str, ...], push: str | None = None) -> build.Plan:
    """Return a build that would run; RESULT stands for a file that the builder writes."""
    result = None if request.actions.skip_save else Path("RESULT")
    cache = network.find_cache(request.spec, request.means)
    means, secret = network.through_cache(cache, request.means, None)
    return build.plan(ROOT, where, request.spec, means, result, more=(*secret, *options), push=push)


def report(
    where: Engine,
    built: Built,
    check: smoke.Check,
    names: Sequence[str],
    pushed: dict[str, Any] | None,
    *,
    as_json: bool,
) -> None:
    """Say what was made: for people with a table of layers, or as JSON."""
    if as_json:
        answer = {
            "image": names[0],
            "names": list(names),
            "id": built.image_id,
            "bytes": built.bytes,
            "seconds": round(built.seconds, 2),
            "steps": built.steps,
            "cached": built.cached,
            "check": {"job": check.job, "seconds": check.seconds, "verdict": check.verdict},
            "labels": built.labels,
            "pushed": pushed,
            "layers": build.layers(where, built.image_id),
        }
        print(json.dumps(answer, indent=1))
        return
    if built.cached < built.steps:
        rows = [(f"{layer['bytes'] / 1e6:.1f} MB", layer["step"]) for layer in build.layers(where, built.image_id)]
        print(console.table(("size", "layer"), rows))
    print(f"image   {names[0]}")
    print(f"id      {built.image_id}")
    print(f"size    {built.bytes / 1e6:.0f} MB")
    print(f"built   {built.seconds:.1f} s, {built.cached} of {built.steps} steps from the cache")
    print(f"check   {check.verdict}")
    if pushed is not None:
        from workflows.image import publish

        print(publish.summary(pushed))
    if built.spec.target == "runtime":
        print(f"run     {os.path.basename(where.cli[0])} run --rm {names[0]} /opt/maxtext/validate-cpu.sh")
    sys.stdout.flush()
