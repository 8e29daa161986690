"""Builds one component in a stage folder: its upstream tree, its patches by ``git am``, its checked-out files."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from git import GitCommandError, Repo

from tooling.core import console, errors, files, proc
from tooling.sources import git
from tooling.sources.manifest import Component, Pin, Recipe


def build(root: Path, recipe: Recipe, stage: Path, *, verify: bool = True) -> tuple[str, str]:
    """Make the component in ``stage / <name>``, ready to be moved into place; nothing outside of the stage changes.

    Return its commit, with the patches, and where the bytes came from. With ``verify`` the commit must be that of the
    lock (where it pins one).
    """
    component, pin, series, _ = recipe
    name = component.name
    with git.open_repo(stage / name, new=True) as repo:
        source = _obtain(repo, recipe, root / "third_party" / name, stage)
        base = _make_base(repo, component, pin)
        repo.git.update_ref(git.BASE, base)
        repo.git.checkout("--quiet", "--force", "--no-track", "-B", git.BRANCH, base)
        if series:
            console.note(f"{name}: applying {len(series)} patches")
        for path in series:  # git refuses paths and links that lead out of the tree
            try:
                repo.git.am("--quiet", "--keep-cr", "--no-scissors", "--whitespace=nowarn", str(path))
            except GitCommandError as error:
                raise git.explain("patch", error, label=f"patches/{name}/{path.name}") from error
        commit = repo.head.commit.hexsha
        if verify:
            remedy = f"run `.venv/bin/python -m tooling lock {name}` if you changed the patches"
            _expect(f"{name}: patched commit", pin.patched_commit, commit, remedy)
        repo.git.update_ref(recipe.ref, commit)
    return commit, source


def _expect(label: str, pinned: str | None, value: str | None, remedy: str = "take another mirror") -> None:
    if pinned not in (None, value):
        raise errors.SourceError(f"{label} is {value}, sources.lock pins {pinned}: do not use it; {remedy}")


def _obtain(repo: Repo, recipe: Recipe, present: Path, stage: Path) -> str:
    """Get the component's objects, verified, from this disk, its wheel or by git; return the name of the source."""
    component, pin = recipe.component, recipe.pin
    name, reason = component.name, ""
    if _copy(repo, component, pin, present):
        return "disk"
    if component.wheel and pin.wheel_sha256 and pin.tree:
        folder = stage / f"{name}.wheel"
        try:
            unpack_wheel(name, pin.version, [pin.wheel_sha256], folder)
            _expect(f"{name}: tree of its wheel", pin.tree, git.write_tree(repo, folder / component.wheel))
            return "wheel"
        except errors.NotThereError as error:
            reason = f"{error}; and "
    try:
        if pin.commit is None:
            remedy = f"run `.venv/bin/python -m tooling lock {name} {pin.version}`"
            raise errors.NotThereError(f"{name}: no commit is locked; {remedy}")
        git.fetch(repo, component.url, pin.commit, name)
    except errors.SourceError as error:
        raise type(error)(f"{reason}{error}") from error
    tree = git.find_object(repo, f"{pin.commit}:{component.path}")
    if tree is None:
        raise errors.SourceError(f"{name}: {pin.commit} has no folder {component.path}; correct 'path' in sources.yaml")
    _expect(f"{name}: tree", pin.tree, tree)
    return "git"


def _copy(repo: Repo, component: Component, pin: Pin, present: Path) -> bool:
    """Fetch the base of the component's present tree, if it is the wanted one; return whether it is."""
    if present.is_symlink() or not (present / ".git").is_dir():
        return False
    try:
        repo.git.fetch("--quiet", "--depth=1", "--no-tags", "--end-of-options", str(present), git.BASE)
    except GitCommandError:  # of another user, or damaged
        return False
    base, name = (pin.tree, f"FETCH_HEAD:{component.path}") if is_wrapped(component) else (pin.commit, "FETCH_HEAD")
    return base is not None and git.find_object(repo, name) == base


def is_wrapped(component: Component) -> bool:
    """Say whether its history begins at a commit of ours: neither a wheel nor a subtree has one of the upstream."""
    return bool(component.path or component.wheel)


def _make_base(repo: Repo, component: Component, pin: Pin) -> str:
    """Return the commit that the patches start from: the upstream's, or ours around the component's tree."""
    if not is_wrapped(component):
        return pin.commit or ""
    tree = pin.tree or git.find_object(repo, f"{pin.commit}:{component.path}") or ""
    if component.path:
        repo.git.read_tree(f"--prefix={component.path}/", tree)
        tree = repo.git.write_tree()
    message = f"{component.name} {pin.version}\n\nUpstream: {component.url}\nCommit: {pin.commit}"
    return str(repo.git.commit_tree(tree, "-m", message))


def unpack_wheel(package: str, version: str, hashes: Iterable[str], folder: Path) -> str:
    """Unpack a wheel into a new folder, checked against its hashes (none: yet to be pinned); return its sha256.

    pip does it: it knows the user's index, mirrors and certificates, and writes nothing outside of the folder.
    """
    requirement, report = folder.with_suffix(".requirement"), folder.with_suffix(".report")
    sums = [f"--hash=sha256:{value}" for value in hashes]
    requirement.write_text(" ".join([f"{package}=={version}", *sums]), encoding="utf-8")
    # The package may ask for a newer Python than ours. With its patches it runs here.
    options = ["--no-deps", "--ignore-requires-python", "--only-binary=:all:", "--no-compile", "--report", str(report)]
    options += ["--target", str(folder), "-r", str(requirement)]
    with console.work(f"{package}: downloading {version}"):
        proc.run_pip(sys.executable, "install", *options, label=package)
    archive = files.read_object(report)["install"][0]["download_info"]["archive_info"]
    return str(archive["hash"]).removeprefix("sha256=")
