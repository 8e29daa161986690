"""``sources.yaml``: which components ``third_party/`` holds; ``sources.lock``: their exact bytes, patches included."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tooling.core import errors, files

GROUPS = ("run", "source", "dev")
CUDA = ("cuda12", "cuda13")  # only where asked for: packages of 5 GB, for GPUs
COMPILER = "compile-gpu"  # of cuda12 only what compiles: without a GPU no more can be loaded
ALL_GROUPS = (*GROUPS, "image", *CUDA, COMPILER, "data")  # data, too, is 2 GB; image is what building an image needs
SCHEMA = Path(__file__).with_name("manifest.schema.json")
_OBJECTS = ("commit", "root_tree", "tree", "patched_commit", "patched_tree")
_ABOUT = [
    "The exact bytes of third_party/; written by `python -m tooling lock` and `bump`.",
    "null: no source was read that says. A commit fixes its tree, and a tree its bytes.",
]
Digests = tuple[tuple[str, str | None], ...]
"""File names with their sha256."""


class Wheel(NamedTuple):
    """The wheel ``file`` of a ``package``, which has the component's ``path`` in its folder ``root``."""

    package: str
    file: str
    root: str


class Named(NamedTuple):
    """The file that names a component's commit, as ``name = "COMMIT"``.

    It is in the locked wheel of the package ``wheel``, or in the tree of another ``component``.
    """

    file: str
    name: str
    wheel: str = ""
    component: str = ""


class Component(NamedTuple):
    """One folder of ``third_party/``: a subtree of an upstream, or a link to a folder of this repository.

    ``path`` is where the component lies both in the upstream's tree and under ``third_party/<name>``; empty for a
    whole upstream. ``link`` is set for links only. Git is asked where there is no ``wheel``, or nobody offers it.
    ``commit`` is set where a file says it; where that is one of another component, ``version`` is empty, and the lock
    has no pin: the pin of the other fixes its bytes.
    """

    name: str
    groups: tuple[str, ...]
    url: str = ""
    version: str = ""
    tag: str = ""
    path: str = ""
    wheel: Wheel | None = None
    link: str = ""
    commit: Named | None = None

    @property
    def follows(self) -> str:
        """The component whose tree names this one's commit, or nothing."""
        return self.commit.component if self.commit else ""

    @property
    def keeps_upstream_commit(self) -> bool:
        """Whether the tree's history starts at the upstream's own commit.

        A wheel does not hold the upstream's commit, nor does a subtree have one: such components start at a commit
        of ours, the same by git.
        """
        return not self.path and self.wheel is None

    def address(self, mirror: str | None) -> str:
        """Return where it is fetched from: its upstream, or a mirror that keeps it under its last name."""
        return f"{mirror.rstrip('/')}/{self.url.rstrip('/').rpartition('/')[2]}" if mirror else self.url


class Manifest(NamedTuple):
    """All components by name, in the order of the file."""

    components: tuple[Component, ...]

    def named(self, name: str) -> Component:
        """Return the component of a name."""
        known = {component.name: component for component in self.components}
        if name not in known:
            raise errors.UsageError(f"{name}: no such component in sources.yaml; there are {', '.join(known)}")
        return known[name]

    def of(self, groups: Iterable[str]) -> tuple[Component, ...]:
        """Return the components of any of these groups."""
        wanted = set(groups)
        return tuple(component for component in self.components if wanted & set(component.groups))


class Pin(NamedTuple):
    """The pinned bytes of one component; None where no source was read that says.

    ``commit`` is the upstream's, and ``root_tree`` the hash of its whole tree where the component is only a part of it.
    ``tree`` is git's hash of the component before patches, which ``archives`` hold as well: either of the two fixes all
    bytes. ``patches`` are in their order, and must give ``patched_commit`` and ``patched_tree``.
    """

    version: str
    commit: str | None
    tree: str | None
    root_tree: str | None = None
    archives: Digests = ()
    patches: Digests = ()
    patched_commit: str | None = None
    patched_tree: str | None = None

    @property
    def fixed(self) -> bool:
        """Whether the bytes before patches are fixed: a commit of git fixes its tree, and a tree is its bytes."""
        return bool(self.commit or self.tree)


