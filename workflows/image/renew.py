"""``bump images``: ask registries and servers for the digests and checksums that ``images.lock`` holds."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from workflows import console, errors
from workflows.image import devcontainer, digests, reference
from workflows.image.digests import FilePin
from workflows.image.registry import Registry
from workflows.image.retry import Policy

_TIMEOUT_S = 60
_BAZEL = re.compile(r"/bazel-(\d[^/-]*)-linux")
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
    """Ask for every pin that has a source to ask, all at once; a pin nobody answers for stays as it is.

    ``images.lock`` and the devcontainer that is built from it change together.
    A standalone Python's checksum comes from a table that a person reads, so it is not asked for.
    """
    held = digests.load(root)
    downloads = {name: file for name, file in held.files.items() if name.startswith("bazel ")}
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda pin: _digest(pin.reference), held.images.values()))
        sums = list(pool.map(lambda file: _published(f"{file.url}.sha256"), downloads.values()))
    answers = [
        Answer(name, pin.digest, digest or pin.digest, fault)
        for (name, pin), (digest, fault) in zip(held.images.items(), found, strict=True)
    ] + [
        Answer(name, file.sha256, sha256 or file.sha256, fault)
        for (name, file), (sha256, fault) in zip(downloads.items(), sums, strict=True)
    ]
    told = {answer.name: answer.after for answer in answers if not answer.fault}
    images = {name: replace(held.images[name], digest=told[name], read_in="") for name in held.images.keys() & told}
    files = {name: replace(held.files[name], sha256=told[name], read_in="") for name in held.files.keys() & told}
    new = digests.ImageLock(held.images | images, held.files | files)
    digests.save(root, new)
    devcontainer.follow(root, new)
    return answers


def move_bazel(root: Path, version: str) -> str:
    """Name another Bazel in ``images.lock`` and return the version before; a checksum is for ``bump`` to ask."""
    held, before, files = digests.load(root), version, dict[str, FilePin]()
    for name, file in held.files.items():
        found = _BAZEL.search(file.url)
        if found and found[1] != version:
            before = found[1]
            files[name] = FilePin(file.url.replace(before, version), None)
    digests.save(root, replace(held, files=held.files | files))
    return before


def run(root: Path) -> int:
    """Bump, print a table, and fail if anything could not be asked."""
    answers = bump(root)
    rows = [(each.name, each.verdict, each.after or "null") for each in answers]
    print(console.table(("pin", "", "value"), rows))
    silent = [f"{each.name}: {each.fault}" for each in answers if each.fault]
    if silent:
        raise errors.SeveralErrors(silent, errors.NetworkError.exit_code)
    return 0


def _digest(image: str) -> tuple[str | None, str | None]:
    """Return the digest that a registry gives for a reference, or why not; for all platforms where it has several."""
    repository, _, tag = image.rpartition(":")
    try:
        with Registry(reference.make(repository, None, tag), Policy(attempts=2)) as registry:
            return registry.get(tag).digest, None
    except errors.WorkflowsError as error:
        return None, f"{image}: its registry does not answer ({error})"


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
