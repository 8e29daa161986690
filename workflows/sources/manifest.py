"""``sources.yaml``: which components ``third_party/`` holds, and how each may be fetched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from workflows import errors
from workflows.sources import document, safety

SCHEMA = Path(__file__).with_name("manifest.schema.json")


@dataclass(frozen=True)
class Transport:
    """One way to get a component's bytes.

    ``kind`` says which fields count: none for ``git``; ``package``, ``file`` and ``root`` for ``pypi``; ``url`` and
    ``root`` for ``archive``. ``root`` is the folder of the archive that becomes the component's ``path``.
    """

    kind: Literal["git", "pypi", "archive"]
    package: str = ""
    file: str = ""
    url: str = ""
    root: str = ""


@dataclass(frozen=True)
class Component:
    """One folder of ``third_party/``: a subtree of an upstream, or a link to a folder of this repository.

    ``path`` is where the component lies both in the upstream's tree and under ``third_party/<name>``; empty for a
    whole upstream. ``link`` is set for links only.
    """

    name: str
    groups: tuple[str, ...]
    url: str = ""
    version: str = ""
    tag: str = ""
    path: str = ""
    transports: tuple[Transport, ...] = ()
    link: str = ""

    @property
    def keeps_upstream_commit(self) -> bool:
        """Whether the tree's history starts at the upstream's own commit.

        An archive does not hold the upstream's commit, nor does a subtree have one: such components start at a commit
        of ours, the same for every transport.
        """
        return not self.path and all(transport.kind == "git" for transport in self.transports)


@dataclass(frozen=True)
class Manifest:
    """All components by name, in the order of the file."""

    components: tuple[Component, ...]

    def __getitem__(self, name: str) -> Component:
        for component in self.components:
            if component.name == name:
                return component
        known = ", ".join(component.name for component in self.components)
        raise errors.UsageError(f"{name}: no such component in sources.yaml; there are {known}")

    def of(self, groups: Iterable[str]) -> tuple[Component, ...]:
        """Return the components of any of these groups."""
        wanted = set(groups)
        return tuple(component for component in self.components if wanted & set(component.groups))


def load(path: Path) -> Manifest:
    """Read and check ``sources.yaml``."""
    raw = document.load(path, SCHEMA)
    manifest = Manifest(tuple(_component(name, entry) for name, entry in raw["components"].items()))
    for component in manifest.components:
        for fault in _faults(component):
            raise errors.ManifestError(f"{path.name}: components.{component.name}.{fault}")
    return manifest


def _component(name: str, entry: dict[str, Any]) -> Component:
    if "link" in entry:
        return Component(name, tuple(entry["groups"]), link=entry["link"])
    return Component(
        name,
        tuple(entry["groups"]),
        url=entry["url"],
        version=entry["version"],
        tag=entry.get("tag", "").replace("{version}", entry["version"]),
        path=entry.get("path", ""),
        transports=tuple(_transport(transport, entry["version"]) for transport in entry["transports"]),
    )


def _transport(entry: str | dict[str, Any], version: str) -> Transport:
    if isinstance(entry, str):
        return Transport("git")
    if "pypi" in entry:
        fields = entry["pypi"]
        return Transport("pypi", fields["package"], fields["file"].replace("{version}", version), root=fields["root"])
    url, root = entry["archive"]["url"], entry["archive"]["root"]
    url, root = url.replace("{version}", version), root.replace("{version}", version)
    return Transport("archive", file=url.rpartition("/")[2], url=url, root=root)


def _faults(component: Component) -> Iterable[str]:
    for field, value in (("path", component.path), ("link", component.link)):
        if value and (fault := safety.path_fault(value)):
            yield f"{field}: '{value}' {fault}; name a folder inside the tree"
    if component.url and (fault := safety.url_fault(component.url)):
        yield f"url: '{safety.shown(component.url)}' {fault}"
    if component.tag and (".." in component.tag or "{" in component.tag):
        yield f"tag: '{component.tag}' is no tag name"
    for number, transport in enumerate(component.transports):
        if transport.url and (fault := safety.url_fault(transport.url)):
            yield f"transports.{number}.url: '{safety.shown(transport.url)}' {fault}"
        if transport.root and transport.root != "." and (fault := safety.path_fault(transport.root)):
            yield f"transports.{number}.root: '{transport.root}' {fault}"
