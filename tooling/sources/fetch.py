"""Builds one component in a stage folder: its upstream tree, its patches, its checked-out files.

``patches/<component>/series`` names the patches in their order; ``git am`` makes one commit of each.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tooling.core import console, errors, files, proc
from tooling.sources import git, manifest
from tooling.sources.manifest import CommitFile, Component, Pin, Pins, Wheel

if TYPE_CHECKING:
    from git import Repo

# Files that running the sources leaves beside them. Without this every tree would be dirty after its first use.
_EXCLUDE = "__pycache__/\n*.pyc\n*.egg-info/\n"
_RECORD = Path(".git", "multimesh.json")
_AUTHOR = b"From: MultiMesh <patches@multimesh.invalid>\nDate: Sat, 1 Jan 2000 00:00:00 +0000\n"
Series = dict[str, bytes]
"""Patches by file name, in their order; paths in them are relative to ``third_party/<component>``."""


class Recipe(NamedTuple):
    """All that decides the bytes of one component. ``override``: the ``URL@SHA`` in place of the locked source."""

    component: Component
    pin: Pin
    series: Series
    override: str = ""

    @property
    def key(self) -> str:
        """A digest of the recipe: the same for the same bytes."""
        pin, sums = self.pin, [*sum_patches(self.series).items()]
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
    return {name: patches[name].read_bytes() for name in names}


def sum_patches(series: Series) -> dict[str, str]:
    """Return the sha256 of each patch by its name, in order."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in series.items()}


def make_recipe(root: Path, component: Component, pins: Pins) -> Recipe:
    """Return the recipe of a component, if the lock and its patches agree.

    ``NotThereError``: another component's tree names its commit, and is not there.
    """
    name, series = component.name, load_series(root, component.name)
    if component.follows and component.commit:
        path = Path("third_party", component.follows, component.commit.file)
        try:
            commit = read_commit((root / path).read_text(encoding="utf-8"), component.commit, name)
        except (OSError, UnicodeDecodeError):
            remedy = f"run `.venv/bin/python -m tooling sync {component.follows} {name}`"
            raise errors.NotThereError(f"{name}: {path} names its commit, and is not there; {remedy}") from None
        return Recipe(component._replace(version=commit), Pin(commit, commit, None), series)
    pin, remedy = manifest.pin_of(component, pins), f"run `.venv/bin/python -m tooling lock {name}`"
    on_disk, locked = [*sum_patches(series).items()], [*pin.patches.items()]
    if on_disk != locked:
        names = sorted({file for file, _ in {*on_disk} ^ {*locked}}) or ["their order"]
        raise errors.SourceError(
            f"patches/{name}: sources.lock does not have {', '.join(names)} as on disk; {remedy} if the change is meant"
        )
    if pin.patched_commit is None:
        raise errors.SourceError(f"{name}: sources.lock has no patched_commit; {remedy}")
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
        Path(repo.git_dir, "info", "exclude").write_text(_EXCLUDE, encoding="utf-8")
        source = _obtain(repo, recipe, root / "third_party" / name, stage, mirror)
        base = _make_base(repo, component, pin)
        git.run(repo, "update_ref", git.BASE, base)
        git.run(repo, "checkout", "--quiet", "--force", "--no-track", "-B", git.BRANCH, base)
        apply_series(repo, series, name)
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
    name, reason = component.name, ""
    if _copy(repo, component, pin, present):
        return "disk"
    if component.wheel and component.wheel.file in pin.archives and pin.tree:
        label = f"{name}: tree of {component.wheel.file}"
        try:
            sums = [pin.archives[component.wheel.file]]
            path = download(component, component.wheel, sums, stage / f"{name}.download")
            _expect(label, pin.tree, import_tree(repo, path, component.wheel.root, label=name))
            return "wheel"
        except errors.NotThereError as error:
            reason = f"{error}; and "
    url, commit = component.address(mirror), pin.commit
    if commit is None:
        raise errors.NotThereError(f"{reason}{name}: no commit is locked; run `.venv/bin/python -m tooling bump`")
    try:
        git.fetch(repo, url, commit, name)
    except errors.NotThereError as error:
        raise errors.NotThereError(f"{reason}{error}") from error
    tree = git.find_object(repo, f"{commit}:{component.path}")
    if tree is None:
        raise errors.SourceError(f"{name}: {commit} has no folder {component.path}; correct 'path' in sources.yaml")
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


