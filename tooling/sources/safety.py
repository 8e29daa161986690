"""Checks names in an archive or a patch: paths stay inside their tree."""

from __future__ import annotations

import re

from tooling.sources.git import SCHEMES

COMMIT = re.compile(r"[0-9a-f]{40}")
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


def shown(url: str) -> str:
    """Return a url as an error may show it, without any part that could be a password."""
    return re.sub(r"//[^/]*@", "//***@", url)


def url_fault(url: str) -> str | None:
    """Say why an address of the command line may not be fetched from, or return None."""
    if not re.match(rf"({'|'.join(SCHEMES)})://[^-]", url):
        return f"must begin with one of {', '.join(scheme + '://' for scheme in SCHEMES)}"
    if re.match(r"\w+://[^/@]*:[^/@]*@", url):
        return "contains a password; keep credentials out of command lines"
    return None
