"""What a tag must hold before anything is published: agreeing versions, a wheel that works, notes from the commits."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

from workflows import errors, proc
from workflows.image import command, release
from workflows.image.spec import ImageSpec

_TAG = re.compile(r"v\d+\.\d+\.\d+")
_DUNDER = re.compile(r"^__version__ = \"([^\"]+)\"$", re.MULTILINE)
PROJECTS = ("pyproject.toml", "multimesh/pyproject.toml")
PACKAGE = "multimesh/src/multimesh/__init__.py"


def versions(root: Path) -> dict[str, str]:
    """Return the version that each file of a clone names."""
    found = {
        name: str(tomllib.loads((root / name).read_text(encoding="utf-8"))["project"]["version"]) for name in PROJECTS
    }
    match = _DUNDER.search((root / PACKAGE).read_text(encoding="utf-8"))
    return found | {PACKAGE: match[1] if match else "none"}


def check_versions(root: Path, tag: str) -> str:
    """Return the version of a tag, when every file of the clone names it.

    Raises
    ------
    UsageError
        The tag is none of ours, or a file names another version.
    """
    if not _TAG.fullmatch(tag):
        raise errors.UsageError(f"tag '{tag}': is not of the form v1.2.3")
    wrong = [f"{name} says {version}" for name, version in versions(root).items() if version != tag[1:]]
    if wrong:
        raise errors.UsageError(f"tag {tag}: {', '.join(wrong)}; change them, or tag the version that they name")
    return tag[1:]


def check_pins(root: Path, spec: ImageSpec) -> None:
    """Refuse a tag early, by the rule that its image would meet once it is built.

    Raises
    ------
    SeveralErrors
        A line for each pin that is null.
    """
    locks = release.load_locks(root)
    base = command.bases(spec, locks.images)
    if said := release.null_pins(locks, base.unpinned, jaxlib_from_source=spec.jaxlib == "source"):
        raise errors.SeveralErrors([f"no release: {line}" for line in said], errors.PinError.exit_code)


def build_wheel(root: Path, folder: Path) -> tuple[Path, str]:
    """Build multimesh's wheel twice, check it, and return it with its sha256.

    Raises
    ------
    IntegrityError
        Two builds differ, or the wheel is not what it should be.
    """
    date = proc.run(["git", "-C", root, "log", "-1", "--format=%ct"]).text
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        first, second = (_build(root, Path(scratch, name), date) for name in ("one", "two"))
        digest = hashlib.sha256(first.read_bytes()).hexdigest()
        if digest != hashlib.sha256(second.read_bytes()).hexdigest():
            raise errors.IntegrityError(
                f"{first.name}: two builds of one commit differ; find out why before publishing"
            )
        _check_wheel(first, versions(root)["multimesh/pyproject.toml"], Path(scratch, "unpacked"))
        return first.replace(folder / first.name), digest


def _build(root: Path, folder: Path, date: str) -> Path:
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    proc.run(argv, cwd=root / "multimesh", env=os.environ | {"SOURCE_DATE_EPOCH": date})
    return next(folder.glob("*.whl"))


def _check_wheel(wheel: Path, version: str, unpacked: Path) -> None:
    """See that it holds the package and nothing else, names its version, and imports away from the clone."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(unpacked)
    strange = [name for name in names if name.split("/")[0] not in ("multimesh", f"multimesh_jax-{version}.dist-info")]
    if strange:
        raise errors.IntegrityError(f"{wheel.name}: holds {strange[0]}; a wheel holds the package only")
    metadata = Parser().parsestr((unpacked / f"multimesh_jax-{version}.dist-info" / "METADATA").read_text())
    for field, wanted in (("Name", "multimesh-jax"), ("Version", version), ("License-Expression", "Apache-2.0")):
        if metadata[field] != wanted:
            raise errors.IntegrityError(f"{wheel.name}: {field} is {metadata[field]}, not {wanted}")
    code = "import multimesh, multimesh.jax; print(multimesh.__version__, multimesh.__file__)"
    said = proc.run(
        [sys.executable, "-P", "-c", code], cwd=unpacked, env=os.environ | {"PYTHONPATH": str(unpacked)}
    ).text
    if said != f"{version} {unpacked / 'multimesh' / '__init__.py'}":
        raise errors.IntegrityError(f"{wheel.name}: what it imports is {said}")


def notes(root: Path, tag: str) -> str:
    """Return release notes: what the commits since the tag before made possible."""
    git = ["git", "-C", str(root)]
    before = proc.run([*git, "describe", "--tags", "--abbrev=0", "--match", "v*", f"{tag}^"], check=False)
    span = f"{before.text}..{tag}" if before.returncode == 0 else tag
    log = proc.run([*git, "log", "--no-merges", "--format=- %s (%h)", span]).text
    since = f"Since {before.text}:" if before.returncode == 0 else "The first release:"
    return f"{since}\n\n{log or '- no commits'}\n"
