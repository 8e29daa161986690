"""``docker/build.py``: build, check, name, and hand on an image; and ``promote``, which names one that was pushed."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from workflows import console, errors
from workflows.helping import Subparsers, command
from workflows.image import attest, build, commit, digests, engine, flags, network, slurm, smoke
from workflows.image.attest import NOTHING, Attesting
from workflows.image.engine import Engine
from workflows.image.spec import Built, Request
from workflows.sources.workspace import ROOT

_UNKNOWN = Engine(("docker",), "docker", "unknown", "unknown", "buildx")


def register(subparsers: Subparsers) -> None:
    """Add the commands."""
    options = ("--accelerator cpu --tag T", "--tag T --upload --repo ghcr.io/OWNER/multimesh-jax", "--tag T --dry-run")
    parser = command(
        subparsers, "image", run, "build an image, check it in a container, and push it",
        [f"docker/build.py {each}" for each in options], prog="docker/build.py", usage="%(prog)s --tag T [options]",
        epilog="Without an engine, --dry-run shows the commands. docs/sources.md lists the exit codes.",
        allow_abbrev=False,
    )  # fmt: skip
    flags.add(parser)
    text = "give public tags to an image that was pushed with --no-promote"
    examples = ["python -m workflows promote ghcr.io/OWNER/multimesh-jax@sha256:... --tag main --latest"]
    add = command(subparsers, "promote", run_promote, text, examples).add_argument
    add("image", metavar="REPO@DIGEST", help="as `docker/build.py --no-promote` printed it")
    add("--tag", required=True, help="the tag that it gets")
    add("--latest", action="store_true", help="also latest")
    add("--release", metavar="VERSION", help="also vX.Y.Z and vX.Y, under the conditions of a release")
    text = "the release.json of its push, to be told of the tags"
    add("--release-file", metavar="FILE", type=Path, help=text)
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Run a command line."""
    request = flags.request(args)
    if request.actions.dry_run:
        dry_run(request)
        return
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
        return
    check = smoke.check(ROOT, where, built, request.actions.validate)
    names = _names(request)
    for each in names:
        if each not in built.names:
            where.run("tag", built.image_id, each)
    if request.actions.remote and not request.actions.save_remote:
        where, built = bring(where, built, names)
    pushed = publish.publish(ROOT, where, built, check, request, attesting) if request.actions.upload else None
    report(where, built, check, names, pushed, as_json=request.actions.json)
    if pushed is not None:
        # Last: also where the file cannot be written, the digest was printed.
        publish.write(publish.release_file(ROOT, request), pushed)


def decide(where: Engine, request: Request) -> Attesting:
    """Return how a push gets attestations, and say so. An image that stays here has none."""
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


def _names(request: Request) -> list[str]:
    """Return the names that a checked image gets in the engine."""
    reference = request.spec.reference
    return [str(reference), *([str(reference.tagged("latest"))] if request.actions.latest else [])]


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


def dry_run(request: Request) -> None:
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
        commands += [[*where.cli, "tag", image, each] for each in _names(request)]
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
    """Print the image that was made: for people with a table of layers, or as JSON."""
    if as_json:
        verdict = {"job": check.job, "seconds": check.seconds, "verdict": check.verdict}
        layers = build.layers(where, built.image_id)
        answer = {"image": names[0], "names": list(names), "id": built.image_id, "bytes": built.bytes,
                  "seconds": round(built.seconds, 2), "steps": built.steps, "cached": built.cached, "check": verdict,
                  "labels": built.labels, "pushed": pushed, "layers": layers}  # fmt: skip
        print(json.dumps(answer, indent=1))
        return
    if built.cached < built.steps:
        rows = [(f"{layer['bytes'] / 1e6:.1f} MB", layer["step"]) for layer in build.layers(where, built.image_id)]
        print(console.table(("size", "layer"), rows))
    print(f"image   {names[0]}\nid      {built.image_id}\nsize    {built.bytes / 1e6:.0f} MB")
    print(f"built   {built.seconds:.1f} s, {built.cached} of {built.steps} steps from the cache")
    print(f"check   {check.verdict}")
    if pushed is not None:
        from workflows.image import publish

        print(publish.summary(pushed))
    if built.spec.target == "runtime":
        print(f"run     {os.path.basename(where.cli[0])} run --rm {names[0]} /opt/maxtext/validate-cpu.sh")
    sys.stdout.flush()


def run_promote(args: argparse.Namespace) -> None:
    """Move the tags; print their old digests."""
    from workflows.image import publish, push, reference
    from workflows.image.registry import Policy, Registry

    wanted, digest = reference.pulled(args.image, args.tag)
    record = publish.read(args.release_file) if args.release_file else None
    names = push.tags(wanted, latest=args.latest, version=args.release)
    if args.release:
        with Registry(wanted, Policy()) as registry:
            manifest = registry.get(digest)
            labels = registry.labels(manifest)
            console.note(f"attestations: {attest.summary(attest.read(registry, manifest))}")
        publish.check_release(args.release, labels, publish.load_locks(ROOT), publish.unpinned(labels))
    moved = push.promote(wanted, digest, names, Policy())
    push.unstage(wanted.tagged(record["image"]["staging"]) if record else wanted.staging, digest, Policy())
    if record:
        record["version"], record["image"]["tags"] = args.release, [asdict(each) for each in moved]
        publish.write(args.release_file, record)
    if args.json:
        print(json.dumps({"image": args.image, "tags": [asdict(each) for each in moved]}, indent=1))
    else:
        print("\n".join(f"{each.tag}: {each.digest} (before: {each.before or 'no such tag'})" for each in moved))
