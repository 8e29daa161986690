"""``sources.yaml``: which components ``third_party/`` holds; ``sources.lock``: their exact bytes, patches included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tooling.core import errors, files

GROUPS = ("run", "source", "dev")
CUDA = ("cuda12", "cuda13")  # only where asked for: packages of 5 GB, for GPUs
COMPILER = "compile-gpu"  # of cuda12 only what compiles: without a GPU no more can be loaded
ALL_GROUPS = (*GROUPS, "image", *CUDA, COMPILER, "data")  # data, too, is 2 GB; image is what building an image needs
SCHEMA, LOCK_SCHEMA = (Path(__file__).with_name(f"{name}.schema.json") for name in ("manifest", "lock"))
_ABOUT = [
    "The exact bytes of third_party/; written by `.venv/bin/python -m tooling lock` and `bump`.",
    "null: no source was read that says. A commit fixes its tree, and a tree its bytes.",
]


class Wheel(NamedTuple):
    """The wheel ``file`` of a ``package``, which has the component's ``path`` in its folder ``root``."""

    package: str
    file: str
    root: str


class CommitFile(NamedTuple):
    """The file that names a component's commit, as ``name = "COMMIT"``.

    It is in the locked wheel of the package ``wheel``, or in the tree of another ``component``.
    """

    file: str
    name: str
    wheel: str = ""
    component: str = ""


class Component(NamedTuple):
    """One folder of ``third_party/``: an upstream, or its subtree ``path``, which lies there under the same path.

    Git is asked where there is no ``wheel``, or nobody offers it. ``commit`` is set where a file says it; where that is
    one of another component, ``version`` is empty, and the lock has no pin: the pin of the other fixes its bytes.
    """

    name: str
    groups: tuple[str, ...]
    url: str
    version: str = ""
    tag: str = ""
    path: str = ""
    wheel: Wheel | None = None
    commit: CommitFile | None = None

    @property
    def follows(self) -> str:
        """The component whose tree names this one's commit, or nothing."""
        return self.commit.component if self.commit else ""

    def address(self, mirror: str | None) -> str:
        """Return where it is fetched from: its upstream, or a mirror that keeps it under its last name."""
        return f"{mirror.rstrip('/')}/{self.url.rstrip('/').rpartition('/')[2]}" if mirror else self.url


class Pin(NamedTuple):
    """The pinned bytes of one component; None where no source was read that says.

    ``commit`` is the upstream's, ``tree`` git's hash of the component before patches, which ``archives`` (file name to
    sha256) hold as well: either of the two fixes all bytes. Its patches must give ``patched_commit`` and
    ``patched_tree``.
    """

    version: str
    commit: str | None
    tree: str | None
    archives: Mapping[str, str] = MappingProxyType({})
    patched_commit: str | None = None
    patched_tree: str | None = None


Sources = dict[str, Component]
Pins = dict[str, Pin]


def load(path: Path, versions: Mapping[str, str] = MappingProxyType({})) -> Sources:
    """Read and check ``sources.yaml``: components by name, in the order of the file, those of ``versions`` at these."""
    entries = files.read_document(path, SCHEMA, "correct it")["components"]
    sources = {name: _component(name, entry, versions.get(name)) for name, entry in entries.items()}
    for name, component in sources.items():
        if component.follows and find(sources, component.follows).follows:
            raise errors.SourceError(f"{path.name}: {name}: {component.follows} has no version of its own")
    return sources


def _component(name: str, entry: dict[str, Any], version: str | None) -> Component:
    entry |= {} if version is None else {"version": version}
    entry = json.loads(json.dumps(entry).replace("{version}", entry.get("version", "")))
    entry["groups"] = tuple(entry["groups"])
    if "wheel" in entry:
        entry["wheel"] = Wheel(**entry["wheel"])
    if "commit" in entry:
        entry["commit"] = CommitFile(**entry["commit"])
    return Component(name, **entry)


def find(sources: Sources, name: str) -> Component:
    """Return the component of a name."""
    if name not in sources:
        raise errors.OptionError(f"{name}: no such component in sources.yaml; there are {', '.join(sources)}")
    return sources[name]


def load_lock(path: Path) -> Pins:
    """Read and check ``sources.lock``."""
    return {name: Pin(**entry) for name, entry in files.read_document(path, LOCK_SCHEMA)["components"].items()}


def pin_of(component: Component, pins: Pins) -> Pin:
    """Return the pin of a component, or raise if the lock does not know it at this version."""
    pin = pins.get(component.name)
    locked = pin.version if pin else "nothing"
    if pin is None or locked != component.version:
        raise errors.SourceError(
            f"{component.name}: sources.yaml wants {component.version}, sources.lock pins {locked}; "
            f"run `.venv/bin/python -m tooling bump {component.name} {component.version}`"
        )
    return pin


def save_lock(path: Path, sources: Sources, pins: Pins) -> None:
    """Write ``sources.lock`` whole or not at all, components in the order of the manifest."""
    entries = {name: pins[name]._asdict() for name in sources if name in pins}
    for entry in entries.values():
        entry["archives"] = dict(entry["archives"])
    files.write_json(path, {"format": 1, "about": _ABOUT, "components": entries})