def load(path: Path) -> Manifest:
    """Read and check ``sources.yaml``.

    Whoever edits it edits the Python beside it as well: mistakes are named, and nothing is mistrusted but bytes.
    """
    import jsonschema
    import yaml

    try:
        document = yaml.safe_load(path.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise errors.ManifestError(f"{path.name}: cannot be read ({' '.join(str(error).split())})") from error
    rules = json.loads(SCHEMA.read_text(encoding="utf-8"))
    fault = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(rules).iter_errors(document))
    if fault is not None:
        where = ".".join(str(part) for part in fault.absolute_path) or "the document"
        raise errors.ManifestError(f"{path.name}: {where}: {' '.join(fault.message.split())[:300]}")
    wanted = Manifest(tuple(_component(name, entry) for name, entry in document["components"].items()))
    for each in wanted.components:
        if each.follows and wanted.named(each.follows).follows:
            raise errors.ManifestError(f"{path.name}: {each.name}: {each.follows} has no version of its own")
    return wanted


def _component(name: str, entry: dict[str, Any]) -> Component:
    version = entry.get("version", "")
    fields = {key: entry.get(key, "") for key in ("url", "path", "link", "version")}
    tag = entry.get("tag", "").replace("{version}", version)
    wheel = {key: text.replace("{version}", version) for key, text in entry.get("wheel", {}).items()}
    named = Named(**entry["commit"]) if "commit" in entry else None
    return Component(
        name, tuple(entry["groups"]), tag=tag, wheel=Wheel(**wheel) if wheel else None, commit=named, **fields
    )


def load_lock(path: Path) -> dict[str, Pin]:
    """Read and check ``sources.lock``."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["components"]
        pins = {
            name: Pin(**{**entry, **{key: tuple(entry[key].items()) for key in ("archives", "patches")}})
            for name, entry in entries.items()
        }
        found = {f"components.{name}.{field}": getattr(pin, field) for name, pin in pins.items() for field in _OBJECTS}
        sums = {f"{name}: {file}": sha for name, pin in pins.items() for file, sha in (*pin.archives, *pin.patches)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise errors.ManifestError(f"{path.name}: is malformed ({error}); restore it with git") from error
    files.check_values(path.name, found, "[0-9a-f]{40}", "hash of git")
    files.check_values(path.name, sums, "[0-9a-f]{64}", "sha256")
    return pins


def read_pin(path: Path, name: str, field: str) -> str | None:
    """Return one field of one component, None where it is null or absent; nothing else is checked, to start fast."""
    held = files.read_object(path).get("components", {}).get(name, {}).get(field)
    return None if held is None else str(held)


def pin_of(component: Component, pins: Mapping[str, Pin]) -> Pin:
    """Return the pin of a component, or raise if the lock does not know it at this version."""
    pin = pins.get(component.name)
    if pin is None or pin.version != component.version:
        held = "nothing" if pin is None else pin.version
        raise errors.PinError(
            f"{component.name}: sources.yaml wants {component.version}, sources.lock pins {held}; "
            f"run `python -m tooling bump {component.name} {component.version}`"
        )
    return pin


def save_lock(path: Path, wanted: Manifest, pins: Mapping[str, Pin]) -> None:
    """Write ``sources.lock`` whole or not at all, components in the order of the manifest."""
    entries = {}
    for component in wanted.components:
        if component.name in pins and not component.follows:
            entry = pins[component.name]._asdict()
            entry |= {key: dict(entry[key]) for key in ("archives", "patches")}
            entries[component.name] = {key: held for key, held in entry.items() if held or key != "root_tree"}
    files.write_json(path, {"format": 1, "about": _ABOUT, "components": entries})
