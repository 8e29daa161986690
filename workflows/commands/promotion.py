"""The command ``promote``: moves public tags to an image that was pushed before, by its digest."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from workflows import console, helping
from workflows.image import attest, publish, push, reference
from workflows.image.registry import Policy, Registry

ROOT = Path(__file__).resolve().parent.parent.parent


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "promote",
        **helping.shown(
            "give public tags to an image that was pushed with --no-promote",
            "python -m workflows promote ghcr.io/OWNER/multimesh-jax@sha256:... --tag main --latest",
        ),
    )
    parser.add_argument("image", metavar="REPO@DIGEST", help="as `docker/build.py --no-promote` printed it")
    parser.add_argument("--tag", required=True, help="the tag that it gets")
    parser.add_argument("--latest", action="store_true", help="also latest")
    parser.add_argument("--release", metavar="VERSION", help="also vX.Y.Z and vX.Y, under the conditions of a release")
    parser.add_argument(
        "--release-file", metavar="FILE", type=Path, help="the release.json of its push, to be told of the tags"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Move the tags; print what they were."""
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
    return 0
