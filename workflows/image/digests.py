"""``docker/images.lock``: base images by digest and downloads by checksum, and ``bump images``, which asks for them."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from workflows import console, errors, files
from workflows.image import reference

FILE = "docker/images.lock"
_BAZEL = re.compile(r"/bazel-(\d[^/-]*)-linux")
_SHA256 = re.compile(r"\b[0-9a-f]{64}\b")


@dataclass(frozen=True)
class ImagePin:
    """An image that others are built from or that runs as a service; ``digest`` is None where nobody told it.

    ``read_in`` names the public files that told it; empty where its registry did.
    """

    reference: str
    digest: str | None
    read_in: str = ""

    @property
    def exact(self) -> str:
        """The name that pulls these bytes, or the plain reference where they are not known."""
        return f"{self.reference}@{self.digest}" if self.digest else self.reference


@dataclass(frozen=True)
class FilePin:
    """A file that a build downloads; ``sha256`` is None where nobody told it, and ``read_in`` as an image's."""

    url: str
    sha256: str | None
    read_in: str = ""


@dataclass(frozen=True)
class ImageLock:
    """The whole file: pins by name; files are named by kind and platform, e.g. ``python linux/amd64``."""

    images: dict[str, ImagePin]
    files: dict[str, FilePin]


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


def load(root: Path) -> ImageLock:
    """Read and check ``images.lock``."""
    try:
        raw = json.loads((root / FILE).read_text(encoding="utf-8"))
        images = {k: ImagePin(str(v["reference"]), v["digest"], v.get("read_in", "")) for k, v in raw["images"].items()}
        downloads = {k: FilePin(str(v["url"]), v["sha256"], v.get("read_in", "")) for k, v in raw["files"].items()}
        for name, pin in images.items():
            if pin.digest is not None and not re.fullmatch(r"sha256:[0-9a-f]{64}", pin.digest):
                raise ValueError(f"{name}: {pin.digest!r} is no digest")
        for name, file in downloads.items():
            if not file.url.startswith("https://"):
                raise ValueError(f"{name}: {file.url!r} is not https")
            if file.sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
                raise ValueError(f"{name}: {file.sha256!r} is no sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise errors.ManifestError(f"{FILE}: is malformed ({error}); restore it with git") from error
    return ImageLock(images, downloads)


def save(root: Path, lock: ImageLock) -> None:
    """Write new pins into ``images.lock``, whole or not at all; what it says about itself stays."""
    raw = json.loads((root / FILE).read_text(encoding="utf-8"))
    for kind, pins in asdict(lock).items():
        raw[kind] = {name: {key: value for key, value in pin.items() if value != ""} for name, pin in pins.items()}
    # An image of which no more is said takes one line.
    text = re.sub(r'\{\s+("reference": "[^"]*"),\s+("digest": [^\s,]+)\s+\}', r"{\1, \2}", json.dumps(raw, indent=2))
    files.write(root / FILE, text + "\n")


def bump(root: Path) -> list[Answer]:
    """Ask for every pin that has a source to ask, all at once; a pin nobody answers for stays as it is.

    ``images.lock`` and the devcontainer that is built from it change together.
    A standalone Python's checksum comes from a table that a person reads, so it is not asked for.
    """
    from workflows.image import devcontainer

    held = load(root)
    downloads = {name: file for name, file in held.files.items() if name.startswith("bazel ")}
    before = {name: pin.digest for name, pin in held.images.items()} | {k: f.sha256 for k, f in downloads.items()}
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda pin: _digest(pin.reference), held.images.values())
        sums = pool.map(lambda file: _published(f"{file.url}.sha256"), downloads.values())
        told = zip(before.items(), [*found, *sums], strict=True)
        answers = [Answer(name, old, new or old, fault) for (name, old), (new, fault) in told]
    images, others = dict(held.images), dict(held.files)
    for answer in answers:
        if answer.name in images and not answer.fault:
            images[answer.name] = replace(images[answer.name], digest=answer.after, read_in="")
        elif not answer.fault:
            others[answer.name] = replace(others[answer.name], sha256=answer.after, read_in="")
    save(root, ImageLock(images, others))
    devcontainer.follow(root, ImageLock(images, others))
    return answers


def run(root: Path) -> int:
    """Bump, print a table, and fail if anything could not be asked."""
    answers = bump(root)
    rows = [(each.name, each.verdict, each.after or "null") for each in answers]
    print(console.table(("pin", "", "value"), rows))
    if silent := [f"{each.name}: {each.fault}" for each in answers if each.fault]:
        raise errors.SeveralErrors(silent, errors.NetworkError.exit_code)
    return 0


def move_bazel(root: Path, version: str) -> str:
    """Name another Bazel in ``images.lock`` and return the version before; a checksum is for ``bump`` to ask."""
    held, before, moved = load(root), version, dict[str, FilePin]()
    for name, file in held.files.items():
        found = _BAZEL.search(file.url)
        if found and found[1] != version:
            before = found[1]
            moved[name] = FilePin(file.url.replace(before, version), None)
    save(root, replace(held, files=held.files | moved))
    return before


def _digest(image: str) -> tuple[str | None, str | None]:
    """Return the digest that a registry gives for a reference, or why not; for all platforms where it has several."""
    from workflows.image.registry import Policy, Registry

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
        answer = requests.get(url, timeout=60)
        answer.raise_for_status()
    except requests.RequestException as error:
        return None, f"{url}: cannot be fetched ({type(error).__name__})"
    found = _SHA256.search(answer.text[:1000])
    return (found.group(), None) if found else (None, f"{url}: holds no sha256")
