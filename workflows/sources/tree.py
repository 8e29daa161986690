"""What lies at ``third_party/<name>``: ours and clean, or something that a sync must not lose."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from workflows import files
from workflows.sources import git, quick

RECORD = "multimesh.json"
# What running the sources leaves beside them; without this every tree would be dirty after its first use.
EXCLUDE = "__pycache__/\n*.pyc\n*.egg-info/\n"


@dataclass(frozen=True)
class Record:
    """What this tooling wrote into a tree when it made it.

    ``commit`` is the branch's commit after the patches, ``base`` the one before; ``source`` says where the bytes came
    from, ``override`` what the user named instead of the lock, if anything; ``series`` is a digest of the patches.
    """

    version: str
    base: str
    commit: str
    source: str
    override: str | None = None
    series: str = ""


State = Literal["missing", "clean", "dirty", "commits", "unknown", "link"]


@dataclass(frozen=True)
class Observed:
    """One look at ``third_party/<name>``.

    ``clean``: as this tooling left it. ``dirty``: files were changed or added. ``commits``: the branch has moved.
    ``unknown``: not made by this tooling. ``link``: a symbolic link, to ``target``.
    """

    state: State
    head: str | None = None
    record: Record | None = None
    changed: tuple[str, ...] = ()
    target: str = ""


def observe(place: Path) -> Observed:
    """Look at a folder of ``third_party/``; reads only, and runs one ``git status``."""
    if place.is_symlink():
        return Observed("link", target=os.readlink(place))
    if not place.exists():
        return Observed("missing")
    record = read_record(place)
    if record is None:
        return Observed("unknown")
    status = git.Repo(place)(*quick.STATUS, check=False)
    if status.returncode:
        return Observed("unknown", record=record)
    lines = status.stdout.decode("utf-8", "surrogateescape").split("\0")
    head = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    changed = tuple(_path(line) for line in lines if line and not line.startswith("#"))
    state: State = "dirty" if changed else "clean" if head == record.commit else "commits"
    return Observed(state, head, record, changed)


def _path(line: str) -> str:
    """Return the path of a porcelain-v2 line: it stands after 8 fields, 10 if unmerged, 1 if untracked."""
    fields = {"1": 8, "u": 10}.get(line[0], 1)
    return line.split(" ", fields)[-1]


def read_record(place: Path) -> Record | None:
    """Return what this tooling recorded in a tree, or None for a tree that is not its own."""
    try:
        raw: dict[str, Any] = json.loads((place / ".git" / RECORD).read_text(encoding="utf-8"))
        return Record(**raw)
    except (OSError, ValueError, TypeError):
        return None


def write_record(place: Path, record: Record) -> None:
    """Record in a tree what it holds; whole or not at all."""
    files.write_json(place / ".git" / RECORD, asdict(record))
