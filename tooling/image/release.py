"""From a checked image in the engine to public tags and ``release.json``. Refuses parts that no release may have."""

from __future__ import annotations

import argparse
import datetime
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docker.models.images import Image

from docker import DockerClient
from tooling.core import errors, files, proc
from tooling.image import engine, reference
from tooling.image.reference import LABEL, OCI, ImageLock, ImagePin
from tooling.image.registry import Registry
from tooling.sources import manifest
from tooling.sources.manifest import Pins

RECORD = Path("build/image/release.json")
SCHEMA = Path(__file__).with_name("release.schema.json")


def load_locks(root: Path) -> tuple[Pins, ImageLock]:
    """Read and check ``sources.lock`` and ``images.lock``."""
    return manifest.load_lock(root / "sources.lock"), reference.load_lock(root)


def check_release(
    version: str, labels: Mapping[str, str], locks: tuple[Pins, ImageLock], *, tag: str, latest: bool
) -> None:
    """Refuse a release whose parts are not all pinned, or whose tags promise another image; a group of all reasons.

    ``labels`` are those that the image has or would get. Pins that only a jaxlib from source needs (jax, which fixes
    xla, and Bazel for the platform of its Python) count where it has one.
    """
    base, target = labels.get(f"{OCI}.base.name", "base"), labels.get(f"{LABEL}.target", "runtime")
    library, accelerator = labels.get(f"{OCI}.version"), labels.get(f"{LABEL}.accelerator", "unknown")
    from_source = labels.get(f"{LABEL}.jaxlib", "").startswith("source")
    python = labels.get(f"{LABEL}.python", "").partition("standalone sha256:")[2]
    platforms = {file["sha256"]: name.split()[1] for name, file in locks[1].files.items() if name.startswith("python ")}
    conditions: list[tuple[object, type[errors.ToolingError], str]] = [
        *((pin.commit or pin.tree or (name == "jax" and not from_source), errors.SourceError,
           f"{name}: sources.lock has neither commit nor tree; run `.venv/bin/python -m tooling lock {name} "
           f"{pin.version}`") for name, pin in locks[0].items()),
        (labels.get(f"{OCI}.base.digest", "unpinned") != "unpinned", errors.SourceError,
         f"{base}: has no digest; {ImagePin(base).remedy}, or give one by digest"),
        *((not from_source or file["sha256"] or not re.fullmatch(f"bazel .*{platforms.get(python, '')}", name),
           errors.SourceError, f"{name}: images.lock has no sha256; write it there")
          for name, file in locks[1].files.items()),
        (not python or python in platforms, errors.SourceError,
         f"Python: sha256 {python} of the standalone one is not in images.lock; leave out --python-archive"),
        *((False, errors.SourceError, line) for line in _list_dirty(labels)),
        (library == version.removeprefix("v"), errors.OptionError,
         f"{version}: the library says {library}; make them agree"),
        (target == "runtime" or tag.endswith(f"-{version}"), errors.OptionError,
         f"{version} is of the image that runs, and this is {target}; add --tag {target}-{version}"),
        (not latest or (target == "runtime" and accelerator != "cpu"), errors.OptionError,
         f"--latest is the image for GPUs that runs, and this is {target}, {accelerator}"),
    ]  # fmt: skip
    if faults := [kind(f"no release: {line}") for holds, kind, line in conditions if not holds]:
        raise ExceptionGroup("no release", faults)


def _list_dirty(labels: Mapping[str, str]) -> list[str]:
    """Return a line for each tree of an image that no commit holds."""
    trees = ((f"{OCI}.revision", "this repository"), (f"{LABEL}.maxtext.revision", "MaxText"))
    return [
        f"{tree}: has changes that are not committed; commit them or take them back"
        for name, tree in trees
        if labels.get(name, "-dirty").endswith("-dirty")
    ]


def check_push(root: Path, request: argparse.Namespace, labels: Mapping[str, str], changed: Sequence[str] = ()) -> None:
    """Raise errors that would stop a push after the build; of a dry run, those that need no registry.

    ``labels`` are those that the image has or would get; ``changed`` the files that no commit holds.
    """
    if request.release is not None:
        check_release(request.release, labels, load_locks(root), tag=request.reference.tag, latest=request.latest)
    elif not request.allow_dirty and (lines := _list_dirty(labels)):
        names = f" ({proc.shorten(', '.join(changed), 200)})" if changed else ""
        raise errors.SourceError(f"{lines[0]}{names}; or push it all the same with --allow-dirty")
    if request.dry_run:
        return
    place = (request.release_file or root / RECORD).parent
    place.mkdir(parents=True, exist_ok=True)
    if not os.access(place, os.W_OK):
        raise errors.ToolingError(f"{place}: cannot be written, and release.json belongs there; make it writable")
    Registry(request.reference.repository).check_push()


def publish(
    root: Path, client: DockerClient, image: Image, check: Mapping[str, Any], request: argparse.Namespace
) -> dict[str, Any]:
    """Push under ``sha-COMMIT-ID``, verify, write ``release.json``, move the public tags; return the document.

    Until the last step every public tag is where it was.
    """
    name, place = request.reference, request.release_file or root / RECORD
    registry = Registry(name.repository)
    candidate = name.tagged(reference.name_candidate(image.labels, str(image.id), checked=check["job"] != "none"))
    image.tag(*candidate)
    engine.push(client, candidate)
    pushed = registry.get(candidate.tag)
    if image.id not in registry.ids(pushed):
        raise errors.EngineError(
            f"{candidate}: is another image than the one that was checked ({str(image.id)[:19]}); build again"
        )
    documents = [image.document for image in registry.images(pushed)]
    parts = [part for document in documents for part in (document["config"], *document["layers"])]
    record: dict[str, Any] = {
        "format": 4,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "image": {
            "repository": name.repository,
            "digest": pushed.digest,
            "id": image.id,
            "bytes": sum(int(part["size"]) for part in parts),
            "pull": f"docker pull {name.at(pushed.digest)}",
            "candidate": candidate.tag,
            "tags": [],
        },
        "check": {"job": check["job"], "verdict": check["verdict"]},
        "labels": image.labels,
    }
    files.write_json(place, record)
    if request.promote:
        names = reference.list_tags(name, latest=request.latest, version=request.release)
        record["image"]["tags"] = registry.promote(pushed.digest, names)
        files.write_json(place, record)
    return record
