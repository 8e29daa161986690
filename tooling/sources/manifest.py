"""``sources.yaml``: what ``third_party/`` holds; ``sources.lock``: its exact bytes; ``patches/``: what we change.

And ``requirements/run.txt``, whose wheel of JAX names the commit of its sources.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from tooling.core import errors, files

REFS = ("refs/multimesh/locked/", "refs/multimesh/overridden/")
LOCKED = "requirements/run.txt"
SCHEMA, LOCK_SCHEMA = (Path(__file__).with_name(f"{name}.schema.json") for name in ("manifest", "lock"))


class CommitFile(NamedTuple):
    """The file that names a component's commit, as ``name = "COMMIT"``: in its locked wheel, or another's tree."""

    file: str = ""
    name: str = ""
    component: str = ""


class Component(NamedTuple):
    """One folder of ``third_party/``: an upstream, or its subtree ``path``, which lies there under the same path.

    ``wheel`` is the folder of the wheel of this name that has the same tree; git is asked where nobody offers it.
    ``commit`` has a file where one says it. Where that is one of another component, the lock has no pin: the pin of
    the other fixes the bytes.
    """

    name: str
    groups: tuple[str, ...]
    url: str
    tag: str = ""
    path: str = ""
    wheel: str = ""
    commit: CommitFile = CommitFile()


class Pin(NamedTuple):
    """The pinned bytes of one component; None where no source was read that says.

    ``commit`` is the upstream's, ``tree`` git's hash of the component before patches: either of the two fixes all
    bytes. Its patches must give ``patched_commit``, and so this commit's tree.
    """

    version: str
    commit: str | None
    tree: str | None
    wheel_sha256: str | None = None
    patched_commit: str | None = None


class Recipe(NamedTuple):
    """All that decides the bytes of one component. ``override``: the ``URL@SHA`` in place of the locked source."""

    component: Component
    pin: Pin
    series: tuple[Path, ...]
    override: str = ""

    @property
    def ref(self) -> str:
        """The name in a tree of the commit that this recipe gave there: the same for the same bytes."""
        pin, sums = self.pin, [(path.name, files.sha256(path)) for path in self.series]
        parts = [self.component.path, pin.commit, pin.tree, pin.patched_commit, sums, self.override]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return REFS[bool(self.override)] + digest


Sources = dict[str, Component]
Pins = dict[str, Pin]


def load(path: Path) -> Sources:
    """Read and check ``sources.yaml``: components by name, in the order of the file."""
    sources: Sources = {}
    for name, entry in files.read_document(path, SCHEMA, "correct it")["components"].items():
        commit = CommitFile(**entry.pop("commit", {}))
        if commit.component and commit.component not in sources:
            raise errors.SourceError(f"{path.name}: {name}: write it behind {commit.component}, which names its commit")
        sources[name] = Component(name, tuple(entry.pop("groups")), commit=commit, **entry)
    return sources


def find(sources: Sources, name: str) -> Component:
    """Return the component of a name."""
    if name not in sources:
        raise errors.OptionError(f"{name}: no such component in sources.yaml; there are {', '.join(sources)}")
    return sources[name]


def load_lock(path: Path) -> Pins:
    """Read and check ``sources.lock``."""
    return {name: Pin(**entry) for name, entry in files.read_document(path, LOCK_SCHEMA)["components"].items()}


def save_lock(path: Path, sources: Sources, pins: Pins) -> None:
    """Write the pins of ``sources.lock`` whole or not at all, in the order of the manifest."""
    entries = {name: pins[name]._asdict() for name in sources if name in pins}
    files.write_json(path, files.read_object(path) | {"components": entries})


def list_patches(root: Path, component: str) -> tuple[Path, ...]:
    """Return the patches of a component in their order, which their names begin with."""
    return tuple(sorted((root / "patches" / component).glob("*.patch")))


def make_recipe(root: Path, component: Component, pins: Pins, override: str = "") -> Recipe:
    """Return the recipe of a component, from the lock and its patches.

    ``NotThereError``: another component's tree names its commit, and is not there.
    """
    name, series = component.name, list_patches(root, component.name)
    if override:
        url, _, commit = override.rpartition("@")
        return Recipe(component._replace(url=url, wheel=""), Pin(commit, commit, None), series, override)
    if other := component.commit.component:
        path = Path("third_party", other, component.commit.file)
        try:
            commit = read_commit(root / path, component.commit, name)
        except OSError:
            remedy = f"run `.venv/bin/python -m tooling sync {other} {name}`"
            raise errors.NotThereError(f"{name}: {path} names its commit, and is not there; {remedy}") from None
        return Recipe(component, Pin(commit, commit, None), series)
    if name not in pins or pins[name].patched_commit is None:
        version = "" if name in pins else " VERSION"
        raise errors.SourceError(
            f"{name}: sources.lock does not have what its patches give; run `.venv/bin/python -m tooling lock "
            f"{name}{version}`"
        )
    return Recipe(component, pins[name], series)


def read_commit(path: Path, file: CommitFile, label: str) -> str:
    """Return the commit that a file names."""
    text = path.read_text(encoding="utf-8", errors="replace")
    match = re.search(rf"(?m)^{file.name}\b[^=\n]*=\s*['\"]([0-9a-f]{{40}})['\"]", text)
    if match is None:
        raise errors.SourceError(f'{label}: {file.file} has no line {file.name} = "COMMIT"; correct it in sources.yaml')
    return match[1]


def find_newest(root: Path, package: str) -> tuple[str, tuple[str, ...]]:
    """Return the newest locked version of a package, and the sha256 of each of its files."""
    text = (root / LOCKED).read_text(encoding="utf-8")
    blocks = re.findall(rf"(?m)^{re.escape(package)}==([^\s;]+)(.*(?:\n    .*)*)", text)
    if not blocks:
        raise errors.SourceError(f"{package}: {LOCKED} does not have it; run `.ci/lock run`")
    version, hashes = max(blocks, key=lambda block: Version(block[0]))
    return version, tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", hashes))
