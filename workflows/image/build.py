"""Run a build and take down what came of it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workflows import console, errors, proc
from workflows.image import bazel, command, context, digests, failure, network
from workflows.image.engine import Engine
from workflows.image.progress import Display, Steps
from workflows.image.spec import Built, ImageSpec, Layer, Means
from workflows.sources import lock as sources

_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
_ARCHIVE = Path("docker/context/python.tar.gz")
_SETTINGS = {"DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}


@dataclass(frozen=True)
class Done:
    """A build that ended: its steps, its exit status, what it wrote about its result, and the base image."""

    steps: Steps
    returncode: int
    result: str
    base: str


@dataclass(frozen=True)
class Plan:
    """One build, ready to run: the exact command and what its environment adds."""

    argv: tuple[str, ...]
    access: network.Access
    base: command.Bases
    labels: dict[str, str]
    untracked: tuple[str, ...]


def plan(
    root: Path,
    engine: Engine,
    spec: ImageSpec,
    means: Means,
    result: Path | None,
    *,
    more: tuple[str, ...] = (),
    push: str | None = None,
    folder: Path | None = None,
) -> Plan:
    """Return the build of a spec, with ``more`` options; reads files and git.

    Parameters
    ----------
    push
        A name to push it under, in place of loading it into the engine.
    folder
        Where secrets are written that the engine cannot take from the environment; None to write nothing.

    Raises
    ------
    PinError
        A component that goes into the image is missing or is not what ``sources.lock`` says, or Bazel has no pin.
    """
    pins = digests.load(root)
    base, access = command.bases(spec, pins), network.access(means, os.environ)
    library = _library(root)
    from_source = spec.jaxlib == "source"
    # At once, for a build of jaxlib takes minutes until it looks.
    built_from = [_component(root, name, "source") for name in ("jax", "xla") if from_source]
    untracked = context.untracked(root, jaxlib_from_source=from_source)
    odd = bool(untracked) or any(each.endswith("-dirty") for each in built_from)
    stamp = command.Stamp(_ours(root, odd=odd), _component(root, "maxtext", "run"), _source(os.environ))
    labels = command.labels(root, spec, base, stamp)
    machine = _PLATFORMS.get(os.uname().machine, "linux/amd64")
    build_args = command.arguments(spec, pins, base, machine=machine, multimesh=library)
    if from_source and not build_args["BAZEL_SHA256"]:
        raise errors.PinError(
            "Bazel is not pinned for this platform; run `python -m workflows bump images` where github.com answers"
        )
    if folder is not None and engine.builder == "podman":
        access = network.in_a_file(access, folder)
    access = replace(access, options=(*access.options, *more))
    argv = command.build_argv(
        engine, spec, means, build_args=build_args, labels=labels, access=access, result=result, push=push
    )
    return Plan(tuple(argv), access, base, labels, untracked)


def run(
    root: Path, engine: Engine, spec: ImageSpec, means: Means, *, save: bool = True, attest: tuple[str, ...] = ()
) -> Built | None:
    """Build an image; it has no name yet. None where only the cache was to be filled.

    Parameters
    ----------
    attest
        Options that attach attestations, for an engine that keeps them.
    """
    started = time.monotonic()
    done = execute(root, engine, spec, means, save=save, attest=attest)
    if done.returncode:
        raise failure.explain(done.steps, done.returncode, done.base)
    if not save:
        return None
    cached, steps = done.steps.counted
    return describe(
        engine, spec, *_names(done.result, engine), seconds=time.monotonic() - started, cached=cached, steps=steps
    )


def execute(
    root: Path,
    engine: Engine,
    spec: ImageSpec,
    means: Means,
    *,
    save: bool = True,
    attest: tuple[str, ...] = (),
    push: str | None = None,
) -> Done:
    """Run a build to its end, good or bad, with all that it needs beside it; the parameters are those of ``plan``."""
    cache = bazel.find(spec, means)
    before = cache.hits() if cache else None
    with tempfile.TemporaryDirectory(prefix="multimesh-image-") as folder, _archive(root, spec):
        result = Path(folder) / "result"
        secret = bazel.secret(cache, Path(folder), write=means.bazel_cache_write)
        where = bazel.reach(means, cache)
        more = (*secret, *attest)
        todo = plan(root, engine, spec, where, result if save else None, more=more, push=push, folder=Path(folder))
        for name in todo.untracked:
            console.note(f"{name}: git does not track it, and the image may hold it; a push refuses that")
        for reference in todo.base.unpinned:
            console.note(f"{reference}: not pinned by digest; a release refuses that")
        for place in todo.access.left_out:
            console.note(f"{place}: pip finds packages there on this machine, but a build cannot see it")
        with Display() as display:
            # Only attestations say what buildx asks git.
            env = os.environ | todo.access.variables | _SETTINGS | {"BUILDX_GIT_INFO": "true" if attest else "false"}
            done = proc.run(todo.argv, cwd=root, env=env, check=False, on_line=display.line)
        if cache and before and (after := cache.hits()):
            console.note(f"Bazel cache {cache.address}: {after - before}")
        told = result.read_text(encoding="utf-8").strip() if result.exists() else ""
    return Done(display.steps, done.returncode, told, todo.base.build.reference)


def describe(engine: Engine, spec: ImageSpec, *names: str, seconds: float, cached: int, steps: int) -> Built:
    """Ask the engine about an image that it has under one of these names."""
    found = next((known for known in map(engine.inspect, names) if known is not None), None)
    if found is None:
        raise errors.EngineError(f"{' or '.join(names)}: the engine has no such image; build it first")
    return Built(
        spec=spec,
        image_id="sha256:" + str(found["Id"]).removeprefix("sha256:"),  # Podman says the number alone
        seconds=seconds,
        cached=cached,
        steps=steps,
        bytes=_bytes(engine, found),
        labels=dict((found.get("Config") or {}).get("Labels") or {}),
        names=tuple(found.get("RepoTags") or ()),
        content=_content(found),
    )


def _bytes(engine: Engine, found: dict[str, Any]) -> int:
    """Return the size of an image as it lies unpacked; a containerd image store says that of its compressed layers."""
    if "Descriptor" in found:
        return sum(layer.bytes for layer in layers(engine, str(found["Id"])))
    return int(found.get("Size") or 0)


def _content(found: dict[str, Any]) -> str:
    """Return a digest of what decides whether an image passes its check: not its labels, which every commit changes."""
    config = {key: value for key, value in (found.get("Config") or {}).items() if key not in ("Labels", "Image")}
    document = json.dumps([found.get("RootFS"), config, found.get("Architecture")], sort_keys=True)
    return f"sha256:{hashlib.sha256(document.encode()).hexdigest()}"


def layers(engine: Engine, image: str) -> list[Layer]:
    """Return the layers of an image that hold anything, from the base up."""
    found = []
    for entry in reversed(_history(engine, image)):
        size = int(entry.get("size") or 0)
        if size:
            found.append(Layer(_instruction(str(entry.get("createdby") or "base image")), size))
    return found


def _history(engine: Engine, image: str) -> list[dict[str, Any]]:
    """Return the steps of an image, the last first; engines write the same names in different cases."""
    asked = ["history", "--no-trunc", "--human=false", "--format"]
    if engine.kind == "podman":
        entries = json.loads(engine.run(*asked, "json", image).text)
    else:
        entries = [json.loads(line) for line in engine.run(*asked, "{{json .}}", image).text.splitlines()]
    return [{key.lower(): value for key, value in entry.items()} for entry in entries]


def _instruction(text: str) -> str:
    words = [word for word in text.replace("# buildkit", "").split() if not word.startswith("--mount=")]
    line = re.sub(r"^RUN (\|\d+ .*?)?/bin/sh -euc ", "RUN ", " ".join(words))
    return line if len(line) <= 90 else line[:87] + "..."


def _names(result: str, engine: Engine) -> list[str]:
    """Return what an engine may call its image: by the configuration or, in a containerd store, by the manifest."""
    if engine.builder != "buildx":
        return [result]
    told = json.loads(result)
    return [told[key] for key in ("containerimage.config.digest", "containerimage.digest") if key in told]


@contextmanager
def _archive(root: Path, spec: ImageSpec) -> Iterator[None]:
    """Put a given Python where the build can read it, for as long as it runs; remove one that a killed build left."""
    place = root / _ARCHIVE
    if spec.python_archive is None and not place.exists():
        yield
        return
    with place.open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.UsageError(
                f"{_ARCHIVE}: another build with --python-archive runs in this clone; wait for its end"
            ) from None
        try:
            if spec.python_archive is None:
                place.unlink()
            else:
                shutil.copyfile(spec.python_archive, place)
            yield
        finally:
            place.unlink(missing_ok=True)


def _source(environ: Mapping[str, str]) -> str | None:
    """Return the address of the repository whose workflow builds; a person's remote may hold more than an address."""
    server, name = environ.get("GITHUB_SERVER_URL"), environ.get("GITHUB_REPOSITORY")
    return f"{server}/{name}" if server and name else None


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


def _ours(root: Path, *, odd: bool) -> str | None:
    """Return the commit of this repository, marked also where a build would read what no commit or pin holds."""
    commit = _revision(root)
    return f"{commit.removesuffix('-dirty')}-dirty" if commit and odd else commit


def _component(root: Path, name: str, group: str) -> str:
    """Return the commit of a patched component, marked where it differs, or raise what must be done first."""
    place = root / "third_party" / name
    inside = place / "src" / "maxtext" if name == "maxtext" else place / ".git"
    if not inside.exists():
        raise errors.PinError(f"third_party/{name} is not there; run ./bootstrap.sh --group {group}")
    held = _revision(place) if (place / ".git").exists() else None  # without git, nothing says what it holds
    pinned = sources.value(root / "sources.lock", name, "patched_commit")
    if pinned is None:
        raise errors.PinError(f"sources.lock has no patched commit of {name}; run `python -m workflows lock {name}`")
    if held is not None and held.removesuffix("-dirty") != pinned:
        raise errors.PinError(
            f"third_party/{name} is at {held[:12]}, the lock says {pinned[:12]}; run ./bootstrap.sh --group {group}"
        )
    return held or f"{pinned}-dirty"
