"""``sources.lock``: the exact bytes of every component, before and after its patches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workflows import errors, files

if TYPE_CHECKING:
    from workflows.sources.manifest import Component, Manifest

SCHEMA = Path(__file__).with_name("lock.schema.json")
_HEAD = """\
# The exact bytes of third_party/; written by `python -m workflows lock` and `bump`.
# null: no source was read that says.
"""


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
        File name and sha256 of each archive that holds the same tree.
    patches
        File name and sha256 of each patch, in order.
    patched_commit, patched_tree
        What the patches must give.
    """

    version: str
    commit: str | None
    tree: str | None
    root_tree: str | None = None
    archives: tuple[tuple[str, str | None], ...] = ()
    patches: tuple[tuple[str, str | None], ...] = ()
    patched_commit: str | None = None
    patched_tree: str | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of the pins that are null."""
        names = [
            field for field in ("commit", "tree", "patched_commit", "patched_tree") if getattr(self, field) is None
        ]
        return (*names, *(f"sha256 of {file}" for file, digest in self.archives if digest is None))


def load(path: Path) -> dict[str, Pin]:
    """Read and check ``sources.lock``."""
    from workflows.sources import document  # a YAML and a schema reader take longer to import than `value` does in all

    raw = document.load(path, SCHEMA)
    return {name: _pin(entry) for name, entry in raw["components"].items()}


def _pin(entry: Mapping[str, Any]) -> Pin:
    digests = {key: tuple(entry[key].items()) for key in ("archives", "patches")}
    return Pin(**{**entry, **digests})


def value(path: Path, name: str, field: str) -> str | None:
    """Return the text of one field of one component, in the form that `save` writes; None where it is null or absent.

    For what must start fast: nothing else of the file is read or checked.
    """
    text = path.read_text(encoding="utf-8")
    found = re.search(rf'^  {re.escape(name)}:\n(?:    .*\n)*?    {re.escape(field)}: "([^"]*)"$', text, re.MULTILINE)
    return found[1] if found else None


def pin_of(component: Component, pins: Mapping[str, Pin]) -> Pin:
    """Return the pin of a component, or raise if the lock does not know it at this version."""
    pin = pins.get(component.name)
    if pin is None or pin.version != component.version:
        held = "nothing" if pin is None else pin.version
        raise errors.PinError(
            f"{component.name}: sources.yaml wants {component.version}, sources.lock pins {held}; "
            f"run `python -m workflows bump {component.name} {component.version}`"
        )
    return pin


def save(path: Path, manifest: Manifest, pins: Mapping[str, Pin]) -> None:
    """Write ``sources.lock`` whole or not at all."""
    files.write(path, render(manifest, pins))


def render(manifest: Manifest, pins: Mapping[str, Pin]) -> str:
    """Return the text of ``sources.lock``, components in the order of the manifest."""
    lines = [_HEAD, "format: 1\ncomponents:\n"]
    for component in manifest.components:
        if (pin := pins.get(component.name)) is not None:
            lines.append(f'  {component.name}:\n    version: "{pin.version}"\n')
            fields = ["commit", *(["root_tree"] if pin.root_tree else []), "tree"]
            lines += [_line(field, getattr(pin, field)) for field in fields]
            lines += [_digests(field, getattr(pin, field)) for field in ("archives", "patches")]
            lines += [_line(field, getattr(pin, field)) for field in ("patched_commit", "patched_tree")]
    return "".join(lines)


def _line(field: str, value: str | None) -> str:
    return f"    {field}: null\n" if value is None else f'    {field}: "{value}"\n'


def _digests(field: str, digests: tuple[tuple[str, str | None], ...]) -> str:
    if not digests:
        return f"    {field}: {{}}\n"
    return f"    {field}:\n" + "".join("  " + _line(f'"{file}"', digest) for file, digest in digests)
