"""Run a build and take down what came of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from workflows import console, errors, proc
from workflows.image import bazel, command, failure, lock, network
from workflows.image.engine import Engine
from workflows.image.progress import Display
from workflows.image.spec import Built, ImageSpec, Layer, Means
from workflows.sources import lock as sources

_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
_ARCHIVE = Path("docker/context/python.tar.gz")
# An image is loaded to be checked, which drops attestations; so buildx need not ask git what they would say.
_SETTINGS = {"DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1", "BUILDX_GIT_INFO": "false"}


@dataclass(frozen=True)
class Plan:
    """One build, ready to run: the exact command and what its environment adds."""

    argv: tuple[str, ...]
    access: network.Access
    base: command.Bases
    labels: dict[str, str]


def plan(
    root: Path, engine: Engine, spec: ImageSpec, means: Means, result: Path | None, *, more: tuple[str, ...] = ()
) -> Plan:
    """Return the build of a spec, with ``more`` options; reads files and git, writes nothing.

    Raises
    ------
    PinError
        ``third_party/maxtext`` is missing or is not what ``sources.lock`` says.
    """
    pins = lock.load(root)
    base, access = command.bases(spec, pins), network.access(means, os.environ)
    library = _library(root)
    stamp = command.Stamp(_revision(root), _maxtext(root))
    labels = command.labels(root, spec, base, stamp)
    machine = _PLATFORMS.get(os.uname().machine, "linux/amd64")
    build_args = command.arguments(spec, pins, base, machine=machine, multimesh=library)
    access = replace(access, options=(*access.options, *more))
    argv = command.build_argv(engine, spec, means, build_args=build_args, labels=labels, access=access, result=result)
    return Plan(tuple(argv), access, base, labels)


def run(root: Path, engine: Engine, spec: ImageSpec, means: Means, *, save: bool = True) -> Built | None:
    """Build an image; it has no name yet. None where only the cache was to be filled."""
    started = time.monotonic()
    cache = bazel.find(spec, means)
    before = cache.hits() if cache else None
    with tempfile.TemporaryDirectory(prefix="multimesh-image-") as folder, _archive(root, spec):
        result = Path(folder) / "result"
        secret = bazel.secret(cache, Path(folder), write=means.bazel_cache_write)
        todo = plan(root, engine, spec, bazel.reach(means, cache), result if save else None, more=secret)
        for reference in todo.base.unpinned:
            console.note(f"{reference}: not pinned by digest; a release refuses that")
        for place in todo.access.left_out:
            console.note(f"{place}: pip finds packages there on this machine, but a build cannot see it")
        with Display(plain_output=engine.builder != "buildx") as display:
            env = os.environ | todo.access.variables | _SETTINGS
            done = proc.run(todo.argv, cwd=root, env=env, check=False, on_line=display.line)
        if done.returncode:
            raise failure.explain(display.steps, done.returncode, todo.base.build.reference)
        if cache and before and (after := cache.hits()):
            console.note(f"Bazel cache {cache.address}: {after - before}")
        if not save:
            return None
        image_id = _image_id(result, engine)
    cached, steps = display.steps.counted
    return describe(engine, spec, image_id, seconds=time.monotonic() - started, cached=cached, steps=steps)


def describe(engine: Engine, spec: ImageSpec, image: str, *, seconds: float, cached: int, steps: int) -> Built:
    """Ask the engine about an image that it has."""
    found = engine.inspect(image)
    if found is None:
        raise errors.EngineError(f"{image}: the engine has no such image; build it first")
    return Built(
        spec=spec,
        image_id=str(found["Id"]),
        seconds=seconds,
        cached=cached,
        steps=steps,
        bytes=int(found.get("Size") or 0),
        labels=dict((found.get("Config") or {}).get("Labels") or {}),
        names=tuple(found.get("RepoTags") or ()),
    )


def layers(engine: Engine, image: str) -> list[Layer]:
    """Return the layers of an image that hold anything, from the base up."""
    told = engine.run("history", "--no-trunc", "--human=false", "--format", "{{json .}}", image).text
    found = []
    for line in reversed(told.splitlines()):
        entry = json.loads(line)
        size = int(entry.get("Size") or 0)
        if size:
            found.append(Layer(_instruction(str(entry.get("CreatedBy") or "base image")), size))
    return found


def _instruction(text: str) -> str:
    words = [word for word in text.replace("# buildkit", "").split() if not word.startswith("--mount=")]
    line = re.sub(r"^RUN (\|\d+ .*?)?/bin/sh -euc ", "RUN ", " ".join(words))
    return line if len(line) <= 90 else line[:87] + "..."


def _image_id(result: Path, engine: Engine) -> str:
    text = result.read_text(encoding="utf-8").strip()
    if engine.builder != "buildx":
        return text
    told = json.loads(text)
    # A builder of its own names the manifest in the first and the image in the second.
    return str(told.get("containerimage.config.digest") or told["containerimage.digest"])


@contextmanager
def _archive(root: Path, spec: ImageSpec) -> Iterator[None]:
    """Put a given Python where the build can read it, for as long as it runs."""
    if spec.python_archive is None:
        yield
        return
    place = root / _ARCHIVE
    try:
        shutil.copyfile(spec.python_archive, place)
        yield
    finally:
        place.unlink(missing_ok=True)


def _library(root: Path) -> str:
    """Return the folder of MultiMesh: this repository's, or the override in ``third_party``."""
    place = root / "third_party" / "multimesh"
    return "third_party/multimesh" if place.is_dir() and not place.is_symlink() else "multimesh"


def _revision(root: Path) -> str | None:
    """Return the commit of a tree, marked where the tree differs from it; None where there is none."""
    ask: list[str | Path] = ["git", "-C", root, "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    told = proc.run(ask, check=False)
    commit = next((line.split()[2] for line in told.text.splitlines() if line.startswith("# branch.oid ")), None)
    if told.returncode or commit is None:
        return None
    changed = any(not line.startswith("#") for line in told.text.splitlines())
    return f"{commit}-dirty" if changed else commit


def _maxtext(root: Path) -> str:
    """Return the commit of the patched MaxText, or raise what must be done first."""
    place = root / "third_party" / "maxtext"
    if not (place / "src" / "maxtext").is_dir():
        raise errors.PinError("third_party/maxtext is not there; run ./bootstrap.sh --group run")
    held = _revision(place) if (place / ".git").exists() else None
    pinned = sources.value(root / "sources.lock", "maxtext", "patched_commit")
    if pinned is None:
        raise errors.PinError("sources.lock has no patched commit of maxtext; run `python -m workflows lock maxtext`")
    if held is not None and held.removesuffix("-dirty") != pinned:
        raise errors.PinError(
            f"third_party/maxtext is at {held[:12]}, the lock says {pinned[:12]}; run ./bootstrap.sh --group run"
        )
    return held or pinned
