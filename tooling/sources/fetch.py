"""Builds one component in a stage folder: its upstream tree, its patches, its checked-out files.

``patches/<component>/series`` names the patches in their order; ``git am`` makes one commit of each.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tooling.core import console, errors, files, proc
from tooling.sources import git, manifest
from tooling.sources.manifest import CommitFile, Component, Pin, Pins

if TYPE_CHECKING:
    from git import Repo

_INFO = {
    # Files that running the sources leaves beside them. Without this every tree would be dirty after its first use.
    "exclude": "__pycache__/\n*.pyc\n*.egg-info/\n",
    # Bytes are as they are, whatever attributes a file of the tree asks for.
    "attributes": "* -text -filter -ident -working-tree-encoding\n",
}
_RECORD = Path(".git", "multimesh.json")
Series = tuple[Path, ...]
"""The patches of a component in their order."""


class Recipe(NamedTuple):
    """All that decides the bytes of one component. ``override``: the ``URL@SHA`` in place of the locked source."""

    component: Component
    pin: Pin
    series: Series
    override: str = ""

    @property
    def key(self) -> str:
        """A digest of the recipe: the same for the same bytes."""
        pin, sums = self.pin, [(path.name, files.sha256(path)) for path in self.series]
        parts = [self.component.path, pin.commit, pin.tree, pin.patched_commit, sums, self.override]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Record(NamedTuple):
    """The record in a tree that this tooling made."""

    key: str  # of its recipe
    commit: str  # of the branch, with the patches
    version: str
    source: str  # where the bytes came from
    override: str = ""


def read_record(place: Path) -> Record | None:
    """Return the record in a tree, or None for a tree that this tooling did not make."""
    fields = files.read_object(place / _RECORD)
    # One of an earlier snapshot has no key, so that its tree is made anew.
    return Record(**{name: fields.get(name) or "" for name in Record._fields}) if "commit" in fields else None


def load_series(root: Path, component: str) -> Series:
    """Read the patch series of a component; no folder and an empty series are the same."""
    folder = root / "patches" / component
    patches = {path.name: path for path in folder.glob("*.patch")}
    lines = (folder / "series").read_text(encoding="utf-8").split("\n") if (folder / "series").is_file() else []
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if odd := sorted({*names} ^ {*patches}) or [name for name in patches if names.count(name) > 1]:
        raise errors.SourceError(f"patches/{component}/series: name each .patch file beside it once, not {odd[0]}")
    return tuple(patches[name] for name in names)


def make_recipe(root: Path, component: Component, pins: Pins, override: str = "") -> Recipe:
    """Return the recipe of a component, from the lock and its patches.

    ``NotThereError``: another component's tree names its commit, and is not there.
    """
    name, series, commit = component.name, load_series(root, component.name), ""
    if override:
        url, _, commit = override.rpartition("@")
        component = component._replace(url=url, wheel=None)
    elif component.follows and component.commit:
        path = Path("third_party", component.follows, component.commit.file)
        try:
            commit = read_commit((root / path).read_text(encoding="utf-8"), component.commit, name)
        except (OSError, UnicodeDecodeError):
            remedy = f"run `.venv/bin/python -m tooling sync {component.follows} {name}`"
            raise errors.NotThereError(f"{name}: {path} names its commit, and is not there; {remedy}") from None
    if commit:
        return Recipe(component._replace(version=commit), Pin(commit, commit, None), series, override)
    pin = manifest.pin_of(component, pins)
    if pin.patched_commit is None:
        raise errors.SourceError(
            f"{name}: sources.lock has no patched_commit; run `.venv/bin/python -m tooling lock {name}`"
        )
    return Recipe(component, pin, series)


def read_commit(text: str, file: CommitFile, label: str) -> str:
    """Return the commit that a file names."""
    match = re.search(rf"(?m)^{file.name}\b[^=\n]*=\s*['\"]([0-9a-f]{{40}})['\"]", text)
    if match is None:
        raise errors.SourceError(f'{label}: {file.file} has no line {file.name} = "COMMIT"; correct it in sources.yaml')
    return match[1]


def build(root: Path, recipe: Recipe, stage: Path, mirror: str | None = None, *, verify: bool = True) -> Record:
    """Make the component in ``stage / <name>``, ready to be moved into place; nothing outside of the stage changes.

    With ``verify`` the patched commit and tree must be those of the lock (where it pins them).
    """
    component, pin, series, override = recipe
    name = component.name
    with git.open_repo(stage / name, new=True) as repo:
        for file, text in _INFO.items():
            Path(repo.git_dir, "info", file).write_text(text, encoding="utf-8")
        source = _obtain(repo, recipe, root / "third_party" / name, stage, mirror)
        base = _make_base(repo, component, pin)
        git.run(repo, "update_ref", git.BASE, base)
        git.run(repo, "checkout", "--quiet", "--force", "--no-track", "-B", git.BRANCH, base)
        _apply_series(repo, series, name)
        commit = repo.head.commit
        if verify and not override:
            remedy = f"run `.venv/bin/python -m tooling lock {name}` if you changed the patches"
            _expect(f"{name}: patched commit", pin.patched_commit, commit.hexsha, remedy)
            _expect(f"{name}: patched tree", pin.patched_tree, commit.tree.hexsha, remedy)
        record = Record(recipe.key, commit.hexsha, component.version, source, override)
    files.write_json(stage / name / _RECORD, record._asdict())
    return record


def _expect(label: str, pinned: str | None, value: str | None, remedy: str = "take another --mirror") -> None:
    if pinned not in (None, value):
        raise errors.SourceError(f"{label} is {value}, sources.lock pins {pinned}: do not use it; {remedy}")


def _obtain(repo: Repo, recipe: Recipe, present: Path, stage: Path, mirror: str | None) -> str:
    """Get the component's objects, verified, from this disk, its wheel or by git; return the name of the source."""
    component, pin = recipe.component, recipe.pin
    name, wheel, reason = component.name, component.wheel, ""
    if _copy(repo, component, pin, present):
        return "disk"
    if wheel and wheel.file in pin.archives and pin.tree:
        folder = stage / f"{name}.wheel"
        try:
            unpack_wheel(wheel.package, component.version, [pin.archives[wheel.file]], folder, name)
            _expect(f"{name}: tree of {wheel.file}", pin.tree, git.write_tree(repo, folder / wheel.root))
            return "wheel"
        except errors.NotThereError as error:
            reason = f"{error}; and "
    if pin.commit is None:
        raise errors.NotThereError(f"{reason}{name}: no commit is locked; run `.venv/bin/python -m tooling bump`")
    try:
        git.fetch(repo, component.address(mirror), pin.commit, name)
    except errors.NotThereError as error:
        raise errors.NotThereError(f"{reason}{error}") from error
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
        git.run(repo, "fetch", "--quiet", "--depth=1", "--no-tags", "--end-of-options", str(present), git.BASE)
    except errors.SourceError:  # of another user, or damaged
        return False
    if not is_wrapped(component):
        return git.find_object(repo, "FETCH_HEAD") == pin.commit
    return pin.tree is not None and git.find_object(repo, f"FETCH_HEAD:{component.path}") == pin.tree


