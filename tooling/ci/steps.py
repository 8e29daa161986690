"""``ci``: the steps of the GitHub workflows, which run here too; most check a tag before it is published."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from email.parser import Parser
from pathlib import Path
from typing import Any

from tooling.ci import relock
from tooling.core import errors, files, proc
from tooling.core.console import Subparsers, command
from tooling.image import buildx, engine, reference, release, tags
from tooling.image.request import ImageSpec, add_options, from_options
from tooling.sources import manifest
from tooling.sources.workspace import ROOT

_TAG = re.compile(r"v\d+\.\d+\.\d+")
_DUNDER = re.compile(r"^__version__ = \"([^\"]+)\"$", re.MULTILINE)
WHEELS = {
    "multimesh": ("multimesh-jax", "multimesh.jax"),
    "maxtext": ("multimesh-maxtext", "multimesh_maxtext.command.cli"),
}
"""The folder of each published distribution, its name, and a module of it that imports most others."""
PACKAGE = "multimesh/src/multimesh/__init__.py"


def register(subparsers: Subparsers) -> None:
    """Add the command and its parts."""
    text = "the steps of the GitHub workflows"
    parser = command(subparsers, "ci", run_preflight, text, ["python -m tooling ci wheel dist"])
    parts = parser.add_subparsers(dest="part", metavar="STEP", required=True)

    text = "fail where a push or a promotion would, before anything is built: tag, rights, a version that is taken"
    part = command(parts, "preflight", run_preflight, text)
    part.add_argument("image", help="its repository, e.g. ghcr.io/OWNER/multimesh-jax")
    part.add_argument("--tag", required=True)
    part.add_argument("--latest", action="store_true")
    part.add_argument("--release", metavar="VERSION")
    text = "fail unless every file names the version of a tag, and its image is pinned"
    part = command(parts, "versions", run_versions, text)
    part.add_argument("tag")
    part.add_argument("options", nargs="*", help="after --: those of docker/build.py that the image gets")
    part = command(parts, "wheel", run_wheel, "build every wheel twice, check it, print its sha256")
    part.add_argument("folder", type=Path, nargs="?", default=Path("dist"))
    text = "print release notes: how to pull, run and install it, and the commits since the tag before"
    part = command(parts, "notes", run_notes, text)
    part.add_argument("tag")
    part.add_argument("file", type=Path, help="the release.json of its image")
    part.add_argument("--gpu", action="store_true", help="its image was checked on a GPU")
    relock.add_step(parts)


def run_preflight(args: argparse.Namespace) -> None:
    """Print the tags that the image would get."""
    wanted = reference.make(args.image, None, args.tag)
    names = tags.tags(wanted, latest=args.latest, version=args.release)
    where = engine.detect()
    tags.check_push(where, wanted)
    tags.check_free(where, wanted, names)
    print(" ".join(names))


def run_versions(args: argparse.Namespace) -> None:
    """Print the version of the tag."""
    version = check_versions(ROOT, args.tag)
    parser = argparse.ArgumentParser("docker/build.py", allow_abbrev=False)
    add_options(parser)
    check_pins(ROOT, from_options(parser.parse_args(args.options)).spec)
    print(version)


def run_wheel(args: argparse.Namespace) -> None:
    """Print sha256 and name of each, as sha256sum does."""
    for path, digest in build_wheels(ROOT, args.folder.resolve()):
        print(f"{digest}  {path.name}")


def run_notes(args: argparse.Namespace) -> None:
    """Print Markdown."""
    print(notes(ROOT, args.tag, release.read(args.file), gpu=args.gpu), end="")


def versions(root: Path) -> dict[str, str]:
    """Return the version that each file of a clone names."""
    texts = {name: (root / name).read_text(encoding="utf-8") for name in relock.PROJECTS}
    found = {name: str(tomllib.loads(text)["project"]["version"]) for name, text in texts.items()}
    match = _DUNDER.search((root / PACKAGE).read_text(encoding="utf-8"))
    return found | {PACKAGE: match[1] if match else "none"}


def check_versions(root: Path, tag: str) -> str:
    """Return the version of a tag of ours, when every file of the clone names it; else raise ``UsageError``."""
    if not _TAG.fullmatch(tag):
        raise errors.UsageError(f"tag '{tag}': is not of the form v1.2.3")
    wrong = [f"{name} says {version}" for name, version in versions(root).items() if version != tag[1:]]
    if wrong:
        raise errors.UsageError(f"tag {tag}: {', '.join(wrong)}; change them, or tag the version that they name")
    return tag[1:]


def check_pins(root: Path, spec: ImageSpec) -> None:
    """Refuse a tag early, by the rule that its image would meet once it is built: a line for each pin that is null."""
    locks = release.load_locks(root)
    base = buildx.bases(spec, locks[1])
    platform = spec.platform or "linux/amd64"  # of GitHub's runners
    if said := release.null_pins(locks, base.unpinned, jaxlib_from_source=spec.jaxlib == "source", platform=platform):
        raise errors.SeveralErrors([f"no release: {line}" for line in said], errors.PinError.exit_code)


def build_wheels(root: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Build each wheel twice, and yield it with its sha256 if both builds are one and its check passes."""
    date = proc.run(["git", "-C", root, "log", "-1", "--format=%ct"]).text
    version = versions(root)["multimesh/pyproject.toml"]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for project, (name, module) in WHEELS.items():
            first, second = (_build(root / project, Path(scratch, project, each), date) for each in ("one", "two"))
            if (digest := files.sha256(first)) != files.sha256(second):
                raise errors.IntegrityError(
                    f"{first.name}: two builds of one commit differ; find out why before publishing"
                )
            _check_wheel(first, name, version, module, root / project / "src", Path(scratch, "unpacked"))
            yield first.replace(folder / first.name), digest


