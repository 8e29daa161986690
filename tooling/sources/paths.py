"""Names of files and links that archives and patches bring: what may not be used inside a component's tree."""

from __future__ import annotations

import re

# Names that some file system reads as `.git`: other case, NTFS short names, trailing dots or blanks, HFS+ ignorables.
_GIT_ALIAS = re.compile(r"(\.git|git~\d+)[ .]*(:.*)?", re.IGNORECASE)
_IGNORABLE = re.compile("[\u200c-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def path_fault(path: str) -> str | None:
    """Say why a path may not be used inside a component's tree, or return None."""
    if _CONTROL.search(path):
        return "contains control characters"
    if path.startswith(("/", "~")) or re.match(r"[A-Za-z]:", path):
        return "is absolute"
    if "\\" in path:
        return "contains a backslash"
    for part in path.split("/"):
        if part == "..":
            return "leaves its tree by '..'"
        if part in ("", "."):
            return "has an empty or '.' part"
        if _GIT_ALIAS.fullmatch(_IGNORABLE.sub("", part)):
            return "goes into .git"
    return None


def link_fault(path: str, target: str) -> str | None:
    """Say why a symbolic link at ``path`` (inside a tree) may not point to ``target``, or return None."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((count for count, part in enumerate(parts) if part != ".."), len(parts))
    if target.startswith("/") or not target or up > path.count("/"):
        return "points out of its tree"
    # After a name, '..' may follow another link and leave the tree although the text of the path stays inside.
    return path_fault("/".join(parts[up:])) if parts[up:] else None
