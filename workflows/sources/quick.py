"""The fast answer to "is there anything to do?": no YAML, no schema, no network; one ``git status`` a component.

The last full sync left a summary: a digest of all that decides what ``third_party/`` should
hold, and what it put there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workflows.sources import tree
from workflows.sources.workspace import Workspace, write_json

_FORMAT = b"1"


def _summary(workspace: Workspace) -> Path:
    return workspace.third_party / ".synced.json"


def inputs_digest(workspace: Workspace) -> str:
    """Return one hash of the manifest, the lock and every file under ``patches/``."""
    digest = hashlib.sha256(_FORMAT)
    patches = workspace.root / "patches"
    files = sorted(str(Path(folder, name)) for folder, _, names in os.walk(patches) for name in names)
    for path in (str(workspace.manifest), str(workspace.lock), *files):
        with open(path, "rb") as file:
            content = file.read()
        digest.update(f"{path}\0{len(content)}\0".encode("utf-8", "surrogateescape") + content)
    return digest.hexdigest()


def remember(workspace: Workspace, digest: str, expected: Mapping[str, Mapping[str, Any]]) -> None:
    """Record what a finished sync left at each place: ``groups`` and either ``commit`` or ``target``."""
    write_json(_summary(workspace), {"inputs": digest, "expected": expected})


def forget(workspace: Workspace) -> None:
    """Make the next sync look at everything."""
    _summary(workspace).unlink(missing_ok=True)


def in_place(workspace: Workspace, groups: Iterable[str]) -> list[str] | None:
    """Return the names of the components of these groups if all are in place and clean, else None."""
    try:
        summary = json.loads(_summary(workspace).read_text(encoding="utf-8"))
        if summary["inputs"] != inputs_digest(workspace):
            return None
        wanted = set(groups)
        expected = {name: entry for name, entry in summary["expected"].items() if wanted & set(entry["groups"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not all(entry.get("done") for entry in expected.values()):
        return None
    with ThreadPoolExecutor(max(1, len(expected))) as pool:
        looks = pool.map(lambda name: tree.observe(workspace.place(name)), expected)
        right = [_matches(look, entry) for look, entry in zip(looks, expected.values(), strict=True)]
    return list(expected) if all(right) else None


def _matches(look: tree.Observed, entry: Mapping[str, Any]) -> bool:
    if look.state == "link":
        return look.target == entry.get("target")
    return look.state == "clean" and look.head == entry.get("commit")
