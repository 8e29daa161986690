"""Holds every action that a workflow uses against ``.github/actions.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from workflows import errors

_COMMIT = re.compile(r"[0-9a-f]{40}")
_USES = re.compile(
    r"^\s*(?:-\s+)?uses:\s*(?P<action>[^\s@#]+)(?:@(?P<ref>\S+))?(?:\s+#\s*(?P<comment>\S+))?", re.MULTILINE
)


@dataclass(frozen=True)
class Action:
    """A pinned action: ``commit`` is None where nobody has read it yet."""

    version: str
    commit: str | None


@dataclass(frozen=True)
class Use:
    """One ``uses:`` of a workflow."""

    file: str
    line: int
    action: str
    ref: str
    comment: str


def load(path: Path) -> dict[str, Action]:
    """Read the pins.

    Raises
    ------
    ManifestError
        The file is no mapping of ``owner/name`` to version and commit.
    """
    try:
        raw: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        pins = {name: Action(entry["version"], entry["commit"]) for name, entry in raw["actions"].items()}
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise errors.ManifestError(
            f"{path.name}: is not a list of actions with version and commit ({error})"
        ) from error
    for name, pin in pins.items():
        if pin.commit is not None and not _COMMIT.fullmatch(str(pin.commit)):
            raise errors.ManifestError(
                f"{path.name}: {name}: '{pin.commit}' is no full commit; copy one, or write null"
            )
    return pins


def uses(folder: Path) -> Iterator[Use]:
    """Yield what the workflows of a folder use, those of this repository left out."""
    for path in sorted(folder.glob("*.yml")):
        text = path.read_text(encoding="utf-8")
        for match in _USES.finditer(text):
            if not match["action"].startswith("./"):
                line = text.count("\n", 0, match.start("action")) + 1
                yield Use(path.name, line, match["action"], match["ref"] or "", match["comment"] or "")


def faults(pins: Mapping[str, Action], found: Iterator[Use]) -> list[str]:
    """Return one line for each use that is not the pinned one, each pin without a commit, each that nothing uses."""
    said, used = [], set()
    for use in found:
        used.add(use.action)
        where, pin = f"{use.file}:{use.line}: {use.action}", pins.get(use.action)
        if pin is None:
            said.append(f"{where} is not in .github/actions.yaml; add it with the commit of a tag that you read")
        elif pin.commit is not None and (use.ref, use.comment) != (pin.commit, pin.version):
            said.append(f"{where} is not the pinned one; write @{pin.commit} # {pin.version}")
    said += [f"actions.yaml: {name} has no commit; read that of {pin.version} in its repository"
             for name, pin in pins.items() if pin.commit is None]  # fmt: skip
    said += [f"actions.yaml: no workflow uses {name}; remove it" for name in pins if name not in used]
    return said
