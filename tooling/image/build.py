"""Runs a build, notes its result and explains why it failed. Finds files that it would read and git does not track."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tooling.core import console, errors, proc
from tooling.image import buildx, digests, network
from tooling.image.engine import Engine
from tooling.image.request import Built, ImageSpec, Means
from tooling.sources import manifest

IGNORE = f"{buildx.DOCKERFILE}.dockerignore"
_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
_ARCHIVE = Path("docker/context/python.tar.gz")
# BuildKit's summary of the step that broke a build, not of those that were stopped for that, with its last lines.
_FAILED = r"(?m)^------\n > (.*):\n((?:.*\n)*?)------$"
_REASON = r"(?m)^ERROR: (?:failed to (?:build|solve): )*(.*)"
# Where a builder looks for a base: a step of its own, or the first of a stage.
_BASE = r"\[internal\] load metadata|\[.* \d+/\d+\] FROM "
_TOLD = r"(?!error: [a-z-]+$)([A-Za-z]*(error|ERROR|Error|Exception)|E|fatal|curl)(: | \()"
# Labels say what buildx would ask git.
_SETTINGS = {"DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1", "BUILDX_GIT_INFO": "false"}


class Plan(NamedTuple):
    """One build, ready to run: the exact command, and what it goes by."""

    argv: tuple[str, ...]
    base: buildx.Bases
    labels: dict[str, str]
    untracked: tuple[str, ...]


def plan(
    root: Path,
    engine: Engine,
    spec: ImageSpec,
    means: Means,
    result: Path,
    *,
    more: tuple[str, ...] = (),
    only_plan: bool = False,
) -> Plan:
    """Return the build of a spec, with ``more`` options; reads files and git.

    ``PinError``: a component that goes into the image is missing or is not what ``sources.lock`` says, or Bazel has no
    pin. Where it is ``only_plan``, one that is missing counts as what the lock says.
    """
    pins = digests.load(root)
    base, from_source = buildx.bases(spec, pins), spec.jaxlib == "source"
    others, ours, source, maxtext, *built_from = proc.together(
        partial(list_strays, root, jaxlib_from_source=from_source),
        partial(_revision, root),
        partial(_source, root),
        partial(_component, root, "maxtext", "image", only_plan),
        # At once, for a build of jaxlib takes minutes until it looks.
        *(partial(_component, root, name, "source", only_plan) for name in ("jax", "xla") if from_source),
    )
    if ours and (others or any(each.endswith("-dirty") for each in built_from)):
        ours = f"{ours.removesuffix('-dirty')}-dirty"
    held, locked = manifest.read_pin(root / "sources.lock", "jax", "version"), buildx.jax(root)
    if from_source and held != locked:
        raise errors.PinError(
            f"third_party/jax is {held}, the packages of an image go with jax {locked}; take --jaxlib wheel, "
            f"or run `python -m tooling bump jax {locked}`"
        )
    override = root / "third_party" / "multimesh"
    library = "third_party/multimesh" if override.is_dir() and not override.is_symlink() else "multimesh"
    machine = _PLATFORMS.get(os.uname().machine, "linux/amd64")
    build_args = buildx.make_arguments(
        spec, pins, base, machine=machine, multimesh=library, cached=means.use_bazel_cache
    )
    labels = buildx.labels(root, spec, base, ours, maxtext, source, build_args["PYTHON_SHA256"])
    wants, url = root / "third_party" / "jax" / ".bazelversion", build_args.get("BAZEL_URL", "")
    version = wants.read_text().strip() if from_source and wants.is_file() else ""
    if from_source and ((version and f"/{version}/" not in url) or not build_args["BAZEL_SHA256"]):
        raise errors.PinError(
            f"third_party/jax wants Bazel {version or '(it is not there)'}, and {digests.FILE} has {url} with the "
            f"sha256 {build_args['BAZEL_SHA256'] or 'null'}; write its address there, and the checksum that bazelbuild "
            "publishes beside it, with .sha256 at its end"
        )
    access = (*network.access(means, os.environ), *more)
    argv = buildx.build_argv(engine, spec, means, build_args=build_args, labels=labels, access=access, result=result)
    return Plan(tuple(argv), base, labels, others)


def run(root: Path, engine: Engine, spec: ImageSpec, means: Means) -> Built:
    """Build an image, with all that it needs beside it; it has no name yet."""
    started, cache = time.monotonic(), network.find_cache(spec, means)
    with tempfile.TemporaryDirectory(prefix="multimesh-image-") as place, _archive(root, spec):
        result = Path(place) / "result"
        means, secret = network.through_cache(cache, means, Path(place))
        before, todo = proc.together(
            partial(engine.inspect, str(spec.reference)),  # without an engine, a builder may wait for ever
            partial(plan, root, engine, spec, means, result, more=secret),
        )
        for name in todo.untracked:
            console.note(f"{name}: git does not track it, and the image may hold it; a push refuses that")
        for reference in todo.base.unpinned:
            console.note(f"{reference}: not pinned by digest; a release refuses that")
        done = proc.run(todo.argv, cwd=root, env=os.environ | _SETTINGS, check=False, on_line=console.note)
        if done.returncode:
            raise explain(done, todo.base.build.reference)
        told = json.loads(result.read_text(encoding="utf-8"))
    # By the configuration or, in a containerd store, by the manifest.
    names = [told[key] for key in ("containerimage.config.digest", "containerimage.digest") if key in told]
    known = before if before and before["Id"] in names else None  # built again, and nothing had changed
    return describe(engine, spec, *names, known=known)._replace(seconds=time.monotonic() - started)


def explain(result: proc.Result, base: str) -> errors.ToolingError:
    """Return the error for a build that failed: the step, the reason, and the remedy."""
    said = result.stderr.decode("utf-8", "replace")
    step, output = found.groups() if (found := re.search(_FAILED, said)) else ("", "")
    lines = [re.sub(r"^\d+\.\d+ ", "", line).strip() for line in output.splitlines()]
    fault = (re.findall(_REASON, said) or [result.complaint])[-1]
    title = " ".join(word for word in step.split() if not word.startswith(("--mount=", "--from=", "--chown=")))
    where = f"step `{title if len(title) <= 100 else title[:97] + '...'}`" if step else "the build"
    text, last = "\n".join([*lines, fault]), _telling(lines) or proc.shorten(fault)
    if re.search(proc.DISK_FULL, text):
        return errors.DiskError(
            f"{where}: the engine's disk is full; free some space (`docker system df`) and run again"
        )
    if re.search(proc.OTHER_FILES, text):
        return errors.IntegrityError(
            f"{where}: the package index offers other files than the locked ones; do not use them"
        )
    if "exec format error" in text.lower():
        return errors.EngineError(
            f"{where}: the engine's machine cannot run programs of this platform; register QEMU there "
            "(Debian and Ubuntu: qemu-user-static, binfmt-support), or leave out --platform"
        )
    if re.match(_BASE, step):
        return errors.NetworkError(
            f"{base}: the base image cannot be fetched ({proc.shorten(fault)}); log in to its registry or give "
            "another --base-image"
        )
    if re.search(proc.NETWORK_FAILED, text):
        own = "python.sh" in step and "curl: (" in text  # apt was reached, the address of the pinned Python was not
        remedy = "give that Python with --python-archive, or check" if own else "check --pip-config,"
        return errors.NetworkError(f"{where}: cannot reach what it needs ({last}); {remedy} --ca-bundle and --network")
    return errors.BuildError(f"{where} failed: {last}")


def _telling(lines: Sequence[str]) -> str:
    """Return the line that says most: a program's own error, else the last one; of a long one, both ends."""
    own = [line for line in lines if re.match(_TOLD, line)]
    # apt and pip first say the fault, then its consequence.
    best = own[-3:][:1] or [line for line in lines if line and not line.startswith("WARNING")][-1:]
    return proc.shorten(re.sub(r"^(error|ERROR|Error): ", "", best[0])) if best else ""


