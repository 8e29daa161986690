"""``sources.lock``: the exact bytes of every component, before and after its patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tooling.core import errors, files
from tooling.sources import manifest
from tooling.sources.manifest import Component, Manifest

_ABOUT = [
    "The exact bytes of third_party/; written by `python -m tooling lock` and `bump`.",
    "null: no source was read that says.",
]
Digests = tuple[tuple[str, str | None], ...]
"""File names with their sha256."""


@dataclass(frozen=True)
class Pin:
    """The pinned bytes of one component; None where no source was read that says.

    Attributes
    ----------
    commit, root_tree
        The upstream's commit, and the hash of its whole tree where the component is only a part of it.
    tree
        Git's hash of the component's tree before patches.
    archives
        Those that hold the same tree.
    patches
        In order.
    patched_commit, patched_tree
        What the patches must give.
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
    def missing(self) -> tuple[str, ...]:
        """Return the names of the pins that are null."""
        fields = ("commit", "tree", "patched_commit", "patched_tree")
        names = tuple(field for field in fields if getattr(self, field) is None)
        return names + tuple(f"sha256 of {file}" for file, digest in self.archives if digest is None)


@dataclass(frozen=True)
class Move:
    """The old and the new value of one pin; ``fault`` says why it stayed."""

    name: str
    old: str
    new: str
    fault: str = ""

    @property
    def line(self) -> str:
        """A row of the report's table."""
        old, new = (value.removeprefix("sha256:")[:12] for value in (self.old, self.new))
        outcome = " ".join(self.fault.split()).replace("|", "/") or "moved"
        return f"| {self.name} | {old} | {new} | {outcome} |"


def load(path: Path) -> dict[str, Pin]:
    """Read and check ``sources.lock``."""
    raw = manifest.read(path, "lock.schema.json")
    return {
        name: Pin(**{**entry, **{key: tuple(entry[key].items()) for key in ("archives", "patches")}})
        for name, entry in raw["components"].items()
    }


def value(path: Path, name: str, field: str) -> str | None:
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


def save(path: Path, wanted: Manifest, pins: Mapping[str, Pin]) -> None:
    """Write ``sources.lock`` whole or not at all, components in the order of the manifest."""
    entries = {}
    for component in wanted.components:
        if component.name in pins:
            entry = asdict(pins[component.name])
            entry |= {key: dict(entry[key]) for key in ("archives", "patches")}
            entries[component.name] = {key: held for key, held in entry.items() if held or key != "root_tree"}
    files.write_json(path, {"format": 1, "about": _ABOUT, "components": entries})
