"""What a build would read of this tree although no commit holds it: a token in ``.env``, a key, somebody's trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workflows import errors, proc

IGNORE = "docker/Dockerfile.dockerignore"
# Trees of their own of which images get files, and where a Python that was given lies for as long as a build runs.
_MAXTEXT = "third_party/maxtext"
_OF_JAXLIB = ("third_party/jax", "third_party/xla")
_OVERRIDE = "third_party/multimesh"
_OURS = "docker/context/python.tar.gz"


def untracked(root: Path, *, jaxlib_from_source: bool = False) -> tuple[str, ...]:
    """Return what a build can read and no commit of ours holds; none where this repository is no tree of git.

    Files that git does not track, ignored ones too, or no longer looks at; trees without git; an override of MultiMesh.
    """
    lines = (root / IGNORE).read_text(encoding="utf-8").splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    named = [pattern[1:] for pattern in patterns if pattern.startswith("!") and "third_party" not in pattern]
    found = [name for name in _others(root, *(f":(top){name}" for name in named)) if name != _OURS]
    for place in (_MAXTEXT, _OVERRIDE, *(_OF_JAXLIB if jaxlib_from_source else ())):
        if not (root / place).is_dir() or (root / place).is_symlink():
            continue
        if place == _OVERRIDE or not (root / place / ".git").exists():
            found.append(place)
        else:
            found += [f"{place}/{name}" for name in _others(root / place)]
    if not found:
        return ()
    from docker.utils.build import PatternMatcher  # takes longer than all else here, and is seldom needed

    ignored: Any = PatternMatcher(patterns)  # its types ask for a path, its code for a name
    return tuple(sorted(name for name in found if not ignored.matches(name)))


def check(root: Path, *, jaxlib_from_source: bool = False) -> None:
    """Refuse to push what holds such files.

    Raises
    ------
    PinError
        Names them.
    """
    if files := untracked(root, jaxlib_from_source=jaxlib_from_source):
        more = f" and {len(files) - 5} more" if len(files) > 5 else ""
        raise errors.PinError(
            f"{', '.join(files[:5])}{more}: git does not track what the image would hold; commit, move or remove it, "
            "and bring back what lies in third_party/ with ./bootstrap.sh --group run"
        )


def _others(tree: Path, *paths: str) -> list[str]:
    """Return the files of a tree that are not plainly tracked (H): of those that git must not look at it hides changes."""
    told = proc.run(["git", "-C", tree, "ls-files", "--cached", "--others", "-v", "-z", "--", *paths], check=False)
    return [] if told.returncode else [entry[2:] for entry in told.text.split("\0") if entry and entry[0] != "H"]