def is_wrapped(component: Component) -> bool:
    """Say whether its history begins at a commit of ours: neither a wheel nor a subtree has one of the upstream."""
    return bool(component.path or component.wheel)


def _make_base(repo: Repo, component: Component, pin: Pin) -> str:
    """Return the commit that the patches start from: the upstream's, or ours around the component's tree."""
    if not is_wrapped(component):
        return pin.commit or ""
    tree = pin.tree or git.find_object(repo, f"{pin.commit}:{component.path}") or ""
    if component.path:
        git.run(repo, "read_tree", f"--prefix={component.path}/", tree)
        tree = git.run(repo, "write_tree")
    message = f"{component.name} {component.version}\n\nUpstream: {component.url}\nCommit: {pin.commit}"
    return git.run(repo, "commit_tree", tree, "-m", message)


def _apply_series(repo: Repo, series: Series, component: str) -> None:
    """Commit each patch on top of what is checked out. git refuses paths and links that lead out of the tree."""
    if series:
        console.note(f"{component}: applying {len(series)} patches")
    for path in series:
        try:
            git.run(repo, "am", "--quiet", "--keep-cr", "--no-scissors", "--whitespace=nowarn", str(path))
        except errors.SourceError as error:
            raise errors.SourceError(
                f"patches/{component}/{path.name}: does not apply ({error}); adapt it to the pinned source, write it "
                "with git format-patch, or remove it if that has the change"
            ) from error


def unpack_wheel(package: str, version: str, hashes: Iterable[str], folder: Path, label: str) -> str:
    """Unpack a wheel into a new folder, checked against its hashes (none: yet to be pinned); return its sha256.

    pip does it: it knows the user's index, mirrors and certificates, and writes nothing outside of the folder.
    """
    requirement, report = folder.with_suffix(".requirement"), folder.with_suffix(".report")
    sums = [f"--hash=sha256:{value}" for value in hashes]
    requirement.write_text(" ".join([f"{package}=={version}", *sums]), encoding="utf-8")
    # The package may ask for a newer Python than ours. With its patches it runs here.
    options = ["--no-deps", "--ignore-requires-python", "--only-binary=:all:", "--no-compile", "--report", str(report)]
    with console.work(f"{label}: downloading {package} {version}"):
        proc.run_pip(sys.executable, "install", *options, "--target", str(folder), "-r", str(requirement), label=label)
    archive = files.read_object(report)["install"][0]["download_info"]["archive_info"]
    return str(archive["hash"]).removeprefix("sha256=")
