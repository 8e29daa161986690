"""``release.json``: what was pushed, from which bytes, how it was checked; and what a release must not be made of."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema

from workflows import errors, files
from workflows.image import digests
from workflows.image.attest import Attestation
from workflows.image.digests import ImageLock
from workflows.image.promote import Moved
from workflows.image.push import Pushed
from workflows.image.sign import Signature
from workflows.image.spec import Built
from workflows.sources import lock as sources_lock
from workflows.sources.lock import Pin

SCHEMA = Path(__file__).with_name("release.schema.json")
_LOCKS = ("sources.lock", "docker/images.lock", "requirements/run.txt", "requirements/cuda12.txt")
_OF_JAXLIB = ("jax", "xla")
_OCI = "org.opencontainers.image"


@dataclass(frozen=True)
class Published:
    """A pushed image, and what was done with its digest."""

    pushed: Pushed
    bytes_to_pull: int
    moved: tuple[Moved, ...]
    promote_seconds: float
    signature: Signature | None
    attestations: str
    attested: tuple[Attestation, ...]


@dataclass(frozen=True)
class Locks:
    """Both locks of this repository."""

    sources: Mapping[str, Pin]
    images: ImageLock


def load_locks(root: Path) -> Locks:
    """Read and check ``sources.lock`` and ``images.lock``."""
    return Locks(sources_lock.load(root / "sources.lock"), digests.load(root))


def null_pins(locks: Locks, unpinned: Sequence[str], *, jaxlib_from_source: bool) -> list[str]:
    """Return what keeps an image from being a release, a line for each: all that went into it must be pinned.

    What only a jaxlib from source needs (jax, xla, Bazel) counts where the image has one.

    Parameters
    ----------
    unpinned
        Base images of the image, and the scanner of its SBOM, without a digest.
    """
    said = [
        f"{name}: sources.lock has no {', '.join(pin.missing)}; `python -m workflows bump` reads it"
        for name, pin in locks.sources.items()
        if pin.missing and (jaxlib_from_source or name not in _OF_JAXLIB)
    ]
    remedy = "run `python -m workflows bump images`"
    said += [f"{name}: has no digest; {remedy}, or give one by digest" for name in unpinned]
    said += [
        f"{name}: images.lock has no sha256; {remedy}"
        for name, file in locks.images.files.items()
        if name.startswith("bazel ") and file.sha256 is None and jaxlib_from_source
    ]
    return said


def check(version: str, labels: Mapping[str, str], locks: Locks, unpinned: Sequence[str]) -> None:
    """Refuse a release of what nobody could build again.

    Parameters
    ----------
    labels
        Those that the image has or would get.
    unpinned
        Base images without a digest.

    Raises
    ------
    SeveralErrors
        All that stands against it, a line each.
    """
    from_source = labels.get("io.github.multimesh-jax.jaxlib", "").startswith("source")
    pins = null_pins(locks, unpinned, jaxlib_from_source=from_source)
    faults = [(said, errors.PinError.exit_code) for said in pins]
    for name, what in (
        (f"{_OCI}.revision", "this repository"),
        ("io.github.multimesh-jax.maxtext.revision", "MaxText"),
    ):
        revision = labels.get(name, "unknown")
        if revision == "unknown" or revision.endswith("-dirty"):
            state = "is at no commit" if revision == "unknown" else "has changes that are not committed"
            faults.append((f"{what}: {state}; commit them or take them back", errors.DirtyTreeError.exit_code))
    if (own := labels.get(f"{_OCI}.version")) != version.removeprefix("v"):
        faults.append((f"--release {version}: the library says {own}; make them agree", errors.UsageError.exit_code))
    if faults:
        raise errors.SeveralErrors([f"no release: {message}" for message, _ in faults], faults[0][1])


def unpinned(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the base image of a finished image if its digest was not known."""
    return (
        ()
        if labels.get(f"{_OCI}.base.digest", "unpinned") != "unpinned"
        else (labels.get(f"{_OCI}.base.name", "base"),)
    )


def record(
    root: Path, published: Published, built: Built, job: Mapping[str, Any], version: str | None
) -> dict[str, Any]:
    """Return what ``release.json`` says.

    Parameters
    ----------
    job
        The check that the image passed: ``job``, ``seconds``, ``verdict``.
    """
    pushed = published.pushed
    reference = built.spec.reference
    return {
        "format": 2,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": version,
        "image": {
            "repository": reference.repository,
            "digest": pushed.digest,
            "media_type": pushed.manifest.media_type,
            "id": built.image_id,
            "bytes": published.bytes_to_pull,
            "pull": f"docker pull {reference.at(pushed.digest)}",
            "staging": pushed.reference.tag,
            "tags": [asdict(each) for each in published.moved],
        },
        "check": {"job": job["job"], "verdict": job["verdict"]},
        "locks": {name: _sha256(root / name) for name in _LOCKS if (root / name).is_file()},
        "labels": dict(built.labels),
        "seconds": {
            "build": round(built.seconds, 1),
            "check": job["seconds"],
            "push": round(pushed.seconds, 1),
            "promote": round(published.promote_seconds, 1),
        },
        "attestations": {
            "said": published.attestations,
            "manifests": [asdict(each) | {"kinds": list(each.kinds)} for each in published.attested],
        },
        "signature": asdict(published.signature) if published.signature else None,
    }


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``release.json`` whole or not at all, and only if it is what its schema says."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, dict(document))


def _sha256(path: Path) -> str:
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