def describe(engine: Engine, spec: ImageSpec, *names: str, known: dict[str, Any] | None = None) -> Built:
    """Ask the engine about an image that it has under one of these names, unless its answer is ``known``."""
    found = known or next((told for told in map(engine.inspect, names) if told is not None), None)
    if found is None:
        raise errors.EngineError(f"{' or '.join(names)}: the engine has no such image; build it first")
    return Built(
        spec=spec,
        image_id=str(found["Id"]),
        bytes=int(found.get("Size") or 0),  # a containerd store gives that of its compressed layers
        labels=dict((found.get("Config") or {}).get("Labels") or {}),
        names=tuple(found.get("RepoTags") or ()),
        content=_content(found),
    )


def list_strays(root: Path, *, jaxlib_from_source: bool = False) -> tuple[str, ...]:
    """Return files that a build can read and no commit of ours holds; none where this repository is no tree of git.

    A token in ``.env``, a key, somebody's trial: files that git does not track, ignored ones too, or no longer looks
    at; trees without git; an override of MultiMesh. Where a given Python lies while a build runs is left out.
    """
    lines = (root / IGNORE).read_text(encoding="utf-8").splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    named = [pattern[1:] for pattern in patterns if pattern.startswith("!") and "third_party" not in pattern]
    found = [name for name in _others(root, *(f":(top){name}" for name in named)) if name != str(_ARCHIVE)]
    for name in ("maxtext", "multimesh", *(("jax", "xla") if jaxlib_from_source else ())):
        place, shown = root / "third_party" / name, f"third_party/{name}"
        if place.is_dir() and not place.is_symlink():
            own = name != "multimesh" and (place / ".git").exists()
            found += [f"{shown}/{file}" for file in _others(place)] if own else [shown]
    return tuple(sorted(name for name in found if not _is_ignored(name, patterns)))