def _build(project: Path, folder: Path, date: str) -> Path:
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    proc.run(argv, cwd=project, env=os.environ | {"SOURCE_DATE_EPOCH": date})
    return next(folder.glob("*.whl"))


def _check_wheel(wheel: Path, name: str, version: str, module: str, source: Path, unpacked: Path) -> None:
    """See that it holds the files of the package that git tracks, names its version, and imports away from the clone.

    It is unpacked beside those that were checked before, which it may need.
    """
    described = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        held = {entry for entry in archive.namelist() if not entry.startswith(f"{described}/")}
        archive.extractall(unpacked)
    wanted = set(filter(None, proc.run(["git", "-C", source, "ls-files", "-z"]).text.split("\0")))
    if odd := sorted(held ^ wanted):
        holds = "holds" if odd[0] in held else "does not hold"
        raise errors.IntegrityError(f"{wheel.name}: {holds} {odd[0]}; a wheel holds the package and nothing else")
    metadata = Parser().parsestr((unpacked / described / "METADATA").read_text())
    for field, value in (("Name", name), ("Version", version), ("License-Expression", "Apache-2.0")):
        if metadata[field] != value:
            raise errors.IntegrityError(f"{wheel.name}: {field} is {metadata[field]}, not {value}")
    package = module.partition(".")[0]
    code = f"import {module}; print({package}.__file__)"
    env = os.environ | {"PYTHONPATH": str(unpacked)}
    said = proc.run([sys.executable, "-P", "-c", code], cwd=unpacked, env=env).text
    if said != str(unpacked / package / "__init__.py"):
        raise errors.IntegrityError(f"{wheel.name}: what it imports is {said}")


def notes(root: Path, tag: str, image: Mapping[str, Any], *, gpu: bool) -> str:
    """Return release notes (GitHub takes 125,000 characters): how to pull, run and install it; at most 1000 commits.

    ``image`` is the ``release.json`` of the image that runs; ``UsageError`` where that is of another version.
    """
    if image["version"] != tag or f"v{image['labels'].get(f'{buildx.OCI}.version')}" != tag:
        raise errors.UsageError(f"release.json is of version {image['version']}, not of {tag}; take that of its image")
    git = ["git", "-C", str(root)]
    before = proc.run([*git, "describe", "--tags", "--abbrev=0", "--match", "v*", f"{tag}^"], check=False)
    span = f"{before.text}..{tag}" if before.returncode == 0 else tag
    log = proc.run([*git, "log", "--no-merges", "--max-count=1000", "--format=- %s (%h)", span]).text
    since = f"Since {before.text}:" if before.returncode == 0 else "The first release:"
    name, on_gpus = f"{image['image']['repository']}:{tag}", image["labels"][f"{buildx.LABEL}.accelerator"] != "cpu"
    how, job = ("--gpus all ", "validate-gpu.sh") if on_gpus else ("", "validate-cpu.sh")
    server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    wheel = f"{server}/{repository}/releases/download/{tag}/multimesh_jax-{tag[1:]}-py3-none-any.whl"
    install = f"pip install {wheel}\n" if server and repository else ""
    checked = "trained on GPUs" if gpu else "trained on the CPU; no GPU checked it"
    pins = manifest.load_lock(root / "sources.lock").items()
    unnamed = "".join(
        f"{name} {pin.version} is pinned by its bytes (tree {pin.tree}); the commit of its tag was read nowhere.\n\n"
        for name, pin in pins
        if pin.commit is None
    )
    return (
        f"```console\n{image['image']['pull']}\ndocker run --rm {how}{name} /opt/maxtext/{job}\n{install}```\n\n"
        f"Before its release the image {checked}.\n\n{unnamed}{since}\n\n{log or '- no commits'}\n"
    )
