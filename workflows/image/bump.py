"""``bump images``: ask registries and servers for the digests and checksums that ``images.lock`` holds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from workflows import console, errors
from workflows.image import engine, lock
from workflows.image.engine import Engine

_TIMEOUT_S = 60
_SHA256 = re.compile(r"\b[0-9a-f]{64}\b")


@dataclass(frozen=True)
class Answer:
    """What was found for one pin: the new value, or why there is none."""

    name: str
    before: str | None
    after: str | None
    fault: str | None

    @property
    def verdict(self) -> str:
        """One word for people."""
        if self.fault:
            return "not reached"
        return "kept" if self.before == self.after else "changed" if self.before else "filled"


def bump(root: Path) -> list[Answer]:
    """Ask for every pin that has a source to ask, and write ``images.lock``; a pin nobody answers for stays as it is.

    A standalone Python's checksum comes from a table that a person reads, so it is not asked for.
    """
    held, where = lock.load(root), engine.detect()
    if where.builder != "buildx":
        raise errors.EngineError(f"{where.summary}: asking registries needs docker's buildx plugin; install it")
    images, files, answers = dict(held.images), dict(held.files), list[Answer]()
    for name, pin in held.images.items():
        digest, fault = _digest(where, pin.reference)
        answers.append(Answer(name, pin.digest, digest or pin.digest, fault))
        images[name] = replace(pin, digest=digest or pin.digest)
    for name, file in held.files.items():
        if name.startswith("bazel "):
            sha256, fault = _published(f"{file.url}.sha256")
            answers.append(Answer(name, file.sha256, sha256 or file.sha256, fault))
            files[name] = replace(file, sha256=sha256 or file.sha256)
    lock.save(root, lock.ImageLock(images, files))
    return answers


def run(root: Path) -> int:
    """Bump, print a table, and fail if anything could not be asked."""
    answers = bump(root)
    rows = [(each.name, each.verdict, each.after or "null") for each in answers]
    print(console.table(("pin", "", "value"), rows))
    silent = [f"{each.name}: {each.fault}" for each in answers if each.fault]
    if silent:
        raise errors.SeveralErrors(silent, errors.NetworkError.exit_code)
    return 0


def _digest(where: Engine, reference: str) -> tuple[str | None, str | None]:
    """Return the digest that a registry gives for a reference, or why not; for all platforms where it has several."""
    try:
        told = where.run(
            "buildx",
            "imagetools",
            "inspect",
            "--format",
            "{{json .Manifest}}",
            reference,
            check=False,
            timeout_s=_TIMEOUT_S,
        )
    except TimeoutError:
        return None, f"{reference}: no answer in {_TIMEOUT_S} s"
    if told.returncode:
        return None, f"{reference}: its registry does not answer ({told.complaint[:200]})"
    digest = str(json.loads(told.text).get("digest", ""))
    return (digest, None) if digest else (None, f"{reference}: its registry names no digest")


def _published(url: str) -> tuple[str | None, str | None]:
    """Return the checksum that a project publishes beside a file, or why not."""
    import requests

    try:
        answer = requests.get(url, timeout=_TIMEOUT_S)
        answer.raise_for_status()
    except requests.RequestException as error:
        return None, f"{url}: cannot be fetched ({type(error).__name__})"
    found = _SHA256.search(answer.text[:1000])
    return (found.group(), None) if found else (None, f"{url}: holds no sha256")