def _is_ignored(name: str, patterns: Sequence[str]) -> bool:
    """Say whether a builder leaves a file out: the last pattern that fits it, or a folder of it, decides."""
    parts, ignored = name.split("/"), False
    for pattern in patterns:
        text = re.escape(pattern.removeprefix("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(text, "/".join(parts[:count])) for count in range(1, len(parts) + 1)):
            ignored = not pattern.startswith("!")
    return ignored


def check_context(root: Path, *, jaxlib_from_source: bool = False) -> None:
    """Refuse with ``PinError`` to push an image with such files."""
    if files := list_strays(root, jaxlib_from_source=jaxlib_from_source):
        more = f" and {len(files) - 5} more" if len(files) > 5 else ""
        raise errors.PinError(
            f"{', '.join(files[:5])}{more}: git does not track what the image would hold; commit, move or remove it, "
            "and bring back what lies in third_party/ with ./bootstrap.sh --group run"
        )


def _others(tree: Path, *paths: str) -> list[str]:
    """Return the files of a tree that are not plainly tracked (H): git hides changes of those it must not look at."""
    told = proc.run(["git", "-C", tree, "ls-files", "--cached", "--others", "-v", "-z", "--", *paths], check=False)
    return [] if told.returncode else [entry[2:] for entry in told.text.split("\0") if entry and entry[0] != "H"]


def _content(found: dict[str, Any]) -> str:
    """Return a digest of all that an image's check depends on. Labels do not count: every commit changes them."""
    config = {key: value for key, value in (found.get("Config") or {}).items() if key not in ("Labels", "Image")}
    document = json.dumps([found.get("RootFS"), config, found.get("Architecture")], sort_keys=True)
    return f"sha256:{hashlib.sha256(document.encode()).hexdigest()}"


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


def _source(root: Path) -> str | None:
    """Return the address on GitHub of the repository, without a login that may be in it.

    A workflow's run says it; a clone came from there. A registry of GitHub links an image to it.
    """
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and name:
        return f"{server}/{name}"
    told = proc.run(["git", "-C", root, "remote", "get-url", "origin"], check=False).text
    found = re.fullmatch(r"(?:\w+://)?(?:[^/@]*@)?github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?", told)
    return f"https://github.com/{found[1]}" if found else None


def _revision(root: Path) -> str | None:
    """Return the commit of a tree, marked where the tree differs from it; None where there is none."""
    told = proc.run(["git", "-C", root, "status", "--porcelain=v2", "--branch", "--untracked-files=no"], check=False)
    commit = next((line.split()[2] for line in told.text.splitlines() if line.startswith("# branch.oid ")), None)
    if told.returncode or commit is None:
        return None
    changed = any(not line.startswith("#") for line in told.text.splitlines())
    return f"{commit}-dirty" if changed else commit


def _component(root: Path, name: str, group: str, only_plan: bool = False) -> str:
    """Return the commit of a patched component, marked where it differs, or raise an error with the remedy."""
    place = root / "third_party" / name
    inside = place / "src" / "maxtext" if name == "maxtext" else place / ".git"
    pinned = manifest.read_pin(root / "sources.lock", name, "patched_commit")
    if name == "xla":
        pinned = _follow(root, name)
    elif pinned is None:
        raise errors.PinError(f"sources.lock has no patched commit of {name}; run `python -m tooling lock {name}`")
    if not inside.exists():
        said = f"third_party/{name} is not there; run ./bootstrap.sh --group {group}"
        if not only_plan:
            raise errors.PinError(said)
        console.note(said)
        return pinned or "unknown"
    held = _revision(place) if (place / ".git").exists() else None  # without git, its content is not known
    if held is not None and held.removesuffix("-dirty") != pinned:
        raise errors.PinError(
            f"third_party/{name} is at {held[:12]}, not at {(pinned or 'what jax names')[:12]}; "
            f"run ./bootstrap.sh --group {group}"
        )
    return held or f"{pinned}-dirty"


def _follow(root: Path, name: str) -> str | None:
    """Return the commit that a tree without a pin of its own was made with, if that is what its component names now."""
    from tooling.sources import patch  # for this alone: a build of wheels starts without
    from tooling.sources.named import resolve
    from tooling.sources.workspace import Workspace, read_record

    here = Workspace(root)
    component = manifest.load(here.manifest).named(name)
    record = read_record(here.place(name))
    try:
        pin = resolve(here, component, {})[1]
    except errors.PinError:
        return None
    series = patch.digest(patch.load_series(root, name))
    right = record is not None and (record.version, record.series) == (pin.version, series)
    return record.commit if record and right else pin.commit
