"""Moves a component to another version: asks the upstream and the index what it is, and rebuilds the patches on it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from workflows import console, errors
from workflows.sources import archive, assemble, git, lock, manifest, patch, safety
from workflows.sources.lock import Pin
from workflows.sources.manifest import Component, Transport
from workflows.sources.workspace import Workspace


def bump(workspace: Workspace, name: str, version: str, mirror: str | None, reporter: console.Reporter) -> Pin:
    """Write ``sources.yaml`` and ``sources.lock`` for a new version, if its source can be had and the patches apply.

    Raises
    ------
    MissingCommitError
        The upstream has no such version.
    PatchError
        A patch does not apply there; nothing was changed.
    """
    if manifest.load(workspace.manifest)[name].link:
        raise errors.UsageError(f"{name}: is a link to this repository; it has no version to bump")
    text = _with_version(workspace.manifest, name, version)
    temporary = workspace.manifest.with_name(f".{workspace.manifest.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        wanted = manifest.load(temporary)
        pins = lock.load(workspace.lock)
        pin = _resolve(workspace, wanted[name], mirror, reporter)
        # The lock goes first: a kill between the two leaves a manifest that the next bump corrects.
        lock.save(workspace.lock, wanted, pins | {name: pin})
        os.replace(temporary, workspace.manifest)
    finally:
        temporary.unlink(missing_ok=True)
    return pin


def _with_version(path: Path, name: str, version: str) -> str:
    """Return the manifest's text with one version changed and all else, comments too, as it was."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", version):
        raise errors.UsageError(f"'{version}' is no version; write letters, digits, dots, dashes or underscores")
    lines, inside, changed = path.read_text(encoding="utf-8").splitlines(keepends=True), False, 0
    for number, line in enumerate(lines):
        if re.match(r"  [^\s#]", line):
            inside = line.rstrip() == f"  {name}:"
        elif inside and (match := re.match(r"(    version:\s+)(\"[^\"]*\"|'[^']*'|[^\s#]+)(.*\n?)", line)):
            lines[number] = f'{match[1]}"{version}"{match[3]}'
            changed += 1
    if changed != 1:
        raise errors.ManifestError(
            f"sources.yaml: {name} has no line 'version:' of its own; write one, indented by four"
        )
    return "".join(lines)


def _resolve(workspace: Workspace, component: Component, mirror: str | None, reporter: console.Reporter) -> Pin:
    """Find out the pins of a version and what the patches give on it."""
    name = component.name
    patches = patch.load_series(workspace.root, name)
    url = assemble.address(component, mirror)
    with workspace.stage() as (stage, _):
        probe = git.init(stage / f"{name}.probe")
        reporter.phase(name, f"asking {url}")
        commit = _find_commit(probe, component, url)
        git.fetch(probe, url, commit, label=name, on_progress=lambda done, total: reporter.advance(name, done, total))
        root_tree, found = probe.object(f"{commit}^{{tree}}"), probe.object(f"{commit}:{component.path}")
        if found is None:
            raise errors.MissingCommitError(f"{name}: {component.version} has no folder {component.path}")
        archives = tuple(
            (each.file, _archive_sha256(probe, stage, component, each, found, mirror))
            for each in component.transports
            if each.file
        )
        files = tuple((each.file, each.sha256) for each in patches)
        pin = Pin(component.version, commit, found, root_tree if component.path else None, archives, files)
        means = assemble.Means((probe.root,), offline=True, mirror=None)
        built = assemble.build(assemble.Recipe(component, pin, patches), stage, means, reporter, verify=False)
    reporter.done(name, f"{len(patches)} patches apply to {component.version}")
    return replace(pin, patched_commit=built.record.commit, patched_tree=built.tree)


def _find_commit(probe: git.Repo, component: Component, url: str) -> str:
    """Return the commit of a version: of its tag, or the version itself where it is a commit."""
    if safety.COMMIT.fullmatch(component.version):
        return component.version
    if not component.tag:
        raise errors.UsageError(f"{component.name}: has no 'tag' in sources.yaml, so its version must be a full commit")
    ref = f"refs/tags/{component.tag}"
    answer = git.ask(probe, url, ref, label=component.name)
    commit = answer.get(f"{ref}^{{}}") or answer.get(ref)
    if commit is None:
        raise errors.MissingCommitError(f"{component.name}: {url} has no tag {component.tag}; check the version")
    return commit


def _archive_sha256(
    probe: git.Repo, stage: Path, component: Component, transport: Transport, tree: str, mirror: str | None
) -> str:
    """Return the sha256 of an archive of this version, once it is known to hold the same tree as git's."""
    path = archive.download(
        transport, component.version, None, stage / "archives",
        label=component.name, mirror=mirror, on_progress=lambda done, total: None,
    )  # fmt: skip
    found = archive.import_tree(probe, path, transport.root, label=component.name)
    if found != tree:
        raise errors.IntegrityError(
            f"{component.name}: {transport.file} holds tree {found}, the commit {tree}; drop this transport"
        )
    return archive.file_sha256(path)
