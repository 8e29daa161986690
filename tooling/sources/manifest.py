"""``sources.yaml``: which components ``third_party/`` holds, and how each may be fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tooling.core import errors

GROUPS = ("run", "source", "dev")
CUDA = ("cuda12", "cuda13")  # only where asked for: packages of 5 GB, for GPUs
ALL_GROUPS = (*GROUPS, "image", *CUDA, "data")  # data, too, is 2 GB; image is what building an image needs


@dataclass(frozen=True)
class Wheel:
    """The wheel ``file`` of a ``package``, which has the component's ``path`` in its folder ``root``."""

    package: str
    file: str
    root: str


@dataclass(frozen=True)
class Component:
    """One folder of ``third_party/``: a subtree of an upstream, or a link to a folder of this repository.

    ``path`` is where the component lies both in the upstream's tree and under ``third_party/<name>``; empty for a
    whole upstream. ``link`` is set for links only. Git is asked where there is no ``wheel``, or nobody offers it.
    """

    name: str
    groups: tuple[str, ...]
    url: str = ""
    version: str = ""
    tag: str = ""
    path: str = ""
    wheel: Wheel | None = None
    link: str = ""

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
    raw = read(path, "manifest.schema.json")
    return Manifest(tuple(_component(name, entry) for name, entry in raw["components"].items()))


def _component(name: str, entry: dict[str, Any]) -> Component:
    version = entry.get("version", "")
    fields = {key: entry.get(key, "") for key in ("url", "path", "link", "version")}
    tag = entry.get("tag", "").replace("{version}", version)
    wheel = {key: text.replace("{version}", version) for key, text in entry.get("wheel", {}).items()}
    return Component(name, tuple(entry["groups"]), tag=tag, wheel=Wheel(**wheel) if wheel else None, **fields)


def read(path: Path, schema: str) -> dict[str, Any]:
    """Return a YAML document, if it follows a JSON schema that lies beside this module.

    Whoever edits it edits the Python beside it as well: mistakes are named, and nothing is mistrusted but bytes.
    """
    import jsonschema
    import yaml

    try:
        document = yaml.safe_load(path.read_bytes().decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise errors.ManifestError(f"{path.name}: cannot be read ({' '.join(str(error).split())})") from error
    rules = json.loads(Path(__file__).with_name(schema).read_text(encoding="utf-8"))
    fault = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(rules).iter_errors(document))
    if fault is not None:
        where = ".".join(str(part) for part in fault.absolute_path) or "the document"
        raise errors.ManifestError(f"{path.name}: {where}: {' '.join(fault.message.split())[:300]}")
    return dict(document)