def apply_series(repo: Repo, series: Series, component: str) -> None:
    """Commit each patch on top of what is checked out. git refuses paths and links that lead out of the tree."""
    if series:
        console.note(f"{component}: applying {len(series)} patches")
    for name, data in series.items():
        path = Path(repo.git_dir, name)
        path.write_bytes(_mail(name, data))
        try:
            git.run(repo, "am", "--quiet", "--keep-cr", "--no-scissors", "--whitespace=nowarn", str(path))
        except errors.SourceError as error:
            raise errors.SourceError(
                f"patches/{component}/{name}: does not apply ({error}); adapt it to the pinned source, or remove it if "
                "that has the change"
            ) from error


def _mail(name: str, data: bytes) -> bytes:
    """Return a patch as ``git am`` reads it: with an author, and the file's name where it has no subject."""
    head, separator, diff = data.partition(b"diff --git ")
    if not re.search(rb"(?m)^Subject: ", head):
        head = b"Subject: " + name.removesuffix(".patch").encode() + b"\n\n---\n"
    return (b"" if re.search(rb"(?m)^From: ", head) else _AUTHOR) + head + separator + diff


def download(component: Component, wheel: Wheel, hashes: Iterable[str], folder: Path) -> Path:
    """Bring a wheel into ``folder``, checked against its hashes; none for one that is yet to be pinned.

    pip does it: it knows the user's index, mirrors and certificates.
    """
    folder.mkdir(parents=True, exist_ok=True)
    requirement = folder / "requirement.txt"
    sums = [f"--hash=sha256:{value}" for value in hashes]
    requirement.write_text(" ".join([f"{wheel.package}=={component.version}", *sums]), encoding="utf-8")
    # The package may ask for a newer Python than ours. With its patches it runs here.
    options = ["--no-deps", "--ignore-requires-python", "--only-binary=:all:", *(["--require-hashes"] if sums else [])]
    with console.work(f"{component.name}: downloading {wheel.file}"):
        pip = (sys.executable, "download", *options, "--dest", str(folder), "-r", str(requirement))
        proc.run_pip(*pip, label=component.name)
    if not (folder / wheel.file).is_file():
        raise errors.NotThereError(f"{component.name}: the package index has no {wheel.file}; check its version")
    return folder / wheel.file


def import_tree(repo: Repo, path: Path, root: str, *, label: str) -> str:
    """Write the folder ``root`` of a wheel into a repository and return the hash of its tree."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.filename.startswith(f"{root}/") and not info.is_dir():
                    # Whatever the name, zipfile writes below the folder.
                    Path(archive.extract(info, folder)).chmod(0o755 if info.external_attr >> 16 & 0o100 else 0o644)
            work = Path(folder, root)
            if not work.is_dir():
                raise errors.SourceError(f"{label}: {path.name} has no folder {root}; correct 'root' in sources.yaml")
            # The bytes as they are, whatever attributes a file in it asks for.
            Path(repo.git_dir, "info", "attributes").write_text("* -text -filter -ident\n", encoding="utf-8")
            env = {"GIT_INDEX_FILE": f"{folder}/index", "GIT_WORK_TREE": str(work), "GIT_DIR": str(repo.git_dir)}
            git.run(repo, "add", "--all", "--force", str(work), env=env)
            tree = git.run(repo, "write_tree", env=env)
            os.unlink(Path(repo.git_dir, "info", "attributes"))
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise errors.SourceError(f"{label}: {path.name} cannot be read as a wheel ({error}); do not use it") from error
    return tree
